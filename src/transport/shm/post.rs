//! What a rank posts on its board for a call, and how another rank takes it.
//!
//! ```text
//! face's line   call | signature, low bits of the sequence, bytes, form | up to 48 bytes of the part, or what follows
//!                                                                        | bytes | pieces, keys | area
//! ```
//! A part of up to 48 bytes comes with the flag that announces it, in one cache line. A longer one lies in the face's page
//! or in an area of the board; or it stays where it is and is *listed*, and the others read it there: mapped, in the memory
//! of the same process, or through the kernel.

use super::pull::{mapped, pieces_at, read_process, Mappings, Reach};
use super::record::Listing;
use super::segment::{area_bytes, Face, Segment, AREAS, LINE_BYTES, PAGE_BYTES};
use crate::error::{Error, Result};
use crate::memory::{Bytes, InPeer, PeerRegion, Region};
use crate::topo::Rank;
use crate::transport::target::Pieces;
use crate::transport::Envelope;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// Pieces handed to the kernel at a time.
const MAX_PIECES: usize = 64;

/// Where the bytes of a post are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// In the face's line.
    Line,
    /// In the face's page.
    Page,
    /// In an area.
    Area(usize),
    /// In the poster's memory, as the face's page lists.
    Listed,
    /// In the poster's memory, in one piece, at the address in the face's line.
    Lent,
}

impl Form {
    fn code(self) -> u64 {
        match self {
            Form::Line => 0,
            Form::Page => 1,
            Form::Listed => 2,
            Form::Lent => 3,
            Form::Area(area) => 4 + area as u64,
        }
    }

    fn from_code(code: u64) -> Option<Form> {
        Some(match code {
            0 => Form::Line,
            1 => Form::Page,
            2 => Form::Listed,
            3 => Form::Lent,
            area if (area as usize) < 4 + AREAS => Form::Area(area as usize - 4),
            _ => return None,
        })
    }

    /// The form of a part of so many bytes that is copied; none where that takes an area.
    pub fn short(bytes: usize) -> Option<Form> {
        match bytes {
            0..=LINE_BYTES => Some(Form::Line),
            _ if bytes <= PAGE_BYTES => Some(Form::Page),
            _ => None,
        }
    }
}

/// What a member has posted.
#[derive(Debug)]
pub enum Posting {
    /// In our address space, kept there by these mappings.
    Here {
        /// The bytes.
        pieces: Pieces,
        /// What keeps them.
        _mappings: Mappings,
        /// Whether they lie in the poster's own memory, which it may take back when it gives up.
        lent: bool,
    },
    /// In another process.
    There {
        /// The bytes.
        pieces: Pieces<InPeer>,
        /// The process.
        pid: u32,
    },
}

/// The check word of a post: what makes ranks find out that they call different things.
pub fn check_word(envelope: Envelope, bytes: usize, form: Form) -> u64 {
    let short = if form == Form::Line { bytes as u64 } else { 0 };
    u64::from(envelope.signature) << 32 | (envelope.sequence & 0xffff) << 16 | short << 8 | form.code()
}

/// The operation's number whose low bits these are, near ours.
fn near(ours: u64, low: u64) -> u64 {
    let apart = (low as u16).wrapping_sub(ours as u16) as i16;
    ours.wrapping_add_signed(apart.into())
}

/// Copies regions into `room`, one after the other.
pub fn gather<'a>(room: Bytes<'_>, regions: impl Iterator<Item = &'a Region>) {
    let mut done = 0;
    for region in regions {
        room.part(done, region.len()).copy_from(*region);
        done += region.len();
    }
}

fn put(line: &Bytes<'_>, at: usize, value: u64) {
    line.part(at, 8).write(&value.to_ne_bytes());
}

fn get(line: &Bytes<'_>, at: usize) -> u64 {
    let mut bytes = [0; 8];
    line.part(at, 8).read(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Fills a face and shows it as that of `call`.
pub fn write<'a>(
    segment: &Segment,
    (local, face): (usize, Face<'_>),
    (call, envelope): (u64, Envelope),
    (form, bytes): (Form, usize),
    regions: impl Iterator<Item = &'a Region>,
) {
    let room = match form {
        Form::Line => face.line,
        Form::Page => face.page(),
        Form::Area(area) => segment.area(local, area),
        Form::Listed | Form::Lent => Bytes::EMPTY,
    };
    if !room.is_empty() {
        gather(room, regions);
    }
    if form != Form::Line {
        put(&face.line, 0, bytes as u64);
    }
    face.cell.check.store(check_word(envelope, bytes, form), Ordering::Relaxed);
    // Not a store: nobody falls asleep in between (`Wakeups::ring_others`).
    face.cell.call.swap(call, Ordering::SeqCst);
}

/// Puts a listing on a face's page; [`write()`] then shows it. `body` is kept for its allocation.
pub fn list(face: &Face<'_>, listing: &Listing, body: &mut Vec<u8>) {
    listing.encode(body);
    face.page().part(0, body.len()).write(body);
    put(&face.line, 8, (listing.pieces.len() as u64) << 32 | listing.keys.len() as u64);
}

/// Puts the address of a part in one piece on a face's line; [`write()`] then shows it.
pub fn lend(face: &Face<'_>, part: Region) {
    put(&face.line, 8, part.address());
}

fn lent(reach: Reach, address: u64, bytes: usize) -> Posting {
    let listing = Listing { pieces: vec![(address, bytes as u64, None)], keys: Vec::new() };
    match reach {
        Reach::SameProcess => Posting::Here { pieces: pieces_at(&listing), _mappings: Mappings::new(), lent: true },
        Reach::Kernel { pid } | Reach::Ring { pid } => Posting::There { pieces: pieces_at(&listing), pid },
    }
}

/// Says in which area a part lies after all that was listed.
pub fn tell_copied(face: &Face<'_>, area: usize) {
    put(&face.line, 16, area as u64);
}

/// The part that was listed, where its poster has copied it; `None` if it says nonsense.
pub fn copied(segment: &Segment, member: usize, face: &Face<'_>, bytes: usize) -> Option<Posting> {
    let area = get(&face.line, 16) as usize;
    (area < AREAS && bytes <= area_bytes(segment.ranks())).then(|| here(segment.area(member, area).part(0, bytes)))
}

fn here(bytes: Bytes<'_>) -> Posting {
    // SAFETY: the segment must outlive every use; because posts are forgotten with the call, which the owner of the
    // segment runs.
    let bytes = unsafe { bytes.unbound() };
    Posting::Here { pieces: Pieces::new(&[bytes]), _mappings: Mappings::new(), lent: false }
}

/// Takes what a member has posted for a call, if it is what all members should.
pub fn take(
    segment: &Segment,
    (member, rank, reach): (usize, Rank, Reach),
    face: &Face<'_>,
    envelope: Envelope,
    expected: usize,
) -> Result<Posting> {
    let word = face.cell.check.load(Ordering::Relaxed);
    let nonsense = || Error::Internal(format!("rank {rank} posted {word:#x}, which is no form of a part"));
    let form = Form::from_code(word & 0xff).ok_or_else(nonsense)?;
    let bytes = if form == Form::Line { (word >> 8 & 0xff) as usize } else { get(&face.line, 0) as usize };
    let sequence = near(envelope.sequence, word >> 16 & 0xffff);
    let arrived = Envelope { sequence, signature: (word >> 32) as u32, ..envelope };
    envelope.check(rank, arrived, expected, bytes)?;
    let room = match form {
        Form::Line => face.line,
        Form::Page => face.page(),
        Form::Area(area) => segment.area(member, area),
        Form::Listed => return listed(face, (rank, reach), bytes),
        Form::Lent => return Ok(lent(reach, get(&face.line, 8), bytes)),
    };
    if bytes > room.len() {
        return Err(nonsense());
    }
    Ok(here(room.part(0, bytes)))
}

fn listed(face: &Face<'_>, (rank, reach): (Rank, Reach), bytes: usize) -> Result<Posting> {
    let counts = get(&face.line, 8);
    let (pieces, keys) = ((counts >> 32) as u32, counts as u32);
    let body = Listing::bytes(pieces, keys);
    if body > PAGE_BYTES {
        return Err(Error::Internal(format!("rank {rank} lists {pieces} pieces and {keys} allocations")));
    }
    let mut list = vec![0; body];
    face.page().part(0, body).read(&mut list);
    let listing = Listing::decode(rank, pieces, &list)?;
    let post = match (reach, mapped(&listing)) {
        (Reach::SameProcess, _) => {
            Some(Posting::Here { pieces: pieces_at(&listing), _mappings: Mappings::new(), lent: true })
        }
        (_, Some((pieces, mappings))) => Some(Posting::Here { pieces, _mappings: mappings, lent: true }),
        (Reach::Kernel { pid } | Reach::Ring { pid }, None) => {
            Some(Posting::There { pieces: pieces_at(&listing), pid })
        }
    };
    let cannot = || Error::System(format!("the memory that rank {rank} lists cannot be read"));
    post.filter(|post| post.bytes() == bytes).ok_or_else(cannot)
}

/// Why bytes of another process could not be read.
#[derive(Debug)]
pub enum Unread {
    /// This process may not read it any more.
    Refused,
    /// Something else.
    Failed(std::io::Error, u32),
}

impl Posting {
    /// Bytes of the part.
    pub fn bytes(&self) -> usize {
        match self {
            Posting::Here { pieces, .. } => pieces.bytes(),
            Posting::There { pieces, .. } => pieces.bytes(),
        }
    }

    /// Whether it lies in the poster's own memory.
    pub fn is_lent(&self) -> bool {
        match self {
            Posting::Here { lent, .. } => *lent,
            Posting::There { .. } => true,
        }
    }

    /// Copies the bytes from `offset` to regions, in order, which are a part of a result of `total` bytes.
    pub fn copy(&self, offset: usize, to: &[Region], total: usize) -> std::result::Result<(), Unread> {
        match self {
            Posting::Here { pieces, .. } => {
                scatter(pieces, offset, to, total);
                Ok(())
            }
            Posting::There { pieces, pid } => read(pieces, *pid, offset, to),
        }
    }
}

/// Copies bytes of our address space to the regions, in order.
fn scatter(from: &Pieces, offset: usize, to: &[Region], total: usize) {
    let mut at = offset;
    for region in to {
        let mut done = 0;
        while done < region.len() {
            let run = from.run(at, region.len() - done);
            region.part(done, run.len()).copy_part_from(run, total);
            (at, done) = (at + run.len(), done + run.len());
        }
    }
}

/// Has the kernel copy bytes of another process to the regions, in order.
fn read(from: &Pieces<InPeer>, pid: u32, offset: usize, to: &[Region]) -> std::result::Result<(), Unread> {
    let into = Pieces::new(to);
    let mut done = 0;
    while done < into.bytes() {
        let left = into.bytes() - done;
        let mut dst: SmallVec<[Region; 4]> = SmallVec::new();
        let mut src: SmallVec<[PeerRegion; 4]> = SmallVec::new();
        let wanted = into.runs(done, left, MAX_PIECES, &mut dst);
        from.runs(offset + done, wanted, MAX_PIECES, &mut src);
        match read_process(pid, &dst, &src) {
            Ok(0) => return Err(Unread::Failed(std::io::ErrorKind::UnexpectedEof.into(), pid)),
            Ok(got) => done += got,
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Err(Unread::Refused),
            Err(error) => return Err(Unread::Failed(error, pid)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_known_by_its_low_bits_near_ours() {
        for (ours, theirs) in [(5, 5), (5, 9), (65_540, 65_530), (65_530, 65_540), (1 << 40, (1 << 40) - 3)] {
            assert_eq!(near(ours, theirs & 0xffff), theirs);
        }
    }

    #[test]
    fn forms_survive_the_check_word_and_nonsense_does_not() {
        for form in [Form::Line, Form::Page, Form::Listed, Form::Lent, Form::Area(0), Form::Area(1)] {
            assert_eq!(Form::from_code(form.code()), Some(form));
        }
        assert_eq!(Form::from_code(4 + AREAS as u64), None);
        assert_eq!(
            [48, 49, PAGE_BYTES, PAGE_BYTES + 1].map(Form::short),
            [Some(Form::Line), Some(Form::Page), Some(Form::Page), None]
        );
    }
}
