//! The types of the C interface: how each argument is spelt in C, and what is required of it before it is used.
//!
//! Values of these types come from C programs, so each is only a number until it is checked.
#![forbid(unsafe_code)]

use crate::dtype::{DataType, RedOp};
use crate::error::{Error, Result};
use std::ffi::c_int;

/// A type of the C interface.
pub trait CType {
    /// Whether it names a communicator.
    const IS_COMMUNICATOR: bool = false;

    /// How it is written in C.
    fn c() -> String;

    /// Itself, if it is a communicator's name.
    fn communicator(&self) -> Option<CommHandle> {
        None
    }

    /// What it names that NCCL does not have, if it is a data type or an operation of Strata's own.
    fn beyond_nccl(&self) -> Option<&'static str> {
        None
    }

    /// What is wrong with it where it must be given; whether a communicator is alive is not known here.
    fn required(&self, _name: &str) -> Result<()> {
        Ok(())
    }
}

/// The error for an argument that must not be null.
pub fn null(name: &str) -> Error {
    Error::InvalidArgument(format!("{name} argument is NULL"))
}

macro_rules! numbers {
    ($($rust:ty = $c:literal),* $(,)?) => { $(
        impl CType for $rust {
            fn c() -> String {
                $c.to_string()
            }
        }
    )* };
}

numbers! {
    () = "void", c_int = "int", u32 = "unsigned int", usize = "size_t", f32 = "float",
    i8 = "int8_t", i16 = "int16_t", i64 = "int64_t", u8 = "uint8_t", u16 = "uint16_t", u64 = "uint64_t",
}

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $c:literal $(, $beyond:expr)?;)*) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(pub c_int);

        impl CType for $name {
            fn c() -> String {
                $c.to_string()
            }

            $(
                fn beyond_nccl(&self) -> Option<&'static str> {
                    let name: fn(c_int) -> Option<&'static str> = $beyond;
                    name(self.0)
                }
            )?
        }
    )* };
}

codes! {
    /// A result code.
    Status = "ncclResult_t";
    /// An element type, not yet checked.
    TypeCode = "ncclDataType_t", |code| {
        DataType::from_code(code).filter(|dtype| !dtype.is_nccl()).map(DataType::name)
    };
    /// A reduction, not yet checked.
    OpCode = "ncclRedOp_t", |code| RedOp::from_code(code).filter(|op| !op.is_nccl()).map(RedOp::name);
    /// Where a scalar lives, not yet checked.
    Residence = "ncclScalarResidence_t";
    /// Which memory statistic is asked for, not yet checked.
    MemStat = "ncclCommMemStat_t";
    /// How CFT teams are formed, not yet checked.
    CftTeamMode = "ncclCftTeamMode_t";
}

impl Status {
    /// `ncclSuccess`
    pub const SUCCESS: Status = Status(crate::error::SUCCESS);
}

impl TypeCode {
    /// The element type.
    pub fn get(self) -> Result<DataType> {
        DataType::from_code(self.0).ok_or_else(|| Error::InvalidArgument(format!("invalid data type {}", self.0)))
    }
}

macro_rules! opaque {
    ($($(#[doc = $doc:literal])+ $name:ident = $c:literal;)*) => { $(
        $(#[doc = $doc])+
        #[repr(C)]
        pub struct $name([u8; 0]);

        impl CType for $name {
            fn c() -> String {
                $c.to_string()
            }
        }
    )* };
}

opaque! {
    /// What kernels need of a communicator.
    DevComm = "ncclDevComm_t";
    /// What kernels will need of a communicator.
    DevCommRequirements = "ncclDevCommRequirements_t";
    /// Resources for kernels.
    DevResourceRequirements = "ncclDevResourceRequirements_t";
    /// A barrier over ranks that reach each other's memory.
    LsaBarrierHandle = "ncclLsaBarrierHandle_t";
    /// A barrier over the network.
    GinBarrierHandle = "ncclGinBarrierHandle_t";
    /// A network outbox.
    GinOutboxHandle = "ncclGinOutboxHandle_t";
    /// A network inbox.
    GinInboxHandle = "ncclGinInboxA2AHandle_t";
    /// A low-latency all-to-all.
    Lla2aHandle = "ncclLLA2AHandle_t";
    /// Signals to wait for.
    WaitSignalDesc = "ncclWaitSignalDesc_t";
}

macro_rules! handles {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub usize);

        impl $name {
            /// No such thing.
            pub const NULL: $name = $name(0);

            /// Whether there is none.
            pub fn is_null(self) -> bool {
                self == Self::NULL
            }
        }
    )* };
    (named $($name:ident = $c:literal),* $(,)?) => { $(
        impl CType for $name {
            fn c() -> String {
                $c.to_string()
            }

            fn required(&self, name: &str) -> Result<()> {
                match self.is_null() {
                    true => Err(null(name)),
                    false => Ok(()),
                }
            }
        }
    )* };
}

handles! {
    /// A name for a communicator, never an address.
    CommHandle;
    /// A stream: null, one of ours, or something of CUDA's.
    StreamHandle;
    /// A mark in the order of a host stream.
    EventHandle;
    /// A memory window.
    Window;
    /// A parameter.
    ParamHandle;
    /// What multicast windows share.
    MultimemHandle;
}

handles! {
    named EventHandle = "strataEvent_t", Window = "ncclWindow_t", ParamHandle = "ncclParamHandle_t",
}

impl CType for StreamHandle {
    fn c() -> String {
        "cudaStream_t".to_string()
    }
}

impl CType for MultimemHandle {
    fn c() -> String {
        "ncclMultimemHandle_t".to_string()
    }
}

impl CType for CommHandle {
    const IS_COMMUNICATOR: bool = true;

    fn c() -> String {
        "ncclComm_t".to_string()
    }

    fn communicator(&self) -> Option<CommHandle> {
        Some(*self)
    }
}
