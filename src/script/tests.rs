//! Files that are wrong, and what is said of them.
#![forbid(unsafe_code)]

use super::*;
use crate::algorithms;
use crate::plan::{chunks_in, Action, Collective, Plan, Shape};
use crate::topo::{Grid, Rank};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Two ranks exchange their vectors and add; each thread block sends and receives.
const EXCHANGE: &str = r#"<?xml version="1.0"?>
<algo name="exchange" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1" color="blue">
  <!-- both ranks -->
  <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="1">
    <tb id="0" send="1" recv="1" chan="3">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="0" deps="1"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="1">
    <tb id="0" send="0" recv="0" chan="3">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="2" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1"/>
    </tb>
  </gpu>
</algo>
"#;

/// What is said of a text, whether it is no script or does not do what it says.
fn verdict(text: &str) -> Result<usize, String> {
    let script = xml::read(text).map_err(|bad| bad.to_string())?;
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = root(&script, &grid).map_err(|refusal| refusal.to_string())?;
    judge(&script, &grid, root).map_err(|refusal| refusal.to_string())?;
    let proof = prove(&script, &grid, ScriptForm { in_place: true, prologue: false, root });
    proof.map(|proof| proof.report.messages).map_err(|refusal| refusal.to_string())
}

fn changed(what: &str, by: &str) -> String {
    assert!(EXCHANGE.contains(what), "{what}");
    EXCHANGE.replacen(what, by, 1)
}

#[test]
fn a_script_is_read_with_defaults_and_unknown_attributes() {
    assert_eq!(verdict(EXCHANGE), Ok(2));
    let script = xml::read(EXCHANGE).unwrap();
    assert_eq!((script.nranks(), script.nsteps(), script.chunks_per_block()), (2, 6, 1));
    assert_eq!((script.in_place, script.serves_out_of_place), (true, true));
    assert_eq!((script.bytes.clone(), script.protocol.as_str()), (0..=u64::MAX, "Simple"));
    assert_eq!(script.ranks[1].blocks[0].steps[2].line, 17);
}

#[test]
fn a_text_that_is_no_script_is_refused_with_its_line() {
    let cases = [
        ("<algo name", "<!DOCTYPE a><algo name", "line 2: a file with a DOCTYPE is refused"),
        ("coll=\"allreduce\"", "", "line 2: coll is missing"),
        ("allreduce", "allsum", "line 2: coll=\"allsum\" is no collective"),
        ("ngpus=\"2\"", "ngpus=\"0\"", "line 2: ngpus and nchunksperloop are at least 1"),
        ("ngpus=\"2\"", "ngpus=\"1025\"", "line 2: ngpus=\"1025\" is not in 0 to 1024"),
        ("ngpus=\"2\"", "ngpus=\"3\"", "line 21: rank 2 is missing"),
        ("ngpus=\"2\"", "ngpus=\"two\"", "line 2: ngpus=\"two\" is no number"),
        ("ngpus=\"2\"", "ngpus=\"2\" ngpus=\"2\"", "line 2: attribute ngpus stands twice"),
        ("inplace=\"1\"", "inplace=\"2\"", "line 2: inplace=\"2\": 0 or 1"),
        (
            "inplace=\"1\"",
            "minBytes=\"9\" maxBytes=\"8\"",
            "line 2: minBytes=\"9\" is more than maxBytes=\"8\": no call has so many bytes",
        ),
        ("<gpu id=\"1\"", "<gpu id=\"0\"", "line 13: rank 0 stands in line 4 already"),
        ("<gpu id=\"1\"", "<gpu id=\"9\"", "line 13: id=\"9\" is not in 0 to 1"),
        ("<tb id=\"1\"", "<tb id=\"0\"", "line 9: thread block 0 of rank 0 stands twice"),
        ("<tb id=\"1\"", "<tb id=\"7\"", "line 21: thread block 1 of rank 0 is missing"),
        ("<tb id=\"1\" send=\"-1\"", "<tb id=\"1\" send=\"1\" ", ""),
        (
            "send=\"-1\" recv=\"-1\" chan=\"0\"",
            "send=\"1\" recv=\"-1\" chan=\"3\"",
            "line 9: two thread blocks of rank 0 send to rank 1 on channel 3",
        ),
        ("send=\"1\" recv=\"1\"", "send=\"0\" recv=\"1\"", "line 5: send=\"0\" is the rank itself"),
        (
            "send=\"1\" recv=\"1\"",
            "send=\"-1\" recv=\"1\"",
            "line 6: a step s in a thread block that names no rank to send",
        ),
        ("s=\"1\" type", "s=\"2\" type", "line 7: s=\"2\" stands where 1 is expected"),
        ("type=\"re\"", "type=\"rx\"", "line 10: type=\"rx\" is no step"),
        ("srcbuf=\"s\"", "srcbuf=\"x\"", "line 10: srcbuf=\"x\" is none of i, o and s"),
        ("srcbuf=\"s\" srcoff=\"0\"", "srcbuf=\"s\" srcoff=\"-1\"", "line 10: srcoff=\"-1\" is not in 0 to 1048575"),
        (
            "srcbuf=\"s\" srcoff=\"0\"",
            "srcbuf=\"s\" srcoff=\"1\"",
            "line 10: chunks 1 to 1 of s of rank 0, which has 1",
        ),
        ("cnt=\"1\"", "cnt=\"0\"", "line 6: cnt=\"0\""),
        ("cnt=\"1\"", "cnt=\"99999999999999999999\"", "line 6: cnt=\"99999999999999999999\" is no number"),
        (
            "depid=\"0\" deps=\"1\"",
            "depid=\"0\" deps=\"5\"",
            "line 21: in line 10 rank 0, thread block 1 waits for step 5 of thread block 0, which does not exist",
        ),
        ("depid=\"0\" deps=\"1\"", "depid=\"0\"", "line 10: depid=\"0\" without deps"),
        ("</algo>", "", "line 21: the file ends within an element"),
        ("<step s=\"0\"", "<step s=\"0", "line 6: this is no XML: "),
        ("<algo", "<algo><algo/></algo><algo", "line 2: "),
        ("<gpu", "<tb id=\"0\"/><gpu", "line 4: <tb> stands in the wrong place"),
    ];
    for (what, by, wanted) in cases.into_iter().filter(|case| !case.2.is_empty()) {
        let said = verdict(&changed(what, by)).unwrap_err();
        assert!(said.starts_with(wanted), "{what} -> {by}\n  {said}\n  {wanted}");
    }
    assert_eq!(verdict("").unwrap_err(), "line 1: there is no <algo>");
}

#[test]
fn a_script_that_does_something_else_is_refused_with_its_step() {
    let cases = [
        // The sum is made before the operand has come.
        (
            "depid=\"0\" deps=\"1\"",
            "depid=\"-1\" deps=\"-1\"",
            "rank 0, thread block 1, step 0: reads s[0], which nothing has written (check 1, provenance)",
        ),
        // Both wait for the other's message first.
        ("type=\"s\"", "type=\"nop\"", "waits for ever for a message on channel 3 from rank 0"),
        // A thread block waits for itself.
        ("cnt=\"1\" depid=\"-1\" deps=\"-1\" hasdep=\"1\"", "cnt=\"1\" depid=\"1\" deps=\"0\"", "waits for ever"),
        // The same is added twice.
        (
            "type=\"re\" srcbuf=\"s\"",
            "type=\"re\" srcbuf=\"i\"",
            "line 10: rank 0, thread block 1, step 0: rank 0 would contribute twice",
        ),
        // Nothing is added.
        ("type=\"re\"", "type=\"cpy\"", "rank 0, thread block 1, step 0: output chunk 0 ends as chunk 0 of rank 1"),
        // Nothing is done with what comes.
        (
            "type=\"re\"",
            "type=\"nop\"",
            "rank 0: output chunk 0 ends as chunk 0 of rank 0, and no step writes it; contributions are missing (check 3",
        ),
    ];
    for (what, by, wanted) in cases {
        let said = verdict(&changed(what, by)).unwrap_err();
        assert!(said.contains(wanted), "{what} -> {by}\n  {said}\n  {wanted}");
    }
}

/// Findings name buffers, chunks and lines of the file, not those of plans.
#[test]
fn findings_are_in_the_words_of_the_file() {
    let path = format!("{}/shim-tests/scripts/ar_pcie_hier_4.xml", env!("CARGO_MANIFEST_DIR"));
    let said = verdict(&std::fs::read_to_string(path).unwrap()).unwrap_err();
    let wanted = "reduces i[5] (chunk 5 of ranks 2+3) with s[1] (chunk 1 of rank 3) (check 1, provenance)";
    assert_eq!(said, format!("line 108: rank 2, thread block 4, step 2: {wanted}"));
    // A send in one thread block, and in the next what reduces over it with nothing between.
    let block = |id: usize, to: i32, from: i32, kind: &str| {
        format!(
            "<tb id=\"{id}\" send=\"{to}\" recv=\"{from}\" chan=\"0\">\n<step s=\"0\" type=\"{kind}\" srcbuf=\"i\" srcoff=\"0\" \
             dstbuf=\"i\" dstoff=\"0\" cnt=\"1\" depid=\"-1\" deps=\"-1\"/>\n</tb>\n"
        )
    };
    let gpu =
        |id: i32| format!("<gpu id=\"{id}\">\n{}{}</gpu>\n", block(0, 1 - id, -1, "s"), block(1, -1, 1 - id, "rrc"));
    let algo = "<algo name=\"race\" nchunksperloop=\"1\" ngpus=\"2\" coll=\"allreduce\" inplace=\"1\">\n";
    let wanted = "line 7: rank 0, thread block 1, step 0: nothing orders it after line 4 (thread block 0, step 0), which touches \
                  the same chunk (check 5, race)";
    assert_eq!(verdict(&format!("{algo}{}{}</algo>\n", gpu(0), gpu(1))).unwrap_err(), wanted);
}

#[test]
fn limits_hold_before_memory_is_taken() {
    let deep = changed("<gpu", &format!("{}<gpu", "<x>".repeat(100_000)));
    assert_eq!(verdict(&deep).unwrap_err(), "line 4: elements lie in one another deeper than 4");
    let wide: String = (0..100).map(|at| format!(" a{at}=\"1\"")).collect();
    assert_eq!(
        verdict(&changed(" color", &format!("{wide} color"))).unwrap_err(),
        "line 2: an element has more than 64 attributes"
    );
    let chunks = changed("nchunksperloop=\"1\"", "nchunksperloop=\"1048577\"");
    assert_eq!(verdict(&chunks).unwrap_err(), "line 2: nchunksperloop=\"1048577\" is not in 0 to 1048576");
    let scratch = |chunks: u32| verdict(&changed("s_chunks=\"1\"", &format!("s_chunks=\"{chunks}\"")));
    scratch(1 << 20).unwrap();
    assert_eq!(scratch((1 << 20) + 1).unwrap_err(), "line 4: s_chunks=\"1048577\" is not in 0 to 1048576");
    let long = "<algo ".to_string() + &" ".repeat(xml::MAX_BYTES);
    assert!(verdict(&long).unwrap_err().contains("more than 67108864 bytes"));
}

#[test]
fn folds_take_their_operands_in_one_order_on_all_ranks() {
    // Rank 1 adds rank 0's vector to its own; the sum has rank 0 first there, too.
    let script = xml::read(EXCHANGE).unwrap();
    let grid = Arc::new(Grid::flat(2));
    let form = ScriptForm { in_place: false, prologue: false, root: Rank(0) };
    let plans = prove(&script, &grid, form).unwrap().lowered.plans;
    let text = crate::plan::text::print(&plans[1]);
    assert!(text.contains("reduce src {scratch[0..1]} {input[0..1]} dst output[0..1] finish"), "{text}");
}

/// Chunks that go from each rank to each other.
fn traffic(plans: &[Plan]) -> BTreeMap<(u32, u32), usize> {
    let mut traffic = BTreeMap::new();
    for plan in plans {
        for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
            if let Action::Send { to, src, .. } = &step.action {
                *traffic.entry((plan.rank.0, to.0)).or_default() += chunks_in(src);
            }
        }
    }
    traffic
}

#[test]
fn every_algorithm_of_the_library_can_be_a_file_and_be_read_back() {
    let grids = [1, 2, 3, 4, 5, 8].map(Grid::flat).into_iter();
    let grids = grids.chain([Grid::blocks(&[2, 2]), Grid::blocks(&[3, 1, 2]), Grid::round_robin(8, 2)]);
    let mut converted = 0;
    for grid in grids.map(Arc::new) {
        for collective in Collective::ALL {
            for choice in algorithms::choices(collective, &grid) {
                if algorithms::is_on_board(&choice) || choice.to_string().contains("script:") {
                    continue;
                }
                let what = format!("{} {choice} on {grid}", collective.name());
                let last = Rank::from_index(grid.nranks() - 1);
                let shape = Shape {
                    root: if collective.has_root() { last } else { Rank(0) },
                    ..Shape::new(collective, grid.clone())
                };
                if !algorithms::supports(&choice, &shape) {
                    continue;
                }
                let build = |rank| algorithms::build(&choice, &shape, Rank::from_index(rank)).unwrap();
                let plans: Vec<Plan> = (0..shape.nranks()).map(build).collect();
                let script = convert(&plans).unwrap_or_else(|error| panic!("{what}: {error}"));
                let text = write(&script);
                let mut again = xml::read(&text).unwrap_or_else(|error| panic!("{what}: {error}"));
                for step in again.ranks.iter_mut().flat_map(|rank| &mut rank.blocks).flat_map(|block| &mut block.steps)
                {
                    step.line = 0;
                }
                assert!(write(&again) == text, "{what} is read as another script");
                let grid = Arc::new(Grid::flat(shape.nranks()));
                let root = root(&again, &grid).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
                judge(&again, &grid, root).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
                for in_place in [false, true] {
                    let form = ScriptForm { in_place, prologue: false, root };
                    let proof = prove(&again, &grid, form).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
                    assert_eq!(traffic(&proof.lowered.plans), traffic(&plans), "{what}");
                }
                converted += 1;
            }
        }
    }
    assert!(converted > 300, "{converted}");
}

/// A script of an all-reduce, each of whose thread blocks stands there `n` times on chunks of its own.
fn instances(script: &Script, n: u32) -> Script {
    let channels = script.ranks.iter().flat_map(|rank| &rank.blocks).map(|block| block.channel + 1).max().unwrap();
    let of_rank = |rank: &RankScript| {
        let nblocks = rank.blocks.len() as u32;
        let moved = |place: Place, instance: u32| {
            let chunks = if place.buffer == ScriptBuffer::Scratch { rank.scratch } else { script.chunks };
            Place { chunk: place.chunk + instance * chunks, ..place }
        };
        let of_instance = |instance: u32| {
            let of_step = move |step: &ScriptStep| ScriptStep {
                src: moved(step.src, instance),
                dst: moved(step.dst, instance),
                dep: step.dep.map(|(block, at)| (block + instance * nblocks, at)),
                ..*step
            };
            let of_block = move |block: &ThreadBlock| ThreadBlock {
                channel: block.channel + instance as u16 * channels,
                steps: block.steps.iter().map(of_step).collect(),
                ..*block
            };
            rank.blocks.iter().map(of_block).collect::<Vec<_>>()
        };
        RankScript { scratch: rank.scratch * n, blocks: (0..n).flat_map(of_instance).collect() }
    };
    Script { chunks: script.chunks * n, ranks: script.ranks.iter().map(of_rank).collect(), ..script.clone() }
}

#[test]
fn instances_become_one_lane_that_sends_as_many_messages_as_one() {
    let grid = Arc::new(Grid::flat(8));
    let shape = Shape::new(Collective::AllReduce, grid.clone());
    let form = ScriptForm { in_place: false, prologue: false, root: Rank(0) };
    for name in ["ring", "direct", "rd", "tree"] {
        let choice = name.parse().unwrap();
        if !algorithms::supports(&choice, &shape) {
            assert_eq!(name, "tree");
            continue;
        }
        let plans: Vec<Plan> =
            (0..8).map(|rank| algorithms::build(&choice, &shape, Rank::from_index(rank)).unwrap()).collect();
        let one = convert(&plans).unwrap();
        let alone = merged(prove(&one, &grid, form).unwrap());
        for n in [2, 24] {
            let many = prove(&instances(&one, n), &grid, form).unwrap();
            let together = merged(many.clone());
            assert_eq!(many.report.messages, n as usize * prove(&one, &grid, form).unwrap().report.messages, "{name}");
            assert_eq!(together.report.messages, alone.report.messages, "{name} {n} times");
            assert_eq!(together.report.steps, alone.report.steps, "{name} {n} times");
            assert_eq!(together.report.chunks, many.report.chunks, "{name} {n} times");
            assert_eq!(traffic(&together.lowered.plans), traffic(&many.lowered.plans), "{name} {n} times");
        }
    }
}

#[test]
fn lanes_that_differ_stay_apart() {
    // Each of two instances waits for the other's step where the one waits for nothing.
    let grid = Arc::new(Grid::flat(2));
    let form = ScriptForm { in_place: true, prologue: false, root: Rank(0) };
    let mut script = instances(&xml::read(EXCHANGE).unwrap(), 2);
    let messages = |script: &Script| merged(prove(script, &grid, form).unwrap()).report.messages;
    assert_eq!(messages(&script), 2);
    // The second instance's fold waits for the first one's receive, too.
    script.ranks[0].blocks[2].steps[1].dep = Some((1, 0));
    assert_eq!(messages(&script), 4);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 2000 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// A file with bytes taken out, doubled or changed gets a verdict, whatever it is.
    #[test]
    fn damaged_files_get_a_verdict(at in 0..EXCHANGE.len(), len in 0..40usize, by in "[ -~]{0,6}", again in 0..EXCHANGE.len()) {
        let mut text = EXCHANGE.to_string();
        let end = (at + len).min(text.len());
        text.replace_range(at..end, &by);
        let piece: String = EXCHANGE.chars().skip(again).take(len).collect();
        let place = again.min(text.len());
        text.insert_str(place, &piece);
        let _ = verdict(&text);
    }

    /// So does one whose numbers are others.
    #[test]
    fn other_numbers_get_a_verdict(which in 0..200usize, value in -2..6i64) {
        let mut seen = 0;
        let mut text = String::new();
        for part in EXCHANGE.split_inclusive('"') {
            let is_number = part.strip_suffix('"').is_some_and(|inner| inner.parse::<i64>().is_ok());
            seen += usize::from(is_number);
            if is_number && seen == which { text += &format!("{value}\""); } else { text += part; }
        }
        let _ = verdict(&text);
    }
}

/// Steps and messages of plans.
fn sizes(plans: &[Plan]) -> [usize; 2] {
    let report = crate::verify::verify(plans, &crate::verify::Options { capacity: CAPACITY, vectored: false }).unwrap();
    [report.steps, report.messages]
}

/// The files of others that are right, each as it is in all forms.
fn files_of_others() -> Vec<(String, Vec<Proof>)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/shim-tests/scripts");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xml"));
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let script = read(&text, store::contract_beside(&path).unwrap().as_deref()).unwrap();
        let grid = Arc::new(Grid::flat(script.nranks()));
        if judge(&script, &grid, Rank(0)).is_err() {
            continue;
        }
        let forms = [false, true].map(|in_place| ScriptForm { in_place, prologue: false, root: Rank(0) });
        let proofs = forms.map(|form| prove(&script, &grid, form).unwrap()).into();
        files.push((path.file_stem().unwrap().to_string_lossy().into_owned(), proofs));
    }
    files
}

#[test]
fn passes_take_steps_and_messages_out_of_the_files_of_others() {
    let files = files_of_others();
    assert_eq!(files.len(), 24);
    // As written, without dead steps, with messages together, with lanes together; and lanes alone.
    let (mut total, mut rebuilt, mut coarser) = ([[0; 2]; 5], 0, 0);
    for (name, proofs) in files {
        let plans = &proofs[0].lowered.plans;
        let marked = passes::Marked::new(plans);
        let alive = marked.without_dead_steps().unwrap_or_else(|| marked.clone());
        let together = alive.aggregated().unwrap_or_else(|| alive.clone());
        let merged = together.merged().unwrap_or_else(|| together.clone());
        let stages = [plans.clone(), alive.plans(), together.plans(), merged.plans()];
        let mut sizes: Vec<[usize; 2]> = stages.iter().map(|plans| self::sizes(plans)).collect();
        let lanes_alone = super::merged(proofs[0].clone()).report;
        sizes.push([lanes_alone.steps, lanes_alone.messages]);
        println!("{name:<22} {sizes:?}");
        for (total, sizes) in total.iter_mut().zip(&sizes) {
            (0..2).for_each(|at| total[at] += sizes[at]);
        }
        // What the store keeps is the last stage, with the same messages in both forms; no chunk is left out of these files.
        let passed = optimized(proofs.clone());
        assert_eq!([passed[0].report.steps, passed[0].report.messages], sizes[3], "{name}");
        assert_eq!(passed[0].report.messages, passed.last().unwrap().report.messages, "{name}");
        let fewer = plans[0].chunks_per_block / passed[0].lowered.plans[0].chunks_per_block;
        let mut carried = traffic(&passed[0].lowered.plans);
        carried.values_mut().for_each(|chunks| *chunks *= fewer as usize);
        assert_eq!(carried, traffic(plans), "{name}");
        coarser += usize::from(fewer > 1);
        mixed(&passed).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        rebuilt += usize::from(is_rebuilt(&name, &passed));
    }
    // Where writes wait for sends that the script knows nothing of, ranks prove it themselves.
    assert!(rebuilt >= 12, "{rebuilt}");
    println!("{total:?}, {coarser} with fewer chunks");
    assert_eq!(coarser, 4);
    assert_eq!(total, [[10828, 5068], [10662, 5068], [10466, 4970], [9446, 4510], [9752, 4608]]);
}

/// Whether the plans come out again by what their proofs have decided.
fn is_rebuilt(name: &str, proofs: &[Proof]) -> bool {
    let path = format!("{}/shim-tests/scripts/{name}.xml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap();
    let script = read(&text, store::contract_beside(path.as_ref()).unwrap().as_deref()).unwrap();
    let form =
        |proof: &Proof| ScriptForm { in_place: proof.lowered.plans[0].shape.in_place, prologue: false, root: Rank(0) };
    let forms: Vec<ScriptForm> = proofs.iter().map(form).collect();
    let recipes: Vec<_> = proofs.iter().map(Proof::recipe).collect();
    let again = proof::rebuilt_forms(&script, &Arc::new(Grid::flat(script.nranks())), &forms, &recipes);
    for (again, proof) in again.iter().flatten().zip(proofs) {
        assert_eq!(again.lowered.plans, proof.lowered.plans, "{name}");
        assert_eq!((again.report, again.capacity), (proof.report, proof.capacity), "{name}");
    }
    again.is_some()
}

/// Whether ranks with different forms do the collective together: each pair of ranks has both in each order once.
fn mixed(forms: &[Proof]) -> Result<(), crate::verify::Rejection> {
    let [out, within] = forms else { return Ok(()) };
    let plans = [&out.lowered.plans, &within.lowered.plans];
    for bit in 0..usize::BITS - plans[0].len().leading_zeros() {
        for first in 0..2 {
            let plan = |rank: usize| plans[(rank >> bit & 1) ^ first][rank].clone();
            let mixed: Vec<Plan> = (0..plans[0].len()).map(plan).collect();
            crate::verify::verify(&mixed, &crate::verify::Options { capacity: CAPACITY, vectored: false })?;
        }
    }
    Ok(())
}

/// Two ranks; rank 0 sends its vector in two messages, and one that nobody needs.
const WASTEFUL: &str = r#"<algo name="wasteful" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="2">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="1" type="s" srcbuf="i" srcoff="1" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1"/>
      <step s="2" type="s" srcbuf="i" srcoff="1" dstbuf="s" dstoff="2" cnt="1" depid="-1" deps="-1"/>
      <step s="3" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" depid="0" deps="3"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="s" dstoff="-1" cnt="0" depid="-1" deps="-1"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="3">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="1" type="r" srcbuf="i" srcoff="1" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1"/>
      <step s="2" type="r" srcbuf="i" srcoff="1" dstbuf="s" dstoff="2" cnt="1" depid="-1" deps="-1"/>
      <step s="3" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1"/>
      <step s="4" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1"/>
    </tb>
  </gpu>
</algo>
"#;

/// One rank turns the halves of its buffer round.
const TURNED: &str = r#"<algo name="turned" nchunksperloop="2" ngpus="1" coll="custom" inplace="1">
  <gpu id="0" s_chunks="1">
    <tb id="0" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="1" type="cpy" srcbuf="i" srcoff="1" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1"/>
      <step s="2" type="cpy" srcbuf="s" srcoff="0" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1"/>
    </tb>
  </gpu>
</algo>
"#;

#[test]
fn dead_steps_go_and_messages_that_follow_each_other_are_one() {
    let grid = Arc::new(Grid::flat(2));
    let passed = |text: &str| {
        let script = xml::read(text).unwrap();
        let form = |in_place| ScriptForm { in_place, prologue: false, root: Rank(0) };
        judge(&script, &grid, Rank(0)).unwrap();
        let proofs: Vec<Proof> = [false, true].map(|in_place| prove(&script, &grid, form(in_place)).unwrap()).into();
        let after = optimized(proofs.clone());
        mixed(&after).unwrap();
        (proofs[0].report.messages, after[0].report.messages, after[1].report.messages)
    };
    // The copy is dead and so is the third message; the first two become one.
    assert_eq!(passed(WASTEFUL), (4, 2, 2));
    // Where a thread block waits for the first message alone it can begin earlier: they stay two.
    let fold = "<step s=\"3\" type=\"re\" srcbuf=\"s\" srcoff=\"0\" dstbuf=\"i\" dstoff=\"0\" cnt=\"2\" depid=\"-1\" deps=\"-1\"/>";
    let apart = "<step s=\"3\" type=\"re\" srcbuf=\"s\" srcoff=\"1\" dstbuf=\"i\" dstoff=\"1\" cnt=\"1\" depid=\"1\" deps=\"0\"/>";
    let block = "</tb>\n    <tb id=\"1\" send=\"-1\" recv=\"-1\" chan=\"0\">\n      <step s=\"0\" type=\"re\" srcbuf=\"s\" srcoff=\"0\" \
                 dstbuf=\"i\" dstoff=\"0\" cnt=\"1\" depid=\"0\" deps=\"0\"/>\n    </tb>\n  </gpu>\n</algo>";
    assert!(WASTEFUL.contains(fold));
    let waiting = WASTEFUL.replace(fold, apart).replace("</tb>\n  </gpu>\n</algo>", block);
    assert_eq!(passed(&waiting), (4, 3, 3));
}

#[test]
fn a_name_is_written_as_it_is_read() {
    let mut script = xml::read(EXCHANGE).unwrap();
    script.name = " a\tname\u{0}of\n<two> \"lines\"\u{a0}".to_string();
    let again = xml::read(&write(&script)).unwrap();
    assert_eq!(again.name, "a name of <two> \"lines\"");
    assert_eq!(write(&again), write(&script));
}

/// A file of so many ranks of so many chunks, without a step.
fn idle(collective: &str, ranks: usize, chunks: usize) -> String {
    let gpu = |rank| format!("<gpu id='{rank}' i_chunks='{chunks}' o_chunks='{chunks}' s_chunks='0'/>");
    let gpus: String = (0..ranks).map(gpu).collect();
    format!("<algo name='idle' ngpus='{ranks}' nchunksperloop='{chunks}' coll='{collective}'>{gpus}</algo>")
}

#[test]
fn a_file_of_too_many_chunks_in_all_is_refused_by_its_reader() {
    let said = xml::read(&idle("allreduce", 1024, 1 << 16)).unwrap_err().text;
    assert_eq!(said, "the buffers of all ranks have 134217728 chunks, more than 67108864");
    assert!(xml::read(&idle("allreduce", 1024, 1 << 15)).is_ok());
}

/// Of two ranks that receive nothing one is not the root, and has no part in a broadcast; so none is looked for.
#[test]
fn the_root_is_not_looked_for_where_there_can_be_none() {
    let script = xml::read(&idle("broadcast", 1024, 1 << 15)).unwrap();
    let began = std::time::Instant::now();
    let refusal = root(&script, &Arc::new(Grid::flat(1024))).unwrap_err();
    assert!(refusal.to_string().contains("output chunk 0 ends as nothing"), "{refusal}");
    assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
}

/// Whether a custom script is in place, where it does what a contract says in all forms.
fn custom(text: &str, contract: &str) -> Result<bool, String> {
    let script = read(text, Some(contract)).map_err(|bad| bad.to_string())?;
    let grid = Arc::new(Grid::flat(script.nranks()));
    judge(&script, &grid, Rank(0)).map_err(|refusal| refusal.to_string())?;
    for in_place in [false, true] {
        let form = ScriptForm { in_place, prologue: false, root: Rank(0) };
        prove(&script, &grid, form).map_err(|refusal| refusal.to_string())?;
    }
    Ok(script.in_place)
}

#[test]
fn a_custom_script_in_place_has_one_buffer_unless_it_does_what_it_says_with_two() {
    let turned = "[[output]]\nchunk_shift = 1\nwraps = true";
    assert_eq!(custom(TURNED, turned), Ok(true));
    // One name or the other is the same chunk then.
    let named = TURNED.replacen("dstbuf=\"i\" dstoff=\"0\"", "dstbuf=\"o\" dstoff=\"0\"", 1);
    assert_eq!(custom(&named, turned), Ok(true));
    let both = named.replacen("dstbuf=\"i\" dstoff=\"1\"", "dstbuf=\"o\" dstoff=\"1\"", 1);
    assert_eq!(custom(&both, turned), Ok(false));
    let said = custom(&TURNED.replace("inplace=\"1\"", "inplace=\"0\""), turned).unwrap_err();
    assert!(said.contains("it was never written"), "{said}");
    let said = custom(TURNED, "[[output]]").unwrap_err();
    assert!(
        said.contains("line 5: rank 0, thread block 0, step 1: output chunk 0 ends as chunk 1 of rank 0"),
        "{said}"
    );
}

#[test]
fn a_custom_script_may_reduce_what_nothing_is_promised_of() {
    let text = EXCHANGE.replace("allreduce", "custom");
    let kept = "[[output]]\nranks = \"0\"\nrank = 0";
    // Rank 0 has the sum; only rank 1's own is promised.
    let said = custom(&text, kept).unwrap_err();
    assert!(said.contains("output chunk 0 ends as final chunk 0 of ranks 0+1"), "{said}");
    let other = text.replacen("type=\"re\"", "type=\"nop\"", 1);
    assert_eq!(custom(&other, kept), Ok(true));
    assert_eq!(custom(&text, ""), Ok(true));
    assert_eq!(custom(&text, "[[output]]\nreduced = true"), Ok(true));
}
