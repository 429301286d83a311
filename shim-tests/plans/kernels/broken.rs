//! Kernels that are broken on purpose, in their PTX alone, are told.

use super::beds::{texts, Interpreted};
use super::memory::Random;
use super::of_kernel;
use ptx::{Module, Nan};

const KERNEL: &str = "strata_reduce_sum_f32";

/// What the cases say of [`KERNEL`] where every line of it is changed that `change` changes, and the first such line.
fn told(change: impl Fn(&str) -> Option<String>) -> (String, usize) {
    let text = texts().into_iter().find(|text| text.contains(KERNEL)).expect("a module has it");
    let (mut within, mut first, mut lines) = (false, 0, Vec::new());
    for (index, line) in text.lines().enumerate() {
        if line.starts_with(".visible .entry ") {
            within = line.contains(KERNEL);
        }
        let changed = change(line).filter(|_| within);
        if changed.is_some() && first == 0 {
            first = index + 1;
        }
        lines.push(changed.unwrap_or_else(|| line.to_string()));
    }
    assert!(first > 0, "nothing is changed");
    let modules = [Module::parse(&lines.join("\n")).expect("it is still PTX")];
    let bed = Interpreted::new(&modules, Nan::Nvidia);
    (of_kernel(&bed, KERNEL, 40, &mut Random(0x1111_2222_3333_4444)).expect_err("it is wrong"), first)
}

#[test]
fn an_address_that_is_off_by_a_pack_is_told_with_kernel_line_and_thread() {
    let (why, line) = told(|line| line.starts_with("st.global.v4").then(|| line.replace("],", "+16],")));
    assert!(why.contains(&format!("{KERNEL}, line {line}, `st.global.v4.u32")), "{why}");
    assert!(why.contains("thread [") && why.contains("of block ["), "{why}");
}

#[test]
fn two_threads_on_one_element_are_told_with_kernel_line_and_both_threads() {
    let (why, _) = told(|line| line.ends_with("%tid.x;").then(|| line.replace("%tid.x", "0")));
    assert!(why.contains(&format!("{KERNEL}, line ")), "{why}");
    assert!(why.contains("and nothing orders them") && why.matches("thread [").count() == 2, "{why}");
}

#[test]
fn elements_that_are_left_out_are_told_with_the_kernel_and_where() {
    let (why, _) = told(|line| line.starts_with("st.global.u32").then(String::new));
    assert!(why.starts_with("F32 Sum") && why.contains(": at "), "{why}");
}

#[test]
fn a_register_that_is_read_before_it_is_written_is_told() {
    let (why, line) = told(|line| line.ends_with("%ctaid.y;").then(String::new));
    assert!(why.contains("a register is read that was not written"), "{why}");
    assert!(why.contains(&format!("line {}", line + 1)), "{why}, after line {line}");
}
