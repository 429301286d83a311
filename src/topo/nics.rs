//! Which NICs of a machine serve its ranks, and why the others do not.
//!
//! In this order:
//! 1. A NIC that is down, or has no address, is not used. For MPI, a port of InfiniBand or Slingshot needs no address.
//! 2. `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY` choose among those for TCP. When the user lists the interfaces to
//!    use, rules 3 to 6 do not apply.
//! 3. The best there are: hardware, else interfaces made by software, else containers' and virtual machines' bridges,
//!    else the loopback.
//! 4. For MPI, those of one kind: Slingshot, else InfiniBand, else Ethernet, since ranks on different kinds cannot meet.
//! 5. As every NIC gets equally many ranks, `n` NICs carry `n` times what the slowest carries. So the fastest are used,
//!    as many as make that largest: four of 200 Gb/s, and not a fifth of 1 Gb/s. One that does not tell its speed is not
//!    used beside those that do.
//! 6. Where every GPU has a NIC that it reaches without the processor, NICs that no GPU reaches so are there for
//!    storage, and not used.
//! 7. Of interfaces on one adapter and port, one is used.
#![forbid(unsafe_code)]

use super::distance::Distance;
use super::interface::{Filter, Interface};
use super::machine::{Machine, Nic, NicKind};

/// What NICs are wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Connections over TCP, which need an address.
    Tcp,
    /// An MPI library.
    Mpi,
}

/// The NICs of a machine, sorted out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sorted {
    /// Those to use, as indices of the machine's list, in the order of the user's list or of the names.
    pub used: Vec<usize>,
    /// Those not to use, and why.
    pub left_out: Vec<(usize, String)>,
}

/// The address of a NIC that TCP uses.
pub fn address<'a>(nic: &'a Nic, filter: &Filter) -> Option<&'a Interface> {
    // A link-local address needs a scope that means nothing on another host.
    filter.address(&nic.addresses).filter(|address| !address.link_local())
}

/// Why a NIC cannot be used at all.
pub fn defect(nic: &Nic, filter: &Filter, purpose: Purpose) -> Option<&'static str> {
    let needs_address = purpose == Purpose::Tcp || nic.kind == NicKind::Ethernet;
    match (nic.up, needs_address, address(nic, filter)) {
        (false, ..) => Some("it is down"),
        (true, true, None) => Some("it has no address"),
        _ => None,
    }
}

/// Sorts out the NICs of a machine.
pub fn sort_out(machine: &Machine, filter: &Filter, purpose: Purpose) -> Sorted {
    let nics = &machine.nics;
    let mut sorted = Sorted { used: (0..nics.len()).collect(), left_out: Vec::new() };
    sorted.keep(|nic| defect(&nics[nic], filter, purpose).map(str::to_string));
    if purpose == Purpose::Tcp {
        sorted.keep(|nic| (!filter.allows(nics[nic].name())).then(|| "NCCL_SOCKET_IFNAME leaves it out".to_string()));
    }
    if purpose == Purpose::Tcp && filter.chooses() {
        sorted.used.sort_by_key(|&nic| filter.position(nics[nic].name()));
    } else {
        by_nature(machine, purpose, &mut sorted);
        by_speed(machine, &mut sorted);
        by_place(machine, &mut sorted);
    }
    one_an_adapter(machine, &mut sorted);
    sorted
}

impl Sorted {
    /// Leaves out those for which there is a reason to.
    fn keep(&mut self, reason: impl Fn(usize) -> Option<String>) {
        let mut left_out = Vec::new();
        self.used.retain(|&nic| match reason(nic) {
            Some(reason) => {
                left_out.push((nic, reason));
                false
            }
            None => true,
        });
        self.left_out.extend(left_out);
    }
}

/// 0 for hardware, more for what is less likely to lead to another node; and the reason when there is better.
fn nature(nic: &Nic) -> (u8, &'static str) {
    const BRIDGES: [&str; 6] = ["docker", "br-", "virbr", "veth", "cni", "podman"];
    if nic.loopback {
        (3, "only this host can be reached by it")
    } else if nic.physical {
        (0, "")
    } else if BRIDGES.iter().any(|bridge| nic.name().starts_with(bridge)) {
        (2, "it leads to containers or virtual machines")
    } else {
        (1, "there is no hardware to it")
    }
}

fn by_nature(machine: &Machine, purpose: Purpose, sorted: &mut Sorted) {
    let nics = &machine.nics;
    let best = sorted.used.iter().map(|&nic| nature(&nics[nic]).0).min();
    sorted
        .keep(|nic| Some(nature(&nics[nic])).filter(|(class, _)| Some(*class) > best).map(|(_, why)| why.to_string()));
    if purpose == Purpose::Mpi {
        let best = sorted.used.iter().map(|&nic| nics[nic].kind).min();
        sorted.keep(|nic| (Some(nics[nic].kind) > best).then(|| format!("there is {}", kind_name(best))));
    }
}

fn kind_name(kind: Option<NicKind>) -> &'static str {
    match kind {
        Some(NicKind::Cxi) => "Slingshot",
        Some(NicKind::Infiniband) => "InfiniBand",
        _ => "Ethernet",
    }
}

/// A speed as people say it.
pub fn speed_text(speed: Option<u64>) -> String {
    match speed {
        Some(speed) if speed % 1000 == 0 => format!("{} Gb/s", speed / 1000),
        Some(speed) => format!("{speed} Mb/s"),
        None => "unknown speed".to_string(),
    }
}

fn by_speed(machine: &Machine, sorted: &mut Sorted) {
    let speed = |nic: usize| machine.nics[nic].speed;
    let mut speeds: Vec<u64> = sorted.used.iter().filter_map(|&nic| speed(nic)).collect();
    speeds.sort_unstable_by(|a, b| b.cmp(a));
    // The slowest of the first `n` times `n`; the fewer and faster on a tie.
    let carried = |&index: &usize| (speeds[index] * (index as u64 + 1), std::cmp::Reverse(index));
    let Some(slowest) = (0..speeds.len()).max_by_key(carried) else { return };
    let (least, fastest) = (speeds[slowest], speeds[0]);
    sorted.keep(|nic| {
        let slow = speed(nic).is_none_or(|speed| speed < least);
        slow.then(|| format!("{} beside {}", speed_text(speed(nic)), speed_text(Some(fastest))))
    });
}

fn by_place(machine: &Machine, sorted: &mut Sorted) {
    let near = |gpu: &super::machine::Gpu, nic: usize| {
        let pci = machine.nics[nic].pci.as_ref();
        pci.is_some_and(|pci| Distance::between(&gpu.pci, pci).avoids_the_processor())
    };
    let served = machine.gpus.iter().all(|gpu| sorted.used.iter().any(|&nic| near(gpu, nic)));
    if served && !machine.gpus.is_empty() {
        let near_one = |nic| machine.gpus.iter().any(|gpu| near(gpu, nic));
        sorted.keep(|nic| (!near_one(nic)).then(|| "the GPUs have nearer ones".to_string()));
    }
}

fn one_an_adapter(machine: &Machine, sorted: &mut Sorted) {
    let nics = &machine.nics;
    let adapter = |nic: usize| nics[nic].adapter.as_ref();
    let used = sorted.used.clone();
    let first = |nic: usize| used.iter().copied().find(|&other| adapter(other) == adapter(nic)).unwrap_or(nic);
    sorted.keep(|nic| {
        let shares = adapter(nic).is_some() && first(nic) != nic;
        shares.then(|| format!("it is on the same adapter as {}", nics[first(nic)].name()))
    });
}

/// The address at which the ranks of other nodes find this process: that of the first NIC, the same one for all ranks of
/// a node, so that the ranks of all nodes meet in one network.
pub fn meeting_address(machine: &Machine, filter: &Filter) -> Option<Interface> {
    let first = sort_out(machine, filter, Purpose::Tcp).used.first().copied();
    let on_its_link = || {
        let nics = machine.nics.iter().filter(|nic| nic.up && filter.allows(nic.name()));
        nics.filter_map(|nic| filter.address(&nic.addresses)).next()
    };
    first.and_then(|nic| address(&machine.nics[nic], filter)).or_else(on_its_link).cloned()
}
