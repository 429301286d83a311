//! Whether a rank's own NIC still delivers what it did, or the others of its node are to help.
//!
//! A rank measures only what goes anyway. So others are tried where the rank's own NIC delivers less than before, and from time to
//! time all the same, since it may have been slow from the start. A trial that shows nothing is followed by a longer pause.
#![forbid(unsafe_code)]

/// Below this part of what it delivered before, a NIC may be slow.
const SUSPICIOUS: f64 = 0.6;
/// Others help where one of them delivers so many times what the rank's own does,
const BETTER: f64 = 1.5;
/// and go on while it does so.
const STILL_BETTER: f64 = 1.2;
/// Bytes to a peer before the first trial, and between a slow look of its own NIC and the next one.
const FIRST_PAUSE: usize = 8 << 20;
/// The longest pause between two trials.
const LONGEST_PAUSE: usize = 1 << 30;
/// Bytes of a trial, unless all NICs are measured before.
const TRIAL: usize = 8 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// By the rank's own NIC; bytes since that began.
    Own(usize),
    /// By all, to see what they deliver; bytes of it.
    Trial(usize),
    /// By all.
    All,
}

/// The NICs by which a rank's large messages go to one peer.
#[derive(Debug)]
pub struct NicWatch {
    state: State,
    /// Bytes between two trials.
    pause: usize,
    /// The most that the rank's own NIC delivered since the last trial.
    best: f64,
}

impl Default for NicWatch {
    fn default() -> NicWatch {
        NicWatch { state: State::Own(0), pause: FIRST_PAUSE, best: 0.0 }
    }
}

impl NicWatch {
    /// Whether messages go by all NICs now.
    pub fn is_wide(&self) -> bool {
        !matches!(self.state, State::Own(_))
    }

    /// Takes what the rank's own NIC delivers and the fastest other one, where that is known, after so many further bytes to the
    /// peer. `true` where messages go by all NICs from now on, `false` where they go by the rank's own again.
    pub fn look(&mut self, given: usize, own: Option<f64>, other: Option<f64>) -> Option<bool> {
        match self.state {
            State::Own(bytes) => {
                let bytes = bytes + given;
                self.state = State::Own(bytes);
                let own = own?;
                self.best = self.best.max(own);
                let pause = if own < SUSPICIOUS * self.best { FIRST_PAUSE.min(self.pause) } else { self.pause };
                if bytes >= pause {
                    self.state = State::Trial(0);
                }
                None
            }
            State::Trial(bytes) => {
                let bytes = bytes + given;
                self.state = State::Trial(bytes);
                match (own, other) {
                    (Some(own), Some(other)) if other > BETTER * own => {
                        (self.state, self.pause) = (State::All, FIRST_PAUSE);
                        Some(true)
                    }
                    (_, other) if other.is_some() || bytes >= TRIAL => {
                        self.rest(own);
                        None
                    }
                    _ => None,
                }
            }
            State::All => match (own, other) {
                (Some(own), Some(other)) if other <= STILL_BETTER * own => {
                    self.rest(Some(own));
                    Some(false)
                }
                _ => None,
            },
        }
    }

    fn rest(&mut self, own: Option<f64>) {
        (self.state, self.best) = (State::Own(0), own.unwrap_or(0.0));
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: usize = 1 << 20;

    /// What happens while the NICs deliver this: the share of looks with all NICs in use, and what was told.
    fn after(watch: &mut NicWatch, looks: usize, own: f64, other: f64) -> (f64, Vec<bool>) {
        let (mut wide, mut told) = (0, Vec::new());
        for _ in 0..looks {
            let other = watch.is_wide().then_some(other);
            wide += usize::from(watch.is_wide());
            told.extend(watch.look(LOOK, Some(own), other));
        }
        (wide as f64 / looks as f64, told)
    }

    #[test]
    fn others_help_while_the_own_nic_is_slow() {
        let mut watch = NicWatch::default();
        let (wide, told) = after(&mut watch, 1000, 25.0, 25.0);
        assert!(wide < 0.02 && told.is_empty(), "{wide} {told:?}");
        let (wide, told) = after(&mut watch, 100, 6.0, 25.0);
        assert!(wide > 0.85 && told == [true], "{wide} {told:?}");
        let (wide, told) = after(&mut watch, 100, 25.0, 13.0);
        assert!(wide < 0.05 && told == [false], "{wide} {told:?}");
    }

    #[test]
    fn a_nic_that_is_slow_from_the_start_is_found() {
        let mut watch = NicWatch::default();
        let (_, told) = after(&mut watch, 20, 6.0, 25.0);
        assert_eq!(told, [true]);
    }

    #[test]
    fn where_all_have_become_slower_trials_become_rare() {
        let mut watch = NicWatch::default();
        after(&mut watch, 100, 25.0, 25.0);
        let (wide, told) = after(&mut watch, 1000, 10.0, 10.0);
        assert!(wide < 0.02 && told.is_empty(), "{wide} {told:?}");
    }

    #[test]
    fn nics_that_are_never_measured_are_tried_for_a_while() {
        let mut watch = NicWatch::default();
        let wide = (0..100).filter(|_| {
            watch.look(LOOK, Some(25.0), None);
            watch.is_wide()
        });
        assert!(wide.count() < 40);
    }
}
