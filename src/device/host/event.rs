//! Events of the host device: marks in the order of a stream, for which other streams and the program wait.
//!
//! Recording an event on a stream marks what is queued there so far. Who waits for the event waits for the latest mark made
//! before the wait began, whichever stream it is on: a later record is another mark, of which earlier waits know nothing. So
//! waits follow the order in which a program queues work, and no ring of streams can wait for itself. An event that has never
//! been recorded has nothing to wait for, as in CUDA.
//!
//! A mark takes the first error that its stream had when it was reached; waits end with it.
#![forbid(unsafe_code)]

use super::stream::HostStream;
use crate::error::{Error, Result};
use crate::sync::locked;
use std::sync::{Arc, Condvar, Mutex, Weak};

/// A place in the order of a stream.
#[derive(Default)]
struct Mark {
    /// What came of what is queued before it, once that has ended.
    outcome: Mutex<Option<Result<()>>>,
    reached: Condvar,
    /// The stream; none where it was reached at once.
    stream: Weak<HostStream>,
}

impl Mark {
    fn reach(&self, outcome: Result<()>) {
        *locked(&self.outcome) = Some(outcome);
        self.reached.notify_all();
    }

    fn wait(&self) -> Result<()> {
        let outcome = self.reached.wait_while(locked(&self.outcome), |outcome| outcome.is_none());
        outcome.unwrap_or_else(|poisoned| poisoned.into_inner()).clone().unwrap_or(Ok(()))
    }
}

/// The latest mark that was made.
#[derive(Default)]
pub struct HostEvent {
    mark: Mutex<Option<Arc<Mark>>>,
}

impl HostEvent {
    /// An event that has not been recorded.
    pub fn new() -> Arc<HostEvent> {
        Arc::default()
    }

    /// Marks what is queued on the stream so far; without a stream, on the null stream, all of which has ended. Waits that have
    /// begun go by the mark before.
    pub fn record(&self, stream: Option<&Arc<HostStream>>) -> Result<()> {
        let mark = Arc::new(Mark { stream: stream.map(Arc::downgrade).unwrap_or_default(), ..Mark::default() });
        // Two threads that record one event leave the mark of the one that came last on either stream.
        let mut latest = locked(&self.mark);
        match stream {
            None => mark.reach(Ok(())),
            Some(stream) => {
                let reached = mark.clone();
                stream.mark(move |outcome| reached.reach(outcome))?;
            }
        }
        *latest = Some(mark);
        Ok(())
    }

    /// Has what is queued on the stream from now on wait. Without a stream, on the null stream, the caller waits.
    pub fn hold(&self, stream: Option<&Arc<HostStream>>) -> Result<()> {
        let Some(stream) = stream else { return self.synchronize() };
        let Some(mark) = self.latest() else { return Ok(()) };
        stream.enqueue(move || mark.wait())
    }

    /// [`Error::InProgress`] while something before the mark has not ended, else the first error of its stream then.
    pub fn query(&self) -> Result<()> {
        let Some(mark) = self.latest() else { return Ok(()) };
        let outcome = locked(&mark.outcome).clone();
        outcome.unwrap_or(Err(Error::InProgress))
    }

    /// Waits until everything before the mark has ended; the first error of its stream then. A job on the stream's own thread
    /// cannot wait for what is behind it.
    pub fn synchronize(&self) -> Result<()> {
        let Some(mark) = self.latest() else { return Ok(()) };
        let is_open = locked(&mark.outcome).is_none();
        if is_open && mark.stream.upgrade().is_some_and(|stream| stream.is_working_here()) {
            let text = "a callback of a stream cannot wait for an event that is recorded behind it on the same stream";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        mark.wait()
    }

    fn latest(&self) -> Option<Arc<Mark>> {
        locked(&self.mark).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A stream whose first job ends when it is told to.
    fn held() -> (Arc<HostStream>, mpsc::Sender<Result<()>>) {
        let stream = HostStream::new();
        let (go, wait) = mpsc::channel();
        stream.enqueue(move || wait.recv_timeout(LIMIT).unwrap_or(Err(Error::Timeout("never told".into())))).unwrap();
        (stream, go)
    }

    #[test]
    fn a_stream_waits_for_what_was_queued_on_another_before_the_record_and_for_nothing_behind_it() {
        let (first, go) = held();
        let second = HostStream::new();
        let event = HostEvent::new();
        event.record(Some(&first)).unwrap();
        let (end, wait) = mpsc::channel::<()>();
        first.enqueue(move || wait.recv_timeout(LIMIT).map_err(|_| Error::Timeout("never told".into()))).unwrap();
        event.hold(Some(&second)).unwrap();
        let (ran, order) = mpsc::channel();
        second.enqueue(move || ran.send(()).map_err(|_| Error::InProgress)).unwrap();
        assert_eq!((event.query(), second.query()), (Err(Error::InProgress), Err(Error::InProgress)));
        assert!(order.try_recv().is_err(), "it waits");
        go.send(Ok(())).unwrap();
        assert_eq!(order.recv_timeout(LIMIT), Ok(()), "what is behind the record holds nobody up");
        assert_eq!((event.query(), event.synchronize(), first.query()), (Ok(()), Ok(()), Err(Error::InProgress)));
        end.send(()).unwrap();
        first.synchronize().unwrap();
        second.synchronize().unwrap();
        [first, second].iter().for_each(|stream| stream.close());
    }

    #[test]
    fn a_wait_goes_by_the_record_before_it_so_no_ring_of_streams_waits_for_itself() {
        let ((one, go_one), (other, go_other)) = (held(), held());
        let event = HostEvent::new();
        event.record(Some(&one)).unwrap();
        event.hold(Some(&other)).unwrap();
        // The record is another mark, behind the wait for the first.
        event.record(Some(&other)).unwrap();
        event.hold(Some(&one)).unwrap();
        [go_one, go_other].iter().for_each(|go| go.send(Ok(())).unwrap());
        assert_eq!([event.synchronize(), one.synchronize(), other.synchronize()], [Ok(()), Ok(()), Ok(())]);
        [one, other].iter().for_each(|stream| stream.close());
    }

    #[test]
    fn an_event_that_was_never_recorded_or_on_the_null_stream_holds_nobody_up() {
        let event = HostEvent::new();
        let stream = HostStream::new();
        for _ in 0..2 {
            event.hold(Some(&stream)).unwrap();
            assert_eq!(
                [event.query(), event.synchronize(), event.hold(None), stream.synchronize()],
                [const { Ok(()) }; 4]
            );
            event.record(None).unwrap();
        }
        stream.close();
        assert!(event.record(Some(&stream)).is_err(), "a stream that takes no more jobs");
        assert_eq!(event.query(), Ok(()), "the mark before stands");
    }

    #[test]
    fn waits_end_with_the_error_that_the_stream_had_at_the_mark() {
        let (stream, go) = held();
        let other = HostStream::new();
        let event = HostEvent::new();
        event.record(Some(&stream)).unwrap();
        event.hold(Some(&other)).unwrap();
        let failed = Err(Error::Remote("rank 3 is lost".into()));
        go.send(failed.clone()).unwrap();
        assert_eq!([event.synchronize(), event.query(), other.synchronize()], std::array::from_fn(|_| failed.clone()));
        assert_eq!(stream.synchronize(), failed, "the stream keeps it, too");
        event.record(Some(&stream)).unwrap();
        assert_eq!(event.synchronize(), Ok(()), "what was told is over");
        [stream, other].iter().for_each(|stream| stream.close());
    }

    #[test]
    fn a_callback_that_would_wait_for_a_record_behind_it_is_refused() {
        let stream = HostStream::new();
        let event = HostEvent::new();
        let ((go, wait), (told, outcome)) = (mpsc::channel::<()>(), mpsc::channel());
        let inner = event.clone();
        let callback = move || {
            wait.recv_timeout(LIMIT).map_err(|_| Error::Timeout("never told".into()))?;
            told.send(inner.synchronize()).map_err(|_| Error::InProgress)
        };
        stream.enqueue(callback).unwrap();
        event.record(Some(&stream)).unwrap();
        go.send(()).unwrap();
        assert!(matches!(outcome.recv_timeout(LIMIT), Ok(Err(Error::InvalidUsage(_)))));
        assert_eq!(event.synchronize(), Ok(()));
        stream.close();
    }
}
