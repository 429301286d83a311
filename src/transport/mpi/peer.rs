//! One peer and the messages between it and us, over MPI.
//!
//! Headers and small messages are MPI messages of tag 0, which MPI keeps in order. A large message is announced by its
//! header; its body follows under a tag of its own as MPI messages of [`CHUNK`] bytes, cut alike on both sides, a few of
//! them at a time. MPI makes them wait until the receiver posts their receives: straight into the destination where a
//! chunk is stored in one piece, else into a staging buffer, from which it is combined while the next ones arrive.
#![forbid(unsafe_code)]

use super::vtable::MAX_TAG;
use super::worker::{MpiLink, TransferBytes};
use crate::error::Result;
use crate::exec::{Started, Token};
use crate::memory::{Arena, Bytes, Region};
use crate::topo::Rank;
use crate::transport::header::{FrameHeader, FrameKind, HEADER, NO_ID};
use crate::transport::matching::{Fetch, Matching, Received};
use crate::transport::target::Pieces;
use crate::transport::{Envelope, Sink};

/// Messages of at most this many bytes travel with their header.
pub const SMALL: usize = 8 << 10;
/// TransferBytes of an MPI message of tag 0, at most.
pub const PACKET: usize = HEADER + SMALL;
/// TransferBytes of the parts of a large message.
const CHUNK: usize = 512 << 10;
/// Bytes of one message in flight: four parts.
const IN_FLIGHT: usize = 4 * CHUNK;
/// Staging buffers in use at a time, beyond the one that every message may have.
const MAX_STAGES: usize = 32;
/// Staging buffers kept for later.
const KEPT_STAGES: usize = 16;
/// Small messages stop when so many bytes of them have not left.
const MAX_QUEUED: usize = 1 << 20;
/// Messages of one peer that have a number, at most: each has a tag of its own.
const MAX_NUMBERED: usize = MAX_TAG as usize;

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

/// A peer.
#[derive(Debug)]
pub struct MpiPeer {
    index: usize,
    /// Its rank, here and in the MPI communicator.
    pub rank: Rank,
    matching: Matching,
    /// Long messages that their receiver is known to have before their last part is reported as sent.
    received: Vec<u64>,
    /// TransferBytes of packets that have not left.
    pub queued: usize,
    /// Packets have gone to it or come from it, so each side says when it leaves.
    met: bool,
    /// It has left: nothing of it follows.
    gone: bool,
}

/// The tag of a long message's parts, by which headers name it, too: no two open messages have the same.
fn tag_of(number: u64) -> u64 {
    match number {
        NO_ID => NO_ID,
        number => u64::from(number as u32) + 1,
    }
}

impl MpiPeer {
    /// A peer, with its place among the peers.
    pub fn new(index: usize, rank: Rank) -> MpiPeer {
        MpiPeer {
            index,
            rank,
            matching: Matching::new(rank, MAX_NUMBERED),
            received: Vec::new(),
            queued: 0,
            met: false,
            gone: false,
        }
    }

    /// Changes when a send that was `Busy` may be accepted.
    pub fn relief(&self) -> u64 {
        self.matching.relief()
    }

    /// The number of the open message that has a tag.
    fn number(&self, tag: u64) -> Result<u64> {
        let place = tag.checked_sub(1).and_then(|place| u32::try_from(place).ok());
        let open = place.and_then(|place| self.matching.numbered(place));
        open.ok_or_else(|| self.matching.nonsense("an answer to a message that is not open"))
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
        let (bytes, channel) = (src.iter().map(Region::len).sum::<usize>(), envelope.channel);
        let small = bytes <= SMALL;
        let takes = if small { self.matching.takes_short(channel) } else { self.matching.takes_long(channel) };
        if !takes || self.queued > MAX_QUEUED {
            return Ok(Started::Busy);
        }
        self.met = true;
        let head = |kind, number, body| FrameHeader {
            kind,
            envelope,
            bytes: bytes as u64,
            id: tag_of(number),
            body,
            nonce: 0,
        };
        if small {
            let header = head(FrameKind::Small, self.matching.short_sent(channel), bytes as u64);
            self.queued += io.packet(self.index, self.rank, header, src, (!silently).then_some(token));
            return Ok(if silently { Started::Done } else { Started::Pending });
        }
        let number = self.matching.long_sent(channel, token, src);
        self.queued += io.packet(self.index, self.rank, head(FrameKind::Large, number, 0), &[], None);
        self.push(io, number);
        Ok(Started::Pending)
    }

    /// Sends the next parts of a large message.
    fn push(&mut self, io: &mut Io, id: u64) {
        let Some(message) = self.matching.outgoing(id) else { return };
        while let Some((offset, len)) = message.next_part(CHUNK).filter(|_| message.in_flight() < IN_FLIGHT) {
            let run = message.src.run(offset, len);
            let bytes = if run.len() == len {
                TransferBytes::Theirs(run)
            } else {
                let Some(mut stage) = io.stage(message.in_flight() == 0) else { return };
                pack(&message.src, offset, stage.region().part(0, len));
                TransferBytes::Ours(stage, len)
            };
            message.part_begun(len);
            let operation = io.begin(TransferRole::Out { peer: self.index, id, len });
            io.link.send(operation, bytes, self.rank.0 as i32, tag_of(id) as i32);
        }
    }

    /// A part of a large message has left.
    pub fn pushed(&mut self, io: &mut Io, id: u64, len: usize, stage: Option<Arena>, done: &mut Vec<Token>) {
        io.unstage(stage);
        if !self.matching.part_sent(id, len, done) {
            self.push(io, id);
        } else if let Some(at) = self.received.iter().position(|&received| received == id) {
            self.received.swap_remove(at);
            self.matching.close(id);
        }
    }

    /// The receiver has a message. Once a large one has left, too, its tag is free again.
    fn acknowledged(&mut self, id: u64) -> Result<()> {
        let Some(message) = self.matching.acknowledged(id)? else { return Ok(()) };
        if message.has_left() {
            self.matching.close(id);
        } else if self.received.contains(&id) {
            return Err(self.matching.nonsense("two acknowledgements of a message"));
        } else {
            self.received.push(id);
        }
        Ok(())
    }

    /// Posts a receive.
    pub fn recv(&mut self, io: &mut Io, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        match self.matching.recv(token, envelope, sink)? {
            Received::Waits => {}
            Received::Long(message) => self.fetch(io, *message)?,
            Received::Short(mark) => {
                self.acknowledge(io, mark);
                return Ok(Started::Done);
            }
        }
        Ok(Started::Pending)
    }

    fn acknowledge(&mut self, io: &mut Io, tag: Option<u64>) {
        let Some(tag) = tag else { return };
        self.queued += io.packet(self.index, self.rank, FrameHeader::about(FrameKind::Ack, tag), &[], None);
    }

    /// Begins to receive an announced message.
    fn fetch(&mut self, io: &mut Io, Fetch { number: tag, posted, .. }: Fetch<()>) -> Result<()> {
        if !(1..=MAX_TAG as u64).contains(&tag) {
            return Err(self.matching.nonsense("a message with a number that it cannot have"));
        }
        self.matching.await_bytes(tag, posted, 0)?;
        self.pull(io, tag);
        Ok(())
    }

    /// Posts receives for the next parts of a large message.
    fn pull(&mut self, io: &mut Io, id: u64) {
        let Some(inflow) = self.matching.inflow(id) else { return };
        while let Some((offset, len)) = inflow.next_part(CHUNK).filter(|_| inflow.in_flight() < IN_FLIGHT) {
            let store = inflow.posted.target.store();
            let bytes = match store.map(|pieces| pieces.run(offset, len)).filter(|run| run.len() == len) {
                Some(run) => TransferBytes::Theirs(run),
                None => match io.stage(inflow.in_flight() == 0) {
                    Some(stage) => TransferBytes::Ours(stage, len),
                    None => return,
                },
            };
            inflow.part_begun(len);
            let operation = io.begin(TransferRole::In { peer: self.index, id, offset, len });
            io.link.recv(operation, bytes, self.rank.0 as i32, id as i32);
        }
    }

    /// A part of a large message has come.
    pub fn pulled(
        &mut self,
        io: &mut Io,
        (id, offset, len): (u64, usize, usize),
        mut stage: Option<Arena>,
        done: &mut Vec<Token>,
    ) {
        let complete = self.matching.part_came(id, len, done);
        // The next receive is posted before this part is combined, so that it arrives meanwhile.
        self.pull(io, id);
        let posted = complete.as_ref().or_else(|| self.matching.inflow(id).map(|inflow| &inflow.posted));
        if let (Some(posted), Some(stage)) = (posted, &mut stage) {
            posted.target.consume(offset, stage.region().part(0, len));
        }
        io.unstage(stage);
        match complete {
            Some(_) => self.acknowledge(io, Some(id)),
            None => self.pull(io, id),
        }
    }

    /// Takes a packet: a header, and the body behind it.
    pub fn take(&mut self, io: &mut Io, header: &FrameHeader, body: Bytes<'_>, done: &mut Vec<Token>) -> Result<()> {
        self.met = true;
        match header.kind {
            FrameKind::Small => {
                let mark = self.matching.short_came(&header.message(), body, done)?;
                self.acknowledge(io, mark);
            }
            FrameKind::Large if !body.is_empty() => return Err(self.matching.nonsense("an announcement with a body")),
            FrameKind::Large => {
                if let Some(message) = self.matching.long_came(&header.message(), ())? {
                    self.fetch(io, message)?;
                }
            }
            FrameKind::Ack => {
                let number = self.number(header.id)?;
                self.acknowledged(number)?;
            }
            FrameKind::Leave => self.gone = true,
            FrameKind::Grant | FrameKind::Data | FrameKind::Switch | FrameKind::Coded => {
                return Err(self.matching.nonsense("what belongs to TCP"));
            }
        }
        Ok(())
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
        self.matching.cancel();
        self.received.clear();
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
    fn numbers_become_tags_that_every_mpi_has() {
        assert_eq!(tag_of(0), 1);
        assert_eq!(tag_of(7 << 32 | (MAX_NUMBERED as u64 - 1)), MAX_TAG as u64);
        assert_eq!(tag_of(NO_ID), NO_ID);
    }
}
