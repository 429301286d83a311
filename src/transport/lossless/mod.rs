//! Messages between nodes in fewer bytes, without loss, below plans and without their knowledge.
//!
//! A sender codes frames of long messages where that pays, by its link ([`gauge`]) and by how long calls take ([`contest`]); a frame
//! says itself that it is coded ([`codec`]), so each side decides alone, frame by frame, and every receiver reads both.
#![forbid(unsafe_code)]

pub mod codec;
pub mod contest;
pub mod gauge;
mod planes;

use super::matching::Outgoing;
use super::target::Pieces;
use super::CollectiveKind;
use crate::config::{Config, LosslessSetting};
use crate::memory::Bytes;
use codec::{Codec, FRAME, MAX_CODED};
use contest::{Contest, ContestVerdict};
use gauge::Gauge;
use std::time::Instant;

/// Shorter parts of messages are not worth a code of their own.
const LEAST_FRAME: usize = 4 << 10;
/// What coding or decoding a byte takes, about, until it is known.
const COST_NS: f64 = 1.0;

/// A part of a message that has been coded.
#[derive(Debug, Clone, Copy)]
pub struct CodedPart {
    /// Where in the message it begins.
    pub offset: usize,
    /// Its bytes.
    pub len: usize,
    /// Bytes of its frame.
    pub coded: usize,
}

/// What a rank codes with, for all its peers.
#[derive(Debug)]
pub struct Lossless {
    setting: LosslessSetting,
    /// Shorter messages go as they are.
    least: usize,
    codec: Option<Box<Codec>>,
    /// Peers to which long messages are under way.
    pub sharers: usize,
    coding_ns: f64,
    decoding_ns: f64,
    /// Bytes that were coded, and what they became.
    original: u64,
    coded: u64,
    /// Bytes that came coded.
    decoded: u64,
    contest: Contest,
    /// When the call that runs began, and the bytes that had been coded or decoded then.
    running: Option<(Instant, u64)>,
}

/// Takes in what coding some bytes took, by the clock: a rank that has to wait for a processor meanwhile pays for that, too.
fn note_cost(cost: &mut f64, began: Instant, bytes: usize) {
    *cost += (began.elapsed().as_nanos() as f64 / bytes as f64 - *cost) / 32.0;
}

/// Copies bytes of a message from where it lies.
fn gather(src: &Pieces, offset: usize, place: &mut [u8]) {
    let mut done = 0;
    while done < place.len() {
        let run = src.run(offset + done, place.len() - done);
        run.read(&mut place[done..done + run.len()]);
        done += run.len();
    }
}

impl Lossless {
    /// As the settings say.
    pub fn new(config: &Config) -> Lossless {
        Lossless {
            setting: config.lossless,
            least: config.lossless_min_bytes.max(LEAST_FRAME),
            codec: None,
            sharers: 1,
            coding_ns: COST_NS,
            decoding_ns: COST_NS,
            original: 0,
            coded: 0,
            decoded: 0,
            contest: Contest::default(),
            running: None,
        }
    }

    /// A collective begins, which all ranks call, of a kind and with so many bytes that this rank knows of.
    pub fn call_begins(&mut self, call: &dyn Fn() -> (CollectiveKind, usize)) {
        if self.measures() {
            let (kind, bytes) = call();
            self.contest.begin(kind, bytes);
            self.running = Some((Instant::now(), self.original + self.decoded));
        }
    }

    /// It has ended; what comes before the next one is no collective.
    pub fn call_ends(&mut self) {
        let Some((began, before)) = self.running.take() else { return };
        let verdict = self.contest.end(began.elapsed(), self.original + self.decoded > before);
        if let Some(ContestVerdict { kind, coded, gain }) = verdict {
            let goes = if coded { "are coded from now on" } else { "go as they are for a while" };
            crate::info!("messages of {kind} {goes}: coding without loss made calls {gain:.2} times as fast");
        }
    }

    /// Whether this rank codes at all.
    pub fn is_on(&self) -> bool {
        self.setting != LosslessSetting::Off
    }

    /// Whether the speed of links decides.
    pub fn measures(&self) -> bool {
        self.setting == LosslessSetting::Zstd
    }

    /// Nanoseconds for a byte, on both sides.
    pub fn cost_ns(&self) -> f64 {
        self.coding_ns + self.decoding_ns
    }

    /// Nothing is coded for a while: what it took counts for less and less, so that it is tried again.
    pub fn forget_cost(&mut self) {
        self.coding_ns += (COST_NS - self.coding_ns) / 8.0;
        self.decoding_ns += (COST_NS - self.decoding_ns) / 8.0;
    }

    /// Bytes that were coded, and bytes that they became.
    pub fn totals(&self) -> (u64, u64) {
        (self.original, self.coded)
    }

    fn codec(&mut self) -> Option<&mut Codec> {
        if self.codec.is_none() {
            self.codec = Codec::new().map(Box::new);
        }
        self.codec.as_deref_mut()
    }

    /// Codes the next part of a message into `out`; `None` where it goes as it is.
    pub fn code(&mut self, gauge: &mut Gauge, id: u64, message: &Outgoing, out: &mut Vec<u8>) -> Option<CodedPart> {
        let goes = match self.setting {
            LosslessSetting::Off => false,
            LosslessSetting::Zstd => gauge.is_slow() && self.contest.may_code(),
            LosslessSetting::Always => true,
        };
        let bytes = message.src.bytes();
        if !goes || bytes < self.least {
            return None;
        }
        let wants_sample = gauge.wants_sample(id, bytes);
        if gauge.form().is_none() && !wants_sample {
            return None;
        }
        let (offset, len) = message.next_part(FRAME).filter(|&(_, len)| len >= LEAST_FRAME)?;
        let codec = self.codec()?;
        let began = Instant::now();
        gather(&message.src, offset, codec.original(len));
        if wants_sample {
            gauge.sampled(id, codec.choose(len));
        }
        let form = gauge.form()?;
        // Of a connection's own, once.
        out.resize(MAX_CODED, 0);
        let coded = codec.encode(len, form, out);
        note_cost(&mut self.coding_ns, began, len);
        gauge.coded(len, coded);
        let coded = coded?;
        self.original += len as u64;
        self.coded += coded as u64;
        Some(CodedPart { offset, len, coded })
    }

    /// The `len` bytes that a coded frame stands for. The error says what is wrong with it.
    pub fn decode(&mut self, body: Bytes<'_>, len: usize) -> Result<&[u8], &'static str> {
        self.codec();
        let Lossless { codec, decoding_ns, decoded, .. } = self;
        let codec = codec.as_deref_mut().ok_or("a coded frame, and there is no memory to decode it")?;
        let began = Instant::now();
        let original = codec.decode(body, len)?;
        note_cost(decoding_ns, began, len.max(1));
        *decoded += len as u64;
        Ok(original)
    }
}
