/* Stands in for CUDA's header: the two types that nccl.h takes from it. */
#ifndef STAND_IN_CUDA_RUNTIME_H
#define STAND_IN_CUDA_RUNTIME_H
#include <stddef.h>
#include <stdint.h>
#define CUDART_VERSION 12040
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#endif
