//! What every exported function does before and after its own.

use crate::fault::{Code, Result, INVALID_VALUE, NOT_INITIALIZED, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN};
use crate::settings::is_absent;
use crate::work::is_in_host_function;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);

/// The driver may be used from now on.
pub fn initialize() {
    IS_INITIALIZED.store(true, Ordering::Release);
}

/// A call that may be made before the driver is initialised.
pub fn early(name: &str, body: impl FnOnce() -> Result) -> i32 {
    let result = if is_absent(name) {
        Err(NOT_SUPPORTED)
    } else {
        panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(UNKNOWN))
    };
    result.err().unwrap_or(Code(0)).0
}

/// A call that needs no initialisation before it.
pub fn any_time(name: &str, body: impl FnOnce() -> Result) -> i32 {
    initialize();
    call(name, body)
}

/// Any other call.
pub fn call(name: &str, body: impl FnOnce() -> Result) -> i32 {
    early(name, || {
        if !IS_INITIALIZED.load(Ordering::Acquire) {
            return Err(NOT_INITIALIZED);
        }
        if is_in_host_function() {
            return Err(NOT_PERMITTED);
        }
        body()
    })
}

/// Stores a result where the program wants it.
pub fn put<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: there must be room for the value; because the program promises that of a place it passes.
    unsafe { out.write(value) };
    Ok(())
}

/// Stores a result if the program wants it.
pub fn put_if_wanted<T>(out: *mut T, value: T) {
    if !out.is_null() {
        let _ = put(out, value);
    }
}

/// An element of an array of the program.
pub fn element<T: Copy>(array: *const T, index: usize) -> Result<T> {
    if array.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: so many elements must be readable; because the program promises that of an array it passes.
    Ok(unsafe { array.wrapping_add(index).read() })
}

/// Stores a text with its final 0, as far as there is room.
pub fn put_text(out: *mut std::ffi::c_char, room: i32, text: &str) -> Result {
    let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(INVALID_VALUE)?;
    let cut = &text.as_bytes()[..text.len().min(room - 1)];
    for (index, byte) in cut.iter().chain(&[0]).enumerate() {
        put(out.wrapping_add(index).cast(), *byte)?;
    }
    Ok(())
}

/// Declares exported functions, whose bodies give a [`Result`].
#[macro_export]
macro_rules! exports {
    ($how:ident: $(fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the driver.")]
        #[no_mangle]
        pub extern "C" fn $name($($arg: $kind),*) -> i32 {
            $crate::entry::$how(stringify!($name), move || -> $crate::fault::Result { $body })
        }
    )*};
}
