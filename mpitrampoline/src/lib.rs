//! The MPI functions that XLA's collectives on processors call, done by Strata.
//!
//! JAX is built with MPItrampoline, which takes its MPI from the library that `MPITRAMPOLINE_LIB` names: constants and
//! functions with the prefix `MPIABI_`. Here are those of `jax_cpu_collectives_implementation=mpi`. Every other function ends
//! the program and says its name. Source of names, layouts and versions: MPItrampoline's `mpiabi.h`, MPI ABI version 2.10.
//!
//! Strata itself is `libstrata.so` beside this library, or what `STRATA_LIBRARY` names. All functions may be called on any
//! thread (`MPI_THREAD_MULTIPLE`).

mod abi;
mod calls;
mod library;
mod missing;
mod world;
