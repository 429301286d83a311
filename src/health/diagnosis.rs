//! Finding the ranks that everybody waits for.
//!
//! The services of the awaited ranks are asked, all at once; whoever is waiting names another, who is asked in turn.
//! A rank that is busy computing answers, because its service's thread does; a frozen one does not.
#![forbid(unsafe_code)]

use super::CallSummary;
use crate::bootstrap::connection::{until, Conn};
use crate::bootstrap::protocol::{Answer, Credentials, Frame};
use crate::bootstrap::rendezvous::name_ranks;
use crate::bootstrap::ServiceAddr;
use crate::log::Level;
use crate::topo::Rank;
use rustix::event::{poll, PollFd};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

/// Ranks named one by one; the rest are counted.
const NAMED: usize = 3;
/// Questions under way at the same time.
const AT_ONCE: usize = 256;

/// Who asks, and what it knows.
pub struct Inquiry<'a> {
    /// The communicator.
    pub comm: Credentials,
    /// Who asks.
    pub me: u32,
    /// The services of all ranks.
    pub members: &'a [ServiceAddr],
    /// Collectives the asking rank has begun: the last of them is the one that does not end.
    pub begun: u64,
    /// What it called as that.
    pub call: Option<CallSummary>,
    /// How many operations it had begun when it called a collective of no elements last.
    pub empty: Option<u64>,
}

/// What was found out about a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    Asked,
    Answer(Answer),
    Unknown,
    Refused,
}

/// Asks until everybody has answered or `grace` is over, and says who is to blame: a few here, all in the log.
pub fn diagnose(inquiry: &Inquiry<'_>, waiting_for: &[Rank], grace: Duration) -> String {
    let found = ask(inquiry, waiting_for, grace);
    crate::log::write(Level::Warn, &format!("who is waited for: {}", explain(inquiry, &found, usize::MAX)));
    explain(inquiry, &found, NAMED)
}

/// Whether somebody who is waited for has called something else, in words; or else why one of them has failed.
pub fn mismatch(inquiry: &Inquiry<'_>, waiting_for: &[Rank], grace: Duration) -> Option<String> {
    let found = ask(inquiry, waiting_for, grace);
    let words = other_calls(inquiry, &found).next();
    words.or_else(|| failures(&found).next())
}

/// Two ranks have called different things.
pub fn differs(number: u64, (me, ours): (u32, CallSummary), (other, theirs): (u32, CallSummary)) -> String {
    let (ours, theirs) = (ours.beside(theirs), theirs.beside(ours));
    format!("operation {number} is not the same on all ranks: rank {me} called {ours}, rank {other} called {theirs}")
}

/// A rank has called a collective of no elements where another one waits for it. It need not be a mistake: it is nothing to do, and the
/// operation may yet come.
pub fn calls_nothing(number: u64, (me, ours): (u32, CallSummary), (other, theirs): (u32, CallSummary)) -> String {
    format!("rank {other} called {theirs}, which is nothing to do, and nothing since; rank {me} is in operation {number}, {ours}")
}

fn empty_calls<'a>(inquiry: &'a Inquiry<'_>, found: &'a BTreeMap<u32, Found>) -> impl Iterator<Item = String> + 'a {
    let ours = inquiry.call.filter(|_| inquiry.empty.is_none_or(|after| after + 1 != inquiry.begun));
    found.iter().filter_map(move |(&rank, found)| match (found, ours) {
        (Found::Answer(answer), Some(ours)) => {
            Some(calls_nothing(inquiry.begun, (inquiry.me, ours), (rank, answer.empty_at(inquiry.begun)?)))
        }
        _ => None,
    })
}

fn other_calls<'a>(inquiry: &'a Inquiry<'_>, found: &'a BTreeMap<u32, Found>) -> impl Iterator<Item = String> + 'a {
    found.iter().filter_map(|(&rank, found)| match (found, inquiry.call) {
        (Found::Answer(Answer { call: Some(theirs), .. }), Some(ours)) if ours != *theirs => {
            Some(differs(inquiry.begun, (inquiry.me, ours), (rank, *theirs)))
        }
        _ => None,
    })
}

fn has_failed(rank: u32, answer: &Answer) -> String {
    format!("rank {rank} has failed: {}", answer.failure)
}

fn failures(found: &BTreeMap<u32, Found>) -> impl Iterator<Item = String> + '_ {
    found.iter().filter_map(|(rank, found)| match found {
        Found::Answer(answer) if !answer.failure.is_empty() => Some(has_failed(*rank, answer)),
        _ => None,
    })
}

fn ask(inquiry: &Inquiry<'_>, waiting_for: &[Rank], grace: Duration) -> BTreeMap<u32, Found> {
    let deadline = Instant::now() + grace;
    let mut found: BTreeMap<u32, Found> = BTreeMap::new();
    let mut queue: Vec<u32> = waiting_for.iter().map(|rank| rank.0).collect();
    let mut open: Vec<(u32, Conn)> = Vec::new();
    loop {
        while open.len() < AT_ONCE {
            let Some(rank) = queue.pop() else { break };
            if rank == inquiry.me || rank as usize >= inquiry.members.len() || found.contains_key(&rank) {
                continue;
            }
            found.insert(rank, Found::Asked);
            match Conn::dial(inquiry.members[rank as usize].0) {
                Ok(mut conn) => {
                    let query = Frame::Query { comm: inquiry.comm, rank, number: inquiry.begun, from: inquiry.me };
                    conn.send(query.encode().into());
                    open.push((rank, conn));
                }
                Err(error) => {
                    crate::info!("asking rank {rank}: {error}");
                }
            }
        }
        if open.is_empty() || Instant::now() >= deadline {
            break;
        }
        let mut fds: Vec<PollFd<'_>> =
            open.iter().map(|(_, conn)| PollFd::new(conn.stream(), conn.interest())).collect();
        // A failure to poll shows as silence until the deadline.
        let _ = poll(&mut fds, Some(&until(deadline, grace)));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut index = 0;
        open.retain_mut(|(rank, conn)| {
            index += 1;
            match ready[index - 1].then(|| hear(conn)).flatten() {
                None => true,
                Some(outcome) => {
                    if let Found::Answer(Answer { waiting_for: Some(next), .. }) = &outcome {
                        queue.push(*next);
                    }
                    found.insert(*rank, outcome);
                    false
                }
            }
        });
    }
    found
}

/// What a connection that is ready has to say, if it is complete.
fn hear(conn: &mut Conn) -> Option<Found> {
    let sent = conn.flush();
    let open = conn.receive();
    match conn.next_frame() {
        Ok(Some(Frame::Answer(answer))) => return Some(Found::Answer(answer)),
        Ok(Some(_)) | Err(_) => return Some(Found::Unknown),
        Ok(None) => {}
    }
    match (sent, open) {
        (Ok(()), Ok(true)) => None,
        (Err(error), _) | (_, Err(error)) if error.kind() == ErrorKind::ConnectionRefused => Some(Found::Refused),
        (Ok(()), Ok(false)) => Some(Found::Unknown),
        // It broke in another way: unreachable, as far as can be told.
        _ => Some(Found::Asked),
    }
}

fn explain(inquiry: &Inquiry<'_>, found: &BTreeMap<u32, Found>, named: usize) -> String {
    let mut silent = Vec::new();
    let mut gone = Vec::new();
    let mut behind: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let mut others = Vec::new();
    let mut waiting = Vec::new();
    for (&rank, found) in found {
        match found {
            Found::Asked => silent.push(rank),
            Found::Refused => gone.push(rank),
            Found::Unknown => others.push(format!("rank {rank} is alive but does not know the communicator")),
            Found::Answer(answer) if answer.left => {
                others.push(format!("rank {rank} has destroyed the communicator"));
            }
            Found::Answer(answer) if answer.aborted => others.push(format!("rank {rank} has aborted the communicator")),
            Found::Answer(answer) if !answer.failure.is_empty() => others.push(has_failed(rank, answer)),
            Found::Answer(answer) if answer.begun < inquiry.begun => behind.entry(answer.begun).or_default().push(rank),
            Found::Answer(answer) => waiting.push((rank, answer)),
        }
    }
    let mut culprits: Vec<String> =
        other_calls(inquiry, found).chain(empty_calls(inquiry, found)).take(named).collect();
    if !gone.is_empty() {
        culprits.push(format!("{} {} gone: the process has ended", name_ranks(&gone), plural(&gone, "is", "are")));
    }
    if !silent.is_empty() {
        let verb = plural(&silent, "does", "do");
        culprits.push(format!("{} {verb} not answer (frozen or unreachable)", name_ranks(&silent)));
    }
    for (begun, ranks) in &behind {
        let (are, have, they) =
            (plural(ranks, "is", "are"), plural(ranks, "has", "have"), plural(ranks, "it has", "they have"));
        culprits.push(format!(
            "{} {are} alive but {have} not joined operation {} ({they} begun {begun})",
            name_ranks(ranks),
            inquiry.begun
        ));
    }
    culprits.extend(others.into_iter().take(named));
    if culprits.is_empty() {
        culprits.extend(waiting.iter().take(named).map(|(rank, answer)| stuck(*rank, answer)));
    }
    if culprits.is_empty() {
        culprits.push("no rank was asked".to_string());
    }
    culprits.join("; ")
}

/// All are at the operation: whoever waits for whom is all that can be said.
fn stuck(rank: u32, answer: &Answer) -> String {
    let Answer { begun, finished, .. } = answer;
    match answer.waiting_for {
        Some(next) => format!("rank {rank} is in operation {begun} and waits for rank {next}"),
        None if finished < begun => format!("rank {rank} is in operation {begun} and waits for nobody"),
        None => format!("rank {rank} has finished all its {finished} operations"),
    }
}

fn plural<'a>(ranks: &[u32], one: &'a str, many: &'a str) -> &'a str {
    if ranks.len() == 1 {
        one
    } else {
        many
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(found: &[(u32, Found)]) -> String {
        let comm = Credentials { key: 1, secret: [0; 16] };
        let inquiry =
            Inquiry { comm, me: 0, members: &[], begun: 12, call: Some(CallSummary([4, 0])), empty: Some(10) };
        explain(&inquiry, &found.iter().cloned().collect(), NAMED)
    }

    fn answer(begun: u64, waiting_for: Option<u32>) -> Found {
        Found::Answer(Answer { begun, waiting_for, ..Answer::default() })
    }

    #[test]
    fn those_who_merely_wait_are_not_named_when_a_culprit_is_known() {
        let text = explained(&[(1, answer(12, Some(3))), (3, answer(11, None)), (5, Found::Asked)]);
        assert_eq!(
            text,
            "rank 5 does not answer (frozen or unreachable); \
             rank 3 is alive but has not joined operation 12 (it has begun 11)"
        );
    }

    #[test]
    fn several_ranks_of_one_kind_share_a_sentence() {
        let text = explained(&[(1, Found::Refused), (2, Found::Refused), (4, answer(0, None)), (5, answer(0, None))]);
        assert_eq!(
            text,
            "ranks 1, 2 are gone: the process has ended; \
             ranks 4, 5 are alive but have not joined operation 12 (they have begun 0)"
        );
    }

    #[test]
    fn who_called_something_else_is_named_first_with_both_calls() {
        let other = Answer { begun: 13, call: Some(CallSummary([5, 0])), ..Answer::default() };
        let same = Answer { begun: 12, call: Some(CallSummary([4, 0])), ..Answer::default() };
        let text = explained(&[(1, Found::Refused), (2, Found::Answer(other)), (3, Found::Answer(same))]);
        assert!(
            text.starts_with(
                "operation 12 is not the same on all ranks: rank 0 called all_reduce of 4 int8 (no operation), \
                 rank 2 called all_reduce of 5 int8 (no operation); rank 1 is gone"
            ),
            "{text}"
        );
    }

    #[test]
    fn who_called_no_elements_in_the_place_of_an_operation_is_named() {
        let empty =
            |after| Found::Answer(Answer { begun: 11, empty: Some((after, CallSummary([0, 0]))), ..Answer::default() });
        let text = explained(&[(1, empty(11)), (2, empty(10)), (3, answer(11, None))]);
        assert!(
            text.starts_with(
                "rank 1 called all_reduce of 0 int8 (no operation), which is nothing to do, and nothing since; \
                 rank 0 is in operation 12, all_reduce of 4 int8 (no operation); ranks 1-3 are alive"
            ),
            "{text}"
        );
        let comm = Credentials { key: 1, secret: [0; 16] };
        let call = Some(CallSummary([4, 0]));
        let same = Inquiry { comm, me: 0, members: &[], begun: 12, call, empty: Some(11) };
        assert_eq!(empty_calls(&same, &BTreeMap::from([(1, empty(11))])).next(), None, "all ranks called that");
    }

    #[test]
    fn who_calls_the_same_but_has_failed_says_why() {
        let failure = "operation 12 is not the same on all ranks: ...".to_string();
        let found = BTreeMap::from([(1, Found::Refused), (2, Found::Answer(Answer { failure, ..Answer::default() }))]);
        let words: Vec<String> = failures(&found).collect();
        assert_eq!(words, ["rank 2 has failed: operation 12 is not the same on all ranks: ..."]);
    }

    #[test]
    fn a_circle_is_told_as_it_is() {
        let text = explained(&[(1, answer(12, Some(2))), (2, answer(12, Some(1)))]);
        assert_eq!(
            text,
            "rank 1 is in operation 12 and waits for rank 2; rank 2 is in operation 12 and waits for rank 1"
        );
    }
}
