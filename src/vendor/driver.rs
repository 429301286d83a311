//! What Strata asks of the GPU's driver: whether a stream is being captured into a graph, and to make a device current.
//!
//! The driver is the one that the program uses. It is only looked for among what is mapped already: where there is none,
//! no stream can be captured, and memory is the host's.

use super::calls::Stream;
use super::library::mapped;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void, OsStr};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

type Context = *mut c_void;
type Query = unsafe extern "C" fn(Stream, *mut c_int) -> c_int;

/// A stream that is not captured, to both drivers.
const NOT_CAPTURED: c_int = 0;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`, `hipErrorStreamCaptureImplicit`: the legacy stream was asked about while another
/// stream is captured.
const IMPLICIT: c_int = 906;

/// The functions of a driver. What a version of it lacks is not asked.
#[derive(Debug, Clone, Copy)]
struct Driver {
    is_capturing: Option<Query>,
    current: Option<Current>,
}

/// How a device is made current for a while.
#[derive(Debug, Clone, Copy)]
enum Current {
    /// The device's own context is pushed, and popped again: the program's is untouched.
    Cuda {
        get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
        retain: unsafe extern "C" fn(*mut Context, c_int) -> c_int,
        push: unsafe extern "C" fn(Context) -> c_int,
        pop: unsafe extern "C" fn(*mut Context) -> c_int,
        release: unsafe extern "C" fn(c_int) -> c_int,
    },
    /// The thread's device is set, and set back.
    Hip { get: unsafe extern "C" fn(*mut c_int) -> c_int, set: unsafe extern "C" fn(c_int) -> c_int },
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    match DRIVER.get() {
        Some(driver) => Some(driver),
        // One may still come; the search costs little beside the making of a communicator, where it is done first.
        None => {
            let found = look()?;
            Some(DRIVER.get_or_init(|| found))
        }
    }
}

/// Whether calls on this stream are recorded into a graph instead of running.
pub fn is_captured(stream: Stream) -> bool {
    let Some(query) = driver().and_then(|driver| driver.is_capturing) else { return false };
    let mut status = NOT_CAPTURED;
    // SAFETY: the stream must be one of the driver's; because the program gives it to the vendor's library as one.
    let answer = unsafe { query(stream, &mut status) };
    answer == IMPLICIT || (answer == 0 && status != NOT_CAPTURED)
}

/// Does something while a device is current on this thread; where there is no driver, just does it.
pub fn on_device<T>(device: c_int, act: impl FnOnce() -> T) -> T {
    match driver().and_then(|driver| driver.current) {
        Some(Current::Cuda { get, retain, push, pop, release }) if device >= 0 => {
            let (mut number, mut context) = (0, null_mut());
            // SAFETY: the place must be valid; because it is a local.
            let retained = unsafe { get(&mut number, device) } == 0
                // SAFETY: as above.
                && unsafe { retain(&mut context, number) } == 0;
            // SAFETY: the context must be alive; because it is retained.
            let pushed = retained && unsafe { push(context) } == 0;
            let done = act();
            if pushed {
                // SAFETY: the place must be valid, as above; what is popped is what was pushed.
                unsafe { pop(&mut context) };
            }
            if retained {
                // SAFETY: the device must have been retained; because it was.
                unsafe { release(number) };
            }
            done
        }
        Some(Current::Hip { get, set }) if device >= 0 => {
            let mut before = 0;
            // SAFETY: the place must be valid; because it is a local.
            let known = unsafe { get(&mut before) } == 0;
            // SAFETY: the function has no preconditions.
            unsafe { set(device) };
            let done = act();
            if known {
                // SAFETY: the function has no preconditions.
                unsafe { set(before) };
            }
            done
        }
        _ => act(),
    }
}

fn look() -> Option<Driver> {
    let mapped = mapped();
    let open = |name: &str| {
        let is = |path: &&std::path::PathBuf| {
            path.file_name().and_then(OsStr::to_str).is_some_and(|file| file.starts_with(name))
        };
        let path: &Path = mapped.iter().find(is)?;
        // SAFETY: the initialisers must be fit to run now; because the file is mapped already and they have run.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()
    };
    let (library, found) = match (open("libcuda.so"), open("libamdhip64.so")) {
        (Some(library), _) => {
            let found = Driver { is_capturing: symbol(&library, b"cuStreamIsCapturing\0"), current: cuda(&library) };
            (library, found)
        }
        (None, Some(library)) => {
            let found = Driver { is_capturing: symbol(&library, b"hipStreamIsCapturing\0"), current: hip(&library) };
            (library, found)
        }
        (None, None) => return None,
    };
    // It stays mapped: the program uses it.
    std::mem::forget(library);
    Some(found)
}

fn symbol<T: Copy>(library: &Library, name: &[u8]) -> Option<T> {
    // SAFETY: the symbol must be of this type; because the driver's interface says so of its name, for each of those here.
    unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
}

fn cuda(library: &Library) -> Option<Current> {
    Some(Current::Cuda {
        get: symbol(library, b"cuDeviceGet\0")?,
        retain: symbol(library, b"cuDevicePrimaryCtxRetain\0")?,
        push: symbol(library, b"cuCtxPushCurrent_v2\0")?,
        pop: symbol(library, b"cuCtxPopCurrent_v2\0")?,
        release: symbol(library, b"cuDevicePrimaryCtxRelease_v2\0")?,
    })
}

fn hip(library: &Library) -> Option<Current> {
    Some(Current::Hip { get: symbol(library, b"hipGetDevice\0")?, set: symbol(library, b"hipSetDevice\0")? })
}
