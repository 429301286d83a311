//! The functions of MPI that XLA calls, and a few beside them.

// Names are MPI's.
#![allow(non_snake_case)]

use crate::abi::number::*;
use crate::abi::word::*;
use crate::abi::{datatype, Datatype, Element, Handle, Status};
use crate::library::Functions;
use crate::world::{self, check, code, comm, strata, Communicator, Message, Request, Result};
use std::ffi::{c_char, c_int, c_void};
use std::ops::{Add, Mul, Sub};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of the program's places for texts: `MPI_MAX_ERROR_STRING`, `..._LIBRARY_VERSION_STRING`, `..._PROCESSOR_NAME`.
const ERROR_BYTES: usize = 1024;
const VERSION_BYTES: usize = 8192;
const NAME_BYTES: usize = 256;

type Send = *const c_void;
type Recv = *mut c_void;

/// Functions with their results as codes.
macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {
        $(
            #[no_mangle]
            extern "C" fn $name($($argument: $type),*) -> c_int {
                #[allow(unreachable_code, clippy::too_many_arguments)]
                fn outcome($($argument: $type),*) -> Result<()> {
                    $body;
                    Ok(())
                }
                code(outcome($($argument),*))
            }
        )*
    };
}

/// Writes a result where the program wants it.
fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the place must be writable; because MPI asks that of its callers, and it is not null.
        unsafe { place.write(value) };
    }
}

/// Writes a text of less than so many bytes, with a zero byte, and its length.
fn put_text(text: &str, place: *mut c_char, bytes: usize, len: *mut c_int) {
    let short = text.len().min(bytes - 1);
    for (index, byte) in text.bytes().take(short).chain([0]).enumerate() {
        put(place.wrapping_add(index), byte as c_char);
    }
    put(len, short as c_int);
}

fn wrong<T>(class: c_int, text: impl Into<String>) -> Result<T> {
    Err((class, text.into()))
}

fn count(number: c_int) -> Result<usize> {
    usize::try_from(number).or_else(|_| wrong(MPIABI_ERR_COUNT, format!("{number} is no count")))
}

fn kind(handle: Handle) -> Result<Datatype> {
    datatype(handle).map_or_else(|| wrong(MPIABI_ERR_TYPE, format!("data type {handle:#x} is not served")), Ok)
}

fn same(ours: usize, theirs: usize) -> Result<()> {
    if ours == theirs {
        return Ok(());
    }
    wrong(MPIABI_ERR_COUNT, format!("{ours} bytes are sent to each rank, and {theirs} are received"))
}

/// A peer's rank; none for `MPI_PROC_NULL`.
fn peer(rank: c_int, tag: c_int, of: &Communicator) -> Result<Option<c_int>> {
    if tag != 0 {
        return wrong(MPIABI_ERR_TAG, format!("tag {tag}: messages are matched in order, and only tag 0 is served"));
    }
    match rank {
        MPIABI_PROC_NULL => Ok(None),
        _ if (0..of.size).contains(&rank) => Ok(Some(rank)),
        _ => wrong(MPIABI_ERR_RANK, format!("{rank} is no rank of a communicator of {} ranks", of.size)),
    }
}

/// How elements are reduced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    /// Strata's operation of this number.
    Own(c_int),
    /// The product of complex numbers.
    ComplexProduct,
}

fn op(handle: Handle, of: Datatype) -> Result<Op> {
    let (number, complex) = match handle {
        MPIABI_SUM => (0, true),
        MPIABI_PROD if of.is_complex() => return Ok(Op::ComplexProduct),
        MPIABI_PROD => (1, false),
        MPIABI_MIN => (3, false),
        MPIABI_MAX => (2, false),
        MPIABI_BAND => (0x5354_0105, false),
        MPIABI_BOR => (0x5354_0106, false),
        MPIABI_BXOR => (0x5354_0107, false),
        _ => return wrong(MPIABI_ERR_OP, format!("operation {handle:#x} is not served")),
    };
    match of.is_complex() && !complex {
        true => wrong(MPIABI_ERR_OP, "the operation is not for complex numbers"),
        false => Ok(Op::Own(number)),
    }
}

/// A reduction's input: the output itself for `MPI_IN_PLACE`.
fn input(send: Send, recv: Recv) -> Send {
    if send as usize == MPIABI_IN_PLACE {
        recv
    } else {
        send
    }
}

/// Collectives of a communicator, on the calling thread.
struct Collectives {
    strata: &'static Functions,
    comm: Arc<Communicator>,
}

impl Collectives {
    fn of(handle: Handle) -> Result<Collectives> {
        Ok(Collectives { strata: strata()?, comm: comm(handle)? })
    }

    fn all_gather(&self, send: Send, recv: Recv, bytes: usize) -> Result<()> {
        let call = self.strata.ncclAllGather;
        // SAFETY: the buffers must have their sizes; because MPI asks that of its callers.
        let code =
            unsafe { call(send, recv, bytes, Element::Uint8 as c_int, self.comm.handle(), std::ptr::null_mut()) };
        check(self.strata, code)
    }

    fn all_reduce(&self, send: Send, recv: Recv, count: usize, of: Datatype, op: Op) -> Result<()> {
        let Op::Own(op) = op else {
            let product = self.complex_product(send, count, of)?;
            // SAFETY: the output must have room; because MPI asks that of its callers. The product has as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(product.as_ptr(), recv.cast(), product.len()) };
            return Ok(());
        };
        let (call, count, element) = (self.strata.ncclAllReduce, count * of.elements, of.element as c_int);
        // SAFETY: the buffers must have their sizes; because MPI asks that of its callers.
        let code = unsafe { call(send, recv, count, element, op, self.comm.handle(), std::ptr::null_mut()) };
        check(self.strata, code)
    }

    fn reduce(&self, send: Send, recv: Recv, count: usize, of: Datatype, op: Op, root: c_int) -> Result<()> {
        let Op::Own(op) = op else {
            let product = self.complex_product(send, count, of)?;
            if self.comm.rank == root {
                // SAFETY: the root's output must have room; because MPI asks that of its callers.
                unsafe { std::ptr::copy_nonoverlapping(product.as_ptr(), recv.cast(), product.len()) };
            }
            return Ok(());
        };
        let (call, count, element) = (self.strata.ncclReduce, count * of.elements, of.element as c_int);
        // SAFETY: the buffers must have their sizes; because MPI asks that of its callers.
        let code = unsafe { call(send, recv, count, element, op, root, self.comm.handle(), std::ptr::null_mut()) };
        check(self.strata, code)
    }

    /// A part of the result for each rank, of so many data.
    fn reduce_scatter(&self, send: Send, recv: Recv, counts: &[usize], of: Datatype, op: Op) -> Result<()> {
        let (rank, place) = (self.comm.rank as usize, |rank: usize| counts[..rank].iter().sum::<usize>() * of.size());
        if let (Op::Own(op), true) = (op, counts.iter().all(|&count| count == counts[0])) {
            let (call, element) = (self.strata.ncclReduceScatter, of.element as c_int);
            let count = counts[0] * of.elements;
            // In place the input is the output, which is then the first part and not this rank's own.
            let mut copy = Vec::new();
            let send = if std::ptr::eq(send, recv) { own_copy(send, place(counts.len()), &mut copy) } else { send };
            // SAFETY: the buffers must have their sizes; because MPI asks that of its callers.
            let code = unsafe { call(send, recv, count, element, op, self.comm.handle(), std::ptr::null_mut()) };
            return check(self.strata, code);
        }
        let mut whole = vec![0u8; place(counts.len())];
        self.all_reduce(send, whole.as_mut_ptr().cast(), counts.iter().sum(), of, op)?;
        let part = &whole[place(rank)..place(rank + 1)];
        // SAFETY: the output must have room for this rank's part; because MPI asks that of its callers.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), recv.cast(), part.len()) };
        Ok(())
    }

    /// The product of all ranks' complex numbers, in the order of ranks, so that all have the same bits.
    fn complex_product(&self, send: Send, count: usize, of: Datatype) -> Result<Vec<u8>> {
        let bytes = count * of.size();
        let mut all = vec![0u8; bytes * self.comm.size as usize];
        self.all_gather(send, all.as_mut_ptr().cast(), bytes)?;
        let factors = all.chunks_exact(bytes.max(1));
        Ok(match of.element {
            Element::Float64 => product(factors, f64::from_ne_bytes, f64::to_ne_bytes),
            _ => product(factors, f32::from_ne_bytes, f32::to_ne_bytes),
        })
    }
}

/// A copy of a buffer, kept in `place`.
fn own_copy(data: Send, bytes: usize, place: &mut Vec<u8>) -> Send {
    place.resize(bytes, 0);
    // SAFETY: the buffer must have so many bytes; because MPI asks that of its callers.
    unsafe { std::ptr::copy_nonoverlapping(data.cast(), place.as_mut_ptr(), bytes) };
    place.as_ptr().cast()
}

/// The product of lists of complex numbers, number by number.
fn product<'a, F, const N: usize>(
    mut lists: impl Iterator<Item = &'a [u8]>,
    from: impl Fn([u8; N]) -> F,
    to: impl Fn(F) -> [u8; N],
) -> Vec<u8>
where
    F: Copy + Mul<Output = F> + Add<Output = F> + Sub<Output = F>,
{
    let mut result = lists.next().unwrap_or_default().to_vec();
    let float = |bytes: &[u8]| bytes.try_into().map(&from);
    for list in lists {
        for (product, factor) in result.chunks_exact_mut(2 * N).zip(list.chunks_exact(2 * N)) {
            let (parts, factors) = (product.split_at(N), factor.split_at(N));
            if let (Ok(a), Ok(b), Ok(c), Ok(d)) = (float(parts.0), float(parts.1), float(factors.0), float(factors.1)) {
                product[..N].copy_from_slice(&to(a * c - b * d));
                product[N..].copy_from_slice(&to(a * d + b * c));
            }
        }
    }
    result
}

/// A message to or from another rank; none for `MPI_PROC_NULL`.
fn message(
    sends: bool,
    data: Recv,
    number: c_int,
    of: Handle,
    rank: c_int,
    tag: c_int,
    among: &Communicator,
) -> Result<Option<Message>> {
    let bytes = count(number)? * kind(of)?.size();
    Ok(peer(rank, tag, among)?.map(|peer| Message { sends, data, bytes, peer }))
}

/// Runs messages at once.
fn exchange(comm: &Communicator, messages: &[Option<Message>]) -> Result<()> {
    let messages: Vec<&Message> = messages.iter().flatten().collect();
    if messages.is_empty() {
        return Ok(());
    }
    comm.exchange(messages.into_iter())
}

/// Notes a message, and gives its request.
fn begin(message: Option<Message>, comm: &Arc<Communicator>, place: *mut Handle) {
    let request = message.map_or(MPIABI_REQUEST_NULL, |message| Arc::into_raw(comm.post(message)) as Handle);
    put(place, request);
}

fn fill(status: *mut Status, source: c_int) {
    if !status.is_null() {
        // SAFETY: the place must be a status; because MPI asks that of its callers, and it is not null.
        let status = unsafe { &mut *status };
        (status.source, status.tag) = (source, 0);
    }
}

/// Waits for a request, which is none afterwards.
fn finish(place: *mut Handle, status: *mut Status) -> Result<()> {
    // SAFETY: the place must hold a request; because MPI asks that of its callers.
    let handle = unsafe { place.read() };
    if handle == MPIABI_REQUEST_NULL {
        fill(status, -1);
        return Ok(());
    }
    put(place, MPIABI_REQUEST_NULL);
    // SAFETY: the handle must be one of `begin` that nobody has waited for; because MPI asks that of its callers, and it is
    // taken away above.
    let request = unsafe { Arc::from_raw(handle as *const Request) };
    fill(status, request.message.peer);
    request.wait()
}

calls! {
    fn MPIABI_Init(_argc: *mut c_int, _argv: *mut c_void) { begin_or_end_program() }
    fn MPIABI_Init_thread(_argc: *mut c_int, _argv: *mut c_void, _required: c_int, provided: *mut c_int) {
        begin_or_end_program();
        put(provided, MPIABI_THREAD_MULTIPLE);
    }
    fn MPIABI_Query_thread(provided: *mut c_int) { put(provided, MPIABI_THREAD_MULTIPLE) }
    // All threads may do what the one may that has initialised MPI, and XLA asks for this one.
    fn MPIABI_Is_thread_main(flag: *mut c_int) { put(flag, 1) }
    fn MPIABI_Initialized(flag: *mut c_int) { put(flag, c_int::from(world::state().0)) }
    fn MPIABI_Finalized(flag: *mut c_int) { put(flag, c_int::from(world::state().1)) }
    fn MPIABI_Finalize() { world::finalize()? }
    fn MPIABI_Abort(_comm: Handle, status: c_int) {
        // SAFETY: no requirement.
        unsafe { libc::_exit(status) }
    }
    fn MPIABI_Get_version(version: *mut c_int, subversion: *mut c_int) {
        put(version, 3);
        put(subversion, 1);
    }
    fn MPIABI_Get_library_version(text: *mut c_char, len: *mut c_int) {
        put_text(concat!("Strata ", env!("CARGO_PKG_VERSION"), " for MPItrampoline"), text, VERSION_BYTES, len);
    }
    fn MPIABI_Get_processor_name(text: *mut c_char, len: *mut c_int) {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        put_text(name.trim(), text, NAME_BYTES, len);
    }
    fn MPIABI_Error_string(error: c_int, text: *mut c_char, len: *mut c_int) {
        let told = if error == MPIABI_SUCCESS { "no error".to_string() } else { world::last_error() };
        put_text(&told, text, ERROR_BYTES, len);
    }
    fn MPIABI_Error_class(error: c_int, class: *mut c_int) { put(class, error) }
    // Errors are returned with every handler.
    fn MPIABI_Comm_set_errhandler(of: Handle, _handler: Handle) { comm(of)?; }
    fn MPIABI_Comm_rank(of: Handle, rank: *mut c_int) { put(rank, comm(of)?.rank) }
    fn MPIABI_Comm_size(of: Handle, size: *mut c_int) { put(size, comm(of)?.size) }
    fn MPIABI_Comm_split(of: Handle, color: c_int, key: c_int, made: *mut Handle) {
        put(made, world::split(&*comm(of)?, color, key)?);
    }
    fn MPIABI_Comm_dup(of: Handle, made: *mut Handle) {
        let of = comm(of)?;
        put(made, world::split(&of, 0, of.rank)?);
    }
    fn MPIABI_Comm_free(place: *mut Handle) {
        // SAFETY: the place must hold a handle; because MPI asks that of its callers.
        world::free(unsafe { place.read() })?;
        put(place, MPIABI_COMM_NULL);
    }
    fn MPIABI_Type_size(of: Handle, size: *mut c_int) { put(size, kind(of)?.size() as c_int) }
    fn MPIABI_Barrier(of: Handle) {
        let mut byte = 0u8;
        let place: *mut u8 = &mut byte;
        let of_bytes = Datatype { element: Element::Uint8, elements: 1 };
        Collectives::of(of)?.all_reduce(place.cast(), place.cast(), 1, of_bytes, Op::Own(0))?;
    }
    fn MPIABI_Bcast(data: Recv, number: c_int, of: Handle, root: c_int, among: Handle) {
        let (all, bytes) = (Collectives::of(among)?, count(number)? * kind(of)?.size());
        let (call, handle) = (all.strata.ncclBroadcast, all.comm.handle());
        // SAFETY: the buffer must have its size; because MPI asks that of its callers.
        let code = unsafe { call(data, data, bytes, Element::Uint8 as c_int, root, handle, std::ptr::null_mut()) };
        check(all.strata, code)?;
    }
    fn MPIABI_Allreduce(send: Send, recv: Recv, number: c_int, of: Handle, by: Handle, among: Handle) {
        let (number, of) = (count(number)?, kind(of)?);
        Collectives::of(among)?.all_reduce(input(send, recv), recv, number, of, op(by, of)?)?;
    }
    fn MPIABI_Reduce(send: Send, recv: Recv, number: c_int, of: Handle, by: Handle, root: c_int, among: Handle) {
        let (number, of) = (count(number)?, kind(of)?);
        Collectives::of(among)?.reduce(input(send, recv), recv, number, of, op(by, of)?, root)?;
    }
    fn MPIABI_Reduce_scatter(send: Send, recv: Recv, numbers: *const c_int, of: Handle, by: Handle, among: Handle) {
        let (all, of) = (Collectives::of(among)?, kind(of)?);
        // SAFETY: there must be a number for each rank; because MPI asks that of its callers.
        let numbers = unsafe { std::slice::from_raw_parts(numbers, all.comm.size as usize) };
        let numbers = numbers.iter().map(|&number| count(number)).collect::<Result<Vec<usize>>>()?;
        all.reduce_scatter(input(send, recv), recv, &numbers, of, op(by, of)?)?;
    }
    fn MPIABI_Reduce_scatter_block(send: Send, recv: Recv, number: c_int, of: Handle, by: Handle, among: Handle) {
        let (all, of) = (Collectives::of(among)?, kind(of)?);
        let numbers = vec![count(number)?; all.comm.size as usize];
        all.reduce_scatter(input(send, recv), recv, &numbers, of, op(by, of)?)?;
    }
    fn MPIABI_Allgather(send: Send, number: c_int, of: Handle, recv: Recv, into: c_int, of_recv: Handle, among: Handle) {
        let (all, bytes) = (Collectives::of(among)?, count(into)? * kind(of_recv)?.size());
        if send as usize == MPIABI_IN_PLACE {
            let mine = recv.wrapping_byte_add(bytes * all.comm.rank as usize);
            return all.all_gather(mine, recv, bytes);
        }
        same(count(number)? * kind(of)?.size(), bytes)?;
        all.all_gather(send, recv, bytes)?;
    }
    fn MPIABI_Alltoall(send: Send, number: c_int, of: Handle, recv: Recv, into: c_int, of_recv: Handle, among: Handle) {
        let (all, bytes) = (Collectives::of(among)?, count(into)? * kind(of_recv)?.size());
        let mut copy = Vec::new();
        let send = if send as usize == MPIABI_IN_PLACE {
            own_copy(recv, bytes * all.comm.size as usize, &mut copy)
        } else {
            same(count(number)? * kind(of)?.size(), bytes)?;
            send
        };
        let (call, handle) = (all.strata.ncclAlltoAll, all.comm.handle());
        // SAFETY: the buffers must have their sizes; because MPI asks that of its callers.
        let code = unsafe { call(send, recv, bytes, Element::Uint8 as c_int, handle, std::ptr::null_mut()) };
        check(all.strata, code)?;
    }
    fn MPIABI_Send(data: Send, number: c_int, of: Handle, to: c_int, tag: c_int, among: Handle) {
        let among = comm(among)?;
        exchange(&among, &[message(true, data.cast_mut(), number, of, to, tag, &among)?])?;
    }
    fn MPIABI_Recv(data: Recv, number: c_int, of: Handle, from: c_int, tag: c_int, among: Handle, status: *mut Status) {
        let among = comm(among)?;
        fill(status, from);
        exchange(&among, &[message(false, data, number, of, from, tag, &among)?])?;
    }
    fn MPIABI_Sendrecv(
        data: Send, number: c_int, of: Handle, to: c_int, tag: c_int,
        into: Recv, room: c_int, of_recv: Handle, from: c_int, recv_tag: c_int, among: Handle, status: *mut Status
    ) {
        let among = comm(among)?;
        let send = message(true, data.cast_mut(), number, of, to, tag, &among)?;
        let recv = message(false, into, room, of_recv, from, recv_tag, &among)?;
        fill(status, from);
        exchange(&among, &[send, recv])?;
    }
    fn MPIABI_Isend(data: Send, number: c_int, of: Handle, to: c_int, tag: c_int, among: Handle, request: *mut Handle) {
        let among = comm(among)?;
        begin(message(true, data.cast_mut(), number, of, to, tag, &among)?, &among, request);
    }
    fn MPIABI_Irecv(data: Recv, number: c_int, of: Handle, from: c_int, tag: c_int, among: Handle, request: *mut Handle) {
        let among = comm(among)?;
        begin(message(false, data, number, of, from, tag, &among)?, &among, request);
    }
    fn MPIABI_Wait(request: *mut Handle, status: *mut Status) { finish(request, status)? }
    fn MPIABI_Waitall(number: c_int, requests: *mut Handle, statuses: *mut Status) {
        let mut outcome = Ok(());
        for index in 0..count(number)? {
            let status = if statuses.is_null() { statuses } else { statuses.wrapping_add(index) };
            outcome = outcome.and(finish(requests.wrapping_add(index), status));
        }
        outcome?;
    }
}

/// Whoever initialises MPI does not expect to come back without it.
fn begin_or_end_program() {
    if let Err((_, why)) = world::init() {
        eprintln!("strata: MPI_Init: {why}");
        std::process::exit(1);
    }
}

#[no_mangle]
extern "C" fn MPIABI_Wtime() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[no_mangle]
extern "C" fn MPIABI_Wtick() -> f64 {
    1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_served_for_numbers_and_of_complex_ones_sum_and_product() {
        // MPI_INT32_T and MPI_C_DOUBLE_COMPLEX.
        let (whole, complex) = (datatype(0x211).unwrap(), datatype(0x219).unwrap());
        for (handle, number) in [(MPIABI_SUM, 0), (MPIABI_PROD, 1), (MPIABI_MAX, 2), (MPIABI_MIN, 3)] {
            assert!(op(handle, whole) == Ok(Op::Own(number)));
        }
        assert!(op(MPIABI_BAND, whole) == Ok(Op::Own(0x5354_0105)));
        assert!(op(MPIABI_SUM, complex) == Ok(Op::Own(0)));
        assert!(op(MPIABI_PROD, complex) == Ok(Op::ComplexProduct));
        for handle in [MPIABI_MAX, MPIABI_MIN, MPIABI_BOR] {
            assert!(matches!(op(handle, complex), Err((MPIABI_ERR_OP, _))));
        }
        assert!(matches!(op(0x7777, whole), Err((MPIABI_ERR_OP, _))));
        assert!(matches!(kind(0x7777), Err((MPIABI_ERR_TYPE, _))));
    }

    #[test]
    fn products_of_complex_numbers_are_those_of_arithmetic() {
        let bytes = |parts: &[f32]| parts.iter().flat_map(|part| part.to_ne_bytes()).collect::<Vec<u8>>();
        let lists = [bytes(&[1.0, 2.0, 0.0, 1.0]), bytes(&[3.0, -1.0, 0.0, 1.0])];
        let found = product(lists.iter().map(Vec::as_slice), f32::from_ne_bytes, f32::to_ne_bytes);
        assert_eq!(found, bytes(&[5.0, 5.0, -1.0, 0.0]));
    }

    #[test]
    fn texts_are_cut_to_their_places_and_end_with_a_zero_byte() {
        let (mut place, mut len) = ([1 as c_char; 4], 0);
        put_text("strata", place.as_mut_ptr(), 4, &mut len);
        assert_eq!((place.map(|byte| byte as u8), len), (*b"str\0", 3));
    }
}
