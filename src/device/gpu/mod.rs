//! GPUs, NVIDIA's and AMD's: memory, streams and kernels through the driver that the program uses.
//!
//! A [`GpuDevice`] is a context of the program's. Nothing here waits for the device but what says so, and the context that is
//! current on a thread of the program's is the same after every call as before.

pub mod code;
#[cfg(test)]
mod declared;
pub mod driver;
mod hiprtc;
pub mod kernels;
pub mod memory;
pub mod order;
pub mod stream;
pub mod work;

use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::sync::locked;
use crate::topo::distance::PciAddress;
use driver::{is_no_device, Address, Driver, DriverHandle, DriverKind, DriverStatus, NOT_READY, SUCCESS};
use kernels::{Kernel, Module};
use order::CompletionFlag;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CString};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use stream::GpuEvent;

/// Properties of a device, by CUDA's and HIP's numbers.
const MULTIPROCESSORS: (c_int, c_int) = (16, 63);
/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`; of HIP's devices it is not asked.
const PAGEABLE_MEMORY_ACCESS: c_int = 88;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, `HIP_POINTER_ATTRIBUTE_MEMORY_TYPE`
const MEMORY_TYPE: c_int = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`, `hipStreamCaptureModeRelaxed`
const RELAXED: c_int = 2;
/// A memory type of both.
const DEVICE_MEMORY: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, `HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
const DEVICE_ORDINAL: c_int = 9;
/// From this release of HIP on a memory type of 0 means memory that the runtime does not know.
const HIP_UNKNOWN_IS_ZERO: c_int = 60_000_000;
/// `CU_EVENT_DISABLE_TIMING`, `hipEventDisableTiming`
const NO_TIMING: u32 = 2;

/// A device as the program uses it: one of its contexts. Lives as long as the process.
pub struct GpuDevice {
    driver: &'static Driver,
    /// The program's number of the device.
    number: c_int,
    /// Of CUDA; HIP has one a device.
    context: DriverHandle,
    multiprocessors: u32,
    /// Of streams; our own have it.
    greatest_priority: c_int,
    /// Whether kernels may use any address of the process.
    any_address: bool,
    /// The kernels that have been loaded, by their numbers; 0 for others.
    functions: [AtomicUsize; Kernel::COUNT],
    modules: Mutex<HashMap<Module, DriverHandle>>,
    events: Mutex<Vec<DriverHandle>>,
    words: Mutex<Vec<CompletionFlag>>,
    /// Asked to find out whether the context is still there.
    witness: DriverHandle,
}

impl fmt::Debug for GpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({:?} {})", self.driver.kind, self.number)
    }
}

/// The contexts that were used so far. A forked child has none: drivers do not survive a fork.
static KNOWN: PerProcess<Mutex<Vec<Arc<GpuDevice>>>> = PerProcess::new(Mutex::default);

/// The context is current while this lives; afterwards it is the one before.
pub struct Entered<'a> {
    gpu: &'a GpuDevice,
    /// The thread's device before, of HIP.
    before: c_int,
    /// What captures forbade on the thread before, if the driver has captures.
    mode: Option<c_int>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = 0;
        if let Some(mut mode) = self.mode {
            // SAFETY: the place must be valid; because it is a local.
            unsafe { self.gpu.driver.exchange_capture_mode(&mut mode) };
        }
        match self.gpu.driver.kind {
            // SAFETY: the place must be valid; because it is a local. What is popped is what was pushed.
            DriverKind::Cuda => unsafe { self.gpu.driver.context_pop(&mut context) },
            // SAFETY: no requirement.
            DriverKind::Hip if self.before != self.gpu.number => unsafe { self.gpu.driver.device_set(self.before) },
            DriverKind::Hip => SUCCESS,
        };
    }
}

impl GpuDevice {
    /// The device that is current on this thread, as the program has left it; none where the program uses no GPU, or the
    /// driver has none. With a `number` the device of that number.
    pub fn of_thread(number: Option<i32>) -> Result<Option<Arc<GpuDevice>>> {
        let Some(driver) = Driver::get() else { return Ok(None) };
        if number.is_some() && driver.has_no_device() {
            return Ok(None);
        }
        let mut context = 0;
        let mut current: c_int = 0;
        let mut retained = None;
        match (driver.kind, number) {
            (DriverKind::Hip, Some(number)) => current = number,
            (DriverKind::Hip, None) => {
                // SAFETY: the place must be valid; because it is a local.
                let status = unsafe { driver.device_current(&mut current) };
                if is_no_device(status) {
                    return Ok(None);
                }
                driver.check("device_current", status)?;
            }
            (DriverKind::Cuda, Some(number)) => {
                let (device, found) = primary(driver, number)?;
                (current, context, retained) = (number, found, Some(device));
            }
            (DriverKind::Cuda, None) => {
                // SAFETY: the place must be valid; because it is a local.
                let status = unsafe { driver.context_current(&mut context) };
                if status != SUCCESS || context == 0 {
                    return Ok(None);
                }
                // SAFETY: the place must be valid; because it is a local.
                driver.check("device_current", unsafe { driver.device_current(&mut current) })?;
            }
        }
        let mut known = locked(KNOWN.get());
        known.retain(|gpu| gpu.is_alive());
        if let Some(gpu) = known.iter().find(|gpu| (gpu.number, gpu.context) == (current, context)) {
            // Once is enough.
            // SAFETY: the context must have been retained; because it was just now.
            retained.map(|device| unsafe { driver.context_release(device) });
            return Ok(Some(gpu.clone()));
        }
        let gpu = Arc::new(GpuDevice::new(driver, current, context)?);
        known.push(gpu.clone());
        Ok(Some(gpu))
    }

    fn new(driver: &'static Driver, number: c_int, context: DriverHandle) -> Result<GpuDevice> {
        let mut gpu = GpuDevice {
            driver,
            number,
            context,
            multiprocessors: 1,
            greatest_priority: 0,
            any_address: false,
            functions: [const { AtomicUsize::new(0) }; Kernel::COUNT],
            modules: Mutex::default(),
            events: Mutex::default(),
            words: Mutex::default(),
            witness: 0,
        };
        let entered = gpu.enter()?;
        let attribute = |attribute: c_int| {
            let mut value = 0;
            // SAFETY: the place must be valid; because it is a local.
            let status = unsafe { driver.device_attribute(&mut value, attribute, number) };
            (status == SUCCESS).then_some(value)
        };
        let cuda = driver.kind == DriverKind::Cuda;
        let multiprocessors = attribute(if cuda { MULTIPROCESSORS.0 } else { MULTIPROCESSORS.1 });
        let any_address = cuda && attribute(PAGEABLE_MEMORY_ACCESS) == Some(1);
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the places must be valid; because they are locals.
        unsafe { driver.priorities(&mut least, &mut greatest) };
        let witness = gpu.new_event()?;
        drop(entered);
        gpu.greatest_priority = greatest;
        gpu.multiprocessors = multiprocessors.and_then(|number| u32::try_from(number).ok()).unwrap_or(1).max(1);
        gpu.any_address = any_address;
        gpu.witness = witness;
        Ok(gpu)
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The program's number of the device.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// What the driver calls the device.
    pub fn name(&self) -> Result<String> {
        let mut text = [0 as c_char; 256];
        // SAFETY: the place must have so many bytes; because it is a local of that length.
        let status = unsafe { self.driver.device_name(text.as_mut_ptr(), text.len() as c_int, self.number) };
        self.check("device_name", status)?;
        Ok(text_of(&text))
    }

    /// Where the device is on PCI; none where the driver does not tell.
    pub fn pci_address(&self) -> Option<PciAddress> {
        let mut text = [0 as c_char; 64];
        // SAFETY: the place must have so many bytes; because it is a local of that length.
        let status = unsafe { self.driver.device_pci(text.as_mut_ptr(), text.len() as c_int, self.number) };
        (status == SUCCESS).then(|| text_of(&text))?.parse().ok()
    }

    /// Bytes of the device's memory: free, and in all.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places must be valid; because they are locals.
        self.check("memory_info", unsafe { self.driver.memory_info(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Whether kernels may use any address of the process, so that nothing has to be registered.
    pub fn uses_any_address(&self) -> bool {
        self.any_address
    }

    /// Makes the context current on this thread for as long as the result lives. What is asked of the driver meanwhile
    /// spoils no capture of the program's: by default one forbids every thread to ask whether an event has ended.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let mut before = self.number;
        match self.driver.kind {
            // SAFETY: the context must be alive, else the driver refuses it; because the program made it.
            DriverKind::Cuda => self.check("context_push", unsafe { self.driver.context_push(self.context) })?,
            DriverKind::Hip => {
                // SAFETY: the place must be valid; because it is a local.
                self.check("device_current", unsafe { self.driver.device_current(&mut before) })?;
                if before != self.number {
                    // SAFETY: no requirement.
                    self.check("device_set", unsafe { self.driver.device_set(self.number) })?;
                }
            }
        }
        let mut mode = RELAXED;
        // SAFETY: the place must be valid; because it is a local.
        let status = unsafe { self.driver.exchange_capture_mode(&mut mode) };
        Ok(Entered { gpu: self, before, mode: (status == SUCCESS).then_some(mode) })
    }

    /// Makes the context current on this thread for good: for threads of ours.
    pub fn stay(&self) {
        match self.enter() {
            Ok(entered) => std::mem::forget(entered),
            Err(error) => crate::log::warn(error.text()),
        }
    }

    fn check(&self, call: &'static str, status: DriverStatus) -> Result<()> {
        self.driver.check(call, status)
    }

    /// Whether the program has not destroyed the context.
    pub fn is_alive(&self) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        // SAFETY: the event must be one of the context's, which the driver checks; because it was made there.
        matches!(unsafe { self.driver.event_query(self.witness) }, SUCCESS | NOT_READY)
    }

    /// An error if the program has destroyed the context.
    pub fn check_alive(&self) -> Result<()> {
        match self.is_alive() {
            true => Ok(()),
            false => Err(Error::Device(format!("the program has ended the context of device {}", self.number))),
        }
    }

    /// Whether kernels and copies of this device can use memory at an address: device memory, or registered host memory.
    pub fn can_use(&self, address: Address) -> bool {
        if self.any_address {
            return true;
        }
        let property = |attribute: c_int| self.driver.property(attribute, address);
        match property(MEMORY_TYPE) {
            None => false,
            Some(0) => !self.zero_is_unknown(),
            // Kernels of one device that touch another one's memory end the context, unless the program has made peers of
            // them, which cannot be seen; then the vendor's library is the one to call.
            Some(DEVICE_MEMORY) => property(DEVICE_ORDINAL).is_none_or(|number| number == self.number),
            Some(_) => true,
        }
    }

    fn zero_is_unknown(&self) -> bool {
        let mut version = 0;
        // SAFETY: the place must be valid; because it is a local.
        unsafe { self.driver.version(&mut version) };
        self.driver.kind == DriverKind::Cuda || version >= HIP_UNKNOWN_IS_ZERO
    }

    /// Whether a stream may hold up our own while it waits for us: it has their priority, so they may share a queue of the
    /// device's.
    pub fn may_hold_us_up(&self, stream: DriverHandle) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        let mut priority = 0;
        // SAFETY: the place must be valid and the stream alive; because it is a local, and the program gives the stream.
        let status = unsafe { self.driver.stream_priority(stream, &mut priority) };
        status == SUCCESS && priority == self.greatest_priority
    }

    /// Whether what is given to a stream is recorded into a graph instead of running.
    pub fn is_captured(&self, stream: DriverHandle) -> bool {
        crate::device::gpu::stream::is_captured(self.driver, stream)
    }

    fn new_event(&self) -> Result<DriverHandle> {
        let mut event = 0;
        // SAFETY: the place must be valid; because it is a local.
        self.check("event_create", unsafe { self.driver.event_create(&mut event, NO_TIMING) })?;
        Ok(event)
    }

    /// An event that stands for nothing yet. The context must be current.
    pub fn event(self: &Arc<GpuDevice>) -> Result<GpuEvent> {
        let kept = locked(&self.events).pop();
        Ok(GpuEvent::new(self.clone(), kept.map_or_else(|| self.new_event(), Ok)?))
    }

    /// Loads the kernels of a module, all of them: drivers load code when it is first used, and then wait for streams that
    /// may wait for ours. The first time takes as long as the driver needs to compile the module.
    pub fn load(&self, module: Module) -> Result<()> {
        let mut modules = locked(&self.modules);
        if modules.contains_key(&module) {
            return Ok(());
        }
        let _entered = self.enter()?;
        let image = self.image(module)?;
        let mut loaded = 0;
        // SAFETY: the place must be valid and the image code that ends with a zero byte or tells its length; because PTX
        // and HIP's code objects do.
        let status = unsafe { self.driver.module_load(&mut loaded, image.as_ptr().cast()) };
        self.check("module_load", status)?;
        for kernel in kernels::kernels_of(module) {
            let mut function = 0;
            let text = CString::new(kernel.name()).map_err(|_| Error::Internal(format!("a name like {kernel:?}")))?;
            // SAFETY: the place and the text must be valid; because they are locals. The module stays loaded.
            let status = unsafe { self.driver.module_function(&mut function, loaded, text.as_ptr()) };
            self.check("module_function", status)?;
            self.functions[kernel.index()].store(function, Ordering::Release);
        }
        modules.insert(module, loaded);
        Ok(())
    }

    /// What the driver loads for a module: PTX, which CUDA's compiles when it loads it, or code compiled from the source.
    fn image(&self, module: Module) -> Result<Cow<'static, [u8]>> {
        let compiled = |source: String| hiprtc::compile(self.driver, &source).map(Cow::Owned);
        match (self.driver.kind, module) {
            (DriverKind::Cuda, Module::Of(dtype)) => Ok(Cow::Borrowed(code::ptx(dtype).to_bytes_with_nul())),
            (DriverKind::Cuda, Module::Move) => Ok(Cow::Borrowed(code::move_ptx().to_bytes_with_nul())),
            (DriverKind::Cuda, Module::Codes) => Ok(Cow::Borrowed(code::codes_ptx().to_bytes_with_nul())),
            (DriverKind::Hip, Module::Codes) => compiled(code::hip_codes_source()),
            (DriverKind::Hip, Module::Of(dtype)) => compiled(code::hip_source(dtype)),
            (DriverKind::Hip, Module::Move) => compiled(code::hip_move_source()),
        }
    }

    /// A kernel of a module that has been loaded.
    fn function(&self, kernel: Kernel) -> Result<DriverHandle> {
        match self.functions[kernel.index()].load(Ordering::Acquire) {
            0 => Err(Error::Internal(format!("kernel {} has not been loaded", kernel.name()))),
            function => Ok(function),
        }
    }

    /// Launches a kernel of ours with its argument, which the kernel must take by its [contract](kernels). The context
    /// must be current.
    fn launch<T: kernels::KernelArgument>(
        &self,
        stream: DriverHandle,
        kernel: Kernel,
        [blocks, rows, threads]: [u32; 3],
        argument: &T,
    ) -> Result<()> {
        let function = self.function(kernel)?;
        let place: *const T = argument;
        let mut arguments: [*mut c_void; 1] = [place.cast_mut().cast()];
        // SAFETY: the kernel must take one argument of this size, which the driver copies before it returns; because
        // `Argument` is implemented for what the kernels take.
        let status = unsafe {
            self.driver.launch(function, blocks, rows, 1, threads, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut())
        };
        self.check("launch", status)
    }
}

/// What stands before the zero byte.
fn text_of(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A device, and the context that all its users share. It stays retained: streams of the program's may use it at any time.
fn primary(driver: &Driver, number: i32) -> Result<(c_int, DriverHandle)> {
    let (mut device, mut context) = (0, 0);
    // SAFETY: no requirement.
    driver.check("init", unsafe { driver.init(0) })?;
    // SAFETY: the place must be valid; because it is a local.
    driver.check("device_get", unsafe { driver.device_get(&mut device, number) })?;
    // SAFETY: the place must be valid; because it is a local.
    driver.check("context_retain", unsafe { driver.context_retain(&mut context, device) })?;
    Ok((device, context))
}
