//! Carriers per call: sibling communicators, one for each further carrier of a communicator.
//!
//! A sibling has the same ranks, and an engine, transports and turns of its own, so calls on different carriers run at once and
//! need not come in the same order on all ranks: each carrier has one order, as a communicator has. Streams keep theirs: an
//! operation is queued on its stream whichever carrier it goes by. A sibling is made with its parent by all ranks together,
//! and ends with it. When one of such a family fails all do: an operation under way sees that at its next poll and tells the
//! other ranks over its own links, and what waits for a rank that has failed in another one of the family fails as well.
#![forbid(unsafe_code)]

use super::device::DeviceHome;
use super::{fuse, CollectiveCall, Comm, CommOptions, Launch, Operation};
use crate::carrier::{Carrier, Carriers, FurtherCarrier, Inter};
use crate::config::{Config, Fuse};
use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::health::{Loss, RankStatus};
use crate::selection::table::agree::NONE;
use crate::selection::{model, CommCarriers, Executor, Selection};
use crate::topo::Rank;
use crate::transport::{self, Exchange, Router, Site, Waker};
use std::cell::RefCell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};
use std::time::Instant;

/// Said once in a process.
static LEFT_OUT: PerProcess<Once> = PerProcess::new(Once::new);
static IN_FRONT: PerProcess<Once> = PerProcess::new(Once::new);

/// The communicators of a communicator's further carriers.
pub(super) type Siblings = Vec<(Carrier, Arc<Comm>)>;

/// How communicators that fail together fare.
pub(super) struct Family {
    statuses: Vec<Arc<RankStatus>>,
    /// They are carriers among which calls choose.
    has_carriers: bool,
}

impl Family {
    /// The first failure that one of them has.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.statuses.iter().find_map(|status| status.failure())
    }
}

/// What a communicator is made for that has the ranks of another one and ends with it.
pub(super) enum AsSibling<'a> {
    /// A further carrier.
    Carrier {
        /// Whose.
        parent: &'a Comm,
        /// Which.
        carrier: Carrier,
        /// Why the ranks cannot use it, if so.
        lacks: &'a RefCell<Option<String>>,
    },
    /// The words that close its windows, in host memory.
    Words {
        /// Whose.
        parent: &'a Comm,
    },
    /// Those who go on without lost ranks: it has fewer ranks.
    Survivors {
        /// In whose place.
        parent: &'a Comm,
        /// Where the device is, where data is on one.
        device: Option<&'a DeviceHome>,
    },
}

impl AsSibling<'_> {
    /// Where the device is with which it goes on.
    pub(super) fn device(&self) -> Option<&DeviceHome> {
        match self {
            AsSibling::Survivors { device, .. } => *device,
            _ => None,
        }
    }

    /// The carrier's name, or what it is for.
    pub(super) fn name(&self) -> &'static str {
        match self {
            AsSibling::Carrier { carrier, .. } => carrier.name(),
            AsSibling::Words { .. } => "windows",
            AsSibling::Survivors { .. } => "survivors",
        }
    }

    /// Whether a program's data goes by it.
    pub(super) fn carries_data(&self) -> bool {
        !matches!(self, AsSibling::Words { .. })
    }

    /// The parent's settings; what decides calls is the parent's alone.
    pub(super) fn config(&self) -> Config {
        let config = match self {
            AsSibling::Carrier { parent, carrier, .. } => {
                Config { inter: Inter::Only(*carrier), ..parent.config.clone() }
            }
            // What settings say of a program's broadcasts is not said of these.
            AsSibling::Words { parent } => {
                let Config { broadcast_algo, providers, .. } = Config::default();
                Config { broadcast_algo, providers, ..parent.config.clone() }
            }
            // It decides calls itself. In front of a vendor's library its device has no room for joined ones.
            AsSibling::Survivors { parent, .. } => {
                let fuse = if parent.options.companion.is_some() { Fuse::Off } else { parent.config.fuse };
                return Config { fuse, ..parent.config.clone() };
            }
        };
        Config {
            carriers: Carriers::alone(),
            tuning_table: NONE.to_string(),
            strategy: NONE.to_string(),
            machine: model::NONE.to_string(),
            measure_us: 0,
            ..config
        }
    }

    /// Opens the transport over this carrier and no other.
    pub(super) fn open(&self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Router> {
        let AsSibling::Carrier { carrier, lacks, .. } = self else {
            return transport::open(site.me, site.grid, site.config, site.binding, exchange);
        };
        let name = carrier.name();
        transport::open_over(name, site, exchange)?.map_err(|why| {
            *lacks.borrow_mut() = Some(why.clone());
            Error::InvalidUsage(format!("{name} cannot carry messages between these nodes: {why}"))
        })
    }
}

/// The further carriers that rank 0's settings name, and the communicator's own in `STRATA_INTER`'s place.
pub(super) fn wanted(config: &mut Config, options: &CommOptions) -> Result<Vec<FurtherCarrier>> {
    let wanted = config.carriers.read().map_err(Error::InvalidUsage)?;
    if options.companion.is_some() {
        if config.carriers != Carriers::alone() {
            let text =
                "STRATA_CARRIERS is left out in front of a vendor library: its calls have one carrier (STRATA_INTER)";
            IN_FRONT.get().call_once(|| crate::log::notice(text));
        }
        return Ok(Vec::new());
    }
    if wanted.own != Inter::Auto {
        if config.inter != Inter::Auto && config.inter != wanted.own {
            return Err(Error::InvalidUsage(format!(
                "STRATA_INTER={} and STRATA_CARRIERS={} name different transports for the communicator itself: unset one, or \
                 let STRATA_CARRIERS begin with auto",
                config.inter, config.carriers
            )));
        }
        config.inter = wanted.own;
    }
    Ok(wanted.further)
}

impl Comm {
    /// The communicators of its further carriers.
    pub(super) fn siblings(&self) -> impl Iterator<Item = &Arc<Comm>> {
        self.siblings.get().into_iter().flatten().map(|(_, sibling)| sibling)
    }

    /// The carriers that calls may choose, by name: its own first.
    pub fn carriers(&self) -> Vec<&'static str> {
        let further = self.siblings.get().into_iter().flatten().map(|(carrier, _)| carrier.name());
        self.carrier.map(Carrier::name).into_iter().chain(further).collect()
    }

    /// An error where calls cannot choose this carrier, with the reason.
    pub fn has_carrier(&self, carrier: Carrier) -> Result<()> {
        self.selector.has_carrier(carrier)
    }

    /// The communicator that carries a decided call, where it is not this one.
    pub(super) fn sibling_for(&self, call: &CollectiveCall) -> Option<&Arc<Comm>> {
        let siblings = self.siblings.get()?;
        match &call.decision.as_ref()?.executor {
            Executor::Own(Selection { carrier: Some(carrier), .. }) => {
                siblings.iter().find(|(known, _)| known == carrier).map(|(_, sibling)| sibling)
            }
            _ => None,
        }
    }

    /// News of ranks that take no further part, here or in a communicator that fails with this one.
    pub(super) fn losses(&self) -> Vec<(Instant, Loss)> {
        let mut losses = self.status.losses();
        let others = self.family.get().into_iter().flat_map(|family| &family.statuses);
        for status in others.filter(|status| !Arc::ptr_eq(status, &self.status)) {
            // Operations are numbered in each by itself.
            losses.extend(status.losses().into_iter().map(|(since, loss)| (since, Loss { from: None, ..loss })));
        }
        losses
    }

    /// Makes a sibling for each further carrier. Collective. One that some rank lacks is left out on all, or is an error where
    /// it is required.
    pub(super) fn make_siblings(&self, further: &[FurtherCarrier], cancel: &AtomicBool) -> Result<()> {
        let mut made: Siblings = Vec::new();
        let mut left_out: Vec<(Carrier, String)> = Vec::new();
        // One rank has nobody to be out of order with, and nothing to carry.
        let further = if self.nranks() > 1 { further } else { &[] };
        for &FurtherCarrier { carrier, required } in further.iter().filter(|wish| self.carrier != Some(wish.carrier)) {
            let lacks = RefCell::new(None);
            let error = match self.make_sibling(AsSibling::Carrier { parent: self, carrier, lacks: &lacks }, cancel) {
                Ok(sibling) => {
                    made.push((carrier, sibling));
                    continue;
                }
                Err(error) => error,
            };
            let error = match lacks.into_inner() {
                Some(why) if !required => {
                    left_out.push((carrier, why));
                    continue;
                }
                Some(why) => self.refusal(carrier, &why),
                None => error,
            };
            made.iter().for_each(|(_, sibling)| sibling.abort());
            return Err(error);
        }
        for (carrier, why) in left_out.iter().filter(|_| self.rank == Rank(0)) {
            let (name, setting) = (carrier.name(), &self.config.carriers);
            LEFT_OUT.get().call_once(|| {
                crate::log::notice(&format!(
                    "STRATA_CARRIERS={setting}: {name} is left out, calls cannot choose it: {why}"
                ));
            });
        }
        // One that was wanted in the place of the communicator's own, which rank 0 has told of.
        if let (Inter::Only(wished), Some(mut engine)) = (&self.config.inter, self.engine.try_lock()) {
            let lacks = engine.as_mut().and_then(|engine| engine.transport().refused(*wished).map(str::to_string));
            left_out.extend(lacks.filter(|_| self.carrier.is_some()).map(|why| (*wished, why)));
        }
        let carriers = made.iter().map(|(carrier, _)| *carrier).collect();
        let complaint = self.selector.know_carriers(CommCarriers { own: self.carrier, further: carriers, left_out });
        if let Some(complaint) = complaint.filter(|_| self.rank == Rank(0)) {
            crate::log::write(crate::log::Level::Warn, &complaint);
        }
        if !made.is_empty() {
            self.join(made);
        }
        Ok(())
    }

    /// Makes the communicator over which the closings of windows are told. It fails with this one, unless this one goes on without lost
    /// ranks. Collective.
    pub(super) fn make_words(&self, cancel: &AtomicBool) -> Result<Arc<Comm>> {
        let words = self.make_sibling(AsSibling::Words { parent: self }, cancel)?;
        if self.survivors.get().is_none() {
            let family = || std::iter::once(self).chain(self.siblings().map(|sibling| &**sibling));
            family().for_each(|comm| comm.wakes(&words));
            let statuses = family().chain([&*words]).map(|comm| comm.status.clone());
            let family = Family { statuses: statuses.collect(), has_carriers: false };
            let _ = words.family.set(Arc::new(family));
        }
        Ok(words)
    }

    /// Has another communicator's operations look for a failure when this one fails.
    fn wakes(&self, other: &Comm) {
        let waker = other.waker.clone();
        self.status.wakes_also(move || waker.iter().for_each(Waker::wake));
    }

    fn refusal(&self, carrier: Carrier, why: &str) -> Error {
        let (name, setting) = (carrier.name(), &self.config.carriers);
        Error::InvalidUsage(format!(
            "STRATA_CARRIERS={setting}: {name} cannot carry messages between these nodes: {why}; without the ! it would be left out"
        ))
    }

    /// What is to be said of a call in which ranks are missing: it is by one of several carriers, and calls by others are no part of it.
    pub(super) fn by_carrier(&self) -> Option<String> {
        self.family.get().filter(|family| family.has_carriers)?;
        Some("a rank that has made the call by another carrier (STRATA_CARRIERS) is not in it".to_string())
    }

    /// Has these communicators fail and wake together with this one.
    fn join(&self, siblings: Siblings) {
        let all = || std::iter::once(self).chain(siblings.iter().map(|(_, sibling)| &**sibling));
        let statuses = all().map(|comm| comm.status.clone()).collect();
        let family = Arc::new(Family { statuses, has_carriers: true });
        for comm in all() {
            all().filter(|other| !std::ptr::eq(*other, comm)).for_each(|other| comm.wakes(other));
            let _ = comm.family.set(family.clone());
        }
        let _ = self.siblings.set(siblings);
    }
}

impl Launch {
    /// Has a collective go by the carrier that it chooses. Messages stay where they are.
    pub(super) fn go_by_carrier(&mut self) -> Result<()> {
        let Operation::Collective(call) = &mut self.operation else { return Ok(()) };
        if self.comm.siblings.get().is_none() {
            return Ok(());
        }
        self.comm.at_home()?;
        self.comm.decide(call)?;
        if let Some(sibling) = self.comm.sibling_for(call).cloned() {
            self.comm = sibling;
        }
        Ok(())
    }
}

/// An operation of a group, with the streams that it waits for beside its own.
pub(super) type Spread = (Launch, Vec<StreamRef>);

/// The operations of a group. Where calls choose between carriers they have become fewer already, and each goes by the carrier that a
/// single call of its size would choose, and waits for the streams of the calls in whose places it is.
///
/// There are several parts, one after the other, where a call uses what another one writes: between carriers there is no other order.
pub(super) fn spread(batch: Vec<Launch>) -> Result<Vec<Vec<Spread>>> {
    let chooses =
        |launch: &Launch| launch.comm.siblings.get().is_some() && matches!(launch.operation, Operation::Collective(_));
    let mut parts = vec![Vec::with_capacity(batch.len())];
    let mut groups: Vec<(Arc<Comm>, Vec<CollectiveCall>, Vec<StreamRef>)> = Vec::new();
    for launch in batch {
        if !chooses(&launch) {
            parts[0].push((launch, Vec::new()));
            continue;
        }
        let Launch { comm, operation: Operation::Collective(call), stream } = launch else { continue };
        match groups.iter_mut().find(|(known, ..)| Arc::ptr_eq(known, &comm)) {
            Some((_, calls, streams)) => {
                calls.push(call);
                streams.push(stream);
            }
            None => groups.push((comm, vec![call], vec![stream])),
        }
    }
    // Of ranks that share a thread none may wait for a part that another one has not come to.
    let depend = groups.iter().any(|(_, calls, _)| fuse::depend(calls));
    for (comm, calls, all) in groups {
        let mut part = 0;
        let mut before: Option<Arc<Comm>> = None;
        for (places, mut call) in comm.fuse(calls) {
            comm.decide(&mut call)?;
            let carried_by = comm.sibling_for(&call).unwrap_or(&comm).clone();
            let mut streams = places.iter().map(|&place| all[place].clone());
            let stream = streams.next().unwrap_or(StreamRef::Null);
            let further = if depend { all.clone() } else { streams.collect() };
            if depend && before.as_ref().is_some_and(|before| !Arc::ptr_eq(before, &carried_by)) {
                part += 1;
            }
            before = Some(carried_by.clone());
            if parts.len() == part {
                parts.push(Vec::new());
            }
            let launch = Launch { comm: carried_by, operation: Operation::Collective(call), stream };
            parts[part].push((launch, further));
        }
    }
    Ok(parts)
}
