//! Who is still there: the links between the ranks of each communicator, and the word that goes round when one dies.
//!
//! Every rank keeps a connection to the next rank that lives in another process. When such a connection ends without
//! a goodbye, that process is dead; whoever sees it tells the services of all ranks, each over a connection of its
//! own, so the word needs no rank in between. What the dead rank has completed stands: the word is a [`Loss`], and not yet
//! a failure. A rank that leaves in good order says goodbye on both its links and names
//! everybody it knows to have left, and its predecessor links to the next that remains.
#![forbid(unsafe_code)]

use super::diagnosis::{calls_nothing, differs};
use super::status::{Loss, RankStatus, RelayRequest, SENDING};
use super::CallSummary;
use crate::bootstrap::connections::{CommRank, Connections, Role};
use crate::bootstrap::protocol::{Answer, Credentials, Frame, Process};
use crate::bootstrap::rendezvous::name_ranks;
use crate::bootstrap::ServiceAddr;
use crate::error::Error;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many communicators that are gone are still remembered, so that a late question gets its answer.
const REMEMBERED: usize = 4096;
/// How many words about failed communicators are kept for ranks that start late.
const KEPT_WORDS: usize = 64;
/// How many services are told at the same time.
const MESSENGERS: usize = 128;
/// How often a successor that does not answer is tried again before it counts as dead.
const ATTEMPTS: u32 = 24;

/// What starts the watch over one rank.
pub struct Watch {
    /// The communicator.
    pub comm: Credentials,
    /// Our rank in it.
    pub me: u32,
    /// The services of all its ranks.
    pub members: Vec<ServiceAddr>,
    /// Where failures are put and questions are answered from.
    pub status: Arc<RankStatus>,
    /// Hears when both links stand.
    pub ready: Sender<()>,
    /// How long a rank that is asked may take to answer before it counts as lost; none where it never does.
    pub mute_after: Option<Duration>,
}

struct Entry {
    watch: Watch,
    departed: BTreeSet<u32>,
    /// Those with whom a link has ended without a goodbye.
    dead: BTreeSet<u32>,
    /// Since when ranks that have been asked have not answered, and how often this one had gone on by then.
    unanswered: HashMap<u32, (Instant, u64)>,
    link: Option<u64>,
    linked: bool,
    expects_predecessor: bool,
    retry_at: Option<Instant>,
    attempts: u32,
    /// Whether both links have stood.
    ready: bool,
    /// The losses that everybody has been told of.
    told: BTreeSet<u32>,
}

/// The watched ranks of this process.
#[derive(Default)]
pub struct FailureDetector {
    here: Option<ServiceAddr>,
    entries: HashMap<CommRank, Entry>,
    past: HashSet<CommRank>,
    past_order: VecDeque<CommRank>,
    words: VecDeque<(Credentials, Loss)>,
    errands: VecDeque<(SocketAddr, Arc<[u8]>)>,
    messengers: HashSet<u64>,
}

impl Entry {
    fn successor(&self) -> Option<u32> {
        let count = self.watch.members.len() as u32;
        let after = (1..count).map(|distance| (self.watch.me + distance) % count);
        after.into_iter().find(|rank| !self.departed.contains(rank) && !self.dead.contains(rank))
    }

    /// When the first of those who have been asked is late.
    fn mute_at(&self) -> Option<Instant> {
        let limit = self.watch.mute_after?;
        self.unanswered.values().min().map(|&(since, _)| since + limit)
    }

    fn name(&self, rank: u32, process: Option<&Process>) -> String {
        let addr = self.watch.members[rank as usize];
        let same: Vec<u32> =
            (0..self.watch.members.len() as u32).filter(|&other| self.watch.members[other as usize] == addr).collect();
        let place = process.map_or_else(|| addr.0.to_string(), Process::to_string);
        format!("{} ({place})", name_ranks(&same))
    }

    fn check_ready(&mut self) {
        if self.linked && !self.expects_predecessor {
            self.ready = true;
            // The one who waits may have given up.
            let _ = self.watch.ready.send(());
        }
    }
}

impl FailureDetector {
    /// A ring of the service at this address.
    pub fn new(here: ServiceAddr) -> FailureDetector {
        FailureDetector { here: Some(here), ..FailureDetector::default() }
    }

    /// Whether some watched communicator has this secret.
    pub fn knows(&self, secret: &[u8; 16]) -> bool {
        self.entries.values().any(|entry| entry.watch.comm.secret_is(secret))
    }

    /// Begins to watch over a rank.
    pub fn start(&mut self, net: &mut Connections, watch: Watch) {
        let of = (watch.comm.key, watch.me);
        let count = watch.members.len();
        let previous = (watch.me as usize + count - 1) % count;
        let entry = Entry {
            expects_predecessor: Some(watch.members[previous]) != self.here,
            departed: BTreeSet::new(),
            dead: BTreeSet::new(),
            unanswered: HashMap::new(),
            link: None,
            linked: false,
            retry_at: None,
            attempts: 0,
            ready: false,
            told: BTreeSet::new(),
            watch,
        };
        let early = self.words.iter().filter(|(comm, _)| *comm == entry.watch.comm);
        early.for_each(|(_, loss)| entry.watch.status.lose(loss.clone()));
        self.past.remove(&of);
        self.entries.insert(of, entry);
        self.link(net, of);
    }

    /// Connects a rank to its successor, if that lives in another process.
    fn link(&mut self, net: &mut Connections, of: CommRank) {
        let Some(entry) = self.entries.get_mut(&of) else { return };
        entry.retry_at = None;
        let Some(to) = entry.successor().filter(|&to| Some(entry.watch.members[to as usize]) != self.here) else {
            entry.linked = true;
            entry.check_ready();
            return;
        };
        let hello = Frame::Link { comm: entry.watch.comm, from: of.1, to, process: Process::this() };
        let role = Role::LinkOut { of, to, process: None };
        match net.dial(entry.watch.members[to as usize].0, role, &[hello.encode().into()]) {
            Ok(id) => entry.link = Some(id),
            Err(error) => self.unlinked(net, of, to, Some(error.kind())),
        }
    }

    /// The successor has not answered: it may not be ready, have left, or be dead.
    fn unlinked(&mut self, net: &mut Connections, of: CommRank, to: u32, why: Option<ErrorKind>) {
        let Some(entry) = self.entries.get_mut(&of) else { return };
        entry.link = None;
        entry.attempts += 1;
        let refused = why == Some(ErrorKind::ConnectionRefused);
        if !refused && entry.attempts < ATTEMPTS {
            let pause = Duration::from_millis(5 << entry.attempts.min(8));
            entry.retry_at = Some(Instant::now() + pause);
        } else if !entry.departed.is_empty() {
            // Ranks are leaving: this one has been faster than the word that it does.
            entry.departed.insert(to);
            entry.attempts = 0;
            self.link(net, of);
        } else {
            let how = if refused { "is gone: its process has ended" } else { "cannot be reached" };
            let text = format!("{} {how}", entry.name(to, None));
            // A rank that has never answered has not made the communicator either.
            let from = if entry.ready { None } else { Some(0) };
            self.died(of, to, from, &text);
            self.link_past(net, of, to);
        }
    }

    /// A rank introduces itself as our predecessor. `false`: with a wrong secret.
    pub fn welcome(&mut self, net: &mut Connections, id: u64, frame: (Credentials, u32, u32, Process)) -> bool {
        let (comm, from, to, process) = frame;
        let of = (comm.key, to);
        match self.entries.get_mut(&of) {
            Some(entry) if !entry.watch.comm.secret_is(&comm.secret) => return false,
            Some(entry) if (from as usize) < entry.watch.members.len() => {
                net.admit(id, Role::LinkIn { of, from, process });
                net.send(id, &Frame::Welcome(Process::this()));
                entry.expects_predecessor = false;
                entry.check_ready();
            }
            _ => {
                let left = self.past.contains(&of);
                net.send(id, &if left { Frame::Goodbye(vec![to]) } else { Frame::Unknown });
                net.end(id);
            }
        }
        true
    }

    /// Something was said on a link.
    pub fn hear(&mut self, net: &mut Connections, id: u64, role: Role, frame: Frame) {
        if let Role::Asked { of, rank, .. } = role {
            self.entries.get_mut(&of).map(|entry| entry.unanswered.remove(&rank));
        }
        match (role, frame) {
            (Role::LinkOut { of, to, .. }, Frame::Welcome(process)) => {
                net.admit(id, Role::LinkOut { of, to, process: Some(process) });
                if let Some(entry) = self.entries.get_mut(&of) {
                    entry.linked = true;
                    entry.attempts = 0;
                    entry.check_ready();
                }
            }
            (Role::LinkOut { of, to, .. }, Frame::Goodbye(departed)) => {
                net.close(id);
                if let Some(entry) = self.entries.get_mut(&of) {
                    entry.link = None;
                    entry.attempts = 0;
                    entry.departed.extend(departed);
                    entry.departed.insert(to);
                }
                self.link(net, of);
            }
            (Role::LinkOut { of, to, .. }, Frame::Unknown) => {
                net.close(id);
                self.unlinked(net, of, to, None);
            }
            (Role::LinkIn { of, .. }, Frame::Goodbye(departed)) => {
                net.end(id);
                if let Some(entry) = self.entries.get_mut(&of) {
                    entry.departed.extend(departed);
                }
            }
            (Role::Asked { of, rank, .. }, Frame::Answer(Answer { left: true, .. })) => {
                net.end(id);
                self.left(of, rank, "");
            }
            (Role::Asked { of, rank, number }, Frame::Answer(Answer { call: Some(theirs), exchanges, .. })) => {
                net.end(id);
                self.heard_call(of, rank, number, (theirs, exchanges));
            }
            (Role::Asked { of, rank, number }, Frame::Answer(answer)) => {
                if let Some(empty) = answer.empty_at(number) {
                    self.heard_empty(of, (rank, empty), number);
                }
            }
            _ => {}
        }
    }

    /// A rank gets no further: asks those it waits for what they have called as the operation it is in. Whoever has not
    /// called it yet is merely late, and whoever does not answer is found by other means. With the operation's number is how often the rank
    /// had gone on when it asked.
    pub fn compare(&mut self, net: &mut Connections, of: CommRank, others: &[u32], (number, resumed): (u64, u64)) {
        let Some(entry) = self.entries.get_mut(&of) else { return };
        let comm = entry.watch.comm;
        for &rank in others.iter().filter(|&&rank| rank != of.1) {
            let Some(addr) = entry.watch.members.get(rank as usize) else { continue };
            if entry.watch.mute_after.is_some() {
                // The oldest question counts; but not one before this rank went on.
                let asked = (Instant::now(), resumed);
                let kept = entry.unanswered.entry(rank).or_insert(asked);
                if kept.1 != asked.1 {
                    *kept = asked;
                }
            }
            let question = Frame::Query { comm, rank, number, from: of.1 }.encode().into();
            if let Err(error) = net.dial(addr.0, Role::Asked { of, rank, number }, &[question]) {
                crate::info!("asking rank {rank}: {error}");
            }
        }
    }

    /// A rank that is waited for has called a collective of no elements in the place of an operation. Where this one has not that is
    /// told, and no failure: it is nothing to do, and the operation may yet come.
    fn heard_empty(&self, of: CommRank, theirs: (u32, CallSummary), number: u64) {
        let Some(entry) = self.entries.get(&of) else { return };
        let status = &entry.watch.status;
        let is_ours = status.empty().is_some_and(|(after, _)| after + 1 == number);
        if let Some(ours) = status.call(number).filter(|_| !is_ours && status.begun() == number) {
            crate::log::warn(&calls_nothing(number, (of.1, ours), theirs));
        }
    }

    /// A rank that is waited for does nothing more. It need not have failed: others are not told. What happened to another
    /// one before is probably why.
    fn left(&self, of: CommRank, rank: u32, how: &str) {
        let Some(entry) = self.entries.get(&of) else { return };
        let losses = entry.watch.status.losses();
        let earlier = losses.first().filter(|(_, loss)| loss.rank != rank);
        let why = earlier.map_or(String::new(), |(_, loss)| format!("; before that, {}", loss.error.text()));
        let error = Error::Remote(format!("rank {rank} has left the communicator{how}{why}"));
        entry.watch.status.lose(Loss { rank, from: None, is_link: false, error });
    }

    fn heard_call(
        &mut self,
        of: CommRank,
        rank: u32,
        number: u64,
        (theirs, exchanges): (CallSummary, Option<[bool; 2]>),
    ) {
        let Some(status) = self.entries.get(&of).map(|entry| entry.watch.status.clone()) else { return };
        let Some(ours) = status.call(number) else { return };
        if number == SENDING {
            // Neither is wrong: another thread of theirs may come to receive.
            if (ours.receiver(), theirs.receiver()) == (Some(rank), Some(of.1)) && status.tells_sending() {
                let me = of.1;
                let text = format!(
                    "rank {me} waits in a {ours}, and rank {rank} in a {theirs}: neither receives. Messages in both \
                     directions belong into one group (ncclGroupStart, ncclGroupEnd)"
                );
                crate::log::write(crate::log::Level::Warn, &text);
            }
        } else if ours != theirs {
            self.tell_differing(of, number, differs(number, (of.1, ours), (rank, theirs)));
        } else if let (Some([sends, expects]), Some([has, awaits])) = (status.exchanges(number, rank), exchanges) {
            let me = of.1;
            let what = format!("operation {number} is not the same on all ranks, {ours}:");
            if expects && !has {
                let text = format!("{what} rank {me} expects elements of rank {rank}, which has none for it");
                self.tell_differing(of, number, text);
            } else if sends && !awaits {
                let text = format!("{what} rank {me} has elements for rank {rank}, which expects none of it");
                self.tell_differing(of, number, text);
            }
        }
    }

    /// Ranks have called different things: tells all.
    fn tell_differing(&mut self, of: CommRank, number: u64, text: String) {
        let error = Error::InvalidUsage(text);
        crate::info!("{error}");
        self.tell(of, &Loss { rank: of.1, from: Some(number), is_link: false, error }, None, None);
    }

    /// A link has ended without a goodbye.
    pub fn gone(&mut self, net: &mut Connections, role: Role, why: Option<ErrorKind>) {
        let is_successor = matches!(role, Role::LinkOut { .. });
        let (of, rank, process) = match role {
            Role::LinkOut { of, to, process: None } => return self.unlinked(net, of, to, why),
            Role::LinkOut { of, to, process: Some(process) } => (of, to, process),
            Role::LinkIn { of, from, process } => (of, from, process),
            Role::Asked { of, rank, .. } if why == Some(ErrorKind::ConnectionRefused) => {
                self.entries.get_mut(&of).map(|entry| entry.unanswered.remove(&rank));
                return self.left(of, rank, ": its process has ended");
            }
            _ => return,
        };
        let Some(entry) = self.entries.get_mut(&of) else { return };
        let lost =
            matches!(why, Some(ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable));
        let how = if lost { "is lost: its host does not answer any more" } else { "died: its connection ended" };
        let text = format!("{} {how}", entry.name(rank, Some(&process)));
        self.died(of, rank, None, &text);
        if is_successor {
            self.link_past(net, of, rank);
        }
    }

    /// Ranks that have not answered for too long are lost, and are told so, too: they may only have been stopped. Where this one was, as
    /// it shows by coming late, its question may not have gone out: they have as long again. Where it has got further meanwhile nobody is
    /// lost: a machine is busy.
    fn miss_mute(&mut self, heard: Instant) {
        let is_due = |entry: &Entry| entry.mute_at().is_some_and(|at| at <= heard);
        let late: Vec<CommRank> = self.entries.iter().filter(|(_, entry)| is_due(entry)).map(|(of, _)| *of).collect();
        for of in late {
            let Some(entry) = self.entries.get_mut(&of) else { continue };
            let limit = entry.watch.mute_after.unwrap_or_default();
            let was_stopped = |since: Instant| since + limit + limit / 4 < heard;
            let resumed = entry.watch.status.resumed();
            entry.unanswered.retain(|_, (_, asked)| *asked == resumed);
            entry.unanswered.values_mut().filter(|asked| was_stopped(asked.0)).for_each(|asked| asked.0 = heard);
            let is_mute = |since: Instant| since + limit <= heard;
            let text = |rank| format!("{} has not answered for {} ms", entry.name(rank, None), limit.as_millis());
            let unanswered = entry.unanswered.iter().filter(|(_, asked)| is_mute(asked.0));
            let mute: Vec<(u32, String)> = unanswered.map(|(&rank, _)| (rank, text(rank))).collect();
            entry.unanswered.retain(|_, (since, _)| !is_mute(*since));
            for (rank, text) in mute {
                crate::info!("{text}");
                self.tell(of, &Loss { rank, from: Some(0), is_link: false, error: Error::Remote(text) }, None, None);
            }
        }
    }

    /// The successor is dead: the next one is watched, so that those who are left miss each other too.
    fn link_past(&mut self, net: &mut Connections, of: CommRank, dead: u32) {
        if let Some(entry) = self.entries.get_mut(&of) {
            entry.dead.insert(dead);
            (entry.link, entry.attempts) = (None, 0);
            self.link(net, of);
        }
    }

    fn died(&mut self, of: CommRank, dead: u32, from: Option<u64>, text: &str) {
        let Some(entry) = self.entries.get(&of) else { return };
        let mut text = text.to_string();
        text.push_str(" without leaving the communicator");
        crate::info!("{text}");
        let gone = entry.watch.members[dead as usize];
        self.tell(of, &Loss { rank: dead, from, is_link: false, error: Error::Remote(text) }, Some(gone), None);
    }

    /// Tells everybody of a loss, but not the process that `gone` was, nor the rank `but`.
    fn tell(&mut self, of: CommRank, loss: &Loss, gone: Option<ServiceAddr>, but: Option<u32>) {
        let Some(entry) = self.entries.get_mut(&of) else { return };
        let comm = entry.watch.comm;
        if entry.told.insert(loss.rank) {
            let notice: Arc<[u8]> = Frame::Notice { comm, loss: loss.clone() }.encode().into();
            let others: HashSet<SocketAddr> = entry.watch.members.iter().map(|member| member.0).collect();
            let here = self.here.map(|here| here.0);
            let others =
                others.into_iter().filter(|&other| Some(other) != here && Some(other) != gone.map(|gone| gone.0));
            self.errands.extend(others.map(|other| (other, notice.clone())));
        }
        self.lose_here(comm, loss, but);
    }

    fn keep(&mut self, comm: Credentials, loss: &Loss) {
        if self.words.iter().any(|(known, told)| *known == comm && told.rank == loss.rank) {
            return;
        }
        if self.words.len() == KEPT_WORDS {
            self.words.pop_front();
        }
        self.words.push_back((comm, loss.clone()));
    }

    fn lose_here(&mut self, comm: Credentials, loss: &Loss, but: Option<u32>) {
        self.keep(comm, loss);
        let concerned = |entry: &&mut Entry| entry.watch.comm == comm && Some(entry.watch.me) != but;
        for entry in self.entries.values_mut().filter(concerned) {
            entry.watch.status.lose(loss.clone());
        }
    }

    /// A rank of this process reports what happened to it, and the first collective that cannot be completed.
    pub fn report(&mut self, of: CommRank, from: u64, error: &Error) {
        let is_link = self.entries.get(&of).is_some_and(|entry| entry.watch.status.has_lost_link());
        self.tell(of, &Loss { rank: of.1, from: Some(from), is_link, error: error.clone() }, None, Some(of.1));
    }

    /// Another service tells of a loss. `false`: with a wrong secret.
    pub fn notice(&mut self, comm: Credentials, loss: &Loss) -> bool {
        let mut known = self.entries.values().filter(|entry| entry.watch.comm.key == comm.key).peekable();
        if known.peek().is_none() {
            self.keep(comm, loss);
            return true;
        }
        if !known.all(|entry| entry.watch.comm.secret_is(&comm.secret)) {
            return false;
        }
        self.lose_here(comm, loss, None);
        true
    }

    /// Asks ranks that are waited for to relay an operation, each over a connection that stays for the next time: a new one takes a
    /// round trip more, while the links are full.
    pub fn ask_to_relay(&mut self, net: &mut Connections, of: CommRank, others: &[u32], request: RelayRequest) {
        let Some(entry) = self.entries.get(&of) else { return };
        let comm = entry.watch.comm;
        for &rank in others.iter().filter(|&&rank| rank != of.1) {
            let Some(addr) = entry.watch.members.get(rank as usize) else { continue };
            let asked = Frame::Relay { comm, rank, request };
            if let Some(id) = net.asks_to_relay(of, rank) {
                net.send(id, &asked);
            } else if let Err(error) = net.dial(addr.0, Role::AsksToRelay { of, rank }, &[asked.encode().into()]) {
                crate::info!("asking rank {rank} to relay: {error}");
            }
        }
    }

    /// A rank here is asked to relay. `false`: with a wrong secret.
    pub fn relay(&self, comm: Credentials, rank: u32, request: RelayRequest) -> bool {
        match self.entries.get(&(comm.key, rank)) {
            Some(entry) if !entry.watch.comm.secret_is(&comm.secret) => return false,
            Some(entry) => entry.watch.status.relay(request),
            None => {}
        }
        true
    }

    /// The answer to a question about a rank's operation of this number, which the rank `from` asks, or `None` for a wrong secret.
    pub fn answer(&self, comm: Credentials, rank: u32, (number, from): (u64, u32)) -> Option<Frame> {
        let of = (comm.key, rank);
        match self.entries.get(&of) {
            Some(entry) if !entry.watch.comm.secret_is(&comm.secret) => None,
            Some(entry) => Some(Frame::Answer(entry.watch.status.answer(number, from))),
            None if self.past.contains(&of) => Some(Frame::Answer(Answer { left: true, ..Answer::default() })),
            None => Some(Frame::Unknown),
        }
    }

    /// A rank leaves in good order. Returns the connections on which its goodbye is still under way.
    pub fn leave(&mut self, net: &mut Connections, of: CommRank) -> Vec<u64> {
        let Some(entry) = self.entries.remove(&of) else { return Vec::new() };
        if self.past.insert(of) {
            self.past_order.push_back(of);
        }
        if self.past_order.len() > REMEMBERED {
            self.past_order.pop_front().map(|oldest| self.past.remove(&oldest));
        }
        let mut departed = entry.departed;
        departed.insert(of.1);
        let ours = |role: &Role| match role {
            Role::LinkIn { of: other, .. } | Role::LinkOut { of: other, .. } => *other == of,
            _ => false,
        };
        let links: Vec<u64> = net.peers.iter().filter(|(_, peer)| ours(&peer.role)).map(|(id, _)| *id).collect();
        net.send_all(links.iter().copied(), &Frame::Goodbye(departed.into_iter().collect()));
        links.iter().for_each(|&id| net.end(id));
        let asks = |role: &Role| match role {
            Role::AsksToRelay { of: other, .. } | Role::AskedToRelay { of: other } => *other == of,
            _ => false,
        };
        net.peers.retain(|_, peer| !asks(&peer.role));
        let siblings: Vec<CommRank> = self.entries.keys().filter(|other| other.0 == of.0).copied().collect();
        for sibling in siblings {
            let Some(entry) = self.entries.get_mut(&sibling) else { continue };
            entry.departed.insert(of.1);
            if entry.link.is_none() && entry.retry_at.is_none() {
                self.link(net, sibling);
            }
        }
        links
    }

    /// Does what is due: tries links again, sends messengers, and misses those who have not answered. What was said until `heard` has
    /// been heard, which is less than `now` where this process was stopped.
    pub fn tick(&mut self, net: &mut Connections, now: Instant, heard: Instant) {
        let due = |entry: &Entry| entry.retry_at.is_some_and(|at| at <= now);
        let retries: Vec<CommRank> = self.entries.iter().filter(|(_, entry)| due(entry)).map(|(of, _)| *of).collect();
        retries.into_iter().for_each(|of| self.link(net, of));
        self.miss_mute(heard);
        self.messengers.retain(|id| net.peers.contains_key(id));
        while self.messengers.len() < MESSENGERS {
            let Some((addr, word)) = self.errands.pop_front() else { break };
            // A service that cannot be reached is one that has nobody to tell.
            if let Ok(id) = net.dial(addr, Role::Ending, &[word]) {
                self.messengers.insert(id);
            }
        }
    }

    /// When the next thing is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.entries.values().flat_map(|entry| [entry.retry_at, entry.mute_at()]).flatten().min()
    }

    /// Whether everybody who is to be told something has been.
    pub fn all_told(&self, net: &Connections) -> bool {
        self.errands.is_empty() && !self.messengers.iter().any(|id| net.is_sending(*id))
    }
}
