//! Matching of messages and receives, stream by stream, and how far a sender may run ahead.
//!
//! Messages that arrive before their receive was posted wait in their own stream's queue, so that no stream ever holds
//! up another one. What may wait there is bounded: of large messages only announcements arrive, at most
//! [`LARGE_IN_FLIGHT`] of them; of small ones every [`MARK_EVERY`]th is *marked*, the receiver acknowledges it when it is
//! received, and no more than [`MARKS_IN_FLIGHT`] marks may be open.
#![forbid(unsafe_code)]

use super::{Envelope, Sink};
use crate::error::{Error, Result};
use crate::exec::Token;
use crate::plan::Channel;
use crate::topo::Rank;
use std::collections::VecDeque;

use super::target::Target;

/// Large messages a stream carries at a time: the capacity of a channel.
pub const LARGE_IN_FLIGHT: u32 = 8;
const MARK_EVERY: u32 = 16;
const MARKS_IN_FLIGHT: u32 = 2;

/// A receive that waits for its message, or for the rest of it.
#[derive(Debug)]
pub struct Posted {
    /// What to report when it is complete.
    pub token: Token,
    /// What the message must say.
    pub envelope: Envelope,
    /// What happens to the bytes.
    pub target: Target,
}

impl Posted {
    /// A receive as it was posted.
    pub fn new(token: Token, envelope: Envelope, sink: Sink<'_>) -> Posted {
        Posted { token, envelope, target: Target::new(sink) }
    }

    /// Fails unless the message `arrived`, of so many bytes, is the one this receive expects.
    pub fn check(&self, from: Rank, arrived: Envelope, bytes: usize) -> Result<()> {
        self.envelope.check(from, arrived, self.target.bytes(), bytes)
    }
}

impl Envelope {
    /// Fails unless what `arrived` from a rank, of so many `bytes`, is what this rank expects.
    pub fn check(&self, from: Rank, arrived: Envelope, expected: usize, bytes: usize) -> Result<()> {
        if *self == arrived && expected == bytes {
            return Ok(());
        }
        // What was called is known to whoever gave the operations their numbers.
        let (theirs, ours) = (arrived.sequence, self.sequence);
        let found = if theirs != ours {
            format!("a message of operation {theirs} where one of operation {ours} was expected")
        } else if arrived.signature != self.signature {
            format!("a message of another call than this rank's operation {ours}")
        } else {
            format!("{bytes} bytes where {expected} were expected")
        };
        let why = "the ranks do not call the same operations with the same arguments";
        Err(Error::InvalidUsage(format!("rank {from} sent {found}: {why}")))
    }
}

/// How far a sender has run ahead of its receiver on one stream.
#[derive(Debug, Default)]
pub struct Credit {
    large: u32,
    since_mark: u32,
    marks: u32,
}

impl Credit {
    /// Whether one more large message may be sent.
    pub fn takes_large(&self) -> bool {
        self.large < LARGE_IN_FLIGHT
    }

    /// Whether one more small message may be sent.
    pub fn takes_small(&self) -> bool {
        !self.next_is_marked() || self.marks < MARKS_IN_FLIGHT
    }

    /// Whether the next small message carries a mark.
    pub fn next_is_marked(&self) -> bool {
        self.since_mark + 1 == MARK_EVERY
    }

    /// A large message was sent.
    pub fn large_sent(&mut self) {
        self.large += 1;
    }

    /// A large message has been received.
    pub fn large_done(&mut self) {
        self.large -= 1;
    }

    /// A small message was sent.
    pub fn small_sent(&mut self) {
        self.since_mark += 1;
        if self.since_mark == MARK_EVERY {
            self.since_mark = 0;
            self.marks += 1;
        }
    }

    /// A marked message has been received.
    pub fn mark_done(&mut self) {
        self.marks -= 1;
    }
}

/// Both directions of one channel to one peer. Either receives wait for messages or messages for receives, never both.
#[derive(Debug)]
pub struct ChannelStream<A> {
    /// Receives without a message.
    pub posted: VecDeque<Posted>,
    /// Messages without a receive.
    pub arrived: VecDeque<A>,
    /// The sending direction.
    pub credit: Credit,
}

/// The streams of one peer.
#[derive(Debug)]
pub struct Streams<A> {
    sorted: Vec<(Channel, ChannelStream<A>)>,
    /// Where the one is that was used last: mostly the next to be used.
    last: usize,
}

impl<A> Default for Streams<A> {
    fn default() -> Streams<A> {
        Streams { sorted: Vec::new(), last: 0 }
    }
}

impl<A> Streams<A> {
    /// The stream of a channel.
    #[inline]
    pub fn at(&mut self, channel: Channel) -> &mut ChannelStream<A> {
        if self.sorted.get(self.last).is_none_or(|(last, _)| *last != channel) {
            self.last = self.find(channel);
        }
        &mut self.sorted[self.last].1
    }

    #[inline(never)]
    fn find(&mut self, channel: Channel) -> usize {
        let index = self.sorted.binary_search_by_key(&channel, |(channel, _)| *channel);
        index.unwrap_or_else(|index| {
            let stream = ChannelStream { posted: VecDeque::new(), arrived: VecDeque::new(), credit: Credit::default() };
            self.sorted.insert(index, (channel, stream));
            index
        })
    }

    /// Whether a receive waits for a message.
    pub fn any_posted(&self) -> bool {
        self.sorted.iter().any(|(_, stream)| !stream.posted.is_empty())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.sorted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_stop_when_two_marks_are_open_and_go_on_when_one_is_acknowledged() {
        let mut credit = Credit::default();
        let mut sent = 0;
        while credit.takes_small() {
            credit.small_sent();
            sent += 1;
        }
        assert_eq!(sent, 3 * MARK_EVERY - 1);
        credit.mark_done();
        assert!(credit.takes_small() && credit.next_is_marked());
    }

    #[test]
    fn a_wrong_envelope_names_the_peer_and_both_sides() {
        let envelope = Envelope { channel: 3, sequence: 7, signature: 0xab };
        let posted = Posted::new(1, envelope, Sink::Store(&[]));
        assert!(posted.check(Rank(4), envelope, 0).is_ok());
        let other_operation = posted.check(Rank(4), Envelope { sequence: 8, ..envelope }, 0);
        let other_call = posted.check(Rank(4), Envelope { signature: 0xac, ..envelope }, 0);
        let other_size = posted.check(Rank(4), envelope, 5);
        let told = [
            (other_operation, "a message of operation 8 where one of operation 7"),
            (other_call, "a message of another call than this rank's operation 7"),
            (other_size, "5 bytes where 0 were"),
        ];
        for (outcome, part) in told {
            let Err(Error::InvalidUsage(text)) = outcome else { panic!("a mismatch is an InvalidUsage") };
            assert!(text.starts_with(&format!("rank 4 sent {part}")), "{text}");
        }
    }
}
