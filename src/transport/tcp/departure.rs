//! The connections of a rank that has left.
//!
//! A send is complete when the system has its bytes; the peer's system has them later, and only then can nothing happen to
//! them any more. So the connections are kept until the peers' systems have everything or are known to want nothing.
#![forbid(unsafe_code)]

use super::accept::Listener;
use super::connection::Connection;
use super::peer::TcpPeer;
use crate::topo::Rank;
use crate::transport::departure::Owed;

/// Connections with bytes on their way.
#[derive(Debug)]
pub struct OpenConnections {
    links: Vec<(Rank, Connection)>,
    /// Held open meanwhile: a peer that finds them closed may take it that nothing more will come.
    _listener: Listener,
    _peers: Vec<TcpPeer>,
}

impl OpenConnections {
    /// The connections to these peers.
    pub fn new(listener: Listener, mut peers: Vec<TcpPeer>) -> OpenConnections {
        let links = peers.iter_mut().flat_map(TcpPeer::take_output).collect();
        OpenConnections { links, _listener: listener, _peers: peers }
    }
}

impl Owed for OpenConnections {
    fn creditors(&mut self) -> Vec<Rank> {
        self.links.retain_mut(|(_, connection)| {
            // Messages of the program are complete, so only frames of our own can be in the queue.
            connection.flush(|_| None, |_, _| {}, &mut Vec::new());
            connection.drain();
            connection.undelivered().is_some_and(|bytes| bytes > 0)
        });
        let mut ranks: Vec<Rank> = self.links.iter().map(|(rank, _)| *rank).collect();
        ranks.dedup();
        ranks
    }
}
