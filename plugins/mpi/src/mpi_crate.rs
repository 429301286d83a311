//! MPI as the `mpi` crate has it: from the headers of the MPI at hand.

pub use mpi::ffi::*;

pub use mpi::ffi::{
    RSMPI_ANY_SOURCE as ANY_SOURCE, RSMPI_COMM_SELF as COMM_SELF, RSMPI_COMM_WORLD as COMM_WORLD,
    RSMPI_ERRORS_RETURN as ERRORS_RETURN, RSMPI_REQUEST_NULL as REQUEST_NULL, RSMPI_THREAD_FUNNELED as FUNNELED,
    RSMPI_THREAD_MULTIPLE as MULTIPLE, RSMPI_THREAD_SERIALIZED as SERIALIZED, RSMPI_UINT8_T as BYTE,
    RSMPI_UNDEFINED as UNDEFINED,
};

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
