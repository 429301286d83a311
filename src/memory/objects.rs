//! The files of code that are mapped into this process.

use std::ffi::{c_int, c_void, CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The paths of all objects that are mapped into this process.
pub fn mapped() -> Vec<PathBuf> {
    extern "C" fn note(info: *mut libc::dl_phdr_info, _size: usize, paths: *mut c_void) -> c_int {
        // SAFETY: it must point at an object's description; because the loader gives one for the time of this call.
        let info = unsafe { &*info };
        // SAFETY: it must point at a list nobody else uses; because `dl_iterate_phdr` was given one and passes it on.
        let paths = unsafe { &mut *paths.cast::<Vec<PathBuf>>() };
        if !info.dlpi_name.is_null() {
            // SAFETY: the name must end with a zero byte; because the loader's names do.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            paths.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        }
        0
    }
    let mut paths: Vec<PathBuf> = Vec::new();
    let place: *mut Vec<PathBuf> = &mut paths;
    // SAFETY: the callback must be fit for what is passed to it; because it takes the place for a list, which it is.
    unsafe { libc::dl_iterate_phdr(Some(note), place.cast()) };
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_is_among_them() {
        assert!(mapped().iter().any(|path| path.to_string_lossy().contains("libc.so")));
    }
}
