//! Reads a tuning table: the TOML that `strata tune` writes, or the CSV of NCCL's tuner plugin.
//!
//! ```toml
//! format = 1
//! strata = "0.1.0"
//! date = "2025-11-30"
//!
//! [machine]
//! cpu = "AMD EPYC 7A53 64-Core Processor"
//! device = "host"
//! inter = "tcp"
//! vendor = "none"
//!
//! [[row]]
//! collective = "all_gather"
//! ranks = 8
//! nodes = 2
//! bytes = 1048576
//! algorithm = "two_level(direct,log)"
//! carrier = "mpi"            # of format 2; may be left out: the communicator's own
//! segment_bytes = 65536      # may be left out, as may the window: Strata chooses then
//! window = 4
//! measured = [
//!     { algorithm = "two_level(direct,log)", segment_bytes = 65536, window = 4, median_us = 812.5, low_us = 801.0, high_us = 840.1, samples = 45 },
//!     { algorithm = "ring", median_us = 1137.0, low_us = 1120.4, high_us = 1190.8, samples = 5 },
//! ]
//! ```
//!
//! Total on any text: a table, or an error that names the line.
#![forbid(unsafe_code)]

use super::{nccl, Measured, MeasuredOn, Row, Size, Table, TableHeader, FORMAT, MOST_ROWS, OLDEST_FORMAT};
use crate::carrier::Carrier;
use crate::error::{Error, Lines, Result};
use crate::plan::Collective;
use crate::selection::CarriedName;
use serde::Deserialize;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;

/// Longer files are no tuning tables.
const MOST_BYTES: u64 = 64 << 20;
/// As `STRATA_WINDOW` has it.
const MOST_WINDOW: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "format")]
    _format: u64,
    strata: Spanned<String>,
    date: String,
    machine: MeasuredOn,
    #[serde(default)]
    row: Vec<Spanned<RowText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RowText {
    collective: Spanned<String>,
    ranks: Spanned<usize>,
    nodes: Spanned<usize>,
    bytes: usize,
    algorithm: Spanned<String>,
    #[serde(default)]
    carrier: Option<Spanned<String>>,
    #[serde(default)]
    segment_bytes: usize,
    #[serde(default)]
    window: Option<Spanned<usize>>,
    #[serde(default)]
    measured: Vec<Measured>,
}

/// An error about a line, counted from 1.
pub(super) fn at_line(line: usize, what: &str) -> Error {
    Error::InvalidArgument(format!("line {line}: {what}"))
}

impl Table {
    /// Reads a file; the error names it.
    pub fn load(path: &Path) -> Result<Table> {
        Table::parse(&Table::text(path)?).map_err(|error| named(path, error.text()))
    }

    /// The text of a file, if it can be one of a table.
    pub fn text(path: &Path) -> Result<String> {
        let size = std::fs::metadata(path).map_err(|error| named(path, &error.to_string()))?;
        if !size.is_file() || size.len() > MOST_BYTES {
            return Err(named(path, "it is no tuning table: not a file, or too long for one"));
        }
        let bytes = std::fs::read(path).map_err(|error| named(path, &error.to_string()))?;
        String::from_utf8(bytes).map_err(|error| {
            let line = Lines::of(&String::from_utf8_lossy(error.as_bytes())).at(error.utf8_error().valid_up_to());
            named(path, &format!("line {line}: bytes that are not UTF-8"))
        })
    }

    /// The table that a text is, in either format.
    pub fn parse(text: &str) -> Result<Table> {
        match nccl::is_like(text) {
            true => nccl::parse(text),
            false => parse_toml(text),
        }
    }
}

fn named(path: &Path, what: &str) -> Error {
    Error::InvalidArgument(format!("tuning table {} is not used: {what}", path.display()))
}

fn parse_toml(text: &str) -> Result<Table> {
    let lines = Lines::of(text);
    let refuse = |error: toml::de::Error| {
        let line = lines.at(error.span().map_or(0, |span| span.start));
        at_line(line, error.message().trim())
    };
    // Another format may have other fields: that is the news then, not the first of them.
    let format = text.parse::<toml::Table>().map_err(refuse)?.get("format").and_then(toml::Value::as_integer);
    match format {
        None => return Err(at_line(1, "a tuning table begins with `format = 1`")),
        Some(format) if !(OLDEST_FORMAT as i64..=FORMAT as i64).contains(&format) => {
            let text = format!("its format is {format}; this Strata reads formats {OLDEST_FORMAT} to {FORMAT}");
            return Err(Error::InvalidArgument(text));
        }
        Some(_) => {}
    }
    let has_carriers = format == Some(FORMAT as i64);
    let file: File = toml::from_str(text).map_err(refuse)?;
    if file.row.len() > MOST_ROWS {
        return Err(Error::InvalidArgument(format!("{} rows; {MOST_ROWS} are the most", file.row.len())));
    }
    let line = |span: Range<usize>| lines.at(span.start);
    if major_minor(file.strata.get_ref()).is_none() {
        let what = format!("`{}` is no version of Strata", file.strata.get_ref());
        return Err(at_line(line(file.strata.span()), &what));
    }
    let mut known = HashMap::new();
    let mut rows = Vec::with_capacity(file.row.len());
    for row in file.row {
        let at = line(row.span());
        let row = row.into_inner().checked(&line, has_carriers)?;
        let key = (row.collective.clone(), row.ranks, row.nodes, row.bytes());
        if let Some(first) = known.insert(key, at) {
            return Err(at_line(at, &format!("the row of line {first} is about the same messages")));
        }
        rows.push(row);
    }
    let header = TableHeader { strata: file.strata.into_inner(), date: file.date, machine: file.machine };
    Ok(Table { header: Some(header), rows, notes: Vec::new() })
}

impl RowText {
    /// The algorithm and the carrier, which may be in the algorithm's name.
    fn named(&self, line: &impl Fn(Range<usize>) -> usize, has_carriers: bool) -> Result<(String, Option<String>)> {
        let wrong = |at: &Spanned<String>, what: &str| Err(at_line(line(at.span()), what));
        let name = match CarriedName::parse(self.algorithm.get_ref()) {
            Ok(name) => name,
            Err(error) => return wrong(&self.algorithm, error.text()),
        };
        let given = self.carrier.as_ref();
        let field = match given.map(|carrier| (carrier, carrier.get_ref().parse::<Carrier>())) {
            None => None,
            Some((carrier, Err(what))) => return wrong(carrier, &what),
            Some((_, Ok(carrier))) => Some(carrier),
        };
        let place = given.unwrap_or(&self.algorithm);
        match (name.carrier, field) {
            (Some(_), Some(_)) => wrong(place, "the algorithm's name has a carrier already"),
            (None, None) => Ok((name.algorithm.to_string(), None)),
            _ if !has_carriers => wrong(place, &format!("a carrier takes `format = {FORMAT}`")),
            (one, other) => Ok((name.algorithm.to_string(), one.or(other).map(|carrier| carrier.name().to_string()))),
        }
    }

    fn checked(self, line: &impl Fn(Range<usize>) -> usize, has_carriers: bool) -> Result<Row> {
        let wrong = |span: Range<usize>, what: &str| Err(at_line(line(span), what));
        let name = self.collective.get_ref();
        let Some(collective) = Collective::from_name(name) else {
            let names = Collective::ALL.map(Collective::name).join(", ");
            return wrong(self.collective.span(), &format!("there is no collective `{name}`; there are {names}"));
        };
        let (ranks, nodes) = (*self.ranks.get_ref(), *self.nodes.get_ref());
        if ranks == 0 {
            return wrong(self.ranks.span(), "0 ranks");
        }
        if nodes == 0 || nodes > ranks {
            return wrong(self.nodes.span(), &format!("{ranks} ranks cannot be on {nodes} nodes"));
        }
        let (algorithm, carrier) = self.named(line, has_carriers)?;
        if algorithm.is_empty() || algorithm.contains(char::is_control) {
            return wrong(self.algorithm.span(), "the algorithm has no name");
        }
        let window = self.window.as_ref().map_or(0, |window| *window.get_ref());
        if let Some(given) = self.window.as_ref().filter(|_| window > MOST_WINDOW) {
            return wrong(given.span(), &format!("a window of {window} segments; {MOST_WINDOW} are the most"));
        }
        let times = |measured: &Measured| [measured.median_us, measured.low_us, measured.high_us];
        if self.measured.iter().flat_map(times).any(|time| !time.is_finite() || time < 0.0) {
            return wrong(self.collective.span(), "times that are no times");
        }
        Ok(Row {
            collective: collective.name().to_string(),
            ranks: Some(ranks),
            nodes: Some(nodes),
            size: Size::Near(self.bytes),
            algorithm,
            carrier,
            segment_bytes: self.segment_bytes,
            window,
            measured: self.measured,
        })
    }
}

/// `(0, 1)` for `0.1.7`.
fn major_minor(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

impl TableHeader {
    /// Why a table is of no use to this Strata, if so.
    pub fn other_version(&self) -> Option<String> {
        let own = env!("CARGO_PKG_VERSION");
        (major_minor(&self.strata) != major_minor(own)).then(|| {
            format!("it was measured with Strata {}, and this is {own}: measure anew (`strata tune`)", self.strata)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::write::tests::sample;
    use super::*;
    use proptest::prelude::*;

    fn told(text: &str) -> String {
        Table::parse(text).unwrap_err().text().to_string()
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let good = sample().to_toml();
        let line = |part: &str| good.lines().position(|line| line.starts_with(part)).unwrap() + 1;
        let changed = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            told(&good.replacen(from, to, 1))
        };
        let cases = [
            ("collective = \"all_gather\"", "collective = \"gathr\"", "collective", "there is no collective `gathr`"),
            ("ranks = 8", "ranks = 0", "ranks", "0 ranks"),
            ("ranks = 8", "ranks = -8", "ranks", ""),
            ("nodes = 2", "nodes = 9", "nodes", "8 ranks cannot be on 9 nodes"),
            ("bytes = 1048576", "bytes = \"many\"", "bytes", "string"),
            ("bytes = 1048576", "bites = 1048576", "bytes", "unknown field `bites`"),
            ("window = 4", "window = 65", "window", "a window of 65 segments"),
            ("strata = \"", "strata = \"x", "strata", "is no version of Strata"),
            ("algorithm = \"two_level(direct,log)\"", "algorithm = \"\"", "algorithm", "has no name"),
        ];
        for (from, to, part, what) in cases {
            let said = changed(from, to);
            assert!(said.starts_with(&format!("line {}: ", line(part))) && said.contains(what), "{to}: {said}");
        }
        assert_eq!(changed("format = 1", "format = 3"), "its format is 3; this Strata reads formats 1 to 2");
        assert!(told("").starts_with("line 1: "), "{}", told(""));
        assert!(told("format = 1\n[machine\n").starts_with("line 2: "), "{}", told("format = 1\n[machine\n"));
        let twice = good.clone() + &good[good.find("[[row]]").unwrap()..];
        assert!(told(&twice).ends_with("is about the same messages"), "{}", told(&twice));
    }

    #[test]
    fn tables_of_other_versions_are_told() {
        let header = |strata: &str| TableHeader { strata: strata.to_string(), ..sample().header.unwrap() };
        let own = env!("CARGO_PKG_VERSION");
        let (major, minor) = major_minor(own).unwrap();
        assert_eq!(header(own).other_version(), None);
        assert_eq!(header(&format!("{major}.{minor}.99")).other_version(), None);
        let told = header(&format!("{major}.{}.0", minor + 1)).other_version().unwrap();
        assert!(told.contains(&format!("and this is {own}")), "{told}");
    }

    /// Counting lines from the beginning for each row took 3e11 bytes.
    #[test]
    fn a_table_of_a_hundred_thousand_rows_is_read_in_a_few_passes() {
        use crate::error::tests::COUNTED;
        let mut text = sample().to_toml();
        text.truncate(text.find("[[row]]").unwrap());
        let row = |bytes: usize| {
            format!(
                "[[row]]\ncollective = \"all_gather\"\nranks = 8\nnodes = 2\nbytes = {bytes}\nalgorithm = \"ring\"\n"
            )
        };
        text.extend((0..MOST_ROWS).map(row));
        COUNTED.set(0);
        assert_eq!(Table::parse(&text).unwrap().rows.len(), MOST_ROWS);
        assert!(COUNTED.get() < 2 * text.len() + MOST_ROWS * 8192, "{} of {}", COUNTED.get(), text.len());
    }

    #[test]
    fn a_file_that_is_none_or_no_text_is_told_by_name() {
        let told = |path: &str| Table::load(Path::new(path)).unwrap_err().text().to_string();
        assert!(told("/nonexistent/t.toml").starts_with("tuning table /nonexistent/t.toml is not used: "));
        assert!(told("/proc").contains("not a file"));
    }

    /// What a mutated table may be made of.
    const PIECES: [&str; 16] = [
        "[[row]]",
        "ranks = 1\n",
        "= ",
        "\"",
        "{",
        "}]",
        "-1",
        "18446744073709551616",
        "nan",
        "\n",
        "#",
        ",",
        "format = 1\n",
        "\u{fffd}",
        "measured = [",
        "allreduce,0,5,ring,ll,1,1,1\n",
    ];

    proptest! {
        #[test]
        fn no_text_makes_it_panic(cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..40usize, 0..PIECES.len()), 0..6)) {
            let mut text = sample().to_toml();
            for (at, take, piece) in cuts {
                let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
                let start = at.index(places.len());
                let end = (start + take).min(places.len() - 1);
                text.replace_range(places[start]..places[end], PIECES[piece]);
            }
            if let Err(error) = Table::parse(&text) {
                prop_assert!(!error.text().is_empty());
            }
        }

        #[test]
        fn no_garbage_makes_it_panic(text in "\\PC{0,200}") {
            let _ = Table::parse(&text);
        }
    }
}
