//! How fast a GPU copies to the host, by itself and beside the copies of another one: what `strata info --nics --probe` asks of
//! GPUs.

use std::sync::Arc;
use std::time::Instant;
use strata::device::gpu::memory::{DeviceBuffer, Pinned};
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::error::Result;
use strata::topo::probe::{ProbeMeasured, Series, COPY_BYTES, LOAD_COPIES};

/// Samples of a copy, after one that does not count.
const SAMPLES: usize = 9;
/// How many copies wait on each stream of the other GPU when a copy is timed, so that they outlast it.
const AHEAD: u64 = 3;

/// A stream with its own host memory, to which it copies.
struct Lane {
    stream: GpuStream,
    target: Pinned,
    /// Copies that were started.
    started: u64,
}

/// Copies of one GPU to the host. The streams go before the memory.
struct Copies {
    gpu: Arc<GpuDevice>,
    lanes: Vec<Lane>,
    source: DeviceBuffer,
}

impl Copies {
    fn new(gpu: &Arc<GpuDevice>, lanes: usize) -> Result<Copies> {
        let lane = |_| Ok(Lane { stream: GpuStream::new(gpu)?, target: Pinned::new(gpu, COPY_BYTES)?, started: 0 });
        let lanes = (0..lanes).map(lane).collect::<Result<Vec<Lane>>>()?;
        Ok(Copies { gpu: gpu.clone(), lanes, source: DeviceBuffer::new(gpu, COPY_BYTES)? })
    }

    /// Starts copies, until so many wait on each stream.
    fn start(&mut self, ahead: u64) -> Result<()> {
        let _entered = self.gpu.enter()?;
        let from = self.source.region().address();
        for lane in &mut self.lanes {
            let ended = lane.stream.poll()?;
            for _ in lane.started - ended..ahead {
                // SAFETY: both places must have so many bytes until the copy has ended; because both belong to this value,
                // whose streams are settled before its memory goes, and a stream's copies come one after the other.
                unsafe { lane.stream.to_host(lane.target.host().as_ptr(), from, COPY_BYTES) }?;
                lane.started = lane.stream.issued() + 1;
                lane.stream.mark()?;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.lanes.iter_mut().try_for_each(|lane| lane.stream.finish())
    }

    /// Whether some of it has not ended.
    fn is_busy(&mut self) -> Result<bool> {
        let _entered = self.gpu.enter()?;
        for lane in &mut self.lanes {
            lane.stream.poll()?;
        }
        Ok(self.lanes.iter().any(|lane| lane.stream.is_busy()))
    }
}

/// MB/s of a GPU's copy to the host, beside those of another one where one is given.
pub fn rate_mbs(gpu: &Arc<GpuDevice>, other: Option<&Arc<GpuDevice>>) -> ProbeMeasured {
    let samples = samples(gpu, other).map_err(|error| error.text().to_string())?;
    let samples = samples.ok_or("the other GPU's copies ended before the one that was timed")?;
    Series::new(samples).ok_or_else(|| "the clock stood still".to_string())
}

/// None where the other GPU's copies ended too early.
fn samples(gpu: &Arc<GpuDevice>, other: Option<&Arc<GpuDevice>>) -> Result<Option<Vec<f64>>> {
    let mut timed = Copies::new(gpu, 1)?;
    let mut load = other.map(|other| Copies::new(other, LOAD_COPIES)).transpose()?;
    let mut rates = Vec::new();
    for _ in 0..=SAMPLES {
        if let Some(load) = &mut load {
            load.start(AHEAD)?;
        }
        let start = Instant::now();
        timed.start(1)?;
        timed.finish()?;
        rates.push(COPY_BYTES as f64 / start.elapsed().as_secs_f64() / 1e6);
        if let Some(load) = &mut load {
            if !load.is_busy()? {
                return Ok(None);
            }
        }
    }
    // A failure of the load is one of the measurement.
    load.as_mut().map_or(Ok(()), Copies::finish)?;
    Ok(Some(rates.split_off(1)))
}
