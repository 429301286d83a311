//! Contexts: primary ones, created ones, and which is current on a thread.
#![forbid(unsafe_code)]

use crate::fault::{Code, Result, CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_DEVICE};
use crate::handles::{self, Handles};
use crate::memory;
use crate::settings::settings;
use crate::stream::Stream;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// A context.
pub struct Context {
    /// Its handle. A device's primary context has the same handle each time it comes to life.
    pub handle: usize,
    /// Its device.
    pub device: i32,
    /// The flags that it was created with.
    pub flags: u32,
    /// Held while work is submitted that the legacy stream orders.
    pub order: Mutex<()>,
    primary: bool,
    destroyed: AtomicBool,
    fault: AtomicI32,
    legacy: OnceLock<Arc<Stream>>,
    streams: Mutex<Vec<Weak<Stream>>>,
}

static CONTEXTS: Handles<Context> = Handles::empty();

/// How often the primary context of each device is retained, and its handle.
static PRIMARY: Mutex<BTreeMap<i32, (u64, usize)>> = Mutex::new(BTreeMap::new());

thread_local! {
    // Never dropped: exit handlers, which run after the thread's destructors, may call the driver.
    static CURRENT: ManuallyDrop<RefCell<Vec<Arc<Context>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static PER_THREAD: ManuallyDrop<RefCell<HashMap<usize, Arc<Stream>>>> = ManuallyDrop::default();
}

impl Context {
    fn new(device: i32, flags: u32, primary: Option<usize>) -> Arc<Context> {
        let context = Arc::new(Context {
            handle: primary.unwrap_or_else(handles::fresh),
            device,
            flags,
            order: Mutex::new(()),
            primary: primary.is_some(),
            destroyed: AtomicBool::new(false),
            fault: AtomicI32::new(0),
            legacy: OnceLock::new(),
            streams: Mutex::new(Vec::new()),
        });
        CONTEXTS.name(context.handle, context.clone());
        context
    }

    /// Whether it can be used no more.
    pub fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::SeqCst)
    }

    /// Whether its streams should drop what they have to do: it is destroyed, or something failed on it.
    pub fn has_stopped(&self) -> bool {
        self.check().is_err()
    }

    /// What every call answers: success, until something fails.
    pub fn check(&self) -> Result {
        if self.is_destroyed() {
            return Err(CONTEXT_IS_DESTROYED);
        }
        match self.fault.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Something failed on a stream; the first failure stays.
    pub fn fail(&self, code: Code) {
        let _ = self.fault.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The stream that synchronises with all others that do not forbid it.
    pub fn legacy(self: &Arc<Context>) -> Arc<Stream> {
        self.legacy.get_or_init(|| Stream::new(self, true, 0)).clone()
    }

    /// Whether a stream is the legacy stream.
    pub fn is_legacy(&self, stream: &Arc<Stream>) -> bool {
        self.legacy.get().is_some_and(|legacy| Arc::ptr_eq(legacy, stream))
    }

    /// The default stream of the calling thread.
    pub fn per_thread(self: &Arc<Context>) -> Arc<Stream> {
        PER_THREAD.with(|streams| {
            let mut streams = streams.borrow_mut();
            let stream = streams.entry(self.handle).or_insert_with(|| Stream::new(self, true, 0));
            if !Arc::ptr_eq(&stream.context, self) {
                *stream = Stream::new(self, true, 0);
            }
            stream.clone()
        })
    }

    /// Takes a stream among those of the context.
    pub fn adopt(&self, stream: &Arc<Stream>) {
        self.streams.lock().unwrap().push(Arc::downgrade(stream));
    }

    /// All its streams.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = self.streams.lock().unwrap();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for all that was submitted.
    pub fn synchronize(self: &Arc<Context>) -> Result {
        for stream in self.streams() {
            stream.fence().wait();
        }
        self.check()
    }

    /// Ends the context: its streams stop and what belongs to it is freed.
    fn destroy(&self) {
        self.destroyed.store(true, Ordering::SeqCst);
        for stream in self.streams() {
            stream.wake();
        }
        self.streams().iter().for_each(|stream| stream.let_go());
        memory::free_all_of(self.handle);
    }
}

/// Checks the number of a device.
pub fn check_device(device: i32) -> Result<i32> {
    if (0..settings().devices).contains(&device) {
        Ok(device)
    } else {
        Err(INVALID_DEVICE)
    }
}

fn alive(handle: usize) -> Option<Arc<Context>> {
    CONTEXTS.get(handle).filter(|context| !context.is_destroyed())
}

/// Retains the primary context of a device; it comes to life if it is not alive.
pub fn retain(device: i32) -> Result<Arc<Context>> {
    check_device(device)?;
    let mut primary = PRIMARY.lock().unwrap();
    let (count, handle) = primary.entry(device).or_insert_with(|| (0, handles::fresh()));
    *count += 1;
    Ok(alive(*handle).unwrap_or_else(|| Context::new(device, 0, Some(*handle))))
}

/// Releases the primary context of a device once; the last release ends it.
pub fn release(device: i32) -> Result {
    check_device(device)?;
    let mut primary = PRIMARY.lock().unwrap();
    let (count, handle) = primary.get_mut(&device).filter(|(count, _)| *count > 0).ok_or(INVALID_CONTEXT)?;
    *count -= 1;
    if let Some(context) = alive(*handle).filter(|_| *count == 0) {
        context.destroy();
    }
    Ok(())
}

/// Ends the primary context of a device, however often it is retained.
pub fn reset(device: i32) -> Result {
    check_device(device)?;
    let primary = PRIMARY.lock().unwrap();
    if let Some(context) = primary.get(&device).and_then(|(_, handle)| alive(*handle)) {
        context.destroy();
    }
    Ok(())
}

/// The primary context of a device, if it is alive.
pub fn primary(device: i32) -> Result<Option<Arc<Context>>> {
    check_device(device)?;
    Ok(PRIMARY.lock().unwrap().get(&device).and_then(|(_, handle)| alive(*handle)))
}

/// Creates a context and makes it current.
pub fn create(flags: u32, device: i32) -> Result<Arc<Context>> {
    let context = Context::new(check_device(device)?, flags, None);
    push(context.clone());
    Ok(context)
}

/// Destroys a created context; it is no longer current on the calling thread.
pub fn destroy(handle: usize) -> Result {
    let context = find(handle)?;
    if context.primary {
        return Err(INVALID_CONTEXT);
    }
    if context.is_destroyed() {
        return Err(CONTEXT_IS_DESTROYED);
    }
    context.destroy();
    CURRENT.with(|stack| stack.borrow_mut().pop_if(|top| Arc::ptr_eq(top, &context)));
    Ok(())
}

/// The context of a handle, alive or not.
pub fn find(handle: usize) -> Result<Arc<Context>> {
    CONTEXTS.get(handle).ok_or(INVALID_CONTEXT)
}

/// Makes a context current.
pub fn push(context: Arc<Context>) {
    CURRENT.with(|stack| stack.borrow_mut().push(context));
}

/// Makes the one before current again.
pub fn pop() -> Result<Arc<Context>> {
    CURRENT.with(|stack| stack.borrow_mut().pop()).ok_or(INVALID_CONTEXT)
}

/// Puts a context in place of the current one; none takes the current one away.
pub fn set(context: Option<Arc<Context>>) {
    CURRENT.with(|stack| {
        let mut stack = stack.borrow_mut();
        stack.pop();
        stack.extend(context);
    });
}

/// The current context in whatever state.
pub fn top() -> Option<Arc<Context>> {
    CURRENT.with(|stack| stack.borrow().last().cloned())
}

/// The current context, which must be usable.
pub fn current() -> Result<Arc<Context>> {
    let context = top().ok_or(INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

/// How often contexts are retained; a created one counts once.
pub fn retained() -> u64 {
    let created = CONTEXTS.count(|context| !context.primary && !context.is_destroyed()) as u64;
    created + PRIMARY.lock().unwrap().values().map(|(count, _)| *count).sum::<u64>()
}
