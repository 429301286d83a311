//! Connections before they belong to anybody.
//!
//! Everybody can connect to a rank's port. A caller has to greet with the rank's secret first; until then it costs a
//! socket and a few bytes. There is a place for every connection that the peers may make, and some for strangers; when
//! all are taken, further callers wait in the system's queue, and a caller that has said nothing for a second gives way.
//! Nothing here waits for a caller.
#![forbid(unsafe_code)]

use super::frame::{same_secret, Greeting, Password};
use crate::admission::{self, BudgetShare, TRANSPORTS};
use crate::error::{Error, Result};
use crate::fork::{self, Unshared};
use crate::listen::listen;
use crate::transport::header::HEADER;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Places for callers beside those of the peers.
const SPARE_PLACES: usize = 64;
/// How long a caller may take to greet.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same while others wait for its place.
const PATIENCE_WHEN_FULL: Duration = Duration::from_secs(1);
/// How long no caller is let in when the process has no descriptor or place for one.
const PAUSE: Duration = Duration::from_millis(100);

struct Caller {
    number: u64,
    socket: Unshared<TcpStream>,
    from: SocketAddr,
    since: Instant,
    greeting: [u8; HEADER],
    have: usize,
    /// What it holds beyond the places of the peers.
    _place: Option<BudgetShare>,
}

/// What became of a caller that was heard.
enum Heard {
    /// It has not said everything yet.
    Waiting,
    /// It does not belong here.
    Stranger(String),
    /// It has greeted with the secret.
    Greeted(Greeting),
}

/// The listening socket and the callers at the listener.
pub struct Listener {
    /// One for each NIC.
    listeners: Vec<Unshared<TcpListener>>,
    secret: Password,
    callers: Vec<Caller>,
    /// Connections that the peers may make.
    expected: usize,
    next: u64,
    closed_until: Option<Instant>,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Listener").field("listeners", &self.listeners).field("callers", &self.callers.len()).finish()
    }
}

impl Caller {
    fn hear(&mut self, secret: &Password) -> Heard {
        match (&*self.socket).read(&mut self.greeting[self.have..]) {
            Ok(0) => return Heard::Stranger("it left without a greeting".into()),
            Ok(got) => self.have += got,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Heard::Stranger(error.to_string()),
        }
        if self.have < HEADER {
            return Heard::Waiting;
        }
        match Greeting::decode(&self.greeting) {
            Some(greeting) if same_secret(&greeting.secret, secret) => Heard::Greeted(greeting),
            Some(_) => Heard::Stranger("a wrong secret".into()),
            None => Heard::Stranger("not a greeting of ours".into()),
        }
    }
}

fn turn_away(from: SocketAddr, why: &str) {
    admission::refused("the TCP port", from, why);
}

impl Listener {
    /// Listens at a free port of this address, and of those of the others that allow it; callers need `secret`. `expected`:
    /// connections that the peers may make.
    pub fn open(
        address: IpAddr,
        further: impl Iterator<Item = IpAddr>,
        secret: Password,
        expected: usize,
    ) -> Result<Listener> {
        // A rank that is not in a call lets nobody in: its callers wait there. The system has its own limit.
        let backlog = i32::try_from((expected + SPARE_PLACES).max(1024)).unwrap_or(i32::MAX);
        let listen = |address: IpAddr| {
            listen(SocketAddr::new(address, 0), backlog)
                .map_err(|error| Error::System(format!("listening at address {address}: {error}")))
        };
        let mut listeners = vec![listen(address)?];
        listeners.extend(further.filter_map(|address| listen(address).ok()));
        Ok(Listener { listeners, secret, callers: Vec::new(), expected, next: 0, closed_until: None })
    }

    /// The listening sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &TcpListener> {
        self.listeners.iter().map(|listener| &**listener)
    }

    /// Where to connect to.
    pub fn addresses(&self) -> Result<Vec<SocketAddr>> {
        Ok(self.sockets().map(TcpListener::local_addr).collect::<std::io::Result<_>>()?)
    }

    /// When callers are to be let in again, if they are not now: then its socket need not be watched.
    pub fn closed_until(&self) -> Option<Instant> {
        self.closed_until
    }

    fn accept(&mut self) -> Option<(Unshared<TcpStream>, SocketAddr)> {
        for listener in &self.listeners {
            if !admission::may_accept(&**listener) {
                self.closed_until = Some(Instant::now() + PAUSE);
                return None;
            }
            let accepted = {
                let hold = fork::hold();
                listener.accept().map(|(socket, from)| (Unshared::new(socket, &hold), from))
            };
            let error = match accepted {
                Ok(accepted) => return Some(accepted),
                Err(error) => error,
            };
            let none = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted);
            if !none && error.kind() != ErrorKind::ConnectionAborted {
                // Out of descriptors, most likely: accepting at once again would only spin.
                self.closed_until = Some(Instant::now() + PAUSE);
            }
        }
        None
    }

    /// Drops callers that have been silent for longer than `patience`.
    fn lose_patience(&mut self, patience: Duration) {
        let now = Instant::now();
        while let Some(at) = self.callers.iter().position(|caller| now - caller.since >= patience) {
            let caller = self.callers.remove(at);
            turn_away(caller.from, "it did not greet");
        }
    }

    /// Lets callers in; returns their numbers and sockets, to be watched. All callers should have been heard before: one
    /// whose greeting has come is not silent.
    pub fn let_in(&mut self) -> Vec<(u64, &Unshared<TcpStream>)> {
        let first = self.next;
        self.closed_until = None;
        self.lose_patience(PATIENCE);
        let most = self.expected + SPARE_PLACES;
        if self.callers.len() >= most || TRANSPORTS.is_full() {
            self.lose_patience(PATIENCE_WHEN_FULL);
        }
        while self.callers.len() < most {
            let place = if self.callers.len() < self.expected { None } else { TRANSPORTS.take() };
            if place.is_none() && self.callers.len() >= self.expected {
                self.closed_until = Some(Instant::now() + PAUSE);
                break;
            }
            let Some((socket, from)) = self.accept() else { break };
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            let number = self.next;
            self.next += 1;
            let (since, greeting) = (Instant::now(), [0; HEADER]);
            self.callers.push(Caller { number, socket, from, since, greeting, have: 0, _place: place });
        }
        if self.callers.len() >= most {
            let oldest = self.callers.iter().map(|caller| caller.since).min();
            self.closed_until = oldest.map(|since| since + PATIENCE_WHEN_FULL);
        }
        let new = self.callers.iter().filter(|caller| caller.number >= first);
        new.map(|caller| (caller.number, &caller.socket)).collect()
    }

    /// Hears a caller; its greeting and socket once it has greeted with the secret.
    pub fn hear(&mut self, number: u64) -> Option<(Greeting, Unshared<TcpStream>)> {
        let at = self.callers.iter().position(|caller| caller.number == number)?;
        match self.callers[at].hear(&self.secret) {
            Heard::Waiting => None,
            Heard::Stranger(why) => {
                let caller = self.callers.remove(at);
                turn_away(caller.from, &why);
                None
            }
            Heard::Greeted(greeting) => Some((greeting, self.callers.remove(at).socket)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;
    use std::io::Write;

    fn open() -> Result<Listener> {
        Listener::open("127.0.0.1".parse().unwrap(), std::iter::empty(), [5; 16], 2)
    }

    fn call(listener: &mut Listener, bytes: &[u8]) -> Option<Greeting> {
        let mut socket = TcpStream::connect(listener.addresses().unwrap()[0]).unwrap();
        socket.write_all(bytes).unwrap();
        let limit = Instant::now() + Duration::from_secs(5);
        let mut numbers = Vec::new();
        while Instant::now() < limit {
            numbers.extend(listener.let_in().into_iter().map(|(number, _)| number));
            for &number in &numbers {
                if let Some((greeting, _)) = listener.hear(number) {
                    return Some(greeting);
                }
            }
            if !numbers.is_empty() && listener.callers.is_empty() {
                return None;
            }
            std::thread::yield_now();
        }
        None
    }

    #[test]
    fn only_callers_with_the_secret_come_in() {
        let mut listener = open().unwrap();
        let greeting = Greeting { from: Rank(3), index: 1, secret: [5; 16] };
        assert_eq!(call(&mut listener, &[0xff; HEADER]), None);
        assert_eq!(call(&mut listener, &Greeting { secret: [6; 16], ..greeting }.encode()), None);
        assert_eq!(call(&mut listener, &greeting.encode()), Some(greeting));
    }

    #[test]
    fn callers_that_greet_come_in_however_many_say_nothing() {
        let mut listener = open().unwrap();
        let silent: Vec<_> =
            (0..3 * SPARE_PLACES).map(|_| TcpStream::connect(listener.addresses().unwrap()[0]).unwrap()).collect();
        listener.let_in();
        assert!(listener.callers.len() <= listener.expected + SPARE_PLACES, "the rest waits");
        assert!(listener.closed_until().is_some());
        let greeting = Greeting { from: Rank(3), index: 1, secret: [5; 16] };
        assert_eq!(call(&mut listener, &greeting.encode()), Some(greeting));
        assert!(listener.callers.len() <= listener.expected + SPARE_PLACES);
        drop(silent);
    }

    #[test]
    fn callers_that_have_greeted_are_never_dropped_for_later_ones() {
        let mut listener = open().unwrap();
        let count = 2 * SPARE_PLACES;
        let callers: Vec<_> = (0..count)
            .map(|index| {
                let mut socket = TcpStream::connect(listener.addresses().unwrap()[0]).unwrap();
                let greeting = Greeting { from: Rank(index as u32), index: 0, secret: [5; 16] };
                socket.write_all(&greeting.encode()).unwrap();
                socket
            })
            .collect();
        let mut heard = 0;
        let limit = Instant::now() + Duration::from_secs(20);
        while heard < count && Instant::now() < limit {
            let new: Vec<u64> = listener.let_in().into_iter().map(|(number, _)| number).collect();
            heard += new.into_iter().filter(|&number| listener.hear(number).is_some()).count();
        }
        assert_eq!(heard, count);
        drop(callers);
    }
}
