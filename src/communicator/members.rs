//! What ranks tell each other about themselves when a communicator is made.
#![forbid(unsafe_code)]

use super::CommOptions;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::topo::distance::PciAddress;
use serde_json::{json, Value};
use std::sync::Once;

/// One rank, as the others know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its node's identity.
    pub host_id: String,
    /// Its host's name, for messages.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its device.
    pub device: i32,
    /// Its local rank and the ranks of its node, if its launcher has told.
    pub local: Option<(usize, usize)>,
    /// Its process's number in the job, if its launcher has told.
    pub launched: Option<u32>,
    /// Its GPU, if it has one.
    pub gpu: Option<PciAddress>,
    /// Whether its data is on that GPU.
    pub on_gpu: bool,
    /// Whether it makes a communicator of the host.
    pub on_host: bool,
    /// Where its process's service listens.
    pub service: String,
    /// The version of Strata it runs.
    pub version: String,
    /// Color and key of a split; 0 elsewhere.
    pub color: i32,
    /// See `color`.
    pub key: i32,
    /// Text that only the rank concerned fills in: rank 0's configuration, the communicator's key, a unique id.
    pub extra: Vec<String>,
}

impl Member {
    /// The member as bytes to be sent.
    pub fn encode(&self) -> Vec<u8> {
        json!({
            "host_id": self.host_id, "host": self.host, "pid": self.pid, "device": self.device,
            "local": self.local.map(|(rank, size)| [rank, size]), "gpu": self.gpu.map(|gpu| gpu.to_string()),
            "launched": self.launched, "on_gpu": self.on_gpu, "on_host": self.on_host,
            "service": self.service, "version": self.version, "color": self.color, "key": self.key,
            "extra": self.extra,
        })
        .to_string()
        .into_bytes()
    }

    /// The member that `rank` sent. Anything that is not one is a `Remote` error.
    pub fn decode(rank: usize, bytes: &[u8]) -> Result<Member> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| refuse(rank, &error.to_string()))?;
        let text = |name: &str| value[name].as_str().map(str::to_string).ok_or_else(|| refuse(rank, name));
        let number = |name: &str| value[name].as_i64().ok_or_else(|| refuse(rank, name));
        let small = |name: &str| number(name).and_then(|n| i32::try_from(n).map_err(|_| refuse(rank, name)));
        let extra = value["extra"].as_array().ok_or_else(|| refuse(rank, "extra"))?;
        Ok(Member {
            host_id: text("host_id")?,
            host: text("host")?,
            pid: u32::try_from(number("pid")?).map_err(|_| refuse(rank, "pid"))?,
            device: small("device")?,
            local: local(&value["local"]),
            // Ranks of an older release do not tell it.
            launched: value["launched"].as_u64().and_then(|number| u32::try_from(number).ok()),
            gpu: value["gpu"].as_str().and_then(|gpu| gpu.parse().ok()),
            on_gpu: value["on_gpu"].as_bool().ok_or_else(|| refuse(rank, "on_gpu"))?,
            // Ranks of an older release have no such communicators.
            on_host: value["on_host"].as_bool().unwrap_or_default(),
            service: text("service")?,
            version: text("version")?,
            color: small("color")?,
            key: small("key")?,
            extra: extra.iter().filter_map(|entry| entry.as_str().map(str::to_string)).collect(),
        })
    }
}

fn local(value: &Value) -> Option<(usize, usize)> {
    let number = |at: usize| usize::try_from(value.get(at)?.as_u64()?).ok();
    let (rank, size) = (number(0)?, number(1)?);
    // A node of more ranks than these is nobody's.
    (rank < size && size <= 1 << 16).then_some((rank, size))
}

fn refuse(rank: usize, what: &str) -> Error {
    Error::Remote(format!("rank {rank} sent a description of itself that cannot be read: {what}"))
}

/// Whether the data of all ranks is in host memory, and there is no vendor's library: the same on all ranks.
pub fn on_host(members: &[Member], options: &CommOptions) -> bool {
    options.companion.is_none() && members.iter().all(|member| !member.on_gpu)
}

/// Said once in a process.
static OTHER_VERSION: PerProcess<Once> = PerProcess::new(Once::new);

/// Whether ranks with these versions of Strata make the same plans and understand each other's messages: within a release
/// series nothing of that changes (before 1.0 a series is `0.minor`).
fn work_together(one: &str, other: &str) -> bool {
    let series = |version: &str| -> Option<(String, Option<String>)> {
        let mut parts = version.split('.');
        let major = parts.next()?.to_string();
        let minor = parts.next()?.to_string();
        let zero = major == "0";
        Some((major, zero.then_some(minor)))
    };
    one == other || series(one).is_some_and(|ours| Some(ours) == series(other))
}

/// An error where some rank's Strata cannot work with this one's; a warning where it is another one than rank 0's and can.
pub fn check_versions(members: &[Member], mine: &str) -> Result<()> {
    let zero = &members[0].version;
    let text = format!("rank 0 runs Strata {zero}, this rank {mine}");
    if members.iter().any(|member| !work_together(&member.version, mine)) {
        return Err(Error::InvalidUsage(text));
    }
    if zero != mine {
        OTHER_VERSION.get().call_once(|| crate::log::warn(&format!("{text}; they work together")));
    }
    Ok(())
}

/// An error where some ranks make a communicator of the host and others do not.
pub fn check_kinds(members: &[Member]) -> Result<()> {
    let of = |on_host: bool| members.iter().position(|member| member.on_host == on_host);
    match (of(true), of(false)) {
        (Some(host), Some(other)) => Err(Error::InvalidUsage(format!(
            "rank {host} makes a communicator by strataCommInitHost, rank {other} by another function: all ranks must call \
             strataCommInitHost, also those that join one which grows"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_round_trips_and_garbage_is_refused() {
        let member = Member {
            host_id: "node0".to_string(),
            host: "a".to_string(),
            pid: 7,
            device: -1,
            local: Some((3, 8)),
            launched: Some(9),
            gpu: "0000:c1:00.0".parse().ok(),
            on_gpu: true,
            on_host: true,
            service: "127.0.0.1:9".to_string(),
            version: "0.1.0".to_string(),
            color: 3,
            key: -4,
            extra: vec!["x=1\n".to_string()],
        };
        assert_eq!(Member::decode(0, &member.encode()), Ok(member));
        for bytes in [&b""[..], b"{}", b"\xff\xfe", b"[1,2]", br#"{"host_id":1}"#] {
            assert!(Member::decode(5, bytes).unwrap_err().text().starts_with("rank 5 sent"));
        }
    }

    #[test]
    fn versions_of_one_series_work_together_and_others_are_refused() {
        for (one, other, together) in [
            ("0.1.0", "0.1.7", true),
            ("0.1.0", "0.2.0", false),
            ("1.2.0", "1.3.5", true),
            ("1.0.0", "2.0.0", false),
            ("nonsense", "nonsense", true),
            ("nonsense", "0.1.0", false),
        ] {
            assert_eq!(work_together(one, other), together, "{one} {other}");
        }
    }
}
