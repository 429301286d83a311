/* A GPU's driver is mapped that has no device: communicators are on the host, and nothing is an error. The driver's file is the
 * argument, a stub that gives the codes of a machine without a GPU. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>

#define OK(call)                                                                          \
  do {                                                                                    \
    int code = (int)(call);                                                               \
    if (code != 0) {                                                                      \
      fprintf(stderr, "line %d: %s: %d (%s)\n", __LINE__, #call, code, strataGetLastError()); \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)
#define CHECK(condition) OK(!(condition))

int main(int argc, char** argv) {
  ncclUniqueId id;
  ncclComm_t one, all[2];
  strataStream_t stream;
  int in[2] = {1, 2}, out[2] = {0};
  void* memory;
  CHECK(argc == 2 && dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) != NULL);
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&one, 1, id, 0));
  OK(strataStreamCreate(&stream));
  OK(ncclAllReduce(in, out, 2, ncclInt, ncclSum, one, stream));
  OK(strataStreamSynchronize(stream));
  CHECK(out[0] == 1 && out[1] == 2);
  OK(ncclCommInitAll(all, 2, NULL));
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) OK(ncclAllReduce(&in[i], &out[i], 1, ncclInt, ncclSum, all[i], NULL));
  OK(ncclGroupEnd());
  CHECK(out[0] == 3 && out[1] == 3);
  OK(ncclMemAlloc(&memory, 64));
  *(int*)memory = 1;
  OK(ncclMemFree(memory));
  for (int i = 0; i < 2; i++) OK(ncclCommDestroy(all[i]));
  OK(ncclCommDestroy(one));
  OK(strataStreamDestroy(stream));
  return 0;
}
