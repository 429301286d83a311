//! Where NICs and GPUs are on a machine whose sysfs does not say: found by measuring, as AdapCC's detector does.
//!
//! Virtual machines show NICs and GPUs side by side on one bus, whatever lies between them in the hardware. Three
//! measurements tell more (AdapCC: Zhao, Zhang and Wu, section IV-A):
//! 1. A NIC's NUMA node is the one from which loopback round trips through the NIC take the least time.
//! 2. Two GPUs are behind one PCIe switch if a copy of 20 MB from one to the host slows while the other one makes 8.
//! 3. A GPU's NIC is the one whose loopback traffic slows the GPU's copies to the host most.
//!
//! [`Measuring`] measures; [`measure`] says what, and its [`ProbeFigures`] are all that [`infer`] goes by, which is a pure
//! function. [`compare`] sets its answers beside sysfs's: sysfs comes first where it says something. [`loopback`] measures
//! round trips and traffic on this host; copies are measured where the GPU's driver is.
//!
//! A figure is the median of several samples. It is taken to be off by [`NOISE`], or by half of the samples' interquartile range
//! where that is more; an answer that the figures do not give for all values within that is `unknown`.
#![forbid(unsafe_code)]

pub mod compare;
pub mod infer;
pub mod loopback;
#[cfg(test)]
mod tests;

use super::distance::PciPath;
use super::machine::{Machine, Nic};

/// What a copy to the host moves.
pub const COPY_BYTES: usize = 20_000_000;
/// How many copies the other GPU makes at the same time.
pub const LOAD_COPIES: usize = 8;
/// How far off a figure may be, as a share of the true value, however well its samples agree.
pub const NOISE: f64 = 0.05;

/// Samples of one quantity.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    samples: Vec<f64>,
}

impl Series {
    /// From samples, all of them above 0; none of no samples.
    pub fn new(mut samples: Vec<f64>) -> Option<Series> {
        samples.sort_by(f64::total_cmp);
        let sound = samples.iter().all(|sample| sample.is_finite() && *sample > 0.0);
        (sound && !samples.is_empty()).then_some(Series { samples })
    }

    /// The sample in the middle.
    pub fn median(&self) -> f64 {
        self.samples[self.samples.len() / 2]
    }

    /// How far off the median may be, as a share of the true value.
    pub fn noise(&self) -> f64 {
        let quarter = self.samples.len() / 4;
        let spread = self.samples[self.samples.len() - 1 - quarter] - self.samples[quarter];
        NOISE.max(spread / 2.0 / self.median())
    }

    /// The least and the greatest that the true value may be.
    pub fn bounds(&self) -> (f64, f64) {
        let (median, noise) = (self.median(), self.noise());
        (median / (1.0 + noise), median / (1.0 - noise.min(0.95)))
    }
}

/// What a measurement gave: samples, or why there are none.
pub type ProbeMeasured = Result<Series, String>;

/// What a GPU's copy to the host runs beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Nothing.
    Nothing,
    /// [`LOAD_COPIES`] copies to the host of another GPU, by its place in the list.
    Copies(usize),
    /// Loopback traffic through a NIC, by its place in the list.
    Loopback(usize),
}

/// What can be measured on a machine. NICs and GPUs are numbered as in [`Subjects`].
pub trait Measuring {
    /// The NUMA nodes that have processors this process may use.
    fn nodes(&self) -> Vec<u32>;
    /// Microseconds of a round trip over loopback through a NIC, both ends on processors of a node.
    fn round_trip_us(&mut self, nic: usize, node: u32) -> ProbeMeasured;
    /// MB/s of a GPU's copy of [`COPY_BYTES`] to the host.
    fn copy_mbs(&mut self, gpu: usize, load: Load) -> ProbeMeasured;
}

/// A NIC to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbedNic {
    /// Its name.
    pub name: String,
    /// Its place by sysfs.
    pub place: Option<PciPath>,
}

/// A GPU to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbedGpu {
    /// What it is called: its PCI address, or the driver's number where that is not known.
    pub name: String,
    /// Its place by sysfs.
    pub place: Option<PciPath>,
}

/// What is to be placed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subjects {
    /// The NICs.
    pub nics: Vec<ProbedNic>,
    /// The GPUs.
    pub gpus: Vec<ProbedGpu>,
}

impl Subjects {
    /// These NICs of a machine and its GPUs.
    pub fn of(machine: &Machine, nics: &[usize]) -> Subjects {
        let nic = |nic: &Nic| ProbedNic { name: nic.name().to_string(), place: nic.pci.clone() };
        let gpu = |place: &PciPath| ProbedGpu { name: place.address().to_string(), place: Some(place.clone()) };
        Subjects {
            nics: nics.iter().map(|&index| nic(&machine.nics[index])).collect(),
            gpus: machine.gpus.iter().map(|found| gpu(&found.pci)).collect(),
        }
    }
}

/// The NICs of a machine that loopback can be measured through, as indices of its list: hardware that is up, with an address.
pub fn measurable(machine: &Machine) -> Vec<usize> {
    let fit = |nic: &Nic| nic.up && nic.physical && !nic.loopback && !nic.addresses.is_empty();
    (0..machine.nics.len()).filter(|&index| fit(&machine.nics[index])).collect()
}

/// What was measured of a GPU, in MB/s.
#[derive(Debug, Clone, PartialEq)]
pub struct CopyFigures {
    /// Its copy by itself.
    pub alone: ProbeMeasured,
    /// Its copy beside those of each other GPU; none at its own place.
    pub beside: Vec<Option<ProbeMeasured>>,
    /// Its copy beside loopback traffic through each NIC.
    pub loopback: Vec<ProbeMeasured>,
}

/// All that was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct ProbeFigures {
    /// The NUMA nodes.
    pub nodes: Vec<u32>,
    /// Round trips in microseconds, of each NIC from each node.
    pub round_trips: Vec<Vec<ProbeMeasured>>,
    /// Copies of each GPU.
    pub copies: Vec<CopyFigures>,
}

/// Measures all that [`infer`] goes by. A GPU whose copy by itself cannot be measured is not measured further.
pub fn measure(subjects: &Subjects, machine: &mut dyn Measuring) -> ProbeFigures {
    let (nnics, ngpus) = (subjects.nics.len(), subjects.gpus.len());
    let nodes = machine.nodes();
    let mut round_trips = Vec::new();
    for nic in 0..nnics {
        round_trips.push(nodes.iter().map(|&node| machine.round_trip_us(nic, node)).collect());
    }
    let alone: Vec<ProbeMeasured> = (0..ngpus).map(|gpu| machine.copy_mbs(gpu, Load::Nothing)).collect();
    let mut copies = Vec::new();
    for gpu in 0..ngpus {
        let mut beside = Vec::new();
        for other in 0..ngpus {
            let lacking = [gpu, other].into_iter().find_map(|one| alone[one].clone().err());
            beside.push((other != gpu).then(|| match lacking {
                Some(why) => Err(why),
                None => machine.copy_mbs(gpu, Load::Copies(other)),
            }));
        }
        let mut through = |nic| match &alone[gpu] {
            Err(why) => Err(why.clone()),
            Ok(_) => machine.copy_mbs(gpu, Load::Loopback(nic)),
        };
        let loopback = (0..nnics).map(&mut through).collect();
        copies.push(CopyFigures { alone: alone[gpu].clone(), beside, loopback });
    }
    ProbeFigures { nodes, round_trips, copies }
}
