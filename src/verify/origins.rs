//! Where the data of a step came from, back through all ranks, in logarithmic time.
//!
//! Most orders between ranks are told by the data itself: a result that arrives was made from what had been sent. So
//! each step is linked to one step that gave it data: a receive to its send, any other to the last writer of what it
//! reads. Each link says that the older step was before the newer one: the run has checked it. A ring of `p` ranks makes
//! chains of `2p` links, so every step also has a link that jumps over many (Myers, "An applicative random-access
//! stack", 1983).
#![forbid(unsafe_code)]

use super::index::NONE;

/// What is known of one step.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// The step that gave it data, or [`NONE`].
    up: u32,
    /// A step farther up, or [`NONE`].
    jump: u32,
    depth: u32,
    /// The link up orders chunks of this position in a block and all higher ones.
    class: u32,
    /// The same for all links that the jump covers.
    jump_class: u32,
}

/// The links of all steps.
#[derive(Debug)]
pub(super) struct Origins {
    links: Vec<Link>,
}

impl Origins {
    /// No step has data yet.
    pub fn new(nsteps: usize) -> Origins {
        Origins { links: vec![Link { up: NONE, jump: NONE, depth: 0, class: 0, jump_class: 0 }; nsteps] }
    }

    /// Notes that `step` has data of `up`, for chunks of position `class` and higher.
    pub fn link(&mut self, step: u32, up: u32, class: u32) {
        let Some(&above) = self.links.get(up as usize) else { return };
        let mut link = Link { up, jump: up, depth: above.depth + 1, class, jump_class: class };
        if let Some(&far) = self.links.get(above.jump as usize) {
            // Two jumps of equal length become one.
            let farthest = self.links.get(far.jump as usize).map(|link| link.depth);
            if farthest.is_some_and(|depth| above.depth - far.depth == far.depth - depth) {
                link.jump = far.jump;
                link.jump_class = class.max(above.jump_class).max(far.jump_class);
            }
        }
        self.links[step as usize] = link;
    }

    /// The farthest step that `step` has data of, among those for which `wanted` says so; what is wanted of a step is
    /// wanted of all below it. Only by links that order chunks of position `class`.
    pub fn farthest(&self, step: u32, class: u32, wanted: impl Fn(u32) -> bool) -> u32 {
        let mut at = step;
        loop {
            let link = self.links[at as usize];
            at = if link.jump != NONE && link.jump_class <= class && wanted(link.jump) {
                link.jump
            } else if link.up != NONE && link.class <= class && wanted(link.up) {
                link.up
            } else {
                return at;
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ancestor_is_found_in_a_few_jumps() {
        let mut origins = Origins::new(1000);
        (1..1000).for_each(|step| origins.link(step, step - 1, 3));
        for (step, wanted) in [(999, 0), (999, 998), (700, 3), (512, 511), (5, 5)] {
            let looks = std::cell::Cell::new(0);
            let found = origins.farthest(step, 3, |at| {
                looks.set(looks.get() + 1);
                at >= wanted
            });
            assert_eq!(found, wanted);
            assert!(looks.get() < 60, "{} looks", looks.get());
        }
    }

    #[test]
    fn a_link_of_a_higher_position_is_not_followed() {
        let mut origins = Origins::new(100);
        (1..100).for_each(|step| origins.link(step, step - 1, if step == 40 { 7 } else { 2 }));
        assert_eq!(origins.farthest(99, 7, |_| true), 0);
        assert_eq!(origins.farthest(99, 6, |_| true), 40);
        assert_eq!(origins.farthest(39, 2, |_| true), 0);
        assert_eq!(origins.farthest(99, 1, |_| true), 99);
    }
}
