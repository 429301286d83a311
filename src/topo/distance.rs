//! How far two devices of a machine are from each other on PCI.
//!
//! The classes and their names are those of NCCL and `nvidia-smi topo`. They follow from the place of both devices in
//! the tree of bridges, which is their path below `/sys/devices`, and from their NUMA nodes.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The address of a device on PCI. The order is that of the buses, in which drivers number GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = ();

    /// Reads `0000:c1:00.0`, as sysfs and the GPU runtimes write it, in either case and with a domain of any length.
    fn from_str(text: &str) -> Result<PciAddress, ()> {
        let byte = |text: &str| u8::from_str_radix(text, 16).map_err(|_| ());
        let (domain, rest) = text.split_once(':').ok_or(())?;
        let (bus, rest) = rest.split_once(':').ok_or(())?;
        let (device, function) = rest.split_once('.').ok_or(())?;
        let domain = u32::from_str_radix(domain, 16).map_err(|_| ())?;
        Ok(PciAddress { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// Where a device is: its host bridge, the bridges from there to it, itself, and its NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciPath {
    host_bridge: String,
    chain: Vec<PciAddress>,
    /// The NUMA node whose memory is nearest; `None` where the machine does not say.
    pub numa: Option<u32>,
}

impl PciPath {
    /// From a device's path below `/sys/devices`; `None` for a device that is not on PCI. What hangs below the PCI
    /// device (`virtio2`, say) makes no difference.
    pub fn of(device: &Path, numa: Option<u32>) -> Option<PciPath> {
        let parts: Vec<&str> = device.iter().filter_map(|part| part.to_str()).collect();
        let root = parts.iter().position(|part| part.starts_with("pci") && part.contains(':'))?;
        let chain: Vec<PciAddress> = parts[root..].iter().filter_map(|part| part.parse().ok()).collect();
        (!chain.is_empty()).then(|| PciPath { host_bridge: parts[root].to_string(), chain, numa })
    }

    /// Whether there is a bridge between the root bus and the device. Hypervisors put devices directly on the root bus, whatever
    /// is above them in the hardware.
    pub fn is_below_bridge(&self) -> bool {
        self.chain.len() > 1
    }

    /// The device's own address.
    pub fn address(&self) -> PciAddress {
        *self.chain.last().expect("a path has a device")
    }
}

/// How far two devices are apart, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Behind one PCIe switch.
    Pix,
    /// Below one port of a host bridge, with several switches in between.
    Pxb,
    /// Below one host bridge, through the processor.
    Phb,
    /// Below two host bridges of one NUMA node.
    Node,
    /// On two NUMA nodes.
    Sys,
}

impl Distance {
    /// The distance between two devices.
    pub fn between(one: &PciPath, other: &PciPath) -> Distance {
        if one.host_bridge != other.host_bridge {
            return if one.numa.is_some() && one.numa == other.numa { Distance::Node } else { Distance::Sys };
        }
        let shared = one.chain.iter().zip(&other.chain).take_while(|(one, other)| one == other).count();
        // Below the bridge that both share: a port of its switch, then the device.
        let near = |path: &PciPath| path.chain.len() - shared <= 2;
        match shared {
            0 => Distance::Phb,
            _ if near(one) && near(other) => Distance::Pix,
            _ => Distance::Pxb,
        }
    }

    /// Whether the bytes stay below one port of the host bridge.
    pub fn avoids_the_processor(self) -> bool {
        self <= Distance::Pxb
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Distance::Pix => "PIX",
            Distance::Pxb => "PXB",
            Distance::Phb => "PHB",
            Distance::Node => "NODE",
            Distance::Sys => "SYS",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(below_devices: &str, numa: Option<u32>) -> PciPath {
        PciPath::of(&Path::new("/sys/devices").join(below_devices), numa).unwrap()
    }

    #[test]
    fn distances_are_named_as_nccl_names_them() {
        let gpu = path("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0", Some(0));
        let at = |other: &str, numa| Distance::between(&gpu, &path(other, numa));
        assert_eq!(at("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", Some(0)), Distance::Pix);
        assert_eq!(at("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.1", Some(0)), Distance::Pix);
        let deeper = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0/0000:1a:00.0/0000:1c:00.0";
        assert_eq!(at(deeper, Some(0)), Distance::Pxb);
        assert_eq!(at("pci0000:15/0000:15:03.0/0000:20:00.0", Some(0)), Distance::Phb);
        assert_eq!(at("pci0000:29/0000:29:01.0/0000:2a:00.0", Some(0)), Distance::Node);
        assert_eq!(at("pci0000:97/0000:97:01.0/0000:9a:00.0", Some(1)), Distance::Sys);
        assert_eq!(at("pci0000:29/0000:29:01.0/0000:2a:00.0", None), Distance::Sys, "not known to be the same node");
    }

    #[test]
    fn a_path_ends_at_the_pci_device_and_others_have_none() {
        let virtio = path("pci0000:00/0000:00:03.0/virtio2/net/eth0", None);
        assert_eq!(virtio.address().to_string(), "0000:00:03.0");
        assert_eq!(PciPath::of(Path::new("/sys/devices/virtual/net/lo"), None), None);
        assert_eq!(PciPath::of(Path::new("/sys/devices/platform/serial8250"), None), None);
    }

    #[test]
    fn addresses_are_read_in_every_spelling_and_sort_by_bus() {
        let read = |text: &str| text.parse::<PciAddress>();
        assert_eq!(read("00000000:C1:00.0"), read("0000:c1:00.0"));
        assert!(read("0000:41:00.0").unwrap() < read("0000:c1:00.0").unwrap());
        assert!(read("0000:ff:00.0").unwrap() < read("0001:00:00.0").unwrap());
        for wrong in ["", "c1:00.0", "0000:c1:00", "0000:xx:00.0", "pci0000:c0"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
