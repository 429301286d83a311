/* NCCL's profiler interface of version PROFILER_VERSION (2 to 7), as far as calls, groups and kernels go: what a plugin sees
   (profiler.c), and what the vendor's double hands out (../vendor/double/profile.c). Written apart from the library's own layouts. */
#ifndef NCCL_PROFILER_H
#define NCCL_PROFILER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef PROFILER_VERSION
#define PROFILER_VERSION 5
#endif

enum {
  EVENT_GROUP = 1 << 0, EVENT_COLL = 1 << 1, EVENT_P2P = 1 << 2, EVENT_PROXY_OP = 1 << 3, EVENT_KERNEL_CH = 1 << 6,
  EVENT_GROUP_API = 1 << 8, EVENT_COLL_API = 1 << 9, EVENT_P2P_API = 1 << 10, EVENT_CE_COLL = 1 << 12
};
enum { STATE_KERNEL_CH_STOP = 22, STATE_GROUP_START_STOP = 23, STATE_GROUP_END_START = 24 };

#if PROFILER_VERSION >= 5
typedef uint64_t event_type;
#else
typedef uint8_t event_type;
#endif

struct event {
  event_type type;
  void *parent;
  int rank;
  union {
    struct { bool captured; int depth; } group_api;
    struct {
      const char *func; size_t count; const char *datatype; int root; void *stream; bool captured;
#if PROFILER_VERSION >= 7
      uint64_t tag;
#endif
    } coll_api;
    struct {
      const char *func; size_t count; const char *datatype; void *stream; bool captured;
#if PROFILER_VERSION >= 7
      uint64_t tag;
#endif
    } p2p_api;
    struct {
#if PROFILER_VERSION <= 3
      const char *name; uint64_t hash;
#endif
      uint64_t sequence; const char *func; const void *send; void *recv; size_t count; int root; const char *datatype;
#if PROFILER_VERSION == 2
      size_t traffic;
#endif
      uint8_t channels, warps; const char *algo, *proto;
#if PROFILER_VERSION >= 5
      void *group;
#endif
#if PROFILER_VERSION >= 7
      const char *variant; bool symmetric; uint64_t tag;
#endif
    } coll;
    struct {
#if PROFILER_VERSION <= 3
      const char *name; uint64_t hash;
#endif
      const char *func; void *buff; const char *datatype; size_t count; int peer;
#if PROFILER_VERSION >= 4
      uint8_t channels;
#endif
#if PROFILER_VERSION >= 5
      void *group;
#endif
#if PROFILER_VERSION >= 7
      uint64_t tag;
#endif
    } p2p;
    struct { uint8_t channel; uint64_t clock; } kernel_ch;
    struct {
      uint64_t sequence; const char *func; const void *send; void *recv; size_t count; int root; const char *datatype;
      const char *strategy; bool intra; uint32_t batch, batches, number; void *stream;
#if PROFILER_VERSION >= 7
      uint64_t tag;
#endif
    } ce_coll;
  };
};

union state_args {
  struct { uint64_t clock; } kernel_ch;
  size_t size;
};

typedef void (*log_function)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct profiler {
  const char *name;
#if PROFILER_VERSION >= 5
  int (*init)(void **context, uint64_t id, int *mask, const char *name, int nodes, int nranks, int rank, log_function log);
#elif PROFILER_VERSION == 4
  int (*init)(void **context, int *mask, const char *name, uint64_t hash, int nodes, int nranks, int rank, log_function log);
#else
  int (*init)(void **context, int *mask);
#endif
  int (*start)(void *context, void **handle, struct event *event);
  int (*stop)(void *handle);
  int (*record)(void *handle, int state, union state_args *args);
  int (*finalize)(void *context);
};
#endif
