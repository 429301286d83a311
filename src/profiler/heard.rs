//! One communicator as the program's profiler hears it: from calls to events.
//!
//! As NCCL does it: from version 5 on a group and a call as the program makes them, over at once; then, when the call begins, a
//! group of what runs together, the collective or message in it, and, where the plugin wants channels, one channel. These end
//! when the call does, so that the duration of an event is that of the call. Their parents are what NCCL makes them in the
//! plugin's version. A call takes a lock for each of its events, which only calls of the same communicator take.
#![forbid(unsafe_code)]

use super::layouts::{
    kind, CAddress, CollectiveCallEvent, CollectiveV3, CollectiveV7, Event, EventBody, GroupCall, KernelChannel,
    MessageCallEvent, MessageV3, MessageV7, StateDetails, CHANNEL_STOPS, GROUP_END_BEGINS, GROUP_START_ENDS,
};
use super::plugin::{plugin, Introduction, ProfilerPlugin};
use crate::sync::locked;
use std::collections::HashMap;
use std::ffi::{c_int, CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// What a communicator tells of itself.
#[derive(Debug, Clone, Copy)]
pub struct HeardComm<'a> {
    /// Its key.
    pub key: u128,
    /// Its name.
    pub name: &'a str,
    /// Nodes.
    pub nodes: u32,
    /// Ranks.
    pub nranks: u32,
    /// This rank.
    pub rank: u32,
}

/// A call, in NCCL's words.
#[derive(Debug, Clone, Copy)]
pub struct HeardCall {
    /// The function, without `nccl`.
    pub function: &'static CStr,
    /// The type, with `nccl`.
    pub datatype: &'static CStr,
    /// Whether it is a send or a receive.
    pub is_message: bool,
    /// Elements, as the call says them.
    pub count: u64,
    /// The root or the peer.
    pub peer: u32,
    /// Both buffers.
    pub buffers: (u64, u64),
    /// The tag of the call's configuration; 0 where there is none.
    pub tag: u64,
}

/// What runs together. It ends with the last of it.
#[derive(Debug)]
struct EventGroup {
    plugin: &'static ProfilerPlugin,
    handle: OnceLock<CAddress>,
}

impl Drop for EventGroup {
    fn drop(&mut self) {
        self.handle.get().into_iter().for_each(|handle| self.plugin.stop(*handle));
    }
}

/// A call that has been accepted and has not ended.
#[derive(Debug)]
struct OpenCall {
    call: HeardCall,
    /// Its number among the communicator's calls of this function, from 0.
    sequence: u64,
    /// The call as it was made, from version 5 on.
    made: CAddress,
    group: Arc<EventGroup>,
    has_begun: bool,
    event: CAddress,
    channel: CAddress,
}

/// A communicator that the program's profiler knows.
#[derive(Debug)]
pub struct ProfiledComm {
    plugin: &'static ProfilerPlugin,
    context: CAddress,
    name: CString,
    id: u64,
    rank: c_int,
    numbers: AtomicU64,
    open: Mutex<HashMap<u64, OpenCall>>,
    sequences: Mutex<HashMap<&'static CStr, u64>>,
}

fn clock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

fn text(text: &'static CStr) -> CAddress {
    text.as_ptr() as CAddress
}

impl ProfiledComm {
    /// Tells the program's profiler of a communicator. None where there is none, or it refuses.
    pub fn join(comm: &HeardComm<'_>) -> Option<ProfiledComm> {
        let plugin = plugin()?;
        let name = CString::new(comm.name).unwrap_or_default();
        let id = comm.key as u64;
        let (nodes, nranks, rank) = (comm.nodes, comm.nranks, comm.rank);
        let context = plugin.begin(&Introduction { id, name: &name, nodes, nranks, rank })?;
        let (numbers, open, sequences) = (AtomicU64::new(1), Mutex::default(), Mutex::default());
        Some(ProfiledComm { plugin, context, name, id, rank: rank as c_int, numbers, open, sequences })
    }

    fn start(&self, kind: u64, parent: CAddress, body: EventBody) -> CAddress {
        self.plugin.start(self.context, &Event { kind, parent, rank: self.rank, body })
    }

    /// The events that bring a call's own along.
    fn of_call(call: &HeardCall) -> u64 {
        kind::OF_BOTH | if call.is_message { kind::MESSAGE } else { kind::COLLECTIVE }
    }

    /// A call is accepted: its number here; 0 where nothing of it is wanted.
    pub fn accepted(&self, call: HeardCall) -> u64 {
        let made = kind::GROUP_CALL | kind::COLLECTIVE_CALL | kind::MESSAGE_CALL | kind::KERNEL_LAUNCH;
        if !self.plugin.wants(made | kind::GROUP | kind::OF_BOTH | kind::COLLECTIVE | kind::MESSAGE) {
            return 0;
        }
        let made = if self.plugin.version >= 5 { self.made(&call) } else { 0 };
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let group = Arc::new(EventGroup { plugin: self.plugin, handle: OnceLock::new() });
        let sequence = {
            let mut sequences = locked(&self.sequences);
            let next = sequences.entry(call.function).or_default();
            std::mem::replace(next, *next + 1)
        };
        let open = OpenCall { call, sequence, made, group, has_begun: false, event: 0, channel: 0 };
        locked(&self.open).insert(number, open);
        number
    }

    /// Tells of a call as the program makes it.
    fn made(&self, call: &HeardCall) -> CAddress {
        let mut body = EventBody { space: [0; 16] };
        body.group_call = GroupCall { is_captured: false, depth: 1 };
        let group = self.start(kind::GROUP_CALL, 0, body);
        self.plugin.record(group, GROUP_START_ENDS, None);
        let (function, datatype) = (text(call.function), text(call.datatype));
        let (count, tag, is_captured, stream) = (call.count as usize, call.tag, false, 0);
        let mut body = EventBody { space: [0; 16] };
        let (own, wanted) = if call.is_message {
            body.message_call = MessageCallEvent { function, count, datatype, stream, is_captured, tag };
            (kind::MESSAGE_CALL, kind::MESSAGE)
        } else {
            let root = call.peer as c_int;
            body.collective_call = CollectiveCallEvent { function, count, datatype, root, stream, is_captured, tag };
            (kind::COLLECTIVE_CALL, kind::COLLECTIVE)
        };
        let made = match self.plugin.wants(own | wanted | kind::OF_BOTH) {
            true => self.start(own, group, body),
            false => 0,
        };
        self.plugin.stop(made);
        self.plugin.record(group, GROUP_END_BEGINS, None);
        self.plugin.stop(group);
        made
    }

    /// Calls run together, or as one: they are one group.
    pub fn grouped(&self, numbers: impl Iterator<Item = u64>) {
        let mut open = locked(&self.open);
        let group = Arc::new(EventGroup { plugin: self.plugin, handle: OnceLock::new() });
        for number in numbers {
            if let Some(call) = open.get_mut(&number) {
                call.group = group.clone();
            }
        }
    }

    /// A call begins; a collective when it is known by which algorithm.
    pub fn begun(&self, number: u64, algorithm: Option<&'static CStr>) {
        let Some(mut open) = locked(&self.open).remove(&number) else { return };
        if !open.has_begun && (open.call.is_message || algorithm.is_some()) {
            self.begin(&mut open, algorithm.unwrap_or_default());
        }
        locked(&self.open).insert(number, open);
    }

    fn begin(&self, open: &mut OpenCall, algorithm: &'static CStr) {
        open.has_begun = true;
        let (call, space) = (open.call, EventBody { space: [0; 16] });
        if !self.plugin.wants(kind::GROUP | kind::COLLECTIVE | kind::MESSAGE | kind::OF_BOTH) {
            return;
        }
        let group = *open.group.handle.get_or_init(|| self.start(kind::GROUP, 0, space));
        if !self.plugin.wants(Self::of_call(&call)) {
            return;
        }
        let parent = if self.plugin.version >= 5 { open.made } else { group };
        let body = if call.is_message { self.message(&call, group) } else { self.collective(open, group, algorithm) };
        open.event = self.start(if call.is_message { kind::MESSAGE } else { kind::COLLECTIVE }, parent, body);
        if self.plugin.version >= 3 && self.plugin.wants(kind::KERNEL_CHANNEL) && open.event != 0 {
            let mut body = space;
            body.channel = KernelChannel { channel: 0, clock_ns: clock_ns() };
            open.channel = self.start(kind::KERNEL_CHANNEL, open.event, body);
        }
    }

    fn collective(&self, open: &OpenCall, group: CAddress, algorithm: &'static CStr) -> EventBody {
        let OpenCall { call, sequence, .. } = *open;
        let mut body = EventBody { space: [0; 16] };
        let (function, datatype) = (text(call.function), text(call.datatype));
        let (count, root) = (call.count as usize, call.peer as c_int);
        let (send, recv) = (call.buffers.0 as CAddress, call.buffers.1 as CAddress);
        let (algorithm, protocol) = (text(algorithm), text(c""));
        let (comm_name, comm_hash, channels, warps) = (self.name.as_ptr() as CAddress, self.id, 1, 0);
        match self.plugin.version {
            2 => {
                let traffic_bytes = 0usize;
                body.collective_v2 = CollectiveV3 {
                    comm_name,
                    comm_hash,
                    sequence,
                    function,
                    send,
                    recv,
                    count,
                    root,
                    datatype,
                    traffic_bytes,
                    channels,
                    warps,
                    algorithm,
                    protocol,
                };
            }
            3 => {
                body.collective_v3 = CollectiveV3 {
                    comm_name,
                    comm_hash,
                    sequence,
                    function,
                    send,
                    recv,
                    count,
                    root,
                    datatype,
                    traffic_bytes: (),
                    channels,
                    warps,
                    algorithm,
                    protocol,
                };
            }
            _ => {
                let (kernel_variant, is_symmetric, tag) = (0, false, call.tag);
                body.collective = CollectiveV7 {
                    sequence,
                    function,
                    send,
                    recv,
                    count,
                    root,
                    datatype,
                    channels,
                    warps,
                    algorithm,
                    protocol,
                    group,
                    kernel_variant,
                    is_symmetric,
                    tag,
                };
            }
        }
        body
    }

    fn message(&self, call: &HeardCall, group: CAddress) -> EventBody {
        let mut body = EventBody { space: [0; 16] };
        let (function, datatype) = (text(call.function), text(call.datatype));
        let (count, peer) = (call.count as usize, call.peer as c_int);
        let buffer = call.buffers.0.max(call.buffers.1) as CAddress;
        match self.plugin.version {
            ..=3 => {
                let (comm_name, comm_hash) = (self.name.as_ptr() as CAddress, self.id);
                body.message_v3 = MessageV3 { comm_name, comm_hash, function, buffer, datatype, count, peer };
            }
            _ => {
                let (channels, tag) = (1, call.tag);
                body.message = MessageV7 { function, buffer, datatype, count, peer, channels, group, tag };
            }
        }
        body
    }

    /// A call has ended or failed.
    pub fn ended(&self, number: u64) {
        let Some(mut open) = locked(&self.open).remove(&number) else { return };
        if !open.has_begun {
            self.begin(&mut open, c"");
        }
        let details = StateDetails { clock_ns: clock_ns() };
        if self.plugin.version >= 4 {
            self.plugin.record(open.channel, CHANNEL_STOPS, Some(&details));
        }
        self.plugin.stop(open.channel);
        self.plugin.stop(open.event);
    }

    /// The communicator has ended.
    pub fn leave(&self) {
        locked(&self.open).clear();
        self.plugin.end(self.context);
    }
}
