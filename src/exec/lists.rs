//! The pieces of a program's span lists, resolved for a call's sizes.
//!
//! A call of one segment resolves all lists when it begins and keeps them for the next call of the same sizes; a longer
//! one resolves a step's lists when the step starts.
#![forbid(unsafe_code)]

use super::program::Program;
use crate::plan::layout::{Layout, Piece};
use std::ops::Range;

/// Resolved lists, one after the other.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pieces: Vec<Piece>,
    /// Where each list begins, and the end of the last.
    bounds: Vec<u32>,
    /// The list being resolved.
    one: Vec<Piece>,
}

/// The lists of one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pieces: &'a [Piece],
    bounds: &'a [u32],
}

impl Lists {
    /// Replaces what is held by `lists` of `program`.
    pub(super) fn resolve(&mut self, program: &Program, layout: &Layout, at: (usize, usize), lists: Range<u32>) {
        let (segment, slot) = at;
        self.pieces.clear();
        self.bounds.clear();
        self.bounds.push(0);
        for list in lists {
            // Resolving joins adjacent pieces, which may happen within a list but not across two.
            self.one.clear();
            for span in program.list(list) {
                layout.pieces(segment, slot, span, &mut self.one);
            }
            self.pieces.extend_from_slice(&self.one);
            self.bounds.push(self.pieces.len() as u32);
        }
    }

    /// Some of the lists, by their position.
    pub(super) fn view(&self, lists: Range<u32>) -> View<'_> {
        View { pieces: &self.pieces, bounds: &self.bounds[lists.start as usize..=lists.end as usize] }
    }
}

impl<'a> View<'a> {
    /// How many lists there are.
    pub(super) fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Whether all lists are empty.
    pub(super) fn is_empty(&self) -> bool {
        self.bounds.first() == self.bounds.last()
    }

    /// One list.
    pub(super) fn list(&self, index: usize) -> &'a [Piece] {
        &self.pieces[self.bounds[index] as usize..self.bounds[index + 1] as usize]
    }

    /// Some of the lists.
    pub(super) fn lists(&self, which: Range<usize>) -> impl Iterator<Item = &'a [Piece]> + 'a {
        let view = *self;
        which.map(move |index| view.list(index))
    }
}
