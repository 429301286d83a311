//! PyTorch's fills: the only kernels of programs that are done, by the driver's own setting of memory.
//!
//! `fill_`, `zeros`, `ones`, `full` on contiguous tensors are one of two templates, whose first parameters are how many
//! elements there are, the value, and the address. The type is in the kernel's name, as compilers write it.

use crate::calls::get;
use crate::driver;
use std::ffi::c_void;

/// Bytes of the elements that a kernel fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element(usize);

const FUNCTOR: &str = "NS0_11FillFunctorI";
const TEMPLATES: [&str; 2] =
    ["_ZN2at6native29vectorized_elementwise_kernelI", "_ZN2at6native27unrolled_elementwise_kernelI"];

/// Bytes of a type of C++, as its name begins: a letter, or one of PyTorch's.
fn bytes(kind: &str) -> Option<usize> {
    let named = [("11Float8_e5m2E", 1), ("13Float8_e4m3fnE", 1), ("14Float8_e8m0fnuE", 1), ("15Float8_e4m3fnuzE", 1)];
    let more = [("15Float8_e5m2fnuzE", 1), ("4HalfE", 2), ("8BFloat16E", 2)];
    // Within a name that began with it the namespace is written as S and a number.
    let own = kind.strip_prefix("N3c10").or_else(|| {
        let rest = kind.strip_prefix("NS")?;
        Some(rest.split_once('_')?.1)
    });
    if let Some(own) = own {
        if let Some(part) = own.strip_prefix("7complexI") {
            return bytes(part).map(|part| 2 * part);
        }
        return named.into_iter().chain(more).find(|(name, _)| own.starts_with(name)).map(|(_, bytes)| bytes);
    }
    match kind.as_bytes().first()? {
        b'a' | b'b' | b'h' => Some(1),
        b's' | b't' => Some(2),
        b'i' | b'j' | b'f' => Some(4),
        b'l' | b'm' | b'd' => Some(8),
        _ => None,
    }
}

impl Element {
    /// What a kernel of this name fills; none if it is not a fill.
    pub(crate) fn of(name: &str) -> Option<Element> {
        let rest = TEMPLATES.iter().find_map(|template| name.strip_prefix(template))?;
        // One that converts writes elements of another type.
        if name.contains("StoreWithCast") {
            return None;
        }
        // The first may say how many elements it does at once: `Li4E`.
        let vector = rest.strip_prefix("Li").and_then(|rest| rest.split_once('E')).map_or(rest, |(_, rest)| rest);
        bytes(vector.strip_prefix(FUNCTOR)?).map(Element)
    }

    /// Does what the kernel does.
    pub(crate) fn fill(self, args: *const *const c_void, stream: usize) -> i32 {
        let argument = |index: usize| get(args.wrapping_add(index));
        let count = get(argument(0).cast::<i32>());
        let Ok(count) = usize::try_from(count) else { return crate::errors::INVALID_VALUE };
        let (value, dst) = (argument(1), get(argument(2).cast::<u64>()));
        match self.0 {
            1 => driver::cuMemsetD8Async(dst, get(value.cast()), count, stream),
            2 => driver::cuMemsetD16Async(dst, get(value.cast()), count, stream),
            4 => driver::cuMemsetD32Async(dst, get(value.cast()), count, stream),
            bytes => {
                // A column for each word of an element.
                let column = |word: usize| {
                    let value = get(value.cast::<u32>().wrapping_add(word));
                    driver::cuMemsetD2D32Async(dst + 4 * word as u64, bytes, value, 1, count, stream)
                };
                (0..bytes / 4).map(column).find(|code| *code != 0).unwrap_or(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Element;

    #[test]
    fn the_type_is_read_from_the_name() {
        for (kind, bytes) in [
            ("h", 1),
            ("s", 2),
            ("f", 4),
            ("l", 8),
            ("N3c104HalfE", 2),
            ("N3c1013Float8_e4m3fnE", 1),
            ("N3c107complexIdEE", 16),
            ("N3c107complexINS3_4HalfEEE", 4),
        ] {
            let name = format!(
                "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorI{kind}EESt5arrayIPcLm1EELb0EEEviT0_T1_"
            );
            assert_eq!(Element::of(&name), Some(Element(bytes)), "{name}");
        }
        let converting =
            "_ZN2at6native27unrolled_elementwise_kernelINS0_11FillFunctorIfEESt5arrayIPcLm1EELi4E23Trivial\
            OffsetCalculatorILi0EjES7_ILi1EjENS0_6memory12LoadWithCastILi0EEENSA_13StoreWithCastILi1EEEEEviT_T0_";
        assert_eq!(Element::of(converting), None);
        let strided =
            "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastINS0_11FillFunctorIfEEEEv";
        assert_eq!(Element::of(strided), None);
        let other =
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_10AddFunctorIfEESt5arrayIPcLm1EELb0EEEviT0_T1_";
        assert_eq!(Element::of(other), None);
    }
}
