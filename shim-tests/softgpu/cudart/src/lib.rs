//! `libcudart.so.13`: the part of CUDA's runtime that PyTorch's wheel calls, over the soft driver.
//!
//! It knows the driver by its public interface alone, so it would run over a real one as well, but it runs no kernels: a
//! launch is refused with the kernel's name on standard error, except of PyTorch's fills ([`fills`]), which the driver can
//! do by itself. NVIDIA's own runtime finds the driver by tables that nobody documents; they are not imitated.
//!
//! A device's primary context comes to life with the first call that needs it, as the documentation says, and is never
//! released. Error codes are the driver's: those that programs meet have the same number in both interfaces. What no
//! test needs returns `cudaErrorNotSupported` ([`absent`]).
#![allow(clippy::not_unsafe_ptr_arg_deref)]

mod absent;
mod calls;
mod context;
mod devices;
mod driver;
mod errors;
mod fills;
mod graphs;
mod kernels;
mod memory;
mod streams;
