//! Frames of every width and length come back as they were, and whatever else comes is an error.

use super::*;
use crate::memory::Arena;
use proptest::prelude::*;

/// Bytes of one form of data, `what` of [`KINDS`].
pub(super) const KINDS: usize = 6;

pub(super) fn data(what: usize, len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed * 2 + 1;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let mut gaussian = move || {
        let sum: u64 = (0..6).map(|_| random() & 0xffff).sum();
        (sum as f32 - 3.0 * 65_535.0) / 46_340.0 * 0.02
    };
    let elements = len / 8 + 1;
    let mut bytes: Vec<u8> = match what {
        0 => vec![0; len],
        1 => (0..4 * elements).flat_map(|_| ((gaussian().to_bits() >> 16) as u16).to_le_bytes()).collect(),
        2 => (0..2 * elements).flat_map(|_| gaussian().to_le_bytes()).collect(),
        3 => (0..elements)
            .flat_map(|_| f64::from(gaussian()).mul_add(1.0, 1e-9 * f64::from(gaussian())).to_le_bytes())
            .collect(),
        4 => (0..elements).flat_map(|at| (at as u64 / 3).to_le_bytes()).collect(),
        _ => (0..8 * elements).map(|at| (gaussian().to_bits() >> 3) as u8 ^ at as u8).collect(),
    };
    bytes.truncate(len);
    bytes
}

fn coded(codec: &mut Codec, bytes: &[u8], form: PlaneForm) -> Option<Vec<u8>> {
    codec.original(bytes.len()).copy_from_slice(bytes);
    let mut out = vec![0; MAX_CODED];
    codec.encode(bytes.len(), form, &mut out).map(|len| out[..len].to_vec())
}

fn decoded(codec: &mut Codec, frame: &[u8], len: usize) -> Result<Vec<u8>, &'static str> {
    let mut arena = Arena::new(frame.len());
    arena.region().write(frame);
    codec.decode(arena.region(), len).map(<[u8]>::to_vec)
}

fn chosen(codec: &mut Codec, bytes: &[u8]) -> Option<PlaneForm> {
    codec.original(bytes.len()).copy_from_slice(bytes);
    codec.choose(bytes.len())
}

proptest! {
    #[test]
    fn every_frame_comes_back_as_it_was(
        (what, seed, log, planes) in (0..KINDS, 0u64..1 << 40, 0u32..4, any::<u8>()),
        len in prop_oneof![0usize..70, 1usize..5000, FRAME - 9..=FRAME],
    ) {
        let mut codec = Codec::new().unwrap();
        let bytes = data(what, len, seed);
        let form = PlaneForm { width: 1 << log, coded: planes };
        if let Some(frame) = coded(&mut codec, &bytes, form) {
            prop_assert!(frame.len() < len);
            prop_assert_eq!(decoded(&mut codec, &frame, len).unwrap(), bytes);
        }
    }

    #[test]
    fn any_bytes_are_an_error_or_as_long_as_asked(bytes in prop::collection::vec(any::<u8>(), 0..300), len in 0usize..600) {
        let mut codec = Codec::new().unwrap();
        if let Ok(original) = decoded(&mut codec, &bytes, len) {
            prop_assert_eq!(original.len(), len);
        }
    }
}

#[test]
fn floats_are_split_by_their_width_and_shrink() {
    let mut codec = Codec::new().unwrap();
    let mut ratio = |what, form: PlaneForm| {
        let bytes = data(what, FRAME, 3);
        assert_eq!(chosen(&mut codec, &bytes), Some(form), "data {what}");
        FRAME as f64 / coded(&mut codec, &bytes, form).unwrap().len() as f64
    };
    assert!(ratio(1, PlaneForm { width: 2, coded: 2 }) > 1.4);
    assert!(ratio(2, PlaneForm { width: 4, coded: 8 }) > 1.15);
    assert!(ratio(0, PlaneForm { width: 1, coded: 1 }) > 1000.0);
    assert!(ratio(4, PlaneForm { width: 8, coded: 0xfe }) > 2.0);
}

#[test]
fn noise_is_left_alone() {
    let mut codec = Codec::new().unwrap();
    let bytes = data(5, FRAME, 9);
    assert_eq!(chosen(&mut codec, &bytes), None);
    assert_eq!(coded(&mut codec, &bytes, PlaneForm { width: 2, coded: 3 }), None, "it would be longer");
}

#[test]
fn a_damaged_frame_is_an_error_wherever_the_damage_is() {
    let mut codec = Codec::new().unwrap();
    for (what, width, planes) in [(1, 2, 2), (2, 4, 0xf), (0, 1, 1), (4, 8, 0xff)] {
        let len = 1003;
        let bytes = data(what, len, 5);
        let frame = coded(&mut codec, &bytes, PlaneForm { width, coded: planes }).unwrap();
        for at in 0..frame.len() {
            for bit in [1u8, 0x80, 0xff] {
                let mut damaged = frame.clone();
                damaged[at] ^= bit;
                let told = decoded(&mut codec, &damaged, len);
                // zstd's own header says some things twice, so that a change there may say the same.
                assert!(told.is_err() || told.as_ref() == Ok(&bytes), "byte {at} of {}", frame.len());
            }
        }
        for end in 0..frame.len() {
            assert!(decoded(&mut codec, &frame[..end], len).is_err(), "cut after {end} of {}", frame.len());
        }
        let longer = [&frame[..], &[0]].concat();
        assert!(decoded(&mut codec, &longer, len).is_err());
        for other in [0, 1, len - 1, len + 1, 2 * len, FRAME, FRAME + 1, usize::MAX] {
            assert!(decoded(&mut codec, &frame, other).is_err(), "{other} bytes instead of {len}");
        }
        assert_eq!(decoded(&mut codec, &frame, len).unwrap(), bytes, "the decoder goes on");
    }
}
