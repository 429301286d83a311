//! mcr_dl in Python, whose backends go by TCP and by a real MPI.

use super::{alone, built, mpi};
use std::process::Command;

#[test]
fn mcr_dl_s_backends_over_tcp_and_mpi_may_be_called_in_opposite_orders() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let output = Command::new(built::root().join("scripts/fetch-torch")).arg("--path").output().expect("it starts");
    if !output.status.success() {
        println!("SKIPPED: mcr_dl over MPI: there is no PyTorch; scripts/fetch-torch installs it (6 GB)");
        return;
    }
    let python = String::from_utf8_lossy(&output.stdout).trim().to_string();
    let program = "import mcr_order; mcr_order.opposite_orders(); mcr_order.carriers()";
    let (root, library) = (built::root().join("python"), built::library());
    let path = format!("{}:{}", root.display(), root.join("tests").display());
    let vars = [
        ("PYTHONPATH", path.as_str()),
        ("STRATA_LIBRARY", library.to_str().unwrap()),
        ("MCR_MPI", "yes"),
        ("MCR_SEEDS", "25"),
        ("OMP_NUM_THREADS", "1"),
    ];
    for ranks in [2, 5] {
        let said = mpi.run(ranks, "exec \"$@\"", &[&python, "-c", program], &vars);
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
        assert_eq!(said.matches("mv2-gdr, tcp and auto are right").count(), ranks, "{said}");
    }
}
