//! What holds streams back: words, the kernels that wait for them and raise them, the driver's waits, and events.
//!
//! That a stream waits cannot be seen in a moment: it is looked at for [`LOOK`], in which one that does not wait would have
//! gone on a thousand times.

use super::kernels::Tally;
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata::device::gpu::kernels::Flag;
use strata::device::gpu::memory::{DeviceBuffer, Pinned};
use strata::device::gpu::order::{CommFlag, Means};
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::error::Result;

/// How long a stream that should wait is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long a stream that should go on may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Bytes that are copied behind what waits.
const BYTES: usize = 4096;

/// A stream with a copy behind whatever it waits for, into memory of the host.
struct Behind {
    track: GpuStream,
    device: DeviceBuffer,
    pinned: Pinned,
    number: u64,
}

impl Behind {
    fn new(gpu: &Arc<GpuDevice>) -> Result<Behind> {
        let (track, device, pinned) =
            (GpuStream::new(gpu)?, DeviceBuffer::new(gpu, BYTES)?, Pinned::new(gpu, 2 * BYTES)?);
        pinned.host().write(&[[1; BYTES], [0; BYTES]].concat());
        Ok(Behind { track, device, pinned, number: 0 })
    }

    /// Copies ones to the device and from there into the zeros.
    fn copy(&mut self) -> Result<()> {
        let (address, host) = (self.device.region().address(), self.pinned.host());
        // SAFETY: both must stay until this has ended; because they are kept beside the stream, which is waited for first.
        unsafe { self.track.to_device(address, host.part(0, BYTES).as_ptr(), BYTES) }?;
        // SAFETY: both must stay until this has ended; because they are kept beside the stream, which is waited for first.
        unsafe { self.track.to_host(host.part(BYTES, BYTES).as_ptr(), address, BYTES) }?;
        self.number = self.track.issued();
        self.track.mark()
    }

    fn has_ended(&mut self) -> Result<bool> {
        Ok(self.track.poll()? > self.number)
    }

    /// Whether the copy stays behind as long as we look.
    fn stays(&mut self) -> Result<bool> {
        let start = Instant::now();
        while start.elapsed() < LOOK {
            if self.has_ended()? {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// Waits for the copy, and looks whether it is what it should be: what is wrong.
    fn result(&mut self) -> Result<Option<String>> {
        let start = Instant::now();
        while !self.has_ended()? {
            if start.elapsed() > LIMIT {
                // What the stream uses cannot be given back, and whoever waits for it waits for ever.
                tell!("strata: FAILED: a stream still waits 10 s after its word was raised");
                std::process::exit(i32::from(super::DIFFERENT));
            }
            std::thread::yield_now();
        }
        let mut got = [0; BYTES];
        self.pinned.host().part(BYTES, BYTES).read(&mut got);
        Ok((got != [1; BYTES]).then(|| "what came after the wait is not there at its end".to_string()))
    }
}

/// A stream waits by these means until the host raises the word; and an operation waits for what its stream was given.
fn by_host(gpu: &Arc<GpuDevice>, means: Means) -> Result<Option<String>> {
    let mut behind = Behind::new(gpu)?;
    let (first, second) = (CommFlag::new(gpu)?, CommFlag::new(gpu)?);
    let word = first.accept_by(&[behind.track.handle()], means)?;
    behind.copy()?;
    let mut later = second.accept_by(&[behind.track.handle()], means)?;
    let stays = behind.stays()?;
    let begins = later.may_begin()?;
    drop(word);
    let result = behind.result()?;
    drop(later);
    behind.track.finish()?;
    Ok(match (stays, begins) {
        (false, _) => Some(format!("{means:?}: a stream went on before its word was raised, or an event says so")),
        (_, true) => Some(format!("{means:?}: an event tells of the end of what waits")),
        _ => result.map(|what| format!("{means:?}: {what}")),
    })
}

/// A stream waits by the kernel until another stream's kernel raises the word, after what that stream was given before.
fn by_device(gpu: &Arc<GpuDevice>) -> Result<Option<String>> {
    let word = Pinned::new(gpu, BYTES)?;
    let flag = Flag { address: word.address() + 64, value: 7, reserved: 0 };
    let (mut behind, mut other) = (Behind::new(gpu)?, GpuStream::new(gpu)?);
    behind.track.wait(flag)?;
    behind.copy()?;
    let stays = behind.stays()?;
    other.raise(flag)?;
    other.issued();
    let result = behind.result()?;
    // Where events lie, the streams are not at rest yet.
    behind.track.finish()?;
    other.finish()?;
    let mut raised = [0; 4];
    word.host().part(64, 4).read(&mut raised);
    Ok(match (stays, u32::from_le_bytes(raised)) {
        (false, _) => Some("strata_wait: a stream went on before its word was raised, or an event says so".to_string()),
        (_, 7) => result.map(|what| format!("strata_wait: {what}")),
        (_, other) => Some(format!("strata_raise wrote {other} instead of 7")),
    })
}

/// Checks of what holds streams back.
pub fn tallies(gpu: &Arc<GpuDevice>) -> Result<Vec<Tally>> {
    let [mut kernels, mut host, mut driver] = ["wait+raise", "host raise", "stream wait"].map(Tally::new);
    kernels.count(by_device(gpu)?);
    host.count(by_host(gpu, Means::Kernel)?);
    // What a driver lacks is not wrong: `strata gpu info` tells of it.
    if super::found::can_wait(gpu, Means::Driver).is_ok() {
        driver.count(by_host(gpu, Means::Driver)?);
    }
    Ok(vec![kernels, host, driver])
}
