//! `libamdhip64.so.6` and `libhiprtc.so`: the soft GPU with the functions of HIP.
#![allow(non_snake_case, clippy::not_unsafe_ptr_arg_deref)]

mod devices;
mod memory;
mod pointers;
mod rtc;
mod streams;

softgpu::own_exports!();
