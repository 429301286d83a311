//! What every exported function does around its own.

use crate::{context, errors};

/// A call that needs the context of the calling thread's device.
pub(crate) fn ready(body: impl FnOnce() -> i32) -> i32 {
    plain(|| match context::enter() {
        0 => body(),
        code => code,
    })
}

/// Any other call.
pub(crate) fn plain(body: impl FnOnce() -> i32) -> i32 {
    errors::note(body())
}

/// Declares exported functions, whose bodies give an error code.
macro_rules! calls {
    ($how:ident: $(fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the runtime.")]
        #[no_mangle]
        pub extern "C" fn $name($($arg: $kind),*) -> i32 {
            $crate::calls::$how(move || $body)
        }
    )*};
}
pub(crate) use calls;

/// Stores a result where the program wants it, if it wants it.
pub(crate) fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: there must be room for the value; because the program promises that of a place it passes.
        unsafe { out.write(value) };
    }
}

/// What a place of the program holds.
pub(crate) fn get<T: Copy>(place: *const T) -> T {
    // SAFETY: a value must be there; because the program promises that of what it passes.
    unsafe { place.read_unaligned() }
}
