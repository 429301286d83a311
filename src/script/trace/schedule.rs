//! Which channel each message takes.
//!
//! A thread block sends to one rank and receives from one, on one channel, and has its connections to itself. Messages that are
//! fused make a chain, which keeps its channel all the way, and in each rank on its way joins a connection that comes in with
//! one that goes out. On one channel each is joined with one other at most; where it would be two, chains take another channel.
#![forbid(unsafe_code)]

use super::dag::{Dag, Instruction};
use super::order::TraceLink;
use super::{BadTrace, Trace};
use crate::script::xml;
use rustc_hash::{FxHashMap, FxHashSet};

/// Why channels could not be given.
pub(super) enum NoChannels {
    /// These sends must not be fused.
    Fused(Vec<u32>),
    /// The trace contradicts itself.
    Bad(BadTrace),
}

/// A thread block that the trace names, by lane, rank and label.
pub(super) type Label = (u32, u32, u32);

/// What a thread block that the trace names is connected to.
#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    channel: Option<u16>,
    to: Option<u32>,
    from: Option<u32>,
}

/// An end of a connection: rank, peer, lane and channel.
type End = (u32, u32, u32, u16);

/// By rank and peer, the peer at the other end of a thread block.
type Joints = FxHashMap<(u32, u32), u32>;

/// The channels of all messages.
#[derive(Debug, Default)]
pub(super) struct Channels {
    /// By message.
    pub connections: Vec<TraceLink>,
    /// What the thread block that receives at an end sends to.
    pub goes_to: FxHashMap<End, u32>,
    /// What the thread block that sends at an end receives from.
    pub comes_from: FxHashMap<End, u32>,
    senders: FxHashMap<End, Option<u32>>,
    receivers: FxHashMap<End, Option<u32>>,
    labels: FxHashMap<Label, Ends>,
}

/// Messages one after another, each fused with the next.
pub(super) fn chains(dag: &Dag) -> Vec<Vec<u32>> {
    let begins = |message: &u32| dag.instructions[dag.messages[*message as usize].sender as usize].receives.is_none();
    let follow = |first: u32| {
        let mut chain = vec![first];
        let mut at = first;
        while let Some(next) = dag.instructions[dag.messages[at as usize].receiver as usize].sends {
            chain.push(next);
            at = next;
        }
        chain
    };
    (0..dag.messages.len() as u32).filter(begins).map(follow).collect()
}

/// Gives all messages channels. Chains with a message of `apart` share no connection with others that have none in it.
pub(super) fn channels(trace: &Trace, dag: &Dag, apart: &FxHashSet<u32>) -> Result<Channels, NoChannels> {
    let mut channels = Channels { connections: vec![(0, 0, 0, 0); dag.messages.len()], ..Channels::default() };
    let chains = chains(dag);
    let wanted = |chain: &[u32]| {
        let of = |instruction: u32| dag.instructions[instruction as usize].channel;
        let messages = chain.iter().map(|&message| &dag.messages[message as usize]);
        messages.flat_map(|message| [of(message.sender), of(message.receiver)]).flatten().next()
    };
    let is_apart = |chain: &[u32]| chain.iter().any(|message| apart.contains(message));
    let mut fused = Vec::new();
    for chain in &chains {
        let Some(channel) = wanted(chain) else { continue };
        match channels.fits(dag, chain, channel) {
            Ok(()) => channels.take(dag, chain, channel),
            Err(Misfit { joint: Some(message), .. }) => fused.push(dag.original_sender(message)),
            Err(Misfit { text, .. }) if chain.len() == 1 => return Err(NoChannels::Bad(bad(trace, dag, chain, &text))),
            Err(_) => fused.extend(sends_within(dag, chain)),
        }
    }
    for last in [false, true] {
        for chain in chains.iter().filter(|chain| wanted(chain).is_none() && is_apart(chain) == last) {
            let is_free = |channel: u16| !last || channels.is_free(dag, chain, channel);
            let found = (0..xml::MAX_CHANNELS).find(|&c| is_free(c) && channels.fits(dag, chain, c).is_ok());
            // A chain that has no channel goes through a rank twice, and not the same way.
            match (found, channels.fits(dag, chain, xml::MAX_CHANNELS)) {
                (Some(channel), _) => channels.take(dag, chain, channel),
                (None, Err(Misfit { joint: Some(message), .. })) => fused.push(dag.original_sender(message)),
                (None, _) if chain.len() > 1 => fused.extend(sends_within(dag, chain)),
                (None, misfit) => {
                    let text = misfit.err().map_or_else(|| "no channel is left".to_string(), |misfit| misfit.text);
                    return Err(NoChannels::Bad(bad(trace, dag, chain, &text)));
                }
            }
        }
    }
    match fused.is_empty() {
        true => Ok(channels),
        false => Err(NoChannels::Fused(fused)),
    }
}

/// Why a chain cannot take a channel.
struct Misfit {
    text: String,
    /// The message whose sender would join a connection with a second one.
    joint: Option<u32>,
}

impl From<String> for Misfit {
    fn from(text: String) -> Misfit {
        Misfit { text, joint: None }
    }
}

/// The sends that have been fused within a chain, by what they were.
pub(super) fn sends_within<'a>(dag: &'a Dag, chain: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
    chain.iter().skip(1).map(|&message| dag.original_sender(message))
}

impl Dag {
    /// The instruction that sent a message before it was fused.
    fn original_sender(&self, message: u32) -> u32 {
        // Both ends of a message stand side by side.
        self.messages[message as usize].receiver - 1
    }
}

fn bad(trace: &Trace, dag: &Dag, chain: &[u32], text: &str) -> BadTrace {
    let step = dag.instructions[dag.messages[chain[0] as usize].receiver as usize].step as usize;
    BadTrace { step: Some(step), text: format!("{}: {text}", trace.title(step)) }
}

impl Channels {
    /// Whether a chain can take a channel; what is in the way.
    fn fits(&self, dag: &Dag, chain: &[u32], channel: u16) -> Result<(), Misfit> {
        // What the chain itself has taken counts, too.
        let mut ends: FxHashMap<Label, Ends> = FxHashMap::default();
        let (mut onward, mut back): (Joints, Joints) = Default::default();
        for &number in chain {
            let message = &dag.messages[number as usize];
            let sender = &dag.instructions[message.sender as usize];
            let receiver = &dag.instructions[message.receiver as usize];
            let (from, to) = (message.from, message.to);
            let sending = self.senders.get(&(from, to, sender.lane, channel));
            if sending.is_some_and(|label| *label != sender.label) {
                return Err(
                    format!("two thread blocks of rank {from} would send to rank {to} on channel {channel}").into()
                );
            }
            let receiving = self.receivers.get(&(to, from, receiver.lane, channel));
            if receiving.is_some_and(|label| *label != receiver.label) {
                return Err(format!(
                    "two thread blocks of rank {to} would receive from rank {from} on channel {channel}"
                )
                .into());
            }
            for (instruction, sends, peer) in [(sender, true, to), (receiver, false, from)] {
                let Some(label) = instruction.label else { continue };
                let key = (instruction.lane, instruction.rank, label);
                let known = ends.entry(key).or_insert_with(|| self.labels.get(&key).copied().unwrap_or_default());
                let end = if sends { &mut known.to } else { &mut known.from };
                let rank = instruction.rank;
                if *known.channel.get_or_insert(channel) != channel {
                    let other = known.channel.unwrap_or_default();
                    return Err(format!(
                        "thread block {label} of rank {rank} would have channels {other} and {channel}"
                    )
                    .into());
                }
                let first = *end.get_or_insert(peer);
                if first != peer {
                    let what = if sends { "send to" } else { "receive from" };
                    return Err(
                        format!("thread block {label} of rank {rank} would {what} ranks {first} and {peer}").into()
                    );
                }
            }
            if let (None, Some((came, goes))) = (sender.label, ways(dag, sender)) {
                let (rank, lane) = (sender.rank, sender.lane);
                let own = *onward.entry((rank, came)).or_insert(goes) == goes
                    && *back.entry((rank, goes)).or_insert(came) == came;
                let other = self.goes_to.get(&(rank, came, lane, channel)).is_some_and(|&known| known != goes);
                let another = self.comes_from.get(&(rank, goes, lane, channel)).is_some_and(|&known| known != came);
                if !own || other || another {
                    let text = format!("channel {channel} of rank {rank} is joined otherwise");
                    return Err(Misfit { text, joint: Some(number) });
                }
            }
        }
        Ok(())
    }

    /// Whether nothing uses the connections of a chain on a channel.
    fn is_free(&self, dag: &Dag, chain: &[u32], channel: u16) -> bool {
        chain.iter().all(|&message| {
            let message = &dag.messages[message as usize];
            let lane = dag.instructions[message.sender as usize].lane;
            !self.senders.contains_key(&(message.from, message.to, lane, channel))
        })
    }

    fn take(&mut self, dag: &Dag, chain: &[u32], channel: u16) {
        for &number in chain {
            let message = &dag.messages[number as usize];
            let sender = &dag.instructions[message.sender as usize];
            let receiver = &dag.instructions[message.receiver as usize];
            let (from, to, lane) = (message.from, message.to, sender.lane);
            self.connections[number as usize] = (from, to, lane, channel);
            self.senders.insert((from, to, lane, channel), sender.label);
            self.receivers.insert((to, from, lane, channel), receiver.label);
            for (instruction, sends, peer) in [(sender, true, to), (receiver, false, from)] {
                let Some(label) = instruction.label else { continue };
                let ends = self.labels.entry((lane, instruction.rank, label)).or_default();
                ends.channel = Some(channel);
                *(if sends { &mut ends.to } else { &mut ends.from }) = Some(peer);
            }
            if let (None, Some((came, goes))) = (sender.label, ways(dag, sender)) {
                self.goes_to.insert((sender.rank, came, lane, channel), goes);
                self.comes_from.insert((sender.rank, goes, lane, channel), came);
            }
        }
    }
}

/// Where a fused instruction receives from, and sends to.
fn ways(dag: &Dag, instruction: &Instruction) -> Option<(u32, u32)> {
    let (received, sent) = instruction.receives.zip(instruction.sends)?;
    Some((dag.messages[received as usize].from, dag.messages[sent as usize].to))
}
