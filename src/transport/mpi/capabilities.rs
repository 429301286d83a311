//! Whether the ranks of a communicator use MPI: what each tells, and the decision that all draw from it alike.
#![forbid(unsafe_code)]

use super::vtable::{state, thread_level, World};
use crate::error::{Error, Result};
use crate::transport::card;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// What the launcher told this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LauncherEnv {
    /// The rank in the job, if an MPI launcher started this process.
    pub rank: Option<i32>,
    /// The size of the job, if it told.
    pub size: Option<i32>,
    /// What tells the job from others, if anything does.
    pub job: String,
    /// What the MPI of this launcher calls itself, if that is known.
    pub flavour: Option<&'static str>,
}

impl LauncherEnv {
    /// What the environment says.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> LauncherEnv {
        let number = |names: &[&str]| names.iter().find_map(|name| var(name)?.parse::<i32>().ok());
        let rank = number(&["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"]);
        // `srun` gives the size only in its own variable; outside of a step that one means something else.
        let sizes: &[&str] = match rank {
            Some(_) => &["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"],
            None => &[],
        };
        let flavour = match (var("OMPI_COMM_WORLD_SIZE"), var("PMI_SIZE")) {
            (Some(_), _) => Some("Open MPI"),
            (None, Some(_)) => Some("MPICH"),
            (None, None) => None,
        };
        let jobs = ["PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"];
        let job: Vec<String> = jobs.iter().filter_map(|name| var(name)).collect();
        LauncherEnv { rank, size: number(sizes), job: job.join("."), flavour }
    }
}

/// What a rank tells about its MPI.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Why it cannot use MPI; empty if it can.
    pub why_not: String,
    /// Whether MPI is running already.
    pub running: bool,
    /// Its rank in the world.
    pub world_rank: i32,
    /// The world's size.
    pub world_size: i32,
    /// Its job.
    pub job: String,
    /// Whose device memory its MPI takes addresses of.
    pub device_memory: i32,
    /// Its MPI's description of itself.
    pub description: String,
    /// The addresses of its node's NICs, told before MPI is initialised.
    pub addresses: Vec<IpAddr>,
}

impl Capabilities {
    /// The card of a process whose MPI is in this state.
    pub fn new(world: &World, launch: &LauncherEnv, description: &str) -> Capabilities {
        let mut card =
            Capabilities { job: launch.job.clone(), description: description.to_string(), ..Capabilities::default() };
        match (world.state, launch.rank, launch.size) {
            (state::FINALIZED, ..) => card.why_not = "the program has finalised MPI".to_string(),
            (state::RUNNING, ..) if world.thread_level < thread_level::SERIALIZED => {
                let level = if world.thread_level == thread_level::FUNNELED { "FUNNELED" } else { "SINGLE" };
                card.why_not = format!(
                    "the program has initialised MPI with MPI_THREAD_{level}; it takes MPI_THREAD_MULTIPLE, or \
                     MPI_THREAD_SERIALIZED"
                );
            }
            (state::RUNNING, ..) => {
                (card.running, card.world_rank, card.world_size) = (true, world.rank, world.size);
                card.device_memory = world.device_memory;
            }
            (_, Some(rank), Some(size)) => (card.world_rank, card.world_size) = (rank, size),
            _ => card.why_not = "no MPI launcher started it".to_string(),
        }
        card
    }

    /// The card of a rank that cannot use MPI.
    pub fn refusal(why: &str) -> Capabilities {
        Capabilities { why_not: why.to_string(), ..Capabilities::default() }
    }

    /// The card as bytes.
    pub fn encode(&self) -> Vec<u8> {
        card::encode(self)
    }

    /// The card in these bytes.
    pub fn decode(bytes: &[u8]) -> Result<Capabilities> {
        card::decode(bytes)
            .ok_or_else(|| Error::Remote("a rank told something else than the state of its MPI".to_string()))
    }
}

/// Why these ranks, all of them, cannot use MPI; `Ok(running)` if they can.
pub fn decide(cards: &[Capabilities]) -> std::result::Result<bool, String> {
    let first = &cards[0];
    for (rank, card) in cards.iter().enumerate() {
        if !card.why_not.is_empty() {
            return Err(format!("rank {rank}: {}", card.why_not));
        }
        if card.description != first.description {
            return Err(format!("rank {rank} has {}, rank 0 {}", card.description, first.description));
        }
        if (&card.job, card.world_size) != (&first.job, first.world_size) {
            return Err(format!("rank {rank} belongs to another MPI job than rank 0"));
        }
        if card.running != first.running {
            let (has, not) = if card.running { (rank, 0) } else { (0, rank) };
            return Err(format!("rank {has} has initialised MPI and rank {not} has not"));
        }
    }
    let mut ranks: Vec<i32> = cards.iter().map(|card| card.world_rank).collect();
    ranks.sort_unstable();
    if let Some(pair) = ranks.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("several ranks are in the process that is rank {} of MPI's world", pair[0]));
    }
    if !first.running && cards.len() != first.world_size as usize {
        return Err(format!(
            "MPI is not initialised yet, which takes all {} ranks of the job, and this communicator has {}",
            first.world_size,
            cards.len()
        ));
    }
    Ok(first.running)
}

#[cfg(test)]
mod tests {
    use super::super::vtable::device_memory;
    use super::*;

    fn launch(rank: i32) -> LauncherEnv {
        LauncherEnv { rank: Some(rank), size: Some(2), job: "7".to_string(), flavour: None }
    }

    fn running(rank: i32, thread_level: i32) -> World {
        World { state: state::RUNNING, thread_level, rank, size: 4, device_memory: device_memory::CUDA }
    }

    fn two(first: Capabilities, second: Capabilities) -> std::result::Result<bool, String> {
        let again = |card: Capabilities| Capabilities::decode(&card.encode()).unwrap();
        decide(&[again(first), again(second)])
    }

    #[test]
    fn a_job_uses_mpi_whether_it_runs_already_or_not() {
        let fresh = |rank| Capabilities::new(&World::default(), &launch(rank), "MPI X");
        assert_eq!(two(fresh(0), fresh(1)), Ok(false));
        let runs = |rank| Capabilities::new(&running(rank, thread_level::SERIALIZED), &launch(rank), "MPI X");
        assert_eq!(two(runs(3), runs(1)), Ok(true), "two of a world of four");
    }

    #[test]
    fn whatever_keeps_one_rank_from_mpi_keeps_all() {
        let runs = |rank, level| Capabilities::new(&running(rank, level), &launch(rank), "MPI X");
        let good = || runs(0, thread_level::MULTIPLE);
        let fresh = |rank| Capabilities::new(&World::default(), &launch(rank), "MPI X");
        let ended = World { state: state::FINALIZED, ..World::default() };
        for (second, part) in [
            (Capabilities::refusal("no plugin"), "rank 1: no plugin"),
            (runs(1, thread_level::SINGLE), "MPI_THREAD_SINGLE"),
            (runs(1, thread_level::FUNNELED), "MPI_THREAD_FUNNELED"),
            (Capabilities::new(&ended, &launch(1), "MPI X"), "finalised"),
            (Capabilities::new(&World::default(), &LauncherEnv::default(), "MPI X"), "no MPI launcher"),
            (runs(0, thread_level::MULTIPLE), "several ranks are in the process"),
            (Capabilities { job: "8".to_string(), ..runs(1, thread_level::MULTIPLE) }, "another MPI job"),
            (Capabilities { description: "MPI Y".to_string(), ..runs(1, thread_level::MULTIPLE) }, "has MPI Y"),
            (Capabilities { world_size: 4, ..fresh(1) }, "rank 0 has initialised MPI and rank 1 has not"),
        ] {
            let why = two(good(), second).unwrap_err();
            assert!(why.contains(part), "{part} is missing in: {why}");
        }
        let of_four = |rank| Capabilities { world_size: 4, ..fresh(rank) };
        assert!(two(of_four(0), of_four(1)).unwrap_err().contains("all 4 ranks"));
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        let from = |vars: &[(&str, &str)]| {
            LauncherEnv::from_vars(|name| {
                vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
            })
        };
        let open_mpi = from(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "8"), ("PMIX_NAMESPACE", "12")]);
        let told = |rank, size, job: &str, flavour| LauncherEnv { rank, size, job: job.to_string(), flavour };
        assert_eq!(open_mpi, told(Some(3), Some(8), "12", Some("Open MPI")));
        let hydra = from(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]);
        assert_eq!(hydra, told(Some(0), Some(2), "", Some("MPICH")));
        let srun = from(&[("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_JOB_ID", "5")]);
        assert_eq!(srun, told(Some(1), Some(4), "5", None));
        assert_eq!(from(&[("SLURM_STEP_NUM_TASKS", "4"), ("RANK", "1")]), LauncherEnv::default());
    }
}
