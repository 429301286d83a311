//! The vendor's library: NVIDIA's NCCL or AMD's RCCL, in whose place Strata stands.
//!
//! Where one is found ([`find`]), every function of the interface is the vendor's: Strata hands calls on as they are
//! ([`entry`]), looks at the few that it must know of, and runs some collectives in two levels over communicators of the
//! vendor's. Where none is found, or `STRATA_NCCL_LIB=none` says so, Strata itself is the library, on the host device.
//!
//! The library is found and opened at the first call of any function: a program that never uses NCCL pays nothing.

pub mod calls;
pub mod driver;
pub mod entry;
pub mod find;
pub mod guard;
pub mod library;
pub mod plan;
pub mod profiled;
pub(crate) mod runpath;

pub use library::Library;

use crate::config::Config;
use std::sync::OnceLock;

/// Who answers the calls of this process.
#[derive(Debug)]
pub enum Mode {
    /// Strata itself, on the host device.
    Host,
    /// The vendor's library, with Strata looking on.
    Over(Library),
    /// The vendor's library alone.
    PassThrough(Library),
    /// Nobody: the vendor's library was asked for and could not be opened, for this reason.
    Nobody(String),
}

static MODE: OnceLock<Mode> = OnceLock::new();

/// Who answers. Decided once, at the first call.
pub fn mode() -> &'static Mode {
    MODE.get_or_init(|| {
        let (config, _) = Config::from_env();
        let mode = decide(&config);
        if matches!(mode, Mode::Over(_) | Mode::PassThrough(_)) {
            crate::log::leave_file_to_vendor();
        }
        match &mode {
            Mode::Over(library) => {
                crate::info!("Strata {} over {library}", env!("CARGO_PKG_VERSION"));
                profiled::prepare(library, &config);
            }
            Mode::PassThrough(library) => crate::info!("STRATA_DISABLE: all calls go to {library}"),
            Mode::Nobody(why) => crate::log::notice(why),
            Mode::Host => {}
        }
        mode
    })
}

/// The vendor's library, if Strata runs over one.
pub fn library() -> Option<&'static Library> {
    match mode() {
        Mode::Over(library) | Mode::PassThrough(library) => Some(library),
        Mode::Host | Mode::Nobody(_) => None,
    }
}

fn decide(config: &Config) -> Mode {
    let wanted = config.nccl_lib.as_str();
    if wanted == "none" {
        return match config.disable {
            true => Mode::Nobody("STRATA_DISABLE=1 and STRATA_NCCL_LIB=none leave nobody to answer".to_string()),
            false => Mode::Host,
        };
    }
    match (find::find(wanted), config.disable) {
        (Ok(library), false) => Mode::Over(library),
        (Ok(library), true) => Mode::PassThrough(library),
        (Err(why), _) if wanted != "auto" => Mode::Nobody(format!("STRATA_NCCL_LIB={wanted}: {why}")),
        (Err(why), true) => Mode::Nobody(format!("STRATA_DISABLE=1, but {why}")),
        (Err(why), false) => {
            crate::info!("the host device is used: {why}");
            Mode::Host
        }
    }
}
