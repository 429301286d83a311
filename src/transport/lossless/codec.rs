//! One frame's bytes, coded without loss: planes of equal bytes of elements, and of those planes that gain, Huffman's code.
//!
//! Signs and exponents of floats are few and unequally frequent; their mantissas are noise. Apart, the first take 2 to 3 bits a byte,
//! and the second are left as they are. The coder is zstd's, with its search for repetitions turned off: what it finds in exponents
//! costs more time than it saves bytes.
//!
//! ```text
//! 0       1        4          12                       12 + 4W
//! log2 W  0 0 0    checksum   length of each plane     planes          tail
//! ```
//!
//! `W` planes of `n / W` bytes, each as long as it says: shorter ones are coded. The tail has what is left of `n` after the last whole element.
//! Numbers are little-endian. The checksum is XXH3 (64 bits) of the original bytes, so that no damage is taken for data.
#![forbid(unsafe_code)]

use super::planes::{join, split};
use crate::memory::Bytes;
use xxhash_rust::xxh3::xxh3_64;
use zstd_safe::{CCtx, CParameter, DCtx, ParamSwitch, Strategy};

/// Bytes of a message in one coded frame at most.
pub const FRAME: usize = 64 << 10;
/// Bytes before the lengths of planes.
const HEAD: usize = 12;
/// An element has at most so many bytes.
const WIDEST: usize = 8;
/// Bytes of a coded frame at most.
pub const MAX_CODED: usize = HEAD + 4 * WIDEST + FRAME;
/// Bytes of a frame that are looked at before it is coded, in `SAMPLES` runs.
const SAMPLE: usize = 8 << 10;
const SAMPLES: usize = 4;
/// A plane of more bits a byte stays as it is.
const MOST_BITS: f32 = 7.5;
/// More planes have to gain so much.
const WORTH: f32 = 0.99;
/// What Huffman's code takes above the entropy, about.
const ABOVE: f32 = 0.04;

/// How a frame is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneForm {
    /// Bytes of an element: 1, 2, 4 or 8.
    pub width: u8,
    /// The planes that are coded, as bits.
    pub coded: u8,
}

/// Coder and decoder with their memory, for all peers of a rank: half a megabyte.
pub struct Codec {
    coder: CCtx<'static>,
    decoder: DCtx<'static>,
    original: Vec<u8>,
    planes: Vec<u8>,
    coded: Vec<u8>,
    /// How often each byte is in the sample, for each place modulo 8.
    counts: Vec<[u16; 256]>,
    /// `n * log2(n)`.
    weights: Vec<f32>,
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Codec").finish_non_exhaustive()
    }
}

/// Huffman's code and nothing else: no step of the search is as short as a frame.
fn huffman_only(coder: &mut CCtx<'_>) -> Option<()> {
    let set = [
        CParameter::Strategy(Strategy::ZSTD_fast),
        CParameter::TargetLength(128 << 10),
        CParameter::MinMatch(7),
        CParameter::HashLog(6),
        CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        CParameter::ContentSizeFlag(true),
    ];
    set.into_iter().try_for_each(|parameter| coder.set_parameter(parameter).map(|_| ()).ok())
}

impl Codec {
    /// A codec; `None` where there is no memory for it.
    pub fn new() -> Option<Codec> {
        let mut coder = CCtx::try_create()?;
        huffman_only(&mut coder)?;
        let weight = |n: usize| if n > 0 { n as f32 * (n as f32).log2() } else { 0.0 };
        Some(Codec {
            coder,
            decoder: DCtx::try_create()?,
            original: vec![0; FRAME],
            planes: vec![0; FRAME],
            coded: vec![0; MAX_CODED],
            counts: vec![[0; 256]; WIDEST],
            weights: (0..=SAMPLE).map(weight).collect(),
        })
    }

    /// The place for the bytes that are coded next.
    pub fn original(&mut self, len: usize) -> &mut [u8] {
        &mut self.original[..len]
    }

    fn count(&mut self, len: usize) {
        self.counts.iter_mut().for_each(|counts| counts.fill(0));
        let run = (SAMPLE / SAMPLES).min(len / SAMPLES) / WIDEST * WIDEST;
        let apart = len / SAMPLES / WIDEST * WIDEST;
        for sample in 0..SAMPLES {
            for element in self.original[sample * apart..][..run].chunks_exact(WIDEST) {
                for (counts, &byte) in self.counts.iter_mut().zip(element) {
                    counts[usize::from(byte)] += 1;
                }
            }
        }
    }

    /// Bits that a byte of a plane takes, by the sample.
    fn bits(&self, width: usize, plane: usize) -> f32 {
        let (mut total, mut kinds, mut weight) = (0, 0, 0.0);
        for byte in 0..256 {
            let count: u16 = self.counts[plane..].iter().step_by(width).map(|counts| counts[byte]).sum();
            total += usize::from(count);
            kinds += u32::from(count > 0);
            weight += self.weights[usize::from(count)];
        }
        if kinds < 2 {
            return 0.0;
        }
        // A sample has fewer kinds of bytes than there are, by which it looks more even than it is (Miller and Madow).
        let missed = (kinds - 1) as f32 / (2.0 * std::f32::consts::LN_2);
        (ABOVE + (self.weights[total] - weight + missed) / total as f32).max(1.0)
    }

    /// How the original bytes are coded best, by a sample of them; `None` where they do not shrink.
    pub fn choose(&mut self, len: usize) -> Option<PlaneForm> {
        self.count(len);
        let (mut best, mut least) = (None, 0.95 * 8.0);
        for width in [1usize, 2, 4, 8] {
            let bits = |plane| Some(self.bits(width, plane)).filter(|&bits| bits < MOST_BITS);
            let coded = (0..width).filter(|&plane| bits(plane).is_some()).fold(0, |coded, plane| coded | 1 << plane);
            let each = (0..width).map(|plane| bits(plane).unwrap_or(8.0)).sum::<f32>() / width as f32;
            if each < least {
                (best, least) = (Some(PlaneForm { width: width as u8, coded }), each * WORTH);
            }
        }
        best
    }

    /// Codes the first `len` original bytes into `out`, which has room for [`MAX_CODED`]; how many bytes that makes, `None` where they do not shrink.
    pub fn encode(&mut self, len: usize, form: PlaneForm, out: &mut [u8]) -> Option<usize> {
        let Codec { coder, original, planes, .. } = self;
        let (original, width) = (&original[..len], usize::from(form.width));
        let each = len / width;
        split(width, original, planes);
        out[..4].copy_from_slice(&[form.width.trailing_zeros() as u8, 0, 0, 0]);
        out[4..HEAD].copy_from_slice(&xxh3_64(original).to_le_bytes());
        let mut at = HEAD + 4 * width;
        for (number, plane) in planes[..each * width].chunks_exact(each.max(1)).enumerate() {
            let place = &mut out[at..];
            let shrunk =
                (form.coded >> number & 1 == 1).then(|| coder.compress2(&mut place[..each], plane).ok()).flatten();
            let took = shrunk.filter(|&took| took < each).unwrap_or_else(|| {
                place[..each].copy_from_slice(plane);
                each
            });
            out[HEAD + 4 * number..][..4].copy_from_slice(&(took as u32).to_le_bytes());
            at += took;
        }
        let tail = &original[each * width..];
        out[at..at + tail.len()].copy_from_slice(tail);
        Some(at + tail.len()).filter(|&took| took < len)
    }

    /// The `len` bytes that a coded frame stands for. The error says what is wrong with it.
    pub fn decode(&mut self, body: Bytes<'_>, len: usize) -> Result<&[u8], &'static str> {
        if len == 0 || len > FRAME || body.len() > MAX_CODED {
            return Err("a coded frame that is too long");
        }
        let Codec { decoder, original, planes, coded, .. } = self;
        let (coded, original) = (&mut coded[..body.len()], &mut original[..len]);
        body.read(coded);
        let (&[log, 0, 0, 0], rest) = coded.split_first_chunk().ok_or("a coded frame without a head")? else {
            return Err("a coded frame of no known form");
        };
        let (checksum, rest) = rest.split_first_chunk().ok_or("a coded frame without a head")?;
        let width = if log < 4 { 1 << log } else { return Err("a coded frame of no known form") };
        let each = len / width;
        let (lengths, mut rest) = rest.split_at_checked(4 * width).ok_or("a coded frame without a head")?;
        let mut parts: [&[u8]; WIDEST] = [&[]; WIDEST];
        let mut places = planes.chunks_exact_mut(each.max(1));
        for (part, length) in parts.iter_mut().zip(lengths.chunks_exact(4)) {
            let length = u32::from_le_bytes(std::array::from_fn(|at| length[at])) as usize;
            let (plane, others) = rest
                .split_at_checked(length)
                .filter(|_| length <= each)
                .ok_or("a coded frame whose planes are longer than it")?;
            rest = others;
            *part = plane;
            if length < each {
                let place = places.next().ok_or("a coded frame of no known form")?;
                if decoder.decompress(place, plane) != Ok(each) {
                    return Err("a coded frame that cannot be decoded");
                }
                *part = place;
            }
        }
        if rest.len() != len - each * width {
            return Err("a coded frame of another length than it says");
        }
        join(&parts[..width], &mut original[..each * width]);
        original[each * width..].copy_from_slice(rest);
        match xxh3_64(original).to_le_bytes() == *checksum {
            true => Ok(original),
            false => Err("a coded frame whose bytes are damaged"),
        }
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
