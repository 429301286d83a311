//! Traces as a table: per collective and size how many calls, their times and rates, and who waited for whom.
//!
//! Columns are those of DeepSpeed's communication logger, with the median and the 90th percentile, and the share of all time in
//! calls. Rates are nccl-tests': bytes by time, and that times what the collective's busiest link carries of it.
#![forbid(unsafe_code)]

use super::call::{CallRecord, CallState};
use super::trace::CallTrace;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Calls of one kind and size.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallClass {
    /// The collective's name, `send` or `recv`.
    pub call: String,
    /// Bytes as nccl-tests counts them: of the larger buffer, the same on all ranks.
    pub bytes: u64,
    /// How many have ended, on all ranks of the trace together.
    pub calls: usize,
    /// How many have failed, or had not ended.
    pub open: usize,
    /// Nanoseconds that they ran, together.
    pub total_ns: u64,
    /// The median of one.
    pub median_ns: u64,
    /// What nine of ten stay within.
    pub p90_ns: u64,
    /// Bytes of all by their time, GB/s.
    pub algorithm_rate: f64,
    /// The same times what the busiest link carries of a byte.
    pub bus_rate: f64,
    /// Bytes sent to other nodes.
    pub nic_bytes: u64,
    /// By which algorithms, and how often.
    pub algorithms: BTreeMap<String, usize>,
}

/// How long a rank waited for others to begin the calls that it had begun.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankWait {
    /// The process rank.
    pub rank: u32,
    /// Nanoseconds for the last ones, in all collectives together.
    pub waited_ns: u64,
    /// How often it was the last.
    pub last: usize,
    /// Nanoseconds that others waited for it when it was.
    pub awaited_ns: u64,
}

/// Bytes as nccl-tests counts them; where blocks differ in size, those of the rank's larger buffer.
fn size_of(call: &CallRecord) -> u64 {
    match call.call.as_str() {
        _ if call.vectored => call.input_bytes.max(call.output_bytes),
        "all_to_all" | "gather" | "scatter" => call.bytes.saturating_mul(u64::from(call.nranks)),
        _ => call.bytes,
    }
}

/// What the busiest link carries of a byte.
fn factor(call: &str, nranks: u32) -> f64 {
    let ranks = f64::from(nranks.max(1));
    match call {
        "all_reduce" => 2.0 * (ranks - 1.0) / ranks,
        "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter" => (ranks - 1.0) / ranks,
        _ => 1.0,
    }
}

/// The value that so much of the sorted values stay within.
fn quantile(sorted: &[u64], part: f64) -> u64 {
    let index = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(index.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

/// The class of a call. Calls whose blocks differ in size are like those of up to the next power of two.
fn class_of(call: &CallRecord) -> (String, u64) {
    match call.vectored {
        true => (format!("{}_v", call.call), size_of(call).next_power_of_two()),
        false => (call.call.clone(), size_of(call)),
    }
}

/// A call, and its own time if it has ended.
type TimedCall<'a> = (&'a CallRecord, Option<u64>);

/// The classes of a trace, by name and size.
pub fn classes(trace: &CallTrace) -> Vec<CallClass> {
    let mut found: BTreeMap<(String, u64), Vec<TimedCall<'_>>> = BTreeMap::new();
    for (call, ns) in trace.calls.iter().zip(trace.own_ns()) {
        found.entry(class_of(call)).or_default().push((call, ns));
    }
    let class = |((name, bytes), calls): ((String, u64), Vec<TimedCall<'_>>)| {
        let ended = || calls.iter().filter(|(call, _)| call.state == CallState::Ended).map(|(call, _)| *call);
        let mut times: Vec<u64> = calls.iter().filter_map(|(_, ns)| *ns).collect();
        times.sort_unstable();
        let total_ns: u64 = times.iter().sum();
        let moved = |of: &dyn Fn(&CallRecord) -> f64| {
            // Of none the sum is -0.
            ended().map(|call| of(call) * size_of(call) as f64).fold(0.0, |sum, part| sum + part)
                / (total_ns.max(1) as f64)
        };
        let mut algorithms = BTreeMap::new();
        for call in ended().filter(|call| !call.algorithm.is_empty()) {
            *algorithms.entry(call.algorithm.clone()).or_default() += 1;
        }
        CallClass {
            call: name,
            bytes,
            calls: times.len(),
            open: calls.len() - times.len(),
            total_ns,
            median_ns: quantile(&times, 0.5),
            p90_ns: quantile(&times, 0.9),
            algorithm_rate: moved(&|_| 1.0),
            bus_rate: moved(&|call| factor(&call.call, call.nranks)),
            nic_bytes: ended().filter_map(|call| call.nic_bytes).sum(),
            algorithms,
        }
    };
    found.into_iter().map(class).collect()
}

/// Who waited for whom, where the trace has the collectives of several ranks by one clock.
pub fn waits(trace: &CallTrace) -> Vec<RankWait> {
    let index = trace.index();
    let mut same: BTreeMap<(&str, u64), Vec<(u64, u32)>> = BTreeMap::new();
    for call in trace.calls.iter().filter(|call| !call.is_message()) {
        if let Some(begun) = call.begun_ns {
            same.entry((&call.comm, call.number)).or_default().push((begun, index.process_of(call)));
        }
    }
    let mut ranks: BTreeMap<u32, RankWait> = BTreeMap::new();
    for begun in same.values().filter(|begun| begun.len() > 1) {
        let Some(&(end, last)) = begun.iter().max() else { continue };
        let all: u64 = begun.iter().map(|(begun, _)| end - begun).sum();
        for &(begun, rank) in begun {
            let wait = ranks.entry(rank).or_insert(RankWait { rank, ..RankWait::default() });
            wait.waited_ns += end - begun;
        }
        if let Some(wait) = ranks.get_mut(&last) {
            (wait.last, wait.awaited_ns) = (wait.last + 1, wait.awaited_ns + all);
        }
    }
    ranks.into_values().collect()
}

fn size_text(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4);
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {}", units[unit as usize])
}

/// The size of a class: all bytes where rounding them would make another line of the same collective look like it.
fn shown_size(class: &CallClass, classes: &[CallClass]) -> String {
    let text = size_text(class.bytes);
    let is_same = |other: &&CallClass| other.call == class.call && size_text(other.bytes) == text;
    match classes.iter().filter(is_same).count() {
        0 | 1 => text,
        _ => format!("{} B", class.bytes),
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// The table.
pub fn text(trace: &CallTrace) -> String {
    let (classes, waits) = (classes(trace), waits(trace));
    let all_ns: u64 = classes.iter().map(|class| class.total_ns).sum();
    let mut out = String::new();
    let calls: usize = classes.iter().map(|class| class.calls).sum();
    let ranks = trace.comms.iter().map(|comm| comm.process).collect::<std::collections::BTreeSet<_>>().len();
    let _ = writeln!(out, "# {calls} calls that have ended, of {ranks} ranks; {:.3} ms in calls", ms(all_ns));
    let overwritten: u64 = trace.processes.iter().map(|process| process.overwritten + process.lost).sum();
    if overwritten > 0 {
        let _ = writeln!(out, "# {overwritten} older calls are missing: STRATA_TRACE_RECORDS was too small for them");
    }
    let _ = writeln!(
        out,
        "{:<16}{:>12}{:>9}{:>14}{:>8}{:>14}{:>14}{:>14}{:>14}{:>14}  algorithms",
        "call", "size", "count", "total(ms)", "share", "avg(ms)", "median(ms)", "p90(ms)", "algbw(GB/s)", "busbw(GB/s)"
    );
    for class in &classes {
        let share = 100.0 * class.total_ns as f64 / all_ns.max(1) as f64;
        let mean = ms(class.total_ns) / class.calls.max(1) as f64;
        let names = class.algorithms.iter().map(|(name, calls)| format!("{name} {calls}"));
        let open = (class.open > 0).then(|| format!("{} not ended", class.open));
        let names: Vec<String> = names.chain(open).collect();
        let _ = writeln!(
            out,
            "{:<16}{:>12}{:>9}{:>14.3}{share:>7.1}%{mean:>14.4}{:>14.4}{:>14.4}{:>14.3}{:>14.3}  {}",
            class.call,
            shown_size(class, &classes),
            class.calls,
            ms(class.total_ns),
            ms(class.median_ns),
            ms(class.p90_ns),
            class.algorithm_rate,
            class.bus_rate,
            names.join(", ")
        );
    }
    if waits.iter().any(|wait| wait.waited_ns > 0) {
        let _ = writeln!(out, "\n{:<8}{:>16}{:>10}{:>22}", "rank", "waited(ms)", "last", "others waited(ms)");
        for wait in &waits {
            let (waited, awaited) = (ms(wait.waited_ns), ms(wait.awaited_ns));
            let _ = writeln!(out, "{:<8}{waited:>16.3}{:>10}{awaited:>22.3}", wait.rank, wait.last);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::samples::sample;
    use super::*;

    #[test]
    fn calls_of_one_kind_and_size_are_a_line() {
        let mut trace = sample();
        for (index, duration) in [1000u64, 3000, 9000].into_iter().enumerate() {
            let mut call = trace.calls[0].clone();
            call.number += index as u64 + 10;
            call.ended_ns = call.begun_ns.map(|begun| begun + duration);
            trace.calls.push(call);
        }
        let classes = classes(&trace);
        let reduce = classes.iter().find(|class| class.call == "all_reduce").unwrap();
        assert_eq!((reduce.bytes, reduce.calls, reduce.open), (1024, 4, 1));
        assert_eq!((reduce.total_ns, reduce.median_ns, reduce.p90_ns), (15_000, 2000, 9000));
        assert!((reduce.algorithm_rate - 4.0 * 1024.0 / 15_000.0).abs() < 1e-9);
        assert!((reduce.bus_rate - reduce.algorithm_rate).abs() < 1e-9, "two ranks: a factor of 1");
        assert_eq!((reduce.nic_bytes, reduce.algorithms["ring"]), (4 * 512, 4));
        let text = text(&trace);
        assert!(text.contains("# 6 calls that have ended, of 1 ranks"), "{text}");
        assert!(text.contains("3 older calls are missing"), "{text}");
        assert!(text.contains("ring 4, 1 not ended"), "{text}");
    }

    #[test]
    fn what_ran_together_shares_its_time_by_bytes() {
        let mut trace = sample();
        let grouped = |record: u64, bytes: u64, group: u64| CallRecord {
            record,
            bytes,
            group: Some(group),
            ..sample().calls[0].clone()
        };
        // Two groups of 2000 ns, one of three calls and one of two; a group of another rank has the same number.
        trace.calls = [(10, 99, 10), (11, 299, 10), (12, 599, 10), (20, 99, 20), (21, 99, 20)]
            .map(|(record, bytes, group)| grouped(record, bytes, group))
            .to_vec();
        trace.calls.push(CallRecord { rank: 0, ..grouped(10, 99, 10) });
        assert_eq!(trace.own_ns(), [200, 600, 1200, 1000, 1000, 2000].map(Some));
        let classes = classes(&trace);
        assert_eq!(classes.iter().map(|class| class.total_ns).sum::<u64>(), 6000);
        let of_99 = classes.iter().find(|class| class.bytes == 99).unwrap();
        assert_eq!((of_99.calls, of_99.total_ns), (4, 4200));
    }

    #[test]
    fn lines_that_rounding_would_make_alike_show_all_bytes() {
        let mut trace = sample();
        for (call, bytes) in [("all_reduce", 1_000_000), ("all_reduce", 1_000_040), ("all_gather", 1_000_000)] {
            trace.calls.push(CallRecord { call: call.to_string(), bytes, ..trace.calls[0].clone() });
        }
        let text = text(&trace);
        let sizes = |call: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.starts_with(call));
            lines.map(|line| line[16..28].trim().to_string()).collect()
        };
        assert_eq!(sizes("all_reduce"), ["1 KiB", "1000000 B", "1000040 B"], "{text}");
        assert_eq!(sizes("all_gather"), ["1 KiB", "976.6 KiB"], "{text}");
    }

    #[test]
    fn the_last_rank_is_who_the_others_waited_for() {
        let mut trace = sample();
        let mut other = trace.comms[0].clone();
        (other.rank, other.process) = (0, 0);
        trace.comms.push(other);
        let mut late = trace.calls[0].clone();
        (late.rank, late.begun_ns) = (0, late.begun_ns.map(|begun| begun + 700));
        trace.calls.push(late);
        let expected = [(0, 0, 1, 700), (1, 700, 0, 0)];
        let told: Vec<_> =
            waits(&trace).iter().map(|wait| (wait.rank, wait.waited_ns, wait.last, wait.awaited_ns)).collect();
        assert_eq!(told, expected);
        assert!(text(&trace).contains("others waited(ms)"));
        assert!(!text(&sample()).contains("others waited(ms)"), "one rank waits for nobody that it knows of");
    }

    #[test]
    fn sizes_are_of_all_that_a_rank_sends() {
        let trace = sample();
        let call = |name: &str| CallRecord { call: name.to_string(), ..trace.calls[0].clone() };
        assert_eq!(["all_reduce", "all_to_all", "send"].map(|name| size_of(&call(name))), [1024, 2048, 1024]);
        assert_eq!([0, 1, 1024, 1536, 5 << 30].map(size_text), ["0 B", "1 B", "1 KiB", "1.5 KiB", "5 GiB"]);
        assert_eq!([0.5, 0.9, 1.0].map(|part| quantile(&[1, 2, 3], part)), [2, 3, 3]);
        assert_eq!(quantile(&[], 0.5), 0);
    }

    #[test]
    fn calls_whose_blocks_differ_in_size_count_the_bytes_that_the_rank_has() {
        let mut trace = sample();
        trace.calls.clear();
        for (input_bytes, output_bytes, ns) in [(1000, 700, 100), (600, 1024, 300)] {
            let to_all =
                CallRecord { call: "all_to_all".to_string(), vectored: true, nranks: 2, ..sample().calls[0].clone() };
            let ended_ns = to_all.begun_ns.map(|begun| begun + ns);
            trace.calls.push(CallRecord { input_bytes, output_bytes, ended_ns, ..to_all });
        }
        let classes = classes(&trace);
        assert_eq!((classes.len(), classes[0].call.as_str(), classes[0].bytes), (1, "all_to_all_v", 1024));
        assert!((classes[0].algorithm_rate - (1000.0 + 1024.0) / 400.0).abs() < 1e-9);
        assert!((classes[0].bus_rate - classes[0].algorithm_rate / 2.0).abs() < 1e-9);
    }
}
