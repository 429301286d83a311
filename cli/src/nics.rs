//! `strata info --nics`: the GPUs and NICs of this machine, or of one on record, and which local rank uses which NIC.
#![forbid(unsafe_code)]

use crate::probe;
use std::path::Path;
use std::process::ExitCode;
use strata::config::Config;
use strata::error::Result;
use strata::topo::interface::Filter;
use strata::topo::local::LocalRank;
use strata::topo::machine::{gpu_of, gpus_of_ranks, visible_from_env, Machine};
use strata::topo::nics::{meeting_address, speed_text, Purpose};
use strata::topo::pinning::{pin, Pinning, Rules};

fn rules() -> Result<Rules> {
    Rules::new(&Config::from_env().0.nic_map, Filter::from_env())
}

/// What the ranks of a node get. The ranks' GPUs are those that a process that starts here would know by their numbers.
fn pinned(machine: &Machine, ranks: usize, rules: &Rules, purpose: Purpose) -> Result<Pinning> {
    let visible = visible_from_env();
    let claims: Vec<_> = (0..ranks).map(|rank| gpu_of(machine, rank, visible.as_deref())).collect();
    pin(machine, &gpus_of_ranks(machine, &claims), rules, purpose)
}

/// How many ranks to speak of when nobody says.
fn usual_ranks(machine: &Machine, rules: &Rules) -> usize {
    let nics = || pinned(machine, 1, rules, Purpose::Tcp).map_or(1, |one| machine.nics.len() - one.left_out.len());
    match (LocalRank::from_env(), machine.gpus.len()) {
        (Some(local), _) => local.size,
        (None, 0) => nics(),
        (None, gpus) => gpus,
    }
}

/// A few lines about the network: where this host is found, and the NICs for TCP.
pub fn summary() -> Result<Vec<String>> {
    let (machine, rules) = (Machine::this()?, rules()?);
    let pinning = pinned(&machine, usual_ranks(&machine, &rules), &rules, Purpose::Tcp)?;
    let mut lines = Vec::new();
    if let Some(found) = meeting_address(&machine, &rules.filter) {
        lines.push(format!("{} ({})", found.addr, found.name));
    }
    for (rank, pin) in pinning.pins.iter().enumerate() {
        lines.push(format!("local rank {rank} uses {}: {}", machine.nics[pin.nic].name(), pin.why));
    }
    lines.extend(pinning.warning.map(|warning| format!("warning: {warning}")));
    Ok(lines)
}

/// Prints all that is known, and what can be measured if that is wanted.
pub fn print(sysfs: Option<&Path>, ranks: Option<usize>, measured: bool) -> Result<ExitCode> {
    let machine = sysfs.map_or_else(Machine::this, Machine::recorded)?;
    let rules = rules()?;
    print_devices(&machine);
    let ranks = ranks.unwrap_or_else(|| usual_ranks(&machine, &rules));
    for (purpose, name) in [(Purpose::Tcp, "TCP"), (Purpose::Mpi, "MPI")] {
        outln!("\n{name}");
        // What one of them cannot have is no reason to keep the other from the reader.
        match pinned(&machine, ranks, &rules, purpose) {
            Ok(pinning) => print_pins(&machine, &pinning),
            Err(error) => outln!("{error}"),
        }
    }
    if measured {
        probe::print(&machine);
    }
    Ok(ExitCode::SUCCESS)
}

fn print_devices(machine: &Machine) {
    let numa = |numa: Option<u32>| numa.map_or("-".to_string(), |numa| numa.to_string());
    outln!("{:<6} {:<14} {:<4}", "GPU", "PCI", "NUMA");
    for (number, gpu) in machine.gpus.iter().enumerate() {
        outln!("{number:<6} {:<14} {:<4}", gpu.pci.address().to_string(), numa(gpu.pci.numa));
    }
    outln!("\n{:<16} {:<10} {:<14} {:<4} {:<13} {:<5} address", "NIC", "device", "PCI", "NUMA", "speed", "link");
    for nic in &machine.nics {
        let device = nic.device.as_ref().map_or("-".to_string(), |(name, port)| format!("{name}:{port}"));
        let pci = nic.pci.as_ref().map_or("-".to_string(), |pci| pci.address().to_string());
        let numa = numa(nic.pci.as_ref().and_then(|pci| pci.numa));
        let addresses: Vec<String> = nic.addresses.iter().map(|address| address.addr.to_string()).collect();
        let (speed, link) = (speed_text(nic.speed), if nic.up { "up" } else { "down" });
        let line = format!(
            "{:<16} {device:<10} {pci:<14} {numa:<4} {speed:<13} {link:<5} {}",
            nic.name(),
            addresses.join(" ")
        );
        outln!("{}", line.trim_end());
    }
}

fn print_pins(machine: &Machine, pinning: &Pinning) {
    outln!("{:<10} {:<14} {:<16} {:<8} why", "local rank", "GPU", "NIC", "distance");
    for (rank, pin) in pinning.pins.iter().enumerate() {
        let gpu = pin.gpu.map_or("-".to_string(), |gpu| gpu.to_string());
        let distance = pin.distance.map_or("-".to_string(), |distance| distance.to_string());
        outln!("{rank:<10} {gpu:<14} {:<16} {distance:<8} {}", machine.nics[pin.nic].name(), pin.why);
    }
    for (nic, why) in &pinning.left_out {
        outln!("{} is not used: {why}", machine.nics[*nic].name());
    }
    if let Some(warning) = &pinning.warning {
        outln!("warning: {warning}");
    }
}
