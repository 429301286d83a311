//! How long things take in the simulated world.
#![forbid(unsafe_code)]

use super::random::Random;
use crate::plan::{Call, Channel};
use crate::topo::Rank;

/// A message on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlight {
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

/// A copy or reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalWork {
    /// When it is wanted.
    pub now_ns: u64,
    /// Whose.
    pub rank: Rank,
    /// Bytes of results.
    pub bytes: usize,
    /// 1 is a copy.
    pub operands: usize,
    /// Bytes of plain elements that are coded.
    pub encoded: usize,
    /// Those that are decoded, of all operands.
    pub decoded: usize,
}

/// A call whose members have all come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallWork {
    /// When the last member came.
    pub now_ns: u64,
    /// What the largest member puts in or gets out.
    pub bytes: usize,
    /// Bytes that the provider wants together and that are not so: going in.
    pub packed: usize,
    /// Coming out.
    pub unpacked: usize,
}

/// The times of a machine. Calls come in the order of virtual time, so a model may keep what its links and ports are
/// busy with.
pub trait Durations {
    /// From setting out to arrival.
    fn message_ns(&mut self, transfer: &InFlight, random: &mut Random) -> u64;

    /// A copy or reduction; 0 is done at once.
    fn local_ns(&mut self, work: &LocalWork, random: &mut Random) -> u64;

    /// What a message from a rank costs after its arrival, its reduction with another operand (if it is reduced) included.
    fn take_in_ns(&mut self, _work: &LocalWork, _from: Rank, _random: &mut Random) -> u64 {
        0
    }

    /// A call, from the last member's arrival.
    fn call_ns(&mut self, call: &Call, work: &CallWork, random: &mut Random) -> u64;

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
    fn message_ns(&mut self, _: &InFlight, random: &mut Random) -> u64 {
        Chaos::some_ns(random)
    }

    fn local_ns(&mut self, _: &LocalWork, random: &mut Random) -> u64 {
        if random.one_in(2) {
            return 0;
        }
        Chaos::some_ns(random)
    }

    fn call_ns(&mut self, _: &Call, _: &CallWork, random: &mut Random) -> u64 {
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
    fn message_ns(&mut self, transfer: &InFlight, _: &mut Random) -> u64 {
        self.time_ns(transfer.bytes)
    }

    fn local_ns(&mut self, _: &LocalWork, _: &mut Random) -> u64 {
        0
    }

    fn call_ns(&mut self, _: &Call, work: &CallWork, _: &mut Random) -> u64 {
        self.time_ns(work.bytes)
    }

    fn notice_ns(&mut self, _: &mut Random) -> u64 {
        0
    }

    fn eager(&mut self, _: usize, _: &mut Random) -> bool {
        true
    }
}
