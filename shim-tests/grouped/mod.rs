//! Groups of collectives of random kinds, sizes, types, roots, places, streams and carriers, which follow from seeds, on whatever device
//! a communicator has. Each stream brings the data of its own calls just before the group and takes the results away just behind it,
//! so a call that does not keep the order of its stream is seen. Every byte is compared, also of what lies between the buffers.

use crate::cases::host_region;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use strata::communicator::{
    group, launch, launch_one, CollectiveCall, Comm, Elements, Launch, Operation, WindowBounds,
};
use strata::device::gpu::memory::DeviceBuffer;
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::device::host::reference;
use strata::device::host::stream::HostStream;
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::Result;
use strata::memory::{DeviceRegion, Region};
use strata::plan::Collective;
use strata::sim::Random;
use strata::topo::Rank;

/// What memory holds that no call has written.
const GAP: u8 = 0x5a;
/// The most calls of a group.
const MOST_CALLS: u64 = 64;
/// Streams of a rank.
const STREAMS: u64 = 3;
/// Types whose sums of a few small numbers are exact.
const EXACT: [DataType; 8] = [
    DataType::I8,
    DataType::U8,
    DataType::I32,
    DataType::U64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::BF16,
];
const KINDS: [Collective; 8] = [
    Collective::AllReduce,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];

/// A call, as all ranks make it.
struct Recorded {
    collective: Collective,
    dtype: DataType,
    op: Option<RedOp>,
    count: usize,
    root: usize,
    name: Option<&'static str>,
}

/// Where a call's buffers are on one rank, counted from the start of the memory of all calls.
struct Spot {
    at: usize,
    bytes: usize,
    send: usize,
    sent: usize,
    recv: usize,
    received: usize,
    stream: usize,
}

/// A rank's streams, where its data is.
enum Place {
    /// The first is the null stream.
    Host(Vec<Arc<HostStream>>),
    /// A toy device, which stores each byte inverted, and has no streams.
    Toy,
    Gpu(Arc<GpuDevice>, Vec<GpuStream>),
}

/// One rank's side of the groups.
pub struct Grouped {
    comm: Arc<Comm>,
    place: Place,
    names: &'static [Option<&'static str>],
}

/// The groups of one seed, and where this rank has their memory.
struct Group {
    seed: u64,
    recorded: Vec<Recorded>,
    spots: Vec<Spot>,
    bytes: usize,
}

impl Recorded {
    fn blocks(&self, nranks: usize, rank: usize) -> (usize, usize) {
        let (rank, root) = (Rank::from_index(rank), Rank::from_index(self.root));
        (self.collective.input_blocks(nranks, rank, root), self.collective.output_blocks(nranks, rank, root))
    }

    fn block_bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// What the call leaves in element `index` of block `block` of a rank's result.
    fn result(&self, (seed, number, nranks): (u64, usize, usize), rank: usize, block: usize, index: usize) -> u64 {
        let of = |from: usize, block: usize| value(seed, number, from, block, index);
        let folded = |block: usize| {
            let all = (0..nranks).map(|from| of(from, block));
            match self.op {
                Some(RedOp::Max) => all.max().unwrap_or(0),
                Some(RedOp::Min) => all.min().unwrap_or(0),
                _ => all.sum(),
            }
        };
        match self.collective {
            Collective::AllReduce | Collective::Reduce => folded(0),
            Collective::ReduceScatter => folded(rank),
            Collective::Broadcast => of(self.root, 0),
            Collective::Scatter => of(self.root, rank),
            Collective::AllToAll => of(block, rank),
            _ => of(block, 0),
        }
    }
}

/// Element `index` of block `block` of what rank `from` sends in call `number`.
fn value(seed: u64, number: usize, from: usize, block: usize, index: usize) -> u64 {
    (seed * 7 + (number * 11 + from * 5 + block * 3 + index) as u64) % 13
}

/// The calls of a seed's group.
fn recorded(seed: u64, nranks: usize, names: &[Option<&'static str>]) -> Vec<Recorded> {
    let mut random = Random::new(seed);
    let most_calls = if random.one_in(3) { MOST_CALLS - 1 } else { 12 };
    let ncalls = 2 + random.below(most_calls);
    let kinds: Vec<Collective> = (0..1 + random.below(3)).map(|_| random.pick(&KINDS)).collect();
    let most = random.pick(&[1, 40, 3000, 30_000]);
    let (equal, roots) = (random.one_in(3), random.below(3));
    let one_type = random.one_in(2).then(|| random.pick(&EXACT));
    let one_name = random.one_in(2).then(|| random.pick(names));
    let call = |number: u64| {
        let collective = random.pick(&kinds);
        let dtype = one_type.unwrap_or_else(|| random.pick(&EXACT));
        let op = [RedOp::Sum, RedOp::Sum, RedOp::Max, RedOp::Min][random.below(4) as usize];
        let root = match roots {
            0 => 0,
            1 => number as usize % nranks,
            _ => random.below(nranks as u64) as usize,
        };
        Recorded {
            collective,
            dtype,
            op: collective.reduces().then_some(op),
            count: (if equal { most } else { 1 + random.below(most) }) as usize,
            root: if collective.has_root() { root } else { 0 },
            name: one_name.unwrap_or_else(|| random.pick(names)),
        }
    };
    (0..ncalls).map(call).collect()
}

impl Group {
    fn new(seed: u64, (nranks, rank): (usize, usize), names: &[Option<&'static str>]) -> Group {
        let recorded = recorded(seed, nranks, names);
        let mut own = Random::new(seed * 31 + rank as u64);
        let streams = 1 + own.below(STREAMS);
        let mut bytes = 0;
        let spot = |call: &Recorded| {
            let (sent, received) = call.blocks(nranks, rank);
            let block = call.block_bytes();
            let in_place = call.collective != Collective::AllToAll && sent > 0 && received > 0 && own.one_in(2);
            // Elements lie at multiples of their size, as on a device they must.
            let at = usize::next_multiple_of(bytes, call.dtype.size());
            let (send, recv, blocks) = match in_place {
                false => (at + received * block, at, sent + received),
                true if sent >= received => (at, at + if sent > received { rank * block } else { 0 }, sent),
                true => (at + rank * block, at, received),
            };
            let gap = if own.one_in(3) { 0 } else { 1 + own.below(70) as usize };
            let stream = own.below(streams) as usize;
            let spot = Spot { at: bytes, bytes: at - bytes + blocks * block + gap, send, sent, recv, received, stream };
            bytes += spot.bytes;
            spot
        };
        let spots = recorded.iter().map(spot).collect();
        Group { seed, recorded, spots, bytes }
    }

    /// The memory of all calls before the group, or behind it.
    fn memory(&self, (nranks, rank): (usize, usize), is_behind: bool) -> Vec<u8> {
        let mut memory = vec![GAP; self.bytes];
        for (number, (call, spot)) in self.recorded.iter().zip(&self.spots).enumerate() {
            let (size, block) = (call.dtype.size(), call.block_bytes());
            let mut put = |at: usize, value: u64| {
                memory[at..at + size].copy_from_slice(&reference::encode(call.dtype, value as f64)[..size]);
            };
            let all = |blocks: usize| (0..blocks).flat_map(|block| (0..call.count).map(move |index| (block, index)));
            for (at, index) in all(spot.sent) {
                put(spot.send + at * block + index * size, value(self.seed, number, rank, at, index));
            }
            for (at, index) in all(if is_behind { spot.received } else { 0 }) {
                let result = call.result((self.seed, number, nranks), rank, at, index);
                put(spot.recv + at * block + index * size, result);
            }
        }
        memory
    }

    /// The operations of the group in this memory: each call, and a message around the ring of ranks.
    fn launches(
        &self,
        comm: &Arc<Comm>,
        memory: DeviceRegion,
        message: [DeviceRegion; 2],
        streams: &[StreamRef],
    ) -> Vec<Launch> {
        let on = |operation, stream: usize| Launch {
            comm: comm.clone(),
            operation,
            stream: streams[stream % streams.len()].clone(),
        };
        let mut launches = Vec::new();
        for (number, (call, spot)) in self.recorded.iter().zip(&self.spots).enumerate() {
            let region = |at: usize, blocks: usize| match blocks {
                0 => DeviceRegion::EMPTY,
                _ => memory.part(at, blocks * call.block_bytes()),
            };
            let operation = Operation::Collective(CollectiveCall {
                collective: call.collective,
                input: region(spot.send, spot.sent),
                output: region(spot.recv, spot.received),
                count: call.count,
                blocks: None,
                joined: None,
                dtype: call.dtype,
                reduction: call.op.map(|op| Reduction::new(op, call.dtype, comm.nranks())),
                factor_at: None,
                residual: None,
                tag: 0,
                root: Rank::from_index(call.root),
                algorithm: call.name.map(str::to_string),
                decision: None,
            });
            launches.push(on(operation, spot.stream));
            if number == 1 && self.seed.is_multiple_of(2) {
                let elements = Elements { count: message[0].len(), dtype: DataType::U8 };
                let (nranks, me) = (comm.nranks(), comm.rank());
                let (to, from) = (Rank::from_index((me + 1) % nranks), Rank::from_index((me + nranks - 1) % nranks));
                launches.push(on(Operation::Send { to, data: message[0], elements }, spot.stream));
                launches.push(on(Operation::Recv { from, data: message[1], elements }, spot.stream));
            }
        }
        launches
    }
}

/// The bytes of a part of memory, from a stream's job.
fn brought(region: Region, bytes: Vec<u8>) -> impl FnOnce() -> Result<()> + Send {
    move || {
        region.write(&bytes);
        Ok(())
    }
}

fn inverted(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    bytes
}

impl Grouped {
    /// Groups on a communicator whose calls name one of these.
    pub fn new(comm: &Arc<Comm>, names: &'static [Option<&'static str>]) -> Grouped {
        let place = match (comm.gpu(), comm.options().make_device) {
            (Some(device), _) => {
                let gpu = device.gpu();
                let streams = (0..STREAMS).map(|_| GpuStream::new(gpu).expect("a stream")).collect();
                Place::Gpu(gpu.clone(), streams)
            }
            (None, Some(_)) => Place::Toy,
            (None, None) => Place::Host((1..STREAMS).map(|_| HostStream::new()).collect()),
        };
        Grouped { comm: comm.clone(), place, names }
    }

    /// Makes a seed's group and checks all memory. Two bytes more are a message's.
    pub fn run(&mut self, seed: u64) {
        let (nranks, rank) = (self.comm.nranks(), self.comm.rank());
        let group = Group::new(seed, (nranks, rank), self.names);
        let mut memory = group.memory((nranks, rank), false);
        memory.extend([rank as u8, GAP]);
        let behind = self.make(&group, memory);
        let mut expected = group.memory((nranks, rank), true);
        let received = if seed.is_multiple_of(2) { ((rank + nranks - 1) % nranks) as u8 } else { GAP };
        expected.extend([rank as u8, received]);
        let Some(at) = (0..expected.len()).find(|&at| expected[at] != behind[at]) else { return };
        let call = group.spots.iter().position(|spot| at < spot.at + spot.bytes);
        let what = call.map_or("the message".to_string(), |number| {
            let Recorded { collective, dtype, op, count, root, name } = &group.recorded[number];
            format!(
                "call {number} of {} (byte {} of its memory), {} of {count} {} {op:?} {root} {name:?}",
                group.recorded.len(),
                at - group.spots[number].at,
                collective.name(),
                dtype.name()
            )
        });
        panic!(
            "seed {seed}, rank {rank} of {nranks}, {}: {what}: {} where {} is wanted",
            self.comm.grid(),
            behind[at],
            expected[at]
        );
    }

    /// Makes the group with this in its memory; what is there behind it.
    fn make(&mut self, group: &Group, memory: Vec<u8>) -> Vec<u8> {
        let (comm, end) = (&self.comm, group.bytes);
        let message = |all: DeviceRegion| [all.part(end, 1), all.part(end + 1, 1)];
        let mut bytes = vec![GAP; memory.len()];
        // It stays until all streams have ended.
        let host = host_region(&mut bytes);
        match &mut self.place {
            Place::Toy => {
                host.write(&inverted(memory));
                let all = host.as_device();
                let launches = group.launches(comm, all, message(all), &[StreamRef::Null]);
                make(comm, launches, group.seed);
                inverted(read(host))
            }
            Place::Host(streams) => {
                host.part(end, 2).write(&memory[end..]);
                for spot in &group.spots {
                    let job = brought(host.part(spot.at, spot.bytes), memory[spot.at..spot.at + spot.bytes].to_vec());
                    match spot.stream.checked_sub(1) {
                        None => job(),
                        Some(stream) => streams[stream].enqueue(job),
                    }
                    .expect("a stream's job");
                }
                let all = host.as_device();
                let refs: Vec<StreamRef> = std::iter::once(StreamRef::Null)
                    .chain(streams.iter().map(|stream| StreamRef::Stream(stream.clone())))
                    .collect();
                let launches = group.launches(comm, all, message(all), &refs);
                make(comm, launches, group.seed);
                streams.iter().for_each(|stream| stream.synchronize().expect("the stream's operations"));
                read(host)
            }
            Place::Gpu(gpu, streams) => {
                host.write(&memory);
                let buffer = DeviceBuffer::new(gpu, memory.len()).expect("device memory");
                let _entered = gpu.enter().expect("a context");
                let all = buffer.region();
                let parts = || {
                    let own = group.spots.iter().map(|spot| (spot.at, spot.bytes, spot.stream));
                    // The message goes with the second call.
                    own.chain(std::iter::once((end, 2, group.spots[1].stream))).filter(|(_, bytes, _)| *bytes > 0)
                };
                for (at, bytes, stream) in parts() {
                    // SAFETY: both must stay until this has ended; because all streams are waited for below.
                    unsafe {
                        streams[stream].to_device(all.address() + at as u64, host.part(at, bytes).as_ptr(), bytes)
                    }
                    .expect("a copy");
                }
                let refs: Vec<StreamRef> = streams.iter().map(|stream| StreamRef::Gpu(stream.handle())).collect();
                make(comm, group.launches(comm, all, message(all), &refs), group.seed);
                for (at, bytes, stream) in parts() {
                    // SAFETY: both must stay until this has ended; because all streams are waited for below.
                    unsafe { streams[stream].to_host(host.part(at, bytes).as_ptr(), all.address() + at as u64, bytes) }
                        .expect("a copy");
                    streams[stream].issued();
                }
                streams.iter_mut().for_each(GpuStream::settle);
                if let Some(error) = comm.failure() {
                    panic!("seed {}: {error}", group.seed);
                }
                read(host)
            }
        }
    }
}

/// Makes these calls as a group, or one after another in a window, as the seed says: windows have no messages, which even seeds have.
fn make(comm: &Arc<Comm>, launches: Vec<Launch>, seed: u64) {
    let made = if seed % 4 == 1 { in_window(comm, launches, seed) } else { launch(launches) };
    made.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

fn in_window(comm: &Arc<Comm>, launches: Vec<Launch>, seed: u64) -> Result<()> {
    let mut random = Random::new(seed * 5 + 1);
    let bytes = if random.one_in(2) { 0 } else { random.below(200_000) as usize };
    let us = if random.one_in(2) { 0 } else { random.below(500) as u32 };
    comm.open_window(WindowBounds { bytes, us }, &AtomicBool::new(false))?;
    for call in launches {
        group::record(call, true)?.map_or(Ok(()), launch_one)?;
    }
    match comm.window_has_clock() {
        true => comm.await_window(),
        false => group::release(comm.end_window()?, true),
    }
}

impl Drop for Grouped {
    fn drop(&mut self) {
        if let Place::Host(streams) = &self.place {
            streams.iter().for_each(|stream| stream.close());
        }
    }
}

fn read(region: Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes
}
