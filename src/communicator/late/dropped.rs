//! Results to which late ranks have not contributed, where a program has that left out (`strataCommAdapt`, `late=drop`).
#![forbid(unsafe_code)]

use super::memory::LateMemory;
use super::Absence;
use crate::communicator::adapt::sum;
use crate::dtype::{Prologue, Reduction};
use crate::error::Result;
use crate::memory::DeviceRegion;
use std::ops::Range;

/// Stretches of a result of so many bytes, and to how many of so many ranks' inputs each is due.
fn stretches(absences: &[Absence], nranks: usize, bytes: usize) -> Vec<(Range<usize>, u64)> {
    let mut ends: Vec<usize> = absences.iter().map(|absence| absence.bytes.min(bytes)).collect();
    ends.push(bytes);
    ends.sort_unstable();
    ends.dedup();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let contributors = |start: usize| nranks - absences.iter().filter(|absence| absence.bytes > start).count();
    let stretch = |(start, &end): (usize, &usize)| (start..end, contributors(start) as u64);
    starts.zip(&ends).map(stretch).filter(|(stretch, _)| !stretch.is_empty()).collect()
}

/// Makes of what has been reduced without dividing, of this reduction, what the call gives: averages are over the contributors, and sums
/// are rescaled where that is asked for.
pub fn settle(
    memory: &LateMemory,
    (reduction, rescales): (&Reduction, bool),
    output: DeviceRegion,
    (absences, nranks): (&[Absence], usize),
) -> Result<()> {
    let Reduction { dtype, divisor, prologue, .. } = *reduction;
    let all = nranks as u64;
    let is_multiplied = matches!(prologue, Prologue::Reciprocal(_)) || (rescales && sum(Some(*reduction)).is_some());
    for (stretch, contributors) in stretches(absences, nranks, output.len()) {
        let part = output.part(stretch.start, stretch.len());
        if divisor != 1 {
            memory.divide(dtype, contributors, part)?;
        } else if is_multiplied && contributors != all && !dtype.is_integer() {
            memory.multiply_by_ratio(dtype, (all, contributors), part)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Rank;

    #[test]
    fn a_stretch_is_due_to_those_who_were_there() {
        let absences = |bytes: &[usize]| -> Vec<Absence> {
            bytes.iter().enumerate().map(|(rank, &bytes)| Absence { rank: Rank::from_index(rank), bytes }).collect()
        };
        for (absent, expected) in [
            (&[][..], &[(0..100, 4)][..]),
            (&[40], &[(0..40, 3), (40..100, 4)]),
            (&[100], &[(0..100, 3)]),
            (&[60, 20], &[(0..20, 2), (20..60, 3), (60..100, 4)]),
            (&[60, 60, 100], &[(0..60, 1), (60..100, 3)]),
        ] {
            assert_eq!(stretches(&absences(absent), 4, 100), expected);
        }
        assert!(stretches(&[], 4, 0).is_empty());
    }
}
