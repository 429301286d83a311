//! `libcuda.so.1`: the soft GPU with the functions of CUDA's driver.
#![allow(non_snake_case)]

mod attributes;
mod contexts;
mod memory;
mod streams;

softgpu::own_exports!();
