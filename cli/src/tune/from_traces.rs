//! Rows for what a program calls: the collectives and sizes of its traces, those first that took most of its time.
#![forbid(unsafe_code)]

use super::{add_task, Task};
use crate::perf::collective::Kind;
use std::collections::BTreeMap;
use std::path::PathBuf;
use strata::bootstrap::store::Store;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::records::{CallRecord, CallTrace};

/// Whether tables have rows for it: for blocks that differ in size where all ranks know all of them.
fn has_rows(call: &CallRecord) -> bool {
    let all_know = matches!(call.call.as_str(), "all_gather" | "reduce_scatter");
    Collective::from_name(&call.call).is_some() && (!call.vectored || all_know)
}

/// Names and sizes of the calls on so many ranks, those first that took most time.
fn classes(traces: &[CallTrace], nranks: usize) -> Vec<(String, usize)> {
    let mut classes: BTreeMap<(&str, usize), u64> = BTreeMap::new();
    for (call, ns) in traces.iter().flat_map(|trace| trace.calls.iter().zip(trace.own_ns())) {
        if has_rows(call) && call.nranks as usize == nranks {
            *classes.entry((&call.call, call.bytes as usize)).or_default() += ns.unwrap_or(0);
        }
    }
    let mut sorted: Vec<_> = classes.into_iter().collect();
    sorted.sort_by_key(|(class, ns)| (std::cmp::Reverse(*ns), *class));
    sorted.into_iter().map(|((name, bytes), _)| (name.to_string(), bytes)).collect()
}

/// What process 0 tells the others: a class a line.
fn read(paths: &[PathBuf], nranks: usize) -> Result<String> {
    let traces = paths.iter().map(|path| crate::trace::read(path)).collect::<Result<Vec<CallTrace>>>()?;
    let classes = classes(&traces, nranks);
    let calls = traces.iter().flat_map(|trace| &trace.calls);
    let left = calls.filter(|call| call.nranks as usize == nranks && call.vectored && !has_rows(call)).count();
    if left > 0 {
        eprintln!(
            "strata: {left} calls with blocks that ranks do not all know are left out: tables have no rows for them"
        );
    }
    if classes.is_empty() {
        let mut ranks: Vec<u32> = traces.iter().flat_map(|trace| &trace.comms).map(|comm| comm.nranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        return Err(Error::InvalidArgument(format!(
            "--from: the traces have no collective on {nranks} ranks, as many as there are here; their communicators have {ranks:?}"
        )));
    }
    Ok(classes.iter().map(|(name, bytes)| format!("{name} {bytes}\n")).collect())
}

fn parse(text: &str, nranks: usize) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for line in text.lines() {
        let class =
            line.split_once(' ').and_then(|(name, bytes)| Some((name.parse::<Kind>().ok()?, bytes.parse().ok()?)));
        let (kind, bytes) = class.ok_or_else(|| Error::Remote(format!("process 0 has sent a row `{line}`")))?;
        add_task(&mut tasks, kind, bytes, nranks)?;
    }
    Ok(tasks)
}

/// The rows that these traces ask for. Process 0 reads them; its failure is everybody's.
pub fn tasks(paths: &[PathBuf], nranks: usize, store: &mut Store) -> Result<Vec<Task>> {
    let mine = if store.rank == 0 { read(paths, nranks) } else { Ok(String::new()) };
    let said = match &mine {
        Ok(text) => format!("+{text}"),
        Err(error) => format!("-{}", error.text()),
    };
    let told = store.broadcast(said.as_bytes())?;
    let told = String::from_utf8_lossy(&told);
    mine?;
    match told.strip_prefix('+') {
        Some(text) => parse(text, nranks),
        None => Err(Error::Remote(format!("process 0: {}", told.trim_start_matches('-')))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::samples::{call, trace};

    #[test]
    fn rows_are_the_classes_of_calls_on_as_many_ranks_the_longest_first() {
        let mut calls = vec![
            call("ab", 0, 4, "all_reduce", 1, (0, 1000)),
            call("ab", 0, 4, "all_to_all", 2, (1000, 9000)),
            call("ab", 0, 4, "all_reduce", 3, (9000, 9500)),
            call("cd", 0, 2, "broadcast", 1, (9500, 9600)),
            call("ab", 0, 4, "send", 1, (9600, 9700)),
            call("ab", 0, 4, "all_gather", 4, (9700, 9800)),
        ];
        (calls[5].vectored, calls[5].bytes) = (true, 4992);
        calls.push(CallRecord { vectored: true, ..call("ab", 0, 4, "all_to_all", 5, (9800, 99_000)) });
        let traces = [trace(0, calls)];
        let rows = classes(&traces, 4);
        let expected = [("all_to_all", 4000), ("all_reduce", 4000), ("all_gather", 4992)];
        assert_eq!(rows, expected.map(|(name, bytes)| (name.to_string(), bytes)));
        let text: String = rows.iter().map(|(name, bytes)| format!("{name} {bytes}\n")).collect();
        let tasks: Vec<_> = parse(&text, 4).unwrap().iter().map(|task| (task.kind, task.bytes)).collect();
        assert_eq!(tasks, [(Kind::AllToAll, 4000), (Kind::AllReduce, 4000), (Kind::AllGather, 4992)]);
        assert!(classes(&traces, 3).is_empty() && parse("sendrecv 3", 4).is_err() && parse("x", 4).is_err());
    }
}
