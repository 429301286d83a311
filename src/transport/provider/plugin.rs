//! Providers in libraries of their own: `include/strata_plugin.h`, version 2.
//!
//! A rank opens only libraries that its own environment names, whatever rank 0's settings say. A library is never closed again. Each
//! function is called by one thread at a time for one handle.

use super::{
    BlockList, CollectiveProvider, MostBytes, Opened, ProvidedKind, ProviderCall, ProviderKind, Refused, UnevenBlocks,
};
use crate::config::Config;
use crate::dtype::{Operator, RedOp};
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::plan::Collective;
use crate::transport::mpi::together::{together, ROUND};
use crate::transport::shm::wakeup::Wakeups;
use crate::transport::{card, Exchange, Site};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The version of everything below. It changes whenever anything here does, but for what is added at the end of a structure.
pub const VERSION: u32 = 2;
/// The function that a plugin exports: `const strata_provider *strata_provider_plugin(void)`.
const SYMBOL: &[u8] = b"strata_provider_plugin\0";
/// Bytes that a rank may tell the others.
pub const BLOB_BYTES: usize = 4096;
/// Bytes of a text that says why something failed, its zero byte included.
pub const TEXT_BYTES: usize = 256;
/// Between two looks whether a plugin is connected.
const PAUSE: Duration = Duration::from_micros(200);
/// What a function returns that has succeeded.
const SUCCESS: c_int = 0;

/// `strata_provider_site`
#[repr(C)]
struct PluginSite {
    size: u32,
    rank: i32,
    nranks: i32,
    nnodes: i32,
    nodes: *const i32,
}

/// `strata_provider_call`
#[repr(C)]
struct PluginCall {
    size: u32,
    collective: i32,
    dtype: i32,
    op: i32,
    root: i32,
    in_place: i32,
    send: *const c_void,
    recv: *mut c_void,
    count: u64,
    elem_bytes: u64,
    send_counts: *const u64,
    send_places: *const u64,
    recv_counts: *const u64,
    recv_places: *const u64,
}

type Open = unsafe extern "C" fn(*const PluginSite, *mut *mut c_void, *mut c_void, *mut usize, *mut c_char) -> c_int;
type Connect = unsafe extern "C" fn(*mut c_void, *const *const c_void, *const usize, *mut c_int, *mut c_char) -> c_int;
type MostBytesOf = unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, c_int) -> u64;
type Start = unsafe extern "C" fn(*mut c_void, *const PluginCall, *mut *mut c_void, *mut c_char) -> c_int;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut c_char) -> c_int;
type OfHandle = unsafe extern "C" fn(*mut c_void);

/// `strata_provider`, as a library may have filled it in.
#[repr(C)]
struct PluginTable {
    version: u32,
    size: u32,
    name: *const c_char,
    open: Option<Open>,
    connect: Option<Connect>,
    most_bytes: Option<MostBytesOf>,
    start: Option<Start>,
    test: Option<Test>,
    abort: Option<OfHandle>,
    close: Option<OfHandle>,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<PluginTable>() == 72 && offset_of!(PluginTable, close) == 64);
    assert!(size_of::<PluginSite>() == 24 && offset_of!(PluginSite, nodes) == 16);
    assert!(size_of::<PluginCall>() == 88 && offset_of!(PluginCall, recv_places) == 80);
};

type Entry = unsafe extern "C" fn() -> *const PluginTable;

/// The functions of a plugin.
#[derive(Clone, Copy)]
struct Functions {
    open: Open,
    connect: Connect,
    most_bytes: MostBytesOf,
    start: Start,
    test: Test,
    abort: OfHandle,
    close: OfHandle,
}

/// A plugin that has been loaded.
#[derive(Clone)]
struct Plugin {
    name: String,
    functions: Functions,
}

/// A plugin by its path.
pub struct PluginKind {
    path: String,
    loaded: std::result::Result<Plugin, String>,
}

/// A text that a plugin may write why something failed.
struct Why([u8; TEXT_BYTES]);

impl Why {
    fn place(&mut self) -> *mut c_char {
        self.0.as_mut_ptr().cast()
    }

    /// What went wrong, with the number that was returned.
    fn say(&self, doing: &str, code: c_int) -> String {
        // A text that fills its room has no end.
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(TEXT_BYTES);
        let text = String::from_utf8_lossy(&self.0[..end]).trim().replace('\n', " ");
        match text.is_empty() {
            true => format!("{doing} returned {code}"),
            false => format!("{doing} returned {code}: {text}"),
        }
    }
}

/// Makes a call of a plugin's that returns a number.
fn checked(doing: &str, call: impl FnOnce(&mut Why) -> c_int) -> std::result::Result<(), String> {
    let mut why = Why([0; TEXT_BYTES]);
    match call(&mut why) {
        SUCCESS => Ok(()),
        code => Err(why.say(doing, code)),
    }
}

fn load(path: &str) -> std::result::Result<Plugin, String> {
    let own = super::wanted(&Config::from_env().0.providers).unwrap_or_default();
    if own.iter().all(|wanted| wanted.what != path) {
        return Err(format!("STRATA_PROVIDERS does not name {path} here, as it does on rank 0"));
    }
    let why = |error: libloading::Error| {
        let text = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        format!("{path} cannot be used: {text}")
    };
    // SAFETY: the initialisers must be fit to run now; because whoever names the library says so.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(why)?;
    // SAFETY: the symbol must be a function of this type; because the header says so of its name.
    let entry = *unsafe { library.get::<Entry>(SYMBOL) }.map_err(why)?;
    std::mem::forget(library);
    // SAFETY: no requirement.
    let table = unsafe { entry() };
    let refuse = |what: &str| Err(format!("{path} is refused: {what}"));
    if table.is_null() {
        return refuse("it has no table of functions");
    }
    // SAFETY: two words must be readable; because a table of any version begins with them.
    let [version, size] = unsafe { table.cast::<[u32; 2]>().read() };
    if version != VERSION || (size as usize) < size_of::<PluginTable>() {
        let (ours, bytes) = (VERSION, size_of::<PluginTable>());
        return refuse(&format!(
            "its table is of version {version} ({size} bytes), and this library needs version {ours} ({bytes} bytes)"
        ));
    }
    // SAFETY: the table must be whole; because its version and size say so, and the library is never closed.
    let table = unsafe { table.read() };
    if table.name.is_null() {
        return refuse("it has no name");
    }
    // SAFETY: the name must end with a zero byte; because the header says that it is a C string.
    let name = unsafe { CStr::from_ptr(table.name) }.to_string_lossy().into_owned();
    let PluginTable { open, connect, most_bytes, start, test, abort, close, .. } = table;
    let functions = (|| {
        let (open, connect, most_bytes, start) = (open?, connect?, most_bytes?, start?);
        Some(Functions { open, connect, most_bytes, start, test: test?, abort: abort?, close: close? })
    })();
    match functions {
        _ if !crate::algorithms::is_provider_name(&name) => {
            refuse(&format!("its name is {name}, and a provider's has up to 32 letters, digits and _"))
        }
        _ if name == super::MPI => refuse("its name is mpi, which is MPI's"),
        Some(functions) => Ok(Plugin { name, functions }),
        None => refuse("its table lacks a function"),
    }
}

impl PluginKind {
    /// The plugin at this path, or why there is none.
    pub fn new(path: &str) -> PluginKind {
        PluginKind { path: path.to_string(), loaded: load(path) }
    }
}

impl ProviderKind for PluginKind {
    /// Of a plugin that could not be loaded, as its file is called.
    fn name(&self) -> String {
        self.loaded.as_ref().map_or_else(|_| name_of_file(&self.path), |plugin| plugin.name.clone())
    }

    fn open(
        &self,
        site: &Site<'_>,
        _: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<std::result::Result<Opened, Refused>> {
        let opened = self.loaded.clone().and_then(|plugin| PluginHandle::open(plugin, site));
        let card: Told =
            opened.as_ref().map(|(handle, blob)| (handle.plugin.name.clone(), blob.clone())).map_err(Clone::clone);
        let told = exchange.allgather(card::encode(&card))?;
        let mut all: Vec<Told> = Vec::with_capacity(told.len());
        for (rank, bytes) in told.iter().enumerate() {
            let strange = || Error::Remote(format!("rank {rank} told something else than how its plugin opened"));
            all.push(card::decode(bytes).ok_or_else(strange)?);
        }
        let name = all.iter().flatten().next().map_or_else(|| name_of_file(&self.path), |(name, _)| name.clone());
        let refused = |why: String| Ok(Err(Refused { name: name.clone(), why }));
        let mut blobs = Vec::with_capacity(all.len());
        for (rank, told) in all.into_iter().enumerate() {
            match told {
                Ok((other, _)) if other != name => {
                    return refused(format!("rank {rank} has the provider {other} there, others {name}"));
                }
                Ok((_, blob)) => blobs.push(blob),
                Err(why) => return refused(format!("rank {rank}: {why}")),
            }
        }
        // All ranks have seen the same, so each has a handle here.
        let (handle, _) = opened.map_err(Error::Internal)?;
        let limit = site.config.bootstrap_limit();
        match together(exchange, |meanwhile| handle.connect_within(&blobs, limit, meanwhile))? {
            Err(error) => refused(error.text().to_string()),
            Ok(()) => {
                let most = MostBytes::of(|kind| handle.most_bytes(kind));
                Ok(Ok(Opened { name, provider: Box::new(handle), most }))
            }
        }
    }
}

/// What a rank tells of its plugin: its name, and what the others have to know of the handle; or why there is none.
type Told = std::result::Result<(String, Vec<u8>), String>;

/// `foo` of `/path/libfoo.so`: the name of a plugin that no rank could ask for it.
fn name_of_file(path: &str) -> String {
    let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    stem.strip_prefix("lib").unwrap_or(&stem).to_string()
}

/// A plugin, open for one rank of one communicator.
struct PluginHandle {
    plugin: Plugin,
    handle: *mut c_void,
    /// The call that is under way, and its lists.
    request: Option<(*mut c_void, Option<Arc<UnevenBlocks>>)>,
    cancelled: bool,
}

// SAFETY: the handle must be usable from any thread, by one at a time; because the header asks that of plugins, and `&mut` gives it to
// one at a time.
unsafe impl Send for PluginHandle {}

impl fmt::Debug for PluginHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PluginHandle").field("name", &self.plugin.name).finish_non_exhaustive()
    }
}

/// A collective's number in the header.
fn collective_code(collective: Collective) -> c_int {
    match collective {
        Collective::AllReduce => 0,
        Collective::AllGather => 1,
        Collective::ReduceScatter => 2,
        Collective::Broadcast => 3,
        Collective::Reduce => 4,
        Collective::AllToAll => 5,
        Collective::Gather => 6,
        Collective::Scatter => 7,
        Collective::Custom => -1,
    }
}

/// An operation's number in the header: `ncclRedOp_t`'s, or Strata's own; -1 where data only moves.
fn operator_code(operator: Option<Operator>) -> c_int {
    let op = match operator {
        None => return -1,
        Some(Operator::Sum) => RedOp::Sum,
        Some(Operator::Prod) => RedOp::Prod,
        Some(Operator::Max) => RedOp::Max,
        Some(Operator::Min) => RedOp::Min,
        Some(Operator::And) => RedOp::BitAnd,
        Some(Operator::Or) => RedOp::BitOr,
        Some(Operator::Xor) => RedOp::BitXor,
    };
    op.code()
}

impl PluginHandle {
    /// Opens it; what this rank has to tell the others.
    fn open(plugin: Plugin, site: &Site<'_>) -> std::result::Result<(PluginHandle, Vec<u8>), String> {
        let ranks = (0..site.grid.nranks()).map(crate::topo::Rank::from_index);
        let nodes: Vec<i32> = ranks.map(|rank| site.grid.node(rank).index() as i32).collect();
        let told = PluginSite {
            size: size_of::<PluginSite>() as u32,
            rank: site.me.0 as i32,
            nranks: nodes.len() as i32,
            nnodes: site.grid.nnodes() as i32,
            nodes: nodes.as_ptr(),
        };
        let (mut handle, mut blob, mut bytes) = (std::ptr::null_mut(), vec![0u8; BLOB_BYTES], BLOB_BYTES);
        let open = plugin.functions.open;
        let room = blob.as_mut_ptr().cast();
        checked("open", |why| {
            // SAFETY: all places must be valid, with the room that the header says; because they are locals of that size.
            unsafe { open(&told, &mut handle, room, &mut bytes, why.place()) }
        })?;
        let opened = PluginHandle { plugin, handle, request: None, cancelled: false };
        if bytes > BLOB_BYTES {
            return Err(format!("open told {bytes} bytes, and {BLOB_BYTES} are the most"));
        }
        blob.truncate(bytes);
        Ok((opened, blob))
    }

    /// Gives it what all ranks have told, until it is connected. Between whiles `meanwhile` is asked whether to go on.
    fn connect_within(
        &self,
        blobs: &[Vec<u8>],
        limit: Duration,
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let (begun, mut round) = (Instant::now(), Instant::now() + ROUND);
        while !self.connect(blobs).map_err(Error::System)? {
            if begun.elapsed() >= limit {
                return Err(Error::Timeout(format!("connect has not ended within {} ms", limit.as_millis())));
            }
            if Instant::now() >= round {
                meanwhile()?;
                round = Instant::now() + ROUND;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether it is connected.
    fn connect(&self, blobs: &[Vec<u8>]) -> std::result::Result<bool, String> {
        let places: Vec<*const c_void> = blobs.iter().map(|blob| blob.as_ptr().cast()).collect();
        let sizes: Vec<usize> = blobs.iter().map(Vec::len).collect();
        let (connect, places, sizes) = (self.plugin.functions.connect, places.as_ptr(), sizes.as_ptr());
        let mut done = 0;
        checked("connect", |why| {
            // SAFETY: the handle must be open and both lists have a place for each rank; because it was opened, and they have.
            unsafe { connect(self.handle, places, sizes, &mut done, why.place()) }
        })?;
        Ok(done != 0)
    }

    fn most_bytes(&self, kind: ProvidedKind) -> u64 {
        let (collective, dtype, op) =
            (collective_code(kind.collective), kind.dtype.code(), operator_code(kind.operator));
        let (most_bytes, uneven) = (self.plugin.functions.most_bytes, c_int::from(kind.uneven));
        // SAFETY: the handle must be open; because it is closed when this is dropped.
        unsafe { most_bytes(self.handle, collective, dtype, op, uneven) }
    }
}

/// Counts and places for C: null where there are no blocks, or blocks are of one size.
fn lists(list: Option<&BlockList>) -> (*const u64, *const u64) {
    match list.filter(|list| !list.counts.is_empty()) {
        Some(BlockList { counts, places }) => (counts.as_ptr(), places.as_ptr()),
        None => (std::ptr::null(), std::ptr::null()),
    }
}

/// An address for C: null where there are no bytes.
fn address(region: Region) -> *mut c_void {
    if region.is_empty() {
        std::ptr::null_mut()
    } else {
        region.as_ptr().cast()
    }
}

impl CollectiveProvider for PluginHandle {
    fn start(&mut self, call: &ProviderCall) -> Result<()> {
        let name = call.collective.name();
        if self.cancelled {
            return Err(Error::InvalidUsage(format!("{name} after the communicator has failed")));
        }
        let blocks = call.blocks.as_deref();
        let (send_counts, send_places) = lists(blocks.map(|blocks| &blocks.send));
        let (recv_counts, recv_places) = lists(blocks.map(|blocks| &blocks.recv));
        let told = PluginCall {
            size: size_of::<PluginCall>() as u32,
            collective: collective_code(call.collective),
            dtype: call.dtype.code(),
            op: operator_code(call.operator),
            root: call.root.0 as i32,
            in_place: i32::from(call.in_place),
            send: address(call.send),
            recv: address(call.recv),
            count: call.count as u64,
            elem_bytes: call.dtype.size() as u64,
            send_counts,
            send_places,
            recv_counts,
            recv_places,
        };
        let mut request = std::ptr::null_mut();
        let (start, handle) = (self.plugin.functions.start, self.handle);
        checked(&format!("start of {name}"), |why| {
            // SAFETY: the handle must be open, and the call's memory stay until it has ended; because it is closed when this is
            // dropped, whoever calls `start` keeps the memory until `test` has told the end or `cancel` has returned, and
            // `request` keeps the lists.
            unsafe { start(handle, &told, &mut request, why.place()) }
        })
        .map_err(Error::System)?;
        self.request = Some((request, call.blocks.clone()));
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        let Some((request, _)) = self.request else { return Ok(true) };
        let (test, handle, mut done) = (self.plugin.functions.test, self.handle, 0);
        let outcome = checked("test", |why| {
            // SAFETY: the handle must be open and the request have been started and not ended; because the one is closed when
            // this is dropped, and the other is forgotten at its end.
            unsafe { test(handle, request, &mut done, why.place()) }
        });
        if outcome.is_err() || done != 0 {
            self.request = None;
        }
        outcome.map_err(Error::Remote)?;
        Ok(done != 0)
    }

    fn cancel(&mut self) {
        if !std::mem::replace(&mut self.cancelled, true) {
            // SAFETY: the handle must be open; because it is closed when this is dropped.
            unsafe { (self.plugin.functions.abort)(self.handle) };
            self.request = None;
        }
    }
}

impl Drop for PluginHandle {
    fn drop(&mut self) {
        if self.request.is_some() {
            // The memory of what is under way is the program's again.
            self.cancel();
        }
        // SAFETY: the handle must be open and not be used again; because it is dropped once.
        unsafe { (self.plugin.functions.close)(self.handle) };
    }
}
