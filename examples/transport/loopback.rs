//! A toy transport, complete: between ranks of one machine that stand for different nodes, over Unix-domain sockets.
//!
//! Each pair of ranks has one connection. A message is one frame: a header ([`FrameHeader`]) and all of its bytes. It goes
//! as soon as it is sent and waits at the receiver for its receive, which is acknowledged. A channel carries eight messages
//! that are not, then `send` answers `Busy`.
//!
//! A send is complete when the system has the frame, a receive when the bytes are in their place. What a rank has sent can
//! be read when it has gone; then comes the connection's end.
//!
//! ```text
//! rank 0                                  rank 1
//! send(channel 3) -- header, bytes -->    recv(channel 3) takes them,
//!                                         or they wait in `arrived`
//! room for one more <-- Ack(channel 3) --
//! ```
#![forbid(unsafe_code)]

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;
use strata::error::{Error, Result};
use strata::exec::{Started, Token};
use strata::memory::{Arena, Region};
use strata::topo::Rank;
use strata::transport::header::{FrameHeader, FrameKind, HEADER};
use strata::transport::streams::{Posted, Streams};
use strata::transport::{Endpoint, Envelope, Exchange, Opener, Probe, Sink, Site, TransportKind, Wakeups};

/// The transport, as a program registers it.
pub struct Loopback;

/// All ranks use it.
struct LoopbackOpener;

/// Where this process's sockets have their names.
fn place() -> std::io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(format!("{boot} {}", std::fs::read_link("/proc/self/ns/net")?.display()))
}

impl TransportKind for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    /// Ranks can use it that see the same names of sockets: in one network namespace of one machine. A rank that cannot find
    /// out says nothing, since the others wait for what it says.
    fn probe(&self, _: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe> {
        let told = exchange.allgather(place().unwrap_or_default().into_bytes())?;
        Ok(match told.iter().position(|place| place.is_empty() || *place != told[0]) {
            Some(rank) => Probe::Refused(format!("rank {rank} is not known to be on the machine of rank 0")),
            None => Probe::Taken(Box::new(LoopbackOpener)),
        })
    }

    fn waits_for_descriptors(&self) -> bool {
        true
    }
}

impl Opener for LoopbackOpener {
    /// Every rank listens, then each connects to the peers of lower rank, then each takes the connections of the higher ones:
    /// all of them are there by then, so that no step waits for another rank but in the exchange.
    fn open(
        self: Box<Self>,
        site: &Site<'_>,
        far: &[Rank],
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<Option<Box<dyn Endpoint>>> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let name = format!("strata-loopback-{}-{}", std::process::id(), OPENED.fetch_add(1, Ordering::Relaxed));
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        let names = exchange.allgather(name.into_bytes())?;
        let mut peers = Vec::new();
        for &rank in far.iter().filter(|&&rank| rank < site.me) {
            let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&names[rank.index()])?)?;
            stream.write_all(&site.me.0.to_le_bytes())?;
            peers.push(Peer::new(rank, stream)?);
        }
        exchange.allgather(Vec::new())?;
        for _ in far.iter().filter(|&&rank| rank > site.me) {
            let (mut stream, _) = listener.accept()?;
            let mut rank = [0; 4];
            stream.read_exact(&mut rank)?;
            peers.push(Peer::new(Rank(u32::from_le_bytes(rank)), stream)?);
        }
        // The router names a peer by its place in `far`.
        peers.sort_by_key(|peer| far.iter().position(|&rank| rank == peer.rank));
        let endpoint = LoopbackEndpoint { peers, completed: Vec::new(), cancelled: false, wakeups: wakeups.clone() };
        // Without peers the rank need not wait for sockets.
        Ok((!far.is_empty()).then(|| Box::new(endpoint) as Box<dyn Endpoint>))
    }
}

/// One rank's side.
#[derive(Debug)]
struct LoopbackEndpoint {
    peers: Vec<Peer>,
    /// Sends that a later `poll` is to report.
    completed: Vec<Token>,
    cancelled: bool,
    wakeups: Arc<Wakeups>,
}

/// A message that came before its receive was posted.
type Arrival = (Envelope, Arena);

#[derive(Debug)]
struct Peer {
    rank: Rank,
    stream: UnixStream,
    streams: Streams<Arrival>,
    /// Frames on their way out, and the sends that are complete with them.
    output: VecDeque<(Vec<u8>, Option<Token>)>,
    /// Bytes of the first frame of `output` that have been written.
    written: usize,
    /// Bytes that have come and are no whole frame yet.
    input: Vec<u8>,
    /// Why nothing can come any more.
    ended: Option<String>,
    /// Acknowledgements that have come.
    relief: u64,
}

impl Peer {
    fn new(rank: Rank, stream: UnixStream) -> Result<Peer> {
        stream.set_nonblocking(true)?;
        let (streams, output, input) = (Streams::default(), VecDeque::new(), Vec::new());
        Ok(Peer { rank, stream, streams, output, written: 0, input, ended: None, relief: 0 })
    }

    fn push(&mut self, kind: FrameKind, envelope: Envelope, src: &[Region], token: Option<Token>) {
        let len: usize = src.iter().map(Region::len).sum();
        let head = FrameHeader { envelope, bytes: len as u64, body: len as u64, ..FrameHeader::about(kind, 0) };
        let mut bytes = head.encode().to_vec();
        bytes.resize(HEADER + len, 0);
        let mut rest = &mut bytes[HEADER..];
        for region in src {
            let (part, after) = rest.split_at_mut(region.len());
            region.read(part);
            rest = after;
        }
        self.output.push_back((bytes, token));
    }

    /// Writes what the system takes.
    fn write(&mut self, done: &mut Vec<Token>) {
        while let Some((bytes, token)) = self.output.front() {
            match self.stream.write(&bytes[self.written..]) {
                Ok(len) => self.written += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Where the peer has gone, reading tells it, after all that the peer has sent.
                Err(_) => return,
            }
            if self.written == bytes.len() {
                done.extend(*token);
                self.output.pop_front();
                self.written = 0;
            }
        }
    }

    /// Reads what has come.
    fn read(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let mut bytes = [0; 64 << 10];
        while self.ended.is_none() {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.ended = Some("it has closed the connection".to_string()),
                Ok(len) => {
                    self.input.extend_from_slice(&bytes[..len]);
                    self.take_frames(done)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => self.ended = Some(error.to_string()),
            }
        }
        Ok(())
    }

    fn take_frames(&mut self, done: &mut Vec<Token>) -> Result<()> {
        while let Some(head) = self.input.first_chunk::<HEADER>() {
            let head = FrameHeader::decode(head).filter(|head| head.body <= usize::MAX as u64 / 2);
            let head = head.ok_or_else(|| Error::Remote(format!("rank {} sent what is no frame", self.rank)))?;
            let end = HEADER + head.body as usize;
            let Some(bytes) = self.input.get(HEADER..end) else { break };
            let stream = self.streams.at(head.envelope.channel);
            if head.kind == FrameKind::Ack {
                stream.credit.large_done();
                self.relief += 1;
            } else {
                let mut body = Arena::new(bytes.len());
                body.region().write(bytes);
                let arrival = (head.envelope, body);
                match stream.posted.pop_front() {
                    None => stream.arrived.push_back(arrival),
                    Some(posted) => {
                        self.deliver(&posted, arrival)?;
                        done.push(posted.token);
                    }
                }
            }
            self.input.drain(..end);
        }
        Ok(())
    }

    /// Fails where the message is not the one that is expected (`InvalidUsage`); else it goes where it belongs.
    fn deliver(&mut self, posted: &Posted, (envelope, mut body): Arrival) -> Result<()> {
        posted.check(self.rank, envelope, body.len())?;
        posted.target.consume(0, body.region());
        self.push(FrameKind::Ack, envelope, &[], None);
        Ok(())
    }

    /// Fails when the peer has gone and something is expected of it or owed to it.
    fn check(&self) -> Result<()> {
        let owes = || self.output.iter().any(|(_, token)| token.is_some());
        match &self.ended {
            Some(why) if self.streams.any_posted() || owes() => Err(self.gone(why)),
            _ => Ok(()),
        }
    }

    fn gone(&self, why: &str) -> Error {
        Error::Remote(format!("rank {} is gone: {why}", self.rank))
    }
}

impl LoopbackEndpoint {
    /// A peer, unless the operations have been cancelled.
    fn peer(&mut self, place: usize) -> Result<(&mut Peer, &mut Vec<Token>)> {
        match self.cancelled {
            true => Err(Error::InvalidUsage("the communicator's operations have been cancelled".into())),
            false => Ok((&mut self.peers[place], &mut self.completed)),
        }
    }
}

impl Endpoint for LoopbackEndpoint {
    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        let (peer, completed) = self.peer(peer)?;
        if let Some(why) = &peer.ended {
            return Err(peer.gone(why));
        }
        let credit = &mut peer.streams.at(envelope.channel).credit;
        if !credit.takes_large() {
            return Ok(Started::Busy);
        }
        credit.large_sent();
        peer.push(FrameKind::Small, envelope, src, Some(token));
        peer.write(completed);
        Ok(Started::Pending)
    }

    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        let (peer, completed) = self.peer(peer)?;
        let posted = Posted::new(token, envelope, sink);
        let stream = peer.streams.at(envelope.channel);
        let Some(arrival) = stream.arrived.pop_front() else {
            stream.posted.push_back(posted);
            return Ok(Started::Pending);
        };
        peer.deliver(&posted, arrival)?;
        peer.write(completed);
        Ok(Started::Done)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        for peer in &mut self.peers {
            peer.read(done)?;
            peer.write(done);
            peer.check()?;
        }
        done.append(&mut self.completed);
        Ok(())
    }

    /// A poll is a system call for each peer.
    fn polls_per_poll(&self) -> u32 {
        8
    }

    fn relief(&self) -> u64 {
        self.peers.iter().map(|peer| peer.relief).sum()
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        if !self.completed.is_empty() {
            return Ok(());
        }
        let mut awaited = Vec::new();
        for peer in self.peers.iter().filter(|peer| peer.ended.is_none()) {
            let output = if peer.output.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            awaited.push(PollFd::new(&peer.stream, PollFlags::IN | output));
        }
        awaited.extend(self.wakeups.doorbell().map(|doorbell| PollFd::new(doorbell, PollFlags::IN)));
        let limit = self.wakeups.cap(limit);
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whatever ended it, the next poll looks.
        let _ = poll(&mut awaited, Some(&limit));
        Ok(())
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        self.completed.clear();
        for peer in &mut self.peers {
            // In the middle of a frame the connection is of no use any more. One that has ended cannot be shut down.
            let _ = peer.stream.shutdown(Shutdown::Both);
            peer.ended = Some("its operations have been cancelled".to_string());
            peer.streams.clear();
            peer.output.clear();
        }
    }

    fn tells_what_can_come(&self) -> bool {
        true
    }
}
