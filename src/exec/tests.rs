//! The executor against a world in which messages arrive at once.
#![forbid(unsafe_code)]

use super::*;
use crate::error::Error;
use crate::plan::layout::Layout;
use crate::plan::{Action, Buffer, Collective, Lane, Plan, Shape, Span, Step, StepRef};
use crate::topo::Grid;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// What ranks have in common.
#[derive(Default)]
struct Net {
    streams: HashMap<(Rank, Rank, Channel), VecDeque<Vec<u8>>>,
    capacity: usize,
    now_ns: u64,
}

struct Node {
    rank: Rank,
    buffers: HashMap<Buffer, Vec<u8>>,
    receiving: Vec<(Token, Rank, Channel, Vec<Piece>)>,
    starts: usize,
    /// What has been told of the front.
    fronts: Vec<usize>,
}

struct TestWorld<'a> {
    net: &'a mut Net,
    node: &'a mut Node,
}

impl Node {
    fn read(&self, pieces: &[Piece]) -> Vec<u8> {
        pieces
            .iter()
            .flat_map(|piece| self.buffers[&piece.buffer][piece.offset..piece.offset + piece.len].to_vec())
            .collect()
    }

    fn write(&mut self, pieces: &[Piece], mut bytes: &[u8]) {
        for piece in pieces {
            let (head, tail) = bytes.split_at(piece.len);
            self.buffers.get_mut(&piece.buffer).unwrap()[piece.offset..piece.offset + piece.len].copy_from_slice(head);
            bytes = tail;
        }
        assert!(bytes.is_empty(), "a message longer than its destination");
    }
}

impl World for TestWorld<'_> {
    fn now_ns(&self) -> u64 {
        self.net.now_ns
    }

    fn start(&mut self, token: Token, op: Op<'_>) -> Result<Started> {
        self.node.starts += 1;
        match op {
            Op::Send { to, channel, src } => {
                let stream = self.net.streams.entry((self.node.rank, to, channel)).or_default();
                if stream.len() == self.net.capacity {
                    return Ok(Started::Busy);
                }
                stream.push_back(self.node.read(src));
                Ok(Started::Done)
            }
            Op::Recv { from, channel, dst } => {
                self.node.receiving.push((token, from, channel, dst.to_vec()));
                Ok(Started::Pending)
            }
            Op::Copy { src, dst, .. } => {
                let bytes = self.node.read(src);
                self.node.write(dst, &bytes);
                Ok(Started::Done)
            }
            Op::Reduce { srcs, dst, .. } => {
                let mut sum = vec![0u8; dst.iter().map(|piece| piece.len).sum()];
                for src in srcs {
                    sum.iter_mut().zip(self.node.read(src)).for_each(|(sum, byte)| *sum = sum.wrapping_add(byte));
                }
                self.node.write(dst, &sum);
                Ok(Started::Done)
            }
            Op::RecvReduce { .. } | Op::Call { .. } | Op::Encode { .. } | Op::Decode { .. } | Op::FoldCoded { .. } => {
                Err(Error::InvalidUsage(String::from("not in this world")))
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let mut index = 0;
        while index < self.node.receiving.len() {
            let (token, from, channel, dst) = &self.node.receiving[index];
            let stream = self.net.streams.get_mut(&(*from, self.node.rank, *channel));
            match stream.and_then(VecDeque::pop_front) {
                Some(bytes) => {
                    done.push(*token);
                    let dst = dst.clone();
                    self.node.write(&dst, &bytes);
                    self.node.receiving.remove(index);
                }
                None => index += 1,
            }
        }
        Ok(())
    }

    fn front(&mut self, segments: usize) {
        self.node.fronts.push(segments);
    }
}

fn plan(collective: Collective, nranks: usize, rank: usize, chunks: (u32, u32), lanes: Vec<Vec<Step>>) -> Plan {
    Plan {
        shape: Shape::new(collective, Arc::new(Grid::flat(nranks))),
        rank: Rank::from_index(rank),
        algorithm: String::from("test"),
        chunks_per_block: chunks.0,
        scratch_chunks: chunks.1,
        coded: None,
        lanes: lanes.into_iter().map(|steps| Lane { steps }).collect(),
    }
}

fn send(to: usize, src: Span) -> Step {
    Action::Send { to: Rank::from_index(to), channel: 0, src: vec![src] }.into()
}

fn recv(from: usize, dst: Span) -> Step {
    Action::Recv { from: Rank::from_index(from), channel: 0, dst: vec![dst] }.into()
}

fn copy(src: Span, dst: Span) -> Step {
    Action::Copy { src: vec![src], dst: vec![dst], start: false, finish: false }.into()
}

fn after(mut step: Step, lane: u32, at: u32) -> Step {
    step.deps.push(StepRef { lane, step: at });
    step
}

/// A ring in two lanes: one sends, one receives; a block is sent on after it has come.
fn ring_all_gather(nranks: usize, rank: usize) -> Plan {
    let block = |back: usize| (rank + nranks - back) % nranks;
    let (next, previous) = ((rank + 1) % nranks, block(1));
    let mut sends = vec![copy(Span::input(0, 1), Span::output(rank, 1))];
    let mut receives = Vec::new();
    for round in 0..nranks - 1 {
        let sending = send(next, Span::output(block(round), 1));
        sends.push(if round == 0 { sending } else { after(sending, 1, round as u32 - 1) });
        receives.push(recv(previous, Span::output(block(round + 1), 1)));
    }
    plan(Collective::AllGather, nranks, rank, (1, 0), vec![sends, receives])
}

struct Bed {
    net: Net,
    nodes: Vec<Node>,
    runs: Vec<Execution>,
}

impl Bed {
    fn new(programs: &[Arc<Program>], layout: Layout, window: usize, limit_ns: u64) -> Bed {
        let mut bed = Bed { net: Net { capacity: 1, ..Net::default() }, nodes: Vec::new(), runs: Vec::new() };
        for (rank, program) in programs.iter().enumerate() {
            let blocks = |buffer| program.plan().chunks(buffer) / program.plan().chunks_per_block as usize;
            let input = (0..blocks(Buffer::Input) * layout.block_bytes()).map(|at| (rank * 50 + at) as u8).collect();
            let output = vec![0xee; blocks(Buffer::Output) * layout.block_bytes()];
            let scratch = vec![0xdd; layout.scratch_bytes() * window];
            let buffers = [(Buffer::Input, input), (Buffer::Output, output), (Buffer::Scratch, scratch)].into();
            bed.nodes.push(Node {
                rank: Rank::from_index(rank),
                buffers,
                receiving: Vec::new(),
                starts: 0,
                fronts: Vec::new(),
            });
            let mut run = Execution::new();
            run.begin(Arc::clone(program), layout.clone(), window, limit_ns);
            bed.runs.push(run);
        }
        bed
    }

    fn poll(&mut self, rank: usize) -> Result<Progress> {
        self.runs[rank].poll(&mut TestWorld { net: &mut self.net, node: &mut self.nodes[rank] })
    }

    fn run(&mut self) {
        for _ in 0..10_000 {
            let states: Vec<_> = (0..self.runs.len()).map(|rank| self.poll(rank).unwrap()).collect();
            if states.iter().all(|&state| state == Progress::Done) {
                return;
            }
        }
        panic!("stuck: {:?}", self.runs.iter().map(Execution::describe).collect::<Vec<_>>());
    }

    fn output(&self, rank: usize) -> &[u8] {
        &self.nodes[rank].buffers[&Buffer::Output]
    }
}

fn programs(nranks: usize, plan: impl Fn(usize, usize) -> Plan) -> Vec<Arc<Program>> {
    (0..nranks).map(|rank| Arc::new(Program::new(plan(nranks, rank)).unwrap())).collect()
}

#[test]
fn a_ring_gathers_every_block_in_one_or_many_segments() {
    let programs = programs(5, ring_all_gather);
    for (count, segment_bytes, window) in [(8, 1 << 20, 1), (1000, 64, 1), (1000, 64, 3), (1000, 128, 100)] {
        let mut bed = Bed::new(&programs, Layout::new(count, 1, 1, 0, segment_bytes), window, 0);
        bed.run();
        let inputs: Vec<u8> = bed.nodes.iter().flat_map(|node| node.buffers[&Buffer::Input].clone()).collect();
        for rank in 0..5 {
            assert_eq!(bed.output(rank), inputs);
            let segments = count.div_ceil(segment_bytes.max(64)) as u64;
            assert_eq!(
                bed.runs[rank].stats(),
                Stats { messages: 4 * segments, bytes_sent: 4 * count as u64, rounds: 4 }
            );
        }
    }
}

/// Rank 2 is given one segment of its input after the other, when no rank gets any further.
#[test]
fn segments_that_are_not_admitted_do_not_begin() {
    let programs = programs(5, ring_all_gather);
    for (count, window) in [(1000, 1), (1000, 3), (1000, 100), (64, 3)] {
        let layout = Layout::new(count, 1, 1, 0, 64);
        let mut bed = Bed::new(&programs, layout.clone(), window, 0);
        let inputs: Vec<u8> = bed.nodes.iter().flat_map(|node| node.buffers[&Buffer::Input].clone()).collect();
        let given = bed.nodes[2].buffers[&Buffer::Input].clone();
        bed.nodes[2].buffers.get_mut(&Buffer::Input).unwrap().fill(0xee);
        for admitted in 1..=layout.segments() {
            let front = layout.front_bytes(admitted);
            bed.nodes[2].buffers.get_mut(&Buffer::Input).unwrap()[..front].copy_from_slice(&given[..front]);
            bed.runs[2].admit(admitted);
            for _ in 0..200 {
                for rank in 0..5 {
                    bed.poll(rank).unwrap();
                }
            }
            assert!((0..5).all(|rank| bed.nodes[rank].fronts.last() == Some(&admitted)), "{count} {window} {admitted}");
        }
        (0..5).for_each(|rank| assert_eq!(bed.output(rank), inputs));
    }
}

#[test]
fn what_lies_before_the_front_is_final_and_may_be_overwritten() {
    let programs = programs(5, ring_all_gather);
    for (count, window) in [(1000, 1), (1000, 3), (1000, 100), (5, 4)] {
        let layout = Layout::new(count, 1, 1, 0, 64);
        let mut bed = Bed::new(&programs, layout.clone(), window, 0);
        let inputs: Vec<u8> = bed.nodes.iter().flat_map(|node| node.buffers[&Buffer::Input].clone()).collect();
        let mut seen = [0; 5];
        for round in 0.. {
            assert!(round < 10_000);
            for (rank, seen) in seen.iter_mut().enumerate() {
                bed.poll(rank).unwrap();
                let front = bed.nodes[rank].fronts.last().map_or(0, |segments| layout.front_bytes(*segments));
                for at in (0..5).flat_map(|block| block * count + *seen..block * count + front) {
                    let byte = &mut bed.nodes[rank].buffers.get_mut(&Buffer::Output).unwrap()[at];
                    assert_eq!(*byte, inputs[at], "rank {rank}, byte {at}");
                    *byte = 0x11;
                }
                *seen = front;
            }
            if seen == [count; 5] {
                break;
            }
        }
        for rank in 0..5 {
            assert!(bed.output(rank).iter().all(|byte| *byte == 0x11));
            let fronts = &bed.nodes[rank].fronts;
            assert!(fronts.is_sorted() && fronts.last() == Some(&layout.segments()));
            assert!(fronts.len() > 1 || layout.segments() < 8, "{count} {window}: {fronts:?}");
        }
    }
}

#[test]
fn a_second_run_begins_where_the_first_one_began() {
    let programs = programs(4, ring_all_gather);
    let mut bed = Bed::new(&programs, Layout::new(16, 1, 1, 0, 64), 2, 0);
    for (count, window) in [(16, 2), (16, 2), (300, 2), (300, 2), (300, 1), (16, 2)] {
        let layout = Layout::new(count, 1, 1, 0, 64);
        let fresh = Bed::new(&programs, layout.clone(), window, 0);
        bed.nodes = fresh.nodes;
        for (run, program) in bed.runs.iter_mut().zip(&programs) {
            run.begin(Arc::clone(program), layout.clone(), window, 0);
        }
        bed.run();
        assert_eq!(bed.output(0)[3 * count], 150);
    }
}

#[test]
fn a_zero_count_succeeds_and_never_reaches_the_world() {
    let mut bed = Bed::new(&programs(3, ring_all_gather), Layout::new(0, 4, 1, 0, 64), 2, 0);
    for rank in 0..3 {
        assert_eq!(bed.poll(rank), Ok(Progress::Done));
        assert_eq!(bed.nodes[rank].starts, 0);
    }
}

#[test]
fn a_full_channel_is_tried_again_although_nothing_else_moves() {
    let sends = |_, rank| {
        let lane = match rank {
            0 => vec![send(1, Span::input(0, 1)), send(1, Span::input(1, 1)), send(1, Span::input(0, 1))],
            _ => (0..3).map(|chunk| recv(0, Span::scratch(chunk, 1, chunk % 2))).collect(),
        };
        plan(Collective::AllReduce, 2, rank, (2, 3), vec![lane])
    };
    let mut bed = Bed::new(&programs(2, sends), Layout::new(128, 1, 2, 3, 1 << 20), 1, 0);
    assert_eq!(bed.poll(0), Ok(Progress::Moved));
    assert_eq!(bed.poll(0), Ok(Progress::Idle));
    assert_eq!(bed.runs[0].waiting_for(), [Rank(1)]);
    assert!(bed.runs[0].describe().contains("send to 1 on channel 0), channel full"), "{}", bed.runs[0].describe());
    bed.run();
}

#[test]
fn a_run_without_progress_times_out_naming_the_awaited_rank_and_can_say_where_it_is() {
    let mut bed = Bed::new(&programs(3, ring_all_gather), Layout::new(8, 4, 1, 0, 64), 1, 1_000_000);
    bed.net.now_ns = 77;
    while bed.poll(0) != Ok(Progress::Idle) {}
    bed.net.now_ns += 999_999;
    assert_eq!(bed.poll(0), Ok(Progress::Idle));
    bed.net.now_ns += 1;
    let error = bed.poll(0).unwrap_err();
    assert_eq!(error, Error::Timeout("no progress for 1 ms, waiting for ranks: 2".to_string()));
    let place = bed.runs[0].describe();
    for part in ["all_gather (test) on rank 0", "lane 1 in segment 1 of 1, step 1 of 2"] {
        assert!(place.contains(part), "{place}");
    }
    assert_eq!(bed.poll(0), Err(error));
}

#[test]
fn an_error_of_the_world_ends_the_run_and_a_new_one_may_begin() {
    let broken = Action::RecvReduce {
        from: Rank(1),
        channel: 0,
        local: vec![Span::input(0, 1)],
        dst: vec![Span::output(0, 1)],
        order: OperandOrder::LocalFirst,
        finish: true,
    };
    let program = Arc::new(Program::new(plan(Collective::AllReduce, 2, 0, (1, 0), vec![vec![broken.into()]])).unwrap());
    let layout = Layout::new(4, 4, 1, 0, 64);
    let mut bed = Bed::new(&[program], layout.clone(), 1, 0);
    assert_eq!(bed.poll(0), Err(Error::InvalidUsage(String::from("not in this world"))));
    assert_eq!(bed.poll(0), Err(Error::InvalidUsage(String::from("not in this world"))));
    let lane = vec![copy(Span::input(0, 1), Span::output(0, 1))];
    let sound = Program::new(plan(Collective::AllReduce, 2, 0, (1, 0), vec![lane])).unwrap();
    bed.runs[0].begin(Arc::new(sound), layout, 1, 0);
    assert_eq!(bed.poll(0), Ok(Progress::Done));
}

#[test]
fn adjacent_operands_stay_separate_lists() {
    let lane = vec![Step::from(Action::Reduce {
        srcs: vec![vec![Span::input(0, 1)], vec![Span::input(1, 1)], vec![Span::input(2, 1)]],
        dst: vec![Span::output(0, 1)],
        finish: false,
    })];
    let program = Program::new(plan(Collective::ReduceScatter, 3, 0, (1, 0), vec![lane])).unwrap();
    for segment_bytes in [64, 1 << 20] {
        let mut bed = Bed::new(
            &[Arc::new(Program::new(program.plan().clone()).unwrap())],
            program.layout(100, 1, segment_bytes),
            2,
            0,
        );
        bed.run();
        let expected: Vec<u8> = (0..100u32).map(|at| (3 * at + 300) as u8).collect();
        assert_eq!(bed.output(0), expected);
    }
}

#[test]
fn a_plan_that_names_what_is_not_there_is_refused() {
    let refused = |lane: Vec<Step>| match Program::new(plan(Collective::AllGather, 2, 0, (1, 1), vec![lane])) {
        Err(Error::Internal(text)) => text,
        other => panic!("accepted: {other:?}"),
    };
    assert!(refused(vec![send(2, Span::input(0, 1))]).contains("names rank 2"));
    assert!(refused(vec![send(0, Span::input(0, 1))]).contains("names rank 0"));
    assert!(refused(vec![send(1, Span::input(1, 1))]).contains("chunks 1+1 of Input, which has 1"));
    assert!(refused(vec![after(send(1, Span::input(0, 1)), 0, 1)]).contains("step 1 of lane 0, which does not exist"));
    assert!(refused(vec![after(send(1, Span::input(0, 1)), 0, 0)]).contains("waits for itself"));
}

#[test]
fn rounds_count_receives_that_wait_for_each_other_and_no_others() {
    let parallel = vec![vec![recv(1, Span::output(0, 1))], vec![recv(2, Span::output(1, 1))]];
    let program = Program::new(plan(Collective::AllGather, 3, 0, (1, 0), parallel)).unwrap();
    assert_eq!(program.rounds(), 1);
    let chained = vec![vec![recv(1, Span::output(0, 1))], vec![after(recv(2, Span::output(1, 1)), 0, 0)]];
    assert_eq!(Program::new(plan(Collective::AllGather, 3, 0, (1, 0), chained)).unwrap().rounds(), 2);
}
