//! The numbers that a trial moves and reduces.
#![forbid(unsafe_code)]

/// An element. `sum` is reduced by addition, so any order gives the same; `tree` by an operation that is neither
/// commutative nor associative, so that only the same tree does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OracleNumber {
    /// For what is in it.
    pub sum: u64,
    /// For the order in which it was reduced.
    pub tree: u64,
}

/// A permutation of the 64-bit numbers without visible pattern (the finaliser of SplitMix64).
pub(super) fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

impl OracleNumber {
    /// An element of a rank's input in some segment.
    pub fn input(rank: usize, segment: usize, element: usize) -> OracleNumber {
        let seed = mix(mix(mix(rank as u64) ^ segment as u64) ^ element as u64);
        OracleNumber { sum: seed, tree: seed }
    }

    /// After the prologue.
    pub fn start(self) -> OracleNumber {
        OracleNumber { sum: mix(self.sum ^ 1), tree: mix(self.tree ^ 1) }
    }

    /// After the epilogue.
    pub fn finish(self) -> OracleNumber {
        OracleNumber { sum: mix(self.sum ^ 2), tree: mix(self.tree ^ 2) }
    }

    /// Reduced with another, which comes second. Different providers (`how`) reduce differently.
    pub fn reduce(self, other: OracleNumber, how: u64) -> OracleNumber {
        let tree = mix(self.tree.wrapping_mul(2 * how + 3).wrapping_add(other.tree.rotate_left(17)));
        OracleNumber { sum: self.sum.wrapping_add(other.sum), tree }
    }
}

/// The epilogue, if it is wanted.
pub(super) fn finished(values: Vec<OracleNumber>, finish: bool) -> Vec<OracleNumber> {
    match finish {
        true => values.into_iter().map(OracleNumber::finish).collect(),
        false => values,
    }
}

/// The operands reduced element by element, from the left.
pub(super) fn fold(operands: &[&[OracleNumber]], how: u64) -> Result<Vec<OracleNumber>, String> {
    let (first, rest) = operands.split_first().ok_or("there is nothing to reduce")?;
    let mut folded = first.to_vec();
    for operand in rest {
        if operand.len() != folded.len() {
            return Err("operands differ in size".into());
        }
        folded = folded.iter().zip(*operand).map(|(a, b)| a.reduce(*b, how)).collect();
    }
    Ok(folded)
}
