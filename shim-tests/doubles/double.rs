//! The double of the vendors' libraries by itself: what it exports, that programs run on it alone, and what it writes
//! down. Tests of Strata in front of a vendor's library rest on this.

use crate::built::checked;
use crate::vendor::{cuda_dir, Double, Recording, Way, NCCL, OLD_NCCL, OLD_RCCL, RCCL};
use std::collections::BTreeSet;
use std::process::Command;

const ALL: [Double; 4] = [NCCL, OLD_NCCL, RCCL, OLD_RCCL];

fn exported(double: Double) -> BTreeSet<String> {
    let listing = checked(Command::new("nm").args(["-D", "--defined-only"]).arg(double.library()));
    listing.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_string).collect()
}

#[test]
fn each_release_exports_what_the_vendor_s_did() {
    let all: BTreeSet<String> = include_str!("../nccl-symbols.txt").lines().map(str::to_string).collect();
    assert_eq!(exported(NCCL), all);
    let old = exported(OLD_NCCL);
    assert_eq!(old.len(), 62);
    assert!(old.is_subset(&all) && old.contains("ncclCommSplit") && !old.contains("ncclCommInitRankScalable"));
    for rccl in [RCCL, OLD_RCCL] {
        let names = exported(rccl);
        assert!(names.iter().all(|name| !name.starts_with("pnccl")));
        for name in ["ncclAlltoAllv", "ncclAllToAll", "ncclAllReduceWithBias", "mscclRunAlgo", "ncclGather"] {
            assert!(names.contains(name), "{rccl:?} lacks {name}");
        }
    }
}

/// Else a library in front of it would never meet the vendor's own calls.
#[test]
fn it_calls_its_own_public_functions_through_the_plt() {
    let calls = |double: Double, names: &[&str]| {
        let slots = checked(Command::new("readelf").arg("-rW").arg(double.library()));
        for name in names {
            assert!(
                slots.lines().any(|line| line.contains("JUMP_SLO") && line.contains(&format!(" {name} "))),
                "{name}"
            );
        }
    };
    let nccl = ["ncclBroadcast", "ncclGetUniqueId", "ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd"];
    calls(NCCL, &nccl);
    calls(OLD_NCCL, &nccl);
    calls(RCCL, &["ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"]);
    let code = checked(Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(RCCL.library()));
    let is_tail_call = |line: &&str| {
        let jumps = line.contains("jmp") || line.split_whitespace().any(|word| word == "b");
        jumps && line.contains("<ncclGroupEnd@plt>")
    };
    assert!(code.lines().filter(is_tail_call).count() >= 4);
}

#[test]
fn random_calls_give_right_results_however_a_program_comes_by_it() {
    for (grid, seed) in [("2x2", "1"), ("3x2", "2"), ("2x4", "3"), ("3+1", "4"), ("rr2x2", "5"), ("1x1", "6")] {
        for double in ALL {
            let outputs = [Way::Linked, Way::ByName]
                .map(|way| checked(&mut double.command("differential", way, &[grid, seed, "60", "2"])));
            assert_eq!(outputs[0], outputs[1]);
            assert!(outputs[0].contains("rank 0: "));
        }
    }
}

#[test]
fn nonblocking_communicators_appear_later() {
    for double in [NCCL, OLD_NCCL] {
        let output = checked(double.command("nonblocking", Way::Linked, &["2x2"]).env("DOUBLE_DELAY_MS", "60"));
        for line in ["init: 7, handle there", "before it is ready: 4", "split: 7, handle not there"] {
            assert!(output.lines().any(|found| found == line), "{output}");
        }
    }
}

#[test]
fn nobody_waits_for_ever() {
    for case in ["thread", "vanish", "background", "late", "init", "revoke"] {
        checked(&mut NCCL.command("abort", Way::Linked, &["2x2", case]));
    }
}

#[test]
fn one_thread_may_drive_all_ranks() {
    for double in ALL {
        checked(&mut double.command("one_thread", Way::Linked, &["4"]));
    }
}

#[test]
fn wrong_calls_get_nccl_s_codes() {
    let output = checked(&mut NCCL.command("errors", Way::Linked, &[]));
    for line in [
        "ncclGroupEnd(): 5, invalid usage (run with NCCL_DEBUG=WARN for details): ncclGroupEnd: not in a group call.",
        "ncclCommDestroy(NULL): 0, no error",
        "nothing was done: 0 0",
        "now it is: 3 3",
    ] {
        assert!(output.lines().any(|found| found == line), "{line}\n{output}");
    }
}

#[test]
fn it_keeps_nothing_of_what_has_ended() {
    let recording = Recording::new();
    let mut command = NCCL.command("cycles", Way::Linked, &["2x2", "50"]);
    checked(command.env("DOUBLE_RECORD", recording.prefix()));
    let processes = recording.processes();
    assert_eq!(processes.len(), 4);
    for lines in processes {
        // Made: the world and the halves each time, and everybody each time too, where rank 0 makes one in vain.
        assert_eq!(lines.last().unwrap(), "exit comms=0 made=150 bytes=0 redops=0 registrations=0 windows=0");
    }
}

#[test]
fn it_writes_down_what_was_called_from_outside_and_what_ran_together() {
    let recording = Recording::new();
    checked(NCCL.command("one_thread", Way::ByName, &["2"]).env("DOUBLE_RECORD", recording.prefix()));
    let processes = recording.processes();
    let lines: Vec<&str> = processes[0].iter().map(String::as_str).collect();
    assert_eq!(lines[0], "ncclCommInitAll ndev=2 depth=0 -> 0");
    let first = lines.iter().position(|line| line.starts_with("launch")).unwrap();
    let sum = |rank| {
        format!("ncclAllReduce comm=comm{rank} nranks=2 rank={rank} count=1000 type=float32 op=sum inplace=0 stream=0")
    };
    assert_eq!(lines[first - 3], "ncclGroupStart depth=0 -> 0");
    assert_eq!(lines[first - 2], format!("{} depth=1 -> 0", sum(0)));
    assert_eq!(lines[first], format!("launch 2 | {} | {}", sum(0), sum(1)));
    assert_eq!(lines[first + 1], "ncclGroupEnd depth=1 -> 0");
    // Of the ids only the program's own is there, not the one that ncclCommInitAll asks for.
    assert_eq!(lines.iter().filter(|line| line.starts_with("ncclGetUniqueId")).count(), 1);
}

#[test]
fn the_double_of_cuda_tells_what_a_test_told_it() {
    let mut command = NCCL.command("capture", Way::Linked, &["2x2"]);
    let path = format!("{}:{}", NCCL.dir().display(), cuda_dir().display());
    checked(command.env("LD_LIBRARY_PATH", path));
}

#[test]
fn the_cost_of_a_call_can_be_measured() {
    let library = NCCL.library();
    let output = checked(&mut NCCL.command("latency", Way::Linked, &[library.to_str().unwrap()]));
    assert!(output.contains("ncclCommCount: linked "), "{output}");
    print!("{output}");
}
