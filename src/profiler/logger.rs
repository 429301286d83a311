//! The function by which a plugin logs: variadic, as NCCL's own is, and so written in assembler as far as its arguments go.
//!
//! It lays them out as C's `va_list` and has the C library format them. On other processors than x86-64 and AArch64 the text is
//! logged as it is, with its conversions.

use super::layouts::CAddress;
use crate::log::{self, Level};
use std::ffi::{c_char, c_int, c_ulong, c_void, CStr};

/// The longest line.
const LONGEST: usize = 1024;

extern "C" {
    fn vsnprintf(to: *mut c_char, size: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// The address of the function, for `init`.
pub fn address() -> CAddress {
    logger as *const () as CAddress
}

/// NCCL's levels.
fn level_of(level: c_int) -> Level {
    match level {
        ..=1 => Level::Version,
        2 => Level::Warn,
        3 | 4 => Level::Info,
        _ => Level::Trace,
    }
}

/// Logs a line whose arguments are laid out; a plain one where there are none.
extern "C" fn told(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) {
    let level = level_of(level);
    if format.is_null() || !log::enabled(level) {
        return;
    }
    let mut line = [0u8; LONGEST];
    let text = if arguments.is_null() {
        // SAFETY: the text must end with a zero byte; because formats of C do.
        unsafe { CStr::from_ptr(format) }
    } else {
        // SAFETY: the line must have so many bytes, and the arguments must be those that the format names; because the first is a
        // local, and the plugin gave both of the others.
        unsafe { vsnprintf(line.as_mut_ptr().cast(), LONGEST, format, arguments) };
        CStr::from_bytes_until_nul(&line).unwrap_or_default()
    };
    let _ = std::panic::catch_unwind(|| log::write(level, text.to_string_lossy().trim_end()));
}

/// `void log(int level, unsigned long flags, const char *file, int line, const char *format, ...)`
#[unsafe(naked)]
#[cfg(target_arch = "x86_64")]
extern "C" fn logger() {
    // All registers of arguments are saved, and the list says that five of the first six have been read.
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 208",
        "mov [rsp + 40], r9",
        "movaps [rsp + 48], xmm0",
        "movaps [rsp + 64], xmm1",
        "movaps [rsp + 80], xmm2",
        "movaps [rsp + 96], xmm3",
        "movaps [rsp + 112], xmm4",
        "movaps [rsp + 128], xmm5",
        "movaps [rsp + 144], xmm6",
        "movaps [rsp + 160], xmm7",
        "mov dword ptr [rsp + 176], 40",
        "mov dword ptr [rsp + 180], 48",
        "lea rax, [rbp + 16]",
        "mov [rsp + 184], rax",
        "mov rax, rsp",
        "mov [rsp + 192], rax",
        "lea r9, [rsp + 176]",
        "call {told}",
        "leave",
        "ret",
        told = sym told,
    )
}

/// `void log(int level, unsigned long flags, const char *file, int line, const char *format, ...)`
#[unsafe(naked)]
#[cfg(target_arch = "aarch64")]
extern "C" fn logger() {
    // The list: the stack, the ends of the saved registers, and how far before these ends the first unread ones are.
    std::arch::naked_asm!(
        "sub sp, sp, #240",
        "stp x29, x30, [sp]",
        "mov x29, sp",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "stp q0, q1, [sp, #80]",
        "stp q2, q3, [sp, #112]",
        "stp q4, q5, [sp, #144]",
        "stp q6, q7, [sp, #176]",
        "add x9, sp, #240",
        "str x9, [sp, #208]",
        "add x9, sp, #80",
        "str x9, [sp, #216]",
        "add x9, sp, #208",
        "str x9, [sp, #224]",
        "mov w9, #-24",
        "str w9, [sp, #232]",
        "mov w9, #-128",
        "str w9, [sp, #236]",
        "add x5, sp, #208",
        "bl {told}",
        "ldp x29, x30, [sp]",
        "add sp, sp, #240",
        "ret",
        told = sym told,
    )
}

/// `void log(int level, unsigned long flags, const char *file, int line, const char *format, ...)`
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
extern "C" fn logger(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char) {
    told(level, flags, file, line, format, std::ptr::null_mut());
}
