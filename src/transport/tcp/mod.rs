//! Messages between ranks of different nodes, over TCP.
//!
//! Ranks connect when they first have to do with each other. Of a pair the lower rank connects, as often as configured;
//! a higher rank that needs the connection first *calls*: its connection only asks to be connected to. See [`peer`] for
//! how messages travel and [`accept`] for who is let in. Both ends are held to the NICs of their ranks.
#![forbid(unsafe_code)]

mod accept;
mod connection;
pub(crate) mod frame;
mod peer;

use super::shm::bell::Bells;
use super::{Envelope, Exchange, Network, Sink};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::fork::{self, Unshared};
use crate::memory::{vectored, Arena, Region};
use crate::topo::binding::{Binding, Source};
use crate::topo::Rank;
use accept::Door;
use connection::{Body, Connection};
use frame::{Greeting, Secret, CALL};
use peer::{Link, Peer};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::Timespec;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DOOR: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;
const CALLERS: u64 = 1 << 62;
/// Sockets are looked at once in so many polls of shared memory.
const POLLS_PER_SOCKET_POLL: u32 = 8;
/// How long a rank that leaves waits for its last bytes to arrive.
const LINGER: Duration = Duration::from_secs(2);

/// The TCP side of one rank.
#[derive(Debug)]
pub struct Tcp {
    me: Rank,
    binding: Binding,
    connections: u8,
    poller: OwnedFd,
    door: Door,
    peers: Vec<Peer>,
    completed: Vec<Token>,
    staging: Arena,
    cancelled: bool,
    // The poller watches its doorbell.
    bells: Arc<Bells>,
}

fn secret() -> Result<Secret> {
    let mut secret = [0; 16];
    let got = rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty());
    got.map_err(|error| Error::System(format!("getting random bytes: {error}")))?;
    Ok(secret)
}

fn watch(poller: &OwnedFd, fd: impl AsFd, number: u64) -> Result<()> {
    epoll::add(poller, fd, EventData::new_u64(number), EventFlags::IN)
        .map_err(|error| Error::System(format!("watching a socket: {error}")))
}

fn link_number(peer: usize, index: u8) -> u64 {
    (peer as u64) << 8 | u64::from(index)
}

impl Tcp {
    /// Opens a port for the ranks `far`, which are to be reached over TCP, at the NIC that `binding` finds. All ranks of the grid call it together; those
    /// that have no such peers get `None`.
    pub fn open(
        me: Rank,
        far: &[Rank],
        config: &Config,
        binding: &dyn Fn() -> Result<Binding>,
        exchange: &mut dyn Exchange,
        bells: &Arc<Bells>,
    ) -> Result<Option<Tcp>> {
        if far.is_empty() {
            exchange.allgather(Vec::new())?;
            return Ok(None);
        }
        let binding = binding()?;
        let secret = secret()?;
        let door = Door::open(binding.address.addr, secret)?;
        crate::info!("rank {me} uses {} at {} for TCP", binding.address.name, door.address()?);
        let mut card = secret.to_vec();
        card.extend(door.address()?.to_string().bytes());
        let cards = exchange.allgather(card)?;
        let peer = |&rank: &Rank| {
            let card = cards.get(rank.index()).filter(|card| card.len() > 16);
            let address = card.and_then(|card| std::str::from_utf8(&card[16..]).ok()?.parse::<SocketAddr>().ok());
            match (card, address) {
                (Some(card), Some(address)) => Ok(Peer::new(rank, address, std::array::from_fn(|i| card[i]))),
                _ => Err(Error::Remote(format!("rank {rank} told no address"))),
            }
        };
        let peers = far.iter().map(peer).collect::<Result<Vec<Peer>>>()?;
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        watch(&poller, door.listener(), DOOR)?;
        if let Some(doorbell) = bells.doorbell() {
            watch(&poller, doorbell, DOORBELL)?;
        }
        Ok(Some(Tcp {
            me,
            binding,
            connections: config.tcp_connections.clamp(1, usize::from(CALL) - 1) as u8,
            poller,
            door,
            peers,
            completed: Vec::new(),
            staging: peer::staging(),
            cancelled: false,
            bells: bells.clone(),
        }))
    }

    fn check_usable(&self) -> Result<()> {
        match self.cancelled {
            true => Err(Error::InvalidUsage("the communicator's operations have been cancelled".into())),
            false => Ok(()),
        }
    }

    /// Begins to connect to a peer, unless that was done.
    fn reach_out(&mut self, peer: usize) -> Result<()> {
        if !self.peers[peer].links.is_empty() {
            return Ok(());
        }
        if self.me < self.peers[peer].rank {
            (0..self.connections).try_for_each(|index| self.connect(peer, index))
        } else {
            self.connect(peer, CALL)
        }
    }

    fn connect(&mut self, peer: usize, index: u8) -> Result<()> {
        let Peer { rank, address, secret, .. } = self.peers[peer];
        let begin = || {
            let kind = socket2::Type::STREAM.nonblocking().cloexec();
            let domain = socket2::Domain::for_address(address);
            let stream = {
                let hold = fork::hold();
                Unshared::new(socket2::Socket::new(domain, kind, Some(socket2::Protocol::TCP))?.into(), &hold)
            };
            let socket = socket2::SockRef::from(&*stream);
            let source = self.binding.towards(address.ip());
            if source == Source::Device {
                self.hold_to_nic(&*stream);
            }
            if source != Source::Any {
                socket.bind(&SocketAddr::new(self.binding.address.addr, 0).into())?;
            }
            match socket.connect(&address.into()) {
                Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Err(error),
                _ => Ok(stream),
            }
        };
        let socket = begin().map_err(|error: std::io::Error| {
            Error::Remote(format!("rank {rank} cannot be reached at {address}: {error}"))
        })?;
        let greeting = Greeting { from: self.me, index, secret };
        self.adopt(peer, index, socket)?;
        if let Some(link) = self.peers[peer].links.last_mut() {
            link.connection.push(greeting.encode(), Body::Owned(Vec::new()));
        }
        self.write(peer)
    }

    /// Binds a socket to the NIC. Kernels before 5.7 allow it to the administrator only; then it is bound to the NIC's
    /// address all the same, and the kernel's routes decide.
    fn hold_to_nic<'a>(&self, socket: impl Into<socket2::SockRef<'a>>) {
        let _ = socket.into().bind_device(Some(self.binding.address.name.as_bytes()));
    }

    /// Takes a socket as a connection of a peer.
    fn adopt(&mut self, peer: usize, index: u8, socket: Unshared<TcpStream>) -> Result<()> {
        let tune = || {
            socket.set_nodelay(true)?;
            let keepalive = socket2::TcpKeepalive::new().with_time(Duration::from_secs(30));
            socket2::SockRef::from(&*socket).set_tcp_keepalive(&keepalive.with_interval(Duration::from_secs(10)))
        };
        tune().map_err(|error: std::io::Error| Error::System(format!("preparing a connection: {error}")))?;
        watch(&self.poller, &*socket, link_number(peer, index))?;
        self.peers[peer].relief += 1;
        self.peers[peer].links.push(Link { index, connection: Connection::new(socket) });
        Ok(())
    }

    /// Writes what a peer's connections take, and asks to be told when those that are full take more.
    fn write(&mut self, peer: usize) -> Result<()> {
        self.peers[peer].write(&mut self.completed);
        for Link { index, connection } in &mut self.peers[peer].links {
            let full = !connection.is_flushed() && connection.ended.is_none();
            if full != connection.watches_output && connection.ended.is_none() {
                connection.watches_output = full;
                let mut flags = EventFlags::IN;
                flags.set(EventFlags::OUT, full);
                let number = EventData::new_u64(link_number(peer, *index));
                epoll::modify(&self.poller, &*connection.socket, number, flags)
                    .map_err(|error| Error::System(format!("watching a socket: {error}")))?;
            }
        }
        self.close_ended(peer)
    }

    /// Stops watching connections that have ended; fails when something was expected of the peer.
    fn close_ended(&mut self, peer: usize) -> Result<()> {
        for link in &self.peers[peer].links {
            if link.connection.ended.is_some() {
                // A socket that is not watched any more is an error without consequences.
                let _ = epoll::delete(&self.poller, &*link.connection.socket);
            }
        }
        self.peers[peer].check()
    }

    fn events(&self, limit: Duration) -> Result<Vec<u64>> {
        let mut events = Vec::with_capacity(64);
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match epoll::wait(&self.poller, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::System(format!("waiting for sockets: {error}"))),
        }
        Ok(events.iter().map(|event: &epoll::Event| event.data.u64()).collect())
    }

    fn serve(&mut self, peer: usize, index: u8, done: &mut Vec<Token>) -> Result<()> {
        let links = &self.peers[peer].links;
        let Some(link) = links.iter().position(|link| link.index == index) else { return Ok(()) };
        self.peers[peer].read(link, done)?;
        self.write(peer)
    }

    fn let_in(&mut self) -> Result<()> {
        for (number, socket) in self.door.let_in() {
            watch(&self.poller, &**socket, CALLERS + number)?;
        }
        Ok(())
    }

    fn hear(&mut self, number: u64) -> Result<()> {
        let Some((greeting, socket)) = self.door.hear(number) else { return Ok(()) };
        let Greeting { from, index, .. } = greeting;
        let peer = self.peers.iter().position(|peer| peer.rank == from);
        let may_connect = if index == CALL { self.me < from } else { from < self.me && index < self.connections };
        let known = |peer: usize| self.peers[peer].links.iter().any(|link| link.index == index);
        let Some(peer) = peer.filter(|&peer| may_connect && !known(peer)) else {
            crate::log::write(crate::log::Level::Warn, &format!("connection {index} from rank {from} makes no sense"));
            return Ok(());
        };
        // It was watched as a caller; from now on as a connection.
        epoll::delete(&self.poller, &*socket).map_err(std::io::Error::from)?;
        if socket.peer_addr().is_ok_and(|caller| self.binding.towards(caller.ip()) == Source::Device) {
            self.hold_to_nic(&*socket);
        }
        if index == CALL {
            self.reach_out(peer)?;
        }
        self.adopt(peer, index, socket)
    }
}

impl Network for Tcp {
    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        self.check_usable()?;
        self.reach_out(peer)?;
        let started = self.peers[peer].send(token, envelope, src)?;
        self.write(peer)?;
        Ok(started)
    }

    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        self.check_usable()?;
        self.reach_out(peer)?;
        let started = self.peers[peer].recv(token, envelope, sink, self.staging.region())?;
        self.write(peer)?;
        Ok(started)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        for number in self.events(Duration::ZERO)? {
            match number {
                DOOR => self.let_in()?,
                DOORBELL => {}
                CALLERS.. => self.hear(number - CALLERS)?,
                _ => self.serve((number >> 8) as usize, number as u8, done)?,
            }
        }
        done.append(&mut self.completed);
        Ok(())
    }

    fn polls_per_poll(&self) -> u32 {
        POLLS_PER_SOCKET_POLL
    }

    fn relief(&self) -> u64 {
        self.peers.iter().map(|peer| peer.relief).sum()
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        if self.completed.is_empty() {
            self.events(self.bells.cap(limit))?;
        }
        Ok(())
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        self.peers.iter_mut().for_each(Peer::cancel);
        self.completed.clear();
    }
}

/// Whether the peer has reset the connection; what it has not acknowledged then, it never will.
fn is_reset(socket: &TcpStream) -> bool {
    use rustix::event::{poll, PollFd, PollFlags};
    let mut watched = [PollFd::new(socket, PollFlags::empty())];
    let told = poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    told.is_ok_and(|told| told > 0) && watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

impl Drop for Tcp {
    /// Closing a socket that still has bytes to read resets the connection, and bytes on their way would be lost: so
    /// what was sent must have arrived first.
    fn drop(&mut self) {
        let limit = Instant::now() + LINGER;
        for peer in &mut self.peers {
            loop {
                peer.write(&mut self.completed);
                let waits = |link: &Link| {
                    link.connection.ended.is_none()
                        && link.connection.output_lost.is_none()
                        && !is_reset(&link.connection.socket)
                        && (!link.connection.is_flushed()
                            || vectored::unacknowledged(&*link.connection.socket).is_ok_and(|bytes| bytes > 0))
                };
                if !peer.links.iter().any(waits) || Instant::now() > limit {
                    break;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}
