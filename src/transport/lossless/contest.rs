//! Whether coding has made calls faster, by the calls themselves.
//!
//! A rank's clock and its links do not say that a processor is wanted elsewhere: by the ranks beside it, by the system that sends
//! for them. The calls say it. Those of one kind go in pairs until enough were coded and as they are, one of a pair this way and one
//! that, in an order that no program follows; what took less time for its bytes holds for the next ones. All ranks make the same calls
//! in the same order, so that a call is coded on all of them or on none while they compare; each then goes by its own times, since each
//! receiver reads both.
#![forbid(unsafe_code)]

use crate::transport::CollectiveKind;
use std::time::Duration;

/// Calls of each way that are compared.
const CALLS: usize = 4;
/// The same where a rank does not know all blocks of a call.
const CALLS_OF_UNKNOWN: usize = 8;
/// By how much coding has to make calls faster: less is noise, and a processor has other things to do.
const LEAST_GAIN: f64 = 1.03;
/// For each pair of calls whether the coded one comes first: random bits, so that no program alternates as they do.
const ORDERS: u64 = 0x123a_236e_15b6_9286;
/// The first calls after which it is done again: then all ranks begin at the same call, whenever they had ended.
const AGAIN: u64 = 64;
/// From then on four times as late each time, and at last after so many.
const AGAIN_AT_MOST: u64 = 1024;
/// Kinds of calls that are known; of others the link's speed alone decides.
const KINDS: usize = 64;

/// How the calls of one kind go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As they are and coded by turns.
    Compared,
    /// Coded where their links are slow.
    Coded,
    /// As they are.
    Plain,
}

/// How long a call took, and its bytes.
#[derive(Debug, Clone, Copy)]
struct CallTook {
    time: Duration,
    bytes: usize,
}

/// The calls of one kind.
#[derive(Debug)]
struct Kind {
    kind: CollectiveKind,
    /// Calls that have begun.
    calls: u64,
    way: Way,
    /// Some call was.
    has_been_coded: bool,
    /// The calls that count, coded and as they are.
    took: [Vec<CallTook>; 2],
    /// After so many calls they are compared again.
    again: u64,
}

/// What the last call of a comparison has decided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ContestVerdict {
    /// Of which calls.
    pub kind: CollectiveKind,
    /// Whether they are coded from now on.
    pub coded: bool,
    /// By how much coding made them faster.
    pub gain: f64,
}

/// The kinds of calls of a communicator.
#[derive(Debug, Default)]
pub struct Contest {
    kinds: Vec<Kind>,
    /// The call that runs.
    running: Option<RunningCall>,
}

/// A call that runs.
#[derive(Debug, Clone, Copy)]
struct RunningCall {
    /// Its kind.
    kind: usize,
    /// Whether it may be coded.
    may_be_coded: bool,
    bytes: usize,
}

/// Whether the first call of a pair is the coded one.
fn begins_coded(pair: u64) -> bool {
    ORDERS >> (pair % u64::from(u64::BITS)) & 1 == 1
}

/// Nanoseconds for a byte.
fn pace(calls: impl Iterator<Item = CallTook>) -> f64 {
    let (ns, bytes) = calls
        .fold((0.0, 0.0), |(ns, bytes), call| (ns + call.time.as_nanos() as f64, bytes + call.bytes.max(1) as f64));
    ns / bytes
}

impl Kind {
    fn new(kind: CollectiveKind) -> Kind {
        Kind { kind, calls: 0, way: Way::Compared, has_been_coded: false, took: Default::default(), again: AGAIN }
    }

    /// Whether the next call may be coded.
    fn next(&mut self) -> bool {
        if self.calls == self.again {
            self.again += (3 * self.again).min(AGAIN_AT_MOST);
            // What has not been decided since has calls still.
            if self.way != Way::Compared {
                self.way = Way::Compared;
                self.took.iter_mut().for_each(Vec::clear);
            }
        }
        let call = self.calls;
        self.calls += 1;
        match self.way {
            Way::Compared => begins_coded(call / 2) == call.is_multiple_of(2),
            way => way == Way::Coded,
        }
    }

    fn took(&mut self, coded: bool, call: CallTook) -> Option<ContestVerdict> {
        let most = if self.kind.class.is_some() { CALLS } else { CALLS_OF_UNKNOWN };
        if coded && !self.has_been_coded {
            // In it the link was found slow, and those before it are of the time before.
            self.has_been_coded = true;
            self.took[1].clear();
            return None;
        }
        let calls = &mut self.took[usize::from(!coded)];
        if calls.len() == most {
            calls.remove(0);
        }
        calls.push(call);
        if self.took.iter().any(|calls| calls.len() < most) {
            return None;
        }
        let [coded, plain] = self.took.each_ref().map(|calls| self.pace_of(calls));
        let gain = plain / coded;
        let coded = gain > LEAST_GAIN;
        self.way = if coded { Way::Coded } else { Way::Plain };
        Some(ContestVerdict { kind: self.kind, coded, gain })
    }

    /// Of calls of which all is known the quickest had the fewest delays that have nothing to do with it. Others may have waited for
    /// bytes that this rank has not seen: all together count.
    fn pace_of(&self, calls: &[CallTook]) -> f64 {
        match self.kind.class {
            Some(_) => calls.iter().map(|&call| pace([call].into_iter())).fold(f64::INFINITY, f64::min),
            None => pace(calls.iter().copied()),
        }
    }
}

impl Contest {
    /// A call begins, with so many bytes that this rank knows of.
    pub fn begin(&mut self, kind: CollectiveKind, bytes: usize) {
        let known = self.kinds.iter().position(|known| known.kind == kind).or_else(|| {
            let is_new = self.kinds.len() < KINDS;
            is_new.then(|| {
                self.kinds.push(Kind::new(kind));
                self.kinds.len() - 1
            })
        });
        self.running = known.map(|kind| RunningCall { kind, may_be_coded: self.kinds[kind].next(), bytes });
    }

    /// Whether what goes out now may be coded: always where it is of no call, or of one that is not known.
    pub fn may_code(&self) -> bool {
        self.running.is_none_or(|call| call.may_be_coded)
    }

    /// The call has ended after such a time, and some of its bytes were `coded` on this rank, or came coded, or none.
    pub fn end(&mut self, time: Duration, coded: bool) -> Option<ContestVerdict> {
        let RunningCall { kind, may_be_coded, bytes } = self.running.take()?;
        let kind = &mut self.kinds[kind];
        // One that might have been coded and was not says nothing.
        let counts = kind.way == Way::Compared && may_be_coded == coded;
        counts.then(|| kind.took(coded, CallTook { time, bytes })).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DataType;
    use crate::plan::Collective;

    const KIND: CollectiveKind =
        CollectiveKind { collective: Collective::AllReduce, dtype: DataType::F32, class: Some(26) };

    const BYTES: usize = 1 << 26;

    /// Makes calls that take so many milliseconds, coded and as they are. Of each whether it was coded, and the verdicts.
    fn calls(contest: &mut Contest, n: usize, [coded_ms, plain_ms]: [u64; 2]) -> (Vec<bool>, Vec<bool>) {
        let mut verdicts = Vec::new();
        let each = (0..n).map(|_| {
            contest.begin(KIND, BYTES);
            let coded = contest.may_code();
            let ms = if coded { coded_ms } else { plain_ms };
            verdicts.extend(contest.end(Duration::from_millis(ms), coded).map(|verdict| verdict.coded));
            coded
        });
        (each.collect(), verdicts)
    }

    #[test]
    fn calls_go_the_way_that_was_quicker() {
        for (ms, wins) in [([7, 10], true), ([10, 7], false), ([10, 10], false), ([100, 102], false)] {
            let (each, verdicts) = calls(&mut Contest::default(), 64, ms);
            assert_eq!(each[..8], [false, true, true, false, true, false, false, true], "in pairs");
            assert_eq!((each[12..].iter().all(|&coded| coded == wins), verdicts), (true, vec![wins]), "{ms:?} ms");
        }
    }

    #[test]
    fn what_has_lost_is_tried_again_less_and_less_often() {
        let mut contest = Contest::default();
        assert_eq!(calls(&mut contest, 64, [10, 7]).1, [false]);
        let (each, verdicts) = calls(&mut contest, 192, [7, 10]);
        assert_eq!((verdicts, each[12..].iter().all(|&coded| coded)), (vec![true], true));
        let (each, verdicts) = calls(&mut contest, 4096 + 4096, [10, 7]);
        assert_eq!(verdicts.len(), 9, "at 256, 1024, 2048, ...");
        let coded = each.iter().filter(|&&coded| coded).count();
        assert!((CALLS * 9..=(CALLS + 1) * 9).contains(&coded), "{coded} of {}", each.len());
    }

    #[test]
    fn calls_in_which_nothing_was_coded_decide_nothing() {
        let mut contest = Contest::default();
        for _ in 0..63 {
            contest.begin(KIND, BYTES);
            assert_eq!(contest.end(Duration::from_millis(1), false), None);
        }
        // Some were coded at last: these are compared.
        assert_eq!(calls(&mut contest, 12, [3, 4]).1, [true]);
    }

    /// Long and short calls, or such as shrink and such as do not, in any order that comes again.
    #[test]
    fn programs_that_alternate_are_judged_by_what_coding_does() {
        let unknown = CollectiveKind { collective: Collective::AllToAll, class: None, ..KIND };
        for period in 1..=8 {
            for long in 0..period {
                for (kind, [coded_ms, plain_ms]) in
                    [unknown, KIND].into_iter().flat_map(|kind| [[10, 15], [15, 10]].map(|ms| (kind, ms)))
                {
                    // Of one class the long ones are twice as long. Otherwise eight times, and the short ones are as quick either way.
                    let mut contest = Contest::default();
                    let verdict = (0..400).find_map(|call| {
                        let is_long = call % period == long;
                        let bytes = if is_long { BYTES } else { BYTES / kind.class.map_or(8, |_| 2) };
                        contest.begin(kind, bytes);
                        let coded = contest.may_code();
                        let ms = if coded { coded_ms } else { plain_ms };
                        let us = match (is_long, kind.class) {
                            (true, _) => 1000 * ms,
                            (false, Some(_)) => 500 * ms,
                            (false, None) => 1500,
                        };
                        contest.end(Duration::from_micros(us), coded)
                    });
                    let coded = verdict.map(|verdict| verdict.coded);
                    assert_eq!(coded, Some(coded_ms < plain_ms), "{kind}: call {long} of {period}, {coded_ms} ms");

                    // Only the long ones can be coded.
                    let mut contest = Contest::default();
                    let verdict = (0..400).find_map(|call| {
                        contest.begin(kind, BYTES);
                        let coded = contest.may_code() && call % period == long;
                        contest.end(Duration::from_millis(if coded { coded_ms } else { plain_ms }), coded)
                    });
                    let coded = verdict.map(|verdict| verdict.coded);
                    assert_eq!(coded, Some(coded_ms < plain_ms), "{kind}: only call {long} of {period} shrinks");
                }
            }
        }
    }

    #[test]
    fn ranks_that_find_that_out_at_different_calls_compare_the_same_ones_again() {
        let mut contests = [Contest::default(), Contest::default()];
        for (contest, coded) in contests.iter_mut().zip([false, true]) {
            for _ in 0..2 {
                contest.begin(KIND, BYTES);
                contest.end(Duration::from_millis(1), coded && contest.may_code());
            }
        }
        let each = contests.each_mut().map(|contest| calls(contest, 80, [10, 7]).0);
        assert_eq!(each[0][62..], each[1][62..]);
    }

    #[test]
    fn of_calls_that_fail_and_of_too_many_kinds_nothing_is_kept() {
        let mut contest = Contest::default();
        for bytes in 0..200 {
            contest.begin(CollectiveKind { class: Some(bytes), ..KIND }, BYTES);
            assert!(usize::from(bytes) < KINDS || contest.may_code(), "the links decide of what is not known");
        }
        assert_eq!(contest.kinds.len(), KINDS);
        assert!(contest.kinds.iter().all(|kind| kind.took.iter().all(Vec::is_empty)));
    }
}
