//! Algorithms that come as files, those of others, on ranks that are processes of an MPI.

use super::{alone, mpi, Mpi};
use crate::again::again;
use crate::cases::{calls_by_seed, host_region, scripts, scripts_for, Case, SEGMENT_BYTES};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation, UniqueId};
use strata::device::StreamRef;
use strata::digest::Digest;
use strata::dtype::DataType;
use strata::error::Result;
use strata::plan::Collective;
use strata::topo::Rank;

/// Fewer calls where there are more ranks, all of which run on the processors of one machine.
const CALLS: [(usize, usize); 4] = [(4, 32), (8, 24), (16, 12), (32, 8)];
/// Says to a process that it is a rank, and the seed.
const SEED: &str = "SCRIPT_RANK_SEED";
const TEST: &str = "all_scripts_are_right_over_mpi";

fn number(name: &str) -> usize {
    let text = std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    text.parse().unwrap_or_else(|_| panic!("{name}={text}"))
}

/// This process's rank of all.
fn world() -> (Arc<Comm>, usize, usize) {
    let (nranks, rank) = (number("WORLD_SIZE"), number("RANK"));
    let address = format!("127.0.0.1:{}", number("MASTER_PORT"));
    let id = UniqueId::from_address(&address, "").expect("an id");
    let params = InitParams { nranks, rank, ids: vec![id], options: CommOptions::default(), device: 0, gpu: None };
    (Comm::init(params, &Arc::new(AtomicBool::new(false))).expect("a communicator"), nranks, rank)
}

fn call(comm: &Arc<Comm>, call: CollectiveCall) -> Result<()> {
    let operation = Operation::Collective(call);
    launch(vec![Launch { comm: comm.clone(), operation, stream: StreamRef::Null }])
}

/// The digests of this rank's results must be those of all ranks.
fn same_on_all(comm: &Arc<Comm>, nranks: usize, results: &[(String, u64)]) {
    let mut mine: Vec<u8> = results.iter().flat_map(|(_, digest)| digest.to_le_bytes()).collect();
    let mut all = vec![0; mine.len() * nranks];
    let (input, output) = (host_region(&mut mine).as_device(), host_region(&mut all).as_device());
    let gathering = CollectiveCall {
        collective: Collective::AllGather,
        input,
        output,
        count: results.len(),
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::U64,
        reduction: None,
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: None,
        decision: None,
    };
    call(comm, gathering).expect("an all-gather");
    for (rank, theirs) in all.chunks(mine.len().max(1)).enumerate() {
        let differs = theirs.chunks(8).zip(mine.chunks(8)).position(|(theirs, mine)| theirs != mine);
        assert_eq!(differs.map(|at| &results[at].0), None, "rank {rank} has other bits");
    }
}

/// What a rank does.
fn rank_main(seed: u64) {
    let (comm, nranks, rank) = world();
    let (_, calls) = CALLS.into_iter().find(|(of, _)| *of == nranks).expect("a number of calls");
    let mut results = Vec::new();
    for script in scripts_for(Some(nranks)) {
        for case in calls_by_seed(script, seed, calls, false) {
            let result = case.run((nranks, rank), Some(&script.unique_name), |described| call(&comm, described));
            if case.collective == Collective::AllReduce {
                results.push((format!("{} {case}", script.name), Digest::new("bits").bytes(&result).value() as u64));
            }
        }
    }
    same_on_all(&comm, nranks, &results);
    comm.destroy().expect("destroy");
    // The library does this when a C program exits: without MPI_Finalize a launcher takes the end for a failure.
    strata::transport::leave_process();
}

/// Runs all files of so many ranks; what was picked.
fn run(mpi: &Mpi, nranks: usize, calls: usize, seed: u64) -> Vec<Case> {
    let itself = again(module_path!(), TEST);
    let line = std::iter::once(itself.get_program()).chain(itself.get_args());
    let line: Vec<&str> = line.map(|word| word.to_str().expect("a path of text")).collect();
    let seed_text = seed.to_string();
    let vars = [(SEED, seed_text.as_str()), ("STRATA_SEGMENT_BYTES", SEGMENT_BYTES)];
    let said = mpi.run(nranks, "exec \"$@\"", &line, &vars);
    let fit = scripts_for(Some(nranks));
    assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    for script in &fit {
        let mut served = said.lines().filter(|line| line.contains(&format!("-> {}, ", script.name)));
        assert!(served.any(|line| !line.contains(", 1 segment of ")), "{} in segments\n{said}", script.name);
    }
    fit.iter().flat_map(|script| calls_by_seed(script, seed, calls, false)).collect()
}

/// Ranks on nodes of 1, 2, 2, ... ranks. `SCRIPT_SEED` chooses another seed.
#[test]
fn all_scripts_are_right_over_mpi() {
    if std::env::var_os(SEED).is_some() {
        return rank_main(number(SEED) as u64);
    }
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let seed = std::env::var("SCRIPT_SEED").map_or(1, |text| text.parse().expect("a seed"));
    assert_eq!(scripts().len(), 24);
    for (nranks, calls) in CALLS {
        let began = std::time::Instant::now();
        let cases = run(mpi, nranks, calls, seed);
        let in_place = cases.iter().filter(|case| case.in_place).count();
        println!("seed {seed}: {nranks} ranks, {} calls, {in_place} in place, {:?}", cases.len(), began.elapsed());
    }
}
