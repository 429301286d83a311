//! Small collectives of a whole node: every rank writes its part on a board of its own, and all read all boards.
//!
//! One post and `p-1` looks replace `p-1` messages each way, which is what counts when the bytes do not. Each rank's
//! board has two faces, used in turn. A face is written again two calls later: by then every member has posted the call
//! in between, which it does only when it has read everything of the call before. That holds because each member of each
//! of these collectives needs something of every other one, and no rank has two calls on the board at a time.

use super::bell::Bells;
use super::segment::{Segment, BOARD_BYTES, FACES};
use crate::device::host::{self, Combine};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::Region;
use crate::plan::Collective;
use crate::topo::Rank;
use crate::transport::{Blocks, Envelope, NodeCall};
use std::sync::atomic::Ordering;
use std::sync::Arc;

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
}

/// The boards of a node, seen from one of its ranks.
#[derive(Debug)]
pub struct Board {
    segment: Arc<Segment>,
    bells: Arc<Bells>,
    local: usize,
    members: Vec<Rank>,
    /// How many calls we have posted.
    calls: u64,
    waiting: Option<Waiting>,
    /// Where the results of the waiting call go.
    dst: Blocks,
    /// The members' posts; kept for its allocation.
    posts: Vec<Region>,
}

impl Board {
    /// The boards of `members`, all of which share the segment; we are number `local` of them.
    pub fn new(segment: Arc<Segment>, bells: Arc<Bells>, local: usize, members: Vec<Rank>) -> Board {
        let (dst, posts) = (Blocks::default(), Vec::with_capacity(members.len()));
        Board { segment, bells, local, members, calls: 0, waiting: None, dst, posts }
    }

    /// Posts our part of a call.
    pub fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        let bytes = call.src.bytes();
        if bytes > BOARD_BYTES || call.src.len() != call.collective.input_blocks(self.members.len(), Rank(0), Rank(0)) {
            return Err(Error::Internal(format!("{} blocks of {bytes} bytes do not go on a board", call.src.len())));
        }
        if self.waiting.is_some() {
            return Ok(Started::Busy);
        }
        self.calls += 1;
        let face = self.segment.board(self.local, self.face());
        let mut done = 0;
        for region in call.src.regions() {
            face.data.part(done, region.len()).copy_from(*region);
            done += region.len();
        }
        face.cell.sequence.store(envelope.sequence, Ordering::Relaxed);
        face.cell.signature.store(envelope.signature, Ordering::Relaxed);
        face.cell.bytes.store(bytes as u64, Ordering::Relaxed);
        face.cell.call.store(self.calls, Ordering::Release);
        self.bells.ring_others();
        self.dst.clone_from(call.dst);
        let offset = match call.collective {
            Collective::ReduceScatter => (0..self.local).map(|block| call.src.block_bytes(block)).sum(),
            _ => 0,
        };
        let NodeCall { collective, combine, .. } = call;
        self.waiting = Some(Waiting { token, envelope, collective, combine, offset, bytes, next: 0 });
        Ok(if self.advance()?.is_some() { Started::Done } else { Started::Pending })
    }

    fn face(&self) -> usize {
        self.calls as usize % FACES
    }

    /// Whether a call waits for others.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Whether [`advance`](Board::advance) would find something.
    pub fn has_work(&self) -> bool {
        self.waiting.as_ref().is_some_and(|waiting| self.has_posted(waiting.next))
    }

    fn has_posted(&self, member: usize) -> bool {
        self.segment.board(member, self.face()).cell.call.load(Ordering::Acquire) == self.calls
    }

    /// The members that the waiting call still needs.
    pub fn missing(&self) -> Vec<Rank> {
        let Some(waiting) = &self.waiting else { return Vec::new() };
        let missing = (waiting.next..self.members.len()).filter(|&member| !self.has_posted(member));
        missing.map(|member| self.members[member]).collect()
    }

    /// Takes what has been posted; the token when that completes the call.
    pub fn advance(&mut self) -> Result<Option<Token>> {
        let face = self.face();
        let Some(waiting) = &mut self.waiting else { return Ok(None) };
        while waiting.next < self.members.len() {
            let member = waiting.next;
            let post = self.segment.board(member, face);
            if post.cell.call.load(Ordering::Acquire) != self.calls {
                return Ok(None);
            }
            let gathers = waiting.collective == Collective::AllGather;
            let expected = if gathers { self.dst.block_bytes(member) } else { waiting.bytes };
            let sequence = post.cell.sequence.load(Ordering::Relaxed);
            let signature = post.cell.signature.load(Ordering::Relaxed);
            let arrived = Envelope { sequence, signature, ..waiting.envelope };
            let bytes = post.cell.bytes.load(Ordering::Relaxed) as usize;
            waiting.envelope.check(self.members[member], arrived, expected, bytes)?;
            if gathers {
                scatter(post.data, self.dst.block(member));
            }
            waiting.next += 1;
        }
        if let Some(combine) = waiting.combine {
            self.posts.clear();
            let members = 0..self.members.len();
            self.posts.extend(members.map(|member| self.segment.board(member, face).data));
            reduce(combine, &mut self.posts, waiting.offset, self.dst.regions());
        }
        Ok(self.waiting.take().map(|waiting| waiting.token))
    }

    /// Forgets the waiting call.
    pub fn cancel(&mut self) {
        self.waiting = None;
    }
}

/// Copies the beginning of `from` to the regions, in order.
fn scatter(from: Region, to: &[Region]) {
    let mut done = 0;
    for region in to {
        region.copy_from(from.part(done, region.len()));
        done += region.len();
    }
}

/// Folds all posts, from `offset` in each, in member order: the same expression on every rank.
fn reduce(combine: Combine, posts: &mut [Region], offset: usize, to: &[Region]) {
    let mut offset = offset;
    for region in to {
        let parts: smallvec::SmallVec<[Region; 16]> =
            posts.iter().map(|post| post.part(offset, region.len())).collect();
        host::reduce(combine.dtype, combine.operator, combine.divisor, &parts, *region);
        offset += region.len();
    }
}
