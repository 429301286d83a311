//! A program as C: what every rank calls, in order, to be read and run by hand. It finds its rank in `RANK`, takes its
//! node from a table, and hands ids over in files named after `MASTER_PORT`; data is not compared.

use crate::model;
use crate::program::{Action, Call, End, FaultKind, Kind, Memory, Misuse, ProcessEnd, Program, Reduction, World};
use std::fmt::Write;

const HEAD: &str = r#"#define _GNU_SOURCE
#include <nccl.h>
#include <strata.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank;
#define CHECK(call)                                                                                    \
    do {                                                                                               \
        ncclResult_t code = (call);                                                                    \
        if (code != ncclSuccess && code != ncclInProgress) {                                           \
            fprintf(stderr, "rank %d, line %d: %s: %d, %s\n", rank, __LINE__, #call, code, ncclGetLastError(NULL)); \
            _exit(1);                                                                                  \
        }                                                                                              \
    } while (0)
#define WAIT(comm)                                                                                     \
    for (ncclResult_t state = ncclInProgress; state == ncclInProgress; usleep(50)) {                   \
        CHECK(ncclCommGetAsyncError(comm, &state));                                                    \
        CHECK(state);                                                                                  \
    }

static ncclConfig_t config(int blocking)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    return config;
}

/* One rank makes the id, the others read it. */
static ncclUniqueId hand_over(int comm, const ncclUniqueId *made)
{
    char name[200], fresh[220];
    ncclUniqueId id;
    snprintf(name, sizeof name, "/tmp/nccl-id-%s-%d", getenv("MASTER_PORT"), comm);
    if (made != NULL) {
        snprintf(fresh, sizeof fresh, "%s.new", name);
        FILE *file = fopen(fresh, "w");
        fwrite(made, sizeof *made, 1, file);
        fclose(file);
        rename(fresh, name);
        return *made;
    }
    FILE *file;
    while ((file = fopen(name, "r")) == NULL)
        usleep(1000);
    if (fread(&id, sizeof id, 1, file) != 1)
        _exit(2);
    fclose(file);
    return id;
}

static ncclUniqueId id_of(int comm, int makes_it)
{
    ncclUniqueId id;
    if (!makes_it)
        return hand_over(comm, NULL);
    CHECK(ncclGetUniqueId(&id));
    return hand_over(comm, &id);
}

static void *memory(size_t bytes, int shared)
{
    void *start = NULL;
    if (shared)
        CHECK(ncclMemAlloc(&start, bytes + 1));
    else
        start = malloc(bytes + 1);
    memset(start, 1 + rank, bytes);
    return start;
}
"#;

/// The whole text.
pub fn program(program: &Program, what: &str) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "/* Seed {} over {:?}: {what}", program.seed, program.carrier);
    let _ = writeln!(text, " * {} ranks; run with {:?}", program.nranks(), program.settings);
    for process in 0..program.processes.len() {
        let ranks = program.ranks_of(process);
        if ranks.len() > 1 {
            let _ = writeln!(text, " * Ranks {ranks:?} are threads of one process there, and processes here.");
        }
    }
    let _ = writeln!(text, " */\n{HEAD}");
    let nodes: Vec<String> = program.home.iter().map(|&home| program.processes[home].node.to_string()).collect();
    let _ = writeln!(text, "static const int node[] = {{{}}};\n", nodes.join(", "));
    text += "int main(void)\n{\n    char name[32];\n    rank = atoi(getenv(\"RANK\"));\n";
    text += "    snprintf(name, sizeof name, \"node%d\", node[rank]);\n    setenv(\"NCCL_HOSTID\", name, 1);\n";
    let _ = writeln!(text, "    ncclComm_t comm[{}] = {{NULL}};", program.comms.len().max(1));
    let _ = writeln!(text, "    cudaStream_t stream[3] = {{NULL}};\n    (void)stream;");
    if program
        .ops
        .iter()
        .any(|op| matches!(&op.action, Action::Calls { calls, .. } if calls.iter().any(|c| c.stream > 0)))
    {
        text += "    CHECK(strataStreamCreate(&stream[1]));\n    CHECK(strataStreamCreate(&stream[2]));\n";
    }
    for (index, op) in program.ops.iter().enumerate() {
        let _ = writeln!(text, "\n    /* {index}: {} */", op.action.name());
        for rank in 0..program.nranks() {
            if program.takes_part(op, rank) {
                let body = part(program, index, rank);
                let _ = writeln!(text, "    if (rank == {rank}) {{\n{body}    }}");
            }
        }
    }
    text += "\n    fprintf(stderr, \"rank %d: through\\n\", rank);\n";
    for (process, how) in program.processes.iter().enumerate() {
        if how.end == ProcessEnd::ExitNow {
            for rank in program.ranks_of(process) {
                let _ = writeln!(text, "    if (rank == {rank})\n        _exit(0);");
            }
        }
    }
    text + "    return 0;\n}\n"
}

/// What a rank does before its part in an operation: pauses, a fork, a fault.
fn before(program: &Program, index: usize, rank: World) -> Vec<String> {
    let op = &program.ops[index];
    let mut lines: Vec<String> = Vec::new();
    lines.extend(op.pauses.iter().filter(|pause| pause.0 == rank).map(|pause| format!("usleep({});", 1000 * pause.1)));
    if op.forks.contains(&rank) {
        lines.push("if (fork() == 0) { sleep(1); _exit(0); }".into());
    }
    if let Some(fault) = program.fault.as_ref().filter(|fault| (fault.rank, fault.op) == (rank, index)) {
        lines.push(match fault.kind {
            FaultKind::Kill => "raise(SIGKILL);".into(),
            FaultKind::Exit => "exit(0);".into(),
            FaultKind::ExitNow => "_exit(0);".into(),
            kind => format!("/* {kind:?}, {} */", fault.amount),
        });
    }
    lines
}

/// How a rank ends its use of a communicator.
fn end_of(comm: usize, how: End) -> Vec<String> {
    let mut lines = vec![sync().to_string()];
    if matches!(how, End::FinalizeDestroy | End::FinalizeKeep) {
        lines.push(format!("CHECK(ncclCommFinalize(comm[{comm}]));\nWAIT(comm[{comm}]);"));
    }
    lines.push(match how {
        End::Destroy | End::FinalizeDestroy => format!("CHECK(ncclCommDestroy(comm[{comm}]));"),
        End::Abort => format!("CHECK(ncclCommAbort(comm[{comm}]));"),
        End::Keep | End::FinalizeKeep => "/* kept */".into(),
    });
    lines
}

/// A rank's part in an operation.
fn part(program: &Program, index: usize, rank: World) -> String {
    let op = &program.ops[index];
    let mut lines = before(program, index, rank);
    let at = |comm: usize| program.comms[comm].rank_of(rank).unwrap_or(0);
    let blocking = |comm: usize| i32::from(!program.comms[comm].nonblocking[at(comm)]);
    let size = |comm: usize| program.comms[comm].ranks.len();
    match &op.action {
        Action::Init { comm, .. } => {
            lines.push(format!("ncclUniqueId id = id_of({comm}, {});", i32::from(at(*comm) == 0)));
            lines.push(format!("ncclConfig_t c = config({});", blocking(*comm)));
            let (n, r) = (size(*comm), at(*comm));
            lines.push(format!("CHECK(ncclCommInitRankConfig(&comm[{comm}], {n}, id, {r}, &c));\nWAIT(comm[{comm}]);"));
        }
        Action::InitAll { comm } => lines.push(format!("/* ncclCommInitAll of communicator {comm} */")),
        Action::Split { parent, colors, keys, children } => {
            let mine = at(*parent);
            let color = colors[mine].map_or(-1, |color| color as i32 * 3);
            let child = colors[mine].map(|color| children[color]);
            lines.push(format!("ncclConfig_t c = config({});\nncclComm_t made = NULL;", child.map_or(1, blocking)));
            lines.push(format!("CHECK(ncclCommSplit(comm[{parent}], {color}, {}, &made, &c));", keys[mine]));
            lines.push(format!("WAIT(comm[{parent}]);"));
            lines.extend(child.map(|child| format!("comm[{child}] = made;")));
        }
        Action::Shrink { parent, child, .. } => {
            let kept = &program.comms[*child].ranks;
            let old = &program.comms[*parent].ranks;
            let out: Vec<String> = (0..old.len()).filter(|&r| !kept.contains(&old[r])).map(|r| r.to_string()).collect();
            lines.push(format!("int out[] = {{{}}};", out.join(", ")));
            lines.push(format!("CHECK(ncclCommShrink(comm[{parent}], out, {}, &comm[{child}], NULL, 0));", out.len()));
            lines.push(format!("WAIT(comm[{parent}]);"));
        }
        Action::Grow { parent, child } => {
            let n = size(*child);
            if program.comms[*parent].rank_of(rank).is_none() {
                lines.push(format!("ncclUniqueId id = hand_over({child}, NULL);"));
                lines.push(format!("CHECK(ncclCommGrow(NULL, {n}, &id, {}, &comm[{child}], NULL));", at(*child)));
            } else if at(*parent) == 0 {
                lines.push(format!("ncclUniqueId id;\nCHECK(ncclCommGetUniqueId(comm[{parent}], &id));"));
                lines.push(format!("hand_over({child}, &id);"));
                lines.push(format!("CHECK(ncclCommGrow(comm[{parent}], {n}, &id, -1, &comm[{child}], NULL));"));
            } else {
                lines.push(format!("CHECK(ncclCommGrow(comm[{parent}], {n}, NULL, -1, &comm[{child}], NULL));"));
            }
        }
        Action::Calls { calls, nesting } => lines.extend(calls_of(program, calls, *nesting, rank)),
        Action::Sync { .. } => lines.push(sync().into()),
        Action::Refused { comm, what, .. } => lines.push(misuse(*comm, *what)),
        Action::Suspend { comm } => {
            lines.push(sync().into());
            lines.push(format!("CHECK(ncclCommSuspend(comm[{comm}], 1));\nCHECK(ncclCommResume(comm[{comm}]));"));
        }
        Action::Revoke { comm } => {
            lines.push(sync().into());
            lines.push(format!("/* Once all ranks are here. */\nCHECK(ncclCommRevoke(comm[{comm}], 0));"));
        }
        Action::End { comm, ranks } => {
            let how = ranks.iter().find(|end| end.0 == rank).map_or(End::Keep, |end| end.1);
            lines.extend(end_of(*comm, how));
        }
    }
    let lines = lines.iter().flat_map(|line| line.lines());
    lines.fold(String::new(), |text, line| text + "        " + line + "\n")
}

fn sync() -> &'static str {
    "if (stream[1] != NULL) {\n    CHECK(strataStreamSynchronize(stream[1]));\n    CHECK(strataStreamSynchronize(stream[2]));\n}"
}

fn misuse(comm: usize, what: Misuse) -> String {
    format!("/* a call that is refused on communicator {comm}: {what:?} */")
}

const TYPES: [&str; 12] = [
    "ncclInt8",
    "ncclUint8",
    "ncclInt32",
    "ncclUint32",
    "ncclInt64",
    "ncclUint64",
    "ncclFloat16",
    "ncclFloat32",
    "ncclFloat64",
    "ncclBfloat16",
    "ncclFloat8e4m3",
    "ncclFloat8e5m2",
];

fn calls_of(program: &Program, calls: &[Call], nesting: usize, rank: World) -> Vec<String> {
    let mine: Vec<&Call> = calls.iter().filter(|call| program.takes_part_in(call, rank)).collect();
    let mut lines = Vec::new();
    let body: Vec<String> = mine.iter().flat_map(|call| call_of(program, call, rank)).collect();
    let grouped = body.len() > 1 || nesting > 0;
    lines.extend((0..usize::from(grouped) * nesting.max(1)).map(|_| "CHECK(ncclGroupStart());".to_string()));
    lines.extend(body);
    lines.extend((0..usize::from(grouped) * nesting.max(1)).map(|_| "CHECK(ncclGroupEnd());".to_string()));
    for call in mine {
        if program.comms[call.comm].nonblocking[0] {
            lines.push(format!("WAIT(comm[{}]);", call.comm));
        }
    }
    lines
}

fn call_of(program: &Program, call: &Call, rank: World) -> Vec<String> {
    let members = &program.comms[call.comm];
    let (nranks, me) = (members.ranks.len(), members.rank_of(rank).unwrap_or(0));
    let dtype = TYPES[call.dtype as usize];
    let shared = i32::from(call.memory == Memory::Shared);
    let memory = |count: usize| format!("memory({}, {shared})", count * call.dtype.size());
    let (comm, stream) = (format!("comm[{}]", call.comm), format!("stream[{}]", program.stream_of(call, rank)));
    if call.kind == Kind::Messages {
        let mut lines = Vec::new();
        for &(from, to, count) in &call.messages {
            let arguments = |peer| format!("{}, {count}, {dtype}, {peer}, {comm}, {stream}", memory(count));
            if from == me {
                lines.push(format!("CHECK(ncclSend({}));", arguments(to)));
            }
            if to == me {
                lines.push(format!("CHECK(ncclRecv({}));", arguments(from)));
            }
        }
        return lines;
    }
    let (input, output) = (memory(model::input_count(call, nranks, me)), memory(model::output_count(call, nranks, me)));
    let op = match call.reduction {
        Reduction::Sum | Reduction::PreMulSum { .. } => "ncclSum",
        Reduction::Prod => "ncclProd",
        Reduction::Max => "ncclMax",
        Reduction::Min => "ncclMin",
        Reduction::Avg => "ncclAvg",
    };
    let (kind, count, root) = (call.kind, call.count, call.root);
    let place = if call.in_place { " /* in place */" } else { "" };
    let arguments = match kind {
        Kind::AllReduce | Kind::ReduceScatter => format!("{input}, {output}, {count}, {dtype}, {op}"),
        Kind::Reduce => format!("{input}, {output}, {count}, {dtype}, {op}, {root}"),
        Kind::Bcast => format!("{output}, {count}, {dtype}, {root}"),
        Kind::Broadcast | Kind::Gather | Kind::Scatter => format!("{input}, {output}, {count}, {dtype}, {root}"),
        _ => format!("{input}, {output}, {count}, {dtype}"),
    };
    vec![format!("CHECK(nccl{kind:?}({arguments}, {comm}, {stream}));{place}")]
}
