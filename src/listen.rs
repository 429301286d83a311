//! Sockets that listen.
#![forbid(unsafe_code)]

use crate::fork::{self, Unshared};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener};

/// Ports that the system gives out where it does not tell which.
const PORTS: (u16, u16) = (32768, 60999);

/// A socket that listens at `at` and does not block; where its port is 0, at a free one. `backlog`: callers that the system
/// keeps waiting, at most.
pub fn listen(at: SocketAddr, backlog: i32) -> Result<Unshared<TcpListener>> {
    match listen_at(at, backlog) {
        // The system gives out no port that a closed connection still has, although it may be listened at.
        Err(error) if at.port() == 0 && is_taken(&error) => {
            let mut tries = ports().map(|port| listen_at(SocketAddr::new(at.ip(), port), backlog));
            tries.find(|outcome| !outcome.as_ref().is_err_and(is_taken)).unwrap_or(Err(error))
        }
        outcome => outcome,
    }
}

fn is_taken(error: &Error) -> bool {
    error.kind() == ErrorKind::AddrInUse
}

fn listen_at(at: SocketAddr, backlog: i32) -> Result<Unshared<TcpListener>> {
    let kind = socket2::Type::STREAM.nonblocking().cloexec();
    let hold = fork::hold();
    let socket = socket2::Socket::new(socket2::Domain::for_address(at), kind, Some(socket2::Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(backlog)?;
    Ok(Unshared::new(socket.into(), &hold))
}

/// The ports that the system gives out, from a random one on.
fn ports() -> impl Iterator<Item = u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
    let (low, high) = words.next().zip(words.next()).filter(|(low, high)| low <= high).unwrap_or(PORTS);
    let number = usize::from(high - low) + 1;
    let first = RandomState::new().build_hasher().finish() as usize % number;
    (0..number).map(move |step| low + ((first + step) % number) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ports_are_tried_once() {
        let mut all: Vec<u16> = ports().collect();
        all.sort_unstable();
        all.dedup();
        assert!(!all.is_empty() && usize::from(all[all.len() - 1] - all[0]) + 1 == all.len());
    }
}
