//! The kernels' code: PTX for NVIDIA's driver, made beforehand from `kernels/*.cu`, and the same source for AMD's compiler.
#![forbid(unsafe_code)]

use super::kernels::type_name;
use crate::dtype::DataType;
use std::ffi::CStr;

/// The PTX of this name, ended as the driver wants it.
macro_rules! ptx {
    ($name:literal) => {
        ended(concat!(include_str!(concat!("../../../kernels/ptx/", $name, ".ptx")), "\0").as_bytes())
    };
}

fn ended(text: &'static [u8]) -> &'static CStr {
    CStr::from_bytes_with_nul(text).expect("PTX is text")
}

/// PTX with a type's reductions and its scaling.
pub fn ptx(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 => ptx!("i8"),
        DataType::U8 => ptx!("u8"),
        DataType::I32 => ptx!("i32"),
        DataType::U32 => ptx!("u32"),
        DataType::I64 => ptx!("i64"),
        DataType::U64 => ptx!("u64"),
        DataType::F16 => ptx!("f16"),
        DataType::F32 => ptx!("f32"),
        DataType::F64 => ptx!("f64"),
        DataType::BF16 => ptx!("bf16"),
        DataType::F8E4M3 => ptx!("e4m3"),
        DataType::F8E5M2 => ptx!("e5m2"),
        DataType::I16 | DataType::U16 => unreachable!("communicators of GPUs refuse them"),
    }
}

/// PTX with copies, shuffles and flags.
pub fn move_ptx() -> &'static CStr {
    ptx!("move")
}

/// PTX with the codes.
pub fn codes_ptx() -> &'static CStr {
    ptx!("codes")
}

const CODES: &str = include_str!("../../../kernels/codes.cu");
const REDUCE: &str = include_str!("../../../kernels/reduce.cu");
const MOVE: &str = include_str!("../../../kernels/move.cu");
const OPERATIONS: &str = include_str!("../../../kernels/operations.def");

/// What the sources include.
const INCLUDED: [(&str, &str); 4] = [
    ("machine.h", include_str!("../../../kernels/machine.h")),
    ("arguments.h", include_str!("../../../kernels/arguments.h")),
    ("element.h", include_str!("../../../kernels/element.h")),
    ("operations.def", OPERATIONS),
];

/// C++ with a type's reductions and its scaling, for hiprtc: one text that includes nothing.
pub fn hip_source(dtype: DataType) -> String {
    format!("#define STRATA_TYPE_{}\n{}", type_name(dtype), whole(REDUCE))
}

/// C++ with copies, shuffles and flags, for hiprtc: one text that includes nothing.
pub fn hip_move_source() -> String {
    whole(MOVE)
}

/// C++ with the codes, for hiprtc: one text that includes nothing.
pub fn hip_codes_source() -> String {
    whole(CODES)
}

/// The text with its includes in their places. No file is included twice.
fn whole(text: &str) -> String {
    let mut result = String::new();
    for line in text.lines().filter(|line| *line != "#pragma once") {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            None => result += line,
            Some(name) => {
                let (_, included) = INCLUDED.iter().find(|(file, _)| *file == name).expect("a file of the kernels");
                result += &whole(included);
            }
        }
        result.push('\n');
    }
    result
}

#[cfg(test)]
mod tests {
    use super::super::kernels::{
        kernels_of, operator_name, reduce, scale, Module, COPY, RAISE, SHUFFLE, THREADS, WAIT,
    };
    use super::*;
    use crate::dtype::Operator;

    const OPERATORS: [Operator; 4] = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];

    /// Kernels that a PTX has, in its order.
    fn entries(ptx: &CStr) -> Vec<String> {
        let text = ptx.to_str().expect("PTX is ASCII");
        let named = text.lines().filter_map(|line| line.strip_prefix(".visible .entry "));
        named.map(|name| name.trim_end_matches('(').to_string()).collect()
    }

    #[test]
    fn the_list_of_operations_is_every_type_with_every_operator() {
        let mut expected = Vec::new();
        for dtype in DataType::ALL {
            let name = type_name(dtype);
            expected.push(format!("#ifdef STRATA_TYPE_{name}"));
            expected.push(format!("STRATA_TYPE({name})"));
            expected.extend(OPERATORS.map(|operator| format!("STRATA_OPERATION({name}, {})", operator_name(operator))));
            expected.push("#endif".to_string());
        }
        let is_listed = |line: &&str| line.starts_with("STRATA_") || line.starts_with("#ifdef") || *line == "#endif";
        let mut listed: Vec<&str> = OPERATIONS.lines().filter(is_listed).collect();
        // In which order the types stand does not matter.
        let mut expected: Vec<Vec<&str>> =
            expected.chunks(7).map(|of| of.iter().map(String::as_str).collect()).collect();
        let mut listed: Vec<Vec<&str>> = listed.chunks_mut(7).map(|of| of.to_vec()).collect();
        expected.sort();
        listed.sort();
        assert_eq!(listed, expected);
    }

    #[test]
    fn the_ptx_has_every_kernel_and_no_other() {
        for dtype in DataType::ALL {
            let mut expected = vec![scale(dtype)];
            expected.extend(OPERATORS.map(|operator| reduce(dtype, operator)));
            assert_eq!(entries(ptx(dtype)), expected, "kernels/ptx/{}.ptx", type_name(dtype));
        }
        let mut moving = entries(move_ptx());
        moving.sort();
        assert_eq!(moving, [COPY, RAISE, SHUFFLE, WAIT]);
        let coding: Vec<String> = kernels_of(Module::Codes).iter().map(|kernel| kernel.name()).collect();
        assert_eq!(entries(codes_ptx()), coding);
    }

    #[test]
    fn the_ptx_is_for_drivers_of_cuda_12_0_and_devices_of_7_0_and_blocks_of_that_many_threads() {
        for ptx in DataType::ALL.map(ptx).into_iter().chain([move_ptx(), codes_ptx()]) {
            let text = ptx.to_str().expect("PTX is ASCII");
            assert!(text.contains("\n.version 8.0\n.target sm_70\n"));
            let bounds: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(".maxntid ")).collect();
            assert!(bounds.iter().all(|bound| *bound == format!("{THREADS},1,1")), "{bounds:?}");
            assert_eq!(bounds.len(), entries(ptx).len());
        }
    }

    /// The bits of the host device are those of IEEE operations, each rounded once to nearest.
    #[test]
    fn the_ptx_computes_floats_by_the_standard_alone() {
        for ptx in DataType::ALL.map(ptx).into_iter().chain([codes_ptx()]) {
            let text = ptx.to_str().expect("PTX is ASCII");
            let is_float = |line: &&str| [".f16", ".f32", ".f64"].iter().any(|name| line.contains(name));
            for line in text.lines().filter(is_float) {
                let other = ["fma", ".ftz", ".approx", ".full", ".rz", ".rm", ".rp", ".sat"];
                // 8-bit floats are rounded to odd first, so that rounding them to nearest rounds once.
                let is_to_odd = line.starts_with("cvt.rz.f16.f32 ");
                assert!(is_to_odd || !other.iter().any(|word| line.contains(word)), "{line}");
            }
        }
        assert!(ptx(DataType::F32).to_str().is_ok_and(|text| text.contains("div.rn.f32")));
    }

    #[test]
    fn the_source_for_amd_includes_nothing() {
        for source in DataType::ALL.map(hip_source).into_iter().chain([hip_move_source(), hip_codes_source()]) {
            assert!(!source.contains("#include"));
            assert!(source.contains("STRATA_KERNEL strata_") && source.contains("struct Batch {"));
        }
        assert!(hip_source(DataType::BF16).starts_with("#define STRATA_TYPE_bf16\n"));
    }
}
