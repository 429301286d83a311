//! What a rank that has left still owes to its peers.
//!
//! A send is complete when the system has its bytes; the peer's system has them later, and only then can nothing happen to
//! them any more. A rank that leaves hands its connections over to its process, which keeps them until the peers' systems
//! have everything or are known to want nothing, and lets the program go on.
#![forbid(unsafe_code)]

use super::accept::Listener;
use super::connection::Connection;
use super::peer::TcpPeer;
use crate::topo::Rank;

/// Connections with bytes on their way.
#[derive(Debug)]
pub struct Departure {
    me: Rank,
    links: Vec<(Rank, Connection)>,
    /// Held open meanwhile: a peer that finds them closed may take it that nothing more will come.
    _listener: Listener,
    _peers: Vec<TcpPeer>,
}

impl Departure {
    /// What `me` owes on its connections; `None` when that is nothing.
    pub fn new(me: Rank, listener: Listener, mut peers: Vec<TcpPeer>) -> Option<Departure> {
        let links = peers.iter_mut().flat_map(TcpPeer::take_output).collect();
        let mut departure = Departure { me, links, _listener: listener, _peers: peers };
        (!departure.is_over()).then_some(departure)
    }

    /// Whether nothing is owed any more. Never waits.
    pub fn is_over(&mut self) -> bool {
        self.links.retain_mut(|(_, connection)| {
            // Messages of the program are complete, so only frames of our own can be in the queue.
            connection.flush(|_| None, |_, _| {}, &mut Vec::new());
            connection.hear_end();
            connection.undelivered().is_some_and(|bytes| bytes > 0)
        });
        self.links.is_empty()
    }

    /// Who leaves.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// To whom something is owed.
    pub fn creditors(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.links.iter().map(|(rank, _)| *rank).collect();
        ranks.dedup();
        ranks
    }
}
