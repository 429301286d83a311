//! What is tried: algorithms, with Strata's own segments and window or with others.
#![forbid(unsafe_code)]

use super::bench::Bench;
use std::fmt;
use strata::algorithms::{self, Choice};
use strata::plan::Collective;
use strata::script::SharedScripts;
use strata::selection::table::Measured;
use strata::selection::{vendor, CarriedName};

/// Bytes of a block that are handled at a time, beside what Strata does by itself.
const SEGMENTS: [usize; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Segments in flight, beside what Strata does by itself.
const WINDOWS: [usize; 3] = [2, 8, 16];

/// A way to run a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// As `STRATA_<COLLECTIVE>_ALGO` names it, with a further carrier of the communicator's (`ring@mpi`).
    pub algorithm: String,
    /// `STRATA_SEGMENT_BYTES`; 0 leaves it as it is.
    pub segment_bytes: usize,
    /// `STRATA_WINDOW`; 0 leaves it as it is.
    pub window: usize,
}

impl Candidate {
    fn plain(algorithm: &str) -> Candidate {
        Candidate { algorithm: algorithm.to_string(), segment_bytes: 0, window: 0 }
    }

    /// The one that was measured.
    pub fn of(measured: &Measured) -> Candidate {
        let Measured { algorithm, segment_bytes, window, .. } = measured;
        Candidate { algorithm: algorithm.clone(), segment_bytes: *segment_bytes, window: *window }
    }

    fn without_carrier(&self) -> &str {
        CarriedName::parse(&self.algorithm).map_or("", |name| name.algorithm)
    }

    /// The same over each of these carriers.
    fn over(self, carriers: &[String]) -> Vec<Candidate> {
        let further = carriers.iter().map(|carrier| Candidate::plain(&format!("{}@{carrier}", self.algorithm)));
        let further = further.collect::<Vec<_>>();
        std::iter::once(self).chain(further).collect()
    }

    /// Whether it runs with Strata's own segments and window.
    pub fn is_plain(&self) -> bool {
        self.segment_bytes == 0 && self.window == 0
    }

    /// Whether other segments and windows can make a difference: not on a board, whose segments are its own, nor
    /// over providers and the vendor's communicators, which take messages whole.
    pub fn has_segments(&self, block_bytes: usize, vendor_rails: bool) -> bool {
        let is_whole = |choice: &Choice| algorithms::is_on_board(choice) || algorithms::provider_of(choice).is_some();
        let on_board = self.without_carrier().parse::<Choice>().is_ok_and(|choice| is_whole(&choice));
        block_bytes > SEGMENTS[0] && !on_board && self.algorithm != vendor::VENDOR && !vendor_rails
    }

    /// The same with other segments, shorter than a block.
    pub fn with_segments(&self, block_bytes: usize) -> Vec<Candidate> {
        let shorter = SEGMENTS.into_iter().filter(|&segment| segment < block_bytes);
        shorter.map(|segment_bytes| Candidate { segment_bytes, ..self.clone() }).collect()
    }

    /// The same with other windows.
    pub fn with_windows(&self) -> Vec<Candidate> {
        WINDOWS.map(|window| Candidate { window, ..self.clone() }).to_vec()
    }

    /// Whether a communicator made for this candidate can name its algorithm for a collective.
    pub fn does(&self, collective: Collective, scripts: &SharedScripts) -> bool {
        self.algorithm == vendor::VENDOR
            || scripts.choice(self.without_carrier()).is_ok_and(|choice| algorithms::does(&choice, collective))
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.algorithm)?;
        if self.segment_bytes > 0 {
            write!(f, ", segments of {}", super::report::size_text(self.segment_bytes))?;
        }
        if self.window > 0 {
            write!(f, ", window {}", self.window)?;
        }
        Ok(())
    }
}

/// What can do a collective here, with Strata's own segments and window.
pub fn serving(collective: Collective, bench: &Bench) -> Vec<Candidate> {
    let (grid, machine) = (bench.grid(), bench.machine());
    let scripts = bench.scripts().unique_names();
    let choices = || algorithms::choices_with(collective, grid, &scripts).into_iter();
    let named = |choice: Choice| Candidate::plain(&choice.to_string());
    if machine.vendor == "none" {
        // On one node nothing goes between nodes, whatever would carry it.
        let further = if grid.nnodes() > 1 { bench.further_carriers() } else { &[] };
        let own = choices().map(named).flat_map(|candidate| candidate.over(further));
        // A provider moves data its own way, whatever the carrier.
        let provided = |name: &str| Candidate::plain(&format!("{}{name}", algorithms::PROVIDER));
        return own.chain(bench.providers(collective).map(provided)).collect();
    }
    if !vendor::COLLECTIVES.contains(&collective) {
        return Vec::new();
    }
    let vendor = std::iter::once(Candidate::plain(vendor::VENDOR));
    match machine.inter.as_str() {
        // Inside the levels everything is the vendor's.
        "vendor" => vendor.chain(grid.is_even().then(|| Candidate::plain("two_level"))).collect(),
        _ => vendor.chain(choices().filter(|choice| !algorithms::is_on_board(choice)).map(named)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_is_tried_over_every_carrier() {
        let all = Candidate::plain("two_level(direct,log)").over(&["mpi".to_string()]);
        let names: Vec<&str> = all.iter().map(|candidate| candidate.algorithm.as_str()).collect();
        assert_eq!(names, ["two_level(direct,log)", "two_level(direct,log)@mpi"]);
        assert!(all.iter().all(|candidate| candidate.does(Collective::AllGather, &SharedScripts::default())));
    }

    #[test]
    fn segments_are_shorter_than_a_block_and_boards_and_the_vendor_have_none() {
        let ring = Candidate::plain("ring");
        let lengths: Vec<usize> = ring.with_segments(300_000).iter().map(|one| one.segment_bytes).collect();
        assert_eq!(lengths, [16 << 10, 64 << 10, 256 << 10]);
        assert!(ring.has_segments(300_000, false) && !ring.has_segments(300_000, true));
        assert!(!ring.has_segments(16 << 10, false));
        for name in ["board", "vendor", "board@tcp"] {
            assert!(!Candidate::plain(name).has_segments(1 << 30, false), "{name}");
        }
    }
}
