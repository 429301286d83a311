//! The addresses of this host's network interfaces, and NCCL's variables that choose among them.
//!
//! `NCCL_SOCKET_IFNAME` is a list of prefixes separated by commas; `=` before it demands whole names, `^` excludes
//! instead of choosing. `NCCL_SOCKET_FAMILY` is `AF_INET` or `AF_INET6`. Which interfaces are used without them is a
//! matter of [`super::nics`].
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// One address of a network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name, such as `eth0`.
    pub name: String,
    /// The address.
    pub addr: IpAddr,
    /// The leading bits of the address that its subnet shares.
    pub prefix: u8,
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

    /// Whether the address means something only together with an interface.
    pub fn link_local(&self) -> bool {
        matches!(self.addr, IpAddr::V6(addr) if is_link_local(&addr))
    }

    /// Whether an address is in this one's subnet.
    pub fn shares_subnet_with(&self, other: IpAddr) -> bool {
        let differ = match (self.addr, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => u128::from(a.to_bits() ^ b.to_bits()) << 96,
            (IpAddr::V6(a), IpAddr::V6(b)) => a.to_bits() ^ b.to_bits(),
            _ => return false,
        };
        differ.leading_zeros() >= u32::from(self.prefix)
    }

    /// An address that another host of this subnet may have; none where the subnet is a single address.
    pub fn neighbour(&self) -> Option<IpAddr> {
        let (own, width) = match self.addr {
            IpAddr::V4(addr) => (u128::from(addr.to_bits()), 32),
            IpAddr::V6(addr) => (addr.to_bits(), 128),
        };
        let rest = (1_u128 << (width - u32::from(self.prefix)).min(127)) - 1;
        // The lowest and the highest address of a subnet mean all its hosts, or its router; two are too few for that.
        let is_host = |bits: &u128| rest == 1 || ![0, rest].contains(&(bits & rest));
        let found =
            [1, 2, 3].map(|change| own ^ change).into_iter().find(|bits| (bits ^ own) <= rest && is_host(bits))?;
        Some(match self.addr {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::from_bits(found as u32)),
            IpAddr::V6(_) => IpAddr::from(Ipv6Addr::from_bits(found)),
        })
    }
}

/// Whether an IPv6 address means something only together with an interface.
pub fn is_link_local(addr: &Ipv6Addr) -> bool {
    addr.segments()[0] & 0xffc0 == 0xfe80
}

/// All addresses of all interfaces, in the kernel's order.
pub fn all() -> Result<Vec<Interface>> {
    use nix::net::if_::InterfaceFlags;
    let listed =
        nix::ifaddrs::getifaddrs().map_err(|error| Error::System(format!("listing the interfaces: {error}")))?;
    let interface = |listed: nix::ifaddrs::InterfaceAddress| {
        let address = listed.address?;
        let mask = listed.netmask;
        let (addr, scope, prefix) = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => {
                let mask = mask.and_then(|mask| Some(mask.as_sockaddr_in()?.ip().to_bits().leading_ones()));
                (IpAddr::V4(v4.ip()), 0, mask.unwrap_or(32))
            }
            (_, Some(v6)) => {
                let mask = mask.and_then(|mask| Some(mask.as_sockaddr_in6()?.ip().to_bits().leading_ones()));
                let scope = if is_link_local(&v6.ip()) { v6.scope_id() } else { 0 };
                (IpAddr::V6(v6.ip()), scope, mask.unwrap_or(128))
            }
            _ => return None,
        };
        // A second address may carry a label, such as `hsn0:chn`.
        let name = listed.interface_name.split(':').next().unwrap_or("").to_string();
        Some(Interface {
            name,
            addr,
            prefix: prefix as u8,
            scope,
            up: listed.flags.contains(InterfaceFlags::IFF_UP),
            loopback: listed.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        })
    };
    Ok(listed.filter_map(interface).collect())
}

/// Whether the interface of this name can carry bytes now: it is up, and so is its link, or it does not tell.
pub fn is_running(name: &str) -> bool {
    use nix::net::if_::InterfaceFlags;
    let Ok(mut listed) = nix::ifaddrs::getifaddrs() else { return true };
    let runs = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    listed.any(|listed| listed.interface_name.split(':').next() == Some(name) && listed.flags.contains(runs))
}

/// What `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY` say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    text: String,
    exclude: bool,
    exact: bool,
    names: Vec<String>,
    family: Option<Family>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Filter {
    /// From the texts of the two variables. Without names all are let through; a family that is not one is none.
    pub fn new(names: Option<&str>, family: Option<&str>) -> Filter {
        let text = names.unwrap_or("");
        let (exclude, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        // NCCL allows a port of the adapter after a colon; sockets have none.
        let names = rest.split(',').map(|name| name.split(':').next().unwrap_or(name)).filter(|name| !name.is_empty());
        let family = match family {
            Some("AF_INET") => Some(Family::V4),
            Some("AF_INET6") => Some(Family::V6),
            _ => None,
        };
        Filter { text: text.to_string(), exclude, exact, names: names.map(str::to_string).collect(), family }
    }

    /// From this process's environment.
    pub fn from_env() -> Filter {
        let var = |name| std::env::var(name).ok();
        Filter::new(var("NCCL_SOCKET_IFNAME").as_deref(), var("NCCL_SOCKET_FAMILY").as_deref())
    }

    /// The same without the names.
    pub fn family_alone(&self) -> Filter {
        Filter { family: self.family, ..Filter::default() }
    }

    /// Whether the user lists the interfaces to use, rather than those to leave out.
    pub fn chooses(&self) -> bool {
        !self.exclude && !self.names.is_empty()
    }

    /// Where a name stands in the list.
    pub fn position(&self, name: &str) -> Option<usize> {
        let fits = |wanted: &String| if self.exact { name == wanted } else { name.starts_with(wanted.as_str()) };
        self.names.iter().position(fits)
    }

    /// Whether an interface of this name may be used.
    pub fn allows(&self, name: &str) -> bool {
        self.names.is_empty() || self.position(name).is_some() != self.exclude
    }

    /// The address to use of several of one interface: IPv4 before IPv6, and one that is valid on one link only last.
    pub fn address<'a>(&self, addresses: &'a [Interface]) -> Option<&'a Interface> {
        let fits = |address: &&Interface| match self.family {
            Some(Family::V4) => address.addr.is_ipv4(),
            Some(Family::V6) => address.addr.is_ipv6(),
            None => true,
        };
        let preference = |address: &&Interface| (address.link_local(), address.addr.is_ipv6());
        addresses.iter().filter(fits).min_by_key(preference)
    }

    /// The variables as the user wrote them, for messages.
    pub fn text(&self) -> String {
        let family = match self.family {
            Some(Family::V4) => " NCCL_SOCKET_FAMILY=AF_INET",
            Some(Family::V6) => " NCCL_SOCKET_FAMILY=AF_INET6",
            None => "",
        };
        format!("NCCL_SOCKET_IFNAME={}{family}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(addr: &str, prefix: u8) -> Interface {
        let addr: IpAddr = addr.parse().unwrap();
        Interface { name: "eth0".into(), addr, prefix, scope: 0, up: true, loopback: addr.is_loopback() }
    }

    fn allowed(names: &str) -> Vec<&'static str> {
        let filter = Filter::new(Some(names), None);
        ["lo", "docker0", "eth0", "eth1", "eth10"].into_iter().filter(|name| filter.allows(name)).collect()
    }

    #[test]
    fn names_select_by_prefix_exactly_or_by_exclusion() {
        assert_eq!(allowed(""), ["lo", "docker0", "eth0", "eth1", "eth10"]);
        assert_eq!(allowed("eth1"), ["eth1", "eth10"]);
        assert_eq!(allowed("=eth1"), ["eth1"]);
        assert_eq!(allowed("=eth1:2"), ["eth1"], "a port of the adapter is passed over");
        assert_eq!(allowed("^eth,docker"), ["lo"]);
        assert_eq!(allowed("^=eth1,lo"), ["docker0", "eth0", "eth10"]);
        assert!(allowed("ib").is_empty());
    }

    #[test]
    fn the_address_of_an_interface_is_ipv4_before_ipv6_before_link_local() {
        let addresses = [at("fe80::1", 64), at("fd00::1", 64), at("10.0.0.1", 24)];
        let chosen = |family| Filter::new(None, family).address(&addresses).unwrap().addr.to_string();
        assert_eq!(chosen(None), "10.0.0.1");
        assert_eq!(chosen(Some("AF_INET6")), "fd00::1");
        assert_eq!(Filter::new(None, Some("AF_INET")).address(&addresses[..2]), None);
        assert_eq!(Filter::default().address(&addresses[..1]).unwrap().addr.to_string(), "fe80::1");
    }

    #[test]
    fn a_subnet_is_what_shares_the_leading_bits() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(at("10.0.0.1", 24).shares_subnet_with(ip("10.0.0.200")));
        assert!(!at("10.0.0.1", 24).shares_subnet_with(ip("10.0.1.1")));
        assert!(at("10.0.0.1", 8).shares_subnet_with(ip("10.200.1.1")));
        assert!(at("fd00::1", 64).shares_subnet_with(ip("fd00::2")));
        assert!(!at("fd00::1", 64).shares_subnet_with(ip("10.0.0.1")));
        assert!(!at("10.0.0.1", 32).shares_subnet_with(ip("10.0.0.2")));
        assert!(at("10.0.0.1", 0).shares_subnet_with(ip("192.168.0.1")));
    }

    #[test]
    fn a_neighbour_is_another_host_of_the_subnet() {
        let neighbour = |addr: &str, prefix| at(addr, prefix).neighbour().map(|addr| addr.to_string());
        let beside = |addr: &str, prefix, other: &str| assert_eq!(neighbour(addr, prefix).as_deref(), Some(other));
        beside("10.0.0.1", 16, "10.0.0.3");
        beside("10.0.0.2", 16, "10.0.0.3");
        beside("10.0.1.0", 16, "10.0.1.1");
        beside("10.0.0.254", 24, "10.0.0.252");
        beside("10.0.0.5", 30, "10.0.0.6");
        beside("10.0.0.4", 31, "10.0.0.5");
        beside("fd00::1", 64, "fd00::3");
        beside("fd00::1", 127, "fd00::");
        assert_eq!(neighbour("10.0.0.4", 32), None);
        assert_eq!(neighbour("fd00::1", 128), None);
    }

    #[test]
    fn this_machine_has_an_interface_that_is_up() {
        let all = all().unwrap();
        assert!(all.iter().any(|interface| interface.up));
        assert!(all
            .iter()
            .filter(|interface| interface.loopback && interface.up)
            .all(|loopback| is_running(&loopback.name)));
        assert!(!is_running("no-such-nic"));
    }
}
