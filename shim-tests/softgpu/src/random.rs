//! Numbers that a seed decides.
#![forbid(unsafe_code)]

use crate::settings;

/// A xorshift generator of its own for each user, started over when the seed is set anew.
pub struct Random {
    epoch: u64,
    user: u64,
    state: u64,
}

impl Random {
    /// The generator of the user with this number.
    pub fn new(user: u64) -> Random {
        let epoch = settings::seed();
        let seed = epoch & u64::from(u32::MAX);
        // One round of splitmix64, so that neighbouring seeds have nothing in common.
        let mut state = (seed << 20).wrapping_add(user).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Random { epoch, user, state: (state ^ (state >> 31)) | 1 }
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if self.epoch != settings::seed() {
            *self = Random::new(self.user);
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) % limit
    }

    /// The numbers below `count` in some order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last as u64 + 1) as usize);
        }
        order
    }
}
