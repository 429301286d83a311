//! Which of two ways for a part's bytes is the quicker one, found by trying.
//!
//! What is quicker depends on more than rates of copies: two processors may be threads of one core, which share its caches, or
//! cores apart; what others compute takes turns; a virtual machine's processors are moved. So both ways are tried at first, then
//! mostly the quicker one, and now and then the other: the more rarely the slower it is.
#![forbid(unsafe_code)]

/// How often each way is tried before one is preferred: the first time its memory may be touched for the first time as well.
const TRIES: u32 = 2;
/// A class begins with what the nearest known one has found, up to so many powers of two away, and tries the other way at its
/// call of this number.
const NEIGHBOURS: usize = 3;
const SOON: u32 = 8;
/// After how many calls the other way is tried again: where it takes up to [`NEAR`] times as long, up to [`FAR`] times, or longer.
const PERIODS: [u32; 3] = [16, 64, 512];
const NEAR: f64 = 1.2;
const FAR: f64 = 2.0;

/// What is known of the two ways for calls of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Choice {
    calls: u32,
    tried: [u32; 2],
    /// Near the least of the last times, in ns a byte; of no time yet 0.
    ns: [f64; 2],
}

impl Choice {
    /// The quicker way, once both are known.
    fn best(&self) -> Option<usize> {
        let [one, other] = self.ns;
        (one > 0.0 && other > 0.0).then_some(usize::from(other < one))
    }
}

/// What is known of calls of all classes.
#[derive(Debug, Default)]
pub struct TriedWays {
    choices: Vec<Choice>,
}

/// A class of sizes: the power of two below.
pub fn size_class(bytes: usize) -> usize {
    bytes.max(1).ilog2() as usize
}

impl TriedWays {
    /// The way for the next call of this class. Ranks that make the same calls try at the same ones. `first` is the way to begin
    /// with.
    pub fn choose(&mut self, class: usize, first: usize) -> usize {
        if self.choices.len() <= class {
            self.choices.resize(class + 1, Choice::default());
        }
        if self.choices[class].calls == 0 {
            self.choices[class] = self.nearest(class);
        }
        let choice = &mut self.choices[class];
        choice.calls = choice.calls.wrapping_add(1);
        let other = 1 - first;
        let way = if choice.tried[other] < TRIES {
            if choice.tried[other] < choice.tried[first] {
                other
            } else {
                first
            }
        } else {
            let best = choice.best().unwrap_or(first);
            let slower = choice.ns[1 - best] / choice.ns[best];
            let period = PERIODS[usize::from(slower > NEAR) + usize::from(slower > FAR)];
            if choice.calls.is_multiple_of(period) {
                1 - best
            } else {
                best
            }
        };
        choice.tried[way] += 1;
        way
    }

    /// The way that is known to be the quicker one.
    pub fn best(&self, class: usize) -> Option<usize> {
        self.choices.get(class).and_then(Choice::best)
    }

    /// What a new class begins with; the other way is tried soon.
    fn nearest(&self, class: usize) -> Choice {
        let known = |class: usize| self.choices.get(class).filter(|choice| choice.best().is_some());
        let near =
            (1..=NEIGHBOURS).flat_map(|far| [class.checked_sub(far), Some(class + far)]).flatten().find_map(known);
        near.map_or(Choice::default(), |near| Choice { calls: PERIODS[2] - SOON, tried: [TRIES; 2], ..*near })
    }

    /// A call took so long by this way, in ns a byte. One that took much longer than others was interrupted.
    pub fn tell(&mut self, class: usize, way: usize, ns: f64) {
        let Some(known) = self.choices.get_mut(class).map(|choice| &mut choice.ns[way]) else { return };
        *known = match *known {
            0.0 => ns,
            known if ns < known => ns,
            known => known + (ns.min(2.0 * known) - known) / 8.0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many calls go each way, which take so long.
    fn taken(ways: &mut TriedWays, calls: usize, ns: [f64; 2]) -> [usize; 2] {
        let mut taken = [0; 2];
        for _ in 0..calls {
            let way = ways.choose(16, 0);
            taken[way] += 1;
            ways.tell(16, way, ns[way]);
        }
        taken
    }

    #[test]
    fn the_quicker_way_is_taken_and_the_other_tried_the_more_rarely_the_slower_it_is() {
        for slow in 0..2 {
            for (factor, most) in [(1.1, 1000 / 16 + 8), (1.5, 1000 / 64 + 8), (3.0, 1000 / 512 + 8)] {
                let mut ns = [1.0; 2];
                ns[slow] = factor;
                let taken = taken(&mut TriedWays::default(), 1000, ns);
                assert!(taken[slow] <= most, "{taken:?} {factor}");
            }
        }
    }

    #[test]
    fn a_class_begins_with_what_its_neighbour_has_found() {
        let mut ways = TriedWays::default();
        taken(&mut ways, 20, [3.0, 1.0]);
        for class in [14, 15, 17, 19] {
            let first: Vec<usize> = (0..8).map(|_| ways.choose(class, 0)).collect();
            assert_eq!(first, [1, 1, 1, 1, 1, 1, 1, 0], "{class}");
        }
        assert_eq!(ways.choose(30, 0), 0, "too far");
    }

    #[test]
    fn a_first_try_that_takes_long_decides_nothing() {
        let mut ways = TriedWays::default();
        for call in 0..40 {
            let way = ways.choose(16, 0);
            let ns = [1.5, if call < 3 { 9.0 } else { 1.0 }][way];
            ways.tell(16, way, ns);
        }
        assert!(taken(&mut ways, 20, [1.5, 1.0])[1] >= 18);
    }

    #[test]
    fn a_way_that_becomes_the_quicker_one_is_found() {
        let mut ways = TriedWays::default();
        taken(&mut ways, 1000, [1.0, 1.5]);
        taken(&mut ways, 200, [4.0, 1.5]);
        assert!(taken(&mut ways, 100, [4.0, 1.5])[1] > 90);
    }

    #[test]
    fn one_late_call_changes_nothing() {
        let mut ways = TriedWays::default();
        taken(&mut ways, 100, [1.0, 1.5]);
        ways.tell(16, 0, 1000.0);
        assert!(taken(&mut ways, 10, [1.0, 1.5])[0] >= 9);
    }
}
