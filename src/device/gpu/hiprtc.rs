//! AMD's run-time compiler: the kernels' source becomes code for the device at hand when it is first needed.

use super::driver::Driver;
use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, CStr, CString};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

/// `hiprtcProgram`
type Program = usize;
/// `hiprtcResult`
type Status = c_int;

const SUCCESS: Status = 0;
/// What the library is called beside the runtime's.
const NAMES: [&str; 4] = ["libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5"];
/// Products and sums are rounded one by one, as on the host.
const OPTIONS: [&CStr; 3] = [c"-O3", c"-std=c++17", c"-ffp-contract=off"];

macro_rules! functions {
    ($($name:ident: unsafe extern "C" fn($($type:ty),*) = $symbol:literal;)*) => {
        /// The compiler's functions.
        struct Compiler {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Compiler {
            fn of(library: &Library) -> Option<Compiler> {
                Some(Compiler { $(
                    // SAFETY: the symbol must be a function with this signature; because the interface says so of its
                    // name.
                    $name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok()?,
                )* })
            }
        }
    };
}

functions! {
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char)
        = "hiprtcCreateProgram";
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) = "hiprtcCompileProgram";
    code_size: unsafe extern "C" fn(Program, *mut usize) = "hiprtcGetCodeSize";
    code: unsafe extern "C" fn(Program, *mut c_char) = "hiprtcGetCode";
    log_size: unsafe extern "C" fn(Program, *mut usize) = "hiprtcGetProgramLogSize";
    log: unsafe extern "C" fn(Program, *mut c_char) = "hiprtcGetProgramLog";
    destroy: unsafe extern "C" fn(*mut Program) = "hiprtcDestroyProgram";
}

/// The compiler that belongs to a runtime: in the same file, or in one beside it.
fn compiler(driver: &Driver) -> Option<Compiler> {
    let beside = NAMES.iter().map(|name| driver.path.with_file_name(name)).filter(|path| path.exists());
    let candidates: Vec<PathBuf> = beside.chain(NAMES.iter().map(PathBuf::from)).chain([driver.path.clone()]).collect();
    candidates.iter().find_map(|path| {
        // SAFETY: the initialisers must be fit to run now; because they are those of the runtime's own compiler.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        let compiler = Compiler::of(&library)?;
        // It stays: its threads may outlive us.
        std::mem::forget(library);
        Some(compiler)
    })
}

/// Compiles a source for the device that is current on this thread.
pub fn compile(driver: &Driver, source: &str) -> Result<Vec<u8>> {
    let failed = |what: &str| Error::Device(format!("compiling kernels with hiprtc: {what}"));
    let compiler = compiler(driver).ok_or_else(|| failed("there is no libhiprtc.so beside the HIP runtime"))?;
    let source = CString::new(source).map_err(|_| failed("the source has a zero byte"))?;
    let mut program = 0;
    // SAFETY: the places and texts must be valid; because they are locals, and no headers are given.
    let status = unsafe { (compiler.create)(&mut program, source.as_ptr(), c"strata".as_ptr(), 0, null(), null()) };
    if status != SUCCESS {
        return Err(failed(&format!("error {status}")));
    }
    let outcome = build(&compiler, program).map_err(|what| failed(&what));
    // SAFETY: the program must be one; because it was made above.
    unsafe { (compiler.destroy)(&mut program) };
    outcome
}

fn build(compiler: &Compiler, program: Program) -> std::result::Result<Vec<u8>, String> {
    let options = OPTIONS.map(CStr::as_ptr);
    // SAFETY: the options must be texts; because they are constants.
    let status = unsafe { (compiler.compile)(program, options.len() as c_int, options.as_ptr()) };
    if status != SUCCESS {
        let log = read(
            |bytes| {
                // SAFETY: the place must be valid; because it is a local of the caller.
                unsafe { (compiler.log_size)(program, bytes) }
            },
            |place| {
                // SAFETY: the place must have so many bytes; because `read` made it so.
                unsafe { (compiler.log)(program, place) }
            },
        );
        let log = log.map_or_else(|status| format!("error {status}"), |log| String::from_utf8_lossy(&log).into_owned());
        return Err(format!("error {status}: {log}"));
    }
    let code = read(
        |bytes| {
            // SAFETY: the place must be valid; because it is a local of the caller.
            unsafe { (compiler.code_size)(program, bytes) }
        },
        |place| {
            // SAFETY: the place must have so many bytes; because `read` made it so.
            unsafe { (compiler.code)(program, place) }
        },
    );
    code.map_err(|status| format!("error {status}"))
}

/// Something that the compiler writes, whose length it tells.
fn read(
    length: impl FnOnce(*mut usize) -> Status,
    write: impl FnOnce(*mut c_char) -> Status,
) -> std::result::Result<Vec<u8>, Status> {
    let mut bytes = 0;
    match length(&mut bytes) {
        SUCCESS => {}
        status => return Err(status),
    }
    let mut text = vec![0u8; bytes];
    let place = if bytes == 0 { null_mut() } else { text.as_mut_ptr().cast() };
    match write(place) {
        SUCCESS => Ok(text),
        status => Err(status),
    }
}
