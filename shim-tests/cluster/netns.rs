//! The cluster of network namespaces: nodes that only their NICs join, equally loaded NICs, and nothing left behind.
//!
//! Where namespaces may not be created each test says `SKIPPED: why`.

use crate::built::{self, checked};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

pub fn script() -> PathBuf {
    built::root().join("scripts/netns-cluster")
}

/// Whether this machine allows clusters; says so if not.
pub fn allowed() -> bool {
    let output = Command::new(script()).arg("check").output().expect("the script starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(0) => true,
        Some(77) => {
            println!("SKIPPED: {}", said.trim());
            false
        }
        other => panic!("check ended with {other:?}: {said}"),
    }
}

/// A cluster of this test program, taken down at the end whatever the test did.
pub struct Cluster(String);

impl Cluster {
    fn named(test: &str) -> Cluster {
        Cluster(format!("test-{}-{test}", std::process::id()))
    }

    pub fn up(test: &str, options: &[&str]) -> Cluster {
        let cluster = Cluster::named(test);
        checked(cluster.command("up").args(options));
        cluster
    }

    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(script());
        command.args([verb, "--name", &self.0]).stdin(Stdio::null());
        command
    }

    fn run(&self, options: &[&str], line: &[&str]) -> String {
        checked(self.command("run").args(options).arg("--").args(line))
    }

    /// The namespaces of the nodes and of the cluster's processes.
    fn namespaces(&self) -> Vec<String> {
        let script = "readlink /proc/self/ns/net /proc/self/ns/uts /proc/self/ns/pid";
        self.run(&["--each", "node"], &["sh", "-c", script]).lines().map(str::to_string).collect()
    }

    /// Runs calls of a collective with these variables; what each rank has logged.
    fn logged(&self, set: &[&str], name: &str, bytes: &str, calls: &str) -> Vec<String> {
        let folder = std::env::temp_dir().join(format!("strata-{}", self.0));
        std::fs::create_dir_all(&folder).unwrap();
        let file = format!("NCCL_DEBUG_FILE={}/%h.%p", folder.display());
        self.calls_with(&[set, &["NCCL_DEBUG=INFO", &file]].concat(), name, bytes, calls);
        let logs = std::fs::read_dir(&folder).unwrap();
        let logs = logs.map(|log| std::fs::read_to_string(log.unwrap().path()).unwrap()).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        logs
    }

    /// Starts ranks, sets node1's eth1 down when it has sent so many bytes, and up again after a while; whether they succeed, and what they say.
    fn with_nic_down(&self, ranks: &mut Command, bytes: u64, back: Option<Duration>) -> (bool, String) {
        let child = ranks.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (id, deadline) = (child.id(), Instant::now() + 2 * LIMIT);
        let ended = std::thread::spawn(move || child.wait_with_output().unwrap());
        let wait = |what: &str| {
            std::thread::sleep(Duration::from_millis(50));
            if Instant::now() > deadline {
                built::signal("KILL", id);
                panic!("{what}");
            }
        };
        while self.sent()[&("node1".to_string(), "eth1".to_string())] < bytes {
            wait("nothing is sent");
        }
        checked(self.command("link").args(["1.1", "down"]));
        if let Some(back) = back {
            std::thread::sleep(back);
            checked(self.command("link").args(["1.1", "up"]));
        }
        while !ended.is_finished() {
            wait("the ranks do not end");
        }
        let Output { status, stdout, stderr } = ended.join().unwrap();
        (status.success(), String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr))
    }

    /// Bytes that each NIC has sent, by node and NIC.
    pub fn sent(&self) -> BTreeMap<(String, String), u64> {
        let out = checked(&mut self.command("counters"));
        let nic = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            ((words[0].to_string(), words[1].to_string()), words[2].parse().expect("a number of bytes"))
        };
        out.lines().map(nic).collect()
    }

    /// Runs a collective of `bytes` on every rank, checked, and returns what each NIC has sent for it.
    fn collective(&self, name: &str, bytes: &str) -> BTreeMap<(String, String), u64> {
        self.collective_with(&[], name, bytes)
    }

    /// The same with these variables.
    fn collective_with(&self, set: &[&str], name: &str, bytes: &str) -> BTreeMap<(String, String), u64> {
        self.calls_with(set, name, bytes, "2")
    }

    /// The same, so many times in a row.
    fn calls_with(&self, set: &[&str], name: &str, bytes: &str, calls: &str) -> BTreeMap<(String, String), u64> {
        let before = self.sent();
        let library = built::library();
        let perf =
            [env!("CARGO_BIN_EXE_strata"), "perf", name, "-b", bytes, "-e", bytes, "-n", calls, "-w", "0", "-c", "1"];
        let line = [&["env"][..], set, &perf[..], &["--library", library.to_str().unwrap()]].concat();
        let out = self.run(&["--each", "rank"], &line);
        assert!(out.contains("# Out of bounds values : 0 OK"), "{out}");
        self.sent().into_iter().map(|(nic, sent)| (nic.clone(), sent - before[&nic])).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.command("down").status();
    }
}

fn in_use(namespaces: &[String]) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("ns"));
    processes.flat_map(|ns| ["net", "uts", "pid"].map(|kind| ns.join(kind))).any(|link| {
        let target = std::fs::read_link(link).unwrap_or_default();
        namespaces.iter().any(|namespace| target == Path::new(namespace))
    })
}

fn wait_until_gone(namespaces: &[String]) {
    let deadline = Instant::now() + LIMIT;
    while in_use(namespaces) {
        assert!(Instant::now() < deadline, "processes still use {namespaces:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn nodes_have_names_and_reach_each_other_over_every_rail() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("names", &["--nodes", "3", "--nics", "2"]);
    assert_eq!(cluster.run(&["--each", "node"], &["hostname"]), "node0\nnode1\nnode2\n");
    let ranks = cluster.run(
        &["--each", "rank", "--placement", "round-robin"],
        &["sh", "-c", "echo $RANK $WORLD_SIZE $(hostname) $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR"],
    );
    let mut ranks: Vec<&str> = ranks.lines().collect();
    ranks.sort_unstable();
    let expected: Vec<String> =
        (0..6).map(|rank| format!("{rank} 6 node{} {} 2 10.0.0.1", rank % 3, rank / 3)).collect();
    assert_eq!(ranks, expected);
    // MPI's launchers run in node0, where rank 0 will be, and hand on what they are told.
    let told =
        cluster.run(&[], &["sh", "-c", "echo $(hostname) $MASTER_ADDR; [ \"$MASTER_PORT\" -gt 1023 ] && echo port"]);
    assert_eq!(told, "node0 10.0.0.1\nport\n");
    for rail in 0..2 {
        let answered = |cluster: &Cluster| cluster.sent()[&("node2".to_string(), format!("eth{rail}"))];
        let before = answered(&cluster);
        // Nobody listens there, and the node says so.
        cluster.run(&[], &["bash", "-c", &format!("(exec 3<>/dev/tcp/10.{rail}.0.3/9) 2>/dev/null; true")]);
        assert!(answered(&cluster) > before, "rail {rail}");
    }
}

#[test]
fn nodes_control_congestion_by_loss_whatever_this_machine_does() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("tcp", &["--nodes", "2"]);
    let used = cluster.run(&["--each", "node"], &["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]);
    assert!(used.lines().count() == 2 && used.lines().all(|name| ["cubic", "reno"].contains(&name)), "{used}");
}

#[test]
fn every_nic_carries_the_same_and_results_are_right() {
    if !allowed() {
        return;
    }
    for nodes in ["2", "3", "5", "6"] {
        let cluster = Cluster::up("even", &["--nodes", nodes, "--nics", "2"]);
        for name in ["all_gather", "reduce_scatter", "all_reduce"] {
            let sent = cluster.collective(name, "8M");
            let (least, most) = (*sent.values().min().unwrap() as f64, *sent.values().max().unwrap() as f64);
            assert!(most <= 1.03 * least, "{name} on {nodes} nodes: {sent:?}");
        }
    }
}

/// What a root sends goes by all NICs of its node, or by its own one where the setting says so.
#[test]
fn what_a_root_sends_goes_by_all_nics_of_its_node() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("wide", &["--nodes", "2", "--nics", "2", "--rate", "400mbit"]);
    for (setting, evenly) in [("auto", true), ("all", true), ("own", false)] {
        let sent = cluster.collective_with(&[&format!("STRATA_TCP_NICS={setting}")], "scatter", "8M");
        let [one, other] = [0, 1].map(|nic| sent[&("node0".to_string(), format!("eth{nic}"))] as f64);
        let share = other / (one + other);
        assert!(if evenly { (0.35..0.65).contains(&share) } else { share < 0.1 }, "{setting}: {share} of {sent:?}");
    }
    // What loads all alike stays with each rank's NIC, unless the setting says otherwise; results are right either way.
    for setting in ["auto", "all"] {
        cluster.collective_with(&[&format!("STRATA_TCP_NICS={setting}")], "all_reduce", "8M");
    }
}

#[test]
fn a_nic_s_rate_can_be_changed() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("slow", &["--nodes", "2", "--nics", "2", "--rate", "400mbit"]);
    checked(cluster.command("rate").args(["0.1", "100mbit"]));
    let rates = cluster.run(&["--each", "node"], &["tc", "qdisc", "show"]);
    let have = |rate: &str| rates.lines().filter(|line| line.contains(rate)).count();
    assert_eq!((have("rate 100Mbit"), have("rate 400Mbit")), (1, 3), "{rates}");
    for wrong in [["0.7", "100mbit"], ["0.1", "fast"], ["1", "100mbit"]] {
        assert!(!cluster.command("rate").args(wrong).output().expect("it starts").status.success(), "{wrong:?}");
    }
}

/// A rank whose NIC goes down in a call says so, while it waits and in its error.
#[test]
fn a_nic_that_goes_down_is_named_by_who_waits_for_it() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("down", &["--nodes", "2", "--nics", "2", "--rate", "40mbit"]);
    let library = built::library();
    let perf = ["perf", "all_reduce", "-b", "32M", "-e", "32M", "-n", "5", "--library"];
    let env = ["env", "NCCL_DEBUG=WARN", "STRATA_TIMEOUT_MS=4000", env!("CARGO_BIN_EXE_strata")];
    let mut ranks = cluster.command("run");
    ranks.args(["--each", "rank", "--"]).args(env).args(perf).arg(&library);
    // A call takes 3 s at least.
    let (has_succeeded, said) = cluster.with_nic_down(&mut ranks, 1 << 20, None);
    assert!(!has_succeeded && said.contains("eth1, the NIC of rank 3, is down: operation "), "{said}");
}

/// The program that has calls while a NIC is down, compiled, and what runs it on each rank.
fn nic_down(cluster: &Cluster, arguments: &[&str]) -> Command {
    let source = std::fs::read_to_string(built::root().join("shim-tests/c/nic_down.c")).unwrap();
    let library = built::library_dir();
    let [checks, include] = ["shim-tests/c", "include"].map(|folder| built::root().join(folder));
    let options =
        ["-I", checks.to_str().unwrap(), "-I", include.to_str().unwrap(), "-L", library.to_str().unwrap(), "-lnccl"];
    let program = built::Compiler::new("c").compile(&source, &options);
    let env =
        ["env", "NCCL_COMM_ID=10.0.0.1:29555", "NCCL_DEBUG=INFO", "STRATA_LOST=continue", "STRATA_TIMEOUT_MS=30000"];
    let mut ranks = cluster.command("run");
    ranks.args(["--each", "rank", "--"]).args(env).arg(&program).args(arguments).env("LD_LIBRARY_PATH", &library);
    ranks
}

/// A rank's NIC goes down in a call, and all ranks make it again over NICs that are up: every element of every call is checked. Two ranks have one NIC
/// then, and all find shares by that.
#[test]
fn all_ranks_go_on_over_other_nics_when_one_goes_down() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("nic", &["--nodes", "3", "--nics", "2", "--rate", "100mbit"]);
    let (has_succeeded, said) = cluster.with_nic_down(&mut nic_down(&cluster, &["8388608", "12"]), 12 << 20, None);
    println!("{said}");
    let shared: Vec<&str> =
        said.lines().filter_map(|line| line.split_once(" INFO epoch 1 ")).map(|(_, how)| how).collect();
    assert!(shared.len() == 6 && shared.iter().all(|how| *how == shared[0]), "{shared:?}");
    let all_go_on =
        said.contains(": 6 ranks go on over NICs that are up: ") && said.contains("eth1, the NIC of rank 3, is down");
    assert!(has_succeeded && said.matches(" done, longest call ").count() == 6 && all_go_on, "{said}");
}

/// The NIC comes back, and the program's next `strataCommAdapt` has all ranks use it again.
#[test]
fn a_nic_that_is_up_again_is_used_where_the_program_asks_for_it() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("back", &["--nodes", "3", "--nics", "2", "--rate", "200mbit"]);
    let mut ranks = nic_down(&cluster, &["4194304", "30", "adapt"]);
    let back = Some(Duration::from_millis(2500));
    let (has_succeeded, said) = cluster.with_nic_down(&mut ranks, 8 << 20, back);
    let sent = cluster.sent()[&("node1".to_string(), "eth1".to_string())];
    println!("{said}\nnode1 has sent {sent} bytes by eth1");
    assert!(has_succeeded && said.matches(" done, longest call ").count() == 6, "{said}");
    assert!(said.contains(": 6 ranks go on over NICs that are up: "), "{said}");
    assert_eq!(said.matches("goes on with what has come back").count(), 6, "{said}");
    // A rail of each call: two thirds of a half of the vector, twice.
    assert!(sent > (8 << 20) + 5 * (8 << 20) / 6, "{sent} bytes: the NIC is not used again");
}

/// One NIC has a twentieth of the others' rate: all ranks find shares, before the same operation.
#[test]
fn all_reduces_are_shared_by_what_links_deliver() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("epochs", &["--nodes", "3", "--nics", "2", "--rate", "400mbit"]);
    checked(cluster.command("rate").args(["1.1", "20mbit"]));
    let logs = cluster.logged(&["STRATA_MEASURE_EVERY=1"], "all_reduce", "4M", "2");
    let first =
        |log: String| log.lines().find_map(|line| line.split_once(" INFO epoch 1 ").map(|(_, said)| said.to_string()));
    let said: Vec<Option<String>> = logs.into_iter().map(first).collect();
    assert_eq!(said.len(), 6, "{said:?}");
    assert!(said[0].is_some() && said.iter().all(|one| *one == said[0]), "{said:?}");
}

/// Links of 5 MB/s, where coding a byte takes a hundredth of what it saves: the calls themselves say that, to each rank.
#[test]
fn messages_are_coded_without_loss_where_calls_are_quicker_by_that() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("lossless", &["--nodes", "2", "--nics", "1", "--rate", "40mbit"]);
    let logs = cluster.logged(&["STRATA_LOSSLESS=zstd"], "all_reduce", "1M", "16");
    let said =
        |log: &String| log.contains("messages of all_reduce of float, from 1048576 bytes on are coded from now on");
    assert!(logs.len() == 2 && logs.iter().all(said), "{logs:?}");
}

#[test]
fn on_uneven_nodes_every_rank_s_nic_carries_its_rank_s_bytes() {
    if !allowed() {
        return;
    }
    // Node0's third NIC shares a subnet with no other node's rank: it sends because nodes route by source address.
    let cluster = Cluster::up("uneven", &["--nodes", "3", "--nics", "3", "--ranks", "3,1,2"]);
    // What each NIC sends, in parts of a size of the collective's own. A rank serves the rails that its node lacks.
    let expected: [(&str, [&[u32]; 3]); 3] = [
        // Each rank sends its block to the two other nodes.
        ("all_gather", [&[2, 2, 2], &[2], &[2, 2]]),
        // Each node sums for each rank of the others, and sends the sum on the rail of that rank. The third rail ends at
        // node0's third rank alone, so what it has to send is nothing. Node1's NIC sends for all five others: no sharing
        // on node0 could make the call shorter.
        ("reduce_scatter", [&[2, 1, 0], &[5], &[3, 1]]),
        // Each rail reduces a third of the vector; node1's rank serves three rails, node2's first one two.
        ("all_reduce", [&[1, 1, 1], &[3], &[2, 1]]),
    ];
    for (name, parts) in expected {
        let sent = cluster.collective(name, "6M");
        let bytes = |node: usize, nic: usize| sent[&(format!("node{node}"), format!("eth{nic}"))] as f64;
        let part = bytes(1, 0) / f64::from(parts[1][0]);
        assert!(part > 6e6, "{name}: {sent:?}");
        for (node, parts) in parts.iter().enumerate() {
            for nic in 0..3 {
                let wanted = f64::from(*parts.get(nic).unwrap_or(&0));
                let found = bytes(node, nic) / part;
                assert!((found - wanted).abs() < 0.03, "{name}: eth{nic} of node{node} sent {found} parts: {sent:?}");
            }
        }
    }
}

#[test]
fn nodes_with_different_numbers_of_nics_reach_each_other() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("unequal", &["--nodes", "3", "--nics", "3,1,2"]);
    for name in ["all_gather", "reduce_scatter", "all_reduce"] {
        let sent = cluster.collective(name, "6M");
        // Nobody else is on the third rail.
        assert!(sent[&("node0".to_string(), "eth2".to_string())] < 100_000, "{name}: {sent:?}");
    }
}

#[test]
fn on_cables_of_a_machine_messages_go_along_its_links() {
    if !allowed() {
        return;
    }
    let machine = built::root().join("machines/dgx-1.toml");
    let machine = machine.to_str().unwrap();
    let cluster = Cluster::up("links", &["--nodes", "8", "--links", machine]);
    let set = |algorithm: &str, machine: Option<&str>| -> Vec<String> {
        let machine = machine.map(|machine| format!("STRATA_MACHINE={machine}"));
        let mut set = vec!["NCCL_HOSTID=links".to_string(), "STRATA_SHM=0".to_string()];
        set.extend(machine);
        set.push(format!("STRATA_ALLREDUCE_ALGO={algorithm}"));
        set
    };
    let bytes = 1 << 20;
    let sent = |set: &[String]| {
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let sent = cluster.collective_with(&set, "all_reduce", "1M");
        let of = |is_link: bool| {
            let nics = sent.iter().filter(move |((_, nic), _)| nic.starts_with("link") == is_link);
            nics.map(|(_, &bytes)| bytes).collect::<Vec<u64>>()
        };
        (of(true), of(false))
    };
    // The checked call out of place and in place, and two timed ones of each: six times the message.
    let calls = 6 * bytes;
    // Three trees of a third of the message, on 21 of 24 links, each way.
    let (links, rails) = sent(&set("link_trees", Some(machine)));
    assert_eq!(links.len(), 32, "16 pairs, each way");
    assert!(links.iter().filter(|&&bytes| bytes > calls / 4).count() >= 26, "{links:?}");
    assert!(rails.iter().all(|&bytes| bytes < calls / 10), "{rails:?}");
    // Detours keep messages off the rail; without links the tree's edges that have none are there.
    let (links, rails) = sent(&set("two_trees", Some(machine)));
    assert!(links.iter().sum::<u64>() > 14 * calls && rails.iter().all(|&bytes| bytes < calls / 10), "{rails:?}");
    let (_, rails) = sent(&set("two_trees", None));
    assert!(rails.iter().any(|&bytes| bytes > calls / 3), "{rails:?}");
}

#[test]
fn links_that_no_nodes_can_have_are_refused() {
    let folder = std::env::temp_dir().join(format!("strata-links-{}.toml", std::process::id()));
    let file = folder.to_str().unwrap();
    for (text, said) in [
        ("[[inside.links]]\nranks = [0, 2]\n", "ranks 0 and 2, of 2"),
        ("[[inside.links]]\nranks = [1, 1]\n", "ranks 1 and 1"),
        ("[[inside.links]]\nranks = [0, 1]\ncount = 0\n", "0 links between"),
        ("[inside]\nranks = [0, 1]\n", "no [[inside.links]]"),
    ] {
        std::fs::write(&folder, text).unwrap();
        let output = Command::new(script()).args(["up", "--links", file]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains(said), "{text}");
    }
    std::fs::remove_file(&folder).unwrap();
}

#[test]
fn the_launchers_of_both_mpis_reach_all_nodes() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("mpi", &["--nodes", "3", "--nics", "1", "--ranks", "2"]);
    for launcher in ["mpirun.openmpi", "mpiexec.hydra"] {
        if Command::new(launcher).arg("--version").output().is_err() {
            println!("SKIPPED: there is no {launcher}");
            continue;
        }
        let out = cluster.run(&[], &[launcher, "-n", "6", "hostname"]);
        let mut hosts: Vec<&str> = out.lines().collect();
        hosts.sort_unstable();
        assert_eq!(hosts, ["node0", "node0", "node1", "node1", "node2", "node2"], "{launcher}");
    }
}

#[test]
fn a_command_s_exit_status_is_passed_on_and_the_first_failure_ends_all_ranks() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("status", &["--nodes", "2"]);
    let status = |options: &[&str], script: &str| {
        cluster.command("run").args(options).args(["--", "sh", "-c", script]).status().unwrap().code()
    };
    assert_eq!(status(&[], "exit 7"), Some(7));
    assert_eq!(status(&["--each", "rank"], "[ $RANK = 1 ] && exit 5; exec sleep 600"), Some(5));
}

#[test]
fn nothing_is_left_of_a_cluster_that_was_taken_down() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("down", &["--nodes", "2"]);
    let namespaces = cluster.namespaces();
    let mut busy = cluster.command("run").args(["--each", "rank", "--", "sleep", "600"]).spawn().unwrap();
    checked(&mut cluster.command("down"));
    assert!(!in_use(&namespaces));
    assert!(!busy.wait().unwrap().success());
}

#[test]
fn what_a_killed_run_started_ends_and_the_cluster_stays() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::up("run", &["--nodes", "2"]);
    let script =
        "for all in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$all; echo; done 2>&1 | grep -c '^sleep 601 $'; true";
    let processes = || cluster.run(&[], &["sh", "-c", script]);
    let wait_for = |count: &str| {
        let deadline = Instant::now() + LIMIT;
        while processes().trim() != count {
            assert!(Instant::now() < deadline, "not {count} processes but {}", processes());
        }
    };
    let mut run = cluster.command("run").args(["--each", "rank", "--", "sleep", "601"]).spawn().unwrap();
    wait_for("2");
    kill(&mut run);
    wait_for("0");
}

#[test]
fn a_command_in_a_one_shot_cluster_reads_the_counters_of_its_nics() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::named("counters");
    let script = script();
    // Without a name the cluster that the command runs in is meant.
    let out = checked(cluster.command("with").args(["--nodes", "2", "--nics", "2", "--"]).arg(script).arg("counters"));
    let nics: Vec<String> = out.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(nics, ["node0 eth0", "node0 eth1", "node1 eth0", "node1 eth1"]);
}

#[test]
fn a_one_shot_cluster_ends_with_its_command_and_when_it_is_killed() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::named("with");
    assert_eq!(
        checked(cluster.command("with").args(["--nodes", "2", "--each", "node", "--", "hostname"])),
        "node0\nnode1\n"
    );
    let mut with = cluster.command("with").args(["--nodes", "2", "--", "sleep", "600"]).spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    while !cluster.command("run").args(["--", "true"]).stderr(Stdio::null()).status().unwrap().success() {
        assert!(Instant::now() < deadline, "the cluster does not come up");
    }
    let namespaces = cluster.namespaces();
    kill(&mut with);
    wait_until_gone(&namespaces);
}

#[test]
fn a_killed_up_leaves_nothing_that_the_next_one_minds() {
    if !allowed() {
        return;
    }
    let cluster = Cluster::named("killed");
    for delay_ms in [1, 30, 60, 90, 120, 150] {
        let mut up = cluster.command("up").args(["--nodes", "6", "--nics", "3"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(&mut up);
        checked(cluster.command("up").args(["--nodes", "2"]));
        assert_eq!(cluster.run(&["--each", "node"], &["hostname"]), "node0\nnode1\n");
    }
    let namespaces = cluster.namespaces();
    checked(&mut cluster.command("down"));
    assert!(!in_use(&namespaces));
}

#[test]
fn a_machine_that_does_not_allow_it_is_told_why() {
    let tools = std::env::temp_dir().join(format!("strata-netns-tools-{}", std::process::id()));
    std::fs::create_dir_all(&tools).unwrap();
    for tool in ["bash", "env", "realpath", "uname", "id", "ip", "nsenter", "flock", "hostname"] {
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|dir| dir.join(tool))
            .find(|path| path.exists());
        if let Some(found) = found {
            std::os::unix::fs::symlink(found, tools.join(tool)).unwrap();
        }
    }
    let check = || {
        let output = Command::new(script()).arg("check").env("PATH", &tools).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = check();
    assert_eq!(status, Some(77), "{said}");
    assert!(said.contains("there is no "), "{said}");
    for tool in ["ip", "tc", "nsenter", "flock", "unshare"] {
        let _ = std::fs::remove_file(tools.join(tool));
        let refusal = "#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n";
        std::fs::write(tools.join(tool), refusal).unwrap();
        std::fs::set_permissions(tools.join(tool), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let (status, said) = check();
    assert_eq!(status, Some(77), "{said}");
    assert!(said.contains("may not create network namespaces") && said.contains("Operation not permitted"), "{said}");
    std::fs::remove_dir_all(&tools).unwrap();
}
