//! The GPU kernels compute the host device's bits: their source, compiled for the processor, and the PTX that the library
//! has, interpreted, run thread by thread on memory of their own, and all of that memory is then compared with what the host
//! device made of the same.
//!
//! What this shows is arithmetic, addresses, and which thread touches what, of the source and of what NVRTC made of it. What
//! a driver's compiler makes of the PTX is seen only on a GPU.

mod beds;
mod broken;
mod budgets;
mod cases;
mod codes;
mod flags;
mod interpreted;
mod memory;
mod mutants;

use beds::{Bed, Compiled};
use cases::OPERATORS;
use memory::Random;
use std::path::Path;
use std::process::Command;
use strata::device::gpu::code;
use strata::device::gpu::kernels;
use strata::dtype::{DataType, Operator};

/// Reductions of every type, with every operation and several numbers of sources.
fn every_reduction(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for dtype in DataType::ALL {
        for operator in OPERATORS {
            for nsrcs in [1, 2, 3, 9] {
                (0..20).try_for_each(|_| cases::reduction(bed, dtype, operator, nsrcs, &mut random))?;
            }
        }
    }
    Ok(())
}

fn every_scaling(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0x0123_4567_89ab_cdef);
    for dtype in DataType::ALL {
        (0..120).try_for_each(|round| cases::scaling(bed, dtype, round, &mut random))?;
    }
    Ok(())
}

fn every_element(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0xdead_beef_1234_5678);
    for dtype in DataType::ALL.into_iter().filter(|dtype| dtype.size() <= 2) {
        for operator in OPERATORS {
            cases::every_element(bed, dtype, operator, 24, &mut random)?;
        }
    }
    Ok(())
}

fn copies(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0x5555_1234_9876_0001);
    (0..600).try_for_each(|_| cases::copy(bed, &mut random))
}

fn shuffles(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0x7777_1234_9876_0001);
    (0..600).try_for_each(|_| cases::shuffle(bed, &mut random))
}

/// Some cases of one kernel.
fn of_kernel(bed: &dyn Bed, name: &str, rounds: usize, random: &mut Random) -> Result<(), String> {
    if let Some((dtype, operator)) = reduction_of(name) {
        for round in 0..rounds {
            cases::reduction(bed, dtype, operator, [2, 3, 1, 9][round % 4], random)?;
        }
        if dtype.size() <= 2 {
            cases::every_element(bed, dtype, operator, 2 + rounds / 20, random)?;
        }
        return Ok(());
    }
    if let Some(dtype) = DataType::ALL.into_iter().find(|dtype| kernels::scale(*dtype) == name) {
        return (0..rounds).try_for_each(|round| cases::scaling(bed, dtype, round, random));
    }
    if let Some(kernel) = codes::named(name) {
        return (0..rounds).try_for_each(|_| codes::coding(bed, kernel, random));
    }
    match name {
        kernels::COPY => (0..rounds).try_for_each(|_| cases::copy(bed, random)),
        kernels::SHUFFLE => (0..rounds).try_for_each(|_| cases::shuffle(bed, random)),
        _ => Err(format!("there are no cases of {name}")),
    }
}

fn reduction_of(name: &str) -> Option<(DataType, Operator)> {
    let mut all = DataType::ALL.into_iter().flat_map(|dtype| OPERATORS.map(|operator| (dtype, operator)));
    all.find(|(dtype, operator)| kernels::reduce(*dtype, *operator) == name)
}

fn on_processor(cases: fn(&dyn Bed) -> Result<(), String>) {
    if let Some(bed) = Compiled::get() {
        cases(&bed).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn every_reduction_has_the_host_s_bits() {
    on_processor(every_reduction);
}

#[test]
fn every_scaling_has_the_host_s_bits() {
    on_processor(every_scaling);
}

#[test]
fn every_pair_of_bytes_and_every_half_float_with_many_has_the_host_s_bits() {
    on_processor(every_element);
}

#[test]
fn a_copy_moves_all_bytes_and_no_other_at_any_alignment() {
    on_processor(copies);
}

#[test]
fn a_shuffle_puts_every_block_in_its_place() {
    on_processor(shuffles);
}

#[test]
fn codes_have_the_host_s_bits() {
    on_processor(codes::every_coding);
}

#[test]
fn the_source_for_amd_is_whole() {
    if !beds::has_compiler() {
        return;
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hip.{}.cpp", std::process::id()));
    let of_types = DataType::ALL.map(code::hip_source).into_iter();
    for source in of_types.chain([code::hip_move_source(), code::hip_codes_source()]) {
        std::fs::write(&path, source).expect("the source can be written");
        beds::compiled(Command::new("c++").args(["-std=c++17", "-Wall", "-Wextra", "-fsyntax-only"]).arg(&path));
    }
    std::fs::remove_file(&path).expect("the source can be removed");
}
