//! `strata info --nics --probe`: where NICs and GPUs are, measured, beside what sysfs says.
#![forbid(unsafe_code)]

use crate::gpu::copies::rate_mbs;
use std::path::Path;
use std::sync::Arc;
use strata::device::gpu::driver::Driver;
use strata::device::gpu::GpuDevice;
use strata::topo::interface::{Filter, Interface};
use strata::topo::machine::Machine;
use strata::topo::nics::address;
use strata::topo::probe::compare::{compare, PlacedDevice};
use strata::topo::probe::infer::infer;
use strata::topo::probe::loopback::LoopbackHost;
use strata::topo::probe::{
    measurable, measure, Load, Measured, Measuring, ProbedGpu, Subjects, COPY_BYTES, LOAD_COPIES, NOISE,
};

/// This host, whose NICs and GPUs are numbered as in [`Subjects`].
struct ThisHost {
    loopback: LoopbackHost,
    addresses: Vec<Interface>,
    /// Of each NIC, why its loopback cannot be measured, once that is known.
    defects: Vec<Option<String>>,
    /// The GPUs, or why one cannot be measured.
    gpus: Vec<Result<Arc<GpuDevice>, String>>,
}

impl Measuring for ThisHost {
    fn nodes(&self) -> Vec<u32> {
        self.loopback.nodes()
    }

    fn round_trip_us(&mut self, nic: usize, node: u32) -> Measured {
        let (series, defect) = self.loopback.round_trips(&self.addresses[nic], node)?;
        match defect {
            None => Ok(series),
            Some(why) => {
                self.defects[nic] = Some(why.clone());
                Err(format!("{:.1} us from node {node}, but {why}", series.median()))
            }
        }
    }

    fn copy_mbs(&mut self, gpu: usize, load: Load) -> Measured {
        let timed = self.gpus[gpu].as_ref().map_err(String::clone)?;
        match load {
            Load::Nothing => rate_mbs(timed, None),
            Load::Copies(other) => rate_mbs(timed, Some(self.gpus[other].as_ref().map_err(String::clone)?)),
            Load::Loopback(nic) => match &self.defects[nic] {
                Some(why) => Err(why.clone()),
                None => {
                    let _traffic = self.loopback.traffic(&self.addresses[nic])?;
                    rate_mbs(timed, None)
                }
            },
        }
    }
}

/// The devices that the driver has; or why there are none.
fn devices() -> Result<Vec<Arc<GpuDevice>>, String> {
    let driver = Driver::installed();
    let driver =
        driver.map_err(|_| "there is no GPU's driver on this machine, neither CUDA's nor HIP's".to_string())?;
    let count = driver.devices().map_err(|error| error.text().to_string())?;
    let device = |number: usize| match GpuDevice::of_thread(Some(number as i32)) {
        Ok(device) => device.ok_or_else(|| "the driver has no device".to_string()),
        Err(error) => Err(format!("device {number}: {}", error.text())),
    };
    match count {
        0 => Err("the driver has no device".to_string()),
        _ => (0..count).map(device).collect(),
    }
}

/// Measures this machine, and prints what sysfs and the measurements say of each NIC and GPU.
pub fn print(machine: &Machine) {
    let fit = measurable(machine);
    let mut subjects = Subjects::of(machine, &fit);
    let unused = Err("the driver has no such device".to_string());
    let mut gpus = vec![unused; subjects.gpus.len()];
    let found = devices();
    for device in found.iter().flatten() {
        let name = device.pci_address().map_or(format!("device {}", device.number()), |address| address.to_string());
        match subjects.gpus.iter().position(|gpu| gpu.name == name) {
            Some(at) => gpus[at] = Ok(device.clone()),
            None => {
                subjects.gpus.push(ProbedGpu { name, place: None });
                gpus.push(Ok(device.clone()));
            }
        }
    }
    let any = Filter::default();
    let of_nic = |&nic: &usize| address(&machine.nics[nic], &any).or(machine.nics[nic].addresses.first()).cloned();
    let addresses: Vec<Interface> = fit.iter().filter_map(of_nic).collect();
    let mut host =
        ThisHost { loopback: LoopbackHost::new(Path::new("/sys")), defects: vec![None; fit.len()], addresses, gpus };
    let inferred = infer(&subjects, &measure(&subjects, &mut host));
    outln!(
        "\nProbe: medians, taken to be off by {:.0} % or more; sysfs comes first where it says something.\n\
         Round trips are of loopback from each NUMA node; copies of {} MB to the host, beside {LOAD_COPIES} of another GPU.",
        NOISE * 100.0,
        COPY_BYTES / 1_000_000
    );
    let devices = compare(&subjects, &inferred);
    devices.iter().for_each(print_device);
    for (index, nic) in machine.nics.iter().enumerate().filter(|(index, _)| !fit.contains(index)) {
        let why = match () {
            () if nic.loopback || !machine.nics[index].physical => "there is no hardware to it",
            () if !nic.up => "it is down",
            () => "it has no address",
        };
        outln!("NIC {}\n  not measured: {why}", nic.name());
    }
    if let Err(why) = found {
        outln!("GPUs are not measured: {why}");
    }
}

fn print_device(device: &PlacedDevice) {
    outln!("{}", device.name);
    for fact in &device.facts {
        outln!("  {}: {} (sysfs: {}; probe: {})", fact.what, fact.taken, fact.sysfs, fact.probe);
        outln!("    {}", fact.figures);
        if let Some(contradiction) = &fact.contradiction {
            outln!("    contradiction: {contradiction}");
        }
    }
}
