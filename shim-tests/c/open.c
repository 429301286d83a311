/* A program that loads the library by name, as vLLM, XLA and others do, and uses one rank. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                  \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

int main(void) {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != NULL);
#define FUNCTION(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(library, #name)
  FUNCTION(ncclGetVersion);
  FUNCTION(ncclGetUniqueId);
  FUNCTION(ncclCommInitRank);
  FUNCTION(ncclAllReduce);
  FUNCTION(pncclAllReduce);
  FUNCTION(ncclCommDestroy);
  CHECK(p_ncclAllReduce != NULL && p_pncclAllReduce != NULL);
  int version = 0;
  CHECK(p_ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE);
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  CHECK(p_ncclGetUniqueId(&id) == ncclSuccess);
  CHECK(p_ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess && comm != NULL);
  float input[3] = {1, 2, 3}, output[3] = {0};
  CHECK(p_ncclAllReduce(input, output, 3, ncclFloat, ncclSum, comm, NULL) == ncclSuccess);
  CHECK(memcmp(input, output, sizeof(input)) == 0);
  memset(output, 0, sizeof(output));
  CHECK(p_pncclAllReduce(input, output, 3, ncclFloat, ncclMax, comm, NULL) == ncclSuccess);
  CHECK(memcmp(input, output, sizeof(input)) == 0);
  CHECK(p_ncclCommDestroy(comm) == ncclSuccess);
  CHECK(dlclose(library) == 0);
  return 0;
}
