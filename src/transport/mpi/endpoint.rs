//! The transport over MPI of one rank of one communicator.
#![forbid(unsafe_code)]

use super::peer::{Io, MpiPeer, TransferRole, PACKET, SMALL};
use super::vtable::device_memory;
use super::worker::{MpiDeparture, MpiLink, MpiWorker, TransferEnd};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{Arena, Region};
use crate::topo::Rank;
use crate::transport::header::{FrameKind, HEADER};
use crate::transport::matching::check_usable;
use crate::transport::shm::wakeup::Wakeups;
use crate::transport::{DeviceMemory, Endpoint, Envelope, Sink};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Receives for headers that are posted at a time.
const LISTENERS: usize = 16;
/// How long a rank that leaves waits for its last bytes to leave.
const LINGER: Duration = Duration::from_secs(2);

/// A posted receive for a packet, and what has come.
#[derive(Debug)]
struct Slot {
    id: usize,
    packet: Option<(Arena, usize, i32)>,
}

/// The MPI side of one rank.
#[derive(Debug)]
pub struct MpiEndpoint {
    me: Rank,
    io: Io,
    peers: Vec<MpiPeer>,
    /// The place among the peers of each rank that is one.
    places: Vec<Option<usize>>,
    /// In the order they were posted, which is the order in which MPI fills them.
    slots: VecDeque<Slot>,
    events: Vec<TransferEnd>,
    completed: Vec<Token>,
    /// Operations that have been accepted and have not completed.
    open: usize,
    busy: bool,
    left: u64,
    cancelled: bool,
    wakeups: Arc<Wakeups>,
    /// Whose device memory MPI takes addresses of, and the way to its thread.
    device_memory: (i32, Arc<MpiWorker>),
}

impl MpiEndpoint {
    /// The transport to the ranks `far` over a communicator whose ranks are ours.
    pub fn new(
        me: Rank,
        link: MpiLink,
        nonce: u64,
        far: &[Rank],
        wakeups: Arc<Wakeups>,
        device_memory: (i32, Arc<MpiWorker>),
    ) -> MpiEndpoint {
        let mut io = Io::new(link, nonce);
        let listen = |_| Slot { id: io.listen(Arena::new(PACKET)), packet: None };
        let slots = (0..if far.is_empty() { 0 } else { LISTENERS }).map(listen).collect();
        let mut places = vec![None; far.iter().map(|rank| rank.index() + 1).max().unwrap_or(0)];
        far.iter().enumerate().for_each(|(place, rank)| places[rank.index()] = Some(place));
        let peers = far.iter().enumerate().map(|(index, &rank)| MpiPeer::new(index, rank)).collect();
        MpiEndpoint {
            me,
            io,
            peers,
            places,
            slots,
            events: Vec::new(),
            completed: Vec::new(),
            open: 0,
            busy: false,
            left: 0,
            cancelled: false,
            wakeups,
            device_memory,
        }
    }

    /// Where the program may call MPI once its operation has ended, what we answered must have left by then.
    fn holds_back(&self) -> bool {
        self.io.link.exclusive() && self.io.silent > 0
    }

    fn note_interest(&mut self) {
        let waits = self.open > 0 || self.busy || self.holds_back();
        self.io.link.wait_for(waits);
    }

    fn lost(&self, peer: Option<usize>, error: Error) -> Error {
        let who = match peer {
            Some(peer) => format!("between ranks {} and {}", self.me, self.peers[peer].rank),
            None => format!("at rank {}", self.me),
        };
        match error {
            Error::System(text) => Error::System(format!("MPI {who}: {text}")),
            Error::InvalidUsage(text) => Error::InvalidUsage(format!("MPI {who}: {text}")),
            error => Error::Remote(format!("MPI {who}: {error}")),
        }
    }

    fn take_event(&mut self, event: TransferEnd) -> Result<()> {
        let TransferEnd { id, source, outcome, mut buffer } = event;
        let Some(operation) = self.io.end(id) else { return Ok(()) };
        let peer = match operation {
            TransferRole::Listen => None,
            TransferRole::Packet { peer, .. } | TransferRole::Out { peer, .. } | TransferRole::In { peer, .. } => {
                Some(peer)
            }
        };
        let came = outcome.map_err(|error| self.lost(peer, error))?;
        match operation {
            TransferRole::Listen => {
                let slot = self.slots.iter_mut().find(|slot| slot.id == id && slot.packet.is_none());
                if let (Some(slot), Some(packet)) = (slot, buffer.take()) {
                    slot.packet = Some((packet, came, source));
                }
            }
            TransferRole::Packet { peer, bytes, token } => {
                self.peers[peer].queued -= bytes;
                self.left += 1;
                self.io.silent -= usize::from(token.is_none());
                self.completed.extend(token);
                self.io.keep_packet(buffer);
            }
            TransferRole::Out { peer, id, len } => {
                self.peers[peer].pushed(&mut self.io, id, len, buffer, &mut self.completed);
            }
            TransferRole::In { peer, len, .. } if came != len => {
                let text = format!("rank {} sent {came} bytes where {len} were due", self.peers[peer].rank);
                return Err(Error::Internal(text));
            }
            TransferRole::In { peer, id, offset, len } => {
                self.peers[peer].pulled(&mut self.io, (id, offset, len), buffer, &mut self.completed);
            }
        }
        Ok(())
    }

    /// Takes the packets that have come, in order.
    fn take_packets(&mut self) -> Result<()> {
        while let Some((mut packet, bytes, source)) = self.slots.front_mut().and_then(|slot| slot.packet.take()) {
            self.slots.pop_front();
            let all = packet.region().part(0, bytes);
            // What is not of this communicator is left over from one that had the same number in MPI.
            if let Some(header) = self.io.header(all) {
                let place = usize::try_from(source).ok().and_then(|rank| *self.places.get(rank)?);
                let Some(place) = place else {
                    return Err(Error::Internal(format!("rank {source} sent a message, and is no peer")));
                };
                let body = all.part(HEADER, bytes - HEADER);
                self.peers[place].take(&mut self.io, &header, body, &mut self.completed)?;
            }
            let id = self.io.listen(packet);
            self.slots.push_back(Slot { id, packet: None });
        }
        Ok(())
    }
}

impl Endpoint for MpiEndpoint {
    fn has_thread(&self) -> bool {
        true
    }

    fn only_in_calls(&self) -> bool {
        self.io.link.exclusive()
    }

    fn takes_device_memory(&self) -> DeviceMemory {
        let (kinds, _) = self.device_memory;
        // Shorter messages travel with their header, which is put together by the host.
        let (cuda, hip) = (kinds & device_memory::CUDA != 0, kinds & device_memory::HIP != 0);
        DeviceMemory { cuda, hip, above_bytes: SMALL }
    }

    fn run_where_it_is_used(&self, job: Box<dyn FnOnce() + Send>) {
        self.device_memory.1.run(job);
    }

    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started> {
        check_usable(self.cancelled)?;
        let silently = !self.io.link.exclusive();
        let started = self.peers[peer].send(&mut self.io, token, envelope, src, silently)?;
        match started {
            Started::Pending => self.open += 1,
            Started::Busy => self.busy = true,
            Started::Done => {}
        }
        self.note_interest();
        Ok(started)
    }

    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started> {
        check_usable(self.cancelled)?;
        let mut started = self.peers[peer].recv(&mut self.io, token, envelope, sink)?;
        if started == Started::Done && self.holds_back() {
            self.completed.push(token);
            started = Started::Pending;
        }
        self.open += usize::from(started == Started::Pending);
        self.note_interest();
        Ok(started)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        if self.cancelled {
            return Ok(());
        }
        self.busy = false;
        let mut events = std::mem::take(&mut self.events);
        self.io.link.take(&mut events)?;
        events.drain(..).try_for_each(|event| self.take_event(event))?;
        self.events = events;
        self.take_packets()?;
        if !self.holds_back() {
            self.open -= self.completed.len();
            done.append(&mut self.completed);
        }
        self.note_interest();
        Ok(())
    }

    fn polls_per_poll(&self) -> u32 {
        1
    }

    fn relief(&self) -> u64 {
        self.left + self.peers.iter().map(MpiPeer::relief).sum::<u64>()
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        if !self.io.link.has_events() {
            self.wakeups.wait(limit);
        }
        Ok(())
    }

    fn undelivered(&mut self) -> Vec<Rank> {
        // What has failed is found by whoever uses the communicator next.
        let _ = self.poll(&mut Vec::new());
        self.peers.iter().filter(|peer| peer.queued > 0).map(|peer| peer.rank).collect()
    }

    fn cancel(&mut self) {
        if !std::mem::replace(&mut self.cancelled, true) {
            self.io.link.cancel();
        }
        self.peers.iter_mut().for_each(MpiPeer::cancel);
        self.completed.clear();
    }
}

impl MpiEndpoint {
    /// Whether packets have not left.
    fn owes(&self) -> bool {
        self.peers.iter().any(|peer| peer.queued > 0)
    }

    /// Where the program may call MPI next, waits until the last bytes have left.
    fn linger(&mut self) {
        let end = Instant::now() + LINGER;
        let mut done = Vec::new();
        while self.owes() && Instant::now() < end {
            if self.poll(&mut done).is_err() {
                break;
            }
            std::thread::yield_now();
        }
        self.io.link.wait_for(false);
    }
}

impl Drop for MpiEndpoint {
    /// What was sent leaves although its rank has, and what peers still send is received, until each has said that it has
    /// left: the thread that calls MPI sees to it.
    fn drop(&mut self) {
        if self.cancelled {
            return;
        }
        if self.open > 0 {
            // The memory of what is under way is the program's again.
            return self.cancel();
        }
        if self.io.link.exclusive() && !super::worker_thread::is_this() {
            self.linger();
        }
        // What has failed is of no interest any more.
        let _ = self.poll(&mut Vec::new());
        let mut awaited = Vec::new();
        for peer in &mut self.peers {
            if peer.leave(&mut self.io) {
                awaited.push(peer.rank.0 as i32);
            }
        }
        // MPI says in any order which receives have ended: some packets may wait for an earlier one.
        for (mut packet, bytes, source) in self.slots.drain(..).filter_map(|slot| slot.packet) {
            let header = self.io.header(packet.region().part(0, bytes));
            if header.is_some_and(|header| header.kind == FrameKind::Leave) {
                awaited.retain(|&rank| rank != source);
            }
            self.io.listen(packet);
        }
        self.io.link.leave(MpiDeparture { nonce: self.io.nonce, awaited, behind: None });
    }
}
