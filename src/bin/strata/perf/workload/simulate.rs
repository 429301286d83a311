//! Prices of a workload's calls on a simulated machine, for each way in which they may be carried out.
//!
//! All groups along the same dimensions call at the same time, so each has its share of a node's NICs, and of the rate
//! that the vendor's law gives to a whole node: with `m` of a node's `r` ranks in a group, `m/r` of it. What a group
//! inside one node costs does not depend on its neighbours. All-gather, reduce-scatter and all-reduce are priced by
//! `strata::sim::price`; all-to-all and broadcast are the vendor's on every route, and take what their bytes take on the
//! links.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::groups::Group;
use super::program::{Call, Program};
use super::timeline::{lay_out, Pricer, Times};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use strata::algo::{self, Choice};
use strata::error::{Error, Result};
use strata::plan::{Collective, Shape};
use strata::sim::price::{price, Carrier, Detail, How, Route};
use strata::sim::Machine;
use strata::topo::Grid;

/// The ways, in the order of the table.
const WAYS: [&str; 3] = ["vendor", "PCCL", "Strata"];

/// Lays the step out with each way's prices.
pub fn routes(program: &Program, machine: &Machine, bar: &indicatif::ProgressBar) -> Result<Vec<(String, Times)>> {
    let mut prices = Prices { machine, known: HashMap::new(), bar };
    let lay = |(way, name): (usize, &&str)| {
        let times = lay_out(program, &mut OneWay { prices: &mut prices, way })?;
        Ok((name.to_string(), times))
    };
    WAYS.iter().enumerate().map(lay).collect()
}

/// Prices by what is called, in the order of [`WAYS`].
struct Prices<'a> {
    machine: &'a Machine,
    known: HashMap<(usize, usize, usize), [f64; 3]>,
    bar: &'a indicatif::ProgressBar,
}

struct OneWay<'a, 'b> {
    prices: &'a mut Prices<'b>,
    way: usize,
}

impl Pricer for OneWay<'_, '_> {
    fn price(&mut self, program: &Program, call: &Call) -> Result<f64> {
        let bytes = program.bytes_of(call);
        let key = (call.kind as usize, call.group, bytes);
        if let Some(prices) = self.prices.known.get(&key) {
            return Ok(prices[self.way]);
        }
        let group = &program.groups[call.group];
        self.prices.bar.set_message(format!("{} of {bytes} bytes in {}", call.kind.name(), group.name));
        let prices = self.prices.of(program, group, call.kind, bytes)?;
        self.prices.known.insert(key, prices);
        Ok(prices[self.way])
    }
}

impl Prices<'_> {
    /// Microseconds of a call in the group that it takes the longest in.
    fn of(&self, program: &Program, group: &Group, kind: Kind, bytes: usize) -> Result<[f64; 3]> {
        let mut longest = [0.0f64; 3];
        for labels in program.layout.shapes(group, self.machine.ranks_per_node()) {
            let here = Here::new(self.machine, &labels);
            let prices = here.prices(kind, bytes)?;
            longest.iter_mut().zip(prices).for_each(|(longest, ns)| *longest = longest.max(ns / 1e3));
        }
        Ok(longest)
    }
}

/// A group on its nodes, with its share of them.
struct Here {
    machine: Arc<Machine>,
    grid: Arc<Grid>,
}

impl Here {
    /// `labels`: the node of each rank.
    fn new(machine: &Machine, labels: &[usize]) -> Here {
        let grid = Grid::from_labels(labels);
        let mut machine = machine.clone();
        if grid.nnodes() > 1 {
            let (members, ranks) = (grid.nrails() as f64, machine.node.ranks.value);
            let nics = machine.node.nics.value;
            for network in [Some(&mut machine.network), machine.network_vendor.as_mut()].into_iter().flatten() {
                // A node's ranks use as many NICs as there are ranks, at most all.
                network.nic_gbps.value *= (members.max(nics) / ranks).min(1.0);
            }
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

    /// ns, in the order of [`WAYS`].
    fn prices(&self, kind: Kind, bytes: usize) -> Result<[f64; 3]> {
        let collective = match kind {
            Kind::AllGather => Collective::AllGather,
            Kind::ReduceScatter => Collective::ReduceScatter,
            Kind::AllReduce => Collective::AllReduce,
            kind => return Ok([self.by_links(kind, bytes); 3]),
        };
        let vendor = self.vendor(collective, bytes)?;
        Ok([vendor, self.pccl(collective, bytes).unwrap_or(vendor), self.strata(collective, bytes)?.min(vendor)])
    }

    /// The vendor's library. A group of few ranks on several nodes has the law of several nodes.
    fn vendor(&self, collective: Collective, bytes: usize) -> Result<f64> {
        let (machine, nranks) = (&self.machine, self.grid.nranks());
        let laws = if self.grid.nnodes() == 1 { &machine.calls } else { &machine.vendor };
        let ns = match nranks > machine.ranks_per_node() {
            true => machine.vendor_ns(collective, nranks, bytes),
            false => laws.as_ref().and_then(|laws| laws.ns(collective, nranks, bytes)),
        };
        let missing = || {
            let (machine, collective) = (&machine.name, collective.name());
            Error::InvalidArgument(format!("machine {machine} knows no {collective} of the vendor's library"))
        };
        ns.ok_or_else(missing)
    }

    fn carriers(&self) -> Vec<Carrier> {
        let vendor = self.machine.network_vendor.iter().map(|_| Carrier::Vendor);
        [Carrier::Own].into_iter().chain(vendor).collect()
    }

    fn price(&self, collective: Collective, bytes: usize, how: &How) -> Result<f64> {
        price(&self.machine, &self.grid, collective, bytes, how, Detail::default()).map(|price| price.ns)
    }

    /// PCCL with the better of its algorithms between nodes; None where it has none for these ranks.
    fn pccl(&self, collective: Collective, bytes: usize) -> Option<f64> {
        let rails = ["ring", "rd"];
        let ways = self.carriers().into_iter().flat_map(|carrier| rails.map(|rail| How::Pccl { rail, carrier }));
        ways.filter_map(|how| self.price(collective, bytes, &how).ok()).min_by(f64::total_cmp)
    }

    /// The best of Strata's plans; infinite where a node holds all, whose calls are the vendor's.
    fn strata(&self, collective: Collective, bytes: usize) -> Result<f64> {
        if self.grid.nnodes() == 1 {
            return Ok(f64::INFINITY);
        }
        let levels = self.grid.nrails() > 1;
        let choice = |rail: &str| match levels {
            true => Choice::leveled("two_level", "direct", rail),
            false => Choice::flat(rail),
        };
        let block = strata::sim::price::block_bytes(collective, self.grid.nranks(), bytes);
        let shape = Shape::new(collective, self.grid.clone());
        let mut best = f64::INFINITY;
        for choice in ["log", "ring"].map(choice).into_iter().filter(|choice| algo::supports(choice, &shape)) {
            let segments: BTreeSet<usize> = [1, 4, 16].map(|parts| block.div_ceil(parts).max(1)).into();
            for segment_bytes in segments {
                for carrier in self.carriers() {
                    let route = Route { choice: choice.clone(), segment_bytes, window: 4, carrier };
                    best = best.min(self.price(collective, bytes, &How::Strata(route))?);
                }
            }
        }
        Ok(best)
    }

    /// All-to-all and broadcast: the time of a rank's bytes out of its node or inside it, whichever is longer.
    fn by_links(&self, kind: Kind, bytes: usize) -> f64 {
        let (machine, nranks, members) = (&self.machine, self.grid.nranks() as f64, self.grid.nrails() as f64);
        let network = machine.network_vendor.as_ref().unwrap_or(&machine.network);
        let nics = machine.node.nics.value.min(members);
        let (outside, inside) = (network.nic_gbps.value * nics / members, machine.inside.rank_gbps.value);
        let alone = self.grid.nnodes() == 1;
        let latency = if alone { machine.inside.latency_us.value } else { network.latency_us.value } * 1e3;
        let bytes = bytes as f64;
        match kind {
            Kind::AllToAll => {
                let away = bytes * (nranks - members) / nranks / outside;
                latency + away.max(bytes * (members - 1.0) / nranks / inside)
            }
            _ => latency * nranks.log2().ceil() + bytes / if alone { inside } else { outside },
        }
    }
}
