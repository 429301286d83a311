/* Calls on two carriers in opposite orders: even ranks call A over TCP and then B over MPI, odd ranks B and then A, each on a
   stream of its own, and wait the other way round. The argument is how many such programs run; lengths go by their numbers. */
#include <nccl.h>
#include <strata.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MOST 60000
#define CALLS 3
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, strataGetLastError());             \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int rank, size;
static int32_t in[2][CALLS][MOST], out[2][CALLS][MOST];

static uint64_t next(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  return *state ^= *state << 17;
}

int main(int argc, char** argv) {
  static const size_t lengths[] = {1, 50, 5000, MOST};
  static const char* names[] = {"auto@tcp", "auto@mpi"};
  ncclUniqueId id;
  ncclComm_t comm;
  strataStream_t streams[2];
  CHECK(argc == 2);
  alarm(150);
  OK(strataGetWorldId(&id, &size, &rank));
  OK(ncclCommInitRank(&comm, size, id, rank));
  for (int carrier = 0; carrier < 2; carrier++) OK(strataStreamCreate(&streams[carrier]));
  int programs = atoi(argv[1]);
  for (int program = 0; program < programs; program++) {
    uint64_t shared = 0x9e3779b97f4a7c15u * (program + 1), own = shared + rank + 1;
    size_t count[2][CALLS];
    for (int carrier = 0; carrier < 2; carrier++)
      for (int call = 0; call < CALLS; call++) {
        count[carrier][call] = lengths[next(&shared) % 4];
        for (size_t i = 0; i < count[carrier][call]; i++) in[carrier][call][i] = (int32_t)i + rank + program;
      }
    int done[2] = {0, 0};
    for (int at = 0; at < 2 * CALLS; at++) {
      /* The first call shows the order; then each rank goes on as it likes. */
      int carrier = at == 0 ? rank % 2 : (int)(next(&own) % 2);
      if (done[carrier] == CALLS) carrier = 1 - carrier;
      int call = done[carrier]++;
      ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
      config.algSelection = names[carrier];
      OK(ncclAllReduceConfig(in[carrier][call], out[carrier][call], count[carrier][call], ncclInt32, ncclSum, comm,
                             streams[carrier], &config));
      if (next(&own) % 8 == 0) usleep(500);
    }
    OK(strataStreamSynchronize(streams[1 - rank % 2]));
    OK(strataStreamSynchronize(streams[rank % 2]));
    for (int carrier = 0; carrier < 2; carrier++)
      for (int call = 0; call < CALLS; call++)
        for (size_t i = 0; i < count[carrier][call]; i++)
          CHECK(out[carrier][call][i] == size * ((int32_t)i + program) + size * (size - 1) / 2);
  }
  for (int carrier = 0; carrier < 2; carrier++) OK(strataStreamDestroy(streams[carrier]));
  OK(ncclCommDestroy(comm));
  if (rank == 0) printf("%d programs in opposite orders went well\n", programs);
  return 0;
}
