//! Thread blocks: which does what, and what it waits for.
#![forbid(unsafe_code)]

use super::dag::{Dag, Dep, Instruction};
use super::expand::Expanded;
use super::order::{order, Preference};
use super::schedule::{chains, channels, sends_within, Channels, NoChannels};
use super::{BadTrace, Trace};
use crate::script::{xml, Place, RankScript, Script, ScriptBuffer, ScriptStep, ScriptStepKind, ThreadBlock};
use rustc_hash::{FxHashMap, FxHashSet};

/// How often instructions are fused and ordered anew, before none are fused.
const MOST_ATTEMPTS: usize = 32;
/// Instructions that one search for a redundant dependency looks at.
const MOST_SEARCHED: usize = 2048;

/// The script of transfers.
pub(super) fn compile(trace: &Trace, expanded: &Expanded) -> Result<Script, BadTrace> {
    let (dag, channels, order) = scheduled(trace, expanded)?;
    let mut writer = Writer::new(trace, &dag, &channels);
    for &at in &order {
        writer.place(at)?;
    }
    let blocks = writer.finish()?;
    let ranks = blocks.into_iter().zip(&expanded.scratch);
    Ok(Script {
        name: trace.name.clone(),
        collective: trace.collective,
        chunks: trace.chunks * trace.blocks() * expanded.factor,
        protocol: trace.protocol.clone(),
        in_place: trace.in_place,
        serves_out_of_place: true,
        bytes: 0..=u64::MAX,
        contract: expanded.contract.clone(),
        ranks: ranks.map(|(blocks, &scratch)| RankScript { scratch, blocks }).collect(),
    })
}

/// The instructions, their channels, and an order of them.
fn scheduled(trace: &Trace, expanded: &Expanded) -> Result<(Dag, Channels, Vec<u32>), BadTrace> {
    let (mut forbidden, mut apart) = (FxHashSet::default(), FxHashSet::default());
    let all_sends = |dag: &Dag| -> FxHashSet<u32> {
        let sends = |at: &u32| dag.instructions[*at as usize].sends.is_some();
        (0..dag.instructions.len() as u32).filter(sends).collect()
    };
    for attempt in 0..=MOST_ATTEMPTS {
        let mut dag = Dag::new(trace, expanded);
        // The trace's own order never comes to a halt where nothing is fused.
        let is_last = attempt == MOST_ATTEMPTS;
        if is_last {
            forbidden = all_sends(&dag);
            apart.clear();
        }
        dag.fuse(&forbidden);
        let channels = match channels(trace, &dag, &apart) {
            Ok(channels) => channels,
            Err(NoChannels::Bad(bad)) => return Err(bad),
            Err(NoChannels::Fused(sends)) => {
                forbidden.extend(sends);
                continue;
            }
        };
        let preference = if is_last { Preference::Trace } else { Preference::Depth };
        match order(&dag, &channels.connections, preference) {
            Ok(order) => return Ok((dag, channels, order)),
            Err(stuck) => {
                let stuck: FxHashSet<u32> = stuck.into_iter().collect();
                // Another channel, where the trace names none; else they are not fused; else nothing is.
                let mut helps = false;
                for chain in chains(&dag) {
                    if !chain.iter().any(|message| stuck.contains(message)) {
                        continue;
                    }
                    let of = |message: &u32| &dag.messages[*message as usize];
                    let named = chain.iter().any(|message| {
                        dag.instructions[of(message).sender as usize].channel.is_some()
                            || dag.instructions[of(message).receiver as usize].channel.is_some()
                    });
                    let is_new = !apart.contains(&chain[0]);
                    if !named && is_new {
                        apart.extend(chain.iter().copied());
                        helps = true;
                    } else {
                        let before = forbidden.len();
                        forbidden.extend(sends_within(&dag, &chain));
                        helps |= forbidden.len() > before;
                    }
                }
                if !helps {
                    forbidden = all_sends(&dag);
                    let unfused = Dag::new(trace, expanded);
                    let mut dag = unfused;
                    dag.fuse(&forbidden);
                    let Ok(channels) = self::channels(trace, &dag, &FxHashSet::default()) else { continue };
                    if let Ok(order) = order(&dag, &channels.connections, Preference::Trace) {
                        return Ok((dag, channels, order));
                    }
                }
            }
        }
    }
    Err(BadTrace::new("the steps of the trace cannot be ordered"))
}

/// Which thread block of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// The one with these ends: lane, channel, receives from, sends to.
    Ends(u32, u16, Option<u32>, Option<u32>),
    /// The one that the trace calls so: lane, label.
    Label(u32, u32),
    /// One without ends.
    Local(u32),
}

/// Where an instruction has come to: its thread block, its number there, its place in the order of all.
#[derive(Debug, Clone, Copy)]
struct Placed {
    block: u32,
    number: u32,
    when: u32,
    /// What comes before it in its thread block.
    before: Option<u32>,
}

struct Block {
    lane: u32,
    script: ThreadBlock,
    channel: Option<u16>,
    last: Option<u32>,
}

struct Writer<'a> {
    trace: &'a Trace,
    dag: &'a Dag,
    channels: &'a Channels,
    ranks: Vec<Vec<Block>>,
    keys: FxHashMap<(u32, Key), u32>,
    placed: Vec<Option<Placed>>,
    /// What each instruction waits for in other thread blocks.
    kept: Vec<Vec<u32>>,
    when: u32,
    seen: FxHashSet<u32>,
    nsteps: usize,
}

impl<'a> Writer<'a> {
    fn new(trace: &'a Trace, dag: &'a Dag, channels: &'a Channels) -> Writer<'a> {
        let count = dag.instructions.len();
        Writer {
            trace,
            dag,
            channels,
            ranks: (0..trace.nranks).map(|_| Vec::new()).collect(),
            keys: FxHashMap::default(),
            placed: vec![None; count],
            kept: vec![Vec::new(); count],
            when: 0,
            seen: FxHashSet::default(),
            nsteps: 0,
        }
    }

    /// Puts an instruction at the end of its thread block.
    fn place(&mut self, at: u32) -> Result<(), BadTrace> {
        let instruction = &self.dag.instructions[at as usize];
        let rank = instruction.rank as usize;
        let key = match self.key(instruction) {
            Some(key) => key,
            None => self.local(instruction),
        };
        let block = self.block(instruction.rank, key)?;
        let before = self.ranks[rank][block as usize].last;
        let deps = self.needed(at, block, before);
        let number_of = |dep: &u32| self.placed[*dep as usize].map(|placed| (placed.block, placed.number));
        let mut named: Vec<(u32, u32)> = deps.iter().filter_map(number_of).collect();
        named.sort_unstable();
        let last = named.pop();
        let nowhere = Place { buffer: ScriptBuffer::Scratch, chunk: 0 };
        let line = instruction.step + 1;
        let of_block = &mut self.ranks[rank][block as usize];
        for dep in named {
            let (kind, dep) = (ScriptStepKind::Nop, Some(dep));
            of_block.script.steps.push(ScriptStep { kind, src: nowhere, dst: nowhere, count: 0, dep, line });
        }
        let number = of_block.script.steps.len() as u32;
        let Instruction { kind, src, dst, count, .. } = *instruction;
        of_block.script.steps.push(ScriptStep { kind, src, dst, count, dep: last, line });
        of_block.last = Some(at);
        for (message, is_sent) in [(instruction.sends, true), (instruction.receives, false)] {
            let Some(message) = message else { continue };
            let (from, to, _, channel) = self.channels.connections[message as usize];
            of_block.channel = Some(channel);
            *(if is_sent { &mut of_block.script.to } else { &mut of_block.script.from }) =
                Some(if is_sent { to } else { from });
        }
        self.when += 1;
        self.placed[at as usize] = Some(Placed { block, number, when: self.when, before });
        self.kept[at as usize] = deps;
        self.nsteps += 1;
        Ok(())
    }

    /// The thread block that an instruction belongs to, if there is but one.
    fn key(&self, instruction: &Instruction) -> Option<Key> {
        let Instruction { lane, label, sends, receives, rank, .. } = *instruction;
        if let Some(label) = label {
            return Some(Key::Label(lane, label));
        }
        let connection = |message: u32| self.channels.connections[message as usize];
        match (receives.map(connection), sends.map(connection)) {
            (Some((from, _, _, channel)), Some((_, to, _, _))) => Some(Key::Ends(lane, channel, Some(from), Some(to))),
            (Some((from, _, _, channel)), None) => {
                let goes = self.channels.goes_to.get(&(rank, from, lane, channel)).copied();
                Some(Key::Ends(lane, channel, Some(from), goes))
            }
            (None, Some((_, to, _, channel))) => {
                let comes = self.channels.comes_from.get(&(rank, to, lane, channel)).copied();
                Some(Key::Ends(lane, channel, comes, Some(to)))
            }
            (None, None) => None,
        }
    }

    /// The thread block for work within a rank: of the same lane that in which it waits least for others, and of those the
    /// one whose work so far ends first.
    fn local(&self, instruction: &Instruction) -> Key {
        let blocks = &self.ranks[instruction.rank as usize];
        let waits = |block: u32| {
            let of = |dep: &Dep| self.placed[dep.before as usize].map(|placed| placed.block);
            instruction.deps.iter().filter_map(of).filter(|&other| other != block).count()
        };
        let when = |block: &Block| block.last.and_then(|last| self.placed[last as usize]).map(|placed| placed.when);
        let candidates = (0u32..).zip(blocks).filter(|(_, block)| block.lane == instruction.lane);
        let best = candidates.min_by_key(|(number, block)| (waits(*number), when(block)));
        let found = best.and_then(|(number, _)| {
            let is_it = |(rank, _): &(u32, Key), block: &u32| *rank == instruction.rank && *block == number;
            self.keys.iter().find(|((rank, key), block)| is_it(&(*rank, *key), block)).map(|((_, key), _)| *key)
        });
        found.unwrap_or(Key::Local(instruction.lane))
    }

    fn block(&mut self, rank: u32, key: Key) -> Result<u32, BadTrace> {
        let blocks = &mut self.ranks[rank as usize];
        let next = blocks.len() as u32;
        let block = *self.keys.entry((rank, key)).or_insert(next);
        if block == next {
            if blocks.len() == xml::MAX_BLOCKS {
                return Err(BadTrace::new(format!("rank {rank} needs more than {} thread blocks", xml::MAX_BLOCKS)));
            }
            let (Key::Ends(lane, ..) | Key::Label(lane, _) | Key::Local(lane)) = key;
            blocks.push(Block { lane, script: ThreadBlock::default(), channel: None, last: None });
        }
        Ok(block)
    }

    /// What an instruction has to wait for in other thread blocks: of each the last, and nothing that has happened anyway.
    fn needed(&mut self, at: u32, block: u32, before: Option<u32>) -> Vec<u32> {
        let instruction = &self.dag.instructions[at as usize];
        let mut last: FxHashMap<u32, (u32, Dep)> = FxHashMap::default();
        for dep in &instruction.deps {
            let Some(placed) = self.placed[dep.before as usize].filter(|placed| placed.block != block) else {
                continue;
            };
            let entry = last.entry(placed.block).or_insert((placed.when, *dep));
            // What has the latest covers the earlier, but for chunks of lower positions.
            *entry = match placed.when > entry.0 {
                true => (placed.when, dep.with(entry.1)),
                false => (entry.0, entry.1.with(*dep)),
            };
        }
        let mut deps: Vec<(u32, Dep)> = last.into_values().collect();
        deps.sort_unstable_by_key(|(when, _)| std::cmp::Reverse(*when));
        let mut kept = Vec::new();
        for (_, dep) in deps {
            if !self.has_happened(dep, (at, before), &kept) {
                kept.push(dep.before);
            }
        }
        kept
    }

    /// Whether an instruction has ended before another begins, by what that waits for anyway.
    fn has_happened(&mut self, dep: Dep, (at, before): (u32, Option<u32>), kept: &[u32]) -> bool {
        let Dep { before: wanted, position, is_read } = dep;
        let Some(goal) = self.placed[wanted as usize] else { return false };
        let rank = self.dag.instructions[wanted as usize].rank;
        let sender = |at: u32| {
            let message = &self.dag.messages[self.dag.instructions[at as usize].receives? as usize];
            (message.position <= position).then_some(message.sender)
        };
        self.seen.clear();
        let mut open: Vec<u32> = before.into_iter().chain(kept.iter().copied()).collect();
        open.extend(sender(at).filter(|_| !is_read));
        while let Some(at) = open.pop() {
            let Some(placed) = self.placed[at as usize].filter(|placed| placed.when >= goal.when) else { continue };
            if self.dag.instructions[at as usize].rank == rank && placed.block == goal.block {
                return true;
            }
            if self.seen.len() == MOST_SEARCHED || !self.seen.insert(at) {
                continue;
            }
            open.extend(placed.before);
            open.extend(&self.kept[at as usize]);
            open.extend(sender(at));
        }
        false
    }

    fn finish(self) -> Result<Vec<Vec<ThreadBlock>>, BadTrace> {
        let all = || self.ranks.iter().flatten();
        let of_lane = all().filter_map(|block| block.channel).max().map_or(0, |most| u32::from(most) + 1);
        let most = all().map(|block| block.lane * of_lane + u32::from(block.channel.unwrap_or(0))).max();
        if let Some(most) = most.filter(|&most| most >= u32::from(xml::MAX_CHANNELS)) {
            return Err(BadTrace::new(format!(
                "instances need {} channels, more than {}",
                most + 1,
                xml::MAX_CHANNELS
            )));
        }
        let nsteps: usize = all().map(|block| block.script.steps.len()).sum();
        if nsteps > xml::MAX_STEPS {
            return Err(BadTrace::new(format!(
                "{} makes {nsteps} steps, more than {}",
                self.trace.name,
                xml::MAX_STEPS
            )));
        }
        let script = |block: Block| {
            let channel = block.lane * of_lane + u32::from(block.channel.unwrap_or(0));
            ThreadBlock { channel: channel as u16, ..block.script }
        };
        Ok(self.ranks.into_iter().map(|blocks| blocks.into_iter().map(script).collect()).collect())
    }
}
