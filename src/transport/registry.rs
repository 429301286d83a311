//! The transports between nodes: those of the library, those that a program registers, and which one a communicator uses.
//!
//! All ranks of a communicator use the same one. They ask the kinds in the same order, and each kind's `probe` gives all
//! ranks the same answer, so nothing else has to be agreed on.
#![forbid(unsafe_code)]

use super::mpi::MpiKind;
use super::shm::wakeup::Wakeups;
use super::tcp::TcpKind;
use super::{Endpoint, Exchange};
use crate::carrier::{Carrier, Inter};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::Level;
use crate::sync::locked;
use crate::topo::binding::Binding;
use crate::topo::{Grid, Rank};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The library's own kinds, one line each, in the order in which they are asked. TCP takes what the others leave.
const OWN: [&dyn TransportKind; 2] = [
    &MpiKind, //
    &TcpKind,
];

/// What programs have registered.
static REGISTERED: Mutex<Vec<&'static dyn TransportKind>> = Mutex::new(Vec::new());

/// A rank of a communicator that is being made.
pub struct Site<'a> {
    /// The rank.
    pub me: Rank,
    /// All ranks and their nodes.
    pub grid: &'a Grid,
    /// The settings.
    pub config: &'a Config,
    /// Finds the NIC of this rank to other nodes.
    pub binding: &'a dyn Fn() -> Result<Binding>,
}

impl Site<'_> {
    /// Whether the user names this transport in `STRATA_INTER`; the same on all ranks.
    pub fn asks_for(&self, name: &str) -> bool {
        matches!(self.config.inter, Inter::Only(Carrier::Own(asked)) if asked == name)
    }
}

/// What all ranks have decided about a kind of transport.
pub enum Probe {
    /// They use it.
    Taken(Box<dyn Opener>),
    /// They cannot use it: why, for the log.
    Refused(String),
    /// There is no call for it.
    Unwanted,
}

/// A kind of transport between nodes, as the registry lists it.
pub trait TransportKind: Sync {
    /// What `STRATA_INTER` and tuning tables call it; in capitals in the log.
    fn name(&self) -> &'static str;

    /// Decides whether the communicator uses it. All ranks call it together and get the same variant.
    fn probe(&self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe>;

    /// Whether an endpoint waits for file descriptors: then the rank's wakeup is one, too ([`Wakeups::doorbell`]).
    fn waits_for_descriptors(&self) -> bool;

    /// A communicator of this process has failed, whatever it used.
    fn note_failure(&self) {}

    /// The process ends. Takes no lock that another thread may hold for ever.
    fn leave_process(&self) {}
}

/// A decision for a kind of transport.
pub trait Opener {
    /// Opens it to the ranks `far`, which shared memory does not reach. All ranks call it together, those without such
    /// ranks too; these may get `None`.
    fn open(
        self: Box<Self>,
        site: &Site<'_>,
        far: &[Rank],
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<Option<Box<dyn Endpoint>>>;
}

/// Adds a kind of transport, which communicators use when `STRATA_INTER` names it. All ranks' programs register it
/// before they make the first communicator.
///
/// # Errors
/// `InvalidUsage` when the name has a meaning already.
pub fn register(kind: &'static dyn TransportKind) -> Result<()> {
    let name = kind.name();
    let mut registered = locked(&REGISTERED);
    let has_it = |kinds: &[&dyn TransportKind]| kinds.iter().any(|kind| kind.name() == name);
    if Inter::WORDS.contains(&name) || has_it(&OWN) || has_it(&registered) {
        return Err(Error::InvalidUsage(format!("a transport cannot be registered as {name}: the name is taken")));
    }
    registered.push(kind);
    Ok(())
}

/// All kinds, the library's first.
pub(super) fn kinds() -> Vec<&'static dyn TransportKind> {
    OWN.into_iter().chain(locked(&REGISTERED).iter().copied()).collect()
}

/// The names of all kinds.
pub fn names() -> Vec<&'static str> {
    kinds().iter().map(|kind| kind.name()).collect()
}

/// The name of the kind that is called so, if there is one.
pub fn named(name: &str) -> Option<&'static str> {
    names().into_iter().find(|known| *known == name)
}

/// A communicator of this process has failed: the job's other ranks may not be there any more when this process ends.
pub fn note_failure() {
    tell_all(|kind| kind.note_failure());
}

/// Ends the process's use of all transports.
pub fn leave_process() {
    tell_all(|kind| kind.leave_process());
}

/// For calls while the process exits: takes no lock that another thread may hold for ever.
fn tell_all(word: impl Fn(&dyn TransportKind)) {
    OWN.into_iter().for_each(&word);
    if let Ok(registered) = REGISTERED.try_lock() {
        registered.iter().for_each(|kind| word(*kind));
    }
}

/// The kind of transport that the ranks of a communicator have chosen.
pub(super) struct Chosen {
    pub carrier: Carrier,
    pub waits_for_descriptors: bool,
    pub opener: Box<dyn Opener>,
    /// Those that were tried before, and why the ranks cannot use them.
    pub refused: Vec<(&'static str, String)>,
}

/// Chooses with all ranks: the kind that is asked for, or else the first of the library's that they can use.
pub(super) fn choose(kinds: &[&dyn TransportKind], site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Chosen> {
    if let Inter::Unknown(text) = &site.config.inter {
        return Err(Error::InvalidUsage(format!("STRATA_INTER={text} is none of {}", Inter::choices())));
    }
    // The library's own come first in `kinds`; what is registered is used only if it is asked for.
    let asked = kinds.iter().filter(|kind| site.asks_for(kind.name()));
    let others = kinds.iter().take(OWN.len()).filter(|kind| !site.asks_for(kind.name()));
    let mut refused: Vec<(&'static str, String)> = Vec::new();
    for kind in asked.chain(others) {
        match kind.probe(site, exchange)? {
            Probe::Taken(opener) => {
                for (other, why) in &refused {
                    tell(site, kind.name(), other, why);
                }
                let waits_for_descriptors = kind.waits_for_descriptors();
                return Ok(Chosen { carrier: Carrier::Own(kind.name()), waits_for_descriptors, opener, refused });
            }
            Probe::Refused(why) => refused.push((kind.name(), why)),
            Probe::Unwanted => {}
        }
    }
    Err(Error::Internal("no transport carries messages between nodes".to_string()))
}

/// Chooses this kind with all ranks; why they cannot use it, the same on all of them.
pub(super) fn choose_only(
    kinds: &[&dyn TransportKind],
    name: &str,
    site: &Site<'_>,
    exchange: &mut dyn Exchange,
) -> Result<std::result::Result<Chosen, String>> {
    let Some(kind) = kinds.iter().find(|kind| kind.name() == name) else {
        return Ok(Err(format!("there is no transport {name} in this process")));
    };
    Ok(match kind.probe(site, exchange)? {
        Probe::Taken(opener) => {
            let waits_for_descriptors = kind.waits_for_descriptors();
            let refused = Vec::new();
            Ok(Chosen { carrier: Carrier::Own(kind.name()), waits_for_descriptors, opener, refused })
        }
        Probe::Refused(why) => Err(why),
        Probe::Unwanted => Err("it has nothing to carry between these ranks".to_string()),
    })
}

/// Tells why a kind is not used, on rank 0. Who asks for it hears that whatever `NCCL_DEBUG` says, but once: from rank 0
/// of a process's first communicator.
fn tell(site: &Site<'_>, used: &str, refused: &str, why: &str) {
    static LATER: AtomicBool = AtomicBool::new(false);
    let first = !LATER.swap(true, Ordering::Relaxed);
    if site.me != Rank(0) {
        return;
    }
    let (used, name) = (used.to_ascii_uppercase(), refused.to_ascii_uppercase());
    let text = format!("{used} carries messages between nodes, not {name}: {why}");
    match site.asks_for(refused) {
        true if first => crate::log::notice(&text),
        true => crate::log::write(Level::Warn, &text),
        false => crate::log::write(Level::Info, &text),
    }
}
