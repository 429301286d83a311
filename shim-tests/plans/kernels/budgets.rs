//! How many instructions the kernels take for 16 bytes, by the interpreter.
//!
//! The memory of an H100 moves 16 bytes of each of two sources and a destination in the time in which its processors issue
//! some 420 instructions of a thread, half as many of integers. A PTX instruction may be several of the machine: a division
//! is ten or so.

use super::beds::{shipped, Argument};
use super::cases::OPERATORS;
use super::memory::Twice;
use ptx::{Launch, Manner, Module};
use strata::device::gpu::kernels::{self, Batch, BatchScale, WORDS};
use strata::dtype::{DataType, Operator};

/// What is measured: a kernel, how many sources, what happens to the result.
type What = (String, usize, BatchScale);

/// Instructions for a pack: a type's sum, product, maximum and minimum of two sources, its average of two, its scaling.
const BUDGETS: [(DataType, [u32; 6]); 12] = [
    (DataType::I8, [92, 92, 172, 172, 319, 245]),
    (DataType::U8, [86, 86, 158, 158, 196, 129]),
    (DataType::I32, [33, 33, 33, 33, 97, 87]),
    (DataType::U32, [33, 33, 33, 33, 81, 71]),
    (DataType::I64, [51, 51, 51, 51, 99, 69]),
    (DataType::U64, [51, 51, 51, 51, 95, 61]),
    (DataType::F16, [52, 52, 76, 76, 146, 84]),
    (DataType::F32, [53, 53, 105, 105, 103, 38]),
    (DataType::F64, [59, 59, 89, 89, 98, 40]),
    (DataType::BF16, [148, 148, 220, 220, 270, 117]),
    (DataType::F8E4M3, [264, 273, 255, 255, 662, 379]),
    (DataType::F8E5M2, [175, 175, 150, 158, 473, 282]),
];

/// Instructions of one thread for so many packs of sources that are aligned alike.
fn count(modules: &[Module], (kernel, nsrcs, scale): &What, packs: usize) -> Result<u64, String> {
    let bytes = 16 * packs;
    let mut memory = Twice::new(64 << 10);
    // About 1, whatever the type is.
    memory.write(0, &vec![0x3c; 64 << 10]);
    let mut words = [0; WORDS];
    words[0] = bytes as u64;
    for word in &mut words[1..2 + nsrcs] {
        let at = memory.place(bytes, 0);
        *word = memory.address(at);
    }
    let batch = Batch { njobs: 1, nsrcs: *nsrcs as u32, scale: *scale as u32, operation: 0, factor: 3, words };
    let kernel = modules.iter().find_map(|module| module.kernel(kernel)).ok_or("it is in no module")?;
    let launch = Launch { kernel, params: &Argument::Batch(&batch).bytes(), blocks: [1; 3], threads: [1; 3] };
    launch.run(&memory, Manner::default()).map_err(|trap| trap.to_string())
}

/// Instructions for a pack.
pub fn each(modules: &[Module], what: &What) -> Result<f64, String> {
    let (few, many) = (count(modules, what, 64)?, count(modules, what, 192)?);
    Ok(many.saturating_sub(few) as f64 / 128.0)
}

/// What is measured of a type, in the table's order.
pub fn of_type(dtype: DataType) -> [What; 6] {
    let [sum, prod, max, min] = OPERATORS.map(|operator| (kernels::reduce(dtype, operator), 2, BatchScale::None));
    let average = (kernels::reduce(dtype, Operator::Sum), 2, BatchScale::Divide);
    [sum, prod, max, min, average, (kernels::scale(dtype), 1, BatchScale::Reciprocal)]
}

#[test]
fn no_kernel_takes_more_instructions_than_its_budget() {
    let mut complaints = Vec::new();
    for (dtype, budget) in BUDGETS {
        let taken = of_type(dtype).map(|what| each(shipped(), &what).unwrap_or_else(|why| panic!("{what:?}: {why}")));
        println!("{:5}{}", kernels::type_name(dtype), taken.map(|taken| format!("{taken:8.1}")).concat());
        // A budget that is too large holds nothing.
        if taken.iter().zip(budget).any(|(taken, budget)| taken.ceil() as u32 != budget) {
            complaints.push(format!("{dtype:?}: {taken:?}, not {budget:?}"));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert_eq!(BUDGETS.map(|(dtype, _)| dtype), DataType::ALL);
}
