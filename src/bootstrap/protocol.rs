//! What the services and their clients say to each other: frames of a head and a body.
//!
//! The head is ours: a number that tells protocol and version, and the body's length, both in 4 bytes, least significant
//! first. The body is a [`Frame`] in postcard's format, whose specification is public (docs/adr/0018).
//!
//! The decoder is total: any bytes give a frame, a wish for more, or [`Malformed`]. It reserves nothing for what the bytes
//! only claim, and takes no list of more than [`MAX_RANKS`] entries.
#![forbid(unsafe_code)]

use crate::error::{Code, Error};
use crate::health::{CallSummary, Loss, RelayRequest};
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_bytes::{ByteBuf, Bytes};
use std::fmt;
use std::marker::PhantomData;

/// The largest frame a connection may send before it has shown the right secret.
pub const FIRST_FRAME_LIMIT: usize = 1 << 11;
/// The largest frame of all.
pub const FRAME_LIMIT: usize = 1 << 29;
/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 8;
/// The largest number of ranks, far above any machine and low enough that no table of that size hurts.
pub const MAX_RANKS: u32 = 1 << 20;

/// The protocol and, in its last byte, the version.
const MAGIC: u32 = 0x5354_5206;
const MAX_NAME_BYTES: usize = 256;
/// Short enough for a first frame, credentials included.
const MAX_TEXT_BYTES: usize = FIRST_FRAME_LIMIT / 2;

/// What a caller must know to take part: which room or communicator, and its secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Process {
    /// Its host's name.
    #[serde(serialize_with = "put_text::<MAX_NAME_BYTES, _>", deserialize_with = "text::<MAX_NAME_BYTES, _>")]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
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
    /// Whether it has elements for who asks, and whether it expects some from there, in an operation in which each rank knows the sizes of
    /// its own blocks only.
    pub exchanges: Option<[bool; 2]>,
    /// The last collective of no elements that it called, which is no operation, and how many operations it had begun then.
    pub empty: Option<(u64, CallSummary)>,
    /// What failed there, or nothing.
    #[serde(serialize_with = "put_text::<MAX_TEXT_BYTES, _>", deserialize_with = "text::<MAX_TEXT_BYTES, _>")]
    pub failure: String,
}

impl Answer {
    /// What it called of no elements in the place of the operation with this number, of which it has begun none since.
    pub fn empty_at(&self, number: u64) -> Option<CallSummary> {
        let (after, call) = self.empty?;
        (after == self.begun && after + 1 == number).then_some(call)
    }
}

/// One message. The place of a kind in this list is its number on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// Client to service: let me in.
    Join(Join),
    /// Service to client: all ranks are in.
    Joined,
    /// Client to service: my part of the round.
    Part(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Service to client: everybody's parts, in rank order.
    All(#[serde(serialize_with = "put_parts", deserialize_with = "parts")] Vec<Vec<u8>>),
    /// Client to service: I waited this many milliseconds and wait no longer.
    TimedOut(u64),
    /// Either way: it ends here, for this reason.
    Fail(#[serde(with = "error")] Error),
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
    Goodbye(#[serde(deserialize_with = "list")] Vec<u32>),
    /// Anybody to a service: how is this rank?
    Query {
        /// Which communicator.
        comm: Credentials,
        /// Which rank.
        rank: u32,
        /// The number of the operation in question.
        number: u64,
        /// Who asks.
        from: u32,
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
    /// A rank that waits to one that has not come: relay what the others are in.
    Relay {
        /// Which communicator.
        comm: Credentials,
        /// Who is late.
        rank: u32,
        /// Who waits, and for what.
        request: RelayRequest,
    },
}

/// The bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl Frame {
    /// The frame as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&[0; HEAD_BYTES - 4]);
        let mut bytes = postcard::to_extend(self, bytes).expect("a frame can always be written");
        let body = (bytes.len() - HEAD_BYTES) as u32;
        bytes[4..HEAD_BYTES].copy_from_slice(&body.to_le_bytes());
        bytes
    }

    /// The first frame in `bytes` and its length, or `None` when more bytes are needed. `limit` is the longest body.
    pub fn decode(bytes: &[u8], limit: usize) -> Result<Option<(Frame, usize)>, Malformed> {
        let magic = MAGIC.to_le_bytes();
        let seen = bytes.len().min(magic.len());
        if bytes[..seen] != magic[..seen] {
            return Err(Malformed("not one of ours"));
        }
        let Some(head) = bytes.get(..HEAD_BYTES) else { return Ok(None) };
        let len = u32::from_le_bytes(array(&head[4..])) as usize;
        if len > limit {
            return Err(Malformed("too long"));
        }
        let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + len) else { return Ok(None) };
        match postcard::take_from_bytes(body) {
            Ok((frame, [])) => Ok(Some((frame, HEAD_BYTES + len))),
            Ok(_) => Err(Malformed("bytes left over")),
            Err(postcard::Error::DeserializeUnexpectedEnd) => Err(Malformed("cut short")),
            Err(_) => Err(Malformed("no frame of this version")),
        }
    }
}

/// Writes the beginning of a text, `MOST` bytes at most.
fn put_text<const MOST: usize, S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    let end = (0..=text.len().min(MOST)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    to.serialize_str(&text[..end])
}

/// A text of `MOST` bytes at most.
fn text<'de, const MOST: usize, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = <&str>::deserialize(from)?;
    (text.len() <= MOST).then(|| text.to_string()).ok_or_else(|| de::Error::custom("a text too long"))
}

/// Reads a list: grows with what is there, to [`MAX_RANKS`] entries at most.
struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list with an entry for each rank at most")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(entry) = entries.next_element()? {
            if list.len() == MAX_RANKS as usize {
                return Err(de::Error::custom("too many entries"));
            }
            list.push(entry);
        }
        Ok(list)
    }
}

fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    from.deserialize_seq(ListVisitor(PhantomData))
}

fn put_parts<S: Serializer>(parts: &[Vec<u8>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(parts.iter().map(|part| Bytes::new(part)))
}

fn parts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u8>>, D::Error> {
    Ok(list::<ByteBuf, D>(from)?.into_iter().map(ByteBuf::into_vec).collect())
}

/// Errors on the wire: their code and their text.
pub mod error {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct ErrorCard {
        code: u32,
        #[serde(serialize_with = "put_text::<MAX_TEXT_BYTES, _>", deserialize_with = "text::<MAX_TEXT_BYTES, _>")]
        text: String,
    }

    /// Writes an error.
    pub fn serialize<S: Serializer>(error: &Error, to: S) -> Result<S::Ok, S::Error> {
        ErrorCard { code: error.code() as u32, text: error.text().to_string() }.serialize(to)
    }

    /// Reads an error; one of a kind that cannot be told is `Remote`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Error, D::Error> {
        let ErrorCard { code, text } = ErrorCard::deserialize(from)?;
        Ok(match code as Code {
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
            Frame::Query { comm, rank: 6, number: 1 << 40, from: 2 },
            Frame::Answer(Answer { begun: 3, waiting_for: Some(0), aborted: true, ..Answer::default() }),
            Frame::Answer(Answer { left: true, call: Some(CallSummary([5, 6])), ..Answer::default() }),
            Frame::Answer(Answer { exchanges: Some([true, false]), ..Answer::default() }),
            Frame::Answer(Answer { empty: Some((7, CallSummary([0, 6]))), ..Answer::default() }),
            Frame::Notice {
                comm,
                loss: Loss { rank: 5, from: None, is_link: false, error: Error::Remote("rank 5 died".to_string()) },
            },
            Frame::Notice {
                comm,
                loss: Loss { rank: 6, from: Some(7), is_link: false, error: Error::Timeout("late".to_string()) },
            },
            Frame::Relay { comm, rank: 2, request: RelayRequest::new(1, 900, CallSummary([5, 6])) },
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
        let body = bytes.len() - HEAD_BYTES;
        assert_eq!(Frame::decode(&bytes[..HEAD_BYTES], body - 1), Err(Malformed("too long")));
        assert_eq!(Frame::decode(&bytes[..HEAD_BYTES], body), Ok(None));
    }

    #[test]
    fn the_longest_host_and_error_text_fit_a_first_frame() {
        let comm = Credentials { key: 7, secret: [9; 16] };
        let notice = Frame::Notice {
            comm,
            loss: Loss { rank: 1, from: None, is_link: false, error: Error::Remote("é".repeat(5000)) },
        }
        .encode();
        assert!(notice.len() - HEAD_BYTES <= FIRST_FRAME_LIMIT);
        assert!(matches!(Frame::decode(&notice, FIRST_FRAME_LIMIT), Ok(Some(_))));
    }

    /// A frame with this body.
    fn framed(body: &[u8]) -> Vec<u8> {
        [&MAGIC.to_le_bytes()[..], &(body.len() as u32).to_le_bytes(), body].concat()
    }

    #[test]
    fn lengths_that_are_only_claimed_take_no_memory_and_are_refused() {
        // The largest number that a length can be, behind the kinds Part, All and Goodbye.
        let most = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        for kind in [2, 3, 10] {
            let claim = [&[kind][..], &most].concat();
            assert!(Frame::decode(&framed(&claim), FRAME_LIMIT).is_err());
            assert_eq!(Frame::decode(&framed(&[kind, 0]), FRAME_LIMIT).map(|found| found.is_some()), Ok(true));
        }
        // As many empty parts as ranks, and one more.
        for (parts, taken) in [(MAX_RANKS as usize, true), (MAX_RANKS as usize + 1, false)] {
            let all = Frame::All(vec![Vec::new(); parts]).encode();
            assert_eq!(Frame::decode(&all, FRAME_LIMIT).is_ok(), taken, "{parts} parts");
        }
    }

    #[test]
    fn another_version_is_refused_from_its_first_bytes() {
        let mut bytes = Frame::Joined.encode();
        bytes[0] -= 1;
        assert_eq!(Frame::decode(&bytes[..1], FRAME_LIMIT), Err(Malformed("not one of ours")));
    }

    #[test]
    fn the_bytes_of_a_frame_are_those_of_the_specification() {
        // Query: kind 11; a key as a varint and 16 bytes; three varints.
        let comm = Credentials { key: 300, secret: [9; 16] };
        let body = [&[11, 0xac, 2][..], &[9; 16], &[6, 0x80, 1, 3]].concat();
        assert_eq!(Frame::Query { comm, rank: 6, number: 128, from: 3 }.encode(), framed(&body));
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let bytes = Frame::Fail(Error::Remote(format!("x{}", "é".repeat(5000)))).encode();
        let Ok(Some((Frame::Fail(Error::Remote(text)), _))) = Frame::decode(&bytes, FRAME_LIMIT) else { panic!() };
        assert_eq!(text.len(), MAX_TEXT_BYTES - 1);
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
            kind in 0u8..20, body in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let mut bytes = MAGIC.to_le_bytes().to_vec();
            bytes.extend((body.len() as u32 + 1).to_le_bytes());
            bytes.push(kind);
            bytes.extend(body);
            if let Ok(Some((frame, used))) = Frame::decode(&bytes, FRAME_LIMIT) {
                prop_assert_eq!(used, bytes.len());
                prop_assert_eq!(Frame::decode(&frame.encode(), FRAME_LIMIT).map(|found| found.map(|(frame, _)| frame)),
                    Ok(Some(frame)));
            }
        }

        #[test]
        fn a_changed_byte_never_panics(which in 0usize..17, at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = frames()[which].encode();
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = Frame::decode(&bytes, FRAME_LIMIT);
        }
    }
}
