//! What goes over a connection: a greeting, then frames of a header and a body.
#![forbid(unsafe_code)]

use crate::topo::Rank;
use crate::transport::Envelope;

/// Bytes of a frame's header, and of a greeting.
pub const HEADER: usize = 48;
const MAGIC: [u8; 8] = *b"strata\0\x01";
/// The index of a connection that only asks to be connected to.
pub const CALL: u8 = u8::MAX;
/// A message number that names none.
pub const NO_ID: u64 = u64::MAX;

/// A rank's password for those who connect to it.
pub type Secret = [u8; 16];

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A message with its bytes; to be acknowledged when it is received if it has a number.
    Small = 1,
    /// The announcement of a message.
    Large = 2,
    /// The message with this number may be sent.
    Grant = 3,
    /// Bytes of a granted message.
    Data = 4,
    /// The small message with this number has been received.
    Ack = 5,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// The message's envelope.
    pub envelope: Envelope,
    /// Bytes of the message; of `Data`: where in the message its bytes begin.
    pub bytes: u64,
    /// The sender's number of the message.
    pub id: u64,
    /// Bytes that follow.
    pub body: u64,
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

impl Header {
    /// A header that concerns the message numbered `id` and has no body.
    pub fn about(kind: Kind, id: u64) -> Header {
        let envelope = Envelope { channel: 0, sequence: 0, signature: 0 };
        Header { kind, envelope, bytes: 0, id, body: 0 }
    }

    /// The header as bytes.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind as u8;
        bytes[2..4].copy_from_slice(&self.envelope.channel.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.envelope.signature.to_le_bytes());
        let words = [self.envelope.sequence, self.bytes, self.id, self.body];
        for (place, word) in bytes[8..40].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The header in these bytes, if it is one.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        let kind = match bytes[0] {
            1 => Kind::Small,
            2 => Kind::Large,
            3 => Kind::Grant,
            4 => Kind::Data,
            5 => Kind::Ack,
            _ => return None,
        };
        let channel = u16::from_le_bytes([bytes[2], bytes[3]]);
        let envelope = Envelope { channel, signature: u32_at(bytes, 4), sequence: u64_at(bytes, 8) };
        Some(Header { kind, envelope, bytes: u64_at(bytes, 16), id: u64_at(bytes, 24), body: u64_at(bytes, 32) })
    }
}

/// The first bytes of a connection: who calls, with the called rank's password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The caller.
    pub from: Rank,
    /// Which connection of the pair this is, or [`CALL`].
    pub index: u8,
    /// The called rank's password.
    pub secret: Secret,
}

impl Greeting {
    /// The greeting as bytes.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.secret);
        bytes[24..28].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[28] = self.index;
        bytes
    }

    /// The greeting in these bytes, if it is one.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<Greeting> {
        let secret = std::array::from_fn(|i| bytes[8 + i]);
        let greeting = Greeting { from: Rank(u32_at(bytes, 24)), index: bytes[28], secret };
        (bytes[..8] == MAGIC).then_some(greeting)
    }
}

/// Whether two passwords are equal, in a time that does not depend on where they differ.
pub fn same_secret(a: &Secret, b: &Secret) -> bool {
    a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_greetings_survive_the_wire() {
        let envelope = Envelope { channel: 65_535, sequence: 1 << 40, signature: 7 };
        let header = Header { kind: Kind::Data, envelope, bytes: 5 << 32, id: 3, body: 1 << 33 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        assert_eq!(Header::decode(&[9; HEADER]), None);
        let greeting = Greeting { from: Rank(300), index: CALL, secret: [3; 16] };
        assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
        assert_eq!(Greeting::decode(&[0; HEADER]), None);
        assert!(!same_secret(&[3; 16], &[4; 16]));
    }
}
