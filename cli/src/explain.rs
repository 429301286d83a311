//! `strata explain`: which way a collective goes, and why, under the settings of the environment.
//!
//! Shows the whole order of precedence, what each stage says, and what the cost model expects of its best candidates. It asks
//! the library's own selection; nothing is measured and no communicator is made.
#![forbid(unsafe_code)]

use crate::options::{parse_size, Spread};
use std::process::ExitCode;
use std::sync::Arc;
use strata::carrier::{Carrier, Inter};
use strata::config::Config;
use strata::error::{counted, Error, Result};
use strata::plan::Collective;
use strata::selection::table::agree::{Followers, OwnTable};
use strata::selection::table::{has_thresholds, has_thresholds_over, MeasuredOn as Place};
use strata::selection::vendor::{self, Vendor, VendorRules};
use strata::selection::{self, cost, model, Knowledge, Request};
use strata::sim::price::{block_bytes, grid_of, How};
use strata::sim::Cluster;
use strata::topo::{host, Grid};

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
    let knowledge = Knowledge { tuned: Arc::new(tuned(&config, &grid, options)?), machine };
    let question = Question { collective, bytes: options.bytes, grid, config, knowledge };
    let size = counted(question.bytes, "byte");
    outln!("{} of {size} on {}", collective.name(), question.grid);
    match options.over {
        Some(library) => question.explain_over(Vendor { version: options.release, rccl: library == Library::Rccl }),
        None => question.explain_own()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The rows of the tuning table that hold on this machine.
fn tuned(config: &Config, grid: &Arc<Grid>, options: &Options) -> Result<selection::table::Tuned> {
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
    let agreed = local.agree(&local.offer(here, grid.nranks()), &Followers { grid, inter: Some(inter), in_front })?;
    agreed.complaint.iter().for_each(|complaint| tell!("strata: {complaint}"));
    Ok(agreed.tuned)
}

impl Question {
    fn stage(&self, name: &str, says: &str) {
        outln!("  {name:<24} {says}");
    }

    fn stages(&self, over: bool) {
        let Question { collective, config, .. } = self;
        if over {
            let left = if config.leaves_to_vendor(*collective) { "the vendor's" } else { "not named" };
            self.stage("vendor forced", &format!("STRATA_VENDOR_ONLY and NCCL_ALGO: {left}"));
        }
        self.stage("algorithm named", config.algorithm(*collective));
        let given = if over { has_thresholds_over(*collective, config) } else { has_thresholds(*collective, config) };
        self.stage("thresholds of the user", if given { "set" } else { "none set" });
        let table = match (config.tuning_table.as_str(), self.knowledge.tuned.len()) {
            ("none", _) => String::from("none"),
            (path, rows) => format!("{path}: {} for these ranks", counted(rows, "row")),
        };
        self.stage("tuning table", &table);
        match &self.knowledge.machine {
            Some(machine) => {
                self.stage("cost model", &format!("{}: {}", machine.name, machine.text));
                self.candidates(machine, over);
            }
            None if config.machine == model::AUTO && !over => {
                self.stage("cost model", "by the links, which a communicator measures when it is made");
            }
            None => self.stage("cost model", "none (STRATA_MACHINE names no machine)"),
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
            self.stage("", "it does not speak of this collective, or not on one node");
        } else if over && carrier == Carrier::Vendor {
            self.stage("", "rails are the vendor's; STRATA_INTER=mpi or tcp opens Strata's own");
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

    fn explain_own(&self) -> Result<()> {
        self.stages(false);
        let block_bytes = block_bytes(self.collective, self.grid.nranks(), self.bytes);
        let request = Request { collective: self.collective, block_bytes, named: None, board: true };
        let selection = selection::choose(&request, &self.grid, &self.config, &self.knowledge)?;
        let segment = match selection.segment_bytes {
            usize::MAX => String::from("in one segment"),
            bytes => format!("{} of each block at a time", counted(bytes, "byte")),
        };
        outln!("-> {}, {segment}, window {}", selection.choice, selection.window);
        outln!("   because: {}", selection.reason);
        Ok(())
    }

    fn explain_over(&self, vendor: Vendor) {
        self.stages(true);
        let carrier = self.config.inter.in_front();
        let rules = VendorRules::new(&self.grid, &self.config, vendor, carrier).knowing(
            &self.grid,
            &self.config,
            &self.knowledge,
        );
        let block = block_bytes(self.collective, self.grid.nranks(), self.bytes);
        let (f32, sum) = (7, 0);
        let request =
            vendor::VendorRequest { collective: self.collective, count: block.div_ceil(4), dtype: f32, op: sum };
        let (way, why) = match rules.route(&request) {
            vendor::VendorRoute::TwoLevel(why) => ("two levels", why),
            vendor::VendorRoute::Vendor(why) => ("the vendor's library alone", why),
        };
        outln!("-> {way}");
        outln!("   because: {why}");
    }
}
