//! Heat maps: rows by columns of numbers, each a coloured cell with its text, as an SVG.
//!
//! Colours go by the logarithm of the value, since what is compared are ratios. Widths are estimated from the number of
//! characters, because nothing here knows fonts.
#![forbid(unsafe_code)]

use svg::node::element::{Element, Rectangle, Text, Title, SVG};
use svg::Document;

/// A cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// What its colour tells.
    pub value: f64,
    /// What is written in it.
    pub text: String,
    /// What a browser shows when the mouse rests on it; nothing if empty.
    pub more: String,
    /// Whether it has a frame.
    pub marked: bool,
}

/// Which colours values get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// From green at the first value over yellow to red at the second: how bad something is.
    Worse(f64, f64),
    /// From red at the first value over white at the second to blue at the third: below and above a measure.
    Around(f64, f64, f64),
}

/// A heat map.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMap {
    /// Above it.
    pub title: String,
    /// What the rows are, above their labels.
    pub row_title: String,
    /// What the columns are, beside their labels.
    pub column_title: String,
    /// A label for each row, the uppermost first.
    pub rows: Vec<String>,
    /// A label for each column.
    pub columns: Vec<String>,
    /// The cells of each row; empty where there is no value.
    pub cells: Vec<Vec<Option<Cell>>>,
    /// Their colours.
    pub scale: Scale,
    /// Below it: what the colours and texts mean.
    pub legend: String,
}

const CELL_HEIGHT: usize = 24;
const FONT: usize = 12;
const MARGIN: usize = 12;
/// Pixels of a character of the font, a little more than most.
const CHARACTER: usize = 7;

const GREEN: [f64; 3] = [166.0, 217.0, 150.0];
const YELLOW: [f64; 3] = [255.0, 243.0, 176.0];
const RED: [f64; 3] = [239.0, 138.0, 120.0];
const WHITE: [f64; 3] = [255.0, 255.0, 255.0];
const BLUE: [f64; 3] = [123.0, 173.0, 222.0];

impl Scale {
    /// The colour of a value, as `#rrggbb`. Values beyond the ends have the ends' colours; what is no number is grey.
    pub fn colour(self, value: f64) -> String {
        let part = |from: f64, to: f64| ((value / from).ln() / (to / from).ln()).clamp(0.0, 1.0);
        let (low, high, at) = match self {
            Scale::Worse(best, worst) => match part(best, worst) {
                at if at < 0.5 => (GREEN, YELLOW, 2.0 * at),
                at => (YELLOW, RED, 2.0 * at - 1.0),
            },
            Scale::Around(low, middle, _) if value < middle => (RED, WHITE, part(low, middle)),
            Scale::Around(_, middle, high) => (WHITE, BLUE, part(middle, high)),
        };
        if !at.is_finite() {
            return "#dddddd".to_string();
        }
        let mixed = |index: usize| (low[index] + (high[index] - low[index]) * at).round() as u8;
        format!("#{:02x}{:02x}{:02x}", mixed(0), mixed(1), mixed(2))
    }
}

fn width_of<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(|text| text.chars().count()).max().unwrap_or(0) * CHARACTER
}

fn written(text: &str, x: usize, y: usize, anchor: &str) -> Text {
    Text::new(text).set("x", x).set("y", y).set("text-anchor", anchor)
}

/// Where things are, in pixels.
struct Frame {
    label_width: usize,
    cell_width: usize,
    top: usize,
    width: usize,
    height: usize,
}

impl HeatMap {
    fn frame(&self) -> Frame {
        let texts = self.cells.iter().flatten().flatten().map(|cell| cell.text.as_str());
        let cell_width = width_of(texts.chain(self.columns.iter().map(String::as_str))) + 2 * CHARACTER;
        let heads = [self.row_title.as_str(), self.column_title.as_str()];
        let label_width = width_of(self.rows.iter().map(String::as_str).chain(heads)) + 2 * CHARACTER;
        let top = MARGIN + 3 * CELL_HEIGHT;
        let map = label_width + self.columns.len() * cell_width;
        let lines = width_of([self.title.as_str(), self.legend.as_str()].into_iter());
        let height = top + (self.rows.len() + 1) * CELL_HEIGHT + MARGIN;
        Frame { label_width, cell_width, top, width: map.max(lines) + 2 * MARGIN, height }
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (usize, usize) {
        let frame = self.frame();
        (frame.width, frame.height)
    }

    /// The drawing as a file of its own.
    pub fn svg(&self) -> String {
        stacked(std::slice::from_ref(self))
    }

    /// The drawing with its upper left corner at a place, to be put into another one.
    fn element(&self, (x, y): (usize, usize)) -> SVG {
        let frame = self.frame();
        let mut drawing = SVG::new().set("x", x).set("y", y).set("width", frame.width).set("height", frame.height);
        let title = written(&self.title, MARGIN, MARGIN + FONT, "start").set("font-weight", "bold");
        let baseline = frame.top - CELL_HEIGHT + FONT + 4;
        drawing = drawing.add(title);
        drawing = drawing.add(written(&self.row_title, MARGIN, baseline, "start").set("fill", "#555555"));
        let above = baseline - CELL_HEIGHT;
        drawing =
            drawing.add(written(&self.column_title, MARGIN + frame.label_width, above, "start").set("fill", "#555555"));
        for (column, label) in self.columns.iter().enumerate() {
            let middle = MARGIN + frame.label_width + column * frame.cell_width + frame.cell_width / 2;
            drawing = drawing.add(written(label, middle, baseline, "middle"));
        }
        for (row, label) in self.rows.iter().enumerate() {
            let y = frame.top + row * CELL_HEIGHT;
            drawing = drawing.add(written(label, MARGIN, y + FONT + 4, "start"));
            for (column, cell) in self.cells.get(row).into_iter().flatten().enumerate() {
                let x = MARGIN + frame.label_width + column * frame.cell_width;
                for part in cell.iter().flat_map(|cell| self.drawn(cell, x, y, frame.cell_width)) {
                    drawing = drawing.add(part);
                }
            }
        }
        let below = frame.top + self.rows.len() * CELL_HEIGHT + FONT + 6;
        drawing.add(written(&self.legend, MARGIN, below, "start").set("fill", "#555555"))
    }

    fn drawn(&self, cell: &Cell, x: usize, y: usize, width: usize) -> [Element; 2] {
        let (stroke, thickness) = if cell.marked { ("#222222", 2) } else { ("#ffffff", 1) };
        let mut rectangle = Rectangle::new()
            .set("x", x + 1)
            .set("y", y + 1)
            .set("width", width - 2)
            .set("height", CELL_HEIGHT - 2)
            .set("fill", self.scale.colour(cell.value))
            .set("stroke", stroke)
            .set("stroke-width", thickness);
        if !cell.more.is_empty() {
            rectangle = rectangle.add(Title::new(cell.more.as_str()));
        }
        let text = written(&cell.text, x + width / 2, y + FONT + 4, "middle").set("pointer-events", "none");
        [rectangle.into(), text.into()]
    }
}

/// Several heat maps, one below the other, as one file.
pub fn stacked(maps: &[HeatMap]) -> String {
    sheet("", maps, 1, &[])
}

/// Several heat maps, `across` of them side by side, as one file, with a title above and notes below.
pub fn sheet(title: &str, maps: &[HeatMap], across: usize, notes: &[String]) -> String {
    let lines: Vec<&[HeatMap]> = maps.chunks(across.max(1)).collect();
    let tallest = |line: &[HeatMap]| line.iter().map(|map| map.size().1).max().unwrap_or(0);
    // Maps that stand below each other begin at one edge.
    let widest = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|map| map.size().0).max();
    let widths: Vec<usize> = (0..across).map_while(widest).collect();
    let head = if title.is_empty() { 0 } else { 2 * CELL_HEIGHT };
    let foot = if notes.is_empty() { 0 } else { notes.len() * (FONT + 6) + MARGIN };
    let words = width_of(notes.iter().map(String::as_str)).max(width_of([title].into_iter()) * 4 / 3) + 2 * MARGIN;
    let width = if title.is_empty() { widths.iter().sum() } else { widths.iter().sum::<usize>().max(words) };
    let height = head + lines.iter().map(|line| tallest(line)).sum::<usize>() + foot;
    let mut document = Document::new()
        .set("width", width)
        .set("height", height)
        .set("viewBox", (0, 0, width, height))
        .set("font-family", "Helvetica, Arial, sans-serif")
        .set("font-size", FONT)
        .add(Rectangle::new().set("width", width).set("height", height).set("fill", "#ffffff"));
    if !title.is_empty() {
        document = document.add(written(title, MARGIN, MARGIN + FONT + 4, "start").set("font-size", FONT * 4 / 3));
    }
    let mut y = head;
    for line in lines {
        let mut x = 0;
        for (map, width) in line.iter().zip(&widths) {
            document = document.add(map.element((x, y)));
            x += width;
        }
        y += tallest(line);
    }
    for (index, note) in notes.iter().enumerate() {
        document = document.add(written(note, MARGIN, y + MARGIN + index * (FONT + 6), "start"));
    }
    document.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_go_by_ratios_and_end_at_the_ends() {
        let worse = Scale::Worse(1.0, 4.0);
        assert_eq!(worse.colour(1.0), worse.colour(0.5));
        assert_eq!(worse.colour(2.0), "#fff3b0", "half way to four times");
        assert_eq!(worse.colour(4.0), worse.colour(9.0));
        let around = Scale::Around(0.5, 1.0, 2.0);
        assert_eq!(around.colour(1.0), "#ffffff");
        assert_eq!([around.colour(0.25), around.colour(8.0)], ["#ef8a78", "#7badde"]);
        assert_eq!(around.colour(f64::NAN), "#dddddd");
    }

    #[test]
    fn every_label_and_cell_is_drawn_and_what_xml_reserves_is_escaped() {
        let cell = |value: f64, marked| {
            Some(Cell { value, text: format!("{value:.2}"), more: "12 < 13 us".to_string(), marked })
        };
        let map = HeatMap {
            title: "all_gather & more".to_string(),
            row_title: "algorithm".to_string(),
            column_title: "bytes".to_string(),
            rows: vec!["ring".to_string(), "log".to_string()],
            columns: vec!["1 KiB".to_string(), "1 MiB".to_string()],
            cells: vec![vec![cell(1.0, true), None], vec![cell(2.5, false), cell(1.25, false)]],
            scale: Scale::Worse(1.0, 4.0),
            legend: "times".to_string(),
        };
        let drawing = map.svg();
        for text in ["all_gather &amp; more", "algorithm", "ring", "1 MiB", "1.00", "2.50", "1.25", "12 &lt; 13 us"] {
            assert!(drawing.contains(text), "{text}: {drawing}");
        }
        assert_eq!(drawing.matches("<rect").count(), 1 + 3);
        assert_eq!(drawing.matches("#222222").count(), 1, "the marked one has a frame");
        let both = stacked(&[map.clone(), map.clone()]);
        assert!(both.contains(&format!("height=\"{}\"", 2 * map.size().1)));
        let three = sheet("three", &[map.clone(), map.clone(), map.clone()], 2, &["a note".to_string()]);
        let (right, below) = (format!("x=\"{}\"", map.size().0), format!("y=\"{}\"", 2 * CELL_HEIGHT + map.size().1));
        assert!(
            three.contains("three") && three.contains("a note") && three.contains(&right) && three.contains(&below)
        );
    }
}
