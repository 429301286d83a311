//! The stream on which the calls of a window run that time may close.
//!
//! When such a window closes is another moment on each rank. Calls that went on the program's streams then would come before other
//! communicators' calls there on one rank and behind them on another, and ranks would wait for each other for ever. So they run on a
//! stream of the window, each behind what its own stream had been given when it was made; and the program's streams wait for all of
//! them at the window's end.
#![forbid(unsafe_code)]

use super::launch::hold_up;
use super::{Comm, StreamRef};
use crate::device::gpu::stream::{GpuEvent, GpuStream};
use crate::device::gpu::GpuDevice;
use crate::device::host::event::HostEvent;
use crate::device::host::stream::HostStream;
use crate::error::{Error, Result};
use crate::sync::locked;
use std::sync::{Arc, Mutex};

/// How far a stream of the program's had come.
pub enum StreamPlace {
    /// One of the host.
    Host(Arc<HostEvent>),
    /// One of a driver.
    Gpu(GpuEvent),
}

/// The stream of one window.
pub struct WindowStream {
    host: Arc<HostStream>,
    /// Where data is on a GPU; of all of a communicator's windows.
    gpu: Option<Arc<GpuStream>>,
    /// Those that wait at the end.
    users: Mutex<Vec<StreamRef>>,
}

impl WindowStream {
    /// A stream; on a GPU this one.
    pub fn new(gpu: Option<Arc<GpuStream>>) -> WindowStream {
        WindowStream { host: HostStream::new(), gpu, users: Mutex::default() }
    }

    fn gpu(&self) -> Result<(&GpuStream, &Arc<GpuDevice>)> {
        let stream =
            self.gpu.as_deref().ok_or_else(|| Error::Internal("a window without a stream on its GPU".into()))?;
        Ok((stream, stream.gpu()))
    }

    /// Where a call that was made on this stream runs instead, and what it comes after. One on a null stream of the host stays there.
    pub fn in_place_of(&self, stream: StreamRef) -> Result<(StreamRef, Option<StreamPlace>)> {
        let (own, place) = match &stream {
            StreamRef::Null => return Ok((stream, None)),
            StreamRef::Stream(user) => {
                let event = HostEvent::new();
                event.record(Some(user))?;
                (StreamRef::Stream(self.host.clone()), StreamPlace::Host(event))
            }
            StreamRef::Gpu(user) => {
                let (own, gpu) = self.gpu()?;
                let _entered = gpu.enter()?;
                let event = gpu.event()?;
                event.record(*user)?;
                (StreamRef::Gpu(own.handle()), StreamPlace::Gpu(event))
            }
        };
        let mut users = locked(&self.users);
        if !users.contains(&stream) {
            users.push(stream);
        }
        Ok((own, Some(place)))
    }

    /// What comes from now on comes after this.
    pub fn wait_for(&self, place: &StreamPlace) -> Result<()> {
        match place {
            StreamPlace::Host(event) => event.hold(Some(&self.host)),
            StreamPlace::Gpu(event) => {
                let (own, gpu) = self.gpu()?;
                let _entered = gpu.enter()?;
                event.hold(own.handle())
            }
        }
    }

    /// The window has ended: has the streams of the program that its calls were made on wait for all of them.
    pub fn join(&self, comm: &Comm) -> Result<()> {
        let (mut of_host, mut of_gpu) = (Vec::new(), Vec::new());
        for user in std::mem::take(&mut *locked(&self.users)) {
            match user {
                StreamRef::Stream(stream) => of_host.push(stream),
                StreamRef::Gpu(_) => of_gpu.push(user),
                StreamRef::Null => {}
            }
        }
        let event = HostEvent::new();
        if !of_host.is_empty() {
            event.record(Some(&self.host))?;
        }
        let outcome = of_host.iter().try_for_each(|stream| event.hold(Some(stream)));
        let carriers = || std::iter::once(comm).chain(comm.siblings().map(|sibling| &**sibling));
        match of_gpu.is_empty() {
            true => outcome,
            false => outcome.and(carriers().try_for_each(|comm| hold_up(comm, &of_gpu))),
        }
    }
}

impl Drop for WindowStream {
    fn drop(&mut self) {
        self.host.close();
    }
}
