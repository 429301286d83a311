//! `strata perf`: measures a collective, with nccl-tests' options, columns and bandwidth factors.
//!
//! A client of the C interface like any other. It runs on the ranks that `strata launch`, torchrun, MPI's launchers or
//! `srun` started, several ranks per process with `-g`, or alone. Every size is first checked against a reference and
//! then timed: a barrier, then a loop of calls; the time is that of the slowest rank.
#![forbid(unsafe_code)]

pub mod bench;
pub mod collective;
mod data;
mod report;
mod table;
pub mod workload;

use crate::nccl::{Comm, Library, UniqueId};
use crate::options::{number, parse_size};
use crate::process;
use bench::Bench;
use collective::{parse_dtype, parse_reduce, Kind, Reduce};
use data::Data;
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;
use strata::bootstrap::store::{Store, LIMIT};
use strata::error::{counted, Error, Result};

/// More iterations, or calls in a group, than a measurement can be meant to have.
const MOST_CALLS: u64 = 1_000_000;
/// More ranks than one process can be meant to have.
const MOST_RANKS_HERE: u64 = 1024;
/// More sizes than a table can be meant to have.
const MOST_SIZES: usize = 10_000;

/// What the printed figures mean, for `--help`.
const FIGURES: &str = "\
Columns, as in nccl-tests:
  size      bytes that bandwidths refer to: the larger of a rank's two buffers, in whole blocks
  count     elements given to the call
  time      microseconds a call takes: the loop of -n iterations over their number (and over -m), on the slowest process
            (nccl-tests: averaged over the processes, unless -a 3 is given)
  algbw     size / time, in 10^9 bytes a second
  busbw     algbw times what each link must carry of the size: 2(n-1)/n for all_reduce on n ranks, (n-1)/n for all_gather,
            reduce_scatter, alltoall, gather and scatter, 1 for broadcast, reduce and sendrecv
  #wrong    elements of all ranks that are not what they should be; N/A with -c 0

Figures of --json, for out_of_place and in_place each:
  time_us, algbw_gbs, busbw_gbs, wrong    the columns time, algbw, busbw and #wrong; time_us is a mean
  min_us, median_us, max_us               of the single iterations, each on its slowest process
  front_us                                with --front: the median of when the first element is final on the slowest process
  iterations                              how many iterations these three are taken from

With --workload the table has a line for the calls of each phase, kind and group:
  bytes     of the larger of a rank's two buffers, all calls together
  time      microseconds in which the calls were carried out
  exposed   microseconds for which the program waited for them instead of computing
They are those of the slowest rank in the iteration whose time is the median. With --simulate: of the vendor's library,
of PCCL (the better of its two algorithms for every call), and of Strata's choice, the vendor among the candidates";

/// Options of `strata perf`; the short ones are nccl-tests'.
#[derive(clap::Args)]
#[command(after_long_help = FIGURES)]
pub struct Options {
    /// all_reduce, all_gather, reduce_scatter, broadcast, reduce, alltoall, gather, scatter or sendrecv.
    // The default is not looked at: without a workload there must be a collective.
    #[arg(required_unless_present = "workload", default_value = "all_reduce", hide_default_value = true)]
    collective: Kind,
    /// Smallest size in bytes; K, M and G are powers of 1024.
    #[arg(short = 'b', long = "minbytes", default_value = "32M", value_parser = parse_size)]
    min_bytes: usize,
    /// Largest size.
    #[arg(short = 'e', long = "maxbytes", default_value = "32M", value_parser = parse_size)]
    max_bytes: usize,
    /// Step between sizes, unless -f is given.
    #[arg(short = 'i', long = "stepbytes", default_value = "1M", value_parser = parse_size)]
    step_bytes: usize,
    /// Factor between sizes.
    #[arg(short = 'f', long = "stepfactor", value_parser = clap::value_parser!(u32).range(2..))]
    factor: Option<u32>,
    /// Timed iterations per size, or of a workload's step [default: 20]; with --simulate: how many ranks.
    #[arg(short = 'n', long = "iters", value_parser = number(1..=MOST_CALLS))]
    iterations: Option<usize>,
    /// Calls joined in one group per iteration.
    #[arg(short = 'm', long = "agg_iters", default_value = "1", value_parser = number(1..=MOST_CALLS))]
    aggregate: usize,
    /// Iterations before timing starts.
    #[arg(short = 'w', long = "warmup_iters", default_value = "5", value_parser = number(0..=MOST_CALLS))]
    warmup: usize,
    /// Check results (1) or not (0).
    #[arg(short = 'c', long = "check", default_value = "1")]
    check: u32,
    /// sum, prod, max, min, avg, mulsum or all; on the host also band, bor, bxor (of integers).
    #[arg(short = 'o', long = "op", default_value = "sum")]
    op: String,
    /// int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, f8e4m3, f8e5m2 or all; on the host also int16, uint16.
    #[arg(short = 'd', long = "datatype", default_value = "float")]
    dtype: String,
    /// The root, where there is one; -1: each rank in turn.
    #[arg(short = 'r', long = "root", default_value = "0", allow_hyphen_values = true)]
    root: i64,
    /// A barrier before every iteration, outside its time (1), or only before the loop (0).
    #[arg(short = 'z', long = "blocking", default_value = "0")]
    blocking: u32,
    /// Ranks in each process.
    #[arg(short = 'g', long = "ngpus", default_value = "1", value_parser = number(1..=MOST_RANKS_HERE))]
    ranks_here: usize,
    /// Taken and ignored, so that nccl-tests' command lines work: communicators of a process are made together.
    #[arg(short = 'p', long = "parallel_init", hide = true)]
    _parallel: Option<u32>,
    /// Where buffers come from.
    #[arg(long, value_enum, default_value = "malloc")]
    memory: Memory,
    /// The library to measure, instead of the one beside this command.
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Write all figures as JSON; `-` for standard output, without the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also tell when the first element is final on all ranks, while the call goes on: of single calls, each on a host stream of Strata's,
    /// after a barrier.
    #[arg(long, conflicts_with_all = ["workload", "aggregate"])]
    front: bool,
    #[command(flatten)]
    replay: workload::Options,
}

/// Where buffers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Memory {
    /// Ordinary memory.
    Malloc,
    /// ncclMemAlloc.
    Nccl,
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Memory::Malloc => "malloc",
            Memory::Nccl => "nccl",
        }
    }
}

impl Options {
    fn library(&self) -> Result<Library> {
        // The buffers are ordinary memory.
        if std::env::var_os("STRATA_NCCL_LIB").is_none() {
            std::env::set_var("STRATA_NCCL_LIB", "none");
        }
        Library::open(self.library.as_deref())
    }

    fn iterations(&self) -> usize {
        self.iterations.unwrap_or(20)
    }

    fn sizes(&self) -> Result<Vec<usize>> {
        if self.min_bytes > self.max_bytes {
            return Err(Error::InvalidArgument("-b is larger than -e".into()));
        }
        let next = |&size: &usize| match self.factor {
            Some(factor) => size.max(1).checked_mul(factor as usize),
            None => size.checked_add(self.step_bytes).filter(|_| self.step_bytes > 0),
        };
        let sizes = std::iter::successors(Some(self.min_bytes), next).take_while(|&size| size <= self.max_bytes);
        let sizes: Vec<usize> = sizes.take(MOST_SIZES + 1).collect();
        match sizes.len() {
            ..=MOST_SIZES => Ok(sizes),
            _ => Err(Error::InvalidArgument(format!("-b, -e, -i and -f give more than {MOST_SIZES} sizes"))),
        }
    }

    /// Fails when the buffers of all processes on this machine cannot be in its memory.
    fn fits(&self, nranks: usize, processes: usize, available: u64) -> Result<()> {
        let buffers = 2 * self.ranks_here as u128 * self.max_bytes as u128;
        let tables = data::table_bytes(nranks, self.max_bytes) as u128;
        let needed = (buffers + tables) * processes as u128;
        if needed <= u128::from(available) {
            return Ok(());
        }
        let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
        Err(Error::InvalidArgument(format!(
            "sizes up to {:.1} GiB (-e) need {:.1} GiB of memory in {} of {} each; this machine has {:.1} GiB left",
            gib(self.max_bytes as u128),
            gib(needed),
            counted(processes, "process"),
            counted(self.ranks_here, "rank"),
            gib(u128::from(available))
        )))
    }

    fn roots(&self, nranks: usize) -> Result<Vec<usize>> {
        match self.root {
            _ if !self.collective.has_root() => Ok(vec![0]),
            -1 => Ok((0..nranks).collect()),
            root => match usize::try_from(root) {
                Ok(root) if root < nranks => Ok(vec![root]),
                _ => Err(Error::InvalidArgument(format!("there is no rank {root} among {nranks} for -r"))),
            },
        }
    }
}

/// Runs the measurement; the exit code is 1 when a result was wrong.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(name) = &options.replay.workload {
        return workload::run(name, options);
    }
    let dtypes = parse_dtype(&options.dtype).map_err(|text| Error::InvalidArgument(format!("-d: {text}")))?;
    let reduces = match options.collective.reduces() {
        true => parse_reduce(&options.op).map_err(|text| Error::InvalidArgument(format!("-o: {text}")))?,
        false => vec![Reduce::None],
    };
    let sizes = options.sizes()?;
    let mut store = Store::from_env(LIMIT)?;
    let library = options.library()?;
    let nranks = store.size * options.ranks_here;
    options.fits(nranks, store.here, process::available_memory())?;
    let roots = options.roots(nranks)?;
    let mut comms = communicators(&library, &mut store, options.ranks_here)?;
    if options.front {
        comms.iter_mut().try_for_each(Comm::add_stream)?;
    }
    let mut report = Report::new(options, &library, &store, sizes.len() * dtypes.len() * reduces.len() * roots.len())?;
    let mut bench = Bench::new(options, &library, &comms, &mut store)?;
    for &dtype in &dtypes {
        for &reduce in &reduces {
            let data = Data::new(dtype, reduce, nranks, options.max_bytes / dtype.size()).survives_codes();
            for &root in &roots {
                for &size in &sizes {
                    report.add(bench.row(&data, root, size)?);
                }
            }
        }
    }
    drop(bench);
    comms.into_iter().try_for_each(Comm::destroy)?;
    report.finish()
}

/// One communicator for each rank of this process.
fn communicators<'a>(library: &'a Library, store: &mut Store, here: usize) -> Result<Vec<Comm<'a>>> {
    if store.size == 1 {
        return library.init_all(here);
    }
    let id = if store.rank == 0 { library.unique_id()?.as_bytes().to_vec() } else { Vec::new() };
    let id = UniqueId::from_bytes(&store.broadcast(&id)?)?;
    library.init_ranks(store.size * here, id, store.rank * here, here)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::parse_line;

    fn parse(line: &str) -> Options {
        parse_line(line)
    }

    #[test]
    fn nccl_tests_command_lines_are_understood() {
        let options = parse("perf all_reduce -b 8 -e 64M -f 2 -g 1 -n 20 -w 5 -c 1 -z 0 -p 1 -o all -d all -r -1");
        assert_eq!(options.sizes().unwrap().len(), 24);
        assert_eq!(options.root, -1);
    }

    #[test]
    fn sizes_step_by_bytes_or_by_a_factor() {
        assert_eq!(parse("perf reduce -b 1K -e 3K -i 1K").sizes().unwrap(), [1024, 2048, 3072]);
        assert_eq!(parse("perf reduce -b 0 -e 4 -f 2").sizes().unwrap(), [0, 2, 4]);
        assert_eq!(parse("perf reduce -b 8 -e 8 -i 0").sizes().unwrap(), [8]);
        assert!(parse("perf reduce -b 64M -e 8").sizes().is_err());
        assert!(parse("perf reduce -b 0 -e 1G -i 1").sizes().is_err(), "a thousand million sizes");
    }

    #[test]
    fn what_memory_cannot_hold_is_refused_with_both_numbers() {
        let options = parse("perf all_reduce -b 8 -e 1000G -g 3");
        let error = options.fits(12, 4, 64 << 30).unwrap_err().to_string();
        assert_eq!(
            error,
            "sizes up to 1000.0 GiB (-e) need 24000.0 GiB of memory in 4 processes of 3 ranks each; \
             this machine has 64.0 GiB left"
        );
        assert_eq!(parse("perf all_reduce -e 64M").fits(8, 8, 64 << 30), Ok(()));
    }

    #[test]
    fn a_root_must_exist() {
        assert_eq!(parse("perf broadcast -r -1").roots(3).unwrap(), [0, 1, 2]);
        assert!(parse("perf broadcast -r 3").roots(3).is_err());
        assert_eq!(parse("perf all_reduce -r 3").roots(3).unwrap(), [0], "a root nobody asks for does not matter");
    }
}
