//! What a connection begins with: a greeting. Frames of a [header](crate::transport::header) and a body follow.
#![forbid(unsafe_code)]

use crate::topo::Rank;
use crate::transport::header::HEADER;

const MAGIC: [u8; 8] = *b"strata\0\x03";
/// A rank's password for those who connect to it.
pub type Password = [u8; 16];

/// The first bytes of a connection: who calls, with the called rank's password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The caller.
    pub from: Rank,
    /// Which connection from this caller this is.
    pub index: u8,
    /// The called rank's password.
    pub secret: Password,
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
        let greeting = Greeting {
            from: Rank(u32::from_le_bytes(std::array::from_fn(|i| bytes[24 + i]))),
            index: bytes[28],
            secret,
        };
        (bytes[..8] == MAGIC).then_some(greeting)
    }
}

/// Whether two passwords are equal, in a time that does not depend on where they differ.
pub fn same_secret(a: &Password, b: &Password) -> bool {
    a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_survive_the_wire() {
        let greeting = Greeting { from: Rank(300), index: 7, secret: [3; 16] };
        assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
        assert_eq!(Greeting::decode(&[0; HEADER]), None);
        assert!(!same_secret(&[3; 16], &[4; 16]));
    }
}
