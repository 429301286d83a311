//! What the ranks of a communicator know of its providers, alike: which there are, and which calls each carries out.
#![forbid(unsafe_code)]

use crate::dtype::{DataType, Operator};
use crate::plan::Collective;
use std::fmt;

/// Providers that a communicator may have.
pub const MOST_PROVIDERS: usize = 8;
/// The operators, in the order of the table. Collectives that only move data have the first one's place.
const OPERATORS: [Operator; 7] =
    [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min, Operator::And, Operator::Or, Operator::Xor];
/// Places in the table.
const PLACES: usize = Collective::ALL.len() * DataType::HOST.len() * OPERATORS.len();

/// The longest block, in bytes, that a provider takes of each kind of call; 0 where it takes none.
#[derive(Clone, PartialEq, Eq)]
pub struct MostBytes(Vec<u64>);

/// Of a table that travels: so many places in a row with one value.
pub(super) type TableRuns = Vec<(u16, u64)>;

/// The place of a kind of call; none of what no provider does.
fn place(collective: Collective, dtype: DataType, operator: Option<Operator>) -> Option<usize> {
    let nth = Collective::ALL.iter().position(|known| *known == collective)?;
    let operator = match operator {
        Some(operator) if collective.reduces() => OPERATORS.iter().position(|known| *known == operator)?,
        _ => 0,
    };
    Some((nth * DataType::HOST.len() + dtype as usize) * OPERATORS.len() + operator)
}

impl MostBytes {
    /// The table of what is asked for each kind of call.
    pub fn of(mut most: impl FnMut(Collective, DataType, Option<Operator>) -> u64) -> MostBytes {
        let mut table = vec![0; PLACES];
        for collective in Collective::ALL {
            for dtype in DataType::HOST {
                let operators: Vec<Option<Operator>> = match collective.reduces() {
                    true => Operator::of(dtype).map(Some).collect(),
                    false => vec![None],
                };
                for operator in operators {
                    if let Some(place) = place(collective, dtype, operator) {
                        table[place] = most(collective, dtype, operator);
                    }
                }
            }
        }
        MostBytes(table)
    }

    /// The longest block of such calls.
    pub fn get(&self, collective: Collective, dtype: DataType, operator: Option<Operator>) -> u64 {
        place(collective, dtype, operator).map_or(0, |place| self.0[place])
    }

    /// What both take.
    pub(super) fn least(&mut self, other: &MostBytes) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, other)| *mine = (*mine).min(*other));
    }

    /// As it travels.
    pub(super) fn runs(&self) -> TableRuns {
        let mut runs: TableRuns = Vec::new();
        for &bytes in &self.0 {
            match runs.last_mut() {
                Some((len, known)) if *known == bytes => *len += 1,
                _ => runs.push((1, bytes)),
            }
        }
        runs
    }

    /// The table that has travelled; none of what is no table.
    pub(super) fn from_runs(runs: &TableRuns) -> Option<MostBytes> {
        let places: usize = runs.iter().map(|(len, _)| usize::from(*len)).sum();
        let all = || runs.iter().flat_map(|(len, bytes)| std::iter::repeat_n(*bytes, usize::from(*len)));
        (places == PLACES).then(|| MostBytes(all().collect()))
    }
}

impl fmt::Debug for MostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MostBytes").field(&self.runs()).finish()
    }
}

/// One provider of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderFacts {
    /// Its name: `provider:NAME` is the algorithm.
    pub name: String,
    /// What all ranks' libraries take.
    pub most: MostBytes,
}

/// The providers of a communicator; the same on all its ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommProviders {
    /// Those that it has.
    pub all: Vec<ProviderFacts>,
    /// Those that were wanted and that some rank lacks, and why.
    pub left_out: Vec<(String, String)>,
}

/// Which of a communicator's providers carry out calls of some kind, by their places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ProviderSet(u8);

impl ProviderSet {
    /// All that there may be.
    pub const ALL: ProviderSet = ProviderSet(u8::MAX);

    /// Whether it has the one at this place.
    pub fn has(self, place: usize) -> bool {
        place < MOST_PROVIDERS && self.0 & 1 << place != 0
    }
}

impl CommProviders {
    /// Providers that take whatever they are asked for: what is assumed where no communicator is at hand.
    pub fn assumed(names: impl IntoIterator<Item = String>) -> CommProviders {
        let most = MostBytes::of(|_, _, _| u64::MAX);
        let all = names.into_iter().map(|name| ProviderFacts { name, most: most.clone() }).collect();
        CommProviders { all, left_out: Vec::new() }
    }

    /// Those that carry out such calls.
    pub fn of(
        &self,
        (collective, block_bytes): (Collective, usize),
        dtype: DataType,
        operator: Option<Operator>,
    ) -> ProviderSet {
        let does = |facts: &ProviderFacts| {
            let most = facts.most.get(collective, dtype, operator);
            most > 0 && block_bytes as u64 <= most
        };
        let places = self.all.iter().enumerate().filter(|(_, facts)| does(facts)).map(|(place, _)| 1 << place);
        ProviderSet(places.fold(0, |set, bit: u8| set | bit))
    }

    /// The place of the one of this name.
    pub fn place(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|facts| facts.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_travels_and_ranks_keep_what_all_of_them_take() {
        let mpi = MostBytes::of(|collective, dtype, operator| match (collective, operator) {
            (Collective::AllReduce, Some(Operator::Sum)) if dtype == DataType::F32 => 4096,
            (Collective::AllGather, None) => 1 << 30,
            _ => 0,
        });
        assert_eq!(MostBytes::from_runs(&mpi.runs()).as_ref(), Some(&mpi));
        assert_eq!(MostBytes::from_runs(&vec![(3, 5)]), None);
        let mut both = MostBytes::of(|_, dtype, _| if dtype == DataType::F32 { 1024 } else { u64::MAX });
        both.least(&mpi);
        let known = CommProviders { all: vec![ProviderFacts { name: "a".into(), most: both }], left_out: Vec::new() };
        let does = |collective, bytes, dtype, operator| known.of((collective, bytes), dtype, operator).has(0);
        assert!(does(Collective::AllReduce, 1024, DataType::F32, Some(Operator::Sum)));
        assert!(!does(Collective::AllReduce, 1025, DataType::F32, Some(Operator::Sum)));
        assert!(!does(Collective::AllReduce, 8, DataType::F32, Some(Operator::Max)));
        assert!(does(Collective::AllGather, 1 << 30, DataType::I8, None));
        assert!(!does(Collective::Custom, 8, DataType::I8, None));
        assert!(ProviderSet::ALL.has(7) && !ProviderSet::ALL.has(8));
    }

    #[test]
    fn a_type_that_an_operator_is_not_for_has_no_place_of_its_own_in_another_s() {
        let mut seen = std::collections::HashSet::new();
        for collective in Collective::ALL {
            for dtype in DataType::HOST {
                let operators: Vec<_> = Operator::of(dtype).map(Some).collect();
                for operator in if collective.reduces() { operators } else { vec![None] } {
                    assert!(seen.insert(place(collective, dtype, operator).unwrap()), "{collective:?} {dtype:?}");
                }
            }
        }
    }
}
