//! The watch over a meeting of a communicator's ranks, which is given up where one of them is lost.
#![forbid(unsafe_code)]

use super::{stall, Comm};
use crate::bootstrap::connection::{Interrupt, Interruption};
use crate::health::Loss;
use crate::sync::locked;
use crate::topo::Rank;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long after news of a loss the meeting is given up: what the lost rank has said before may still be on its way.
const HOPELESS: Duration = Duration::from_secs(1);
/// The same where those who go on without lost ranks meet: without the dead one they meet again at once.
const HOPELESS_AMONG_SURVIVORS: Duration = Duration::from_millis(50);

/// Watches the ranks of a parent that make a communicator: what one of them was to say never comes if it is lost.
pub(super) struct MeetingWatch<'a> {
    parent: &'a Comm,
    ranks: &'a [usize],
    /// Ranks whose own part in the parent has failed, or was ended, may come to this meeting: only deaths count.
    shrinks: bool,
    /// How long after news of a loss it is given up.
    patience: Duration,
    cancel: &'a AtomicBool,
    begun: Instant,
    /// How often the others have been asked whether they are still there.
    asked: AtomicUsize,
}

impl MeetingWatch<'_> {
    /// Gives a meeting of these ranks up a while after news of a loss.
    pub(super) fn new<'a>(
        parent: &'a Comm,
        ranks: &'a [usize],
        shrinks: bool,
        cancel: &'a AtomicBool,
    ) -> MeetingWatch<'a> {
        let (patience, begun, asked) = (HOPELESS, Instant::now(), AtomicUsize::new(0));
        MeetingWatch { parent, ranks, shrinks, patience, cancel, begun, asked }
    }

    /// That of a meeting of those who go on without lost ranks.
    pub(super) fn among_survivors<'a>(
        parent: &'a Comm,
        ranks: &'a [usize],
        cancel: &'a AtomicBool,
    ) -> MeetingWatch<'a> {
        MeetingWatch { patience: HOPELESS_AMONG_SURVIVORS, ..MeetingWatch::new(parent, ranks, true, cancel) }
    }

    /// Asks some of the others after each second of waiting: a rank that has left the parent in good order is no loss of
    /// which anybody is told.
    fn ask(&self) {
        let asked = self.asked.load(Ordering::Relaxed);
        if self.begun.elapsed() < HOPELESS * (asked as u32 + 1) {
            return;
        }
        self.asked.store(asked + 1, Ordering::Relaxed);
        let others: Vec<Rank> = stall::asked_at(self.ranks, asked).into_iter().map(Rank::from_index).collect();
        locked(&self.parent.monitor).iter().for_each(|monitor| monitor.compare_sends(&others));
    }
}

impl Interrupt for MeetingWatch<'_> {
    fn interrupted(&self) -> Option<Interruption> {
        let concerns = |loss: &Loss| {
            let rank = loss.rank as usize;
            rank != self.parent.rank() && self.ranks.contains(&rank) && (!self.shrinks || loss.is_death())
        };
        self.ask();
        self.cancel.interrupted().or_else(|| {
            let losses = self.parent.status.losses();
            let (_, loss) = losses.iter().find(|(since, loss)| since.elapsed() >= self.patience && concerns(loss))?;
            Some(Interruption::Hopeless(loss.error.clone()))
        })
    }
}
