//! How long things take in the simulated world.
#![forbid(unsafe_code)]

use super::random::Random;
use crate::plan::{Call, Channel};
use crate::topo::Rank;

/// A message on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// When it sets out.
    pub now_ns: u64,
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// The message stream.
    pub channel: Channel,
    /// Its size.
    pub bytes: usize,
}

/// The times of a machine. Calls come in the order of virtual time, so a model may keep what its links and ports are
/// busy with.
pub trait Durations {
    /// From setting out to arrival.
    fn message_ns(&mut self, transfer: &Transfer, random: &mut Random) -> u64;

    /// A copy or reduction of `bytes` of results; 0 is done at once.
    fn local_ns(&mut self, rank: Rank, bytes: usize, random: &mut Random) -> u64;

    /// A call, from the last member's arrival; `bytes` is what the largest member puts in or gets out.
    fn call_ns(&mut self, call: &Call, bytes: usize, random: &mut Random) -> u64;

    /// From an effect to the moment at which a rank may learn of it, and from a rank's start to its first poll.
    fn notice_ns(&mut self, random: &mut Random) -> u64;

    /// Whether a message leaves before its receive is posted (its source is then copied early, else on delivery).
    fn eager(&mut self, bytes: usize, random: &mut Random) -> bool;
}

/// No machine at all: every time is random, over four orders of magnitude, to find orders of events that break a plan.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chaos;

impl Chaos {
    /// The longest time.
    pub const MAX_NS: u64 = 20_000;

    fn some_ns(random: &mut Random) -> u64 {
        let scale = random.pick(&[20, 200, 2_000, Chaos::MAX_NS]);
        random.below(scale) + 1
    }
}

impl Durations for Chaos {
    fn message_ns(&mut self, _: &Transfer, random: &mut Random) -> u64 {
        Chaos::some_ns(random)
    }

    fn local_ns(&mut self, _: Rank, _: usize, random: &mut Random) -> u64 {
        if random.one_in(2) {
            return 0;
        }
        Chaos::some_ns(random)
    }

    fn call_ns(&mut self, _: &Call, _: usize, random: &mut Random) -> u64 {
        Chaos::some_ns(random)
    }

    fn notice_ns(&mut self, random: &mut Random) -> u64 {
        if random.one_in(4) {
            return 0;
        }
        Chaos::some_ns(random)
    }

    fn eager(&mut self, _: usize, random: &mut Random) -> bool {
        random.one_in(2)
    }
}

/// Every message and every call takes `alpha_ns` and `beta_ps` for each byte, everything else no time; nothing is
/// shared. With `alpha_ns` 1 and `beta_ps` 0 the clock counts rounds.
#[derive(Debug, Clone, Copy)]
pub struct Uniform {
    /// ns for a message of any size.
    pub alpha_ns: u64,
    /// ps for each byte.
    pub beta_ps: u64,
}

impl Uniform {
    fn time_ns(&self, bytes: usize) -> u64 {
        self.alpha_ns + bytes as u64 * self.beta_ps / 1000
    }
}

impl Durations for Uniform {
    fn message_ns(&mut self, transfer: &Transfer, _: &mut Random) -> u64 {
        self.time_ns(transfer.bytes)
    }

    fn local_ns(&mut self, _: Rank, _: usize, _: &mut Random) -> u64 {
        0
    }

    fn call_ns(&mut self, _: &Call, bytes: usize, _: &mut Random) -> u64 {
        self.time_ns(bytes)
    }

    fn notice_ns(&mut self, _: &mut Random) -> u64 {
        0
    }

    fn eager(&mut self, _: usize, _: &mut Random) -> bool {
        true
    }
}
