//! Which of a job's processes this is, and where process 0 is, by the launcher's variables.
//!
//! torchrun and `strata launch` set both. MPI's launchers and `srun` set numbers alone; then process 0 is
//! found without more only where all processes share a host, at a port that follows from the launcher's process.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::topo::local::LocalRank;
use std::fs;

/// The most processes of a job.
pub const MOST_RANKS: usize = 65_536;

/// The launchers' variables: number of this process, and of all.
const LAUNCHERS: [(&str, &str); 4] = [
    // torchrun, strata launch
    ("RANK", "WORLD_SIZE"),
    // Open MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    // hydra (MPICH, Intel MPI), Cray
    ("PMI_RANK", "PMI_SIZE"),
    // srun; SLURM_NTASKS is also set where no step has been started yet
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
];

/// This process's number in its job and how many there are, as far as a launcher has told.
pub fn numbers() -> Option<(usize, usize)> {
    let var = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    let told = LAUNCHERS.into_iter().find_map(|(rank, size)| Some((var(rank)?, var(size)?)));
    told.filter(|(rank, size)| rank < size && *size <= MOST_RANKS)
}

/// A process's number among `size`, and where process 0 listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// The number.
    pub rank: usize,
    /// How many processes there are.
    pub size: usize,
    /// How many of them share this machine, as far as the launcher has told.
    pub here: usize,
    /// Process 0's host.
    pub address: String,
    /// Its port.
    pub port: u16,
}

impl LaunchedProcess {
    /// As this process's environment says; `None`: it is alone.
    pub fn from_env() -> Result<Option<LaunchedProcess>> {
        LaunchedProcess::from_vars(|name| std::env::var(name).ok(), launcher_of)
    }

    /// As `var` says. `launcher` finds the process that has started those that have this variable.
    fn from_vars(
        var: impl Fn(&str) -> Option<String>,
        launcher: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<LaunchedProcess>> {
        let Some((rank_name, size_name)) = LAUNCHERS.into_iter().find(|(_, size)| var(size).is_some()) else {
            return Ok(None);
        };
        let number = |name: &str| number(name, var(name));
        let size = number(size_name)?.unwrap_or(1);
        if size == 1 {
            return Ok(None);
        }
        let need = |name: &str| Error::InvalidArgument(format!("{size_name} is {size}, but {name} is not set"));
        let rank = number(rank_name)?.ok_or_else(|| need(rank_name))?;
        if rank >= size || size > MOST_RANKS {
            return Err(Error::InvalidArgument(format!("{rank_name} is {rank}, and {size_name} is {size}")));
        }
        let port = number("MASTER_PORT")?.map(u16::try_from).transpose();
        let port = port.map_err(|_| Error::InvalidArgument("MASTER_PORT is more than 65535".to_string()))?;
        let local = LocalRank::from_vars(&var).map(|local| local.size);
        let found = match (var("MASTER_ADDR"), port) {
            (Some(address), Some(port)) => Some((address, port)),
            // torchrun tells them; whoever speaks for it, and does not, has forgotten them.
            (None, _) if rank_name == "RANK" => return Err(need("MASTER_ADDR")),
            (_, None) if rank_name == "RANK" => return Err(need("MASTER_PORT")),
            (address, port) if local == Some(size) => port
                .or_else(|| launcher(rank_name).map(port_of))
                .map(|port| (address.unwrap_or_else(|| "127.0.0.1".to_string()), port)),
            _ => None,
        };
        let (address, port) = found.ok_or_else(|| not_told(rank_name, rank, size))?;
        // torchrun's own agent listens on the port it announces.
        let agent = rank_name == "RANK" && var("TORCHELASTIC_RUN_ID").is_some();
        let port = if agent { port.wrapping_add(1) } else { port };
        // Make-believe nodes are all on this machine, whatever LOCAL_WORLD_SIZE says.
        let alone = matches!(address.as_str(), "127.0.0.1" | "localhost" | "::1");
        let here = if alone { size } else { number("LOCAL_WORLD_SIZE")?.or(local).unwrap_or(1) };
        Ok(Some(LaunchedProcess { rank, size, here, address, port }))
    }
}

fn number(name: &str, text: Option<String>) -> Result<Option<usize>> {
    let wrong = |text: &str| Error::InvalidArgument(format!("{name}={text} is not a number"));
    text.map(|text| text.parse().map_err(|_| wrong(&text))).transpose()
}

fn not_told(rank_name: &str, rank: usize, size: usize) -> Error {
    let pass = match rank_name {
        "OMPI_COMM_WORLD_RANK" => " (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...)",
        "PMI_RANK" => " (mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...)",
        _ => " (export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500)",
    };
    Error::InvalidArgument(format!(
        "{rank_name} says that this is process {rank} of {size}, which are not all on this host: how do they find each \
         other? Set MASTER_ADDR to the host of process 0 and MASTER_PORT to a port that is free there{pass}"
    ))
}

/// The same for all processes of a launcher; below the ports that Linux hands out by itself.
fn port_of(launcher: u32) -> u16 {
    20_000 + (launcher % 12_000) as u16
}

/// The nearest ancestor that was started without this variable: it has set it for those that it started.
fn launcher_of(name: &str) -> Option<u32> {
    let assignment = format!("{name}=").into_bytes();
    let parent = |pid: u32| -> Option<u32> {
        // `14658 (the name, with anything in it) S 14656 ...`
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let mut pid = parent(std::process::id())?;
    // Another user's environment cannot be read: that is the launcher's.
    while let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) {
        if !environment.split(|&byte| byte == 0).any(|entry| entry.starts_with(&assignment)) {
            break;
        }
        pid = parent(pid)?;
    }
    (pid > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(vars: &[(&str, &str)]) -> std::result::Result<Option<LaunchedProcess>, String> {
        let var = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        LaunchedProcess::from_vars(var, |_| Some(24_001)).map_err(|error| error.to_string())
    }

    fn place(rank: usize, size: usize, here: usize, address: &str, port: u16) -> LaunchedProcess {
        LaunchedProcess { rank, size, here, address: address.to_string(), port }
    }

    const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];

    #[test]
    fn every_launcher_is_understood() {
        for (rank, size) in LAUNCHERS {
            let vars = [&MASTER[..], &[(rank, "3"), (size, "8")]].concat();
            assert_eq!(told(&vars), Ok(Some(place(3, 8, 1, "node0", 29500))), "{rank}");
            assert_eq!(told(&[(rank, "0"), (size, "1")]), Ok(None), "{rank}");
            let error = told(&[(rank, "8"), (size, "8")]).unwrap_err();
            assert!(error.contains(rank) && error.contains(size), "{error}");
        }
        assert_eq!(told(&[]), Ok(None));
        let before_a_step = [("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")];
        assert_eq!(told(&before_a_step), Ok(None), "a batch script is a process of its own");
        let nested =
            [&MASTER[..], &[("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")]].concat();
        assert_eq!(told(&nested), Ok(Some(place(1, 2, 1, "node0", 29500))), "a launcher inside another one");
    }

    #[test]
    fn processes_of_one_host_find_each_other_without_being_told_where() {
        let job = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        let local = [("OMPI_COMM_WORLD_LOCAL_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        let here = [&job[..], &local[..]].concat();
        assert_eq!(told(&here), Ok(Some(place(1, 2, 2, "127.0.0.1", 20_001))));
        let with_port = [&here[..], &MASTER[1..]].concat();
        assert_eq!(told(&with_port), Ok(Some(place(1, 2, 2, "127.0.0.1", 29500))));
        let elsewhere = told(&[&job[..], &[local[0], ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]].concat()).unwrap_err();
        assert!(elsewhere.contains("process 1 of 2") && elsewhere.contains("mpirun -x MASTER_ADDR"), "{elsewhere}");
        assert_eq!(told(&job).unwrap_err(), elsewhere, "nothing is known of the host");
    }

    #[test]
    fn torchrun_s_variables_are_needed_together() {
        let job = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(told(&job).unwrap_err().contains("MASTER_ADDR is not set"));
        assert!(told(&[&job[..], &MASTER[..1]].concat()).unwrap_err().contains("MASTER_PORT is not set"));
        let agent = [&job[..], &MASTER[..], &[("TORCHELASTIC_RUN_ID", "x")]].concat();
        assert_eq!(told(&agent), Ok(Some(place(1, 2, 2, "node0", 29501))));
        assert!(told(&[&job[..], &[("MASTER_PORT", "70000")]].concat()).unwrap_err().contains("MASTER_PORT"));
    }

    #[test]
    fn the_launcher_is_the_nearest_ancestor_without_the_variable() {
        let parent = std::os::unix::process::parent_id();
        assert_eq!(launcher_of("STRATA_NOBODY_SETS_THIS"), Some(parent));
    }
}
