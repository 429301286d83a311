//! Large messages by all NICs of a node: which connection takes the next frame.
//!
//! Each frame goes to the connection that is expected to have it delivered first, by what it has on its way and what it delivered
//! lately, and none to one that has more on its way than its NIC sends in some ten milliseconds. Whether a socket takes more says
//! nothing: what its congestion window lets go lies in the NIC's queue.
#![forbid(unsafe_code)]

use super::watch::NicWatch;
use super::{give_frame, Lossless, TcpLink, TcpPeer, Way, CODED_TURN};
use crate::exec::Token;
use smallvec::SmallVec;
use std::time::{Duration, Instant};

/// Bytes of one frame: the slowest NIC's last one is waited for.
const WIDE_STRIPE: usize = 64 << 10;

/// Connections are looked at when so much time has passed, by what they deliver together, but not after fewer or more bytes.
const LOOK_US: f64 = 10_000.0;
pub(super) const LEAST_LOOK: usize = 512 << 10;
const MOST_LOOK: usize = 64 << 20;

/// How much of wide messages a connection has on its way: as much as its NIC sends in some ten milliseconds. More would be lost to
/// faster NICs, and less would leave it idle between two looks.
#[derive(Debug)]
pub struct ConnectionPace {
    window: usize,
    /// Bytes given since the window has changed.
    given: usize,
    /// When something was given last.
    since: Option<Instant>,
    /// What is delivered lately, in bytes for each microsecond; nothing where that is not known.
    rate: Option<f64>,
    /// Since when that is being measured: what had been delivered then, and whether something was on its way.
    begun: Option<(Instant, u64, bool)>,
}

impl ConnectionPace {
    const FIRST: usize = 256 << 10;
    const LEAST: usize = 128 << 10;
    const MOST: usize = 8 << 20;
    /// A window that is full for so long is too large.
    const PATIENCE: Duration = Duration::from_millis(20);
    /// A rate is of so long a time: a link may take some hundred KiB at once after a pause.
    const SURE: Duration = Duration::from_millis(30);
    /// A connection that got nothing for so long gets a frame, however slow it was.
    const FORGETS: Duration = Duration::from_secs(2);

    /// Whether there is room for more, with so much on its way.
    pub fn has_room(&mut self, under_way: usize, now: Instant) -> bool {
        if under_way < self.window {
            if under_way < self.window / 4 && self.given >= self.window {
                (self.window, self.given) = ((2 * self.window).min(ConnectionPace::MOST), 0);
            }
            return true;
        }
        if self.since.is_some_and(|since| now.saturating_duration_since(since) >= ConnectionPace::PATIENCE) {
            (self.window, self.given, self.since) = ((self.window / 2).max(ConnectionPace::LEAST), 0, Some(now));
        }
        false
    }

    /// Notes that so many bytes have been given.
    pub fn gave(&mut self, bytes: usize, now: Instant) {
        self.given += bytes;
        self.since = Some(now);
    }

    /// Takes what the connection has delivered in all, and whether something is on its way.
    pub fn look(&mut self, delivered: u64, is_busy: bool, now: Instant) {
        let Some((since, before, was_busy)) = self.begun else {
            self.begun = Some((now, delivered, is_busy));
            return;
        };
        let time = now.saturating_duration_since(since);
        if time < ConnectionPace::SURE {
            return;
        }
        let rate = delivered.saturating_sub(before) as f64 / (time.as_nanos() as f64 / 1e3);
        self.rate = match self.rate {
            Some(known) if was_busy && is_busy => Some((known + rate) / 2.0),
            // In a part of the time there was nothing to deliver: it is as fast at least.
            Some(known) => Some(known.max(rate)),
            None => Some(rate).filter(|rate| *rate > 0.0),
        };
        self.begun = Some((now, delivered, is_busy));
    }

    /// Takes what it delivered long ago for nothing.
    pub fn forget(&mut self) {
        (self.rate, self.begun) = (None, None);
    }

    /// When a frame is delivered that it gets now, by the time that one takes at the rate `best`, which those have that were not
    /// measured.
    fn expected(&self, under_way: usize, best: f64, now: Instant) -> usize {
        let is_forgotten =
            self.since.is_none_or(|since| now.saturating_duration_since(since) >= ConnectionPace::FORGETS);
        let rate = self.rate.filter(|_| !is_forgotten).unwrap_or(best);
        (((under_way + WIDE_STRIPE) as f64 / WIDE_STRIPE as f64) * (best / rate.max(f64::MIN_POSITIVE))) as usize
    }
}

impl Default for ConnectionPace {
    fn default() -> ConnectionPace {
        ConnectionPace { window: ConnectionPace::FIRST, given: 0, since: None, rate: None, begun: None }
    }
}

impl TcpPeer {
    /// Hands granted messages out among the connections by all NICs, each stripe to the one that is expected to deliver it first.
    /// Whether something is left because that has no room.
    #[inline(never)]
    pub(super) fn hand_out(&mut self, lossless: &mut Lossless, done: &mut Vec<Token>) -> bool {
        if !self.has_granted() {
            return false;
        }
        let (wanted, now, nics) = (self.wanted(), Instant::now(), 1 + self.shares.further);
        let nic_of: SmallVec<[usize; 32]> = (0..wanted).map(|index| self.nic_of(index as u8)).collect();
        let adapts = self.watch.is_some();
        let TcpPeer { links, matching, writes, next_nic, unlooked, gauge, is_paused, .. } = self;
        let rates = links.iter().filter_map(|link| link.connection.pace.rate);
        // Of those that were never measured each is taken for the best.
        let best = rates.reduce(f64::max).filter(|&best| best > 0.0).unwrap_or(1.0);
        let mut turn = CODED_TURN;
        while let Some((id, message)) = matching.next_granted() {
            if turn == 0 {
                *is_paused = true;
                return false;
            }
            let takes = |link: &mut &mut TcpLink| {
                link.way == Way::Out && usize::from(link.index) < wanted && link.connection.takes_parts()
            };
            let mut is_full = false;
            let ours = links.iter_mut().filter_map(|mut link| takes(&mut link).then_some(link));
            // Where several are as early, NICs take turns.
            let order = |link: &TcpLink| (nic_of[usize::from(link.index)] + nics - *next_nic % nics) % nics;
            let with_room = ours.filter_map(|link| {
                let under_way = link.connection.under_way();
                let has_room = link.connection.pace.has_room(under_way, now);
                is_full |= !has_room;
                let expected = match adapts {
                    true => link.connection.pace.expected(under_way, best, now),
                    false => under_way / WIDE_STRIPE,
                };
                (has_room || adapts).then_some((expected, has_room, link))
            });
            let Some((_, true, link)) = with_room.min_by_key(|(expected, _, link)| (*expected, order(link))) else {
                return is_full;
            };
            let connection = &mut link.connection;
            let coders = (&mut *lossless, &mut *gauge);
            let given = give_frame(coders, (id, message), connection, WIDE_STRIPE, &mut turn);
            let Some(given) = given else { return false };
            connection.pace.gave(given, now);
            *unlooked += given;
            *next_nic = nic_of[usize::from(link.index)] + 1;
            *writes += 1;
            let mut left = smallvec::SmallVec::<[(u64, usize); 4]>::new();
            connection.flush(|id| matching.source(id), |id, bytes| left.push((id, bytes)), done);
            for (id, bytes) in left {
                if matching.part_sent(id, bytes, done) {
                    matching.close(id);
                }
            }
        }
        false
    }

    /// Large messages go by the rank's own NIC while it delivers what it did, and by all while it does not.
    pub fn adapt(&mut self) {
        self.watch = Some(NicWatch::default());
    }

    /// Whether it is time to look at what connections have delivered.
    pub fn is_due(&self) -> bool {
        self.unlooked >= self.looks_after
    }

    /// What its connections deliver, by NICs: those that messages go by now.
    fn rates(&mut self) -> SmallVec<[Option<f64>; 8]> {
        let shown = self.wanted().max(self.shares.numbers());
        let (mut of_nics, now) = (SmallVec::<[Option<f64>; 8]>::new(), Instant::now());
        for at in 0..self.links.len() {
            let TcpLink { way, index, .. } = self.links[at];
            let nic = self.nic_of(index);
            let connection = &mut self.links[at].connection;
            if way == Way::In || usize::from(index) >= shown || !connection.takes_parts() {
                continue;
            }
            of_nics.resize(of_nics.len().max(nic + 1), None);
            connection.look_at_rate(now);
            if let Some(rate) = connection.pace.rate {
                *of_nics[nic].get_or_insert(0.0) += rate;
            }
        }
        of_nics
    }

    /// What its system has acknowledged on the connections by the rank's own NIC.
    pub fn acknowledged(&self) -> u64 {
        let own = |link: &&TcpLink| link.connection.writes && !link.connection.is_further;
        self.links.iter().filter(own).map(|link| link.connection.acknowledged()).sum()
    }

    /// Looks at what connections have delivered, from time to time.
    #[inline(never)]
    pub(super) fn look_at_rates(&mut self) {
        let of_nics = self.rates();
        let given = std::mem::take(&mut self.unlooked);
        let total: f64 = of_nics.iter().flatten().sum();
        self.looks_after = ((total * LOOK_US) as usize).clamp(LEAST_LOOK, MOST_LOOK);
        let (own, further) = (of_nics.first().copied().flatten(), of_nics.iter().skip(1));
        let other = further.flatten().copied().reduce(f64::max);
        let Some(watch) = &mut self.watch else { return };
        let was_wide = watch.is_wide();
        let told = watch.look(given, own, other);
        if watch.is_wide() && !was_wide {
            self.links
                .iter_mut()
                .filter(|link| link.connection.is_further)
                .for_each(|link| link.connection.pace.forget());
        }
        if let Some(is_wide) = told {
            self.tell_change(is_wide, own.unwrap_or(0.0), other.unwrap_or(0.0));
        }
    }

    #[cold]
    fn tell_change(&self, is_wide: bool, own: f64, other: f64) {
        let by = if is_wide { "all NICs of its node" } else { "its own NIC again" };
        crate::info!(
            "rank {}: its NIC delivers {own:.1} MB/s to rank {}, another one {other:.1} MB/s: large messages go by {by}",
            self.me,
            self.rank
        );
    }

    /// Whether something is to be sent that no connection has room for yet, which no socket tells of.
    pub fn waits_for_room(&self) -> bool {
        self.waits_for_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_sends_fast_gets_more_and_a_slow_one_less() {
        let (mut fast, mut slow, begun) = (ConnectionPace::default(), ConnectionPace::default(), Instant::now());
        let after = |ms| begun + Duration::from_millis(ms);
        for step in 0..4 {
            assert!(fast.has_room(0, after(step)));
            fast.gave(fast.window, after(step));
        }
        assert!(fast.has_room(0, after(5)) && fast.window == 16 * ConnectionPace::FIRST);
        slow.gave(ConnectionPace::FIRST, after(0));
        assert!(!slow.has_room(ConnectionPace::FIRST, after(19)) && slow.window == ConnectionPace::FIRST);
        assert!(!slow.has_room(ConnectionPace::FIRST, after(20)) && slow.window == ConnectionPace::FIRST / 2);
        assert!(
            !slow.has_room(ConnectionPace::FIRST, after(80)) && slow.window == ConnectionPace::LEAST,
            "it does not stop"
        );
        // Room that is not used makes nobody faster.
        (0..9).for_each(|_| assert!(slow.has_room(0, after(90)) && slow.window == ConnectionPace::LEAST));
    }
}
