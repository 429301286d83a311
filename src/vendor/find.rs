//! Where the vendor's library is.
//!
//! In this order: the file that `STRATA_NCCL_LIB` names; one that the program has mapped already; one in the `DT_RPATH` of
//! what the program has mapped; the one of the Python packages (`nvidia/nccl/lib`) that this process or its environment
//! uses; one in `LD_LIBRARY_PATH`; one in the `DT_RUNPATH` of what is mapped; one that the system's linker knows; one in the
//! folders where vendors install. Always by absolute path: by its bare name the linker would give back Strata, which bears
//! the same.
#![forbid(unsafe_code)]

use super::library::Library;
use super::runpath::RunPaths;
use crate::memory::objects::mapped;
use crate::process::is_elevated;
use crate::transport::mpi::own_file;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The names of the vendors' libraries, that of the flavour built first.
const NAMES: [&str; 2] =
    if cfg!(feature = "rccl") { ["librccl.so.1", "libnccl.so.2"] } else { ["libnccl.so.2", "librccl.so.1"] };

/// How these begin, whatever the release.
const STEMS: [&str; 2] = ["libnccl.so", "librccl.so"];

/// Where vendors install, and the folders every linker knows.
const FOLDERS: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/lib",
    "/opt/rocm/lib",
    "/opt/rocm/rccl/lib",
];

/// What a process can be told by: enough to test the order without being it.
struct Surroundings {
    mapped: Vec<PathBuf>,
    /// What the mapped objects name.
    run_paths: RunPaths,
    /// Prefixes of Python installations, the process's own first.
    prefixes: Vec<PathBuf>,
    library_path: Vec<PathBuf>,
    linker_cache: Vec<PathBuf>,
    own: Option<PathBuf>,
}

/// Finds and opens the library that is wanted: a path, or `auto`. The reason, if there is none.
pub fn find(wanted: &str) -> Result<Library, String> {
    if wanted != "auto" {
        let path = fs::canonicalize(wanted).map_err(|error| error.to_string())?;
        return match own_file().is_some_and(|own| same_file(&own, &path)) {
            true => Err("that is this library itself".to_string()),
            false => Library::open(&path),
        };
    }
    let mut reasons = Vec::new();
    for path in candidates(&Surroundings::here()) {
        match Library::open(&path) {
            Ok(library) => return Ok(library),
            Err(why) => reasons.push(why),
        }
    }
    match reasons.is_empty() {
        true => Err(format!("there is no {} here; STRATA_NCCL_LIB can name one", NAMES.join(" and no "))),
        false => Err(reasons.join("; ")),
    }
}

fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

/// The files to try, best first, each once and by its real path; not Strata itself.
fn candidates(here: &Surroundings) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = here.mapped.iter().filter(|path| is_vendor_s(path)).cloned().collect();
    let in_folders = |folders: &[PathBuf]| -> Vec<PathBuf> {
        NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).collect()
    };
    found.extend(in_folders(&here.run_paths.before_environment));
    found.extend(here.prefixes.iter().flat_map(|prefix| in_packages_of(prefix)));
    found.extend(in_folders(&here.library_path));
    found.extend(in_folders(&here.run_paths.after_environment));
    found.extend(NAMES.iter().flat_map(|name| {
        here.linker_cache.iter().filter(move |path| path.file_name() == Some(OsStr::new(name))).cloned()
    }));
    found.extend(in_folders(&FOLDERS.map(PathBuf::from)));
    let mut seen = HashSet::new();
    found
        .into_iter()
        .filter_map(|path| fs::canonicalize(path).ok())
        .filter(|path| !here.own.as_ref().is_some_and(|own| same_file(own, path)) && seen.insert(path.clone()))
        .collect()
}

/// Whether a mapped object has the vendor's name, whatever its release.
fn is_vendor_s(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    path.is_absolute() && STEMS.iter().any(|start| name.starts_with(start))
}

/// The libraries among the Python packages below a prefix, of the newest Python first.
fn in_packages_of(prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let mut versions: Vec<PathBuf> = fs::read_dir(&lib)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3")))
        .collect();
    versions.sort_by_key(|path| {
        let digits: String = path.to_string_lossy().rsplit('.').next().unwrap_or_default().to_string();
        std::cmp::Reverse(digits.parse::<u32>().unwrap_or(0))
    });
    let packages =
        versions.iter().flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)));
    packages
        .flat_map(|packages| {
            [
                packages.join("nvidia/nccl/lib/libnccl.so.2"),
                packages.join("torch/lib/librccl.so.1"),
                packages.join("torch/lib/librccl.so"),
            ]
        })
        .filter(|path| path.exists())
        .collect()
}

impl Surroundings {
    fn here() -> Surroundings {
        // With more rights than its starter the program looks where the linker does, not where it is told to.
        let elevated = is_elevated();
        let folders = |name: &str| -> Vec<PathBuf> {
            if elevated {
                return Vec::new();
            }
            std::env::var_os(name).map_or(Vec::new(), |value| std::env::split_paths(&value).collect())
        };
        let mapped = mapped();
        Surroundings {
            run_paths: RunPaths::of(&mapped, &STEMS),
            mapped,
            prefixes: if elevated { Vec::new() } else { python_prefixes() },
            library_path: folders("LD_LIBRARY_PATH").into_iter().filter(|path| path.is_absolute()).collect(),
            linker_cache: fs::read("/etc/ld.so.cache").map_or(Vec::new(), |cache| in_linker_cache(&cache)),
            own: own_file(),
        }
    }
}

/// Where the Python of this process, or that of its environment, has its packages; none in a process that has to do with
/// no Python.
fn python_prefixes() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(|name| std::env::var_os(name).map(PathBuf::from));
    let mut prefixes: Vec<PathBuf> = named.into_iter().flatten().collect();
    let is_python =
        |path: &Path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python"));
    let exe = fs::read_link("/proc/self/exe").ok().filter(|exe| is_python(exe));
    if let Some(exe) = exe {
        // A virtual environment's python is a link, known by the name it was started by.
        let started = fs::read("/proc/self/cmdline").ok().and_then(|line| {
            let name = line.split(|&byte| byte == 0).next()?.to_vec();
            Some(PathBuf::from(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&name)))
        });
        let prefix = |path: PathBuf| Some(path.parent()?.parent()?.to_path_buf());
        prefixes.extend(started.filter(|path| path.is_absolute()).and_then(prefix));
        prefixes.extend(prefix(exe));
        prefixes.extend(std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
        prefixes.push(PathBuf::from("/usr/local"));
        prefixes.push(PathBuf::from("/usr"));
    }
    prefixes
}

/// The absolute paths in the linker's cache: strings that end with a zero byte. The entries that point at them are not
/// needed.
fn in_linker_cache(cache: &[u8]) -> Vec<PathBuf> {
    cache
        .split(|&byte| byte == 0)
        .filter(|text| text.first() == Some(&b'/'))
        .map(|text| PathBuf::from(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(text)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with empty files, gone with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, files: &[&str]) -> Folder {
            let root = std::env::temp_dir().join(format!("strata-find-{}-{name}", std::process::id()));
            for file in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            Folder(fs::canonicalize(root).unwrap())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn what_is_mapped_comes_first_then_packages_then_folders_and_never_strata_itself() {
        let files = [
            "mapped/libnccl.so.2.32.3",
            "venv/lib/python3.9/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
            "ld/libnccl.so.2",
            "rpath/libnccl.so.2",
            "runpath/libnccl.so.2",
            "cache/libnccl.so.2",
            "own/libnccl.so.2",
        ];
        let folder = Folder::new("order", &files);
        let at = |name: &str| folder.0.join(name);
        let here = Surroundings {
            mapped: vec![at("mapped/libc.so.6"), at("mapped/libnccl.so.2.32.3"), at("own/libnccl.so.2")],
            run_paths: RunPaths { before_environment: vec![at("rpath")], after_environment: vec![at("runpath")] },
            prefixes: vec![at("venv"), at("none")],
            library_path: vec![at("ld"), at("own"), at("mapped")],
            linker_cache: vec![at("cache/libnccl.so.2"), at("cache/libz.so")],
            own: Some(at("own/libnccl.so.2")),
        };
        let found: Vec<PathBuf> = candidates(&here).into_iter().filter(|path| path.starts_with(&folder.0)).collect();
        assert_eq!(found, [0, 4, 2, 1, 3, 5, 6].map(|file| at(files[file])));
    }

    #[test]
    fn the_linker_s_cache_gives_its_paths() {
        let cache = b"glibc-ld.so.cache1.1\0\0libnccl.so.2\0/usr/lib/libnccl.so.2\0libz.so\0/lib/libz.so\0";
        assert_eq!(in_linker_cache(cache), ["/usr/lib/libnccl.so.2", "/lib/libz.so"].map(PathBuf::from));
        assert_eq!(in_linker_cache(b"\0\xff"), [""; 0].map(PathBuf::from));
    }

    #[test]
    fn a_wanted_file_that_is_not_there_is_an_error() {
        assert!(find("/nowhere/libnccl.so.2").is_err());
    }
}
