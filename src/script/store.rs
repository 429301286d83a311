//! The scripts of this process: which files settings name, how all ranks come to have rank 0's, and scripts as algorithms.
//!
//! A script is called `script:NAME`, NAME being its file's without `.xml`, and stands beside the library's own algorithms:
//! settings, tuning tables and the command line name it like them. Once loaded it stays: communicators may hold its plans.
#![forbid(unsafe_code)]

use super::{judge, merged, prove, root, xml, Lowered, Proof, Script, ScriptForm};
use crate::algorithms::needs::Needs;
use crate::algorithms::{self, Algorithm};
use crate::config::{self, Config};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::plan::{chunks_in, Action, Buffer, Collective, Plan, Shape};
use crate::topo::{Grid, Rank};
use rustc_hash::FxHashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The most files that are looked at.
const MAX_FILES: usize = 1024;
/// The most bytes of scripts that rank 0 sends.
const MAX_SENT: usize = 128 << 20;

/// A script that this process has.
#[derive(Debug)]
pub struct LoadedScript {
    /// Its name as an algorithm.
    pub name: String,
    /// The same with a part of its digest, so that ranks with other files of that name find out.
    pub unique_name: String,
    /// What it says.
    pub script: Script,
    /// The root, where there is one (else rank 0).
    pub root: Rank,
    digest: u64,
    steps: Steps,
    proofs: Mutex<FxHashMap<ScriptForm, Option<Arc<Lowered>>>>,
}

/// Which plans a script comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// As it is written, a lane for each thread block: what a GPU would run.
    AsWritten,
    /// With lanes that do the same on other chunks as one: what the host runs.
    Merged,
}

impl Steps {
    fn of(self, proof: Proof) -> Arc<Lowered> {
        Arc::new(if self == Steps::Merged { merged(proof) } else { proof }.lowered)
    }
}

/// Everything that has been loaded.
static LOADED: RwLock<Vec<&'static LoadedScript>> = RwLock::new(Vec::new());

impl LoadedScript {
    /// The plans for calls of one form; none where the script does not do them.
    fn lowered(&self, form: ScriptForm) -> Option<Arc<Lowered>> {
        let mut proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        let proof = || {
            let grid = Arc::new(Grid::flat(self.script.nranks()));
            prove(&self.script, &grid, form).ok().map(|proof| self.steps.of(proof))
        };
        proofs.entry(form).or_insert_with(proof).clone()
    }

    fn does(&self, shape: &Shape) -> bool {
        shape.collective == self.script.collective
            && shape.nranks() == self.script.nranks()
            && (!shape.collective.has_root() || shape.root == self.root)
            && self.lowered(form(shape)).is_some()
    }

    fn plan(&self, shape: &Shape, rank: Rank) -> Plan {
        let lowered = self.lowered(form(shape)).expect("a script is asked for what it does");
        let contract = self.script.contract.clone();
        Plan { shape: Shape { contract, ..shape.clone() }, ..lowered.plans[rank.index()].clone() }
    }

    fn needs(&self, shape: &Shape) -> Needs {
        let of_form = |in_place: bool| {
            let lowered = self.lowered(ScriptForm { in_place, ..form(shape) })?;
            let of_plan = |plan: &Plan| {
                let per_block = plan.chunks_per_block as usize;
                let sent = plan.lanes.iter().flat_map(|lane| &lane.steps).map(|step| match &step.action {
                    Action::Send { src, .. } if src.iter().any(|span| span.buffer != Buffer::Scratch) => chunks_in(src),
                    _ => 0,
                });
                let sent: usize = sent.sum();
                Needs::new((plan.scratch_chunks as usize).div_ceil(per_block), sent.div_ceil(per_block))
            };
            Some(lowered.plans.iter().map(of_plan).fold(Needs::default(), Needs::max))
        };
        [false, true].into_iter().filter_map(of_form).fold(Needs::default(), Needs::max)
    }

    /// Whether its writer meant it for calls of so many bytes of the larger buffer.
    pub fn is_for(&self, collective: Collective, nranks: usize, bytes: usize) -> bool {
        self.script.collective == collective
            && self.script.nranks() == nranks
            && self.script.bytes.contains(&(bytes as u64))
    }
}

fn form(shape: &Shape) -> ScriptForm {
    ScriptForm { in_place: shape.in_place, prologue: shape.prologue, root: shape.root }
}

/// Loads a script, and adds it to the algorithms. One that has been loaded already is found again.
///
/// # Errors
/// `InvalidUsage` where it is no script, or does not do what it says: with the line.
pub fn load(stem: &str, text: &str, contract: Option<&str>, steps: Steps) -> Result<&'static LoadedScript> {
    let digest = Digest::new("script").text(text).text(contract.unwrap_or_default());
    let digest = if steps == Steps::AsWritten { digest.text("as written") } else { digest }.value() as u64;
    let plain: String =
        stem.chars().map(|c| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '_' }).collect();
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let name = format!("script:{plain}");
    let unique_name = format!("{name}~{:08x}", digest as u32);
    if let Some(known) = loaded.iter().find(|known| known.digest == digest && known.unique_name == unique_name) {
        return Ok(known);
    }
    let refused = |why: String| Error::InvalidUsage(format!("script {stem}: {why}"));
    let script = super::read(text, contract).map_err(|error| refused(error.to_string()))?;
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = root(&script, &grid).map_err(|refusal| refused(refusal.to_string()))?;
    let form = ScriptForm { in_place: false, prologue: false, root };
    judge(&script, &grid, root).map_err(|refusal| refused(refusal.to_string()))?;
    let proof = prove(&script, &grid, form).map_err(|refusal| refused(refusal.to_string()))?;
    let is_taken = algorithms::by_name(&name).is_some();
    let name = if is_taken { unique_name.clone() } else { name };
    let proofs = Mutex::new(FxHashMap::from_iter([(form, Some(steps.of(proof)))]));
    let script: &'static LoadedScript =
        Box::leak(Box::new(LoadedScript { name, unique_name, script, root, digest, steps, proofs }));
    algorithms::add(as_algorithm(script, &script.unique_name));
    if !is_taken {
        algorithms::add(as_algorithm(script, &script.name));
    }
    loaded.push(script);
    Ok(script)
}

fn as_algorithm(script: &'static LoadedScript, name: &'static str) -> &'static Algorithm {
    Box::leak(Box::new(Algorithm {
        name,
        text: "An algorithm that came as a file.",
        collectives: std::slice::from_ref(&script.script.collective),
        is_leveled: false,
        supports: Box::leak(Box::new(|shape: &Shape| script.does(shape))),
        build: Box::leak(Box::new(|shape: &Shape, rank: Rank| script.plan(shape, rank))),
        needs: Box::leak(Box::new(|shape: &Shape, _: &algorithms::needs::InnerNeeds<'_>| script.needs(shape))),
    }))
}

/// The loaded script of a name, with or without the part of its digest.
pub fn by_name(name: &str) -> Option<&'static LoadedScript> {
    let loaded = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    loaded.iter().copied().find(|script| script.name == name || script.unique_name == name)
}

/// Loads a file, with the contract in a file that is named, or else the one beside it.
///
/// # Errors
/// `InvalidUsage` where it cannot be read, is no script, or does not do what it says.
pub fn load_file(path: &Path, contract: Option<&Path>, steps: Steps) -> Result<&'static LoadedScript> {
    let refused = |error: std::io::Error| Error::InvalidUsage(format!("{}: {error}", path.display()));
    let text = read(path).map_err(refused)?;
    let contract = contract_of(path, contract).map_err(Error::InvalidUsage)?;
    load(&stem(path), &text, contract.as_deref(), steps)
}

/// The contract of a file: the one that is named, or the one that lies beside it, if one does.
///
/// # Errors
/// Where the one that is named cannot be read.
pub fn contract_of(path: &Path, named: Option<&Path>) -> std::result::Result<Option<String>, String> {
    match named {
        Some(named) => read(named).map(Some).map_err(|error| format!("contract {}: {error}", named.display())),
        None => Ok(contract_beside(path)),
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The files that settings name, in the order in which they are asked: `STRATA_PROGRAM_DIR`'s and `MSCCL_ALGO_DIR`'s by name,
/// then `MSCCL_XML_FILES`', which have numbers from 0. What cannot be read is told.
fn files(config: &Config) -> (Vec<(PathBuf, Option<usize>)>, Vec<String>) {
    let (mut files, mut complaints) = (Vec::new(), Vec::new());
    let own = Some(config.program_dir.clone()).filter(|folder| folder != "none");
    let folders = [("STRATA_PROGRAM_DIR", own), ("MSCCL_ALGO_DIR", config::path_from_env("MSCCL_ALGO_DIR"))];
    for (variable, folder) in folders {
        let Some(folder) = folder else { continue };
        match scripts_in(Path::new(&folder)) {
            Ok(found) => files.extend(found.into_iter().map(|path| (path, None))),
            Err(error) => complaints.push(format!("{variable}={folder}: {error}")),
        }
    }
    let named = config::path_from_env("MSCCL_XML_FILES").unwrap_or_default();
    let named = named.split(':').filter(|name| !name.is_empty()).map(PathBuf::from);
    files.extend(named.enumerate().map(|(number, path)| (path, Some(number))));
    if files.len() > MAX_FILES {
        complaints.push(format!("of {} files with algorithms the first {MAX_FILES} are looked at", files.len()));
        files.truncate(MAX_FILES);
    }
    (files, complaints)
}

fn scripts_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "xml") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// What rank 0 sends of the scripts that its settings name to a communicator of so many ranks, and what is to be told of those
/// that cannot be used. Scripts for other numbers of ranks are left out, but for those that an algorithm's setting names.
pub fn offer(config: &Config, nranks: usize) -> (String, Vec<String>) {
    let (files, mut complaints) = files(config);
    let named = files.iter().filter(|(_, number)| number.is_some()).count();
    let mut offered: Vec<Offered> = Vec::new();
    let mut sent = 0;
    for (path, number) in files {
        let stem = stem(&path);
        let mut complain =
            |why: &dyn std::fmt::Display| complaints.push(format!("{} is not used: {why}", path.display()));
        let text = match read(&path) {
            Ok(text) => text,
            Err(error) => {
                complain(&error);
                continue;
            }
        };
        let named =
            Collective::ALL.iter().any(|&collective| config.algorithm(collective).contains(&format!("script:{stem}")));
        match xml::read(&text) {
            Ok(script) if script.nranks() != nranks && !named => continue,
            Ok(_) => {}
            Err(error) => {
                complain(&error);
                continue;
            }
        }
        if sent + text.len() > MAX_SENT {
            complain(&format!("the scripts before it have {sent} bytes, and more than {MAX_SENT} are not sent"));
            continue;
        }
        let contract = contract_beside(&path);
        match load(&stem, &text, contract.as_deref(), Steps::Merged) {
            Ok(_) => {
                sent += text.len();
                offered.push((stem, text, contract, number));
            }
            Err(error) => complain(&error.text()),
        }
    }
    let is_nothing = offered.is_empty() && named == 0;
    let text = if is_nothing { String::new() } else { serde_json::to_string(&(named, offered)).unwrap_or_default() };
    (text, complaints)
}

/// The contract that lies beside a file, if one does.
pub fn contract_beside(path: &Path) -> Option<String> {
    read(&path.with_extension("toml")).ok()
}

/// What rank 0 sends of a script: its file's name, its text, its contract, its number in `MSCCL_XML_FILES` if it is one of those.
type Offered = (String, String, Option<String>, Option<usize>);

/// What rank 0 has sent.
#[derive(Debug, Clone, Default)]
pub struct SentScripts {
    /// In the order in which they are asked.
    pub scripts: Vec<&'static LoadedScript>,
    /// By their numbers in rank 0's `MSCCL_XML_FILES`; none of a file that is refused or for another number of ranks.
    pub numbered: Vec<Option<&'static LoadedScript>>,
}

/// The text of a file that may be a script or a trace: an ordinary file within the limit of bytes.
///
/// # Errors
/// What is wrong with the file.
pub fn read(path: &Path) -> std::io::Result<String> {
    let metadata = fs::metadata(path)?;
    // A pipe would be waited for, and a device never ends.
    if !metadata.is_file() {
        return Err(std::io::Error::other("it is no ordinary file"));
    }
    if metadata.len() > xml::MAX_BYTES as u64 {
        return Err(std::io::Error::other(format!("it has more than {} bytes", xml::MAX_BYTES)));
    }
    fs::read_to_string(path)
}

/// The scripts that rank 0 has sent.
///
/// # Errors
/// Where they cannot be read: then rank 0 runs another Strata.
pub fn agree(offer: &str) -> Result<SentScripts> {
    let mut sent = SentScripts::default();
    if offer.is_empty() {
        return Ok(sent);
    }
    let (named, offered): (usize, Vec<Offered>) = serde_json::from_str(offer)
        .map_err(|error| Error::Remote(format!("rank 0 sent scripts that cannot be read: {error}")))?;
    sent.numbered = vec![None; named.min(MAX_FILES)];
    for (stem, text, contract, number) in &offered {
        let script = load(stem, text, contract.as_deref(), Steps::Merged)?;
        sent.scripts.push(script);
        if let Some(place) = number.and_then(|number| sent.numbered.get_mut(number)) {
            *place = Some(script);
        }
    }
    Ok(sent)
}
