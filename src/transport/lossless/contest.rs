//! Whether coding has made calls faster, by the calls themselves.
//!
//! A rank's clock and its links do not say that a processor is wanted elsewhere: by the ranks beside it, by the system that sends
//! for them. The calls say it. Of those of one kind every other one goes as it is until some have been coded and as many have not;
//! what was quicker holds for the next ones. All ranks make the same calls in the same order, so that a call is coded on all of
//! them or on none while they compare; each then goes by its own times, since each receiver reads both.
#![forbid(unsafe_code)]

use crate::transport::CollectiveKind;
use std::time::Duration;

/// Calls of each way that are compared.
const CALLS: usize = 3;
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

/// The calls of one kind.
#[derive(Debug)]
struct Kind {
    kind: CollectiveKind,
    /// Calls that have begun.
    calls: u64,
    way: Way,
    /// How long calls took, coded and as they are.
    took: [Vec<Duration>; 2],
    /// After so many calls they are compared again.
    again: u64,
}

/// What the last call of a comparison has decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContestVerdict {
    /// Of which calls.
    pub kind: CollectiveKind,
    /// Whether they are coded from now on.
    pub coded: bool,
    /// The least times, coded and as they are.
    pub took: [Duration; 2],
}

/// The kinds of calls of a communicator.
#[derive(Debug, Default)]
pub struct Contest {
    kinds: Vec<Kind>,
    /// The kind of the call that runs, and whether it may be coded.
    running: Option<(usize, bool)>,
}

impl Kind {
    /// Whether the next call may be coded.
    fn next(&mut self) -> bool {
        if self.calls == self.again {
            self.again += (3 * self.again).min(AGAIN_AT_MOST);
            self.way = Way::Compared;
            self.took.iter_mut().for_each(Vec::clear);
        }
        self.calls += 1;
        match self.way {
            Way::Compared => self.calls.is_multiple_of(2),
            way => way == Way::Coded,
        }
    }

    fn took(&mut self, coded: bool, time: Duration) -> Option<ContestVerdict> {
        let times = &mut self.took[usize::from(!coded)];
        if times.len() == CALLS {
            // From before the link was found slow.
            times.remove(0);
        }
        times.push(time);
        if self.took.iter().any(|times| times.len() < CALLS) {
            return None;
        }
        // The least one had the fewest delays that have nothing to do with it.
        let took = self.took.each_ref().map(|times| times.iter().min().copied().unwrap_or_default());
        let coded = took[0] < took[1];
        self.way = if coded { Way::Coded } else { Way::Plain };
        Some(ContestVerdict { kind: self.kind, coded, took })
    }
}

impl Contest {
    /// A call begins.
    pub fn begin(&mut self, kind: CollectiveKind) {
        let known = self.kinds.iter().position(|known| known.kind == kind);
        let at = known.or_else(|| {
            let is_new = self.kinds.len() < KINDS;
            is_new.then(|| {
                let (took, way) = ([Vec::new(), Vec::new()], Way::Compared);
                self.kinds.push(Kind { kind, calls: 0, way, took, again: AGAIN });
                self.kinds.len() - 1
            })
        });
        self.running = at.map(|at| (at, self.kinds[at].next()));
    }

    /// Whether what goes out now may be coded: always where it is of no call, or of one that is not known.
    pub fn may_code(&self) -> bool {
        self.running.is_none_or(|(_, may_be_coded)| may_be_coded)
    }

    /// The call has ended after such a time, and some of its bytes were `coded` on this rank, or came coded, or none.
    pub fn end(&mut self, time: Duration, coded: bool) -> Option<ContestVerdict> {
        let (at, may_be_coded) = self.running.take()?;
        let kind = &mut self.kinds[at];
        // One that might have been coded and was not says nothing.
        (kind.way == Way::Compared && may_be_coded == coded).then(|| kind.took(coded, time)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DataType;
    use crate::plan::Collective;

    const KIND: CollectiveKind =
        CollectiveKind { collective: Collective::AllReduce, dtype: DataType::F32, class: Some(26) };

    /// Makes calls that take so many milliseconds, coded and as they are. Of each whether it was coded, and the verdicts.
    fn calls(contest: &mut Contest, n: usize, [coded_ms, plain_ms]: [u64; 2]) -> (Vec<bool>, Vec<bool>) {
        let mut verdicts = Vec::new();
        let each = (0..n).map(|_| {
            contest.begin(KIND);
            let coded = contest.may_code();
            let ms = if coded { coded_ms } else { plain_ms };
            verdicts.extend(contest.end(Duration::from_millis(ms), coded).map(|verdict| verdict.coded));
            coded
        });
        (each.collect(), verdicts)
    }

    #[test]
    fn calls_go_the_way_that_was_quicker() {
        for (ms, wins) in [([7, 10], true), ([10, 7], false), ([10, 10], false)] {
            let (each, verdicts) = calls(&mut Contest::default(), 64, ms);
            assert_eq!(each[..6], [false, true, false, true, false, true], "by turns");
            assert_eq!((each[6..].iter().all(|&coded| coded == wins), verdicts), (true, vec![wins]), "{ms:?} ms");
        }
    }

    #[test]
    fn what_has_lost_is_tried_again_less_and_less_often() {
        let mut contest = Contest::default();
        assert_eq!(calls(&mut contest, 64, [10, 7]).1, [false]);
        let (each, verdicts) = calls(&mut contest, 192, [7, 10]);
        assert_eq!((verdicts, each[6..].iter().all(|&coded| coded)), (vec![true], true));
        let (each, verdicts) = calls(&mut contest, 4096 + 4096, [10, 7]);
        assert_eq!(verdicts.len(), 9, "at 256, 1024, 2048, ...");
        assert_eq!(each.iter().filter(|&&coded| coded).count(), 3 * 9);
    }

    #[test]
    fn calls_in_which_nothing_was_coded_decide_nothing() {
        let mut contest = Contest::default();
        for _ in 0..63 {
            contest.begin(KIND);
            assert_eq!(contest.end(Duration::from_millis(1), false), None);
        }
        // Some were coded at last: these are compared.
        assert_eq!(calls(&mut contest, 7, [3, 4]).1, [true]);
    }

    #[test]
    fn ranks_that_find_that_out_at_different_calls_compare_the_same_ones_again() {
        let mut contests = [Contest::default(), Contest::default()];
        contests[0].begin(KIND);
        contests[0].end(Duration::from_millis(1), false);
        contests[1].begin(KIND);
        contests[1].end(Duration::from_millis(1), true);
        let each = contests.each_mut().map(|contest| calls(contest, 80, [10, 7]).0);
        assert_eq!(each[0][63..], each[1][63..]);
    }

    #[test]
    fn of_calls_that_fail_and_of_too_many_kinds_nothing_is_kept() {
        let mut contest = Contest::default();
        for bytes in 0..200 {
            contest.begin(CollectiveKind { class: Some(bytes), ..KIND });
            assert_eq!(contest.may_code(), usize::from(bytes) >= KINDS, "the links decide of what is not known");
        }
        assert_eq!(contest.kinds.len(), KINDS);
        assert!(contest.kinds.iter().all(|kind| kind.took.iter().all(Vec::is_empty)));
    }
}
