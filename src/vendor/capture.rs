//! Whether a stream is being captured into a graph, asked of the driver that the program uses.
//!
//! The driver is only looked for among what is mapped already: where there is none, no stream can be captured.

use super::calls::Stream;
use super::library::mapped;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, OsStr};
use std::path::Path;
use std::sync::OnceLock;

type Query = unsafe extern "C" fn(Stream, *mut c_int) -> c_int;

/// Both drivers answer 0 for a stream that is not captured.
const NOT_CAPTURED: c_int = 0;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`, `hipErrorStreamCaptureImplicit`: the legacy stream was asked about while another
/// stream is captured.
const IMPLICIT: c_int = 906;

/// Name of a driver's file, and of its function.
const DRIVERS: [(&str, &[u8]); 2] =
    [("libcuda.so", b"cuStreamIsCapturing\0"), ("libamdhip64.so", b"hipStreamIsCapturing\0")];

/// Whether calls on this stream are recorded into a graph instead of running.
pub fn is_captured(stream: Stream) -> bool {
    static QUERY: OnceLock<Query> = OnceLock::new();
    let query = match QUERY.get() {
        Some(query) => *query,
        // A driver may still come; the search costs little beside the making of a communicator, where it is done first.
        None => match look() {
            Some(query) => *QUERY.get_or_init(|| query),
            None => return false,
        },
    };
    let mut status = NOT_CAPTURED;
    // SAFETY: the stream must be one of the driver's; because the program gives it to the vendor's library as one.
    let answer = unsafe { query(stream, &mut status) };
    answer == IMPLICIT || (answer == 0 && status != NOT_CAPTURED)
}

fn look() -> Option<Query> {
    let mapped = mapped();
    let is = |path: &Path, driver: &str| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(driver))
    };
    DRIVERS.iter().find_map(|(driver, name)| {
        let path = mapped.iter().find(|path| is(path, driver))?;
        // SAFETY: the initialisers must be fit to run now; because the file is mapped already and they have run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the symbol must be of this type; because the driver's interface says so of its name.
        let query = *unsafe { library.get::<Query>(name) }.ok()?;
        // It stays mapped: the program uses it.
        std::mem::forget(library);
        Some(query)
    })
}
