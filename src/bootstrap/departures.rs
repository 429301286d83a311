//! Ranks that have left while bytes of theirs were on their way: looked at again and again until all have arrived.
#![forbid(unsafe_code)]

use crate::bootstrap::rendezvous::name_ranks;
use crate::transport::Departure;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// The first and the longest time between two looks.
const FIRST_PAUSE: Duration = Duration::from_micros(500);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
/// How long a process that ends waits for sockets of the service, whose peers may be frozen.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(1);

struct Kept {
    departure: Departure,
    deadline: Instant,
}

/// All departures of a process.
#[derive(Default)]
pub struct Departures {
    kept: Vec<Kept>,
    waiting: Vec<(Instant, Sender<()>)>,
    pause: Duration,
    next: Option<Instant>,
}

impl Departures {
    /// Keeps one more, until `deadline`.
    pub fn keep(&mut self, departure: Departure, deadline: Instant) {
        self.kept.push(Kept { departure, deadline });
        self.hurry();
    }

    /// Tells `done` when nothing is left.
    pub fn wait(&mut self, done: Sender<()>) {
        self.waiting.push((Instant::now() + OUTPUT_PATIENCE, done));
        self.hurry();
    }

    fn hurry(&mut self) {
        self.pause = FIRST_PAUSE;
        self.next = Some(Instant::now());
    }

    /// When to look again.
    pub fn next_look(&self) -> Option<Instant> {
        self.next
    }

    /// Looks, if it is time. `all_sent`: the service's own connections have nothing to send, and nobody is still
    /// to be told of a loss.
    pub fn look(&mut self, now: Instant, all_sent: bool) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        self.kept.retain_mut(|Kept { departure, deadline }| {
            if departure.is_over() {
                return false;
            }
            let late = *deadline <= now;
            if late {
                let ranks: Vec<u32> = departure.creditors().iter().map(|rank| rank.0).collect();
                let (me, ranks) = (departure.rank(), name_ranks(&ranks));
                crate::log::warn(&format!("rank {me} has left, and {ranks} did not take all of its data in time"));
            }
            !late
        });
        if self.kept.is_empty() {
            self.waiting.retain(|(patience, done)| {
                let over = all_sent || *patience <= now;
                // The one who waits may have given up.
                over.then(|| done.send(()));
                !over
            });
        }
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        self.next = (!self.kept.is_empty() || !self.waiting.is_empty()).then(|| now + self.pause);
    }
}
