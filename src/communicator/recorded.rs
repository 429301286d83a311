//! Where operations meet their records: as they are accepted, begin, end or fail.
//!
//! A communicator without records ([`crate::records`]) has empty lists here, and calls look at nothing else.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::members::Member;
use super::{CollectiveCall, Comm, Direction, Elements, Operation};
use crate::bootstrap::launcher;
use crate::carrier::Carrier;
use crate::memory::DeviceRegion;
use crate::plan::Collective;
use crate::records::{CallKind, CallNames, CallTicket, CallWords, CommRecords, NewCall, RecordedComm};
use crate::selection::{Executor, Selection};
use crate::topo::Rank;
use smallvec::SmallVec;

/// A call as its record has it.
fn new_collective(call: &CollectiveCall, rank: Rank) -> NewCall {
    let [input, output] = match &call.blocks {
        None => [call.input.len(), call.output.len()],
        // What lies between blocks is nobody's.
        Some(blocks) => blocks.elements().map(|elements| elements * call.dtype.size()),
    };
    NewCall {
        kind: CallKind::Collective(call.collective),
        dtype: Some(call.dtype),
        reduction: call.reduction,
        peer: call.root.0,
        count: call.count as u64,
        buffers: (input as u64, output as u64),
        in_place: call.in_place(rank),
        vectored: call.blocks.is_some(),
        addresses: (call.input.address(), call.output.address()),
        tag: call.tag,
    }
}

fn new_message(direction: Direction, peer: Rank, elements: Elements, address: u64) -> NewCall {
    let bytes = elements.bytes() as u64;
    let (kind, buffers, addresses) = match direction {
        Direction::Send => (CallKind::Send, (bytes, 0), (address, 0)),
        Direction::Recv => (CallKind::Recv, (0, bytes), (0, address)),
    };
    let (dtype, count) = (Some(elements.dtype), elements.count as u64);
    let (peer, in_place, vectored, reduction, tag) = (peer.0, false, false, None, 0);
    NewCall { kind, dtype, reduction, peer, count, buffers, in_place, vectored, addresses, tag }
}

/// What is kept of a prepared call for its records.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreparedRecord {
    words: CallWords,
    names: CallNames,
    /// How far the output's address is above the input's where the call is in place.
    in_place_at: Option<i64>,
}

impl PreparedRecord {
    fn new(records: &CommRecords, call: &CollectiveCall, rank: Rank) -> PreparedRecord {
        let own = (rank.index() * call.count * call.dtype.size()) as i64;
        let in_place_at = match call.collective {
            Collective::AllReduce | Collective::AllToAll | Collective::Custom => Some(0),
            Collective::Broadcast | Collective::Reduce => (rank == call.root).then_some(0),
            Collective::AllGather => Some(-own),
            Collective::ReduceScatter => Some(own),
            Collective::Gather => (rank == call.root).then_some(-own),
            Collective::Scatter => (rank == call.root).then_some(own),
        };
        let names = match call.decision.as_ref().map(|decision| &decision.executor) {
            Some(Executor::Own(Selection { choice, .. })) => records.names(&choice.to_string()),
            _ => records.plain(),
        };
        PreparedRecord { words: records.words(&new_collective(call, rank)), names, in_place_at }
    }
}

/// The records of the calls that run as one.
type CallTickets = SmallVec<[CallTicket; 1]>;

/// The records of the operations that run together.
#[derive(Default)]
pub(super) struct BatchRecords {
    /// Of each collective; of one that stands for several, those of all.
    collectives: SmallVec<[CallTickets; 1]>,
    /// Those of messages, and the bytes that each sends to another node.
    messages: SmallVec<[(CallTicket, u64); 1]>,
    /// How many of the messages have begun.
    begun_messages: usize,
    /// What the engine had sent to other nodes when the collective began; nothing of one of the short path, whose ranks share
    /// a node.
    sent_before: Option<u64>,
}

impl BatchRecords {
    /// Collectives are accepted.
    pub fn accept(&mut self, comm: &Comm, calls: &[CollectiveCall]) {
        let Some(records) = comm.records.get() else { return };
        for call in calls {
            let single = call.joined.as_ref().map_or(std::slice::from_ref(call), |joined| &joined.calls);
            let accept = |call| records.accepted(&records.words(&new_collective(call, comm.rank)));
            let tickets: CallTickets = single.iter().map(accept).collect();
            if tickets.len() > 1 {
                records.grouped(&tickets);
            }
            self.collectives.push(tickets);
        }
    }

    /// A message is accepted.
    pub fn accept_message(&mut self, comm: &Comm, operation: &Operation) {
        let Some(records) = comm.records.get() else { return };
        let (direction, peer, elements, data) = match operation {
            Operation::Collective(_) => return,
            Operation::Send { to, elements, data } => (Direction::Send, *to, *elements, *data),
            Operation::Recv { from, elements, data } => (Direction::Recv, *from, *elements, *data),
        };
        let words = records.words(&new_message(direction, peer, elements, data.address()));
        self.messages.push((records.accepted(&words), comm.sent_to_other_node(direction, peer, elements)));
    }

    /// A call of the short path goes on as any other.
    pub fn goes_on(&mut self, ticket: Option<CallTicket>) {
        self.collectives = ticket.into_iter().map(|ticket| CallTickets::from_elem(ticket, 1)).collect();
    }

    /// The same of a message.
    pub fn message_goes_on(&mut self, (ticket, bytes): (Option<CallTicket>, u64)) {
        self.messages = ticket.map(|ticket| (ticket, bytes)).into_iter().collect();
        self.begun_messages = self.messages.len();
    }

    /// The turn of a collective has come.
    pub fn begin(&mut self, comm: &Comm, engine: &Engine, index: usize) {
        if let (Some(records), Some(tickets)) = (comm.records.get(), self.collectives.get(index)) {
            self.sent_before = Some(engine.sent_far());
            tickets.iter().for_each(|ticket| records.begun(*ticket, records.plain()));
        }
    }

    /// It is known how it runs; or there was nothing to do.
    pub fn runs(&mut self, comm: &Comm, engine: &mut Engine, index: usize, has_begun: bool) {
        if let (Some(records), Some(tickets)) = (comm.records.get(), self.collectives.get(index)) {
            match engine.names(records) {
                _ if !has_begun => self.end_collective(comm, engine, index),
                Some(names) => tickets.iter().for_each(|ticket| records.named(*ticket, names)),
                None => {}
            }
        }
    }

    /// A collective has ended. What calls that ran as one have sent is the first one's.
    pub fn end_collective(&mut self, comm: &Comm, engine: &Engine, index: usize) {
        if let (Some(records), Some(tickets)) = (comm.records.get(), self.collectives.get_mut(index)) {
            let mut sent = self.sent_before.map_or(0, |before| engine.sent_far() - before);
            tickets.drain(..).for_each(|ticket| records.ended(ticket, Some(std::mem::take(&mut sent))));
        }
    }

    /// The messages that have not begun do.
    pub fn begin_messages(&mut self, comm: &Comm) {
        let Some(records) = comm.records.get() else { return };
        let new = &self.messages[self.begun_messages..];
        if new.len() > 1 {
            records.grouped(&new.iter().map(|(ticket, _)| *ticket).collect::<SmallVec<[CallTicket; 8]>>());
        }
        new.iter().for_each(|(ticket, _)| records.begun(*ticket, records.plain()));
        self.begun_messages = self.messages.len();
    }

    /// All messages have ended.
    pub fn end_messages(&mut self, comm: &Comm) {
        if let Some(records) = comm.records.get() {
            self.messages.drain(..).for_each(|(ticket, bytes)| records.ended(ticket, Some(bytes)));
            self.begun_messages = 0;
        }
    }

    /// Messages of another batch go on with these.
    pub fn join(&mut self, next: &mut BatchRecords) {
        self.messages.extend(next.messages.drain(..));
    }

    /// What has not ended has failed, perhaps waiting for a rank.
    pub fn fail(&mut self, comm: &Comm, awaited: Option<Rank>) {
        let Some(records) = comm.records.get() else { return };
        let messages = self.messages.drain(..).map(|(ticket, _)| ticket);
        let open = self.collectives.drain(..).flatten().chain(messages).filter(|ticket| *ticket != CallTicket::NONE);
        open.for_each(|ticket| records.failed(ticket, awaited.map(|rank| rank.0)));
        self.begun_messages = 0;
    }
}

impl Comm {
    /// Records calls from now on, if the settings say so.
    pub(super) fn record_calls(&self) {
        let process = |member: &Member| (member.pid, member.host.clone());
        let own = self.members.get(self.rank.index()).map(process);
        let comm = RecordedComm {
            is_alone: self.members.iter().all(|member| Some(process(member)) == own),
            key: self.credentials.key,
            name: self.options.name.clone().unwrap_or_default(),
            rank: self.rank.0,
            launched: self.members.iter().map(|member| member.launched).collect(),
            nodes: self.grid.nnodes() as u32,
            carrier: Carrier::name_of(self.carrier).to_string(),
            companion: self.options.companion.is_some(),
        };
        if let Some(records) = CommRecords::new(&self.config, launcher::numbers(), &comm) {
            // Nobody else has the communicator yet.
            let _ = self.records.set(records);
        }
    }

    /// Writes what a failure leaves behind, if this one has failed, also of a rank that was in no call then; nothing is recorded
    /// any more.
    pub(super) fn end_records(&self) {
        if let Some(records) = self.records.get() {
            self.write_failure();
            records.leave();
        }
    }

    /// Writes what a failure leaves behind, if there was one.
    pub(super) fn write_failure(&self) {
        if let (Some(records), Some(_)) = (self.records.get(), self.status.cause()) {
            records.write_failure();
        }
    }

    /// What a message brings to another node.
    fn sent_to_other_node(&self, direction: Direction, peer: Rank, elements: Elements) -> u64 {
        let is_far = direction == Direction::Send && self.grid.node(peer) != self.grid.node(self.rank);
        if is_far {
            elements.bytes() as u64
        } else {
            0
        }
    }

    /// What a call that is prepared needs for its records.
    pub(super) fn prepared_record(&self, call: &CollectiveCall) -> Option<PreparedRecord> {
        self.records.get().map(|records| PreparedRecord::new(records, call, self.rank))
    }

    /// A prepared call is accepted and begins.
    #[inline]
    pub(super) fn begin_prepared(
        &self,
        record: &Option<PreparedRecord>,
        input: u64,
        output: u64,
    ) -> Option<CallTicket> {
        let (records, record) = (self.records.get()?, record.as_ref()?);
        let in_place = record.in_place_at == Some(output.wrapping_sub(input) as i64);
        Some(records.begun_at_once(&record.words.placed(in_place, (input, output)), record.names))
    }

    /// A message by itself is accepted and begins; the bytes that it sends to another node.
    #[inline]
    pub(super) fn begin_alone(
        &self,
        direction: Direction,
        peer: Rank,
        (data, elements): (DeviceRegion, Elements),
    ) -> (Option<CallTicket>, u64) {
        let Some(records) = self.records.get() else { return (None, 0) };
        let words = records.words(&new_message(direction, peer, elements, data.address()));
        let ticket = records.begun_at_once(&words, records.plain());
        (Some(ticket), self.sent_to_other_node(direction, peer, elements))
    }

    /// A call of the short path has ended there.
    #[inline]
    pub(super) fn end_short(&self, ticket: Option<CallTicket>, bytes: u64) {
        if let (Some(records), Some(ticket)) = (self.records.get(), ticket) {
            records.ended(ticket, Some(bytes));
        }
    }
}
