//! What ranks tell each other before a transport exists, as bytes: postcard's format (docs/adr/0018).
#![forbid(unsafe_code)]

use serde::de::DeserializeOwned;
use serde::Serialize;

/// What a rank tells, as bytes.
pub fn encode(card: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(card).expect("plain fields can always be written")
}

/// What a rank has told, if these bytes are that and nothing more.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::take_from_bytes(bytes).ok().and_then(|(card, rest)| rest.is_empty().then_some(card))
}
