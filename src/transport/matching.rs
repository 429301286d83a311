//! The messages between this rank and one peer, whichever way their bytes go: the part that every transport has.
//!
//! A short message comes with its bytes. Of a long one an announcement comes; the receiver has its bytes brought when it has
//! a place for them. [`Matching`] gives messages to receives, keeps what comes before its receive, checks envelopes and
//! lengths, counts how far the sender is ahead, and knows what is complete. A transport moves the bytes: it tells the
//! matching what has come and what has left, and does what the matching answers.
//!
//! ```text
//! sender                                    receiver
//! takes_short, short_sent    -- bytes -->   short_came, or recv later: the bytes are in their place
//! acknowledged               <- number --   only where the message is marked
//!
//! takes_long, long_sent      - announce ->  long_came, or recv later: a `Fetch` says that the transport may go on,
//!                                           which fetches by itself, or awaits the bytes (`await_bytes`)
//! grant, next_part           <- number --   where the sender waits to be asked
//! part_begun, part_sent      -- bytes -->   part_came
//! close                      <- number --   where the receiver says that it has them
//! ```
//!
//! What a peer sends may be anything: no answer or length makes this panic, and [`nonsense`](Matching::nonsense) names the
//! peer.
#![forbid(unsafe_code)]

use super::header::NO_ID;
use super::streams::{Posted, Streams};
use super::target::Pieces;
use super::{Envelope, Sink};
use crate::error::{Error, Result};
use crate::exec::Token;
use crate::memory::{Arena, Bytes, Region};
use crate::plan::Channel;
use crate::topo::Rank;
use std::collections::VecDeque;

/// What a message says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHead {
    /// Its envelope.
    pub envelope: Envelope,
    /// Its bytes.
    pub bytes: usize,
    /// The sender's number of it; [`NO_ID`] where nothing is to be answered.
    pub number: u64,
}

impl MessageHead {
    /// The number to acknowledge when the message has been received: a marked short one's.
    #[inline]
    pub fn mark(&self) -> Option<u64> {
        (self.number != NO_ID).then_some(self.number)
    }
}

/// A message that came before its receive was posted. `A` is what a transport's announcements carry.
#[derive(Debug)]
enum Arrival<A> {
    Short(MessageHead, Vec<u8>),
    Long(MessageHead, A),
}

/// A long message that has its receive: the transport may bring the bytes.
#[derive(Debug)]
pub struct Fetch<A> {
    /// The sender's number of it.
    pub number: u64,
    /// Its receive.
    pub posted: Posted,
    /// What its announcement carried.
    pub announced: A,
}

/// What came of posting a receive.
#[derive(Debug)]
pub enum Received<A> {
    /// Its message is still to come.
    Waits,
    /// The bytes are in their place. A number is to be acknowledged.
    Short(Option<u64>),
    /// The bytes are to be brought.
    Long(Box<Fetch<A>>),
}

/// A long message on its way out.
#[derive(Debug)]
pub struct Outgoing {
    /// What to report when all of it has left.
    pub token: Token,
    /// Where its bytes are.
    pub src: Pieces,
    channel: Channel,
    begun: usize,
    sent: usize,
}

impl Outgoing {
    /// Bytes that have been given to the system and have not left.
    pub fn in_flight(&self) -> usize {
        self.begun - self.sent
    }

    /// Whether all of it has left.
    pub fn has_left(&self) -> bool {
        self.sent == self.src.bytes()
    }

    /// Where in the message the next part begins, and its bytes, `most` at most; none when all parts have begun.
    pub fn next_part(&self, most: usize) -> Option<(usize, usize)> {
        let left = self.src.bytes() - self.begun;
        (left > 0).then_some((self.begun, left.min(most)))
    }

    /// The next part of so many bytes has been given to the system.
    pub fn part_begun(&mut self, len: usize) {
        self.begun += len;
    }
}

/// A long message on its way in.
#[derive(Debug)]
pub struct Inflow {
    /// Its receive.
    pub posted: Posted,
    number: u64,
    begun: usize,
    received: usize,
}

impl Inflow {
    /// Bytes that have been asked for and have not come.
    pub fn in_flight(&self) -> usize {
        self.begun - self.received
    }

    /// Where in the message the next part begins that is to be asked for, and its bytes, `most` at most.
    pub fn next_part(&self, most: usize) -> Option<(usize, usize)> {
        let left = self.posted.target.bytes() - self.begun;
        (left > 0).then_some((self.begun, left.min(most)))
    }

    /// The next part of so many bytes has been asked for.
    pub fn part_begun(&mut self, len: usize) {
        self.begun += len;
    }

    /// Bytes from its start that have been asked for, or were there before it was awaited.
    pub fn begun(&self) -> usize {
        self.begun
    }

    /// Whether these bytes lie in the message.
    pub fn has(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.posted.target.bytes())
    }
}

/// What a number of ours stands for.
#[derive(Debug)]
enum Numbered {
    /// A marked short message, until it is acknowledged.
    Mark(Channel),
    /// A long message.
    Long(Outgoing),
}

/// The numbered messages: the low half of a number is a place in a table, the high half counts the place's uses, so that
/// a late answer is not taken for one to a later message.
#[derive(Debug)]
struct Numbers {
    places: Vec<(u32, Option<Numbered>)>,
    free: Vec<u32>,
    most: usize,
    open: usize,
    long: usize,
}

impl Numbers {
    fn take(&mut self, what: Numbered) -> u64 {
        self.open += 1;
        self.long += usize::from(matches!(what, Numbered::Long(_)));
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() as u32 - 1
        });
        let (uses, empty) = &mut self.places[place as usize];
        *empty = Some(what);
        u64::from(*uses) << 32 | u64::from(place)
    }

    fn place(&mut self, number: u64) -> Option<&mut Option<Numbered>> {
        let (uses, what) = self.places.get_mut(number as u32 as usize)?;
        (u64::from(*uses) == number >> 32 && what.is_some()).then_some(what)
    }

    fn close(&mut self, number: u64) -> Option<Numbered> {
        let closed = self.place(number)?.take()?;
        let place = number as u32;
        self.places[place as usize].0 = ((number >> 32) as u32).wrapping_add(1);
        self.free.push(place);
        self.open -= 1;
        self.long -= usize::from(matches!(closed, Numbered::Long(_)));
        Some(closed)
    }
}

/// The messages between this rank and a peer. `A`: what the transport's announcements carry beside a [`MessageHead`].
#[derive(Debug)]
pub struct Matching<A = ()> {
    peer: Rank,
    streams: Streams<Arrival<A>>,
    numbers: Numbers,
    /// Long messages that the receiver has asked for, of which a part is still to begin.
    granted: VecDeque<u64>,
    inflows: Vec<Inflow>,
    staging: Arena,
    relief: u64,
}

impl<A> Matching<A> {
    /// No messages yet. `most_numbers`: how many marked and long messages may be open at a time, which is at least 1 and
    /// at most 2^32.
    pub fn new(peer: Rank, most_numbers: usize) -> Matching<A> {
        let numbers = Numbers { places: Vec::new(), free: Vec::new(), most: most_numbers, open: 0, long: 0 };
        Matching {
            peer,
            streams: Streams::default(),
            numbers,
            granted: VecDeque::new(),
            inflows: Vec::new(),
            staging: Arena::new(0),
            relief: 0,
        }
    }

    /// The error that this peer sent something that makes no sense.
    pub fn nonsense(&self, what: &str) -> Error {
        Error::Internal(format!("rank {} sent {what}", self.peer))
    }

    /// Changes when a send that was refused may be taken.
    pub fn relief(&self) -> u64 {
        self.relief
    }

    /// Whether an answer from the peer may come: messages are open that have a number.
    #[inline]
    pub fn has_numbered(&self) -> bool {
        self.numbers.open > 0
    }

    /// Whether a long message has not left, or its receiver has yet to say that it has it.
    pub fn owes(&self) -> bool {
        self.numbers.long > 0
    }

    /// Whether a receive waits for a message or the rest of one. Receives that were given away as a [`Fetch`] do not count.
    pub fn expects(&self) -> bool {
        !self.inflows.is_empty() || self.streams.any_posted()
    }

    /// Whether bytes of long messages are on their way in.
    pub fn has_inflows(&self) -> bool {
        !self.inflows.is_empty()
    }

    /// Forgets everything: no memory of the program is reached from here any more.
    pub fn cancel(&mut self) {
        let (peer, most, relief) = (self.peer, self.numbers.most, self.relief);
        *self = Matching { relief, ..Matching::new(peer, most) };
    }
}

/// The sending direction.
impl<A> Matching<A> {
    /// Whether one more short message may be sent on a channel.
    #[inline]
    pub fn takes_short(&mut self, channel: Channel) -> bool {
        let has_number = self.numbers.open < self.numbers.most;
        let credit = &self.streams.at(channel).credit;
        credit.takes_small() && (has_number || !credit.next_is_marked())
    }

    /// Whether one more long message may be sent on a channel.
    pub fn takes_long(&mut self, channel: Channel) -> bool {
        self.numbers.open < self.numbers.most && self.streams.at(channel).credit.takes_large()
    }

    /// A short message goes out, as [`takes_short`](Self::takes_short) has allowed; its number, [`NO_ID`] unless it is
    /// marked.
    #[inline]
    pub fn short_sent(&mut self, channel: Channel) -> u64 {
        let credit = &mut self.streams.at(channel).credit;
        let marked = credit.next_is_marked();
        credit.small_sent();
        match marked {
            true => self.numbers.take(Numbered::Mark(channel)),
            false => NO_ID,
        }
    }

    /// A long message is announced, as [`takes_long`](Self::takes_long) has allowed; its number.
    pub fn long_sent(&mut self, channel: Channel, token: Token, src: &[Region]) -> u64 {
        self.streams.at(channel).credit.large_sent();
        self.numbers.take(Numbered::Long(Outgoing { token, src: Pieces::new(src), channel, begun: 0, sent: 0 }))
    }

    /// The open number whose low half is `place`, where answers carry no more than that.
    pub fn numbered(&self, place: u32) -> Option<u64> {
        let (uses, what) = self.numbers.places.get(place as usize)?;
        what.as_ref().map(|_| u64::from(*uses) << 32 | u64::from(place))
    }

    /// A long message that is open.
    pub fn outgoing(&mut self, number: u64) -> Option<&mut Outgoing> {
        match self.numbers.place(number)? {
            Some(Numbered::Long(message)) => Some(message),
            _ => None,
        }
    }

    /// The bytes of a long message that is open.
    pub fn source(&self, number: u64) -> Option<&Pieces> {
        match self.numbers.places.get(number as u32 as usize)? {
            (uses, Some(Numbered::Long(message))) if u64::from(*uses) == number >> 32 => Some(&message.src),
            _ => None,
        }
    }

    /// The receiver says that it has a message. A marked short one gives its credit back; a long one is for the transport
    /// to close.
    pub fn acknowledged(&mut self, number: u64) -> Result<Option<&mut Outgoing>> {
        match self.numbers.place(number) {
            None => Err(self.nonsense("an acknowledgement of nothing")),
            Some(Some(Numbered::Mark(channel))) => {
                let channel = *channel;
                self.numbers.close(number);
                self.streams.at(channel).credit.mark_done();
                self.relief += 1;
                Ok(None)
            }
            Some(_) => Ok(self.outgoing(number)),
        }
    }

    /// The receiver asks for the bytes of a long message.
    pub fn grant(&mut self, number: u64) -> Result<()> {
        let waits = self.outgoing(number).is_some_and(|message| message.begun == 0);
        if !waits || self.granted.contains(&number) {
            return Err(self.nonsense("a request for a message that is not open"));
        }
        self.granted.push_back(number);
        Ok(())
    }

    /// Whether parts of messages that were asked for are still to begin.
    pub fn has_granted(&self) -> bool {
        !self.granted.is_empty()
    }

    /// The message that was asked for first, with its number, of which a part is still to begin.
    #[inline]
    pub fn next_granted(&mut self) -> Option<(u64, &mut Outgoing)> {
        while let Some(&number) = self.granted.front() {
            if self.outgoing(number).is_some_and(|message| message.begun < message.src.bytes()) {
                return self.outgoing(number).map(|message| (number, message));
            }
            self.granted.pop_front();
        }
        None
    }

    /// Bytes of a long message have left; reports its token, and says so, if that was the last of it.
    pub fn part_sent(&mut self, number: u64, bytes: usize, done: &mut Vec<Token>) -> bool {
        let Some(message) = self.outgoing(number) else { return false };
        message.sent += bytes;
        let left = message.has_left();
        if left {
            done.push(message.token);
        }
        left
    }

    /// Forgets a long message: nothing is to be answered to its number any more.
    pub fn close(&mut self, number: u64) -> Option<Outgoing> {
        self.outgoing(number)?;
        let Some(Numbered::Long(message)) = self.numbers.close(number) else { return None };
        self.streams.at(message.channel).credit.large_done();
        self.relief += 1;
        Some(message)
    }
}

/// The receiving direction.
impl<A> Matching<A> {
    /// Posts a receive.
    #[inline]
    pub fn recv(&mut self, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Received<A>> {
        let stream = self.streams.at(envelope.channel);
        let Some(arrival) = stream.arrived.pop_front() else {
            stream.posted.push_back(Posted::new(token, envelope, sink));
            return Ok(Received::Waits);
        };
        let posted = Posted::new(token, envelope, sink);
        let (Arrival::Short(head, _) | Arrival::Long(head, _)) = &arrival;
        posted.check(self.peer, head.envelope, head.bytes)?;
        Ok(match arrival {
            Arrival::Short(head, body) => {
                posted.target.consume_copy(0, &body, &mut self.staging);
                Received::Short(head.mark())
            }
            Arrival::Long(head, announced) => {
                Received::Long(Box::new(Fetch { number: head.number, posted, announced }))
            }
        })
    }

    /// Whether nothing of a stream waits: neither messages nor receives.
    #[inline]
    pub fn is_empty(&mut self, channel: Channel) -> bool {
        let stream = self.streams.at(channel);
        stream.arrived.is_empty() && stream.posted.is_empty()
    }

    /// A short message has come: goes where it belongs, or is kept. A number is to be acknowledged.
    #[inline]
    pub fn short_came(&mut self, head: &MessageHead, body: Bytes<'_>, done: &mut Vec<Token>) -> Result<Option<u64>> {
        if body.len() != head.bytes {
            return Err(self.nonsense("a message of another length than it says"));
        }
        let stream = self.streams.at(head.envelope.channel);
        // It leaves the queue when it is done with: a receive is some hundred bytes, and moving it costs as much as the rest.
        let Some(posted) = stream.posted.front() else {
            let mut kept = vec![0; body.len()];
            body.read(&mut kept);
            stream.arrived.push_back(Arrival::Short(*head, kept));
            return Ok(None);
        };
        posted.check(self.peer, head.envelope, head.bytes)?;
        posted.target.consume(0, body);
        done.push(posted.token);
        stream.posted.pop_front();
        Ok(head.mark())
    }

    /// A long message has been announced: if its receive has been posted, the transport may bring the bytes.
    pub fn long_came(&mut self, head: &MessageHead, announced: A) -> Result<Option<Fetch<A>>> {
        if head.bytes == 0 || head.number == NO_ID {
            return Err(self.nonsense("an announcement of no message"));
        }
        let stream = self.streams.at(head.envelope.channel);
        let Some(posted) = stream.posted.pop_front() else {
            stream.arrived.push_back(Arrival::Long(*head, announced));
            return Ok(None);
        };
        posted.check(self.peer, head.envelope, head.bytes)?;
        Ok(Some(Fetch { number: head.number, posted, announced }))
    }

    /// The bytes of a long message will come in parts. `begun`: so many from its start need not be asked for.
    pub fn await_bytes(&mut self, number: u64, posted: Posted, begun: usize) -> Result<()> {
        if self.inflows.iter().any(|inflow| inflow.number == number) {
            return Err(self.nonsense("a message with the number of another one"));
        }
        self.inflows.push(Inflow { posted, number, begun, received: 0 });
        Ok(())
    }

    /// A message whose bytes are awaited.
    pub fn inflow(&mut self, number: u64) -> Option<&mut Inflow> {
        self.inflows.iter_mut().find(|inflow| inflow.number == number)
    }

    /// Bytes of an awaited message, which begin at `offset`, have come and are kept: they go where they belong. As
    /// [`part_came`](Self::part_came) then.
    pub fn copy_came(&mut self, number: u64, offset: usize, bytes: &[u8], done: &mut Vec<Token>) -> Option<Posted> {
        let at = self.inflows.iter().position(|inflow| inflow.number == number)?;
        self.inflows[at].posted.target.consume_copy(offset, bytes, &mut self.staging);
        self.part_came(number, bytes.len(), done)
    }

    /// Bytes of a long message have come; if they were the last, its token is reported, and it is given back.
    pub fn part_came(&mut self, number: u64, bytes: usize, done: &mut Vec<Token>) -> Option<Posted> {
        let at = self.inflows.iter().position(|inflow| inflow.number == number)?;
        let inflow = &mut self.inflows[at];
        inflow.received += bytes;
        if inflow.received < inflow.posted.target.bytes() {
            return None;
        }
        let Inflow { posted, .. } = self.inflows.swap_remove(at);
        done.push(posted.token);
        Some(posted)
    }
}

/// The error of a transport whose operations have been cancelled.
#[inline]
pub fn check_usable(cancelled: bool) -> Result<()> {
    match cancelled {
        true => Err(Error::InvalidUsage("the communicator's operations have been cancelled".into())),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "matching_tests.rs"]
mod tests;
