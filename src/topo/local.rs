//! Which of its node's ranks a process is, told by whoever started it.
//!
//! A process binds its MPI, and with it its NIC, once and before any communicator exists. So its local rank comes from
//! the launcher's variables where there are any, and is the same for all communicators.
#![forbid(unsafe_code)]

/// A local rank, and how many ranks its node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// The local rank.
    pub rank: usize,
    /// The ranks of the node.
    pub size: usize,
    /// The variable that says so.
    pub told_by: &'static str,
}

/// The launchers' variables: local rank, ranks of the node.
const LAUNCHERS: [(&str, &str); 7] = [
    // torchrun, strata launch
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    // Open MPI
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    // hydra: MPICH, Intel MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    // MVAPICH
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    // HPE's PALS
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    // Cray's PMI
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    // Slurm, where the number of tasks a node was given
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
];

impl LocalRank {
    /// As the variables say that `var` knows; `None` when no launcher's pair makes sense.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Option<LocalRank> {
        let number = |name: &str| var(name)?.trim().parse::<usize>().ok();
        let pair = |&(rank_name, size_name): &(&'static str, &str)| {
            let (rank, size) = (number(rank_name)?, number(size_name)?);
            (rank < size).then_some(LocalRank { rank, size, told_by: rank_name })
        };
        let step = || {
            // Slurm tells the tasks of all nodes of a step, such as `8(x2),4`.
            let (rank, node) = (number("SLURM_LOCALID")?, number("SLURM_NODEID")?);
            let size = tasks_of_node(&var("SLURM_STEP_TASKS_PER_NODE")?, node)?;
            (rank < size).then_some(LocalRank { rank, size, told_by: "SLURM_LOCALID" })
        };
        LAUNCHERS.iter().find_map(pair).or_else(step)
    }

    /// As this process's environment says.
    pub fn from_env() -> Option<LocalRank> {
        LocalRank::from_vars(|name| std::env::var(name).ok())
    }
}

fn tasks_of_node(text: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in text.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.trim_end_matches(')').parse().ok()?),
            None => (part, 1usize),
        };
        before += nodes;
        if node < before {
            return tasks.trim().parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(vars: &[(&str, &str)]) -> Option<(usize, usize, &'static str)> {
        let var = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        LocalRank::from_vars(var).map(|local| (local.rank, local.size, local.told_by))
    }

    #[test]
    fn every_launcher_is_understood() {
        for (rank, size) in LAUNCHERS {
            assert_eq!(told(&[(rank, "3"), (size, "8")]), Some((3, 8, rank)));
        }
        let step =
            |node| told(&[("SLURM_LOCALID", "3"), ("SLURM_NODEID", node), ("SLURM_STEP_TASKS_PER_NODE", "8(x2),4")]);
        assert_eq!(step("1"), Some((3, 8, "SLURM_LOCALID")));
        assert_eq!(step("2"), Some((3, 4, "SLURM_LOCALID")));
        assert_eq!(step("3"), None);
    }

    #[test]
    fn variables_that_make_no_sense_are_as_if_not_set() {
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[("LOCAL_RANK", "3")]), None, "the size is needed too");
        assert_eq!(told(&[("LOCAL_RANK", "8"), ("LOCAL_WORLD_SIZE", "8")]), None);
        assert_eq!(told(&[("LOCAL_RANK", "x"), ("LOCAL_WORLD_SIZE", "8")]), None);
        let both = [("LOCAL_RANK", "9"), ("LOCAL_WORLD_SIZE", "8"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(told(&both), Some((1, 2, "MPI_LOCALRANKID")));
    }
}
