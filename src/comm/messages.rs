//! The sends and receives of one group, all in progress at once.
#![forbid(unsafe_code)]

use super::live;
use super::service::room::name_ranks;
use super::{Direction, Message};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::plan::Channel;
use crate::topo::Rank;
use crate::transport::{Envelope, Sink, Transport};

/// The stream that `ncclSend` and `ncclRecv` use; plans never reach this number.
pub const CHANNEL: Channel = Channel::MAX;
const SIGNATURE: u32 = 0x5032_5000;

/// How many messages of each peer have been sent and received so far.
#[derive(Debug, Default)]
pub struct Counters {
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl Counters {
    /// Counters for `nranks` peers.
    pub fn new(nranks: usize) -> Counters {
        Counters { sent: vec![0; nranks], received: vec![0; nranks] }
    }

    fn next(&mut self, direction: Direction, peer: Rank) -> u64 {
        let counter = match direction {
            Direction::Send => &mut self.sent[peer.index()],
            Direction::Recv => &mut self.received[peer.index()],
        };
        *counter += 1;
        *counter
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Posted,
    Done,
}

/// Messages being sent and received.
#[derive(Debug)]
pub struct Messages {
    list: Vec<(Message, u64, State)>,
    open: usize,
    done: Vec<Token>,
    moved_ns: u64,
}

impl Messages {
    /// Begins `messages` of rank `me`. Messages to oneself are copied here, in order; the launch has seen to it that each
    /// has its partner.
    pub fn begin(messages: Vec<Message>, me: Rank, counters: &mut Counters) -> Messages {
        let (own, others): (Vec<Message>, Vec<Message>) = messages.into_iter().partition(|message| message.peer == me);
        let (sends, recvs): (Vec<Message>, Vec<Message>) =
            own.into_iter().partition(|message| message.direction == Direction::Send);
        for (send, recv) in sends.iter().zip(&recvs) {
            recv.data.copy_from(send.data);
        }
        let number = |message: Message| {
            let sequence = counters.next(message.direction, message.peer);
            (message, sequence, State::Waiting)
        };
        let list: Vec<_> = others.into_iter().map(number).collect();
        Messages { open: list.len(), list, done: Vec::new(), moved_ns: live::now_ns() }
    }

    /// Posts what can be posted and collects what has completed. Whether all is done, and whether anything moved.
    pub fn poll(&mut self, transport: &mut dyn Transport, limit_ns: u64) -> Result<(bool, bool)> {
        let before = self.open;
        let mut posted = false;
        let mut refused = Vec::new();
        for (index, (message, sequence, state)) in self.list.iter_mut().enumerate() {
            let stream = (message.direction, message.peer);
            if *state != State::Waiting || refused.contains(&stream) {
                continue;
            }
            match post(transport, index as Token, message, *sequence)? {
                Started::Busy => refused.push(stream),
                Started::Pending => (*state, posted) = (State::Posted, true),
                Started::Done => {
                    *state = State::Done;
                    self.open -= 1;
                }
            }
        }
        self.done.clear();
        transport.poll(&mut self.done)?;
        for &token in &self.done {
            let entry = self.list.get_mut(token as usize);
            let (_, _, state) = entry.ok_or_else(|| Error::Internal(format!("token {token} is not a message")))?;
            *state = State::Done;
            self.open -= 1;
        }
        let moved = posted || self.open < before;
        self.watch(moved, limit_ns)?;
        Ok((self.open == 0, moved))
    }

    fn watch(&mut self, moved: bool, limit_ns: u64) -> Result<()> {
        if limit_ns == 0 || moved {
            self.moved_ns = if moved { live::now_ns() } else { self.moved_ns };
            return Ok(());
        }
        let waited = live::now_ns() - self.moved_ns;
        if self.open == 0 || waited < limit_ns {
            return Ok(());
        }
        let ranks: Vec<u32> = self.waiting_for().iter().map(|rank| rank.0).collect();
        let (ms, ranks) = (waited / 1_000_000, name_ranks(&ranks));
        Err(Error::Timeout(format!("send/receive made no progress for {ms} ms, waiting for {ranks}")))
    }

    /// The peers of messages that are still open.
    pub fn waiting_for(&self) -> Vec<Rank> {
        let open = self.list.iter().filter(|(_, _, state)| *state != State::Done);
        let mut ranks: Vec<Rank> = open.map(|(message, _, _)| message.peer).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

fn post(transport: &mut dyn Transport, token: Token, message: &Message, sequence: u64) -> Result<Started> {
    let envelope = Envelope { channel: CHANNEL, sequence, signature: SIGNATURE };
    match message.direction {
        Direction::Send => transport.send(token, message.peer, envelope, &[message.data]),
        Direction::Recv => transport.recv(token, message.peer, envelope, Sink::Store(&[message.data])),
    }
}
