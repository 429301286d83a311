//! Which local rank uses which NIC, and why.
//!
//! `STRATA_NIC_MAP` decides where it is set: names of NICs separated by commas, one for each local rank, from the
//! beginning again when there are more ranks than names. Otherwise the NICs that [`super::nics`] lets through are
//! assigned evenly and as near to the ranks' GPUs as possible. All of it is a pure function of the machine and the
//! settings, so all ranks of a node find the same.
#![forbid(unsafe_code)]

use super::assign::assign;
use super::distance::{Distance, PciAddress, PciPath};
use super::interface::Filter;
use super::machine::Machine;
use super::nics::{defect, sort_out, Purpose};
use crate::error::{Error, Result};

/// What the user wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    map: Option<Vec<String>>,
    /// NCCL's variables.
    pub filter: Filter,
}

impl Rules {
    /// From the text of `STRATA_NIC_MAP` and NCCL's variables.
    pub fn new(map: &str, filter: Filter) -> Result<Rules> {
        if matches!(map, "" | "auto") {
            return Ok(Rules { map: None, filter });
        }
        let names: Vec<String> = map.split(',').map(|name| name.trim().to_string()).collect();
        match names.iter().position(String::is_empty) {
            None => Ok(Rules { map: Some(names), filter }),
            Some(at) => Err(Error::InvalidUsage(format!(
                "STRATA_NIC_MAP={map} has no name for local rank {at}; it is one NIC for each local rank, such as \
                 hsn0,hsn0,hsn1,hsn1"
            ))),
        }
    }

    /// Whether the user has said which rank uses which NIC.
    pub fn has_map(&self) -> bool {
        self.map.is_some()
    }

    fn source(&self) -> String {
        match &self.map {
            Some(names) => format!("STRATA_NIC_MAP={}", names.join(",")),
            None => self.filter.text(),
        }
    }
}

/// A local rank's NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The NIC, as an index of the machine's list.
    pub nic: usize,
    /// The rank's GPU.
    pub gpu: Option<PciAddress>,
    /// How far the two are apart.
    pub distance: Option<Distance>,
    /// Why this one.
    pub why: String,
}

/// The NICs of a node's ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinning {
    /// One for each local rank.
    pub pins: Vec<Pin>,
    /// All NICs that the settings leave to the node's ranks.
    pub usable: Vec<usize>,
    /// The NICs that are not used, and why.
    pub left_out: Vec<(usize, String)>,
    /// Said when ranks share a NIC while another one idles.
    pub warning: Option<String>,
}

/// Gives each local rank its NIC. `gpus` has one entry for each local rank.
pub fn pin(machine: &Machine, gpus: &[Option<PciAddress>], rules: &Rules, purpose: Purpose) -> Result<Pinning> {
    let sorted = sort_out(machine, &rules.filter, purpose);
    let place = |gpu: &PciAddress| machine.gpus.iter().map(|gpu| &gpu.pci).find(|pci| pci.address() == *gpu);
    let places: Vec<Option<&PciPath>> = gpus.iter().map(|gpu| gpu.as_ref().and_then(place)).collect();
    let distance = |rank: usize, nic: usize| {
        let gpu = places[rank]?;
        let nic = machine.nics[nic].pci.as_ref();
        Some(nic.map_or(Distance::Sys, |nic| Distance::between(gpu, nic)))
    };
    let nic_of: Vec<usize> = match &rules.map {
        Some(names) => mapped(machine, names, gpus.len(), rules, purpose)?,
        None if sorted.used.is_empty() => return Err(none_left(machine, rules, &sorted.left_out)),
        None => {
            let near = |rank: usize, at: usize| distance(rank, sorted.used[at]);
            let at = assign(gpus.len(), sorted.used.len(), near);
            at.into_iter().map(|at| sorted.used[at]).collect()
        }
    };
    let why = |rank: usize| match () {
        () if rules.has_map() => "STRATA_NIC_MAP".to_string(),
        () if sorted.used.len() == 1 => "the only one to use".to_string(),
        () => reason(machine, &sorted.used, nic_of[rank], |nic| distance(rank, nic)),
    };
    let pin =
        |(rank, &nic): (usize, &usize)| Pin { nic, gpu: gpus[rank], distance: distance(rank, nic), why: why(rank) };
    let pins: Vec<Pin> = nic_of.iter().enumerate().map(pin).collect();
    let warning = warning(machine, &nic_of, rules, purpose);
    let mut usable = if rules.has_map() { nic_of } else { sorted.used };
    usable.sort_unstable();
    usable.dedup();
    Ok(Pinning { pins, usable, left_out: sorted.left_out, warning })
}

fn reason(machine: &Machine, used: &[usize], nic: usize, distance: impl Fn(usize) -> Option<Distance>) -> String {
    let distances = || used.iter().map(|&nic| distance(nic));
    let (nearest, farthest) = (distances().min().flatten(), distances().max().flatten());
    if nearest.is_none() {
        "ranks take turns".to_string()
    } else if nearest == farthest {
        "all are equally near; ranks take turns".to_string()
    } else if distance(nic) == nearest {
        "nearest to its GPU".to_string()
    } else {
        let nearer = used.iter().copied().find(|&other| distance(other) == nearest).unwrap_or(nic);
        format!("{} is nearer, and has its share of ranks", machine.nics[nearer].name())
    }
}

fn mapped(machine: &Machine, names: &[String], ranks: usize, rules: &Rules, purpose: Purpose) -> Result<Vec<usize>> {
    let family = rules.filter.family_alone();
    let find = |name: &String| {
        let wrong = |what: String| Error::InvalidUsage(format!("STRATA_NIC_MAP={} {what}", names.join(",")));
        let known = || list(machine.nics.iter().map(|nic| nic.name()));
        let nic = machine.nics.iter().position(|nic| nic.is_called(name));
        let nic = nic.ok_or_else(|| wrong(format!("names {name}; there are {}", known())))?;
        match defect(&machine.nics[nic], &family, purpose) {
            Some(defect) => Err(wrong(format!("names {name}, but {defect}"))),
            None => Ok(nic),
        }
    };
    let nics = names.iter().map(find).collect::<Result<Vec<usize>>>()?;
    Ok((0..ranks).map(|rank| nics[rank % nics.len()]).collect())
}

fn none_left(machine: &Machine, rules: &Rules, left_out: &[(usize, String)]) -> Error {
    let one = |(nic, why): &(usize, String)| format!("{} ({why})", machine.nics[*nic].name());
    let each = list(left_out.iter().map(one));
    Error::InvalidUsage(format!("{} leaves no network interface to use: {each}", rules.filter.text()))
}

fn list<T: AsRef<str>>(items: impl Iterator<Item = T>) -> String {
    let items: Vec<T> = items.collect();
    let items: Vec<&str> = items.iter().map(AsRef::as_ref).collect();
    match items[..] {
        [] => "none".to_string(),
        _ => items.join(", "),
    }
}

/// What is wrong with ranks that share a NIC while another one, which they would use without the settings, idles.
fn warning(machine: &Machine, nic_of: &[usize], rules: &Rules, purpose: Purpose) -> Option<String> {
    let adapter = |nic: usize| machine.nics[nic].adapter.as_deref().unwrap_or(machine.nics[nic].name());
    let ranks_of = |nic: usize| (0..nic_of.len()).filter(|&rank| adapter(nic_of[rank]) == adapter(nic)).collect();
    let crowd =
        nic_of.iter().map(|&nic| (nic, ranks_of(nic))).max_by_key(|(_, ranks): &(usize, Vec<usize>)| ranks.len());
    let (shared, ranks) = crowd.filter(|(_, ranks)| ranks.len() > 1)?;
    let usable = sort_out(machine, &rules.filter.family_alone(), purpose).used;
    let idle: Vec<usize> =
        usable.into_iter().filter(|&nic| nic_of.iter().all(|&of| adapter(of) != adapter(nic))).collect();
    if idle.is_empty() {
        return None;
    }
    Some(format!(
        "local ranks {} share {} while {} idle{}, because {}",
        list(ranks.iter().map(usize::to_string)),
        machine.nics[shared].name(),
        list(idle.iter().map(|&nic| machine.nics[nic].name())),
        if idle.len() == 1 { "s" } else { "" },
        rules.source()
    ))
}
