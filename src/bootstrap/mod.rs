//! Bringing ranks together: the unique id, and the session in which the ranks of a communicator-to-be exchange what they
//! must know of each other.
//!
//! One process makes a [`UniqueId`], which opens a room on its [service](Service); every rank joins with the id
//! and exchanges by [`Exchange::allgather`]. Communicators made from others need no id: see [`Session::join_derived`].
#![forbid(unsafe_code)]

pub mod connection;
pub(crate) mod connections;
mod departures;
pub mod launcher;
pub mod protocol;
mod quiet;
pub(crate) mod reactor;
pub mod rendezvous;
mod rendezvous_table;
mod service;
mod session;
pub mod store;
mod unique_id;

#[cfg(test)]
mod service_tests;
#[cfg(test)]
mod strangers;
#[cfg(test)]
mod tests;

pub use protocol::{Credentials, Process};
pub use service::{meeting_interface, Service, ServiceAddr};
pub use session::{Derived, Session};
pub use unique_id::UniqueId;

pub use crate::transport::Exchange;
