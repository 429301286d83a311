//! `strata launch`: starts a program on several ranks, spread over make-believe nodes of this machine.
//!
//! Ranks get torchrun's variables and one `NCCL_HOSTID` per node, so a library that follows NCCL's rules sees several
//! nodes. When one rank fails, unless `--no-kill` lets the others go on, or the launcher is told to end, all ranks are
//! ended: SIGTERM first, SIGKILL after a grace. When the launcher itself is killed, the kernel ends the ranks. Only
//! process groups that the launcher made are ever signalled.
#![forbid(unsafe_code)]

use crate::options::Spread;
use crate::process::{Child, Ended, Event, Signals};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};
use strata::error::{Error, Result};

/// Options of `strata launch`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    spread: Spread,
    /// End all ranks after this many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Seconds between SIGTERM and SIGKILL when ranks are ended.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "5")]
    grace: Duration,
    /// Let the other ranks go on when one fails; the exit status is that of the first that failed.
    #[arg(long)]
    no_kill: bool,
    /// Put `[rank]` before every line that a rank writes.
    #[arg(long)]
    tag_output: bool,
    /// MASTER_PORT; a free port by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    program: Vec<OsString>,
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

/// What every rank of one launch is told.
struct Job {
    nodes: Vec<usize>,
    sizes: Vec<usize>,
    port: u16,
    name: String,
}

impl Job {
    fn new(options: &Options) -> Result<Job> {
        let (sizes, nodes) = options.spread.resolve()?;
        let port = match options.master_port {
            Some(port) => port,
            None => std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port(),
        };
        let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let name = format!("{:x}.{:x}", std::process::id(), since_epoch.as_nanos());
        Ok(Job { nodes, sizes, port, name })
    }

    /// The variables of one rank.
    fn variables(&self, rank: usize) -> Vec<(&'static str, String)> {
        let node = self.nodes[rank];
        let local = self.nodes[..rank].iter().filter(|&&other| other == node).count();
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.nodes.len().to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", self.sizes[node].to_string()),
            ("GROUP_RANK", node.to_string()),
            ("NODE_RANK", node.to_string()),
            ("GROUP_WORLD_SIZE", self.sizes.len().to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_string()),
            ("MASTER_PORT", self.port.to_string()),
            ("NCCL_HOSTID", format!("node{node}.{}", self.name)),
        ]
    }
}

/// Starts the ranks, waits for them, and ends them all when one fails.
pub fn run(options: &Options) -> Result<ExitCode> {
    let job = Job::new(options)?;
    let signals = Signals::block()?;
    let mut ranks = Ranks::new(options);
    for rank in 0..job.nodes.len() {
        if let Err(error) = ranks.start(rank, &job, options) {
            ranks.end_all(&signals);
            return Err(error);
        }
    }
    // A limit beyond what the clock can tell is none.
    let deadline = options.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let code = ranks.supervise(&signals, deadline)?;
    Ok(ExitCode::from(code))
}

struct Ranks {
    children: Vec<Child>,
    readers: Readers,
    grace: Duration,
    no_kill: bool,
    /// Those that have failed, in the order in which it was seen.
    failed: Vec<(usize, Ended)>,
}

impl Ranks {
    fn new(options: &Options) -> Ranks {
        let (grace, no_kill) = (options.grace, options.no_kill);
        Ranks { children: Vec::new(), readers: Readers::new(), grace, no_kill, failed: Vec::new() }
    }

    fn start(&mut self, rank: usize, job: &Job, options: &Options) -> Result<()> {
        let mut command = Command::new(&options.program[0]);
        command.args(&options.program[1..]).envs(job.variables(rank)).stdin(Stdio::null());
        if options.tag_output {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let program = options.program[0].to_string_lossy();
        let mut child =
            Child::spawn(command).map_err(|error| Error::System(format!("cannot start {program}: {error}")))?;
        if let Some(out) = child.stdout() {
            self.readers.tag(rank, out, std::io::stdout());
        }
        if let Some(err) = child.stderr() {
            self.readers.tag(rank, err, std::io::stderr());
        }
        self.children.push(child);
        Ok(())
    }

    /// Waits until all have ended, one has failed that ends the others, time is up, or a signal arrives; the exit code.
    fn supervise(&mut self, signals: &Signals, deadline: Option<Instant>) -> Result<u8> {
        loop {
            for (rank, ended) in self.new_failures()? {
                let what = if self.no_kill { "the others go on" } else { "ending the others" };
                tell!("strata launch: rank {rank} {ended}; {what}");
                self.failed.push((rank, ended));
                if !self.no_kill {
                    self.end_all(signals);
                    return Ok(ended.code());
                }
            }
            let running = self.running();
            if running.is_empty() {
                self.readers.finish(Duration::from_secs(1));
                let lost = u8::from(self.readers.lost.load(Ordering::Acquire));
                return Ok(self.failed.first().map_or(lost, |(_, ended)| ended.code()));
            }
            match signals.wait(deadline)? {
                Event::Child => {}
                Event::TimedOut => {
                    tell!("strata launch: time is up; still running: ranks {}", list(&running));
                    self.end_all(signals);
                    return Ok(124);
                }
                Event::Told(signal) => {
                    tell!("strata launch: told to end by signal {signal}; ending ranks {}", list(&running));
                    self.end_all(signals);
                    return Ok(128u8.wrapping_add(signal as u8));
                }
            }
        }
    }

    fn new_failures(&mut self) -> Result<Vec<(usize, Ended)>> {
        let mut failed = Vec::new();
        for (rank, child) in self.children.iter_mut().enumerate() {
            failed.extend(child.ended()?.filter(|ended| ended.code() != 0).map(|ended| (rank, ended)));
        }
        failed.retain(|(rank, _)| self.failed.iter().all(|(known, _)| known != rank));
        // Of ranks found failed together, one that reported an error itself says more than one that was ended by it.
        failed.sort_by_key(|(_, ended)| matches!(ended, Ended::Signal(_)));
        Ok(failed)
    }

    fn running(&mut self) -> Vec<usize> {
        let running = |child: &mut Child| matches!(child.ended(), Ok(None));
        self.children.iter_mut().enumerate().filter_map(|(rank, child)| running(child).then_some(rank)).collect()
    }

    /// SIGTERM, a grace, SIGKILL; to the process groups of our children and to nobody else.
    fn end_all(&mut self, signals: &Signals) {
        self.children.iter().for_each(Child::terminate_group);
        let deadline = Instant::now().checked_add(self.grace);
        while !self.running().is_empty() {
            match signals.wait(deadline) {
                Ok(Event::Child) => {}
                // A second Ctrl-C, or the end of the grace: no more waiting.
                _ => break,
            }
        }
        self.children.iter().for_each(Child::kill_group);
        self.children.iter_mut().for_each(Child::reap);
        self.readers.finish(Duration::from_secs(1));
    }
}

/// `0, 3-5`
fn list(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |&(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Threads that copy the ranks' output line by line, tagged.
struct Readers {
    started: usize,
    done: (mpsc::Sender<()>, mpsc::Receiver<()>),
    /// Whether some output could not be written, though somebody is there to read it.
    lost: Arc<AtomicBool>,
}

impl Readers {
    fn new() -> Readers {
        Readers { started: 0, done: mpsc::channel(), lost: Arc::default() }
    }

    fn tag(&mut self, rank: usize, from: impl Read + Send + 'static, mut to: impl Write + Send + 'static) {
        self.started += 1;
        let (done, lost) = (self.done.0.clone(), self.lost.clone());
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
                let mut tagged = format!("[{rank}] ").into_bytes();
                tagged.append(&mut line);
                if tagged.last() != Some(&b'\n') {
                    tagged.push(b'\n');
                }
                // One write per line keeps lines of different ranks apart; a closed terminal must not stop the ranks.
                let written = to.write_all(&tagged).and_then(|()| to.flush());
                let failed = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
                if let Some(error) = failed.filter(|_| !lost.swap(true, Ordering::AcqRel)) {
                    tell!("strata launch: the ranks' output cannot be written: {error}");
                }
            }
            let _ = done.send(());
        });
    }

    /// Waits until all output has been copied; a process that outlives its rank may hold a pipe open, hence the limit.
    fn finish(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.started > 0 {
            if self.done.1.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_err() {
                return;
            }
            self.started -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{place, Placement};

    #[test]
    fn every_rank_gets_torchrun_s_variables() {
        let job = Job { nodes: place(&[2, 2], Placement::RoundRobin), sizes: vec![2, 2], port: 5, name: "x".into() };
        let variables = job.variables(2);
        let get = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(get("RANK"), Some("2"));
        assert_eq!(get("LOCAL_RANK"), Some("1"));
        assert_eq!(get("GROUP_RANK"), Some("0"));
        assert_eq!(get("NCCL_HOSTID"), Some("node0.x"));
        assert_eq!(get("MASTER_PORT"), Some("5"));
    }

    #[test]
    fn a_list_of_ranks_is_written_with_runs() {
        assert_eq!(list(&[0, 3, 4, 5]), "0, 3-5");
    }
}
