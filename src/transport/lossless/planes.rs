//! Bytes of elements apart and together again: plane `p` has byte `p` of every element.
//!
//! ```text
//! elements of 2 bytes   a0 a1  b0 b1  c0 c1        planes   a0 b0 c0 | a1 b1 c1
//! ```
#![forbid(unsafe_code)]

/// Puts byte `p` of every element of `W` bytes into plane `p`. What is left of `whole` after the last whole element is not touched.
/// One plane at a time, of whole words: compilers make vector instructions of that, and of single bytes at a distance they do not.
fn apart<const W: usize>(whole: &[u8], planes: &mut [u8], word: impl Fn([u8; W], usize) -> u8) {
    let each = whole.len() / W;
    for (number, plane) in planes[..each * W].chunks_exact_mut(each.max(1)).enumerate() {
        for (place, element) in plane.iter_mut().zip(whole.as_chunks().0) {
            *place = word(*element, number);
        }
    }
}

/// The reverse.
fn together<const W: usize>(planes: &[&[u8]], whole: &mut [u8]) {
    let each = whole.len() / W;
    let planes: [&[u8]; W] = std::array::from_fn(|plane| &planes[plane][..each]);
    for (at, element) in whole.chunks_exact_mut(W).enumerate() {
        for (byte, plane) in element.iter_mut().zip(planes) {
            *byte = plane[at];
        }
    }
}

/// Splits elements of `width` bytes (1, 2, 4 or 8) into planes that lie one behind the other.
pub fn split(width: usize, whole: &[u8], planes: &mut [u8]) {
    match width {
        2 => apart(whole, planes, |element, at| (u16::from_le_bytes(element) >> (8 * at)) as u8),
        4 => apart(whole, planes, |element, at| (u32::from_le_bytes(element) >> (8 * at)) as u8),
        8 => apart(whole, planes, |element, at| (u64::from_le_bytes(element) >> (8 * at)) as u8),
        _ => planes[..whole.len()].copy_from_slice(whole),
    }
}

/// Joins as many planes as an element has bytes; each has a byte for every whole element of `whole`.
pub fn join(planes: &[&[u8]], whole: &mut [u8]) {
    match planes.len() {
        2 => together::<2>(planes, whole),
        4 => together::<4>(planes, whole),
        8 => together::<8>(planes, whole),
        _ => whole.copy_from_slice(planes[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_together_as_they_were_and_the_tail_is_left_alone() {
        for width in [1, 2, 4, 8] {
            for len in [0, 1, 7, 8, 64, 999] {
                let whole: Vec<u8> = (0..len).map(|at| (at * 37 + at / 256) as u8).collect();
                let each = len / width;
                let mut planes = vec![0; len];
                split(width, &whole, &mut planes);
                for (at, element) in whole.chunks_exact(width).enumerate() {
                    assert!((0..width).all(|plane| planes[plane * each + at] == element[plane]));
                }
                let mut again = vec![0xee; len];
                let parts: Vec<&[u8]> = (0..width).map(|plane| &planes[plane * each..][..each]).collect();
                join(&parts, &mut again);
                assert_eq!(again[..each * width], whole[..each * width]);
                assert!(again[each * width..].iter().all(|&byte| byte == 0xee));
            }
        }
    }
}
