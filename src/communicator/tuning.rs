//! The tuning table of a communicator: rank 0's, with what is said about it.
#![forbid(unsafe_code)]

use super::{Comm, Companion};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::device::gpu::driver::Driver;
use crate::device::gpu::GpuDevice;
use crate::error::{counted, Error, Result};
use crate::fork::PerProcess;
use crate::selection::strategy::{self, Strategies};
use crate::selection::table::agree::{Followers, OwnTable};
use crate::selection::table::{MeasuredOn, Tuned};
use crate::topo::{host, Grid};
use std::sync::{Arc, Once};

/// What has been told in this process: the same communicator settings make many communicators.
static COMPLAINED: PerProcess<Once> = PerProcess::new(Once::new);
static DIFFERED: PerProcess<Once> = PerProcess::new(Once::new);
static COMPLAINED_OF_STRATEGIES: PerProcess<Once> = PerProcess::new(Once::new);
static DIFFERED_IN_STRATEGIES: PerProcess<Once> = PerProcess::new(Once::new);

/// This process's machine as a tuning table has it, but for what carries messages between nodes.
fn machine(gpu: Option<&Arc<GpuDevice>>, companion: Option<Companion>) -> MeasuredOn {
    let of_companion = || match companion?.device {
        Some(number) => GpuDevice::of_thread(Some(number)).ok().flatten(),
        None => None,
    };
    let device = match gpu.cloned().or_else(of_companion) {
        Some(gpu) => gpu.name().unwrap_or_else(|_| "gpu".to_string()),
        None if companion.is_some() && Driver::get().is_some() => "gpu".to_string(),
        None => "host".to_string(),
    };
    let vendor = companion.and_then(|_| crate::vendor::library());
    let vendor = vendor.map_or("none".to_string(), |library| {
        format!("{} {}", if library.is_rccl() { "RCCL" } else { "NCCL" }, library.release())
    });
    MeasuredOn { cpu: host::processor_model(), device, inter: String::new(), vendor }
}

/// What rank 0 sends of its table.
pub fn offer(table: &OwnTable, gpu: Option<&Arc<GpuDevice>>, companion: Option<Companion>, nranks: usize) -> String {
    // Without a table nobody asks where it would be used.
    let here = match table.is_named() {
        true => machine(gpu, companion),
        false => MeasuredOn::default(),
    };
    table.offer(here, nranks)
}

/// What all ranks follow; tells rank 0's user why a table is not used, and other ranks' that theirs is another one.
pub fn agree(rank: usize, table: &OwnTable, offer: Option<&String>, world: &Followers<'_>) -> Result<Tuned> {
    let missing = || Error::Remote("rank 0 sent no tuning table".to_string());
    let agreed = table.agree(offer.ok_or_else(missing)?, world)?;
    if rank == 0 {
        table.notes().iter().for_each(|note| crate::info!("tuning table: {note}"));
        if let Some(complaint) = &agreed.complaint {
            COMPLAINED.get().call_once(|| crate::log::notice(complaint));
        }
        if table.is_named() {
            crate::info!("tuning table: {} for {}", counted(agreed.tuned.len(), "row"), world.grid);
        }
    }
    if let Some(difference) = &agreed.difference {
        DIFFERED.get().call_once(|| crate::log::warn(difference));
    }
    Ok(agreed.tuned)
}

/// The strategies that all ranks follow: rank 0's, where they are for this grid and proved; tells rank 0's user why they are not
/// followed, and other ranks' that theirs are others.
pub fn follow_strategies(
    rank: usize,
    config: &Config,
    offer: Option<&String>,
    grid: &Arc<Grid>,
) -> Result<Arc<Strategies>> {
    let agreed = strategy::agree(offer.map_or("", String::as_str), config, grid)?;
    if let Some(complaint) = agreed.complaint.iter().find(|_| rank == 0) {
        COMPLAINED_OF_STRATEGIES.get().call_once(|| crate::log::notice(complaint));
    }
    if let Some(difference) = &agreed.difference {
        DIFFERED_IN_STRATEGIES.get().call_once(|| crate::log::warn(difference));
    }
    Ok(Arc::new(agreed.strategies))
}

impl Comm {
    /// What a tuning table says of the machine that this communicator is on.
    pub fn machine(&self) -> MeasuredOn {
        let gpu = self.gpu().map(|device| device.gpu());
        MeasuredOn { inter: Carrier::name_of(self.carrier).to_string(), ..machine(gpu, self.options().companion) }
    }
}
