//! `strata explain`: which way a collective goes, and why, under the settings of the environment.
//!
//! Shows the whole order of precedence, what each stage says, and what the cost model expects of its best candidates. It asks
//! the library's own selection; nothing is measured and no communicator is made.
#![forbid(unsafe_code)]

use crate::options::{parse_size, Spread};
use std::process::ExitCode;
use std::sync::Arc;
use strata::algorithms::{self, levels};
use strata::carrier::{Carrier, Inter};
use strata::config::{Config, Lost};
use strata::error::{counted, Error, Result};
use strata::plan::Collective;
use strata::script::{share, store, SharedScripts};
use strata::selection::table::agree::{Followers, OwnTable};
use strata::selection::table::MeasuredOn as Place;
use strata::selection::vendor::{self, Vendor};

use strata::selection::{
    self, cost, model, strategy, CommCarriers, Context, Executor, Front, Knowledge, Policy, Request, Selection,
    POLICIES,
};
use strata::sim::price::{block_bytes, grid_of, How, PricedPlan};
use strata::sim::Cluster;
use strata::topo::{host, Grid, Rank};
use strata::transport::provider::{self, CommProviders, ProviderSet};

/// The options of the subcommand.
#[derive(clap::Args)]
pub struct Options {
    /// all_reduce, all_gather, reduce_scatter, broadcast, reduce, alltoall, gather or scatter.
    collective: String,
    /// The message: all-gather's output, reduce-scatter's input, else the vector; K, M and G are powers of 1024.
    #[arg(value_parser = parse_size)]
    bytes: usize,
    #[command(flatten)]
    spread: Spread,
    /// The root, for collectives that have one.
    #[arg(long, default_value_t = 0)]
    root: u32,
    /// The machine that the cost model goes by (a name or a file), instead of STRATA_MACHINE.
    #[arg(long)]
    machine: Option<String>,
    /// Explain it for a program that runs over this vendor's library.
    #[arg(long, value_enum)]
    over: Option<Library>,
    /// That library's release, as ncclGetVersion tells it.
    #[arg(long, default_value_t = 22703)]
    release: i32,
}

/// A vendor's library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Library {
    /// NVIDIA's.
    Nccl,
    /// AMD's.
    Rccl,
}

/// Candidates of the cost model that are shown.
const SHOWN: usize = 6;

struct Question {
    collective: Collective,
    bytes: usize,
    root: Rank,
    grid: Arc<Grid>,
    config: Config,
    knowledge: Knowledge,
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<ExitCode> {
    let collective = Collective::from_name(&options.collective).ok_or_else(|| {
        let known = Collective::ALL.map(Collective::name).join(", ");
        Error::InvalidArgument(format!("there is no collective {}; there are {known}", options.collective))
    })?;
    let (_, nodes) = options.spread.resolve()?;
    let (mut config, warnings) = Config::from_env();
    warnings.iter().for_each(|warning| tell!("strata: {warning}"));
    config.machine = options.machine.clone().unwrap_or(config.machine);
    config.vendor_only = vendor::left_to_vendor(&config.vendor_only);
    let machine = model::agree(&model::offer(&config.machine)?)?;
    let mut grid = Arc::new(Grid::from_labels(&nodes));
    match &machine {
        // Who names no nodes means the machine's.
        Some(machine) if grid.nnodes() == 1 && grid.nranks() > machine.ranks_per_node() => {
            grid = grid_of(machine, grid.nranks());
        }
        Some(machine) if grid.nrails() > machine.ranks_per_node() => {
            let (here, there) = (grid.nrails(), machine.ranks_per_node());
            tell!("strata: {} has {there} ranks on a node, and here are {here}", machine.name);
        }
        _ => {}
    }
    // A row of the table, and a setting, may name a script.
    let scripts = scripts(&config, &grid)?;
    let tuned = Arc::new(tuned(&config, &grid, (options, &scripts))?);
    let followed = strategy::agree(&strategy::offer(&config), &config, &grid)?;
    followed.complaint.iter().for_each(|complaint| tell!("strata: {complaint}"));
    let strategies = Arc::new(followed.strategies);
    let knowledge = Knowledge { tuned, scripts: Arc::new(scripts), strategies, machine };
    let (root, nranks) = (Rank(options.root), grid.nranks());
    if root.index() >= nranks {
        return Err(Error::InvalidArgument(format!("there is no root {root} of {}", counted(nranks, "rank"))));
    }
    let question = Question { collective, bytes: options.bytes, root, grid, config, knowledge };
    let size = counted(question.bytes, "byte");
    outln!("{} of {size} on {}", collective.name(), question.grid);
    let vendor = |library| Vendor { version: options.release, rccl: library == Library::Rccl };
    question.explain(options.over.map(vendor))?;
    Ok(ExitCode::SUCCESS)
}

/// The scripts that settings name for so many ranks; those that cannot be used are told.
fn scripts(config: &Config, grid: &Grid) -> Result<SharedScripts> {
    let (nranks, table) = (grid.nranks(), OwnTable::load(config));
    let is_wanted =
        |name: &str, of_script| store::is_wanted(config, nranks, name, of_script) || table.names_script(nranks, name);
    let (offer, complaints) = share::offer(config, &is_wanted);
    complaints.iter().for_each(|complaint| tell!("strata: {complaint}"));
    share::share(&offer, true, &mut |mine| Ok(vec![mine]))
}

/// The rows of the tuning table that hold on this machine.
fn tuned(
    config: &Config,
    grid: &Arc<Grid>,
    (options, scripts): (&Options, &SharedScripts),
) -> Result<selection::table::Tuned> {
    let local = OwnTable::load(config);
    let in_front = options.over.is_some();
    let inter = match (&config.inter, in_front) {
        (Inter::Only(carrier), _) => *carrier,
        (_, true) => Carrier::Vendor,
        (_, false) => Carrier::TCP,
    };
    let here = Place {
        cpu: host::processor_model(),
        device: "host".into(),
        inter: inter.name().into(),
        vendor: "none".into(),
    };
    let world = Followers { grid, inter: Some(inter), in_front, scripts };
    let agreed = local.agree(&local.offer(here, grid.nranks()), &world)?;
    agreed.complaint.iter().for_each(|complaint| tell!("strata: {complaint}"));
    Ok(agreed.tuned)
}

impl Question {
    /// What each policy says of the call, in the order in which they are asked.
    fn opinions(&self, request: &Request<'_>, context: &Context) -> Result<()> {
        for policy in POLICIES {
            // These speak of a vendor library only.
            if context.front.is_none() && matches!(policy, Policy::Conditions | Policy::VendorOnly) {
                continue;
            }
            let says = match policy.opinion(request, context)? {
                Some((executor, reason)) => format!("{}, because: {reason}", what(&executor)),
                None => self.silence(policy, context.front.is_some()),
            };
            outln!("  {:<24} {says}", policy.name());
            self.expected(policy, request, context);
            if let (Policy::CostModel, Some(machine)) = (policy, &self.knowledge.machine) {
                self.candidates(machine, context.front.is_some());
            }
        }
        Ok(())
    }

    /// What the cost model expects of what was named or measured, if that has scripts on its levels.
    fn expected(&self, policy: Policy, request: &Request<'_>, context: &Context) {
        let Some(machine) = self.knowledge.machine.as_ref().filter(|_| context.front.is_none()) else { return };
        let Ok(Some((Executor::Own(Selection { choice, segment_bytes, window, .. }), _))) =
            policy.opinion(request, context)
        else {
            return;
        };
        if !levels::has_script(&choice) {
            return;
        }
        let route = PricedPlan { choice, segment_bytes, window, carrier: Carrier::MPI };
        match cost::Model::new(machine, &self.grid).choice_ns(self.collective, self.bytes, &route) {
            Some(ns) => outln!("  {:<24} {:>10.1} us by the cost model of {}", "", ns / 1e3, machine.name),
            None => outln!("  {:<24} the cost model does not speak of it; `strata simulate` runs it", ""),
        }
    }

    /// Why a policy has no opinion.
    fn silence(&self, policy: Policy, over: bool) -> String {
        let rows = || (self.config.tuning_table.as_str(), self.knowledge.tuned.len());
        match policy {
            Policy::Conditions => "nothing speaks against two levels".to_string(),
            Policy::VendorOnly => "STRATA_VENDOR_ONLY and NCCL_ALGO: not named".to_string(),
            Policy::Named => "none".to_string(),
            Policy::Code => "none set, or not of such calls".to_string(),
            Policy::Script => match self.knowledge.scripts.scripts.len() {
                0 => "none (STRATA_PROGRAM_DIR, MSCCL_ALGO_DIR, MSCCL_XML_FILES)".to_string(),
                known => format!("{} for these ranks, none for this call", counted(known, "script")),
            },
            Policy::Thresholds => "none set".to_string(),
            Policy::Strategy => match self.config.strategy.as_str() {
                "none" => "none".to_string(),
                path => format!("{path}: none for this call, or it is not followed"),
            },
            Policy::TuningTable => match rows() {
                ("none", _) => "none".to_string(),
                (path, rows) => format!("{path}: {} for these ranks, none for this call", counted(rows, "row")),
            },
            Policy::CostModel => match &self.knowledge.machine {
                Some(machine) => format!("{}: {}, no clear win", machine.name, machine.text),
                None if self.config.machine == model::AUTO && self.config.measure_us > 0 && !over => {
                    "by the links, which a communicator measures when it is made".to_string()
                }
                None if self.config.machine == model::AUTO && !over => {
                    "none (STRATA_MACHINE names no machine, and STRATA_MEASURE_US has nothing measured)".to_string()
                }
                None => "none (STRATA_MACHINE names no machine)".to_string(),
            },
            Policy::Defaults => "none".to_string(),
        }
    }

    /// The best ways that are open: over a vendor's library that library itself and what carries the rails there.
    fn candidates(&self, machine: &Cluster, over: bool) {
        let carrier = match self.config.inter.in_front() {
            Carrier::Vendor if !over => Carrier::MPI,
            carrier => carrier,
        };
        let open = |candidate: &&cost::Candidate| match &candidate.how {
            How::Strata(route) => route.carrier.is_own() == carrier.is_own(),
            _ => over,
        };
        let all = cost::candidates(machine, &self.grid, self.collective, self.bytes);
        if all.is_empty() {
            outln!("  {:<24} it does not speak of this collective, or not on one node", "");
        } else if over && carrier == Carrier::Vendor {
            outln!("  {:<24} rails are the vendor's; STRATA_INTER=mpi or tcp opens Strata's own", "");
        }
        for candidate in all.iter().filter(open).take(SHOWN) {
            let way = match &candidate.how {
                How::Vendor => String::from("vendor"),
                How::Strata(route) => {
                    let block = block_bytes(self.collective, self.grid.nranks(), self.bytes);
                    let segments = block.div_ceil(route.segment_bytes.max(1)).max(1);
                    format!("{}, {}, window {}", route.choice, counted(segments, "segment"), route.window)
                }
                other => format!("{other:?}"),
            };
            outln!("  {:<24} {:>10.1} us  {way}", "", candidate.ns / 1e3);
        }
    }

    fn explain(&self, front: Option<Vendor>) -> Result<()> {
        let block_bytes = block_bytes(self.collective, self.grid.nranks(), self.bytes);
        // Of elements that a code makes smaller.
        let code = self.config.code(self.collective);
        let provided = ProviderSet::ALL;
        let request = Request { root: self.root, code, provided, ..Request::new(self.collective, block_bytes) };
        let carrier = self.config.inter.in_front();
        let outlasts = self.config.lost == Lost::Continue && carrier == Carrier::TCP;
        let front = front.map(|library| Front { library, carrier, outlasts });
        let carriers = if front.is_some() { CommCarriers::default() } else { self.carriers()? };
        let own = Context {
            knowledge: self.knowledge.clone(),
            carriers,
            providers: self.providers(front.is_some()),
            on_devices: front.is_some(),
            ..Context::new(self.grid.clone(), self.config.clone(), true)
        };
        let context = Context { front, ..own.clone() };
        self.opinions(&request, &context)?;
        let decision = selection::decide(&request, &context)?;
        if let (Some(_), Executor::Own(_)) = (front, &decision.executor) {
            outln!("Strata's own transports carry it between nodes; the algorithm there:");
            self.opinions(&request, &own)?;
        }
        outln!("-> {}", what(&decision.executor));
        outln!("   decided by: {}", decision.by.name());
        outln!("   because: {}", decision.reason);
        outln!("   carrier: {}", self.carrier(&decision.executor, &context));
        Ok(())
    }

    /// The carriers that a communicator of these settings has where every rank has them.
    fn carriers(&self) -> Result<CommCarriers> {
        let wanted = self.config.carriers.read().map_err(Error::InvalidUsage)?;
        if self.grid.nnodes() == 1 {
            return Ok(CommCarriers::default());
        }
        let own = [&wanted.own, &self.config.inter].into_iter().find_map(|inter| match inter {
            Inter::Only(carrier) => Some(*carrier),
            _ => None,
        });
        let further = wanted.further.iter().map(|wish| wish.carrier).filter(|carrier| Some(*carrier) != own);
        Ok(CommCarriers { own, further: further.collect(), left_out: Vec::new() })
    }

    /// The providers that a communicator of these settings has where every rank has them, as if they took all calls.
    fn providers(&self, in_front: bool) -> Arc<CommProviders> {
        let names = if in_front { Vec::new() } else { provider::names(&self.config) };
        Arc::new(CommProviders::assumed(names.into_iter().map(|(name, _)| name)))
    }

    /// What carries the call's messages between nodes.
    fn carrier(&self, executor: &Executor, context: &Context) -> String {
        if self.grid.nnodes() == 1 {
            return "none, there is one node".to_string();
        }
        if let Executor::Own(Selection { choice, .. }) = executor {
            if let Some(provider) = algorithms::provider_of(choice) {
                return format!("none of Strata's: provider {provider} moves the data its own way");
            }
        }
        match (executor, &context.front) {
            (Executor::Vendor | Executor::SubComms, _) => "vendor".to_string(),
            (_, Some(front)) => front.carrier.name().to_string(),
            (Executor::Own(Selection { carrier: Some(carrier), .. }), _) => {
                format!("{}, beside the communicator's own (STRATA_CARRIERS={})", carrier.name(), self.config.carriers)
            }
            _ => match context.carriers.own {
                Some(own) => format!("{}, the communicator's own", own.name()),
                None => {
                    "the communicator's own: MPI where its launcher started the program and every rank has it, else TCP"
                        .to_string()
                }
            },
        }
    }
}

/// Who runs a call, and how.
fn what(executor: &Executor) -> String {
    match executor {
        Executor::Vendor => "the vendor's library alone".to_string(),
        Executor::SubComms => "two levels".to_string(),
        Executor::Own(Selection { choice, segment_bytes, window, carrier, shares }) => {
            let over = carrier.map_or(String::new(), |carrier| format!(" over {}", carrier.name()));
            let over = if shares.is_some() { over + " with shares of its own for each node" } else { over };
            match *segment_bytes {
                _ if algorithms::provider_of(choice).is_some() => {
                    format!("{choice}{over}, as one call; what the provider takes of types and operations is known when it is open")
                }
                usize::MAX => format!("{choice}{over}, in one segment, window {window}"),
                bytes => format!("{choice}{over}, {} of each block at a time, window {window}", counted(bytes, "byte")),
            }
        }
    }
}
