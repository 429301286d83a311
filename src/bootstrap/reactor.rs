//! The service's thread: one loop over all its sockets that never blocks on one of them.
#![forbid(unsafe_code)]

use super::connection::{until, Conn};
use super::connections::{CommRank, Connections, Role, ServicePeer};
use super::departures::Departures;
use super::protocol::{Credentials, Frame, Malformed};
use super::rendezvous_table::{Admittance, RendezvousTable};
use super::service::{listen, take_chore, FLUSH_LIMIT};
use super::ServiceAddr;
use crate::admission::{self, SERVICE};
use crate::error::{Error, Result};
use crate::fork::{self, Unshared};
use crate::health::failure_detector::{FailureDetector, Watch};
use crate::health::RelayRequest;
use crate::process::thread;
use crate::transport::Departure;
use rustix::event::{poll, PollFd, PollFlags};
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// How many connections are accepted before those that stand are heard again.
const ACCEPTS_A_TURN: usize = 64;
/// How long accepting pauses where descriptors are scarce.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest sleep: a safeguard, as everything that happens wakes the loop.
const NAP: Duration = Duration::from_secs(5);
/// How long a leaving rank waits for its goodbye to be on its way, and a root for its verdict to be heard.
const FAREWELL: Duration = Duration::from_secs(1);

/// What the process asks of its service.
pub enum ServiceCommand {
    /// Open a door for a unique id.
    Open(Credentials),
    /// Listen at a fixed address too, for one communicator.
    ListenAt(SocketAddr, Credentials, Sender<Result<()>>),
    /// Watch over a rank.
    Start(Watch),
    /// A rank reports a failure, and the first collective that cannot be completed.
    Report(CommRank, u64, Error),
    /// A rank gets no further and waits for these: do they call what it calls? With the operation's number is how often it had gone on before.
    Compare(CommRank, Vec<u32>, (u64, u64)),
    /// A rank waits for these to begin the operation of this number: they may relay it.
    Relay(CommRank, Vec<u32>, RelayRequest),
    /// A rank leaves in good order; the sender hears when the others can know.
    Leave(CommRank, Sender<()>),
    /// Keep what a rank that has left owes to others, until the time is over.
    Keep(Departure, Instant),
    /// The sender hears when nothing of that is left, and everything said to ranks that are coming together is sent.
    AwaitDepartures(Sender<()>),
    /// The sender hears when everybody who was told a last word has heard it and hung up.
    Settle(Sender<()>),
    /// The sender hears when the system has all that was said to ranks that are coming together, and these rooms are over.
    Flush(Vec<u128>, Sender<()>),
}

/// When a rank that leaves may go.
enum Until {
    /// All is sent on these connections, and everybody has left these rooms.
    Sent(Vec<u128>),
    /// That, and all losses have been told.
    Told,
    /// The others have hung up.
    Heard,
}

struct Farewell {
    deadline: Instant,
    links: Vec<u64>,
    until: Until,
    done: Sender<()>,
}

/// All the service's thread has.
pub struct Reactor {
    listener: Unshared<TcpListener>,
    fixed: Vec<(u128, SocketAddr, Unshared<TcpListener>)>,
    wake: UnixStream,
    commands: Receiver<ServiceCommand>,
    net: Connections,
    rendezvous_table: RendezvousTable,
    ring: FailureDetector,
    farewells: Vec<Farewell>,
    /// Which listener is asked first, so that callers of one do not keep out those of another.
    turn: usize,
    departures: Departures,
    accepting_from: Instant,
    /// All that was said before is in [`Reactor::serve`]'s hands.
    heard: Instant,
}

impl Reactor {
    /// A loop around a listener. A byte on `wake` makes it look at its commands.
    pub fn new(
        listener: Unshared<TcpListener>,
        here: ServiceAddr,
        wake: UnixStream,
        commands: Receiver<ServiceCommand>,
    ) -> Reactor {
        Reactor {
            listener,
            fixed: Vec::new(),
            wake,
            commands,
            net: Connections::default(),
            rendezvous_table: RendezvousTable::default(),
            ring: FailureDetector::new(here),
            farewells: Vec::new(),
            turn: 0,
            departures: Departures::default(),
            accepting_from: Instant::now(),
            heard: Instant::now(),
        }
    }

    /// Serves until the process's last handle is gone.
    pub fn run(mut self) {
        loop {
            let ready = self.sleep();
            if let Some(chore) = take_chore() {
                // Without a thread the interrupted call does it.
                let _ = thread("strata-chore").and_then(|thread| thread.spawn(chore));
            }
            // Commands go first: a connection may speak of what they open.
            if !self.obey() {
                return;
            }
            let (sockets, listeners) = ready;
            for (id, events) in sockets {
                self.serve(id, events);
            }
            if listeners {
                self.accept();
            }
            self.tick();
        }
    }

    /// Sleeps until something happens. Returns the ready connections, and whether a listener may be.
    fn sleep(&mut self) -> (Vec<(u64, PollFlags)>, bool) {
        let now = Instant::now();
        self.heard = now;
        let farewells = self.farewells.iter().map(|farewell| farewell.deadline);
        let deadlines = self.net.peers.values().filter_map(|peer| peer.deadline);
        let paused = Some(self.accepting_from).filter(|&from| from > now);
        let full = self.is_pressed(now);
        let freed = self.net.next_dispensable().filter(|_| full);
        let own = self.ring.next_due().into_iter().chain(self.departures.next_look()).chain(admission::sum_up_due());
        let next = deadlines.chain(farewells).chain(own).chain(paused).chain(freed).min();
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        if !full {
            fds.push(PollFd::new(&*self.listener, PollFlags::IN));
            fds.extend(self.fixed.iter().map(|(_, _, listener)| PollFd::new(&**listener, PollFlags::IN)));
        }
        let listeners = 1..fds.len();
        fds.extend(self.net.quiet().descriptor().map(|quiet| PollFd::from_borrowed_fd(quiet, PollFlags::IN)));
        let first = fds.len();
        let ids: Vec<u64> = self.net.polled().map(|(id, _)| id).collect();
        fds.extend(self.net.polled().map(|(_, peer)| PollFd::new(peer.conn.stream(), peer.conn.interest())));
        if let Err(error) = poll(&mut fds, Some(&until(next.unwrap_or(now + NAP), NAP))) {
            if error != rustix::io::Errno::INTR {
                crate::info!("the service cannot poll: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
            return (Vec::new(), false);
        }
        let callers = fds[listeners].iter().any(|fd| !fd.revents().is_empty());
        let polled: Vec<(u64, PollFlags)> = ids.into_iter().zip(fds[first..].iter().map(PollFd::revents)).collect();
        let (mut ready, silent): (Vec<_>, Vec<_>) = polled.into_iter().partition(|(_, events)| !events.is_empty());
        silent.into_iter().for_each(|(id, _)| self.net.rest(id));
        ready.extend(self.net.roused().into_iter().map(|id| (id, PollFlags::IN)));
        (ready, callers)
    }

    fn obey(&mut self) -> bool {
        let mut bytes = [0; 64];
        let mut open = true;
        loop {
            match self.wake.read(&mut bytes) {
                Ok(0) => {
                    open = false;
                    break;
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            match command {
                ServiceCommand::Open(credentials) => self.rendezvous_table.open(credentials, false),
                ServiceCommand::ListenAt(addr, credentials, reply) => {
                    // Who asked may have been cancelled.
                    let _ = reply.send(self.listen_at(addr, credentials));
                }
                ServiceCommand::Start(watch) => self.ring.start(&mut self.net, watch),
                ServiceCommand::Report(of, from, error) => self.ring.report(of, from, &error),
                ServiceCommand::Keep(departure, deadline) => self.departures.keep(departure, deadline),
                ServiceCommand::AwaitDepartures(done) => self.departures.wait(done),
                ServiceCommand::Compare(of, others, asked) => self.ring.compare(&mut self.net, of, &others, asked),
                ServiceCommand::Relay(of, others, request) => {
                    self.ring.ask_to_relay(&mut self.net, of, &others, request);
                }
                ServiceCommand::Leave(of, done) => {
                    let links = self.ring.leave(&mut self.net, of);
                    self.bid_farewell(links, Until::Told, done);
                }
                ServiceCommand::Settle(done) => {
                    let links = self.links_that(|role| matches!(role, Role::Ending));
                    self.bid_farewell(links, Until::Heard, done);
                }
                ServiceCommand::Flush(rooms, done) => {
                    let links = self.links_that(|role| matches!(role, Role::Member { .. }));
                    self.bid_farewell(links, Until::Sent(rooms), done);
                }
            }
        }
        open
    }

    fn links_that(&self, have: impl Fn(&Role) -> bool) -> Vec<u64> {
        self.net.peers.iter().filter(|(_, peer)| have(&peer.role)).map(|(id, _)| *id).collect()
    }

    fn bid_farewell(&mut self, links: Vec<u64>, until: Until, done: Sender<()>) {
        let limit = match until {
            Until::Sent(_) => FLUSH_LIMIT,
            Until::Told | Until::Heard => FAREWELL,
        };
        self.farewells.push(Farewell { deadline: Instant::now() + limit, links, until, done });
    }

    fn listen_at(&mut self, addr: SocketAddr, credentials: Credentials) -> Result<()> {
        if !self.fixed.iter().any(|(_, known, _)| *known == addr) {
            let listener = listen(addr)?;
            self.fixed.push((credentials.key, addr, listener));
        }
        self.rendezvous_table.open(credentials, true);
        Ok(())
    }

    /// Whether callers must wait: no place is free for one, or descriptors are scarce.
    fn is_pressed(&self, now: Instant) -> bool {
        self.accepting_from > now || SERVICE.is_full()
    }

    fn accept(&mut self) {
        let listeners: Vec<&Unshared<TcpListener>> =
            std::iter::once(&self.listener).chain(self.fixed.iter().map(|(_, _, listener)| listener)).collect();
        let share = (ACCEPTS_A_TURN / listeners.len()).max(1);
        self.turn = (self.turn + 1) % listeners.len();
        let mut accepted = Vec::new();
        for listener in listeners.iter().cycle().skip(self.turn).take(listeners.len()) {
            let most = accepted.len() + share;
            while accepted.len() < most {
                if !admission::may_accept(&***listener) {
                    self.accepting_from = Instant::now() + PAUSE;
                    break;
                }
                let Some(place) = SERVICE.take() else { break };
                let next = {
                    let hold = fork::hold();
                    listener.accept().map(|(stream, _)| Unshared::new(stream, &hold))
                };
                match next {
                    Ok(stream) => accepted.push((stream, place)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Err(error) => {
                        // Out of descriptors, most likely: accepting at once again would only spin.
                        crate::info!("the service cannot accept a connection: {error}");
                        self.accepting_from = Instant::now() + PAUSE;
                        break;
                    }
                }
            }
        }
        for (stream, place) in accepted {
            if let Ok(conn) = Conn::accepted(stream) {
                self.net.accept(conn, place);
            }
        }
    }

    fn serve(&mut self, id: u64, events: PollFlags) {
        let Some(peer) = self.net.peers.get_mut(&id) else { return };
        let mut broken = None;
        if events.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP) {
            broken = peer.conn.flush().err().map(|error| error.kind());
        }
        let open = match peer.conn.receive() {
            Ok(open) => open && broken.is_none(),
            Err(error) => {
                broken = broken.or(Some(error.kind()));
                false
            }
        };
        // Everything said before the end still counts: above all a goodbye.
        loop {
            let Some(peer) = self.net.peers.get_mut(&id) else { return };
            if matches!(peer.role, Role::Ending) {
                peer.conn.discard();
                break;
            }
            match peer.conn.next_frame() {
                Ok(Some(frame)) => self.frame(id, frame),
                Ok(None) => break,
                Err(Malformed(why)) => return self.refuse(id, why),
            }
        }
        if !open {
            self.lost(id, broken);
        }
    }

    fn frame(&mut self, id: u64, frame: Frame) {
        let Some(peer) = self.net.peers.get(&id) else { return };
        match peer.role.clone() {
            Role::New => self.first_frame(id, frame),
            Role::Member { room, member } => self.rendezvous_table.hear(&mut self.net, room, member, frame),
            role @ (Role::LinkIn { .. } | Role::LinkOut { .. } | Role::Asked { .. }) => {
                self.ring.hear(&mut self.net, id, role, frame)
            }
            Role::AskedToRelay { .. } => {
                let Frame::Relay { comm, rank, request } = frame else {
                    return self.refuse(id, "it asks for more than a relay");
                };
                if !self.ring.relay(comm, rank, request) {
                    self.refuse(id, "its secret is wrong");
                }
            }
            Role::AsksToRelay { .. } => self.refuse(id, "nobody answers a request to relay"),
            Role::Ending => {}
        }
    }

    fn first_frame(&mut self, id: u64, frame: Frame) {
        let welcome = match frame {
            Frame::Join(join) => {
                let trusted = self.ring.knows(&join.room.secret);
                !matches!(self.rendezvous_table.join(&mut self.net, id, &join, trusted), Admittance::Intruder)
            }
            Frame::Link { comm, from, to, process } => self.ring.welcome(&mut self.net, id, (comm, from, to, process)),
            Frame::Query { comm, rank, number, from } => match self.ring.answer(comm, rank, (number, from)) {
                Some(answer) => {
                    // What is told of those who are gone needs no secret.
                    if matches!(&answer, Frame::Answer(answer) if !answer.left) {
                        self.net.trust(id);
                    }
                    self.net.send(id, &answer);
                    self.net.end(id);
                    true
                }
                None => false,
            },
            Frame::Notice { comm, loss } => {
                let welcome = self.ring.notice(comm, &loss);
                self.net.end(id);
                welcome
            }
            Frame::Relay { comm, rank, request } => {
                let welcome = self.ring.relay(comm, rank, request);
                // Only who has shown the secret of a communicator that is here may stay.
                match welcome && self.ring.knows(&comm.secret) {
                    true => self.net.admit(id, Role::AskedToRelay { of: (comm.key, rank) }),
                    false => self.net.end(id),
                }
                welcome
            }
            _ => return self.refuse(id, "it does not begin with a greeting"),
        };
        if !welcome {
            self.refuse(id, "its secret is wrong");
        }
    }

    /// Closes a connection that does not belong here.
    fn refuse(&mut self, id: u64, why: &str) {
        let Some(peer) = self.net.peers.remove(&id) else { return };
        if matches!(peer.role, Role::New | Role::Ending) {
            let from = peer.conn.stream().peer_addr().map_or("somewhere".to_string(), |addr| addr.to_string());
            admission::refused("the bootstrap port", from, why);
            return;
        }
        self.ended(peer.role, Some(ErrorKind::InvalidData));
    }

    fn lost(&mut self, id: u64, why: Option<ErrorKind>) {
        if let Some(peer) = self.net.peers.remove(&id) {
            self.ended(peer.role, why);
        }
    }

    fn ended(&mut self, role: Role, why: Option<ErrorKind>) {
        match role {
            Role::Member { room, member } => self.rendezvous_table.gone(&mut self.net, room, member),
            role => self.ring.gone(&mut self.net, role, why),
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        for peer in self.net.peers.values_mut().filter(|peer| matches!(peer.role, Role::Ending)) {
            if peer.conn.flushed() {
                peer.conn.shut();
            }
        }
        if self.is_pressed(now) {
            for id in self.net.dispensable(self.heard) {
                match self.net.peers.get(&id).map(|peer| &peer.role) {
                    Some(Role::New) => self.refuse(id, "it says nothing, and others wait"),
                    _ => self.net.close(id),
                }
            }
        }
        admission::sum_up(now);
        // Not by the clock alone: a process that was stopped has not heard yet what was said meanwhile.
        let late = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= self.heard);
        let overdue: Vec<u64> =
            self.net.peers.iter().filter(|(_, peer)| late(peer.deadline)).map(|(id, _)| *id).collect();
        for id in overdue {
            match self.net.peers.get(&id).map(|peer| &peer.role) {
                Some(Role::New) => self.refuse(id, "it said nothing in time"),
                _ => self.lost(id, Some(ErrorKind::TimedOut)),
            }
        }
        for key in std::mem::take(&mut self.rendezvous_table.served) {
            self.fixed.retain(|(served, _, _)| *served != key);
        }
        self.ring.tick(&mut self.net, now, self.heard);
        // Strangers are not waited for.
        let owes = |peer: &ServicePeer| peer.place.is_none() && peer.conn.has_output();
        let all_told = self.ring.all_told(&self.net);
        self.departures.look(now, all_told && !self.net.peers.values().any(owes));
        let (net, rendezvous_table) = (&self.net, &self.rendezvous_table);
        self.farewells.retain(|farewell| {
            let is_sending = || farewell.links.iter().any(|id| net.is_sending(*id));
            let under_way = match &farewell.until {
                Until::Sent(rooms) => is_sending() || rooms.iter().any(|room| rendezvous_table.has_room(*room)),
                Until::Told => !all_told || is_sending(),
                Until::Heard => farewell.links.iter().any(|id| net.peers.contains_key(id)),
            };
            if under_way && farewell.deadline > now {
                return true;
            }
            // The rank may have stopped waiting.
            let _ = farewell.done.send(());
            false
        });
    }
}
