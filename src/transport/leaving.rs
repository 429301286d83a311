//! Ranks that leave when their own part is done, and ranks that come late: what was sent arrives, and what never comes is
//! missed by name.

use super::worlds::{carry_out, region, threads_with, Post, Setup};
use super::{Envelope, Exchange, Sink};
use crate::error::Error;
use crate::topo::Grid;
use std::time::Duration;

fn envelope(sequence: u64) -> Envelope {
    Envelope { channel: 0, sequence, signature: 1 }
}

/// Bytes of message `index` from `rank`.
fn message(rank: usize, index: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + index * 7 + rank) as u8).collect()
}

/// Sizes of messages that fit into sockets' buffers together, so that their sender needs no receiver.
const SIZES: [usize; 6] = [1, 600, 2400, 16_384, 20_000, 0];

#[test]
fn messages_of_a_rank_that_has_closed_everything_are_received_by_one_that_comes_late() {
    for sender in [0, 1] {
        let setup = Setup::new(Grid::blocks(&[1, 1]));
        threads_with(2, |me, exchange| {
            let mut router = setup.open(me, exchange);
            if me == sender {
                let mut data: Vec<Vec<u8>> =
                    SIZES.iter().enumerate().map(|(i, &bytes)| message(me, i, bytes)).collect();
                let posts: Vec<Post<'_>> = data
                    .iter_mut()
                    .enumerate()
                    .map(|(i, bytes)| Post::Send(1 - me, envelope(i as u64), vec![region(bytes)]))
                    .collect();
                carry_out(&mut router, &posts).unwrap();
                // As when its process ends: nobody keeps anything.

                drop(router);
                exchange.allgather(Vec::new()).unwrap();
                return;
            }
            exchange.allgather(Vec::new()).unwrap();
            for (i, &bytes) in SIZES.iter().enumerate() {
                let mut into = vec![0; bytes];
                let sinks = [region(&mut into)];
                carry_out(&mut router, &[Post::Recv(sender, envelope(i as u64), Sink::Store(&sinks))]).unwrap();
                assert_eq!(into, message(sender, i, bytes), "message {i}");
            }
        });
    }
}

#[test]
fn a_rank_that_has_left_without_sending_is_missed_by_name() {
    for leaver in [0, 1] {
        let setup = Setup::new(Grid::blocks(&[1, 1]));
        threads_with(2, |me, exchange| {
            let mut router = setup.open(me, exchange);
            if me == leaver {
                assert!(router.leave().is_none(), "it owes nothing");
            }
            exchange.allgather(Vec::new()).unwrap();
            if me != leaver {
                let mut into = [0; 8];
                let sinks = [region(&mut into)];
                let missed = carry_out(&mut router, &[Post::Recv(leaver, envelope(0), Sink::Store(&sinks))]);
                let Err(Error::Remote(text)) = missed else { panic!("{missed:?}") };
                assert!(text.contains(&format!("rank {leaver} at")), "{text}");
                let mut bytes = [0; 8];
                let sent = carry_out(&mut router, &[Post::Send(leaver, envelope(0), vec![region(&mut bytes)])]);
                assert!(matches!(sent, Err(Error::Remote(_))), "{sent:?}");
            }
            exchange.allgather(Vec::new()).unwrap();
        });
    }
}

#[test]
fn a_rank_that_comes_late_finds_the_connections_of_all_others() {
    const RANKS: usize = 25;
    let setup = Setup::new(Grid::blocks(&[1; RANKS])).with(|config| config.tcp_connections = 16);
    let late = RANKS - 1;
    threads_with(RANKS, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut data: Vec<Vec<u8>> =
            (0..RANKS).map(|rank| if me == late { vec![0; 100_000] } else { message(me, rank, 100_000) }).collect();
        let regions: Vec<_> = data.iter_mut().map(|bytes| [region(bytes)]).collect();
        if me != late {
            return carry_out(&mut router, &[Post::Send(late, envelope(0), regions[0].to_vec())]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(500));
        let receives: Vec<Post<'_>> =
            (0..late).map(|rank| Post::Recv(rank, envelope(0), Sink::Store(&regions[rank]))).collect();
        carry_out(&mut router, &receives).unwrap();

        for (rank, bytes) in data.iter().enumerate().take(late) {
            assert!(*bytes == message(rank, 0, 100_000), "rank {rank}");
        }
    });
}
