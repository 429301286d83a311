//! The tuning table: what was measured best on this machine, for each collective, world and size.
//!
//! `strata tune` writes it as TOML ([`read`] and [`mod@write`] have the format), `STRATA_TUNING_TABLE` names it. It is asked
//! after an algorithm that is named and after thresholds that the user has set, and before everything that Strata would
//! choose by itself.
//!
//! **Which row speaks.** Ranks and nodes must be those of the communicator: what is best on 8 ranks says little of 16.
//! Of a collective's rows the one counts whose bytes are nearest in proportion (1 MiB is as far from 512 KiB as from
//! 2 MiB; of two equally far the smaller one), and none beyond [`REACH`] times either way. Rows of NCCL's tuner plugin
//! name their sizes from and to, and the first that fits counts, as there.
//!
//! **Rank 0's table counts.** Its rows for the communicator travel with its settings when that is made ([`agree`]).
#![forbid(unsafe_code)]

pub mod agree;
mod nccl;
pub mod read;
pub mod write;

use super::{CommCarriers, Context, Request};
use crate::algorithms::{self, Choice};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::error::counted;
use crate::plan::Collective;
use serde::{Deserialize, Serialize};

/// The newest format that this Strata reads, and writes where a row has what older ones do not: a carrier.
pub const FORMAT: u64 = 2;
/// The oldest one, which all Stratas read.
pub const OLDEST_FORMAT: u64 = 1;
/// How many times larger or smaller than a measured message a message may be for the row to speak for it.
pub const REACH: usize = 16;
/// Rows that a table may have: a message with more would take longer than what it is to speed up.
pub const MOST_ROWS: usize = 100_000;

/// A table as its file has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Where it comes from; rows of NCCL's plugin say nothing of that.
    pub header: Option<TableHeader>,
    /// Its rows, in the file's order.
    pub rows: Vec<Row>,
    /// What a reader of the log should know about how it was read.
    pub notes: Vec<String>,
}

/// Where and with what a table was measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableHeader {
    /// Strata's version.
    pub strata: String,
    /// The day of the last row, as `2025-11-30`.
    pub date: String,
    /// The machine.
    pub machine: MeasuredOn,
}

/// What a measurement depends on beside the communicator's shape, in words that mean something to a reader.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredOn {
    /// The model of rank 0's processors.
    pub cpu: String,
    /// Where the data is: `host`, or the model of rank 0's GPU.
    pub device: String,
    /// What carries messages between nodes: `mpi`, `tcp`, `vendor`, or `none` on a single node.
    pub inter: String,
    /// The vendor's library and its release, or `none`.
    pub vendor: String,
}

impl MeasuredOn {
    /// In a line: `AMD EPYC 7A53 64-Core Processor, data on host, tcp between nodes, no vendor's library`.
    pub fn summary(&self) -> String {
        let MeasuredOn { cpu, device, inter, vendor } = self;
        let nodes = if inter == "none" { String::new() } else { format!(", {inter} between nodes") };
        let vendor = if vendor == "none" { "no vendor's library" } else { vendor };
        format!("{cpu}, data on {device}{nodes}, {vendor}")
    }

    /// What differs on a communicator of `nodes` nodes: `(what, there, here)`. On one node nothing goes between nodes.
    pub fn differences<'a>(&'a self, here: &'a MeasuredOn, nodes: usize) -> Vec<(&'static str, &'a str, &'a str)> {
        let all = [
            ("processor", &self.cpu, &here.cpu, true),
            ("device", &self.device, &here.device, true),
            ("transport between nodes", &self.inter, &here.inter, nodes > 1 && self.inter != "none"),
            ("vendor's library", &self.vendor, &here.vendor, true),
        ];
        let differ = all.into_iter().filter(|(_, there, here, counts)| *counts && there != here);
        differ.map(|(what, there, here, _)| (what, there.as_str(), here.as_str())).collect()
    }
}

/// The messages that a row speaks for, in bytes as [`message_bytes`](super::message_bytes) has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Size {
    /// Those nearer to this measured one than to another row's.
    Near(usize),
    /// Those from the first to the second, both included.
    Within(usize, usize),
}

/// What to do for messages of one size on one shape of world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The collective, by its name.
    pub collective: String,
    /// Ranks; any if none.
    pub ranks: Option<usize>,
    /// Nodes; any if none.
    pub nodes: Option<usize>,
    /// The messages.
    pub size: Size,
    /// The algorithm as [`Choice`] is written, or `vendor`; in rows of NCCL's plugin by NCCL's name.
    pub algorithm: String,
    /// What moves messages between nodes; none leaves that to the communicator.
    #[serde(default)]
    pub carrier: Option<String>,
    /// Bytes of each block handled at a time; 0 leaves it to Strata.
    pub segment_bytes: usize,
    /// Segments in flight; 0 leaves it to Strata.
    pub window: usize,
    /// What was measured, the fastest first.
    #[serde(skip)]
    pub measured: Vec<Measured>,
}

/// What one candidate took.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The algorithm.
    pub algorithm: String,
    /// Bytes of each block handled at a time; 0: as Strata does by itself.
    #[serde(default)]
    pub segment_bytes: usize,
    /// Segments in flight; 0: as Strata does by itself.
    #[serde(default)]
    pub window: usize,
    /// Microseconds of the slowest rank: half of the times are shorter.
    pub median_us: f64,
    /// A quarter is shorter.
    pub low_us: f64,
    /// A quarter is longer.
    pub high_us: f64,
    /// How many times it was timed; short calls several in a row.
    pub samples: usize,
}

/// What a table says of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The algorithm.
    pub choice: Choice,
    /// The further carrier by which it goes; none for the communicator's own.
    pub carrier: Option<Carrier>,
    /// Bytes of each block handled at a time; 0 leaves it to Strata.
    pub segment_bytes: usize,
    /// Segments in flight; 0 leaves it to Strata.
    pub window: usize,
    /// Why, for the log.
    pub reason: String,
}

/// The rows that all ranks of one communicator follow: rank 0's. The default has none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tuned {
    source: String,
    rows: Vec<Row>,
}

impl Tuned {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The row that speaks for a message of so many bytes.
    pub fn row(&self, collective: Collective, bytes: usize) -> Option<&Row> {
        let rows = || self.rows.iter().filter(|row| row.collective == collective.name());
        let fits = |row: &&Row| matches!(row.size, Size::Within(from, to) if (from..=to).contains(&bytes));
        if let Some(row) = rows().find(fits) {
            return Some(row);
        }
        let distance = |row: &Row| match row.size {
            Size::Near(point) => Some(times(point, bytes)),
            Size::Within(..) => None,
        };
        let near = rows().filter_map(|row| Some((distance(row)?, row)));
        let nearest = near.min_by(|(one, a), (other, b)| one.total_cmp(other).then(a.bytes().cmp(&b.bytes())));
        nearest.filter(|(distance, _)| *distance <= REACH as f64).map(|(_, row)| row)
    }

    /// What the table says of a call; nothing where the algorithm cannot run.
    pub fn advice(&self, request: &Request<'_>, context: &Context) -> Option<Advice> {
        if self.is_empty() {
            return None;
        }
        let row = self.row(request.collective, request.message_bytes(context))?;
        let choice: Choice = row.algorithm.parse().ok()?;
        if algorithms::is_on_board(&choice) && !(context.board && context.config.board) {
            return None;
        }
        if !super::provided::serves_row(&choice, request, context) {
            return None;
        }
        let root = algorithms::levels::script(&choice.name).and_then(|facts| facts.root);
        if root.is_some_and(|root| root != request.root) {
            return None;
        }
        let carrier = context.carriers.find_named(row.carrier.as_deref()).ok()?;
        let (segment_bytes, window) = (row.segment_bytes, row.window);
        Some(Advice { choice, carrier, segment_bytes, window, reason: self.reason(row) })
    }

    /// The rows for a communicator with these carriers, and what is said of others.
    pub fn over(&self, carriers: &CommCarriers) -> (Tuned, Option<String>) {
        let why = |row: &Row| carriers.find_named(row.carrier.as_deref()).err();
        let (rows, left_out): (Vec<&Row>, Vec<&Row>) = self.rows.iter().partition(|row| why(row).is_none());
        let complaint = left_out.first().and_then(|row| why(row)).map(|error| {
            let rows = counted(left_out.len(), "row");
            format!("tuning table {}: {rows} left out: {}", self.source, error.text())
        });
        (Tuned { source: self.source.clone(), rows: rows.into_iter().cloned().collect() }, complaint)
    }

    /// What the table says of a message over a vendor's library: whether that does it alone.
    pub fn leaves_to_vendor(&self, collective: Collective, bytes: usize) -> Option<bool> {
        self.row(collective, bytes).map(|row| row.algorithm == super::vendor::VENDOR)
    }

    /// Messages, in bytes, of which rows of a collective say that Strata does them in front of a vendor library.
    pub fn taken_over(&self, collective: Collective) -> impl Iterator<Item = usize> + '_ {
        let ours = move |row: &&Row| row.collective == collective.name() && row.algorithm != super::vendor::VENDOR;
        self.rows.iter().filter(ours).map(Row::bytes)
    }

    fn reason(&self, row: &Row) -> String {
        let size = match row.size {
            Size::Near(bytes) => format!("measured at {}", counted(bytes, "byte")),
            Size::Within(from, to) => format!("from {from} to {to} bytes"),
        };
        format!("the tuning table {} has it, {size}", self.source)
    }
}

impl Row {
    /// The measured size, or where the row begins.
    pub fn bytes(&self) -> usize {
        match self.size {
            Size::Near(bytes) | Size::Within(bytes, _) => bytes,
        }
    }

    /// Whether it is about a world of this shape.
    fn is_of(&self, ranks: usize, nodes: Option<usize>) -> bool {
        let fits = |wanted: Option<usize>, is: usize| wanted.is_none_or(|wanted| wanted == is);
        fits(self.ranks, ranks) && nodes.is_none_or(|nodes| fits(self.nodes, nodes))
    }
}

/// How many times the one is the other, whichever is larger.
fn times(one: usize, other: usize) -> f64 {
    let (one, other) = (one.max(1) as f64, other.max(1) as f64);
    (one / other).max(other / one)
}

/// Whether the user has set a threshold by which this collective's algorithm is chosen.
pub fn has_thresholds(collective: Collective, config: &Config) -> bool {
    let own: &[&str] = match collective {
        Collective::AllReduce => &["STRATA_ALLREDUCE_ONE_ROUND_MAX_BYTES", "STRATA_ALLREDUCE_RD_MAX_BYTES"],
        Collective::AllGather => &["STRATA_ALLGATHER_RD_MAX_BYTES"],
        Collective::ReduceScatter => &["STRATA_REDUCESCATTER_RD_MAX_BYTES"],
        Collective::AllToAll => &["STRATA_ALLTOALL_TWO_STEP_MAX_BYTES"],
        Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter => {
            &["STRATA_TREE_MAX_BYTES"]
        }
        Collective::Custom => return false,
    };
    own.iter().chain(&["STRATA_DIRECT_MAX_RANKS"]).any(|name| config.is_given(name))
}

/// The same for a collective over a vendor's library, where fewer of them decide.
pub fn has_thresholds_over(collective: Collective, config: &Config) -> bool {
    let own = match collective {
        Collective::AllGather => "STRATA_ALLGATHER_RD_MAX_BYTES",
        Collective::ReduceScatter => "STRATA_REDUCESCATTER_RD_MAX_BYTES",
        _ => return false,
    };
    config.is_given(own) || config.is_given("STRATA_TWO_LEVEL_MIN_NODES")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::selection) fn row(collective: Collective, bytes: usize, algorithm: &str) -> Row {
        Row {
            collective: collective.name().to_string(),
            ranks: Some(4),
            nodes: Some(2),
            size: Size::Near(bytes),
            algorithm: algorithm.to_string(),
            carrier: None,
            segment_bytes: 0,
            window: 0,
            measured: Vec::new(),
        }
    }

    pub(in crate::selection) fn tuned(rows: &[Row]) -> Tuned {
        Tuned { source: "t.toml".to_string(), rows: rows.to_vec() }
    }

    #[test]
    fn the_row_nearest_in_proportion_speaks_and_none_from_too_far() {
        let rows = [1024, 1 << 20].map(|bytes| row(Collective::AllGather, bytes, "ring"));
        let tuned = tuned(&rows);
        let at = |bytes| tuned.row(Collective::AllGather, bytes).map(Row::bytes);
        assert_eq!(at(1024), Some(1024));
        assert_eq!(at(1024 * REACH), Some(1024));
        assert_eq!(at(1024 * REACH + 1), None, "too far from both");
        assert_eq!(at((1 << 20) / REACH), Some(1 << 20));
        assert_eq!(at(64), Some(1024));
        assert_eq!(at(63), None);
        assert_eq!(at(0), None);
        assert_eq!(at(usize::MAX), None);
        assert_eq!(tuned.row(Collective::AllReduce, 1024), None);
    }

    #[test]
    fn of_two_rows_equally_far_the_smaller_one_speaks() {
        let tuned = tuned(&[4096, 1024].map(|bytes| row(Collective::AllGather, bytes, "ring")));
        assert_eq!(tuned.row(Collective::AllGather, 2048).map(Row::bytes), Some(1024));
        assert_eq!(tuned.row(Collective::AllGather, 2049).map(Row::bytes), Some(4096));
    }

    #[test]
    fn of_ranges_the_first_that_fits_speaks() {
        let within =
            |from, to, algorithm| Row { size: Size::Within(from, to), ..row(Collective::AllReduce, 0, algorithm) };
        let tuned = tuned(&[within(0, 100, "ring"), within(50, 200, "log")]);
        let at = |bytes| tuned.row(Collective::AllReduce, bytes).map(|row| row.algorithm.as_str());
        assert_eq!([at(0), at(100), at(101), at(201)], [Some("ring"), Some("ring"), Some("log"), None]);
    }

    #[test]
    fn thresholds_of_another_collective_say_nothing() {
        let given =
            |names: &[&str]| Config { given: names.iter().map(|name| name.to_string()).collect(), ..Config::default() };
        let set = |collective, names: &[&str]| has_thresholds(collective, &given(names));
        assert!(!set(Collective::AllGather, &["STRATA_TREE_MAX_BYTES", "STRATA_WINDOW"]));
        assert!(set(Collective::AllGather, &["STRATA_ALLGATHER_RD_MAX_BYTES"]));
        assert!(set(Collective::AllGather, &["STRATA_DIRECT_MAX_RANKS"]));
        assert!(!set(Collective::Reduce, &["STRATA_ALLGATHER_RD_MAX_BYTES"]));
        assert!(set(Collective::Reduce, &["STRATA_TREE_MAX_BYTES"]));
    }

    #[test]
    fn a_board_that_is_not_there_is_not_advised() {
        let tuned = tuned(&[row(Collective::AllGather, 4096, "board")]);
        let asked = |board, config: &Config| {
            let grid = std::sync::Arc::new(crate::topo::Grid::flat(4));
            let request = Request::new(Collective::AllGather, 1024);
            tuned.advice(&request, &Context::new(grid, config.clone(), board)).is_some()
        };
        assert!(asked(true, &Config::default()));
        assert!(!asked(false, &Config::default()));
        assert!(!asked(true, &Config { board: false, ..Config::default() }));
    }

    #[test]
    fn another_machine_is_told_apart_and_on_one_node_the_transport_does_not_matter() {
        let machine = |inter: &str| MeasuredOn {
            cpu: "a".to_string(),
            device: "host".to_string(),
            inter: inter.to_string(),
            vendor: "none".to_string(),
        };
        assert_eq!(machine("tcp").differences(&machine("mpi"), 2), [("transport between nodes", "tcp", "mpi")]);
        assert_eq!(machine("tcp").differences(&machine("none"), 1), []);
        let other = MeasuredOn { cpu: "b".to_string(), vendor: "NCCL 2.27.5".to_string(), ..machine("tcp") };
        assert_eq!(
            other.differences(&machine("tcp"), 2),
            [("processor", "b", "a"), ("vendor's library", "NCCL 2.27.5", "none")]
        );
    }
}
