//! The unique id: 128 bytes that a program carries from one rank to the others, by whatever means it has.
//!
//! Layout: magic (8), version (1), kind (1), zero (2), service address (20), room key (16), secret (16), zero (64).
#![forbid(unsafe_code)]

use crate::bootstrap::{Credentials, Service, ServiceAddr};
use crate::config::Config;
use crate::digest::Digest;
use crate::error::{Error, Result};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Instant;

const MAGIC: [u8; 8] = *b"StrataId";
const VERSION: u8 = 1;
const OPENED: u8 = 0;
const FIXED: u8 = 1;

/// What `ncclGetUniqueId` hands out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl std::fmt::Debug for UniqueId {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId")
    }
}

/// What a unique id says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meeting {
    /// The service that has the room.
    pub service: ServiceAddr,
    /// The room.
    pub room: Credentials,
    /// Whether the address comes from `NCCL_COMM_ID`: rank 0 listens there when it joins.
    pub fixed: bool,
}

impl UniqueId {
    /// A new id, whose room is on this process's service; or, with `NCCL_COMM_ID=host:port` set, the id that follows
    /// from it, whose room is wherever rank 0 is.
    pub fn create() -> Result<UniqueId> {
        match std::env::var("NCCL_COMM_ID") {
            Ok(address) if !address.is_empty() => {
                UniqueId::from_address(&address, Config::from_env().0.comm_key.expose())
            }
            _ => {
                let service = Service::get()?;
                let room = Credentials::random()?;
                service.open_room(room)?;
                Ok(UniqueId::of(&Meeting { service: service.addr(), room, fixed: false }))
            }
        }
    }

    /// The id that follows from an address and a key that the job's processes share. Without a key its secret is known to
    /// everybody; that is NCCL's bargain, too.
    pub fn from_address(address: &str, key: &str) -> Result<UniqueId> {
        let wrong = |why: &str| Error::InvalidArgument(format!("NCCL_COMM_ID={address}: {why}"));
        let resolved: Vec<SocketAddr> =
            address.to_socket_addrs().map_err(|error| wrong(&format!("{error}; host:port is wanted")))?.collect();
        // IPv4 first, so that all ranks take the same of a name's addresses.
        let service = resolved.iter().copied().min_by_key(|found| (found.is_ipv6(), *found));
        let service = ServiceAddr(service.ok_or_else(|| wrong("no such host"))?);
        if service.0.port() == 0 {
            return Err(wrong("a port is wanted"));
        }
        let bytes = service.encode();
        let mut padded = [0; 32];
        padded[..bytes.len()].copy_from_slice(&bytes);
        let [low, high] =
            [0, 16].map(|at| padded[at..at + 16].iter().fold(0, |key, &byte| key << 8 | u128::from(byte)));
        let room = Credentials { key: low ^ high.rotate_left(64), secret: fixed_secret(&padded, key) };
        Ok(UniqueId::of(&Meeting { service, room, fixed: true }))
    }

    fn of(meeting: &Meeting) -> UniqueId {
        let mut id = [0; 128];
        id[..8].copy_from_slice(&MAGIC);
        id[8] = VERSION;
        id[9] = if meeting.fixed { FIXED } else { OPENED };
        id[12..32].copy_from_slice(&meeting.service.encode());
        id[32..48].copy_from_slice(&meeting.room.key.to_le_bytes());
        id[48..64].copy_from_slice(&meeting.room.secret);
        UniqueId(id)
    }

    /// What the id says. Bytes that are not a Strata id of this version are an `InvalidArgument`.
    pub(super) fn meeting(&self) -> Result<Meeting> {
        let id = &self.0;
        let wrong = |text: &str| Err(Error::InvalidArgument(text.to_string()));
        if id[..8] != MAGIC {
            return wrong(
                "this unique id was not made by Strata: all ranks must load the same library, and the id must be copied whole",
            );
        }
        if id[8] != VERSION {
            return wrong("this unique id was made by another version of Strata: all ranks must load the same one");
        }
        let (Some(service), OPENED | FIXED) = (ServiceAddr::decode(&id[12..32]), id[9]) else {
            return wrong("this unique id is damaged: it must be copied whole, all 128 bytes");
        };
        if id[64..].iter().chain(&id[10..12]).any(|&byte| byte != 0) || service.0.port() == 0 {
            return wrong("this unique id is damaged: it must be copied whole, all 128 bytes");
        }
        let mut key = [0; 16];
        key.copy_from_slice(&id[32..48]);
        let mut secret = [0; 16];
        secret.copy_from_slice(&id[48..64]);
        let room = Credentials { key: u128::from_le_bytes(key), secret };
        Ok(Meeting { service, room, fixed: id[9] == FIXED })
    }

    /// The credentials that the id carries: random, and known to those alone who have the id.
    pub fn credentials(&self) -> Result<Credentials> {
        self.meeting().map(|meeting| meeting.room)
    }
}

/// What the members of a fixed address know beside it.
fn fixed_secret(address: &[u8], key: &str) -> [u8; 16] {
    if key.is_empty() {
        return *b"strata fixed id.";
    }
    Digest::new("fixed id").bytes(address).text(key).finish()
}

impl Meeting {
    /// Rank 0 of a fixed address makes it listen; a rank 0 elsewhere may still hold it, so this tries until `deadline`.
    pub fn listen(&self, deadline: Instant, cancelled: impl Fn() -> bool) -> Result<()> {
        let service = Service::get()?;
        loop {
            match service.listen_at(self.service.0, self.room, deadline) {
                Err(Error::System(text)) if Instant::now() < deadline && !cancelled() => {
                    crate::trace!("{text}; trying again");
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_from_an_address_is_the_same_everywhere_and_no_other_s() {
        let id = UniqueId::from_address("127.0.0.1:4321", "").unwrap();
        assert!(id == UniqueId::from_address("127.0.0.1:4321", "").unwrap());
        assert!(id != UniqueId::from_address("127.0.0.1:4322", "").unwrap());
        assert!(id.meeting().unwrap().fixed);
        let six = UniqueId::from_address("[::1]:4321", "").unwrap().meeting().unwrap();
        assert_eq!(six.service.0.to_string(), "[::1]:4321");
        for wrong in ["", "host", "127.0.0.1:0", "127.0.0.1:99999"] {
            assert!(matches!(UniqueId::from_address(wrong, ""), Err(Error::InvalidArgument(_))), "{wrong}");
        }
    }

    #[test]
    fn a_key_makes_a_secret_that_follows_from_it_and_the_address_alone() {
        let secret =
            |address: &str, key: &str| UniqueId::from_address(address, key).unwrap().credentials().unwrap().secret;
        let all = [("127.0.0.1:4321", ""), ("127.0.0.1:4321", "a"), ("127.0.0.1:4321", "b"), ("127.0.0.1:4322", "a")];
        for (index, (address, key)) in all.iter().enumerate() {
            assert_eq!(secret(address, key), secret(address, key));
            assert!(all[..index].iter().all(|(other, with)| secret(other, with) != secret(address, key)), "{key}");
        }
        assert_eq!(secret("127.0.0.1:1", ""), secret("127.0.0.1:2", ""), "no key, no secret");
    }

    #[test]
    fn a_foreign_or_damaged_id_is_an_invalid_argument() {
        let good = UniqueId::from_address("127.0.0.1:4321", "").unwrap();
        let text = UniqueId([7; 128]).meeting().unwrap_err().to_string();
        assert!(text.contains("not made by Strata"), "{text}");
        for at in [0, 8, 9, 10, 12, 64, 127] {
            let mut bad = good;
            bad.0[at] ^= 0x55;
            assert!(matches!(bad.meeting(), Err(Error::InvalidArgument(_))), "byte {at}");
        }
    }

    #[test]
    fn two_ids_never_share_a_room_or_a_secret() {
        let [one, two] =
            [UniqueId::create().unwrap(), UniqueId::create().unwrap()].map(|id| id.meeting().unwrap().room);
        assert_ne!(one.key, two.key);
        assert_ne!(one.secret, two.secret);
    }
}
