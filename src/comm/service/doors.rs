//! Which rooms this service has, and who is let in.
//!
//! A *door* is what a unique id, or a key derived by the members of a communicator, names. Behind an open door is one
//! room that fills; when it is full, or has failed, the door closes and says why to whoever still comes.
#![forbid(unsafe_code)]

use super::net::{Net, Role};
use super::room::{Outcome, Room};
use super::wire::{Credentials, Frame, Join};
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
pub struct Doors {
    doors: HashMap<u128, Door>,
    closed: VecDeque<u128>,
    rooms: HashMap<u64, Room>,
    next_room: u64,
    /// Doors of fixed addresses that have served: nobody more is expected there.
    pub served: Vec<u128>,
}

/// What became of a wish to join.
pub enum Entry {
    /// The connection is a member now, or has been told why not.
    Handled,
    /// The secret was wrong.
    Intruder,
}

impl Doors {
    /// Opens a door.
    pub fn open(&mut self, credentials: Credentials, fixed: bool) {
        let door = Door { credentials, state: State::Open(None), fixed };
        self.doors.entry(credentials.key).or_insert(door);
    }

    /// Whether some door, open or closed, has this secret. That of a fixed address may be everybody's.
    pub fn knows(&self, secret: &[u8; 16]) -> bool {
        self.doors.values().any(|door| !door.fixed && door.credentials.secret_is(secret))
    }

    /// A connection asks to be let in. `trusted`: its secret is that of a communicator of this process.
    pub fn join(&mut self, net: &mut Net, conn: u64, join: &Join, trusted: bool) -> Entry {
        let key = join.room.key;
        if !self.doors.contains_key(&key) && (trusted || self.knows(&join.room.secret)) {
            self.open(join.room, false);
        }
        let Some(door) = self.doors.get_mut(&key) else {
            net.send(conn, &Frame::Unknown);
            net.end(conn);
            return Entry::Handled;
        };
        if !door.credentials.secret_is(&join.room.secret) {
            return Entry::Intruder;
        }
        let room_id = match &mut door.state {
            State::Closed(why) => {
                let why = Frame::Fail(why.clone());
                net.send(conn, &why);
                net.end(conn);
                return Entry::Handled;
            }
            State::Open(Some(room)) => *room,
            State::Open(unfilled) => match Room::new(join) {
                Ok(room) => {
                    self.next_room += 1;
                    self.rooms.insert(self.next_room, room);
                    *unfilled.insert(self.next_room)
                }
                Err(error) => {
                    net.send(conn, &Frame::Fail(error));
                    net.end(conn);
                    return Entry::Handled;
                }
            },
        };
        let Some(room) = self.rooms.get_mut(&room_id) else { return Entry::Handled };
        let outcome = room.join(conn, join);
        let full = room.is_full();
        if let Outcome::Fail(error) = &outcome {
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
                    "this unique id has already made a communicator of {}: all are there",
                    counted(join.total as usize, "rank")
                )),
            );
        }
        Entry::Handled
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
    pub fn hear(&mut self, net: &mut Net, room_id: u64, member: u32, frame: Frame) {
        let Some(room) = self.rooms.get_mut(&room_id) else { return };
        let outcome = room.hear(member, frame);
        self.follow(net, room_id, outcome);
    }

    /// A member's connection ended.
    pub fn gone(&mut self, net: &mut Net, room_id: u64, member: u32) {
        let Some(room) = self.rooms.get_mut(&room_id) else { return };
        let outcome = room.gone(member);
        self.follow(net, room_id, outcome);
    }

    fn follow(&mut self, net: &mut Net, room_id: u64, outcome: Outcome) {
        let Some(room) = self.rooms.get(&room_id) else { return };
        let conns: Vec<u64> = room.conns().collect();
        match outcome {
            Outcome::Wait => {}
            Outcome::Tell(frame) => net.send_all(conns.into_iter(), &frame),
            Outcome::Fail(error) => {
                crate::info!("a communicator of {} could not be made: {error}", counted(room.total() as usize, "rank"));
                net.send_all(conns.iter().copied(), &Frame::Fail(error.clone()));
                conns.into_iter().for_each(|conn| net.end(conn));
                self.rooms.remove(&room_id);
                // Once the room was full its door was shut, with another word.
                let behind = |door: &Door| matches!(door.state, State::Open(Some(room)) if room == room_id);
                if let Some(key) = self.doors.iter().find(|(_, door)| behind(door)).map(|(key, _)| *key) {
                    self.shut(key, error);
                }
                return;
            }
        }
        if self.rooms.get(&room_id).is_some_and(Room::is_deserted) {
            self.rooms.remove(&room_id);
        }
    }
}
