//! The built-in workloads against figures worked out by hand, apart from their formulas.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::catalogue::{find, list, EMBEDDED};
use super::program::{Program, Setting};

fn program(name: &str, world: usize, set: &[(&str, &str)]) -> Program {
    let set = set.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let setting = Setting { world, flops: 156e12, scale: 1.0, compute: true, set, sizes: None };
    Program::new(&find(name).unwrap(), &setting).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Calls and bytes of a phase, collective and group.
fn row(program: &Program, phase: &str, kind: Kind, group: &str) -> (usize, u64) {
    let found = program
        .rows
        .iter()
        .find(|row| program.phases[row.phase] == phase && row.kind == kind && program.groups[row.group].name == group);
    let found = found.unwrap_or_else(|| panic!("no {} of {group} in {phase}", kind.name()));
    (found.calls, found.bytes)
}

/// Within so many parts of a million: blocks are padded to whole elements.
fn about(value: u64, expected: f64, millionths: f64) -> bool {
    (value as f64 / expected - 1.0).abs() < millionths * 1e-6
}

#[test]
fn every_built_in_number_has_a_source_or_is_called_an_assumption() {
    for (name, _) in EMBEDDED {
        let workload = find(name).unwrap();
        assert!(!workload.source.is_empty(), "{name} says nothing of where it is from");
        for (parameter, what) in &workload.parameters {
            let bare = what.formula.text.parse::<f64>().is_ok();
            assert!(
                !bare || what.source.is_some() || what.assumption.is_some(),
                "{name}: {parameter} = {} comes from nowhere",
                what.formula.text
            );
        }
        let of_calls = |text: &str| text.lines().filter(|line| line.contains("call =")).count();
        let text = EMBEDDED.iter().find(|(known, _)| *known == name).unwrap().1;
        assert!(of_calls(text) > 0);
        for line in text.lines().filter(|line| line.contains("count = ") && !line.contains("count = 1,")) {
            assert!(line.contains("count = \""), "{name}: a bare number of elements: {line}");
        }
    }
    assert_eq!(list().unwrap().lines().count(), EMBEDDED.len());
}

#[test]
fn zero_3_moves_three_times_the_parameters() {
    // 12 h^2 + 13 h for each of 40 layers; 50,257 words and 2,048 places of 5,120; a norm.
    let weights = 40 * (12 * 5120u64 * 5120 + 13 * 5120) + (50257 + 2048) * 5120 + 2 * 5120;
    assert!((12.8e9..12.9e9).contains(&(weights as f64)), "the paper's 13 billion");
    let program = program("zero3", 8, &[]);
    assert_eq!(program.bytes(), 3 * 2 * weights + 4, "in half precision, and one float for the norm");
    assert_eq!(row(&program, "forward", Kind::AllGather, "data"), (41, 2 * weights));
    assert_eq!(row(&program, "backward", Kind::AllGather, "data"), (41, 2 * weights));
    assert_eq!(row(&program, "backward", Kind::ReduceScatter, "data"), (41, 2 * weights));
    // 8 operations for a weight and token (forward, recomputed, twice backward) but 6 for the output's, which is not
    // recomputed, and the attention's scores beside them.
    let tokens = 2048.0;
    let matrices = 8.0 * tokens * 40.0 * 12.0 * 5120.0 * 5120.0 + 6.0 * tokens * 5120.0 * 50257.0;
    let scores = 4.0 * 40.0 * 4.0 * tokens * 2048.0 * 5120.0;
    let adam_us = 28.0 * weights as f64 / 8.0 / 1.555e6;
    let expected = (matrices + scores) / 156e12 * 1e6 + adam_us;
    assert!((program.compute_us() / expected - 1.0).abs() < 1e-9);
}

#[test]
fn fsdp_gathers_t5_twice_and_its_embedding_once() {
    // d_model 1024, 128 heads of 128, d_ff 65,536.
    let attention = 4 * 1024 * 16384u64;
    let (encoder, decoder) = (attention + 2 * 1024 * 65536 + 2048, 2 * attention + 2 * 1024 * 65536 + 3072);
    let (layers, embedding) = (24 * (encoder + decoder), 32128 * 1024 + 2048);
    assert!((11.25e9..11.35e9).contains(&((layers + embedding) as f64)), "T5-11B has 11.3 billion");
    let program = program("fsdp", 8, &[]);
    assert_eq!(program.bytes(), 2 * (3 * layers + 2 * embedding));
    assert_eq!(row(&program, "backward", Kind::ReduceScatter, "data"), (49, 2 * (layers + embedding)));
}

#[test]
fn ddp_reduces_every_gradient_once_in_buckets_of_25_mib() {
    let resnet = program("ddp-resnet50", 8, &[]);
    // 97.49 MiB of gradients: three full buckets and one of 22.5.
    assert_eq!(row(&resnet, "backward", Kind::AllReduce, "data"), (4, 4 * 25_557_032));
    assert_eq!(row(&resnet, "forward", Kind::Broadcast, "data"), (1, 4 * 53_120));
    assert_eq!(resnet.calls[1].count * 4, 25 << 20);
    let bert = program("ddp-bert", 8, &[]);
    let weights = 24 * (12 * 1024u64 * 1024 + 13 * 1024) + (30522 + 512 + 4) * 1024 + 1024 * 1024 + 1024;
    assert_eq!(weights, 335_141_888, "the 335 million of bert-large-uncased without its heads");
    assert_eq!(
        row(&bert, "backward", Kind::AllReduce, "data"),
        ((weights * 4).div_ceil(25 << 20) as usize, 4 * weights)
    );
}

#[test]
fn axonn_s_calls_follow_its_grid() {
    // 2 by 2 by 4 ranks hold the model, 128 replicas of it: 2,048.
    let program = program("axonn", 2048, &[]);
    assert_eq!(program.layout.text(), "x=2 y=2 z=4 data=128");
    let (h, rows) = (7168u64, 4 * 2048u64);
    // Per layer 12 h^2, of which x and y leave a quarter.
    let weights = 32 * 12 * h * h / 4;
    assert_eq!(row(&program, "forward", Kind::AllGather, "z"), (32, 2 * weights));
    assert_eq!(row(&program, "backward", Kind::AllGather, "z"), (32, 2 * weights));
    assert_eq!(row(&program, "backward", Kind::ReduceScatter, "z"), (128, 2 * weights));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "data"), (1, 2 * weights / 4));
    // Outputs of 3 h and 4 h along y are summed over x, the two of h along x over y.
    let forward_x = 32 * rows * (3 + 4) * h / 2;
    let forward_y = 32 * rows * 2 * h / 2;
    assert_eq!(row(&program, "forward", Kind::AllReduce, "x"), (64, 2 * forward_x));
    assert_eq!(row(&program, "forward", Kind::AllReduce, "y"), (64, 2 * forward_y));
    // Backward as in the recomputed forward pass, and the gradients of the inputs: h and h along x summed over y, h and
    // 4 h along y summed over x.
    assert_eq!(row(&program, "backward", Kind::AllReduce, "x"), (128, 2 * (forward_x + 32 * rows * 5 * h / 2)));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "y"), (128, 2 * (forward_y + 32 * rows * 2 * h / 2)));
    // Operations: 8 for a weight and row; 16 for attention's scores, context and hidden.
    let per_rank = (8.0 * rows as f64 * (12 * h * h) as f64 + 16.0 * rows as f64 * 2048.0 * h as f64) * 32.0 / 4.0;
    let adam_us = 28.0 * weights as f64 / 4.0 / 1.6e6;
    assert!((program.compute_us() / (per_rank / 156e12 * 1e6 + adam_us) - 1.0).abs() < 1e-9);
}

#[test]
fn ted_sends_a_share_of_the_tokens_to_the_experts_and_gathers_them() {
    let program = program("ted", 128, &[]);
    assert_eq!(program.layout.text(), "tensor=4 expert=16 data=2");
    let (h, tokens) = (4096u64, 2048u64);
    for phase in ["forward", "backward"] {
        // 16 of 32 layers have experts, each with two exchanges of a quarter of the tokens.
        assert_eq!(row(&program, phase, Kind::AllToAll, "expert"), (32, 2 * 32 * tokens * h / 4));
        assert_eq!(row(&program, phase, Kind::AllGather, "tensor"), (32, 2 * 32 * tokens * h));
        assert_eq!(row(&program, phase, Kind::AllReduce, "tensor"), (64, 2 * 64 * tokens * h));
    }
    let shared = (32 * 4 * h * h + 16 * 8 * h * h) / 4;
    let owned = 16 * 8 * h * h / 4;
    assert_eq!(row(&program, "backward", Kind::AllReduce, "expert*data"), (1, 2 * shared));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "data"), (1, 2 * owned));
    assert_eq!(row(&program, "optimizer", Kind::AllGather, "data"), (1, 2 * owned));
    let all = 4 * shared + 16 * 4 * owned;
    assert!((38e9..42e9).contains(&(all as f64)), "the paper's 40 billion: {all}");
}

#[test]
fn dlrm_exchanges_every_sample_s_vectors_and_sums_its_mlps() {
    let program = program("dlrm", 16, &[]);
    let vectors = 2048 * 26 * 128 * 4u64;
    assert_eq!(row(&program, "forward", Kind::AllToAll, "data"), (1, vectors));
    assert_eq!(row(&program, "backward", Kind::AllToAll, "data"), (1, vectors));
    let linear = |sizes: &[u64]| sizes.windows(2).map(|pair| (pair[0] + 1) * pair[1]).sum::<u64>();
    let (bottom, top) = (linear(&[13, 512, 256, 128]), linear(&[479, 1024, 1024, 512, 256, 1]));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "data"), (2, 4 * (bottom + top)));
}

#[test]
fn ds_moe_exchanges_tokens_six_times_a_layer_and_sums_4_billion_gradients() {
    // 32 experts on 32 ranks each, 64 on 64: 4 replicas of the first and of the last.
    let (program, few) = (program("ds-moe", 256, &[]), program("ds-moe", 16, &[]));
    assert_eq!(program.layout.text(), "expert=32 pair=2 data=4");
    let (h, tokens) = (1024u64, 2048u64);
    let exchange = 2 * tokens * h;
    assert_eq!(row(&program, "forward", Kind::AllToAll, "expert"), (20, 20 * exchange));
    assert_eq!(row(&program, "backward", Kind::AllToAll, "expert"), (40, 40 * exchange));
    assert_eq!(row(&program, "forward", Kind::AllToAll, "expert*pair"), (4, 4 * exchange));
    assert_eq!(row(&program, "backward", Kind::AllToAll, "expert*pair"), (8, 8 * exchange));
    let shared = 24 * 12 * h * h + (50257 + 2048) * h;
    let (first, last) = (10 * 8 * h * h, 2 * 8 * h * h);
    assert!((350e6..360e6).contains(&(shared as f64)), "the base model's 350 million: {shared}");
    let all = shared + 32 * first + 64 * last;
    assert!((4.0e9..4.2e9).contains(&(all as f64)), "the paper's 4 billion: {all}");
    assert_eq!(row(&program, "backward", Kind::AllReduce, "world"), (1, 2 * shared));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "pair*data"), (1, 2 * first));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "data"), (1, 2 * last));
    // On fewer ranks each has several experts, and nobody a replica.
    assert_eq!(few.layout.text(), "expert=16 pair=1 data=1");
    assert_eq!(few.rows.iter().filter(|row| row.kind == Kind::AllReduce).count(), 2, "gradients and their norm");
}

#[test]
fn mcr_dl_s_dlrm_has_a_table_and_256_samples_a_rank() {
    let program = program("dlrm-mcr", 32, &[]);
    let linear = |sizes: &[u64]| sizes.windows(2).map(|pair| (pair[0] + 1) * pair[1]).sum::<u64>();
    let pairs = 33 * 32 / 2 + 64;
    let mlps = linear(&[512, 512, 64]) + linear(&[pairs, 1024, 1024, 1024, 1]);
    assert_eq!(row(&program, "forward", Kind::AllToAll, "data"), (1, 4 * 8192 * 64));
    assert_eq!(row(&program, "backward", Kind::AllToAll, "data"), (1, 4 * 8192 * 64));
    assert_eq!(row(&program, "backward", Kind::AllReduce, "data"), (1, 4 * mlps));
}

#[test]
fn the_dense_model_reduces_its_gradients_with_every_microbatch() {
    let program = program("megatron-6.7b", 32, &[]);
    assert_eq!(program.layout.text(), "tensor=2 data=16");
    let h = 4096u64;
    // 1,024 sequences on 16 replicas, 4 at a time: 16 microbatches of 8,192 tokens.
    let activations = 8192 * h * 2;
    let calls = 16 * 32 * 6;
    assert_eq!(row(&program, "microbatches", Kind::AllReduce, "tensor"), (calls, calls as u64 * activations));
    let weights = (32 * (12 * h * h + 13 * h) + (50257 + 2048) * h) / 2;
    assert!((6.6e9..6.8e9).contains(&(2.0 * weights as f64)), "the paper's 6.7 billion");
    let (reductions, bytes) = row(&program, "microbatches", Kind::ReduceScatter, "data");
    assert_eq!((reductions, about(bytes, (16 * 2 * weights) as f64, 1.0)), (16, true));
    assert_eq!(row(&program, "optimizer", Kind::AllGather, "data").0, 1);
}

#[test]
fn every_built_in_workload_fits_several_worlds() {
    for (name, _) in EMBEDDED {
        for world in [64, 128, 2048] {
            let one = program(name, world, &[]);
            assert!(!one.ops.is_empty(), "{name} on {world}");
            let more = program(name, 2 * world, &[]);
            // These have sizes that follow from how many ranks there are.
            if !["ted", "axonn", "ds-moe", "dlrm-mcr", "megatron-6.7b"].contains(&name) {
                assert!(about(more.bytes(), one.bytes() as f64, 100.0), "{name}: sizes are of a rank");
            }
        }
    }
    assert_eq!(program("ted", 8, &[("tensor", "2"), ("experts", "2")]).layout.text(), "tensor=2 expert=2 data=2");
    let setting = Setting { world: 24, flops: 1e12, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
    let error = Program::new(&find("axonn").unwrap(), &setting).unwrap_err();
    assert!(error.text().contains("needs a multiple of 16 ranks, not 24"), "{error}");
}

#[test]
fn unknown_workloads_are_told_with_their_like() {
    let error = find("zero4").map(|_| ()).unwrap_err();
    assert!(error.text().contains("did you mean `zero3`"), "{error}");
    let error = find("no/such.toml").map(|_| ()).unwrap_err();
    assert!(error.text().starts_with("cannot read the workload no/such.toml: "), "{error}");
    // A device without end: what is read has a bound.
    let error = find("/dev/zero").map(|_| ()).unwrap_err();
    assert!(error.text().contains("it has more than 1048576 bytes"), "{error}");
}
