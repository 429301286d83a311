/* A process for each node, in which one thread drives all ranks of the node, as programs with a process for all GPUs of a
 * machine do. Without groups that would hang.
 *
 * nodes NODESxRANKS [nonblocking] */
#include "ranks.h"

#define MOST 8
#define COUNT 100

static ncclComm_t comms[MOST];
static int n, each, first, nonblocking;
static float in[MOST][COUNT * MAX_RANKS], out[MOST][COUNT * MAX_RANKS];

static int accepted(ncclResult_t code) { return code == ncclSuccess || (nonblocking && code == ncclInProgress); }

#define CALL(call) CHECK(accepted(call))

static void wait_for(ncclComm_t* these) {
  for (int local = 0; nonblocking && local < each; local++)
    if (these[local]) CHECK(settled(these[local]) == ncclSuccess);
}

static float value(int rank, int index) { return (float)((rank * 7 + index) % 50); }

static float sum_at(int index) {
  float sum = 0;
  for (int rank = 0; rank < n; rank++) sum += value(rank, index);
  return sum;
}

static void fill(void) {
  for (int local = 0; local < each; local++)
    for (int i = 0; i < COUNT * n; i++) in[local][i] = value(first + local, i);
  memset(out, 0, sizeof(out));
}

static void make(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id = shared_id(0, first);
  config.commName = "world";
  config.blocking = !nonblocking;
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++)
    CALL(ncclCommInitRankConfig(&comms[local], n, id, first + local, &config));
  CALL(ncclGroupEnd());
  wait_for(comms);
}

static void collectives(void) {
  fill();
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++)
    CALL(ncclAllReduce(in[local], out[local], COUNT, ncclFloat, ncclSum, comms[local], NULL));
  CALL(ncclGroupEnd());
  wait_for(comms);
  for (int local = 0; local < each; local++)
    for (int i = 0; i < COUNT; i++) CHECK(out[local][i] == sum_at(i));
  CALL(ncclGroupStart());
  for (int local = each - 1; local >= 0; local--) {
    CALL(ncclGroupStart());
    CALL(ncclReduceScatter(in[local], out[local], COUNT, ncclFloat, ncclSum, comms[local], NULL));
    CALL(ncclGroupEnd());
  }
  CALL(ncclGroupEnd());
  wait_for(comms);
  for (int local = 0; local < each; local++)
    for (int i = 0; i < COUNT; i++) CHECK(out[local][i] == sum_at((first + local) * COUNT + i));
}

/* Collectives of two kinds for each rank, one twice, and messages around the ring, all in one group. */
static void a_mixed_group(void) {
  static int tokens[MOST], got[MOST], all[MOST][MAX_RANKS], twice[MOST][MAX_RANKS];
  fill();
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++) {
    int rank = first + local;
    tokens[local] = 100 + rank;
    CALL(ncclSend(&tokens[local], 1, ncclInt, (rank + 1) % n, comms[local], NULL));
    CALL(ncclAllGather(&tokens[local], all[local], 1, ncclInt, comms[local], NULL));
    CALL(ncclAllReduce(in[local], out[local], COUNT, ncclFloat, ncclSum, comms[local], NULL));
    CALL(ncclAllGather(&tokens[local], twice[local], 1, ncclInt, comms[local], NULL));
    CALL(ncclRecv(&got[local], 1, ncclInt, (rank + n - 1) % n, comms[local], NULL));
  }
  CALL(ncclGroupEnd());
  wait_for(comms);
  for (int local = 0; local < each; local++) {
    CHECK(got[local] == 100 + (first + local + n - 1) % n);
    for (int i = 0; i < n; i++) CHECK(all[local][i] == 100 + i && twice[local][i] == 100 + i);
    for (int i = 0; i < COUNT; i++) CHECK(out[local][i] == sum_at(i));
  }
}

/* Ever longer messages, for which a library in front needs ever more memory. */
static void growing(void) {
  for (size_t count = 1000; count <= 1000000; count *= 10) {
    char *mine[MOST], *all[MOST];
    for (int local = 0; local < each; local++) {
      mine[local] = malloc(count);
      all[local] = malloc(count * (size_t)n);
      CHECK(mine[local] && all[local]);
      memset(mine[local], first + local + 1, count);
    }
    CALL(ncclGroupStart());
    for (int local = 0; local < each; local++)
      CALL(ncclAllGather(mine[local], all[local], count, ncclInt8, comms[local], NULL));
    CALL(ncclGroupEnd());
    wait_for(comms);
    for (int local = 0; local < each; local++) {
      for (size_t i = 0; i < count * (size_t)n; i += 997) CHECK(all[local][i] == (char)(1 + i / count));
      free(mine[local]);
      free(all[local]);
    }
  }
}

/* A group that is not to be done: the vendor tells how long all of its calls would take. */
static void an_estimate(void) {
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  int got = -1;
  if (nonblocking || version_of_nccl() < 22203) return;
  fill();
  OK(ncclGroupStart());
  for (int local = 0; local < each; local++) {
    OK(ncclAllReduce(in[local], out[local], COUNT, ncclFloat, ncclSum, comms[local], NULL));
    OK(ncclRecv(&got, 1, ncclInt, (first + local + n - 1) % n, comms[local], NULL));
  }
  OK(ncclGroupSimulateEnd(&info));
  CHECK(got == -1 && out[0][0] == 0 && out[0][COUNT - 1] == 0);
  if (first == 0) printf("an estimate: %g\n", (double)info.estimatedTime);
}

/* The same ranks backwards, and all of them once more, made in one group each and used in one. */
static void children(void) {
  ncclComm_t backwards[MOST] = {NULL}, again[MOST] = {NULL};
  int mine[MOST], all[MOST][MAX_RANKS], sums[MOST];
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++)
    CALL(ncclCommSplit(comms[local], 0, -first - local, &backwards[local], NULL));
  CALL(ncclGroupEnd());
  wait_for(comms), wait_for(backwards);
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++)
    CALL(ncclCommSplit(comms[local], 0, first + local, &again[local], NULL));
  CALL(ncclGroupEnd());
  wait_for(comms), wait_for(again);
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++) {
    mine[local] = first + local;
    CALL(ncclAllGather(&mine[local], all[local], 1, ncclInt, backwards[local], NULL));
    CALL(ncclAllReduce(&mine[local], &sums[local], 1, ncclInt, ncclSum, again[local], NULL));
  }
  CALL(ncclGroupEnd());
  wait_for(backwards), wait_for(again);
  for (int local = 0; local < each; local++) {
    for (int i = 0; i < n; i++) CHECK(all[local][i] == n - 1 - i);
    CHECK(sums[local] == n * (n - 1) / 2);
  }
  for (int local = 0; local < each; local++) {
    OK(ncclCommDestroy(backwards[local]));
    OK(ncclCommDestroy(again[local]));
  }
}

static void node_main(int node, const struct grid* grid) {
  (void)grid;
  first = node * each;
  make();
  for (int round = 0; round < 2; round++) {
    collectives();
    a_mixed_group();
    an_estimate();
    children();
  }
  growing();
  CALL(ncclGroupStart());
  for (int local = 0; local < each; local++) CALL(ncclCommFinalize(comms[local]));
  CALL(ncclGroupEnd());
  wait_for(comms);
  for (int local = 0; local < each; local++) OK(ncclCommDestroy(comms[local]));
}

int main(int argc, char** argv) {
  int nodes = 0;
  char text[16];
  if (argc < 2 || sscanf(argv[1], "%dx%d", &nodes, &each) != 2 || each > MOST || nodes * each > MAX_RANKS) {
    fprintf(stderr, "nodes NODESxRANKS [nonblocking]\n");
    return 2;
  }
  n = nodes * each;
  nonblocking = argc > 2;
  snprintf(text, sizeof(text), "%dx1", nodes);
  struct grid grid = parse_grid(text);
  if (run_ranks(&grid, node_main, 60, NULL) != 0) return 1;
  printf("%d nodes, one thread each\n", nodes);
  return 0;
}
