//! The one error type of the library, and the only place that turns an error into an NCCL result code.
#![forbid(unsafe_code)]

use std::fmt;

/// What every fallible function of the library returns.
pub type Result<T> = std::result::Result<T, Error>;

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
mod tests {
    use super::*;

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
