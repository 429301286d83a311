//! What ranks tell the process that judges: one line of JSON each, written at once, so that it is there whatever becomes
//! of the rank.

use crate::program::World;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Something that a rank has to tell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Line {
    /// It has done its part.
    Done { rank: World },
    /// What the model does not allow.
    Wrong { rank: World, op: usize, text: String },
    /// A call on a communicator that the fault may end returned an error.
    Refused { rank: World, op: usize, comm: usize, code: i32, text: String },
    /// The fault begins.
    Fault { rank: World, op: usize },
    /// A fact worth keeping.
    Note { rank: World, text: String },
}

/// A line and when it was written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Entry {
    /// Nanoseconds of the machine's clock, the same for all processes.
    pub at: u64,
    pub line: Line,
}

/// The file of a process.
pub struct Report(File);

/// The machine's clock in nanoseconds.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer must be writable; because it is a local of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Report {
    pub fn open(path: &Path) -> std::io::Result<Report> {
        Ok(Report(OpenOptions::new().create(true).append(true).open(path)?))
    }

    /// The same file, for another thread.
    pub fn again(&self) -> Report {
        Report(self.0.try_clone().expect("a descriptor is left"))
    }

    pub fn write(&self, line: &Line) {
        let entry = Entry { at: now(), line: line.clone() };
        let mut text = serde_json::to_string(&entry).expect("plain data");
        text.push('\n');
        // One write a line, which appends are whole.
        let _ = (&self.0).write_all(text.as_bytes());
    }

    /// What a process has told.
    pub fn read(path: &Path) -> Vec<Entry> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}
