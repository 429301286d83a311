//! GPUs, NVIDIA's and AMD's: memory, streams and kernels through the driver that the program uses.

pub mod code;
pub mod kernels;
