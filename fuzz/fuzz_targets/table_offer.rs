//! The parser `table_offer` of `strata::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata::fuzz::run("table_offer", data));
