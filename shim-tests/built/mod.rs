//! The built library, and C programs compiled against it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The root of the tree: some test programs belong to the library's package, which is there, the others to the command's.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("shim-tests").is_dir()).expect("a tree with tests")
}

/// The shared library that cargo built beside this test.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    // `cargo test` leaves the library among the dependencies, `cargo build` one directory higher: the newer counts.
    let candidates = [deps.join("libstrata.so"), deps.parent().unwrap().join("libstrata.so")];
    let age = |path: &PathBuf| std::fs::metadata(path).and_then(|data| data.modified()).ok();
    candidates.into_iter().filter(|path| path.exists()).max_by_key(age).expect("libstrata.so was not built")
}

/// Where `nccl.h` and `strata.h` are.
pub fn header_dir() -> PathBuf {
    root().join("include")
}

/// Sends a process a signal, such as KILL; whether it could. By a shell, each of which has a `kill` of its own: a bare machine has no
/// such program.
pub fn signal(name: &str, id: u32) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &id.to_string()]);
    shell.status().is_ok_and(|status| status.success())
}

/// A port on which nobody listens, below those that the system gives to connections: they would take one that was free a moment ago.
#[allow(dead_code)]
pub fn free_port() -> u16 {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let next = |_| {
        let number = 97 * std::process::id() as usize + ASKED.fetch_add(1, Ordering::Relaxed);
        10_000 + (number % 20_000) as u16
    };
    (0..1000).map(next).find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()).expect("a free port")
}

/// Runs a command to its end within a limit; its output, if it succeeded.
pub fn checked(command: &mut Command) -> String {
    let shown = format!("{command:?}");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let read = |mut stream: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stream.read_to_string(&mut text);
            text
        })
    };
    let out = read(Box::new(child.stdout.take().unwrap()));
    let err = read(Box::new(child.stderr.take().unwrap()));
    let deadline = Instant::now() + Duration::from_secs(300);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                break None;
            }
            // Not yielding: on Linux 6.18 threads that do nothing else keep others, and the kernel's own, from processors for minutes.
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    assert!(status.is_some_and(|status| status.success()), "{shown}: {status:?}\n{out}{err}");
    out
}

/// A C or C++ compiler with our headers in sight.
pub struct Compiler {
    program: &'static str,
    suffix: &'static str,
    headers: bool,
}

impl Compiler {
    /// The compiler of `c` or `c++`.
    pub fn new(language: &str) -> Compiler {
        match language {
            "c" => Compiler { program: "cc", suffix: "c", headers: true },
            _ => Compiler { program: "c++", suffix: "cc", headers: true },
        }
    }

    /// The same without our headers.
    pub fn without_headers(&self) -> Compiler {
        Compiler { headers: false, ..*self }
    }

    /// Compiles a program and returns where it is.
    pub fn compile(&self, source: &str, arguments: &[&str]) -> PathBuf {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let stem = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}", std::process::id()));
        let (file, program) = (stem.with_extension(self.suffix), stem.with_extension("out"));
        std::fs::write(&file, source).unwrap();
        let mut command = Command::new(self.program);
        command.arg(&file);
        if self.headers {
            command.arg("-I").arg(header_dir()).arg("-I").arg(root().join("shim-tests/c"));
        }
        command.args(arguments);
        if !arguments.contains(&"-fsyntax-only") {
            command.arg("-o").arg(&program);
        }
        checked(&mut command);
        std::fs::remove_file(&file).unwrap();
        program
    }
}

/// A directory in which the library goes by NCCL's file names.
pub fn library_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lib");
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["libnccl.so", "libnccl.so.2"] {
        let link = dir.join(name);
        // Tests of several processes may do this at once: a link that is there already is the same link.
        if std::fs::read_link(&link).ok() != Some(library()) {
            let fresh = dir.join(format!("{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
            let _ = std::fs::remove_file(&fresh);
            std::os::unix::fs::symlink(library(), &fresh).unwrap();
            std::fs::rename(&fresh, &link).unwrap();
        }
    }
    dir
}

/// Compiles `shim-tests/c/<name>` against the library and runs it.
pub fn run(name: &str, arguments: &[&str]) -> String {
    run_with(name, arguments, &[])
}

/// The same, with arguments for the program besides those for the compiler.
pub fn run_with(name: &str, arguments: &[&str], words: &[&str]) -> String {
    let dir = library_dir();
    let source = std::fs::read_to_string(root().join("shim-tests/c").join(name));
    let path = dir.to_str().unwrap();
    let strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-L", path, "-lnccl"];
    let program = Compiler::new("c").compile(&source.unwrap(), &[&strict[..], arguments].concat());
    let mut command = Command::new(&program);
    command.args(words);
    let output = checked(command.env("LD_LIBRARY_PATH", dir).env("STRATA_BOOTSTRAP_TIMEOUT_MS", "30000"));
    std::fs::remove_file(program).unwrap();
    output
}
