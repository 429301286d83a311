//! Ranks in processes of their own, some of which are killed, frozen, or leave.
//!
//! The test binary runs itself once for each rank. A rank obeys lines on its standard input and answers each with one
//! line; it ends when its input does, so none outlives the test.

use super::protocol::Frame;
use super::{Credentials, Exchange, Service, ServiceAddr, Session, UniqueId};
use crate::error::Error;
use crate::health::{CallSummary, Monitor, RankStatus, RelayRequest};
use crate::topo::Rank;
use rustix::process::{kill_process, waitpid, Pid, Signal, WaitOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command as Program, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::time::Instant;

const RANK: &str = "TEST_RANK";
const RANKS: &str = "TEST_RANKS";
const ID: &str = "TEST_UNIQUE_ID";
/// In milliseconds, after how long a rank that does not answer is lost.
const MUTE: &str = "TEST_MUTE_MS";
const LIMIT: Duration = Duration::from_secs(60);

static NEVER: AtomicBool = AtomicBool::new(false);

fn meet(id: UniqueId, nranks: usize, rank: Rank) -> Vec<ServiceAddr> {
    let mut session = Session::join(&[id], nranks, rank, LIMIT, &NEVER).unwrap();
    let mine = Service::get().unwrap().addr().encode().to_vec();
    let all = session.allgather(mine).unwrap();
    session.close();
    all.iter().map(|bytes| ServiceAddr::decode(bytes).unwrap()).collect()
}

/// The life of one rank in its own process. Without the environment that its parent gives it, there is nothing to do.
#[test]
fn a_rank_in_a_process_of_its_own_obeys_its_parent() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let rank = Rank(rank.parse().unwrap());
    let nranks = std::env::var(RANKS).unwrap().parse().unwrap();
    let hex = std::env::var(ID).unwrap();
    let mut id = UniqueId([0; 128]);
    for (at, byte) in id.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    }
    let members = meet(id, nranks, rank);
    let (woken, wakes) = channel();
    let woken = Mutex::new(woken);
    let status = Arc::new(RankStatus::new(move || {
        // The main thread may have looked at the status already.
        let _ = woken.lock().unwrap().send(());
    }));
    let mute_after = std::env::var(MUTE).unwrap().parse().map(Duration::from_millis).ok();
    let monitor = Monitor::start(id.credentials().unwrap(), rank, members, status.clone(), mute_after).unwrap();
    monitor.wait_linked(LIMIT, &NEVER).unwrap();
    let mut monitor = Some(monitor);
    println!("@ready");
    for line in std::io::stdin().lines() {
        println!("@{}", obey(&line.unwrap(), &status, &mut monitor, &wakes));
    }
}

fn obey(line: &str, status: &RankStatus, monitor: &mut Option<Monitor>, wakes: &Receiver<()>) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let rank = |at: usize| Rank(words[at].parse().unwrap());
    match words[0] {
        "begin" => status.begin(CallSummary::default()).to_string(),
        "wait" => {
            status.wait_for(Some(rank(1)));
            "waiting".to_string()
        }
        "report" => {
            monitor.as_ref().unwrap().report(7, &Error::Timeout("operation 7 took too long".to_string()));
            "told".to_string()
        }
        "diagnose" => {
            let began = Instant::now();
            let text = monitor.as_ref().unwrap().diagnose(&[rank(1)], Duration::from_millis(500));
            format!("{} ms: {text}", began.elapsed().as_millis())
        }
        "failure" => {
            let limit = Duration::from_millis(words[1].parse().unwrap());
            // Without a wake in time there is no failure to be told.
            let _ = wakes.recv_timeout(limit);
            status.cause().map_or("none".to_string(), |error| format!("{} {error}", error.code()))
        }
        "lost" => {
            let count: usize = words[1].parse().unwrap();
            let lost = || {
                let mut lost: Vec<u32> = status.losses().iter().map(|(_, loss)| loss.rank).collect();
                lost.sort_unstable();
                lost.dedup();
                lost
            };
            let end = Instant::now() + Duration::from_secs(2);
            while lost().len() < count && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            format!("{:?}", lost())
        }
        "compare" => {
            monitor.as_ref().unwrap().compare(&[rank(1)]);
            "asked".to_string()
        }
        "resume" => {
            status.resume();
            "resumed".to_string()
        }
        "leave" => {
            *monitor = None;
            "left".to_string()
        }
        other => panic!("no such order: {other}"),
    }
}

struct Process {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended cannot be killed; it is reaped all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn tell(&mut self, order: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "a rank has ended");
            if let Some((_, answer)) = line.split_once('@') {
                return answer.trim_end().to_string();
            }
        }
    }

    fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.answer()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
        if signal == Signal::STOP {
            // Its threads stop one after another.
            let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
            assert!(stopped.is_some_and(|(_, status)| status.stopped()));
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

fn ranks(nranks: usize) -> Vec<Process> {
    ranks_with(nranks, "")
}

fn ranks_with(nranks: usize, mute_ms: &str) -> Vec<Process> {
    let id = UniqueId::create().unwrap();
    let hex: String = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let start = |rank: usize| {
        let name = "bootstrap::service_tests::a_rank_in_a_process_of_its_own_obeys_its_parent";
        let mut child = Program::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .envs([
                (RANK, rank.to_string()),
                (RANKS, nranks.to_string()),
                (ID, hex.clone()),
                (MUTE, mute_ms.to_string()),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Process { child, answers }
    };
    let mut all: Vec<Process> = (0..nranks).map(start).collect();
    for process in &mut all {
        assert_eq!(process.answer(), "ready");
    }
    all
}

fn ask_all(ranks: &mut [Process], but: &[usize], order: impl Fn(usize) -> String) -> Vec<(usize, String)> {
    let asked: Vec<usize> = (0..ranks.len()).filter(|rank| !but.contains(rank)).collect();
    asked.iter().for_each(|&rank| ranks[rank].tell(&order(rank)));
    asked.into_iter().map(|rank| (rank, ranks[rank].answer())).collect()
}

#[test]
fn a_killed_rank_is_named_to_all_others_within_two_seconds() {
    let mut ranks = ranks(6);
    ranks[5].signal(Signal::KILL);
    let pid = ranks[5].pid();
    for (rank, text) in ask_all(&mut ranks, &[5], |_| "failure 2000".to_string()) {
        assert!(text.starts_with("6 rank 5 (") && text.contains(&format!("pid {pid}) died")), "{rank}: {text}");
    }
}

#[test]
fn a_rank_whose_neighbours_have_died_is_missed_as_well() {
    let mut ranks = ranks(6);
    let dead = [2, 4, 3];
    for count in 1..=dead.len() {
        ranks[dead[count - 1]].signal(Signal::KILL);
        let mut missed = dead[..count].to_vec();
        missed.sort_unstable();
        for (rank, text) in ask_all(&mut ranks, &dead, |_| format!("lost {count}")) {
            assert_eq!(text, format!("{missed:?}"), "{rank}");
        }
    }
}

#[test]
fn a_rank_that_does_not_answer_in_time_is_lost_and_hears_of_it_later() {
    let mut ranks = ranks_with(4, "300");
    ask_all(&mut ranks, &[], |_| "begin".to_string());
    ranks[1].signal(Signal::STOP);
    assert_eq!(ranks[3].ask("compare 2"), "asked");
    assert_eq!(ranks[3].ask("compare 1"), "asked");
    for (rank, text) in ask_all(&mut ranks, &[1], |_| "failure 4000".to_string()) {
        assert!(text.starts_with("6 rank 1 (") && text.ends_with("has not answered for 300 ms"), "{rank}: {text}");
    }
    for (rank, text) in ask_all(&mut ranks, &[1], |_| "lost 1".to_string()) {
        assert_eq!(text, "[1]", "who answers is not lost: {rank}");
    }
    ranks[1].signal(Signal::CONT);
    assert!(ranks[1].ask("failure 4000").contains("rank 1 ("));
}

/// A busy machine: the service's thread gets no processor for longer than the limit, and calls get further all the same.
#[test]
fn nobody_is_lost_to_a_rank_that_has_gone_on_since_it_asked() {
    let mut ranks = ranks_with(3, "300");
    ask_all(&mut ranks, &[], |_| "begin".to_string());
    ranks[1].signal(Signal::STOP);
    assert_eq!(ranks[0].ask("compare 1"), "asked");
    assert_eq!(ranks[0].ask("resume"), "resumed");
    for (rank, text) in ask_all(&mut ranks, &[1], |_| "failure 700".to_string()) {
        assert_eq!(text, "none", "{rank}");
    }
    // It waits again, and the time counts from there.
    assert_eq!(ranks[0].ask("compare 1"), "asked");
    let text = ranks[0].ask("failure 4000");
    assert!(text.ends_with("has not answered for 300 ms"), "{text}");
    ranks[1].signal(Signal::CONT);
}

#[test]
fn a_rank_that_was_stopped_itself_takes_nobody_for_lost() {
    let mut ranks = ranks_with(3, "300");
    ask_all(&mut ranks, &[], |_| "begin".to_string());
    ranks[1].signal(Signal::STOP);
    assert_eq!(ranks[0].ask("compare 1"), "asked");
    ranks[0].signal(Signal::STOP);
    // It answers while the other one cannot hear that.
    ranks[1].signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(600));
    ranks[0].signal(Signal::CONT);
    for (rank, text) in ask_all(&mut ranks, &[], |_| "failure 700".to_string()) {
        assert_eq!(text, "none", "{rank}");
    }
}

#[test]
fn a_rank_killed_while_all_diagnose_is_named() {
    let mut ranks = ranks(6);
    for rank in [0, 1, 3, 4, 5] {
        ranks[rank].ask("begin");
        ranks[rank].tell("diagnose 2");
    }
    ranks[2].signal(Signal::KILL);
    for rank in [0, 1, 3, 4, 5] {
        let text = ranks[rank].answer();
        assert!(text.contains("rank 2 "), "{rank}: {text}");
        let text = ranks[rank].ask("failure 2000");
        assert!(text.starts_with("6 rank 2 ("), "{rank}: {text}");
    }
}

#[test]
fn a_frozen_rank_is_found_by_all_others_and_is_no_failure() {
    let mut ranks = ranks(6);
    ask_all(&mut ranks, &[], |_| "begin".to_string());
    ask_all(&mut ranks, &[], |rank| format!("wait {}", (rank + 1) % 6));
    ranks[3].signal(Signal::STOP);
    for (rank, text) in ask_all(&mut ranks, &[3], |rank| format!("diagnose {}", (rank + 1) % 6)) {
        let (ms, text) = text.split_once(" ms: ").unwrap();
        assert_eq!(text, "rank 3 does not answer (frozen or unreachable)", "{rank}");
        assert!(ms.parse::<u32>().unwrap() < 2000, "{ms} ms");
    }
    for (_, text) in ask_all(&mut ranks, &[3], |_| "failure 0".to_string()) {
        assert_eq!(text, "none");
    }
    ranks[3].signal(Signal::CONT);
    for (rank, text) in ask_all(&mut ranks, &[3], |rank| format!("diagnose {}", (rank + 1) % 6)) {
        assert!(!text.contains("does not answer"), "{rank}: {text}");
    }
}

#[test]
fn a_rank_that_has_not_joined_an_operation_is_found_along_the_chain() {
    let mut ranks = ranks(4);
    ask_all(&mut ranks, &[], |_| "begin".to_string());
    ask_all(&mut ranks, &[3], |_| "begin".to_string());
    ask_all(&mut ranks, &[3], |rank| format!("wait {}", rank + 1));
    for (rank, text) in ask_all(&mut ranks, &[3], |rank| format!("diagnose {}", rank + 1)) {
        let (ms, text) = text.split_once(" ms: ").unwrap();
        assert_eq!(text, "rank 3 is alive but has not joined operation 2 (it has begun 1)", "{rank}");
        assert!(ms.parse::<u32>().unwrap() < 400, "all answered, so there was nothing to wait for: {ms} ms");
    }
}

#[test]
fn leaving_in_good_order_is_no_failure_and_the_rest_are_still_watched() {
    let mut ranks = ranks(6);
    ranks[2].tell("leave");
    ranks[3].tell("leave");
    assert_eq!(ranks[3].answer(), "left");
    assert_eq!(ranks[2].answer(), "left");
    assert!(ranks[1].ask("diagnose 3").ends_with("rank 3 has destroyed the communicator"));
    for rank in [2, 3] {
        drop(ranks[rank].child.stdin.take());
        assert!(ranks[rank].child.wait().unwrap().success());
    }
    for (rank, text) in ask_all(&mut ranks, &[2, 3], |_| "failure 300".to_string()) {
        assert_eq!(text, "none", "{rank}");
    }
    ranks[4].signal(Signal::KILL);
    for (rank, text) in ask_all(&mut ranks, &[2, 3, 4], |_| "failure 2000".to_string()) {
        assert!(text.starts_with("6 rank 4 ("), "{rank}: {text}");
    }
}

#[test]
fn all_can_leave_at_once_and_end() {
    let mut ranks = ranks(6);
    for (_, text) in ask_all(&mut ranks, &[], |_| "leave".to_string()) {
        assert_eq!(text, "left");
    }
    for (rank, text) in ask_all(&mut ranks, &[], |_| "failure 0".to_string()) {
        assert_eq!(text, "none", "{rank}");
    }
}

#[test]
fn a_reported_time_out_reaches_all_others_with_its_text() {
    let mut ranks = ranks(4);
    assert_eq!(ranks[1].ask("report"), "told");
    for (rank, text) in ask_all(&mut ranks, &[1], |_| "failure 2000".to_string()) {
        assert!(text.starts_with("8 rank 1 (") && text.ends_with("operation 7 took too long"), "{rank}: {text}");
    }
    assert_eq!(ranks[1].ask("failure 0"), "none", "the reporter has its own error");
}

#[test]
fn ranks_that_share_a_process_hear_of_each_other() {
    let id = UniqueId::create().unwrap();
    let comm = id.credentials().unwrap();
    std::thread::scope(|scope| {
        for rank in (0..8).map(Rank) {
            scope.spawn(move || {
                let members = meet(id, 8, rank);
                let (woken, wakes) = channel();
                let status = Arc::new(RankStatus::new(move || woken.send(()).unwrap()));
                let monitor = Monitor::start(comm, rank, members, status.clone(), None).unwrap();
                if let Err(error) = monitor.wait_linked(LIMIT, &NEVER) {
                    assert_eq!(Some(&error), status.failure());
                }
                if rank == Rank(3) {
                    monitor.report(0, &Error::Remote("my device is on fire".to_string()));
                    return;
                }
                // The eighth may report before another has started: the word is kept for it.
                wakes.recv_timeout(LIMIT).unwrap();
                let text = status.cause().unwrap().to_string();
                assert!(text.starts_with("rank 3 (") && text.ends_with("my device is on fire"), "{text}");
            });
        }
    });
}

/// A neighbour that never answers: its host takes connections, its process is frozen.
#[test]
fn waiting_for_links_ends_with_the_limit_or_when_cancelled() {
    let frozen = TcpListener::bind("127.0.0.1:0").unwrap();
    let comm = Credentials::random().unwrap();
    let members = vec![Service::get().unwrap().addr(), ServiceAddr(frozen.local_addr().unwrap())];
    let monitor = Monitor::start(comm, Rank(0), members, Arc::default(), None).unwrap();
    for (limit, cancelled) in [(Duration::from_millis(50), false), (LIMIT, true)] {
        let began = Instant::now();
        monitor.wait_linked(limit, &AtomicBool::new(cancelled)).unwrap();
        assert!(began.elapsed() < Duration::from_secs(8), "it waited for the link");
    }
}

#[test]
fn an_address_survives_its_encoding() {
    for text in ["10.1.2.3:456", "[2001:db8::7]:65535"] {
        let addr = ServiceAddr(text.parse().unwrap());
        assert_eq!(ServiceAddr::decode(&addr.encode()), Some(addr));
    }
    assert_eq!(ServiceAddr::decode(&[0; ServiceAddr::BYTES]), None);
    assert_eq!(ServiceAddr::decode(&[4; 3]), None);
}

/// The frames that come on a connection, until it ends.
struct Frames {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Frames {
    fn of(stream: TcpStream) -> Frames {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Frames { stream, bytes: Vec::new() }
    }
}

impl Iterator for Frames {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        let mut part = [0; 512];
        loop {
            if let Some((frame, taken)) = Frame::decode(&self.bytes, 1 << 16).unwrap() {
                self.bytes.drain(..taken);
                return Some(frame);
            }
            match self.stream.read(&mut part).unwrap() {
                0 => return None,
                read => self.bytes.extend_from_slice(&part[..read]),
            }
        }
    }
}

#[test]
fn a_rank_is_asked_to_relay_on_one_connection_that_ends_with_the_communicator() {
    let late = TcpListener::bind("127.0.0.1:0").unwrap();
    let comm = Credentials::random().unwrap();
    let members = vec![Service::get().unwrap().addr(), ServiceAddr(late.local_addr().unwrap())];
    let monitor = Monitor::start(comm, Rank(0), members, Arc::default(), None).unwrap();
    let numbers = [3, 4, 5];
    numbers.iter().for_each(|&number| monitor.ask_to_relay(&[Rank(1)], number, CallSummary::default()));
    // The other connection is the link.
    let mut asked = None;
    for stream in [late.accept().unwrap().0, late.accept().unwrap().0] {
        let mut frames = Frames::of(stream);
        match frames.next() {
            Some(Frame::Relay { rank: 1, request, .. }) if request.number == 3 => asked = Some(frames),
            Some(Frame::Link { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    let asked = asked.expect("a connection that asks");
    drop(late);
    monitor.ask_to_relay(&[Rank(1)], 6, CallSummary::default());
    drop(monitor);
    let number = |frame| if let Frame::Relay { request, .. } = frame { request.number } else { panic!("{frame:?}") };
    let told: Vec<u64> = asked.map(number).collect();
    assert_eq!(told, [4, 5, 6]);
}

#[test]
fn who_may_ask_to_relay_may_ask_again_and_for_nothing_else() {
    let comm = Credentials::random().unwrap();
    let service = Service::get().unwrap().addr();
    let unreached = TcpListener::bind("127.0.0.1:0").unwrap();
    let members = vec![service, ServiceAddr(unreached.local_addr().unwrap())];
    let status = Arc::new(RankStatus::default());
    let (told, tells) = channel();
    let told = Mutex::new(told);
    status.relays_by(move |request| told.lock().unwrap().send(request.number).unwrap());
    let monitor = Monitor::start(comm, Rank(0), members, status, None).unwrap();
    let asks = |comm, number| {
        Frame::Relay { comm, rank: 0, request: RelayRequest::new(1, number, CallSummary::default()) }.encode()
    };
    let wrong = Credentials { secret: [7; 16], ..comm };
    let ends = [asks(wrong, 9), Frame::Leave.encode()];
    for end in ends {
        let mut stream = TcpStream::connect(service.0).unwrap();
        for number in [7, 8] {
            stream.write_all(&asks(comm, number)).unwrap();
            assert_eq!(tells.recv_timeout(LIMIT), Ok(number));
        }
        stream.write_all(&end).unwrap();
        assert!(Frames::of(stream).next().is_none(), "it is closed without a word");
    }
    // Who does not know the secret is not let in.
    let mut stream = TcpStream::connect(service.0).unwrap();
    stream.write_all(&asks(wrong, 9)).unwrap();
    assert!(Frames::of(stream).next().is_none());
    drop(monitor);
    assert!(tells.try_recv().is_err(), "nobody else was heard");
}
