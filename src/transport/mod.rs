//! Moves bytes between ranks.
//!
//! A [`Transport`] carries ordered message streams between this rank and its peers. It never blocks: operations are
//! posted and complete by token. What a receiver does with the bytes (store them, or combine them with local data while
//! they are in cache) is its [`Sink`].

use crate::device::host::Combine;
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{Bytes, DeviceRegion, InProcess, OnDevice, Region};
use crate::plan::{Channel, Collective};
use crate::topo::Rank;
use std::fmt;
use std::time::Duration;

#[cfg(test)]
mod boards;
mod card;
pub mod departure;
#[cfg(test)]
mod figures;
pub mod header;
mod idle;
#[cfg(test)]
mod leaving;
#[cfg(test)]
#[path = "../../examples/transport/loopback.rs"]
mod loopback;
pub mod lossless;
pub mod matching;
pub mod mpi;
pub mod provider;
mod registry;
mod router;
pub mod shm;
#[cfg(test)]
mod short_tests;
pub mod streams;
pub mod target;
pub mod tcp;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trials;
#[cfg(test)]
mod worlds;

pub use departure::Departure;
pub use idle::Idle;
pub use registry::{leave_process, named, names, note_failure, register, Opener, Probe, Site, TransportKind};
pub use router::{open, open_over, Router};
pub use shm::wakeup::{Waker, Wakeups};

/// How ranks tell each other what they need to know before any transport exists. The bootstrap implements it.
pub trait Exchange {
    /// Gives `mine` to all ranks and returns what each rank gave, in rank order. All ranks call it equally often.
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>>;
}

/// What travels with a message, so that ranks that call different things find out instead of corrupting memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// The message stream.
    pub channel: Channel,
    /// The number of the operation on its communicator (collectives), or of the message on its stream (send/receive).
    pub sequence: u64,
    /// A digest of what every rank must agree on: collective, count, type, operation, root, algorithm.
    pub signature: u32,
}

/// What happens to a message's bytes on arrival. Lists are in message order and cover the message exactly.
#[derive(Debug, Clone, Copy)]
pub enum Sink<'a, Space = InProcess> {
    /// Store them.
    Store(&'a [Bytes<'static, Space>]),
    /// `dst = combine(local, incoming)`; `local` and `dst` are cut at the same places or not at all, element-aligned.
    Reduce {
        /// The local operand.
        local: &'a [Bytes<'static, Space>],
        /// Where the result goes.
        dst: &'a [Bytes<'static, Space>],
        /// How the two become one.
        combine: Combine,
    },
}

/// Lists of regions, one list per block.
#[derive(Debug, Clone)]
#[repr(C)]
pub struct Blocks<Space = InProcess> {
    regions: Vec<Bytes<'static, Space>>,
    ends: Vec<u32>,
}

impl<Space> Default for Blocks<Space> {
    fn default() -> Self {
        Blocks { regions: Vec::new(), ends: Vec::new() }
    }
}

impl<Space> Blocks<Space> {
    /// Forgets all blocks.
    pub fn clear(&mut self) {
        self.regions.clear();
        self.ends.clear();
    }

    /// Appends a block.
    pub fn push(&mut self, block: impl Iterator<Item = Bytes<'static, Space>>) {
        self.regions.extend(block);
        self.ends.push(self.regions.len() as u32);
    }

    /// How many blocks there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The regions of one block.
    pub fn block(&self, index: usize) -> &[Bytes<'static, Space>] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.regions[start as usize..self.ends[index] as usize]
    }

    /// The bytes of one block.
    pub fn block_bytes(&self, index: usize) -> usize {
        self.block(index).iter().map(Bytes::len).sum()
    }

    /// The regions of all blocks.
    pub fn regions(&self) -> &[Bytes<'static, Space>] {
        &self.regions
    }

    /// The bytes of all blocks.
    pub fn bytes(&self) -> usize {
        self.regions.iter().map(Bytes::len).sum()
    }

    fn clone_from(&mut self, other: &Blocks<Space>) {
        self.regions.clone_from(&other.regions);
        self.ends.clone_from(&other.ends);
    }
}

/// A rank's part of a collective of all ranks of its node.
#[derive(Debug, Clone, Copy)]
pub struct NodeCall<'a, Space = InProcess> {
    /// What is done.
    pub collective: Collective,
    /// The root's place among the ranks, where the collective has one.
    pub root: usize,
    /// The input. It must not change before the call has completed.
    pub src: &'a Blocks<Space>,
    /// Where the results go.
    pub dst: &'a Blocks<Space>,
    /// How inputs become one; `None` where data only moves.
    pub combine: Option<Combine>,
    /// Bytes of the longer of this rank's buffers in the operation of which this call is a part.
    pub operation_bytes: usize,
}

/// The same of a rank whose blocks are of equal size and lie one after the other.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct FlatCall<Space: 'static = InProcess> {
    /// What is done.
    pub collective: Collective,
    /// The root's place among the ranks, where the collective has one.
    pub root: usize,
    /// The input; see [`NodeCall::src`].
    pub input: Bytes<'static, Space>,
    /// Where the results go.
    pub output: Bytes<'static, Space>,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// How inputs become one; `None` where data only moves.
    pub combine: Option<Combine>,
}

impl FlatCall<OnDevice> {
    /// The same, with bytes that this process reads and writes.
    ///
    /// # Safety
    /// As of [`DeviceRegion::in_process`], for both.
    #[inline]
    pub unsafe fn in_process(&self) -> &FlatCall {
        // SAFETY: the two types must have one layout; because they are one `repr(C)` structure whose parameter is in those of
        // its two regions alone, of which the same holds.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }
}

impl<'a> Sink<'a, OnDevice> {
    /// The same, with bytes that this process reads and writes.
    ///
    /// # Safety
    /// As of [`DeviceRegion::in_process`], for each region.
    pub unsafe fn in_process(self) -> Sink<'a> {
        let list = |list: &'a [DeviceRegion]| {
            // SAFETY: the bytes must be this process's; because the caller promises it.
            unsafe { DeviceRegion::all_in_process(list) }
        };
        match self {
            Sink::Store(dst) => Sink::Store(list(dst)),
            Sink::Reduce { local, dst, combine } => Sink::Reduce { local: list(local), dst: list(dst), combine },
        }
    }
}

impl<'a> NodeCall<'a, OnDevice> {
    /// The same, with bytes that this process reads and writes.
    ///
    /// # Safety
    /// As of [`DeviceRegion::in_process`], for each region.
    pub unsafe fn in_process(self) -> NodeCall<'a> {
        let blocks = |blocks: &'a Blocks<OnDevice>| {
            // SAFETY: the two types must have one layout and the bytes be this process's; because they are one `repr(C)`
            // structure whose parameter is in no field but that of regions, which have one layout, and the caller promises it.
            unsafe { &*std::ptr::from_ref(blocks).cast::<Blocks>() }
        };
        NodeCall {
            collective: self.collective,
            root: self.root,
            src: blocks(self.src),
            dst: blocks(self.dst),
            combine: self.combine,
            operation_bytes: self.operation_bytes,
        }
    }
}

/// Whose device memory a transport takes addresses of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceMemory {
    /// CUDA's.
    pub cuda: bool,
    /// HIP's.
    pub hip: bool,
    /// Of messages that are longer than this, in one piece on the device.
    pub above_bytes: usize,
}

/// What makes collectives alike, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveKind {
    /// What is called.
    pub collective: Collective,
    /// The type of its elements.
    pub dtype: DataType,
    /// The bytes of its blocks as a power of two, of all of them where they differ; none where ranks may know different ones.
    pub class: Option<u8>,
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.collective.name(), self.dtype.name())?;
        match self.class {
            Some(class) => write!(f, ", from {} bytes on", 1u64 << class.min(63)),
            None => f.write_str(", blocks of different sizes"),
        }
    }
}

/// One rank's side of an open transport between nodes: message streams to the ranks that shared memory does not reach.
/// Peers go by their place among those. No call but [`wait`](Endpoint::wait) blocks.
pub trait Endpoint: Send + std::fmt::Debug {
    /// Posts a message to a peer; see [`Transport::send`].
    fn send(&mut self, peer: usize, token: Token, envelope: Envelope, src: &[Region]) -> Result<Started>;

    /// Posts a receive from a peer; see [`Transport::recv`].
    fn recv(&mut self, peer: usize, token: Token, envelope: Envelope, sink: Sink<'_>) -> Result<Started>;

    /// Makes progress; appends the tokens that have completed. `Remote`, with its rank, when a peer has gone and something
    /// is expected of it or owed to it, but not before everything that it sent has been taken.
    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()>;

    /// How many polls of shared memory go to one poll of this, by what that costs.
    fn polls_per_poll(&self) -> u32;

    /// A number that changes when a send that was `Busy` may be accepted.
    fn relief(&self) -> u64;

    /// Has large messages from now on go by all NICs of the node where that is so set: what follows loads them unevenly.
    fn set_wide(&mut self, _is_wide: bool) {}

    /// A collective begins, which all ranks call; of which kind, and its bytes as this rank knows them, is worked out where it is asked.
    fn call_begins(&mut self, _call: &dyn Fn() -> (CollectiveKind, usize)) {}

    /// The last one has ended. One that failed has not.
    fn call_ends(&mut self) {}

    /// What this rank's link to other nodes delivers, in bytes for each microsecond, where the transport knows that; of others the ranks
    /// measure it.
    fn delivers(&mut self) -> Option<f64> {
        None
    }

    /// Bytes that have come from a peer so far, where the transport knows that before a message is complete.
    fn received(&self, _peer: usize) -> Option<u64> {
        None
    }

    /// The NIC of this rank, where the transport knows it.
    fn nic(&self) -> Option<&str> {
        None
    }

    /// That NIC or another one that messages go by now, if it is down.
    fn nic_down(&self) -> Option<&str> {
        None
    }

    /// Whether a thread of this process carries the messages, which wants a processor while the rank waits.
    fn has_thread(&self) -> bool {
        false
    }

    /// Whether what it uses is the program's wherever that is in no call (`MPI_THREAD_SERIALIZED`): no thread of ours may use it then.
    fn only_in_calls(&self) -> bool {
        false
    }

    /// Blocks until there is something to poll for, the rank is woken ([`Wakeups`]), or for `limit`.
    fn wait(&mut self, limit: Duration) -> Result<()>;

    /// Forgets all pending operations; afterwards no memory given to `send` or `recv` is touched any more by this rank,
    /// and both fail.
    fn cancel(&mut self);

    /// Whether its connections tell, by `Remote`, when nothing more can come from a peer, so that nobody has to guess how
    /// long a lost rank's last messages may take.
    fn tells_what_can_come(&self) -> bool {
        false
    }

    /// The ranks whose systems do not have yet everything that was sent to them.
    fn undelivered(&mut self) -> Vec<Rank> {
        Vec::new()
    }

    /// Ends the use of this transport; what is still on its way, if the transport does not see to that itself.
    fn leave(self: Box<Self>) -> Option<Departure> {
        None
    }

    /// Whose device memory it takes addresses of.
    fn takes_device_memory(&self) -> DeviceMemory {
        DeviceMemory::default()
    }

    /// Does something on the thread that uses those addresses.
    fn run_where_it_is_used(&self, job: Box<dyn FnOnce() + Send>) {
        job();
    }
}

/// Message streams between this rank and its peers.
pub trait Transport: Send {
    /// Posts a message. The source must not be written until the token has completed.
    /// `Busy` when the channel to `to` takes no more for now.
    fn send(&mut self, token: Token, to: Rank, envelope: Envelope, src: &[Region]) -> Result<Started>;

    /// Posts a receive for the next message of the stream. A message of another length, sequence or signature is an
    /// `InvalidUsage` error that names the rank and both sides' values.
    fn recv(&mut self, token: Token, from: Rank, envelope: Envelope, sink: Sink<'_>) -> Result<Started>;

    /// Posts a call of ranks of this node, of which this is the one at place `me`. `Busy` while another one runs.
    fn call(&mut self, _token: Token, _envelope: Envelope, _me: usize, call: NodeCall<'_>) -> Result<Started> {
        Err(Error::Internal(format!("this transport does no {} by itself", call.collective.name())))
    }

    /// Makes progress and appends the tokens that have completed. No system call while shared memory alone has work.
    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()>;

    /// Yields the processor. Whether it was busy then, so that sleeping is the better way to wait for a while: others than
    /// ranks have computed on it.
    fn give_way(&mut self) -> bool {
        std::thread::yield_now();
        false
    }

    /// Whether this rank shares its processors with other ranks of the node, or with a thread that it waits for, so that it should give way
    /// early when it waits. Where others compute on them, it may share the one on which it is just now.
    fn shares_processor(&self) -> bool {
        true
    }

    /// Whether the node's processors were busy a short time ago.
    fn on_busy_processors(&self) -> bool {
        false
    }

    /// Sleeps until something may have happened, or for `limit`. Called after `poll` reported nothing for a while.
    fn sleep(&mut self, limit: Duration) -> Result<()>;

    /// Forgets all pending operations; afterwards no memory given to `send` or `recv` is touched any more by this rank.
    fn cancel(&mut self);
}
