//! All-reduces whose shares follow what links deliver: right results for any grid, type and operation, before, while and after shares
//! change, and the same shares on all ranks. Rates are made up by a transport of the test's own.

#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[allow(dead_code)]
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../../examples/transport/loopback.rs"]
mod loopback;
#[allow(dead_code, reason = "of the example's")]
#[path = "../../examples/transport/ranks.rs"]
mod ranks;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../world/mod.rs"]
mod world;

mod device;
mod simulated;
mod steps;
mod strategies;

use loopback::Loopback;
use ranks::{communicators, content, memory};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use strata::communicator::{launch, CollectiveCall, Comm, Launch, Operation};
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::Result;
use strata::exec::{Started, Token};
use strata::memory::Region;
use strata::plan::Collective;
use strata::selection::shares;
use strata::topo::{Grid, Rank};
use strata::transport::{
    self, Departure, Endpoint, Envelope, Exchange, Opener, Probe, Sink, Site, TransportKind, Wakeups,
};

/// The most ranks of a test.
const MOST_RANKS: usize = 16;

/// A rank's link: what it delivers, as the rank's thread says, and what it has sent. No other thread looks at it.
#[derive(Default)]
struct Link {
    /// Bytes for each microsecond, as bits of a float; 0 where that is not known.
    rate: AtomicU64,
    sent: AtomicU64,
}

static LINKS: [Link; MOST_RANKS] = [const { Link { rate: AtomicU64::new(0), sent: AtomicU64::new(0) } }; MOST_RANKS];

fn set_rate(rank: usize, rate: f64) {
    LINKS[rank].rate.store(rate.to_bits(), Ordering::Relaxed);
}

/// The example's transport, whose links deliver what the test says.
struct Metered;

struct MeteredOpener(Box<dyn Opener>);

#[derive(Debug)]
struct MeteredEndpoint {
    me: Rank,
    inner: Box<dyn Endpoint>,
}

impl TransportKind for Metered {
    fn name(&self) -> &'static str {
        "metered"
    }

    fn probe(&self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe> {
        Ok(match Loopback.probe(site, exchange)? {
            Probe::Taken(opener) => Probe::Taken(Box::new(MeteredOpener(opener))),
            refused => refused,
        })
    }

    fn waits_for_descriptors(&self) -> bool {
        true
    }
}

impl Opener for MeteredOpener {
    fn open(
        self: Box<Self>,
        site: &Site<'_>,
        far: &[Rank],
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<Option<Box<dyn Endpoint>>> {
        let inner = self.0.open(site, far, wakeups, exchange)?;
        let me = site.me;
        Ok(inner.map(|inner| Box::new(MeteredEndpoint { me, inner }) as Box<dyn Endpoint>))
    }
}

impl Endpoint for MeteredEndpoint {
    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        let started = self.inner.send(peer, token, envelope, src)?;
        if started != Started::Busy {
            let bytes: usize = src.iter().map(Region::len).sum();
            LINKS[self.me.index()].sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        Ok(started)
    }

    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        self.inner.recv(peer, token, envelope, sink)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        self.inner.poll(done)
    }

    fn polls_per_poll(&self) -> u32 {
        self.inner.polls_per_poll()
    }

    fn relief(&self) -> u64 {
        self.inner.relief()
    }

    fn delivers(&mut self) -> Option<f64> {
        let rate = f64::from_bits(LINKS[self.me.index()].rate.load(Ordering::Relaxed));
        (rate > 0.0).then_some(rate)
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        self.inner.wait(limit)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn tells_what_can_come(&self) -> bool {
        self.inner.tells_what_can_come()
    }

    fn leave(self: Box<Self>) -> Option<Departure> {
        self.inner.leave()
    }
}

/// As a program begins, before its first communicator.
fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::env::set_var("STRATA_INTER", "metered");
        std::env::set_var("STRATA_MEASURE_EVERY", "2");
        transport::register(&Metered).expect("the name is free");
    });
}

/// Tests of one process share the rates.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A call of the test: what is reduced, and how.
#[derive(Debug, Clone, Copy)]
struct Case {
    count: usize,
    dtype: DataType,
    op: RedOp,
    in_place: bool,
}

/// A small whole number for each element of each rank.
fn value(rank: usize, at: usize) -> u64 {
    (rank as u64 * 5 + at as u64 * 3) % 11
}

fn element(dtype: DataType, value: u64) -> Vec<u8> {
    match dtype {
        DataType::U8 => (value as u8).to_le_bytes().to_vec(),
        DataType::I32 => (value as i32).to_le_bytes().to_vec(),
        DataType::F32 => (value as f32).to_le_bytes().to_vec(),
        DataType::F64 => (value as f64).to_le_bytes().to_vec(),
        other => panic!("the test has no {other:?}"),
    }
}

fn expected(case: Case, nranks: usize, at: usize) -> Vec<u8> {
    let values = (0..nranks).map(|rank| value(rank, at));
    element(case.dtype, if case.op == RedOp::Max { values.max().unwrap() } else { values.sum() })
}

/// Makes the call, and looks at every element of its result. Values repeat, and so do results. What this rank has sent to other nodes for
/// it, in parts of the vector.
fn all_reduce(comm: &Arc<Comm>, case: Case) -> f64 {
    all_reduce_by(comm, case, launch)
}

fn all_reduce_by(comm: &Arc<Comm>, case: Case, launch: impl FnOnce(Vec<Launch>) -> Result<()>) -> f64 {
    const PERIOD: usize = 11;
    let Case { count, dtype, op, in_place } = case;
    let repeated = |one: &dyn Fn(usize) -> Vec<u8>| -> Vec<u8> {
        let period: Vec<u8> = (0..PERIOD).flat_map(one).collect();
        period.iter().copied().cycle().take(count * dtype.size()).collect()
    };
    let input = memory(&repeated(&|at| element(dtype, value(comm.rank(), at))));
    let output = if in_place { input } else { memory(&vec![0; count * dtype.size()]) };
    let reduction = Some(Reduction::new(op, dtype, comm.nranks()));
    let buffers = [input.as_device(), output.as_device()];
    let call = CollectiveCall { reduction, ..CollectiveCall::new(Collective::AllReduce, buffers, count, dtype) };
    let sent = || LINKS[comm.rank()].sent.load(Ordering::Relaxed);
    let before = sent();
    launch(vec![Launch { comm: comm.clone(), operation: Operation::Collective(call), stream: StreamRef::Null }])
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let sent = sent() - before;
    let found = content(output);
    let wanted = repeated(&|at| expected(case, comm.nranks(), at));
    let wrong = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
    assert_eq!(wrong, None, "rank {} of {case:?}: byte {wrong:?}", comm.rank());
    sent as f64 / output.len() as f64
}

/// Numbers that look random; the same from the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// Rates of phases, with calls in each; in the end of a phase all ranks have the shares that its rates ask for. Each rank says for itself
/// what its link delivers, so none waits for the others but in calls.
fn run(sizes: &[usize], phases: &[(Vec<f64>, Vec<Case>)]) {
    let grid = Grid::blocks(sizes);
    communicators(sizes, |comm| {
        let mut before = None;
        for (rates, cases) in phases {
            set_rate(comm.rank(), rates[comm.rank()]);
            for case in cases {
                all_reduce(comm, *case);
            }
            let told: Vec<Option<f64>> = rates.iter().map(|&rate| Some(rate)).collect();
            before = shares::next(&grid, before, &told);
            assert_eq!(comm.node_shares(), before, "rank {} with {rates:?} on {sizes:?}", comm.rank());
        }
    });
}

fn float(count: usize) -> Case {
    Case { count, dtype: DataType::F32, op: RedOp::Sum, in_place: false }
}

#[test]
fn shares_follow_what_links_deliver_and_come_back() {
    begin();
    let _alone = alone();
    let even = vec![25.0; 8];
    let slow = |rank: usize, part: f64| {
        let mut rates = vec![25.0; 8];
        rates[rank] *= part;
        rates
    };
    let cases = vec![float(300_000), float(262_144), float(1_000_003), float(700_001)];
    let phases = [even.clone(), slow(3, 0.25), slow(3, 0.25), slow(0, 0.01), even];
    run(&[2; 4], &phases.map(|rates| (rates, cases.clone())));
}

#[test]
fn calls_that_are_too_short_to_count_change_nothing() {
    begin();
    let _alone = alone();
    let phases = [vec![float(1000); 4], vec![float(300_000); 2], vec![float(1000); 3]];
    let [short, long, after] = phases;
    communicators(&[1; 4], |comm| {
        set_rate(comm.rank(), if comm.rank() == 2 { 3.0 } else { 25.0 });
        for case in &short {
            all_reduce(comm, *case);
        }
        assert_eq!(comm.node_shares(), None);
        for case in long.iter().chain(&after) {
            all_reduce(comm, *case);
        }
        assert!(comm.node_shares().is_some());
    });
}

#[test]
fn a_slow_link_has_less_to_carry() {
    begin();
    let _alone = alone();
    const SLOW: usize = 2;
    communicators(&[2, 2, 2], |comm| {
        set_rate(comm.rank(), if comm.rank() == SLOW { 5.0 } else { 25.0 });
        let sent: Vec<f64> = (0..12).map(|at| all_reduce(comm, float(262_144 + 1000 * at))).collect();
        // Two thirds of a vector on two rails where shares are even, until the first telling; a third of that otherwise.
        let even: Vec<usize> = (0..12).filter(|&at| sent[at] > 0.4).collect();
        if comm.rank() == SLOW {
            assert_eq!(even, [0, 1], "{sent:?}");
        }
    });
}

/// Where the transport does not know what links deliver the ranks measure it, by rounds of a MiB at least, once at first. How fast these
/// links are nobody knows here; what is found is the same on all ranks, and results are right.
#[test]
fn links_of_which_nothing_is_known_are_measured_and_all_ranks_find_the_same() {
    begin();
    let _alone = alone();
    for sizes in [&[2, 2, 2][..], &[1; 5], &[3, 1, 2], &[1, 1]] {
        let all = Mutex::new(Vec::new());
        communicators(sizes, |comm| {
            set_rate(comm.rank(), 0.0);
            let sent: Vec<f64> = (0..14).map(|at| 4.0 * 300_000.0 * all_reduce(comm, float(300_000 + at))).collect();
            // The ranks tell each other after the second one, which brings three rounds.
            assert!(sent[1] - sent[0] > 2.9 * f64::from(1 << 20), "rank {} of {sent:?}", comm.rank());
            all.lock().unwrap().push(comm.node_shares());
        });
        let found = all.into_inner().unwrap();
        assert!(found.len() > 1 && found.iter().all(|shares| *shares == found[0]), "{sizes:?}: {found:?}");
    }
}

#[test]
fn any_grid_any_rates_any_calls() {
    begin();
    let _alone = alone();
    for seed in 0..24u64 {
        let mut numbers = Numbers(seed);
        let sizes: Vec<usize> = (0..2 + numbers.below(4)).map(|_| 1 + numbers.below(3) as usize).collect();
        let nranks: usize = sizes.iter().sum();
        let phases: Vec<(Vec<f64>, Vec<Case>)> = (0..3)
            .map(|_| {
                // A rate is always told, since one that is not stays what it was.
                let rates = (0..nranks).map(|_| numbers.one_of(&[25.0, 25.0, 24.0, 12.0, 5.0, 0.5])).collect();
                let mut case = || {
                    let dtype = numbers.one_of(&[DataType::U8, DataType::I32, DataType::F32, DataType::F64]);
                    let least = (1 << 20) / dtype.size();
                    let count = least + numbers.below(least as u64) as usize;
                    let op = numbers.one_of(&[RedOp::Sum, RedOp::Max]);
                    Case { count, dtype, op, in_place: numbers.below(2) == 1 }
                };
                (rates, (0..4).map(|_| case()).collect())
            })
            .collect();
        run(&sizes, &phases);
    }
}
