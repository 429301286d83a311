//! The parser `formula` of the command.
#![no_main]

#[path = "../../shim-tests/fuzz/command.rs"]
#[allow(dead_code)]
mod command;
#[path = "../../cli/src/nccl.rs"]
#[allow(dead_code, unused)]
mod nccl;
#[path = "../../shim-tests/fuzz/perf.rs"]
#[allow(dead_code, unused)]
mod perf;

libfuzzer_sys::fuzz_target!(|data: &[u8]| command::formula(data));
