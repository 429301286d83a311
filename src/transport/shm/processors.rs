//! Whether ranks share processors, and whether others than ranks compute on them.
//!
//! Each rank tells in the node's segment on which processors it may run (its affinity) and how many of them it may use (its
//! cgroup's quota). A rank has a processor of its own where the ranks that may run on its processors, and on those that these
//! may run on, and so on, are no more than these processors. Where a thread of each rank's process carries messages, as MPI's does, that
//! thread wants a processor, too, while ranks wait for it.
//!
//! A rank that yields gets its processor back at once where nobody else wants it, after the others' turns where ranks share
//! it, and after a time slice where somebody computes. The last two are told apart by a note that each rank makes when it
//! gives its processor away: where none was made for as long as the yield took, nobody else's rank has run there.

use super::segment::{ProcessorCells, Segment, PROCESSORS};
use crate::sync::fence;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A yield that took so long, in ns, was a time slice, or many turns of other ranks.
const LATE_NS: u64 = 2_000_000;
/// How long processors are taken to be busy after a late yield, in ns, and at most, where that goes on.
const BUSY_NS: u64 = 10_000_000;
const LONGEST_BUSY_NS: u64 = 2_000_000_000;

/// Processors, one bit each.
type Processors = [u64; PROCESSORS / 64];

/// How long what a rank has told of its processors is taken to be true.
const TOLD: Duration = Duration::from_millis(100);

/// Tells the others where this rank may run now.
pub fn tell(segment: &Segment, local: usize) {
    let mut processors: Processors = [0; PROCESSORS / 64];
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        let may = (0..PROCESSORS.min(rustix::thread::CpuSet::MAX_CPU)).filter(|&processor| set.is_set(processor));
        may.for_each(|processor| processors[processor / 64] |= 1 << (processor % 64));
    }
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let place = segment.place(local);
    place.processors.0.iter().zip(processors).for_each(|(word, bits)| word.store(bits, Relaxed));
    place.most.0.store(most as u64, Relaxed);
    place.fences.0.store(fence::can_be_everywhere().into(), Relaxed);
}

/// Whether every rank of the node has a processor of its own, and its process can take part in fences between processes.
pub fn can_publish_lightly(segment: &Segment) -> bool {
    let places = places(segment);
    let can_fence = |local: usize| segment.place(local).fences.0.load(Relaxed) != 0;
    (0..segment.ranks()).all(|local| can_fence(local) && !shares(&places, local, 1))
}

/// Whether a rank shares its processors.
#[derive(Debug)]
pub struct Sharing {
    shares: bool,
    /// The same, with a thread beside each rank.
    shares_with_threads: bool,
    told: Instant,
}

impl Sharing {
    /// What all ranks of the node have told.
    pub fn new(segment: &Segment, local: usize) -> Sharing {
        let places = places(segment);
        let [shares, shares_with_threads] = [1, 2].map(|threads| shares(&places, local, threads));
        Sharing { shares, shares_with_threads, told: Instant::now() }
    }

    /// Whether it does.
    pub fn shares(&self) -> bool {
        self.shares
    }

    /// Whether it does where each rank waits for a thread of its process.
    pub fn shares_with_threads(&self) -> bool {
        self.shares_with_threads
    }

    /// Tells it anew, and looks at what others have told, if that was long ago.
    pub fn refresh(&mut self, segment: &Segment, local: usize) {
        if self.told.elapsed() >= TOLD {
            tell(segment, local);
            *self = Sharing::new(segment, local);
        }
    }
}

fn places(segment: &Segment) -> Vec<(Processors, usize)> {
    let place = |local: usize| {
        let place = segment.place(local);
        (std::array::from_fn(|word| place.processors.0[word].load(Relaxed)), place.most.0.load(Relaxed) as usize)
    };
    (0..segment.ranks()).map(place).collect()
}

fn number(processors: &Processors) -> usize {
    processors.iter().map(|word| word.count_ones() as usize).sum()
}

/// Whether the ranks that may come to run where rank `me` may are more than the processors, by each rank's processors and how
/// many of them it may use; each rank with so many threads.
fn shares(places: &[(Processors, usize)], me: usize, threads: usize) -> bool {
    let Some(&(mut reached, _)) = places.get(me) else { return true };
    let touches =
        |reached: &Processors, processors: &Processors| reached.iter().zip(processors).any(|(a, b)| a & b != 0);
    loop {
        let mut next = reached;
        for (processors, _) in places.iter().filter(|(processors, _)| touches(&reached, processors)) {
            next.iter_mut().zip(processors).for_each(|(all, word)| *all |= word);
        }
        if next == reached {
            break;
        }
        reached = next;
    }
    let there = || places.iter().filter(|(processors, _)| touches(&reached, processors));
    // Quotas of one cgroup count for its ranks together, and nothing tells whose cgroup is whose.
    let quota = there().filter(|(processors, most)| *most < number(processors)).map(|&(_, most)| most).min();
    let ranks = there().count();
    ranks == 0 || ranks * threads > number(&reached).min(quota.unwrap_or(usize::MAX))
}

/// Notes on which processor this rank waits now; whether another rank waited last on the same one. Where others compute, the
/// scheduler may leave ranks on one processor that have one each to run on.
pub fn waits_beside(segment: &Segment, local: usize) -> bool {
    let here = rustix::thread::sched_getcpu() as u64 + 1;
    let on = |rank: usize| &segment.place(rank).waits_on.0;
    if on(local).load(Relaxed) != here {
        on(local).store(here, Relaxed);
    }
    (0..segment.ranks()).any(|rank| rank != local && on(rank).load(Relaxed) == here)
}

/// The ranks' notes about processors.
#[derive(Debug, Clone, Copy)]
pub struct ProcessorNotes<'a> {
    processors: &'a ProcessorCells,
}

/// The system's monotonic clock, which all processes share.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl<'a> ProcessorNotes<'a> {
    /// Notes in a segment.
    pub fn new(processors: &'a ProcessorCells) -> ProcessorNotes<'a> {
        ProcessorNotes { processors }
    }

    /// Notes that a rank is on this processor, and is about to leave it. Returns which, and when.
    fn note(&self) -> (usize, u64) {
        let (processor, now) = (rustix::thread::sched_getcpu() % PROCESSORS, now_ns());
        self.processors.touched[processor].0.store(now, Relaxed);
        (processor, now)
    }

    /// A rank is about to sleep.
    pub fn touch(&self) {
        self.note();
    }

    /// Yields the processor; whether somebody who is no rank has computed on it meanwhile.
    pub fn give_way(&self) -> bool {
        let (processor, before) = self.note();
        std::thread::yield_now();
        let now = now_ns();
        let late = now.saturating_sub(before) >= LATE_NS && self.absent(processor, now);
        if late {
            self.say_busy(now);
        }
        late
    }

    /// Whether no rank has noted that it was on a processor lately.
    fn absent(&self, processor: usize, now: u64) -> bool {
        now.saturating_sub(self.processors.touched[processor].0.load(Relaxed)) >= LATE_NS
    }

    /// Tells all ranks; the longer the more often it was so in a row.
    fn say_busy(&self, now: u64) {
        let (until, last) = (self.processors.busy_until.0.load(Relaxed), self.processors.busy_ns.0.load(Relaxed));
        if now < until {
            return;
        }
        let length = if now - until < last { (2 * last).min(LONGEST_BUSY_NS) } else { BUSY_NS };
        self.processors.busy_ns.0.store(length, Relaxed);
        self.processors.busy_until.0.store(now + length, Relaxed);
    }

    /// Whether processors are taken to be busy.
    pub fn are_busy(&self) -> bool {
        now_ns() < self.processors.busy_until.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::Segment;
    use super::*;

    #[test]
    fn processors_are_busy_for_longer_the_more_often_they_are_found_so() {
        let segment = Segment::of_heap(1);
        let presence = ProcessorNotes::new(segment.processors());
        assert!(!presence.are_busy());
        let start = now_ns();
        let mut at = start;
        for length in [BUSY_NS, 2 * BUSY_NS, 4 * BUSY_NS] {
            presence.say_busy(at);
            assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + length);
            // While that lasts nobody makes it longer.
            presence.say_busy(at + length / 2);
            assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + length);
            at += length + 1;
        }
        assert!(presence.are_busy());
        at += 4 * BUSY_NS;
        presence.say_busy(at);
        assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + BUSY_NS, "after as long without, anew");
        (0..20).for_each(|_| {
            at = segment.processors().busy_until.0.load(Relaxed);
            presence.say_busy(at);
        });
        assert_eq!(segment.processors().busy_ns.0.load(Relaxed), LONGEST_BUSY_NS);
    }

    #[test]
    fn ranks_share_processors_where_they_are_more() {
        let on = |processors: &[usize]| {
            let mut bits: Processors = [0; PROCESSORS / 64];
            processors.iter().for_each(|processor| bits[processor / 64] |= 1 << (processor % 64));
            (bits, processors.len())
        };
        let all = |places: &[(Processors, usize)]| -> Vec<bool> {
            (0..places.len()).map(|me| shares(places, me, 1)).collect()
        };
        assert_eq!(all(&[on(&[0, 1]), on(&[0, 1])]), [false, false]);
        assert_eq!(all(&[on(&[0]), on(&[1])]), [false, false], "each is bound to one");
        assert_eq!(all(&[on(&[0]), on(&[0]), on(&[1])]), [true, true, false]);
        assert_eq!(all(&[on(&[0, 1]), on(&[1, 2]), on(&[2]), on(&[300])]), [false, false, false, false]);
        assert_eq!(all(&[on(&[0, 1]), on(&[1]), on(&[1])]), [true, true, true], "two of them are on one");
        let quota = |places: (Processors, usize)| (places.0, 1);
        assert_eq!(all(&[quota(on(&[0, 1])), quota(on(&[0, 1]))]), [true, true], "a quota of one processor");
        assert_eq!(all(&[([0; PROCESSORS / 64], 0)]), [true], "nothing is known");
        let bound = [on(&[0]), on(&[1, 2])];
        assert_eq!([0, 1].map(|me| shares(&bound, me, 2)), [true, false], "a thread beside each rank");
    }

    #[test]
    fn a_rank_that_waited_on_the_same_processor_is_known_until_it_waits_on_another() {
        let segment = Segment::of_heap(2);
        // The scheduler may move this thread between two calls.
        let settled = |expected: bool| (0..1000).any(|_| waits_beside(&segment, 0) == expected);
        assert!(!waits_beside(&segment, 0), "the other has not waited");
        assert_ne!(segment.place(0).waits_on.0.load(Relaxed), 0);
        let other = &segment.place(1).waits_on.0;
        other.store(rustix::thread::sched_getcpu() as u64 + 1, Relaxed);
        assert!(settled(true));
        other.store(PROCESSORS as u64 + 1, Relaxed);
        assert!(!waits_beside(&segment, 0));
    }

    #[test]
    fn where_this_process_may_run_is_told() {
        let segment = Segment::of_heap(2);
        assert!(Sharing::new(&segment, 0).shares(), "nobody has told");
        tell(&segment, 0);
        tell(&segment, 1);
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(Sharing::new(&segment, 0).shares(), most < 2);
    }

    #[test]
    fn a_rank_that_was_there_makes_a_late_yield_no_sign_of_others() {
        let segment = Segment::of_heap(1);
        let presence = ProcessorNotes::new(segment.processors());
        let (processor, at) = presence.note();
        assert!(!presence.absent(processor, at + LATE_NS - 1));
        assert!(presence.absent(processor, at + LATE_NS));
        // A rank that came there later.
        segment.processors().touched[processor].0.store(at + LATE_NS, Relaxed);
        assert!(!presence.absent(processor, at + LATE_NS));
    }
}
