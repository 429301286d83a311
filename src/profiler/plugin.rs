//! The plugin of the program: where it is looked for, and its functions whatever their version.
//!
//! NCCL's rules: `NCCL_PROFILER_PLUGIN` is a path, a file's name, the NAME in `libnccl-profiler-NAME.so`, `STATIC_PLUGIN` for the
//! program itself, or `none`; without it there may be a `libnccl-profiler.so`. Of the tables that a library has the newest counts.
//! It is loaded with the first communicator and stays.

use super::layouts::{
    CAddress, Event, InitV3, InitV4, InitV7, ProfilerTable, RecordState, StartEvent, StateDetails, StopEvent,
};
use super::{layouts, logger};
use crate::fork::PerProcess;
use crate::process::is_elevated;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, CStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::OnceLock;

/// The variable of NCCL's that names the plugin.
pub const VARIABLE: &str = "NCCL_PROFILER_PLUGIN";
/// What Strata's own tables are called.
pub const OWN_NAME: &CStr = c"Strata";
/// What is looked for where nothing is named.
const DEFAULT: &str = "libnccl-profiler.so";

/// How a plugin is told of a communicator.
#[derive(Debug, Clone, Copy)]
enum Init {
    Old(InitV3),
    V4(InitV4),
    New(InitV7),
}

/// What a communicator tells of itself.
#[derive(Debug)]
pub struct Introduction<'a> {
    /// Its number, the same on all ranks.
    pub id: u64,
    /// Its name.
    pub name: &'a CStr,
    /// Nodes.
    pub nodes: u32,
    /// Ranks.
    pub nranks: u32,
    /// This rank.
    pub rank: u32,
}

/// A plugin that has been opened.
#[derive(Debug)]
pub struct ProfilerPlugin {
    /// The version of its table.
    pub version: u32,
    what: String,
    init: Init,
    start_event: StartEvent,
    stop_event: StopEvent,
    record_state: Option<RecordState>,
    finalize: Option<layouts::Finalize>,
    /// The events that it wants. It may change them at any time, and keeps the address.
    mask: AtomicI32,
    has_failed: AtomicBool,
    _library: Library,
}

static PLUGIN: PerProcess<OnceLock<Option<ProfilerPlugin>>> = PerProcess::new(OnceLock::new);

/// The program's plugin, if it has one. Looked for once.
pub fn plugin() -> Option<&'static ProfilerPlugin> {
    PLUGIN.get().get_or_init(find).as_ref()
}

/// Whether the program has a profiler of its own, or wants none: then nobody shall be told of Strata's.
pub fn is_chosen() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|name| !name.is_empty()) || plugin().is_some()
}

/// The files that a name may mean, in order.
fn candidates(name: &str) -> Vec<String> {
    let is_file = name.contains('/') || (name.starts_with("lib") && name.ends_with(".so"));
    match is_file {
        true => vec![name.to_string()],
        false => vec![name.to_string(), format!("libnccl-profiler-{name}.so")],
    }
}

/// Opens a file; the program itself by `STATIC_PLUGIN`.
fn open(name: &str) -> Result<Library, String> {
    if name.eq_ignore_ascii_case("STATIC_PLUGIN") {
        return Ok(Library::this());
    }
    // SAFETY: the initialisers must be fit to run now; because the program names the library to be loaded by its collectives'.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
}

fn find() -> Option<ProfilerPlugin> {
    let named: Option<OsString> = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
    if is_elevated() || named.as_ref().is_some_and(|name| name.eq_ignore_ascii_case("none")) {
        return None;
    }
    let Some(name) = named else {
        return of_library(open(DEFAULT).ok()?, DEFAULT.to_string()).unwrap_or_else(|why| {
            crate::log::notice(&format!("{why}; calls of Strata's go on without it"));
            None
        });
    };
    let text = String::from_utf8_lossy(name.as_bytes()).into_owned();
    let mut reasons = Vec::new();
    for candidate in candidates(&text) {
        match open(&candidate).and_then(|library| of_library(library, candidate)) {
            Ok(found) => return found,
            Err(why) => reasons.push(why),
        }
    }
    let why = reasons.join("; ");
    crate::log::notice(&format!("{VARIABLE}={text}: {why}; calls of Strata's go on without a profiler"));
    None
}

/// A table of a library's, copied.
fn table<I: Copy>(library: &Library, name: &CStr) -> Option<ProfilerTable<I>> {
    // SAFETY: the symbol must be such a table; because the interface says so of its name.
    let symbol = unsafe { library.get::<*const ProfilerTable<I>>(name.to_bytes_with_nul()) }.ok()?;
    let place = symbol.into_raw().cast::<ProfilerTable<I>>();
    // SAFETY: the place must be a table; because it is the symbol's address, which is not null where the symbol was found.
    (!place.is_null()).then(|| unsafe { place.read() })
}

/// The plugin of a library, the newest of its tables. None of Strata's own.
fn of_library(library: Library, what: String) -> Result<Option<ProfilerPlugin>, String> {
    let new = [(7, c"ncclProfiler_v7"), (6, c"ncclProfiler_v6"), (5, c"ncclProfiler_v5")];
    for (version, name) in new {
        if let Some(found) = table::<InitV7>(&library, name) {
            let init = found.init.map(Init::New);
            return made(version, what, init, &erased(&found), library);
        }
    }
    if let Some(found) = table::<InitV4>(&library, c"ncclProfiler_v4") {
        return made(4, what, found.init.map(Init::V4), &erased(&found), library);
    }
    for (version, name) in [(3, c"ncclProfiler_v3"), (2, c"ncclProfiler_v2")] {
        if let Some(found) = table::<InitV3>(&library, name) {
            return made(version, what, found.init.map(Init::Old), &erased(&found), library);
        }
    }
    Err(format!("{what} has no table from ncclProfiler_v2 to ncclProfiler_v7"))
}

/// A table without its `init`.
fn erased<I>(found: &ProfilerTable<I>) -> ProfilerTable<()> {
    let ProfilerTable { name, start_event, stop_event, record_state, finalize, .. } = *found;
    ProfilerTable { name, init: None, start_event, stop_event, record_state, finalize }
}

fn made(
    version: u32,
    what: String,
    init: Option<Init>,
    found: &ProfilerTable<()>,
    library: Library,
) -> Result<Option<ProfilerPlugin>, String> {
    let (Some(init), Some(start_event), Some(stop_event)) = (init, found.start_event, found.stop_event) else {
        return Err(format!("ncclProfiler_v{version} of {what} lacks init, startEvent or stopEvent"));
    };
    // SAFETY: the text must end with a zero byte; because the interface says that a name is C's.
    let name = (!found.name.is_null()).then(|| unsafe { CStr::from_ptr(found.name) });
    if name == Some(OWN_NAME) {
        return Ok(None);
    }
    let told = name.unwrap_or_default().to_string_lossy();
    crate::info!("calls of Strata's are told to the profiler {told} ({what}, version {version})");
    let (record_state, finalize) = (found.record_state, found.finalize);
    let (mask, has_failed) = (AtomicI32::new(0), AtomicBool::new(false));
    let made = ProfilerPlugin {
        version,
        what,
        init,
        start_event,
        stop_event,
        record_state,
        finalize,
        mask,
        has_failed,
        _library: library,
    };
    Ok(Some(made))
}

impl ProfilerPlugin {
    /// Whether any of these events are wanted.
    pub fn wants(&self, events: u64) -> bool {
        self.mask.load(Ordering::Relaxed) as u32 as u64 & events != 0
    }

    /// A communicator begins: its context. None where the plugin fails, which is told once; it hears of nothing any more.
    pub fn begin(&self, comm: &Introduction<'_>) -> Option<CAddress> {
        if self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let mut context: CAddress = 0;
        let (place, mask, logger) = (&raw mut context, self.mask.as_ptr(), logger::address());
        let [nodes, nranks, rank] = [comm.nodes, comm.nranks, comm.rank].map(|number| number as c_int);
        let name = comm.name.as_ptr();
        let code = match self.init {
            // SAFETY: the places must be valid; because one is a local, and the other is there as long as the process.
            Init::Old(init) => unsafe { init(place, mask) },
            // SAFETY: as above, and the name must stay while the communicator is there; because its holder keeps it.
            Init::V4(init) => unsafe { init(place, mask, name, comm.id, nodes, nranks, rank, logger) },
            // SAFETY: as above; because they are the same.
            Init::New(init) => unsafe { init(place, comm.id, mask, name, nodes, nranks, rank, logger) },
        };
        if code != 0 {
            if !self.has_failed.swap(true, Ordering::Relaxed) {
                let what = &self.what;
                crate::log::notice(&format!(
                    "the profiler {what} refuses a communicator: init returns {code}; calls of Strata's go on without it"
                ));
            }
            return None;
        }
        Some(context)
    }

    /// An event begins; 0 where the plugin does not want it.
    pub fn start(&self, context: CAddress, event: &Event) -> CAddress {
        let mut handle: CAddress = 0;
        // SAFETY: the place and the event must be valid during the call; because both are the caller's own.
        match unsafe { (self.start_event)(context, &mut handle, event) } {
            0 => handle,
            _ => 0,
        }
    }

    /// An event ends.
    pub fn stop(&self, handle: CAddress) {
        if handle != 0 {
            // SAFETY: the event must have begun and not ended; because its holder ends it once.
            unsafe { (self.stop_event)(handle) };
        }
    }

    /// An event changes.
    pub fn record(&self, handle: CAddress, state: c_int, details: Option<&StateDetails>) {
        if let (Some(record), true) = (self.record_state, handle != 0) {
            let details = details.map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: the event must have begun and not ended, and the details be there; because its holder says so.
            unsafe { record(handle, state, details) };
        }
    }

    /// A communicator ends.
    pub fn end(&self, context: CAddress) {
        if let (Some(finalize), true) = (self.finalize, context != 0) {
            // SAFETY: the context must be one that has not ended; because its holder ends it once.
            unsafe { finalize(context) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_the_files_that_it_means_to_nccl() {
        assert_eq!(candidates("mine"), ["mine", "libnccl-profiler-mine.so"]);
        assert_eq!(candidates("libmine.so"), ["libmine.so"]);
        assert_eq!(candidates("./mine"), ["./mine"]);
        assert_eq!(candidates("lib"), ["lib", "libnccl-profiler-lib.so"]);
    }

    #[test]
    fn a_library_without_a_table_is_refused_by_name_and_strata_s_own_is_none() {
        let why = of_library(open("libc.so.6").unwrap(), "libc.so.6".to_string()).unwrap_err();
        assert_eq!(why, "libc.so.6 has no table from ncclProfiler_v2 to ncclProfiler_v7");
        assert!(open("/nowhere/libprofiler.so").unwrap_err().contains("/nowhere/libprofiler.so"));
    }
}
