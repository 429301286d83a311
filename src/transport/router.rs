//! One transport for all peers: shared memory for those of this node, a transport of the registry for the others.
#![forbid(unsafe_code)]

use super::provider::{self, CommProviders, Providers, Provision};
use super::registry::{self, Chosen, Site, TransportKind};
use super::shm::open::Ways;
use super::shm::wakeup::{Waker, Wakeups};
use super::shm::{self, Shm};
use super::{
    CollectiveKind, Departure, DeviceMemory, Endpoint, Envelope, Exchange, FlatCall, NodeCall, Sink, Transport,
};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::error::{Error, Result, ShortResult};
use crate::exec::{Started, Token};
use crate::memory::Region;
use crate::topo::binding::Binding;
use crate::topo::{Grid, Rank};
use std::sync::Arc;
use std::time::Duration;

/// After so much sleep without an event, look whether the peers still live.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);
/// The longest sleep while a provider has a call whose end wakes nobody.
const PROVIDER_NAP: Duration = Duration::from_micros(100);

#[derive(Debug, Clone, Copy)]
enum Route {
    Myself,
    Shm(usize),
    Network(usize),
}

/// The transport of one rank of one communicator.
#[derive(Debug)]
pub struct Router {
    routes: Vec<Route>,
    shm: Shm,
    network: Option<Box<dyn Endpoint>>,
    carrier: Option<Carrier>,
    /// What was tried before the carrier, and why the ranks cannot use it.
    refused: Vec<(&'static str, String)>,
    wakeups: Arc<Wakeups>,
    polls: u32,
    slept: Duration,
    busy_at: Option<u64>,
    alone: bool,
    /// Bytes that have been sent to other nodes.
    sent_far: u64,
    providers: Providers,
}

/// Opens the transport between all ranks of `grid`. All ranks call it together; `exchange` is used for a few rounds.
/// `binding` finds the NIC to other nodes; it is called only where one is needed.
pub fn open(
    me: Rank,
    grid: &Grid,
    config: &Config,
    binding: &dyn Fn() -> Result<Binding>,
    exchange: &mut dyn Exchange,
) -> Result<Router> {
    let site = Site { me, grid, config, binding };
    open_by(&site, &registry::kinds(), Ways { proc: true, file: true }, exchange)
}

/// The same with this transport between nodes and no other; why the ranks cannot use it, the same on all of them. On one node
/// nothing goes between nodes, and any will do.
pub fn open_over(
    name: &str,
    site: &Site<'_>,
    exchange: &mut dyn Exchange,
) -> Result<std::result::Result<Router, String>> {
    let (kinds, ways) = (registry::kinds(), Ways { proc: true, file: true });
    if site.grid.nnodes() == 1 {
        return open_by(site, &kinds, ways, exchange).map(Ok);
    }
    match registry::choose_only(&kinds, name, site, exchange)? {
        Ok(chosen) => open_with(chosen, site, ways, exchange).map(Ok),
        Err(why) => Ok(Err(why)),
    }
}

/// The same, with these kinds of transports and these ways of sharing memory.
pub(super) fn open_by(
    site: &Site<'_>,
    kinds: &[&dyn TransportKind],
    ways: Ways,
    exchange: &mut dyn Exchange,
) -> Result<Router> {
    let chosen = registry::choose(kinds, site, exchange)?;
    open_with(chosen, site, ways, exchange)
}

fn open_with(chosen: Chosen, site: &Site<'_>, ways: Ways, exchange: &mut dyn Exchange) -> Result<Router> {
    let Site { me, grid, config, .. } = *site;
    let Chosen { carrier, waits_for_descriptors, opener, refused } = chosen;
    let shm = shm::open::open(me, grid, config, ways, waits_for_descriptors, exchange)?;
    let mut routes = vec![None; grid.nranks()];
    routes[me.index()] = Some(Route::Myself);
    for (index, rank) in shm.ranks().enumerate() {
        routes[rank.index()] = Some(Route::Shm(index));
    }
    let far: Vec<Rank> =
        (0..grid.nranks()).map(Rank::from_index).filter(|rank| routes[rank.index()].is_none()).collect();
    for (index, rank) in far.iter().enumerate() {
        routes[rank.index()] = Some(Route::Network(index));
    }
    let wakeups = shm.wakeups().clone();
    let carrier = (grid.nnodes() > 1).then_some(carrier);
    let network = opener.open(site, &far, &wakeups, exchange)?;
    let alone = shm.ranks().next().is_none();
    let routes = routes.into_iter().flatten().collect();
    Ok(Router {
        routes,
        shm,
        network,
        carrier,
        refused,
        wakeups,
        polls: 0,
        slept: Duration::ZERO,
        busy_at: None,
        alone,
        sent_far: 0,
        providers: Providers::none(),
    })
}

impl Router {
    /// A handle that wakes this rank from any thread.
    pub fn waker(&self) -> Waker {
        Waker::new(self.wakeups.clone())
    }

    /// Whether this rank shares its processors with other ranks of the node.
    pub fn shares_among_ranks(&self) -> bool {
        self.shm.shares_processor(self.on_busy_processors())
    }

    /// Opens the providers that rank 0's settings name; what all ranks know of them. All ranks call it together.
    pub fn open_providers(&mut self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<CommProviders> {
        let (providers, known) = provider::open(site, &self.wakeups, exchange)?;
        self.providers = providers;
        Ok(known)
    }

    /// Has a provider do a call.
    pub fn provide(&mut self, token: Token, by: Provision<'_>, call: NodeCall<'_>) -> Result<Started> {
        self.providers.start(token, by, call)
    }

    /// An error where a call has more of this rank's blocks than its provider takes.
    pub fn check_provided<Space>(&self, by: &Provision<'_, Space>, call: &NodeCall<'_, Space>) -> Result<()> {
        self.providers.check(by, call)
    }

    /// Whether all ranks of this rank's node share a board, so that the node's small calls can be posted on it.
    pub fn has_board(&self) -> bool {
        self.shm.has_board()
    }

    /// Posts our part of a call of all ranks of the one node, each of whose blocks lies in one piece. It completes as token 0.
    #[inline]
    pub fn call_flat(&mut self, envelope: Envelope, call: &FlatCall) -> ShortResult<Started> {
        self.shm.call_flat(envelope, call)
    }

    /// Looks at the board alone.
    #[inline]
    pub fn advance_board(&mut self) -> ShortResult<Started> {
        self.shm.advance_board()
    }

    /// Takes a short message of a rank of this node where it is the next to come; see [`Shm::recv_short`].
    #[inline]
    pub fn recv_short(&mut self, from: Rank, envelope: Envelope, to: Region) -> ShortResult<Started> {
        match self.route(from)? {
            Route::Shm(peer) => self.shm.recv_short(peer, envelope, to),
            Route::Network(_) | Route::Myself => Ok(Started::Busy),
        }
    }

    /// Sends a short message to a rank of this node; see [`Shm::send_short`].
    #[inline]
    pub fn send_short(&mut self, to: Rank, envelope: Envelope, src: Region) -> ShortResult<Started> {
        match self.route(to)? {
            Route::Shm(peer) => self.shm.send_short(peer, envelope, src),
            Route::Network(_) | Route::Myself => Ok(Started::Busy),
        }
    }

    /// What carries messages between nodes, none where there is one node; the same on all ranks.
    pub fn carrier(&self) -> Option<Carrier> {
        self.carrier
    }

    /// Why this carrier was asked for and is not the one, the same on all ranks.
    pub fn refused(&self, carrier: Carrier) -> Option<&str> {
        let known = self.refused.iter().find(|(name, _)| *name == carrier.name());
        known.map(|(_, why)| why.as_str())
    }

    /// Whose device memory messages to other nodes may be given as addresses of.
    pub fn takes_device_memory(&self) -> DeviceMemory {
        self.network.as_ref().map_or_else(DeviceMemory::default, |network| network.takes_device_memory())
    }

    /// Has large messages from now on go by all NICs of the node, where that is so set.
    pub fn set_wide(&mut self, is_wide: bool) {
        self.network.iter_mut().for_each(|network| network.set_wide(is_wide));
    }

    /// A collective begins, which all ranks call.
    pub fn call_begins(&mut self, call: &dyn Fn() -> (CollectiveKind, usize)) {
        self.network.iter_mut().for_each(|network| network.call_begins(call));
    }

    /// It has ended.
    pub fn call_ends(&mut self) {
        self.network.iter_mut().for_each(|network| network.call_ends());
    }

    /// What this rank's link to other nodes delivers, in bytes for each microsecond, where the transport knows that.
    pub fn delivers(&mut self) -> Option<f64> {
        self.network.as_mut().and_then(|network| network.delivers())
    }

    /// The NIC of this rank, where the transport knows it.
    pub fn nic(&self) -> Option<&str> {
        self.network.as_ref().and_then(|network| network.nic())
    }

    /// Bytes that have come from a rank of another node so far, where the transport knows that before a message is complete.
    pub fn received_from(&self, rank: Rank) -> Option<u64> {
        match self.routes.get(rank.index()) {
            Some(Route::Network(peer)) => self.network.as_ref().and_then(|network| network.received(*peer)),
            _ => None,
        }
    }

    /// The NIC of this rank that is down, where the transport knows that.
    pub fn nic_down(&self) -> Option<&str> {
        self.network.as_ref().and_then(|network| network.nic_down())
    }

    /// Bytes that have been sent to other nodes.
    pub fn sent_far(&self) -> u64 {
        self.sent_far
    }

    /// Whether a rank is reached over the network.
    pub fn is_far(&self, rank: Rank) -> bool {
        matches!(self.routes.get(rank.index()), Some(Route::Network(_)))
    }

    /// Whether the connection to a rank tells what of that rank's can still come.
    pub fn tells_what_can_come(&self, rank: Rank) -> bool {
        self.is_far(rank) && self.network.as_ref().is_some_and(|network| network.tells_what_can_come())
    }

    /// Does something on the thread that uses such addresses.
    pub fn run_where_it_is_used(&self, job: Box<dyn FnOnce() + Send>) {
        if let Some(network) = &self.network {
            network.run_where_it_is_used(job);
        }
    }

    /// Whether no thread of ours may use the network while the program is in no call.
    pub fn only_in_calls(&self) -> bool {
        self.network.as_ref().is_some_and(|network| network.only_in_calls())
    }

    /// The ranks whose systems do not have yet everything that was sent to them.
    pub fn undelivered(&mut self) -> Vec<Rank> {
        self.network.as_mut().map_or_else(Vec::new, |network| network.undelivered())
    }

    /// Ends the use of the network; what is still on its way there, to be kept until it has arrived.
    pub fn leave(&mut self) -> Option<Departure> {
        self.providers.close();
        self.network.take().and_then(|network| network.leave())
    }

    /// The ranks that a call on the board waits for.
    pub fn missing(&self) -> Vec<Rank> {
        self.shm.missing()
    }

    #[inline]
    fn route(&self, rank: Rank) -> Result<Route> {
        match self.routes.get(rank.index()) {
            None => Err(Error::Internal(format!("rank {rank} of {}", self.routes.len()))),
            Some(Route::Myself) => Err(Error::Internal(format!("a message of rank {rank} to itself"))),
            Some(route) => Ok(*route),
        }
    }

    /// Changes when a send that was `Busy` may be accepted.
    fn relief(&self) -> u64 {
        self.shm.relief() + self.network.as_ref().map_or(0, |network| network.relief())
    }

    fn network(&mut self) -> Result<&mut dyn Endpoint> {
        match &mut self.network {
            Some(network) => Ok(network.as_mut()),
            None => Err(Error::Internal("a route over the network without one".into())),
        }
    }
}

impl Transport for Router {
    fn send(&mut self, token: Token, to: Rank, envelope: Envelope, src: &[Region]) -> Result<Started> {
        let started = match self.route(to)? {
            Route::Shm(peer) => self.shm.send(peer, token, envelope, src),
            Route::Network(peer) => {
                let started = self.network()?.send(peer, token, envelope, src)?;
                if started != Started::Busy {
                    self.sent_far += src.iter().map(|region| region.len() as u64).sum::<u64>();
                }
                Ok(started)
            }
            Route::Myself => unreachable!("`route` refuses it"),
        }?;
        if started == Started::Busy {
            self.busy_at.get_or_insert(self.relief());
        }
        Ok(started)
    }

    fn recv(&mut self, token: Token, from: Rank, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        match self.route(from)? {
            Route::Shm(peer) => self.shm.recv(peer, token, envelope, sink),
            Route::Network(peer) => self.network()?.recv(peer, token, envelope, sink),
            Route::Myself => unreachable!("`route` refuses it"),
        }
    }

    fn call(&mut self, token: Token, envelope: Envelope, _me: usize, call: NodeCall<'_>) -> Result<Started> {
        self.shm.call(token, envelope, call)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let before = done.len();
        self.shm.poll(done)?;
        self.providers.poll(done)?;
        if let Some(network) = &mut self.network {
            self.polls = self.polls.saturating_add(1);
            if self.polls >= network.polls_per_poll() || self.alone {
                self.polls = 0;
                network.poll(done)?;
            }
        }
        if done.len() > before {
            self.slept = Duration::ZERO;
        }
        Ok(())
    }

    fn give_way(&mut self) -> bool {
        self.wakeups.processors().give_way()
    }

    fn shares_processor(&self) -> bool {
        let has_thread =
            || self.providers.has_thread() || self.network.as_ref().is_some_and(|network| network.has_thread());
        self.shares_among_ranks() || self.shm.shares_with_threads() && has_thread()
    }

    fn on_busy_processors(&self) -> bool {
        self.wakeups.processors().are_busy()
    }

    fn sleep(&mut self, limit: Duration) -> Result<()> {
        self.wakeups.processors().touch();
        self.shm.refresh_sharing();
        if self.busy_at.take().is_some_and(|relief| relief != self.relief()) {
            // A poll took what a `Busy` send waited for, with no token to show for it.
            return Ok(());
        }
        let limit = if self.providers.must_be_polled() { limit.min(PROVIDER_NAP) } else { limit };
        let before = std::time::Instant::now();
        if self.wakeups.announce() && !self.shm.has_work() && !self.providers.has_news() {
            match &mut self.network {
                Some(network) => network.wait(limit)?,
                None => self.wakeups.wait(limit),
            }
        }
        self.wakeups.rise();
        self.slept += before.elapsed();
        if self.slept >= LIVENESS_INTERVAL {
            self.slept = Duration::ZERO;
            self.shm.check_alive()?;
        }
        // The network may have been what woke us: look at it in the next poll.
        self.polls = u32::MAX;
        Ok(())
    }

    fn cancel(&mut self) {
        self.providers.cancel();
        self.shm.cancel();
        if let Some(network) = &mut self.network {
            network.cancel();
        }
    }
}
