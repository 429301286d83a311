//! Short calls on the boards: what [`SharedBuffers`] does for any call, without lists.
//!
//! Each block lies in one piece, and every rank's part in its face's line or page, so all posts have the same check word.
//! Where one has another, or others are late, the call goes on as any other does.

use super::super::post::{check_word, Form};
use super::super::segment::{Face, FACES};
use super::{brings, is_cut, takes, SharedBuffers, Short, Stage, Waiting};
use crate::device::host;
use crate::error::Result;
use crate::exec::Started;
use crate::memory::{Bytes, Region};
use crate::plan::Collective;
use crate::transport::{Envelope, FlatCall};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

impl FlatCall {
    /// The block that member `index` gets of a part that is cut, or all of it.
    fn block(&self, of: Region, index: usize) -> Region {
        of.part(index * self.block_bytes, self.block_bytes)
    }
}

/// Where a short post's bytes are.
fn room<'a>(face: &Face<'a>, form: Form) -> Bytes<'a> {
    if form == Form::Line {
        face.line
    } else {
        face.page
    }
}

impl SharedBuffers {
    /// Begins a call if it is short; none where it is not, or where there is no room.
    #[inline]
    pub(super) fn begin_short(&mut self, envelope: Envelope, call: &FlatCall) -> Result<Option<Started>> {
        let FlatCall { collective, root, input, output, block_bytes, combine } = *call;
        // The same on all ranks.
        let bytes = match collective {
            _ if is_cut(collective) => (self.members.len() - 1) * block_bytes,
            _ => block_bytes,
        };
        let Some(form) = Form::short(bytes) else { return Ok(None) };
        let next = self.calls + 1;
        let index = next as usize % FACES;
        let local = self.local;
        let is_posted = brings(collective, local, root);
        if is_posted && self.room(index, form).is_err() {
            return Ok(None);
        }
        let word = check_word(envelope, bytes, form);
        let mut waiting = Waiting::new(0, envelope, (collective, root), combine);
        waiting.stage = Stage::Posts(0);
        waiting.short = Some(Short { call: *call, form, word, taken: 0 });
        self.calls = next;
        self.waiting = Some(waiting);
        if is_posted {
            let face = self.segment.face(local, index);
            let (line, page) = (face.line, face.page);
            let room = if form == Form::Line { line } else { page };
            if is_cut(collective) {
                let before = local * block_bytes;
                room.part(0, before).copy_from(input.part(0, before));
                let after = before + block_bytes;
                room.part(before, bytes - before).copy_from(input.part(after, bytes - before));
            } else {
                room.part(0, bytes).copy_from(input);
            }
            if form == Form::Page {
                line.part(0, 8).write(&(bytes as u64).to_ne_bytes());
            }
            face.cell.check.store(word, Ordering::Relaxed);
            // Not a store: see `post::write`.
            face.cell.call.swap(next, Ordering::SeqCst);
            self.posted(index, form, collective, root);
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
        Ok(Some(if self.advance_short()? { Started::Done } else { Started::Pending }))
    }

    /// Goes as far as what others have posted allows; whether that completes the call.
    #[inline]
    pub fn advance_short(&mut self) -> Result<bool> {
        let Some(Waiting { short: Some(short), .. }) = &self.waiting else {
            return Ok(self.advance()?.is_some());
        };
        let Short { call, form, word, mut taken } = *short;
        let FlatCall { collective, root, output, .. } = call;
        let (local, members, calls) = (self.local, self.members.len(), self.calls);
        let index = calls as usize % FACES;
        let from_root = matches!(collective, Collective::Broadcast | Collective::Scatter);
        let sources = match takes(collective, local, root) {
            false => 0,
            true if from_root => 1,
            true => members - 1,
        };
        while taken < sources {
            let member = if from_root { root } else { (local + 1 + taken) % members };
            let face = self.segment.face(member, index);
            if face.cell.call.load(Ordering::Acquire) != calls {
                self.note_taken(taken);
                return Ok(false);
            }
            if face.cell.check.load(Ordering::Relaxed) != word {
                return Ok(self.advance()?.is_some());
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
            taken += 1;
        }
        if sources > 0 {
            self.fold_short(&call, form, index);
        }
        self.tell_read();
        self.waiting = None;
        Ok(true)
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
        let operands: SmallVec<[Bytes<'_>; 16]> = (0..self.members.len()).map(operand).collect();
        host::reduce(combine.dtype, combine.operator, combine.divisor, &operands, call.output);
    }
}
