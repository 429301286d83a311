//! Who of a communicator is still there, what each rank does, and whom everybody waits for.
//!
//! A rank's engine notes its [status](RankStatus); the [failure detector](failure_detector) links ranks so that a death is
//! noticed; the [monitor](Monitor) is what a communicator holds of both; [diagnosis] asks the awaited ranks. All of it is
//! carried by the connections of the process's [service](crate::bootstrap::Service).
#![forbid(unsafe_code)]

pub mod call;
pub mod diagnosis;
pub mod failure_detector;
mod monitor;
pub mod status;

pub use call::CallSummary;
pub use monitor::Monitor;
pub use status::{Exchanges, Loss, RankStatus, RelayRequest};
