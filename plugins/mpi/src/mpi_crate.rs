//! MPI as the `mpi` crate has it: from the headers of the MPI at hand.

pub use mpi::ffi::*;

pub use mpi::ffi::{
    RSMPI_ANY_SOURCE as ANY_SOURCE, RSMPI_BAND as BAND, RSMPI_BOR as BOR, RSMPI_BXOR as BXOR,
    RSMPI_COMM_SELF as COMM_SELF, RSMPI_COMM_WORLD as COMM_WORLD, RSMPI_DOUBLE as DOUBLE,
    RSMPI_ERRORS_RETURN as ERRORS_RETURN, RSMPI_FLOAT as FLOAT, RSMPI_INT16_T as INT16_T, RSMPI_INT32_T as INT32_T,
    RSMPI_INT64_T as INT64_T, RSMPI_INT8_T as INT8_T, RSMPI_MAX as MAX, RSMPI_MIN as MIN, RSMPI_PROD as PROD,
    RSMPI_REQUEST_NULL as REQUEST_NULL, RSMPI_SUM as SUM, RSMPI_THREAD_FUNNELED as FUNNELED,
    RSMPI_THREAD_MULTIPLE as MULTIPLE, RSMPI_THREAD_SERIALIZED as SERIALIZED, RSMPI_UINT16_T as UINT16_T,
    RSMPI_UINT32_T as UINT32_T, RSMPI_UINT64_T as UINT64_T, RSMPI_UINT8_T as BYTE, RSMPI_UINT8_T as UINT8_T,
    RSMPI_UNDEFINED as UNDEFINED,
};

/// `MPI_IN_PLACE`, which the crate does not have: a macro that `build.rs` has looked up.
pub const IN_PLACE: *mut c_void = std::ptr::without_provenance_mut(in_place(env!("STRATA_MPI_IN_PLACE")));

/// The number in a text, as an address.
const fn in_place(text: &str) -> usize {
    let (text, mut at, mut number) = (text.as_bytes(), 0, 0isize);
    while at < text.len() {
        if text[at] != b'-' {
            number = 10 * number + (text[at] - b'0') as isize;
        }
        at += 1;
    }
    let sign = if text[0] == b'-' { -1 } else { 1 };
    (sign * number) as usize
}

use std::ffi::{c_char, c_int, c_void, CStr};

/// The plugin is linked with its MPI.
pub fn missing() -> Option<&'static str> {
    None
}

/// MPI's own question for its name.
pub type Describe = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// Another MPI in the program takes this library's calls for itself, and is known by its answer.
pub fn another() -> Option<Describe> {
    None
}

/// A function that only some MPIs have.
pub fn extension(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name must end with a zero byte; because it is a C string.
    let found = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

extern "C" {
    /// With a null handle the linker's search order: this plugin's own libraries are in it.
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}
