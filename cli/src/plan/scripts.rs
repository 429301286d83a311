//! `strata plan verify FILE`: scripts, each in every form that a call may want of it.
#![forbid(unsafe_code)]

use super::prove::{describe, in_parallel};
use crate::options::{parse_algorithm, Spread};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use strata::algorithms::{self, Choice};
use strata::error::{counted, Error, Result};
use strata::plan::contract::MAX_CONTRACT_BYTES;
use strata::plan::Shape;
use strata::script::trace::Trace;
use strata::script::{self, store, xml, Refusal, Script, ScriptForm};
use strata::topo::{Grid, Rank};

/// Options of `strata plan convert`.
#[derive(clap::Args)]
pub struct Convert {
    /// A collective, or a file in MSCCL's XML, which is written again as Strata reads it.
    #[arg(value_name = "COLLECTIVE|FILE")]
    what: String,
    /// The algorithm, such as `ring` or `two_level(direct,log)`.
    #[arg(long, value_parser = parse_algorithm)]
    algo: Option<Choice>,
    #[command(flatten)]
    spread: Spread,
    /// The root, where there is one.
    #[arg(long, default_value = "0")]
    root: usize,
    /// The contract of a file with a custom collective, where it does not lie beside it.
    #[arg(long, value_name = "FILE")]
    contract: Option<PathBuf>,
}

/// Options of `strata plan compile`.
#[derive(clap::Args)]
pub struct Compile {
    /// A trace in JSON; `-` for the standard input.
    trace: PathBuf,
    /// Copies of the trace that run at the same time, in place of what it says itself.
    #[arg(long)]
    instances: Option<u32>,
    /// The file to write, with the contract of a custom collective beside it; by default the standard output.
    #[arg(long, short)]
    output: Option<PathBuf>,
}

/// Compiles a trace and writes the algorithm as XML, once it is proved.
pub fn compile(options: &Compile) -> Result<ExitCode> {
    let name = options.trace.display();
    let bad = |text: String| Error::InvalidArgument(format!("{name}: {text}"));
    let text = match options.trace.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin().take(xml::MAX_BYTES as u64 + 1)),
        _ => store::read(&options.trace),
    };
    let text = text.map_err(|error| bad(error.to_string()))?;
    let mut trace = Trace::from_json(&text).map_err(|error| bad(error.to_string()))?;
    if let Some(instances) = options.instances {
        trace = trace.instances(instances);
    }
    let script = trace.compile().map_err(|error| bad(error.to_string()))?;
    if let Err(text) = prove_trace(&trace, &script) {
        return Ok(refused(&format!("{name} is refused: {text}")));
    }
    let xml = script::write(&script);
    let Some(output) = &options.output else {
        out!("{xml}");
        return Ok(ExitCode::SUCCESS);
    };
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(|error| bad(format!("{}: {error}", path.display())))
    };
    // The contract goes first: without it the algorithm would be of no use.
    if let Some(contract) = &script.contract {
        let beside = output.with_extension("toml");
        if beside == *output {
            return Err(bad(format!(
                "{}: the contract takes this name, the algorithm needs another",
                output.display()
            )));
        }
        let text = contract.text();
        if text.len() > MAX_CONTRACT_BYTES {
            return Err(bad(format!("its contract is too long a file: more than {MAX_CONTRACT_BYTES} bytes")));
        }
        write(&beside, &text)?;
    }
    write(output, &xml)?;
    Ok(ExitCode::SUCCESS)
}

/// Tells why a file or an algorithm is refused. The exit code is that of `strata plan verify`.
pub fn refused(text: &str) -> ExitCode {
    tell!("strata: {text}");
    ExitCode::FAILURE
}

/// Proves a compiled trace; what is refused is told by the trace's step.
fn prove_trace(trace: &Trace, script: &Script) -> std::result::Result<(), String> {
    prove_by(script, &|refusal| match &refusal.site {
        Some(site) => format!("{}: {}", trace.title(site.line.saturating_sub(1) as usize), refusal.finding()),
        None => refusal.to_string(),
    })
    .map(|_| ())
}

/// Writes an algorithm of the library's, or a file's, as XML to the standard output.
pub fn convert(options: &Convert) -> Result<ExitCode> {
    let what = &options.what;
    let read = match is_file(what) {
        true => read(Path::new(what), options.contract.as_deref()),
        false => Ok(converted(options)?),
    };
    let proved = read.and_then(|script| prove(&script).map(|_| script));
    let script = match proved {
        Ok(script) => script,
        Err(text) => return Ok(refused(&format!("{what} is refused: {text}"))),
    };
    let text = script::write(&script);
    readable(xml::read(&text)).map_err(|error| Error::InvalidUsage(format!("{what}: {}", error.text())))?;
    out!("{text}");
    Ok(ExitCode::SUCCESS)
}

/// An error where Strata could not read what it would write.
fn readable(again: std::result::Result<Script, xml::BadScript>) -> Result<()> {
    let unreadable = |bad: xml::BadScript| {
        Error::InvalidUsage(format!("Strata could not read the file that this makes: {}", bad.text))
    };
    again.map(drop).map_err(unreadable)
}

fn converted(options: &Convert) -> Result<Script> {
    let collective = super::parse_collective(&options.what).map_err(Error::InvalidArgument)?;
    let grid = super::grid_of(&options.spread)?;
    let nranks = grid.nranks();
    let none = || Error::InvalidArgument("--algo names the algorithm that is to be a file".to_string());
    let choice = options.algo.clone().ok_or_else(none)?;
    if nranks > xml::MAX_RANKS {
        let most = xml::MAX_RANKS;
        return Err(Error::InvalidUsage(format!("a file that Strata can read has at most {most} ranks, not {nranks}")));
    }
    if options.root >= nranks {
        return Err(Error::InvalidArgument(format!("there is no rank {} among {nranks}", options.root)));
    }
    let shape = Shape { root: Rank::from_index(options.root), ..Shape::new(collective, grid) };
    let plans = (0..nranks).map(|rank| algorithms::build(&choice, &shape, Rank::from_index(rank)));
    let script = script::convert(&plans.collect::<Result<Vec<_>>>()?)
        .map_err(|text| Error::InvalidUsage(format!("{choice}: {text}")))?;
    // A proof of so many steps would take its time.
    if script.nsteps() > xml::MAX_STEPS {
        let (steps, most) = (script.nsteps(), xml::MAX_STEPS);
        let text = format!("{choice} has {steps} steps, and a file that Strata can read at most {most}");
        return Err(Error::InvalidUsage(text));
    }
    Ok(script)
}

/// The script in a file.
fn read(file: &Path, contract: Option<&Path>) -> std::result::Result<Script, String> {
    let text = store::read(file).map_err(|error| error.to_string())?;
    script::read(&text, store::contract_of(file, contract)?.as_deref()).map_err(|bad| bad.to_string())
}

/// Whether an argument names a file rather than a collective.
pub fn is_file(argument: &str) -> bool {
    argument.contains(['/', '.']) || Path::new(argument).is_file()
}

/// Proves the files and prints a line for each, and what is wrong with it.
pub fn verify(files: &[PathBuf], contract: Option<&Path>) -> Result<ExitCode> {
    let start = Instant::now();
    let verdicts = in_parallel(files, |file| line(file, contract));
    outln!(
        "{:<34} {:<14} {:>5} {:>6} {:>7} {:>9} {:>8} {:>6}",
        "file",
        "collective",
        "ranks",
        "chunks",
        "steps",
        "messages",
        "capacity",
        "ms"
    );
    for (_, verdict) in &verdicts {
        outln!("{verdict}");
    }
    let accepted = verdicts.iter().filter(|(accepted, _)| *accepted).count();
    outln!(
        "{}: {accepted} accepted, {} refused, in {:.2} s",
        counted(files.len(), "file"),
        files.len() - accepted,
        start.elapsed().as_secs_f64()
    );
    Ok(if accepted == files.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is printed of a file, and whether it is accepted.
fn line(file: &Path, contract: Option<&Path>) -> (bool, String) {
    let start = Instant::now();
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let script = read(file, contract);
    let script = match script {
        Ok(script) => script,
        Err(text) => return (false, format!("{name}\n    refused: {}: {text}", file.display())),
    };
    let facts = |tail: &str| {
        let (collective, ranks) = (script.collective.name(), script.nranks());
        format!("{name:<34} {collective:<14} {ranks:>5} {:>6} {tail}", script.chunks)
    };
    match prove(&script) {
        Ok((steps, messages, capacity)) => {
            let took = start.elapsed().as_secs_f64() * 1e3;
            (true, facts(&format!("{steps:>7} {messages:>9} {capacity:>8} {took:>6.1}")))
        }
        Err(text) => (false, format!("{}\n    refused: {}: {text}", facts(""), file.display())),
    }
}

/// Steps and messages of a script out of place, and the capacity that all forms can do with.
fn prove(script: &Script) -> std::result::Result<(usize, usize, usize), String> {
    prove_by(script, &Refusal::to_string)
}

/// The same, with refusals in the caller's words.
fn prove_by(script: &Script, told: &dyn Fn(&Refusal) -> String) -> std::result::Result<(usize, usize, usize), String> {
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = script::root(script, &grid).map_err(|refusal| told(&refusal))?;
    script::judge(script, &grid, root).map_err(|refusal| told(&refusal))?;
    let prologue = if script.reduces() { &[false, true][..] } else { &[false] };
    let (mut first, mut capacity) = (None, 1);
    for in_place in [false, true] {
        for &prologue in prologue {
            let form = ScriptForm { in_place, prologue, root };
            let proof = script::prove(script, &grid, form).map_err(|refusal| {
                let shape = Shape { in_place, prologue, root, ..Shape::new(script.collective, grid.clone()) };
                format!("{} ({})", told(&refusal), describe(&shape))
            })?;
            first.get_or_insert((proof.report.steps, proof.report.messages));
            capacity = capacity.max(proof.capacity);
        }
    }
    let (steps, messages) = first.unwrap_or_default();
    Ok((steps, messages, capacity))
}
