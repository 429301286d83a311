/* What test programs need of HIP, and what the soft GPU adds. */
#ifndef SOFT_HIP_H
#define SOFT_HIP_H

#include <stddef.h>
#include <stdint.h>

typedef int hipError_t;
typedef struct soft_stream *hipStream_t;
typedef struct soft_event *hipEvent_t;
typedef struct soft_module *hipModule_t;
typedef struct soft_function *hipFunction_t;
typedef struct soft_graph *hipGraph_t;
typedef struct soft_exec *hipGraphExec_t;
typedef struct soft_program *hiprtcProgram;
typedef int hiprtcResult;

typedef struct {
    int type;
    int device;
    void *devicePointer;
    void *hostPointer;
    int isManaged;
    unsigned allocationFlags;
} hipPointerAttribute_t;

enum { hipStreamNonBlocking = 1, hipEventDisableTiming = 2, hipMemcpyDefault = 4 };
#define HIP_LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define HIP_LAUNCH_PARAM_BUFFER_SIZE ((void *)2)
#define HIP_LAUNCH_PARAM_END ((void *)3)

const char *hipGetErrorName(hipError_t error);
hipError_t hipGetDeviceCount(int *count);
hipError_t hipSetDevice(int device);
hipError_t hipGetDevice(int *device);
hipError_t hipDeviceGetAttribute(int *value, int attribute, int device);
hipError_t hipDeviceSynchronize(void);
hipError_t hipDeviceReset(void);
hipError_t hipMalloc(void **address, size_t bytes);
hipError_t hipFree(void *address);
hipError_t hipHostMalloc(void **address, size_t bytes, unsigned flags);
hipError_t hipHostFree(void *address);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *address);
hipError_t hipMemcpy(void *dst, const void *src, size_t bytes, int kind);
hipError_t hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, hipStream_t stream);
hipError_t hipMemsetAsync(void *dst, int value, size_t bytes, hipStream_t stream);
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamQuery(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipStreamGetDevice(hipStream_t stream, int *device);
hipError_t hipStreamIsCapturing(hipStream_t stream, int *status);
hipError_t hipStreamBeginCapture(hipStream_t stream, int mode);
hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t *graph);
hipError_t hipGraphInstantiate(hipGraphExec_t *exec, hipGraph_t graph, void **error_node, char *log, size_t log_bytes);
hipError_t hipGraphLaunch(hipGraphExec_t exec, hipStream_t stream);
hipError_t hipGraphExecDestroy(hipGraphExec_t exec);
hipError_t hipGraphDestroy(hipGraph_t graph);
hipError_t hipLaunchHostFunc(hipStream_t stream, void (*function)(void *), void *argument);
hipError_t hipStreamWaitValue32(hipStream_t stream, void *address, uint32_t value, unsigned flags, uint32_t mask);
hipError_t hipStreamWriteValue32(hipStream_t stream, void *address, uint32_t value, unsigned flags);
hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventQuery(hipEvent_t event);
hipError_t hipEventSynchronize(hipEvent_t event);
hipError_t hipModuleLoadData(hipModule_t *module, const void *image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name);
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                                 unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                                 hipStream_t stream, void **params, void **extra);
hiprtcResult hiprtcCreateProgram(hiprtcProgram *program, const char *source, const char *name, int headers,
                                 const char **texts, const char **names);
hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int options, const char **texts);
hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t *bytes);
hiprtcResult hiprtcGetCode(hiprtcProgram program, char *code);
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t *bytes);
hiprtcResult hiprtcDestroyProgram(hiprtcProgram *program);

/* Where the host finds device memory; null for any other address. */
void *softgpuHostAddress(unsigned long long address);
/* All streams start over with this seed. */
void softgpuSeed(unsigned seed);
/* Live allocations, their bytes, live pinned blocks, streams, events; contexts retained; launches and blocking calls. */
void softgpuCounts(unsigned long long counts[8]);

#endif
