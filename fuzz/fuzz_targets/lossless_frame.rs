//! The parser `lossless_frame` of `strata::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata::fuzz::run("lossless_frame", data));
