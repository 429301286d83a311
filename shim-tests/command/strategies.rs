//! Strategies as users make and follow them: `strata synthesize`, `strata plan verify --strategy`, and `STRATA_STRATEGY` with real
//! processes.
#![forbid(unsafe_code)]

use crate::launched::{chosen, lines, on_all, outcome, said, strata};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("strategy-{}-{name}.txt", std::process::id()))
}

/// Strategies for the world of these tests: four ranks on two nodes.
const OF_WORLD: &str = "strata strategy 1\ngrid 2,2\nall_gather 1K 1M two_level(ring,ring) segment=4K window=2\n\
                        all_reduce 1M 64M two_level(direct,direct) segment=64K window=2 shares=2,2,1,1\n";

#[test]
fn a_synthesized_file_is_proved_and_a_changed_one_refused_with_its_line() {
    let path = file("made");
    let made = ["all_reduce,reduce", "16M,64M", "--machine", "adapcc", "--kinds", "2,1", "-o", path.to_str().unwrap()];
    let told = said(strata().arg("synthesize").args(made));
    assert_eq!(lines(&told, "NICs allow").len(), 4, "{told}");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("\ngrid 4,4,4\n") && lines(&text, "shares=").len() == 2, "{text}");
    let verify = |path: &Path| outcome(strata().args(["plan", "verify", "--strategy"]).arg(path));
    let (proved, succeeded) = verify(&path);
    assert!(succeeded && proved.contains("4 lines accepted on 12 ranks"), "{proved}");
    std::fs::write(&path, text.replacen("two_level(direct,direct)", "two_level(direct,ring)", 1)).unwrap();
    let (refused, succeeded) = verify(&path);
    assert!(!succeeded && refused.contains("line 4:") && refused.contains("has no shares"), "{refused}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn ranks_follow_the_file_of_rank_zero() {
    let path = file("followed");
    std::fs::write(&path, OF_WORLD).unwrap();
    let perf = |collective: &str, bytes: &str, path: &Path| {
        let mut command = on_all(&["perf", collective, "-b", bytes, "-e", bytes, "-n", "1"]);
        said(command.env("STRATA_STRATEGY", path).env("NCCL_DEBUG", "INFO"))
    };
    let told = perf("all_gather", "64K", &path);
    assert!(chosen(&told).starts_with("two_level(ring,ring), "), "{told}");
    let told = perf("all_reduce", "2M", &path);
    assert!(chosen(&told).starts_with("two_level(direct,direct), ") && told.contains("line 4"), "{told}");
    let of_another = OF_WORLD.replace("grid 2,2", "grid 4,4").replace("shares=2,2,1,1", "shares=2,1");
    std::fs::write(&path, of_another).unwrap();
    let told = perf("all_gather", "64K", &path);
    assert!(!chosen(&told).starts_with("two_level(ring,ring), "), "{told}");
    assert_eq!(lines(&told, "STRATA_STRATEGY is not followed").len(), 1, "{told}");
    assert!(told.contains("line 2:"), "{told}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_mixed_testbed_is_simulated_as_its_page_says() {
    let mixed = ["--machine", "adapcc", "--collective", "all_reduce", "--bytes", "256000000"];
    let json =
        said(strata().arg("simulate").args(mixed).args(["-n", "24", "--method", "even,synthesized", "--json", "-"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json.to_string().contains("synthesized"), "{json}");
    let table = said(strata().arg("simulate").args(mixed).args([
        "-n",
        "16",
        "--slow",
        "3=0.25",
        "--method",
        "even,synthesized",
    ]));
    assert!(table.contains("with shares by links"), "{table}");
    let (refused, succeeded) = outcome(strata().arg("simulate").args(mixed).args(["--slow", "3"]));
    assert!(!succeeded && refused.contains("7=0.5"), "{refused}");
    let step = ["perf", "--workload", "adapcc-vit", "--simulate", "adapcc", "-n", "16", "--kinds", "2,2"];
    let table = said(strata().args(step));
    assert!(table.contains("# step     : synthesized"), "{table}");
}
