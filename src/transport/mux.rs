//! One transport for all peers: shared memory for those of this node, TCP for the others.
#![forbid(unsafe_code)]

use super::shm::bell::{Bells, Waker};
use super::shm::open::Ways;
use super::shm::{self, Shm};
use super::tcp::Tcp;
use super::{Envelope, Exchange, NodeCall, Sink, Transport};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::Region;
use crate::topo::binding::Binding;
use crate::topo::{Grid, Rank};
use std::sync::Arc;
use std::time::Duration;

/// Sockets are looked at once in so many polls of shared memory.
const POLLS_PER_SOCKET_POLL: u32 = 8;
/// After so much sleep without an event, look whether the peers still live.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy)]
enum Route {
    Myself,
    Shm(usize),
    Tcp(usize),
}

/// The transport of one rank of one communicator.
#[derive(Debug)]
pub struct Mux {
    routes: Vec<Route>,
    shm: Shm,
    tcp: Option<Tcp>,
    bells: Arc<Bells>,
    polls: u32,
    slept: Duration,
    busy_at: Option<u64>,
    oversubscribed: bool,
    alone: bool,
}

/// Opens the transport between all ranks of `grid`. All ranks call it together; `exchange` is used for a few rounds.
/// `binding` finds the NIC to other nodes; it is called only where one is needed.
pub fn open(
    me: Rank,
    grid: &Grid,
    config: &Config,
    binding: &dyn Fn() -> Result<Binding>,
    exchange: &mut dyn Exchange,
) -> Result<Mux> {
    open_by(me, grid, config, binding, exchange, Ways { proc: true, file: true })
}

pub(super) fn open_by(
    me: Rank,
    grid: &Grid,
    config: &Config,
    binding: &dyn Fn() -> Result<Binding>,
    exchange: &mut dyn Exchange,
    ways: Ways,
) -> Result<Mux> {
    let shm = shm::open::open(me, grid, config, ways, exchange)?;
    let mut routes = vec![None; grid.nranks()];
    routes[me.index()] = Some(Route::Myself);
    for (index, rank) in shm.ranks().enumerate() {
        routes[rank.index()] = Some(Route::Shm(index));
    }
    let far: Vec<Rank> =
        (0..grid.nranks()).map(Rank::from_index).filter(|rank| routes[rank.index()].is_none()).collect();
    for (index, rank) in far.iter().enumerate() {
        routes[rank.index()] = Some(Route::Tcp(index));
    }
    let bells = shm.bells().clone();
    let tcp = Tcp::open(me, &far, config, binding, exchange, &bells)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let oversubscribed = grid.members(grid.node(me)).len() > processors;
    let alone = shm.ranks().next().is_none();
    let routes = routes.into_iter().flatten().collect();
    Ok(Mux { routes, shm, tcp, bells, polls: 0, slept: Duration::ZERO, busy_at: None, oversubscribed, alone })
}

impl Mux {
    /// A handle that wakes this rank from any thread.
    pub fn waker(&self) -> Waker {
        Waker::new(self.bells.clone())
    }

    /// Whether this node has more ranks than processors, so that a waiting rank should give way early.
    pub fn oversubscribed(&self) -> bool {
        self.oversubscribed
    }

    /// Whether all ranks of this rank's node share a board, so that the node's small calls can be posted on it.
    pub fn has_board(&self) -> bool {
        self.shm.has_board()
    }

    /// The ranks that a call on the board waits for.
    pub fn missing(&self) -> Vec<Rank> {
        self.shm.missing()
    }

    fn route(&self, rank: Rank) -> Result<Route> {
        match self.routes.get(rank.index()) {
            None => Err(Error::Internal(format!("rank {rank} of {}", self.routes.len()))),
            Some(Route::Myself) => Err(Error::Internal(format!("a message of rank {rank} to itself"))),
            Some(route) => Ok(*route),
        }
    }

    /// Changes when a send that was `Busy` may be accepted.
    fn relief(&self) -> u64 {
        self.shm.relief() + self.tcp.as_ref().map_or(0, Tcp::relief)
    }

    fn tcp(&mut self) -> Result<&mut Tcp> {
        self.tcp.as_mut().ok_or_else(|| Error::Internal("a route over TCP without TCP".into()))
    }
}

impl Transport for Mux {
    fn send(&mut self, token: Token, to: Rank, envelope: Envelope, src: &[Region]) -> Result<Started> {
        let started = match self.route(to)? {
            Route::Shm(peer) => self.shm.send(peer, token, envelope, src),
            Route::Tcp(peer) => self.tcp()?.send(peer, token, envelope, src),
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
            Route::Tcp(peer) => self.tcp()?.recv(peer, token, envelope, sink),
            Route::Myself => unreachable!("`route` refuses it"),
        }
    }

    fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        self.shm.call(token, envelope, call)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let before = done.len();
        self.shm.poll(done)?;
        if let Some(tcp) = &mut self.tcp {
            self.polls = self.polls.wrapping_add(1);
            if self.polls % POLLS_PER_SOCKET_POLL == 0 || self.alone {
                tcp.poll(done)?;
            }
        }
        if done.len() > before {
            self.slept = Duration::ZERO;
        }
        Ok(())
    }

    fn sleep(&mut self, limit: Duration) -> Result<()> {
        if self.busy_at.take().is_some_and(|relief| relief != self.relief()) {
            // A poll took what a `Busy` send waited for, with no token to show for it.
            return Ok(());
        }
        let before = std::time::Instant::now();
        if self.bells.announce() && !self.shm.has_work() {
            match &mut self.tcp {
                Some(tcp) => tcp.wait(self.bells.cap(limit))?,
                None => self.bells.wait(limit),
            }
        }
        self.bells.rise();
        self.slept += before.elapsed();
        if self.slept >= LIVENESS_INTERVAL {
            self.slept = Duration::ZERO;
            self.shm.check_alive()?;
        }
        // The sockets may have been what woke us: look at them in the next poll.
        self.polls = POLLS_PER_SOCKET_POLL - 1;
        Ok(())
    }

    fn cancel(&mut self) {
        self.shm.cancel();
        if let Some(tcp) = &mut self.tcp {
            tcp.cancel();
        }
    }
}
