//! The library under test, by its C interface alone: any NCCL, and Strata's host streams where it has them.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::path::Path;

/// `ncclComm_t`
pub type Comm = *mut c_void;
/// `cudaStream_t`
pub type Stream = *mut c_void;
/// `ncclResult_t`
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const INVALID_ARGUMENT: Code = 4;
pub const IN_PROGRESS: Code = 7;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id(pub [u8; 128]);

const UNSET: c_int = c_int::MIN;

/// `ncclConfig_t` as of 2.31, of which only `blocking` is set.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    pub blocking: c_int,
    sizes: [c_int; 3],
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    name: *const c_char,
    others: [c_int; 15],
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER`
    pub fn new(blocking: bool) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 23203,
            blocking: c_int::from(blocking),
            sizes: [UNSET; 3],
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            name: std::ptr::null(),
            others: [UNSET; 15],
        }
    }
}

/// `ncclCollConfig_t`, with nothing set.
#[repr(C)]
pub struct CollConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    ext: *const c_void,
    numbers: [c_int; 4],
    algorithms: *const c_char,
    force: c_int,
    policy: c_int,
    tag: u64,
    event: *const c_void,
}

impl CollConfig {
    /// `NCCL_COLLCONFIG_INITIALIZER`
    pub fn new() -> CollConfig {
        CollConfig {
            size: size_of::<CollConfig>(),
            magic: 0xcafe_beef,
            version: 23203,
            ext: std::ptr::null(),
            numbers: [UNSET; 4],
            algorithms: std::ptr::null(),
            force: 1,
            policy: UNSET,
            tag: 0,
            event: std::ptr::null(),
        }
    }
}

const _: () = assert!(size_of::<Config>() == 120 && size_of::<CollConfig>() == 72);

/// Declares the functions of the library that programs call, and finds them by name.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
     ; $($other:ident = $name:literal: fn($($kind:ty),*) -> $out:ty;)*) => {
        /// The functions of a library.
        pub struct Library {
            _file: libloading::Library,
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub $other: Option<unsafe extern "C" fn($($kind),*) -> $out>,)*
        }

        impl Library {
            /// Opens a library.
            pub fn open(path: &Path) -> Result<Library, String> {
                let said = |error: libloading::Error| format!("{}: {error}", path.display());
                // SAFETY: its initialisers must be fit to run; because it is an NCCL, which starts nothing at load.
                let file = unsafe { libloading::Library::new(path) }.map_err(said)?;
                Ok(Library {
                    $($field: {
                        // SAFETY: the function must have this type; because nccl.h declares it so.
                        *unsafe { file.get($symbol) }.map_err(said)?
                    },)*
                    $($other: {
                        // SAFETY: the function must have this type; because strata.h or nccl.h declares it so.
                        unsafe { file.get($name) }.ok().map(|found| *found)
                    },)*
                    _file: file,
                })
            }
        }
    };
}

type Rooted = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
/// The type of `ncclGather`, `ncclScatter` and `ncclBroadcast`.
pub type RootedFn = Rooted;

functions! {
    get_unique_id = b"ncclGetUniqueId": fn(*mut Id) -> Code;
    init_rank = b"ncclCommInitRank": fn(*mut Comm, c_int, Id, c_int) -> Code;
    init_rank_config = b"ncclCommInitRankConfig": fn(*mut Comm, c_int, Id, c_int, *mut Config) -> Code;
    init_all = b"ncclCommInitAll": fn(*mut Comm, c_int, *const c_int) -> Code;
    split = b"ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> Code;
    finalize = b"ncclCommFinalize": fn(Comm) -> Code;
    destroy = b"ncclCommDestroy": fn(Comm) -> Code;
    abort = b"ncclCommAbort": fn(Comm) -> Code;
    async_error = b"ncclCommGetAsyncError": fn(Comm, *mut Code) -> Code;
    count = b"ncclCommCount": fn(Comm, *mut c_int) -> Code;
    user_rank = b"ncclCommUserRank": fn(Comm, *mut c_int) -> Code;
    last_error = b"ncclGetLastError": fn(Comm) -> *const c_char;
    mem_alloc = b"ncclMemAlloc": fn(*mut *mut c_void, usize) -> Code;
    mem_free = b"ncclMemFree": fn(*mut c_void) -> Code;
    register = b"ncclCommRegister": fn(Comm, *mut c_void, usize, *mut *mut c_void) -> Code;
    deregister = b"ncclCommDeregister": fn(Comm, *mut c_void) -> Code;
    create_pre_mul_sum = b"ncclRedOpCreatePreMulSum": fn(*mut c_int, *mut c_void, c_int, c_int, Comm) -> Code;
    destroy_op = b"ncclRedOpDestroy": fn(c_int, Comm) -> Code;
    all_reduce = b"ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    broadcast = b"ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    bcast = b"ncclBcast": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    reduce = b"ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> Code;
    reduce_scatter = b"ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    all_gather = b"ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Code;
    send = b"ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    recv = b"ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    group_start = b"ncclGroupStart": fn() -> Code;
    group_end = b"ncclGroupEnd": fn() -> Code;
    ;
    alltoall = b"ncclAlltoAll": fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Code;
    gather = b"ncclGather": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    scatter = b"ncclScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Code;
    all_reduce_config = b"ncclAllReduceConfig":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream, *const CollConfig) -> Code;
    all_gather_config = b"ncclAllGatherConfig":
        fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream, *const CollConfig) -> Code;
    reduce_scatter_config = b"ncclReduceScatterConfig":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream, *const CollConfig) -> Code;
    broadcast_config = b"ncclBroadcastConfig":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream, *const CollConfig) -> Code;
    init_scalable = b"ncclCommInitRankScalable": fn(*mut Comm, c_int, c_int, c_int, *mut Id, *mut Config) -> Code;
    shrink = b"ncclCommShrink": fn(Comm, *mut c_int, c_int, *mut Comm, *mut Config, c_int) -> Code;
    grow = b"ncclCommGrow": fn(Comm, c_int, *const Id, c_int, *mut Comm, *mut Config) -> Code;
    comm_unique_id = b"ncclCommGetUniqueId": fn(Comm, *mut Id) -> Code;
    revoke = b"ncclCommRevoke": fn(Comm, c_int) -> Code;
    suspend = b"ncclCommSuspend": fn(Comm, c_int) -> Code;
    resume = b"ncclCommResume": fn(Comm) -> Code;
    stream_create = b"strataStreamCreate": fn(*mut Stream) -> Code;
    stream_destroy = b"strataStreamDestroy": fn(Stream) -> Code;
    stream_synchronize = b"strataStreamSynchronize": fn(Stream) -> Code;
    stream_add_callback = b"strataStreamAddCallback": fn(Stream, extern "C" fn(*mut c_void), *mut c_void) -> Code;
}

impl Library {
    /// The text of the last error.
    pub fn text(&self, comm: Comm) -> String {
        // SAFETY: the communicator must be alive or null; because callers pass what they hold.
        let text = unsafe { (self.last_error)(comm) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the text must end with a zero byte; because NCCL's texts do.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
