//! Ranks as threads of one process, on made-up nodes: with a communicator each, or with a bare transport.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata::communicator::{Comm, CommOptions, InitParams};
use strata::config::Config;
use strata::error::{Error, Result};
use strata::exec::{Started, Token};
use strata::memory::{Arena, Region};
use strata::topo::binding::Binding;
use strata::topo::{Grid, Rank};
use strata::transport::{self, Exchange, Idle, Router, Transport};

/// No rank waits longer.
const LIMIT: Duration = Duration::from_secs(20);

/// Memory that stays to the end of the process, since messages may point to it when a test fails.
pub fn memory(bytes: &[u8]) -> Region {
    let region = Arena::new(bytes.len()).leak();
    region.write(bytes);
    region
}

/// What memory holds.
pub fn content(region: Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes
}

/// Runs `body` as every rank of a communicator on nodes of these sizes, each in a thread.
pub fn communicators(sizes: &[usize], body: impl Fn(&Arc<Comm>) + Sync) {
    let grid = Grid::blocks(sizes);
    let (nranks, id) = (grid.nranks(), Comm::unique_id().expect("a unique id"));
    std::thread::scope(|scope| {
        for rank in 0..nranks {
            // The ranks are on as many nodes as there are names of hosts.
            let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
            let options = CommOptions { host_id, ..CommOptions::default() };
            let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
            let body = &body;
            scope.spawn(move || {
                let comm = Comm::init(params, &AtomicBool::new(false)).expect("a communicator");
                body(&comm);
                comm.destroy().expect("destroyed");
            });
        }
    });
}

/// What ranks tell each other: each sends to all.
pub struct Slots {
    me: usize,
    to: Vec<Sender<(usize, Vec<u8>)>>,
    heard: Receiver<(usize, Vec<u8>)>,
    /// What has been heard and not been returned, of each rank.
    kept: Vec<VecDeque<Vec<u8>>>,
}

impl Exchange for Slots {
    /// Fails when a rank has ended, or does not come.
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let lost = |why: &str| Error::Remote(format!("rank {} misses another rank: {why}", self.me));
        for rank in &self.to {
            rank.send((self.me, mine.clone())).map_err(|_| lost("it has ended"))?;
        }
        while self.kept.iter().any(VecDeque::is_empty) {
            let (from, told) = self.heard.recv_timeout(LIMIT).map_err(|why| lost(&why.to_string()))?;
            self.kept[from].push_back(told);
        }
        Ok(self.kept.iter_mut().filter_map(VecDeque::pop_front).collect())
    }
}

impl Slots {
    /// Waits until all ranks are here.
    pub fn meet(&mut self) {
        self.allgather(Vec::new()).expect("all ranks come");
    }
}

/// Runs `body` as both of two ranks on two nodes, with what `STRATA_INTER=inter` has chosen.
pub fn pair(inter: &str, body: impl Fn(usize, Router, &mut Slots) + Sync) {
    let (to, heard): (Vec<_>, Vec<_>) = (0..2).map(|_| channel()).unzip();
    let inter = inter.parse().expect("any text is a value");
    let config = Config { inter, ..Config::default() };
    std::thread::scope(|scope| {
        for (me, heard) in heard.into_iter().enumerate() {
            let mut slots = Slots { me, to: to.clone(), heard, kept: vec![VecDeque::new(); 2] };
            let (config, body) = (&config, &body);
            scope.spawn(move || {
                let (rank, grid) = (Rank::from_index(me), Grid::blocks(&[1, 1]));
                let router = transport::open(rank, &grid, config, &Binding::of_first_nic, &mut slots);
                body(me, router.expect("a transport"), &mut slots);
            });
        }
    });
}

/// Waits until what was `started` under this token has completed, asleep where there is nothing to do.
pub fn finish(router: &mut Router, token: Token, started: Result<Started>) -> Result<()> {
    if started? == Started::Done {
        return Ok(());
    }
    let (mut idle, mut done, end) = (Idle::new(0), Vec::new(), Instant::now() + LIMIT);
    while Instant::now() < end {
        router.poll(&mut done)?;
        if done.contains(&token) {
            return Ok(());
        }
        idle.pause(router)?;
    }
    Err(Error::Timeout(format!("operation {token} has not completed")))
}
