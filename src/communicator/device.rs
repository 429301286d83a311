//! Devices: where a communicator's data is, and what carries out the steps of its plans there.
//!
//! A [`Device`] allocates scratch memory, copies, reduces, sends and receives; steps that it cannot finish at once complete by
//! token, which a poll reports. There are host memory ([`HostDevice`]) and GPUs ([`super::staging`]).

use super::staging::Provider;
use crate::code::FloatCode;
use crate::device::host;
use crate::device::host::coding::{self, Folded};
use crate::dtype::{DataType, Operator, Reduction};
use crate::error::{Error, Result, ShortResult};
use crate::exec::{Program, Started, Token};
use crate::memory::{shared, Arena, DeviceRegion, OnDevice, Region};
use crate::plan::layout::Layout;
use crate::sync::locked;
use crate::topo::Rank;
use crate::transport::provider::Provision;
use crate::transport::{Envelope, FlatCall, NodeCall, Router, Sink, Transport};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

/// What a copy does to the elements on their way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// Of which the prologue is taken.
    pub reduction: Reduction,
    /// Apply the prologue.
    pub start: bool,
    /// Divide by this; 1 leaves it.
    pub divisor: u64,
}

/// How elements are coded.
#[derive(Debug, Clone, Copy)]
pub struct Coding {
    /// The form.
    pub code: FloatCode,
    /// The type of the elements.
    pub dtype: DataType,
    /// A float32 for each element of the chunk: what coding has left out of it, where a program keeps that.
    pub residual: Option<DeviceRegion>,
}

/// Where the fold of coded chunks goes.
#[derive(Debug, Clone, Copy)]
pub enum CodedResult<'a> {
    /// A coded chunk.
    Coded(DeviceRegion),
    /// Elements.
    Elements(&'a [DeviceRegion]),
}

fn no_codes() -> Error {
    Error::Internal("a code on a device that has none".to_string())
}

/// Where data is, and what carries out a call's steps there. Regions of a call's buffers and of scratch memory are addresses
/// on the device, which nothing but the device reads or writes.
///
/// No function blocks for another rank. All ranks of a communicator make the same calls in the same order.
pub trait Device: Send {
    /// Whether data is ordinary memory of the host, which other ranks of the node may read in place.
    fn is_host(&self) -> bool {
        false
    }

    /// Scratch memory of at least `bytes` bytes; what it held is lost. The region is valid until the next call of this
    /// function or of [`free_scratch`](Device::free_scratch).
    fn scratch(&mut self, bytes: usize) -> Result<DeviceRegion>;

    /// Bytes of scratch memory held.
    fn scratch_bytes(&self) -> usize;

    /// Gives scratch memory back, where the device can while other work runs on it.
    fn free_scratch(&mut self) {}

    /// Reads memory of the device.
    fn read(&mut self, from: DeviceRegion, bytes: &mut [u8]) -> Result<()>;

    /// A run of a program begins.
    fn begin(&mut self, _program: &Arc<Program>, _layout: &Layout, _window: usize) -> Result<()> {
        Ok(())
    }

    /// Sends a message: see [`Transport::send`].
    fn send(
        &mut self,
        transport: &mut Router,
        token: Token,
        to: Rank,
        envelope: Envelope,
        src: &[DeviceRegion],
    ) -> Result<Started>;

    /// Receives a message: see [`Transport::recv`].
    fn recv(
        &mut self,
        transport: &mut Router,
        token: Token,
        from: Rank,
        envelope: Envelope,
        sink: Sink<'_, OnDevice>,
    ) -> Result<Started>;

    /// A collective of ranks of this node, of which this is the one at place `me`: see [`Transport::call`].
    fn call(
        &mut self,
        _transport: &mut Router,
        _token: Token,
        _envelope: Envelope,
        _me: usize,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        Err(Error::Internal(format!("a {} that nobody does on this device", call.collective.name())))
    }

    /// A collective of all ranks by a provider: see [`Router::provide`], which knows host memory.
    fn call_provider(
        &mut self,
        transport: &mut Router,
        token: Token,
        by: Provision<'_, OnDevice>,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started>;

    /// The same of all ranks, each of whose blocks lies in one piece, as token 0. Only where data is the host's.
    fn call_flat(
        &mut self,
        _transport: &mut Router,
        _envelope: Envelope,
        call: &FlatCall<OnDevice>,
    ) -> ShortResult<Started> {
        let text = format!("a {} that nobody does on this device", call.collective.name());
        Err(Box::new(Error::Internal(text)))
    }

    /// Takes a short message that needs no receive posted; see [`Router::recv_short`].
    fn recv_short(&mut self, _: &mut Router, _from: Rank, _: Envelope, _to: DeviceRegion) -> ShortResult<Started> {
        Ok(Started::Busy)
    }

    /// Sends one that waits for nothing; see [`Router::send_short`].
    fn send_short(&mut self, _: &mut Router, _to: Rank, _: Envelope, _src: DeviceRegion) -> ShortResult<Started> {
        Ok(Started::Busy)
    }

    /// Copies one stretch, a part of the next step.
    fn copy(&mut self, scaling: Option<Scaling>, src: DeviceRegion, dst: DeviceRegion) -> Result<()>;

    /// Folds one stretch of all sources from the left and divides it, a part of the next step.
    fn reduce(&mut self, how: (DataType, Operator, u64), srcs: &[DeviceRegion], dst: DeviceRegion) -> Result<()>;

    /// Codes elements as one chunk, with what earlier calls have left out of them, a part of the next step.
    fn encode(&mut self, _: Coding, _src: &[DeviceRegion], _dst: DeviceRegion) -> Result<()> {
        Err(no_codes())
    }

    /// Decodes one chunk and divides its elements, a part of the next step.
    fn decode(&mut self, _: Coding, _divisor: u64, _src: DeviceRegion, _dst: &[DeviceRegion]) -> Result<()> {
        Err(no_codes())
    }

    /// Folds the same chunk of several ranks from the left, to a coded chunk or to elements, which are divided; a part of the
    /// next step.
    fn fold_coded(
        &mut self,
        _: Coding,
        _how: (Operator, u64),
        _srcs: &[DeviceRegion],
        _dst: CodedResult<'_>,
    ) -> Result<()> {
        Err(no_codes())
    }

    /// All stretches of the step have been given.
    fn step(&mut self, token: Token) -> Started;

    /// What has been copied is there for all that comes later, and for messages: at once where the device keeps that order by
    /// itself, else when the token completes.
    fn keep_order(&mut self, token: Token) -> Result<Started> {
        Ok(self.step(token))
    }

    /// Makes progress, also of the transport; appends the tokens that have completed.
    fn poll(&mut self, transport: &mut Router, done: &mut Vec<Token>) -> Result<()>;

    /// Whether there is work whose end only a poll sees.
    fn is_busy(&self) -> bool {
        false
    }

    /// An error if the device cannot be used any more. Asked now and then while a run waits for other ranks.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Forgets everything that is pending, once the device does not touch memory for it any more.
    fn cancel(&mut self) {}

    /// Has a provider do collectives inside the node, with so many bytes of memory to bring blocks together; that is done
    /// beside other calls for those of more than `beside_bytes`.
    fn provide(&mut self, _provider: Arc<dyn Provider>, _room_bytes: usize, _beside_bytes: usize) -> Result<()> {
        Err(Error::Internal("a provider of collectives on a device that takes none".to_string()))
    }

    /// Whether a provider does collectives inside the node.
    fn has_provider(&self) -> bool {
        false
    }

    /// Ends the provider, whose ranks are not those that go on with the device.
    fn retire_provider(&mut self) {}

    /// The process ends, and a driver may have ended already: leaves everything as it is.
    fn leave(self: Box<Self>) {}
}

/// Where a device waits for the next communicator that goes on with it.
pub type DeviceHome = Arc<Mutex<Option<Box<dyn Device>>>>;

/// A communicator's device. One with a home outlives the communicator, and another one goes on with it where ranks are lost: a driver
/// may allocate only when its streams have come to rest, and those of the program wait for the call then.
pub struct DeviceSeat {
    device: Box<dyn Device>,
    home: Option<DeviceHome>,
}

impl DeviceSeat {
    /// The device that waits at a home.
    pub fn taken_from(home: &DeviceHome) -> Result<DeviceSeat> {
        let device = locked(home).take();
        let device = device.ok_or_else(|| Error::Internal("another communicator still has the device".to_string()))?;
        Ok(DeviceSeat { device, home: Some(home.clone()) })
    }

    /// Gives the device a home.
    pub fn settle(&mut self, home: DeviceHome) {
        self.home = Some(home);
    }

    /// Sends the device home, if it has one; nothing may be pending on it. Host memory is in its place.
    pub fn give_back(&mut self) {
        if let Some(home) = self.home.take() {
            self.device.retire_provider();
            let device = std::mem::replace(&mut self.device, Box::new(HostDevice::default()));
            *locked(&home) = Some(device);
        }
    }

    /// See [`Device::leave`].
    pub fn leave(&mut self) {
        self.home = None;
        std::mem::replace(&mut self.device, Box::new(HostDevice::default())).leave();
    }
}

impl From<Box<dyn Device>> for DeviceSeat {
    fn from(device: Box<dyn Device>) -> DeviceSeat {
        DeviceSeat { device, home: None }
    }
}

impl Deref for DeviceSeat {
    type Target = dyn Device;

    fn deref(&self) -> &(dyn Device + 'static) {
        &*self.device
    }
}

impl DerefMut for DeviceSeat {
    fn deref_mut(&mut self) -> &mut (dyn Device + 'static) {
        &mut *self.device
    }
}

impl Drop for DeviceSeat {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Makes the device of a communicator's rank. All that plans with the least segments need finds room in so many bytes of
/// scratch memory; longer segments may want more later.
#[derive(Clone, Copy)]
pub struct MakeDevice(pub fn(scratch_bytes: usize) -> Result<Box<dyn Device>>);

impl fmt::Debug for MakeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MakeDevice")
    }
}

impl PartialEq for MakeDevice {
    fn eq(&self, other: &MakeDevice) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl Eq for MakeDevice {}

/// A communicator's own memory on the host: shared with the node, so that peers read it in place, or ordinary.
enum HostScratch {
    Shared(shared::Owned),
    Plain(Arena),
}

impl HostScratch {
    fn new(bytes: usize) -> Result<HostScratch> {
        match shared::Owned::new(bytes) {
            Ok(owned) => Ok(HostScratch::Shared(owned)),
            Err(error) => Arena::try_new(bytes).map(HostScratch::Plain).ok_or(error),
        }
    }

    fn region(&mut self) -> DeviceRegion {
        let region = match self {
            HostScratch::Shared(owned) => owned.region(),
            HostScratch::Plain(arena) => arena.region(),
        };
        // SAFETY: the scratch must outlive every use; because only a call that begins lets it grow, one runs at a time, it is
        // given back only while none runs, and the engine's transport, which may still read it, goes before its device.
        unsafe { region.unbound() }.as_device()
    }
}

/// Data in host memory: local steps are done when they are given.
pub struct HostDevice {
    scratch: HostScratch,
}

impl Default for HostDevice {
    /// Without scratch memory: it grows with the first call that needs some.
    fn default() -> HostDevice {
        HostDevice { scratch: HostScratch::Plain(Arena::new(0)) }
    }
}

impl HostDevice {
    /// Writes to its memory.
    pub fn write(&mut self, to: DeviceRegion, bytes: &[u8]) {
        here(to).write(bytes);
    }
}

/// A region of the host as the device.
fn here(region: DeviceRegion) -> Region {
    // SAFETY: the bytes must be this process's; because the device is the host.
    unsafe { region.in_process() }
}

/// The same of a list.
fn all_here(list: &[DeviceRegion]) -> &[Region] {
    // SAFETY: the bytes must be this process's; because the device is the host.
    unsafe { DeviceRegion::all_in_process(list) }
}

impl Device for HostDevice {
    fn is_host(&self) -> bool {
        true
    }

    fn scratch(&mut self, bytes: usize) -> Result<DeviceRegion> {
        if bytes > self.scratch_bytes() {
            self.scratch = HostScratch::new(bytes)?;
        }
        Ok(self.scratch.region())
    }

    fn scratch_bytes(&self) -> usize {
        match &self.scratch {
            HostScratch::Shared(owned) => owned.bytes(),
            HostScratch::Plain(arena) => arena.len(),
        }
    }

    fn free_scratch(&mut self) {
        *self = HostDevice::default();
    }

    fn read(&mut self, from: DeviceRegion, bytes: &mut [u8]) -> Result<()> {
        here(from).read(bytes);
        Ok(())
    }

    fn send(
        &mut self,
        transport: &mut Router,
        token: Token,
        to: Rank,
        envelope: Envelope,
        src: &[DeviceRegion],
    ) -> Result<Started> {
        transport.send(token, to, envelope, all_here(src))
    }

    fn recv(
        &mut self,
        transport: &mut Router,
        token: Token,
        from: Rank,
        envelope: Envelope,
        sink: Sink<'_, OnDevice>,
    ) -> Result<Started> {
        // SAFETY: the bytes must be this process's; because the device is the host.
        transport.recv(token, from, envelope, unsafe { sink.in_process() })
    }

    fn call(
        &mut self,
        transport: &mut Router,
        token: Token,
        envelope: Envelope,
        me: usize,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        // SAFETY: the bytes must be this process's; because the device is the host.
        transport.call(token, envelope, me, unsafe { call.in_process() })
    }

    fn call_provider(
        &mut self,
        transport: &mut Router,
        token: Token,
        by: Provision<'_, OnDevice>,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        // SAFETY: the bytes must be this process's; because the device is the host.
        let by = unsafe { by.in_process() };
        // SAFETY: the bytes must be this process's; because the device is the host.
        transport.provide(token, by, unsafe { call.in_process() })
    }

    fn call_flat(
        &mut self,
        transport: &mut Router,
        envelope: Envelope,
        call: &FlatCall<OnDevice>,
    ) -> ShortResult<Started> {
        // SAFETY: the bytes must be this process's; because the device is the host.
        transport.call_flat(envelope, unsafe { call.in_process() })
    }

    fn recv_short(
        &mut self,
        router: &mut Router,
        from: Rank,
        envelope: Envelope,
        to: DeviceRegion,
    ) -> ShortResult<Started> {
        router.recv_short(from, envelope, here(to))
    }

    fn send_short(
        &mut self,
        router: &mut Router,
        to: Rank,
        envelope: Envelope,
        src: DeviceRegion,
    ) -> ShortResult<Started> {
        router.send_short(to, envelope, here(src))
    }

    fn copy(&mut self, scaling: Option<Scaling>, src: DeviceRegion, dst: DeviceRegion) -> Result<()> {
        let (src, dst) = (here(src), here(dst));
        let Some(Scaling { reduction, start, divisor }) = scaling else {
            dst.copy_from(src);
            return Ok(());
        };
        let mut from = src;
        if start {
            host::prologue(&reduction, src, dst);
            from = dst;
        }
        if divisor != 1 {
            host::divide(reduction.dtype, divisor, from, dst);
        }
        Ok(())
    }

    fn reduce(&mut self, how: (DataType, Operator, u64), srcs: &[DeviceRegion], dst: DeviceRegion) -> Result<()> {
        let (dtype, operator, divisor) = how;
        host::reduce(dtype, operator, divisor, all_here(srcs), here(dst));
        Ok(())
    }

    fn encode(&mut self, how: Coding, src: &[DeviceRegion], dst: DeviceRegion) -> Result<()> {
        coding::encode(how.code, how.dtype, all_here(src), how.residual.map(here), here(dst))
    }

    fn decode(&mut self, how: Coding, divisor: u64, src: DeviceRegion, dst: &[DeviceRegion]) -> Result<()> {
        let dst = all_here(dst);
        coding::decode(how.code, how.dtype, here(src), dst)?;
        dst.iter().filter(|_| divisor != 1).for_each(|dst| host::divide(how.dtype, divisor, *dst, *dst));
        Ok(())
    }

    fn fold_coded(
        &mut self,
        how: Coding,
        (operator, divisor): (Operator, u64),
        srcs: &[DeviceRegion],
        dst: CodedResult<'_>,
    ) -> Result<()> {
        let to = match dst {
            CodedResult::Coded(dst) => Folded::Coded(here(dst)),
            CodedResult::Elements(dst) => Folded::Elements(how.dtype, all_here(dst)),
        };
        coding::fold(how.code, operator, all_here(srcs), how.residual.map(here), to)?;
        if let (CodedResult::Elements(dst), true) = (dst, divisor != 1) {
            all_here(dst).iter().for_each(|dst| host::divide(how.dtype, divisor, *dst, *dst));
        }
        Ok(())
    }

    fn step(&mut self, _token: Token) -> Started {
        Started::Done
    }

    fn poll(&mut self, transport: &mut Router, done: &mut Vec<Token>) -> Result<()> {
        transport.poll(done)
    }
}
