//! Where traces go: files that the environment names, each in the form that its extension says.
//!
//! A file is written whole beside its place and then moved there, so nobody reads half a trace. What cannot be written is
//! told once, and calls go on.
#![forbid(unsafe_code)]

use super::pickle::PyValue;
use super::trace::CallTrace;
use super::{chrome, flight, summary, table};
use crate::process::check_file_size;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The form of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceForm {
    /// `.json`: Chrome's trace events, which Perfetto opens.
    Chrome,
    /// `.csv`: a call a line.
    Csv,
    /// `.txt`: the summary.
    Summary,
    /// `.pickle`, and what is written by itself at a failure: PyTorch's flight recorder, a file for each rank.
    Flight,
}

impl TraceForm {
    /// The form that a name's extension says.
    pub fn of(name: &str) -> Option<TraceForm> {
        match Path::new(name).extension()?.to_str()? {
            "json" => Some(TraceForm::Chrome),
            "csv" => Some(TraceForm::Csv),
            "txt" => Some(TraceForm::Summary),
            "pickle" => Some(TraceForm::Flight),
            _ => None,
        }
    }
}

/// One file, or one for each rank of the process.
#[derive(Debug)]
pub struct TraceOutput {
    /// Its name with places: `%h` host, `%p` process, `%r` rank, `%%`.
    name: String,
    form: TraceForm,
    has_failed: AtomicBool,
}

/// Puts host, process and rank into a name.
fn expand(name: &str, host: &str, rank: u32) -> String {
    let mut expanded = String::new();
    let mut chars = name.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some('h')) => expanded.push_str(host),
            ('%', Some('p')) => expanded.push_str(&std::process::id().to_string()),
            ('%', Some('r')) => expanded.push_str(&rank.to_string()),
            ('%', Some('%')) => expanded.push('%'),
            ('%', Some(other)) => expanded.extend(['%', other]),
            (c, _) => expanded.push(c),
        }
    }
    expanded
}

/// A name with a place for the rank, if it has none that tells processes apart.
fn apart(name: &str) -> String {
    if name.contains("%r") || name.contains("%p") {
        return name.to_string();
    }
    with_place(name, "%r")
}

/// A name with a further place before its extension.
fn with_place(name: &str, place: &str) -> String {
    let extension =
        Path::new(name).extension().and_then(|extension| extension.to_str()).map_or(0, |text| text.len() + 1);
    let (stem, extension) = name.split_at(name.len() - extension);
    format!("{stem}.{place}{extension}")
}

/// Writes a file whole, then moves it to its place.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io::Error::other("it is there and is no regular file"));
    }
    check_file_size(bytes.len() as u64)?;
    // Not by the file's name: a process that is killed leaves it, and PyTorch's analyser reads what is called like a dump.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let (host, pid, number) = (crate::log::host_name(), std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let beside = path.with_file_name(format!(".strata-{host}-{pid}-{number}.part"));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

impl TraceOutput {
    /// A file of this name. Where there are several processes they have several files.
    pub fn new(name: &str, form: TraceForm, one_process: bool) -> TraceOutput {
        let alone = one_process && form != TraceForm::Flight;
        let name = if alone { name.to_string() } else { apart(name) };
        TraceOutput { name, form, has_failed: AtomicBool::new(false) }
    }

    /// The same of a process that is the fork of one that has records: it leaves that one's files alone.
    pub fn of_fork(self) -> TraceOutput {
        let name = if self.name.contains("%p") { self.name } else { with_place(&self.name, "%p") };
        TraceOutput { name, ..self }
    }

    /// Where PyTorch's analyser looks for dumps: a folder beside the first file of a list, with nothing else in it.
    pub fn beside(names: &str) -> TraceOutput {
        let first = names.split(',').next().unwrap_or_default().trim();
        let folder = Path::new(first).parent().unwrap_or(Path::new(""));
        let path = folder.join("flight").join("nccl_trace_rank_%r");
        TraceOutput::new(&path.to_string_lossy(), TraceForm::Flight, false)
    }

    /// Writes a trace. A failure is told once.
    pub fn write(&self, trace: &CallTrace) {
        let written = match self.form {
            TraceForm::Flight => self.write_flight(trace),
            _ => self.write_one(trace),
        };
        if let Err((path, error)) = written {
            if !self.has_failed.swap(true, Ordering::Relaxed) {
                let text = "the trace of calls cannot be written, and calls go on; STRATA_TRACE names it";
                crate::log::notice(&format!("{}: {text}: {error}", path.display()));
            }
        }
    }

    fn path(&self, trace: &CallTrace, rank: u32) -> PathBuf {
        let host = trace.processes.first().map_or("", |process| &process.host);
        PathBuf::from(expand(&self.name, host, rank))
    }

    fn write_one(&self, trace: &CallTrace) -> Result<(), (PathBuf, io::Error)> {
        let path = self.path(trace, trace.processes.first().map_or(0, |process| process.rank));
        let mut bytes = Vec::new();
        let made = match self.form {
            TraceForm::Chrome => chrome::write(trace, &mut bytes),
            TraceForm::Csv => table::write(trace, &mut bytes),
            TraceForm::Summary | TraceForm::Flight => bytes.write_all(summary::text(trace).as_bytes()),
        };
        made.and_then(|()| write_whole(&path, &bytes)).map_err(|error| (path, error))
    }

    fn write_flight(&self, trace: &CallTrace) -> Result<(), (PathBuf, io::Error)> {
        for rank in flight::ranks(trace) {
            let path = self.path(trace, rank);
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let made = folder.map_or(Ok(()), |folder| match folder.ends_with("flight") {
                true => fs::create_dir_all(folder),
                false => Ok(()),
            });
            let bytes = || PyValue::pickled(&flight::dump(trace, rank));
            made.and_then(|()| write_whole(&path, &bytes())).map_err(|error| (path, error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::sample;
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("strata-records-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn names_tell_processes_apart_and_extensions_say_the_form() {
        let pid = std::process::id();
        assert_eq!(expand("%h-%p-%r-%%-%q-%", "n1", 7), format!("n1-{pid}-7-%-%q-%"));
        for (name, other) in [
            ("t.json", "t.%r.json"),
            ("a.b/t", "a.b/t.%r"),
            ("t-%r.json", "t-%r.json"),
            ("t-%p.csv", "t-%p.csv"),
            ("%h.json", "%h.%r.json"),
        ] {
            assert_eq!(apart(name), other);
        }
        assert_eq!(TraceOutput::new("t.json", TraceForm::Chrome, true).name, "t.json");
        let of_fork = |name| TraceOutput::new(name, TraceForm::Chrome, false).of_fork().name;
        assert_eq!(["t.json", "t-%p.json"].map(of_fork), ["t.%r.%p.json", "t-%p.json"]);
        assert_eq!(TraceOutput::beside("/a/b.json,c.csv").name, "/a/flight/nccl_trace_rank_%r");
        assert_eq!(TraceOutput::beside("b.json").name, "flight/nccl_trace_rank_%r");
        let forms = ["a.json", "a.csv", "a.txt", "a.pickle", "a.png", "json"].map(TraceForm::of);
        let known = [TraceForm::Chrome, TraceForm::Csv, TraceForm::Summary, TraceForm::Flight].map(Some);
        assert_eq!((&forms[..4], &forms[4..]), (&known[..], &[None, None][..]));
    }

    #[test]
    fn every_form_is_written_whole() {
        let (trace, folder) = (sample(), folder("forms"));
        for (name, form) in [("t.json", TraceForm::Chrome), ("t.csv", TraceForm::Csv), ("t.txt", TraceForm::Summary)] {
            let path = folder.join(name);
            TraceOutput::new(path.to_str().unwrap(), form, true).write(&trace);
            assert!(fs::metadata(&path).unwrap().len() > 100, "{name}");
        }
        TraceOutput::beside(folder.join("t.json").to_str().unwrap()).write(&trace);
        let dump = fs::read(folder.join("flight/nccl_trace_rank_1")).unwrap();
        assert_eq!(dump, flight::dump(&trace, 1).pickled());
        assert_eq!(chrome::read(&fs::read(folder.join("t.json")).unwrap()), Ok(trace));
        let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 4, "nothing is left beside: {left:?}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_told_once_and_leaves_nothing() {
        let (trace, folder) = (sample(), folder("fails"));
        let missing = TraceOutput::new(folder.join("no/t.json").to_str().unwrap(), TraceForm::Chrome, true);
        let taken = TraceOutput::new(folder.to_str().unwrap(), TraceForm::Chrome, true);
        for output in [&missing, &taken] {
            assert!(output.write_one(&trace).is_err());
            output.write(&trace);
            output.write(&trace);
            assert!(output.has_failed.load(Ordering::Relaxed));
        }
        assert!(write_whole(Path::new("/dev/null"), b"x").is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir_all(&folder).unwrap();
    }
}
