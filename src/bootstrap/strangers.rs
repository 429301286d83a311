//! Strangers who hold as many connections as they can to a process with few descriptors, whose ranks meet all the same.

use super::protocol::{Frame, HEAD_BYTES};
use super::{Credentials, Exchange, Service, Session, UniqueId};
use crate::topo::Rank;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command as Program, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Descriptors that the attacked process may have, where the environment tells it to be one.
const FEW: &str = "TEST_DESCRIPTORS";
const LIMIT: Duration = Duration::from_secs(60);
/// Connections that the strangers hold at once.
const HELD: usize = 600;

static NEVER: AtomicBool = AtomicBool::new(false);

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn memory_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The life of the attacked process. Without the environment that its parent gives it, there is nothing to do.
#[test]
fn a_process_with_few_descriptors_obeys_its_parent() {
    let Ok(few) = std::env::var(FEW) else { return };
    let few = Some(few.parse().unwrap());
    setrlimit(Resource::Nofile, Rlimit { current: few, maximum: few }).unwrap();
    println!("@{}", Service::get().unwrap().addr().0);
    for line in std::io::stdin().lines() {
        if line.unwrap() == "measure" {
            println!("@{} {}", descriptors(), memory_kib());
            continue;
        }
        let id = UniqueId::create().unwrap();
        std::thread::scope(|scope| {
            for rank in 0..4u32 {
                scope.spawn(move || {
                    let mut session = Session::join(&[id], 4, Rank(rank), LIMIT, &NEVER).unwrap();
                    assert_eq!(session.allgather(vec![rank as u8]).unwrap(), [[0], [1], [2], [3]]);
                    session.close();
                });
            }
        });
        println!("@met");
    }
}

/// The attacked process, as its parent sees it.
struct Victim {
    child: Child,
    answers: Lines<BufReader<ChildStdout>>,
    addr: SocketAddr,
}

impl Drop for Victim {
    fn drop(&mut self) {
        // One that has ended cannot be killed; it is reaped all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Victim {
    fn start(descriptors: u64) -> Victim {
        let name = "bootstrap::strangers::a_process_with_few_descriptors_obeys_its_parent";
        let mut child = Program::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(FEW, descriptors.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut victim = Victim { child, answers, addr: SocketAddr::from(([0, 0, 0, 0], 0)) };
        victim.addr = victim.answer().parse().unwrap();
        victim
    }

    fn answer(&mut self) -> String {
        let mut lines = self.answers.by_ref().map(|line| line.expect("the attacked process lives"));
        let said = lines.find_map(|line| line.split_once('@').map(|(_, answer)| answer.to_string()));
        said.expect("the attacked process has ended")
    }

    fn ask(&mut self, order: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.answer()
    }

    fn measure(&mut self) -> (usize, usize) {
        let (descriptors, kib) =
            self.ask("measure").split_once(' ').map(|(a, b)| (a.to_string(), b.to_string())).unwrap();
        (descriptors.parse().unwrap(), kib.parse().unwrap())
    }
}

/// Connects again and again, says `first`, and holds what it gets. With `slowly` it goes on saying a byte now and then.
fn besiege(addr: SocketAddr, first: &[u8], slowly: bool, stop: &AtomicBool, made: &AtomicUsize) {
    let mut held = VecDeque::new();
    while !stop.load(Ordering::Acquire) {
        // While the backlog is full nobody gets in.
        let Ok(mut stream) = TcpStream::connect_timeout(&addr, Duration::from_millis(200)) else { continue };
        stream.set_nonblocking(true).unwrap();
        // One that was ended already cannot be written to.
        let _ = stream.write(first);
        held.push_back(stream);
        made.fetch_add(1, Ordering::AcqRel);
        if slowly {
            held.iter_mut().step_by(37).for_each(|stream| drop(stream.write(&[0x53])));
        }
        if held.len() > HELD {
            held.pop_front();
        }
    }
}

fn withstands(first: &[u8], slowly: bool) {
    let own = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: own.maximum, ..own }).unwrap();
    let mut victim = Victim::start(256);
    assert_eq!(victim.ask("meet"), "met");
    let (_, kib_before) = victim.measure();
    let (stop, made, addr) = (AtomicBool::new(false), AtomicUsize::new(0), victim.addr);
    std::thread::scope(|scope| {
        scope.spawn(|| besiege(addr, first, slowly, &stop, &made));
        let began = Instant::now();
        while made.load(Ordering::Acquire) < HELD && began.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        // What fails here must not leave the stranger behind.
        let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..3).map(|_| (victim.ask("meet"), victim.measure())).collect::<Vec<_>>()
        }));
        stop.store(true, Ordering::Release);
        for (met, (descriptors, kib)) in said.unwrap() {
            assert_eq!(met, "met");
            assert!(descriptors < 256 / 2, "{descriptors} descriptors of 256 are taken");
            assert!(kib < kib_before + (32 << 10), "{kib_before} KiB became {kib}");
        }
    });
    assert!(made.load(Ordering::Acquire) >= HELD, "the strangers never came");
}

#[test]
fn questions_about_unknown_communicators_do_not_take_the_descriptors() {
    let comm = Credentials::random().unwrap();
    withstands(&Frame::Query { comm, rank: 0, number: 1, from: 1 }.encode(), false);
}

#[test]
fn wishes_to_join_unknown_rooms_do_not_take_the_descriptors() {
    let (room, process) = (Credentials::random().unwrap(), super::Process::default());
    withstands(
        &Frame::Join(super::protocol::Join {
            room,
            nranks: 2,
            rank: 0,
            first_name: 0,
            total: 2,
            retries: false,
            process,
        })
        .encode(),
        false,
    );
}

#[test]
fn connections_that_say_nothing_do_not_take_the_descriptors() {
    withstands(&[], false);
}

#[test]
fn connections_that_speak_slowly_of_long_frames_do_not_take_the_descriptors() {
    let mut head = Frame::Part(vec![0; 2000]).encode();
    head.truncate(HEAD_BYTES);
    withstands(&head, true);
}

#[test]
fn a_stranger_that_says_a_byte_a_second_is_ended_in_time() {
    let mut stream = TcpStream::connect(Service::get().unwrap().addr().0).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let bytes = Frame::Leave.encode();
    let began = Instant::now();
    for byte in bytes.iter().cycle().take(600) {
        let ended = stream.write_all(&[*byte]).is_err() || matches!(stream.read(&mut [0]), Ok(0));
        if ended {
            break;
        }
    }
    assert!(began.elapsed() < 4 * super::connections::PATIENCE, "it was listened to for {:?}", began.elapsed());
}
