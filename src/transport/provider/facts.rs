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
/// Places in the table: for blocks of one size, and behind them for blocks of different sizes.
const PLACES: usize = 2 * EVEN_PLACES;
const EVEN_PLACES: usize = Collective::ALL.len() * DataType::HOST.len() * OPERATORS.len();

/// What decides beside its length whether a provider takes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProvidedKind {
    /// What is done.
    pub collective: Collective,
    /// The type of elements.
    pub dtype: DataType,
    /// What a reduction does; none where data only moves.
    pub operator: Option<Operator>,
    /// Whether blocks differ in size.
    pub uneven: bool,
}

/// How many bytes a provider takes of each kind of call; 0 where it takes none. Of a block, or, where blocks differ in size, of all
/// blocks of a rank's buffer together.
#[derive(Clone, PartialEq, Eq)]
pub struct MostBytes(Vec<u64>);

/// Of a table that travels: so many places in a row with one value.
pub(super) type TableRuns = Vec<(u16, u64)>;

impl ProvidedKind {
    /// All that a provider may be asked for.
    fn all() -> impl Iterator<Item = ProvidedKind> {
        let of = |(collective, uneven): (Collective, bool), dtype| {
            let operators: Vec<Option<Operator>> = match collective.reduces() {
                true => Operator::of(dtype).map(Some).collect(),
                false => vec![None],
            };
            operators.into_iter().map(move |operator| ProvidedKind { collective, dtype, operator, uneven })
        };
        let forms = Collective::ALL.into_iter().flat_map(|collective| [(collective, false), (collective, true)]);
        let forms = forms.filter(|(collective, uneven)| !uneven || has_uneven_form(*collective));
        forms.flat_map(move |form| DataType::HOST.into_iter().flat_map(move |dtype| of(form, dtype)))
    }

    /// Its place in the table; none of what no provider does.
    fn place(self) -> Option<usize> {
        let ProvidedKind { collective, dtype, operator, uneven } = self;
        if uneven && !has_uneven_form(collective) {
            return None;
        }
        let nth = Collective::ALL.iter().position(|known| *known == collective)?;
        let operator = match operator {
            Some(operator) if collective.reduces() => OPERATORS.iter().position(|known| *known == operator)?,
            _ => 0,
        };
        let behind = if uneven { EVEN_PLACES } else { 0 };
        Some(behind + (nth * DataType::HOST.len() + dtype as usize) * OPERATORS.len() + operator)
    }
}

/// Whether a collective has blocks that may differ in size.
fn has_uneven_form(collective: Collective) -> bool {
    use Collective::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
    matches!(collective, AllGather | ReduceScatter | AllToAll | Gather | Scatter)
}

impl MostBytes {
    /// The table of what is asked for each kind of call.
    pub fn of(mut most: impl FnMut(ProvidedKind) -> u64) -> MostBytes {
        let mut table = vec![0; PLACES];
        for kind in ProvidedKind::all() {
            if let Some(place) = kind.place() {
                table[place] = most(kind);
            }
        }
        MostBytes(table)
    }

    /// The most bytes of such calls.
    pub fn get(&self, kind: ProvidedKind) -> u64 {
        kind.place().map_or(0, |place| self.0[place])
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
        let most = MostBytes::of(|_| u64::MAX);
        let all = names.into_iter().map(|name| ProviderFacts { name, most: most.clone() }).collect();
        CommProviders { all, left_out: Vec::new() }
    }

    /// Those that carry out calls of this kind of so many bytes: of a block, or, where blocks differ in size, of all together as far as
    /// all ranks know.
    pub fn of(&self, kind: ProvidedKind, bytes: usize) -> ProviderSet {
        let does = |facts: &ProviderFacts| {
            let most = facts.most.get(kind);
            most > 0 && bytes as u64 <= most
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

    fn kind(collective: Collective, dtype: DataType, operator: Option<Operator>, uneven: bool) -> ProvidedKind {
        ProvidedKind { collective, dtype, operator, uneven }
    }

    #[test]
    fn a_table_travels_and_ranks_keep_what_all_of_them_take() {
        let mpi = MostBytes::of(|kind| match (kind.collective, kind.operator) {
            (Collective::AllReduce, Some(Operator::Sum)) if kind.dtype == DataType::F32 => 4096,
            (Collective::AllGather, None) if kind.uneven => 1 << 20,
            (Collective::AllGather, None) => 1 << 30,
            _ => 0,
        });
        assert_eq!(MostBytes::from_runs(&mpi.runs()).as_ref(), Some(&mpi));
        assert_eq!(MostBytes::from_runs(&vec![(3, 5)]), None);
        let mut both = MostBytes::of(|kind| if kind.dtype == DataType::F32 { 1024 } else { u64::MAX });
        both.least(&mpi);
        let known = CommProviders { all: vec![ProviderFacts { name: "a".into(), most: both }], left_out: Vec::new() };
        let does =
            |collective, bytes, dtype, operator| known.of(kind(collective, dtype, operator, false), bytes).has(0);
        assert!(does(Collective::AllReduce, 1024, DataType::F32, Some(Operator::Sum)));
        assert!(!does(Collective::AllReduce, 1025, DataType::F32, Some(Operator::Sum)));
        assert!(!does(Collective::AllReduce, 8, DataType::F32, Some(Operator::Max)));
        assert!(does(Collective::AllGather, 1 << 30, DataType::I8, None));
        assert!(!does(Collective::Custom, 8, DataType::I8, None));
        assert!(ProviderSet::ALL.has(7) && !ProviderSet::ALL.has(8));
        let uneven = |collective, bytes| known.of(kind(collective, DataType::I8, None, true), bytes).has(0);
        assert!(uneven(Collective::AllGather, 1 << 20) && !uneven(Collective::AllGather, (1 << 20) + 1));
        assert!(!uneven(Collective::Gather, 0));
        let all = CommProviders::assumed(["b".to_string()]);
        assert!(!all.of(kind(Collective::Broadcast, DataType::I8, None, true), 8).has(0), "it has no such form");
    }

    #[test]
    fn a_type_that_an_operator_is_not_for_has_no_place_of_its_own_in_another_s() {
        let mut seen = std::collections::HashSet::new();
        for kind in ProvidedKind::all() {
            assert!(seen.insert(kind.place().unwrap()), "{kind:?}");
        }
        assert_eq!(
            ProvidedKind::all().filter(|kind| kind.uneven && kind.collective == Collective::Scatter).count(),
            DataType::HOST.len()
        );
    }
}
