//! Every parser of what comes from outside, behind one function each, for fuzzers: any bytes must give a value or an error.
//!
//! No part of the library's interface. `fuzz/` has a libFuzzer target for each entry of [`PARSERS`], and
//! `cargo test --test fuzz` runs each on mutated seeds. What can be written again must come out the same.
#![forbid(unsafe_code)]

use crate::algorithms::{self, Choice};
use crate::bootstrap::protocol::{Answer, Credentials, Frame, Join, Process, FIRST_FRAME_LIMIT, FRAME_LIMIT};
use crate::bootstrap::rendezvous::Rendezvous;
use crate::bootstrap::ServiceAddr;
use crate::bootstrap::UniqueId;
use crate::carrier::Carrier;
use crate::communicator::members::Member;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::health::Loss;
use crate::memory::Arena;
use crate::plan::contract::Contract;
use crate::plan::{self, Collective, Shape};
use crate::script::trace::Trace;
use crate::script::{self, ScriptForm};
use crate::selection::table::agree::{Followers, OwnTable};
use crate::selection::table::{Row, Table};
use crate::sim::carriers::CARRIED;
use crate::sim::Cluster;
use crate::topo::interface::Filter;
use crate::topo::local::LocalRank;
use crate::topo::pinning::Rules;
use crate::topo::{Grid, Rank};
use crate::transport::header::{FrameHeader, FrameKind, HEADER};
use crate::transport::lossless::codec::{Codec, FRAME, MAX_CODED};
use crate::transport::mpi::capabilities::{self, LauncherEnv};
use crate::transport::tcp::frame::Greeting;
use crate::transport::{shm, Envelope};
use crate::vendor::runpath;
use crate::verify::Check;
use std::cell::RefCell;
use std::sync::Arc;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Parser {
    /// Its name, which is its target's in `fuzz/`.
    pub name: &'static str,
    /// Takes any bytes; a panic is a failure.
    pub run: fn(&[u8]),
    /// Inputs that are right, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All parsers of the library.
pub const PARSERS: &[Parser] = &[
    Parser { name: "service_frame", run: service_frame, seeds: frame_seeds },
    Parser { name: "bootstrap_room", run: bootstrap_room, seeds: room_seeds },
    Parser { name: "bootstrap_member", run: bootstrap_member, seeds: member_seeds },
    Parser { name: "tcp_frame", run: tcp_frame, seeds: tcp_seeds },
    Parser { name: "lossless_frame", run: lossless_frame, seeds: lossless_seeds },
    Parser { name: "unique_id", run: unique_id, seeds: id_seeds },
    Parser { name: "tuning_table", run: tuning_table, seeds: table_seeds },
    Parser { name: "tuner_csv", run: tuning_table, seeds: csv_seeds },
    Parser { name: "table_offer", run: table_offer, seeds: offer_seeds },
    Parser { name: "machine", run: machine, seeds: machine_seeds },
    Parser { name: "plan_text", run: plan_text, seeds: plan_seeds },
    Parser { name: "script", run: a_script, seeds: script_seeds },
    Parser { name: "trace", run: a_trace, seeds: trace_seeds },
    Parser { name: "contract", run: a_contract, seeds: contract_seeds },
    Parser { name: "elf", run: elf, seeds: elf_seeds },
    Parser { name: "shm_card", run: shm_card, seeds: shm_seeds },
    Parser { name: "shm_listing", run: shm_listing, seeds: listing_seeds },
    Parser { name: "mpi_card", run: mpi_card, seeds: card_seeds },
    Parser { name: "environment", run: environment, seeds: environment_seeds },
];

/// Runs the parser with this name, for the targets in `fuzz/`.
pub fn run(name: &str, data: &[u8]) {
    if let Some(parser) = PARSERS.iter().find(|parser| parser.name == name) {
        (parser.run)(data);
    }
}

fn bytes(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

const COMM: Credentials = Credentials { key: 7, secret: [9; 16] };

fn joining(rank: u32, nranks: u32) -> Join {
    let process = Process { host: "node".to_string(), pid: 12 };
    Join { room: COMM, nranks, rank, first_name: 0, total: nranks, retries: rank == 1, process }
}

/// Scripts of so many chunks in all are judged, too.
const JUDGED_CHUNKS: usize = 1 << 12;

fn a_script(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(script) = script::xml::read(text) else { return };
    let again = script::xml::read(&script::write(&script)).expect("what is written is read");
    assert!(script::write(&again) == script::write(&script), "it is read as another script");
    let _ = judged(&script);
}

/// Judges a script, and proves it, if it is short.
fn judged(script: &script::Script) -> std::result::Result<(), script::Refusal> {
    let moved = script.ranks.iter().flat_map(|rank| &rank.blocks).flat_map(|block| &block.steps);
    let moved: usize = moved.map(|step| step.count as usize).sum();
    if moved + script.nranks() * script.chunks as usize > JUDGED_CHUNKS {
        return Ok(());
    }
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = script::root(script, &grid)?;
    script::judge(script, &grid, root)?;
    let form = ScriptForm { in_place: false, prologue: false, root };
    script::prove(script, &grid, form).map(|_| ())
}

fn a_trace(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(trace) = Trace::from_json(text) else { return };
    // What few steps move may be many chunks, which take seconds.
    let moved: u64 = trace.steps().iter().map(|step| u64::from(step.count)).sum();
    if moved > JUDGED_CHUNKS as u64 {
        return;
    }
    let Ok(script) = trace.compile() else { return };
    let written = script::write(&script);
    let mut again = script::xml::read(&written).expect("what is compiled is read");
    assert!(script::write(&again) == written, "it is read as another script");
    again.contract = script.contract;
    // A trace may do something else than its collective promises, but what is compiled does it without fail.
    if let Err(refusal) = judged(&again) {
        let check = refusal.check();
        assert!(!matches!(check, Check::Progress | Check::Race | Check::Calls), "what is compiled fails: {refusal}");
    }
}

fn trace_seeds() -> Vec<Vec<u8>> {
    let exchange = r#"{"strata_trace":1,"name":"exchange","collective":"all_reduce","ranks":2,"chunks":2,"in_place":true,
"instances":2,"policy":"blocked","protocol":"LL128","steps":[
{"op":"reduce","src":[1,"input",0],"dst":[0,"input",0],"at":"exchange.py:7"},
{"op":"reduce","src":[0,"input",1],"dst":[1,"input",1],"parallel":[2,0]},
{"op":"copy","src":[0,"input",0],"dst":[1,"input",0],"channel":1},
{"op":"copy","src":[1,"input",1],"dst":[0,"input",1],"channel":1}]}"#;
    let gather = r#"{"strata_trace":1,"collective":"all_gather","ranks":3,"chunks":2,"steps":[
{"op":"copy","src":[0,"input",0],"dst":[0,"output",0],"count":2},{"op":"copy","src":[1,"input",0],"dst":[1,"output",2],"count":2},
{"op":"copy","src":[2,"input",0],"dst":[2,"output",4],"count":2},{"op":"copy","src":[0,"output",0],"dst":[1,"output",0],"count":2},
{"op":"copy","src":[1,"output",0],"dst":[2,"output",0],"count":4},{"op":"copy","src":[2,"output",2],"dst":[0,"output",2],"count":4},
{"op":"copy","src":[2,"output",4],"dst":[1,"output",4],"count":2}]}"#;
    let next = r#"{"strata_trace":1,"name":"next","collective":"custom","ranks":3,"chunks":2,"scratch":{"mid":2},
"contract":[{"ranks":"1-2","rank_shift":-1},{"ranks":"0","rank":2,"chunk_shift":1,"wraps":true}],"steps":[
{"op":"copy","src":[0,"input",0],"dst":[1,"output",0],"count":2,"send_tb":0,"recv_tb":1},
{"op":"copy","src":[1,"input",0],"dst":[2,"output",0],"count":2},{"op":"copy","src":[2,"input",1],"dst":[0,"mid",0]},
{"op":"copy","src":[0,"mid",0],"dst":[0,"output",0]},{"op":"copy","src":[2,"input",0],"dst":[0,"output",1]}]}"#;
    let scatter = r#"{"strata_trace":1,"collective":"reduce_scatter","ranks":2,"chunks":1,"steps":[
{"op":"copy","src":[0,"input",0],"dst":[0,"output",0]},{"op":"copy","src":[1,"input",1],"dst":[1,"output",0]},
{"op":"copy","src":[1,"input",0],"dst":[0,"s",0]},{"op":"reduce","src":[0,"s",0],"dst":[0,"output",0]},
{"op":"reduce","src":[0,"input",1],"dst":[1,"output",0]}]}"#;
    let ring = |chunk: u32| {
        let hop = |hop: u32| {
            let (from, to, op) = ((chunk + hop) % 3, (chunk + hop + 1) % 3, if hop < 2 { "reduce" } else { "copy" });
            format!(r#"{{"op":"{op}","src":[{from},"input",{chunk}],"dst":[{to},"input",{chunk}]}}"#)
        };
        (0..4).map(hop).collect::<Vec<_>>().join(",\n")
    };
    let steps: Vec<String> = (0..3).map(ring).collect();
    let head =
        r#"{"strata_trace":1,"name":"ring","collective":"all_reduce","ranks":3,"chunks":3,"in_place":true,"steps":["#;
    bytes(&[exchange, gather, next, scatter, &format!("{head}\n{}]}}", steps.join(",\n"))])
}

/// A contract's text, for few ranks of several chunks and for the reverse.
fn a_contract(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for (nranks, chunks) in [(4, 6), (16, 1)] {
        let Ok(contract) = Contract::parse(text, nranks, chunks) else { continue };
        let again = Contract::parse(&contract.text(), nranks, chunks);
        assert!(again.as_ref() == Ok(&contract), "it does not survive being written: {again:?}");
    }
}

fn contract_seeds() -> Vec<Vec<u8>> {
    bytes(&[
        "# AllToNext\n[[output]]\nranks = \"1-3\"\nrank_shift = -1\n",
        "[[output]]\nrank_shift = -1\nchunk_shift = 1\nwraps = true\n",
        "[[output]]\nreduced = true\n[[output]]\nranks = \"2\"\nchunks = \"0\"\nrank = 3\nchunk = 0\n",
        "[[output]]\nranks = '0-3'\nchunks = '0'\nrank_shift = 5\nwraps = true\nreduced = false\n",
    ])
}

fn script_seeds() -> Vec<Vec<u8>> {
    let grid = || Arc::new(Grid::flat(3));
    let plans = |collective| -> Vec<plan::Plan> {
        let shape = Shape::new(collective, grid());
        let build = |rank| algorithms::build(&Choice::flat("direct"), &shape, Rank::from_index(rank));
        (0..3).filter_map(|rank| build(rank).ok()).collect()
    };
    let texts = Collective::ALL.into_iter().filter_map(|collective| script::convert(&plans(collective)).ok());
    // Those have no fused steps.
    let fused = trace_seeds().into_iter().filter_map(|seed| {
        let trace = Trace::from_json(std::str::from_utf8(&seed).ok()?).ok()?;
        trace.compile().ok()
    });
    texts.chain(fused).map(|script| script::write(&script).into_bytes()).collect()
}

fn service_frame(data: &[u8]) {
    for limit in [FIRST_FRAME_LIMIT, FRAME_LIMIT] {
        if let Ok(Some((frame, used))) = Frame::decode(data, limit) {
            assert!(used <= data.len(), "it used more than there was");
            let again = Frame::decode(&frame.encode(), FRAME_LIMIT);
            assert!(matches!(again, Ok(Some((same, _))) if same == frame), "{frame:?} does not survive the wire");
        }
    }
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let process = Process { host: "node".to_string(), pid: 12 };
    let failure = "rank 3 died".to_string();
    let frames = [
        Frame::Join(joining(3, 4)),
        Frame::Joined,
        Frame::Part(vec![1, 2, 3]),
        Frame::All(vec![vec![], vec![5; 300], vec![1]]),
        Frame::TimedOut(77),
        Frame::Fail(Error::Timeout("missing".to_string())),
        Frame::Leave,
        Frame::Unknown,
        Frame::Link { comm: COMM, from: 1, to: 2, process: process.clone() },
        Frame::Welcome(process),
        Frame::Goodbye(vec![4, 5]),
        Frame::Query { comm: COMM, rank: 6, number: 1 << 40, from: 2 },
        Frame::Answer(Answer { begun: 3, waiting_for: Some(0), aborted: true, failure, ..Answer::default() }),
        Frame::Notice {
            comm: COMM,
            loss: Loss { rank: 5, from: Some(7), is_link: true, error: Error::Remote("it died".to_string()) },
        },
    ];
    frames.iter().map(Frame::encode).collect()
}

/// Frames of several members, one behind the other, each after a byte that says whose it is.
fn bootstrap_room(mut data: &[u8]) {
    let mut room: Option<Rendezvous> = None;
    while let Some((&member, rest)) = data.split_first() {
        let Ok(Some((frame, used))) = Frame::decode(rest, FRAME_LIMIT) else { break };
        data = &rest[used..];
        let member = u32::from(member);
        match (frame, &mut room) {
            // Larger rooms take memory for each of the ranks that they are said to have.
            (Frame::Join(join), None) if join.nranks <= 256 => {
                room = Rendezvous::new(&join).ok();
                room.as_mut().map(|room| room.join(u64::from(member), &join));
            }
            (Frame::Join(join), Some(room)) => {
                room.join(u64::from(member), &join);
            }
            // The service knows members by the seats that they took.
            (frame, Some(room)) if room.conns().any(|conn| conn == u64::from(member)) && room.has(member) => {
                room.hear(member, frame);
            }
            (_, Some(room)) if room.has(member) => {
                room.gone(member);
            }
            _ => {}
        }
    }
}

fn room_seeds() -> Vec<Vec<u8>> {
    let said = |frames: &[(u8, Frame)]| {
        frames.iter().flat_map(|(member, frame)| [vec![*member], frame.encode()].concat()).collect()
    };
    let joins: Vec<(u8, Frame)> = (0..3).map(|rank| (rank, Frame::Join(joining(rank.into(), 3)))).collect();
    let parts = [(0, Frame::Part(vec![1; 40])), (1, Frame::Part(vec![])), (2, Frame::Part(vec![3]))];
    let ends = [(0, Frame::Leave), (1, Frame::TimedOut(5)), (2, Frame::Fail(Error::Remote("gone".to_string())))];
    vec![said(&joins), said(&[&joins[..], &parts, &ends].concat()), said(&[&joins[..2], &ends].concat())]
}

fn bootstrap_member(data: &[u8]) {
    if let Ok(member) = Member::decode(3, data) {
        assert_eq!(Member::decode(3, &member.encode()), Ok(member));
    }
}

fn member_seeds() -> Vec<Vec<u8>> {
    let text = |gpu: &str, local: &str| {
        format!(r#"{{"host_id":"n0","host":"a","pid":7,"device":-1,"local":{local},"gpu":{gpu},"on_gpu":false,"#)
            + r#""service":"127.0.0.1:9","version":"0.1.0","color":3,"key":-4,"extra":["x=1\n","2"]}"#
    };
    bytes(&[&text("null", "null"), &text("\"0000:c1:00.0\"", "[3,8]")])
}

fn tcp_frame(data: &[u8]) {
    let Some(head) = data.first_chunk::<HEADER>() else { return };
    if let Some(greeting) = Greeting::decode(head) {
        assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
    }
    if let Some(header) = FrameHeader::decode(head) {
        assert_eq!(FrameHeader::decode(&header.encode()), Some(header));
    }
}

fn tcp_seeds() -> Vec<Vec<u8>> {
    let envelope = Envelope { channel: 3, sequence: 1 << 40, signature: 7 };
    let header = FrameHeader { kind: FrameKind::Data, envelope, bytes: 5 << 32, id: 3, body: 1 << 33, nonce: 1 << 60 };
    let greeting = Greeting { from: Rank(300), index: 1, secret: [3; 16] };
    vec![header.encode().to_vec(), greeting.encode().to_vec()]
}

thread_local! {
    /// A codec and a place for what it decodes, as a rank has one for all frames.
    static CODEC: RefCell<Option<(Codec, Arena)>> = RefCell::new(Codec::new().map(|codec| (codec, Arena::new(MAX_CODED + 1))));
}

/// The length that a coded frame stands for, and the frame.
fn lossless_frame(data: &[u8]) {
    let Some((len, body)) = data.split_first_chunk() else { return };
    let len = u32::from_le_bytes(*len) as usize;
    let body = &body[..body.len().min(MAX_CODED + 1)];
    CODEC.with_borrow_mut(|codec| {
        let Some((codec, arena)) = codec else { return };
        let region = arena.region().part(0, body.len());
        region.write(body);
        if let Ok(original) = codec.decode(region, len) {
            assert_eq!(original.len(), len);
            let form = codec.choose(len);
            let mut again = vec![0; MAX_CODED];
            form.and_then(|form| codec.encode(len, form, &mut again));
        }
    });
}

fn lossless_seeds() -> Vec<Vec<u8>> {
    let Some(mut codec) = Codec::new() else { return Vec::new() };
    let mut seed = |len: usize, byte: fn(usize) -> u8| {
        codec.original(len).iter_mut().enumerate().for_each(|(at, place)| *place = byte(at));
        let mut frame = vec![0; MAX_CODED];
        let coded = codec.choose(len).and_then(|form| codec.encode(len, form, &mut frame)).unwrap_or(0);
        [&(len as u32).to_le_bytes()[..], &frame[..coded]].concat()
    };
    let mixed: fn(usize) -> u8 = |at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] >> (at % 2 * 6);
    vec![seed(1000, |_| 0), seed(2003, mixed), seed(FRAME, mixed), seed(4000, |at| ((at / 8) >> (at % 8)) as u8)]
}

fn unique_id(data: &[u8]) {
    let mut id = UniqueId([0; 128]);
    let len = data.len().min(id.0.len());
    id.0[..len].copy_from_slice(&data[..len]);
    let _ = id.credentials();
    if let Some(addr) = ServiceAddr::decode(data) {
        assert!(ServiceAddr::decode(&addr.encode()).is_some());
    }
}

fn id_seeds() -> Vec<Vec<u8>> {
    let addrs = ["127.0.0.1:4321", "[2001:db8::7]:65535"];
    let ids = addrs.iter().filter_map(|addr| UniqueId::from_address(addr, "").ok()).map(|id| id.0.to_vec());
    let encoded = addrs.iter().filter_map(|addr| addr.parse().ok()).map(|addr| ServiceAddr(addr).encode().to_vec());
    ids.chain(encoded).collect()
}

fn tuning_table(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(table) = Table::parse(text) {
        if table.header.is_some() {
            // Times are written with one decimal.
            let rows = |table: Table| table.rows.into_iter().map(|row| Row { measured: Vec::new(), ..row }).collect();
            let again: Result<Vec<Row>> = Table::parse(&table.to_toml()).map(rows);
            assert_eq!(again, Ok(rows(table)), "it does not survive being written");
        }
    }
}

fn table_seeds() -> Vec<Vec<u8>> {
    let head = "format = 1\nstrata = \"0.1.0\"\ndate = \"2025-11-30\"\n\n[machine]\ncpu = \"a\"\ndevice = \"host\"\n\
                inter = \"tcp\"\nvendor = \"none\"\n";
    let row = "\n[[row]]\ncollective = \"all_gather\"\nranks = 8\nnodes = 2\nbytes = 1048576\n\
               algorithm = \"two_level(direct,log)\"\nsegment_bytes = 65536\nwindow = 4\nmeasured = [\n    \
               { algorithm = \"ring\", median_us = 812.5, low_us = 801.0, high_us = 840.1, samples = 45 },\n]\n";
    let bare = "\n[[row]]\ncollective = \"reduce\"\nranks = 4\nnodes = 4\nbytes = 0\nalgorithm = \"tree\"\n";
    bytes(&[head, &format!("{head}{row}"), &format!("{head}{row}{bare}")])
}

fn csv_seeds() -> Vec<Vec<u8>> {
    bytes(&[
        "# rows of a plugin\nallreduce,0,65536,tree,simple,2,1,-1,-1,1\nallgather,65537,1048576,ring,ll128,4,2,16\n",
        "broadcast,0,4294967295,ring,simple,-1,-1,-1,-1,-1\nreducescatter,0,1,nvls,simple,16,4,32,1,0\n",
    ])
}

fn grid() -> Arc<Grid> {
    Arc::new(Grid::blocks(&[4, 4]))
}

fn table_offer(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut config = Config::default();
    config.take_over(text);
    // Neither a machine nor a table that is not one may do more than be refused.
    let _ = crate::selection::model::agree(text);
    let _ = OwnTable::load(&Config::default()).agree(
        text,
        &Followers { grid: &grid(), inter: Some(Carrier::TCP), in_front: false, scripts: &Default::default() },
    );
}

fn offer_seeds() -> Vec<Vec<u8>> {
    let machine = r#"{"cpu":"a","device":"host","inter":"","vendor":"none"}"#;
    let row = r#"{"collective":"all_gather","ranks":8,"nodes":2,"size":{"Near":1024},"algorithm":"ring","segment_bytes":0,"window":0}"#;
    let offer = format!(
        r#"{{"path":"t.toml","digest":5,"there":{machine},"here":{machine},"refused":null,"rows":[{row},{row}]}}"#
    );
    let unused = OwnTable::load(&Config::default()).offer(Default::default(), 8);
    bytes(&[&offer, &unused, &Config::default().agreed()])
}

fn machine(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(machine) = Cluster::parse(text, "mine.toml") else { return };
    // What was let through must be fit to compute with.
    for collective in [Collective::AllGather, Collective::AllReduce] {
        assert!(machine.vendor_ns(collective, &grid(), 1 << 20).is_none_or(|ns| ns >= 0.0 && ns.is_finite()));
    }
    for collective in CARRIED {
        assert!(machine.mix_ns(collective, &grid(), 1 << 20, None).is_none_or(|(_, ns)| ns >= 0.0 && ns.is_finite()));
    }
    assert!(machine.nic_of(1, machine.ranks_per_node()) < 1 << 20);
}

fn machine_seeds() -> Vec<Vec<u8>> {
    Cluster::names().filter_map(|name| Cluster::text(name).ok()).map(String::into_bytes).collect()
}

fn plan_text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(plan) = plan::text::parse(text) {
        assert_eq!(plan::text::parse(&plan::text::print(&plan)), Ok(plan), "it does not survive being printed");
    }
}

fn plan_seeds() -> Vec<Vec<u8>> {
    let shape = |collective| Shape::new(collective, grid());
    let text = |(name, collective): (&str, Collective)| {
        let choice: Choice = name.parse().ok()?;
        let plan = algorithms::build_with_calls(&choice, &shape(collective), Rank(1)).ok()?;
        Some(plan::text::print(&plan).into_bytes())
    };
    [
        ("ring", Collective::AllGather),
        ("log", Collective::ReduceScatter),
        ("tree", Collective::Broadcast),
        ("two_level(direct,log)", Collective::AllReduce),
        ("direct", Collective::AllToAll),
    ]
    .into_iter()
    .filter_map(text)
    .collect()
}

fn elf(data: &[u8]) {
    let _ = runpath::folders_in(data);
}

/// A file of one dynamic segment, with a run path and a library that it needs.
fn elf_seeds() -> Vec<Vec<u8>> {
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0".to_vec();
    let strings = b"\0libnccl.so.2\0$ORIGIN/../lib:/opt/nccl/lib\0";
    let dynamic: [[u64; 2]; 5] = [[1, 1], [29, 14], [5, 256], [10, strings.len() as u64], [0, 0]];
    for word in [0u64, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    for half in [0u16, 0, 64, 56, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    for (kind, offset, len) in [(1u64, 0u64, 512u64), (2, 176, 80)] {
        for word in [kind | 4 << 32, offset, offset, offset, len, len, 8] {
            file.extend(word.to_le_bytes());
        }
    }
    dynamic.iter().flatten().for_each(|word| file.extend(word.to_le_bytes()));
    file.extend(strings);
    file.resize(512, 0);
    vec![file]
}

fn shm_card(data: &[u8]) {
    let _ = shm::open::NodeCard::decode(data);
}

fn shm_seeds() -> Vec<Vec<u8>> {
    vec![(0..=255).collect(), vec![0; 64]]
}

fn shm_listing(data: &[u8]) {
    let Some((pieces, body)) = data.split_first_chunk() else { return };
    let pieces = u32::from_le_bytes(*pieces);
    let Ok(listing) = shm::record::Listing::decode(Rank(1), pieces, body) else { return };
    let mut again = Vec::new();
    listing.encode(&mut again);
    assert!(again == body && listing.pieces.len() == pieces as usize);
    // None of these allocations is anybody's.
    let unknown = listing.keys.iter().all(|(key, _)| key.pid > i32::MAX as u32);
    assert!(!unknown || listing.keys.is_empty() || shm::pull::mapped(&listing).is_none());
}

fn listing_seeds() -> Vec<Vec<u8>> {
    let listing = |pieces: u32, keys: u32| {
        let body = (0..shm::record::Listing::bytes(pieces, keys)).map(|at| at as u8 | 0xf0);
        pieces.to_le_bytes().into_iter().chain(body).collect()
    };
    vec![listing(0, 0), listing(1, 0), listing(1, 1), listing(3, 2)]
}

fn mpi_card(data: &[u8]) {
    let Ok(card) = capabilities::Capabilities::decode(data) else { return };
    assert_eq!(capabilities::Capabilities::decode(&card.encode()).as_ref(), Ok(&card));
    let other = capabilities::Capabilities { world_rank: 1, ..card.clone() };
    let _ = capabilities::decide(&[card, other]);
}

fn card_seeds() -> Vec<Vec<u8>> {
    let card = capabilities::Capabilities {
        world_size: 2,
        job: "7".to_string(),
        description: "MPI X".to_string(),
        ..Default::default()
    };
    vec![card.encode(), capabilities::Capabilities::refusal("no plugin").encode()]
}

/// Variables, one a line, as `NAME=value`.
fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let vars: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let (config, _) = Config::from_vars(vars.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    let mut other = Config::default();
    other.take_over(&config.agreed());
    Collective::ALL.iter().for_each(|&collective| {
        let _ = config.algorithm(collective).parse::<Choice>();
        config.leaves_to_vendor(collective);
    });
    let var = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
    let filter = Filter::new(var("NCCL_SOCKET_IFNAME").as_deref(), var("NCCL_SOCKET_FAMILY").as_deref());
    filter.allows("eth0");
    let _ = Rules::new(&config.nic_map, filter);
    let _ = LocalRank::from_vars(var);
    let _ = LauncherEnv::from_vars(var);
    crate::selection::vendor::named_by_nccl_algo(&var("NCCL_ALGO").unwrap_or_default());
    let id = var("NCCL_COMM_ID").filter(|id| id.chars().all(|c| c.is_ascii_digit() || ".:[]".contains(c)));
    // A name would be looked up.
    let _ = id.map(|id| UniqueId::from_address(&id, config.comm_key.expose()));
}

fn environment_seeds() -> Vec<Vec<u8>> {
    bytes(&[
        "STRATA_NIC_MAP=hsn0,hsn0,hsn1,hsn1\nSTRATA_WINDOW=4\nSTRATA_ALLREDUCE_ALGO=two_level(direct,log)\n",
        "NCCL_SOCKET_IFNAME=^=eth1,lo:2\nNCCL_SOCKET_FAMILY=AF_INET6\nNCCL_ALGO=allreduce:tree;allgather:^ring\n",
        "STRATA_TIMEOUT_MS=600000\nSTRATA_VENDOR_ONLY=allgather,reducescatter\nSTRATA_SHM=off\nSTRATA_SHMM=1\n",
        "NCCL_COMM_ID=127.0.0.1:4321\nSTRATA_COMM_KEY=a b c\nOMPI_COMM_WORLD_RANK=3\nSLURM_STEP_NUM_TASKS=-1\n",
        "LOCAL_RANK=3\nLOCAL_WORLD_SIZE=8\nPMI_RANK=0\nPMI_SIZE=2\nSTRATA_SEGMENT_BYTES=18446744073709551615\n",
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_what_parsers_take() {
        assert_eq!(runpath::folders_in(&elf_seeds()[0]).map(|folders| folders.len()), Some(2));
        assert_eq!(plan_seeds().len(), 5);
        let text = |seed: &Vec<u8>| String::from_utf8(seed.clone()).unwrap();
        assert!(plan_seeds().iter().all(|seed| plan::text::parse(&text(seed)).is_ok()));
        assert!(table_seeds().iter().chain(&csv_seeds()).all(|seed| Table::parse(&text(seed)).is_ok()));
        assert!(member_seeds().iter().all(|seed| Member::decode(0, seed).is_ok()));
        assert!(card_seeds().iter().all(|seed| capabilities::Capabilities::decode(seed).is_ok()));
        assert!(frame_seeds().iter().all(|seed| matches!(Frame::decode(seed, FIRST_FRAME_LIMIT), Ok(Some(_)))));
        let world =
            Followers { grid: &grid(), inter: Some(Carrier::TCP), in_front: false, scripts: &Default::default() };
        assert!(OwnTable::load(&Config::default()).agree(&text(&offer_seeds()[0]), &world).is_ok());
        assert!(trace_seeds()
            .iter()
            .all(|seed| Trace::from_json(&text(seed)).is_ok_and(|trace| trace.compile().is_ok())));
        assert!(contract_seeds().iter().all(|seed| Contract::parse(&text(seed), 4, 6).is_ok()));
        let lossless: Vec<_> = lossless_seeds().iter().map(|seed| seed.len() > 16).collect();
        assert_eq!(lossless, [true; 4]);
        assert!(id_seeds().len() == 4 && machine_seeds().len() == Cluster::names().count());
        for parser in PARSERS {
            (parser.seeds)().iter().for_each(|seed| run(parser.name, seed));
        }
    }
}
