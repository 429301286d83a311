//! How all ranks of a communicator come to follow one table: rank 0's.
//!
//! Rank 0 sends what of its table concerns a world of so many ranks, with the machine that it was measured on and the one
//! that it is used on. When nodes and transport are known, every rank decides alike which rows hold. The others compare
//! their own file with rank 0's by a digest, so that a difference is told.
#![forbid(unsafe_code)]

use super::{MeasuredOn, Row, Table, Tuned};
use crate::algorithms;
use crate::carrier::Carrier;
use crate::config::Config;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::plan::{Collective, Shape};
use crate::script::{store, SharedScripts};
use crate::selection::by_nccl_name;
use crate::selection::vendor;
use crate::topo::Grid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The value of `STRATA_TUNING_TABLE` that names no table.
pub const NONE: &str = "none";

/// A process's own table.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnTable {
    path: String,
    /// Of the file's text; 0 if there is none.
    digest: u64,
    table: std::result::Result<Option<Table>, String>,
}

/// What rank 0 sends.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    path: String,
    digest: u64,
    /// Where the table was measured, if it says so.
    there: Option<MeasuredOn>,
    /// Rank 0's machine, but for what carries messages between nodes.
    here: MeasuredOn,
    /// Why the table cannot be used.
    refused: Option<String>,
    rows: Vec<Row>,
}

/// Who is to follow a table.
#[derive(Debug)]
pub struct Followers<'a> {
    /// Which rank is on which node.
    pub grid: &'a Arc<Grid>,
    /// What carries messages between nodes.
    pub inter: Option<Carrier>,
    /// What goes between nodes where the vendor's library serves the program; none without one.
    pub in_front: bool,
    /// The scripts that they have.
    pub scripts: &'a SharedScripts,
}

/// What came of it.
#[derive(Debug, Default, PartialEq)]
pub struct Agreed {
    /// The rows that hold.
    pub tuned: Tuned,
    /// For rank 0's user: why the table, or rows of it, are not used.
    pub complaint: Option<String>,
    /// For the log of this rank: its own table is another one.
    pub difference: Option<String>,
}

impl OwnTable {
    /// Reads what `STRATA_TUNING_TABLE` names.
    pub fn load(config: &Config) -> OwnTable {
        let path = config.tuning_table.clone();
        if path == NONE || path.is_empty() {
            return OwnTable { path: NONE.to_string(), digest: 0, table: Ok(None) };
        }
        let text = Table::text(Path::new(&path));
        let digest = Digest::new("tuning table").text(text.as_deref().unwrap_or_default()).value() as u64 | 1;
        let table = match &text {
            Ok(text) => Table::parse(text).map(Some).map_err(|error| unused(&path, error.text())),
            Err(error) => Err(error.text().to_string()),
        };
        OwnTable { path, digest, table }
    }

    /// Whether one is named.
    pub fn is_named(&self) -> bool {
        self.path != NONE
    }

    /// What should be known of how it was read.
    pub fn notes(&self) -> &[String] {
        match &self.table {
            Ok(Some(table)) => &table.notes,
            _ => &[],
        }
    }

    /// Whether a row for so many ranks has this script in its algorithm.
    pub fn names_script(&self, nranks: usize, name: &str) -> bool {
        let rows = self.table.iter().flatten().flat_map(|table| &table.rows);
        rows.filter(|row| row.is_of(nranks, None)).any(|row| store::names_script(&row.algorithm, name))
    }

    /// What rank 0 sends to a communicator of so many ranks; `here` is its machine, but for what carries messages
    /// between nodes.
    pub fn offer(&self, here: MeasuredOn, nranks: usize) -> String {
        let mut offer =
            Offer { path: self.path.clone(), digest: self.digest, there: None, here, refused: None, rows: Vec::new() };
        match &self.table {
            Ok(None) => {}
            Err(why) => offer.refused = Some(why.clone()),
            Ok(Some(table)) => {
                let why = table.header.as_ref().and_then(|header| header.other_version());
                offer.refused = why.map(|why| unused(&self.path, &why));
                offer.there = table.header.as_ref().map(|header| header.machine.clone());
                if offer.refused.is_none() {
                    let bare = |row: &Row| Row { measured: Vec::new(), ..row.clone() };
                    offer.rows = table.rows.iter().filter(|row| row.is_of(nranks, None)).map(bare).collect();
                }
            }
        }
        serde_json::to_string(&offer).unwrap_or_default()
    }

    /// What all ranks follow, by rank 0's offer. An offer that cannot be read is a `Remote` error.
    pub fn agree(&self, offer: &str, world: &Followers<'_>) -> Result<Agreed> {
        let offer: Offer = serde_json::from_str(offer)
            .map_err(|error| Error::Remote(format!("rank 0 sent a tuning table that cannot be read: {error}")))?;
        let mut agreed = Agreed { difference: self.difference(&offer), ..Agreed::default() };
        if offer.refused.is_some() {
            return Ok(Agreed { complaint: offer.refused, ..agreed });
        }
        let here = MeasuredOn { inter: Carrier::name_of(world.inter).to_string(), ..offer.here };
        if let Some(there) = offer.there.as_ref() {
            let differences = there.differences(&here, world.grid.nnodes());
            if !differences.is_empty() {
                let why = another_machine(&differences);
                return Ok(Agreed { complaint: Some(unused(&offer.path, &why)), ..agreed });
            }
        }
        let mut rejected = BTreeSet::new();
        let from_nccl = offer.there.is_none();
        for row in offer.rows.into_iter().filter(|row| row.is_of(world.grid.nranks(), Some(world.grid.nnodes()))) {
            match algorithm(&row, world, from_nccl) {
                Ok(algorithm) => agreed.tuned.rows.push(Row { algorithm, ..row }),
                Err(why) => drop(rejected.insert(why)),
            }
        }
        if !rejected.is_empty() {
            let all: Vec<String> = rejected.into_iter().collect();
            agreed.complaint = Some(format!("tuning table {}: rows left out: {}", offer.path, all.join("; ")));
        }
        agreed.tuned.source = offer.path;
        Ok(agreed)
    }

    /// What differs from rank 0's, in words.
    fn difference(&self, offer: &Offer) -> Option<String> {
        if self.digest == offer.digest {
            return None;
        }
        let counts = match offer.digest {
            0 => "rank 0 has none, which counts".to_string(),
            _ => format!("rank 0's is {}, which counts", offer.path),
        };
        Some(match &self.table {
            Ok(None) => format!("STRATA_TUNING_TABLE is none here; {counts}"),
            Err(why) => format!("{why}; {counts}"),
            Ok(Some(_)) => format!("the tuning table {} is another one than rank 0's: {counts}", self.path),
        })
    }
}

fn unused(path: &str, why: &str) -> String {
    format!("tuning table {path} is not used: {why}")
}

/// `it was measured on another machine (processor A, here B)`
pub fn another_machine(differences: &[(&str, &str, &str)]) -> String {
    let tell = |(what, there, here): &(&str, &str, &str)| format!("{what} {there}, here {here}");
    let all: Vec<String> = differences.iter().map(tell).collect();
    format!("it was measured on another machine ({})", all.join("; "))
}

/// A row's algorithm as it is called here, or why it cannot run.
fn algorithm(row: &Row, world: &Followers<'_>, from_nccl: bool) -> std::result::Result<String, String> {
    let name = row.algorithm.as_str();
    let Some(collective) = Collective::from_name(&row.collective) else {
        return Err(format!("there is no collective {}", row.collective));
    };
    let cannot = |why: &str| Err(format!("{name} for {} {why}", row.collective));
    if !world.in_front {
        if name == vendor::VENDOR {
            return cannot("needs a vendor's library");
        }
        return match by_nccl_name(name, collective, world.grid, world.scripts) {
            Some(choice) if algorithms::code_of(&choice).is_some() => {
                cannot("loses precision, which a call asks for or STRATA_<COLLECTIVE>_CODE, and no table")
            }
            Some(choice) => Ok(choice.exact()),
            None => cannot(&format!("does not exist, or not on {}", world.grid)),
        };
    }
    if name == vendor::VENDOR || from_nccl {
        // What NCCL's plugin is told is NCCL's own choice.
        return Ok(vendor::VENDOR.to_string());
    }
    let choice = world.scripts.choice(name).map_err(|error| error.text().to_string())?;
    let does =
        algorithms::supports(&choice, &Shape::new(collective, world.grid.clone())) && !algorithms::is_on_board(&choice);
    let is_own = world.inter.is_some_and(Carrier::is_own);
    let fits = vendor::COLLECTIVES.contains(&collective) && (is_own || algorithms::is_leveled(&choice));
    match does && fits {
        true => Ok(choice.exact()),
        false => cannot("does not run over a vendor's library here"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::super::{Size, TableHeader};
    use super::*;

    fn machine() -> MeasuredOn {
        let text = |text: &str| text.to_string();
        MeasuredOn { cpu: text("a"), device: text("host"), inter: text("tcp"), vendor: text("none") }
    }

    fn local(rows: Vec<Row>, strata: &str) -> OwnTable {
        let header = TableHeader { strata: strata.to_string(), date: String::new(), machine: machine() };
        let table = Table { header: Some(header), rows, notes: Vec::new() };
        OwnTable { path: "t.toml".to_string(), digest: 3, table: Ok(Some(table)) }
    }

    fn none() -> OwnTable {
        OwnTable::load(&Config::default())
    }

    fn agreed(zero: &OwnTable, other: &OwnTable, inter: Carrier, in_front: bool) -> Agreed {
        let offer = zero.offer(MeasuredOn { inter: String::new(), ..machine() }, 4);
        let grid = Arc::new(Grid::blocks(&[2, 2]));
        other
            .agree(&offer, &Followers { grid: &grid, inter: Some(inter), in_front, scripts: &SharedScripts::default() })
            .unwrap()
    }

    const OWN: &str = env!("CARGO_PKG_VERSION");

    #[test]
    fn rows_of_the_communicator_s_shape_hold_on_all_ranks_and_a_rank_without_them_hears_of_it() {
        let elsewhere = Row { nodes: Some(1), ..row(Collective::AllGather, 64, "ring") };
        let larger = Row { ranks: Some(8), ..row(Collective::AllGather, 64, "ring") };
        let zero = local(vec![elsewhere, larger, row(Collective::AllGather, 64, "log")], OWN);
        let other = agreed(&zero, &none(), Carrier::TCP, false);
        assert_eq!(other.tuned.len(), 1);
        assert_eq!(other.tuned.rows[0].algorithm, "log");
        assert_eq!(
            other.difference.as_deref(),
            Some("STRATA_TUNING_TABLE is none here; rank 0's is t.toml, which counts")
        );
        let same = agreed(&zero, &zero, Carrier::TCP, false);
        assert_eq!((&same.tuned, same.difference, same.complaint), (&other.tuned, None, None));
        let nobody = agreed(&none(), &zero, Carrier::TCP, false);
        assert!(nobody.tuned.is_empty() && nobody.difference.unwrap().ends_with("rank 0 has none, which counts"));
        assert_eq!(agreed(&none(), &none(), Carrier::TCP, false), Agreed { tuned: nobody.tuned, ..Agreed::default() });
    }

    #[test]
    fn tables_of_another_version_machine_or_transport_are_not_used_and_told_once() {
        let rows = || vec![row(Collective::AllGather, 64, "log")];
        let old = agreed(&local(rows(), "7.9.0"), &none(), Carrier::TCP, false);
        assert!(old.tuned.is_empty() && old.complaint.unwrap().contains("with Strata 7.9.0"));
        let foreign = agreed(&local(rows(), OWN), &none(), Carrier::MPI, false);
        assert!(foreign.tuned.is_empty());
        assert_eq!(
            foreign.complaint.as_deref(),
            Some(
                "tuning table t.toml is not used: it was measured on another machine \
                 (transport between nodes tcp, here mpi)"
            )
        );
        let broken = OwnTable { table: Err("line 3: no".to_string()), ..local(Vec::new(), OWN) };
        assert_eq!(agreed(&broken, &broken, Carrier::TCP, false).complaint.as_deref(), Some("line 3: no"));
    }

    #[test]
    fn what_cannot_run_is_left_out_with_a_reason() {
        let rows = vec![
            row(Collective::AllGather, 1, "ring"),
            row(Collective::AllGather, 2, "rign"),
            row(Collective::AllGather, 3, "vendor"),
            row(Collective::AllGather, 4, "reduce_scatter_gather"),
            row(Collective::AllGather, 5, "board"),
            row(Collective::AllGather, 6, "two_level(direct,coded_mx8)"),
            row(Collective::AllGather, 7, "mx8"),
        ];
        let host = agreed(&local(rows, OWN), &none(), Carrier::TCP, false);
        assert_eq!(host.tuned.len(), 1);
        let complaint = host.complaint.unwrap();
        for part in [
            "rign for all_gather",
            "vendor for all_gather needs",
            "reduce_scatter_gather for",
            "board for",
            "coded_mx8) for all_gather loses",
        ] {
            assert!(complaint.contains(part), "{complaint}");
        }
    }

    #[test]
    fn over_a_vendor_s_library_rows_name_it_or_two_levels() {
        let rows = ["vendor", "two_level", "ring"].map(|name| row(Collective::AllGather, name.len(), name));
        let names = |carrier: Carrier| {
            let mut local = local(rows.to_vec(), OWN);
            if let Ok(Some(Table { header: Some(header), .. })) = &mut local.table {
                header.machine.inter = carrier.name().to_string();
            }
            let agreed = agreed(&local, &none(), carrier, true);
            agreed.tuned.rows.into_iter().map(|row| row.algorithm).collect::<Vec<_>>()
        };
        assert_eq!(names(Carrier::Vendor), ["vendor", "two_level(direct,log)"]);
        assert_eq!(names(Carrier::TCP), ["vendor", "two_level(direct,log)", "ring"]);
    }

    #[test]
    fn nccl_s_names_become_ours_and_over_nccl_they_are_the_vendor_s() {
        let text =
            "allreduce,0,100,tree,simple,1,-1,-1\nbroadcast,0,100,tree,simple,1,2,4\nallgather,0,9,nvls,ll,1,2,4\n";
        let local =
            OwnTable { table: Table::parse(text).map(Some).map_err(|e| e.to_string()), ..local(Vec::new(), OWN) };
        let host = agreed(&local, &none(), Carrier::TCP, false);
        let names: Vec<&str> = host.tuned.rows.iter().map(|row| row.algorithm.as_str()).collect();
        assert_eq!(names, ["log", "tree"]);
        assert!(host.complaint.unwrap().contains("nvls for all_gather"));
        let over = agreed(&local, &none(), Carrier::Vendor, true);
        assert!(over.tuned.rows.iter().all(|row| row.algorithm == "vendor"));
        assert_eq!(over.tuned.rows[0].size, Size::Within(0, 100));
    }
}
