//! A stand-in for the communicators, for building the C interface alone; only single-rank communicators work.
#![forbid(unsafe_code)]

pub mod group;

/// Meeting of the ranks.
pub mod bootstrap {
    /// What ranks that belong together share.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct UniqueId(pub [u8; 128]);
}

pub use bootstrap::UniqueId;

use crate::device::host::stream::StreamRef;
use crate::dtype::{DataType, RedOp, Reduction, ScalarBytes};
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::plan::Collective;
use crate::topo::Rank;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// One operation of a program.
#[derive(Debug, Clone)]
pub enum Operation {
    /// A collective.
    Collective(CollectiveCall),
    /// `ncclSend`
    Send {
        /// The receiver.
        to: Rank,
        /// What is sent.
        data: Region,
    },
    /// `ncclRecv`
    Recv {
        /// The sender.
        from: Rank,
        /// Where it goes.
        data: Region,
    },
}

/// A collective's arguments.
#[derive(Debug, Clone)]
pub struct CollectiveCall {
    /// What is to be done.
    pub collective: Collective,
    /// The send buffer; empty where the rank has none.
    pub input: Region,
    /// The receive buffer; empty where the rank has none.
    pub output: Region,
    /// Elements in one block.
    pub count: usize,
    /// The type of an element.
    pub dtype: DataType,
    /// What a reducing collective computes.
    pub reduction: Option<Reduction>,
    /// The root, where there is one (else rank 0).
    pub root: Rank,
    /// An algorithm named by the call.
    pub algorithm: Option<String>,
}

/// What a program may ask of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommOptions {
    /// Calls wait until they have ended; else they return `InProgress`.
    pub blocking: bool,
    /// A name for messages.
    pub name: Option<String>,
    /// Children share the parent's resources.
    pub split_share: bool,
}

impl Default for CommOptions {
    fn default() -> CommOptions {
        CommOptions { blocking: true, name: None, split_share: false }
    }
}

/// A rank's arguments for [`Comm::init`].
#[derive(Debug, Clone)]
pub struct InitParams {
    /// How many ranks there will be.
    pub nranks: usize,
    /// This one's number.
    pub rank: usize,
    /// One id, or several.
    pub ids: Vec<UniqueId>,
    /// What the program asks for.
    pub options: CommOptions,
    /// The rank's device.
    pub device: i32,
}

/// A group of ranks that operate together.
pub struct Comm {
    rank: usize,
    nranks: usize,
    device: i32,
    options: CommOptions,
    phase: AtomicU32,
    suspended: AtomicBool,
    operations: Mutex<Vec<Option<(DataType, ScalarBytes)>>>,
}

impl Comm {
    fn make(rank: usize, nranks: usize, device: i32, options: CommOptions) -> Arc<Comm> {
        let (phase, suspended) = (AtomicU32::new(0), AtomicBool::new(false));
        Arc::new(Comm { rank, nranks, device, options, phase, suspended, operations: Mutex::default() })
    }

    /// A new unique id.
    pub fn unique_id() -> Result<UniqueId> {
        Ok(UniqueId([7; 128]))
    }

    /// Makes a communicator.
    pub fn init(params: InitParams, _cancel: &Arc<AtomicBool>) -> Result<Arc<Comm>> {
        Ok(Comm::make(params.rank, params.nranks, params.device, params.options))
    }

    /// Splits.
    pub fn split(self: &Arc<Comm>, color: i32, _key: i32, options: CommOptions) -> Result<Option<Arc<Comm>>> {
        Ok((color >= 0).then(|| Comm::make(self.rank, self.nranks, self.device, options)))
    }

    /// Shrinks.
    pub fn shrink(self: &Arc<Comm>, exclude: &[usize], _abort: bool, options: CommOptions) -> Result<Arc<Comm>> {
        Ok(Comm::make(self.rank, self.nranks - exclude.len(), self.device, options))
    }

    /// An id for growing.
    pub fn grow_id(&self) -> Result<UniqueId> {
        Comm::unique_id()
    }

    /// Grows.
    pub fn grow(
        parent: Option<&Arc<Comm>>,
        nranks: usize,
        _id: Option<UniqueId>,
        rank: Option<usize>,
        options: CommOptions,
    ) -> Result<Arc<Comm>> {
        let rank = parent.map(|parent| parent.rank).or(rank).unwrap_or(0);
        Ok(Comm::make(rank, nranks, 0, options))
    }

    /// Ends.
    pub fn finalize(&self) -> Result<()> {
        match self.phase.swap(1, Ordering::AcqRel) {
            0 => Ok(()),
            _ => Err(Error::InvalidArgument("the communicator has been finalized already".to_string())),
        }
    }

    /// Frees.
    pub fn destroy(self: &Arc<Comm>) -> Result<()> {
        self.phase.store(3, Ordering::Release);
        Ok(())
    }

    /// Stops.
    pub fn abort(&self) {
        self.phase.store(3, Ordering::Release);
    }

    /// Revokes.
    pub fn revoke(&self) -> Result<()> {
        self.phase.store(2, Ordering::Release);
        Ok(())
    }

    /// The first failure.
    pub fn failure(&self) -> Option<Error> {
        None
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// All ranks.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// The device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// The options it was made with.
    pub fn options(&self) -> &CommOptions {
        &self.options
    }

    /// An error if no operation can be started.
    pub fn usable(&self) -> Result<()> {
        match self.phase.load(Ordering::Acquire) {
            0 if self.is_suspended() => Err(Error::InvalidUsage("the communicator is suspended".to_string())),
            0 => Ok(()),
            1 => Err(Error::InvalidUsage("the communicator has been finalized".to_string())),
            2 => Err(Error::InvalidUsage("the communicator has been revoked".to_string())),
            _ => Err(Error::InvalidArgument("the communicator has been destroyed".to_string())),
        }
    }

    /// Suspends.
    pub fn suspend(&self) -> Result<()> {
        self.usable()?;
        self.suspended.store(true, Ordering::Release);
        Ok(())
    }

    /// Resumes.
    pub fn resume(&self) -> Result<()> {
        match self.suspended.swap(false, Ordering::AcqRel) {
            true => Ok(()),
            false => Err(Error::InvalidUsage("the communicator is not suspended".to_string())),
        }
    }

    /// Whether it is suspended.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }

    /// Bytes of scratch memory held.
    pub fn scratch_bytes(&self) -> usize {
        0
    }

    /// Makes a PreMulSum operation.
    pub fn create_op(&self, dtype: DataType, scalar: ScalarBytes) -> Result<i32> {
        let mut operations = self.operations.lock().unwrap();
        operations.push(Some((dtype, scalar)));
        Ok(4 + operations.len() as i32)
    }

    /// Forgets an operation.
    pub fn destroy_op(&self, op: i32) -> Result<()> {
        let mut operations = self.operations.lock().unwrap();
        let slot = operations.get_mut((op - 5).max(0) as usize).filter(|slot| op >= 5 && slot.is_some());
        let slot = slot.ok_or_else(|| Error::InvalidArgument(format!("operation {op} is unknown")))?;
        *slot = None;
        Ok(())
    }

    /// What operation `op` does.
    pub fn reduction(&self, op: i32, dtype: DataType) -> Result<Reduction> {
        if let Some(op) = RedOp::from_code(op) {
            return Ok(Reduction::new(op, dtype, self.nranks));
        }
        let operations = self.operations.lock().unwrap();
        match operations.get((i64::from(op) - 5).max(0) as usize) {
            Some(Some((made_for, scalar))) if *made_for == dtype && op >= 5 => {
                Ok(Reduction::pre_mul_sum(dtype, *scalar))
            }
            _ => Err(Error::InvalidArgument(format!("operation {op} is unknown to this communicator"))),
        }
    }
}

/// An operation, where it runs, and in what order.
pub struct Launch {
    /// The communicator.
    pub comm: Arc<Comm>,
    /// What is to be done.
    pub operation: Operation,
    /// The stream that orders it.
    pub stream: StreamRef,
}

/// Launches the operations of a group.
pub fn launch(batch: Vec<Launch>) -> Result<()> {
    for Launch { comm, operation, stream } in batch {
        let Operation::Collective(call) = operation else {
            return Err(Error::InvalidUsage("no transport".to_string()));
        };
        if comm.nranks != 1 {
            return Err(Error::InvalidUsage("no transport".to_string()));
        }
        stream.enqueue(move || {
            call.output.copy_from(call.input);
            Ok(())
        })?;
    }
    Ok(())
}
