/* CUDA's driver or, with -DHIP, HIP's runtime, as far as programs on the soft GPU need it, under one set of names. */
#ifndef SOFT_DRIVER_H
#define SOFT_DRIVER_H

#include <stdio.h>
#include <stdlib.h>
#ifdef HIP
#include "hip.h"
#define DRIVER(cuda, hip) hip
typedef hipStream_t gpu_stream;
enum { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 };
#else
#include "cuda.h"
#define DRIVER(cuda, hip) cuda
typedef CUstream gpu_stream;
#endif

#define GPU(call)                                                          \
  do {                                                                     \
    int gpu_status = (int)(call);                                          \
    if (gpu_status != 0) {                                                 \
      fprintf(stderr, "line %d: %s: error %d\n", __LINE__, #call, gpu_status); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

/* Makes a device the thread's. */
__attribute__((unused)) static void gpu_use(int device) {
#ifdef HIP
  GPU(hipSetDevice(device));
#else
  CUcontext context;
  GPU(cuInit(0));
  GPU(cuDevicePrimaryCtxRetain(&context, device));
  GPU(cuCtxSetCurrent(context));
#endif
}

__attribute__((unused)) static void* gpu_memory(size_t bytes) {
#ifdef HIP
  void* address = NULL;
  GPU(hipMalloc(&address, bytes));
  return address;
#else
  CUdeviceptr address = 0;
  GPU(cuMemAlloc_v2(&address, bytes));
  return (void*)(uintptr_t)address;
#endif
}

__attribute__((unused)) static void gpu_free(void* memory) {
  GPU(DRIVER(cuMemFree_v2((CUdeviceptr)(uintptr_t)memory), hipFree(memory)));
}

__attribute__((unused)) static void* gpu_pinned(size_t bytes) {
  void* memory = NULL;
  GPU(DRIVER(cuMemHostAlloc(&memory, bytes, 0), hipHostMalloc(&memory, bytes, 0)));
  return memory;
}

__attribute__((unused)) static gpu_stream gpu_new_stream(void) {
  gpu_stream stream;
  GPU(DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), hipStreamCreateWithFlags(&stream, 1)));
  return stream;
}

__attribute__((unused)) static void gpu_to(void* to, const void* from, size_t bytes, gpu_stream stream) {
  GPU(DRIVER(cuMemcpyHtoDAsync_v2((CUdeviceptr)(uintptr_t)to, from, bytes, stream),
             hipMemcpyAsync(to, from, bytes, hipMemcpyHostToDevice, stream)));
}

__attribute__((unused)) static void gpu_from(void* to, const void* from, size_t bytes, gpu_stream stream) {
  GPU(DRIVER(cuMemcpyDtoHAsync_v2(to, (CUdeviceptr)(uintptr_t)from, bytes, stream),
             hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToHost, stream)));
}

__attribute__((unused)) static void gpu_wait(gpu_stream stream) {
  GPU(DRIVER(cuStreamSynchronize(stream), hipStreamSynchronize(stream)));
}

#endif
