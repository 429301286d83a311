//! The head of what goes between ranks of different nodes, whichever way it goes.
#![forbid(unsafe_code)]

use super::matching::MessageHead;
use super::Envelope;

/// Bytes of a header.
pub const HEADER: usize = 48;
/// A message number that names none.
pub const NO_ID: u64 = u64::MAX;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
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
    /// The sender has left the communicator: nothing of it follows. Over MPI only, where TCP has the end of a connection.
    Leave = 6,
    /// The sender's first connection goes over to the receiver's, which from here on carries both ways. Over TCP only.
    Switch = 7,
    /// Bytes of a granted message, [coded](super::lossless::codec). Over TCP only.
    Coded = 8,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What it is.
    pub kind: FrameKind,
    /// The message's envelope.
    pub envelope: Envelope,
    /// Bytes of the message; of `Data` and `Coded`: where in the message its bytes begin.
    pub bytes: u64,
    /// The sender's number of the message.
    pub id: u64,
    /// Bytes that follow.
    pub body: u64,
    /// Which communicator it belongs to, where messages of a past one could still come in. Over TCP, of a message: one more
    /// than the number of a small message that has been received, to save a frame. Of `Coded`: the bytes of the message that
    /// it stands for. Else 0.
    pub nonce: u64,
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

impl FrameHeader {
    /// A header that concerns the message numbered `id` and has no body.
    pub fn about(kind: FrameKind, id: u64) -> FrameHeader {
        let envelope = Envelope { channel: 0, sequence: 0, signature: 0 };
        FrameHeader { kind, envelope, bytes: 0, id, body: 0, nonce: 0 }
    }

    /// What it says of its message.
    pub fn message(&self) -> MessageHead {
        MessageHead { envelope: self.envelope, bytes: self.bytes as usize, number: self.id }
    }

    /// The header as bytes.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind as u8;
        bytes[2..4].copy_from_slice(&self.envelope.channel.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.envelope.signature.to_le_bytes());
        let words = [self.envelope.sequence, self.bytes, self.id, self.body, self.nonce];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The header in these bytes, if it is one.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<FrameHeader> {
        let kind = match bytes[0] {
            1 => FrameKind::Small,
            2 => FrameKind::Large,
            3 => FrameKind::Grant,
            4 => FrameKind::Data,
            5 => FrameKind::Ack,
            6 => FrameKind::Leave,
            7 => FrameKind::Switch,
            8 => FrameKind::Coded,
            _ => return None,
        };
        let channel = u16::from_le_bytes([bytes[2], bytes[3]]);
        let envelope = Envelope { channel, signature: u32_at(bytes, 4), sequence: u64_at(bytes, 8) };
        let [bytes, id, body, nonce] = [16, 24, 32, 40].map(|at| u64_at(bytes, at));
        Some(FrameHeader { kind, envelope, bytes, id, body, nonce })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_wire() {
        let envelope = Envelope { channel: 65_535, sequence: 1 << 40, signature: 7 };
        let header =
            FrameHeader { kind: FrameKind::Data, envelope, bytes: 5 << 32, id: 3, body: 1 << 33, nonce: 1 << 60 };
        assert_eq!(FrameHeader::decode(&header.encode()), Some(header));
        assert_eq!(FrameHeader::decode(&[9; HEADER]), None);
    }
}
