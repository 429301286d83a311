//! The communicators of carriers fail, and end, together.

use crate::{launch, memory, ranks, setting, stream, sum, sum_of};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use strata::communicator::{Comm, CommOptions};
use strata::device::StreamRef;
use strata::error::Error;

/// Waits until something is so.
fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A communicator of the same ranks, which a test may break.
fn twin(comm: &std::sync::Arc<Comm>) -> std::sync::Arc<Comm> {
    comm.split(0, 0, CommOptions::default(), &crate::NEVER).expect("split").expect("in it")
}

#[test]
fn a_call_that_fails_on_one_carrier_ends_calls_on_the_others_and_the_communicator() {
    let _setting = setting("tcp,loopback");
    let met = Barrier::new(3);
    ranks(&[1, 1, 1], move |comm| {
        let twin = twin(comm);
        let (own, on_stream) = stream();
        // A call that waits for rank 2, which never makes it: it has another length on the other carrier.
        if comm.rank() != 2 {
            launch(vec![sum(&twin, memory(&[1; 8]), memory(&[0; 8]), "ring@tcp", &on_stream)]).expect("launched");
        }
        let length = if comm.rank() == 2 { 2 } else { 1 };
        let failed = launch(vec![sum(
            &twin,
            memory(&vec![1; length]),
            memory(&vec![0; length]),
            "ring@loopback",
            &StreamRef::Null,
        )]);
        let error = failed.expect_err("the calls differ");
        let begun = Instant::now();
        assert!(own.synchronize().is_err() || comm.rank() == 2, "the call on the other carrier has ended, too");
        assert!(begun.elapsed() < Duration::from_secs(20), "long before its time was over");
        // Until then no rank leaves, which would end the call as well.
        met.wait();
        await_that("the communicator has failed", || twin.asynchronous_failure().is_some());
        for name in ["@tcp", "@loopback", "auto"] {
            assert!(sum_of(&twin, 1, name).is_err(), "{name} after {error}");
        }
        twin.abort();
        own.close();
    });
}

#[test]
fn an_abort_ends_calls_on_all_carriers_here_and_on_the_other_ranks() {
    let _setting = setting("tcp,loopback");
    ranks(&[2, 1], |comm| {
        let twin = twin(comm);
        let ((one, on_one), (other, on_other)) = (stream(), stream());
        if comm.rank() == 2 {
            // Under way on the carrier for which the others do not wait for this rank.
            launch(vec![sum(&twin, memory(&[1; 8]), memory(&[0; 8]), "ring@loopback", &on_other)]).expect("launched");
            std::thread::sleep(Duration::from_millis(20));
        } else {
            launch(vec![sum(&twin, memory(&[1; 8]), memory(&[0; 8]), "ring@tcp", &on_one)]).expect("launched");
        }
        if comm.rank() == 2 {
            twin.abort();
            assert!(other.synchronize().is_err());
        } else {
            let error = one.synchronize().expect_err("rank 2 aborted");
            assert!(matches!(&error, Error::Remote(text) if text.contains("rank 2")), "{error:?}");
            twin.abort();
        }
        [one, other].iter().for_each(|stream| stream.close());
    });
}

#[test]
fn what_ends_or_suspends_a_communicator_does_so_to_all_its_carriers() {
    let _setting = setting("tcp,loopback");
    ranks(&[2, 2], |comm| {
        let suspended = twin(comm);
        let (input, output) = (memory(&[1; 50_000]), memory(&[0; 50_000]));
        launch(vec![sum(&suspended, input, output, "log@loopback", &StreamRef::Null)]).expect("summed");
        let held = suspended.scratch_bytes();
        suspended.suspend().expect("suspended");
        assert!(held > 0 && suspended.scratch_bytes() < held, "the scratch memory of the other carrier counts: {held}");
        assert!(matches!(suspended.usable(), Err(Error::InvalidUsage(_))));
        suspended.resume().expect("resumed");
        assert_eq!(sum_of(&suspended, 1, "@loopback"), Ok(4));
        suspended.finalize().expect("finalized");
        assert!(matches!(suspended.usable(), Err(Error::InvalidUsage(_))));
        suspended.destroy().expect("destroyed");

        let revoked = twin(comm);
        assert_eq!(sum_of(&revoked, 1, "@loopback"), Ok(4));
        sum_of(comm, 1, "auto").expect("all have come so far");
        revoked.revoke().expect("revoked");
        assert!(matches!(sum_of(&revoked, 1, "@loopback"), Err(Error::InvalidUsage(_))));
        let rest = revoked.shrink(&[], false, CommOptions::default(), &crate::NEVER).expect("shrink");
        assert_eq!((rest.carriers(), sum_of(&rest, 2, "@loopback")), (vec!["tcp", "loopback"], Ok(8)));
        rest.destroy().expect("destroyed");
        revoked.destroy().expect("destroyed");
    });
}
