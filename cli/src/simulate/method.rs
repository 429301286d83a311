//! Who is compared: the vendor's library, the machine's MPI, PCCL, Strata, or one algorithm with its parameters.
#![forbid(unsafe_code)]

use super::lists::size_text;
use super::route;
use crate::options::parse_size;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use strata::algorithms::{levels, Choice, SCRIPT};
use strata::carrier::Carrier;
use strata::code::FloatCode;
use strata::error::{counted, Error, Result};
use strata::plan::{Collective, Shape};
use strata::script::store::{self, Steps};
use strata::script::{LoadedScript, ScriptNames, SharedScripts};
use strata::selection::synthesis;
use strata::sim::price::{block_bytes, How, PricedPlan};
use strata::sim::Cluster;
use strata::topo::Grid;

/// A column of the comparison. For a cell it stands for one or several ways, of which the fastest counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Method {
    /// The vendor's library.
    Vendor,
    /// The machine's MPI.
    Mpi,
    /// A carrier of the machine.
    Carrier(String),
    /// The quickest of the machine's carriers for each call.
    Mix,
    /// PCCL as published: with this algorithm and carrier between nodes, or with the best that its authors had.
    Pccl(Option<(&'static str, Carrier)>),
    /// The route that Strata takes when the vendor's library is none of its candidates.
    Strata,
    /// The route that Strata takes.
    Chosen,
    /// Strata with messages between nodes in a code.
    Code(FloatCode),
    /// What thresholds decide that nobody has set, whatever the machine.
    Thresholds,
    /// The quickest of Strata's algorithms and segments, by pricing them, with even shares.
    Even,
    /// The same with shares by what links deliver: what `strata synthesize` writes.
    Synthesized,
    /// One algorithm.
    Plan {
        /// Which.
        choice: Choice,
        /// Bytes of each block in a segment; None is the whole block.
        segment_bytes: Option<usize>,
        /// Segments in flight.
        window: usize,
        /// Between nodes.
        carrier: Carrier,
        /// The files that it names, with the names of their algorithms.
        files: Vec<(PathBuf, String)>,
    },
}

/// What `--method` takes, for messages and `--help`.
pub const KNOWN: &str =
    "vendor, mpi, pccl, pccl(ring), pccl(rd), pccl(ring,vendor), strata, code(mx8), chosen, thresholds, even, synthesized, carrier(NAME), mix, \
                         or an algorithm such as two_level(direct,log)/segment=1M/window=4/carrier=vendor, \
                         or script:FILE.xml/segment=1M or two_level(script:FILE.xml,log)";

impl Method {
    /// Reads a method's name; a script that is a file has the contract that is given, or the one beside it.
    pub fn parse(text: &str, contract: Option<&Path>) -> Result<Method> {
        Ok(match text {
            "vendor" => Method::Vendor,
            "mpi" => Method::Mpi,
            "mix" => Method::Mix,
            "pccl" => Method::Pccl(None),
            "pccl(ring)" => Method::Pccl(Some(("ring", Carrier::MPI))),
            "pccl(rd)" => Method::Pccl(Some(("rd", Carrier::MPI))),
            "pccl(ring,vendor)" => Method::Pccl(Some(("ring", Carrier::Vendor))),
            "strata" => Method::Strata,
            "chosen" => Method::Chosen,
            "thresholds" => Method::Thresholds,
            "even" => Method::Even,
            "synthesized" => Method::Synthesized,
            text => match text.strip_prefix("carrier(").and_then(|rest| rest.strip_suffix(')')) {
                Some(name) => Method::Carrier(name.to_string()),
                None => match text.strip_prefix("code(").and_then(|rest| rest.strip_suffix(')')) {
                    Some(name) => Method::Code(FloatCode::from_name(name).ok_or_else(|| {
                        let known = FloatCode::ALL.map(FloatCode::name).join(", ");
                        Error::InvalidArgument(format!("method {text}: there is no code {name}; there are {known}"))
                    })?),
                    None => Method::plan(text, contract)?,
                },
            },
        })
    }

    fn plan(text: &str, contract: Option<&Path>) -> Result<Method> {
        let wrong = |what: String| Error::InvalidArgument(format!("method {text}: {what}; there are {KNOWN}"));
        let (named, files) = with_names(text, contract).map_err(|error| wrong(error.text().to_owned()))?;
        // A script's name has no slash.
        let (name, parameters) = named.split_at(named.find('/').unwrap_or(named.len()));
        let choice = scripts_of_methods().choice(name).map_err(|error| wrong(error.text().to_owned()))?;
        let (mut segment_bytes, mut window, mut carrier) = (None, 2, Carrier::MPI);
        for part in parameters.split('/').skip(1) {
            let no_sense = || wrong(format!("`{part}` is none of segment=BYTES, window=N and carrier=own or vendor"));
            let (name, value) = part.split_once('=').ok_or_else(no_sense)?;
            match (name, value) {
                ("segment", "whole") => segment_bytes = None,
                ("segment", value) => match parse_size(value).map_err(wrong)? {
                    0 => return Err(wrong(String::from("a segment has at least 1 byte"))),
                    bytes => segment_bytes = Some(bytes),
                },
                ("window", value) => match value.parse() {
                    Ok(number @ 1..=64) => window = number,
                    _ => return Err(wrong(format!("`{value}` is not a window from 1 to 64"))),
                },
                ("carrier", "own") => carrier = Carrier::MPI,
                ("carrier", "vendor") => carrier = Carrier::Vendor,
                _ => return Err(no_sense()),
            }
        }
        Ok(Method::Plan { choice, segment_bytes, window, carrier, files })
    }

    /// Whether the files that it names are for such a cell.
    ///
    /// # Errors
    /// `InvalidUsage` with the file, what it is for, and what the cell is.
    pub fn check(&self, grid: &Arc<Grid>, collective: Collective) -> Result<()> {
        let Method::Plan { choice, files, .. } = self else { return Ok(()) };
        let paths = |name: &str| files.iter().find(|(_, known)| known == name).map(|(path, _)| path.display());
        if let (Some(path), Some(facts)) = (paths(&choice.name), levels::script(&choice.name)) {
            if (facts.collective, facts.nranks) != (collective, grid.nranks()) {
                let (asked, ranks) = (collective.name(), counted(grid.nranks(), "rank"));
                return Err(Error::InvalidUsage(format!(
                    "{path} is for {facts}, and asked for is {asked} on {ranks} (--collective {asked} -n {})",
                    grid.nranks()
                )));
            }
        }
        levels::check(choice, &Shape::new(collective, grid.clone())).map_err(|error| {
            let files: Vec<String> = files.iter().map(|(path, _)| path.display().to_string()).collect();
            match files.is_empty() {
                true => error,
                false => Error::InvalidUsage(format!("{}: {}", files.join(", "), error.text())),
            }
        })
    }

    /// The methods that a machine's file says something about; the first is what the others are compared with.
    pub fn known_to(machine: &Cluster) -> Vec<Method> {
        let mut methods = Vec::new();
        methods.extend(machine.vendor.is_some().then_some(Method::Vendor));
        if !machine.carriers.is_empty() {
            methods.extend(machine.carriers.keys().cloned().map(Method::Carrier));
            methods.push(Method::Mix);
        }
        methods.extend(machine.pccl.is_some().then_some(Method::Pccl(None)));
        methods.push(Method::Strata);
        methods
    }

    /// The ways among which this method takes the fastest; none where it has nothing to offer.
    ///
    /// # Errors
    /// Those of pricing, for methods that price ways themselves.
    pub fn ways(
        &self,
        machine: &Arc<Cluster>,
        grid: &Arc<Grid>,
        collective: Collective,
        message_bytes: usize,
    ) -> Result<Vec<How>> {
        let pccl = |(rail, carrier)| How::Pccl { rail, carrier };
        Ok(match self {
            Method::Vendor => vec![How::Vendor],
            Method::Mpi => vec![How::Mpi],
            Method::Carrier(name) => match machine.carriers.get(name) {
                Some(laws) if laws.of(collective).is_none() => Vec::new(),
                _ => vec![How::Carrier(name.clone())],
            },
            Method::Mix => vec![How::Mix],
            Method::Pccl(Some(rail)) => vec![pccl(*rail)],
            Method::Pccl(None) => {
                let outer_vendor = machine.network_vendor.is_some().then_some(("ring", Carrier::Vendor));
                [("ring", Carrier::MPI), ("rd", Carrier::MPI)].into_iter().chain(outer_vendor).map(pccl).collect()
            }
            Method::Strata => route::own(machine, grid, collective, message_bytes).into_iter().collect(),
            Method::Chosen => route::chosen(machine, grid, collective, message_bytes).into_iter().collect(),
            Method::Code(code) => route::coded(grid, collective, message_bytes, *code).into_iter().collect(),
            Method::Thresholds => vec![route::by_thresholds(grid, collective, message_bytes)?],
            Method::Even => vec![synthesis::evenly(machine, grid, collective, message_bytes)?.how()],
            Method::Synthesized => vec![synthesis::synthesize(machine, grid, collective, message_bytes)?.how()],
            Method::Plan { choice, segment_bytes, window, carrier, .. } => vec![How::Strata(PricedPlan {
                choice: choice.clone(),
                segment_bytes: segment_bytes.unwrap_or(usize::MAX),
                window: *window,
                carrier: *carrier,
            })],
        })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Method::Vendor => String::from("vendor"),
            Method::Mpi => String::from("mpi"),
            Method::Carrier(name) => carrier_text(name),
            Method::Mix => String::from("mix"),
            Method::Pccl(None) => String::from("pccl"),
            Method::Pccl(Some((rail, carrier))) => pccl_text(rail, *carrier),
            Method::Strata => String::from("strata"),
            Method::Chosen => String::from("chosen"),
            Method::Thresholds => String::from("thresholds"),
            Method::Even => String::from("even"),
            Method::Synthesized => String::from("synthesized"),
            Method::Code(code) => format!("code({})", code.name()),
            Method::Plan { choice, segment_bytes, window, carrier, .. } => {
                plan_text(choice, segment_bytes.unwrap_or(usize::MAX), usize::MAX, *window, *carrier)
            }
        };
        f.pad(&text)
    }
}

/// The scripts that methods have named by their files, by names that tell them apart.
static NAMED: Mutex<(Option<ScriptNames>, Vec<&'static LoadedScript>)> = Mutex::new((None, Vec::new()));

/// The script in a file that a method names.
fn of_method(file: &Path, contract: Option<&Path>) -> Result<&'static LoadedScript> {
    let (names, scripts) = &mut *NAMED.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    let script = store::load_file_among(file, contract, (Steps::AsWritten, names))?;
    scripts.push(script);
    Ok(script)
}

fn scripts_of_methods() -> SharedScripts {
    SharedScripts::of(NAMED.lock().unwrap_or_else(PoisonError::into_inner).1.clone())
}

/// A method with each `script:FILE.xml` replaced by the name of the script in that file, and the files. A script that is loaded
/// already is known by its name.
fn with_names(text: &str, contract: Option<&Path>) -> Result<(String, Vec<(PathBuf, String)>)> {
    let (mut named, mut files) = (String::new(), Vec::new());
    let (mut rest, inside) = (text, !text.starts_with(SCRIPT));
    while let Some(at) = rest.find(SCRIPT) {
        let (before, after) = rest.split_at(at);
        named += before;
        let path = &after[SCRIPT.len()..];
        // Inside brackets a file ends at a comma or a bracket, and another one may follow.
        let is_end = |rest: &str| rest.is_empty() || rest.starts_with(if inside { &[',', ')'][..] } else { &['/'] });
        let ends = path.match_indices(".xml").map(|(at, xml)| at + xml.len()).filter(|&end| is_end(&path[end..]));
        let ends: Vec<usize> = ends.collect();
        let end = if inside { ends.first() } else { ends.last() };
        let Some(&end) = end else {
            named += SCRIPT;
            rest = path;
            continue;
        };
        let file = Path::new(&path[..end]);
        let script = of_method(file, contract)?;
        named += &script.name;
        files.push((file.to_path_buf(), script.unique_name.clone()));
        rest = &path[end..];
    }
    Ok((named + rest, files))
}

fn carrier_text(name: &str) -> String {
    format!("carrier({name})")
}

fn pccl_text(rail: &str, carrier: Carrier) -> String {
    match carrier {
        Carrier::Own(_) => format!("pccl({rail})"),
        Carrier::Vendor => format!("pccl({rail},vendor)"),
    }
}

fn plan_text(choice: &Choice, segment_bytes: usize, block_bytes: usize, window: usize, carrier: Carrier) -> String {
    let segment = if segment_bytes >= block_bytes { String::from("whole") } else { size_text(segment_bytes) };
    let carrier = if carrier == Carrier::Vendor { "/carrier=vendor" } else { "" };
    format!("{choice}/segment={segment}/window={window}{carrier}")
}

/// A way as `--method` takes it, for a message of so many bytes.
pub fn way_text(way: &How, collective: Collective, nranks: usize, message_bytes: usize) -> String {
    match way {
        How::Vendor => String::from("vendor"),
        How::Mpi => String::from("mpi"),
        How::Carrier(name) => carrier_text(name),
        How::Mix => String::from("mix"),
        How::Pccl { rail, carrier } => pccl_text(rail, *carrier),
        How::Strata(PricedPlan { choice, segment_bytes, window, carrier }) => {
            plan_text(choice, *segment_bytes, block_bytes(collective, nranks, message_bytes), *window, *carrier)
        }
        How::Shared(plan, _) => {
            way_text(&How::Strata(plan.clone()), collective, nranks, message_bytes) + " with shares by links"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_is_read_as_it_is_written() {
        for text in [
            "vendor",
            "mpi",
            "carrier(nccl)",
            "mix",
            "pccl",
            "pccl(rd)",
            "pccl(ring,vendor)",
            "strata",
            "chosen",
            "thresholds",
            "even",
            "synthesized",
            "code(mx8)",
            "ring/segment=whole/window=2",
            "two_level(direct,log)/segment=1M/window=4/carrier=vendor",
        ] {
            assert_eq!(Method::parse(text, None).unwrap().to_string(), text);
        }
        for text in [
            "",
            "vend",
            "pccl(log)",
            "code(mx9)",
            "ring/segment=0",
            "ring/window=0",
            "ring/window=x",
            "ring/colour=red",
            "ring/",
        ] {
            assert!(matches!(Method::parse(text, None), Err(Error::InvalidArgument(_))), "{text}");
        }
    }
}
