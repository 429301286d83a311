//! What is so of the tree and of the built library as they lie there: the rules of the house, the gate, the documents, and
//! the C interface. No ranks but those of small C programs.

// What is not used here other test programs use.
#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;

mod abi;
mod book;
mod gate;
mod tidy;
