//! PCIe switches: the copies to the host of all devices behind one switch share its rate, in turns.
#![forbid(unsafe_code)]

use crate::settings::settings;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

/// When each switch has carried all that it was given.
static FREE: LazyLock<Mutex<HashMap<usize, Instant>>> = LazyLock::new(Mutex::default);

/// Gives a device's switch bytes to carry from a moment on; the result is when it will have done so.
pub fn carried(device: i32, bytes: usize, from: Instant) -> Instant {
    let switch = usize::try_from(device).ok().and_then(|device| settings().switches.get(device).copied());
    let Some(switch) = switch else { return from };
    let time = Duration::from_secs_f64(bytes as f64 / (settings().switch_mbs * 1e6));
    let mut free = FREE.lock().unwrap();
    let until = free.get(&switch).copied().unwrap_or(from).max(from) + time;
    free.insert(switch, until);
    until
}
