//! Every environment variable of Strata, once: name, type, default, text.
//!
//! The table below is the only place that names a `STRATA_` variable. The [`Config`] struct, its defaults, the check for
//! misspelt names, `strata info --env` and the table of docs/environment.md come from it. Variables marked *agreed* decide
//! what all ranks must decide alike: rank 0's values are sent to all when a communicator is made.
#![forbid(unsafe_code)]

use crate::carrier::{Carriers, DeviceSetting, Inter, Switch};
use crate::code::{CodeSetting, FloatCode};
use crate::plan::Collective;
use crate::process::is_elevated;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// One variable, as data.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name in the environment.
    pub name: &'static str,
    /// Its default, as text.
    pub default: &'static str,
    /// Whether rank 0's value counts for all ranks.
    pub agreed: bool,
    /// What it does, with its unit.
    pub text: &'static str,
}

/// A value that is not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The value; empty if there is none.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Secret, Self::Err> {
        Ok(Secret(if text == "none" { String::new() } else { text.to_string() }))
    }
}

impl Display for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "(not shown)" })
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Display::fmt(self, f)
    }
}

/// What is said of a text that is none of these words: the nearest one, if one is near, else what is wanted.
fn meant(text: &str, words: &[&str], wanted: &str) -> String {
    let near = words.iter().map(|word| (strsim::damerau_levenshtein(word, text), word)).min();
    let near = near.filter(|(distance, _)| *distance <= 2);
    near.map_or_else(|| wanted.to_string(), |(_, word)| format!("did you mean {word}?"))
}

/// A setting that is one of a few words.
macro_rules! words {
    ($(#[doc = $doc:literal])* $name:ident { $($(#[doc = $of:literal])* $variant:ident = $text:literal),* }, $wanted:literal) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[doc = $of])* $variant),*
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<$name, String> {
                match text {
                    $($text => Ok($name::$variant),)*
                    _ => Err(meant(text, &[$($text),*], $wanted)),
                }
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $($name::$variant => $text),*
                })
            }
        }
    };
}

words! {
    /// Which calls of a group become one call.
    Fuse {
        /// All that can.
        All = "all",
        /// Those that reduce nothing.
        Moves = "moves",
        /// None.
        Off = "off"
    },
    "one of all, moves and off is wanted"
}

words! {
    /// By which NICs of its node a rank's large messages go over TCP.
    TcpNics {
        /// By all in calls that load ranks unevenly, else by its own.
        Auto = "auto",
        /// By all.
        All = "all",
        /// By its own.
        Own = "own"
    },
    "one of auto, all and own is wanted"
}

words! {
    /// What becomes of a communicator when ranks are lost.
    Lost {
        /// Its calls fail.
        Fail = "fail",
        /// The others go on without them.
        Continue = "continue"
    },
    "one of fail and continue is wanted"
}

words! {
    /// What becomes of calls for which ranks are late.
    Late {
        /// The others wait.
        Wait = "wait",
        /// Those who are late relay what the others reduce, and their own part is added when they come.
        Relay = "relay"
    },
    "one of wait and relay is wanted"
}

/// Whether messages between nodes are coded without loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LosslessSetting {
    /// Never.
    Off,
    /// By zstd, where the link is slow enough.
    Zstd,
    /// By zstd, however fast the link is.
    Always,
}

impl LosslessSetting {
    const NAMES: [(&'static str, LosslessSetting); 3] =
        [("off", LosslessSetting::Off), ("zstd", LosslessSetting::Zstd), ("always", LosslessSetting::Always)];
}

impl FromStr for LosslessSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<LosslessSetting, String> {
        let spelt = match text {
            "0" | "no" | "none" => "off",
            "1" | "on" | "yes" => "zstd",
            text => text,
        };
        let known = LosslessSetting::NAMES.into_iter().find(|(name, _)| *name == spelt);
        let names = LosslessSetting::NAMES.map(|(name, _)| name);
        let wrong = || meant(text, &names, "one of off, zstd and always is wanted");
        known.map(|(_, setting)| setting).ok_or_else(wrong)
    }
}

impl Display for LosslessSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name =
            LosslessSetting::NAMES.into_iter().find(|(_, setting)| setting == self).map_or("off", |(name, _)| name);
        f.write_str(name)
    }
}

macro_rules! variables {
    ($($name:literal $field:ident: $type:ty = $default:literal, $agreed:ident, $text:literal;)*) => {
        /// All variables, in the order of the table.
        pub const VARIABLES: &[Variable] = &[$(
            Variable { name: $name, default: $default, agreed: variables!(@$agreed), text: $text },
        )*];

        /// The settings of one process, or of one communicator once rank 0's have been taken over.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $(#[doc = $text] pub $field: $type,)*
            /// The variables that somebody has set, whatever to; of the agreed ones those that rank 0 has.
            pub given: BTreeSet<String>,
        }

        impl Default for Config {
            fn default() -> Config {
                Config {
                    $($field: $default.parse().expect("a default of the table parses"),)*
                    given: BTreeSet::new(),
                }
            }
        }

        impl Config {
            /// Sets one variable from its text; `None` where there is no such variable. The error says why the text is not
            /// of its type.
            pub fn set(&mut self, name: &str, value: &str) -> Option<Result<(), String>> {
                match name {
                    $($name => Some(assign(&mut self.$field, value)),)*
                    _ => None,
                }
            }

            /// The text of one variable.
            pub fn get(&self, name: &str) -> Option<String> {
                match name {
                    $($name => Some(self.$field.to_string()),)*
                    _ => None,
                }
            }
        }
    };
    (@agreed) => { true };
    (@local) => { false };
}

variables! {
    "STRATA_NCCL_LIB" nccl_lib: String = "auto", local,
        "Path of the vendor library (NCCL or RCCL). auto: look for one. none: use none; Strata then serves all calls, on the host or on the program's GPU (STRATA_DEVICE).";
    "STRATA_DISABLE" disable: bool = "false", local,
        "Pass every call unchanged to the vendor library.";
    "STRATA_VENDOR_ONLY" vendor_only: String = "none", agreed,
        "Collectives that the vendor library always serves, separated by commas: allgather, reducescatter, allreduce.";
    "STRATA_TWO_LEVEL_MIN_NODES" two_level_min_nodes: usize = "8", agreed,
        "Fewest nodes on which Strata takes all-gathers and reduce-scatters over from the vendor library by default.";
    "STRATA_VENDOR_SCRATCH_BYTES" vendor_scratch_bytes: usize = "268435456", agreed,
        "Most device memory, in bytes, that a two-level collective over the vendor library may take in addition to the program's.";
    "STRATA_DEVICE" device: DeviceSetting = "auto", local,
        "Where buffers are if there is no vendor library. auto: on the GPU that is current when a communicator is made, if the program has loaded a driver and made a GPU current, else on the host. host: on the host.";
    "STRATA_TIMEOUT_MS" timeout_ms: u64 = "600000", agreed,
        "Milliseconds a collective may wait for another rank before it ends with ncclTimeout; 0 waits for ever.";
    "STRATA_BOOTSTRAP_TIMEOUT_MS" bootstrap_timeout_ms: u64 = "300000", local,
        "Milliseconds the ranks may take to meet when a communicator is made; 0 waits for ever.";
    "STRATA_COMM_KEY" comm_key: Secret = "none", local,
        "A secret that all processes of the job share. With NCCL_COMM_ID, nobody without it can take a rank's place (SECURITY.md).";
    "STRATA_SEGMENT_BYTES" segment_bytes: usize = "0", agreed,
        "Bytes of each block that a pipelined collective handles at a time; 0: Strata chooses.";
    "STRATA_WINDOW" window: usize = "4", agreed,
        "Segments in flight at once.";
    "STRATA_SCRATCH_BYTES" scratch_bytes: usize = "4194304", agreed,
        "Most scratch memory of a communicator, in bytes, for all segments in flight together; four times the default for collectives in a code in host memory.";
    "STRATA_PINNED_BYTES" pinned_bytes: usize = "16777216", local,
        "Bytes of pinned host memory of a communicator on a GPU, for messages between the device and the network. Messages that do not fit go through ordinary memory and are copied once more; raise it for large segments.";
    "STRATA_ALLREDUCE_ALGO" all_reduce_algo: String = "auto", agreed,
        "Algorithm of ncclAllReduce; `strata info --algorithms` lists them. In front of a vendor library: vendor or two_level; with STRATA_INTER=mpi or tcp any of them.";
    "STRATA_ALLGATHER_ALGO" all_gather_algo: String = "auto", agreed,
        "Algorithm of ncclAllGather.";
    "STRATA_REDUCESCATTER_ALGO" reduce_scatter_algo: String = "auto", agreed,
        "Algorithm of ncclReduceScatter.";
    "STRATA_BROADCAST_ALGO" broadcast_algo: String = "auto", agreed,
        "Algorithm of ncclBroadcast and ncclBcast.";
    "STRATA_REDUCE_ALGO" reduce_algo: String = "auto", agreed,
        "Algorithm of ncclReduce.";
    "STRATA_ALLTOALL_ALGO" all_to_all_algo: String = "auto", agreed,
        "Algorithm of ncclAlltoAll.";
    "STRATA_GATHER_ALGO" gather_algo: String = "auto", agreed,
        "Algorithm of ncclGather.";
    "STRATA_SCATTER_ALGO" scatter_algo: String = "auto", agreed,
        "Algorithm of ncclScatter.";
    "STRATA_ALLREDUCE_CODE" all_reduce_code: CodeSetting = "none", agreed,
        "Form of the messages of ncclAllReduce between nodes: bf16, mx8 (blocks of fp8 that share a scale) or int8 (blocks of integers that do); none: as they are. Of float32 and float64, by mx8 and int8 also of float16 and bfloat16; of other types as they are. Results lose precision.";
    "STRATA_ALLGATHER_CODE" all_gather_code: CodeSetting = "none", agreed,
        "The same for ncclAllGather.";
    "STRATA_REDUCESCATTER_CODE" reduce_scatter_code: CodeSetting = "none", agreed,
        "The same for ncclReduceScatter.";
    "STRATA_ALLTOALL_CODE" all_to_all_code: CodeSetting = "none", agreed,
        "The same for ncclAlltoAll.";
    "STRATA_CODE_MIN_BYTES" code_min_bytes: usize = "65536", agreed,
        "Collectives of fewer bytes go as they are, whatever form is set; one whose call names a code is coded.";
    "STRATA_ALLREDUCE_ONE_ROUND_MAX_BYTES" one_round_max_bytes: usize = "131072", agreed,
        "All-reduces in which a rank receives at most this many bytes exchange whole vectors (one round on a node, log2 p rounds between nodes).";
    "STRATA_BOARD" board: bool = "true", agreed,
        "Ranks of a single node exchange data through a shared buffer (a board), if all of them share memory.";
    "STRATA_ALLREDUCE_RD_MAX_BYTES" all_reduce_rd_max_bytes: usize = "67108864", agreed,
        "All-reduces of at most this many bytes take a logarithmic number of rounds between nodes; larger ones use a ring.";
    "STRATA_ALLGATHER_RD_MAX_BYTES" all_gather_rd_max_bytes: usize = "67108864", agreed,
        "The same for all-gather, in bytes of its output.";
    "STRATA_REDUCESCATTER_RD_MAX_BYTES" reduce_scatter_rd_max_bytes: usize = "67108864", agreed,
        "The same for reduce-scatter, in bytes of its input.";
    "STRATA_TUNING_TABLE" tuning_table: String = "none", local,
        "Path of a tuning table: written by `strata tune`, or rows of NCCL's tuner plugin. All ranks use rank 0's table.";
    "STRATA_STRATEGY" strategy: String = "none", local,
        "Path of a file of strategies, written by `strata synthesize`: algorithm, segments, and shares of all-reduces for each node, by collective and size. All ranks use rank 0's file. One that is malformed, not proved or for another grid is refused with one warning, and thresholds decide (docs/user.md#strategies).";
    "STRATA_PROGRAM_DIR" program_dir: String = "none", local,
        "Folder of algorithms in MSCCL's XML. Rank 0 reads and proves them for all ranks; calls take the first, by file name, that fits in collective, ranks and bytes. MSCCL_ALGO_DIR and MSCCL_XML_FILES (a list with colons) name more.";
    "STRATA_MACHINE" machine: String = "auto", agreed,
        "Figures for the cost model: a machine that `strata simulate` knows, or its file. auto: what STRATA_MEASURE_US measures (host memory only), else thresholds decide. none: thresholds decide.";
    "STRATA_MEASURE_US" measure_us: u64 = "0", agreed,
        "About how many microseconds a new communicator may spend on measuring the links between its nodes (20000 is enough); 0: it does not measure.";
    "STRATA_TREE_MAX_BYTES" tree_max_bytes: usize = "65536", agreed,
        "Broadcasts and reduces of at most this many bytes, and all between two ranks, use a binomial tree, and so do rails between nodes that have at most this many bytes each; larger ones scatter and gather, or go along a ring of few nodes.";
    "STRATA_ALLTOALL_TWO_STEP_MAX_BYTES" two_step_max_bytes: usize = "16384", agreed,
        "All-to-alls with blocks of at most this many bytes are aggregated inside the node before they cross the network.";
    "STRATA_ALLTOALLV_BOUND_BYTES" all_to_all_v_bound_bytes: usize = "0", agreed,
        "Bytes that blocks of the program's all-to-alls of blocks of different sizes do not exceed, as far as it knows, where each rank knows its own sizes only: a bound of at most STRATA_ALLTOALL_TWO_STEP_MAX_BYTES has them aggregated inside the node (docs/user.md#blocks-of-different-sizes). A longer block is right, and slower. 0: nothing is known.";
    "STRATA_DIRECT_MAX_RANKS" direct_max_ranks: usize = "16", agreed,
        "Nodes of at most this many ranks exchange directly, each rank with each; larger ones use rings or trees.";
    "STRATA_SPIN_US" spin_us: u64 = "5", local,
        "Microseconds; a waiting rank that has a processor of its own polls for 20 times as long before it yields the processor, and sleeps after 400 times as long. One that shares its processors with other ranks yields at once, and sleeps after 20 times as long. Where others compute on the node's processors (a yield took 2 ms or more) it does not yield for a while, but sleeps.";
    "STRATA_SHM" shm: bool = "true", local,
        "Use shared memory between ranks of a node.";
    "STRATA_CMA" cma: bool = "true", local,
        "Read large messages straight out of a peer's memory (process_vm_readv) where the system allows it.";
    "STRATA_FUSE" fuse: Fuse = "all", agreed,
        "Calls of one group that become one call, where there is no vendor library. all: calls of the same collective over all their elements, and broadcasts (reduces) with several roots as an all-gather (reduce-scatter). moves: only collectives that reduce nothing, so that reductions have the bits of single calls. off: none.";
    "STRATA_LOST" lost: Lost = "fail", agreed,
        "What becomes of a communicator when ranks are lost: their processes have died, or they have left it. fail: its calls fail. continue: the others go on without them, and the call in which they were lost is made again (docs/user.md#going-on-without-a-lost-rank). Over shared memory and TCP, where Strata runs alone; in front of a vendor's library for the calls that Strata carries between nodes over TCP (STRATA_INTER=tcp).";
    "STRATA_LOST_MS" lost_ms: u64 = "10000", agreed,
        "With STRATA_LOST=continue: milliseconds after which a rank counts as lost whose process does not answer (it is stopped, or its host is). One that is merely late answers. 0: never.";
    "STRATA_LATE" late: Late = "wait", agreed,
        "What becomes of all-reduces of a MiB or more for which ranks are late. wait: the others wait. relay: late ranks relay what the others reduce, on a thread of the library, and their own part is added when they come (docs/user.md#late-ranks). Over shared memory, TCP and MPI.";
    "STRATA_STAGE" stage: bool = "true", agreed,
        "Copy messages to ranks of the node into shared memory first, unless they are there already (ncclMemAlloc).";
    "STRATA_EAGER_BYTES" eager_bytes: usize = "16384", local,
        "Messages of at most this many bytes are copied through shared memory at once; larger ones wait for their receive, and then come through shared memory or are read by the receiver.";
    "STRATA_NIC_MAP" nic_map: String = "auto", local,
        "NIC of each local rank: names separated by commas; more ranks start again at the first name. auto: shared evenly, the nearest NIC for each rank.";
    "STRATA_INTER" inter: Inter = "auto", agreed,
        "Transport of Strata's collectives between nodes: mpi, tcp, auto, or the name of one that the program has registered. auto: MPI if an MPI launcher started the job, else TCP; in front of a vendor library, that library's own transport (vendor).";
    "STRATA_CARRIERS" carriers: Carriers = "auto", agreed,
        "Carriers between nodes that calls may choose by name (ring@mpi), separated by commas, such as tcp,mpi: the communicator's own first (auto: as STRATA_INTER says), then those for which it has a sibling communicator. One that some rank lacks is left out with a message; a name with ! (mpi!) refuses the communicator then.";
    "STRATA_PROVIDERS" providers: String = "none", agreed,
        "Libraries that carry out whole collectives, chosen by the algorithm provider:NAME: mpi for MPI's own collectives, paths of plugins (strata_plugin.h), separated by commas. On all ranks alike. One that some rank lacks is left out with a message; one with ! refuses the communicator then.";
    "STRATA_PROVIDER_CHECK" provider_check: bool = "true", agreed,
        "Before a call goes to a provider, the ranks tell each other which call it is, in a round of short messages of Strata's own: so one that calls something else, or another count, is an error with its name on it, where MPI may give wrong data without one. 0: no such round.";
    "STRATA_GPU_DIRECT" gpu_direct: Switch = "auto", local,
        "Give MPI addresses in device memory for messages above 8 KiB. auto: if MPI says that it takes them. on: always (an MPI that cannot take them crashes). off: never. TCP never takes them.";
    "STRATA_PACK_BESIDE_BYTES" pack_beside_bytes: usize = "1048576", local,
        "Where the vendor library runs the part inside a node: for its calls of more than this many bytes, Strata packs and unpacks blocks on separate streams, beside other calls; for shorter ones on the stream of the calls.";
    "STRATA_MPI_PLUGIN" mpi_plugin: String = "auto", local,
        "Path of the MPI plugin. auto: look for one beside the library.";
    "STRATA_LIBRARY" library: String = "auto", local,
        "Path of libstrata.so for the Python package. auto: the one that the package brings.";
    "STRATA_COMMAND" command: String = "auto", local,
        "Path of the command `strata` for programs of the Python package's `strata.msccl`. auto: the one beside the library, else the first on the PATH.";
    "STRATA_TCP_CONNECTIONS" tcp_connections: usize = "2", agreed,
        "Connections per pair of ranks on different nodes, for each NIC that is used.";
    "STRATA_TCP_NICS" tcp_nics: TcpNics = "auto", agreed,
        "By which NICs of its node a rank's large messages go over TCP. own: by its own. all: by all of them at once. auto: by all in calls that have a root or blocks of different sizes (by a quarter or more), which load ranks unevenly, and by its own in others.";
    "STRATA_MEASURE_EVERY" measure_every: u64 = "0", agreed,
        "After every so many all-reduces of a MiB or more the ranks of a communicator tell each other how long these took; the first time, and where they have become slower, rounds of messages measure the links between nodes. Where some are slow, all-reduces from the next one on give each rank a share of the vector by what its link delivers. 0: never, but for once after a loss (STRATA_LOST=continue); shares are even.";
    "STRATA_LOSSLESS" lossless: LosslessSetting = "off", agreed,
        "Whether long messages between nodes over TCP are coded without loss (docs/codes.md). zstd: where the link is slow enough that coding saves time, and for bytes that shrink. always: however fast the link is. off: never.";
    "STRATA_LOSSLESS_MIN_BYTES" lossless_min_bytes: usize = "65536", agreed,
        "Messages of fewer bytes go as they are. An algorithm cuts calls into messages; those of up to 32 KiB are never coded.";
    "STRATA_TRACE" trace: String = "none", local,
        "Record all calls and write them to these files, separated by commas; the extension says how: .json (Chrome's trace events, for Perfetto and `strata trace`), .csv, .txt (a summary), .pickle (PyTorch's flight recorder). %h is the host, %p the process, %r the rank; with neither %p nor %r several processes put their rank before the extension.";
    "STRATA_TRACE_RECORDS" trace_records: usize = "65536", local,
        "Calls of a process that are kept, the newest, in 128 bytes each.";
    "STRATA_TRACE_FAILURE" trace_failure: String = "auto", local,
        "Where STRATA_TRACE is set: what is written for PyTorch's flight recorder (torchfrtrace) when a communicator fails. auto: flight/nccl_trace_rank_%r beside the first of STRATA_TRACE. none: nothing.";
}

/// What stands before the names of the variables that rank 0 has set; no variable is called so.
const GIVEN: &str = "given";
/// The variables that name files. A program that has more rights than its starter ignores them.
const PATHS: [&str; 9] = [
    "STRATA_NCCL_LIB",
    "STRATA_TUNING_TABLE",
    "STRATA_STRATEGY",
    "STRATA_PROGRAM_DIR",
    "STRATA_MACHINE",
    "STRATA_MPI_PLUGIN",
    "STRATA_PROVIDERS",
    "STRATA_TRACE",
    "STRATA_TRACE_FAILURE",
];

/// A variable of another library that names files, unless the program has more rights than its starter.
pub fn path_from_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty() && !is_elevated())
}

fn assign<T: FromStr<Err: Display>>(field: &mut T, value: &str) -> Result<(), String> {
    let spelt = match value {
        "1" | "on" | "yes" if std::any::type_name::<T>() == "bool" => "true",
        "0" | "off" | "no" if std::any::type_name::<T>() == "bool" => "false",
        value => value,
    };
    *field = spelt.parse().map_err(|error: T::Err| match std::any::type_name::<T>() {
        "bool" => "1 or 0 is wanted".to_string(),
        "usize" | "u64" | "u32" => "a whole number from 0 on is wanted".to_string(),
        _ => error.to_string(),
    })?;
    Ok(())
}

impl Config {
    /// The settings in these variables (name, value), and one warning for each `STRATA_` variable that is unknown or
    /// does not parse.
    pub fn from_vars(vars: impl Iterator<Item = (String, String)>) -> (Config, Vec<String>) {
        Config::from_vars_of(vars, false)
    }

    /// The same; `elevated` says whether the process has rights that whoever set the variables may not have.
    fn from_vars_of(vars: impl Iterator<Item = (String, String)>, elevated: bool) -> (Config, Vec<String>) {
        let mut config = Config::default();
        let mut warnings = Vec::new();
        for (name, value) in vars.filter(|(name, _)| name.starts_with("STRATA_")) {
            if elevated && PATHS.contains(&name.as_str()) && !["auto", "none"].contains(&value.as_str()) {
                warnings.push(format!("{name}={value} is ignored: the program has more rights than who started it"));
                continue;
            }
            // `export STRATA_INTER=${INTER:-}` and the like: not set.
            if value.is_empty() && VARIABLES.iter().any(|variable| variable.name == name) {
                continue;
            }
            match config.set(&name, &value) {
                Some(Ok(())) => {
                    config.given.insert(name);
                }
                Some(Err(why)) => warnings.push(format!("{name}={value} has no meaning and is ignored: {why}")),
                None => warnings.push(match nearest(&name) {
                    Some(near) => format!("unknown variable {name}; did you mean {near}?"),
                    None => format!("unknown variable {name}; `strata info --env` lists all"),
                }),
            }
        }
        (config, warnings)
    }

    /// This process's settings. Variables set by the launcher for the command itself are left alone.
    pub fn from_env() -> (Config, Vec<String>) {
        let vars = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
        Config::from_vars_of(vars, is_elevated())
    }

    /// The agreed values as text, to be sent to the other ranks.
    pub fn agreed(&self) -> String {
        let line = |variable: &Variable| {
            let value: &dyn Display = &self.get(variable.name).unwrap_or_default();
            format!("{}={value}\n", variable.name)
        };
        let agreed = || VARIABLES.iter().filter(|variable| variable.agreed);
        let given = agreed().map(|variable| variable.name).filter(|name| self.is_given(name)).collect::<Vec<_>>();
        agreed().map(line).chain([format!("{GIVEN}={}\n", given.join(","))]).collect()
    }

    /// Whether somebody has set this variable, be it to its default.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains(name)
    }

    fn take_over_given(&mut self, names: &str) {
        let agreed = |name: &str| VARIABLES.iter().any(|variable| variable.agreed && variable.name == name);
        self.given.retain(|name| !agreed(name));
        self.given.extend(names.split(',').filter(|name| agreed(name)).map(str::to_string));
    }

    /// Takes over rank 0's [`agreed`](Config::agreed) values; returns one line for each that differs from ours.
    pub fn take_over(&mut self, agreed: &str) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, value) in agreed.lines().filter_map(|line| line.split_once('=')) {
            if name == GIVEN {
                self.take_over_given(value);
                continue;
            }
            let ours = self.get(name);
            if ours.as_deref() != Some(value) {
                // Rank 0 has read it from a variable, or it is a value of its type written out.
                let _ = self.set(name, value);
                differences
                    .push(format!("{name} is {} here and {value} on rank 0, which counts", ours.unwrap_or_default()));
            }
        }
        differences
    }

    /// How long the ranks may take to come together. For ever is a century.
    pub fn bootstrap_limit(&self) -> Duration {
        match self.bootstrap_timeout_ms {
            0 => Duration::from_secs(u64::from(u32::MAX)),
            ms => Duration::from_millis(ms.min(u64::from(u32::MAX) * 1000)),
        }
    }

    /// How long a rank may take to answer before it is lost; none where it never is by that.
    pub fn mute_after(&self) -> Option<Duration> {
        (self.lost == Lost::Continue && self.lost_ms > 0).then(|| Duration::from_millis(self.lost_ms))
    }

    /// Whether `STRATA_VENDOR_ONLY` names a collective.
    pub fn leaves_to_vendor(&self, collective: Collective) -> bool {
        self.vendor_only.split(',').any(|name| Collective::from_name(name.trim()) == Some(collective))
    }

    /// The `STRATA_<COLLECTIVE>_CODE` of a collective.
    pub fn code(&self, collective: Collective) -> Option<FloatCode> {
        match collective {
            Collective::AllReduce => self.all_reduce_code.0,
            Collective::AllGather => self.all_gather_code.0,
            Collective::ReduceScatter => self.reduce_scatter_code.0,
            Collective::AllToAll => self.all_to_all_code.0,
            _ => None,
        }
    }

    /// The `STRATA_<COLLECTIVE>_ALGO` of a collective.
    pub fn algorithm(&self, collective: Collective) -> &str {
        match collective {
            Collective::AllReduce => &self.all_reduce_algo,
            Collective::AllGather => &self.all_gather_algo,
            Collective::ReduceScatter => &self.reduce_scatter_algo,
            Collective::Broadcast => &self.broadcast_algo,
            Collective::Reduce => &self.reduce_algo,
            Collective::AllToAll => &self.all_to_all_algo,
            Collective::Gather => &self.gather_algo,
            Collective::Scatter => &self.scatter_algo,
            // A call names its script itself.
            Collective::Custom => "auto",
        }
    }
}

fn nearest(name: &str) -> Option<&'static str> {
    let near =
        VARIABLES.iter().map(|variable| (strsim::damerau_levenshtein(variable.name, name), variable.name)).min()?;
    (near.0 <= name.len() / 3).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(vars: &[(&str, &str)]) -> (Config, Vec<String>) {
        Config::from_vars(vars.iter().map(|(name, value)| (name.to_string(), value.to_string())))
    }

    #[test]
    fn a_misspelt_variable_is_answered_with_the_nearest_name() {
        let (config, warnings) = parse(&[("STRATA_TIMEOUTMS", "5"), ("PATH", "/bin"), ("STRATA_CMA", "0")]);
        assert_eq!(warnings, ["unknown variable STRATA_TIMEOUTMS; did you mean STRATA_TIMEOUT_MS?"]);
        assert!(!config.cma);
    }

    #[test]
    fn a_misspelt_word_is_answered_with_the_nearest_one_and_leaves_the_default() {
        for (name, value, said) in [
            ("STRATA_LATE", "relai", "did you mean relay?"),
            ("STRATA_LOST", "go on", "one of fail and continue is wanted"),
            ("STRATA_FUSE", "of", "did you mean off?"),
        ] {
            let (config, warnings) = parse(&[(name, value)]);
            assert!(warnings.len() == 1 && warnings[0].contains(said), "{warnings:?}");
            let default = Config::default();
            assert_eq!((config.late, config.lost, config.fuse), (default.late, default.lost, default.fuse));
        }
    }

    #[test]
    fn a_program_with_more_rights_than_its_starter_takes_no_path_from_the_environment() {
        let given = [
            ("STRATA_NCCL_LIB", "/tmp/evil.so"),
            ("STRATA_TUNING_TABLE", "table"),
            ("STRATA_PROGRAM_DIR", "/tmp"),
            ("STRATA_MACHINE", "../machine.toml"),
            ("STRATA_MPI_PLUGIN", "/tmp/evil.so"),
            ("STRATA_PROVIDERS", "/tmp/evil.so"),
            ("STRATA_TRACE", "/etc/x.json"),
            ("STRATA_TRACE_FAILURE", "/etc/x"),
            ("STRATA_WINDOW", "7"),
        ];
        let vars = || given.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let (config, warnings) = Config::from_vars_of(vars(), true);
        assert_eq!(config, Config { window: 7, given: ["STRATA_WINDOW".to_string()].into(), ..Config::default() });
        assert_eq!(warnings.len(), 8, "{warnings:?}");
        assert_eq!(Config::from_vars_of(vars(), false).1, [""; 0]);
        let none = [("STRATA_NCCL_LIB".to_string(), "none".to_string())].into_iter();
        assert_eq!(Config::from_vars_of(none, true).0.nccl_lib, "none");
    }

    #[test]
    fn an_empty_value_is_as_good_as_none() {
        let empty: Vec<(&str, &str)> = VARIABLES.iter().map(|variable| (variable.name, "")).collect();
        let (config, warnings) = parse(&empty);
        assert_eq!((config, warnings.len()), (Config::default(), 0));
        assert_eq!(parse(&[("STRATA_WINDO", "")]).1.len(), 1, "a wrong name stays one");
    }

    #[test]
    fn a_value_of_the_wrong_type_is_ignored_with_a_warning() {
        let (config, warnings) = parse(&[("STRATA_WINDOW", "many")]);
        assert_eq!(config, Config::default());
        assert_eq!(warnings.len(), 1);
        for (name, wrong, known) in [
            ("STRATA_GPU_DIRECT", "maybe", "maybe is none of auto, on and off"),
            ("STRATA_DEVICE", "gpu", "gpu is none of auto and host"),
        ] {
            let (config, warnings) = parse(&[(name, wrong)]);
            assert_eq!(config, Config::default());
            assert!(matches!(&warnings[..], [why] if why.starts_with(name) && why.ends_with(known)), "{warnings:?}");
        }
        let (config, warnings) = parse(&[("STRATA_GPU_DIRECT", "on"), ("STRATA_DEVICE", "host")]);
        assert_eq!((config.gpu_direct, config.device, warnings.len()), (Switch::On, DeviceSetting::Host, 0));
    }

    #[test]
    fn a_misspelt_way_to_code_is_answered_with_the_nearest_one() {
        let (config, warnings) = parse(&[("STRATA_LOSSLESS", "zstdd")]);
        let told = "STRATA_LOSSLESS=zstdd has no meaning and is ignored: did you mean zstd?";
        assert_eq!((config.lossless, &warnings[..]), (LosslessSetting::Off, &[told.to_string()][..]));
        assert_eq!(parse(&[("STRATA_LOSSLESS", "on")]).0.lossless, LosslessSetting::Zstd);
        assert!(parse(&[("STRATA_LOSSLESS", "snappy")]).1[0].ends_with("one of off, zstd and always is wanted"));
    }

    #[test]
    fn a_secret_is_not_shown_and_not_sent() {
        let (config, warnings) = parse(&[("STRATA_COMM_KEY", "xyzzy")]);
        assert_eq!((config.comm_key.expose(), warnings.len()), ("xyzzy", 0));
        assert_eq!(config.get("STRATA_COMM_KEY").as_deref(), Some("(not shown)"));
        assert!(!format!("{config:?} {}", config.agreed()).contains("xyzzy"));
        assert_eq!(parse(&[("STRATA_COMM_KEY", "none")]).0.comm_key, Secret::default());
    }

    #[test]
    fn rank_zero_s_values_are_taken_over_and_differences_told() {
        let (zero, _) = parse(&[("STRATA_WINDOW", "7")]);
        let (mut ours, _) = parse(&[("STRATA_CMA", "0")]);
        let differences = ours.take_over(&zero.agreed());
        assert_eq!(differences, ["STRATA_WINDOW is 4 here and 7 on rank 0, which counts"]);
        assert_eq!(ours.window, 7);
        assert!(!ours.cma, "a local variable stays local");
    }

    #[test]
    fn what_rank_zero_has_set_to_its_default_counts_as_set_on_all_ranks() {
        let (zero, _) = parse(&[("STRATA_WINDOW", "4"), ("STRATA_CMA", "1"), ("STRATA_SPIN_US", "many")]);
        let (mut ours, _) = parse(&[("STRATA_TREE_MAX_BYTES", "65536"), ("STRATA_SHM", "1")]);
        assert_eq!(ours.take_over(&zero.agreed()), [""; 0]);
        let given: Vec<&str> = ours.given.iter().map(String::as_str).collect();
        assert_eq!(given, ["STRATA_SHM", "STRATA_WINDOW"]);
    }

    #[test]
    fn a_bootstrap_limit_of_zero_is_for_ever_and_none_is_too_long_for_a_clock() {
        let limit = |value| parse(&[("STRATA_BOOTSTRAP_TIMEOUT_MS", value)]).0.bootstrap_limit();
        assert_eq!(limit("70"), Duration::from_millis(70));
        let for_ever = limit("0");
        assert!(for_ever > Duration::from_secs(100 * 365 * 86_400));
        assert!(limit(&u64::MAX.to_string()) >= for_ever && std::time::Instant::now().checked_add(for_ever).is_some());
    }

    #[test]
    fn every_variable_is_named_once_and_can_be_read_back() {
        let config = Config::default();
        for (index, variable) in VARIABLES.iter().enumerate() {
            assert!(VARIABLES[..index].iter().all(|other| other.name != variable.name));
            assert_eq!(config.get(variable.name).as_deref(), Some(variable.default));
        }
    }
}
