//! Plans as pictures: a row for each lane of each rank, a column for each round, a box for each step; messages and dependencies are
//! arrows.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use strata::plan::text::{cell, print_step, rounds, Pace};
use strata::plan::{Action, Channel, Plan};
use svg::node::element::{Definitions, Group, Line, Marker, Path, Rectangle, Text, Title};
use svg::Document;

/// The most steps that are drawn.
pub const MOST_STEPS: usize = 4096;

const MARGIN: f64 = 16.0;
const LEFT: f64 = 110.0;
const HEAD: f64 = 56.0;
const ROW: f64 = 26.0;
const BOX: f64 = 18.0;
const BETWEEN_RANKS: f64 = 12.0;
const BETWEEN_ROUNDS: f64 = 22.0;
/// Of a letter.
const WIDTH: f64 = 5.6;
/// Longer texts of steps are cut; all of it is the box's title.
const MOST_LETTERS: usize = 22;
const INK: &str = "#222222";
const MESSAGE: &str = "#1f6fb2";
const DEPENDENCY: &str = "#999999";

/// A step: rank, lane and position.
type At = (usize, usize, usize);

/// A message stream: sender, receiver, channel.
type Stream = (usize, usize, Channel);

/// Where things are on the sheet.
struct Sheet {
    rounds: HashMap<At, usize>,
    /// The upper edge of each lane of each rank.
    tops: Vec<Vec<f64>>,
    height: f64,
    letters: usize,
}

impl Sheet {
    fn new(plans: &[Plan]) -> Sheet {
        let mut top = HEAD;
        let mut tops = Vec::new();
        for plan in plans {
            let lanes = 0..plan.lanes.len().max(1);
            tops.push(lanes.map(|lane| top + lane as f64 * ROW).collect::<Vec<f64>>());
            top += plan.lanes.len().max(1) as f64 * ROW + BETWEEN_RANKS;
        }
        let actions = plans.iter().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps);
        let letters = actions.map(|step| cell(&step.action).chars().count()).max().unwrap_or(1).min(MOST_LETTERS);
        Sheet { rounds: rounds(plans, Pace::Steps), tops, height: top, letters }
    }

    fn box_width(&self) -> f64 {
        self.letters as f64 * WIDTH + 8.0
    }

    fn x(&self, round: usize) -> f64 {
        LEFT + round as f64 * (self.box_width() + BETWEEN_ROUNDS)
    }

    fn width(&self) -> f64 {
        let last = self.rounds.values().max().map_or(0, |last| last + 1);
        self.x(last) + MARGIN
    }

    /// From the end of one step to the beginning of another.
    fn arrow(&self, from: At, to: At, class: &str, colour: &str) -> Option<Path> {
        let (start, end) = (self.x(*self.rounds.get(&from)?) + self.box_width(), self.x(*self.rounds.get(&to)?));
        let middle = |at: At| self.tops[at.0][at.1] + BOX / 2.0;
        let (high, low) = (middle(from), middle(to));
        let bend = ((end - start) / 2.0).max(8.0);
        let way = format!(
            "M{start:.1},{high:.1} C{:.1},{high:.1} {:.1},{low:.1} {end:.1},{low:.1}",
            start + bend,
            end - bend
        );
        let path = Path::new().set("class", class).set("d", way).set("fill", "none").set("stroke", colour);
        let path = path.set("stroke-width", 1).set("marker-end", format!("url(#{class})"));
        Some(if class == "dependency" { path.set("stroke-dasharray", "4 2") } else { path })
    }
}

fn colour(action: &Action) -> &'static str {
    match action {
        Action::Send { .. } => "#d6e6f5",
        Action::Recv { .. } => "#dff0d8",
        Action::RecvReduce { .. } => "#f5e3c3",
        Action::Reduce { .. } => "#f5d0c3",
        Action::Copy { .. } => "#eeeeee",
        Action::Call(_) => "#e3d9f0",
        Action::Nop => "#ffffff",
    }
}

fn written(text: &str, x: f64, y: f64) -> Text {
    Text::new(text).set("x", (x * 10.0).round() / 10.0).set("y", (y * 10.0).round() / 10.0)
}

fn head(class: &str, colour: &str) -> Marker {
    let tip = Path::new().set("d", "M0,0 L6,3 L0,6 z").set("fill", colour);
    let marker = Marker::new().set("id", class).set("markerWidth", 6).set("markerHeight", 6);
    marker.set("refX", 6).set("refY", 3).set("orient", "auto").add(tip)
}

/// The plans of all ranks as an SVG.
pub fn sheet(title: &str, plans: &[Plan]) -> String {
    let sheet = Sheet::new(plans);
    let (width, height) = (sheet.width().max(LEFT + 400.0), sheet.height + MARGIN);
    let legend = "boxes: steps, a round each; blue arrows: messages; dashed: dependencies";
    let heads = Definitions::new().add(head("message", MESSAGE)).add(head("dependency", DEPENDENCY));
    let mut document = Document::new()
        .set("viewBox", (0, 0, width.ceil() as i64, height.ceil() as i64))
        .set("width", width.ceil())
        .set("height", height.ceil())
        .set("font-family", "Menlo, Consolas, monospace")
        .set("font-size", 9)
        .add(heads)
        .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "white"))
        .add(written(title, MARGIN, 24.0).set("font-size", 14))
        .add(written(legend, MARGIN, 42.0));
    for (rank, plan) in plans.iter().enumerate() {
        document = document.add(rows(&sheet, rank, plan));
    }
    format!("{}\n", document.add(arrows(&sheet, plans)))
}

/// A rank's lanes with their steps. What waits for ever stands at the left, in red.
fn rows(sheet: &Sheet, rank: usize, plan: &Plan) -> Group {
    let mut group = Group::new();
    for (lane, top) in sheet.tops[rank].iter().enumerate() {
        let name = if lane == 0 { format!("rank {rank}  lane 0") } else { format!("lane {lane}") };
        let line = Line::new().set("x1", LEFT).set("x2", sheet.width()).set("y1", top + BOX / 2.0);
        group = group.add(line.set("y2", top + BOX / 2.0).set("stroke", "#e5e5e5"));
        group = group.add(written(&name, LEFT - 8.0, top + 12.0).set("text-anchor", "end"));
    }
    for (number, lane) in plan.lanes.iter().enumerate() {
        for (at, step) in lane.steps.iter().enumerate() {
            let round = sheet.rounds.get(&(rank, number, at));
            let (x, y) = (sheet.x(round.copied().unwrap_or(0)), sheet.tops[rank][number]);
            let stroke = if round.is_some() { INK } else { "#cc0000" };
            let rectangle = Rectangle::new().set("class", "step").set("x", x).set("y", y).set("rx", 2);
            let rectangle = rectangle.set("width", sheet.box_width()).set("height", BOX).set("stroke", stroke);
            let rectangle = rectangle.set("stroke-width", 0.6).set("fill", colour(&step.action));
            let says = Title::new(format!("rank {rank}, step {number}.{at}: {}", print_step(step)));
            let mut text = cell(&step.action);
            if text.chars().count() > MOST_LETTERS {
                text = text.chars().take(MOST_LETTERS - 2).collect::<String>() + "..";
            }
            group = group.add(rectangle.add(says)).add(written(&text, x + 4.0, y + 12.0));
        }
    }
    group
}

fn arrows(sheet: &Sheet, plans: &[Plan]) -> Group {
    let mut sent: HashMap<Stream, Vec<At>> = HashMap::new();
    let mut taken: Vec<(Stream, At)> = Vec::new();
    let mut group = Group::new();
    for (rank, plan) in plans.iter().enumerate() {
        for (number, lane) in plan.lanes.iter().enumerate() {
            for (at, step) in lane.steps.iter().enumerate() {
                let here = (rank, number, at);
                for dep in &step.deps {
                    let from = (rank, dep.lane as usize, dep.step as usize);
                    group = sheet.arrow(from, here, "dependency", DEPENDENCY).into_iter().fold(group, Group::add);
                }
                match step.action {
                    Action::Send { to, channel, .. } => sent.entry((rank, to.index(), channel)).or_default().push(here),
                    Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                        taken.push(((from.index(), rank, channel), here));
                    }
                    _ => {}
                }
            }
        }
    }
    let mut next: HashMap<Stream, usize> = HashMap::new();
    for (key, here) in taken {
        let nth = next.entry(key).or_default();
        let from = sent.get(&key).and_then(|sent| sent.get(*nth)).copied();
        *nth += 1;
        let arrow = from.and_then(|from| sheet.arrow(from, here, "message", MESSAGE));
        group = arrow.into_iter().fold(group, Group::add);
    }
    group
}
