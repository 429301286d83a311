//! Short calls on the boards: what [`SharedBuffers`] does for any call, without lists.
//!
//! Each block lies in one piece, and every rank's part in its face's line or page, so all posts have the same check word.
//! Where one has another, or others are late, the call goes on as any other does.

use super::super::post::{check_word, Form};
use super::super::segment::{Face, FACES, PAGES};
use super::{brings, is_cut, takes, SharedBuffers, Short, Stage, Waiting};
use crate::device::host;
use crate::error::ShortResult;
use crate::exec::Started;
use crate::memory::{Bytes, Region};
use crate::plan::Collective;
use crate::transport::{Envelope, FlatCall};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// A rank that only reads short calls tells it in one of so many: who posts has room for more, and can wait for that one.
const TOLD: u64 = PAGES as u64 / 2;

impl FlatCall {
    /// The block that member `index` gets of a part that is cut, or all of it.
    fn block(&self, of: Region, index: usize) -> Region {
        of.part(index * self.block_bytes, self.block_bytes)
    }
}

/// Where a short post's bytes are.
#[inline]
fn room<'a>(face: &Face<'a>, form: Form) -> Bytes<'a> {
    if form == Form::Line {
        face.line
    } else {
        face.page()
    }
}

/// How a look at what others have posted for a short call ends.
enum Look {
    /// With all of it.
    All,
    /// Somebody has not posted yet.
    Late,
    /// Somebody has posted something else.
    Other,
}

impl SharedBuffers {
    /// Begins a call if it is short; none where it is not, or where there is no room.
    #[inline]
    pub(super) fn begin_short(&mut self, envelope: Envelope, call: &FlatCall) -> ShortResult<Option<Started>> {
        let FlatCall { collective, root, input, output, .. } = *call;
        let bytes = self.posted_bytes(call);
        let Some(form) = Form::short(bytes) else { return Ok(None) };
        let next = self.calls + 1;
        let index = next as usize % FACES;
        let local = self.local;
        let is_posted = brings(collective, local, root);
        if is_posted {
            let is_by_page = self.goes_by_page(collective, bytes, input.len().max(output.len()));
            if !is_by_page || self.room(index, form).is_err() {
                return Ok(None);
            }
        }
        let word = check_word(envelope, bytes, form);
        self.calls = next;
        if is_posted {
            self.post_short(call, (form, bytes), (index, word));
        }
        let is_root = local == root;
        let own = match collective {
            Collective::AllGather => Some((input, call.block(output, local))),
            Collective::AllToAll => Some((call.block(input, local), call.block(output, local))),
            Collective::Gather if is_root => Some((input, call.block(output, local))),
            Collective::Scatter if is_root => Some((call.block(input, local), output)),
            Collective::Broadcast if is_root => Some((input, output)),
            _ => None,
        };
        if let Some((from, to)) = own {
            to.copy_from(from);
        }
        let mut taken = 0;
        let look = self.take_short(call, (form, word), &mut taken);
        if matches!(look, Look::All) {
            self.end_short(call, form);
            return Ok(Some(Started::Done));
        }
        self.await_short(envelope, Short { call: *call, form, word, taken });
        Ok(Some(if matches!(look, Look::Other) { self.advance_any()? } else { Started::Pending }))
    }

    /// Bytes of a post; the same on all ranks.
    #[inline]
    fn posted_bytes(&self, call: &FlatCall) -> usize {
        match call.collective {
            collective if is_cut(collective) => (self.members.len() - 1) * call.block_bytes,
            _ => call.block_bytes,
        }
    }

    /// Writes our part to our face, and shows it.
    #[inline]
    fn post_short(&mut self, call: &FlatCall, (form, bytes): (Form, usize), (index, word): (usize, u64)) {
        let FlatCall { collective, root, input, block_bytes, .. } = *call;
        let face = self.segment.face(self.local, index);
        let room = room(&face, form);
        if is_cut(collective) {
            let before = self.local * block_bytes;
            room.part(0, before).copy_from(input.part(0, before));
            let after = before + block_bytes;
            room.part(before, bytes - before).copy_from(input.part(after, bytes - before));
        } else {
            room.part(0, bytes).copy_from(input);
        }
        if form == Form::Page {
            face.line.part(0, 8).write(&(bytes as u64).to_ne_bytes());
        }
        face.cell.check.store(word, Ordering::Relaxed);
        self.wakeups.publisher().store(&face.cell.call, self.calls);
        self.posted(index, form, collective, root);
        let next = self.segment.face(self.local, (index + 1) % FACES);
        next.own_soon(if form == Form::Page { bytes } else { 0 });
    }

    /// Has a call that others are late for wait. Apart from `begin_short`, which is on the way of all others.
    #[inline(never)]
    fn await_short(&mut self, envelope: Envelope, short: Short) {
        let FlatCall { collective, root, combine, .. } = short.call;
        let mut waiting = Waiting::new(0, envelope, (collective, root), combine);
        waiting.stage = Stage::Posts(0);
        waiting.short = Some(short);
        self.waiting = Some(waiting);
    }

    /// Goes as far as what others have posted allows.
    #[inline]
    pub fn advance_short(&mut self) -> ShortResult<Started> {
        let Some(Waiting { short: Some(short), .. }) = &self.waiting else {
            return self.advance_any();
        };
        let mut taken = short.taken;
        match self.take_short(&short.call, (short.form, short.word), &mut taken) {
            Look::All => {
                let Short { call, form, .. } = *short;
                self.end_short(&call, form);
                self.waiting = None;
                Ok(Started::Done)
            }
            Look::Late => {
                if taken > short.taken {
                    self.note_taken(taken);
                }
                Ok(Started::Pending)
            }
            Look::Other => self.advance_any(),
        }
    }

    /// The same of any call.
    #[inline(never)]
    fn advance_any(&mut self) -> ShortResult<Started> {
        Ok(if self.advance()?.is_some() { Started::Done } else { Started::Pending })
    }

    /// Takes what others have posted for a call, from the first that has not been taken on.
    #[inline]
    fn take_short(&self, call: &FlatCall, (form, word): (Form, u64), taken: &mut usize) -> Look {
        let FlatCall { collective, root, output, .. } = *call;
        let (local, members, calls) = (self.local, self.members.len(), self.calls);
        let index = calls as usize % FACES;
        let from_root = matches!(collective, Collective::Broadcast | Collective::Scatter);
        let sources = match takes(collective, local, root) {
            false => return Look::All,
            true if from_root => 1,
            true => members - 1,
        };
        while *taken < sources {
            let member = if from_root { root } else { (local + 1 + *taken) % members };
            let face = self.segment.face(member, index);
            if face.cell.call.load(Ordering::Acquire) != calls {
                return Look::Late;
            }
            if face.cell.check.load(Ordering::Relaxed) != word {
                return Look::Other;
            }
            if call.combine.is_none() {
                let part = room(&face, form);
                let (to, at) = match collective {
                    Collective::AllGather | Collective::Gather => (call.block(output, member), 0),
                    Collective::AllToAll => (call.block(output, member), local - usize::from(local > member)),
                    Collective::Scatter => (output, local - usize::from(local > member)),
                    _ => (output, 0),
                };
                to.copy_from(part.part(at * call.block_bytes, call.block_bytes));
            }
            self.has_begun(member);
            *taken += 1;
        }
        Look::All
    }

    /// Completes a call of which everything has been taken.
    #[inline]
    fn end_short(&mut self, call: &FlatCall, form: Form) {
        let FlatCall { collective, root, .. } = *call;
        if takes(collective, self.local, root) {
            self.fold_short(call, form, self.calls as usize % FACES);
        }
        self.posts.clear();
        self.tell_page(self.posted_bytes(call));
        self.tell_read(!self.calls.is_multiple_of(TOLD) || brings(collective, self.local, root));
    }

    fn note_taken(&mut self, taken: usize) {
        if let Some(short) = self.waiting.as_mut().and_then(|waiting| waiting.short.as_mut()) {
            short.taken = taken;
        }
    }

    /// Folds all that has been posted, in the members' order.
    fn fold_short(&self, call: &FlatCall, form: Form, index: usize) {
        let Some(combine) = call.combine else { return };
        let local = self.local;
        let own = if is_cut(call.collective) { call.block(call.input, local) } else { call.input };
        let operand = |member: usize| {
            if member == local {
                return own;
            }
            let at = if is_cut(call.collective) { local - usize::from(local > member) } else { 0 };
            room(&self.segment.face(member, index), form).part(at * call.block_bytes, call.block_bytes)
        };
        let reduce = |operands: &[Bytes<'_>]| {
            host::reduce(combine.dtype, combine.operator, combine.divisor, operands, call.output);
        };
        match self.members.len() {
            2 => reduce(&[operand(0), operand(1)]),
            members => reduce(&(0..members).map(operand).collect::<SmallVec<[_; 16]>>()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::pull::Reach;
    use super::super::super::segment::{Segment, PAGES};
    use super::super::super::wakeup::Wakeups;
    use super::*;
    use crate::memory::Arena;
    use crate::topo::Rank;
    use std::sync::Arc;

    const BYTES: usize = 1024;

    fn rank(segment: &Arc<Segment>, local: usize) -> (SharedBuffers, Arc<Wakeups>) {
        let wakeups = Arc::new(Wakeups::new(segment.clone(), local, vec![0; 2], None).unwrap());
        let members = (0..2).map(|member| (Rank::from_index(member), Reach::SameProcess)).collect();
        (SharedBuffers::new(segment, &wakeups, local, members, false), wakeups)
    }

    /// A reader wakes in some of its calls only, of which one is among those that whoever sleeps waits for.
    #[test]
    fn a_root_that_waits_for_a_page_is_woken_though_not_by_each_read() {
        let segment = Arc::new(Segment::of_heap(2));
        let [mut root, mut reader] = [0, 1].map(|local| rank(&segment, local));
        let mut arena = Arena::new(2 * BYTES);
        // SAFETY: the arena must outlive every use; because it ends with the test, after the ranks.
        let memory = unsafe { arena.region().unbound() };
        let call = |local: usize| {
            let buffer = memory.part(local * BYTES, BYTES);
            let (collective, combine) = (Collective::Broadcast, None);
            FlatCall { collective, root: 0, input: buffer, output: buffer, block_bytes: BYTES, combine }
        };
        let envelope = |sequence: u64| Envelope { channel: 0, sequence, signature: 7 };
        let waits = 1 + PAGES as u64;
        for past in [0, 5, 16, 31] {
            // So many calls before the root is as far ahead as it can be.
            let begun = root.0.calls;
            for at in 1..=past {
                assert_eq!(root.0.call_flat(envelope(begun + at), &call(0)).unwrap(), Started::Done);
                assert_eq!(reader.0.call_flat(envelope(begun + at), &call(1)).unwrap(), Started::Done);
            }
            let begun = root.0.calls;
            for at in 1..waits {
                assert_eq!(root.0.call_flat(envelope(begun + at), &call(0)).unwrap(), Started::Done, "call {at}");
            }
            assert_eq!(
                root.0.call_flat(envelope(begun + waits), &call(0)).unwrap(),
                Started::Pending,
                "no page is free"
            );
            assert!(root.1.announce());
            let is_asleep = || segment.wakeup_cell(0).state.load(Ordering::SeqCst) != 0;
            assert!(is_asleep());
            for at in 1..waits {
                assert_eq!(reader.0.call_flat(envelope(begun + at), &call(1)).unwrap(), Started::Done);
            }
            assert!(!is_asleep(), "nobody has woken the root");
            assert_eq!(root.0.advance_short().unwrap(), Started::Done);
            assert_eq!(reader.0.call_flat(envelope(begun + waits), &call(1)).unwrap(), Started::Done);
        }
    }
}
