/* A profiler of NCCL's interface, version PROFILER_VERSION, that writes down what it hears, an event a line, in PROFILER_LOG.PID:
     init COMM RANK NRANKS NODES NAME | begin HANDLE KIND parent=HANDLE RANK ... | state HANDLE STATE | end HANDLE NS | finalize COMM
   It complains and ends the process where the interface is broken: an event that ends twice, a parent that never was, a context of
   nobody. PROFILER_MASK says which events it wants. -DLACKS: without its table; -DREFUSES: init fails; -DNO_STOP: without stopEvent. */
#include "nccl_profiler.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MUST(what) \
  do { \
    if (!(what)) fprintf(stderr, "profiler: line %d: %s\n", __LINE__, #what), _exit(77); \
  } while (0)

enum { MOST = 1 << 16 };
struct known { int open, context; struct timespec begun; };
static struct known events[MOST];
static int contexts[1024], event_count, context_count;
static FILE *file;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void open_file(void) {
  char name[4096];
  const char *path = getenv("PROFILER_LOG");
  if (file || !path) return;
  snprintf(name, sizeof name, "%s.%d", path, (int)getpid());
  MUST((file = fopen(name, "w")));
  setlinebuf(file);
}

static int event_of(const void *handle) {
  int index = (int)(intptr_t)handle;
  MUST(index > 0 && index <= event_count);
  return index;
}

static int init_any(void **context, int *mask, const char *name, uint64_t id, int nodes, int nranks, int rank) {
  const char *wanted = getenv("PROFILER_MASK");
  pthread_mutex_lock(&mutex);
  open_file();
  MUST(context_count < 1023);
  contexts[++context_count] = 1;
  *context = (void *)(intptr_t)context_count;
  *mask = wanted ? atoi(wanted) : EVENT_COLL | EVENT_P2P;
  if (file) fprintf(file, "init %d %d %d %d %s %llx\n", context_count, rank, nranks, nodes, name && *name ? name : "-", (unsigned long long)id);
  pthread_mutex_unlock(&mutex);
#ifdef REFUSES
  contexts[context_count] = 0;
  return 3;
#endif
  return 0;
}

#if PROFILER_VERSION >= 5
static int init(void **context, uint64_t id, int *mask, const char *name, int nodes, int nranks, int rank, log_function log) {
#elif PROFILER_VERSION == 4
static int init(void **context, int *mask, const char *name, uint64_t id, int nodes, int nranks, int rank, log_function log) {
#else
static int init(void **context, int *mask) {
  return init_any(context, mask, NULL, 0, 0, 0, 0);
#endif
#if PROFILER_VERSION >= 4
  /* Arguments of each kind, in registers and on the stack. */
  log(3, 1, __FILE__, __LINE__, "profiler hears %s: %d of %ld, %.2f %.1f, %s %d %d %s %.3f %.0f %.0f %.0f %.0f %.0f %.4f\n", "init", rank, (long)nranks,
      0.25, 1.5, "six", 7, 8, "nine", 0.125, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0625);
  return init_any(context, mask, name, id, nodes, nranks, rank);
#endif
}

static int start(void *context, void **handle, struct event *event) {
  struct event copy = *event; /* as plugins do: all of it is there */
  pthread_mutex_lock(&mutex);
  int parent = copy.parent ? event_of(copy.parent) : 0, comm = (int)(intptr_t)context;
  MUST(comm > 0 && comm <= context_count && contexts[comm] == 1);
  MUST(event_count + 1 < MOST);
  struct known *known = &events[++event_count];
  known->open = 1, known->context = comm;
  clock_gettime(CLOCK_MONOTONIC, &known->begun);
  *handle = (void *)(intptr_t)event_count;
  if (file) {
    fprintf(file, "begin %d comm=%d rank=%d parent=%d ", event_count, comm, copy.rank, parent);
    switch (copy.type) {
      case EVENT_GROUP: fprintf(file, "Group\n"); break;
      case EVENT_COLL:
        fprintf(file, "Coll %s %zu %s %d seq=%llu %s channels=%d send=%d recv=%d", copy.coll.func, copy.coll.count, copy.coll.datatype,
                copy.coll.root, (unsigned long long)copy.coll.sequence, copy.coll.algo[0] ? copy.coll.algo : "-", copy.coll.channels,
                copy.coll.send != NULL, copy.coll.recv != NULL);
#if PROFILER_VERSION >= 5
        fprintf(file, " group=%d", event_of(copy.coll.group));
#endif
#if PROFILER_VERSION >= 7
        fprintf(file, " tag=%llu", (unsigned long long)copy.coll.tag);
#endif
        fprintf(file, "\n");
        break;
      case EVENT_P2P:
        fprintf(file, "P2p %s %zu %s %d buff=%d", copy.p2p.func, copy.p2p.count, copy.p2p.datatype, copy.p2p.peer, copy.p2p.buff != NULL);
#if PROFILER_VERSION >= 5
        fprintf(file, " group=%d", event_of(copy.p2p.group));
#endif
        fprintf(file, "\n");
        break;
      case EVENT_KERNEL_CH: fprintf(file, "KernelCh %d\n", copy.kernel_ch.channel); break;
#if PROFILER_VERSION >= 5
      case EVENT_GROUP_API: fprintf(file, "GroupApi %d\n", copy.group_api.depth); break;
      case EVENT_COLL_API: fprintf(file, "CollApi %s %zu %s %d\n", copy.coll_api.func, copy.coll_api.count, copy.coll_api.datatype, copy.coll_api.root); break;
      case EVENT_P2P_API: fprintf(file, "P2pApi %s %zu %s\n", copy.p2p_api.func, copy.p2p_api.count, copy.p2p_api.datatype); break;
#endif
      default: MUST(!"an event of a kind that nobody asked for");
    }
  }
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int stop(void *handle) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  pthread_mutex_lock(&mutex);
  int index = event_of(handle);
  struct known *known = &events[index];
  MUST(known->open == 1);
  known->open = 0;
  long long ns = (now.tv_sec - known->begun.tv_sec) * 1000000000ll + now.tv_nsec - known->begun.tv_nsec;
  if (file) fprintf(file, "end %d %lld\n", index, ns);
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int record(void *handle, int state, union state_args *args) {
  pthread_mutex_lock(&mutex);
  int index = event_of(handle);
  MUST(events[index].open == 1);
  MUST(state != STATE_KERNEL_CH_STOP || (args && args->kernel_ch.clock > 1000000000));
  if (file) fprintf(file, "state %d %d\n", index, state);
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int finalize(void *context) {
  pthread_mutex_lock(&mutex);
  int comm = (int)(intptr_t)context;
  MUST(comm > 0 && comm <= context_count && contexts[comm] == 1);
  contexts[comm] = 2;
  for (int i = 1; i <= event_count; i++) MUST(events[i].context != comm || !events[i].open);
  if (file) fprintf(file, "finalize %d\n", comm);
  pthread_mutex_unlock(&mutex);
  return 0;
}

#define JOINED(a, b) a##b
#define TABLE(version) JOINED(ncclProfiler_v, version)
#ifdef LACKS
struct profiler ncclProfiler_v99 = {"lacking", init, start, stop, record, finalize};
#elif defined(NO_STOP)
struct profiler TABLE(PROFILER_VERSION) = {"without stopEvent", init, start, NULL, record, finalize};
#else
struct profiler TABLE(PROFILER_VERSION) = {"listening", init, start, stop, record, finalize};
#endif
