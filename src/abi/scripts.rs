//! RCCL's calls for scripts: load one, run it, forget it.
#![forbid(unsafe_code)]

use super::handles;
use super::operations::{self, ScriptCall};
use crate::communicator::group;
use crate::error::{Error, Result};
use crate::interface::pointer::{Buffer, ConstBuffer, ConstPtr, Ptr, Text};
use crate::interface::types::{CommHandle, OpCode, StreamHandle, TypeCode};
use crate::script::store::{self, Steps};
use crate::script::LoadedScript;
use crate::sync::locked;
use std::ffi::c_int;
use std::path::Path;
use std::sync::Mutex;

/// What handles stand for: their place here. One that has been unloaded is not given again.
static HANDLES: Mutex<Vec<Option<&'static LoadedScript>>> = Mutex::new(Vec::new());

/// `mscclLoadAlgo`: every rank loads the same file. `rank` is of no consequence.
pub fn load(path: Text, handle: Ptr<c_int>, _rank: c_int) -> Result<()> {
    let path = path.get("mscclAlgoFilePath")?;
    handle.set("mscclAlgoHandle", -1)?;
    let script = store::load_file(Path::new(&path), None, Steps::Merged)?;
    let mut handles = locked(&HANDLES);
    let number = c_int::try_from(handles.len()).map_err(|_| Error::InvalidUsage("too many programs".to_string()))?;
    handle.set("mscclAlgoHandle", number)?;
    handles.push(Some(script));
    Ok(())
}

/// `mscclUnloadAlgo`
pub fn unload(handle: c_int) -> Result<()> {
    let mut handles = locked(&HANDLES);
    let place = usize::try_from(handle).ok().and_then(|handle| handles.get_mut(handle));
    place.and_then(Option::take).map(|_| ()).ok_or_else(|| unknown(handle))
}

fn unknown(handle: c_int) -> Error {
    Error::InvalidUsage(format!("mscclAlgoHandle {handle} stands for no program that is loaded"))
}

/// `ncclCustomCollective`: the collective that a program says, by its place in `MSCCL_XML_FILES`; of one with a root, with that.
#[allow(clippy::too_many_arguments)]
pub fn custom(
    send: ConstBuffer,
    recv: Buffer,
    count: usize,
    dtype: TypeCode,
    op: OpCode,
    number: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    let script = group::noted(handles::find(comm).and_then(|handle| handle.usable()?.scripts().numbered(number)))?;
    let root = script.root.0 as c_int;
    operations::by_script(ScriptCall { script, send, recv, count, dtype, op, root, comm, stream })
}

/// `mscclRunAlgo`: the collective that the program says, on `count` elements of a block, reduced by `op` where it reduces.
#[allow(clippy::too_many_arguments)]
pub fn run(
    send: ConstBuffer,
    send_counts: ConstPtr<usize>,
    send_places: ConstPtr<usize>,
    recv: Buffer,
    recv_counts: ConstPtr<usize>,
    recv_places: ConstPtr<usize>,
    count: usize,
    dtype: TypeCode,
    root: c_int,
    _peer: c_int,
    op: OpCode,
    handle: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    if [send_counts, send_places, recv_counts, recv_places].iter().any(|list| !list.is_null()) {
        let text = "a program for a vectored collective: its counts and displacements must be null";
        return Err(Error::InvalidUsage(text.to_string()));
    }
    let known = usize::try_from(handle).ok().and_then(|handle| locked(&HANDLES).get(handle).copied().flatten());
    let script = known.ok_or_else(|| unknown(handle))?;
    operations::by_script(ScriptCall { script, send, recv, count, dtype, op, root, comm, stream })
}
