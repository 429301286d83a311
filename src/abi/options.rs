//! `ncclConfig_t` and `ncclCollConfig_t`: what programs ask for, of whatever release their header is.
//!
//! A field counts if the structure is long enough to hold it *and* the program's release has it (two releases put new
//! fields into the padding of the one before) *and* it was set. Values that NCCL refuses are refused; values that only
//! mean something on a GPU are checked and have no further effect.
#![cfg_attr(not(test), forbid(unsafe_code))]

use crate::algorithms;
use crate::carrier::Carrier;
use crate::code::FloatCode;
use crate::communicator::CommOptions;
use crate::error::{Error, Result};
use crate::interface::layouts::{read_versioned, CollConfig, NcclConfig, UNDEFINED};
use crate::interface::pointer::{ConstPtr, Text};
use crate::plan::Collective;
use crate::script::SharedScripts;
use crate::selection::{self, CarriedName};
use crate::topo::Grid;
use std::ffi::c_int;
use std::sync::{Arc, Once};

/// What a value may be.
type Check = fn(c_int) -> bool;

const SWITCH: Check = |value| value == 0 || value == 1;
const POSITIVE: Check = |value| value > 0;
const NATURAL: Check = |value| value >= 0;

/// A field of `ncclConfig_t`: its name, the release that has it, where it is, what it may be.
type Field = (&'static str, u32, fn(&NcclConfig) -> c_int, Check);

const FIELDS: &[Field] = &[
    ("blocking", 21400, |config| config.blocking, SWITCH),
    ("cgaClusterSize", 21700, |config| config.cga_cluster_size, NATURAL),
    ("minCTAs", 21700, |config| config.min_ctas, POSITIVE),
    ("maxCTAs", 21700, |config| config.max_ctas, POSITIVE),
    ("splitShare", 21800, |config| config.split_share, SWITCH),
    ("collnetEnable", 22700, |config| config.collnet_enable, SWITCH),
    ("CTAPolicy", 22700, |config| config.cta_policy, |value| (0..=3).contains(&value)),
    ("shrinkShare", 22700, |config| config.shrink_share, SWITCH),
    ("nvlsCTAs", 22700, |config| config.nvls_ctas, POSITIVE),
    ("nChannelsPerNetPeer", 22800, |config| config.n_channels_per_net_peer, POSITIVE),
    ("nvlinkCentricSched", 22800, |config| config.nvlink_centric_sched, SWITCH),
    ("graphUsageMode", 22900, |config| config.graph_usage_mode, |value| (0..=2).contains(&value)),
    ("numRmaCtx", 22900, |config| config.num_rma_ctx, POSITIVE),
    ("maxP2pPeers", 23000, |config| config.max_p2p_peers, POSITIVE),
    ("graphStreamOrdering", 23005, |config| config.graph_stream_ordering, SWITCH),
];

/// Fields that mean something here too, or whose meaning is met anyway: resources are not shared, which nobody sees.
const KEPT: [&str; 3] = ["blocking", "splitShare", "shrinkShare"];

/// The value of a field, if the program has set it.
fn set(config: &NcclConfig, since: u32, value: c_int) -> Option<c_int> {
    (config.head.version >= since && value != UNDEFINED).then_some(value)
}

fn text(config: &NcclConfig, since: u32, value: Text, name: &str) -> Result<Option<String>> {
    match config.head.version >= since && !value.is_null() {
        true => value.get(name).map(Some),
        false => Ok(None),
    }
}

/// `NCCL_COMM_BLOCKING`, which counts for more than the program's own wish.
fn blocking_by_environment() -> Option<bool> {
    match std::env::var("NCCL_COMM_BLOCKING").ok()?.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Whether calls on a communicator wait, as the environment or its configuration says; without one, as on its parent.
pub fn waits(pointer: ConstPtr<NcclConfig>) -> Option<bool> {
    let configured = || match pointer.is_null() {
        true => None,
        false => read_versioned(pointer).ok().map(|config| set(&config, 21400, config.blocking) != Some(0)),
    };
    blocking_by_environment().or_else(configured)
}

/// The options in a configuration; without one those of the parent, or the defaults.
pub fn communicator(pointer: ConstPtr<NcclConfig>, parent: Option<&CommOptions>) -> Result<CommOptions> {
    let mut options = match (pointer.is_null(), parent) {
        (true, Some(parent)) => parent.clone(),
        (true, None) => CommOptions::default(),
        (false, _) => parse(&read_versioned(pointer)?)?,
    };
    options.on_host = parent.and_then(|parent| parent.on_host);
    // The variable is about the program's communicators of NCCL.
    if let (None, Some(blocking)) = (options.on_host, blocking_by_environment()) {
        options.blocking = blocking;
    }
    Ok(options)
}

fn parse(config: &NcclConfig) -> Result<CommOptions> {
    for (name, since, field, check) in FIELDS {
        if let Some(value) = set(config, *since, field(config)).filter(|value| !check(*value)) {
            return Err(Error::InvalidArgument(format!("invalid config {name} attribute value {value}")));
        }
    }
    let least = set(config, 21700, config.min_ctas);
    let most = set(config, 21700, config.max_ctas);
    if let (Some(least), Some(most)) = (least, most) {
        if least > most {
            let text = format!("invalid config min/max CTAs attribute values {least}/{most}");
            return Err(Error::InvalidArgument(text));
        }
    }
    text(config, 21700, config.net_name, "netName")?;
    tell_ignored(config);
    Ok(CommOptions {
        blocking: set(config, 21400, config.blocking) != Some(0),
        name: text(config, 22700, config.comm_name, "commName")?,
        split_share: set(config, 21800, config.split_share) == Some(1),
        ..CommOptions::default()
    })
}

/// Says once which fields a program sets that mean something on a GPU only.
fn tell_ignored(config: &NcclConfig) {
    static TOLD: Once = Once::new();
    let number = |(name, since, field, _): &Field| set(config, *since, field(config)).map(|_| *name);
    let mut names: Vec<&str> = FIELDS.iter().filter_map(number).filter(|name| !KEPT.contains(name)).collect();
    names.extend(set(config, 22602, config.traffic_class).map(|_| "trafficClass"));
    names.extend((config.head.version >= 21700 && !config.net_name.is_null()).then_some("netName"));
    if !names.is_empty() {
        TOLD.call_once(|| crate::info!("ncclConfig_t: without a meaning on the host device: {}", names.join(", ")));
    }
}

/// The algorithm that a call asks for.
#[derive(Debug, PartialEq, Eq)]
pub struct Wish {
    /// Its name, NCCL's or ours.
    pub name: String,
    /// Whether the call must fail where it cannot be had.
    pub forced: bool,
}

impl Wish {
    /// Our name for it. What cannot be had is an error if it is forced; else Strata chooses.
    /// `carries` says whether the communicator has a carrier.
    pub fn settle(
        self,
        collective: Collective,
        grid: &Arc<Grid>,
        scripts: &SharedScripts,
        carries: impl FnOnce(Carrier) -> Result<()>,
    ) -> Result<Option<String>> {
        let name = CarriedName::parse(&self.name).and_then(|name| name.carrier.map_or(Ok(()), carries).map(|()| name));
        let name = match name {
            Err(_) if !self.forced => return Ok(None),
            name => name?,
        };
        if name.algorithm().is_none() {
            return Ok(Some(self.name));
        }
        match selection::by_nccl_name(name.algorithm, collective, grid, scripts) {
            Some(choice) => Ok(Some(name.with(&choice.exact()))),
            // On one node nothing is coded.
            None if grid.nnodes() == 1 && is_code_for(name.algorithm, collective) => Ok(None),
            None if self.forced => {
                let codes = FloatCode::ALL.into_iter();
                let codes = codes.filter(|code| algorithms::coded_choice(*code, collective, grid).is_some());
                let choices = algorithms::choices_with(collective, grid, &scripts.unique_names());
                let known: Vec<String> =
                    choices.iter().map(ToString::to_string).chain(codes.map(|code| code.name().to_string())).collect();
                let near = known.iter().map(|known| (strsim::damerau_levenshtein(known, name.algorithm), known)).min();
                let near = near.filter(|(far, known)| *far <= known.len().div_ceil(3));
                Err(Error::InvalidUsage(format!(
                    "algSelection {} stands for no algorithm that does {} on {grid}; {}there are {}, and forceAlgSelection = 0 \
                     leaves the choice to Strata",
                    self.name,
                    collective.name(),
                    near.map_or(String::new(), |(_, near)| format!("did you mean {near}? ")),
                    known.join(", ")
                )))
            }
            None => Ok(None),
        }
    }
}

/// Whether that is the name of a code in which this collective's messages can be.
fn is_code_for(name: &str, collective: Collective) -> bool {
    let is_code = FloatCode::ALL.iter().any(|code| code.name() == name);
    is_code && algorithms::coded::BF16.collectives.contains(&collective)
}

/// The tag that a collective's configuration gives it for traces; 0 for none.
pub fn tag(pointer: ConstPtr<CollConfig>) -> Result<u64> {
    match pointer.is_null() {
        true => Ok(0),
        false => read_versioned(pointer).map(|config| config.user_profiler_tag),
    }
}

/// The algorithm that a collective's configuration asks for.
pub fn collective(pointer: ConstPtr<CollConfig>) -> Result<Option<Wish>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let config = read_versioned(pointer)?;
    let fields: [(&str, c_int, Check); 6] = [
        ("minCTAs", config.min_ctas, POSITIVE),
        ("maxCTAs", config.max_ctas, POSITIVE),
        ("nvlsCTAs", config.nvls_ctas, POSITIVE),
        ("cgaClusterSize", config.cga_cluster_size, NATURAL),
        ("forceAlgSelection", config.force_alg_selection, SWITCH),
        ("CTAPolicy", config.cta_policy, |value| (0..=3).contains(&value)),
    ];
    for (name, value, check) in fields {
        if value != UNDEFINED && !check(value) {
            return Err(Error::InvalidArgument(format!("invalid collective config {name} attribute value {value}")));
        }
    }
    if config.head.version >= 23200 && config.launch_completion_event != 0 {
        return Err(Error::InvalidUsage("launchCompletionEvent is a CUDA event; the host device has none".to_string()));
    }
    if config.alg_selection.is_null() {
        return Ok(None);
    }
    let selection = config.alg_selection.get("algSelection")?;
    // What is not set is forced, as in NCCL.
    let forced = config.force_alg_selection != 0;
    Ok(Some(selection).filter(|name| !name.is_empty()).map(|name| Wish { name, forced }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::layouts::{Versioned, MAGIC};
    use crate::interface::pointer::Ptr;

    fn at<T>(place: &mut T) -> ConstPtr<T> {
        // SAFETY: the place must be there while it is read; because tests read at once.
        unsafe { Ptr::to(place) }.as_const()
    }

    fn parsed(config: &mut NcclConfig) -> Result<CommOptions> {
        communicator(at(config), None)
    }

    #[test]
    fn a_field_counts_only_if_the_program_s_release_has_it() {
        let mut config = NcclConfig { blocking: 0, split_share: 1, ..NcclConfig::DEFAULT };
        assert!(parsed(&mut config).unwrap().split_share);
        config.head.version = 21703;
        let options = parsed(&mut config).unwrap();
        assert!(!options.split_share && !options.blocking);
        // The padding behind an old structure may hold anything.
        config.graph_stream_ordering = 77;
        config.head.version = 23003;
        assert!(parsed(&mut config).is_ok());
        config.head.version = 23005;
        assert_eq!(parsed(&mut config).err().unwrap().code(), 4);
    }

    #[test]
    fn nothing_beyond_the_program_s_size_is_read() {
        let mut config = NcclConfig { blocking: 0, min_ctas: -9, ..NcclConfig::DEFAULT };
        config.head.size = 24;
        assert!(!parsed(&mut config).unwrap().blocking, "minCTAs begins at byte 24");
        config.head.size = 1000;
        assert_eq!(parsed(&mut config).err().unwrap().code(), 4, "a longer structure of a newer release");
        config.head.size = 16;
        assert_eq!(parsed(&mut config).err().unwrap().code(), 4);
    }

    #[test]
    fn an_uninitialised_configuration_is_refused() {
        let mut config = NcclConfig::DEFAULT;
        config.head.magic = MAGIC + 1;
        assert!(parsed(&mut config).err().unwrap().text().contains("not initialized"));
        let mut config = CollConfig::DEFAULT;
        config.head.magic = 0;
        assert_eq!(collective(at(&mut config)).err().unwrap().code(), 4);
    }

    #[test]
    fn on_one_node_a_code_is_taken_and_nothing_is_coded() {
        let settled = |nodes: &[usize], collective_of: Collective| {
            let mut config = CollConfig { alg_selection: Text::to(c"mx8"), ..CollConfig::DEFAULT };
            let wish = collective(at(&mut config)).unwrap().expect("a wish");
            let grid = Arc::new(Grid::blocks(nodes));
            wish.settle(collective_of, &grid, &SharedScripts::default(), |_| Ok(()))
        };
        assert_eq!(settled(&[4], Collective::AllReduce).unwrap(), None);
        assert!(settled(&[2, 2], Collective::AllReduce).unwrap().is_some_and(|name| name.contains("coded_mx8")));
        assert!(settled(&[4], Collective::Broadcast).is_err());
    }

    #[test]
    fn a_forced_algorithm_must_be_had_and_a_wish_need_not() {
        let grid = Arc::new(Grid::blocks(&[2, 2]));
        let settled = |config: &mut CollConfig| {
            let wish = collective(at(config))?.expect("a wish");
            wish.settle(Collective::AllReduce, &grid, &SharedScripts::default(), |carrier| match carrier {
                Carrier::MPI => Ok(()),
                _ => Err(Error::InvalidUsage("not here".to_string())),
            })
        };
        let mut config = CollConfig { alg_selection: Text::to(c"RING_SIMPLE"), ..CollConfig::DEFAULT };
        assert_eq!(settled(&mut config).unwrap().as_deref(), Some("ring"));
        config.force_alg_selection = 0;
        assert_eq!(settled(&mut config).unwrap().as_deref(), Some("ring"));
        config.alg_selection = Text::to(c"NVLS_SIMPLE");
        assert_eq!(settled(&mut config).unwrap(), None);
        for (name, known) in
            [(c"RING_SIMPLE@mpi", Some("ring@mpi")), (c"auto@mpi", Some("auto@mpi")), (c"ring@tcp", None)]
        {
            config.alg_selection = Text::to(name);
            assert_eq!(settled(&mut config).unwrap().as_deref(), known);
        }
        config.alg_selection = Text::to(c"ring@tpc");
        assert_eq!(settled(&mut config).unwrap(), None);
        config.force_alg_selection = 1;
        assert!(settled(&mut config).unwrap_err().text().contains("did you mean tcp?"));
        config.alg_selection = Text::to(c"ring@tcp");
        assert_eq!(settled(&mut config).err().unwrap().text(), "not here");
        config.alg_selection = Text::to(c"NVLS_SIMPLE");
        assert_eq!(settled(&mut config).err().unwrap().code(), 5);
        config.force_alg_selection = 2;
        assert_eq!(collective(at(&mut config)).err().unwrap().code(), 4);
    }
}
