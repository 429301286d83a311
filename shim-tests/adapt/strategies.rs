//! Communicators that follow a file of strategies (`STRATA_STRATEGY`): its shares hold from the first call on, whatever links are said to
//! deliver, and a file that is refused changes nothing.

use crate::{all_reduce, alone, begin, float, set_rate};
use crate::{communicators, Case};
use std::path::PathBuf;
use strata::dtype::{DataType, RedOp};

/// Runs communicators with this file while no other test makes one.
fn with_file(name: &str, text: &str, body: impl FnOnce()) {
    let path: PathBuf = std::env::temp_dir().join(format!("strata-{name}-{}.txt", std::process::id()));
    std::fs::write(&path, text).expect("a file can be written");
    std::env::set_var("STRATA_STRATEGY", &path);
    body();
    std::env::remove_var("STRATA_STRATEGY");
    std::fs::remove_file(path).expect("the file is there");
}

const FILE: &str = "strata strategy 1\ngrid 2,2,2\n\
                    all_reduce 1M 1G two_level(direct,direct) segment=256K window=2 shares=2,1,0\n";

/// What ranks of each node send of an all-reduce to other nodes, in parts of the vector: each rail has half of it, and on three nodes a
/// rank sends that half and once more what its node owns.
fn sent(share: f64) -> f64 {
    0.5 * (1.0 + share)
}

#[test]
fn the_shares_of_a_file_hold_from_the_first_call_on() {
    begin();
    let _alone = alone();
    with_file("shares", FILE, || {
        communicators(&[2, 2, 2], |comm| {
            // Measured shares would give node 1 the least.
            set_rate(comm.rank(), if comm.rank() / 2 == 1 { 5.0 } else { 25.0 });
            let wanted = [sent(2.0 / 3.0), sent(1.0 / 3.0), sent(0.0)][comm.rank() / 2];
            for count in [1_000_000, 262_145, 300_007, 2_000_000] {
                let found = all_reduce(comm, float(count));
                assert!((found - wanted).abs() < 0.02, "rank {}, {count}: {found} for {wanted}", comm.rank());
            }
            for (dtype, op, in_place) in [(DataType::U8, RedOp::Max, true), (DataType::F64, RedOp::Sum, false)] {
                let case = Case { count: (2 << 20) / dtype.size() + 5, dtype, op, in_place };
                assert!((all_reduce(comm, case) - wanted).abs() < 0.02, "{case:?}");
            }
            // Shorter messages than the file speaks of have even shares.
            assert!((all_reduce(comm, float(200_000)) - sent(1.0 / 3.0)).abs() < 0.1);
        });
    });
}

#[test]
fn a_file_that_is_refused_changes_nothing() {
    begin();
    let _alone = alone();
    let refused = [
        ("malformed", FILE.replace("window=2", "window=two")),
        ("elsewhere", FILE.replace("grid 2,2,2", "grid 2,2,2,2").replace("2,1,0", "2,1,0,0")),
        ("unproved", FILE.replace("two_level(direct,direct)", "reduce_scatter_gather")),
    ];
    for (name, text) in refused {
        with_file(name, &text, || {
            communicators(&[2, 2, 2], |comm| {
                set_rate(comm.rank(), 25.0);
                let found = all_reduce(comm, float(1_000_000));
                assert!((found - sent(1.0 / 3.0)).abs() < 0.02, "{name}, rank {}: {found}", comm.rank());
            });
        });
    }
}
