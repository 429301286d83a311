//! Terms of a machine for what runs as one kernel on its GPUs, each of which a machine's file may leave out: the way out of a rank,
//! the rate of one connection, protocols, and the launch.
#![forbid(unsafe_code)]

use super::machine::{Cluster, Sourced};
use serde::Deserialize;

/// The way out of a rank to the others of its node.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankOut {
    /// Rate at which a rank sends bytes to the others of its node.
    pub rank_gbps: Sourced,
}

/// One connection: the messages from one rank to another on one channel, which one thread block sends.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneRates {
    /// Rate of a connection inside a node.
    pub inside_gbps: Sourced,
    /// Rate of a connection between nodes.
    pub network_gbps: Sourced,
    /// Time for which a message occupies its connection beside its bytes.
    #[serde(default = "Sourced::zero")]
    pub step_us: Sourced,
}

/// The protocols of messages that a script can name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocols {
    /// `Simple`.
    pub simple: Protocol,
    /// `LL`.
    pub ll: Protocol,
    /// `LL128`.
    pub ll128: Protocol,
}

/// What a protocol changes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// The share of the rate of links and connections that is left for data.
    pub share: Sourced,
    /// Latency of a message inside a node, in place of the machine's.
    pub inside_us: Sourced,
    /// Latency of a message between nodes, in place of the machine's.
    pub network_us: Sourced,
}

/// The kernel of a call.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelLaunch {
    /// Every call.
    pub call_us: Sourced,
    /// Every thread block of the rank that has the most.
    #[serde(default = "Sourced::zero")]
    pub lane_us: Sourced,
}

impl Cluster {
    /// What the launch of a call takes whose largest rank has so many lanes, in ns.
    pub fn launch_ns(&self, lanes: usize) -> f64 {
        let launch = self.launch.as_ref();
        launch.map_or(0.0, |launch| (launch.call_us.value + launch.lane_us.value * lanes as f64) * 1e3)
    }

    /// What this machine has for a protocol by the name that scripts give it.
    pub fn protocol(&self, name: &str) -> Option<&Protocol> {
        let protocols = self.protocols.as_ref()?;
        match name {
            "Simple" => Some(&protocols.simple),
            "LL" => Some(&protocols.ll),
            "LL128" => Some(&protocols.ll128),
            _ => None,
        }
    }
}
