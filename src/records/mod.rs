//! Records of calls: what was called, by which algorithm it ran, and when; kept in memory, written as traces.
//!
//! `STRATA_TRACE` names files and so switches records on. A process then has one [`ring`] of records, and each of its
//! communicators a [`CommRecords`]. A record is written as its call is accepted, begins, and ends or fails: a few words each
//! time, without locks, allocations or system calls but the clock's. Where nothing is recorded a communicator has no
//! `CommRecords`, and that is all that calls look at.
//!
//! Files are written ([`output`]) when the last recorded communicator of the process ends, when one fails, and when the process
//! exits; never while a call runs.
#![forbid(unsafe_code)]

pub mod call;
pub mod chrome;
pub mod flight;
pub mod output;
pub mod pickle;
pub mod ring;
#[cfg(test)]
mod samples;
pub mod summary;
pub mod table;
pub mod trace;

pub use call::{CallKind, CallNames, CallRecord, CallState, CallWords, NewCall};
pub use trace::{CallTrace, TraceComm, TraceProcess};

use crate::config::Config;
use crate::fork::PerProcess;
use output::{TraceForm, TraceOutput};
use ring::RecordRing;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// CallNames of algorithms and transports that are told apart.
const MOST_NAMES: usize = u16::MAX as usize;
/// After a trace has been written, none is for so many times as long as that took, unless the process exits or something fails.
const WRITE_SHARE: u32 = 20;
/// How long the end of the process waits for a thread that writes.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// What a communicator tells of itself.
#[derive(Debug, Clone, Default)]
pub struct RecordedComm {
    /// Its key.
    pub key: u128,
    /// Its name.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// The launcher's numbers of all ranks' processes, as far as they are known.
    pub launched: Vec<Option<u32>>,
    /// Whether all ranks are of this process.
    pub is_alone: bool,
    /// On how many nodes they are.
    pub nodes: u32,
    /// What carries messages between these.
    pub carrier: String,
    /// Whether it is Strata's own beside one of the vendor library's.
    pub companion: bool,
}

/// A communicator whose calls may be in the ring.
#[derive(Debug)]
struct KnownComm {
    number: u32,
    comm: TraceComm,
    /// How many records there were when it ended.
    ended_at: Option<u64>,
}

/// What has been written last.
#[derive(Debug, Default)]
struct Written {
    /// How many records there were.
    added: u64,
    /// Whether some call had not ended then.
    had_open: bool,
    /// When, and how long that took.
    last: Option<(Instant, Duration)>,
}

/// The records of a process.
#[derive(Debug)]
pub struct Recorder {
    ring: RecordRing,
    start: Instant,
    wall_ns: u64,
    host: String,
    /// The rank that names of files have.
    rank: u32,
    names: Mutex<Vec<String>>,
    comms: Mutex<Vec<KnownComm>>,
    numbers: AtomicU64,
    live: AtomicUsize,
    outputs: Vec<TraceOutput>,
    at_failure: Option<TraceOutput>,
    written: Mutex<Written>,
}

static RECORDER: PerProcess<OnceLock<Option<Recorder>>> = PerProcess::new(OnceLock::new);

/// The process that has records, as its forks inherit it; 0 for none.
static RECORDED_BY: AtomicU32 = AtomicU32::new(0);

/// Whether this process is the fork of one that has records.
fn is_fork_of_recorder() -> bool {
    ![0, std::process::id()].contains(&RECORDED_BY.load(Ordering::Relaxed))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    crate::sync::locked(mutex)
}

/// The files that a list of names means; what is no form is told.
fn outputs(names: &str, one_process: bool) -> Vec<TraceOutput> {
    let output = |name: &str| match TraceForm::of(name) {
        Some(form) => Some(TraceOutput::new(name, form, one_process)),
        None => {
            let forms = "a trace's name ends in .json (Chrome, Perfetto), .csv, .txt (summary) or .pickle (PyTorch)";
            crate::log::notice(&format!("STRATA_TRACE={name} is ignored: {forms}"));
            None
        }
    };
    names.split(',').map(str::trim).filter(|name| !name.is_empty()).filter_map(output).collect()
}

/// The same moment by both clocks, as nearly as a few tries bring them together.
fn both_clocks() -> (Instant, u64) {
    let read = |_| {
        let before = Instant::now();
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let took = before.elapsed();
        (took, (before + took / 2, wall.as_nanos() as u64))
    };
    let nearest = (0..5).map(read).min_by_key(|(took, _)| *took);
    nearest.map_or_else(|| (Instant::now(), 0), |(_, both)| both)
}

impl Recorder {
    /// What these settings ask for, in a process of this rank; nothing where they name no file.
    fn new(config: &Config, rank: u32, one_process: bool) -> Option<Recorder> {
        if config.trace == "none" {
            return None;
        }
        let of_fork = is_fork_of_recorder();
        let own = |output: TraceOutput| if of_fork { output.of_fork() } else { output };
        let outputs: Vec<TraceOutput> = outputs(&config.trace, one_process).into_iter().map(own).collect();
        let at_failure = match config.trace_failure.as_str() {
            "none" => None,
            "auto" => (!outputs.is_empty()).then(|| TraceOutput::beside(&config.trace)),
            name => Some(TraceOutput::new(name, TraceForm::Flight, false)),
        };
        let at_failure = at_failure.map(own);
        if outputs.is_empty() && at_failure.is_none() {
            return None;
        }
        RECORDED_BY.store(std::process::id(), Ordering::Relaxed);
        let ring = RecordRing::new(config.trace_records);
        let (start, wall_ns) = both_clocks();
        Some(Recorder {
            ring,
            start,
            wall_ns,
            host: crate::log::host_name(),
            rank,
            names: Mutex::new(vec![String::new()]),
            comms: Mutex::default(),
            numbers: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            outputs,
            at_failure,
            written: Mutex::default(),
        })
    }

    /// Nanoseconds since the process has had records.
    #[inline]
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// The number of a name; 0 where there are too many of them.
    fn name(&self, name: &str) -> u16 {
        let mut names = locked(&self.names);
        if let Some(known) = names.iter().position(|known| known == name) {
            return known as u16;
        }
        if names.len() >= MOST_NAMES {
            return 0;
        }
        names.push(name.to_string());
        (names.len() - 1) as u16
    }

    /// Notes a communicator; forgets those of which the ring has no calls any more.
    fn join(&self, new: &RecordedComm) -> u32 {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) as u32;
        let nranks = new.launched.len() as u32;
        let mut sorted: Vec<u32> = new.launched.iter().flatten().copied().collect();
        sorted.sort_unstable();
        sorted.dedup();
        let are_known = sorted.len() == new.launched.len();
        let members: Vec<u32> = if are_known { new.launched.iter().flatten().copied().collect() } else { Vec::new() };
        let mut comms = locked(&self.comms);
        let first_kept = self.ring.added().saturating_sub(self.ring.size() as u64);
        comms.retain(|known| known.ended_at.is_none_or(|ended| ended > first_kept));
        let key = format!("{:032x}", new.key);
        // Several ranks of a communicator in one process have their numbers in it instead of the process's.
        let mut together = false;
        for known in comms.iter_mut().filter(|known| known.comm.key == key) {
            (known.comm.process, together) = (known.comm.rank, true);
        }
        let own = members.get(new.rank as usize).copied();
        let process = own.unwrap_or(if together { new.rank } else { self.rank });
        let comm = TraceComm {
            key,
            name: new.name.clone(),
            rank: new.rank,
            nranks,
            nodes: new.nodes,
            members: trace::ranges(&members),
            process,
            companion: new.companion,
        };
        comms.push(KnownComm { number, comm, ended_at: None });
        self.live.fetch_add(1, Ordering::AcqRel);
        number
    }

    /// What is recorded now.
    fn trace(&self) -> CallTrace {
        let records = self.ring.read();
        let names = locked(&self.names).clone();
        let comms = locked(&self.comms);
        let by_number: HashMap<u32, &TraceComm> = comms.iter().map(|known| (known.number, &known.comm)).collect();
        let call = |(number, words): &(u64, [u64; ring::WORDS])| {
            let comm = by_number.get(&call::comm_of(words))?;
            let place = call::RecordPlace { key: &comm.key, rank: comm.rank, nranks: comm.nranks, names: &names };
            call::record(*number, words, &place)
        };
        let calls = records.iter().filter_map(call).collect();
        let added = self.ring.added();
        let process = TraceProcess {
            host: self.host.clone(),
            pid: std::process::id(),
            rank: self.rank,
            strata: env!("CARGO_PKG_VERSION").to_string(),
            wall_ns: self.wall_ns,
            written_ns: self.now_ns(),
            overwritten: added.saturating_sub(self.ring.size() as u64),
            lost: self.ring.lost(),
        };
        CallTrace { processes: vec![process], comms: comms.iter().map(|known| known.comm.clone()).collect(), calls }
    }

    fn write(&self, mut written: MutexGuard<'_, Written>, failed: bool) {
        let began = Instant::now();
        written.added = self.ring.added();
        let trace = self.trace();
        written.had_open = trace.calls.iter().any(|call| call.ended_ns.is_none());
        self.outputs.iter().for_each(|output| output.write(&trace));
        if failed {
            self.at_failure.iter().for_each(|output| output.write(&trace));
        }
        written.last = Some((Instant::now(), began.elapsed()));
    }

    /// Writes what is new, unless that would take much of the process's time: then a later end or the exit does.
    fn write_if_due(&self) {
        let written = locked(&self.written);
        let is_due = written.last.is_none_or(|(when, took)| when.elapsed() >= took * WRITE_SHARE);
        if is_due && (written.last.is_none() || self.ring.added() > written.added || written.had_open) {
            self.write(written, false);
        }
    }
}

/// Writes what has not been written yet. Called while the process exits: waits for no other thread for ever.
pub fn write_at_exit() {
    let Some(recorder) = RECORDER.get().get().and_then(Option::as_ref) else { return };
    let end = Instant::now() + EXIT_PATIENCE;
    while Instant::now() < end {
        if let Ok(written) = recorder.written.try_lock() {
            if written.last.is_none() || recorder.ring.added() > written.added || written.had_open {
                recorder.write(written, false);
            }
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A record, while its call goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallTicket(u64);

impl CallTicket {
    /// No record.
    pub const NONE: CallTicket = CallTicket(u64::MAX);

    fn of(number: Option<u64>) -> CallTicket {
        number.map_or(CallTicket::NONE, CallTicket)
    }
}

/// The records of one communicator's calls.
#[derive(Debug)]
pub struct CommRecords {
    recorder: &'static Recorder,
    comm: u32,
    carrier: u16,
    collectives: AtomicU64,
    messages: AtomicU64,
    has_left: AtomicBool,
    has_failed: AtomicBool,
}

impl CommRecords {
    /// The records of a new communicator, if the process's settings ask for them: those of its first communicator count.
    pub fn new(config: &Config, launched: Option<(usize, usize)>, comm: &RecordedComm) -> Option<CommRecords> {
        let recorder = RECORDER.get().get_or_init(|| {
            let (rank, one_process) = match launched {
                Some((rank, size)) => (rank as u32, size == 1),
                None => (if comm.is_alone { 0 } else { comm.rank }, comm.is_alone),
            };
            Recorder::new(config, rank, one_process)
        });
        recorder.as_ref().map(|recorder| CommRecords::of(recorder, comm))
    }

    fn of(recorder: &'static Recorder, comm: &RecordedComm) -> CommRecords {
        CommRecords {
            recorder,
            comm: recorder.join(comm),
            carrier: recorder.name(&comm.carrier),
            collectives: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            has_left: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// A call's words, to be kept where it may be made again.
    pub fn words(&self, call: &NewCall) -> CallWords {
        CallWords::new(call, self.comm)
    }

    /// The names that calls of an algorithm have, to be kept with what runs it.
    pub fn names(&self, algorithm: &str) -> CallNames {
        CallNames { algorithm: self.recorder.name(algorithm), carrier: self.carrier }
    }

    /// The names of calls with nothing to choose.
    pub fn plain(&self) -> CallNames {
        CallNames { algorithm: 0, carrier: self.carrier }
    }

    /// Numbers of collectives are the same on all ranks, which make them in the same order.
    #[inline]
    fn number(&self, call: &CallWords) -> u64 {
        let counter = if call.is_message() { &self.messages } else { &self.collectives };
        counter.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A call is accepted.
    #[inline]
    pub fn accepted(&self, call: &CallWords) -> CallTicket {
        let words = call.accepted(self.number(call), self.recorder.now_ns(), None);
        CallTicket::of(self.recorder.ring.add(&words))
    }

    /// A call is accepted and begins at once.
    #[inline]
    pub fn begun_at_once(&self, call: &CallWords, names: CallNames) -> CallTicket {
        let words = call.accepted(self.number(call), self.recorder.now_ns(), Some(names));
        CallTicket::of(self.recorder.ring.add(&words))
    }

    /// A call begins.
    #[inline]
    pub fn begun(&self, ticket: CallTicket, names: CallNames) {
        let (CallTicket(number), now_ns) = (ticket, self.recorder.now_ns());
        self.recorder.ring.change(number, |words| call::begin(words, now_ns, names));
    }

    /// It is known by which algorithm a call that has begun runs.
    #[inline]
    pub fn named(&self, CallTicket(number): CallTicket, names: CallNames) {
        self.recorder.ring.change(number, |words| call::name(words, names));
    }

    /// A call has ended, and has sent so many bytes to other nodes.
    #[inline]
    pub fn ended(&self, CallTicket(number): CallTicket, nic_bytes: Option<u64>) {
        let now_ns = self.recorder.now_ns();
        self.recorder.ring.change(number, |words| call::end(words, now_ns, nic_bytes));
    }

    /// A call has failed; perhaps it waited for a rank.
    pub fn failed(&self, CallTicket(number): CallTicket, awaited: Option<u32>) {
        let now_ns = self.recorder.now_ns();
        self.recorder.ring.change(number, |words| call::fail(words, now_ns, awaited));
    }

    /// Messages go together: they are one group.
    pub fn grouped(&self, tickets: &[CallTicket]) {
        let Some(CallTicket(group)) = tickets.iter().find(|ticket| **ticket != CallTicket::NONE) else { return };
        for CallTicket(number) in tickets {
            self.recorder.ring.change(*number, |words| call::join(words, *group));
        }
    }

    /// Writes the traces after the communicator's failure, once.
    pub fn write_failure(&self) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            self.recorder.write(locked(&self.recorder.written), true);
        }
    }

    /// The communicator has ended. If it was the last, the traces are written.
    pub fn leave(&self) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        let recorder = self.recorder;
        let ended = recorder.ring.added();
        let mut comms = locked(&recorder.comms);
        comms.iter_mut().filter(|known| known.number == self.comm).for_each(|known| known.ended_at = Some(ended));
        drop(comms);
        if recorder.live.fetch_sub(1, Ordering::AcqRel) == 1 {
            recorder.write_if_due();
        }
    }
}

#[cfg(test)]
mod tests;
