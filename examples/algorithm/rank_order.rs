//! A toy algorithm, complete: an all-gather in which every rank sends to every other rank, in rank order.
//!
//! Each rank sends its block to rank 0, then to rank 1, and so on. It is correct, and slow where links are shared: all
//! ranks send to rank 0 first. The library's `direct` sends the same messages, each rank beginning with the next one.
//!
//! Steps a rank: `p-1` messages in one round. Bytes a rank: `p-1` blocks.
//!
//! ```text
//! rank 0 sends its block to          rank 1   rank 2   rank 3
//! rank 1 sends its block to  rank 0           rank 2   rank 3
//! rank 2 sends its block to  rank 0  rank 1            rank 3
//! rank 3 sends its block to  rank 0  rank 1   rank 2
//! ```
#![forbid(unsafe_code)]

use strata::algorithms::needs::Needs;
use strata::algorithms::Algorithm;
use strata::plan::{Action, Buffer, Collective, Lane, Plan, Shape, Span, Step};
use strata::topo::Rank;

/// Every rank to every other rank, in rank order.
pub const RANK_ORDER: Algorithm = Algorithm {
    name: "rank_order",
    text: "every rank sends to every other rank, in rank order: one round",
    collectives: &[Collective::AllGather],
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    // No scratch; one block of the caller's is sent to ranks of the node.
    needs: &|_, _| Needs::new(0, 1),
};

/// The plan of one rank: a lane of sends, a lane for each receive, and a lane that copies the rank's own block.
fn build(shape: &Shape, rank: Rank) -> Plan {
    let others = || (0..shape.nranks()).map(Rank::from_index).filter(|peer| *peer != rank);
    // An in-place call holds the rank's own block where the result belongs.
    let home = Span::output(rank.index(), 1);
    let mine = if shape.in_place { home } else { Span::user(Buffer::Input, 0, 1) };

    let send = |to| Step::from(Action::Send { to, channel: 0, src: vec![mine] });
    let mut lanes = vec![Lane { steps: others().map(send).collect() }];
    // A receive in a lane of its own waits for nothing, so the ranks' messages may come in any order.
    for from in others() {
        let dst = vec![Span::output(from.index(), 1)];
        lanes.push(Lane { steps: vec![Step::from(Action::Recv { from, channel: 0, dst })] });
    }
    if !shape.in_place {
        let copy = Action::Copy { src: vec![mine], dst: vec![home], start: false, finish: false };
        lanes.push(Lane { steps: vec![Step::from(copy)] });
    }
    Plan {
        shape: shape.clone(),
        rank,
        algorithm: RANK_ORDER.name.to_string(),
        chunks_per_block: 1,
        scratch_chunks: 0,
        coded: None,
        lanes,
    }
}
