//! The times of a [`Cluster`]: every message, copy, reduction and call takes its turn on the resources that it needs.
//!
//! A resource does one thing at a time, in the order in which things come to it: each NIC port (sending and receiving), the
//! ways into each rank from its own node and out of it, each connection, each rank's thread and engine, each node's vendor library
//! and what takes its results apart, and the processors, where ranks share them. Bytes occupy links, and a gap where a machine
//! has one; latency is added. What a resource was busy with can be kept, for a timeline.
#![forbid(unsafe_code)]

use super::durations::{CallWork, Durations, InFlight, LocalWork};
use super::machine::{Cluster, InterNode, Laws, Sourced};
use super::nodes::NodeRates;
use super::random::Random;
use super::terms::Protocol;
use crate::config::Config;
use crate::plan::{Call, Channel};
use crate::topo::{Grid, Rank};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

/// What can be busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// A NIC's way out.
    NicOut,
    /// A NIC's way in.
    NicIn,
    /// The way into a rank from its node.
    Inside,
    /// The way out of a rank to its node.
    InsideOut,
    /// A link between two ranks of a node, one way.
    Link,
    /// A connection: one thread block that sends.
    Connection,
    /// A rank's thread.
    Thread,
    /// A rank's copies and reductions.
    Engine,
    /// The vendor's library inside a node.
    Library,
    /// What takes blocks apart inside a node behind the vendor's library.
    Shuffle,
    /// The processors that all ranks share.
    Processors,
}

impl Resource {
    /// All of them.
    pub const ALL: [Resource; 11] = [
        Resource::NicOut,
        Resource::NicIn,
        Resource::Inside,
        Resource::InsideOut,
        Resource::Link,
        Resource::Connection,
        Resource::Thread,
        Resource::Engine,
        Resource::Library,
        Resource::Shuffle,
        Resource::Processors,
    ];
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Resource::NicOut => "NIC, sending",
            Resource::NicIn => "NIC, receiving",
            Resource::Inside => "links inside the node",
            Resource::InsideOut => "links inside the node, sending",
            Resource::Link => "one link between two ranks",
            Resource::Connection => "one thread block's connection",
            Resource::Thread => "rank's thread",
            Resource::Engine => "copies and reductions",
            Resource::Library => "vendor's library inside the node",
            Resource::Shuffle => "packing and unpacking",
            Resource::Processors => "processors",
        })
    }
}

/// A stretch of time in which a resource was busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// What.
    pub resource: Resource,
    /// Which of its kind: a NIC by node and place, a rank, a node, a processor; a connection by its first message.
    pub index: usize,
    /// From when.
    pub from_ns: u64,
    /// Until when.
    pub until_ns: u64,
}

/// How messages go between nodes and what an implementation adds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Manner {
    /// Whether the vendor's library carries messages between nodes.
    pub vendor_rails: bool,
    /// ns that each round between nodes takes beside its message.
    pub round_ns: u64,
    /// GB/s at which a part that came from another node is reduced; 0 is the machine's.
    pub reduce_gbps: f64,
    /// Whether every activity is kept.
    pub keep: bool,
}

/// A queue: when each of its servers is free, and for how long they were busy.
#[derive(Debug, Clone)]
struct Queue {
    resource: Resource,
    free_at: Vec<u64>,
    busy_ns: Vec<u64>,
}

impl Queue {
    fn new(resource: Resource, servers: usize) -> Queue {
        Queue { resource, free_at: vec![0; servers], busy_ns: vec![0; servers] }
    }

    /// Takes a server for `ns` from `now` on, or from when it is free. Returns the start.
    fn take(&mut self, index: usize, now: u64, ns: u64, kept: &mut Option<Vec<Busy>>) -> u64 {
        let start = self.free_at[index].max(now);
        if ns == 0 {
            return now;
        }
        self.free_at[index] = start + ns;
        self.busy_ns[index] += ns;
        if let Some(kept) = kept {
            kept.push(Busy { resource: self.resource, index, from_ns: start, until_ns: start + ns });
        }
        start
    }

    /// The server that is free first.
    fn first_free(&self) -> usize {
        (0..self.free_at.len()).min_by_key(|&index| self.free_at[index]).unwrap_or(0)
    }
}

/// What is busy until when.
#[derive(Debug)]
pub(super) struct FabricState {
    queues: Vec<Queue>,
    connections: FxHashMap<(Rank, Rank, Channel), usize>,
    kept: Option<Vec<Busy>>,
}

impl FabricState {
    /// The greatest time for which any one resource of each kind was busy, in ns.
    pub(super) fn busiest(&self) -> Vec<(Resource, u64)> {
        let most = |queue: &Queue| (queue.resource, queue.busy_ns.iter().copied().max().unwrap_or(0));
        self.queues.iter().map(most).filter(|&(_, ns)| ns > 0).collect()
    }

    /// The activities, if they were kept.
    pub(super) fn take_kept(&mut self) -> Vec<Busy> {
        self.kept.take().unwrap_or_default()
    }
}

/// Where the links of each pair begin among those of a node, each way by itself.
#[derive(Debug, Default)]
struct LinkPlaces {
    begins: FxHashMap<(usize, usize), usize>,
    end: usize,
}

impl LinkPlaces {
    fn new(grid: &Grid) -> LinkPlaces {
        let mut places = LinkPlaces::default();
        for ([one, other], count) in grid.links().into_iter().flat_map(|links| links.pairs()) {
            for way in [(one, other), (other, one)] {
                places.begins.insert(way, places.end);
                places.end += count;
            }
        }
        places
    }
}

/// The durations of a machine. Copies share their state.
#[derive(Debug, Clone)]
pub(super) struct Fabric {
    machine: Arc<Cluster>,
    grid: Arc<Grid>,
    manner: Manner,
    /// For each rank its NIC among all.
    nics: Rc<[u32]>,
    links: Rc<LinkPlaces>,
    /// What each node has of the machine's rates.
    rates: Rc<[NodeRates]>,
    /// Blocks of calls of more bytes than this are brought together and taken apart beside other calls.
    beside_bytes: usize,
    /// The protocol of messages inside nodes, and that of messages between them, where the machine has one of that name.
    protocols: [Option<Protocol>; 2],
    pub(super) state: Rc<RefCell<FabricState>>,
}

fn ns(us: &Sourced) -> u64 {
    (us.value * 1e3).round() as u64
}

/// The time of bytes at a rate in GB/s; 0 is no limit.
fn at_rate(bytes: usize, gbps: f64) -> u64 {
    if gbps > 0.0 {
        (bytes as f64 / gbps).round() as u64
    } else {
        0
    }
}

impl Fabric {
    pub(super) fn new(machine: &Arc<Cluster>, grid: &Arc<Grid>, manner: Manner) -> Fabric {
        let per_node = (machine.node.nics.value as usize).max(1);
        let most = grid.node_ids().map(|node| grid.members(node).len()).max().unwrap_or(1);
        let stride = per_node.max(most);
        let nic = |rank: usize| {
            let rank = Rank::from_index(rank);
            let node = grid.node(rank);
            (node.index() * stride + machine.nic_of(grid.local(rank), grid.members(node).len())) as u32
        };
        let nics: Rc<[u32]> = (0..grid.nranks()).map(nic).collect();
        let links = LinkPlaces::new(grid);
        let rates: Rc<[NodeRates]> = grid.node_ids().map(|node| machine.rates_of(node.index())).collect();
        let servers = |resource: &Resource| match resource {
            Resource::NicOut | Resource::NicIn => grid.nnodes() * stride,
            Resource::Inside | Resource::InsideOut | Resource::Thread | Resource::Engine => grid.nranks(),
            Resource::Connection => 0,
            Resource::Link => grid.nnodes() * links.end,
            Resource::Library => grid.nnodes(),
            Resource::Shuffle => 2 * grid.nnodes(),
            Resource::Processors => machine.local.processors.value as usize,
        };
        let queues = Resource::ALL.iter().map(|resource| Queue::new(*resource, servers(resource))).collect();
        let state = FabricState { queues, connections: FxHashMap::default(), kept: manner.keep.then(Vec::new) };
        let (machine, grid) = (machine.clone(), grid.clone());
        let beside_bytes = Config::default().pack_beside_bytes;
        Fabric {
            machine,
            grid,
            manner,
            nics,
            links: Rc::new(links),
            rates,
            beside_bytes,
            protocols: [None, None],
            state: Rc::new(RefCell::new(state)),
        }
    }

    /// The same with messages inside nodes, and between them, in protocols.
    pub(super) fn speaking(mut self, inside: Option<&Protocol>, between: Option<&Protocol>) -> Fabric {
        self.protocols = [inside.cloned(), between.cloned()];
        self
    }

    fn node(&self, rank: Rank) -> usize {
        self.grid.node(rank).index()
    }

    fn rates(&self, rank: Rank) -> NodeRates {
        self.rates[self.node(rank)]
    }

    fn protocol(&self, same_node: bool) -> Option<&Protocol> {
        self.protocols[usize::from(!same_node)].as_ref()
    }

    fn network(&self) -> &InterNode {
        match &self.machine.network_vendor {
            Some(network) if self.manner.vendor_rails => network,
            _ => &self.machine.network,
        }
    }

    /// When something that begins at `now` and takes a resource for `time` ends.
    fn take(&self, resource: Resource, index: usize, now: u64, time: u64) -> u64 {
        let FabricState { queues, kept, .. } = &mut *self.state.borrow_mut();
        queues[resource as usize].take(index, now, time, kept) + time
    }

    /// The same on one of the shared processors, if ranks share them.
    fn process(&self, now: u64, time: u64) -> u64 {
        let FabricState { queues, kept, .. } = &mut *self.state.borrow_mut();
        let queue = &mut queues[Resource::Processors as usize];
        if queue.free_at.is_empty() {
            return now + time;
        }
        let index = queue.first_free();
        queue.take(index, now, time, kept) + time
    }

    fn shares_processors(&self) -> bool {
        self.machine.local.processors.value >= 1.0
    }

    /// What posting or taking in a message of so many bytes costs its rank's thread, or the processors that ranks share.
    fn handle(&self, rank: Rank, now: u64, network: &InterNode, bytes: usize) -> u64 {
        let post = ns(&network.post_us);
        match self.shares_processors() {
            true => self.process(now, post + at_rate(bytes, network.processor_gbps.value)),
            false => self.take(Resource::Thread, rank.index(), now, post),
        }
    }

    /// The time of bytes on a link of this rate in the protocol of the messages.
    fn on_link(&self, bytes: usize, gbps: f64, same_node: bool) -> u64 {
        at_rate(bytes, gbps * self.protocol(same_node).map_or(1.0, |protocol| protocol.share.value))
    }

    /// When a message's connection is done with it.
    fn connect(&self, transfer: &InFlight, now: u64, same_node: bool) -> u64 {
        let Some(connection) = &self.machine.lanes else { return now };
        let gbps = if same_node { &connection.inside_gbps } else { &connection.network_gbps };
        let time = ns(&connection.step_us) + self.on_link(transfer.bytes, gbps.value, same_node);
        let FabricState { queues, connections, kept } = &mut *self.state.borrow_mut();
        let queue = &mut queues[Resource::Connection as usize];
        let next = queue.free_at.len();
        let index = *connections.entry((transfer.from, transfer.to, transfer.channel)).or_insert(next);
        if index == next {
            queue.free_at.push(0);
            queue.busy_ns.push(0);
        }
        queue.take(index, now, time, kept) + time
    }

    /// A message between nodes: out of a NIC, over the wire, into a NIC, which begins before the first has ended. Messages that
    /// wait for one NIC share it, as flows do, and do not go one after another: so each of the two works the message off in
    /// its own order, and the message has arrived when both have.
    fn between_nodes(&self, transfer: &InFlight) -> u64 {
        let InFlight { now_ns, from, to, bytes, .. } = *transfer;
        let network = self.network();
        let handled = self.handle(from, now_ns, network, bytes);
        let occupied = |rank| {
            let gbps = network.nic_gbps.value * self.rates(rank).nic;
            ns(&network.gap_us) + self.on_link(bytes, gbps * self.machine.slowness(self.node(rank), handled), false)
        };
        let latency = self.protocol(false).map_or(&network.latency_us, |protocol| &protocol.network_us);
        let latency = ns(latency) + self.manner.round_ns;
        let connected = self.connect(transfer, handled, false);
        let out = self.take(Resource::NicOut, self.nics[from.index()] as usize, handled, occupied(from));
        let into = self.take(Resource::NicIn, self.nics[to.index()] as usize, handled + latency, occupied(to));
        into.max(out.max(connected) + latency)
    }

    /// A message inside a node: its connection, the way out of its sender and the way into its receiver work it off at the
    /// same time. Where ranks share processors, all of it is a processor's work.
    fn inside_node(&self, transfer: &InFlight) -> u64 {
        let InFlight { now_ns, from, to, bytes, .. } = *transfer;
        let inside = &self.machine.inside;
        let latency = ns(self.protocol(true).map_or(&inside.latency_us, |protocol| &protocol.inside_us));
        let gap = ns(&inside.gap_us);
        if self.shares_processors() {
            return self.process(now_ns, latency + gap + self.on_link(bytes, inside.rank_gbps.value, true));
        }
        let mut sent = self.connect(transfer, now_ns, true);
        if let Some(out) = &self.machine.out {
            let time = gap + self.on_link(bytes, out.rank_gbps.value, true);
            sent = sent.max(self.take(Resource::InsideOut, from.index(), now_ns, time));
        }
        sent = sent.max(self.cross_link(transfer));
        let time = gap + self.on_link(bytes, inside.rank_gbps.value * self.rates(to).inside, true);
        sent.max(self.take(Resource::Inside, to.index(), now_ns, time)) + latency
    }

    /// When a message has crossed the link that is free first of those between two ranks; ranks without one have another way.
    fn cross_link(&self, transfer: &InFlight) -> u64 {
        let InFlight { now_ns, from, to, bytes, .. } = *transfer;
        let Some(links) = self.grid.links() else { return now_ns };
        let (one, other) = (self.grid.local(from), self.grid.local(to));
        let Some(&begin) = self.links.begins.get(&(one, other)) else { return now_ns };
        let inside = &self.machine.inside;
        let time = ns(&inside.gap_us) + self.on_link(bytes, inside.link_gbps.value, true);
        let begin = self.grid.node(from).index() * self.links.end + begin;
        let FabricState { queues, kept, .. } = &mut *self.state.borrow_mut();
        let queue = &mut queues[Resource::Link as usize];
        let servers = begin..begin + links.count(one, other);
        let index = servers.min_by_key(|&index| queue.free_at[index]).unwrap_or(begin);
        queue.take(index, now_ns, time, kept) + time
    }

    /// Work of a rank's engine, or of the shared processors.
    fn compute(&self, rank: Rank, now: u64, time: u64) -> u64 {
        if self.shares_processors() {
            return self.process(now, time);
        }
        self.take(Resource::Engine, rank.index(), now, time)
    }

    fn calls(&self) -> Option<&Laws> {
        self.machine.calls.as_ref()
    }
}

impl Durations for Fabric {
    fn message_ns(&mut self, transfer: &InFlight, _: &mut Random) -> u64 {
        let same = self.grid.node(transfer.from) == self.grid.node(transfer.to);
        let end = if same { self.inside_node(transfer) } else { self.between_nodes(transfer) };
        end - transfer.now_ns
    }

    fn local_ns(&mut self, work: &LocalWork, _: &mut Random) -> u64 {
        let local = &self.machine.local;
        let own = self.rates(work.rank);
        let rate = match work.operands > 1 {
            true => local.reduce_gbps.value * own.reduce,
            false => local.copy_gbps.value * own.copy,
        };
        // Of n operands n - 1 pairs are reduced.
        let bytes = work.bytes * work.operands.saturating_sub(1).max(1);
        let coding = |bytes: usize, rate: &Sourced| if rate.value > 0.0 { at_rate(bytes, rate.value) } else { 0 };
        let coding = coding(work.encoded, &local.encode_gbps) + coding(work.decoded, &local.decode_gbps);
        self.compute(work.rank, work.now_ns, ns(&local.launch_us) + at_rate(bytes, rate) + coding) - work.now_ns
    }

    fn take_in_ns(&mut self, work: &LocalWork, from: Rank, _: &mut Random) -> u64 {
        let local = &self.machine.local;
        let far = self.grid.node(from) != self.grid.node(work.rank);
        let mut now = work.now_ns;
        if far {
            let network = self.network();
            now = self.handle(work.rank, now, network, work.bytes);
        }
        if work.operands > 1 {
            let rate = match self.manner.reduce_gbps {
                rate if far && rate > 0.0 => rate,
                _ => local.reduce_gbps.value * self.rates(work.rank).reduce,
            };
            now = self.compute(work.rank, now, ns(&local.launch_us) + at_rate(work.bytes, rate));
        }
        now - work.now_ns
    }

    fn call_ns(&mut self, call: &Call, work: &CallWork, _: &mut Random) -> u64 {
        let node = self.grid.node(call.group[0]).index();
        let law = self.calls().and_then(|laws| laws.ns(call.collective, call.group.len(), work.bytes));
        let law = law.unwrap_or(0.0).round() as u64;
        let copy = self.machine.local.copy_gbps.value * self.rates[node].copy;
        // Over the vendor's rails a call is made for each node's blocks, which lie together (`vendor::lower`).
        let arranged = |bytes| if self.manner.vendor_rails { 0 } else { at_rate(bytes, copy) };
        let [pack, unpack] = [work.packed, work.unpacked].map(arranged);
        if work.bytes <= self.beside_bytes {
            // Blocks are brought together and taken apart in line with the call.
            return self.take(Resource::Library, node, work.now_ns, pack + law + unpack) - work.now_ns;
        }
        // Each on a stream of its own.
        let packed = self.take(Resource::Shuffle, 2 * node, work.now_ns, pack);
        let called = self.take(Resource::Library, node, packed, law);
        self.take(Resource::Shuffle, 2 * node + 1, called, unpack) - work.now_ns
    }

    fn notice_ns(&mut self, _: &mut Random) -> u64 {
        0
    }

    fn eager(&mut self, bytes: usize, _: &mut Random) -> bool {
        bytes as f64 <= self.network().eager_bytes.value
    }
}
