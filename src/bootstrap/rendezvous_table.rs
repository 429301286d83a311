//! Which rooms this service has, and who is let in.
//!
//! A *door* is what a unique id, or a key derived by the members of a communicator, names. Behind an open door is one
//! room that fills; when it is full, or has failed, the door closes and says why to whoever still comes.
#![forbid(unsafe_code)]

use super::connections::{Connections, Role};
use super::protocol::{Credentials, Frame, Join};
use super::rendezvous::{Rendezvous, RoundOutcome};
use crate::error::{counted, Error};
use std::collections::{HashMap, VecDeque};

/// How many closed doors still say why they are closed.
const CLOSED_DOORS: usize = 1024;

enum State {
    Open(Option<u64>),
    Closed(Error),
}

struct Door {
    credentials: Credentials,
    state: State,
    /// A door that a fixed address names opens anew for every communicator.
    fixed: bool,
}

/// The doors and rooms of a service.
#[derive(Default)]
pub struct RendezvousTable {
    doors: HashMap<u128, Door>,
    closed: VecDeque<u128>,
    rooms: HashMap<u64, Rendezvous>,
    next_room: u64,
    /// Doors of fixed addresses that have served: nobody more is expected there.
    pub served: Vec<u128>,
}

/// What became of a wish to join.
pub enum Admittance {
    /// The connection is a member now, or has been told why not.
    Handled,
    /// The secret was wrong.
    Intruder,
}

impl RendezvousTable {
    /// Opens a door.
    pub fn open(&mut self, credentials: Credentials, fixed: bool) {
        let door = Door { credentials, state: State::Open(None), fixed };
        self.doors.entry(credentials.key).or_insert(door);
    }

    /// Whether some door, open or closed, has this secret. That of a fixed address may be everybody's.
    pub fn knows(&self, secret: &[u8; 16]) -> bool {
        self.doors.values().any(|door| !door.fixed && door.credentials.secret_is(secret))
    }

    /// Whether somebody is in the room behind the door with this key.
    pub fn has_room(&self, key: u128) -> bool {
        self.rooms.values().any(|room| room.key() == key)
    }

    /// A connection asks to be let in. `trusted`: its secret is that of a communicator of this process.
    pub fn join(&mut self, net: &mut Connections, conn: u64, join: &Join, trusted: bool) -> Admittance {
        let key = join.room.key;
        if !self.doors.contains_key(&key) && (trusted || self.knows(&join.room.secret)) {
            self.open(join.room, false);
        }
        let Some(door) = self.doors.get_mut(&key) else {
            net.send(conn, &Frame::Unknown);
            net.end(conn);
            return Admittance::Handled;
        };
        if !door.credentials.secret_is(&join.room.secret) {
            return Admittance::Intruder;
        }
        self.make_way(net, join);
        let Some(door) = self.doors.get_mut(&key) else { return Admittance::Handled };
        let room_id = match &mut door.state {
            State::Closed(why) => {
                let why = Frame::Fail(why.clone());
                net.send(conn, &why);
                net.end(conn);
                return Admittance::Handled;
            }
            State::Open(Some(room)) => *room,
            State::Open(unfilled) => match Rendezvous::new(join) {
                Ok(room) => {
                    self.next_room += 1;
                    self.rooms.insert(self.next_room, room);
                    *unfilled.insert(self.next_room)
                }
                Err(error) => {
                    net.send(conn, &Frame::Fail(error));
                    net.end(conn);
                    return Admittance::Handled;
                }
            },
        };
        let Some(room) = self.rooms.get_mut(&room_id) else { return Admittance::Handled };
        let outcome = room.join(conn, join);
        let full = room.is_full();
        if let RoundOutcome::Fail(error) = &outcome {
            // The one who causes the failure may have no seat.
            let seated = room.conns().any(|member| member == conn);
            if !seated {
                net.send(conn, &Frame::Fail(error.clone()));
                net.end(conn);
            }
        } else {
            net.admit(conn, Role::Member { room: room_id, member: join.rank });
        }
        self.follow(net, room_id, outcome);
        if full {
            self.shut(
                key,
                Error::InvalidUsage(format!(
                    "this {} has already made a communicator of {}: all are there",
                    if join.retries { "shrink" } else { "unique id" },
                    counted(join.total as usize, "rank")
                )),
            );
        }
        Admittance::Handled
    }

    /// A process comes again for a member that has given up by a time-out, of which its old connection may not have told yet:
    /// frees the seat. In a full room the others have met the old one, and have to try again too.
    fn make_way(&mut self, net: &mut Connections, join: &Join) {
        let Some((&room_id, room)) = self.rooms.iter_mut().find(|(_, room)| room.key() == join.room.key) else {
            return;
        };
        let Some(earlier) = room.earlier(join) else { return };
        net.close(earlier);
        if !room.is_full() {
            return room.vacate(join.rank);
        }
        let why = format!("{} tried again after a time-out", room.describe(join.rank as usize));
        self.follow(net, room_id, RoundOutcome::Fail(Error::Timeout(why)));
        self.open(join.room, false);
    }

    fn shut(&mut self, key: u128, why: Error) {
        let Some(door) = self.doors.get_mut(&key) else { return };
        if door.fixed {
            self.doors.remove(&key);
            self.served.push(key);
            return;
        }
        door.state = State::Closed(why);
        self.closed.push_back(key);
        if self.closed.len() > CLOSED_DOORS {
            if let Some(oldest) = self.closed.pop_front() {
                self.doors.remove(&oldest);
            }
        }
    }

    /// A member said something.
    pub fn hear(&mut self, net: &mut Connections, room_id: u64, member: u32, frame: Frame) {
        let Some(room) = self.rooms.get_mut(&room_id) else { return };
        let outcome = room.hear(member, frame);
        self.follow(net, room_id, outcome);
    }

    /// A member's connection ended.
    pub fn gone(&mut self, net: &mut Connections, room_id: u64, member: u32) {
        let Some(room) = self.rooms.get_mut(&room_id) else { return };
        let outcome = room.gone(member);
        self.follow(net, room_id, outcome);
    }

    fn follow(&mut self, net: &mut Connections, room_id: u64, outcome: RoundOutcome) {
        let Some(room) = self.rooms.get(&room_id) else { return };
        let conns: Vec<u64> = room.conns().collect();
        match outcome {
            RoundOutcome::Wait => {}
            RoundOutcome::Tell(frame) => net.send_all(conns.into_iter(), &frame),
            RoundOutcome::Fail(error) => {
                crate::info!("a communicator of {} could not be made: {error}", counted(room.total() as usize, "rank"));
                net.send_all(conns.iter().copied(), &Frame::Fail(error.clone()));
                conns.into_iter().for_each(|conn| net.end(conn));
                let (key, retries) = (room.key(), room.retries());
                self.rooms.remove(&room_id);
                // Once the room was full its door was shut, with another word.
                let is_behind = |door: &Door| matches!(door.state, State::Open(Some(room)) if room == room_id);
                if retries && matches!(error, Error::Timeout(_)) {
                    // Whoever comes opens it anew.
                    self.doors.remove(&key);
                    self.closed.retain(|closed| *closed != key);
                } else if self.doors.get(&key).is_some_and(is_behind) {
                    self.shut(key, error);
                }
                return;
            }
        }
        if self.rooms.get(&room_id).is_some_and(Rendezvous::is_deserted) {
            self.rooms.remove(&room_id);
        }
    }
}
