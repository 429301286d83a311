//! From figures to places: a pure function.
//!
//! Every figure stands for the interval that its true value may be in ([`Series::bounds`]). An answer is given where it is the
//! same for all values in the intervals; else it is unknown, and the text says why. What is assumed of the machine:
//! - Round trips through a NIC are shortest from its own NUMA node.
//! - A copy beside 8 of a GPU behind the same switch keeps less than [`SHARES`] of its rate, and beside those of others more
//!   than [`APART`]. A limit that all GPUs have in common, such as the host's memory, looks like a switch that all share; the
//!   text says so where all GPUs slow each other.
//! - A GPU's copy is slowed most by traffic through its own NIC.
#![forbid(unsafe_code)]

use super::{CopyFigures, ProbeFigures, ProbeMeasured, Series, Subjects};

/// A copy that keeps less than this share of its rate beside another GPU's copies has a link in common with it.
pub const SHARES: f64 = 0.75;
/// A copy that keeps more than this share has none.
pub const APART: f64 = 0.85;
/// Traffic that leaves a copy more than this share of its rate does not slow it.
pub const UNTOUCHED: f64 = 0.95;

/// An answer, none where it is unknown; and the figures that it goes by, or why it is unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict<T> {
    /// The answer.
    pub answer: Option<T>,
    /// The figures, in words.
    pub why: String,
}

/// What the figures tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Inferred {
    /// The NUMA node of each NIC.
    pub nodes: Vec<Verdict<u32>>,
    /// Of each GPU, whether it is behind one switch with each GPU: none where that is unknown.
    pub switches: Vec<Verdict<Vec<Option<bool>>>>,
    /// The NIC of each GPU, by its place in the list.
    pub nics: Vec<Verdict<usize>>,
}

/// Finds the places of NICs and GPUs.
pub fn infer(subjects: &Subjects, figures: &ProbeFigures) -> Inferred {
    let nodes = figures.round_trips.iter().map(|trips| node_of(&figures.nodes, trips)).collect();
    let nics = figures.copies.iter().map(|copies| nic_of(subjects, copies)).collect();
    Inferred { nodes, switches: switches(subjects, figures), nics }
}

/// The one among candidates that is below all others whatever the noise; and the measured ones, the least first.
fn clear_least<T: Copy>(candidates: &[(T, &Series)]) -> Option<T> {
    let highest = |series: &Series| series.bounds().1;
    let (place, (found, least)) =
        candidates.iter().enumerate().min_by(|(_, a), (_, b)| f64::total_cmp(&highest(a.1), &highest(b.1)))?;
    let clear = |(at, (_, other)): (usize, &(T, &Series))| at == place || highest(least) < other.bounds().0;
    candidates.iter().enumerate().all(clear).then_some(*found)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn list(items: &[String]) -> String {
    items.join(", ")
}

/// The largest noise of some series, in words.
fn noise<'a>(series: impl Iterator<Item = &'a Series>) -> String {
    percent(series.map(Series::noise).fold(0.0, f64::max))
}

fn node_of(nodes: &[u32], trips: &[ProbeMeasured]) -> Verdict<u32> {
    let text = |(node, trip): (&u32, &ProbeMeasured)| match trip {
        Ok(series) => format!("{:.1} us from node {node}", series.median()),
        Err(why) => why.clone(),
    };
    let mut texts: Vec<String> = nodes.iter().zip(trips).map(text).collect();
    texts.dedup();
    let measured: Vec<(u32, &Series)> =
        nodes.iter().zip(trips).filter_map(|(node, trip)| Some((*node, trip.as_ref().ok()?))).collect();
    if let [node] = nodes {
        return Verdict { answer: Some(*node), why: format!("the machine shows one node; {}", list(&texts)) };
    }
    if nodes.is_empty() {
        return Verdict { answer: None, why: "no NUMA node can be read".to_string() };
    }
    if measured.len() < nodes.len() {
        return Verdict { answer: None, why: list(&texts) };
    }
    let answer = clear_least(&measured);
    let why = match answer {
        Some(_) => list(&texts),
        None => {
            format!("{}: not apart by more than the noise, {}", list(&texts), noise(measured.iter().map(|of| of.1)))
        }
    };
    Verdict { answer, why }
}

/// The least and greatest share of its rate that a copy may keep.
fn kept(alone: &Series, beside: &Series) -> (f64, f64) {
    let ((alone_least, alone_most), (least, most)) = (alone.bounds(), beside.bounds());
    (least / alone_most, most / alone_least)
}

/// Whether a GPU's copies are slowed by those of another one.
fn slowed(figures: &ProbeFigures, gpu: usize, other: usize) -> Option<bool> {
    let alone = figures.copies[gpu].alone.as_ref().ok()?;
    let beside = figures.copies[gpu].beside[other].as_ref()?.as_ref().ok()?;
    let (least, most) = kept(alone, beside);
    match () {
        () if most < SHARES => Some(true),
        () if least > APART => Some(false),
        () => None,
    }
}

/// Whether each two GPUs share a switch. Both must slow each other, or neither the other; and who shares with one shares with
/// all that this one shares with. Figures that contradict this tell nothing of the GPUs they are about.
pub(super) fn pairs(figures: &ProbeFigures) -> Vec<Vec<Option<bool>>> {
    let count = figures.copies.len();
    let direct = |a: usize, b: usize| match (slowed(figures, a, b), slowed(figures, b, a)) {
        (one, other) if one == other => one,
        _ => None,
    };
    let direct: Vec<Vec<Option<bool>>> = (0..count).map(|a| (0..count).map(|b| direct(a, b)).collect()).collect();
    let mut group: Vec<usize> = (0..count).collect();
    for (a, row) in direct.iter().enumerate() {
        for b in (0..count).filter(|&b| row[b] == Some(true)) {
            let (from, to) = (group[b], group[a]);
            group.iter_mut().filter(|of| **of == from).for_each(|of| *of = to);
        }
    }
    let members = |of: usize| -> Vec<usize> { (0..count).filter(|&gpu| group[gpu] == of).collect() };
    let between = |a: usize, b: usize| {
        let (one, other) = (members(group[a]), members(group[b]));
        one.iter().flat_map(|&a| other.iter().map(move |&b| (a, b))).any(|(a, b)| direct[a][b] == Some(false))
    };
    let verdict = |a: usize, b: usize| match (group[a] == group[b], between(a, b)) {
        _ if a == b => Some(true),
        (true, false) => Some(true),
        (false, true) => Some(false),
        _ => None,
    };
    (0..count).map(|a| (0..count).map(|b| verdict(a, b)).collect()).collect()
}

fn switches(subjects: &Subjects, figures: &ProbeFigures) -> Vec<Verdict<Vec<Option<bool>>>> {
    let pairs = pairs(figures);
    let all = figures.copies.len() > 1 && pairs.iter().flatten().all(|pair| *pair == Some(true));
    let verdict = |(gpu, copies): (usize, &CopyFigures)| {
        let alone = match &copies.alone {
            Ok(alone) => alone,
            Err(why) => return Verdict { answer: None, why: why.clone() },
        };
        let others = copies.beside.iter().enumerate().filter_map(|(other, beside)| Some((other, beside.as_ref()?)));
        let text = |(other, beside): (usize, &ProbeMeasured)| match beside {
            Ok(beside) => format!("{:.0} beside {}", beside.median(), subjects.gpus[other].name),
            Err(why) => format!("{}: {why}", subjects.gpus[other].name),
        };
        let mut texts = vec![format!("{:.0} MB/s alone", alone.median())];
        texts.extend(others.map(text));
        let mut why = list(&texts);
        if pairs[gpu].contains(&None) {
            let series = copies.beside.iter().flatten().filter_map(|beside| beside.as_ref().ok());
            why += &format!(": unclear at a noise of {}", noise(series.chain([alone])));
        }
        if all {
            why += "; or all share another limit, such as the host's memory";
        }
        Verdict { answer: Some(pairs[gpu].clone()), why }
    };
    figures.copies.iter().enumerate().map(verdict).collect()
}

fn nic_of(subjects: &Subjects, copies: &CopyFigures) -> Verdict<usize> {
    let alone = match &copies.alone {
        Ok(alone) => alone,
        Err(why) => return Verdict { answer: None, why: why.clone() },
    };
    let text = |(nic, beside): (usize, &ProbeMeasured)| match beside {
        Ok(beside) => format!("{:.0} beside traffic of {}", beside.median(), subjects.nics[nic].name),
        Err(why) => why.clone(),
    };
    let mut texts = vec![format!("{:.0} MB/s alone", alone.median())];
    texts.extend(copies.loopback.iter().enumerate().map(text));
    texts.dedup();
    let why = list(&texts);
    let measured: Vec<(usize, &Series)> =
        copies.loopback.iter().enumerate().filter_map(|(nic, beside)| Some((nic, beside.as_ref().ok()?))).collect();
    if measured.is_empty() || measured.len() < copies.loopback.len() {
        return Verdict { answer: None, why };
    }
    let slows = |nic: &usize| kept(alone, measured[*nic].1).1 < UNTOUCHED;
    let answer = clear_least(&measured).filter(slows);
    let noise = noise(measured.iter().map(|of| of.1).chain([alone]));
    let why = if answer.is_some() { why } else { format!("{why}: no NIC slows it most beyond the noise, {noise}") };
    Verdict { answer, why }
}
