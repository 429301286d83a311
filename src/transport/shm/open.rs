//! How the ranks of a node find each other's memory when a communicator is made.
//!
//! The lowest rank of the node makes the segment, a memory file, and the others open it through `/proc`. Where that does
//! not work for somebody, all ranks of that node use a file in `/dev/shm` instead, which is unlinked as soon as all
//! have it. A rank for which that does not work either uses TCP. Every rank learns who can use shared memory, so both
//! ends of a pair decide alike.

use super::processors::Sharing;
use super::pull::{probe, Reach};
use super::ring::{Consumer, Producer};
use super::segment::{Segment, SLOTS};
use super::shared_buffers::SharedBuffers;
use super::tried_ways::TriedWays;
use super::wakeup::{doorbell, Publisher, Wakeups};
use super::{Peer, Shm};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::memory::shared::{self, open_peer, Met};
use crate::process::{above_standard, check_file_size};
use crate::topo::{Grid, Rank};
use crate::transport::card;
use crate::transport::matching::Matching;
use crate::transport::Exchange;
use rustix::fs::{FallocateFlags, MemfdFlags};
use serde::{Deserialize, Serialize};
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ways to share a segment; tests close some of them.
#[derive(Debug, Clone, Copy)]
pub struct Ways {
    /// Open the memory file through `/proc`.
    pub proc: bool,
    /// Open a file in `/dev/shm`.
    pub file: bool,
}

/// What a rank tells about itself.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct NodeCard {
    pid: u64,
    presence: u64,
    presence_at: u64,
    /// Without a heap nothing of the rank's is ever listed.
    heap_fd: u64,
    heap_inode: u64,
    wants: u64,
    doorbell: u64,
    fd: u64,
    inode: u64,
    namespace: u64,
}

impl NodeCard {
    /// The card in these bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<NodeCard> {
        card::decode(bytes)
    }

    /// The card that a rank has told.
    fn of((rank, told): (usize, &Vec<u8>)) -> Result<NodeCard> {
        let malformed =
            || Error::Remote(format!("malformed shared-memory card from rank {rank} ({} bytes)", told.len()));
        NodeCard::decode(told).ok_or_else(malformed)
    }
}

/// A random number from the system.
pub fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    got.map_err(|error| Error::System(format!("getting random bytes: {error}")))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A random number of one rank in the memory of its process. Ranks that find each other's numbers in their own memory have
/// one memory; a process whose memory has a rank's number at the rank's address is the rank's. Process numbers tell less:
/// they differ between PID namespaces, and a forked child has what its parent's memory had.
#[derive(Debug)]
pub struct Presence(Box<u64>);

/// The numbers of this process's ranks.
static PRESENT: PerProcess<Mutex<HashSet<u64>>> = PerProcess::new(Mutex::default);

impl Presence {
    fn new() -> Result<Presence> {
        let presence = Presence(Box::new(random()?));
        present().insert(*presence.0);
        Ok(presence)
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.0) as u64
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        present().remove(&self.0);
    }
}

fn present() -> MutexGuard<'static, HashSet<u64>> {
    PRESENT.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name space our process number belongs to; 0 when the system does not tell.
fn namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |file| std::os::unix::fs::MetadataExt::ino(&file))
}

fn memory_file(ranks: usize) -> Result<OwnedFd> {
    let failed = |error: rustix::io::Errno| Error::System(format!("making the node's shared segment: {error}"));
    let file = above_standard(rustix::fs::memfd_create("strata-segment", MemfdFlags::CLOEXEC).map_err(failed)?);
    check_file_size(Segment::bytes(ranks) as u64)
        .map_err(|error| Error::System(format!("making the node's shared segment: {error}")))?;
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
        let bytes = Segment::bytes(ranks) as u64;
        let make = || {
            check_file_size(bytes)?;
            let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            let named = NamedFile { path: path.clone(), file: above_standard(file) };
            // All of it at once: /dev/shm may be smaller, and then a rank that touches a page of the file is killed.
            let take = || rustix::fs::fallocate(&named.file, FallocateFlags::empty(), 0, bytes);
            rustix::io::retry_on_intr(take)?;
            Ok(named)
        };
        make().map_err(|error: std::io::Error| {
            Error::System(format!("making the node's shared segment of {bytes} bytes in /dev/shm: {error}"))
        })
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
    /// Whether all ranks of the node can map all others' allocations.
    maps: bool,
    /// The others' heaps, if this rank has all of them.
    met: Vec<Met>,
}

/// A rank's word on what it has mapped: the node's segment, the others' heaps.
const SEGMENT: u8 = 1;
const HEAPS: u8 = 2;

fn mapped_by(exchange: &mut dyn Exchange, segment: bool, heaps: bool) -> Result<Vec<u8>> {
    let told = exchange.allgather(vec![u8::from(segment) * SEGMENT + u8::from(heaps) * HEAPS])?;
    Ok(told.iter().map(|told| told.first().copied().unwrap_or(0)).collect())
}

fn has(told: &[u8], what: u8) -> Vec<bool> {
    told.iter().map(|told| told & what != 0).collect()
}

impl NodeCard {
    /// Whether a process number of this rank names its process to `other` too, as far as anybody knows.
    fn counts_with(&self, other: &NodeCard) -> bool {
        self.namespace == other.namespace || self.namespace == 0 || other.namespace == 0
    }

    /// This rank's heap, if we can open it.
    fn met_by(&self, mine: &NodeCard) -> Option<Met> {
        let own = self.heap_inode == mine.heap_inode;
        let heap = || shared::meet(self.pid as u32, self.heap_fd as u32, self.heap_inode);
        (own || self.counts_with(mine)).then(heap).flatten()
    }
}

fn agree(
    me: Rank,
    grid: &Grid,
    cards: &[NodeCard],
    own: Option<OwnedFd>,
    ways: Ways,
    exchange: &mut dyn Exchange,
) -> Result<Agreement> {
    let members = grid.members(grid.node(me));
    let wants = cards[me.index()].wants != 0 && members.len() > 1;
    let mine = &cards[me.index()];
    let leader = &cards[members[0].index()];
    let file = match own {
        Some(file) => Some(file),
        None if wants && ways.proc && leader.counts_with(mine) => {
            open_peer(leader.pid as u32, leader.fd as u32, leader.inode)
        }
        None => None,
    };
    // Told before the others hear that we have it.
    let tell = |segment: &Segment| super::processors::tell(segment, grid.local(me));
    let map = |file: &_| Segment::map(file, members.len()).ok().inspect(tell);
    let mut segment = file.as_ref().filter(|_| wants && ways.proc).and_then(map);
    // The leader's file stays open until everybody has it.
    let met = || members.iter().map(|rank| cards[rank.index()].met_by(mine)).collect::<Option<Vec<Met>>>();
    let met = wants.then(met).flatten();
    let told = mapped_by(exchange, segment.is_some(), met.is_some())?;
    let met = met.unwrap_or_default();
    let (mut usable, heaps) = (has(&told, SEGMENT), has(&told, HEAPS));
    let maps = members.iter().all(|rank| heaps[rank.index()]);
    drop(file);
    let broken = |rank: &Rank| {
        cards[rank.index()].wants != 0 && grid.members(grid.node(*rank)).len() > 1 && !usable[rank.index()]
    };
    let is_broken: Vec<bool> = grid.node_ids().map(|node| grid.members(node).iter().any(broken)).collect();
    if !is_broken.contains(&true) {
        return Ok(Agreement { segment, usable, maps, met });
    }
    let ours_is_broken = is_broken[grid.node(me).index()];
    let makes = ours_is_broken && me == members[0] && ways.file;
    let named = makes.then(|| NamedFile::new(members.len())).and_then(|made| {
        made.inspect_err(|error| crate::log::warn(&format!("{error}; the ranks of this node use TCP"))).ok()
    });
    let path = named.as_ref().map(|named| named.path.as_os_str().as_encoded_bytes().to_vec()).unwrap_or_default();
    let paths = exchange.allgather(path)?;
    if ours_is_broken {
        let path = String::from_utf8_lossy(&paths[members[0].index()]).into_owned();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok();
        let map = |file| Segment::map(file, members.len()).ok().inspect(tell);
        segment = file.filter(|_| wants && ways.file).and_then(map);
    }
    usable = has(&mapped_by(exchange, segment.is_some(), false)?, SEGMENT);
    if !usable[me.index()] && wants {
        crate::log::warn(&format!("rank {me} cannot use its node's shared memory and uses TCP instead"));
    }
    Ok(Agreement { segment, usable, maps, met })
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
    // Asked of the system while the stack is shallow, not in the first copy.
    crate::memory::stream_bytes();
    let presence = Presence::new()?;
    let members = grid.members(grid.node(me));
    let own = if me == members[0] { Some(memory_file(members.len())?) } else { None };
    let card = card_of(&presence, own.as_ref(), config)?;
    let told = exchange.allgather(card::encode(&card))?;
    let cards = told.iter().enumerate().map(NodeCard::of).collect::<Result<Vec<NodeCard>>>()?;
    if cards.len() != grid.nranks() {
        return Err(Error::Internal(format!("{} ranks answered of {}", cards.len(), grid.nranks())));
    }
    let Agreement { segment, usable, maps, met } = agree(me, grid, &cards, own, ways, exchange)?;
    let (segment, reached, local) = match segment {
        Some(segment) => {
            let others = members.iter().copied().filter(|&rank| rank != me && usable[rank.index()]);
            (segment, others.collect(), grid.local(me))
        }
        // Alone: a segment of our own, for our own wakeup.
        None => {
            let segment = Segment::map(memory_file(1)?, 1)?;
            super::processors::tell(&segment, 0);
            (segment, Vec::new(), 0)
        }
    };
    let segment = Arc::new(segment);
    let names = doorbells(&card, &cards, if reached.is_empty() { &[] } else { members }, segment.ranks());
    let waits_for_sockets = sockets && reached.len() + 1 < grid.nranks();
    let doorbell = if waits_for_sockets { Some(doorbell(card.doorbell)?) } else { None };
    let wakeups = Arc::new(Wakeups::new(segment.clone(), local, names, doorbell)?);
    let peers: Vec<Peer> = reached
        .iter()
        .map(|&rank| {
            peer(rank, grid.local(rank), local, &cards[rank.index()], &card, (&segment, wakeups.publisher()), config)
        })
        .collect();
    let complete = members.len() > 1 && members.iter().all(|rank| usable[rank.index()]);
    let maps = maps && peers.iter().all(|peer| !matches!(peer.reach, Reach::Ring { .. }));
    let board = complete.then(|| {
        let reach = |&rank: &Rank| (rank, reach_of(&peers, rank));
        SharedBuffers::new(&segment, &wakeups, local, members.iter().map(reach).collect(), maps)
    });
    Ok(Shm {
        board,
        board_polls: 0,
        sharing: Sharing::new(&segment, local),
        ways: TriedWays::default(),
        timed: None,
        local,
        peers,
        pulls: VecDeque::new(),
        staging: super::staging(),
        eager_bytes: config.eager_bytes.min(super::ring::max_eager(&segment)),
        body: Vec::new(),
        cancelled: false,
        wakeups,
        segment,
        _met: met,
        _presence: presence,
    })
}

/// How we reach the memory of a member; our own is in this process.
fn reach_of(peers: &[Peer], rank: Rank) -> Reach {
    peers.iter().find(|peer| peer.rank == rank).map_or(Reach::SameProcess, |peer| peer.reach)
}

/// What this rank tells about itself. It has made the node's segment if that is its `own`.
fn card_of(presence: &Presence, own: Option<&OwnedFd>, config: &Config) -> Result<NodeCard> {
    let inode = |file: &OwnedFd| rustix::fs::fstat(file).map(|stat| stat.st_ino);
    let (heap_fd, heap_inode) = shared::heap().unwrap_or((u32::MAX, 0));
    Ok(NodeCard {
        pid: std::process::id().into(),
        presence: *presence.0,
        presence_at: presence.address(),
        heap_fd: heap_fd.into(),
        heap_inode,
        wants: config.shm.into(),
        doorbell: random()?,
        fd: own.map_or(u64::MAX, |file| file.as_raw_fd() as u64),
        inode: own.map(inode).transpose().map_err(std::io::Error::from)?.unwrap_or(0),
        namespace: namespace(),
    })
}

/// The names of the local ranks' doorbells; of a rank that is alone its own alone.
fn doorbells(card: &NodeCard, cards: &[NodeCard], members: &[Rank], ranks: usize) -> Vec<u64> {
    match members {
        [] => vec![card.doorbell; ranks],
        _ => members.iter().map(|rank| cards[rank.index()].doorbell).collect(),
    }
}

fn peer(
    rank: Rank,
    local: usize,
    me: usize,
    card: &NodeCard,
    mine: &NodeCard,
    (segment, publisher): (&Segment, Publisher),
    config: &Config,
) -> Peer {
    let pid = card.pid as u32;
    let reach = if present().contains(&card.presence) {
        Reach::SameProcess
    } else if config.cma && card.counts_with(mine) && probe(pid, card.presence_at, card.presence) {
        Reach::Kernel { pid }
    } else {
        Reach::Ring { pid }
    };
    crate::info!("rank {rank} is on this node: {reach}");
    // Elsewhere the number means another process, or none.
    let process = rustix::process::Pid::from_raw(pid as i32)
        .filter(|_| mine.namespace != 0 && card.namespace == mine.namespace && card.pid != mine.pid)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok())
        .map(above_standard);
    Peer {
        rank,
        local,
        reach,
        process,
        output: Producer::new(segment, me, local, publisher),
        input: Consumer::new(segment, local, me),
        matching: Matching::new(rank, SLOTS),
    }
}
