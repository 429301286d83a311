//! The command `strata` as strangers use it: wrong numbers, wrong names, closed pipes, and what it says then.

use crate::built;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(100);

fn strata(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs the command to its end; one that hangs is ended and told.
fn output(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let id = child.id();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if wait.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            built::signal("KILL", id);
        }
    });
    let start = Instant::now();
    let output = child.wait_with_output().expect("the command ends");
    drop(done);
    watchdog.join().expect("the watchdog");
    assert!(start.elapsed() < LIMIT, "{command:?} did not end");
    output
}

/// The library that `strata perf` shall measure: the one beside the command may be older than this test.
fn library() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| built::library().to_string_lossy().into_owned());
    &PATH
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeds(arguments: &[&str]) -> String {
    let output = output(&mut strata(arguments));
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn no_number_and_no_name_makes_it_panic() {
    const VALUES: [&str; 11] = [
        "",
        "0",
        "-1",
        "abc",
        "3x",
        "NaN",
        "1e308",
        "1000000G",
        "18446744073709551615",
        "99999999999999999999999",
        "ä",
    ];
    let perf = ["perf", "all_reduce", "-e", "64", "--library", library()];
    let small = ["perf", "all_reduce", "-b", "8", "-n", "1", "-w", "0"];
    // Nothing is measured where no table can be written.
    let tune = ["tune", "-o", "/nonexistent/table.toml"];
    let of = |head: &[&'static str], options: &[&'static str], tail: &[&'static str]| {
        options.iter().map(|option| (head.to_vec(), *option, tail.to_vec())).collect::<Vec<_>>()
    };
    let cases = [
        of(&perf, &["-b", "-i", "-f", "-m", "-c", "-o", "-d", "-r", "-z", "-g"], &["-n", "1", "-w", "0"]),
        of(&perf, &["-n"], &["-b", "64", "-w", "0"]),
        of(&perf, &["-w"], &["-b", "64", "-n", "1"]),
        of(&small, &["-e", "--memory"], &["--library", library()]),
        of(&small, &["--library"], &["-e", "8"]),
        of(&["perf"], &["--workload"], &["--simulate", "frontier", "-n", "8"]),
        of(&["perf", "--workload", "dlrm", "--simulate", "frontier"], &["-n"], &[]),
        of(
            &["perf", "--workload", "dlrm", "--simulate", "frontier", "-n", "16"],
            &["--scale", "--flops", "--set"],
            &[],
        ),
        of(&["perf", "--workload", "dlrm", "-n", "16"], &["--simulate"], &[]),
        of(&["launch", "-n", "1"], &["--nodes", "--timeout", "--grace", "--master-port", "--placement"], &["true"]),
        of(&["launch"], &["-n"], &["true"]),
        of(&["plan", "show", "all_gather"], &["-n", "--nodes", "--rank", "--root", "--algo", "--bytes"], &["--draw"]),
        of(&["plan", "show", "all_gather"], &["--rank", "--root", "--placement"], &["-n", "3"]),
        of(&["plan", "verify", "broadcast"], &["--max-ranks"], &["--shape", "2"]),
        of(&["plan", "verify", "broadcast", "--max-ranks", "2"], &["--shape", "--capacity", "--algo"], &[]),
        of(&["info"], &["--reads", "--library"], &[]),
        of(&tune, &["--budget", "--sizes", "--collectives", "-g"], &["--library", library()]),
        of(&tune, &["--library", "--report"], &[]),
    ];
    for (head, option, tail) in cases.into_iter().flatten() {
        for value in VALUES {
            let arguments = [&head[..], &[option, value], &tail[..]].concat();
            let output = output(&mut strata(&arguments));
            let (code, said) = (output.status.code(), text(&output.stderr));
            // 124 is a launch whose time was up at once.
            assert!(matches!(code, Some(0..=2 | 124)), "{arguments:?}: {:?}: {said}", output.status);
            assert!(!said.contains("panicked"), "{arguments:?}: {said}");
        }
    }
}

#[test]
fn nonsense_in_the_launcher_s_variables_is_refused() {
    for size in ["0", "-1", "abc", "65537", "18446744073709551615", "99999999999999999999"] {
        let mut command = strata(&["perf", "all_reduce", "-b", "8", "-e", "8"]);
        command.env("WORLD_SIZE", size).env("RANK", "0").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "1");
        let output = output(&mut command);
        assert_eq!(output.status.code(), Some(2), "{size}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("WORLD_SIZE"), "{size}");
    }
}

#[test]
fn the_front_of_calls_is_measured_and_told_with_their_results_right() {
    for collective in ["all_reduce", "all_gather", "reduce", "broadcast"] {
        let line = [
            "perf",
            collective,
            "-b",
            "256K",
            "-e",
            "256K",
            "-n",
            "2",
            "-w",
            "1",
            "-g",
            "3",
            "--front",
            "--library",
            library(),
        ];
        let output = output(strata(&line).env("STRATA_SEGMENT_BYTES", "4096"));
        let (said, wrong) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{collective}: {said}{wrong}");
        assert!(
            said.contains("#   first element final on all ranks after") && said.contains("values : 0 OK"),
            "{said}"
        );
    }
    let refused = output(&mut strata(&["perf", "all_reduce", "-m", "2", "--front", "--library", library()]));
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

#[test]
fn a_size_that_memory_cannot_hold_is_refused_with_the_size_and_the_memory() {
    let output =
        output(&mut strata(&["perf", "all_reduce", "-b", "1000000G", "-e", "1000000G", "--library", library()]));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("sizes up to 1000000.0 GiB") && said.contains("this machine has"), "{said}");
}

#[test]
fn a_closed_output_ends_it_without_a_word() {
    let script = "\"$0\" plan show alltoall -n 64 | true";
    let output = output(Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_strata")]));
    assert_eq!(text(&output.stderr), "");
}

/// Around a ring everybody sends first, so a channel must hold a message.
#[test]
fn a_plan_that_is_rejected_is_told_with_its_shape_and_status_1() {
    let line = ["plan", "verify", "all_reduce", "--max-ranks", "2", "--algo", "ring"];
    assert!(succeeds(&line).contains(" 0 rejected"));
    let output = output(strata(&line).args(["--capacity", "0"]));
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("    rejected: 2 ranks on 1 node") && !said.contains(" 0 rejected"), "{said}");
}

#[test]
fn collectives_and_placements_go_by_each_of_their_names() {
    let drawn = |name: &str| succeeds(&["plan", "show", name, "-n", "4", "--draw"]);
    assert_eq!(drawn("alltoall"), drawn("all_to_all"));
    assert_eq!(drawn("allgather"), drawn("AllGather"));
    for name in ["alltoall", "all_to_all", "all-to-all", "alltoall_perf", "send_recv"] {
        succeeds(&["perf", name, "-b", "64", "-e", "64", "-n", "1", "-w", "0", "-g", "2", "--library", library()]);
    }
    succeeds(&["plan", "verify", "alltoall", "--max-ranks", "3"]);
    let shown = |placement: &[&str]| succeeds(&[&["plan", "show", "broadcast", "--nodes", "2"], placement].concat());
    assert_eq!(shown(&["--round-robin"]), shown(&["--placement", "round-robin"]));
    assert_ne!(shown(&["--round-robin"]), shown(&["--placement", "block"]));
    let launched = |placement: &[&str]| {
        let mut line = vec!["launch", "-n", "3", "--nodes", "2", "--tag-output"];
        line.extend(placement);
        line.extend(["--", "sh", "-c", "echo $NODE_RANK"]);
        let said = succeeds(&line);
        let mut lines: Vec<&str> = said.lines().collect();
        lines.sort_unstable();
        lines.join(" ")
    };
    assert_eq!(launched(&["--round-robin"]), "[0] 0 [1] 1 [2] 0");
    assert_eq!(launched(&["--placement", "round-robin"]), launched(&["--round-robin"]));
}

#[test]
fn a_plan_is_shown_on_one_node_unless_told_otherwise_and_a_drawing_is_explained() {
    let drawn = succeeds(&["plan", "show", "all_gather", "--draw"]);
    assert!(drawn.starts_with("4 ranks on 1 node (4)\nall_gather board\n"), "{drawn}");
    let drawn = succeeds(&["plan", "show", "all_gather", "--algo", "direct", "--draw"]);
    assert!(drawn.contains(">1 o0       sends chunk 0"), "{drawn}");
    let drawn = succeeds(&["plan", "show", "all_gather", "-n", "8", "--nodes", "2", "--draw"]);
    assert!(drawn.contains("two_level(direct,log)"), "{drawn}");
    assert!(succeeds(&["plan", "show", "--help"]).contains("sends chunk 0"));
    assert!(succeeds(&["perf", "--help"]).contains("time_us is a mean"));
}

#[test]
fn a_file_is_shown_and_its_picture_has_a_box_for_each_step_and_an_arrow_for_each_message() {
    let written = succeeds(&["plan", "convert", "all_reduce", "--algo", "ring", "-n", "4"]);
    let file = std::env::temp_dir().join(format!("strata-shown-{}.xml", std::process::id()));
    std::fs::write(&file, written).expect("the file can be written");
    let name = file.to_str().expect("UTF-8");
    let shown = succeeds(&["plan", "show", name, "--rank", "3"]);
    let picture = succeeds(&["plan", "show", name, "--svg"]);
    let refused = output(&mut strata(&["plan", "show", name, "-n", "8"]));
    std::fs::remove_file(&file).expect("it is there");
    assert!(shown.contains("\nrank 3\n") && !shown.contains("\nrank 0\n"), "{shown}");
    // Of each rank 6 messages, each sent and received.
    let count = |what: &str| picture.matches(what).count();
    assert_eq!((count("class=\"message\""), count("class=\"step\"")), (24, 48), "{picture}");
    assert!(text(&refused.stderr).contains("is an algorithm itself, for 4 ranks"));
    let too_long = output(&mut strata(&["plan", "show", "all_reduce", "--algo", "ring", "-n", "64", "--svg"]));
    assert!(text(&too_long.stderr).contains("a picture has room for 4096 steps, not for"));
}

#[test]
fn a_refused_file_has_one_exit_code_and_its_line_whatever_is_asked_of_it() {
    let written = succeeds(&["plan", "convert", "all_gather", "--algo", "ring", "-n", "2"]);
    let folder = std::env::temp_dir().join(format!("strata-refused-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let cases = [
        ("wrong.xml", written.replacen("type=\"r\"", "type=\"nop\"", 1), "nobody receives the message"),
        ("none.xml", written.replace("allgather", "allgathered"), "line 1: coll=\"allgathered\" is no collective"),
        ("bare.xml", written.replace("allgather", "custom"), "promises nothing"),
    ];
    for (name, content, why) in cases {
        let file = folder.join(name);
        std::fs::write(&file, content).expect("the file can be written");
        for what in ["verify", "show", "convert"] {
            let refused = output(&mut strata(&["plan", what, file.to_str().expect("UTF-8")]));
            let said = text(&refused.stdout) + &text(&refused.stderr);
            assert!(refused.status.code() == Some(1) && said.contains(why), "{what} {name}: {refused:?}");
            assert!(what != "verify" || said.contains("\n    refused: "), "{said}");
        }
    }
    std::fs::remove_dir_all(&folder).expect("it is there");
}

#[test]
fn what_strata_could_not_read_again_is_not_written() {
    for (line, why) in [
        (&["all_reduce", "--algo", "ring", "-n", "1025"][..], "at most 1024 ranks, not 1025"),
        (
            &["all_reduce", "--algo", "ring", "-n", "512"],
            "has 1046528 steps, and a file that Strata can read at most 524288",
        ),
        (&["all_gather", "--algo", "board", "-n", "4"], "a file has messages alone"),
    ] {
        let refused = output(&mut strata(&[&["plan", "convert"], line].concat()));
        assert!(refused.status.code() == Some(2) && refused.stdout.is_empty(), "{line:?}: {refused:?}");
        assert!(text(&refused.stderr).contains(why), "{line:?}: {refused:?}");
    }
}

#[test]
fn a_custom_file_is_verified_by_the_contract_that_an_option_names() {
    let folder = std::env::temp_dir().join(format!("strata-contract-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let place = |name: &str| folder.join(name).to_str().expect("UTF-8").to_string();
    // Rank 1 gets rank 0's input; there is no `copied.toml` beside the file.
    let (file, right, wrong, none) = (place("copied.xml"), place("right"), place("wrong"), place("none"));
    let program = r#"<algo name="copied" nchunksperloop="1" ngpus="2" coll="custom">
 <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="1" recv="-1" chan="0">
  <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb></gpu>
 <gpu id="1" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="-1" recv="0" chan="0">
  <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/></tb></gpu>
</algo>"#;
    std::fs::write(&file, program).expect("the file can be written");
    std::fs::write(&right, "[[output]]\nranks = \"1\"\nrank = 0\n").expect("the file can be written");
    std::fs::write(&wrong, "[[output]]\nranks = \"0\"\nrank = 1\n").expect("the file can be written");
    let verified = |options: &[&str]| {
        let output = output(&mut strata(&[&["plan", "verify", &file], options].concat()));
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let [proved, broken, missing, without] =
        [&["--contract", &right][..], &["--contract", &wrong], &["--contract", &none], &[]].map(verified);
    std::fs::remove_dir_all(&folder).expect("it is there");
    assert_eq!(proved.0, Some(0), "{}", proved.1);
    for ((code, said), why) in [(broken, "rank 0"), (missing, "none: No such file"), (without, "contract")] {
        assert!(code == Some(1) && said.contains("refused: ") && said.contains(why), "{why}: {code:?}: {said}");
    }
}

#[test]
fn a_wrong_algorithm_or_variable_is_told_by_info() {
    for option in ["--env", "--library=/none"] {
        let mut command = strata(&["info", option]);
        command.env("STRATA_ALLREDUCE_ALGO", "rign").env("STRATA_WINDOWS", "3");
        let said = text(&output(&mut command).stdout);
        assert!(said.contains("STRATA_ALLREDUCE_ALGO=rign: algorithm rign: unknown; did you mean ring?"), "{said}");
        assert!(said.contains("unknown variable STRATA_WINDOWS; did you mean STRATA_WINDOW?"), "{said}");
    }
}

#[test]
fn info_says_which_mpi_may_carry_messages_or_why_none_does() {
    let said = |variables: &[(&str, &str)]| {
        let mut command = strata(&["info", "--library", library()]);
        command.env_remove("STRATA_INTER").env_remove("STRATA_MPI_PLUGIN").envs(variables.iter().copied());
        let said = text(&output(&mut command).stdout);
        assert!(said.contains("nodes talk over TCP"), "{said}");
        said.lines().find(|line| line.starts_with("MPI ")).unwrap_or_else(|| panic!("{said}")).to_string()
    };
    assert!(said(&[]).contains("none: there is no plugin beside the library"));
    assert!(said(&[("STRATA_INTER", "tcp")]).contains("off: STRATA_INTER is tcp"));
    assert!(said(&[("STRATA_MPI_PLUGIN", "/none.so")]).contains("/none.so cannot be opened"));
    let source = "static const unsigned table[2] = {999, 8};\n\
                  const void* strata_mpi_plugin(void) { return table; }\n";
    let plugin = built::Compiler::new("c").compile(source, &["-shared", "-fPIC"]);
    assert!(said(&[("STRATA_MPI_PLUGIN", plugin.to_str().unwrap())]).contains("is refused: it is of version 999"));
    std::fs::remove_file(plugin).unwrap();
}

#[test]
fn a_wrong_setting_is_told_once_per_job_without_being_asked_for() {
    let told = |debug: Option<&str>| {
        let exe = env!("CARGO_BIN_EXE_strata");
        let line = ["launch", "-n", "4", "--nodes", "2", "--timeout", "90", "--", exe, "perf", "all_gather"];
        let mut command = strata(&line);
        command.args(["-b", "64", "-e", "64", "-n", "1", "-w", "0", "--library", library()]);
        command.env("STRATA_TIMEOUTMS", "9000").env("STRATA_REDUCE_ALGO", "tre").env_remove("NCCL_DEBUG");
        command.envs(debug.map(|level| ("NCCL_DEBUG", level)));
        let output = output(&mut command);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        let count = |wanted: &str| said.matches(wanted).count();
        (
            count("did you mean STRATA_TIMEOUT_MS?"),
            count("STRATA_REDUCE_ALGO=tre: algorithm tre: unknown; did you mean tree?"),
        )
    };
    assert_eq!(told(None), (1, 1));
    assert_eq!(told(Some("WARN")), (4, 4), "with NCCL_DEBUG each rank warns, as in NCCL");
}

#[test]
fn an_output_that_is_full_ends_every_subcommand_with_a_message_and_status_1() {
    let library = library();
    let table = format!("{}/full-{}.toml", std::env::temp_dir().display(), std::process::id());
    let cases: [&[&str]; 22] = [
        &["--help"],
        &["--version"],
        &["help", "plan"],
        &["simulate", "--help"],
        &["info", "--library", library],
        &["info", "--env"],
        &["info", "--algorithms"],
        &["info", "--nics"],
        &["plan", "show", "all_gather", "-n", "4"],
        &["plan", "show", "all_gather", "-n", "4", "--draw"],
        &["plan", "verify", "broadcast", "--max-ranks", "2"],
        &["simulate", "--machine", "netns", "-n", "8", "--bytes", "1M"],
        &["simulate", "--machine", "netns", "-n", "8", "--bytes", "1M", "--json", "-"],
        &["simulate", "--show"],
        &["explain", "all_gather", "1M", "-n", "8"],
        &["perf", "all_reduce", "-b", "8", "-e", "8", "-n", "1", "-w", "0", "--library", library],
        &["perf", "all_reduce", "-b", "8", "-e", "8", "-n", "1", "-w", "0", "--library", library, "--json", "-"],
        &["perf", "--workload", "list"],
        &["perf", "--workload", "dlrm", "--simulate", "frontier", "-n", "16"],
        &["perf", "--workload", "dlrm", "--simulate", "frontier", "-n", "16", "--json", "-"],
        &["tune", "-o", &table, "--sizes", "8", "--budget", "1s", "-g", "2", "--library", library],
        &["launch", "-n", "2", "--tag-output", "--", "echo", "said"],
    ];
    for arguments in cases {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has /dev/full");
        let to_nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null").expect("and /dev/null");
        let run = |out: std::fs::File| {
            let mut command = strata(arguments);
            let child = command.stdout(out).stderr(Stdio::piped()).spawn().expect("the command starts");
            child.wait_with_output().expect("the command ends")
        };
        let said = run(full);
        let text = text(&said.stderr);
        assert_eq!(said.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.contains("No space left on device") && !text.contains("panicked"), "{arguments:?}: {text}");
        assert!(text.lines().filter(|line| line.contains("No space")).count() == 1, "{arguments:?}: {text}");
        let well = run(to_nowhere);
        assert!(well.status.success(), "{arguments:?} works otherwise: {}", String::from_utf8_lossy(&well.stderr));
    }
    // Only `tune` has written it.
    let _ = std::fs::remove_file(table);
}
