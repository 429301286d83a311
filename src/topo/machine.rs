//! The GPUs and NICs of a machine, read from sysfs.
//!
//! The root of the tree is a parameter, so trees of other machines can be read as well. A NIC is a network interface, or
//! a port of an adapter for remote memory access (`/sys/class/infiniband`, `/sys/class/cxi`), or both where they belong
//! together. What cannot be read is not there: a machine without sysfs has its interfaces' addresses and nothing else.
#![forbid(unsafe_code)]

use super::distance::{PciAddress, PciPath};
use super::interface::Interface;
use crate::error::{Error, Result};
use std::cmp::Ordering;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What a NIC speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NicKind {
    /// HPE Slingshot.
    Cxi,
    /// InfiniBand.
    Infiniband,
    /// Ethernet.
    Ethernet,
}

/// A NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Its network interface, such as `hsn0`.
    pub interface: Option<String>,
    /// Its device for remote memory access, such as `cxi0` or `mlx5_0`, and the port of it.
    pub device: Option<(String, u32)>,
    /// What it speaks.
    pub kind: NicKind,
    /// Mb/s, where the driver tells it.
    pub speed: Option<u64>,
    /// Whether it has a link.
    pub up: bool,
    /// Whether only this host can be reached by it.
    pub loopback: bool,
    /// Whether there is hardware to it, perhaps below a bond, a bridge or a VLAN.
    pub physical: bool,
    /// The adapter and port it is, or lies on; equal for interfaces that share one.
    pub adapter: Option<String>,
    /// Its place on PCI.
    pub pci: Option<PciPath>,
    /// Its addresses.
    pub addresses: Vec<Interface>,
}

impl Nic {
    /// Its interface's name, or the device's where it has no interface.
    pub fn name(&self) -> &str {
        let device = || self.device.as_ref().map(|(name, _)| name.as_str());
        self.interface.as_deref().or_else(device).unwrap_or("")
    }

    /// The order of their devices' names.
    pub fn by_device(&self, other: &Nic) -> Ordering {
        let name = |nic: &Nic| nic.device.as_ref().map_or(String::new(), |(name, _)| name.clone());
        by_number(&name(self), &name(other))
    }

    /// Whether a user may mean this one: by interface, device (`mlx5_0`), or device and port (`mlx5_0:1`).
    pub fn is_called(&self, name: &str) -> bool {
        let by_device = |(device, port): &(String, u32)| name == device || name == format!("{device}:{port}");
        self.interface.as_deref() == Some(name) || self.device.as_ref().is_some_and(by_device)
    }
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its place on PCI.
    pub pci: PciPath,
}

/// What matters of a machine. Both lists are sorted: GPUs by bus, NICs by name, numbers in names by value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<Gpu>,
    /// The NICs.
    pub nics: Vec<Nic>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Result<Machine> {
        Ok(Machine::read(Path::new("/sys"), &super::interface::all()?))
    }

    /// The machine whose sysfs is at `root` and whose interfaces have these addresses.
    pub fn read(root: &Path, addresses: &[Interface]) -> Machine {
        let mut nics = interfaces(root);
        attach_devices(root, &mut nics);
        for address in addresses {
            let name = Some(address.name.as_str());
            let at = nics.iter().position(|nic| nic.interface.as_deref() == name).unwrap_or_else(|| {
                nics.push(without_sysfs(address));
                nics.len() - 1
            });
            nics[at].addresses.push(address.clone());
            nics[at].up &= address.up;
            nics[at].loopback |= address.loopback;
        }
        nics.sort_by(|a, b| by_number(a.name(), b.name()));
        Machine { gpus: gpus(root), nics }
    }

    /// The machine recorded at `root`: its sysfs, and a file `addresses` with lines such as `hsn0 10.1.0.1/16`.
    pub fn recorded(root: &Path) -> Result<Machine> {
        let path = root.join("addresses");
        let text = fs::read_to_string(&path)
            .map_err(|error| Error::InvalidArgument(format!("reading {}: {error}", path.display())))?;
        let address = |line: &str| {
            let (name, address) = line.split_once(' ')?;
            let (addr, prefix) = address.trim().split_once('/')?;
            let addr: std::net::IpAddr = addr.parse().ok()?;
            let (name, loopback) = (name.to_string(), addr.is_loopback());
            Some(Interface { name, addr, prefix: prefix.parse().ok()?, scope: 0, up: true, loopback })
        };
        let wrong = |line: &str| Error::InvalidArgument(format!("{}: `{line}` is not an address", path.display()));
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let addresses = lines.map(|line| address(line).ok_or_else(|| wrong(line))).collect::<Result<Vec<_>>>()?;
        Ok(Machine::read(root, &addresses))
    }
}

/// Compares names so that `hsn10` comes after `hsn2`.
fn by_number(one: &str, other: &str) -> Ordering {
    fn parts(name: &str) -> Vec<(&str, u64)> {
        let mut parts = Vec::new();
        let mut rest = name;
        while !rest.is_empty() {
            let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
            let digits = rest[letters..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |at| letters + at);
            parts.push((&rest[..letters], rest[letters..digits].parse().unwrap_or(0)));
            rest = &rest[digits..];
        }
        parts
    }
    parts(one).cmp(&parts(other)).then_with(|| one.cmp(other))
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_string())
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by(|a, b| by_number(a, b));
    names
}

/// The NUMA node of a device, or of the nearest device above it that has one.
fn numa(device: &Path) -> Option<u32> {
    device.ancestors().find_map(|above| text(&above.join("numa_node")))?.parse().ok()
}

fn pci(device: &Path) -> Option<PciPath> {
    PciPath::of(device, numa(device))
}

/// The hardware below an interface: its own, or that of the first one below it (bonds, bridges, VLANs).
fn hardware(folder: &Path, depth: usize) -> Option<(PathBuf, u32)> {
    if let Ok(device) = fs::canonicalize(folder.join("device")) {
        let port = text(&folder.join("dev_port")).and_then(|port| port.parse().ok()).unwrap_or(0);
        return Some((device, port));
    }
    let lower = names(folder).into_iter().filter(|name| name.starts_with("lower_"));
    // Interfaces stack a few deep; a loop among them would be the kernel's mistake.
    lower.filter(|_| depth < 8).find_map(|name| hardware(&folder.join(name), depth + 1))
}

fn adapter(device: &Path, port: u32) -> Option<String> {
    Some(format!("{} port {port}", device.display()))
}

fn interfaces(root: &Path) -> Vec<Nic> {
    const UP: u32 = 1;
    const LOOPBACK: u32 = 8;
    let class = root.join("class/net");
    let interface = |name: String| {
        let folder = class.join(&name);
        if !folder.is_dir() {
            return None;
        }
        let flags =
            text(&folder.join("flags")).and_then(|flags| u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok());
        // Drivers that do not tell, and the loopback, are `unknown`.
        let link = matches!(text(&folder.join("operstate")).as_deref(), None | Some("up" | "unknown"));
        let hardware = hardware(&folder, 0);
        let infiniband = text(&folder.join("type")).as_deref() == Some("32");
        Some(Nic {
            interface: Some(name),
            device: None,
            kind: if infiniband { NicKind::Infiniband } else { NicKind::Ethernet },
            speed: text(&folder.join("speed")).and_then(|speed| speed.parse().ok()).filter(|&speed| speed > 0),
            up: link && flags.is_none_or(|flags| flags & UP != 0),
            loopback: flags.is_some_and(|flags| flags & LOOPBACK != 0),
            physical: hardware.is_some(),
            adapter: hardware.as_ref().and_then(|(device, port)| adapter(device, *port)),
            pci: hardware.and_then(|(device, _)| pci(&device)),
            addresses: Vec::new(),
        })
    };
    names(&class).into_iter().filter_map(interface).collect()
}

/// An interface of which sysfs knows nothing.
fn without_sysfs(address: &Interface) -> Nic {
    Nic {
        interface: Some(address.name.clone()),
        device: None,
        kind: NicKind::Ethernet,
        speed: None,
        up: address.up,
        loopback: address.loopback,
        physical: false,
        adapter: None,
        pci: None,
        addresses: Vec::new(),
    }
}

/// Finds the devices for remote memory access: gives them to the interfaces on the same adapter and port, and adds those
/// that have no interface.
fn attach_devices(root: &Path, nics: &mut Vec<Nic>) {
    for name in names(&root.join("class/cxi")) {
        let Ok(device) = fs::canonicalize(root.join("class/cxi").join(&name).join("device")) else { continue };
        attach(nics, &device, 0, Nic { device: Some((name, 1)), kind: NicKind::Cxi, ..bare(&device, 0) });
    }
    let class = root.join("class/infiniband");
    for name in names(&class) {
        let folder = class.join(&name);
        let Ok(device) = fs::canonicalize(folder.join("device")) else { continue };
        let ports = names(&folder.join("ports"));
        for port in ports.iter().filter_map(|port| port.parse::<u32>().ok()) {
            let about = |what: &str| text(&folder.join("ports").join(port.to_string()).join(what)).unwrap_or_default();
            let ethernet = about("link_layer") == "Ethernet";
            // Adapters with one port a function number it 1 whatever the interface says.
            let below = if ports.len() == 1 { None } else { Some(port - 1) };
            let nic = Nic {
                device: Some((name.clone(), port)),
                kind: if ethernet { NicKind::Ethernet } else { NicKind::Infiniband },
                // `400 Gb/sec (4X NDR)`
                speed: about("rate")
                    .split(' ')
                    .next()
                    .and_then(|rate| rate.parse::<f64>().ok())
                    .map(|rate| (rate * 1e3) as u64),
                up: about("state").ends_with("ACTIVE"),
                ..bare(&device, port - 1)
            };
            match below {
                Some(below) => attach(nics, &device, below, nic),
                None => attach(nics, &device, only_port(nics, &device), nic),
            }
        }
    }
}

/// The port that the interfaces on a device of one port say they are.
fn only_port(nics: &[Nic], device: &Path) -> u32 {
    let is = |port: &u32| nics.iter().any(|nic| nic.adapter == adapter(device, *port));
    (0..16).find(is).unwrap_or(0)
}

/// A NIC of which only the hardware is known.
fn bare(device: &Path, port: u32) -> Nic {
    Nic {
        interface: None,
        device: None,
        kind: NicKind::Ethernet,
        speed: None,
        up: true,
        loopback: false,
        physical: true,
        adapter: adapter(device, port),
        pci: pci(device),
        addresses: Vec::new(),
    }
}

fn attach(nics: &mut Vec<Nic>, device: &Path, port: u32, found: Nic) {
    let same = adapter(device, port);
    let mut attached = false;
    for nic in nics.iter_mut().filter(|nic| nic.interface.is_some() && nic.adapter == same) {
        attached = true;
        nic.device.clone_from(&found.device);
        nic.kind = found.kind;
        nic.speed = nic.speed.or(found.speed);
        if found.kind == NicKind::Infiniband {
            // The port works without IP over InfiniBand.
            nic.up |= found.up;
        }
    }
    if !attached {
        nics.push(found);
    }
}

/// The GPUs of a machine: displays and accelerators of the makers that have a collective library.
fn gpus(root: &Path) -> Vec<Gpu> {
    const NVIDIA: &str = "0x10de";
    const AMD: &str = "0x1002";
    let folder = root.join("bus/pci/devices");
    let gpu = |name: String| {
        let device = fs::canonicalize(folder.join(name)).ok()?;
        let about = |what: &str| text(&device.join(what)).unwrap_or_default();
        // VGA, 3D, other display controllers, and accelerators, by the first two bytes of the class.
        let classes: &[&str] = match about("vendor").as_str() {
            NVIDIA => &["0x0300", "0x0302"],
            AMD => &["0x0300", "0x0302", "0x0380", "0x1200"],
            _ => &[],
        };
        if !classes.contains(&about("class").get(..6)?) {
            return None;
        }
        pci(&device).map(|pci| Gpu { pci })
    };
    let mut gpus: Vec<Gpu> = names(&folder).into_iter().filter_map(gpu).collect();
    gpus.sort_by_key(|gpu| gpu.pci.address());
    gpus
}

/// The GPU that a process knows by this device number, which counts the GPUs in the order of the buses.
///
/// `visible` is the text of `CUDA_VISIBLE_DEVICES` or its like: the numbers of the GPUs that the process sees, in its
/// order. With names instead of numbers the GPU is not known.
pub fn gpu_of(machine: &Machine, device: usize, visible: Option<&str>) -> Option<PciAddress> {
    let number = match visible {
        Some(list) => list.split(',').nth(device)?.trim().parse().ok()?,
        None => device,
    };
    machine.gpus.get(number).map(|gpu| gpu.pci.address())
}

/// The list of visible GPUs in this process's environment.
pub fn visible_from_env() -> Option<String> {
    const NAMES: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"];
    NAMES.iter().find_map(|name| std::env::var(name).ok().filter(|list| !list.is_empty()))
}

/// The GPU of each local rank, from what the ranks say of themselves. Where two say the same although there are enough
/// for all, or one does not know, the numbers of the ranks are taken for those of the GPUs.
pub fn gpus_of_ranks(machine: &Machine, claims: &[Option<PciAddress>]) -> Vec<Option<PciAddress>> {
    let distinct: HashSet<&PciAddress> = claims.iter().flatten().collect();
    let count = machine.gpus.len();
    if count == 0 || distinct.len() == claims.len().min(count) && claims.iter().all(Option::is_some) {
        return claims.to_vec();
    }
    (0..claims.len()).map(|rank| Some(machine.gpus[rank % count].pci.address())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_by_value() {
        let mut names = ["hsn10", "hsn2", "ens1f1", "ens1f0", "lo", "hsn2a", "eth0"];
        names.sort_by(|a, b| by_number(a, b));
        assert_eq!(names, ["ens1f0", "ens1f1", "eth0", "hsn2", "hsn2a", "hsn10", "lo"]);
    }

    #[test]
    fn a_machine_without_sysfs_has_its_addresses() {
        let addr = "10.0.0.1".parse().unwrap();
        let address = Interface { name: "eth0".into(), addr, prefix: 24, scope: 0, up: true, loopback: false };
        let machine = Machine::read(Path::new("/nonexistent"), std::slice::from_ref(&address));
        assert_eq!(machine.nics.len(), 1);
        assert_eq!(machine.nics[0].addresses, [address]);
        assert!(machine.nics[0].up && !machine.nics[0].physical);
    }
}
