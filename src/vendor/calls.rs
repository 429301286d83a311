//! The vendor's functions that Strata calls itself.
//!
//! Handles and buffers are numbers here: they are the program's or the vendor's, and Strata never looks behind them. Each
//! call raises the [guard].

use super::guard;
use super::library::Library;
use crate::error::Code;
use std::ffi::{c_int, c_void, CStr};

/// A communicator of the vendor's.
pub type VendorComm = usize;
/// A stream of the program's.
pub type VendorStream = usize;
/// An address on the device.
pub type VendorAddress = usize;

/// `ncclInvalidUsage`, for a function that the vendor's library does not have.
const ABSENT: Code = 5;

macro_rules! calls {
    ($($(#[doc = $doc:literal])+ fn $name:ident($($argument:ident: $type:ty),*) = $symbol:literal;)*) => {
        /// The addresses of the functions, as far as the library has them.
        #[derive(Debug)]
        pub struct VendorCalls {
            $($name: Option<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        impl VendorCalls {
            /// Looks them up.
            pub fn of(address: impl Fn(&CStr) -> Option<*const c_void>) -> VendorCalls {
                VendorCalls {
                    $($name: address($symbol).map(|function| {
                        // SAFETY: the address must be of a function with this signature; because the interface says so
                        // of its name.
                        unsafe {
                            std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> Code>(function)
                        }
                    }),)*
                }
            }
        }

        impl Library {
            $(
                $(#[doc = $doc])+
                ///
                /// # Safety
                /// As the interface says of the function: handles must be alive and memory must be there.
                #[allow(clippy::too_many_arguments)]
                pub unsafe fn $name(&self, $($argument: $type),*) -> Result<(), Code> {
                    let Some(function) = self.calls.$name else { return Err(ABSENT) };
                    // SAFETY: what the interface says must hold; because the caller says so.
                    match guard::inside(|| unsafe { function($($argument),*) }) {
                        0 => Ok(()),
                        code => Err(code),
                    }
                }
            )*
        }
    };
}

calls! {
    /// `ncclGroupStart`
    fn group_start() = c"ncclGroupStart";
    /// `ncclGroupEnd`
    fn group_end() = c"ncclGroupEnd";
    /// `ncclAllGather`
    fn all_gather(send: VendorAddress, recv: VendorAddress, count: usize, dtype: c_int, comm: VendorComm, stream: VendorStream)
        = c"ncclAllGather";
    /// `ncclReduceScatter`
    fn reduce_scatter(
        send: VendorAddress, recv: VendorAddress, count: usize, dtype: c_int, op: c_int, comm: VendorComm, stream: VendorStream
    ) = c"ncclReduceScatter";
    /// `ncclAllReduce`
    fn all_reduce(
        send: VendorAddress, recv: VendorAddress, count: usize, dtype: c_int, op: c_int, comm: VendorComm, stream: VendorStream
    ) = c"ncclAllReduce";
    /// `ncclCommSplit`
    fn comm_split(comm: VendorComm, color: c_int, key: c_int, newcomm: *mut VendorComm, config: *mut SubConfig)
        = c"ncclCommSplit";
    /// `ncclCommFinalize`
    fn comm_finalize(comm: VendorComm) = c"ncclCommFinalize";
    /// `ncclCommDestroy`
    fn comm_destroy(comm: VendorComm) = c"ncclCommDestroy";
    /// `ncclCommAbort`
    fn comm_abort(comm: VendorComm) = c"ncclCommAbort";
    /// `ncclCommRevoke`
    fn comm_revoke(comm: VendorComm, flags: c_int) = c"ncclCommRevoke";
    /// `ncclCommSuspend`
    fn comm_suspend(comm: VendorComm, flags: c_int) = c"ncclCommSuspend";
    /// `ncclCommResume`
    fn comm_resume(comm: VendorComm) = c"ncclCommResume";
    /// `ncclCommGetAsyncError`
    fn comm_async_error(comm: VendorComm, error: *mut Code) = c"ncclCommGetAsyncError";
    /// `ncclCommCuDevice`
    fn comm_device(comm: VendorComm, device: *mut c_int) = c"ncclCommCuDevice";
    /// `ncclMemAlloc`
    fn mem_alloc(place: *mut VendorAddress, bytes: usize) = c"ncclMemAlloc";
    /// `ncclMemFree`
    fn mem_free(place: VendorAddress) = c"ncclMemFree";
}

/// `ncclConfig_t` as releases from 2.18.1 on understand it. What comes after these fields is the vendor's default.
#[derive(Debug)]
#[repr(C)]
pub struct SubConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const std::ffi::c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const std::ffi::c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

const _: () = assert!(size_of::<SubConfig>() == 72);

/// What an integer field holds that is not set.
const UNDEFINED: c_int = c_int::MIN;

impl SubConfig {
    /// Options for a communicator whose calls wait, with a name where the release knows names. The name must outlive the
    /// call that takes the options.
    pub fn new(library: &Library, name: &CStr) -> SubConfig {
        let named = library.version >= 22703;
        SubConfig {
            size: if named { 72 } else { 48 },
            magic: 0xcafe_beef,
            version: if named { 22703 } else { 21801 },
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: name.as_ptr(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }
}

impl Library {
    /// Whether it can make communicators out of others and give out device memory.
    pub fn can_split(&self) -> bool {
        self.calls.comm_split.is_some() && self.calls.mem_alloc.is_some()
    }
}
