//! Carriers per call: communicators whose calls choose what carries them between nodes, over TCP and over the toy transport of
//! examples/transport. A program of its own, since `STRATA_CARRIERS` is the process's.
//!
//! Ranks are threads. Every test has a watchdog: what hangs fails.

#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[allow(dead_code)]
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../grouped/mod.rs"]
mod grouped;
#[path = "../../examples/transport/loopback.rs"]
mod loopback;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../world/mod.rs"]
mod world;

mod device;
mod failures;
mod groups;
mod orders;

use loopback::Loopback;
use std::sync::atomic::AtomicBool;
use std::sync::{mpsc, Arc, Mutex, MutexGuard, Once};
use std::time::Duration;
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation};
use strata::device::host::stream::HostStream;
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::Result;
use strata::memory::{Arena, Region};
use strata::plan::Collective;
use strata::topo::{Grid, Rank};
use strata::transport::{self, Exchange, Probe, Site, TransportKind};

static NEVER: AtomicBool = AtomicBool::new(false);
/// No test takes longer.
const LIMIT: Duration = Duration::from_secs(240);

/// A kind of transport that a rank cannot use.
struct Lame;

impl TransportKind for Lame {
    fn name(&self) -> &'static str {
        "lame"
    }

    fn probe(&self, _: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe> {
        exchange.allgather(Vec::new())?;
        Ok(Probe::Refused("rank 1 has no adapter for it".to_string()))
    }

    fn waits_for_descriptors(&self) -> bool {
        false
    }
}

/// Sets `STRATA_CARRIERS` while this lives, which one test does at a time.
struct Setting {
    _alone: MutexGuard<'static, ()>,
}

fn setting(carriers: &str) -> Setting {
    static ALONE: Mutex<()> = Mutex::new(());
    static ONCE: Once = Once::new();
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    ONCE.call_once(|| {
        std::env::set_var("STRATA_TIMEOUT_MS", "60000");
        transport::register(&Loopback).expect("the name is free");
        transport::register(&Lame).expect("the name is free");
    });
    std::env::set_var("STRATA_CARRIERS", carriers);
    Setting { _alone: alone }
}

/// Runs `body` as every rank of nodes of these sizes, with what came of making the communicator.
fn try_ranks(sizes: &[usize], body: impl Fn(usize, Result<Arc<Comm>>) + Send + Sync + 'static) {
    let grid = Grid::blocks(sizes);
    let (nranks, id) = (grid.nranks(), Comm::unique_id().expect("a unique id"));
    let (body, (ends, ended)) = (Arc::new(body), mpsc::channel());
    let threads: Vec<_> = (0..nranks)
        .map(|rank| {
            let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
            let options = CommOptions { host_id, ..CommOptions::default() };
            let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
            let (body, ends) = (body.clone(), ends.clone());
            std::thread::spawn(move || {
                body(rank, Comm::init(params, &NEVER));
                ends.send(rank).ok();
            })
        })
        .collect();
    drop(ends);
    let mut missing: Vec<usize> = (0..nranks).collect();
    while !missing.is_empty() {
        match ended.recv_timeout(LIMIT) {
            Ok(rank) => missing.retain(|&other| other != rank),
            // All have ended, or one hangs.
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("ranks {missing:?} hang"),
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("a rank's thread"));
}

/// The same, with the communicator, which is destroyed afterwards.
fn ranks(sizes: &[usize], body: impl Fn(&Arc<Comm>) + Send + Sync + 'static) {
    try_ranks(sizes, move |_, comm| {
        let comm = comm.expect("a communicator");
        body(&comm);
        comm.destroy().expect("destroyed");
    });
}

/// Memory that stays to the end of the process: a call that fails may still point to it.
fn memory(numbers: &[i32]) -> Region {
    let region = Arena::new(4 * numbers.len()).leak();
    region.write(&numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>());
    region
}

fn numbers(region: Region) -> Vec<i32> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes.chunks(4).map(|number| i32::from_le_bytes(number.try_into().expect("four bytes"))).collect()
}

/// A sum over all ranks by this algorithm and carrier.
fn sum(comm: &Arc<Comm>, input: Region, output: Region, name: &str, stream: &StreamRef) -> Launch {
    let call = CollectiveCall {
        collective: Collective::AllReduce,
        input: input.as_device(),
        output: output.as_device(),
        count: input.len() / 4,
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::I32,
        reduction: Some(Reduction::new(RedOp::Sum, DataType::I32, comm.nranks())),
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: Some(name.to_string()),
        decision: None,
    };
    Launch { comm: comm.clone(), operation: Operation::Collective(call), stream: stream.clone() }
}

/// The sum of one number of each rank, on the null stream.
fn sum_of(comm: &Arc<Comm>, number: i32, name: &str) -> Result<i32> {
    let output = memory(&[0]);
    launch(vec![sum(comm, memory(&[number]), output, name, &StreamRef::Null)])?;
    Ok(numbers(output)[0])
}

fn stream() -> (Arc<HostStream>, StreamRef) {
    let stream = HostStream::new();
    (stream.clone(), StreamRef::Stream(stream))
}

#[test]
fn calls_choose_between_the_carriers_of_the_communicator_and_of_those_that_are_made_out_of_it() {
    let _setting = setting("tcp,loopback");
    ranks(&[2, 2], |comm| {
        assert_eq!((comm.carriers(), comm.machine().inter.as_str()), (vec!["tcp", "loopback"], "tcp"));
        let names = ["@loopback", "ring@loopback", "two_level(direct,log)@loopback", "ring@tcp", "ring", "auto"];
        for (at, name) in names.iter().enumerate() {
            assert_eq!(sum_of(comm, at as i32, name), Ok(4 * at as i32), "{name}");
        }
        let told = sum_of(comm, 1, "ring@mpi").unwrap_err();
        assert!(told
            .text()
            .ends_with("no carrier mpi but tcp,loopback: STRATA_CARRIERS=tcp,loopback,mpi gives it one"));
        assert!(sum_of(comm, 1, "ring@lopback").unwrap_err().text().contains("did you mean loopback?"));

        let half =
            comm.split((comm.rank() % 2) as i32, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        assert_eq!((half.carriers(), sum_of(&half, 5, "ring@loopback")), (vec!["tcp", "loopback"], Ok(10)));
        if comm.rank() != 1 {
            let rest = comm.shrink(&[1], false, CommOptions::default(), &NEVER).expect("shrink");
            assert_eq!((rest.carriers(), sum_of(&rest, 5, "@loopback")), (vec!["tcp", "loopback"], Ok(15)));
            rest.destroy().expect("destroyed");
        }
        half.destroy().expect("destroyed");
    });
}

#[test]
fn on_one_node_carriers_are_still_apart_and_alone_a_rank_has_none() {
    let _setting = setting("tcp,loopback");
    ranks(&[3], |comm| {
        assert_eq!((comm.carriers(), comm.machine().inter.as_str()), (vec!["loopback"], "none"));
        // Calls that are made again go straight to a board: each carrier has its own.
        for number in 0..6 {
            assert_eq!(sum_of(comm, number, "@loopback"), Ok(3 * number));
            assert_eq!(sum_of(comm, number, "@tcp"), Ok(3 * number));
        }
    });
    ranks(&[1], |comm| {
        assert!(comm.carriers().is_empty());
        assert_eq!(sum_of(comm, 7, "@loopback"), Ok(7));
    });
}

#[test]
fn a_carrier_that_a_rank_lacks_is_left_out_with_its_reason_or_refuses_the_communicator_where_it_is_required() {
    let setting_ = setting("tcp,lame,loopback");
    ranks(&[1, 1, 1], |comm| {
        assert_eq!(comm.carriers(), ["tcp", "loopback"]);
        let told = sum_of(comm, 1, "@lame").unwrap_err();
        assert!(
            told.text().ends_with("lame was left out of this communicator: rank 1 has no adapter for it"),
            "{told}"
        );
        assert_eq!(sum_of(comm, 1, "@loopback"), Ok(3));
    });
    drop(setting_);
    for (carriers, why) in [
        ("tcp,loopback,lame!", "lame cannot carry messages between these nodes: rank 1 has no adapter for it"),
        ("tcp,lopback", "there is no carrier lopback; did you mean loopback?"),
    ] {
        let _setting = setting(carriers);
        try_ranks(&[1, 2], move |rank, comm| {
            let Err(error) = comm else { panic!("rank {rank} has a communicator") };
            let text = error.text();
            assert!(text.starts_with(&format!("STRATA_CARRIERS={carriers}: ")) && text.contains(why), "{text}");
        });
    }
}

#[test]
fn the_first_is_the_communicator_s_own_and_messages_go_by_it() {
    let _setting = setting("loopback,tcp");
    ranks(&[1, 2], |comm| {
        assert_eq!((comm.carriers(), comm.machine().inter.as_str()), (vec!["loopback", "tcp"], "loopback"));
        assert_eq!([sum_of(comm, 2, "ring"), sum_of(comm, 2, "ring@tcp")], [Ok(6), Ok(6)]);
    });
}
