//! Which NICs the ranks of machines on record get, and what their MPI is told.

use super::distance::{Distance, PciAddress};
use super::export::{exports, Exports, MpiJob, MpiLibrary};
use super::interface::{Filter, Interface};
use super::machine::{gpu_of, gpus_of_ranks, Machine, NicKind};
use super::nics::{meeting_address, Purpose};
use super::pinning::{pin, Pinning, Rules};
use super::probe::compare::{compare, PlacedDevice};
use super::probe::infer::infer;
use super::probe::{measurable, measure, Load, Measuring, ProbeMeasured, Subjects};
use super::route::By;
use crate::error::Result;

#[path = "../../shim-tests/machines/mod.rs"]
mod machines;

fn machine(name: &str) -> Machine {
    Machine::recorded(&machines::lay_out(name).root).unwrap()
}

fn rules(map: &str, names: Option<&str>) -> Rules {
    Rules::new(map, Filter::new(names, None)).unwrap()
}

fn pinned(machine: &Machine, ranks: usize, rules: &Rules, purpose: Purpose) -> Result<Pinning> {
    pin(machine, &gpus_of_ranks(machine, &vec![None; ranks]), rules, purpose)
}

fn names<'a>(machine: &'a Machine, pinning: &Pinning) -> Vec<&'a str> {
    pinning.pins.iter().map(|pin| machine.nics[pin.nic].name()).collect()
}

/// The NICs of so many ranks, and the farthest that one is from its GPU.
fn found(name: &str, ranks: usize, purpose: Purpose) -> (Vec<String>, Option<Distance>) {
    let machine = machine(name);
    let pinning = pinned(&machine, ranks, &rules("auto", None), purpose).unwrap();
    assert_eq!(pinning.warning, None);
    let nics = names(&machine, &pinning).into_iter().map(str::to_string).collect();
    (nics, pinning.pins.iter().filter_map(|pin| pin.distance).max())
}

#[test]
fn on_frontier_each_pair_of_gcds_uses_the_nic_of_its_module() {
    for purpose in [Purpose::Tcp, Purpose::Mpi] {
        let (nics, farthest) = found("frontier", 8, purpose);
        assert_eq!(nics, ["hsn0", "hsn0", "hsn1", "hsn1", "hsn2", "hsn2", "hsn3", "hsn3"]);
        assert_eq!(farthest, Some(Distance::Phb));
    }
    let (mut nics, _) = found("frontier", 4, Purpose::Mpi);
    nics.sort();
    assert_eq!(nics, ["hsn0", "hsn1", "hsn2", "hsn3"], "four ranks on GCDs 0 to 3 still use four NICs");
    assert_eq!(found("frontier", 16, Purpose::Mpi).0[8..], found("frontier", 8, Purpose::Mpi).0);
}

#[test]
fn on_perlmutter_each_gpu_uses_the_nic_of_its_numa_node() {
    let (nics, farthest) = found("perlmutter", 4, Purpose::Mpi);
    assert_eq!(nics, ["hsn0", "hsn1", "hsn2", "hsn3"]);
    assert_eq!(farthest, Some(Distance::Node));
    let machine = machine("perlmutter");
    let backwards: Vec<_> = (0..4).map(|rank| gpu_of(&machine, rank, Some("3,2,1,0"))).collect();
    let pinning = pin(&machine, &backwards, &rules("auto", None), Purpose::Mpi).unwrap();
    assert_eq!(names(&machine, &pinning), ["hsn3", "hsn2", "hsn1", "hsn0"], "as CUDA_VISIBLE_DEVICES orders them");
    let nmn = machine.nics.iter().position(|nic| nic.name() == "nmn0").unwrap();
    assert!(pinning.left_out.contains(&(nmn, "there is Slingshot".to_string())), "{:?}", pinning.left_out);
    let tcp = pinned(&machine, 4, &rules("auto", None), Purpose::Tcp).unwrap();
    assert!(tcp.left_out.contains(&(nmn, "1 Gb/s beside 200 Gb/s".to_string())), "{:?}", tcp.left_out);
}

#[test]
fn on_a_dgx_each_gpu_uses_the_adapter_behind_its_switch_and_none_that_is_for_storage() {
    let own = ["ibp24s0", "ibp64s0", "ibp79s0", "ibp94s0", "ibp154s0", "ibp192s0", "ibp206s0", "ibp220s0"];
    assert_eq!(found("dgx-h100", 8, Purpose::Mpi), (own.map(str::to_string).to_vec(), Some(Distance::Pix)));
    let (nics, farthest) = found("dgx-h100", 16, Purpose::Mpi);
    assert_eq!(nics, [own, own].concat(), "also with two ranks on each GPU");
    assert_eq!(farthest, Some(Distance::Pix));
    let (nics, _) = found("dgx-h100", 8, Purpose::Tcp);
    let (near, far) = (["ibp41s0f0"; 4], ["ibp170s0f0"; 4]);
    assert_eq!(nics, [near, far].concat(), "TCP needs addresses, and only these fast ones have one");
}

#[test]
fn a_slow_port_and_one_without_a_cable_are_not_used() {
    assert_eq!(found("server", 4, Purpose::Tcp), (vec!["ens1f0np0".to_string(); 4], None));
    let machine = machine("server");
    let pinning = pinned(&machine, 2, &rules("auto", None), Purpose::Tcp).unwrap();
    let why: Vec<&str> = pinning.left_out.iter().map(|(_, why)| why.as_str()).collect();
    assert_eq!(why, ["it is down", "only this host can be reached by it", "1 Gb/s beside 25 Gb/s"]);
    assert_eq!(pinning.pins[0].why, "the only one to use");
}

#[test]
fn a_machine_with_one_nic_uses_it_although_its_speed_is_unknown() {
    assert_eq!(found("one-nic", 3, Purpose::Tcp).0, ["eth0", "eth0", "eth0"]);
    let machine = machine("one-nic");
    assert_eq!(meeting_address(&machine, &Filter::default()).unwrap().addr.to_string(), "10.5.0.2");
    let only = |names: &str| meeting_address(&machine, &Filter::new(Some(names), None)).map(|found| found.name);
    assert_eq!(only("docker").as_deref(), Some("docker0"), "a name that is given is used whatever it is");
    assert_eq!(only("lo").as_deref(), Some("lo"));
    assert_eq!(only("^eth").as_deref(), Some("docker0"), "a bridge rather than the loopback");
    assert_eq!(only("ib"), None);
}

#[test]
fn a_bond_counts_as_the_hardware_below_it_and_once_with_its_vlans() {
    assert_eq!(found("bond", 2, Purpose::Tcp).0, ["bond0", "bond0"]);
    let machine = machine("bond");
    let bond = machine.nics.iter().find(|nic| nic.name() == "bond0").unwrap();
    assert_eq!(bond.pci.as_ref().unwrap().address().to_string(), "0000:3b:00.0");
    let vlan = pinned(&machine, 2, &rules("auto", Some("=bond0.40")), Purpose::Tcp).unwrap();
    assert_eq!(names(&machine, &vlan), ["bond0.40", "bond0.40"]);
}

#[test]
fn devices_and_interfaces_of_one_adapter_are_one_nic() {
    let dgx = machine("dgx-h100");
    let ib = dgx.nics.iter().find(|nic| nic.name() == "ibp24s0").unwrap();
    assert_eq!(
        (ib.device.clone(), ib.kind, ib.speed),
        (Some(("mlx5_0".to_string(), 1)), NicKind::Infiniband, Some(400_000))
    );
    let roce = dgx.nics.iter().find(|nic| nic.is_called("mlx5_2:1")).unwrap();
    assert_eq!((roce.name(), roce.kind), ("enp41s0f1np1", NicKind::Ethernet));
    assert_eq!(dgx.nics.len(), 8 + 4 + 3);
    let frontier = machine("frontier");
    assert!(frontier.nics.iter().any(|nic| nic.name() == "hsn2" && nic.is_called("cxi2") && nic.kind == NicKind::Cxi));
    assert_eq!(frontier.gpus.len(), 8);
}

#[test]
fn gpus_are_numbered_by_bus_and_claims_that_make_no_sense_by_rank() {
    let machine = machine("frontier");
    let at = |text: &str| text.parse::<PciAddress>().ok();
    assert_eq!(gpu_of(&machine, 1, None), at("0000:c6:00.0"));
    assert_eq!(gpu_of(&machine, 0, Some("6")), at("0000:d9:00.0"), "a rank that sees one GPU");
    assert_eq!(gpu_of(&machine, 0, Some("GPU-8932f937")), None);
    assert_eq!(gpu_of(&machine, 8, None), None);
    let (first, second) = (at("0000:c1:00.0"), at("0000:c6:00.0"));
    assert_eq!(gpus_of_ranks(&machine, &[second, first]), [second, first]);
    assert_eq!(gpus_of_ranks(&machine, &[first, first]), [first, second], "all say 0");
    assert_eq!(gpus_of_ranks(&machine, &[None, first]), [first, second]);
    assert_eq!(gpus_of_ranks(&Machine::default(), &[None, None]), [None, None]);
}

#[test]
fn the_map_decides_and_warns_of_idle_nics() {
    let machine = machine("frontier");
    let mapped = |map, ranks| pinned(&machine, ranks, &rules(map, None), Purpose::Mpi);
    let pinning = mapped("hsn3,hsn2,hsn1,cxi0", 8).unwrap();
    assert_eq!(names(&machine, &pinning), ["hsn3", "hsn2", "hsn1", "hsn0", "hsn3", "hsn2", "hsn1", "hsn0"]);
    assert_eq!(pinning.warning, None);
    assert_eq!(pinning.pins[0].distance, Some(Distance::Sys));
    let warning = mapped("hsn0", 2).unwrap().warning.unwrap();
    let expected = "local ranks 0, 1 share hsn0 while hsn1, hsn2, hsn3 idle, because STRATA_NIC_MAP=hsn0";
    assert_eq!(warning, expected);
    assert_eq!(mapped("hsn0", 1).unwrap().warning, None, "one rank shares with nobody");
}

#[test]
fn a_map_that_makes_no_sense_says_what_is_wrong() {
    let server = machine("server");
    let wrong = |map: &str| pinned(&server, 2, &rules(map, None), Purpose::Tcp).unwrap_err().to_string();
    assert_eq!(wrong("eth7"), "STRATA_NIC_MAP=eth7 names eth7; there are eno1, ens1f0np0, ens1f1np1, lo");
    assert_eq!(wrong("eno1,ens1f1np1"), "STRATA_NIC_MAP=eno1,ens1f1np1 names ens1f1np1, but it is down");
    let text = Rules::new("hsn0,,hsn1", Filter::default()).unwrap_err().to_string();
    assert!(text.starts_with("STRATA_NIC_MAP=hsn0,,hsn1 has no name for local rank 1"), "{text}");
    let dgx = machine("dgx-h100");
    let text = pinned(&dgx, 1, &rules("mlx5_0", None), Purpose::Tcp).unwrap_err().to_string();
    assert_eq!(text, "STRATA_NIC_MAP=mlx5_0 names mlx5_0, but it has no address");
}

#[test]
fn names_for_sockets_filter_those_of_tcp_and_warn_of_idle_nics() {
    let machine = machine("frontier");
    let filtered = |names| pinned(&machine, 4, &rules("auto", Some(names)), Purpose::Tcp);
    let pinning = filtered("hsn0,hsn2").unwrap();
    assert_eq!(names(&machine, &pinning), ["hsn0", "hsn0", "hsn2", "hsn2"]);
    let warning = pinning.warning.unwrap();
    let expected = "local ranks 2, 3 share hsn2 while hsn1, hsn3 idle, because NCCL_SOCKET_IFNAME=hsn0,hsn2";
    assert_eq!(warning, expected);
    let without = filtered("^hsn0").unwrap();
    assert_eq!(names(&machine, &without), ["hsn3", "hsn2", "hsn1", "hsn1"], "ranks 2 and 3 are next to hsn1");
    let text = filtered("eth").unwrap_err().to_string();
    assert!(text.starts_with("NCCL_SOCKET_IFNAME=eth leaves no network interface to use: hsn0 ("), "{text}");
    let mpi = pinned(&machine, 4, &rules("auto", Some("hsn0")), Purpose::Mpi).unwrap();
    assert_eq!(mpi.warning, None, "an MPI does not read it");
}

/// Of which nothing but the library is known.
fn job(library: MpiLibrary) -> MpiJob<'static> {
    MpiJob { library, ucx: None, addresses: &[] }
}

fn told(name: &str, mpi: MpiLibrary, ranks: usize, local: usize, map: &str, user: &[&str]) -> Exports {
    let machine = machine(name);
    let rules = rules(map, None);
    let pinning = pinned(&machine, ranks, &rules, Purpose::Mpi).unwrap();
    exports(&job(mpi), &machine, &pinning, local, &rules, |name| user.contains(&name), |_, _, _| false)
}

fn set(exports: &Exports) -> Vec<String> {
    exports.set.iter().map(|(name, value)| format!("{name}={value}")).collect()
}

#[test]
fn cray_mpich_is_told_of_all_local_ranks() {
    let exports = told("frontier", MpiLibrary::CrayMpich, 8, 5, "auto", &[]);
    assert_eq!(set(&exports), ["MPICH_OFI_NIC_POLICY=USER", "MPICH_OFI_NIC_MAPPING=0:0,1;1:2,3;2:4,5;3:6,7"]);
    for name in ["MPICH_OFI_NIC_POLICY", "MPICH_OFI_NIC_MAPPING", "MPICH_OFI_NUM_NICS"] {
        let exports = told("frontier", MpiLibrary::CrayMpich, 8, 5, "auto", &[name]);
        assert_eq!((set(&exports), exports.kept), (vec![], vec![format!("{name} is set already")]));
    }
    let exports = told("frontier", MpiLibrary::CrayMpich, 2, 0, "hsn2", &[]);
    assert_eq!(set(&exports)[1], "MPICH_OFI_NIC_MAPPING=2:0,1");
    assert_eq!(set(&told("frontier", MpiLibrary::Mpich, 8, 5, "auto", &[])), ["FI_CXI_DEVICE_NAME=cxi2"]);
}

#[test]
fn ucx_is_told_the_adapter_and_port() {
    let exports = told("dgx-h100", MpiLibrary::OpenMpi, 8, 6, "auto", &[]);
    assert_eq!(set(&exports), ["UCX_NET_DEVICES=mlx5_10:1"], "and no interface, which has no address");
    let exports = told("dgx-h100", MpiLibrary::OpenMpi, 8, 6, "auto", &["UCX_NET_DEVICES"]);
    assert_eq!((set(&exports), exports.kept), (vec![], vec!["UCX_NET_DEVICES is set already".to_string()]));
}

#[test]
fn mpis_over_tcp_are_told_the_interface() {
    let port = "ens1f0np0";
    let ucx = format!("UCX_NET_DEVICES={port}");
    let open_mpi = told("server", MpiLibrary::OpenMpi, 2, 1, "auto", &[]);
    assert_eq!(set(&open_mpi), [ucx.clone(), format!("OMPI_MCA_btl_tcp_if_include={port}")]);
    let mpich = told("server", MpiLibrary::Mpich, 2, 1, "auto", &["FI_SOCKETS_IFACE"]);
    assert_eq!(set(&mpich), [ucx.clone(), format!("FI_TCP_IFACE={port}")]);
    let excluded = told("server", MpiLibrary::OpenMpi, 2, 1, "auto", &["OMPI_MCA_btl_tcp_if_exclude"]);
    assert_eq!(set(&excluded), [ucx], "Open MPI ends when it finds both");
}

#[test]
fn nics_in_different_subnets_are_told_only_when_the_user_maps_them_or_the_host_routes_by_source() {
    let apart = told("server", MpiLibrary::OpenMpi, 2, 1, "eno1,ens1f0np0", &[]);
    assert_eq!(set(&apart).len(), 2);
    let mut machine = machine("server");
    let slow = machine.nics.iter_mut().find(|nic| nic.name() == "eno1").unwrap();
    slow.speed = Some(25_000);
    let rules = rules("auto", None);
    let pinning = pinned(&machine, 2, &rules, Purpose::Mpi).unwrap();
    assert_eq!(names(&machine, &pinning), ["eno1", "ens1f0np0"]);
    let by = |leaves_by: &dyn Fn(&Interface, By) -> bool| {
        let leaves_by = |from: &Interface, _, by| leaves_by(from, by);
        exports(&job(MpiLibrary::OpenMpi), &machine, &pinning, 1, &rules, |_| false, leaves_by)
    };
    let (tcp, ucx) = ("OMPI_MCA_btl_tcp_if_include=ens1f0np0", "UCX_NET_DEVICES=ens1f0np0");
    let all = ["UCX_NET_DEVICES=all", "UCX_MAX_EAGER_LANES=2", "UCX_MAX_RNDV_LANES=2"];
    let nowhere = by(&|_, _| false);
    assert_eq!(set(&nowhere), all);
    let why = "OMPI_MCA_btl_tcp_if_include: eno1 and ens1f0np0 are in different subnets";
    assert!(nowhere.kept.iter().any(|kept| kept.starts_with(why)), "{:?}", nowhere.kept);
    // UCX does not see rules by source, and would find no route.
    let by_source = by(&|_, by| by == By::Source);
    assert_eq!(set(&by_source), [&all[..], &[tcp]].concat());
    assert!(by_source.kept.len() == 1 && by_source.kept[0].contains("UCX looks for a route"), "{:?}", by_source.kept);
    let everywhere = by(&|_, _| true);
    assert_eq!((set(&everywhere), &everywhere.kept[..]), (vec![ucx.to_string(), tcp.to_string()], &[][..]));
    assert_eq!(set(&by(&|from, _| from.name == "eno1")), all, "no way from the other one");
    let mine = |name: &str| name == "UCX_NET_DEVICES";
    let set_already = exports(&job(MpiLibrary::Mpich), &machine, &pinning, 1, &rules, mine, |_, _, _| false);
    assert_eq!(set(&set_already), [""; 0]);
}

/// A server whose two ranks have NICs in a subnet each, between which nothing routes by destination; by source where `routes`.
fn on_two_nics(local: usize, ucx: Option<(u32, u32)>, addresses: &[&[&str]], map: &str, routes: bool) -> Vec<String> {
    let mut machine = machine("server");
    machine.nics.iter_mut().find(|nic| nic.name() == "eno1").unwrap().speed = Some(25_000);
    let rules = rules(map, None);
    let pinning = pinned(&machine, 2, &rules, Purpose::Mpi).unwrap();
    let parsed = |node: &&[&str]| node.iter().map(|address| address.parse().unwrap()).collect();
    let addresses: Vec<Vec<std::net::IpAddr>> = addresses.iter().map(parsed).collect();
    let job = MpiJob { library: MpiLibrary::Mpich, ucx, addresses: &addresses };
    set(&exports(&job, &machine, &pinning, local, &rules, |_| false, |_, _, by| routes && by == By::Source))
}

#[test]
fn ucx_is_told_several_nics_only_where_it_looks_for_routes() {
    let tcp = ["FI_TCP_IFACE=ens1f0np0", "FI_SOCKETS_IFACE=ens1f0np0"];
    let own = [&["UCX_NET_DEVICES=ens1f0np0"], &tcp[..]].concat();
    let lanes = ["UCX_MAX_EAGER_LANES=2", "UCX_MAX_RNDV_LANES=2"];
    assert_eq!(on_two_nics(1, Some((1, 18)), &[], "auto", true), own);
    assert_eq!(on_two_nics(1, Some((1, 19)), &[], "auto", true), [&["UCX_NET_DEVICES=all"], &lanes[..], &tcp].concat());
    // Who maps ranks to NICs is obeyed where that does not end the job.
    let map = "eno1,ens1f0np0";
    assert_eq!(on_two_nics(1, None, &[], map, true), own);
    let both = [&["UCX_NET_DEVICES=eno1,ens1f0np0"], &lanes[..], &tcp].concat();
    assert_eq!(on_two_nics(1, Some((1, 20)), &[], map, true), both);
}

#[test]
fn where_a_node_lacks_a_subnet_all_ranks_are_told_the_nics_of_the_others() {
    let machine = machine("server");
    let of = |name: &str| machine.nics.iter().find(|nic| nic.name() == name).unwrap().addresses[0].addr.to_string();
    let (first, second) = (of("eno1"), of("ens1f0np0"));
    let (whole, part) = ([first.as_str(), &second], [first.as_str()]);
    let one = ["UCX_NET_DEVICES=eno1", "FI_TCP_IFACE=eno1", "FI_SOCKETS_IFACE=eno1"];
    for ucx in [Some((1, 13)), Some((1, 20)), None] {
        for routes in [false, true] {
            let told = on_two_nics(1, ucx, &[&whole, &whole, &part, &part], "auto", routes);
            assert_eq!(told, one, "{ucx:?}, {routes}");
        }
    }
    for local in [0, 1] {
        let told = on_two_nics(local, None, &[&whole, &whole, &whole, &whole], "auto", false);
        assert_eq!(told[0], "UCX_NET_DEVICES=eno1,ens1f0np0");
        assert_eq!(told[3..], ["FI_TCP_IFACE=ens1f0np0", "FI_SOCKETS_IFACE=ens1f0np0"], "the same on all ranks");
    }
}

#[test]
fn mpis_are_known_by_what_they_say_of_themselves() {
    let texts = [
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", MpiLibrary::OpenMpi),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", MpiLibrary::CrayMpich),
        ("MPICH Version:      4.0.2\nMPICH Device: ch4:ofi", MpiLibrary::Mpich),
        ("Intel(R) MPI Library 2021.9 for Linux* OS", MpiLibrary::Intel),
        ("an unheard-of MPI", MpiLibrary::Other),
    ];
    for (text, mpi) in texts {
        assert_eq!(MpiLibrary::from_version(text), mpi);
    }
}

/// Nothing can be measured on a machine on record.
struct Unmeasured;

impl Measuring for Unmeasured {
    fn nodes(&self) -> Vec<u32> {
        vec![0, 1]
    }

    fn round_trip_us(&mut self, _: usize, _: u32) -> ProbeMeasured {
        Err("on record".to_string())
    }

    fn copy_mbs(&mut self, _: usize, _: Load) -> ProbeMeasured {
        Err("on record".to_string())
    }
}

#[test]
fn where_sysfs_says_where_devices_are_the_probe_has_nothing_to_fill() {
    let placed = |name: &str, all: bool| -> Vec<PlacedDevice> {
        let machine = machine(name);
        let nics: Vec<usize> = if all { (0..machine.nics.len()).collect() } else { measurable(&machine) };
        let subjects = Subjects::of(&machine, &nics);
        compare(&subjects, &infer(&subjects, &measure(&subjects, &mut Unmeasured)))
    };
    let taken = |devices: &[PlacedDevice], name: &str| -> Vec<String> {
        let device = devices.iter().find(|device| device.name == name).expect("a device");
        device.facts.iter().map(|fact| format!("{} (sysfs: {})", fact.taken, fact.sysfs)).collect()
    };
    let dgx = placed("dgx-h100", true);
    assert_eq!(
        taken(&dgx, "GPU 0000:1b:00.0"),
        ["no other GPU (sysfs: no other GPU)", "ibp24s0 (sysfs: ibp24s0 (PIX))"]
    );
    assert_eq!(taken(&dgx, "NIC ibp24s0"), ["0 (sysfs: 0)"]);
    let frontier = placed("frontier", false);
    assert_eq!(taken(&frontier, "GPU 0000:d1:00.0")[1], "hsn2 (sysfs: hsn2 (PHB))");
    let names: Vec<&str> = frontier.iter().take(5).map(|device| device.name.as_str()).collect();
    assert_eq!(names[..4], ["NIC hsn0", "NIC hsn1", "NIC hsn2", "NIC hsn3"], "and not the loopback");
    assert!(names[4].starts_with("GPU "));
    let one = placed("one-nic", false);
    assert_eq!(taken(&one, "NIC eth0"), ["unknown (sysfs: -)"], "a virtual machine's");
}
