//! Epochs: shares of all-reduces by what links deliver while the program runs.
//!
//! After every so many all-reduces (`STRATA_MEASURE_EVERY`) the ranks tell each other, in the order of calls, how long these took. The
//! first time, where they have become slower, and now and then while shares hold, rounds of messages follow that measure the links
//! ([`LinkProfiler`]), with a telling after each. All compute the same [`shares`] of that, and these hold from the next call on.

use super::batch::OperationBatch;
use super::round_clock::RoundClock;
use super::{CollectiveCall, Comm};
use crate::algorithms::Choice;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::memory::{Arena, Region};
use crate::plan::blocks::{packed, BlockTable};
use crate::plan::weights::ChunkWeights;
use crate::plan::Collective;
use crate::selection::profile::{AfterTelling, CallsTook, LinkProfiler, Round, RoundTook};
use crate::selection::shares::{self, NodeShares};
use crate::selection::{Decision, Executor, Policy, Selection, AUTO};
use crate::sync::locked;
use crate::topo::{Grid, Rank};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Instant;

/// Bytes of the shortest all-reduces that are counted and shared: what links deliver matters to those.
const LEAST_BYTES: usize = 1 << 20;
/// Bytes of an even share of a rail below which calls are not shared.
const LEAST_CHUNK_BYTES: usize = 4096;
/// A rank's word: what its link delivers where the transport knows that, the size of its calls, the least time of a byte; what it has
/// received in a round, and the microseconds since the first of the rounds began; and whether its transport tells what has come before a
/// message is complete. A number that is not known is 0.
const NUMBERS: usize = 6;
const WORD: usize = NUMBERS * size_of::<f64>();

/// Said once in a process.
static REFUSED: PerProcess<Once> = PerProcess::new(Once::new);

/// How long the counted calls take: of the largest ones since that was last asked the quickest.
#[derive(Debug, Default)]
pub(super) struct CallPace {
    begun: Option<(Instant, usize)>,
    class: u32,
    least: Option<f64>,
}

impl CallPace {
    /// A call begins.
    #[inline(never)]
    pub(super) fn begin(&mut self, call: &CollectiveCall) {
        self.begun = counts(call).then(|| (Instant::now(), call.count * call.dtype.size()));
    }

    /// What has begun has ended.
    #[inline(never)]
    pub(super) fn end(&mut self) {
        let Some((begun, bytes)) = self.begun.take() else { return };
        self.take_in(bytes, begun.elapsed().as_nanos() as f64);
    }

    fn take_in(&mut self, bytes: usize, ns: f64) {
        let class = bytes.ilog2();
        if class > self.class {
            (self.class, self.least) = (class, None);
        }
        if class == self.class {
            let pace = ns / bytes as f64;
            self.least = Some(self.least.map_or(pace, |least| least.min(pace)));
        }
    }

    /// The size of these calls as a power of two, and the nanoseconds of a byte.
    fn take(&mut self) -> (u32, Option<f64>) {
        let CallPace { class, least, .. } = std::mem::take(self);
        (class, least)
    }
}

/// What is known of the links, and what the ranks do next to know more.
#[derive(Debug, Default)]
struct Known {
    /// Of each rank, what its link delivered when that was last known.
    rates: Vec<Option<f64>>,
    shares: Option<NodeShares>,
    /// How many times shares have changed.
    epoch: u64,
    profiler: LinkProfiler,
    /// The round that comes next, or has begun then.
    round: Option<Round>,
    /// How the one that has begun goes on, and when the first one began.
    clock: Option<RoundClock>,
    first_begun: Option<Instant>,
    /// What this rank has received in the last round, in bytes for each microsecond.
    figure: f64,
    /// What is sent in rounds, and where it is received.
    memory: Option<[Arena; 2]>,
    /// Whether the program's calls come next.
    is_over: bool,
}

/// How the ranks of a communicator tell each other what their links deliver.
pub struct Epochs {
    every: u64,
    /// Links are to be measured after the next call but the first.
    is_wanted: AtomicBool,
    /// All-reduces of the program that were counted.
    calls: AtomicU64,
    /// The all-gather of the ranks' words.
    call: CollectiveCall,
    /// What it sends and receives.
    word: Region,
    words: Region,
    /// Where these are.
    _arenas: [Arena; 2],
    known: Mutex<Known>,
}

/// Whether calls of this kind are counted.
pub(super) fn counts(call: &CollectiveCall) -> bool {
    let bytes = call.count.saturating_mul(call.dtype.size());
    call.collective == Collective::AllReduce && call.blocks.is_none() && bytes >= LEAST_BYTES
}

/// A number that was told, where it means something.
fn meant(number: f64) -> Option<f64> {
    Some(number).filter(|number| number.is_finite() && *number > 0.0)
}

impl Epochs {
    fn new(comm: &Comm, every: u64) -> Result<Epochs> {
        let nranks = comm.nranks();
        let (mut input, mut output) = (Arena::new(WORD), Arena::new(WORD * nranks));
        // SAFETY: the arena must outlive every use; because the call that uses it keeps these epochs, and a communicator that fails
        // cancels it.
        let word = unsafe { input.region().unbound() };
        // SAFETY: the arena must outlive every use; because of the same.
        let words = unsafe { output.region().unbound() };
        let call = comm.gather_of_words([word, words])?;
        let known = Known { rates: vec![None; nranks], ..Known::default() };
        Ok(Epochs {
            every,
            is_wanted: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            call,
            word,
            words,
            _arenas: [input, output],
            known: Mutex::new(known),
        })
    }

    /// Has links be measured after the next telling.
    pub(super) fn measure_now(&self) {
        locked(&self.known).profiler.forget();
    }

    /// Whether the ranks tell each other after these calls, by their number. The first call is not held up by a measuring that others wait for.
    pub(super) fn are_due(&self, calls: &[CollectiveCall]) -> bool {
        let more = calls.iter().filter(|call| counts(call)).count() as u64;
        let before = self.calls.fetch_add(more, Ordering::Relaxed);
        let is_wanted = before > 0 && more > 0 && self.is_wanted.swap(false, Ordering::AcqRel);
        is_wanted || before / self.every != (before + more) / self.every
    }

    /// The next call of the ranks' own, with its regions in host memory, whatever the communicator's device; none where the program's
    /// calls go on.
    pub(super) fn next(&self, comm: &Comm) -> Result<Option<CollectiveCall>> {
        let mut known = locked(&self.known);
        if std::mem::take(&mut known.is_over) {
            return Ok(None);
        }
        let Some(round) = known.round.clone() else { return Ok(Some(self.call.clone())) };
        let [send, recv] = round.blocks(&comm.grid, comm.rank);
        let [input, output] = known.memory(send.iter().sum(), recv.iter().sum());
        let blocks = BlockTable::of_pairs(packed(&send), packed(&recv));
        let count = blocks.longest();
        let mut call = CollectiveCall {
            algorithm: Some("direct".to_string()),
            blocks: Some(Arc::new(blocks)),
            ..CollectiveCall::of_bytes(Collective::AllToAll, [input.as_device(), output.as_device()], count)
        };
        comm.decide(&mut call)?;
        Ok(Some(call))
    }

    /// The call begins: what this rank has to tell is what its link delivers where that is known, and how long calls took. In a round what has
    /// been received of a rank so far is counted from here on, where the transport knows that.
    pub(super) fn begin(
        &self,
        (grid, me): (&Grid, Rank),
        delivers: Option<f64>,
        pace: Option<&mut CallPace>,
        received: &dyn Fn(Rank) -> Option<u64>,
    ) {
        let mut known = locked(&self.known);
        let now = Instant::now();
        if let Some(round) = known.round.clone() {
            known.first_begun.get_or_insert(now);
            known.clock = Some(RoundClock::new(now, &round, &round.blocks(grid, me)[1], received));
            return;
        }
        let (class, pace) = pace.map_or((0, None), CallPace::take);
        let (figure, first_begun) = (std::mem::take(&mut known.figure), known.first_begun);
        let us = first_begun.map_or(0.0, |begun| now.duration_since(begun).as_nanos() as f64 / 1e3);
        let counts = (0..grid.nranks()).any(|rank| received(Rank::from_index(rank)).is_some());
        let numbers: [f64; NUMBERS] =
            [delivers.unwrap_or(0.0), class.into(), pace.unwrap_or(0.0), figure, us, f64::from(u8::from(counts))];
        let word: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.word.write(&word);
    }

    /// What has begun is about to be looked at again.
    pub(super) fn look(&self, received: &dyn Fn(Rank) -> Option<u64>) {
        if let Some(clock) = &mut locked(&self.known).clock {
            clock.look(Instant::now(), received);
        }
    }

    /// The call has ended: what ranks own from now on. All find the same.
    pub(super) fn end(
        &self,
        grid: &Grid,
        operation: u64,
        received: &dyn Fn(Rank) -> Option<u64>,
    ) -> Option<Arc<ChunkWeights>> {
        let mut known = locked(&self.known);
        match (known.round.take(), known.clock.take()) {
            (Some(_), clock) => known.figure = clock.map_or(0.0, |clock| clock.figure(Instant::now(), received)),
            (None, _) => self.hear(&mut known, grid, operation),
        }
        known.shares.as_ref().map(|shares| shares.weights.clone())
    }

    /// The words have come.
    fn hear(&self, known: &mut Known, grid: &Grid, operation: u64) {
        let mut told: [Vec<f64>; NUMBERS] = Default::default();
        for rank in 0..grid.nranks() {
            let mut word = [0; WORD];
            self.words.part(rank * WORD, WORD).read(&mut word);
            for (numbers, bytes) in told.iter_mut().zip(word.as_chunks().0) {
                numbers.push(f64::from_le_bytes(*bytes));
            }
        }
        let after = known.after(grid, self.every, &told);
        if let AfterTelling::Measure(round) = after {
            known.round = Some(round);
            return;
        }
        (known.is_over, known.memory, known.first_begun) = (true, None, None);
        if matches!(after, AfterTelling::Rates(rates) if known.learn(grid, &rates)) {
            tell_change(known, operation);
        }
    }
}

impl Known {
    /// What comes after the ranks have told these numbers, every so many calls.
    fn after(
        &mut self,
        grid: &Grid,
        every: u64,
        [delivered, classes, paces, figures, passed, counts]: &[Vec<f64>; NUMBERS],
    ) -> AfterTelling {
        if self.profiler.round(grid).is_some() {
            let us = passed.iter().filter_map(|&us| meant(us)).fold(0.0, f64::max);
            return self.profiler.round_took(grid, RoundTook { figures, us });
        }
        let delivered: Vec<Option<f64>> = delivered.iter().map(|&rate| meant(rate)).collect();
        if delivered.iter().any(Option::is_some) {
            return AfterTelling::Rates(delivered);
        }
        // Who comes last has waited for nobody.
        let pace = paces.iter().filter_map(|&pace| meant(pace)).reduce(f64::min);
        let class = classes.iter().copied().fold(0.0, f64::max) as u32;
        // Where a rank sees whole messages only, buckets and buffers count for less of long ones.
        let is_counted = counts.iter().all(|&counts| counts > 0.0);
        let slowest = pace.filter(|_| is_counted).and_then(|pace| shares::slowest(grid, self.shares.as_ref(), pace));
        self.profiler.calls_took(grid, CallsTook { calls: every, class, pace, slowest }, self.shares.is_some())
    }

    /// Finds shares by these rates; of ranks of which nothing is known now, by what was. Whether they have changed.
    fn learn(&mut self, grid: &Grid, rates: &[Option<f64>]) -> bool {
        self.rates.iter_mut().zip(rates).for_each(|(rate, new)| *rate = new.or(*rate));
        let before = self.shares.take();
        self.shares = shares::next(grid, before.clone(), &self.rates);
        let is_news = self.shares != before;
        self.epoch += u64::from(is_news);
        self.profiler.has_changed(is_news);
        is_news
    }

    /// Memory to send so many bytes from, and for so many that are received. Bytes look random: a link may be coded.
    fn memory(&mut self, sent: usize, received: usize) -> [Region; 2] {
        let is_enough =
            |[input, output]: &mut [Arena; 2]| input.region().len() >= sent && output.region().len() >= received;
        if !self.memory.as_mut().is_some_and(is_enough) {
            let (mut input, output) = (Arena::new(sent), Arena::new(received));
            let mut state = 1u64;
            let mut number = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            };
            input.region().write(&(0..sent).map(|_| number()).collect::<Vec<u8>>());
            self.memory = Some([input, output]);
        }
        let [input, output] = self.memory.get_or_insert_with(|| [Arena::new(0), Arena::new(0)]);
        // SAFETY: the arena must outlive every use; because it goes when rounds are over, and the call that uses it keeps these epochs.
        let part = |arena: &mut Arena, bytes| unsafe { arena.region().part(0, bytes).unbound() };
        [part(input, sent), part(output, received)]
    }
}

#[cold]
fn tell_change(known: &Known, operation: u64) {
    let epoch = known.epoch;
    let Some(NodeShares { rates, gain, .. }) = &known.shares else {
        return crate::info!(
            "epoch {epoch} from operation {operation} on: links deliver alike, and all-reduces have even shares"
        );
    };
    let slowest = (0..rates.len()).min_by(|&one, &other| rates[one].total_cmp(&rates[other])).unwrap_or(0);
    let most = rates.iter().copied().fold(0.0, f64::max);
    crate::info!(
        "epoch {epoch} from operation {operation} on: the link of rank {slowest} delivers {:.1} MB/s, others up to {most:.1}: \
         shares of all-reduces by that, {gain:.2} times as fast as even ones; found in {:.0} ms of measuring",
        rates[slowest],
        known.profiler.cost_us() / 1e3
    );
}

/// The choice for a call that is to have shares by links: with rails on which every node owns a part. None where something else was
/// asked for, or cannot have shares.
pub(super) fn shared_choice(call: &CollectiveCall, decision: &Decision, grid: &Grid) -> Option<Choice> {
    let Executor::Own(Selection { choice, .. }) = &decision.executor else { return None };
    // Shorter messages are bound by their number, of which `direct` has the most.
    let chunk_bytes = call.count.saturating_mul(call.dtype.size()) / (grid.nrails() * grid.nnodes());
    if !counts(call) || chunk_bytes < LEAST_CHUNK_BYTES {
        return None;
    }
    let is_free = !matches!(decision.by, Policy::Named | Policy::Code | Policy::Script | Policy::Thresholds);
    let shared = match grid.nrails() {
        1 => Choice::flat("direct"),
        _ if choice.name == "two_level" => Choice { rail: "direct".to_string(), ..choice.clone() },
        _ => Choice::leveled("two_level", "direct", "direct"),
    };
    (is_free || shared == *choice).then_some(shared)
}

impl Comm {
    /// The all-gather in which each rank tells a word.
    pub(super) fn gather_of_words(&self, [word, words]: [Region; 2]) -> Result<CollectiveCall> {
        let algorithm = match (self.grid.nnodes(), self.grid.nrails()) {
            (1, _) => Some(AUTO.to_string()),
            // A vendor's library takes no words in host memory.
            _ if self.options.companion.is_some() => Some("log".to_string()),
            (_, 1) => Some("log".to_string()),
            _ => Some("two_level(direct,log)".to_string()),
        };
        let of_words =
            CollectiveCall::of_bytes(Collective::AllGather, [word, words].map(|region| region.as_device()), word.len());
        let mut call = CollectiveCall { algorithm, ..of_words };
        self.decide(&mut call)?;
        Ok(call)
    }

    /// What is known of the links: how many times shares have changed, and what each rank's link delivers in MB/s. None where ranks do not
    /// tell each other. Its ranks are these members of so many.
    pub(super) fn told_links(&self, nranks: usize, members: &[usize]) -> Option<serde_json::Value> {
        let known = locked(&self.epochs.get()?.known);
        let mut rates = vec![None; nranks];
        members.iter().zip(&known.rates).for_each(|(&member, rate)| rates[member] = *rate);
        Some(serde_json::json!({ "epoch": known.epoch, "mb_per_s": rates }))
    }

    /// What ranks own of all-reduces now, where links deliver differently (`STRATA_MEASURE_EVERY`).
    pub fn node_shares(&self) -> Option<NodeShares> {
        self.epochs.get().and_then(|epochs| locked(&epochs.known).shares.clone())
    }

    /// Begins to count all-reduces, where that is set. Where ranks go on without lost ones (`after_loss`) links are measured once in any case: a node with
    /// fewer ranks, or fewer NICs, has others carry more.
    pub(super) fn begin_epochs(&self, after_loss: bool) -> Result<()> {
        let every = match self.config.measure_every {
            0 if after_loss => u64::MAX,
            every => every,
        };
        if every == 0 || self.grid.nnodes() == 1 || self.options.on_host.is_some() {
            return Ok(());
        }
        // In front of a vendor's library there is something to share where Strata's transports go between nodes.
        if self.options.companion.is_none() || self.gpu().is_some() {
            return self.epochs(every).map(|epochs| epochs.is_wanted.store(after_loss, Ordering::Release));
        }
        if self.rank == Rank(0) {
            let why = "the vendor's library carries what goes between nodes (STRATA_INTER)";
            REFUSED.get().call_once(|| crate::log::notice(&format!("STRATA_MEASURE_EVERY is left out: {why}")));
        }
        Ok(())
    }

    /// Its epochs, made if there are none: after `every` all-reduces the ranks tell each other.
    fn epochs(&self, every: u64) -> Result<Arc<Epochs>> {
        if self.epochs.get().is_none() {
            // Another thread may have been first.
            let _ = self.epochs.set(Arc::new(Epochs::new(self, every)?));
        }
        self.epochs.get().cloned().ok_or_else(|| Error::Internal("a communicator's epochs are gone".to_string()))
    }

    /// Measures the links between the nodes now; shares of all-reduces follow. Collective.
    pub fn profile(self: &Arc<Comm>) -> Result<()> {
        self.usable()?;
        if self.options.on_host.is_some() {
            let text = "strataCommProfile: collectives of strataCommInitHost's communicators have even shares";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        self.quiesce()?;
        let over = self.generation().unwrap_or_else(|| self.clone());
        let measured = match over.grid.nnodes() {
            1 => Ok(()),
            _ => OperationBatch::new(over.clone()).profile(over.epochs(u64::MAX)?),
        };
        match measured {
            // The next call goes on without who is lost, and links are measured soon after that.
            Err(error) if self.survivors.get().is_some() && !over.status.losses().is_empty() => {
                crate::info!("links are not measured now: {error}");
                Ok(())
            }
            measured => measured,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_of_the_largest_calls_says_how_fast_they_are() {
        let mut pace = CallPace::default();
        assert_eq!(pace.take(), (0, None));
        for (bytes, ns) in [(1 << 20, 9e6), (1 << 24, 4e7), (1 << 24, 2e7), (1 << 20, 1e6), (1 << 24, 3e7)] {
            pace.take_in(bytes, ns);
        }
        assert_eq!(pace.take(), (24, Some(2e7 / f64::from(1 << 24))));
        assert_eq!(pace.take(), (0, None));
    }

    #[test]
    fn numbers_that_mean_nothing_are_left_out() {
        let grid = Grid::blocks(&[1; 3]);
        let mut known = Known { rates: vec![None; 3], ..Known::default() };
        let nothing = vec![f64::NAN, -1.0, f64::INFINITY];
        let told: [Vec<f64>; NUMBERS] = std::array::from_fn(|_| nothing.clone());
        let after = known.after(&grid, 5, &told);
        assert!(matches!(after, AfterTelling::Measure(_)), "{after:?}");
        let ends = (0..10).any(|_| matches!(known.after(&grid, 5, &told), AfterTelling::Rates(_)));
        assert!(ends, "rounds come to an end");
        assert!(!known.learn(&grid, &[None; 3]));
        let slow = [25.0, 2.0, 25.0].map(Some);
        assert!(known.learn(&grid, &slow) && !known.learn(&grid, &[None; 3]) && known.shares.is_some());
    }
}
