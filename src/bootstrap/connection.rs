//! A connection that never blocks: frames in, frames out.
//!
//! The service's thread drives many of them; a client drives one, with [`wait`](Conn::wait).
#![forbid(unsafe_code)]

use super::protocol::{Frame, Malformed, FIRST_FRAME_LIMIT, HEAD_BYTES};
use crate::error::Error;
use crate::fork::{self, Unshared};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{sockopt, AddressFamily, SocketFlags, SocketType};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a waiting client may take to see that it was interrupted.
const INTERRUPT_SLICE: Duration = Duration::from_millis(20);
/// How much one connection may read before others have their turn.
const TURN_BYTES: usize = 1 << 18;
/// How much is read at a time.
const READ_BYTES: usize = 1 << 14;

/// One TCP connection with what has arrived and what is still to be sent.
pub struct Conn {
    stream: Unshared<TcpStream>,
    inbox: Vec<u8>,
    outbox: VecDeque<(Arc<[u8]>, usize)>,
    connecting: bool,
    /// Why nothing can be sent any more: the system's number and the kind.
    failed: Option<(Option<i32>, ErrorKind)>,
    /// The longest frame it may receive.
    pub limit: usize,
}

/// Why no frame came.
#[derive(Debug)]
pub enum NoFrame {
    /// The time is over.
    Late,
    /// The wait was ended.
    Interrupted(Interruption),
    /// The other side closed, or the connection broke.
    Gone(io::Error),
}

/// Why a wait is ended before its time.
#[derive(Debug)]
pub enum Interruption {
    /// The caller gave up.
    Cancelled,
    /// What is waited for will not come.
    Hopeless(Error),
}

/// Whether a wait is to be ended before its time; asked every few milliseconds.
pub trait Interrupt: Sync {
    /// The reason, from the moment on at which there is one.
    fn interrupted(&self) -> Option<Interruption>;
}

impl Interrupt for AtomicBool {
    fn interrupted(&self) -> Option<Interruption> {
        self.load(Ordering::Acquire).then_some(Interruption::Cancelled)
    }
}

/// The time until `deadline`, as `poll` wants it, but no more than `most`.
pub fn until(deadline: Instant, most: Duration) -> Timespec {
    let rest = deadline.saturating_duration_since(Instant::now()).min(most);
    // Rounded up, so that a loop does not spin through the last millisecond.
    let rest = rest + Duration::from_micros(500);
    Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: i64::from(rest.subsec_nanos()) }
}

impl Conn {
    /// Takes over an accepted connection.
    pub fn accepted(stream: Unshared<TcpStream>) -> io::Result<Conn> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Conn {
            stream,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            connecting: false,
            failed: None,
            limit: FIRST_FRAME_LIMIT,
        })
    }

    /// Begins to connect; what is sent meanwhile goes out as soon as the connection stands.
    pub fn dial(addr: SocketAddr) -> io::Result<Conn> {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = {
            let hold = fork::hold();
            let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
            Unshared::new(TcpStream::from(socket), &hold)
        };
        // Its port may be another one's while its end keeps it for a minute.
        sockopt::set_socket_reuseaddr(&*stream, true)?;
        Conn::connect(stream, addr)
    }

    fn connect(stream: Unshared<TcpStream>, addr: SocketAddr) -> io::Result<Conn> {
        match rustix::net::connect(&*stream, &addr) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        stream.set_nodelay(true)?;
        Ok(Conn {
            stream,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            connecting: true,
            failed: None,
            limit: FIRST_FRAME_LIMIT,
        })
    }

    /// Lets the kernel find out within half a minute that the other host has vanished.
    pub fn keep_alive(&self) -> io::Result<()> {
        sockopt::set_socket_keepalive(&*self.stream, true)?;
        sockopt::set_tcp_keepidle(&*self.stream, Duration::from_secs(10))?;
        sockopt::set_tcp_keepintvl(&*self.stream, Duration::from_secs(5))?;
        sockopt::set_tcp_keepcnt(&*self.stream, 4)?;
        Ok(())
    }

    /// The stream, to be polled.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// What to poll it for.
    pub fn interest(&self) -> PollFlags {
        if self.connecting {
            PollFlags::OUT
        } else if self.outbox.is_empty() {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        }
    }

    /// Whether everything sent has been handed to the kernel.
    pub fn flushed(&self) -> bool {
        !self.connecting && self.outbox.is_empty()
    }

    /// Whether something sent has not been handed to the kernel, on a connection that stands.
    pub fn has_output(&self) -> bool {
        !self.connecting && !self.outbox.is_empty()
    }

    /// Queues an encoded frame. The bytes may be shared between many connections.
    pub fn send(&mut self, bytes: Arc<[u8]>) {
        self.outbox.push_back((bytes, 0));
    }

    /// Sends what the kernel takes. Call it when the stream is writable, or at any time.
    pub fn flush(&mut self) -> io::Result<()> {
        if let Some((code, kind)) = self.failed {
            // The system tells an error once, and whoever met it first may have passed it over.
            return Err(code.map_or_else(|| kind.into(), io::Error::from_raw_os_error));
        }
        let outcome = self.flush_now();
        if let Err(error) = &outcome {
            self.failed = Some((error.raw_os_error(), error.kind()));
        }
        outcome
    }

    fn flush_now(&mut self) -> io::Result<()> {
        if self.connecting {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            match self.stream.peer_addr() {
                // Where nobody listens yet the system may give a connection the port that it is to: it has met itself then.
                Ok(peer) if self.stream.local_addr()? == peer => return Err(ErrorKind::ConnectionRefused.into()),
                Ok(_) => self.connecting = false,
                Err(error) if error.kind() == ErrorKind::NotConnected => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        while let Some((bytes, sent)) = self.outbox.front_mut() {
            match (&*self.stream).write(&bytes[*sent..]) {
                Ok(written) => *sent += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if *sent == bytes.len() {
                self.outbox.pop_front();
            }
        }
        Ok(())
    }

    /// Reads what is there, up to a turn's worth. `Ok(false)`: the other side has closed.
    pub fn receive(&mut self) -> io::Result<bool> {
        if self.connecting {
            return Ok(true);
        }
        let mut turn = 0;
        while turn < TURN_BYTES && self.inbox.len() < HEAD_BYTES + self.limit {
            // Not by way of the stack: this runs on the program's thread, whose stack may be small.
            let have = self.inbox.len();
            self.inbox.resize(have + READ_BYTES, 0);
            let read = (&*self.stream).read(&mut self.inbox[have..]);
            self.inbox.truncate(have + read.as_ref().map_or(0, |&got| got));
            match read {
                Ok(0) => return Ok(false),
                Ok(got) => turn += got,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.inbox.is_empty() {
            // A service has many connections, and most of them are silent.
            self.inbox = Vec::new();
        }
        Ok(true)
    }

    /// The next frame that has arrived whole.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some((frame, used)) = Frame::decode(&self.inbox, self.limit)? else { return Ok(None) };
        if used == self.inbox.len() {
            // A large round must not keep its memory until the communicator ends.
            self.inbox = Vec::new();
        } else {
            self.inbox.drain(..used);
        }
        Ok(Some(frame))
    }

    /// Forgets what has arrived.
    pub fn discard(&mut self) {
        self.inbox.clear();
    }

    /// Says that nothing more will be sent. The other side can still read what was.
    pub fn shut(&self) {
        // A connection that has ended already cannot be shut.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Sends what is queued and waits for a frame, until `deadline` or until it is interrupted.
    pub fn wait(&mut self, deadline: Instant, interrupt: &dyn Interrupt) -> Result<Frame, NoFrame> {
        loop {
            match self.next_frame() {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(Malformed(why)) => return Err(NoFrame::Gone(io::Error::new(ErrorKind::InvalidData, why))),
            }
            let mut fds = [PollFd::new(&*self.stream, self.interest())];
            match poll(&mut fds, Some(&until(deadline, INTERRUPT_SLICE))) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(NoFrame::Gone(error.into())),
            }
            let ready = !fds[0].revents().is_empty();
            // What has come counts, however late this thread is.
            if !ready {
                if let Some(why) = interrupt.interrupted() {
                    return Err(NoFrame::Interrupted(why));
                }
                if Instant::now() >= deadline {
                    return Err(NoFrame::Late);
                }
            }
            // What the other side said last is read before a failure to send is believed.
            let flushed = if ready { self.flush() } else { Ok(()) };
            match self.receive() {
                Ok(true) if flushed.is_ok() => {}
                Ok(_) | Err(_) if matches!(Frame::decode(&self.inbox, self.limit), Ok(Some(_))) => {}
                Ok(_) => {
                    let closed = || io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection");
                    return Err(NoFrame::Gone(flushed.err().unwrap_or_else(closed)));
                }
                Err(error) => return Err(NoFrame::Gone(error)),
            }
        }
    }

    /// Waits until everything is handed to the kernel, or until `deadline`. For a last word; failures do not matter.
    pub fn drain(&mut self, deadline: Instant) {
        while self.flush().is_ok() && !self.flushed() && Instant::now() < deadline {
            let mut fds = [PollFd::new(&*self.stream, PollFlags::OUT)];
            if poll(&mut fds, Some(&until(deadline, INTERRUPT_SLICE))).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{poll, PollFd};
    use std::net::TcpListener;

    #[test]
    fn a_connection_that_meets_itself_is_refused() {
        let hold = fork::hold();
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let stream = TcpStream::from(socket);
        let own = stream.local_addr().unwrap();
        let stream = Unshared::new(stream, &hold);
        drop(hold);
        let mut conn = Conn::connect(stream, own).unwrap();
        assert_eq!(conn.stream.peer_addr().unwrap(), own, "the system does so");
        conn.send(Arc::from(*b"word"));
        assert_eq!(conn.flush().expect_err("it has met itself").kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn an_error_that_was_passed_over_is_met_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut conn = Conn::dial(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        // Data that nobody reads makes the other side's end a reset.
        other.write_all(b"unread").unwrap();
        (&*conn.stream).write_all(b"unread").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        drop(other);
        let broken = PollFlags::ERR | PollFlags::HUP;
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let mut fds = [PollFd::new(conn.stream(), PollFlags::empty())];
            poll(&mut fds, Some(&until(end, Duration::from_secs(10)))).unwrap();
            if fds[0].revents().intersects(broken) {
                break;
            }
            assert!(Instant::now() < end, "the reset does not arrive");
        }
        conn.connecting = true;
        let first = conn.flush().expect_err("the connection is reset");
        assert_eq!(first.kind(), ErrorKind::ConnectionReset);
        let again = conn.flush().expect_err("it still is");
        assert_eq!(again.raw_os_error(), first.raw_os_error());
    }
}
