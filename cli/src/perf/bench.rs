//! Checks and times one size of a collective on the ranks of this process, in step with the other processes.
#![forbid(unsafe_code)]

use super::collective::{Place, Reduce};
use super::data::Data;
use super::table::{Row, Timing};
use super::{Memory, Options};
use crate::nccl::{Allocation, Buffers, Comm, HostBuffer, Library};
use std::time::Instant;
use strata::bootstrap::store::Store;
use strata::dtype::DataType;
use strata::error::{Error, Result};
use strata::memory::Region;

/// What an output buffer holds before a check, so that bytes that were never written show.
const STALE: u8 = 0xa5;

/// Memory for a buffer.
pub enum Owned<'a> {
    /// Ordinary.
    Malloc(HostBuffer),
    /// From `ncclMemAlloc`.
    Nccl(Allocation<'a>),
}

impl Owned<'_> {
    /// All of it.
    pub fn region(&mut self) -> Region {
        match self {
            Owned::Malloc(arena) => arena.region(),
            Owned::Nccl(allocation) => allocation.region(),
        }
    }
}

/// The ranks of this process and their buffers.
pub struct Bench<'a, 'lib> {
    options: &'a Options,
    comms: &'a [Comm<'lib>],
    store: &'a mut Store,
    nranks: usize,
    // Send and receive buffer of each rank, each large enough for the in-place calls of a group of the largest size.
    owned: Vec<[Owned<'lib>; 2]>,
}

/// One size, ready to be called.
struct Case {
    count: usize,
    dtype: DataType,
    op: Vec<i32>,
    places: Vec<Place>,
    /// The buffers of each rank of this process, for each call of a group.
    calls: Vec<Vec<Buffers>>,
}

impl<'a, 'lib> Bench<'a, 'lib> {
    /// Allocates buffers for the largest size.
    pub fn new(
        options: &'a Options,
        library: &'lib Library,
        comms: &'a [Comm<'lib>],
        store: &'a mut Store,
    ) -> Result<Bench<'a, 'lib>> {
        let nranks = store.size * comms.len();
        // Blocks are rounded down, so no total is larger than the largest size asked for.
        let too_long = || Error::System(format!("{} calls of {} bytes", options.aggregate, options.max_bytes));
        let len = stride(options).checked_mul(options.aggregate - 1).and_then(|all| all.checked_add(options.max_bytes));
        let len = len.ok_or_else(too_long)?;
        let allocate = || match options.memory {
            Memory::Malloc => HostBuffer::try_new(len)
                .map(Owned::Malloc)
                .ok_or_else(|| Error::System(format!("there is no memory for a buffer of {len} bytes"))),
            Memory::Nccl => library.allocate(len).map(Owned::Nccl),
        };
        let pair = |_| Ok([allocate()?, allocate()?]);
        let owned = (0..comms.len()).map(pair).collect::<Result<_>>()?;
        Ok(Bench { options, comms, store, nranks, owned })
    }

    /// Checks and times one size, out of place and in place.
    pub fn row(&mut self, data: &Data, root: usize, size: usize) -> Result<Row> {
        let kind = self.options.collective;
        let (dtype, elem_bytes) = (data.dtype(), data.dtype().size());
        let count = kind.count(size, elem_bytes, self.nranks);
        let op = self.create_ops(data)?;
        let mut case = Case { count, dtype, op, places: self.places(root), calls: Vec::new() };
        self.lay_out(&mut case, false);
        let out_of_place = self.measure(&case, data, false)?;
        let mut in_place = None;
        if kind.has_in_place() {
            self.lay_out(&mut case, true);
            in_place = Some(self.measure(&case, data, true)?);
        }
        self.destroy_ops(data, &case.op)?;
        Ok(Row {
            size: kind.total_bytes(count, elem_bytes, self.nranks),
            count,
            dtype: dtype.name(),
            redop: data.reduce().name(),
            root: if kind.has_root() { root as i64 } else { -1 },
            factor: kind.bus_factor(self.nranks),
            out_of_place,
            in_place,
        })
    }

    fn places(&self, root: usize) -> Vec<Place> {
        let first = self.store.rank * self.comms.len();
        (0..self.comms.len()).map(|index| Place { rank: first + index, nranks: self.nranks, root }).collect()
    }

    fn create_ops(&self, data: &Data) -> Result<Vec<i32>> {
        match data.reduce() {
            Reduce::None => Ok(vec![0; self.comms.len()]),
            Reduce::Builtin(op) => Ok(vec![op.code(); self.comms.len()]),
            Reduce::MulSum => {
                let scalar = Data::scalar(data.dtype());
                self.comms.iter().map(|comm| comm.create_op(scalar, data.dtype())).collect()
            }
        }
    }

    fn destroy_ops(&self, data: &Data, op: &[i32]) -> Result<()> {
        if data.reduce() == Reduce::MulSum {
            self.comms.iter().zip(op).try_for_each(|(comm, &op)| comm.destroy_op(op))?;
        }
        Ok(())
    }

    /// Points the case's buffers into our memory.
    fn lay_out(&mut self, case: &mut Case, in_place: bool) {
        let kind = self.options.collective;
        let block = case.count * case.dtype.size();
        let mut call = |index: usize| {
            let at = index * stride(self.options);
            let buffers = self.owned.iter_mut().zip(&case.places).map(|([first, second], &place)| {
                let (send_blocks, recv_blocks) = kind.blocks(place);
                let (send, recv) = if in_place {
                    // The larger side; a rank without an own side (a leaf of a broadcast) still has one block.
                    let whole = first.region().part(at, send_blocks.max(recv_blocks) * block);
                    kind.in_place(whole, block, place)
                } else {
                    (first.region().part(at, send_blocks * block), second.region().part(at, recv_blocks * block))
                };
                Buffers { send, recv, count: case.count, dtype: case.dtype }
            });
            buffers.collect()
        };
        case.calls = (0..self.options.aggregate).map(&mut call).collect();
    }

    fn measure(&mut self, case: &Case, data: &Data, in_place: bool) -> Result<Timing> {
        let wrong = if self.options.check > 0 { Some(self.check(case, data, in_place)?) } else { None };
        for _ in 0..self.options.warmup {
            self.call(case)?;
            self.synchronize()?;
        }
        if self.options.front {
            return self.measure_front(case, wrong);
        }
        let mut times = Vec::with_capacity(self.options.iterations());
        self.store.barrier()?;
        let start = Instant::now();
        for _ in 0..self.options.iterations() {
            if self.options.blocking > 0 {
                self.store.barrier()?;
            }
            let before = Instant::now();
            self.call(case)?;
            times.push(before.elapsed().as_secs_f64());
        }
        let total = match self.options.blocking {
            0 => start.elapsed().as_secs_f64(),
            _ => times.iter().sum(),
        };
        let calls = (self.options.iterations() * self.options.aggregate) as f64;
        times.iter_mut().for_each(|time| *time /= self.options.aggregate as f64);
        times.push(total / calls);
        let mut slowest = self.slowest(&times)?;
        let mean = slowest.pop().unwrap_or(0.0);
        Ok(Timing { mean, iterations: slowest, wrong, front: None })
    }

    /// Times single calls on their streams, and when the first element of each receive buffer is final.
    fn measure_front(&mut self, case: &Case, wrong: Option<usize>) -> Result<Timing> {
        let (mut times, mut fronts) = (Vec::new(), Vec::new());
        for _ in 0..self.options.iterations() {
            self.store.barrier()?;
            let before = Instant::now();
            self.call(case)?;
            for (comm, Buffers { recv, dtype, .. }) in self.comms.iter().zip(case.calls.iter().flatten()) {
                if !recv.is_empty() {
                    comm.wait_range(*recv, dtype.size())?;
                }
            }
            fronts.push(before.elapsed().as_secs_f64());
            self.synchronize()?;
            times.push(before.elapsed().as_secs_f64());
        }
        let (slowest, mut fronts) = (self.slowest(&times)?, self.slowest(&fronts)?);
        fronts.sort_by(f64::total_cmp);
        let mean = slowest.iter().sum::<f64>() / slowest.len().max(1) as f64;
        Ok(Timing { mean, iterations: slowest, wrong, front: fronts.get(fronts.len() / 2).copied() })
    }

    /// Waits for the streams, where the ranks have such.
    fn synchronize(&self) -> Result<()> {
        self.comms.iter().filter_map(Comm::stream).try_for_each(|stream| stream.synchronize())
    }

    /// Fills the buffers, makes the calls of one iteration, and counts the wrong elements on all ranks.
    fn check(&mut self, case: &Case, data: &Data, in_place: bool) -> Result<usize> {
        let kind = self.options.collective;
        let of_ranks = || case.calls.iter().flat_map(|buffers| buffers.iter().zip(&case.places));
        for (buffers, place) in of_ranks() {
            stale(buffers.recv);
            // In place, the bytes beside this rank's own block of the receive buffer stay stale.
            let input = if in_place && kind.blocks(*place).0 == 0 { Region::EMPTY } else { buffers.send };
            data.fill(input, place.rank, 0);
        }
        self.call(case)?;
        self.synchronize()?;
        let wrong = |(buffers, place): (&Buffers, &Place)| data.wrong(kind, buffers.recv, case.count, *place);
        let wrong: usize = of_ranks().map(wrong).sum();
        let all = self.store.all_gather(&(wrong as u64).to_le_bytes())?;
        all.iter().map(|bytes| Ok(number(bytes)? as usize)).sum()
    }

    /// One iteration: the call on all ranks of the process, `-m` times, each on buffers of its own.
    fn call(&self, case: &Case) -> Result<()> {
        match &case.calls[..] {
            [alone] if self.comms.len() == 1 && self.options.collective != super::Kind::SendRecv => {
                self.issue(case, alone)
            }
            calls => self.library().group(|| calls.iter().try_for_each(|buffers| self.issue(case, buffers))),
        }
    }

    fn library(&self) -> &'lib Library {
        self.comms[0].library()
    }

    fn issue(&self, case: &Case, buffers: &[Buffers]) -> Result<()> {
        let ranks = self.comms.iter().zip(buffers).zip(case.places.iter().zip(&case.op));
        for ((comm, buffers), (place, &op)) in ranks {
            let outcome = self.options.collective.issue(comm, buffers, op, *place);
            outcome.map_err(|error| Error::System(format!("rank {}: {error}", place.rank)))?;
        }
        Ok(())
    }

    /// The largest of each number over all processes.
    fn slowest(&mut self, times: &[f64]) -> Result<Vec<f64>> {
        let bytes: Vec<u8> = times.iter().flat_map(|time| time.to_bits().to_le_bytes()).collect();
        let mut slowest = vec![0.0f64; times.len()];
        for theirs in self.store.all_gather(&bytes)? {
            for (slowest, bits) in slowest.iter_mut().zip(theirs.chunks(8)) {
                *slowest = slowest.max(f64::from_bits(number(bits)?));
            }
        }
        Ok(slowest)
    }
}

/// Bytes from the buffer of one call of a group to that of the next one: they are apart, as a program's are.
fn stride(options: &Options) -> usize {
    options.max_bytes.next_multiple_of(64).saturating_add(64)
}

fn number(bytes: &[u8]) -> Result<u64> {
    let bytes = bytes.try_into().map_err(|_| Error::Remote("a number that is not 8 bytes long".into()))?;
    Ok(u64::from_le_bytes(bytes))
}

fn stale(region: Region) {
    let page = [STALE; 4096];
    for offset in (0..region.len()).step_by(page.len()) {
        let len = page.len().min(region.len() - offset);
        region.part(offset, len).write(&page[..len]);
    }
}
