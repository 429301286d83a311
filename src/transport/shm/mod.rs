//! Messages between ranks of one node, through shared memory.
//!
//! Every ordered pair of ranks has a ring of records ([`ring`]). A small message is copied into it and is complete for
//! its sender. Of a large one only the announcement goes through the ring; the receiver fetches the bytes ([`pull`])
//! when it has a place for them, and acknowledges. Where it may not read the sender's memory it *grants* instead, and the
//! sender passes the bytes through the ring in chunks.
//!
//! Where all ranks of the node share the segment, a small collective of all of them can do without messages ([`shared_buffers`]).
//!
//! A receiver always takes records out of the ring, whether or not their receives have been posted, so streams do not
//! hold each other up; [`super::streams`] says what bounds the messages that wait.

pub mod open;
pub mod pull;
pub mod record;
mod ring;
mod segment;
mod shared_buffers;
pub mod wakeup;

use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{shared, Arena, Bytes, Region};
use crate::plan::Channel;
use crate::topo::Rank;
use pull::{Pull, Reach, SLICE, STAGING_BUFFER};
use record::{Listing, RecordHeader, RecordKind, NO_SLOT};
use ring::{Consumer, Producer};
use segment::{Segment, SlotBits, SLOTS};
use shared_buffers::SharedBuffers;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wakeup::Wakeups;

use super::streams::{Posted, Streams};
use super::target::Pieces;
use super::{Envelope, NodeCall, Sink};

/// Bytes of a message that go through the ring at a time.
const CHUNK: usize = 16 << 10;
/// Records taken from one peer before the next one gets its turn.
const RECORDS_PER_POLL: usize = 64;
/// While a call waits on the board, the rings are looked at once in so many polls.
const BOARD_POLLS_PER_RING_POLL: u32 = 16;
/// The longest wait for a thread of this process that reads our memory when we cancel: it reads a slice at most.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// A message that came before its receive was posted.
#[derive(Debug)]
struct Arrival {
    header: RecordHeader,
    body: Vec<u8>,
}

/// What a slot stands for.
#[derive(Debug)]
enum Outgoing {
    /// A large message: complete when acknowledged, or when all of it went through the ring.
    Large { token: Token, channel: Channel, src: Pieces, sent: usize },
    /// A marked small message.
    Mark { channel: Channel },
}

/// A message that comes through the ring.
#[derive(Debug)]
struct Inflow {
    slot: u32,
    posted: Posted,
    received: usize,
    /// Bytes that had been fetched from the sender's memory before.
    fetched: usize,
}

/// Another rank of this node.
#[derive(Debug)]
struct Peer {
    rank: Rank,
    local: usize,
    reach: Reach,
    process: Option<OwnedFd>,
    output: Producer,
    input: Consumer,
    streams: Streams<Arrival>,
    slots: Vec<Option<Outgoing>>,
    free: Vec<u32>,
    open_slots: usize,
    outflows: VecDeque<u32>,
    inflows: Vec<Inflow>,
}

/// The shared-memory side of one rank.
#[derive(Debug)]
pub struct Shm {
    local: usize,
    segment: Arc<Segment>,
    wakeups: Arc<Wakeups>,
    peers: Vec<Peer>,
    pulls: VecDeque<Pull>,
    staging: Arena,
    eager_bytes: usize,
    body: Vec<u8>,
    relief: u64,
    cancelled: bool,
    /// Where all ranks of the node share the segment.
    board: Option<SharedBuffers>,
    /// Polls since the rings were looked at.
    board_polls: u32,
    /// What shows to ranks of this process that we are one.
    _met: Vec<crate::memory::shared::Met>,
    _presence: open::Presence,
}

fn header(kind: RecordKind, envelope: Envelope, bytes: usize, slot: u32, body: usize) -> RecordHeader {
    RecordHeader { kind, len: 0, envelope, bytes, slot, pieces: 0, keys: 0, body: body as u32 }
}

impl Peer {
    /// Puts something in a free slot; `None` when there is none.
    fn take_slot(&mut self, outgoing: Outgoing) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < SLOTS => {
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        self.slots[slot as usize] = Some(outgoing);
        self.open_slots += 1;
        Some(slot)
    }

    fn has_slot(&self) -> bool {
        self.open_slots < SLOTS
    }

    /// Empties a slot that the receiver acknowledged; the token of a large message.
    fn close_slot(&mut self, slot: u32) -> Result<Option<Token>> {
        let closed = self.slots.get_mut(slot as usize).and_then(Option::take);
        let Some(closed) = closed else {
            return Err(Error::Internal(format!("rank {} acknowledged message {slot}, which is not open", self.rank)));
        };
        self.free.push(slot);
        self.open_slots -= 1;
        Ok(match closed {
            Outgoing::Mark { channel } => {
                self.streams.at(channel).credit.mark_done();
                None
            }
            Outgoing::Large { token, channel, .. } => {
                self.streams.at(channel).credit.large_done();
                Some(token)
            }
        })
    }
}

/// Sets a slot's bit, and wakes whoever takes it.
fn set_bit(bits: &SlotBits, slot: u32) {
    bits[slot as usize / 64].fetch_or(1 << (slot % 64), Ordering::Release);
}

fn any_bit(bits: &SlotBits) -> bool {
    bits.iter().any(|word| word.load(Ordering::Relaxed) != 0)
}

/// Takes all bits, calling `each` with the slots.
fn take_bits(bits: &SlotBits, mut each: impl FnMut(u32) -> Result<()>) -> Result<()> {
    for (index, word) in bits.iter().enumerate() {
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut taken = word.swap(0, Ordering::Acquire);
        while taken != 0 {
            each(index as u32 * 64 + taken.trailing_zeros())?;
            taken &= taken - 1;
        }
    }
    Ok(())
}

impl Shm {
    /// Posts a message to a peer.
    pub fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        self.check_usable()?;
        let bytes = src.iter().map(Region::len).sum();
        if bytes <= self.eager_bytes {
            Ok(self.send_small(peer, envelope, src, bytes))
        } else {
            Ok(self.send_large(peer, token, envelope, src, bytes))
        }
    }

    fn check_usable(&self) -> Result<()> {
        match self.cancelled {
            true => Err(Error::InvalidUsage("the communicator's operations have been cancelled".into())),
            false => Ok(()),
        }
    }

    fn send_small(&mut self, index: usize, envelope: Envelope, src: &[Region], bytes: usize) -> Started {
        let peer = &mut self.peers[index];
        let credit = &peer.streams.at(envelope.channel).credit;
        let marked = credit.next_is_marked();
        if !credit.takes_small() || (marked && !peer.has_slot()) {
            return Started::Busy;
        }
        let Some(at) = peer.output.reserve(&self.segment, bytes) else { return Started::Busy };
        let body = peer.output.body(at, bytes);
        let mut done = 0;
        for region in src {
            body.part(done, region.len()).copy_from(*region);
            done += region.len();
        }
        let mark = marked.then(|| peer.take_slot(Outgoing::Mark { channel: envelope.channel })).flatten();
        peer.streams.at(envelope.channel).credit.small_sent();
        let header = header(RecordKind::Eager, envelope, bytes, mark.unwrap_or(NO_SLOT), bytes);
        peer.output.publish(&self.segment, at, header);
        self.wakeups.ring(peer.local);
        Started::Done
    }

    fn send_large(&mut self, index: usize, token: Token, envelope: Envelope, src: &[Region], bytes: usize) -> Started {
        let peer = &mut self.peers[index];
        let channel = envelope.channel;
        if !peer.streams.at(channel).credit.takes_large() || !peer.has_slot() {
            return Started::Busy;
        }
        let find = |address, len| if peer.reach == Reach::SameProcess { None } else { shared::find(address, len) };
        let mut listing = Listing::new(src, find);
        if listing.encoded_len() > peer.output.max_body() {
            // Too many pieces to list: an empty list makes the receiver ask for the bytes through the ring.
            listing = Listing::default();
        }
        listing.encode(&mut self.body);
        let Some(at) = peer.output.reserve(&self.segment, self.body.len()) else { return Started::Busy };
        let outgoing = Outgoing::Large { token, channel, src: Pieces::new(src), sent: 0 };
        let Some(slot) = peer.take_slot(outgoing) else { return Started::Busy };
        peer.streams.at(channel).credit.large_sent();
        peer.output.body(at, self.body.len()).write(&self.body);
        let mut header = header(RecordKind::Large, envelope, bytes, slot, self.body.len());
        header.pieces = listing.pieces.len() as u32;
        header.keys = listing.keys.len() as u32;
        peer.output.publish(&self.segment, at, header);
        self.wakeups.ring(peer.local);
        Started::Pending
    }

    /// Posts a receive from a peer.
    pub fn recv(&mut self, index: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        self.check_usable()?;
        let posted = Posted::new(token, envelope, sink);
        let stream = self.peers[index].streams.at(envelope.channel);
        let Some(Arrival { header, mut body }) = stream.arrived.pop_front() else {
            stream.posted.push_back(posted);
            return Ok(Started::Pending);
        };
        if header.kind == RecordKind::Large {
            self.fetch(index, posted, &header, &body)?;
            return Ok(Started::Pending);
        }
        // SAFETY: the bytes must stay while the region is used; because `body` is ours until the end of this function.
        let region = unsafe { Region::new(body.as_mut_ptr(), body.len()) };
        self.deliver(index, &posted, &header, region)?;
        Ok(Started::Done)
    }

    /// Gives a small message to its receive.
    fn deliver(&mut self, index: usize, posted: &Posted, header: &RecordHeader, body: Bytes<'_>) -> Result<()> {
        let peer = &self.peers[index];
        posted.check(peer.rank, header.envelope, header.bytes)?;
        posted.target.consume(0, body);
        if header.slot != NO_SLOT {
            set_bit(&self.segment.control(peer.local, self.local).acked.0, header.slot);
            self.wakeups.ring(peer.local);
        }
        Ok(())
    }

    /// Begins to fetch a large message, or asks for it.
    fn fetch(&mut self, index: usize, posted: Posted, header: &RecordHeader, body: &[u8]) -> Result<()> {
        let peer = &mut self.peers[index];
        posted.check(peer.rank, header.envelope, header.bytes)?;
        let listing = Listing::decode(peer.rank, header.pieces, body)?;
        match Pull::new(index, peer.rank, peer.reach, header.slot, &listing, posted) {
            Ok(pull) => self.pulls.push_back(pull),
            Err(posted) => {
                peer.inflows.push(Inflow { slot: header.slot, posted: *posted, received: 0, fetched: 0 });
                set_bit(&self.segment.control(peer.local, self.local).granted.0, header.slot);
                self.wakeups.ring(peer.local);
            }
        }
        Ok(())
    }

    /// Posts our part of a collective of all ranks of the node.
    pub fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        self.check_usable()?;
        let board = self.board.as_mut().ok_or_else(|| Error::Internal("a call on a node without a board".into()))?;
        board.call(token, envelope, call)
    }

    /// Whether the ranks of the node share a board.
    pub fn has_board(&self) -> bool {
        self.board.is_some()
    }

    /// The ranks that a call on the board waits for.
    pub fn missing(&self) -> Vec<Rank> {
        self.board.as_ref().map_or_else(Vec::new, SharedBuffers::missing)
    }

    /// Makes progress; appends the tokens that have completed.
    pub fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        if let Some(board) = self.board.as_mut().filter(|board| board.is_waiting()) {
            done.extend(board.advance()?);
            self.board_polls += 1;
            if !self.board_polls.is_multiple_of(BOARD_POLLS_PER_RING_POLL) {
                return Ok(());
            }
        }
        for index in 0..self.peers.len() {
            self.take_answers(index, done)?;
            self.take_records(index, done)?;
            self.push_outflows(index, done)?;
        }
        self.advance_pulls(done)
    }

    /// Acknowledgements and grants for what we sent.
    fn take_answers(&mut self, index: usize, done: &mut Vec<Token>) -> Result<()> {
        let peer = &mut self.peers[index];
        if peer.open_slots == 0 {
            return Ok(());
        }
        let control = self.segment.control(self.local, peer.local);
        let relief = &mut self.relief;
        take_bits(&control.acked.0, |slot| {
            done.extend(peer.close_slot(slot)?);
            *relief += 1;
            Ok(())
        })?;
        take_bits(&control.granted.0, |slot| {
            peer.outflows.push_back(slot);
            Ok(())
        })
    }

    fn take_records(&mut self, index: usize, done: &mut Vec<Token>) -> Result<()> {
        for count in 0..=RECORDS_PER_POLL {
            let peer = &mut self.peers[index];
            let next = if count < RECORDS_PER_POLL { peer.input.next(&self.segment)? } else { None };
            let Some((header, body)) = next else {
                if count > 0 && peer.input.take_hunger(&self.segment) {
                    self.wakeups.ring(peer.local);
                }
                break;
            };
            self.take_record(index, &header, body, done)?;
            self.peers[index].input.advance(&self.segment, &header);
        }
        Ok(())
    }

    fn take_record(
        &mut self,
        index: usize,
        header: &RecordHeader,
        body: Bytes<'_>,
        done: &mut Vec<Token>,
    ) -> Result<()> {
        if header.kind == RecordKind::Chunk {
            return self.take_chunk(index, header, body, done);
        }
        let stream = self.peers[index].streams.at(header.envelope.channel);
        let posted = stream.posted.pop_front();
        if let (Some(posted), RecordKind::Eager) = (&posted, header.kind) {
            self.deliver(index, posted, header, body)?;
            done.push(posted.token);
            return Ok(());
        }
        let mut bytes = vec![0; body.len()];
        body.read(&mut bytes);
        match posted {
            Some(posted) => self.fetch(index, posted, header, &bytes),
            None => {
                stream.arrived.push_back(Arrival { header: *header, body: bytes });
                Ok(())
            }
        }
    }

    fn take_chunk(
        &mut self,
        index: usize,
        header: &RecordHeader,
        body: Bytes<'_>,
        done: &mut Vec<Token>,
    ) -> Result<()> {
        let peer = &mut self.peers[index];
        let Some(at) = peer.inflows.iter().position(|inflow| inflow.slot == header.slot) else {
            return Err(Error::Internal(format!("rank {} sent bytes nobody asked for", peer.rank)));
        };
        let inflow = &mut peer.inflows[at];
        let known = inflow.fetched.saturating_sub(header.bytes).min(body.len());
        if known < body.len() {
            inflow.posted.target.consume(header.bytes + known, body.part(known, body.len() - known));
        }
        inflow.received += body.len();
        if inflow.received == inflow.posted.target.bytes() {
            done.push(peer.inflows.swap_remove(at).posted.token);
        }
        Ok(())
    }

    /// Passes the bytes of granted messages through the ring, as far as it takes them.
    fn push_outflows(&mut self, index: usize, done: &mut Vec<Token>) -> Result<()> {
        let peer = &mut self.peers[index];
        while let Some(&slot) = peer.outflows.front() {
            let Some(Some(Outgoing::Large { src, sent, .. })) = peer.slots.get_mut(slot as usize) else {
                return Err(Error::Internal(format!("rank {} asked for message {slot}, which is not open", peer.rank)));
            };
            while *sent < src.bytes() {
                let len = CHUNK.min(src.bytes() - *sent);
                let Some(at) = peer.output.reserve(&self.segment, len) else { return Ok(()) };
                let body = peer.output.body(at, len);
                let mut copied = 0;
                while copied < len {
                    let run = src.run(*sent + copied, len - copied);
                    body.part(copied, run.len()).copy_from(run);
                    copied += run.len();
                }
                let nothing = Envelope { channel: 0, sequence: 0, signature: 0 };
                peer.output.publish(&self.segment, at, header(RecordKind::Chunk, nothing, *sent, slot, len));
                *sent += len;
                self.wakeups.ring(peer.local);
            }
            peer.outflows.pop_front();
            self.relief += 1;
            done.extend(peer.close_slot(slot)?);
        }
        Ok(())
    }

    /// Fetches large messages in the order in which they were matched, a slice in all.
    fn advance_pulls(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let mut budget = SLICE;
        while budget > 0 {
            let Some(pull) = self.pulls.front_mut() else { return Ok(()) };
            let peer = &self.peers[pull.peer];
            let control = self.segment.control(peer.local, self.local);
            let before = pull.left();
            if !pull.advance(budget, control, self.staging.region())? {
                self.ask_for_the_rest();
                continue;
            }
            budget = budget.saturating_sub(before - pull.left());
            if pull.left() > 0 {
                return Ok(());
            }
            set_bit(&control.acked.0, pull.slot);
            self.wakeups.ring(peer.local);
            done.extend(self.pulls.pop_front().map(|pull| pull.posted.token));
        }
        Ok(())
    }

    /// Has the first message that is being fetched come through the ring instead, and all later ones of its sender.
    fn ask_for_the_rest(&mut self) {
        let Some(pull) = self.pulls.pop_front() else { return };
        let peer = &mut self.peers[pull.peer];
        if let Reach::Kernel { pid } = peer.reach {
            peer.reach = Reach::Ring { pid };
            crate::info!("rank {} may not be read any more: {}", peer.rank, peer.reach);
        }
        let fetched = pull.done();
        peer.inflows.push(Inflow { slot: pull.slot, posted: pull.posted, received: 0, fetched });
        set_bit(&self.segment.control(peer.local, self.local).granted.0, pull.slot);
        self.wakeups.ring(peer.local);
    }

    /// Whether `poll` would find something; the second look before a sleep.
    pub fn has_work(&mut self) -> bool {
        let (segment, local) = (&self.segment, self.local);
        !self.pulls.is_empty()
            || self.board.as_ref().is_some_and(SharedBuffers::has_work)
            || self.peers.iter_mut().any(|peer| {
                let control = segment.control(local, peer.local);
                peer.input.has_record(segment)
                    || (peer.open_slots > 0 && (any_bit(&control.acked.0) || any_bit(&control.granted.0)))
                    || peer.output.take_relief(segment)
            })
    }

    /// Fails when the process of a peer that we wait for has ended.
    pub fn check_alive(&self) -> Result<()> {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        let large = |outgoing: &Outgoing| matches!(outgoing, Outgoing::Large { .. });
        let missing = self.missing();
        let waiting = |peer: &&Peer| {
            missing.contains(&peer.rank)
                || !peer.inflows.is_empty()
                || peer.streams.any_posted()
                || peer.slots.iter().flatten().any(large)
        };
        for peer in self.peers.iter().filter(waiting) {
            let Some(process) = &peer.process else { continue };
            let mut watched = [PollFd::new(process, PollFlags::IN)];
            let ended = poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
            // What it sent or posted before it ended still counts.
            let came = peer.input.has_record(&self.segment) || self.board.as_ref().is_some_and(SharedBuffers::has_work);
            if ended && !came {
                return Err(Error::Remote(format!("rank {} is gone: its process has ended", peer.rank)));
            }
        }
        Ok(())
    }

    /// Forgets all pending operations, and waits until no thread of this process reads our memory any more.
    pub fn cancel(&mut self) {
        self.cancelled = true;
        self.pulls.clear();
        if let Some(board) = &mut self.board {
            board.cancel();
        }
        let limit = Instant::now() + CANCEL_LIMIT;
        for peer in &mut self.peers {
            peer.streams.clear();
            peer.slots.clear();
            peer.free.clear();
            peer.outflows.clear();
            peer.inflows.clear();
            peer.open_slots = 0;
            let control = self.segment.control(self.local, peer.local);
            control.cancelled.0.store(1, Ordering::SeqCst);
            while peer.reach == Reach::SameProcess
                && control.reading.0.load(Ordering::SeqCst) != 0
                && Instant::now() < limit
            {
                std::thread::yield_now();
            }
        }
    }

    /// A number that changes when a send that was `Busy` may be accepted.
    pub fn relief(&self) -> u64 {
        self.relief
    }

    /// The wakeups of this node.
    pub fn wakeups(&self) -> &Arc<Wakeups> {
        &self.wakeups
    }

    /// The peers, in the order of their indices.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        self.peers.iter().map(|peer| peer.rank)
    }
}

impl Drop for Shm {
    /// Threads of this process must not read our user's memory when we are gone.
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The most bytes a rank brings to a call on the board.
pub const BOARD_BYTES: usize = segment::BOARD_BYTES;

/// Room to combine what the kernel copied.
fn staging() -> Arena {
    Arena::new(STAGING_BUFFER)
}
