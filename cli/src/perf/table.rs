//! The columns of nccl-tests, and the same figures as JSON.
#![forbid(unsafe_code)]

use serde_json::{json, Value};

/// One measured way (out of place or in place) of one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Seconds per call: the whole loop over its iterations, on the slowest rank.
    pub mean: f64,
    /// Seconds of each iteration on its slowest rank.
    pub iterations: Vec<f64>,
    /// Wrong elements on all ranks; `None`: not checked.
    pub wrong: Option<usize>,
    /// Seconds until the first element was final on the slowest rank, the median; where that was measured.
    pub front: Option<f64>,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Bytes, as bandwidths refer to them.
    pub size: usize,
    /// The count given to the call.
    pub count: usize,
    /// The type's name.
    pub dtype: &'static str,
    /// The reduction's name.
    pub redop: &'static str,
    /// The root; -1 without.
    pub root: i64,
    /// Bus bandwidth over algorithm bandwidth.
    pub factor: f64,
    /// Out of place.
    pub out_of_place: Timing,
    /// In place, where the collective has such a form.
    pub in_place: Option<Timing>,
}

impl Row {
    /// Algorithm and bus bandwidth in GB/s (1 GB = 10^9 bytes).
    fn bandwidths(&self, timing: &Timing) -> (f64, f64) {
        let algorithm = if timing.mean > 0.0 { self.size as f64 / 1e9 / timing.mean } else { 0.0 };
        (algorithm, algorithm * self.factor)
    }

    fn timings(&self) -> impl Iterator<Item = &Timing> {
        std::iter::once(&self.out_of_place).chain(&self.in_place)
    }

    /// Wrong elements, both ways.
    pub fn wrong(&self) -> usize {
        self.timings().filter_map(|timing| timing.wrong).sum()
    }

    /// The line as nccl-tests prints it.
    pub fn text(&self) -> String {
        let columns = |timing: Option<&Timing>| match timing {
            None => format!("  {:>7}  {:>6}  {:>6}  {:>5}", "N/A", "N/A", "N/A", "N/A"),
            Some(timing) => {
                let (algorithm, bus) = self.bandwidths(timing);
                let wrong = timing.wrong.map_or("N/A".into(), |wrong| wrong.to_string());
                format!("  {:>7}  {algorithm:6.2}  {bus:6.2}  {wrong:>5}", micros(timing.mean))
            }
        };
        format!(
            "{:12}  {:12}  {:>8}  {:>6}  {:>6}{}{}",
            self.size,
            self.count,
            self.dtype,
            self.redop,
            self.root,
            columns(Some(&self.out_of_place)),
            columns(self.in_place.as_ref())
        )
    }

    /// What is said of the front below the line, if it was measured.
    pub fn front_text(&self) -> Option<String> {
        let text = |timing: &Timing| {
            let (front, mean) = (timing.front?, timing.mean);
            let share = if mean > 0.0 { 100.0 * front / mean } else { 0.0 };
            Some(format!("{} us of {} ({share:.1} %)", micros(front).trim(), micros(mean).trim()))
        };
        let texts: Vec<String> = self.timings().filter_map(text).collect();
        (!texts.is_empty()).then(|| format!("#   first element final on all ranks after {}", texts.join(", in place ")))
    }

    /// The line as JSON.
    pub fn json(&self) -> Value {
        let figures = |timing: &Timing| {
            let (algorithm, bus) = self.bandwidths(timing);
            let mut sorted = timing.iterations.clone();
            sorted.sort_by(f64::total_cmp);
            let at = |index: usize| sorted.get(index).map(|seconds| seconds * 1e6);
            json!({
                "time_us": timing.mean * 1e6, "algbw_gbs": algorithm, "busbw_gbs": bus, "wrong": timing.wrong,
                "iterations": sorted.len(), "min_us": at(0), "median_us": at(sorted.len() / 2),
                "max_us": at(sorted.len().saturating_sub(1)), "front_us": timing.front.map(|seconds| seconds * 1e6),
            })
        };
        json!({
            "size": self.size, "count": self.count, "type": self.dtype, "redop": self.redop, "root": self.root,
            "out_of_place": figures(&self.out_of_place), "in_place": self.in_place.as_ref().map(figures),
        })
    }
}

/// Microseconds in seven columns, with as many decimals as fit.
fn micros(seconds: f64) -> String {
    let value = seconds * 1e6;
    match value {
        ..10_000.0 => format!("{value:7.2}"),
        ..100_000.0 => format!("{value:7.1}"),
        _ => format!("{value:7.0}"),
    }
}

/// The lines above the table.
pub fn header() -> String {
    let names = "     time   algbw   busbw #wrong";
    let units = "     (us)  (GB/s)  (GB/s)       ";
    format!(
        "#{:11}  {:12}  {:8}  {:6}  {:6}{:^32}{:^32}\n\
         #{:>11}  {:>12}  {:>8}  {:>6}  {:>6}{names}{names}\n\
         #{:>11}  {:>12}  {:>8}  {:>6}  {:>6}{units}{units}",
        "",
        "",
        "",
        "",
        "",
        "out-of-place",
        "in-place",
        "size",
        "count",
        "type",
        "redop",
        "root",
        "(B)",
        "(elements)",
        "",
        "",
        ""
    )
}

/// The mean bus bandwidth of all rows, both ways.
pub fn average_bus_bandwidth(rows: &[Row]) -> f64 {
    let all: Vec<f64> = rows.iter().flat_map(|row| row.timings().map(|timing| row.bandwidths(timing).1)).collect();
    if all.is_empty() {
        0.0
    } else {
        all.iter().sum::<f64>() / all.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let timing = |mean| Timing { mean, iterations: vec![3e-6, 1e-6, 2e-6], wrong: Some(0), front: None };
        Row {
            size: 1_000_000,
            count: 250_000,
            dtype: "float",
            redop: "sum",
            root: -1,
            factor: 1.5,
            out_of_place: timing(1e-3),
            in_place: Some(timing(2e-3)),
        }
    }

    #[test]
    fn a_row_has_the_columns_of_nccl_tests() {
        let words = |text: &str| text.split_whitespace().map(str::to_string).collect::<Vec<_>>();
        let expected = "1000000 250000 float sum -1 1000.00 1.00 1.50 0 2000.00 0.50 0.75 0";
        assert_eq!(words(&row().text()), words(expected));
        let header = header();
        let widths: Vec<usize> = header.lines().skip(1).map(str::len).collect();
        assert_eq!(widths[0], widths[1]);
        let ends = |line: &str, word: &str| line.find(word).map(|at| at + word.len());
        let names = header.lines().nth(1).unwrap();
        assert_eq!(ends(names, "count"), ends(&row().text(), "250000"), "columns line up");
        assert_eq!(ends(names, "busbw"), ends(&row().text(), "1.50"), "columns line up");
        assert_eq!(names.trim_end().len(), row().text().len());
    }

    #[test]
    fn the_front_is_told_below_the_line() {
        let mut row = row();
        assert_eq!(row.front_text(), None);
        row.out_of_place.front = Some(5e-5);
        row.in_place = None;
        assert_eq!(
            row.front_text().as_deref(),
            Some("#   first element final on all ranks after 50.00 us of 1000.00 (5.0 %)")
        );
        assert!((row.json()["out_of_place"]["front_us"].as_f64().unwrap() - 50.0).abs() < 1e-9);
    }

    #[test]
    fn json_tells_minimum_median_and_maximum() {
        let json = row().json();
        assert_eq!(json["out_of_place"]["median_us"], 2.0);
        assert_eq!(json["in_place"]["min_us"], 1.0);
        assert_eq!(json["in_place"]["iterations"], 3);
    }

    #[test]
    fn the_average_counts_both_ways() {
        assert!((average_bus_bandwidth(&[row()]) - 1.125).abs() < 1e-12);
        assert_eq!(average_bus_bandwidth(&[]), 0.0);
    }

    #[test]
    fn times_fill_seven_columns() {
        assert_eq!([micros(5.5e-6), micros(0.0123456), micros(1.5)], ["   5.50", "12345.6", "1500000"]);
    }
}
