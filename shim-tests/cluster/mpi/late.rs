//! Ranks that are late, between nodes that MPI joins.

use super::{alone, mpi};
use crate::built::{library_dir, root, Compiler};

/// The program makes calls by seeds; each rank checks every element, and all that they have the same bits.
#[test]
fn results_over_mpi_are_complete_and_the_same_on_all_ranks_whoever_is_late() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let source = std::fs::read_to_string(root().join("shim-tests/c/late.c")).unwrap();
    let include = format!("-I{}", root().join("shim-tests/c").display());
    let folder = format!("-L{}", library_dir().display());
    let strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"];
    let options = [&strict[..], &[&include, &folder, "-lnccl", "-ldl", "-lm"]].concat();
    let program = Compiler::new("c").compile(&source, &options);
    for (ranks, first) in [(3, "1"), (5, "100")] {
        let said = mpi.run(ranks, "exec \"$@\"", &[program.to_str().unwrap(), "launched", first, "5"], &[]);
        assert!(said.contains("all results are complete, and have the same bits"), "{said}");
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    }
    std::fs::remove_file(program).unwrap();
}
