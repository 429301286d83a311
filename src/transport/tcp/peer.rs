//! One peer on another node: the connections both ways and the messages between it and us.
//!
//! Headers and small messages keep to one connection, so they stay in order: at first to the rank's own first one. Once
//! the rank that is the higher of the two has something to say and finds the lower one's, it says so on both ([`FrameKind::Switch`])
//! and goes on there: then one connection carries both ways, and the acknowledgements of the system travel with the
//! answers instead of alone. A large message is announced
//! there; when its receive has been posted the receiver grants it in the same way, and the bytes come in
//! stripes over whichever connections have room, or in frames that are [coded](crate::transport::lossless). So a connection carries
//! nothing that its reader has no place for, and no stream blocks another.
//!
//! A message is sent when the system has all its bytes. The system then delivers them whatever becomes of this rank, and the
//! receiver finds them before the connection's end; only a process that is killed with bytes of the peer unread takes back
//! what has not arrived.
#![forbid(unsafe_code)]

use super::connection::{Body, Connection, Ended, Inbound, BUFFER};
use super::frame::Password;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::Region;
use crate::topo::Rank;
use crate::transport::header::{FrameHeader, FrameKind, HEADER};
use crate::transport::lossless::codec::MAX_CODED;
use crate::transport::lossless::gauge::Gauge;
use crate::transport::lossless::{CodedPart, Lossless};
use crate::transport::matching::{Fetch, Matching, Outgoing, Received};
use crate::transport::{Envelope, Sink};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Messages of at most this many bytes travel with their header.
pub const SMALL: usize = 32 << 10;
/// Bytes of a large message in one frame, unless it has fewer.
const LEAST_STRIPE: usize = 256 << 10;
/// A multiple of the size of every type.
const WHOLE: usize = 64;
/// Bytes of a large message in one frame at most.
const MAX_STRIPE: usize = 1 << 20;
/// Bytes that are coded before others get their turn.
const CODED_TURN: usize = 256 << 10;
/// Bytes read from one connection before others get their turn.
const TURN: usize = 1 << 20;
/// Small messages stop when so many bytes wait to be written.
const MAX_QUEUED: usize = 1 << 20;
/// A frame that is taken whole is read ahead whole.
const _: () = assert!(HEADER + MAX_CODED <= BUFFER);
/// Messages with a number at a time, which is no limit in practice.
const MAX_NUMBERED: usize = 1 << 20;
/// How long a peer that listens no more is still expected to be heard: connections that it made before may yet come in.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// The same for a peer of which no connection has come in at all.
const FIRST_WORDS: Duration = Duration::from_secs(1);

/// A rank may always make so many connections: one for both ways, and one for answers.
pub const MADE_AT_LEAST: u8 = 2;

/// Bytes of one frame of a message that is shared out among so many connections: whole elements of any type, since a receiver
/// reduces no part of one.
fn stripe(bytes: usize, shares: usize) -> usize {
    bytes.div_ceil(shares).next_multiple_of(WHOLE).clamp(LEAST_STRIPE, MAX_STRIPE)
}

/// Gives a connection the next frame of a granted message: a coded part, or at most so many bytes of it as they are. Its bytes; none
/// where all have begun. `turn` has the bytes that are still coded before others get their turn. Not in its callers' frames, which
/// are on the stack of all that is written.
#[inline(never)]
fn give_frame(
    (lossless, gauge): (&mut Lossless, &mut Gauge),
    (id, message): (u64, &mut Outgoing),
    connection: &mut Connection,
    most: usize,
    turn: &mut usize,
) -> Option<usize> {
    let about = |kind| FrameHeader::about(kind, id);
    if let Some(CodedPart { offset, len, coded }) = lossless.code(gauge, id, message, &mut connection.coded) {
        *turn = turn.saturating_sub(len);
        message.part_begun(len);
        gauge.gave(coded);
        let (bytes, body, nonce) = (offset as u64, coded as u64, len as u64);
        let head = FrameHeader { bytes, body, nonce, ..about(FrameKind::Coded) };
        connection.push(head.encode(), Body::Coded { id, original: len, len: coded });
        return Some(coded);
    }
    let (offset, len) = message.next_part(most)?;
    message.part_begun(len);
    gauge.gave(len);
    gauge.passed(len);
    let head = FrameHeader { bytes: offset as u64, body: len as u64, ..about(FrameKind::Data) };
    connection.push(head.encode(), Body::Part { id, offset, len });
    Some(len)
}

/// Who made a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// This rank.
    Out,
    /// The peer.
    In,
}

/// A connection and its number among those from the rank that made it.
#[derive(Debug)]
pub struct TcpLink {
    /// Who made it.
    pub way: Way,
    /// The number.
    pub index: u8,
    /// The connection.
    pub connection: Connection,
}

/// The connections that large messages are shared out among, where they are long enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// By each NIC, the rank's own first.
    pub own: usize,
    /// By how many NICs beside the rank's own.
    pub further: usize,
}

impl Shares {
    /// The numbers of connections by the rank's own NIC.
    fn numbers(self) -> usize {
        self.own.max(MADE_AT_LEAST.into())
    }
}

/// A peer.
#[derive(Debug)]
pub struct TcpPeer {
    /// Its rank.
    pub rank: Rank,
    /// Where it listens: at its own NIC, and at the others of its node.
    pub addresses: Vec<SocketAddr>,
    /// What it wants to hear first.
    pub secret: Password,
    /// What its large messages may go by.
    shares: Shares,
    /// Whether large messages go by all NICs.
    is_wide: bool,
    /// The connections.
    pub links: Vec<TcpLink>,
    /// Whether our first connection is the one for both ways: our rank is the lower one.
    is_first: bool,
    /// The connection that our headers and small messages go on.
    control: Option<usize>,
    /// The connection that the last header or small message came on.
    speaks: Option<usize>,
    /// Whether all that the peer says on its own first connection has come.
    has_switched: bool,
    matching: Matching,
    /// Small messages of the peer that are still to be acknowledged.
    acks: Vec<u64>,
    /// Whether they wait for no message of ours.
    acks_are_due: bool,
    /// Whether a message of ours has left since one of the peer's was to be acknowledged.
    has_spoken: bool,
    /// Since when it is known to send nothing more although something is expected.
    silent_since: Option<Instant>,
    /// Times that its connections were written.
    writes: u64,
    /// The NIC whose turn it is among those with as little on their way.
    next_nic: usize,
    /// Whether a wide message waits until less of it is on its way.
    waits_for_room: bool,
    /// Whether its long messages are worth coding.
    gauge: Gauge,
    /// Whether more could be coded and written at once.
    pub is_paused: bool,
    /// Whether it is among those that are [awaited](Self::awaits).
    pub is_awaited: bool,
}

impl TcpPeer {
    /// A peer of rank `me` to which there is no connection yet. It has one address or more.
    pub fn new(me: Rank, rank: Rank, addresses: Vec<SocketAddr>, secret: Password, shares: Shares) -> TcpPeer {
        TcpPeer {
            rank,
            addresses,
            secret,
            shares,
            is_wide: false,
            links: Vec::new(),
            is_first: me < rank,
            control: None,
            speaks: None,
            has_switched: false,
            matching: Matching::new(rank, MAX_NUMBERED),
            acks: Vec::new(),
            acks_are_due: false,
            has_spoken: false,
            silent_since: None,
            writes: 0,
            next_nic: rank.index(),
            waits_for_room: false,
            gauge: Gauge::default(),
            is_paused: false,
            is_awaited: false,
        }
    }

    /// Where a connection is among all.
    pub fn link(&self, way: Way, index: u8) -> Option<usize> {
        self.links.iter().position(|link| (link.way, link.index) == (way, index))
    }

    /// The connections that this rank has made.
    pub fn made(&self) -> usize {
        self.links.iter().filter(|link| link.way == Way::Out).count()
    }

    /// Whether a connection of ours with this number carries both ways.
    pub fn is_shared(&self, index: u8) -> bool {
        self.is_first && index == 0
    }

    /// The NIC that a connection of ours with this number goes by; 0 is the rank's own.
    pub fn nic_of(&self, index: u8) -> usize {
        let further = usize::from(index).checked_sub(self.shares.numbers());
        further.map_or(0, |further| 1 + further / self.shares.own)
    }

    /// Where it leads.
    pub fn address(&self, index: u8) -> SocketAddr {
        self.addresses[self.nic_of(index) % self.addresses.len()]
    }

    /// How many connections a rank may make to the other.
    pub fn most(&self) -> usize {
        self.shares.numbers() + self.shares.own * self.shares.further
    }

    /// Whether other NICs than the rank's own lead to it, too.
    pub fn has_further(&self) -> bool {
        self.shares.further > 0
    }

    /// How many of them this rank makes for its large messages now.
    pub fn wanted(&self) -> usize {
        match self.is_wide {
            true => self.most(),
            false => self.shares.own,
        }
    }

    /// Makes no more connections by other NICs than there are.
    pub fn make_no_more(&mut self) {
        self.shares.further = self.made().saturating_sub(self.shares.numbers()) / self.shares.own;
    }

    /// Has large messages go by all NICs, or by the rank's own.
    pub fn set_wide(&mut self, is_wide: bool) {
        self.is_wide = is_wide;
    }

    fn outputs(&self) -> impl Iterator<Item = &Connection> {
        let counts = |connection: &&Connection| connection.writes && connection.counts();
        self.links.iter().map(|link| &link.connection).filter(counts)
    }

    fn inputs(&self) -> impl Iterator<Item = &Connection> {
        self.links.iter().map(|link| &link.connection).filter(|connection| connection.reads)
    }

    /// The peer's first connection, where it is the one for both ways and we do not write it yet.
    fn offered(&self) -> Option<usize> {
        let at = self.link(Way::In, 0).filter(|_| !self.is_first)?;
        let connection = &self.links[at].connection;
        (!connection.writes && connection.ended.is_none()).then_some(at)
    }

    /// Whether frames can be written without making a connection.
    pub fn is_reached(&self) -> bool {
        self.control.is_some() || self.offered().is_some()
    }

    /// What goes out next goes on the connection for both ways, once there is one.
    fn switch(&mut self) {
        let Some(shared) = self.offered().filter(|_| !self.takes_nothing()) else { return };
        let own = self.control.replace(shared);
        let head = FrameHeader::about(FrameKind::Switch, u64::from(own.is_some())).encode();
        self.links[shared].connection.writes = true;
        for at in own.into_iter().chain([shared]) {
            self.links[at].connection.push_copy(head, &[], None);
        }
    }

    fn control(&mut self) -> Option<&mut Connection> {
        self.switch();
        self.control.map(|at| &mut self.links[at].connection)
    }

    /// Whether it takes nothing more: it has closed a connection that we write, or refused it.
    fn takes_nothing(&self) -> bool {
        self.outputs().any(|connection| connection.output_lost.is_some())
    }

    /// Whether granted messages wait, for which there should be all connections.
    pub fn has_granted(&self) -> bool {
        self.matching.has_granted()
    }

    /// Whether its next frame is waited for.
    pub fn awaits(&self) -> bool {
        self.matching.expects() || self.matching.owes()
    }

    /// The connection that its next frame comes on, none where that may be any.
    pub fn next_input(&self) -> Option<usize> {
        self.speaks.filter(|_| !self.matching.has_inflows())
    }

    /// Whether nothing waits to be written, and all connections stand.
    pub fn is_settled(&self) -> bool {
        let mut connections = self.links.iter().map(|link| &link.connection);
        !self.has_granted()
            && !self.has_answers()
            && self.silent_since.is_none()
            && connections.all(|connection| connection.is_idle() || connection.is_unreached())
    }

    /// Changes when a send that was `Busy` may be accepted.
    pub fn relief(&self) -> u64 {
        self.matching.relief() + self.writes
    }

    /// Adds a connection.
    pub fn add(&mut self, link: TcpLink) {
        self.writes += u64::from(link.way == Way::Out);
        if link.way == Way::Out && link.index == 0 {
            self.control.get_or_insert(self.links.len());
        }
        self.links.push(link);
    }

    fn gone(&self) -> Error {
        let broken = self.inputs().find_map(|connection| match &connection.ended {
            Some(Ended::Broken(why) | Ended::Reset(why)) => Some(why.as_str()),
            _ => None,
        });
        let lost = || self.outputs().find_map(|connection| connection.output_lost.as_deref());
        let why = broken.or_else(lost).unwrap_or("it has closed its connections");
        Error::Remote(format!("rank {} at {} has left the communicator or died: {why}", self.rank, self.place()))
    }

    /// Where it listens, for texts.
    pub fn place(&self) -> String {
        self.addresses.first().map_or(String::new(), SocketAddr::to_string)
    }

    /// Posts a message.
    pub fn send(&mut self, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        if self.takes_nothing() {
            return Err(self.gone());
        }
        self.switch();
        let TcpPeer { links, control, matching, acks, .. } = self;
        let Some(control) = control.map(|at| &mut links[at].connection) else { return Ok(Started::Busy) };
        let (bytes, channel) = (src.iter().map(Region::len).sum::<usize>(), envelope.channel);
        let small = bytes <= SMALL;
        let takes = if small { matching.takes_short(channel) } else { matching.takes_long(channel) };
        if !takes || control.queued() > MAX_QUEUED {
            return Ok(Started::Busy);
        }
        let nonce = acks.pop().map_or(0, |number| number + 1);
        self.has_spoken = true;
        let head = |kind, id, body| FrameHeader { kind, envelope, bytes: bytes as u64, id, body, nonce }.encode();
        if small {
            let id = matching.short_sent(channel);
            let written = control.push_copy(head(FrameKind::Small, id, bytes as u64), src, Some(token));
            return Ok(if written { Started::Done } else { Started::Pending });
        }
        let id = matching.long_sent(channel, token, src);
        control.push_copy(head(FrameKind::Large, id, 0), &[], None);
        Ok(Started::Pending)
    }

    /// Posts a receive.
    pub fn recv(&mut self, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        match self.matching.recv(token, envelope, sink)? {
            Received::Waits => {}
            Received::Long(message) => self.ask_for(*message)?,
            Received::Short(mark) => {
                self.acknowledge(mark);
                return Ok(Started::Done);
            }
        }
        Ok(Started::Pending)
    }

    /// Bytes that have been read from its connections.
    pub fn received_bytes(&self) -> u64 {
        self.links.iter().map(|link| link.connection.received_bytes).sum()
    }

    /// Answers on the connection that stands since a receive was posted. A peer that takes nothing more needs no
    /// answer; whether something is still expected of it, [`check`](TcpPeer::check) finds out.
    fn reply(&mut self, kind: FrameKind, id: u64) {
        self.control().map(|control| control.push_copy(FrameHeader::about(kind, id).encode(), &[], None));
    }

    /// A small message is to be acknowledged: by our next message, where the two take turns, else by a frame of its own. A
    /// sender that may not go on without an answer has two open, so the second one waits for nothing.
    fn acknowledge(&mut self, id: Option<u64>) {
        if let Some(id) = id {
            self.acks.push(id);
            self.acks_are_due |= self.acks.len() > 1 || !self.has_spoken;
            self.has_spoken = false;
        }
    }

    /// Whether something is to be acknowledged by frames of their own. A peer that takes nothing more needs none.
    pub fn has_answers(&self) -> bool {
        self.acks_are_due && !self.acks.is_empty() && !self.takes_nothing()
    }

    /// The connection for those: one that nothing comes back on. Its end does not read them, so what it has written
    /// elsewhere is delivered when it closes all.
    pub fn answers_on(&self) -> Option<usize> {
        let is_one_way = |link: &TcpLink| link.way == Way::Out && !self.is_shared(link.index);
        self.links.iter().position(is_one_way)
    }

    fn write_answers(&mut self) {
        let Some(at) = self.answers_on().filter(|_| self.has_answers()) else { return };
        let connection = &mut self.links[at].connection;
        for number in self.acks.drain(..) {
            connection.push_copy(FrameHeader::about(FrameKind::Ack, number).encode(), &[], None);
        }
        self.acks_are_due = false;
    }

    /// The peer has received a small message of ours.
    fn take_ack(&mut self, number: u64) -> Result<()> {
        match self.matching.acknowledged(number)? {
            None => Ok(()),
            Some(_) => Err(self.nonsense("an acknowledgement of a long message")),
        }
    }

    fn ask_for(&mut self, Fetch { number, posted, .. }: Fetch<()>) -> Result<()> {
        self.matching.await_bytes(number, posted, 0)?;
        self.reply(FrameKind::Grant, number);
        Ok(())
    }

    fn nonsense(&self, what: &str) -> Error {
        self.matching.nonsense(what)
    }

    /// Reads from one connection and does what its frames say. What has been read ahead is always worked off: the socket
    /// will not tell of it again.
    pub fn read(&mut self, link: usize, lossless: &mut Lossless, done: &mut Vec<Token>) -> Result<()> {
        self.read_link(link, lossless, done)?;
        let released = self.has_switched.then(|| self.links.iter().position(|link| link.connection.is_held)).flatten();
        released.map_or(Ok(()), |held| {
            self.links[held].connection.is_held = false;
            self.speaks = Some(held);
            self.read_link(held, lossless, done)
        })
    }

    fn read_link(&mut self, link: usize, lossless: &mut Lossless, done: &mut Vec<Token>) -> Result<()> {
        let mut budget = TURN;
        loop {
            let connection = &mut self.links[link].connection;
            let spent = budget == 0;
            if connection.ended.is_some() || connection.is_held || (spent && !connection.holds(1)) {
                return Ok(());
            }
            if let Some(Inbound { id, .. }) = connection.inbound {
                let Some(inflow) = self.matching.inflow(id) else {
                    return Err(self.nonsense("bytes nobody asked for"));
                };
                if spent && !connection.holds(inflow.posted.target.grain()) {
                    return Ok(());
                }
                let Some(got) = connection.read_data(&inflow.posted.target) else { return Ok(()) };
                self.matching.part_came(id, got, done);
                budget = budget.saturating_sub(got);
                continue;
            }
            let Some(head) = connection.peek(HEADER) else {
                if spent || !connection.fill() {
                    return Ok(());
                }
                continue;
            };
            let mut bytes = [0; HEADER];
            head.read(&mut bytes);
            let Some(header) = FrameHeader::decode(&bytes) else {
                return Err(self.nonsense("a frame of no known kind"));
            };
            let most = match header.kind {
                FrameKind::Small => SMALL,
                FrameKind::Coded => MAX_CODED,
                _ => {
                    connection.skip(HEADER);
                    self.take_header(link, &header)?;
                    continue;
                }
            };
            if header.body as usize > most {
                return Err(self.nonsense("a small message or a coded frame that is too long"));
            }
            let len = HEADER + header.body as usize;
            if !connection.holds(len) {
                if spent || !connection.fill() {
                    return Ok(());
                }
                continue;
            }
            budget = budget.saturating_sub(match header.kind {
                FrameKind::Small => self.take_small(link, &header, done)?,
                _ => self.take_coded(link, &header, lossless, done)?,
            });
        }
    }

    /// Takes a small message, which has been read ahead. Its bytes.
    fn take_small(&mut self, link: usize, header: &FrameHeader, done: &mut Vec<Token>) -> Result<usize> {
        let len = HEADER + header.body as usize;
        let connection = &mut self.links[link].connection;
        let Some((mut buffer, start)) = connection.lend(len) else { return Ok(0) };
        connection.skip(len);
        let body = buffer.region().part(start + HEADER, len - HEADER);
        let taken = self.matching.short_came(&header.message(), body, done);
        self.speaks = Some(link);
        if header.nonce > 0 {
            self.take_ack(header.nonce - 1)?;
        }
        self.links[link].connection.give_back(buffer);
        self.acknowledge(taken?);
        Ok(len)
    }

    /// Decodes a frame that has been read ahead. Its lengths and places are looked at before anything is done with them. The bytes that
    /// it stands for.
    #[inline(never)]
    fn take_coded(
        &mut self,
        link: usize,
        header: &FrameHeader,
        lossless: &mut Lossless,
        done: &mut Vec<Token>,
    ) -> Result<usize> {
        let (offset, original) = (header.bytes as usize, header.nonce as usize);
        let belongs = self.matching.inflow(header.id).is_some_and(|inflow| {
            let grain = inflow.posted.target.grain();
            original > 0 && inflow.has(offset, original) && offset % grain == 0 && original % grain == 0
        });
        if !belongs {
            return Err(self.nonsense("bytes nobody asked for"));
        }
        let connection = &mut self.links[link].connection;
        let len = HEADER + header.body as usize;
        let Some(frame) = connection.peek(len) else { return Ok(0) };
        match lossless.decode(frame.part(HEADER, len - HEADER), original) {
            Ok(bytes) => self.matching.copy_came(header.id, offset, bytes, done),
            Err(what) => return Err(self.nonsense(what)),
        };
        self.links[link].connection.skip(len);
        Ok(original)
    }

    #[inline(never)]
    fn take_header(&mut self, link: usize, header: &FrameHeader) -> Result<()> {
        if !matches!(header.kind, FrameKind::Data | FrameKind::Ack) {
            self.speaks = Some(link);
        }
        if header.kind == FrameKind::Large && header.nonce > 0 {
            self.take_ack(header.nonce - 1)?;
        }
        match header.kind {
            FrameKind::Large => match self.matching.long_came(&header.message(), ())? {
                Some(message) => self.ask_for(message),
                None => Ok(()),
            },
            FrameKind::Grant => self.matching.grant(header.id),
            FrameKind::Ack => self.take_ack(header.id),
            FrameKind::Data => {
                let (offset, left) = (header.bytes as usize, header.body as usize);
                let inflow = self.matching.inflow(header.id);
                if left == 0 || !inflow.is_some_and(|inflow| inflow.has(offset, left)) {
                    return Err(self.nonsense("bytes nobody asked for"));
                }
                self.links[link].connection.inbound = Some(Inbound { id: header.id, offset, left });
                Ok(())
            }
            FrameKind::Switch if self.is_first => {
                match self.links[link].way {
                    Way::In => self.has_switched = true,
                    // What the peer said on its own connection comes first.
                    Way::Out => self.links[link].connection.is_held = header.id > 0,
                }
                Ok(())
            }
            _ => Err(self.nonsense("an answer to no message")),
        }
    }

    /// Looks at how fast the connections are, from time to time, for whether coding pays.
    #[inline(never)]
    fn measure(&mut self, lossless: &mut Lossless) {
        if lossless.measures() && self.gauge.is_due() {
            let TcpPeer { links, gauge, .. } = self;
            let ours = links.iter_mut().filter(|link| link.way == Way::Out);
            gauge.look(ours.map(|link| link.connection.delivered()), lossless.sharers, lossless.cost_ns());
            if !gauge.is_slow() {
                lossless.forget_cost();
            }
        }
    }

    /// Writes what the connections take: queued frames, then stripes of granted messages, or coded parts of them.
    pub fn write(&mut self, lossless: &mut Lossless, done: &mut Vec<Token>) {
        self.write_answers();
        self.measure(lossless);
        let (wanted, is_wide) = (self.wanted(), self.is_wide);
        let TcpPeer { links, matching, writes, gauge, is_paused, .. } = self;
        let mut turn = CODED_TURN;
        *is_paused = false;
        for TcpLink { way, index, connection } in links {
            if !connection.writes || connection.output_lost.is_some() {
                continue;
            }
            loop {
                if connection.is_flushed() {
                    if *way == Way::In || is_wide || usize::from(*index) >= wanted {
                        break;
                    }
                    let Some((id, message)) = matching.next_granted() else { break };
                    if turn == 0 {
                        *is_paused = true;
                        break;
                    }
                    let most = stripe(message.src.bytes(), wanted);
                    let coders = (&mut *lossless, &mut *gauge);
                    if give_frame(coders, (id, message), connection, most, &mut turn).is_none() {
                        break;
                    }
                }
                *writes += 1;
                let mut left = smallvec::SmallVec::<[(u64, usize); 4]>::new();
                connection.flush(|id| matching.source(id), |id, bytes| left.push((id, bytes)), done);
                for (id, bytes) in left {
                    if matching.part_sent(id, bytes, done) {
                        matching.close(id);
                    }
                }
                if !connection.is_flushed() || connection.output_lost.is_some() {
                    break;
                }
            }
        }
        self.waits_for_room = is_wide && self.hand_out(lossless, done);
    }

    /// Fails when the peer is gone and something is still expected of it: at once where it will take what it is to get
    /// no more, or broke off; where it only falls silent, when what it said before has had time to come in.
    pub fn check(&mut self) -> Result<()> {
        let is_owed = self.matching.owes() || self.outputs().any(Connection::owes);
        let is_broken = self.inputs().any(|connection| matches!(connection.ended, Some(Ended::Broken(_))));
        let owes = self.matching.expects();
        let silent = self.takes_nothing() && self.inputs().all(|connection| connection.ended.is_some());
        if (is_owed && self.takes_nothing()) || (owes && is_broken) {
            return Err(self.gone());
        }
        if !owes || !silent {
            self.silent_since = None;
            return Ok(());
        }
        let patience = if self.links.iter().all(|link| link.way == Way::Out) { FIRST_WORDS } else { LAST_WORDS };
        match self.silent_since.get_or_insert_with(Instant::now).elapsed() < patience {
            true => Ok(()),
            false => Err(self.gone()),
        }
    }

    /// Whether it is known to send nothing more although something is expected.
    pub fn is_doubtful(&self) -> bool {
        self.silent_since.is_some()
    }

    /// The connections on which something may be on its way, with whom they lead to.
    pub fn take_output(&mut self) -> impl Iterator<Item = (Rank, Connection)> {
        let rank = self.rank;
        let (output, input) = std::mem::take(&mut self.links)
            .into_iter()
            .partition(|link| link.connection.writes && link.connection.counts());
        (self.links, self.control, self.speaks) = (input, None, None);
        let output: Vec<TcpLink> = output;
        output.into_iter().map(move |link| (rank, link.connection))
    }

    /// Forgets everything. Connections in the middle of a message are of no use any more, so all are closed.
    pub fn cancel(&mut self) {
        self.links.clear();
        (self.control, self.speaks) = (None, None);
        self.matching.cancel();
    }
}

#[path = "wide.rs"]
pub mod wide;

#[cfg(test)]
#[path = "peer_tests.rs"]
mod tests;
