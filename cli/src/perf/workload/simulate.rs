//! Prices of a workload's calls on a simulated machine, for each way in which they may be carried out.
//!
//! All groups along the same dimensions call at the same time, so each has its share of a node's NICs, and of the rate
//! that the vendor's law gives to a whole node: with `m` of a node's `r` ranks in a group, `m/r` of it. What a group
//! inside one node costs does not depend on its neighbours. All-gather, reduce-scatter and all-reduce are priced by
//! `strata::sim::price`.
//!
//! On a machine with carriers these are compared: each by itself, the best of them for each collective, the best for each
//! collective and size, and Strata by its own plans, all-to-all and broadcast among them. On any other machine the vendor's library,
//! PCCL and Strata are; there all-to-all and broadcast are the vendor's on every route, and take what their bytes take on the
//! links when nothing else is on them.
//!
//! On a machine of unequal nodes the best of Strata's plans with even shares is compared with the best with shares by links. All its
//! nodes are in a group then.
//!
//! Blocks of different sizes no library of the machines has a call for. An all-to-all of them is a group of sends and receives, as
//! PyTorch and Strata issue it: it takes what its busiest links do. An all-gather or a reduce-scatter is called with blocks that are all as
//! long as the longest, as FSDP pads its shards; where a carrier has a law of broadcasts, a broadcast of each block, as PyTorch and
//! Strata issue it, where that is quicker. Strata's own route is a plan for such blocks, where it has one for the even call.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::groups::Group;
use super::program::Program;
use super::ways::CallBy;
use crate::simulate::route;
use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::carrier::Carrier;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::selection::cost::candidates;
use strata::selection::synthesis;
use strata::sim::price::{price, Detail, How, Price, PricedPlan};
use strata::sim::skew::{BusiestLinks, Skew};
use strata::sim::Cluster;
use strata::topo::Grid;

/// What is to be known of Strata's column.
pub const NOT_MEASURED: &str =
    "Strata's own ways need STRATA_INTER=mpi or tcp and STRATA_MACHINE over a vendor's library; nothing of it was measured there";
/// What is to be known of columns on machines of unequal nodes.
pub const ON_UNEQUAL: &str = "even and synthesized: the quickest of Strata's plans with equal shares for all nodes, and with shares by their NICs";
/// What is said of kinds that have no price by the way.
pub const BY_LINKS: &str = "alltoall and broadcast are the vendor's on every route, at the rates of idle links";

/// What is said of calls whose blocks differ in size.
pub const OF_SKEWED: &str =
    "blocks of different sizes: a library sends an all-to-all's block by block, and pads others or broadcasts each, \
whichever is quicker where it is known; Strata runs plans for them";

/// More ranks than a simulation is meant for.
pub const MOST_RANKS: usize = 8192;

/// What a call is, whoever carries it out.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// The collective.
    pub kind: Kind,
    /// Bytes of the larger buffer.
    pub bytes: usize,
    /// How its blocks differ in size.
    pub skew: Option<Skew>,
}

/// The price of a call in the group that it takes the longest in; none where nobody does it so.
pub fn price_in(
    program: &Program,
    group: &Group,
    machine: &Cluster,
    by: &CallBy,
    asked: &Asked,
) -> Result<Option<Price>> {
    if machine.has_unequal_nodes() && group.size != program.layout.world() {
        let (group, machine) = (&group.name, &machine.name);
        let text = format!("{machine} has unequal nodes, on which only groups of all ranks are priced, not {group}");
        return Err(Error::InvalidArgument(text));
    }
    let mut longest = Price::by_law(0.0);
    for labels in program.layout.shapes(group, machine.ranks_per_node()) {
        match Here::new(machine, &labels).by(by, asked)? {
            Some(price) if price.ns > longest.ns => longest = price,
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Ok(Some(longest))
}

/// The collective of a kind of call.
fn collective_of(kind: Kind) -> Option<Collective> {
    Some(match kind {
        Kind::AllGather => Collective::AllGather,
        Kind::ReduceScatter => Collective::ReduceScatter,
        Kind::AllReduce => Collective::AllReduce,
        Kind::AllToAll => Collective::AllToAll,
        Kind::Broadcast => Collective::Broadcast,
        _ => return None,
    })
}

/// A group on its nodes, with its share of them.
struct Here {
    machine: Arc<Cluster>,
    grid: Arc<Grid>,
}

impl Here {
    /// `labels`: the node of each rank.
    fn new(machine: &Cluster, labels: &[usize]) -> Here {
        let grid = machine.on_links(Grid::from_labels(labels));
        let mut machine = machine.clone();
        if grid.nnodes() > 1 {
            let (members, ranks) = (grid.nrails() as f64, machine.node.ranks.value);
            let nics = machine.node.nics.value;
            // A node's ranks use as many NICs as there are ranks, at most all.
            machine.scale_nics((members.max(nics) / ranks).min(1.0));
            if let Some(laws) = &mut machine.vendor {
                let laws = [Some(&mut laws.all_gather), Some(&mut laws.reduce_scatter), laws.all_reduce.as_mut()];
                laws.into_iter().flatten().for_each(|law| law.gbps.value *= members / ranks);
            }
            if let Some(law) = machine.vendor.as_mut().and_then(|laws| laws.all_reduce_tree.as_mut()) {
                law.gbps.value *= members / ranks;
            }
        }
        Here { machine: Arc::new(machine), grid: Arc::new(grid) }
    }

    /// The price of a call; none where `by` does not do it.
    fn by(&self, by: &CallBy, asked: &Asked) -> Result<Option<Price>> {
        let Asked { kind, bytes, skew } = *asked;
        let collective =
            collective_of(kind).ok_or_else(|| Error::Internal(format!("{} in a workload", kind.name())))?;
        let moves = matches!(collective, Collective::AllToAll | Collective::Broadcast);
        if matches!(by, CallBy::Even | CallBy::Synthesized) {
            return self.found(collective, by, asked).map(Some);
        }
        if moves && self.machine.carriers.is_empty() {
            return Ok(Some(Price::by_law(self.by_links(asked))));
        }
        let padded = match (skew, moves) {
            (Some(skew), false) => skew.padded_bytes(self.grid.nranks(), bytes),
            _ => bytes,
        };
        let vendor = || self.vendor(collective, padded);
        if let (CallBy::Strata, Some(skew)) = (by, skew) {
            return self.skewed(collective, bytes, skew, vendor()).map(Some);
        }
        let law = match by {
            CallBy::Vendor => vendor(),
            CallBy::Pccl => self.pccl(collective, padded).or_else(vendor),
            CallBy::Carrier(name) => self.machine.carrier_ns(name, collective, &self.grid, bytes, skew)?,
            CallBy::Quickest => self.mix(collective, bytes, skew),
            CallBy::Even | CallBy::Synthesized => None,
            CallBy::Strata if moves => return self.moved(collective, bytes),
            CallBy::Strata => return self.strata(collective, bytes, vendor().unwrap_or(f64::INFINITY)).map(Some),
        };
        Ok(law.filter(|ns| ns.is_finite()).map(Price::by_law))
    }

    /// What pricing all of Strata's algorithms finds, with even shares or with shares by links; of blocks of one size.
    fn found(&self, collective: Collective, by: &CallBy, asked: &Asked) -> Result<Price> {
        let Asked { bytes, skew, .. } = *asked;
        if skew.is_some() {
            let text = "blocks of different sizes are not priced on machines with unequal nodes (--skew even)";
            return Err(Error::InvalidArgument(text.to_string()));
        }
        let bytes = if collective == Collective::AllToAll { bytes.div_ceil(self.grid.nranks()) } else { bytes };
        let found = match by {
            CallBy::Even => synthesis::evenly(&self.machine, &self.grid, collective, bytes)?,
            _ => synthesis::synthesize(&self.machine, &self.grid, collective, bytes)?,
        };
        self.price(collective, bytes, &found.how())
    }

    /// An all-to-all or a broadcast by the quickest of Strata's algorithms; inside a node by the library that is quickest there, to
    /// which Strata leaves it.
    fn moved(&self, collective: Collective, bytes: usize) -> Result<Option<Price>> {
        if self.grid.nnodes() == 1 {
            return Ok(self.mix(collective, bytes, None).map(Price::by_law));
        }
        let block = if collective == Collective::AllToAll { bytes.div_ceil(self.grid.nranks()) } else { bytes };
        let mut best: Option<Price> = None;
        for choice in algorithms::choices(collective, &self.grid) {
            if algorithms::is_on_board(&choice) {
                continue;
            }
            let route = PricedPlan { choice, segment_bytes: usize::MAX, window: 1, carrier: Carrier::MPI };
            let price = self.price(collective, block, &How::Strata(route))?;
            if best.as_ref().is_none_or(|best| price.ns < best.ns) {
                best = Some(price);
            }
        }
        Ok(best)
    }

    /// Blocks of different sizes by Strata. Inside a node it leaves them to the library that is quickest there, and in front of the
    /// vendor's library, which takes `vendor`, where it leaves the even call to it.
    fn skewed(&self, collective: Collective, bytes: usize, skew: Skew, vendor: Option<f64>) -> Result<Price> {
        let law = match self.grid.nnodes() {
            1 => vendor.into_iter().chain(self.mix(collective, bytes, Some(skew))).min_by(f64::total_cmp),
            _ => {
                let even = self.vendor(collective, bytes).unwrap_or(f64::INFINITY);
                vendor.filter(|_| self.own(collective, bytes, even).is_none())
            }
        };
        if let Some(ns) = law {
            return Ok(Price::by_law(ns));
        }
        let message_bytes = if collective == Collective::AllToAll { bytes.div_ceil(self.grid.nranks()) } else { bytes };
        let how = route::skewed(&self.grid, collective, message_bytes, skew)?;
        let detail = Detail { skew: Some(skew), ..Detail::default() };
        price(&self.machine, &self.grid, collective, message_bytes, &how, detail)
    }

    fn mix(&self, collective: Collective, bytes: usize, skew: Option<Skew>) -> Option<f64> {
        self.machine.mix_ns(collective, &self.grid, bytes, skew).map(|(_, ns)| ns)
    }

    fn vendor(&self, collective: Collective, bytes: usize) -> Option<f64> {
        self.machine.vendor_ns(collective, &self.grid, bytes)
    }

    fn carriers(&self) -> Vec<Carrier> {
        let vendor = self.machine.network_vendor.iter().map(|_| Carrier::Vendor);
        [Carrier::MPI].into_iter().chain(vendor).collect()
    }

    fn price(&self, collective: Collective, bytes: usize, how: &How) -> Result<Price> {
        price(&self.machine, &self.grid, collective, bytes, how, Detail::default())
    }

    /// PCCL with the better of its algorithms between nodes; None where it has none for these ranks, as where a group has
    /// one rank of a node.
    fn pccl(&self, collective: Collective, bytes: usize) -> Option<f64> {
        let rails = ["ring", "rd"];
        let ways = self.carriers().into_iter().flat_map(|carrier| rails.map(|rail| How::Pccl { rail, carrier }));
        ways.filter_map(|how| self.price(collective, bytes, &how).ok()).map(|price| price.ns).min_by(f64::total_cmp)
    }

    /// What Strata would choose by its closed-form model, and what that takes in the simulation. `vendor`: what the
    /// vendor's library takes, infinite where there is none.
    fn strata(&self, collective: Collective, bytes: usize, vendor: f64) -> Result<Price> {
        match self.own(collective, bytes, vendor) {
            Some(how) => self.price(collective, bytes, &how),
            None if vendor.is_finite() => Ok(Price::by_law(vendor)),
            // A node without a library of the vendor's.
            None => {
                let choice = Choice::flat("direct");
                let route = PricedPlan { choice, segment_bytes: usize::MAX, window: 1, carrier: Carrier::MPI };
                self.price(collective, bytes, &How::Strata(route))
            }
        }
    }

    /// What Strata would choose by its closed-form model, if that promises less than the vendor's library takes.
    fn own(&self, collective: Collective, bytes: usize, vendor: f64) -> Option<How> {
        let all = candidates(&self.machine, &self.grid, collective, bytes).into_iter();
        let mut own = all.filter(|candidate| matches!(candidate.how, How::Strata(_)) && candidate.ns < vendor);
        own.next().map(|candidate| candidate.how)
    }

    /// All-to-all and broadcast: the time of the bytes out of the busiest node or inside it, whichever is longer.
    fn by_links(&self, asked: &Asked) -> f64 {
        let Asked { kind, bytes, skew } = *asked;
        let (machine, nranks, members) = (&self.machine, self.grid.nranks() as f64, self.grid.nrails() as f64);
        let network = machine.network_vendor.as_ref().unwrap_or(&machine.network);
        let nics = machine.node.nics.value.min(members);
        let (outside, inside) = (network.nic_gbps.value * nics / members, machine.inside.rank_gbps.value);
        let alone = self.grid.nnodes() == 1;
        let latency = if alone { machine.inside.latency_us.value } else { network.latency_us.value } * 1e3;
        let bytes = bytes as f64;
        match kind {
            Kind::AllToAll => {
                let busiest = BusiestLinks::of(&self.grid, skew);
                latency + (bytes * busiest.node / (outside * members)).max(bytes * busiest.inside / inside)
            }
            _ => latency * nranks.log2().ceil() + bytes / if alone { inside } else { outside },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::{find, EMBEDDED};
    use super::super::program::Setting;
    use super::super::ways::{routes, WAYS};
    use super::*;

    fn here(name: &str, labels: &[usize]) -> Here {
        Here::new(&Cluster::find(name).unwrap(), labels)
    }

    #[test]
    fn a_group_has_its_share_of_its_nodes() {
        let whole = Cluster::find("frontier").unwrap();
        let (nic, ring) = (whole.network.nic_gbps.value, whole.vendor.as_ref().unwrap().all_gather.gbps.value);
        let share = |labels: &[usize]| {
            let machine = here("frontier", labels).machine;
            (machine.network.nic_gbps.value / nic, machine.vendor.as_ref().unwrap().all_gather.gbps.value / ring)
        };
        // Two GCDs to a NIC: one that has a NIC to itself in its group shares it with one of another group.
        assert_eq!(share(&[0, 1, 2, 3]), (0.5, 0.125));
        assert_eq!(share(&[0, 0, 1, 1]), (0.5, 0.25));
        assert_eq!(share(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]), (1.0, 1.0));
        assert_eq!(share(&[0, 0]), (1.0, 1.0), "inside a node there is nothing to share");
    }

    #[test]
    fn all_to_all_by_links_takes_what_its_messages_take_in_the_simulation() {
        let labels: Vec<usize> = (0..32).map(|rank| rank / 8).collect();
        let (here, block) = (here("frontier", &labels), 4 << 20);
        let route =
            PricedPlan { choice: Choice::flat("direct"), segment_bytes: block, window: 1, carrier: Carrier::MPI };
        let simulated = here.price(Collective::AllToAll, block, &How::Strata(route)).unwrap().ns;
        let law = here.by_links(&Asked { kind: Kind::AllToAll, bytes: 32 * block, skew: None });
        assert!((law / simulated - 1.0).abs() < 0.05, "{law} {simulated}");
    }

    #[test]
    fn skewed_blocks_by_links_take_what_their_messages_take_in_the_simulation() {
        let labels: Vec<usize> = (0..32).map(|rank| rank / 8).collect();
        let (here, bytes) = (here("frontier", &labels), 32 << 20);
        for (name, skew) in Skew::ALL {
            let law = here.by_links(&Asked { kind: Kind::AllToAll, bytes, skew: Some(skew) });
            let simulated = here.skewed(Collective::AllToAll, bytes, skew, None).unwrap().ns;
            // The law has the NICs of a node as one: at the worst all that comes in goes by a single one.
            let nics = here.machine.node.nics.value;
            assert!(law <= simulated * 1.01 && simulated <= law * nics * 1.05, "{name}: {law} {simulated}");
        }
    }

    #[test]
    fn skewed_blocks_cost_a_library_as_much_as_even_ones_or_more() {
        for name in ["frontier", "lassen"] {
            let machine = Cluster::find(name).unwrap();
            let labels: Vec<usize> =
                (0..8 * machine.ranks_per_node()).map(|rank| rank / machine.ranks_per_node()).collect();
            let here = Here::new(&machine, &labels);
            let others = match machine.carriers.is_empty() {
                true => vec![CallBy::Vendor, CallBy::Pccl],
                false => machine.carriers.keys().cloned().map(CallBy::Carrier).chain([CallBy::Quickest]).collect(),
            };
            for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll] {
                let bytes = 64 << 20;
                let ns = |by: &CallBy, skew| here.by(by, &Asked { kind, bytes, skew }).unwrap().map(|price| price.ns);
                for (skew_name, skew) in Skew::ALL {
                    for by in &others {
                        let Some(even) = ns(by, None) else { continue };
                        let skewed = ns(by, Some(skew)).unwrap();
                        let what = format!("{name} {} {skew_name} by {by:?}", kind.name());
                        assert!(skewed >= even, "{what}: {even} {skewed}");
                    }
                }
            }
        }
    }

    #[test]
    fn strata_s_choice_is_not_slower_than_the_vendor_and_faster_for_zero_3_at_scale() {
        let step = |name: &str, machine: &str, world: usize| {
            let setting = Setting { world, flops: 156e12, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
            let program = Program::new(&find(name).unwrap(), &setting).unwrap();
            let machine = Cluster::find(machine).unwrap();
            let routes = routes(&program, &machine, &[], &indicatif::ProgressBar::hidden()).unwrap().routes;
            assert_eq!(routes.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), WAYS);
            routes.into_iter().map(|(_, times)| times.step).collect::<Vec<f64>>()
        };
        for (name, _) in EMBEDDED {
            for machine in ["frontier", "perlmutter"] {
                let [vendor, _, strata] = step(name, machine, 64)[..] else { panic!("three routes") };
                assert!(strata <= vendor * (1.02), "{name} on {machine}: {strata} {vendor}");
            }
        }
        let steps = step("zero3", "frontier", 512);
        assert!(steps[0] > 1.2 * steps[2] && steps[1] > 1.1 * steps[2], "{steps:?}");
    }
}
