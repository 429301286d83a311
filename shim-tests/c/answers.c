/* Calls NCCL in every way that needs no GPU and prints what it answers, for comparison: versions, texts, ids, groups, and
 * wrong arguments of each function, through both of its names. The library is the one that NCCL_NAME names, or with
 * "preloaded" the one that is there already. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef intptr_t word;
typedef word (*function)(word, word, word, word, word, word, word, word, word, word, word);

static void* library;

static function find(const char* prefix, const char* name) {
  char full[100];
  snprintf(full, sizeof full, "%snccl%s", prefix, name);
  return (function)(uintptr_t)dlsym(library, full);
}

/* Functions that refuse nulls; none of them waits for anybody. */
static const char* const refuse[] = {
    "GetVersion", "GetUniqueId", "CommInitAll", "CommCount", "CommCuDevice", "CommUserRank", "CommGetAsyncError",
    "CommDestroy", "CommAbort", "CommFinalize", "CommSplit", "AllReduce", "AllGather", "ReduceScatter", "Reduce",
    "Broadcast", "Bcast", "Send", "Recv", "RedOpCreatePreMulSum", "RedOpDestroy", "CommRegister", "CommDeregister",
    "MemFree", "GroupEnd", "GroupSimulateEnd"};
/* The same for releases that have them. */
static const char* const newer[] = {
    "CommGrow", "CommGetUniqueId", "CommRevoke", "CommSuspend", "CommResume", "CommMemStats", "AlltoAll",
    "Gather", "Scatter", "CommWindowDeregister", "CommWindowRegister", "AllReduceConfig", "AllGatherConfig",
    "ReduceScatterConfig", "CommQueryProperties"};

static void nulls(const char* prefix, const char* const* names, size_t count) {
  for (size_t i = 0; i < count; i++) {
    function call = find(prefix, names[i]);
    if (!call) continue;
    int code = (int)call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    printf("%s%s of nulls %d\n", prefix, names[i], code);
  }
}

static void* on_a_thread(void* unused) {
  (void)unused;
  printf("on a thread: end %d, start %d, end %d\n", (int)find("", "GroupEnd")(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
         (int)find("p", "GroupStart")(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
         (int)find("", "GroupEnd")(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  return NULL;
}

static void texts(const char* prefix) {
  function text = find(prefix, "GetErrorString");
  for (word code = -1; code < 11; code++) {
    printf("%scode %d: %s\n", prefix, (int)code, (const char*)text(code, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  }
}

static void versions(const char* prefix) {
  int version = 0;
  int code = (int)find(prefix, "GetVersion")((word)&version, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  printf("%sversion %d %d\n", prefix, version, code);
}

static void groups(const char* prefix) {
  function start = find(prefix, "GroupStart"), end = find(prefix, "GroupEnd");
#define CALL(f) (int)f(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
  printf("%sgroups %d", prefix, CALL(end));
  printf(" %d", CALL(start));
  printf(" %d", CALL(start));
  printf(" %d", CALL(end));
  printf(" %d", CALL(end));
  printf(" %d\n", CALL(end));
  /* A call that fails makes the whole group fail. */
  printf("%sgroup with a failure %d", prefix, CALL(start));
  printf(" %d", (int)find(prefix, "AllReduce")(0, 0, 4, 7, 0, 0, 0, 0, 0, 0, 0));
  printf(" %d\n", CALL(end));
}

int main(void) {
  const char* name = getenv("NCCL_NAME");
  library = !strcmp(name, "preloaded") ? dlopen(NULL, RTLD_NOW) : dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library || !find("", "GetVersion")) {
    fprintf(stderr, "no library\n");
    return 1;
  }
  const char* const prefixes[] = {"", "p"};
  for (int i = 0; i < 2; i++) {
    const char* prefix = prefixes[i];
    versions(prefix);
    texts(prefix);
    groups(prefix);
    nulls(prefix, refuse, sizeof refuse / sizeof *refuse);
    nulls(prefix, newer, sizeof newer / sizeof *newer);
  }
  /* With NCCL_COMM_ID an id follows from an address; older releases begin it with a random number all the same. */
  unsigned char id[128];
  memset(id, 0xaa, sizeof id);
  printf("id %d", (int)find("", "GetUniqueId")((word)id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  for (size_t i = 8; i < sizeof id; i++) printf(" %02x", id[i]);
  printf("\n");
  /* No GPU: each fails, and says how. The library calls functions of its own interface here. */
  void* comms[2] = {NULL, NULL};
  int devices[2] = {0, 0};
  printf("init all %d", (int)find("", "CommInitAll")((word)comms, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  printf(" %d", (int)find("", "CommInitAll")((word)comms, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  printf(" %d\n", (int)find("p", "CommInitAll")((word)comms, 2, (word)devices, 0, 0, 0, 0, 0, 0, 0, 0));
  void* memory = NULL;
  printf("memory %d\n", (int)find("", "MemAlloc")((word)&memory, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  pthread_t thread;
  pthread_create(&thread, NULL, on_a_thread, NULL);
  pthread_join(thread, NULL);
  return 0;
}
