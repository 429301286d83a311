//! The ring of one ordered pair: a byte queue of records, written by one rank and read by another.
//!
//! Positions count bytes ever written or consumed. A record is contiguous: where it would cross the end of the ring, a
//! `Skip` fills the rest. A record comes with its flag in one cache line, with up to 8 bytes of its body: the last word of a header
//! is one more than the header's position. The sender clears the next header's word before it publishes a record, for which
//! it needs one free line more, so that nothing older is taken for a header. The receiver frees by storing its position.
use super::record::{RecordHeader, RecordKind, HEADER, INLINE, INLINE_AT, NO_SLOT};
use super::segment::{Control, Segment};
use crate::error::Result;
use crate::memory::Region;
use crate::transport::Envelope;
use std::sync::atomic::{AtomicU64, Ordering};

/// The sender's end.
#[derive(Debug)]
pub struct Producer {
    from: usize,
    to: usize,
    ring: Region,
    tail: u64,
    head: u64,
    starved: bool,
}

/// The receiver's end.
#[derive(Debug)]
pub struct Consumer {
    from: usize,
    to: usize,
    ring: Region,
    head: u64,
}

const NOTHING: Envelope = Envelope { channel: 0, sequence: 0, signature: 0 };

/// Where in a header its flag is.
const FLAG: usize = HEADER - 8;

/// Bytes a record with this body takes in a ring.
pub fn record_len(body: usize) -> usize {
    match body {
        0..=INLINE => HEADER,
        _ => (HEADER + body).next_multiple_of(HEADER),
    }
}

/// The place of a body in a record at `at`.
fn body_at(at: usize, body: usize) -> usize {
    at + if body <= INLINE { INLINE_AT } else { HEADER }
}

/// The flag of the header at a place.
fn flag(ring: &Region, at: usize) -> &AtomicU64 {
    let place = ring.part(at + FLAG, 8);
    assert!(place.as_ptr().cast::<AtomicU64>().is_aligned());
    // SAFETY: the place must hold a u64 and be written only through atomics while others look at it; because it lies inside the
    // ring, is aligned, and is a body's only before the sender clears it, which the receiver does not look at.
    unsafe { &*place.as_ptr().cast::<AtomicU64>() }
}

impl Producer {
    /// The end of `from`, which sends to `to`.
    pub fn new(segment: &Segment, from: usize, to: usize) -> Producer {
        // SAFETY: the segment must outlive every use; because each that reads or writes takes it as an argument.
        let ring = unsafe { segment.ring(from, to).unbound() };
        Producer { from, to, ring, tail: 0, head: 0, starved: false }
    }

    /// The largest body that always finds room once the ring is empty.
    pub fn max_body(&self) -> usize {
        self.ring.len() / 2 - HEADER
    }

    fn control<'a>(&self, segment: &'a Segment) -> &'a Control {
        segment.control(self.from, self.to)
    }

    fn fits(&self, needed: usize) -> bool {
        self.tail + needed as u64 - self.head <= self.ring.len() as u64
    }

    /// Finds room for a record with this body: `None`, and the receiver will wake us when it has made some, or where
    /// the record begins.
    pub fn reserve(&mut self, segment: &Segment, body: usize) -> Option<usize> {
        let len = record_len(body);
        let at = self.tail as usize % self.ring.len();
        let rest = self.ring.len() - at;
        let needed = HEADER + if rest < len { rest + len } else { len };
        if !self.fits(needed) {
            let control = self.control(segment);
            self.head = control.head.0.load(Ordering::Acquire);
            if !self.fits(needed) {
                // Sequentially consistent on both sides: either we see the space that the receiver has made, or the
                // receiver, which looks at `hungry` after making it, sees that we want it.
                control.hungry.0.store(1, Ordering::SeqCst);
                self.head = control.head.0.load(Ordering::SeqCst);
                if !self.fits(needed) {
                    self.starved = true;
                    return None;
                }
                control.hungry.0.store(0, Ordering::Relaxed);
            }
        }
        self.starved = false;
        if rest >= len {
            return Some(at);
        }
        let skip = RecordHeader {
            kind: RecordKind::Skip,
            len: rest,
            envelope: NOTHING,
            bytes: 0,
            slot: NO_SLOT,
            pieces: 0,
            keys: 0,
            body: 0,
        };
        self.show(at, &skip);
        Some(0)
    }

    /// The place of the body of the record that begins at `at`.
    pub fn body(&self, at: usize, len: usize) -> Region {
        self.ring.part(body_at(at, len), len)
    }

    /// Completes the record reserved at `at`, whose body is in place, and shows it to the receiver.
    pub fn publish(&mut self, at: usize, mut header: RecordHeader) {
        header.len = record_len(header.body as usize);
        self.show(at, &header);
    }

    /// Writes a header before its flag, once the next one's is clear.
    fn show(&mut self, at: usize, header: &RecordHeader) {
        let next = (at + header.len) % self.ring.len();
        flag(&self.ring, next).store(0, Ordering::Relaxed);
        let room = if header.body as usize <= INLINE { INLINE_AT } else { FLAG };
        self.ring.part(at, room).write(&header.encode()[..room]);
        // Not a store: whoever is woken after it sees it before it sleeps (`Wakeups::ring`).
        flag(&self.ring, at).swap(self.tail + 1, Ordering::SeqCst);
        self.tail += header.len as u64;
    }

    /// Whether the receiver has made space since [`reserve`](Producer::reserve) found none; told once.
    pub fn take_relief(&mut self, segment: &Segment) -> bool {
        let relief = self.starved && self.control(segment).head.0.load(Ordering::SeqCst) != self.head;
        self.starved &= !relief;
        relief
    }
}

impl Consumer {
    /// The end of `to`, which receives from `from`.
    pub fn new(segment: &Segment, from: usize, to: usize) -> Consumer {
        // SAFETY: the segment must outlive every use; because each that reads or writes takes it as an argument.
        let ring = unsafe { segment.ring(from, to).unbound() };
        Consumer { from, to, ring, head: 0 }
    }

    /// Whether a record waits.
    pub fn has_record(&self) -> bool {
        flag(&self.ring, self.head as usize % self.ring.len()).load(Ordering::Acquire) == self.head + 1
    }

    /// The next record and its body.
    #[inline]
    pub fn next(&mut self, segment: &Segment) -> Result<Option<(RecordHeader, Region)>> {
        while self.has_record() {
            let at = self.head as usize % self.ring.len();
            let mut bytes = [0; HEADER];
            self.ring.part(at, HEADER).read(&mut bytes);
            let header = RecordHeader::decode(&bytes)?;
            if header.kind != RecordKind::Skip {
                let body = header.body as usize;
                return Ok(Some((header, self.ring.part(body_at(at, body), body))));
            }
            self.advance(segment, &header);
        }
        Ok(None)
    }

    /// Gives the space of a record back.
    pub fn advance(&mut self, segment: &Segment, header: &RecordHeader) {
        self.head += header.len as u64;
        segment.control(self.from, self.to).head.0.store(self.head, Ordering::Release);
    }

    /// Whether the sender waits for the space that has been given back; asked once after some records.
    pub fn take_hunger(&self, segment: &Segment) -> bool {
        let hungry = &segment.control(self.from, self.to).hungry.0;
        std::sync::atomic::fence(Ordering::SeqCst);
        hungry.load(Ordering::Relaxed) != 0 && hungry.swap(0, Ordering::SeqCst) != 0
    }
}

/// The largest message that is copied through a ring: several of them fit.
pub fn max_eager(segment: &Segment) -> usize {
    super::segment::ring_bytes(segment.ranks()) / 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// Under Miri, which finds races and invalid references, four long ones are enough to fill the ring.
    const RECORDS: u64 = if cfg!(miri) { 20 } else { 20_000 };

    /// Lengths by number: short ones, and such that a few of them fill the ring, so that its end is met and space runs out.
    fn body_len(number: u64, most: usize) -> usize {
        match number % 5 {
            0 => 0,
            1..=3 => (number * 37 % 200) as usize,
            _ => most - (number % 64) as usize,
        }
    }

    fn header(number: u64, body: usize) -> RecordHeader {
        let envelope = Envelope { channel: number as u16, sequence: number, signature: !number as u32 };
        let (len, slot) = (0, NO_SLOT);
        RecordHeader {
            kind: RecordKind::Eager,
            len,
            envelope,
            bytes: body,
            slot,
            pieces: 0,
            keys: 0,
            body: body as u32,
        }
    }

    /// Nobody waits for ever.
    fn pause(end: Instant) {
        assert!(Instant::now() < end, "the other side does nothing");
        std::thread::yield_now();
    }

    #[test]
    fn records_arrive_whole_and_in_order_on_another_thread() {
        let end = Instant::now() + Duration::from_secs(300);
        let segment = Arc::new(Segment::of_heap(2));
        let most = Producer::new(&segment, 0, 1).max_body();
        let sender = segment.clone();
        let send = std::thread::spawn(move || {
            let mut producer = Producer::new(&sender, 0, 1);
            let mut waits = 0u64;
            for number in 0..RECORDS {
                let body = body_len(number, most);
                let at = loop {
                    match producer.reserve(&sender, body) {
                        Some(at) => break at,
                        None => {
                            waits += 1;
                            while !producer.take_relief(&sender) {
                                pause(end);
                            }
                        }
                    }
                };
                producer.body(at, body).write(&vec![number as u8; body]);
                producer.publish(at, header(number, body));
            }
            waits
        });
        let mut consumer = Consumer::new(&segment, 0, 1);
        for number in 0..RECORDS {
            let (found, body) = loop {
                match consumer.next(&segment).unwrap() {
                    Some(record) => break record,
                    None => pause(end),
                }
            };
            let len = body_len(number, most);
            let mut bytes = vec![0; len];
            body.read(&mut bytes);
            let expected = RecordHeader { len: record_len(len), ..header(number, len) };
            assert_eq!(found, expected);
            assert!(bytes == vec![number as u8; len], "record {number}");
            consumer.advance(&segment, &found);
            consumer.take_hunger(&segment);
        }
        let waits = send.join().unwrap();
        assert!(waits > 0, "the ring was never full");
        assert!(!consumer.has_record());
    }
}
