//! The PTX that the library has, in the interpreter: all that the compiled source does, and what only it can do.

use super::beds::{shipped, Argument, Interpreted};
use super::codes::every_coding;
use super::memory::Random;
use super::{copies, every_element, every_reduction, every_scaling, flags, shuffles};
use ptx::{Device, Launch, Manner, Module, Nan};
use std::cell::RefCell;
use std::collections::BTreeMap;
use strata::device::gpu::kernels::{self, Shuffle};

/// Memory that is a function of the address, and notes what is stored.
#[derive(Default)]
struct Function {
    stored: RefCell<BTreeMap<u64, (usize, u128)>>,
}

/// What 16 bytes from an address are.
fn contents(address: u64, bytes: usize) -> u128 {
    (0..bytes).fold(0, |all, at| {
        let byte = (address + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        all | u128::from(byte) << (8 * at)
    })
}

impl Device for Function {
    fn load(&self, address: u64, bytes: usize) -> Result<u128, String> {
        Ok(contents(address, bytes))
    }

    fn store(&self, address: u64, bytes: usize, value: u128) -> Result<(), String> {
        match self.stored.borrow_mut().insert(address, (bytes, value)) {
            None => Ok(()),
            Some(_) => Err(format!("{address:#x} is stored to twice")),
        }
    }
}

/// Some threads of a shuffle of so many units of `unit` bytes that 32 bits do not count them, or just do.
pub fn far_shuffle(modules: &[Module], unit: u64, random: &mut Random) -> Result<(), String> {
    let kernel = modules.iter().find_map(|module| module.kernel(kernels::SHUFFLE)).ok_or("there is no shuffle")?;
    // Around 2^32 units, or many more, in few blocks or in as many.
    let units = [(1 << 32) - 40, (1 << 32) + 5, 1 << 33, 1 << 38][random.below(4)] + random.below(100) as u64;
    let few = 1 + random.below(7) as u64;
    let (rows, columns) = random.one_of(&[(few, few + 1), (few + 2, 1), (units / 3, few), (few, units / 3)]);
    let block_bytes = (units / (rows * columns)).max(1) * unit;
    let gap = random.below(5) as u64 * unit;
    let of = Shuffle {
        // Larger units do not divide the addresses.
        src: (1 << 50) + unit,
        dst: (1 << 51) + unit,
        block_bytes,
        rows,
        columns,
        src_row_bytes: columns * (block_bytes + gap) + gap,
        src_column_bytes: block_bytes + gap,
        dst_row_bytes: block_bytes + gap,
        dst_column_bytes: rows * (block_bytes + gap) + gap,
    };
    let units = block_bytes / unit * rows * columns;
    let params = Argument::Shuffle(&of).bytes();
    // So many threads that each has few units, or some have none.
    let blocks = (units / 512 * 2 / (1 + random.below(18) as u64)) as u32;
    let launch = Launch { kernel, params: &params, blocks: [blocks, 1, 1], threads: [512, 1, 1] };
    let stride = launch.len();
    for thread in [0, 1, stride - 1, random.next() % stride] {
        let memory = Function::default();
        let wrong = |why: String| format!("{of:?}, thread {thread} of {stride}: {why}");
        launch.run_threads([thread], &memory, Manner::default()).map_err(|trap| wrong(trap.to_string()))?;
        let mut expected = BTreeMap::new();
        for index in (thread..units).step_by(stride as usize) {
            let (block, within) = (index / (block_bytes / unit), index % (block_bytes / unit) * unit);
            let (row, column) = (block / columns, block % columns);
            let from = of.src + row * of.src_row_bytes + column * of.src_column_bytes + within;
            let to = of.dst + row * of.dst_row_bytes + column * of.dst_column_bytes + within;
            expected.insert(to, (unit as usize, contents(from, unit as usize)));
        }
        let stored = memory.stored.into_inner();
        if stored != expected {
            return Err(wrong(format!("{} units are stored, {} wanted", stored.len(), expected.len())));
        }
    }
    Ok(())
}

/// Shuffles on either side of 2^32 units, of every unit.
pub fn far_shuffles(modules: &[Module], rounds: usize, random: &mut Random) -> Result<(), String> {
    (0..rounds).try_for_each(|round| far_shuffle(modules, 1 << (round % 5), random))
}

/// All cases, with NVIDIA's NaN and with others; then every instruction must have been executed.
#[test]
fn the_ptx_has_the_host_s_bits_and_every_instruction_is_executed() {
    let beds = [Nan::Nvidia, Nan::Other(0x8012_3456_789a_bcde)].map(|nan| Interpreted::new(shipped(), nan));
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for bed in &beds {
            scope.spawn(move || {
                for cases in [every_reduction, every_scaling, every_element, copies, shuffles, every_coding] {
                    cases(bed).unwrap_or_else(|why| panic!("{why}"));
                }
            });
        }
    });
    far_shuffles(shipped(), 60, &mut Random(0x1357_9bdf_0246_8ace)).unwrap_or_else(|why| panic!("{why}"));
    flags::check(shipped()).unwrap_or_else(|why| panic!("{why}"));
    let executed: u64 = beds.iter().map(|bed| bed.instructions.load(std::sync::atomic::Ordering::Relaxed)).sum();
    println!("{} million instructions in {:.1} s", executed / 1_000_000, began.elapsed().as_secs_f64());
    let mut complaints = Vec::new();
    for kernel in shipped().iter().flat_map(|module| &module.kernels) {
        for at in kernel.unexecuted() {
            complaints.push(format!("{}, line {}: {}", kernel.name, kernel.code[at].line, kernel.text(at)));
        }
    }
    assert!(complaints.is_empty(), "{} instructions are never executed:\n{}", complaints.len(), complaints.join("\n"));
}
