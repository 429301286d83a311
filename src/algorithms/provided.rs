//! One call of all ranks, carried out by a library that has whole collectives of its own: a provider.
//!
//! `provider:mpi` is MPI, other names are those of plugins. A plan says nothing of them but that all ranks make one call: which
//! providers a communicator has, and what each does, is known where calls are decided ([`crate::selection`]).
//!
//! Steps a rank: one `Call`, behind a copy where a reduction scales its input. It has no messages. Bytes a rank: the provider's.
#![forbid(unsafe_code)]

use super::{board, Algorithm, Choice};
use crate::plan::{Collective, LinkLevel, Plan, Shape};
use crate::topo::Rank;

/// How the names of such algorithms begin.
pub const PROVIDER: &str = "provider:";
/// The longest name of a provider.
const LONGEST_NAME: usize = 32;
/// What providers may do: all but what only scripts do.
const COLLECTIVES: [Collective; 8] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];

/// All of them; a [`Choice`] has the name.
pub(super) const PROVIDED: Algorithm = Algorithm {
    name: "provider:NAME",
    text: "one call of all ranks, carried out by the provider of this name (STRATA_PROVIDERS): MPI, or a plugin",
    collectives: &COLLECTIVES,
    is_leveled: false,
    supports: &|shape| shape.nranks() >= 2,
    build: &build,
    needs: &board::needs,
};

/// Whether a provider can have this name.
pub fn is_provider_name(name: &str) -> bool {
    let is_word = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_word && name.len() <= LONGEST_NAME
}

/// The provider that an algorithm's name means.
pub fn provider_in(name: &str) -> Option<&str> {
    name.strip_prefix(PROVIDER).filter(|name| is_provider_name(name))
}

/// The provider that carries out a choice's calls.
pub fn provider_of(choice: &Choice) -> Option<&str> {
    provider_in(&choice.name)
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    board::one_call(shape, rank, (PROVIDED.name, LinkLevel::All))
}
