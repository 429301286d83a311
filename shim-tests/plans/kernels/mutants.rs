//! Kernels with one instruction changed are found wrong.

use super::beds::{codes_text, shipped, texts, Interpreted};
use super::budgets;
use super::interpreted::far_shuffles;
use super::memory::Random;
use super::{flags, of_kernel};
use ptx::mutate::{mutant, Mutant};
use ptx::{Module, Nan};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use strata::device::gpu::kernels;
use strata::dtype::DataType;

/// How many there are.
const MUTANTS: usize = 300;
/// And of codes.
const CODE_MUTANTS: usize = 60;

const THREAD: &str = "numbers of threads and blocks are less than 2^31";
const HIGH: &str = "of the result only the low 32 bits are used";
const BYTES: &str = "jobs have less than 2^63 bytes";
const ALIKE: &str = "jobs that are misaligned alike are not done in packs, which gives the same";
const SLEEP: &str = "it sleeps for another time";
const DIVISION: &str = "small numbers are divided as 64-bit ones, which gives the same";

/// Those that compute the same: the kernel, what is changed into what, and why that is the same. Kernels that are built anew
/// have others: the test names them, and each must be understood before it stands here.
const EQUAL: [(&str, &str, &str, &str); 18] = [
    (
        "strata_reduce_sum_e5m2",
        "and.b32 %r402,%r404,2147450879;",
        "and.b32 %r402,%r404,2147450878;",
        "a sum of two e5m2 that lies half-way between two others has no bit so low",
    ),
    ("strata_reduce_prod_i8", "shr.u64 %rd46,%rd45,4;", "shr.s64 %rd46,%rd45,4;", BYTES),
    (
        "strata_reduce_max_f16",
        "setp.eq.s64 %p27,%rd10,0;",
        "setp.eq.s64 %p27,%rd10,4;",
        "single elements are moved byte by byte, which gives the same",
    ),
    ("strata_reduce_min_e5m2", "xor.b64 %rd37,%rd36,%rd4;", "or.b64 %rd37,%rd36,%rd4;", ALIKE),
    ("strata_reduce_min_f16", "xor.b64 %rd48,%rd47,%rd4;", "or.b64 %rd48,%rd47,%rd4;", ALIKE),
    ("strata_reduce_prod_u64", "setp.eq.s64 %p22,%rd209,0;", "setp.eq.s64 %p22,%rd209,256;", DIVISION),
    ("strata_wait", "nanosleep.u32 %r4;", "nanosleep.u32 %r6;", SLEEP),
    ("strata_wait", "nanosleep.u32 %r4;", "nanosleep.u32 %r5;", SLEEP),
    ("strata_scale_u64", "shr.u64 %rd127,%rd126,32;", "shr.s64 %rd127,%rd126,32;", HIGH),
    ("strata_scale_e4m3", "shr.u32 %r328,%r295,7;", "shr.s32 %r328,%r295,7;", "the sign has been cut off before"),
    (
        "strata_reduce_min_e4m3",
        "or.b32 %r582,%r595,%r596;",
        "and.b32 %r582,%r595,%r596;",
        "where there is one element the other half of the word is 0",
    ),
    (
        "strata_reduce_min_e4m3",
        "and.b32 %r109,%r368,1065369472;",
        "and.b32 %r109,%r368,1065369473;",
        "the value was shifted by 7 bits: the bit is 0",
    ),
    ("strata_reduce_sum_i32", "@%p3 bra $L__BB1_4;", "", "no job is without a source"),
    (
        "strata_reduce_sum_i32",
        "setp.gt.s32 %p28,%r550,-1;",
        "setp.gt.s32 %p28,%r550,-2;",
        "-1 over a divisor, which is not 1, is 0 with either sign",
    ),
    ("strata_reduce_max_u32", "setp.ge.u64 %p32,%rd149,%rd30;", "setp.ge.s64 %p32,%rd149,%rd30;", BYTES),
    (
        "strata_reduce_max_f64",
        "setp.gt.u64 %p33,%rd253,9218868437227405312;",
        "setp.gt.s64 %p33,%rd253,9218868437227405312;",
        "without the sign both order alike",
    ),
    ("strata_reduce_sum_f16", "shr.u64 %rd118,%rd119,4;", "shr.s64 %rd118,%rd119,4;", BYTES),
    ("strata_reduce_sum_i32", "mul.wide.u32 %rd75,%r302,%r282;", "mul.wide.s32 %rd75,%r302,%r282;", THREAD),
];

/// The same of codes.
const EQUAL_CODES: [(&str, &str, &str, &str); 3] = [
    ("strata_encode_bf16", "cvt.u32.u16 %r57,%rs1;", "cvt.u32.s16 %r57,%rs1;", "the upper half is shifted out"),
    ("strata_encode_mx8", "cvt.u64.u32 %rd10,%r42;", "cvt.u64.s32 %rd10,%r42;", THREAD),
    ("strata_decode_mx8", "setp.lt.u64 %p24,%rd68,%rd6;", "setp.lt.s64 %p24,%rd68,%rd6;", BYTES),
];

/// Why a mutant is wrong; nothing where all cases pass.
fn verdict(mutant: &Mutant) -> Option<String> {
    let modules = [Module::parse(&mutant.text).expect("a mutant is PTX")];
    let mut random = Random(0x0f1e_2d3c_4b5a_6978);
    if [kernels::WAIT, kernels::RAISE].contains(&mutant.kernel.as_str()) {
        return flags::check(&modules).err();
    }
    for (nan, rounds) in [(Nan::Nvidia, 8), (Nan::Other(0x8012_3456_789a_bcde), 8), (Nan::Nvidia, 300)] {
        let bed = Interpreted::new(&modules, nan);
        let found = of_kernel(&bed, &mutant.kernel, rounds, &mut random);
        if found.is_err() {
            return found.err();
        }
    }
    match mutant.kernel.as_str() {
        kernels::SHUFFLE => far_shuffles(&modules, 60, &mut random).err(),
        kernels::COPY => None,
        _ => slower(&modules, &mutant.kernel),
    }
}

/// What a kernel takes more instructions for than it did.
fn slower(modules: &[Module], kernel: &str) -> Option<String> {
    let all = DataType::ALL.into_iter().flat_map(budgets::of_type);
    all.filter(|(name, ..)| name == kernel).find_map(|what| {
        let before = budgets::each(shipped(), &what).expect("a kernel of the library runs");
        match budgets::each(modules, &what) {
            Ok(now) if now <= before => None,
            Ok(now) => Some(format!("{what:?} takes {now} instructions, not {before}")),
            Err(why) => Some(why),
        }
    })
}

/// The mutants of some modules that pass every case, of which those in `equal` must be all.
fn check(texts: &[&str], number: usize, seed: u64, equal: &[(&str, &str, &str, &str)]) {
    let mut random = ptx::mutate::Random(seed);
    let mutants: Vec<Mutant> = (0..number).map(|_| mutant(texts[random.below(texts.len())], &mut random)).collect();
    let (next, survivors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(mutant) = mutants.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if verdict(mutant).is_none() {
                        survivors.lock().expect("nobody panics with it").push(mutant);
                    }
                }
            });
        }
    });
    let survivors = survivors.into_inner().expect("nobody panics with it");
    let is = |mutant: &Mutant, (kernel, before, after, _): &(&str, &str, &str, &str)| {
        (mutant.kernel.as_str(), mutant.before.as_str(), mutant.after.as_str()) == (*kernel, *before, *after)
    };
    println!("{} of {number} mutants are found wrong", number - survivors.len());
    let gone: Vec<_> = equal.iter().filter(|known| !survivors.iter().any(|mutant| is(mutant, known))).collect();
    assert!(gone.is_empty(), "these are listed as equal and are not among the mutants that pass: {gone:#?}");
    let unknown: Vec<String> = survivors
        .iter()
        .filter(|mutant| !equal.iter().any(|known| is(mutant, known)))
        .map(|mutant| format!("{}, line {}: `{}` became `{}`", mutant.kernel, mutant.line, mutant.before, mutant.after))
        .collect();
    assert!(unknown.is_empty(), "{} mutants pass every case:\n{}", unknown.len(), unknown.join("\n"));
}

#[test]
fn every_mutant_is_found_or_known_to_be_equal() {
    check(&texts(), MUTANTS, 20_261_123, &EQUAL);
}

#[test]
fn every_mutant_of_codes_is_found_or_known_to_be_equal() {
    check(&[codes_text()], CODE_MUTANTS, 20_261_126, &EQUAL_CODES);
}
