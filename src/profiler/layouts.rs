//! What NCCL and its profiler plugins hand to each other, by version of the interface.
//!
//! Source: the headers of NCCL's profiler plugins. Version 2 came with NCCL 2.24, 3 with 2.26, 4 with 2.27, 5 with 2.28, 6 with 2.29
//! and 7 with 2.31. Handles, contexts and texts are addresses: nobody but their owner looks behind them.

#![allow(missing_docs)]

use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};

/// An address of something that C made.
pub type CAddress = usize;

/// Kinds of events, as bits of the mask by which a plugin chooses.
pub mod kind {
    /// Operations that are launched together.
    pub const GROUP: u64 = 1;
    /// A collective.
    pub const COLLECTIVE: u64 = 1 << 1;
    /// A send or a receive.
    pub const MESSAGE: u64 = 1 << 2;
    /// A proxy's operation.
    pub const PROXY_OPERATION: u64 = 1 << 3;
    /// A proxy's step.
    pub const PROXY_STEP: u64 = 1 << 4;
    /// A channel of a kernel: how long an operation runs.
    pub const KERNEL_CHANNEL: u64 = 1 << 6;
    /// An event of a network plugin's.
    pub const NET_PLUGIN: u64 = 1 << 7;
    /// A group as the program makes it, from version 5 on.
    pub const GROUP_CALL: u64 = 1 << 8;
    /// A collective as the program makes it, from version 5 on.
    pub const COLLECTIVE_CALL: u64 = 1 << 9;
    /// A send or a receive as the program makes it, from version 5 on.
    pub const MESSAGE_CALL: u64 = 1 << 10;
    /// A launch of a kernel, from version 5 on.
    pub const KERNEL_LAUNCH: u64 = 1 << 11;
    /// A collective of copy engines, from version 6 on.
    pub const COPIED_COLLECTIVE: u64 = 1 << 12;
    /// What depends on messages and collectives, and brings their events along.
    pub const OF_BOTH: u64 = PROXY_OPERATION | PROXY_STEP | KERNEL_CHANNEL | NET_PLUGIN;
}

/// Kernel channels have ended (a state of `recordEventState`).
pub const CHANNEL_STOPS: c_int = 22;
/// `ncclGroupStart` has ended.
pub const GROUP_START_ENDS: c_int = 23;
/// `ncclGroupEnd` begins.
pub const GROUP_END_BEGINS: c_int = 24;

/// A collective of versions 2 and 3, which differ in whether `trafficBytes` lies before the channels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CollectiveV3<B: Copy> {
    pub comm_name: CAddress,
    pub comm_hash: u64,
    pub sequence: u64,
    pub function: CAddress,
    pub send: CAddress,
    pub recv: CAddress,
    pub count: usize,
    pub root: c_int,
    pub datatype: CAddress,
    pub traffic_bytes: B,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: CAddress,
    pub protocol: CAddress,
}

/// A message of versions 2 and 3.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MessageV3 {
    pub comm_name: CAddress,
    pub comm_hash: u64,
    pub function: CAddress,
    pub buffer: CAddress,
    pub datatype: CAddress,
    pub count: usize,
    pub peer: c_int,
}

/// A collective from version 4 on. Only later versions have what stands behind the protocol.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CollectiveV7 {
    pub sequence: u64,
    pub function: CAddress,
    pub send: CAddress,
    pub recv: CAddress,
    pub count: usize,
    pub root: c_int,
    pub datatype: CAddress,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: CAddress,
    pub protocol: CAddress,
    /// From version 5 on.
    pub group: CAddress,
    /// From version 7 on.
    pub kernel_variant: CAddress,
    /// From version 7 on.
    pub is_symmetric: bool,
    /// From version 7 on: the tag of the call's configuration.
    pub tag: u64,
}

/// A message from version 4 on. Only later versions have what stands behind the channels.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MessageV7 {
    pub function: CAddress,
    pub buffer: CAddress,
    pub datatype: CAddress,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
    /// From version 5 on.
    pub group: CAddress,
    /// From version 7 on.
    pub tag: u64,
}

/// A group as it is called, from version 5 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupCall {
    pub is_captured: bool,
    pub depth: c_int,
}

/// A collective as it is called, from version 5 on; its tag from version 7 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CollectiveCallEvent {
    pub function: CAddress,
    pub count: usize,
    pub datatype: CAddress,
    pub root: c_int,
    pub stream: CAddress,
    pub is_captured: bool,
    pub tag: u64,
}

/// A message as it is called, from version 5 on; its tag from version 7 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MessageCallEvent {
    pub function: CAddress,
    pub count: usize,
    pub datatype: CAddress,
    pub stream: CAddress,
    pub is_captured: bool,
    pub tag: u64,
}

/// A channel of a kernel, from version 3 on; its clock from version 4 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelChannel {
    pub channel: u8,
    pub clock_ns: u64,
}

/// A collective of copy engines, from version 6 on, as far as all versions agree.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CopiedCollective {
    pub sequence: u64,
    pub function: CAddress,
    pub send: CAddress,
    pub recv: CAddress,
    pub count: usize,
    pub root: c_int,
    pub datatype: CAddress,
}

/// What is told of an event; its kind says which of them.
#[repr(C)]
#[derive(Clone, Copy)]
pub union EventBody {
    pub collective_v2: CollectiveV3<usize>,
    pub collective_v3: CollectiveV3<()>,
    pub message_v3: MessageV3,
    pub collective: CollectiveV7,
    pub message: MessageV7,
    pub group_call: GroupCall,
    pub collective_call: CollectiveCallEvent,
    pub message_call: MessageCallEvent,
    pub channel: KernelChannel,
    pub copied: CopiedCollective,
    /// As much as any version has, for plugins that copy an event whole.
    pub space: [u64; 16],
}

/// An event that begins. Versions up to 4 have its kind in the first byte, later ones in the first word: little-endian machines
/// read both.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Event {
    pub kind: u64,
    pub parent: CAddress,
    pub rank: c_int,
    pub body: EventBody,
}

/// What goes with a state of an event.
#[repr(C)]
pub struct StateDetails {
    /// Of a channel that has stopped, from version 4 on.
    pub clock_ns: u64,
}

/// `init` of versions 2 and 3.
pub type InitV3 = unsafe extern "C" fn(context: *mut CAddress, mask: *mut c_int) -> c_int;
/// `init` of version 4.
pub type InitV4 = unsafe extern "C" fn(
    context: *mut CAddress,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    nranks: c_int,
    rank: c_int,
    logger: CAddress,
) -> c_int;
/// `init` from version 5 on.
pub type InitV7 = unsafe extern "C" fn(
    context: *mut CAddress,
    id: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    nranks: c_int,
    rank: c_int,
    logger: CAddress,
) -> c_int;

/// `startEvent`
pub type StartEvent = unsafe extern "C" fn(context: CAddress, handle: *mut CAddress, event: *const Event) -> c_int;
/// `stopEvent`
pub type StopEvent = unsafe extern "C" fn(handle: CAddress) -> c_int;
/// `recordEventState`
pub type RecordState = unsafe extern "C" fn(handle: CAddress, state: c_int, details: *const StateDetails) -> c_int;
/// `finalize`
pub type Finalize = unsafe extern "C" fn(context: CAddress) -> c_int;

/// What a plugin exports as `ncclProfiler_v7`, or as an older version with another `init`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProfilerTable<I> {
    /// Its name.
    pub name: *const c_char,
    /// A communicator begins.
    pub init: Option<I>,
    /// An event begins.
    pub start_event: Option<StartEvent>,
    /// An event ends.
    pub stop_event: Option<StopEvent>,
    /// An event changes.
    pub record_state: Option<RecordState>,
    /// A communicator ends.
    pub finalize: Option<Finalize>,
}

// SAFETY: all that it points to must stay and be shared by threads; because a table is constant, and so is the text of its name.
unsafe impl<I> Sync for ProfilerTable<I> {}
// SAFETY: as for `Sync`; because nothing belongs to a thread.
unsafe impl<I> Send for ProfilerTable<I> {}

const _: () = {
    assert!(cfg!(target_endian = "little") && size_of::<CAddress>() == size_of::<*const c_char>());
    assert!(offset_of!(Event, parent) == 8 && offset_of!(Event, rank) == 16 && offset_of!(Event, body) == 24);
    assert!(size_of::<EventBody>() == 128);
    assert!(offset_of!(CollectiveV3<usize>, channels) == 80 && offset_of!(CollectiveV3<usize>, algorithm) == 88);
    assert!(offset_of!(CollectiveV3<()>, channels) == 72 && offset_of!(CollectiveV3<()>, algorithm) == 80);
    assert!(offset_of!(MessageV3, peer) == 48);
    assert!(offset_of!(CollectiveV7, datatype) == 48 && offset_of!(CollectiveV7, protocol) == 72);
    assert!(offset_of!(CollectiveV7, group) == 80 && offset_of!(CollectiveV7, kernel_variant) == 88);
    assert!(offset_of!(CollectiveV7, is_symmetric) == 96 && offset_of!(CollectiveV7, tag) == 104);
    assert!(offset_of!(MessageV7, channels) == 36 && offset_of!(MessageV7, group) == 40);
    assert!(offset_of!(MessageV7, tag) == 48 && offset_of!(GroupCall, depth) == 4);
    assert!(offset_of!(CollectiveCallEvent, is_captured) == 40 && offset_of!(CollectiveCallEvent, tag) == 48);
    assert!(offset_of!(MessageCallEvent, is_captured) == 32 && offset_of!(MessageCallEvent, tag) == 40);
    assert!(offset_of!(KernelChannel, clock_ns) == 8 && offset_of!(CopiedCollective, datatype) == 48);
    assert!(size_of::<ProfilerTable<InitV3>>() == 48);
};
