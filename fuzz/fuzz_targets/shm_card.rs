//! The parser `shm_card` of `strata::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata::fuzz::run("shm_card", data));
