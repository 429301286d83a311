//! Where the program's own files would have the linker look for the vendor's library: their `DT_RPATH` and `DT_RUNPATH`.
//!
//! A preloaded Strata answers to the vendor's name, so the linker never goes there: `mapped` has nothing then, and these
//! entries are all that tells which of the machine's libraries the program was built for.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The folders that objects name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RunPaths {
    /// By `DT_RPATH`, where the linker looks first.
    pub before_environment: Vec<PathBuf>,
    /// By `DT_RUNPATH`, where it looks after `LD_LIBRARY_PATH`.
    pub after_environment: Vec<PathBuf>,
}

impl RunPaths {
    /// Those of these objects; first of the ones that need a library whose name starts with one of `names`. The program
    /// itself is the object without a name.
    pub fn of(objects: &[PathBuf], names: &[&str]) -> RunPaths {
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let files = objects.iter().map(|path| if path.as_os_str().is_empty() { &program } else { path });
        let mut told: Vec<Dynamic> =
            files.filter(|path| path.is_absolute()).filter_map(|path| Dynamic::of(path)).collect();
        told.sort_by_key(|object| !object.needed.iter().any(|need| names.iter().any(|name| need.starts_with(name))));
        let mut found = RunPaths::default();
        for object in told {
            // The linker ignores one beside the other.
            match object.runpath.is_empty() {
                true => found.before_environment.extend(object.rpath),
                false => found.after_environment.extend(object.runpath),
            }
        }
        found
    }
}

/// What an object's dynamic section tells.
#[derive(Debug, Default)]
struct Dynamic {
    needed: Vec<String>,
    rpath: Vec<PathBuf>,
    runpath: Vec<PathBuf>,
}

/// Longer ones are not an object's that a program has loaded.
const MOST_BYTES: u64 = 64 << 20;

impl Dynamic {
    /// Of a file of this machine's kind; `None` if it is no such file.
    fn of(path: &Path) -> Option<Dynamic> {
        let file = File::open(path).ok()?;
        let header = read(&file, 0, 64)?;
        // 64 bits, the lower byte first.
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let (entry, count) = (u64::from(short(&header, 54)?), u64::from(short(&header, 56)?));
        let table = read(&file, long(&header, 32)?, entry * count)?;
        let segments: Vec<Segment> = table.chunks(entry.max(1) as usize).filter_map(Segment::of).collect();
        let dynamic = segments.iter().find(|segment| segment.kind == 2)?;
        let entries = read(&file, dynamic.offset, dynamic.len)?;
        let entries: Vec<(u64, u64)> =
            entries.chunks_exact(16).filter_map(|entry| Some((long(entry, 0)?, long(entry, 8)?))).collect();
        let value = |tag: u64| entries.iter().find(|(known, _)| *known == tag).map(|&(_, value)| value);
        let (at, len) = (value(5)?, value(10)?);
        let holder = segments.iter().find(|segment| segment.kind == 1 && segment.holds(at))?;
        let strings = read(&file, at - holder.address + holder.offset, len)?;
        let text = |offset: u64| strings.get(offset as usize..)?.split(|&byte| byte == 0).next();
        let origin = path.parent()?;
        let folders = |tag: u64| value(tag).and_then(text).map_or(Vec::new(), |list| folders(list, origin));
        let needed = entries.iter().filter(|(tag, _)| *tag == 1).filter_map(|&(_, offset)| text(offset));
        let needed = needed.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        Some(Dynamic { needed, rpath: folders(15), runpath: folders(29) })
    }
}

/// A part of the file, and where it is mapped.
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    len: u64,
}

impl Segment {
    fn of(entry: &[u8]) -> Option<Segment> {
        let kind = u32::from_le_bytes(entry.get(..4)?.try_into().ok()?);
        Some(Segment { kind, offset: long(entry, 8)?, address: long(entry, 16)?, len: long(entry, 32)? })
    }

    fn holds(&self, address: u64) -> bool {
        address >= self.address && address - self.address < self.len
    }
}

fn read(file: &File, offset: u64, len: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).ok().filter(|_| len <= MOST_BYTES)?];
    file.read_exact_at(&mut bytes, offset).ok().map(|()| bytes)
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// The folders of a list with colons; `$ORIGIN` is the object's. What is not absolute then depends on where the program
/// was started, and is left out.
fn folders(list: &[u8], origin: &Path) -> Vec<PathBuf> {
    let expanded = |entry: &[u8]| {
        let rest = [&b"$ORIGIN"[..], b"${ORIGIN}"].into_iter().find_map(|start| entry.strip_prefix(start));
        match rest {
            Some(rest) => origin.join(OsStr::from_bytes(rest.strip_prefix(b"/").unwrap_or(rest))),
            None => PathBuf::from(OsStr::from_bytes(entry)),
        }
    };
    list.split(|&byte| byte == b':').map(expanded).filter(|path| path.is_absolute()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_is_the_folder_of_the_object_and_relative_folders_do_not_count() {
        let list = b"$ORIGIN/../nccl:${ORIGIN}:/opt/nccl::lib:$ORIGIN";
        let expected = ["/a/b/../nccl", "/a/b", "/opt/nccl", "/a/b"].map(PathBuf::from);
        assert_eq!(folders(list, Path::new("/a/b")), expected);
    }

    #[test]
    fn an_object_tells_what_it_needs_and_other_files_tell_nothing() {
        let own = Dynamic::of(&std::env::current_exe().unwrap()).unwrap();
        assert!(own.needed.iter().any(|name| name.starts_with("libc.so")), "{own:?}");
        assert!(Dynamic::of(Path::new("/proc/self/environ")).is_none());
        assert_eq!(RunPaths::of(&[PathBuf::from("linux-vdso.so.1")], &["libnccl.so"]), RunPaths::default());
    }
}
