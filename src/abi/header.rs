//! Writes `include/nccl.h`, `include/rccl/rccl.h` and `include/strata.h`: types from `nccl_types.h`, functions from the table.
#![forbid(unsafe_code)]

use super::entry::Function;
use super::table;
use crate::dtype::{DataType, RedOp};
use std::fmt::Write;

const TYPES: &str = include_str!("nccl_types.h");

/// The text of `include/nccl.h`.
pub fn nccl_h() -> String {
    let mut text = String::new();
    text.push_str(
        "/* The C interface of NCCL 2.32.3, as Strata has it. Made from the table in src/interface/functions.rs.\n",
    );
    text.push_str(
        " * Needs no CUDA: without <cuda_runtime.h>, or with STRATA_NO_CUDA defined, streams are opaque.\n */\n",
    );
    text.push_str("#ifndef NCCL_H_\n#define NCCL_H_\n\n");
    text.push_str(TYPES);
    text.push_str("\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n");
    prototypes(&mut text, table::nccl_functions().chain(table::msccl_functions()));
    text.push_str("\n#ifdef __cplusplus\n} /* extern \"C\" */\n#endif\n\n#endif /* NCCL_H_ */\n");
    text
}

/// The text of `include/rccl/rccl.h`.
pub fn rccl_h() -> String {
    let mut text = String::new();
    text.push_str(
        "/* What AMD's library has beyond NVIDIA's, for programs that link a Strata under RCCL's name, librccl.so.1:\n",
    );
    text.push_str(
        " * only that one has these functions. Made from src/interface/functions.rs. Streams are nccl.h's.\n */\n",
    );
    text.push_str("#ifndef RCCL_H_\n#define RCCL_H_\n\n#include \"../nccl.h\"\n\n");
    text.push_str("/* A program that has been loaded. */\ntypedef int mscclAlgoHandle_t;\n");
    text.push_str("\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n");
    prototypes(&mut text, table::rccl_functions());
    text.push_str("\n#ifdef __cplusplus\n} /* extern \"C\" */\n#endif\n\n#endif /* RCCL_H_ */\n");
    text
}

/// The text of `include/strata.h`.
pub fn strata_h() -> String {
    let mut text = String::new();
    text.push_str(
        "/* What Strata has beyond NCCL: communicators and streams of the host. Made from src/interface/functions.rs.\n",
    );
    text.push_str(" * A strataStream_t is passed where NCCL takes a cudaStream_t. With a null stream a call (or an\n");
    text.push_str(" * outermost group) has ended when it returns.\n */\n");
    text.push_str("#ifndef STRATA_H_\n#define STRATA_H_\n\n#include \"nccl.h\"\n\n");
    text.push_str("typedef cudaStream_t strataStream_t;\ntypedef struct strataEvent* strataEvent_t;\ntypedef void (*strataCallback_t)(void* argument);\n");
    text.push_str("typedef void (*strataStatusCallback_t)(void* argument, ncclResult_t status);\n");
    text.push_str("\n/* Types and operations that NCCL does not have, for communicators in host memory. Operations on bits are for\n");
    text.push_str(" * integers. NCCL, and Strata where data is on a GPU, return ncclInvalidArgument. */\n");
    let types = [("strataInt16", DataType::I16), ("strataUint16", DataType::U16)];
    for (name, dtype) in types {
        let _ = writeln!(text, "#define {name} ((ncclDataType_t){:#x})", dtype.code());
    }
    for (name, op) in ["strataBitAnd", "strataBitOr", "strataBitXor"].into_iter().zip(RedOp::BITS) {
        let _ = writeln!(text, "#define {name} ((ncclRedOp_t){:#x})", op.code());
    }
    text.push_str("\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n");
    prototypes(&mut text, table::own_functions());
    text.push_str("\n#ifdef __cplusplus\n} /* extern \"C\" */\n#endif\n\n#endif /* STRATA_H_ */\n");
    text
}

fn prototypes(text: &mut String, functions: impl Iterator<Item = &'static Function>) {
    let mut section = "";
    for function in functions {
        if function.section != section {
            section = function.section;
            let _ = write!(text, "\n/* ---- {section} ---- */\n");
        }
        let doc: Vec<&str> = function.doc.iter().map(|line| line.trim()).collect();
        let _ = write!(text, "\n/* {} Since {}. */\n", doc.join(" "), function.since);
        for name in function.names() {
            text.push_str(&wrapped(&function.prototype(&name)));
            text.push('\n');
        }
    }
}

/// A prototype in lines of at most 110 columns, broken after commas.
fn wrapped(prototype: &str) -> String {
    let mut lines = vec![String::new()];
    for part in prototype.split_inclusive(", ") {
        let line = lines.last_mut().expect("there is always a line");
        if !line.is_empty() && line.len() + part.trim_end().len() > 110 {
            *line = line.trim_end().to_string();
            lines.push(format!("    {part}"));
        } else {
            line.push_str(part);
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prototypes_are_spelt_as_c_has_them() {
        let find = |name: &str| table::nccl_functions().find(|function| function.name == name).unwrap();
        assert_eq!(find("ncclGroupEnd").prototype("ncclGroupEnd"), "ncclResult_t ncclGroupEnd(void);");
        assert_eq!(
            find("ncclParamGetAllParameterKeys").prototype("pncclParamGetAllParameterKeys"),
            "ncclResult_t pncclParamGetAllParameterKeys(const char*** table, int* tableLen);"
        );
        assert_eq!(
            find("ncclCommRegister").prototype("ncclCommRegister"),
            "ncclResult_t ncclCommRegister(ncclComm_t comm, void* buff, size_t size, void** handle);"
        );
    }

    #[test]
    fn a_long_prototype_is_broken_after_a_comma() {
        let long = format!("int f({}int last);", "int argument, ".repeat(20));
        assert!(wrapped(&long).lines().all(|line| line.len() <= 110));
        assert_eq!(wrapped(&long).replace("\n    ", " "), long);
    }
}
