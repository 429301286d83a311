//! What a program is: a list of operations over the whole world. Each rank takes its part in those that concern it, in
//! the order of the list, so a program cannot deadlock by itself.
//!
//! A program is plain data: it is written as JSON for the processes of its ranks, cut down when it fails, and printed
//! as C.

use serde::{Deserialize, Serialize};

/// A rank of the world; communicators have ranks of their own.
pub type World = usize;

/// What carries messages between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// Shared memory: all ranks on one node.
    Shm,
    /// TCP between nodes, shared memory inside.
    Tcp,
    /// The MPI plugin between nodes, ranks started by an MPI launcher.
    Mpi,
    /// The double of the vendor's library, with two levels in front of it.
    Vendor,
    /// Data on soft GPUs.
    Softgpu,
}

/// A whole program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Program {
    pub seed: u64,
    pub carrier: Carrier,
    /// Who runs the ranks.
    pub processes: Vec<Process>,
    /// The process of each rank of the world.
    pub home: Vec<usize>,
    /// Members of each communicator, by its own ranks.
    pub comms: Vec<Members>,
    pub ops: Vec<Op>,
    /// Settings of the library, the same on all ranks.
    pub settings: Vec<(String, String)>,
    pub fault: Option<Fault>,
    /// What the survivors of the fault do on a communicator of their own.
    pub recovery: Option<Action>,
}

/// One process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    pub node: usize,
    pub end: ProcessEnd,
}

/// How a process ends once its ranks have done their part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessEnd {
    /// `exit`, as from `main`.
    Exit,
    /// `_exit`: no handler runs.
    ExitNow,
}

/// The members of a communicator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Members {
    /// World ranks, by ranks of the communicator.
    pub ranks: Vec<World>,
    /// Which of them do not wait (`blocking = 0`).
    pub nonblocking: Vec<bool>,
    /// The communicator that it was made from.
    pub parent: Option<usize>,
}

impl Members {
    /// The communicator's rank of a rank of the world.
    pub fn rank_of(&self, world: World) -> Option<usize> {
        self.ranks.iter().position(|&member| member == world)
    }
}

/// One operation, and who comes late to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Op {
    /// Milliseconds that a rank sleeps before its part.
    pub pauses: Vec<(World, u64)>,
    /// Ranks fork a child here that lives as long as they do.
    pub forks: Vec<World>,
    pub action: Action,
}

/// What an operation does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Action {
    /// Makes a communicator out of ids; with several, the work of bringing the ranks together is shared.
    Init { comm: usize, ids: usize, config: bool },
    /// Makes all ranks of a communicator inside one process.
    InitAll { comm: usize },
    /// Splits a communicator: for each of its ranks a color (an index into `children`) and a key.
    Split { parent: usize, colors: Vec<Option<usize>>, keys: Vec<i32>, children: Vec<usize> },
    /// Makes a communicator without some ranks, which do not call.
    Shrink { parent: usize, child: usize, abort: bool },
    /// Makes a larger communicator: the parent's ranks, then newcomers.
    Grow { parent: usize, child: usize },
    /// Collectives and messages; in one group if there are several.
    Calls { calls: Vec<Call>, nesting: usize },
    /// Waits for the host streams of these ranks.
    Sync { ranks: Vec<World> },
    /// A call that must be refused, and leave everything as it was.
    Refused { comm: usize, ranks: Vec<World>, what: Misuse },
    /// Gives scratch memory back, and takes it again.
    Suspend { comm: usize },
    /// Ends what runs, on all ranks, once all of them have nothing under way; calls are refused from here.
    Revoke { comm: usize },
    /// Leaves a communicator.
    End { comm: usize, ranks: Vec<(World, End)> },
}

/// How a rank leaves a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Destroy,
    FinalizeDestroy,
    /// After everything on it has ended.
    Abort,
    /// Not at all: the process ends with it.
    Keep,
    /// Finalized and kept.
    FinalizeKeep,
}

/// Calls that NCCL refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Misuse {
    Root,
    Type,
    Operation,
    Peer,
    NullBuffer,
}

/// What a call computes or moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    AllReduce,
    Broadcast,
    Bcast,
    Reduce,
    ReduceScatter,
    AllGather,
    AlltoAll,
    Gather,
    Scatter,
    Messages,
}

/// Element types, by NCCL's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(i32)]
pub enum Type {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    E4m3 = 10,
    E5m2 = 11,
}

/// Reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduction {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// An operation of `ncclRedOpCreatePreMulSum` with the factor 2; whether it is read from memory when it runs.
    PreMulSum {
        device: bool,
    },
}

/// Where the data of a call lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    Heap,
    /// `ncclMemAlloc`
    Shared,
    /// Heap memory that is registered with the communicator.
    Registered,
}

/// One collective, or messages that go together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Call {
    pub comm: usize,
    pub kind: Kind,
    pub count: usize,
    pub dtype: Type,
    pub reduction: Reduction,
    pub root: usize,
    pub in_place: bool,
    /// 0 is the null stream, others are host streams of `strata.h`.
    pub stream: usize,
    pub memory: Memory,
    /// Bytes by which buffers are off an element's boundary on odd ranks.
    pub misaligned: usize,
    /// The function with a configuration (`ncclAllReduceConfig`, ...).
    pub with_config: bool,
    /// From, to, count: by ranks of the communicator.
    pub messages: Vec<(usize, usize, usize)>,
    /// Seed of the data.
    pub salt: u64,
}

/// What goes wrong, and where.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fault {
    /// The rank whose process has the fault.
    pub rank: World,
    /// Before this operation, or as many microseconds into it.
    pub op: usize,
    pub after_us: Option<u64>,
    pub kind: FaultKind,
    /// The survivors shrink the first communicator; else they make one with a new unique id.
    pub shrink: bool,
    /// How long a process is frozen, how many descriptors are left, ...
    pub amount: u64,
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
pub enum FaultKind {
    Kill,
    /// `exit` on the rank's thread, in the middle of the program.
    Exit,
    ExitNow,
    /// Frozen for less time than anybody waits.
    Pause,
    /// Frozen for longer than anybody waits.
    Freeze,
    /// No new descriptors from here.
    Descriptors,
    /// No new memory from here.
    Memory,
    /// /dev/shm is small from the start, on the rank's node.
    SmallShm,
    /// The network is slow from the start.
    Slow,
    /// No packet passes for less time than anybody waits.
    Glitch,
    /// No packet passes for longer than anybody waits.
    Cut,
}

impl FaultKind {
    pub const ALL: [FaultKind; 11] = [
        FaultKind::Kill,
        FaultKind::Exit,
        FaultKind::ExitNow,
        FaultKind::Pause,
        FaultKind::Freeze,
        FaultKind::Descriptors,
        FaultKind::Memory,
        FaultKind::SmallShm,
        FaultKind::Slow,
        FaultKind::Glitch,
        FaultKind::Cut,
    ];

    /// Whether its process is lost to the others.
    pub fn takes_ranks(self) -> bool {
        matches!(self, FaultKind::Kill | FaultKind::Exit | FaultKind::ExitNow | FaultKind::Freeze)
    }

    /// Whether calls may fail because of it.
    pub fn fails_calls(self) -> bool {
        let harmless = [FaultKind::Pause, FaultKind::SmallShm, FaultKind::Slow, FaultKind::Glitch];
        !harmless.contains(&self)
    }

    /// Whether it needs a network of its own.
    pub fn is_network(self) -> bool {
        matches!(self, FaultKind::Slow | FaultKind::Glitch | FaultKind::Cut)
    }
}

impl Type {
    pub const ALL: [Type; 12] = [
        Type::I8,
        Type::U8,
        Type::I32,
        Type::U32,
        Type::I64,
        Type::U64,
        Type::F16,
        Type::F32,
        Type::F64,
        Type::Bf16,
        Type::E4m3,
        Type::E5m2,
    ];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Type::I8 | Type::U8 | Type::E4m3 | Type::E5m2 => 1,
            Type::F16 | Type::Bf16 => 2,
            Type::I32 | Type::U32 | Type::F32 => 4,
            Type::I64 | Type::U64 | Type::F64 => 8,
        }
    }
}

impl Kind {
    pub const COLLECTIVES: [Kind; 9] = [
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Bcast,
        Kind::Reduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::AlltoAll,
        Kind::Gather,
        Kind::Scatter,
    ];

    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }
}

impl Program {
    pub fn nranks(&self) -> usize {
        self.home.len()
    }

    /// The ranks that a process runs.
    pub fn ranks_of(&self, process: usize) -> Vec<World> {
        (0..self.nranks()).filter(|&rank| self.home[rank] == process).collect()
    }

    /// Ranks that are gone, or frozen too long, once the fault has struck.
    pub fn victims(&self) -> Vec<World> {
        match &self.fault {
            Some(fault) if fault.kind.takes_ranks() => self.ranks_of(self.home[fault.rank]),
            _ => Vec::new(),
        }
    }

    /// Whether the survivors shrink the first communicator.
    pub fn recovers_by_shrink(&self) -> bool {
        self.fault.as_ref().is_some_and(|fault| fault.shrink && fault.kind.takes_ranks())
    }

    /// Whether a process ends with communicators alive.
    pub fn keeps(&self, process: usize) -> bool {
        let ended = |comm: usize, rank: World| {
            let end = |&(member, how): &(World, End)| member == rank && !matches!(how, End::Keep | End::FinalizeKeep);
            self.ops.iter().any(|op| match &op.action {
                Action::End { comm: ended, ranks } => *ended == comm && ranks.iter().any(end),
                _ => false,
            })
        };
        let kept = |comm: usize| {
            let ranks = self.comms[comm].ranks.iter();
            ranks.filter(|&&rank| self.home[rank] == process).any(|&rank| !ended(comm, rank))
        };
        self.fault.is_none() && (0..self.comms.len()).any(kept)
    }

    /// Who takes part in an operation.
    pub fn takes_part(&self, op: &Op, rank: World) -> bool {
        let is_member = |comm: usize| self.comms[comm].rank_of(rank).is_some();
        match &op.action {
            Action::Init { comm, .. } | Action::InitAll { comm } => is_member(*comm),
            Action::Split { parent, .. } => is_member(*parent),
            Action::Shrink { child, .. } | Action::Grow { child, .. } => is_member(*child),
            Action::Calls { calls, .. } => calls.iter().any(|call| self.takes_part_in(call, rank)),
            Action::Sync { ranks } => ranks.contains(&rank),
            Action::Refused { ranks, .. } => ranks.contains(&rank),
            Action::Suspend { comm } | Action::Revoke { comm } => is_member(*comm),
            Action::End { ranks, .. } => ranks.iter().any(|(member, _)| *member == rank),
        }
    }

    /// Who takes part in a call.
    pub fn takes_part_in(&self, call: &Call, rank: World) -> bool {
        let Some(mine) = self.comms[call.comm].rank_of(rank) else { return false };
        call.kind != Kind::Messages || call.messages.iter().any(|&(from, to, _)| from == mine || to == mine)
    }

    /// The stream of a rank's part in a call. Ranks need not have the same calls on the same streams; with a fault they do, so
    /// that nobody waits in vain for one that waits for the lost rank elsewhere.
    pub fn stream_of(&self, call: &Call, rank: World) -> usize {
        let shift = if self.fault.is_some() || call.salt.is_multiple_of(2) { 0 } else { rank };
        match call.stream {
            0 => 0,
            // The null stream waits, and these calls do not.
            stream if self.comms[call.comm].nonblocking[0] => 1 + (stream - 1 + shift) % 2,
            stream => (stream + shift) % 3,
        }
    }
}

impl Action {
    /// The communicators that the operation needs.
    pub fn uses(&self) -> Vec<usize> {
        match self {
            Action::Init { .. } | Action::InitAll { .. } | Action::Sync { .. } => Vec::new(),
            Action::Split { parent, .. } | Action::Shrink { parent, .. } | Action::Grow { parent, .. } => vec![*parent],
            Action::Calls { calls, .. } => calls.iter().map(|call| call.comm).collect(),
            Action::Refused { comm, .. } | Action::Suspend { comm } => vec![*comm],
            Action::Revoke { comm } | Action::End { comm, .. } => vec![*comm],
        }
    }

    /// The communicators that the operation makes.
    pub fn makes(&self) -> Vec<usize> {
        match self {
            Action::Init { comm, .. } | Action::InitAll { comm } => vec![*comm],
            Action::Split { children, .. } => children.clone(),
            Action::Shrink { child, .. } | Action::Grow { child, .. } => vec![*child],
            _ => Vec::new(),
        }
    }

    /// A word for what it does.
    pub fn name(&self) -> String {
        match self {
            Action::Calls { calls, .. } => {
                let names: Vec<String> = calls.iter().map(|call| format!("{:?} on {}", call.kind, call.comm)).collect();
                names.join(" and ")
            }
            Action::Init { comm, .. } => format!("Init {comm}"),
            Action::InitAll { comm } => format!("InitAll {comm}"),
            Action::Split { parent, children, .. } => format!("Split {parent} into {children:?}"),
            Action::Shrink { parent, child, .. } => format!("Shrink {parent} to {child}"),
            Action::Grow { parent, child } => format!("Grow {parent} to {child}"),
            Action::Sync { .. } => "Sync".into(),
            Action::Refused { what, comm, .. } => format!("Refused {what:?} on {comm}"),
            Action::Suspend { comm } => format!("Suspend {comm}"),
            Action::Revoke { comm } => format!("Revoke {comm}"),
            Action::End { comm, .. } => format!("End {comm}"),
        }
    }
}

impl Program {
    /// Which communicators the fault may end: those with a rank of its process, those made from them, and those that are
    /// used in one group with them.
    pub fn tainted(&self) -> Vec<bool> {
        let Some(fault) = self.fault.as_ref().filter(|fault| fault.kind.fails_calls()) else {
            return vec![false; self.comms.len()];
        };
        let process = self.home[fault.rank];
        let hit = |rank: World| self.home[rank] == process || fault.kind == FaultKind::Cut;
        let mut tainted: Vec<bool> = self.comms.iter().map(|comm| comm.ranks.iter().any(|&rank| hit(rank))).collect();
        loop {
            let before = tainted.clone();
            for (index, comm) in self.comms.iter().enumerate() {
                tainted[index] |= comm.parent.is_some_and(|parent| tainted[parent]);
            }
            for op in &self.ops {
                let used: Vec<usize> = match &op.action {
                    Action::Calls { calls, .. } => calls.iter().map(|call| call.comm).collect(),
                    _ => Vec::new(),
                };
                if used.iter().any(|&comm| tainted[comm]) {
                    used.iter().for_each(|&comm| tainted[comm] = true);
                }
            }
            if before == tainted {
                return tainted;
            }
        }
    }
}
