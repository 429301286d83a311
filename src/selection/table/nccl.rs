//! Rows of NCCL's example tuner plugin, a CSV file without a header line:
//!
//! ```text
//! collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
//! allreduce,0,65536,tree,simple,2,1,-1,-1,1
//! ```
//!
//! -1 stands for any; the last two may be left out; `#` begins a comment. Protocol and channels mean nothing here, and
//! algorithms keep NCCL's names until the communicator is known. Rows for several calls at once (numPipeOps above 1) and
//! for registered buffers (regBuff 1) are left out: the plain call is what all ranks know to be making. The plugin takes
//! any unknown word for its default; here it is an error.
#![forbid(unsafe_code)]

use super::read::at_line;
use super::{Row, Size, Table, MOST_ROWS};
use crate::error::{counted, Error, Result};
use crate::plan::Collective;

/// The fields that a row must have.
const REQUIRED: usize = 8;
/// The fields that it may have.
const MOST_FIELDS: usize = 10;

/// Whether a text looks like such a file rather than TOML: its first line of content has only commas.
pub(super) fn is_like(text: &str) -> bool {
    let content = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    content.is_some_and(|line| line.contains(',') && !line.contains(['=', '[', '"']))
}

/// Reads such a file.
pub(super) fn parse(text: &str) -> Result<Table> {
    let mut reader = csv::ReaderBuilder::new();
    reader.has_headers(false).flexible(true).comment(Some(b'#')).trim(csv::Trim::All).quoting(false);
    let mut rows = Vec::new();
    let mut left_out = 0;
    for record in reader.from_reader(text.as_bytes()).records() {
        let record = record.map_err(|error| {
            let line = error.position().map_or(1, |position| position.line() as usize);
            at_line(line, &error.to_string())
        })?;
        let line = record.position().map_or(1, |position| position.line() as usize);
        let fields: Vec<&str> = record.iter().collect();
        match row(&fields).map_err(|what| at_line(line, &what))? {
            Some(row) => rows.push(row),
            None => left_out += 1,
        }
        if rows.len() > MOST_ROWS {
            return Err(Error::InvalidArgument(format!("more than {MOST_ROWS} rows")));
        }
    }
    let mut notes =
        vec!["rows of NCCL's tuner plugin: protocols and channels are NCCL's own and are ignored".to_string()];
    if left_out > 0 {
        notes.push(format!("{} for aggregated calls or registered buffers left out", counted(left_out, "row")));
    }
    Ok(Table { header: None, rows, notes })
}

/// One row; none for one that is about other calls than plain ones.
fn row(fields: &[&str]) -> std::result::Result<Option<Row>, String> {
    if !(REQUIRED..=MOST_FIELDS).contains(&fields.len()) {
        return Err(format!("{} fields; a row of NCCL's tuner plugin has 8 to 10", fields.len()));
    }
    let size = |at: usize, name: &str| {
        fields[at].parse::<usize>().map_err(|_| format!("{name} `{}` is not a number of bytes", fields[at]))
    };
    let number = |at: usize, name: &str| match fields.get(at).unwrap_or(&"-1").parse::<i64>() {
        Ok(number) if number >= -1 => Ok(usize::try_from(number).ok()),
        _ => Err(format!("{name} `{}` is neither a number nor -1", fields[at])),
    };
    let collective = Collective::from_name(fields[0])
        .filter(|collective| !matches!(collective, Collective::AllToAll | Collective::Gather | Collective::Scatter))
        .ok_or_else(|| format!("collective_type `{}` is none of NCCL's", fields[0]))?;
    let (from, to) = (size(1, "min_bytes")?, size(2, "max_bytes")?);
    if from > to {
        return Err(format!("min_bytes {from} is more than max_bytes {to}"));
    }
    if fields[3].is_empty() {
        return Err("there is no algorithm".to_string());
    }
    number(5, "channels")?;
    let (nodes, ranks) = (number(6, "nNodes")?, number(7, "nRanks")?);
    let plain = [number(8, "numPipeOps")?.unwrap_or(1) <= 1, number(9, "regBuff")?.unwrap_or(0) == 0];
    let row = Row {
        collective: collective.name().to_string(),
        ranks,
        nodes,
        size: Size::Within(from, to),
        algorithm: fields[3].to_string(),
        carrier: None,
        segment_bytes: 0,
        window: 0,
        measured: Vec::new(),
    };
    Ok((plain == [true, true]).then_some(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_plugin_are_read_with_their_wildcards() {
        let text = "# a comment\n\nallreduce, 0, 65536, tree, simple, 2, 1, -1, -1, -1\n\
                    reducescatter,65537,4294967295,ring,ll128,-1,4,32\nallgather,0,9,pat,simple,1,-1,-1,4,-1\n\
                    broadcast,0,9,nvls,simple,1,-1,-1,1,1\n";
        let table = Table::parse(text).unwrap();
        assert_eq!(table.header, None);
        let [first, second] = &table.rows[..] else { panic!("{:?}", table.rows) };
        assert_eq!((first.collective.as_str(), first.nodes, first.ranks), ("all_reduce", Some(1), None));
        assert_eq!((first.size, first.algorithm.as_str()), (Size::Within(0, 65536), "tree"));
        assert_eq!((second.nodes, second.ranks), (Some(4), Some(32)));
        assert!(table.notes[1].starts_with("2 rows for aggregated calls"), "{:?}", table.notes);
    }

    #[test]
    fn what_is_wrong_in_a_row_is_told_with_its_line() {
        let told = |line: &str| {
            let text = format!("# a comment\nreduce,0,1,tree,simple,-1,-1,-1\n{line}\n");
            Table::parse(&text).unwrap_err().text().to_string()
        };
        for (line, what) in [
            ("allreduce,0,1,ring", "4 fields"),
            ("allreduce,0,1,ring,ll,1,1,1,1,1,1", "11 fields"),
            ("alltoall,0,1,ring,ll,1,1,1", "collective_type `alltoall`"),
            ("allreduce,x,1,ring,ll,1,1,1", "min_bytes `x`"),
            ("allreduce,2,1,ring,ll,1,1,1", "min_bytes 2 is more"),
            ("allreduce,0,1,,ll,1,1,1", "no algorithm"),
            ("allreduce,0,1,ring,ll,1,-2,1", "nNodes `-2`"),
        ] {
            let said = told(line);
            assert!(said.starts_with("line 3: ") && said.contains(what), "{line}: {said}");
        }
    }
}
