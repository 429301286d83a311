//! Connections before they belong to anybody.
//!
//! Everybody can connect to a rank's port. A caller has to greet with the rank's secret first; until then it costs a
//! socket and a few bytes, for ten seconds at most, and there is room for a bounded number of callers, the oldest of
//! which gives way. Nothing here waits for a caller.
#![forbid(unsafe_code)]

use super::frame::{same_secret, Greeting, Secret};
use crate::error::{Error, Result};
use crate::fork::{self, Unshared};
use crate::log::Level;
use crate::transport::header::HEADER;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Callers that may wait at the door.
const MAX_CALLERS: usize = 256;
/// How long a caller may take to greet.
const PATIENCE: Duration = Duration::from_secs(10);

struct Caller {
    number: u64,
    socket: Unshared<TcpStream>,
    from: SocketAddr,
    since: Instant,
    greeting: [u8; HEADER],
    have: usize,
}

/// The listening socket and the callers at the door.
pub struct Door {
    listener: Unshared<TcpListener>,
    secret: Secret,
    callers: Vec<Caller>,
    next: u64,
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Door").field("listener", &self.listener).field("callers", &self.callers.len()).finish()
    }
}

fn turn_away(from: SocketAddr, why: &str) {
    crate::log::write(Level::Warn, &format!("a connection from {from} was dropped: {why}"));
}

impl Door {
    /// Listens at a free port of `address`; callers need `secret`.
    pub fn open(address: IpAddr, secret: Secret) -> Result<Door> {
        let open = || {
            let at = SocketAddr::new(address, 0);
            let kind = socket2::Type::STREAM.nonblocking().cloexec();
            let domain = socket2::Domain::for_address(at);
            let socket = {
                let hold = fork::hold();
                Unshared::new(socket2::Socket::new(domain, kind, Some(socket2::Protocol::TCP))?.into(), &hold)
            };
            let made = socket2::SockRef::from(&*socket);
            made.bind(&at.into())?;
            made.listen(1024)?;
            Ok(socket)
        };
        let listener = open()
            .map_err(|error: std::io::Error| Error::System(format!("listening at address {address}: {error}")))?;
        Ok(Door { listener, secret, callers: Vec::new(), next: 0 })
    }

    /// The listening socket.
    pub fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// Where to connect to.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    fn accept(&self) -> Option<(Unshared<TcpStream>, SocketAddr)> {
        let hold = fork::hold();
        let (socket, from) = self.listener.accept().ok()?;
        Some((Unshared::new(socket, &hold), from))
    }

    /// Lets callers in; returns their numbers and sockets, to be watched.
    pub fn let_in(&mut self) -> Vec<(u64, &Unshared<TcpStream>)> {
        let first = self.next;
        let now = Instant::now();
        self.callers.retain(|caller| {
            let patient = now - caller.since < PATIENCE;
            if !patient {
                turn_away(caller.from, "it did not greet");
            }
            patient
        });
        while let Some((socket, from)) = self.accept() {
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            if self.callers.len() == MAX_CALLERS {
                turn_away(self.callers.remove(0).from, "too many callers");
            }
            let number = self.next;
            self.next += 1;
            self.callers.push(Caller { number, socket, from, since: now, greeting: [0; HEADER], have: 0 });
        }
        let new = self.callers.iter().filter(|caller| caller.number >= first);
        new.map(|caller| (caller.number, &caller.socket)).collect()
    }

    /// Hears a caller; its greeting and socket once it has greeted with the secret.
    pub fn hear(&mut self, number: u64) -> Option<(Greeting, Unshared<TcpStream>)> {
        let at = self.callers.iter().position(|caller| caller.number == number)?;
        let caller = &mut self.callers[at];
        match (&*caller.socket).read(&mut caller.greeting[caller.have..]) {
            Ok(0) => {
                turn_away(self.callers.remove(at).from, "it left without a greeting");
                return None;
            }
            Ok(got) => caller.have += got,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return None,
            Err(error) => {
                turn_away(self.callers.remove(at).from, &error.to_string());
                return None;
            }
        }
        if caller.have < HEADER {
            return None;
        }
        let caller = self.callers.remove(at);
        match Greeting::decode(&caller.greeting) {
            Some(greeting) if same_secret(&greeting.secret, &self.secret) => Some((greeting, caller.socket)),
            Some(_) => {
                turn_away(caller.from, "a wrong secret");
                None
            }
            None => {
                turn_away(caller.from, "not a greeting of ours");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;
    use std::io::Write;

    fn call(door: &mut Door, bytes: &[u8]) -> Option<Greeting> {
        let mut socket = TcpStream::connect(door.address().unwrap()).unwrap();
        socket.write_all(bytes).unwrap();
        let limit = Instant::now() + Duration::from_secs(5);
        let mut numbers = Vec::new();
        while Instant::now() < limit {
            numbers.extend(door.let_in().into_iter().map(|(number, _)| number));
            for &number in &numbers {
                if let Some((greeting, _)) = door.hear(number) {
                    return Some(greeting);
                }
            }
            if !numbers.is_empty() && door.callers.is_empty() {
                return None;
            }
            std::thread::yield_now();
        }
        None
    }

    #[test]
    fn only_callers_with_the_secret_come_in() {
        let mut door = Door::open("127.0.0.1".parse().unwrap(), [5; 16]).unwrap();
        let greeting = Greeting { from: Rank(3), index: 1, secret: [5; 16] };
        assert_eq!(call(&mut door, &[0xff; HEADER]), None);
        assert_eq!(call(&mut door, &Greeting { secret: [6; 16], ..greeting }.encode()), None);
        assert_eq!(call(&mut door, &greeting.encode()), Some(greeting));
    }

    #[test]
    fn silent_callers_are_bounded_and_do_not_keep_others_out() {
        let mut door = Door::open("127.0.0.1".parse().unwrap(), [5; 16]).unwrap();
        let mut silent = Vec::new();
        for _ in 0..MAX_CALLERS + 20 {
            silent.push(TcpStream::connect(door.address().unwrap()).unwrap());
            door.let_in();
        }
        assert!(door.callers.len() <= MAX_CALLERS);
        let greeting = Greeting { from: Rank(3), index: 1, secret: [5; 16] };
        assert_eq!(call(&mut door, &greeting.encode()), Some(greeting));
    }
}
