//! The decisions of one communicator: made once for each shape of call, and kept.
#![forbid(unsafe_code)]

use super::{decide, CommCarriers, Context, Decision, Executor, Request, Sizes};
use crate::carrier::Carrier;
use crate::code::FloatCode;
use crate::error::Result;
use crate::plan::Collective;
use crate::script::SharedScripts;
use crate::sim::Cluster;
use crate::topo::Rank;
use crate::transport::provider::ProviderSet;
use rustc_hash::FxHashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Calls that differ in nothing that a decision rests on.
type Key = (Collective, usize, Rank, (Sizes, Option<FloatCode>, ProviderSet));
/// Decisions that are kept; a program with more shapes of calls has them made again.
const KEPT: usize = 4096;

/// The decisions of one communicator: made once for each shape of call, and kept.
#[derive(Debug)]
pub struct Selector {
    state: RwLock<State>,
}

#[derive(Debug)]
struct State {
    context: Context,
    kept: FxHashMap<Key, Arc<Decision>>,
    kept_by_name: FxHashMap<String, FxHashMap<Key, Arc<Decision>>>,
}

impl Selector {
    /// For a communicator with this context.
    pub fn new(context: Context) -> Selector {
        let state = State { context, kept: FxHashMap::default(), kept_by_name: FxHashMap::default() };
        Selector { state: RwLock::new(state) }
    }

    /// What its decisions rest on.
    pub fn context(&self) -> Context {
        self.state.read().unwrap_or_else(PoisonError::into_inner).context.clone()
    }

    /// The scripts of the communicator.
    pub fn scripts(&self) -> Arc<SharedScripts> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).context.knowledge.scripts.clone()
    }

    /// Has later decisions made by this machine as well. All ranks do so between the same two operations.
    pub fn know_machine(&self, machine: Arc<Cluster>) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        state.context.knowledge.machine = Some(machine);
        state.kept.clear();
        state.kept_by_name.clear();
    }

    /// An error where calls cannot choose this carrier, with the reason.
    pub fn has_carrier(&self, carrier: Carrier) -> Result<()> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).context.carriers.find(carrier).map(drop)
    }

    /// Has later decisions made by what calls may choose between nodes. What is said of rows of the tuning table that are left out
    /// then, because they are for other carriers.
    pub fn know_carriers(&self, carriers: CommCarriers) -> Option<String> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let (tuned, complaint) = state.context.knowledge.tuned.over(&carriers);
        if complaint.is_some() {
            state.context.knowledge.tuned = Arc::new(tuned);
        }
        state.context.carriers = carriers;
        state.kept.clear();
        state.kept_by_name.clear();
        complaint
    }

    /// Decides a call.
    pub fn decide(&self, request: &Request<'_>) -> Result<Arc<Decision>> {
        self.look(request, Arc::clone)
    }

    /// Decides a call that is not the vendor library's alone; none where it is.
    pub fn decide_own(&self, request: &Request<'_>) -> Result<Option<Arc<Decision>>> {
        let own = |decision: &Arc<Decision>| (decision.executor != Executor::Vendor).then(|| decision.clone());
        self.look(request, own)
    }

    fn look<T>(&self, request: &Request<'_>, take: impl FnOnce(&Arc<Decision>) -> T) -> Result<T> {
        // The root decides which script does a call.
        let root = if request.collective.has_root() { request.root } else { Rank(0) };
        let key = (request.collective, request.block_bytes, root, (request.sizes, request.code, request.provided));
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let kept = match request.named {
            None => state.kept.get(&key),
            Some(name) => state.kept_by_name.get(name).and_then(|kept| kept.get(&key)),
        };
        if let Some(decision) = kept {
            return Ok(take(decision));
        }
        let decision = Arc::new(decide(request, &state.context)?);
        drop(state);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let kept = match request.named {
            None => &mut state.kept,
            Some(name) => state.kept_by_name.entry(name.to_string()).or_default(),
        };
        if kept.len() == KEPT {
            kept.clear();
        }
        // Another thread may have been quicker.
        Ok(take(kept.entry(key).or_insert(decision)))
    }
}
