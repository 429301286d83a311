//! What becomes of calls without lost ranks where a program has asked for something (`strataCommAdapt`).
#![forbid(unsafe_code)]

use super::Survivors;
use crate::communicator::adapt::{sum, AdaptOptions};
use crate::communicator::late::here;
use crate::communicator::{CollectiveCall, Comm};
use crate::dtype::Reduction;
use crate::error::Result;
use crate::plan::Collective;
use crate::sync::locked;

impl Survivors {
    /// What holds from the next call on.
    pub fn adapt(&self, options: AdaptOptions) {
        *locked(&self.options) = options;
    }

    /// What the program has asked for.
    pub(super) fn options(&self) -> AdaptOptions {
        *locked(&self.options)
    }

    /// Makes of a sum of so many contributors, where that is asked for, what it would be on average with all ranks.
    pub(super) fn rescale(&self, comm: &Comm, call: &CollectiveCall, contributors: usize) -> Result<()> {
        let has_result = call.collective != Collective::Reduce || call.root == comm.rank;
        if !self.options().rescale || contributors == comm.nranks() || !has_result {
            return Ok(());
        }
        let Some(Reduction { dtype, .. }) = sum(call.reduction) else { return Ok(()) };
        let ratio = (comm.nranks() as u64, contributors as u64);
        match &self.on_gpu {
            Some(on_gpu) => on_gpu.kept.work().multiply_by_ratio(dtype, ratio, call.output),
            None => {
                crate::device::host::multiply_by_ratio(dtype, ratio, here(call.output));
                Ok(())
            }
        }
    }
}
