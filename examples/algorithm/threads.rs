//! Runs the plans of all ranks by the library's executor, each rank on a thread, over the library's transports.
//!
//! The library's own [`World`] is private to its communicators, so this is one more: it gives messages to the transport
//! and copies on the calling thread. It knows sends, receives and copies, which is all that moving data takes.
#![forbid(unsafe_code)]

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};
use strata::config::Config;
use strata::error::{Error, Result};
use strata::exec::{Execution, Op, Program, Progress, Started, Token, World};
use strata::memory::{Arena, Region};
use strata::plan::layout::Piece;
use strata::plan::{Buffer, Plan};
use strata::topo::binding::Binding;
use strata::topo::{Grid, Rank};
use strata::transport::{self, Envelope, Exchange, Idle, Router, Sink, Transport};

/// No rank waits longer.
const LIMIT: Duration = Duration::from_secs(60);

/// What ranks tell each other before there is a transport: a slot for each, and a barrier.
#[derive(Clone)]
struct Slots {
    me: usize,
    shared: Arc<(Barrier, Mutex<Vec<Vec<u8>>>)>,
}

impl Exchange for Slots {
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let (barrier, slots) = &*self.shared;
        slots.lock().expect("no rank has panicked")[self.me] = mine;
        barrier.wait();
        let all = slots.lock().expect("no rank has panicked").clone();
        barrier.wait();
        Ok(all)
    }
}

/// One call's memory, and what carries its messages.
struct RankWorld<'a> {
    transport: &'a mut Router,
    input: Region,
    output: Region,
    start: Instant,
}

impl RankWorld<'_> {
    fn regions(&self, pieces: &[Piece]) -> Vec<Region> {
        let buffer = |piece: &Piece| match piece.buffer {
            Buffer::Input => self.input,
            Buffer::Output => self.output,
            Buffer::Scratch | Buffer::Coded => Region::EMPTY,
        };
        pieces.iter().map(|piece| buffer(piece).part(piece.offset, piece.len)).collect()
    }
}

impl World for RankWorld<'_> {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn start(&mut self, token: Token, op: Op<'_>) -> Result<Started> {
        // All messages of one call have the same number and digest; a message of another call is refused.
        let envelope = |channel| Envelope { channel, sequence: 1, signature: 0x70a1 };
        match op {
            Op::Send { to, channel, src } => {
                let src = self.regions(src);
                self.transport.send(token, to, envelope(channel), &src)
            }
            Op::Recv { from, channel, dst } => {
                let dst = self.regions(dst);
                self.transport.recv(token, from, envelope(channel), Sink::Store(&dst))
            }
            // Both lists are one piece here, since the algorithm copies one block.
            Op::Copy { src, dst, .. } => {
                let (src, dst) = (self.regions(src), self.regions(dst));
                src.iter().zip(&dst).for_each(|(src, dst)| dst.copy_from(*src));
                Ok(Started::Done)
            }
            other => Err(Error::Internal(format!("this world does not know {other:?}"))),
        }
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        self.transport.poll(done)
    }
}

/// Runs `plans`, one for each rank of the grid, on blocks of `count` bytes cut into segments of `segment_bytes`. `inputs`
/// are the ranks' blocks; in place they lie in the outputs. Returns the outputs.
pub fn run(plans: Vec<Plan>, count: usize, segment_bytes: usize, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let nranks = plans.len();
    let shared = Arc::new((Barrier::new(nranks), Mutex::new(vec![Vec::new(); nranks])));
    std::thread::scope(|scope| {
        let start = |plan: Plan| {
            let slots = Slots { me: plan.rank.index(), shared: shared.clone() };
            scope.spawn(move || one_rank(plan, slots, count, segment_bytes, inputs).expect("the rank succeeds"))
        };
        let threads: Vec<_> = plans.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank's thread")).collect()
    })
}

fn one_rank(plan: Plan, mut slots: Slots, count: usize, segment_bytes: usize, inputs: &[Vec<u8>]) -> Result<Vec<u8>> {
    let (me, in_place): (Rank, bool) = (plan.rank, plan.shape.in_place);
    let grid: Arc<Grid> = plan.shape.grid.clone();
    let config = Config::default();
    let mut transport = transport::open(me, &grid, &config, &Binding::of_first_nic, &mut slots)?;

    // Messages may still point to the buffers when this function fails, so they stay to the end of the process.
    let output = Arena::new(count * grid.nranks()).leak();
    let input = if in_place { output.part(me.index() * count, count) } else { Arena::new(count).leak() };
    input.write(&inputs[me.index()]);

    let program = Arc::new(Program::new(plan)?);
    let layout = program.layout(count, 1, segment_bytes);
    let mut execution = Execution::new();
    execution.begin(program, layout, config.window, LIMIT.as_nanos() as u64);
    let mut idle = Idle::new(config.spin_us);
    let mut world = RankWorld { transport: &mut transport, input, output, start: Instant::now() };
    loop {
        match execution.poll(&mut world)? {
            Progress::Done => break,
            Progress::Moved => idle.reset(),
            Progress::Idle => idle.pause(world.transport)?,
        }
    }
    // Nobody leaves while another rank may still read this one's memory.
    slots.allgather(Vec::new())?;
    let mut result = vec![0; output.len()];
    output.read(&mut result);
    Ok(result)
}
