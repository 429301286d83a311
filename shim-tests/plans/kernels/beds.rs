//! What runs kernels: their source, compiled for the processor, or their PTX, interpreted.

use super::memory::Twice;
use libloading::os::unix::Library;
use ptx::{Device, Launch, Manner, Nan};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use strata::device::gpu::code;
use strata::device::gpu::kernels::{self, Batch, Flag, Shuffle};
use strata::dtype::DataType;

/// How a kernel is launched, and what decides the order of the threads.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    pub seed: u64,
}

/// What a kernel takes.
#[derive(Clone, Copy)]
pub enum Argument<'a> {
    Batch(&'a Batch),
    Shuffle(&'a Shuffle),
    Flag(Flag),
}

impl Argument<'_> {
    /// The bytes that a driver would copy.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Argument::Batch(batch) => {
                let head = [batch.njobs, batch.nsrcs, batch.scale, batch.operation].map(u32::to_le_bytes).concat();
                let words = batch.words.iter().flat_map(|word| word.to_le_bytes());
                head.into_iter().chain(batch.factor.to_le_bytes()).chain(words).collect()
            }
            Argument::Shuffle(of) => {
                let blocks = [of.src, of.dst, of.block_bytes, of.rows, of.columns];
                let strides = [of.src_row_bytes, of.src_column_bytes, of.dst_row_bytes, of.dst_column_bytes];
                blocks.into_iter().chain(strides).flat_map(u64::to_le_bytes).collect()
            }
            Argument::Flag(flag) => {
                [&flag.address.to_le_bytes()[..], &flag.value.to_le_bytes(), &flag.reserved.to_le_bytes()].concat()
            }
        }
    }

    /// Blocks along y: one for each job, and sometimes one for a job that is not there.
    fn jobs(&self, seed: u64) -> u32 {
        match self {
            Argument::Batch(batch) => batch.njobs + (seed / 2 % 2) as u32,
            _ => 1,
        }
    }
}

/// Runs a kernel on the first half of some memory. An error is a sentence.
pub trait Bed {
    fn run(&self, kernel: &str, argument: Argument, memory: &Twice, grid: Grid) -> Result<(), String>;
}

/// The source, compiled for the processor. Undefined behaviour, a misaligned access among it, is a trap.
pub struct Compiled;

const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-fsanitize=undefined",
    "-fsanitize-undefined-trap-on-error",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a compiler, which must not say anything.
pub fn compiled(command: &mut Command) {
    let output = command.output().expect("c++ starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

pub fn has_compiler() -> bool {
    let there = Command::new("c++").arg("--version").output().is_ok();
    if !there {
        println!("SKIPPED: the kernels on the processor: there is no c++");
    }
    there
}

type Kernel = unsafe extern "C" fn();

impl Compiled {
    /// None where there is no C++ compiler.
    pub fn get() -> Option<Compiled> {
        Compiled::library().map(|_| Compiled)
    }

    fn library() -> Option<&'static Library> {
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        let open = || {
            let result = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels.{}.so", std::process::id()));
            let types = DataType::ALL.map(|dtype| format!("-DSTRATA_TYPE_{}", kernels::type_name(dtype)));
            let mut command = Command::new("c++");
            command.args(FLAGS).args(types).args(["-fPIC", "-shared", "-I"]).arg(root().join("kernels"));
            compiled(command.arg(root().join("shim-tests/c/kernels.cpp")).arg("-o").arg(&result));
            // SAFETY: loading must run no harmful code; because the library has no constructors.
            let opened = unsafe { Library::new(&result) }.expect("the kernels can be opened");
            std::fs::remove_file(&result).expect("the library's file can be removed");
            opened
        };
        LIBRARY.get_or_init(|| has_compiler().then(open)).as_ref()
    }

    /// A kernel or one of the functions that run them.
    fn symbol<T: Copy>(name: &str) -> T {
        let library = Compiled::library().expect("asked for after it was compiled");
        // SAFETY: the symbol must have the type; because the callers name those of shim-tests/c/kernels.cpp.
        let found = unsafe { library.get::<T>(name.as_bytes()) };
        *found.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn launch<A>(runner: &str, kernel: &str, argument: &A, grid: Grid) {
        let run: unsafe extern "C" fn(Kernel, *const A, u32, u32, u32) = Compiled::symbol(runner);
        let backwards = (grid.seed % 2) as u32;
        // SAFETY: the kernel must take what the argument is and its addresses be valid; because the callers see to both.
        unsafe { run(Compiled::symbol(kernel), argument, grid.blocks, grid.threads, backwards) };
    }
}

impl Bed for Compiled {
    fn run(&self, kernel: &str, argument: Argument, _: &Twice, grid: Grid) -> Result<(), String> {
        match argument {
            Argument::Batch(batch) => Compiled::launch("run_batch", kernel, batch, grid),
            Argument::Shuffle(shuffle) => Compiled::launch("run_shuffle", kernel, shuffle, grid),
            Argument::Flag(flag) => Compiled::launch("run_flag", kernel, &flag, grid),
        }
        Ok(())
    }
}

/// PTX, interpreted.
pub struct Interpreted<'a> {
    modules: Vec<&'a ptx::Module>,
    nan: Nan,
    /// Instructions that were executed so far.
    pub instructions: AtomicU64,
}

/// The modules that the library has, parsed.
pub fn shipped() -> &'static [ptx::Module] {
    static MODULES: OnceLock<Vec<ptx::Module>> = OnceLock::new();
    let parsed = |text| ptx::Module::parse(text).expect("it is PTX");
    MODULES.get_or_init(|| texts().into_iter().chain([codes_text()]).map(parsed).collect())
}

/// The text of the one with the codes.
pub fn codes_text() -> &'static str {
    code::codes_ptx().to_str().expect("PTX is text")
}

/// The texts of the others.
pub fn texts() -> Vec<&'static str> {
    let of_types = DataType::ALL.map(code::ptx).into_iter();
    of_types.chain([code::move_ptx()]).map(|text| text.to_str().expect("PTX is text")).collect()
}

impl<'a> Interpreted<'a> {
    pub fn new(modules: impl IntoIterator<Item = &'a ptx::Module>, nan: Nan) -> Interpreted<'a> {
        Interpreted { modules: modules.into_iter().collect(), nan, instructions: AtomicU64::new(0) }
    }
}

impl Device for Twice {
    fn load(&self, address: u64, bytes: usize) -> Result<u128, String> {
        let mut value = [0; 16];
        self.reached(address, bytes)?.read(&mut value[..bytes]);
        Ok(u128::from_le_bytes(value))
    }

    fn store(&self, address: u64, bytes: usize, value: u128) -> Result<(), String> {
        self.reached(address, bytes)?.write(&value.to_le_bytes()[..bytes]);
        Ok(())
    }
}

/// The most instructions of a thread of these tests.
const LIMIT: u64 = 4_000_000;

impl Bed for Interpreted<'_> {
    fn run(&self, kernel: &str, argument: Argument, memory: &Twice, grid: Grid) -> Result<(), String> {
        let found = self.modules.iter().find_map(|module| module.kernel(kernel));
        let launch = Launch {
            kernel: found.ok_or(format!("{kernel} is in no module"))?,
            params: &argument.bytes(),
            blocks: [grid.blocks, argument.jobs(grid.seed), 1],
            threads: [grid.threads, 1, 1],
        };
        let manner = Manner { seed: grid.seed, nan: self.nan, limit: LIMIT };
        let executed = launch.run(memory, manner).map_err(|trap| trap.to_string())?;
        self.instructions.fetch_add(executed, Ordering::Relaxed);
        Ok(())
    }
}
