//! Files of strategies: what collectives of one grid are to do, by size, as `strata synthesize` writes them.
//!
//! ```text
//! strata strategy 1
//! grid 4,4,4,4,4,4
//! all_reduce 128M 512M two_level(direct,direct) segment=2M window=4 shares=256,256,256,256,0,0
//! ```
//!
//! A line for each collective and size: messages from the first number of bytes on, below the second. `segment=whole` does not cut.
//! `shares` say what each node has of a rail, in parts; so many numbers as there are nodes hold for every rail, else there are as
//! many as nodes times rails, rail by rail. Lines that begin with `#` say nothing.
//!
//! All ranks of a communicator use rank 0's file ([`agree`]). One that is malformed, is for another grid, or has a strategy that is not
//! proved is refused as a whole, with the line; then nothing is changed by it.
#![forbid(unsafe_code)]

use super::decision::{selected, Selection};
use super::{Context, Request};
use crate::algorithms::{self, Choice};
use crate::config::Config;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::plan::weights::ChunkWeights;
use crate::plan::{Collective, Shape};
use crate::topo::{Grid, NodeId, Rank};
use crate::verify::{self, verify};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The value of `STRATA_STRATEGY` that names no file.
const NONE: &str = "none";
/// The first line of a file of this format.
const HEAD: &str = "strata strategy 1";
/// A file has no more bytes than this: every rank of every communicator gets them.
const MOST_BYTES: u64 = 1 << 20;
/// Nor more strategies.
const MOST_STRATEGIES: usize = 256;
/// Strategies for more ranks than this are not proved again when a communicator is made; `strata plan verify` proves them.
pub const MOST_PROVED: usize = 64;

/// What one collective does with messages of some sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Strategy {
    /// The collective.
    pub collective: Collective,
    /// Messages of at least so many bytes, as [`message_bytes`](super::message_bytes) counts them.
    pub from_bytes: usize,
    /// And of fewer than this.
    pub below_bytes: usize,
    /// The algorithm.
    pub choice: Choice,
    /// Bytes of each block handled at a time; `usize::MAX` handles a message whole.
    pub segment_bytes: usize,
    /// Segments in flight.
    pub window: usize,
    /// What each chunk of a block has of it, where that differs: chunk `rail * nodes + node`.
    pub shares: Option<Arc<ChunkWeights>>,
    /// The line of the file.
    pub line: usize,
}

/// A file of strategies.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Strategies {
    /// The ranks of each node of the grid that it is for.
    pub nodes: Vec<usize>,
    /// The line that says so.
    pub grid_line: usize,
    /// Its strategies, in the file's order.
    pub all: Vec<Strategy>,
}

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrategyFault {
    /// The line, from 1 on.
    pub line: usize,
    /// What.
    pub what: String,
}

impl fmt::Display for StrategyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

/// A number of bytes as `8`, `64K`, `2M` or `1G`.
fn bytes_of(text: &str) -> Option<usize> {
    let (number, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// A number of bytes as [`bytes_of`] reads it.
fn bytes_text(bytes: usize) -> String {
    let unit = [("G", 30), ("M", 20), ("K", 10)];
    match unit.into_iter().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift)) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Numbers separated by commas.
fn numbers<N: std::str::FromStr>(text: &str) -> Option<Vec<N>> {
    text.split(',').map(|number| number.parse().ok()).collect()
}

impl Strategies {
    /// Strategies for a grid.
    pub fn of(grid: &Grid, all: Vec<Strategy>) -> Strategies {
        Strategies { nodes: sizes(grid), grid_line: 2, all }
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// What is wrong, with the line.
    pub fn parse(text: &str) -> std::result::Result<Strategies, StrategyFault> {
        let lines = (1..).zip(text.lines().map(str::trim));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let at = |line: usize, what: String| StrategyFault { line, what };
        match lines.next() {
            Some((_, HEAD)) => {}
            other => {
                let line = other.map_or(1, |(line, _)| line);
                return Err(at(line, format!("a file of strategies begins with `{HEAD}`")));
            }
        }
        let (line, grid) = lines.next().unwrap_or((2, ""));
        let nodes = grid.strip_prefix("grid ").and_then(|sizes| numbers::<usize>(sizes.trim()));
        let nodes = nodes.filter(|nodes| nodes.iter().all(|&ranks| ranks > 0));
        let nodes =
            nodes.ok_or_else(|| at(line, "`grid` and the ranks of each node are wanted, as grid 4,4".into()))?;
        let mut strategies = Strategies { nodes, grid_line: line, all: Vec::new() };
        for (line, text) in lines {
            let strategy = strategies.strategy(line, text).map_err(|what| at(line, what))?;
            if strategies.all.len() == MOST_STRATEGIES {
                return Err(at(line, format!("more than {MOST_STRATEGIES} strategies")));
            }
            let meets = |other: &&Strategy| {
                let (from, below) = (strategy.from_bytes, strategy.below_bytes);
                other.collective == strategy.collective && from < other.below_bytes && other.from_bytes < below
            };
            if let Some(other) = strategies.all.iter().find(meets) {
                return Err(at(line, format!("line {} is for some of these sizes", other.line)));
            }
            strategies.all.push(strategy);
        }
        Ok(strategies)
    }

    fn strategy(&self, line: usize, text: &str) -> std::result::Result<Strategy, String> {
        let mut words = text.split_whitespace();
        let mut word = |what: &str| words.next().ok_or_else(|| format!("{what} is missing"));
        let name = word("a collective")?;
        let collective = Collective::from_name(name).filter(|collective| *collective != Collective::Custom);
        let collective = collective.ok_or_else(|| format!("there is no collective {name}"))?;
        let size = |text: &str| bytes_of(text).ok_or_else(|| format!("`{text}` is not a number of bytes, such as 64K"));
        let (from_bytes, below_bytes) = (size(word("the least size")?)?, size(word("the end of sizes")?)?);
        if from_bytes >= below_bytes {
            return Err(format!("there are no messages from {from_bytes} bytes on below {below_bytes}"));
        }
        let choice = word("an algorithm")?.parse::<Choice>().map_err(|error| error.text().to_string())?;
        let (segment_bytes, window, shares) = (usize::MAX, 1, None);
        let mut strategy =
            Strategy { collective, from_bytes, below_bytes, choice, segment_bytes, window, shares, line };
        for word in words {
            match word.split_once('=') {
                Some(("segment", "whole")) => strategy.segment_bytes = usize::MAX,
                Some(("segment", bytes)) => match size(bytes)? {
                    0 => return Err("a segment has at least 1 byte".to_string()),
                    bytes => strategy.segment_bytes = bytes,
                },
                Some(("window", window)) => match window.parse() {
                    Ok(window @ 1..=64) => strategy.window = window,
                    _ => return Err(format!("`{window}` is not a window from 1 to 64")),
                },
                Some(("shares", shares)) => strategy.shares = Some(self.shares(shares)?),
                _ => return Err(format!("`{word}` is none of segment=BYTES, window=N and shares=N,N,...")),
            }
        }
        Ok(strategy)
    }

    /// The shares of all rails.
    fn shares(&self, text: &str) -> std::result::Result<Arc<ChunkWeights>, String> {
        let parts: Vec<u32> = numbers(text).ok_or_else(|| format!("`{text}` are not numbers separated by commas"))?;
        let (nodes, rails) = (self.nodes.len(), self.nodes.iter().copied().max().unwrap_or(0));
        let parts = if parts.len() == nodes { parts.repeat(rails) } else { parts };
        if parts.len() != nodes * rails {
            let (have, wanted) = (parts.len(), nodes * rails);
            return Err(format!("{have} shares: {nodes} are wanted, one for each node, or {wanted}, one on each rail"));
        }
        let none = || "shares that are nothing together, or more than are counted".to_string();
        ChunkWeights::new(&parts).map(Arc::new).ok_or_else(none)
    }

    /// Proves every strategy on the grid that the file is for; of grids of more than `most_ranks` only that there are such algorithms.
    /// What they send together.
    ///
    /// # Errors
    /// What is wrong, with the line.
    pub fn prove(
        &self,
        grid: &Arc<Grid>,
        most_ranks: usize,
    ) -> std::result::Result<Vec<verify::Report>, StrategyFault> {
        if sizes(grid) != self.nodes {
            let what = format!("the file is for a grid of {:?} ranks, and these are {grid}", self.nodes);
            return Err(StrategyFault { line: self.grid_line, what });
        }
        let proved = |strategy: &Strategy| {
            let fault = |what: String| StrategyFault { line: strategy.line, what };
            strategy.prove(grid, grid.nranks() <= most_ranks).map_err(fault)
        };
        self.all.iter().map(proved).collect()
    }

    /// The strategy for a message of so many bytes.
    pub fn find(&self, collective: Collective, bytes: usize) -> Option<&Strategy> {
        let is_for = |strategy: &&Strategy| {
            strategy.collective == collective && (strategy.from_bytes..strategy.below_bytes).contains(&bytes)
        };
        self.all.iter().find(is_for)
    }

    /// What the file says of a call, where it says something.
    pub(super) fn select(&self, request: &Request<'_>, context: &Context) -> Result<Option<(Selection, String)>> {
        let bytes = request.message_bytes(context);
        let Some(strategy) = self.find(request.collective, bytes) else { return Ok(None) };
        let Strategy { choice, segment_bytes, window, .. } = strategy;
        let shape = Shape { root: request.root, ..Shape::new(request.collective, context.grid.clone()) };
        if !algorithms::supports(choice, &shape) {
            return Ok(None);
        }
        let selection = selected(choice.clone(), (*segment_bytes, *window), request, context)?;
        Ok(Some((Selection { shares: strategy.shares.clone(), ..selection }, strategy.said_of(bytes))))
    }
}

impl Strategy {
    /// Why a call of so many bytes follows it.
    pub(super) fn said_of(&self, bytes: usize) -> String {
        format!("STRATA_STRATEGY, line {}, for {bytes} bytes", self.line)
    }

    /// Whether the algorithm does the collective on a grid with these shares: by symbols, or whether there is such an algorithm.
    fn prove(&self, grid: &Arc<Grid>, by_symbols: bool) -> std::result::Result<verify::Report, String> {
        let Strategy { collective, choice, .. } = self;
        let shape = Shape::new(*collective, grid.clone());
        let name = collective.name();
        if algorithms::code_of(choice).is_some() || algorithms::is_on_board(choice) {
            return Err(format!("{choice} is not for strategies: they are exact, and between nodes"));
        }
        if !algorithms::supports(choice, &shape) {
            return Err(format!("algorithm {choice} does not do {name} on {grid}"));
        }
        let first = algorithms::build(choice, &shape, Rank(0)).map_err(|error| error.text().to_string())?;
        if let Some(shares) = &self.shares {
            let is_shared = *collective == Collective::AllReduce && *choice == super::synthesis::shared_choice(grid);
            if !is_shared || shares.chunks() != first.chunks_per_block as usize {
                let wanted = super::synthesis::shared_choice(grid);
                return Err(format!("{name} by {choice} has no shares: all_reduce by {wanted} has"));
            }
        }
        if !by_symbols {
            return Ok(verify::Report::default());
        }
        let rest = (1..grid.nranks()).map(|rank| algorithms::build(choice, &shape, Rank::from_index(rank)));
        let plans = std::iter::once(Ok(first)).chain(rest).collect::<Result<Vec<_>>>();
        let plans = plans.map_err(|error| error.text().to_string())?;
        verify(&plans, &verify::Options::default()).map_err(|why| format!("{choice} is not proved: {why}"))
    }
}

impl fmt::Display for Strategies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        writeln!(f, "{HEAD}\ngrid {}", list(&self.nodes))?;
        for strategy in &self.all {
            let Strategy { collective, from_bytes, below_bytes, choice, segment_bytes, window, shares, .. } = strategy;
            let (from, below) = (bytes_text(*from_bytes), bytes_text(*below_bytes));
            let segment = if *segment_bytes == usize::MAX { "whole".into() } else { bytes_text(*segment_bytes) };
            write!(f, "{} {from} {below} {choice} segment={segment} window={window}", collective.name())?;
            if let Some(shares) = shares {
                let parts: Vec<usize> = shares.parts().map(|part| part as usize).collect();
                let rail = &parts[..self.nodes.len().min(parts.len())];
                let is_alike = parts.chunks(self.nodes.len().max(1)).all(|other| other == rail);
                write!(f, " shares={}", list(if is_alike { rail } else { &parts }))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The ranks of each node.
fn sizes(grid: &Grid) -> Vec<usize> {
    grid.node_ids().map(|node: NodeId| grid.members(node).len()).collect()
}

/// What rank 0 sends of its file.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    path: String,
    text: std::result::Result<String, String>,
}

/// Reads the text of a file of strategies.
///
/// # Errors
/// `InvalidArgument` where it cannot be read or is too long.
pub fn text_of(path: &Path) -> Result<String> {
    let wrong = |what: String| Error::InvalidArgument(format!("strategies {}: {what}", path.display()));
    // A pipe would be waited for, and a device may have no end.
    let found = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if !found.is_file() || found.len() > MOST_BYTES {
        return Err(wrong(format!("not a file of at most {MOST_BYTES} bytes")));
    }
    std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))
}

/// What rank 0 sends to the others: its file's text, or why it has none; empty where its settings name none.
pub fn offer(config: &Config) -> String {
    let path = config.strategy.clone();
    if path == NONE || path.is_empty() {
        return String::new();
    }
    let text = text_of(Path::new(&path)).map_err(|error| error.text().to_string());
    serde_json::to_string(&Offer { path, text }).unwrap_or_default()
}

/// What came of rank 0's file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgreedStrategies {
    /// The strategies that all ranks follow.
    pub strategies: Strategies,
    /// For rank 0's user: why none holds.
    pub complaint: Option<String>,
    /// For this rank's log: its own file is another one.
    pub difference: Option<String>,
}

/// What all ranks follow, by rank 0's offer: a pure function of it and the grid. `own` are this rank's settings.
///
/// # Errors
/// `Remote` for an offer that cannot be read.
pub fn agree(offer: &str, own: &Config, grid: &Arc<Grid>) -> Result<AgreedStrategies> {
    let mut agreed = AgreedStrategies::default();
    if offer.is_empty() {
        let is_named = self::offer(own) != offer;
        agreed.difference = is_named.then(|| {
            format!("STRATA_STRATEGY={} is not followed: rank 0 has no strategies, which counts", own.strategy)
        });
        return Ok(agreed);
    }
    let Offer { path, text } = serde_json::from_str(offer)
        .map_err(|error| Error::Remote(format!("rank 0 sent strategies that cannot be read: {error}")))?;
    let digest = |text: &str| Digest::new("strategies").text(text).value();
    if let Ok(text) = &text {
        let mine = text_of(Path::new(&own.strategy)).map(|mine| digest(&mine));
        if own.strategy != NONE && mine.ok() != Some(digest(text)) {
            agreed.difference =
                Some(format!("the strategies {} are others than rank 0's, which are {path} and count", own.strategy));
        }
    }
    let parsed = text.and_then(|text| {
        let strategies = Strategies::parse(&text).map_err(|fault| format!("strategies {path}, {fault}"))?;
        let proved = strategies.prove(grid, MOST_PROVED).map_err(|fault| format!("strategies {path}, {fault}"));
        proved.map(|_| strategies)
    });
    match parsed {
        Ok(strategies) => agreed.strategies = strategies,
        Err(why) => agreed.complaint = Some(format!("STRATA_STRATEGY is not followed: {why}")),
    }
    Ok(agreed)
}

#[cfg(test)]
mod tests {
    use super::super::{decide, Executor, Policy};
    use super::*;

    const GOOD: &str = "# a comment\nstrata strategy 1\ngrid 2,2,2\n\
                        all_reduce 1M 64M two_level(direct,direct) segment=512K window=4 shares=3,3,0\n\
                        reduce 1M 64M two_level(ring,ring) segment=64K window=2\n";

    fn grid() -> Arc<Grid> {
        Arc::new(Grid::blocks(&[2; 3]))
    }

    #[test]
    fn a_file_is_read_as_it_is_written() {
        let read = Strategies::parse(GOOD).unwrap();
        let written = read.to_string();
        let again = Strategies::parse(&written).unwrap();
        assert_eq!(written, again.to_string());
        assert_eq!(read.all[0].shares, again.all[0].shares);
        assert_eq!(read.all[0].shares.as_ref().unwrap().parts().collect::<Vec<_>>(), [3, 3, 0, 3, 3, 0]);
        assert_eq!((read.all[1].line, read.all[1].segment_bytes, read.all[1].window), (5, 64 << 10, 2));
    }

    #[test]
    fn what_is_malformed_is_refused_with_its_line() {
        for (from, to, line, said) in [
            ("strategy 1", "strategy 9", 2, "begins with"),
            ("grid 2,2,2", "grid 2,x", 3, "grid"),
            ("grid 2,2,2", "grid 2,0,2", 3, "grid"),
            ("all_reduce", "all_reduse", 4, "no collective all_reduse"),
            ("1M 64M two_level(direct", "64M 1M two_level(direct", 4, "no messages"),
            ("two_level(direct,direct)", "two_level(dirct,direct)", 4, "did you mean direct?"),
            ("window=4", "window=65", 4, "window"),
            ("segment=512K", "segment=0", 4, "at least 1"),
            ("segment=512K", "colour=red", 4, "colour=red"),
            ("shares=3,3,0", "shares=3,3", 4, "2 shares"),
            ("shares=3,3,0", "shares=0,0,0", 4, "nothing"),
            ("shares=3,3,0", "shares=3,x,0", 4, "numbers"),
            ("reduce 1M 64M two_level(ring", "all_reduce 2M 3M two_level(ring", 5, "line 4 is for"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let fault = Strategies::parse(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(fault.line == line && fault.what.contains(said), "{from} -> {to}: {fault}");
        }
        assert_eq!(Strategies::parse("").unwrap_err().line, 1);
    }

    #[test]
    fn what_is_not_proved_or_of_another_grid_is_refused_with_its_line() {
        let prove = |text: &str, grid: Arc<Grid>| Strategies::parse(text).unwrap().prove(&grid, MOST_PROVED);
        assert_eq!(prove(GOOD, grid()).unwrap().len(), 2);
        let other = prove(GOOD, Arc::new(Grid::blocks(&[2; 2]))).unwrap_err();
        assert!(other.line == 3 && other.what.contains("[2, 2, 2]"), "{other}");
        for (from, to, said) in [
            ("two_level(direct,direct)", "two_level(direct,ring)", "has no shares"),
            ("two_level(direct,direct)", "board", "not for strategies"),
            ("two_level(direct,direct)", "reduce_scatter_gather", "does not do"),
            ("two_level(direct,direct)", "two_level(direct,coded_mx8)", "not for strategies"),
        ] {
            let fault = prove(&GOOD.replacen(from, to, 1), grid()).unwrap_err();
            assert!(fault.line == 4 && fault.what.contains(said), "{to}: {fault}");
        }
    }

    #[test]
    fn calls_of_a_strategy_s_sizes_follow_it_and_others_do_not() {
        let mut context = Context::new(grid(), Config::default(), false);
        context.knowledge.strategies = Arc::new(Strategies::parse(GOOD).unwrap());
        let decided = |collective, bytes| decide(&Request::new(collective, bytes), &context).unwrap();
        let decision = decided(Collective::AllReduce, 2 << 20);
        let Executor::Own(selection) = &decision.executor else { panic!("{decision:?}") };
        assert_eq!((decision.by, selection.choice.rail.as_str()), (Policy::Strategy, "direct"));
        assert_eq!((selection.segment_bytes, selection.window), (512 << 10, 4));
        assert!(selection.shares.is_some() && decision.reason.contains("line 4"), "{decision:?}");
        assert_eq!(decided(Collective::AllReduce, 64 << 20).by, Policy::Defaults);
        assert_eq!(decided(Collective::Reduce, 2 << 20).by, Policy::Strategy);
        assert_eq!(decided(Collective::AllGather, 2 << 20).by, Policy::Defaults);
        let named = Request { named: Some("ring"), ..Request::new(Collective::AllReduce, 2 << 20) };
        assert_eq!(decide(&named, &context).unwrap().by, Policy::Named);
    }

    #[test]
    fn all_follow_rank_zero_s_file_and_a_rank_with_another_one_hears_of_it() {
        let folder = std::env::temp_dir().join(format!("strata-strategy-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            Config { strategy: path.to_string_lossy().into_owned(), ..Config::default() }
        };
        let (zero, other) = (config("zero.txt", GOOD), config("other.txt", &GOOD.replace("window=4", "window=3")));
        let offered = offer(&zero);
        let agreed = |own: &Config, grid: Arc<Grid>| agree(&offered, own, &grid).unwrap();
        let same = agreed(&zero, grid());
        assert_eq!((same.strategies.all.len(), &same.complaint, &same.difference), (2, &None, &None));
        let differs = agreed(&other, grid());
        assert_eq!(differs.strategies, same.strategies);
        assert!(differs.difference.is_some_and(|text| text.contains("others than rank 0's")));
        assert_eq!(agreed(&Config::default(), grid()).strategies, same.strategies);
        let elsewhere = agreed(&zero, Arc::new(Grid::blocks(&[3; 2])));
        assert!(elsewhere.strategies.all.is_empty() && elsewhere.complaint.is_some_and(|text| text.contains("line 3")));
        let missing = Config { strategy: "/no/such/file".to_string(), ..Config::default() };
        let missing = agree(&offer(&missing), &missing, &grid()).unwrap();
        assert!(missing.complaint.is_some_and(|text| text.contains("/no/such/file")), "rank 0 cannot read it");
        let alone = agree(&offer(&Config::default()), &zero, &grid()).unwrap();
        assert!(alone.strategies.all.is_empty() && alone.difference.is_some());
        assert!(matches!(agree("[1]", &zero, &grid()), Err(Error::Remote(_))));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
