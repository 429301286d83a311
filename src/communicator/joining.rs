//! Sends and receives that join those before them on their stream.
//!
//! A stream does one job after another, so two ranks that each put a long send and then a receive on one stream would wait for
//! each other. On communicators that have [independent](super::independent) messages, the thread that waits for a send therefore
//! takes in what comes next on its stream, as long as these are messages for whose order nobody could tell
//! ([`IndependentBatch::lets_in`](super::independent::IndependentBatch::lets_in)): a receive into other memory, say. Whatever else is
//! behind them waits for all.
#![forbid(unsafe_code)]

use super::batch::{drive, Active, OperationBatch};
use super::StreamRef;
use crate::error::{Error, Result};
use std::any::Any;
use std::sync::Arc;

/// A stream's job.
fn run(batch: Box<dyn Any + Send>) -> Result<()> {
    let batch = batch.downcast::<OperationBatch>();
    let mut batch = batch.map_err(|_| Error::Internal("a stream's job that is no operation".to_string()))?;
    drive(std::slice::from_mut(&mut *batch))
}

impl OperationBatch {
    /// Puts the operations on a stream. A failure is kept in the communicator; the stream goes on, as a GPU stream would.
    pub fn enqueue(mut self, stream: &StreamRef) -> Result<()> {
        let StreamRef::Stream(host) = stream else {
            return stream.enqueue(move || drive(std::slice::from_mut(&mut self)));
        };
        if !self.independent {
            return host.enqueue(move || drive(std::slice::from_mut(&mut self)));
        }
        let comm = self.comm.clone();
        self.stream = Some(host.clone());
        if host.enqueue_joining(Box::new(self), run)? {
            comm.look_again();
        }
        Ok(())
    }

    /// Takes in the next operations of its stream, if these are messages that need not wait for what is under way.
    pub fn join_next(&mut self) {
        let (Some(stream), Active::Independent(batch)) = (&self.stream, &self.active) else { return };
        if !self.messages.is_empty() {
            return;
        }
        let fits = |next: &OperationBatch| {
            Arc::ptr_eq(&next.comm, &self.comm) && batch.lets_in(&next.messages, self.comm.rank)
        };
        if let Some(mut next) = stream.take_next::<OperationBatch>(fits) {
            self.messages.append(&mut next.messages);
            self.followed_messages.append(&mut next.followed_messages);
            self.records.join(&mut next.records);
        }
    }
}
