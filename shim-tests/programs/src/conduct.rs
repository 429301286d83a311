//! Runs a program: starts its processes, watches them, and judges.

use crate::board::{Board, Place, MAX_COMMS, MAX_RANKS};
use crate::process::file;
use crate::program::{Carrier, FaultKind, Program};
use crate::report::{Entry, Line, Report};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How programs are run.
#[derive(Debug, Clone)]
pub struct Conduct {
    pub library: PathBuf,
    /// Without progress for so long, a program hangs.
    pub limit: Duration,
    /// Keeps the files of the run.
    pub keep: bool,
    /// Has gdb say where the threads of ranks that hang are.
    pub stacks: bool,
    pub carriers: Carriers,
}

/// What carriers need beside the library.
#[derive(Debug, Clone, clap::Args)]
pub struct Carriers {
    /// The plugin for the MPI at hand, as scripts/build-mpi builds it.
    #[arg(long, env = "PROGRAMS_MPI_PLUGIN")]
    pub mpi_plugin: Option<PathBuf>,
    /// The launcher of the MPI at hand.
    #[arg(long, env = "PROGRAMS_MPIEXEC", default_value = "mpiexec")]
    pub mpiexec: String,
    /// An option for it; may be repeated.
    #[arg(long = "mpi-option", env = "PROGRAMS_MPI_OPTIONS", value_delimiter = ' ', allow_hyphen_values = true)]
    pub mpi_options: Vec<String>,
    /// The vendor's library, or a double of it.
    #[arg(long, env = "PROGRAMS_VENDOR")]
    pub vendor: Option<PathBuf>,
    /// The directory with the soft GPU's libcuda.so.1.
    #[arg(long, env = "PROGRAMS_DRIVER")]
    pub driver: Option<PathBuf>,
}

/// What came of a program.
#[derive(Debug, Clone)]
pub enum Verdict {
    Passed {
        took: Duration,
        delays: Vec<Duration>,
    },
    /// One line, and the rest of the story.
    Failed {
        what: String,
        story: String,
    },
}

/// Processes, killed when this is dropped.
struct Running {
    children: Vec<(Child, Option<ExitStatus>)>,
    /// Holds a mount namespace.
    holder: Option<Child>,
    /// How long one that is asked to end may take.
    patience: Duration,
}

impl Drop for Running {
    fn drop(&mut self) {
        for (child, status) in &mut self.children {
            if status.is_none() {
                // A launcher that is asked ends its ranks, too.
                // SAFETY: no requirement.
                unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
                let end = Instant::now() + self.patience;
                while Instant::now() < end && matches!(child.try_wait(), Ok(None)) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        if let Some(holder) = &mut self.holder {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

impl Running {
    /// The stacks of all threads.
    fn stacks(&self) -> String {
        let mut text = String::new();
        for (number, (child, _)) in self.children.iter().enumerate().filter(|(_, (_, status))| status.is_none()) {
            let mut gdb = Command::new("gdb");
            gdb.args(["-batch", "-nx", "-ex", "thread apply all bt 14", "-p", &child.id().to_string()]);
            let said = gdb.stdin(Stdio::null()).output().map_or(Vec::new(), |output| output.stdout);
            let said = String::from_utf8_lossy(&said).into_owned();
            let lines = said.lines().filter(|line| line.starts_with('#') || line.starts_with("Thread"));
            lines.for_each(|line| text += &format!("  process {number}: {line}\n"));
        }
        text
    }

    /// Looks which processes have ended; whether all have.
    fn poll(&mut self) -> bool {
        for (child, status) in &mut self.children {
            if status.is_none() {
                *status = child.try_wait().ok().flatten();
            }
        }
        self.children.iter().all(|(_, status)| status.is_some())
    }
}

impl Conduct {
    /// Runs a program and judges it.
    pub fn run(&self, program: &Program) -> Result<Verdict, String> {
        if program.nranks() > MAX_RANKS || program.comms.len() > MAX_COMMS {
            return Err("the program is too large for the board".into());
        }
        let dir = tempfile::Builder::new().prefix("programs-").tempdir().map_err(|error| error.to_string())?;
        let begun = Instant::now();
        let mut running = self.start(program, dir.path()).map_err(|error| error.to_string())?;
        let hung = self.watch(program, dir.path(), &mut running)?;
        let mut verdict = judge(program, dir.path(), &running, hung, begun.elapsed());
        if let (Verdict::Failed { story, .. }, true) = (&mut verdict, hung && self.stacks) {
            *story += &running.stacks();
        }
        drop(running);
        if self.keep {
            println!("files: {}", dir.keep().display());
        }
        Ok(verdict)
    }

    fn start(&self, program: &Program, dir: &Path) -> std::io::Result<Running> {
        std::fs::write(file(dir, "program.json"), serde_json::to_string(program)?)?;
        Board::create(&file(dir, "board"))?;
        let mut running = Running {
            children: Vec::new(),
            holder: None,
            patience: Duration::from_secs(if program.carrier == Carrier::Mpi { 5 } else { 0 }),
        };
        let tester = std::env::current_exe()?;
        if program.carrier == Carrier::Mpi {
            let mut command = Command::new(&self.carriers.mpiexec);
            let (root, confirmed) = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM");
            command.env(root, "1").env(confirmed, "1").args(&self.carriers.mpi_options);
            // Launchers of Open MPI that start and end at once take each other's folder away, where it is the same one.
            command.env("TMPDIR", dir);
            command.arg("-n").arg(program.nranks().to_string()).arg(tester);
            command.arg("process").arg(dir).arg("--library").arg(&self.library);
            running.children.push((self.spawn(program, dir, command, 0)?, None));
            return Ok(running);
        }
        for number in 0..program.processes.len() {
            let mut command = Command::new(&tester);
            command.arg("process").arg(dir).arg("--number").arg(number.to_string()).arg("--library").arg(&self.library);
            if let Some(setup) = namespace(program, number) {
                if running.holder.is_none() {
                    running.holder = Some(hold(&setup)?);
                }
                enter(&mut command, running.holder.as_ref().map_or(0, Child::id))?;
            }
            running.children.push((self.spawn(program, dir, command, number)?, None));
        }
        Ok(running)
    }

    fn spawn(&self, program: &Program, dir: &Path, mut command: Command, number: usize) -> std::io::Result<Child> {
        self.environment(program, &mut command);
        let said = File::create(file(dir, &format!("said{number}")))?;
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said).spawn()
    }

    fn environment(&self, program: &Program, command: &mut Command) {
        for (name, _) in std::env::vars() {
            if name.starts_with("STRATA_") || name.starts_with("NCCL_") {
                command.env_remove(name);
            }
        }
        let faulty = program.fault.as_ref().is_some_and(|fault| fault.kind.fails_calls());
        let limit = if faulty { 3000 } else { (self.limit / 2).as_millis() }.to_string();
        command.env("STRATA_NCCL_LIB", "none").env("NCCL_DEBUG", "WARN").env("NCCL_SOCKET_IFNAME", "lo");
        command.env("DOUBLE_TIMEOUT_S", if faulty { "3" } else { "60" });
        command.env("STRATA_TIMEOUT_MS", &limit).env("STRATA_BOOTSTRAP_TIMEOUT_MS", &limit);
        match program.carrier {
            Carrier::Shm => {}
            Carrier::Tcp => drop(command.env("STRATA_INTER", "tcp")),
            Carrier::Mpi => {
                command
                    .env("STRATA_INTER", "mpi")
                    .envs(self.carriers.mpi_plugin.iter().map(|path| ("STRATA_MPI_PLUGIN", path)));
            }
            Carrier::Vendor => {
                command.envs(self.carriers.vendor.iter().map(|path| ("STRATA_NCCL_LIB", path)));
                for collective in ["ALLGATHER", "REDUCESCATTER", "ALLREDUCE"] {
                    command.env(format!("STRATA_{collective}_ALGO"), "two_level");
                }
            }
            Carrier::Softgpu => {
                command.envs(self.carriers.driver.iter().map(|path| ("LD_LIBRARY_PATH", path)));
                command.env("SOFTGPU_SEED", program.seed.to_string()).env("STRATA_INTER", "tcp");
            }
        }
        command.envs(program.settings.iter().map(|(name, value)| (name, value)));
    }

    /// Waits until all processes have ended, one has found something wrong, or nothing goes on; whether the latter.
    fn watch(&self, program: &Program, dir: &Path, running: &mut Running) -> Result<bool, String> {
        let board = Board::open(&file(dir, "board")).map_err(|error| error.to_string())?;
        let places = || (0..program.nranks()).map(|rank| board.place(rank)).collect::<Vec<_>>();
        let (mut last, mut since) = (places(), Instant::now());
        let mut failed: Option<Instant> = None;
        while !running.poll() {
            std::thread::sleep(Duration::from_millis(2));
            let now = places();
            let died = running.children.iter().enumerate().any(|(number, (_, status))| {
                !is_victim(program, number) && status.is_some_and(|status| !status.success())
            });
            if died || now.contains(&Place::Failed) {
                // Others may have found more, a moment later.
                if failed.get_or_insert_with(Instant::now).elapsed() > Duration::from_millis(300) {
                    return Ok(false);
                }
            }
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() > self.limit {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What makes a mount and network namespace what the fault needs, if it needs one for this process.
fn namespace(program: &Program, process: usize) -> Option<String> {
    let fault = program.fault.as_ref()?;
    let node = program.processes[program.home[fault.rank]].node;
    let amount = fault.amount;
    match fault.kind {
        FaultKind::SmallShm if program.processes[process].node == node => {
            Some(format!("--mount|mount -t tmpfs -o size={amount}k tmpfs /dev/shm"))
        }
        FaultKind::Slow => {
            let slow = format!("tc qdisc add dev lo root tbf rate {amount}mbit burst 128kb limit 4mb");
            Some(format!("--net --mount|ip link set lo up && {slow}"))
        }
        FaultKind::Glitch | FaultKind::Cut => Some("--net --mount|ip link set lo up".to_string()),
        _ => None,
    }
}

/// A process with namespaces of its own, which its second half sets up.
fn hold(setup: &str) -> std::io::Result<Child> {
    let (kinds, script) = setup.split_once('|').unwrap_or(("", setup));
    let mut holder = Command::new("unshare");
    holder.args(kinds.split(' ')).args(["sh", "-c", &format!("{script} && echo ready && exec sleep 600")]);
    let mut holder = holder.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut said = String::new();
    if let Some(out) = &mut holder.stdout {
        BufReader::new(out).read_line(&mut said)?;
    }
    if said.trim() == "ready" {
        return Ok(holder);
    }
    let _ = holder.kill();
    let _ = holder.wait();
    Err(std::io::Error::other("no namespace can be made on this machine: leave this fault out"))
}

/// Has a command run in a process's namespaces.
fn enter(command: &mut Command, process: u32) -> std::io::Result<()> {
    let mounts = File::open(format!("/proc/{process}/ns/mnt"))?;
    let network = File::open(format!("/proc/{process}/ns/net"))?;
    let enter = move || {
        for (namespace, kind) in [(&mounts, libc::CLONE_NEWNS), (&network, libc::CLONE_NEWNET)] {
            // SAFETY: no requirement.
            if unsafe { libc::setns(namespace.as_raw_fd(), kind) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only what is safe in a signal handler may be called; because these are system calls.
    unsafe { command.pre_exec(enter) };
    Ok(())
}

/// How long after the fault each survivor had its first error; a survivor that needs nothing of the lost has none.
fn delays(program: &Program, entries: &[Entry]) -> Vec<Duration> {
    let struck = entries.iter().find(|entry| matches!(entry.line, Line::Fault { .. })).map(|entry| entry.at);
    let Some(struck) = struck else { return Vec::new() };
    let victims = program.victims();
    let first = |rank: usize| {
        let its = |entry: &&Entry| matches!(entry.line, Line::Refused { rank: teller, .. } if teller == rank);
        entries.iter().find(its).map(|entry| Duration::from_nanos(entry.at.saturating_sub(struck)))
    };
    (0..program.nranks()).filter(|rank| !victims.contains(rank)).filter_map(first).collect()
}

/// Whether the fault takes this process.
fn is_victim(program: &Program, process: usize) -> bool {
    program.victims().iter().any(|&rank| program.home[rank] == process)
}

/// Communicators that the fault does not concern do not fail, unless somebody has waited for a time-out elsewhere and so
/// came too late.
fn needless_failure(program: &Program, entries: &[Entry]) -> Option<String> {
    let tainted = program.tainted();
    let waited = entries.iter().any(|entry| matches!(entry.line, Line::Refused { code: 8, .. }));
    // A communicator that another one is made of fails with that one where nobody waits.
    let concerned = |op: usize, comm: usize| {
        let made = program.ops.get(op).map(|op| op.action.makes()).unwrap_or_default();
        tainted[comm] || made.iter().any(|&made| tainted[made])
    };
    entries.iter().filter(|_| !waited).find_map(|entry| match &entry.line {
        Line::Refused { rank, op, comm, text, .. } if !concerned(*op, *comm) => Some(format!(
            "rank {rank} in operation {op} ({}): the fault is no concern of {comm}: {text}",
            name(program, *op)
        )),
        _ => None,
    })
}

/// An error after a rank was lost names it. Communicators that stood before are looked at: those in the making may
/// rightly miss a rank that gave up for the fault's sake.
fn wrong_cause(program: &Program, entries: &[Entry]) -> Option<String> {
    // A vendor's library has its own words.
    let ours = program.carrier != Carrier::Vendor;
    let fault = program.fault.as_ref().filter(|fault| ours && fault.kind.takes_ranks())?;
    let victims = program.victims();
    let stood = |comm: usize| program.ops[..fault.op].iter().any(|op| op.action.makes().contains(&comm));
    let making = |op: usize| program.ops.get(op).is_some_and(|op| !op.action.makes().is_empty());
    entries.iter().find_map(|entry| match &entry.line {
        Line::Refused { rank, op, comm, code, text } if !victims.contains(rank) && *code > 0 && stood(*comm) => {
            let is_stream = text.contains("strataStreamSynchronize") || text.starts_with("its calls succeeded");
            // Who does not join may be one that gave up, and a stream may tell of another communicator.
            if making(*op)
                && (text.contains("did not join")
                    || text.contains("the root at")
                    || text.contains("of the parent, at")
                    || text.contains("did not take part in the exchange"))
            {
                return None;
            }
            // A rank that was stuck in the making of another communicator, or for a rank that does not answer, may be missed
            // in its turn, or have given up.
            let is_stuck = |other: &Entry| {
                matches!(&other.line, Line::Refused { rank: stuck, op: before, text, .. }
                    if stuck != rank && (before < op && making(*before) || text.contains("does not answer")))
            };
            // One who has had its own error may have ended the communicator for it.
            let has_ended_it = |other: &Entry| {
                let named = names(text).into_iter().filter_map(|number| program.comms[*comm].ranks.get(number));
                let mut named = named.filter(|named| *named != rank);
                other.at < entry.at
                    && matches!(&other.line, Line::Refused { rank: first, .. } if named.any(|named| named == first))
            };
            let words =
                ["aborted", "revoked", "has left", "has destroyed"].map(|word| format!("{word} the communicator"));
            let is_missed = *code == 8 || words.iter().any(|words| text.contains(&**words));
            if is_missed && entries.iter().any(|other| is_stuck(other) || has_ended_it(other)) {
                return None;
            }
            let mut comms = if is_stream { (0..program.comms.len()).collect() } else { vec![*comm] };
            // Who dies while a communicator is made is named as a rank of either.
            comms.extend(program.ops.get(*op).map(|op| op.action.makes()).unwrap_or_default());
            let ranks = |comm: usize| victims.iter().filter_map(move |victim| program.comms[comm].rank_of(*victim));
            let lost: Vec<usize> = comms.into_iter().flat_map(ranks).collect();
            let what = name(program, *op);
            (!lost.is_empty() && !names(text).iter().any(|number| lost.contains(number))).then(|| {
                format!(
                    "rank {rank} in operation {op} ({what}): the error does not name rank {lost:?} of {comm}: {text}"
                )
            })
        }
        _ => None,
    })
}

/// The ranks that a text names: `rank 3`, `ranks 1, 2`, `ranks 1-3, 5`.
fn names(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for list in text.split("rank").skip(1) {
        let list = list.trim_start_matches('s').trim_start();
        let end = list.find(|c: char| !(c.is_ascii_digit() || matches!(c, ',' | ' ' | '-')));
        for part in list[..end.unwrap_or(list.len())].split([',', ' ']) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
                found.extend(first..=last);
            }
        }
    }
    found
}

fn judge(program: &Program, dir: &Path, running: &Running, hung: bool, took: Duration) -> Verdict {
    let mut entries: Vec<Entry> =
        (0..program.processes.len()).flat_map(|number| Report::read(&file(dir, &format!("report{number}")))).collect();
    entries.sort_by_key(|entry| entry.at);
    let wrong = entries.iter().find_map(|entry| match &entry.line {
        Line::Wrong { rank, op, text } => {
            Some(format!("rank {rank} in operation {op} ({}): {text}", name(program, *op)))
        }
        _ => None,
    });
    let died = running.children.iter().enumerate().find_map(|(number, (_, status))| {
        let status = (*status)?;
        if is_victim(program, number) {
            return None;
        }
        let who = match program.carrier {
            Carrier::Mpi => "the launcher".to_string(),
            _ => format!("the process of ranks {:?}", program.ranks_of(number)),
        };
        match status.signal() {
            Some(signal) => Some(format!("{who} died of signal {signal}")),
            None => (!status.success()).then(|| format!("{who} ended with {status}")),
        }
    });
    let through = entries.iter().filter(|entry| matches!(entry.line, Line::Done { .. })).count();
    let stuck = if hung { Some("hang".to_string()) } else { None };
    let missing = (through + program.victims().len() < program.nranks())
        .then(|| format!("{through} of {} ranks ended", program.nranks()));
    match wrong
        .or(died)
        .or_else(|| needless_failure(program, &entries))
        .or_else(|| wrong_cause(program, &entries))
        .or(stuck)
        .or(missing)
    {
        None => Verdict::Passed { took, delays: delays(program, &entries) },
        Some(what) => Verdict::Failed { what, story: story(program, dir, &entries) },
    }
}

fn name(program: &Program, op: usize) -> String {
    program.ops.get(op).map_or("the end".into(), |op| op.action.name())
}

/// Where everybody is, and what everybody has said.
fn story(program: &Program, dir: &Path, entries: &[Entry]) -> String {
    let mut text = String::new();
    let start = entries.first().map_or(0, |entry| entry.at);
    for Entry { at, line } in entries {
        text += &format!("  {:9.3} ms {line:?}\n", (at - start) as f64 / 1e6);
    }
    if let Ok(board) = Board::open(&file(dir, "board")) {
        for rank in 0..program.nranks() {
            let process = program.home[rank];
            let node = program.processes[process].node;
            let place = match board.place(rank) {
                Place::In(op) => format!("in operation {op}: {}", name(program, op)),
                place => format!("{place:?}"),
            };
            text += &format!("  rank {rank} (process {process}, node {node}) is {place}\n");
        }
    }
    for number in 0..program.processes.len() {
        let said = std::fs::read_to_string(file(dir, &format!("said{number}"))).unwrap_or_default();
        for line in said.lines().take(12) {
            text += &format!("  process {number} said: {line}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn ranks_are_found_in_texts() {
        assert_eq!(names("ncclSplit: ranks 0-2, 4 of 5 did not join (result 8, rank 3 of 5)"), [0, 1, 2, 4, 3]);
        assert_eq!(names("rank 12 (vm, pid 7) died; ranks 1, 2 (vm) died"), [12, 1, 2]);
    }
}
