//! Floats in codes, on the host: coded, decoded and folded, with what the code has left out kept for the next time.
//!
//! Elements go through float32 in strips of a few blocks, which stay in the first-level cache. A chunk's bits depend on its
//! elements alone.

use super::element::{Element, Small, F16};
use crate::code::{self, FloatCode, BLOCK};
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::memory::Bytes;

/// Elements of a strip: whole blocks, few enough for the stacks of small threads.
const STRIP: usize = 4 * BLOCK;

/// Elements as float32.
type Values = [f32; STRIP];

/// Where the results of a fold of coded chunks go.
#[derive(Debug, Clone, Copy)]
pub enum Folded<'a> {
    /// Coded again.
    Coded(Bytes<'a>),
    /// As elements of a type, in one or several stretches.
    Elements(DataType, &'a [Bytes<'a>]),
}

/// Elements of a type in several stretches, each of whole ones, taken one after another.
struct Stretches<'a> {
    dtype: DataType,
    left: &'a [Bytes<'a>],
    /// Bytes of the first that are done.
    done: usize,
}

impl<'a> Stretches<'a> {
    fn new(dtype: DataType, stretches: &'a [Bytes<'a>]) -> Stretches<'a> {
        Stretches { dtype, left: stretches, done: 0 }
    }

    /// Calls `visit` with the parts that have the next `n` elements, and the place of each among them.
    fn next(&mut self, n: usize, mut visit: impl FnMut(Bytes<'a>, usize)) {
        let size = self.dtype.size();
        let mut at = 0;
        while at < n {
            let Some((first, others)) = self.left.split_first() else { return };
            let bytes = (first.len() - self.done).min((n - at) * size);
            if bytes > 0 {
                visit(first.part(self.done, bytes), at);
            }
            at += bytes / size;
            self.done += bytes;
            if self.done == first.len() {
                (self.left, self.done) = (others, 0);
            }
        }
    }

    fn load(&mut self, n: usize, values: &mut Values) {
        let dtype = self.dtype;
        self.next(n, |part, at| match dtype {
            DataType::F32 => part.read(as_bytes(&mut values[at..at + part.len() / 4])),
            DataType::F64 => with_room::<{ 8 * STRIP }>(part.len(), |bytes| {
                part.read(bytes);
                let each = bytes.as_chunks().0.iter().zip(&mut values[at..]);
                each.for_each(|(bytes, value)| *value = f64::from_le_bytes(*bytes) as f32);
            }),
            DataType::F16 => with_room::<{ 2 * STRIP }>(part.len(), |bytes| {
                part.read(bytes);
                let each = bytes.as_chunks().0.iter().zip(&mut values[at..]);
                each.for_each(|(bytes, value)| *value = Small::<F16>::widen(u16::from_le_bytes(*bytes)));
            }),
            _ => with_room::<{ 2 * STRIP }>(part.len(), |bytes| {
                part.read(bytes);
                widen_bf16(bytes, &mut values[at..]);
            }),
        });
    }

    fn store(&mut self, n: usize, values: &mut Values) {
        let dtype = self.dtype;
        // As GPUs do: all NaNs are one.
        values.iter_mut().for_each(|value| *value = if value.is_nan() { f32::NAN } else { *value });
        self.next(n, |part, at| match dtype {
            DataType::F32 => part.write(as_bytes(&mut values[at..at + part.len() / 4])),
            DataType::F64 => with_room::<{ 8 * STRIP }>(part.len(), |bytes| {
                let each = bytes.as_chunks_mut().0.iter_mut().zip(&values[at..]);
                each.for_each(|(bytes, value)| *bytes = f64::from(*value).to_le_bytes());
                part.write(bytes);
            }),
            DataType::F16 => with_room::<{ 2 * STRIP }>(part.len(), |bytes| {
                let each = bytes.as_chunks_mut().0.iter_mut().zip(&values[at..]);
                each.for_each(|(bytes, value)| *bytes = Small::<F16>::narrow(*value).to_le_bytes());
                part.write(bytes);
            }),
            _ => with_room::<{ 2 * STRIP }>(part.len(), |bytes| {
                let each = bytes.as_chunks_mut().0.iter_mut().zip(&values[at..]);
                each.for_each(|(bytes, value)| *bytes = code::to_bf16(*value).to_le_bytes());
                part.write(bytes);
            }),
        });
    }
}

/// The bytes of float32, in the order of this processor, which is that of memory.
fn as_bytes(values: &mut [f32]) -> &mut [u8] {
    let len = size_of_val(values);
    // SAFETY: the bytes must be valid as bytes and as floats, whatever is written, and borrowed so long; because any bits are
    // either, a byte needs no alignment, and the slice is borrowed for the result's lifetime.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) }
}

/// Calls `act` with so many bytes of a buffer.
#[inline(always)]
fn with_room<const MOST: usize>(len: usize, act: impl FnOnce(&mut [u8])) {
    act(&mut [0; MOST][..len]);
}

fn widen_bf16(bytes: &[u8], values: &mut [f32]) {
    let each = bytes.as_chunks().0.iter().zip(values);
    each.for_each(|(bytes, value)| *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
}

/// A coded chunk of `n` elements.
#[derive(Clone, Copy)]
struct CodedChunk<'a> {
    code: FloatCode,
    bytes: Bytes<'a>,
    n: usize,
}

impl<'a> CodedChunk<'a> {
    fn new(code: FloatCode, bytes: Bytes<'a>) -> Result<CodedChunk<'a>> {
        let wrong = || Error::Internal(format!("{} bytes are no chunk in {}", bytes.len(), code.name()));
        Ok(CodedChunk { code, bytes, n: code.elements(bytes.len()).ok_or_else(wrong)? })
    }

    /// The places of the scales and of the elements `at..at + n`.
    fn parts(&self, at: usize, n: usize) -> (Bytes<'a>, Bytes<'a>) {
        let scales = self.n.div_ceil(BLOCK);
        (self.bytes.part(at / BLOCK, n.div_ceil(BLOCK)), self.bytes.part(scales + at, n))
    }

    /// Codes `n` elements to the place of those from `at` on; where that is `wanted`, `values` are what is read there then.
    fn encode(&self, at: usize, n: usize, values: &mut Values, wanted: bool) {
        if self.code == FloatCode::Bf16 {
            let mut coded = [0; 2 * STRIP];
            let each = coded.as_chunks_mut().0.iter_mut().zip(values.iter_mut());
            each.for_each(|(coded, value)| {
                let bits = code::to_bf16(*value);
                (*coded, *value) = (bits.to_le_bytes(), f32::from_bits(u32::from(bits) << 16));
            });
            return self.bytes.part(2 * at, 2 * n).write(&coded[..2 * n]);
        }
        // What follows the last element is 0, so that it decides no scale.
        values[n..].fill(0.0);
        let (mut scales, mut elements) = ([0; STRIP / BLOCK], [0; STRIP]);
        encode_strip(self.code, values, &mut scales, &mut elements);
        let (to_scales, to_elements) = self.parts(at, n);
        to_scales.write(&scales[..to_scales.len()]);
        to_elements.write(&elements[..n]);
        if wanted {
            decode_strip(self.code, &scales, &elements, values);
        }
    }

    /// Decodes `n` elements from `at` on.
    fn decode(&self, at: usize, n: usize, values: &mut Values) {
        if self.code == FloatCode::Bf16 {
            let mut coded = [0; 2 * STRIP];
            self.bytes.part(2 * at, 2 * n).read(&mut coded[..2 * n]);
            return widen_bf16(&coded, values);
        }
        let (mut scales, mut elements) = ([0; STRIP / BLOCK], [0; STRIP]);
        let (from_scales, from_elements) = self.parts(at, n);
        from_scales.read(&mut scales[..from_scales.len()]);
        from_elements.read(&mut elements[..n]);
        decode_strip(self.code, &scales, &elements, values);
    }
}

/// Has a function compiled for AVX2, too, and taken where the processor has it.
macro_rules! vectorised {
    ($name:ident, $wide:ident, $body:ident, ($($arg:ident: $type:ty),*)) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $wide($($arg: $type),*) {
            $body($($arg),*)
        }

        fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor must have AVX2; because it was asked.
                return unsafe { $wide($($arg),*) };
            }
            $body($($arg),*)
        }
    };
}

#[inline(always)]
fn encode_blocks(code: FloatCode, values: &Values, scales: &mut [u8; STRIP / BLOCK], elements: &mut [u8; STRIP]) {
    let blocks = values.as_chunks().0.iter().zip(elements.as_chunks_mut().0).zip(scales);
    match code {
        FloatCode::Mx8 => {
            blocks.for_each(|((block, coded), scale)| *scale = code::encode_block(FloatCode::Mx8, block, coded))
        }
        _ => blocks.for_each(|((block, coded), scale)| *scale = code::encode_block(FloatCode::Int8, block, coded)),
    }
}

#[inline(always)]
fn decode_blocks(code: FloatCode, scales: &[u8; STRIP / BLOCK], elements: &[u8; STRIP], values: &mut Values) {
    let blocks = elements.as_chunks().0.iter().zip(values.as_chunks_mut().0).zip(scales);
    match code {
        FloatCode::Mx8 => {
            blocks.for_each(|((coded, block), scale)| code::decode_block(FloatCode::Mx8, *scale, coded, block))
        }
        _ => blocks.for_each(|((coded, block), scale)| code::decode_block(FloatCode::Int8, *scale, coded, block)),
    }
}

#[inline(always)]
fn fold_values(operator: Operator, folded: &mut Values, values: &Values) {
    let pairs = folded.iter_mut().zip(values);
    // As in other reductions a number wins over a NaN.
    match operator {
        Operator::Prod => pairs.for_each(|(folded, value)| *folded *= value),
        Operator::Max => {
            pairs.for_each(|(folded, value)| *folded = if value > folded || folded.is_nan() { *value } else { *folded })
        }
        Operator::Min => {
            pairs.for_each(|(folded, value)| *folded = if value < folded || folded.is_nan() { *value } else { *folded })
        }
        _ => pairs.for_each(|(folded, value)| *folded += value),
    }
}

vectorised!(
    encode_strip,
    encode_strip_avx2,
    encode_blocks,
    (code: FloatCode, values: &Values, scales: &mut [u8; STRIP / BLOCK], elements: &mut [u8; STRIP])
);
vectorised!(
    decode_strip,
    decode_strip_avx2,
    decode_blocks,
    (code: FloatCode, scales: &[u8; STRIP / BLOCK], elements: &[u8; STRIP], values: &mut Values)
);
vectorised!(fold_strip, fold_strip_avx2, fold_values, (operator: Operator, folded: &mut Values, values: &Values));

/// Keeps what is left out of `values` where `coded` stand for them, beside what is kept already if it is `added`. What is not
/// finite is not kept.
fn keep(residual: Bytes<'_>, values: &Values, coded: &Values, added: bool) {
    let (n, stretches) = (residual.len() / 4, [residual]);
    let mut left = [0.0; STRIP];
    if added {
        Stretches::new(DataType::F32, &stretches).load(n, &mut left);
    }
    for ((left, value), coded) in left.iter_mut().zip(values).zip(coded) {
        let more = *left + (value - coded);
        *left = if more.is_finite() { more } else { 0.0 };
    }
    Stretches::new(DataType::F32, &stretches).store(n, &mut left);
}

/// Codes the elements of `src`, each of whose stretches has whole ones, as the chunk `dst`. Where there is a `residual`, a float32
/// for each, it is added to them first, and afterwards is what the code has left out.
///
/// # Errors
/// `Internal` where the sizes do not fit.
pub fn encode(
    code: FloatCode,
    dtype: DataType,
    src: &[Bytes<'_>],
    residual: Option<Bytes<'_>>,
    dst: Bytes<'_>,
) -> Result<()> {
    let chunk = CodedChunk::new(code, dst)?;
    check(dtype, src, chunk.n)?;
    let mut elements = Stretches::new(dtype, src);
    let (mut values, mut coded) = ([0.0; STRIP], [0.0; STRIP]);
    for at in (0..chunk.n).step_by(STRIP) {
        let n = STRIP.min(chunk.n - at);
        elements.load(n, &mut values);
        let Some(kept) = residual.map(|residual| residual.part(4 * at, 4 * n)) else {
            chunk.encode(at, n, &mut values, false);
            continue;
        };
        Stretches::new(DataType::F32, &[kept]).load(n, &mut coded);
        fold_strip(Operator::Sum, &mut values, &coded);
        coded = values;
        chunk.encode(at, n, &mut coded, true);
        keep(kept, &values, &coded, false);
    }
    Ok(())
}

/// Writes the elements for which the chunk `src` stands to `dst`.
///
/// # Errors
/// `Internal` where the sizes do not fit.
pub fn decode(code: FloatCode, dtype: DataType, src: Bytes<'_>, dst: &[Bytes<'_>]) -> Result<()> {
    let chunk = CodedChunk::new(code, src)?;
    check(dtype, dst, chunk.n)?;
    let mut elements = Stretches::new(dtype, dst);
    let mut values = [0.0; STRIP];
    for at in (0..chunk.n).step_by(STRIP) {
        let n = STRIP.min(chunk.n - at);
        chunk.decode(at, n, &mut values);
        elements.store(n, &mut values);
    }
    Ok(())
}

/// Folds coded chunks from the left, in float32. What is left out where the result is coded again is added to the `residual`.
///
/// # Errors
/// `Internal` where the sizes do not fit.
pub fn fold(
    code: FloatCode,
    operator: Operator,
    srcs: &[Bytes<'_>],
    residual: Option<Bytes<'_>>,
    dst: Folded<'_>,
) -> Result<()> {
    let chunks = srcs.iter().map(|src| CodedChunk::new(code, *src)).collect::<Result<Vec<_>>>()?;
    let n = chunks.first().map_or(0, |chunk| chunk.n);
    let coded_to = match dst {
        Folded::Coded(bytes) => Some(CodedChunk::new(code, bytes)?),
        Folded::Elements(dtype, stretches) => check(dtype, stretches, n).map(|()| None)?,
    };
    if chunks.iter().chain(&coded_to).any(|chunk| chunk.n != n) {
        return Err(Error::Internal("a fold of coded chunks that differ in size".to_string()));
    }
    let mut elements = match dst {
        Folded::Elements(dtype, stretches) => Stretches::new(dtype, stretches),
        Folded::Coded(_) => Stretches::new(DataType::F32, &[]),
    };
    let (mut folded, mut values) = ([0.0; STRIP], [0.0; STRIP]);
    for at in (0..n).step_by(STRIP) {
        let len = STRIP.min(n - at);
        for (index, chunk) in chunks.iter().enumerate() {
            chunk.decode(at, len, if index == 0 { &mut folded } else { &mut values });
            if index > 0 {
                fold_strip(operator, &mut folded, &values);
            }
        }
        let Some(to) = &coded_to else {
            elements.store(len, &mut folded);
            continue;
        };
        let Some(residual) = residual else {
            to.encode(at, len, &mut folded, false);
            continue;
        };
        values = folded;
        to.encode(at, len, &mut values, true);
        keep(residual.part(4 * at, 4 * len), &folded, &values, true);
    }
    Ok(())
}

/// An error unless the stretches have so many whole elements.
fn check(dtype: DataType, stretches: &[Bytes<'_>], n: usize) -> Result<()> {
    let whole = stretches.iter().all(|stretch| stretch.len().is_multiple_of(dtype.size()));
    let bytes: usize = stretches.iter().map(|stretch| stretch.len()).sum();
    match whole && bytes == n * dtype.size() {
        true => Ok(()),
        false => Err(Error::Internal(format!("{bytes} bytes of {} for a chunk of {n} elements", dtype.name()))),
    }
}
