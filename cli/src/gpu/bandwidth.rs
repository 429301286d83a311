//! `strata gpu bandwidth`: reductions, scalings, copies and shuffles beside the driver's own copy of as many bytes, and
//! kernels that read or write host memory beside the copy engines.
//!
//! A time is that of many launches in a row, by the host's clock from the first launch to the end of the last, over their
//! number. Short ones are therefore bounded by what a launch costs, those of the driver as well as ours.

use super::{parse_type, Which};
use crate::options::{number, parse_size};
use serde_json::{json, Value};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata::device::gpu::driver::Address;
use strata::device::gpu::kernels::{type_name, Batch, BatchScale, Module, Shuffle};
use strata::device::gpu::memory::{DeviceBuffer, Pinned};
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::device::host::reference;
use strata::dtype::{DataType, Operator};
use strata::error::{Error, Result};

/// Options of `strata gpu bandwidth`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub which: Which,
    /// Smallest size of an operand in bytes; K, M and G are powers of 1024. Each size is four times the one before.
    #[arg(short = 'b', long = "minbytes", default_value = "1M", value_parser = parse_operand)]
    min_bytes: usize,
    /// Largest size of an operand.
    #[arg(short = 'e', long = "maxbytes", default_value = "1G", value_parser = parse_operand)]
    max_bytes: usize,
    /// Element types of reductions and scalings, separated by commas.
    #[arg(long, value_name = "TYPES", value_delimiter = ',', default_value = "f32,f16,i8", value_parser = parse_type)]
    types: Vec<DataType>,
    /// Measurements of which the median is taken.
    #[arg(long, value_name = "N", default_value = "7", value_parser = number(1..=1000))]
    runs: usize,
    /// Milliseconds that one measurement takes, about.
    #[arg(long, value_name = "MS", default_value = "10", value_parser = number(1..=10_000))]
    run_ms: usize,
}

/// More than an operand on any device can have.
const MOST_BYTES: usize = 1 << 40;

fn parse_operand(text: &str) -> std::result::Result<usize, String> {
    let bytes = parse_size(text)?;
    if bytes > MOST_BYTES {
        Err(format!("`{text}` is more than any device holds"))
    } else {
        Ok(bytes)
    }
}

/// Sources of the wide reduction.
const MANY: usize = 8;
/// Sizes are whole multiples of this.
const UNIT: usize = 64 << 10;
/// The most pinned memory that is measured.
const MOST_PINNED: usize = 256 << 20;
/// Launches in a row at most.
const MOST_LAUNCHES: usize = 1000;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Operation {
    /// The driver's copy on the device, which the others are compared with.
    DriverCopy,
    Copy,
    /// A permutation of blocks of this many bytes; 0: of 32 blocks.
    Shuffle(usize),
    Reduce(DataType, usize),
    Scale(DataType),
    /// The driver's copy from pinned memory, which the next is compared with.
    FromHost,
    FromHostKernel,
    /// The driver's copy into pinned memory, which the next is compared with.
    ToHost,
    ToHostKernel,
}

impl Operation {
    fn name(self) -> String {
        match self {
            Operation::DriverCopy => "driver's copy".to_string(),
            Operation::Copy => "copy".to_string(),
            Operation::Shuffle(0) => "shuffle, 32 blocks".to_string(),
            Operation::Shuffle(bytes) => format!("shuffle, blocks of {} KiB", bytes >> 10),
            Operation::Reduce(_, sources) => format!("sum of {sources}"),
            Operation::Scale(_) => "scale".to_string(),
            Operation::FromHost => "driver's copy from host".to_string(),
            Operation::FromHostKernel => "copy from host".to_string(),
            Operation::ToHost => "driver's copy to host".to_string(),
            Operation::ToHostKernel => "copy to host".to_string(),
        }
    }

    fn dtype(self) -> &'static str {
        match self {
            Operation::Reduce(dtype, _) | Operation::Scale(dtype) => type_name(dtype),
            _ => "-",
        }
    }

    /// What it is compared with.
    fn reference(self) -> Operation {
        match self {
            Operation::FromHost | Operation::FromHostKernel => Operation::FromHost,
            Operation::ToHost | Operation::ToHostKernel => Operation::ToHost,
            _ => Operation::DriverCopy,
        }
    }

    fn is_of_host(self) -> bool {
        self.reference() != Operation::DriverCopy
    }

    /// How many operands the device's memory reads and writes; over the host's link, each byte once.
    fn moved(self) -> usize {
        match self {
            Operation::Reduce(_, sources) => sources + 1,
            _ if self.is_of_host() => 1,
            _ => 2,
        }
    }

    /// Operands in the device's memory.
    fn operands(self) -> usize {
        if self.is_of_host() {
            1
        } else {
            self.moved()
        }
    }
}

/// Microseconds of one launch.
#[derive(Debug, Clone, Copy)]
struct Timing {
    median: f64,
    min: f64,
    max: f64,
}

/// An operation at a size, and what came of it: its time, or why it has none.
struct Row {
    operation: Operation,
    bytes: usize,
    outcome: std::result::Result<Timing, String>,
    /// Its bandwidth over its reference's.
    share: Option<f64>,
}

impl Row {
    fn gbs(&self) -> Option<f64> {
        let timing = self.outcome.as_ref().ok()?;
        Some((self.operation.moved() * self.bytes) as f64 / timing.median / 1e3)
    }
}

/// Memory of an operation: first the destination, then the sources. Freed after the stream.
struct Operands {
    device: DeviceBuffer,
    pinned: Option<Pinned>,
    bytes: usize,
}

impl Operands {
    fn new(gpu: &Arc<GpuDevice>, operation: Operation, bytes: usize) -> Result<Operands> {
        let device = DeviceBuffer::new(gpu, bytes * operation.operands())?;
        let pinned = if operation.is_of_host() { Some(Pinned::new(gpu, bytes)?) } else { None };
        Ok(Operands { device, pinned, bytes })
    }

    fn at(&self, index: usize) -> Address {
        self.device.region().address() + (index * self.bytes) as Address
    }

    fn batch(
        &self,
        (scale, factor): (BatchScale, u64),
        dst: Address,
        srcs: impl ExactSizeIterator<Item = Address>,
    ) -> Batch {
        let mut batch = Batch::new(srcs.len(), scale, factor);
        batch.push(self.bytes, dst, srcs);
        batch
    }

    fn shuffle(&self, block: usize) -> Shuffle {
        let block = if block == 0 { self.bytes / 32 } else { block };
        // A transposition, as between nodes and local ranks.
        let (rows, columns) = (8, self.bytes / block / 8);
        Shuffle {
            src: self.at(1),
            dst: self.at(0),
            block_bytes: block as u64,
            rows,
            columns: columns as u64,
            src_row_bytes: (columns * block) as u64,
            src_column_bytes: block as u64,
            dst_row_bytes: block as u64,
            dst_column_bytes: rows * block as u64,
        }
    }
}

type Launch<'a> = Box<dyn Fn(&mut GpuStream) -> Result<()> + 'a>;

/// What launches an operation once.
fn launcher<'a>(operation: Operation, operands: &'a Operands) -> Launch<'a> {
    let (dst, bytes) = (operands.at(0), operands.bytes);
    let (host, host_seen) = match &operands.pinned {
        Some(pinned) => (pinned.host().as_ptr(), pinned.address()),
        None => (std::ptr::null_mut(), 0),
    };
    match operation {
        Operation::DriverCopy => Box::new(move |track| {
            // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
            unsafe { track.on_device(dst, operands.at(1), bytes) }
        }),
        Operation::FromHost => Box::new(move |track| {
            // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
            unsafe { track.to_device(dst, host, bytes) }
        }),
        Operation::ToHost => Box::new(move |track| {
            // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
            unsafe { track.to_host(host, dst, bytes) }
        }),
        Operation::Shuffle(block) => {
            let shuffle = operands.shuffle(block);
            Box::new(move |track| {
                // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
                unsafe { track.shuffle(&shuffle) }
            })
        }
        Operation::Copy | Operation::FromHostKernel | Operation::ToHostKernel => {
            let (to, from) = match operation {
                Operation::FromHostKernel => (dst, host_seen),
                Operation::ToHostKernel => (host_seen, dst),
                _ => (dst, operands.at(1)),
            };
            let batch = operands.batch((BatchScale::None, 0), to, [from].into_iter());
            Box::new(move |track| {
                // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
                unsafe { track.copy(&batch) }
            })
        }
        Operation::Scale(dtype) => {
            let factor = u64::from_le_bytes(reference::encode(dtype, 1.5));
            let batch = operands.batch((BatchScale::Multiply, factor), dst, [operands.at(1)].into_iter());
            Box::new(move |track| {
                // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
                unsafe { track.scale(dtype, &batch) }
            })
        }
        Operation::Reduce(dtype, sources) => {
            let srcs: Vec<Address> = (1..=sources).map(|index| operands.at(index)).collect();
            let batch = operands.batch((BatchScale::None, 0), dst, srcs.into_iter());
            Box::new(move |track| {
                // SAFETY: the operands must stay until this has ended; because a measurement waits for its stream and borrows them.
                unsafe { track.reduce(dtype, Operator::Sum, &batch) }
            })
        }
    }
}

/// Times launches in a row.
fn timed(track: &mut GpuStream, launch: &Launch, options: &Options) -> Result<Timing> {
    let mut run = |launches: usize| -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..launches {
            launch(track)?;
            track.issued();
        }
        track.finish()?;
        Ok(start.elapsed() / launches as u32)
    };
    run(1)?;
    let one = run(2)?.as_secs_f64().max(1e-7);
    let launches = ((options.run_ms as f64 / 1e3 / one) as usize).clamp(1, MOST_LAUNCHES);
    let mut times = Vec::new();
    for _ in 0..options.runs {
        times.push(run(launches)?.as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(Timing { median: times[times.len() / 2], min: times[0], max: times[times.len() - 1] })
}

fn measured(gpu: &Arc<GpuDevice>, operation: Operation, bytes: usize, options: &Options) -> Result<Timing> {
    let operands = Operands::new(gpu, operation, bytes)?;
    let launch = launcher(operation, &operands);
    let mut track = GpuStream::new(gpu)?;
    timed(&mut track, &launch, options)
}

fn operations(types: &[DataType], bytes: usize) -> Vec<Operation> {
    let mut all = vec![Operation::DriverCopy, Operation::Copy, Operation::Shuffle(0), Operation::Shuffle(4 << 10)];
    for &dtype in types {
        all.extend([Operation::Reduce(dtype, 2), Operation::Reduce(dtype, MANY), Operation::Scale(dtype)]);
    }
    if bytes <= MOST_PINNED {
        all.extend([Operation::FromHost, Operation::FromHostKernel, Operation::ToHost, Operation::ToHostKernel]);
    }
    all
}

/// Every size, whole units.
fn sizes(options: &Options) -> Vec<usize> {
    let unit = |bytes: usize| bytes.next_multiple_of(UNIT).max(UNIT);
    let mut sizes = vec![unit(options.min_bytes)];
    while sizes[sizes.len() - 1] < options.max_bytes {
        sizes.push(unit(sizes[sizes.len() - 1].saturating_mul(4).min(options.max_bytes)));
    }
    sizes
}

/// Measures everything and prints it.
pub fn run(options: &Options, gpu: &Arc<GpuDevice>) -> Result<ExitCode> {
    let _entered = gpu.enter()?;
    for module in options.types.iter().map(|dtype| Module::Of(*dtype)).chain([Module::Move]) {
        gpu.load(module)?;
    }
    let mut rows: Vec<Row> = Vec::new();
    for bytes in sizes(options) {
        for operation in operations(&options.types, bytes) {
            // What does not fit is told; what is smaller is measured all the same.
            let outcome = measured(gpu, operation, bytes, options).map_err(|error| error.to_string());
            rows.push(Row { operation, bytes, outcome, share: None });
            let row = &rows[rows.len() - 1];
            let reference = rows.iter().find(|other| (other.operation, other.bytes) == (operation.reference(), bytes));
            let share = row.gbs().zip(reference.and_then(Row::gbs)).map(|(own, other)| own / other);
            rows.last_mut().expect("pushed above").share = share;
        }
    }
    if let Some(why) = rows.iter().all(|row| row.outcome.is_err()).then(|| rows[0].outcome.as_ref().err()).flatten() {
        return Err(Error::Device(format!("nothing could be measured: {why}")));
    }
    options.which.print(|| json!({ "rows": rows.iter().map(as_json).collect::<Vec<Value>>() }), || as_text(&rows));
    Ok(ExitCode::SUCCESS)
}

fn as_json(row: &Row) -> Value {
    let head = json!({
        "operation": row.operation.name(), "type": row.operation.dtype(), "bytes": row.bytes,
        "moved_bytes": row.bytes * row.operation.moved(), "reference": row.operation.reference().name(),
    });
    let tail = match &row.outcome {
        Ok(timing) => json!({
            "median_us": timing.median, "min_us": timing.min, "max_us": timing.max, "gbs": row.gbs(),
            "share": row.share,
        }),
        Err(why) => json!({ "skipped": why }),
    };
    let (Value::Object(mut all), Value::Object(rest)) = (head, tail) else { unreachable!("both are objects") };
    all.extend(rest);
    Value::Object(all)
}

fn size_text(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{:.3}", bytes as f64 / f64::from(1 << 30)) + " GiB",
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    }
}

fn as_text(rows: &[Row]) -> String {
    let mut text =
        "GB/s: bytes read and written, or over the link to the host; share: of the driver's copy\n".to_string();
    text += &format!(
        "{:<26} {:<5} {:>10} {:>12} {:>10} {:>10} {:>9} {:>6}\n",
        "operation", "type", "operand", "median us", "min us", "max us", "GB/s", "share"
    );
    for row in rows {
        let head = format!("{:<26} {:<5} {:>10}", row.operation.name(), row.operation.dtype(), size_text(row.bytes));
        text += &match (&row.outcome, row.gbs()) {
            (Ok(timing), Some(gbs)) => {
                let share = row.share.map_or("-".to_string(), |share| format!("{:.0} %", share * 100.0));
                let Timing { median, min, max } = timing;
                format!("{head} {median:>12.1} {min:>10.1} {max:>10.1} {gbs:>9.1} {share:>6}\n")
            }
            (Err(why), _) => format!("{head} SKIPPED: {why}\n"),
            (Ok(_), None) => unreachable!("what has a time has a bandwidth"),
        };
    }
    text
}
