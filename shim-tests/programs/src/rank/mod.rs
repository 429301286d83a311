//! One rank of a program, on a thread of its own: takes its part in the operations, compares every return code and
//! every byte with the model, and says what was otherwise.

mod buffers;
mod calls;
mod comms;
mod recover;

use crate::board::{Board, Place};
use crate::fault::{self, Squeeze};
use crate::gpu::Gpu;
use crate::library::{Comm, Library, Stream, IN_PROGRESS, SUCCESS};
use crate::program::{Action, Fault, FaultKind, Misuse, Op, Program, World};
use crate::report::{Line, Report};
use calls::Pending;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a rank waits for what other ranks of the tester do, such as handing over an id.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What went otherwise than the model has it.
#[derive(Debug)]
pub enum Trouble {
    /// A call returned an error.
    Failed { comm: Option<usize>, code: i32, text: String },
    /// Memory or a fact is wrong, which nothing excuses.
    Wrong(String),
}

/// Communicators of `ncclCommInitAll`, handed from the thread that made them to their ranks' threads.
pub type Handed = Mutex<HashMap<usize, Vec<usize>>>;

/// A rank.
pub struct Rank<'a> {
    pub program: &'a Program,
    pub library: &'a Library,
    pub board: &'a Board,
    pub report: &'a Report,
    pub handed: &'a Handed,
    pub me: World,
    comms: Vec<Comm>,
    /// Communicators that this rank has given up, because of a fault.
    lost: Vec<bool>,
    /// Communicators that a fault may end, by the model.
    tainted: Vec<bool>,
    /// There is a fault that fails calls.
    may_fail: bool,
    gpu: Option<Gpu>,
    streams: [Stream; 3],
    pending: Vec<Pending>,
    /// Brings a fault on.
    strike: Option<JoinHandle<()>>,
}

impl<'a> Rank<'a> {
    pub fn new(
        program: &'a Program,
        library: &'a Library,
        board: &'a Board,
        report: &'a Report,
        handed: &'a Handed,
        me: World,
    ) -> Rank<'a> {
        let comms = program.comms.len();
        Rank {
            program,
            library,
            board,
            report,
            handed,
            me,
            comms: vec![std::ptr::null_mut(); comms],
            lost: vec![false; comms],
            tainted: program.tainted(),
            may_fail: program.fault.as_ref().is_some_and(|fault| fault.kind.fails_calls()),
            gpu: None,
            streams: [std::ptr::null_mut(); 3],
            pending: Vec::new(),
            strike: None,
        }
    }

    /// Works on a GPU's memory from here.
    pub fn enter(&mut self, gpu: Gpu) -> Result<(), String> {
        gpu.enter(self.me % 8)?;
        self.gpu = Some(gpu);
        Ok(())
    }

    /// Goes through the program. What is wrong has been reported when this is false.
    pub fn run(&mut self) -> bool {
        for (index, op) in self.program.ops.iter().enumerate() {
            if !self.program.takes_part(op, self.me) {
                continue;
            }
            self.board.note(self.me, Place::In(index));
            self.before(index, op);
            let done = self.act(index, op);
            if self.program.recovers_by_shrink() && matches!(op.action, Action::Init { comm: 0, .. }) {
                // The survivors may shrink it, so all of them have it.
                let _ = self.board.meet(index, self.program.comms[0].ranks.len(), PATIENCE / 2);
            }
            if let Err(trouble) = done.or_else(|trouble| self.excuse(index, trouble)) {
                self.complain(index, trouble);
                return false;
            }
        }
        let last = self.program.ops.len();
        match self.settle_pending(|_| true).or_else(|trouble| self.excuse(last, trouble)) {
            Ok(()) => {}
            Err(trouble) => {
                self.complain(last, trouble);
                return false;
            }
        }
        self.recover().map_err(|trouble| self.complain(last, trouble)).is_ok()
    }

    /// How long this rank waits for other ranks of the tester, for the sake of a communicator.
    fn patience(&self, comm: usize) -> Duration {
        if self.tainted[comm] {
            PATIENCE / 8
        } else {
            PATIENCE
        }
    }

    fn complain(&self, op: usize, trouble: Trouble) {
        let text = match trouble {
            Trouble::Failed { code, text, .. } => format!("code {code}: {text}"),
            Trouble::Wrong(text) => text,
        };
        self.report.write(&Line::Wrong { rank: self.me, op, text });
        self.board.note(self.me, Place::Failed);
    }

    /// With a fault about an error is noted, and the communicator given up; whether it was right the judge knows, who sees
    /// all ranks.
    fn excuse(&mut self, op: usize, trouble: Trouble) -> Result<(), Trouble> {
        match trouble {
            Trouble::Failed { comm: Some(comm), code, text } if self.may_fail => {
                self.report.write(&Line::Refused { rank: self.me, op, comm, code, text });
                self.lose(comm);
                for call in self.program.ops.get(op).map(|op| op.action.uses()).unwrap_or_default() {
                    self.lose(call);
                }
                Ok(())
            }
            trouble => Err(trouble),
        }
    }

    /// Gives a communicator up: whatever runs on it is ended.
    fn lose(&mut self, comm: usize) {
        if std::mem::replace(&mut self.lost[comm], true) || self.comms[comm].is_null() {
            return;
        }
        let handle = std::mem::replace(&mut self.comms[comm], std::ptr::null_mut());
        if let (Some(revoke), true) = (self.library.revoke, comm == 0 && self.program.recovers_by_shrink()) {
            self.comms[comm] = handle;
            // SAFETY: the communicator must be alive; because it was neither destroyed nor aborted yet.
            unsafe { revoke(handle, 0) };
            return;
        }
        // SAFETY: the communicator must be alive and not be used again; because it was neither destroyed nor aborted
        // yet, and it was taken out of the list.
        unsafe { (self.library.abort)(handle) };
    }

    /// Sleeps and forks, as the program has it.
    fn before(&mut self, index: usize, op: &Op) {
        for &(rank, ms) in &op.pauses {
            if rank == self.me {
                std::thread::sleep(Duration::from_millis(ms));
            }
        }
        if op.forks.contains(&self.me) {
            fork_a_child();
        }
        if let Some(fault) = self.program.fault.as_ref().filter(|fault| (fault.rank, fault.op) == (self.me, index)) {
            self.strike = fault::strike(fault, self.report);
        }
    }

    fn act(&mut self, index: usize, op: &Op) -> Result<(), Trouble> {
        match &op.action {
            Action::Init { comm, ids, config } => self.init(*comm, *ids, *config),
            Action::InitAll { comm } => self.init_all(*comm),
            Action::Split { parent, colors, keys, children } => self.split(*parent, colors, keys, children),
            Action::Shrink { parent, child, abort } => self.shrink(*parent, *child, *abort),
            Action::Grow { parent, child } => self.grow(*parent, *child),
            Action::Calls { calls, nesting } => self.calls(index, calls, *nesting),
            Action::Sync { .. } => self.settle_pending(|_| true),
            Action::Refused { comm, what, .. } => self.refused(*comm, *what),
            Action::Suspend { comm } => self.suspend(*comm),
            Action::Revoke { comm } => self.revoke(index, *comm),
            Action::End { comm, ranks } => {
                let how = ranks.iter().find(|(rank, _)| *rank == self.me).map(|&(_, how)| how);
                how.map_or(Ok(()), |how| self.end(*comm, how))
            }
        }
    }

    /// Little memory for the library from here to the value's end, if that is the fault.
    fn squeeze(&self) -> Squeeze {
        let here = |fault: &&Fault| {
            fault.kind == FaultKind::Memory && fault.rank == self.me && self.board.place(self.me) == Place::In(fault.op)
        };
        Squeeze::new(self.program.fault.as_ref().filter(here).map(|fault| fault.amount))
    }

    /// An error unless a call returned success.
    fn must(&self, comm: usize, what: &str, code: i32) -> Result<(), Trouble> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = format!("{what} returned {code}: {}", self.library.text(std::ptr::null_mut()));
        Err(Trouble::Failed { comm: Some(comm), code, text })
    }

    /// The same for a call that may go on after it returned; alone on a communicator that does not wait, it has been
    /// issued when this returns.
    fn accepted(&self, comm: usize, what: &str, code: i32) -> Result<(), Trouble> {
        let code = self.settle(comm, code);
        self.must(comm, what, code)
    }

    /// Waits until a communicator is no longer in progress.
    fn settle(&self, comm: usize, code: i32) -> i32 {
        self.settle_handle(self.comms[comm], code)
    }

    fn settle_handle(&self, handle: Comm, code: i32) -> i32 {
        let mut code = code;
        let end = Instant::now() + 2 * PATIENCE;
        while code == IN_PROGRESS && Instant::now() < end {
            let mut state = 0;
            // SAFETY: the communicator must be alive; because only this thread ends it.
            let asked = unsafe { (self.library.async_error)(handle, &raw mut state) };
            code = if asked == SUCCESS { state } else { asked };
            if code == IN_PROGRESS {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        code
    }

    /// A stream by its number.
    fn stream(&mut self, number: usize) -> Result<Stream, Trouble> {
        if let (true, Some(gpu)) = (number > 0 && self.streams[number].is_null(), self.gpu) {
            let made = gpu.stream().map_err(|text| Trouble::Failed { comm: None, code: -1, text })?;
            self.streams[number] = made;
        }
        if let (true, true, Some(create)) = (number > 0, self.streams[number].is_null(), self.library.stream_create) {
            // SAFETY: the pointer must be writable; because it is a field of ours.
            let code = unsafe { create(&raw mut self.streams[number]) };
            if code != SUCCESS {
                return Err(Trouble::Failed { comm: None, code, text: "strataStreamCreate".into() });
            }
        }
        Ok(self.streams[number])
    }

    /// Waits for calls and checks what they left behind.
    fn settle_pending(&mut self, which: impl Fn(&Pending) -> bool) -> Result<(), Trouble> {
        let (mine, others) = std::mem::take(&mut self.pending).into_iter().partition(which);
        self.pending = others;
        let mut outcome = Ok(());
        let mut codes = [SUCCESS; 3];
        for (number, code) in codes.iter_mut().enumerate() {
            if let (Some(gpu), true) = (self.gpu, mine.iter().any(|call: &Pending| call.stream == number)) {
                *code = gpu.synchronize(self.streams[number]);
                continue;
            }
            let used = mine.iter().any(|call: &Pending| call.stream == number) && !self.streams[number].is_null();
            if let (true, Some(synchronize)) = (used, self.library.stream_synchronize) {
                // SAFETY: the stream must be alive; because it is until this rank ends.
                *code = unsafe { synchronize(self.streams[number]) };
            }
        }
        let texts = self.library.text(std::ptr::null_mut());
        for call in mine {
            let comm = call.comm;
            let mut checked = Ok(());
            if !self.lost[comm] && !self.comms[comm].is_null() {
                let code = codes[call.stream];
                let state = self.settle(comm, IN_PROGRESS);
                // With a fault the stream's error may be another communicator's.
                // A GPU's stream goes on after a failed call, too.
                let succeeded = (code == SUCCESS && (self.gpu.is_none() || state == SUCCESS))
                    || (self.program.fault.is_some() && state == SUCCESS);
                let (code, what) = match succeeded {
                    true => (state, "its calls succeeded, but ncclCommGetAsyncError says"),
                    false => (code, "strataStreamSynchronize returned"),
                };
                let texts = if succeeded { self.library.text(std::ptr::null_mut()) } else { texts.clone() };
                let text = format!("{what} {code}: {texts}");
                // What has succeeded must be right, whatever became of the communicator later.
                checked = if succeeded { call.check().map_err(Trouble::Wrong) } else { Ok(()) };
                if code != SUCCESS {
                    checked = checked.and(Err(Trouble::Failed { comm: Some(comm), code, text }));
                }
            }
            if self.may_fail && matches!(checked, Err(Trouble::Failed { .. })) {
                // The memory is the library's until the communicator has been given up.
                checked = checked.or_else(|trouble| self.excuse(self.program.ops.len(), trouble));
            }
            match checked {
                Ok(()) => outcome = outcome.and(self.release(call)),
                Err(trouble) => {
                    std::mem::forget(call);
                    outcome = outcome.and(Err(trouble));
                }
            }
        }
        outcome
    }

    /// A call that must be refused at once.
    fn refused(&mut self, comm: usize, what: Misuse) -> Result<(), Trouble> {
        if self.lost[comm] {
            return Ok(());
        }
        let handle = self.comms[comm];
        let mut data = [0u64; 4];
        let (at, null) = (data.as_mut_ptr().cast(), std::ptr::null_mut());
        let nranks = self.program.comms[comm].ranks.len() as c_int;
        let code = match what {
            // SAFETY: the buffer must have 8 floats; because it has. The call is refused before it is touched.
            Misuse::Root => unsafe { (self.library.bcast)(at, 8, 7, nranks, handle, null) },
            // SAFETY: the buffer must be there until the call has ended; because the call is refused before it is
            // touched.
            Misuse::Type => unsafe { (self.library.all_gather)(at, at, 1, 99, handle, null) },
            // SAFETY: the buffer must have 8 floats; because it has. The call is refused before it is touched.
            Misuse::Operation => unsafe { (self.library.all_reduce)(at, at, 8, 7, 1 << 30, handle, null) },
            // SAFETY: the buffer must have 8 floats; because it has. The call is refused before it is touched.
            Misuse::Peer => unsafe { (self.library.send)(at, 8, 7, -3, handle, null) },
            // SAFETY: the communicator must be alive; because only this thread ends it. Without buffers the call is
            // refused.
            Misuse::NullBuffer => unsafe { (self.library.all_reduce)(null, null, 8, 7, 0, handle, null) },
        };
        if code == crate::library::INVALID_ARGUMENT || (self.tainted[comm] && code != SUCCESS) {
            return Ok(());
        }
        Err(Trouble::Wrong(format!("{what:?}: returned {code} and not {}", crate::library::INVALID_ARGUMENT)))
    }
}

impl Drop for Rank<'_> {
    fn drop(&mut self) {
        for stream in self.streams {
            if let (false, Some(gpu)) = (stream.is_null(), self.gpu) {
                gpu.end_stream(stream);
            } else if let (false, Some(destroy)) = (stream.is_null(), self.library.stream_destroy) {
                // SAFETY: the stream must be alive; because it was made here and is ended once.
                unsafe { destroy(stream) };
            }
        }
    }
}

/// A child that does nothing and outlives its parent a little, so that what it inherited stays open.
fn fork_a_child() {
    // SAFETY: no requirement. Asked here: the child may come to run when its parent has ended.
    let parent = unsafe { libc::getpid() };
    // SAFETY: the child may only call what is safe in a signal handler; because it asks for its parent, sleeps and ends.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: no requirement.
        while unsafe { libc::getppid() } == parent {
            // SAFETY: no requirement.
            unsafe { libc::usleep(20_000) };
        }
        // SAFETY: no requirement.
        unsafe { libc::usleep(300_000) };
        // SAFETY: nothing of the parent's may run at the child's end; because `_exit` runs nothing.
        unsafe { libc::_exit(0) };
    }
}
