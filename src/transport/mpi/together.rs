//! A call of MPI that all ranks make and in which each waits for the others, such as `MPI_Init_thread`.
//!
//! Where it fails on one rank, or ends that rank's process, MPI may leave the others in it for ever: Open MPI 4.1 does if a
//! rank finds no way to another. So while the call is under way the ranks tell each other how it goes, in rounds of the
//! bootstrap, which notices the end of a process. All ranks see the same rounds, so the same one is the last for all.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::transport::card;
use crate::transport::Exchange;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a rank waits for MPI between two rounds. A call that takes less has one round.
pub const ROUND: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 500 });

/// How the call goes on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum CallState {
    UnderWay,
    Returned,
    Failed(String),
}

/// The rounds of one call.
struct Rounds<'a> {
    exchange: &'a mut dyn Exchange,
    /// The outcome of the last round, once there was one: the ranks on which the call failed, and why.
    outcome: Option<Result<Vec<(usize, String)>>>,
}

impl Rounds<'_> {
    fn tell(&mut self, mine: &CallState) {
        let told = self.exchange.allgather(card::encode(mine)).and_then(|told| {
            let state = |bytes: &Vec<u8>| card::decode::<CallState>(bytes);
            let states: Option<Vec<CallState>> = told.iter().map(state).collect();
            states
                .ok_or_else(|| Error::Remote("a rank told something else than the state of a call of MPI".to_string()))
        });
        self.outcome = match told {
            Err(error) => Some(Err(error)),
            Ok(states) => {
                let goes_on = states.contains(&CallState::UnderWay);
                let failed = states.into_iter().enumerate().filter_map(|(rank, state)| match state {
                    CallState::Failed(why) => Some((rank, why)),
                    _ => None,
                });
                let failed: Vec<(usize, String)> = failed.collect();
                (!failed.is_empty() || !goes_on).then_some(Ok(failed))
            }
        };
    }

    /// Why nobody has to wait for the call any more.
    fn end(&self) -> Result<()> {
        match &self.outcome {
            None => Ok(()),
            Some(Err(error)) => Err(error.clone()),
            Some(Ok(failed)) => Err(remote(failed)),
        }
    }
}

fn remote(failed: &[(usize, String)]) -> Error {
    let text = failed.first().map(|(rank, why)| format!("rank {rank}: {why}"));
    Error::Remote(text.unwrap_or_default())
}

/// Makes the call. `call` asks its argument about every [`ROUND`] while it waits for MPI, and ends with the error it gets.
/// Returns what this rank's call has returned and, if the call has failed anywhere, why: equally on all ranks. Fails if the
/// exchange does.
pub fn together<T>(
    exchange: &mut dyn Exchange,
    call: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<T>,
) -> Result<std::result::Result<T, Error>> {
    let mut rounds = Rounds { exchange, outcome: None };
    let result = call(&mut || {
        rounds.tell(&CallState::UnderWay);
        rounds.end()
    });
    let mine = match &result {
        Ok(_) => CallState::Returned,
        Err(error) => CallState::Failed(error.text().to_string()),
    };
    let failed = loop {
        match rounds.outcome.take() {
            Some(outcome) => break outcome?,
            None => rounds.tell(&mine),
        }
    };
    match failed.is_empty() {
        true => Ok(result),
        false => Ok(Err(remote(&failed))),
    }
}
