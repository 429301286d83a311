//! Collectives of a whole node: every rank posts its part on a board of its own, and all read all boards.
//!
//! One post and `p-1` looks replace `p-1` messages each way, and all operands of a reduction are at hand at once. Each
//! rank's board has two faces, used in turn. A face is written again two calls later: by then every member has posted
//! the call in between, which it does only when it has read everything of the call before. That holds because each
//! member of each of these collectives needs something of every other one, and no rank has two calls on the board at a
//! time.
//!
//! A part that lies in shared allocations is not copied: the face lists where it is, and the others map and read it in
//! place. Then the call is complete for its poster when all members have told that they have read.

use super::pull::{gave_up_error, mapped, Mappings};
use super::record::Listing;
use super::segment::{Face, Segment, BOARD_BYTES, FACES};
use super::wakeup::Wakeups;
use crate::device::host::{self, Combine};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{shared, Region};
use crate::plan::Collective;
use crate::topo::Rank;
use crate::transport::target::Pieces;
use crate::transport::{Blocks, Envelope, NodeCall};
use smallvec::SmallVec;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;

/// Parts of fewer bytes are copied even when they could be listed: a copy costs less than waiting for the readers.
const LISTED_BYTES: usize = 32 << 10;

/// A call that has been posted and is not complete.
#[derive(Debug)]
struct Waiting {
    token: Token,
    envelope: Envelope,
    collective: Collective,
    combine: Option<Combine>,
    /// Where our part of every member's post begins, and our own post's bytes.
    offset: usize,
    bytes: usize,
    /// The first member that has not been seen to post.
    next: usize,
    /// Our part is read where it lies.
    listed: bool,
    /// We have read everything; so have the members before this one.
    read: Option<usize>,
}

/// A member's post, in our address space.
#[derive(Debug)]
struct Post {
    pieces: Pieces,
    _mappings: Mappings,
}

/// The boards of a node, seen from one of its ranks.
#[derive(Debug)]
pub struct SharedBuffers {
    segment: Arc<Segment>,
    wakeups: Arc<Wakeups>,
    local: usize,
    members: Vec<Rank>,
    /// Whether the members can map each other's shared allocations.
    maps: bool,
    /// How many calls we have posted.
    calls: u64,
    waiting: Option<Waiting>,
    /// Where the results of the waiting call go.
    dst: Blocks,
    /// What the members have posted for it.
    posts: Vec<Post>,
    /// A listing as bytes; kept for its allocation.
    body: Vec<u8>,
}

impl SharedBuffers {
    /// The boards of `members`, all of which share the segment; we are number `local` of them.
    pub fn new(
        segment: Arc<Segment>,
        wakeups: Arc<Wakeups>,
        local: usize,
        members: Vec<Rank>,
        maps: bool,
    ) -> SharedBuffers {
        let (dst, posts, body) = (Blocks::default(), Vec::new(), Vec::new());
        SharedBuffers { segment, wakeups, local, members, maps, calls: 0, waiting: None, dst, posts, body }
    }

    /// Posts our part of a call.
    pub fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        let NodeCall { collective, src, dst, combine } = call;
        let bytes = src.bytes();
        if bytes > BOARD_BYTES || src.len() != collective.input_blocks(self.members.len(), Rank(0), Rank(0)) {
            return Err(Error::Internal(format!("{} blocks of {bytes} bytes do not go on a board", src.len())));
        }
        if self.waiting.is_some() {
            return Ok(Started::Busy);
        }
        self.calls += 1;
        let listed = self.post(envelope, collective, src, bytes);
        self.dst.clone_from(dst);
        self.posts.clear();
        let offset = match collective {
            Collective::ReduceScatter => (0..self.local).map(|block| src.block_bytes(block)).sum(),
            _ => 0,
        };
        let waiting = Waiting { token, envelope, collective, combine, offset, bytes, next: 0, listed, read: None };
        self.waiting = Some(waiting);
        Ok(if self.advance()?.is_some() { Started::Done } else { Started::Pending })
    }

    /// Fills our face and shows it; whether our part is listed.
    fn post(&mut self, envelope: Envelope, collective: Collective, src: &Blocks, bytes: usize) -> bool {
        // The result of an all-reduce in place goes over what others would still read.
        let may_list = self.maps && bytes >= LISTED_BYTES && collective != Collective::AllReduce;
        let listing = if may_list { Listing::new(src.regions(), shared::find) } else { Listing::default() };
        let all_shared = listing.pieces.iter().all(|(_, _, key)| key.is_some());
        let listed = all_shared && !listing.pieces.is_empty() && listing.encoded_len() <= BOARD_BYTES;
        let Face { cell, data } = self.segment.face(self.local, self.face());
        let (mut pieces, mut keys) = (0, 0);
        if listed {
            listing.encode(&mut self.body);
            data.part(0, self.body.len()).write(&self.body);
            (pieces, keys) = (listing.pieces.len() as u32, listing.keys.len() as u32);
        } else {
            let mut done = 0;
            for region in src.regions() {
                data.part(done, region.len()).copy_from(*region);
                done += region.len();
            }
        }
        cell.sequence.store(envelope.sequence, Ordering::Relaxed);
        cell.signature.store(envelope.signature, Ordering::Relaxed);
        cell.bytes.store(bytes as u64, Ordering::Relaxed);
        cell.pieces.store(pieces, Ordering::Relaxed);
        cell.keys.store(keys, Ordering::Relaxed);
        cell.call.store(self.calls, Ordering::Release);
        self.wakeups.ring_others();
        listed
    }

    fn face(&self) -> usize {
        self.calls as usize % FACES
    }

    /// Whether a call waits for others.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Whether [`advance`](SharedBuffers::advance) would find something.
    pub fn has_work(&self) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| match waiting.read {
            None => self.has_posted(waiting.next),
            Some(next) => self.has_read(next),
        })
    }

    fn has_posted(&self, member: usize) -> bool {
        self.segment.face(member, self.face()).cell.call.load(Ordering::Acquire) == self.calls
    }

    fn has_read(&self, member: usize) -> bool {
        self.segment.board(member).read.0.load(Ordering::Acquire) >= self.calls
    }

    /// The members that the waiting call still needs.
    pub fn missing(&self) -> Vec<Rank> {
        let Some(waiting) = &self.waiting else { return Vec::new() };
        let needed = |&member: &usize| match waiting.read {
            None => member >= waiting.next && !self.has_posted(member),
            Some(next) => member >= next && !self.has_read(member),
        };
        (0..self.members.len()).filter(needed).map(|member| self.members[member]).collect()
    }

    /// Takes what has been posted; the token when that completes the call.
    pub fn advance(&mut self) -> Result<Option<Token>> {
        if self.waiting.as_ref().is_some_and(|waiting| waiting.read.is_none()) && !self.read()? {
            return Ok(None);
        }
        let Some(waiting) = &self.waiting else { return Ok(None) };
        if waiting.listed {
            let first = waiting.read.unwrap_or(0);
            let next = (first..self.members.len()).find(|&member| !self.has_read(member));
            if let (Some(next), Some(waiting)) = (next, &mut self.waiting) {
                waiting.read = Some(next);
                return Ok(None);
            }
        }
        Ok(self.waiting.take().map(|waiting| waiting.token))
    }

    /// Reads what has been posted; true when that was all.
    fn read(&mut self) -> Result<bool> {
        let Some(waiting) = &mut self.waiting else { return Ok(true) };
        let face = self.calls as usize % FACES;
        while waiting.next < self.members.len() {
            let member = waiting.next;
            let post = self.segment.face(member, face);
            if post.cell.call.load(Ordering::Acquire) != self.calls {
                return Ok(false);
            }
            let gathers = waiting.collective == Collective::AllGather;
            let expected = if gathers { self.dst.block_bytes(member) } else { waiting.bytes };
            let post = take(&post, self.members[member], waiting.envelope, expected)?;
            if gathers {
                scatter(&post.pieces, self.dst.block(member));
            }
            self.posts.push(post);
            waiting.next += 1;
        }
        if let Some(combine) = waiting.combine {
            reduce(combine, &self.posts, waiting.offset, self.dst.regions());
        }
        self.posts.clear();
        let listed = |member: &usize| self.segment.face(*member, face).cell.pieces.load(Ordering::Relaxed) > 0;
        // Who gives up says so before its memory holds something else, which may have been read then.
        let gave_up = |&member: &usize| {
            member != self.local && self.segment.control(member, self.local).cancelled.0.load(Ordering::SeqCst) != 0
        };
        fence(Ordering::SeqCst);
        if let Some(member) = (0..self.members.len()).filter(listed).find(gave_up) {
            return Err(gave_up_error(self.members[member]));
        }
        waiting.read = Some(0);
        self.segment.board(self.local).read.0.store(self.calls, Ordering::Release);
        if (0..self.members.len()).any(|member| listed(&member)) {
            self.wakeups.ring_others();
        }
        Ok(true)
    }

    /// Forgets the waiting call.
    pub fn cancel(&mut self) {
        self.waiting = None;
        self.posts.clear();
    }
}

/// What a member has posted, if it is what all members should.
fn take(face: &Face<'_>, member: Rank, envelope: Envelope, expected: usize) -> Result<Post> {
    let Face { cell, data } = face;
    let sequence = cell.sequence.load(Ordering::Relaxed);
    let signature = cell.signature.load(Ordering::Relaxed);
    let bytes = cell.bytes.load(Ordering::Relaxed) as usize;
    envelope.check(member, Envelope { sequence, signature, ..envelope }, expected, bytes)?;
    let (pieces, keys) = (cell.pieces.load(Ordering::Relaxed), cell.keys.load(Ordering::Relaxed));
    if pieces == 0 {
        // SAFETY: the segment must outlive every use; because posts are forgotten with the call, which the owner of the
        // segment runs.
        let data = unsafe { data.part(0, bytes).unbound() };
        return Ok(Post { pieces: Pieces::new(&[data]), _mappings: Mappings::new() });
    }
    let mut body = vec![0; Listing::bytes(pieces, keys)];
    data.part(0, body.len()).read(&mut body);
    let listing = Listing::decode(member, pieces, &body)?;
    match mapped(&listing) {
        Some((pieces, mappings)) if pieces.bytes() == bytes => Ok(Post { pieces, _mappings: mappings }),
        _ => Err(Error::System(format!("the shared memory that rank {member} lists cannot be mapped"))),
    }
}

/// Copies the beginning of `from` to the regions, in order.
fn scatter(from: &Pieces, to: &[Region]) {
    let mut at = 0;
    for region in to {
        let mut done = 0;
        while done < region.len() {
            let run = from.run(at, region.len() - done);
            region.part(done, run.len()).copy_from(run);
            (at, done) = (at + run.len(), done + run.len());
        }
    }
}

/// Folds all posts, from `offset` in each, in member order: the same expression on every rank. Pieces are of whole
/// elements.
fn reduce(combine: Combine, posts: &[Post], offset: usize, to: &[Region]) {
    let mut at = offset;
    for region in to {
        let mut done = 0;
        while done < region.len() {
            let mut runs: SmallVec<[Region; 16]> =
                posts.iter().map(|post| post.pieces.run(at, region.len() - done)).collect();
            let len = runs.iter().map(Region::len).min().unwrap_or(0);
            runs.iter_mut().for_each(|run| *run = run.part(0, len));
            host::reduce(combine.dtype, combine.operator, combine.divisor, &runs, region.part(done, len));
            (at, done) = (at + len, done + len);
        }
    }
}
