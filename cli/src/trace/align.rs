//! Traces of several processes with one clock.
//!
//! Processes of one host share its wall clock. Hosts are compared by the ends of calls that both have taken part in: a
//! collective in which every rank needs every other one ends everywhere at nearly the same time. The difference of two
//! clocks is the median over such calls; where there are many, a line through the medians of the first and the last third,
//! as clocks run apart. Hosts without such calls keep their wall clocks.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use strata::records::trace::CommIndex;
use strata::records::{CallRecord, CallState, CallTrace, TraceComm, TraceProcess};

/// From how many common calls on two clocks may run at different speeds.
const FOR_SPEED: usize = 48;
/// The most that they may, in parts of a second for a second: more is noise.
const MOST_SPEED: f64 = 1e-3;

/// From a host's wall clock to that of the first host: `shift + speed * (t - at)` is added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Correction {
    shift: f64,
    speed: f64,
    at: f64,
}

impl Correction {
    fn of(&self, wall: f64) -> f64 {
        wall + self.shift + self.speed * (wall - self.at)
    }
}

/// Collectives that no rank leaves before all have come.
fn is_common(call: &CallRecord) -> bool {
    let all = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
    call.state == CallState::Ended && all.contains(&call.call.as_str()) && call.nranks > 1
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

/// What brings one clock to another, by the times of the same moments on both: (this one's, the other's), in order.
fn correction(pairs: &[(f64, f64)]) -> Correction {
    let differences =
        |pairs: &[(f64, f64)]| median(&mut pairs.iter().map(|(own, other)| other - own).collect::<Vec<_>>());
    let middle = |pairs: &[(f64, f64)]| median(&mut pairs.iter().map(|(own, _)| *own).collect::<Vec<_>>());
    let plain = Correction { shift: differences(pairs), speed: 0.0, at: 0.0 };
    if pairs.len() < FOR_SPEED {
        return plain;
    }
    let third = pairs.len() / 3;
    let (first, last) = (&pairs[..third], &pairs[pairs.len() - third..]);
    let (from, to) = (middle(first), middle(last));
    let speed = (differences(last) - differences(first)) / (to - from);
    match speed.is_finite() && speed.abs() <= MOST_SPEED {
        true => Correction { shift: differences(first), speed, at: from },
        false => plain,
    }
}

/// The process of each trace and its host.
struct Source {
    host: String,
    wall_ns: u64,
}

/// Which process has made a call: a trace that has been merged before has several, of one clock.
struct Sources<'a> {
    comms: CommIndex<'a>,
    by_rank: BTreeMap<u32, Source>,
}

fn source(process: &TraceProcess) -> Source {
    Source { host: process.host.clone(), wall_ns: process.wall_ns }
}

impl<'a> Sources<'a> {
    fn of(trace: &'a CallTrace) -> Sources<'a> {
        let by_rank = trace.processes.iter().map(|process| (process.rank, source(process))).collect();
        Sources { comms: trace.index(), by_rank }
    }

    /// The process; of a trace of one process that has several ranks, that one.
    fn find(&self, call: &CallRecord) -> Option<&Source> {
        self.by_rank.get(&self.comms.process_of(call)).or(self.by_rank.values().next())
    }
}

/// When each common call ended on each host, by the wall clock there.
fn ends(traces: &[CallTrace]) -> BTreeMap<(&str, u64), BTreeMap<String, f64>> {
    let mut ends: BTreeMap<(&str, u64), BTreeMap<String, f64>> = BTreeMap::new();
    for trace in traces {
        let sources = Sources::of(trace);
        for call in trace.calls.iter().filter(|call| is_common(call)) {
            let (Some(source), Some(ended)) = (sources.find(call), call.ended_ns) else { continue };
            let wall = source.wall_ns as f64 + ended as f64;
            let of_call = ends.entry((&call.comm, call.number)).or_default();
            of_call.entry(source.host.clone()).and_modify(|first| *first = first.min(wall)).or_insert(wall);
        }
    }
    ends
}

/// What brings each host's clock to that of the first host.
fn corrections(traces: &[CallTrace]) -> BTreeMap<String, Correction> {
    let ends = ends(traces);
    let processes = traces.iter().flat_map(|trace| &trace.processes);
    let hosts: BTreeSet<String> = processes.map(|process| process.host.clone()).collect();
    let mut pairs: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for hosts in ends.values().filter(|hosts| hosts.len() > 1) {
        let Some((hub, at)) = hosts.iter().next() else { continue };
        for (host, end) in hosts.iter().skip(1) {
            pairs.entry((hub, host)).or_default().push((*at, *end));
            pairs.entry((host, hub)).or_default().push((*end, *at));
        }
    }
    pairs.values_mut().for_each(|pairs| pairs.sort_by(|one, other| one.0.total_cmp(&other.0)));
    let mut found: BTreeMap<String, Correction> = BTreeMap::new();
    for first in &hosts {
        if found.contains_key(first) {
            continue;
        }
        found.insert(first.clone(), Correction::default());
        let mut queue = VecDeque::from([first.clone()]);
        while let Some(known) = queue.pop_front() {
            for ((host, _), pairs) in pairs.iter().filter(|((_, other), _)| *other == known) {
                if found.contains_key(*host) {
                    continue;
                }
                let to_known = found[&known];
                let pairs: Vec<(f64, f64)> = pairs.iter().map(|(own, other)| (*own, to_known.of(*other))).collect();
                found.insert(host.to_string(), correction(&pairs));
                queue.push_back(host.to_string());
            }
        }
    }
    found
}

/// One trace of all, with one clock that begins where the first process began.
pub fn merge(traces: Vec<CallTrace>) -> CallTrace {
    let corrections = corrections(&traces);
    // Sums of a wall clock's nanoseconds lose 100 ns as floating-point numbers, so times are taken relative to one of them.
    let zero = traces.iter().flat_map(|trace| &trace.processes).map(|process| process.wall_ns).min().unwrap_or(0);
    let shift_of = |source: &Source, ns: u64| {
        let wall = source.wall_ns as f64 + ns as f64;
        let correction = corrections.get(&source.host).copied().unwrap_or_default();
        let own = (source.wall_ns - zero) as i128 + i128::from(ns);
        let moved = own + (correction.of(wall) - wall).round() as i128;
        u64::try_from(moved.max(0)).unwrap_or(u64::MAX)
    };
    let mut merged = CallTrace::default();
    let mut comms: BTreeMap<(String, u32), TraceComm> = BTreeMap::new();
    for mut trace in traces {
        let mut calls = std::mem::take(&mut trace.calls);
        let sources = Sources::of(&trace);
        for call in &mut calls {
            let Some(source) = sources.find(call) else { continue };
            call.accepted_ns = shift_of(source, call.accepted_ns);
            call.begun_ns = call.begun_ns.map(|ns| shift_of(source, ns));
            call.ended_ns = call.ended_ns.map(|ns| shift_of(source, ns));
        }
        merged.calls.append(&mut calls);
        for process in &mut trace.processes {
            (process.written_ns, process.wall_ns) = (shift_of(&source(process), process.written_ns), zero);
        }
        merged.processes.append(&mut trace.processes);
        comms.extend(trace.comms.into_iter().map(|comm| ((comm.key.clone(), comm.rank), comm)));
    }
    merged.processes.sort_by_key(|process| process.rank);
    merged.comms = comms.into_values().collect();
    merged
}

#[cfg(test)]
mod tests {
    use super::super::workload::samples::{call, trace};
    use super::*;

    /// Two hosts; the second one's clock is `ahead` ns, and gains `speed` ns a second.
    fn two_hosts(calls: u64, ahead: i64, speed: i64) -> Vec<CallTrace> {
        let wall = 1_700_000_000_000_000_000u64;
        let of_rank = |rank: u32| {
            let calls = (0..calls).map(|index| {
                let end = 1_000_000 + index * 100_000_000;
                let gained = if rank == 0 { 0 } else { speed * index as i64 / 10 };
                // Ends scatter by some microseconds.
                let scatter = (index * 7919 + u64::from(rank) * 104_729) % 5_000;
                let end = (end as i64 + gained) as u64 + scatter;
                call("ab", rank, 2, "all_reduce", index + 1, (end - 900_000, end))
            });
            let mut trace = trace(rank, calls.collect());
            trace.processes[0].host = format!("host{rank}");
            trace.processes[0].wall_ns = (wall as i64 + if rank == 0 { 0 } else { ahead }) as u64;
            trace
        };
        vec![of_rank(0), of_rank(1)]
    }

    /// The greatest distance of the ends of one call.
    fn worst(trace: &CallTrace) -> u64 {
        let mut ends: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        trace.calls.iter().for_each(|call| ends.entry(call.number).or_default().push(call.ended_ns.unwrap()));
        ends.values().map(|ends| ends.iter().max().unwrap() - ends.iter().min().unwrap()).max().unwrap()
    }

    #[test]
    fn clocks_that_are_apart_are_brought_together_by_the_ends_of_calls() {
        for ahead in [-40_000_000_000, -3_000_000, 0, 5_000_000_000] {
            let merged = merge(two_hosts(20, ahead, 0));
            assert!(worst(&merged) < 10_000, "{ahead}: {}", worst(&merged));
            assert_eq!(merged.processes.len(), 2);
            assert_eq!(merged.calls.len(), 40);
        }
    }

    #[test]
    fn clocks_that_run_apart_are_followed() {
        let merged = merge(two_hosts(600, 5_000_000, 50_000));
        assert!(worst(&merged) < 20_000, "{}", worst(&merged));
        assert!(worst(&merge(two_hosts(FOR_SPEED as u64 - 1, 0, 50_000))) > 50_000, "too few to tell");
    }

    #[test]
    fn processes_of_one_host_share_its_wall_clock() {
        let mut traces = two_hosts(20, 0, 0);
        traces.iter_mut().for_each(|trace| trace.processes[0].host = "one".to_string());
        traces[1].processes[0].wall_ns += 3_000_000;
        let merged = merge(traces);
        let begun = |rank: u32| merged.calls.iter().find(|call| call.rank == rank).unwrap().begun_ns.unwrap();
        assert!(begun(1) - begun(0) > 2_900_000);
    }

    #[test]
    fn a_merged_trace_can_be_merged_again() {
        let once = merge(two_hosts(20, 7_000_000, 0));
        assert_eq!(merge(vec![once.clone()]), once);
    }
}
