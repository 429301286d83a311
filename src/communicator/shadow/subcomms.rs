//! A communicator's subcommunicators: the vendor's communicators of the node and of the rail, and how calls run over them.

use super::scratch::StreamScratch;
use super::two_level::{self, Ending, NodeComm};
use super::{calls, told, Attached, End, Handle};
use crate::algorithms::{build_with_calls, Choice};
use crate::carrier::Carrier;
use crate::communicator::adapt::AdaptOptions;
use crate::communicator::Comm;
use crate::dtype::DataType;
use crate::error::{Code, Error, Result, SUCCESS};
use crate::interface::pointer::Ptr;
use crate::interface::types::CommHandle;
use crate::plan::{Buffer, Collective, LinkLevel, Shape};
use crate::selection::vendor::{self, Vendor};
use crate::selection::{can_profit, Context, Decision, Executor, Front, Request, Selector};
use crate::topo::Rank;
use crate::vendor::calls::{VendorAddress, VendorStream, INSIDE_NAMES, SUB_NAMES};
use crate::vendor::plan::{lower, VendorPlan};
use crate::vendor::{driver, Library};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// One collective as the program calls it. Numbers are the program's.
#[derive(Debug, Clone, Copy)]
pub struct VendorCall {
    /// What is to be done.
    pub collective: Collective,
    /// The send buffer.
    pub send: VendorAddress,
    /// The receive buffer.
    pub recv: VendorAddress,
    /// Elements in one block.
    pub count: usize,
    /// The type of an element.
    pub dtype: i32,
    /// The operation; 0 where nothing is reduced.
    pub op: i32,
    /// The stream that orders it.
    pub stream: VendorStream,
}

/// The plans that were asked for: by the collective and whether it works in place; none where two levels cannot do it.
type Plans = HashMap<(Collective, bool), Option<Arc<VendorPlan>>>;

/// The vendor's communicators that serve one of the program's, and the plans over them.
pub struct SubComms {
    /// None where each rank has a node to itself.
    node: Option<Handle>,
    /// None where Strata's own transports carry what goes between nodes.
    rail: Option<Handle>,
    /// The program's number of the communicator's GPU.
    device: i32,
    selector: Selector,
    companion: Arc<Comm>,
    scratch: StreamScratch,
    plans: Mutex<Plans>,
    ended: Arc<Ending>,
    /// Those of the node since ranks were lost.
    later: Mutex<Vec<Arc<NodeComm>>>,
}

/// A call with its plan, ready to be issued phase by phase.
pub struct Prepared {
    /// The program's communicator.
    pub attached: Arc<Attached>,
    /// The call as the program made it.
    pub call: VendorCall,
    plan: Arc<VendorPlan>,
    /// Bytes of scratch memory that it needs.
    pub scratch_bytes: usize,
    /// Where they are, once the call is about to be issued.
    pub scratch: VendorAddress,
    element: usize,
    /// Elements of a block that the plan divides evenly; the others follow it.
    whole: usize,
}

pub(super) fn agreed(companion: &Comm, said: String, cancel: &AtomicBool) -> Result<bool> {
    let told = companion.tell(said.clone().into_bytes(), cancel)?;
    Ok(told.iter().all(|other| *other == said.as_bytes()))
}

/// Splits a communicator off the program's.
fn split_off(
    parent: Handle,
    (level, color, key): (&str, usize, usize),
    library: &Library,
    cancel: &AtomicBool,
) -> std::result::Result<Handle, Code> {
    let name = CString::new(format!("{SUB_NAMES}{level}{color}")).unwrap_or_default();
    // On the heap: a making that is cancelled goes on on the vendor's threads, which write here when it ends.
    let made = Box::into_raw(Box::new(CommHandle::NULL));
    // SAFETY: the name must outlive the call; because it is a local of this function.
    let mut options = unsafe { library.sub_config(&name) };
    // SAFETY: the place must stay until the making has ended; because it is leaked if it has not ended by then.
    let out = unsafe { Ptr::to(made) };
    // SAFETY: the options must be there during the call; because they are a local.
    let options = unsafe { Ptr::to(&mut options) };
    // SAFETY: the parent must be alive and used by nobody else meanwhile; because the program waits for its
    // making, or is told that it is in progress.
    let outcome = library
        .call(|vendor| unsafe { vendor.ncclCommSplit(CommHandle(parent), color as i32, key as i32, out, options) });
    let outcome = match outcome {
        Err(super::IN_PROGRESS) => calls::wait_ready(library, parent, cancel),
        outcome => outcome,
    };
    if outcome == Err(super::IN_PROGRESS) {
        // SAFETY: the place must stay; because the box is leaked.
        super::give_up(parent, unsafe { AtomicUsize::from_ptr(made.cast()) });
        return Err(super::IN_PROGRESS);
    }
    // SAFETY: the place must be a box of ours that nobody else uses; because the making has ended.
    let made = unsafe { Box::from_raw(made) };
    outcome.map(|()| made.0)
}

impl SubComms {
    /// Makes the node's and the rail's communicator out of the program's, if all ranks can and it can pay. Collective.
    pub fn make(
        attached: &Attached,
        companion: &Arc<Comm>,
        library: &Library,
        cancel: &AtomicBool,
    ) -> Result<Option<SubComms>> {
        let (grid, config) = (companion.grid(), &companion.config);
        let vendor = Vendor { version: library.version, rccl: library.is_rccl() };
        let said = format!("{vendor:?} {}", library.can_split());
        if !agreed(companion, said, cancel)? {
            if companion.rank() == 0 {
                crate::log::notice("the ranks have different releases of the vendor's library: it serves them alone");
            }
            return Ok(None);
        }
        let carrier = if companion.gpu().is_some() { config.inter.in_front() } else { Carrier::Vendor };
        let front = Some(Front { library: vendor, carrier, outlasts: companion.survivors.get().is_some() });
        let context = Context { front, ..companion.selector.context() };
        if !library.can_split() || !can_profit(&context) {
            return Ok(None);
        }
        let me = Rank::from_index(companion.rank());
        let (node, local) = (grid.node(me).index(), grid.local(me));
        let parent = attached.handle;
        let split = |wanted: bool, level: &str, color: usize, key: usize| match wanted {
            true => split_off(parent, (level, color, key), library, cancel).map(Some),
            false => Ok(None),
        };
        // Calls that Strata carries are recorded as they are, others as their phases: names tell them apart.
        let inside = INSIDE_NAMES.strip_prefix(SUB_NAMES).filter(|_| carrier.is_own());
        let node_comm = split(grid.nrails() > 1, inside.unwrap_or("node"), node, local);
        let rail_comm = split(!carrier.is_own(), "rail", local, node);
        let ended = Ending::new();
        let provided = match (carrier.is_own(), node_comm, crate::vendor::library()) {
            (true, Ok(Some(comm)), Some(library)) => {
                companion.provide(Arc::new(NodeComm { library, comm, ended: ended.clone() }))
            }
            _ => Ok(()),
        };
        if let Err(error) = &provided {
            crate::log::warn(&format!("the vendor's library alone serves a communicator: {error}"));
        }
        let fine = node_comm.is_ok() && rail_comm.is_ok() && provided.is_ok();
        let all = agreed(companion, "made".to_string() + if fine { "" } else { " not" }, cancel);
        if let (Ok(true), Ok(node), Ok(rail)) = (&all, node_comm, rail_comm) {
            let (scratch, device) = (StreamScratch::default(), calls::device(library, parent));
            let (companion, plans) = (companion.clone(), Mutex::default());
            let selector = Selector::new(context);
            let later = Mutex::default();
            return Ok(Some(SubComms { node, rail, device, selector, companion, scratch, plans, ended, later }));
        }
        for (level, made) in [("node", node_comm), ("rail", rail_comm)] {
            match made {
                Ok(None) => {}
                Ok(Some(made)) if all.is_ok() => drop(calls::destroy(library, made)),
                Ok(Some(made)) => drop(calls::abort(library, made)),
                Err(code) => crate::log::warn(told(&format!("splitting off the {level}"), code).text()),
            }
        }
        all.map(|_| None)
    }

    /// A call with its plan, if it runs in two levels.
    pub fn prepare(&self, attached: &Arc<Attached>, call: VendorCall) -> Option<Prepared> {
        self.rail?;
        let decision = self.decide(&call).filter(|decision| decision.executor == Executor::SubComms)?;
        let VendorCall { collective, count, dtype, .. } = call;
        if attached.symmetric.load(Ordering::Acquire) || call.send == 0 || call.recv == 0 {
            return None;
        }
        let element = DataType::from_code(dtype)?.size();
        let plan = self.plan(collective, self.in_place(&call, element), &decision.reason)?;
        let chunk = count / plan.chunks_per_block;
        let scratch_bytes = plan.scratch_chunks.checked_mul(chunk)?.checked_mul(element)?;
        if scratch_bytes > self.most_scratch() || driver::is_captured(call.stream) {
            return None;
        }
        let whole = chunk * plan.chunks_per_block;
        Some(Prepared { attached: attached.clone(), call, plan, scratch_bytes, scratch: 0, element, whole })
    }

    /// The most scratch memory that calls which run at once may take.
    pub fn most_scratch(&self) -> usize {
        self.companion.config.vendor_scratch_bytes
    }

    /// At least `bytes` bytes of scratch memory for a stream.
    pub fn scratch(
        &self,
        stream: VendorStream,
        bytes: usize,
        library: &Library,
    ) -> std::result::Result<VendorAddress, Code> {
        // The vendor gives memory of the thread's current device, which may be another one's of the same thread.
        driver::on_device(self.device, || self.scratch.of(stream, bytes, library))
    }

    fn in_place(&self, call: &VendorCall, element: usize) -> bool {
        let mine = self.companion.rank() * call.count * element;
        match call.collective {
            Collective::AllGather => call.send == call.recv + mine,
            Collective::ReduceScatter => call.recv == call.send + mine,
            _ => call.send == call.recv,
        }
    }

    fn plan(&self, collective: Collective, in_place: bool, reason: &str) -> Option<Arc<VendorPlan>> {
        let mut plans = crate::sync::locked(&self.plans);
        let make = || {
            let grid = self.companion.grid();
            let shape = Shape { in_place, ..Shape::new(collective, grid.clone()) };
            let me = Rank::from_index(self.companion.rank());
            let found = ["two_level", "two_level_staged"].iter().find_map(|name| {
                // The inner algorithms are the vendor's.
                let plan = build_with_calls(&Choice::leveled(name, "direct", "log"), &shape, me).ok()?;
                Some((name, lower(&plan).ok()?))
            });
            if let Some((name, plan)) = &found {
                let phases = plan.phases.len();
                crate::info!("{} runs as {name} in {phases} phases over the vendor: {reason}", collective.name());
            }
            found.map(|(_, plan)| Arc::new(plan))
        };
        plans.entry((collective, in_place)).or_insert_with(make).clone()
    }

    /// Whether Strata's own transports carry what goes between nodes.
    pub fn is_own(&self) -> bool {
        self.rail.is_none()
    }

    /// Who runs a call, and how. Nothing where the vendor library alone does it.
    pub fn decide(&self, call: &VendorCall) -> Option<Arc<Decision>> {
        let VendorCall { collective, count, dtype, op, .. } = *call;
        // Known of the call alone, on whatever communicator.
        if vendor::obstacle(collective, count, dtype, op).is_some() {
            return None;
        }
        let dtype = DataType::from_code(dtype)?;
        let code = self.companion.code_set_for(collective, dtype);
        self.decide_request(&Request { code, ..Request::new(collective, count.saturating_mul(dtype.size())) })
    }

    /// The same of what is asked. What cannot be decided is not taken, on all ranks alike.
    pub(super) fn decide_request(&self, request: &Request<'_>) -> Option<Arc<Decision>> {
        self.selector.decide_own(request).ok()?
    }

    /// Strata's communicator of the same ranks.
    pub fn companion(&self) -> &Arc<Comm> {
        &self.companion
    }

    /// Makes a call of the vendor's on one level's communicator, unless that has ended or is being ended.
    fn call(
        &self,
        (level, collective): (LinkLevel, Collective),
        call: &VendorCall,
        buffers: [VendorAddress; 2],
        count: usize,
        library: &Library,
    ) -> std::result::Result<(), Code> {
        let make = || Ok(calls::collective(call, collective, self.of(level), buffers, count, library));
        self.ended.call(make).unwrap_or_else(|error| Err(error.code()))
    }

    fn of(&self, level: LinkLevel) -> Handle {
        let handle = match level {
            LinkLevel::Node => self.node,
            LinkLevel::Rail => self.rail,
            // Plans of the library's calls have none.
            LinkLevel::All => None,
        };
        handle.unwrap_or(0)
    }

    fn all(&self) -> impl Iterator<Item = Handle> {
        [self.node, self.rail].into_iter().flatten()
    }

    /// The first failure of those that serve the program.
    pub fn async_error(&self, library: &Library) -> Code {
        if let Some(failure) = self.companion.asynchronous_failure().filter(|_| self.is_own()) {
            return failure.code();
        }
        if self.ended.has_come() {
            let later = crate::sync::locked(&self.later).last().cloned();
            return later
                .filter(|node| !node.ended.has_come())
                .map_or(SUCCESS, |node| calls::async_error(library, node.comm));
        }
        let mut told = self.all().map(|comm| calls::async_error(library, comm));
        told.find(|&code| code != SUCCESS).unwrap_or(SUCCESS)
    }

    /// Does something to each that has not ended, and returns the first failure.
    pub fn each(&self, act: impl FnMut(Handle) -> std::result::Result<(), Code>) -> std::result::Result<(), Code> {
        match self.ended.has_come() {
            true => Ok(()),
            false => self.each_of_all(act),
        }
    }

    fn each_of_all(&self, act: impl FnMut(Handle) -> std::result::Result<(), Code>) -> std::result::Result<(), Code> {
        let outcomes: Vec<_> = self.all().map(act).collect();
        outcomes.into_iter().collect()
    }

    /// Has calls adapt as the program says, and the vendor make communicators of those who are left in the nodes, where ranks were lost.
    /// Collective over them.
    pub fn adapt(&self, options: AdaptOptions, library: &'static Library) -> Result<()> {
        let mut provide = |next: &Arc<Comm>| {
            if let Some(node) = two_level::node_of(next, self.device, library)? {
                crate::sync::locked(&self.later).push(node);
            }
            Ok(())
        };
        self.companion.adapt(options, Some(&mut provide))
    }

    /// Ends them, once.
    pub fn end(&self, library: &Library, end: End) {
        crate::sync::locked(&self.later).drain(..).for_each(|node| node.end(end));
        self.ended.end(|| {
            let outcome = self.each_of_all(|comm| match end {
                End::Destroy => calls::destroy(library, comm),
                End::Abort => calls::abort(library, comm),
            });
            if let Err(code) = outcome {
                crate::info!("{}", told("ending the node's and the rail's communicator", code));
            }
        });
    }

    /// Frees what was made for both. They must have ended.
    pub fn free(&self, library: &Library) {
        self.scratch.free(library);
    }
}

impl Prepared {
    /// How many phases the call has.
    pub fn phases(&self) -> usize {
        self.plan.phases.len()
    }

    /// How many of the vendor's collectives one phase has.
    pub fn width(&self, phase: usize) -> usize {
        let whole = if self.whole > 0 { self.plan.phases.get(phase).map_or(0, Vec::len) } else { 0 };
        whole + usize::from(self.rest(phase).is_some())
    }

    /// Issues one phase, on the program's stream.
    pub fn issue(&self, phase: usize, library: &Library) -> std::result::Result<(), Code> {
        let Some(subcomms) = self.attached.subcomms.get() else { return Ok(()) };
        if self.attached.ended.load(Ordering::Acquire) {
            return Err(Error::InvalidUsage(String::new()).code());
        }
        if self.whole > 0 {
            let chunk = self.whole / self.plan.chunks_per_block;
            for op in self.plan.phases.get(phase).into_iter().flatten() {
                let [send, recv] =
                    [op.send, op.recv].map(|run| self.base(run.buffer) + run.start * chunk * self.element);
                subcomms.call((op.level, op.collective), &self.call, [send, recv], op.chunks * chunk, library)?;
            }
        }
        match self.rest(phase) {
            None => Ok(()),
            Some((level, send)) => {
                let after = self.whole * self.element;
                let buffers = [self.base(send) + after, self.base(Buffer::Output) + after];
                let count = self.call.count - self.whole;
                subcomms.call((level, Collective::AllReduce), &self.call, buffers, count, library)
            }
        }
    }

    /// The elements that do not divide are reduced whole, on every rail alike: first over the node, then over the rail.
    fn rest(&self, phase: usize) -> Option<(LinkLevel, Buffer)> {
        match phase {
            _ if self.whole == self.call.count => None,
            0 => Some((LinkLevel::Node, Buffer::Input)),
            1 => Some((LinkLevel::Rail, Buffer::Output)),
            _ => None,
        }
    }

    fn base(&self, buffer: Buffer) -> VendorAddress {
        match buffer {
            Buffer::Input => self.call.send,
            Buffer::Output => self.call.recv,
            Buffer::Scratch | Buffer::Coded => self.scratch,
        }
    }
}
