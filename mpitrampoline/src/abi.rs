//! Constants of the ABI: handles, numbers, and what a data type is to Strata.
//!
//! MPItrampoline reads every one of them when it is loaded, also of what is not served. The values are ours to choose;
//! error classes have MPI 5's.

// Names are MPI's.
#![allow(non_upper_case_globals)]

use std::ffi::c_int;

/// `MPIABI_Comm` and all other handles.
pub type Handle = usize;

/// `MPIABI_Status`
#[repr(C)]
pub struct Status {
    of_mpi: [usize; 3],
    /// `MPI_SOURCE`
    pub source: c_int,
    /// `MPI_TAG`
    pub tag: c_int,
    /// `MPI_ERROR`
    pub error: c_int,
}

/// Data types of `nccl.h` and `strata.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Element {
    /// `ncclInt8`
    Int8 = 0,
    /// `ncclUint8`
    Uint8 = 1,
    /// `ncclInt32`
    Int32 = 2,
    /// `ncclUint32`
    Uint32 = 3,
    /// `ncclInt64`
    Int64 = 4,
    /// `ncclUint64`
    Uint64 = 5,
    /// `ncclFloat32`
    Float32 = 7,
    /// `ncclFloat64`
    Float64 = 8,
    /// `strataInt16`
    Int16 = 0x5354_000c,
    /// `strataUint16`
    Uint16 = 0x5354_000d,
}

impl Element {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Element::Int8 | Element::Uint8 => 1,
            Element::Int16 | Element::Uint16 => 2,
            Element::Int32 | Element::Uint32 | Element::Float32 => 4,
            Element::Int64 | Element::Uint64 | Element::Float64 => 8,
        }
    }
}

/// What an MPI data type is made of: so many elements of one kind. Two are a complex number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datatype {
    /// The element.
    pub element: Element,
    /// How many.
    pub elements: usize,
}

impl Datatype {
    /// Bytes of one.
    pub fn size(self) -> usize {
        self.elements * self.element.size()
    }

    /// Whether it is a complex number.
    pub fn is_complex(self) -> bool {
        self.elements == 2
    }
}

macro_rules! datatypes {
    (served { $($name:ident $value:literal = $elements:literal of $element:ident;)* }
     refused { $($other:ident $number:literal)* }) => {
        $(#[no_mangle] static $name: Handle = $value;)*
        $(#[no_mangle] static $other: Handle = $number;)*

        /// The data type of this handle, if it is served.
        pub fn datatype(handle: Handle) -> Option<Datatype> {
            match handle {
                $($value => Some(Datatype { element: Element::$element, elements: $elements }),)*
                _ => None,
            }
        }
    };
}

datatypes! {
    served {
        MPIABI_BYTE 0x200 = 1 of Uint8;
        MPIABI_CHAR 0x201 = 1 of Int8;
        MPIABI_SIGNED_CHAR 0x202 = 1 of Int8;
        MPIABI_UNSIGNED_CHAR 0x203 = 1 of Uint8;
        MPIABI_SHORT 0x204 = 1 of Int16;
        MPIABI_UNSIGNED_SHORT 0x205 = 1 of Uint16;
        MPIABI_INT 0x206 = 1 of Int32;
        MPIABI_UNSIGNED 0x207 = 1 of Uint32;
        MPIABI_LONG 0x208 = 1 of Int64;
        MPIABI_UNSIGNED_LONG 0x209 = 1 of Uint64;
        MPIABI_LONG_LONG 0x20a = 1 of Int64;
        MPIABI_LONG_LONG_INT 0x20b = 1 of Int64;
        MPIABI_UNSIGNED_LONG_LONG 0x20c = 1 of Uint64;
        MPIABI_FLOAT 0x20d = 1 of Float32;
        MPIABI_DOUBLE 0x20e = 1 of Float64;
        MPIABI_INT8_T 0x20f = 1 of Int8;
        MPIABI_INT16_T 0x210 = 1 of Int16;
        MPIABI_INT32_T 0x211 = 1 of Int32;
        MPIABI_INT64_T 0x212 = 1 of Int64;
        MPIABI_UINT8_T 0x213 = 1 of Uint8;
        MPIABI_UINT16_T 0x214 = 1 of Uint16;
        MPIABI_UINT32_T 0x215 = 1 of Uint32;
        MPIABI_UINT64_T 0x216 = 1 of Uint64;
        MPIABI_C_COMPLEX 0x217 = 2 of Float32;
        MPIABI_C_FLOAT_COMPLEX 0x218 = 2 of Float32;
        MPIABI_C_DOUBLE_COMPLEX 0x219 = 2 of Float64;
        MPIABI_CXX_FLOAT_COMPLEX 0x21a = 2 of Float32;
        MPIABI_CXX_DOUBLE_COMPLEX 0x21b = 2 of Float64;
        MPIABI_AINT 0x21c = 1 of Int64;
        MPIABI_COUNT 0x21d = 1 of Int64;
        MPIABI_OFFSET 0x21e = 1 of Int64;
    }
    refused {
        MPIABI_2DOUBLE_PRECISION 0x240
        MPIABI_2INT 0x241
        MPIABI_2INTEGER 0x242
        MPIABI_2REAL 0x243
        MPIABI_CHARACTER 0x244
        MPIABI_COMPLEX 0x245
        MPIABI_COMPLEX16 0x246
        MPIABI_COMPLEX32 0x247
        MPIABI_COMPLEX8 0x248
        MPIABI_CXX_BOOL 0x249
        MPIABI_CXX_LONG_DOUBLE_COMPLEX 0x24a
        MPIABI_C_BOOL 0x24b
        MPIABI_C_LONG_DOUBLE_COMPLEX 0x24c
        MPIABI_DATATYPE_NULL 0x24d
        MPIABI_DOUBLE_COMPLEX 0x24e
        MPIABI_DOUBLE_INT 0x24f
        MPIABI_DOUBLE_PRECISION 0x250
        MPIABI_FLOAT_INT 0x251
        MPIABI_INTEGER 0x252
        MPIABI_INTEGER1 0x253
        MPIABI_INTEGER2 0x254
        MPIABI_INTEGER4 0x255
        MPIABI_INTEGER8 0x256
        MPIABI_LOGICAL 0x257
        MPIABI_LONG_DOUBLE 0x258
        MPIABI_LONG_DOUBLE_INT 0x259
        MPIABI_LONG_INT 0x25a
        MPIABI_PACKED 0x25b
        MPIABI_REAL 0x25c
        MPIABI_REAL16 0x25d
        MPIABI_REAL4 0x25e
        MPIABI_REAL8 0x25f
        MPIABI_SHORT_INT 0x260
        MPIABI_WCHAR 0x261
    }
}

/// Numbers, each an `int`.
macro_rules! numbers {
    ($($name:ident $value:literal)*) => {
        $(#[no_mangle] static $name: c_int = $value;)*

        /// The numbers, for Rust.
        #[allow(dead_code, missing_docs, non_upper_case_globals)]
        pub mod number {
            $(pub const $name: std::ffi::c_int = $value;)*
        }
    };
}

numbers! {
    MPIABI_ANY_SOURCE -1
    MPIABI_ANY_TAG -1
    MPIABI_PROC_NULL -2
    MPIABI_ROOT -3
    MPIABI_CART 1
    MPIABI_DIST_GRAPH 2
    MPIABI_GRAPH 3
    MPIABI_CONGRUENT 4
    MPIABI_IDENT 5
    MPIABI_SIMILAR 6
    MPIABI_UNEQUAL 7
    MPIABI_BSEND_OVERHEAD 8
    MPIABI_KEYVAL_INVALID -1
    MPIABI_UNDEFINED -32766
    MPIABI_APPNUM 9
    MPIABI_HOST 10
    MPIABI_IO 11
    MPIABI_LASTUSEDCODE 12
    MPIABI_TAG_UB 13
    MPIABI_UNIVERSE_SIZE 14
    MPIABI_WIN_BASE 15
    MPIABI_WIN_CREATE_FLAVOR 16
    MPIABI_WIN_DISP_UNIT 17
    MPIABI_WIN_MODEL 18
    MPIABI_WIN_SIZE 19
    MPIABI_WTIME_IS_GLOBAL 20
    MPIABI_COMBINER_CONTIGUOUS 21
    MPIABI_COMBINER_DARRAY 22
    MPIABI_COMBINER_DUP 23
    MPIABI_COMBINER_F90_COMPLEX 24
    MPIABI_COMBINER_F90_INTEGER 25
    MPIABI_COMBINER_F90_REAL 26
    MPIABI_COMBINER_HINDEXED 27
    MPIABI_COMBINER_HINDEXED_BLOCK 28
    MPIABI_COMBINER_HVECTOR 29
    MPIABI_COMBINER_INDEXED 30
    MPIABI_COMBINER_INDEXED_BLOCK 31
    MPIABI_COMBINER_NAMED 32
    MPIABI_COMBINER_RESIZED 33
    MPIABI_COMBINER_STRUCT 34
    MPIABI_COMBINER_SUBARRAY 35
    MPIABI_COMBINER_VECTOR 36
    MPIABI_COMM_TYPE_SHARED 37
    MPIABI_DISTRIBUTE_BLOCK 38
    MPIABI_DISTRIBUTE_CYCLIC 39
    MPIABI_DISTRIBUTE_DFLT_DARG 40
    MPIABI_DISTRIBUTE_NONE 41
    MPIABI_ERR_ACCESS 20
    MPIABI_ERR_AMODE 21
    MPIABI_ERR_ARG 13
    MPIABI_ERR_ASSERT 22
    MPIABI_ERR_BAD_FILE 23
    MPIABI_ERR_BASE 24
    MPIABI_ERR_BUFFER 1
    MPIABI_ERR_COMM 5
    MPIABI_ERR_CONVERSION 25
    MPIABI_ERR_COUNT 2
    MPIABI_ERR_DIMS 12
    MPIABI_ERR_DISP 26
    MPIABI_ERR_DUP_DATAREP 27
    MPIABI_ERR_FILE 28
    MPIABI_ERR_FILE_EXISTS 29
    MPIABI_ERR_FILE_IN_USE 30
    MPIABI_ERR_GROUP 9
    MPIABI_ERR_INFO 31
    MPIABI_ERR_INFO_KEY 32
    MPIABI_ERR_INFO_NOKEY 33
    MPIABI_ERR_INFO_VALUE 34
    MPIABI_ERR_INTERN 17
    MPIABI_ERR_IN_STATUS 19
    MPIABI_ERR_IO 35
    MPIABI_ERR_KEYVAL 36
    MPIABI_ERR_LASTCODE 1000
    MPIABI_ERR_LOCKTYPE 37
    MPIABI_ERR_NAME 38
    MPIABI_ERR_NOT_SAME 39
    MPIABI_ERR_NO_MEM 40
    MPIABI_ERR_NO_SPACE 41
    MPIABI_ERR_NO_SUCH_FILE 42
    MPIABI_ERR_OP 10
    MPIABI_ERR_OTHER 16
    MPIABI_ERR_PENDING 18
    MPIABI_ERR_PORT 43
    MPIABI_ERR_QUOTA 44
    MPIABI_ERR_RANK 6
    MPIABI_ERR_READ_ONLY 45
    MPIABI_ERR_REQUEST 7
    MPIABI_ERR_RMA_ATTACH 46
    MPIABI_ERR_RMA_CONFLICT 47
    MPIABI_ERR_RMA_FLAVOR 48
    MPIABI_ERR_RMA_RANGE 49
    MPIABI_ERR_RMA_SHARED 50
    MPIABI_ERR_RMA_SYNC 51
    MPIABI_ERR_ROOT 8
    MPIABI_ERR_SERVICE 52
    MPIABI_ERR_SIZE 53
    MPIABI_ERR_SPAWN 54
    MPIABI_ERR_TAG 4
    MPIABI_ERR_TOPOLOGY 11
    MPIABI_ERR_TRUNCATE 15
    MPIABI_ERR_TYPE 3
    MPIABI_ERR_UNKNOWN 14
    MPIABI_ERR_UNSUPPORTED_DATAREP 55
    MPIABI_ERR_UNSUPPORTED_OPERATION 56
    MPIABI_ERR_WIN 57
    MPIABI_SUCCESS 0
    MPIABI_LOCK_EXCLUSIVE 42
    MPIABI_LOCK_SHARED 43
    MPIABI_MODE_APPEND 44
    MPIABI_MODE_CREATE 45
    MPIABI_MODE_DELETE_ON_CLOSE 46
    MPIABI_MODE_EXCL 47
    MPIABI_MODE_NOCHECK 48
    MPIABI_MODE_NOPRECEDE 49
    MPIABI_MODE_NOPUT 50
    MPIABI_MODE_NOSTORE 51
    MPIABI_MODE_NOSUCCEED 52
    MPIABI_MODE_RDONLY 53
    MPIABI_MODE_RDWR 54
    MPIABI_MODE_SEQUENTIAL 55
    MPIABI_MODE_UNIQUE_OPEN 56
    MPIABI_MODE_WRONLY 57
    MPIABI_ORDER_C 58
    MPIABI_ORDER_FORTRAN 59
    MPIABI_SEEK_CUR 60
    MPIABI_SEEK_END 61
    MPIABI_SEEK_SET 62
    MPIABI_THREAD_FUNNELED 1
    MPIABI_THREAD_MULTIPLE 3
    MPIABI_THREAD_SERIALIZED 2
    MPIABI_THREAD_SINGLE 0
    MPIABI_TYPECLASS_COMPLEX 63
    MPIABI_TYPECLASS_INTEGER 64
    MPIABI_TYPECLASS_REAL 65
    MPIABI_WIN_FLAVOR_ALLOCATE 66
    MPIABI_WIN_FLAVOR_CREATE 67
    MPIABI_WIN_FLAVOR_DYNAMIC 68
    MPIABI_WIN_FLAVOR_SHARED 69
    MPIABI_WIN_SEPARATE 70
    MPIABI_WIN_UNIFIED 71
}

/// Handles and addresses, each of a pointer's size.
macro_rules! words {
    ($($name:ident $value:literal)*) => {
        $(#[no_mangle] static $name: Handle = $value;)*

        /// The handles and addresses, for Rust.
        #[allow(dead_code, missing_docs, non_upper_case_globals)]
        pub mod word {
            $(pub const $name: usize = $value;)*
        }
    };
}

words! {
    MPIABI_ARGV_NULL 0
    MPIABI_ARGVS_NULL 0
    MPIABI_ERRCODES_IGNORE 0
    MPIABI_UNWEIGHTED 0
    MPIABI_WEIGHTS_EMPTY 0
    MPIABI_BOTTOM 0
    MPIABI_IN_PLACE 1
    MPIABI_COMM_NULL 0x100
    MPIABI_COMM_SELF 0x102
    MPIABI_COMM_WORLD 0x101
    MPIABI_COMM_DUP_FN 0
    MPIABI_COMM_NULL_COPY_FN 0
    MPIABI_COMM_NULL_DELETE_FN 0
    MPIABI_DUP_FN 0
    MPIABI_NULL_COPY_FN 0
    MPIABI_CONVERSION_FN_NULL 0
    MPIABI_NULL_DELETE_FN 0
    MPIABI_ERRHANDLER_NULL 0x140
    MPIABI_ERRORS_ARE_FATAL 0x141
    MPIABI_ERRORS_RETURN 0x143
    MPIABI_FILE_NULL 0x400
    MPIABI_F_STATUS_IGNORE 0
    MPIABI_F_STATUSES_IGNORE 0
    MPIABI_GROUP_EMPTY 0x401
    MPIABI_GROUP_NULL 0x402
    MPIABI_INFO_ENV 0x403
    MPIABI_INFO_NULL 0x404
    MPIABI_MESSAGE_NO_PROC 0x405
    MPIABI_MESSAGE_NULL 0x406
    MPIABI_DISPLACEMENT_CURRENT 0x407
    MPIABI_BAND 0x28
    MPIABI_BOR 0x29
    MPIABI_BXOR 0x2a
    MPIABI_LAND 0x30
    MPIABI_LOR 0x31
    MPIABI_LXOR 0x32
    MPIABI_MAX 0x23
    MPIABI_MAXLOC 0x39
    MPIABI_MIN 0x22
    MPIABI_MINLOC 0x38
    MPIABI_NO_OP 0x3d
    MPIABI_OP_NULL 0x20
    MPIABI_PROD 0x24
    MPIABI_REPLACE 0x3c
    MPIABI_SUM 0x21
    MPIABI_REQUEST_NULL 0
    MPIABI_STATUS_IGNORE 0
    MPIABI_STATUSES_IGNORE 0
    MPIABI_TYPE_DUP_FN 0
    MPIABI_TYPE_NULL_COPY_FN 0
    MPIABI_TYPE_NULL_DELETE_FN 0
    MPIABI_WIN_NULL 0x408
    MPIABI_WIN_DUP_FN 0
    MPIABI_WIN_NULL_COPY_FN 0
    MPIABI_WIN_NULL_DELETE_FN 0
}

/// Versions that MPItrampoline compares.
mod versions {
    use super::c_int;

    numbers! {
        mpiabi_version_major 2
        mpiabi_version_minor 10
        mpiabi_version_patch 0
        mpiwrapper_version_major 2
        mpiwrapper_version_minor 11
        mpiwrapper_version_patch 0
    }
}

/// MPItrampoline calls it once, for programs in Fortran.
#[no_mangle]
extern "C" fn mpiwrapper_export_fortran_constants_() {}
