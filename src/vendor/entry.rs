//! Where the calls of each function go.
//!
//! Every exported function is one jump through its [`Entry`]. At first the entry leads to [`settle`], which decides, on
//! the first call, where the function's calls go from then on: to the vendor's function, which then costs a program one
//! indirect jump and sees the program's very registers and stack (arguments on the stack and structures by value
//! included); to Strata's function that looks at such calls; or to Strata's own function on the host device.
//!
//! An entry that is looked at also tests where the call will return to: calls out of the vendor's own code go straight
//! to the vendor.

use super::guard;
use super::library::Library;
use super::{mode, Mode};
use std::ffi::{c_void, CStr};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// An address of code.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct CodeAddress(pub *const c_void);

// SAFETY: an address of code may be used on any thread; because nobody writes there.
unsafe impl Sync for CodeAddress {}

/// Where the calls of one function go. The exported code reads the first two fields by their offsets.
#[derive(Debug)]
#[repr(C)]
pub struct Entry {
    to: AtomicPtr<c_void>,
    vendor: AtomicPtr<c_void>,
    /// Where calls go that are on no communicator of the host.
    next: AtomicPtr<c_void>,
    name: &'static CStr,
    /// Strata's own function, on the host device.
    host: CodeAddress,
    /// Strata's function over the vendor's library; none where calls are handed on as they are.
    over: Option<CodeAddress>,
    /// Tells calls on communicators of the host from others; none where calls are on no communicator.
    routed: Option<CodeAddress>,
    /// What answers where the vendor's library does not have the function.
    absent: CodeAddress,
}

const _: () = assert!(std::mem::offset_of!(Entry, to) == 0 && std::mem::offset_of!(Entry, vendor) == 8);

/// The vendor's code, for the test in entries that are looked at: where it begins, and how long it is.
#[repr(C)]
pub struct VendorCode {
    start: AtomicUsize,
    len: AtomicUsize,
}

/// The one of this process. Empty until a vendor's library has been opened.
pub static VENDOR_CODE: VendorCode = VendorCode { start: AtomicUsize::new(0), len: AtomicUsize::new(0) };

impl Entry {
    /// An entry that `first` settles at its first call.
    pub const fn new(
        name: &'static CStr,
        first: *const c_void,
        host: CodeAddress,
        over: Option<CodeAddress>,
        routed: Option<CodeAddress>,
        absent: CodeAddress,
    ) -> Entry {
        Entry {
            to: AtomicPtr::new(first.cast_mut()),
            vendor: AtomicPtr::new(first.cast_mut()),
            next: AtomicPtr::new(first.cast_mut()),
            name,
            host,
            over,
            routed,
            absent,
        }
    }

    /// The vendor's function, or what answers in its place.
    pub fn vendor(&self) -> *const c_void {
        self.vendor.load(Ordering::Acquire).cast_const()
    }

    /// Where calls go that are on no communicator of the host.
    pub fn next(&self) -> *const c_void {
        self.next.load(Ordering::Acquire).cast_const()
    }

    /// Decides where calls go.
    fn settle(&self) -> *const c_void {
        let (vendor, next) = match mode() {
            Mode::Host => (self.absent.0, self.host.0),
            // No vendor has Strata's own functions, and some work over a vendor's library only.
            Mode::PassThrough(_) | Mode::Nobody(_) if self.is_own() => (self.absent.0, self.host.0),
            Mode::Over(_) if self.is_own() => (self.absent.0, self.over.map_or(self.host.0, |over| over.0)),
            // Programs make strings of these texts, which a null ends.
            Mode::Nobody(_) if self.is_text() => (self.host.0, self.host.0),
            Mode::Nobody(_) => (self.absent.0, self.absent.0),
            Mode::PassThrough(library) => {
                let vendor = self.of(library);
                (vendor, vendor)
            }
            Mode::Over(library) => {
                VENDOR_CODE.start.store(library.code.start, Ordering::Relaxed);
                VENDOR_CODE.len.store(library.code.len(), Ordering::Relaxed);
                let vendor = self.of(library);
                let looked_at = self.over.filter(|_| vendor != self.absent.0);
                (vendor, looked_at.map_or(vendor, |over| over.0))
            }
        };
        self.vendor.store(vendor.cast_mut(), Ordering::Release);
        self.next.store(next.cast_mut(), Ordering::Release);
        let to = self.beside_host(vendor, next);
        self.to.store(to.cast_mut(), Ordering::SeqCst);
        // Another thread may have made the first communicator of the host meanwhile.
        let to = self.beside_host(vendor, next);
        self.to.store(to.cast_mut(), Ordering::SeqCst);
        // The vendor's own call of a function that the program has not called yet.
        match guard::is_inside() {
            true => vendor,
            false => to,
        }
    }

    /// Where calls go: to `next`, unless some of them are on communicators of the host.
    fn beside_host(&self, vendor: *const c_void, next: *const c_void) -> *const c_void {
        if matches!(mode(), Mode::Host) || !HOST_COMMUNICATORS.load(Ordering::SeqCst) {
            return next;
        }
        // A group has calls on both. Who cannot close the vendor's part leaves the group open.
        let closes = vendor != self.absent.0 || matches!(mode(), Mode::Nobody(_));
        let looked_at = if self.is_group() { self.over.filter(|_| closes) } else { self.routed };
        looked_at.map_or(next, |looked_at| looked_at.0)
    }

    /// Whether it opens or closes a group.
    fn is_group(&self) -> bool {
        self.name.to_bytes().starts_with(b"ncclGroup")
    }

    /// Whether the function tells what a result means or what went wrong last.
    fn is_text(&self) -> bool {
        self.name == c"ncclGetErrorString" || self.name == c"ncclGetLastError"
    }

    /// Whether it is one of Strata's own functions, which no vendor has.
    fn is_own(&self) -> bool {
        self.name.to_bytes().starts_with(b"strata")
    }

    fn of(&self, library: &Library) -> *const c_void {
        library.address(self.name).unwrap_or(self.absent.0)
    }
}

/// Whether the process has made a communicator of the host.
static HOST_COMMUNICATORS: AtomicBool = AtomicBool::new(false);

/// From now on calls of these functions on communicators of the host are Strata's. Before, they cost nothing.
pub fn serve_host_communicators(entries: impl Iterator<Item = &'static &'static Entry>) {
    if matches!(mode(), Mode::Host) || HOST_COMMUNICATORS.swap(true, Ordering::SeqCst) {
        return;
    }
    for entry in entries {
        entry.settle();
    }
}

/// Settles an entry for a call that is under way, and returns where it goes.
extern "C" fn settle_call(entry: &Entry) -> *const c_void {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| entry.settle())).unwrap_or(entry.absent.0)
}

/// Goes on with a call whose entry is in a scratch register: settles the entry with all arguments kept, and jumps.
#[unsafe(naked)]
#[cfg(target_arch = "x86_64")]
pub extern "C" fn settle() {
    // No function of the interface takes floating-point arguments.
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "mov rdi, rax",
        "call {settle_call}",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp rax",
        settle_call = sym settle_call,
    )
}

/// Goes on with a call whose entry is in a scratch register: settles the entry with all arguments kept, and jumps.
#[unsafe(naked)]
#[cfg(target_arch = "aarch64")]
pub extern "C" fn settle() {
    // No function of the interface takes floating-point arguments.
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-96]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "mov x0, x16",
        "bl {settle_call}",
        "mov x16, x0",
        "ldr x8, [sp, #80]",
        "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #96",
        "br x16",
        settle_call = sym settle_call,
    )
}

/// The code of an exported function: a jump through its entry.
#[cfg(target_arch = "x86_64")]
#[macro_export]
#[doc(hidden)]
macro_rules! jump {
    (first $entry:path) => {
        std::arch::naked_asm!("lea rax, [rip + {entry}]", "jmp {settle}", entry = sym $entry, settle = sym $crate::vendor::entry::settle)
    };
    (forwarded $entry:path) => {
        std::arch::naked_asm!("jmp qword ptr [rip + {entry}]", entry = sym $entry)
    };
    (looked_at $entry:path) => {
        std::arch::naked_asm!(
            "mov rax, [rsp]",
            "sub rax, [rip + {code}]",
            "cmp rax, [rip + {code} + 8]",
            "jb 2f",
            "jmp qword ptr [rip + {entry}]",
            "2:",
            "jmp qword ptr [rip + {entry} + 8]",
            entry = sym $entry,
            code = sym $crate::vendor::entry::VENDOR_CODE,
        )
    };
}

/// The code of an exported function: a jump through its entry.
#[cfg(target_arch = "aarch64")]
#[macro_export]
#[doc(hidden)]
macro_rules! jump {
    (first $entry:path) => {
        std::arch::naked_asm!("adrp x16, {entry}", "add x16, x16, :lo12:{entry}", "b {settle}", entry = sym $entry, settle = sym $crate::vendor::entry::settle)
    };
    (forwarded $entry:path) => {
        std::arch::naked_asm!("adrp x16, {entry}", "ldr x16, [x16, :lo12:{entry}]", "br x16", entry = sym $entry)
    };
    (looked_at $entry:path) => {
        std::arch::naked_asm!(
            "adrp x16, {code}",
            "add x16, x16, :lo12:{code}",
            "ldp x16, x17, [x16]",
            "sub x16, x30, x16",
            "cmp x16, x17",
            "adrp x16, {entry}",
            "add x16, x16, :lo12:{entry}",
            "b.lo 2f",
            "ldr x16, [x16]",
            "br x16",
            "2:",
            "ldr x16, [x16, #8]",
            "br x16",
            entry = sym $entry,
            code = sym $crate::vendor::entry::VENDOR_CODE,
        )
    };
}
