//! MPI as the standard ABI of MPI 5 has it: the dozen calls of the plugin, declared by hand.
//!
//! The ABI fixes handles as pointers, the numbers below and the layout of a status, so one build serves every MPI that
//! has a `libmpi_abi.so.1`. That library is opened at run time: the plugin is built without any MPI, and its calls reach
//! the MPI of the ABI also in a program with another one. The `mpi` crate cannot be used here: its C part (0.8.2) does not
//! compile with `mpicc_abi`. Source: MPI 5.0, chapter "Application Binary Interface".

// Names are MPI's.
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::OnceLock;

/// The ABI's library, by the name that it has with every MPI.
const LIBRARY: &str = "libmpi_abi.so.1";

/// Functions of MPI's library: `MPI_Foo` calls what the table has by that name.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> c_int;)*) => {
        struct Functions {
            library: Library,
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Functions {
            /// Of `library`. Where the program is linked with it, by the linker's order: a tool may stand in front of MPI.
            fn of(library: Library) -> Result<Functions, libloading::Error> {
                let program = Library::this();
                let scope = if is_in(&library, &program) { &program } else { &library };
                $(
                    // SAFETY: the symbol must be a function of this type; because the ABI says so of its name.
                    let $name = *unsafe { scope.get(concat!(stringify!($name), "\0").as_bytes()) }?;
                )*
                Ok(Functions { library, $($name),* })
            }
        }

        $(
            /// MPI's function of this name.
            ///
            /// # Safety
            /// What MPI asks of its callers.
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                match functions() {
                    // SAFETY: what MPI asks of its callers; because the caller has seen to it.
                    Ok(functions) => unsafe { (functions.$name)($($argument),*) },
                    Err(_) => MPI_ERR_OTHER,
                }
            }
        )*
    };
}

macro_rules! handles {
    ($($name:ident)*) => {
        $(
            /// A handle.
            #[derive(Debug, Clone, Copy)]
            #[repr(transparent)]
            pub struct $name(*mut c_void);
        )*
    };
}

handles! { MPI_Comm MPI_Datatype MPI_Errhandler MPI_Group MPI_Op MPI_Request }

/// What is known of a request that has ended.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MPI_Status {
    /// The sender.
    pub MPI_SOURCE: c_int,
    /// The tag.
    pub MPI_TAG: c_int,
    /// The error.
    pub MPI_ERROR: c_int,
    internal: [c_int; 5],
}

/// Copies an attribute along with its communicator, or does not.
pub type MPI_Comm_copy_attr_function =
    Option<unsafe extern "C" fn(MPI_Comm, c_int, *mut c_void, *mut c_void, *mut c_void, copied: *mut c_int) -> c_int>;
/// Hears that an attribute goes.
pub type MPI_Comm_delete_attr_function =
    Option<unsafe extern "C" fn(MPI_Comm, c_int, *mut c_void, *mut c_void) -> c_int>;

const fn value(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number)
}

pub const COMM_WORLD: MPI_Comm = MPI_Comm(value(0x101));
pub const COMM_SELF: MPI_Comm = MPI_Comm(value(0x102));
pub const ERRORS_RETURN: MPI_Errhandler = MPI_Errhandler(value(0x143));
pub const REQUEST_NULL: MPI_Request = MPI_Request(value(0x180));
pub const SUM: MPI_Op = MPI_Op(value(0x21));
pub const MIN: MPI_Op = MPI_Op(value(0x22));
pub const MAX: MPI_Op = MPI_Op(value(0x23));
pub const PROD: MPI_Op = MPI_Op(value(0x24));
pub const BAND: MPI_Op = MPI_Op(value(0x28));
pub const BOR: MPI_Op = MPI_Op(value(0x29));
pub const BXOR: MPI_Op = MPI_Op(value(0x2a));
pub const FLOAT: MPI_Datatype = MPI_Datatype(value(0x210));
pub const DOUBLE: MPI_Datatype = MPI_Datatype(value(0x214));
pub const INT8_T: MPI_Datatype = MPI_Datatype(value(0x240));
pub const UINT8_T: MPI_Datatype = MPI_Datatype(value(0x241));
pub const BYTE: MPI_Datatype = MPI_Datatype(value(0x247));
pub const INT16_T: MPI_Datatype = MPI_Datatype(value(0x248));
pub const UINT16_T: MPI_Datatype = MPI_Datatype(value(0x249));
pub const INT32_T: MPI_Datatype = MPI_Datatype(value(0x250));
pub const UINT32_T: MPI_Datatype = MPI_Datatype(value(0x251));
pub const INT64_T: MPI_Datatype = MPI_Datatype(value(0x258));
pub const UINT64_T: MPI_Datatype = MPI_Datatype(value(0x259));
pub const IN_PLACE: *mut c_void = value(1);
pub const ANY_SOURCE: c_int = -1;
pub const UNDEFINED: c_int = -32766;
pub const FUNNELED: c_int = 1024;
pub const SERIALIZED: c_int = 2048;
pub const MULTIPLE: c_int = 4096;

pub const MPI_ERR_BUFFER: c_int = 1;
pub const MPI_ERR_COUNT: c_int = 2;
pub const MPI_ERR_TYPE: c_int = 3;
pub const MPI_ERR_TAG: c_int = 4;
pub const MPI_ERR_COMM: c_int = 5;
pub const MPI_ERR_RANK: c_int = 6;
pub const MPI_ERR_REQUEST: c_int = 7;
pub const MPI_ERR_GROUP: c_int = 9;
pub const MPI_ERR_ARG: c_int = 13;
pub const MPI_ERR_TRUNCATE: c_int = 15;
pub const MPI_ERR_OTHER: c_int = 16;
pub const MPI_ERR_IN_STATUS: c_int = 19;
pub const MPI_ERR_NO_MEM: c_int = 39;

functions! {
    fn MPI_Get_library_version(version: *mut c_char, len: *mut c_int) -> c_int;
    fn MPI_Initialized(flag: *mut c_int) -> c_int;
    fn MPI_Finalized(flag: *mut c_int) -> c_int;
    fn MPI_Init_thread(
        argc: *mut c_int,
        argv: *mut *mut *mut c_char,
        required: c_int,
        provided: *mut c_int,
    ) -> c_int;
    fn MPI_Query_thread(provided: *mut c_int) -> c_int;
    fn MPI_Barrier(comm: MPI_Comm) -> c_int;
    fn MPI_Finalize() -> c_int;
    fn MPI_Comm_create_keyval(
        copy: MPI_Comm_copy_attr_function,
        delete: MPI_Comm_delete_attr_function,
        key: *mut c_int,
        extra: *mut c_void,
    ) -> c_int;
    fn MPI_Comm_set_attr(comm: MPI_Comm, key: c_int, value: *mut c_void) -> c_int;
    fn MPI_Comm_free_keyval(key: *mut c_int) -> c_int;
    fn MPI_Comm_rank(comm: MPI_Comm, rank: *mut c_int) -> c_int;
    fn MPI_Comm_size(comm: MPI_Comm, size: *mut c_int) -> c_int;
    fn MPI_Comm_group(comm: MPI_Comm, group: *mut MPI_Group) -> c_int;
    fn MPI_Group_incl(group: MPI_Group, n: c_int, ranks: *const c_int, new: *mut MPI_Group) -> c_int;
    fn MPI_Group_free(group: *mut MPI_Group) -> c_int;
    fn MPI_Comm_create_group(comm: MPI_Comm, group: MPI_Group, tag: c_int, new: *mut MPI_Comm) -> c_int;
    fn MPI_Comm_free(comm: *mut MPI_Comm) -> c_int;
    fn MPI_Comm_set_errhandler(comm: MPI_Comm, handler: MPI_Errhandler) -> c_int;
    fn MPI_Comm_get_errhandler(comm: MPI_Comm, handler: *mut MPI_Errhandler) -> c_int;
    fn MPI_Errhandler_free(handler: *mut MPI_Errhandler) -> c_int;
    fn MPI_Isend(
        bytes: *const c_void,
        count: c_int,
        datatype: MPI_Datatype,
        to: c_int,
        tag: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Irecv(
        bytes: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        from: c_int,
        tag: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Iallreduce(
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        op: MPI_Op,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Iallgather(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: c_int,
        received_type: MPI_Datatype,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ireduce_scatter_block(
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        op: MPI_Op,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ibcast(
        buffer: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ireduce(
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        datatype: MPI_Datatype,
        op: MPI_Op,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ialltoall(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: c_int,
        received_type: MPI_Datatype,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Igather(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: c_int,
        received_type: MPI_Datatype,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Iscatter(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: c_int,
        received_type: MPI_Datatype,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Iallgatherv(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: *const c_int,
        places: *const c_int,
        received_type: MPI_Datatype,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ireduce_scatter(
        send: *const c_void,
        recv: *mut c_void,
        received: *const c_int,
        datatype: MPI_Datatype,
        op: MPI_Op,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ialltoallv(
        send: *const c_void,
        sent: *const c_int,
        from: *const c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: *const c_int,
        to: *const c_int,
        received_type: MPI_Datatype,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Igatherv(
        send: *const c_void,
        sent: c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: *const c_int,
        places: *const c_int,
        received_type: MPI_Datatype,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Iscatterv(
        send: *const c_void,
        sent: *const c_int,
        places: *const c_int,
        sent_type: MPI_Datatype,
        recv: *mut c_void,
        received: c_int,
        received_type: MPI_Datatype,
        root: c_int,
        comm: MPI_Comm,
        request: *mut MPI_Request,
    ) -> c_int;
    fn MPI_Ibarrier(comm: MPI_Comm, request: *mut MPI_Request) -> c_int;
    fn MPI_Iprobe(from: c_int, tag: c_int, comm: MPI_Comm, flag: *mut c_int, status: *mut MPI_Status) -> c_int;
    fn MPI_Testsome(
        count: c_int,
        requests: *mut MPI_Request,
        done: *mut c_int,
        places: *mut c_int,
        statuses: *mut MPI_Status,
    ) -> c_int;
    fn MPI_Cancel(request: *mut MPI_Request) -> c_int;
    fn MPI_Test_cancelled(status: *const MPI_Status, flag: *mut c_int) -> c_int;
    fn MPI_Get_count(status: *const MPI_Status, datatype: MPI_Datatype, count: *mut c_int) -> c_int;
    fn MPI_Error_string(error: c_int, text: *mut c_char, len: *mut c_int) -> c_int;
    fn MPI_Error_class(error: c_int, class: *mut c_int) -> c_int;
}

fn functions() -> &'static Result<Functions, String> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        // SAFETY: the initialisers must be fit to run now; because an MPI's are made to run at any time.
        let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
        library.and_then(Functions::of).map_err(|error| {
            let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            format!("no MPI with the standard ABI of MPI 5 can be opened: {cause}")
        })
    })
}

/// Whether the program's functions of MPI are the library's, or stand in front of them.
fn is_in(library: &Library, program: &Library) -> bool {
    describe_of(library).is_some_and(|ours| describe_of(program) == Some(ours))
}

/// Where a library's question for its name is.
fn describe_of(library: &Library) -> Option<usize> {
    // SAFETY: the symbol must be a function of this type; because every MPI has it under this name.
    let found = *unsafe { library.get::<Describe>(b"MPI_Get_library_version\0") }.ok()?;
    Some(found as usize)
}

/// Why there is no MPI.
pub fn missing() -> Option<&'static str> {
    functions().as_ref().err().map(String::as_str)
}

/// A function that only some MPIs have.
pub fn extension(name: &CStr) -> Option<*mut c_void> {
    let functions = functions().as_ref().ok()?;
    let program = Library::this();
    let scope = if is_in(&functions.library, &program) { &program } else { &functions.library };
    // SAFETY: the symbol must not be used as another type than it has; because it is only looked for here.
    let found = unsafe { scope.get::<*mut c_void>(name.to_bytes_with_nul()) }.ok()?;
    Some(found.into_raw().cast())
}

/// MPI's own question for its name.
pub type Describe = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// The question for its name of another MPI that the program is linked with.
pub fn another() -> Option<Describe> {
    let ours = functions().as_ref().ok()?;
    // SAFETY: the symbol must be a function of this type; because every MPI has it under this name.
    let theirs = *unsafe { Library::this().get::<Describe>(b"MPI_Get_library_version\0") }.ok()?;
    (Some(theirs as usize) != describe_of(&ours.library)).then_some(theirs)
}
