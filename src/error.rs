//! The one error type of the library, and the only place that turns an error into an NCCL result code.
#![forbid(unsafe_code)]

use std::fmt;

/// What every fallible function of the library returns.
pub type Result<T> = std::result::Result<T, Error>;

/// The same of what lies on the way of each short call: it fits two registers, and needs no copies from function to function.
pub type ShortResult<T> = std::result::Result<T, Box<Error>>;

/// Why a call failed. The kinds are NCCL's result codes; the text says what happened, on which rank, in which call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The GPU's driver refused something, or reports a failure.
    Device(String),
    /// The operating system refused something.
    System(String),
    /// A bug in Strata: an invariant does not hold.
    Internal(String),
    /// An argument has no meaning (a null pointer, an unknown type, a rank that does not exist).
    InvalidArgument(String),
    /// The call is not allowed here or now.
    InvalidUsage(String),
    /// Another rank died, left, or reported an error.
    Remote(String),
    /// The operation goes on in the background.
    InProgress,
    /// A rank did not answer within the configured time.
    Timeout(String),
}

/// Bytes of a text between two places whose lines are known.
const STRIDE: usize = 1 << 12;

/// The lines of a text, so that errors can name them. Made in one pass; a place is then found without another.
#[derive(Debug)]
pub struct Lines<'a> {
    text: &'a [u8],
    /// How many lines end before each multiple of [`STRIDE`].
    ended: Vec<usize>,
}

fn line_ends(bytes: &[u8]) -> usize {
    #[cfg(test)]
    tests::COUNTED.with(|counted| counted.set(counted.get() + bytes.len()));
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

impl Lines<'_> {
    /// The lines of a text.
    pub fn of(text: &str) -> Lines<'_> {
        let count = |ended: &mut usize, stride: &[u8]| {
            let before = *ended;
            *ended += line_ends(stride);
            Some(before)
        };
        // One more than there are full strides: a place may be the end of the text.
        let text = text.as_bytes();
        let ended = text.chunks(STRIDE).chain([&b""[..]]).scan(0, count).collect();
        Lines { text, ended }
    }

    /// The line, counted from 1, of a place in the text.
    pub fn at(&self, place: usize) -> usize {
        let place = place.min(self.text.len());
        let stride = place / STRIDE;
        1 + self.ended[stride] + line_ends(&self.text[stride * STRIDE..place])
    }
}

/// `ncclResult_t` as a number.
pub type Code = i32;

/// `ncclSuccess`.
pub const SUCCESS: Code = 0;
/// One past the largest `ncclResult_t`.
pub const NUM_RESULTS: Code = 9;

impl Error {
    /// The `ncclResult_t` for this error.
    pub fn code(&self) -> Code {
        match self {
            Error::Device(_) => 1,
            Error::System(_) => 2,
            Error::Internal(_) => 3,
            Error::InvalidArgument(_) => 4,
            Error::InvalidUsage(_) => 5,
            Error::Remote(_) => 6,
            Error::InProgress => 7,
            Error::Timeout(_) => 8,
        }
    }

    /// The error that a library of the same interface tells by this number.
    pub fn of_code(code: Code, text: String) -> Error {
        match code {
            1 => Error::Device(text),
            2 => Error::System(text),
            4 => Error::InvalidArgument(text),
            5 => Error::InvalidUsage(text),
            6 => Error::Remote(text),
            7 => Error::InProgress,
            8 => Error::Timeout(text),
            _ => Error::Internal(text),
        }
    }

    /// The text, without the kind.
    pub fn text(&self) -> &str {
        match self {
            Error::InProgress => "operation in progress",
            Error::Device(text)
            | Error::System(text)
            | Error::Internal(text)
            | Error::InvalidArgument(text)
            | Error::InvalidUsage(text)
            | Error::Remote(text)
            | Error::Timeout(text) => text,
        }
    }

    /// A [`Error::System`] from the last operating-system error.
    pub fn last_os(doing: &str) -> Error {
        Error::System(format!("{doing}: {}", std::io::Error::last_os_error()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Error {}

impl From<Box<Error>> for Error {
    fn from(error: Box<Error>) -> Error {
        *error
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        Error::System(error.to_string())
    }
}

/// `1 rank`, `2 ranks`: a number and what is counted, for texts.
pub fn counted(number: usize, what: &str) -> String {
    let ending = match (number, what.ends_with("ss")) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{number} {what}{ending}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// Bytes that this thread has looked at for line ends.
        pub static COUNTED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn a_place_has_its_line_wherever_it_is() {
        for text in [String::new(), "\n".repeat(STRIDE), "ab\n".repeat(STRIDE), "x".repeat(2 * STRIDE) + "\ny"] {
            let lines = Lines::of(&text);
            for place in 0..text.len() + 2 {
                let before = &text.as_bytes()[..place.min(text.len())];
                assert_eq!(lines.at(place), 1 + before.iter().filter(|&&byte| byte == b'\n').count(), "{place}");
            }
        }
    }

    #[test]
    fn what_is_counted_has_its_plural() {
        assert_eq!(counted(1, "rank"), "1 rank");
        assert_eq!(counted(0, "node"), "0 nodes");
        assert_eq!(counted(3, "process"), "3 processes");
    }

    #[test]
    fn every_kind_has_its_nccl_code() {
        let text = String::new;
        let kinds = [
            Error::Device(text()),
            Error::System(text()),
            Error::Internal(text()),
            Error::InvalidArgument(text()),
            Error::InvalidUsage(text()),
            Error::Remote(text()),
            Error::InProgress,
            Error::Timeout(text()),
        ];
        let codes: Vec<Code> = kinds.iter().map(Error::code).collect();
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
