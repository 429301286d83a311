//! Placeholder, replaced by its author.
#![forbid(unsafe_code)]
