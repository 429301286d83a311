//! Every parser on mutated seeds: none panics, takes more than a second or more than a bounded amount of memory.
//!
//! `STRATA_FUZZ_INPUTS` inputs for each parser (100,000), from number `STRATA_FUZZ_FROM` on; names as arguments select
//! parsers. Inputs that were wrong once are in `fuzz/regressions`, a folder for each parser, and go first. The same
//! parsers stand behind the libFuzzer targets in `fuzz/`.

#[path = "fuzz/command.rs"]
mod command;
#[path = "fuzz/mutate.rs"]
mod mutate;
#[allow(dead_code, unused, missing_docs)]
#[path = "../cli/src/nccl.rs"]
mod nccl;
#[path = "fuzz/peak.rs"]
mod peak;
#[allow(dead_code, unused, missing_docs)]
#[path = "fuzz/perf.rs"]
mod perf;

use peak::Allocated;
use rustix::time::{clock_gettime, ClockId};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::time::{Duration, Instant};
use strata::fuzz::Parser;

#[global_allocator]
static ALLOCATOR: peak::Counting = peak::Counting;

/// Inputs for each parser where the environment says nothing.
const INPUTS: u64 = 100_000;
/// Programs of workloads repeat steps millions of times before they are refused: one input in so many is enough.
const SLOW: (&str, u64) = ("workload_program", 100);
/// Processor time of an input.
const MOST_TIME: Duration = Duration::from_secs(1);
/// The same for the slow one.
const MOST_SLOW_TIME: Duration = Duration::from_secs(20);
/// Bytes that an input may have allocated in all, freed or not, beside those for its own length.
const MOST_BYTES: usize = 64 << 20;
const MOST_SLOW_BYTES: usize = 2 << 30;
/// The same for each of its bytes.
const MOST_BYTES_A_BYTE: usize = 4096;
/// Bytes that an input may have allocated at one time, beside those for its own length.
const MOST_PEAK: usize = 16 << 20;
const MOST_SLOW_PEAK: usize = 1 << 30;
/// The same for each of its bytes.
const MOST_PEAK_A_BYTE: usize = 20;
/// After so long without an end of some thousands of inputs the run ends.
const WATCHDOG: Duration = Duration::from_secs(300);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What the inputs of a parser took at most.
#[derive(Default)]
struct Most {
    time: Duration,
    peak: usize,
    /// Of the input that had the most memory.
    len: usize,
}

/// What is wrong with how a parser takes an input, if anything.
fn fault(parser: &Parser, data: &[u8], most: &mut Most) -> Option<String> {
    let slow = parser.name == SLOW.0;
    let began = processor_time();
    let (outcome, Allocated { total, peak }) = peak::of(|| catch_unwind(AssertUnwindSafe(|| (parser.run)(data))));
    let took = processor_time() - began;
    most.time = most.time.max(took);
    if peak > most.peak {
        (most.peak, most.len) = (peak, data.len());
    }
    if let Err(panic) = outcome {
        let text = panic.downcast_ref::<String>().cloned();
        return Some(text.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap_or(&"a panic").to_string()));
    }
    let (time, bytes, most_peak) =
        if slow { (MOST_SLOW_TIME, MOST_SLOW_BYTES, MOST_SLOW_PEAK) } else { (MOST_TIME, MOST_BYTES, MOST_PEAK) };
    if took > time {
        return Some(format!("it took {took:?}"));
    }
    if peak > most_peak + data.len() * MOST_PEAK_A_BYTE {
        return Some(format!("it had {peak} bytes allocated at one time"));
    }
    (total > bytes + data.len() * MOST_BYTES_A_BYTE).then(|| format!("it allocated {total} bytes"))
}

/// The inputs that were wrong once, with the names of their files.
fn regressions(parser: &Parser) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/regressions").join(parser.name);
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter_map(|path| Some((path.display().to_string(), std::fs::read(&path).ok()?))).collect()
}

/// Runs one parser; returns what was wrong, one line for each input, and what the inputs took.
fn run(parser: &Parser, from: u64, inputs: u64, alive: impl Fn(u64)) -> (Vec<String>, Most) {
    let seeds = (parser.seeds)();
    assert!(!seeds.is_empty(), "{} has no seeds", parser.name);
    let told = |what: &str, fault: String| format!("{}, {what}: {fault}", parser.name);
    let (mut faults, mut most) = (Vec::new(), Most::default());
    for (name, data) in regressions(parser) {
        faults.extend(fault(parser, &data, &mut most).map(|fault| told(&name, fault)));
    }
    for (index, data) in seeds.iter().enumerate() {
        faults.extend(fault(parser, data, &mut most).map(|fault| told(&format!("seed {index}"), fault)));
    }
    for input in from..from + inputs {
        if input % 1024 == 0 {
            alive(input);
        }
        let data = mutate::input(&seeds, input);
        if let Some(fault) = fault(parser, &data, &mut most) {
            let shown = String::from_utf8_lossy(&data[..data.len().min(200)]).into_owned();
            let kept = std::env::temp_dir().join(format!("strata-fuzz-{}-{input}", parser.name));
            let kept = std::fs::write(&kept, &data).map_or(String::new(), |()| format!(" ({})", kept.display()));
            faults.push(told(&format!("input {input}{kept}, {shown:?}"), fault));
            if faults.len() > 20 {
                break;
            }
        }
    }
    (faults, most)
}

/// Ends the process when a parser makes no progress: a thread that hangs cannot be stopped.
fn watch() -> impl Fn(&'static str, u64) {
    let (alive, heard) = channel::<(&str, u64)>();
    std::thread::spawn(move || {
        let mut last = ("nothing", 0);
        loop {
            match heard.recv_timeout(WATCHDOG) {
                Ok(now) => last = now,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("{}: one of the 1024 inputs from {} on does not end", last.0, last.1);
                    std::process::exit(1);
                }
            }
        }
    });
    move |name, input| {
        // At the end nobody listens any more.
        let _ = alive.send((name, input));
    }
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let (inputs, from) = (number("STRATA_FUZZ_INPUTS", INPUTS), number("STRATA_FUZZ_FROM", 0));
    let all = || strata::fuzz::PARSERS.iter().chain(command::PARSERS);
    let chosen: Vec<&Parser> = all()
        .filter(|parser| wanted.is_empty() || wanted.iter().any(|name| parser.name.contains(name.as_str())))
        .collect();
    if std::env::args().any(|argument| argument == "--list") {
        chosen.iter().for_each(|parser| println!("{}: test", parser.name));
        return ExitCode::SUCCESS;
    }
    // The faults are told below, each with its input.
    std::panic::set_hook(Box::new(|_| {}));
    let alive = watch();
    let mut failed = 0;
    println!("\nrunning {} tests", chosen.len());
    for parser in &chosen {
        let inputs = if parser.name == SLOW.0 { inputs.div_ceil(SLOW.1) } else { inputs };
        let began = Instant::now();
        let (faults, most) = run(parser, from, inputs, |input| alive(parser.name, input));
        failed += usize::from(!faults.is_empty());
        let verdict = if faults.is_empty() { "ok" } else { "FAILED" };
        let Most { time, peak, len } = most;
        println!(
            "test {} ... {verdict} ({inputs} inputs, {:.1} s; at most {time:.1?} and {peak} bytes, of {len} bytes of input)",
            parser.name,
            began.elapsed().as_secs_f64()
        );
        faults.iter().for_each(|fault| println!("    {fault}"));
    }
    let (verdict, passed) = (if failed == 0 { "ok" } else { "FAILED" }, chosen.len() - failed);
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
