//! `strata gpu info`: the driver, the device, and what of it Strata can use.
#![forbid(unsafe_code)]

use super::Which;
use serde_json::json;
use std::process::ExitCode;
use std::sync::Arc;
use strata::device::gpu::kernels::Module;
use strata::device::gpu::memory::Pinned;
use strata::device::gpu::order::{CommFlag, Means};
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::error::Result;

/// Whether streams can wait for a word by these means: tried out.
pub fn can_wait(gpu: &Arc<GpuDevice>, means: Means) -> Result<()> {
    let gate = CommFlag::new(gpu)?;
    let mut track = GpuStream::new(gpu)?;
    let ordered = gate.accept_by(&[track.handle()], means)?;
    drop(ordered);
    track.finish()
}

/// Whether host memory can be pinned and seen by the device: tried out.
fn can_register(gpu: &Arc<GpuDevice>) -> Result<()> {
    Pinned::new(gpu, 1 << 20).map(drop)
}

fn works(outcome: Result<()>) -> (bool, String) {
    match outcome {
        Ok(()) => (true, "works".to_string()),
        Err(error) => (false, error.to_string()),
    }
}

/// Prints what was found.
pub fn run(which: &Which, gpu: &Arc<GpuDevice>) -> Result<ExitCode> {
    let driver = gpu.driver();
    gpu.load(Module::Move)?;
    let (registration, why) = works(can_register(gpu));
    let tried = if registration { can_wait(gpu, Means::Driver) } else { can_register(gpu) };
    let (stream_waits, waits_why) = works(tried);
    let (free, total) = gpu.memory_bytes()?;
    let (name, devices, release) = (gpu.name()?, driver.devices()?, driver.release()?);
    let kind = format!("{:?}", driver.kind).to_uppercase();
    let json = || {
        json!({
            "strata": env!("CARGO_PKG_VERSION"), "kind": kind, "driver": driver.path, "release": release,
            "devices": devices, "device": gpu.number(), "name": name, "multiprocessors": gpu.multiprocessors(),
            "memory_bytes": total, "free_bytes": free, "any_address": gpu.uses_any_address(),
            "stream_waits": stream_waits, "stream_waits_why": waits_why,
            "host_registration": registration, "host_registration_why": why,
        })
    };
    let text = || {
        let gib = |bytes: usize| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
        let any = if gpu.uses_any_address() { "yes" } else { "no: memory of the device, and registered memory" };
        let waits = if stream_waits { waits_why.clone() } else { format!("a kernel waits instead: {waits_why}") };
        let lines = [
            ("strata", env!("CARGO_PKG_VERSION").to_string()),
            ("driver", format!("{kind} {release} ({})", driver.path.display())),
            ("device", format!("{} of {devices}: {name}", gpu.number())),
            ("multiprocessors", gpu.multiprocessors().to_string()),
            ("memory", format!("{}, {} free", gib(total), gib(free))),
            ("any address", any.to_string()),
            ("stream waits", waits),
            ("registration", why.clone()),
        ];
        lines.map(|(name, value)| format!("{name:<16} {value}\n")).concat()
    };
    which.print(json, text);
    Ok(ExitCode::SUCCESS)
}
