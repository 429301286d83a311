//! The GPU kernels compute the host device's bits: their source, compiled for the processor, runs thread by thread on
//! memory of its own, and all of that memory is then compared with what the host device made of the same.
//!
//! What this shows is the source's arithmetic, addresses and order of accesses. That a GPU's compiler keeps to IEEE 754
//! is set by its options (`scripts/build-kernels`), and seen only on a GPU.

use libloading::os::unix::Library;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::sync::OnceLock;
use std::time::Duration;
use strata::device::gpu::code;
use strata::device::gpu::kernels::{self, Batch, BatchScale, Flag, Shuffle, WORDS};
use strata::device::host;
use strata::dtype::{DataType, Operator, Prologue, Reduction};
use strata::memory::{Arena, Region};

const OPERATORS: [Operator; 4] = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];

/// Undefined behaviour, a misaligned access among it, is a trap.
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

fn compiled(command: &mut Command) {
    let output = command.output().expect("c++ starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn has_compiler() -> bool {
    let there = Command::new("c++").arg("--version").output().is_ok();
    if !there {
        println!("SKIPPED: the kernels on the processor: there is no c++");
    }
    there
}

/// The kernels for the processor; none where there is no C++ compiler.
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
    let library = library().expect("asked for after it was compiled");
    // SAFETY: the symbol must have the type; because the callers name those of shim-tests/c/kernels.cpp.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    *found.unwrap_or_else(|error| panic!("{name}: {error}"))
}

type Kernel = unsafe extern "C" fn();

/// Blocks, threads of a block, and whether the last thread runs first.
type Grid = (u32, u32, u32);

/// Runs a kernel of batches or shuffles.
fn run<A>(runner: &str, kernel: &str, argument: &A, grid: Grid) {
    let run: unsafe extern "C" fn(Kernel, *const A, u32, u32, u32) = symbol(runner);
    // SAFETY: the kernel must take what the argument is and its addresses be valid; because the callers see to both.
    unsafe { run(symbol(kernel), argument, grid.0, grid.1, grid.2) };
}

fn run_flag(kernel: &str, flag: Flag) {
    let run: unsafe extern "C" fn(Kernel, *const Flag) = symbol("run_flag");
    // SAFETY: the kernel must take a flag and its word be valid; because the callers see to both.
    unsafe { run(symbol(kernel), &flag) };
}

/// A generator with a seed: xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Arbitrary bits, numbers of ordinary size, and special values.
    fn element(&mut self, dtype: DataType) -> [u8; 8] {
        let smallest = [f64::from(f32::MIN_POSITIVE), 6e-5, 1.5e-5, 0.015, 0.002, 1e-7, 3e-308, 1e-45];
        let specials = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 448.0, 65504.0, 57344.0];
        let number = (self.next() as i32 >> 8) as f64 / f64::from(1 << 19);
        match self.below(8) {
            0 => host::reference::encode(dtype, self.one_of(&specials)),
            1 => host::reference::encode(dtype, number * self.one_of(&smallest)),
            2..=4 => (self.next() << 3 ^ self.next()).to_le_bytes(),
            _ => host::reference::encode(dtype, number),
        }
    }

    fn grid(&mut self) -> Grid {
        (self.one_of(&[1, 2, 5]), self.one_of(&[1, 32, 50]), self.below(2) as u32)
    }
}

/// The same memory twice: what the kernel works on and what the host device works on. It stays to the end of the process.
struct Twice {
    arenas: [Region; 2],
    taken: usize,
}

impl Twice {
    fn new(bytes: usize) -> Twice {
        Twice { arenas: [bytes; 2].map(|bytes| Arena::new(bytes).leak()), taken: 64 }
    }

    fn fill(&mut self, dtype: DataType, random: &mut Random) {
        let size = dtype.size();
        let bytes: Vec<u8> =
            (0..self.arenas[0].len()).step_by(size).flat_map(|_| random.element(dtype)[..size].to_vec()).collect();
        for whole in self.arenas {
            assert_eq!(whole.as_ptr() as usize % 64, 0);
            whole.write(&bytes[..whole.len()]);
        }
    }

    /// Room for `bytes` bytes, `misplaced` bytes past a multiple of 16; a gap stays on either side.
    fn place(&mut self, bytes: usize, misplaced: usize) -> usize {
        let at = self.taken.next_multiple_of(16) + misplaced;
        self.taken = at + bytes + 17;
        at
    }

    /// An address of the kernel's memory.
    fn address(&mut self, at: usize) -> u64 {
        self.arenas[0].as_ptr() as u64 + at as u64
    }

    /// Some of the host's memory.
    fn region(&mut self, at: usize, bytes: usize) -> Region {
        self.arenas[1].part(at, bytes)
    }

    /// Fails where they differ, also outside of what was to be written.
    fn assert_same(&mut self, what: impl Fn() -> String) {
        let [got, wanted] = self.arenas.map(|arena| {
            let mut bytes = vec![0; arena.len()];
            arena.read(&mut bytes);
            bytes
        });
        if let Some(at) = got.iter().zip(&wanted).position(|(a, b)| a != b) {
            let near = at & !7..(at & !7) + 8;
            panic!("{}: at {at}: {:02x?}, wanted {:02x?}", what(), &got[near.clone()], &wanted[near]);
        }
    }
}

/// One job: bytes, where the destination is, where the sources are.
#[derive(Debug)]
struct Job {
    bytes: usize,
    dst: usize,
    srcs: Vec<usize>,
}

impl Job {
    /// A job of random length and places: all aligned alike, aligned to elements, or to nothing; often in place.
    fn random(dtype: DataType, nsrcs: usize, memory: &mut Twice, random: &mut Random) -> Job {
        let size = dtype.size();
        let bytes = random.one_of(&[0, 1, 2, 5, 15, 16, 17, 63, 200, 1000]) * size;
        let alike = random.below(16 / size) * size;
        let alignment = random.below(4);
        let mut place = || {
            let misplaced = match alignment {
                0 | 1 => alike,
                2 => random.below(16 / size) * size,
                _ => random.below(16),
            };
            memory.place(bytes, misplaced)
        };
        let srcs: Vec<usize> = (0..nsrcs).map(|_| place()).collect();
        let elsewhere = place();
        let dst = if random.below(2) == 0 { random.one_of(&srcs) } else { elsewhere };
        Job { bytes, dst, srcs }
    }

    /// The job's regions of the host's memory: the sources, the destination.
    fn regions(&self, memory: &mut Twice) -> (Vec<Region>, Region) {
        let srcs = self.srcs.iter().map(|at| memory.region(*at, self.bytes)).collect();
        (srcs, memory.region(self.dst, self.bytes))
    }
}

fn batch(jobs: &[Job], memory: &mut Twice, scale: BatchScale, factor: u64) -> Batch {
    let nsrcs = jobs[0].srcs.len();
    let mut words = [0; WORDS];
    for (words, job) in words.chunks_exact_mut(2 + nsrcs).zip(jobs) {
        words[0] = job.bytes as u64;
        words[1] = memory.address(job.dst);
        for (word, at) in words[2..].iter_mut().zip(&job.srcs) {
            *word = memory.address(*at);
        }
    }
    Batch { njobs: jobs.len() as u32, nsrcs: nsrcs as u32, scale: scale as u32, reserved: 0, factor, words }
}

/// Memory, filled, and one to three jobs in it.
fn jobs(dtype: DataType, nsrcs: usize, random: &mut Random) -> (Twice, Vec<Job>) {
    let count = 1 + random.below(3);
    let mut memory = Twice::new(64 * 1024 * (1 + (count * (nsrcs + 1) * dtype.size()) / 60));
    memory.fill(dtype, random);
    let jobs = (0..count).map(|_| Job::random(dtype, nsrcs, &mut memory, random)).collect();
    (memory, jobs)
}

const DIVISORS: [u64; 12] = [1, 2, 3, 5, 7, 100, 128, 255, 256, 70_001, 1 << 33, u64::MAX];

#[test]
fn every_reduction_has_the_host_s_bits() {
    if library().is_none() {
        return;
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for dtype in DataType::ALL {
        for operator in OPERATORS {
            for nsrcs in [1, 2, 3, 9] {
                for _ in 0..20 {
                    let (mut memory, jobs) = jobs(dtype, nsrcs, &mut random);
                    let divisor = if random.below(3) == 0 { random.one_of(&DIVISORS) } else { 1 };
                    let scale =
                        if divisor == 1 && random.below(2) == 0 { BatchScale::None } else { BatchScale::Divide };
                    let grid = random.grid();
                    run(
                        "run_batch",
                        &kernels::reduce(dtype, operator),
                        &batch(&jobs, &mut memory, scale, divisor),
                        grid,
                    );
                    for job in &jobs {
                        let (srcs, dst) = job.regions(&mut memory);
                        host::reduce(dtype, operator, divisor, &srcs, dst);
                    }
                    memory.assert_same(|| format!("{dtype:?} {operator:?} / {divisor}, {grid:?}, {jobs:?}"));
                }
            }
        }
    }
}

#[test]
fn every_scaling_has_the_host_s_bits() {
    if library().is_none() {
        return;
    }
    let mut random = Random(0x0123_4567_89ab_cdef);
    for dtype in DataType::ALL {
        for round in 0..120 {
            let (mut memory, jobs) = jobs(dtype, 1, &mut random);
            let divisor = DIVISORS[round / 4 % DIVISORS.len()];
            let scalar = random.element(dtype);
            let (scale, factor, prologue) = match round % 4 {
                0 => (BatchScale::None, 0, Prologue::None),
                1 => (BatchScale::Multiply, u64::from_le_bytes(scalar), Prologue::Scalar(scalar)),
                2 => (BatchScale::Reciprocal, divisor, Prologue::Reciprocal(divisor)),
                _ => (BatchScale::Divide, divisor, Prologue::None),
            };
            let grid = random.grid();
            run("run_batch", &kernels::scale(dtype), &batch(&jobs, &mut memory, scale, factor), grid);
            for job in &jobs {
                let (srcs, dst) = job.regions(&mut memory);
                if scale == BatchScale::Divide {
                    host::divide(dtype, divisor, srcs[0], dst);
                } else {
                    host::prologue(&Reduction { dtype, operator: Operator::Sum, prologue, divisor: 1 }, srcs[0], dst);
                }
            }
            memory.assert_same(|| format!("{dtype:?} {scale:?} {factor:#x}, {grid:?}, {jobs:?}"));
        }
    }
}

/// Runs and compares a reduction of two sources with these contents.
fn pairs(dtype: DataType, operator: Operator, first: &[u8], second: &[u8]) {
    let bytes = first.len();
    let mut memory = Twice::new(3 * bytes + 4096);
    let srcs = vec![memory.place(bytes, 0), memory.place(bytes, 0)];
    let jobs = [Job { bytes, dst: memory.place(bytes, 0), srcs }];
    for arena in memory.arenas {
        arena.part(jobs[0].srcs[0], bytes).write(first);
        arena.part(jobs[0].srcs[1], bytes).write(second);
    }
    let batch = batch(&jobs, &mut memory, BatchScale::None, 0);
    run("run_batch", &kernels::reduce(dtype, operator), &batch, (1, 256, 0));
    let (srcs, dst) = jobs[0].regions(&mut memory);
    host::reduce(dtype, operator, 1, &srcs, dst);
    memory.assert_same(|| format!("{dtype:?} {operator:?}"));
}

#[test]
fn every_pair_of_bytes_and_every_half_float_with_many_has_the_host_s_bits() {
    if library().is_none() {
        return;
    }
    let mut random = Random(0xdead_beef_1234_5678);
    for dtype in DataType::ALL.into_iter().filter(|dtype| dtype.size() <= 2) {
        let every: Vec<u8> = match dtype.size() {
            1 => (0..=u16::MAX).map(|pair| pair as u8).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        };
        for operator in OPERATORS {
            if dtype.size() == 1 {
                let others: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
                pairs(dtype, operator, &every, &others);
                continue;
            }
            for _ in 0..24 {
                let other = random.element(dtype);
                let others: Vec<u8> = (0..=u16::MAX).flat_map(|_| [other[0], other[1]]).collect();
                pairs(dtype, operator, &every, &others);
            }
        }
    }
}

#[test]
fn a_copy_moves_all_bytes_and_no_other_at_any_alignment() {
    if library().is_none() {
        return;
    }
    let mut random = Random(0x5555_1234_9876_0001);
    for _ in 0..600 {
        let mut memory = Twice::new(64 * 1024);
        memory.fill(DataType::U8, &mut random);
        let (apart, at) = (random.one_of(&[0, 0, 1, 2, 4, 8]), random.below(16));
        let mut job = || {
            let bytes = random.one_of(&[0, 1, 3, 16, 17, 100, 1027, 5000]);
            Job { bytes, srcs: vec![memory.place(bytes, at)], dst: memory.place(bytes, at ^ apart) }
        };
        let jobs = [job(), job()];
        let grid = random.grid();
        run("run_batch", kernels::COPY, &batch(&jobs, &mut memory, BatchScale::None, 0), grid);
        for job in &jobs {
            let (srcs, dst) = job.regions(&mut memory);
            host::copy(dst, srcs[0]);
        }
        memory.assert_same(|| format!("{grid:?} {jobs:?}"));
    }
}

#[test]
fn a_shuffle_puts_every_block_in_its_place() {
    if library().is_none() {
        return;
    }
    let mut random = Random(0x7777_1234_9876_0001);
    for _ in 0..600 {
        let mut memory = Twice::new(64 * 1024);
        memory.fill(DataType::U8, &mut random);
        let unit = random.one_of(&[1, 2, 4, 8, 16]);
        let block = unit * random.one_of(&[0, 1, 3, 16, 33]);
        let (rows, columns) = (1 + random.below(4), 1 + random.below(5));
        // Strides may be less aligned than blocks are.
        let step = random.one_of(&[unit, unit, 1]);
        let gap = |random: &mut Random| block + step * random.below(3);
        // The source's rows lie together, the destination's columns.
        let src_column = gap(&mut random);
        let src_row = columns * src_column + step * random.below(2);
        let dst_row = gap(&mut random);
        let dst_column = rows * dst_row + step * random.below(2);
        let src = memory.place(rows * src_row, unit % 16);
        let dst = memory.place(columns * dst_column, unit % 16);
        let shuffle = Shuffle {
            src: memory.address(src),
            dst: memory.address(dst),
            block_bytes: block as u64,
            rows: rows as u64,
            columns: columns as u64,
            src_row_bytes: if rows == 1 { 13 } else { src_row as u64 },
            src_column_bytes: if columns == 1 { 13 } else { src_column as u64 },
            dst_row_bytes: dst_row as u64,
            dst_column_bytes: dst_column as u64,
        };
        run("run_shuffle", kernels::SHUFFLE, &shuffle, random.grid());
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let from = memory.region(src + row * src_row + column * src_column, block);
            memory.region(dst + row * dst_row + column * dst_column, block).copy_from(from);
        }
        memory.assert_same(|| format!("{shuffle:?}"));
    }
}

#[test]
fn a_wait_ends_when_the_word_has_come_so_far_and_not_before() {
    if library().is_none() {
        return;
    }
    let mut memory = Twice::new(4096);
    let word = memory.address(64);
    let flag = move |value: u32| Flag { address: word, value, reserved: 0 };
    run_flag(kernels::RAISE, flag(u32::MAX - 1));
    let mut raised = [0; 4];
    memory.arenas[0].part(64, 4).read(&mut raised);
    assert_eq!(u32::from_le_bytes(raised), u32::MAX - 1);
    run_flag(kernels::WAIT, flag(u32::MAX - 1));
    run_flag(kernels::WAIT, flag(u32::MAX - 100));
    let (tell, told) = channel();
    // Past the largest value the count begins anew.
    std::thread::spawn(move || {
        run_flag(kernels::WAIT, flag(2));
        tell.send(()).expect("the test listens");
    });
    run_flag(kernels::RAISE, flag(1));
    assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "the wait ended early");
    run_flag(kernels::RAISE, flag(3));
    told.recv_timeout(Duration::from_secs(60)).expect("the wait ends");
}

#[test]
fn the_source_for_amd_is_whole() {
    if !has_compiler() {
        return;
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hip.{}.cpp", std::process::id()));
    for source in DataType::ALL.map(code::hip_source).into_iter().chain([code::hip_move_source()]) {
        std::fs::write(&path, source).expect("the source can be written");
        compiled(Command::new("c++").args(["-std=c++17", "-Wall", "-Wextra", "-fsyntax-only"]).arg(&path));
    }
    std::fs::remove_file(&path).expect("the source can be removed");
}
