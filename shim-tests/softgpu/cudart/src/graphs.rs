//! Capture and graphs.

use crate::calls::calls;
use crate::driver;
use std::ffi::c_void;

calls! { ready:
    fn cudaStreamIsCapturing(stream: usize, status: *mut i32) { driver::cuStreamIsCapturing(stream, status) }
    fn cudaStreamBeginCapture(stream: usize, mode: i32) { driver::cuStreamBeginCapture_v2(stream, mode) }
    fn cudaStreamEndCapture(stream: usize, graph: *mut usize) { driver::cuStreamEndCapture(stream, graph) }
    fn cudaStreamGetCaptureInfo(
        stream: usize,
        status: *mut i32,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut *const usize,
        edges: *mut *const c_void,
        count: *mut usize,
    ) {
        driver::cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count)
    }
    fn cudaStreamUpdateCaptureDependencies(
        stream: usize,
        nodes: *const usize,
        edges: *const c_void,
        count: usize,
        flags: u32,
    ) {
        driver::cuStreamUpdateCaptureDependencies_v2(stream, nodes, edges, count, flags)
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: *mut i32) { driver::cuThreadExchangeStreamCaptureMode(mode) }
    fn cudaGraphInstantiate(exec: *mut usize, graph: usize, flags: u64) {
        driver::cuGraphInstantiateWithFlags(exec, graph, flags)
    }
    fn cudaGraphInstantiateWithFlags(exec: *mut usize, graph: usize, flags: u64) {
        driver::cuGraphInstantiateWithFlags(exec, graph, flags)
    }
    fn cudaGraphLaunch(exec: usize, stream: usize) { driver::cuGraphLaunch(exec, stream) }
    fn cudaGraphExecDestroy(exec: usize) { driver::cuGraphExecDestroy(exec) }
    fn cudaGraphDestroy(graph: usize) { driver::cuGraphDestroy(graph) }
    fn cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        driver::cuGraphGetNodes(graph, nodes, count)
    }
    fn cudaGraphNodeGetDependencies(node: usize, nodes: *mut usize, edges: *mut c_void, count: *mut usize) {
        driver::cuGraphNodeGetDependencies_v2(node, nodes, edges, count)
    }
}
