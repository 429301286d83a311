//! The ring of one ordered pair: a byte queue of records, written by one rank and read by another.
//!
//! Positions count bytes ever written or consumed. A record is contiguous: where it would cross the end of the ring, a
//! `Skip` fills the rest. A record comes with its flag in one cache line, with up to 8 bytes of its body: the last word of a header
//! is one more than the header's position. The sender clears the next header's word before it publishes a record, for which
//! it needs one free line more, so that nothing older is taken for a header. The receiver frees by storing its position.
//!
//! A sender that finds no room says so (`hungry`) and looks once more; a receiver that makes room looks afterwards whether the
//! sender has said so. Both need a fence between the two. The receiver's may be left out where less than [`unseen`] bytes have
//! been freed since the last one. A sender that has seen what was freed by then cannot be hungry with an empty ring, since it
//! needs less room than it knows of; one that has not was hungry before that fence, and has been found. With records in the
//! ring it can be, and may be told only when the receiver takes another.
use super::record::{RecordHeader, RecordKind, HEADER, INLINE, INLINE_AT, NO_SLOT, WORDS};
use super::segment::{Control, Segment};
use super::wakeup::Publisher;
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
    publisher: Publisher,
}

/// The receiver's end.
#[derive(Debug)]
pub struct Consumer {
    from: usize,
    to: usize,
    ring: Region,
    head: u64,
    /// Where it was at the last fence before a look for hunger.
    looked: u64,
}

const NOTHING: Envelope = Envelope { channel: 0, sequence: 0, signature: 0 };

/// The word of a header that is its flag.
const FLAG: usize = HEADER / 8 - 1;
/// What a long message is cut into, where the ring has room for it.
const CHUNK: usize = 16 << 10;

/// Of a ring of so many bytes, those that the receiver may free without a fence.
fn unseen(ring: usize) -> u64 {
    ring as u64 / 8
}

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

/// The header at a place, as words.
#[inline]
fn header_at(ring: &Region, at: usize) -> *mut u64 {
    let place = ring.part(at, HEADER).as_ptr().cast::<u64>();
    assert!(place.is_aligned());
    place
}

/// The flag of the header at a place.
#[inline]
fn flag(ring: &Region, at: usize) -> &AtomicU64 {
    // SAFETY: the place must hold a u64 and be written only through atomics while others look at it; because it lies inside the
    // ring, is aligned, and is a body's only before the sender clears it, which the receiver does not look at.
    unsafe { &*header_at(ring, at).wrapping_add(FLAG).cast() }
}

/// Where in a ring, whose length is a power of two, a position is.
#[inline]
fn place(ring: &Region, position: u64) -> usize {
    position as usize & (ring.len() - 1)
}

impl Producer {
    /// The end of `from`, which sends to `to`.
    pub fn new(segment: &Segment, from: usize, to: usize, publisher: Publisher) -> Producer {
        // SAFETY: the segment must outlive every use; because each that reads or writes takes it as an argument.
        let ring = unsafe { segment.ring(from, to).unbound() };
        assert!(ring.len().is_power_of_two());
        Producer { from, to, ring, tail: 0, head: 0, starved: false, publisher }
    }

    /// The largest body that always finds room once the ring is empty.
    pub fn max_body(&self) -> usize {
        // With what is skipped at the ring's end and the line more: less than the ring without what may be free unseen.
        self.ring.len() * 3 / 8 - HEADER
    }

    /// Bytes of a long message that go through the ring at a time.
    pub fn chunk_bytes(&self) -> usize {
        CHUNK.min(self.max_body())
    }

    fn control<'a>(&self, segment: &'a Segment) -> &'a Control {
        segment.control(self.from, self.to)
    }

    fn fits(&self, needed: usize) -> bool {
        self.tail + needed as u64 - self.head <= self.ring.len() as u64
    }

    /// Finds room for a record with this body: `None`, and the receiver will wake us when it has made some, or where
    /// the record begins.
    ///
    /// The body is at most [`max_body`](Producer::max_body) long.
    #[inline]
    pub fn reserve(&mut self, segment: &Segment, body: usize) -> Option<usize> {
        debug_assert!(body <= self.max_body());
        let len = record_len(body);
        let at = place(&self.ring, self.tail);
        let rest = self.ring.len() - at;
        let needed = HEADER + if rest < len { rest + len } else { len };
        self.starved = !self.fits(needed) && !self.finds_room(segment, needed);
        match (self.starved, rest >= len) {
            (true, _) => None,
            (false, true) => Some(at),
            (false, false) => Some(self.skip(at, rest)),
        }
    }

    /// Whether the receiver has made room by now; else it is told that we want it.
    #[cold]
    fn finds_room(&mut self, segment: &Segment, needed: usize) -> bool {
        let control = self.control(segment);
        self.head = control.head.0.load(Ordering::Acquire);
        if !self.fits(needed) {
            // Sequentially consistent on both sides: either we see the space that the receiver has made, or the
            // receiver, which looks at `hungry` after making it, sees that we want it.
            control.hungry.0.store(1, Ordering::SeqCst);
            self.head = control.head.0.load(Ordering::SeqCst);
            if !self.fits(needed) {
                return false;
            }
            control.hungry.0.store(0, Ordering::Relaxed);
        }
        true
    }

    /// Fills the rest of the ring; where the next record begins.
    #[cold]
    fn skip(&mut self, at: usize, rest: usize) -> usize {
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
        0
    }

    /// The place of the body of the record that begins at `at`.
    pub fn body(&self, at: usize, len: usize) -> Region {
        self.ring.part(body_at(at, len), len)
    }

    /// Completes the record reserved at `at`, whose body is in place, and shows it to the receiver.
    #[inline]
    pub fn publish(&mut self, at: usize, mut header: RecordHeader) {
        header.len = record_len(header.body as usize);
        self.show(at, &header);
    }

    /// Writes a header before its flag, once the next one's is clear.
    #[inline]
    fn show(&mut self, at: usize, header: &RecordHeader) {
        flag(&self.ring, place(&self.ring, (at + header.len) as u64)).store(0, Ordering::Relaxed);
        // SAFETY: nobody may look at the words; because the receiver does once it has seen the flag, which comes next.
        unsafe { header_at(&self.ring, at).cast::<[u64; WORDS]>().write(header.encode()) };
        self.publisher.store(flag(&self.ring, at), self.tail + 1);
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
        assert!(ring.len().is_power_of_two());
        Consumer { from, to, ring, head: 0, looked: 0 }
    }

    /// Whether a record waits.
    #[inline]
    pub fn has_record(&self) -> bool {
        flag(&self.ring, place(&self.ring, self.head)).load(Ordering::Acquire) == self.head + 1
    }

    /// The next record and its body.
    #[inline]
    pub fn next(&mut self, segment: &Segment) -> Result<Option<(RecordHeader, Region)>> {
        while self.has_record() {
            let at = place(&self.ring, self.head);
            // SAFETY: nobody may write the words; because the sender has shown them by the flag, and has not got the place back.
            let words = unsafe { header_at(&self.ring, at).cast::<[u64; WORDS]>().read() };
            let header = RecordHeader::decode(words)?;
            if header.kind != RecordKind::Skip {
                let body = header.body as usize;
                return Ok(Some((header, self.ring.part(body_at(at, body), body))));
            }
            self.advance(segment, &header);
        }
        Ok(None)
    }

    /// Gives the space of a record back.
    #[inline]
    pub fn advance(&mut self, segment: &Segment, header: &RecordHeader) {
        self.head += header.len as u64;
        segment.control(self.from, self.to).head.0.store(self.head, Ordering::Release);
    }

    /// Whether the sender waits for the space that a record has given back.
    #[inline]
    pub fn take_hunger(&mut self, segment: &Segment) -> bool {
        if self.head - self.looked >= unseen(self.ring.len()) {
            return self.look_for_hunger(segment);
        }
        let hungry = &segment.control(self.from, self.to).hungry.0;
        hungry.load(Ordering::Relaxed) != 0 && hungry.swap(0, Ordering::SeqCst) != 0
    }

    /// The same, asked once after some records, and certain.
    pub fn look_for_hunger(&mut self, segment: &Segment) -> bool {
        self.looked = self.head;
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

    /// Under Miri, which finds races and invalid references, eight long ones are enough to fill the ring.
    const RECORDS: u64 = if cfg!(miri) { 40 } else { 20_000 };

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
        let most = Producer::new(&segment, 0, 1, Publisher::WHOLE).max_body();
        let sender = segment.clone();
        let waits = Arc::new(AtomicU64::new(0));
        let counted = waits.clone();
        let send = std::thread::spawn(move || {
            let mut producer = Producer::new(&sender, 0, 1, Publisher::WHOLE);
            for number in 0..RECORDS {
                let body = body_len(number, most);
                let at = loop {
                    match producer.reserve(&sender, body) {
                        Some(at) => break at,
                        None => {
                            counted.fetch_add(1, Ordering::Relaxed);
                            while !producer.take_relief(&sender) {
                                pause(end);
                            }
                        }
                    }
                };
                producer.body(at, body).write(&vec![number as u8; body]);
                producer.publish(at, header(number, body));
            }
        });
        let mut consumer = Consumer::new(&segment, 0, 1);
        // Not before the ring has been full.
        while waits.load(Ordering::Relaxed) == 0 {
            pause(end);
        }
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
        send.join().unwrap();
        assert!(!consumer.has_record());
    }

    /// A sender sleeps until the receiver says that it is hungry, as ranks do; it must never sleep beside free room for long.
    #[test]
    fn a_sender_that_waits_for_room_is_woken() {
        let segment = Arc::new(Segment::of_heap(2));
        let most = Producer::new(&segment, 0, 1, Publisher::WHOLE).max_body();
        let sender = segment.clone();
        let wake = Arc::new((std::sync::Mutex::new(false), std::sync::Condvar::new()));
        let woken = wake.clone();
        let sleeps = Arc::new(AtomicU64::new(0));
        let counted = sleeps.clone();
        let send = std::thread::spawn(move || {
            let mut producer = Producer::new(&sender, 0, 1, Publisher::WHOLE);
            for number in 0..RECORDS {
                let body = body_len(number, most);
                let at = loop {
                    if let Some(at) = producer.reserve(&sender, body) {
                        break at;
                    }
                    counted.fetch_add(1, Ordering::Relaxed);
                    let limit = Duration::from_secs(20);
                    let held = woken.0.lock().unwrap();
                    let (mut held, waited) = woken.1.wait_timeout_while(held, limit, |woken| !*woken).unwrap();
                    assert!(!waited.timed_out(), "nobody has told record {number} that there is room");
                    *held = false;
                };
                producer.publish(at, header(number, body));
            }
        });
        let mut consumer = Consumer::new(&segment, 0, 1);
        let end = Instant::now() + Duration::from_secs(300);
        // Not before the ring has been full.
        while sleeps.load(Ordering::Relaxed) == 0 {
            pause(end);
        }
        for _ in 0..RECORDS {
            let (found, _) = loop {
                match consumer.next(&segment).unwrap() {
                    Some(record) => break record,
                    None => pause(end),
                }
            };
            consumer.advance(&segment, &found);
            if consumer.take_hunger(&segment) {
                *wake.0.lock().unwrap() = true;
                wake.1.notify_one();
            }
        }
        send.join().unwrap();
    }

    /// On the smallest ring, wherever it stands.
    #[test]
    fn the_longest_body_finds_room_wherever_an_empty_ring_begins() {
        let segment = Segment::of_heap(if cfg!(miri) { 2 } else { 65 });
        let (mut producer, mut consumer) =
            (Producer::new(&segment, 0, 1, Publisher::WHOLE), Consumer::new(&segment, 0, 1));
        let (most, chunk) = (producer.max_body(), producer.chunk_bytes());
        for step in 0..if cfg!(miri) { 8 } else { 2 * producer.ring.len() / HEADER } {
            for body in [chunk, most, 0] {
                let at =
                    producer.reserve(&segment, body).unwrap_or_else(|| panic!("no room for {body} in step {step}"));
                producer.publish(at, header(0, body));
                let (found, _) = consumer.next(&segment).unwrap().unwrap();
                consumer.advance(&segment, &found);
            }
        }
    }
}
