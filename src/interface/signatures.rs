//! The functions of a library opened at run time, with the signatures of the list ([`super::functions`]).
#![allow(non_snake_case)]
// The interface's functions have as many arguments as NCCL gave them.
#![allow(clippy::too_many_arguments)]

use super::layouts::*;
use super::pointer::*;
use super::types::*;
use std::ffi::{c_int, c_void, CStr};

macro_rules! signatures {
    ($(#[doc = $about:literal])+ $all:ident $twin:ident $($section:literal { $(
        $(#[doc = $doc:literal])+
        $since:literal fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty
            = $kind:ident($($body:tt)*) $(, over($($over:tt)+))?;
    )* })*) => {
        $(#[doc = $about])+
        ///
        /// A function that the library does not have returns `None`.
        #[derive(Debug, Clone, Copy)]
        pub struct $all {
            $($(
                /// Where the function is.
                pub $name: Option<unsafe extern "C" fn($($type),*) -> $result>,
            )*)*
        }

        impl $all {
            /// Looks the functions up.
            ///
            /// # Safety
            /// What is found by a name must be the function of this interface, and stay for as long as it is called.
            pub unsafe fn find(address: impl Fn(&CStr) -> Option<*const c_void>) -> $all {
                $all { $($(
                    $name: CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).ok().and_then(&address).map(
                        // SAFETY: the address must be of a function with this signature; because the caller says so.
                        |found| unsafe {
                            std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> $result>(found)
                        },
                    ),
                )*)* }
            }

            $($(
                $(#[doc = $doc])+
                ///
                /// # Safety
                /// As the interface says of the function: handles are alive, and memory is there.
                pub unsafe fn $name(&self, $($argument: $type),*) -> Option<$result> {
                    // SAFETY: what the interface says must hold; because the caller says so.
                    self.$name.map(|function| unsafe { function($($argument),*) })
                }
            )*)*
        }
    };
}

crate::nccl_functions!({ signatures }
    /// NCCL's functions.
    NcclFunctions
);

crate::own_functions!({ signatures }
    /// Strata's own functions.
    StrataFunctions
);
