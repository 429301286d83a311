//! Calls of the vendor's library: what its profiler interface tells becomes records.
//!
//! The interface hands our handles back without saying whose they are, so they are numbers of records. A call is accepted and
//! enqueued on the program's thread; channels of its kernel begin and end later, on threads of the vendor's, and say how long it ran.
#![forbid(unsafe_code)]

use super::call::{self, CallKind};
use super::{CallNames, CommRecords, NewCall, RECORDER};
use crate::dtype::DataType;
use crate::plan::Collective;
use crate::topo::Rank;
use std::sync::atomic::AtomicU64;

/// The carrier of such calls.
pub const VENDOR: &str = "vendor";

/// A call of the vendor's, as it is told.
#[derive(Debug, Clone, Copy)]
pub struct VendorEvent<'a> {
    /// What is called.
    pub kind: CallKind,
    /// The type of an element, where it is known.
    pub dtype: Option<DataType>,
    /// Elements, as the call says them.
    pub count: u64,
    /// The root or the peer.
    pub peer: u32,
    /// Both buffers.
    pub buffers: (u64, u64),
    /// The tag of its configuration.
    pub tag: u64,
    /// The algorithm and the protocol.
    pub algorithm: [&'a str; 2],
}

/// The record of a call of the vendor's that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VendorTicket(pub u64);

impl CommRecords {
    /// A call of the vendor's is accepted. None where it cannot be recorded.
    pub fn told(&self, event: &VendorEvent<'_>, (rank, nranks): (u32, u32)) -> Option<VendorTicket> {
        let VendorEvent { kind, dtype, count, peer, buffers: addresses, tag, .. } = *event;
        let block = count.saturating_mul(dtype.map_or(1, DataType::size) as u64);
        let blocks = |blocks: usize| block.saturating_mul(blocks as u64);
        let (me, root, n) = (Rank(rank), Rank(peer), nranks as usize);
        let (buffers, in_place) = match kind {
            CallKind::Collective(collective) => {
                let buffers =
                    (blocks(collective.input_blocks(n, me, root)), blocks(collective.output_blocks(n, me, root)));
                (buffers, is_in_place(collective, addresses, block * u64::from(rank), rank == peer))
            }
            CallKind::Send => ((block, 0), false),
            CallKind::Recv => ((0, block), false),
        };
        let (reduction, vectored) = (None, false);
        let words =
            self.words(&NewCall { kind, dtype, reduction, peer, count, buffers, in_place, vectored, addresses, tag });
        let algorithm = match event.algorithm {
            ["", ""] => String::new(),
            [algorithm, ""] => algorithm.to_string(),
            [algorithm, protocol] => format!("{algorithm}_{protocol}"),
        };
        let names = if algorithm.is_empty() { self.plain() } else { self.names(&algorithm) };
        let ticket = self.accepted_as(&words, names);
        (ticket != u64::MAX).then_some(VendorTicket(ticket))
    }

    fn accepted_as(&self, words: &super::CallWords, names: CallNames) -> u64 {
        let ticket = self.accepted(words);
        self.change(ticket, |words| call::name(words, names));
        ticket.record
    }
}

/// Whether one buffer lies in the other as NCCL's convention says, for a rank whose own block begins `own` bytes from the start.
fn is_in_place(collective: Collective, (send, recv): (u64, u64), own: u64, is_root: bool) -> bool {
    match collective {
        Collective::AllGather => send == recv + own,
        Collective::Gather => is_root && send == recv + own,
        Collective::ReduceScatter => recv == send + own,
        Collective::Scatter => is_root && recv == send + own,
        Collective::Broadcast | Collective::Reduce => is_root && send == recv,
        Collective::AllReduce | Collective::AllToAll | Collective::Custom => send == recv,
    }
}

/// Changes the record of a call of the vendor's. Several of its threads may tell of one call.
fn change(VendorTicket(number): VendorTicket, change: impl Fn(&[AtomicU64; super::ring::WORDS], u64)) {
    if let Some(recorder) = RECORDER.get().get().and_then(Option::as_ref) {
        let now = recorder.ticks();
        recorder.ring.change_soon(number, |words| change(words, now));
    }
}

/// The call has been enqueued.
pub fn enqueued(ticket: VendorTicket) {
    change(ticket, call::enqueue);
}

/// Its kernel has begun on a channel.
pub fn channel_begun(ticket: VendorTicket) {
    change(ticket, call::begin_channel);
}

/// Its kernel has ended on a channel.
pub fn channel_ended(ticket: VendorTicket) {
    change(ticket, call::end_channel);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::clock::RecordClock;
    use crate::records::{CallState, RecordedComm, Recorder};

    fn event() -> VendorEvent<'static> {
        let kind = CallKind::Collective(Collective::AllGather);
        let (buffers, algorithm) = ((0x1000 + 40, 0x1000), ["RING", "LL"]);
        VendorEvent { kind, dtype: Some(DataType::F32), count: 10, peer: 0, buffers, tag: 9, algorithm }
    }

    #[test]
    fn channels_say_how_long_a_call_ran_and_without_them_its_enqueueing_does() {
        let config = crate::config::Config { trace: "unused.json".to_string(), ..Default::default() };
        let recorder: &'static Recorder = Box::leak(Box::new(Recorder {
            clock: RecordClock::of_system(),
            ..Recorder::new(&config, 0, true).unwrap()
        }));
        let comm = RecordedComm { launched: vec![None; 4], carrier: VENDOR.to_string(), ..RecordedComm::default() };
        let records = CommRecords::of(recorder, &comm);
        let change = |VendorTicket(number), now, change: fn(&[AtomicU64; crate::records::ring::WORDS], u64)| {
            recorder.ring.change_soon(number, |words| change(words, now));
        };
        let (silent, told) = (records.told(&event(), (1, 4)).unwrap(), records.told(&event(), (1, 4)).unwrap());
        let later = recorder.ticks() + 1000;
        [silent, told].into_iter().for_each(|ticket| change(ticket, later, call::enqueue));
        let read = |index: usize| recorder.trace().calls[index].clone();
        let call = read(0);
        assert_eq!((call.state, call.begun_ns, call.ended_ns), (CallState::Ended, Some(call.accepted_ns), Some(later)));
        assert_eq!((call.algorithm.as_str(), call.carrier.as_str(), call.tag), ("RING_LL", "vendor", 9));
        assert_eq!((call.bytes, call.input_bytes, call.output_bytes, call.in_place), (160, 40, 160, true));
        assert_eq!(call.nic_bytes, None);
        let times = |index: usize| (read(index).state, read(index).begun_ns, read(index).ended_ns);
        change(told, later + 10, call::begin_channel);
        assert_eq!(times(1), (CallState::Begun, Some(later + 10), None));
        change(told, later + 20, call::begin_channel);
        change(told, later + 30, call::end_channel);
        assert_eq!(times(1), (CallState::Begun, Some(later + 10), None));
        change(told, later + 40, call::end_channel);
        assert_eq!(times(1), (CallState::Ended, Some(later + 10), Some(later + 40)));
        change(told, later + 50, call::end_channel);
        assert_eq!(times(1).2, Some(later + 40), "a channel that never began");
        // The channel of a call that was enqueued after it had begun.
        let early = records.told(&event(), (1, 4)).unwrap();
        change(early, later + 60, call::begin_channel);
        change(early, later + 70, call::enqueue);
        assert_eq!(times(2), (CallState::Begun, Some(later + 60), None));
    }

    #[test]
    fn buffers_lie_in_each_other_where_nccl_s_convention_says_so() {
        for (collective, send, recv) in [
            (Collective::AllGather, 140, 100),
            (Collective::Gather, 140, 100),
            (Collective::ReduceScatter, 100, 140),
            (Collective::Scatter, 100, 140),
            (Collective::AllReduce, 100, 100),
            (Collective::Broadcast, 100, 100),
        ] {
            assert!(is_in_place(collective, (send, recv), 40, true), "{}", collective.name());
            assert!(!is_in_place(collective, (send, recv + 1), 40, true), "{}", collective.name());
            assert!(!collective.has_root() || !is_in_place(collective, (send, recv), 40, false));
        }
    }
}
