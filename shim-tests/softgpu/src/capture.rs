//! Capture: work of streams that is written down instead of run, and graphs made of it.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::fault::{Result, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE};
use crate::fault::{CAPTURED_EVENT, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD};
use crate::fault::{INVALID_HANDLE, INVALID_VALUE};
use crate::handles::{self, Handles};
use crate::random::Random;
use crate::stream::Stream;
use crate::work::Work;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// What other calls a capture forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Unsafe calls on any thread.
    Global = 0,
    /// Unsafe calls on its own thread.
    ThreadLocal = 1,
    /// None.
    Relaxed = 2,
}

impl Mode {
    /// The mode of a number.
    pub fn of(number: i32) -> Result<Mode> {
        match number {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(INVALID_VALUE),
        }
    }
}

/// A capture that goes on.
pub struct Capture {
    mode: Mode,
    thread: ThreadId,
    context: Arc<Context>,
    /// The handle that its graph will have.
    graph: usize,
    notes: Mutex<Notes>,
}

struct Notes {
    nodes: Vec<Node>,
    /// The streams that take part, the first of which began, each with the nodes that come last on it.
    streams: Vec<(Arc<Stream>, Vec<usize>)>,
    is_invalid: bool,
    has_ended: bool,
}

#[derive(Clone)]
struct Node {
    handle: usize,
    work: Work,
    /// Nodes that come before it.
    after: Vec<usize>,
}

/// Work with its order.
pub struct Graph {
    nodes: Vec<Node>,
    /// Whether it is ready to be launched, and then not to be looked into.
    is_ready: bool,
}

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// Graphs, and graphs made ready to launch.
pub static GRAPHS: Handles<Graph> = Handles::empty();

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Sets what captures of others forbid on this thread, and tells what it was.
pub fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// Fails, and spoils the captures in whose way it is, if a call that might interfere with one may not be made now.
pub fn forbid_unsafe() -> Result {
    let mode = MODE.get();
    let me = thread::current().id();
    let in_the_way = |capture: &&Arc<Capture>| match mode {
        Mode::Relaxed => false,
        _ if capture.thread == me => capture.mode != Mode::Relaxed,
        _ => mode == Mode::Global && capture.mode == Mode::Global,
    };
    let captures = CAPTURES.lock().unwrap();
    let found: Vec<_> = captures.iter().filter(in_the_way).collect();
    found.iter().for_each(|capture| capture.invalidate());
    if found.is_empty() {
        Ok(())
    } else {
        Err(CAPTURE_UNSUPPORTED)
    }
}

/// Fails, and spoils the captures, if the legacy stream would have to synchronise with a stream that is captured.
pub fn forbid_legacy(context: &Arc<Context>) -> Result {
    let result = forbid_asking_legacy(context);
    if result.is_err() {
        CAPTURES
            .lock()
            .unwrap()
            .iter()
            .filter(|capture| capture.binds(context))
            .for_each(|capture| capture.invalidate());
    }
    result
}

/// Fails if the legacy stream would have to synchronise with a stream that is captured.
pub fn forbid_asking_legacy(context: &Arc<Context>) -> Result {
    if CAPTURES.lock().unwrap().iter().any(|capture| capture.binds(context)) {
        return Err(CAPTURE_IMPLICIT);
    }
    Ok(())
}

/// A captured stream was told to wait for something outside.
pub fn isolation(stream: &Arc<Stream>) -> Result {
    if let Some(capture) = stream.capture() {
        capture.invalidate();
    }
    Err(CAPTURE_ISOLATION)
}

/// Begins a capture on a stream.
pub fn begin(stream: &Arc<Stream>, mode: Mode) -> Result {
    if stream.context.is_legacy(stream) {
        return Err(CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(INVALID_VALUE);
    }
    let streams = vec![(stream.clone(), Vec::new())];
    let capture = Arc::new(Capture {
        mode,
        thread: thread::current().id(),
        context: stream.context.clone(),
        graph: handles::fresh(),
        notes: Mutex::new(Notes { nodes: Vec::new(), streams, is_invalid: false, has_ended: false }),
    });
    stream.set_capture(Some(capture.clone()));
    CAPTURES.lock().unwrap().push(capture);
    Ok(())
}

/// Ends the capture that a stream began; the handle of the graph.
pub fn end(stream: &Arc<Stream>) -> Result<usize> {
    let capture = stream.capture().ok_or(INVALID_VALUE)?;
    if !Arc::ptr_eq(&capture.notes.lock().unwrap().streams[0].0, stream) {
        return Err(CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
        return Err(CAPTURE_WRONG_THREAD);
    }
    // Before its notes are locked: others lock the list first.
    CAPTURES.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &capture));
    let mut notes = capture.notes.lock().unwrap();
    notes.has_ended = true;
    for (stream, _) in &notes.streams {
        stream.set_capture(None);
    }
    if notes.is_invalid {
        return Err(CAPTURE_INVALIDATED);
    }
    let before = notes.before(&notes.streams[0].1);
    if notes.streams.iter().any(|(_, front)| front.iter().any(|node| !before.contains(node))) {
        return Err(CAPTURE_UNJOINED);
    }
    GRAPHS.name(capture.graph, Arc::new(Graph { nodes: notes.nodes.clone(), is_ready: false }));
    Ok(capture.graph)
}

impl Notes {
    fn check(&self) -> Result {
        if self.is_invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        Ok(())
    }

    /// These nodes and all that come before them.
    fn before(&self, nodes: &[usize]) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = nodes.to_vec();
        while let Some(node) = open.pop() {
            if found.insert(node) {
                open.extend(&self.nodes[node].after);
            }
        }
        found
    }

    fn front_of(&mut self, stream: &Arc<Stream>) -> &mut Vec<usize> {
        let known = self.streams.iter().position(|(other, _)| Arc::ptr_eq(other, stream));
        let index = known.unwrap_or_else(|| {
            self.streams.push((stream.clone(), Vec::new()));
            self.streams.len() - 1
        });
        &mut self.streams[index].1
    }
}

impl Capture {
    /// Whether the legacy stream of the context would have to wait for it.
    fn binds(&self, context: &Arc<Context>) -> bool {
        let blocks = self.notes.lock().unwrap().streams.iter().any(|(stream, _)| stream.blocking);
        Arc::ptr_eq(&self.context, context) && blocks
    }

    /// What is captured cannot become a graph any more.
    pub fn invalidate(&self) {
        self.notes.lock().unwrap().is_invalid = true;
    }

    /// 1 while it goes on, 2 when it was spoilt: `CUstreamCaptureStatus`.
    pub fn status(&self) -> i32 {
        1 + i32::from(self.notes.lock().unwrap().is_invalid)
    }

    /// Writes work down.
    pub fn add(&self, stream: &Arc<Stream>, work: Work) -> Result {
        let mut notes = self.notes.lock().unwrap();
        notes.check()?;
        let index = notes.nodes.len();
        let after = std::mem::replace(notes.front_of(stream), vec![index]);
        notes.nodes.push(Node { handle: handles::fresh(), work, after });
        Ok(())
    }

    /// What a program may know of it: a number that no other has, its graph, and the nodes that come last on a stream.
    pub fn info(&self, stream: &Arc<Stream>) -> (u64, usize, Vec<usize>) {
        let mut notes = self.notes.lock().unwrap();
        let front = notes.front_of(stream).clone();
        (self.graph as u64, self.graph, front.into_iter().map(|node| notes.nodes[node].handle).collect())
    }

    /// What the next work on a stream comes after: these nodes, and what it comes after already unless it is replaced.
    pub fn depend(&self, stream: &Arc<Stream>, handles: &[usize], replaces: bool) -> Result {
        let mut notes = self.notes.lock().unwrap();
        notes.check()?;
        let found = |handle: &usize| notes.nodes.iter().position(|node| node.handle == *handle).ok_or(INVALID_VALUE);
        let nodes = handles.iter().map(found).collect::<Result<Vec<usize>>>()?;
        let front = notes.front_of(stream);
        if replaces {
            front.clear();
        }
        front.extend(nodes);
        front.sort_unstable();
        front.dedup();
        Ok(())
    }

    /// What comes last on a stream so far.
    pub fn front(&self, stream: &Arc<Stream>) -> Result<Vec<usize>> {
        let mut notes = self.notes.lock().unwrap();
        notes.check()?;
        Ok(notes.front_of(stream).clone())
    }

    /// A stream waits for an event of this capture, and so takes part in it.
    pub fn join(self: &Arc<Capture>, stream: &Arc<Stream>, nodes: &[usize]) -> Result {
        if let Some(other) = stream.capture().filter(|other| !Arc::ptr_eq(other, self)) {
            other.invalidate();
            self.invalidate();
            return Err(CAPTURE_MERGE);
        }
        let mut notes = self.notes.lock().unwrap();
        if notes.has_ended {
            return Err(CAPTURED_EVENT);
        }
        notes.check()?;
        if stream.context.is_legacy(stream) {
            notes.is_invalid = true;
            return Err(CAPTURE_IMPLICIT);
        }
        let front = notes.front_of(stream);
        for node in nodes {
            if !front.contains(node) {
                front.push(*node);
            }
        }
        stream.set_capture(Some(self.clone()));
        Ok(())
    }
}

impl Graph {
    /// The graph of a handle.
    pub fn find(handle: usize) -> Result<Arc<Graph>> {
        GRAPHS.get(handle).filter(|graph| !graph.is_ready).ok_or(INVALID_HANDLE)
    }

    /// The graph of a handle that is ready to be launched.
    pub fn find_ready(handle: usize) -> Result<Arc<Graph>> {
        GRAPHS.get(handle).filter(|graph| graph.is_ready).ok_or(INVALID_HANDLE)
    }

    /// The handles of its nodes.
    pub fn nodes(&self) -> Vec<usize> {
        self.nodes.iter().map(|node| node.handle).collect()
    }

    /// What a node does, by CUDA's number, and the nodes that come before it. The node's graph must be there.
    pub fn node(handle: usize) -> Result<(u32, Vec<usize>)> {
        let holds = |graph: &Graph| !graph.is_ready && graph.nodes.iter().any(|node| node.handle == handle);
        let graph = GRAPHS.find(holds).ok_or(INVALID_VALUE)?;
        let node = graph.nodes.iter().find(|node| node.handle == handle).ok_or(INVALID_VALUE)?;
        Ok((node.work.kind(), node.after.iter().map(|before| graph.nodes[*before].handle).collect()))
    }

    /// A copy with a handle of its own.
    pub fn instantiate(&self) -> usize {
        GRAPHS.add(Graph { nodes: self.nodes.clone(), is_ready: true })
    }

    /// Runs its work in some order that it allows.
    pub fn run(&self, stream: &Stream, random: &mut Random) -> Result {
        let mut open: Vec<usize> = (0..self.nodes.len()).collect();
        let mut done = BTreeSet::new();
        while !open.is_empty() {
            stream.context.check()?;
            let ready = |at: &usize| self.nodes[open[*at]].after.iter().all(|node| done.contains(node));
            let choices: Vec<usize> = (0..open.len()).filter(ready).collect();
            let node = open.remove(choices[random.below(choices.len() as u64) as usize]);
            stream.dally(random);
            self.nodes[node].work.run(stream, random)?;
            done.insert(node);
        }
        Ok(())
    }
}
