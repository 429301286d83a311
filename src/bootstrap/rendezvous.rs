//! A room: where the ranks of a communicator-to-be come together and exchange what they must know of each other.
//!
//! A state machine without sockets. It is told what its members say and answers what they must hear. Its memory is
//! bounded by [`ROUND_LIMIT_BYTES`]; a round's answer is encoded once and shared by all connections.
#![forbid(unsafe_code)]

use super::protocol::{Frame, Join, Process, MAX_RANKS};
use crate::error::{counted, Error};

/// The most bytes all ranks together may give in one round.
pub const ROUND_LIMIT_BYTES: usize = 1 << 28;

/// As a room's `first_name`: its members are the first ranks of the unique ids' ranges.
pub const LEADERS: u32 = u32::MAX;

/// The first of the ranks that meet at unique id `root` of `nroots`: contiguous ranges, the longer ones first. NCCL's
/// rule.
pub fn first_of_root(root: u32, nranks: u32, nroots: u32) -> u32 {
    root.saturating_mul(nranks / nroots).saturating_add(root.min(nranks % nroots))
}

struct Seat {
    conn: u64,
    process: Process,
    left: bool,
}

/// The members of one communicator-to-be.
pub struct Rendezvous {
    key: u128,
    retries: bool,
    first_name: u32,
    total: u32,
    seats: Vec<Option<Seat>>,
    joined: usize,
    parts: Vec<Option<Vec<u8>>>,
    given: usize,
    given_bytes: usize,
}

/// What follows from something a member said.
#[derive(Debug, PartialEq, Eq)]
pub enum RoundOutcome {
    /// Nothing yet.
    Wait,
    /// All members hear this.
    Tell(Frame),
    /// All members hear this error, and the room is closed.
    Fail(Error),
}

/// Numbers as compressed ranges: `3, 5-7`.
pub fn ranges(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |&(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// `rank 3`, or `ranks 3, 5-7`.
pub fn name_ranks(ranks: &[u32]) -> String {
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranges(ranks.iter().copied()))
}

impl Rendezvous {
    /// The room its first member asks for.
    pub fn new(join: &Join) -> Result<Rendezvous, Error> {
        if join.nranks == 0 || join.nranks > MAX_RANKS {
            return Err(Error::InvalidArgument(format!("a communicator cannot have {} ranks", join.nranks)));
        }
        let named = join.first_name == LEADERS || join.first_name <= MAX_RANKS;
        if !named || join.total < join.nranks || join.total > MAX_RANKS {
            return Err(Error::InvalidArgument("a room whose numbers make no sense".to_string()));
        }
        let empty = |_| None;
        Ok(Rendezvous {
            key: join.room.key,
            retries: join.retries,
            first_name: join.first_name,
            total: join.total,
            seats: (0..join.nranks).map(empty).collect(),
            joined: 0,
            parts: vec![None; join.nranks as usize],
            given: 0,
            given_bytes: 0,
        })
    }

    /// The key of its door.
    pub fn key(&self) -> u128 {
        self.key
    }

    /// Whether it may be tried again after a time-out.
    pub fn retries(&self) -> bool {
        self.retries
    }

    /// The connections of the members who are still here.
    pub fn conns(&self) -> impl Iterator<Item = u64> + '_ {
        self.seats.iter().flatten().filter(|seat| !seat.left).map(|seat| seat.conn)
    }

    /// Whether this member has a seat.
    pub fn has(&self, member: u32) -> bool {
        self.seats.get(member as usize).is_some_and(Option::is_some)
    }

    /// Whether all ranks have joined.
    pub fn is_full(&self) -> bool {
        self.joined == self.seats.len()
    }

    /// How many ranks the communicator will have.
    pub fn total(&self) -> u32 {
        self.total
    }

    fn name(&self, member: usize) -> u32 {
        if self.first_name == LEADERS {
            return first_of_root(member as u32, self.total, self.seats.len() as u32);
        }
        self.first_name + member as u32
    }

    /// A member, for messages.
    pub fn describe(&self, member: usize) -> String {
        match &self.seats[member] {
            Some(seat) => format!("rank {} ({})", self.name(member), seat.process),
            None => format!("rank {}", self.name(member)),
        }
    }

    /// The connection with which the same process has come before, for the same member: it has given that up.
    pub fn earlier(&self, join: &Join) -> Option<u64> {
        let seat = self.seats.get(join.rank as usize)?.as_ref()?;
        (self.retries && join.retries && seat.process == join.process).then_some(seat.conn)
    }

    /// Frees the seat of a member that comes again.
    pub fn vacate(&mut self, member: u32) {
        if self.seats.get_mut(member as usize).is_some_and(|seat| seat.take().is_some()) {
            self.joined -= 1;
        }
    }

    /// A rank comes in. After a failure it is told as all others are, although it has no seat.
    pub fn join(&mut self, conn: u64, join: &Join) -> RoundOutcome {
        let name = match join.first_name {
            LEADERS => first_of_root(join.rank, join.total.max(1), join.nranks.max(1)),
            first => first.saturating_add(join.rank),
        };
        if (join.nranks as usize, join.total, join.first_name) != (self.seats.len(), self.total, self.first_name) {
            let seated = (0..self.seats.len()).find(|&member| self.seats[member].is_some());
            let first = seated.map_or_else(|| "another rank".to_string(), |member| self.describe(member));
            return RoundOutcome::Fail(Error::InvalidUsage(format!(
                "ranks disagree on the communicator's size: rank {name} ({}) says {}, {first} says {}",
                join.process,
                counted(join.total as usize, "rank"),
                self.total
            )));
        }
        let Some(seat) = self.seats.get_mut(join.rank as usize) else {
            return RoundOutcome::Fail(Error::InvalidUsage(format!(
                "rank {name} ({}) does not exist in a communicator of {}",
                join.process,
                counted(self.total as usize, "rank")
            )));
        };
        if let Some(other) = seat {
            return RoundOutcome::Fail(Error::InvalidUsage(format!(
                "rank {name} was given twice: by {} and by {}",
                other.process, join.process
            )));
        }
        *seat = Some(Seat { conn, process: join.process.clone(), left: false });
        self.joined += 1;
        if self.is_full() {
            RoundOutcome::Tell(Frame::Joined)
        } else {
            RoundOutcome::Wait
        }
    }

    /// A member said something.
    pub fn hear(&mut self, member: u32, frame: Frame) -> RoundOutcome {
        let member = member as usize;
        match frame {
            Frame::Part(part) => self.part(member, part),
            Frame::TimedOut(waited_ms) => self.timed_out(waited_ms),
            Frame::Fail(error) => RoundOutcome::Fail(error),
            Frame::Leave => self.leave(member),
            _ => RoundOutcome::Fail(Error::Internal(format!("{} spoke out of turn", self.describe(member)))),
        }
    }

    fn part(&mut self, member: usize, part: Vec<u8>) -> RoundOutcome {
        if !self.is_full() || self.parts[member].is_some() {
            return RoundOutcome::Fail(Error::Internal(format!("{} exchanged out of turn", self.describe(member))));
        }
        if let Some(absent) = self.seats.iter().position(|seat| seat.as_ref().is_some_and(|seat| seat.left)) {
            return RoundOutcome::Fail(self.left_early(absent));
        }
        self.given_bytes += part.len() + 4;
        if self.given_bytes > ROUND_LIMIT_BYTES {
            return RoundOutcome::Fail(Error::InvalidUsage(format!(
                "the ranks exchange more than {ROUND_LIMIT_BYTES} bytes when the communicator is made"
            )));
        }
        self.parts[member] = Some(part);
        self.given += 1;
        if self.given < self.parts.len() {
            return RoundOutcome::Wait;
        }
        self.given = 0;
        self.given_bytes = 0;
        RoundOutcome::Tell(Frame::All(self.parts.iter_mut().filter_map(Option::take).collect()))
    }

    fn timed_out(&self, waited_ms: u64) -> RoundOutcome {
        let absent = |member: &usize| match self.is_full() {
            false => self.seats[*member].is_none(),
            true => self.given > 0 && self.parts[*member].is_none(),
        };
        let missing: Vec<u32> = (0..self.seats.len()).filter(absent).map(|member| self.name(member)).collect();
        if missing.is_empty() {
            // The answer to the last round is on its way to the member.
            return RoundOutcome::Wait;
        }
        let what = if self.is_full() { "did not take part in the exchange" } else { "did not join" };
        RoundOutcome::Fail(Error::Timeout(format!(
            "{} of {} of the new communicator {what} within {waited_ms} ms (STRATA_BOOTSTRAP_TIMEOUT_MS)",
            name_ranks(&missing),
            self.total
        )))
    }

    fn leave(&mut self, member: usize) -> RoundOutcome {
        if let Some(seat) = &mut self.seats[member] {
            seat.left = true;
        }
        if self.is_full() && self.given == 0 {
            RoundOutcome::Wait
        } else {
            RoundOutcome::Fail(self.left_early(member))
        }
    }

    fn left_early(&self, member: usize) -> Error {
        Error::Remote(format!("{} left while the communicator was being made", self.describe(member)))
    }

    /// A member's connection ended. After an orderly leave that is no news.
    pub fn gone(&mut self, member: u32) -> RoundOutcome {
        let member = member as usize;
        match &mut self.seats[member] {
            Some(seat) if !seat.left => {
                seat.left = true;
                let who = self.describe(member);
                RoundOutcome::Fail(Error::Remote(format!("{who} died while the communicator was being made")))
            }
            _ => RoundOutcome::Wait,
        }
    }

    /// Whether nobody is here any more.
    pub fn is_deserted(&self) -> bool {
        self.conns().next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Credentials;
    use super::*;

    fn join(rank: u32, nranks: u32) -> Join {
        let process = Process { host: "node".to_string(), pid: 100 + rank };
        let room = Credentials { key: 1, secret: [1; 16] };
        Join { room, nranks, rank, first_name: 0, total: nranks, retries: false, process }
    }

    fn full(nranks: u32) -> Rendezvous {
        let mut room = Rendezvous::new(&join(0, nranks)).unwrap();
        for rank in 0..nranks {
            room.join(u64::from(rank), &join(rank, nranks));
        }
        room
    }

    fn failure(outcome: RoundOutcome) -> String {
        match outcome {
            RoundOutcome::Fail(error) => format!("{} {error}", error.code()),
            other => panic!("no failure but {other:?}"),
        }
    }

    #[test]
    fn numbers_are_told_as_ranges() {
        assert_eq!(ranges([3, 5, 6, 7]), "3, 5-7");
        assert_eq!(ranges([1, 2]), "1, 2");
        assert_eq!(ranges([]), "");
    }

    #[test]
    fn parts_come_back_in_rank_order_when_the_last_has_given_its_own() {
        let mut room = full(3);
        assert_eq!(room.hear(2, Frame::Part(vec![2])), RoundOutcome::Wait);
        assert_eq!(room.hear(0, Frame::Part(vec![])), RoundOutcome::Wait);
        let all = Frame::All(vec![vec![], vec![1], vec![2]]);
        assert_eq!(room.hear(1, Frame::Part(vec![1])), RoundOutcome::Tell(all));
    }

    #[test]
    fn a_time_out_names_those_who_are_missing() {
        let mut room = Rendezvous::new(&join(0, 8)).unwrap();
        for rank in [0, 1, 2, 4] {
            room.join(0, &join(rank, 8));
        }
        let text = failure(room.hear(0, Frame::TimedOut(50)));
        assert!(text.starts_with("8 ranks 3, 5-7 of 8 of the new communicator did not join within 50 ms"), "{text}");
        let mut room = full(3);
        assert_eq!(room.hear(1, Frame::TimedOut(1)), RoundOutcome::Wait, "nobody waits for anybody");
        room.hear(1, Frame::Part(vec![]));
        let text = failure(room.hear(1, Frame::TimedOut(9)));
        assert!(text.contains("ranks 0, 2 of 3 of the new communicator did not take part"), "{text}");
    }

    #[test]
    fn a_rank_given_twice_or_out_of_range_or_of_another_size_is_a_failure_that_names_it() {
        let mut room = Rendezvous::new(&join(0, 4)).unwrap();
        room.join(0, &join(0, 4));
        let twice = failure(room.join(1, &join(0, 4)));
        assert_eq!(twice, "5 rank 0 was given twice: by node, pid 100 and by node, pid 100");
        assert!(failure(room.join(2, &join(4, 4))).contains("rank 4 (node, pid 104) does not exist"));
        let size = failure(room.join(3, &join(2, 5)));
        assert!(size.contains("rank 2 (node, pid 102) says 5 ranks, rank 0 (node, pid 100) says 4"), "{size}");
        assert!(Rendezvous::new(&join(0, 0)).is_err());
        assert!(Rendezvous::new(&join(0, u32::MAX)).is_err());
    }

    #[test]
    fn leaving_after_the_last_round_is_orderly_and_dying_is_not() {
        let mut room = full(2);
        assert_eq!(room.hear(0, Frame::Leave), RoundOutcome::Wait);
        assert_eq!(room.gone(0), RoundOutcome::Wait);
        assert!(failure(room.hear(1, Frame::Part(vec![]))).starts_with("6 rank 0 (node, pid 100) left"));
        assert!(failure(room.gone(1)).starts_with("6 rank 1 (node, pid 101) died"));
        assert!(room.is_deserted());
    }

    #[test]
    fn a_round_beyond_the_memory_limit_fails() {
        let mut room = full(2);
        room.given_bytes = ROUND_LIMIT_BYTES;
        assert!(failure(room.hear(0, Frame::Part(vec![1]))).contains("more than"));
    }
}
