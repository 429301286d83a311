/* What every program that checks itself says when something is not as it must be. */
#include <nccl.h>
#include <strata.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                   \
  do {                                                                                                     \
    if (!(condition)) {                                                                                    \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, strataGetLastError());                   \
      exit(1);                                                                                             \
    }                                                                                                      \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)
