//! Ranks that die, freeze, or call something else: the others must learn of it, by name and in bounded time.
//!
//! Each rank is a process of its own: this test binary, started again with `STRATA_TEST_RANK` set by the parent test.

use crate::again::again;
use crate::built;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation, UniqueId};
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::{Error, Result};
use strata::memory::DeviceRegion;
use strata::plan::Collective;
use strata::topo::Rank;

const COUNT: usize = 300_000;

/// A rank's process, killed when the test ends however it ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn signal(&self, name: &str) {
        assert!(built::signal(name, self.0.id()));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> UniqueId {
    let byte = |i: usize| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex");
    UniqueId(std::array::from_fn(byte))
}

fn collective(comm: &Arc<Comm>, collective: Collective, count: usize, root: usize) -> Result<()> {
    let mut send = vec![1u8; count * 4];
    let mut recv = vec![0u8; count * 4 * if collective == Collective::AllGather { comm.nranks() } else { 1 }];
    // SAFETY: the bytes must stay and have no reference to them until the call has ended; because it has when `launch`
    // returns.
    let region = |bytes: &mut Vec<u8>| unsafe { DeviceRegion::new(bytes.as_mut_ptr(), bytes.len()) };
    let call = CollectiveCall {
        collective,
        input: region(&mut send),
        output: region(&mut recv),
        count,
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::I32,
        reduction: collective.reduces().then(|| Reduction::new(RedOp::Sum, DataType::I32, comm.nranks())),
        factor_at: None,
        residual: None,
        root: Rank::from_index(root),
        algorithm: None,
        decision: None,
    };
    let operation = Operation::Collective(call);
    launch(vec![Launch { comm: comm.clone(), operation, stream: StreamRef::Null }])
}

/// Forks a child that outlives its parent: it ends when the test closes the standard input that both have.
fn fork_a_child(comm: &Arc<Comm>) {
    // SAFETY: the child must not wait for other threads of its parent; because it only asks a failure's text and reads.
    if unsafe { libc::fork() } != 0 {
        return;
    }
    let refused = matches!(comm.usable(), Err(Error::InvalidUsage(text)) if text.contains("forked child"));
    let mut byte = 0u8;
    // SAFETY: a byte must be writable; because it is a local.
    while unsafe { libc::read(0, std::ptr::from_mut(&mut byte).cast(), 1) } > 0 {}
    // SAFETY: nothing of the parent's may run at the child's end; because `_exit` runs nothing.
    unsafe { libc::_exit(i32::from(!refused)) };
}

/// What makes another communicator in round 20, in which the odd rank takes no part.
const MAKINGS: [&str; 4] = ["split", "shrink", "grow", "go on"];

/// A communicator of all ranks and perhaps one that never comes; or of all but rank 0, which then has nothing to fail; or of
/// all but rank 2, by some, while rank 1 needs rank 2.
fn make_another(comm: &Arc<Comm>, making: &str) -> Result<()> {
    let never = AtomicBool::new(false);
    let options = comm.options().clone();
    match making {
        "split" => comm.split(0, 0, options, &never).map(drop),
        "shrink" if comm.rank() == 0 => collective(comm, Collective::AllReduce, COUNT, 0),
        "shrink" => comm.shrink(&[0], false, options, &never).map(drop),
        "go on" if comm.rank() == 1 => collective(comm, Collective::AllReduce, COUNT, 0),
        "go on" => comm.shrink(&[2], false, options, &never).map(drop),
        _ => {
            let id = (comm.rank() == 0).then(|| comm.grow_id()).transpose()?;
            Comm::grow(Some(comm), comm.nranks() + 1, id, None, options, &never).map(drop)
        }
    }
}

/// What a rank's process does: all-reduces until one fails, then says how.
fn rank_main(rank: usize) {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    let nranks: usize = var("STRATA_TEST_NRANKS").parse().expect("a number of ranks");
    let per_node: usize = var("STRATA_TEST_PER_NODE").parse().expect("ranks a node");
    let options = CommOptions { host_id: Some(format!("node{}", rank / per_node)), ..CommOptions::default() };
    let params = InitParams { nranks, rank, ids: vec![unhex(&var("STRATA_TEST_ID"))], options, device: 0, gpu: None };
    let comm = Comm::init(params, &Arc::new(AtomicBool::new(false))).expect("init");
    if var("STRATA_TEST_FORK") == rank.to_string() {
        fork_a_child(&comm);
    }
    let [odd, late] = ["STRATA_TEST_ODD_RANK", "STRATA_TEST_LATE_RANK"].map(|name| var(name) == rank.to_string());
    let end = Instant::now() + Duration::from_secs(60);
    let mut rounds = 0;
    while Instant::now() < end {
        let outcome = match (rounds, var("STRATA_TEST_ODD_CALL").as_str()) {
            (20, "roots") => collective(&comm, Collective::Broadcast, COUNT, if odd { 0 } else { 1 }),
            (20, "kinds") if odd => collective(&comm, Collective::AllGather, 1000, 0),
            (20, making) if odd && MAKINGS.contains(&making) => {
                println!("@@waiting");
                std::thread::sleep(Duration::from_secs(60));
                Ok(())
            }
            (20, making) if MAKINGS.contains(&making) => make_another(&comm, making),
            (20, _) if odd => collective(&comm, Collective::AllReduce, COUNT / 2, 0),
            (40, "late") => return println!("@@through"),
            _ => collective(&comm, Collective::AllReduce, COUNT, 0),
        };
        if late && rounds == 20 {
            // Longer than it takes the others to ask where it is.
            std::thread::sleep(Duration::from_millis(2500));
        }
        if let Err(error) = outcome {
            println!("@@failed {} {}", error.code(), error);
            let made = var("STRATA_TEST_ODD_CALL");
            if !MAKINGS.contains(&&*made) {
                assert_eq!(comm.usable().unwrap_err().code(), error.code(), "the failure is kept");
            }
            comm.abort();
            return;
        }
        rounds += 1;
        if rounds == 10 {
            println!("@@running");
        }
    }
    println!("@@never failed");
}

struct World {
    processes: Vec<Process>,
    lines: mpsc::Receiver<(usize, String)>,
}

fn start(nranks: usize, per_node: usize, vars: &[(&str, &str)]) -> World {
    let id = Comm::unique_id().expect("a unique id");
    let (send, lines) = mpsc::channel();
    let processes = (0..nranks)
        .map(|rank| {
            let mut command = again(module_path!(), "a_rank_of_another_test");
            command.env("STRATA_TEST_RANK", rank.to_string()).env("STRATA_TEST_NRANKS", nranks.to_string());
            command.env("STRATA_TEST_PER_NODE", per_node.to_string()).env("STRATA_TEST_ID", hex(&id.0));
            command.envs(vars.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("a rank's process");
            read_lines(rank, child.stdout.take().expect("its output"), send.clone());
            Process(child)
        })
        .collect();
    let world = World { processes, lines };
    let mut running = 0;
    while running < nranks {
        let (rank, line) = world.lines.recv_timeout(Duration::from_secs(60)).expect("all ranks run");
        assert!(line.starts_with("running"), "rank {rank}: {line}");
        running += 1;
    }
    world
}

fn read_lines(rank: usize, output: ChildStdout, lines: mpsc::Sender<(usize, String)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
            // The test harness of the rank's process writes to the same output.
            if let Some((_, said)) = line.split_once("@@") {
                let _ = lines.send((rank, said.to_string()));
            }
        }
    });
}

/// Every rank but `gone` must fail within `limit` with one of `codes`, naming `gone`.
fn expect_failures(world: &World, gone: usize, codes: &[i32], limit: Duration) {
    let end = Instant::now() + limit;
    for _ in 0..world.processes.len() - 1 {
        let left = end.saturating_duration_since(Instant::now());
        let (rank, line) = world.lines.recv_timeout(left).expect("every other rank fails in time");
        let code: i32 = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        println!("rank {rank}: {line}");
        assert!(line.starts_with("failed") && codes.contains(&code), "rank {rank}: {line}");
        assert!(line.contains(&format!("rank {gone} ")), "rank {rank} does not name rank {gone}: {line}");
    }
}

#[test]
fn a_rank_of_another_test() {
    if let Ok(rank) = std::env::var("STRATA_TEST_RANK") {
        rank_main(rank.parse().expect("a rank"));
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others_at_once() {
    for (nranks, per_node) in [(4, 4), (6, 2), (3, 1)] {
        let world = start(nranks, per_node, &[]);
        world.processes[1].signal("KILL");
        expect_failures(&world, 1, &[6], Duration::from_secs(5));
    }
}

#[test]
fn a_killed_rank_is_missed_at_once_even_if_a_forked_child_of_it_lives() {
    for (nranks, per_node) in [(3, 3), (4, 2), (3, 1)] {
        let world = start(nranks, per_node, &[("STRATA_TEST_FORK", "1")]);
        world.processes[1].signal("KILL");
        expect_failures(&world, 1, &[6], Duration::from_secs(5));
    }
}

#[test]
fn a_rank_that_dies_before_another_communicator_is_made_is_named_by_all_others_at_once() {
    for making in MAKINGS {
        let world = start(4, 2, &[("STRATA_TEST_ODD_RANK", "2"), ("STRATA_TEST_ODD_CALL", making)]);
        let (rank, line) = world.lines.recv_timeout(Duration::from_secs(20)).expect("it does not take part");
        assert_eq!((rank, &*line), (2, "waiting"));
        world.processes[2].signal("KILL");
        // Far less than STRATA_BOOTSTRAP_TIMEOUT_MS.
        expect_failures(&world, 2, &[6], Duration::from_secs(10));
    }
}

#[test]
fn a_frozen_rank_is_named_by_all_others_within_the_configured_time() {
    for (nranks, per_node) in [(4, 4), (6, 2)] {
        let world = start(nranks, per_node, &[("STRATA_TIMEOUT_MS", "1500")]);
        world.processes[2].signal("STOP");
        expect_failures(&world, 2, &[6, 8], Duration::from_secs(10));
        world.processes[2].signal("CONT");
    }
}

#[test]
fn a_rank_that_calls_something_else_is_an_error_and_no_hang() {
    // The second case is one in which no message ever arrives: each waits for the other.
    let cases = [
        ("counts", 4, 2, "all_reduce of 150000 int32 (sum)", "all_reduce of 300000 int32 (sum)"),
        ("roots", 2, 1, "broadcast of 300000 int32 with root 0", "broadcast of 300000 int32 with root 1"),
        ("kinds", 3, 1, "all_gather of 1000 int32", "all_reduce of 300000 int32 (sum)"),
    ];
    for (kind, nranks, per_node, odd_call, call) in cases {
        let odd = nranks - 1;
        let vars = [("STRATA_TEST_ODD_RANK", &*odd.to_string()), ("STRATA_TEST_ODD_CALL", kind)];
        let world = start(nranks, per_node, &vars);
        for _ in 0..nranks {
            let (rank, line) = world.lines.recv_timeout(Duration::from_secs(20)).expect("every rank fails in time");
            println!("{kind}: rank {rank}: {line}");
            let parts =
                ["failed 5 ", "operation 21 ", &format!("rank {odd} called {odd_call}"), &format!(" called {call}")];
            assert!(parts.iter().all(|part| line.contains(part)), "{kind}: rank {rank}: {line}");
        }
    }
}

#[test]
fn a_rank_that_is_merely_late_is_waited_for() {
    let world = start(4, 2, &[("STRATA_TEST_LATE_RANK", "3"), ("STRATA_TEST_ODD_CALL", "late")]);
    for _ in 0..4 {
        let (rank, line) = world.lines.recv_timeout(Duration::from_secs(30)).expect("every rank goes on");
        assert_eq!(line, "through", "rank {rank}");
    }
}

/// It is nothing to do, so that no rank fails by it; who waits says both calls.
#[test]
fn a_collective_of_no_elements_in_the_place_of_another_one_is_told() {
    let log = std::env::temp_dir().join(format!("strata-empty-{}.log", std::process::id()));
    print!("{}", built::run_with("empty.c", &[], &[log.to_str().unwrap()]));
    let _ = std::fs::remove_file(log);
}
