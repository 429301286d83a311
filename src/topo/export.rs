//! Tells the MPI at hand which NIC this process uses, in variables that MPI reads when it starts.
//!
//! | variable | read by | value |
//! |---|---|---|
//! | `MPICH_OFI_NIC_POLICY`, `MPICH_OFI_NIC_MAPPING` | Cray MPICH | `USER`; for all local ranks, `0:0,1;1:2,3` is NIC 0 for ranks 0 and 1 |
//! | `FI_CXI_DEVICE_NAME` | libfabric's cxi provider, below MPICH and Open MPI | `cxi0` |
//! | `UCX_NET_DEVICES` | UCX, below Open MPI, MPICH, Cray MPICH and Intel MPI | `mlx5_0:1`, or `eth0` for TCP |
//! | `OMPI_MCA_btl_tcp_if_include` | Open MPI's TCP | `eth0` |
//! | `FI_TCP_IFACE`, `FI_SOCKETS_IFACE` | libfabric's providers over TCP, below MPICH and Intel MPI | `eth0` |
//!
//! A variable that the user has set stays as it is, and so do those that would contradict one. Ranks on different NICs
//! must still reach each other: names of interfaces are given only where all the NICs in use are in one subnet, or the
//! host routes by source address, so that each NIC leads to the others' subnets too, unless the user has mapped the
//! ranks to NICs and so knows. InfiniBand and Slingshot are one network whatever the NIC.
//!
//! UCX asks more: since 1.19 for RoCE and since 1.20 for TCP, a device reaches an address only if the routing tables lead
//! there by that device, with no regard to rules by source address; since 1.20.1 no other device may have a more specific
//! route (`ucs_netlink_is_best_route`). Where NICs in use are in several subnets and no such route leads from each to the
//! others', UCX is given `all` devices, since a job whose ranks are kept to theirs would end in `MPI_Init`.
#![forbid(unsafe_code)]

use super::distance::PciAddress;
use super::interface::Interface;
use super::local::LocalRank;
use super::machine::{Machine, Nic, NicKind};
use super::nics::{address, Purpose};
use super::pinning::{pin, Pinning, Rules};
use super::route::{self, By};
use crate::error::Result;
use std::fmt;
use std::net::IpAddr;

/// An MPI library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiLibrary {
    /// Open MPI, or one made from it.
    OpenMpi,
    /// HPE's.
    CrayMpich,
    /// MPICH.
    Mpich,
    /// Intel's.
    Intel,
    /// One of which only the layers below it are known.
    Other,
}

impl fmt::Display for MpiLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MpiLibrary::OpenMpi => "Open MPI",
            MpiLibrary::CrayMpich => "Cray MPICH",
            MpiLibrary::Mpich => "MPICH",
            MpiLibrary::Intel => "Intel MPI",
            MpiLibrary::Other => "an unknown MPI",
        })
    }
}

impl MpiLibrary {
    /// From the text of `MPI_Get_library_version`, which may be called before MPI has started.
    pub fn from_version(text: &str) -> MpiLibrary {
        let has = |name: &str| text.contains(name);
        match () {
            () if has("CRAY MPICH") => MpiLibrary::CrayMpich,
            () if has("Open MPI") || has("Spectrum MPI") => MpiLibrary::OpenMpi,
            () if has("Intel(R) MPI") => MpiLibrary::Intel,
            () if has("MPICH") => MpiLibrary::Mpich,
            () => MpiLibrary::Other,
        }
    }
}

/// What the MPI is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exports {
    /// Variables and their values.
    pub set: Vec<(&'static str, String)>,
    /// Variables that were not set, and why.
    pub kept: Vec<String>,
}

impl Exports {
    fn offer(&mut self, name: &'static str, value: &str, is_set: &impl Fn(&str) -> bool) {
        if is_set(name) {
            self.kept.push(format!("{name} is set already"));
        } else {
            self.set.push((name, value.to_string()));
        }
    }
}

/// What to tell the MPI of the process with local rank `local`. `is_set` says whether the environment has a variable,
/// `leaves_by` whether what is sent from a NIC's address to another address leaves by that NIC, when the kernel looks for a
/// route by source and destination or by destination alone.
pub fn exports(
    mpi: MpiLibrary,
    machine: &Machine,
    pinning: &Pinning,
    local: usize,
    rules: &Rules,
    is_set: impl Fn(&str) -> bool,
    leaves_by: impl Fn(&Interface, IpAddr, By) -> bool,
) -> Exports {
    let mut exports = Exports::default();
    let nic = &machine.nics[pinning.pins[local].nic];
    if mpi == MpiLibrary::CrayMpich && nic.device.is_some() {
        mapping(machine, pinning, &mut exports, &is_set);
    } else if let (NicKind::Cxi, Some((device, _))) = (nic.kind, &nic.device) {
        exports.offer("FI_CXI_DEVICE_NAME", device, &is_set);
    }
    let apart = |by| match rules.has_map() {
        true => None,
        false => apart(machine, pinning, rules, |from, to| leaves_by(from, to, by)),
    };
    let (apart, apart_for_ucx) = (apart(By::Source), apart(By::Destination));
    let by_address = |exports: &mut Exports, name: &'static str, value: &str| match &apart {
        Some((one, other)) => exports.kept.push(format!(
            "{name}: {one} and {other} are in different subnets, so ranks on one might not reach ranks on the other; \
             STRATA_NIC_MAP would settle it, or routes by source address"
        )),
        None => exports.offer(name, value, &is_set),
    };
    let ucx = |exports: &mut Exports, value: &str| match &apart_for_ucx {
        Some((one, other)) if !is_set("UCX_NET_DEVICES") => {
            exports.kept.push(format!(
                "UCX_NET_DEVICES={value}, but all: {one} and {other} are in different subnets, and UCX looks for a route \
                 by destination alone; STRATA_NIC_MAP overrules this"
            ));
            exports.set.push(("UCX_NET_DEVICES", "all".to_string()));
        }
        _ => exports.offer("UCX_NET_DEVICES", value, &is_set),
    };
    match (nic.kind, &nic.device, &nic.interface) {
        (NicKind::Cxi, ..) => return exports,
        (NicKind::Infiniband, Some((device, port)), _) => {
            exports.offer("UCX_NET_DEVICES", &format!("{device}:{port}"), &is_set);
        }
        (_, Some((device, port)), _) => ucx(&mut exports, &format!("{device}:{port}")),
        (_, None, Some(interface)) => ucx(&mut exports, interface),
        (_, None, None) => {}
    }
    let Some(interface) = nic.interface.as_deref().filter(|_| address(nic, &rules.filter).is_some()) else {
        return exports;
    };
    match mpi {
        MpiLibrary::OpenMpi if is_set("OMPI_MCA_btl_tcp_if_exclude") => {
            // Open MPI takes one or the other and ends when it finds both.
            exports.kept.push("OMPI_MCA_btl_tcp_if_exclude is set already".to_string());
        }
        MpiLibrary::OpenMpi => by_address(&mut exports, "OMPI_MCA_btl_tcp_if_include", interface),
        MpiLibrary::Mpich | MpiLibrary::Intel => {
            by_address(&mut exports, "FI_TCP_IFACE", interface);
            by_address(&mut exports, "FI_SOCKETS_IFACE", interface);
        }
        MpiLibrary::CrayMpich | MpiLibrary::Other => {}
    }
    exports
}

/// Cray MPICH numbers the NICs of a node in the order of their names, and wants to know of all local ranks.
fn mapping(machine: &Machine, pinning: &Pinning, exports: &mut Exports, is_set: &impl Fn(&str) -> bool) {
    const NAMES: [&str; 3] = ["MPICH_OFI_NIC_POLICY", "MPICH_OFI_NIC_MAPPING", "MPICH_OFI_NUM_NICS"];
    if let Some(name) = NAMES.into_iter().find(|name| is_set(name)) {
        // With fewer NICs other numbers would count.
        exports.kept.push(format!("{name} is set already"));
        return;
    }
    let kind = machine.nics[pinning.pins[0].nic].kind;
    let with_device = |&nic: &usize| machine.nics[nic].kind == kind && machine.nics[nic].device.is_some();
    let mut numbered: Vec<usize> =
        (0..machine.nics.len()).filter(|nic| machine.nics[*nic].up).filter(with_device).collect();
    // Names of devices and of interfaces may be in different orders. The list is sorted by interface where there is one.
    numbered.sort_by(|&a, &b| machine.nics[a].by_device(&machine.nics[b]));
    let ranks_of = |nic: usize| {
        let ranks = (0..pinning.pins.len()).filter(|&rank| pinning.pins[rank].nic == nic);
        ranks.map(|rank| rank.to_string()).collect::<Vec<_>>().join(",")
    };
    let parts = numbered.iter().enumerate().map(|(number, &nic)| (number, ranks_of(nic)));
    let parts: Vec<String> =
        parts.filter(|(_, ranks)| !ranks.is_empty()).map(|(number, ranks)| format!("{number}:{ranks}")).collect();
    exports.set.push(("MPICH_OFI_NIC_POLICY", "USER".to_string()));
    exports.set.push(("MPICH_OFI_NIC_MAPPING", parts.join(";")));
}

/// Two NICs in use in different subnets, from one of which the host does not route to the other's subnet.
fn apart(
    machine: &Machine,
    pinning: &Pinning,
    rules: &Rules,
    leaves_by: impl Fn(&Interface, IpAddr) -> bool,
) -> Option<(String, String)> {
    let used = |nic: &Nic| -> Option<Interface> { address(nic, &rules.filter).cloned() };
    let mut addresses: Vec<Interface> = pinning.pins.iter().filter_map(|pin| used(&machine.nics[pin.nic])).collect();
    addresses.dedup();
    let leads = |from: &Interface, to: &Interface| to.neighbour().is_some_and(|peer| leaves_by(from, peer));
    let pairs = addresses.iter().flat_map(|one| addresses.iter().map(move |other| (one, other)));
    let (one, other) =
        pairs.into_iter().find(|(one, other)| !one.shares_subnet_with(other.addr) && !leads(one, other))?;
    Some((one.name.clone(), other.name.clone()))
}

/// Finds the NIC of this process and sets the variables by which its MPI will use it; says what was set.
///
/// `gpus` has the GPU of each local rank, as far as they are known. To be called once, before `MPI_Init`.
///
/// The environment belongs to the whole process, and a thread of C code that reads it at the same moment may read
/// freed memory. So this is for the thread that makes the first communicator, as MPI's own start, which sets variables
/// too, has the same needs. Strata's other threads read the environment only through the standard library, which
/// takes turns with this.
pub fn export_nic(mpi: MpiLibrary, local: LocalRank, gpus: &[Option<PciAddress>], rules: &Rules) -> Result<Exports> {
    let machine = Machine::this()?;
    let mut gpus = gpus.to_vec();
    gpus.resize(local.size, None);
    let pinning = pin(&machine, &gpus, rules, Purpose::Mpi)?;
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let exports = exports(mpi, &machine, &pinning, local.rank, rules, is_set, route::leaves_by);
    for (name, value) in &exports.set {
        crate::info!("local rank {} of {}: {name}={value} for {mpi}", local.rank, local.size);
        std::env::set_var(name, value);
    }
    exports.kept.iter().for_each(|kept| crate::info!("not told to {mpi}: {kept}"));
    Ok(exports)
}
