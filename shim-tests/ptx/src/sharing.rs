//! Which thread wrote and read each byte of a launch, and which loads a value comes from.

use std::collections::HashMap;

/// Bytes of a page of notes.
const PAGE: u64 = 4096;
/// Stands for several readers.
const SEVERAL: u32 = u32::MAX;

/// The number of a thread in the order of a launch, from 1; 0 is none.
pub type Number = u32;

#[derive(Debug, Clone, Copy, Default)]
struct Note {
    writer: Number,
    reader: Number,
}

/// Two threads that use a byte in a way that has no order: the byte, the other thread if it is one, and what it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict {
    /// The byte's address.
    pub address: u64,
    /// The other thread.
    pub other: Option<Number>,
    /// Whether the other thread wrote.
    pub wrote: bool,
}

/// The notes of one launch.
#[derive(Debug, Default)]
pub struct Notes {
    pages: HashMap<u64, Box<[Note; PAGE as usize]>>,
}

impl Notes {
    fn each(
        &mut self,
        address: u64,
        bytes: u64,
        mut f: impl FnMut(&mut Note) -> Option<(Number, bool)>,
    ) -> Result<(), Conflict> {
        // Aligned accesses do not reach over the end of a page.
        let page = self.pages.entry(address / PAGE).or_insert_with(|| Box::new([Note::default(); PAGE as usize]));
        for at in address..address + bytes {
            if let Some((other, wrote)) = f(&mut page[(at % PAGE) as usize]) {
                return Err(Conflict { address: at, other: Some(other).filter(|other| *other != SEVERAL), wrote });
            }
        }
        Ok(())
    }

    /// A thread writes.
    pub fn write(&mut self, thread: Number, address: u64, bytes: u64) -> Result<(), Conflict> {
        self.each(address, bytes, |note| {
            if note.writer != 0 && note.writer != thread {
                return Some((note.writer, true));
            }
            if note.reader != 0 && note.reader != thread {
                return Some((note.reader, false));
            }
            note.writer = thread;
            None
        })
    }

    /// A thread has read, and uses it.
    pub fn read(&mut self, thread: Number, address: u64, bytes: u64) -> Result<(), Conflict> {
        self.each(address, bytes, |note| {
            if note.writer != 0 && note.writer != thread {
                return Some((note.writer, true));
            }
            note.reader = if note.reader == 0 || note.reader == thread { thread } else { SEVERAL };
            None
        })
    }
}

/// Where a value comes from: nothing that was loaded, or a node of [`Origins`].
pub type Origin = u32;

#[derive(Debug, Clone, Copy)]
enum Node {
    /// Bytes that were loaded.
    Load(u64, u64),
    /// Two others.
    Both(Origin, Origin),
    /// It has been told already.
    Told,
}

/// Where the values of one thread come from.
#[derive(Debug, Default)]
pub struct Origins {
    nodes: Vec<Node>,
    stack: Vec<Origin>,
}

impl Origins {
    /// Forgets all.
    pub fn clear(&mut self) {
        self.nodes.clear();
    }

    fn node(&mut self, node: Node) -> Origin {
        self.nodes.push(node);
        self.nodes.len() as Origin
    }

    /// A load's value.
    pub fn load(&mut self, address: u64, bytes: u64) -> Origin {
        self.node(Node::Load(address, bytes))
    }

    /// A value made of two.
    pub fn join(&mut self, a: Origin, b: Origin) -> Origin {
        match (a, b) {
            (0, one) | (one, 0) => one,
            (a, b) if a == b => a,
            (a, b) => self.node(Node::Both(a, b)),
        }
    }

    /// Calls `f` with every load that a value comes from and that was not told before.
    pub fn tell<E>(&mut self, origin: Origin, mut f: impl FnMut(u64, u64) -> Result<(), E>) -> Result<(), E> {
        if origin == 0 {
            return Ok(());
        }
        self.stack.push(origin);
        while let Some(origin) = self.stack.pop() {
            match std::mem::replace(&mut self.nodes[origin as usize - 1], Node::Told) {
                Node::Load(address, bytes) => f(address, bytes)?,
                Node::Both(a, b) => self.stack.extend([a, b]),
                Node::Told => {}
            }
        }
        Ok(())
    }
}
