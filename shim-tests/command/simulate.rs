//! The command `strata simulate` as its users run it: table, JSON, pictures, and what it says to nonsense.
#![forbid(unsafe_code)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use svg::parser::Event;

fn simulate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata")).arg("simulate").args(arguments).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeds(arguments: &[&str]) -> String {
    let output = simulate(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json(arguments: &[&str]) -> Value {
    let text = succeeds(&[arguments, &["--json", "-"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// A file that is removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Scratch(folder.join(format!("simulate-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a path in UTF-8")
    }

    fn read(&self) -> String {
        std::fs::read_to_string(&self.0).expect("the file was written")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// How many elements of a name a drawing has; it is well-formed: every element that begins ends, in order.
fn elements(drawing: &str, name: &str) -> usize {
    let (mut open, mut found) = (Vec::new(), 0);
    for event in svg::read(drawing).expect("a drawing") {
        match event {
            Event::Tag(tag, kind, _) => {
                use svg::node::element::tag::Type;
                match kind {
                    Type::Start => open.push(tag.to_string()),
                    Type::End => assert_eq!(open.pop().as_deref(), Some(tag)),
                    Type::Empty => {}
                }
                found += usize::from(tag == name && kind != Type::End);
            }
            Event::Error(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert!(open.is_empty(), "{open:?} do not end");
    found
}

#[test]
fn the_table_has_a_row_for_each_method_of_each_cell_and_says_what_binds() {
    let cells = ["-n", "16,..64", "--bytes", "16M,1G", "--collective", "all_gather,all_reduce", "--chosen"];
    let table = succeeds(&cells);
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("all_")).collect();
    assert_eq!(rows.len(), 2 * 3 * 2 * 4, "{table}");
    for method in ["vendor", "pccl", "strata", "chosen"] {
        let of_method = rows.iter().filter(|row| row.split_whitespace().nth(3) == Some(method));
        assert_eq!(of_method.count(), 12, "{method}: {table}");
    }
    let bound = |row: &&&str| row.contains("two_level") && row.contains(" % ");
    assert!(rows.iter().filter(bound).count() >= 12, "simulated rows name their busiest resource: {table}");
    assert!(table.contains("# all_reduce: strata is from"), "{table}");
    let few = succeeds(&[&cells[..], &["--below", "1"]].concat());
    for row in few.lines().filter(|line| line.starts_with("all_")) {
        let ratio: f64 = row.split_whitespace().nth(5).expect("a ratio").parse().expect("a number");
        assert!(ratio <= 1.0 && rows.iter().any(|line| line.trim_end() == row.trim_end()), "{row}");
    }
}

#[test]
fn json_holds_times_ratios_and_what_was_busy() {
    let value = json(&["-n", "32", "--bytes", "1G", "--method", "strata,pccl(ring)", "--against", "vendor", "--cost"]);
    assert_eq!((&value["machine"], &value["against"]), (&Value::from("frontier"), &Value::from("vendor")));
    let methods = value["cells"][0]["methods"].as_array().expect("methods");
    assert_eq!(methods.len(), 3, "the vendor was added: {value:#}");
    let ms = |index: usize| methods[index]["ms"].as_f64().expect("a time");
    for (index, method) in methods.iter().enumerate() {
        let ratio = method["ratio"].as_f64().expect("a ratio");
        assert!((ratio - ms(0) / ms(index)).abs() < 1e-9, "{value:#}");
    }
    // Measured: RCCL 14.44 ms; PCCL with its ring 19.24 ms (run logs published with PCCL).
    assert!((13.0..16.0).contains(&ms(0)) && (15.0..24.0).contains(&ms(2)), "{value:#}");
    assert!(methods[1]["busy"].as_f64().is_some_and(|busy| (0.2..=1.0).contains(&busy)), "{value:#}");
    assert!(methods[1]["by"].as_str().is_some_and(|by| by.starts_with("two_level")), "{value:#}");
    assert!(methods[1]["events"].as_u64() > Some(100) && methods[1]["cost_seconds"].as_f64() > Some(0.0));
    assert_eq!(methods[0]["simulated"], Value::from(false));
}

#[test]
fn a_way_is_priced_alike_however_it_is_asked_for() {
    let cell = ["-n", "24", "--bytes", "256M", "--collective", "reduce_scatter"];
    let found = json(&[&cell[..], &["--method", "strata"]].concat());
    let found = &found["cells"][0]["methods"][0];
    let by = found["by"].as_str().expect("a way");
    assert!(!by.contains("whole"), "several segments: {by}");
    let again = json(&[&cell[..], &["--method", by, "--unfolded"]].concat());
    assert_eq!(again["cells"][0]["methods"][0]["ms"], found["ms"], "{by}");
}

#[test]
fn the_overload_term_is_told_and_can_be_left_out() {
    let cells = ["-n", "1024,2048", "--bytes", "256M,1G", "--method", "vendor,mpi"];
    let table = succeeds(&cells);
    let stars = |table: &str| table.lines().filter(|line| line.starts_with("all_") && line.contains('*')).count();
    assert_eq!(stars(&table), 2, "the vendor's time, and the ratio of MPI: {table}");
    assert!(table.contains("# * the overload term") && table.contains("fitted"), "{table}");
    let without = succeeds(&[&cells[..], &["--without", "overload"]].concat());
    assert_eq!(stars(&without), 0, "{without}");
    assert!(without.contains("# without the machine's terms: overload"), "{without}");
    let ms = |value: &Value| value["cells"][3]["methods"][0]["ms"].as_f64().expect("a time");
    let slower = ms(&json(&cells)) / ms(&json(&[&cells[..], &["--without", "overload"]].concat()));
    assert!(slower > 1.5, "{slower}");
}

#[test]
fn heat_maps_are_drawings_with_a_cell_for_each_ratio() {
    let (svg, html) = (Scratch::new("map.svg"), Scratch::new("map.html"));
    let cells = ["-n", "16,32", "--bytes", "16M..64M", "--method", "vendor,mpi,pccl(ring)", "--collective"];
    succeeds(&[&cells[..], &["all_gather,reduce_scatter", "-o", svg.path()]].concat());
    let drawing = svg.read();
    assert_eq!(elements(&drawing, "rect"), 1 + 2 * 2 * 2 * 3, "a ground and the cells");
    assert!(drawing.contains("reduce_scatter: pccl(ring) against vendor") && drawing.contains("64M"), "{drawing}");
    succeeds(&["-n", "1024,2048", "--bytes", "1G", "--method", "vendor,mpi", "-o", html.path()]);
    let page = html.read();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("</svg>"), "{page}");
    assert!(page.contains("Framed and with a star"), "the overload term is told there too: {page}");
    let drawing = &page[page.find("<svg").expect("a drawing")..page.find("</body>").expect("an end")];
    assert_eq!(elements(drawing, "rect"), 1 + 2);
    assert_eq!(drawing.matches("stroke=\"#222222\"").count(), 1, "the cell in which it counts has a frame: {drawing}");
}

#[test]
fn a_timeline_shows_both_phases_of_each_method() {
    let svg = Scratch::new("timeline.svg");
    let cell = ["-n", "32", "--bytes", "256M", "--method", "vendor,pccl(ring),strata", "--timeline", svg.path()];
    succeeds(&cell);
    let drawing = svg.read();
    assert!(elements(&drawing, "rect") > 2 * (8 + 8 + 1), "a bar or more for each NIC, rank and node: {drawing}");
    for what in ["NIC 3, receiving", "NIC 0, sending", "library inside the node", "by its law", "all_gather of 256M"] {
        assert!(drawing.contains(what), "{what}: {drawing}");
    }
}

#[test]
fn a_machine_can_be_shown_and_be_a_file() {
    let shown = succeeds(&["--machine", "frontier", "--show", "--without", "overload"]);
    for what in ["network.nic_gbps", "GB/s", "fitted", "PCCL's logs", "overload.factor", "left out"] {
        assert!(shown.contains(what), "{what}: {shown}");
    }
    let file = Scratch::new("mine.toml");
    let known = include_str!("../../machines/perlmutter.toml");
    std::fs::write(&file.0, known.replace("name = \"perlmutter\"", "name = \"mine\"")).expect("written");
    let table = succeeds(&["--machine", file.path(), "-n", "4,16", "--bytes", "16M"]);
    assert!(table.starts_with("# strata simulate: mine"), "{table}");
    assert!(table.contains("(no route of its own here)"), "on one node: {table}");
    std::fs::write(&file.0, known.replace("nic_gbps = { value = 12.5", "nic_gbps = { value = fast")).expect("written");
    let refused = simulate(&["--machine", file.path()]);
    let said = text(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains(file.path()) && said.contains("fast"), "{said}");
}

#[test]
fn files_are_priced_beside_algorithms() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shim-tests/scripts");
    // The name is read again where other methods follow the file, and so are its parameters.
    let of = |file: &str, rest: &str| format!("script:{}{rest}", folder.join(file).display());
    let methods =
        format!("ring,{},{},vendor", of("ar_ring_8_4ch_ll128.xml", ""), of("ar_allpairs_8_ll.xml", "/segment=64K"));
    let cells = ["-n", "8", "--collective", "all_reduce", "--machine", "perlmutter", "--bytes", "1K,64M"];
    let answers = json(&[&cells[..], &["--method", &methods]].concat());
    let answers = answers.to_string();
    assert!(answers.contains("script:ar_ring_8_4ch_ll128/segment=whole"), "{answers}");
    assert!(answers.contains("script:ar_allpairs_8_ll/segment=64K"), "{answers}");
    let table = succeeds(&[&cells[..], &["--method", &methods]].concat());
    let rows = table.lines().filter(|line| line.starts_with("all_reduce")).count();
    assert_eq!(rows, 2 * 4, "{table}");
    // A file is a level of a two-level algorithm, too: on 8 nodes of 4 for the ranks of a node, or for those of a rail.
    let levels = format!(
        "two_level({},log)/segment=1M/window=4,two_level(direct,{})",
        of("ag_pcie_4.xml", ""),
        of("ag_rd_8.xml", "")
    );
    let answers = json(&["-n", "32", "--machine", "perlmutter", "--bytes", "64M", "--method", &levels]).to_string();
    assert!(answers.contains("two_level(script:ag_pcie_4,log)/segment=1M/window=4"), "{answers}");
    assert!(answers.contains("two_level(direct,script:ag_rd_8)/segment=whole"), "{answers}");
    let unserved = simulate(&["-n", "32", "--machine", "frontier", "--bytes", "64M", "--method", &levels]);
    let said = text(&unserved.stderr);
    assert_eq!(unserved.status.code(), Some(2));
    assert!(said.contains("ag_pcie_4.xml: ") && said.contains("is for all_gather on 4 ranks"), "{said}");
    assert!(said.contains("two_level calls all_gather on 8 ranks inside nodes"), "{said}");
    // On a number of ranks that is not the file's there is no way to go.
    let refused = simulate(&[
        "-n",
        "16",
        "--collective",
        "all_reduce",
        "--bytes",
        "1K",
        "--method",
        &of("ar_ring_8_4ch_ll128.xml", ""),
    ]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(
        said.contains("ar_ring_8_4ch_ll128.xml is for all_reduce on 8 ranks, and asked for is all_reduce on 16 ranks"),
        "{said}"
    );
    assert!(said.contains("-n 16"), "{said}");
}

#[test]
fn skewed_blocks_cost_more_than_even_ones_and_less_over_all_rails_of_a_node() {
    let ms = |collective: &str, bytes: &str, more: &[&str]| {
        let told = json(&[&["-n", "32", "--bytes", bytes, "--collective", collective][..], more].concat());
        told["cells"][0]["methods"][0]["ms"].as_f64().unwrap_or_else(|| panic!("{told:#}"))
    };
    let even = ms("all_gather", "64M", &["--method", "two_level(direct,log)"]);
    for skew in ["zipf", "one", "zeros"] {
        let skewed = ms("all_gather", "64M", &["--skew", skew]);
        assert!(skewed > even, "{skew}: {skewed} {even}");
    }
    let ring = ms("all_gather", "64M", &["--skew", "one", "--method", "ring"]);
    let split = ms("all_gather", "64M", &["--skew", "one"]);
    assert!(split < ring, "{split} {ring}");
    let [zipf, zeros] = ["zipf", "zeros"].map(|skew| ms("alltoall", "1M", &["--skew", skew]));
    assert!(zipf > zeros, "the hottest rank has a quarter there, a sixteenth here: {zipf} {zeros}");
}

#[test]
fn nonsense_is_refused_with_what_is_wrong() {
    for (arguments, said) in [
        (&["--machine", "nowhere"][..], "frontier, perlmutter"),
        (&["--machine", ""], "frontier, perlmutter"),
        (&["-n", "0"], "from 1 to 4096"),
        (&["-n", "4097"], "from 1 to 4096"),
        (&["-n", "32..8"], "ends before it begins"),
        (&["-n", ""], "from 1 to 4096"),
        (&["--bytes", "0"], "0 bytes"),
        (&["--bytes", "99999999999G"], "memory"),
        (&["--bytes", "2000G"], "1024G"),
        (&["--bytes", "much"], "not a size"),
        (&["--without", "gravity"], "overload, pccl"),
        (&["--collective", "all_together"], "all_gather"),
        (&["--collective", "broadcast", "-n", "16"], "no broadcast of the vendor's library"),
        (&["--method", "magic"], "vendor, mpi, pccl"),
        (&["--method", "rong"], "did you mean"),
        (&["--method", "ring/segment=0"], "at least 1 byte"),
        (&["--method", "script:no-such-file.xml"], "no-such-file.xml"),
        (&["--method", "script:no-such-algorithm"], "there is no such script; no scripts are loaded"),
        (&["--method", "two_level(script:no-such-algorithm,log)"], "there is no such script; no scripts are loaded"),
        (&["--method", "two_level(script:no-such-file.xml,log)"], "no-such-file.xml"),
        (&["--method", ""], "there are vendor"),
        (&["--against", "luck"], "vendor, mpi, pccl"),
        (&["--method", "two_level(direct,log)", "-n", "8", "--bytes", "1M"], "two_level"),
        (&["--machine", "netns", "--method", "vendor"], "knows no all_gather of the vendor's library"),
        (&["-o", "picture.gif"], ".svg or .html"),
        (&["-o", "no/such/folder/picture.svg"], "no/such/folder"),
        (&["--timeline", "x.svg"], "one cell"),
        (&["--skew", "half"], "there are zipf, one, zeros"),
        (&["--skew", "one", "--method", "vendor"], "laws speak of blocks of one size"),
        (&["--skew", "one", "--collective", "broadcast"], "broadcast has no blocks to skew"),
        (&["--skew", "one", "--collective", "alltoall", "--method", "log"], "blocks of different sizes"),
    ] {
        let output = simulate(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(said) && !error.contains("panicked"), "{arguments:?}: {error}");
        assert!(!error.contains("RUST_BACKTRACE"), "{arguments:?}: {error}");
    }
}
