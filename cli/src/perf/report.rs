//! What a measurement says: the table while it runs, the closing lines, the JSON file, the exit code.
#![forbid(unsafe_code)]

use super::table::{average_bus_bandwidth, header, Row};
use super::Options;
use crate::nccl::Library;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{json, Value};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use strata::bootstrap::store::Store;
use strata::error::{counted, Error, Result};

/// Collects rows; only process 0 says anything.
pub struct Report {
    rows: Vec<Row>,
    speaks: bool,
    // The table goes nowhere when JSON goes to standard output.
    table: bool,
    json: Option<PathBuf>,
    about: Value,
    bar: ProgressBar,
}

impl Report {
    /// Prints what is measured, and the table's head. `nrows` rows will follow.
    pub fn new(options: &Options, library: &Library, store: &Store, nrows: usize) -> Result<Report> {
        let speaks = store.rank == 0;
        let table = speaks && options.json.as_deref() != Some(std::path::Path::new("-"));
        let version = library.version()?;
        let (nranks, path) = (store.size * options.ranks_here, library.path().display().to_string());
        let bar = match speaks && std::io::stderr().is_terminal() {
            true => ProgressBar::with_draw_target(Some(nrows as u64), ProgressDrawTarget::stderr()),
            false => ProgressBar::hidden(),
        };
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sizes, {eta} left");
        bar.set_style(style.map_err(|error| Error::Internal(error.to_string()))?);
        if table {
            outln!(
                "# strata perf {}: {} in {}\n\
                 # library {path}, NCCL {version}\n\
                 # minBytes {} maxBytes {} step: {} warmup iters: {} iters: {} agg iters: {} validation: {}\n#\n{}",
                options.collective.name(),
                counted(nranks, "rank"),
                counted(store.size, "process"),
                options.min_bytes,
                options.max_bytes,
                options.factor.map_or(format!("{}(bytes)", options.step_bytes), |factor| format!("{factor}(factor)")),
                options.warmup,
                options.iterations(),
                options.aggregate,
                options.check,
                header()
            );
        }
        let about = json!({
            "collective": options.collective.name(), "library": path, "nccl_version": version, "ranks": nranks,
            "processes": store.size, "iterations": options.iterations(), "warmup": options.warmup,
            "aggregate": options.aggregate, "barrier_each_iteration": options.blocking > 0,
            "memory": options.memory.name(),
        });
        Ok(Report { rows: Vec::new(), speaks, table, json: options.json.clone(), about, bar })
    }

    /// Prints a row and keeps it.
    pub fn add(&mut self, row: Row) {
        if self.table {
            self.bar.suspend(|| outln!("{}", row.text()));
            if let Some(text) = row.front_text() {
                self.bar.suspend(|| outln!("{text}"));
            }
            // A table that is read through a pipe should grow line by line.
            crate::process::flush_out();
        }
        self.bar.inc(1);
        self.rows.push(row);
    }

    /// Prints the closing lines, writes the JSON, and says whether all was right.
    pub fn finish(mut self) -> Result<ExitCode> {
        self.bar.finish_and_clear();
        let wrong: usize = self.rows.iter().map(Row::wrong).sum();
        let average = average_bus_bandwidth(&self.rows);
        if self.table {
            outln!(
                "# Out of bounds values : {wrong} {}\n# Avg bus bandwidth    : {average:.4}\n#",
                if wrong == 0 { "OK" } else { "FAILED" }
            );
        }
        if let Some(path) = self.json.take().filter(|_| self.speaks) {
            self.about["results"] = self.rows.iter().map(Row::json).collect();
            self.about["average_busbw_gbs"] = json!(average);
            self.about["wrong"] = json!(wrong);
            let text = format!("{:#}\n", self.about);
            match path.to_str() {
                Some("-") => out!("{text}"),
                _ => std::fs::write(&path, text)
                    .map_err(|error| Error::System(format!("cannot write {}: {error}", path.display())))?,
            }
        }
        Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
