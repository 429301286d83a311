//! Has the vendor's library tell of its calls: it loads this library as its profiler.
//!
//! Only where records are kept and the program has chosen no profiler: what it has chosen stays as it is. The library reads the variable with its first
//! communicator, so it is set before any call of the program reaches it. Children of the process inherit it, and need it for
//! traces of their own; without `STRATA_TRACE` the profiler wants no events.
#![forbid(unsafe_code)]

use super::Library;
use crate::config::Config;
use crate::process::is_elevated;
use crate::profiler::plugin::{is_chosen, VARIABLE};
use crate::transport::mpi::own_file;

/// The first release whose profiler interface tells a communicator's ranks.
const FIRST: i32 = 22703;

/// Names this library as the vendor library's profiler, if its calls are to be recorded.
pub fn prepare(library: &Library, config: &Config) {
    if config.trace == "none" || is_elevated() {
        return;
    }
    if let Err(why) = name_own(library) {
        crate::log::warn(&format!("calls of {library} are not in the trace: {why}"));
    }
}

fn name_own(library: &Library) -> Result<(), String> {
    if library.version < FIRST {
        return Err("only releases from 2.27.3 on tell a profiler what records need".to_string());
    }
    let own = own_file().ok_or("the file of this library is not known")?;
    // A parent with records may have set it.
    if std::env::var_os(VARIABLE).is_some_and(|named| own.as_os_str() == named) {
        return Ok(());
    }
    if is_chosen() {
        return Err(format!("the program has a profiler of its own ({VARIABLE}), which hears Strata's calls as well"));
    }
    std::env::set_var(VARIABLE, own);
    Ok(())
}
