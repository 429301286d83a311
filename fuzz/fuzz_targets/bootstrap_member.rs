//! The parser `bootstrap_member` of `strata::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata::fuzz::run("bootstrap_member", data));
