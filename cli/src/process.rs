//! Child processes in groups of their own, and the signals a launcher waits for.
//!
//! No signal handlers: the signals are blocked and taken with `sigtimedwait`. A child that has ended stays unreaped
//! until [`Child::reap`], so its number, which names its process group, cannot be given to anybody else meanwhile.

use std::fmt;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{ChildStderr, ChildStdout, Command, ExitCode};
use std::time::Instant;
use strata::error::{Error, Result};

/// Makes a closed output end this process without a word, as it ends other commands (`strata info --env | head -1`);
/// Rust's own default is a panic.
pub fn end_on_closed_output() {
    // SAFETY: the action must be valid for SIGPIPE; because the default one is. No other thread has been started yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Ends this process if something could not be written to the standard output: with a message, but for a closed pipe,
/// whose reader wants to hear no more.
fn wrote(outcome: std::io::Result<()>) {
    let Err(error) = outcome else { return };
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        tell!("strata: cannot write to the standard output: {error}");
    }
    std::process::exit(1);
}

/// Writes to the standard output.
pub fn write_out(text: fmt::Arguments<'_>) {
    wrote(std::io::stdout().write_fmt(text));
}

/// Hands on what was written to the standard output.
pub fn flush_out() {
    wrote(std::io::stdout().flush());
}

/// What the reader of the arguments has to say: help, or what is wrong with them.
pub fn said(text: &clap::Error) -> ExitCode {
    let outcome = text.print().and_then(|()| std::io::stdout().flush());
    if !text.use_stderr() {
        wrote(outcome);
    }
    ExitCode::from(text.exit_code() as u8)
}

/// Bytes of memory that processes can still get: the machine's, or what is left of the control group's share. Without an
/// answer of the system, all there may be.
pub fn available_memory() -> u64 {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/meminfo");
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let machine = line.and_then(|line| number(line.trim_end_matches("kB"))).map_or(u64::MAX, |kib| kib << 10);
    let limit = number(&read("/sys/fs/cgroup/memory.max")).unwrap_or(u64::MAX);
    let used = number(&read("/sys/fs/cgroup/memory.current")).unwrap_or(0);
    machine.min(limit.saturating_sub(used))
}

/// Why [`Signals::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A child may have ended.
    Child,
    /// Somebody wants the launcher to end; the signal's number.
    Told(i32),
    /// The deadline has passed.
    TimedOut,
}

/// The blocked set of signals that the launcher waits for.
pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks the signals for this thread and all that it starts.
    pub fn block() -> Result<Signals> {
        let mut set = empty_set();
        for signal in [libc::SIGCHLD, libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the set is initialised; because `empty_set` made it. The signal numbers are valid.
            unsafe { libc::sigaddset(&mut set, signal) };
        }
        // SAFETY: the new set is initialised and the old one may be null; because it was filled above.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } {
            0 => Ok(Signals { set }),
            _ => Err(Error::last_os("pthread_sigmask")),
        }
    }

    /// Waits for one of the signals, or for the deadline.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<Event> {
        // An hour at a time at most, so that any deadline, or none, is a limit that the kernel takes.
        let hour = std::time::Duration::from_secs(3600);
        let left = deadline.map_or(hour, |deadline| deadline.saturating_duration_since(Instant::now()).min(hour));
        let limit = libc::timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: set and limit are valid for reading and the information may be null; because they are locals.
        match unsafe { libc::sigtimedwait(&self.set, std::ptr::null_mut(), &limit) } {
            libc::SIGCHLD => Ok(Event::Child),
            signal if signal > 0 => Ok(Event::Told(signal)),
            _ if deadline.is_some_and(|deadline| Instant::now() >= deadline) => Ok(Event::TimedOut),
            _ => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(Event::Child),
                _ => Err(Error::last_os("sigtimedwait")),
            },
        }
    }
}

fn empty_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: the argument may be uninitialised; because sigemptyset initialises it.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the value is initialised; because sigemptyset has just done so and cannot fail on a valid address.
    unsafe { set.assume_init() }
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit code.
    Exit(i32),
    /// By this signal.
    Signal(i32),
}

impl Ended {
    /// The exit code a shell would give.
    pub fn code(self) -> u8 {
        match self {
            Ended::Exit(code) => code as u8,
            Ended::Signal(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Exit(code) => write!(f, "exited with code {code}"),
            Ended::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// A child process, leader of its own process group.
pub struct Child {
    child: std::process::Child,
    ended: Option<Ended>,
    reaped: bool,
}

impl Child {
    /// Starts the command in a process group of its own. The kernel kills it when the calling thread ends.
    pub fn spawn(mut command: Command) -> std::io::Result<Child> {
        let launcher = std::process::id();
        let none = empty_set();
        let prepare = move || {
            // SAFETY: the argument must be an `unsigned long`; because it is converted to one. No memory is touched.
            if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The launcher may have died before the line above.
            if std::os::unix::process::parent_id() != launcher {
                return Err(std::io::Error::from_raw_os_error(libc::ECHILD));
            }
            // SAFETY: the new set is initialised, the old one may be null; because `empty_set` made it.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) };
            Ok(())
        };
        // SAFETY: the closure must be async-signal-safe; because it only makes three system calls and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        let child = command.process_group(0).spawn()?;
        Ok(Child { child, ended: None, reaped: false })
    }

    /// The read end of its standard output, once, if that is a pipe.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The read end of its standard error, once, if that is a pipe.
    pub fn stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// How it ended, if it has. It is not reaped.
    pub fn ended(&mut self) -> Result<Option<Ended>> {
        if self.ended.is_some() {
            return Ok(self.ended);
        }
        // SAFETY: all zeroes is a valid siginfo_t; because it is a C structure of integers and addresses.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: the information is writable; because it is a local.
        if unsafe { libc::waitid(libc::P_PID, self.child.id(), &mut info, flags) } != 0 {
            return Err(Error::last_os("waitid"));
        }
        // SAFETY: si_pid is set or zero; because waitid succeeded for a child or found none that has ended.
        if unsafe { info.si_pid() } == 0 {
            return Ok(None);
        }
        // SAFETY: si_status is set; because waitid reported a child.
        let status = unsafe { info.si_status() };
        self.ended = Some(if info.si_code == libc::CLD_EXITED { Ended::Exit(status) } else { Ended::Signal(status) });
        Ok(self.ended)
    }

    /// Asks its process group to end, stopped processes included.
    pub fn terminate_group(&self) {
        self.signal_group(libc::SIGTERM);
        self.signal_group(libc::SIGCONT);
    }

    /// Ends its process group.
    pub fn kill_group(&self) {
        self.signal_group(libc::SIGKILL);
    }

    fn signal_group(&self, signal: i32) {
        if !self.reaped {
            // SAFETY: the number must be our group's; because its leader is our child and has not been reaped. No
            // memory is touched.
            unsafe { libc::killpg(self.child.id() as libc::pid_t, signal) };
        }
    }

    /// Waits for its end and lets its number go. To be called when it has ended or has been killed.
    pub fn reap(&mut self) {
        self.reaped = true;
        // The outcome is known already, or does not matter after SIGKILL.
        let _ = self.child.wait();
    }
}

/// Reads a number at an address of process `pid`, as ranks of a node do (`process_vm_readv`).
pub fn read_memory_of(pid: u32, address: usize) -> std::io::Result<u64> {
    let mut value = 0u64;
    let len = std::mem::size_of_val(&value);
    let into = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: len };
    let from = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len };
    // SAFETY: the local range is writable; because it is a local variable. The kernel checks the remote one.
    let got = unsafe { libc::process_vm_readv(pid as libc::pid_t, &into, 1, &from, 1, 0) };
    match got {
        0.. => Ok(value),
        _ => Err(std::io::Error::last_os_error()),
    }
}
