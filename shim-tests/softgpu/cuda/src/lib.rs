//! `libcuda.so.1`: the soft GPU with the functions of CUDA's driver.
#![allow(non_snake_case, clippy::not_unsafe_ptr_arg_deref)]

mod absent;
mod attributes;
mod contexts;
mod management;
mod memory;
mod reserved;
mod streams;

softgpu::own_exports!();
