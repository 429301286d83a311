//! Ranks as threads of one process, on as many "nodes" as a test wants, over the real transports.
//!
//! With `SOFT_DEVICE=cuda` or `hip` the ranks' data is on a soft GPU ([`soft`]), each rank's on a device of its own; with
//! `SOFT_DEVICE=inverted` it is on the toy device of examples/device.

#[path = "../../examples/device/inverted.rs"]
mod inverted;

use crate::cases::host_region;
use crate::soft;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::sync::atomic::AtomicBool;
use std::sync::{mpsc, Arc, Barrier, Mutex, OnceLock};
use std::time::Duration;
use strata::communicator::device::MakeDevice;
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation};
use strata::device::gpu::memory::DeviceBuffer;
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::device::StreamRef;
use strata::error::Result;
use strata::memory::{DeviceRegion, Region};
use strata::topo::{Grid, Rank};

/// One rank of a thread world.
pub struct Member {
    pub comm: Arc<Comm>,
    pub rank: usize,
    pub grid: Arc<Grid>,
    /// All ranks meet here.
    pub barrier: Arc<Barrier>,
    /// One slot a rank, to compare results.
    pub board: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Runs `body` on every rank of `grid`, each in a thread, and joins them all; a rank that hangs is named.
pub fn run(grid: Grid, body: impl Fn(&Member) + Send + Sync + 'static) {
    let nranks = grid.nranks();
    let grid = Arc::new(grid);
    let body = Arc::new(body);
    let id = Comm::unique_id().expect("a unique id");
    let barrier = Arc::new(Barrier::new(nranks));
    let board = Arc::new(Mutex::new(vec![Vec::new(); nranks]));
    let (send, done) = mpsc::channel();
    let threads: Vec<_> = (0..nranks)
        .map(|rank| {
            let (grid, body, barrier, board, send) =
                (grid.clone(), body.clone(), barrier.clone(), board.clone(), send.clone());
            std::thread::spawn(move || {
                let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
                let options = CommOptions { host_id, ..options() };
                let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: gpu(rank) };
                let comm = Comm::init(params, &Arc::new(AtomicBool::new(false))).expect("init");
                let member = Member { comm, rank, grid, barrier, board };
                body(&member);
                member.comm.destroy().expect("destroy");
                send.send(rank).ok();
            })
        })
        .collect();
    drop(send);
    let mut missing: Vec<usize> = (0..nranks).collect();
    while !missing.is_empty() {
        match done.recv_timeout(Duration::from_secs(300)) {
            Ok(rank) => missing.retain(|&other| other != rank),
            Err(_) => break,
        }
    }
    assert!(missing.is_empty(), "ranks {missing:?} on {grid} did not end");
    threads.into_iter().for_each(|thread| thread.join().expect("a rank's thread"));
}

/// The bytes of a buffer as a region of the device, which is the host, or gets a copy ([`launch_all`]).
pub fn region(bytes: &mut [u8]) -> DeviceRegion {
    host_region(bytes).as_device()
}

/// The soft GPU of a rank, if the tests are to run on one. Ranks may share one.
pub fn gpu(rank: usize) -> Option<Arc<GpuDevice>> {
    static DRIVER: OnceLock<Option<Library>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let file = match std::env::var("SOFT_DEVICE").ok()?.as_str() {
            "cuda" => soft::cuda_dir().join("libcuda.so.1"),
            "hip" => soft::hip_dir().join("libamdhip64.so.6"),
            "inverted" => return None,
            other => panic!("SOFT_DEVICE={other}"),
        };
        // SAFETY: its initialisers may run at any time; because it is our own double.
        Some(unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.expect("the soft GPU"))
    });
    driver.as_ref()?;
    GpuDevice::of_thread(Some((rank % 8) as i32)).expect("the soft GPU's device")
}

/// The toy device, if the tests are to run on it.
pub fn toy() -> Option<MakeDevice> {
    std::env::var("SOFT_DEVICE").is_ok_and(|device| device == "inverted").then_some(inverted::INVERTED)
}

/// Whether ranks' data is on a device.
pub fn is_on_device() -> bool {
    gpu(0).is_some() || toy().is_some()
}

/// The options of a communicator whose data is where the tests are to run.
pub fn options() -> CommOptions {
    CommOptions { make_device: toy(), ..CommOptions::default() }
}

/// The bytes that regions have, as few ranges.
fn merged(regions: &[DeviceRegion]) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = regions
        .iter()
        .filter(|region| !region.is_empty())
        .map(|region| (region.address() as usize, region.address() as usize + region.len()))
        .collect();
    ranges.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut().filter(|last| start < last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => merged.push((start, end)),
        }
    }
    merged
}

/// Puts what regions hold onto the toy device, or back.
fn invert(regions: &[DeviceRegion]) {
    for (start, end) in merged(regions) {
        // SAFETY: the bytes must stay, and nobody else touch them; because the test that made regions of them waits.
        let region = unsafe { Region::new(start as *mut u8, end - start) };
        let mut bytes = vec![0; end - start];
        region.read(&mut bytes);
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
        region.write(&bytes);
    }
}

/// The memory of operations.
fn regions(batch: &[Launch]) -> Vec<DeviceRegion> {
    let mut regions = Vec::new();
    for launch in batch {
        match &launch.operation {
            Operation::Collective(call) => {
                regions.extend([call.input, call.output].into_iter().chain(call.factor_at).chain(call.residual));
            }
            Operation::Send { data, .. } | Operation::Recv { data, .. } => regions.push(*data),
        }
    }
    regions
}

/// Buffers of an operation on a device, and the stream that the program would use.
struct OnDevice {
    track: GpuStream,
    pairs: Vec<(Region, DeviceBuffer)>,
}

impl OnDevice {
    /// Copies what the operation may touch to the device. Regions that overlap are one.
    fn new(gpu: &Arc<GpuDevice>, regions: &[DeviceRegion]) -> OnDevice {
        let mut track = GpuStream::new(gpu).expect("a stream");
        let _entered = gpu.enter().expect("a context");
        let mut pairs = Vec::new();
        for (start, end) in merged(regions) {
            // SAFETY: the bytes must stay until `back` has ended; because the test that made regions of them waits for
            // it.
            let host = unsafe { Region::new(start as *mut u8, end - start) };
            // At the same distance from a boundary as on the host, so that alignment is what the test wants.
            let slack = start % 256;
            let memory = DeviceBuffer::new(gpu, end - start + slack).expect("device memory");
            let device = memory.region().address() + slack as u64;
            // SAFETY: both must stay until this has ended; because `back` waits for the stream.
            unsafe { track.to_device(device, host.as_ptr(), host.len()) }.expect("a copy");
            pairs.push((host, memory));
        }
        track.issued();
        OnDevice { track, pairs }
    }

    /// Where a buffer is on the device.
    fn place(&self, region: DeviceRegion) -> DeviceRegion {
        let start = region.address() as usize;
        let inside = |(host, _): &&(Region, DeviceBuffer)| {
            let first = host.as_ptr() as usize;
            start >= first && start + region.len() <= first + host.len()
        };
        match self.pairs.iter().find(inside) {
            Some((host, memory)) if !region.is_empty() => {
                let first = host.as_ptr() as usize;
                memory.region().part(first % 256 + start - first, region.len())
            }
            _ => DeviceRegion::EMPTY,
        }
    }

    /// Copies everything back, after what the stream was given, and waits.
    fn back(mut self, gpu: &Arc<GpuDevice>) {
        let _entered = gpu.enter().expect("a context");
        for (host, memory) in &self.pairs {
            let from = memory.region().address() + (host.as_ptr() as usize % 256) as u64;
            // SAFETY: both must stay until this has ended; because the stream is waited for below.
            unsafe { self.track.to_host(host.as_ptr(), from, host.len()) }.expect("a copy");
        }
        self.track.issued();
        self.track.settle();
    }
}

/// Launches operations where a test runs, and waits for them: on the null stream, or on streams of a soft GPU.
pub fn launch_all(batch: Vec<Launch>) -> Result<()> {
    launch_by(batch, launch)
}

/// The same, each by itself and all on one stream.
pub fn launch_in_order(batch: Vec<Launch>) -> Result<()> {
    launch_by(batch, |batch| batch.into_iter().try_for_each(|alone| launch(vec![alone])))
}

fn launch_by(batch: Vec<Launch>, launch: impl FnOnce(Vec<Launch>) -> Result<()>) -> Result<()> {
    let Some(gpu) = batch.first().and_then(|launch| launch.comm.gpu()).map(|device| device.gpu().clone()) else {
        if toy().is_none() {
            return launch(batch);
        }
        let regions = regions(&batch);
        invert(&regions);
        let outcome = launch(batch);
        invert(&regions);
        return outcome;
    };
    let regions = regions(&batch);
    let device = OnDevice::new(&gpu, &regions);
    let stream = StreamRef::Gpu(device.track.handle());
    let moved = batch.into_iter().map(|Launch { comm, operation, .. }| {
        let operation = match operation {
            Operation::Collective(call) => Operation::Collective(CollectiveCall {
                input: device.place(call.input),
                output: device.place(call.output),
                factor_at: call.factor_at.map(|place| device.place(place)),
                residual: call.residual.map(|place| device.place(place)),
                ..call
            }),
            Operation::Send { to, data, elements } => Operation::Send { to, data: device.place(data), elements },
            Operation::Recv { from, data, elements } => Operation::Recv { from, data: device.place(data), elements },
        };
        Launch { comm, operation, stream: stream.clone() }
    });
    let moved: Vec<Launch> = moved.collect();
    let comms: Vec<Arc<Comm>> = moved.iter().map(|launch| launch.comm.clone()).collect();
    launch(moved)?;
    device.back(&gpu);
    comms.iter().find_map(|comm| comm.failure()).map_or(Ok(()), Err)
}

impl Member {
    /// Runs one collective on the null stream.
    pub fn collective(&self, call: CollectiveCall) -> Result<()> {
        let operation = Operation::Collective(call);
        launch_all(vec![Launch { comm: self.comm.clone(), operation, stream: StreamRef::Null }])
    }
}
