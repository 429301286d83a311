//! Log lines in NCCL's format and at NCCL's levels, and the text behind `ncclGetLastError`.
//!
//! `NCCL_DEBUG` (VERSION, WARN, INFO, TRACE) sets the level, `NCCL_DEBUG_FILE` (`%h` host, `%p` process, `%%`) the
//! place. Lines look as NCCL's do: `host:pid:tid [device] NCCL INFO text`. Without a file they go to stderr: a library
//! in other people's programs leaves stdout alone.

use std::io::Write;
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
    out: Mutex<Box<dyn Write + Send>>,
    host: String,
}

static LOG: OnceLock<Log> = OnceLock::new();
static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// The short name of this host.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().split('.').next().unwrap_or("").to_string()
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
        let file = std::env::var("NCCL_DEBUG_FILE").ok().filter(|name| !name.is_empty() && level > Level::None);
        let out: Box<dyn Write + Send> = match file.map(|name| expand(&name, &host)) {
            Some(name) => match std::fs::File::create(&name) {
                Ok(file) => Box::new(file),
                Err(_) => Box::new(std::io::stderr()),
            },
            None => Box::new(std::io::stderr()),
        };
        Log { level, out: Mutex::new(out), host }
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
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::gettid() };
    let line = format!("{}:{pid}:{tid} [0] NCCL {tag} {text}\n", log.host);
    let mut out = log.out.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // A log that cannot be written must not stop a collective.
    let _ = out.write_all(line.as_bytes());
    let _ = out.flush();
}

/// Keeps `text` as the process's last error (whether or not it is printed) and warns.
pub fn warn(text: &str) {
    *LAST_ERROR.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = text.to_string();
    write(Level::Warn, text);
}

/// The text of the last [`warn`].
pub fn last_error() -> String {
    LAST_ERROR.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
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
    fn the_last_error_is_kept_when_nothing_is_printed() {
        warn("the text");
        assert_eq!(last_error(), "the text");
    }
}
