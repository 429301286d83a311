//! Machines with random NUMA nodes, switches and noise: the inference finds them, or says that it does not know.

use super::compare::{compare, PlaceFact, PlacedDevice};
use super::infer::{infer, pairs, Inferred, APART, SHARES};
use super::{measure, Load, Measuring, ProbeFigures, ProbeMeasured, ProbedGpu, ProbedNic, Series, Subjects, NOISE};
use crate::topo::distance::PciPath;
use proptest::prelude::*;
use std::path::Path;

/// A machine whose places are known, and whose figures follow from them, with noise.
#[derive(Debug, Clone)]
struct Made {
    nodes: usize,
    /// The node of each NIC.
    node_of: Vec<usize>,
    /// The switch of each GPU.
    switch_of: Vec<usize>,
    /// The NIC of each GPU.
    nic_of: Vec<usize>,
    /// Microseconds from the near node, and how much more each step to a farther one takes.
    trip: (f64, f64),
    /// What a copy keeps beside one of the same switch, and of another one.
    kept: (f64, f64),
    /// What a copy keeps beside traffic of its own NIC, and of others.
    beside_nic: (f64, f64),
    noise: f64,
    random: u64,
}

impl Made {
    /// A number in 0..1.
    fn roll(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Samples of a value, each off by as much as the noise, mostly all to one side.
    fn samples(&mut self, value: f64) -> ProbeMeasured {
        let side = if self.roll() < 0.5 { -1.0 } else { 1.0 };
        let samples = (0..5).map(|_| value * (1.0 + self.noise * side * (1.2 * self.roll()).min(1.0))).collect();
        Series::new(samples).ok_or("no samples".to_string())
    }

    fn subjects(&self) -> Subjects {
        let nic = |index| ProbedNic { name: format!("eth{index}"), place: None };
        let gpu = |index| ProbedGpu { name: format!("gpu{index}"), place: None };
        Subjects {
            nics: (0..self.node_of.len()).map(nic).collect(),
            gpus: (0..self.switch_of.len()).map(gpu).collect(),
        }
    }

    fn inferred(&mut self) -> (ProbeFigures, Inferred) {
        let subjects = self.subjects();
        let figures = measure(&subjects, self);
        let inferred = infer(&subjects, &figures);
        (figures, inferred)
    }

    /// Answers that are wrong.
    fn wrong(&self, inferred: &Inferred) -> Vec<String> {
        let mut wrong = Vec::new();
        for (nic, verdict) in inferred.nodes.iter().enumerate() {
            if verdict.answer.is_some_and(|node| node as usize != self.node_of[nic]) {
                wrong.push(format!("NIC {nic}: {verdict:?}"));
            }
        }
        for (gpu, verdict) in inferred.switches.iter().enumerate() {
            for (other, answer) in verdict.answer.iter().flatten().enumerate() {
                if answer.is_some_and(|shared| shared != (self.switch_of[gpu] == self.switch_of[other])) {
                    wrong.push(format!("GPUs {gpu} and {other}: {verdict:?}"));
                }
            }
        }
        for (gpu, verdict) in inferred.nics.iter().enumerate() {
            if verdict.answer.is_some_and(|nic| nic != self.nic_of[gpu]) {
                wrong.push(format!("the NIC of GPU {gpu}: {verdict:?}"));
            }
        }
        wrong
    }

    /// How many answers are missing.
    fn unknown(inferred: &Inferred) -> usize {
        let of_pairs = |row: &Option<Vec<Option<bool>>>| row.iter().flatten().filter(|pair| pair.is_none()).count();
        inferred.nodes.iter().filter(|verdict| verdict.answer.is_none()).count()
            + inferred.switches.iter().map(|verdict| of_pairs(&verdict.answer)).sum::<usize>()
            + inferred.nics.iter().filter(|verdict| verdict.answer.is_none()).count()
    }
}

impl Measuring for Made {
    fn nodes(&self) -> Vec<u32> {
        (0..self.nodes as u32).collect()
    }

    fn round_trip_us(&mut self, nic: usize, node: u32) -> ProbeMeasured {
        let away = (node as usize).abs_diff(self.node_of[nic]) as f64;
        self.samples(self.trip.0 * (1.0 + self.trip.1 * away))
    }

    fn copy_mbs(&mut self, gpu: usize, load: Load) -> ProbeMeasured {
        let kept = match load {
            Load::Nothing => 1.0,
            Load::Copies(other) if self.switch_of[gpu] == self.switch_of[other] => self.kept.0,
            Load::Copies(_) => self.kept.1,
            Load::Loopback(nic) if nic == self.nic_of[gpu] => self.beside_nic.0,
            Load::Loopback(_) => self.beside_nic.1,
        };
        self.samples(24_000.0 * kept)
    }
}

/// Machines whose differences are at least so much, in units of their range, and whose noise is at most that.
fn machines(clear: f64, noise: f64) -> impl Strategy<Value = Made> {
    let sizes = (1usize..=4, 1usize..=4, 0usize..=6, 1usize..=4);
    sizes.prop_flat_map(move |(nodes, nics, gpus, switches)| {
        let places = (
            prop::collection::vec(0..nodes, nics),
            prop::collection::vec(0..switches, gpus),
            prop::collection::vec(0..nics, gpus),
        );
        let unit = clear..=1.0f64;
        let rates = (unit.clone(), unit.clone(), unit.clone(), unit, 10.0..60.0f64, 0.0..=noise, any::<u64>());
        (places, rates).prop_map(move |((node_of, switch_of, nic_of), (step, own, other, nic, us, noise, random))| {
            Made {
                nodes,
                node_of,
                switch_of,
                nic_of,
                trip: (us, 0.5 * step),
                kept: (SHARES - 0.4 * own, APART + (1.0 - APART) * other),
                beside_nic: (1.0 - 0.6 * nic, 1.0 - 0.2 * nic),
                noise,
                random,
            }
        })
    })
}

proptest! {
    #[test]
    fn no_answer_is_wrong_within_the_noise(mut made in machines(0.0, NOISE)) {
        let (_, inferred) = made.inferred();
        prop_assert_eq!(made.wrong(&inferred), Vec::<String>::new());
    }

    #[test]
    fn what_differs_clearly_is_found(mut made in machines(0.7, 0.01)) {
        let (_, inferred) = made.inferred();
        prop_assert_eq!(made.wrong(&inferred), Vec::<String>::new());
        prop_assert_eq!(Made::unknown(&inferred), 0, "{:?}", inferred);
    }

    #[test]
    fn sharing_a_switch_is_symmetric_and_transitive_whatever_was_measured(
        rates in prop::collection::vec(prop::collection::vec(prop::option::of(0.2..1.2f64), 5), 5)
    ) {
        let rate = |kept: Option<f64>| kept.and_then(|kept| Series::new(vec![kept])).ok_or("not measured".to_string());
        let copies = rates.iter().enumerate().map(|(gpu, row)| super::CopyFigures {
            alone: rate(Some(1.0)),
            beside: row.iter().enumerate().map(|(other, kept)| (other != gpu).then(|| rate(*kept))).collect(),
            loopback: Vec::new(),
        });
        let pairs = pairs(&ProbeFigures { nodes: Vec::new(), round_trips: Vec::new(), copies: copies.collect() });
        for a in 0..5 {
            for b in 0..5 {
                prop_assert_eq!(pairs[a][b], pairs[b][a]);
                for c in 0..5 {
                    if pairs[a][b] == Some(true) && pairs[b][c].is_some() {
                        prop_assert_eq!(pairs[a][c], pairs[b][c], "{} {} {}: {:?}", a, b, c, pairs);
                    }
                }
            }
        }
    }
}

fn clear() -> Made {
    Made {
        nodes: 2,
        node_of: vec![0, 1],
        switch_of: vec![0, 0, 1],
        nic_of: vec![0, 0, 1],
        trip: (20.0, 0.4),
        kept: (0.5, 1.0),
        beside_nic: (0.6, 1.0),
        noise: 0.0,
        random: 1,
    }
}

fn fact<'a>(devices: &'a [PlacedDevice], name: &str, what: &str) -> &'a PlaceFact {
    let device = devices.iter().find(|device| device.name == name).unwrap();
    device.facts.iter().find(|fact| fact.what == what).unwrap()
}

fn place(below_devices: &str, numa: Option<u32>) -> Option<PciPath> {
    PciPath::of(&Path::new("/sys/devices").join(below_devices), numa)
}

#[test]
fn the_probe_fills_what_sysfs_does_not_say_and_tells_its_figures() {
    let mut made = clear();
    let subjects = made.subjects();
    let (_, inferred) = made.inferred();
    let devices = compare(&subjects, &inferred);
    let node = fact(&devices, "NIC eth1", "NUMA node");
    assert_eq!((node.sysfs.as_str(), node.probe.as_str(), node.taken.as_str()), ("-", "1", "1"));
    assert_eq!(node.figures, "28.0 us from node 0, 20.0 us from node 1");
    let switch = fact(&devices, "GPU gpu0", "behind one switch with");
    assert_eq!((switch.sysfs.as_str(), switch.taken.as_str()), ("-", "gpu1"));
    assert_eq!(switch.figures, "24000 MB/s alone, 12000 beside gpu1, 24000 beside gpu2");
    assert_eq!(fact(&devices, "GPU gpu2", "behind one switch with").taken, "no other GPU");
    let nic = fact(&devices, "GPU gpu2", "nearest NIC");
    assert_eq!((nic.sysfs.as_str(), nic.probe.as_str(), nic.taken.as_str()), ("-", "eth1", "eth1"));
    assert_eq!(nic.figures, "24000 MB/s alone, 24000 beside traffic of eth0, 14400 beside traffic of eth1");
    assert_eq!(devices.iter().map(|device| device.nic).collect::<Vec<_>>(), [None, None, Some(0), Some(0), Some(1)]);
    assert!(devices.iter().flat_map(|device| &device.facts).all(|fact| fact.contradiction.is_none()));
}

#[test]
fn sysfs_comes_first_and_contradictions_are_told_in_words() {
    let mut made = clear();
    let mut subjects = made.subjects();
    subjects.nics[0].place = place("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0", Some(1));
    subjects.nics[1].place = place("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", Some(1));
    subjects.gpus[0].place = place("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0", Some(0));
    subjects.gpus[1].place = place("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9b:00.0", Some(1));
    subjects.gpus[2].place = place("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:02.0/0000:9c:00.0", Some(1));
    let (_, inferred) = made.inferred();
    let devices = compare(&subjects, &inferred);
    let node = fact(&devices, "NIC eth0", "NUMA node");
    assert_eq!(node.taken, "1");
    assert_eq!(
        node.contradiction.as_deref(),
        Some("sysfs says NUMA node 1, but round trips are shortest from node 0; sysfs is taken")
    );
    assert_eq!(fact(&devices, "NIC eth1", "NUMA node").contradiction, None);
    let switch = fact(&devices, "GPU gpu1", "behind one switch with");
    assert_eq!((switch.sysfs.as_str(), switch.probe.as_str(), switch.taken.as_str()), ("gpu2", "gpu0", "gpu2"));
    assert_eq!(
        switch.contradiction.as_deref(),
        Some(
            "sysfs has gpu0 behind another switch, but the two slow each other; sysfs has gpu2 behind its switch, but \
             the two do not slow each other; sysfs is taken"
        )
    );
    let nic = fact(&devices, "GPU gpu0", "nearest NIC");
    assert_eq!(nic.taken, "eth1");
    assert_eq!(
        nic.contradiction.as_deref(),
        Some("sysfs says eth1 (PIX), but traffic of eth0 slows its copies most; sysfs is taken")
    );
    assert_eq!(fact(&devices, "GPU gpu1", "nearest NIC").contradiction, None);
}

#[test]
fn devices_on_the_root_bus_are_no_word_of_sysfs() {
    let mut made = clear();
    let mut subjects = made.subjects();
    for (index, gpu) in subjects.gpus.iter_mut().enumerate() {
        gpu.place = place(&format!("pci0000:00/0000:00:0{}.0", index + 4), None);
    }
    subjects.nics[0].place = place("pci0000:00/0000:00:03.0/virtio2/net/eth0", None);
    let (_, inferred) = made.inferred();
    let devices = compare(&subjects, &inferred);
    for what in ["behind one switch with", "nearest NIC"] {
        assert_eq!(fact(&devices, "GPU gpu1", what).sysfs, "-");
    }
    assert_eq!(fact(&devices, "GPU gpu1", "behind one switch with").taken, "gpu0");
    assert_eq!(fact(&devices, "NIC eth0", "NUMA node").sysfs, "-");
}

#[test]
fn what_was_not_measured_is_unknown_and_the_reason_is_told() {
    let made = clear();
    let subjects = made.subjects();
    struct Nothing;
    impl Measuring for Nothing {
        fn nodes(&self) -> Vec<u32> {
            vec![0, 1]
        }
        fn round_trip_us(&mut self, _: usize, _: u32) -> ProbeMeasured {
            Err("loopback does not pass it".to_string())
        }
        fn copy_mbs(&mut self, _: usize, load: Load) -> ProbeMeasured {
            assert_eq!(load, Load::Nothing, "what cannot copy alone is not measured further");
            Err("no driver".to_string())
        }
    }
    let figures = measure(&subjects, &mut Nothing);
    let devices = compare(&subjects, &infer(&subjects, &figures));
    for fact in devices.iter().flat_map(|device| &device.facts) {
        assert_eq!((fact.taken.as_str(), fact.probe.as_str()), ("unknown", "unknown"));
    }
    assert_eq!(fact(&devices, "NIC eth0", "NUMA node").figures, "loopback does not pass it");
    assert_eq!(fact(&devices, "GPU gpu0", "behind one switch with").figures, "no driver");
}

#[test]
fn a_limit_of_all_gpus_is_told_and_equal_nodes_are_not_told_apart() {
    let mut made = Made { switch_of: vec![0, 0, 0], trip: (20.0, 0.02), ..clear() };
    let (_, inferred) = made.inferred();
    assert!(inferred.switches[0].why.ends_with("; or all share another limit, such as the host's memory"));
    assert_eq!(inferred.nodes[0].answer, None);
    assert_eq!(
        inferred.nodes[0].why,
        "20.0 us from node 0, 20.4 us from node 1: not apart by more than the noise, 5.0 %"
    );
    let mut one = Made { nodes: 1, node_of: vec![0, 0], ..clear() };
    let (_, inferred) = one.inferred();
    assert_eq!(inferred.nodes[0].answer, Some(0));
    assert_eq!(inferred.nodes[0].why, "the machine shows one node; 20.0 us from node 0");
}

#[test]
fn samples_that_do_not_agree_are_noise() {
    let series = |samples: &[f64]| Series::new(samples.to_vec());
    assert_eq!(series(&[]), None);
    assert_eq!(series(&[1.0, 0.0]), None);
    assert_eq!(series(&[1.0, f64::NAN]), None);
    assert_eq!(series(&[10.0, 10.1, 9.9]).unwrap().noise(), NOISE);
    let loud = series(&[30.0, 10.0, 20.0, 10.0, 30.0]).unwrap();
    assert_eq!((loud.median(), loud.noise()), (20.0, 0.5));
    let one_late = series(&[10.0, 10.0, 10.0, 10.0, 90.0]).unwrap();
    assert_eq!(one_late.noise(), NOISE, "a sample that was interrupted is passed over");
}
