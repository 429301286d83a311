//! Text that is read back is the same plan, and no text makes the reader fall over.

use super::*;
use crate::code::FloatCode;
use crate::plan::{Collective, Lane, Shape, StepRef};
use crate::topo::{Grid, Rank};
use proptest::prelude::*;
use std::sync::Arc;

fn any_spans() -> impl Strategy<Value = Vec<Span>> {
    let buffer = prop::sample::select(vec![Buffer::Input, Buffer::Output, Buffer::Scratch, Buffer::Coded]);
    let number = || prop_oneof![0u32..9, any::<u32>()];
    let span = (buffer, number(), number(), number(), any::<bool>()).prop_map(|(buffer, start, len, like, own)| {
        let like = if own { start } else { like };
        Span { buffer, start, len, like }
    });
    prop::collection::vec(span, 0..4)
}

/// Any action, most of them nonsense.
pub(crate) fn any_action() -> impl Strategy<Value = Action> {
    let spans = any_spans;
    let blocks = || prop::collection::vec(any_spans(), 0..4);
    let order = || prop::sample::select(vec![OperandOrder::LocalFirst, OperandOrder::IncomingFirst]);
    let peer = || any::<u32>().prop_map(Rank);
    let level = prop::sample::select(vec![LinkLevel::Node, LinkLevel::Rail]);
    let collective = prop::sample::select(Collective::ALL.to_vec());
    let group = prop::collection::vec(peer(), 0..4);
    prop_oneof![
        (peer(), any::<u16>(), spans()).prop_map(|(to, channel, src)| Action::Send { to, channel, src }),
        (peer(), any::<u16>(), spans()).prop_map(|(from, channel, dst)| Action::Recv { from, channel, dst }),
        (peer(), any::<u16>(), spans(), spans(), order(), any::<bool>()).prop_map(
            |(from, channel, local, dst, order, finish)| Action::RecvReduce {
                from,
                channel,
                local,
                dst,
                order,
                finish
            }
        ),
        (spans(), spans(), any::<bool>(), any::<bool>()).prop_map(|(src, dst, start, finish)| Action::Copy {
            src,
            dst,
            start,
            finish
        }),
        (blocks(), spans(), any::<bool>()).prop_map(|(srcs, dst, finish)| Action::Reduce { srcs, dst, finish }),
        (collective, level, group, any::<usize>(), blocks(), blocks(), any::<bool>()).prop_map(
            |(collective, level, group, root, src, dst, finish)| {
                Action::Call(Call { collective, level, group, root, src, dst, finish })
            }
        ),
        Just(Action::Nop),
    ]
}

fn any_plan() -> impl Strategy<Value = Plan> {
    let dep = (any::<u32>(), any::<u32>()).prop_map(|(lane, step)| StepRef { lane, step });
    let step = (any_action(), prop::collection::vec(dep, 0..3)).prop_map(|(action, deps)| Step { action, deps });
    let lane = prop::collection::vec(step, 0..5).prop_map(|steps| Lane { steps });
    let labels = prop::collection::vec(0u8..4, 0..6);
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
    let flags = (any::<bool>(), any::<bool>());
    let code = prop::sample::select(FloatCode::ALL.to_vec());
    let coded = prop::option::of((code, any::<u32>()).prop_map(|(code, chunks)| CodedScratch { code, chunks }));
    let collective = prop::sample::select(Collective::ALL.to_vec());
    (any::<String>(), collective, labels, numbers, flags, coded, prop::collection::vec(lane, 0..4)).prop_map(
        |(algorithm, collective, labels, (root, rank, chunks_per_block, scratch_chunks), flags, coded, lanes)| {
            let (in_place, prologue) = flags;
            let grid = Arc::new(Grid::from_labels(&labels));
            let shape = Shape { root: Rank(root), in_place, prologue, ..Shape::new(collective, grid) };
            Plan { shape, rank: Rank(rank), algorithm, chunks_per_block, scratch_chunks, coded, lanes }
        },
    )
}

proptest! {
    #[test]
    fn any_plan_is_read_back_as_it_was(plan in any_plan()) {
        let text = print(&plan);
        prop_assert_eq!(parse(&text), Ok(plan), "{}", text);
    }

    #[test]
    fn a_damaged_text_is_read_as_what_it_says_or_refused(
        plan in any_plan(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()
    ) {
        let mut text = print(&plan).into_bytes();
        let at = at.index(text.len());
        if cut { text.truncate(at) } else { text[at] = byte }
        let text = String::from_utf8_lossy(&text);
        if let Ok(read) = parse(&text) {
            prop_assert_eq!(parse(&print(&read)), Ok(read));
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in any::<String>()) {
        let _ = parse(&text);
    }

    #[test]
    fn any_plans_can_be_drawn(plans in prop::collection::vec(any_plan(), 0..4)) {
        let picture = draw(&plans);
        prop_assert!(picture.contains("round"));
    }
}

const RING: &str = "\
plan \"ring\"
collective reduce_scatter
nodes 0 0 1
root 0
prologue
rank 2
chunks_per_block 1
scratch_chunks 2
lane 0
  0: send to 0 ch 0 src input[1..2]
  1: recv_reduce from 1 ch 7 local input[0..1] dst scratch[0..1 like 4] incoming_first finish after 0.4 1.2
lane 1
  0: call all_gather rail group 0 2 root 0 src {input[0..2],scratch[1..2]} dst {-} {output[0..1]}
  1: nop
";

#[test]
fn the_text_form_is_stable() {
    let plan = parse(RING).unwrap();
    assert_eq!(print(&plan), RING);
    assert_eq!(plan.nsteps(), 4);
    assert!(plan.shape.prologue && !plan.shape.in_place);
}

#[test]
fn an_error_names_its_line() {
    for (from, to, line) in [
        ("root 0", "root x", 4),
        ("nodes 0 0 1", "nodes 1 0 1", 3),
        ("lane 1", "lane 2", 12),
        ("input[1..2]", "input[2..1]", 10),
        ("input[1..2]", "input[1..2 like 1]", 10),
        ("incoming_first", "sideways", 11),
        ("1: nop", "2: nop", 14),
        ("1: nop", "1: nop nop", 14),
        ("ch 7", "ch 70000", 11),
        ("ch 7", "ch +7", 11),
    ] {
        let error = parse(&RING.replacen(from, to, 1)).unwrap_err();
        assert_eq!(error.line, line, "{to}: {error}");
    }
    assert_eq!(parse("").unwrap_err().line, 1);
}

#[test]
fn a_picture_shows_rounds_and_what_never_happens() {
    let plan = |rank: u32, lane: &str| {
        let head = "plan \"pair\"\ncollective all_gather\nnodes 0 0\nroot 0\n";
        parse(&format!("{head}rank {rank}\nchunks_per_block 1\nscratch_chunks 0\nlane 0\n{lane}")).unwrap()
    };
    let send = |to| format!("  0: send to {to} ch 0 src input[0..1]\n");
    let first = plan(0, &(send(1) + "  1: recv from 1 ch 0 dst output[1..2]\n"));
    let second = plan(1, &(send(0) + "  1: recv from 0 ch 0 dst output[0..1]\n  2: nop after 5.5\n"));
    let wanted = "\
all_gather pair
round | rank 0 | rank 1
    0 | >1 i0  | >0 i0
    1 | <1 o1  | <0 o0
never: rank 1 step 0.2: nop after 5.5
";
    assert_eq!(draw(&[first, second]), wanted);
}
