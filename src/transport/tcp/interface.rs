//! Which of this host's addresses a rank uses: `NCCL_SOCKET_IFNAME`, as NCCL reads it.
//!
//! A list of prefixes separated by commas; `=` before it demands exact names, `^` excludes instead of choosing. Without
//! the variable all interfaces but the loopback and those of container bridges are taken, and these only when there is
//! nothing else. Ranks of a node take turns over the interfaces, in the order of their names' appearance.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::net::IpAddr;

/// An address of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
}

/// The interfaces of this host.
pub fn all() -> Result<Vec<Interface>> {
    let found =
        if_addrs::get_if_addrs().map_err(|error| Error::System(format!("listing the network interfaces: {error}")))?;
    Ok(found.into_iter().map(|found| Interface { address: found.ip(), name: found.name }).collect())
}

fn usable(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => true,
        // Link-local addresses need a scope that means nothing on another host.
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

fn matches(spec: &str, name: &str) -> bool {
    let (excludes, spec) = spec.strip_prefix('^').map_or((false, spec), |rest| (true, rest));
    let (exact, spec) = spec.strip_prefix('=').map_or((false, spec), |rest| (true, rest));
    let mut names = spec.split(',').filter(|wanted| !wanted.is_empty());
    names.any(|wanted| if exact { name == wanted } else { name.starts_with(wanted) }) != excludes
}

/// The addresses to use, one per interface, in the order of `all`. `spec` is the text of `NCCL_SOCKET_IFNAME`.
pub fn choose(spec: Option<&str>, all: &[Interface]) -> Result<Vec<Interface>> {
    let usable = all.iter().filter(|interface| usable(&interface.address));
    let chosen: Vec<&Interface> = match spec.filter(|spec| !spec.is_empty()) {
        Some(spec) => usable.filter(|interface| matches(spec, &interface.name)).collect(),
        None => {
            let inner = |interface: &&&Interface| {
                interface.address.is_loopback() || matches("docker,br-,virbr,veth,cni,podman", &interface.name)
            };
            let (inner, outer): (Vec<_>, Vec<_>) = usable.partition(|interface| inner(&interface));
            if outer.is_empty() {
                inner
            } else {
                outer
            }
        }
    };
    let mut one_each: Vec<Interface> = Vec::new();
    for interface in chosen {
        match one_each.iter_mut().find(|known| known.name == interface.name) {
            // IPv4 first, as NCCL does.
            Some(known) if known.address.is_ipv6() && interface.address.is_ipv4() => *known = interface.clone(),
            Some(_) => {}
            None => one_each.push(interface.clone()),
        }
    }
    if one_each.is_empty() {
        let names: Vec<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
        let (spec, names) = (spec.unwrap_or(""), names.join(", "));
        return Err(Error::System(format!("NCCL_SOCKET_IFNAME={spec} leaves none of the interfaces {names}")));
    }
    Ok(one_each)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Interface> {
        let at = |name: &str, address: &str| Interface { name: name.into(), address: address.parse().unwrap() };
        vec![
            at("lo", "127.0.0.1"),
            at("docker0", "172.17.0.1"),
            at("eth0", "fd00::1"),
            at("eth0", "10.0.0.1"),
            at("eth1", "10.0.1.1"),
            at("eth10", "10.0.2.1"),
            at("ib0", "fe80::1"),
        ]
    }

    fn names(spec: Option<&str>) -> Vec<String> {
        choose(spec, &host()).unwrap().into_iter().map(|interface| interface.name).collect()
    }

    #[test]
    fn the_variable_selects_by_prefix_exactly_or_by_exclusion() {
        assert_eq!(names(None), ["eth0", "eth1", "eth10"]);
        assert_eq!(names(Some("eth1")), ["eth1", "eth10"]);
        assert_eq!(names(Some("=eth1")), ["eth1"]);
        assert_eq!(names(Some("eth0,lo")), ["lo", "eth0"]);
        assert_eq!(names(Some("^eth,docker")), ["lo"]);
        assert_eq!(names(Some("^=eth1,lo")), ["docker0", "eth0", "eth10"]);
        assert!(choose(Some("ib"), &host()).is_err(), "a link-local address alone is of no use");
    }

    #[test]
    fn the_loopback_serves_when_there_is_nothing_else_and_ipv4_goes_first() {
        assert_eq!(choose(None, &host()[..1]).unwrap()[0].name, "lo");
        assert_eq!(choose(Some("=eth0"), &host()).unwrap()[0].address.to_string(), "10.0.0.1");
    }
}
