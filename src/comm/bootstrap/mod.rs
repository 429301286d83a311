//! Bringing ranks together: the unique id, and the session in which the ranks of a communicator-to-be exchange what they
//! must know of each other.
//!
//! One process makes a [`UniqueId`], which opens a room on its [service](super::service); every rank joins with the id
//! and exchanges by [`Exchange::allgather`]. Communicators made from others need no id: see [`Session::join_derived`].
#![forbid(unsafe_code)]

mod id;
mod session;

#[cfg(test)]
mod tests;

pub use id::UniqueId;
pub use session::{Derived, Session};

pub use crate::transport::Exchange;
