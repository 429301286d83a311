//! Calls with a code on communicators of the vendor's library.
//!
//! The vendor has no codes. Where Strata's own transports carry what goes between nodes, such a call is an operation of the
//! companion, as a call is whose code the environment sets: kernels of Strata's code on the GPU, and inside a node the vendor's
//! communicator reduces. Where nothing goes between nodes nothing is coded, and the call is the vendor's own. Everywhere else it is
//! refused, since a call that goes uncoded would cost what its program does not expect.
#![forbid(unsafe_code)]

use super::subcomms::{SubComms, VendorCall};
use super::{calls, find, group, Attached, Handle, ON_ONE_NODE};
use crate::algorithms;
use crate::code::FloatCode;
use crate::communicator::{CollectiveCall, Launch, Operation};
use crate::device::StreamRef;
use crate::error::{Error, Result, SUCCESS};
use crate::vendor::calls::VendorStream;
use crate::vendor::Library;

/// A program's call with a code on a communicator of the vendor's.
pub struct CodedVendorCall {
    /// The communicator.
    pub handle: Handle,
    /// What is to be done, with its reduction and its residual; undecided.
    pub call: CollectiveCall,
    /// The code.
    pub code: FloatCode,
    /// The operation, as the program numbers it.
    pub op: i32,
    /// The stream that orders it.
    pub stream: VendorStream,
    /// How many ranks there are.
    pub nranks: usize,
}

/// Has a call done: inside a group it is recorded, here or by the vendor.
///
/// # Errors
/// `InvalidUsage` where Strata cannot code what goes between nodes, with the reason.
pub fn submit(coded: &CodedVendorCall, library: &'static Library) -> Result<()> {
    if coded.nranks == 1 || crate::sync::locked(&ON_ONE_NODE).contains(&coded.handle) {
        return coded.uncoded(library);
    }
    let Some(attached) = find(coded.handle).filter(|attached| attached.has_companion()) else {
        let why = "which alone serves it: Strata was switched off when it was made, is not on all ranks, or does not drive its GPUs";
        return Err(coded.refused(why));
    };
    match group::submit_own(attached.own_coded(coded)?) {
        SUCCESS => Ok(()),
        // It has been told.
        code => Err(Error::of_code(code, String::new())),
    }
}

impl CodedVendorCall {
    /// The call without its code, by the vendor.
    fn uncoded(&self, library: &Library) -> Result<()> {
        let CollectiveCall { collective, count, dtype, .. } = self.call;
        let [send, recv] = [self.call.input, self.call.output].map(|buffer| buffer.address() as usize);
        let call = VendorCall { collective, send, recv, count, dtype: dtype.code(), op: self.op, stream: self.stream };
        calls::collective(&call, collective, self.handle, [send, recv], count, library)
            .map_err(|code| Error::of_code(code, format!("{}: the vendor's library returns {code}", collective.name())))
    }

    fn refused(&self, why: &str) -> Error {
        let (collective, code) = (self.call.collective.name(), self.code.name());
        Error::InvalidUsage(format!("{collective} in {code} on a communicator of the vendor's library, {why}"))
    }
}

impl Attached {
    /// Such a call as an operation of the companion.
    fn own_coded(&self, coded: &CodedVendorCall) -> Result<Launch> {
        match self.subcomms.get().filter(|subcomms| subcomms.is_own()) {
            Some(subcomms) => subcomms.own_coded(coded),
            None => Err(coded.refused(self.why_not_own())),
        }
    }

    /// Why Strata's own transports carry nothing between the nodes of a communicator with a companion.
    fn why_not_own(&self) -> &'static str {
        let companion = self.companion.get();
        match companion.map(|companion| (companion.config.inter.in_front().is_own(), companion.gpu().is_some())) {
            Some((true, true)) => {
                "none of whose calls Strata carries by the settings that it was made with: STRATA_TWO_LEVEL_MIN_NODES=2, \
                 STRATA_ALLREDUCE_ALGO=two_level or STRATA_ALLREDUCE_CODE let it"
            }
            Some((true, false)) => "whose data is not on a GPU that Strata drives",
            _ => "which itself carries what goes between nodes: STRATA_INTER=tcp or mpi lets Strata do that",
        }
    }
}

impl SubComms {
    fn own_coded(&self, coded: &CodedVendorCall) -> Result<Launch> {
        let CodedVendorCall { ref call, code, stream, .. } = *coded;
        let comm = self.companion().clone();
        if let Some(why) = self.unfit_stream(stream) {
            return Err(coded.refused(&format!("on {why}")));
        }
        let choice = algorithms::coded_choice(code, call.collective, comm.grid())
            .ok_or_else(|| coded.refused("for which there is no plan"))?;
        let buffers = [(Some(call.input), "sendbuff"), (Some(call.output), "recvbuff"), (call.residual, "residual")];
        for (region, name) in buffers {
            region.map_or(Ok(()), |region| comm.check_memory(region, name))?;
        }
        let call = CollectiveCall { algorithm: Some(choice.exact()), ..call.clone() };
        Ok(Launch { comm, operation: Operation::Collective(call), stream: StreamRef::Gpu(stream) })
    }
}
