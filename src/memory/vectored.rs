//! Sends and receives on sockets straight from and to regions, without a Rust reference to their bytes.

use super::Bytes;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Regions that one call handles; the rest is left for the next call.
const MAX_REGIONS: usize = 64;

type Parts = smallvec::SmallVec<[libc::iovec; MAX_REGIONS]>;

fn add(parts: &mut Parts, regions: &[Bytes<'_>]) {
    let part = |region: &Bytes<'_>| libc::iovec { iov_base: region.as_ptr().cast(), iov_len: region.len() };
    let room = MAX_REGIONS - parts.len();
    parts.extend(regions.iter().take(room).map(part));
}

fn message(parts: &mut Parts) -> libc::msghdr {
    // SAFETY: all bytes zero must be a valid value; because a msghdr is pointers and lengths, none of them a reference.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message
}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// A message of at most so many bytes goes through one buffer: `send` of that takes less time than `sendmsg` of several.
const GATHERED: usize = 1024;

/// Sends as many bytes of the slices and then of the regions, in order, as the socket takes now. Never raises SIGPIPE,
/// never blocks.
pub fn send(socket: impl AsFd, slices: [&[u8]; 2], regions: &[Bytes<'_>]) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let total = slices[0].len() + slices[1].len() + regions.iter().map(Bytes::len).sum::<usize>();
    if total <= GATHERED {
        let mut bytes = [0u8; GATHERED];
        let (mut rest, _) = bytes.split_at_mut(total);
        for slice in slices {
            let (place, others) = rest.split_at_mut(slice.len());
            place.copy_from_slice(slice);
            rest = others;
        }
        for region in regions {
            let (place, others) = rest.split_at_mut(region.len());
            region.read(place);
            rest = others;
        }
        // SAFETY: the bytes must be readable for the call; because they are this function's own.
        return moved(unsafe { libc::send(socket.as_fd().as_raw_fd(), bytes.as_ptr().cast(), total, flags) });
    }
    let slice = |bytes: &&[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut parts = Parts::new();
    parts.extend(slices.iter().map(slice));
    add(&mut parts, regions);
    let message = message(&mut parts);
    // SAFETY: the parts must be readable for the call; because the slices are borrowed until its end, and regions are
    // readable by the promise of `Bytes::new`.
    moved(unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &message, flags) })
}

/// Receives into the regions, in order, as many bytes as the socket has now. Zero means that the peer has closed.
pub fn receive(socket: impl AsFd, regions: &[Bytes<'_>]) -> io::Result<usize> {
    if let [region] = regions {
        let (start, len) = (region.as_ptr().cast(), region.len());
        // SAFETY: the bytes must be writable for the call; because a region's are, by the promise of `Bytes::new`.
        return moved(unsafe { libc::recv(socket.as_fd().as_raw_fd(), start, len, libc::MSG_DONTWAIT) });
    }
    let mut parts = Parts::new();
    add(&mut parts, regions);
    let mut message = message(&mut parts);
    // SAFETY: the parts must be writable for the call; because regions are, by the promise of `Bytes::new`.
    moved(unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Bytes sent on the socket that the other side's kernel has not yet acknowledged.
pub fn unacknowledged(socket: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request must get a pointer to an int; because TIOCOUTQ writes one int, and this is one.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    moved(result as isize).map(|_| bytes.max(0) as usize)
}

/// What a TCP connection has delivered so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes that the other side's system has acknowledged.
    pub bytes: u64,
    /// Microseconds in which bytes were under way and the other side had room for more.
    pub busy_us: u64,
}

impl Delivery {
    /// What came since an earlier one.
    pub fn since(self, earlier: Delivery) -> Delivery {
        Delivery {
            bytes: self.bytes.saturating_sub(earlier.bytes),
            busy_us: self.busy_us.saturating_sub(earlier.busy_us),
        }
    }
}

/// The first bytes of the kernel's `struct tcp_info`, which only grows: libc's has the fields of 2005.
const TCP_INFO: usize = 192;
/// Where in it these are.
const BYTES_ACKED: usize = 120;
const BUSY_TIME: usize = 168;
const RWND_LIMITED: usize = 176;

/// What the connection has delivered, where the kernel counts that (since 4.10).
pub fn delivered(socket: impl AsFd) -> Option<Delivery> {
    let mut info = [0u8; TCP_INFO];
    let mut len = TCP_INFO as libc::socklen_t;
    let (place, fd) = (info.as_mut_ptr().cast(), socket.as_fd().as_raw_fd());
    // SAFETY: the option must get a place of the length that it is told; because `len` is the array's.
    let result = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, place, &mut len) };
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| info[at + byte]));
    let busy_us = word(BUSY_TIME).saturating_sub(word(RWND_LIMITED));
    (result == 0 && len as usize >= RWND_LIMITED + 8).then(|| Delivery { bytes: word(BYTES_ACKED), busy_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn the_system_counts_what_a_connection_has_delivered() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut theirs = listener.accept().unwrap().0;
        let before = delivered(&ours).expect("Linux since 4.10");
        ours.write_all(&[1; 50_000]).unwrap();
        theirs.read_exact(&mut [0; 50_000]).unwrap();
        let begun = std::time::Instant::now();
        while unacknowledged(&ours).unwrap() > 0 {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "nothing is acknowledged");
            std::thread::yield_now();
        }
        let now = delivered(&ours).unwrap().since(before);
        assert_eq!(now.bytes, 50_000);
        assert!(now.busy_us < 10_000_000, "{now:?}");
        assert_eq!(delivered(std::io::stdin()), None, "no connection");
    }
}
