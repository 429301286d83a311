//! What listens while a process has communicators is what SECURITY.md says, at the addresses that it says.

use crate::again::{again, passes};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use strata::bootstrap::meeting_interface;
use strata::communicator::{Comm, CommOptions, InitParams, UniqueId};
use strata::topo::machine::Machine;

const ROLE: &str = "TEST_LISTENING";
const LIMIT: Duration = Duration::from_secs(60);
static NEVER: AtomicBool = AtomicBool::new(false);

/// The listeners' names in SECURITY.md's table.
fn documented() -> Vec<String> {
    let text = include_str!("../../SECURITY.md");
    let table = text.split("| listener |").nth(1).expect("the table is there").lines().skip(2);
    let rows = table.take_while(|line| line.starts_with('|'));
    rows.map(|line| line.split('|').nth(1).expect("a first column").trim().to_string()).collect()
}

fn address(hex: &str) -> SocketAddr {
    let (ip, port) = hex.split_once(':').expect("an address and a port");
    let word = |at: usize| u32::from_str_radix(&ip[8 * at..8 * at + 8], 16).expect("a word").to_ne_bytes();
    let ip = match ip.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0))),
        _ => {
            let bytes: Vec<u8> = (0..4).flat_map(word).collect();
            IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).expect("16 bytes")))
        }
    };
    SocketAddr::new(ip, u16::from_str_radix(port, 16).expect("a port"))
}

/// The listening TCP sockets of this process, by the kernel's own tables.
fn listening() -> BTreeSet<SocketAddr> {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("the process's descriptors").flatten();
    let names = descriptors.filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.to_str()?.to_string()));
    let ours: BTreeSet<String> =
        names.filter_map(|name| Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_string())).collect();
    let mut found = BTreeSet::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State 0A is LISTEN.
            if fields[3] == "0A" && ours.contains(fields[9]) {
                found.insert(address(fields[1]));
            }
        }
    }
    found
}

fn listens(wanted: impl Fn(&BTreeSet<SocketAddr>) -> bool, what: &str) -> BTreeSet<SocketAddr> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = listening();
        if wanted(&found) {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: {found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn member(id: UniqueId, rank: usize, nodes: usize) -> Arc<Comm> {
    let host_id = Some(format!("node{}", rank % nodes));
    let options = CommOptions { host_id, ..CommOptions::default() };
    let params = InitParams { nranks: 2, rank, ids: vec![id], options, device: -1, gpu: None };
    Comm::init(params, &NEVER).expect("a communicator")
}

/// A communicator of two ranks of this process; `look` sees what listens while it stands.
fn with_communicator(id: UniqueId, nodes: usize, look: impl FnOnce(BTreeSet<SocketAddr>)) {
    let (stands, seen) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (stands, seen) = (&stands, &seen);
            scope.spawn(move || {
                let comm = member(id, rank, nodes);
                stands.wait();
                seen.wait();
                comm.destroy().expect("it ends well");
            });
        }
        stands.wait();
        let found = listening();
        seen.wait();
        look(found);
    });
}

/// The process under test. `NCCL_SOCKET_IFNAME` may be set; each transport listens at an address of the machine's NICs.
fn play() {
    assert_eq!(listening().len(), 0, "nothing listens before anything was asked for");
    let id = Comm::unique_id().expect("an id");
    let service = listening();
    assert_eq!(service.len(), 1, "the service: {service:?}");
    let meeting = meeting_interface().expect("an interface").addr;
    assert_eq!(service.first().expect("one").ip(), meeting);
    let machine = Machine::this().expect("this machine");
    let of_nics: Vec<IpAddr> = machine.nics.iter().flat_map(|nic| &nic.addresses).map(|address| address.addr).collect();
    with_communicator(id, 2, |found| {
        assert!(found.is_superset(&service));
        let transports: Vec<&SocketAddr> = found.difference(&service).collect();
        assert_eq!(transports.len(), 2, "one for each rank: {transports:?}");
        for transport in transports {
            assert!(of_nics.contains(&transport.ip()) && !transport.ip().is_unspecified(), "{transport}");
            if std::env::var("NCCL_SOCKET_IFNAME").is_ok() {
                assert_eq!(transport.ip(), meeting);
            }
        }
    });
    listens(|found| *found == service, "transports end with their communicator");
    with_communicator(Comm::unique_id().expect("an id"), 1, |found| {
        assert_eq!(found, service, "one node needs no transport between nodes");
    });
    let fixed = SocketAddr::from(([127, 0, 0, 1], crate::built::free_port()));
    let id = UniqueId::from_address(&fixed.to_string(), "a key").expect("an id");
    std::thread::scope(|scope| {
        scope.spawn(|| member(id, 0, 1).destroy().expect("it ends well"));
        let found = listens(|found| found.len() > 1, "rank 0 listens at the fixed address");
        assert_eq!(found.difference(&service).collect::<Vec<_>>(), [&fixed]);
        scope.spawn(|| member(id, 1, 1).destroy().expect("it ends well"));
        listens(|found| *found == service, "nobody more is expected there");
    });
}

#[test]
fn what_listens_is_what_is_documented() {
    if std::env::var_os(ROLE).is_some() {
        return play();
    }
    assert_eq!(documented(), ["service", "fixed address", "transport"]);
    for interface in [None, Some("lo")] {
        let mut command = again(module_path!(), "what_listens_is_what_is_documented");
        command.env(ROLE, "1").env("STRATA_INTER", "tcp").env("STRATA_NCCL_LIB", "none").env_remove("NCCL_COMM_ID");
        match interface {
            Some(name) => command.env("NCCL_SOCKET_IFNAME", name),
            None => command.env_remove("NCCL_SOCKET_IFNAME"),
        };
        passes(&mut command);
    }
}
