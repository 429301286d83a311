//! Which host this is, and by which address the others reach it.
//!
//! Two ranks are on the same node exactly when their [`host_id`]s are equal. That is NCCL's rule: `NCCL_HOSTID`, else
//! host name and boot id. The address follows NCCL's variables too: `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY`.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::Path;

/// The identity of this host, equal on all ranks of a node.
pub fn host_id() -> String {
    host_id_at(Path::new("/proc"), std::env::var("NCCL_HOSTID").ok().as_deref())
}

/// As [`host_id`], with the root of `/proc` and the value of `NCCL_HOSTID` given.
pub fn host_id_at(proc_root: &Path, given: Option<&str>) -> String {
    if let Some(given) = given.filter(|given| !given.is_empty()) {
        return given.to_string();
    }
    let read = |name: &str| {
        let text = std::fs::read_to_string(proc_root.join("sys/kernel").join(name)).unwrap_or_default();
        text.trim().to_string()
    };
    format!("{}-{}", read("hostname"), read("random/boot_id"))
}

/// One address of a network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name, such as `eth0`.
    pub name: String,
    /// The address.
    pub addr: IpAddr,
    /// The index that a link-local IPv6 address needs to be reached; 0 for all others.
    pub scope: u32,
    /// Whether the interface is up.
    pub up: bool,
    /// Whether only this host can reach the address.
    pub loopback: bool,
}

impl Interface {
    /// The address with a port.
    pub fn with_port(&self, port: u16) -> SocketAddr {
        match self.addr {
            IpAddr::V4(addr) => SocketAddr::from((addr, port)),
            IpAddr::V6(addr) => SocketAddr::V6(SocketAddrV6::new(addr, port, 0, self.scope)),
        }
    }

    fn link_local(&self) -> bool {
        matches!(self.addr, IpAddr::V6(addr) if is_link_local(&addr))
    }
}

/// Whether an IPv6 address means something only together with an interface.
pub fn is_link_local(addr: &Ipv6Addr) -> bool {
    addr.segments()[0] & 0xffc0 == 0xfe80
}

/// All addresses of all interfaces, in the kernel's order.
pub fn interfaces() -> Result<Vec<Interface>> {
    use nix::net::if_::InterfaceFlags;
    let listed =
        nix::ifaddrs::getifaddrs().map_err(|error| Error::System(format!("listing the interfaces: {error}")))?;
    let interface = |listed: nix::ifaddrs::InterfaceAddress| {
        let address = listed.address?;
        let (addr, scope) = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => (IpAddr::V4(v4.ip()), 0),
            (_, Some(v6)) => (IpAddr::V6(v6.ip()), if is_link_local(&v6.ip()) { v6.scope_id() } else { 0 }),
            _ => return None,
        };
        Some(Interface {
            name: listed.interface_name,
            addr,
            scope,
            up: listed.flags.contains(InterfaceFlags::IFF_UP),
            loopback: listed.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        })
    };
    Ok(listed.filter_map(interface).collect())
}

/// The interface address this process listens on, by NCCL's variables.
pub fn local_interface() -> Result<Interface> {
    let names = std::env::var("NCCL_SOCKET_IFNAME").ok();
    let family = std::env::var("NCCL_SOCKET_FAMILY").ok();
    let interfaces = interfaces()?;
    choose(&interfaces, names.as_deref(), family.as_deref()).cloned().ok_or_else(|| {
        let mut known: Vec<&str> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        Error::InvalidUsage(format!(
            "no network interface fits NCCL_SOCKET_IFNAME={} NCCL_SOCKET_FAMILY={}; there are {}",
            names.unwrap_or_default(),
            family.unwrap_or_default(),
            known.join(", ")
        ))
    })
}

/// The interface that `NCCL_SOCKET_IFNAME` (`names`) and `NCCL_SOCKET_FAMILY` (`family`) select.
///
/// `names` is a list of prefixes; `^` before it excludes them, `=` makes them whole names. Without it: the first that
/// is up and neither loopback nor a container's or virtual machine's bridge, else a loopback one. IPv4 goes before
/// IPv6, and an address that is valid on one link only comes last.
pub fn choose<'a>(interfaces: &'a [Interface], names: Option<&str>, family: Option<&str>) -> Option<&'a Interface> {
    let family_fits = |interface: &&Interface| match family {
        Some("AF_INET") => interface.addr.is_ipv4(),
        Some("AF_INET6") => interface.addr.is_ipv6(),
        _ => true,
    };
    let preference = |interface: &&'a Interface| (interface.link_local(), interface.addr.is_ipv6());
    let usable = || interfaces.iter().filter(|interface| interface.up).filter(family_fits);
    if let Some(names) = names.filter(|names| !names.is_empty()) {
        let list = NameList::parse(names);
        return usable()
            .filter(|interface| list.allows(&interface.name))
            .min_by_key(|interface| (list.position(&interface.name), interface.loopback, preference(interface)));
    }
    let bridge = |interface: &&Interface| interface.name.starts_with("docker") || interface.name.starts_with("virbr");
    usable()
        .filter(|interface| !interface.loopback && !bridge(interface))
        .min_by_key(preference)
        .or_else(|| usable().filter(|interface| interface.loopback).min_by_key(preference))
}

struct NameList<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> NameList<'a> {
    fn parse(text: &'a str) -> NameList<'a> {
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        // NCCL allows a port of the adapter after a colon; sockets have none.
        let names = text.split(',').map(|name| name.split(':').next().unwrap_or(name)).filter(|name| !name.is_empty());
        NameList { exclude, exact, names: names.collect() }
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|wanted| if self.exact { name == *wanted } else { name.starts_with(wanted) })
    }

    fn allows(&self, name: &str) -> bool {
        self.position(name).is_some() != self.exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, addr: &str) -> Interface {
        let addr: IpAddr = addr.parse().unwrap();
        Interface { name: name.to_string(), addr, scope: 0, up: true, loopback: addr.is_loopback() }
    }

    fn host() -> Vec<Interface> {
        let mut down = interface("eth9", "10.9.0.1");
        down.up = false;
        vec![
            interface("lo", "127.0.0.1"),
            down,
            interface("docker0", "172.17.0.1"),
            interface("virbr0", "192.168.122.1"),
            interface("eth1", "fe80::1"),
            interface("eth1", "fd00::1"),
            interface("eth0", "10.0.0.1"),
            interface("eth10", "10.0.0.10"),
            interface("lo", "::1"),
        ]
    }

    fn chosen(names: Option<&str>, family: Option<&str>) -> Option<String> {
        choose(&host(), names, family).map(|interface| interface.addr.to_string())
    }

    #[test]
    fn by_default_the_first_real_interface_that_is_up_is_taken() {
        assert_eq!(chosen(None, None).unwrap(), "10.0.0.1");
        assert_eq!(chosen(Some(""), None).unwrap(), "10.0.0.1");
        assert_eq!(chosen(None, Some("AF_INET6")).unwrap(), "fd00::1", "not the link-local one before it");
    }

    #[test]
    fn a_host_with_only_bridges_and_loopback_uses_loopback() {
        let interfaces: Vec<_> = host().into_iter().filter(|one| !one.name.starts_with("eth")).collect();
        assert_eq!(choose(&interfaces, None, None).unwrap().addr.to_string(), "127.0.0.1");
        assert_eq!(choose(&interfaces, None, Some("AF_INET6")).unwrap().addr.to_string(), "::1");
    }

    #[test]
    fn interface_names_select_by_prefix_exactly_or_by_exclusion() {
        assert_eq!(chosen(Some("docker"), None).unwrap(), "172.17.0.1");
        assert_eq!(chosen(Some("eth10,eth1"), None).unwrap(), "10.0.0.10", "the list's order counts");
        assert_eq!(chosen(Some("=eth1"), None).unwrap(), "fd00::1");
        assert_eq!(chosen(Some("eth1:2"), None).unwrap(), "10.0.0.10", "a port of the adapter is passed over");
        assert_eq!(chosen(Some("^eth,docker,lo"), None).unwrap(), "192.168.122.1");
        assert_eq!(chosen(Some("^=eth0"), None).unwrap(), "172.17.0.1");
        assert_eq!(chosen(Some("lo"), None).unwrap(), "127.0.0.1");
        assert_eq!(chosen(Some("ib"), None), None);
        assert_eq!(chosen(Some("docker0"), Some("AF_INET6")), None);
    }

    #[test]
    fn the_host_identity_is_the_given_one_else_name_and_boot_id() {
        let root = std::env::temp_dir().join(format!("strata-host-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/kernel/random")).unwrap();
        std::fs::write(root.join("sys/kernel/hostname"), "node7\n").unwrap();
        std::fs::write(root.join("sys/kernel/random/boot_id"), "1-2-3\n").unwrap();
        assert_eq!(host_id_at(&root, None), "node7-1-2-3");
        assert_eq!(host_id_at(&root, Some("")), "node7-1-2-3");
        assert_eq!(host_id_at(&root, Some("rack")), "rack");
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn this_machine_has_a_usable_interface() {
        assert!(interfaces().unwrap().iter().any(|interface| interface.up));
    }
}
