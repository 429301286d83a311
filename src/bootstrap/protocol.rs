//! What the services and their clients say to each other: frames of a 12-byte head and a body.
//!
//! The decoder is total: any bytes give a frame, a wish for more, or [`Malformed`]. It allocates no more than has
//! arrived, whatever lengths the bytes claim.
#![forbid(unsafe_code)]

use crate::error::{Code, Error};
use crate::health::{CallSummary, Loss};
use std::fmt;

/// The largest frame a connection may send before it has shown the right secret.
pub const FIRST_FRAME_LIMIT: usize = 1 << 11;
/// The largest frame of all.
pub const FRAME_LIMIT: usize = 1 << 29;
/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 12;
/// The largest number of ranks, far above any machine and low enough that no table of that size hurts.
pub const MAX_RANKS: u32 = 1 << 20;

const MAGIC: u32 = 0x5354_5202;
const MAX_NAME_BYTES: usize = 256;
const MAX_TEXT_BYTES: usize = 1 << 12;

/// What a caller must know to take part: which room or communicator, and its secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// Names a room or a communicator among all of a service.
    pub key: u128,
    /// Known to the members only.
    pub secret: [u8; 16],
}

impl Credentials {
    /// Fresh random ones.
    pub fn random() -> crate::error::Result<Credentials> {
        let mut bytes = [0; 32];
        let mut filled = 0;
        while filled < bytes.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            let got = rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes[filled..], flags));
            filled += got.map_err(std::io::Error::from)?;
        }
        let (key, secret) = bytes.split_at(16);
        Ok(Credentials { key: u128::from_le_bytes(array(key)), secret: array(secret) })
    }

    /// Whether both secrets are the same, in a time that does not depend on where they differ.
    pub fn secret_is(&self, other: &[u8; 16]) -> bool {
        self.secret.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({:032x})", self.key)
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    let count = bytes.len().min(N);
    array[..count].copy_from_slice(&bytes[..count]);
    array
}

/// A process, as error messages name it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Process {
    /// Its host's name.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
}

impl Process {
    /// This process.
    pub fn this() -> Process {
        let host: String = crate::log::host_name().chars().take(64).collect();
        Process { host, pid: std::process::id() }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, pid {}", self.host, self.pid)
    }
}

/// A rank asks to be let into a room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Which room.
    pub room: Credentials,
    /// How many ranks the room will have.
    pub nranks: u32,
    /// Which of them this is.
    pub rank: u32,
    /// Error messages name member `m` as rank `first_name + m`.
    pub first_name: u32,
    /// How many ranks the communicator will have: members of one room must agree.
    pub total: u32,
    /// Whether the room may be tried again: who comes after a time-out waits for others, and is not told of it.
    pub retries: bool,
    /// Who asks.
    pub process: Process,
}

/// A rank's state, as its service tells it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// Collectives this rank has begun.
    pub begun: u64,
    /// Collectives this rank has finished.
    pub finished: u64,
    /// The rank it waits for.
    pub waiting_for: Option<u32>,
    /// Whether it has aborted.
    pub aborted: bool,
    /// Whether it has destroyed the communicator in good order.
    pub left: bool,
    /// What it called as the operation that was asked about, if it has and still knows.
    pub call: Option<CallSummary>,
    /// What failed there, or nothing.
    pub failure: String,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Client to service: let me in.
    Join(Join),
    /// Service to client: all ranks are in.
    Joined,
    /// Client to service: my part of the round.
    Part(Vec<u8>),
    /// Service to client: everybody's parts, in rank order.
    All(Vec<Vec<u8>>),
    /// Client to service: I waited this many milliseconds and wait no longer.
    TimedOut(u64),
    /// Either way: it ends here, for this reason.
    Fail(Error),
    /// Client to service: I am done.
    Leave,
    /// Service to client: no such room or communicator (yet).
    Unknown,
    /// A rank to its successor: tell me when you die, as I tell you.
    Link {
        /// Which communicator.
        comm: Credentials,
        /// Who speaks.
        from: u32,
        /// Who is meant.
        to: u32,
        /// The speaker's process.
        process: Process,
    },
    /// The answer to a link: the successor's process.
    Welcome(Process),
    /// On a link: I leave in good order, as these ranks have.
    Goodbye(Vec<u32>),
    /// Anybody to a service: how is this rank?
    Query {
        /// Which communicator.
        comm: Credentials,
        /// Which rank.
        rank: u32,
        /// The number of the operation in question.
        number: u64,
    },
    /// The answer to a query.
    Answer(Answer),
    /// A rank to all: a rank is lost.
    Notice {
        /// Which communicator.
        comm: Credentials,
        /// Which rank, and what happened.
        loss: Loss,
    },
}

/// The bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Frame::Join(_) => 1,
            Frame::Joined => 2,
            Frame::Part(_) => 3,
            Frame::All(_) => 4,
            Frame::TimedOut(_) => 5,
            Frame::Fail(_) => 6,
            Frame::Leave => 7,
            Frame::Unknown => 8,
            Frame::Link { .. } => 9,
            Frame::Welcome(_) => 10,
            Frame::Goodbye(_) => 11,
            Frame::Query { .. } => 12,
            Frame::Answer(_) => 13,
            Frame::Notice { .. } => 14,
        }
    }

    /// The frame as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(64));
        out.u32(MAGIC);
        out.u32(u32::from(self.kind()));
        out.u32(0);
        match self {
            Frame::Joined | Frame::Leave | Frame::Unknown => {}
            Frame::Join(join) => {
                out.credentials(&join.room);
                let numbers = [join.nranks, join.rank, join.first_name, join.total, u32::from(join.retries)];
                numbers.iter().for_each(|number| out.u32(*number));
                out.process(&join.process);
            }
            Frame::Part(bytes) => out.0.extend_from_slice(bytes),
            Frame::All(parts) => {
                out.0.reserve_exact(4 + parts.iter().map(|part| part.len() + 4).sum::<usize>());
                out.u32(parts.len() as u32);
                parts.iter().for_each(|part| out.bytes(part));
            }
            Frame::TimedOut(waited_ms) => out.u64(*waited_ms),
            Frame::Fail(error) => out.error(error),
            Frame::Link { comm, from, to, process } => {
                out.credentials(comm);
                out.u32(*from);
                out.u32(*to);
                out.process(process);
            }
            Frame::Welcome(process) => out.process(process),
            Frame::Goodbye(departed) => departed.iter().for_each(|rank| out.u32(*rank)),
            Frame::Query { comm, rank, number } => {
                out.credentials(comm);
                out.u32(*rank);
                out.u64(*number);
            }
            Frame::Answer(answer) => {
                out.u64(answer.begun);
                out.u64(answer.finished);
                out.u64(answer.waiting_for.map_or(0, |rank| u64::from(rank) + 1));
                let flags = [answer.aborted, answer.left, answer.call.is_some()];
                out.u32(flags.iter().rev().fold(0, |bits, &flag| bits << 1 | u32::from(flag)));
                answer.call.unwrap_or_default().0.iter().for_each(|word| out.u64(*word));
                // Short enough for a first frame.
                out.text(&answer.failure, FIRST_FRAME_LIMIT / 2);
            }
            Frame::Notice { comm, loss } => {
                out.credentials(comm);
                out.u32(loss.rank);
                out.u64(loss.from.unwrap_or(u64::MAX));
                out.error(&loss.error);
            }
        }
        let body = (out.0.len() - HEAD_BYTES) as u32;
        out.0[8..12].copy_from_slice(&body.to_le_bytes());
        out.0
    }

    /// The first frame in `bytes` and its length, or `None` when more bytes are needed. `limit` is the longest body.
    pub fn decode(bytes: &[u8], limit: usize) -> Result<Option<(Frame, usize)>, Malformed> {
        let magic = MAGIC.to_le_bytes();
        let seen = bytes.len().min(magic.len());
        if bytes[..seen] != magic[..seen] {
            return Err(Malformed("not one of ours"));
        }
        let Some(head) = bytes.get(..HEAD_BYTES) else { return Ok(None) };
        let kind = u32::from_le_bytes(array(&head[4..8]));
        let len = u32::from_le_bytes(array(&head[8..12])) as usize;
        if len > limit {
            return Err(Malformed("too long"));
        }
        let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + len) else { return Ok(None) };
        let mut body = Reader(body);
        let frame = decode_body(kind, &mut body)?;
        if !body.0.is_empty() {
            return Err(Malformed("bytes left over"));
        }
        Ok(Some((frame, HEAD_BYTES + len)))
    }
}

fn decode_body(kind: u32, body: &mut Reader<'_>) -> Result<Frame, Malformed> {
    Ok(match kind {
        1 => Frame::Join(Join {
            room: body.credentials()?,
            nranks: body.u32()?,
            rank: body.u32()?,
            first_name: body.u32()?,
            total: body.u32()?,
            retries: body.u32()? != 0,
            process: body.process()?,
        }),
        2 => Frame::Joined,
        3 => Frame::Part(std::mem::take(&mut body.0).to_vec()),
        4 => {
            let count = body.u32()?;
            if count > MAX_RANKS {
                return Err(Malformed("too many parts"));
            }
            // No reservation: the count is only a claim.
            let mut parts = Vec::new();
            for _ in 0..count {
                parts.push(body.bytes()?.to_vec());
            }
            Frame::All(parts)
        }
        5 => Frame::TimedOut(body.u64()?),
        6 => Frame::Fail(body.error()?),
        7 => Frame::Leave,
        8 => Frame::Unknown,
        9 => Frame::Link { comm: body.credentials()?, from: body.u32()?, to: body.u32()?, process: body.process()? },
        10 => Frame::Welcome(body.process()?),
        11 => {
            let mut departed = Vec::new();
            while !body.0.is_empty() {
                departed.push(body.u32()?);
            }
            Frame::Goodbye(departed)
        }
        12 => Frame::Query { comm: body.credentials()?, rank: body.u32()?, number: body.u64()? },
        13 => {
            let (begun, finished, waiting) = (body.u64()?, body.u64()?, body.u64()?);
            let flags = body.u32()?;
            let call = CallSummary([body.u64()?, body.u64()?]);
            Frame::Answer(Answer {
                begun,
                finished,
                waiting_for: waiting.checked_sub(1).and_then(|rank| u32::try_from(rank).ok()),
                aborted: flags & 1 != 0,
                left: flags & 2 != 0,
                call: (flags & 4 != 0).then_some(call),
                failure: body.text(MAX_TEXT_BYTES)?,
            })
        }
        14 => {
            let comm = body.credentials()?;
            let (rank, from) = (body.u32()?, body.u64()?);
            let from = (from != u64::MAX).then_some(from);
            Frame::Notice { comm, loss: Loss { rank, from, error: body.error()? } }
        }
        _ => return Err(Malformed("unknown kind")),
    })
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str, most: usize) {
        let end = (0..=text.len().min(most)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        self.bytes(&text.as_bytes()[..end]);
    }

    fn credentials(&mut self, credentials: &Credentials) {
        self.0.extend_from_slice(&credentials.key.to_le_bytes());
        self.0.extend_from_slice(&credentials.secret);
    }

    fn process(&mut self, process: &Process) {
        self.text(&process.host, MAX_NAME_BYTES);
        self.u32(process.pid);
    }

    fn error(&mut self, error: &Error) {
        self.u32(error.code() as u32);
        // Short enough for a first frame, credentials included.
        self.text(error.text(), FIRST_FRAME_LIMIT / 2);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take(4).map(|bytes| u32::from_le_bytes(array(bytes)))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take(8).map(|bytes| u64::from_le_bytes(array(bytes)))
    }

    fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        self.take(len)
    }

    fn text(&mut self, most: usize) -> Result<String, Malformed> {
        let bytes = self.bytes()?;
        if bytes.len() > most {
            return Err(Malformed("a text too long"));
        }
        String::from_utf8(bytes.to_vec()).map_err(|_| Malformed("not a text"))
    }

    fn credentials(&mut self) -> Result<Credentials, Malformed> {
        Ok(Credentials { key: u128::from_le_bytes(array(self.take(16)?)), secret: array(self.take(16)?) })
    }

    fn process(&mut self) -> Result<Process, Malformed> {
        Ok(Process { host: self.text(MAX_NAME_BYTES)?, pid: self.u32()? })
    }

    fn error(&mut self) -> Result<Error, Malformed> {
        let code = self.u32()? as Code;
        let text = self.text(MAX_TEXT_BYTES)?;
        Ok(match code {
            2 => Error::System(text),
            3 => Error::Internal(text),
            4 => Error::InvalidArgument(text),
            5 => Error::InvalidUsage(text),
            8 => Error::Timeout(text),
            _ => Error::Remote(text),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> Vec<Frame> {
        let comm = Credentials { key: 7, secret: [9; 16] };
        let process = Process { host: "node".to_string(), pid: 12 };
        let room = comm;
        vec![
            Frame::Join(Join {
                room,
                nranks: 4,
                rank: 3,
                first_name: 8,
                total: 16,
                retries: true,
                process: process.clone(),
            }),
            Frame::Joined,
            Frame::Part(vec![1, 2, 3]),
            Frame::All(vec![vec![], vec![5; 300], vec![1]]),
            Frame::TimedOut(77),
            Frame::Fail(Error::Timeout("missing".to_string())),
            Frame::Leave,
            Frame::Unknown,
            Frame::Link { comm, from: 1, to: 2, process: process.clone() },
            Frame::Welcome(process),
            Frame::Goodbye(vec![4, 5]),
            Frame::Query { comm, rank: 6, number: 1 << 40 },
            Frame::Answer(Answer { begun: 3, waiting_for: Some(0), aborted: true, ..Answer::default() }),
            Frame::Answer(Answer { left: true, call: Some(CallSummary([5, 6])), ..Answer::default() }),
            Frame::Notice { comm, loss: Loss { rank: 5, from: None, error: Error::Remote("rank 5 died".to_string()) } },
            Frame::Notice { comm, loss: Loss { rank: 6, from: Some(7), error: Error::Timeout("late".to_string()) } },
        ]
    }

    #[test]
    fn every_frame_survives_the_wire_and_no_shorter_prefix_is_one() {
        for frame in frames() {
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes, FRAME_LIMIT), Ok(Some((frame, bytes.len()))));
            for cut in 0..bytes.len() {
                assert_eq!(Frame::decode(&bytes[..cut], FRAME_LIMIT), Ok(None));
            }
        }
    }

    #[test]
    fn a_frame_over_the_limit_is_refused_from_its_head_alone() {
        let bytes = Frame::Part(vec![0; 100]).encode();
        assert_eq!(Frame::decode(&bytes[..HEAD_BYTES], 99), Err(Malformed("too long")));
        assert_eq!(Frame::decode(&bytes[..HEAD_BYTES], 100), Ok(None));
    }

    #[test]
    fn the_longest_host_and_error_text_fit_a_first_frame() {
        let comm = Credentials { key: 7, secret: [9; 16] };
        let notice =
            Frame::Notice { comm, loss: Loss { rank: 1, from: None, error: Error::Remote("é".repeat(5000)) } }.encode();
        assert!(notice.len() - HEAD_BYTES <= FIRST_FRAME_LIMIT);
        assert!(matches!(Frame::decode(&notice, FIRST_FRAME_LIMIT), Ok(Some(_))));
    }

    #[test]
    fn a_secret_does_not_show_in_debug_output() {
        assert!(!format!("{:?}", Credentials { key: 7, secret: [0xab; 16] }).to_lowercase().contains("ab"));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Frame::decode(&bytes, FRAME_LIMIT);
        }

        #[test]
        fn any_body_behind_a_good_head_decodes_without_panic(
            kind in 0u32..20, body in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let mut bytes = MAGIC.to_le_bytes().to_vec();
            bytes.extend(kind.to_le_bytes());
            bytes.extend((body.len() as u32).to_le_bytes());
            bytes.extend(body);
            if let Ok(Some((frame, used))) = Frame::decode(&bytes, FRAME_LIMIT) {
                prop_assert_eq!(used, bytes.len());
                prop_assert_eq!(Frame::decode(&frame.encode(), FRAME_LIMIT).map(|found| found.map(|(frame, _)| frame)),
                    Ok(Some(frame)));
            }
        }

        #[test]
        fn a_changed_byte_never_panics(which in 0usize..14, at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = frames()[which].encode();
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = Frame::decode(&bytes, FRAME_LIMIT);
        }
    }
}
