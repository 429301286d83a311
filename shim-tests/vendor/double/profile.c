/* The profiler plugin, loaded and told as NCCL does: the library that NCCL_PROFILER_PLUGIN names, with the table of this release.
 *
 * A call is told when it is enqueued and is over then; the channels of its kernel come behind it and take as long as it runs. An
 * all-gather and a broadcast are told in bytes, an all-to-all, a gather and a scatter as the messages that they are made of. */
#include "double.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if DOUBLE_VERSION >= 23100
#define PROFILER_VERSION 7
#define PROFILER_SYMBOL "ncclProfiler_v7"
#elif DOUBLE_VERSION >= 22803
#define PROFILER_VERSION 5
#define PROFILER_SYMBOL "ncclProfiler_v5"
#else
#define PROFILER_VERSION 4
#define PROFILER_SYMBOL "ncclProfiler_v4"
#endif
#include "../../c/nccl_profiler.h"

enum { CHANNELS = 2 };
static struct profiler* profiler;
static int mask;

static void logged(int level, unsigned long flags, const char* file, int line, const char* format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static void look(void) {
  const char* name = getenv("NCCL_PROFILER_PLUGIN");
  void* library = dlopen(name && *name ? name : "libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
  if (library) profiler = dlsym(library, PROFILER_SYMBOL);
  if (name && !profiler) complain("External profiler plugin %s is unsupported", name);
}

void profile_begin(struct ncclComm* comm) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (DOUBLE_VERSION < 22703) return;
  pthread_once(&once, look);
  if (!profiler) return;
#if PROFILER_VERSION >= 5
  int failed = profiler->init(&comm->profiled, comm->id, &mask, comm->name, 1, comm->nranks, comm->rank, logged);
#else
  int failed = profiler->init(&comm->profiled, &mask, comm->name, comm->id, 1, comm->nranks, comm->rank, logged);
#endif
  if (failed) profiler = NULL;
}

void profile_end(struct ncclComm* comm) {
  if (profiler && comm->profiled) profiler->finalize(comm->profiled);
}

static void* begin(struct ncclComm* comm, event_type type, void* parent, struct event* event) {
  void* handle = NULL;
  event->type = type, event->parent = parent, event->rank = comm->rank;
  profiler->start(comm->profiled, &handle, event);
  return handle;
}

static void end(void* handle) {
  if (handle) profiler->stop(handle);
}

static const char* name_of_type(ncclDataType_t type) {
  static const char* const names[] = {"ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64", "ncclFloat16",
                                      "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
  return names[type];
}

static void* message(const struct op* op, void* group, int sends, int peer, char* buffer) {
  struct event event;
  memset(&event, 0x55, sizeof event); /* what NCCL leaves unset is anything */
  event.p2p.func = sends ? "Send" : "Recv";
  event.p2p.buff = buffer, event.p2p.count = op->count, event.p2p.datatype = name_of_type(op->type);
  event.p2p.peer = peer, event.p2p.channels = 1;
#if PROFILER_VERSION >= 5
  event.p2p.group = group;
#endif
#if PROFILER_VERSION >= 7
  event.p2p.tag = 0;
#endif
  return begin(op->comm, EVENT_P2P, group, &event);
}

static void* collective(const struct op* op, void* group) {
  static const char* const names[] = {[ALL_REDUCE] = "AllReduce", [REDUCE] = "Reduce", [BROADCAST] = "Broadcast",
                                      [REDUCE_SCATTER] = "ReduceScatter", [ALL_GATHER] = "AllGather"};
  int in_bytes = op->func == ALL_GATHER || op->func == BROADCAST;
  struct event event;
  memset(&event, 0x55, sizeof event);
  event.coll.sequence = 1, event.coll.func = names[op->func], event.coll.send = op->send, event.coll.recv = op->recv;
  event.coll.count = in_bytes ? op->count * type_size(op->type) : op->count;
  event.coll.datatype = name_of_type(in_bytes ? ncclInt8 : op->type);
  event.coll.root = func_has_root(op->func) ? op->root : 0, event.coll.channels = CHANNELS, event.coll.warps = 4;
  event.coll.algo = "RING", event.coll.proto = "SIMPLE";
#if PROFILER_VERSION >= 5
  event.coll.group = group;
#endif
#if PROFILER_VERSION >= 7
  event.coll.variant = NULL, event.coll.symmetric = false, event.coll.tag = op->tag;
#endif
  return begin(op->comm, EVENT_COLL, group, &event);
}

/* The handles of what has been told of operations. */
struct told {
  struct ncclComm* comm;
  void** handles;
  void** channels;
  size_t count;
};

static void add(struct told* told, void* handle) {
  told->handles = realloc(told->handles, (told->count + 1) * sizeof(void*));
  if (!told->handles) abort();
  told->handles[told->count++] = handle;
}

static void add_call(struct told* told, const struct op* op, void* group) {
  int n = op->comm->nranks, is_root = op->comm->rank == op->root;
  size_t block = op->count * type_size(op->type);
  char *send = (char*)op->send, *recv = op->recv;
  switch (op->func) {
    case SEND: add(told, message(op, group, 1, op->root, send)); break;
    case RECV: add(told, message(op, group, 0, op->root, recv)); break;
    case ALL_TO_ALL:
      for (int peer = 0; peer < n; peer++) {
        add(told, message(op, group, 1, peer, send + peer * block));
        add(told, message(op, group, 0, peer, recv + peer * block));
      }
      break;
    case GATHER:
      add(told, message(op, group, 1, op->root, send));
      for (int peer = 0; is_root && peer < n; peer++) add(told, message(op, group, 0, peer, recv + peer * block));
      break;
    case SCATTER:
      for (int peer = 0; is_root && peer < n; peer++) add(told, message(op, group, 1, peer, send + peer * block));
      add(told, message(op, group, 0, op->root, recv));
      break;
    default: add(told, collective(op, group));
  }
}

static uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Operations of one communicator are enqueued, and their kernel begins. */
struct told* profile_ops(struct op* const* ops, size_t count) {
  struct event event;
  memset(&event, 0, sizeof event);
  if (!profiler || count == 0 || !(mask & (EVENT_COLL | EVENT_P2P | EVENT_KERNEL_CH))) return NULL;
  struct told* told = calloc(1, sizeof *told);
  if (!told) abort();
  told->comm = ops[0]->comm;
  void* group = begin(told->comm, EVENT_GROUP, NULL, &event);
  for (size_t i = 0; i < count; i++) add_call(told, ops[i], group);
  for (size_t i = 0; i < told->count; i++) end(told->handles[i]);
  end(group);
  told->channels = calloc(told->count * CHANNELS + 1, sizeof(void*));
  if (!told->channels) abort();
  for (size_t i = 0; i < told->count * CHANNELS && (mask & EVENT_KERNEL_CH); i++) {
    event.kernel_ch.channel = (uint8_t)(i % CHANNELS), event.kernel_ch.clock = clock_ns();
    told->channels[i] = begin(told->comm, EVENT_KERNEL_CH, told->handles[i / CHANNELS], &event);
  }
  return told;
}

/* Their kernel has ended. */
void profile_done(struct told* told) {
  if (!told) return;
  for (size_t i = 0; i < told->count * CHANNELS; i++) {
    if (!told->channels[i]) continue;
    union state_args args = {.kernel_ch = {clock_ns()}};
    if (profiler->record) profiler->record(told->channels[i], STATE_KERNEL_CH_STOP, &args);
    end(told->channels[i]);
  }
  free(told->channels);
  free(told->handles);
  free(told);
}
