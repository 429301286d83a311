//! The service of a process: one thread with one listening socket, for all its communicators.
//!
//! It holds the [rendezvous](super::rendezvous) in which the ranks of a communicator come together, keeps the [links](crate::health::failure_detector) by which
//! they notice that one has died, and answers, however busy the process is, how its ranks are. It starts when first
//! needed, blocks on nobody, and trusts nobody without the secret of the room or communicator spoken of.
#![forbid(unsafe_code)]

use super::protocol::Credentials;
use super::reactor::{Reactor, ServiceCommand};
use crate::error::{Error, Result};
use crate::fork::{PerProcess, Unshared};
use crate::process::{above_standard, thread};
use crate::sync::{fence, locked};
use crate::topo::interface::{self, Filter, Interface};
use crate::topo::machine::Machine;
use crate::topo::nics;
use crate::transport::Departure;
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted: all ranks of a large communicator come at once.
const BACKLOG: i32 = 4096;

/// How long [`Service::settle`] waits for the service, which itself waits less for the others.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);
/// How long a rank that has made a communicator waits for the others' sockets to take their answers. Only a frozen rank's
/// do not, and then only long ones.
pub(super) const FLUSH_LIMIT: Duration = Duration::from_secs(10);

/// Where a process's service listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ServiceAddr(pub SocketAddr);

impl ServiceAddr {
    /// Bytes of the encoded form.
    pub const BYTES: usize = 20;

    /// As bytes, to be sent to other ranks.
    pub fn encode(&self) -> [u8; ServiceAddr::BYTES] {
        let mut bytes = [0; ServiceAddr::BYTES];
        bytes[2..4].copy_from_slice(&self.0.port().to_be_bytes());
        match self.0.ip() {
            IpAddr::V4(addr) => {
                bytes[0] = 4;
                bytes[4..8].copy_from_slice(&addr.octets());
            }
            IpAddr::V6(addr) => {
                bytes[0] = 6;
                bytes[4..20].copy_from_slice(&addr.octets());
            }
        }
        bytes
    }

    /// From bytes another rank has sent; `None` when they are no address. A link-local address is taken to be on the
    /// link that this process uses itself.
    pub fn decode(bytes: &[u8]) -> Option<ServiceAddr> {
        let bytes: &[u8; ServiceAddr::BYTES] = bytes.try_into().ok()?;
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        let addr = &bytes[4..];
        match bytes[0] {
            4 => Some(ServiceAddr(SocketAddr::from(([addr[0], addr[1], addr[2], addr[3]], port)))),
            6 => {
                let addr = Ipv6Addr::from(<[u8; 16]>::try_from(addr).ok()?);
                let mut found = SocketAddr::from((addr, port));
                if let (SocketAddr::V6(found), true) = (&mut found, interface::is_link_local(&addr)) {
                    found.set_scope_id(meeting_interface().map_or(0, |interface| interface.scope));
                }
                Some(ServiceAddr(found))
            }
            _ => None,
        }
    }
}

struct Handle {
    commands: Sender<ServiceCommand>,
    wake: UnixStream,
}

/// This process's service.
pub struct Service {
    addr: ServiceAddr,
    /// The fixed addresses at which it has listened.
    fixed: Mutex<Vec<SocketAddr>>,
    handle: Mutex<Handle>,
    thread: JoinHandle<()>,
}

static CURRENT: PerProcess<Mutex<Option<Arc<Service>>>> = PerProcess::new(Mutex::default);

/// What a signal handler has asked for last, and whether it is still to be done.
static CHORE: OnceLock<fn()> = OnceLock::new();
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// What has been asked for since this was looked at.
pub(super) fn take_chore() -> Option<fn()> {
    let is_asked = IS_ASKED.load(Ordering::Relaxed) && IS_ASKED.swap(false, Ordering::AcqRel);
    CHORE.get().copied().filter(|_| is_asked)
}

/// The address of this host at which ranks of other nodes find its processes.
pub fn meeting_interface() -> Result<Interface> {
    let (machine, filter) = (Machine::this()?, Filter::from_env());
    nics::meeting_address(&machine, &filter).ok_or_else(|| {
        let known: Vec<&str> = machine.nics.iter().map(|nic| nic.name()).collect();
        let text = format!("{} leaves no network interface with an address; there are", filter.text());
        Error::InvalidUsage(format!("{text} {}", known.join(", ")))
    })
}

/// A listening socket that does not block.
pub(super) fn listen(at: SocketAddr) -> Result<Unshared<TcpListener>> {
    crate::listen::listen(at, BACKLOG).map_err(|error| Error::System(format!("listening at {at}: {error}")))
}

/// Lets the process open as many connections as the administrator allows it: a root of many ranks needs one for each.
fn raise_descriptor_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current < limit.maximum {
        // A root of few ranks does without.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}

impl Service {
    /// The service of this process, started if there is none. After a fork the child gets its own.
    pub fn get() -> Result<Arc<Service>> {
        let mut current = CURRENT.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match &*current {
            Some(service) if !service.thread.is_finished() => Ok(service.clone()),
            _ => {
                let service = Arc::new(Service::start()?);
                *current = Some(service.clone());
                Ok(service)
            }
        }
    }

    /// The service of this process if there is one. Waits for no lock.
    pub fn running() -> Option<Arc<Service>> {
        let current = CURRENT.get().try_lock().ok()?;
        current.as_ref().filter(|service| !service.thread.is_finished()).cloned()
    }

    /// Has the service of this process, if there is one, do something soon on a thread of its own. It is for signal handlers:
    /// nothing is waited for, and no memory taken.
    pub fn ask(chore: fn()) {
        // There is only one.
        let _ = CHORE.set(chore);
        IS_ASKED.store(true, Ordering::Release);
        if let Some(service) = Service::running() {
            // Who holds the lock writes, too; and the service looks from time to time.
            if let Ok(handle) = service.handle.try_lock() {
                let _ = (&handle.wake).write(&[1]);
            }
        }
    }

    fn start() -> Result<Service> {
        raise_descriptor_limit();
        fence::prepare();
        let interface = meeting_interface()?;
        let listener = listen(interface.with_port(0))?;
        let addr = ServiceAddr(listener.local_addr()?);
        let (wake, woken) = UnixStream::pair()?;
        let (wake, woken) = (above_standard(wake), above_standard(woken));
        woken.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let (commands, obeyed) = channel();
        let reactor = Reactor::new(listener, addr, woken, obeyed);
        let thread = thread("strata-service").and_then(|thread| thread.spawn(move || reactor.run()));
        crate::info!("the bootstrap port is {} on {}", addr.0, interface.name);
        Ok(Service { addr, fixed: Mutex::default(), handle: Mutex::new(Handle { commands, wake }), thread: thread? })
    }

    /// Where it listens.
    pub fn addr(&self) -> ServiceAddr {
        self.addr
    }

    /// Opens a room for a unique id.
    pub fn open_room(&self, credentials: Credentials) -> Result<()> {
        self.command(ServiceCommand::Open(credentials))
    }

    /// Listens at a fixed address as well, until one communicator has come together there.
    pub fn listen_at(&self, addr: SocketAddr, credentials: Credentials, deadline: Instant) -> Result<()> {
        let (reply, replied) = channel();
        self.command(ServiceCommand::ListenAt(addr, credentials, reply))?;
        let rest = deadline.saturating_duration_since(Instant::now());
        replied.recv_timeout(rest).map_err(|_| Error::Timeout(format!("listening at {addr} took too long")))??;
        let mut fixed = crate::sync::locked(&self.fixed);
        if !fixed.contains(&addr) {
            fixed.push(addr);
        }
        Ok(())
    }

    /// Whether this is an address of it.
    pub fn is_at(&self, addr: ServiceAddr) -> bool {
        self.addr == addr || crate::sync::locked(&self.fixed).contains(&addr.0)
    }

    /// Keeps what a rank that has left owes to others until they have it, for `limit` at most.
    pub fn keep(&self, departure: Departure, limit: Duration) -> Result<()> {
        self.command(ServiceCommand::Keep(departure, Instant::now() + limit))
    }

    /// Waits until nothing is owed any more: for a process that ends.
    pub fn await_departures(&self) {
        let (done, over) = channel();
        if self.command(ServiceCommand::AwaitDepartures(done)).is_ok() {
            // It ends when the last departure's time is over, or with the service.
            let _ = over.recv();
        }
    }

    /// Waits until all who were told why their communicator could not be made have heard it; a second at most. A process
    /// that ends at once after a failure would take the word with it.
    pub fn settle(&self) {
        let (done, settled) = channel();
        if self.command(ServiceCommand::Settle(done)).is_ok() {
            // Longer nobody waits for those who may be frozen.
            let _ = settled.recv_timeout(SETTLE_PATIENCE);
        }
    }

    /// Waits until the system has all that this process's rooms have said to ranks, and everybody has left these rooms:
    /// [`FLUSH_LIMIT`] at most. A process that ends at once after a communicator was made would take the last word with it.
    pub fn flush(&self, rooms: Vec<u128>) {
        let (done, flushed) = channel();
        if self.command(ServiceCommand::Flush(rooms, done)).is_ok() {
            // The service's thread keeps to the limit, but may not get a processor in time.
            let _ = flushed.recv_timeout(2 * FLUSH_LIMIT);
        }
    }

    pub(crate) fn command(&self, command: ServiceCommand) -> Result<()> {
        let gone = || Error::Internal("the service's thread has ended".to_string());
        let mut handle = locked(&self.handle);
        handle.commands.send(command).map_err(|_| gone())?;
        match handle.wake.write(&[1]) {
            Ok(_) => Ok(()),
            // So many bytes are under way that the thread wakes in any case.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(gone()),
        }
    }
}
