//! The toy transport [`loopback`] on the way of every transport: registered, chosen by its name, used by collectives, and
//! held to what a transport promises.
//!
//! docs/developer-guide.md goes through these files. The library's own tests put the transport through the trials of all
//! transports, too: `cargo test --lib transport`.
#![forbid(unsafe_code)]

mod loopback;
mod ranks;

use loopback::Loopback;
use ranks::{communicators, content, finish, memory, pair};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};
use strata::carrier::{Carrier, Inter};
use strata::communicator::{launch, CollectiveCall, Comm, Elements, Launch, Operation};
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::{Error, Result};
use strata::exec::Started;
use strata::plan::Collective;
use strata::topo::Rank;
use strata::transport::streams::LARGE_IN_FLIGHT;
use strata::transport::{self, Envelope, Exchange, Probe, Router, Sink, Site, Transport, TransportKind};

/// A kind of transport that ranks can never use.
struct Unusable(&'static str);

impl TransportKind for Unusable {
    fn name(&self) -> &'static str {
        self.0
    }

    fn probe(&self, _: &Site<'_>, _: &mut dyn Exchange) -> Result<Probe> {
        Ok(Probe::Refused("it is only a test".to_string()))
    }

    fn waits_for_descriptors(&self) -> bool {
        false
    }
}

/// As a program begins, before its first communicator.
fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::env::set_var("STRATA_INTER", "loopback");
        transport::register(&Loopback).expect("the name is free");
        transport::register(&Unusable("unusable")).expect("the name is free");
    });
}

fn envelope(channel: u16, sequence: u64) -> Envelope {
    Envelope { channel, sequence, signature: 0x70a1 }
}

#[test]
fn a_name_is_registered_once_and_settings_know_it() {
    begin();
    assert_eq!(transport::names(), ["mpi", "tcp", "loopback", "unusable"]);
    assert_eq!("loopback".parse(), Ok(Inter::Only(Carrier::Own("loopback"))));
    assert_eq!(Inter::choices(), "auto, vendor, mpi, tcp, loopback and unusable");
    for taken in [&Unusable("auto"), &Unusable("vendor"), &Unusable("tcp"), &Unusable("loopback")] {
        let Err(Error::InvalidUsage(why)) = transport::register(taken) else { panic!("{} was free", taken.0) };
        assert!(why.contains(taken.0), "{why}");
    }
}

#[test]
fn a_transport_that_is_refused_leaves_messages_to_the_next_one() {
    begin();
    for (asked, used) in [("unusable", Carrier::TCP), ("tcp", Carrier::TCP), ("loopback", Carrier::Own("loopback"))] {
        pair(asked, |_, router, _| assert_eq!(router.carrier(), Some(used), "{asked}"));
    }
}

/// The bytes of these numbers.
fn bytes_of(numbers: impl Iterator<Item = i32>) -> Vec<u8> {
    numbers.flat_map(i32::to_le_bytes).collect()
}

/// A collective of blocks of `count` numbers; the rank's result.
fn run(comm: &Arc<Comm>, collective: Collective, count: usize, input: &[u8], result_blocks: usize) -> Vec<u8> {
    let output = memory(&vec![0; 4 * count * result_blocks]);
    let reduction = collective.reduces().then(|| Reduction::new(RedOp::Sum, DataType::I32, comm.nranks()));
    let call = CollectiveCall {
        collective,
        input: memory(input).as_device(),
        output: output.as_device(),
        count,
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::I32,
        reduction,
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: None,
        decision: None,
    };
    start(comm, vec![Operation::Collective(call)]);
    content(output)
}

fn start(comm: &Arc<Comm>, operations: Vec<Operation>) {
    let launched = |operation| Launch { comm: comm.clone(), operation, stream: StreamRef::Null };
    launch(operations.into_iter().map(launched).collect()).expect("the operations succeed");
}

#[test]
fn collectives_and_messages_between_nodes_go_over_it() {
    begin();
    for sizes in [&[1, 1][..], &[2, 1, 2], &[1, 1, 1, 1]] {
        communicators(sizes, |comm| {
            assert_eq!(comm.machine().inter, "loopback");
            let (me, n) = (comm.rank() as i32, comm.nranks() as i32);
            for count in [1, 1000, 300_001] {
                let numbers = |rank: i32| (0..count as i32).map(move |at| rank * 7 + at);
                let (mine, all) = (bytes_of(numbers(me)), (0..n).flat_map(numbers));
                let sums = (0..count as i32).map(|at| 7 * n * (n - 1) / 2 + n * at);
                assert_eq!(run(comm, Collective::AllReduce, count, &mine, 1), bytes_of(sums), "rank {me}");
                assert_eq!(run(comm, Collective::AllGather, count, &mine, n as usize), bytes_of(all), "rank {me}");
                assert_eq!(run(comm, Collective::Broadcast, count, &mine, 1), bytes_of(numbers(0)), "rank {me}");

                let elements = Elements { count, dtype: DataType::I32 };
                let (to, from) = ((me + 1) % n, (me + n - 1) % n);
                let into = memory(&vec![0; 4 * count]);
                let send = Operation::Send { to: Rank(to as u32), data: memory(&mine).as_device(), elements };
                start(comm, vec![send, Operation::Recv { from: Rank(from as u32), data: into.as_device(), elements }]);
                assert_eq!(content(into), bytes_of(numbers(from)), "rank {me}");
            }
        });
    }
}

#[test]
fn messages_of_a_channel_arrive_in_order_whichever_channel_is_read_first() {
    begin();
    pair("loopback", |me, mut router, slots| {
        // Every channel in turn; then one channel after the other, the last one first.
        for (token, sequence, channel) in (0..12).map(|token| (token, token / 3, (token % 3) as u16)) {
            if me == 0 {
                let src = [memory(&[channel as u8, sequence as u8])];
                let sent = router.send(token, Rank(1), envelope(channel, sequence), &src);
                finish(&mut router, token, sent).expect("sent");
            }
        }
        for (token, sequence, channel) in (0..12).map(|token| (token, token % 4, 2 - (token / 4) as u16)) {
            if me == 1 {
                let into = [memory(&[9, 9])];
                let received = router.recv(token, Rank(0), envelope(channel, sequence), Sink::Store(&into));
                finish(&mut router, token, received).expect("received");
                assert_eq!(content(into[0]), [channel as u8, sequence as u8]);
            }
        }
        slots.meet();
    });
}

#[test]
fn a_full_channel_is_busy_until_the_peer_has_received() {
    const SLEEP: Duration = Duration::from_secs(10);
    begin();
    pair("loopback", |me, mut router, slots| {
        let block = [memory(&[me as u8; 1000])];
        let all = u64::from(LARGE_IN_FLIGHT);
        let receive = |router: &mut Router, sequence| {
            let received = router.recv(sequence, Rank(0), envelope(0, sequence), Sink::Store(&block));
            finish(router, sequence, received).expect("received");
        };
        if me == 1 {
            slots.meet();
            (0..all).for_each(|sequence| receive(&mut router, sequence));
            slots.meet();
            receive(&mut router, all);
        } else {
            for sequence in 0..all {
                let sent = router.send(sequence, Rank(1), envelope(0, sequence), &block);
                finish(&mut router, sequence, sent).expect("there is room");
            }
            assert_eq!(router.send(all, Rank(1), envelope(0, all), &block), Ok(Started::Busy));
            assert_ne!(router.send(99, Rank(1), envelope(1, 0), &block), Ok(Started::Busy), "another channel");
            slots.meet();
            slots.meet();
            // The acknowledgements are here. A poll takes them and has no token to show for it, so `relief` has to tell.
            router.poll(&mut Vec::new()).expect("polled");
            let begin = Instant::now();
            router.sleep(SLEEP).expect("asleep");
            assert!(begin.elapsed() < SLEEP / 2, "the rank slept although there was room");
            let sent = router.send(all, Rank(1), envelope(0, all), &block);
            finish(&mut router, all, sent).expect("sent");
        }
        slots.meet();
    });
}

#[test]
fn a_message_that_was_not_expected_is_a_usage_error_that_names_its_sender() {
    begin();
    let (right, digest) = (envelope(0, 5), Envelope { signature: 1, ..envelope(0, 5) });
    for (sent, bytes, why) in
        [(right, 7, "7 bytes where 8"), (envelope(0, 6), 8, "operation 6"), (digest, 8, "another call")]
    {
        pair("loopback", |me, mut router, slots| {
            if me == 0 {
                let posted = router.send(1, Rank(1), sent, &[memory(&vec![1; bytes])]);
                finish(&mut router, 1, posted).expect("sent");
            } else {
                let into = [memory(&[9; 8])];
                let posted = router.recv(1, Rank(0), right, Sink::Store(&into));
                let failed = finish(&mut router, 1, posted);
                let Err(Error::InvalidUsage(text)) = failed else { panic!("{failed:?}") };
                assert!(text.contains("rank 0") && text.contains(why), "{text}");
                assert_eq!(content(into[0]), [9; 8]);
            }
            slots.meet();
        });
    }
}

#[test]
fn a_rank_that_has_gone_is_named_once_everything_that_it_sent_has_been_received() {
    begin();
    pair("loopback", |me, mut router, slots| {
        if me == 0 {
            for sequence in 0..3 {
                let sent = router.send(sequence, Rank(1), envelope(0, sequence), &[memory(&[sequence as u8; 5000])]);
                finish(&mut router, sequence, sent).expect("sent");
            }
            drop(router);
            return slots.meet();
        }
        slots.meet();
        let into = [memory(&[9; 5000])];
        for sequence in 0..3 {
            let received = router.recv(sequence, Rank(0), envelope(0, sequence), Sink::Store(&into));
            finish(&mut router, sequence, received).expect("received");
            assert_eq!(content(into[0]), [sequence as u8; 5000]);
        }
        let sent = router.send(7, Rank(0), envelope(0, 0), &into);
        let received = router.recv(8, Rank(0), envelope(0, 3), Sink::Store(&into));
        for outcome in [finish(&mut router, 8, received), finish(&mut router, 7, sent)] {
            let Err(Error::Remote(text)) = outcome else { panic!("{outcome:?}") };
            assert!(text.contains("rank 0 is gone"), "{text}");
        }
    });
}

#[test]
fn after_cancel_nothing_is_sent_and_the_peer_hears_of_it() {
    begin();
    pair("loopback", |me, mut router, slots| {
        let block = [memory(&vec![me as u8; 8 << 20])];
        if me == 0 {
            // More than the system takes: most of it is still here.
            assert_eq!(router.send(1, Rank(1), envelope(0, 0), &block), Ok(Started::Pending));
            router.cancel();
            for refused in [
                router.send(2, Rank(1), envelope(0, 1), &[]),
                router.recv(3, Rank(1), envelope(0, 0), Sink::Store(&[])),
            ] {
                assert!(matches!(refused, Err(Error::InvalidUsage(_))), "{refused:?}");
            }
        } else {
            let received = router.recv(1, Rank(0), envelope(0, 0), Sink::Store(&block));
            let failed = finish(&mut router, 1, received);
            assert!(matches!(&failed, Err(Error::Remote(text)) if text.contains("rank 0")), "{failed:?}");
            assert_eq!(content(block[0]), vec![1; 8 << 20], "nothing of a message that never came whole");
        }
        slots.meet();
    });
}
