//! What is kept of a call: its words in the ring, and the record that is made of them.
#![forbid(unsafe_code)]

use super::clock::TickScale;
use super::ring::WORDS;
use crate::dtype::{DataType, Operator, Prologue, Reduction};
use crate::plan::Collective;
use crate::profiler::HeardCall;
use crate::selection::message_bytes;
use serde::{Deserialize, Serialize};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the words of a record lie. Those that are left are for what codes calls.
mod at {
    pub const CALL: usize = 0;
    pub const COUNT: usize = 1;
    pub const INPUT: usize = 2;
    pub const OUTPUT: usize = 3;
    pub const NUMBER: usize = 4;
    pub const PLACE: usize = 5;
    pub const ACCEPTED: usize = 6;
    pub const BEGUN: usize = 7;
    pub const ENDED: usize = 8;
    pub const STATE: usize = 9;
    pub const NIC: usize = 10;
    pub const GROUP: usize = 11;
    pub const TAG: usize = 12;
    pub const KERNELS: usize = 13;
}

/// What a word says where nothing is known.
const UNKNOWN: u64 = u64::MAX;
const SEND: u8 = 254;
const RECV: u8 = 255;
const OPERATIONS: [&str; 10] = ["", "sum", "prod", "max", "min", "avg", "premulsum", "band", "bor", "bxor"];
/// The bit that says that the kernel of a call has told something; those below count channels that run.
const CHANNELS: u64 = 1 << 63;
const IN_PLACE: u8 = 1;
const VECTORED: u8 = 2;

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallKind {
    /// A collective.
    Collective(Collective),
    /// `ncclSend`
    Send,
    /// `ncclRecv`
    Recv,
}

impl CallKind {
    fn code(self) -> u8 {
        match self {
            CallKind::Collective(collective) => collective as u8,
            CallKind::Send => SEND,
            CallKind::Recv => RECV,
        }
    }

    fn from_code(code: u8) -> Option<CallKind> {
        match code {
            SEND => Some(CallKind::Send),
            RECV => Some(CallKind::Recv),
            _ => {
                let mut all = Collective::ALL.into_iter().chain([Collective::Custom]);
                all.find(|collective| *collective as u8 == code).map(CallKind::Collective)
            }
        }
    }

    /// Its name in traces.
    pub fn name(self) -> &'static str {
        match self {
            CallKind::Collective(collective) => collective.name(),
            CallKind::Send => "send",
            CallKind::Recv => "recv",
        }
    }

    /// Its name in NCCL's profiler interface.
    pub fn nccl_name(self) -> &'static CStr {
        match self {
            CallKind::Collective(collective) => match collective {
                Collective::AllReduce => c"AllReduce",
                Collective::AllGather => c"AllGather",
                Collective::ReduceScatter => c"ReduceScatter",
                Collective::Broadcast => c"Broadcast",
                Collective::Reduce => c"Reduce",
                Collective::AllToAll => c"AlltoAll",
                Collective::Gather => c"Gather",
                Collective::Scatter => c"Scatter",
                Collective::Custom => c"Custom",
            },
            CallKind::Send => c"Send",
            CallKind::Recv => c"Recv",
        }
    }

    /// What a name in NCCL's profiler interface means.
    pub fn of_nccl(name: &CStr) -> Option<CallKind> {
        let all = Collective::ALL.into_iter().map(CallKind::Collective);
        all.chain([CallKind::Send, CallKind::Recv]).find(|kind| kind.nccl_name() == name)
    }
}

/// The name of a type in NCCL's profiler interface.
fn nccl_type(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 => c"ncclInt8",
        DataType::U8 => c"ncclUint8",
        DataType::I32 => c"ncclInt32",
        DataType::U32 => c"ncclUint32",
        DataType::I64 => c"ncclInt64",
        DataType::U64 => c"ncclUint64",
        DataType::F16 => c"ncclFloat16",
        DataType::F32 => c"ncclFloat32",
        DataType::F64 => c"ncclFloat64",
        DataType::BF16 => c"ncclBfloat16",
        DataType::F8E4M3 => c"ncclFloat8e4m3",
        DataType::F8E5M2 => c"ncclFloat8e5m2",
        DataType::I16 | DataType::U16 => c"Unknown",
    }
}

/// The type that a name in NCCL's profiler interface means.
pub fn type_of_nccl(name: &CStr) -> Option<DataType> {
    DataType::HOST.into_iter().find(|dtype| nccl_type(*dtype) == name && name != c"Unknown")
}

/// A call as it is accepted.
#[derive(Debug, Clone, Copy)]
pub struct NewCall {
    /// What is called.
    pub kind: CallKind,
    /// The type of an element; none of a message whose elements are not known any more.
    pub dtype: Option<DataType>,
    /// How it reduces.
    pub reduction: Option<Reduction>,
    /// The root or the peer.
    pub peer: u32,
    /// Elements of a block, or of the longest, or of the message.
    pub count: u64,
    /// Bytes of both buffers.
    pub buffers: (u64, u64),
    /// Whether one lies in the other.
    pub in_place: bool,
    /// Whether its blocks differ in size.
    pub vectored: bool,
    /// Where the buffers are, for the program's profiler.
    pub addresses: (u64, u64),
    /// The tag that the program has given it; 0 for none.
    pub tag: u64,
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// It waits for its turn, or its stream.
    Accepted,
    /// It runs.
    Begun,
    /// It has ended.
    Ended,
    /// It has failed, or its communicator has before it began.
    Failed,
}

impl CallState {
    const ALL: [CallState; 4] = [CallState::Accepted, CallState::Begun, CallState::Ended, CallState::Failed];
}

fn operation_of(reduction: Option<Reduction>) -> u8 {
    let name = match reduction {
        None => "",
        Some(Reduction { prologue: Prologue::Scalar(_), .. }) => "premulsum",
        Some(Reduction { prologue: Prologue::Reciprocal(_), .. }) => "avg",
        Some(Reduction { divisor, .. }) if divisor != 1 => "avg",
        Some(Reduction { operator, .. }) => match operator {
            Operator::Sum => "sum",
            Operator::Prod => "prod",
            Operator::Max => "max",
            Operator::Min => "min",
            Operator::And => "band",
            Operator::Or => "bor",
            Operator::Xor => "bxor",
        },
    };
    OPERATIONS.iter().position(|operation| *operation == name).unwrap_or(0) as u8
}

/// A call's words, without those that differ each time it is made.
#[derive(Debug, Clone, Copy)]
pub struct CallWords {
    words: [u64; WORDS],
    addresses: (u64, u64),
}

impl CallWords {
    /// The words of a call on the communicator with this number.
    pub fn new(call: &NewCall, comm: u32) -> CallWords {
        let flags = (IN_PLACE * u8::from(call.in_place)) | (VECTORED * u8::from(call.vectored));
        let dtype = call.dtype.map_or(u8::MAX, |dtype| dtype as u8);
        let mut words = [0; WORDS];
        let bytes = [call.kind.code(), dtype, operation_of(call.reduction), flags];
        words[at::CALL] = u64::from(u32::from_le_bytes(bytes)) | u64::from(call.peer) << 32;
        words[at::COUNT] = call.count;
        (words[at::INPUT], words[at::OUTPUT]) = call.buffers;
        words[at::PLACE] = u64::from(comm);
        words[at::NIC] = UNKNOWN;
        words[at::BEGUN] = UNKNOWN;
        words[at::ENDED] = UNKNOWN;
        words[at::TAG] = call.tag;
        CallWords { words, addresses: call.addresses }
    }

    /// Whether it is a message, which counts apart.
    pub fn is_message(&self) -> bool {
        self.words[at::CALL] as u8 >= SEND
    }

    /// The same for other buffers of equal sizes, in place or not.
    pub fn placed(mut self, in_place: bool, addresses: (u64, u64)) -> CallWords {
        let (bit, word) = (u64::from(IN_PLACE) << 24, self.words[at::CALL]);
        self.words[at::CALL] = if in_place { word | bit } else { word & !bit };
        self.addresses = addresses;
        self
    }

    /// The call in NCCL's words, for the program's profiler.
    pub(super) fn heard(&self) -> HeardCall {
        let [kind, dtype, ..] = (self.words[at::CALL] as u32).to_le_bytes();
        let dtype = DataType::HOST.into_iter().find(|known| *known as u8 == dtype);
        HeardCall {
            function: CallKind::from_code(kind).map_or(c"", CallKind::nccl_name),
            datatype: dtype.map_or(c"Unknown", nccl_type),
            is_message: self.is_message(),
            count: self.words[at::COUNT],
            peer: (self.words[at::CALL] >> 32) as u32,
            buffers: self.addresses,
            tag: self.words[at::TAG],
        }
    }

    /// The call as it is accepted; begun at once where `names` is given.
    #[inline]
    pub(super) fn accepted(&self, number: u64, now: u64, names: Option<CallNames>) -> [u64; WORDS] {
        let mut words = self.words;
        words[at::NUMBER] = number;
        words[at::ACCEPTED] = now;
        words[at::GROUP] = UNKNOWN;
        if let Some(names) = names {
            words[at::PLACE] |= names.word();
            words[at::BEGUN] = now;
            words[at::STATE] = CallState::Begun as u64;
        }
        words
    }
}

/// Numbers of the names that a call has from when it begins: its algorithm, and what carries its messages between nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallNames {
    /// The algorithm.
    pub algorithm: u16,
    /// The transport.
    pub carrier: u16,
}

impl CallNames {
    fn word(self) -> u64 {
        u64::from(self.algorithm) << 32 | u64::from(self.carrier) << 48
    }
}

type Words = [AtomicU64; WORDS];

fn set(words: &Words, place: usize, value: u64) {
    words[place].store(value, Ordering::Relaxed);
}

/// A call has these names.
#[inline]
pub(super) fn name(words: &Words, names: CallNames) {
    let comm = words[at::PLACE].load(Ordering::Relaxed) & u64::from(u32::MAX);
    set(words, at::PLACE, comm | names.word());
}

/// A call begins.
#[inline]
pub(super) fn begin(words: &Words, now: u64, names: CallNames) {
    name(words, names);
    set(words, at::BEGUN, now);
    set(words, at::STATE, CallState::Begun as u64);
}

/// A call ends, and has sent so many bytes over NICs.
#[inline]
pub(super) fn end(words: &Words, now: u64, nic_bytes: Option<u64>) {
    set(words, at::ENDED, now);
    set(words, at::NIC, nic_bytes.unwrap_or(UNKNOWN));
    set(words, at::STATE, CallState::Ended as u64);
}

/// A call of the vendor's library has been enqueued. Where its kernel tells nothing, that is all that is known of its times.
pub(super) fn enqueue(words: &Words, now: u64) {
    if words[at::BEGUN].load(Ordering::Relaxed) == UNKNOWN {
        set(words, at::BEGUN, words[at::ACCEPTED].load(Ordering::Relaxed));
        end(words, now, None);
    }
}

/// The kernel of such a call has begun on one more channel; the first says when the call did.
pub(super) fn begin_channel(words: &Words, now: u64) {
    let channels = words[at::KERNELS].load(Ordering::Relaxed);
    if channels == 0 {
        set(words, at::BEGUN, now);
    }
    set(words, at::KERNELS, (channels + 1) | CHANNELS);
    set(words, at::ENDED, UNKNOWN);
    set(words, at::STATE, CallState::Begun as u64);
}

/// It has ended on a channel; the last says when the call did.
pub(super) fn end_channel(words: &Words, now: u64) {
    let channels = words[at::KERNELS].load(Ordering::Relaxed);
    if channels & !CHANNELS > 0 {
        set(words, at::KERNELS, channels - 1);
        if channels - 1 == CHANNELS {
            end(words, now, None);
        }
    }
}

/// A call fails; perhaps it waited for a rank.
pub(super) fn fail(words: &Words, now: u64, awaited: Option<u32>) {
    set(words, at::ENDED, now);
    set(words, at::STATE, CallState::Failed as u64 | awaited.map_or(0, |rank| u64::from(rank) + 1) << 8);
}

/// A message belongs to the group that begins with this record, or a collective to those that run as one with it.
pub(super) fn join(words: &Words, group: u64) {
    set(words, at::GROUP, group);
}

/// One call, as traces have it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// Its number among all records of its process.
    pub record: u64,
    /// The communicator's key, the same on all its ranks.
    pub comm: String,
    /// The rank in the communicator.
    pub rank: u32,
    /// How many ranks that has.
    pub nranks: u32,
    /// The collective's name, `send` or `recv`.
    pub call: String,
    /// Its number among the collectives of its communicator, from 1, the same on all ranks; of a message among the messages of
    /// its rank.
    pub number: u64,
    /// Elements of a block, of the longest that the rank knows where they differ, or of a message.
    pub count: u64,
    /// The type of an element.
    pub dtype: String,
    /// Bytes of the message, as tuning tables count them: of an all-gather's output, a reduce-scatter's input, else of a block.
    pub bytes: u64,
    /// Bytes of the rank's input, of its blocks together where they differ in size.
    pub input_bytes: u64,
    /// The same of its output.
    pub output_bytes: u64,
    /// How it reduces; empty where it does not.
    pub op: String,
    /// The root, where there is one.
    pub root: Option<u32>,
    /// The other rank of a message.
    pub peer: Option<u32>,
    /// Whether one buffer lies in the other.
    pub in_place: bool,
    /// Whether the blocks differ in size.
    pub vectored: bool,
    /// The tag that the program has given it (`userProfilerTag`); 0 for none.
    #[serde(default)]
    pub tag: u64,
    /// The algorithm; empty where there was nothing to choose.
    pub algorithm: String,
    /// What carries messages between nodes; `none` where there is one node.
    pub carrier: String,
    /// The record with which the group of a message begins, or the first of collectives that run as one.
    pub group: Option<u64>,
    /// Bytes sent to other nodes, where they are known.
    pub nic_bytes: Option<u64>,
    /// When it was called, in nanoseconds of the trace's clock.
    pub accepted_ns: u64,
    /// When it began: its turn had come, and its stream to it.
    pub begun_ns: Option<u64>,
    /// When it ended or failed.
    pub ended_ns: Option<u64>,
    /// How far it is.
    pub state: CallState,
    /// Whom it waited for when it failed.
    pub awaited: Option<u32>,
}

/// What turns words into a record: the communicator's key, rank and ranks, and names by number.
pub(super) struct RecordPlace<'a> {
    pub key: &'a str,
    pub rank: u32,
    pub nranks: u32,
    pub names: &'a [String],
    pub scale: TickScale,
}

/// The number of a record's communicator.
pub(super) fn comm_of(words: &[u64; WORDS]) -> u32 {
    words[at::PLACE] as u32
}

/// The record of these words; none of words that are no call's.
pub(super) fn record(number: u64, words: &[u64; WORDS], place: &RecordPlace<'_>) -> Option<CallRecord> {
    let [kind, dtype, op, flags] = (words[at::CALL] as u32).to_le_bytes();
    let (kind, peer) = (CallKind::from_code(kind)?, (words[at::CALL] >> 32) as u32);
    let dtype = DataType::HOST.into_iter().find(|known| *known as u8 == dtype);
    let known = |index: usize| Some(words[index]).filter(|word| *word != UNKNOWN);
    let name = |shift: u32| {
        let number = (words[at::PLACE] >> shift) as u16;
        place.names.get(usize::from(number)).cloned().unwrap_or_default()
    };
    let (count, state) = (words[at::COUNT], words[at::STATE]);
    let block = (count as usize).saturating_mul(dtype.map_or(1, DataType::size));
    let (bytes, root, peer) = match kind {
        CallKind::Collective(collective) => {
            let bytes = match (collective, flags & VECTORED > 0) {
                (Collective::AllGather, true) => words[at::OUTPUT] as usize,
                (Collective::ReduceScatter, true) => words[at::INPUT] as usize,
                _ => message_bytes(collective, place.nranks as usize, block),
            };
            (bytes, collective.has_root().then_some(peer), None)
        }
        _ => (block, None, Some(peer)),
    };
    Some(CallRecord {
        record: number,
        comm: place.key.to_string(),
        rank: place.rank,
        nranks: place.nranks,
        call: kind.name().to_string(),
        number: words[at::NUMBER],
        count,
        dtype: dtype.map_or("", DataType::name).to_string(),
        bytes: bytes as u64,
        input_bytes: words[at::INPUT],
        output_bytes: words[at::OUTPUT],
        op: OPERATIONS.get(usize::from(op)).copied().unwrap_or_default().to_string(),
        root,
        peer,
        in_place: flags & IN_PLACE > 0,
        vectored: flags & VECTORED > 0,
        tag: words[at::TAG],
        algorithm: name(32),
        carrier: name(48),
        group: known(at::GROUP),
        nic_bytes: known(at::NIC),
        accepted_ns: place.scale.ns(words[at::ACCEPTED]),
        begun_ns: known(at::BEGUN).map(|ticks| place.scale.ns(ticks)),
        ended_ns: known(at::ENDED).map(|ticks| place.scale.ns(ticks)),
        state: CallState::ALL.get(state as u8 as usize).copied()?,
        awaited: (state >> 8).checked_sub(1).map(|rank| rank as u32),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::RedOp;

    const CUSTOM: CallKind = CallKind::Collective(Collective::Custom);

    fn call(kind: CallKind) -> NewCall {
        NewCall {
            kind,
            dtype: Some(DataType::U16),
            reduction: None,
            peer: 5,
            count: 10,
            buffers: (20, 160),
            in_place: false,
            vectored: true,
            addresses: (0, 0),
            tag: 12,
        }
    }

    fn as_record(words: &[u64; WORDS]) -> CallRecord {
        let names = ["", "none", "ring"].map(str::to_string);
        record(7, words, &RecordPlace { key: "ab", rank: 2, nranks: 8, names: &names, scale: TickScale::NS }).unwrap()
    }

    #[test]
    fn every_call_comes_back_as_it_was_accepted() {
        let all = Collective::ALL.into_iter().chain([Collective::Custom]).map(CallKind::Collective);
        for kind in all.chain([CallKind::Send, CallKind::Recv]) {
            let words = CallWords::new(&call(kind), 3);
            assert_eq!(words.is_message(), matches!(kind, CallKind::Send | CallKind::Recv));
            let words = words.accepted(4, 99, None);
            assert_eq!(comm_of(&words), 3);
            let record = as_record(&words);
            assert_eq!((record.call.as_str(), record.number, record.count), (kind.name(), 4, 10));
            assert_eq!((record.dtype.as_str(), record.input_bytes, record.output_bytes), ("uint16", 20, 160));
            assert_eq!((record.accepted_ns, record.begun_ns, record.ended_ns), (99, None, None));
            assert_eq!((record.state, record.vectored, record.in_place), (CallState::Accepted, true, false));
            assert_eq!((record.tag, CallKind::of_nccl(kind.nccl_name())), (12, (kind != CUSTOM).then_some(kind)));
            let has_root = matches!(kind, CallKind::Collective(collective) if collective.has_root());
            assert_eq!(record.root.is_some(), has_root);
            // The blocks differ in size: those of all ranks are what the rank's buffer has.
            let bytes = match kind {
                CallKind::Collective(Collective::AllGather) => 160,
                _ => 20,
            };
            assert_eq!(record.bytes, bytes);
            let even = as_record(&CallWords::new(&NewCall { vectored: false, ..call(kind) }, 3).accepted(4, 99, None));
            let is_gather = matches!(kind, CallKind::Collective(Collective::AllGather | Collective::ReduceScatter));
            assert_eq!((even.bytes, even.vectored), (if is_gather { 160 } else { 20 }, false));
        }
    }

    #[test]
    fn every_operation_has_its_name() {
        let builtin = RedOp::of(DataType::I32).map(|op| (Reduction::new(op, DataType::I32, 3), op.name()));
        let made = (Reduction::pre_mul_sum(DataType::F32, [1; 8]), "premulsum");
        let halves = (Reduction::new(RedOp::Avg, DataType::F16, 3), "avg");
        for (reduction, name) in builtin.chain([made, halves]) {
            let call = NewCall { reduction: Some(reduction), ..call(CallKind::Collective(Collective::AllReduce)) };
            assert_eq!(as_record(&CallWords::new(&call, 0).accepted(1, 0, None)).op, name);
        }
    }

    #[test]
    fn times_names_and_the_awaited_rank_are_told() {
        let words = CallWords::new(&call(CallKind::Collective(Collective::AllReduce)), u32::MAX).placed(true, (0, 0));
        let at_once = words.accepted(1, 50, Some(CallNames { algorithm: 2, carrier: 1 }));
        let record = as_record(&at_once);
        assert_eq!((record.begun_ns, record.state, record.in_place), (Some(50), CallState::Begun, true));
        assert_eq!((record.algorithm.as_str(), record.carrier.as_str()), ("ring", "none"));
        let words: [AtomicU64; WORDS] = words.placed(false, (0, 0)).accepted(1, 50, None).map(AtomicU64::new);
        let read = || as_record(&std::array::from_fn(|index| words[index].load(Ordering::Relaxed)));
        begin(&words, 60, CallNames { algorithm: 2, carrier: 1 });
        assert_eq!((read().begun_ns, read().algorithm.as_str(), read().in_place), (Some(60), "ring", false));
        fail(&words, 70, Some(0));
        assert_eq!((read().state, read().awaited, read().ended_ns), (CallState::Failed, Some(0), Some(70)));
        fail(&words, 70, None);
        assert_eq!(read().awaited, None);
        end(&words, 80, Some(4096));
        assert_eq!((read().state, read().nic_bytes, read().ended_ns), (CallState::Ended, Some(4096), Some(80)));
        join(&words, 6);
        assert_eq!(read().group, Some(6));
        assert_eq!(comm_of(&std::array::from_fn(|index| words[index].load(Ordering::Relaxed))), u32::MAX);
    }
}
