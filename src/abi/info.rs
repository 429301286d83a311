//! Bodies of the entries that only tell something.

use super::handles;
use crate::error::{Error, Result};
use crate::interface::layouts::{read_versioned, write_versioned, CommProperties, EncryptionConfig, Team, VERSION};
use crate::interface::pointer::{Buffer, ConstPtr, Ptr, Text};
use crate::interface::types::{CftTeamMode, CommHandle, Status};
use crate::selection::table::MeasuredOn;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, CStr};

/// `ncclGetVersion`
pub fn get_version(out: Ptr<c_int>) -> Result<()> {
    out.set("version", VERSION)
}

/// `ncclGetErrorString`
pub fn error_string(status: Status) -> Text {
    Text::to(match status.0 {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 => c"timeout",
        _ => c"unknown result code",
    })
}

/// Bytes of a thread's place for the text of an error; a longer one is cut.
const SHOWN_BYTES: usize = 8 << 10;

/// `ncclGetLastError`. Whatever the communicator, the text is the process's, or that of the status which a callback of a
/// stream has been told. Its place is the thread's for good, as in NCCL: programs keep the pointer beyond the next call.
pub fn last_error(_comm: CommHandle) -> Text {
    thread_local! {
        static SHOWN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    SHOWN.with_borrow_mut(|shown| show(&crate::log::last_error(), shown))
}

/// `strataGetLastError`
pub fn own_last_error() -> Text {
    thread_local! {
        static SHOWN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    SHOWN.with_borrow_mut(|shown| show(&crate::log::last_error_of_thread(), shown))
}

/// Writes the text into a place that never moves.
fn show(text: &str, shown: &mut Vec<u8>) -> Text {
    shown.resize(SHOWN_BYTES, 0);
    let len = (0..SHOWN_BYTES.min(text.len() + 1)).rev().find(|&len| text.is_char_boundary(len)).unwrap_or(0);
    shown[..len].copy_from_slice(&text.as_bytes()[..len]);
    shown[..len].iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
    shown[len] = 0;
    let text = CStr::from_bytes_until_nul(shown).unwrap_or_default();
    // SAFETY: the text must stay while it is used; because its place is the thread's, and only filled once more.
    unsafe { Text::lent(text) }
}

/// `ncclResetDebugInit`. Strata reads its log settings once; there is nothing to reset.
pub fn reset_debug() {}

/// `strataCommDescribe`
pub fn describe(comm: CommHandle, text: Buffer, bytes: usize) -> Result<()> {
    let comm = handles::find(comm)?.ready()?;
    write_description(&comm.machine(), (&comm.carriers(), &comm.providers()), text, bytes)
}

/// Writes a machine, the carriers that calls may choose, the providers and the collectives for which calls may choose each, and whose
/// description it is, where a program has room for so many bytes.
pub fn write_description(
    machine: &MeasuredOn,
    (carriers, providers): (&[&str], &BTreeMap<&str, Vec<&str>>),
    text: Buffer,
    bytes: usize,
) -> Result<()> {
    let strata = env!("CARGO_PKG_VERSION");
    let told =
        serde_json::json!({ "strata": strata, "machine": machine, "carriers": carriers, "providers": providers });
    write_json(&told, text, bytes)
}

/// `strataCommState`
pub fn state(comm: CommHandle, text: Buffer, bytes: usize) -> Result<()> {
    write_json(&handles::find(comm)?.ready()?.state(), text, bytes)
}

/// Writes an object where a program has room for so many bytes.
pub(super) fn write_json(told: &serde_json::Value, text: Buffer, bytes: usize) -> Result<()> {
    let told = told.to_string() + "\0";
    if told.len() > bytes {
        return Err(Error::InvalidArgument(format!("the description takes {} bytes, text has {bytes}", told.len())));
    }
    text.as_const().in_process(told.len(), "text")?.write(told.as_bytes());
    Ok(())
}

/// `ncclCommCount`
pub fn count(comm: CommHandle, out: Ptr<c_int>) -> Result<()> {
    number(comm, out, "count", |comm| comm.nranks() as c_int)
}

/// `ncclCommUserRank`
pub fn user_rank(comm: CommHandle, out: Ptr<c_int>) -> Result<()> {
    number(comm, out, "rank", |comm| comm.rank() as c_int)
}

/// `ncclCommCuDevice`
pub fn device(comm: CommHandle, out: Ptr<c_int>) -> Result<()> {
    number(comm, out, "device", |comm| comm.device())
}

fn number(
    comm: CommHandle,
    out: Ptr<c_int>,
    name: &str,
    value: impl FnOnce(&crate::communicator::Comm) -> c_int,
) -> Result<()> {
    let handle = handles::find(comm)?;
    if out.is_null() {
        return Err(crate::interface::types::null(name));
    }
    out.set(name, value(handle.ready()?.as_ref()))
}

/// `ncclCommQueryProperties`: none of the abilities that need a GPU.
pub fn properties(comm: CommHandle, out: Ptr<CommProperties>) -> Result<()> {
    let handle = handles::find(comm)?;
    let asked = read_versioned(out.as_const())?;
    let comm = handle.ready()?;
    let told = CommProperties {
        head: asked.head,
        rank: comm.rank() as c_int,
        nranks: comm.nranks() as c_int,
        cuda_dev: comm.device(),
        nvml_dev: comm.device(),
        n_lsa_teams: comm.nranks() as c_int,
        ..<CommProperties as crate::interface::layouts::Versioned>::DEFAULT
    };
    write_versioned(out, &told)
}

/// `ncclSetEncryption`
pub fn set_encryption(config: ConstPtr<EncryptionConfig>) -> Result<()> {
    if config.is_null() {
        return Ok(());
    }
    match read_versioned(config)?.mode {
        0 => Ok(()),
        1 => Err(Error::InvalidUsage("Strata does not encrypt; use a private network".to_string())),
        mode => Err(Error::InvalidArgument(format!("invalid encryption mode {mode}"))),
    }
}

/// `ncclTeamWorld`: all ranks.
pub fn team_world(comm: CommHandle) -> Team {
    ready_or_none(comm, |comm| Team { nranks: comm.nranks() as c_int, rank: comm.rank() as c_int, stride: 1 })
}

/// `ncclTeamLsa`: without a GPU no rank reaches another's memory by load and store, so each is a team of its own.
pub fn team_lsa(comm: CommHandle) -> Team {
    ready_or_none(comm, |_| Team { nranks: 1, rank: 0, stride: 1 })
}

/// `ncclTeamCft`
pub fn team_cft(comm: CommHandle, _mode: CftTeamMode) -> Team {
    team_lsa(comm)
}

/// `ncclTeamRankToWorld`: a team's rank as a rank of the communicator.
pub fn rank_to_world(comm: CommHandle, team: Team, rank: c_int) -> c_int {
    in_team(team_world(comm), team, rank)
}

/// `ncclTeamRankToLsa`
pub fn rank_to_lsa(comm: CommHandle, team: Team, rank: c_int) -> c_int {
    in_team(team_lsa(comm), team, rank)
}

fn in_team(outer: Team, team: Team, rank: c_int) -> c_int {
    outer.rank.wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride))
}

fn ready_or_none(comm: CommHandle, team: impl FnOnce(&crate::communicator::Comm) -> Team) -> Team {
    match handles::find(comm).and_then(|handle| handle.ready()) {
        Ok(comm) => team(&comm),
        Err(_) => Team::NONE,
    }
}

/// `ncclLLA2ACalcSlots`: slots are 8 bytes.
pub fn lla2a_slots(elements: c_int, element_bytes: c_int) -> c_int {
    elements.wrapping_mul(element_bytes.wrapping_add(7) / 8)
}
