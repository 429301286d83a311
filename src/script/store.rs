//! The scripts of this process: which files settings name, and scripts as algorithms.
//!
//! A script stands beside the library's own algorithms under a name with a digest of its text and contract
//! (`script:NAME~0123456789abcdef`), so that one name is one program in every process. Which of them `script:NAME` means is a
//! communicator's own matter ([`super::names`]). Once loaded a script stays: communicators may hold its plans.
#![forbid(unsafe_code)]

use super::names::ScriptNames;
use super::proof::{self, Recipe};
use super::{judge, lower::most_channels, optimized, prove, root, xml, Proof, Refusal, Script, ScriptForm};
use crate::algorithms::levels::{self, ScriptFacts};
use crate::algorithms::needs::Needs;
use crate::algorithms::{self, Algorithm, SCRIPT};
use crate::config::{self, Config};
use crate::digest::Digest;
use crate::error::{self, Error};
use crate::plan::stage::stage;
use crate::plan::{chunks_in, Action, Collective, Plan, Shape, Span};
use crate::topo::{Grid, Rank};
use rustc_hash::FxHashMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The most files that are looked at.
pub(super) const MAX_FILES: usize = 1024;

/// A script that this process has.
#[derive(Debug)]
pub struct LoadedScript {
    /// What people call it: `script:` and the name that it was loaded by. Others may be called so, too.
    pub name: String,
    /// Its name as an algorithm: the same with its digest.
    pub unique_name: String,
    /// What it says.
    pub script: Script,
    /// The root, where there is one (else rank 0).
    pub root: Rank,
    steps: Steps,
    proofs: Mutex<FxHashMap<ScriptForm, Option<Arc<Proof>>>>,
}

/// What a cost model has to know of a script's plans. Shares are of the whole vector: of all-gather's output, reduce-scatter's
/// input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScriptWork {
    /// Messages that can only follow one another.
    pub rounds: usize,
    /// What the rank that receives most receives.
    pub received: f64,
    /// What the rank that reduces most reduces.
    pub reduced: f64,
}

/// Which plans a script comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// As it is written, a lane for each thread block: what a GPU would run.
    AsWritten,
    /// After the passes ([`optimized`]), with lanes that do the same on other chunks as one: what the host runs.
    Merged,
}

/// Everything that has been loaded.
static LOADED: RwLock<Vec<&'static LoadedScript>> = RwLock::new(Vec::new());

impl LoadedScript {
    /// The plans for calls of one form; none where the script does not do them whichever way ranks hold their buffers.
    fn proved(&self, form: ScriptForm) -> Option<Arc<Proof>> {
        let mut proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = proofs.get(&form) {
            return known.clone();
        }
        let forms = forms(form);
        let proved = proved_forms(&self.script, &forms, self.steps).ok();
        for (at, &form) in forms.iter().enumerate() {
            proofs.insert(form, proved.as_ref().map(|proved| proved[at].clone()));
        }
        proofs.get(&form).cloned().flatten()
    }

    /// Whether it does a shape, whichever way ranks hold their buffers: the answer must be the same on all of them.
    fn does(&self, shape: &Shape) -> bool {
        shape.collective == self.script.collective
            && shape.nranks() == self.script.nranks()
            && (!shape.collective.has_root() || shape.root == self.root)
            && self.proved(form(shape)).is_some()
    }

    /// What the proofs of its forms without a prologue have decided.
    pub(super) fn recipes(&self) -> Vec<Recipe> {
        let forms = forms(ScriptForm { in_place: false, prologue: false, root: self.root });
        forms.into_iter().filter_map(|form| self.proved(form)).map(|proof| proof.recipe()).collect()
    }

    /// What its plans do, out of place.
    pub fn work(&self) -> Option<ScriptWork> {
        let proof = self.proved(ScriptForm { in_place: false, prologue: false, root: self.root })?;
        let most = |chunks: &dyn Fn(&Action) -> usize| {
            let of_plan =
                |plan: &Plan| plan.lanes.iter().flat_map(|lane| &lane.steps).map(|step| chunks(&step.action)).sum();
            let most: usize = proof.lowered.plans.iter().map(of_plan).max().unwrap_or(0);
            // The plans may have fewer chunks than the script.
            let per_block = proof.lowered.plans.first().map_or(1, |plan| plan.chunks_per_block);
            let blocks = self.script.chunks / self.script.chunks_per_block().max(1);
            most as f64 / f64::from((blocks * per_block).max(1))
        };
        let received = most(&|action| match action {
            Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } => chunks_in(dst),
            _ => 0,
        });
        let reduced = most(&|action| match action {
            Action::RecvReduce { dst, .. } => chunks_in(dst),
            Action::Reduce { srcs, dst, .. } => chunks_in(dst) * srcs.len().saturating_sub(1),
            _ => 0,
        });
        Some(ScriptWork { rounds: proof.report.rounds, received, reduced })
    }

    fn plan(&self, shape: &Shape, rank: Rank) -> Plan {
        let proof = self.proved(form(shape)).expect("a script is asked for what it does");
        let contract = self.script.contract.clone();
        Plan { shape: Shape { contract, ..shape.clone() }, ..proof.lowered.plans[rank.index()].clone() }
    }

    fn needs(&self, shape: &Shape) -> Needs {
        let of_form = |in_place: bool| {
            let proof = self.proved(ScriptForm { in_place, ..form(shape) })?;
            let of_plan = |plan: &Plan| {
                let per_block = plan.chunks_per_block as usize;
                let from_user = |_: Rank, src: &[Span]| src.iter().any(|span| !span.buffer.is_own());
                let sent = (stage(plan, &from_user).scratch_chunks - plan.scratch_chunks) as usize;
                Needs::new((plan.scratch_chunks as usize).div_ceil(per_block), sent.div_ceil(per_block))
            };
            Some(proof.lowered.plans.iter().map(of_plan).fold(Needs::default(), Needs::max))
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

/// The ways in which ranks of one call can hold their buffers.
fn forms(form: ScriptForm) -> [ScriptForm; 2] {
    [false, true].map(|in_place| ScriptForm { in_place, ..form })
}

/// The plans of these forms, with the same messages in all of them.
fn proved_forms(script: &Script, forms: &[ScriptForm], steps: Steps) -> Result<Vec<Arc<Proof>>, Refusal> {
    let grid = Arc::new(Grid::flat(script.nranks()));
    let proofs = forms.iter().map(|&form| prove(script, &grid, form)).collect::<Result<Vec<Proof>, Refusal>>()?;
    let proofs = if steps == Steps::Merged { optimized(proofs) } else { proofs };
    Ok(proofs.into_iter().map(Arc::new).collect())
}

fn form(shape: &Shape) -> ScriptForm {
    ScriptForm { in_place: shape.in_place, prologue: shape.prologue, root: shape.root }
}

/// Loads a script by the name of its file, and adds it to the algorithms. One that has been loaded already is found again.
///
/// # Errors
/// `InvalidUsage` where it is no script, or does not do what it says: with the line.
pub fn load(stem: &str, text: &str, contract: Option<&str>, steps: Steps) -> error::Result<&'static LoadedScript> {
    load_told(&plain(stem), text, contract, (steps, None))
}

/// What rank 0 has told of a script that it has proved.
pub(super) struct Told<'a> {
    /// The root, where there is one (else rank 0).
    pub root: u32,
    /// For each form in which a call can hold its buffers what the proof decided.
    pub recipes: &'a [Recipe],
}

/// The same by the name that it shall have; what rank 0 has told of the text is not proved again.
pub(super) fn load_told(
    name: &str,
    text: &str,
    contract: Option<&str>,
    (steps, told): (Steps, Option<&Told<'_>>),
) -> error::Result<&'static LoadedScript> {
    let digest = digest_of(text, contract, steps);
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let unique_name = unique_name(name, digest);
    if let Some(known) = loaded.iter().find(|known| known.unique_name == unique_name) {
        return Ok(known);
    }
    let refused = |why: String| Error::InvalidUsage(format!("script {name}: {why}"));
    let script = super::read(text, contract).map_err(|error| refused(error.to_string()))?;
    let (root, proved) = match told.and_then(|told| rebuilt(&script, told)) {
        Some(rebuilt) => rebuilt,
        None => proved_first(&script, steps).map_err(|refusal| refused(refusal.to_string()))?,
    };
    let forms = forms(ScriptForm { in_place: false, prologue: false, root });
    let name = format!("{SCRIPT}{name}");
    let proofs = Mutex::new(forms.into_iter().zip(proved.into_iter().map(Some)).collect());
    let script: &'static LoadedScript =
        Box::leak(Box::new(LoadedScript { name, unique_name, script, root, steps, proofs }));
    add(script);
    loaded.push(script);
    Ok(script)
}

/// The root of a script and the proofs of all forms without a prologue.
fn proved_first(script: &Script, steps: Steps) -> Result<(Rank, Vec<Arc<Proof>>), Refusal> {
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = root(script, &grid)?;
    judge(script, &grid, root)?;
    let forms = forms(ScriptForm { in_place: false, prologue: false, root });
    Ok((root, proved_forms(script, &forms, steps)?))
}

/// The same by what rank 0's proof decided; none where that takes a proof.
fn rebuilt(script: &Script, told: &Told<'_>) -> Option<(Rank, Vec<Arc<Proof>>)> {
    let root = Some(Rank(told.root)).filter(|root| root.index() < script.nranks())?;
    let forms = forms(ScriptForm { in_place: false, prologue: false, root });
    let grid = Arc::new(Grid::flat(script.nranks()));
    let all = proof::rebuilt_forms(script, &grid, &forms, told.recipes)?;
    Some((root, all.into_iter().map(Arc::new).collect()))
}

/// A digest of a script's text and contract, and of which plans it comes to.
pub(super) fn digest_of(text: &str, contract: Option<&str>, steps: Steps) -> u64 {
    let digest = Digest::new("script").text(text).text(contract.unwrap_or_default());
    (if steps == Steps::AsWritten { digest.text("as written") } else { digest }).value() as u64
}

/// The loaded script of this name and digest.
pub(super) fn known(name: &str, digest: u64) -> Option<&'static LoadedScript> {
    by_name(&unique_name(name, digest))
}

fn unique_name(name: &str, digest: u64) -> String {
    format!("{SCRIPT}{name}~{digest:016x}")
}

/// A file's name as it can stand in a script's.
pub(super) fn plain(stem: &str) -> String {
    stem.chars().map(|c| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '_' }).collect()
}

fn add(script: &'static LoadedScript) {
    let LoadedScript { script: read, root, unique_name, .. } = script;
    let facts = ScriptFacts {
        collective: read.collective,
        nranks: read.nranks(),
        root: read.collective.has_root().then_some(*root),
        chunks_per_block: read.chunks_per_block(),
        channels: most_channels(read),
    };
    levels::remember(unique_name, facts);
    algorithms::add(as_algorithm(script, unique_name));
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

/// The loaded script of a name with its digest.
pub fn by_name(unique_name: &str) -> Option<&'static LoadedScript> {
    let loaded = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    loaded.iter().copied().find(|script| script.unique_name == unique_name)
}

/// Loads a file, with the contract in a file that is named, or else the one beside it.
///
/// # Errors
/// `InvalidUsage` where it cannot be read, is no script, or does not do what it says.
pub fn load_file(path: &Path, contract: Option<&Path>, steps: Steps) -> error::Result<&'static LoadedScript> {
    load_file_among(path, contract, (steps, &mut ScriptNames::default()))
}

/// The same, by a name that tells it from the others that have been named.
///
/// # Errors
/// As those of [`load_file`].
pub fn load_file_among(
    path: &Path,
    contract: Option<&Path>,
    (steps, names): (Steps, &mut ScriptNames),
) -> error::Result<&'static LoadedScript> {
    let refused = |error: std::io::Error| Error::InvalidUsage(format!("{}: {error}", path.display()));
    let text = read(path).map_err(refused)?;
    let contract = contract_of(path, contract).map_err(Error::InvalidUsage)?;
    let name = names.name(path, Some(digest_of(&text, contract.as_deref(), steps)));
    load_told(&name, &text, contract.as_deref(), (steps, None))
}

/// The contract of a file: the one that is named, or the one that lies beside it, if one does.
///
/// # Errors
/// Where it is there or named and cannot be read.
pub fn contract_of(path: &Path, named: Option<&Path>) -> std::result::Result<Option<String>, String> {
    match named {
        Some(named) => read(named).map(Some).map_err(|error| format!("contract {}: {error}", named.display())),
        None => contract_beside(path).map_err(|error| refused_contract(path)(error).text().to_string()),
    }
}

/// The error of a script whose contract is there and cannot be read.
pub(super) fn refused_contract(path: &Path) -> impl Fn(std::io::Error) -> Error {
    let contract = path.with_extension("toml");
    move |error| Error::InvalidUsage(format!("its contract {}: {error}", contract.display()))
}

/// The files that settings name, in the order in which they are asked: `STRATA_PROGRAM_DIR`'s and `MSCCL_ALGO_DIR`'s by name,
/// then `MSCCL_XML_FILES`', which have numbers from 0. What cannot be read is told.
pub(super) fn files(config: &Config) -> (Vec<(PathBuf, Option<usize>)>, Vec<String>) {
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

/// Whether a communicator of so many ranks wants a script: it is for so many, or an algorithm's setting names it.
pub fn is_wanted(config: &Config, nranks: usize, name: &str, of_script: usize) -> bool {
    let names = |collective| names_script(config.algorithm(collective), name);
    of_script == nranks || Collective::ALL.into_iter().any(names)
}

/// Whether an algorithm's text has this script in it (its name without `script:`), by itself or as a level.
pub fn names_script(algorithm: &str, name: &str) -> bool {
    let mut names = algorithm.match_indices(SCRIPT).map(|(at, _)| &algorithm[at + SCRIPT.len()..]);
    names.any(|named| named.split([',', ')']).next() == Some(name))
}

/// The contract that lies beside a file, if one does.
///
/// # Errors
/// What is wrong with a contract that is there and cannot be read.
pub fn contract_beside(path: &Path) -> std::io::Result<Option<String>> {
    match read(&path.with_extension("toml")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// The text of a file that may be a script or a trace: an ordinary file that has a size, within the limit of bytes.
///
/// # Errors
/// What is wrong with the file.
pub fn read(path: &Path) -> std::io::Result<String> {
    let refused = |why: String| Err(std::io::Error::other(why));
    // Opening a device can do something, a pipe would be waited for, and files that a kernel makes as they are read (those of
    // /proc), some of which block, say that they have no bytes.
    let looked_at = |metadata: fs::Metadata| match metadata.len() {
        _ if !metadata.is_file() => refused("it is no ordinary file".to_string()),
        0 => refused("it is empty, or has no size, as files of /proc".to_string()),
        bytes if bytes > xml::MAX_BYTES as u64 => refused(format!("it has more than {} bytes", xml::MAX_BYTES)),
        bytes => Ok(bytes),
    };
    looked_at(fs::metadata(path)?)?;
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let bytes = looked_at(file.metadata()?)?;
    let mut text = String::new();
    file.take(bytes).read_to_string(&mut text)?;
    Ok(text)
}
