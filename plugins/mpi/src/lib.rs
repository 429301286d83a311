//! MPI as a transport of Strata: a table of plain functions around a dozen calls of MPI, and nothing more.
//!
//! `libstrata.so` opens this library at run time and makes all calls on one thread. See [`vtable`] for the contract.

// The `mpi` crate has MPI's constants as variables of C, the standard ABI as numbers.
#![cfg_attr(feature = "abi", allow(unused_unsafe))]

#[cfg(feature = "abi")]
mod abi;
mod collectives;
#[cfg(feature = "rsmpi")]
mod mpi_crate;
pub mod vtable;

#[cfg(feature = "abi")]
use abi as sys;
#[cfg(feature = "rsmpi")]
use mpi_crate as sys;

use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::MaybeUninit;
use sys::{MPI_Comm, MPI_Errhandler, MPI_Request, MPI_Status};
use vtable::{
    description, device_memory, fault, state, thread_level, Completion, Hook, Vtable, World, NO_REQUEST, SUCCESS,
    VERSION,
};

/// What the MPI that this plugin was built for calls itself; empty for the standard ABI.
const FLAVOUR: &str = env!("STRATA_MPI_FLAVOUR");
/// More than any MPI says of itself.
const DESCRIPTION_BYTES: usize = 8192;
/// Requests tested without allocating.
const FEW: usize = 64;

/// A handle as 64 bits.
fn bits<H: Copy>(handle: H) -> u64 {
    const { assert!(size_of::<H>() <= 8) };
    let mut bits = 0u64;
    // SAFETY: both places must be valid for the handle's bytes; because they are locals, and a handle has at most 8
    // bytes.
    unsafe { std::ptr::copy_nonoverlapping((&raw const handle).cast(), (&raw mut bits).cast::<u8>(), size_of::<H>()) };
    bits
}

/// The handle with these bits.
fn handle<H: Copy>(bits: u64) -> H {
    const { assert!(size_of::<H>() <= 8) };
    let mut handle = MaybeUninit::<H>::uninit();
    // SAFETY: both places must be valid for a handle's bytes; because they are locals, and a handle has at most 8
    // bytes.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const bits).cast(), handle.as_mut_ptr().cast::<u8>(), size_of::<H>())
    };
    // SAFETY: all bytes must be written and be a handle's; because the copy wrote them, and every caller passes what
    // `bits` made of one.
    unsafe { handle.assume_init() }
}

/// Writes `text` and a NUL into `len` bytes, as much as fits.
///
/// # Safety
/// `place` is valid for writes of `len` bytes.
unsafe fn put(text: &[u8], place: *mut c_char, len: usize) {
    let Some(room) = len.checked_sub(1) else { return };
    let bytes = text.len().min(room);
    // SAFETY: at most `len - 1` bytes are written; because `bytes` is bounded by that.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, bytes) };
    // SAFETY: the index must be below `len`; because `bytes` is at most `len - 1`.
    unsafe { place.wrapping_add(bytes).write(0) };
}

/// The text that an MPI function writes into a buffer.
fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> Vec<u8> {
    let mut buffer = vec![0u8; DESCRIPTION_BYTES + 1];
    let mut len = 0;
    if write(buffer.as_mut_ptr().cast(), &mut len) != SUCCESS {
        return Vec::new();
    }
    let end = CStr::from_bytes_until_nul(&buffer).map_or(0, |text| text.to_bytes().len());
    buffer.truncate(end);
    buffer
}

unsafe extern "C" fn describe(place: *mut c_char, len: usize) -> c_int {
    if let Some(why) = sys::missing() {
        // SAFETY: `place` must be writable for `len` bytes; because `text` in libstrata passes a buffer with its length.
        unsafe { put(why.as_bytes(), place, len) };
        return description::MISSING;
    }
    let another = sys::another();
    let describe = another.unwrap_or(sys::MPI_Get_library_version);
    // SAFETY: the buffer must have MPI_MAX_LIBRARY_VERSION_STRING bytes; because no known MPI's is above 8192, and
    // `text` gives more. MPI may be in any state.
    let name_of_mpi = text(|text, written| unsafe { describe(text, written) });
    // SAFETY: `place` must be writable for `len` bytes; because `text` in libstrata passes a buffer with its length.
    unsafe { put(&name_of_mpi, place, len) };
    // Another MPI in the program takes this library's calls for itself: then nothing here means what it should.
    let mut words = FLAVOUR.rsplitn(2, ' ');
    let (_major, name) = (words.next(), words.next().unwrap_or_default());
    let known = another.is_none() && String::from_utf8_lossy(&name_of_mpi).contains(name);
    if known {
        SUCCESS
    } else {
        description::ANOTHER
    }
}

unsafe extern "C" fn look(world: *mut World) -> c_int {
    let mut found = World::default();
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: the place must be writable; because it is a local. MPI allows this call in any state, on any thread.
    let mut error = unsafe { sys::MPI_Initialized(&mut initialized) };
    // SAFETY: the place must be writable; because it is a local. MPI allows this call in any state, on any thread.
    error |= unsafe { sys::MPI_Finalized(&mut finalized) };
    found.state = match (initialized, finalized) {
        (_, 1..) => state::FINALIZED,
        (0, _) => state::FRESH,
        _ => state::RUNNING,
    };
    if error == SUCCESS && found.state == state::RUNNING {
        let mut level = 0;
        // SAFETY: MPI must be running and the place be writable; because the calls above found it so, and it is a
        // local. Any thread may ask.
        error |= unsafe { sys::MPI_Query_thread(&mut level) };
        // SAFETY: the constants must never be written; because rsmpi.c defines them as `const`.
        let (multiple, serialized, funneled) = unsafe { (sys::MULTIPLE, sys::SERIALIZED, sys::FUNNELED) };
        found.thread_level = match level {
            level if level >= multiple => thread_level::MULTIPLE,
            level if level >= serialized => thread_level::SERIALIZED,
            level if level >= funneled => thread_level::FUNNELED,
            _ => thread_level::SINGLE,
        };
        if found.thread_level >= thread_level::SERIALIZED {
            // SAFETY: MPI must be running and allow calls of this thread; because both were checked above. At
            // SERIALIZED the program must not call MPI meanwhile, which is its own promise.
            error |= unsafe { sys::MPI_Comm_rank(sys::COMM_WORLD, &mut found.rank) };
            // SAFETY: MPI must be running and allow calls of this thread; because both were checked above. At
            // SERIALIZED the program must not call MPI meanwhile, which is its own promise.
            error |= unsafe { sys::MPI_Comm_size(sys::COMM_WORLD, &mut found.size) };
        }
        found.device_memory = device_memory();
    }
    // SAFETY: `world` must be writable; because libstrata passes a local.
    unsafe { world.write(found) };
    error
}

/// What the MPI at hand says that it takes addresses of. Its questions are extensions, so they are looked for by name.
fn device_memory() -> i32 {
    let says = |name: &CStr| {
        let Some(found) = sys::extension(name) else { return false };
        // SAFETY: the function must have this signature; because all that have these extensions say so of their names.
        let ask = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(found) };
        ask() == 1
    };
    // Cray's MPI, and others made from MPICH, are told by the environment.
    let enabled = std::env::var_os("MPICH_GPU_SUPPORT_ENABLED").is_some_and(|value| value == "1");
    let cuda = enabled || says(c"MPIX_Query_cuda_support");
    let hip = enabled || says(c"MPIX_Query_rocm_support") || says(c"MPIX_Query_hip_support");
    i32::from(cuda) * device_memory::CUDA + i32::from(hip) * device_memory::HIP
}

unsafe extern "C" fn init() -> c_int {
    let mut provided = 0;
    // SAFETY: MPI must not have been initialised; because the caller has looked. Null pointers stand for no arguments.
    let error =
        unsafe { sys::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), sys::MULTIPLE, &mut provided) };
    if error != SUCCESS {
        return error;
    }
    // What goes wrong with no communicator at hand is an error of the one or the other, before and since MPI 4.
    // SAFETY: MPI must be running; because `MPI_Init_thread` has succeeded. The handles are predefined.
    let world = unsafe { sys::MPI_Comm_set_errhandler(sys::COMM_WORLD, sys::ERRORS_RETURN) };
    // SAFETY: MPI must be running; because `MPI_Init_thread` has succeeded. The handles are predefined.
    let own = unsafe { sys::MPI_Comm_set_errhandler(sys::COMM_SELF, sys::ERRORS_RETURN) };
    if world != SUCCESS {
        return world;
    }
    own
}

unsafe extern "C" fn barrier() -> c_int {
    // SAFETY: MPI must be running and allow calls of this thread; because libstrata asks only where this thread
    // initialised it.
    unsafe { sys::MPI_Barrier(sys::COMM_WORLD) }
}

unsafe extern "C" fn finalize() -> c_int {
    // SAFETY: this thread must have initialised MPI and nothing be pending; because libstrata asks only then.
    unsafe { sys::MPI_Finalize() }
}

/// A copy of `MPI_COMM_SELF` is not what is going to be freed first.
unsafe extern "C" fn not_copied(
    _: MPI_Comm,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    copied: *mut c_int,
) -> c_int {
    // SAFETY: `copied` must be writable; because MPI passes a place for the answer.
    unsafe { copied.write(0) };
    SUCCESS
}

unsafe extern "C" fn self_is_freed(_: MPI_Comm, _: c_int, hook: *mut c_void, _: *mut c_void) -> c_int {
    // SAFETY: the value must be a `Hook`; because `at_finalize` attached one with this function's key.
    let hook = unsafe { std::mem::transmute::<*mut c_void, Hook>(hook) };
    hook();
    SUCCESS
}

/// `MPI_Finalize` frees `MPI_COMM_SELF` and what is attached to it before anything else (MPI 4.1, section 11.2.4).
unsafe extern "C" fn at_finalize(hook: Hook) -> c_int {
    let mut key = 0;
    // SAFETY: MPI must be running and the functions have its signatures; because the caller has looked, and the
    // compiler checks them against MPI's types. The place is a local.
    let error =
        unsafe { sys::MPI_Comm_create_keyval(Some(not_copied), Some(self_is_freed), &mut key, std::ptr::null_mut()) };
    if error != SUCCESS {
        return error;
    }
    // SAFETY: the key must be valid and the value stay callable; because the key was made above, and libstrata is never
    // unmapped.
    let set = unsafe { sys::MPI_Comm_set_attr(sys::COMM_SELF, key, hook as *mut c_void) };
    // SAFETY: the key must be valid; because it was made above. It lives on for as long as something is attached with
    // it.
    let freed = unsafe { sys::MPI_Comm_free_keyval(&mut key) };
    if set != SUCCESS {
        return set;
    }
    freed
}

/// Makes a communicator of ranks of the world.
fn create(ranks: &[c_int], tag: c_int) -> Result<MPI_Comm, c_int> {
    let check = |error: c_int| if error == SUCCESS { Ok(()) } else { Err(error) };
    let (mut all, mut group, mut comm) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: MPI must be running and the place be writable; because the caller has looked, and it is a local.
    check(unsafe { sys::MPI_Comm_group(sys::COMM_WORLD, all.as_mut_ptr()) })?;
    // SAFETY: the group must be written; because `MPI_Comm_group` succeeded.
    let mut all = unsafe { all.assume_init() };
    // SAFETY: the list must have so many ranks and the place be writable; because it is a slice, and a local. MPI
    // refuses wrong ranks.
    let included = unsafe { sys::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), group.as_mut_ptr()) };
    // SAFETY: the group must be valid and not be used again; because it was made above, and nothing below names it.
    let freed = unsafe { sys::MPI_Group_free(&mut all) };
    check(included)?;
    check(freed)?;
    // SAFETY: the group must be written; because `MPI_Group_incl` succeeded.
    let mut group = unsafe { group.assume_init() };
    // SAFETY: all members must call this, each on one thread; because the contract asks it of them. The place is a
    // local.
    let created = unsafe { sys::MPI_Comm_create_group(sys::COMM_WORLD, group, tag, comm.as_mut_ptr()) };
    // SAFETY: the group must be valid and not be used again; because it was made above, and nothing below names it.
    let freed = unsafe { sys::MPI_Group_free(&mut group) };
    check(created)?;
    check(freed)?;
    // SAFETY: the communicator must be written; because `MPI_Comm_create_group` succeeded.
    let comm: MPI_Comm = unsafe { comm.assume_init() };
    // SAFETY: the communicator must be valid; because it was just made, and the contract has only its members call
    // this.
    check(unsafe { sys::MPI_Comm_set_errhandler(comm, sys::ERRORS_RETURN) })?;
    Ok(comm)
}

unsafe extern "C" fn comm_create(ranks: *const c_int, count: c_int, tag: c_int, comm: *mut u64) -> c_int {
    // SAFETY: `ranks` must have `count` elements; because libstrata passes a slice's address and length.
    let ranks = unsafe { std::slice::from_raw_parts(ranks, count as usize) };
    // An error of the calls on the world must come back too, whatever the program has chosen for itself.
    let mut theirs = MaybeUninit::<MPI_Errhandler>::uninit();
    // SAFETY: MPI must be running and the place be writable; because the caller has looked, and it is a local.
    let got = unsafe { sys::MPI_Comm_get_errhandler(sys::COMM_WORLD, theirs.as_mut_ptr()) };
    if got != SUCCESS {
        return got;
    }
    // SAFETY: the handler must be written; because `MPI_Comm_get_errhandler` succeeded.
    let mut theirs = unsafe { theirs.assume_init() };
    // SAFETY: MPI must be running; because the caller has looked. Until it is set back, the program's own calls on the
    // world have this handler, too.
    let set = unsafe { sys::MPI_Comm_set_errhandler(sys::COMM_WORLD, sys::ERRORS_RETURN) };
    let created = if set == SUCCESS { create(ranks, tag) } else { Err(set) };
    // SAFETY: the handler must be valid; because it is the one that was there, and our reference to it is freed below.
    // A failure leaves errors returned.
    let _ = unsafe { sys::MPI_Comm_set_errhandler(sys::COMM_WORLD, theirs) };
    // SAFETY: the reference must be ours; because `MPI_Comm_get_errhandler` made it.
    let _ = unsafe { sys::MPI_Errhandler_free(&mut theirs) };
    match created {
        Ok(made) => {
            // SAFETY: `comm` must be writable; because libstrata passes a local.
            unsafe { comm.write(bits(made)) };
            SUCCESS
        }
        Err(error) => error,
    }
}

unsafe extern "C" fn comm_free(comm: u64) -> c_int {
    let mut comm: MPI_Comm = handle(comm);
    // SAFETY: the communicator must be from `comm_create` with nothing pending; because libstrata frees each once, when
    // it is quiet.
    unsafe { sys::MPI_Comm_free(&mut comm) }
}

/// The length as MPI's count.
fn count(len: u64) -> Result<c_int, c_int> {
    c_int::try_from(len).map_err(|_| sys::MPI_ERR_COUNT as c_int)
}

unsafe extern "C" fn isend(comm: u64, bytes: *const u8, len: u64, to: c_int, tag: c_int, request: *mut u64) -> c_int {
    let count = match count(len) {
        Ok(count) => count,
        Err(error) => return error,
    };
    let mut made = MaybeUninit::<MPI_Request>::uninit();
    let place = made.as_mut_ptr();
    // SAFETY: the bytes must stay as they are until the request has ended; because `Calls::isend` asks it of whoever
    // made the region.
    let error = unsafe { sys::MPI_Isend(bytes.cast(), count, sys::BYTE, to, tag, handle(comm), place) };
    if error == SUCCESS {
        // SAFETY: the request must be written; because `MPI_Isend` succeeded.
        let made = unsafe { made.assume_init() };
        // SAFETY: `request` must be writable; because libstrata passes a local.
        unsafe { request.write(bits(made)) };
    }
    error
}

unsafe extern "C" fn irecv(comm: u64, bytes: *mut u8, len: u64, from: c_int, tag: c_int, request: *mut u64) -> c_int {
    let count = match count(len) {
        Ok(count) => count,
        Err(error) => return error,
    };
    // SAFETY: the constant must never be written; because rsmpi.c defines it as `const`.
    let any = unsafe { sys::ANY_SOURCE };
    let from = if from == vtable::ANY_SOURCE { any } else { from };
    let mut made = MaybeUninit::<MPI_Request>::uninit();
    let place = made.as_mut_ptr();
    // SAFETY: nobody else may use the bytes until the request has ended; because `Calls::irecv` asks it of whoever made
    // the region.
    let error = unsafe { sys::MPI_Irecv(bytes.cast(), count, sys::BYTE, from, tag, handle(comm), place) };
    if error == SUCCESS {
        // SAFETY: the request must be written; because `MPI_Irecv` succeeded.
        let made = unsafe { made.assume_init() };
        // SAFETY: `request` must be writable; because libstrata passes a local.
        unsafe { request.write(bits(made)) };
    }
    error
}

/// What a status says.
fn completion(index: c_int, status: &MPI_Status, error: c_int) -> Completion {
    let (mut cancelled, mut bytes) = (0, 0);
    // SAFETY: the status must be of a request that has ended; because `MPI_Testsome` reported it. The place is a local.
    let told = unsafe { sys::MPI_Test_cancelled(status, &mut cancelled) };
    if error == SUCCESS && told == SUCCESS && cancelled == 0 {
        // SAFETY: the status must be of a request that has ended; because `MPI_Testsome` reported it. Of a send the
        // number means nothing, and nobody looks.
        let _ = unsafe { sys::MPI_Get_count(status, sys::BYTE, &mut bytes) };
    }
    let bytes = u64::try_from(bytes).unwrap_or(0);
    Completion { index: index as u32, error, source: status.MPI_SOURCE, cancelled, bytes }
}

/// Has MPI move what it holds back, without a request of ours: MPIs do so when they are asked for a message.
fn progress() -> c_int {
    let mut flag = 0;
    let mut status = MaybeUninit::<MPI_Status>::uninit();
    // SAFETY: MPI must be running and the places be writable; because libstrata asks only with communicators alive, and
    // they are locals. Nothing is received.
    unsafe { sys::MPI_Iprobe(sys::ANY_SOURCE, 0, sys::COMM_WORLD, &mut flag, status.as_mut_ptr()) }
}

unsafe extern "C" fn test_some(
    requests: *mut u64,
    count: usize,
    ended: *mut Completion,
    how_many: *mut usize,
) -> c_int {
    if count == 0 {
        // SAFETY: `how_many` must be writable; because libstrata passes a local.
        unsafe { how_many.write(0) };
        return progress();
    }
    // SAFETY: `requests` must have `count` elements that nobody else uses; because libstrata passes a slice's.
    let requests = unsafe { std::slice::from_raw_parts_mut(requests, count) };
    // SAFETY: the constant must never be written; because rsmpi.c defines it as `const`.
    let null = unsafe { sys::REQUEST_NULL };
    let request = |bits: u64| if bits == NO_REQUEST { null } else { handle(bits) };
    let mut few = [null; FEW];
    let mut many = Vec::new();
    let list: &mut [MPI_Request] = if count <= FEW {
        few.iter_mut().zip(requests.iter()).for_each(|(place, &bits)| *place = request(bits));
        &mut few[..count]
    } else {
        many.extend(requests.iter().map(|&bits| request(bits)));
        &mut many
    };
    let mut few_places = [0 as c_int; FEW];
    let mut many_places = Vec::new();
    // SAFETY: all zeroes must be a valid status; because every MPI's is a C structure of integers.
    let mut few_statuses = [unsafe { MaybeUninit::<MPI_Status>::zeroed().assume_init() }; FEW];
    let mut many_statuses = Vec::new();
    let (places, statuses): (&mut [c_int], &mut [MPI_Status]) = if count <= FEW {
        (&mut few_places[..], &mut few_statuses[..])
    } else {
        many_places.resize(count, 0);
        many_statuses.resize(count, few_statuses[0]);
        (&mut many_places, &mut many_statuses)
    };
    let mut done = 0;
    let size = count as c_int;
    let (at, told) = (places.as_mut_ptr(), statuses.as_mut_ptr());
    // SAFETY: the lists must have `count` entries and the requests be pending or null; because both were made so long,
    // and libstrata drops what has ended.
    let error = unsafe { sys::MPI_Testsome(size, list.as_mut_ptr(), &mut done, at, told) };
    let in_status = error == sys::MPI_ERR_IN_STATUS as c_int;
    // SAFETY: the constant must never be written; because rsmpi.c defines it as `const`.
    let undefined = unsafe { sys::UNDEFINED };
    let done = if done == undefined || (error != SUCCESS && !in_status) { 0 } else { done as usize };
    for (nth, (&index, status)) in places[..done].iter().zip(statuses.iter()).enumerate() {
        requests[index as usize] = NO_REQUEST;
        // The error of a status is set only if there is one among them.
        let error = if in_status { status.MPI_ERROR } else { SUCCESS };
        // SAFETY: `ended` must have room for `count` entries; because libstrata makes it so long, and MPI reports a
        // request once.
        unsafe { ended.wrapping_add(nth).write(completion(index, status, error)) };
    }
    // SAFETY: `how_many` must be writable; because libstrata passes a local.
    unsafe { how_many.write(done) };
    if in_status {
        SUCCESS
    } else {
        error
    }
}

unsafe extern "C" fn cancel(request: u64) -> c_int {
    let mut request: MPI_Request = handle(request);
    // SAFETY: the request must be pending; because libstrata drops what `test_some` has reported.
    unsafe { sys::MPI_Cancel(&mut request) }
}

unsafe extern "C" fn error_text(error: c_int, place: *mut c_char, len: usize) -> c_int {
    // SAFETY: the buffer must have MPI_MAX_ERROR_STRING bytes; because no known MPI's is above 8192, and `text` gives
    // more.
    let message = text(|text, written| unsafe { sys::MPI_Error_string(error, text, written) });
    // SAFETY: `place` must be writable for `len` bytes; because `text` in libstrata passes a buffer with its length.
    unsafe { put(&message, place, len) };
    let mut class = 0;
    // SAFETY: the place must be writable; because it is a local.
    if unsafe { sys::MPI_Error_class(error, &mut class) } != SUCCESS {
        return fault::LOCAL;
    }
    let local = [
        sys::MPI_ERR_BUFFER,
        sys::MPI_ERR_COUNT,
        sys::MPI_ERR_TYPE,
        sys::MPI_ERR_TAG,
        sys::MPI_ERR_COMM,
        sys::MPI_ERR_RANK,
        sys::MPI_ERR_REQUEST,
        sys::MPI_ERR_GROUP,
        sys::MPI_ERR_ARG,
        sys::MPI_ERR_TRUNCATE,
        sys::MPI_ERR_NO_MEM,
    ];
    if local.iter().any(|&known| known as c_int == class) {
        fault::LOCAL
    } else {
        fault::REMOTE
    }
}

static VTABLE: Vtable = Vtable {
    version: VERSION,
    size: size_of::<Vtable>() as u32,
    describe,
    look,
    init,
    barrier,
    finalize,
    at_finalize,
    comm_create,
    comm_free,
    isend,
    irecv,
    test_some,
    cancel,
    collective: collectives::collective,
    error_text,
};

/// The one symbol of a plugin: its table of functions.
#[no_mangle]
pub extern "C" fn strata_mpi_plugin() -> *const Vtable {
    &VTABLE
}
