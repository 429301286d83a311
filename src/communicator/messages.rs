//! The sends and receives of one group, all in progress at once.
#![forbid(unsafe_code)]

use super::device::Device;
use super::live;
use super::{Direction, Message};
use crate::bootstrap::rendezvous::name_ranks;
use crate::error::{Error, Result, ShortResult};
use crate::exec::{Started, Token};
use crate::memory::DeviceRegion;
use crate::plan::Channel;
use crate::topo::Rank;
use crate::transport::{Envelope, Router, Sink};

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

    /// The number of the next message, from 1.
    pub fn next(&mut self, direction: Direction, peer: Rank) -> u64 {
        let counter = self.at(direction, peer);
        *counter += 1;
        *counter
    }

    /// Takes a message's number back if it is the last one; whether it was.
    pub fn take_back(&mut self, direction: Direction, peer: Rank, number: u64) -> bool {
        let counter = self.at(direction, peer);
        let is_last = *counter == number;
        *counter -= u64::from(is_last);
        is_last
    }

    fn at(&mut self, direction: Direction, peer: Rank) -> &mut u64 {
        match direction {
            Direction::Send => &mut self.sent[peer.index()],
            Direction::Recv => &mut self.received[peer.index()],
        }
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
    /// What this rank sends itself: from where, to where, and whether that has been started.
    own: Vec<(DeviceRegion, DeviceRegion, State)>,
    open: usize,
    done: Vec<Token>,
    moved_ns: u64,
}

impl Messages {
    /// Begins `messages` of rank `me`, each in parts of at most so many bytes, which are the same on all ranks. Messages
    /// to oneself are copied, in order; the launch has seen to it that each has its partner.
    pub fn begin(messages: Vec<Message>, me: Rank, part_bytes: usize, counters: &mut Counters) -> Messages {
        let (own, others): (Vec<Message>, Vec<Message>) = messages.into_iter().partition(|message| message.peer == me);
        let (sends, recvs): (Vec<Message>, Vec<Message>) =
            own.into_iter().partition(|message| message.direction == Direction::Send);
        let own: Vec<_> = sends.iter().zip(&recvs).map(|(send, recv)| (send.data, recv.data, State::Waiting)).collect();
        let mut list = Vec::with_capacity(others.len());
        for message in others {
            for at in (0..message.data.len()).step_by(part_bytes) {
                let data = message.data.part(at, part_bytes.min(message.data.len() - at));
                let sequence = counters.next(message.direction, message.peer);
                list.push((Message { data, ..message }, sequence, State::Waiting));
            }
        }
        Messages { open: list.len() + own.len(), list, own, done: Vec::new(), moved_ns: live::now_ns() }
    }

    /// One message to or from another rank that has its number and has been posted, or waits to be.
    pub fn of_one(message: Message, sequence: u64, is_posted: bool) -> Messages {
        let state = if is_posted { State::Posted } else { State::Waiting };
        let list = vec![(message, sequence, state)];
        Messages { open: 1, list, own: Vec::new(), done: Vec::new(), moved_ns: live::now_ns() }
    }

    /// Copies what this rank sends itself; one after the other, since they may overlap.
    fn copy_own(&mut self, device: &mut dyn Device) -> Result<()> {
        for (index, (from, to, state)) in self.own.iter_mut().enumerate() {
            match state {
                State::Done => continue,
                State::Posted => break,
                State::Waiting => {}
            }
            device.copy(None, *from, *to)?;
            match device.step((self.list.len() + index) as Token) {
                Started::Done => {
                    *state = State::Done;
                    self.open -= 1;
                }
                _ => {
                    *state = State::Posted;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Posts what can be posted and collects what has completed. Whether all is done, and whether anything moved.
    pub fn poll(&mut self, device: &mut dyn Device, transport: &mut Router, limit_ns: u64) -> Result<(bool, bool)> {
        let before = self.open;
        self.copy_own(device)?;
        let mut posted = false;
        let mut refused = Vec::new();
        for (index, (message, sequence, state)) in self.list.iter_mut().enumerate() {
            let stream = (message.direction, message.peer);
            if *state != State::Waiting || refused.contains(&stream) {
                continue;
            }
            match post(device, transport, index as Token, message, *sequence)? {
                Started::Busy => refused.push(stream),
                Started::Pending => (*state, posted) = (State::Posted, true),
                Started::Done => {
                    *state = State::Done;
                    self.open -= 1;
                }
            }
        }
        self.done.clear();
        device.poll(transport, &mut self.done)?;
        for &token in &self.done {
            let index = token as usize;
            let state = match self.list.get_mut(index) {
                Some((_, _, state)) => Some(state),
                None => self.own.get_mut(index - self.list.len()).map(|(_, _, state)| state),
            };
            *state.ok_or_else(|| Error::Internal(format!("token {token} is not a message")))? = State::Done;
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
        match self.open {
            0 => Ok(()),
            _ => timed_out(self.moved_ns, limit_ns, || self.waiting_for()),
        }
    }

    /// A rank that we wait to send to without receiving from it, and the bytes.
    pub fn stuck_send(&self) -> Option<(Rank, usize)> {
        let open = || self.list.iter().filter(|(_, _, state)| *state != State::Done).map(|(message, _, _)| message);
        let receives = |peer| open().any(|message| message.direction == Direction::Recv && message.peer == peer);
        let first = open().find(|message| !receives(message.peer))?.peer;
        Some((first, open().filter(|message| message.peer == first).map(|message| message.data.len()).sum()))
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

/// An error if nothing has moved since then for so long.
pub(super) fn timed_out(since_ns: u64, limit_ns: u64, waiting_for: impl FnOnce() -> Vec<Rank>) -> Result<()> {
    let waited = live::now_ns() - since_ns;
    if waited < limit_ns {
        return Ok(());
    }
    let ranks: Vec<u32> = waiting_for().iter().map(|rank| rank.0).collect();
    let (ms, ranks) = (waited / 1_000_000, name_ranks(&ranks));
    Err(Error::Timeout(format!("send/receive made no progress for {ms} ms, waiting for {ranks}")))
}

/// Sends or takes a short message that comes by itself; `Busy` where it has to be posted.
#[inline]
pub(super) fn exchange_short(
    device: &mut dyn Device,
    transport: &mut Router,
    message: &Message,
    sequence: u64,
) -> ShortResult<Started> {
    let envelope = Envelope { channel: CHANNEL, sequence, signature: SIGNATURE };
    match message.direction {
        Direction::Send => device.send_short(transport, message.peer, envelope, message.data),
        Direction::Recv => device.recv_short(transport, message.peer, envelope, message.data),
    }
}

/// Posts a message.
pub(super) fn post(
    device: &mut dyn Device,
    transport: &mut Router,
    token: Token,
    message: &Message,
    sequence: u64,
) -> Result<Started> {
    let envelope = Envelope { channel: CHANNEL, sequence, signature: SIGNATURE };
    match message.direction {
        Direction::Send => device.send(transport, token, message.peer, envelope, &[message.data]),
        Direction::Recv => device.recv(transport, token, message.peer, envelope, Sink::Store(&[message.data])),
    }
}
