//! Sends and receives that wait for nothing but their partners, on communicators of `strataCommInitHost`.
//!
//! Elsewhere the operations of a communicator run one after another. Here only collectives do, and messages have an order
//! of their own for each peer and direction: that of the calls. A message is numbered when it is called, handed in when its
//! stream comes to it, and posted when all before it in its order have been; so neither a message the other way, nor one
//! of another peer, nor a collective holds it up. Whoever polls the engine posts and completes the messages of all
//! ([`super::engine_watch`]). On a stream a message may go on beside those before it ([`super::joining`]).
#![forbid(unsafe_code)]

use super::device::Device;
use super::live;
use super::messages::{post, timed_out};
use super::{Direction, Message};
use crate::error::Result;
use crate::exec::{Started, Token};
use crate::topo::Rank;
use crate::transport::Router;
use std::collections::BTreeMap;

/// Tokens of these messages have it; those of plans and of messages in turn do not.
const MARK: Token = 1 << 63;

/// What a communicator's engine knows of these messages.
#[derive(Debug, Default)]
pub struct IndependentMessages {
    /// How many have been posted, by direction and peer.
    posted: BTreeMap<(Direction, Rank), u64>,
    /// Handed in and not posted, in their orders; none is empty.
    waiting: BTreeMap<(Direction, Rank), BTreeMap<u64, (Token, Message)>>,
    issued: Token,
    /// How many have been handed in and have not completed.
    open: usize,
    /// Completed, and not yet known to those who wait for them.
    finished: Vec<Token>,
    /// Whether some of these are new.
    has_news: bool,
    /// Completed operations of plans and of messages in turn, not yet known to those.
    others: Vec<Token>,
    /// Bytes of these messages that have been sent to other nodes.
    sent_far: u64,
}

impl IndependentMessages {
    /// Hands messages in. Those to oneself are copied at once, in order; the launch has seen to it that each has its partner.
    pub fn begin(&mut self, messages: Vec<Message>, me: Rank, device: &mut dyn Device) -> Result<IndependentBatch> {
        let (own, others): (Vec<Message>, Vec<Message>) = messages.into_iter().partition(|message| message.peer == me);
        let of = |direction| own.iter().filter(move |message| message.direction == direction);
        for (send, recv) in of(Direction::Send).zip(of(Direction::Recv)) {
            device.copy(None, send.data, recv.data)?;
            device.step(MARK);
        }
        let mut open = Vec::with_capacity(others.len());
        for message in others {
            self.issued += 1;
            let token = MARK | self.issued;
            let order = self.waiting.entry((message.direction, message.peer)).or_default();
            order.insert(message.sequence, (token, message));
            open.push((token, message));
        }
        self.open += open.len();
        Ok(IndependentBatch { open, moved_ns: live::now_ns() })
    }

    /// Posts what can be posted and collects what has completed. Whether anything moved.
    pub fn poll(&mut self, device: &mut dyn Device, transport: &mut Router) -> Result<bool> {
        let (before, sent_before) = (self.finished.len(), transport.sent_far());
        let posted = self.post(device, transport);
        self.sent_far += transport.sent_far() - sent_before;
        let moved = posted?;
        device.poll(transport, &mut self.others)?;
        let finished = &mut self.finished;
        self.others.retain(|&token| {
            let is_other = token & MARK == 0;
            if !is_other {
                finished.push(token);
            }
            is_other
        });
        let finishes = self.finished.len() - before;
        self.open -= finishes;
        self.has_news |= finishes > 0;
        Ok(moved || finishes > 0)
    }

    fn post(&mut self, device: &mut dyn Device, transport: &mut Router) -> Result<bool> {
        let (mut moved, mut outcome) = (false, Ok(()));
        let (posted, finished) = (&mut self.posted, &mut self.finished);
        self.waiting.retain(|order, messages| {
            let posted = posted.entry(*order).or_default();
            while let (true, Some(next)) = (outcome.is_ok(), messages.first_entry()) {
                if *next.key() != *posted + 1 {
                    break;
                }
                let (token, message) = *next.get();
                match post(device, transport, token, &message, message.sequence) {
                    Ok(Started::Busy) => break,
                    Ok(started) => {
                        finished.extend((started == Started::Done).then_some(token));
                        (*posted, moved) = (message.sequence, true);
                        next.remove();
                    }
                    Err(error) => outcome = Err(error),
                }
            }
            !messages.is_empty()
        });
        outcome.map(|()| moved)
    }

    /// Bytes of these messages that have been sent to other nodes.
    pub fn sent_far(&self) -> u64 {
        self.sent_far
    }

    /// Whether messages have been handed in that have not completed.
    pub fn are_open(&self) -> bool {
        self.open > 0
    }

    /// Gives back what else has completed.
    pub fn take_others(&mut self, done: &mut Vec<Token>) {
        done.append(&mut self.others);
    }

    /// Whether messages have completed since this was asked last, and those who wait for them do not know.
    pub fn has_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news) && !self.finished.is_empty()
    }

    /// Whether a message has been posted, or waits for nothing but its peer.
    fn is_due(&self, message: &Message) -> bool {
        let posted = self.posted.get(&(message.direction, message.peer)).copied().unwrap_or_default();
        message.sequence <= posted + 1
    }

    /// Forgets everything.
    pub fn cancel(&mut self) {
        self.waiting.clear();
        self.finished.clear();
        self.has_news = false;
        self.others.clear();
    }
}

/// The messages of one group, and of others that have joined it, that have not completed.
#[derive(Debug)]
pub struct IndependentBatch {
    open: Vec<(Token, Message)>,
    moved_ns: u64,
}

impl IndependentBatch {
    /// Notes what has completed. Whether all has, and whether anything had not before.
    pub fn poll(&mut self, messages: &mut IndependentMessages, limit_ns: u64) -> Result<(bool, bool)> {
        let before = self.open.len();
        if !messages.finished.is_empty() {
            self.open.retain(|(token, _)| match messages.finished.iter().position(|finished| finished == token) {
                Some(index) => {
                    messages.finished.swap_remove(index);
                    false
                }
                None => true,
            });
        }
        let moved = self.open.len() < before;
        // What waits for a message of this rank that its stream has not come to takes no peer's time.
        if moved || !self.open.iter().any(|(_, message)| messages.is_due(message)) {
            self.moved_ns = live::now_ns();
        } else if limit_ns > 0 && !self.open.is_empty() {
            timed_out(self.moved_ns, limit_ns, || self.waiting_for())?;
        }
        Ok((self.open.is_empty(), moved))
    }

    /// Adds messages that have begun.
    pub fn add(&mut self, mut more: IndependentBatch) {
        self.open.append(&mut more.open);
    }

    /// Whether messages that are behind these on their stream need not wait for them: sends where these only send, and
    /// receives into memory that these do not use. No rank can tell, since a send may end before it is received in any case; but
    /// that a rank sends may tell another one what it has received before.
    pub fn lets_in(&self, next: &[Message], me: Rank) -> bool {
        let receives = self.open.iter().any(|(_, message)| message.direction == Direction::Recv);
        next.iter().all(|message| match message.direction {
            _ if message.peer == me => false,
            Direction::Send => !receives,
            Direction::Recv => !self.open.iter().any(|(_, open)| open.data.overlaps(message.data)),
        })
    }

    /// The peers of messages that are still open.
    pub fn waiting_for(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.open.iter().map(|(_, message)| message.peer).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
