//! The parser `tuning_table` of `strata::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata::fuzz::run("tuning_table", data));
