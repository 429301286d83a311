//! One peer on another node: the connections both ways and the messages between it and us.
//!
//! Headers and small messages keep to a rank's first connection, so they stay in order. A large message is announced
//! there; when its receive has been posted the receiver grants it on its own first connection, and the bytes come in
//! stripes over whichever connections have room. So a connection carries nothing that its reader has no place for, and
//! no stream blocks another.
//!
//! A message is sent when the system has all its bytes. As nothing ever comes back on the connection, the system then
//! delivers them whatever becomes of this rank, and the receiver finds them before the connection's end.
#![forbid(unsafe_code)]

use super::connection::{Body, Connection, Ended, Inbound};
use super::frame::Password;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{Arena, Bytes, Region};
use crate::plan::Channel;
use crate::topo::Rank;
use crate::transport::header::{FrameHeader, FrameKind, HEADER, NO_ID};
use crate::transport::streams::{Posted, Streams};
use crate::transport::target::Pieces;
use crate::transport::{Envelope, Sink};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Messages of at most this many bytes travel with their header.
pub const SMALL: usize = 32 << 10;
/// Bytes of a large message in one frame.
const STRIPE: usize = 256 << 10;
/// Bytes read from one connection before others get their turn.
const TURN: usize = 1 << 20;
/// Small messages stop when so many bytes wait to be written.
const MAX_QUEUED: usize = 1 << 20;
/// How long a peer that listens no more is still expected to be heard: connections that it made before may yet come in.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// The same for a peer of which no connection has come in at all.
const FIRST_WORDS: Duration = Duration::from_secs(1);

/// A message that came before its receive was posted.
#[derive(Debug)]
struct Arrival {
    header: FrameHeader,
    body: Vec<u8>,
}

/// A large message on its way out.
#[derive(Debug)]
struct Outgoing {
    token: Token,
    channel: Channel,
    src: Pieces,
    striped: usize,
    written: usize,
}

/// A large message on its way in.
#[derive(Debug)]
struct Inflow {
    posted: Posted,
    received: usize,
}

/// A connection and its number among those from the rank that made it.
#[derive(Debug)]
pub struct TcpLink {
    /// The number.
    pub index: u8,
    /// The connection.
    pub connection: Connection,
}

/// A peer.
#[derive(Debug)]
pub struct TcpPeer {
    /// Its rank.
    pub rank: Rank,
    /// Where it listens.
    pub address: SocketAddr,
    /// What it wants to hear first.
    pub secret: Password,
    /// Our connections to it.
    pub output: Vec<TcpLink>,
    /// Its connections to us.
    pub input: Vec<TcpLink>,
    streams: Streams<Arrival>,
    outgoing: BTreeMap<u64, Outgoing>,
    marks: BTreeMap<u64, Channel>,
    granted: VecDeque<u64>,
    inflows: BTreeMap<u64, Inflow>,
    next_id: u64,
    /// Since when it is known to send nothing more although something is expected.
    silent_since: Option<Instant>,
    /// Changes when a send that was `Busy` may be accepted.
    pub relief: u64,
}

impl TcpPeer {
    /// A peer to which there is no connection yet.
    pub fn new(rank: Rank, address: SocketAddr, secret: Password) -> TcpPeer {
        TcpPeer {
            rank,
            address,
            secret,
            output: Vec::new(),
            input: Vec::new(),
            streams: Streams::default(),
            outgoing: BTreeMap::new(),
            marks: BTreeMap::new(),
            granted: VecDeque::new(),
            inflows: BTreeMap::new(),
            next_id: 0,
            silent_since: None,
            relief: 0,
        }
    }

    fn control(&mut self) -> Option<&mut Connection> {
        self.output.first_mut().map(|link| &mut link.connection)
    }

    /// Whether it takes nothing more: it has closed a connection of ours, or refused it.
    fn takes_nothing(&self) -> bool {
        self.output.iter().any(|link| link.connection.output_lost.is_some())
    }

    /// Whether granted messages wait, for which there should be all connections.
    pub fn has_granted(&self) -> bool {
        !self.granted.is_empty()
    }

    fn gone(&self) -> Error {
        let broken = self.input.iter().find_map(|link| match &link.connection.ended {
            Some(Ended::Broken(why) | Ended::Reset(why)) => Some(why.as_str()),
            _ => None,
        });
        let lost = || self.output.iter().find_map(|link| link.connection.output_lost.as_deref());
        let why = broken.or_else(lost).unwrap_or("it has closed its connections");
        Error::Remote(format!("rank {} at {} has left the communicator or died: {why}", self.rank, self.address))
    }

    fn take_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Posts a message.
    pub fn send(&mut self, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        if self.takes_nothing() {
            return Err(self.gone());
        }
        let bytes: usize = src.iter().map(Region::len).sum();
        if self.control().is_none_or(|control| control.queued() > MAX_QUEUED) {
            return Ok(Started::Busy);
        }
        let credit = &self.streams.at(envelope.channel).credit;
        let small = bytes <= SMALL;
        let marked = small && credit.next_is_marked();
        if !(if small { credit.takes_small() } else { credit.takes_large() }) {
            return Ok(Started::Busy);
        }
        let id = if marked || !small { self.take_id() } else { NO_ID };
        let kind = if small { FrameKind::Small } else { FrameKind::Large };
        let body = if small { bytes as u64 } else { 0 };
        let head = FrameHeader { kind, envelope, bytes: bytes as u64, id, body, nonce: 0 }.encode();
        let channel = envelope.channel;
        if marked {
            self.marks.insert(id, channel);
        }
        if small {
            self.streams.at(channel).credit.small_sent();
            let written = self.control().is_some_and(|control| control.push_copy(head, src, Some(token)));
            return Ok(if written { Started::Done } else { Started::Pending });
        }
        self.streams.at(channel).credit.large_sent();
        let src = Pieces::new(src);
        self.outgoing.insert(id, Outgoing { token, channel, src, striped: 0, written: 0 });
        self.control().map(|control| control.push_copy(head, &[], None));
        Ok(Started::Pending)
    }

    /// Posts a receive. `staging` has room for a small message.
    pub fn recv(&mut self, token: Token, envelope: Envelope, sink: Sink<'_>, staging: Bytes<'_>) -> Result<Started> {
        let posted = Posted::new(token, envelope, sink);
        let stream = self.streams.at(envelope.channel);
        let Some(Arrival { header, body }) = stream.arrived.pop_front() else {
            stream.posted.push_back(posted);
            return Ok(Started::Pending);
        };
        if header.kind == FrameKind::Large {
            self.grant(posted, &header)?;
            return Ok(Started::Pending);
        }
        let staged = staging.part(0, body.len());
        staged.write(&body);
        self.deliver(&posted, &header, staged)?;
        Ok(Started::Done)
    }

    /// Answers on our own connection, which stands since a receive was posted. A peer that takes nothing more needs no
    /// answer; whether something is still expected of it, [`check`](TcpPeer::check) finds out.
    fn reply(&mut self, kind: FrameKind, id: u64) {
        self.control().map(|control| control.push_copy(FrameHeader::about(kind, id).encode(), &[], None));
    }

    fn deliver(&mut self, posted: &Posted, header: &FrameHeader, body: Bytes<'_>) -> Result<()> {
        posted.check(self.rank, header.envelope, header.bytes as usize)?;
        posted.target.consume(0, body);
        if header.id != NO_ID {
            self.reply(FrameKind::Ack, header.id);
        }
        Ok(())
    }

    fn grant(&mut self, posted: Posted, header: &FrameHeader) -> Result<()> {
        posted.check(self.rank, header.envelope, header.bytes as usize)?;
        self.inflows.insert(header.id, Inflow { posted, received: 0 });
        self.reply(FrameKind::Grant, header.id);
        Ok(())
    }

    fn nonsense(&self, what: &str) -> Error {
        Error::Internal(format!("rank {} sent {what}", self.rank))
    }

    /// Reads from one connection and does what its frames say. What has been read ahead is always worked off: the socket
    /// will not tell of it again.
    pub fn read(&mut self, link: usize, done: &mut Vec<Token>) -> Result<()> {
        let mut budget = TURN;
        loop {
            let connection = &mut self.input[link].connection;
            let spent = budget == 0;
            if connection.ended.is_some() || (spent && !connection.holds(1)) {
                return Ok(());
            }
            if let Some(Inbound { id, .. }) = connection.inbound {
                let Some(inflow) = self.inflows.get_mut(&id) else {
                    return Err(self.nonsense("bytes nobody asked for"));
                };
                if spent && !connection.holds(inflow.posted.target.grain()) {
                    return Ok(());
                }
                let Some(got) = connection.read_data(&inflow.posted.target) else { return Ok(()) };
                inflow.received += got;
                budget = budget.saturating_sub(got);
                if inflow.received == inflow.posted.target.bytes() {
                    done.push(inflow.posted.token);
                    self.inflows.remove(&id);
                }
                continue;
            }
            let Some(head) = connection.peek(HEADER) else {
                if spent || !connection.fill() {
                    return Ok(());
                }
                continue;
            };
            let mut bytes = [0; HEADER];
            head.read(&mut bytes);
            let Some(header) = FrameHeader::decode(&bytes) else {
                return Err(self.nonsense("a frame of no known kind"));
            };
            if header.kind != FrameKind::Small {
                connection.skip(HEADER);
                self.take_header(link, &header)?;
                continue;
            }
            if header.body as usize > SMALL {
                return Err(self.nonsense("a small message that is too long"));
            }
            let len = HEADER + header.body as usize;
            let Some((mut buffer, start)) = connection.lend(len) else {
                if spent || !connection.fill() {
                    return Ok(());
                }
                continue;
            };
            connection.skip(len);
            let taken = self.take_small(&header, buffer.region().part(start + HEADER, len - HEADER), done);
            self.input[link].connection.give_back(buffer);
            taken?;
            budget = budget.saturating_sub(len);
        }
    }

    fn take_small(&mut self, header: &FrameHeader, body: Bytes<'_>, done: &mut Vec<Token>) -> Result<()> {
        let stream = self.streams.at(header.envelope.channel);
        match stream.posted.pop_front() {
            Some(posted) => {
                self.deliver(&posted, header, body)?;
                done.push(posted.token);
            }
            None => {
                let mut bytes = vec![0; body.len()];
                body.read(&mut bytes);
                stream.arrived.push_back(Arrival { header: *header, body: bytes });
            }
        }
        Ok(())
    }

    fn take_header(&mut self, link: usize, header: &FrameHeader) -> Result<()> {
        match header.kind {
            FrameKind::Large => {
                let stream = self.streams.at(header.envelope.channel);
                match stream.posted.pop_front() {
                    Some(posted) => self.grant(posted, header)?,
                    None => stream.arrived.push_back(Arrival { header: *header, body: Vec::new() }),
                }
            }
            FrameKind::Grant if self.outgoing.contains_key(&header.id) => self.granted.push_back(header.id),
            FrameKind::Ack => match self.marks.remove(&header.id) {
                Some(channel) => {
                    self.streams.at(channel).credit.mark_done();
                    self.relief += 1;
                }
                None => return Err(self.nonsense("an acknowledgement of nothing")),
            },
            FrameKind::Data => {
                let Some(inflow) = self.inflows.get(&header.id) else {
                    return Err(self.nonsense("bytes nobody asked for"));
                };
                let (offset, left) = (header.bytes as usize, header.body as usize);
                let fits = offset.checked_add(left).is_some_and(|end| end <= inflow.posted.target.bytes());
                if !fits || left == 0 {
                    return Err(self.nonsense("bytes beyond the end of a message"));
                }
                self.input[link].connection.inbound = Some(Inbound { id: header.id, offset, left });
            }
            _ => return Err(self.nonsense("an answer to no message")),
        }
        Ok(())
    }

    /// Writes what the connections take: queued frames, then stripes of granted messages.
    pub fn write(&mut self, done: &mut Vec<Token>) {
        let TcpPeer { output, outgoing, granted, streams, relief, .. } = self;
        for link in output.iter_mut().filter(|link| link.connection.output_lost.is_none()) {
            let connection = &mut link.connection;
            loop {
                if connection.is_flushed() {
                    if let Some(&id) = granted.front() {
                        let message = outgoing.get_mut(&id).expect("granted messages are still here");
                        let (offset, all) = (message.striped, message.src.bytes());
                        let len = STRIPE.min(all - offset);
                        message.striped += len;
                        let head = FrameHeader {
                            bytes: offset as u64,
                            body: len as u64,
                            ..FrameHeader::about(FrameKind::Data, id)
                        };
                        connection.push(head.encode(), Body::Part { id, offset, len });
                        if message.striped == all {
                            granted.pop_front();
                        }
                    }
                }
                if connection.is_flushed() {
                    break;
                }
                *relief += 1;
                let mut left = smallvec::SmallVec::<[(u64, usize); 4]>::new();
                let message = |id| outgoing.get(&id).map(|message| &message.src);
                connection.flush(message, |id, bytes| left.push((id, bytes)), done);
                for (id, bytes) in left {
                    let Some(message) = outgoing.get_mut(&id) else { continue };
                    message.written += bytes;
                    if message.written == message.src.bytes() {
                        done.push(message.token);
                        streams.at(message.channel).credit.large_done();
                        outgoing.remove(&id);
                    }
                }
                if !connection.is_flushed() || connection.output_lost.is_some() {
                    break;
                }
            }
        }
    }

    /// Fails when the peer is gone and something is still expected of it: at once where it will take what it is to get
    /// no more, or broke off; where it only falls silent, when what it said before has had time to come in.
    pub fn check(&mut self) -> Result<()> {
        let is_owed = !self.outgoing.is_empty() || self.output.iter().any(|link| link.connection.owes());
        let is_broken = self.input.iter().any(|link| matches!(link.connection.ended, Some(Ended::Broken(_))));
        let owes = !self.inflows.is_empty() || self.streams.any_posted();
        let silent = self.takes_nothing() && self.input.iter().all(|link| link.connection.ended.is_some());
        if (is_owed && self.takes_nothing()) || (owes && is_broken) {
            return Err(self.gone());
        }
        if !owes || !silent {
            self.silent_since = None;
            return Ok(());
        }
        let patience = if self.input.is_empty() { FIRST_WORDS } else { LAST_WORDS };
        match self.silent_since.get_or_insert_with(Instant::now).elapsed() < patience {
            true => Ok(()),
            false => Err(self.gone()),
        }
    }

    /// Whether it is known to send nothing more although something is expected.
    pub fn is_doubtful(&self) -> bool {
        self.silent_since.is_some()
    }

    /// The connections on which something may be on its way, with whom they lead to.
    pub fn take_output(&mut self) -> impl Iterator<Item = (Rank, Connection)> {
        let rank = self.rank;
        std::mem::take(&mut self.output).into_iter().map(move |link| (rank, link.connection))
    }

    /// Forgets everything. Connections in the middle of a message are of no use any more, so all are closed.
    pub fn cancel(&mut self) {
        self.output.clear();
        self.input.clear();
        self.streams.clear();
        self.outgoing.clear();
        self.marks.clear();
        self.granted.clear();
        self.inflows.clear();
    }
}

/// Room for a small message.
pub fn staging() -> Arena {
    Arena::new(SMALL)
}
