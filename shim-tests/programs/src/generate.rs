//! From a seed to a program. What is chosen, and how often, stands in [`Weights`].

use crate::model;
use crate::program::{
    Action, Call, Carrier, End, Fault, FaultKind, Kind, Members, Memory, Misuse, Op, Process, ProcessEnd, Program,
    Reduction, Type, World,
};
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How often things are chosen: parts of their sum, or of 1,000 where it says so.
#[derive(Debug, Clone, clap::Args)]
pub struct Weights {
    #[arg(long, default_value_t = 40)]
    pub destroy: u32,
    #[arg(long, default_value_t = 25)]
    pub finalize: u32,
    #[arg(long, default_value_t = 15)]
    pub abort: u32,
    #[arg(long, default_value_t = 20)]
    pub stay: u32,
    /// Of 1,000 processes, those that end by `_exit`.
    #[arg(long, default_value_t = 300)]
    pub exit_now: u32,
    /// Of 1,000 parts in an operation, those that begin late.
    #[arg(long, default_value_t = 120)]
    pub late: u32,
    /// Of 1,000 programs, those with communicators that do not wait.
    #[arg(long, default_value_t = 250)]
    pub nonblocking: u32,
    /// Of 1,000 programs, those whose processes run several ranks.
    #[arg(long, default_value_t = 350)]
    pub threads: u32,
    /// Of 1,000 programs, those that use host streams.
    #[arg(long, default_value_t = 500)]
    pub streams: u32,
    /// Most operations of a program, beside making and leaving communicators.
    #[arg(long, default_value_t = 24)]
    pub length: usize,
}

impl Weights {
    /// What a carrier allows: an MPI launcher ends a job whose process ends without MPI_Finalize, and a vendor's library
    /// promises nothing to the peers of a rank that does not destroy its communicators.
    fn fit(&self, carrier: Carrier) -> Weights {
        let mut fit = self.clone();
        match carrier {
            Carrier::Mpi => (fit.exit_now, fit.threads) = (0, 0),
            Carrier::Vendor => {
                (fit.abort, fit.stay, fit.exit_now) = (0, 0, 0);
                (fit.nonblocking, fit.streams) = (0, 0);
            }
            _ => {}
        }
        fit
    }
}

/// A communicator while the program is made.
struct Live {
    /// Members that have not left.
    present: Vec<bool>,
    /// Only leaving is allowed.
    revoked: bool,
}

struct Maker<'a> {
    rng: ChaCha8Rng,
    weights: &'a Weights,
    program: Program,
    live: Vec<Live>,
    /// Ranks that do nothing more.
    gone: Vec<bool>,
    nonblocking: bool,
    streams: bool,
}

const MAX_COMMS: usize = 24;
const MAX_BYTES: usize = 3 << 20;

/// The program of a seed.
pub fn program(seed: u64, carrier: Option<Carrier>, weights: &Weights) -> Program {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let drawn = if rng.random_bool(0.65) { Carrier::Tcp } else { Carrier::Shm };
    let carrier = carrier.unwrap_or(drawn);
    let weights = &weights.fit(carrier);
    let (processes, home) = world(&mut rng, carrier, weights);
    let of_1000 = |rng: &mut ChaCha8Rng, part: u32| rng.random_range(0..1000) < part;
    let program = Program {
        seed,
        carrier,
        settings: settings(&mut rng),
        processes,
        comms: Vec::new(),
        ops: Vec::new(),
        fault: None,
        recovery: None,
        home,
    };
    let mut program = program;
    if carrier == Carrier::Vendor && rng.random_bool(0.4) {
        // Strata's own rails between the vendor's nodes.
        program.settings.push(("STRATA_INTER".into(), "tcp".into()));
    }
    let gone = vec![false; program.nranks()];
    let nonblocking = of_1000(&mut rng, weights.nonblocking);
    let streams = of_1000(&mut rng, weights.streams);
    let mut maker = Maker { rng, weights, program, live: Vec::new(), gone, nonblocking, streams };
    maker.fill();
    maker.program
}

/// The same program with a fault. Its groups have one communicator each, so that a failure is one communicator's, and its
/// ranks stay in the first, which the survivors may shrink.
pub fn with_fault(mut program: Program, kind: Option<FaultKind>) -> Program {
    let mut rng = ChaCha8Rng::seed_from_u64(program.seed ^ 0xfa17);
    program.ops.retain(|op| !matches!(op.action, Action::End { comm: 0, .. }));
    for op in &mut program.ops {
        if let Action::Calls { calls, .. } = &mut op.action {
            let comm = calls[0].comm;
            calls.retain(|call| call.comm == comm);
        }
        op.pauses.iter_mut().for_each(|(_, ms)| *ms = (*ms).min(60));
    }
    let kind = kind.unwrap_or_else(|| *FaultKind::ALL.choose(&mut rng).expect("not empty"));
    let rank = rng.random_range(0..program.nranks());
    // The tester's other threads would have no memory either.
    let alone = program.ranks_of(program.home[rank]).len() == 1;
    let kind = if kind == FaultKind::Memory && !alone { FaultKind::Kill } else { kind };
    let kind = match kind {
        FaultKind::Slow | FaultKind::Glitch if program.carrier != Carrier::Tcp => FaultKind::Pause,
        FaultKind::Cut if program.carrier != Carrier::Tcp => FaultKind::Kill,
        kind => kind,
    };
    let mine = (1..program.ops.len()).filter(|&op| program.takes_part(&program.ops[op], rank)).collect::<Vec<_>>();
    let amount = match kind {
        FaultKind::Pause => rng.random_range(5..200),
        FaultKind::Freeze | FaultKind::Cut => 9_000,
        FaultKind::Glitch => rng.random_range(50..700),
        FaultKind::Slow => *[20, 100, 500].choose(&mut rng).expect("not empty"),
        FaultKind::Descriptors => rng.random_range(0..6),
        FaultKind::Memory => rng.random_range(0..64) << 16,
        FaultKind::SmallShm => *[4, 64, 256, 1024].choose(&mut rng).expect("not empty"),
        _ => 0,
    };
    let op = mine.choose(&mut rng).copied();
    let fault = Fault {
        rank,
        op: op.unwrap_or(0),
        after_us: (kind.is_network() || rng.random_bool(0.6))
            .then(|| *[0, 50, 300, 1000, 5000].choose(&mut rng).expect("not empty")),
        kind,
        shrink: op.is_some() && rng.random_bool(0.5),
        amount,
    };
    program.fault = Some(fault);
    let gone = program.victims();
    let ranks: Vec<World> = (0..program.nranks()).filter(|rank| !gone.contains(rank)).collect();
    let by_shrink = program.recovers_by_shrink();
    let kept = |rank: &&World| ranks.contains(rank);
    let ranks: Vec<World> =
        if by_shrink { program.comms[0].ranks.iter().filter(kept).copied().collect() } else { ranks };
    if !ranks.is_empty() {
        let nonblocking = vec![by_shrink && program.comms[0].nonblocking[0]; ranks.len()];
        let call = Call {
            comm: program.comms.len(),
            kind: Kind::AllReduce,
            count: 5000,
            dtype: Type::I32,
            reduction: Reduction::Sum,
            root: 0,
            in_place: false,
            stream: usize::from(nonblocking[0]),
            memory: Memory::Heap,
            misaligned: 0,
            with_config: false,
            messages: Vec::new(),
            salt: program.seed,
        };
        program.comms.push(Members { ranks, nonblocking, parent: None });
        program.recovery = Some(Action::Calls { calls: vec![call], nesting: 0 });
    }
    program
}

/// Nodes, processes, and which process each rank is in.
fn world(rng: &mut ChaCha8Rng, carrier: Carrier, weights: &Weights) -> (Vec<Process>, Vec<usize>) {
    let nranks = *[2, 2, 3, 3, 4, 4, 5, 6, 8].choose(rng).expect("not empty");
    let nodes = match carrier {
        Carrier::Shm => 1,
        _ => rng.random_range(2..=nranks.min(4)),
    };
    // Every node has a rank; the others go anywhere, in order or mixed.
    let mut placed: Vec<usize> = (0..nodes).collect();
    placed.extend((nodes..nranks).map(|_| rng.random_range(0..nodes)));
    if carrier == Carrier::Vendor && rng.random_bool(0.6) {
        // Two levels take nodes of equally many ranks, and pay with several on each.
        let (nodes, each) = *[(2, 2), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)].choose(rng).expect("not empty");
        placed = (0..nodes * each).map(|rank| rank % nodes).collect();
    }
    if rng.random_bool(0.5) {
        placed.sort_unstable();
    } else {
        placed.shuffle(rng);
    }
    let threads = rng.random_range(0..1000) < weights.threads;
    let mut processes: Vec<Process> = Vec::new();
    let mut home = Vec::new();
    for node in placed {
        let same = (0..processes.len()).filter(|&process| processes[process].node == node).collect::<Vec<_>>();
        let process = match same.choose(rng) {
            Some(&process) if threads && rng.random_bool(0.6) => process,
            _ => {
                let now = rng.random_range(0..1000) < weights.exit_now;
                processes.push(Process { node, end: if now { ProcessEnd::ExitNow } else { ProcessEnd::Exit } });
                processes.len() - 1
            }
        };
        home.push(process);
    }
    (processes, home)
}

/// Settings that change which way data takes.
fn settings(rng: &mut ChaCha8Rng) -> Vec<(String, String)> {
    let choices: [(&str, &[&str]); 15] = [
        ("STRATA_SEGMENT_BYTES", &["256", "4096", "65536"]),
        ("STRATA_WINDOW", &["1", "2", "7"]),
        ("STRATA_SCRATCH_BYTES", &["65536", "262144"]),
        ("STRATA_EAGER_BYTES", &["0", "512", "65536"]),
        ("STRATA_STAGE", &["0"]),
        ("STRATA_CMA", &["0"]),
        ("STRATA_BOARD", &["0"]),
        ("STRATA_SHM", &["0"]),
        ("STRATA_TCP_CONNECTIONS", &["1", "3", "8"]),
        ("STRATA_SPIN_US", &["0", "50"]),
        ("STRATA_DIRECT_MAX_RANKS", &["1", "2"]),
        ("STRATA_TREE_MAX_BYTES", &["0", "4194304"]),
        ("STRATA_ALLREDUCE_ONE_ROUND_MAX_BYTES", &["0", "1024"]),
        ("STRATA_ALLREDUCE_RD_MAX_BYTES", &["0"]),
        ("STRATA_ALLTOALL_TWO_STEP_MAX_BYTES", &["0", "1048576"]),
    ];
    let mut chosen = Vec::new();
    for (name, values) in choices {
        if rng.random_bool(0.1) {
            let value = values.choose(rng).expect("not empty");
            chosen.push((name.to_string(), value.to_string()));
        }
    }
    chosen
}

impl Maker<'_> {
    fn chance(&mut self, of_1000: u32) -> bool {
        self.rng.random_range(0..1000) < of_1000
    }

    fn fill(&mut self) {
        self.make_world();
        let length = self.rng.random_range(1..=self.weights.length);
        for _ in 0..length {
            let step = self.rng.random_range(0..1000);
            match step {
                0..560 => self.calls(),
                560..660 => self.split(),
                660..690 => self.shrink(),
                690..715 => self.grow(),
                715..760 => self.init(),
                760..780 => self.init_all(),
                780..810 => self.sync(),
                810..840 => self.misuse(),
                840..855 => self.suspend(),
                855..870 => self.revoke(),
                870..950 => self.leave_comm(),
                _ => self.leave(),
            }
        }
        for comm in 0..self.live.len() {
            let present = self.present(comm);
            self.end(comm, &present);
        }
    }

    fn push(&mut self, action: Action) {
        let mut op = Op { pauses: Vec::new(), forks: Vec::new(), action };
        for rank in 0..self.program.nranks() {
            if !self.program.takes_part(&op, rank) {
                continue;
            }
            if self.chance(self.weights.late) {
                let ms = *[1, 2, 5, 5, 20, 60, 150, 400].choose(&mut self.rng).expect("not empty");
                op.pauses.push((rank, ms));
            }
            if self.chance(8) {
                op.forks.push(rank);
            }
        }
        self.program.ops.push(op);
    }

    fn add(&mut self, ranks: Vec<World>, parent: Option<usize>) -> usize {
        let nonblocking = vec![self.nonblocking; ranks.len()];
        self.live.push(Live { present: vec![true; ranks.len()], revoked: false });
        self.program.comms.push(Members { ranks, nonblocking, parent });
        self.program.comms.len() - 1
    }

    /// Members that have not left a communicator, as ranks of the world.
    fn present(&self, comm: usize) -> Vec<World> {
        let ranks = &self.program.comms[comm].ranks;
        (0..ranks.len()).filter(|&rank| self.live[comm].present[rank]).map(|rank| ranks[rank]).collect()
    }

    /// A communicator whose ranks are all there.
    fn whole(&mut self) -> Option<usize> {
        let is_whole = |live: &Live| !live.revoked && live.present.iter().all(|&present| present);
        let whole: Vec<usize> = (0..self.live.len()).filter(|&comm| is_whole(&self.live[comm])).collect();
        whole.choose(&mut self.rng).copied()
    }

    /// A communicator that another one can be made from: a revoked one, too.
    fn parent(&mut self) -> Option<usize> {
        let is_whole = |live: &Live| live.present.iter().all(|&present| present);
        let whole: Vec<usize> = (0..self.live.len()).filter(|&comm| is_whole(&self.live[comm])).collect();
        whole.choose(&mut self.rng).copied()
    }

    fn here(&self) -> Vec<World> {
        (0..self.program.nranks()).filter(|&rank| !self.gone[rank]).collect()
    }

    /// Some of these, in some order.
    fn some(&mut self, of: &[World], least: usize) -> Vec<World> {
        let count = self.rng.random_range(least.min(of.len())..=of.len());
        let mut chosen: Vec<World> = of.choose_multiple(&mut self.rng, count).copied().collect();
        if self.rng.random_bool(0.6) {
            chosen.sort_unstable();
        }
        chosen
    }

    fn make_world(&mut self) {
        let mut ranks: Vec<World> = (0..self.program.nranks()).collect();
        // MPI wants the whole job first, in its order.
        if self.program.carrier != Carrier::Mpi && self.rng.random_bool(0.2) {
            ranks.shuffle(&mut self.rng);
        }
        let several = self.program.carrier != Carrier::Vendor;
        let ids = if several && self.rng.random_bool(0.15) { self.rng.random_range(2..=ranks.len().min(4)) } else { 1 };
        let comm = self.add(ranks, None);
        let config = self.rng.random_bool(0.3);
        self.push(Action::Init { comm, ids, config });
    }

    fn init(&mut self) {
        let here = self.here();
        if self.live.len() >= MAX_COMMS || here.is_empty() {
            return;
        }
        let ranks = self.some(&here, 1);
        let several = self.program.carrier != Carrier::Vendor;
        let ids = if several && self.rng.random_bool(0.2) { self.rng.random_range(1..=ranks.len().min(3)) } else { 1 };
        let comm = self.add(ranks, None);
        let config = self.rng.random_bool(0.3);
        self.push(Action::Init { comm, ids, config });
    }

    fn init_all(&mut self) {
        let process = self.rng.random_range(0..self.program.processes.len());
        let ranks: Vec<World> = self.program.ranks_of(process).into_iter().filter(|&rank| !self.gone[rank]).collect();
        // Its devices are 0, 1, ..., which need not be the ranks' own.
        let on_gpu = self.program.carrier == Carrier::Softgpu;
        if self.live.len() >= MAX_COMMS || ranks.is_empty() || self.nonblocking || on_gpu {
            return;
        }
        let comm = self.add(ranks, None);
        self.push(Action::InitAll { comm });
    }

    fn split(&mut self) {
        let Some(parent) = self.parent().filter(|_| self.live.len() + 3 < MAX_COMMS) else { return };
        let ranks = self.program.comms[parent].ranks.clone();
        let kinds = self.rng.random_range(1..=3);
        let mut colors: Vec<Option<usize>> = Vec::new();
        for _ in &ranks {
            let without = self.rng.random_bool(0.12);
            colors.push((!without).then(|| self.rng.random_range(0..kinds)));
        }
        let keys: Vec<i32> = match self.rng.random_range(0..3) {
            0 => vec![0; ranks.len()],
            1 => (0..ranks.len() as i32).rev().collect(),
            _ => ranks.iter().map(|_| self.rng.random_range(-3..3)).collect(),
        };
        let mut children = Vec::new();
        let mut used = Vec::new();
        for color in 0..kinds {
            let mut members: Vec<usize> = (0..ranks.len()).filter(|&rank| colors[rank] == Some(color)).collect();
            members.sort_by_key(|&rank| (keys[rank], rank));
            if !members.is_empty() {
                used.push(color);
                children.push(self.add(members.into_iter().map(|rank| ranks[rank]).collect(), Some(parent)));
            }
        }
        for color in colors.iter_mut().flatten() {
            *color = used.iter().position(|used| used == color).expect("a color that is used");
        }
        self.push(Action::Split { parent, colors, keys, children });
    }

    fn shrink(&mut self) {
        let Some(parent) = self.parent().filter(|_| self.live.len() < MAX_COMMS) else { return };
        let ranks = self.program.comms[parent].ranks.clone();
        if ranks.len() < 2 {
            return;
        }
        let excluded = self.rng.random_range(1..ranks.len());
        let excluded: Vec<World> = ranks.choose_multiple(&mut self.rng, excluded).copied().collect();
        let kept = ranks.into_iter().filter(|rank| !excluded.contains(rank)).collect();
        let child = self.add(kept, Some(parent));
        self.push(Action::Shrink { parent, child, abort: false });
    }

    fn grow(&mut self) {
        let Some(parent) = self.parent().filter(|_| self.live.len() < MAX_COMMS) else { return };
        let mut ranks = self.program.comms[parent].ranks.clone();
        let others: Vec<World> = self.here().into_iter().filter(|rank| !ranks.contains(rank)).collect();
        if others.is_empty() {
            return;
        }
        ranks.extend(self.some(&others, 1));
        let child = self.add(ranks, Some(parent));
        self.push(Action::Grow { parent, child });
    }

    fn sync(&mut self) {
        let here = self.here();
        let ranks = self.some(&here, 1);
        self.push(Action::Sync { ranks });
    }

    fn misuse(&mut self) {
        let Some(comm) = self.whole() else { return };
        let members = self.program.comms[comm].ranks.clone();
        let ranks = self.some(&members, 1);
        let all = [Misuse::Root, Misuse::Type, Misuse::Operation, Misuse::Peer, Misuse::NullBuffer];
        let what = *all.choose(&mut self.rng).expect("not empty");
        self.push(Action::Refused { comm, ranks, what });
    }

    fn suspend(&mut self) {
        if let Some(comm) = self.whole() {
            self.push(Action::Suspend { comm });
        }
    }

    fn revoke(&mut self) {
        // Not the world's first, on which most programs go on.
        let Some(comm) = self.whole().filter(|&comm| comm > 0) else { return };
        self.live[comm].revoked = true;
        self.push(Action::Revoke { comm });
    }

    fn leave_comm(&mut self) {
        let open: Vec<usize> = (0..self.live.len()).filter(|&comm| !self.present(comm).is_empty()).collect();
        let Some(&comm) = open.choose(&mut self.rng) else { return };
        let present = self.present(comm);
        let leaving = if self.rng.random_bool(0.6) { present } else { self.some(&present, 1) };
        self.end(comm, &leaving);
    }

    /// A rank leaves everything and does nothing more.
    fn leave(&mut self) {
        let here = self.here();
        let Some(&rank) = here.choose(&mut self.rng).filter(|_| here.len() > 1) else { return };
        for comm in 0..self.live.len() {
            if self.present(comm).contains(&rank) {
                self.end(comm, &[rank]);
            }
        }
        self.gone[rank] = true;
    }

    fn end(&mut self, comm: usize, ranks: &[World]) {
        if ranks.is_empty() {
            return;
        }
        let alike = self.rng.random_bool(0.4).then(|| self.how());
        // NCCL does not finalize what was revoked.
        let alike = if self.live[comm].revoked {
            Some(*[End::Destroy, End::Abort, End::Keep].choose(&mut self.rng).expect("not empty"))
        } else {
            alike
        };
        let ends: Vec<(World, End)> = ranks.iter().map(|&rank| (rank, alike.unwrap_or_else(|| self.how()))).collect();
        for &rank in ranks {
            let member = self.program.comms[comm].rank_of(rank).expect("a member");
            self.live[comm].present[member] = false;
        }
        self.push(Action::End { comm, ranks: ends });
    }

    fn how(&mut self) -> End {
        let Weights { destroy, finalize, abort, stay, .. } = *self.weights;
        let drawn = self.rng.random_range(0..destroy + finalize + abort + stay);
        match drawn {
            n if n < destroy => End::Destroy,
            n if n < destroy + finalize => End::FinalizeDestroy,
            n if n < destroy + finalize + abort => End::Abort,
            n if n % 4 == 0 => End::FinalizeKeep,
            _ => End::Keep,
        }
    }

    fn calls(&mut self) {
        let count = if self.rng.random_bool(0.25) { self.rng.random_range(2..=4) } else { 1 };
        let calls: Vec<Call> = (0..count).filter_map(|_| self.call()).collect();
        if calls.is_empty() {
            return;
        }
        let nesting = if self.rng.random_bool(0.2) { self.rng.random_range(1..=3) } else { 0 };
        self.push(Action::Calls { calls, nesting });
    }

    /// A collective on a communicator that is whole, or messages among those who are still there.
    fn call(&mut self) -> Option<Call> {
        if self.rng.random_bool(0.3) {
            return self.messages();
        }
        let comm = self.whole()?;
        if self.chance(250) {
            if let Some(again) = self.again(comm) {
                return Some(again);
            }
        }
        let nranks = self.program.comms[comm].ranks.len();
        let mut call = self.blank(comm);
        call.kind = *Kind::COLLECTIVES.choose(&mut self.rng).expect("not empty");
        if self.program.carrier == Carrier::Vendor && self.rng.random_bool(0.5) {
            // What runs in two levels.
            call.kind =
                *[Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter].choose(&mut self.rng).expect("not empty");
        }
        call.root = self.rng.random_range(0..nranks);
        call.in_place = self.rng.random_bool(0.4);
        call.with_config = self.rng.random_bool(0.1);
        call.count = call.count.min(MAX_BYTES / call.dtype.size() / nranks);
        let all = [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min, Reduction::Avg];
        call.reduction = match self.rng.random_range(0..12) {
            0 => Reduction::PreMulSum { device: self.rng.random_bool(0.5) && self.program.carrier != Carrier::Softgpu },
            1..6 => Reduction::Sum,
            _ => *all.choose(&mut self.rng).expect("not empty"),
        };
        if model::range(call.dtype, call.reduction, nranks).is_none() {
            call.reduction = Reduction::Max;
        }
        Some(call)
    }

    /// A collective of the shape of an earlier one, on other buffers.
    fn again(&mut self, comm: usize) -> Option<Call> {
        let calls = self.program.ops.iter().filter_map(|op| match &op.action {
            Action::Calls { calls, .. } => Some(calls),
            _ => None,
        });
        let alike = calls.flatten().filter(|call| call.comm == comm && call.kind != Kind::Messages);
        let earlier = (*alike.collect::<Vec<&Call>>().choose(&mut self.rng)?).clone();
        let Call { stream, memory, misaligned, salt, .. } = self.blank(comm);
        Some(Call { in_place: self.rng.random_bool(0.5), stream, memory, misaligned, salt, ..earlier })
    }

    fn messages(&mut self) -> Option<Call> {
        let open: Vec<usize> = (0..self.live.len())
            .filter(|&comm| !self.live[comm].revoked && self.live[comm].present.iter().any(|&present| present))
            .collect();
        let comm = *open.choose(&mut self.rng)?;
        let present = &self.live[comm].present;
        let there: Vec<usize> = (0..present.len()).filter(|&rank| present[rank]).collect();
        let mut call = self.blank(comm);
        if there.len() > 1 && self.rng.random_bool(0.06) {
            // More from one rank to another than may be on their way at a time.
            let ends: Vec<usize> = there.choose_multiple(&mut self.rng, 2).copied().collect();
            let many = 0..self.rng.random_range(40..120);
            call.messages = many.map(|_| (ends[0], ends[1], self.rng.random_range(1..4000))).collect();
            return Some(call);
        }
        let count = if self.rng.random_bool(0.5) { 1 } else { self.rng.random_range(2..=2 * there.len()) };
        for _ in 0..count {
            let from = *there.choose(&mut self.rng)?;
            let to = *there.choose(&mut self.rng)?;
            // To itself only in a group, where the receive is there too.
            if from != to || count > 1 {
                let elements = if self.rng.random_bool(0.7) { call.count } else { self.count() };
                call.messages.push((from, to, elements.min(MAX_BYTES / 2 / call.dtype.size())));
            }
        }
        (!call.messages.is_empty()).then_some(call)
    }

    fn blank(&mut self, comm: usize) -> Call {
        let stream = if self.streams || self.nonblocking { self.rng.random_range(0..3) } else { 0 };
        Call {
            comm,
            kind: Kind::Messages,
            count: self.count(),
            dtype: *Type::ALL.choose(&mut self.rng).expect("not empty"),
            reduction: Reduction::Sum,
            root: 0,
            in_place: false,
            stream: if self.nonblocking { stream.max(1) } else { stream },
            memory: *[Memory::Heap, Memory::Heap, Memory::Heap, Memory::Shared, Memory::Registered]
                .choose(&mut self.rng)
                .expect("not empty"),
            misaligned: if self.rng.random_bool(0.15) { self.rng.random_range(1..16) } else { 0 },
            with_config: false,
            messages: Vec::new(),
            salt: self.rng.random(),
        }
    }

    fn count(&mut self) -> usize {
        match self.rng.random_range(0..20) {
            0 => 0,
            1..4 => self.rng.random_range(1..4),
            4..10 => self.rng.random_range(1..600),
            10..16 => self.rng.random_range(1..20_000),
            16..19 => self.rng.random_range(1..200_000),
            _ => self.rng.random_range(1..1_000_000),
        }
    }
}
