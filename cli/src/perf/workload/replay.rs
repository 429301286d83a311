//! Runs a program on real ranks: a communicator and a stream for each group, computing as waiting by the clock.
//!
//! Times of calls are taken on their streams, before and after each; the program's thread waits where the program says.
#![forbid(unsafe_code)]

use super::super::collective::{Kind, Place, Reduce};
use super::super::data::{self, Data};
use super::super::{communicators, Options};
use super::program::{Call, Op, Program};
use super::timeline::Times;
use crate::nccl::{self, Buffers, Comm, HostBuffer, Library, Mark};
use crate::process;
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::collections::HashSet;
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use strata::bootstrap::store::Store;
use strata::dtype::RedOp;
use strata::error::{counted, Error, Result};

/// What was measured.
pub struct Measured {
    /// Of the slowest rank in the iteration that is the median of all.
    pub times: Times,
    /// Microseconds of each iteration on its slowest rank.
    pub steps: Vec<f64>,
    /// Wrong elements on all ranks; `None`: not checked.
    pub wrong: Option<usize>,
}

/// The groups of this rank.
struct Replay<'a> {
    program: &'a Program,
    comms: Vec<Comm<'a>>,
    places: Vec<Place>,
    // Declared behind the communicators, whose end ends what uses the buffers: of each group, to send and to receive.
    buffers: Vec<[HostBuffer; 2]>,
}

/// A call that is under way.
struct Pending {
    begun: Mark,
    ended: Mark,
}

/// Checks every different call once and then times the step, in step with the other ranks.
pub fn run(program: &Program, options: &Options, library: &Library, store: &mut Store) -> Result<Measured> {
    let calls = different(program);
    let mut lengths: Vec<_> = (0..store.size).map(|rank| buffer_bytes(program, &calls, rank)).collect();
    fits(program, &lengths, store.here, process::available_memory())?;
    let lengths = lengths.swap_remove(store.rank);
    let world = communicators(library, store, 1)?.swap_remove(0);
    let mut replay = Replay::new(program, &world, &lengths, store.rank)?;
    let wrong = if options.check > 0 { Some(replay.check(store)?) } else { None };
    for _ in 0..options.warmup {
        replay.step()?;
    }
    let bar = match store.rank == 0 && std::io::stderr().is_terminal() {
        true => ProgressBar::with_draw_target(Some(options.iterations() as u64), ProgressDrawTarget::stderr()),
        false => ProgressBar::hidden(),
    };
    let mut iterations = Vec::new();
    for _ in 0..options.iterations() {
        store.barrier()?;
        let times = replay.step()?;
        let figures: Vec<f64> = [times.step].into_iter().chain(times.busy).chain(times.exposed).collect();
        iterations.push(slowest(&figures, store)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let Replay { comms, .. } = replay;
    comms.into_iter().chain([world]).try_for_each(Comm::destroy)?;
    let steps = iterations.iter().map(|figures| figures[0]).collect();
    iterations.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let figures = &iterations[iterations.len() / 2];
    let (busy, exposed) = figures[1..].split_at(program.rows.len());
    Ok(Measured { times: Times { step: figures[0], busy: busy.to_vec(), exposed: exposed.to_vec() }, steps, wrong })
}

/// The figures of the rank whose first is the greatest.
fn slowest(figures: &[f64], store: &mut Store) -> Result<Vec<f64>> {
    let bytes: Vec<u8> = figures.iter().flat_map(|figure| figure.to_le_bytes()).collect();
    let number = |bits: &[u8]| f64::from_bits(bits.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)));
    let all = store.all_gather(&bytes)?.into_iter().map(|bytes| bytes.chunks_exact(8).map(number).collect());
    let slowest = all.max_by(|a: &Vec<f64>, b| a.first().partial_cmp(&b.first()).unwrap_or(std::cmp::Ordering::Equal));
    slowest
        .filter(|theirs| theirs.len() == figures.len())
        .ok_or_else(|| Error::Remote("figures of another step".into()))
}

/// The calls that differ in more than when they are made.
fn different(program: &Program) -> Vec<&Call> {
    let mut seen = HashSet::new();
    let is_new = |call: &&Call| seen.insert((call.kind, call.group, call.count, call.dtype, call.skew));
    program.calls.iter().filter(is_new).collect()
}

/// Bytes of a rank's send and receive buffers in a call.
fn bytes_of(call: &Call, place: Place) -> [usize; 2] {
    let (send, recv) = call.elements(place);
    [send, recv].map(|elements| elements.saturating_mul(call.dtype.size()))
}

/// Bytes of the two buffers of each group.
fn buffer_bytes(program: &Program, calls: &[&Call], rank: usize) -> Vec<[usize; 2]> {
    let mut lengths = vec![[0; 2]; program.groups.len()];
    for call in calls {
        let [send, recv] = bytes_of(call, place(program, call.group, rank));
        let [to, from] = &mut lengths[call.group];
        (*to, *from) = ((*to).max(send), (*from).max(recv));
    }
    lengths
}

/// Fails when the buffers of all processes on this machine cannot be in its memory. `lengths`: of each rank. Which ranks are here is not
/// known, so they are taken to be those with the longest buffers.
fn fits(program: &Program, lengths: &[Vec<[usize; 2]>], processes: usize, available: u64) -> Result<()> {
    let group = program.groups.iter().map(|group| group.size).max().unwrap_or(0);
    let tables = data::table_bytes(group, usize::MAX) as u128;
    let of_rank = |lengths: &Vec<[usize; 2]>| tables + lengths.iter().flatten().map(|&len| len as u128).sum::<u128>();
    let mut ranks: Vec<u128> = lengths.iter().map(of_rank).collect();
    ranks.sort_unstable_by(|one, other| other.cmp(one));
    let needed: u128 = ranks.iter().take(processes).sum();
    if needed <= u128::from(available) {
        return Ok(());
    }
    let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
    Err(Error::InvalidArgument(format!(
        "the workload needs {:.1} GiB of memory in {}; this machine has {:.1} GiB left; --scale 1/64 makes all sizes smaller",
        gib(needed),
        counted(processes, "process"),
        gib(u128::from(available))
    )))
}

fn place(program: &Program, group: usize, rank: usize) -> Place {
    let group = &program.groups[group];
    Place { rank: program.layout.place(group, rank).1, nranks: group.size, root: 0 }
}

/// A call of blocks of these sizes, by the function for them.
fn issue_skewed(kind: Kind, comm: &Comm, buffers: &Buffers, (sizes, rank): (&[usize], usize)) -> Result<()> {
    let received = vec![sizes[rank]; sizes.len()];
    let call = match kind {
        Kind::AllGather => nccl::Call::AllGatherV { counts: sizes },
        Kind::ReduceScatter => nccl::Call::ReduceScatterV { counts: sizes, op: RedOp::Sum.code() },
        Kind::AllToAll => nccl::Call::AllToAllV { sent: sizes, received: &received },
        other => return Err(Error::Internal(format!("{} of blocks of different sizes", other.name()))),
    };
    comm.issue(call, buffers, buffers.send.len(), buffers.recv.len())
}

impl<'a> Replay<'a> {
    fn new(program: &'a Program, world: &Comm<'a>, lengths: &[[usize; 2]], rank: usize) -> Result<Replay<'a>> {
        let mut replay = Replay { program, comms: Vec::new(), places: Vec::new(), buffers: Vec::new() };
        for (index, group) in program.groups.iter().enumerate() {
            let (colour, key) = program.layout.place(group, rank);
            let mut comm = world.split(colour, key)?;
            comm.add_stream()?;
            replay.comms.push(comm);
            replay.places.push(place(program, index, rank));
            let arena = |len: usize| {
                HostBuffer::try_new(len)
                    .ok_or_else(|| Error::System(format!("there is no memory for a buffer of {len} bytes")))
            };
            replay.buffers.push([arena(lengths[index][0])?, arena(lengths[index][1])?]);
        }
        Ok(replay)
    }

    fn buffers_of(&mut self, call: &Call) -> Buffers {
        let [send, recv] = bytes_of(call, self.places[call.group]);
        let [to, from] = &mut self.buffers[call.group];
        let (send, recv) = (to.region().part(0, send), from.region().part(0, recv));
        Buffers { send, recv, count: call.count, dtype: call.dtype }
    }

    fn issue(&mut self, call: &Call) -> Result<Pending> {
        let buffers = self.buffers_of(call);
        let (comm, place) = (&self.comms[call.group], self.places[call.group]);
        let stream = comm.stream().ok_or_else(|| Error::Internal("a group without a stream".into()))?;
        let sizes = call.sizes(place.nranks);
        let begun = stream.mark()?;
        match sizes {
            Some(sizes) => issue_skewed(call.kind, comm, &buffers, (&sizes, place.rank))?,
            None => call.kind.issue(comm, &buffers, RedOp::Sum.code(), place)?,
        }
        Ok(Pending { begun, ended: stream.mark()? })
    }

    /// The errors of what was queued, if there are any.
    fn settle(&self) -> Result<()> {
        for (comm, group) in self.comms.iter().zip(&self.program.groups) {
            let outcome = comm.stream().map_or(Ok(()), |stream| stream.synchronize());
            outcome.map_err(|error| Error::System(format!("group {}: {error}", group.name)))?;
        }
        Ok(())
    }

    /// One step, in microseconds.
    fn step(&mut self) -> Result<Times> {
        let program = self.program;
        let nrows = program.rows.len();
        let mut times = Times { step: 0.0, busy: vec![0.0; nrows], exposed: vec![0.0; nrows] };
        let mut pending: Vec<Option<Pending>> = program.calls.iter().map(|_| None).collect();
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let start = Instant::now();
        for op in &program.ops {
            match *op {
                Op::Compute(_, us) => std::thread::sleep(Duration::from_secs_f64(us / 1e6)),
                Op::Issue(index) => pending[index] = Some(self.issue(&program.calls[index])?),
                Op::WaitUntil(index, bytes) => {
                    let call = &program.calls[index];
                    let recv = self.buffers_of(call).recv;
                    let before = Instant::now();
                    self.comms[call.group].wait_range(recv, bytes)?;
                    times.exposed[call.row] += micros(before.elapsed());
                }
                Op::Wait(index) => {
                    let Some(call) = pending[index].take() else { continue };
                    let before = Instant::now();
                    let ended = call.ended.wait();
                    let row = program.calls[index].row;
                    times.exposed[row] += micros(before.elapsed());
                    times.busy[row] += micros(ended.saturating_duration_since(call.begun.wait()));
                }
            }
        }
        times.step = micros(start.elapsed());
        self.settle()?;
        Ok(times)
    }

    /// Makes each different call once; how many elements were wrong on all ranks.
    fn check(&mut self, store: &mut Store) -> Result<usize> {
        let mut wrong = 0;
        for call in different(self.program) {
            let place = self.places[call.group];
            let reduce = if call.kind.reduces() { Reduce::Builtin(RedOp::Sum) } else { Reduce::None };
            let larger = call.count.saturating_mul(if call.kind.is_split() { place.nranks } else { 1 });
            let data = Data::new(call.dtype, reduce, place.nranks, larger).survives_codes();
            let buffers = self.buffers_of(call);
            data.fill(buffers.send, place.rank, 0);
            self.issue(call)?.ended.wait();
            self.settle()?;
            wrong += match call.sizes(place.nranks) {
                Some(sizes) => data.wrong_skewed(call.kind, buffers.recv, &sizes, place.rank),
                None => data.wrong(call.kind, buffers.recv, call.count, place),
            };
        }
        let all = store.all_gather(&(wrong as u64).to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes.as_slice().try_into().map(u64::from_le_bytes);
        all.iter()
            .map(|bytes| number(bytes).map_or(Err(Error::Remote("not a number".into())), |n| Ok(n as usize)))
            .sum()
    }
}
