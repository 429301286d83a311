//! Buffers of calls as a provider sees them, on a toy; and the setting.

use super::*;
use crate::device::host::Combine;
use crate::memory::Arena;
use crate::plan::OperandOrder;
use crate::transport::Blocks;

/// A provider of two ranks whose other rank sends 100, 101, ... and whose calls end at the second look.
#[derive(Debug, Default)]
struct Toy {
    call: Option<(ProviderCall, bool)>,
    refuses: bool,
    /// Blocks of different sizes must follow one another.
    in_order: bool,
    /// It gathers nothing in place.
    apart: bool,
    looks: usize,
    cancelled: bool,
}

impl Toy {
    /// The own block of an all-gather or a reduce-scatter of blocks of different sizes, and what the other rank sends.
    fn uneven(call: &ProviderCall, blocks: &UnevenBlocks) {
        let part = |region: Region, list: &BlockList, block: usize| {
            region.part(list.places[block] as usize, list.counts[block] as usize)
        };
        let theirs = |region: Region| region.write(&(100..).take(region.len()).collect::<Vec<u8>>());
        assert_eq!(call.count, 0);
        if call.collective == Collective::AllGather {
            assert_eq!(call.in_place, part(call.recv, &blocks.recv, 0).address() == call.send.address());
            if !call.in_place {
                part(call.recv, &blocks.recv, 0).copy_from(part(call.send, &blocks.send, 0));
            }
            theirs(part(call.recv, &blocks.recv, 1));
        } else {
            part(call.recv, &blocks.recv, 0).copy_from(part(call.send, &blocks.send, 0));
        }
    }
}

impl CollectiveProvider for Toy {
    fn start(&mut self, call: &ProviderCall) -> Result<()> {
        if self.refuses {
            return Err(Error::System("start of it returned 7: no".to_string()));
        }
        self.call = Some((call.clone(), false));
        self.looks = 0;
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        self.looks += 1;
        let Some((call, ended)) = self.call.as_mut().filter(|_| self.looks > 1) else { return Ok(false) };
        assert!(!std::mem::replace(ended, true), "asked after the end");
        if let Some(blocks) = &call.blocks {
            Toy::uneven(call, blocks);
            return Ok(true);
        }
        let theirs: Vec<u8> = (100..).take(call.count).collect();
        let (send, recv) = (call.send, call.recv);
        let mut mine = vec![0; send.len()];
        send.read(&mut mine);
        match call.collective {
            Collective::AllReduce => {
                let sum: Vec<u8> = mine.iter().zip(&theirs).map(|(one, other)| one.wrapping_add(*other)).collect();
                recv.write(&sum);
            }
            Collective::ReduceScatter => {
                let own = &mine[..call.count];
                let sum: Vec<u8> = own.iter().zip(&theirs).map(|(one, other)| one.wrapping_add(*other)).collect();
                recv.write(&sum);
            }
            Collective::AllGather => {
                if !call.in_place {
                    recv.part(0, call.count).write(&mine);
                }
                recv.part(call.count, call.count).write(&theirs);
            }
            _ => {}
        }
        Ok(true)
    }

    fn takes_in_place(&self, collective: Collective) -> bool {
        collective != Collective::ReduceScatter && !(self.apart && collective == Collective::AllGather)
    }

    fn farthest_place(&self, _: Collective) -> Option<u64> {
        (!self.in_order).then_some(1000)
    }

    fn cancel(&mut self) {
        self.cancelled = true;
    }
}

fn of(toy: Toy, most: MostBytes) -> Providers {
    let mut providers = Providers::new(Rank(0));
    providers.all.push(OpenProvider { name: "toy".to_string(), provider: Box::new(toy), most });
    providers
}

fn toy(refuses: bool) -> Providers {
    of(Toy { refuses, ..Toy::default() }, MostBytes::of(|_| 0))
}

fn by(name: &str) -> Provision<'_> {
    Provision { name, dtype: DataType::U8, uneven: None }
}

/// Memory, cut into pieces of these lengths.
fn region(bytes: &[u8]) -> Region {
    let whole = Arena::new(bytes.len().max(1)).leak().part(0, bytes.len());
    whole.write(bytes);
    whole
}

fn blocks(lists: &[&[Region]]) -> Blocks {
    let mut blocks = Blocks::default();
    lists.iter().for_each(|list| blocks.push(list.iter().copied()));
    blocks
}

fn bytes(region: Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes
}

fn sum(divisor: u64) -> Option<Combine> {
    Some(Combine { dtype: DataType::U8, operator: Operator::Sum, order: OperandOrder::LocalFirst, divisor })
}

fn run(
    providers: &mut Providers,
    collective: Collective,
    (src, dst): (&Blocks, &Blocks),
    combine: Option<Combine>,
) -> Vec<Token> {
    run_as(providers, by("toy"), NodeCall { collective, root: 0, src, dst, combine, operation_bytes: 0 })
}

fn run_as(providers: &mut Providers, by: Provision<'_>, call: NodeCall<'_>) -> Vec<Token> {
    assert_eq!(providers.start(9, by, call).unwrap(), Started::Pending);
    assert_eq!(providers.start(10, by, call).unwrap(), Started::Busy);
    assert!(providers.must_be_polled() && !providers.has_news());
    let mut done = Vec::new();
    providers.poll(&mut done).unwrap();
    assert_eq!(done, [0; 0]);
    providers.poll(&mut done).unwrap();
    providers.poll(&mut done).unwrap();
    assert!(!providers.must_be_polled());
    done
}

#[test]
fn what_lies_in_pieces_is_brought_together_and_back_and_an_average_is_divided() {
    let mut toy = toy(false);
    let (one, two) = (region(&[0, 1]), region(&[2, 3, 4]));
    let (into, rest) = (region(&[0]), region(&[0; 4]));
    let done = run(&mut toy, Collective::AllReduce, (&blocks(&[&[one, two]]), &blocks(&[&[into, rest]])), sum(2));
    assert_eq!((done, bytes(into), bytes(rest)), (vec![9], vec![50], vec![51, 52, 53, 54]));
}

#[test]
fn in_place_stays_so_where_the_library_has_the_convention_and_goes_through_our_memory_where_not() {
    let mut toy = toy(false);
    let both = region(&[1, 2, 0, 0]);
    let (mine, theirs) = (both.part(0, 2), both.part(2, 2));
    run(&mut toy, Collective::AllGather, (&blocks(&[&[mine]]), &blocks(&[&[mine], &[theirs]])), None);
    assert_eq!(bytes(both), [1, 2, 100, 101]);
    let both = region(&[1, 2, 3, 4]);
    let (mine, theirs) = (both.part(0, 2), both.part(2, 2));
    run(&mut toy, Collective::ReduceScatter, (&blocks(&[&[mine], &[theirs]]), &blocks(&[&[mine]])), sum(1));
    assert_eq!(bytes(both), [101, 103, 3, 4]);
}

#[test]
fn a_broadcast_has_one_buffer_that_its_root_has_filled() {
    let mut toy = toy(false);
    let (from, to) = (region(&[5, 6]), region(&[0, 0]));
    run(&mut toy, Collective::Broadcast, (&blocks(&[&[from]]), &blocks(&[&[to]])), None);
    assert_eq!(bytes(to), [5, 6]);
}

/// Whether blocks of two, none or three bytes arrive: the buffer is `bytes` long, and blocks begin at these places; in memory of ours where
/// `is_ours`.
fn gathers_apart(toy: Toy, places: [usize; 2], is_in_place: bool, is_joined: bool) {
    let mut providers = of(toy, MostBytes::of(|kind| if kind.uneven { 5 } else { 0 }));
    let (whole, own) = (region(&[9; 16]), region(&[1, 2]));
    let blocks_there = [whole.part(places[0], 2), whole.part(places[1], 3)];
    let mine = if is_in_place { blocks_there[0] } else { own };
    mine.write(&[1, 2]);
    let (src, dst) = (blocks(&[&[mine]]), blocks(&[&blocks_there[..1], &blocks_there[1..]]));
    let buffers = if is_joined { [Region::EMPTY; 2] } else { [mine, whole] };
    let by = Provision { uneven: Some(buffers), ..by("toy") };
    let call = NodeCall {
        collective: Collective::AllGather,
        root: 0,
        src: &src,
        dst: &dst,
        combine: None,
        operation_bytes: 0,
    };
    run_as(&mut providers, by, call);
    let mut wanted = [9; 16];
    wanted[places[0]..places[0] + 2].copy_from_slice(&[1, 2]);
    wanted[places[1]..places[1] + 3].copy_from_slice(&[100, 101, 102]);
    assert_eq!(bytes(whole), wanted, "{places:?} {is_in_place} {is_joined}");
}

#[test]
fn blocks_of_different_sizes_lie_where_they_are_or_go_through_our_memory_and_nothing_between_is_touched() {
    for places in [[0, 2], [3, 8], [8, 1]] {
        for is_in_place in [false, true] {
            for is_joined in [false, true] {
                gathers_apart(Toy::default(), places, is_in_place, is_joined);
                gathers_apart(Toy { in_order: true, ..Toy::default() }, places, is_in_place, is_joined);
                gathers_apart(Toy { apart: true, ..Toy::default() }, places, is_in_place, is_joined);
            }
        }
    }
}

#[test]
fn a_buffer_with_blocks_of_different_sizes_is_told_as_lists_and_too_much_of_it_is_an_error() {
    let (whole, result) = (region(&[5, 6, 7, 8, 9]), region(&[0, 0]));
    // None, and two before the one that goes to rank 0.
    let (src, dst) = (blocks(&[&[whole.part(3, 2)], &[], &[whole.part(0, 1)]]), blocks(&[&[result]]));
    let with = |in_order: bool, most: u64| {
        let mut providers = of(Toy { in_order, ..Toy::default() }, MostBytes::of(|_| most));
        let by = Provision { uneven: Some([whole, result]), ..by("toy") };
        let (collective, combine) = (Collective::ReduceScatter, sum(1));
        let call = NodeCall { collective, root: 0, src: &src, dst: &dst, combine, operation_bytes: 0 };
        providers.start(9, by, call).map(|_| providers)
    };
    for (in_order, places) in [(false, [3, 0, 0]), (true, [0, 2, 2])] {
        let mut providers = with(in_order, 3).unwrap();
        (0..2).for_each(|_| providers.poll(&mut Vec::new()).unwrap());
        assert_eq!(bytes(result), [8, 9]);
        let lists = blocks_of(&src, in_order, whole);
        assert_eq!((lists.counts, lists.places), (vec![2, 0, 1], places.to_vec()));
    }
    let refused = with(false, 2).unwrap_err();
    let wanted = "provider toy: reduce_scatter of blocks of different sizes: rank 0 has 3 bytes, and 2 are the most that it takes";
    assert_eq!(refused.text(), wanted);
}

fn blocks_of(blocks: &Blocks, in_order: bool, buffer: Region) -> BlockList {
    ProviderBuffer::of_blocks(blocks, (buffer, 1), (!in_order).then_some(1000)).unwrap().1
}

#[test]
fn an_error_names_the_provider_and_after_a_cancel_nothing_is_under_way() {
    let (data, result) = (region(&[1]), region(&[0]));
    let (src, dst) = (blocks(&[&[data]]), blocks(&[&[result]]));
    let call = NodeCall {
        collective: Collective::AllReduce,
        root: 0,
        src: &src,
        dst: &dst,
        combine: sum(1),
        operation_bytes: 0,
    };
    let refused = toy(true).start(1, by("toy"), call).unwrap_err();
    assert_eq!(refused.text(), "provider toy: start of it returned 7: no");
    let unknown = toy(false).start(1, by("other"), call).unwrap_err();
    assert!(unknown.text().starts_with("provider other is not open"), "{unknown}");
    let mut toy = toy(false);
    toy.start(1, by("toy"), call).unwrap();
    toy.cancel();
    let mut done = Vec::new();
    toy.poll(&mut done).unwrap();
    assert!(done.is_empty() && !toy.must_be_polled());
}

#[test]
fn the_setting_names_mpi_and_paths_and_what_is_wrong_is_told() {
    let names = |text: &str| {
        let wanted = wanted(text)?;
        Ok(wanted.into_iter().map(|wanted| (wanted.what, wanted.required)).collect::<Vec<_>>())
    };
    let named = |what: &str, required| (what.to_string(), required);
    assert_eq!(names("none"), Ok(Vec::new()));
    assert_eq!(names("mpi, /a/libb.so!"), Ok(vec![named("mpi", false), named("/a/libb.so", true)]));
    for (text, what) in [
        ("mpj", "mpj is neither mpi nor the path of a plugin"),
        ("mpi,,/a.so", "a name is empty"),
        ("mpi,mpi!", "mpi is named twice"),
        ("/1,/2,/3,/4,/5,/6,/7,/8,/9", "there may be 8"),
    ] {
        let told: std::result::Result<Vec<(String, bool)>, String> = names(text);
        let told = told.unwrap_err();
        assert!(told.starts_with(&format!("STRATA_PROVIDERS={text}: ")) && told.contains(what), "{told}");
    }
}
