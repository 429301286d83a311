/* A double of the functions of libcuda.so.1 that a library in front of NCCL needs: whether a stream is being captured,
 * which a test tells it, and to make a device current, which a test can ask it about. */
#include <pthread.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct CUstream_st* CUstream;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906, STREAMS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUstream capturing[STREAMS];
static int count, asked;

/* Declares a stream to be captured, or not any more. */
EXPORT void doubleCudaSetCapturing(CUstream stream, int is_capturing) {
  pthread_mutex_lock(&lock);
  int at = 0;
  while (at < count && capturing[at] != stream) at++;
  if (is_capturing && at == count && count < STREAMS) capturing[count++] = stream;
  if (!is_capturing && at < count) capturing[at] = capturing[--count];
  pthread_mutex_unlock(&lock);
}

/* How often anybody has asked. */
EXPORT int doubleCudaQuestions(void) { return asked; }

static int times, retained, pushed;

/* How often a device was made current, and how many contexts are retained or pushed now. */
EXPORT void doubleCudaContexts(int* current, int* left) {
  *current = times;
  *left = retained + pushed;
}

EXPORT int cuDeviceGet(int* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &retained + device;
  retained++;
  return CUDA_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  retained--;
  return CUDA_SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  pushed += context != NULL;
  times++;
  return CUDA_SUCCESS;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  *context = NULL;
  pushed--;
  return CUDA_SUCCESS;
}

/* 0: no capture, 1: active. Of the legacy stream nothing is told while another one is captured. */
EXPORT int cuStreamIsCapturing(CUstream stream, int* status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  asked++;
  *status = 0;
  if (!stream && count > 0) {
    pthread_mutex_unlock(&lock);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  for (int i = 0; i < count; i++) *status |= capturing[i] == stream;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
