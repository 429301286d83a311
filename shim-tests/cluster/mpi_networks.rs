//! Which NICs carry the bytes of each MPI, counted by the kernel of nodes that are network namespaces, and what becomes of a
//! job whose MPI is told NICs that are not there.
//!
//! Two nodes with two ranks each run an all-reduce over MPI, as a user starts it; the results are checked. Without a map
//! Strata shares the NICs among the ranks, with `STRATA_NIC_MAP` the ranks use the NICs it names.

use crate::built::{self, checked};
use crate::netns::{allowed, Cluster};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Most that a run may take: it takes a second, and with MPICH 4.0 up to ten more in a `MPI_Finalize` that does not return.
const LIMIT: Duration = Duration::from_secs(60);
/// Most that a job may take to end whose MPI cannot work. A communicator may take 300 s to be made.
const ENDED: Duration = Duration::from_secs(40);

/// Held by the test that runs ranks.
static ALONE: Mutex<()> = Mutex::new(());

/// An MPI on a network of its choice.
struct Mpi {
    name: &'static str,
    /// What `scripts/build-mpi` is told.
    plugin: [&'static str; 2],
    launcher: &'static str,
    /// What a user sets who has this MPI use this network.
    variables: &'static [(&'static str, &'static str)],
    /// Where its libraries are, if not where the linker looks.
    libraries: Option<&'static str>,
    /// A variable by which it is told a network that is not there, and what is said then.
    nowhere: [&'static str; 3],
    /// Whether it ends well when all ranks have. MPICH 4.0 over UCX now and then does not return from `MPI_Finalize`, in programs
    /// without Strata, too (`scripts/bench-nics`).
    finalises: bool,
    /// What the NIC that sends least without a map sends of what the one that sends most does. UCX under Open MPI divides each
    /// rank's messages among the NICs by what it takes their rates to be, and now and then that is one part and three.
    evenness: f64,
}

const NO_WAY: &str = "MPI's processes do not all reach each other";
const NO_DEVICE: &str = "network device 'nowhere0' is not available";

const OPEN_MPI_TCP: Mpi = Mpi {
    name: "Open MPI over its TCP",
    plugin: ["--mpicc", "mpicc.openmpi"],
    launcher: "mpirun.openmpi",
    variables: &[("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "self,vader,tcp")],
    libraries: None,
    nowhere: ["OMPI_MCA_btl_tcp_if_include", "nowhere0", NO_WAY],
    finalises: true,
    evenness: 0.95,
};

const OPEN_MPI_UCX: Mpi = Mpi {
    name: "Open MPI over UCX",
    // Open MPI uses UCX for its own accord on InfiniBand only.
    variables: &[
        ("OMPI_MCA_pml", "ucx"),
        ("OMPI_MCA_opal_common_ucx_tls", "any"),
        ("OMPI_MCA_opal_common_ucx_devices", "any"),
    ],
    nowhere: ["UCX_NET_DEVICES", "nowhere0", NO_WAY],
    // UCX divides as it finds the links at that moment: 1:1, 1:3 and all on one of them have been seen.
    evenness: 0.0,
    ..OPEN_MPI_TCP
};

const MPICH_4: Mpi = Mpi {
    name: "MPICH 4 over UCX",
    plugin: ["--mpicc", "mpicc.mpich"],
    launcher: "mpiexec.hydra",
    variables: &[],
    libraries: None,
    nowhere: ["UCX_NET_DEVICES", "nowhere0", NO_DEVICE],
    finalises: false,
    evenness: 0.95,
};

const MPICH_5_UCX: Mpi = Mpi {
    name: "MPICH 5 over UCX",
    plugin: ["--abi", ""],
    launcher: "target/mpich/5.0.2/bin/mpiexec",
    variables: &[("MPIR_CVAR_CH4_NETMOD", "ucx")],
    libraries: Some("target/mpich/5.0.2/lib"),
    nowhere: ["UCX_NET_DEVICES", "nowhere0", NO_DEVICE],
    finalises: true,
    evenness: 0.95,
};

const MPICH_5_LIBFABRIC: Mpi = Mpi {
    name: "MPICH 5 over libfabric",
    variables: &[("MPIR_CVAR_CH4_NETMOD", "ofi")],
    nowhere: ["FI_PROVIDER", "nowhere0", "OFI call getinfo failed"],
    ..MPICH_5_UCX
};

const INTEL: Mpi = Mpi {
    name: "Intel MPI over libfabric",
    plugin: ["--abi", ""],
    launcher: "target/intel-mpi/2021.19.0/bin/mpiexec.hydra",
    variables: &[],
    libraries: Some("target/intel-mpi/2021.19.0/lib"),
    nowhere: ["FI_PROVIDER", "nowhere0", "OFI fi_getinfo() failed"],
    finalises: true,
    evenness: 0.95,
};

/// Whether a run ended well, how long it took, and what was said.
struct Run {
    success: bool,
    took: Duration,
    said: String,
}

impl Mpi {
    /// The launcher; a line says what is missing if it is.
    fn launcher(&self) -> Option<PathBuf> {
        let path = match self.libraries {
            Some(_) => built::root().join(self.launcher),
            None => PathBuf::from(self.launcher),
        };
        let compiler = (self.plugin[0] == "--mpicc").then_some(self.plugin[1]);
        let starts = |program: &Path, option: &str| Command::new(program).arg(option).output().is_ok();
        if !starts(&path, "--version") || compiler.is_some_and(|compiler| !starts(Path::new(compiler), "-show")) {
            println!("SKIPPED: {}: there is no {}; scripts/setup --check has it", self.name, self.launcher);
            return None;
        }
        Some(path)
    }

    fn build_plugin(&self) -> PathBuf {
        let name = format!("nics_mpi-{}-{}.so", std::process::id(), self.name.replace(' ', "_"));
        let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut build = Command::new(built::root().join("scripts/build-mpi"));
        build.env_remove("MPICC").args(self.plugin.iter().filter(|word| !word.is_empty())).arg("--out").arg(&plugin);
        checked(&mut build);
        plugin
    }

    /// The command line and the variables of an all-reduce on all ranks.
    fn command(&self, cluster: &Cluster, launcher: &Path, plugin: &Path, variables: &[(&str, &str)]) -> Command {
        let (library, plugin) = (built::library(), plugin.to_str().expect("a path"));
        let mut all = vec![("STRATA_INTER", "mpi"), ("STRATA_MPI_PLUGIN", plugin), ("STRATA_TIMEOUT_MS", "10000")];
        let libraries = self.libraries.map(|folder| built::root().join(folder).display().to_string());
        all.extend(libraries.iter().map(|path| ("LD_LIBRARY_PATH", path.as_str())));
        all.extend(self.variables.iter().chain(variables));
        let mut command = cluster.command("run");
        command.arg("--").arg("env").args(all.iter().map(|(name, value)| format!("{name}={value}"))).arg(launcher);
        if self.launcher.starts_with("mpirun") {
            command.arg("--oversubscribe");
            // Open MPI hands on its own variables only.
            let others = all.iter().filter(|(name, _)| !name.starts_with("OMPI_"));
            for (name, _) in others {
                command.args(["-x", name]);
            }
        }
        command.args([
            "-n",
            "4",
            env!("CARGO_BIN_EXE_strata"),
            "perf",
            "all_reduce",
            "-b",
            "4M",
            "-e",
            "4M",
            "-n",
            "2",
        ]);
        command.args(["-w", "1", "-c", "1", "--library"]).arg(library);
        command
    }
}

/// Runs a command to its end, or until its time is over.
fn run(mut command: Command) -> Run {
    let begin = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the script starts");
    let read = |mut stream: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        })
    };
    let out = read(Box::new(child.stdout.take().expect("a pipe")));
    let err = read(Box::new(child.stderr.take().expect("a pipe")));
    let status = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break Some(status),
            None if begin.elapsed() > LIMIT => break None,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    if status.is_none() {
        // What it started in the cluster ends with it.
        child.kill().expect("a child can be ended");
        let _ = child.wait();
    }
    let took = begin.elapsed();
    Run {
        success: status.is_some_and(|status| status.success()),
        took,
        said: out.join().unwrap() + &err.join().unwrap(),
    }
}

/// A cluster, an MPI, and its plugin.
struct Bench<'a> {
    mpi: &'a Mpi,
    launcher: &'a Path,
    plugin: &'a Path,
    cluster: Cluster,
}

impl Bench<'_> {
    /// What each NIC has sent for an all-reduce with these variables, in MB, as `node0 eth0`.
    fn sent(&self, variables: &[(&str, &str)]) -> (BTreeMap<String, f64>, String) {
        let before = self.cluster.sent();
        let Run { success, said, took } = self.run(variables);
        let what = format!("{} with {variables:?}, after {took:?}", self.mpi.name);
        assert!(said.contains("# Out of bounds values : 0 OK"), "{what}: {said}");
        assert!(success || !self.mpi.finalises, "{what}: {said}");
        assert!(!said.contains("TCP carries messages"), "{what}: {said}");
        let sent = self.cluster.sent().into_iter();
        let sent: BTreeMap<String, f64> =
            sent.map(|(nic, sent)| (format!("{} {}", nic.0, nic.1), (sent - before[&nic]) as f64 / 1e6)).collect();
        println!("{what}: {sent:.2?} MB");
        (sent, said)
    }

    fn run(&self, variables: &[(&str, &str)]) -> Run {
        run(self.mpi.command(&self.cluster, self.launcher, self.plugin, variables))
    }

    /// All NICs have sent the same; without a map, as evenly as this MPI divides.
    fn assert_even(&self, variables: &[(&str, &str)]) {
        let evenness = if variables.is_empty() { self.mpi.evenness } else { 0.95 };
        let (sent, _) = self.sent(variables);
        let (least, most) =
            sent.values().fold((f64::MAX, 0.0), |(low, high): (f64, f64), &mb| (low.min(mb), high.max(mb)));
        assert!(
            least + most > 32.0 && least > evenness * most,
            "{} with {variables:?}: MB sent: {sent:?}",
            self.mpi.name
        );
    }

    /// The NICs of this name have sent everything.
    fn assert_all_on(&self, name: &str, variables: &[(&str, &str)]) {
        let (sent, _) = self.sent(variables);
        let right = |(nic, &mb): (&String, &f64)| if nic.ends_with(name) { mb > 24.0 } else { mb < 1.0 };
        assert!(sent.iter().all(right), "{} with {variables:?}: MB sent: {sent:?}", self.mpi.name);
    }
}

/// What holds for every MPI, where it is installed.
fn check(mpi: &Mpi) {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(launcher) = mpi.launcher() else { return };
    if !allowed() {
        return;
    }
    let plugin = mpi.build_plugin();
    let name = mpi.name.replace(' ', "_");
    let bench = |nics: &str| {
        let shape = ["--nodes", "2", "--nics", nics, "--ranks", "2"];
        let cluster = Cluster::up(&format!("{name}-{}", nics.replace(',', "-")), &shape);
        Bench { mpi, launcher: &launcher, plugin: &plugin, cluster }
    };
    let two = bench("2");
    two.assert_even(&[]);
    two.assert_all_on("eth1", &[("STRATA_NIC_MAP", "eth1")]);
    two.assert_even(&[("STRATA_NIC_MAP", "eth1,eth0")]);
    a_map_of_nics_that_are_not_there_is_told(&two);
    a_job_whose_mpi_has_no_network_ends(&two);
    drop(two);
    // The second node has no address in the subnet of the first one's second NIC, and no way there.
    let uneven = bench("2,1");
    uneven.assert_all_on("eth0", &[]);
    std::fs::remove_file(plugin).expect("the plugin can be removed");
}

fn a_map_of_nics_that_are_not_there_is_told(bench: &Bench<'_>) {
    let (_, said) = bench.sent(&[("STRATA_NIC_MAP", "eth7")]);
    let told = "MPI is not told which NIC to use: STRATA_NIC_MAP=eth7 names eth7; there are eth0, eth1, lo";
    assert!(said.contains(told), "{}: {said}", bench.mpi.name);
}

fn a_job_whose_mpi_has_no_network_ends(bench: &Bench<'_>) {
    let [variable, value, told] = bench.mpi.nowhere;
    let Run { success, took, said } = bench.run(&[(variable, value)]);
    let what = format!("{} with {variable}={value}, after {took:?}", bench.mpi.name);
    println!("{what}: ended");
    assert!(!success && took < ENDED, "{what}: success: {success}: {said}");
    assert!(said.contains(told), "{what}: {said}");
}

#[test]
fn open_mpi_over_its_tcp_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&OPEN_MPI_TCP);
}

#[test]
fn open_mpi_over_ucx_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&OPEN_MPI_UCX);
}

#[test]
fn mpich_4_over_ucx_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&MPICH_4);
}

#[test]
fn mpich_5_over_ucx_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&MPICH_5_UCX);
}

#[test]
fn mpich_5_over_libfabric_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&MPICH_5_LIBFABRIC);
}

#[test]
fn intel_mpi_uses_the_nics_it_is_told_and_ends_without_one() {
    check(&INTEL);
}
