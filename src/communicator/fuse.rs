//! Calls of one group as fewer calls.
//!
//! Calls of the same collective become one call over the concatenation of their data, so that they take the rounds of one. Broadcasts
//! with several roots become an all-gather of blocks of different sizes, and reduces a reduce-scatter, so that all roots' NICs work at
//! once. Data stays where it is, but for short data in many parts ([`super::joined`]).
//!
//! The rewriting is a pure function of what all ranks of a communicator know: the calls' collectives, counts, types, operations and
//! roots, in the order of the group. One thing is each rank's own: calls of which one writes what another one reads or writes are made one
//! after another, as they are recorded. Of calls with a root that may be seen on one rank only, so no call is moved past one with a root
//! that is of another collective. Ranks that do not share what is left of that see a mismatch, told in words.
//! Source: MCR-DL (Anthony et al., IPDPS 2023), section V-E, where a program's tensors are fused within bounds of bytes and time.
#![forbid(unsafe_code)]

use super::joined::{Concatenation, Joined};
use super::{CollectiveCall, CommOptions};
use crate::carrier::Carrier;
use crate::config::Fuse;
use crate::dtype::{DataType, Prologue, Reduction};
use crate::health::CallSummary;
use crate::memory::DeviceRegion;
use crate::plan::blocks::{packed, BlockTable, Extent};
use crate::plan::Collective;
use crate::selection::{CarriedName, Context};
use crate::topo::Rank;
use smallvec::{smallvec, SmallVec};
use std::sync::Arc;

/// The longest call, in bytes of its largest buffer, that is joined with others: a longer one is limited by bandwidth, and the
/// beginning of its result is final sooner by itself.
const LONGEST_BYTES: usize = 4 << 20;

/// What decides beside the calls, the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct FuseRules {
    /// The setting.
    pub fuse: Fuse,
    /// Whether broadcasts with several roots may become an all-gather: not where their algorithm is named.
    pub broadcasts: bool,
    /// Whether reduces with several roots may become a reduce-scatter.
    pub reduces: bool,
    /// The same where the roots' blocks differ in size: not where ranks exchange on a board, which is for blocks of one size.
    pub uneven: bool,
    /// Whether all-to-alls may be joined: not where scripts may do them in place, which each rank knows of itself only.
    pub all_to_alls: bool,
    /// Collectives for which a code is set, each as a bit: which of their calls are coded follows from the calls' own sizes.
    pub coded: u16,
}

/// The bit of a collective.
fn bit(collective: Collective) -> u16 {
    1 << collective as u16
}

impl FuseRules {
    /// The rules of a communicator. In front of a vendor's library nothing is joined.
    pub fn of(options: &CommOptions, context: &Context) -> FuseRules {
        let is_free = |collective| context.config.algorithm(collective) == "auto";
        let is_coded = |collective: &Collective| context.config.code(*collective).is_some();
        let coded = Collective::ALL.into_iter().filter(is_coded).map(bit).sum::<u16>();
        FuseRules {
            coded,
            fuse: if options.companion.is_none() { context.config.fuse } else { Fuse::Off },
            // Of several nodes each rank knows the board of its own only.
            uneven: context.grid.nnodes() > 1 || !context.board,
            // What they become would be coded.
            broadcasts: is_free(Collective::Broadcast) && coded & bit(Collective::AllGather) == 0,
            reduces: is_free(Collective::Reduce) && coded & bit(Collective::ReduceScatter) == 0,
            all_to_alls: context.knowledge.scripts.scripts.is_empty(),
        }
    }
}

/// What calls that become one have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Kind {
    collective: Collective,
    /// Of collectives that reduce.
    reduction: Option<Reduction>,
    /// Of gathers and scatters.
    root: Rank,
    /// What the call says of carriers, if it leaves the algorithm to Strata.
    named: Option<Option<Carrier>>,
}

/// The places in the group of the calls that become one.
pub type GroupPlaces = SmallVec<[usize; 1]>;

/// What calls of a group that become one have in common, with their stretch; none of those that stay as they are.
type StretchKind = Option<(Kind, usize)>;

/// A call of a group, and its place there.
type Placed = (usize, CollectiveCall);

/// Makes fewer calls of those of one group on one communicator, seen from `rank`; of each, in whose places it is.
pub fn fuse(
    calls: Vec<CollectiveCall>,
    (rank, nranks): (Rank, usize),
    rules: &FuseRules,
) -> Vec<(GroupPlaces, CollectiveCall)> {
    if rules.fuse == Fuse::Off || calls.len() < 2 || nranks < 2 {
        return each_alone(calls.into_iter().enumerate());
    }
    let stretches = stretches(&calls);
    let kind = |(call, stretch)| Some((kind(call, nranks, rules)?, stretch));
    let kinds: Vec<StretchKind> = calls.iter().zip(stretches).map(kind).collect();
    let has_equals = |index: usize| kinds[index].is_some() && kinds[index + 1..].contains(&kinds[index]);
    if !(0..calls.len()).any(has_equals) || depend_in_stretches(&calls) {
        return each_alone(calls.into_iter().enumerate());
    }
    let placed = calls.into_iter().enumerate();
    if kinds.iter().all(|kind| *kind == kinds[0]) {
        return rewrite(placed.collect(), (rank, nranks), rules);
    }
    // Each kind at the place of its first call.
    let mut classes: Vec<(StretchKind, Vec<Placed>)> = Vec::new();
    for (call, kind) in placed.zip(kinds) {
        match classes.iter_mut().find(|(known, _)| kind.is_some() && *known == kind) {
            Some((_, class)) => class.push(call),
            None => classes.push((kind, vec![call])),
        }
    }
    let rewritten = classes.into_iter().flat_map(|(_, class)| rewrite(class, (rank, nranks), rules));
    rewritten.collect()
}

/// Calls that stay as they are.
fn each_alone(calls: impl Iterator<Item = Placed>) -> Vec<(GroupPlaces, CollectiveCall)> {
    calls.map(|(place, call)| (smallvec![place], call)).collect()
}

/// With which other calls a call may become one.
fn kind(call: &CollectiveCall, nranks: usize, rules: &FuseRules) -> Option<Kind> {
    let CollectiveCall { collective, reduction, root, .. } = *call;
    // One that names an algorithm is for this one call; one that names a carrier joins those that name the same.
    let named = call.algorithm.as_deref().map(CarriedName::parse).transpose().ok()?;
    if named.is_some_and(|name| name.algorithm().is_some()) {
        return None;
    }
    let named = named.map(|name| name.carrier);
    // What is decided has gone through here before, or is for the buffers of one call.
    let is_plain = call.decision.is_none()
        && call.blocks.is_none()
        && call.factor_at.is_none()
        && call.residual.is_none()
        && call.count > 0;
    // Each rank multiplies by a number of its own.
    let has_factor = reduction.is_some_and(|reduction| matches!(reduction.prologue, Prologue::Scalar(_)));
    let is_wanted = match collective {
        Collective::Custom => false,
        _ if rules.coded & bit(collective) != 0 => false,
        Collective::AllToAll => rules.all_to_alls,
        _ => !collective.reduces() || rules.fuse == Fuse::All,
    };
    let is_short = bytes(call).saturating_mul(collective.blocks(nranks)) <= LONGEST_BYTES;
    let has_roots = matches!(collective, Collective::Broadcast | Collective::Reduce);
    let is_fit = is_plain && !has_factor && is_wanted && (is_short || has_roots);
    is_fit.then_some(Kind { collective, reduction, root: if has_roots { Rank(0) } else { root }, named })
}

/// Bytes of a block.
fn bytes(call: &CollectiveCall) -> usize {
    call.count * call.dtype.size()
}

/// One call, or several, in the place of calls of one kind.
fn rewrite(
    placed: Vec<Placed>,
    (rank, nranks): (Rank, usize),
    rules: &FuseRules,
) -> Vec<(GroupPlaces, CollectiveCall)> {
    let [(_, first), _, ..] = &placed[..] else { return each_alone(placed.into_iter()) };
    let whole = match first.collective {
        Collective::Broadcast => rules.broadcasts.then_some(Collective::AllGather),
        Collective::Reduce => rules.reduces.then_some(Collective::ReduceScatter),
        _ => {
            let (places, calls): (GroupPlaces, Vec<CollectiveCall>) = placed.into_iter().unzip();
            return vec![(places, join(calls, (rank, nranks)))];
        }
    };
    let (places, calls): (GroupPlaces, Vec<CollectiveCall>) = placed.into_iter().unzip();
    if let Some(whole) = whole.filter(|_| is_spread(&calls, nranks, rules)) {
        return vec![(places, gather_roots(whole, calls, (rank, nranks)))];
    }
    // By root, and each long one by itself.
    let mut classes: Vec<(Option<Rank>, GroupPlaces, Vec<CollectiveCall>)> = Vec::new();
    for (place, call) in places.into_iter().zip(calls) {
        let root = (bytes(&call) <= LONGEST_BYTES).then_some(call.root);
        match classes.iter_mut().find(|(known, ..)| root.is_some() && *known == root) {
            Some((_, places, class)) => {
                places.push(place);
                class.push(call);
            }
            None => classes.push((root, smallvec![place], vec![call])),
        }
    }
    let one = |class: Vec<CollectiveCall>| match <[CollectiveCall; 1]>::try_from(class) {
        Ok([call]) => call,
        Err(class) => join(class, (rank, nranks)),
    };
    classes.into_iter().map(|(_, places, class)| (places, one(class))).collect()
}

/// Bytes of each root's calls.
fn bytes_by_root(calls: &[CollectiveCall], nranks: usize) -> Vec<usize> {
    let mut bytes_of = vec![0; nranks];
    calls.iter().for_each(|call| bytes_of[call.root.index()] += bytes(call));
    bytes_of
}

/// Whether calls with several roots are better one all-gather or reduce-scatter: where half the ranks are roots, or latency
/// decides. Few roots' long data take fewer rounds by trees of their own.
fn is_spread(calls: &[CollectiveCall], nranks: usize, rules: &FuseRules) -> bool {
    let by_root = bytes_by_root(calls, nranks);
    let roots = by_root.iter().filter(|&&bytes| bytes > 0).count();
    let is_even = by_root.iter().all(|&bytes| bytes == by_root[0]);
    let is_short = by_root.iter().sum::<usize>() <= LONGEST_BYTES / nranks.max(1);
    roots > 1 && (is_even || rules.uneven) && (2 * roots >= nranks || is_short)
}

/// The elements of calls that become one: bytes, where nothing is reduced.
fn unit(first: &CollectiveCall) -> DataType {
    if first.collective.reduces() {
        first.dtype
    } else {
        DataType::U8
    }
}

/// What several calls need to be one.
struct Joining {
    joined: Joined,
    /// Whether some are in place and others are not.
    is_mixed: bool,
    /// The send buffer as the calls give it, where they are mixed.
    given: Concatenation,
}

impl Joining {
    fn new(calls: &[CollectiveCall], rank: Rank, has_place: impl Fn(&CollectiveCall) -> bool) -> Joining {
        let unit = unit(&calls[0]);
        let (mut in_place, mut placed) = (0, 0);
        for call in calls.iter().filter(|call| has_place(call)) {
            (placed, in_place) = (placed + 1, in_place + usize::from(call.in_place(rank)));
        }
        let counts = calls.iter().map(|call| (bytes(call) / unit.size(), call.root));
        let joined = Joined {
            input: Concatenation::default(),
            output: Concatenation::default(),
            is_packed: false,
            in_place: in_place > 0,
            copies: Vec::new(),
            calls: Vec::new(),
            summary: CallSummary::joined(calls[0].collective, counts, unit, calls[0].reduction),
        };
        Joining { joined, is_mixed: in_place > 0 && in_place < placed, given: Concatenation::default() }
    }

    /// Where a block of a send buffer lies whose counterpart in place is `place`: there, once it has been copied, if the call is not
    /// in place and others are.
    fn input(&mut self, block: DeviceRegion, place: Option<DeviceRegion>) {
        let moved = place.filter(|place| self.is_mixed && place.address() != block.address());
        if let Some(place) = moved {
            self.joined.copies.push((block, place));
        }
        self.joined.input.push(moved.unwrap_or(block));
        if self.is_mixed {
            self.given.push(block);
        }
    }

    /// The one call in the place of these, with blocks of so many elements.
    fn call(
        mut self,
        calls: Vec<CollectiveCall>,
        collective: Collective,
        count: usize,
        blocks: Option<BlockTable>,
    ) -> CollectiveCall {
        let first = calls[0].clone();
        self.joined.calls = calls;
        self.joined.pack();
        if self.is_mixed && self.joined.is_packed {
            // What is brought together need not be in place, and is copied once.
            self.joined.copies.clear();
            self.joined.input = self.given;
        }
        CollectiveCall {
            collective,
            input: DeviceRegion::EMPTY,
            output: DeviceRegion::EMPTY,
            count,
            blocks: blocks.map(Arc::new),
            dtype: unit(&first),
            joined: Some(Arc::new(self.joined)),
            decision: None,
            ..first
        }
    }
}

/// One call over the concatenation of the data of several of one collective, and one root if it has one.
fn join(calls: Vec<CollectiveCall>, (rank, nranks): (Rank, usize)) -> CollectiveCall {
    let first = &calls[0];
    let (collective, root) = (first.collective, first.root);
    let sent = collective.input_blocks(nranks, rank, root);
    let received = collective.output_blocks(nranks, rank, root);
    let mut joining = Joining::new(&calls, rank, |_| sent > 0 && received > 0);
    let block =
        |region: DeviceRegion, call: &CollectiveCall, index: usize| region.part(index * bytes(call), bytes(call));
    // The block of the other buffer in which a block of the send buffer lies in place, if there is one.
    let counterpart = |index: usize| match (sent, received) {
        (_, 0) => None,
        (1, 1) => Some(0),
        (1, _) => Some(rank.index()),
        (_, 1) => (index == rank.index()).then_some(0),
        _ => Some(index),
    };
    for index in 0..sent {
        for call in &calls {
            let place = counterpart(index).map(|place| block(call.output, call, place));
            joining.input(block(call.input, call, index), place);
        }
    }
    for index in 0..received {
        calls.iter().for_each(|call| joining.joined.output.push(block(call.output, call, index)));
    }
    let bytes = calls.iter().map(bytes).sum::<usize>();
    let count = bytes / unit(first).size();
    joining.call(calls, collective, count, None)
}

/// Broadcasts (reduces) with several roots as an all-gather (reduce-scatter): the block of a rank has the data of all calls whose
/// root it is.
fn gather_roots(collective: Collective, calls: Vec<CollectiveCall>, (rank, nranks): (Rank, usize)) -> CollectiveCall {
    let mut joining = Joining::new(&calls, rank, |call| call.root == rank);
    let mut by_root: Vec<&CollectiveCall> = calls.iter().collect();
    by_root.sort_by_key(|call| call.root);
    for call in by_root {
        let is_own = call.root == rank;
        if collective == Collective::ReduceScatter || is_own {
            joining.input(call.input, is_own.then_some(call.output));
        }
        if collective == Collective::AllGather || is_own {
            joining.joined.output.push(call.output);
        }
    }
    let size = unit(&calls[0]).size();
    let counts: Vec<usize> = bytes_by_root(&calls, nranks).iter().map(|bytes| bytes / size).collect();
    let is_even = counts.iter().all(|&count| count == counts[0]);
    let longest = counts.iter().copied().max().unwrap_or(0);
    let blocks = (!is_even).then(|| BlockTable::of_all(collective, rank, packed(&counts)));
    CollectiveCall { root: Rank(0), ..joining.call(calls, collective, longest, blocks) }
}

/// What neighbours in a group have in common that are of one stretch: their collective, where it has a root.
fn root_class(call: &CollectiveCall) -> Option<Collective> {
    call.collective.has_root().then_some(call.collective)
}

/// The stretch of each call: calls do not leave theirs, since only the root knows what calls with a root use there.
fn stretches(calls: &[CollectiveCall]) -> Vec<usize> {
    let mut stretch = 0;
    let next = |index: usize| {
        stretch += usize::from(index > 0 && root_class(&calls[index]) != root_class(&calls[index - 1]));
        stretch
    };
    (0..calls.len()).map(next).collect()
}

/// Whether one call writes what another one reads or writes that may come to be one with it, or to another place.
fn depend_in_stretches(calls: &[CollectiveCall]) -> bool {
    calls.chunk_by(|one, next| root_class(one) == root_class(next)).any(depend)
}

/// Where each block of a buffer lies.
fn blocks_of(region: DeviceRegion, blocks: Option<&[Extent]>, size: usize) -> SmallVec<[(u64, u64); 1]> {
    let part = |at: usize, len: usize| (region.address() + at as u64, region.address() + (at + len) as u64);
    match blocks {
        // What only the root has.
        _ if region.is_empty() => SmallVec::new(),
        None => smallvec![part(0, region.len())],
        Some(blocks) => blocks.iter().map(|block| part(block.at * size, block.count * size)).collect(),
    }
}

/// Whether one call writes what another one reads or writes, as far as this rank knows.
pub fn depend(calls: &[CollectiveCall]) -> bool {
    struct Used {
        begin: u64,
        end: u64,
        call: usize,
        is_written: bool,
    }
    let mut used: Vec<Used> = Vec::with_capacity(2 * calls.len());
    for (index, call) in calls.iter().enumerate() {
        let (blocks, size) = (call.blocks.as_deref(), call.dtype.size());
        let read = blocks_of(call.input, blocks.map(BlockTable::input), size);
        let written = blocks_of(call.output, blocks.map(BlockTable::output), size);
        let regions =
            read.into_iter().map(|region| (region, false)).chain(written.into_iter().map(|region| (region, true)));
        for ((begin, end), is_written) in regions.filter(|((begin, end), _)| begin < end) {
            used.push(Used { begin, end, call: index, is_written });
        }
    }
    used.sort_unstable_by_key(|used| used.begin);
    // The two calls whose regions reach farthest, of all regions so far, and of those that are written.
    let (mut any, mut written) = (Farthest::default(), Farthest::default());
    used.iter().any(|used| {
        let others = if used.is_written { &any } else { &written };
        let overlaps = others.beside(used.call) > used.begin;
        any.reach(used.end, used.call);
        if used.is_written {
            written.reach(used.end, used.call);
        }
        overlaps
    })
}

/// How far regions reach: the farthest of one call, and of all others.
#[derive(Default)]
struct Farthest([(u64, usize); 2]);

impl Farthest {
    /// The end of the region that reaches farthest, of all calls but this one.
    fn beside(&self, call: usize) -> u64 {
        let [(first, of), (second, _)] = self.0;
        if of == call {
            second
        } else {
            first
        }
    }

    fn reach(&mut self, end: u64, call: usize) {
        let [first, second] = &mut self.0;
        match end > first.0 {
            true if first.1 == call => first.0 = end,
            true => (*second, *first) = (*first, (end, call)),
            false if first.1 != call && end > second.0 => *second = (end, call),
            false => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::RedOp;
    use crate::memory::Arena;

    const NRANKS: usize = 3;
    const RULES: FuseRules =
        FuseRules { fuse: Fuse::All, broadcasts: true, reduces: true, uneven: true, all_to_alls: true, coded: 0 };

    /// Calls, as all ranks make them: collective, type, elements, root.
    type Recorded = (Collective, DataType, usize, u32);

    /// The calls on `rank`, each with buffers of its own.
    fn calls(recorded: &[Recorded], rank: Rank) -> Vec<CollectiveCall> {
        let memory = Arena::new(1 << 16).leak().as_device();
        let mut at = 0;
        let mut take = |bytes: usize| {
            // A gap, so that neighbours do not become one region.
            at += bytes + 1;
            memory.part(at - bytes - 1, bytes)
        };
        let call = |&(collective, dtype, count, root): &Recorded| {
            let (root, block) = (Rank(root), count * dtype.size());
            CollectiveCall {
                collective,
                input: take(collective.input_blocks(NRANKS, rank, root) * block),
                output: take(collective.output_blocks(NRANKS, rank, root) * block),
                count,
                blocks: None,
                dtype,
                reduction: collective.reduces().then(|| Reduction::new(RedOp::Sum, dtype, NRANKS)),
                factor_at: None,
                residual: None,
                root,
                algorithm: None,
                joined: None,
                tag: 0,
                decision: None,
            }
        };
        recorded.iter().map(call).collect()
    }

    /// What the calls become, in words.
    fn fused(recorded: &[Recorded], rules: &FuseRules) -> Vec<String> {
        let of = |rank: u32| -> Vec<String> {
            let text = |call: &CollectiveCall| {
                let sizes = call.known_sizes().map_or(String::new(), |sizes| format!(" of {sizes:?}"));
                let joined = call.joined.as_ref().map_or(0, |joined| joined.calls.len());
                let CollectiveCall { collective, count, dtype, root, .. } = call;
                format!("{joined}: {} {count} {} {root}{sizes}", collective.name(), dtype.name())
            };
            fuse(calls(recorded, Rank(rank)), (Rank(rank), NRANKS), rules).iter().map(|(_, call)| text(call)).collect()
        };
        let texts = of(0);
        assert!((1..NRANKS as u32).all(|rank| of(rank) == texts), "ranks see other calls");
        texts
    }

    use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, Scatter};
    use DataType::{F32, F64, I8};

    #[test]
    fn no_call_is_moved_past_one_with_a_root_of_another_collective() {
        // Only the root of a reduce could see that a broadcast sends its result.
        let in_turns = [(Reduce, F32, 4, 0), (Broadcast, F32, 4, 0), (Reduce, F32, 4, 0), (Broadcast, F32, 4, 0)];
        assert_eq!(fused(&in_turns, &RULES).len(), 4);
        let gathered = [(Gather, F32, 4, 0), (Scatter, F32, 4, 0), (Gather, F32, 4, 0), (Scatter, F32, 4, 0)];
        assert_eq!(fused(&gathered, &RULES).len(), 4);
        let between = [(AllReduce, F32, 4, 0), (Broadcast, F32, 4, 0), (AllReduce, F32, 4, 0), (AllReduce, F32, 4, 0)];
        assert_eq!(fused(&between, &RULES).len(), 3);
        // The others go together, in their stretches.
        let apart = [(Reduce, F32, 4, 0), (Reduce, F32, 4, 0), (Broadcast, F32, 4, 0), (Broadcast, F32, 4, 0)];
        assert_eq!(fused(&apart, &RULES).len(), 2);
    }

    #[test]
    fn calls_of_one_kind_become_one_at_the_place_of_the_first() {
        let recorded = [
            (AllReduce, F32, 3, 0),
            (AllGather, F64, 2, 0),
            (AllReduce, F64, 4, 0),
            (AllReduce, F32, 5, 0),
            (AllGather, I8, 1, 0),
        ];
        let wanted = ["2: all_reduce 8 float 0", "2: all_gather 17 uint8 0", "0: all_reduce 4 double 0"];
        assert_eq!(fused(&recorded, &RULES), wanted);
        let moves = [
            "0: all_reduce 3 float 0",
            "2: all_gather 17 uint8 0",
            "0: all_reduce 4 double 0",
            "0: all_reduce 5 float 0",
        ];
        assert_eq!(fused(&recorded, &FuseRules { fuse: Fuse::Moves, ..RULES }), moves);
        assert_eq!(fused(&recorded, &FuseRules { fuse: Fuse::Off, ..RULES }).len(), 5);
        let long = (AllReduce, F32, 1 << 11, 0);
        assert_eq!(fused(&[long, long], &RULES), ["2: all_reduce 4096 float 0"]);
        let in_place = [(AllToAll, I8, 1, 0), (AllToAll, I8, 1, 0)];
        assert_eq!(fused(&in_place, &RULES).len(), 1);
        assert_eq!(fused(&in_place, &FuseRules { all_to_alls: false, ..RULES }).len(), 2);
        assert_eq!(fused(&[long, long], &FuseRules { coded: bit(AllReduce), ..RULES }).len(), 2);
        assert_eq!(fused(&[long, long], &FuseRules { coded: bit(AllGather), ..RULES }).len(), 1);
    }

    #[test]
    fn roots_decide_what_rooted_calls_become() {
        let of = |collective, roots: &[u32]| -> Vec<Recorded> {
            roots.iter().enumerate().map(|(index, &root)| (collective, F32, 1 + index, root)).collect()
        };
        assert_eq!(fused(&of(Broadcast, &[2, 0, 2]), &RULES), ["3: all_gather 16 uint8 0 of [8, 0, 16]"]);
        assert_eq!(fused(&of(Reduce, &[2, 0, 2]), &RULES), ["3: reduce_scatter 4 float 0 of [2, 0, 4]"]);
        assert_eq!(
            fused(&[(Broadcast, F32, 2, 1), (Broadcast, F64, 1, 0), (Broadcast, I8, 8, 2)], &RULES),
            ["3: all_gather 8 uint8 0"]
        );
        let single = ["2: broadcast 16 uint8 2", "0: broadcast 2 float 0"];
        assert_eq!(fused(&of(Broadcast, &[2, 0, 2]), &FuseRules { uneven: false, ..RULES }), single);
        assert_eq!(fused(&of(Broadcast, &[2, 0, 2]), &FuseRules { broadcasts: false, ..RULES }), single);
        assert_eq!(fused(&of(Broadcast, &[1, 1]), &RULES), ["2: broadcast 12 uint8 1"]);
        assert_eq!(fused(&of(Gather, &[1, 0, 1]), &RULES), ["2: gather 16 uint8 1", "0: gather 2 float 0"]);
    }

    #[test]
    fn what_calls_become_has_the_memory_of_each_in_the_order_of_its_blocks() {
        for rank in (0..NRANKS).map(Rank::from_index) {
            let recorded = [(AllGather, I8, 2, 0), (AllGather, F32, 1, 0)];
            let single = calls(&recorded, rank);
            let [(_, one)] = &fuse(single.clone(), (rank, NRANKS), &RULES)[..] else { panic!("several calls") };
            let joined = one.joined.as_ref().unwrap();
            let places = |regions: &[DeviceRegion]| -> Vec<(u64, usize)> {
                regions.iter().map(|region| (region.address(), region.len())).collect()
            };
            assert_eq!(places(joined.input.regions()), places(&[single[0].input, single[1].input]));
            let blocks = (0..NRANKS)
                .flat_map(|block| single.iter().map(move |call| call.output.part(block * bytes(call), bytes(call))));
            assert_eq!(places(joined.output.regions()), places(&blocks.collect::<Vec<_>>()));
        }
    }

    #[test]
    fn where_some_are_in_place_the_others_are_copied_there() {
        let rank = Rank(1);
        let mut single = calls(&[(AllReduce, F32, 3, 0), (AllReduce, F32, 3, 0)], rank);
        single[0].input = single[0].output;
        let [(_, one)] = &fuse(single.clone(), (rank, NRANKS), &RULES)[..] else { panic!("several calls") };
        let joined = one.joined.as_ref().unwrap();
        assert!(one.in_place(rank));
        let [(from, to)] = joined.copies[..] else { panic!("{:?}", joined.copies) };
        assert_eq!((from.address(), to.address()), (single[1].input.address(), single[1].output.address()));
        assert_eq!(joined.input.regions()[1].address(), single[1].output.address());
    }

    #[test]
    fn calls_that_depend_on_each_other_stay_as_they_are() {
        let fresh = || calls(&[(AllReduce, F32, 3, 0); 4], Rank(0));
        let count = |calls: Vec<CollectiveCall>| fuse(calls, (Rank(0), NRANKS), &RULES).len();
        assert_eq!(count(fresh()), 1);
        let mut same_input = fresh();
        same_input[3].input = same_input[0].input;
        assert_eq!(count(same_input), 1, "several may read the same");
        for (reads, writes) in [(0, 3), (3, 0), (2, 1)] {
            let mut calls = fresh();
            calls[reads].input = calls[writes].output.part(8, 4);
            assert_eq!(count(calls), 4, "{reads} reads what {writes} writes");
            let mut calls = fresh();
            calls[reads].output = calls[writes].output;
            assert_eq!(count(calls), 4, "{reads} and {writes} write the same");
        }
    }

    #[test]
    fn factors_and_named_algorithms_keep_calls_apart() {
        let change = |change: fn(&mut CollectiveCall)| {
            let mut calls = calls(&[(AllReduce, F32, 3, 0); 2], Rank(0));
            calls.iter_mut().for_each(change);
            fuse(calls, (Rank(0), NRANKS), &RULES).len()
        };
        assert_eq!(change(|_| {}), 1);
        assert_eq!(change(|call| call.reduction = Some(Reduction::pre_mul_sum(F32, [1; 8]))), 2);
        for apart in ["ring", "ring@tcp"] {
            let mut calls = calls(&[(AllReduce, F32, 3, 0); 2], Rank(0));
            calls.iter_mut().for_each(|call| call.algorithm = Some(apart.to_string()));
            assert_eq!(fuse(calls, (Rank(0), NRANKS), &RULES).len(), 2, "{apart}");
        }
        assert_eq!(change(|call| call.count = 0), 2);
    }

    #[test]
    fn a_named_carrier_joins_calls_that_name_the_same_and_each_call_keeps_its_place() {
        let mut calls = calls(&[(AllReduce, F32, 3, 0); 7], Rank(1));
        let names = [None, Some("@tcp"), Some("auto@tcp"), Some("@mpi"), None, Some("auto"), Some("@mpi")];
        calls.iter_mut().zip(names).for_each(|(call, name)| call.algorithm = name.map(str::to_string));
        let fused = fuse(calls, (Rank(1), NRANKS), &RULES);
        let seen: Vec<(&[usize], Option<&str>)> =
            fused.iter().map(|(places, call)| (&places[..], call.algorithm.as_deref())).collect();
        let wanted: [(&[usize], _); 4] =
            [(&[0, 4], None), (&[1, 2], Some("@tcp")), (&[3, 6], Some("@mpi")), (&[5], Some("auto"))];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn rooted_calls_keep_their_places_by_root_and_long_ones_by_themselves() {
        let long = LONGEST_BYTES + 1;
        let recorded = [(Broadcast, I8, 4, 1), (Broadcast, I8, long, 1), (Broadcast, I8, 2, 0), (Broadcast, I8, 6, 1)];
        // The long one has no memory here, and needs none.
        let mut calls =
            calls(&recorded.map(|(collective, dtype, count, root)| (collective, dtype, count % long, root)), Rank(2));
        calls[1].count = long;
        let rules = FuseRules { broadcasts: false, ..RULES };
        let places = |calls| -> Vec<Vec<usize>> {
            fuse(calls, (Rank(2), NRANKS), &rules).into_iter().map(|(places, _)| places.into_vec()).collect()
        };
        assert_eq!(places(calls), [vec![0, 3], vec![1], vec![2]]);
    }
}
