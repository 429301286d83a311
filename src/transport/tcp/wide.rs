//! Large messages by all NICs of a node: which connection takes the next frame.
//!
//! Each frame goes to the connection that has the least on its way, and none to one that has more on its way than its NIC sends in
//! some ten milliseconds. Whether a socket takes more says nothing: what its congestion window lets go lies in the NIC's queue.
#![forbid(unsafe_code)]

use super::{give_frame, Lossless, TcpLink, TcpPeer, Way, CODED_TURN};
use crate::exec::Token;
use smallvec::SmallVec;
use std::time::{Duration, Instant};

/// Bytes of one frame: the slowest NIC's last one is waited for.
const WIDE_STRIPE: usize = 64 << 10;

/// How much of wide messages a connection has on its way: as much as its NIC sends in some ten milliseconds. More would be lost to
/// faster NICs, and less would leave it idle between two looks.
#[derive(Debug)]
pub struct ConnectionPace {
    window: usize,
    /// Bytes given since the window has changed.
    given: usize,
    /// When something was given last.
    since: Option<Instant>,
}

impl ConnectionPace {
    const FIRST: usize = 256 << 10;
    const LEAST: usize = 128 << 10;
    const MOST: usize = 8 << 20;
    /// A window that is full for so long is too large.
    const PATIENCE: Duration = Duration::from_millis(20);

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
}

impl Default for ConnectionPace {
    fn default() -> ConnectionPace {
        ConnectionPace { window: ConnectionPace::FIRST, given: 0, since: None }
    }
}

impl TcpPeer {
    /// Hands granted messages out among the connections by all NICs, each stripe to the one that has the least on its way. Whether
    /// something is left because none has room.
    #[inline(never)]
    pub(super) fn hand_out(&mut self, lossless: &mut Lossless, done: &mut Vec<Token>) -> bool {
        if !self.has_granted() {
            return false;
        }
        let (wanted, now, nics) = (self.wanted(), Instant::now(), 1 + self.shares.further);
        let nic_of: SmallVec<[usize; 32]> = (0..wanted).map(|index| self.nic_of(index as u8)).collect();
        let TcpPeer { links, matching, writes, next_nic, gauge, is_paused, .. } = self;
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
            // Where several have as little on their way, NICs take turns.
            let order = |link: &TcpLink| (nic_of[usize::from(link.index)] + nics - *next_nic % nics) % nics;
            let ours = links.iter_mut().filter_map(|mut link| takes(&mut link).then_some(link));
            let with_room = ours.filter_map(|link| {
                let under_way = link.connection.under_way();
                let has_room = link.connection.pace.has_room(under_way, now);
                is_full |= !has_room;
                has_room.then_some((under_way, link))
            });
            let Some((_, link)) = with_room.min_by_key(|(under_way, link)| (under_way / WIDE_STRIPE, order(link)))
            else {
                return is_full;
            };
            let connection = &mut link.connection;
            let coders = (&mut *lossless, &mut *gauge);
            let given = give_frame(coders, (id, message), connection, WIDE_STRIPE, &mut turn);
            let Some(given) = given else { return false };
            connection.pace.gave(given, now);
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
