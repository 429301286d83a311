//! An opened library of the vendor's.
//!
//! It is opened by its absolute path, for itself alone (`RTLD_LOCAL`), and so that it prefers its own functions
//! (`RTLD_DEEPBIND`, which has no effect where the program has mapped the file before). It is never closed: the
//! interface's entries hold its addresses.

use super::guard;
use crate::interface::pointer::Ptr;
use crate::interface::signatures::NcclFunctions;
use crate::interface::types::Status;
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void, CStr};
use std::fmt;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The vendor's library.
#[derive(Debug)]
pub struct Library {
    /// The file.
    pub path: PathBuf,
    /// Its release, as `ncclGetVersion` tells it.
    pub version: c_int,
    /// Where its code lies.
    pub code: Range<usize>,
    /// Its functions, where Strata calls them itself.
    pub(super) functions: NcclFunctions,
    opened: Opened,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_rccl() { "RCCL" } else { "NCCL" };
        write!(f, "{kind} {} ({})", dotted(self.version), self.path.display())
    }
}

/// `2.32.3` for 23203.
pub fn dotted(version: c_int) -> String {
    let (major, minor, patch) = match version {
        ..10_000 => (version / 1000, version / 100 % 10, version % 100),
        _ => (version / 10_000, version / 100 % 100, version % 100),
    };
    format!("{major}.{minor}.{patch}")
}

impl Library {
    /// Opens a file, or says why it cannot serve.
    pub fn open(path: &Path) -> Result<Library, String> {
        let why = |error: libloading::Error| {
            let text = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            format!("{} cannot be opened: {text}", path.display())
        };
        let flags = RTLD_NOW | RTLD_LOCAL | libc::RTLD_DEEPBIND;
        // SAFETY: the initialisers must be fit to run now; because they are those of the library that the program would
        // have loaded in our place.
        let opened = unsafe { Opened::open(Some(path), flags) }.map_err(why)?;
        // SAFETY: the functions must be those of the interface, and stay; because the interface says so of their names, and
        // the library is never closed.
        let functions = unsafe { NcclFunctions::find(|name| address(&opened, name)) };
        let mut library = Library { path: path.to_path_buf(), version: 0, code: 0..0, functions, opened };
        let refuse = |what: &str| Err(format!("{} is refused: {what}", path.display()));
        if library.address(c"strataStreamCreate").is_some() {
            return refuse("it is a Strata itself");
        }
        let Some(get_version) = library.address(c"ncclGetVersion") else {
            return refuse("it has no ncclGetVersion");
        };
        library.code = code_around(get_version);
        let mut version = 0;
        // SAFETY: the place must be there during the call; because it is a local.
        let place = unsafe { Ptr::to(&mut version) };
        // SAFETY: the place must be valid; because it is a local.
        match guard::inside(|| unsafe { functions.ncclGetVersion(place) }) {
            Some(Status::SUCCESS) => Ok(Library { version, ..library }),
            code => refuse(&format!("ncclGetVersion returns {}", code.map_or(-1, |Status(code)| code))),
        }
    }

    /// The address of a function, if the library has it.
    pub fn address(&self, name: &CStr) -> Option<*const c_void> {
        address(&self.opened, name)
    }

    /// Whether it is AMD's.
    pub fn is_rccl(&self) -> bool {
        self.path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"librccl"))
    }

    /// Its release with dots.
    pub fn release(&self) -> String {
        dotted(self.version)
    }
}

fn address(opened: &Opened, name: &CStr) -> Option<*const c_void> {
    // SAFETY: the symbol must be of this type; because an address is all that is asked for.
    let symbol = unsafe { opened.get::<*const c_void>(name.to_bytes_with_nul()) }.ok()?;
    Some(symbol.into_raw().cast_const().cast())
}

/// The mapped code of the object that has this address.
fn code_around(address: *const c_void) -> Range<usize> {
    struct Search {
        address: usize,
        found: Range<usize>,
    }
    extern "C" fn look(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
        // SAFETY: it must point at an object's description; because the loader gives one for the time of this call.
        let info = unsafe { &*info };
        // SAFETY: it must point at a `Search` nobody else uses; because `dl_iterate_phdr` was given one and passes it on.
        let search = unsafe { &mut *search.cast::<Search>() };
        let count = usize::from(info.dlpi_phnum);
        // SAFETY: the table must have so many entries; because the loader says so.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
        let executable =
            headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0);
        for header in executable {
            let start = (info.dlpi_addr + header.p_vaddr) as usize;
            let range = start..start + header.p_memsz as usize;
            if range.contains(&search.address) {
                search.found = range;
                return 1;
            }
        }
        0
    }
    let mut search = Search { address: address as usize, found: 0..0 };
    let place: *mut Search = &mut search;
    // SAFETY: the callback must be fit for what is passed to it; because it takes the place for a `Search`, which it is.
    unsafe { libc::dl_iterate_phdr(Some(look), place.cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_both_encodings_are_told_with_dots() {
        assert_eq!([23203, 22105, 21805, 2708].map(dotted), ["2.32.3", "2.21.5", "2.18.5", "2.7.8"]);
    }

    #[test]
    fn code_is_found_around_an_address_in_it() {
        let own = code_around as *const c_void;
        assert!(code_around(own).contains(&(own as usize)));
        assert_eq!(code_around(std::ptr::null()), 0..0);
    }

    #[test]
    fn a_file_that_is_no_library_of_the_vendor_s_is_refused_with_its_name() {
        let refused = Library::open(Path::new("/proc/self/exe")).unwrap_err();
        assert!(refused.contains("/proc/self/exe"), "{refused}");
        let refused = Library::open(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(refused, "libc.so.6 is refused: it has no ncclGetVersion");
    }
}
