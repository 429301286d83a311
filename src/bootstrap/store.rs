//! The processes of a job find each other: a star of TCP connections around process 0.
//!
//! It carries unique ids, and of the command barriers and times, a few hundred bytes each; never the data of a collective.
#![forbid(unsafe_code)]

use super::launcher::LaunchedProcess;
use crate::error::{counted, Error, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const GREETING: &[u8; 8] = b"strata1\n";
/// How long processes wait for each other where nothing else is said.
pub const LIMIT: Duration = Duration::from_secs(300);
/// How long a caller may take to greet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Callers that have not greeted yet; further ones wait in the system's backlog.
const MOST_CALLERS: usize = 512;
/// No message is larger; anything beyond it came from a stranger.
const MAX_BYTES: usize = 64 << 20;

/// This process and its connections.
pub struct Store {
    /// This process's number.
    pub rank: usize,
    /// How many processes there are.
    pub size: usize,
    /// How many of them share this machine, as far as the environment tells.
    pub here: usize,
    // On process 0: to 1, 2, ... in order. Elsewhere: to process 0.
    links: Vec<TcpStream>,
}

impl Store {
    /// A store of one process.
    pub fn alone() -> Store {
        Store { rank: 0, size: 1, here: 1, links: Vec::new() }
    }

    /// The processes that a launcher has started, which wait so long for each other; alone without one.
    pub fn from_env(limit: Duration) -> Result<Store> {
        let Some(LaunchedProcess { rank, size, here, address, port }) = LaunchedProcess::from_env()? else {
            return Ok(Store::alone());
        };
        let store = if rank == 0 {
            let listener = TcpListener::bind((address.as_str(), port)).map_err(|error| {
                Error::InvalidArgument(format!(
                    "process 0 cannot listen at {address}:{port} (MASTER_ADDR, MASTER_PORT): {error}"
                ))
            })?;
            Store::host(listener, size, limit)?
        } else {
            Store::join(&address, port, rank, size, limit)?
        };
        Ok(Store { here, ..store })
    }

    /// Process 0 of `size`: accepts the others. Whoever does not greet as they do is sent away; nobody is waited for
    /// while others can be heard.
    fn host(listener: TcpListener, size: usize, limit: Duration) -> Result<Store> {
        let deadline = Instant::now() + limit;
        let mut links: Vec<Option<TcpStream>> = (1..size).map(|_| None).collect();
        let mut callers: Vec<Caller> = Vec::new();
        listener.set_nonblocking(true)?;
        while links.iter().any(Option::is_none) {
            wait(&listener, &callers, deadline)?;
            for heard in callers.extract_if(.., |caller| caller.is_done()) {
                let link = heard.rank().and_then(|rank| links.get_mut(rank.checked_sub(1)?));
                if let Some(link @ None) = link {
                    heard.stream.set_nonblocking(false)?;
                    prepare(&heard.stream)?;
                    *link = Some(heard.stream);
                }
            }
            while callers.len() < MOST_CALLERS {
                match listener.accept() {
                    Ok((stream, _)) => {
                        stream.set_nonblocking(true)?;
                        callers.push(Caller { stream, since: Instant::now(), greeting: [0; 12], have: 0 });
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if Instant::now() >= deadline {
                let missing = links.iter().enumerate().filter(|(_, link)| link.is_none());
                let missing: Vec<String> = missing.map(|(index, _)| (index + 1).to_string()).collect();
                return Err(Error::Timeout(format!(
                    "{} of {size} did not come: {}",
                    counted(missing.len(), "process"),
                    missing.join(", ")
                )));
            }
        }
        Ok(Store { rank: 0, size, here: 1, links: links.into_iter().flatten().collect() })
    }

    fn join(address: &str, port: u16, rank: usize, size: usize, limit: Duration) -> Result<Store> {
        let deadline = Instant::now() + limit;
        loop {
            match TcpStream::connect((address, port)) {
                Ok(mut stream) => {
                    prepare(&stream)?;
                    stream.write_all(GREETING)?;
                    stream.write_all(&(rank as u32).to_le_bytes())?;
                    return Ok(Store { rank, size, here: 1, links: vec![stream] });
                }
                Err(error) if Instant::now() >= deadline => {
                    return Err(Error::Timeout(format!("process 0 is not at {address}:{port}: {error}")));
                }
                // Process 0 may not have started yet.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Everybody's bytes, in order of processes.
    pub fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.rank != 0 {
            let link = &mut self.links[0];
            write_frame(link, mine).map_err(|error| lost(0, &error))?;
            return (0..self.size).map(|_| read_frame(link).map_err(|error| lost(0, &error))).collect();
        }
        let mut all = vec![mine.to_vec()];
        for (index, link) in self.links.iter_mut().enumerate() {
            all.push(read_frame(link).map_err(|error| lost(index + 1, &error))?);
        }
        for (index, link) in self.links.iter_mut().enumerate() {
            let mut frames = Vec::new();
            all.iter().try_for_each(|bytes| write_frame(&mut frames, bytes))?;
            link.write_all(&frames).map_err(|error| lost(index + 1, &error))?;
        }
        Ok(all)
    }

    /// Process 0's bytes, on all.
    pub fn broadcast(&mut self, mine: &[u8]) -> Result<Vec<u8>> {
        let mine = if self.rank == 0 { mine } else { &[] };
        Ok(self.all_gather(mine)?.swap_remove(0))
    }

    /// Waits until all processes have come here.
    pub fn barrier(&mut self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }
}

fn lost(rank: usize, error: &std::io::Error) -> Error {
    Error::Remote(format!("lost process {rank} of the job: {error}"))
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(2 * LIMIT))
}

/// A connection that has not said yet which process it comes from.
struct Caller {
    stream: TcpStream,
    since: Instant,
    greeting: [u8; 12],
    have: usize,
}

impl Caller {
    /// Hears what there is. True once it has said all, has ended, or has been silent for too long.
    fn is_done(&mut self) -> bool {
        loop {
            match self.stream.read(&mut self.greeting[self.have..]) {
                Ok(0) => return true,
                Ok(got) => self.have += got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return self.since.elapsed() > PATIENCE,
                Err(_) => return true,
            }
        }
    }

    /// The process that it says it is.
    fn rank(&self) -> Option<usize> {
        let (word, rank) = self.greeting.split_at(GREETING.len());
        let greeted = self.have == self.greeting.len() && word == GREETING;
        greeted.then(|| rank.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte)))
    }
}

/// Waits until somebody calls or says something, until a caller's time is over, or for the deadline.
fn wait(listener: &TcpListener, callers: &[Caller], deadline: Instant) -> Result<()> {
    let mut fds: Vec<PollFd<'_>> = callers.iter().map(|caller| PollFd::new(&caller.stream, PollFlags::IN)).collect();
    if callers.len() < MOST_CALLERS {
        fds.push(PollFd::new(listener, PollFlags::IN));
    }
    let next = callers.iter().map(|caller| caller.since + PATIENCE).chain([deadline]).min().unwrap_or(deadline);
    // Rounded up, so that the loop does not spin through the last millisecond.
    let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
    match poll(&mut fds, Some(&left)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(std::io::Error::from(error).into()),
    }
}

fn write_frame(to: &mut impl Write, bytes: &[u8]) -> std::io::Result<()> {
    let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(bytes);
    to.write_all(&frame)
}

fn read_frame(from: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_BYTES {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_gets_everybody_s_bytes_and_strangers_are_sent_away() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let limit = Duration::from_secs(20);
        // It comes first, so that it is met.
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        std::thread::scope(|scope| {
            for rank in 1..3usize {
                scope.spawn(move || {
                    let mut store = Store::join("127.0.0.1", port, rank, 3, limit).unwrap();
                    let all = store.all_gather(&vec![rank as u8; rank]).unwrap();
                    assert_eq!(all, [vec![], vec![1], vec![2, 2]]);
                    assert_eq!(store.broadcast(b"ignored").unwrap(), b"told");
                });
            }
            let mut store = Store::host(listener, 3, limit).unwrap();
            assert_eq!(store.all_gather(&[]).unwrap().len(), 3);
            assert_eq!(store.broadcast(b"told").unwrap(), b"told");
        });
    }

    #[test]
    fn silent_callers_are_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
        let limit = Duration::from_secs(20);
        std::thread::scope(|scope| {
            scope.spawn(move || Store::join("127.0.0.1", port, 1, 2, limit).unwrap().barrier().unwrap());
            // One after the other they would take 40 s.
            Store::host(listener, 2, limit).unwrap().barrier().unwrap();
        });
        drop(silent);
    }

    #[test]
    fn callers_that_say_too_little_are_ended_and_make_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let slow = || {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&GREETING[..3]).unwrap();
            stream
        };
        let limit = Duration::from_secs(20);
        std::thread::scope(|scope| {
            scope.spawn(move || Store::host(listener, 2, limit).unwrap().barrier().unwrap());
            let slow: Vec<TcpStream> = (0..MOST_CALLERS + 8).map(|_| slow()).collect();
            Store::join("127.0.0.1", port, 1, 2, limit).unwrap().barrier().unwrap();
            drop(slow);
        });
    }

    #[test]
    fn a_process_that_does_not_come_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = Store::host(listener, 3, Duration::from_millis(20)).map(|_| ()).unwrap_err();
        assert_eq!(error, Error::Timeout("2 processes of 3 did not come: 1, 2".into()));
    }
}
