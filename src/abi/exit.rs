//! Has the C library call us when the program exits.

use std::panic::catch_unwind;
use std::sync::Once;

extern "C" fn leave() {
    // The process ends anyway; nobody is left to tell of a panic.
    let _ = catch_unwind(crate::communicator::exit::leave_all);
    let _ = catch_unwind(crate::records::write_at_exit);
}

/// Registers the goodbye once.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        crate::transport::mpi::note_exit_handler(leave);
        // SAFETY: the function must stay mapped until the process exits; because the library is linked `-z nodelete`.
        // A refusal means that nothing is said at exit, which the other ranks take for a death.
        let _ = unsafe { libc::atexit(leave) };
    });
}
