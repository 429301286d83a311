//! Copies between regions, at the speed of the memory whatever the alignment.
//!
//! The C library copies middle sizes by `rep movsb`, which on some processors (Zen 3 and 4 among them) falls to a tenth
//! of its speed when source and destination lie at slightly different offsets of their pages: exactly what copies between
//! page-aligned shared memory and a program's `malloc` are. So they are done with vector moves here. Those whose destination would
//! push everything else out of the cache bypass it on the way out.

use super::cache;

/// Shorter copies are left to the C library.
const LEAST: usize = 512;

/// Shorter copies always go through the cache: a line that bypasses it costs more by itself.
const LEAST_STREAM: usize = 16 << 10;

/// The least bytes of a result that bypass the cache: most of what a processor has of it, so that shorter results are still
/// there when they are read.
pub fn stream_bytes() -> usize {
    cache::share() / 4 * 3
}

/// Copies `len` bytes, which are a part of a result of `total` bytes; the two may overlap.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes.
pub unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, total: usize) {
    let apart = (src as usize).abs_diff(dst as usize);
    #[cfg(target_arch = "x86_64")]
    if len >= LEAST && apart >= len && is_x86_feature_detected!("avx") {
        // SAFETY: the processor must have AVX, and the ranges be valid and disjoint; because that has been checked, and
        // the caller promises the rest.
        return unsafe { vector::copy(src, dst, len, len >= LEAST_STREAM && total >= stream_bytes()) };
    }
    let _ = (apart, total);
    // SAFETY: both must be valid for `len` bytes; because the caller promises it.
    unsafe { std::ptr::copy(src, dst, len) }
}

#[cfg(target_arch = "x86_64")]
mod vector {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256, _mm_sfence};

    const WIDTH: usize = 32;
    const STRIDE: usize = 4 * WIDTH;

    /// Copies between disjoint ranges, past the cache where it `streams`.
    ///
    /// # Safety
    /// The processor must have AVX; the ranges must be valid for `len` bytes.
    #[target_feature(enable = "avx")]
    pub unsafe fn copy(src: *const u8, dst: *mut u8, len: usize, streams: bool) {
        let head = dst.align_offset(WIDTH).min(len);
        // SAFETY: `head` bytes must be valid at both; because `head <= len`.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
        let whole = (len - head) / STRIDE * STRIDE;
        let (from, to) = (src.wrapping_add(head), dst.wrapping_add(head));
        for at in (0..whole).step_by(STRIDE) {
            let (from, to) = (from.wrapping_add(at).cast(), to.wrapping_add(at).cast());
            if streams {
                // SAFETY: `STRIDE` bytes must be valid at both, `to` aligned; because `at + STRIDE <= whole`, and `head`
                // aligned the destination.
                unsafe { stream(from, to) };
            } else {
                // SAFETY: `STRIDE` bytes must be valid at both; because `at + STRIDE <= whole`. Alignment does not
                // matter.
                unsafe { store(from, to) };
            }
        }
        if streams {
            // Streaming stores are not ordered with the flags that tell others of them.
            _mm_sfence();
        }
        let done = head + whole;
        // SAFETY: the rest must be valid at both; because `done <= len`.
        unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(done), dst.wrapping_add(done), len - done) };
    }

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn load(from: *const __m256i, index: usize) -> __m256i {
        // SAFETY: the vector must be readable; because the caller promises four of them.
        unsafe { _mm256_loadu_si256(from.wrapping_add(index)) }
    }

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn store(from: *const __m256i, to: *mut __m256i) {
        for index in 0..4 {
            // SAFETY: four vectors must be readable; because the caller promises it.
            let vector = unsafe { load(from, index) };
            // SAFETY: four vectors must be writable; because the caller promises it.
            unsafe { _mm256_storeu_si256(to.wrapping_add(index), vector) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx")]
    unsafe fn stream(from: *const __m256i, to: *mut __m256i) {
        for index in 0..4 {
            // SAFETY: four vectors must be readable; because the caller promises it.
            let vector = unsafe { load(from, index) };
            // SAFETY: four aligned vectors must be writable; because the caller promises it.
            unsafe { _mm256_stream_si256(to.wrapping_add(index), vector) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_and_nothing_beside_it() {
        let lens = [0, 1, 511, 512, 513, 1000, 4096 + 17, LEAST_STREAM - 1, LEAST_STREAM, (1 << 20) + 200];
        // Miri takes minutes for the longer ones.
        for &len in &lens[..if cfg!(miri) { 5 } else { lens.len() }] {
            let places = [(0, 0), (0, 16), (1, 0), (7, 33), (31, 1)];
            for ((from, to), total) in places.iter().flat_map(|place| [(*place, len), (*place, usize::MAX)]) {
                let src: Vec<u8> = (0..len + 64).map(|i| (i * 7 % 251) as u8).collect();
                let mut dst = vec![0xee; len + 128];
                // SAFETY: `len` bytes must be valid at both; because the vectors have 64 and 128 bytes more, and the
                // offsets are below that.
                unsafe { copy(src[from..].as_ptr(), dst[to..].as_mut_ptr(), len, total) };
                assert_eq!(dst[to..to + len], src[from..from + len], "{len} bytes from {from} to {to}");
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&byte| byte == 0xee));
            }
        }
    }

    #[test]
    fn overlapping_ranges_are_moved() {
        let mut bytes: Vec<u8> = (0..3000).map(|i| (i % 256) as u8).collect();
        let before = bytes.clone();
        let start = bytes.as_mut_ptr();
        // SAFETY: 2900 bytes must be valid at both; because the vector has 3000. They may overlap.
        unsafe { copy(start, start.wrapping_add(100), 2900, usize::MAX) };
        assert_eq!(bytes[100..], before[..2900]);
    }
}
