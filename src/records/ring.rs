//! A ring of records that many threads write without waiting for each other.
//!
//! A record has a number, counted from 0, and lies in the slot of that number modulo the size; the newest records overwrite
//! the oldest. A slot's stamp says whose record it has and whether somebody is writing it. Whoever finds a slot being written
//! gives up at once, and what it had to say is counted as lost: that takes a thread that sleeps in the middle of a record
//! while the others come round the whole ring.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Words of a record. With its stamp it fills two cache lines.
pub const WORDS: usize = 15;
/// The fewest records that a ring has.
const LEAST: usize = 64;
/// The most: 512 MB.
const MOST: usize = 1 << 22;
/// Bits of a stamp that count the changes of its record, twice each, modulo their number.
const CHANGES: u32 = 16;
/// How often a reader looks again at a record that is being written.
const READS: usize = 100;

#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    /// 0: empty; `stamp_of(number)`: that record; odd: it is being written. Every change adds 2, so that whoever reads while
    /// the record is changed does not find the stamp that it began with.
    stamp: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The ring.
#[derive(Debug)]
pub struct RecordRing {
    slots: Box<[Slot]>,
    next: AtomicU64,
    lost: AtomicU64,
}

/// The stamp of a record that has not been changed.
fn stamp_of(number: u64) -> u64 {
    (number + 1) << CHANGES
}

/// Whether a stamp says that its slot has this record, changed or not, written or being written.
fn is_of(stamp: u64, number: u64) -> bool {
    stamp >> CHANGES == number + 1
}

fn is_written(stamp: u64) -> bool {
    stamp % 2 == 1
}

impl RecordRing {
    /// A ring of so many records, or the next power of two. Its memory is touched now, so that no call has to.
    pub fn new(size: usize) -> RecordRing {
        let slot = |_| Slot { stamp: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        let slots = (0..size.clamp(LEAST, MOST).next_power_of_two()).map(slot).collect();
        RecordRing { slots, next: AtomicU64::new(0), lost: AtomicU64::new(0) }
    }

    /// How many records it keeps.
    pub fn size(&self) -> usize {
        self.slots.len()
    }

    /// How many records have been added, or lost as they were.
    pub fn added(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    /// How many were lost because a slot was being written.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    #[inline]
    fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize & (self.slots.len() - 1)]
    }

    /// Adds a record; its number, unless it is lost.
    #[inline]
    pub fn add(&self, words: &[u64; WORDS]) -> Option<u64> {
        let number = self.next.fetch_add(1, Ordering::AcqRel);
        let slot = self.slot(number);
        let (old, stamp) = (slot.stamp.load(Ordering::Relaxed), stamp_of(number));
        let is_free = !is_written(old) && old < stamp;
        if !is_free || !take(slot, old, stamp) {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        slot.words.iter().zip(words).for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
        slot.stamp.store(stamp, Ordering::Release);
        Some(number)
    }

    /// Changes a record, if it is still there.
    #[inline]
    pub fn change(&self, number: u64, change: impl FnOnce(&[AtomicU64; WORDS])) {
        let slot = self.slot(number);
        let stamp = slot.stamp.load(Ordering::Relaxed);
        if is_of(stamp, number) && !is_written(stamp) && take(slot, stamp, stamp) {
            change(&slot.words);
            let changes = (stamp + 2) % (1 << CHANGES);
            slot.stamp.store(stamp_of(number) + changes, Ordering::Release);
        }
    }

    /// The same for what several threads tell of one call: waits a moment where another one writes.
    pub fn change_soon(&self, number: u64, change: impl Fn(&[AtomicU64; WORDS])) {
        for _ in 0..READS {
            let has_changed = Cell::new(false);
            self.change(number, |words| {
                change(words);
                has_changed.set(true);
            });
            if has_changed.get() || !is_of(self.slot(number).stamp.load(Ordering::Relaxed), number) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// All records that are there, the oldest first.
    pub fn read(&self) -> Vec<(u64, [u64; WORDS])> {
        let end = self.added();
        (end.saturating_sub(self.slots.len() as u64)..end).filter_map(|number| self.one(number)).collect()
    }

    fn one(&self, number: u64) -> Option<(u64, [u64; WORDS])> {
        let slot = self.slot(number);
        for _ in 0..READS {
            let before = slot.stamp.load(Ordering::Acquire);
            if is_of(before, number) && !is_written(before) {
                let words = std::array::from_fn(|index| slot.words[index].load(Ordering::Relaxed));
                fence(Ordering::Acquire);
                if slot.stamp.load(Ordering::Relaxed) == before {
                    return Some((number, words));
                }
            } else if before >= stamp_of(number + 1) {
                return None;
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Has the caller alone write a slot, if its stamp is `old`. What is written afterwards no reader takes for a whole record.
#[inline]
fn take(slot: &Slot, old: u64, stamp: u64) -> bool {
    let taken = slot.stamp.compare_exchange(old, stamp + 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
    fence(Ordering::Release);
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(value: u64) -> [u64; WORDS] {
        [value; WORDS]
    }

    #[test]
    fn the_newest_records_stay_and_are_read_in_order() {
        let ring = RecordRing::new(1);
        assert_eq!(ring.size(), LEAST);
        let all = 3 * LEAST as u64 + 5;
        (0..all).for_each(|value| assert_eq!(ring.add(&words(value)), Some(value)));
        let kept: Vec<u64> = ring.read().iter().map(|(number, _)| *number).collect();
        assert_eq!(kept, (all - LEAST as u64..all).collect::<Vec<_>>());
        assert!(ring.read().iter().all(|(number, found)| *found == words(*number)));
        assert_eq!((ring.added(), ring.lost()), (all, 0));
    }

    #[test]
    fn a_record_that_has_been_overwritten_is_not_changed() {
        let ring = RecordRing::new(LEAST);
        (0..=LEAST as u64).for_each(|value| assert!(ring.add(&words(value)).is_some()));
        ring.change(0, |words| words[0].store(77, Ordering::Relaxed));
        assert_eq!(ring.read().len(), LEAST);
        assert!(ring.read().iter().all(|(number, found)| *found == words(*number)));
        ring.change(1, |words| words[0].store(77, Ordering::Relaxed));
        assert_eq!(ring.read()[0].1[0], 77);
    }

    #[test]
    fn no_two_changes_leave_the_same_stamp() {
        let ring = RecordRing::new(LEAST);
        ring.add(&words(0));
        let mut stamps = vec![ring.slot(0).stamp.load(Ordering::Relaxed)];
        for _ in 0..100 {
            ring.change(0, |_| ());
            let stamp = ring.slot(0).stamp.load(Ordering::Relaxed);
            assert!(is_of(stamp, 0) && !is_written(stamp) && !stamps.contains(&stamp));
            stamps.push(stamp);
        }
        (0..if cfg!(miri) { 100 } else { 1 << CHANGES }).for_each(|_| ring.change(0, |_| ()));
        assert_eq!(ring.read(), [(0, words(0))], "the count of changes does not run into the number");
    }

    #[test]
    fn what_finds_its_slot_being_written_is_lost_and_nobody_waits() {
        let ring = RecordRing::new(LEAST);
        ring.add(&words(0));
        ring.change(0, |_| {
            (1..LEAST as u64).for_each(|value| assert!(ring.add(&words(value)).is_some()));
            assert_eq!(ring.add(&words(9)), None);
            assert!(ring.read().iter().all(|(number, _)| *number > 0), "nobody reads what is being written");
        });
        assert_eq!((ring.added(), ring.lost()), (LEAST as u64 + 1, 1));
    }

    #[test]
    fn threads_never_tear_a_record() {
        let (calls, reads) = if cfg!(miri) { (200, 20) } else { (20_000, 2_000) };
        let ring = RecordRing::new(LEAST);
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let ring = &ring;
                scope.spawn(move || {
                    for call in 0..calls {
                        if let Some(number) = ring.add(&words(thread << 32 | call)) {
                            ring.change(number, |all| {
                                all.iter().for_each(|word| word.store(1 << 60 | thread, Ordering::Relaxed))
                            });
                        }
                    }
                });
            }
            for _ in 0..reads {
                for (_, found) in ring.read() {
                    assert_eq!(found, words(found[0]));
                }
            }
        });
        assert_eq!(ring.added(), 3 * calls);
        assert!(ring.read().len() as u64 + ring.lost() >= LEAST as u64);
    }
}
