//! A process of a program: runs its ranks on threads, and ends as the program has it.

use crate::board::{Board, Place};
use crate::gpu::Gpu;
use crate::library::{Id, Library, SUCCESS};
use crate::program::{Carrier, FaultKind, ProcessEnd, Program};
use crate::rank::{Handed, Rank, PATIENCE};
use crate::report::{Line, Report};
use crate::usage::Usage;
use std::path::Path;
use std::time::Duration;

/// The files of a run, in its directory.
pub fn file(dir: &Path, name: &str) -> std::path::PathBuf {
    dir.join(name)
}

/// Has the library start what it keeps for the process's life: a communicator of one rank comes and goes.
fn warmed(library: &Library) -> bool {
    let (mut id, mut comm) = (Id([0; 128]), std::ptr::null_mut());
    // SAFETY: the pointer must be writable; because it is a local of ours.
    let mut code = unsafe { (library.get_unique_id)(&raw mut id) };
    if code == SUCCESS {
        // SAFETY: the pointer must be writable; because it is a local of ours.
        code = unsafe { (library.init_rank)(&raw mut comm, 1, id, 0) };
    }
    if code == SUCCESS {
        // SAFETY: the communicator must be alive; because it was just made.
        code = unsafe { (library.destroy)(comm) };
    }
    code == SUCCESS
}

/// Runs process `number` of the program in `dir`.
pub fn run(dir: &Path, number: Option<usize>, library: &Path) -> Result<(), String> {
    let launched = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"].iter().find_map(|name| std::env::var(name).ok());
    let number = number.or_else(|| launched?.parse().ok()).ok_or("no launcher says which process this is")?;
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let text = std::fs::read_to_string(file(dir, "program.json")).map_err(|error| said(&error))?;
    let program: Program = serde_json::from_str(&text).map_err(|error| said(&error))?;
    // The library reads its settings at its first call.
    std::env::set_var("NCCL_HOSTID", format!("node{}", program.processes[number].node));
    let board = Board::open(&file(dir, "board")).map_err(|error| said(&error))?;
    let report = Report::open(&file(dir, &format!("report{number}"))).map_err(|error| said(&error))?;
    let library = Library::open(library)?;
    let gpu = if program.carrier == Carrier::Softgpu { Some(Gpu::open()?) } else { None };
    let measure: fn() -> Usage = match program.carrier {
        // What the driver keeps is its own.
        Carrier::Softgpu => Usage::of_streams,
        _ => Usage::now,
    };
    // MPI is taken only if the first communicator has the whole job, and it keeps what it likes.
    let is_measured = match program.carrier {
        Carrier::Mpi => false,
        Carrier::Softgpu => true,
        _ => warmed(&library),
    };
    let before = is_measured.then(measure);
    let handed = Handed::default();
    let ranks = program.ranks_of(number);
    let good = std::thread::scope(|scope| {
        let run = |me: usize| {
            let (program, board, report) = (&program, &board, &report);
            let mut rank = Rank::new(program, &library, board, report, &handed, me);
            let entered = gpu.map_or(Ok(()), |gpu| rank.enter(gpu));
            if let Err(text) = entered.and_then(|()| board.start(program.nranks(), PATIENCE)) {
                report.write(&Line::Wrong { rank: me, op: 0, text });
                return false;
            }
            if !rank.run() {
                // Its communicators stay as they are, so that others do not fail because of it.
                std::thread::sleep(PATIENCE);
                return false;
            }
            report.write(&Line::Done { rank: me });
            board.note(me, Place::Through);
            true
        };
        let threads: Vec<_> = ranks.iter().map(|&me| scope.spawn(move || run(me))).collect();
        threads.into_iter().all(|thread| thread.join().unwrap_or(false))
    });
    // What is kept is no leak; nor is what a process holds that others take for dead.
    let keeps = program.keeps(number) || ranks.iter().any(|rank| program.victims().contains(rank));
    // What is meant for a process that does not answer is kept for it a while.
    let frozen = program.fault.as_ref().is_some_and(|fault| matches!(fault.kind, FaultKind::Freeze | FaultKind::Cut));
    let patience = Duration::from_secs(if frozen { 20 } else { 5 });
    let settled = match before.filter(|_| good && !keeps) {
        Some(before) => Usage::settles(&before, measure, patience),
        None => Ok(()),
    };
    if let Err(text) = &settled {
        report.write(&Line::Wrong { rank: ranks[0], op: program.ops.len(), text: text.clone() });
    }
    let good = good && settled.is_ok();
    // The library stays: programs do not unload it either.
    std::mem::forget(library);
    match program.processes[number].end {
        ProcessEnd::Exit => std::process::exit(i32::from(!good)),
        // SAFETY: no requirement.
        ProcessEnd::ExitNow => unsafe { libc::_exit(i32::from(!good)) },
    }
}
