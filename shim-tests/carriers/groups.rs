//! Groups of calls that choose between carriers: they become fewer calls first, each of which then chooses.

use crate::grouped::Grouped;
use crate::{memory, numbers, ranks, setting, stream, sum};
use std::sync::{Arc, Mutex};
use strata::communicator::{launch, Comm};
use strata::device::StreamRef;
use strata::memory::Region;

/// Seeds, each a group of its own.
const SEEDS: u64 = 40;
/// What calls of a group say.
const NAMES: [Option<&str>; 6] = [None, None, Some("@tcp"), Some("@loopback"), Some("auto"), Some("auto@loopback")];

#[test]
fn groups_of_any_calls_over_any_carriers_have_the_results_of_each() {
    let _setting = setting("tcp,loopback");
    for (at, sizes) in [&[2, 2][..], &[3], &[1, 3], &[1, 1, 1, 1, 1]].into_iter().enumerate() {
        ranks(sizes, move |comm| {
            let mut groups = Grouped::new(comm, &NAMES);
            let first = 1000 * at as u64;
            (first..first + SEEDS).for_each(|seed| groups.run(seed));
        });
    }
}

/// Sums of ones, of so many numbers each, in one group; where they are.
fn ones(comm: &Arc<Comm>, counts: &[usize], name: &str, stream: &StreamRef) -> strata::error::Result<Vec<Region>> {
    let outputs: Vec<Region> = counts.iter().map(|&count| memory(&vec![0; count])).collect();
    let call = |(output, &count): (&Region, &usize)| sum(comm, memory(&vec![1; count]), *output, name, stream);
    launch(outputs.iter().zip(counts).map(call).collect())?;
    Ok(outputs)
}

#[test]
fn calls_of_a_group_that_name_the_same_carrier_are_one_there_and_ranks_that_cut_it_otherwise_are_told() {
    let _setting = setting("tcp,loopback");
    for name in ["@loopback", "@tcp", "auto"] {
        let told = Arc::new(Mutex::new(Vec::new()));
        let (name, heard) = (name, told.clone());
        crate::try_ranks(&[1, 1], move |rank, comm| {
            let comm = comm.expect("a communicator");
            // As many numbers in all, so that only what all ranks compare of joined calls can differ.
            let counts = if rank == 0 { [1, 2] } else { [2, 1] };
            let outcome = ones(&comm, &counts, name, &StreamRef::Null);
            heard.lock().unwrap().extend(outcome.err().map(|error| error.text().to_string()));
            comm.abort();
        });
        let told = told.lock().unwrap();
        assert!(told.iter().any(|text| text.contains("a group's calls of")), "{name}: {told:?}");
    }
}

/// A table by which single calls of 1 KiB go by TCP, and one call of 64 KiB by the other carrier.
fn by_size(cpu: &str) -> String {
    let row = |bytes: usize, carrier: &str| {
        format!(
            "[[row]]\ncollective = \"all_reduce\"\nranks = 2\nnodes = 2\nbytes = {bytes}\nalgorithm = \"ring\"\ncarrier = \"{carrier}\"\n"
        )
    };
    let head = "format = 2\nstrata = \"0.1.0\"\ndate = \"2026-01-01\"\n";
    let machine = format!("[machine]\ncpu = \"{cpu}\"\ndevice = \"host\"\ninter = \"tcp\"\nvendor = \"none\"\n");
    format!("{head}\n{machine}\n{}{}", row(1 << 10, "tcp"), row(1 << 16, "loopback"))
}

#[test]
fn a_joined_call_chooses_the_carrier_that_one_call_of_its_size_would_choose() {
    let _setting = setting("tcp,loopback");
    let table = std::env::temp_dir().join(format!("strata-groups-{}.toml", std::process::id()));
    let (tells, told) = std::sync::mpsc::channel();
    let tells = Mutex::new(tells);
    ranks(&[1], move |comm| tells.lock().unwrap().send(comm.machine().cpu.clone()).expect("told"));
    std::fs::write(&table, by_size(&told.recv().expect("told"))).expect("a file");
    std::env::set_var("STRATA_TUNING_TABLE", &table);
    ranks(&[1, 1], |comm| {
        let (own, on_stream) = stream();
        // The call over TCP is behind the group's on one rank and before it on the other: over one carrier they would wait for
        // each other.
        let group = || ones(comm, &[256; 64], "auto", &on_stream).expect("a group");
        let single = || assert_eq!(crate::sum_of(comm, 3, "auto"), Ok(6));
        let outputs = match comm.rank() {
            0 => {
                let outputs = group();
                single();
                outputs
            }
            _ => {
                single();
                group()
            }
        };
        own.synchronize().expect("summed");
        outputs.iter().for_each(|output| assert_eq!(numbers(*output), [2; 256]));
        own.close();
    });
    std::env::remove_var("STRATA_TUNING_TABLE");
    std::fs::remove_file(table).expect("removed");
}

#[test]
fn a_joined_call_waits_for_the_streams_of_its_calls_and_for_no_others() {
    let _setting = setting("tcp,loopback");
    ranks(&[1, 2], |comm| {
        let ((first, on_first), (second, on_second), (third, on_third)) = (stream(), stream(), stream());
        let (goes, waits) = std::sync::mpsc::channel::<()>();
        third.enqueue(move || waits.recv().map_err(|_| strata::error::Error::InProgress)).expect("queued");
        let outputs: Vec<Region> = (0..3).map(|_| memory(&[0; 10])).collect();
        let call = |at: usize, name: &str, on: &StreamRef| sum(comm, memory(&[1; 10]), outputs[at], name, on);
        let group = vec![call(0, "@loopback", &on_first), call(1, "@loopback", &on_second), call(2, "@tcp", &on_third)];
        launch(group).expect("a group");
        // The third stream is held up still.
        first.synchronize().and(second.synchronize()).expect("summed");
        assert_eq!(
            (numbers(outputs[0]), numbers(outputs[1]), numbers(outputs[2])),
            (vec![3; 10], vec![3; 10], vec![0; 10])
        );
        goes.send(()).expect("the third stream");
        third.synchronize().expect("summed");
        assert_eq!(numbers(outputs[2]), [3; 10]);
        [first, second, third].iter().for_each(|stream| stream.close());
    });
}

/// A call reads what one before it writes on another carrier, and the next one writes that: they run one after the other.
#[test]
fn calls_of_a_group_that_use_each_other_keep_their_order_over_carriers() {
    let _setting = setting("tcp,loopback");
    for sizes in [&[2, 2][..], &[3], &[1, 1]] {
        ranks(sizes, |comm| {
            let (count, nranks) = (100_000, comm.nranks() as i32);
            let on_stream = stream().1;
            for (turn, on) in [StreamRef::Null, on_stream].into_iter().cycle().take(10).enumerate() {
                let [a, b, c, d] = [1, 0, 0, 0].map(|value| memory(&vec![value; count]));
                let names =
                    if turn % 3 == 0 { ["@loopback", "auto", "@loopback"] } else { ["auto", "@loopback", "@tcp"] };
                let calls = [(a, b), (b, c), (c, d)];
                let calls = calls.iter().zip(names).map(|(&(from, to), name)| sum(comm, from, to, name, &on));
                launch(calls.collect()).unwrap();
                if let StreamRef::Stream(stream) = &on {
                    stream.synchronize().unwrap();
                }
                for (region, power) in [(b, 1), (c, 2), (d, 3)] {
                    assert_eq!(numbers(region), vec![nranks.pow(power); count], "turn {turn}");
                }
            }
        });
    }
}
