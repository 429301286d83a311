//! Test worlds: ranks as threads of one process, and ranks as processes (this very test program, started again).

use super::loopback::Loopback;
use super::mpi::MpiEnvironment;
use super::registry::{self, Site, TransportKind};
use super::router::open_by;
use super::shm::open::Ways;
use super::tcp::TcpKind;
use super::{Envelope, Exchange, Idle, NodeCall, Router, Sink, Transport};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::Region;
use crate::sync::locked;
use crate::topo::binding::Binding;
use crate::topo::{Grid, Rank};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command};
use std::sync::{Arc, Condvar, Mutex, Once};
use std::time::{Duration, Instant};

/// No test waits longer.
pub const LIMIT: Duration = Duration::from_secs(60);

/// How the ranks of a world are set up.
#[derive(Clone)]
pub struct Setup {
    pub grid: Grid,
    pub config: Config,
    pub ways: Ways,
    /// What each rank has of MPI, for setups of threads.
    pub sites: Option<Arc<dyn Fn(usize) -> Arc<MpiEnvironment> + Send + Sync>>,
}

impl Setup {
    pub fn new(grid: Grid) -> Setup {
        Setup { grid, config: Config::default(), ways: Ways { proc: true, file: true }, sites: None }
    }

    pub fn with(mut self, change: impl FnOnce(&mut Config)) -> Setup {
        change(&mut self.config);
        self
    }

    /// Ranks on these nodes, over the transport of the example.
    pub fn over_loopback(sizes: &[usize]) -> Setup {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| super::register(&Loopback).unwrap());
        Setup::new(Grid::blocks(sizes)).with(|config| config.inter = "loopback".parse().unwrap())
    }

    pub fn open(&self, me: usize, exchange: &mut dyn Exchange) -> Router {
        self.try_open(me, exchange).unwrap()
    }

    pub fn try_open(&self, me: usize, exchange: &mut dyn Exchange) -> Result<Router> {
        let environment = self.sites.as_ref().map(|site| site(me));
        let kinds: Vec<&dyn TransportKind> = match &environment {
            Some(environment) => vec![&**environment, &TcpKind],
            None => registry::kinds(),
        };
        let (grid, config, binding) = (&self.grid, &self.config, &Binding::of_first_nic);
        open_by(&Site { me: Rank::from_index(me), grid, config, binding }, &kinds, self.ways, exchange)
    }
}

/// An exchange between threads.
pub struct Threads {
    me: usize,
    meeting: Arc<(Mutex<Meeting>, Condvar)>,
}

/// Where threads meet, each time all of them.
struct Meeting {
    said: Vec<Vec<u8>>,
    here: usize,
    round: u64,
    /// What all said in the last round: nobody begins the one after it before all have read it.
    heard: Vec<Vec<u8>>,
    /// One has panicked, for which the others would wait for ever.
    broken: bool,
}

impl Exchange for Threads {
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let (meeting, changed) = &*self.meeting;
        let mut meeting = locked(meeting);
        meeting.said[self.me] = mine;
        meeting.here += 1;
        let round = meeting.round;
        if meeting.here == meeting.said.len() {
            meeting.heard = meeting.said.clone();
            (meeting.here, meeting.round) = (0, round + 1);
            changed.notify_all();
        }
        let waits = |meeting: &mut Meeting| meeting.round == round && !meeting.broken;
        let (meeting, _) = changed.wait_timeout_while(meeting, LIMIT, waits).unwrap();
        assert!(meeting.round > round, "another rank has panicked, or does not come");
        Ok(meeting.heard.clone())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if std::thread::panicking() {
            locked(&self.meeting.0).broken = true;
            self.meeting.1.notify_all();
        }
    }
}

/// Runs `body` as every rank, each in a thread.
pub fn threads(setup: &Setup, body: impl Fn(usize, Router) + Sync) {
    threads_with(setup.grid.nranks(), |me, exchange| body(me, setup.open(me, exchange)));
}

/// Runs `body` as every rank, each in a thread, with an exchange and no transport yet.
pub fn threads_with(n: usize, body: impl Fn(usize, &mut Threads) + Sync) {
    let said = vec![Vec::new(); n];
    let meeting = Meeting { said, here: 0, round: 0, heard: Vec::new(), broken: false };
    let meeting = Arc::new((Mutex::new(meeting), Condvar::new()));
    std::thread::scope(|scope| {
        for me in 0..n {
            let mut exchange = Threads { me, meeting: meeting.clone() };
            let body = &body;
            scope.spawn(move || body(me, &mut exchange));
        }
    });
}

/// An exchange between processes, through a hub in the parent.
pub struct Processes {
    stream: UnixStream,
}

fn put(stream: &mut UnixStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

fn get(stream: &mut UnixStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 8];
    stream.read_exact(&mut len)?;
    let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Exchange for Processes {
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        put(&mut self.stream, &mine)?;
        let count = u64::from_le_bytes(get(&mut self.stream)?.try_into().unwrap());
        (0..count).map(|_| Ok(get(&mut self.stream)?)).collect()
    }
}

impl Processes {
    /// Waits until all ranks are here.
    pub fn barrier(&mut self) {
        self.allgather(Vec::new()).unwrap();
    }
}

/// In a process that was started as a rank: the scenario's name, the rank, and the exchange.
pub fn as_rank() -> Option<(String, usize, Processes)> {
    let place = std::env::var("TRANSPORT_TEST_RANK").ok()?;
    let mut parts = place.split(' ');
    let (hub, scenario, me) = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?);
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(hub).unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut exchange = Processes { stream };
    put(&mut exchange.stream, &(me as u64).to_le_bytes()).unwrap();
    Some((scenario.to_string(), me, exchange))
}

fn serve(mut streams: Vec<UnixStream>) {
    loop {
        let told: Vec<_> = streams.iter_mut().map(get).collect();
        if told.iter().any(|told| told.is_err()) {
            return;
        }
        for stream in &mut streams {
            let _ = put(stream, &(told.len() as u64).to_le_bytes());
            for bytes in told.iter().flatten() {
                let _ = put(stream, bytes);
            }
        }
    }
}

/// Starts the scenario in `n` processes and returns them, in rank order.
pub fn start(scenario: &str, n: usize) -> Vec<Child> {
    let hub = format!("strata-test-{:016x}", super::shm::open::random().unwrap());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&hub).unwrap()).unwrap();
    let start = |me| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["transport::tests::a_process_plays_its_rank", "--exact", "--nocapture"]);
        command.env("TRANSPORT_TEST_RANK", format!("{hub} {scenario} {me}")).spawn().unwrap()
    };
    let children: Vec<Child> = (0..n).map(start).collect();
    std::thread::spawn(move || {
        let mut streams: Vec<Option<UnixStream>> = (0..n).map(|_| None).collect();
        for _ in 0..n {
            let (mut stream, _) = listener.accept().unwrap();
            let me = u64::from_le_bytes(get(&mut stream).unwrap().try_into().unwrap());
            streams[me as usize] = Some(stream);
        }
        serve(streams.into_iter().flatten().collect());
    });
    children
}

/// Runs the scenario in `n` processes; all must succeed.
pub fn processes(scenario: &str, n: usize) {
    processes_with_losses(scenario, n, &[]);
}

/// Runs the scenario in `n` processes; all but the `lost` ones must succeed.
pub fn processes_with_losses(scenario: &str, n: usize, lost: &[usize]) {
    let limit = Instant::now() + LIMIT;
    for (me, mut child) in start(scenario, n).into_iter().enumerate() {
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > limit => {
                    child.kill().unwrap();
                    break child.wait().unwrap();
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(status.success(), !lost.contains(&me), "rank {me} of {scenario}: {status}");
    }
}

/// Memory of a test, as a region.
pub fn region(bytes: &mut [u8]) -> Region {
    // SAFETY: the bytes must outlive the region's use; because tests keep them until their operations have completed.
    unsafe { Region::new(bytes.as_mut_ptr(), bytes.len()) }
}

/// Something to post.
pub enum Post<'a> {
    Send(usize, Envelope, Vec<Region>),
    Recv(usize, Envelope, Sink<'a>),
}

/// Posts operations in order, those that are `Busy` again later, and waits until all have completed.
pub fn carry_out(router: &mut Router, posts: &[Post<'_>]) -> Result<()> {
    let mut idle = Idle::new(spin_us());
    let limit = Instant::now() + LIMIT;
    let (mut next, mut open, mut done) = (0, 0, Vec::new());
    while next < posts.len() || open > 0 {
        let before = next;
        while next < posts.len() {
            let token = next as Token;
            let started = match &posts[next] {
                Post::Send(to, envelope, src) => router.send(token, Rank::from_index(*to), *envelope, src)?,
                Post::Recv(from, envelope, sink) => router.recv(token, Rank::from_index(*from), *envelope, *sink)?,
            };
            match started {
                Started::Busy => break,
                Started::Pending => open += 1,
                Started::Done => {}
            }
            next += 1;
        }
        done.clear();
        router.poll(&mut done)?;
        open -= done.len();
        if done.is_empty() && next == before {
            idle.pause(router)?;
            if Instant::now() > limit {
                return Err(Error::Timeout(format!("{open} operations are open, {next} of {} posted", posts.len())));
            }
        } else {
            idle.reset();
        }
    }
    Ok(())
}

/// Posts a call and waits until it has completed.
pub fn call(router: &mut Router, envelope: Envelope, call: NodeCall<'_>) -> Result<()> {
    let mut idle = Idle::new(spin_us());
    let limit = Instant::now() + LIMIT;
    let mut done = Vec::new();
    let mut complete = router.call(7, envelope, 0, call)? == Started::Done;
    while !complete {
        router.poll(&mut done)?;
        complete = done == [7];
        if !complete {
            idle.pause(router)?;
        }
        if Instant::now() > limit {
            return Err(Error::Timeout(format!("a call waits for {:?}", router.missing())));
        }
    }
    Ok(())
}

/// How long ranks wait awake; measurements try other values than the default.
fn spin_us() -> u64 {
    let given = std::env::var("STRATA_SPIN_US").ok().and_then(|text| text.parse().ok());
    given.unwrap_or(Config::default().spin_us)
}
