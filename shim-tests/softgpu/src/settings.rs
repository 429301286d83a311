//! What the environment asks of the double, read once.
#![forbid(unsafe_code)]

use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// The variables `SOFTGPU_*`.
pub struct Settings {
    /// `SOFTGPU_DEVICES`: how many devices there are.
    pub devices: i32,
    /// `SOFTGPU_MEMORY_BYTES`: the memory of each device.
    pub memory_bytes: u64,
    /// `SOFTGPU_PINNED_BYTES`: how much host memory may be pinned.
    pub pinned_bytes: u64,
    /// `SOFTGPU_EAGER`: streams do not dally.
    pub eager: bool,
    /// `SOFTGPU_CONNECTIONS`: all streams of a priority share one queue.
    pub one_queue: bool,
    /// `SOFTGPU_PTX`: the PTX that a program loads is run, not its twin.
    pub ptx: bool,
    /// `SOFTGPU_SWITCHES`: the PCIe switch of each device.
    pub switches: Vec<usize>,
    /// `SOFTGPU_SWITCH_MBS`: what copies to the host behind one switch share.
    pub switch_mbs: f64,
    /// `SOFTGPU_STILL`: threads whose names begin so take and give no memory.
    still: Option<String>,
    /// `SOFTGPU_ABSENT`: functions that are not supported.
    absent: Vec<String>,
    /// `SOFTGPU_BREAK`: synchronisations and kernels that do nothing.
    broken: Vec<String>,
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

fn list(name: &str) -> Vec<String> {
    let text = std::env::var(name).unwrap_or_default();
    text.split(',').map(|item| item.trim().to_string()).filter(|item| !item.is_empty()).collect()
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        devices: number("SOFTGPU_DEVICES", 8),
        memory_bytes: number("SOFTGPU_MEMORY_BYTES", 16 << 30),
        pinned_bytes: number("SOFTGPU_PINNED_BYTES", 16 << 30),
        eager: number("SOFTGPU_EAGER", 0) != 0,
        ptx: number("SOFTGPU_PTX", 0) != 0,
        one_queue: number("SOFTGPU_CONNECTIONS", 8) == 1,
        switches: list("SOFTGPU_SWITCHES").iter().filter_map(|switch| switch.parse().ok()).collect(),
        switch_mbs: number("SOFTGPU_SWITCH_MBS", 1000.0),
        still: std::env::var("SOFTGPU_STILL").ok(),
        absent: list("SOFTGPU_ABSENT"),
        broken: list("SOFTGPU_BREAK"),
    })
}

/// Ends the process where this thread does what a driver may do only when all streams have come to rest, and streams may wait for it.
pub fn check_still(what: &str) {
    let Some(still) = &settings().still else { return };
    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
    if name.starts_with(still.as_str()) {
        eprintln!("soft GPU: thread {} does what may wait for all streams: {what}", name.trim());
        std::process::abort();
    }
}

/// Whether a function is to answer that it is not supported.
pub fn is_absent(function: &str) -> bool {
    settings().absent.iter().any(|name| name == function)
}

/// Whether a synchronisation or kernel is to do nothing and claim success. It may be named by CUDA's name or by HIP's.
pub fn is_broken(what: &str) -> bool {
    let in_hip = what.trim_end_matches("_v2").replacen("cu", "hip", 1);
    settings().broken.iter().any(|name| name == what || *name == in_hip)
}

/// The seed with, in its upper half, how often it was set; 0 until it was read from the environment.
static SEED: AtomicU64 = AtomicU64::new(0);

/// The seed that holds now. It differs after every [`set_seed`], also to the same number.
pub fn seed() -> u64 {
    match SEED.load(Ordering::Relaxed) {
        0 => {
            let first = (1 << 32) | u64::from(number("SOFTGPU_SEED", 1u32));
            SEED.compare_exchange(0, first, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|now| now, |_| first)
        }
        seed => seed,
    }
}

/// Every stream starts over with this seed.
pub fn set_seed(seed: u32) {
    let times = (self::seed() >> 32) + 1;
    SEED.store((times << 32) | u64::from(seed), Ordering::Relaxed);
}
