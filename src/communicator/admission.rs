//! What is refused before anything of a group begins.
#![forbid(unsafe_code)]

use super::launch::Launch;
use super::{Comm, Elements, Operation};
use crate::device::host::stream;
use crate::error::{Error, Result};
use smallvec::SmallVec;
use std::sync::Arc;

/// Refuses operations that could never be run as they are given, before anything of their group begins: nothing has happened
/// then, and the communicators are as good as before. Gets ready what the others need of their communicators' devices.
#[inline(never)]
pub(super) fn admit(batch: &[Launch]) -> Result<()> {
    for Launch { comm, stream, .. } in batch {
        comm.at_home()?;
        if stream.is_null() && stream::is_worker() {
            // It would come after those that are queued behind the callback, which wait for its end.
            let text = "a callback of a stream cannot wait for an operation, so the null stream is refused there; \
                        operations queued behind the callback would come first. Give the operation a stream";
            return Err(Error::InvalidUsage(text.to_string()));
        }
    }
    if batch.iter().any(|launch| !matches!(launch.operation, Operation::Collective(_))) {
        check_own(batch)?;
    }
    batch.iter().try_for_each(|Launch { comm, operation, .. }| match comm.gpu() {
        Some(device) => device.prepare(operation),
        None => Ok(()),
    })
}

/// Refuses messages of a rank to itself that could never be received as they are sent.
fn check_own(batch: &[Launch]) -> Result<()> {
    type Ends<'a> = (SmallVec<[&'a Elements; 4]>, SmallVec<[&'a Elements; 4]>);
    let mut own: SmallVec<[(&Arc<Comm>, Ends<'_>); 1]> = SmallVec::new();
    for Launch { comm, operation, .. } in batch {
        let (peer, elements, receives) = match operation {
            Operation::Send { to, elements, .. } => (to, elements, false),
            Operation::Recv { from, elements, .. } => (from, elements, true),
            Operation::Collective(_) => continue,
        };
        if peer.index() != comm.rank() {
            continue;
        }
        let index = own.iter().position(|(other, _)| Arc::ptr_eq(other, comm)).unwrap_or_else(|| {
            own.push((comm, Ends::default()));
            own.len() - 1
        });
        let (sends, receives_of) = &mut own[index].1;
        if receives {
            receives_of.push(elements)
        } else {
            sends.push(elements)
        }
    }
    for (comm, (sends, receives)) in own {
        let rank = comm.rank();
        if sends.len() != receives.len() {
            let (sends, receives) = (sends.len(), receives.len());
            let text =
                format!("rank {rank} has {sends} sends to itself and {receives} receives: both belong in one group");
            return Err(Error::InvalidUsage(text));
        }
        if let Some((sent, received)) = sends.iter().zip(&receives).find(|(sent, got)| sent.bytes() != got.bytes()) {
            return Err(Error::InvalidUsage(format!("rank {rank} sends itself {sent} and receives {received}")));
        }
    }
    Ok(())
}
