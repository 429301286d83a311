//! Digests that all ranks compute alike, whichever compiler built their library and on whatever processor it runs.
//!
//! What ranks compare or use as a key must not change within a release series. So fields go in by name and width, never
//! by their place in memory.
#![forbid(unsafe_code)]

use sha2::{Digest as _, Sha256};

/// A SHA-256 over fields, each of which ends where the next one begins: `ab`, `c` and `a`, `bc` differ.
#[derive(Debug, Clone)]
pub struct Digest(Sha256);

impl Digest {
    /// Of nothing yet. Digests for different purposes never agree.
    pub fn new(purpose: &str) -> Digest {
        Digest(Sha256::new()).bytes(purpose.as_bytes())
    }

    /// Adds bytes.
    pub fn bytes(self, bytes: &[u8]) -> Digest {
        Digest(self.0.chain_update((bytes.len() as u64).to_le_bytes()).chain_update(bytes))
    }

    /// Adds a text.
    pub fn text(self, text: &str) -> Digest {
        self.bytes(text.as_bytes())
    }

    /// Adds a number. Those of fewer bits count as their value.
    pub fn number(self, number: impl Into<i128>) -> Digest {
        self.bytes(&number.into().to_le_bytes())
    }

    /// The first 16 bytes.
    pub fn finish(self) -> [u8; 16] {
        let whole = self.0.finalize();
        std::array::from_fn(|at| whole[at])
    }

    /// The same as a number.
    pub fn value(self) -> u128 {
        u128::from_le_bytes(self.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_every_field_and_where_it_ends() {
        let digest =
            |fields: &[&str]| fields.iter().fold(Digest::new("test"), |digest, field| digest.text(field)).value();
        let different =
            [digest(&["ab", "c"]), digest(&["a", "bc"]), digest(&["abc"]), digest(&["abc", ""]), digest(&[])];
        for (at, one) in different.iter().enumerate() {
            assert!(different[..at].iter().all(|other| other != one), "{at}");
        }
        assert_ne!(Digest::new("a").value(), Digest::new("b").value());
        assert_ne!(Digest::new("a").number(1).value(), Digest::new("a").number(2).value());
    }

    /// The bytes were worked out with Python's hashlib. If they change, ranks of two patch releases do not understand
    /// each other.
    #[test]
    fn a_digest_stays_what_it_is() {
        let digest = Digest::new("test").text("shrink to [0, 2]").number(-1).number(7u32).bytes(&[0, 255]);
        let expected = 0x26ee24a501f19c023359037b13953cc0_u128.to_be_bytes();
        assert_eq!(digest.finish(), expected);
    }
}
