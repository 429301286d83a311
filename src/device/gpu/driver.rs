//! The GPU's driver: CUDA's driver interface, or HIP's runtime, whose functions have the same signatures with few
//! exceptions. One table names both.
//!
//! The driver is the one that the program uses, found among what is mapped already: a second copy of it would know nothing
//! of the program's memory and streams. What a version of it lacks is absent here, and only a call that needs it fails.

use crate::error::{Error, Result};
use crate::memory::objects::mapped;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A stream, event, context, module or function of the driver's.
pub type DriverHandle = usize;
/// An address in device memory, or in host memory as the device sees it.
pub type Address = u64;
/// `CUresult` or `hipError_t`.
pub type DriverStatus = c_int;

/// Nothing went wrong.
pub const SUCCESS: DriverStatus = 0;
/// There is no memory left.
pub const OUT_OF_MEMORY: DriverStatus = 2;
/// What is asked about has not ended yet.
pub const NOT_READY: DriverStatus = 600;
/// The host memory is registered already.
pub const ALREADY_REGISTERED: DriverStatus = 712;
/// A stream of the legacy kind was asked about while another one is captured.
pub const CAPTURE_IMPLICIT: DriverStatus = 906;

/// Whose driver it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverKind {
    /// `libcuda.so.1`
    Cuda,
    /// `libamdhip64.so`
    Hip,
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ fn $name:ident($($argument:ident: $type:ty),*) = $cuda:literal, $hip:literal;)*) => {
        /// The functions, as far as the driver has them.
        #[derive(Debug)]
        struct Functions {
            $($name: Option<unsafe extern "C" fn($($type),*) -> DriverStatus>,)*
        }

        impl Functions {
            fn of(library: &Library, kind: DriverKind) -> Functions {
                Functions { $(
                    $name: {
                        let name: &[u8] = match kind {
                            DriverKind::Cuda => concat!($cuda, "\0").as_bytes(),
                            DriverKind::Hip => concat!($hip, "\0").as_bytes(),
                        };
                        // SAFETY: the symbol must be a function with this signature; because the interface of the
                        // driver says so of its name.
                        (name.len() > 1).then(|| unsafe { library.get(name) }.ok().map(|symbol| *symbol)).flatten()
                    },
                )* }
            }
        }

        impl Driver {
            $(
                $(#[doc = $doc])+
                ///
                /// # Safety
                /// As the driver's interface says of the function: handles must be alive, memory must be there.
                #[allow(clippy::too_many_arguments)]
                pub unsafe fn $name(&self, $($argument: $type),*) -> DriverStatus {
                    match self.functions.$name {
                        // SAFETY: what the interface says must hold; because the caller says so.
                        Some(function) => unsafe { function($($argument),*) },
                        None => ABSENT,
                    }
                }
            )*
        }

        /// The bytes of each function's arguments, by its name in CUDA.
        #[cfg(test)]
        pub(super) fn argument_bytes() -> Vec<(&'static str, Vec<usize>)> {
            vec![$(($cuda, vec![$(size_of::<$type>()),*])),*]
        }

        /// What each function is called here, by CUDA and by HIP.
        const NAMES: &[(&str, &str, &str)] = &[$((stringify!($name), $cuda, $hip)),*];
    };
}

functions! {
    /// Makes the driver ready; does nothing the second time.
    fn init(flags: c_uint) = "cuInit", "hipInit";
    /// The driver's version.
    fn version(version: *mut c_int) = "cuDriverGetVersion", "hipRuntimeGetVersion";
    /// What a status means.
    fn error_string(status: DriverStatus, text: *mut *const c_char) = "cuGetErrorString", "hipDrvGetErrorString";
    /// How many devices there are.
    fn device_count(count: *mut c_int) = "cuDeviceGetCount", "hipGetDeviceCount";
    /// A device by its number.
    fn device_get(device: *mut c_int, number: c_int) = "cuDeviceGet", "hipDeviceGet";
    /// One of a device's properties, by a number of this driver's own.
    fn device_attribute(value: *mut c_int, attribute: c_int, device: c_int) = "cuDeviceGetAttribute", "hipDeviceGetAttribute";
    /// What a device is called, in at most so many bytes.
    fn device_name(text: *mut c_char, bytes: c_int, device: c_int) = "cuDeviceGetName", "hipDeviceGetName";
    /// Where a device is on PCI, as text in at most so many bytes.
    fn device_pci(text: *mut c_char, bytes: c_int, device: c_int) = "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId";
    /// How much memory of the current device is free, and how much there is.
    fn memory_info(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2", "hipMemGetInfo";
    /// Keeps a device's own context alive.
    fn context_retain(context: *mut DriverHandle, device: c_int) = "cuDevicePrimaryCtxRetain", "";
    /// Lets go of a device's own context.
    fn context_release(device: c_int) = "cuDevicePrimaryCtxRelease_v2", "";
    /// The thread's current context.
    fn context_current(context: *mut DriverHandle) = "cuCtxGetCurrent", "";
    /// Makes a context current.
    fn context_push(context: DriverHandle) = "cuCtxPushCurrent_v2", "";
    /// Makes the one before current again.
    fn context_pop(context: *mut DriverHandle) = "cuCtxPopCurrent_v2", "";
    /// The device of the current context; the thread's device.
    fn device_current(device: *mut c_int) = "cuCtxGetDevice", "hipGetDevice";
    /// Makes a device the thread's.
    fn device_set(device: c_int) = "", "hipSetDevice";
    /// The least and the greatest priority of streams.
    fn priorities(least: *mut c_int, greatest: *mut c_int) = "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange";
    /// Allocates device memory.
    fn allocate(address: *mut Address, bytes: usize) = "cuMemAlloc_v2", "hipMalloc";
    /// Frees device memory.
    fn free(address: Address) = "cuMemFree_v2", "hipFree";
    /// Pins host memory and lets the device see it.
    fn host_register(start: *mut c_void, bytes: usize, flags: c_uint) = "cuMemHostRegister_v2", "hipHostRegister";
    /// Undoes that.
    fn host_unregister(start: *mut c_void) = "cuMemHostUnregister", "hipHostUnregister";
    /// Where the device sees registered host memory.
    fn host_address(address: *mut Address, start: *mut c_void, flags: c_uint) = "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer";
    /// One property of an address.
    fn pointer_attribute(value: *mut c_void, attribute: c_int, address: Address) = "cuPointerGetAttribute", "hipPointerGetAttribute";
    /// Copies from the device to the host.
    fn copy_to_host(to: *mut c_void, from: Address, bytes: usize, stream: DriverHandle) = "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync";
    /// Copies from the host to the device.
    fn copy_to_device(to: Address, from: *const c_void, bytes: usize, stream: DriverHandle) = "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync";
    /// Copies on the device.
    fn copy_on_device(to: Address, from: Address, bytes: usize, stream: DriverHandle) = "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync";
    /// A stream's priority.
    fn stream_priority(stream: DriverHandle, priority: *mut c_int) = "cuStreamGetPriority", "hipStreamGetPriority";
    /// Makes a stream with flags and a priority.
    fn stream_create(stream: *mut DriverHandle, flags: c_uint, priority: c_int) = "cuStreamCreateWithPriority", "hipStreamCreateWithPriority";
    /// Ends a stream when its work has ended.
    fn stream_destroy(stream: DriverHandle) = "cuStreamDestroy_v2", "hipStreamDestroy";
    /// Waits for a stream's work.
    fn stream_synchronize(stream: DriverHandle) = "cuStreamSynchronize", "hipStreamSynchronize";
    /// Has a stream wait for an event.
    fn stream_wait_event(stream: DriverHandle, event: DriverHandle, flags: c_uint) = "cuStreamWaitEvent", "hipStreamWaitEvent";
    /// Whether a stream is being captured into a graph.
    fn stream_is_capturing(stream: DriverHandle, status: *mut c_int) = "cuStreamIsCapturing", "hipStreamIsCapturing";
    /// Has a stream wait for a word in memory.
    fn stream_wait_value(stream: DriverHandle, word: Address, value: u32, flags: c_uint) = "cuStreamWaitValue32_v2", "";
    /// The same, with the bits that count.
    fn stream_wait_masked(stream: DriverHandle, word: Address, value: u32, flags: c_uint, mask: u32) = "", "hipStreamWaitValue32";
    /// What captures of other threads and of this one forbid on this thread: sets it, and tells what it was.
    fn exchange_capture_mode(mode: *mut c_int) = "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode";
    /// Makes an event.
    fn event_create(event: *mut DriverHandle, flags: c_uint) = "cuEventCreate", "hipEventCreateWithFlags";
    /// Ends an event.
    fn event_destroy(event: DriverHandle) = "cuEventDestroy_v2", "hipEventDestroy";
    /// Has an event stand for all that a stream has been given so far.
    fn event_record(event: DriverHandle, stream: DriverHandle) = "cuEventRecord", "hipEventRecord";
    /// Whether what an event stands for has ended.
    fn event_query(event: DriverHandle) = "cuEventQuery", "hipEventQuery";
    /// Loads code.
    fn module_load(module: *mut DriverHandle, image: *const c_void) = "cuModuleLoadData", "hipModuleLoadData";
    /// Unloads it.
    fn module_unload(module: DriverHandle) = "cuModuleUnload", "hipModuleUnload";
    /// A kernel of a module.
    fn module_function(function: *mut DriverHandle, module: DriverHandle, name: *const c_char) = "cuModuleGetFunction", "hipModuleGetFunction";
    /// Launches a kernel.
    fn launch(
        function: DriverHandle, blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint, threads_x: c_uint, threads_y: c_uint,
        threads_z: c_uint, shared_bytes: c_uint, stream: DriverHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    ) = "cuLaunchKernel", "hipModuleLaunchKernel";
}

/// What a function that the driver lacks returns: `NOT_SUPPORTED` of both.
const ABSENT: DriverStatus = 801;

/// What drivers are called, in the order in which they are tried where the program has loaded none.
const INSTALLED: [&str; 6] = [
    "libcuda.so.1",
    "libamdhip64.so",
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "/opt/rocm/lib/libamdhip64.so",
];

/// A driver that the program has loaded.
#[derive(Debug)]
pub struct Driver {
    /// Whose it is.
    pub kind: DriverKind,
    /// The file.
    pub path: PathBuf,
    functions: Functions,
}

/// Whether a driver says that it has no device: `NO_DEVICE`, `INVALID_DEVICE`, of CUDA and of HIP.
pub fn is_no_device(status: DriverStatus) -> bool {
    status == 100 || status == 101
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The driver of this process, if a communicator has been made since it was loaded.
    pub fn known() -> Option<&'static Driver> {
        DRIVER.get()
    }

    /// Whether an address is one of some device's memory.
    pub fn is_of_device(&self, address: Address) -> bool {
        self.property(super::MEMORY_TYPE, address) == Some(super::DEVICE_MEMORY)
    }

    /// A property, which is an integer, of the memory at an address; none where the driver does not know it.
    pub fn property(&self, attribute: c_int, address: Address) -> Option<c_int> {
        let mut value: c_int = 0;
        let place: *mut c_int = &mut value;
        // SAFETY: the place must be fit for the property; because the caller asks for an integer.
        let status = unsafe { self.pointer_attribute(place.cast(), attribute, address) };
        (status == SUCCESS).then_some(value)
    }

    /// The driver of this process, if it has loaded one by now.
    pub fn get() -> Option<&'static Driver> {
        match DRIVER.get() {
            Some(driver) => Some(driver),
            // One may still come; the search costs little beside the making of a communicator, where it is done first.
            None => {
                let found = Driver::look()?;
                Some(DRIVER.get_or_init(|| found))
            }
        }
    }

    /// The driver of this process; where it has loaded none, the machine's, which is loaded then. For programs that are
    /// themselves the user of the GPU. None where the machine has none either; the text says why.
    pub fn installed() -> std::result::Result<&'static Driver, String> {
        let mut reasons = Vec::new();
        for name in INSTALLED.iter().take_while(|_| Driver::get().is_none()) {
            // SAFETY: the initialisers must be fit to run; because they are those of a driver that was asked for.
            match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
                // It stays mapped, where `get` finds it.
                Ok(library) => std::mem::forget(library),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Driver::get().ok_or_else(|| reasons.join("; "))
    }

    /// How many devices there are. Makes the driver ready.
    pub fn devices(&self) -> Result<usize> {
        // SAFETY: no requirement.
        self.check("init", unsafe { self.init(0) })?;
        let mut count = 0;
        // SAFETY: the place must be valid; because it is a local.
        self.check("device_count", unsafe { self.device_count(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Whether the driver is there and no device for it, which is no mistake of the program's: it may have been built for
    /// machines with GPUs.
    pub fn has_no_device(&self) -> bool {
        let mut count = 0;
        // SAFETY: no requirement.
        let ready = unsafe { self.init(0) };
        // SAFETY: the place must be valid; because it is a local.
        match unsafe { self.device_count(&mut count) } {
            SUCCESS => count == 0,
            status => is_no_device(ready) || is_no_device(status),
        }
    }

    /// The driver's version, as it writes it.
    pub fn release(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the place must be valid; because it is a local.
        self.check("version", unsafe { self.version(&mut version) }).map(|()| version)
    }

    fn look() -> Option<Driver> {
        let mapped = mapped();
        let file = |start: &str| {
            let is = |path: &&PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start));
            mapped.iter().find(is)
        };
        let kinds = [("libcuda.so", DriverKind::Cuda), ("libamdhip64.so", DriverKind::Hip)];
        kinds.into_iter().find_map(|(name, kind)| Driver::open(file(name)?, kind))
    }

    fn open(path: &Path, kind: DriverKind) -> Option<Driver> {
        // SAFETY: the initialisers must be fit to run now; because the file is mapped already and they have run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        let functions = Functions::of(&library, kind);
        // It stays mapped: the program uses it.
        std::mem::forget(library);
        Some(Driver { kind, path: path.to_path_buf(), functions })
    }

    /// Success, or an error that names the call and says what the driver says.
    pub fn check(&self, call: &'static str, status: DriverStatus) -> Result<()> {
        match status {
            SUCCESS => Ok(()),
            _ => Err(Error::Device(format!("{}: {}", self.name_of(call), self.text(status)))),
        }
    }

    /// The name of a function in this driver.
    fn name_of(&self, name: &'static str) -> &'static str {
        let known = NAMES.iter().find(|(own, _, _)| *own == name);
        known.map_or(name, |(_, cuda, hip)| if self.kind == DriverKind::Cuda { cuda } else { hip })
    }

    /// A status in words.
    pub fn text(&self, status: DriverStatus) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the place must be valid; because it is a local.
        if unsafe { self.error_string(status, &mut text) } != SUCCESS || text.is_null() {
            return format!("error {status}");
        }
        // SAFETY: the text must end with a zero byte and stay; because the driver's texts are constants.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({status})", text.to_string_lossy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_has_a_name_in_a_driver_and_no_name_stands_twice() {
        let (cuda, hip): (Vec<&str>, Vec<&str>) = NAMES.iter().map(|(_, cuda, hip)| (cuda, hip)).unzip();
        assert!(NAMES.iter().all(|(_, cuda, hip)| !cuda.is_empty() || !hip.is_empty()));
        for mut names in [cuda, hip] {
            names.retain(|name| !name.is_empty());
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }

    #[test]
    fn where_the_program_has_no_driver_there_is_none() {
        // The tests of this library are such a program.
        assert!(Driver::get().is_none());
    }
}
