//! Where the program's own files would have the linker look for the vendor's library: their `DT_RPATH` and `DT_RUNPATH`.
//!
//! A preloaded Strata answers to the vendor's name, so the linker never goes there: `mapped` has nothing then, and these
//! entries are all that tells which of the machine's libraries the program was built for.
#![forbid(unsafe_code)]

use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};
use object::Endianness;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::os::unix::ffi::OsStrExt;
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

/// Objects of this machine's kind.
type Header = elf::FileHeader64<Endianness>;

impl Dynamic {
    /// Of a file of this machine's kind; `None` if it is no such file.
    fn of(path: &Path) -> Option<Dynamic> {
        // Of a file that may have hundreds of megabytes only what is asked for is read.
        Dynamic::within(File::open(path).ok()?, path)
    }

    /// Of what stands in a file at this path.
    fn within(file: impl Read + Seek, path: &Path) -> Option<Dynamic> {
        let data = ReadCache::new(file);
        let header = Header::parse(&data).ok()?;
        let endian = header.endian().ok()?;
        let segments = header.program_headers(endian, &data).ok()?;
        let entries = segments.iter().find_map(|segment| segment.dynamic(endian, &data).ok().flatten())?;
        let value = |tag: u32| {
            let entry = entries.iter().find(|entry| entry.tag32(endian) == Some(tag))?;
            Some(entry.d_val(endian))
        };
        let (at, len) = (value(elf::DT_STRTAB)?, value(elf::DT_STRSZ)?);
        // Not `data_range`, which reads all of the segment: in PyTorch's libraries 390 MB.
        let place = segments.iter().find_map(|segment| {
            let within = at.checked_sub(segment.p_vaddr(endian))?;
            let is_here = segment.p_type(endian) == elf::PT_LOAD && within < segment.p_filesz(endian);
            is_here.then(|| segment.p_offset(endian).checked_add(within)).flatten()
        })?;
        let strings = (&data).read_bytes_at(place, len).ok()?;
        let text = |offset: u64| strings.get(usize::try_from(offset).ok()?..)?.split(|&byte| byte == 0).next();
        let origin = path.parent()?;
        let folders = |tag: u32| value(tag).and_then(text).map_or(Vec::new(), |list| folders(list, origin));
        let needed = entries.iter().filter(|entry| entry.tag32(endian) == Some(elf::DT_NEEDED));
        let needed = needed.filter_map(|entry| text(entry.d_val(endian)));
        let needed = needed.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        Some(Dynamic { needed, rpath: folders(elf::DT_RPATH), runpath: folders(elf::DT_RUNPATH) })
    }
}

/// The folders that a file of these bytes would name, for [`crate::fuzz`].
pub(crate) fn folders_in(bytes: &[u8]) -> Option<Vec<PathBuf>> {
    let Dynamic { rpath, runpath, .. } = Dynamic::within(Cursor::new(bytes), Path::new("/o/file"))?;
    Some([rpath, runpath].concat())
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

    /// A file whose reader counts.
    struct Counted(File, std::rc::Rc<std::cell::Cell<u64>>);

    impl Read for Counted {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let bytes = self.0.read(into)?;
            self.1.set(self.1.get() + bytes as u64);
            Ok(bytes)
        }
    }

    impl Seek for Counted {
        fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
            self.0.seek(to)
        }
    }

    #[test]
    fn of_a_large_file_little_is_read() {
        let path = std::env::current_exe().unwrap();
        let (file, read) = (File::open(&path).unwrap(), std::rc::Rc::default());
        let size = file.metadata().unwrap().len();
        Dynamic::within(Counted(file, std::rc::Rc::clone(&read)), &path).unwrap();
        assert!(read.get() < size / 4, "{} of {size} bytes were read", read.get());
    }
}
