//! One connection: a queue of frames to be written, or a buffer of bytes read ahead.
//!
//! A connection carries frames from the rank that made it, and the first one of a pair in the end both ways. Nothing blocks. Bodies of large messages go straight from the sender's pieces to the socket, and from the socket to
//! the receiver's pieces; only headers, small messages and data to be combined pass through the buffer.
#![forbid(unsafe_code)]

use super::peer::wide::ConnectionPace;
use crate::exec::Token;
use crate::fork::Unshared;
use crate::memory::vectored::{self, Delivery};
use crate::memory::{Arena, Bytes, Region};
use crate::transport::header::HEADER;
use crate::transport::target::{Pieces, Target};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;

/// Bytes read ahead at most. A small message with its header fits.
pub const BUFFER: usize = 128 << 10;
/// A body with at least so many bytes to come is read past the buffer.
const DIRECT: usize = 16 << 10;
/// Reads at a time from a connection whose bytes nobody wants any more.
const MAX_DRAINED: usize = 64;
/// Regions given to the kernel at a time.
const MAX_RUNS: usize = 60;

/// The bytes of a frame to be written, after its header.
#[derive(Debug)]
pub enum Body {
    /// None, or bytes of our own.
    Owned(Vec<u8>),
    /// A part of the message with this number, in its sender's memory.
    Part {
        /// The message's number.
        id: u64,
        /// Where in the message.
        offset: usize,
        /// How many bytes.
        len: usize,
    },
    /// A part of the message with this number, as it lies coded in the connection's own buffer. One frame at a time is such.
    Coded {
        /// The message's number.
        id: u64,
        /// How many bytes of the message it stands for.
        original: usize,
        /// How many bytes it has.
        len: usize,
    },
}

impl Body {
    /// Bytes of it that count as [`queued`](Connection::queued): neither a message's nor those that are coded but once.
    fn queued(&self) -> usize {
        if let Body::Owned(bytes) = self {
            bytes.len()
        } else {
            0
        }
    }
}

/// A frame to be written.
#[derive(Debug)]
struct Outgoing {
    head: [u8; HEADER],
    body: Body,
    written: usize,
    /// Reported once the socket has the whole frame.
    token: Option<Token>,
}

/// Why a connection is of no use any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The peer has closed it, between two frames.
    Closed,
    /// It failed, between two frames.
    Reset(String),
    /// It failed or was closed within a frame.
    Broken(String),
}

/// Bytes of a granted message that are being read.
#[derive(Debug, Clone, Copy)]
pub struct Inbound {
    /// The message's number.
    pub id: u64,
    /// Where in the message the next byte belongs.
    pub offset: usize,
    /// Bytes to come.
    pub left: usize,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    /// The socket.
    pub socket: Unshared<TcpStream>,
    /// Whether the peer's frames come here.
    pub reads: bool,
    /// Whether our frames go here.
    pub writes: bool,
    /// Frames that came here wait for those on another connection.
    pub is_held: bool,
    /// Whether the poller shall tell when the socket can be written.
    pub watches_output: bool,
    /// The data frame that is being read.
    pub inbound: Option<Inbound>,
    /// Set once there is nothing more to read, so that the connection is of no use any more.
    pub ended: Option<Ended>,
    /// Why nothing can be written any more. The peer's own connections may still have something to read: one that leaves
    /// closes its end when we have yet to read its last messages, and does not care for our answers.
    pub output_lost: Option<String>,
    /// Whether it goes by another NIC than the rank's own, which need not reach the peer.
    pub is_further: bool,
    /// Whether the peer's system has answered on it; looked at where it is a further one.
    pub has_answered: bool,
    /// How much of wide messages it takes.
    pub pace: ConnectionPace,
    /// Bytes that have been read from it.
    pub received_bytes: u64,
    output: VecDeque<Outgoing>,
    queued: usize,
    /// Frames in the queue whose tokens are to be reported.
    owed: usize,
    /// The body of a coded frame to be written; empty until there is one.
    pub coded: Vec<u8>,
    /// What it had delivered when that was last asked.
    delivery: Delivery,
    buffer: Arena,
    start: usize,
    end: usize,
    /// The last call took less than it had room for: the socket has had no more, and is not asked again at once.
    drained: bool,
}

impl Connection {
    /// A connection that this rank writes, and reads where it is for both.
    pub fn outgoing(socket: Unshared<TcpStream>, reads: bool) -> Connection {
        Connection::new(socket, reads, true)
    }

    /// A connection that this rank reads.
    pub fn incoming(socket: Unshared<TcpStream>) -> Connection {
        Connection::new(socket, true, false)
    }

    /// A connection over a socket that does not block.
    fn new(socket: Unshared<TcpStream>, reads: bool, writes: bool) -> Connection {
        Connection {
            socket,
            reads,
            writes,
            is_held: false,
            watches_output: false,
            inbound: None,
            ended: None,
            output_lost: None,
            is_further: false,
            has_answered: false,
            pace: ConnectionPace::default(),
            received_bytes: 0,
            output: VecDeque::new(),
            queued: 0,
            owed: 0,
            coded: Vec::new(),
            delivery: Delivery::default(),
            buffer: Arena::new(if reads { BUFFER } else { 0 }),
            start: 0,
            end: 0,
            drained: false,
        }
    }

    /// Whether something of a message may be on it, so that its failure is the peer's.
    pub fn counts(&self) -> bool {
        !self.is_further || self.has_answered
    }

    /// Whether it is one by another NIC that did not reach the peer.
    pub fn is_unreached(&self) -> bool {
        !self.counts() && self.output_lost.is_some()
    }

    /// Whether it can take a part of a message now. By a further NIC it is used once the peer's system has answered.
    pub fn takes_parts(&mut self) -> bool {
        if !self.writes || self.output_lost.is_some() || !self.is_flushed() {
            return false;
        }
        if !self.counts() {
            self.has_answered = vectored::unacknowledged(&*self.socket).is_ok_and(|bytes| bytes == 0);
        }
        self.counts()
    }

    /// Whether nothing waits to be written.
    pub fn is_flushed(&self) -> bool {
        self.output.is_empty()
    }

    /// Whether nothing waits to be written and the connection stands.
    pub fn is_idle(&self) -> bool {
        self.output.is_empty() && !self.watches_output && self.ended.is_none() && self.output_lost.is_none()
    }

    /// Bytes of our own that wait to be written.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Whether a frame in the queue has a token to be reported.
    pub fn owes(&self) -> bool {
        self.owed > 0
    }

    /// Appends a frame.
    pub fn push(&mut self, head: [u8; HEADER], body: Body) {
        if self.output_lost.is_some() {
            return;
        }
        self.queued += HEADER + body.queued();
        self.output.push_back(Outgoing { head, body, written: 0, token: None });
    }

    /// Appends a frame whose body lies in pieces that are free again when this returns: writes what the socket takes,
    /// keeps a copy of the rest. True when the socket took all of it; else `token` is reported when it has.
    pub fn push_copy(&mut self, head: [u8; HEADER], src: &[Region], token: Option<Token>) -> bool {
        if self.output_lost.is_some() {
            return false;
        }
        let mut written = 0;
        if self.output.is_empty() {
            // An error shows again when the queue is flushed.
            written = vectored::send(&*self.socket, [&head, &[]], src).unwrap_or(0);
        }
        let len: usize = src.iter().map(Region::len).sum();
        if written == HEADER + len {
            return true;
        }
        let mut bytes = vec![0; len];
        let mut done = 0;
        for region in src {
            region.read(&mut bytes[done..done + region.len()]);
            done += region.len();
        }
        self.queued += HEADER + len;
        self.owed += usize::from(token.is_some());
        self.output.push_back(Outgoing { head, body: Body::Owned(bytes), written, token });
        false
    }

    /// Writes what the socket takes. `message` gives the pieces of a message by its number; `written` is told how many
    /// bytes of which message have left; `done` gets the tokens of frames that have left.
    pub fn flush<'a>(
        &mut self,
        message: impl Fn(u64) -> Option<&'a Pieces>,
        mut written: impl FnMut(u64, usize),
        done: &mut Vec<Token>,
    ) {
        while let Some(frame) = self.output.front_mut() {
            let mut parts: SmallVec<[Region; 8]> = SmallVec::new();
            let in_body = frame.written.saturating_sub(HEADER);
            let head = &frame.head[frame.written.min(HEADER)..];
            let (owned, total): (&[u8], usize) = match &frame.body {
                Body::Owned(bytes) => (&bytes[in_body..], HEADER + bytes.len()),
                Body::Part { id, offset, len } => {
                    let Some(pieces) = message(*id) else {
                        return self.lose_output("a message was forgotten while it was being sent".into());
                    };
                    pieces.runs(*offset + in_body, *len - in_body, MAX_RUNS, &mut parts);
                    (&[], HEADER + *len)
                }
                Body::Coded { len, .. } => (&self.coded[in_body..*len], HEADER + *len),
            };
            match vectored::send(&*self.socket, [head, owned], &parts) {
                Ok(sent) => {
                    frame.written += sent;
                    match frame.body {
                        Body::Part { id, .. } => written(id, frame.written.saturating_sub(HEADER) - in_body),
                        Body::Coded { id, original, .. } if frame.written == total => written(id, original),
                        _ => {}
                    }
                    if frame.written == total {
                        self.queued -= HEADER + frame.body.queued();
                        if let Some(token) = frame.token {
                            self.owed -= 1;
                            done.push(token);
                        }
                        self.output.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    return self.lose_output(error.to_string());
                }
            }
        }
    }

    /// Nothing can be written any more. What is owed stays owed: nobody may take it for sent.
    pub fn lose_output(&mut self, why: String) {
        self.output_lost.get_or_insert(why);
        self.output.clear();
        self.queued = 0;
    }

    /// Reads and forgets what comes, for the end that may follow it: this rank has left, and wants nothing more.
    pub fn drain(&mut self) {
        if !self.reads {
            return self.hear_end();
        }
        let mut bytes = [0; 8 << 10];
        for _ in 0..MAX_DRAINED {
            match (&*self.socket).read(&mut bytes) {
                Ok(0) => return self.lose_output("it has closed its connections".into()),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                Err(error) => return self.lose_output(error.to_string()),
            }
        }
    }

    /// The peer says nothing on a connection that it only reads, so whatever comes on it is its end.
    pub fn hear_end(&mut self) {
        match (&*self.socket).read(&mut [0; 16]) {
            Ok(0) => self.lose_output("it has closed its connections".into()),
            Ok(_) => self.lose_output("it wrote on a connection that it only reads".into()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => self.lose_output(error.to_string()),
        }
    }

    /// Bytes that the peer's system does not have yet.
    pub fn under_way(&self) -> usize {
        vectored::unacknowledged(&*self.socket).unwrap_or(0) + self.queued
    }

    /// The same, or `None` when it never will.
    pub fn undelivered(&self) -> Option<usize> {
        let unacknowledged = vectored::unacknowledged(&*self.socket).ok();
        unacknowledged.filter(|_| self.output_lost.is_none()).map(|bytes| bytes + self.queued)
    }

    /// Reads ahead; false when the socket has nothing now, which it says once after a call that emptied the socket.
    pub fn fill(&mut self) -> bool {
        if std::mem::take(&mut self.drained) {
            return false;
        }
        let all = self.buffer.region();
        if self.start > 0 {
            let held = self.end - self.start;
            all.part(0, held).copy_from(all.part(self.start, held));
            (self.start, self.end) = (0, held);
        }
        if self.end == BUFFER {
            return true;
        }
        let room = BUFFER - self.end;
        let got = vectored::receive(&*self.socket, &[all.part(self.end, room)]);
        let got = self.received(got, room);
        self.end += got.unwrap_or(0);
        got.is_some()
    }

    /// What came of a call that receives, with so much room: how many bytes, or `None` where there are none now or any more.
    fn received(&mut self, got: std::io::Result<usize>, room: usize) -> Option<usize> {
        match got {
            Ok(0) => self.end(None),
            Ok(got) => {
                self.drained = got < room;
                self.received_bytes += got as u64;
                Some(got)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => None,
            Err(error) => self.end(Some(error.to_string())),
        }
    }

    fn end(&mut self, error: Option<String>) -> Option<usize> {
        let between_frames = self.start == self.end && self.inbound.is_none();
        self.ended = Some(match error {
            None if between_frames => Ended::Closed,
            Some(why) if between_frames => Ended::Reset(why),
            why => Ended::Broken(why.unwrap_or_else(|| "it left in the middle of a message".into())),
        });
        if self.writes {
            self.lose_output("it has closed its connections".into());
        }
        None
    }

    /// Whether so many bytes have been read ahead.
    pub fn holds(&self, len: usize) -> bool {
        self.end - self.start >= len
    }

    /// The first `len` bytes that were read ahead, if they are there.
    pub fn peek(&mut self, len: usize) -> Option<Bytes<'_>> {
        (self.end - self.start >= len).then(|| self.buffer.region().part(self.start, len))
    }

    /// The buffer of what was read ahead, and where in it the next `len` bytes begin, if they are there. To be
    /// [given back](Self::give_back) before anything else is read.
    pub fn lend(&mut self, len: usize) -> Option<(Arena, usize)> {
        (self.end - self.start >= len).then(|| (std::mem::replace(&mut self.buffer, Arena::new(0)), self.start))
    }

    /// Takes the buffer back.
    pub fn give_back(&mut self, buffer: Arena) {
        self.buffer = buffer;
    }

    /// What it has delivered since that was last asked; nothing where the system does not count it.
    pub fn delivered(&mut self) -> Delivery {
        let now = vectored::delivered(&*self.socket).unwrap_or(self.delivery);
        now.since(std::mem::replace(&mut self.delivery, now))
    }

    /// Drops the first bytes that were read ahead.
    pub fn skip(&mut self, len: usize) {
        self.start += len;
    }

    /// Reads bytes of the data frame into their target: how many, or `None` when the socket has nothing now.
    pub fn read_data(&mut self, target: &Target) -> Option<usize> {
        let Inbound { offset, left, .. } = self.inbound?;
        let grain = target.grain();
        let held = (self.end - self.start).min(left);
        let whole = held - held % grain;
        if whole > 0 {
            target.consume(offset, self.buffer.region().part(self.start, whole));
            self.start += whole;
            return Some(self.took(whole));
        }
        if let (Some(pieces), true) = (target.store(), left >= DIRECT) {
            let mut runs: SmallVec<[Region; 8]> = SmallVec::new();
            if std::mem::take(&mut self.drained) {
                return None;
            }
            let room = pieces.runs(offset, left, MAX_RUNS, &mut runs);
            let got = vectored::receive(&*self.socket, &runs);
            let got = self.received(got, room)?;
            return Some(self.took(got));
        }
        self.fill().then_some(0)
    }

    fn took(&mut self, bytes: usize) -> usize {
        if let Some(inbound) = &mut self.inbound {
            inbound.offset += bytes;
            inbound.left -= bytes;
            if inbound.left == 0 {
                self.inbound = None;
            }
        }
        bytes
    }
}
