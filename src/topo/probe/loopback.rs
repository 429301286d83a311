//! Round trips and traffic over loopback sockets on this host, from processors of a NUMA node.
//!
//! Both ends are at the NIC's address. Linux delivers what goes to an address of its own without the NIC, unless routes make it
//! leave the host and come back; a switch or a cable has to return it then. So the kernel's counters of the NIC are read before
//! and after: where they did not count the packets there is no measurement, and the text says so.
#![forbid(unsafe_code)]

use super::Series;
use crate::topo::interface::Interface;
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a message whose round trip is timed.
const MESSAGE: usize = 64;
/// Round trips before the first that counts.
const WARMUP: usize = 200;
/// Round trips of a sample, which is their median.
const ROUNDS: usize = 200;
/// Samples.
const SAMPLES: usize = 9;
/// Bytes that traffic sends at once.
const BLOCK: usize = 256 << 10;
/// A peer on the same host that does not answer for so long is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// The NUMA nodes of a host and its NICs' counters, in its sysfs.
#[derive(Debug, Clone)]
pub struct LoopbackHost {
    sysfs: PathBuf,
    nodes: Vec<(u32, CpuSet)>,
}

impl LoopbackHost {
    /// The host whose sysfs this is. Nodes whose processors this process may not use are left out.
    pub fn new(sysfs: &Path) -> LoopbackHost {
        let allowed = sched_getaffinity(None).ok();
        let entries = fs::read_dir(sysfs.join("devices/system/node")).into_iter().flatten().flatten();
        let node = |entry: fs::DirEntry| {
            let number: u32 = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            let mut cpus = CpuSet::new();
            let usable = |cpu: &usize| *cpu < CpuSet::MAX_CPU && allowed.as_ref().is_none_or(|set| set.is_set(*cpu));
            processors(&list).into_iter().filter(usable).for_each(|cpu| cpus.set(cpu));
            (cpus.count() > 0).then_some((number, cpus))
        };
        let mut nodes: Vec<(u32, CpuSet)> = entries.filter_map(node).collect();
        nodes.sort_by_key(|(number, _)| *number);
        LoopbackHost { sysfs: sysfs.to_path_buf(), nodes }
    }

    /// The NUMA nodes that have processors this process may use.
    pub fn nodes(&self) -> Vec<u32> {
        self.nodes.iter().map(|(number, _)| *number).collect()
    }

    /// Packets that an interface has received and sent; none where the kernel does not tell.
    fn packets(&self, interface: &str) -> Option<[u64; 2]> {
        let folder = self.sysfs.join("class/net").join(interface).join("statistics");
        let count = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok();
        Some([count("rx_packets")?, count("tx_packets")?])
    }

    /// Does something that sends at least so many messages each way, and says why if they did not pass the interface.
    fn counted<T>(
        &self,
        interface: &str,
        messages: u64,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<(T, Option<String>), String> {
        let before = self.packets(interface);
        let result = work()?;
        let passed = match before.zip(self.packets(interface)) {
            None => Some(format!("the kernel does not count the packets of {interface}")),
            // Each message is sent, and received again.
            Some((before, after)) => {
                let counted = after.iter().zip(before).map(|(after, before)| after.saturating_sub(before)).min();
                (counted < Some(2 * messages))
                    .then(|| format!("loopback does not pass {interface}: the kernel delivers it"))
            }
        };
        Ok((result, passed))
    }

    /// Microseconds of a round trip to an address of this host, both ends on processors of a node. The second value says why
    /// they are not those of the interface, where the messages did not pass it.
    pub fn round_trips(&self, address: &Interface, node: u32) -> Result<(Series, Option<String>), String> {
        let cpus = self.nodes.iter().find(|(number, _)| *number == node).map(|(_, cpus)| *cpus);
        let cpus = cpus.ok_or_else(|| format!("NUMA node {node} has no processor for this process"))?;
        let trips = || {
            // The caller's thread stays where it is.
            let timed = std::thread::Builder::new().name("strata-probe".into()).spawn({
                let address = address.clone();
                move || time_trips(&address, &cpus)
            });
            let timed = timed.map_err(|error| format!("starting a thread: {error}"))?;
            timed.join().map_err(|_| "a measuring thread panicked".to_string())?
        };
        self.counted(&address.name, (WARMUP + SAMPLES * ROUNDS) as u64, trips)
    }

    /// Starts traffic to an address of this host, which lasts as long as the value.
    pub fn traffic(&self, address: &Interface) -> Result<Traffic, String> {
        let (out, input) = connected(address)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let send = move || {
            let mut out = out;
            let block = vec![0; BLOCK];
            while !stopped.load(Ordering::Relaxed) && out.write_all(&block).is_ok() {}
        };
        let receive = move || {
            let mut input = input;
            let mut block = vec![0; BLOCK];
            // Ends when the sender is gone.
            while input.read(&mut block).is_ok_and(|bytes| bytes > 0) {}
        };
        let mut traffic = Traffic { stop, threads: Vec::new() };
        traffic.start(send)?;
        traffic.start(receive)?;
        Ok(traffic)
    }
}

/// Two threads that send and receive until this goes.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn start(&mut self, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
        let thread = std::thread::Builder::new().name("strata-probe".into()).spawn(work);
        self.threads.push(thread.map_err(|error| format!("starting a thread: {error}"))?);
        Ok(())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The numbers in a list such as `0-3,8`.
fn processors(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let last: usize = last.parse().ok()?;
        Some(first.parse().ok()?..=last.min(CpuSet::MAX_CPU))
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// Two ends of a connection at an address of this host.
fn connected(address: &Interface) -> Result<(TcpStream, TcpStream), String> {
    let at = |what: &str| {
        let text = format!("{what} {}", address.addr);
        move |error: std::io::Error| format!("{text}: {error}")
    };
    let listener = TcpListener::bind(address.with_port(0)).map_err(at("listening at"))?;
    let there = listener.local_addr().map_err(at("listening at"))?;
    let out = TcpStream::connect_timeout(&there, PATIENCE).map_err(at("connecting to"))?;
    let (input, _) = listener.accept().map_err(at("accepting at"))?;
    for end in [&out, &input] {
        end.set_nodelay(true).map_err(at("setting up"))?;
        end.set_read_timeout(Some(PATIENCE)).map_err(at("setting up"))?;
        end.set_write_timeout(Some(PATIENCE)).map_err(at("setting up"))?;
    }
    Ok((out, input))
}

/// Times round trips of messages, each returned by a thread on the same processors.
fn time_trips(address: &Interface, cpus: &CpuSet) -> Result<Series, String> {
    let bind = |cpus: &CpuSet| sched_setaffinity(None, cpus).map_err(|error| format!("sched_setaffinity: {error}"));
    bind(cpus)?;
    let (mut out, mut input) = connected(address)?;
    // A thread has its parent's processors.
    let echo = std::thread::Builder::new().name("strata-probe".into()).spawn(move || {
        let mut message = [0; MESSAGE];
        while input.read_exact(&mut message).is_ok() && input.write_all(&message).is_ok() {}
    });
    let echo = echo.map_err(|error| format!("starting a thread: {error}"))?;
    let mut message = [0; MESSAGE];
    let mut trip = || -> std::io::Result<f64> {
        let start = Instant::now();
        out.write_all(&message)?;
        out.read_exact(&mut message)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    let mut sample = |rounds: usize| -> std::io::Result<f64> {
        let mut times = (0..rounds).map(|_| trip()).collect::<std::io::Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[rounds / 2])
    };
    let samples =
        sample(WARMUP).and_then(|_| (0..SAMPLES).map(|_| sample(ROUNDS)).collect::<std::io::Result<Vec<f64>>>());
    drop(out);
    let _ = echo.join();
    let samples = samples.map_err(|error| format!("a round trip to {}: {error}", address.addr))?;
    Series::new(samples).ok_or_else(|| "the clock stood still".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn localhost() -> Interface {
        let addr = "127.0.0.1".parse().unwrap();
        Interface { name: "lo".into(), addr, prefix: 8, scope: 0, up: true, loopback: true }
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(processors("0-3,8, 10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(processors(""), [0; 0]);
        assert_eq!(processors("x,2-"), [0; 0]);
    }

    #[test]
    fn a_round_trip_is_timed_and_its_packets_are_those_of_the_interface() {
        let host = LoopbackHost::new(Path::new("/sys"));
        let Some(&node) = host.nodes().first() else { return println!("SKIPPED: no NUMA node in /sys") };
        let (series, lost) = host.round_trips(&localhost(), node).unwrap();
        assert!(series.median() > 0.0);
        if host.packets("lo").is_some() {
            assert_eq!(lost, None, "what goes to 127.0.0.1 passes lo");
        }
        let elsewhere = Interface { name: "strata-none0".into(), ..localhost() };
        let (_, lost) = host.round_trips(&elsewhere, node).unwrap();
        assert_eq!(lost.as_deref(), Some("the kernel does not count the packets of strata-none0"));
        assert!(host.round_trips(&localhost(), 999).unwrap_err().contains("NUMA node 999"));
    }

    #[test]
    fn packets_that_an_interface_does_not_count_did_not_pass_it() {
        let root = std::env::temp_dir().join(format!("strata-loopback-{}", std::process::id()));
        let folder = root.join("class/net/eth0/statistics");
        fs::create_dir_all(&folder).unwrap();
        let put = |counts: [u64; 2]| {
            let file = |name: &str, count: u64| fs::write(folder.join(name), format!("{count}\n"));
            let written = file("rx_packets", counts[0]).and_then(|()| file("tx_packets", counts[1]));
            written.map_err(|error| error.to_string())
        };
        let host = LoopbackHost { sysfs: root.clone(), nodes: Vec::new() };
        let passes = |after: [u64; 2]| {
            put([5, 7]).unwrap();
            host.counted("eth0", 100, || put(after)).unwrap().1.is_none()
        };
        assert!(passes([205, 207]));
        assert!(!passes([205, 206]), "one was not sent by it");
        assert!(!passes([5, 7]));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn traffic_ends_with_its_value() {
        let host = LoopbackHost { sysfs: PathBuf::from("/sys"), nodes: Vec::new() };
        let traffic = host.traffic(&localhost()).unwrap();
        let threads = traffic.threads.len();
        drop(traffic);
        assert_eq!(threads, 2);
    }
}
