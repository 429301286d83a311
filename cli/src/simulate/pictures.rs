//! Heat maps of ratios, and the timeline of one cell.
#![forbid(unsafe_code)]

use super::cells::{ask, Cell, Manner};
use super::lists::size_text;
use super::method::{way_text, Method};
use super::report::Outcome;
use crate::draw::heatmap::{self, HeatMap, Scale};
use crate::draw::{page, timeline};
use std::collections::BTreeMap;
use std::path::Path;
use strata::error::{counted, Error, Result};
use strata::plan::Collective;
use strata::sim::price::{grid_of, Detail};
use strata::sim::{Busy, Cluster, Resource};
use strata::topo::{Grid, NodeId};

/// More ranks than this are not all run for a timeline.
const MOST_DRAWN: usize = 256;

/// What a picture's file is by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Svg,
    Html,
}

fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => Ok(Format::Svg),
        Some("html" | "htm") => Ok(Format::Html),
        _ => Err(Error::InvalidArgument(format!("{}: a picture is a file .svg or .html", path.display()))),
    }
}

/// Whether a picture can be written there, as far as can be told before.
pub fn check(path: &Path) -> Result<()> {
    format_of(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => Err(Error::System(format!("there is no folder {}", folder.display()))),
        _ => Ok(()),
    }
}

fn write(path: &Path, title: &str, drawing: String) -> Result<()> {
    let text = match format_of(path)? {
        Format::Svg => drawing + "\n",
        Format::Html => page(title, &drawing),
    };
    std::fs::write(path, text).map_err(|error| Error::System(format!("cannot write {}: {error}", path.display())))
}

/// Draws ranks by size, one map for each collective and method.
pub fn heat_maps(outcome: &Outcome<'_>, ranks: &[usize], sizes: &[usize], path: &Path) -> Result<()> {
    let mut collectives: Vec<Collective> = outcome.cells.iter().map(|cell| cell.collective).collect();
    collectives.dedup();
    let others: Vec<usize> = (0..outcome.methods.len()).filter(|&method| method != outcome.against).collect();
    let mut maps = Vec::new();
    for &collective in &collectives {
        for &method in &others {
            let drawn = |bytes: &usize| {
                let cell = |nranks: &usize| {
                    let wanted = Cell { collective, nranks: *nranks, message_bytes: *bytes };
                    let index = outcome.cells.iter().position(|cell| *cell == wanted)?;
                    square(outcome, index, method)
                };
                ranks.iter().map(cell).collect()
            };
            maps.push(HeatMap {
                title: format!(
                    "{}: {} against {}",
                    collective.name(),
                    outcome.methods[method],
                    outcome.methods[outcome.against]
                ),
                row_title: String::from("bytes"),
                column_title: String::from("ranks"),
                rows: sizes.iter().rev().map(|&bytes| size_text(bytes)).collect(),
                columns: ranks.iter().map(usize::to_string).collect(),
                cells: sizes.iter().rev().map(drawn).collect(),
                scale: Scale::Around(0.5, 1.0, 8.0),
                legend: String::new(),
            });
        }
    }
    let against = &outcome.methods[outcome.against];
    let title = format!("{}, simulated: how many times as fast as {against}", outcome.machine.name);
    let mut notes = vec![
        outcome.machine.text.clone(),
        format!("Each cell: the time of {against} by that of the method; blue is faster than {against}, red slower."),
    ];
    notes.extend(outcome.notes().into_iter().map(|note| note.replacen("* the", "Framed and with a star: the", 1)));
    write(path, &title, heatmap::sheet(&title, &maps, others.len(), &notes))
}

fn square(outcome: &Outcome<'_>, cell: usize, method: usize) -> Option<heatmap::Cell> {
    let ratio = outcome.ratio(cell, method)?;
    let marked = outcome.is_overloaded(cell, method);
    let answer = outcome.answers[cell][method].as_ref()?;
    let Cell { collective, nranks, message_bytes } = outcome.cells[cell];
    let by = way_text(&answer.way, collective, nranks, message_bytes);
    let busy = answer.price.binding().map(|(resource, share)| format!("; {resource} busy {:.0} %", share * 100.0));
    let text = match ratio {
        ratio if ratio < 9.995 => format!("{ratio:.2}"),
        ratio => format!("{ratio:.1}"),
    };
    Some(heatmap::Cell {
        value: ratio,
        text: if marked { format!("{text}*") } else { text },
        more: format!("{by}: {:.3} ms{}", answer.price.ns / 1e6, busy.unwrap_or_default()),
        marked,
    })
}

/// Draws what was busy when on the first node, for each method that is simulated.
pub fn timelines(manner: &Manner, cell: &Cell, methods: &[Method], path: &Path) -> Result<()> {
    let Cell { collective, nranks, message_bytes } = *cell;
    let fold = manner.detail.fold && nranks > MOST_DRAWN;
    let manner = Manner { detail: Detail { fold, timeline: true, ..manner.detail }, ..manner.clone() };
    let grid = grid_of(&manner.machine, nranks);
    let mut panels = Vec::new();
    for method in methods {
        let Some(answer) = ask(&manner, cell, method)? else { continue };
        let by = way_text(&answer.way, collective, nranks, message_bytes);
        let title = if by == method.to_string() { by } else { format!("{method}, {by}") };
        let mut tracks = tracks(&manner.machine, &grid, &answer.price.timeline);
        if tracks.is_empty() {
            let bars = vec![(0, answer.price.ns as u64)];
            tracks.push(timeline::Track { name: String::from("as a whole, by its law"), bars, colour: "#bbbbbb" });
        }
        panels.push(timeline::Panel { title, ns: answer.price.ns, tracks });
    }
    let Cluster { name, text, .. } = &*manner.machine;
    let what = format!("{} of {} on {}", collective.name(), size_text(message_bytes), counted(nranks, "rank"));
    let title = format!("{name}, simulated: {what}");
    let mut notes = vec![
        text.clone(),
        String::from("Shown is the first node; beside each bar the part of the time in which it was busy."),
    ];
    if fold {
        notes.push(String::from("Of equal NICs only the first is run, with the ranks that use it."));
    }
    write(path, &title, timeline::sheet(&title, &panels, &notes))
}

/// The resources of the first node, with what they did.
fn tracks(machine: &Cluster, grid: &Grid, busy: &[Busy]) -> Vec<timeline::Track> {
    let members = grid.members(NodeId(0));
    let nnics = (machine.node.nics.value as usize).max(1);
    let name = |busy: &Busy| -> Option<(Resource, usize, String)> {
        let Busy { resource, index, .. } = *busy;
        let rank = members.iter().position(|rank| rank.index() == index);
        match resource {
            Resource::NicOut if index < nnics => Some((resource, index, format!("NIC {index}, sending"))),
            Resource::NicIn if index < nnics => Some((resource, index, format!("NIC {index}, receiving"))),
            Resource::Inside => Some((resource, rank?, format!("rank {index}, links inside the node"))),
            Resource::InsideOut => Some((resource, rank?, format!("rank {index}, links inside the node, sending"))),
            Resource::Thread => Some((resource, rank?, format!("rank {index}, thread"))),
            Resource::Engine => Some((resource, rank?, format!("rank {index}, copies and reductions"))),
            Resource::Library if index == 0 => Some((resource, 0, resource.to_string())),
            Resource::Shuffle if index == 0 => Some((resource, 0, String::from("packing for the library"))),
            Resource::Shuffle if index == 1 => Some((resource, 1, String::from("unpacking behind it"))),
            Resource::Processors => Some((resource, index, format!("processor {index}"))),
            _ => None,
        }
    };
    let mut tracks: BTreeMap<(Resource, usize), timeline::Track> = BTreeMap::new();
    for activity in busy {
        let Some((resource, place, name)) = name(activity) else { continue };
        let new = || timeline::Track { name, bars: Vec::new(), colour: colour(resource) };
        tracks.entry((resource, place)).or_insert_with(new).bars.push((activity.from_ns, activity.until_ns));
    }
    let mut tracks: Vec<timeline::Track> = tracks.into_values().collect();
    tracks.iter_mut().for_each(|track| track.bars.sort_unstable());
    tracks
}

fn colour(resource: Resource) -> &'static str {
    match resource {
        Resource::NicOut => "#4477aa",
        Resource::NicIn => "#66ccee",
        Resource::Inside => "#ccbb44",
        Resource::InsideOut => "#999933",
        Resource::Link => "#332288",
        Resource::Connection => "#44aa99",
        Resource::Thread => "#888888",
        Resource::Engine => "#aa3377",
        Resource::Library => "#228833",
        Resource::Shuffle => "#ee99bb",
        Resource::Processors => "#ee6677",
    }
}
