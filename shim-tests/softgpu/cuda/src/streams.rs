//! Streams, events, waiting, and capture.
#![allow(non_snake_case)]

use softgpu::capture::{self, Graph, Mode, GRAPHS};
use softgpu::context::current;
use softgpu::copies::note_blocking;
use softgpu::entry::{element, put, put_if_wanted};
use softgpu::event;
use softgpu::fault::{Result, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use softgpu::memory::check_word;
use softgpu::stream::{self, Stream};
use softgpu::work::{HostFunction, Until, Work};
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::Arc;

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

fn on(stream: usize) -> Result<Arc<Stream>> {
    stream::find(stream, &current()?)
}

/// A list that stays until the thread asks for the next one.
fn kept(nodes: Vec<usize>) -> *const usize {
    thread_local! {
        static KEPT: ManuallyDrop<RefCell<Vec<usize>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    }
    KEPT.with(|kept| {
        *kept.borrow_mut() = nodes;
        kept.borrow().as_ptr()
    })
}

/// Stores how many nodes there are, or as many nodes as there is room for.
fn put_some(out: *mut usize, count: *mut usize, nodes: &[usize]) -> Result {
    if out.is_null() {
        return put(count, nodes.len());
    }
    let room = element(count, 0)?;
    for index in 0..room {
        put(out.wrapping_add(index), nodes.get(index).copied().unwrap_or(0))?;
    }
    put(count, room.min(nodes.len()))
}

fn create(out: *mut usize, flags: u32, priority: i32) -> Result {
    if flags > NON_BLOCKING {
        return Err(INVALID_VALUE);
    }
    put(out, stream::create(&current()?, flags & NON_BLOCKING == 0, priority.clamp(-5, 0)))
}

softgpu::exports! { call:
    fn cuStreamCreate(stream: *mut usize, flags: u32) { create(stream, flags, 0) }
    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) { create(stream, flags, priority) }
    fn cuStreamDestroy_v2(stream: usize) { stream::destroy(stream) }
    fn cuStreamSynchronize(stream: usize) {
        let stream = on(stream)?;
        note_blocking();
        stream::synchronize(&stream)
    }
    fn cuStreamQuery(stream: usize) { stream::query(&on(stream)?) }
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32) {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        event::find(event)?.hold(&on(stream)?)
    }
    fn cuStreamGetCtx(stream: usize, context: *mut usize) { put(context, on(stream)?.context.handle) }
    fn cuStreamGetFlags(stream: usize, flags: *mut u32) { put(flags, u32::from(!on(stream)?.blocking)) }
    fn cuStreamGetPriority(stream: usize, priority: *mut i32) { put(priority, on(stream)?.priority) }
    fn cuStreamIsCapturing(stream: usize, status: *mut i32) {
        let stream = on(stream)?;
        if stream.context.is_legacy(&stream) {
            capture::forbid_asking_legacy(&stream.context)?;
        }
        put(status, stream.capture().map_or(0, |capture| capture.status()))
    }
    fn cuStreamBeginCapture_v2(stream: usize, mode: i32) { capture::begin(&on(stream)?, Mode::of(mode)?) }
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) {
        put(graph, 0)?;
        put(graph, capture::end(&on(stream)?)?)
    }
    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: *mut i32,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut *const usize,
        edges: *mut *const c_void,
        count: *mut usize,
    ) {
        let stream = on(stream)?;
        if stream.context.is_legacy(&stream) {
            capture::forbid_asking_legacy(&stream.context)?;
        }
        let capture = stream.capture();
        put(status, capture.as_ref().map_or(0, |capture| capture.status()))?;
        if let Some(capture) = capture {
            let (number, handle, front) = capture.info(&stream);
            put_if_wanted(id, number);
            put_if_wanted(graph, handle);
            put_if_wanted(edges, std::ptr::null());
            put_if_wanted(count, front.len());
            put_if_wanted(nodes, kept(front));
        }
        Ok(())
    }
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: usize,
        nodes: *const usize,
        _edges: *const c_void,
        count: usize,
        flags: u32,
    ) {
        let stream = on(stream)?;
        let capture = stream.capture().ok_or(INVALID_VALUE)?;
        let nodes = (0..count).map(|index| element(nodes, index)).collect::<Result<Vec<usize>>>()?;
        match flags {
            0 | 1 => capture.depend(&stream, &nodes, flags == 1),
            _ => Err(INVALID_VALUE),
        }
    }
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        put_some(nodes, count, &Graph::find(graph)?.nodes())
    }
    fn cuGraphNodeGetType(node: usize, kind: *mut u32) { put(kind, Graph::node(node)?.0) }
    fn cuGraphNodeGetDependencies_v2(node: usize, nodes: *mut usize, _edges: *mut c_void, count: *mut usize) {
        put_some(nodes, count, &Graph::node(node)?.1)
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut i32) {
        let before = capture::exchange_mode(Mode::of(element(mode, 0)?)?);
        put(mode, before as i32)
    }
    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: u64) {
        put(exec, Graph::find(graph)?.instantiate())
    }
    fn cuGraphLaunch(exec: usize, stream: usize) { on(stream)?.submit(Work::Graph(Graph::find_ready(exec)?)).map(drop) }
    fn cuGraphExecDestroy(exec: usize) {
        Graph::find_ready(exec)?;
        GRAPHS.remove(exec).map(drop).ok_or(INVALID_HANDLE)
    }
    fn cuGraphDestroy(graph: usize) {
        Graph::find(graph)?;
        GRAPHS.remove(graph).map(drop).ok_or(INVALID_HANDLE)
    }
    fn cuLaunchHostFunc(stream: usize, function: Option<extern "C" fn(*mut c_void)>, argument: *mut c_void) {
        let function = function.ok_or(INVALID_VALUE)?;
        on(stream)?.submit(Work::Host(HostFunction { function, argument: argument as usize })).map(drop)
    }
    fn cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        check_word(address)?;
        let work = Work::WaitValue { address, value, mask: u32::MAX, until: Until::of(flags)? };
        on(stream)?.submit(work).map(drop)
    }
    fn cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        check_word(address)?;
        on(stream)?.submit(Work::WriteValue { address, value }).map(drop)
    }
    fn cuEventCreate(event: *mut usize, flags: u32) {
        put(event, event::create(&current()?, flags & DISABLE_TIMING == 0))
    }
    fn cuEventDestroy_v2(event: usize) { event::destroy(event) }
    fn cuEventRecord(event: usize, stream: usize) { event::find(event)?.record(&on(stream)?) }
    fn cuEventRecordWithFlags(event: usize, stream: usize, flags: u32) {
        // 1: also in a capture the event is one of outside.
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        event::find(event)?.record(&on(stream)?)
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        put(milliseconds, event::find(end)?.milliseconds_after(&*event::find(start)?)?)
    }
    fn cuEventQuery(event: usize) {
        current()?;
        event::find(event)?.query()
    }
    fn cuEventSynchronize(event: usize) {
        current()?;
        note_blocking();
        event::find(event)?.synchronize()
    }
}
