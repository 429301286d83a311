//! Messages of one sender, receiver and channel: nothing overtakes within a stream, anything may between two.
//!
//! A message is *eager* (its source is copied some time after it was sent, whether or not a receive is posted) or not
//! (its source is copied when it meets its receive). In both cases the copy is as late as the stream's order and the
//! durations let it be, so that a plan which writes a source too early sends the wrong bytes.
#![forbid(unsafe_code)]

use super::durations::{InFlight, LocalWork};
use super::network::{bytes_in, Network, SimEvent};
use crate::error::Error;
use crate::exec::{Started, Token};
use crate::plan::layout::Piece;
use crate::plan::{Channel, OperandOrder};
use crate::topo::Rank;
use std::collections::VecDeque;

/// Index of a stream.
pub(super) type StreamId = usize;
/// A message's number in its stream; its receive has the same.
pub(super) type MessageNumber = u64;

/// One ordered message stream.
#[derive(Debug)]
pub(super) struct SimStream {
    pub(super) from: Rank,
    pub(super) to: Rank,
    channel: Channel,
    /// From number `written` on.
    messages: VecDeque<Message>,
    /// From number `written` on.
    receives: VecDeque<Receive>,
    /// The first message whose meeting with its receive has not been arranged.
    arranged: MessageNumber,
    /// The first message that has not met its receive.
    delivered: MessageNumber,
    /// The first message that is not in its destination.
    written: MessageNumber,
    /// Whether the sender was refused since the last delivery.
    refused: bool,
    leaves_at: u64,
    arrives_at: u64,
    delivered_at: u64,
    written_at: u64,
    sent_at: u64,
    pub(super) noticed_at: u64,
}

#[derive(Debug)]
struct Message {
    token: Token,
    bytes: usize,
    src: Vec<Piece>,
    data: Vec<u8>,
    eager: bool,
    arrived: bool,
}

#[derive(Debug)]
struct Receive {
    token: Token,
    bytes: usize,
    reduce: Option<(Vec<Piece>, OperandOrder, bool)>,
    dst: Vec<Piece>,
}

impl SimStream {
    fn new(from: Rank, to: Rank, channel: Channel) -> SimStream {
        SimStream {
            from,
            to,
            channel,
            messages: VecDeque::new(),
            receives: VecDeque::new(),
            arranged: 0,
            delivered: 0,
            written: 0,
            refused: false,
            leaves_at: 0,
            arrives_at: 0,
            delivered_at: 0,
            written_at: 0,
            sent_at: 0,
            noticed_at: 0,
        }
    }

    /// The number that the next message will have.
    fn sent(&self) -> MessageNumber {
        self.written + self.messages.len() as u64
    }

    fn message(&mut self, number: MessageNumber) -> &mut Message {
        &mut self.messages[(number - self.written) as usize]
    }
}

impl Network {
    fn stream(&mut self, ends: (Rank, Rank, Channel)) -> StreamId {
        let streams = &mut self.streams;
        *self.stream_of.entry(ends).or_insert_with(|| {
            streams.push(SimStream::new(ends.0, ends.1, ends.2));
            streams.len() - 1
        })
    }

    pub(super) fn start_send(&mut self, token: Token, ends: (Rank, Rank, Channel), src: &[Piece]) -> Started {
        let id = self.stream(ends);
        let stream = &mut self.streams[id];
        if stream.sent() - stream.delivered >= self.capacity as u64 {
            stream.refused = true;
            return Started::Busy;
        }
        let number = stream.sent();
        let (leaves_at, bytes) = (stream.leaves_at, bytes_in(src));
        let eager = self.durations.eager(bytes, &mut self.random);
        let src = self.keep(src);
        self.streams[id].messages.push_back(Message { token, bytes, src, data: Vec::new(), eager, arrived: false });
        if !eager {
            self.arrange(id);
            return Started::Pending;
        }
        let leaves_at = self.soon(leaves_at);
        self.streams[id].leaves_at = leaves_at;
        if leaves_at > self.now {
            self.at(leaves_at, SimEvent::Leave(id, number));
            return Started::Pending;
        }
        self.set_out(id, number);
        Started::Done
    }

    /// An eager message's source is copied, and the sender may soon use it again.
    pub(super) fn leave(&mut self, id: StreamId, number: MessageNumber) {
        self.set_out(id, number);
        let token = self.streams[id].message(number).token;
        self.tell_sender(id, token);
    }

    fn tell_sender(&mut self, id: StreamId, token: Token) {
        let sent_at = self.soon(self.streams[id].sent_at);
        self.streams[id].sent_at = sent_at;
        self.at(sent_at, SimEvent::Complete(self.streams[id].from, token));
    }

    fn set_out(&mut self, id: StreamId, number: MessageNumber) {
        let stream = &mut self.streams[id];
        let from = stream.from;
        let message = stream.message(number);
        if let Some(memory) = &self.memory {
            message.data = memory[from.index()].read(&message.src);
        }
        let arrives_at = self.now + self.travel_ns(id, number);
        let stream = &mut self.streams[id];
        stream.arrives_at = stream.arrives_at.max(arrives_at);
        let arrives_at = stream.arrives_at;
        self.at(arrives_at, SimEvent::Arrive(id, number));
    }

    fn travel_ns(&mut self, id: StreamId, number: MessageNumber) -> u64 {
        let stream = &mut self.streams[id];
        let bytes = stream.message(number).bytes;
        let SimStream { from, to, channel, .. } = *stream;
        let transfer = InFlight { now_ns: self.now, from, to, channel, bytes };
        self.durations.message_ns(&transfer, &mut self.random)
    }

    pub(super) fn arrive(&mut self, id: StreamId, number: MessageNumber) {
        self.streams[id].message(number).arrived = true;
        self.arrange(id);
    }

    pub(super) fn start_recv(
        &mut self,
        token: Token,
        ends: (Rank, Rank, Channel),
        reduce: Option<(&[Piece], OperandOrder, bool)>,
        dst: &[Piece],
    ) -> Started {
        let id = self.stream(ends);
        let reduce = reduce.map(|(local, order, finish)| (self.keep(local), order, finish));
        let receive = Receive { token, bytes: bytes_in(dst), reduce, dst: self.keep(dst) };
        let stream = &mut self.streams[id];
        stream.receives.push_back(receive);
        // A message that is here already may be taken at once, unless one before it is still being written.
        let alone = stream.receives.len() == 1 && stream.messages.front().is_some_and(|message| message.arrived);
        if alone && stream.noticed_at <= self.now && self.soon(0) == self.now {
            let number = self.streams[id].written;
            self.streams[id].arranged += 1;
            if self.meet(id, number) {
                match self.take_in_ns(id, number) {
                    0 => {
                        self.write(id, number);
                        return Started::Done;
                    }
                    time => self.write_at(id, number, self.now + time),
                }
            }
            return Started::Pending;
        }
        self.arrange(id);
        Started::Pending
    }

    /// Lets the messages that can meet their receives do so, in order.
    fn arrange(&mut self, id: StreamId) {
        loop {
            let stream = &mut self.streams[id];
            let number = stream.arranged;
            if number >= stream.sent() || number >= stream.written + stream.receives.len() as u64 {
                return;
            }
            let Message { eager, arrived, .. } = *stream.message(number);
            if eager && !arrived {
                return;
            }
            let travel = if eager { 0 } else { self.travel_ns(id, number) };
            let stream = &mut self.streams[id];
            stream.arranged += 1;
            stream.delivered_at = stream.delivered_at.max(self.now + travel);
            let delivered_at = stream.delivered_at;
            self.at(delivered_at, SimEvent::Deliver(id, number));
        }
    }

    /// A message meets its receive; the destination is written some time later.
    pub(super) fn deliver(&mut self, id: StreamId, number: MessageNumber) {
        if self.meet(id, number) {
            let combined_at = self.now + self.take_in_ns(id, number);
            let written_at = self.soon(self.streams[id].written_at.max(combined_at));
            self.write_at(id, number, written_at);
        }
    }

    fn write_at(&mut self, id: StreamId, number: MessageNumber, time: u64) {
        self.streams[id].written_at = time;
        self.at(time, SimEvent::Write(id, number));
    }

    /// How long it takes to take in a message that has met its receive.
    fn take_in_ns(&mut self, id: StreamId, number: MessageNumber) -> u64 {
        let stream = &self.streams[id];
        let receive = &stream.receives[(number - stream.written) as usize];
        let operands = 1 + usize::from(receive.reduce.is_some());
        let work =
            LocalWork { now_ns: self.now, rank: stream.to, bytes: receive.bytes, operands, encoded: 0, decoded: 0 };
        self.durations.take_in_ns(&work, stream.from, &mut self.random)
    }

    /// False when nothing comes of it: the sender is gone, or the sizes differ.
    fn meet(&mut self, id: StreamId, number: MessageNumber) -> bool {
        let stream = &mut self.streams[id];
        let (from, to) = (stream.from, stream.to);
        let asked = stream.receives[(number - stream.written) as usize].bytes;
        let Message { eager, bytes, token, .. } = *stream.message(number);
        if bytes != asked {
            let text = format!("a message of {bytes} bytes from rank {from} where {asked} were expected");
            self.fail(to, Error::InvalidUsage(text));
            return false;
        }
        if !eager && !self.stations[from.index()].alive {
            return false;
        }
        stream.delivered += 1;
        let refused = std::mem::take(&mut stream.refused);
        if !eager {
            let message = stream.message(number);
            if let Some(memory) = &self.memory {
                message.data = memory[from.index()].read(&message.src);
            }
            self.tell_sender(id, token);
        }
        if refused {
            let retry = self.soon(0);
            self.at(retry, SimEvent::Poll(from));
        }
        true
    }

    /// Writes the destination of the oldest message and forgets it. Returns the receive's token.
    pub(super) fn write(&mut self, id: StreamId, number: MessageNumber) -> Token {
        let stream = &mut self.streams[id];
        debug_assert_eq!(number, stream.written, "messages of a stream are written in order");
        stream.written += 1;
        let to = stream.to;
        let (Some(message), Some(receive)) = (stream.messages.pop_front(), stream.receives.pop_front()) else {
            unreachable!("a message is written once, after it met its receive");
        };
        let Some(memory) = &mut self.memory else { return receive.token };
        let memory = &mut memory[to.index()];
        let mut result = message.data;
        if let Some((local, order, finish)) = receive.reduce {
            result = self.arithmetic.combine(memory.read(&local), result, order);
            if finish {
                self.arithmetic.finish(&mut result);
            }
        }
        if !memory.write(&receive.dst, &result) {
            self.fail(to, Error::Internal(String::from("a receive and reduction whose lists differ in size")));
        }
        receive.token
    }
}
