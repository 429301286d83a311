//! Which NIC a rank of a communicator uses, from what the ranks of its node have told of themselves.
#![forbid(unsafe_code)]

use super::members::Member;
use crate::config::Config;
use crate::error::Result;
use crate::log::Level;
use crate::topo::binding::Binding;
use crate::topo::distance::PciAddress;
use crate::topo::interface::Filter;
use crate::topo::machine::{gpu_of, gpus_of_ranks, visible_from_env, Machine};
use crate::topo::nics::Purpose;
use crate::topo::pinning::{pin, Pinning, Rules};
use crate::topo::{Grid, Rank};

/// The GPU that this process means by a device number.
pub fn gpu_of_this_process(device: i32) -> Option<PciAddress> {
    let machine = Machine::read(std::path::Path::new("/sys"), &[]);
    gpu_of(&machine, usize::try_from(device).ok()?, visible_from_env().as_deref())
}

/// The local rank of each of a node's members, and the ranks of the node. What the launcher has told counts, so that a
/// rank uses one NIC in all communicators; without it, or where several ranks are one process, the communicator's own
/// order does.
fn local_ranks(node: &[&Member]) -> (Vec<usize>, usize) {
    let told: Option<Vec<(usize, usize)>> = node.iter().map(|member| member.local).collect();
    let agree = |told: &Vec<(usize, usize)>| {
        let mut ranks: Vec<usize> = told.iter().map(|&(rank, _)| rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.len() == told.len() && told.iter().all(|&(_, size)| size == told[0].1)
    };
    match told.filter(agree) {
        Some(told) => (told.iter().map(|&(rank, _)| rank).collect(), told[0].1),
        None => ((0..node.len()).collect(), node.len()),
    }
}

/// A machine, the NICs that its ranks have on it, and which of these ranks is asked about.
struct Pinned {
    machine: Machine,
    rules: Rules,
    pinning: Pinning,
    local: usize,
}

/// The NICs of a rank's node. All ranks of it find the same for each of them.
fn pinned(rank: Rank, grid: &Grid, members: &[Member], config: &Config) -> Result<Pinned> {
    let node: Vec<&Member> = grid.members(grid.node(rank)).iter().map(|member| &members[member.index()]).collect();
    let (local, size) = local_ranks(&node);
    let machine = Machine::this()?;
    let mut claims = vec![None; size];
    for (member, &local) in node.iter().zip(&local) {
        claims[local] = member.gpu;
    }
    let rules = Rules::new(&config.nic_map, Filter::from_env())?;
    let pinning = pin(&machine, &gpus_of_ranks(&machine, &claims), &rules, Purpose::Tcp)?;
    Ok(Pinned { machine, rules, pinning, local: local[grid.local(rank)] })
}

/// The name of the interface that a rank would have now.
pub fn name_now(rank: Rank, grid: &Grid, members: &[Member], config: &Config) -> Result<String> {
    let Pinned { machine, rules, pinning, local } = pinned(rank, grid, members, config)?;
    Ok(Binding::to_nic(&machine, pinning.pins[local].nic, &rules.filter)?.address.name)
}

/// The NIC over which a rank reaches other nodes.
pub fn binding(rank: Rank, grid: &Grid, members: &[Member], config: &Config) -> Result<Binding> {
    let Pinned { machine, rules, pinning, local } = pinned(rank, grid, members, config)?;
    let mine = &pinning.pins[local];
    let mut binding = Binding::to_nic(&machine, mine.nic, &rules.filter)?;
    let at = pinning.usable.iter().position(|&nic| nic == mine.nic).map_or(0, |at| at + 1);
    let further = pinning.usable[at..].iter().chain(&pinning.usable[..at]).filter(|&&nic| nic != mine.nic);
    binding.further = further.filter_map(|&nic| Binding::to_nic(&machine, nic, &rules.filter).ok()).collect();
    let distance = mine.distance.map_or(String::new(), |distance| format!(" at distance {distance}"));
    crate::info!("rank {rank} uses {}{distance}: {}", machine.nics[mine.nic].name(), mine.why);
    if let Some(note) = &binding.note {
        crate::info!("{note}");
    }
    // Once a node.
    if let (0, Some(warning)) = (grid.local(rank), &pinning.warning) {
        crate::log::write(Level::Warn, &format!("on {}: {warning}", members[rank.index()].host));
    }
    Ok(binding)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(local: Option<(usize, usize)>) -> Member {
        Member {
            host_id: String::new(),
            host: String::new(),
            pid: 1,
            device: 0,
            local,
            launched: None,
            gpu: None,
            on_gpu: false,
            on_host: false,
            service: String::new(),
            version: String::new(),
            color: 0,
            key: 0,
            extra: Vec::new(),
        }
    }

    fn ranks(told: &[Option<(usize, usize)>]) -> (Vec<usize>, usize) {
        let members: Vec<Member> = told.iter().map(|&local| member(local)).collect();
        local_ranks(&members.iter().collect::<Vec<_>>())
    }

    #[test]
    fn the_launchers_local_ranks_count_when_they_make_sense() {
        assert_eq!(ranks(&[Some((5, 8)), Some((2, 8))]), (vec![5, 2], 8), "a part of the node's ranks");
        assert_eq!(ranks(&[Some((0, 8)), None]), (vec![0, 1], 2));
        assert_eq!(ranks(&[Some((0, 4)), Some((0, 4)), Some((0, 4))]), (vec![0, 1, 2], 3), "threads of a process");
        assert_eq!(ranks(&[Some((0, 2)), Some((1, 4))]), (vec![0, 1], 2));
    }
}
