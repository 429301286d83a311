//! `strata plan compile`: what it writes, what it refuses, and by which exit code it says so.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use strata::script;

/// The example of docs/scripts.md.
const EXCHANGE: &str = r#"{"strata_trace": 1, "name": "exchange", "collective": "all_reduce", "ranks": 2, "chunks": 2, "in_place": true,
 "steps": [
  {"op": "reduce", "src": [1, "input", 0], "dst": [0, "input", 0], "at": "exchange.py:7"},
  {"op": "reduce", "src": [0, "input", 1], "dst": [1, "input", 1], "at": "exchange.py:7"},
  {"op": "copy", "src": [0, "input", 0], "dst": [1, "input", 0], "channel": 1},
  {"op": "copy", "src": [1, "input", 1], "dst": [0, "input", 1], "channel": 1}]}"#;
const NEXT: &str = r#"{"strata_trace": 1, "name": "next", "collective": "custom", "ranks": 2, "chunks": 1,
 "contract": [{"ranks": "1", "rank_shift": -1}], "steps": [{"op": "copy", "src": [0, "input", 0], "dst": [1, "output", 0]}]}"#;

/// A folder of a test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compile-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// The path of a file there, which gets this text.
    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs it with these arguments, this on its standard input.
fn compile(arguments: &[&str], input: &[u8]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.args(["plan", "compile"]).args(arguments).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    // It may have ended without reading.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().expect("the command ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// It must end with this code, write nothing and say this.
fn fails(arguments: &[&str], input: &str, code: i32, said: &str) {
    let outcome = compile(arguments, input.as_bytes());
    assert_eq!(outcome.code, Some(code), "{arguments:?}: {}", outcome.err);
    assert!(outcome.err.contains(said) && !outcome.err.contains("panicked"), "{arguments:?}: {}", outcome.err);
    assert_eq!(outcome.out, "", "{arguments:?}");
}

#[test]
fn a_trace_in_a_file_or_on_the_standard_input_becomes_the_same_file() {
    let folder = Folder::new("same");
    let of_file = compile(&[&folder.file("exchange.json", EXCHANGE)], b"");
    assert_eq!((of_file.code, of_file.err.as_str()), (Some(0), ""));
    let script = script::read(&of_file.out, None).expect("a script");
    assert_eq!((script.name.as_str(), script.nranks(), script.chunks), ("exchange", 2, 2));
    let of_input = compile(&["-"], EXCHANGE.as_bytes());
    assert_eq!((of_input.code, of_input.out), (Some(0), of_file.out.clone()));
    let output = folder.path("exchange.xml");
    for option in ["-o", "--output"] {
        let written = compile(&["-", option, &output], EXCHANGE.as_bytes());
        assert_eq!((written.code, written.out.as_str()), (Some(0), ""), "{}", written.err);
        assert_eq!(std::fs::read_to_string(&output).unwrap(), of_file.out);
        std::fs::remove_file(&output).unwrap();
    }
    assert!(!Path::new(&folder.path("exchange.toml")).exists(), "a contract of a collective that has a name");
}

#[test]
fn instances_stand_in_place_of_those_of_the_trace() {
    for (instances, chunks) in [("1", 2), ("3", 6), ("64", 128)] {
        let said = compile(&["-", "--instances", instances], EXCHANGE.as_bytes());
        assert_eq!(script::read(&said.out, None).expect("a script").chunks, chunks, "{}", said.err);
    }
    let of_trace = compile(&["-"], EXCHANGE.replace("\"chunks\": 2", "\"chunks\": 2, \"instances\": 5").as_bytes());
    assert_eq!(script::read(&of_trace.out, None).expect("a script").chunks, 10);
    for (instances, said) in [
        ("0", "-: instances: 0 is not in 1 to 64"),
        ("65", "-: instances: 65 is not in 1 to 64"),
        ("4294967295", "instances: 4294967295 is not in 1 to 64"),
        ("4294967296", "invalid value '4294967296' for '--instances"),
        ("-1", "-1"),
        ("two", "invalid value 'two'"),
        ("", "invalid value ''"),
    ] {
        fails(&["-", "--instances", instances], EXCHANGE, 2, said);
    }
}

#[test]
fn a_custom_collective_s_contract_lies_beside_its_file() {
    let folder = Folder::new("custom");
    let (output, beside) = (folder.path("next.xml"), folder.path("next.toml"));
    let said = compile(&["-", "-o", &output], NEXT.as_bytes());
    assert_eq!(said.code, Some(0), "{}", said.err);
    let (text, contract) = (std::fs::read_to_string(&output).unwrap(), std::fs::read_to_string(&beside).unwrap());
    assert!(script::read(&text, Some(&contract)).is_ok_and(|script| script.contract.is_some()));
    fails(&["-", "-o", &beside], NEXT, 2, "next.toml: the contract takes this name");
    // Where the contract cannot be written, nothing is.
    std::fs::remove_file(&output).unwrap();
    std::fs::remove_file(&beside).unwrap();
    std::fs::create_dir(&beside).unwrap();
    fails(&["-", "-o", &output], NEXT, 2, "next.toml: Is a directory");
    assert!(!Path::new(&output).exists());
}

#[test]
fn what_is_no_trace_is_told_and_the_exit_code_is_2() {
    let broken = |from: &str, to: &str| EXCHANGE.replacen(from, to, 1);
    for (text, said) in [
        (String::new(), "-: no trace: EOF while parsing a value at line 1 column 0"),
        ("{".to_string(), "-: no trace: EOF while parsing an object"),
        ("<algo/>".to_string(), "-: no trace: expected value at line 1 column 1"),
        (EXCHANGE[..EXCHANGE.len() - 2].to_string(), "no trace: EOF while parsing a list at line 6"),
        (EXCHANGE.to_string() + "x", "no trace: trailing characters at line 6"),
        (broken("_trace\": 1", "_trace\": 2"), "strata_trace: version 2 of traces, where 1 is known"),
        (broken("\"strata_trace\": 1, ", ""), "missing field `strata_trace`"),
        (broken("\"op\"", "\"opp\""), "unknown field `opp`"),
        (broken("\"reduce\"", "\"add\""), "unknown variant `add`"),
        (broken("all_reduce", "all_deduce"), "collective: \"all_deduce\" is none"),
        (broken("\"ranks\": 2", "\"ranks\": 0"), "ranks: 0 is not in 1 to 1024"),
        (broken("\"ranks\": 2", "\"ranks\": 1025"), "ranks: 1025 is not in 1 to 1024"),
        (broken("\"chunks\": 2", "\"chunks\": -2"), "invalid value: integer `-2`"),
        (broken("[1, \"input\", 0]", "[2, \"input\", 0]"), "step 0 (exchange.py:7)"),
        (broken("[0, \"input\", 1]", "[0, \"input\", 2]"), "step 1 (exchange.py:7)"),
        (broken("\"channel\": 1", "\"channel\": 4096"), "step 2: channel 4096 is not in -1 to 4095"),
        (broken("\"chunks\": 2", "\"chunks\": 2, \"protocol\": \"TCP\""), "protocol: \"TCP\" is none of Simple"),
        (NEXT.replace("\"rank_shift\": -1", "\"rank\": 7"), "contract: rule 1: rank 7 of 2"),
        (NEXT.replacen("\"contract\"", "\"scratch\": {}, \"contract\": null, \"name2\"", 1), "unknown field `name2`"),
    ] {
        fails(&["-"], &text, 2, said);
    }
    let outcome = compile(&["-"], b"\"\xff\xfe\"");
    assert!(
        outcome.code == Some(2) && outcome.err.contains("-: stream did not contain valid UTF-8"),
        "{}",
        outcome.err
    );
}

#[test]
fn files_that_cannot_be_read_or_written_are_named_and_the_exit_code_is_2() {
    let folder = Folder::new("files");
    let trace = folder.file("exchange.json", EXCHANGE);
    fails(&[&folder.path("none.json")], "", 2, "none.json: No such file or directory");
    fails(&[folder.0.to_str().unwrap()], "", 2, ": it is no ordinary file");
    fails(&["/dev/zero"], "", 2, "/dev/zero: it is no ordinary file");
    for (output, said) in [
        (folder.path("no/such/folder.xml"), "folder.xml: No such file or directory"),
        (folder.0.to_str().unwrap().to_string(), ": Is a directory"),
        ("/dev/full".to_string(), "/dev/full: No space left on device"),
        (String::new(), "a value is required for '--output"),
    ] {
        fails(&[&trace, "-o", &output], "", 2, said);
    }
    fails(&[], "", 2, "<TRACE>");
    fails(&[&trace, &trace], "", 2, "unexpected argument");
    fails(&[&trace, "--optimise"], "", 2, "unexpected argument '--optimise'");
}

#[test]
fn a_trace_that_does_something_else_is_refused_by_its_step_and_the_exit_code_is_1() {
    let folder = Folder::new("refused");
    let output = folder.path("wrong.xml");
    // The last step takes the chunk of another place.
    let wrong = EXCHANGE.replace(
        "\"src\": [1, \"input\", 1], \"dst\": [0, \"input\", 1]",
        "\"src\": [1, \"input\", 1], \"dst\": [0, \"input\", 0]",
    );
    assert_ne!(wrong, EXCHANGE);
    fails(&["-", "-o", &output], &wrong, 1, "- is refused: ");
    assert!(!Path::new(&output).exists(), "a refused trace was written");
    let short = EXCHANGE.replace(
        r#",
  {"op": "copy", "src": [1, "input", 1], "dst": [0, "input", 1], "channel": 1}"#,
        "",
    );
    assert_ne!(short, EXCHANGE);
    fails(&["-"], &short, 1, "is refused: ");
    let empty = r#"{"strata_trace": 1, "collective": "broadcast", "ranks": 3, "chunks": 1, "steps": []}"#;
    fails(&["-"], empty, 1, "is refused: ");
}

/// A file of so many ranks, each of which does these steps with the next: next to nothing, with the largest numbers.
fn short_file(collective: &str, (ranks, chunks): (usize, usize), steps: &str) -> String {
    let gpu = |rank: usize| {
        let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        format!("<gpu id='{rank}' i_chunks='{chunks}' o_chunks='{chunks}' s_chunks='0'>")
            + &format!("<tb id='0' send='{to}' recv='{from}' chan='0'>{steps}</tb></gpu>")
    };
    let head = format!("<algo name='short' ngpus='{ranks}' nchunksperloop='{chunks}' coll='{collective}' nchannels='1' proto='Simple'>");
    head + &(0..ranks).map(gpu).collect::<String>() + "</algo>"
}

/// Short files with large numbers take a bounded time, and memory: 1 GiB, and a little for what the process maps.
#[test]
fn no_short_file_takes_long_or_much_memory_whatever_its_numbers() {
    let folder = Folder::new("numbers");
    let send =
        "<step s='0' type='s' srcbuf='i' srcoff='0' dstbuf='o' dstoff='0' cnt='1' depid='-1' deps='-1' hasdep='0'/>";
    let recv = send.replace("s='0' type='s'", "s='1' type='r'");
    let both = format!("{send}{recv}");
    let most = (1 << 20) - 1024;
    for collective in
        ["allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall", "gather", "scatter", "custom"]
    {
        for steps in ["", &both] {
            for shape in [(1024, most), (64, most / 4), (1024, 16 << 10), (1, most)] {
                let name = format!("{collective}-{}-{}.xml", shape.0, shape.1);
                let file = folder.file(&name, &short_file(collective, shape, if shape.0 == 1 { "" } else { steps }));
                folder.file(&name.replace("xml", "toml"), &"[[output]]\nrank = 0\n".repeat(1000));
                let began = std::time::Instant::now();
                let line = "ulimit -v 1400000; exec \"$0\" plan verify \"$1\"";
                let output = Command::new("timeout")
                    .args(["60", "sh", "-c", line, env!("CARGO_BIN_EXE_strata"), &file])
                    .output()
                    .unwrap();
                let said =
                    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
                let verdict = output.status.code().is_some_and(|code| code == i32::from(!said.contains("1 accepted")));
                assert!(verdict, "{name}, {} bytes: {}: {said}", steps.len(), output.status);
                println!("{name}: {:.1?}: {}", began.elapsed(), said.lines().nth(2).unwrap_or_default().trim());
            }
        }
    }
}

#[test]
fn a_closed_output_ends_it_quietly() {
    let long = EXCHANGE.replace("\"chunks\": 2", "\"chunks\": 2, \"instances\": 64");
    let folder = Folder::new("closed");
    let trace = folder.file("long.json", &long);
    let line = "\"$0\" plan compile \"$1\" | true";
    let output = Command::new("sh").args(["-c", line, env!("CARGO_BIN_EXE_strata"), &trace]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
