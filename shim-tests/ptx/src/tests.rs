//! What instructions compute, what is refused, what traps.

use crate::forms::{form, Apply};
use crate::{Device, Launch, Manner, Module, Nan};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// What a form gives.
fn value(name: &str, srcs: &[u64]) -> Option<u64> {
    let form = form(name).unwrap_or_else(|| panic!("{name} is known"));
    assert_eq!(form.srcs.len(), srcs.len(), "{name}");
    let bits = match form.apply {
        Apply::One(f) => f(srcs[0]),
        Apply::Two(f) => f(srcs[0], srcs[1]),
        Apply::Partial(f) => f(srcs[0], srcs[1])?,
        Apply::Select if srcs[2] != 0 => srcs[0],
        Apply::Select => srcs[1],
        Apply::Three(f) => f(srcs[0], srcs[1], srcs[2]),
        Apply::Four(f) => f(srcs[0], srcs[1], srcs[2], srcs[3]),
    };
    Some(form.dst.cut(bits))
}

/// The bits of a float.
const fn single(value: f32) -> u64 {
    value.to_bits() as u64
}

/// The bits of a negative number.
const fn minus(value: i64, bits: u32) -> u64 {
    (value as u64) & (u64::MAX >> (64 - bits))
}

/// A form, its sources, its result.
const RESULTS: &[(&str, &[u64], u64)] = &[
    ("add.s32", &[0xffff_ffff, 2], 1),
    ("add.s16", &[0xffff, 2], 1),
    ("sub.s64", &[0, 1], u64::MAX),
    ("mul.lo.s32", &[0x1_0001, 0x1_0001], 0x2_0001),
    ("mul.wide.u32", &[0xffff_ffff, 0xffff_ffff], 0xffff_fffe_0000_0001),
    ("mul.wide.s32", &[0xffff_ffff, 3], minus(-3, 64)),
    ("mul.hi.u64", &[u64::MAX, u64::MAX], u64::MAX - 1),
    ("mul.hi.s32", &[0x8000_0000, 2], 0xffff_ffff),
    ("div.s32", &[minus(-7, 32), 2], minus(-3, 32)),
    ("rem.s32", &[minus(-7, 32), 2], minus(-1, 32)),
    ("min.s16", &[0x8000, 1], 0x8000),
    ("min.u16", &[0x8000, 1], 1),
    ("abs.s32", &[minus(-5, 32)], 5),
    ("abs.s32", &[0x8000_0000], 0x8000_0000),
    ("neg.s64", &[1], u64::MAX),
    ("shl.b32", &[1, 31], 0x8000_0000),
    ("shl.b32", &[1, 32], 0),
    ("shl.b64", &[1, 64], 0),
    ("shr.u32", &[0x8000_0000, 32], 0),
    ("shr.s32", &[0x8000_0000, 40], 0xffff_ffff),
    ("shr.s16", &[0x8000, 4], 0xf800),
    ("not.pred", &[1], 0),
    ("selp.b32", &[3, 4, 1], 3),
    ("selp.b32", &[3, 4, 0], 4),
    ("prmt.b32", &[0x4433_2211, 0x8877_6655, 0x0740], 0x1188_5511),
    ("prmt.b32", &[0x0000_0080, 0x7f, 0x8c00], 0xff00_8080),
    ("bfi.b64", &[0xff, 0, 8, 4], 0xf00),
    ("bfi.b32", &[0xff, 0xffff_ffff, 40, 4], 0xffff_ffff),
    ("bfi.b64", &[u64::MAX, 0, 60, 64], 0xf000_0000_0000_0000),
    ("lop3.b32", &[0xf0, 0xaa, 0xcc, 0xca], 0xac),
    ("lop3.b32", &[1, 2, 4, 0xfe], 7),
    ("setp.lt.s32", &[0xffff_ffff, 0], 1),
    ("setp.lo.u32", &[0xffff_ffff, 0], 0),
    ("setp.ltu.f32", &[single(f32::NAN), 0], 1),
    ("setp.lt.f32", &[single(f32::NAN), 0], 0),
    ("setp.ne.f32", &[single(f32::NAN), 0], 0),
    ("setp.neu.f32", &[single(f32::NAN), 0], 1),
    ("setp.equ.f32", &[single(f32::NAN), 0], 1),
    ("setp.num.f32", &[single(1.0), single(f32::NAN)], 0),
    ("max.f32", &[single(f32::NAN), single(1.0)], single(1.0)),
    ("max.f32", &[single(-0.0), single(0.0)], single(0.0)),
    ("min.f32", &[single(0.0), single(-0.0)], single(-0.0)),
    ("rcp.rn.f32", &[single(4.0)], single(0.25)),
    (
        "fma.rn.f32",
        &[single(1.0 + f32::EPSILON), single(1.0 - f32::EPSILON), single(-1.0)],
        single(-f32::EPSILON * f32::EPSILON),
    ),
    ("cvt.s16.s8", &[0x12f0], 0xfff0),
    ("cvt.u64.s32", &[0xffff_ffff], u64::MAX),
    ("cvt.u32.u64", &[0x1_0000_0002], 2),
    ("cvt.rn.f32.u64", &[u64::MAX], single(18_446_744_073_709_551_615.0)),
    ("cvt.rn.f32.s32", &[0xffff_ffff], single(-1.0)),
    ("cvt.f64.f32", &[single(0.1)], (0.1f32 as f64).to_bits()),
    ("cvt.f32.f16", &[0x3c01], single(1.0 + 1.0 / 1024.0)),
    // Half-way: to the even one, and towards zero.
    ("cvt.rn.f16.f32", &[single(1.0 + 3.0 / 2048.0)], 0x3c02),
    ("cvt.rz.f16.f32", &[single(1.0 + 3.0 / 2048.0)], 0x3c01),
    ("cvt.rn.f16.f32", &[single(65520.0)], 0x7c00),
    ("cvt.rz.f16.f32", &[single(-65520.0)], 0xfbff),
    ("add.rn.f16x2", &[0x3c00_4000, 0x3c00_4000], 0x4000_4400),
    ("mul.rn.f16x2", &[0x0001_7bff, 0x3800_4000], 0x0000_7c00),
    ("set.gt.u32.f16x2", &[0x3c00_7e00, 0x3800_0000], 0xffff_0000),
    ("set.nan.u32.f16x2", &[0x3c00_7e00, 0x3800_0000], 0x0000_ffff),
];

#[test]
fn instructions_compute_what_the_description_says() {
    for (name, srcs, wanted) in RESULTS {
        assert_eq!(value(name, srcs), Some(*wanted), "{name} {srcs:x?}");
    }
    assert_eq!(value("div.u32", &[1, 0]), None);
    assert_eq!(value("div.s32", &[0x8000_0000, 0xffff_ffff]), None);
}

#[test]
fn what_is_not_known_or_has_no_meaning_of_its_own_is_no_form() {
    let unknown = [
        "add.f32",
        "mul.f32",
        "mul.s32",
        "div.full.f32",
        "add.rn.ftz.f32",
        "setp.lt.b32",
        "setp.lo.s32",
        "neg.u32",
        "add.u8",
        "cvt.f32.u32",
        "cvt.rn.f64.f32",
        "max.f16x2",
        "vmax2.s32",
        "add.rn.f16x3",
        "add",
        "",
    ];
    for name in unknown {
        assert!(form(name).is_none(), "{name}");
    }
}

/// A module of one kernel `k` with one parameter `p`.
fn text(body: &str) -> String {
    let registers = ".reg .pred %p<4>;\n.reg .b16 %h<4>;\n.reg .b32 %r<8>;\n.reg .f32 %f<4>;\n.reg .b64 %d<8>;\n";
    format!(
        ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry k(\n.param .u64 p\n)\n.maxntid 64,1,1\n{{\n{registers}{body}\n}}\n"
    )
}

#[test]
fn a_text_with_what_is_not_known_is_refused_with_its_line() {
    let refused = [
        ("add.f32 %f1,%f2,%f3;\nret;", "line 14: add.f32: is not known"),
        ("add.s32 %r1,%f2,%r3;\nret;", "line 14: add.s32: %f2 has another type than s32"),
        ("add.s32 %d1,%r2,%r3;\nret;", "line 14: add.s32: %d1 has another type than s32"),
        ("add.s32 %r1,%r2,4294967296;\nret;", "is no s32"),
        ("mov.u32 %r1,%clock;\nret;", "%clock is no register"),
        ("bra NOWHERE;\nret;", "there is no label NOWHERE"),
        ("mov.u32 %r1,1;", "k runs past its end"),
        ("@%r1 bra A;\nA:\nret;", "a guard is a predicate"),
        ("A:\nA:\nret;", "the label is there twice"),
        ("ld.shared.u32 %r1,[%d1];\nret;", "ld.shared.u32: is not known"),
        ("atom.add.u32 %r1,[%d1],1;\nret;", "is not known"),
        ("bar.sync 0;\nret;", "bar.sync: is not known"),
        ("ld.v4.u64 {%d1,%d2,%d3,%d4},[%d5];\nret;", "is not known"),
        ("st.param.u64 [%d1],%d2;\nret;", "is not known"),
        ("ld.global.u64 %r1,[%d1];\nret;", "a register does not hold u64"),
        ("ld.global.u32 %r1,[%r2];\nret;", "%r2 holds no address"),
        (".pragma \"other\";\nret;", "is not known"),
        ("mov.u32 %r1;\nret;", "\",\" is wanted"),
        ("mov.u32 %r1,?;\nret;", "the sign '?' is not known"),
    ];
    for (body, wanted) in refused {
        let why = Module::parse(&text(body)).expect_err(body);
        assert!(why.contains(wanted), "{body}: {why}");
    }
    assert!(Module::parse(&text("ret;").replace("8.0", "9.9")).is_err());
    assert!(Module::parse(&text("ret;").replace(".maxntid", ".reqntid")).is_err());
    assert!(Module::parse(&(text("ret;") + &text("ret;"))).is_err());
}

/// 64 bytes at 4096.
struct Bytes(RefCell<BTreeMap<u64, u8>>);

impl Bytes {
    fn new() -> Bytes {
        Bytes(RefCell::new((0..64).map(|at| (4096 + at, at as u8)).collect()))
    }
}

impl Device for Bytes {
    fn load(&self, address: u64, bytes: usize) -> Result<u128, String> {
        let known = self.0.borrow();
        (0..bytes).rev().try_fold(0, |all, at| {
            let byte = known.get(&(address + at as u64)).ok_or(format!("{address:#x} is nowhere"))?;
            Ok(all << 8 | u128::from(*byte))
        })
    }

    fn store(&self, address: u64, bytes: usize, value: u128) -> Result<(), String> {
        for at in 0..bytes {
            let mut known = self.0.borrow_mut();
            let byte = known.get_mut(&(address + at as u64)).ok_or(format!("{address:#x} is nowhere"))?;
            *byte = (value >> (8 * at)) as u8;
        }
        Ok(())
    }
}

/// Runs the body with 4096 as its parameter; `%d1` has it.
fn run(body: &str, threads: u32, manner: Manner) -> (Result<u64, String>, Vec<u8>) {
    let module = Module::parse(&text(&format!("ld.param.u64 %d1,[p];\n{body}"))).unwrap_or_else(|why| panic!("{why}"));
    let device = Bytes::new();
    let kernel = module.kernel("k").expect("it is there");
    let launch = Launch { kernel, params: &4096u64.to_le_bytes(), blocks: [2, 1, 1], threads: [threads, 1, 1] };
    let result = launch.run(&device, manner).map_err(|trap| trap.to_string());
    (result, device.0.into_inner().into_values().collect())
}

/// `%d2`: the place of the thread's element of so many bytes, and `%r1` its number.
fn place(bytes: u32) -> String {
    format!(
        "mov.u32 %r1,%ctaid.x;\nmov.u32 %r2,%ntid.x;\nmul.lo.s32 %r1,%r1,%r2;\nmov.u32 %r3,%tid.x;\nadd.s32 %r1,%r1,%r3;\n\
         mul.wide.u32 %d2,%r1,{bytes};\nadd.s64 %d2,%d2,%d1;\n"
    )
}

#[test]
fn every_thread_runs_once_in_any_order() {
    for seed in [0, 1, 2, 12345, u64::MAX] {
        let body = place(2)
            + "ld.global.u16 %h1,[%d2];\ncvt.u16.u32 %h2,%r1;\nadd.s16 %h1,%h1,%h2;\nst.global.u16 [%d2],%h1;\nret;";
        let (result, bytes) = run(&body, 16, Manner { seed, ..Manner::default() });
        assert_eq!(result, Ok(32 * 13));
        for thread in 0..32usize {
            let before = u16::from_le_bytes([2 * thread as u8, 2 * thread as u8 + 1]);
            assert_eq!(u16::from_le_bytes([bytes[2 * thread], bytes[2 * thread + 1]]), before + thread as u16);
        }
    }
}

#[test]
fn vectors_halves_and_narrow_values_go_through_memory() {
    let body = "mov.u32 %r7,%tid.x;\nmov.u32 %r6,%ctaid.x;\nor.b32 %r7,%r7,%r6;\nsetp.ne.s32 %p1,%r7,0;\n@%p1 bra END;\n\
        ld.global.v4.u32 {%r1,%r2,%r3,%r4},[%d1+16];\nst.global.v4.u32 [%d1],{%r4,%r3,%r2,%r1};\n\
        ld.global.s8 %h1,[%d1+63];\nmov.b32 {%h2,%h3},%r1;\nmov.b32 %r5,{%h3,%h2};\nst.global.u32 [%d1+32],%r5;\nEND:\nret;";
    let (result, bytes) = run(body, 1, Manner::default());
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(&bytes[..16], [28, 29, 30, 31, 24, 25, 26, 27, 20, 21, 22, 23, 16, 17, 18, 19]);
    assert_eq!(&bytes[32..36], [18, 19, 16, 17]);
}

#[test]
fn errors_trap_with_kernel_line_and_thread() {
    let loads = |offset: &str, ty: &str, register: &str| format!("ld.global.{ty} {register},[%d1{offset}];\nret;");
    let traps = [
        (
            loads("+64", "u32", "%r1"),
            "k, line 15, `ld.global.u32 %r1,[%d1+64];`, thread [0, 0, 0] of block [0, 0, 0]: 0x1040 is nowhere",
        ),
        (loads("+2", "u32", "%r1"), "4 bytes at 0x1002, which is no multiple of that"),
        ("add.s32 %r1,%r2,1;\nret;".to_string(), "a register is read that was not written"),
        ("@%p1 bra A;\nA:\nret;".to_string(), "a register is read that was not written"),
        ("mov.u32 %r1,0;\ndiv.u32 %r2,5,%r1;\nret;".to_string(), "an integer is divided by 0"),
        ("A:\nbra A;".to_string(), "the thread has not ended after 1000 instructions"),
        ("ld.param.u64 %d3,[p+8];\nret;".to_string(), "8 bytes of the parameters at 8, which have 8"),
        // The second block's thread writes what the first's has written.
        (
            "mov.u32 %r1,1;\nst.global.u32 [%d1],%r1;\nret;".to_string(),
            "which thread [0, 0, 0] of block [0, 0, 0] writes",
        ),
    ];
    for (body, wanted) in traps {
        let (result, _) = run(&body, 1, Manner { limit: 1000, ..Manner::default() });
        let why = result.expect_err(&body);
        assert!(why.contains(wanted), "{body}: {why}");
    }
}

#[test]
fn what_one_thread_uses_and_another_writes_traps_in_any_order_and_what_is_dropped_does_not() {
    // Each thread reads its neighbour's element, and writes its own.
    let shared = |uses: &str| {
        place(2) + "and.b32 %r4,%r1,15;\nmul.wide.u32 %d3,%r4,2;\nadd.s64 %d3,%d3,%d1;\nld.global.u16 %h1,[%d3+2];\nmov.u16 %h2,7;\n"
            + uses
            + "st.global.u16 [%d2],%h2;\nret;"
    };
    for seed in 0..20 {
        let manner = Manner { seed, ..Manner::default() };
        assert!(run(&shared(""), 8, manner).0.is_ok(), "what is dropped may be anything");
        let (result, _) = run(&shared("add.s16 %h2,%h1,%h2;\n"), 8, manner);
        assert!(result.expect_err("it is used").contains("and nothing orders them"));
        // It decides an address.
        let (result, _) = run(&shared("cvt.u64.u16 %d4,%h1;\nand.b64 %d4,%d4,0;\nadd.s64 %d2,%d2,%d4;\n"), 8, manner);
        assert!(result.expect_err("it is used").contains("and nothing orders them"));
        // Of two values the one that is not chosen is dropped.
        assert!(run(&shared("setp.eq.s32 %p1,%r1,%r1;\nselp.b16 %h2,%h2,%h1,%p1;\n"), 8, manner).0.is_ok());
    }
}

#[test]
fn the_nan_is_the_machine_s() {
    let body = "mov.u32 %r7,%ctaid.x;\nsetp.ne.s32 %p1,%r7,0;\n@%p1 bra END;\nmov.f32 %f1,0f7F800000;\nsub.rn.f32 %f2,%f1,%f1;\n\
        mov.b32 %r1,%f2;\nst.global.u32 [%d1],%r1;\nmov.u32 %r2,2080406528;\nmov.u32 %r3,-67044352;\nadd.rn.f16x2 %r4,%r2,%r3;\n\
        st.global.u32 [%d1+4],%r4;\nEND:\nret;";
    let words = |nan| {
        let (result, bytes) = run(body, 1, Manner { nan, ..Manner::default() });
        assert!(result.is_ok(), "{result:?}");
        [0, 4].map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]))
    };
    assert_eq!(words(Nan::Nvidia), [0x7fff_ffff, 0x7fff_7fff]);
    assert_eq!(words(Nan::Other(0x8000_0000_8000_8123)), [0xffc0_8123, 0xff23_ff23]);
}

#[test]
fn launches_that_a_driver_would_refuse_trap() {
    let module = Module::parse(&text("ret;")).expect("it is PTX");
    let kernel = module.kernel("k").expect("it is there");
    for (params, threads) in [(7, 1), (8, 65), (8, 0)] {
        let launch = Launch { kernel, params: &vec![0; params], blocks: [1; 3], threads: [threads, 1, 1] };
        let why = launch.run(&Bytes::new(), Manner::default()).expect_err("it is refused").to_string();
        assert!(why.contains("it takes 1 to 64 threads and 8 bytes"), "{why}");
    }
}
