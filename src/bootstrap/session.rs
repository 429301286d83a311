//! One rank's part in making a communicator: it joins its room, exchanges, and leaves.
//!
//! With several unique ids the ranks are spread over them in contiguous ranges, as NCCL spreads them. Each range meets
//! in its own room; the first rank of each range also joins a room at the first id, where the ranges' results are
//! merged, and hands the whole back to its range. So no root serves more than its range and the number of ids.
#![forbid(unsafe_code)]

use super::unique_id::{Meeting, UniqueId};
use super::Exchange;
use crate::bootstrap::connection::{Conn, Interrupt, Interruption, NoFrame};
use crate::bootstrap::protocol::{Frame, Join, FRAME_LIMIT, MAX_RANKS};
use crate::bootstrap::rendezvous::{first_of_root, LEADERS};
use crate::bootstrap::{Credentials, Process, Service, ServiceAddr};
use crate::error::{Error, Result};
use crate::topo::Rank;
use std::io::ErrorKind;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a root may take to say who is missing.
const VERDICT: Duration = Duration::from_secs(1);
/// How much longer the meeting of the ranges waits than a range, so that the range's own, better verdict comes first.
const SLACK: Duration = Duration::from_secs(2);
/// How long a root that refuses connections is tried. It listens from before its id exists, so it is gone for good.
const REFUSED: Duration = Duration::from_secs(2);
/// How often a root that hangs up without a word is tried, at least, and for as long as one that refuses.
const HANG_UPS: u32 = 10;

/// A room that needs no unique id: its members derive the same credentials from a communicator they share.
#[derive(Debug, Clone, Copy)]
pub struct Derived {
    /// The service that has the room: a member's on which all agree.
    pub leader: ServiceAddr,
    /// The member, by its number in the communicator that they share.
    pub leader_rank: Rank,
    /// A key no other room has, and the secret of the communicator that the leader has a monitor for.
    pub room: Credentials,
    /// Whether the members may try again under the same key after a time-out, which some of them may not have met.
    pub retries: bool,
}

/// A rank's connections while a communicator is made. Dropping it without [`close`](Session::close) fails the others.
pub struct Session<'a> {
    range: Seat<'a>,
    top: Option<Seat<'a>>,
    /// The ranges' rooms, one for each id, and the services that have them.
    rooms: Vec<(ServiceAddr, u128)>,
    closed: bool,
}

/// How a room is found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It must be there.
    Opened,
    /// It will be there when rank 0 comes.
    Fixed,
    /// It will be there when the leader, a rank of the parent, knows the secret.
    Derived(Option<Rank>),
}

impl Place {
    /// Who is at this address, for messages.
    fn at(self, root: ServiceAddr) -> String {
        match self {
            Place::Derived(Some(leader)) => format!("rank {leader} of the parent, at {},", root.0),
            _ => format!("the root at {}", root.0),
        }
    }

    /// What a root that hangs up on a rank before it lets it in may mean by that.
    fn hint(self, hung_up: bool) -> &'static str {
        match hung_up && self == Place::Fixed {
            true => "; it refuses this rank: is STRATA_COMM_KEY the same there?",
            false => "",
        }
    }
}

/// One membership in one room.
struct Seat<'a> {
    conn: Conn,
    root: ServiceAddr,
    place: Place,
    name: Rank,
    interrupt: &'a dyn Interrupt,
    timeout: Duration,
    joined: bool,
}

impl<'a> Session<'a> {
    /// Joins with the unique ids that all ranks have been given in the same order. Returns when all ranks have.
    /// `interrupt` ends this and every later wait within milliseconds.
    pub fn join(
        ids: &[UniqueId],
        nranks: usize,
        rank: Rank,
        timeout: Duration,
        interrupt: &'a dyn Interrupt,
    ) -> Result<Session<'a>> {
        let meetings: Vec<Meeting> = ids.iter().map(UniqueId::meeting).collect::<Result<_>>()?;
        let total = check(nranks, rank)?;
        if meetings.is_empty() || meetings.len() > nranks {
            let text = format!("{} unique ids for {nranks} ranks: there must be 1 to {nranks}", ids.len());
            return Err(Error::InvalidArgument(text));
        }
        if meetings.len() > 1 && meetings.iter().any(|meeting| meeting.fixed) {
            let text = "several unique ids cannot be used together with NCCL_COMM_ID";
            return Err(Error::InvalidArgument(text.to_string()));
        }
        let nroots = meetings.len() as u32;
        let root = (0..nroots).rev().find(|&root| first_of_root(root, total, nroots) <= rank.0).unwrap_or(0);
        let first = first_of_root(root, total, nroots);
        let members = first_of_root(root + 1, total, nroots) - first;
        let here = meetings[root as usize];
        let deadline = Instant::now() + timeout;
        if here.fixed && rank.0 == 0 {
            here.listen(deadline, || interrupt.interrupted().is_some())?;
        }
        let wish = Join {
            room: here.room,
            nranks: members,
            rank: rank.0 - first,
            first_name: first,
            total,
            retries: false,
            process: Process::this(),
        };
        let place = if here.fixed { Place::Fixed } else { Place::Opened };
        let range = Seat::take(here.service, place, &wish, rank, timeout, interrupt);
        let rooms: Vec<_> = meetings.iter().map(|meeting| (meeting.service, meeting.room.key)).collect();
        let session = range.map(|range| Session { range, top: None, rooms: rooms.clone(), closed: false });
        let session = if nroots == 1 {
            session
        } else {
            let top = meetings[0];
            let room = Credentials { key: !top.room.key, ..top.room };
            let top_wish = Join { room, nranks: nroots, rank: root, first_name: LEADERS, ..wish };
            Session::merge(session, top.service, top_wish, rank == Rank(first))
        };
        session.inspect_err(|_| settle(&rooms))
    }

    /// The ranges come together: their first ranks meet, and tell the others when they have.
    fn merge(range: Result<Session<'a>>, service: ServiceAddr, wish: Join, leads: bool) -> Result<Session<'a>> {
        let mut session = range.inspect_err(|error| {
            if leads {
                Seat::decline(service, &wish, error);
            }
        })?;
        if leads {
            let (name, interrupt) = (session.range.name, session.range.interrupt);
            let timeout = session.range.timeout + SLACK;
            // A leader may have come only to say that its range has failed: a first round shows it.
            let top = Seat::take(service, Place::Derived(None), &wish, name, timeout, interrupt)
                .and_then(|mut top| top.round(Vec::new(), Duration::ZERO).map(|_| top));
            match top {
                Ok(top) => session.top = Some(top),
                Err(error) => return Err(session.fail(error)),
            }
        }
        session.range.round(Vec::new(), 2 * SLACK).map_err(|error| session.fail(error))?;
        Ok(session)
    }

    /// Joins a room that needs no unique id. The leader's service opens it for whoever comes first.
    pub fn join_derived(
        derived: Derived,
        nranks: usize,
        rank: Rank,
        timeout: Duration,
        interrupt: &'a dyn Interrupt,
    ) -> Result<Session<'a>> {
        let total = check(nranks, rank)?;
        let Derived { room, retries, .. } = derived;
        let wish = Join { room, nranks: total, rank: rank.0, first_name: 0, total, retries, process: Process::this() };
        if Service::get()?.addr() == derived.leader {
            Service::get()?.open_room(derived.room)?;
        }
        let rooms = vec![(derived.leader, derived.room.key)];
        let range =
            Seat::take(derived.leader, Place::Derived(Some(derived.leader_rank)), &wish, rank, timeout, interrupt)
                .inspect_err(|_| settle(&rooms))?;
        Ok(Session { range, top: None, rooms, closed: false })
    }

    fn gather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let ours = self.range.round(mine, Duration::ZERO)?;
        if !self.has_ranges() {
            return Ok(ours);
        }
        let whole = match &mut self.top {
            None => Vec::new(),
            Some(top) => {
                let ranges = top.round(Frame::All(ours).encode(), Duration::ZERO)?;
                let mut all = Vec::new();
                for range in ranges {
                    all.extend(unpack(&range)?);
                }
                Frame::All(all).encode()
            }
        };
        let answers = self.range.round(whole, 2 * SLACK)?;
        unpack(&answers[0])
    }

    /// Tells those who still exchange that it is over, and why.
    fn fail(&mut self, error: Error) -> Error {
        if !std::mem::replace(&mut self.closed, true) {
            for seat in std::iter::once(&mut self.range).chain(&mut self.top) {
                seat.give_up(&error);
                seat.conn.shut();
            }
            settle(&self.rooms);
        }
        error
    }

    fn has_ranges(&self) -> bool {
        self.rooms.len() > 1
    }

    /// Leaves in good order. The others may still be reading the last round, or, in other ranges, come to it.
    pub fn close(mut self) {
        self.closed = true;
        let deadline = Instant::now() + VERDICT;
        for seat in std::iter::once(&mut self.range).chain(&mut self.top) {
            seat.conn.send(Frame::Leave.encode().into());
            seat.conn.drain(deadline);
        }
        // This rank may have its answer before the others, and its process, which has theirs, may end at once.
        let Some(service) = roots_here(&self.rooms) else { return };
        let ours = self.rooms.iter().filter(|(root, _)| self.has_ranges() && service.is_at(*root));
        service.flush(ours.map(|(_, room)| *room).collect());
    }
}

impl Exchange for Session<'_> {
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        if self.closed {
            return Err(Error::InvalidUsage("the exchange has failed before".to_string()));
        }
        self.gather(mine).map_err(|error| self.fail(error))
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if !self.closed {
            let who = format!("rank {} ({})", self.range.name, Process::this());
            self.fail(Error::Remote(format!("{who} gave up making the communicator")));
        }
    }
}

/// This process's service, if it is one of the roots.
fn roots_here(rooms: &[(ServiceAddr, u128)]) -> Option<Arc<Service>> {
    Service::get().ok().filter(|service| rooms.iter().any(|(root, _)| service.is_at(*root)))
}

/// After a failure the process of a root stays until the others have heard the verdict, although its own rank knows it.
fn settle(rooms: &[(ServiceAddr, u128)]) {
    if let Some(service) = roots_here(rooms) {
        service.settle();
    }
}

fn check(nranks: usize, rank: Rank) -> Result<u32> {
    let total = u32::try_from(nranks).ok().filter(|&total| total <= MAX_RANKS);
    match total {
        Some(total) if rank.0 < total => Ok(total),
        _ => Err(Error::InvalidArgument(format!("rank {rank} of {nranks}: there is no such rank"))),
    }
}

fn unpack(bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    match Frame::decode(bytes, FRAME_LIMIT) {
        Ok(Some((Frame::All(parts), _))) => Ok(parts),
        _ => Err(Error::Internal("a range's result is no list".to_string())),
    }
}

impl<'a> Seat<'a> {
    /// Connects, joins, and waits until all have joined.
    fn take(
        root: ServiceAddr,
        place: Place,
        wish: &Join,
        name: Rank,
        timeout: Duration,
        interrupt: &'a dyn Interrupt,
    ) -> Result<Seat<'a>> {
        let began = Instant::now();
        let deadline = began + timeout;
        let mut attempt = 0;
        loop {
            let outcome = match Conn::dial(root.0) {
                Ok(mut conn) => {
                    conn.limit = FRAME_LIMIT;
                    conn.send(Frame::Join(wish.clone()).encode().into());
                    let mut seat = Seat { conn, root, place, name, interrupt, timeout, joined: false };
                    match seat.conn.wait(deadline, interrupt) {
                        Err(NoFrame::Gone(error)) => Err(error),
                        heard => match seat.settle(heard)? {
                            Frame::Joined => return Ok(Seat { joined: true, ..seat }),
                            Frame::Unknown if place == Place::Opened => return Err(seat.unknown()),
                            Frame::Unknown => Ok(()),
                            _ => return Err(Error::Internal(format!("{} spoke out of turn", place.at(root)))),
                        },
                    }
                }
                Err(error) => Err(error),
            };
            attempt += 1;
            let mut hung_up = false;
            if let Err(error) = outcome {
                let refused = error.kind() == ErrorKind::ConnectionRefused;
                let final_refusal = refused && place != Place::Fixed && began.elapsed() >= REFUSED;
                hung_up = matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset);
                let final_hang_up = hung_up && attempt >= HANG_UPS && began.elapsed() >= REFUSED;
                if final_refusal || final_hang_up && place != Place::Fixed {
                    let at = root.0;
                    return Err(Error::Remote(match place {
                        Place::Derived(Some(leader)) => {
                            format!("rank {leader} at {at} takes no part any more: its process has ended ({error})")
                        }
                        _ => format!(
                            "rank {name}: the root at {at} cannot be joined: {error} (its process has ended, or the id is wrong)"
                        ),
                    }));
                }
                crate::trace!("rank {name}: joining at {}: {error}; trying again", root.0);
            }
            let now = Instant::now();
            if now >= deadline {
                let ms = timeout.as_millis();
                let text = format!("rank {name}: {} was not there within {ms} ms", place.at(root));
                return Err(Error::Timeout(format!("{text} (STRATA_BOOTSTRAP_TIMEOUT_MS){}", place.hint(hung_up))));
            }
            if let Some(why) = interrupt.interrupted() {
                return Err(why_it_ends(why));
            }
            std::thread::sleep(Duration::from_millis(2 << attempt.min(4)).min(deadline - now));
        }
    }

    fn unknown(&self) -> Error {
        Error::InvalidUsage(format!(
            "the unique id is not known at {} any more: its process has been restarted, or it was used long ago",
            self.root.0
        ))
    }

    /// Brings a failed range's error to the meeting of the ranges.
    fn decline(root: ServiceAddr, wish: &Join, error: &Error) {
        let Ok(mut conn) = Conn::dial(root.0) else { return };
        conn.send(Frame::Join(wish.clone()).encode().into());
        conn.send(Frame::Fail(error.clone()).encode().into());
        // The answer shows that it was heard; without one the others find out by their own time-out.
        let _ = conn.wait(Instant::now() + VERDICT, &AtomicBool::new(false));
    }

    fn round(&mut self, part: Vec<u8>, slack: Duration) -> Result<Vec<Vec<u8>>> {
        self.conn.send(Frame::Part(part).encode().into());
        let heard = self.conn.wait(Instant::now() + self.timeout + slack, self.interrupt);
        match self.settle(heard)? {
            Frame::All(parts) => Ok(parts),
            _ => Err(Error::Internal(format!("{} spoke out of turn", self.place.at(self.root)))),
        }
    }

    /// Turns what was heard, or not, into a frame or the error that it means.
    fn settle(&mut self, heard: std::result::Result<Frame, NoFrame>) -> Result<Frame> {
        let root = self.place.at(self.root);
        match heard {
            Ok(Frame::Fail(error)) => Err(error),
            Ok(frame) => Ok(frame),
            Err(NoFrame::Interrupted(why)) => {
                let who = format!("rank {} ({})", self.name, Process::this());
                self.give_up(&match &why {
                    Interruption::Cancelled => {
                        Error::Remote(format!("{who} aborted while the communicator was being made"))
                    }
                    Interruption::Hopeless(error) => error.clone(),
                });
                Err(why_it_ends(why))
            }
            Err(NoFrame::Gone(error)) => Err(Error::Remote(format!(
                "rank {}: {root} died while the communicator was being made: {error}",
                self.name
            ))),
            Err(NoFrame::Late) => {
                // The root knows who is missing, and tells the others as well.
                let waited_ms = self.timeout.as_millis() as u64;
                self.conn.send(Frame::TimedOut(waited_ms).encode().into());
                match self.conn.wait(Instant::now() + VERDICT, &AtomicBool::new(false)) {
                    Ok(Frame::Fail(error)) => Err(error),
                    Ok(frame) => Ok(frame),
                    Err(no_frame) => Err(Error::Timeout(format!(
                        "rank {}: {root} has not answered within {waited_ms} ms (STRATA_BOOTSTRAP_TIMEOUT_MS){}",
                        self.name,
                        self.place.hint(!self.joined && matches!(no_frame, NoFrame::Gone(_)))
                    ))),
                }
            }
        }
    }

    fn give_up(&mut self, error: &Error) {
        self.conn.send(Frame::Fail(error.clone()).encode().into());
        self.conn.drain(Instant::now() + VERDICT);
    }
}

fn why_it_ends(why: Interruption) -> Error {
    match why {
        Interruption::Cancelled => {
            Error::InvalidUsage("the communicator was aborted while it was being made".to_string())
        }
        Interruption::Hopeless(error) => error,
    }
}
