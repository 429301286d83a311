//! Two matchings and a wire between them, of which every order of events comes from generated steps.

use super::super::worlds::region;
use super::*;
use crate::device::host::Combine;
use crate::dtype::{DataType, Operator};
use crate::plan::OperandOrder;
use crate::transport::streams::LARGE_IN_FLIGHT;
use proptest::prelude::*;

const CHANNELS: usize = 3;
/// Messages of more bytes are announced.
const SHORT: usize = 100;
const SIZES: [usize; 7] = [0, 1, 8, 100, 101, 256, 1000];
/// Bytes of a part.
const PART: usize = 96;
/// Short messages that may wait for their receives on a channel.
const MOST_SHORT: usize = 47;

fn envelope(channel: usize, sequence: usize) -> Envelope {
    Envelope { channel: channel as Channel, sequence: sequence as u64, signature: 7 }
}

/// Names a message, and both of its operations.
fn token(channel: usize, sequence: usize) -> Token {
    (sequence * CHANNELS + channel) as Token
}

/// The bytes of message `sequence`, of which every channel has other ones.
fn message(channel: usize, sequence: usize) -> Vec<u8> {
    let size = SIZES[(channel + 3 * sequence + sequence / 5) % SIZES.len()];
    (0..size).map(|at| (at * 31 + channel * 7 + sequence) as u8).collect()
}

enum Forward {
    Short(MessageHead, Vec<u8>),
    Long(MessageHead, bool),
    Part(u64, usize, Vec<u8>),
}

enum Back {
    Acknowledged(u64),
    Granted(u64),
}

/// A sender, rank 0, and a receiver, rank 1. Every other long message is fetched and acknowledged, as by shared memory; the
/// rest are asked for and come in parts, as by TCP.
struct World {
    sender: Matching<bool>,
    receiver: Matching<bool>,
    forward: VecDeque<Forward>,
    back: VecDeque<Back>,
    fetches: VecDeque<Fetch<bool>>,
    sources: Vec<Vec<u8>>,
    sent: [usize; CHANNELS],
    places: [Vec<Vec<u8>>; CHANNELS],
    sends_done: Vec<Token>,
    receives_done: Vec<Token>,
    /// The receive, by its number in the order of posting, that is of one byte more than its message.
    wrong: Option<usize>,
}

impl World {
    fn new(wrong: Option<usize>) -> World {
        World {
            sender: Matching::new(Rank(1), 64),
            receiver: Matching::new(Rank(0), 64),
            forward: VecDeque::new(),
            back: VecDeque::new(),
            fetches: VecDeque::new(),
            sources: Vec::new(),
            sent: [0; CHANNELS],
            places: Default::default(),
            sends_done: Vec::new(),
            receives_done: Vec::new(),
            wrong,
        }
    }

    fn send(&mut self, channel: usize) -> bool {
        let (sequence, at) = (self.sent[channel], channel as Channel);
        let mut bytes = message(channel, sequence);
        let head = |number| MessageHead { envelope: envelope(channel, sequence), bytes: bytes.len(), number };
        if bytes.len() <= SHORT {
            if !self.sender.takes_short(at) {
                return false;
            }
            let head = head(self.sender.short_sent(at));
            self.forward.push_back(Forward::Short(head, bytes));
            self.sends_done.push(token(channel, sequence));
        } else {
            if !self.sender.takes_long(at) {
                return false;
            }
            let head = MessageHead { number: NO_ID, ..head(0) };
            let number = self.sender.long_sent(at, token(channel, sequence), &[region(&mut bytes)]);
            self.forward.push_back(Forward::Long(MessageHead { number, ..head }, sequence.is_multiple_of(2)));
            self.sources.push(bytes);
        }
        self.sent[channel] += 1;
        true
    }

    fn recv(&mut self, channel: usize) -> Result<()> {
        let sequence = self.places[channel].len();
        let posted: usize = self.places.iter().map(Vec::len).sum();
        let more = usize::from(self.wrong == Some(posted));
        let mut place = vec![0; message(channel, sequence).len() + more];
        let into = [region(&mut place)];
        self.places[channel].push(place);
        let (token, envelope) = (token(channel, sequence), envelope(channel, sequence));
        match self.receiver.recv(token, envelope, Sink::Store(&into))? {
            Received::Waits => {}
            Received::Short(mark) => {
                self.receives_done.push(token);
                self.back.extend(mark.map(Back::Acknowledged));
            }
            Received::Long(fetch) => self.begin(*fetch)?,
        }
        Ok(())
    }

    fn begin(&mut self, fetch: Fetch<bool>) -> Result<()> {
        if fetch.announced {
            self.fetches.push_back(fetch);
            return Ok(());
        }
        self.receiver.await_bytes(fetch.number, fetch.posted, 0)?;
        self.back.push_back(Back::Granted(fetch.number));
        Ok(())
    }

    fn deliver(&mut self) -> Result<bool> {
        match self.forward.pop_front() {
            None => return Ok(false),
            Some(Forward::Short(head, mut bytes)) => {
                let mark = self.receiver.short_came(&head, region(&mut bytes), &mut self.receives_done)?;
                self.back.extend(mark.map(Back::Acknowledged));
            }
            Some(Forward::Long(head, fetched)) => {
                if let Some(fetch) = self.receiver.long_came(&head, fetched)? {
                    self.begin(fetch)?;
                }
            }
            Some(Forward::Part(number, offset, mut bytes)) => {
                let inflow = self.receiver.inflow(number).expect("the bytes were asked for");
                assert!(inflow.has(offset, bytes.len()));
                inflow.posted.target.consume(offset, region(&mut bytes));
                self.receiver.part_came(number, bytes.len(), &mut self.receives_done);
            }
        }
        Ok(true)
    }

    fn answer(&mut self) -> Result<bool> {
        match self.back.pop_front() {
            None => return Ok(false),
            Some(Back::Granted(number)) => self.sender.grant(number)?,
            Some(Back::Acknowledged(number)) => {
                if self.sender.acknowledged(number)?.is_some() {
                    let closed = self.sender.close(number).expect("it is open");
                    self.sends_done.push(closed.token);
                }
            }
        }
        Ok(true)
    }

    fn push(&mut self) -> bool {
        let Some((number, message)) = self.sender.next_granted() else { return false };
        let (offset, len) = message.next_part(PART).expect("a part is left");
        let mut bytes = vec![0; len];
        region(&mut bytes).copy_from(message.src.run(offset, len));
        message.part_begun(len);
        self.forward.push_back(Forward::Part(number, offset, bytes));
        if self.sender.part_sent(number, len, &mut self.sends_done) {
            self.sender.close(number);
        }
        true
    }

    fn fetch(&mut self) -> bool {
        let Some(Fetch { number, posted, .. }) = self.fetches.pop_front() else { return false };
        let source = self.sender.source(number).expect("a message that is not acknowledged is open");
        posted.target.consume(0, source.run(0, source.bytes()));
        self.receives_done.push(posted.token);
        self.back.push_back(Back::Acknowledged(number));
        true
    }

    /// One of the things that can happen next; whether it did.
    fn step(&mut self, what: u8, channel: usize) -> Result<bool> {
        let happened = match what {
            0 => self.send(channel),
            1 => {
                self.recv(channel)?;
                true
            }
            2 => self.deliver()?,
            3 => self.answer()?,
            4 => self.push(),
            _ => self.fetch(),
        };
        for channel in 0..CHANNELS {
            let stream = self.receiver.streams.at(channel as Channel);
            assert!(
                stream.posted.is_empty() || stream.arrived.is_empty(),
                "a message and a receive wait for each other"
            );
            assert!(stream.arrived.len() <= MOST_SHORT + LARGE_IN_FLIGHT as usize, "the sender is too far ahead");
        }
        Ok(happened)
    }

    /// Everything that can happen without a new send, and as many receives as messages.
    fn run_dry(&mut self) -> Result<()> {
        for channel in 0..CHANNELS {
            while self.places[channel].len() < self.sent[channel] {
                self.recv(channel)?;
            }
            while self.places[channel].len() > self.sent[channel] {
                while !self.send(channel) {
                    self.drain()?;
                }
            }
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<()> {
        while self.deliver()? || self.answer()? || self.push() || self.fetch() {}
        Ok(())
    }

    /// All messages have come whole, each once, and nothing is left.
    fn check_complete(&mut self) {
        let all: Vec<Token> = (0..CHANNELS).flat_map(|c| (0..self.sent[c]).map(move |at| token(c, at))).collect();
        for mut done in [self.sends_done.clone(), self.receives_done.clone()] {
            done.sort_unstable();
            let mut all = all.clone();
            all.sort_unstable();
            assert_eq!(done, all);
        }
        for (channel, places) in self.places.iter().enumerate() {
            for (sequence, place) in places.iter().enumerate() {
                assert_eq!(*place, message(channel, sequence), "message {sequence} of channel {channel}");
            }
        }
        assert!(!self.sender.owes() && !self.sender.has_numbered() && !self.sender.has_granted());
        assert!(!self.receiver.expects());
    }
}

fn steps() -> impl Strategy<Value = Vec<(u8, usize)>> {
    proptest::collection::vec((0..6u8, 0..CHANNELS), 0..if cfg!(miri) { 40 } else { 400 })
}

fn cases() -> ProptestConfig {
    let persistence = None;
    ProptestConfig { cases: if cfg!(miri) { 4 } else { 400 }, failure_persistence: persistence, ..Default::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_message_meets_its_receive_once_in_any_order_of_events(steps in steps()) {
        let mut world = World::new(None);
        for (what, channel) in steps {
            world.step(what, channel).unwrap();
        }
        world.run_dry().unwrap();
        world.check_complete();
    }

    #[test]
    fn a_receive_of_another_length_is_an_error_that_names_the_rank_and_both_lengths(steps in steps(), wrong in 0..20usize) {
        let mut world = World::new(Some(wrong));
        let run = || {
            for (what, channel) in steps {
                world.step(what, channel)?;
            }
            while world.places.iter().map(Vec::len).sum::<usize>() <= wrong {
                world.recv(0)?;
            }
            world.run_dry()
        };
        let Err(Error::InvalidUsage(text)) = run() else { panic!("a receive of a wrong length was complete") };
        let number = |word: usize| text.split(' ').nth(word).and_then(|word| word.parse::<usize>().ok());
        prop_assert_eq!((text.starts_with("rank 0 sent "), number(6)), (true, number(3).map(|sent| sent + 1)), "{}", text);
    }

    #[test]
    fn after_a_failure_in_the_middle_nothing_is_open_and_late_answers_are_refused(steps in steps()) {
        let mut world = World::new(None);
        for (what, channel) in steps {
            world.step(what, channel).unwrap();
        }
        world.sender.cancel();
        world.receiver.cancel();
        prop_assert!(!world.sender.owes() && !world.sender.has_numbered() && !world.sender.has_granted());
        prop_assert!(!world.receiver.expects());
        while let Some(answer) = world.back.pop_front() {
            let refused = match answer {
                Back::Granted(number) => world.sender.grant(number),
                Back::Acknowledged(number) => world.sender.acknowledged(number).map(|_| ()),
            };
            prop_assert!(matches!(refused, Err(Error::Internal(text)) if text.starts_with("rank 1 sent ")));
        }
        let late = |forward: &Forward| matches!(forward, Forward::Part(number, ..) if world.receiver.inflow(*number).is_some());
        prop_assert!(!world.forward.iter().any(late));
    }

    #[test]
    fn nothing_that_a_peer_says_makes_a_panic(said in proptest::collection::vec((0..7u8, 0..4u64, 0..4usize, 0..2u64), 0..60)) {
        let mut matching = Matching::<()>::new(Rank(3), 4);
        let (mut done, mut place, mut source) = (Vec::new(), [0u8; 2], [0u8; 2]);
        let into = [region(&mut place)];
        for (what, number, bytes, uses) in said {
            let number = if number == 3 { NO_ID } else { uses << 32 | number };
            let head = MessageHead { envelope: envelope(0, 0), bytes, number };
            match what {
                0 => if let Ok(Received::Long(fetch)) = matching.recv(1, envelope(0, 0), Sink::Store(&into)) {
                    _ = matching.await_bytes(fetch.number, fetch.posted, 0);
                },
                1 => _ = matching.short_came(&head, region(&mut source), &mut done),
                2 => _ = matching.long_came(&head, ()).map(|fetch| {
                    fetch.map(|fetch| matching.await_bytes(fetch.number, fetch.posted, 0))
                }),
                3 => _ = matching.acknowledged(number),
                4 => _ = matching.grant(number),
                5 if matching.takes_long(0) => _ = matching.long_sent(0, 1, &[region(&mut source)]),
                5 => {}
                _ => {
                    if matching.inflow(number).is_some_and(|inflow| inflow.has(bytes, 1)) {
                        matching.part_came(number, 1, &mut done);
                    }
                }
            }
        }
    }
}

#[test]
fn a_late_answer_is_not_taken_for_one_to_a_later_message_in_the_same_place() {
    let mut matching = Matching::<()>::new(Rank(1), 4);
    let mut bytes = [0; 8];
    let first = matching.long_sent(0, 1, &[region(&mut bytes)]);
    assert!(matching.close(first).is_some() && matching.close(first).is_none());
    let second = matching.long_sent(0, 2, &[region(&mut bytes)]);
    assert_eq!((second as u32, second == first), (first as u32, false));
    assert!(matching.acknowledged(first).is_err() && matching.grant(first).is_err());
    assert!(matching.source(first).is_none() && matching.numbered(second as u32) == Some(second));
    assert!(matching.grant(second).is_ok() && matching.grant(second).is_err(), "it is asked for once");
}

#[test]
fn as_many_messages_are_numbered_as_allowed_and_unmarked_ones_need_no_number() {
    let mut matching = Matching::<()>::new(Rank(1), 2);
    let mut bytes = [0; 8];
    let long: Vec<u64> = (0..2).map(|at| matching.long_sent(at, 1, &[region(&mut bytes)])).collect();
    assert!(!matching.takes_long(2), "no channel has a number left");
    let mut short = 0;
    while matching.takes_short(2) {
        assert_eq!(matching.short_sent(2), NO_ID);
        short += 1;
    }
    assert_eq!(short, 15, "the next one would be marked");
    let relief = matching.relief();
    assert!(matching.close(long[0]).is_some() && matching.relief() != relief);
    assert!(matching.takes_short(2) && matching.short_sent(2) != NO_ID);
}

#[test]
fn a_message_says_what_it_is_or_is_nonsense() {
    let mut matching = Matching::<()>::new(Rank(5), 4);
    let (mut bytes, mut done) = ([0; 8], Vec::new());
    let head = MessageHead { envelope: envelope(0, 0), bytes: 9, number: NO_ID };
    let told = [
        matching.short_came(&head, region(&mut bytes), &mut done).map(|_| ()),
        matching.long_came(&head, ()).map(|_| ()),
        matching.long_came(&MessageHead { bytes: 0, number: 1, ..head }, ()).map(|_| ()),
    ];
    for outcome in told {
        assert!(matches!(&outcome, Err(Error::Internal(text)) if text.starts_with("rank 5 sent ")), "{outcome:?}");
    }
    let posted = || Posted::new(1, envelope(0, 0), Sink::Store(&[]));
    assert!(matching.await_bytes(1, posted(), 0).is_ok());
    assert!(matching.await_bytes(1, posted(), 0).is_err(), "two messages with one number");
}

#[test]
fn a_message_that_was_kept_is_reduced_across_pieces_and_beyond_the_staging_buffer() {
    const LEN: usize = 20_000;
    let mut matching = Matching::<()>::new(Rank(1), 4);
    let head = MessageHead { envelope: envelope(0, 0), bytes: LEN, number: 9 };
    let mut body: Vec<u8> = (0..LEN).map(|at| (at % 7) as u8).collect();
    let mut done = Vec::new();
    assert_eq!(matching.short_came(&head, region(&mut body), &mut done), Ok(None));
    let mut sum: Vec<u8> = (0..LEN).map(|at| (at % 5) as u8).collect();
    let all = region(&mut sum);
    let pieces = [all.part(0, 3), all.part(3, 9000), all.part(9003, LEN - 9003)];
    let combine = Combine { dtype: DataType::U8, operator: Operator::Sum, order: OperandOrder::LocalFirst, divisor: 1 };
    let sink = Sink::Reduce { local: &pieces, dst: &pieces, combine };
    let Ok(Received::Short(Some(9))) = matching.recv(1, envelope(0, 0), sink) else {
        panic!("it was there, and marked")
    };
    assert!(sum.iter().enumerate().all(|(at, &byte)| usize::from(byte) == at % 7 + at % 5));
}
