//! Messages that are coded without loss: the bits of those that are not, and nothing is coded that does not shrink.

use crate::built::run_with;

/// What the ranks of a C program say of the bytes that they coded.
fn coded(words: &[&str]) -> Vec<String> {
    let folder = std::env::temp_dir().join(format!("strata-lossless-{}-{}", std::process::id(), words.join("-")));
    std::fs::create_dir_all(&folder).unwrap();
    let logs = folder.join("%p");
    run_with("lossless.c", &[], &[words, &[logs.to_str().unwrap()]].concat());
    let said = std::fs::read_dir(&folder).unwrap().map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
    let lines: Vec<String> = said.collect::<String>().lines().map(str::to_string).collect();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(lines.iter().any(|line| line.contains("for TCP")), "{lines:?}");
    lines.into_iter().filter(|line| line.contains("without loss")).collect()
}

#[test]
fn coded_messages_give_the_bits_of_those_that_are_not() {
    for (ranks, nodes) in [("2", "2"), ("4", "2"), ("3", "3")] {
        assert!(coded(&["weights", "always", ranks, nodes]).len() >= 2, "{ranks} ranks on {nodes} nodes");
    }
}

#[test]
fn bytes_that_do_not_shrink_go_as_they_are() {
    assert_eq!(coded(&["noise", "always", "2", "2"]), [""; 0]);
}

/// Whether the link is slow enough depends on this machine; the bits do not.
#[test]
fn a_sender_that_decides_by_its_link_gives_the_same_bits() {
    coded(&["weights", "zstd", "2", "2"]);
}
