//! Records of calls: what was called, by which algorithm it ran, and when; kept in memory, written as traces.
//!
//! `STRATA_TRACE` names files and so switches records on. A process then has one [`ring`] of records, and each of its
//! communicators a [`CommRecords`]. A record is written as its call is accepted, begins, and ends or fails: a few words each
//! time, without locks, allocations or system calls; the [`clock`] is the processor's counter where that can be trusted. Where nothing is recorded a communicator has no
//! `CommRecords`, and that is all that calls look at.
//!
//! Files are written ([`output`]) when the last recorded communicator of the process ends, when one fails, and when the process
//! exits; never while a call runs.

pub mod call;
pub mod chrome;
pub mod clock;
pub mod flight;
pub mod output;
pub mod pickle;
pub mod ring;
#[cfg(test)]
mod samples;
pub mod summary;
pub mod table;
pub mod trace;
pub mod vendor;

pub use call::{type_of_nccl, CallKind, CallNames, CallRecord, CallState, CallWords, NewCall};
pub use trace::{CallTrace, TraceComm, TraceProcess};

use crate::config::Config;
use crate::fork::PerProcess;
use crate::profiler::{HeardComm, ProfiledComm};
use clock::RecordClock;
use output::{TraceForm, TraceOutput};
use ring::RecordRing;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
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
    clock: RecordClock,
    /// When the clock began, by the system's clock of the day.
    wall_ns: u64,
    host: String,
    /// The rank that names of files have.
    rank: u32,
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
        let clock = RecordClock::begin();
        let (moment, wall) = clock::at_once(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        let wall_ns = wall.saturating_sub(moment - clock.start()).as_nanos() as u64;
        Some(Recorder {
            ring,
            clock,
            wall_ns,
            host: crate::log::host_name(),
            rank,
            comms: Mutex::default(),
            numbers: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            outputs,
            at_failure,
            written: Mutex::default(),
        })
    }

    /// Ticks of the clock since the process has had records.
    #[inline]
    fn ticks(&self) -> u64 {
        self.clock.ticks()
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
        let (records, scale) = (self.ring.read(), self.clock.scale());
        let names: Vec<String> = names().iter().map(|name| name.to_string_lossy().into_owned()).collect();
        let comms = locked(&self.comms);
        let by_number: HashMap<u32, &TraceComm> = comms.iter().map(|known| (known.number, &known.comm)).collect();
        let call = |(number, words): &(u64, [u64; ring::WORDS])| {
            let comm = by_number.get(&call::comm_of(words))?;
            let place =
                call::RecordPlace { key: &comm.key, rank: comm.rank, nranks: comm.nranks, names: &names, scale };
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
            written_ns: scale.ns(self.ticks()),
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

/// The names of algorithms and transports that calls have, by number. They stay: the program's profiler is given them.
static NAMES: PerProcess<Mutex<Vec<&'static CStr>>> = PerProcess::new(Mutex::default);

fn names() -> MutexGuard<'static, Vec<&'static CStr>> {
    let mut names = locked(NAMES.get());
    if names.is_empty() {
        names.push(c"");
    }
    names
}

/// The number of a name; 0 where there are too many of them.
fn name(name: &str) -> u16 {
    let mut names = names();
    if let Some(known) = names.iter().position(|known| known.to_bytes() == name.as_bytes()) {
        return known as u16;
    }
    match CString::new(name) {
        Ok(name) if names.len() < MOST_NAMES => names.push(Box::leak(name.into_boxed_c_str())),
        _ => return 0,
    }
    (names.len() - 1) as u16
}

/// A record, while its call goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallTicket {
    /// Its number in the ring.
    record: u64,
    /// Its number for the program's profiler; 0 for none.
    event: u64,
}

impl CallTicket {
    /// No record.
    pub const NONE: CallTicket = CallTicket { record: u64::MAX, event: 0 };
}

/// The records of one communicator's calls, and what the program's profiler hears of them: either, or both.
#[derive(Debug)]
pub struct CommRecords {
    recorder: Option<&'static Recorder>,
    profiled: Option<ProfiledComm>,
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
        let recorder = CommRecords::recorder(config, launched, comm);
        let (key, name, nodes, rank) = (comm.key, comm.name.as_str(), comm.nodes, comm.rank);
        let profiled = ProfiledComm::join(&HeardComm { key, name, nodes, nranks: comm.launched.len() as u32, rank });
        (recorder.is_some() || profiled.is_some()).then(|| CommRecords::with(recorder, profiled, comm))
    }

    /// The records of a communicator of the vendor's library, which its profiler interface tells of; no other profiler hears.
    pub fn of_vendor(config: &Config, launched: Option<(usize, usize)>, comm: &RecordedComm) -> Option<CommRecords> {
        CommRecords::recorder(config, launched, comm).map(|recorder| CommRecords::of(recorder, comm))
    }

    fn recorder(config: &Config, launched: Option<(usize, usize)>, comm: &RecordedComm) -> Option<&'static Recorder> {
        let made = || {
            let (rank, one_process) = match launched {
                Some((rank, size)) => (rank as u32, size == 1),
                None => (if comm.is_alone { 0 } else { comm.rank }, comm.is_alone),
            };
            Recorder::new(config, rank, one_process)
        };
        RECORDER.get().get_or_init(made).as_ref()
    }

    fn of(recorder: &'static Recorder, comm: &RecordedComm) -> CommRecords {
        CommRecords::with(Some(recorder), None, comm)
    }

    fn with(recorder: Option<&'static Recorder>, profiled: Option<ProfiledComm>, comm: &RecordedComm) -> CommRecords {
        CommRecords {
            recorder,
            profiled,
            comm: recorder.map_or(0, |recorder| recorder.join(comm)),
            carrier: name(&comm.carrier),
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
        CallNames { algorithm: name(algorithm), carrier: self.carrier }
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
        self.add(call, None)
    }

    #[inline]
    fn add(&self, call: &CallWords, names: Option<CallNames>) -> CallTicket {
        let record = self
            .recorder
            .and_then(|recorder| recorder.ring.add(&call.accepted(self.number(call), recorder.ticks(), names)));
        let event = self.profiled.as_ref().map_or(0, |profiled| profiled.accepted(call.heard()));
        CallTicket { record: record.unwrap_or(u64::MAX), event }
    }

    /// The time, where it is recorded.
    #[inline]
    fn ticks(&self) -> u64 {
        self.recorder.map_or(0, Recorder::ticks)
    }

    /// Changes what is recorded of a call.
    #[inline]
    fn change(&self, ticket: CallTicket, change: impl FnOnce(&[AtomicU64; ring::WORDS])) {
        // Of a record that was lost there is nothing to change.
        if let Some(recorder) = self.recorder.filter(|_| ticket.record != CallTicket::NONE.record) {
            recorder.ring.change(ticket.record, change);
        }
    }

    /// Tells the program's profiler of a call.
    #[inline]
    fn tell(&self, ticket: CallTicket, tell: impl FnOnce(&ProfiledComm, u64)) {
        if let (Some(profiled), true) = (&self.profiled, ticket.event > 0) {
            tell(profiled, ticket.event);
        }
    }

    /// Has the program's profiler hear that a call begins, once it is known by which algorithm.
    fn tell_begun(&self, ticket: CallTicket, names: CallNames) {
        self.tell(ticket, |profiled, event| {
            let known = (names.algorithm > 0).then(|| self::names()[usize::from(names.algorithm)]);
            profiled.begun(event, known);
        });
    }

    /// A call is accepted and begins at once.
    #[inline]
    pub fn begun_at_once(&self, call: &CallWords, names: CallNames) -> CallTicket {
        let ticket = self.add(call, Some(names));
        self.tell_begun(ticket, names);
        ticket
    }

    /// A call begins.
    #[inline]
    pub fn begun(&self, ticket: CallTicket, names: CallNames) {
        let now = self.ticks();
        self.change(ticket, |words| call::begin(words, now, names));
        self.tell_begun(ticket, names);
    }

    /// It is known by which algorithm a call that has begun runs.
    #[inline]
    pub fn named(&self, ticket: CallTicket, names: CallNames) {
        self.change(ticket, |words| call::name(words, names));
        self.tell_begun(ticket, names);
    }

    /// A call has ended, and has sent so many bytes to other nodes.
    #[inline]
    pub fn ended(&self, ticket: CallTicket, nic_bytes: Option<u64>) {
        let now = self.ticks();
        self.change(ticket, |words| call::end(words, now, nic_bytes));
        self.tell(ticket, ProfiledComm::ended);
    }

    /// A call has failed; perhaps it waited for a rank.
    pub fn failed(&self, ticket: CallTicket, awaited: Option<u32>) {
        let now = self.ticks();
        self.change(ticket, |words| call::fail(words, now, awaited));
        self.tell(ticket, ProfiledComm::ended);
    }

    /// Messages go together: they are one group.
    pub fn grouped(&self, tickets: &[CallTicket]) {
        let recorded = tickets.iter().find(|ticket| ticket.record != CallTicket::NONE.record);
        for ticket in tickets {
            recorded.into_iter().for_each(|group| self.change(*ticket, |words| call::join(words, group.record)));
        }
        self.profiled.iter().for_each(|profiled| profiled.grouped(tickets.iter().map(|ticket| ticket.event)));
    }

    /// Writes the traces after the communicator's failure, once.
    pub fn write_failure(&self) {
        let Some(recorder) = self.recorder else { return };
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            recorder.write(locked(&recorder.written), true);
        }
    }

    /// The communicator has ended. If it was the last, the traces are written.
    pub fn leave(&self) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        self.profiled.iter().for_each(ProfiledComm::leave);
        let Some(recorder) = self.recorder else { return };
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
