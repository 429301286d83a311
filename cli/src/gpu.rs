//! `strata gpu`: a GPU of this machine by itself, without a vendor's library: what its driver offers, whether Strata's
//! kernels compute the host device's bits on it, and how fast they are.
//!
//! The command is the program here: it opens the driver, and the library finds it as it finds that of any program.

mod bandwidth;
mod codes;
pub mod copies;
mod found;
mod kernels;
mod order;
mod twice;

use crate::options::number;
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Arc;
use strata::device::gpu::driver::Driver;
use strata::device::gpu::kernels::type_name;
use strata::device::gpu::GpuDevice;
use strata::dtype::DataType;
use strata::error::{Error, Result};

/// What the command ends with where there is no driver, so that a script can tell this from a failure.
const NO_DRIVER: u8 = 3;
/// What the command ends with where a kernel computed something else than the host.
const DIFFERENT: u8 = 1;

/// What is asked about the GPU.
#[derive(clap::Subcommand)]
pub enum Options {
    /// The driver, the device, and what of it Strata can use.
    Info(Which),
    /// Run every kernel, and compare all memory with what the host makes of the same, bit for bit. Status 1: differences.
    Kernels(kernels::Options),
    /// Time reductions, copies and shuffles, beside the driver's own copy.
    Bandwidth(bandwidth::Options),
}

/// Which device, and how the answer is written.
#[derive(clap::Args)]
pub struct Which {
    /// The device, by the driver's number.
    #[arg(long, value_name = "N", default_value = "0", value_parser = number(0..=1023))]
    device: usize,
    /// Write one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

impl Which {
    fn open(&self, driver: &'static Driver) -> Result<Arc<GpuDevice>> {
        let devices = driver.devices()?;
        if self.device >= devices {
            return Err(Error::InvalidArgument(format!(
                "there is no device {}; the driver has {devices}",
                self.device
            )));
        }
        GpuDevice::of_thread(Some(self.device as i32))?
            .ok_or_else(|| Error::Internal("a driver that went away".to_string()))
    }

    /// Prints the answer in the form that was asked for.
    fn print(&self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) {
        match self.json {
            true => outln!("{}", json()),
            false => out!("{}", text()),
        }
    }
}

/// An element type, as the kernels call it.
fn parse_type(text: &str) -> std::result::Result<DataType, String> {
    let found = DataType::ALL.into_iter().find(|dtype| type_name(*dtype) == text);
    found.ok_or_else(|| format!("not one of {}", DataType::ALL.map(type_name).join(", ")))
}

/// Does what was asked for.
pub fn run(options: &Options) -> Result<ExitCode> {
    let driver = match Driver::installed() {
        Ok(driver) => driver,
        Err(why) => {
            tell!("strata: there is no GPU's driver on this machine, neither CUDA's nor HIP's: {why}");
            return Ok(ExitCode::from(NO_DRIVER));
        }
    };
    match options {
        Options::Info(which) => found::run(which, &which.open(driver)?),
        Options::Kernels(options) => kernels::run(options, &options.which.open(driver)?),
        Options::Bandwidth(options) => bandwidth::run(options, &options.which.open(driver)?),
    }
}
