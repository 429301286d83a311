//! Writes `MATRIX.md`: what Strata does with each function, and which programs call it.
#![forbid(unsafe_code)]

use super::entry::Function;
use super::table;
use std::fmt::Write;

/// Programs and the functions they import, without `nccl`. From their sources and binaries.
const CONSUMERS: [(&str, &[&str]); 6] = [
    (
        "PyTorch",
        &[
            "AllGather",
            "AllReduce",
            "AlltoAll",
            "Bcast",
            "Broadcast",
            "CommAbort",
            "CommCount",
            "CommDeregister",
            "CommDestroy",
            "CommFinalize",
            "CommGetAsyncError",
            "CommInitAll",
            "CommInitRank",
            "CommInitRankConfig",
            "CommInitRankScalable",
            "CommMemStats",
            "CommRegister",
            "CommResume",
            "CommShrink",
            "CommSplit",
            "CommSuspend",
            "CommUserRank",
            "CommWindowDeregister",
            "CommWindowRegister",
            "DevCommCreate",
            "DevCommDestroy",
            "GetErrorString",
            "GetLastError",
            "GetUniqueId",
            "GetVersion",
            "GroupEnd",
            "GroupSimulateEnd",
            "GroupStart",
            "MemAlloc",
            "MemFree",
            "Recv",
            "RedOpCreatePreMulSum",
            "RedOpDestroy",
            "Reduce",
            "ReduceScatter",
            "Send",
        ],
    ),
    (
        "vLLM",
        &[
            "AllGather",
            "AllReduce",
            "Broadcast",
            "CommDestroy",
            "CommInitRank",
            "CommWindowDeregister",
            "CommWindowRegister",
            "GetErrorString",
            "GetUniqueId",
            "GetVersion",
            "GroupEnd",
            "GroupStart",
            "Recv",
            "Reduce",
            "ReduceScatter",
            "Send",
        ],
    ),
    (
        "CuPy",
        &[
            "AllGather",
            "AllReduce",
            "Bcast",
            "Broadcast",
            "CommAbort",
            "CommCount",
            "CommCuDevice",
            "CommDestroy",
            "CommGetAsyncError",
            "CommInitAll",
            "CommInitRank",
            "CommInitRankConfig",
            "CommSplit",
            "CommUserRank",
            "GetErrorString",
            "GetUniqueId",
            "GetVersion",
            "GroupEnd",
            "GroupStart",
            "Recv",
            "Reduce",
            "ReduceScatter",
            "Send",
        ],
    ),
    ("DeepSpeed (DeepCompile)", &["AllGather", "AllReduce", "CommDestroy", "CommInitRank", "ReduceScatter"]),
    (
        "Horovod",
        &[
            "AllGather",
            "AllReduce",
            "Bcast",
            "Broadcast",
            "CommAbort",
            "CommDestroy",
            "CommGetAsyncError",
            "CommInitRank",
            "GetErrorString",
            "GetUniqueId",
            "GroupEnd",
            "GroupStart",
            "Recv",
            "Reduce",
            "ReduceScatter",
            "Send",
        ],
    ),
    (
        "XLA (JAX, TensorFlow)",
        &[
            "AllGather",
            "AllGatherConfig",
            "AllReduce",
            "AllReduceConfig",
            "Broadcast",
            "CommAbort",
            "CommCount",
            "CommDestroy",
            "CommFinalize",
            "CommGetAsyncError",
            "CommInitAll",
            "CommInitRank",
            "CommInitRankConfig",
            "CommInitRankScalable",
            "CommSplit",
            "CommWindowDeregister",
            "CommWindowRegister",
            "DevCommCreate",
            "DevCommDestroy",
            "GetErrorString",
            "GetLastError",
            "GetUniqueId",
            "GetVersion",
            "GroupEnd",
            "GroupStart",
            "MemAlloc",
            "MemFree",
            "PutSignal",
            "Recv",
            "ReduceScatter",
            "ReduceScatterConfig",
            "Send",
        ],
    ),
];

/// The text of `MATRIX.md`.
pub fn matrix_md() -> String {
    let mut text = String::from(
        "# What Strata does with each function\n\n\
         Made from the table in `src/interface/functions.rs`. *Over the vendor's library* is a process in which NCCL or RCCL was\n\
         found; *on the host device* one without (see the README).\n\n\
         | word | meaning |\n|---|---|\n\
         | forwarded | one jump to the vendor's function of the same name: the program's registers and stack, untouched |\n\
         | looked at | Strata sees the call, and makes the vendor's call itself; collectives may run in two levels |\n\
         | guarded | handed on as it is; what the vendor's function calls in turn is not taken for the program's calls |\n\
         | native | Strata's own |\n\
         | unsupported | `ncclInvalidUsage`, saying what it would need |\n\n\
         Each function has a twin whose name begins with `p` and which leads to the same place, but those marked `-`.\n\
         *Since* is the release of NCCL that added it; a vendor's library without it is answered for with\n\
         `ncclInvalidUsage` (or nothing, where no code is returned) and a line that names its release.\n\n\
         A communicator of `strataCommInitHost`, and what is made of it, is served as on the host device everywhere.\n",
    );
    let of_others = table::msccl_functions().chain(table::rccl_functions());
    let all: Vec<&Function> = table::nccl_functions().chain(of_others).chain(table::own_functions()).collect();
    let mut section = "";
    for function in all {
        if function.section != section {
            section = function.section;
            let _ = write!(
                text,
                "\n## {section}\n\n| function | twin | since | over the vendor's library | on the host device | used by |\n\
                 |---|---|---|---|---|---|\n"
            );
        }
        let plain = function.name.strip_prefix("nccl").unwrap_or(function.name);
        let users = CONSUMERS.iter().filter(|(_, names)| names.contains(&plain)).map(|(user, _)| *user);
        let users: Vec<&str> = users.collect();
        let has_twin = table::nccl::FUNCTIONS.iter().any(|other| other.name == function.name);
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} | {} |",
            function.name,
            if has_twin { "p" } else { "-" },
            function.since,
            if function.since == "strata" { "as on the host device" } else { function.over },
            function.kind,
            users.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_that_a_program_uses_is_in_the_table() {
        for (user, names) in CONSUMERS {
            for name in names {
                let full = format!("nccl{name}");
                assert!(table::nccl_functions().any(|function| function.name == full), "{user} uses {full}");
            }
        }
    }
}
