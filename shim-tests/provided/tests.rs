//! Calls by the provider of `examples/provider` wherever the ranks' data is: on the host, on soft GPUs of both drivers, on the toy device
//! of examples/device. Calls follow from seeds. A program of its own, since the settings are the process's; it runs itself once for each
//! place.

#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[allow(dead_code)]
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../grouped/mod.rs"]
mod grouped;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../world/mod.rs"]
mod world;

mod uneven;

use cases::Case;
use grouped::Grouped;
use std::process::Command;
use strata::dtype::{DataType, RedOp};
use strata::plan::Collective;
use strata::sim::Random;
use strata::topo::Grid;

const SETTINGS: [&str; 8] = [
    "STRATA_ALLREDUCE_ALGO",
    "STRATA_ALLGATHER_ALGO",
    "STRATA_REDUCESCATTER_ALGO",
    "STRATA_BROADCAST_ALGO",
    "STRATA_REDUCE_ALGO",
    "STRATA_ALLTOALL_ALGO",
    "STRATA_GATHER_ALGO",
    "STRATA_SCATTER_ALGO",
];
const KINDS: [Collective; 8] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];
const GRIDS: [&[usize]; 5] = [&[2], &[3], &[2, 2], &[1, 3], &[1, 1, 1, 1, 1]];

/// A seed's call, the same on all ranks.
fn case(seed: u64, nranks: usize) -> Case {
    let mut random = Random::new(seed);
    let collective = random.pick(&KINDS);
    // The types of which the provider takes reductions more often than others.
    let taken = [DataType::I32, DataType::I64, DataType::F32, DataType::F64];
    let dtype = if random.one_in(2) { random.pick(&taken) } else { random.pick(&DataType::ALL) };
    let op = collective.reduces().then(|| random.pick(&RedOp::ALL));
    let count = random.pick(&[0, 1, 3, 40, 1000, 30_000, 100_001]);
    let root = if collective.has_root() { random.below(nranks as u64) as usize } else { 0 };
    let in_place = collective != Collective::AllToAll && random.one_in(2);
    let misalign = dtype.size() * random.below(4) as usize;
    Case { collective, dtype, op, count, root, in_place, misalign }
}

/// What a process of a place does: even calls one by one, groups and windows of calls, and calls with blocks of different sizes.
fn calls_of_one_place() {
    let seeds: u64 = std::env::var("PROVIDED_SEEDS").map_or(60, |seeds| seeds.parse().expect("a number"));
    for (at, sizes) in GRIDS.into_iter().enumerate() {
        world::run(Grid::blocks(sizes), move |member| {
            assert!(member.comm.providers().contains_key("mesh"));
            let nranks = member.grid.nranks();
            let first = 1 + 10_000 * at as u64;
            for seed in first..first + seeds {
                case(seed, nranks).run((nranks, member.rank), None, |call| member.collective(call));
                uneven::Uneven::new(seed, nranks).run(member);
            }
            let mut groups = Grouped::new(&member.comm, &[None]);
            (first..first + seeds / 4).for_each(|seed| groups.run(seed));
        });
    }
}

#[test]
fn calls_by_a_provider_are_right_on_the_host_on_gpus_of_both_drivers_and_on_the_toy_device() {
    // Set for a process of one place.
    if std::env::var_os("PROVIDED_PLACE").is_some() {
        return calls_of_one_place();
    }
    let mesh =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("provided-mesh-{}.so", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"]).arg(built::header_dir());
    built::checked(cc.arg(built::root().join("examples/provider/mesh.c")).arg("-o").arg(&mesh));
    // Not in the time of ranks that wait for others.
    soft::cuda_dir();
    soft::hip_dir();
    for place in [None, Some("cuda"), Some("hip"), Some("inverted")] {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--nocapture", "--test-threads=1"]).env("PROVIDED_PLACE", place.unwrap_or("host"));
        command.env("STRATA_PROVIDERS", &mesh).env("NCCL_DEBUG", "INFO").env("STRATA_NCCL_LIB", "none");
        command.env("STRATA_TIMEOUT_MS", "60000").envs(SETTINGS.map(|setting| (setting, "provider:mesh")));
        let ended = command.env_remove("SOFT_DEVICE").envs(place.map(|name| ("SOFT_DEVICE", name))).output();
        let ended = ended.expect("this program");
        let said = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{place:?}\n{said}");
        let by_mesh: Vec<&str> = said.lines().filter(|line| line.contains("-> provider:mesh, 1 segment")).collect();
        for kind in KINDS.into_iter().filter(|kind| *kind != Collective::Reduce) {
            let name = format!(" {}: ", kind.name());
            assert!(by_mesh.iter().any(|line| line.contains(&name)), "{place:?}: no {name}by the provider\n{said}");
        }
        assert!(said.lines().any(|line| line.contains("(provider mesh takes no reduce")), "{place:?}\n{said}");
    }
    std::fs::remove_file(mesh).expect("the provider");
}
