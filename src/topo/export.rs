//! Tells the MPI at hand which NIC this process uses, in variables that MPI reads when it starts.
//!
//! | variable | read by | value |
//! |---|---|---|
//! | `MPICH_OFI_NIC_POLICY`, `MPICH_OFI_NIC_MAPPING` | Cray MPICH | `USER`; for all local ranks, `0:0,1;1:2,3` is NIC 0 for ranks 0 and 1 |
//! | `FI_CXI_DEVICE_NAME` | libfabric's cxi provider, below MPICH and Open MPI | `cxi0` |
//! | `UCX_NET_DEVICES` | UCX, below Open MPI, MPICH, Cray MPICH and Intel MPI | `mlx5_0:1`, or `eth0` for TCP |
//! | `UCX_MAX_EAGER_LANES`, `UCX_MAX_RNDV_LANES` | UCX | `2`: NICs among which it divides a message |
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
//! others', a job whose ranks are kept to theirs would end in `MPI_Init`. Each rank is given all those NICs then and divides
//! each message among them (`UCX_MAX_EAGER_LANES`, `UCX_MAX_RNDV_LANES`), which loads them evenly, too. Where not all nodes
//! have the subnets of all NICs in use, ranks are given only the NICs whose subnets all have; where there is none, `all`.
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

/// What is known of the MPI and of its job.
#[derive(Debug, Clone, Copy)]
pub struct MpiJob<'a> {
    /// The library.
    pub library: MpiLibrary,
    /// Major and minor version of UCX, if it is loaded already.
    pub ucx: Option<(u32, u32)>,
    /// The addresses of each rank's node; none if they are not known.
    pub addresses: &'a [Vec<IpAddr>],
}

impl MpiJob<'_> {
    /// Whether all nodes have an address in the subnet of this one.
    fn is_everywhere(&self, interface: &Interface) -> bool {
        let is_on = |addresses: &Vec<IpAddr>| addresses.iter().any(|address| interface.shares_subnet_with(*address));
        !self.addresses.is_empty() && self.addresses.iter().all(is_on)
    }

    /// Whether UCX looks for routes by destination: `None` if its version is not known.
    fn ucx_looks_for_routes(&self) -> Option<bool> {
        self.ucx.map(|version| version >= (1, 19))
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
    job: &MpiJob<'_>,
    machine: &Machine,
    pinning: &Pinning,
    local: usize,
    rules: &Rules,
    is_set: impl Fn(&str) -> bool,
    leaves_by: impl Fn(&Interface, IpAddr, By) -> bool,
) -> Exports {
    let mut exports = Exports::default();
    let nic = &machine.nics[pinning.pins[local].nic];
    if job.library == MpiLibrary::CrayMpich && nic.device.is_some() {
        mapping(machine, pinning, &mut exports, &is_set);
    } else if let (NicKind::Cxi, Some((device, _))) = (nic.kind, &nic.device) {
        exports.offer("FI_CXI_DEVICE_NAME", device, &is_set);
    }
    let in_use = InUse::new(machine, pinning, rules);
    let partial = in_use.lacks_peers(job).filter(|_| !rules.has_map());
    match (nic.kind, ucx_name(nic)) {
        (NicKind::Cxi, _) => return exports,
        (NicKind::Infiniband, Some(name)) if nic.device.is_some() => exports.offer("UCX_NET_DEVICES", &name, &is_set),
        (_, Some(name)) => {
            let by = if job.ucx_looks_for_routes() == Some(false) { By::Source } else { By::Destination };
            let apart = in_use.apart(|from, to| leaves_by(from, to, by));
            let overruled = rules.has_map() && job.ucx_looks_for_routes() != Some(true);
            let why = partial.clone().or(apart.filter(|_| !overruled).map(|(one, other)| {
                format!("{one} and {other} are in different subnets, and UCX looks for a route by destination alone")
            }));
            match why {
                Some(why) => several(job, &in_use, &name, &why, rules.has_map(), &mut exports, &is_set),
                None => exports.offer("UCX_NET_DEVICES", &name, &is_set),
            }
        }
        (_, None) => {}
    }
    let Some(interface) = nic.interface.as_deref().filter(|_| address(nic, &rules.filter).is_some()) else {
        return exports;
    };
    let apart = in_use.apart(|from, to| leaves_by(from, to, By::Source)).filter(|_| !rules.has_map());
    let names: &[&'static str] = match job.library {
        MpiLibrary::OpenMpi if is_set("OMPI_MCA_btl_tcp_if_exclude") => {
            // Open MPI takes one or the other and ends when it finds both.
            exports.kept.push("OMPI_MCA_btl_tcp_if_exclude is set already".to_string());
            return exports;
        }
        MpiLibrary::OpenMpi => &["OMPI_MCA_btl_tcp_if_include"],
        MpiLibrary::Mpich | MpiLibrary::Intel => &["FI_TCP_IFACE", "FI_SOCKETS_IFACE"],
        MpiLibrary::CrayMpich | MpiLibrary::Other => &[],
    };
    // Open MPI finds out by itself which NICs reach each other. Libfabric takes one, and not the same on each node.
    let common = in_use.common(job).filter(|_| partial.is_some() || job.library != MpiLibrary::OpenMpi);
    for &name in names {
        match (&apart, &common) {
            (None, Some(common)) if partial.is_some() => exports.offer(name, &common.name, &is_set),
            (None, _) => exports.offer(name, interface, &is_set),
            (Some(_), Some(common)) => exports.offer(name, &common.name, &is_set),
            (Some((one, other)), None) => exports.kept.push(format!(
                "{name}: {one} and {other} are in different subnets, so ranks on one might not reach ranks on the other; \
                 STRATA_NIC_MAP would settle it, or routes by source address"
            )),
        }
    }
    exports
}

/// What UCX calls a NIC.
fn ucx_name(nic: &Nic) -> Option<String> {
    match (&nic.device, &nic.interface) {
        (Some((device, port)), _) => Some(format!("{device}:{port}")),
        (None, interface) => interface.clone(),
    }
}

/// Has UCX use the NICs that all nodes have, or those of the map, since ranks that keep to their own might not reach others.
fn several(
    job: &MpiJob<'_>,
    in_use: &InUse<'_>,
    own: &str,
    why: &str,
    is_mapped: bool,
    exports: &mut Exports,
    is_set: &impl Fn(&str) -> bool,
) {
    if is_set("UCX_NET_DEVICES") {
        exports.kept.push("UCX_NET_DEVICES is set already".to_string());
        return;
    }
    let named = in_use.nics.iter().filter(|(_, address)| is_mapped || job.is_everywhere(address));
    let names: Vec<String> = named.filter_map(|(nic, _)| ucx_name(nic)).collect();
    let (value, lanes) = match names.len() {
        0 => ("all".to_string(), in_use.nics.len()),
        lanes => (names.join(","), lanes),
    };
    let hint = if is_mapped { "" } else { "; STRATA_NIC_MAP overrules this for a UCX below 1.19" };
    exports.kept.push(format!("UCX_NET_DEVICES={own}, but {value}: {why}{hint}"));
    exports.set.push(("UCX_NET_DEVICES", value));
    if lanes > 1 {
        for name in ["UCX_MAX_EAGER_LANES", "UCX_MAX_RNDV_LANES"] {
            exports.offer(name, &lanes.to_string(), is_set);
        }
    }
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

/// The NICs of a machine that its ranks use, with their addresses.
struct InUse<'a> {
    nics: Vec<(&'a Nic, &'a Interface)>,
}

impl<'a> InUse<'a> {
    fn new(machine: &'a Machine, pinning: &Pinning, rules: &Rules) -> InUse<'a> {
        let mut numbers: Vec<usize> = pinning.pins.iter().map(|pin| pin.nic).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let nics = numbers.into_iter().map(|number| &machine.nics[number]);
        InUse { nics: nics.filter_map(|nic| Some((nic, address(nic, &rules.filter)?))).collect() }
    }

    /// Two of them in different subnets, from one of which the host does not route to the other's subnet.
    fn apart(&self, leaves_by: impl Fn(&Interface, IpAddr) -> bool) -> Option<(String, String)> {
        let leads = |from: &Interface, to: &Interface| to.neighbour().is_some_and(|peer| leaves_by(from, peer));
        let all = || self.nics.iter().map(|(_, address)| *address);
        let mut pairs = all().flat_map(|one| all().map(move |other| (one, other)));
        let (one, other) = pairs.find(|(one, other)| !one.shares_subnet_with(other.addr) && !leads(one, other))?;
        Some((one.name.clone(), other.name.clone()))
    }

    /// Why not all of them can be used where all nodes have a subnet of some of them: a node without an address in a subnet
    /// may have no way there.
    fn lacks_peers(&self, job: &MpiJob<'_>) -> Option<String> {
        let (shared, lacking): (Vec<_>, Vec<_>) = self.nics.iter().partition(|(_, address)| job.is_everywhere(address));
        let (_, lacking) = lacking.first().filter(|_| !shared.is_empty() && !job.addresses.is_empty())?;
        Some(format!("not every node has an address in the subnet of {}", lacking.name))
    }

    /// The one whose subnet all nodes have, equally on all nodes.
    fn common(&self, job: &MpiJob<'_>) -> Option<&Interface> {
        let all = self.nics.iter().map(|(_, address)| *address);
        all.filter(|address| job.is_everywhere(address)).min_by_key(|address| address.addr)
    }
}

/// Finds the NIC of this process and sets the variables by which its MPI will use it; says what was set.
///
/// `gpus` has the GPU of each local rank, as far as they are known. To be called once, before `MPI_Init`.
///
/// The environment belongs to the whole process, and a thread of C code that reads it at the same moment may read
/// freed memory. So this is for the thread that makes the first communicator, as MPI's own start, which sets variables
/// too, has the same needs. Strata's other threads read the environment only through the standard library, which
/// takes turns with this.
pub fn export_nic(job: &MpiJob<'_>, local: LocalRank, gpus: &[Option<PciAddress>], rules: &Rules) -> Result<Exports> {
    let (machine, mpi) = (Machine::this()?, job.library);
    let mut gpus = gpus.to_vec();
    gpus.resize(local.size, None);
    let pinning = pin(&machine, &gpus, rules, Purpose::Mpi)?;
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let exports = exports(job, &machine, &pinning, local.rank, rules, is_set, route::leaves_by);
    for (name, value) in &exports.set {
        crate::info!("local rank {} of {}: {name}={value} for {mpi}", local.rank, local.size);
        std::env::set_var(name, value);
    }
    exports.kept.iter().for_each(|kept| crate::info!("not told to {mpi}: {kept}"));
    Ok(exports)
}
