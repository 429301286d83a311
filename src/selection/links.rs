//! What a communicator found out about its own links, as a machine that the cost model understands.
//!
//! All ranks must choose alike, so all have the same figures, rounded to steps of [`STEP`]: two communicators of one job, or two
//! runs, that measure nearly the same then choose the same.
#![forbid(unsafe_code)]

use crate::sim::machine::{Cluster, InterNode, IntraNode, LocalCosts, NodeSpec, Sourced};
use std::collections::BTreeMap;

/// Messages between nodes, as one rank sees them while all ranks send.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// A short message, from one rank to another, in us.
    pub latency_us: f64,
    /// What a rank takes in, in GB/s.
    pub gbps: f64,
}

/// Figures are rounded to powers of this.
pub const STEP: f64 = std::f64::consts::SQRT_2;

impl Links {
    /// The figures in steps of [`STEP`]; None where one means nothing.
    pub fn rounded(self) -> Option<Links> {
        let round = |value: f64| {
            let usable = value.is_finite() && value > 0.0;
            usable.then(|| STEP.powf((value.ln() / STEP.ln()).round()))
        };
        Some(Links { latency_us: round(self.latency_us)?, gbps: round(self.gbps)? })
    }

    /// A machine of nodes of so many ranks with these links, and with what is usual inside a node of processors.
    pub fn machine(self, ranks_per_node: usize) -> Cluster {
        let measured =
            |value| Sourced { value, source: "measured when the communicator was made".into(), fitted: false };
        let usual = |value| Sourced { value, source: "usual on hosts".into(), fitted: false };
        let none = || Sourced { value: 0.0, source: "left out".into(), fitted: false };
        Cluster {
            name: "measured".into(),
            text: "this communicator's links".into(),
            // Every rank's rate was measured while all were at work, so each has its own NIC here.
            node: NodeSpec { ranks: measured(ranks_per_node as f64), nics: measured(ranks_per_node as f64) },
            network: InterNode {
                nic_gbps: measured(self.gbps),
                latency_us: measured(self.latency_us),
                gap_us: none(),
                post_us: none(),
                processor_gbps: none(),
                eager_bytes: none(),
            },
            network_vendor: None,
            inside: IntraNode {
                latency_us: usual(3.0),
                rank_gbps: usual(4.0),
                gap_us: usual(0.0),
                link_gbps: none(),
                links: Vec::new(),
            },
            local: LocalCosts {
                launch_us: usual(0.5),
                copy_gbps: usual(8.0),
                reduce_gbps: usual(4.0),
                encode_gbps: none(),
                decode_gbps: none(),
                processors: none(),
            },
            calls: None,
            vendor: None,
            mpi: None,
            carriers: BTreeMap::new(),
            pccl: None,
            strata: None,
            overload: None,
            out: None,
            lanes: None,
            protocols: None,
            launch: None,
            nodes: Vec::new(),
            slow: Vec::new(),
            links: None,
            numbers: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_differ_by_noise_are_the_same_after_rounding() {
        let of = |latency_us, gbps| Links { latency_us, gbps }.rounded();
        assert_eq!(of(100.0, 1.0), of(92.0, 1.05));
        assert_ne!(of(100.0, 1.0), of(200.0, 1.0));
        assert_eq!(of(f64::NAN, 1.0), None);
        assert_eq!(of(1.0, 0.0), None);
    }
}
