//! Kernels that programs register: their names are known, and none is run.

use crate::calls::{calls, get, put};
use crate::errors::{INVALID_CONFIGURATION, INVALID_DEVICE_FUNCTION, INVALID_VALUE, NOT_SUPPORTED};
use crate::fills;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::ManuallyDrop;
use std::sync::{LazyLock, Mutex};

/// `dim3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim3 {
    x: u32,
    y: u32,
    z: u32,
}

/// The beginning of `cudaLaunchConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: usize,
}

/// The addresses of names, which stay, by the function of the host that stands for the kernel.
static NAMES: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// What `kernel<<<...>>>` says, until the kernel's stub asks for it.
    static PUSHED: ManuallyDrop<RefCell<Vec<Config>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// The name of a kernel.
fn name(function: usize) -> Option<String> {
    let name = *NAMES.lock().unwrap().get(&function)?;
    // SAFETY: a 0 must follow, and the text stay; because the program promises that of names that it registers.
    Some(unsafe { CStr::from_ptr(name as *const c_char) }.to_string_lossy().into_owned())
}

/// Launches a fill; any other kernel is refused with its name.
fn launch(function: usize, grid: Dim3, block: Dim3, args: *const *const c_void, stream: usize) -> i32 {
    let Some(name) = name(function) else { return INVALID_DEVICE_FUNCTION };
    if [grid.x, grid.y, grid.z, block.x, block.y, block.z].contains(&0) {
        return INVALID_CONFIGURATION;
    }
    match fills::Element::of(&name) {
        Some(element) if !args.is_null() => element.fill(args, stream),
        Some(_) => INVALID_VALUE,
        None => {
            eprintln!("softgpu: kernel {name} is refused: no kernels of programs are run but fills");
            NOT_SUPPORTED
        }
    }
}

/// `__cudaRegisterFatBinary` of the runtime: a handle that is nobody's memory.
#[no_mangle]
pub extern "C" fn __cudaRegisterFatBinary(binary: *const c_void) -> *mut *mut c_void {
    binary.cast_mut().cast()
}

/// `__cudaRegisterFatBinaryEnd` of the runtime.
#[no_mangle]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {}

/// `__cudaUnregisterFatBinary` of the runtime.
#[no_mangle]
pub extern "C" fn __cudaUnregisterFatBinary(_handle: *mut *mut c_void) {}

/// `__cudaRegisterFunction` of the runtime.
#[no_mangle]
pub extern "C" fn __cudaRegisterFunction(
    _handle: *mut *mut c_void,
    function: usize,
    _device_function: *mut c_char,
    name: usize,
    _thread_limit: c_int,
    _thread: *mut c_void,
    _block: *mut c_void,
    _block_dim: *mut Dim3,
    _grid_dim: *mut Dim3,
    _warp_size: *mut c_int,
) {
    NAMES.lock().unwrap().insert(function, name);
}

/// `__cudaRegisterVar` of the runtime: variables of modules are not there ([`crate::absent`]).
#[no_mangle]
pub extern "C" fn __cudaRegisterVar(
    _handle: *mut *mut c_void,
    _variable: *mut c_char,
    _address: *const c_char,
    _name: *const c_char,
    _is_external: c_int,
    _bytes: usize,
    _is_constant: c_int,
    _is_global: c_int,
) {
}

/// `__cudaPushCallConfiguration` of the runtime.
#[no_mangle]
pub extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared_bytes: usize, stream: usize) -> u32 {
    PUSHED.with(|pushed| pushed.borrow_mut().push(Config { grid, block, shared_bytes, stream }));
    0
}

calls! { plain:
    fn __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared_bytes: *mut usize, stream: *mut usize) {
        let Some(config) = PUSHED.with(|pushed| pushed.borrow_mut().pop()) else { return INVALID_CONFIGURATION };
        put(grid, config.grid);
        put(block, config.block);
        put(shared_bytes, config.shared_bytes);
        put(stream, config.stream);
        0
    }
    // A kernel goes by the function that stands for it.
    fn __cudaGetKernel(kernel: *mut usize, function: usize) {
        put(kernel, function);
        if NAMES.lock().unwrap().contains_key(&function) { 0 } else { INVALID_DEVICE_FUNCTION }
    }
}

calls! { ready:
    fn __cudaLaunchKernel(
        kernel: usize,
        grid: Dim3,
        block: Dim3,
        args: *const *const c_void,
        _shared_bytes: usize,
        stream: usize,
    ) {
        launch(kernel, grid, block, args, stream)
    }
    fn cudaLaunchKernel(
        function: usize,
        grid: Dim3,
        block: Dim3,
        args: *const *const c_void,
        _shared_bytes: usize,
        stream: usize,
    ) {
        launch(function, grid, block, args, stream)
    }
    fn cudaLaunchCooperativeKernel(
        function: usize,
        grid: Dim3,
        block: Dim3,
        args: *const *const c_void,
        _shared_bytes: usize,
        stream: usize,
    ) {
        launch(function, grid, block, args, stream)
    }
    fn cudaLaunchKernelExC(config: *const Config, function: usize, args: *const *const c_void) {
        if config.is_null() {
            return INVALID_VALUE;
        }
        let Config { grid, block, stream, .. } = get(config);
        launch(function, grid, block, args, stream)
    }
}
