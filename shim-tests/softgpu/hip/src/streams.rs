//! Streams, events, waiting, and capture.
#![allow(non_snake_case)]

use crate::devices::current;
use softgpu::capture::{self, Graph, Mode, GRAPHS};
use softgpu::copies::note_blocking;
use softgpu::entry::{element, put};
use softgpu::event;
use softgpu::fault::{Result, INVALID_HANDLE, INVALID_VALUE};
use softgpu::memory::check_word;
use softgpu::stream::{self, Stream};
use softgpu::work::{HostFunction, Until, Work};
use std::ffi::{c_char, c_void};
use std::sync::Arc;

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

fn on(stream: usize) -> Result<Arc<Stream>> {
    stream::find(stream, &current()?)
}

fn create(out: *mut usize, flags: u32, priority: i32) -> Result {
    if flags > NON_BLOCKING {
        return Err(INVALID_VALUE);
    }
    put(out, stream::create(&current()?, flags & NON_BLOCKING == 0, priority.clamp(-1, 1)))
}

softgpu::exports! { any_time:
    fn hipStreamCreate(stream: *mut usize) { create(stream, 0, 0) }
    fn hipStreamCreateWithFlags(stream: *mut usize, flags: u32) { create(stream, flags, 0) }
    fn hipStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) { create(stream, flags, priority) }
    fn hipStreamDestroy(stream: usize) { stream::destroy(stream) }
    fn hipStreamSynchronize(stream: usize) {
        let stream = on(stream)?;
        note_blocking();
        stream::synchronize(&stream)
    }
    fn hipStreamQuery(stream: usize) { stream::query(&on(stream)?) }
    fn hipStreamWaitEvent(stream: usize, event: usize, flags: u32) {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        event::find(event)?.hold(&on(stream)?)
    }
    fn hipStreamGetDevice(stream: usize, device: *mut i32) { put(device, on(stream)?.context.device) }
    fn hipStreamGetFlags(stream: usize, flags: *mut u32) { put(flags, u32::from(!on(stream)?.blocking)) }
    fn hipStreamGetPriority(stream: usize, priority: *mut i32) { put(priority, on(stream)?.priority) }
    fn hipStreamIsCapturing(stream: usize, status: *mut i32) {
        let stream = on(stream)?;
        if stream.context.is_legacy(&stream) {
            capture::forbid_asking_legacy(&stream.context)?;
        }
        put(status, stream.capture().map_or(0, |capture| capture.status()))
    }
    fn hipStreamBeginCapture(stream: usize, mode: i32) { capture::begin(&on(stream)?, Mode::of(mode)?) }
    fn hipStreamEndCapture(stream: usize, graph: *mut usize) {
        put(graph, 0)?;
        put(graph, capture::end(&on(stream)?)?)
    }
    fn hipThreadExchangeStreamCaptureMode(mode: *mut i32) {
        let before = capture::exchange_mode(Mode::of(element(mode, 0)?)?);
        put(mode, before as i32)
    }
    fn hipGraphInstantiate(
        exec: *mut usize,
        graph: usize,
        _error_node: *mut usize,
        _log: *mut c_char,
        _log_bytes: usize,
    ) {
        put(exec, Graph::find(graph)?.instantiate())
    }
    fn hipGraphLaunch(exec: usize, stream: usize) { on(stream)?.submit(Work::Graph(Graph::find_ready(exec)?)).map(drop) }
    fn hipGraphExecDestroy(exec: usize) {
        Graph::find_ready(exec)?;
        GRAPHS.remove(exec).map(drop).ok_or(INVALID_HANDLE)
    }
    fn hipGraphDestroy(graph: usize) {
        Graph::find(graph)?;
        GRAPHS.remove(graph).map(drop).ok_or(INVALID_HANDLE)
    }
    fn hipLaunchHostFunc(stream: usize, function: Option<extern "C" fn(*mut c_void)>, argument: *mut c_void) {
        let function = function.ok_or(INVALID_VALUE)?;
        on(stream)?.submit(Work::Host(HostFunction { function, argument: argument as usize })).map(drop)
    }
    fn hipStreamWaitValue32(stream: usize, address: u64, value: u32, flags: u32, mask: u32) {
        check_word(address)?;
        on(stream)?.submit(Work::WaitValue { address, value, mask, until: Until::of(flags)? }).map(drop)
    }
    fn hipStreamWriteValue32(stream: usize, address: u64, value: u32, _flags: u32) {
        check_word(address)?;
        on(stream)?.submit(Work::WriteValue { address, value }).map(drop)
    }
    fn hipEventCreate(event: *mut usize) { put(event, event::create(&current()?, true)) }
    fn hipEventCreateWithFlags(event: *mut usize, flags: u32) {
        put(event, event::create(&current()?, flags & DISABLE_TIMING == 0))
    }
    fn hipEventDestroy(event: usize) { event::destroy(event) }
    fn hipEventRecord(event: usize, stream: usize) { event::find(event)?.record(&on(stream)?) }
    fn hipEventQuery(event: usize) { event::find(event)?.query() }
    fn hipEventSynchronize(event: usize) {
        note_blocking();
        event::find(event)?.synchronize()
    }
}
