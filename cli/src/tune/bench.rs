//! Times calls on communicators that were made for one candidate each, in step with the other processes.
//!
//! Which algorithm a communicator runs is read from the environment when it is made, so each candidate has its own, for
//! all collectives alike. They are kept, the most recently used ones, since all sizes come by again.
#![forbid(unsafe_code)]

use super::candidates::Candidate;
use crate::nccl::{Buffers, Comm, HostBuffer, Library, UniqueId};
use crate::perf::bench::Owned;
use crate::perf::collective::{Kind, Place};
use crate::process;
use std::sync::Arc;
use std::time::Instant;
use strata::bootstrap::store::Store;
use strata::config::Config;
use strata::dtype::{DataType, RedOp};
use strata::error::{counted, Error, Result};
use strata::plan::Collective;
use strata::script::{share, SharedScripts};
use strata::selection::table::MeasuredOn;
use strata::topo::{host, Grid};

/// All messages are of floats.
const ELEMENT: DataType = DataType::F32;
/// Bytes of an element.
pub const ELEMENT_BYTES: usize = 4;
/// Candidates whose communicators are kept, on few ranks.
const MOST_KEPT: usize = 24;
/// Links of a rank that they may have in all: each is a file of the process, which may have a thousand.
const MOST_LINKS: usize = 512;
/// Bytes that a description has room for.
const DESCRIPTION_BYTES: usize = 4096;

/// One message.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The collective.
    pub kind: Kind,
    /// Elements in a block.
    pub count: usize,
}

impl Case {
    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.count * ELEMENT_BYTES
    }

    /// Bytes of the larger of the two buffers of some rank.
    fn most_bytes(&self, nranks: usize) -> usize {
        let blocks = self.kind.blocks(Place { rank: 0, nranks, root: 0 });
        blocks.0.max(blocks.1).max(1) * self.block_bytes()
    }
}

/// The ranks of this process.
pub struct Bench<'a> {
    library: &'a Library,
    store: &'a mut Store,
    here: usize,
    grid: Arc<Grid>,
    machine: MeasuredOn,
    /// What calls may choose beside the communicator's own carrier.
    further_carriers: Vec<String>,
    /// The providers, and the collectives that each does.
    providers: Vec<(String, Vec<String>)>,
    strata: String,
    /// Send and receive buffer of each rank.
    owned: Vec<[Owned<'a>; 2]>,
    /// The most recently used last.
    kept: Vec<(Candidate, Vec<Comm<'a>>)>,
    /// Those that candidates may name.
    scripts: SharedScripts,
}

impl<'a> Bench<'a> {
    /// Buffers for these messages, and what there is to know of the machine.
    pub fn new(library: &'a Library, store: &'a mut Store, here: usize, cases: &[Case]) -> Result<Bench<'a>> {
        let nranks = store.size * here;
        let labels = store.all_gather(host::host_id().as_bytes())?;
        let labels: Vec<&Vec<u8>> = labels.iter().flat_map(|label| vec![label; here]).collect();
        let grid = Arc::new(Grid::from_labels(&labels));
        let len = cases.iter().map(|case| case.most_bytes(nranks)).max().unwrap_or(0);
        let needed = 2 * len as u128 * (here * store.here) as u128;
        if needed > u128::from(process::available_memory()) {
            let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
            return Err(Error::InvalidArgument(format!(
                "the largest of --sizes needs {:.1} GiB of memory in {}; this machine has {:.1} GiB left",
                gib(needed),
                counted(store.here, "process"),
                gib(u128::from(process::available_memory()))
            )));
        }
        let mut bench = Bench {
            library,
            store,
            here,
            grid,
            machine: MeasuredOn::default(),
            further_carriers: Vec::new(),
            providers: Vec::new(),
            strata: String::new(),
            owned: Vec::new(),
            kept: Vec::new(),
            scripts: SharedScripts::default(),
        };
        bench.describe()?;
        bench.load_scripts()?;
        let with_vendor = bench.machine.vendor != "none";
        let allocate = || match with_vendor {
            true => library.allocate(len).map(Owned::Nccl),
            false => HostBuffer::try_new(len)
                .map(Owned::Malloc)
                .ok_or_else(|| Error::System(format!("there is no memory for a buffer of {len} bytes"))),
        };
        bench.owned = (0..here).map(|_| Ok([allocate()?, allocate()?])).collect::<Result<_>>()?;
        Ok(bench)
    }

    /// Asks a communicator what it is on.
    fn describe(&mut self) -> Result<()> {
        let comms = self.communicators()?;
        let told = comms[0].describe(DESCRIPTION_BYTES);
        let told: serde_json::Value = serde_json::from_str(&told?).map_err(|error| Error::System(error.to_string()))?;
        let wrong = |_| Error::System(format!("the library describes a communicator as {told}"));
        self.machine = serde_json::from_value(told["machine"].clone()).map_err(wrong)?;
        // A library of before has no others.
        let carriers = told["carriers"].as_array().into_iter().flatten().filter_map(|name| name.as_str());
        self.further_carriers = carriers.filter(|name| *name != self.machine.inter).map(str::to_string).collect();
        let list = |names: &serde_json::Value| -> Vec<String> {
            names.as_array().into_iter().flatten().filter_map(|name| name.as_str()).map(str::to_string).collect()
        };
        let providers = told["providers"].as_object().into_iter().flatten();
        self.providers = providers.map(|(name, collectives)| (name.clone(), list(collectives))).collect();
        self.strata = told["strata"].as_str().unwrap_or_default().to_string();
        comms.into_iter().try_for_each(Comm::destroy)
    }

    /// Loads process 0's scripts for these ranks, for those of a node and for one rank of each, in all processes: candidates are
    /// named by this program, and the library's communicators have what settings name.
    fn load_scripts(&mut self) -> Result<()> {
        let grid = self.grid.clone();
        let on_level =
            |nranks: usize| nranks == grid.nnodes() || grid.node_ids().any(|node| grid.members(node).len() == nranks);
        let has_levels = grid.nnodes() > 1 && grid.nrails() > 1;
        let is_wanted = |_: &str, nranks: usize| nranks == grid.nranks() || (has_levels && on_level(nranks));
        // The communicator has told what is wrong with files; those for levels are told here.
        let (offer, complaints) = match self.is_first() {
            true => share::offer(&Config::from_env().0, &is_wanted),
            false => (String::new(), Vec::new()),
        };
        complaints.iter().for_each(|complaint| tell!("strata: {complaint}"));
        let (offer, is_first) = (self.first_says(Ok(offer))?, self.is_first());
        self.scripts = share::share(&offer, is_first, &mut |mine| self.store.all_gather(&mine))?;
        Ok(())
    }

    /// The scripts that candidates may name.
    pub fn scripts(&self) -> &SharedScripts {
        &self.scripts
    }

    /// Who is where.
    pub fn grid(&self) -> &Arc<Grid> {
        &self.grid
    }

    /// What a table says of the machine; process 0's is the one that counts.
    pub fn machine(&self) -> &MeasuredOn {
        &self.machine
    }

    /// What calls may choose beside the communicator's own carrier.
    pub fn further_carriers(&self) -> &[String] {
        &self.further_carriers
    }

    /// The providers that do a collective, by name.
    pub fn providers(&self, collective: Collective) -> impl Iterator<Item = &str> {
        let does = move |names: &[String]| names.iter().any(|name| name == collective.name());
        self.providers.iter().filter(move |(_, names)| does(names)).map(|(name, _)| name.as_str())
    }

    /// The library's version.
    pub fn strata(&self) -> &str {
        &self.strata
    }

    /// Whether this is process 0, which speaks and writes.
    pub fn is_first(&self) -> bool {
        self.store.rank == 0
    }

    /// Seconds since then, by process 0's clock.
    pub fn elapsed(&mut self, start: Instant) -> Result<f64> {
        number(&self.store.broadcast(&start.elapsed().as_secs_f64().to_bits().to_le_bytes())?)
    }

    /// Process 0's text, on all; its failure is everybody's.
    pub fn first_says(&mut self, mine: Result<String>) -> Result<String> {
        let bytes = match (&mine, self.is_first()) {
            (Ok(text), true) => [b"+", text.as_bytes()].concat(),
            (Err(error), true) => [b"-", error.text().as_bytes()].concat(),
            _ => Vec::new(),
        };
        let told = self.store.broadcast(&bytes)?;
        let text = String::from_utf8_lossy(told.get(1..).unwrap_or_default()).into_owned();
        match (told.first(), mine) {
            (Some(b'+'), _) => Ok(text),
            (_, Err(error)) => Err(error),
            _ => Err(Error::Remote(format!("process 0: {text}"))),
        }
    }

    /// One communicator for each rank of this process, by the environment as it is.
    fn communicators(&mut self) -> Result<Vec<Comm<'a>>> {
        if self.store.size == 1 {
            return self.library.init_all(self.here);
        }
        let id = if self.is_first() { self.library.unique_id()?.as_bytes().to_vec() } else { Vec::new() };
        let id = UniqueId::from_bytes(&self.store.broadcast(&id)?)?;
        self.library.init_ranks(self.store.size * self.here, id, self.store.rank * self.here, self.here)
    }

    /// The place in `kept` of a candidate's communicators.
    fn place(&mut self, candidate: &Candidate) -> Result<usize> {
        if let Some(at) = self.kept.iter().position(|(known, _)| known == candidate) {
            let used = self.kept.remove(at);
            self.kept.push(used);
            return Ok(self.kept.len() - 1);
        }
        if self.kept.len() >= (MOST_LINKS / (2 * self.grid.nranks())).clamp(2, MOST_KEPT) {
            let (_, comms) = self.kept.remove(0);
            comms.into_iter().try_for_each(Comm::destroy)?;
        }
        let settings = Settings::of(candidate, &self.scripts);
        let comms = self.communicators();
        drop(settings);
        self.kept.push((candidate.clone(), comms?));
        Ok(self.kept.len() - 1)
    }

    /// Seconds of each of `samples` times `calls` calls in a row, on the slowest process, by the call; nothing if the
    /// candidate cannot do it.
    pub fn time(
        &mut self,
        candidate: &Candidate,
        case: &Case,
        (samples, calls): (usize, usize),
    ) -> Result<Option<Vec<f64>>> {
        let at = self.place(candidate)?;
        let mut times = Vec::with_capacity(samples);
        for _ in 0..samples {
            self.store.barrier()?;
            let start = Instant::now();
            let outcome = (0..calls).try_for_each(|_| self.call(at, case));
            // An infinite time tells the others that it has failed here.
            times.push(outcome.map_or(f64::INFINITY, |()| start.elapsed().as_secs_f64() / calls as f64));
            if times.last() == Some(&f64::INFINITY) {
                break;
            }
        }
        times.resize(samples, f64::INFINITY);
        let bytes: Vec<u8> = times.iter().flat_map(|time| time.to_bits().to_le_bytes()).collect();
        let mut slowest = vec![0.0f64; samples];
        for theirs in self.store.all_gather(&bytes)? {
            for (slowest, bits) in slowest.iter_mut().zip(theirs.chunks(8)) {
                *slowest = slowest.max(number(bits)?);
            }
        }
        if slowest.iter().any(|time| time.is_infinite()) {
            // Ends them as after a failure: they may have one.
            drop(self.kept.remove(at));
            return Ok(None);
        }
        Ok(Some(slowest))
    }

    fn call(&mut self, at: usize, case: &Case) -> Result<()> {
        let (nranks, first) = (self.grid.nranks(), self.store.rank * self.here);
        let block = case.block_bytes();
        let buffers: Vec<(Buffers, Place)> = (self.owned.iter_mut().enumerate())
            .map(|(index, [send, recv])| {
                let place = Place { rank: first + index, nranks, root: 0 };
                let (sent, received) = case.kind.blocks(place);
                let (send, recv) = (send.region().part(0, sent * block), recv.region().part(0, received * block));
                (Buffers { send, recv, count: case.count, dtype: ELEMENT }, place)
            })
            .collect();
        let comms = &self.kept[at].1;
        let issue = || {
            let mut all = comms.iter().zip(&buffers);
            all.try_for_each(|(comm, (buffers, place))| case.kind.issue(comm, buffers, RedOp::Sum.code(), *place))
        };
        match comms.len() {
            1 => issue(),
            _ => self.library.group(issue),
        }
    }

    /// Ends all communicators; after a failure of this process alone they are only dropped.
    pub fn finish(self, in_order: bool) -> Result<()> {
        let comms = self.kept.into_iter().flat_map(|(_, comms)| comms);
        match in_order {
            true => comms.into_iter().try_for_each(Comm::destroy),
            false => Ok(()),
        }
    }
}

fn number(bytes: &[u8]) -> Result<f64> {
    let bytes = bytes.try_into().map_err(|_| Error::Remote("a number that is not 8 bytes long".into()))?;
    Ok(f64::from_bits(u64::from_le_bytes(bytes)))
}

/// A candidate's variables, in the environment while this lives.
struct Settings(Vec<(String, Option<String>)>);

impl Settings {
    fn of(candidate: &Candidate, scripts: &SharedScripts) -> Settings {
        let does = |collective: &Collective| candidate.does(*collective, scripts);
        let algorithms = Collective::ALL.into_iter().filter(does).map(|collective| {
            let name = collective.name().replace('_', "").to_ascii_uppercase();
            (format!("STRATA_{name}_ALGO"), candidate.algorithm.clone())
        });
        let numbers = [("STRATA_SEGMENT_BYTES", candidate.segment_bytes), ("STRATA_WINDOW", candidate.window)];
        let numbers = numbers.into_iter().filter(|(_, value)| *value > 0);
        let wanted = algorithms.chain(numbers.map(|(name, value)| (name.to_string(), value.to_string())));
        let set = |(name, value): (String, String)| {
            let before = std::env::var(&name).ok();
            std::env::set_var(&name, value);
            (name, before)
        };
        Settings(wanted.map(set).collect())
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (name, before) in &self.0 {
            match before {
                Some(value) => std::env::set_var(name, value),
                None => std::env::remove_var(name),
            }
        }
    }
}
