//! Two peers over real sockets, of which every order of sends, receives, new connections, reads and writes comes from
//! generated steps: frames keep their order when a direction moves to the connection for both ways, receipts come in
//! the headers of messages or by themselves, and coded messages are what they were.

use super::super::super::worlds::region;
use super::*;
use crate::config::{Config, LosslessSetting};
use crate::fork;
use proptest::prelude::*;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

/// Messages of zero bytes, some in a header's neighbourhood, the longest small one, and long ones of one stripe and more.
const SIZES: [usize; 7] = [0, 8, 100, 4096, SMALL, SMALL + 1, MAX_STRIPE + 100];
/// Connections that a rank makes where long messages wait: two by its own NIC, and as many by another one.
const SHARES: Shares = Shares { own: 2, further: 1 };
/// How long the messages may take to arrive when all has been posted.
const LIMIT: Duration = Duration::from_secs(20);

/// The bytes of the message with this number from a rank.
fn message(from: usize, number: usize) -> Vec<u8> {
    let size = SIZES[(3 * number + number / 7 + from) % SIZES.len()];
    (0..size).map(|at| (at * 31 + from * 101 + number * 7) as u8).collect()
}

fn envelope(number: usize) -> Envelope {
    Envelope { channel: 0, sequence: number as u64, signature: 7 }
}

/// A rank's view of the other one, and what it has posted.
struct End {
    me: usize,
    peer: TcpPeer,
    lossless: Lossless,
    sent: Vec<Vec<u8>>,
    places: Vec<Vec<u8>>,
    done: Vec<Token>,
}

/// Ranks 0 and 1. Tokens of sends are even, of receives odd.
struct Pair {
    ends: [End; 2],
    listener: TcpListener,
    /// Connections that were made and have not been let in: their number, and who shall get them.
    callers: Vec<(usize, u8, Connection)>,
}

fn setting(lossless: LosslessSetting) -> Lossless {
    Lossless::new(&Config { lossless, lossless_min_bytes: 1, ..Config::default() })
}

impl Pair {
    fn new() -> Pair {
        Pair::coding([LosslessSetting::Off; 2])
    }

    /// Ranks that code, or do not.
    fn coding(settings: [LosslessSetting; 2]) -> Pair {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let end = |me: usize| End {
            me,
            peer: TcpPeer::new(Rank(me as u32), Rank(1 - me as u32), vec![address], [0; 16], SHARES),
            lossless: setting(settings[me]),
            sent: Vec::new(),
            places: Vec::new(),
            done: Vec::new(),
        };
        Pair { ends: [end(0), end(1)], listener, callers: Vec::new() }
    }

    /// A rank makes its next connection; the other one lets it in later.
    fn connect(&mut self, from: usize) {
        let address: SocketAddr = self.listener.local_addr().unwrap();
        let (ours, theirs) = {
            let hold = fork::hold();
            let ours = TcpStream::connect(address).unwrap();
            let theirs = self.listener.accept().unwrap().0;
            for socket in [&ours, &theirs] {
                socket.set_nonblocking(true).unwrap();
                socket.set_nodelay(true).unwrap();
            }
            (fork::Unshared::new(ours, &hold), fork::Unshared::new(theirs, &hold))
        };
        let peer = &mut self.ends[from].peer;
        let index = peer.made() as u8;
        let mut connection = Connection::outgoing(ours, peer.is_shared(index));
        connection.is_further = peer.nic_of(index) > 0;
        peer.add(TcpLink { way: Way::Out, index, connection });
        self.callers.push((1 - from, index, Connection::incoming(theirs)));
    }

    fn let_in(&mut self) {
        if !self.callers.is_empty() {
            let (to, index, connection) = self.callers.remove(0);
            self.ends[to].peer.add(TcpLink { way: Way::In, index, connection });
        }
    }

    fn send(&mut self, me: usize) {
        if !self.ends[me].peer.is_reached() {
            self.connect(me);
        }
        let End { peer, sent, done, .. } = &mut self.ends[me];
        let number = sent.len();
        let mut bytes = message(me, number);
        let token = 2 * number as Token;
        match peer.send(token, envelope(number), &[region(&mut bytes)]).unwrap() {
            Started::Busy => return,
            Started::Done => done.push(token),
            Started::Pending => {}
        }
        sent.push(bytes);
    }

    fn recv(&mut self, me: usize) {
        if !self.ends[me].peer.is_reached() {
            self.connect(me);
        }
        let End { peer, places, done, .. } = &mut self.ends[me];
        let number = places.len();
        let mut place = vec![0; message(1 - me, number).len()];
        let into = [region(&mut place)];
        places.push(place);
        let token = 2 * number as Token + 1;
        if peer.recv(token, envelope(number), Sink::Store(&into)).unwrap() == Started::Done {
            done.push(token);
        }
    }

    fn read(&mut self, me: usize, link: usize) {
        let End { peer, lossless, done, .. } = &mut self.ends[me];
        if peer.links.get(link).is_some_and(|link| link.connection.reads) {
            peer.read(link, lossless, done).unwrap();
        }
    }

    fn write(&mut self, me: usize) {
        let peer = &self.ends[me].peer;
        let wants_more = peer.has_granted() && peer.made() < peer.wanted();
        if wants_more || (peer.has_answers() && peer.answers_on().is_none()) {
            self.connect(me);
        }
        let End { peer, lossless, done, .. } = &mut self.ends[me];
        peer.write(lossless, done);
        peer.check().unwrap();
    }

    fn step(&mut self, (what, me, link): (u8, usize, usize)) {
        match what {
            0..=3 => self.send(me),
            4..=6 => self.recv(me),
            7..=9 => self.read(me, link),
            10 | 11 => self.write(me),
            12 => self.ends[me].peer.set_wide(link % 2 == 0),
            _ => self.let_in(),
        }
    }

    fn count(&self, me: usize, odd: u32) -> usize {
        self.ends[me].done.iter().filter(|&&token| token as u32 % 2 == odd).count()
    }

    /// Posts the receives of all that was sent, sends as many messages each way, and moves everything until it is there.
    fn finish(&mut self, each: usize) {
        let begun = Instant::now();
        while (0..2).any(|me| self.count(me, 0) < each || self.count(me, 1) < each) {
            assert!(begun.elapsed() < LIMIT, "{:?}", self.ends.iter().map(|end| &end.peer).collect::<Vec<_>>());
            for me in 0..2 {
                if self.ends[me].sent.len() < each {
                    self.send(me);
                }
                if self.ends[me].places.len() < each {
                    self.recv(me);
                }
                self.let_in();
                (0..self.ends[me].peer.links.len()).rev().for_each(|link| self.read(me, link));
                self.write(me);
            }
        }
    }
}

/// The end that a rank's headers and small messages go on: who made the connection, and its number.
fn speaks_on(end: &End) -> Option<(Way, u8)> {
    end.peer.control.map(|at| (end.peer.links[at].way, end.peer.links[at].index))
}

proptest! {
    #[test]
    fn messages_arrive_whole_and_in_order_whatever_comes_first(
        steps in prop::collection::vec((0u8..15, 0usize..2, 0usize..8), 0..200),
        coding in prop::array::uniform2(prop_oneof![7 => Just(LosslessSetting::Off), 1 => Just(LosslessSetting::Always)]),
    ) {
        let mut pair = Pair::coding(coding);
        steps.into_iter().for_each(|step| pair.step(step));
        let most = |count: fn(&End) -> usize| pair.ends.iter().map(count).max().unwrap();
        let each = 40 + most(|end| end.sent.len()).max(most(|end| end.places.len()));
        pair.finish(each);
        for end in &pair.ends {
            for (number, place) in end.places.iter().enumerate() {
                prop_assert!(*place == message(1 - end.me, number), "message {number} to rank {}", end.me);
            }
            let mut sends: Vec<Token> = end.done.clone();
            sends.sort_unstable();
            sends.dedup();
            prop_assert_eq!(sends.len(), end.done.len(), "nothing is reported twice");
            let (original, coded) = end.lossless.totals();
            prop_assert_eq!(original > coded, coding[end.me] == LosslessSetting::Always, "long messages are coded where they are to be");
        }
        prop_assert_eq!(speaks_on(&pair.ends[0]), Some((Way::Out, 0)));
        prop_assert_eq!(speaks_on(&pair.ends[1]), Some((Way::In, 0)), "both speak on the lower rank's first connection");
    }
}

#[test]
fn receipts_of_a_stream_one_way_come_by_themselves_and_of_turns_in_headers() {
    for turns in [false, true] {
        let mut pair = Pair::new();
        let end = |me: usize, pair: &mut Pair| {
            (0..pair.ends[me].peer.links.len()).for_each(|link| pair.read(me, link));
            pair.write(me);
        };
        let mut own_frames = 0;
        for number in 0..64 {
            for (from, to) in [(0, 1), (1, 0)].into_iter().take(1 + usize::from(turns)) {
                let peer = &mut pair.ends[to].peer;
                let mut place = [0; 8];
                if !peer.is_reached() {
                    pair.connect(to);
                    pair.let_in();
                }
                pair.ends[to].peer.recv(1, envelope(number), Sink::Store(&[region(&mut place)])).unwrap();
                if !pair.ends[from].peer.is_reached() {
                    pair.connect(from);
                    pair.let_in();
                }
                let begun = Instant::now();
                while pair.ends[from].peer.send(0, envelope(number), &[region(&mut [5; 8])]).unwrap() == Started::Busy {
                    assert!(begun.elapsed() < LIMIT, "message {number} found no room");
                    end(from, &mut pair);
                    end(to, &mut pair);
                    pair.let_in();
                }
                while pair.count(to, 1) <= number {
                    assert!(begun.elapsed() < LIMIT, "message {number} did not come");
                    (0..pair.ends[to].peer.links.len()).for_each(|link| pair.read(to, link));
                }
                assert_eq!(place, [5; 8]);
                own_frames += usize::from(pair.ends[to].peer.has_answers());
                pair.write(to);
                pair.let_in();
            }
        }
        // Every 16th message asks for one.
        assert_eq!(own_frames, if turns { 0 } else { 4 }, "turns: {turns}");
    }
}

#[test]
fn a_message_has_a_frame_for_each_connection_unless_those_are_too_short_or_too_long() {
    let kib = |bytes: usize, shares| stripe(bytes << 10, shares) >> 10;
    assert_eq!([kib(512, 1), kib(1024, 1), kib(9000, 1)], [512, 1024, 1024]);
    assert_eq!([kib(64, 2), kib(1024, 2), kib(1536, 2), kib(9000, 2)], [256, 512, 768, 1024]);
    // 600,004 bytes in two halves would be cut within an element, which a receiver that reduces waits for in vain.
    assert_eq!(stripe(600_004, 2), 300_032);
}

/// Where a coded frame says that it belongs, how many bytes it says that it stands for, and its body.
type Said = (u64, u64, Vec<u8>);

/// What becomes of these frames at rank 1, which has asked for the message of 100,000 bytes that they belong to.
fn receive(frames: &[Said]) -> Result<Vec<u8>> {
    let mut pair = Pair::new();
    let (mut bytes, mut place) = (vec![7; 100_000], vec![0; 100_000]);
    pair.connect(0);
    pair.connect(1);
    (0..2).for_each(|_| pair.let_in());
    pair.ends[0].peer.send(0, envelope(0), &[region(&mut bytes)]).unwrap();
    pair.ends[1].peer.recv(1, envelope(0), Sink::Store(&[region(&mut place)])).unwrap();
    let begun = Instant::now();
    while !pair.ends[0].peer.has_granted() {
        assert!(begun.elapsed() < LIMIT);
        (0..2).for_each(|me| (0..2).for_each(|link| pair.read(me, link)));
        pair.write(1);
    }
    let own = pair.ends[0].peer.link(Way::Out, 0).unwrap();
    let connection = &mut pair.ends[0].peer.links[own].connection;
    for (offset, original, body) in frames {
        let about = FrameHeader::about(FrameKind::Coded, 0);
        let head = FrameHeader { bytes: *offset, body: body.len() as u64, nonce: *original, ..about };
        connection.push(head.encode(), Body::Owned(body.clone()));
    }
    connection.flush(|_| None, |_, _| {}, &mut Vec::new());
    assert!(connection.is_flushed());
    let End { peer, lossless, done, .. } = &mut pair.ends[1];
    let from = peer.link(Way::In, 0).unwrap();
    while done.is_empty() {
        assert!(begun.elapsed() < LIMIT);
        peer.read(from, lossless, done)?;
    }
    Ok(place)
}

#[test]
fn a_coded_frame_that_makes_no_sense_names_its_rank() {
    let mut codec = crate::transport::lossless::codec::Codec::new().unwrap();
    let mut frame = vec![0; MAX_CODED];
    codec.original(50_000).fill(7);
    let form = codec.choose(50_000).unwrap();
    let len = codec.encode(50_000, form, &mut frame).unwrap();
    frame.truncate(len);
    let mut damaged = frame.clone();
    damaged[len - 3] ^= 1;
    for (offset, original, body, told) in [
        (0, 50_000, damaged, "a coded frame"),
        (0, 50_001, frame.clone(), "a coded frame"),
        (0, 50_000, frame[..len - 1].to_vec(), "a coded frame"),
        (0, 50_000, Vec::new(), "a coded frame without a head"),
        (50_001, 50_000, frame.clone(), "bytes nobody asked for"),
        (u64::MAX, 50_000, frame.clone(), "bytes nobody asked for"),
        (0, 0, frame.clone(), "bytes nobody asked for"),
        (0, u64::MAX, frame.clone(), "bytes nobody asked for"),
        (0, 90_000, frame.clone(), "a coded frame that is too long"),
        (0, 50_000, vec![0; MAX_CODED + 1], "a small message or a coded frame that is too long"),
    ] {
        let error = receive(&[(offset, original, body)]).expect_err(told).to_string();
        assert!(error.contains(&format!("rank 0 sent {told}")), "{error}");
    }
    assert_eq!(receive(&[(50_000, 50_000, frame.clone()), (0, 50_000, frame)]), Ok(vec![7; 100_000]));
}

/// Nothing is given to a connection by another NIC before the peer's system has answered on it, and its failure is nobody's.
#[test]
fn a_nic_that_leads_nowhere_is_left_alone() {
    let mut pair = Pair::coding([LosslessSetting::Off; 2]);
    pair.ends[0].peer.set_wide(true);
    (0..4).for_each(|_| pair.connect(0));
    (0..4).for_each(|_| pair.let_in());
    let lost = pair.ends[0].peer.link(Way::Out, 3).unwrap();
    pair.ends[0].peer.links[lost].connection.lose_output("no route to host".into());
    pair.finish(20);
    for (number, place) in pair.ends[1].places.iter().enumerate() {
        assert!(*place == message(0, number), "message {number}");
    }
    let peer = &pair.ends[0].peer;
    assert!(peer.links[lost].connection.is_unreached() && !peer.takes_nothing());
    let has_answered = |index| peer.links[peer.link(Way::Out, index).unwrap()].connection.has_answered;
    assert!(has_answered(2) && !has_answered(3));
}

#[test]
fn a_connection_goes_by_the_nic_that_its_number_says() {
    let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let paths = |own, further| {
        let peer = TcpPeer::new(Rank(0), Rank(1), vec![address(1), address(2)], [0; 16], Shares { own, further });
        (0..peer.most() as u8).map(|index| (peer.nic_of(index), peer.address(index).port())).collect::<Vec<_>>()
    };
    assert_eq!(paths(2, 3), [(0, 1), (0, 1), (1, 2), (1, 2), (2, 1), (2, 1), (3, 2), (3, 2)]);
    // The second connection, for answers, leads where the first one does.
    assert_eq!(paths(1, 2), [(0, 1), (0, 1), (1, 2), (2, 1)]);
}
