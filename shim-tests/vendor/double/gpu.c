/* Where the program uses the soft GPU: operations run on its streams, behind what these were given before, on memory that
 * only the GPU can touch. Without it everything is on the host, and a call has done what it says when it returns. */
#include "double.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

typedef void (*host_function)(void*);

/* The functions of CUDA's driver or of HIP's runtime, whichever the program has. */
static struct {
  void* (*host_address)(unsigned long long address);
  int (*launch_host)(cudaStream_t stream, host_function function, void* argument);
  int (*event_create)(void** event, unsigned flags);
  int (*event_record)(void* event, cudaStream_t stream);
  int (*event_destroy)(void* event);
  int (*event_query)(void* event);
  int (*context_current)(void** context); /* of CUDA's driver, as the next two */
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  int (*is_capturing)(cudaStream_t stream, int* status);
  int (*wait_event)(cudaStream_t stream, void* event, unsigned flags);
  int (*allocate)(unsigned long long* address, size_t bytes);
  int (*release)(unsigned long long address);
  int (*device)(int* device);
  int (*synchronize)(void);
} gpu;

static void* symbol(const char* cuda, const char* hip) {
  void* found = dlsym(RTLD_DEFAULT, cuda);
  return found ? found : dlsym(RTLD_DEFAULT, hip);
}

static void look(void) {
#define FIND(member, cuda, hip) gpu.member = (__typeof__(gpu.member))symbol(cuda, hip)
  FIND(launch_host, "cuLaunchHostFunc", "hipLaunchHostFunc");
  FIND(event_create, "cuEventCreate", "hipEventCreateWithFlags");
  FIND(event_record, "cuEventRecord", "hipEventRecord");
  FIND(event_destroy, "cuEventDestroy_v2", "hipEventDestroy");
  FIND(event_query, "cuEventQuery", "hipEventQuery");
  FIND(context_current, "cuCtxGetCurrent", "");
  FIND(context_push, "cuCtxPushCurrent_v2", "");
  FIND(context_pop, "cuCtxPopCurrent_v2", "");
  FIND(is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing");
  FIND(wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent");
  FIND(allocate, "cuMemAlloc_v2", "hipMalloc");
  FIND(release, "cuMemFree_v2", "hipFree");
  FIND(device, "cuCtxGetDevice", "hipGetDevice");
  FIND(synchronize, "cuCtxSynchronize", "hipDeviceSynchronize");
  /* Only the soft GPU has this: a driver alone is not used. */
  FIND(host_address, "softgpuHostAddress", "softgpuHostAddress");
}

int gpu_present(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, look);
  return gpu.host_address != NULL;
}

/* Where the host finds what is at an address of the device's. */
void* gpu_memory(const void* address) {
  void* found = gpu_present() && address ? gpu.host_address((unsigned long long)(uintptr_t)address) : NULL;
  return found ? found : (void*)(uintptr_t)address;
}

int gpu_device(void) {
  int device = 0;
  return gpu_present() && gpu.device(&device) == 0 ? device : 0;
}

int gpu_allocate(void** memory, size_t bytes) {
  unsigned long long address = 0;
  int failed = gpu.allocate(&address, bytes);
  *memory = (void*)(uintptr_t)address;
  return failed;
}

int gpu_free(void* memory) {
  gpu.synchronize();
  return gpu.release((unsigned long long)(uintptr_t)memory);
}

/* Lets one stream wait for what the other has been given. */
static int order(cudaStream_t before, cudaStream_t after) {
  void* event;
  if (before == after) return 0;
  if (gpu.event_create(&event, 2) != 0) return 1;
  int failed = gpu.event_record(event, before) != 0 || gpu.wait_event(after, event, 0) != 0;
  gpu.event_destroy(event);
  return failed;
}

/* Lets a stream wait for the last operation of a communicator: they run one after another on whatever streams. */
static int behind_last(const struct ncclComm* comm, cudaStream_t stream) {
  return comm->last && gpu.wait_event(stream, comm->last, 0) != 0;
}

void gpu_forget(struct ncclComm* comm) {
  if (comm->last) gpu.event_destroy(comm->last);
  comm->last = NULL;
}

static int note_last(struct ncclComm* comm, cudaStream_t stream) {
  if (!comm->last && gpu.event_create(&comm->last, 2) != 0) return 1;
  if (gpu.context_current) gpu.context_current(&comm->context);
  return gpu.event_record(comm->last, stream) != 0;
}

int gpu_is_captured(cudaStream_t stream) {
  int status = 0;
  return gpu.is_capturing(stream, &status) == 0 && status != 0;
}

/* Whether the context of a communicator's last operation has ended: its streams never come to what they were given. */
int gpu_is_gone(const struct ncclComm* comm) {
  enum { CONTEXT_IS_DESTROYED = 709 };
  void* left;
  if (!comm->last) return 0;
  int pushed = comm->context && gpu.context_push(comm->context) == 0;
  int status = gpu.event_query(comm->last);
  if (pushed) gpu.context_pop(&left);
  return status == CONTEXT_IS_DESTROYED;
}

/* Runs a function behind all that these streams were given, and before what they will be given. */
int gpu_enqueue(const struct op* ops, size_t count, host_function function, void* argument) {
  cudaStream_t home = ops[0].stream;
  /* Of what is captured no event can be waited for outside. */
  int failed = 0, captured = gpu_is_captured(home);
  for (size_t i = 0; i < count && !failed; i++)
    failed = order(ops[i].stream, home) || (!captured && behind_last(ops[i].comm, home));
  /* The operations may be gone as soon as it is launched. */
  cudaStream_t* streams = calloc(count, sizeof(*streams));
  struct ncclComm** comms = calloc(count, sizeof(*comms));
  for (size_t i = 0; i < count; i++) streams[i] = ops[i].stream, comms[i] = ops[i].comm;
  failed = failed || gpu.launch_host(home, function, argument) != 0;
  for (size_t i = 0; i < count && !failed; i++)
    failed = order(home, streams[i]) || (!captured && note_last(comms[i], home));
  free(streams);
  free(comms);
  return failed;
}
