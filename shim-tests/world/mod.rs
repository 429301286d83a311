//! Ranks as threads of one process, on as many "nodes" as a test wants, over the real transports.
// Each test program uses a part of this.
#![allow(dead_code)]

use std::sync::atomic::AtomicBool;
use std::sync::{mpsc, Arc, Barrier, Mutex};
use std::time::Duration;
use strata::comm::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation};
use strata::device::StreamRef;
use strata::error::Result;
use strata::memory::Region;
use strata::topo::{Grid, Rank};

/// One rank of a thread world.
pub struct Member {
    pub comm: Arc<Comm>,
    pub rank: usize,
    pub grid: Arc<Grid>,
    /// All ranks meet here.
    pub barrier: Arc<Barrier>,
    /// One slot a rank, to compare results.
    pub board: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Runs `body` on every rank of `grid`, each in a thread, and joins them all; a rank that hangs is named.
pub fn run(grid: Grid, body: impl Fn(&Member) + Send + Sync + 'static) {
    let nranks = grid.nranks();
    let grid = Arc::new(grid);
    let body = Arc::new(body);
    let id = Comm::unique_id().expect("a unique id");
    let barrier = Arc::new(Barrier::new(nranks));
    let board = Arc::new(Mutex::new(vec![Vec::new(); nranks]));
    let (send, done) = mpsc::channel();
    let threads: Vec<_> = (0..nranks)
        .map(|rank| {
            let (grid, body, barrier, board, send) =
                (grid.clone(), body.clone(), barrier.clone(), board.clone(), send.clone());
            std::thread::spawn(move || {
                let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
                let options = CommOptions { host_id, ..CommOptions::default() };
                let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
                let comm = Comm::init(params, &Arc::new(AtomicBool::new(false))).expect("init");
                let member = Member { comm, rank, grid, barrier, board };
                body(&member);
                member.comm.destroy().expect("destroy");
                send.send(rank).ok();
            })
        })
        .collect();
    drop(send);
    let mut missing: Vec<usize> = (0..nranks).collect();
    while !missing.is_empty() {
        match done.recv_timeout(Duration::from_secs(300)) {
            Ok(rank) => missing.retain(|&other| other != rank),
            Err(_) => break,
        }
    }
    assert!(missing.is_empty(), "ranks {missing:?} on {grid} did not end");
    threads.into_iter().for_each(|thread| thread.join().expect("a rank's thread"));
}

/// The bytes of a buffer as a region.
pub fn region(bytes: &mut [u8]) -> Region {
    // SAFETY: the test keeps the buffer alive, and untouched, until the call that uses the region has returned.
    unsafe { Region::new(bytes.as_mut_ptr(), bytes.len()) }
}

impl Member {
    /// Runs one collective on the null stream.
    pub fn collective(&self, call: CollectiveCall) -> Result<()> {
        let operation = Operation::Collective(call);
        launch(vec![Launch { comm: self.comm.clone(), operation, stream: StreamRef::Null }])
    }
}
