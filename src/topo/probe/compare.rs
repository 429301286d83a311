//! What the probe tells beside what sysfs tells.
//!
//! Sysfs comes first where it says something, the probe fills what it does not say, and contradictions are told in words. Of
//! switches sysfs says something only of devices below a bridge: hypervisors put devices directly on the root bus.
#![forbid(unsafe_code)]

use super::infer::{Inferred, Verdict};
use super::{ProbedGpu, ProbedNic, Subjects};
use crate::topo::distance::{Distance, PciPath};

/// The fact of which NIC a GPU is to use.
pub const NEAREST_NIC: &str = "nearest NIC";

/// One fact about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceFact {
    /// What it is: `NUMA node`.
    pub what: &'static str,
    /// What holds; `unknown` where neither says.
    pub taken: String,
    /// What sysfs says; `-` for nothing.
    pub sysfs: String,
    /// What the probe says; `unknown` where its figures do not tell.
    pub probe: String,
    /// The probe's figures.
    pub figures: String,
    /// Where the two contradict each other, in words.
    pub contradiction: Option<String>,
}

/// A device with what is known of its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedDevice {
    /// Its name.
    pub name: String,
    /// The facts.
    pub facts: Vec<PlaceFact>,
    /// The NIC that a GPU is to use, by its place in the list, where one is known.
    pub nic: Option<usize>,
}

/// All devices, NICs first.
pub fn compare(subjects: &Subjects, inferred: &Inferred) -> Vec<PlacedDevice> {
    let nics = subjects.nics.iter().zip(&inferred.nodes).map(|(nic, verdict)| PlacedDevice {
        name: format!("NIC {}", nic.name),
        facts: vec![node(nic, verdict)],
        nic: None,
    });
    let gpu = |(index, gpu): (usize, &ProbedGpu)| {
        let (nic, by_nic) = nic_of(subjects, gpu, &inferred.nics[index]);
        let facts = vec![switch(subjects, index, &inferred.switches[index]), by_nic];
        PlacedDevice { name: format!("GPU {}", gpu.name), facts, nic }
    };
    nics.chain(subjects.gpus.iter().enumerate().map(gpu)).collect()
}

fn node(nic: &ProbedNic, verdict: &Verdict<u32>) -> PlaceFact {
    let sysfs = nic.place.as_ref().and_then(|place| place.numa);
    let text = |node: Option<u32>, none: &str| node.map_or(none.to_string(), |node| node.to_string());
    let contradiction = sysfs.zip(verdict.answer).filter(|(sysfs, probe)| sysfs != probe).map(|(sysfs, probe)| {
        format!("sysfs says NUMA node {sysfs}, but round trips are shortest from node {probe}; sysfs is taken")
    });
    PlaceFact {
        what: "NUMA node",
        taken: text(sysfs.or(verdict.answer), "unknown"),
        sysfs: text(sysfs, "-"),
        probe: text(verdict.answer, "unknown"),
        figures: verdict.why.clone(),
        contradiction,
    }
}

/// Whether two GPUs are behind one switch by sysfs.
fn shares(one: Option<&PciPath>, other: Option<&PciPath>) -> Option<bool> {
    let (one, other) = one.zip(other)?;
    (one.is_below_bridge() && other.is_below_bridge()).then(|| Distance::between(one, other).avoids_the_processor())
}

/// The GPUs with which one shares its switch, and those of which it is not known.
fn sharers(subjects: &Subjects, gpu: usize, row: &[Option<bool>], none: &str) -> String {
    let named = |wanted: Option<bool>| -> Vec<&str> {
        let others = (0..row.len()).filter(|&other| other != gpu && row[other] == wanted);
        others.map(|other| subjects.gpus[other].name.as_str()).collect()
    };
    let (with, unknown) = (named(Some(true)), named(None));
    match (with.is_empty(), unknown.is_empty()) {
        (true, false) if unknown.len() + 1 == row.len() => none.to_string(),
        (true, true) => "no other GPU".to_string(),
        (false, true) => with.join(", "),
        (true, false) => format!("unknown of {}", unknown.join(", ")),
        (false, false) => format!("{}; unknown of {}", with.join(", "), unknown.join(", ")),
    }
}

fn switch(subjects: &Subjects, gpu: usize, verdict: &Verdict<Vec<Option<bool>>>) -> PlaceFact {
    let count = subjects.gpus.len();
    let place = |gpu: usize| subjects.gpus[gpu].place.as_ref();
    let sysfs: Vec<Option<bool>> = (0..count).map(|other| shares(place(gpu), place(other))).collect();
    let probe = verdict.answer.clone().unwrap_or_else(|| vec![None; count]);
    let taken: Vec<Option<bool>> = sysfs.iter().zip(&probe).map(|(sysfs, probe)| sysfs.or(*probe)).collect();
    let name = |other: usize| &subjects.gpus[other].name;
    let against = |other: usize| match (sysfs[other]?, probe[other]?) {
        (true, false) => {
            Some(format!("sysfs has {} behind its switch, but the two do not slow each other", name(other)))
        }
        (false, true) => Some(format!("sysfs has {} behind another switch, but the two slow each other", name(other))),
        _ => None,
    };
    fn joined(texts: Vec<String>) -> Option<String> {
        (!texts.is_empty()).then(|| format!("{}; sysfs is taken", texts.join("; ")))
    }
    PlaceFact {
        what: "behind one switch with",
        taken: sharers(subjects, gpu, &taken, "unknown"),
        sysfs: sharers(subjects, gpu, &sysfs, "-"),
        probe: sharers(subjects, gpu, &probe, "unknown"),
        figures: verdict.why.clone(),
        contradiction: joined((0..count).filter(|&other| other != gpu).filter_map(against).collect()),
    }
}

/// The NICs that are nearest to a GPU by sysfs, and how near; nothing where all are equally near.
fn nearest(nics: &[ProbedNic], gpu: Option<&PciPath>) -> Option<(Vec<usize>, Distance)> {
    let gpu = gpu.filter(|gpu| gpu.is_below_bridge())?;
    let distance = |nic: &ProbedNic| nic.place.as_ref().map_or(Distance::Sys, |nic| Distance::between(gpu, nic));
    let least = nics.iter().map(distance).min()?;
    let near: Vec<usize> = (0..nics.len()).filter(|&nic| distance(&nics[nic]) == least).collect();
    (near.len() < nics.len() || least.avoids_the_processor()).then_some((near, least))
}

fn nic_of(subjects: &Subjects, gpu: &ProbedGpu, verdict: &Verdict<usize>) -> (Option<usize>, PlaceFact) {
    let name = |nic: usize| subjects.nics[nic].name.as_str();
    let names = |nics: &[usize]| nics.iter().map(|&nic| name(nic)).collect::<Vec<_>>().join(", ");
    let sysfs = nearest(&subjects.nics, gpu.place.as_ref());
    let taken = match (&sysfs, verdict.answer) {
        (Some((near, _)), Some(probe)) if near.contains(&probe) => vec![probe],
        (Some((near, _)), _) => near.clone(),
        (None, probe) => probe.into_iter().collect(),
    };
    let contradiction = sysfs.as_ref().zip(verdict.answer).filter(|((near, _), probe)| !near.contains(probe));
    let contradiction = contradiction.map(|((near, distance), probe)| {
        let (near, probe) = (names(near), name(probe));
        format!("sysfs says {near} ({distance}), but traffic of {probe} slows its copies most; sysfs is taken")
    });
    let fact = PlaceFact {
        what: NEAREST_NIC,
        taken: if taken.is_empty() { "unknown".to_string() } else { names(&taken) },
        sysfs: sysfs.map_or("-".to_string(), |(near, distance)| format!("{} ({distance})", names(&near))),
        probe: verdict.answer.map_or("unknown".to_string(), |nic| name(nic).to_string()),
        figures: verdict.why.clone(),
        contradiction,
    };
    (if let [nic] = taken[..] { Some(nic) } else { None }, fact)
}
