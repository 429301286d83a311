//! The world the executor runs in when the collective is real: this process's memory, device, clock and transport.
#![forbid(unsafe_code)]

use super::device::{CodedResult, Coding, Device, Scaling};
use super::front::CallFront;
use super::independent::IndependentMessages;
use super::{CollectiveCall, Joined};
use crate::code::FloatCode;
use crate::device::host::Combine;
use crate::dtype::{DataType, Reduction};
use crate::error::{Error, Result};
use crate::exec::{Op, Started, Token, World};
use crate::memory::{DeviceRegion, OnDevice};
use crate::plan::layout::{Layout, Piece};
use crate::plan::{Buffer, OperandOrder};
use crate::topo::Rank;
use crate::transport::provider::Provision;
use crate::transport::{Blocks, Envelope, NodeCall, Router, Sink};
use smallvec::SmallVec;
use std::sync::OnceLock;
use std::time::Instant;

/// The memory of one call.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// The send buffer.
    input: DeviceRegion,
    /// The receive buffer.
    output: DeviceRegion,
    /// Our own memory.
    scratch: DeviceRegion,
    /// The memory of several calls, in the place of the two first ones.
    joined: Option<&'a Joined>,
}

/// Lists of regions, kept from call to call so that none is allocated twice.
#[derive(Debug, Default)]
pub struct RegionLists {
    first: Vec<DeviceRegion>,
    second: Vec<DeviceRegion>,
    src: Blocks<OnDevice>,
    dst: Blocks<OnDevice>,
}

/// One call's view of the world.
pub struct LiveWorld<'a> {
    /// Where the data is: does the local half, and gives messages to the transport.
    pub device: &'a mut dyn Device,
    /// Carries messages.
    pub transport: &'a mut Router,
    /// The call's memory.
    pub buffers: Buffers<'a>,
    /// The rank that runs it.
    pub rank: Rank,
    /// The type of the call's elements.
    pub dtype: DataType,
    /// What reductions do; `None` for collectives that only move data.
    pub reduction: Option<Reduction>,
    /// What coding has left out of the row of blocks, a float32 for each element.
    pub residual: Option<DeviceRegion>,
    /// The call's number on its communicator.
    pub sequence: u64,
    /// The call's digest.
    pub signature: u32,
    /// The provider that does the calls of all ranks.
    pub provider: Option<&'a str>,
    /// Whether blocks differ in size.
    pub uneven: bool,
    /// Messages that do not wait for the call, where there are such.
    pub independent: Option<&'a mut IndependentMessages>,
    /// Reused lists.
    pub lists: &'a mut RegionLists,
    /// Who is told how far the call is, and where its segments lie.
    pub front: Option<(&'a CallFront, &'a Layout)>,
}

/// The time in ns since the process first asked.
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

impl<'a> Buffers<'a> {
    /// The memory of a call. `packed` stands for the buffers of several calls.
    pub fn of(call: &'a CollectiveCall, scratch: DeviceRegion, packed: Option<[DeviceRegion; 2]>) -> Buffers<'a> {
        if let Some([input, output]) = packed {
            return Buffers { input, output, scratch, joined: None };
        }
        Buffers { input: call.input, output: call.output, scratch, joined: call.joined.as_deref() }
    }

    /// Bytes of the longer of the send and the receive buffer.
    fn bytes(&self) -> usize {
        match self.joined {
            None => self.input.len().max(self.output.len()),
            Some(joined) => joined.input.bytes().max(joined.output.bytes()),
        }
    }

    /// The send and the receive buffer; empty where they are several calls'.
    fn whole(&self) -> [DeviceRegion; 2] {
        [self.input, self.output]
    }

    fn region(&self, piece: &Piece) -> DeviceRegion {
        let buffer = match piece.buffer {
            Buffer::Input => self.input,
            Buffer::Output => self.output,
            Buffer::Scratch | Buffer::Coded => self.scratch,
        };
        buffer.part(piece.offset, piece.len)
    }

    fn list(&self, pieces: &[Piece], regions: &mut Vec<DeviceRegion>) {
        regions.clear();
        let Some(joined) = self.joined else {
            return regions.extend(pieces.iter().map(|piece| self.region(piece)));
        };
        for piece in pieces {
            match piece.buffer {
                Buffer::Input => joined.input.parts(piece.offset, piece.len, |part| regions.push(part)),
                Buffer::Output => joined.output.parts(piece.offset, piece.len, |part| regions.push(part)),
                Buffer::Scratch | Buffer::Coded => regions.push(self.region(piece)),
            }
        }
    }

    fn blocks(&self, lists: &[&[Piece]], blocks: &mut Blocks<OnDevice>, regions: &mut Vec<DeviceRegion>) {
        blocks.clear();
        for pieces in lists {
            if self.joined.is_none() {
                blocks.push(pieces.iter().map(|piece| self.region(piece)));
                continue;
            }
            self.list(pieces, regions);
            blocks.push(regions.drain(..));
        }
    }

    /// Goes through rows of pieces of equal total length in step, calling `visit` for each stretch that is one region in all of
    /// them.
    fn walk(&self, rows: &[&[Piece]], mut visit: impl FnMut(&[DeviceRegion]) -> Result<()>) -> Result<()> {
        if self.joined.is_none() {
            let mut regions: SmallVec<[DeviceRegion; 17]> = SmallVec::new();
            return walk(rows, |parts| {
                regions.clear();
                regions.extend(parts.iter().map(|piece| self.region(piece)));
                visit(&regions)
            });
        }
        let mut lists: Vec<Vec<DeviceRegion>> = vec![Vec::new(); rows.len()];
        rows.iter().zip(&mut lists).for_each(|(row, list)| self.list(row, list));
        let rows: SmallVec<[&[DeviceRegion]; 17]> = lists.iter().map(Vec::as_slice).collect();
        walk(&rows, visit)
    }
}

/// What can be cut.
trait Stretch: Copy {
    /// Its length in bytes.
    fn bytes(&self) -> usize;
    /// So many bytes of it from there.
    fn cut(&self, offset: usize, len: usize) -> Self;
}

impl Stretch for Piece {
    fn bytes(&self) -> usize {
        self.len
    }

    fn cut(&self, offset: usize, len: usize) -> Piece {
        Piece { offset: self.offset + offset, len, ..*self }
    }
}

impl Stretch for DeviceRegion {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn cut(&self, offset: usize, len: usize) -> DeviceRegion {
        self.part(offset, len)
    }
}

impl LiveWorld<'_> {
    fn envelope(&self, channel: u16) -> Envelope {
        Envelope { channel, sequence: self.sequence, signature: self.signature }
    }

    fn reduction(&self) -> Result<Reduction> {
        self.reduction.ok_or_else(|| Error::Internal("a plan of a moving collective reduces".to_string()))
    }

    fn combine(&self, order: OperandOrder, finish: bool) -> Result<Combine> {
        let Reduction { dtype, operator, divisor, .. } = self.reduction()?;
        Ok(Combine { dtype, operator, order, divisor: if finish { divisor } else { 1 } })
    }

    // Neither is a part of `start`, whose frame is on every call's stack: their lists take a kilobyte.
    #[inline(never)]
    fn copy(&mut self, token: Token, src: &[Piece], dst: &[Piece], start: bool, finish: bool) -> Result<Started> {
        let scaling = self.reduction.and_then(|reduction| {
            let scaling = Scaling {
                reduction,
                start: start && reduction.needs_prologue(),
                divisor: if finish { reduction.divisor } else { 1 },
            };
            (scaling.start || scaling.divisor != 1).then_some(scaling)
        });
        let (buffers, device) = (self.buffers, &mut *self.device);
        buffers.walk(&[src, dst], |parts| device.copy(scaling, parts[0], parts[1]))?;
        Ok(device.step(token))
    }

    #[inline(never)]
    fn reduce(&mut self, token: Token, srcs: &[&[Piece]], dst: &[Piece], finish: bool) -> Result<Started> {
        let Reduction { dtype, operator, divisor, .. } = self.reduction()?;
        let how = (dtype, operator, if finish { divisor } else { 1 });
        let mut rows: Vec<&[Piece]> = Vec::with_capacity(srcs.len() + 1);
        rows.extend(srcs);
        rows.push(dst);
        let (buffers, device) = (self.buffers, &mut *self.device);
        buffers.walk(&rows, |parts| {
            let (dst, srcs) = parts.split_last().expect("a row for the destination");
            device.reduce(how, srcs, *dst)
        })?;
        Ok(device.step(token))
    }
}

/// A list of regions, of which chunks are taken one after another.
struct Taken<'a> {
    left: &'a [DeviceRegion],
    /// Bytes of the first that are taken.
    done: usize,
}

impl Taken<'_> {
    /// The next so many bytes.
    fn take(&mut self, mut bytes: usize, regions: &mut Vec<DeviceRegion>) {
        regions.clear();
        while let (Some((first, others)), true) = (self.left.split_first(), bytes > 0) {
            let part = bytes.min(first.len() - self.done);
            regions.push(first.part(self.done, part));
            (self.done, bytes) = (self.done + part, bytes - part);
            if self.done == first.len() {
                (self.left, self.done) = (others, 0);
            }
        }
    }
}

impl LiveWorld<'_> {
    /// How chunk `piece` is coded, which lies `row` elements into the row of blocks, and how many bytes its elements take.
    fn coding(&self, code: FloatCode, piece: &Piece, row: Option<usize>) -> (Coding, usize) {
        let n = code.elements(piece.len).unwrap_or(0);
        let residual = self.residual.zip(row).map(|(residual, row)| residual.part(4 * row, 4 * n));
        (Coding { code, dtype: self.dtype, residual }, n * self.dtype.size())
    }

    #[inline(never)]
    fn encode(
        &mut self,
        token: Token,
        code: FloatCode,
        (src, dst): (&[Piece], &[Piece]),
        rows: &[usize],
    ) -> Result<Started> {
        let (mut regions, mut chunk) = (Vec::new(), Vec::new());
        self.buffers.list(src, &mut regions);
        let mut elements = Taken { left: &regions, done: 0 };
        for (index, piece) in dst.iter().enumerate() {
            let (how, bytes) = self.coding(code, piece, rows.get(index).copied());
            elements.take(bytes, &mut chunk);
            self.device.encode(how, &chunk, self.buffers.region(piece))?;
        }
        Ok(self.device.step(token))
    }

    #[inline(never)]
    fn decode(
        &mut self,
        token: Token,
        code: FloatCode,
        (src, dst): (&[Piece], &[Piece]),
        finish: bool,
    ) -> Result<Started> {
        let divisor = self.reduction.filter(|_| finish).map_or(1, |reduction| reduction.divisor);
        let (mut regions, mut chunk) = (Vec::new(), Vec::new());
        self.buffers.list(dst, &mut regions);
        let mut elements = Taken { left: &regions, done: 0 };
        for piece in src {
            let (how, bytes) = self.coding(code, piece, None);
            elements.take(bytes, &mut chunk);
            self.device.decode(how, divisor, self.buffers.region(piece), &chunk)?;
        }
        Ok(self.device.step(token))
    }

    #[inline(never)]
    fn fold_coded(
        &mut self,
        token: Token,
        code: FloatCode,
        (srcs, dst): (&[&[Piece]], &[Piece]),
        rows: &[usize],
        finish: bool,
    ) -> Result<Started> {
        let Reduction { operator, divisor, .. } = self.reduction()?;
        let how_folded = (operator, if finish { divisor } else { 1 });
        let is_coded = dst.first().is_some_and(|piece| piece.buffer == Buffer::Coded);
        let (mut regions, mut chunk) = (Vec::new(), Vec::new());
        self.buffers.list(dst, &mut regions);
        let mut elements = Taken { left: &regions, done: 0 };
        for (index, piece) in srcs[0].iter().enumerate() {
            let (how, bytes) = self.coding(code, piece, rows.get(index).copied());
            let contributions: SmallVec<[DeviceRegion; 17]> =
                srcs.iter().map(|pieces| self.buffers.region(&pieces[index])).collect();
            let to = if is_coded {
                CodedResult::Coded(regions[index])
            } else {
                elements.take(bytes, &mut chunk);
                CodedResult::Elements(&chunk)
            };
            self.device.fold_coded(how, how_folded, &contributions, to)?;
        }
        Ok(self.device.step(token))
    }
}

/// Goes through rows of equal total length in step, calling `visit` for each stretch that is in one part in all of them.
fn walk<Part: Stretch>(rows: &[&[Part]], mut visit: impl FnMut(&[Part]) -> Result<()>) -> Result<()> {
    let mut at: SmallVec<[(usize, usize); 17]> = rows.iter().map(|_| (0, 0)).collect();
    let mut parts: SmallVec<[Part; 17]> = SmallVec::new();
    while rows.iter().zip(&at).all(|(row, &(index, _))| index < row.len()) {
        let len = rows.iter().zip(&at).map(|(row, &(index, done))| row[index].bytes() - done).min().unwrap_or(0);
        parts.clear();
        for (row, (index, done)) in rows.iter().zip(&mut at) {
            let piece = row[*index];
            parts.push(piece.cut(*done, len));
            *done += len;
            if *done == piece.bytes() {
                (*index, *done) = (*index + 1, 0);
            }
        }
        visit(&parts)?;
    }
    Ok(())
}

impl World for LiveWorld<'_> {
    fn now_ns(&self) -> u64 {
        now_ns()
    }

    fn start(&mut self, token: Token, op: Op<'_>) -> Result<Started> {
        match op {
            Op::Send { to, channel, src } => {
                let envelope = self.envelope(channel);
                self.buffers.list(src, &mut self.lists.first);
                self.device.send(self.transport, token, to, envelope, &self.lists.first)
            }
            Op::Recv { from, channel, dst } => {
                let envelope = self.envelope(channel);
                self.buffers.list(dst, &mut self.lists.first);
                self.device.recv(self.transport, token, from, envelope, Sink::Store(&self.lists.first))
            }
            Op::RecvReduce { from, channel, local, dst, order, finish } => {
                let envelope = self.envelope(channel);
                let combine = self.combine(order, finish)?;
                self.buffers.list(local, &mut self.lists.first);
                self.buffers.list(dst, &mut self.lists.second);
                let sink = Sink::Reduce { local: &self.lists.first, dst: &self.lists.second, combine };
                self.device.recv(self.transport, token, from, envelope, sink)
            }
            Op::Copy { src, dst, start, finish } => self.copy(token, src, dst, start, finish),
            Op::Reduce { srcs, dst, finish } => self.reduce(token, srcs, dst, finish),
            Op::Encode { code, src, dst, rows } => self.encode(token, code, (src, dst), rows),
            Op::Decode { code, src, dst, finish } => self.decode(token, code, (src, dst), finish),
            Op::FoldCoded { code, srcs, dst, rows, finish } => self.fold_coded(token, code, (srcs, dst), rows, finish),
            Op::Call { call, src, dst, .. } => {
                let envelope = self.envelope(0);
                let combine = match call.collective.reduces() {
                    true => Some(self.combine(OperandOrder::LocalFirst, call.finish)?),
                    false => None,
                };
                self.buffers.blocks(src, &mut self.lists.src, &mut self.lists.first);
                self.buffers.blocks(dst, &mut self.lists.dst, &mut self.lists.first);
                let RegionLists { src, dst, .. } = &*self.lists;
                let me = call.group.iter().position(|&rank| rank == self.rank).unwrap_or(0);
                let operation_bytes = self.buffers.bytes();
                let call =
                    NodeCall { collective: call.collective, root: call.root, src, dst, combine, operation_bytes };
                match self.provider {
                    Some(name) => {
                        let uneven = self.uneven.then(|| self.buffers.whole());
                        let by = Provision { name, dtype: self.dtype, uneven };
                        self.device.call_provider(self.transport, token, by, call)
                    }
                    None => self.device.call(self.transport, token, envelope, me, call),
                }
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        match &mut self.independent {
            None => self.device.poll(self.transport, done),
            Some(messages) => {
                messages.poll(self.device, self.transport)?;
                messages.take_others(done);
                Ok(())
            }
        }
    }

    fn front(&mut self, segments: usize) {
        if let Some((front, layout)) = &self.front {
            front.advance(layout.front_bytes(segments));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_cut_at_different_places_are_walked_in_step() {
        let piece = |offset, len| Piece { buffer: Buffer::Input, offset, len };
        let mut seen = Vec::new();
        walk(&[&[piece(0, 3), piece(10, 5)], &[piece(100, 8)]], |parts| {
            seen.push((parts[0].offset, parts[1].offset, parts[0].len));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(0, 100, 3), (10, 103, 5)]);
    }
}
