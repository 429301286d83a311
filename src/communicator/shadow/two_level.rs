//! Calls of the program's that Strata's own transports carry between nodes, while the vendor's library does what is inside
//! a node.
//!
//! The companion has an engine then: its plans' calls inside the node are given to the vendor's communicator of the node, on
//! a stream of ours, and what goes over the rails to MPI or TCP.

use super::subcomms::{agreed, SubComms, VendorCall};
use super::vectored::VectoredCall;
use super::{calls, Attached, End, Handle};
use crate::communicator::staging::Provider;
use crate::communicator::{CollectiveCall, Comm, Launch, Operation};
use crate::device::StreamRef;
use crate::dtype::{DataType, Operator, RedOp, Reduction};
use crate::error::{Code, Error, Result, SUCCESS};
use crate::memory::DeviceRegion;
use crate::plan::Collective;
use crate::selection::vendor::obstacle;
use crate::topo::Rank;
use crate::vendor::{driver, Library};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, TryLockError};
use std::time::{Duration, Instant};

/// How long the end of a communicator waits for a call on it that has begun. Longer ones wait for something that only the
/// end itself can end.
const CALL_PATIENCE: Duration = Duration::from_secs(2);

/// Streams that hold nothing now: what is queued on them runs when the graph does.
const CAPTURED: &str = "a stream that is being captured into a graph";
/// Streams before which the driver may run none of Strata's.
const FIRST_PRIORITY: &str = "a stream of the greatest priority, which Strata's own have,";

/// The end of the vendor's communicators that serve one of the program's: no call begins on them after it, and where
/// possible none is under way.
#[derive(Debug)]
pub struct Ending {
    closed: AtomicBool,
    /// Held while a call is made.
    calling: Mutex<()>,
    once: Once,
}

impl Ending {
    /// One that has not come.
    pub fn new() -> Arc<Ending> {
        Arc::new(Ending { closed: AtomicBool::new(false), calling: Mutex::default(), once: Once::new() })
    }

    /// Makes a call unless the end has come.
    pub fn call<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let _calling = crate::sync::locked(&self.calling);
        match self.has_come() {
            true => Err(Error::InvalidUsage("the node's communicator has ended".to_string())),
            false => call(),
        }
    }

    /// Whether no call begins any more.
    pub fn has_come(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends them, once.
    pub fn end(&self, end: impl FnOnce()) {
        self.closed.store(true, Ordering::Release);
        let deadline = Instant::now() + CALL_PATIENCE;
        while matches!(self.calling.try_lock(), Err(TryLockError::WouldBlock)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.once.call_once(end);
    }
}

/// The vendor's communicator of the node.
pub struct NodeComm {
    /// The vendor's library.
    pub library: &'static Library,
    /// The communicator.
    pub comm: Handle,
    /// Whether it has been ended.
    pub ended: Arc<Ending>,
}

/// The operation that the vendor has for an operator. Averages and scalings are ours.
fn code_of(operator: Operator) -> i32 {
    let op = match operator {
        Operator::Sum => RedOp::Sum,
        Operator::Prod => RedOp::Prod,
        Operator::Max => RedOp::Max,
        Operator::Min => RedOp::Min,
        Operator::And => RedOp::BitAnd,
        Operator::Or => RedOp::BitOr,
        Operator::Xor => RedOp::BitXor,
    };
    op.code()
}

impl Provider for NodeComm {
    fn issue(
        &self,
        collective: Collective,
        buffers: [u64; 2],
        count: usize,
        (dtype, operator): (DataType, Option<Operator>),
        stream: Handle,
    ) -> Result<()> {
        let [send, recv] = buffers.map(|address| address as usize);
        let op = operator.map_or(0, code_of);
        let call = VendorCall { collective, send, recv, count, dtype: dtype.code(), op, stream };
        let issue = || calls::collective(&call, collective, self.comm, [send, recv], count, self.library);
        // A call on a communicator whose calls do not wait has been accepted when that is ready.
        let issue = || match issue() {
            Err(super::IN_PROGRESS) => calls::wait_ready(self.library, self.comm, &self.ended.closed),
            issued => issued,
        };
        self.ended.call(|| {
            issue().map_err(|code| {
                let text = format!("{} inside the node: the vendor's library returns {code}", collective.name());
                Error::Remote(text)
            })
        })
    }

    fn check(&self) -> Result<()> {
        let told = match self.ended.call(|| Ok(calls::async_error(self.library, self.comm))) {
            Ok(SUCCESS | super::IN_PROGRESS) => return Ok(()),
            Ok(code) => format!("the vendor's library says {code}"),
            Err(ended) => ended.text().to_string(),
        };
        Err(Error::Remote(format!("a collective inside the node: {told}")))
    }

    fn abort(&self) {
        self.end(End::Abort);
    }
}

impl NodeComm {
    /// Ends it, once.
    pub fn end(&self, end: End) {
        self.ended.end(|| {
            let outcome = match end {
                End::Destroy => calls::destroy(self.library, self.comm),
                End::Abort => calls::abort(self.library, self.comm),
            };
            if let Err(code) = outcome {
                crate::info!("{}", super::told("ending the node's communicator", code));
            }
        });
    }
}

/// Has the vendor make a communicator of each node of one of ours, also of one with a single rank, since all cut calls alike; and work inside
/// it from now on. Collective. None where some node's cannot be made, which is told.
pub(super) fn node_of(comm: &Arc<Comm>, device: i32, library: &'static Library) -> Result<Option<Arc<NodeComm>>> {
    let me = Rank::from_index(comm.rank());
    let members = comm.grid().members(comm.grid().node(me));
    let cancel = AtomicBool::new(false);
    let id = (members.first() == Some(&me)).then(|| calls::unique_id(library)).transpose();
    let told = comm.tell(id.as_ref().ok().and_then(|id| *id).map_or(Vec::new(), |id| id.to_vec()), &cancel)?;
    let id = members.first().and_then(|first| <[u8; 128]>::try_from(&told[first.index()][..]).ok());
    let made = id.map(|id| {
        let place = (members.len(), comm.grid().local(me));
        let deadline = comm.deadline();
        let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let is_over = || is_late() || comm.failure().is_some() || !comm.status.losses().is_empty();
        driver::on_device(device, || calls::init_node(library, id, place, is_over))
    });
    let node = match made {
        Some(Ok(comm)) => Some(Arc::new(NodeComm { library, comm, ended: Ending::new() })),
        _ => None,
    };
    let provided = node.iter().try_for_each(|node| comm.provide(node.clone()));
    let is_fine = provided.is_ok() && node.is_some();
    if agreed(comm, format!("renewed {is_fine}"), &cancel)? && is_fine {
        return Ok(node);
    }
    comm.retire_provider();
    if let Some(Err(code)) = made {
        crate::log::warn(super::told("making the node's communicator anew", code).text());
    }
    Ok(None)
}

impl SubComms {
    /// Tells something once: rank 0 to all who asked for warnings, others to nobody.
    fn tell_once(&self, told: &Once, text: &str) {
        if self.companion().rank() == 0 {
            told.call_once(|| crate::log::write(crate::log::Level::Warn, text));
        }
    }

    /// Which streams operations of the companion cannot be on, if this is one.
    pub(super) fn unfit_stream(&self, stream: Handle) -> Option<&'static str> {
        if driver::is_captured(stream) {
            return Some(CAPTURED);
        }
        let holds_up = self.companion().gpu().is_some_and(|device| device.gpu().may_hold_us_up(stream));
        holds_up.then_some(FIRST_PRIORITY)
    }

    /// Whether operations of the companion can be on a stream; what stands in their way is told.
    fn can_order(&self, stream: Handle) -> bool {
        static TOLD: [Once; 2] = [Once::new(), Once::new()];
        let Some(why) = self.unfit_stream(stream) else { return true };
        self.tell_once(&TOLD[usize::from(why == CAPTURED)], &format!("calls on {why} are the vendor's library's"));
        false
    }

    /// The same of a call of blocks of different sizes. What is decided by is known to all ranks.
    pub fn own_vectored(&self, attached: &Attached, call: &VectoredCall) -> Option<Launch> {
        let VectoredCall { ref call, op, stream, .. } = *call;
        let CollectiveCall { collective, count, dtype, .. } = *call;
        if !self.is_own() || attached.symmetric.load(Ordering::Acquire) {
            return None;
        }
        if obstacle(collective, count, dtype.code(), op).is_some() {
            return None;
        }
        let comm = self.companion().clone();
        let reduction = match collective.reduces() {
            true => Some(Reduction::new(RedOp::from_code(op)?, dtype, comm.nranks())),
            false => None,
        };
        let call = CollectiveCall { reduction, ..call.clone() };
        let decision = self.decide_request(&call.request())?;
        let call = CollectiveCall { decision: Some(decision), ..call };
        let stream = self.can_order(stream).then_some(StreamRef::Gpu(stream))?;
        Some(Launch { comm, operation: Operation::Collective(call), stream })
    }

    /// A call as an operation of the companion, if that is to carry it.
    pub fn own_call(&self, attached: &Attached, call: &VendorCall) -> Option<Launch> {
        let VendorCall { collective, count, dtype, op, stream, .. } = *call;
        let symmetric = attached.symmetric.load(Ordering::Acquire);
        if !self.is_own() || symmetric || call.send == 0 || call.recv == 0 {
            return None;
        }
        let decision = self.decide(call)?;
        if !self.can_order(stream) {
            return None;
        }
        let dtype = DataType::from_code(dtype)?;
        let comm = self.companion().clone();
        let (nranks, me) = (comm.nranks(), Rank::from_index(comm.rank()));
        let reduction = match collective.reduces() {
            true => Some(Reduction::new(RedOp::from_code(op)?, dtype, nranks)),
            false => None,
        };
        let buffer = |address: usize, blocks: usize| {
            let bytes = count.checked_mul(blocks)?.checked_mul(dtype.size())?;
            // SAFETY: the bytes must be usable until the operation has ended; because the program promises that of the
            // buffers of a call, and only the device uses them.
            Some(unsafe { DeviceRegion::new(address as *mut u8, bytes) })
        };
        let collective_call = CollectiveCall {
            collective,
            input: buffer(call.send, collective.input_blocks(nranks, me, Rank(0)))?,
            output: buffer(call.recv, collective.output_blocks(nranks, me, Rank(0)))?,
            count,
            blocks: None,
            joined: None,
            tag: 0,
            dtype,
            reduction,
            factor_at: None,
            residual: None,
            root: Rank(0),
            algorithm: None,
            decision: Some(decision),
        };
        Some(Launch { comm, operation: Operation::Collective(collective_call), stream: StreamRef::Gpu(stream) })
    }
}

/// Launches operations of companions; what the program is told.
pub fn launch(batch: Vec<Launch>) -> Code {
    let usable = batch.iter().try_for_each(|launch| launch.comm.usable());
    match usable.and_then(|()| crate::communicator::launch(batch)) {
        Ok(()) => crate::error::SUCCESS,
        Err(error) => {
            crate::log::failed(error.text());
            error.code()
        }
    }
}
