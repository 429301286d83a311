//! The connections of the service's thread, by number, each with the part it plays.
#![forbid(unsafe_code)]

use super::connection::Conn;
use super::protocol::{Frame, Process, FRAME_LIMIT};
use super::quiet::Quiet;
use crate::admission::{BudgetShare, GRACE};
use rustix::event::PollFlags;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a connection may take to say who it is, or to take a last word.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection on which a rank was asked to relay is kept for the next time.
const KEPT: Duration = Duration::from_secs(60);

/// One communicator's rank in this process.
pub type CommRank = (u128, u32);

/// The part a connection plays.
#[derive(Debug, Clone)]
pub enum Role {
    /// It has not said yet what it wants.
    New,
    /// A member of a room.
    Member {
        /// The room's number.
        room: u64,
        /// The member's.
        member: u32,
    },
    /// The link from a rank's predecessor.
    LinkIn {
        /// Whose predecessor.
        of: CommRank,
        /// Its rank.
        from: u32,
        /// Its process.
        process: Process,
    },
    /// The link to a rank's successor.
    LinkOut {
        /// Whose successor.
        of: CommRank,
        /// Its rank.
        to: u32,
        /// Its process, once it has answered.
        process: Option<Process>,
    },
    /// It asks another rank about an operation on behalf of one that gets no further.
    Asked {
        /// Who asks.
        of: CommRank,
        /// Who is asked.
        rank: u32,
        /// The operation's number.
        number: u64,
    },
    /// It asks another rank to relay what that is late for, each time.
    AsksToRelay {
        /// Who asks.
        of: CommRank,
        /// Who is asked.
        rank: u32,
    },
    /// On it another rank asks one of this process to relay.
    AskedToRelay {
        /// Who is asked.
        of: CommRank,
    },
    /// It carries a last word and is closed when that is sent.
    Ending,
}

/// A connection and its part.
pub struct ServicePeer {
    /// The connection.
    pub conn: Conn,
    /// Its part.
    pub role: Role,
    /// When it is closed whatever happens.
    pub deadline: Option<Instant>,
    /// Watched among those on which mostly nothing happens.
    rests: bool,
    /// When it was accepted, or began to end.
    pub since: Instant,
    /// What it holds until it has shown a secret.
    pub place: Option<BudgetShare>,
}

/// All connections of the service.
#[derive(Default)]
pub struct Connections {
    /// By number.
    pub peers: HashMap<u64, ServicePeer>,
    next: u64,
    quiet: Quiet,
}

impl Connections {
    fn add(&mut self, conn: Conn, role: Role, place: Option<BudgetShare>) -> u64 {
        self.next += 1;
        let since = Instant::now();
        let patience = if matches!(role, Role::AsksToRelay { .. }) { KEPT } else { PATIENCE };
        self.peers.insert(
            self.next,
            ServicePeer { conn, role, deadline: Some(since + patience), rests: false, since, place },
        );
        self.next
    }

    /// What to poll for all that rest.
    pub fn quiet(&self) -> &Quiet {
        &self.quiet
    }

    /// The connections to be polled one by one.
    pub fn polled(&self) -> impl Iterator<Item = (u64, &ServicePeer)> + '_ {
        let active = |peer: &ServicePeer| !peer.rests || peer.conn.interest() != PollFlags::IN;
        self.peers.iter().filter(move |(_, peer)| active(peer)).map(|(id, peer)| (*id, peer))
    }

    /// Nothing happens on a connection: a link is watched among the others from now on.
    pub fn rest(&mut self, id: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let stays = matches!(
            peer.role,
            Role::LinkIn { .. } | Role::LinkOut { .. } | Role::AsksToRelay { .. } | Role::AskedToRelay { .. }
        );
        if stays && !peer.rests && peer.conn.interest() == PollFlags::IN {
            peer.rests = self.quiet.watch(id, peer.conn.stream());
        }
    }

    /// Those that rested and have something to hear.
    pub fn roused(&mut self) -> Vec<u64> {
        let roused = self.quiet.roused();
        for id in &roused {
            if let Some(peer) = self.peers.get_mut(id) {
                peer.rests = false;
            }
        }
        roused
    }

    /// Takes in a connection that has just been accepted.
    pub fn accept(&mut self, conn: Conn, place: BudgetShare) -> u64 {
        self.add(conn, Role::New, Some(place))
    }

    /// Connects to another service and says `first`.
    pub fn dial(&mut self, addr: SocketAddr, role: Role, first: &[Arc<[u8]>]) -> std::io::Result<u64> {
        let mut conn = Conn::dial(addr)?;
        first.iter().for_each(|bytes| conn.send(bytes.clone()));
        if matches!(role, Role::LinkOut { .. }) {
            conn.keep_alive()?;
        }
        Ok(self.add(conn, role, None))
    }

    /// The connection has shown that it belongs here: it may stay, and send what its part allows.
    pub fn admit(&mut self, id: u64, role: Role) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.conn.limit = FRAME_LIMIT;
            // One whose host has vanished would stay for ever; without it only that is not noticed.
            let _ = peer.conn.keep_alive();
            peer.role = role;
            peer.deadline = None;
            peer.place = None;
        }
    }

    /// The connection on which `of` has asked `rank` to relay, if there is one; it stays as long again.
    pub fn asks_to_relay(&mut self, of: CommRank, rank: u32) -> Option<u64> {
        let asks =
            |role: &Role| matches!(role, Role::AsksToRelay { of: who, rank: whom } if (*who, *whom) == (of, rank));
        let (id, peer) = self.peers.iter_mut().find(|(_, peer)| asks(&peer.role))?;
        peer.deadline = Some(Instant::now() + KEPT);
        Some(*id)
    }

    /// Sends a frame. Failures show when the connection is next polled.
    pub fn send(&mut self, id: u64, frame: &Frame) {
        self.send_all(std::iter::once(id), frame);
    }

    /// Sends one frame to many; it is encoded once.
    pub fn send_all(&mut self, ids: impl Iterator<Item = u64>, frame: &Frame) {
        let bytes: Arc<[u8]> = frame.encode().into();
        for id in ids {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.conn.send(bytes.clone());
                // An error is met again at the next poll.
                let _ = peer.conn.flush();
            }
        }
    }

    /// Closes a connection once what was sent on it is out.
    pub fn end(&mut self, id: u64) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.role = Role::Ending;
            peer.since = Instant::now();
            peer.deadline = Some(peer.since + PATIENCE);
        }
    }

    /// The connection has shown a secret of ours: it is no stranger's.
    pub fn trust(&mut self, id: u64) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.place = None;
        }
    }

    /// The strangers that may be ended for others: those that have their answer, and those that were listened to in vain
    /// up to `heard`, for long enough.
    pub fn dispensable(&self, heard: Instant) -> Vec<u64> {
        let strangers = self.peers.iter().filter(|(_, peer)| peer.place.is_some());
        let done = |peer: &ServicePeer| matches!(peer.role, Role::Ending) && peer.conn.flushed() && peer.since <= heard;
        strangers.filter(|(_, peer)| done(peer) || peer.since + GRACE <= heard).map(|(id, _)| *id).collect()
    }

    /// When the next stranger becomes dispensable.
    pub fn next_dispensable(&self) -> Option<Instant> {
        let strangers = self.peers.values().filter(|peer| peer.place.is_some());
        strangers.map(|peer| peer.since + GRACE).min()
    }

    /// Whether a connection still has something to say.
    pub fn is_sending(&self, id: u64) -> bool {
        self.peers.get(&id).is_some_and(|peer| !peer.conn.flushed())
    }

    /// Closes a connection now.
    pub fn close(&mut self, id: u64) {
        self.peers.remove(&id);
    }
}
