//! By which interface the kernel sends what goes from one address to another.
//!
//! It is asked over netlink, as `ip route get DESTINATION from SOURCE` does, and sends nothing for it. So what an
//! administrator has set up counts, such as tables by source address (`ip rule add from ADDRESS table TABLE`). A kernel
//! that does not answer, since a container forbids netlink, say, is as one that knows no way.
#![forbid(unsafe_code)]

use super::interface::Interface;
use netlink_packet_core::{Emitable, NetlinkBuffer, NetlinkHeader, Parseable, NLM_F_REQUEST};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage};
use netlink_packet_route::AddressFamily;
use rustix::net::{recv, send, socket_with, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::IpAddr;

/// What a route is looked for by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The source address and the destination, as the kernel does for a bound socket.
    Source,
    /// The destination alone, as UCX does.
    Destination,
}

/// Whether what is sent from `nic` to `to` leaves by that NIC.
pub fn leaves_by(nic: &Interface, to: IpAddr, by: By) -> bool {
    let number = nix::net::if_::if_nametoindex(nic.name.as_str()).ok();
    let from = (by == By::Source).then_some(nic.addr);
    number.is_some() && number == interface_between(from, to)
}

/// The number of the interface by which bytes leave for `to`, from our address `from` or from whichever the kernel takes.
fn interface_between(from: Option<IpAddr>, to: IpAddr) -> Option<u32> {
    if from.is_some_and(|from| from.is_ipv4() != to.is_ipv4()) {
        return None;
    }
    // Protocol 0, NETLINK_ROUTE. The kernel answers before `send` returns, so the socket lives for a few microseconds.
    let socket = socket_with(rustix::net::AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).ok()?;
    send(&socket, &question(from, to), SendFlags::empty()).ok()?;
    let mut answer = [0; 4096];
    let (bytes, _) = recv(&socket, &mut answer, RecvFlags::DONTWAIT).ok()?;
    interface_in(&answer[..bytes])
}

fn question(from: Option<IpAddr>, to: IpAddr) -> Vec<u8> {
    let (address_family, bits) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    let mut route = RouteMessage::default();
    route.header = RouteHeader {
        address_family,
        source_prefix_length: if from.is_some() { bits } else { 0 },
        destination_prefix_length: bits,
        ..RouteHeader::default()
    };
    route.attributes = from.map(|from| RouteAttribute::Source(RouteAddress::from(from))).into_iter().collect();
    route.attributes.push(RouteAttribute::Destination(RouteAddress::from(to)));
    let mut header = NetlinkHeader::default();
    header.message_type = libc::RTM_GETROUTE;
    header.flags = NLM_F_REQUEST;
    let start = header.buffer_len();
    let mut bytes = vec![0; start + route.buffer_len()];
    header.length = bytes.len() as u32;
    header.emit(&mut bytes);
    route.emit(&mut bytes[start..]);
    bytes
}

// Only what is about routes is decoded: with an enum of all messages the library would be larger by a tenth.
fn interface_in(answer: &[u8]) -> Option<u32> {
    let message = NetlinkBuffer::new_checked(answer).ok()?;
    if message.message_type() != libc::RTM_NEWROUTE {
        return None;
    }
    let route = RouteMessage::parse(message.payload()).ok()?;
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(number) => Some(*number),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> Interface {
        let all = super::super::interface::all().unwrap();
        all.into_iter().find(|interface| interface.loopback && interface.addr.is_ipv4()).expect("a loopback")
    }

    #[test]
    fn the_kernel_tells_by_which_interface_bytes_leave() {
        let nic = loopback();
        if interface_between(Some(nic.addr), nic.addr).is_none() {
            println!("SKIPPED: the kernel does not answer over netlink");
            return;
        }
        assert!(leaves_by(&nic, nic.addr, By::Source) && leaves_by(&nic, nic.addr, By::Destination));
        let other = Interface { name: "no-such-nic".to_string(), ..nic.clone() };
        assert!(!leaves_by(&other, nic.addr, By::Source), "another interface");
        // Nothing that may be sent: the kernel refuses an address that is not its own.
        assert_eq!(interface_between("192.0.2.1".parse().ok(), nic.addr), None);
        assert_eq!(interface_between("::1".parse().ok(), nic.addr), None, "of two families");
    }

    #[test]
    fn what_is_no_route_names_no_interface() {
        assert_eq!(interface_in(&[]), None);
        // What was asked has the form of an answer, and is none.
        let asked = question("10.0.0.1".parse().ok(), "10.0.0.2".parse().unwrap());
        assert_eq!(interface_in(&asked), None);
        assert_eq!(interface_in(&asked[..20]), None, "cut short");
    }
}
