//! One peer and the messages between it and us, over MPI.
//!
//! Headers and small messages are MPI messages of tag 0, which MPI keeps in order. A large message is announced by its
//! header; its body follows under a tag of its own as MPI messages of [`CHUNK`] bytes, cut alike on both sides, a few of
//! them at a time. MPI makes them wait until the receiver posts their receives: straight into the destination where a
//! chunk is stored in one piece, else into a staging buffer, from which it is combined while the next ones arrive.
#![forbid(unsafe_code)]

use super::vtable::MAX_TAG;
use super::worker::{MpiLink, TransferBytes};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{Arena, Bytes, Region};
use crate::plan::Channel;
use crate::topo::Rank;
use crate::transport::header::{FrameHeader, FrameKind, HEADER, NO_ID};
use crate::transport::streams::{Posted, Streams};
use crate::transport::target::Pieces;
use crate::transport::{Envelope, Sink};
use std::collections::BTreeMap;

/// Messages of at most this many bytes travel with their header.
pub const SMALL: usize = 8 << 10;
/// TransferBytes of an MPI message of tag 0, at most.
pub const PACKET: usize = HEADER + SMALL;
/// TransferBytes of the parts of a large message.
const CHUNK: usize = 512 << 10;
/// Parts of one message in flight.
const WINDOW: usize = 4;
/// Staging buffers in use at a time, beyond the one that every message may have.
const MAX_STAGES: usize = 32;
/// Staging buffers kept for later.
const KEPT_STAGES: usize = 16;
/// Small messages stop when so many bytes of them have not left.
const MAX_QUEUED: usize = 1 << 20;
/// Messages of one peer that have a number, at most; so a free number is found soon.
const MAX_NUMBERED: usize = MAX_TAG as usize / 2;

/// What a transfer is, by the number it was posted with.
#[derive(Debug, Clone, Copy)]
pub enum TransferRole {
    /// A receive for whatever comes.
    Listen,
    /// A header, maybe with a small message. With a token it completes a send.
    Packet {
        /// The peer.
        peer: usize,
        /// Its bytes.
        bytes: usize,
        /// What it completes.
        token: Option<Token>,
    },
    /// A part of a large message on its way out.
    Out {
        /// The peer.
        peer: usize,
        /// The message.
        id: u64,
        /// The part's bytes.
        len: usize,
    },
    /// A part of a large message on its way in.
    In {
        /// The peer.
        peer: usize,
        /// The message.
        id: u64,
        /// Where in the message it belongs.
        offset: usize,
        /// The part's bytes.
        len: usize,
    },
}

/// What the messages of all peers share: the way to MPI, the numbers of transfers, and buffers.
#[derive(Debug)]
pub struct Io {
    /// The way to MPI.
    pub link: MpiLink,
    /// Which communicator its headers belong to.
    pub nonce: u64,
    operations: Vec<Option<TransferRole>>,
    free: Vec<usize>,
    packets: Vec<Arena>,
    stages: Vec<Arena>,
    staged: usize,
    /// Packets on their way that complete nothing.
    pub silent: usize,
}

impl Io {
    /// No transfers yet. Headers of other communicators, which carry another `nonce`, are not ours.
    pub fn new(link: MpiLink, nonce: u64) -> Io {
        Io {
            link,
            nonce,
            operations: Vec::new(),
            free: Vec::new(),
            packets: Vec::new(),
            stages: Vec::new(),
            staged: 0,
            silent: 0,
        }
    }

    fn begin(&mut self, operation: TransferRole) -> usize {
        let id = self.free.pop().unwrap_or_else(|| {
            self.operations.push(None);
            self.operations.len() - 1
        });
        self.operations[id] = Some(operation);
        id
    }

    /// Takes back the number of a transfer that has ended, and says what it was.
    pub fn end(&mut self, id: usize) -> Option<TransferRole> {
        let operation = self.operations.get_mut(id)?.take();
        self.free.extend(operation.map(|_| id));
        operation
    }

    /// Listens for one more packet; the number of the receive.
    pub fn listen(&mut self, packet: Arena) -> usize {
        let id = self.begin(TransferRole::Listen);
        self.link.listen(id, TransferBytes::Ours(packet, PACKET), 0);
        id
    }

    /// The header in a packet of so many bytes, if it is of this communicator.
    pub fn header(&self, packet: Bytes<'_>) -> Option<FrameHeader> {
        header(packet, self.nonce)
    }

    fn packet(&mut self, peer: usize, to: Rank, header: FrameHeader, src: &[Region], token: Option<Token>) -> usize {
        let mut packet = self.packets.pop().unwrap_or_else(|| Arena::new(PACKET));
        let all = packet.region();
        all.part(0, HEADER).write(&FrameHeader { nonce: self.nonce, ..header }.encode());
        let mut bytes = HEADER;
        for piece in src {
            all.part(bytes, piece.len()).copy_from(*piece);
            bytes += piece.len();
        }
        self.silent += usize::from(token.is_none());
        let id = self.begin(TransferRole::Packet { peer, bytes, token });
        self.link.send(id, TransferBytes::Ours(packet, bytes), to.0 as i32, 0);
        bytes
    }

    /// Keeps a packet's buffer for the next one.
    pub fn keep_packet(&mut self, packet: Option<Arena>) {
        self.packets.extend(packet);
    }

    /// A staging buffer; none when others have to come back first, unless the message has nothing in flight.
    fn stage(&mut self, idle: bool) -> Option<Arena> {
        if self.staged >= MAX_STAGES && !idle {
            return None;
        }
        self.staged += 1;
        Some(self.stages.pop().unwrap_or_else(|| Arena::new(CHUNK)))
    }

    fn unstage(&mut self, stage: Option<Arena>) {
        let Some(stage) = stage else { return };
        self.staged -= 1;
        if self.stages.len() < KEPT_STAGES {
            self.stages.push(stage);
        }
    }
}

/// The header in a packet of so many bytes, if it is of the communicator with this nonce.
pub fn header(packet: Bytes<'_>, nonce: u64) -> Option<FrameHeader> {
    let mut head = [0; HEADER];
    packet.part(0, HEADER.min(packet.len())).read(head.get_mut(..packet.len().min(HEADER))?);
    FrameHeader::decode(&head).filter(|header| header.nonce == nonce && packet.len() >= HEADER)
}

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
    begun: usize,
    parts: usize,
    sent: usize,
    /// Its receiver has it, which may be known before its last part is reported as sent.
    acknowledged: bool,
}

/// A large message on its way in.
#[derive(Debug)]
struct Inflow {
    posted: Posted,
    begun: usize,
    parts: usize,
    received: usize,
}

/// A peer.
#[derive(Debug)]
pub struct MpiPeer {
    index: usize,
    /// Its rank, here and in the MPI communicator.
    pub rank: Rank,
    streams: Streams<Arrival>,
    outgoing: BTreeMap<u64, Outgoing>,
    marks: BTreeMap<u64, Channel>,
    inflows: BTreeMap<u64, Inflow>,
    last_id: u64,
    /// TransferBytes of packets that have not left.
    pub queued: usize,
    /// Packets have gone to it or come from it, so each side says when it leaves.
    met: bool,
    /// It has left: nothing of it follows.
    gone: bool,
    /// Changes when a send that was `Busy` may be accepted.
    pub relief: u64,
}

impl MpiPeer {
    /// A peer, with its place among the peers.
    pub fn new(index: usize, rank: Rank) -> MpiPeer {
        MpiPeer {
            index,
            rank,
            streams: Streams::default(),
            outgoing: BTreeMap::new(),
            marks: BTreeMap::new(),
            inflows: BTreeMap::new(),
            last_id: 0,
            queued: 0,
            met: false,
            gone: false,
            relief: 0,
        }
    }

    /// A number that no message to this peer has; it is a tag too.
    fn take_id(&mut self) -> u64 {
        loop {
            self.last_id = self.last_id % MAX_TAG as u64 + 1;
            if !self.outgoing.contains_key(&self.last_id) && !self.marks.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }

    /// Posts a message. `silently`: a small one is complete at once and leaves by itself.
    pub fn send(
        &mut self,
        io: &mut Io,
        token: Token,
        envelope: Envelope,
        src: &[Region],
        silently: bool,
    ) -> Result<Started> {
        let bytes: usize = src.iter().map(Region::len).sum();
        let channel = envelope.channel;
        let credit = &self.streams.at(channel).credit;
        let small = bytes <= SMALL;
        let marked = small && credit.next_is_marked();
        let takes = if small { credit.takes_small() } else { credit.takes_large() };
        let numbered = self.outgoing.len() + self.marks.len();
        if !takes || self.queued > MAX_QUEUED || ((marked || !small) && numbered >= MAX_NUMBERED) {
            return Ok(Started::Busy);
        }
        let id = if marked || !small { self.take_id() } else { NO_ID };
        let kind = if small { FrameKind::Small } else { FrameKind::Large };
        let body = if small { bytes as u64 } else { 0 };
        let header = FrameHeader { kind, envelope, bytes: bytes as u64, id, body, nonce: 0 };
        if marked {
            self.marks.insert(id, channel);
        }
        self.met = true;
        if small {
            self.streams.at(channel).credit.small_sent();
            self.queued += io.packet(self.index, self.rank, header, src, (!silently).then_some(token));
            return Ok(if silently { Started::Done } else { Started::Pending });
        }
        self.streams.at(channel).credit.large_sent();
        self.queued += io.packet(self.index, self.rank, header, &[], None);
        let src = Pieces::new(src);
        let outgoing = Outgoing { token, channel, src, begun: 0, parts: 0, sent: 0, acknowledged: false };
        self.outgoing.insert(id, outgoing);
        self.push(io, id);
        Ok(Started::Pending)
    }

    /// Sends the next parts of a large message.
    fn push(&mut self, io: &mut Io, id: u64) {
        let Some(message) = self.outgoing.get_mut(&id) else { return };
        while message.parts < WINDOW && message.begun < message.src.bytes() {
            let (offset, len) = (message.begun, CHUNK.min(message.src.bytes() - message.begun));
            let run = message.src.run(offset, len);
            let bytes = if run.len() == len {
                TransferBytes::Theirs(run)
            } else {
                let Some(mut stage) = io.stage(message.parts == 0) else { return };
                pack(&message.src, offset, stage.region().part(0, len));
                TransferBytes::Ours(stage, len)
            };
            message.begun += len;
            message.parts += 1;
            let operation = io.begin(TransferRole::Out { peer: self.index, id, len });
            io.link.send(operation, bytes, self.rank.0 as i32, id as i32);
        }
    }

    /// A part of a large message has left.
    pub fn pushed(&mut self, io: &mut Io, id: u64, len: usize, stage: Option<Arena>, done: &mut Vec<Token>) {
        io.unstage(stage);
        let Some(message) = self.outgoing.get_mut(&id) else { return };
        message.parts -= 1;
        message.sent += len;
        if message.sent == message.src.bytes() {
            done.push(message.token);
            self.close(id);
        } else {
            self.push(io, id);
        }
    }

    /// Forgets a large message that has left and has been received; its number is free again.
    fn close(&mut self, id: u64) {
        let over = |message: &&Outgoing| message.acknowledged && message.sent == message.src.bytes();
        if let Some(channel) = self.outgoing.get(&id).filter(over).map(|message| message.channel) {
            self.outgoing.remove(&id);
            self.streams.at(channel).credit.large_done();
            self.relief += 1;
        }
    }

    /// Posts a receive. `staging` has room for a small message.
    pub fn recv(
        &mut self,
        io: &mut Io,
        token: Token,
        envelope: Envelope,
        sink: Sink<'_>,
        staging: Bytes<'_>,
    ) -> Result<Started> {
        let posted = Posted::new(token, envelope, sink);
        let stream = self.streams.at(envelope.channel);
        let Some(Arrival { header, body }) = stream.arrived.pop_front() else {
            stream.posted.push_back(posted);
            return Ok(Started::Pending);
        };
        if header.kind == FrameKind::Large {
            self.fetch(io, posted, &header)?;
            return Ok(Started::Pending);
        }
        let staged = staging.part(0, body.len());
        staged.write(&body);
        self.deliver(io, &posted, &header, staged)?;
        Ok(Started::Done)
    }

    fn deliver(&mut self, io: &mut Io, posted: &Posted, header: &FrameHeader, body: Bytes<'_>) -> Result<()> {
        posted.check(self.rank, header.envelope, header.bytes as usize)?;
        posted.target.consume(0, body);
        if header.id != NO_ID {
            self.acknowledge(io, header.id);
        }
        Ok(())
    }

    fn acknowledge(&mut self, io: &mut Io, id: u64) {
        self.queued += io.packet(self.index, self.rank, FrameHeader::about(FrameKind::Ack, id), &[], None);
    }

    /// Begins to receive an announced message.
    fn fetch(&mut self, io: &mut Io, posted: Posted, header: &FrameHeader) -> Result<()> {
        posted.check(self.rank, header.envelope, header.bytes as usize)?;
        if !(1..=MAX_TAG as u64).contains(&header.id) || self.inflows.contains_key(&header.id) {
            return Err(self.nonsense("a message with a number that it cannot have"));
        }
        self.inflows.insert(header.id, Inflow { posted, begun: 0, parts: 0, received: 0 });
        self.pull(io, header.id);
        Ok(())
    }

    /// Posts receives for the next parts of a large message.
    fn pull(&mut self, io: &mut Io, id: u64) {
        let Some(inflow) = self.inflows.get_mut(&id) else { return };
        let target = &inflow.posted.target;
        while inflow.parts < WINDOW && inflow.begun < target.bytes() {
            let (offset, len) = (inflow.begun, CHUNK.min(target.bytes() - inflow.begun));
            let run = target.store().map(|pieces| pieces.run(offset, len)).filter(|run| run.len() == len);
            let bytes = match run {
                Some(run) => TransferBytes::Theirs(run),
                None => match io.stage(inflow.parts == 0) {
                    Some(stage) => TransferBytes::Ours(stage, len),
                    None => return,
                },
            };
            inflow.begun += len;
            inflow.parts += 1;
            let operation = io.begin(TransferRole::In { peer: self.index, id, offset, len });
            io.link.recv(operation, bytes, self.rank.0 as i32, id as i32);
        }
    }

    /// A part of a large message has come.
    pub fn pulled(
        &mut self,
        io: &mut Io,
        (id, offset, len): (u64, usize, usize),
        stage: Option<Arena>,
        done: &mut Vec<Token>,
    ) {
        let Some(inflow) = self.inflows.get_mut(&id) else { return };
        inflow.parts -= 1;
        inflow.received += len;
        let complete = inflow.received == inflow.posted.target.bytes();
        if complete {
            self.pull_last(io, id, offset, len, stage, done);
            return;
        }
        let mut stage = stage;
        // The next receive is posted before this part is combined, so that it arrives meanwhile.
        self.pull(io, id);
        if let (Some(stage), Some(inflow)) = (&mut stage, self.inflows.get(&id)) {
            inflow.posted.target.consume(offset, stage.region().part(0, len));
        }
        io.unstage(stage);
        self.pull(io, id);
    }

    fn pull_last(
        &mut self,
        io: &mut Io,
        id: u64,
        offset: usize,
        len: usize,
        mut stage: Option<Arena>,
        done: &mut Vec<Token>,
    ) {
        let Some(inflow) = self.inflows.remove(&id) else { return };
        if let Some(stage) = &mut stage {
            inflow.posted.target.consume(offset, stage.region().part(0, len));
        }
        io.unstage(stage);
        done.push(inflow.posted.token);
        self.acknowledge(io, id);
    }

    /// Takes a packet: a header, and the body behind it.
    pub fn take(&mut self, io: &mut Io, header: &FrameHeader, body: Bytes<'_>, done: &mut Vec<Token>) -> Result<()> {
        self.met = true;
        match header.kind {
            FrameKind::Small | FrameKind::Large => {
                let expected = if header.kind == FrameKind::Small { header.bytes } else { 0 };
                if body.len() as u64 != expected {
                    return Err(self.nonsense("a message of another length than it says"));
                }
                let stream = self.streams.at(header.envelope.channel);
                match stream.posted.pop_front() {
                    Some(posted) if header.kind == FrameKind::Large => self.fetch(io, posted, header)?,
                    Some(posted) => {
                        self.deliver(io, &posted, header, body)?;
                        done.push(posted.token);
                    }
                    None => {
                        let mut bytes = vec![0; body.len()];
                        body.read(&mut bytes);
                        stream.arrived.push_back(Arrival { header: *header, body: bytes });
                    }
                }
            }
            FrameKind::Ack => {
                if let Some(channel) = self.marks.remove(&header.id) {
                    self.streams.at(channel).credit.mark_done();
                    self.relief += 1;
                } else if let Some(message) = self.outgoing.get_mut(&header.id) {
                    message.acknowledged = true;
                    self.close(header.id);
                } else {
                    return Err(self.nonsense("an acknowledgement of nothing"));
                }
            }
            FrameKind::Leave => self.gone = true,
            FrameKind::Grant | FrameKind::Data => return Err(self.nonsense("what belongs to TCP")),
        }
        Ok(())
    }

    fn nonsense(&self, what: &str) -> Error {
        Error::Internal(format!("rank {} sent {what}", self.rank))
    }

    /// Says that this rank leaves, as the last packet to a peer that packets have gone to or come from; whether the peer's
    /// own word is still to come.
    pub fn leave(&mut self, io: &mut Io) -> bool {
        if self.met {
            self.queued += io.packet(self.index, self.rank, FrameHeader::about(FrameKind::Leave, NO_ID), &[], None);
        }
        self.met && !self.gone
    }

    /// Forgets everything.
    pub fn cancel(&mut self) {
        self.streams.clear();
        self.outgoing.clear();
        self.marks.clear();
        self.inflows.clear();
    }
}

/// Copies the bytes of a message from `offset` into one piece.
fn pack(src: &Pieces, offset: usize, into: Bytes<'_>) {
    let mut done = 0;
    while done < into.len() {
        let run = src.run(offset + done, into.len() - done);
        into.part(done, run.len()).copy_from(run);
        done += run.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_round_again_and_those_in_use_are_left_out() {
        let mut peer = MpiPeer::new(0, Rank(1));
        assert_eq!(peer.take_id(), 1);
        peer.last_id = MAX_TAG as u64;
        peer.marks.insert(1, 0);
        peer.marks.insert(2, 0);
        assert_eq!(peer.take_id(), 3);
    }
}
