//! Finding and opening an MPI plugin.
//!
//! A plugin is never closed: MPI cannot be taken out of a process again. It is opened for itself alone
//! (`RTLD_LOCAL`), which Open MPI has allowed since version 3, MPICH always.

use super::calls::MpiCalls;
use super::vtable::{description, Entry, Vtable, SUCCESS, SYMBOL};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_void, CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// An opened plugin.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// Its functions.
    pub calls: MpiCalls,
    /// MPI's description of itself.
    pub description: String,
}

/// The MPI's name and version in its description; what follows, such as how it was built, fills pages.
pub fn name_in(description: &str) -> String {
    let text = description.split(',').next().unwrap_or_default();
    let text = text.split(" MPICH ").next().unwrap_or_default();
    text.split_whitespace().filter(|word| *word != "Version:").collect::<Vec<&str>>().join(" ")
}

/// The file that this code is in.
pub fn own_file() -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the place must be writable; because it is a local. Any address may be asked about.
    if unsafe { libc::dladdr(own_file as *const c_void, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: all fields must be initialised; because they were zeroed, and `dladdr` has filled them in.
    let found = unsafe { found.assume_init() };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name must be a C string that stays; because the linker keeps it with the object, which is never
    // unloaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    std::fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
}

/// The plugins in a directory, by name.
fn plugins_in(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let is_plugin = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        // The library for JAX is none.
        name.starts_with("libstrata_mpi") && !name.starts_with("libstrata_mpitrampoline") && name.ends_with(".so")
    };
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_plugin).collect();
    found.sort();
    found
}

/// The libraries of this process whose files' names begin like this.
fn loaded(start: &str) -> Vec<Library> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files: Vec<&str> = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).collect();
    files.dedup();
    let is_named = |file: &&str| file.rsplit('/').next().is_some_and(|name| name.starts_with(start));
    let open = |file: &str| {
        // SAFETY: nothing is initialised by this; because with RTLD_NOLOAD only what is loaded already is found.
        unsafe { Library::open(Some(file), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
    };
    files.into_iter().filter(is_named).filter_map(open).collect()
}

/// Whether the program has an MPI of its own loaded. To be asked before a plugin brings one in.
pub fn program_has_mpi() -> bool {
    // SAFETY: the symbol must not be used as another type than it has; because it is only looked for and never read.
    loaded("libmpi").iter().any(|library| unsafe { library.get::<*const c_void>(b"MPI_Init") }.is_ok())
}

/// Major and minor version of UCX, if it is loaded: MPICH is linked with it, Open MPI opens it in `MPI_Init`.
pub fn ucx_version() -> Option<(u32, u32)> {
    type GetVersion = unsafe extern "C" fn(*mut u32, *mut u32, *mut u32);
    let libraries = loaded("libucp.so");
    // SAFETY: the symbol must be a function of this type; because UCX has declared it so since its first release.
    let get_version =
        *libraries.iter().find_map(|library| unsafe { library.get::<GetVersion>(b"ucp_get_version") }.ok())?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: the places must be writable; because they are locals. UCX allows the call at any time.
    unsafe { get_version(&mut major, &mut minor, &mut release) };
    Some((major, minor))
}

/// Opens one plugin, or says why it cannot be used.
fn open(path: &Path) -> Result<Plugin, String> {
    let why = |error: libloading::Error| {
        let text = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        format!("{} cannot be opened: {text}", path.display())
    };
    // SAFETY: the initialisers must be fit to run now; because a plugin has none but those of MPI's library, which are
    // made to run at any time. That the file is a plugin is the user's word, or the installation's.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(why)?;
    // SAFETY: the symbol must be a function of this type; because every version of the contract says so of its name.
    let entry = *unsafe { library.get::<Entry>(SYMBOL) }.map_err(why)?;
    std::mem::forget(library);
    // SAFETY: no requirement.
    let table: *const Vtable = unsafe { entry() };
    if table.is_null() {
        return Err(format!("{} is refused: it has no table of functions", path.display()));
    }
    // SAFETY: two words must be readable; because a plugin of any version returns a table that begins with them and is
    // never freed.
    let words = unsafe { table.cast::<[u32; 2]>().read() };
    // Only words of a table of our own version mean what we think.
    let refuse = |text: String| format!("{} is refused: {text}", path.display());
    MpiCalls::version(words[0], words[1]).map_err(refuse)?;
    // SAFETY: the table must be a whole one that lives for ever; because version and size are ours, and the plugin is
    // never closed.
    let calls = MpiCalls::new(unsafe { &*table });
    match calls.describe() {
        (description, SUCCESS) => Ok(Plugin { calls, description }),
        (why, description::MISSING) => Err(refuse(why)),
        (description, _) => {
            Err(refuse(format!("it was built for another MPI than the one in this process, {description}")))
        }
    }
}

/// For people: each plugin that the library in this file would open, with its MPI, or why there is none.
pub fn survey(given: &str, library: &Path) -> Vec<String> {
    let paths = match (given, std::fs::canonicalize(library).ok().as_deref().and_then(Path::parent)) {
        ("auto", Some(dir)) => beside(dir),
        ("auto", None) => Vec::new(),
        (path, _) => vec![PathBuf::from(path)],
    };
    let tell = |path: &PathBuf| match open(path) {
        Ok(plugin) => format!("{}, by {}", name_in(&plugin.description), path.display()),
        Err(why) => why,
    };
    match paths.is_empty() {
        true => vec!["none: there is no plugin beside the library, which scripts/build-mpi makes".to_string()],
        false => paths.iter().map(tell).collect(),
    }
}

/// The plugins beside a library in `dir`, the likeliest place first.
fn beside(dir: &Path) -> Vec<PathBuf> {
    [plugins_in(&dir.join("strata")), plugins_in(dir)].concat()
}

/// Opens the plugin at `given`, or for `auto` the one beside the library that fits best: whose MPI calls itself as `prefer` says,
/// else the first that can be opened. The reason, if there is none.
pub fn find(given: &str, prefer: Option<&str>) -> Result<Plugin, String> {
    match given {
        "auto" => {}
        path => return open(Path::new(path)),
    }
    let Some(dir) = own_file().and_then(|file| file.parent().map(Path::to_path_buf)) else {
        return Err("the place of this library is not known".to_string());
    };
    find_in(&dir, prefer)
}

/// The plugin that fits best of those beside a library in `dir`.
fn find_in(dir: &Path, prefer: Option<&str>) -> Result<Plugin, String> {
    let paths = beside(dir);
    if paths.is_empty() {
        return Err(format!(
            "there is no MPI plugin in {}/strata; scripts/install or scripts/build-mpi makes one where there is an MPI",
            dir.display()
        ));
    }
    let (mut fallback, mut reasons) = (None, Vec::new());
    for path in paths {
        match open(&path) {
            Ok(plugin) if prefer.is_none_or(|name| plugin.description.contains(name)) => return Ok(plugin),
            Ok(plugin) => fallback = fallback.or(Some(plugin)),
            Err(why) => reasons.push(why),
        }
    }
    fallback.ok_or_else(|| reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_for_jax_beside_a_plugin_is_no_plugin() {
        let folder = std::env::temp_dir().join(format!("strata-plugins-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        for name in ["libstrata_mpi.so", "libstrata_mpitrampoline.so", "libstrata.so", "libstrata_mpi.txt"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let found = plugins_in(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [folder.join("libstrata_mpi.so")]);
    }
}
