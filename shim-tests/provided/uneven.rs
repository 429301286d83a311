//! Calls whose blocks differ in size: counts, gaps, places, sums whose input is scaled, all from a seed. Every byte is compared, also
//! of what lies between blocks.

use crate::cases::host_region;
use crate::world::Member;
use std::sync::Arc;
use strata::communicator::CollectiveCall;
use strata::device::host::reference;
use strata::dtype::{DataType, Prologue, RedOp, Reduction};
use strata::memory::DeviceRegion;
use strata::plan::blocks::{BlockTable, Extent};
use strata::plan::Collective;
use strata::sim::Random;
use strata::topo::Rank;

/// What memory holds that no call has written.
const GAP: u8 = 0x5a;
const KINDS: [Collective; 5] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll, Collective::Gather, Collective::Scatter];
/// Types whose sums of a few small numbers are exact; of the first and the last the example sums nothing.
const EXACT: [DataType; 5] = [DataType::U8, DataType::I32, DataType::F32, DataType::F64, DataType::F16];

/// A call, as all ranks make it.
#[derive(Debug)]
pub struct Uneven {
    seed: u64,
    collective: Collective,
    dtype: DataType,
    root: usize,
    /// Whether a sum's input is doubled, and whether the factor is in memory.
    factor: Option<bool>,
    in_place: bool,
    /// Elements from each rank to each.
    counts: Vec<Vec<usize>>,
}

impl Uneven {
    /// The call of a seed.
    pub fn new(seed: u64, nranks: usize) -> Uneven {
        let mut random = Random::new(seed ^ 0x5eed);
        let (collective, dtype) = (random.pick(&KINDS), random.pick(&EXACT));
        let most = random.pick(&[1, 7, 900, 900, 40_000, 40_000, 400_000]);
        let factor = (collective.reduces() && random.one_in(2)).then(|| random.one_in(2));
        let mut one = || if random.one_in(4) { 0 } else { random.below(1 + most) as usize };
        let row: Vec<usize> = (0..nranks).map(|_| one()).collect();
        let counts = (0..nranks).map(|from| match collective {
            Collective::AllGather | Collective::Gather => vec![row[from]; nranks],
            Collective::ReduceScatter | Collective::Scatter => row.clone(),
            _ => (0..nranks).map(|_| one()).collect(),
        });
        let counts = counts.collect();
        let root = if collective.has_root() { random.below(nranks as u64) as usize } else { 0 };
        let in_place = collective != Collective::AllToAll && random.one_in(3);
        Uneven { seed, collective, dtype, root, factor, in_place, counts }
    }

    /// Elements of the blocks of a rank's send and receive buffer.
    fn blocks(&self, me: usize) -> [Vec<usize>; 2] {
        let (to_all, from_all) = (self.counts[me].clone(), self.counts.iter().map(|row| row[me]).collect::<Vec<_>>());
        let has = |list: Vec<usize>, is: bool| if is { list } else { Vec::new() };
        match self.collective {
            Collective::AllGather => [vec![to_all[me]], from_all],
            Collective::Gather => [vec![to_all[me]], has(from_all, me == self.root)],
            Collective::Scatter => [has(to_all, me == self.root), vec![self.counts[self.root][me]]],
            Collective::ReduceScatter => [to_all, vec![self.counts[me][me]]],
            _ => [to_all, from_all],
        }
    }

    /// Where blocks lie, with gaps, and in turn or the other way round.
    fn extents(&self, counts: &[usize], random: &mut Random) -> Vec<Extent> {
        let (mut extents, mut at) = (vec![Extent { count: 0, at: 0 }; counts.len()], 0);
        let (is_backward, has_gaps) = (random.one_in(3), random.one_in(2));
        for index in 0..counts.len() {
            let block = if is_backward { counts.len() - 1 - index } else { index };
            // A buffer of one block begins with it.
            at += if has_gaps && counts.len() > 1 { random.below(5) as usize } else { 0 };
            extents[block] = Extent { count: counts[block], at };
            at += counts[block];
        }
        extents
    }

    fn value(&self, from: usize, block: usize, index: usize) -> u64 {
        (self.seed * 7 + (from * 5 + block * 3 + index) as u64) % 13
    }

    /// Element `index` of what a rank gets in its block number `block`.
    fn result(&self, me: usize, block: usize, index: usize) -> u64 {
        let sum = || (0..self.counts.len()).map(|from| self.value(from, me, index)).sum::<u64>();
        match self.collective {
            Collective::ReduceScatter if self.factor.is_some() => 2 * sum(),
            Collective::ReduceScatter => sum(),
            Collective::Scatter => self.value(self.root, me, index),
            Collective::AllToAll => self.value(block, me, index),
            _ => self.value(block, 0, index),
        }
    }

    fn put(&self, memory: &mut [u8], extents: &[Extent], start: usize, value: impl Fn(usize, usize) -> u64) {
        let size = self.dtype.size();
        for (block, extent) in extents.iter().enumerate() {
            for index in 0..extent.count {
                let at = start + (extent.at + index) * size;
                let element = reference::encode(self.dtype, value(block, index) as f64);
                memory[at..at + size].copy_from_slice(&element[..size]);
            }
        }
    }

    /// Makes the call and checks all memory.
    pub fn run(&self, member: &Member) {
        let (me, nranks, size) = (member.rank, self.counts.len(), self.dtype.size());
        let mut own = Random::new(self.seed * 31 + me as u64);
        let [sent, received] = self.blocks(me).map(|counts| self.extents(&counts, &mut own));
        let end = |extents: &[Extent]| extents.iter().map(|extent| extent.at + extent.count).max().unwrap_or(0) * size;
        // The factor, what is sent, and the result, each at a multiple of an element.
        let (factor, send) = (0, 8 + size * own.below(4) as usize);
        let recv = send + end(&sent) + size * own.below(4) as usize;
        let is_wide = |extents: &[Extent]| extents.len() == nranks && nranks > 1;
        let (send, recv) = match (self.in_place, is_wide(&sent), is_wide(&received)) {
            (true, true, false) if !received.is_empty() => (send, send + sent[me].at * size),
            (true, false, true) if !sent.is_empty() => (recv + received[me].at * size, recv),
            _ => (send, recv),
        };
        let bytes = (send + end(&sent)).max(recv + end(&received)) + 16;
        let mut memory = vec![GAP; bytes];
        memory[..8].copy_from_slice(&reference::encode(self.dtype, 2.0));
        self.put(&mut memory, &sent, send, |block, index| self.value(me, block, index));
        let mut expected = memory.clone();
        self.put(&mut expected, &received, recv, |block, index| self.result(me, block, index));
        let all = host_region(&mut memory).as_device();
        let part = |at: usize, bytes: usize| if bytes > 0 { all.part(at, bytes) } else { DeviceRegion::EMPTY };
        let row = match self.collective {
            Collective::AllGather => received.iter().map(|extent| extent.count).collect(),
            Collective::ReduceScatter => sent.iter().map(|extent| extent.count).collect(),
            _ => Vec::new(),
        };
        let (input, output) = (part(send, end(&sent)), part(recv, end(&received)));
        let blocks = BlockTable::new(sent, received, row);
        let mut reduction = self.collective.reduces().then(|| Reduction::new(RedOp::Sum, self.dtype, nranks));
        let is_read = self.factor == Some(true);
        if let (Some(_), Some(reduction)) = (self.factor, &mut reduction) {
            let scalar = reference::encode(self.dtype, if is_read { 3.0 } else { 2.0 });
            reduction.prologue = Prologue::Scalar(scalar);
        }
        let call = CollectiveCall {
            root: Rank::from_index(self.root),
            reduction,
            factor_at: is_read.then(|| all.part(factor, size)),
            count: blocks.longest(),
            blocks: Some(Arc::new(blocks)),
            ..CollectiveCall::new(self.collective, [input, output], 0, self.dtype)
        };
        member.collective(call).unwrap_or_else(|error| panic!("rank {me}: {self:?}: {error}"));
        // What is in its own place may have been scaled there.
        let wrong = memory.iter().zip(&expected).position(|(is, wanted)| is != wanted);
        assert_eq!(wrong, None, "rank {me} of {nranks}: byte {wrong:?} from send {send} recv {recv}: {self:?}");
    }
}
