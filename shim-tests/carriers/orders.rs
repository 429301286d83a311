//! In which order calls on several carriers run: one order for each carrier, and for each stream.

use crate::{launch, memory, numbers, ranks, setting, stream, sum};
use std::sync::mpsc;
use std::time::Duration;
use strata::communicator::Launch;
use strata::device::host::event::HostEvent;
use strata::device::StreamRef;
use strata::error::Error;

/// Seeds, each a program of its own.
const SEEDS: u64 = 250;
/// Calls on each carrier in one program.
const CALLS: usize = 3;
const CARRIERS: [&str; 2] = ["tcp", "loopback"];

/// Numbers of a seed (xorshift).
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The order in which a rank makes its calls: on each carrier the same on all ranks, between the carriers by chance. `(carrier,
/// number of the call on it)`.
fn order(seeded: &mut Seeded, first: usize) -> Vec<(usize, usize)> {
    let mut next = [0; 2];
    let mut order = vec![(first, 0)];
    next[first] = 1;
    while order.len() < 2 * CALLS {
        let carrier = if next[0] == CALLS {
            1
        } else if next[1] == CALLS {
            0
        } else {
            seeded.below(2) as usize
        };
        order.push((carrier, next[carrier]));
        next[carrier] += 1;
    }
    order
}

#[test]
fn ranks_that_call_on_two_carriers_in_opposite_orders_do_not_wait_for_each_other() {
    let _setting = setting("tcp,loopback");
    ranks(&[2, 2], |comm| {
        let rank = comm.rank();
        let streams = [stream(), stream()];
        for seed in 1..=SEEDS {
            // What all ranks know of the program; the order between the carriers is each one's own.
            let mut shared = Seeded(seed * 0x9e37_79b9);
            let lengths: Vec<usize> = (0..2 * CALLS).map(|_| [1, 3, 1000, 40_000][shared.below(4) as usize]).collect();
            let mut own = Seeded(seed * 0x9e37_79b9 + 1000 + rank as u64);
            // Even ranks begin with one carrier, odd ranks with the other, and wait the other way round.
            let order = order(&mut own, rank % 2);
            let mut results = vec![None; 2 * CALLS];
            for &(carrier, call) in &order {
                let at = carrier * CALLS + call;
                let input: Vec<i32> = (0..lengths[at] as i32).map(|index| index + rank as i32 + seed as i32).collect();
                let output = memory(&vec![0; lengths[at]]);
                let name = format!("auto@{}", CARRIERS[carrier]);
                launch(vec![sum(comm, memory(&input), output, &name, &streams[carrier].1)]).expect("launched");
                results[at] = Some(output);
            }
            for carrier in [1 - rank % 2, rank % 2] {
                streams[carrier].0.synchronize().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            for (output, length) in results.into_iter().zip(lengths) {
                let expected = (0..length as i32).map(|index| 4 * index + 6 + 4 * seed as i32);
                assert!(numbers(output.expect("called")).into_iter().eq(expected), "seed {seed} on rank {rank}");
            }
        }
        streams.iter().for_each(|(stream, _)| stream.close());
    });
}

#[test]
fn on_one_stream_a_call_begins_when_the_one_before_it_on_another_carrier_has_ended() {
    let _setting = setting("tcp,loopback");
    ranks(&[1, 1, 1], |comm| {
        let (own, stream) = stream();
        for round in 0..20 {
            // The last rank is late, so that the first call of the others is under way when the second one could begin.
            if comm.rank() == 2 {
                std::thread::sleep(Duration::from_millis(2));
            }
            let places: Vec<_> = (0..4).map(|_| memory(&vec![1 + round; 5000])).collect();
            for (at, carrier) in ["tcp", "loopback", "tcp"].iter().enumerate() {
                let name = format!("ring@{carrier}");
                launch(vec![sum(comm, places[at], places[at + 1], &name, &stream)]).expect("launched");
            }
            own.synchronize().expect("summed");
            assert_eq!(
                numbers(places[3]),
                vec![27 * (1 + round); 5000],
                "each call reads the result of the one before"
            );
        }
        own.close();
    });
}

#[test]
fn a_call_that_waits_for_a_late_rank_holds_up_no_call_on_another_carrier_and_events_join_both() {
    let _setting = setting("tcp,loopback");
    let (late, goes) = mpsc::channel::<()>();
    let goes = std::sync::Mutex::new(goes);
    ranks(&[1, 1], move |comm| {
        let ((slow, on_slow), (fast, on_fast), (after, _)) = (stream(), stream(), stream());
        let outputs = [memory(&[0]), memory(&[0])];
        let call = |at: usize, name: &str, on: &StreamRef| {
            launch(vec![sum(comm, memory(&[1 + comm.rank() as i32]), outputs[at], name, on)]).expect("launched");
        };
        if comm.rank() == 1 {
            call(1, "@loopback", &on_fast);
            fast.synchronize().expect("summed");
            // Rank 0 has got through its call on this carrier although the one on the other waits for this rank.
            goes.lock().unwrap().recv_timeout(Duration::from_secs(60)).expect("told by rank 0");
            call(0, "@tcp", &on_slow);
        } else {
            call(0, "@tcp", &on_slow);
            call(1, "@loopback", &on_fast);
            fast.synchronize().expect("summed");
            assert_eq!(slow.query(), Err(Error::InProgress));
            late.send(()).expect("rank 1 waits");
        }
        let events = [(&on_slow, &slow), (&on_fast, &fast)].map(|(_, stream)| {
            let event = HostEvent::new();
            event.record(Some(stream)).expect("recorded");
            event.hold(Some(&after)).expect("held");
            event
        });
        let sums = outputs;
        let (ends, total) = mpsc::channel();
        after
            .enqueue(move || ends.send(sums.map(|sum| numbers(sum)[0])).map_err(|_| Error::InProgress))
            .expect("queued");
        assert_eq!(total.recv_timeout(Duration::from_secs(60)), Ok([3, 3]));
        assert!(events.iter().all(|event| event.query() == Ok(())));
        [slow, fast, after].iter().for_each(|stream| stream.close());
    });
}

#[test]
fn a_group_may_have_calls_on_several_carriers_on_several_streams_and_on_the_null_stream() {
    let _setting = setting("tcp,loopback");
    ranks(&[2, 1], |comm| {
        let ((one, on_one), (other, on_other)) = (stream(), stream());
        for streams in [[&on_one, &on_one], [&on_one, &on_other], [&StreamRef::Null, &StreamRef::Null]] {
            let outputs = [memory(&[0; 100]), memory(&[0; 100]), memory(&[0; 100])];
            let names = ["ring@tcp", "@loopback", "ring@loopback"];
            let calls = (0..3).map(|at| sum(comm, memory(&[at as i32; 100]), outputs[at], names[at], streams[at % 2]));
            launch(calls.collect::<Vec<Launch>>()).expect("launched");
            one.synchronize().and(other.synchronize()).expect("summed");
            assert_eq!(outputs.map(|output| numbers(output)[99]), [0, 3, 6]);
        }
        [one, other].iter().for_each(|stream| stream.close());
    });
}
