//! Log lines in NCCL's format and at NCCL's levels, and the text behind `ncclGetLastError`.
//!
//! `NCCL_DEBUG` (VERSION, WARN, INFO, TRACE) sets the level, `NCCL_DEBUG_FILE` (`%h` host, `%p` process, `%%`) the
//! place; over a vendor's library, which writes its own lines there and would overwrite ours, the place is that name with
//! `.strata` at the end. Lines look as NCCL's do, but for the name: `host:pid:tid [device] STRATA INFO text`. Without a file
//! they go to stderr: a library in other people's programs leaves stdout alone. A descriptor that does not name any more
//! what it named when the process first logged something gets no line, since another file or a connection may have its
//! number by then; nor does the file that the environment names in a program with more rights than its starter.

use crate::fork::PerProcess;
use crate::process::{above_standard, check_file_size, is_elevated};
use rustix::fs::{fstat, FileType, Stat};
use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    None,
    /// One line naming the version.
    Version,
    /// What went wrong.
    Warn,
    /// What was chosen and why.
    Info,
    /// Every call.
    Trace,
}

struct Log {
    level: Level,
    /// Where lines go; else to stderr.
    file: Option<File>,
    /// What the file, or else stderr, was when the process first logged something; none where stderr was closed.
    place: Option<Place>,
    host: String,
}

/// A file by its device and inode, whatever the number of its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place(u64, u64);

impl Place {
    fn of(stat: &Stat) -> Place {
        Place(stat.st_dev, stat.st_ino)
    }

    /// Whether a line may go to a descriptor that was this place. A program may lead its stderr elsewhere meanwhile: to a
    /// terminal or a pipe. A regular file or a socket in its place may be anything that the program works with.
    fn takes(self, out: BorrowedFd<'_>, bytes: usize) -> bool {
        let Ok(stat) = fstat(out) else { return false };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice | FileType::Fifo => true,
            FileType::RegularFile => {
                self == Place::of(&stat) && check_file_size(stat.st_size as u64 + bytes as u64).is_ok()
            }
            _ => self == Place::of(&stat),
        }
    }
}

static LOG: OnceLock<Log> = OnceLock::new();
/// Held while a line is written. Neither this nor the lock of the standard library's stderr may be one that a forked
/// child finds held for ever.
static WRITING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
static LAST_ERROR: PerProcess<Mutex<String>> = PerProcess::new(Mutex::default);

/// The short name of this host.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().unwrap_or("").to_string()
}

/// Whether a vendor's library writes to the file that `NCCL_DEBUG_FILE` names.
static VENDOR_WRITES: AtomicBool = AtomicBool::new(false);

/// Leaves the file of the log to a vendor's library. To be called before anything is logged.
pub fn leave_file_to_vendor() {
    VENDOR_WRITES.store(true, Ordering::Relaxed);
}

fn log() -> &'static Log {
    LOG.get_or_init(|| {
        let level = match std::env::var("NCCL_DEBUG").unwrap_or_default().to_ascii_uppercase().as_str() {
            "VERSION" => Level::Version,
            "WARN" => Level::Warn,
            "INFO" | "ABORT" => Level::Info,
            "TRACE" => Level::Trace,
            _ => Level::None,
        };
        let host = host_name();
        let named = std::env::var("NCCL_DEBUG_FILE").ok().filter(|_| !is_elevated());
        let file = named.filter(|name| !name.is_empty() && level > Level::None);
        let ours = if VENDOR_WRITES.load(Ordering::Relaxed) { ".strata" } else { "" };
        let file = file.and_then(|name| File::create(expand(&name, &host) + ours).ok()).map(above_standard);
        let stderr = std::io::stderr();
        let place = fstat(file.as_ref().map_or_else(|| stderr.as_fd(), File::as_fd)).ok();
        Log { level, file, place: place.as_ref().map(Place::of), host }
    })
}

fn expand(name: &str, host: &str) -> String {
    let mut expanded = String::new();
    let mut chars = name.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('h')) => expanded.push_str(host),
            ('%', Some('p')) => expanded.push_str(&std::process::id().to_string()),
            ('%', Some('%')) => expanded.push('%'),
            ('%', Some(other)) => expanded.extend(['%', other]),
            (c, _) => expanded.push(c),
        }
    }
    expanded
}

/// Whether lines of this level are written.
pub fn enabled(level: Level) -> bool {
    log().level >= level
}

/// Writes one line. Prefer the macros, which do not format what is not written.
pub fn write(level: Level, text: &str) {
    if enabled(level) {
        put(level, text);
    }
}

/// Writes a warning whatever `NCCL_DEBUG` says: for what the user got wrong and would not hear of otherwise. To be said
/// by one process of a job.
pub fn notice(text: &str) {
    put(Level::Warn, text);
}

fn put(level: Level, text: &str) {
    let log = log();
    let tag = match level {
        Level::Warn => "WARN",
        Level::Trace => "TRACE",
        Level::Version => "VERSION",
        _ => "INFO",
    };
    let pid = std::process::id();
    let tid = rustix::thread::gettid().as_raw_nonzero();
    let line = format!("{}:{pid}:{tid} [0] STRATA {tag} {text}\n", log.host);
    let _writing = WRITING.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let stderr = std::io::stderr();
    let out = log.file.as_ref().map_or_else(|| stderr.as_fd(), File::as_fd);
    if !log.place.is_some_and(|place| place.takes(out, line.len())) {
        return;
    }
    let mut rest = line.as_bytes();
    // A log that cannot be written must not stop a collective.
    while let Ok(written @ 1..) = rustix::io::retry_on_intr(|| rustix::io::write(out, rest)) {
        rest = &rest[written..];
    }
}

/// Keeps `text` as the process's last error (whether or not it is printed) and warns.
pub fn warn(text: &str) {
    keep(text);
    write(Level::Warn, text);
}

/// The same where a call of this thread fails with `text`, which is then the thread's last error as well.
pub fn failed(text: &str) {
    keep_for_thread(text);
    warn(text);
}

/// Keeps `text` as the process's last error.
pub fn keep(text: &str) {
    *LAST_ERROR.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = text.to_string();
}

thread_local! {
    static TOLD: RefCell<Option<String>> = const { RefCell::new(None) };
    static OF_THREAD: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps `text` as what this thread's last failed call says, which calls of other threads do not change.
pub fn keep_for_thread(text: &str) {
    // A thread that ends may have given up its texts already.
    let _ = OF_THREAD.try_with(|kept| kept.replace(Some(text.to_string())));
}

/// The text of [`while_told`] or [`keep_for_thread`] on this thread; where there is none, the process's last error.
pub fn last_error_of_thread() -> String {
    let own = || OF_THREAD.with_borrow(Option::clone);
    TOLD.with_borrow(Option::clone).or_else(own).unwrap_or_else(last_error)
}

/// Does something during which this `text` is the thread's last error: what a program's function is told of, which others
/// may have followed by now.
pub fn while_told<T>(text: &str, act: impl FnOnce() -> T) -> T {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            TOLD.set(None);
        }
    }
    TOLD.set(Some(text.to_string()));
    let _ends = Ends;
    act()
}

/// The text of the last [`warn`], or the one of [`while_told`] on this thread.
pub fn last_error() -> String {
    if let Some(told) = TOLD.with_borrow(Option::clone) {
        return told;
    }
    LAST_ERROR.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
}

/// Writes an INFO line.
#[macro_export]
macro_rules! info {
    ($($argument:tt)*) => {
        if $crate::log::enabled($crate::log::Level::Info) {
            $crate::log::write($crate::log::Level::Info, &format!($($argument)*));
        }
    };
}

/// Writes a TRACE line.
#[macro_export]
macro_rules! trace {
    ($($argument:tt)*) => {
        if $crate::log::enabled($crate::log::Level::Trace) {
            $crate::log::write($crate::log::Level::Trace, &format!($($argument)*));
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debug_file_name_is_expanded() {
        let pid = std::process::id();
        assert_eq!(expand("/x/%h.%p.%%.%q", "host"), format!("/x/host.{pid}.%.%q"));
    }

    #[test]
    fn a_line_goes_to_what_the_descriptor_was_or_to_a_terminal_or_pipe() {
        let path = |name: &str| std::env::temp_dir().join(format!("strata-log-{}-{name}", std::process::id()));
        let [one, other] = ["one", "other"].map(|name| File::create(path(name)).unwrap());
        ["one", "other"].iter().for_each(|name| std::fs::remove_file(path(name)).unwrap());
        let place = Place::of(&fstat(&one).unwrap());
        assert!(place.takes(one.as_fd(), 10));
        assert!(!place.takes(other.as_fd(), 10), "another file");
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!place.takes(socket.as_fd(), 10), "a socket");
        assert!(Place::of(&fstat(&socket).unwrap()).takes(socket.as_fd(), 10), "the same socket");
        let (_read, write) = std::io::pipe().unwrap();
        assert!(place.takes(write.as_fd(), 10), "a pipe");
    }

    #[test]
    fn the_last_error_is_kept_when_nothing_is_printed() {
        warn("the text");
        assert_eq!(last_error(), "the text");
    }

    #[test]
    fn a_thread_s_last_error_is_its_own() {
        keep_for_thread("of this thread");
        std::thread::spawn(|| keep_for_thread("of another")).join().unwrap();
        assert_eq!(last_error_of_thread(), "of this thread");
        assert_eq!(while_told("told", last_error_of_thread), "told");
        let elsewhere = std::thread::spawn(last_error_of_thread).join().unwrap();
        assert!(!["of this thread", "of another"].contains(&elsewhere.as_str()), "{elsewhere}");
    }
}
