//! `strata gpu kernels`: every kernel on the device, against the host device, bit for bit.
//!
//! A check is one launch: the device's memory is filled, the kernel works on it, the host device does the same to memory of
//! its own, and all of both is compared, also what must not be written.

use super::codes;
use super::order;
use super::twice::{Job, Random, Twice};
use super::{parse_type, Which, DIFFERENT};
use crate::options::number;
use serde_json::{json, Value};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use strata::device::gpu::kernels::{operator_name, type_name, Batch, BatchScale, Module, Shuffle};
use strata::device::gpu::GpuDevice;
use strata::device::host;
use strata::dtype::{DataType, Operator, Prologue, Reduction};
use strata::error::Result;
use strata::memory::Region;

/// Options of `strata gpu kernels`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub which: Which,
    /// Only these element types, separated by commas, as in the names of the kernels: i8, f16, e4m3, ...
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = parse_type)]
    types: Vec<DataType>,
    /// What decides contents, lengths and places.
    #[arg(long, value_name = "N", default_value = "1", value_parser = number(0..=u64::MAX))]
    seed: usize,
    /// How often everything is done, each time with other contents, lengths and places.
    #[arg(long, value_name = "N", default_value = "1", value_parser = number(1..=100_000))]
    rounds: usize,
}

const OPERATORS: [Operator; 4] = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];
const SOURCES: [usize; 4] = [1, 2, 3, 9];
/// Of what sums are multiplied by.
const RATIO: (u64, u64) = (7, 5);
const DIVISORS: [u64; 10] = [2, 3, 5, 7, 100, 128, 255, 70_001, 1 << 33, u64::MAX];
/// Failures that are told in words; the others are counted.
const TOLD: usize = 20;

/// How the operands of a launch lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Long, and all at multiples of 16 bytes.
    Aligned,
    /// Each at a multiple of the element.
    Misaligned,
    /// Each anywhere.
    Anywhere,
    /// Few elements, all equally misaligned.
    Odd,
    /// Three jobs of different lengths, one of them often empty.
    Several,
    /// The result replaces one of the sources.
    InPlace,
}

const FORMS: [Form; 8] = [
    Form::Aligned,
    Form::Misaligned,
    Form::Anywhere,
    Form::Odd,
    Form::Odd,
    Form::Several,
    Form::InPlace,
    Form::InPlace,
];

/// What came of the checks of one kernel.
#[derive(Debug)]
pub struct Tally {
    /// Its column in the table: the operation, or the kernel's name.
    pub column: &'static str,
    /// Launches that were checked.
    pub checks: usize,
    /// What was wrong, once for each launch.
    pub failures: Vec<String>,
}

impl Tally {
    /// No checks yet.
    pub fn new(column: &'static str) -> Tally {
        Tally { column, checks: 0, failures: Vec::new() }
    }

    /// Counts a check, which fails if there is something to say.
    pub fn count(&mut self, failure: Option<String>) {
        self.checks += 1;
        self.failures.extend(failure);
    }
}

/// A module: how long loading it took, and its kernels.
struct Row {
    name: &'static str,
    load_ms: f64,
    tallies: Vec<Tally>,
}

fn jobs(form: Form, dtype: DataType, nsrcs: usize, memory: &mut Twice, random: &mut Random) -> Vec<Job> {
    let size = dtype.size();
    memory.clear();
    let counts = match form {
        // More than one block's share.
        Form::Aligned => vec![(48 << 10) / size],
        Form::Misaligned | Form::Anywhere => vec![random.one_of(&[1000, 2049, 4099])],
        Form::Odd => vec![random.one_of(&[1, 2, 3, 5, 15, 17, 63, 200, 1001])],
        Form::Several => vec![random.one_of(&[0, 1, 17]), 1000 + random.below(100), 33],
        Form::InPlace => vec![random.one_of(&[31, 4096, 5003])],
    };
    let alike = random.below(16 / size) * size;
    let mut job = |count: usize| {
        let bytes = count * size;
        let mut place = |memory: &mut Twice| {
            let misplaced = match form {
                Form::Aligned => 0,
                Form::Misaligned => random.below(16 / size) * size,
                Form::Anywhere => random.below(16),
                _ => alike,
            };
            memory.place(bytes, misplaced)
        };
        let srcs: Vec<usize> = (0..nsrcs).map(|_| place(memory)).collect();
        let elsewhere = place(memory);
        let dst = if form == Form::InPlace { random.one_of(&srcs) } else { elsewhere };
        Job { bytes, dst, srcs }
    };
    counts.into_iter().map(&mut job).collect()
}

/// One check: fills, launches, does the same on the host, compares.
fn check(
    memory: &mut Twice,
    random: &mut Random,
    jobs: &[Job],
    launch: impl FnOnce(&mut Twice) -> Result<()>,
    same: impl Fn(&[Region], Region),
    what: impl FnOnce() -> String,
) -> Result<Option<String>> {
    memory.fill(random)?;
    launch(memory)?;
    memory.track.issued();
    for job in jobs {
        let srcs: Vec<Region> = job.srcs.iter().map(|at| memory.region(*at, job.bytes)).collect();
        same(&srcs, memory.region(job.dst, job.bytes));
    }
    Ok(memory.difference()?.map(|difference| format!("{}: {difference}", what())))
}

fn reductions(dtype: DataType, operator: Operator, memory: &mut Twice, random: &mut Random) -> Result<Tally> {
    let mut tally = Tally::new(operator_name(operator));
    for (nsrcs, form) in SOURCES.into_iter().flat_map(|nsrcs| FORMS.map(|form| (nsrcs, form))) {
        let jobs = jobs(form, dtype, nsrcs, memory, random);
        let divisor = if random.below(3) == 0 { random.one_of(&DIVISORS) } else { 1 };
        let scale = if divisor == 1 { BatchScale::None } else { BatchScale::Divide };
        let batch = memory.batch(&jobs, scale, divisor);
        tally.count(check(
            memory,
            random,
            &jobs,
            |memory| {
                // SAFETY: the places must stay until this has ended; because `memory` keeps them and waits for its stream.
                unsafe { memory.track.reduce(dtype, operator, &batch) }
            },
            |srcs, dst| host::reduce(dtype, operator, divisor, srcs, dst),
            || {
                let names = (type_name(dtype), operator_name(operator));
                format!("{} {}, {nsrcs} sources, {form:?}, divided by {divisor}", names.0, names.1)
            },
        )?);
    }
    Ok(tally)
}

fn scalings(dtype: DataType, memory: &mut Twice, random: &mut Random) -> Result<Tally> {
    let mut tally = Tally::new("scale");
    let kinds = [BatchScale::None, BatchScale::Multiply, BatchScale::Reciprocal, BatchScale::Divide];
    let of_floats = (!dtype.is_integer()).then_some(BatchScale::Ratio);
    for (kind, form) in kinds.into_iter().chain(of_floats).flat_map(|kind| FORMS.map(|form| (kind, form))) {
        let jobs = jobs(form, dtype, 1, memory, random);
        let (scalar, divisor) = (random.element(dtype), random.one_of(&DIVISORS));
        let (factor, prologue) = match kind {
            BatchScale::None => (0, Prologue::None),
            BatchScale::Multiply => (u64::from_le_bytes(scalar), Prologue::Scalar(scalar)),
            BatchScale::Reciprocal => (divisor, Prologue::Reciprocal(divisor)),
            BatchScale::Divide => (divisor, Prologue::None),
            BatchScale::Ratio => (RATIO.0 << 32 | RATIO.1, Prologue::None),
        };
        let batch = memory.batch(&jobs, kind, factor);
        let reduction = Reduction { dtype, operator: Operator::Sum, prologue, divisor: 1 };
        tally.count(check(
            memory,
            random,
            &jobs,
            |memory| {
                // SAFETY: the places must stay until this has ended; because `memory` keeps them and waits for its stream.
                unsafe { memory.track.scale(dtype, &batch) }
            },
            |srcs, dst| match kind {
                BatchScale::Divide => host::divide(dtype, divisor, srcs[0], dst),
                BatchScale::Ratio => {
                    host::copy(dst, srcs[0]);
                    host::multiply_by_ratio(dtype, RATIO, dst);
                }
                _ => host::prologue(&reduction, srcs[0], dst),
            },
            || format!("{} scale, {kind:?} by {factor:#x}, {form:?}", type_name(dtype)),
        )?);
    }
    Ok(tally)
}

fn copies(memory: &mut Twice, random: &mut Random) -> Result<Tally> {
    let mut tally = Tally::new("copy");
    let forms = [Form::Aligned, Form::Misaligned, Form::Odd, Form::Several];
    // The source in the device's memory, and in the host's as the device sees it.
    for (form, pinned) in forms.into_iter().flat_map(|form| [(form, false), (form, true)]) {
        for _ in 0..4 {
            let jobs = jobs(form, DataType::U8, 1, memory, random);
            let mut batch = Batch::new(1, BatchScale::None, 0);
            for job in &jobs {
                let src = if pinned { memory.pinned_address(job.srcs[0]) } else { memory.address(job.srcs[0]) };
                batch.push(job.bytes, memory.address(job.dst), [src].into_iter());
            }
            tally.count(check(
                memory,
                random,
                &jobs,
                |memory| {
                    // SAFETY: the places must stay until this has ended; because `memory` keeps them and waits for its stream.
                    unsafe { memory.track.copy(&batch) }
                },
                |srcs, dst| host::copy(dst, srcs[0]),
                || format!("copy, {form:?}{}", if pinned { ", from pinned memory" } else { "" }),
            )?);
        }
    }
    Ok(tally)
}

fn shuffles(memory: &mut Twice, random: &mut Random) -> Result<Tally> {
    let mut tally = Tally::new("shuffle");
    for _ in 0..40 {
        memory.clear();
        let unit = random.one_of(&[1, 2, 4, 8, 16]);
        let block = unit * random.one_of(&[0, 1, 3, 16, 33, 520]);
        let (rows, columns) = (1 + random.below(4), 1 + random.below(5));
        // Strides may be less aligned than blocks are.
        let step = random.one_of(&[unit, unit, 1]);
        let mut gap = || block + step * random.below(3);
        // The source's rows lie together, the destination's columns.
        let (src_column, dst_row) = (gap(), gap());
        let (src_row, dst_column) = (columns * src_column + step, rows * dst_row + step);
        let src = memory.place(rows * src_row, unit % 16);
        let dst = memory.place(columns * dst_column, unit % 16);
        let shuffle = Shuffle {
            src: memory.address(src),
            dst: memory.address(dst),
            block_bytes: block as u64,
            rows: rows as u64,
            columns: columns as u64,
            src_row_bytes: src_row as u64,
            src_column_bytes: src_column as u64,
            dst_row_bytes: dst_row as u64,
            dst_column_bytes: dst_column as u64,
        };
        // What the shuffle does, as copies of the host's.
        let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let jobs: Vec<Job> = places
            .map(|(row, column)| Job {
                bytes: block,
                dst: dst + row * dst_row + column * dst_column,
                srcs: vec![src + row * src_row + column * src_column],
            })
            .collect();
        tally.count(check(
            memory,
            random,
            &jobs,
            |memory| {
                // SAFETY: the places must stay until this has ended; because `memory` keeps them and waits for its stream.
                unsafe { memory.track.shuffle(&shuffle) }
            },
            |srcs, dst| host::copy(dst, srcs[0]),
            || format!("{shuffle:?}"),
        )?);
    }
    Ok(tally)
}

/// Loads a module; how long that took, the driver's compiling included.
fn loaded(gpu: &Arc<GpuDevice>, module: Module) -> Result<f64> {
    let start = Instant::now();
    gpu.load(module)?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn of_type(gpu: &Arc<GpuDevice>, dtype: DataType, options: &Options) -> Result<Row> {
    let load_ms = loaded(gpu, Module::Of(dtype))?;
    let mut random = Random::new(options.seed as u64);
    let mut memory = Twice::new(gpu, dtype, &mut random)?;
    let mut tallies = Vec::new();
    for _ in 0..options.rounds {
        for operator in OPERATORS {
            tallies.push(reductions(dtype, operator, &mut memory, &mut random)?);
        }
        tallies.push(scalings(dtype, &mut memory, &mut random)?);
    }
    Ok(Row { name: type_name(dtype), load_ms, tallies: merged(tallies) })
}

fn moving(gpu: &Arc<GpuDevice>, options: &Options) -> Result<Row> {
    let load_ms = loaded(gpu, Module::Move)?;
    let mut random = Random::new(options.seed as u64);
    let mut memory = Twice::new(gpu, DataType::U8, &mut random)?;
    let mut tallies = Vec::new();
    for _ in 0..options.rounds {
        tallies.push(copies(&mut memory, &mut random)?);
        tallies.push(shuffles(&mut memory, &mut random)?);
        tallies.extend(order::tallies(gpu)?);
    }
    Ok(Row { name: "move", load_ms, tallies: merged(tallies) })
}

fn coding(gpu: &Arc<GpuDevice>, options: &Options) -> Result<Row> {
    let load_ms = loaded(gpu, Module::Codes)?;
    let mut random = Random::new(options.seed as u64);
    let mut memory = Twice::new(gpu, DataType::F32, &mut random)?;
    let mut tallies = Vec::new();
    for _ in 0..options.rounds {
        tallies.extend(codes::tallies(&mut memory, &mut random)?);
    }
    Ok(Row { name: "codes", load_ms, tallies: merged(tallies) })
}

/// The tallies of all rounds, added up.
fn merged(tallies: Vec<Tally>) -> Vec<Tally> {
    let mut result: Vec<Tally> = Vec::new();
    for tally in tallies {
        match result.iter_mut().find(|known| known.column == tally.column) {
            None => result.push(tally),
            Some(known) => {
                known.checks += tally.checks;
                known.failures.extend(tally.failures);
            }
        }
    }
    result
}

/// Checks everything and prints what came of it.
pub fn run(options: &Options, gpu: &Arc<GpuDevice>) -> Result<ExitCode> {
    let _entered = gpu.enter()?;
    let types = if options.types.is_empty() { DataType::ALL.to_vec() } else { options.types.clone() };
    let mut rows = vec![moving(gpu, options)?, coding(gpu, options)?];
    for dtype in types {
        rows.push(of_type(gpu, dtype, options)?);
    }
    let failures: Vec<&String> = rows.iter().flat_map(|row| &row.tallies).flat_map(|tally| &tally.failures).collect();
    options.which.print(|| as_json(&rows), || as_text(&rows, &failures));
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DIFFERENT) })
}

fn as_json(rows: &[Row]) -> Value {
    let kernel = |tally: &Tally| json!({"kernel": tally.column, "checks": tally.checks, "failures": tally.failures});
    let module = |row: &Row| {
        let kernels: Vec<Value> = row.tallies.iter().map(kernel).collect();
        json!({"module": row.name, "load_ms": row.load_ms, "kernels": kernels})
    };
    json!({ "modules": rows.iter().map(module).collect::<Vec<Value>>() })
}

fn as_text(rows: &[Row], failures: &[&String]) -> String {
    let mut text = format!("{:<8} {:>9}  launches with the host's bits, of all\n", "module", "load ms");
    for row in rows {
        text += &format!("{:<8} {:>9.1}", row.name, row.load_ms);
        for tally in &row.tallies {
            text += &format!("  {} {}/{}", tally.column, tally.checks - tally.failures.len(), tally.checks);
        }
        text += "\n";
    }
    let checks: usize = rows.iter().flat_map(|row| &row.tallies).map(|tally| tally.checks).sum();
    for failure in failures.iter().take(TOLD) {
        text += &format!("FAILED: {failure}\n");
    }
    let failed = failures.len();
    text + &format!("{} passed, {failed} failed\n", checks - failed)
}
