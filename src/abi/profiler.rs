//! The profiler that the vendor's library loads: its calls become records.
//!
//! NCCL finds these tables in this library where `NCCL_PROFILER_PLUGIN` names it (`vendor::profiled`), the newest that it knows first.
//! Handles are numbers of records, so an event allocates nothing and none is ever looked behind. A call that
//! Strata has the vendor run in two levels is recorded as its phases, in communicators of Strata's making; those of calls that Strata
//! carries itself are not, as these calls are.

use crate::bootstrap::launcher;
use crate::config::Config;
use crate::profiler::layouts::{
    kind, CAddress, CollectiveV7, CopiedCollective, Event, InitV4, InitV7, MessageV7, ProfilerTable, StateDetails,
};
use crate::profiler::plugin::OWN_NAME;
use crate::records::vendor::{self, VendorEvent, VendorTicket, VENDOR};
use crate::records::{type_of_nccl, CallKind, CommRecords, RecordedComm};
use crate::vendor::calls::{INSIDE_NAMES, SUB_NAMES};
use std::ffi::{c_char, c_int, CStr};
use std::panic::catch_unwind;

/// The events that are wanted: calls, and the channels that say how long they run.
const WANTED: u64 = kind::COLLECTIVE | kind::MESSAGE | kind::KERNEL_CHANNEL;
/// From version 6 on also those that copy engines carry out.
const WANTED_NEW: u64 = WANTED | kind::COPIED_COLLECTIVE;
/// What a handle is of, in its lowest bits; the number of the record is above them, from 1 on.
const CALL: CAddress = 0;
const CHANNEL: CAddress = 1;
const KINDS: u32 = 1;

/// A communicator of the vendor's.
struct Context {
    records: CommRecords,
    rank: u32,
    nranks: u32,
}

fn handle(ticket: VendorTicket, of: CAddress) -> CAddress {
    (ticket.0 as CAddress + 1) << KINDS | of
}

fn ticket(handle: CAddress) -> Option<VendorTicket> {
    (handle >> KINDS).checked_sub(1).map(|number| VendorTicket(number as u64))
}

/// A text of the vendor's; none at null.
///
/// # Safety
/// It ends with a zero byte and stays as long as it is used.
unsafe fn text<'a>(address: CAddress) -> &'a CStr {
    match address {
        0 => c"",
        // SAFETY: it must end with a zero byte and stay; because the caller says so.
        address => unsafe { CStr::from_ptr(address as *const c_char) },
    }
}

/// Begins a communicator: the context, or 0 where its calls are not recorded.
///
/// # Safety
/// The places are valid, and the name is null or ends with a zero byte.
unsafe fn begin(
    (context, mask, wanted): (*mut CAddress, *mut c_int, u64),
    (name, id): (*const c_char, u64),
    [nodes, nranks, rank]: [c_int; 3],
) -> c_int {
    let begun = catch_unwind(|| {
        // SAFETY: it must be null or a text; because the caller says so.
        let name = unsafe { text(name as CAddress) };
        let (config, _) = Config::from_env();
        let name = name.to_string_lossy().into_owned();
        let nranks = nranks.max(1) as u32;
        let comm = RecordedComm {
            key: u128::from(id),
            rank: rank.max(0) as u32,
            launched: vec![None; nranks as usize],
            is_alone: false,
            nodes: nodes.max(1) as u32,
            carrier: VENDOR.to_string(),
            companion: name.starts_with(SUB_NAMES),
            name,
        };
        if config.trace == "none" {
            return (0, 0);
        }
        if comm.name.starts_with(INSIDE_NAMES) {
            // The mask is one for all communicators.
            return (0, wanted);
        }
        let rank = comm.rank;
        let records = CommRecords::of_vendor(&config, launcher::numbers(), &comm);
        let made = records.map(|records| Box::into_raw(Box::new(Context { records, rank, nranks })) as CAddress);
        made.map_or((0, 0), |made| (made, wanted))
    });
    let (made, wanted) = begun.unwrap_or((0, 0));
    // SAFETY: the place must be valid; because the caller says so.
    unsafe { context.write(made) };
    // SAFETY: the place must be valid; because the caller says so.
    unsafe { mask.write(wanted as c_int) };
    0
}

unsafe extern "C" fn init_v4(
    context: *mut CAddress,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    nranks: c_int,
    rank: c_int,
    _logger: CAddress,
) -> c_int {
    // SAFETY: the places and the name must be valid; because the vendor's library says so.
    unsafe { begin((context, mask, WANTED), (name, hash), [nodes, nranks, rank]) }
}

unsafe extern "C" fn init_v5(
    context: *mut CAddress,
    id: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    nranks: c_int,
    rank: c_int,
    _logger: CAddress,
) -> c_int {
    // SAFETY: the places and the name must be valid; because the vendor's library says so.
    unsafe { begin((context, mask, WANTED), (name, id), [nodes, nranks, rank]) }
}

unsafe extern "C" fn init_v7(
    context: *mut CAddress,
    id: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    nranks: c_int,
    rank: c_int,
    _logger: CAddress,
) -> c_int {
    // SAFETY: the places and the name must be valid; because the vendor's library says so.
    unsafe { begin((context, mask, WANTED_NEW), (name, id), [nodes, nranks, rank]) }
}

/// Reads a field of what lies behind an address; not more, as a version has no more than its own fields.
macro_rules! field {
    ($place:expr, $kind:ty, $field:ident) => {{
        let place: *const $kind = $place.cast();
        // SAFETY: the address must be one of such a body; because the event's kind and version say so.
        let field = unsafe { &raw const (*place).$field };
        // SAFETY: the field must be there and aligned; because it is one of the body's.
        unsafe { field.read() }
    }};
}

/// An event begins: its handle. `has_tag` of version 7.
///
/// # Safety
/// The context is one of `begin`'s that has not ended, or 0; the event is one of the version, and its texts stay during the call.
unsafe fn start(context: CAddress, kind: u64, event: *const Event, has_tag: bool) -> CAddress {
    // SAFETY: the event must be there; because the caller says so.
    let body: *const u8 = unsafe { &raw const (*event).body }.cast();
    if kind == kind::KERNEL_CHANNEL {
        // SAFETY: the event must be there; because the caller says so.
        let parent = unsafe { &raw const (*event).parent };
        // SAFETY: the field must be there; because all versions have it.
        let Some(call) = ticket(unsafe { parent.read() }) else { return 0 };
        vendor::channel_begun(call);
        return handle(call, CHANNEL);
    }
    let place = context as *const Context;
    // SAFETY: it must be null or a context that stays during the call; because the caller says so.
    let Some(context) = (unsafe { place.as_ref() }) else { return 0 };
    // SAFETY: the body must be that of the kind, with texts that stay; because the caller says so.
    let event = unsafe { told(kind, body, has_tag) };
    let told = event.and_then(|event| context.records.told(&event, (context.rank, context.nranks)));
    told.map_or(0, |call| handle(call, CALL))
}

/// A call, as a body tells it.
///
/// # Safety
/// The body is that of the kind, and its texts stay as long as what is returned.
unsafe fn told<'a>(kind: u64, body: *const u8, has_tag: bool) -> Option<VendorEvent<'a>> {
    let (function, datatype, count, peer, buffers, algorithm) = match kind {
        kind::COLLECTIVE => (
            field!(body, CollectiveV7, function),
            field!(body, CollectiveV7, datatype),
            field!(body, CollectiveV7, count),
            field!(body, CollectiveV7, root),
            (field!(body, CollectiveV7, send), field!(body, CollectiveV7, recv)),
            [field!(body, CollectiveV7, algorithm), field!(body, CollectiveV7, protocol)],
        ),
        kind::COPIED_COLLECTIVE => (
            field!(body, CopiedCollective, function),
            field!(body, CopiedCollective, datatype),
            field!(body, CopiedCollective, count),
            field!(body, CopiedCollective, root),
            (field!(body, CopiedCollective, send), field!(body, CopiedCollective, recv)),
            [c"CE".as_ptr() as CAddress, 0],
        ),
        kind::MESSAGE => {
            let buffer = field!(body, MessageV7, buffer);
            let (count, peer) = (field!(body, MessageV7, count), field!(body, MessageV7, peer));
            let (function, datatype) = (field!(body, MessageV7, function), field!(body, MessageV7, datatype));
            (function, datatype, count, peer, (buffer, buffer), [0, 0])
        }
        _ => return None,
    };
    let tag = match kind {
        kind::COLLECTIVE if has_tag => field!(body, CollectiveV7, tag),
        kind::MESSAGE if has_tag => field!(body, MessageV7, tag),
        _ => 0,
    };
    // SAFETY: they must be texts that stay; because the caller says so.
    let [function, datatype] = [function, datatype].map(|address| unsafe { text(address) });
    // SAFETY: they must be texts that stay; because the caller says so.
    let algorithm = algorithm.map(|address| unsafe { text(address) }.to_str().unwrap_or_default());
    Some(VendorEvent {
        kind: CallKind::of_nccl(function)?,
        dtype: type_of_nccl(datatype),
        count: count as u64,
        peer: peer.max(0) as u32,
        buffers: (buffers.0 as u64, buffers.1 as u64),
        tag,
        algorithm,
    })
}

/// Writes the handle of an event that begins; 0 where nothing is recorded of it.
///
/// # Safety
/// As for [`start`]; the place is valid.
unsafe fn started(context: CAddress, place: *mut CAddress, event: *const Event, (kind, has_tag): (u64, bool)) -> c_int {
    // SAFETY: as the caller says; because it is handed on.
    let handle = catch_unwind(|| unsafe { start(context, kind, event, has_tag) }).unwrap_or(0);
    // SAFETY: the place must be valid; because the caller says so.
    unsafe { place.write(handle) };
    0
}

unsafe extern "C" fn start_v4(context: CAddress, place: *mut CAddress, event: *const Event) -> c_int {
    // SAFETY: the event must be there; because the vendor's library says so. Its kind is a byte in this version.
    let kind = unsafe { event.cast::<u8>().read() };
    // SAFETY: context, place and event must be valid; because the vendor's library says so.
    unsafe { started(context, place, event, (u64::from(kind), false)) }
}

unsafe extern "C" fn start_v5(context: CAddress, place: *mut CAddress, event: *const Event) -> c_int {
    // SAFETY: the event must be there; because the vendor's library says so.
    let kind = unsafe { event.cast::<u64>().read() };
    // SAFETY: context, place and event must be valid; because the vendor's library says so.
    unsafe { started(context, place, event, (kind, false)) }
}

unsafe extern "C" fn start_v7(context: CAddress, place: *mut CAddress, event: *const Event) -> c_int {
    // SAFETY: the event must be there; because the vendor's library says so.
    let kind = unsafe { event.cast::<u64>().read() };
    // SAFETY: context, place and event must be valid; because the vendor's library says so.
    unsafe { started(context, place, event, (kind, true)) }
}

unsafe extern "C" fn stop(handle: CAddress) -> c_int {
    let _ = catch_unwind(|| match ticket(handle) {
        Some(call) if handle & CHANNEL == CHANNEL => vendor::channel_ended(call),
        Some(call) => vendor::enqueued(call),
        None => {}
    });
    0
}

/// The clock of a GPU that a channel has read is not the host's: nothing is kept of it.
unsafe extern "C" fn record(_handle: CAddress, _state: c_int, _details: *const StateDetails) -> c_int {
    0
}

unsafe extern "C" fn finalize(context: CAddress) -> c_int {
    if context != 0 {
        // SAFETY: it must be one that `begin` made, and used no more; because the vendor's library ends each once.
        let context = unsafe { Box::from_raw(context as *mut Context) };
        let _ = catch_unwind(std::panic::AssertUnwindSafe(|| context.records.leave()));
    }
    0
}

const fn table<I>(init: I, start: crate::profiler::layouts::StartEvent) -> ProfilerTable<I>
where
    I: Copy,
{
    ProfilerTable {
        name: OWN_NAME.as_ptr(),
        init: Some(init),
        start_event: Some(start),
        stop_event: Some(stop),
        record_state: Some(record),
        finalize: Some(finalize),
    }
}

/// For NCCL 2.27.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclProfiler_v4: ProfilerTable<InitV4> = table(init_v4 as InitV4, start_v4);

/// For NCCL 2.28 to 2.30.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclProfiler_v5: ProfilerTable<InitV7> = table(init_v5 as InitV7, start_v5);

/// For NCCL from 2.31 on.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclProfiler_v7: ProfilerTable<InitV7> = table(init_v7 as InitV7, start_v7);
