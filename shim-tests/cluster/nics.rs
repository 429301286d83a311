//! NICs: what `strata info --nics` says of machines on record, and whether the bytes of ranks take the NICs they should,
//! counted by the kernel in network namespaces that stand for nodes.

use crate::built;
use crate::machines;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No run here takes nearly as long.
const LIMIT: Duration = Duration::from_secs(120);

fn info(machine: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let layout = machines::lay_out(machine);
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.args(["info", "--nics", "--sysfs"]).arg(&layout.root).args(arguments).envs(variables.iter().copied());
    command.output().expect("the command starts")
}

#[test]
fn info_tells_each_ranks_gpu_and_nic_and_why() {
    let output = info("frontier", &["--ranks", "8"], &[]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for line in [
        "hsn2             cxi2:1     0000:d5:00.0   0    200 Gb/s      up    10.128.0.12",
        "4          0000:d1:00.0   hsn2             PHB      nearest to its GPU",
        "lo is not used: only this host can be reached by it",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
    }
}

#[test]
fn info_warns_of_a_map_that_leaves_nics_idle_and_explains_one_that_is_wrong() {
    let text = |map| String::from_utf8(info("frontier", &[], &[("STRATA_NIC_MAP", map)]).stdout).unwrap();
    assert!(text("hsn0,hsn1").contains("warning: local ranks 1, 3, 5, 7 share hsn1 while hsn2, hsn3 idle"));
    assert!(text("hsn9").contains("STRATA_NIC_MAP=hsn9 names hsn9; there are hsn0, hsn1, hsn2, hsn3, lo"));
}

/// Nodes as network namespaces, joined by one that stands for the switches; all go when this goes.
struct Cluster {
    nodes: [String; 2],
    switch: String,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for name in self.nodes.iter().chain([&self.switch]) {
            let _ = ip(&["netns", "del", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let shown = || format!("ip {}", arguments.join(" "));
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("{}: {error}", shown()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{}: {}", shown(), String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// How the nodes' NICs are wired.
#[derive(Clone, Copy, PartialEq)]
enum Wiring {
    /// All in one subnet on one switch.
    OneSubnet,
    /// The first NICs in one subnet, the second ones in another, with nothing between the two.
    OneSubnetEach,
}

impl Cluster {
    /// Two nodes with two NICs, `hsn0` and `hsn1`, and these `arp_ignore` and `arp_announce`.
    fn new(name: &str, wiring: Wiring, [ignore, announce]: [u32; 2]) -> Result<Cluster, String> {
        let named = |what: &str| format!("strata-{}-{name}-{what}", std::process::id());
        let cluster = Cluster { nodes: [named("a"), named("b")], switch: named("switch") };
        let switch = cluster.switch.as_str();
        ip(&["netns", "add", switch])?;
        for bridge in ["rail0", "rail1"] {
            ip(&["-n", switch, "link", "add", bridge, "type", "bridge"])?;
            ip(&["-n", switch, "link", "set", bridge, "up"])?;
        }
        for (number, node) in cluster.nodes.iter().enumerate() {
            ip(&["netns", "add", node])?;
            ip(&["-n", node, "link", "set", "lo", "up"])?;
            let all = "/proc/sys/net/ipv4/conf/all";
            let set = format!("echo {ignore} > {all}/arp_ignore && echo {announce} > {all}/arp_announce");
            ip(&["netns", "exec", node, "sh", "-c", &set])?;
            for rail in 0..2 {
                let (nic, port) = (format!("hsn{rail}"), format!("node{number}hsn{rail}"));
                ip(&["-n", switch, "link", "add", &port, "type", "veth", "peer", "name", &nic, "netns", node])?;
                let (subnet, bridge) = match wiring {
                    Wiring::OneSubnet => (0, "rail0".to_string()),
                    Wiring::OneSubnetEach => (rail, format!("rail{rail}")),
                };
                ip(&["-n", switch, "link", "set", &port, "master", &bridge, "up"])?;
                let address = format!("10.77.{subnet}.{}/24", 1 + number * 2 + rail);
                ip(&["-n", node, "addr", "add", &address, "dev", &nic])?;
                ip(&["-n", node, "link", "set", &nic, "up"])?;
            }
        }
        Ok(cluster)
    }

    fn start(&self, rank: usize, map: &str) -> Child {
        let (node, local) = (rank / 2, rank % 2);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.nodes[node], env!("CARGO_BIN_EXE_strata"), "perf", "all_reduce"]);
        command.args(["-b", "4M", "-e", "4M", "-n", "4", "-w", "1", "--library"]).arg(built::library());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "4").env("NCCL_HOSTID", &self.nodes[node]);
        command.env("LOCAL_RANK", local.to_string()).env("LOCAL_WORLD_SIZE", "2").env("NCCL_DEBUG", "INFO");
        command.env("STRATA_NIC_MAP", map);
        command.env("MASTER_ADDR", "10.77.0.1").env("MASTER_PORT", "29571");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a rank starts")
    }

    /// Runs an all-reduce on two ranks a node; what the ranks have said.
    fn run(&self, map: &str) -> Vec<String> {
        let ranks: Vec<_> = (0..4).map(|rank| self.start(rank, map)).collect();
        let pids: Vec<u32> = ranks.iter().map(Child::id).collect();
        let waits: Vec<_> = ranks.into_iter().map(|rank| std::thread::spawn(|| rank.wait_with_output())).collect();
        let deadline = Instant::now() + LIMIT;
        while !waits.iter().all(|wait| wait.is_finished()) {
            if Instant::now() > deadline {
                for pid in &pids {
                    built::signal("KILL", *pid);
                }
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let outputs: Vec<Output> = waits.into_iter().map(|wait| wait.join().unwrap().unwrap()).collect();
        let said = |(rank, output): (usize, &Output)| {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "rank {rank}: {said}");
            said
        };
        outputs.iter().enumerate().map(said).collect()
    }

    /// What each NIC has sent since it is there.
    fn counters(&self) -> [[u64; 2]; 2] {
        [0, 1].map(|node| [0, 1].map(|rail| self.counter(node, rail)))
    }

    fn counter(&self, node: usize, rail: usize) -> u64 {
        let path = format!("/sys/class/net/hsn{rail}/statistics/tx_bytes");
        let output = Command::new("ip").args(["netns", "exec", &self.nodes[node], "cat", &path]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    }
}

/// Bytes that the NICs of two nodes have sent; `None`, and a line that says why, where there can be no namespaces.
fn sent(name: &str, wiring: Wiring, arp: [u32; 2]) -> Option<[[u64; 2]; 2]> {
    match Cluster::new(name, wiring, arp) {
        Ok(cluster) => {
            cluster.run("auto");
            Some(cluster.counters())
        }
        Err(why) => skip(name, &why),
    }
}

fn skip<T>(name: &str, why: &str) -> Option<T> {
    println!("SKIPPED: {name}: network namespaces cannot be made: {why}");
    None
}

#[test]
fn a_node_whose_ranks_share_a_nic_while_another_idles_is_warned_of_once() {
    let cluster = Cluster::new("crowded", Wiring::OneSubnetEach, [0, 0]).or_else(|why| skip("crowded", &why).ok_or(()));
    let Ok(cluster) = cluster else { return };
    let said = cluster.run("hsn0");
    let warns =
        |said: &String| said.contains("WARN on ") && said.contains("local ranks 0, 1 share hsn0 while hsn1 idles");
    assert_eq!(said.iter().map(warns).collect::<Vec<_>>(), [true, false, true, false], "{said:?}");
    let sent = cluster.counters();
    assert!(sent.iter().all(|[first, second]| first > &(4 << 20) && second < &(1 << 20)), "{sent:?}");
}

fn assert_even(sent: [[u64; 2]; 2]) {
    for [first, second] in sent {
        let (less, more) = (first.min(second), first.max(second));
        // What starts the ranks goes over the first NIC; the messages are larger by far.
        assert!(less > 4 << 20 && less * 10 > more * 8, "bytes sent by the NICs of each node: {sent:?}");
    }
}

#[test]
fn nics_with_subnets_of_their_own_carry_the_same() {
    if let Some(sent) = sent("apart", Wiring::OneSubnetEach, [0, 0]) {
        assert_even(sent);
    }
}

#[test]
fn nics_of_one_subnet_that_speak_for_themselves_carry_the_same() {
    if let Some(sent) = sent("strict", Wiring::OneSubnet, [1, 2]) {
        assert_even(sent);
    }
}

#[test]
fn nics_of_one_subnet_that_speak_for_each_other_work() {
    // The second answers for its own addresses only, and still asks in the names of the others.
    for (name, arp) in [("lax", [0, 0]), ("half", [1, 0])] {
        let Some(sent) = sent(name, Wiring::OneSubnet, arp) else { return };
        assert!(sent.iter().all(|[first, second]| first + second > 4 << 20), "{sent:?}");
    }
}
