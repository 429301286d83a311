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
use crate::memory::Region;
use crate::topo::Rank;
use crate::transport::header::{FrameHeader, FrameKind, HEADER};
use crate::transport::matching::{Fetch, Matching, Received};
use crate::transport::{Envelope, Sink};
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
/// Messages with a number at a time, which is no limit in practice.
const MAX_NUMBERED: usize = 1 << 20;
/// How long a peer that listens no more is still expected to be heard: connections that it made before may yet come in.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// The same for a peer of which no connection has come in at all.
const FIRST_WORDS: Duration = Duration::from_secs(1);

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
    matching: Matching,
    /// Since when it is known to send nothing more although something is expected.
    silent_since: Option<Instant>,
    /// Times that its connections were written.
    writes: u64,
    /// Whether it is among those that are [awaited](Self::awaits).
    pub is_awaited: bool,
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
            matching: Matching::new(rank, MAX_NUMBERED),
            silent_since: None,
            writes: 0,
            is_awaited: false,
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
        self.matching.has_granted()
    }

    /// Whether its next frame is waited for.
    pub fn awaits(&self) -> bool {
        self.matching.expects() || self.matching.owes()
    }

    /// The connection that its next frame comes on, none where that may be any.
    pub fn next_input(&self) -> Option<usize> {
        if self.matching.has_inflows() {
            return None;
        }
        self.input.iter().position(|link| link.index == 0)
    }

    /// Whether nothing waits to be written, and all connections stand.
    pub fn is_settled(&self) -> bool {
        let is_idle = |link: &TcpLink| link.connection.is_idle();
        !self.has_granted() && self.silent_since.is_none() && self.output.iter().chain(&self.input).all(is_idle)
    }

    /// Changes when a send that was `Busy` may be accepted.
    pub fn relief(&self) -> u64 {
        self.matching.relief() + self.writes
    }

    /// Adds a connection of ours, which will be written.
    pub fn add_output(&mut self, link: TcpLink) {
        self.writes += 1;
        self.output.push(link);
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

    /// Posts a message.
    pub fn send(&mut self, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        if self.takes_nothing() {
            return Err(self.gone());
        }
        let TcpPeer { output, matching, .. } = self;
        let Some(TcpLink { connection: control, .. }) = output.first_mut() else { return Ok(Started::Busy) };
        let (bytes, channel) = (src.iter().map(Region::len).sum::<usize>(), envelope.channel);
        let small = bytes <= SMALL;
        let takes = if small { matching.takes_short(channel) } else { matching.takes_long(channel) };
        if !takes || control.queued() > MAX_QUEUED {
            return Ok(Started::Busy);
        }
        let head = |kind, id, body| FrameHeader { kind, envelope, bytes: bytes as u64, id, body, nonce: 0 }.encode();
        if small {
            let id = matching.short_sent(channel);
            let written = control.push_copy(head(FrameKind::Small, id, bytes as u64), src, Some(token));
            return Ok(if written { Started::Done } else { Started::Pending });
        }
        let id = matching.long_sent(channel, token, src);
        control.push_copy(head(FrameKind::Large, id, 0), &[], None);
        Ok(Started::Pending)
    }

    /// Posts a receive.
    pub fn recv(&mut self, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        match self.matching.recv(token, envelope, sink)? {
            Received::Waits => {}
            Received::Long(message) => self.ask_for(*message)?,
            Received::Short(mark) => {
                self.acknowledge(mark);
                return Ok(Started::Done);
            }
        }
        Ok(Started::Pending)
    }

    /// Answers on our own connection, which stands since a receive was posted. A peer that takes nothing more needs no
    /// answer; whether something is still expected of it, [`check`](TcpPeer::check) finds out.
    fn reply(&mut self, kind: FrameKind, id: u64) {
        self.control().map(|control| control.push_copy(FrameHeader::about(kind, id).encode(), &[], None));
    }

    fn acknowledge(&mut self, id: Option<u64>) {
        if let Some(id) = id {
            self.reply(FrameKind::Ack, id);
        }
    }

    fn ask_for(&mut self, Fetch { number, posted, .. }: Fetch<()>) -> Result<()> {
        self.matching.await_bytes(number, posted, 0)?;
        self.reply(FrameKind::Grant, number);
        Ok(())
    }

    fn nonsense(&self, what: &str) -> Error {
        self.matching.nonsense(what)
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
                let Some(inflow) = self.matching.inflow(id) else {
                    return Err(self.nonsense("bytes nobody asked for"));
                };
                if spent && !connection.holds(inflow.posted.target.grain()) {
                    return Ok(());
                }
                let Some(got) = connection.read_data(&inflow.posted.target) else { return Ok(()) };
                self.matching.part_came(id, got, done);
                budget = budget.saturating_sub(got);
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
            let body = buffer.region().part(start + HEADER, len - HEADER);
            let taken = self.matching.short_came(&header.message(), body, done);
            self.input[link].connection.give_back(buffer);
            self.acknowledge(taken?);
            budget = budget.saturating_sub(len);
        }
    }

    fn take_header(&mut self, link: usize, header: &FrameHeader) -> Result<()> {
        match header.kind {
            FrameKind::Large => match self.matching.long_came(&header.message(), ())? {
                Some(message) => self.ask_for(message),
                None => Ok(()),
            },
            FrameKind::Grant => self.matching.grant(header.id),
            FrameKind::Ack => match self.matching.acknowledged(header.id)? {
                None => Ok(()),
                Some(_) => Err(self.nonsense("an acknowledgement of a long message")),
            },
            FrameKind::Data => {
                let (offset, left) = (header.bytes as usize, header.body as usize);
                let inflow = self.matching.inflow(header.id);
                if left == 0 || !inflow.is_some_and(|inflow| inflow.has(offset, left)) {
                    return Err(self.nonsense("bytes nobody asked for"));
                }
                self.input[link].connection.inbound = Some(Inbound { id: header.id, offset, left });
                Ok(())
            }
            _ => Err(self.nonsense("an answer to no message")),
        }
    }

    /// Writes what the connections take: queued frames, then stripes of granted messages.
    pub fn write(&mut self, done: &mut Vec<Token>) {
        let TcpPeer { output, matching, writes, .. } = self;
        for link in output.iter_mut().filter(|link| link.connection.output_lost.is_none()) {
            let connection = &mut link.connection;
            loop {
                if connection.is_flushed() {
                    let Some((id, message)) = matching.next_granted() else { break };
                    let Some((offset, len)) = message.next_part(STRIPE) else { break };
                    message.part_begun(len);
                    let head = FrameHeader {
                        bytes: offset as u64,
                        body: len as u64,
                        ..FrameHeader::about(FrameKind::Data, id)
                    };
                    connection.push(head.encode(), Body::Part { id, offset, len });
                }
                *writes += 1;
                let mut left = smallvec::SmallVec::<[(u64, usize); 4]>::new();
                connection.flush(|id| matching.source(id), |id, bytes| left.push((id, bytes)), done);
                for (id, bytes) in left {
                    if matching.part_sent(id, bytes, done) {
                        matching.close(id);
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
        let is_owed = self.matching.owes() || self.output.iter().any(|link| link.connection.owes());
        let is_broken = self.input.iter().any(|link| matches!(link.connection.ended, Some(Ended::Broken(_))));
        let owes = self.matching.expects();
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
        self.matching.cancel();
    }
}
