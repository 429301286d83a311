//! Folders of algorithms that come as files, at run time: files that are damaged, for other ranks, not there, or not the same on
//! all ranks. Whatever lies there, calls are right, and rank 0 says once what it cannot use.

use crate::built::{root, run_with};
use crate::launched::{lines, outcome, said, strata, LIBRARY, WORLD};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder of a test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("folders-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file of `shim-tests/scripts`.
fn script(name: &str) -> String {
    std::fs::read_to_string(root().join("shim-tests/scripts").join(name)).unwrap()
}

/// All-reduces of four ranks on two nodes, whose results are checked, each rank with the folder that the shell line sets.
fn all_reduce(line: &str) -> Command {
    let mut command = strata();
    command.args(WORLD).args(["--", "sh", "-c", &format!("{line}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_strata")]);
    command.args(["perf", "all_reduce", "-b", "4", "-e", "64K", "-f", "64", "-n", "1", "-w", "0", "-c", "1"]);
    command.args(["--library", &LIBRARY]).env("NCCL_DEBUG", "INFO");
    command
}

/// What such calls say; they must be right.
fn right(line: &str) -> String {
    let text = said(&mut all_reduce(line));
    assert!(text.contains("# Out of bounds values : 0 OK"), "{line}\n{text}");
    text
}

fn in_folder(folder: &Folder) -> String {
    format!("export STRATA_PROGRAM_DIR='{}'", folder.text())
}

/// Lines that say this, of which there must be one.
fn told_once<'a>(text: &'a str, what: &str) -> &'a str {
    let told = lines(text, what);
    assert_eq!(told.len(), 1, "{what}: {told:?}\n{text}");
    told[0]
}

fn goes_by(text: &str, name: &str) -> bool {
    text.contains(&format!("-> {name}, "))
}

#[test]
fn rank_0_s_file_counts_whatever_the_others_have() {
    let (here, other) = (Folder::new("here"), Folder::new("other"));
    here.put("mine.xml", &script("ar_ring_4_1ch.xml"));
    other.put("mine.xml", &script("ar_1step_4.xml"));
    let there = other.text();
    for rest in [there, "/nonexistent", ""] {
        let line = format!("if [ $RANK = 0 ]; then {}; else export STRATA_PROGRAM_DIR='{rest}'; fi", in_folder(&here));
        assert!(goes_by(&right(&line), "script:mine"), "{rest}");
    }
    // Where rank 0 has none there is none, and nothing to be told.
    let line = format!("if [ $RANK = 0 ]; then unset STRATA_PROGRAM_DIR; else {}; fi", in_folder(&here));
    let text = right(&line);
    assert!(!text.contains("-> script:"), "{text}");
}

#[test]
fn damaged_files_are_told_once_with_their_line_and_the_good_one_serves() {
    let folder = Folder::new("damaged");
    let good = script("ar_ring_4_1ch.xml");
    folder.put("good.xml", &good);
    folder.put("a_cut.xml", &good[..good.len() / 2]);
    folder.put("b_empty.xml", "");
    folder.put("c_binary.xml", "\u{0}\u{1}\u{2}");
    std::fs::write(folder.0.join("d_bytes.xml"), b"\xff\xfe\xfd").unwrap();
    folder.put("e_none.xml", &good.replace("ngpus=\"4\"", "ngpus=\"0\""));
    folder.put("f_most.xml", &good.replace("ngpus=\"4\"", "ngpus=\"1024\""));
    folder.put("g_beyond.xml", &good.replace("ngpus=\"4\"", "ngpus=\"1025\""));
    folder.put("h_one.xml", &good.replace("ngpus=\"4\"", "ngpus=\"1\""));
    folder.put("i_wrong.xml", &script("ar_pcie_hier_4.xml"));
    folder.put("j_custom.xml", &good.replace("coll=\"allreduce\"", "coll=\"custom\""));
    folder.put("j_custom.toml", "[[output]]\nrank = 9\n");
    folder.put("k_bare.xml", &good.replace("coll=\"allreduce\"", "coll=\"custom\""));
    std::fs::create_dir(folder.0.join("l_folder.xml")).unwrap();
    std::os::unix::fs::symlink("/nonexistent/file.xml", folder.0.join("m_dangling.xml")).unwrap();
    std::os::unix::fs::symlink("n_loop.xml", folder.0.join("n_loop.xml")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.0.join("o_zero.xml")).unwrap();
    assert!(Command::new("mkfifo").arg(folder.0.join("p_pipe.xml")).status().unwrap().success());
    // Reading the one waits for the kernel's next word; the other has a text, but no size.
    std::os::unix::fs::symlink("/proc/kmsg", folder.0.join("q_kernel.xml")).unwrap();
    std::os::unix::fs::symlink("/proc/version", folder.0.join("r_version.xml")).unwrap();
    folder.put("s_contract.xml", &good.replace("coll=\"allreduce\"", "coll=\"custom\""));
    std::os::unix::fs::symlink("/proc/kmsg", folder.0.join("s_contract.toml")).unwrap();
    let text = right(&in_folder(&folder));
    assert!(goes_by(&text, "script:good"), "{text}");
    for (file, why) in [
        ("a_cut", "line "),
        ("b_empty", "it is empty"),
        ("c_binary", "there is no <algo>"),
        ("d_bytes", "UTF-8"),
        ("e_none", "line "),
        ("f_most", "rank 4 is missing"),
        ("g_beyond", "ngpus"),
        ("h_one", "line "),
        ("i_wrong", "line 108: rank 2, thread block 4, step 2"),
        ("j_custom", "its contract: rule 1: rank 9 of 4"),
        ("k_bare", "promises nothing: a file of the same name with .toml"),
        ("l_folder", "it is no ordinary file"),
        ("m_dangling", "No such file or directory"),
        ("n_loop", "Too many levels of symbolic links"),
        ("o_zero", "it is no ordinary file"),
        ("p_pipe", "it is no ordinary file"),
        ("q_kernel", "has no size"),
        ("r_version", "has no size"),
        ("s_contract", "its contract"),
    ] {
        let line = told_once(&text, &format!("{file}.xml is not used: "));
        assert!(line.contains(why), "{line}");
    }
}

/// Root may read every file, unless it gives that right away.
#[test]
fn a_file_or_folder_that_may_not_be_read_is_told_once() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("rights");
    folder.put("secret.xml", &script("ar_ring_4_1ch.xml"));
    let path = folder.0.join("secret.xml");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::create_dir(folder.0.join("inner")).unwrap();
    std::fs::set_permissions(folder.0.join("inner"), std::fs::Permissions::from_mode(0o000)).unwrap();
    let without = "set -- setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all \"$@\"";
    let without = if std::fs::read(&path).is_ok() { without } else { ":" };
    let inner = format!("export MSCCL_ALGO_DIR='{}/inner'", folder.text());
    let text = right(&format!("{}; {inner}; {without}", in_folder(&folder)));
    assert!(told_once(&text, "secret.xml is not used: ").contains("Permission denied"), "{text}");
    assert!(told_once(&text, "/inner: ").contains("MSCCL_ALGO_DIR"), "{text}");
    assert!(told_once(&text, "/inner: ").contains("Permission denied"), "{text}");
}

#[test]
fn a_folder_that_is_not_there_or_is_none_is_told_once() {
    let file = root().join("Cargo.toml");
    for (folder, why) in [("/nonexistent/folder", "No such file"), (file.to_str().unwrap(), "Not a directory")] {
        let text = right(&format!("export STRATA_PROGRAM_DIR='{folder}' MSCCL_XML_FILES=/nonexistent/x.xml"));
        assert!(told_once(&text, &format!("STRATA_PROGRAM_DIR={folder}: ")).contains(why), "{text}");
        assert!(told_once(&text, "/nonexistent/x.xml is not used: ").contains("No such file"), "{text}");
    }
}

/// A name that no file has, and one whose file cannot be used.
#[test]
fn an_algorithm_that_names_no_good_file_is_told_and_calls_are_right_or_refused_on_all_ranks() {
    let folder = Folder::new("named");
    let good = script("ar_ring_4_1ch.xml");
    folder.put("cut.xml", &good[..good.len() / 2]);
    for name in ["script:none", "script:cut"] {
        let line = format!("{} STRATA_ALLREDUCE_ALGO='{name}'", in_folder(&folder));
        let (text, succeeded) = outcome(&mut all_reduce(&line));
        assert!(text.contains(name), "{text}");
        assert!(!text.contains("panicked") && (!succeeded || text.contains("0 OK")), "{text}");
    }
}

#[test]
fn two_hundred_files_are_read_and_the_first_that_fits_serves() {
    let folder = Folder::new("many");
    let names: Vec<String> = std::fs::read_dir(root().join("shim-tests/scripts"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".xml") && name != "ar_pcie_hier_4.xml" && !name.starts_with("alltonext"))
        .collect();
    // Files of one text under many names are different files.
    for number in 0..200 {
        folder.put(&format!("f{number:03}.xml"), &script(&names[number % names.len()]));
    }
    folder.put("e000.xml", &script("ar_ring_4_1ch.xml"));
    let began = std::time::Instant::now();
    let text = right(&in_folder(&folder));
    println!("201 files: {:?}", began.elapsed());
    assert!(goes_by(&text, "script:e000"), "{text}");
    assert!(began.elapsed() < std::time::Duration::from_secs(30), "{:?}", began.elapsed());
}

/// A file that changes, turns bad and goes away between communicators, where some ranks have known it before and others have not.
#[test]
fn what_a_name_means_is_a_matter_of_the_communicator() {
    for named in [&["script:f"][..], &[]] {
        let folder = Folder::new(&format!("changes-{}", named.len()));
        run_with("named_scripts.c", &[], &[&[folder.text()], named].concat());
    }
}

/// Two files of one name: the first folder's has the name, the second one's a number, which rank 0 tells.
#[test]
fn of_equal_names_the_first_folder_s_counts_and_the_others_are_told() {
    let (one, two) = (Folder::new("one"), Folder::new("two"));
    one.put("f.xml", &script("ar_ring_4_1ch.xml"));
    two.put("f.xml", &script("ag_pcie_4.xml"));
    one.put("same.xml", &script("ar_1step_4.xml"));
    two.put("same.xml", &script("ar_1step_4.xml"));
    let both = format!("{}; export MSCCL_ALGO_DIR='{}'", in_folder(&one), two.text());
    let text = right(&both);
    assert!(goes_by(&text, "script:f"), "{text}");
    let told = told_once(&text, "/f.xml is script:f~2: ");
    assert!(told.contains(&format!("{}/f.xml is", two.text())), "{told}");
    assert!(told.contains(&format!("{}/f.xml comes before it", one.text())), "{told}");
    assert!(!text.contains("script:same~2"), "{text}");
    // The other way round, by its number, and what a list has.
    let turned = format!("export STRATA_PROGRAM_DIR='{}' MSCCL_ALGO_DIR='{}'", two.text(), one.text());
    assert!(goes_by(&right(&format!("{turned} STRATA_ALLREDUCE_ALGO=script:f~2")), "script:f~2"));
    let (text, succeeded) = outcome(&mut all_reduce(&format!("{turned} STRATA_ALLREDUCE_ALGO=script:f")));
    assert!(!succeeded && text.contains("script:f is for all_gather on 4 ranks"), "{text}");
    assert!(text.contains(", script:f~2 (result"), "{text}");
    let (text, succeeded) = outcome(&mut all_reduce(&format!("{turned} STRATA_ALLREDUCE_ALGO=script:f~3")));
    assert!(!succeeded && text.contains("did you mean script:f~2? there is no such script"), "{text}");
}
