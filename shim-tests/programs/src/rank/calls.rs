//! Collectives and messages of one rank: buffers, the call, and what must be there afterwards.

use super::buffers::{Image, Layout};
use super::{Rank, Trouble};
use crate::library::{CollConfig, Comm, RootedFn, Stream, IN_PROGRESS, SUCCESS};
use crate::model;
use crate::program::{Call, Kind, Memory, Reduction};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::time::Duration;

/// A call that has been made: what is checked when it has ended.
pub struct Pending {
    pub comm: usize,
    pub stream: usize,
    op: usize,
    call: Call,
    nranks: usize,
    image: Image,
    outputs: Vec<Range<usize>>,
    /// An operation of ours, and the factor that may be read when the call runs.
    reduction: Option<c_int>,
    _factor: Box<[u8; 8]>,
    /// Inputs that the stream writes before the call.
    late: Vec<(Range<usize>, Vec<u8>)>,
    registration: Option<*mut c_void>,
}

impl Pending {
    /// Checks what the call has left behind.
    pub fn check(&self) -> Result<(), String> {
        if std::env::var_os("PROGRAMS_SPOIL").is_some() {
            // What a library would do that writes one byte too many: this must be noticed.
            self.image.spoil(self.outputs.first().map_or(0, |place| place.end));
        }
        let agrees = |got: &[u8], wanted: &[u8]| model::agrees(&self.call, self.nranks, got, wanted);
        self.image
            .check(&self.outputs, agrees, self.call.dtype.size())
            .map_err(|text| format!("{:?} of operation {}: {text}", self.call.kind, self.op))
    }
}

/// The buffers of a call.
struct Buffers {
    input: Range<usize>,
    output: Range<usize>,
}

/// Where the buffers of a collective lie, in place or apart.
fn buffers(layout: &mut Layout, call: &Call, nranks: usize, rank: usize) -> Buffers {
    let size = call.dtype.size();
    let misaligned = if rank % 2 == 1 { call.misaligned } else { 0 };
    let input = model::input_count(call, nranks, rank) * size;
    let output = model::output_count(call, nranks, rank) * size;
    let block = call.count * size;
    let in_place = (call.in_place && call.kind != Kind::AlltoAll) || call.kind == Kind::Bcast;
    if !in_place {
        return Buffers { input: layout.place(input, misaligned), output: layout.place(output, misaligned) };
    }
    let whole = layout.place(input.max(output), misaligned);
    let part = |bytes: usize| {
        // What has no bytes on this rank is the other one's address, as programs pass it.
        let start = whole.start + if (1..whole.len()).contains(&bytes) { rank * block } else { 0 };
        start..start + bytes
    };
    Buffers { input: part(input), output: part(output) }
}

impl Rank<'_> {
    /// Makes the calls of an operation that concern this rank.
    pub fn calls(&mut self, op: usize, calls: &[Call], nesting: usize) -> Result<(), Trouble> {
        let program = self.program;
        let mine: Vec<&Call> = calls.iter().filter(|call| program.takes_part_in(call, self.me)).collect();
        if mine.iter().any(|call| self.lost[call.comm]) {
            mine.iter().for_each(|call| self.lose(call.comm));
            return Ok(());
        }
        let mut pending = Vec::new();
        for call in &mine {
            match self.prepare(op, call) {
                Ok(prepared) => pending.push(prepared),
                Err(trouble) => {
                    let released = pending.into_iter().try_for_each(|prepared| self.release(prepared));
                    return released.and(Err(trouble));
                }
            }
        }
        pending.iter().try_for_each(|call| self.give_late(call))?;
        let messages = mine.iter().map(|call| self.messages_of(call)).sum::<usize>();
        let grouped = mine.len() > 1 || messages > 1 || nesting > 0;
        let outcome = self.issue(&mine, &pending, if grouped { nesting.max(1) } else { 0 });
        self.pending.extend(pending);
        outcome?;
        self.settle_pending(|call| call.stream == 0)
    }

    fn messages_of(&self, call: &Call) -> usize {
        let mine = self.program.comms[call.comm].rank_of(self.me);
        call.messages.iter().map(|&(from, to, _)| usize::from(Some(from) == mine) + usize::from(Some(to) == mine)).sum()
    }

    fn issue(&mut self, calls: &[&Call], pending: &[Pending], depth: usize) -> Result<(), Trouble> {
        let comm = calls[0].comm;
        let _squeezed = self.squeeze();
        for _ in 0..depth {
            // SAFETY: no requirement.
            let code = unsafe { (self.library.group_start)() };
            self.must(comm, "ncclGroupStart", code)?;
        }
        let mut refused = Ok(());
        for (call, pending) in calls.iter().zip(pending) {
            let done = match call.kind {
                Kind::Messages => self.messages(call, pending),
                _ => self.collective(call, pending),
            };
            refused = refused.and(done);
        }
        let mut outcome = Ok(());
        for left in (0..depth).rev() {
            // SAFETY: a group must be open; because it was opened as often.
            let code = unsafe { (self.library.group_end)() };
            if code == IN_PROGRESS && left == 0 {
                for call in calls {
                    let settled = self.settle(call.comm, code);
                    outcome = outcome.and(self.must(call.comm, "ncclGroupEnd", settled));
                }
            } else {
                outcome = outcome.and(self.must(comm, "ncclGroupEnd", code));
            }
        }
        refused.and(outcome)
    }

    /// Buffers with what the call is given, and what it must leave.
    fn prepare(&mut self, op: usize, call: &Call) -> Result<Pending, Trouble> {
        let members = &self.program.comms[call.comm];
        let (nranks, rank) = (members.ranks.len(), members.rank_of(self.me).expect("a member"));
        let mut layout = Layout::new();
        let (mut outputs, mut inputs) = (Vec::new(), Vec::new());
        if call.kind == Kind::Messages {
            let size = call.dtype.size();
            for (place, &(from, to, count)) in call.messages.iter().enumerate() {
                if from == rank {
                    inputs.push((layout.place(count * size, call.misaligned), model::message(call, place)));
                }
                if to == rank {
                    outputs.push((layout.place(count * size, 0), model::message(call, place)));
                }
            }
        } else {
            let Buffers { input, output } = buffers(&mut layout, call, nranks, rank);
            let mut given = Vec::new();
            let count = model::input_count(call, nranks, rank);
            model::contribution(call, nranks, rank, 0, count, &mut given);
            inputs.push((input, given));
            outputs.push((output, model::output(call, nranks, rank)));
        }
        let seed = model::mixed(call.salt, 3, self.me as u64);
        let failed = |text| Trouble::Failed { comm: Some(call.comm), code: -1, text };
        let mut image = Image::new(self.library, self.gpu, &layout, call.memory, seed).map_err(failed)?;
        inputs.iter().try_for_each(|(place, bytes)| image.give(place, bytes)).map_err(failed)?;
        let stream = self.program.stream_of(call, self.me);
        let may_be_late = stream > 0 && self.gpu.is_none() && self.program.fault.is_none();
        if !(may_be_late && call.salt.is_multiple_of(3)) {
            inputs.clear();
        }
        outputs.iter().for_each(|(place, bytes)| image.expect(place, bytes));
        let outputs: Vec<Range<usize>> = outputs.into_iter().map(|(place, _)| place).collect();
        // What goes in place is found by the call again, from the same numbers.
        let mut pending = Pending {
            comm: call.comm,
            stream,
            op,
            call: call.clone(),
            nranks,
            image,
            outputs,
            reduction: None,
            _factor: Box::new(factor(call)),
            late: inputs,
            registration: None,
        };
        match self.furnish(call, &mut pending) {
            Ok(()) => Ok(pending),
            Err(trouble) => self.release(pending).and(Err(trouble)),
        }
    }

    /// Registers a call's memory and makes its operation, where it has such.
    fn furnish(&mut self, call: &Call, pending: &mut Pending) -> Result<(), Trouble> {
        if call.memory == Memory::Registered {
            let registered = pending.image.register(self.library, self.comms[call.comm]);
            match registered {
                Ok(handle) => pending.registration = Some(handle),
                Err(code) => self.must(call.comm, "ncclCommRegister", code)?,
            }
        }
        if let (true, Reduction::PreMulSum { device }) = (call.kind.reduces(), call.reduction) {
            let mut made = 0;
            let at = pending._factor.as_mut_ptr().cast();
            let residence = c_int::from(!device);
            let (comm, dtype) = (self.comms[call.comm], call.dtype as c_int);
            // SAFETY: the factor must live until calls with the operation have ended; because `pending` keeps it so long.
            let code = unsafe { (self.library.create_pre_mul_sum)(&raw mut made, at, dtype, residence, comm) };
            let code = self.settle(call.comm, code);
            self.must(call.comm, "ncclRedOpCreatePreMulSum", code)?;
            pending.reduction = Some(made);
        }
        Ok(())
    }

    /// Has a call's input come from what its stream does before it, a little later.
    fn give_late(&mut self, pending: &Pending) -> Result<(), Trouble> {
        let Some(add) = self.library.stream_add_callback.filter(|_| !pending.late.is_empty()) else { return Ok(()) };
        let stream = self.stream(pending.stream)?;
        let mut late = Vec::new();
        for (place, bytes) in &pending.late {
            let at = pending.image.at(place.start).cast::<u8>();
            // SAFETY: the bytes must be writable; because the image has them, and no call uses them yet.
            unsafe { at.write_bytes(0, bytes.len()) };
            late.push((at, bytes.clone()));
        }
        let late: *mut Late = Box::into_raw(Box::new(Late(late)));
        // SAFETY: the argument must live until the callback; because that is what frees it.
        let code = unsafe { add(stream, write_late, late.cast()) };
        self.must(pending.comm, "strataStreamAddCallback", code)
    }

    fn messages(&mut self, call: &Call, pending: &Pending) -> Result<(), Trouble> {
        let members = &self.program.comms[call.comm];
        let rank = members.rank_of(self.me).expect("a member");
        let (comm, dtype, size) = (self.comms[call.comm], call.dtype as c_int, call.dtype.size());
        let stream = self.stream(pending.stream)?;
        let mut layout = Layout::new();
        for &(from, to, count) in &call.messages {
            if from == rank {
                let at = pending.image.at(layout.place(count * size, call.misaligned).start);
                // SAFETY: the buffer must live until the call has ended; because `pending` keeps it so long.
                let code = unsafe { (self.library.send)(at, count, dtype, to as c_int, comm, stream) };
                self.accepted(call.comm, "ncclSend", code)?;
            }
            if to == rank {
                let at = pending.image.at(layout.place(count * size, 0).start);
                // SAFETY: the buffer must live until the call has ended; because `pending` keeps it so long.
                let code = unsafe { (self.library.recv)(at, count, dtype, from as c_int, comm, stream) };
                self.accepted(call.comm, "ncclRecv", code)?;
            }
        }
        Ok(())
    }

    fn collective(&mut self, call: &Call, pending: &Pending) -> Result<(), Trouble> {
        let nranks = pending.nranks;
        let rank = self.program.comms[call.comm].rank_of(self.me).expect("a member");
        let Buffers { input, output } = buffers(&mut Layout::new(), call, nranks, rank);
        let arguments = Arguments {
            input: pending.image.at(input.start),
            output: pending.image.at(output.start),
            count: call.count,
            dtype: call.dtype as c_int,
            op: match call.reduction {
                Reduction::Sum => 0,
                Reduction::Prod => 1,
                Reduction::Max => 2,
                Reduction::Min => 3,
                Reduction::Avg => 4,
                Reduction::PreMulSum { .. } => pending.reduction.unwrap_or(0),
            },
            root: call.root as c_int,
            comm: self.comms[call.comm],
            stream: self.stream(pending.stream)?,
        };
        let code = self.invoke(call, &arguments);
        self.accepted(call.comm, &format!("nccl{:?}", call.kind), code)
    }

    /// The call itself.
    fn invoke(&self, call: &Call, with: &Arguments) -> i32 {
        let library = self.library;
        let &Arguments { input, output, count, dtype, op, root, comm, stream } = with;
        let rooted = |function: Option<RootedFn>| match function {
            // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep them.
            Some(function) => unsafe { function(input, output, count, dtype, root, comm, stream) },
            None => SUCCESS,
        };
        if let Some(code) = call.with_config.then(|| self.invoke_with_config(call, with)).flatten() {
            return code;
        }
        match call.kind {
            // SAFETY: as above, for the others too; because they are of the same call.
            Kind::AllReduce => unsafe { (library.all_reduce)(input, output, count, dtype, op, comm, stream) },
            Kind::Broadcast => rooted(Some(library.broadcast)),
            // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep
            // them.
            Kind::Bcast => unsafe { (library.bcast)(output, count, dtype, root, comm, stream) },
            // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep
            // them.
            Kind::Reduce => unsafe { (library.reduce)(input, output, count, dtype, op, root, comm, stream) },
            // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep
            // them.
            Kind::ReduceScatter => unsafe { (library.reduce_scatter)(input, output, count, dtype, op, comm, stream) },
            // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep
            // them.
            Kind::AllGather => unsafe { (library.all_gather)(input, output, count, dtype, comm, stream) },
            Kind::AlltoAll => match library.alltoall {
                // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self`
                // keep them.
                Some(function) => unsafe { function(input, output, count, dtype, comm, stream) },
                None => SUCCESS,
            },
            Kind::Gather => rooted(library.gather),
            Kind::Scatter => rooted(library.scatter),
            Kind::Messages => SUCCESS,
        }
    }

    /// The same by the function that takes options, where there is one.
    fn invoke_with_config(&self, call: &Call, with: &Arguments) -> Option<i32> {
        let library = self.library;
        let &Arguments { input, output, count, dtype, op, root, comm, stream } = with;
        let config = CollConfig::new();
        let config = &raw const config;
        Some(match call.kind {
            Kind::AllReduce => {
                let function = library.all_reduce_config?;
                // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self` keep
                // them. The options are read at once.
                unsafe { function(input, output, count, dtype, op, comm, stream, config) }
            }
            Kind::ReduceScatter => {
                let function = library.reduce_scatter_config?;
                // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self`
                // keep them. The options are read at once.
                unsafe { function(input, output, count, dtype, op, comm, stream, config) }
            }
            Kind::AllGather => {
                let function = library.all_gather_config?;
                // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self`
                // keep them. The options are read at once.
                unsafe { function(input, output, count, dtype, comm, stream, config) }
            }
            Kind::Broadcast => {
                let function = library.broadcast_config?;
                // SAFETY: buffers and communicator must live until the call has ended; because `pending` and `self`
                // keep them. The options are read at once.
                unsafe { function(input, output, count, dtype, root, comm, stream, config) }
            }
            _ => return None,
        })
    }

    /// Ends what was kept for a call: its operation, its registration, its memory.
    pub fn release(&mut self, pending: Pending) -> Result<(), Trouble> {
        let comm = self.comms[pending.comm];
        let alive = !comm.is_null() && !self.lost[pending.comm];
        let mut outcome = Ok(());
        if let (Some(op), true) = (pending.reduction, alive) {
            // SAFETY: calls with it must have been made; because they have ended.
            let code = unsafe { (self.library.destroy_op)(op, comm) };
            outcome = outcome.and(self.must(pending.comm, "ncclRedOpDestroy", code));
        }
        if let (Some(handle), true) = (pending.registration, alive) {
            // SAFETY: the handle must be the registration's; because ncclCommRegister returned it.
            let code = unsafe { (self.library.deregister)(comm, handle) };
            outcome = outcome.and(self.must(pending.comm, "ncclCommDeregister", code));
        }
        let comm = Some(pending.comm);
        let freed = pending.image.free(self.library);
        outcome.and(freed.map_err(|text| Trouble::Failed { comm, code: -1, text }))
    }
}

/// What a stream writes, and where.
struct Late(Vec<(*mut u8, Vec<u8>)>);

/// A callback of a stream.
extern "C" fn write_late(late: *mut c_void) {
    // SAFETY: it must be a box that nobody else uses; because it was made for this callback.
    let Late(late) = *unsafe { Box::from_raw(late.cast::<Late>()) };
    std::thread::sleep(Duration::from_millis(2));
    for (at, bytes) in late {
        // SAFETY: the bytes must be writable; because the call's memory is kept until its stream has come to its end.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }
}

/// What a collective's function takes.
struct Arguments {
    input: *mut c_void,
    output: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: Comm,
    stream: Stream,
}

/// The factor 2 in the type of a call.
fn factor(call: &Call) -> [u8; 8] {
    let mut bytes = [0; 8];
    let two = model::two(call.dtype);
    bytes[..two.len()].copy_from_slice(&two);
    bytes
}
