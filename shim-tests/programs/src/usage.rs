//! What a process holds of the system: descriptors, threads, mappings.

use std::fs;
use std::time::{Duration, Instant};

/// What descriptors lead to.
fn files() -> Vec<String> {
    let links = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    links.map(|entry| fs::read_link(entry.path()).map_or(String::new(), |path| path.display().to_string())).collect()
}

/// Numbers of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub descriptors: usize,
    pub threads: usize,
    /// Mappings of shared memory.
    pub mappings: usize,
}

/// The descriptors that are open.
pub fn descriptors() -> Vec<u64> {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// All address space in use.
pub fn mapped_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

impl Usage {
    pub fn now() -> Usage {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let shared = |line: &&str| line.contains("/dev/shm") || line.contains("/memfd:");
        Usage {
            descriptors: files().len(),
            threads: fs::read_dir("/proc/self/task").map_or(0, |entries| entries.count()),
            mappings: maps.lines().filter(shared).count(),
        }
    }

    /// The library's own threads of streams alone.
    pub fn of_streams() -> Usage {
        let threads = thread_names().iter().filter(|name| name.starts_with("strata-stream")).count();
        Usage { descriptors: 0, threads, mappings: 0 }
    }

    fn within(&self, before: &Usage) -> bool {
        self.descriptors <= before.descriptors && self.threads <= before.threads && self.mappings <= before.mappings
    }

    /// Waits until no more is held than before; else says what is.
    pub fn settles(before: &Usage, measure: fn() -> Usage, limit: Duration) -> Result<(), String> {
        let end = Instant::now() + limit;
        loop {
            let found = measure();
            if found.within(before) {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("leak: {found:?}, before the first communicator {before:?}{}", names()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn thread_names() -> Vec<String> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.map(|entry| fs::read_to_string(entry.path().join("comm")).unwrap_or_default()).collect()
}

/// What threads and descriptors there are.
fn names() -> String {
    let list = |names: Vec<String>| names.iter().map(|name| name.trim().to_string()).collect::<Vec<_>>().join(", ");
    format!("; threads {}; descriptors {}", list(thread_names()), list(files()))
}
