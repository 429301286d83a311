//! `strata tune` and the tables it writes, with real processes: measured, followed, refused, gone on with.

use crate::launched::{chosen, lines, on_all, outcome, said, strata, LIBRARY, LIMIT, WORLD};
use crate::vendor;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use strata::selection::table::{Row, Table};

/// A folder for one test's files.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tune-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.join(name), text).unwrap();
        self.file(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn perf(collective: &str, bytes: &str) -> Command {
    on_all(&["perf", collective, "-b", bytes, "-e", bytes, "-n", "2", "-w", "1"])
}

fn tune(output: &str, more: &[&str]) -> Command {
    on_all(&[&["tune", "-o", output], more].concat())
}

#[test]
fn a_world_is_tuned_and_follows_its_table_until_the_user_says_otherwise() {
    let folder = Folder::new("follow");
    let path = folder.file("table.toml");
    let sizes = ["--sizes", "2K,256K", "--collectives", "all_gather", "--budget", "8s"];
    let told = said(&mut tune(&path, &sizes));
    assert!(told.contains("4 ranks on 2 nodes (2+2)") && told.contains("# 2 rows in"), "{told}");
    let table = Table::load(Path::new(&path)).unwrap();
    let header = table.header.unwrap();
    assert_eq!((header.machine.inter.as_str(), header.machine.vendor.as_str()), ("tcp", "none"));
    let shape = |row: &Row| (row.collective.clone(), row.ranks, row.nodes, row.bytes());
    let expected = [2 << 10, 256 << 10].map(|bytes| ("all_gather".to_string(), Some(4), Some(2), bytes));
    assert_eq!(table.rows.iter().map(shape).collect::<Vec<_>>(), expected);
    for row in &table.rows {
        assert!(row.measured.len() > 3 && row.measured[0].algorithm == row.algorithm, "{row:?}");
        assert!(row.measured[0].low_us <= row.measured[0].median_us && row.measured[0].samples > 3, "{row:?}");
    }
    // 4 KiB is nearer to 2 KiB.
    let followed = |bytes: &str, variables: &[(&str, &str)]| {
        let mut command = perf("all_gather", bytes);
        let command = command.env("STRATA_TUNING_TABLE", &path).env("NCCL_DEBUG", "INFO");
        chosen(&said(command.envs(variables.iter().copied()))).to_string()
    };
    let choice = followed("4K", &[]);
    assert!(choice.starts_with(&format!("{}, ", table.rows[0].algorithm)), "{choice}");
    assert!(choice.ends_with(&format!("because: the tuning table {path} has it, measured at 2048 bytes")), "{choice}");
    assert!(followed("256K", &[]).starts_with(&format!("{}, ", table.rows[1].algorithm)));
    let named = followed("4K", &[("STRATA_ALLGATHER_ALGO", "ring")]);
    assert!(named.starts_with("ring, ") && named.ends_with("named by the environment"), "{named}");
    let thresholds = followed("4K", &[("STRATA_ALLGATHER_RD_MAX_BYTES", "67108864")]);
    assert!(!thresholds.contains("table"), "{thresholds}");
    assert!(!followed("16M", &[]).contains("table"), "beyond the table's reach");

    for ending in ["html", "svg"] {
        let drawing = folder.file(&format!("drawing.{ending}"));
        let told = said(strata().args(["tune", "--report", &path, "-o", &drawing]));
        assert!(told.starts_with("1 heat map of "), "{told}");
        let text = std::fs::read_to_string(drawing).unwrap();
        assert!(text.contains("<svg") && text.contains("256 KiB") && text.contains(&table.rows[0].algorithm), "{text}");
    }
}

/// A table of this machine, as the first run would have written it.
fn table_here(folder: &Folder, rows: &str) -> String {
    let path = folder.file("here.toml");
    said(&mut tune(&path, &["--budget", "0s", "--sizes", "1K"]));
    let head = std::fs::read_to_string(&path).unwrap();
    folder.write("here.toml", &(head + rows))
}

#[test]
fn segments_and_windows_are_the_table_s_unless_the_user_sets_them() {
    let folder = Folder::new("segments");
    let row = "[[row]]\ncollective = \"all_gather\"\nranks = 4\nnodes = 2\nbytes = 262144\nalgorithm = \"ring\"\n\
               segment_bytes = 16384\nwindow = 2\n";
    let path = table_here(&folder, row);
    let followed = |variables: &[(&str, &str)]| {
        let mut command = perf("all_gather", "256K");
        command.env("STRATA_TUNING_TABLE", &path).env("NCCL_DEBUG", "INFO").envs(variables.iter().copied());
        chosen(&said(&mut command)).to_string()
    };
    assert!(followed(&[]).starts_with("ring, 4 segments of "));
    let own = followed(&[("STRATA_SEGMENT_BYTES", "32768")]);
    assert!(own.starts_with("ring, 2 segments of ") && own.contains("tuning table"), "{own}");
}

#[test]
fn a_table_that_cannot_be_used_is_told_once_and_the_run_goes_on() {
    let folder = Folder::new("refused");
    let path = table_here(&folder, "");
    let good = std::fs::read_to_string(&path).unwrap();
    let cpu = lines(&good, "cpu = ")[0].to_string();
    let newer = good.replace(env!("CARGO_PKG_VERSION"), "99.1.0");
    let row = "[[row]]\ncollective = \"all_gather\"\nranks = 4\nnodes = 2\nbytes = 1024\nalgorithm = \"rign\"\n";
    let cases = [
        ("malformed.toml", good.replace("format = 1", "format = "), "is not used: line 3: "),
        ("foreign.toml", good.replace(&cpu, "cpu = \"Another One\""), "another machine (processor Another One, here "),
        ("newer.toml", newer, "with Strata 99.1.0"),
        ("other.toml", good.replace("inter = \"tcp\"", "inter = \"mpi\""), "(transport between nodes mpi, here tcp)"),
        ("row.toml", good.clone() + row, "rows left out: rign for all_gather"),
    ];
    for (name, text, told) in cases {
        let path = folder.write(name, &text);
        let said = said(perf("all_gather", "1K").env("STRATA_TUNING_TABLE", &path));
        let about = lines(&said, "tuning table");
        assert!(about.len() == 1 && about[0].contains(&path) && about[0].contains(told), "{name}: {said}");
        assert!(said.contains("Out of bounds values : 0 OK"), "{said}");
    }
    // What a user has is never written over unasked.
    let foreign = folder.file("foreign.toml");
    let before = std::fs::read_to_string(&foreign).unwrap();
    let (told, succeeded) = outcome(&mut tune(&foreign, &["--budget", "0s"]));
    assert!(!succeeded && told.contains("stays as it is: it was measured on another machine"), "{told}");
    assert_eq!(std::fs::read_to_string(&foreign).unwrap(), before);
}

#[test]
fn ranks_with_different_tables_follow_rank_zero_s_and_hear_of_it_once() {
    let folder = Folder::new("differ");
    let ring = folder.write("ring.csv", "allgather,0,65536,ring,simple,-1,-1,-1\n");
    let pat = folder.write("pat.csv", "allgather,0,65536,pat,simple,-1,-1,-1\n");
    let broken = folder.write("broken.toml", "format = \n");
    // Rank 3 has rank 0's file under another name.
    let same = folder.write("same.csv", "allgather,0,65536,ring,simple,-1,-1,-1\n");
    let script = "case $RANK in 0) t=$0;; 1) t=$1;; 2) t=$2;; *) t=$3;; esac; shift 3; export STRATA_TUNING_TABLE=$t; exec \"$@\"";
    let run = |tables: [&str; 4]| {
        let mut command = strata();
        command.args(WORLD).args(["--", "sh", "-c", script]).args(tables).arg(env!("CARGO_BIN_EXE_strata"));
        command.args(["perf", "all_gather", "-b", "1K", "-e", "1K", "-n", "1", "--library", &LIBRARY]);
        said(command.env("NCCL_DEBUG", "INFO"))
    };
    let told = run([&ring, &pat, &broken, &same]);
    assert!(chosen(&told).starts_with("ring, "), "{told}");
    let differences = lines(&told, "which counts");
    assert_eq!(differences.len(), 2, "{told}");
    assert!(differences.iter().any(|line| line.contains(&format!("the tuning table {pat} is another one"))), "{told}");
    assert!(differences.iter().any(|line| line.contains(&format!("{broken} is not used: line 1"))), "{told}");
    let told = run(["none", &pat, "none", "none"]);
    assert!(!chosen(&told).contains("table"), "{told}");
    assert_eq!(lines(&told, "rank 0 has none, which counts").len(), 1, "{told}");
}

#[test]
fn an_output_that_is_no_file_is_refused_and_not_read_for_ever() {
    for more in [&[][..], &["--again"]] {
        let (told, succeeded) = outcome(&mut tune("/dev/full", more));
        assert!(!succeeded && told.contains("not a file"), "{told}");
    }
}

#[test]
fn a_run_that_is_killed_leaves_a_whole_table_and_goes_on_from_it() {
    let folder = Folder::new("killed");
    let path = folder.file("table.toml");
    let sizes = ["--collectives", "broadcast", "--sizes", "1K,2K,4K"];
    let slow = [&sizes[..], &["--budget", "60s"]].concat();
    // The launcher leads a process group of its own; its ranks end with it.
    let mut killed = tune(&path, &slow).stdout(Stdio::null()).process_group(0).spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    let rows = || Table::load(Path::new(&path)).map_or(0, |table| table.rows.len());
    while rows() == 0 {
        assert!(Instant::now() < deadline, "no row was written");
        std::thread::sleep(Duration::from_millis(1));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let first = Table::load(Path::new(&path)).unwrap();
    let known = first.rows.len();
    assert!((1..3).contains(&known), "{known} rows");
    let told = said(&mut tune(&path, &[&sizes[..], &["--budget", "3s"]].concat()));
    assert!(told.contains(&format!("# {known} of 3 rows in {path} already")), "{told}");
    let table = Table::load(Path::new(&path)).unwrap();
    assert_eq!(table.rows.len(), 3);
    assert_eq!(table.rows[..known], first.rows, "what was there has stayed");
}

#[test]
fn the_vendor_s_library_is_a_candidate_and_rows_for_it_are_followed() {
    let folder = Folder::new("vendor");
    let path = folder.file("table.toml");
    let double = vendor::NCCL.library();
    let run = |command: &mut Command| said(command.env("STRATA_NCCL_LIB", &double));
    let told = run(&mut tune(&path, &["--collectives", "all_gather,broadcast", "--sizes", "4K", "--budget", "4s"]));
    assert!(told.contains("broadcast: nothing to choose from here"), "{told}");
    let table = Table::load(Path::new(&path)).unwrap();
    let machine = &table.header.as_ref().unwrap().machine;
    assert_eq!((machine.inter.as_str(), machine.vendor.as_str()), ("vendor", "NCCL 2.32.3"));
    let mut names: Vec<&str> = table.rows[0].measured.iter().map(|one| one.algorithm.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["two_level", "vendor"]);
    // Few nodes: without a table it would be the vendor's.
    for (algorithm, two_levels) in [("two_level", true), ("vendor", false)] {
        let row = Row { algorithm: algorithm.to_string(), ..table.rows[0].clone() };
        let path = folder.write("row.toml", &Table { rows: vec![row], ..table.clone() }.to_toml());
        let mut command = perf("all_gather", "4K");
        let told = run(command.env("STRATA_TUNING_TABLE", &path).env("NCCL_DEBUG", "INFO"));
        let levels = lines(&told, "phases over the vendor: the tuning table has it");
        assert_eq!(!levels.is_empty(), two_levels, "{algorithm}: {told}");
    }
}
