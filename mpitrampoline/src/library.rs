//! Strata's functions, out of `libstrata.so`.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void, CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The variable that names the library, as for the Python package.
const VARIABLE: &str = "STRATA_LIBRARY";

/// `ncclComm_t`
pub type Comm = *mut c_void;

/// `ncclUniqueId`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

macro_rules! functions {
    ($($name:ident($($type:ty),*);)*) => {
        /// The functions by their names; each returns a code, 0 for success.
        #[allow(non_snake_case)]
        pub struct Functions {
            $(
                /// Strata's function of this name.
                pub $name: unsafe extern "C" fn($($type),*) -> c_int,
            )*
            strataGetLastError: unsafe extern "C" fn() -> *const c_char,
            // Declared last: the functions must not outlive it.
            _library: Library,
        }

        impl Functions {
            #[allow(non_snake_case)]
            fn of(library: Library) -> Result<Functions, libloading::Error> {
                $(
                    // SAFETY: the symbol must be a function of this type; because `nccl.h` and `strata.h` declare it so.
                    let $name = *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?;
                )*
                // SAFETY: the symbol must be a function of this type; because `strata.h` declares it so.
                let strataGetLastError = *unsafe { library.get(b"strataGetLastError\0") }?;
                Ok(Functions { $($name,)* strataGetLastError, _library: library })
            }
        }
    };
}

type Send = *const c_void;
type Recv = *mut c_void;
type Stream = *mut c_void;

functions! {
    strataGetWorldId(*mut UniqueId, *mut c_int, *mut c_int);
    strataGetUniqueId(*mut UniqueId);
    strataCommInitHost(*mut Comm, c_int, UniqueId, c_int, c_int);
    ncclCommSplit(Comm, c_int, c_int, *mut Comm, *mut c_void);
    ncclCommUserRank(Comm, *mut c_int);
    ncclCommCount(Comm, *mut c_int);
    ncclCommDestroy(Comm);
    ncclAllReduce(Send, Recv, usize, c_int, c_int, Comm, Stream);
    ncclReduce(Send, Recv, usize, c_int, c_int, c_int, Comm, Stream);
    ncclBroadcast(Send, Recv, usize, c_int, c_int, Comm, Stream);
    ncclAllGather(Send, Recv, usize, c_int, Comm, Stream);
    ncclReduceScatter(Send, Recv, usize, c_int, c_int, Comm, Stream);
    ncclAlltoAll(Send, Recv, usize, c_int, Comm, Stream);
    ncclSend(Send, usize, c_int, c_int, Comm, Stream);
    ncclRecv(Recv, usize, c_int, c_int, Comm, Stream);
    ncclGroupStart();
    ncclGroupEnd();
}

impl Functions {
    /// The text of the last error.
    pub fn last_error(&self) -> String {
        // SAFETY: no requirement.
        let text = unsafe { (self.strataGetLastError)() };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the text must be a C string that stays for now; because it does until this thread's next call of the function.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// The file that this code is in.
fn own_file() -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the place must be writable; because it is a local. Any address may be asked about.
    if unsafe { libc::dladdr(own_file as *const c_void, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: all fields must be initialised; because they were zeroed, and `dladdr` has filled them in.
    let name = unsafe { found.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: the name must be a C string that stays; because the linker keeps it with this library.
    let name = unsafe { CStr::from_ptr(name) };
    std::fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
}

fn path() -> PathBuf {
    let given = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let beside = || Some(own_file()?.parent()?.join("libstrata.so"));
    given.or_else(beside).unwrap_or_else(|| PathBuf::from("libstrata.so"))
}

/// Strata's functions, or why there are none.
pub fn functions() -> &'static Result<Functions, String> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        let path = path();
        // SAFETY: the initialisers must be fit to run now; because Strata's are made to run at any time.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        library.and_then(Functions::of).map_err(|error| {
            let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            format!("{cause}; {VARIABLE} names the path of libstrata.so of the same version ({})", path.display())
        })
    })
}
