//! How the ranks of a node find each other's memory when a communicator is made.
//!
//! The lowest rank of the node makes the segment, a memory file, and the others open it through `/proc`. Where that does
//! not work for somebody, all ranks of that node use a file in `/dev/shm` instead, which is unlinked as soon as all
//! have it. A rank for which that does not work either uses TCP. Every rank learns who can use shared memory, so both
//! ends of a pair decide alike.

use super::bell::{doorbell, Bells};
use super::board::Board;
use super::pull::{probe, Reach};
use super::ring::{Consumer, Producer};
use super::segment::Segment;
use super::{Peer, Shm};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::memory::shared::open_peer;
use crate::topo::{Grid, Rank};
use crate::transport::streams::Streams;
use crate::transport::Exchange;
use rustix::fs::MemfdFlags;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Ways to share a segment; tests close some of them.
#[derive(Debug, Clone, Copy)]
pub struct Ways {
    /// Open the memory file through `/proc`.
    pub proc: bool,
    /// Open a file in `/dev/shm`.
    pub file: bool,
}

/// What a rank tells about itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    pid: u64,
    process: u64,
    process_at: u64,
    wants: u64,
    doorbell: u64,
    fd: u64,
    inode: u64,
    namespace: u64,
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn word(bytes: &[u8], index: usize) -> Result<u64> {
    let bytes = bytes.get(index * 8..index * 8 + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).ok_or_else(|| Error::Remote("a rank told too little about its memory".into()))
}

impl Card {
    fn encode(&self) -> Vec<u8> {
        words(&[
            self.pid,
            self.process,
            self.process_at,
            self.wants,
            self.doorbell,
            self.fd,
            self.inode,
            self.namespace,
        ])
    }

    /// The card in these bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Card> {
        let at = |index| word(bytes, index);
        Ok(Card {
            pid: at(0)?,
            process: at(1)?,
            process_at: at(2)?,
            wants: at(3)?,
            doorbell: at(4)?,
            fd: at(5)?,
            inode: at(6)?,
            namespace: at(7)?,
        })
    }
}

/// A random number from the system.
pub fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    got.map_err(|error| Error::System(format!("getting random bytes: {error}")))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A number that tells this process from all others; forked children share it, but not their process number.
fn process() -> Result<&'static u64> {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    match PROCESS.get() {
        Some(process) => Ok(process),
        None => {
            let number = random()?;
            Ok(PROCESS.get_or_init(|| number))
        }
    }
}

/// The name space our process number belongs to; 0 when the system does not tell.
fn namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |file| std::os::unix::fs::MetadataExt::ino(&file))
}

fn memory_file(ranks: usize) -> Result<OwnedFd> {
    let failed = |error: rustix::io::Errno| Error::System(format!("making the node's shared segment: {error}"));
    let file = rustix::fs::memfd_create("strata-segment", MemfdFlags::CLOEXEC).map_err(failed)?;
    rustix::fs::ftruncate(&file, Segment::bytes(ranks) as u64).map_err(failed)?;
    Ok(file)
}

/// A file in `/dev/shm`, removed when dropped.
struct NamedFile {
    path: PathBuf,
    file: std::fs::File,
}

impl NamedFile {
    fn new(ranks: usize) -> Result<NamedFile> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = PathBuf::from(format!("/dev/shm/strata-{:016x}", random()?));
        let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let named = NamedFile { path, file };
        named.file.set_len(Segment::bytes(ranks) as u64)?;
        Ok(named)
    }
}

impl Drop for NamedFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The segment that all ranks of the node agreed on, and which ranks of the world can use their node's.
struct Agreement {
    segment: Option<Segment>,
    usable: Vec<bool>,
}

fn mapped_by(exchange: &mut dyn Exchange, mapped: bool) -> Result<Vec<bool>> {
    let told = exchange.allgather(vec![u8::from(mapped)])?;
    Ok(told.iter().map(|told| told == &[1]).collect())
}

fn agree(
    me: Rank,
    grid: &Grid,
    cards: &[Card],
    own: Option<OwnedFd>,
    ways: Ways,
    exchange: &mut dyn Exchange,
) -> Result<Agreement> {
    let members = grid.members(grid.node(me));
    let wants = cards[me.index()].wants != 0 && members.len() > 1;
    let leader = cards[members[0].index()];
    let file = match own {
        Some(file) => Some(file),
        None if wants && ways.proc => open_peer(leader.pid as u32, leader.fd as u32, leader.inode),
        None => None,
    };
    let map = |file: &_| Segment::map(file, members.len()).ok();
    let mut segment = file.as_ref().filter(|_| wants && ways.proc).and_then(map);
    // The leader's file stays open until everybody has it.
    let mut usable = mapped_by(exchange, segment.is_some())?;
    drop(file);
    let broken = |rank: &Rank| {
        cards[rank.index()].wants != 0 && grid.members(grid.node(*rank)).len() > 1 && !usable[rank.index()]
    };
    let is_broken: Vec<bool> = grid.node_ids().map(|node| grid.members(node).iter().any(broken)).collect();
    if !is_broken.contains(&true) {
        return Ok(Agreement { segment, usable });
    }
    let ours_is_broken = is_broken[grid.node(me).index()];
    let named = if ours_is_broken && me == members[0] && ways.file { NamedFile::new(members.len()).ok() } else { None };
    let path = named.as_ref().map(|named| named.path.as_os_str().as_encoded_bytes().to_vec()).unwrap_or_default();
    let paths = exchange.allgather(path)?;
    if ours_is_broken {
        let path = String::from_utf8_lossy(&paths[members[0].index()]).into_owned();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok();
        segment = file.filter(|_| wants && ways.file).and_then(|file| Segment::map(file, members.len()).ok());
    }
    usable = mapped_by(exchange, segment.is_some())?;
    if !usable[me.index()] && wants {
        crate::log::warn(&format!("rank {me} cannot use its node's shared memory and uses TCP instead"));
    }
    Ok(Agreement { segment, usable })
}

/// Opens the shared memory of a communicator. All ranks call it together. `sockets`: the ranks it does not reach are
/// reached by sockets, so that this rank waits for those too.
pub fn open(
    me: Rank,
    grid: &Grid,
    config: &Config,
    ways: Ways,
    sockets: bool,
    exchange: &mut dyn Exchange,
) -> Result<Shm> {
    let process = process()?;
    let members = grid.members(grid.node(me));
    let own = if me == members[0] { Some(memory_file(members.len())?) } else { None };
    let inode = |file: &OwnedFd| rustix::fs::fstat(file).map(|stat| stat.st_ino);
    let card = Card {
        pid: std::process::id().into(),
        process: *process,
        process_at: std::ptr::from_ref(process) as u64,
        wants: config.shm.into(),
        doorbell: random()?,
        fd: own.as_ref().map_or(u64::MAX, |file| file.as_raw_fd() as u64),
        inode: own.as_ref().map(inode).transpose().map_err(std::io::Error::from)?.unwrap_or(0),
        namespace: namespace(),
    };
    let told = exchange.allgather(card.encode())?;
    let cards = told.iter().map(|bytes| Card::decode(bytes)).collect::<Result<Vec<Card>>>()?;
    if cards.len() != grid.nranks() {
        return Err(Error::Internal(format!("{} ranks answered of {}", cards.len(), grid.nranks())));
    }
    let Agreement { segment, usable } = agree(me, grid, &cards, own, ways, exchange)?;
    let (segment, reached, local) = match segment {
        Some(segment) => {
            let others = members.iter().copied().filter(|&rank| rank != me && usable[rank.index()]);
            (segment, others.collect(), grid.local(me))
        }
        // Alone: a segment of our own, for our own bell.
        None => (Segment::map(memory_file(1)?, 1)?, Vec::new(), 0),
    };
    let segment = Arc::new(segment);
    let names = match reached.is_empty() {
        true => vec![card.doorbell; segment.ranks()],
        false => members.iter().map(|rank| cards[rank.index()].doorbell).collect(),
    };
    let waits_for_sockets = sockets && reached.len() + 1 < grid.nranks();
    let doorbell = if waits_for_sockets { Some(doorbell(card.doorbell)?) } else { None };
    let bells = Arc::new(Bells::new(segment.clone(), local, names, doorbell)?);
    let peers: Vec<Peer> = reached
        .iter()
        .map(|&rank| peer(rank, grid.local(rank), local, &cards[rank.index()], &card, &segment, config))
        .collect();
    let complete = members.len() > 1 && members.iter().all(|rank| usable[rank.index()]);
    let maps = peers.iter().all(|peer| !matches!(peer.reach, Reach::Ring { .. }));
    let board = complete.then(|| Board::new(segment.clone(), bells.clone(), local, members.to_vec(), maps));
    Ok(Shm {
        board,
        board_polls: 0,
        local,
        peers,
        pulls: VecDeque::new(),
        staging: super::staging(),
        eager_bytes: config.eager_bytes.min(super::ring::max_eager(&segment)),
        body: Vec::new(),
        relief: 0,
        cancelled: false,
        bells,
        segment,
    })
}

fn peer(rank: Rank, local: usize, me: usize, card: &Card, mine: &Card, segment: &Segment, config: &Config) -> Peer {
    let pid = card.pid as u32;
    let reach = if (card.pid, card.process) == (mine.pid, mine.process) {
        Reach::SameProcess
    } else if config.cma && probe(pid, card.process_at, card.process) {
        Reach::Kernel { pid }
    } else {
        Reach::Ring { pid }
    };
    crate::info!("rank {rank} is on this node: {reach}");
    // Elsewhere the number means another process, or none.
    let process = rustix::process::Pid::from_raw(pid as i32)
        .filter(|_| mine.namespace != 0 && card.namespace == mine.namespace && card.pid != mine.pid)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
    Peer {
        rank,
        local,
        reach,
        process,
        output: Producer::new(segment, me, local),
        input: Consumer::new(segment, local, me),
        streams: Streams::default(),
        slots: Vec::new(),
        free: Vec::new(),
        open_slots: 0,
        outflows: VecDeque::new(),
        inflows: Vec::new(),
    }
}
