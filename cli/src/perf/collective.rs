//! What is measured: counts, in-place places, calls and bandwidth factors of each collective, as in nccl-tests.
#![forbid(unsafe_code)]

use crate::nccl::{Buffers, Call, Comm};
use std::str::FromStr;
use strata::dtype::DataType;
use strata::error::Result;
use strata::memory::Region;

/// A collective that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    AllToAll,
    Gather,
    Scatter,
    SendRecv,
}

/// All of them, by the names of nccl-tests.
pub const KINDS: [(&str, Kind); 9] = [
    ("all_reduce", Kind::AllReduce),
    ("all_gather", Kind::AllGather),
    ("reduce_scatter", Kind::ReduceScatter),
    ("broadcast", Kind::Broadcast),
    ("reduce", Kind::Reduce),
    ("alltoall", Kind::AllToAll),
    ("gather", Kind::Gather),
    ("scatter", Kind::Scatter),
    ("sendrecv", Kind::SendRecv),
];

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Kind, String> {
        let plain = |text: &str| text.replace(['_', '-'], "").to_ascii_lowercase();
        let wanted = plain(text.trim_end_matches("_perf"));
        let names = || KINDS.map(|(name, _)| name).join(", ");
        KINDS
            .iter()
            .find_map(|(name, kind)| (plain(name) == wanted).then_some(*kind))
            .ok_or_else(|| format!("not one of {}", names()))
    }
}

/// Who takes part.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// How many ranks there are.
    pub nranks: usize,
    /// The root, where there is one.
    pub root: usize,
}

impl Kind {
    /// The name in nccl-tests.
    pub fn name(self) -> &'static str {
        KINDS.iter().find_map(|(name, kind)| (*kind == self).then_some(*name)).unwrap_or("")
    }

    /// Whether it combines data of several ranks.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce)
    }

    /// Whether one rank is special.
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    /// Whether NCCL defines an in-place form.
    pub fn has_in_place(self) -> bool {
        !matches!(self, Kind::AllToAll | Kind::SendRecv)
    }

    /// Whether the larger side has one block per rank, so that a size is split among the ranks.
    pub fn is_split(self) -> bool {
        matches!(self, Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll | Kind::Gather | Kind::Scatter)
    }

    /// The count given to the call for a total of `bytes`. Blocks of a split total are multiples of 16 bytes.
    pub fn count(self, bytes: usize, elem_bytes: usize, nranks: usize) -> usize {
        let elems = bytes / elem_bytes;
        match self.is_split() {
            true => elems / nranks / (16 / elem_bytes) * (16 / elem_bytes),
            false => elems,
        }
    }

    /// The size that is printed, and that bandwidths refer to.
    pub fn total_bytes(self, count: usize, elem_bytes: usize, nranks: usize) -> usize {
        count * elem_bytes * if self.is_split() { nranks } else { 1 }
    }

    /// Blocks of `count` elements in a rank's send and receive buffers.
    pub fn blocks(self, place: Place) -> (usize, usize) {
        let Place { rank, nranks, root } = place;
        let on_root = usize::from(rank == root);
        match self {
            Kind::AllReduce | Kind::SendRecv => (1, 1),
            Kind::Broadcast => (on_root, 1),
            Kind::Reduce => (1, on_root),
            Kind::AllGather => (1, nranks),
            Kind::ReduceScatter => (nranks, 1),
            Kind::AllToAll => (nranks, nranks),
            Kind::Gather => (1, nranks * on_root),
            Kind::Scatter => (nranks * on_root, 1),
        }
    }

    /// Bus bandwidth over algorithm bandwidth: nccl-tests' factors, which make the figure comparable with the speed of
    /// the links whatever the number of ranks.
    pub fn bus_factor(self, nranks: usize) -> f64 {
        let n = nranks as f64;
        match self {
            Kind::AllReduce => 2.0 * (n - 1.0) / n,
            Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll | Kind::Gather | Kind::Scatter => (n - 1.0) / n,
            Kind::Broadcast | Kind::Reduce | Kind::SendRecv => 1.0,
        }
    }

    /// The send and receive regions of an in-place call within `whole`, which has room for the larger side.
    pub fn in_place(self, whole: Region, block: usize, place: Place) -> (Region, Region) {
        let own = || whole.part(place.rank * block, block);
        match self {
            Kind::AllGather => (own(), whole),
            Kind::ReduceScatter => (whole, own()),
            Kind::Gather if place.rank == place.root => (own(), whole),
            Kind::Scatter if place.rank == place.root => (whole, own()),
            _ => (whole, whole),
        }
    }

    /// Issues the call, or the two calls of a ring shift.
    pub fn issue(self, comm: &Comm, buffers: &Buffers, op: i32, place: Place) -> Result<()> {
        let Place { rank, nranks, root } = place;
        let block = buffers.count * buffers.dtype.size();
        let (send_blocks, recv_blocks) = self.blocks(place);
        let call = match self {
            Kind::SendRecv => {
                comm.issue(Call::Send { to: (rank + 1) % nranks }, buffers, block, 0)?;
                return comm.issue(Call::Recv { from: (rank + nranks - 1) % nranks }, buffers, 0, block);
            }
            Kind::AllReduce => Call::AllReduce { op },
            Kind::ReduceScatter => Call::ReduceScatter { op },
            Kind::AllGather => Call::AllGather,
            Kind::Broadcast => Call::Broadcast { root },
            Kind::Reduce => Call::Reduce { op, root },
            Kind::AllToAll => Call::AllToAll,
            Kind::Gather => Call::Gather { root },
            Kind::Scatter => Call::Scatter { root },
        };
        comm.issue(call, buffers, send_blocks * block, recv_blocks * block)
    }
}

/// A reduction by nccl-tests' name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// No reduction.
    None,
    /// One of NCCL's own.
    Builtin(strata::dtype::RedOp),
    /// A PreMulSum with the factor 2.
    MulSum,
}

impl Reduce {
    /// NCCL's that reduce, in nccl-tests' order.
    pub fn all() -> Vec<Reduce> {
        strata::dtype::RedOp::ALL.into_iter().map(Reduce::Builtin).chain([Reduce::MulSum]).collect()
    }

    /// The name in nccl-tests.
    pub fn name(self) -> &'static str {
        match self {
            Reduce::None => "none",
            Reduce::Builtin(op) => op.name(),
            Reduce::MulSum => "mulsum",
        }
    }
}

/// The reductions named by `-o`; `all` are NCCL's, which every library has.
pub fn parse_reduce(text: &str) -> std::result::Result<Vec<Reduce>, String> {
    let all = Reduce::all();
    if text == "all" {
        return Ok(all);
    }
    let bits = strata::dtype::RedOp::BITS.into_iter().map(Reduce::Builtin);
    let known: Vec<Reduce> = all.into_iter().chain(bits).collect();
    let names = || known.iter().map(|reduce| reduce.name()).collect::<Vec<_>>().join(", ");
    let found: Vec<Reduce> = known.iter().copied().filter(|reduce| reduce.name() == text).collect();
    if found.is_empty() {
        Err(format!("not one of {}, all", names()))
    } else {
        Ok(found)
    }
}

/// The types named by `-d`; `all` are NCCL's, which every library has.
pub fn parse_dtype(text: &str) -> std::result::Result<Vec<DataType>, String> {
    if text == "all" {
        return Ok(DataType::ALL.to_vec());
    }
    let names = || DataType::HOST.map(DataType::name).join(", ");
    let found: Vec<DataType> = DataType::HOST.into_iter().filter(|dtype| dtype.name() == text).collect();
    if found.is_empty() {
        Err(format!("not one of {}, all", names()))
    } else {
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_factors_are_those_of_nccl_tests() {
        assert_eq!(Kind::AllReduce.count(64, 4, 8), 16);
        assert_eq!(Kind::AllGather.count(1 << 20, 4, 8), 32768);
        assert_eq!(Kind::AllGather.count(100, 4, 3), 8, "blocks are multiples of 16 bytes");
        assert_eq!(Kind::AllGather.total_bytes(8, 4, 3), 96);
        assert_eq!(Kind::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Kind::AllToAll.bus_factor(4), 0.75);
        assert_eq!(Kind::Reduce.bus_factor(4), 1.0);
    }

    #[test]
    fn every_collective_is_found_by_its_name_however_it_is_spelt() {
        for (name, kind) in KINDS {
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(format!("{name}_perf").replace('_', "-").replace("-perf", "_perf").parse(), Ok(kind));
        }
        assert_eq!("AllGather".parse(), Ok(Kind::AllGather));
        assert!("all_scatter".parse::<Kind>().is_err());
    }
}
