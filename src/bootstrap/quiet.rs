//! Connections on which mostly nothing happens, waited for as one descriptor.
//!
//! A process keeps two links for each of its communicators, and polling them one by one makes every turn of the service as
//! long as there are communicators. Each connection is watched until something happens on it, and then has to be given
//! again: a socket that lives on in a child of a bare `clone` cannot keep the service busy.
#![forbid(unsafe_code)]

use crate::process::above_standard;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::Timespec;
use std::net::TcpStream;
use std::os::fd::{BorrowedFd, OwnedFd};

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A set of connections, by number. Without a descriptor for it nothing is ever in it.
pub struct Quiet(Option<OwnedFd>);

impl Default for Quiet {
    fn default() -> Quiet {
        Quiet(epoll::create(CreateFlags::CLOEXEC).ok().map(above_standard))
    }
}

impl Quiet {
    /// Watches a connection once; whether that worked. A connection that is closed needs not be taken out.
    pub fn watch(&self, number: u64, connection: &TcpStream) -> bool {
        let Some(set) = &self.0 else { return false };
        let (number, flags) = (EventData::new_u64(number), EventFlags::IN | EventFlags::ONESHOT);
        match epoll::add(set, connection, number, flags) {
            Err(rustix::io::Errno::EXIST) => epoll::modify(set, connection, number, flags).is_ok(),
            added => added.is_ok(),
        }
    }

    /// What becomes readable when something happens on one of them.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    /// Some of those on which something has happened.
    pub fn roused(&self) -> Vec<u64> {
        let mut events = Vec::with_capacity(256);
        if let Some(set) = &self.0 {
            // What cannot be asked now is asked at the next turn.
            let _ = epoll::wait(set, rustix::buffer::spare_capacity(&mut events), Some(&NOW));
        }
        events.iter().map(|event: &epoll::Event| event.data.u64()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::connection::Conn;
    use super::super::connections::{Connections, Role};
    use crate::admission::SERVICE;
    use crate::fork::{hold, Unshared};
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn links_that_rest_are_not_polled_one_by_one_and_each_is_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut net = Connections::default();
        let mut others = Vec::new();
        for rank in 0..100 {
            others.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let accepted = Unshared::new(listener.accept().unwrap().0, &hold());
            let id = net.accept(Conn::accepted(accepted).unwrap(), SERVICE.take().unwrap());
            net.admit(id, Role::LinkOut { of: (1, 0), to: rank, process: None });
        }
        let stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = Unshared::new(listener.accept().unwrap().0, &hold());
        let new = net.accept(Conn::accepted(accepted).unwrap(), SERVICE.take().unwrap());
        let polled = |net: &Connections| net.polled().map(|(id, _)| id).collect::<Vec<u64>>();
        assert_eq!(polled(&net).len(), 101);
        polled(&net).into_iter().for_each(|id| net.rest(id));
        assert_eq!(polled(&net), [new], "what is no link is always polled");
        assert_eq!(net.roused(), [0; 0]);
        others[41].write_all(b"x").unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let heard = loop {
            match &net.roused()[..] {
                [] => assert!(std::time::Instant::now() < deadline, "nothing is heard"),
                roused => break roused.to_vec(),
            }
        };
        assert_eq!(heard, [42]);
        assert_eq!(polled(&net).len(), 2, "it is looked at again");
        net.rest(42);
        assert_eq!(net.roused(), [42], "what was not taken is told again");
        drop(stranger);
    }
}
