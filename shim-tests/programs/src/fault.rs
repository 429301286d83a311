//! Faults of a process, at a chosen call or a moment into it.

use crate::program::{Fault, FaultKind};
use crate::report::{Line, Report};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

/// Brings the fault on, now or a little later, on a thread that may be waited for.
pub fn strike(fault: &Fault, report: &Report) -> Option<JoinHandle<()>> {
    // That of memory lasts as long as the calls, and a thread of ours may not start in it.
    let Some(after) = fault.after_us.filter(|_| fault.kind != FaultKind::Memory) else {
        now(fault, report);
        return None;
    };
    let (fault, report) = (fault.clone(), report.again());
    Some(std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(after));
        now(&fault, &report);
    }))
}

fn now(fault: &Fault, report: &Report) {
    report.write(&Line::Fault { rank: fault.rank, op: fault.op });
    match fault.kind {
        FaultKind::Kill => {
            // SAFETY: no requirement.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        FaultKind::Exit => std::process::exit(0),
        // SAFETY: no requirement.
        FaultKind::ExitNow => unsafe { libc::_exit(0) },
        FaultKind::Pause | FaultKind::Freeze => freeze(fault.amount),
        FaultKind::Descriptors => few_descriptors(fault.amount),
        FaultKind::Glitch | FaultKind::Cut => cut(fault.amount),
        // Of the whole run, or of single calls.
        FaultKind::Memory | FaultKind::SmallShm | FaultKind::Slow => {}
    }
}

/// Lets no packet pass for a while, in the network that only this program has.
fn cut(ms: u64) {
    let tc = |arguments: &str| {
        let done = Command::new("tc").args(arguments.split(' ')).status();
        assert!(done.is_ok_and(|status| status.success()), "tc {arguments}");
    };
    tc("qdisc replace dev lo root tbf rate 8bit burst 10b limit 10b");
    std::thread::sleep(Duration::from_millis(ms));
    tc("qdisc del dev lo root");
}

/// Has a child stop this process, and let it go on. One must do both: it could go on before it is stopped.
fn freeze(ms: u64) {
    // SAFETY: no requirement.
    let process = unsafe { libc::getpid() };
    // SAFETY: the child may only call what is safe in a signal handler; because it sleeps, sends a signal and ends.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: no requirement.
        unsafe { libc::kill(process, libc::SIGSTOP) };
        // SAFETY: no requirement.
        unsafe { libc::usleep(1000 * ms as u32) };
        // SAFETY: no requirement.
        unsafe { libc::kill(process, libc::SIGCONT) };
        // SAFETY: nothing of the parent's may run at the child's end; because `_exit` runs nothing.
        unsafe { libc::_exit(0) };
    }
    // Here, if the child is quick.
    std::thread::sleep(Duration::from_millis(1));
}

/// Sets the soft limit of a resource, and tells the one that was there.
fn limit(resource: libc::__rlimit_resource_t, soft: u64) -> u64 {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer must be writable; because it is a local of ours.
    unsafe { libc::getrlimit(resource, &raw mut found) };
    let before = found.rlim_cur;
    found.rlim_cur = soft.min(found.rlim_max);
    // SAFETY: the pointer must be readable; because it is a local of ours.
    unsafe { libc::setrlimit(resource, &raw const found) };
    before
}

/// Leaves so many free descriptors.
fn few_descriptors(left: u64) {
    let used = crate::usage::descriptors();
    let mut free = (0..).filter(|number| !used.contains(number));
    limit(libc::RLIMIT_NOFILE, free.nth(left as usize).unwrap_or(0));
}

/// Ends a shortage.
pub fn over() {
    limit(libc::RLIMIT_NOFILE, u64::MAX);
}

/// Runs a call while there is little memory left, if that is the fault.
pub struct Squeeze(Option<u64>);

impl Squeeze {
    pub fn new(bytes: Option<u64>) -> Squeeze {
        Squeeze(bytes.map(|bytes| limit(libc::RLIMIT_AS, crate::usage::mapped_bytes() + bytes)))
    }
}

impl Drop for Squeeze {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            limit(libc::RLIMIT_AS, before);
        }
    }
}
