//! Machines as data: what a NIC, a GPU and a vendor's library of a cluster take, each number with its source.
//!
//! A machine is a TOML file; those of `machines/` are known by name. Times are in microseconds, rates in GB/s (10^9 bytes a
//! second), sizes in bytes. A number that was fitted to measured times, and not measured or specified by itself, says so,
//! and the terms that stand for somebody's software and not for a link can be switched off ([`Cluster::without`]).
#![forbid(unsafe_code)]

use super::carriers::{CarrierLaws, MOST_CARRIERS};
use super::nodes::{NodeKind, SlowNode};
use super::terms::{KernelLaunch, LaneRates, Protocols, RankOut};
use crate::error::{Error, Result};
use crate::plan::Collective;
use crate::topo::links::NodeLinks;
use crate::topo::Grid;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A number and where it is from.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sourced {
    /// The number, in the unit of its name.
    pub value: f64,
    /// A publication, a data sheet, a measurement.
    pub source: String,
    /// Whether it was chosen so that the model meets measured times.
    #[serde(default)]
    pub fitted: bool,
}

impl Sourced {
    /// A number for which there is no source: it says nothing.
    fn nothing(value: f64) -> Sourced {
        Sourced { value, source: String::from("default: the term is left out"), fitted: false }
    }

    pub(super) fn zero() -> Sourced {
        Sourced::nothing(0.0)
    }

    fn one() -> Sourced {
        Sourced::nothing(1.0)
    }
}

/// What a node holds.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// Ranks (GPUs, or GCDs) of a node.
    pub ranks: Sourced,
    /// NICs of a node; ranks are dealt out to them in blocks.
    pub nics: Sourced,
}

/// Messages between nodes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterNode {
    /// Rate of a NIC, each way.
    pub nic_gbps: Sourced,
    /// From the moment at which both sides have posted a message to its arrival, beside the time of its bytes.
    pub latency_us: Sourced,
    /// Time for which a message occupies its NIC beside its bytes.
    #[serde(default = "Sourced::zero")]
    pub gap_us: Sourced,
    /// Time of a rank's thread for each message that it posts or receives.
    #[serde(default = "Sourced::zero")]
    pub post_us: Sourced,
    /// Rate at which a processor carries bytes to or from the network; 0 where the NIC does it alone.
    #[serde(default = "Sourced::zero")]
    pub processor_gbps: Sourced,
    /// Messages of at most so many bytes leave before their receive is posted.
    #[serde(default = "Sourced::zero")]
    pub eager_bytes: Sourced,
}

/// Messages inside a node.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntraNode {
    /// From posting to arrival, beside the bytes.
    pub latency_us: Sourced,
    /// Rate at which a rank takes in bytes of the others of its node.
    pub rank_gbps: Sourced,
    /// Time for which a message occupies each link beside its bytes.
    #[serde(default = "Sourced::zero")]
    pub gap_us: Sourced,
    /// Rate of one link, each way, where ranks are not each linked with each.
    #[serde(default = "Sourced::zero")]
    pub link_gbps: Sourced,
    /// Which ranks of a node are linked, if not each with each.
    #[serde(default)]
    pub links: Vec<LinkedPair>,
}

/// Two ranks of a node, and how many links they have.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkedPair {
    /// Their places on the node: two.
    pub ranks: Vec<usize>,
    /// How many.
    #[serde(default = "one_link")]
    pub count: usize,
}

fn one_link() -> usize {
    1
}

/// What a rank computes and copies.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalCosts {
    /// From the wish for a copy or reduction to its end, beside its bytes: a launch and an event.
    pub launch_us: Sourced,
    /// Bytes copied a second.
    pub copy_gbps: Sourced,
    /// Bytes of results a second, of two operands.
    pub reduce_gbps: Sourced,
    /// Bytes of plain elements a second that are coded, beside the copy; 0 where that is as fast as a copy.
    #[serde(default = "Sourced::zero")]
    pub encode_gbps: Sourced,
    /// The same of elements that are decoded.
    #[serde(default = "Sourced::zero")]
    pub decode_gbps: Sourced,
    /// Processors which all ranks of all nodes share for messages inside a node, copies and reductions; 0 where each rank has
    /// engines of its own.
    #[serde(default = "Sourced::zero")]
    pub processors: Sourced,
}

/// The time of a library's collective on `p` ranks and `S` bytes: `((hop (p-1))^q + (S (p-1)/p / rate)^q)^(1/q)`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Law {
    /// Time of a step of the ring.
    pub hop_us: Sourced,
    /// Rate of the bytes that each rank must take in.
    pub gbps: Sourced,
    /// How the two combine: 1 is their sum; the greater, the more the larger one counts alone.
    #[serde(default = "Sourced::one")]
    pub q: Sourced,
    /// What every collective costs, whatever its size.
    #[serde(default = "Sourced::zero")]
    pub call_us: Sourced,
}

impl Law {
    /// The time on `nranks` ranks for a message of so many bytes (all-gather: of the output; reduce-scatter: of the input;
    /// all-reduce, with a law of its own: of the vector), in ns.
    pub fn ns(&self, nranks: usize, bytes: usize) -> f64 {
        let others = nranks.saturating_sub(1) as f64;
        let hops = self.hop_us.value * 1e3 * others;
        let wire = bytes as f64 * others / nranks.max(1) as f64 / self.gbps.value;
        let q = self.q.value;
        self.call_us.value * 1e3 + (hops.powf(q) + wire.powf(q)).powf(1.0 / q)
    }
}

/// The laws of a library, one for each collective.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Laws {
    /// All-gather.
    pub all_gather: Law,
    /// Reduce-scatter.
    pub reduce_scatter: Law,
    /// All-reduce; where it has none, it takes as long as the two others one after the other.
    pub all_reduce: Option<Law>,
    /// All-reduce by trees, where the library has them and they are faster: here `p - 1` counts levels, `2 log2 p`.
    pub all_reduce_tree: Option<Law>,
}

impl Laws {
    /// The time of a collective, in ns; None for one that has no law.
    pub fn ns(&self, collective: Collective, nranks: usize, bytes: usize) -> Option<f64> {
        match collective {
            Collective::AllGather => Some(self.all_gather.ns(nranks, bytes)),
            Collective::ReduceScatter => Some(self.reduce_scatter.ns(nranks, bytes)),
            Collective::AllReduce => {
                let ring = match &self.all_reduce {
                    Some(law) => law.ns(nranks, bytes),
                    None => self.reduce_scatter.ns(nranks, bytes) + self.all_gather.ns(nranks, bytes),
                };
                let tree = self.all_reduce_tree.as_ref().map(|law| {
                    let levels = 2.0 * (nranks.max(1) as f64).log2().ceil();
                    let wire = 2.0 * bytes as f64 / law.gbps.value;
                    let (hops, q) = (levels * law.hop_us.value * 1e3, law.q.value);
                    law.call_us.value * 1e3 + (hops.powf(q) + wire.powf(q)).powf(1.0 / q)
                });
                Some(tree.map_or(ring, |tree| tree.min(ring)))
            }
            _ => None,
        }
    }
}

/// What PCCL's implementation adds to its algorithm.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pccl {
    /// Every call.
    pub call_us: Sourced,
    /// Every round of recursive doubling or halving, beside the latency of its message.
    pub round_us: Sourced,
    /// Rate at which a received part is reduced before the next step begins; 0 is that of the GPU.
    #[serde(default = "Sourced::zero")]
    pub reduce_gbps: Sourced,
}

/// What Strata's implementation takes beside its plan.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Own {
    /// Every call: its event, waking the communicator's thread, letting the stream go on.
    pub call_us: Sourced,
}

/// Where the vendor's library is slower than its law.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overload {
    /// On more ranks than this.
    pub above_ranks: Sourced,
    /// For messages of at least so many bytes.
    pub from_bytes: Sourced,
    /// How many times as slow.
    pub factor: Sourced,
}

/// A cluster.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Its name.
    pub name: String,
    /// What it is.
    pub text: String,
    /// A node.
    pub node: NodeSpec,
    /// Between nodes.
    pub network: InterNode,
    /// Between nodes over a communicator of the vendor's library, where that differs.
    pub network_vendor: Option<InterNode>,
    /// Inside a node, for messages of ours.
    pub inside: IntraNode,
    /// On a rank.
    pub local: LocalCosts,
    /// The vendor's library inside a node; none where nodes exchange messages.
    pub calls: Option<Laws>,
    /// The vendor's library on all ranks.
    pub vendor: Option<Laws>,
    /// The machine's MPI on all ranks.
    pub mpi: Option<Laws>,
    /// Libraries that a program may mix, each with laws of its own, by name.
    #[serde(default)]
    pub carriers: BTreeMap<String, CarrierLaws>,
    /// PCCL's implementation.
    pub pccl: Option<Pccl>,
    /// Strata's.
    pub strata: Option<Own>,
    /// The vendor's library at scale.
    pub overload: Option<Overload>,
    /// The way out of a rank.
    pub out: Option<RankOut>,
    /// One connection.
    pub lanes: Option<LaneRates>,
    /// Protocols of messages.
    pub protocols: Option<Protocols>,
    /// The kernel of a call.
    pub launch: Option<KernelLaunch>,
    /// Kinds of nodes, where they differ, in the order of nodes.
    #[serde(default)]
    pub nodes: Vec<NodeKind>,
    /// Nodes whose NICs are slower than the file says; no file says this itself.
    #[serde(skip)]
    pub slow: Vec<SlowNode>,
    /// The links inside a node, where it has them.
    #[serde(skip)]
    pub links: Option<Arc<NodeLinks>>,
    /// Every number of the file, by its place there (`network.nic_gbps`).
    #[serde(skip)]
    pub numbers: Vec<(String, Sourced)>,
}

/// The machines known by name, and their files.
const KNOWN: [(&str, &str); 10] = [
    ("frontier", include_str!("../../machines/frontier.toml")),
    ("perlmutter", include_str!("../../machines/perlmutter.toml")),
    ("dgx-h100", include_str!("../../machines/dgx-h100.toml")),
    ("ndv4", include_str!("../../machines/ndv4.toml")),
    ("dgx2", include_str!("../../machines/dgx2.toml")),
    ("dgx-1", include_str!("../../machines/dgx-1.toml")),
    ("lassen", include_str!("../../machines/lassen.toml")),
    ("thetagpu", include_str!("../../machines/thetagpu.toml")),
    ("adapcc", include_str!("../../machines/adapcc.toml")),
    ("netns", include_str!("../../machines/netns.toml")),
];

/// A machine's file has no more bytes than this: every rank of every communicator gets them.
const MOST_BYTES: u64 = 256 << 10;

/// The terms that [`Cluster::without`] can leave out.
pub const TERMS: [(&str, &str); 6] = [
    ("overload", "the vendor's library beyond the number of ranks up to which its law was measured"),
    ("pccl", "what PCCL's implementation adds to its algorithm"),
    ("out", "the way out of a rank to the others of its node"),
    ("lanes", "the rate of one connection: one thread block does not fill a link"),
    ("protocols", "the rates and latencies of the protocols that a script names"),
    ("launch", "the launch of a call's kernel and of each thread block"),
];

impl Cluster {
    /// The names of the machines that are known.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|(name, _)| *name)
    }

    /// A known machine, or the one in a file.
    pub fn find(name: &str) -> Result<Cluster> {
        Cluster::parse(&Cluster::text(name)?, name)
    }

    /// The file of a known machine, or any other.
    pub fn text(name: &str) -> Result<String> {
        if let Some((_, text)) = KNOWN.iter().find(|(known, _)| *known == name) {
            return Ok(text.to_string());
        }
        let known = || Cluster::names().collect::<Vec<_>>().join(", ");
        let wrong = |what: &str| {
            Error::InvalidArgument(format!("machine {name}: none of {}, and no file that can be read: {what}", known()))
        };
        // A pipe would be waited for, and a device may have no end.
        let found = std::fs::metadata(Path::new(name)).map_err(|error| wrong(&error.to_string()))?;
        if !found.is_file() || found.len() > MOST_BYTES {
            return Err(wrong(&format!("not a file of at most {MOST_BYTES} bytes")));
        }
        std::fs::read_to_string(Path::new(name)).map_err(|error| wrong(&error.to_string()))
    }

    /// Reads a machine's file; `from` names it in messages.
    pub fn parse(text: &str, from: &str) -> Result<Cluster> {
        let wrong = |what: String| Error::InvalidArgument(format!("machine {from}: {what}"));
        let mut machine: Cluster = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let table: toml::Table = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
        numbers(&table, "", &mut machine.numbers);
        for (name, number) in &machine.numbers {
            let (least, most) = bounds(name);
            let nothing = number.value == 0.0 && !is_rate(name);
            if !nothing && !(least..=most).contains(&number.value) {
                return Err(wrong(format!("{name} = {} is not a number from {least} to {most}", number.value)));
            }
        }
        let (ranks, nics) = (machine.node.ranks.value, machine.node.nics.value);
        if ranks.fract() != 0.0 || nics.fract() != 0.0 || ranks > 1024.0 || nics > 1024.0 {
            return Err(wrong(format!("a node of {ranks} ranks and {nics} NICs")));
        }
        if machine.nodes.iter().any(|kind| kind.count.value.fract() != 0.0) {
            return Err(wrong("a number of nodes of a kind that is not whole".to_string()));
        }
        if machine.carriers.len() > MOST_CARRIERS {
            return Err(wrong(format!("{} carriers; {MOST_CARRIERS} are the most", machine.carriers.len())));
        }
        machine.links =
            machine.linked().map_err(|error| wrong(format!("inside.links: {}", error.text())))?.map(Arc::new);
        Ok(machine)
    }

    fn linked(&self) -> Result<Option<NodeLinks>> {
        if self.inside.links.is_empty() {
            return Ok(None);
        }
        if self.inside.link_gbps.value == 0.0 {
            return Err(Error::InvalidArgument(
                "inside.link_gbps says how fast they are, and is not there".to_string(),
            ));
        }
        let pair = |pair: &LinkedPair| match pair.ranks[..] {
            [one, other] => Ok(([one, other], pair.count)),
            _ => Err(Error::InvalidArgument(format!("ranks = {:?}: two are wanted", pair.ranks))),
        };
        let pairs = self.inside.links.iter().map(pair).collect::<Result<Vec<_>>>()?;
        NodeLinks::new(self.ranks_per_node(), &pairs).map(Some)
    }

    /// A grid with this machine's links, where it has some and the grid's nodes are full.
    pub fn on_links(&self, grid: Grid) -> Grid {
        match &self.links {
            Some(links) => grid.with_links(links),
            None => grid,
        }
    }

    /// The machine without one of its [`TERMS`].
    pub fn without(mut self, term: &str) -> Result<Cluster> {
        match term {
            "overload" => self.overload = None,
            "pccl" => self.pccl = None,
            "out" => self.out = None,
            "lanes" => self.lanes = None,
            "protocols" => self.protocols = None,
            "launch" => self.launch = None,
            other => {
                let terms = TERMS.map(|(name, _)| name).join(", ");
                return Err(Error::InvalidArgument(format!("there is no term {other} to leave out, only {terms}")));
            }
        }
        Ok(self)
    }

    /// Ranks of a full node.
    pub fn ranks_per_node(&self) -> usize {
        (self.node.ranks.value as usize).max(1)
    }

    /// What every call of Strata's takes beside its plan, in ns.
    pub fn strata_call_ns(&self) -> f64 {
        self.strata.as_ref().map_or(0.0, |own| own.call_us.value * 1e3)
    }

    /// The NIC that a rank uses, by its place on its node of `ranks`.
    pub fn nic_of(&self, local: usize, ranks: usize) -> usize {
        let nics = (self.node.nics.value as usize).max(1);
        if ranks >= nics {
            local * nics / ranks
        } else {
            local
        }
    }

    /// The time that the vendor's library takes on all ranks, its overload included, in ns. One node has the laws of calls
    /// inside a node.
    pub fn vendor_ns(&self, collective: Collective, grid: &Grid, bytes: usize) -> Option<f64> {
        let nranks = grid.nranks();
        if grid.nnodes() == 1 {
            return self.calls.as_ref()?.ns(collective, nranks, bytes);
        }
        let ns = self.vendor.as_ref()?.ns(collective, nranks, bytes)?;
        let factor = self.overload.as_ref().filter(|_| self.is_overloaded(nranks, bytes));
        Some(factor.map_or(ns, |overload| ns * overload.factor.value))
    }

    /// Whether the term for the vendor's overload is in [`Cluster::vendor_ns`].
    pub fn is_overloaded(&self, nranks: usize, bytes: usize) -> bool {
        self.overload.as_ref().is_some_and(|overload| {
            let many = nranks > self.ranks_per_node() && nranks as f64 > overload.above_ranks.value;
            many && bytes as f64 >= overload.from_bytes.value
        })
    }
}

/// Every number of a machine's file, by its place there (`network.nic_gbps`), in the file's order.
fn numbers(table: &toml::Table, place: &str, found: &mut Vec<(String, Sourced)>) {
    for (name, value) in table {
        let name = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
        for (index, inner) in value.as_array().into_iter().flatten().enumerate() {
            inner.as_table().into_iter().for_each(|inner| numbers(inner, &format!("{name}.{index}"), found));
        }
        let Some(inner) = value.as_table() else { continue };
        match inner.clone().try_into::<Sourced>() {
            Ok(number) => found.push((name, number)),
            Err(_) => numbers(inner, &name, found),
        }
    }
}

/// From where to where a number may be: beyond, times would not fit the clock, or memory the resources.
fn bounds(name: &str) -> (f64, f64) {
    match name.rsplit('.').next().unwrap_or(name) {
        "ranks" | "nics" | "processors" | "count" => (1.0, 65_536.0),
        "q" => (0.1, 20.0),
        "factor" => (0.001, 1e6),
        "share" => (0.01, 1.0),
        last if last.ends_with("gbps") => (0.001, 1e9),
        last if last.ends_with("_us") => (0.0, 1e9),
        _ => (0.0, 1e18),
    }
}

/// Whether a number must be greater than nothing.
fn is_rate(name: &str) -> bool {
    let rate =
        name.ends_with("gbps") && !["processor_gbps", "link_gbps"].iter().any(|optional| name.ends_with(optional));
    rate || name.starts_with("node.")
        || name.ends_with(".count")
        || name.ends_with(".q")
        || name.ends_with(".factor")
        || name.ends_with(".share")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_machine_can_be_read_and_every_number_has_a_source() {
        for name in Cluster::names() {
            let machine = Cluster::find(name).unwrap();
            assert_eq!(machine.name, name);
            assert!(machine.numbers.len() > 8, "{name}: {}", machine.numbers.len());
            for (place, number) in &machine.numbers {
                assert!(number.source.len() > 10, "{name}: {place} has no source");
            }
        }
    }

    #[test]
    fn a_malformed_machine_is_refused_with_its_place() {
        let good = KNOWN[0].1;
        let swapped = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            Cluster::parse(&good.replacen(from, to, 1), "mine.toml").unwrap_err().text().to_string()
        };
        for (from, to, said) in [
            ("[network]", "[netwrk]", "netwrk"),
            ("name = ", "name : ", "mine.toml"),
            ("ranks = { value = 8", "ranks = { value = 0", "node.ranks = 0"),
            ("ranks = { value = 8", "ranks = { value = 1e9", "node.ranks = 1000000000"),
            ("ranks = { value = 8", "ranks = { value = 2000", "2000 ranks"),
            ("ranks = { value = 8", "ranks = { value = 7.5", "7.5 ranks"),
            ("[network]", "[[inside.links]]\nranks = [0, 1, 2]\n[network]", "inside.links"),
            ("nic_gbps = { value = ", "nic_gbps = { value = 1e-300 }\nother = { value = ", "nic_gbps"),
            ("q = { value = 1.3", "q = { value = 1e-9", ".q = 0.000000001"),
            ("q = { value = 1.3", "q = { value = nan", ".q = NaN"),
            ("nic_gbps = { value = ", "nic_gbps = { value = -", "nic_gbps"),
            ("nic_gbps = { value = ", "nic_gbps = { worth = ", "worth"),
        ] {
            let text = swapped(from, to);
            assert!(text.contains("mine.toml") && text.contains(said), "{from} -> {to}: {text}");
        }
        assert!(Cluster::find("/dev/zero").unwrap_err().text().contains("not a file"));
        let missing = Cluster::find("no/such.toml").unwrap_err();
        assert!(missing.text().contains("frontier"), "{missing}");
    }

    #[test]
    fn a_law_adds_hops_and_bytes_and_a_term_can_be_left_out() {
        let law = |q| Law {
            hop_us: Sourced::nothing(1.0),
            gbps: Sourced::nothing(1.0),
            q: Sourced::nothing(q),
            call_us: Sourced::zero(),
        };
        assert!((law(1.0).ns(5, 5000) - 8000.0).abs() < 1e-6);
        assert!((law(2.0).ns(5, 5000) - 4000.0 * 2f64.sqrt()).abs() < 1e-6);
        let machine = Cluster::find("frontier").unwrap();
        let grid = Grid::blocks(&[8; 256]);
        let slow = machine.vendor_ns(Collective::AllGather, &grid, 1 << 30).unwrap();
        let plain =
            machine.clone().without("overload").unwrap().vendor_ns(Collective::AllGather, &grid, 1 << 30).unwrap();
        assert!(slow > 1.5 * plain);
        let ns = |grid: Grid| machine.vendor_ns(Collective::AllGather, &grid, 1 << 30).unwrap();
        assert!(ns(Grid::blocks(&[1; 8])) > 1.1 * ns(Grid::flat(8)), "eight ranks on eight nodes cross the network");
        assert!(machine.without("gravity").is_err());
    }

    #[test]
    fn ranks_share_nics_in_blocks() {
        let machine = Cluster::find("frontier").unwrap();
        assert_eq!((0..8).map(|local| machine.nic_of(local, 8)).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(machine.nic_of(2, 3), 2);
    }
}
