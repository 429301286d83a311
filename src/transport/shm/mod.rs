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
//! hold each other up; [`super::matching`] gives messages to receives, [`super::streams`] says what bounds those that wait.

mod fold;
pub mod open;
mod post;
mod processors;
pub mod pull;
mod rates;
pub mod record;
mod ring;
mod segment;
mod shared_buffers;
mod tried_ways;
pub mod wakeup;

pub use rates::Rates;
pub use segment::area_bytes;
pub use shared_buffers::pipelined_bytes;

use crate::error::{Error, Result, ShortResult};
use crate::exec::{Started, Token};
use crate::memory::{shared, Arena, Bytes, Region};
use crate::topo::Rank;
use processors::Sharing;
use pull::{Pull, Reach, SLICE, STAGING_BUFFER};
use record::{Listing, RecordHeader, RecordKind, NO_SLOT};
use ring::{Consumer, Producer};
use segment::{Segment, SlotBits};
use shared_buffers::SharedBuffers;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tried_ways::{size_class, TriedWays};
use wakeup::Wakeups;

use super::header::NO_ID;
use super::matching::{check_usable, Fetch, Matching, MessageHead, Received};
use super::streams::Posted;
use super::{Envelope, FlatCall, NodeCall, Sink};

/// Records taken from one peer before the next one gets its turn.
const RECORDS_PER_POLL: usize = 64;
/// While a call waits on the board, the rings are looked at once in so many polls.
const BOARD_POLLS_PER_RING_POLL: u32 = 16;
/// The ways of a long message that only the kernel could read where it lies: that, and through the ring.
const RING: usize = 1;
/// The longest wait for a thread of this process that reads our memory when we cancel: it reads a slice at most.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// Another rank of this node.
#[derive(Debug)]
struct Peer {
    rank: Rank,
    local: usize,
    reach: Reach,
    process: Option<OwnedFd>,
    output: Producer,
    input: Consumer,
    /// Announcements list where the bytes lie. The number of a message is its slot.
    matching: Matching<Listing>,
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
    cancelled: bool,
    /// Where all ranks of the node share the segment.
    board: Option<SharedBuffers>,
    /// Polls since the rings were looked at.
    board_polls: u32,
    /// Whether we share our processors with other ranks of the node.
    sharing: Sharing,
    /// Whether long messages of the only peer are sooner read by the kernel (0) or sent through the ring.
    ways: TriedWays,
    /// The message that is timed for that.
    timed: Option<TimedMessage>,
    /// What shows to ranks of this process that we are one.
    _met: Vec<crate::memory::shared::Met>,
    _presence: open::Presence,
}

/// A long message on its way: since when, and how.
#[derive(Debug)]
struct TimedMessage {
    slot: u32,
    bytes: usize,
    way: usize,
    begun: Instant,
}

fn header(kind: RecordKind, envelope: Envelope, bytes: usize, number: u64, body: usize) -> RecordHeader {
    let slot = if number == NO_ID { NO_SLOT } else { number as u32 };
    RecordHeader { kind, len: 0, envelope, bytes, slot, pieces: 0, keys: 0, body: body as u32 }
}

/// What a record says of its message.
fn message(header: &RecordHeader) -> MessageHead {
    let number = if header.slot == NO_SLOT { NO_ID } else { header.slot.into() };
    MessageHead { envelope: header.envelope, bytes: header.bytes, number }
}

impl Peer {
    /// The number of the message that the receiver names by its slot.
    fn number(&self, slot: u32) -> Result<u64> {
        let open = self.matching.numbered(slot);
        open.ok_or_else(|| self.matching.nonsense("an answer to a message that is not open"))
    }
}

/// Sets a slot's bit.
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
    /// Sends a short message; `Busy` where that has to be tried as any other is, and nothing has been done.
    #[inline]
    pub fn send_short(&mut self, peer: usize, envelope: Envelope, src: Region) -> ShortResult<Started> {
        check_usable(self.cancelled)?;
        Ok(match src.len() <= self.eager_bytes {
            true => self.send_small(peer, envelope, &[src], src.len()),
            false => Started::Busy,
        })
    }

    /// Posts a message to a peer.
    pub fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        check_usable(self.cancelled)?;
        let bytes = src.iter().map(Region::len).sum();
        if bytes <= self.eager_bytes {
            Ok(self.send_small(peer, envelope, src, bytes))
        } else {
            Ok(self.send_large(peer, token, envelope, src, bytes))
        }
    }

    #[inline]
    fn send_small(&mut self, index: usize, envelope: Envelope, src: &[Region], bytes: usize) -> Started {
        let peer = &mut self.peers[index];
        if !peer.matching.takes_short(envelope.channel) {
            return Started::Busy;
        }
        let Some(at) = peer.output.reserve(&self.segment, bytes) else { return Started::Busy };
        let body = peer.output.body(at, bytes);
        let mut done = 0;
        for region in src {
            body.part(done, region.len()).copy_from(*region);
            done += region.len();
        }
        let number = peer.matching.short_sent(envelope.channel);
        peer.output.publish(at, header(RecordKind::Eager, envelope, bytes, number, bytes));
        self.wakeups.ring_after_swap(peer.local);
        Started::Done
    }

    #[inline(never)]
    fn send_large(&mut self, index: usize, token: Token, envelope: Envelope, src: &[Region], bytes: usize) -> Started {
        let peer = &mut self.peers[index];
        if !peer.matching.takes_long(envelope.channel) {
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
        let number = peer.matching.long_sent(envelope.channel, token, src);
        peer.output.body(at, self.body.len()).write(&self.body);
        let mut header = header(RecordKind::Large, envelope, bytes, number, self.body.len());
        header.pieces = listing.pieces.len() as u32;
        header.keys = listing.keys.len() as u32;
        peer.output.publish(at, header);
        self.wakeups.ring_after_swap(peer.local);
        Started::Pending
    }

    /// Posts a receive from a peer.
    pub fn recv(&mut self, index: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        check_usable(self.cancelled)?;
        match self.peers[index].matching.recv(token, envelope, sink)? {
            Received::Waits => {}
            Received::Long(message) => self.fetch(index, *message)?,
            Received::Short(mark) => {
                self.acknowledge(index, mark);
                return Ok(Started::Done);
            }
        }
        Ok(Started::Pending)
    }

    /// Takes a short message from its peer's ring straight to where it belongs, if it is the next there. `Pending` where
    /// nothing has come yet; `Busy` where the receive has to be posted, and nothing has been done.
    #[inline]
    pub fn recv_short(&mut self, index: usize, envelope: Envelope, to: Region) -> ShortResult<Started> {
        check_usable(self.cancelled)?;
        let peer = &mut self.peers[index];
        if !peer.matching.is_empty(envelope.channel) {
            return Ok(Started::Busy);
        }
        let Some((header, body)) = peer.input.next(&self.segment)? else { return Ok(Started::Pending) };
        if header.kind != RecordKind::Eager || header.envelope.channel != envelope.channel {
            return Ok(Started::Busy);
        }
        envelope.check(peer.rank, header.envelope, to.len(), body.len())?;
        to.copy_from(body);
        peer.input.advance(&self.segment, &header);
        if peer.input.take_hunger(&self.segment) {
            self.wakeups.ring(peer.local);
        }
        self.acknowledge(index, message(&header).mark());
        Ok(Started::Done)
    }

    #[inline]
    fn acknowledge(&self, index: usize, number: Option<u64>) {
        let Some(number) = number else { return };
        let peer = &self.peers[index];
        set_bit(&self.segment.control(peer.local, self.local).acked.0, number as u32);
        self.wakeups.ring(peer.local);
    }

    /// Whether a message that only the kernel could fetch may come sooner through its ring: its sender then brings it half of the
    /// way, instead of waiting. Not where we have something to send as well, or share our processors; nor where a sender may
    /// have several receivers, which fetch at the same time what it would bring them one after the other.
    fn may_come_by_ring(&self, announced: &Listing) -> bool {
        let is_shared = announced.pieces.iter().all(|(_, _, key)| key.is_some());
        let [peer] = &self.peers[..] else { return false };
        !is_shared && !self.sharing.shares() && !peer.matching.owes()
    }

    /// A long message has come.
    fn note_time(&mut self, slot: u32) {
        if let Some(TimedMessage { bytes, way, begun, .. }) = self.timed.take_if(|timed| timed.slot == slot) {
            self.ways.tell(size_class(bytes), way, begun.elapsed().as_nanos() as f64 / bytes.max(1) as f64);
        }
    }

    /// Begins to fetch a large message, or asks for it.
    fn fetch(&mut self, index: usize, message: Fetch<Listing>) -> Result<()> {
        let peer = &self.peers[index];
        let Fetch { number, posted, announced } = message;
        if matches!(peer.reach, Reach::Kernel { .. }) && self.may_come_by_ring(&announced) {
            let (slot, bytes) = (number as u32, posted.target.bytes());
            let way = self.ways.choose(size_class(bytes), RING);
            if self.timed.is_none() {
                self.timed = Some(TimedMessage { slot, bytes, way, begun: Instant::now() });
            }
            if way == RING {
                return self.ask_for(index, slot, posted, 0);
            }
        }
        let peer = &self.peers[index];
        match Pull::new(index, peer.rank, peer.reach, number as u32, &announced, posted) {
            Ok(pull) => self.pulls.push_back(pull),
            Err(posted) => self.ask_for(index, number as u32, *posted, 0)?,
        }
        Ok(())
    }

    /// Has the bytes of a message come through the ring. The first `fetched` are known.
    fn ask_for(&mut self, index: usize, slot: u32, posted: Posted, fetched: usize) -> Result<()> {
        let peer = &mut self.peers[index];
        peer.matching.await_bytes(slot.into(), posted, fetched)?;
        set_bit(&self.segment.control(peer.local, self.local).granted.0, slot);
        self.wakeups.ring(peer.local);
        Ok(())
    }

    /// Posts our part of a collective of all ranks of the node.
    pub fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        self.board_to_call()?.call(token, envelope, call)
    }

    /// Whether this rank shares its processors with others, or, as far as is known, the one on which it waits now.
    pub fn shares_processor(&self, are_busy: bool) -> bool {
        self.sharing.shares() || are_busy && processors::waits_beside(&self.segment, self.local)
    }

    /// Whether it does where each rank waits for a thread of its process.
    pub fn shares_with_threads(&self) -> bool {
        self.sharing.shares_with_threads()
    }

    /// Tells and asks that anew, where it was long ago.
    pub fn refresh_sharing(&mut self) {
        self.sharing.refresh(&self.segment, self.local);
    }

    fn board(&mut self) -> Result<&mut SharedBuffers> {
        self.board.as_mut().ok_or_else(|| Error::Internal("a call on a node without a board".into()))
    }

    /// The same, for a call that begins.
    fn board_to_call(&mut self) -> Result<&mut SharedBuffers> {
        check_usable(self.cancelled)?;
        let shares = self.sharing.shares();
        let board = self.board()?;
        board.shares = shares;
        Ok(board)
    }

    /// The same, of blocks that lie in one piece each. It completes as token 0.
    #[inline]
    pub fn call_flat(&mut self, envelope: Envelope, call: &FlatCall) -> ShortResult<Started> {
        self.board_to_call()?.call_flat(envelope, call)
    }

    /// Looks at the board alone.
    #[inline]
    pub fn advance_board(&mut self) -> ShortResult<Started> {
        self.board()?.advance_short()
    }

    /// Whether the ranks of the node share a board.
    pub fn has_board(&self) -> bool {
        self.board.is_some()
    }

    /// The ranks that a call on the board waits for.
    pub fn missing(&self) -> Vec<Rank> {
        self.board.as_ref().map_or_else(Vec::new, SharedBuffers::missing)
    }

    // The parts are apart from `poll`, whose frame is on the stack of every call on the board.

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
            self.push_outflows(index, done);
        }
        self.advance_pulls(done)
    }

    /// Acknowledgements and grants for what we sent.
    #[inline(never)]
    fn take_answers(&mut self, index: usize, done: &mut Vec<Token>) -> Result<()> {
        let peer = &mut self.peers[index];
        if !peer.matching.has_numbered() {
            return Ok(());
        }
        let control = self.segment.control(self.local, peer.local);
        take_bits(&control.acked.0, |slot| {
            let number = peer.number(slot)?;
            if peer.matching.acknowledged(number)?.is_some() {
                done.extend(peer.matching.close(number).map(|message| message.token));
            }
            Ok(())
        })?;
        take_bits(&control.granted.0, |slot| {
            let number = peer.number(slot)?;
            peer.matching.grant(number)
        })
    }

    #[inline(never)]
    fn take_records(&mut self, index: usize, done: &mut Vec<Token>) -> Result<()> {
        for count in 0..=RECORDS_PER_POLL {
            let peer = &mut self.peers[index];
            let next = if count < RECORDS_PER_POLL { peer.input.next(&self.segment)? } else { None };
            let Some((header, body)) = next else {
                if count > 0 && peer.input.look_for_hunger(&self.segment) {
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
        let peer = &mut self.peers[index];
        match header.kind {
            RecordKind::Eager => {
                let mark = peer.matching.short_came(&message(header), body, done)?;
                self.acknowledge(index, mark);
                Ok(())
            }
            RecordKind::Large => {
                self.body.resize(body.len(), 0);
                body.read(&mut self.body);
                let listing = Listing::decode(peer.rank, header.pieces, &self.body)?;
                match peer.matching.long_came(&message(header), listing)? {
                    Some(message) => self.fetch(index, message),
                    None => Ok(()),
                }
            }
            RecordKind::Chunk => self.take_chunk(index, header, body, done),
            RecordKind::Skip => Ok(()),
        }
    }

    fn take_chunk(
        &mut self,
        index: usize,
        header: &RecordHeader,
        body: Bytes<'_>,
        done: &mut Vec<Token>,
    ) -> Result<()> {
        let matching = &mut self.peers[index].matching;
        let (offset, len) = (header.bytes, body.len());
        let Some(inflow) = matching.inflow(header.slot.into()).filter(|inflow| inflow.has(offset, len)) else {
            return Err(matching.nonsense("bytes nobody asked for"));
        };
        let known = inflow.begun().saturating_sub(offset).min(len);
        if known < len {
            inflow.posted.target.consume(offset + known, body.part(known, len - known));
        }
        matching.part_came(header.slot.into(), len, done);
        if matching.inflow(header.slot.into()).is_none() {
            self.note_time(header.slot);
        }
        Ok(())
    }

    /// Passes the bytes of granted messages through the ring, as far as it takes them.
    #[inline(never)]
    fn push_outflows(&mut self, index: usize, done: &mut Vec<Token>) {
        let Peer { matching, output, local, .. } = &mut self.peers[index];
        while let Some((number, outgoing)) = matching.next_granted() {
            let Some((offset, len)) = outgoing.next_part(output.chunk_bytes()) else { return };
            let Some(at) = output.reserve(&self.segment, len) else { return };
            let body = output.body(at, len);
            let mut copied = 0;
            while copied < len {
                let run = outgoing.src.run(offset + copied, len - copied);
                body.part(copied, run.len()).copy_from(run);
                copied += run.len();
            }
            outgoing.part_begun(len);
            let nothing = Envelope { channel: 0, sequence: 0, signature: 0 };
            output.publish(at, header(RecordKind::Chunk, nothing, offset, number, len));
            self.wakeups.ring_after_swap(*local);
            if matching.part_sent(number, len, done) {
                matching.close(number);
            }
        }
    }

    /// Fetches large messages in the order in which they were matched, a slice in all.
    #[inline(never)]
    fn advance_pulls(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let mut budget = SLICE;
        while budget > 0 {
            let Some(pull) = self.pulls.front_mut() else { return Ok(()) };
            let peer = &self.peers[pull.peer];
            let control = self.segment.control(peer.local, self.local);
            let before = pull.left();
            if !pull.advance(budget, control, self.staging.region())? {
                self.ask_for_the_rest()?;
                continue;
            }
            budget = budget.saturating_sub(before - pull.left());
            if pull.left() > 0 {
                return Ok(());
            }
            let slot = pull.slot;
            set_bit(&control.acked.0, slot);
            self.wakeups.ring(peer.local);
            self.note_time(slot);
            done.extend(self.pulls.pop_front().map(|pull| pull.posted.token));
        }
        Ok(())
    }

    /// Has the first message that is being fetched come through the ring instead, and all later ones of its sender.
    fn ask_for_the_rest(&mut self) -> Result<()> {
        let Some(pull) = self.pulls.pop_front() else { return Ok(()) };
        let peer = &mut self.peers[pull.peer];
        if let Reach::Kernel { pid } = peer.reach {
            peer.reach = Reach::Ring { pid };
            crate::info!("rank {} may not be read any more: {}", peer.rank, peer.reach);
        }
        let fetched = pull.done();
        self.ask_for(pull.peer, pull.slot, pull.posted, fetched)
    }

    /// Whether `poll` would find something; the second look before a sleep.
    pub fn has_work(&mut self) -> bool {
        let (segment, local) = (&self.segment, self.local);
        !self.pulls.is_empty()
            || self.board.as_ref().is_some_and(SharedBuffers::has_work)
            || self.peers.iter_mut().any(|peer| {
                let control = segment.control(local, peer.local);
                peer.input.has_record()
                    || (peer.matching.has_numbered() && (any_bit(&control.acked.0) || any_bit(&control.granted.0)))
                    || peer.output.take_relief(segment)
            })
    }

    /// Fails when the process of a peer that we wait for has ended.
    pub fn check_alive(&self) -> Result<()> {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        let missing = self.missing();
        let waiting = |peer: &&Peer| missing.contains(&peer.rank) || peer.matching.expects() || peer.matching.owes();
        for peer in self.peers.iter().filter(waiting) {
            let Some(process) = &peer.process else { continue };
            let mut watched = [PollFd::new(process, PollFlags::IN)];
            let ended = poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
            // What it sent or posted before it ended still counts.
            let came = peer.input.has_record() || self.board.as_ref().is_some_and(SharedBuffers::has_work);
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
        self.timed = None;
        if let Some(board) = &mut self.board {
            board.cancel();
        }
        let limit = Instant::now() + CANCEL_LIMIT;
        for peer in &mut self.peers {
            peer.matching.cancel();
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
        self.peers.iter().map(|peer| peer.matching.relief()).sum()
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

/// Room to combine what the kernel copied.
fn staging() -> Arena {
    Arena::new(STAGING_BUFFER)
}
