/* The soft CUDA runtime, and what of the soft driver only it or PyTorch needs, by NVIDIA's own headers: layouts and
 * signatures are theirs. Prints nothing; ends with 1 and the line where something is not as documented. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define IS(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)
#define OK(call) IS((call) == cudaSuccess)

static void devices(void) {
    struct cudaDeviceProp properties;
    int count, device, value;
    OK(cudaGetDeviceCount(&count));
    IS(count == 8);
    OK(cudaGetDevice(&device));
    IS(device == 0);
    OK(cudaGetDeviceProperties(&properties, 3));
    IS(strcmp(properties.name, "Soft GPU") == 0 && memcmp(properties.uuid.bytes, "soft GPU", 8) == 0);
    IS(properties.totalGlobalMem == 16ull << 30 && properties.major == 8 && properties.minor == 0);
    IS(properties.warpSize == 32 && properties.maxThreadsPerBlock == 1024 && properties.maxThreadsDim[2] == 64);
    IS(properties.maxGridSize[0] == 2147483647 && properties.maxGridSize[1] == 65535);
    IS(properties.sharedMemPerBlock == 48 << 10 && properties.multiProcessorCount == 108);
    IS(properties.pciBusID == 4 && properties.pciDeviceID == 0 && properties.pciDomainID == 0);
    IS(properties.maxThreadsPerMultiProcessor == 2048 && properties.asyncEngineCount == 3);
    IS(properties.unifiedAddressing == 1 && properties.canMapHostMemory == 1 && properties.concurrentKernels == 1);
    IS(properties.streamPrioritiesSupported == 1 && properties.managedMemory == 1);
    IS(properties.hostRegisterSupported == 1 && properties.memoryPoolsSupported == 1);
    IS(properties.integrated == 0 && properties.cooperativeLaunch == 0 && properties.ECCEnabled == 0);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrPciBusId, 5));
    IS(value == 6);
    IS(cudaSetDevice(8) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice);
    IS(cudaGetLastError() == cudaSuccess);
    IS(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
    OK(cudaSetDevice(2));
    OK(cudaGetDevice(&device));
    IS(device == 2);
}

static void pointers(void) {
    struct cudaPointerAttributes of;
    void *device, *pinned, *managed;
    int pageable;
    OK(cudaMalloc(&device, 100));
    OK(cudaMallocHost(&pinned, 100));
    OK(cudaMallocManaged(&managed, 100, cudaMemAttachGlobal));
    OK(cudaPointerGetAttributes(&of, (char *)device + 7));
    IS(of.type == cudaMemoryTypeDevice && of.device == 2 && of.devicePointer == (char *)device + 7 && !of.hostPointer);
    OK(cudaPointerGetAttributes(&of, pinned));
    IS(of.type == cudaMemoryTypeHost && of.hostPointer == pinned && of.devicePointer == pinned);
    OK(cudaPointerGetAttributes(&of, managed));
    IS(of.type == cudaMemoryTypeManaged);
    OK(cudaPointerGetAttributes(&of, &pageable));
    IS(of.type == cudaMemoryTypeUnregistered && of.hostPointer == &pageable && !of.devicePointer);
    OK(cudaFree(device));
    OK(cudaFree(NULL));
    OK(cudaFree(managed));
    OK(cudaFreeHost(pinned));
    OK(cudaMalloc(&device, 0));
    IS(!device);
    IS(cudaMalloc(&device, 1ull << 50) == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
}

/* Elements of each width, and a column of them; nothing beyond. */
static void fills(void) {
    enum { COUNT = 7 };
    unsigned short halves[COUNT + 1];
    unsigned words[COUNT + 1], column[2 * COUNT];
    void *device;
    OK(cudaMalloc(&device, 1 << 10));
    OK(cudaMemset(device, 0xff, 1 << 10));
    IS(cuMemsetD16Async((CUdeviceptr)device, 0x3f80, COUNT, NULL) == CUDA_SUCCESS);
    OK(cudaMemcpy(halves, device, sizeof halves, cudaMemcpyDefault));
    for (int at = 0; at < COUNT; at++) IS(halves[at] == 0x3f80);
    IS(halves[COUNT] == 0xffff);
    IS(cuMemsetD32Async((CUdeviceptr)device, 0x12345678, COUNT, NULL) == CUDA_SUCCESS);
    OK(cudaMemcpy(words, device, sizeof words, cudaMemcpyDefault));
    for (int at = 0; at < COUNT; at++) IS(words[at] == 0x12345678);
    IS(words[COUNT] == 0xffffffff);
    OK(cudaMemset(device, 0xff, 1 << 10));
    IS(cuMemsetD2D32Async((CUdeviceptr)device, 8, 0x12345678, 1, COUNT, NULL) == CUDA_SUCCESS);
    OK(cudaMemcpy(column, device, sizeof column, cudaMemcpyDefault));
    for (int at = 0; at < 2 * COUNT; at++) IS(column[at] == (at % 2 ? 0xffffffff : 0x12345678));
    IS(cuMemsetD16Async((CUdeviceptr)device + 1, 0, 1, NULL) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemsetD32Async((CUdeviceptr)device, 0, ~0ull / 2, NULL) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemsetD2D32Async((CUdeviceptr)device, 1ull << 62, 0, 1, 9, NULL) == CUDA_ERROR_INVALID_VALUE);
    OK(cudaFree(device));
}

/* Rows of a matrix into one with longer rows, and back. */
static void copies(void) {
    enum { ROWS = 50, WIDTH = 30, PITCH = 64 };
    unsigned char host[ROWS * WIDTH], back[ROWS * WIDTH] = {0};
    void *device;
    cudaStream_t stream;
    for (int at = 0; at < ROWS * WIDTH; at++) host[at] = at * 7;
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1));
    OK(cudaMalloc(&device, ROWS * PITCH));
    OK(cudaMemsetAsync(device, 0, ROWS * PITCH, stream));
    OK(cudaMemcpy2DAsync(device, PITCH, host, WIDTH, WIDTH, ROWS, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpy2DAsync(back, WIDTH, device, PITCH, WIDTH, ROWS, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    IS(memcmp(host, back, sizeof host) == 0);
    IS(cudaMemcpy2DAsync(device, 8, host, WIDTH, WIDTH, ROWS, cudaMemcpyDefault, stream) == cudaErrorInvalidValue);
    IS(cudaMemcpyAsync(device, host, 1, (enum cudaMemcpyKind)9, stream) == cudaErrorInvalidMemcpyDirection);
    OK(cudaFree(device));
    OK(cudaStreamDestroy(stream));
}

/* The time from one event to another, and what has none. */
static void times(void) {
    cudaEvent_t start, end, untimed;
    cudaStream_t stream;
    float milliseconds = -1;
    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    IS(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(start, stream));
    OK(cudaEventSynchronize(start));
    usleep(20000);
    OK(cudaEventRecord(end, stream));
    OK(cudaEventRecord(untimed, stream));
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&milliseconds, start, end));
    IS(milliseconds >= 20 && milliseconds < 20000);
    OK(cudaEventElapsedTime(&milliseconds, end, start));
    IS(milliseconds <= -20);
    IS(cudaEventElapsedTime(&milliseconds, start, untimed) == cudaErrorInvalidResourceHandle);
    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    OK(cudaEventDestroy(untimed));
    OK(cudaStreamDestroy(stream));
    cudaGetLastError();
}

static void count_up(cudaStream_t stream, cudaError_t status, void *counter) {
    (void)stream;
    *(int *)counter += status == cudaSuccess;
}

/* What a capture says of itself, and the nodes of its graph. */
static void graphs(void) {
    enum cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    const cudaGraphNode_t *before;
    const cudaGraphEdgeData *edges;
    cudaGraphNode_t nodes[4], first;
    cudaGraphExec_t exec;
    cudaGraph_t graph, same;
    cudaStream_t stream;
    size_t count = 0, one = 1;
    int counter = 0;
    void *device;
    CUgraphNodeType kind;
    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc(&device, 64));
    OK(cudaStreamAddCallback(stream, count_up, &counter, 0));
    OK(cudaStreamSynchronize(stream));
    IS(counter == 1);
    OK(cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL));
    IS(status == cudaStreamCaptureStatusNone && id == 0);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    OK(cudaMemsetAsync(device, 1, 64, stream));
    OK(cudaMemcpyAsync((char *)device + 32, device, 32, cudaMemcpyDefault, stream));
    OK(cudaStreamGetCaptureInfo(stream, &status, &id, &same, &before, &edges, &count));
    IS(status == cudaStreamCaptureStatusActive && id != 0 && count == 1 && !edges);
    first = before[0];
    OK(cudaStreamUpdateCaptureDependencies(stream, NULL, NULL, 0, cudaStreamSetCaptureDependencies));
    OK(cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, &count));
    IS(count == 0);
    OK(cudaStreamUpdateCaptureDependencies(stream, &first, NULL, 1, cudaStreamAddCaptureDependencies));
    OK(cudaMemsetAsync(device, 2, 64, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    IS(graph == same);
    OK(cudaGraphGetNodes(graph, NULL, &count));
    IS(count == 3);
    count = 4;
    OK(cudaGraphGetNodes(graph, nodes, &count));
    IS(count == 3 && nodes[1] == first && nodes[3] == NULL);
    IS(cuGraphNodeGetType((CUgraphNode)nodes[0], &kind) == CUDA_SUCCESS && kind == CU_GRAPH_NODE_TYPE_MEMSET);
    IS(cuGraphNodeGetType((CUgraphNode)nodes[1], &kind) == CUDA_SUCCESS && kind == CU_GRAPH_NODE_TYPE_MEMCPY);
    OK(cudaGraphNodeGetDependencies(nodes[2], NULL, NULL, &count));
    IS(count == 1);
    OK(cudaGraphNodeGetDependencies(nodes[2], &nodes[3], NULL, &one));
    IS(nodes[3] == nodes[1]);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    IS(cudaGraphLaunch((cudaGraphExec_t)graph, stream) == cudaErrorInvalidResourceHandle);
    IS(cudaGraphDestroy((cudaGraph_t)exec) == cudaErrorInvalidResourceHandle);
    IS(cudaGraphExecDestroy((cudaGraphExec_t)graph) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaFree(device));
    OK(cudaStreamDestroy(stream));
}

/* Memory that a stream frees is there until the stream comes to it. */
static void pools(void) {
    cudaMemPool_t pool;
    cuuint64_t used, keep = 1 << 20, found = 0;
    cudaStream_t stream;
    unsigned char host[3] = {0};
    void *device;
    OK(cudaStreamCreate(&stream));
    OK(cudaDeviceGetDefaultMemPool(&pool, 2));
    OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &found));
    IS(found == keep);
    OK(cudaMallocAsync(&device, 1000, stream));
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    IS(used == 1000);
    OK(cudaMemsetAsync(device, 5, 1000, stream));
    OK(cudaMemcpyAsync(host, (char *)device + 997, 3, cudaMemcpyDefault, stream));
    OK(cudaFreeAsync(device, stream));
    /* Only once, and by nothing else from then on. */
    IS(cudaFreeAsync(device, stream) == cudaErrorInvalidValue && cudaFree(device) == cudaErrorInvalidValue);
    OK(cudaStreamSynchronize(stream));
    IS(host[0] == 5 && host[2] == 5);
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    IS(used == 0);
    IS(cudaFreeAsync(device, stream) == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue);
    OK(cudaMemPoolTrimTo(pool, 0));
    OK(cudaStreamDestroy(stream));
}

/* Reserved addresses: two pieces of memory side by side are one buffer; without access, and without memory, none. */
static void reserved(void) {
    enum { MB = 1 << 20 };
    CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle pieces[2], same;
    CUdeviceptr start;
    size_t granularity, free_before, free_after, total;
    unsigned char host[2] = {0};
    of.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    of.location.id = access.location.id = 2;
    IS(cuMemGetAllocationGranularity(&granularity, &of, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS);
    IS(granularity == 2 * MB);
    OK(cudaMemGetInfo(&free_before, &total));
    IS(cuMemAddressReserve(&start, 8 * MB, 0, 0, 0) == CUDA_SUCCESS);
    IS(cuMemCreate(&pieces[0], MB, &of, 0) == CUDA_ERROR_INVALID_VALUE);
    for (int at = 0; at < 2; at++) {
        IS(cuMemCreate(&pieces[at], 2 * MB, &of, 0) == CUDA_SUCCESS);
        IS(cuMemMap(start + at * 2 * MB, 2 * MB, 0, pieces[at], 0) == CUDA_SUCCESS);
    }
    IS(cuMemMap(start, 2 * MB, 0, pieces[0], 0) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemFreeAsync(start, NULL) == CUDA_ERROR_INVALID_VALUE && cuMemFree(start) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemUnmap(start, 0) == CUDA_ERROR_INVALID_VALUE && cuMemUnmap(start, ~0ull) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemUnmap(start, MB) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemSetAccess(start, 4 * MB, &access, 0) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemMap(-2 * (CUdeviceptr)MB, 2 * MB, 0, pieces[0], 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cudaMemGetInfo(&free_after, &total));
    IS(free_before - free_after == 4 * MB);
    IS(cudaMemset((void *)start, 1, 10) != cudaSuccess);
    IS(cuMemSetAccess(start, 4 * MB, &access, 1) == CUDA_SUCCESS);
    OK(cudaMemset((void *)(start + 2 * MB - 5), 7, 10));
    OK(cudaMemcpy(host, (void *)(start + 2 * MB - 1), 2, cudaMemcpyDefault));
    IS(host[0] == 7 && host[1] == 7);
    IS(cudaMemset((void *)(start + 4 * MB - 5), 7, 10) != cudaSuccess);
    IS(cuMemRetainAllocationHandle(&same, (void *)(start + 3 * MB)) == CUDA_SUCCESS && same == pieces[1]);
    IS(cuMemRelease(same) == CUDA_SUCCESS);
    /* The same memory at a second address. */
    IS(cuMemMap(start + 4 * MB, 2 * MB, 0, pieces[1], 0) == CUDA_SUCCESS);
    IS(cuMemSetAccess(start + 4 * MB, 2 * MB, &access, 1) == CUDA_SUCCESS);
    OK(cudaMemset((void *)(start + 4 * MB), 9, 1));
    OK(cudaMemcpy(host, (void *)(start + 2 * MB), 1, cudaMemcpyDefault));
    IS(host[0] == 9);
    IS(cuMemAddressFree(start, 8 * MB) == CUDA_ERROR_INVALID_VALUE);
    IS(cuMemUnmap(start, 6 * MB) == CUDA_SUCCESS);
    IS(cudaMemset((void *)start, 1, 10) != cudaSuccess);
    IS(cuMemRelease(pieces[0]) == CUDA_SUCCESS && cuMemRelease(pieces[1]) == CUDA_SUCCESS);
    IS(cuMemRelease(pieces[1]) != CUDA_SUCCESS);
    IS(cuMemAddressFree(start, 8 * MB) == CUDA_SUCCESS);
    OK(cudaMemGetInfo(&free_after, &total));
    IS(free_before == free_after);
    cudaGetLastError();
}

/* What can never be had is refused, and takes nothing away. */
static void too_much(void) {
    enum { MB = 1 << 20 };
    CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemGenericAllocationHandle memory;
    CUdeviceptr start;
    void *device;
    of.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(cudaMalloc(&device, 1));
    for (int time = 0; time < 3; time++) {
        IS(cuMemAddressReserve(&start, 1ull << 50, 0, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        IS(cuMemAddressReserve(&start, -2 * (CUdeviceptr)MB, 0, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        IS(cuMemAddressReserve(&start, 2 * MB, 1ull << 63, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        IS(cuMemCreate(&memory, -2 * (size_t)MB, &of, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        IS(cudaHostRegister(&of, ~0ull, 0) == cudaErrorInvalidValue);
        IS(cudaMalloc(&device, ~0ull) == cudaErrorMemoryAllocation);
    }
    cudaGetLastError();
    OK(cudaMalloc(&device, 1));
    OK(cudaFree(device));
}

static void *left;

/* An exit handler, as destructors of C++ and Python's modules are. */
static void at_exit(void) {
    int device;
    if (cudaGetDevice(&device) != cudaSuccess || device != 2 || cudaFree(left) != cudaSuccess ||
        cudaDeviceSynchronize() != cudaSuccess) {
        fprintf(stderr, "calls of an exit handler failed: %s\n", cudaGetErrorName(cudaPeekAtLastError()));
        _exit(1);
    }
}

int main(void) {
    dim3 one = {1, 1, 1};
    devices();
    pointers();
    fills();
    copies();
    times();
    graphs();
    pools();
    reserved();
    too_much();
    IS(cudaLaunchKernel((const void *)main, one, one, NULL, 0, NULL) == cudaErrorInvalidDeviceFunction);
    IS(cudaPeekAtLastError() == cudaErrorInvalidDeviceFunction && cudaGetLastError() == cudaErrorInvalidDeviceFunction);
    OK(cudaMalloc(&left, 10));
    OK(cudaDeviceSynchronize());
    atexit(at_exit);
    return 0;
}
