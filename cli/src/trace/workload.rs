//! From a trace to a workload file: the calls of one rank in their order, and the time that passed between them.
//!
//! A call that ended before the next one was made is waited for at once. Another one overlaps: it is waited for where the first
//! call was made after its end, since earlier the program cannot have. What the program did from one call, or wait, to the
//! next is computing of so many microseconds. Where calls repeat, one repetition is the step, with the means of these times.
#![forbid(unsafe_code)]

use super::grid::RankGrid;
use super::period;
use crate::perf::collective::Kind;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use strata::error::{counted, Error, Result};
use strata::records::{CallRecord, CallState, CallTrace, TraceComm};

/// The kinds of calls that workloads have.
const KINDS: [Kind; 5] = [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::AllToAll, Kind::Broadcast];
/// Shorter times between calls are those of calling.
const LEAST_GAP_NS: u64 = 1000;
/// The most bytes of a workload file.
const MOST_BYTES: usize = 1 << 20;

/// A workload file, and what is told of it.
pub struct MadeWorkload {
    /// Its text.
    pub text: String,
    /// How many calls, of how many.
    pub told: String,
}

/// What makes two calls the same step.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StepKey {
    kind: &'static str,
    group: String,
    count: u64,
    dtype: String,
    overlaps: bool,
}

/// A call as a step: when it was made, and until when the program waited for it.
struct CallTimes {
    accepted: u64,
    ended: u64,
}

/// Elements of the larger buffer.
fn count_of(call: &CallRecord, kind: Kind) -> u64 {
    match kind.is_split() {
        true => call.count.saturating_mul(u64::from(call.nranks)),
        false => call.count,
    }
}

/// The kind of a call that a workload can have, or why it has none. A broadcast is from rank 0 there.
fn kind_of(call: &CallRecord) -> std::result::Result<Kind, &'static str> {
    let kind = call.call.parse().ok().filter(|kind| KINDS.contains(kind)).ok_or("which workloads do not have")?;
    match call.state {
        CallState::Accepted | CallState::Begun => return Err("not ended when the trace was written"),
        CallState::Failed => return Err("failed"),
        CallState::Ended => {}
    }
    match (call.vectored, call.nranks) {
        (true, _) => Err("whose blocks differ in size"),
        (_, 0 | 1) => Err("on a communicator of one rank"),
        _ => Ok(kind),
    }
}

/// Calls that a workload cannot have, by name and reason.
type LeftOut<'a> = BTreeMap<(&'a str, &'static str), usize>;

/// The ranks of the job: as many as processes are told of.
fn world(trace: &CallTrace) -> u32 {
    let members = trace.comms.iter().filter_map(|comm| strata::records::trace::from_ranges(&comm.members));
    let highest = members.flatten().max().map_or(0, |highest| highest + 1);
    trace.comms.iter().map(|comm| comm.nranks).max().unwrap_or(0).max(highest)
}

/// The calls of a rank with their steps, in order, and how many others there are.
fn calls_of(trace: &CallTrace, rank: u32) -> (Vec<(&CallRecord, Kind)>, LeftOut<'_>) {
    let mut left = LeftOut::new();
    let mut calls = Vec::new();
    let index = trace.index();
    for call in trace.calls.iter().filter(|call| index.process_of(call) == rank) {
        match kind_of(call) {
            Ok(kind) => calls.push((call, kind)),
            Err(why) => *left.entry((&call.call, why)).or_default() += 1,
        }
    }
    calls.sort_by_key(|(call, _)| call.accepted_ns);
    (calls, left)
}

/// What happens in a step of the program: microseconds before each call, averaged over repetitions.
struct StepText<'a> {
    keys: &'a [StepKey],
    gaps: Vec<f64>,
    /// Of each call, those that are waited for before it.
    waits: Vec<Vec<usize>>,
}

impl StepText<'_> {
    fn write(&self, out: &mut String, with_gaps: bool) {
        let mut open = 0;
        for (index, key) in self.keys.iter().enumerate() {
            for _ in &self.waits[index] {
                let _ = writeln!(out, "    {{ wait = \"calls\" }},");
                open -= 1;
            }
            if with_gaps && self.gaps[index] * 1000.0 >= LEAST_GAP_NS as f64 {
                let _ = writeln!(out, "    {{ us = {:.1} }},", self.gaps[index]);
            }
            let StepKey { kind, group, count, dtype, overlaps } = key;
            let overlap = if *overlaps { ", overlap = \"calls\"" } else { "" };
            let _ = writeln!(
                out,
                "    {{ call = \"{kind}\", group = {group}, count = {count}, dtype = \"{dtype}\"{overlap} }},"
            );
            open += usize::from(*overlaps);
        }
        if open > 0 {
            let _ = writeln!(out, "    {{ wait_all = \"calls\" }},");
        }
    }
}

/// For each call of one repetition which of those before it, in the same repetition, the program waits for first; and the time
/// from the last thing that it waited for, or did, to the call.
fn laid_out(keys: &[StepKey], times: &[CallTimes], before: u64) -> (Vec<Vec<usize>>, Vec<f64>) {
    let (mut waits, mut gaps) = (Vec::new(), Vec::new());
    let (mut host, mut open): (u64, Vec<usize>) = (before, Vec::new());
    for (index, call) in times.iter().enumerate() {
        // In order: a name is waited for by the oldest call of it.
        let done = open.iter().take_while(|&&open| times[open].ended <= call.accepted).count();
        let done: Vec<usize> = open.drain(..done).collect();
        host = done.iter().map(|&done| times[done].ended).fold(host, u64::max);
        gaps.push(call.accepted.saturating_sub(host) as f64 / 1000.0);
        waits.push(done);
        host = if keys[index].overlaps { call.accepted } else { call.ended };
        if keys[index].overlaps {
            open.push(index);
        }
    }
    (waits, gaps)
}

/// The workload of a rank's calls.
pub fn make(trace: &CallTrace, rank: Option<u32>, with_gaps: bool) -> Result<MadeWorkload> {
    let ranks: BTreeSet<u32> = trace.comms.iter().map(|comm| comm.process).collect();
    let rank = match rank {
        Some(rank) if !ranks.contains(&rank) => {
            return Err(Error::InvalidArgument(format!("--rank {rank}: the traces have no calls of it")));
        }
        rank => rank.or(ranks.first().copied()).unwrap_or(0),
    };
    let (calls, left) = calls_of(trace, rank);
    if calls.is_empty() {
        let names = KINDS.map(Kind::name).join(", ");
        let others =
            left.iter().map(|((name, why), calls)| format!("; left out: {} of {name}, {why}", counted(*calls, "call")));
        let others: String = others.collect();
        return Err(Error::InvalidArgument(format!(
            "rank {rank} has no calls that a workload can have, which are {names}{others}"
        )));
    }
    let used: BTreeSet<&str> = calls.iter().map(|(call, _)| call.comm.as_str()).collect();
    let of_calls = |comm: &&TraceComm| used.contains(comm.key.as_str());
    let comms: Vec<&TraceComm> = trace.comms.iter().filter(of_calls).collect();
    let grid = RankGrid::of(&comms, world(trace))?;
    let (index_of, last) = (trace.index(), calls.len() - 1);
    let key = |(index, (call, kind)): (usize, &(&CallRecord, Kind))| {
        let comm = index_of.comm_of(call).ok_or_else(|| Error::InvalidArgument("a call of no communicator".into()))?;
        let next = calls[(index + 1).min(last)].0;
        Ok(StepKey {
            kind: kind.name(),
            group: grid.group(comm)?,
            count: count_of(call, *kind),
            dtype: call.dtype.clone(),
            overlaps: index < last && call.ended_ns.is_some_and(|ended| next.accepted_ns < ended),
        })
    };
    let keys = calls.iter().enumerate().map(key).collect::<Result<Vec<StepKey>>>()?;
    let text = text(trace, &calls, &keys, &grid, with_gaps, &left);
    if text.0.len() > MOST_BYTES {
        let calls = counted(calls.len(), "call");
        return Err(Error::InvalidArgument(format!(
            "{calls} that do not repeat make more than the {MOST_BYTES} bytes of a workload; trace fewer (STRATA_TRACE_RECORDS)"
        )));
    }
    let told = format!("{} of {} of rank {rank}", counted(text.1, "call"), calls.len() + left.values().sum::<usize>());
    Ok(MadeWorkload { text: text.0, told })
}

/// How many calls were made by each algorithm whose messages are coded.
fn coded<'a>(calls: &[(&'a CallRecord, Kind)]) -> BTreeMap<&'a str, usize> {
    let algorithms = calls.iter().map(|(call, _)| call.algorithm.as_str());
    algorithms.filter(|algorithm| algorithm.contains("coded_")).fold(BTreeMap::new(), |mut coded, algorithm| {
        *coded.entry(algorithm).or_default() += 1;
        coded
    })
}

/// The file, and how many calls it has.
fn text(
    trace: &CallTrace,
    calls: &[(&CallRecord, Kind)],
    keys: &[StepKey],
    grid: &RankGrid,
    with_gaps: bool,
    left: &LeftOut<'_>,
) -> (String, usize) {
    let times: Vec<CallTimes> = calls
        .iter()
        .map(|(call, _)| CallTimes { accepted: call.accepted_ns, ended: call.ended_ns.unwrap_or(call.accepted_ns) })
        .collect();
    let whole = period::Period { start: 0, len: keys.len(), times: 1 };
    let period = period::find(keys).unwrap_or(whole);
    let step = &keys[period.start..period.start + period.len];
    let (mut waits, mut sums) = (Vec::new(), vec![0.0; step.len()]);
    for repetition in 0..period.times {
        let from = period.start + repetition * period.len;
        // Before the first call nobody knows what the program did.
        let before = from.checked_sub(1).map_or(times[from].accepted, |last| times[last].ended);
        let (own_waits, gaps) = laid_out(step, &times[from..from + period.len], before);
        waits = own_waits;
        sums.iter_mut().zip(gaps).for_each(|(sum, gap)| *sum += gap);
    }
    let gaps = sums.iter().map(|sum| sum / period.times as f64).collect();
    let mut out = String::from("# The format is described in Strata's docs/workloads.md.\n");
    let host = trace.processes.first().map_or("", |process| &process.host);
    let _ = writeln!(out, "title = \"Calls of a program on {} ranks, recorded\"", grid.world);
    let _ = writeln!(out, "source = [\"a trace of Strata's ({})\"]", host.replace(['"', '\\', '\n'], "?"));
    let _ = writeln!(out, "assumptions = [");
    let repeats = format!("{} of {} calls repeat {} times", period.len * period.times, keys.len(), period.times);
    let _ = writeln!(out, "    \"one step is {} of the program's: {repeats}\",", counted(step.len(), "call"));
    let _ =
        writeln!(out, "    \"a call that overlaps the next ones is waited for where a call was made after its end\",");
    for (algorithm, calls) in coded(calls) {
        let calls = counted(calls, "call");
        let _ = writeln!(out, "    \"{calls} by {algorithm}: in a code, which a workload does not have\",");
    }
    for ((name, why), calls) in left {
        let _ = writeln!(out, "    \"left out: {} of {name}, {why}\",", counted(*calls, "call"));
    }
    let _ = writeln!(out, "]\ndtype = \"{}\"\ngrid = [", step[0].dtype);
    for (name, size) in grid.dimensions() {
        let _ = writeln!(out, "    {{ name = \"{name}\", size = {size} }},");
    }
    let _ = writeln!(out, "]\n\n[[phase]]\nname = \"step\"\nsteps = [");
    StepText { keys: step, gaps, waits }.write(&mut out, with_gaps);
    out += "]\n";
    (out, step.len())
}

/// Traces for tests.
#[cfg(test)]
pub mod samples {
    use strata::records::{CallRecord, CallState, CallTrace, TraceComm, TraceProcess};

    /// A call that has ended.
    pub fn call(comm: &str, rank: u32, nranks: u32, call: &str, number: u64, times: (u64, u64)) -> CallRecord {
        CallRecord {
            record: number,
            comm: comm.to_string(),
            rank,
            nranks,
            call: call.to_string(),
            number,
            count: 1000,
            dtype: "float".to_string(),
            bytes: 4000,
            input_bytes: 4000,
            output_bytes: 4000,
            op: String::new(),
            root: None,
            peer: None,
            in_place: false,
            vectored: false,
            tag: 0,
            algorithm: "ring".to_string(),
            carrier: "tcp".to_string(),
            group: None,
            nic_bytes: None,
            accepted_ns: times.0,
            begun_ns: Some(times.0),
            ended_ns: Some(times.1),
            state: CallState::Ended,
            awaited: None,
        }
    }

    /// The trace of a process with these calls, all on communicators that it is the same rank of.
    pub fn trace(rank: u32, calls: Vec<CallRecord>) -> CallTrace {
        let mut comms: Vec<TraceComm> = Vec::new();
        for call in &calls {
            if comms.iter().all(|comm| comm.key != call.comm) {
                comms.push(TraceComm {
                    key: call.comm.clone(),
                    rank: call.rank,
                    nranks: call.nranks,
                    process: rank,
                    nodes: 1,
                    ..TraceComm::default()
                });
            }
        }
        comms.sort_by(|one, other| one.key.cmp(&other.key));
        let host = "host".to_string();
        let process = TraceProcess { host, rank, pid: 1 + rank, written_ns: 1 << 40, ..TraceProcess::default() };
        CallTrace { processes: vec![process], comms, calls }
    }
}

#[cfg(test)]
mod tests {
    use super::samples::{call, trace};
    use super::*;
    use crate::perf::workload;

    /// Four steps: two all-gathers of which the first overlaps the second call, a reduce-scatter, an all-reduce of the node.
    fn sample() -> CallTrace {
        let mut calls = Vec::new();
        for step in 0..4u64 {
            let at = |us: u64| 1_000_000 + step * 100_000 + us * 1000;
            calls.push(call("ab", 0, 8, "all_gather", 3 * step + 1, (at(0), at(20))));
            calls.push(call("ab", 0, 8, "all_reduce", 3 * step + 2, (at(5), at(25))));
            calls.push(call("ab", 0, 8, "reduce_scatter", 3 * step + 3, (at(40), at(50))));
            calls.push(call("cd", 0, 2, "all_reduce", step + 1, (at(50), at(60))));
        }
        let mut trace = trace(0, calls);
        trace.comms.iter_mut().find(|comm| comm.nranks == 2).unwrap().members = "0-1".to_string();
        trace
    }

    #[test]
    fn a_step_has_its_calls_waits_and_the_time_between_them() {
        let made = make(&sample(), None, true).unwrap();
        assert_eq!(made.told, "4 calls of 16 of rank 0");
        let steps = made.text.split("steps = [\n").nth(1).unwrap();
        let expected = r#"    { us = 30.0 },
    { call = "all_gather", group = "world", count = 8000, dtype = "float", overlap = "calls" },
    { us = 5.0 },
    { call = "all_reduce", group = "world", count = 1000, dtype = "float" },
    { wait = "calls" },
    { us = 15.0 },
    { call = "reduce_scatter", group = "world", count = 8000, dtype = "float" },
    { call = "all_reduce", group = "dimension0", count = 1000, dtype = "float" },
]
"#;
        assert_eq!(steps, expected);
        assert!(made.text.contains("{ name = \"dimension0\", size = 2 }"));
        assert!(made.text.contains("16 of 16 calls repeat 4 times"));
        let plain = make(&sample(), Some(0), false).unwrap();
        assert!(!plain.text.contains("us ="));
    }

    #[test]
    fn the_command_reads_what_is_made() {
        let made = make(&sample(), None, true).unwrap();
        workload::check(&made.text, 8).unwrap();
        workload::check(&made.text, 16).unwrap();
        assert!(workload::check(&made.text, 3).is_err(), "half a group");
    }

    #[test]
    fn codes_of_calls_are_told_since_a_workload_has_none() {
        let mut with_codes = sample();
        for call in with_codes.calls.iter_mut().filter(|call| call.call == "all_reduce" && call.nranks == 8) {
            call.algorithm = "two_level(direct,coded_mx8)".to_string();
        }
        let made = make(&with_codes, None, true).unwrap();
        assert!(made.text.contains("\"4 calls by two_level(direct,coded_mx8): in a code, which"), "{}", made.text);
        workload::check(&made.text, 8).unwrap();
    }

    #[test]
    fn what_a_workload_cannot_have_is_left_out_and_told() {
        let mut with_send = sample();
        with_send.calls.push(call("ab", 0, 8, "send", 1, (9_000_000, 9_000_001)));
        let other = |change: fn(&mut CallRecord)| {
            let mut other = call("ab", 0, 8, "all_gather", 100, (9_000_002, 9_000_003));
            change(&mut other);
            other
        };
        with_send.calls.push(other(|call| call.vectored = true));
        with_send.calls.push(other(|call| (call.state, call.ended_ns) = (CallState::Begun, None)));
        with_send.calls.push(other(|call| call.state = CallState::Failed));
        with_send.calls.push(other(|call| call.nranks = 1));
        let made = make(&with_send, None, true).unwrap();
        let left: Vec<&str> = made.text.lines().filter_map(|line| line.trim().strip_prefix("\"left out: ")).collect();
        let expected = [
            "1 call of all_gather, failed\",",
            "1 call of all_gather, not ended when the trace was written\",",
            "1 call of all_gather, on a communicator of one rank\",",
            "1 call of all_gather, whose blocks differ in size\",",
            "1 call of send, which workloads do not have\",",
        ];
        assert_eq!(left, expected);
        workload::check(&made.text, 8).unwrap();
        assert!(!made.text.contains("in a code"), "{}", made.text);
        assert_eq!(made.told, "4 calls of 21 of rank 0");
        with_send.calls.retain(|call| call.call == "send");
        let refused = make(&with_send, None, true).err().expect("no call is left");
        assert!(refused.text().contains("no calls that a workload"), "{}", refused.text());
        assert!(refused.text().ends_with("; left out: 1 call of send, which workloads do not have"));
        assert!(make(&sample(), Some(9), true).is_err_and(|error| error.text().contains("--rank 9")));
    }
}
