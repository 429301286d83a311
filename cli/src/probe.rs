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
use strata::topo::probe::compare::{compare, PlacedDevice, NEAREST_NIC};
use strata::topo::probe::infer::infer;
use strata::topo::probe::loopback::LoopbackHost;
use strata::topo::probe::{
    measurable, measure, Load, Measuring, ProbeMeasured, ProbedGpu, Subjects, COPY_BYTES, LOAD_COPIES, NOISE,
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

    fn round_trip_us(&mut self, nic: usize, node: u32) -> ProbeMeasured {
        let (series, defect) = self.loopback.round_trips(&self.addresses[nic], node)?;
        match defect {
            None => Ok(series),
            Some(why) => {
                self.defects[nic] = Some(why.clone());
                Err(format!("{:.1} us from node {node}, but {why}", series.median()))
            }
        }
    }

    fn copy_mbs(&mut self, gpu: usize, load: Load) -> ProbeMeasured {
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
    let found = devices();
    let unknown = found.as_ref().err().cloned().unwrap_or_else(|| "the driver has no such device".to_string());
    let mut gpus = vec![Err(unknown); subjects.gpus.len()];
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
    if let Some(map) = map(&subjects, &devices) {
        outln!("To use it, with local rank i on the i-th GPU: STRATA_NIC_MAP={map}");
    }
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

/// The NICs of all GPUs, where all are known and the probe has found one.
fn map(subjects: &Subjects, devices: &[PlacedDevice]) -> Option<String> {
    let gpus = &devices[subjects.nics.len()..];
    let listed = subjects.gpus.iter().filter(|gpu| gpu.place.is_some()).count();
    let measured = gpus.iter().any(|gpu| gpu.facts.iter().any(|fact| fact.what == NEAREST_NIC && fact.sysfs == "-"));
    let nics: Vec<&str> = gpus.iter().filter_map(|gpu| Some(subjects.nics[gpu.nic?].name.as_str())).collect();
    // Of a driver's devices and sysfs's together the order is not known.
    let ordered = listed == 0 || listed == gpus.len();
    (measured && ordered && nics.len() == gpus.len()).then(|| nics.join(","))
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

#[cfg(test)]
mod tests {
    use super::*;
    use strata::topo::probe::compare::PlaceFact;
    use strata::topo::probe::ProbedNic;

    fn gpu(sysfs: &str, nic: Option<usize>) -> PlacedDevice {
        let (taken, probe, figures) = (String::new(), String::new(), String::new());
        let fact = PlaceFact { what: NEAREST_NIC, taken, sysfs: sysfs.into(), probe, figures, contradiction: None };
        PlacedDevice { name: String::new(), facts: vec![fact], nic }
    }

    #[test]
    fn a_map_is_told_where_the_probe_has_found_a_nic_and_none_is_missing() {
        let nic = |name: &str| ProbedNic { name: name.into(), place: None };
        let device = || ProbedGpu { name: String::new(), place: None };
        let subjects = Subjects { nics: vec![nic("eth0"), nic("eth1")], gpus: vec![device(), device()] };
        let told = |gpus: [PlacedDevice; 2]| {
            let nics = ["eth0", "eth1"].map(|name| PlacedDevice { name: name.into(), facts: Vec::new(), nic: None });
            map(&subjects, &[&nics[..], &gpus[..]].concat())
        };
        assert_eq!(told([gpu("-", Some(1)), gpu("eth0 (PIX)", Some(0))]).as_deref(), Some("eth1,eth0"));
        assert_eq!(told([gpu("-", Some(1)), gpu("-", None)]), None);
        assert_eq!(told([gpu("eth1 (PIX)", Some(1)), gpu("eth0 (PIX)", Some(0))]), None, "sysfs is followed anyway");
    }
}
