//! Timelines: a track for each resource, with a bar wherever it was busy; all panels have one axis of time.
#![forbid(unsafe_code)]

use svg::node::element::{Group, Line, Rectangle, Text, Title};
use svg::Document;

/// One resource.
#[derive(Debug, Clone, PartialEq)]
pub struct Track {
    /// Its name.
    pub name: String,
    /// When it was busy, in ns, from and until, in order.
    pub bars: Vec<(u64, u64)>,
    /// The colour of the bars.
    pub colour: &'static str,
}

impl Track {
    /// For how long it was busy, in ns.
    pub fn busy_ns(&self) -> u64 {
        self.bars.iter().map(|(from, until)| until - from).sum()
    }
}

/// What was busy in one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// What was run.
    pub title: String,
    /// How long it took, in ns.
    pub ns: f64,
    /// The resources, from top to bottom.
    pub tracks: Vec<Track>,
}

const MARGIN: f64 = 16.0;
const WIDTH: f64 = 760.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 70.0;
const TRACK: f64 = 18.0;
const PANEL_HEAD: f64 = 30.0;
const HEAD: f64 = 36.0;
const FOOT: f64 = 44.0;
const NOTE: f64 = 17.0;
const LETTERS: f64 = 12.0;
const INK: &str = "#222222";
/// Gaps narrower than this, in points, cannot be seen: bars beside them are drawn as one.
const FINEST: f64 = 0.15;

/// A sheet of panels, one under the other.
pub fn sheet(title: &str, panels: &[Panel], notes: &[String]) -> String {
    let longest = panels.iter().map(|panel| panel.ns).fold(1.0, f64::max);
    let per_ns = WIDTH / longest;
    let whole: f64 = panels.iter().map(height).sum::<f64>() + HEAD + FOOT + NOTE * notes.len() as f64;
    let width = LEFT + WIDTH + RIGHT;
    let mut document = Document::new()
        .set("viewBox", (0, 0, width as i64, whole.ceil() as i64))
        .set("width", width)
        .set("height", whole.ceil())
        .set("font-family", "Helvetica, Arial, sans-serif")
        .set("font-size", LETTERS)
        .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "white"))
        .add(written(title, (MARGIN, 24.0), "start").set("font-size", 16));
    let mut top = HEAD;
    for panel in panels {
        document = document.add(drawn(panel, top, per_ns));
        top += height(panel);
    }
    document = document.add(axis(HEAD, top, longest, per_ns));
    for (index, note) in notes.iter().enumerate() {
        let y = top + FOOT + NOTE * index as f64;
        document = document.add(written(note, (MARGIN, y), "start"));
    }
    format!("{document}\n")
}

fn height(panel: &Panel) -> f64 {
    PANEL_HEAD + panel.tracks.len().max(1) as f64 * TRACK
}

fn drawn(panel: &Panel, top: f64, per_ns: f64) -> Group {
    let title = format!("{}: {:.2} ms", panel.title, panel.ns / 1e6);
    let mut group = Group::new().add(written(&title, (MARGIN, top + 20.0), "start").set("font-weight", "bold"));
    for (index, track) in panel.tracks.iter().enumerate() {
        let y = top + PANEL_HEAD + index as f64 * TRACK;
        group = group.add(written(&track.name, (LEFT - 8.0, y + 13.0), "end"));
        let share = format!("{:.0} %", track.busy_ns() as f64 / panel.ns.max(1.0) * 100.0);
        let end = LEFT + panel.ns * per_ns + 6.0;
        group = group.add(written(&share, (end, y + 13.0), "start"));
        for (from, until) in joined(&track.bars, FINEST / per_ns) {
            let bar = Rectangle::new()
                .set("class", "bar")
                .set("x", rounded(LEFT + from as f64 * per_ns))
                .set("y", rounded(y + 2.0))
                .set("width", rounded(((until - from) as f64 * per_ns).max(FINEST)))
                .set("height", TRACK - 4.0)
                .set("fill", track.colour)
                .add(Title::new(format!("{}: {:.3} to {:.3} ms", track.name, from as f64 / 1e6, until as f64 / 1e6)));
            group = group.add(bar);
        }
    }
    let end = LEFT + panel.ns * per_ns;
    let bottom = top + height(panel);
    group.add(upright(end, top + PANEL_HEAD, bottom, INK))
}

fn written(text: &str, (x, y): (f64, f64), anchor: &str) -> Text {
    Text::new(text).set("x", rounded(x)).set("y", rounded(y)).set("text-anchor", anchor)
}

/// Hundredths of a point are as fine as anything is drawn.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Bars with less than `gap` ns between them as one.
fn joined(bars: &[(u64, u64)], gap: f64) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for &(from, until) in bars {
        match joined.last_mut() {
            Some(last) if (from.saturating_sub(last.1) as f64) <= gap => last.1 = last.1.max(until),
            _ => joined.push((from, until)),
        }
    }
    joined
}

fn upright(x: f64, from: f64, until: f64, colour: &str) -> Line {
    Line::new()
        .set("x1", rounded(x))
        .set("x2", rounded(x))
        .set("y1", rounded(from))
        .set("y2", rounded(until))
        .set("stroke", colour)
        .set("stroke-width", 0.6)
}

/// The axis of time, with about eight marks.
fn axis(top: f64, bottom: f64, longest: f64, per_ns: f64) -> Group {
    let mut step = 10f64.powf((longest / 8.0).log10().floor());
    while longest / step > 10.0 {
        step *= if longest / step > 20.0 { 5.0 } else { 2.0 };
    }
    let mut group = Group::new();
    let mut at = 0.0;
    while at <= longest {
        let x = LEFT + at * per_ns;
        group = group.add(upright(x, top + PANEL_HEAD, bottom, "#cccccc"));
        let text = format!("{}", (at / 1e3).round() / 1e3);
        group = group.add(written(&text, (x, bottom + 14.0), "middle"));
        at += step;
    }
    group.add(written("ms", (LEFT + WIDTH + 30.0, bottom + 14.0), "start"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_has_a_bar_for_each_stretch_that_can_be_told_from_the_next() {
        let track = |bars: &[(u64, u64)]| Track { name: String::from("NIC"), bars: bars.to_vec(), colour: "#336699" };
        let panel = |ns: f64, bars: &[(u64, u64)]| Panel { title: String::from("run"), ns, tracks: vec![track(bars)] };
        let panels = [panel(1e6, &[(0, 100_000), (100_001, 200_000), (900_000, 1_000_000)]), panel(5e5, &[])];
        let text = sheet("title", &panels, &[String::from("note")]);
        assert_eq!(text.matches("class=\"bar\"").count(), 2, "{text}");
        assert!(text.contains("30 %"), "the share of the time in which it was busy: {text}");
        let errors = svg::read(&text).unwrap().filter(|event| matches!(event, svg::parser::Event::Error(_))).count();
        assert_eq!(errors, 0);
    }
}
