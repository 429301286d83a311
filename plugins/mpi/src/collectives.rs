//! MPI's own collectives, non-blocking.

use super::sys::{self, MPI_Comm, MPI_Datatype, MPI_Op, MPI_Request};
use super::vtable::{collective, element, operation, Collective, SUCCESS};
use super::{bits, count, handle};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// The type of elements.
fn datatype(code: i32) -> Result<MPI_Datatype, c_int> {
    // SAFETY: the constants must never be written; because rsmpi.c defines them as `const`.
    unsafe {
        Ok(match code {
            element::INT8 => sys::INT8_T,
            element::UINT8 => sys::UINT8_T,
            element::INT16 => sys::INT16_T,
            element::UINT16 => sys::UINT16_T,
            element::INT32 => sys::INT32_T,
            element::UINT32 => sys::UINT32_T,
            element::INT64 => sys::INT64_T,
            element::UINT64 => sys::UINT64_T,
            element::FLOAT => sys::FLOAT,
            element::DOUBLE => sys::DOUBLE,
            _ => return Err(sys::MPI_ERR_TYPE as c_int),
        })
    }
}

/// What a reduction does.
fn op(code: i32) -> Result<MPI_Op, c_int> {
    // SAFETY: the constants must never be written; because rsmpi.c defines them as `const`.
    unsafe {
        Ok(match code {
            operation::SUM => sys::SUM,
            operation::PROD => sys::PROD,
            operation::MAX => sys::MAX,
            operation::MIN => sys::MIN,
            operation::BIT_AND => sys::BAND,
            operation::BIT_OR => sys::BOR,
            operation::BIT_XOR => sys::BXOR,
            _ => return Err(sys::MPI_ERR_ARG as c_int),
        })
    }
}

/// Begins a call; its request.
///
/// # Safety
/// The buffers and lists must be those that MPI asks for, and stay until the request has ended.
unsafe fn begin(comm: u64, call: &Collective) -> Result<MPI_Request, c_int> {
    let (n, of, comm) = (count(call.count)?, datatype(call.element)?, handle(comm));
    let (mut send, mut recv): (*const c_void, *mut c_void) = (call.send.cast(), call.recv.cast());
    match call.in_place != 0 {
        true if matches!(call.what, collective::SCATTER | collective::SCATTER_V) => recv = sys::IN_PLACE,
        true => send = sys::IN_PLACE,
        false => {}
    }
    let (root, mut made) = (call.root, MaybeUninit::<MPI_Request>::uninit());
    let place = made.as_mut_ptr();
    let error = match call.what {
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::ALL_REDUCE => unsafe { sys::MPI_Iallreduce(send, recv, n, of, op(call.operation)?, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::ALL_GATHER => unsafe { sys::MPI_Iallgather(send, n, of, recv, n, of, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::REDUCE_SCATTER => unsafe {
            sys::MPI_Ireduce_scatter_block(send, recv, n, of, op(call.operation)?, comm, place)
        },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::BROADCAST => unsafe { sys::MPI_Ibcast(recv, n, of, root, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::REDUCE => unsafe { sys::MPI_Ireduce(send, recv, n, of, op(call.operation)?, root, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::ALL_TO_ALL => unsafe { sys::MPI_Ialltoall(send, n, of, recv, n, of, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::GATHER => unsafe { sys::MPI_Igather(send, n, of, recv, n, of, root, comm, place) },
        // SAFETY: the buffers must be MPI's for this call and stay; because the caller promises it.
        collective::SCATTER => unsafe { sys::MPI_Iscatter(send, n, of, recv, n, of, root, comm, place) },
        // SAFETY: the communicator must be valid; because the caller has made it.
        collective::BARRIER => unsafe { sys::MPI_Ibarrier(comm, place) },
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        _ => unsafe { begin_uneven(call, (send, recv), (n, of), comm, place) }?,
    };
    match error {
        // SAFETY: the request must be written; because the call succeeded.
        SUCCESS => Ok(unsafe { made.assume_init() }),
        error => Err(error),
    }
}

/// Begins a call whose blocks differ in size; MPI's error code.
///
/// # Safety
/// As of [`begin`].
unsafe fn begin_uneven(
    call: &Collective,
    (send, recv): (*const c_void, *mut c_void),
    (n, of): (c_int, MPI_Datatype),
    comm: MPI_Comm,
    place: *mut MPI_Request,
) -> Result<c_int, c_int> {
    let Collective { root, send_counts: sent, send_places: from, recv_counts: got, recv_places: to, .. } = *call;
    Ok(match call.what {
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        collective::ALL_GATHER_V => unsafe { sys::MPI_Iallgatherv(send, n, of, recv, got, to, of, comm, place) },
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        collective::REDUCE_SCATTER_V => unsafe {
            sys::MPI_Ireduce_scatter(send, recv, got, of, op(call.operation)?, comm, place)
        },
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        collective::ALL_TO_ALL_V => unsafe {
            sys::MPI_Ialltoallv(send, sent, from, of, recv, got, to, of, comm, place)
        },
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        collective::GATHER_V => unsafe { sys::MPI_Igatherv(send, n, of, recv, got, to, of, root, comm, place) },
        // SAFETY: the buffers and lists must be MPI's for this call and stay; because the caller promises it.
        collective::SCATTER_V => unsafe { sys::MPI_Iscatterv(send, sent, from, of, recv, n, of, root, comm, place) },
        _ => return Err(sys::MPI_ERR_ARG as c_int),
    })
}

pub unsafe extern "C" fn collective(comm: u64, call: *const Collective, request: *mut u64) -> c_int {
    // SAFETY: `call` must be readable; because libstrata passes a local.
    let call = unsafe { &*call };
    // SAFETY: buffers and lists must be MPI's for this call and stay until the request has ended; because `MpiCalls::collective` asks it of
    // whoever made the call.
    match unsafe { begin(comm, call) } {
        Ok(made) => {
            // SAFETY: `request` must be writable; because libstrata passes a local.
            unsafe { request.write(bits(made)) };
            SUCCESS
        }
        Err(error) => error,
    }
}
