//! The vendor's functions as Strata calls them itself.
//!
//! Handles and buffers are numbers here: they are the program's or the vendor's, and Strata never looks behind them.

use super::guard;
use super::library::Library;
use crate::error::Code;
use crate::interface::layouts::{Head, NcclConfig, Versioned};
use crate::interface::pointer::Text;
use crate::interface::signatures::NcclFunctions;
use crate::interface::types::Status;
use std::ffi::CStr;

/// A communicator of the vendor's.
pub type VendorComm = usize;
/// A stream of the program's.
pub type VendorStream = usize;
/// An address on the device.
pub type VendorAddress = usize;

/// How the names of communicators begin that Strata makes for the phases of its calls.
pub const SUB_NAMES: &str = "strata-";
/// The same of those of a node, where Strata carries what goes between nodes.
pub const INSIDE_NAMES: &str = "strata-inside";

/// `ncclInvalidUsage`, for a function that the vendor's library does not have.
const ABSENT: Code = 5;

impl Library {
    /// Calls a function of the vendor's, with the [guard] raised. Its code is the error.
    pub fn call(&self, call: impl FnOnce(&NcclFunctions) -> Option<Status>) -> Result<(), Code> {
        match guard::inside(|| call(&self.functions)) {
            Some(Status::SUCCESS) => Ok(()),
            Some(Status(code)) => Err(code),
            None => Err(ABSENT),
        }
    }

    /// Whether it can make communicators out of others and give out device memory.
    pub fn can_split(&self) -> bool {
        self.functions.ncclCommSplit.is_some() && self.functions.ncclMemAlloc.is_some()
    }

    /// Options for a communicator whose calls wait, with a name where the release knows names; all else is the vendor's
    /// default. Only fields that releases from 2.18.1 on have are shown to it.
    ///
    /// # Safety
    /// The name outlives the call that takes the options.
    pub unsafe fn sub_config(&self, name: &CStr) -> NcclConfig {
        let (size, version) = if self.version >= 22703 { (72, 22703) } else { (48, 21801) };
        let head = Head { size, version, ..NcclConfig::DEFAULT.head };
        // SAFETY: the name must outlive the call that takes the options; because the caller says so.
        let comm_name = unsafe { Text::lent(name) };
        NcclConfig { head, blocking: 1, comm_name, ..NcclConfig::DEFAULT }
    }
}
