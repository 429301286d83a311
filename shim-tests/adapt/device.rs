//! The same where the ranks' data is on GPUs, which are soft ones: what ranks tell each other and send to measure is in host memory.

use crate::{all_reduce_by, alone, begin, float, set_rate, world};
use strata::selection::shares;
use strata::topo::Grid;

/// Runs this many all-reduces with these rates (0: the ranks measure) on the rank of a GPU.
fn calls(member: &world::Member, rates: &[f64], count: usize) -> Vec<f64> {
    set_rate(member.rank, rates[member.rank]);
    (0..count).map(|at| all_reduce_by(&member.comm, float(262_144 + 100 * at), world::launch_all)).collect()
}

/// On the soft HIP: the soft CUDA interprets the kernels of such long calls for minutes.
#[test]
fn shares_follow_rates_and_links_are_measured() {
    let _alone = alone();
    // To build them may take longer than ranks are waited for.
    crate::soft::hip_dir();
    std::env::set_var("SOFT_DEVICE", "hip");
    begin();
    world::run(Grid::blocks(&[2, 2, 2]), |member| {
        assert!(member.comm.gpu().is_some());
        let rates = [25.0, 25.0, 5.0, 25.0, 25.0, 25.0];
        let sent = calls(member, &rates, 6);
        // After the first two an operation's shares are others: one of the slow rank's is a third of two thirds.
        let wanted = shares::next(&member.grid, None, &rates.map(Some));
        assert!(wanted.is_some() && member.comm.node_shares() == wanted);
        assert!(
            member.rank != 2 || (sent[..2].iter().all(|&sent| sent > 0.6) && sent[2..].iter().all(|&sent| sent < 0.4)),
            "{sent:?}"
        );
        calls(member, &[25.0; 6], 4);
        assert_eq!(member.comm.node_shares(), None);
    });
    world::run(Grid::blocks(&[2, 1, 2]), |member| {
        let sent = calls(member, &[0.0; 5], 6);
        let measured = 4.0 * 262_244.0 * sent[1] - 4.0 * 262_144.0 * sent[0];
        assert!(measured > 2.9 * f64::from(1 << 20), "three rounds: {sent:?}");
    });
}
