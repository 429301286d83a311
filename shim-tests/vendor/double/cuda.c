/* A double of the one function of libcuda.so.1 that a library in front of NCCL asks: whether a stream is being captured.
 * A test tells it which are. */
#include <pthread.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct CUstream_st* CUstream;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, STREAMS = 64 };

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

/* 0: no capture, 1: active. */
EXPORT int cuStreamIsCapturing(CUstream stream, int* status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  asked++;
  *status = 0;
  for (int i = 0; i < count; i++) *status |= capturing[i] == stream;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
