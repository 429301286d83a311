/* Memory and streams where a program's calls are made: on the GPU whose driver SOFT_DEVICE names (cuda, hip), or on the host. The
   driver is opened at run time, so a program needs none. */
#include "check.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static int is_hip, is_on_device;
static int (*driver_copy_in)(void*, const void*, size_t);
static int (*driver_copy_out)(void*, const void*, size_t);
static int (*driver_copy)(void*, const void*, size_t, int);
static int (*driver_stream)(void**, unsigned);
static int (*driver_wait)(void*);
static int (*driver_host)(void*, void (*)(void*), void*);

static void* driver_function(void* driver, const char* name) {
  void* function = dlsym(driver, name);
  CHECK(function != NULL);
  return function;
}

/* Opens the driver, and makes its first device this thread's. */
static void open_place(void) {
  const char* name = getenv("SOFT_DEVICE");
  if (!name) return;
  is_on_device = 1;
  is_hip = !strcmp(name, "hip");
  void* driver = dlopen(is_hip ? "libamdhip64.so.6" : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  CHECK(driver != NULL);
  *(void**)&driver_wait = driver_function(driver, is_hip ? "hipStreamSynchronize" : "cuStreamSynchronize");
  *(void**)&driver_host = driver_function(driver, is_hip ? "hipLaunchHostFunc" : "cuLaunchHostFunc");
  *(void**)&driver_stream = driver_function(driver, is_hip ? "hipStreamCreateWithFlags" : "cuStreamCreate");
  if (is_hip) {
    int (*set)(int);
    *(void**)&set = driver_function(driver, "hipSetDevice");
    *(void**)&driver_copy = driver_function(driver, "hipMemcpy");
    CHECK(set(0) == 0);
    return;
  }
  void* context;
  int (*start)(unsigned), (*retain)(void**, int), (*use)(void*);
  *(void**)&start = driver_function(driver, "cuInit");
  *(void**)&retain = driver_function(driver, "cuDevicePrimaryCtxRetain");
  *(void**)&use = driver_function(driver, "cuCtxSetCurrent");
  *(void**)&driver_copy_in = driver_function(driver, "cuMemcpyHtoD_v2");
  *(void**)&driver_copy_out = driver_function(driver, "cuMemcpyDtoH_v2");
  CHECK(start(0) == 0 && retain(&context, 0) == 0 && use(context) == 0);
}

/* Memory for calls, to the end of the process. */
static void* place_for(size_t bytes) {
  void* memory = NULL;
  OK(ncclMemAlloc(&memory, bytes));
  return memory;
}

/* Whatever stream reads it afterwards: a driver's copy may still be on its way when its function has returned. */
static void put(void* to, const void* from, size_t bytes) {
  if (!is_on_device) {
    memcpy(to, from, bytes);
  } else if (bytes) {
    CHECK((is_hip ? driver_copy(to, from, bytes, 1) : driver_copy_in(to, from, bytes)) == 0);
    CHECK(driver_wait(NULL) == 0);
  }
}

static void take(void* to, const void* from, size_t bytes) {
  if (!is_on_device)
    memcpy(to, from, bytes);
  else if (bytes)
    CHECK((is_hip ? driver_copy(to, from, bytes, 2) : driver_copy_out(to, from, bytes)) == 0);
}

/* A stream of the place's. */
static inline strataStream_t place_stream(void) {
  strataStream_t stream = NULL;
  if (is_on_device)
    CHECK(driver_stream((void**)&stream, 1) == 0);
  else
    OK(strataStreamCreate(&stream));
  return stream;
}

static inline void place_sleep(void* us) { usleep((useconds_t)(uintptr_t)us); }

/* What a stream of a GPU is given from now on waits for so long. */
static inline void place_delay(strataStream_t stream, unsigned us) {
  CHECK(driver_host((void*)stream, place_sleep, (void*)(uintptr_t)us) == 0);
}

/* Waits for all of a stream. */
static inline void place_finish(strataStream_t stream) {
  if (is_on_device)
    CHECK(driver_wait((void*)stream) == 0);
  else
    OK(strataStreamSynchronize(stream));
}

/* Waits for a stream; what has come of a call there, which on a GPU may fail behind its return. */
static inline ncclResult_t ended(ncclComm_t comm, strataStream_t stream, ncclResult_t result) {
  if (!is_on_device || result != ncclSuccess) return result;
  CHECK(driver_wait((void*)stream) == 0);
  OK(ncclCommGetAsyncError(comm, &result));
  return result;
}
