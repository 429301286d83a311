//! Providers: libraries that carry out whole collectives, where a call or a tuning table has them do so.
//!
//! MPI is one ([`super::mpi`]), plugins are others ([`plugin`]); both are a [`ProviderKind`], opened for a rank of a communicator as
//! a [`CollectiveProvider`]. A communicator has a provider on all its ranks or on none: the ranks tell each other what came of it, and
//! which calls each one's library takes. One call runs at a time, in the communicator's order, so all ranks give a provider the same
//! calls in the same order.
//!
//! A provider gets buffers in one piece. What lies in several, or in place where the library has another convention, goes through
//! memory of ours; what an average divides by is divided here. Where blocks differ in size, a provider gets their counts and places.
//! Of an all-to-all, a gather and a scatter no rank knows all of them: a rank that has more than the provider takes fails the
//! communicator, and so the call on all ranks.

mod buffers;
mod facts;
pub mod plugin;

pub use buffers::BlockList;
pub use facts::{CommProviders, MostBytes, ProvidedKind, ProviderFacts, ProviderSet, MOST_PROVIDERS};

use super::mpi::MpiCollectives;
use super::shm::wakeup::Wakeups;
use super::{card, Exchange, NodeCall, Site};
use crate::config::Config;
use crate::device::host;
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{Bytes, DeviceRegion, InProcess, OnDevice, Region};
use crate::plan::Collective;
use crate::topo::Rank;
use buffers::{block_bytes, is_in_place, is_in_place_among, ProviderBuffer};
use facts::TableRuns;
use std::fmt;
use std::sync::Arc;

/// The name of MPI's own collectives.
pub const MPI: &str = "mpi";
/// The setting that names none.
const NONE: &str = "none";

/// How a call comes to a provider.
#[derive(Debug, Clone, Copy)]
pub struct Provision<'a, Space: 'static = InProcess> {
    /// The provider's name.
    pub name: &'a str,
    /// The type of the call's elements.
    pub dtype: DataType,
    /// Where blocks differ in size: the send and the receive buffer, which are empty where the call stands for several.
    pub uneven: Option<[Bytes<'static, Space>; 2]>,
}

impl<'a> Provision<'a, OnDevice> {
    /// The same, with bytes that this process reads and writes.
    ///
    /// # Safety
    /// As of [`DeviceRegion::in_process`], for both buffers.
    pub unsafe fn in_process(self) -> Provision<'a> {
        let Provision { name, dtype, uneven } = self;
        // SAFETY: the bytes must be ones that whoever gets them knows to use; because the caller promises it.
        let in_process = |buffer: DeviceRegion| unsafe { buffer.in_process() };
        let uneven = uneven.map(|buffers| buffers.map(in_process));
        Provision { name, dtype, uneven }
    }
}

/// The blocks of a rank's buffers in a call in which they differ in size. A list has an entry for each block of the buffer: for each
/// rank, or one, or none where the rank has no such buffer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnevenBlocks {
    /// Of what is sent.
    pub send: BlockList,
    /// Of the result.
    pub recv: BlockList,
}

/// One rank's part of a call.
#[derive(Debug, Clone)]
pub struct ProviderCall {
    /// What is done.
    pub collective: Collective,
    /// The root, where there is one (else rank 0).
    pub root: Rank,
    /// What is sent; empty where the rank sends nothing, and of a broadcast on all ranks but the root, where it is `recv`.
    pub send: Region,
    /// Where the result goes; empty where the rank gets none.
    pub recv: Region,
    /// Elements of a block; 0 where they differ.
    pub count: usize,
    /// The blocks, where they differ in size. Lists stay valid while somebody holds them.
    pub blocks: Option<Arc<UnevenBlocks>>,
    /// The type of elements.
    pub dtype: DataType,
    /// What a reduction does; none where data only moves.
    pub operator: Option<Operator>,
    /// Whether `send` and `recv` overlap as NCCL's in-place convention says.
    pub in_place: bool,
}

/// A library that does whole collectives, open for one rank of one communicator. No function waits for other ranks. Dropping it
/// closes it.
pub trait CollectiveProvider: Send + fmt::Debug {
    /// Begins a call; none other is under way. Its memory stays as it is until the call has ended, or been cancelled.
    fn start(&mut self, call: &ProviderCall) -> Result<()>;

    /// Makes progress; whether the call has ended.
    fn test(&mut self) -> Result<bool>;

    /// Whether it does this collective in place by NCCL's convention.
    fn takes_in_place(&self, _collective: Collective) -> bool {
        true
    }

    /// The farthest place in a buffer, in elements, at which a block may begin where blocks differ in size; none where they must
    /// follow one another.
    fn farthest_place(&self, _collective: Collective) -> Option<u64> {
        Some(u64::MAX)
    }

    /// Whether the rank is woken when a call ends. Else it looks often.
    fn wakes(&self) -> bool {
        false
    }

    /// Whether a thread of this process carries its calls out, which wants a processor while the rank waits.
    fn has_thread(&self) -> bool {
        false
    }

    /// Where it wakes: whether there may be something to see that no test has seen.
    fn has_news(&self) -> bool {
        false
    }

    /// Gives the call up. Afterwards no memory of it is touched any more, and nothing is begun.
    fn cancel(&mut self);
}

/// A library that does whole collectives.
pub trait ProviderKind {
    /// Its name, as far as this rank knows it.
    fn name(&self) -> String;

    /// Opens it for a rank. All ranks call it together; all have opened it then, or none has, and all know why.
    fn open(
        &self,
        site: &Site<'_>,
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<std::result::Result<Opened, Refused>>;
}

/// One that some rank cannot use; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Its name.
    pub name: String,
    /// Which rank, and why.
    pub why: String,
}

/// A provider that a rank has opened.
pub struct Opened {
    /// Its name.
    pub name: String,
    /// What it does.
    pub provider: Box<dyn CollectiveProvider>,
    /// Which calls it takes.
    pub most: MostBytes,
}

/// One that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedProvider {
    /// `mpi`, or the path of a plugin.
    pub what: String,
    /// Whether there is no communicator where a rank lacks it; else it is left out there.
    pub required: bool,
}

/// The providers that a text of the setting names; the error says what is wrong with it.
pub fn wanted(text: &str) -> std::result::Result<Vec<WantedProvider>, String> {
    let mut wanted: Vec<WantedProvider> = Vec::new();
    for name in text.split(',').map(str::trim).filter(|_| text != NONE) {
        let wrong = |what: &str| Err(format!("STRATA_PROVIDERS={text}: {what}"));
        let (what, required) = name.strip_suffix('!').map_or((name, false), |name| (name, true));
        match what {
            "" => return wrong("a name is empty"),
            MPI => {}
            path if path.contains('/') => {}
            other => return wrong(&format!("{other} is neither mpi nor the path of a plugin, which has a / in it")),
        }
        if wanted.iter().any(|known| known.what == what) {
            return wrong(&format!("{what} is named twice"));
        }
        wanted.push(WantedProvider { what: what.to_string(), required });
    }
    match wanted.len() <= MOST_PROVIDERS {
        true => Ok(wanted),
        false => Err(format!("STRATA_PROVIDERS={text}: there may be {MOST_PROVIDERS}")),
    }
}

/// For people and the command: the names of the providers that settings name, by the plugins of this machine, each with what has to
/// be in `STRATA_PROVIDERS` for it.
pub fn names(config: &Config) -> Vec<(String, String)> {
    let named = |wanted: WantedProvider| (kind_of(&wanted.what).name(), wanted.what);
    wanted(&config.providers).unwrap_or_default().into_iter().map(named).collect()
}

fn kind_of(what: &str) -> Box<dyn ProviderKind> {
    match what {
        MPI => Box::new(MpiCollectives),
        path => Box::new(plugin::PluginKind::new(path)),
    }
}

/// Opens the providers that rank 0's settings name. All ranks call it together and know the same of them afterwards. One that some
/// rank lacks is left out on all, or is an error where it is required.
pub fn open(
    site: &Site<'_>,
    wakeups: &Arc<Wakeups>,
    exchange: &mut dyn Exchange,
) -> Result<(Providers, CommProviders)> {
    let mut known = CommProviders::default();
    let mut providers = Providers::new(site.me);
    for WantedProvider { what, required } in wanted(&site.config.providers).map_err(Error::InvalidUsage)? {
        let opened = kind_of(&what).open(site, wakeups, exchange)?.and_then(|opened| match known.place(&opened.name) {
            Some(_) => Err(Refused { why: "there is another provider of this name".to_string(), name: opened.name }),
            None => Ok(opened),
        });
        match opened {
            Ok(Opened { name, provider, most }) => {
                let most = agree(most, exchange)?;
                providers.all.push(OpenProvider { name: name.clone(), provider, most: most.clone() });
                known.all.push(ProviderFacts { name, most });
            }
            Err(Refused { why, .. }) if required => {
                let setting = &site.config.providers;
                return Err(Error::InvalidUsage(format!(
                    "STRATA_PROVIDERS={setting}: {what} cannot be used: {why}; without the ! it would be left out"
                )));
            }
            Err(Refused { name, why }) => known.left_out.push((name, why)),
        }
    }
    Ok((providers, known))
}

/// What all ranks' libraries take.
fn agree(mut most: MostBytes, exchange: &mut dyn Exchange) -> Result<MostBytes> {
    for (rank, bytes) in exchange.allgather(card::encode(&most.runs()))?.iter().enumerate() {
        let theirs = card::decode::<TableRuns>(bytes).and_then(|runs| MostBytes::from_runs(&runs));
        most.least(&theirs.ok_or_else(|| {
            Error::Remote(format!("rank {rank} told something else than which calls its provider takes"))
        })?);
    }
    Ok(most)
}

/// The call that is under way.
#[derive(Debug)]
struct Running {
    token: Token,
    place: usize,
    send: ProviderBuffer,
    recv: ProviderBuffer,
    /// Where the results go.
    results: Vec<Region>,
    dtype: DataType,
    divisor: u64,
}

/// A provider that is open.
#[derive(Debug)]
struct OpenProvider {
    name: String,
    provider: Box<dyn CollectiveProvider>,
    /// What all ranks' libraries take.
    most: MostBytes,
}

/// The providers of one rank of one communicator.
#[derive(Debug)]
pub struct Providers {
    me: Rank,
    all: Vec<OpenProvider>,
    running: Option<Running>,
}

impl Providers {
    fn new(me: Rank) -> Providers {
        Providers { me, all: Vec::new(), running: None }
    }

    /// None.
    pub fn none() -> Providers {
        Providers::new(Rank(0))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Has a provider begin a call. `Busy` while another one runs.
    pub fn start(&mut self, token: Token, by: Provision<'_>, call: NodeCall<'_>) -> Result<Started> {
        if self.running.is_some() {
            return Ok(Started::Busy);
        }
        self.check(&by, &call)?;
        let Provision { name, dtype, uneven } = by;
        let place = self.place(name)?;
        let NodeCall { collective, root, src, dst, combine, .. } = call;
        let (mut send, mut recv, blocks) = match uneven {
            None => (ProviderBuffer::of(src.regions())?, ProviderBuffer::of(dst.regions())?, None),
            Some(buffers) => self.uneven(place, (dtype, buffers), call).map_err(|error| failed(name, error))?,
        };
        send.gather(src.regions());
        let block_bytes = block_bytes(src, dst);
        let buffers = (send.whole, recv.whole);
        let mut in_place = match &blocks {
            None => is_in_place(collective, self.me, buffers, block_bytes),
            Some(blocks) => is_in_place_among(collective, self.me, buffers, blocks, dtype.size()),
        };
        if in_place && !self.all[place].provider.takes_in_place(collective) {
            // The smaller of the two goes through memory of ours.
            match collective {
                Collective::ReduceScatter | Collective::Scatter => recv = ProviderBuffer::staged(recv.whole.len())?,
                _ => {
                    let staged = ProviderBuffer::staged(send.whole.len())?;
                    staged.whole.copy_from(send.whole);
                    send = staged;
                }
            }
            in_place = false;
        }
        if collective == Collective::Broadcast {
            // One buffer, which the root has filled.
            if !send.whole.is_empty() {
                recv.whole.copy_from(send.whole);
                send = ProviderBuffer { whole: recv.whole, staging: None };
            }
            in_place = false;
        }
        let call = ProviderCall {
            collective,
            root: Rank::from_index(root),
            send: send.whole,
            recv: recv.whole,
            count: if blocks.is_some() { 0 } else { block_bytes / dtype.size() },
            blocks: blocks.map(Arc::new),
            dtype,
            operator: combine.map(|combine| combine.operator),
            in_place,
        };
        self.all[place].provider.start(&call).map_err(|error| failed(name, error))?;
        let divisor = combine.map_or(1, |combine| combine.divisor);
        let results = dst.regions().to_vec();
        self.running = Some(Running { token, place, send, recv, results, dtype, divisor });
        Ok(Started::Pending)
    }

    fn place(&self, name: &str) -> Result<usize> {
        let place = self.all.iter().position(|known| known.name == name);
        place.ok_or_else(|| {
            Error::InvalidUsage(format!("provider {name} is not open on the communicator of this carrier"))
        })
    }

    /// An error where blocks differ in size and this rank has more than the provider takes, which not all ranks know beforehand.
    pub fn check<Space>(&self, by: &Provision<'_, Space>, call: &NodeCall<'_, Space>) -> Result<()> {
        let Provision { name, dtype, uneven } = by;
        let most = &self.all[self.place(name)?].most;
        if uneven.is_none() {
            return Ok(());
        }
        let (collective, operator) = (call.collective, call.combine.map(|combine| combine.operator));
        let most = most.get(ProvidedKind { collective, dtype: *dtype, operator, uneven: true });
        let bytes = call.src.bytes().max(call.dst.bytes()) as u64;
        if bytes <= most {
            return Ok(());
        }
        let (what, me) = (collective.name(), self.me);
        let text = format!(
            "{what} of blocks of different sizes: rank {me} has {bytes} bytes, and {most} are the most that it takes"
        );
        Err(failed(name, Error::InvalidUsage(text)))
    }

    /// The memory of a call whose blocks differ in size, as the provider at this place gets it.
    fn uneven(
        &self,
        place: usize,
        (dtype, [input, output]): (DataType, [Region; 2]),
        call: NodeCall<'_>,
    ) -> Result<(ProviderBuffer, ProviderBuffer, Option<UnevenBlocks>)> {
        let NodeCall { collective, src, dst, .. } = call;
        let farthest = self.all[place].provider.farthest_place(collective);
        let (send, sent) = ProviderBuffer::of_blocks(src, (input, dtype.size()), farthest)?;
        let (recv, received) = ProviderBuffer::of_blocks(dst, (output, dtype.size()), farthest)?;
        Ok((send, recv, Some(UnevenBlocks { send: sent, recv: received })))
    }

    /// Makes progress with the call that is under way; its token once it has ended.
    pub fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        let Some(running) = &self.running else { return Ok(()) };
        let OpenProvider { name, provider, .. } = &mut self.all[running.place];
        if !provider.test().map_err(|error| failed(name, error))? {
            return Ok(());
        }
        let Some(Running { token, recv, results, dtype, divisor, .. }) = self.running.take() else { return Ok(()) };
        recv.scatter(&results);
        for result in results.iter().filter(|_| divisor != 1) {
            host::divide(dtype, divisor, *result, *result);
        }
        done.push(token);
        Ok(())
    }

    /// Whether a call is under way whose end wakes nobody.
    pub fn must_be_polled(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !self.all[running.place].provider.wakes())
    }

    /// Whether a call is under way that a thread of this process carries out.
    pub fn has_thread(&self) -> bool {
        self.running.as_ref().is_some_and(|running| self.all[running.place].provider.has_thread())
    }

    /// Whether a poll may show something.
    pub fn has_news(&self) -> bool {
        self.running.as_ref().is_some_and(|running| self.all[running.place].provider.has_news())
    }

    /// Gives the call up that is under way; no provider begins another one.
    pub fn cancel(&mut self) {
        self.all.iter_mut().for_each(|open| open.provider.cancel());
        if let Some(Running { send, recv, .. }) = self.running.take() {
            // A library that cannot cancel may hold addresses for good.
            std::mem::forget((send.staging, recv.staging));
        }
    }

    /// Closes all.
    pub fn close(&mut self) {
        self.all.clear();
    }
}

/// An error, with the provider's name.
fn failed(name: &str, error: Error) -> Error {
    let text = format!("provider {name}: {}", error.text());
    match error {
        Error::Remote(_) => Error::Remote(text),
        Error::InvalidUsage(_) => Error::InvalidUsage(text),
        Error::Timeout(_) => Error::Timeout(text),
        _ => Error::System(text),
    }
}

#[cfg(test)]
mod tests;
