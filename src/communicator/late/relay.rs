//! What a late rank does in its program's place, on a thread of the library.
#![forbid(unsafe_code)]

use super::memory::{LateMemory, Vector};
use super::{bytes_of, identity, Absence, Coming, LateCall, LateRanks, Stage, LEAST_BYTES};
use crate::communicator::batch::{drive, drive_beside, OperationBatch};
use crate::communicator::engine::Engine;
use crate::communicator::{launch, CollectiveCall, Comm};
use crate::device::gpu::order::StreamOrder;
use crate::dtype::{Prologue, Reduction};
use crate::error::{Error, Result};
use crate::health::{diagnosis, CallSummary, RelayRequest};
use crate::memory::DeviceRegion;
use crate::plan::Collective;
use crate::process::thread;
use crate::selection::Decision;
use crate::sync::locked;
use crate::transport::Waker;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A call that this rank relays, or has relayed.
#[derive(Debug)]
pub struct Relay {
    request: RelayRequest,
    /// What goes into the call in the place of the program's input, and then its result.
    memory: Vector,
    /// What the call computes.
    reduction: Reduction,
    /// How much of the memory, from its front, has what leaves every other input as it is: so much may be used.
    filled: usize,
    /// The program has come: its input, and what its factor makes of it.
    arrived: Option<(DeviceRegion, Reduction)>,
    /// To how much this rank has not contributed, from the vector's front, once that is known.
    absent: Option<usize>,
    /// Who has not, once the call has ended.
    pub absences: Option<Vec<Absence>>,
}

/// A rank that waits asks this one to relay; one thread does, however many ask. On the service's thread, which waits for nobody.
pub fn begin(comm: &Weak<Comm>, request: RelayRequest) {
    let heard_us = request.age_us();
    let Some(comm) = comm.upgrade() else { return };
    let Some(late) = comm.late.get().cloned() else { return };
    if comm.gpu().is_some() {
        // The communicator's thread looks for it while it waits for a stream.
        locked(&late.state).asked = Some((request, heard_us));
        return;
    }
    if late.is_relaying.swap(true, Ordering::AcqRel) {
        return;
    }
    let is_free = locked(&late.state).relay.is_none() && comm.turns.is_idle() && comm.usable().is_ok();
    let relaying = Relaying(late);
    if !is_free {
        return;
    }
    let started = thread("strata-relay").and_then(|thread| {
        thread.spawn(move || {
            if let Err(error) = run(&comm, &relaying.0, request, heard_us) {
                crate::info!("operation {}, which rank {} asked to relay: {error}", request.number, request.from);
            }
        })
    });
    if let Err(error) = started {
        crate::info!("no thread to relay operation {}: {error}", request.number);
    }
}

/// As long as it lives no other thread relays.
struct Relaying(Arc<LateRanks>);

impl Drop for Relaying {
    fn drop(&mut self) {
        self.0.is_relaying.store(false, Ordering::Release);
    }
}

/// Runs the operation in the program's place, if the program has not come meanwhile. `heard_us`: when the question was heard here.
fn run(comm: &Arc<Comm>, late: &Arc<LateRanks>, request: RelayRequest, heard_us: u64) -> Result<()> {
    let Some((call, reduction, memory)) = asked_for(comm, late, &request, None)? else { return Ok(()) };
    let mut batch = OperationBatch::new(comm.clone());
    if !batch.take_turn_now() || !is_now(late, comm, &request) {
        return Ok(());
    }
    begin_in(&mut batch, late, (request, heard_us), (call, reduction, memory));
    drive(std::slice::from_mut(&mut batch))
}

/// Waits until the streams have come to a call on a GPU. Where others ask for it meanwhile, the call is relayed, in its own turn.
pub fn await_streams(called: &OperationBatch, late: &Arc<LateRanks>, ordered: &mut StreamOrder) -> Result<()> {
    let comm = &called.comm;
    launch::await_streams(
        ordered,
        || comm.failure().is_some(),
        |ordered| {
            let Some((request, heard_us)) = locked(&late.state).asked.take() else { return };
            if let Err(error) = run_in_turn(called, late, (request, heard_us), ordered) {
                crate::info!("operation {}, which rank {} asked to relay: {error}", request.number, request.from);
            }
        },
    )
}

fn run_in_turn(
    called: &OperationBatch,
    late: &Arc<LateRanks>,
    (request, heard_us): (RelayRequest, u64),
    ordered: &mut StreamOrder,
) -> Result<()> {
    let comm = &called.comm;
    let Some(call) = called.collectives.first().filter(|call| called.is_on() && call.summary() == request.call) else {
        return Ok(());
    };
    if !is_now(late, comm, &request) {
        return Ok(());
    }
    let Some(asked) = asked_for(comm, late, &request, call.decision.clone())? else { return Ok(()) };
    let mut batch = called.in_its_turn();
    begin_in(&mut batch, late, (request, heard_us), asked);
    // A device that has failed shows in the calls themselves.
    drive_beside(std::slice::from_mut(&mut batch), || {
        if matches!(ordered.may_begin(), Ok(true)) {
            arrive(late, call, None);
        }
    })
}

/// The call that is asked for, what its program's reduces, and memory to run it with; none where such calls are not relayed. In front of a vendor's
/// library calls are decided with it in view: what has been decided of the program's call holds.
fn asked_for(
    comm: &Comm,
    late: &LateRanks,
    request: &RelayRequest,
    decision: Option<Arc<Decision>>,
) -> Result<Option<(CollectiveCall, Reduction, Vector)>> {
    let Some((count, reduction)) = request.call.all_reduce(comm.nranks()) else { return Ok(None) };
    let bytes = count.saturating_mul(reduction.dtype.size());
    if bytes < LEAST_BYTES {
        return Ok(None);
    }
    let memory = late.memory.take(bytes)?;
    let mut call = CollectiveCall::new(Collective::AllReduce, [memory.region(); 2], count, reduction.dtype);
    call.reduction = Some(identity::without_own_factor(Reduction { divisor: 1, ..reduction }));
    match decision {
        Some(_) => call.decision = decision,
        None => comm.decide(&mut call)?,
    }
    Ok(late.is_relayed(&call).then_some((call, reduction, memory)))
}

/// Whether the operation that is asked for is this rank's next one. Its turn is on, and nothing else runs from here on.
fn is_now(late: &LateRanks, comm: &Comm, request: &RelayRequest) -> bool {
    locked(&late.state).relay.is_none() && comm.status.begun() + 1 == request.number
}

fn begin_in(
    batch: &mut OperationBatch,
    late: &Arc<LateRanks>,
    (request, heard_us): (RelayRequest, u64),
    (call, reduction, memory): (CollectiveCall, Reduction, Vector),
) {
    let (filled, arrived, absent, absences) = (0, None, None, None);
    locked(&late.state).relay = Some(Relay { request, memory, reduction, filled, arrived, absent, absences });
    let RelayRequest { number, from, .. } = request;
    let age_us = request.age_us();
    crate::info!(
        "operation {number} is relayed, as rank {from} asked {age_us} us ago, which was heard after {heard_us} us"
    );
    let mut relayed = LateCall::new(late.clone(), request.call, reduction, call.clone());
    relayed.relays = true;
    batch.relay(call, Box::new(relayed));
}

/// The program has come to a call while this rank may be relaying it.
pub fn arrive(late: &LateRanks, call: &CollectiveCall, waker: Option<&Waker>) {
    let mut state = locked(&late.state);
    let Some(relay) = state.relay.as_mut().filter(|relay| relay.arrived.is_none()) else { return };
    let (Some(reduction), None) = (call.reduction, call.factor_at) else { return };
    if relay.absent.is_none() && late.is_relayed(call) && call.summary() == relay.request.call {
        relay.arrived = Some((call.input.part(0, bytes_of(call)), reduction));
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Between two polls of the call that is relayed: has something in the place of the program's input for the segments that come next, or
/// contributes that input to what has not begun.
pub fn join(late: &LateRanks, engine: &mut Engine) -> Result<()> {
    let mut state = locked(&late.state);
    let Some(relay) = state.relay.as_mut().filter(|relay| relay.absent.is_none()) else { return Ok(()) };
    let Some((input, reduction)) = relay.arrived else { return relay.fill(&late.memory, engine) };
    let absent = engine.touched_bytes().min(input.len());
    // A program that has come before the first poll finds nothing filled, and one segment is taken as begun from the start.
    relay.fill_up_to(&late.memory, absent)?;
    let len = input.len() - absent;
    let to = relay.memory.region().part(absent, len);
    late.memory.prologue(&own_factor(reduction), to, input.part(absent, len))?;
    relay.absent = Some(absent);
    engine.admit(usize::MAX);
    Ok(())
}

/// The part of a reduction's prologue that is the rank's own: what all ranks' inputs are multiplied by is the plan's to apply.
fn own_factor(reduction: Reduction) -> Reduction {
    match reduction.prologue {
        Prologue::Scalar(_) => reduction,
        Prologue::None | Prologue::Reciprocal(_) => Reduction { prologue: Prologue::None, ..reduction },
    }
}

/// The call has ended: to how much of it this rank has not contributed.
pub fn absent(late: &LateRanks) -> usize {
    let mut state = locked(&late.state);
    state.relay.as_mut().map_or(0, |relay| *relay.absent.get_or_insert(relay.memory.region().len()))
}

/// All have told.
pub fn ended(late: &LateRanks, absences: Vec<Absence>) {
    if let Some(relay) = &mut locked(&late.state).relay {
        relay.absences = Some(absences);
    }
}

impl Relay {
    /// Fills as much as the next segments take: filling all of it before the call begins would hold up those who wait for it.
    fn fill(&mut self, memory: &LateMemory, engine: &mut Engine) -> Result<()> {
        let bytes = self.memory.region().len();
        if self.filled == bytes {
            return Ok(());
        }
        let ahead = engine.segment_bytes().saturating_mul(2).max(memory.ahead());
        let wanted = engine.touched_bytes().saturating_add(ahead).min(bytes);
        if wanted > self.filled {
            self.fill_up_to(memory, wanted)?;
            engine.admit(wanted);
        }
        Ok(())
    }

    fn fill_up_to(&mut self, memory: &LateMemory, bytes: usize) -> Result<()> {
        if bytes > self.filled {
            memory.fill(self.memory.region().part(self.filled, bytes - self.filled), &self.reduction)?;
            self.filled = bytes;
        }
        Ok(())
    }

    /// The program has come to the call: has the result of the others, and brings what this rank has not contributed to.
    pub fn come(
        self,
        comm: &Comm,
        late: Arc<LateRanks>,
        call: &CollectiveCall,
        summary: CallSummary,
    ) -> Result<Box<LateCall>> {
        let RelayRequest { from, number, call: theirs, .. } = self.request;
        let reduction = call.reduction.filter(|_| summary == theirs);
        let differs = || Error::InvalidUsage(diagnosis::differs(number, (comm.rank.0, summary), (from, theirs)));
        let reduction = reduction.ok_or_else(differs)?;
        let absences = self.absences.unwrap_or_default();
        let mut brought = LateCall::new(late.clone(), summary, reduction, call.clone());
        brought.tell(comm, &absences);
        let is_dropped = brought.options.drops_late;
        let own = absences.iter().find(|absence| absence.rank == comm.rank && !is_dropped);
        let bytes = own.map_or(0, |absence| absence.bytes);
        let input = call.input.part(0, bytes);
        let is_kept = call.input.overlaps(call.output) || reduction.needs_prologue();
        let (own, kept) = match is_kept && bytes > 0 {
            false => (input, None),
            true => {
                let vector = late.memory.take(bytes)?;
                late.memory.prologue(&reduction, vector.region(), input)?;
                (vector.region(), Some(vector))
            }
        };
        late.memory.copy(call.output.part(0, bytes_of(call)), self.memory.region())?;
        drop(self.memory);
        let absences = match is_dropped {
            true => {
                brought.settle(comm, &absences)?;
                Vec::new()
            }
            false => absences,
        };
        brought.stage = Stage::Comes(Coming { absences, next: 0, own: Some(own), _kept: kept });
        Ok(Box::new(brought))
    }
}
