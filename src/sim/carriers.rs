//! Carriers of a machine: libraries that each do whole collectives, with laws of their own, and the mix that takes the best of
//! them for each call.
//!
//! A law counts the steps of a call between nodes and inside them, and the bytes that cross the boundary of a node:
//!
//! ```text
//! call + steps between nodes * hop + steps inside * inside_hop + bytes / rate
//! ```
//!
//! | steps | between nodes, of `n` nodes | inside, of `p` ranks and `m` a node |
//! |---|---|---|
//! | `ring` | `n - 1` | `p - n` |
//! | `log` | `log2 n` | `log2 m` |
//! | `direct` | `p - m` | `m - 1` |
//!
//! The bytes of an all-to-all are those of the links that have most of them. An all-reduce has the steps and the bytes twice. A ring's steps are counted as NCCL's tuning source counts them. Of a collective a carrier may
//! have several laws (protocols, algorithms), of which the quickest counts, as it does in a library that chooses by its own model.
#![forbid(unsafe_code)]

use super::machine::{Cluster, Sourced};
use super::skew::{BusiestLinks, Skew};
use crate::error::{Error, Result};
use crate::plan::Collective;
use crate::topo::Grid;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The steps that a law counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LawSteps {
    /// Around a ring of all ranks, node after node.
    Ring,
    /// Doubling, first inside the nodes and then between them.
    Log,
    /// A message to each other rank, one after another.
    Direct,
}

/// What a collective takes by one algorithm or protocol of a library.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CarrierLaw {
    /// Which steps it takes.
    pub steps: LawSteps,
    /// Every call, whatever its size.
    #[serde(default = "Sourced::zero")]
    pub call_us: Sourced,
    /// A step to another node.
    pub hop_us: Sourced,
    /// A step inside a node.
    pub inside_hop_us: Sourced,
    /// Rate at which a whole node sends to others; a group with some of its ranks has their share.
    pub gbps: Sourced,
    /// Rate at which a rank takes in bytes of its node.
    pub inside_gbps: Sourced,
}

/// Laws by the name of what they describe.
type Named = BTreeMap<String, CarrierLaw>;

/// The laws of a library that does whole collectives. It does not do those without a law.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CarrierLaws {
    /// All-gather.
    pub all_gather: Named,
    /// Reduce-scatter.
    pub reduce_scatter: Named,
    /// All-reduce.
    pub all_reduce: Named,
    /// All-to-all.
    pub all_to_all: Named,
    /// Broadcast.
    pub broadcast: Named,
}

/// A machine has no more carriers than this: mixes of them are tried one after another.
pub const MOST_CARRIERS: usize = 6;

/// The collectives that carriers may have laws for.
pub const CARRIED: [Collective; 5] = [
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllReduce,
    Collective::AllToAll,
    Collective::Broadcast,
];

impl CarrierLaw {
    /// The time of a call, in ns. `bytes`: the larger of a rank's two buffers. `node_ranks`: how many ranks share the rate between
    /// nodes. `skew`: of an all-to-all whose blocks differ in size.
    fn ns(&self, collective: Collective, grid: &Grid, bytes: usize, node_ranks: usize, skew: Option<Skew>) -> f64 {
        let (nranks, nodes, members) = (grid.nranks() as f64, grid.nnodes() as f64, grid.nrails() as f64);
        let (between, inside) = match self.steps {
            LawSteps::Ring => (nodes - 1.0, nranks - nodes),
            LawSteps::Log => (nodes.log2().ceil(), members.log2().ceil()),
            LawSteps::Direct => (nranks - members, members - 1.0),
        };
        let twice = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
        let hops = twice * (between * self.hop_us.value + inside * self.inside_hop_us.value);
        let bytes = bytes as f64;
        let others = (nranks - 1.0) / nranks;
        let share = (members / node_ranks.max(1) as f64).min(1.0);
        let wire = match (collective, grid.nnodes()) {
            (Collective::Broadcast, 1) => bytes / self.inside_gbps.value,
            (Collective::Broadcast, _) => bytes / (self.gbps.value * share),
            // What each rank has for its own node and for others goes over links of its own.
            (Collective::AllToAll, _) => {
                let busiest = BusiestLinks::of(grid, skew);
                let away = bytes * busiest.node / (self.gbps.value * share);
                away.max(bytes * busiest.inside / self.inside_gbps.value)
            }
            (_, 1) => twice * bytes * others / self.inside_gbps.value,
            _ => twice * bytes * others / (self.gbps.value * share),
        };
        (self.call_us.value + hops) * 1e3 + wire
    }
}

impl CarrierLaws {
    /// The laws for a collective, by name; none where it has none.
    pub fn of(&self, collective: Collective) -> Option<&BTreeMap<String, CarrierLaw>> {
        let laws = match collective {
            Collective::AllGather => &self.all_gather,
            Collective::ReduceScatter => &self.reduce_scatter,
            Collective::AllReduce => &self.all_reduce,
            Collective::AllToAll => &self.all_to_all,
            Collective::Broadcast => &self.broadcast,
            _ => return None,
        };
        Some(laws).filter(|laws| !laws.is_empty())
    }
}

impl Cluster {
    /// The machine with only these of its carriers; with all of them where none is named.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that it does not have, with those that it has.
    pub fn with_carriers(mut self, names: &[String]) -> Result<Cluster> {
        for name in names {
            self.carrier(name)?;
        }
        self.carriers.retain(|name, _| names.is_empty() || names.contains(name));
        Ok(self)
    }

    fn carrier(&self, name: &str) -> Result<&CarrierLaws> {
        self.carriers.get(name).ok_or_else(|| {
            let known = self.carriers.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { String::from("none") } else { known };
            Error::InvalidArgument(format!("machine {} has no carrier {name}; its carriers: {known}", self.name))
        })
    }

    /// What a collective takes by the carrier of this name, in ns; none where it does not do it. `bytes` as for
    /// [`price`](super::price::price), of an all-to-all all that a rank sends.
    ///
    /// Laws speak of blocks of one size. Of skewed blocks an all-to-all is taken to be a group of sends and receives, with the bytes of
    /// its busiest links; an all-gather or a reduce-scatter the quicker of the call whose blocks are all as long as the longest, and a
    /// broadcast of each block, one after another. A reduction to a rank is taken to cost what a broadcast from it does.
    ///
    /// # Errors
    /// `InvalidArgument` where the machine has no such carrier, with those that it has.
    pub fn carrier_ns(
        &self,
        name: &str,
        collective: Collective,
        grid: &Grid,
        bytes: usize,
        skew: Option<Skew>,
    ) -> Result<Option<f64>> {
        let laws = self.carrier(name)?;
        let quickest = |collective: Collective, bytes: usize| {
            let of = |law: &CarrierLaw| law.ns(collective, grid, bytes, self.ranks_per_node(), skew);
            laws.of(collective).and_then(|laws| laws.values().map(of).min_by(f64::total_cmp))
        };
        Ok(match (collective, skew) {
            (Collective::AllGather | Collective::ReduceScatter, Some(skew)) => {
                let padded = quickest(collective, skew.padded_bytes(grid.nranks(), bytes));
                let blocks = skew.shares(grid.nranks()).into_iter().filter(|&share| share > 0.0);
                let broadcast = |share: f64| quickest(Collective::Broadcast, (share * bytes as f64).ceil() as usize);
                padded.map(|padded| blocks.map(broadcast).sum::<Option<f64>>().map_or(padded, |each| each.min(padded)))
            }
            _ => quickest(collective, bytes),
        })
    }

    /// The carrier that is the quickest for a call, with its time in ns: what a tuning table over all of them says. None where no
    /// carrier does it.
    pub fn mix_ns(&self, collective: Collective, grid: &Grid, bytes: usize, skew: Option<Skew>) -> Option<(&str, f64)> {
        let all = self.carriers.keys().filter_map(|name| {
            let ns = self.carrier_ns(name, collective, grid, bytes, skew).ok()??;
            Some((name.as_str(), ns))
        });
        all.min_by(|one, other| one.1.total_cmp(&other.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::price::grid_of;

    fn machines() -> Vec<Cluster> {
        let all = Cluster::names().map(|name| Cluster::find(name).unwrap());
        let with: Vec<Cluster> = all.filter(|machine| !machine.carriers.is_empty()).collect();
        assert_eq!(with.iter().map(|machine| machine.name.as_str()).collect::<Vec<_>>(), ["lassen", "thetagpu"]);
        with
    }

    /// A law of round numbers: steps of 2 us between nodes and 1 inside, a node's 8 GB/s and a rank's 4.
    fn law(steps: LawSteps) -> CarrierLaw {
        let number = |value: f64| Sourced { value, source: String::from("made for a test"), fitted: false };
        let (call_us, hop_us, inside_hop_us) = (number(10.0), number(2.0), number(1.0));
        CarrierLaw { steps, call_us, hop_us, inside_hop_us, gbps: number(8.0), inside_gbps: number(4.0) }
    }

    #[test]
    fn a_law_counts_its_steps_and_the_bytes_that_leave_a_node() {
        // 4 nodes of 4 ranks; 16 MB, which take 2 ms at 8 GB/s.
        let (grid, bytes) = (Grid::blocks(&[4; 4]), 16_000_000);
        let us = |steps, collective| law(steps).ns(collective, &grid, bytes, 4, None) / 1e3;
        let ring = 3.0 * 2.0 + 12.0;
        assert_eq!(us(LawSteps::Ring, Collective::AllGather), 10.0 + ring + 2000.0 * 15.0 / 16.0);
        assert_eq!(us(LawSteps::Ring, Collective::AllReduce), 10.0 + 2.0 * ring + 2.0 * 2000.0 * 15.0 / 16.0);
        assert_eq!(us(LawSteps::Log, Collective::Broadcast), 10.0 + 2.0 * 2.0 + 2.0 + 2000.0);
        // Four ranks send three quarters of what they have to other nodes: 12 MB each, 48 MB out of a node.
        assert_eq!(us(LawSteps::Direct, Collective::AllToAll), 10.0 + 12.0 * 2.0 + 3.0 + 6000.0);
        // A quarter of the ranks of each node has a quarter of its rate, and no steps inside.
        let thin = Grid::blocks(&[1; 4]);
        let one = law(LawSteps::Ring).ns(Collective::AllGather, &thin, bytes, 4, None) / 1e3;
        assert_eq!(one, 10.0 + 3.0 * 2.0 + 4.0 * 2000.0 * 3.0 / 4.0);
        // On one node nothing leaves it.
        let node = Grid::blocks(&[4]);
        let one = |collective| law(LawSteps::Direct).ns(collective, &node, bytes, 4, None) / 1e3;
        assert_eq!(one(Collective::AllToAll), 10.0 + 3.0 + 4000.0 * 3.0 / 4.0);
        assert_eq!(one(Collective::Broadcast), 10.0 + 3.0 + 4000.0);
    }

    #[test]
    fn skewed_blocks_take_what_the_busiest_node_has_or_what_padding_or_broadcasts_of_them_take() {
        let with_laws = |broadcast: bool| {
            let mut machine = Cluster::find("lassen").unwrap();
            let named = |steps| BTreeMap::from([(String::from("test"), law(steps))]);
            let (ring, direct) = (named(LawSteps::Ring), named(LawSteps::Direct));
            let mut laws = CarrierLaws { all_gather: ring, all_to_all: direct, ..CarrierLaws::default() };
            if broadcast {
                laws.broadcast = named(LawSteps::Log);
            }
            machine.carriers = BTreeMap::from([(String::from("round"), laws)]);
            machine
        };
        let (grid, bytes) = (Grid::blocks(&[4; 4]), 16_000_000);
        let us = |machine: &Cluster, collective, skew| {
            machine.carrier_ns("round", collective, &grid, bytes, skew).unwrap().map(|ns| (ns / 1e3).round())
        };
        let (alone, machine) = (with_laws(false), with_laws(true));
        assert_eq!(us(&machine, Collective::AllToAll, None), Some(10.0 + 24.0 + 3.0 + 6000.0));
        // Twelve ranks send nine tenths and three of the fifteen other shares to the hot rank's node.
        let hot: f64 = 12.0 * (0.9 + 0.1 * 3.0 / 15.0);
        assert_eq!(us(&machine, Collective::AllToAll, Some(Skew::One)), Some((37.0 + hot * 2000.0).round()));
        assert_eq!(us(&machine, Collective::AllToAll, Some(Skew::Zeros)), us(&machine, Collective::AllToAll, None));
        // All blocks as long as the longest: 14.4 times the bytes. Sixteen broadcasts send each byte once.
        let padded: f64 = 10.0 + 18.0 + 0.9 * 16.0 * 2000.0 * 15.0 / 16.0;
        assert_eq!(us(&alone, Collective::AllGather, Some(Skew::One)), Some(padded.round()));
        assert_eq!(us(&machine, Collective::AllGather, Some(Skew::One)), Some(16.0 * (10.0 + 4.0 + 2.0) + 2000.0));
        assert_eq!(us(&machine, Collective::ReduceScatter, Some(Skew::One)), None, "it has no law of that collective");
    }

    #[test]
    fn more_bytes_or_more_nodes_never_take_less_time_and_a_mix_never_more_than_a_carrier() {
        for machine in machines() {
            let sizes: Vec<usize> = (2..32).map(|power| 1usize << power).collect();
            for collective in CARRIED {
                let ns = |name: &str, nodes: usize, bytes: usize| {
                    let grid = grid_of(&machine, nodes * machine.ranks_per_node());
                    let ns = machine.carrier_ns(name, collective, &grid, bytes, None).unwrap();
                    let (mix, of_mix) =
                        machine.mix_ns(collective, &grid, bytes, None).expect("a carrier for each collective");
                    assert!(machine.carriers.contains_key(mix) && ns.is_none_or(|ns| of_mix <= ns), "{name}");
                    ns
                };
                for name in machine.carriers.keys() {
                    for pair in sizes.windows(2) {
                        let (less, more) = (ns(name, 4, pair[0]), ns(name, 4, pair[1]));
                        assert!(less <= more, "{name}, {}: {less:?} {more:?}", collective.name());
                    }
                    for nodes in [2, 3, 8, 64] {
                        let (less, more) = (ns(name, nodes, 1 << 20), ns(name, 2 * nodes, 1 << 20));
                        assert!(less <= more, "{name}, {}: {less:?} {more:?}", collective.name());
                    }
                }
            }
        }
    }

    #[test]
    fn a_carrier_that_is_not_there_and_a_collective_that_it_does_not_do_are_told_apart() {
        let machine = Cluster::find("thetagpu").unwrap();
        let grid = grid_of(&machine, 16);
        assert_eq!(machine.carrier_ns("sccl", Collective::AllToAll, &grid, 1 << 20, None).unwrap(), None);
        assert_eq!(machine.mix_ns(Collective::Gather, &grid, 1 << 20, None), None);
        let error = machine.carrier_ns("ncl", Collective::AllReduce, &grid, 1 << 20, None).unwrap_err();
        assert_eq!(error.text(), "machine thetagpu has no carrier ncl; its carriers: mvapich2-gdr, nccl, sccl");
        let two = machine.clone().with_carriers(&["nccl".into(), "sccl".into()]).unwrap();
        assert_eq!(two.carriers.keys().collect::<Vec<_>>(), ["nccl", "sccl"]);
        assert_eq!(machine.clone().with_carriers(&[]).unwrap(), machine);
        assert!(machine.with_carriers(&["mpi".into()]).is_err());
        let error = Cluster::find("frontier").unwrap().with_carriers(&["nccl".into()]).unwrap_err();
        assert_eq!(error.text(), "machine frontier has no carrier nccl; its carriers: none");
    }

    #[test]
    fn a_malformed_law_is_refused_with_its_place() {
        let good = Cluster::text("lassen").unwrap();
        for (from, to, said) in [
            ("steps = \"ring\"", "steps = \"rings\"", "rings"),
            ("hop_us = { value = 14.0", "hop_us = { value = -1.0", "carriers.nccl."),
            ("[carriers.nccl.all_reduce.ll]", "[carriers.nccl.allreduce.ll]", "allreduce"),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Cluster::parse(&good.replace(from, to), "mine.toml").unwrap_err();
            assert!(error.text().contains("mine.toml") && error.text().contains(said), "{to}: {error}");
        }
        let more: String = (0..5).map(|number| format!("[carriers.c{number}]\n")).collect();
        let error = Cluster::parse(&(good + &more), "mine.toml").unwrap_err();
        assert_eq!(error.text(), "machine mine.toml: 7 carriers; 6 are the most");
    }
}
