//! The same where the ranks' data is on GPUs, which are soft ones.

use crate::grouped::Grouped;
use crate::{memory, numbers, setting, sum, world};
use strata::device::StreamRef;
use strata::topo::Grid;

#[test]
fn on_a_gpu_s_streams_calls_follow_each_other_whatever_carries_them_and_groups_have_the_results_of_each_call() {
    // To build them may take longer than ranks are waited for.
    crate::soft::cuda_dir();
    std::env::set_var("SOFT_DEVICE", "cuda");
    let _setting = setting("tcp,loopback");
    world::run(Grid::blocks(&[1, 2]), |member| {
        let comm = &member.comm;
        assert!(comm.gpu().is_some() && comm.carriers() == ["tcp", "loopback"]);
        for round in 1..=5 {
            // Late ranks leave the others' first call under way when the next ones are queued.
            std::thread::sleep(std::time::Duration::from_millis(member.rank as u64));
            let places: Vec<_> = (0..4).map(|_| memory(&vec![round; 3000])).collect();
            let call = |at: usize, name: &str| sum(comm, places[at], places[at + 1], name, &StreamRef::Null);
            let calls = vec![call(0, "ring@loopback"), call(1, "auto"), call(2, "two_level(direct,ring)@loopback")];
            world::launch_in_order(calls).expect("summed");
            assert_eq!(numbers(places[3]), vec![27 * round; 3000], "each call reads the result of the one before");
        }
        // Both at once in a group on one stream.
        let places: Vec<_> = (0..4).map(|_| memory(&[member.rank as i32; 500])).collect();
        let call = |at: usize, name: &str| sum(comm, places[at], places[at + 1], name, &StreamRef::Null);
        world::launch_all(vec![call(0, "@tcp"), call(2, "@loopback")]).expect("summed");
        assert_eq!([1, 3].map(|at| numbers(places[at])[499]), [3, 3]);
    });
    world::run(Grid::blocks(&[2, 1]), |member| {
        let mut groups = Grouped::new(&member.comm, &[None, Some("@tcp"), Some("@loopback")]);
        (5000..5015).for_each(|seed| groups.run(seed));
    });
}
