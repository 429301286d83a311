//! A stand-in for memory that peers can map: plain memory.
use crate::error::{Error, Result};
use std::alloc::Layout;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Mutex;

static LIVE: Mutex<Option<HashMap<usize, Layout>>> = Mutex::new(None);

/// Allocates `bytes` (at least one page), zeroed.
pub fn allocate(bytes: usize) -> Result<NonNull<u8>> {
    let layout = Layout::from_size_align(bytes.max(1), 4096).map_err(|error| Error::System(error.to_string()))?;
    // SAFETY: the layout has a size; because it is at least one byte.
    let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
    let start = start.ok_or_else(|| Error::System(format!("no memory for {bytes} bytes")))?;
    LIVE.lock().unwrap().get_or_insert_with(HashMap::new).insert(start.as_ptr() as usize, layout);
    Ok(start)
}

/// Frees what [`allocate`] returned.
#[allow(clippy::not_unsafe_ptr_arg_deref)]
pub fn free(start: *mut u8) -> Result<()> {
    let layout = LIVE.lock().unwrap().as_mut().and_then(|live| live.remove(&(start as usize)));
    let layout = layout.ok_or_else(|| Error::InvalidArgument(format!("{start:p} was not allocated")))?;
    // SAFETY: the memory was allocated with this layout and is freed once; because the table had it and lost it.
    unsafe { std::alloc::dealloc(start, layout) };
    Ok(())
}
