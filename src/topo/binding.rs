//! How sockets are held to a NIC.
//!
//! Linux chooses the NIC by where bytes go, not by the address they come from. Where each NIC has a subnet of its own
//! that is the right one. Where several NICs share a subnet, all bytes would leave by the first of them; there sockets
//! are bound to the device. A socket bound to a device hears nothing that comes in by another one, so this is done only
//! where the host lets others know each address by its own NIC alone: neither answers for it on another one
//! (`arp_ignore` 1 or more) nor asks in its name there (`arp_announce` 2). With IPv6 that is always so.
//!
//! A peer may be in the subnet of another NIC of this host: by where bytes go, that NIC would carry them and ours would
//! idle. Where the host routes by source address, bytes from our address leave by our NIC all the same, so the kernel is
//! asked. The peer's answers come to our address by the routes of the peer, which is right where the network carries
//! each address and all hosts are set up alike; a host without such routes is taken to live in a network without.
#![forbid(unsafe_code)]

use super::interface::{Filter, Interface};
use super::machine::Machine;
use super::nics::{address, Purpose};
use super::pinning::{pin, Rules};
use super::route::{self, By};
use crate::error::{Error, Result};
use std::fs;
use std::net::IpAddr;
use std::path::Path;

/// To what a socket is bound before it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// To nothing: the kernel takes the interface that leads there.
    Any,
    /// To the NIC's address.
    Address,
    /// To the NIC's address and to the NIC.
    Device,
}

/// A NIC for sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The NIC's address.
    pub address: Interface,
    /// The addresses of this host.
    host: Vec<Interface>,
    /// Whether sockets need to, and may, be bound to the device.
    device: bool,
    /// Why they may not, though they need to.
    pub note: Option<String>,
    /// The same for the other NICs of the node, the next one first.
    pub further: Vec<Binding>,
}

impl Binding {
    /// A binding to one of this host's addresses. `sysctl` is the root of the kernel's settings, `/proc/sys`.
    pub fn new(address: Interface, host: Vec<Interface>, sysctl: &Path) -> Binding {
        let beside = |other: &&Interface| {
            other.up && other.name != address.name && other.shares_subnet_with(address.addr) && !address.loopback
        };
        let crowd: Vec<&str> = host.iter().filter(beside).map(|other| other.name.as_str()).collect();
        let setting = |interface: &str, name: &str| {
            let path = sysctl.join("net/ipv4/conf").join(interface).join(name);
            fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(0)
        };
        // The kernel takes the larger of an interface's own value and that for all.
        let value = |interface: &str, name: &str| setting(interface, name).max(setting("all", name));
        let is_lax = |name: &&str| value(name, "arp_ignore") < 1 || value(name, "arp_announce") < 2;
        let lax = match address.addr {
            IpAddr::V4(_) => crowd.iter().copied().chain([address.name.as_str()]).find(is_lax),
            IpAddr::V6(_) => None,
        };
        let note = lax.filter(|_| !crowd.is_empty()).map(|lax| {
            format!(
                "{} and {} are in one subnet, and {lax} speaks for all addresses (net.ipv4.conf.{lax}.arp_ignore is \
                 not 1 or arp_announce not 2): bytes may take either",
                address.name,
                crowd.join(", ")
            )
        });
        let device = !crowd.is_empty() && note.is_none();
        Binding { address, host, device, note, further: Vec::new() }
    }

    /// A binding of one rank to a NIC of this machine.
    pub fn to_nic(machine: &Machine, nic: usize, filter: &Filter) -> Result<Binding> {
        let nic = &machine.nics[nic];
        let address = address(nic, filter)
            .ok_or_else(|| Error::InvalidUsage(format!("{} has no address for TCP", nic.name())))?;
        let host = machine.nics.iter().flat_map(|nic| nic.addresses.iter().cloned()).collect();
        Ok(Binding::new(address.clone(), host, Path::new("/proc/sys")))
    }

    /// A binding to the first NIC of this machine.
    pub fn of_first_nic() -> Result<Binding> {
        let machine = Machine::this()?;
        let rules = Rules::new("auto", Filter::from_env())?;
        let nic = pin(&machine, &[None], &rules, Purpose::Tcp)?.pins[0].nic;
        Binding::to_nic(&machine, nic, &rules.filter)
    }

    /// Whether bytes for this address do not leave the machine.
    pub fn is_of_this_host(&self, peer: IpAddr) -> bool {
        self.host.iter().any(|own| own.addr == peer)
    }

    /// How to bind a socket that talks to `peer`.
    pub fn towards(&self, peer: IpAddr) -> Source {
        self.towards_if(peer, |nic, to| route::leaves_by(nic, to, By::Source))
    }

    /// The same; `leaves_by` says whether what is sent from a NIC's address to another address leaves by that NIC.
    fn towards_if(&self, peer: IpAddr, leaves_by: impl FnOnce(&Interface, IpAddr) -> bool) -> Source {
        let ours = &self.address;
        if peer.is_ipv4() != ours.addr.is_ipv4() {
            Source::Any
        } else if self.is_of_this_host(peer) {
            // Bytes to this host itself come in by the loopback, whatever the address.
            Source::Address
        } else if ours.shares_subnet_with(peer) {
            if self.device {
                Source::Device
            } else {
                Source::Address
            }
        } else if self.host.iter().any(|own| own.up && own.shares_subnet_with(peer)) && !leaves_by(ours, peer) {
            // Bytes would leave by the NIC there, and answers to our address come in by another one.
            Source::Any
        } else {
            Source::Address
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, addr: &str) -> Interface {
        let addr: IpAddr = addr.parse().unwrap();
        let prefix = if addr.is_ipv4() { 24 } else { 64 };
        Interface { name: name.into(), addr, prefix, scope: 0, up: true, loopback: addr.is_loopback() }
    }

    /// How the first of these interfaces is bound towards a peer, with `arp_ignore` and
    /// `arp_announce` set for all, on a host that routes by destination alone.
    fn towards(host: &[(&str, &str)], arp: [u32; 2], peer: &str) -> Source {
        towards_if(host, arp, peer, |_, _| false)
    }

    /// The same on a host with these routes.
    fn towards_if(
        host: &[(&str, &str)],
        [ignore, announce]: [u32; 2],
        peer: &str,
        leaves_by: impl FnOnce(&Interface, IpAddr) -> bool,
    ) -> Source {
        let number = {
            use std::sync::atomic::{AtomicU32, Ordering};
            static NEXT: AtomicU32 = AtomicU32::new(0);
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
        let root = std::env::temp_dir().join(format!("strata-binding-{}-{number}", std::process::id()));
        std::fs::create_dir_all(root.join("net/ipv4/conf/all")).unwrap();
        for (name, value) in [("arp_ignore", ignore), ("arp_announce", announce)] {
            std::fs::write(root.join("net/ipv4/conf/all").join(name), format!("{value}\n")).unwrap();
        }
        let host: Vec<Interface> = host.iter().map(|(name, addr)| interface(name, addr)).collect();
        let binding = Binding::new(host[0].clone(), host, &root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(binding.note.is_some(), !binding.device && towards_needs_device(&binding));
        binding.towards_if(peer.parse().unwrap(), leaves_by)
    }

    const LAX: [u32; 2] = [0, 0];
    const STRICT: [u32; 2] = [1, 2];

    fn towards_needs_device(binding: &Binding) -> bool {
        let ours = &binding.address;
        binding.host.iter().any(|other| other.name != ours.name && other.shares_subnet_with(ours.addr))
    }

    #[test]
    fn nics_of_one_subnet_are_bound_as_devices_where_each_answers_for_itself() {
        let host = [("hsn1", "10.0.0.11"), ("hsn0", "10.0.0.10"), ("lo", "127.0.0.1")];
        assert_eq!(towards(&host, STRICT, "10.0.0.20"), Source::Device);
        for lax in [LAX, [1, 0], [1, 1], [0, 2]] {
            assert_eq!(towards(&host, lax, "10.0.0.20"), Source::Address, "{lax:?}");
        }
        assert_eq!(towards(&host, STRICT, "10.0.0.10"), Source::Address, "to this host itself");
        let host6 = [("hsn1", "fd00::11"), ("hsn0", "fd00::10")];
        assert_eq!(towards(&host6, LAX, "fd00::20"), Source::Device);
    }

    #[test]
    fn nics_of_subnets_of_their_own_need_no_device_and_reach_other_subnets_by_the_nic_there() {
        let host = [("hsn1", "10.0.1.11"), ("hsn0", "10.0.0.10"), ("lo", "127.0.0.1")];
        assert_eq!(towards(&host, STRICT, "10.0.1.20"), Source::Address);
        assert_eq!(towards(&host, STRICT, "10.0.0.20"), Source::Any);
        assert_eq!(towards(&host, STRICT, "10.9.0.20"), Source::Address, "through a router");
        assert_eq!(towards(&host, STRICT, "fd00::20"), Source::Any);
        assert_eq!(towards(&[("lo", "127.0.0.1"), ("lo", "127.0.0.2")], LAX, "127.0.0.1"), Source::Address);
    }

    #[test]
    fn peers_in_another_nics_subnet_are_reached_by_our_nic_where_routes_go_by_source() {
        let host = [("hsn1", "10.0.1.11"), ("hsn0", "10.0.0.10"), ("lo", "127.0.0.1")];
        let by_source = |nic: &Interface, to: IpAddr| {
            assert_eq!((nic.name.as_str(), to.to_string()), ("hsn1", "10.0.0.20".to_string()));
            true
        };
        assert_eq!(towards_if(&host, STRICT, "10.0.0.20", by_source), Source::Address);
        // Where only one thing can be right the kernel is not asked.
        let never = |_: &Interface, to: IpAddr| -> bool { panic!("asked for the way to {to}") };
        for (peer, source) in
            [("10.0.1.20", Source::Address), ("10.9.0.20", Source::Address), ("fd00::20", Source::Any)]
        {
            assert_eq!(towards_if(&host, STRICT, peer, never), source, "{peer}");
        }
        let crowded = [("hsn1", "10.0.0.11"), ("hsn0", "10.0.0.10")];
        assert_eq!(towards_if(&crowded, STRICT, "10.0.0.20", never), Source::Device);
    }
}
