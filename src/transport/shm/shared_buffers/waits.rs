//! What a call on the boards waits for, and what it does for those that wait for it.

use super::super::post;
use super::super::segment::PAGES;
use super::{is_cut, Place, SharedBuffers, Stage, Waiting};
use crate::topo::Rank;
use std::sync::atomic::Ordering;

impl SharedBuffers {
    /// Whether all who read our part have read it.
    pub(super) fn is_read(&self) -> bool {
        self.waiting.as_ref().is_none_or(|waiting| self.is_free((self.calls, self.reader(waiting))))
    }

    /// Whether somebody may not read what we have lent, and we have not copied it yet.
    fn is_refused(&self, waiting: &Waiting) -> bool {
        let refused = |member: usize| self.segment.board(member).refused.0.load(Ordering::Acquire) == self.calls;
        waiting.lent
            && self.segment.board(self.local).copied.load(Ordering::Relaxed) != self.calls
            && (0..self.members.len()).any(refused)
    }

    /// Copies what we have lent, where somebody may not read it.
    pub(super) fn copy_if_refused(&mut self) {
        let Some(waiting) = self.waiting.as_ref().filter(|waiting| self.is_refused(waiting)) else { return };
        let Some(area) = self.free_area() else { return };
        let regions = self.regions_but(is_cut(waiting.collective).then_some(self.local));
        post::gather(self.segment.area(self.local, area), regions);
        post::tell_copied(&self.segment.face(self.local, self.face_index()), area);
        self.areas[area] = (self.calls, self.reader(waiting));
        self.segment.board(self.local).copied.swap(self.calls, Ordering::SeqCst);
        self.lends = false;
        self.wakeups.ring_others();
    }

    /// Whether [`advance`](SharedBuffers::advance) would find something.
    pub fn has_work(&self) -> bool {
        let Some(waiting) = &self.waiting else { return false };
        let has_more = match waiting.stage {
            Stage::Room(Place::Face) => self.is_free(self.faces[self.face_index()]),
            Stage::Room(Place::Page) => self.is_free(self.pages[self.face_index() % PAGES]),
            Stage::Room(Place::Area) => self.free_area().is_some(),
            Stage::Posts(taken) => self.source(waiting, taken).is_none_or(|member| self.has_posted(member)),
            Stage::Copy(taken) => self.source(waiting, taken).is_none_or(|member| self.has_copied(member)),
            Stage::Readers => self.is_read(),
        };
        has_more || self.is_refused(waiting)
    }

    /// The members that the waiting call still needs.
    pub fn missing(&self) -> Vec<Rank> {
        let Some(waiting) = &self.waiting else { return Vec::new() };
        let others = || (0..self.members.len()).filter(|&member| member != self.local);
        let missing: Vec<usize> = match waiting.stage {
            Stage::Room(_) => {
                let (face, page) = (self.face_index(), self.face_index() % PAGES);
                let used = self.areas.iter().chain([&self.faces[face], &self.pages[page]]).map(|used| used.0).max();
                others().filter(|&member| !self.has_read(member, used.unwrap_or(0))).collect()
            }
            Stage::Posts(taken) | Stage::Copy(taken) => {
                let sources = (taken..self.members.len()).map_while(|taken| self.source(waiting, taken));
                sources.filter(|&member| !self.has_posted(member)).collect()
            }
            Stage::Readers => others().filter(|&member| !self.has_read(member, self.calls)).collect(),
        };
        missing.into_iter().map(|member| self.members[member].rank).collect()
    }
}
