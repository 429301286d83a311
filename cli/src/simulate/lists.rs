//! Lists on the command line: numbers of ranks, sizes, and methods.
#![forbid(unsafe_code)]

use crate::options::parse_size;
use strata::plan::Collective;

/// The most ranks whose plans are simulated.
pub const MOST_RANKS: usize = 4096;
/// A collective; `custom` is what a script of its own promises.
pub fn collective(text: &str) -> Result<Collective, String> {
    match text {
        "custom" => Ok(Collective::Custom),
        text => crate::plan::parse_collective(text).map_err(|error| error + ", custom"),
    }
}

/// The largest message, in bytes: more than any GPU holds.
const MOST_BYTES: usize = 1 << 40;

/// Values in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List(pub Vec<usize>);

/// Numbers of ranks: `32,64,128`, `32,64,..2048`, `32..2048`.
pub fn ranks(text: &str) -> Result<List, String> {
    let number = |part: &str| match part.parse::<usize>() {
        Ok(number) if (1..=MOST_RANKS).contains(&number) => Ok(number),
        _ => Err(format!("`{part}` is not a number of ranks from 1 to {MOST_RANKS}")),
    };
    list(text, &number)
}

/// Sizes in bytes, in the same manner: `16M..1G`.
pub fn sizes(text: &str) -> Result<List, String> {
    let size = |part: &str| match parse_size(part)? {
        0 => Err(format!("a message of {part} bytes takes no time")),
        bytes if bytes > MOST_BYTES => Err(format!("`{part}` is more than 1024G, and so more than any GPU holds")),
        bytes => Ok(bytes),
    };
    list(text, &size)
}

/// Values between commas; `..X` goes on from the last value to X, by the factor between the last two, or by 2.
fn list(text: &str, value: &dyn Fn(&str) -> Result<usize, String>) -> Result<List, String> {
    let mut values: Vec<usize> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let Some((from, until)) = part.split_once("..") else {
            values.push(value(part)?);
            continue;
        };
        if !from.is_empty() {
            values.push(value(from)?);
        }
        let until = value(until.trim_start_matches('='))?;
        let Some(&last) = values.last() else { return Err(format!("`{part}` goes on from nothing")) };
        let factor = match values[..] {
            [.., before, last] if from.is_empty() && last > before && last % before == 0 => last / before,
            _ => 2,
        };
        if until < last {
            return Err(format!("`{part}` ends before it begins"));
        }
        let mut next = last.saturating_mul(factor);
        while next <= until {
            values.push(next);
            next = next.saturating_mul(factor);
        }
    }
    Ok(List(values))
}

/// Names between commas that are not inside brackets.
pub fn names(text: &str) -> Vec<&str> {
    let mut depth = 0usize;
    let outside = |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    };
    text.split(outside).map(str::trim).collect()
}

/// A size as it can be given: `64K`, `1G`, `1000`.
pub fn size_text(bytes: usize) -> String {
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_goes_on_by_the_factor_of_its_last_two() {
        let values = |text| ranks(text).unwrap().0;
        assert_eq!(values("32,64,..512"), [32, 64, 128, 256, 512]);
        assert_eq!(values("8,32,..2048"), [8, 32, 128, 512, 2048]);
        assert_eq!(values("32..100"), [32, 64]);
        assert_eq!(values("4"), [4]);
        assert_eq!(values("3,5,..40"), [3, 5, 10, 20, 40]);
        assert_eq!(sizes("16M..64M").unwrap().0, [16 << 20, 32 << 20, 64 << 20]);
        for text in ["", "0", "4097", "x", "..8", "8..4", "8,", "1..99999999999999999999", "-1", "1.5"] {
            assert!(ranks(text).is_err(), "{text}");
        }
        for text in ["", "0", "0K", "2000G", "1e300", "16M..0", "nan"] {
            assert!(sizes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_parted_outside_brackets_and_sizes_are_written_as_they_are_read() {
        assert_eq!(
            names("vendor, two_level(direct,log)/window=4,mpi"),
            ["vendor", "two_level(direct,log)/window=4", "mpi"]
        );
        assert_eq!(names("a)),b"), ["a))", "b"]);
        for text in ["64K", "1G", "1000", "1536M", "1"] {
            assert_eq!(size_text(parse_size(text).unwrap()), text);
        }
    }
}
