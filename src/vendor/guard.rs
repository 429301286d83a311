//! Telling the program's calls from the vendor's own.
//!
//! The vendor's library calls some of its public functions by their names, and the dynamic linker may lead these calls
//! to Strata. They must go straight back. Two marks tell them: the address a call returns to lies in the vendor's code
//! (which also holds on threads of the vendor's; see [`super::entry`]), and this flag, raised around every call into the
//! vendor's library (which also holds where the vendor's function ends in a jump to another one).
#![forbid(unsafe_code)]

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a call into the vendor's library.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Calls into the vendor's library: what it calls in turn is not looked at.
pub fn inside<R>(call: impl FnOnce() -> R) -> R {
    struct Lower(bool);
    impl Drop for Lower {
        fn drop(&mut self) {
            INSIDE.set(self.0);
        }
    }
    let _lower = Lower(INSIDE.replace(true));
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_raised_during_the_call_alone() {
        assert!(!is_inside());
        assert!(inside(|| inside(is_inside) && is_inside()));
        assert!(!is_inside());
    }
}
