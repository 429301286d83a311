//! What a rank that has left still owes to its peers.
//!
//! A send may be complete before the peer has its bytes. A rank that leaves hands what is on its way over to its process,
//! which keeps it until nothing is owed any more, and lets the program go on.
#![forbid(unsafe_code)]

use crate::topo::Rank;
use std::fmt::Debug;

/// What a transport keeps of a rank that has left.
pub trait Owed: Send + Debug {
    /// To whom something is still owed, each once. Never waits; may send.
    fn creditors(&mut self) -> Vec<Rank>;
}

/// A rank that has left, with what is on its way.
#[derive(Debug)]
pub struct Departure {
    me: Rank,
    owed: Box<dyn Owed>,
}

impl Departure {
    /// What `me` owes; `None` when that is nothing.
    pub fn new(me: Rank, owed: Box<dyn Owed>) -> Option<Departure> {
        let mut departure = Departure { me, owed };
        (!departure.is_over()).then_some(departure)
    }

    /// Whether nothing is owed any more. Never waits.
    pub fn is_over(&mut self) -> bool {
        self.owed.creditors().is_empty()
    }

    /// Who leaves.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// To whom something is owed.
    pub fn creditors(&mut self) -> Vec<Rank> {
        self.owed.creditors()
    }
}
