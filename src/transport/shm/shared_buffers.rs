//! Collectives of a whole node: ranks post their parts on boards of their own, and those who need them read them there.
//!
//! One post and a look at each part replace messages, and all operands of a reduction are at hand at once. A rank's board
//! has a few faces, used in turn: the n-th call's post is on face n modulo their number. A face or an area is written again
//! only when everybody who reads it has read it, which mostly shows without a look: a rank posts a call only when it has
//! read everything of the one before, and no rank has two calls on the board at a time. Who only posts, as the root of a
//! broadcast, looks how far the others have read.
//!
//! A long part need not be copied: the face lists where it is ([`post`]), and the others read it in place, or have the
//! kernel copy it. Then the call is complete for its poster when they have told that they have read. [`Rates`] tells
//! which is faster. Who may not read another process's memory says so, and the poster copies after all.

mod short_call;
mod timed;
mod waits;

use super::fold::{fold, Operand, OperandBytes};
use super::post::{self, Form, Posting, Unread};
use super::pull::{gave_up_error, unreadable, Reach};
use super::rates::Rates;
use super::record::Listing;
use super::segment::{area_bytes, Segment, AREAS, FACES, PAGES, PAGE_BYTES, READS, READS_NOT};
use super::tried_ways::TriedWays;
use super::wakeup::Wakeups;
use crate::device::host::Combine;
use crate::error::{Error, Result, ShortResult};
use crate::exec::{Started, Token};
use crate::memory::{shared, stream_bytes, Arena, Region};
use crate::plan::Collective;
use crate::topo::Rank;
use crate::transport::target::Pieces;
use crate::transport::{Blocks, Envelope, FlatCall, NodeCall};
use smallvec::SmallVec;
use std::cell::Cell;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;
use timed::{TakenWay, TimedCalls, AREA, KERNEL, TRIED_BYTES};

/// Parts of fewer bytes are copied even when they lie in shared allocations: a copy costs less than waiting for the readers.
const LISTED_BYTES: usize = 32 << 10;
/// Parts of fewer bytes are copied even to threads of this process.
const LENT_BYTES: usize = 4 << 10;
/// From operations of this many bytes on ranks that have nothing else to do bring their parts half of the way. Measured on a
/// Xeon.
const IDLE_OWNERS_BYTES: usize = 1 << 20;

/// Another rank of the node, or we.
#[derive(Debug)]
struct Member {
    rank: Rank,
    reach: Reach,
    /// The last call in which it is known to have read all it needs.
    read: Cell<u64>,
}

/// What a post takes of the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Face,
    Page,
    Area,
}

/// What a call that has been made waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Room for our post: this of it was in use.
    Room(Place),
    /// Posts of others; so many have been taken.
    Posts(usize),
    /// The same, and this part that could not be read shall be copied by its poster.
    Copy(usize),
    /// Others, to read what we have lent.
    Readers,
}

/// A call that is not complete.
#[derive(Debug)]
struct Waiting {
    token: Token,
    envelope: Envelope,
    collective: Collective,
    combine: Option<Combine>,
    root: usize,
    stage: Stage,
    /// Our part is read where it lies.
    lent: bool,
    /// We have read parts of others where they lie.
    borrowed: bool,
    /// Bytes of the result that have been reduced.
    reduced: usize,
    /// Which of the ways of [`SharedBuffers::ways`] it takes, if they are to choose from.
    taken: Option<TakenWay>,
    /// The call, where it is short and its blocks are not in `src` and `dst` yet.
    short: Option<Short>,
}

/// A call whose parts lie in a face's line or page, all in the same form.
#[derive(Debug, Clone, Copy)]
struct Short {
    call: FlatCall,
    form: Form,
    /// What every post says.
    word: u64,
    /// Posts that have been taken.
    taken: usize,
}

impl Waiting {
    fn new(
        token: Token,
        envelope: Envelope,
        (collective, root): (Collective, usize),
        combine: Option<Combine>,
    ) -> Waiting {
        Waiting {
            token,
            envelope,
            collective,
            combine,
            root,
            stage: Stage::Room(Place::Face),
            lent: false,
            borrowed: false,
            reduced: 0,
            taken: None,
            short: None,
        }
    }
}

/// The boards of a node, seen from one of its ranks.
#[derive(Debug)]
pub struct SharedBuffers {
    segment: Arc<Segment>,
    wakeups: Arc<Wakeups>,
    local: usize,
    members: Vec<Member>,
    /// Whether the members can map each other's shared allocations.
    maps: bool,
    /// Whether our part may be read through the kernel: nobody has been refused yet.
    lends: bool,
    /// Whether we share our processors with other ranks, whose turns it costs to wait until they have read what we lend.
    pub shares: bool,
    /// Whether what only the kernel can read is lent to it (0), or brought through an area.
    ways: TriedWays,
    timed: TimedCalls,
    /// How many calls we have made.
    calls: u64,
    /// The last call in which all others are known to have read all they need.
    read_by_all: Cell<u64>,
    /// The call that used each face and area last, and its only reader, if it has but one.
    faces: [(u64, Option<usize>); FACES],
    pages: [(u64, Option<usize>); PAGES],
    areas: [(u64, Option<usize>); AREAS],
    waiting: Option<Waiting>,
    /// Bytes of the longer of our buffers in the operation of which the waiting call is a part.
    operation_bytes: usize,
    /// The input of the waiting call, and where its results go.
    src: Blocks,
    dst: Blocks,
    /// What the members have posted for it, from the one after us on.
    posts: Vec<Posting>,
    /// Where our part lies, and that as bytes; kept for their allocations.
    listing: Listing,
    body: Vec<u8>,
    /// Room to reduce what the kernel copied; made when it is first needed.
    staging: Arena,
}

/// Whether a member of a call brings something that others read.
fn brings(collective: Collective, member: usize, root: usize) -> bool {
    match collective {
        Collective::Broadcast | Collective::Scatter => member == root,
        Collective::Gather | Collective::Reduce => member != root,
        _ => true,
    }
}

/// From how many bytes of an operation on its parts go through areas, piece after piece, although a reader may fetch them
/// itself. An operation's bytes are those of the longest of its buffers on all ranks; those of `stream_bytes` and more bypass
/// the cache.
pub fn pipelined_bytes(collective: Collective, stream_bytes: usize) -> usize {
    match collective {
        // Whoever reads does most of the work, and the others would only wait.
        Collective::Broadcast | Collective::Gather => IDLE_OWNERS_BYTES,
        // What no cache holds is folded faster out of areas, which one does hold.
        Collective::AllReduce | Collective::ReduceScatter => stream_bytes / 2,
        Collective::AllGather | Collective::Reduce => stream_bytes,
        // Those who bring something have as much to do as those who read it.
        _ => usize::MAX,
    }
}

/// Whether what a member brings has a block for each.
fn is_cut(collective: Collective) -> bool {
    matches!(collective, Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter)
}

/// Whether a member of a call reads something of others.
fn takes(collective: Collective, member: usize, root: usize) -> bool {
    match collective {
        Collective::Broadcast | Collective::Scatter => member != root,
        Collective::Gather | Collective::Reduce => member == root,
        _ => true,
    }
}

/// A buffer of blocks.
fn cut(buffer: Region, block_bytes: usize, blocks: &mut Blocks) {
    blocks.clear();
    for at in (0..buffer.len()).step_by(block_bytes.max(1)) {
        blocks.push(std::iter::once(buffer.part(at, block_bytes)));
    }
}

impl SharedBuffers {
    /// The boards of `members`, all of which share the segment and can be reached so; we are number `local` of them.
    pub fn new(
        segment: &Arc<Segment>,
        wakeups: &Arc<Wakeups>,
        local: usize,
        members: Vec<(Rank, Reach)>,
        maps: bool,
    ) -> SharedBuffers {
        let is_read = |(_, reach): &(Rank, Reach)| !matches!(reach, Reach::Ring { .. });
        let reads = if members.iter().all(is_read) { READS } else { READS_NOT };
        segment.board(local).reads.store(reads, Ordering::Relaxed);
        SharedBuffers {
            segment: segment.clone(),
            wakeups: wakeups.clone(),
            local,
            members: members.into_iter().map(|(rank, reach)| Member { rank, reach, read: Cell::new(0) }).collect(),
            maps,
            lends: true,
            shares: true,
            ways: TriedWays::default(),
            timed: TimedCalls::new(),
            calls: 0,
            read_by_all: Cell::new(0),
            faces: [(0, None); FACES],
            pages: [(0, None); PAGES],
            areas: [(0, None); AREAS],
            waiting: None,
            operation_bytes: 0,
            src: Blocks::default(),
            dst: Blocks::default(),
            posts: Vec::new(),
            listing: Listing::default(),
            body: Vec::new(),
            staging: Arena::new(0),
        }
    }

    /// Begins a call: posts our part, and takes what is there already.
    pub fn call(&mut self, token: Token, envelope: Envelope, call: NodeCall<'_>) -> Result<Started> {
        let NodeCall { collective, root, src, dst, combine, operation_bytes } = call;
        if self.waiting.is_some() {
            return Ok(Started::Busy);
        }
        let (p, me, at) = (self.members.len(), Rank::from_index(self.local), Rank::from_index(root));
        let bytes = src.bytes();
        if bytes > area_bytes(self.segment.ranks()) || src.len() != collective.input_blocks(p, me, at) {
            return Err(Error::Internal(format!("{} blocks of {bytes} bytes do not go on a board", src.len())));
        }
        self.src.clone_from(src);
        self.dst.clone_from(dst);
        self.operation_bytes = operation_bytes;
        self.begin(token, envelope, (collective, root), combine)
    }

    fn begin(
        &mut self,
        token: Token,
        envelope: Envelope,
        (collective, root): (Collective, usize),
        combine: Option<Combine>,
    ) -> Result<Started> {
        self.calls += 1;
        self.posts.clear();
        self.tell_begin(collective, root);
        self.waiting = Some(Waiting::new(token, envelope, (collective, root), combine));
        Ok(if self.advance()?.is_some() { Started::Done } else { Started::Pending })
    }

    /// Begins a call of blocks that lie in one piece each, as token 0.
    pub fn call_flat(&mut self, envelope: Envelope, call: &FlatCall) -> ShortResult<Started> {
        if self.waiting.is_none() && call.input.len() <= area_bytes(self.segment.ranks()) {
            if let Some(started) = self.begin_short(envelope, call)? {
                return Ok(started);
            }
        }
        Ok(self.begin_flat(envelope, call)?)
    }

    #[inline(never)]
    fn begin_flat(&mut self, envelope: Envelope, call: &FlatCall) -> Result<Started> {
        let FlatCall { collective, root, input, output, block_bytes, combine } = *call;
        if self.waiting.is_some() || input.len() > area_bytes(self.segment.ranks()) {
            return Err(Error::Internal(format!("{} bytes do not go on a board now", input.len())));
        }
        cut(input, block_bytes, &mut self.src);
        cut(output, block_bytes, &mut self.dst);
        self.operation_bytes = input.len().max(output.len());
        self.begin(0, envelope, (collective, root), combine)
    }

    /// Whether a call waits for others.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Goes as far as what others have posted and read allows; the token when that completes the call.
    pub fn advance(&mut self) -> Result<Option<Token>> {
        let Some(waiting) = &mut self.waiting else { return Ok(None) };
        if let Some(Short { call: FlatCall { input, output, block_bytes, .. }, .. }) = waiting.short.take() {
            // What has been taken is taken once more.
            cut(input, block_bytes, &mut self.src);
            cut(output, block_bytes, &mut self.dst);
        }
        if let Stage::Room(_) = waiting.stage {
            if let Err(taken) = self.post() {
                self.enter(Stage::Room(taken));
                return Ok(None);
            }
            self.keep_own();
            self.enter(Stage::Posts(0));
        }
        if self.waiting.as_ref().is_some_and(|waiting| waiting.stage != Stage::Readers) {
            if !self.take()? || !self.reduce()? {
                // Who waits for us may be who we wait for.
                self.copy_if_refused();
                return Ok(None);
            }
            self.end_reading();
            self.enter(Stage::Readers);
        }
        if self.waiting.as_ref().is_some_and(|waiting| waiting.lent) && !self.is_read() {
            self.copy_if_refused();
            return Ok(None);
        }
        Ok(self.waiting.take().map(|waiting| {
            self.await_times(&waiting);
            waiting.token
        }))
    }

    /// Our post of the call is there.
    fn posted(&mut self, index: usize, form: Form, collective: Collective, root: usize) {
        self.wakeups.ring_others();
        let used = (self.calls, matches!(collective, Collective::Gather | Collective::Reduce).then_some(root));
        self.faces[index] = used;
        match form {
            Form::Page | Form::Listed => self.pages[index % PAGES] = used,
            Form::Area(area) => self.areas[area] = used,
            Form::Line | Form::Lent => {}
        }
    }

    /// A member has begun the call, so it has read all of the one before.
    fn has_begun(&self, member: usize) {
        let read = &self.members[member].read;
        read.set(read.get().max(self.calls - 1));
    }

    fn enter(&mut self, stage: Stage) {
        if let Some(waiting) = &mut self.waiting {
            waiting.stage = stage;
        }
    }

    fn face_index(&self) -> usize {
        self.calls as usize % FACES
    }

    /// The only member that reads our post, if it has but one reader.
    fn reader(&self, waiting: &Waiting) -> Option<usize> {
        matches!(waiting.collective, Collective::Gather | Collective::Reduce).then_some(waiting.root)
    }

    /// Whether a member has read all it needs of a call.
    fn has_read(&self, member: usize, call: u64) -> bool {
        let read = &self.members[member].read;
        if read.get() < call {
            read.set(self.segment.board(member).read.0.load(Ordering::Acquire).max(read.get()));
        }
        read.get() >= call
    }

    /// Whether what was used last so is not read any more.
    #[inline]
    fn is_free(&self, (call, reader): (u64, Option<usize>)) -> bool {
        call <= self.read_by_all.get() || self.is_free_now(call, reader)
    }

    #[inline(never)]
    fn is_free_now(&self, call: u64, reader: Option<usize>) -> bool {
        if let Some(reader) = reader {
            return self.has_read(reader, call);
        }
        let mut least = u64::MAX;
        for (member, Member { read, .. }) in self.members.iter().enumerate() {
            if member != self.local {
                if !self.has_read(member, call) {
                    return false;
                }
                least = least.min(read.get());
            }
        }
        self.read_by_all.set(least);
        true
    }

    /// Whether a face can be written, and the page of a form that takes one; what is still in use otherwise.
    fn room(&self, index: usize, form: Form) -> std::result::Result<(), Place> {
        match form {
            _ if !self.is_free(self.faces[index]) => Err(Place::Face),
            Form::Page | Form::Listed if !self.is_free(self.pages[index % PAGES]) => Err(Place::Page),
            _ => Ok(()),
        }
    }

    // What follows is apart from `advance`, whose frame is on the stack of every reduction.

    /// Fills our face and shows it; where others still read what was there, says which place they read.
    #[inline(never)]
    fn post(&mut self) -> std::result::Result<(), Place> {
        let Some(waiting) = &self.waiting else { return Ok(()) };
        let Waiting { collective, root, envelope, .. } = *waiting;
        if !brings(collective, self.local, root) {
            return Ok(());
        }
        let index = self.face_index();
        self.room(index, Form::Line)?;
        let own = is_cut(collective).then_some(self.local);
        let bytes = self.regions_but(own).map(Region::len).sum();
        let form = match self.lends(collective, own, bytes) {
            Some(form) => form,
            None => match Form::short(bytes).or_else(|| self.free_area().map(Form::Area)) {
                Some(form) => form,
                None => return Err(Place::Area),
            },
        };
        self.room(index, form)?;
        let face = self.segment.face(self.local, index);
        match &form {
            Form::Listed => post::list(&face, &self.listing, &mut self.body),
            Form::Lent => post::lend(&face, self.regions_but(own).next().copied().unwrap_or(Region::EMPTY)),
            _ => {}
        }
        let shown = (self.calls, envelope);
        post::write(&self.segment, (self.local, face), shown, (form, bytes), self.regions_but(own));
        self.posted(index, form, collective, root);
        if let Some(waiting) = &mut self.waiting {
            // Too many pieces to be listed: its time is not the kernel's.
            waiting.lent = matches!(form, Form::Listed | Form::Lent);
            let is_lent = waiting.lent;
            waiting.taken.take_if(|taken| taken.is_kernel() && !is_lent);
        }
        Ok(())
    }

    /// Whether the kernel may read our part.
    fn may_lend(&self) -> bool {
        self.lends && !self.shares && self.all_read()
    }

    fn free_area(&self) -> Option<usize> {
        (0..AREAS).find(|&area| self.is_free(self.areas[area]))
    }

    /// The regions of all our blocks but this one.
    fn regions_but(&self, own: Option<usize>) -> impl Iterator<Item = &Region> {
        (0..self.src.len()).filter(move |&block| Some(block) != own).flat_map(|block| self.src.block(block))
    }

    /// How our part is shown where it lies, if it is to be read there.
    #[inline(never)]
    fn lends(&mut self, collective: Collective, own: Option<usize>, bytes: usize) -> Option<Form> {
        // The result of an all-reduce in place goes over what others would still read.
        if bytes < LENT_BYTES || (collective == Collective::AllReduce && self.is_in_place()) {
            return None;
        }
        let others = self.members.len() - 1;
        // How many read each byte.
        let readers = match collective {
            Collective::AllGather | Collective::Broadcast | Collective::AllReduce => others,
            _ => 1,
        };
        let is_here = self.members.iter().all(|member| member.reach == Reach::SameProcess);
        let is_shared = self.maps && bytes >= LISTED_BYTES;
        let operation_bytes = match collective {
            // Who posts in a gather has one block of the root's result.
            Collective::Gather => self.operation_bytes.saturating_mul(self.members.len()),
            _ => self.operation_bytes,
        };
        let may_be_read = bytes > TRIED_BYTES && self.may_lend() && !is_here;
        let (first, more) = {
            let mut regions = self.regions_but(own);
            (regions.next().copied()?, regions.next().is_some())
        };
        let ordinary = !is_shared || shared::find(first.address() as usize, first.len()).is_none();
        let kernel = may_be_read && {
            let is_likely =
                // What fits a page is there before the kernel has been called, where processors share a cache.
                bytes > PAGE_BYTES
                    && operation_bytes < pipelined_bytes(collective, stream_bytes())
                    && Rates::get().lends(bytes, readers);
            if ordinary {
                self.chooses_kernel(if is_likely { KERNEL } else { AREA })
            } else {
                is_likely
            }
        };
        if (is_here || (kernel && ordinary)) && !more {
            return Some(Form::Lent);
        }
        if !is_here && !is_shared && !kernel {
            return None;
        }
        let regions: SmallVec<[Region; 8]> = self.regions_but(own).copied().collect();
        let find = |address, len| if is_here { None } else { shared::find(address, len) };
        self.listing = Listing::new(&regions, find);
        let all_shared = is_shared && self.listing.pieces.iter().all(|(_, _, key)| key.is_some());
        let fits = self.listing.encoded_len() <= PAGE_BYTES;
        (fits && (is_here || all_shared || kernel)).then_some(Form::Listed)
    }

    fn is_in_place(&self) -> bool {
        let address = |blocks: &Blocks| blocks.regions().first().map(Region::address);
        address(&self.src) == address(&self.dst)
    }

    /// Whether all members can read each other's memory.
    fn all_read(&self) -> bool {
        (0..self.members.len()).all(|member| self.segment.board(member).reads.load(Ordering::Relaxed) == READS)
    }

    /// Copies what of our own input is a part of our own result.
    #[inline(never)]
    fn keep_own(&self) {
        let Some(Waiting { collective, root, .. }) = &self.waiting else { return };
        let is_root = self.local == *root;
        let (from, to) = match collective {
            Collective::AllGather => (0, self.local),
            Collective::AllToAll => (self.local, self.local),
            Collective::Gather if is_root => (0, self.local),
            Collective::Scatter if is_root => (self.local, 0),
            Collective::Broadcast if is_root => (0, 0),
            _ => return,
        };
        let (mut from, mut to) = (self.src.block(from).iter(), self.dst.block(to).iter());
        let (mut src, mut dst) = (Region::EMPTY, Region::EMPTY);
        loop {
            src = if src.is_empty() { from.next().copied().unwrap_or(Region::EMPTY) } else { src };
            dst = if dst.is_empty() { to.next().copied().unwrap_or(Region::EMPTY) } else { dst };
            let len = src.len().min(dst.len());
            if len == 0 {
                return;
            }
            dst.part(0, len).copy_part_from(src.part(0, len), self.operation_bytes);
            (src, dst) = (src.part(len, src.len() - len), dst.part(len, dst.len() - len));
        }
    }

    /// The member whose post is the `taken`-th that we take, if there are so many.
    fn source(&self, waiting: &Waiting, taken: usize) -> Option<usize> {
        let Waiting { collective, root, .. } = *waiting;
        if !takes(collective, self.local, root) {
            return None;
        }
        match collective {
            Collective::Broadcast | Collective::Scatter => (taken == 0).then_some(root),
            _ => (taken + 1 < self.members.len()).then(|| (self.local + 1 + taken) % self.members.len()),
        }
    }

    fn has_posted(&self, member: usize) -> bool {
        self.segment.face(member, self.face_index()).cell.call.load(Ordering::Acquire) == self.calls
    }

    fn has_copied(&self, member: usize) -> bool {
        self.segment.board(member).copied.load(Ordering::Acquire) >= self.calls
    }

    /// Bytes that a member should have posted, and where in them our part begins.
    fn expected(&self, waiting: &Waiting, member: usize) -> (usize, usize) {
        match waiting.collective {
            Collective::AllGather | Collective::Gather => (self.dst.block_bytes(member), 0),
            Collective::Broadcast => (self.dst.bytes(), 0),
            Collective::Scatter => {
                let before = self.local - usize::from(self.local > member);
                ((self.members.len() - 1) * self.dst.bytes(), before * self.dst.bytes())
            }
            Collective::ReduceScatter | Collective::AllToAll => {
                let before = (0..self.local).filter(|&block| block != member);
                let offset = before.map(|block| self.src.block_bytes(block)).sum();
                (self.src.bytes() - self.src.block_bytes(member), offset)
            }
            Collective::AllReduce | Collective::Reduce | Collective::Custom => (self.src.bytes(), 0),
        }
    }

    /// Takes what has been posted; true when that was all.
    #[inline(never)]
    fn take(&mut self) -> Result<bool> {
        loop {
            let Some(waiting) = &self.waiting else { return Ok(true) };
            let (taken, copied) = match waiting.stage {
                Stage::Posts(taken) => (taken, false),
                Stage::Copy(taken) => (taken, true),
                Stage::Room(_) | Stage::Readers => return Ok(true),
            };
            let Some(member) = self.source(waiting, taken) else { break };
            if !self.has_posted(member) || (copied && !self.has_copied(member)) {
                return Ok(false);
            }
            let (expected, offset) = self.expected(waiting, member);
            let face = self.segment.face(member, self.face_index());
            let Member { rank, reach, .. } = self.members[member];
            let post = post::take(&self.segment, (member, rank, reach), &face, waiting.envelope, expected)?;
            let nonsense = || Error::Internal(format!("rank {rank} has copied nothing that can be read"));
            let post = match copied {
                true => post::copied(&self.segment, member, &face, expected).ok_or_else(nonsense)?,
                false => post,
            };
            self.has_begun(member);
            let waiting = self.waiting.as_mut().expect("it is waiting");
            waiting.borrowed |= post.is_lent();
            if waiting.combine.is_some() {
                // After a part that could not be read the posts behind it are there already.
                match self.posts.get_mut(taken) {
                    Some(place) => *place = post,
                    None => self.posts.push(post),
                }
            } else {
                let to = match waiting.collective {
                    Collective::AllGather | Collective::AllToAll | Collective::Gather => member,
                    _ => 0,
                };
                let lender = post.is_lent().then_some(member);
                let read =
                    self.borrow(lender.as_slice(), || post.copy(offset, self.dst.block(to), self.operation_bytes))?;
                if let Err(unread) = read {
                    self.refuse(member, taken, unread)?;
                    continue;
                }
            }
            self.enter(Stage::Posts(taken + 1));
        }
        Ok(true)
    }

    /// Does something with what others have lent. It must not have been taken back meanwhile: who gives up says so before its
    /// memory holds something else, and waits for threads of its own process.
    fn borrow<T>(&self, lenders: &[usize], act: impl FnOnce() -> T) -> Result<T> {
        if lenders.is_empty() {
            return Ok(act());
        }
        let control = |member: usize| self.segment.control(member, self.local);
        let gave_up =
            || lenders.iter().copied().find(|&member| control(member).cancelled.0.load(Ordering::SeqCst) != 0);
        lenders.iter().for_each(|&member| control(member).reading.0.store(1, Ordering::SeqCst));
        let outcome = gave_up().map_or_else(|| Ok(act()), Err);
        fence(Ordering::SeqCst);
        let outcome = outcome.and_then(|done| gave_up().map_or(Ok(done), Err));
        lenders.iter().for_each(|&member| control(member).reading.0.store(0, Ordering::Release));
        outcome.map_err(|member| gave_up_error(self.members[member].rank))
    }

    /// Folds what has been posted to be folded, in the members' order; false where a part could not be read.
    #[inline(never)]
    fn reduce(&mut self) -> Result<bool> {
        if self.posts.is_empty() {
            return Ok(true);
        }
        let mut staging = std::mem::replace(&mut self.staging, Arena::new(0));
        let Some(waiting) = &self.waiting else { return Ok(true) };
        let Some(combine) = waiting.combine else { return Ok(true) };
        let p = self.members.len();
        let own = Pieces::new(self.src.block(if is_cut(waiting.collective) { self.local } else { 0 }));
        let to = Pieces::new(self.dst.regions());
        let operand = |member: usize| {
            if member == self.local {
                return Operand { bytes: OperandBytes::Own(&own), offset: 0 };
            }
            let place = (member + p - self.local - 1) % p;
            let offset = self.expected(waiting, member).1;
            Operand { bytes: OperandBytes::Posted(place, &self.posts[place]), offset }
        };
        let operands: SmallVec<[Operand<'_>; 8]> = (0..p).map(operand).collect();
        let lent = |place: &usize| self.posts[*place].is_lent();
        let lenders: SmallVec<[usize; 8]> = (0..p - 1).filter(lent).map(|place| (self.local + 1 + place) % p).collect();
        let mut done = waiting.reduced;
        let folded = self.borrow(&lenders, || fold(combine, &operands, &to, &mut staging, &mut done));
        drop(operands);
        self.staging = staging;
        if let Some(waiting) = &mut self.waiting {
            waiting.reduced = done;
        }
        match folded? {
            Ok(()) => Ok(true),
            Err((place, unread)) => {
                self.refuse((self.local + 1 + place) % p, place, unread)?;
                Ok(false)
            }
        }
    }

    /// Has a poster copy the part that we could not read.
    fn refuse(&mut self, member: usize, taken: usize, unread: Unread) -> Result<()> {
        if let Unread::Failed(error, pid) = unread {
            return Err(unreadable(&error, self.members[member].rank, pid, self.dst.regions()));
        }
        crate::info!("rank {} may not be read any more", self.members[member].rank);
        self.segment.board(self.local).refused.0.swap(self.calls, Ordering::SeqCst);
        self.wakeups.ring(member);
        self.enter(Stage::Copy(taken));
        Ok(())
    }

    /// Says that we have read all we need of this call.
    fn end_reading(&mut self) {
        let Some(Waiting { collective, root, borrowed, .. }) = self.waiting else { return };
        self.posts.clear();
        self.tell_end();
        // Others may wait for that: whose part it was, or, where this rank brings nothing, who has no room.
        self.tell_read(!borrowed && brings(collective, self.local, root));
    }

    /// Tells that we have read all we need of the call. Nobody waits for that who `is_seen` to begin the next one.
    fn tell_read(&self, is_seen: bool) {
        let read = &self.segment.board(self.local).read.0;
        if is_seen {
            read.store(self.calls, Ordering::Release);
        } else {
            read.swap(self.calls, Ordering::SeqCst);
            self.wakeups.ring_others();
        }
    }

    /// Forgets the waiting call.
    pub fn cancel(&mut self) {
        self.waiting = None;
        self.posts.clear();
    }
}
