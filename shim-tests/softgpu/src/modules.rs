//! Modules and functions: text, and names that occur in it.

use crate::context::Context;
use crate::fault::{Result, CONTEXT_IS_DESTROYED, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND};
use crate::handles::Handles;
use crate::interpreted;
use crate::kernels::{Code, Launch, Twin};
use crate::settings::settings;
use crate::stream::Stream;
use crate::work::Work;
use std::ffi::{c_char, c_void, CStr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

struct Module {
    context: Arc<Context>,
    text: String,
    /// Its PTX, where that is run.
    ptx: Option<Arc<ptx::Module>>,
}

struct Function {
    module: Arc<Module>,
    code: Code,
}

static MODULES: Handles<Module> = Handles::empty();
static FUNCTIONS: Handles<Function> = Handles::empty();
/// The most threads of a block, for which all of Strata's kernels are compiled.
pub const THREADS: u32 = 512;

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// How many kernels were launched.
pub fn launches() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// Loads a module from text that ends with a 0.
pub fn load(context: &Arc<Context>, image: *const c_void) -> Result<usize> {
    crate::settings::check_still("loading");
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a 0 must follow; because the program promises that of an image, which is text.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| INVALID_IMAGE)?;
    // HIP's modules are something else.
    let is_run = settings().ptx && text.contains(".version");
    let ptx = if is_run { Some(Arc::new(interpreted::parse(text)?)) } else { None };
    Ok(MODULES.add(Module { context: context.clone(), text: text.to_string(), ptx }))
}

/// Unloads a module.
pub fn unload(handle: usize) -> Result {
    let module = MODULES.remove(handle).ok_or(INVALID_HANDLE)?;
    if module.context.is_destroyed() {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(())
}

/// The function of a name that stands in the module's text.
pub fn function(handle: usize, name: *const c_char) -> Result<usize> {
    let module = MODULES.get(handle).ok_or(INVALID_HANDLE)?;
    module.context.check()?;
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a 0 must follow; because the program promises that of a text.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
    if let Some(ptx) = &module.ptx {
        ptx.kernel(name).ok_or(NOT_FOUND)?;
        let code = Code::Ptx(ptx.clone(), name.to_string());
        return Ok(FUNCTIONS.add(Function { module, code }));
    }
    let mut words = module.text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    if !words.any(|word| word == name) {
        return Err(NOT_FOUND);
    }
    let code = Code::Twin(Twin::of(name)?);
    Ok(FUNCTIONS.add(Function { module, code }))
}

/// Fails unless a function can be launched.
pub fn check_function(handle: usize) -> Result {
    let function = FUNCTIONS.get(handle).ok_or(INVALID_HANDLE)?;
    function.module.context.check()
}

/// Launches a function with its argument, which is copied now.
pub fn launch(
    handle: usize,
    stream: &Arc<Stream>,
    blocks: [u32; 3],
    threads: [u32; 3],
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let function = FUNCTIONS.get(handle).ok_or(INVALID_HANDLE)?;
    function.module.context.check()?;
    if !Arc::ptr_eq(&function.module.context, &stream.context) {
        return Err(INVALID_HANDLE);
    }
    let total = threads.iter().map(|count| u64::from(*count)).product::<u64>();
    if blocks.contains(&0) || total == 0 || total > u64::from(THREADS) || blocks[1] > 65535 {
        return Err(INVALID_VALUE);
    }
    let wanted = function.code.params();
    let bytes = wanted.last().map_or(0, |(at, bytes)| at + bytes);
    let mut copied = vec![0; bytes];
    if params.is_null() {
        copy_bytes(packed(extra, bytes)?, &mut copied)?;
    } else {
        for (index, (at, bytes)) in wanted.into_iter().enumerate() {
            copy_bytes(pointer(params, index), &mut copied[at..at + bytes])?;
        }
    }
    stream.submit(Work::Kernel(Arc::new(Launch::new(function.code.clone(), copied, blocks, threads))))?;
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Copies bytes of the program.
fn copy_bytes(from: u64, to: &mut [u8]) -> Result {
    if from == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: so many bytes must be readable, and none of `to`; because the program promises that of a parameter of a
    // launch, and `to` is ours.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
    Ok(())
}

/// A word of an array of the program.
fn pointer<T>(array: *const T, index: usize) -> u64 {
    assert_eq!(size_of::<T>(), 8);
    // SAFETY: so many words must be readable; because the program promises that of the arguments of a launch.
    unsafe { array.cast::<u64>().wrapping_add(index).read_unaligned() }
}

/// Where arguments are that are given as a buffer with its size.
fn packed(extra: *mut *mut c_void, bytes: usize) -> Result<u64> {
    const END: u64 = 0;
    const BUFFER: u64 = 1;
    const SIZE: u64 = 2;
    // HIP's marker for the end.
    const HIP_END: u64 = 3;
    let (mut buffer, mut size) = (0, 0);
    if extra.is_null() {
        return Err(INVALID_VALUE);
    }
    for index in (0..).step_by(2) {
        match pointer(extra, index) {
            END | HIP_END => break,
            BUFFER => buffer = pointer(extra, index + 1),
            SIZE => size = pointer(pointer(extra, index + 1) as *const u64, 0),
            _ => return Err(INVALID_VALUE),
        }
    }
    if size != bytes as u64 {
        return Err(INVALID_VALUE);
    }
    Ok(buffer)
}
