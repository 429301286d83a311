//! The table that grows: read once, replaced after every row, never half written.
#![forbid(unsafe_code)]

use super::bench::Bench;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::selection::table::{agree, Row, Table, TableHeader};

/// The file, on process 0; what it has already, on all.
pub struct Output {
    path: PathBuf,
    table: Table,
    shape: (Option<usize>, Option<usize>),
}

impl Output {
    /// Goes on with the file that is there, if it is a table of this machine. Collective.
    pub fn open(path: &Path, bench: &mut Bench, again: bool) -> Result<Output> {
        let mine = match bench.is_first() {
            true => existing(path, bench, again).map(|table| table.to_toml()),
            false => Ok(String::new()),
        };
        let table = Table::parse(&bench.first_says(mine)?)?;
        let shape = (Some(bench.grid().nranks()), Some(bench.grid().nnodes()));
        Ok(Output { path: path.to_path_buf(), table, shape })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has a row for this message on this world.
    pub fn has(&self, collective: Collective, bytes: usize) -> bool {
        self.table.rows.iter().any(|row| {
            row.collective == collective.name() && (row.ranks, row.nodes) == self.shape && row.bytes() == bytes
        })
    }

    /// Adds a row, or puts it in the place of the one for the same message; process 0 writes. Collective.
    pub fn add(&mut self, row: Row, bench: &mut Bench) -> Result<()> {
        let key = |row: &Row| {
            let collective = Collective::ALL.iter().position(|known| known.name() == row.collective);
            (row.nodes, row.ranks, collective, row.bytes())
        };
        self.table.rows.retain(|known| key(known) != key(&row));
        self.table.rows.push(row);
        self.table.rows.sort_by_key(key);
        let written = match bench.is_first() {
            true => replace(&self.path, &self.table.to_toml()).map(|()| String::new()),
            false => Ok(String::new()),
        };
        bench.first_says(written).map(drop)
    }
}

/// What a run begins with, on process 0.
fn existing(path: &Path, bench: &Bench, again: bool) -> Result<Table> {
    let date = day(SystemTime::now());
    let header = TableHeader { strata: bench.strata().to_string(), date, machine: bench.machine().clone() };
    let empty = Table { header: Some(header.clone()), rows: Vec::new(), notes: Vec::new() };
    if !path.exists() {
        // Found out now and not after the first row.
        replace(path, &empty.to_toml())?;
        return Ok(empty);
    }
    let refuse = |why: String| {
        Err(Error::InvalidArgument(format!(
            "{} stays as it is: {why}; give another -o, or --again to write over it",
            path.display()
        )))
    };
    let text = Table::text(path)?;
    let known = match Table::parse(&text) {
        Ok(known) => known,
        Err(_) if again => return Ok(empty),
        Err(error) => return refuse(error.text().to_string()),
    };
    let Some(there) = known.header else { return refuse("it has rows of NCCL's tuner plugin".to_string()) };
    // All that is measured goes into the table: on one node, too, transports may matter to the next world.
    let differences = there.machine.differences(&header.machine, bench.grid().nnodes());
    let why = match there.other_version() {
        None if differences.is_empty() => None,
        None => Some(agree::another_machine(&differences)),
        why => why,
    };
    match why {
        None => {
            let inter = [&there.machine.inter, &header.machine.inter].into_iter().find(|inter| *inter != "none");
            let machine = match inter {
                Some(inter) => strata::selection::table::MeasuredOn { inter: inter.clone(), ..header.machine },
                None => header.machine,
            };
            Ok(Table { header: Some(TableHeader { machine, ..header }), rows: known.rows, notes: Vec::new() })
        }
        Some(_) if again => Ok(empty),
        Some(why) => refuse(why),
    }
}

/// Puts a whole file in the place of another, or of none.
fn replace(path: &Path, text: &str) -> Result<()> {
    let fresh = path.with_extension(format!("{}.tmp", std::process::id()));
    let outcome = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, path));
    outcome.map_err(|error| {
        let _ = std::fs::remove_file(&fresh);
        Error::System(format!("cannot write {}: {error}", path.display()))
    })
}

/// The day in UTC, as `2025-11-30`.
fn day(now: SystemTime) -> String {
    let days = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400);
    // Years that begin in March end with the leap day; 400 of them have 146,097 days.
    let from_march = days + 719_468;
    let (era, of_era) = (from_march / 146_097, from_march % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_are_those_of_the_calendar() {
        let at = |seconds| day(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01");
        assert_eq!(at(951_782_400), "2000-02-29");
        assert_eq!(at(951_868_800), "2000-03-01");
        assert_eq!(at(1_735_689_599), "2024-12-31");
        assert_eq!(at(4_107_542_400), "2100-03-01");
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let dir = std::env::temp_dir().join(format!("strata-tune-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("table.toml");
        replace(&path, "one").unwrap();
        replace(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        let told = replace(&dir.join("no/such/table.toml"), "").unwrap_err();
        assert!(told.text().contains("no/such/table.toml"), "{told}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
