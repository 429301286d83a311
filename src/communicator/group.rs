//! Groups: calls between `ncclGroupStart` and `ncclGroupEnd` are recorded and act together at the outermost end.
//!
//! Each thread has its own group. It holds either operations or management tasks (communicators being made, finalised),
//! never both; communicators that are destroyed in it end when all else of the group has. Tasks of different
//! communicators run at once, each on a thread of its own, so one thread can
//! make all ranks of a communicator; tasks of one communicator run in the order in which they were recorded. An error of
//! any call inside a group makes the outermost end fail with the first error, and nothing of the group is done.
#![forbid(unsafe_code)]

use super::{launch, windows, Again, CollectiveCall, Comm, Launch, Operation};
use crate::device::StreamRef;
use crate::error::{Error, Result, ShortResult};
use crate::memory::DeviceRegion;
use crate::process;
use std::cell::RefCell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Work on a communicator itself rather than an operation on it.
pub struct Task {
    /// Tasks with equal numbers run one after another.
    pub communicator: usize,
    /// Whether the call that ends the group waits for it.
    pub blocking: bool,
    /// Whether the communicator ends with it, so that it comes after everything else of its group.
    pub ends: bool,
    /// Raised when another task of the group has failed, so that this one need not wait for its peer.
    pub cancel: Arc<AtomicBool>,
    /// The work. It reports its outcome where it is asked for later; what it returns is for the waiting call.
    pub work: Box<dyn FnOnce() -> Result<()> + Send>,
}

#[derive(Default)]
struct Group {
    depth: usize,
    error: Option<Error>,
    blocking: Option<bool>,
    /// The buffers of the only operation so far, where it is `known`.
    prepared: Option<Buffers>,
    /// The operation of this thread's last group of a single one that has been prepared. It stays when the group has ended, so that
    /// an equal group counts no references and takes no lock.
    known: Option<PreparedLaunch>,
    launches: Vec<Launch>,
    /// What windows held back and the group has closed: the operations of each closing, all on one communicator.
    released: Vec<Vec<Launch>>,
    tasks: Vec<Task>,
    endings: Vec<Task>,
}

/// Input and output of a collective.
type Buffers = (DeviceRegion, DeviceRegion);

/// An operation that has been prepared ([`super::again`]), on the null stream.
struct PreparedLaunch {
    comm: Arc<Comm>,
    key: Again,
    call: Arc<CollectiveCall>,
}

impl PreparedLaunch {
    /// The operation as any other.
    fn launch(&self, (input, output): Buffers) -> Launch {
        // In a group with others it is decided like them.
        let call = CollectiveCall { input, output, decision: None, ..(*self.call).clone() };
        Launch { comm: self.comm.clone(), operation: Operation::Collective(call), stream: StreamRef::Null }
    }

    fn run(&self, buffers: Buffers) -> Result<()> {
        match self.comm.again(self.key, |_, _| Some(buffers)) {
            Some(done) => Ok(done?),
            None => super::launch_one(self.launch(buffers)),
        }
    }
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

impl Group {
    /// Makes a prepared operation one like any other: it is not the only one.
    fn unprepare(&mut self) {
        if let Some(buffers) = self.prepared.take() {
            self.launches.extend(self.known.as_ref().map(|known| known.launch(buffers)));
        }
    }

    fn has_operations(&self) -> bool {
        !self.launches.is_empty() || !self.released.is_empty()
    }

    fn is_empty(&self) -> bool {
        !self.has_operations() && self.tasks.is_empty() && self.endings.is_empty() && self.prepared.is_none()
    }

    /// Notes what kind of communicator takes part.
    fn join(&mut self, blocking: bool) -> Result<()> {
        match *self.blocking.get_or_insert(blocking) == blocking {
            true => Ok(()),
            false => {
                let text = "blocking and nonblocking communicators cannot take part in one group";
                Err(Error::InvalidArgument(text.to_string()))
            }
        }
    }
}

/// Opens a group, or a group inside the open one.
pub fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Whether a group is open on this thread.
pub fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// Passes an outcome on; inside a group an error is kept for the outermost end.
pub fn noted<T>(outcome: Result<T>) -> Result<T> {
    if let Err(error) = &outcome {
        if *error != Error::InProgress {
            GROUP.with_borrow_mut(|group| {
                if group.depth > 0 {
                    group.error.get_or_insert_with(|| error.clone());
                }
            });
        }
    }
    outcome
}

/// Records an operation, or gives it back to be launched at once where no group is open. `blocking` says of which kind its
/// communicator is.
pub fn record(operation: Launch, blocking: bool) -> Result<Option<Launch>> {
    if operation.comm.has_window() {
        return release(windows::hold(operation)?, blocking).map(|()| None);
    }
    GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Ok(Some(operation));
        }
        group.join(blocking)?;
        group.unprepare();
        group.launches.push(operation);
        Ok(None)
    })
}

/// Launches operations that were held back, or records them where a group is open.
pub fn release(held: Vec<Launch>, blocking: bool) -> Result<()> {
    let alone = GROUP.with_borrow_mut(|group| -> Result<Vec<Launch>> {
        if group.depth == 0 || held.is_empty() {
            return Ok(held);
        }
        group.join(blocking)?;
        group.released.push(held);
        Ok(Vec::new())
    })?;
    if alone.is_empty() {
        return Ok(());
    }
    launch(alone)
}

/// Records an operation that has been prepared, if it is the first of the open group. None where it has to be recorded as
/// any other.
pub fn record_prepared(
    (comm, blocking): (&Arc<Comm>, bool),
    key: Again,
    buffers: impl FnOnce(usize, usize) -> Option<(DeviceRegion, DeviceRegion)>,
) -> Option<ShortResult<()>> {
    let (outcome, former) = GROUP.with_borrow_mut(|group| {
        if !group.is_empty() || group.error.is_some() {
            return None;
        }
        let is_known = |known: &PreparedLaunch| known.key == key && Arc::ptr_eq(&known.comm, comm) && comm.is_ready();
        let mut former = None;
        if !group.known.as_ref().is_some_and(is_known) {
            let call = comm.prepared(key)?;
            former = group.known.replace(PreparedLaunch { comm: comm.clone(), key, call });
        }
        let call = &group.known.as_ref()?.call;
        let prepared = buffers(call.input.len(), call.output.len()).filter(|_| group.join(blocking).is_ok());
        group.prepared = prepared;
        Some((prepared.map(|_| Ok(())), former))
    })?;
    // It may be the last that holds its communicator, so nothing is borrowed here.
    drop(former);
    outcome
}

/// Records a task, or carries it out where no group is open.
pub fn manage(task: Task) -> Result<()> {
    forget();
    let alone = GROUP.with_borrow_mut(|group| -> Result<Option<Task>> {
        if group.depth == 0 {
            return Ok(Some(task));
        }
        group.join(task.blocking)?;
        if task.ends { &mut group.endings } else { &mut group.tasks }.push(task);
        Ok(None)
    })?;
    alone.map_or(Ok(()), |task| carry_out([vec![task], Vec::new()]))
}

/// Keeps no communicator for later groups: one may end now.
fn forget() {
    let former = GROUP.with_borrow_mut(|group| {
        group.unprepare();
        group.known.take()
    });
    drop(former);
}

/// Closes the innermost group; the outermost one acts.
pub fn end() -> Result<()> {
    match close_short() {
        Closed::Empty => return Ok(()),
        Closed::Prepared(known, buffers) => {
            let outcome = known.run(buffers);
            let former = match known.comm.is_ready() {
                true => GROUP.with_borrow_mut(|group| group.known.replace(known)),
                false => Some(known),
            };
            drop(former);
            return outcome;
        }
        Closed::Not => {}
    }
    let Some(group) = close()? else { return Ok(()) };
    // A communicator ends even where its last operations have failed.
    let launched = if group.launches.is_empty() { Ok(()) } else { launch(group.launches) };
    let launched = launched.and_then(|()| rounds(group.released).into_iter().try_for_each(launch));
    if group.tasks.is_empty() && group.endings.is_empty() {
        return launched;
    }
    launched.and(carry_out([group.tasks, group.endings]))
}

/// Closes the innermost group; the outermost one is forgotten, and its estimated time in microseconds returned.
pub fn simulate_end() -> Result<Option<f32>> {
    Ok(close()?
        .map(|group| group.launches.iter().chain(group.released.iter().flatten()).map(estimate_us).sum::<f64>() as f32))
}

/// What a short look at a group has done with it.
enum Closed {
    /// There was nothing in it.
    Empty,
    /// There was only this in it.
    Prepared(PreparedLaunch, Buffers),
    /// It is open still: there is more to it.
    Not,
}

/// Closes the outermost group, if there is nothing in it, or only an operation that has been prepared.
fn close_short() -> Closed {
    GROUP.with_borrow_mut(|group| {
        let has_more = group.launches.len() + group.released.len() + group.tasks.len() + group.endings.len() > 0;
        if group.depth != 1 || group.error.is_some() || has_more {
            return Closed::Not;
        }
        (group.depth, group.blocking) = (0, None);
        let known = group.prepared.take().and_then(|buffers| Some((group.known.take()?, buffers)));
        known.map_or(Closed::Empty, |(known, buffers)| Closed::Prepared(known, buffers))
    })
}

fn close() -> Result<Option<Group>> {
    GROUP.with_borrow_mut(Group::unprepare);
    let group = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Error::InvalidUsage("ncclGroupEnd: not in a group call.".to_string())),
        1 => Ok(Some(std::mem::take(group))),
        _ => {
            group.depth -= 1;
            Ok(None)
        }
    })?;
    match group {
        Some(Group { error: Some(error), .. }) => Err(error),
        Some(group) if group.has_operations() && !group.tasks.is_empty() => {
            Err(Error::InvalidUsage("communicators cannot be made or ended in one group with operations".to_string()))
        }
        group => Ok(group),
    }
}

/// Closings of windows in the order in which they are launched: those of one communicator one after another, since another rank may
/// have made their calls outside of a group, those of several at once, since one thread may have all ranks.
fn rounds(released: Vec<Vec<Launch>>) -> Vec<Vec<Launch>> {
    let mut rounds: Vec<Vec<Launch>> = Vec::new();
    for closing in released {
        let Some(comm) = closing.first().map(|launch| launch.comm.clone()) else { continue };
        let has = |round: &Vec<Launch>| round.iter().any(|launch| Arc::ptr_eq(&launch.comm, &comm));
        match rounds.iter().rposition(has).map_or(0, |last| last + 1) {
            next if next < rounds.len() => rounds[next].extend(closing),
            _ => rounds.push(closing),
        }
    }
    rounds
}

/// A rough time: a logarithmic number of messages at 2 us each, and every byte at 5 GB/s.
fn estimate_us(operation: &Launch) -> f64 {
    let bytes = match &operation.operation {
        Operation::Collective(call) => call.input.len().max(call.output.len()),
        Operation::Send { data, .. } | Operation::Recv { data, .. } => data.len(),
    };
    let rounds = operation.comm.nranks().next_power_of_two().trailing_zeros();
    2.0 * f64::from(rounds.max(1)) + bytes as f64 / 5_000.0
}

/// Carries tasks out, the second list after the first: now if they are of blocking communicators, in the background
/// otherwise.
fn carry_out(tasks: [Vec<Task>; 2]) -> Result<()> {
    let run = |[first, last]: [Vec<Task>; 2]| {
        let outcome = run_all(first);
        outcome.and(run_all(last))
    };
    if tasks.iter().flatten().all(|task| task.blocking) {
        return run(tasks);
    }
    process::thread("strata-init")
        // The tasks keep their outcomes themselves; nobody waits for the thread.
        .and_then(|thread| thread.spawn(move || run(tasks)))
        .map_err(|error| Error::System(format!("starting a thread for a nonblocking communicator: {error}")))?;
    Err(Error::InProgress)
}

/// Runs the tasks, one thread for each communicator, also where there is only one: the calling thread's stack may be too
/// small. Returns the first error in the order of recording.
fn run_all(tasks: Vec<Task>) -> Result<()> {
    let cancels: Vec<_> = tasks.iter().map(|task| task.cancel.clone()).collect();
    let mut queues: Vec<(usize, Vec<(usize, Task)>)> = Vec::new();
    for (index, task) in tasks.into_iter().enumerate() {
        match queues.iter_mut().find(|(communicator, _)| *communicator == task.communicator) {
            Some((_, queue)) => queue.push((index, task)),
            None => queues.push((task.communicator, vec![(index, task)])),
        }
    }
    let run = |queue: Vec<(usize, Task)>| -> Vec<(usize, Error)> {
        let failed = |(index, task): (usize, Task)| run_one(task).err().map(|error| (index, error));
        let failures: Vec<_> = queue.into_iter().filter_map(failed).collect();
        if !failures.is_empty() {
            cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Release));
        }
        failures
    };
    let slots: Vec<_> = queues.into_iter().map(|(_, queue)| (queue[0].0, Mutex::new(Some(queue)))).collect();
    let take = |slot: &Mutex<Option<Vec<(usize, Task)>>>| crate::sync::locked(slot).take().map_or(Vec::new(), run);
    let mut failures = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut failures = Vec::new();
        for (place, (first, slot)) in slots.iter().enumerate() {
            match process::thread("strata-init").and_then(|thread| thread.spawn_scoped(scope, || take(slot))) {
                Ok(thread) => threads.push(thread),
                // One of them can do without.
                Err(_) if place + 1 == slots.len() => failures.extend(take(slot)),
                Err(error) => {
                    cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Release));
                    failures.push((*first, Error::System(format!("starting a thread for a communicator: {error}"))));
                }
            }
        }
        for thread in threads {
            failures.extend(thread.join().unwrap_or_default());
        }
        failures
    });
    failures.sort_by_key(|(index, _)| *index);
    failures.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
}

fn run_one(task: Task) -> Result<()> {
    if task.cancel.load(Ordering::Acquire) {
        return Err(Error::InvalidUsage("another communicator of the group could not be made".to_string()));
    }
    catch_unwind(AssertUnwindSafe(task.work))
        .unwrap_or_else(|_| Err(Error::Internal("making or ending a communicator panicked".to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::sync::Barrier;

    fn task(communicator: usize, work: impl FnOnce() -> Result<()> + Send + 'static) -> Task {
        Task { communicator, blocking: true, ends: false, cancel: Arc::default(), work: Box::new(work) }
    }

    #[test]
    fn an_end_without_a_start_is_invalid_usage() {
        assert!(matches!(end(), Err(Error::InvalidUsage(_))));
        start();
        assert_eq!(end(), Ok(()));
        assert!(matches!(simulate_end(), Err(Error::InvalidUsage(_))));
    }

    #[test]
    fn tasks_of_different_communicators_run_at_once_at_the_outermost_end() {
        let barrier = Arc::new(Barrier::new(3));
        let (sender, receiver) = mpsc::channel();
        start();
        for communicator in 0..3 {
            let (barrier, sender) = (barrier.clone(), sender.clone());
            start();
            // Each waits for the two others: run one after another, they would never end.
            manage(task(communicator, move || {
                barrier.wait();
                sender.send(communicator).map_err(|_| Error::InProgress)
            }))
            .unwrap();
            end().unwrap();
        }
        assert!(receiver.try_recv().is_err(), "an inner end acted");
        end().unwrap();
        assert_eq!(receiver.try_iter().count(), 3);
    }

    #[test]
    fn tasks_of_one_communicator_keep_their_order() {
        let (sender, receiver) = mpsc::channel();
        start();
        for number in 0..10 {
            let sender = sender.clone();
            manage(task(7, move || sender.send(number).map_err(|_| Error::InProgress))).unwrap();
        }
        end().unwrap();
        assert!(receiver.try_iter().eq(0..10));
    }

    #[test]
    fn an_error_inside_a_group_drops_the_group_and_is_told_at_the_outermost_end() {
        start();
        manage(task(0, || panic!("must not run"))).unwrap();
        start();
        let first = noted::<()>(Err(Error::InvalidArgument("first".into())));
        assert!(first.is_err());
        assert!(noted::<()>(Err(Error::Remote("second".into()))).is_err());
        assert_eq!(end(), Ok(()));
        assert_eq!(end(), Err(Error::InvalidArgument("first".into())));
        assert!(!is_open());
        start();
        assert_eq!(end(), Ok(()), "the error must not reach the next group");
    }

    #[test]
    fn a_failed_task_cancels_those_of_other_communicators() {
        start();
        let failing = task(0, || Err(Error::Remote("lost".into())));
        let mut waiting = task(1, || Ok(()));
        let cancel = waiting.cancel.clone();
        waiting.work = Box::new(move || {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !cancel.load(Ordering::Acquire) {
                assert!(std::time::Instant::now() < deadline, "never cancelled");
                std::thread::yield_now();
            }
            Err(Error::InvalidUsage("cancelled".into()))
        });
        manage(failing).unwrap();
        manage(waiting).unwrap();
        assert_eq!(end(), Err(Error::Remote("lost".into())));
    }

    #[test]
    fn blocking_and_nonblocking_communicators_do_not_mix() {
        start();
        manage(task(0, || Ok(()))).unwrap();
        let other = noted(manage(Task { blocking: false, ..task(1, || Ok(())) }));
        assert!(matches!(other, Err(Error::InvalidArgument(_))));
        assert!(matches!(end(), Err(Error::InvalidArgument(_))));
    }
}
