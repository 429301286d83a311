//! Streams of the host device: ordered queues of jobs, each run by a thread of its own.
//!
//! Jobs of one stream run one after another in the order in which they were queued, off the caller's thread. The
//! thread starts with the first job and ends when the stream is closed and its queue is empty, so a stream that is
//! never used costs nothing. The null stream has no queue: what is given to it runs at once on the calling thread.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::process;
use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;

type Work = Box<dyn FnOnce() -> Result<()> + Send>;
type Tell = Box<dyn FnOnce(Result<()>) + Send>;

enum Job {
    /// An operation, or a function of the program.
    Work(Work),
    /// The same, which the job before it may take in.
    Joining(Box<dyn Any + Send>, fn(Box<dyn Any + Send>) -> Result<()>),
    /// A function that is told what came of the jobs before it.
    Tell(Tell),
    /// The same, and who is told otherwise is told as well.
    Mark(Tell),
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Jobs queued or running.
    pending: usize,
    worker: Option<ThreadId>,
    closed: bool,
    failure: Option<Error>,
    /// The first error since a job was told of one.
    untold: Option<Error>,
}

thread_local! {
    /// The stream whose thread this is, by its address; 0 on others.
    static WORKS: Cell<usize> = const { Cell::new(0) };
}

/// Whether this is a stream's thread: what runs here is a job, and whatever is queued behind it waits for its end.
pub fn is_worker() -> bool {
    WORKS.get() != 0
}

/// A job that tells of an error.
fn telling(tell: Tell, failure: Option<Error>) -> Work {
    Box::new(move || {
        tell(failure.map_or(Ok(()), Err));
        Ok(())
    })
}

/// An ordered queue of jobs.
#[derive(Default)]
pub struct HostStream {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} pending)", self.locked().pending)
    }
}

impl HostStream {
    /// A stream with nothing in it.
    pub fn new() -> Arc<HostStream> {
        Arc::default()
    }

    fn locked(&self) -> MutexGuard<'_, Queue> {
        // Jobs run without the lock, so a panic cannot leave the queue half changed.
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether this is the stream's own thread.
    pub fn is_working_here(&self) -> bool {
        WORKS.get() == std::ptr::from_ref(self) as usize
    }

    /// Queues a job. Returns at once; the job's error is kept for [`synchronize`](HostStream::synchronize).
    pub fn enqueue(self: &Arc<HostStream>, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.push(Job::Work(Box::new(job))).map(drop)
    }

    /// Queues a job that is run by `run`, unless the job before it takes it in by [`take_next`](HostStream::take_next). Whether
    /// there are jobs before it.
    pub fn enqueue_joining(
        self: &Arc<HostStream>,
        job: Box<dyn Any + Send>,
        run: fn(Box<dyn Any + Send>) -> Result<()>,
    ) -> Result<bool> {
        self.push(Job::Joining(job, run))
    }

    /// For the job that is running: takes the next one out of the queue if it was queued as joining, is a `T` and `fits`. It has
    /// ended, then, when the running job has.
    pub fn take_next<T: Any + Send>(&self, fits: impl FnOnce(&T) -> bool) -> Option<Box<T>> {
        let mut queue = self.locked();
        let Some(Job::Joining(job, _)) = queue.jobs.front() else { return None };
        if !job.downcast_ref().is_some_and(fits) {
            return None;
        }
        let Some(Job::Joining(job, _)) = queue.jobs.pop_front() else { return None };
        queue.pending -= 1;
        job.downcast().ok()
    }

    /// Queues a job that gets the first error of the jobs since the last one that was queued so. It stays for
    /// [`synchronize`](HostStream::synchronize), too.
    pub fn tell(self: &Arc<HostStream>, job: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        self.push(Job::Tell(Box::new(job))).map(drop)
    }

    /// Queues a job that gets what [`query`](HostStream::query) would return if nothing were behind it.
    pub fn mark(self: &Arc<HostStream>, job: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        self.push(Job::Mark(Box::new(job))).map(drop)
    }

    /// Whether there are jobs before it.
    fn push(self: &Arc<HostStream>, job: Job) -> Result<bool> {
        let mut queue = self.locked();
        if queue.closed {
            return Err(Error::InvalidArgument("the stream has been destroyed".to_string()));
        }
        if queue.worker.is_none() {
            let stream = self.clone();
            let worker = process::thread("strata-stream")
                .and_then(|thread| thread.spawn(move || stream.work()))
                .map_err(|error| Error::System(format!("starting a stream's thread: {error}")))?;
            queue.worker = Some(worker.thread().id());
        }
        queue.jobs.push_back(job);
        queue.pending += 1;
        let is_behind = queue.pending > 1;
        drop(queue);
        self.changed.notify_all();
        Ok(is_behind)
    }

    fn work(&self) {
        WORKS.set(std::ptr::from_ref(self) as usize);
        let mut queue = self.locked();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                let work: Work = match job {
                    Job::Work(work) => work,
                    Job::Joining(job, run) => Box::new(move || run(job)),
                    Job::Tell(tell) => telling(tell, queue.untold.take()),
                    Job::Mark(tell) => telling(tell, queue.failure.clone()),
                };
                drop(queue);
                let outcome = catch_unwind(AssertUnwindSafe(work))
                    .unwrap_or_else(|_| Err(Error::Internal("a job of a stream panicked".to_string())));
                queue = self.locked();
                queue.pending -= 1;
                if let Err(error) = outcome {
                    queue.untold.get_or_insert_with(|| error.clone());
                    queue.failure.get_or_insert(error);
                }
                self.changed.notify_all();
            } else if queue.closed {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
    }

    /// Waits until all jobs queued so far and since have ended. Returns the first error of the jobs since the last
    /// call. A job waits at most as long as its communicator's time limit, so this ends too.
    pub fn synchronize(&self) -> Result<()> {
        let mut queue = self.locked();
        if queue.worker == Some(std::thread::current().id()) {
            return Err(Error::InvalidUsage("a job cannot wait for its own stream".to_string()));
        }
        while queue.pending > 0 {
            queue = self.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        queue.failure.take().map_or(Ok(()), Err)
    }

    /// [`Error::InProgress`] while jobs are queued or running, else the first error, which stays.
    pub fn query(&self) -> Result<()> {
        let queue = self.locked();
        match queue.pending {
            0 => queue.failure.clone().map_or(Ok(()), Err),
            _ => Err(Error::InProgress),
        }
    }

    /// Takes no more jobs. Those that are queued run to their end, then the thread ends; this does not wait for it.
    pub fn close(&self) {
        self.locked().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::StreamRef;
    use std::sync::mpsc;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn jobs_run_in_order_and_off_the_caller_s_thread() {
        let stream = HostStream::new();
        let (sender, receiver) = mpsc::channel();
        for number in 0..100 {
            let sender = sender.clone();
            let job = move || sender.send((number, std::thread::current().id())).map_err(|_| Error::InProgress);
            stream.enqueue(job).unwrap();
        }
        stream.synchronize().unwrap();
        let ran: Vec<_> = receiver.try_iter().collect();
        assert!(ran.iter().map(|(number, _)| *number).eq(0..100));
        assert!(ran.iter().all(|(_, thread)| *thread != std::thread::current().id()));
        stream.close();
    }

    #[test]
    fn a_stream_is_in_progress_until_its_last_job_has_ended() {
        let stream = HostStream::new();
        let (go, wait) = mpsc::channel::<()>();
        stream.enqueue(move || wait.recv_timeout(LIMIT).map_err(|_| Error::Timeout("never told".into()))).unwrap();
        assert_eq!(stream.query(), Err(Error::InProgress));
        go.send(()).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(stream.query(), Ok(()));
        stream.close();
    }

    #[test]
    fn the_first_error_is_told_once_by_synchronize_and_later_jobs_still_run() {
        let stream = HostStream::new();
        let (sender, receiver) = mpsc::channel();
        stream.enqueue(|| Err(Error::Remote("first".into()))).unwrap();
        stream.enqueue(|| panic!("a test's panic")).unwrap();
        stream.enqueue(move || sender.send(()).map_err(|_| Error::InProgress)).unwrap();
        receiver.recv_timeout(LIMIT).unwrap();
        assert_eq!(stream.synchronize(), Err(Error::Remote("first".into())));
        assert_eq!(stream.synchronize(), Ok(()));
        stream.close();
    }

    #[test]
    fn a_job_that_is_told_gets_the_first_error_since_the_last_one_and_synchronize_gets_it_as_well() {
        let stream = HostStream::new();
        let (sender, receiver) = mpsc::channel();
        let tell = |sender: &mpsc::Sender<Result<()>>| {
            let sender = sender.clone();
            stream.tell(move |outcome| sender.send(outcome).unwrap()).unwrap();
        };
        tell(&sender);
        stream.enqueue(|| Err(Error::Remote("first".into()))).unwrap();
        stream.enqueue(|| Err(Error::Remote("second".into()))).unwrap();
        tell(&sender);
        tell(&sender);
        stream.tell(|_| panic!("a test's panic")).unwrap();
        tell(&sender);
        assert_eq!(stream.synchronize(), Err(Error::Remote("first".into())));
        let told: Vec<Result<()>> = receiver.try_iter().collect();
        let panicked = Err(Error::Internal("a job of a stream panicked".into()));
        assert_eq!(told, [Ok(()), Err(Error::Remote("first".into())), Ok(()), panicked]);
        stream.enqueue(|| Err(Error::Remote("third".into()))).unwrap();
        assert_eq!(stream.synchronize(), Err(Error::Remote("third".into())));
        tell(&sender);
        stream.synchronize().unwrap();
        let kept = receiver.recv_timeout(LIMIT).unwrap();
        assert_eq!(kept, Err(Error::Remote("third".into())), "synchronize leaves it to be told");
        stream.close();
    }

    #[test]
    fn a_job_takes_in_the_next_ones_as_long_as_they_fit_and_stand_for_themselves_otherwise() {
        static RAN: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        let note = |job: Box<dyn std::any::Any + Send>| {
            RAN.lock().unwrap().push(*job.downcast::<u8>().expect("a number"));
            Ok(())
        };
        let stream = HostStream::new();
        let (go, wait) = mpsc::channel::<()>();
        let (sender, taken) = mpsc::channel();
        let inner = stream.clone();
        let takes = move || {
            wait.recv_timeout(LIMIT).map_err(|_| Error::Timeout("never told".into()))?;
            while let Some(number) = inner.take_next(|number: &u8| *number < 3) {
                sender.send(*number).unwrap();
            }
            assert!(inner.take_next(|_: &u64| true).is_none(), "another type");
            Ok(())
        };
        stream.enqueue(takes).unwrap();
        for number in [1, 2, 3, 1] {
            assert_eq!(stream.enqueue_joining(Box::new(number as u8), note), Ok(true));
        }
        stream.enqueue(|| Ok(())).unwrap();
        assert!(stream.take_next(|_: &u8| false).is_none());
        go.send(()).unwrap();
        stream.synchronize().unwrap();
        assert!(taken.try_iter().eq([1, 2]));
        assert_eq!(*RAN.lock().unwrap(), [3, 1]);
        assert_eq!(stream.query(), Ok(()));
        assert_eq!(stream.enqueue_joining(Box::new(7u8), note), Ok(false));
        stream.synchronize().unwrap();
        stream.close();
    }

    #[test]
    fn a_closed_stream_finishes_its_jobs_ends_its_thread_and_takes_no_more() {
        let stream = HostStream::new();
        let (sender, receiver) = mpsc::channel();
        stream.enqueue(move || sender.send(()).map_err(|_| Error::InProgress)).unwrap();
        stream.close();
        receiver.recv_timeout(LIMIT).unwrap();
        assert!(matches!(stream.enqueue(|| Ok(())), Err(Error::InvalidArgument(_))));
        let deadline = std::time::Instant::now() + LIMIT;
        while Arc::strong_count(&stream) > 1 {
            assert!(std::time::Instant::now() < deadline, "the stream's thread never ended");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_job_that_waits_for_its_own_stream_is_refused() {
        let stream = HostStream::new();
        let inner = stream.clone();
        stream.enqueue(move || inner.synchronize()).unwrap();
        assert!(matches!(stream.synchronize(), Err(Error::InvalidUsage(_))));
        stream.close();
    }

    #[test]
    fn the_null_stream_runs_a_job_on_the_calling_thread() {
        let here = std::thread::current().id();
        let job = move || match std::thread::current().id() == here {
            true => Err(Error::Remote("here".into())),
            false => Ok(()),
        };
        assert_eq!(StreamRef::Null.enqueue(job), Err(Error::Remote("here".into())));
    }
}
