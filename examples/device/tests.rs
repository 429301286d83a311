//! The toy device [`inverted`] under communicators: results, in place and not, on one node and several, in a child.
//!
//! docs/developer-guide.md goes through these files. `SOFT_DEVICE=inverted` has the library's own tests run on it.

mod inverted;

use inverted::INVERTED;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation};
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::memory::{Arena, Region};
use strata::plan::Collective;
use strata::topo::Rank;

/// Runs `body` on ranks in threads, so many on each node.
fn ranks(nodes: &'static [usize], body: fn(&Arc<Comm>)) {
    let nranks = nodes.iter().sum();
    let id = Comm::unique_id().expect("a unique id");
    let homes = nodes.iter().enumerate().flat_map(|(node, ranks)| std::iter::repeat_n(node, *ranks));
    let threads: Vec<_> = homes
        .enumerate()
        .map(|(rank, node)| {
            std::thread::spawn(move || {
                let host_id = Some(format!("node{node}"));
                let options = CommOptions { host_id, make_device: Some(INVERTED), ..CommOptions::default() };
                let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
                let comm = Comm::init(params, &AtomicBool::new(false)).expect("init");
                body(&comm);
                comm.destroy().expect("destroy");
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a rank"));
}

/// Memory of the device with these numbers in it. It is never freed.
fn on_device(numbers: &[i32]) -> Region {
    let region = Arena::new(4 * numbers.len()).leak();
    region.write(&numbers.iter().flat_map(|number| (!number).to_le_bytes()).collect::<Vec<u8>>());
    region
}

fn numbers(region: Region) -> Vec<i32> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes.chunks_exact(4).map(|number| !i32::from_le_bytes(number.try_into().expect("four bytes"))).collect()
}

fn call(comm: &Arc<Comm>, collective: Collective, input: Region, output: Region, count: usize) {
    let reduction = collective.reduces().then(|| Reduction::new(RedOp::Sum, DataType::I32, comm.nranks()));
    let call = CollectiveCall {
        collective,
        input: input.as_device(),
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
    let operation = Operation::Collective(call);
    launch(vec![Launch { comm: comm.clone(), operation, stream: StreamRef::Null }]).expect("the call");
}

fn sums_and_gathers(comm: &Arc<Comm>) {
    let (nranks, me) = (comm.nranks(), comm.rank());
    // Short, and so long that messages are cut into segments.
    for count in [1, 1000, 300_000] {
        let mine: Vec<i32> = (0..count).map(|at| (me * 7919 + at) as i32).collect();
        let of = |rank: usize, at: usize| (rank * 7919 + at) as i32;
        let sum: Vec<i32> = (0..count).map(|at| (0..nranks).map(|rank| of(rank, at)).sum()).collect();

        let output = on_device(&vec![0; count]);
        call(comm, Collective::AllReduce, on_device(&mine), output, count);
        assert_eq!(numbers(output), sum, "{count} elements");

        let both = on_device(&mine);
        call(comm, Collective::AllReduce, both, both, count);
        assert_eq!(numbers(both), sum, "{count} elements, in place");

        let output = on_device(&vec![0; count * nranks]);
        call(comm, Collective::AllGather, on_device(&mine), output, count);
        let all: Vec<i32> = (0..nranks).flat_map(|rank| (0..count).map(move |at| of(rank, at))).collect();
        assert_eq!(numbers(output), all, "{count} elements of each");
    }
}

#[test]
fn results_are_right_on_one_node_on_several_and_on_uneven_ones() {
    for nodes in [&[1][..], &[4], &[2, 2], &[3, 1]] {
        ranks(nodes, sums_and_gathers);
    }
}

#[test]
fn a_child_is_on_the_device_of_its_parent() {
    ranks(&[2, 2], |comm| {
        let color = (comm.rank() % 2) as i32;
        let never = AtomicBool::new(false);
        let child = comm.split(color, 0, CommOptions::default(), &never).expect("split").expect("a color");
        sums_and_gathers(&child);
        child.destroy().expect("destroy");
    });
}
