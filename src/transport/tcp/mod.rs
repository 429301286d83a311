//! Messages between ranks of different nodes, over TCP.
//!
//! A connection carries frames from the rank that made it; the first one that the lower rank of a pair makes carries both
//! ways, once the other has found it. A rank connects to a peer when it first has to do
//! with it, and as often as configured when the peer wants a large message. Neither waits for the other: what a rank
//! sends to one that has not come yet is kept by the peer's system. See [`peer`] for how messages travel, [`accept`] for
//! who is let in, and [`departure`] for how a rank leaves. Both ends are held to the NICs of their ranks.
#![forbid(unsafe_code)]

mod accept;
mod connection;
mod departure;
pub(crate) mod frame;
mod peer;

use super::lossless::Lossless;
use super::matching::check_usable;
use super::shm::wakeup::Wakeups;
use super::{card, CollectiveKind, Departure, Endpoint, Envelope, Exchange, Opener, Probe, Sink, Site, TransportKind};
use crate::config::TcpNics;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::fork::{self, PerProcess, Unshared};
use crate::memory::Region;
use crate::topo::binding::{Binding, Source};
use crate::topo::{interface, Rank};
use accept::Listener;
use connection::{Body, Connection};
use departure::OpenConnections;
use frame::{Greeting, Password};
use nix::sys::socket::sockopt::IpBindAddressNoPort;
use peer::{Shares, TcpLink, TcpPeer, Way, MADE_AT_LEAST};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::Timespec;
use smallvec::SmallVec;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

const LISTENER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;
const CALLERS: u64 = 1 << 62;
/// Sockets are looked at once in so many polls of shared memory.
const POLLS_PER_SOCKET_POLL: u32 = 8;
/// Polls that look only at what is awaited, to one that asks about all sockets.
const DIRECT_POLLS: u32 = 8;
/// Where more peers are awaited all sockets are asked about at once.
const MOST_AWAITED: usize = 2;
/// The most connections that a rank makes to a peer.
const MAX_CONNECTIONS: usize = 255;
/// Said once in a process.
static UNREACHED: PerProcess<Once> = PerProcess::new(Once::new);

/// The most connections by other NICs that a rank makes to all peers together.
const MOST_FURTHER: usize = 1024;
/// The most NICs that a message goes by.
const MOST_NICS: usize = 16;
/// How long a rank sleeps whose wide messages wait until less of them is on its way.
const ROOM_WAIT: Duration = Duration::from_millis(1);

/// Congestion control that sends at a rate which it has measured, and by timers. Within a host it reaches half of what the host can do.
const PACING: &[u8] = b"bbr";
/// What takes its place within a host, where nothing is congested. Every system has it, and lets all have it.
const UNPACED: &[u8] = b"reno";

/// The TCP side of one rank.
#[derive(Debug)]
pub struct Tcp {
    me: Rank,
    /// Its NIC first, then the others of its node that it may use.
    bindings: Vec<Binding>,
    /// Large messages go by all of them.
    is_wide: bool,
    /// They always do.
    always_wide: bool,
    poller: OwnedFd,
    listener: Listener,
    peers: Vec<TcpPeer>,
    lossless: Lossless,
    completed: Vec<Token>,
    /// Peers whose next frame is waited for, and some for which that was so lately.
    awaited: Vec<usize>,
    /// Polls since all sockets were asked about.
    direct_polls: u32,
    cancelled: bool,
    /// Whether the listener's socket is not watched for now.
    door_is_shut: bool,
    /// Whether a peer may be one that is to be looked at by the clock.
    has_doubtful: bool,
    // The poller watches its doorbell.
    wakeups: Arc<Wakeups>,
}

fn secret() -> Result<Password> {
    let mut secret = [0; 16];
    let got = rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty());
    got.map_err(|error| Error::System(format!("getting random bytes: {error}")))?;
    Ok(secret)
}

fn watch(poller: &OwnedFd, fd: impl AsFd, number: u64) -> Result<()> {
    epoll::add(poller, fd, EventData::new_u64(number), EventFlags::IN)
        .map_err(|error| Error::System(format!("watching a socket: {error}")))
}

fn link_number(peer: usize, way: Way, index: u8) -> u64 {
    (peer as u64) << 9 | u64::from(way == Way::In) << 8 | u64::from(index)
}

fn link_of(number: u64) -> (usize, Way, u8) {
    ((number >> 9) as usize, if number & 0x100 != 0 { Way::In } else { Way::Out }, number as u8)
}

impl Tcp {
    /// Opens a port for the ranks `far`, which are to be reached over TCP, at this rank's NIC. All ranks of the grid call it
    /// together; those that have no such peers get `None`.
    fn open(site: &Site<'_>, far: &[Rank], exchange: &mut dyn Exchange, wakeups: &Arc<Wakeups>) -> Result<Option<Tcp>> {
        let Site { me, grid, config, binding } = *site;
        if far.is_empty() {
            exchange.allgather(Vec::new())?;
            return Ok(None);
        }
        let mut binding = binding()?;
        let further = std::mem::take(&mut binding.further);
        let mut bindings = vec![binding];
        if config.tcp_nics != TcpNics::Own {
            bindings.extend(further.into_iter().take(MOST_NICS - 1));
        }
        let secret = secret()?;
        let connections = config.tcp_connections.clamp(1, MAX_CONNECTIONS);
        // Where there are many ranks each peer may have few; all ranks find the same.
        let further_nics = (MOST_FURTHER / (grid.nranks() * connections)).min(MOST_NICS - 1);
        bindings.truncate(1 + further_nics);
        let own = connections.max(MADE_AT_LEAST.into());
        let expected = far.len() * (own + connections * (bindings.len() - 1));
        let further = bindings[1..].iter().map(|binding| binding.address.addr);
        let listener = Listener::open(bindings[0].address.addr, further, secret, expected)?;
        let addresses = listener.addresses()?;
        for (binding, address) in bindings.iter().zip(&addresses) {
            crate::info!("rank {me} uses {} at {address} for TCP", binding.address.name);
        }
        let told_by_me = addresses.len();
        let cards = exchange.allgather(card::encode(&(secret, addresses)))?;
        let peer = |&rank: &Rank| {
            let told = cards.get(rank.index()).and_then(|told| card::decode::<(Password, Vec<SocketAddr>)>(told));
            let told = told.filter(|(_, addresses)| !addresses.is_empty());
            let (secret, mut addresses) = told.ok_or_else(|| Error::Remote(format!("rank {rank} told no address")))?;
            // Within this host one connection has all there is, and each frame costs.
            let is_within_host = bindings[0].is_of_this_host(addresses[0].ip());
            let further =
                (told_by_me.max(addresses.len()) - 1).min(further_nics).min((MAX_CONNECTIONS - own) / connections);
            addresses.truncate(1 + further);
            let shares = match is_within_host {
                true => Shares { own: 1, further: 0 },
                false => Shares { own: connections, further },
            };
            Ok(TcpPeer::new(me, rank, addresses, secret, shares))
        };
        let peers = far.iter().map(peer).collect::<Result<Vec<TcpPeer>>>()?;
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let poller = crate::process::above_standard(poller);
        listener.sockets().try_for_each(|socket| watch(&poller, socket, LISTENER))?;
        if let Some(doorbell) = wakeups.doorbell() {
            watch(&poller, doorbell, DOORBELL)?;
        }
        let mut tcp = Tcp {
            me,
            bindings,
            is_wide: false,
            always_wide: config.tcp_nics == TcpNics::All,
            poller,
            listener,
            peers,
            lossless: Lossless::new(config),
            completed: Vec::new(),
            awaited: Vec::new(),
            direct_polls: DIRECT_POLLS,
            cancelled: false,
            door_is_shut: false,
            has_doubtful: false,
            wakeups: wakeups.clone(),
        };
        tcp.set_wide(false);
        Ok(Some(tcp))
    }

    /// Begins to connect to a peer, unless that was done.
    fn reach_out(&mut self, peer: usize) -> Result<()> {
        match self.peers[peer].is_reached() {
            true => Ok(()),
            false => self.connect(peer, 0),
        }
    }

    /// A connection to a peer. One that fails shows as a connection that takes nothing.
    #[inline(never)]
    fn connect(&mut self, peer: usize, index: u8) -> Result<()> {
        let TcpPeer { rank, secret, .. } = self.peers[peer];
        let (nic, address) = (self.peers[peer].nic_of(index), self.peers[peer].address(index));
        let binding = &self.bindings[nic % self.bindings.len()];
        let make = || {
            let kind = socket2::Type::STREAM.nonblocking().cloexec();
            let domain = socket2::Domain::for_address(address);
            let hold = fork::hold();
            let socket = socket2::Socket::new(domain, kind, Some(socket2::Protocol::TCP))?;
            Ok(Unshared::new(TcpStream::from(socket), &hold))
        };
        let stream = make().map_err(|error: std::io::Error| {
            Error::System(format!("a socket to reach rank {rank} at {address}: {error}"))
        })?;
        let begin = || {
            let socket = socket2::SockRef::from(&*stream);
            let source = binding.towards(address.ip());
            if source == Source::Device {
                hold_to_nic(binding, &*stream);
            }
            // A later listener, or another connection, may have its port while this one's end keeps it for a minute.
            socket.set_reuse_address(true)?;
            if source != Source::Any {
                // Connections to different ports may share ours: a host has 28,000. Kernels before 4.2 do not know this.
                let _ = nix::sys::socket::setsockopt(&*stream, IpBindAddressNoPort, &true);
                socket.bind(&SocketAddr::new(binding.address.addr, 0).into())?;
            }
            match socket.connect(&address.into()) {
                Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Err(error),
                _ => Ok(()),
            }
        };
        let begun = begin();
        tune(&stream, binding.is_of_this_host(address.ip()))?;
        watch(&self.poller, &*stream, link_number(peer, Way::Out, index))?;
        let mut connection = Connection::outgoing(stream, self.peers[peer].is_shared(index));
        let greeting = Greeting { from: self.me, index, secret };
        connection.push(greeting.encode(), Body::Owned(Vec::new()));
        connection.is_further = self.peers[peer].nic_of(index) > 0;
        if let Err(error) = begun {
            connection.lose_output(format!("it cannot be reached: {error}"));
        }
        self.peers[peer].add(TcpLink { way: Way::Out, index, connection });
        self.write(peer)
    }

    /// Writes what a peer's connections take, and asks to be told when those that are full take more.
    fn write(&mut self, peer: usize) -> Result<()> {
        if self.peers[peer].is_settled() {
            return Ok(());
        }
        let wants_more = self.peers[peer].has_granted() && self.peers[peer].made() < self.peers[peer].wanted();
        if wants_more || (self.peers[peer].has_answers() && self.peers[peer].answers_on().is_none()) {
            let index = self.peers[peer].made() as u8;
            match self.connect(peer, index) {
                // What there is must do, where descriptors are few for example.
                Err(_) if self.peers[peer].nic_of(index) > 0 => self.peers[peer].make_no_more(),
                connected => return connected,
            }
        }
        if self.lossless.measures() {
            let granted = |&&peer: &&usize| self.peers[peer].has_granted();
            self.lossless.sharers = self.awaited.iter().filter(granted).count();
        }
        self.peers[peer].write(&mut self.lossless, &mut self.completed);
        let is_paused = self.peers[peer].is_paused;
        let links = &mut self.peers[peer].links;
        for TcpLink { way, index, connection } in links.iter_mut().filter(|link| link.connection.writes) {
            // Where coding has paused the socket says at once that it takes more.
            let full = !connection.is_flushed() || (is_paused && *way == Way::Out);
            if full != connection.watches_output {
                connection.watches_output = full;
                let mut flags = EventFlags::IN;
                flags.set(EventFlags::OUT, full);
                let number = EventData::new_u64(link_number(peer, *way, *index));
                epoll::modify(&self.poller, &*connection.socket, number, flags)
                    .map_err(|error| Error::System(format!("watching a socket: {error}")))?;
            }
        }
        self.check(peer)
    }

    /// Says that a NIC of this node does not reach a peer.
    #[cold]
    fn tell_unreached(&self, peer: usize, index: u8, why: &str) {
        let (rank, nic) = (self.peers[peer].rank, self.peers[peer].nic_of(index));
        let name = &self.bindings[nic % self.bindings.len()].address.name;
        crate::log::notice(&format!(
            "{name} does not reach rank {rank}: {why}; large messages go by the other NICs (STRATA_TCP_NICS=own keeps all to each \
             rank's own)"
        ));
    }

    /// Stops watching connections that have ended; fails when something is expected that cannot come any more.
    #[inline(never)]
    fn check(&mut self, peer: usize) -> Result<()> {
        let is_torn = |link: &TcpLink| {
            let Connection { reads, ended, output_lost, .. } = &link.connection;
            *reads && ended.is_none() && output_lost.is_some()
        };
        if let Some(torn) = self.peers[peer].links.iter().position(is_torn) {
            // What came before its end is still there to be read.
            self.peers[peer].read(torn, &mut self.lossless, &mut self.completed)?;
        }
        for TcpLink { connection, index, .. } in &self.peers[peer].links {
            if let Some(why) = connection.output_lost.as_ref().filter(|_| connection.is_unreached()) {
                UNREACHED.get().call_once(|| self.tell_unreached(peer, *index, why));
            }
            if connection.ended.is_some() || (!connection.reads && connection.output_lost.is_some()) {
                // A socket that is not watched any more is an error without consequences.
                let _ = epoll::delete(&self.poller, &*connection.socket);
            }
        }
        self.peers[peer].check()?;
        self.has_doubtful |= self.peers[peer].is_doubtful();
        Ok(())
    }

    fn events(&self, limit: Duration) -> Result<SmallVec<[u64; 8]>> {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match epoll::wait(&self.poller, &mut events, Some(&timeout)) {
            Ok((events, _)) => Ok(events.iter().map(|event| event.data.u64()).collect()),
            Err(rustix::io::Errno::INTR) => Ok(SmallVec::new()),
            Err(error) => Err(Error::System(format!("waiting for sockets: {error}"))),
        }
    }

    fn serve(&mut self, number: u64, done: &mut Vec<Token>) -> Result<()> {
        let (peer, way, index) = link_of(number);
        let Some(link) = self.peers[peer].link(way, index) else { return Ok(()) };
        let connection = &mut self.peers[peer].links[link].connection;
        match connection.reads {
            true => self.peers[peer].read(link, &mut self.lossless, done)?,
            false => connection.hear_end(),
        }
        self.write(peer)
    }

    #[inline(never)]
    fn let_in(&mut self) -> Result<()> {
        for (number, socket) in self.listener.let_in() {
            watch(&self.poller, &**socket, CALLERS + number)?;
        }
        self.watch_door()
    }

    /// Watches the listener's socket unless nobody may come in now.
    fn watch_door(&mut self) -> Result<()> {
        let shut = self.listener.closed_until().is_some();
        if shut != self.door_is_shut {
            self.door_is_shut = shut;
            let flags = if shut { EventFlags::empty() } else { EventFlags::IN };
            for socket in self.listener.sockets() {
                epoll::modify(&self.poller, socket, EventData::new_u64(LISTENER), flags)
                    .map_err(|error| Error::System(format!("watching the port: {error}")))?;
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn hear(&mut self, number: u64) -> Result<()> {
        let Some((greeting, socket)) = self.listener.hear(number) else { return Ok(()) };
        let Greeting { from, index, .. } = greeting;
        let is_new = |peer: &TcpPeer| usize::from(index) < peer.most() && peer.link(Way::In, index).is_none();
        let peer = self.peers.iter().position(|peer| peer.rank == from).filter(|&peer| is_new(&self.peers[peer]));
        let Some(peer) = peer else {
            crate::log::write(crate::log::Level::Warn, &format!("connection {index} from rank {from} makes no sense"));
            return Ok(());
        };
        // It was watched as a caller; from now on as a connection.
        epoll::delete(&self.poller, &*socket).map_err(std::io::Error::from)?;
        let caller = socket.peer_addr().map(|caller| caller.ip());
        let ours = socket.local_addr().map(|ours| ours.ip());
        let binding =
            self.bindings.iter().find(|binding| ours.as_ref().is_ok_and(|&ours| binding.address.addr == ours));
        let binding = binding.unwrap_or(&self.bindings[0]);
        if caller.as_ref().is_ok_and(|&caller| binding.towards(caller) == Source::Device) {
            hold_to_nic(binding, &*socket);
        }
        tune(&socket, caller.is_ok_and(|caller| binding.is_of_this_host(caller)))?;
        watch(&self.poller, &*socket, link_number(peer, Way::In, index))?;
        self.peers[peer].add(TcpLink { way: Way::In, index, connection: Connection::incoming(socket) });
        Ok(())
    }

    /// What was posted is to be looked after: a peer's answer is awaited, or a full connection's room.
    fn attend(&mut self, peer: usize, started: Started) {
        match started {
            Started::Done => {}
            Started::Busy => self.direct_polls = DIRECT_POLLS,
            Started::Pending if self.peers[peer].is_awaited => {}
            Started::Pending => {
                self.peers[peer].is_awaited = true;
                self.awaited.push(peer);
            }
        }
    }

    /// Reads where the next awaited frames come, without asking which sockets have something: one call where a rank polls.
    /// False where all sockets are to be asked about.
    fn read_awaited(&mut self, done: &mut Vec<Token>) -> Result<bool> {
        let Tcp { awaited, peers, .. } = self;
        awaited.retain(|&peer| {
            peers[peer].is_awaited = peers[peer].awaits();
            peers[peer].is_awaited
        });
        if self.direct_polls >= DIRECT_POLLS || !(1..=MOST_AWAITED).contains(&self.awaited.len()) {
            return Ok(false);
        }
        for at in 0..self.awaited.len() {
            let peer = self.awaited[at];
            let Some(link) = self.peers[peer].next_input() else { return Ok(false) };
            self.peers[peer].read(link, &mut self.lossless, done)?;
            self.write(peer)?;
        }
        self.direct_polls += 1;
        Ok(true)
    }

    /// Asks about all sockets, and does what is to be done there.
    fn serve_all(&mut self, done: &mut Vec<Token>) -> Result<()> {
        self.direct_polls = 0;
        let events = self.events(Duration::ZERO)?;
        let of_callers = |number: &&u64| (CALLERS..DOORBELL).contains(*number);
        // Callers are heard before their number is looked at.
        events.iter().filter(of_callers).try_for_each(|number| self.hear(number - CALLERS))?;
        for number in events.iter().filter(|number| !of_callers(number)) {
            match *number {
                LISTENER => self.let_in()?,
                DOORBELL => {}
                number => self.serve(number, done)?,
            }
        }
        self.look_at_the_clock()
    }

    /// Whether a wide message waits until less of it is on its way.
    fn waits_for_room(&self) -> bool {
        self.is_wide && self.peers.iter().any(TcpPeer::waits_for_room)
    }

    /// Gives wide messages to connections that have room again, which no socket tells of.
    #[inline(never)]
    fn look_for_room(&mut self) -> Result<()> {
        if !self.is_wide {
            return Ok(());
        }
        (0..self.peers.len()).try_for_each(|peer| match self.peers[peer].waits_for_room() {
            true => self.write(peer),
            false => Ok(()),
        })
    }

    /// Looks at what no socket tells of: places at the listener that became free, peers that have been silent for too long.
    #[inline(never)]
    fn look_at_the_clock(&mut self) -> Result<()> {
        if self.listener.closed_until().is_some_and(|until| Instant::now() >= until) {
            self.let_in()?;
        }
        if std::mem::take(&mut self.has_doubtful) {
            (0..self.peers.len())
                .filter(|&peer| self.peers[peer].is_doubtful())
                .collect::<Vec<_>>()
                .into_iter()
                .try_for_each(|peer| self.check(peer))?;
        }
        Ok(())
    }
}

/// Binds a socket to the NIC. Kernels before 5.7 allow it to the administrator only; then it is bound to the NIC's address all
/// the same, and the kernel's routes decide.
fn hold_to_nic<'a>(binding: &Binding, socket: impl Into<socket2::SockRef<'a>>) {
    let _ = socket.into().bind_device(Some(binding.address.name.as_bytes()));
}

/// Prepares a socket, whose other end may be on this host.
fn tune(socket: &TcpStream, is_within_host: bool) -> Result<()> {
    let tune = || {
        socket.set_nodelay(true)?;
        let socket = socket2::SockRef::from(socket);
        if is_within_host && socket.tcp_congestion().is_ok_and(|name| name.starts_with(PACING)) {
            // One that the system does not let us have is none that we need.
            let _ = socket.set_tcp_congestion(UNPACED);
        }
        let keepalive = socket2::TcpKeepalive::new().with_time(Duration::from_secs(30));
        socket.set_tcp_keepalive(&keepalive.with_interval(Duration::from_secs(10)))
    };
    tune().map_err(|error: std::io::Error| Error::System(format!("preparing a connection: {error}")))
}

/// TCP, which every machine has.
pub struct TcpKind;

/// All ranks use TCP.
struct TcpOpener;

impl TransportKind for TcpKind {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn probe(&self, _: &Site<'_>, _: &mut dyn Exchange) -> Result<Probe> {
        Ok(Probe::Taken(Box::new(TcpOpener)))
    }

    fn waits_for_descriptors(&self) -> bool {
        true
    }
}

impl Opener for TcpOpener {
    fn open(
        self: Box<Self>,
        site: &Site<'_>,
        far: &[Rank],
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<Option<Box<dyn Endpoint>>> {
        let tcp = Tcp::open(site, far, exchange, wakeups)?;
        Ok(tcp.map(|tcp| Box::new(tcp) as Box<dyn Endpoint>))
    }
}

impl Endpoint for Tcp {
    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        check_usable(self.cancelled)?;
        self.reach_out(peer)?;
        let started = self.peers[peer].send(token, envelope, src)?;
        self.attend(peer, started);
        self.write(peer)?;
        Ok(started)
    }

    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        check_usable(self.cancelled)?;
        self.reach_out(peer)?;
        let started = self.peers[peer].recv(token, envelope, sink)?;
        self.attend(peer, started);
        self.write(peer)?;
        Ok(started)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        if !self.read_awaited(done)? {
            self.serve_all(done)?;
        }
        self.look_for_room()?;
        done.append(&mut self.completed);
        Ok(())
    }

    fn polls_per_poll(&self) -> u32 {
        POLLS_PER_SOCKET_POLL
    }

    fn set_wide(&mut self, is_wide: bool) {
        let is_wide = (is_wide || self.always_wide) && self.peers.iter().any(TcpPeer::has_further);
        if std::mem::replace(&mut self.is_wide, is_wide) == is_wide {
            return;
        }
        self.peers.iter_mut().for_each(|peer| peer.set_wide(is_wide));
    }

    fn call_begins(&mut self, call: &dyn Fn() -> (CollectiveKind, usize)) {
        self.lossless.call_begins(call);
    }

    fn call_ends(&mut self) {
        self.lossless.call_ends();
    }

    fn nic(&self) -> Option<&str> {
        self.bindings.first().map(|binding| binding.address.name.as_str())
    }

    fn received(&self, peer: usize) -> Option<u64> {
        self.peers.get(peer).map(TcpPeer::received_bytes)
    }

    fn nic_down(&self) -> Option<&str> {
        // Its own first; others only where messages go by them, too.
        let used = if self.is_wide { self.bindings.len() } else { 1 };
        let mut names = self.bindings.iter().take(used).map(|binding| binding.address.name.as_str());
        names.find(|name| !interface::is_running(name))
    }

    fn relief(&self) -> u64 {
        self.peers.iter().map(TcpPeer::relief).sum()
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        if self.completed.is_empty() {
            let limit = if self.waits_for_room() { limit.min(ROOM_WAIT) } else { limit };
            self.events(self.wakeups.cap(limit))?;
        }
        self.direct_polls = DIRECT_POLLS;
        Ok(())
    }

    fn undelivered(&mut self) -> Vec<Rank> {
        let Tcp { completed: done, lossless, .. } = self;
        let mut owed = |peer: &mut TcpPeer| {
            peer.write(lossless, done);
            (0..peer.links.len()).any(|link| {
                // A peer that has closed the connection wants nothing more.
                let Connection { reads, writes, .. } = peer.links[link].connection;
                let heard = if reads && writes { peer.read(link, lossless, done) } else { Ok(()) };
                let connection = &mut peer.links[link].connection;
                match heard {
                    Ok(()) if reads => {}
                    Ok(()) => connection.hear_end(),
                    Err(error) => connection.lose_output(error.to_string()),
                }
                writes && connection.counts() && connection.undelivered().is_some_and(|bytes| bytes > 0)
            })
        };
        self.peers.iter_mut().filter_map(|peer| owed(peer).then_some(peer.rank)).collect()
    }

    fn leave(self: Box<Self>) -> Option<Departure> {
        let Tcp { me, listener, peers, lossless, .. } = *self;
        if let (original @ 1.., coded) = lossless.totals() {
            crate::info!("rank {me} coded {original} bytes of messages over TCP without loss, which made {coded}");
        }
        Departure::new(me, Box::new(OpenConnections::new(listener, peers)))
    }

    fn tells_what_can_come(&self) -> bool {
        true
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        self.peers.iter_mut().for_each(TcpPeer::cancel);
        self.completed.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_within_the_host_is_not_paced() {
        let socket = || {
            let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap()
        };
        let control = |is_within_host| {
            let socket = socket();
            let name = |socket: &TcpStream| socket2::SockRef::from(socket).tcp_congestion().unwrap();
            // Where the system does not let us have it there is nothing to replace.
            let _ = socket2::SockRef::from(&socket).set_tcp_congestion(PACING);
            let before = name(&socket);
            tune(&socket, is_within_host).unwrap();
            (before, name(&socket))
        };
        let (before, after) = control(false);
        assert_eq!(before, after);
        let (before, after) = control(true);
        assert!(!after.starts_with(PACING), "{before:?}");
        assert_eq!(after.starts_with(UNPACED), before.starts_with(PACING) || before.starts_with(UNPACED));
    }
}
