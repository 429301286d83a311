//! What a trace file holds: the calls of a process, of several after a merge, and their communicators.
#![forbid(unsafe_code)]

use super::call::{CallRecord, CallState};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The process that has written a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceProcess {
    /// Its host.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// Its rank: the launcher's, else that in its first communicator.
    pub rank: u32,
    /// The version of Strata.
    pub strata: String,
    /// The wall clock, in nanoseconds since 1970, when the trace's clock was 0.
    pub wall_ns: u64,
    /// When the trace was written, by the trace's clock.
    pub written_ns: u64,
    /// How many older calls the ring had no room for.
    pub overwritten: u64,
    /// How many calls were lost as they met others in the ring.
    pub lost: u64,
}

/// A communicator of a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceComm {
    /// Its key, the same on all ranks.
    pub key: String,
    /// Its name, if the program has given it one.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// How many ranks.
    pub nranks: u32,
    /// On how many nodes.
    pub nodes: u32,
    /// The process ranks of its ranks, as `0-7,16`; empty where they are not known.
    pub members: String,
    /// The process rank of this rank.
    pub process: u32,
    /// Whether it is Strata's own beside one of the vendor library's.
    pub companion: bool,
}

/// Calls and what is known of their surroundings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallTrace {
    /// Who has written it; several after a merge.
    pub processes: Vec<TraceProcess>,
    /// The communicators, one for each of their ranks.
    pub comms: Vec<TraceComm>,
    /// The calls, in the order in which each process has accepted them.
    pub calls: Vec<CallRecord>,
}

impl CallRecord {
    /// Nanoseconds that it ran, once it has ended.
    pub fn duration_ns(&self) -> Option<u64> {
        Some(self.ended_ns?.saturating_sub(self.begun_ns?))
    }

    /// Whether it is a send or a receive.
    pub fn is_message(&self) -> bool {
        self.call == "send" || self.call == "recv"
    }
}

/// Finds the communicators of calls.
#[derive(Debug)]
pub struct CommIndex<'a>(HashMap<(&'a str, u32), &'a TraceComm>);

impl CommIndex<'_> {
    /// What is known of the communicator and rank of a call.
    pub fn comm_of(&self, call: &CallRecord) -> Option<&TraceComm> {
        self.0.get(&(call.comm.as_str(), call.rank)).copied()
    }

    /// The process rank that has made a call.
    pub fn process_of(&self, call: &CallRecord) -> u32 {
        self.comm_of(call).map_or(call.rank, |comm| comm.process)
    }
}

impl CallTrace {
    /// An index of its communicators.
    pub fn index(&self) -> CommIndex<'_> {
        CommIndex(self.comms.iter().map(|comm| ((comm.key.as_str(), comm.rank), comm)).collect())
    }

    /// How many nanoseconds each call took, none where it has not ended. What runs together in a group, with one beginning and end, shares
    /// that time by bytes.
    pub fn own_ns(&self) -> Vec<Option<u64>> {
        fn group(call: &CallRecord) -> Option<(&str, u32, u64)> {
            Some((&call.comm, call.rank, call.group?))
        }
        let time = |call: &CallRecord| call.duration_ns().filter(|_| call.state == CallState::Ended);
        // Calls without bytes count as well.
        let part = |call: &CallRecord| u128::from(call.bytes) + 1;
        let mut all: HashMap<_, u128> = HashMap::new();
        for call in self.calls.iter().filter(|call| time(call).is_some()) {
            group(call).into_iter().for_each(|group| *all.entry(group).or_default() += part(call));
        }
        let own = |call: &CallRecord| {
            let (ns, all) = (time(call)?, group(call).and_then(|group| all.get(&group)).copied());
            Some(all.map_or(ns, |all| (u128::from(ns) * part(call) / all) as u64))
        };
        self.calls.iter().map(own).collect()
    }
}

/// Numbers as ranges: `0-7,16`.
pub fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// The most numbers that a text of ranges may stand for.
const MOST_MEMBERS: u64 = 1 << 20;

/// The numbers of such a text; none where it is none.
pub fn from_ranges(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || numbers.len() as u64 + u64::from(last - first) >= MOST_MEMBERS {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stand_for_their_numbers() {
        for (numbers, text) in [
            (&[][..], ""),
            (&[3], "3"),
            (&[0, 1, 2, 3], "0-3"),
            (&[0, 2, 4, 5, 6, 1], "0,2,4-6,1"),
            (&[u32::MAX - 1, u32::MAX], "4294967294-4294967295"),
        ] {
            assert_eq!(ranges(numbers), text);
            assert_eq!(from_ranges(text).as_deref(), Some(numbers));
        }
        for wrong in ["a", "1-", "3-1", "0-4294967295", "-"] {
            assert_eq!(from_ranges(wrong), None, "{wrong}");
        }
    }
}
