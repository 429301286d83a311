//! `libcuda.so.1`: the soft GPU with the functions of CUDA's driver.
#![allow(non_snake_case)]

mod absent;
mod attributes;
mod contexts;
mod management;
mod memory;
mod reserved;
mod streams;

softgpu::own_exports!();
