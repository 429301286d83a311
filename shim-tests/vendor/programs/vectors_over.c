/* Collectives of blocks of different sizes on communicators of NCCL's, in host memory: what is refused and what that does to a
 * group, communicators whose calls do not wait, and groups inside groups.
 *
 * vectors_over refused|nonblocking|nested GRID */
#include "ranks.h"
#include <dlfcn.h>
#include <strata.h>

/* The program is linked with NCCL, which does not have these. */
#define STRATA(name) static __typeof__(&name) p_##name
#define FIND(name) CHECK((p_##name = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name)) != NULL)
STRATA(strataAllGatherV);
STRATA(strataReduceScatterV);
STRATA(strataAllToAllV);
STRATA(strataGatherV);
STRATA(strataScatterV);
STRATA(strataAllGatherVConfig);
STRATA(strataGetLastError);

enum { MOST = 64 };
static int me, n, from[MAX_RANKS * MOST], to[MAX_RANKS * MOST];

static void find(int rank, const struct grid* grid) {
  me = rank, n = grid->nranks;
  FIND(strataAllGatherV); FIND(strataReduceScatterV); FIND(strataAllToAllV); FIND(strataGatherV); FIND(strataScatterV);
  FIND(strataAllGatherVConfig); FIND(strataGetLastError);
}

/* Rank r has r + 1 elements, and rank 1 none. */
static size_t elements(int rank) { return rank == 1 ? 0 : (size_t)rank + 1; }

static void count_all(size_t* counts) {
  for (int rank = 0; rank < n; rank++) counts[rank] = elements(rank);
}

static void fill(int call) {
  for (int i = 0; i < MOST; i++) from[i] = call * 1000 + me * 100 + i;
  for (int i = 0; i < MAX_RANKS * MOST; i++) to[i] = -1;
}

/* That `to` has what an all-gather of the call makes of it. */
static void check_gathered(int call, const int* result) {
  size_t at = 0;
  for (int rank = 0; rank < n; rank++)
    for (size_t i = 0; i < elements(rank); i++, at++) CHECK(result[at] == call * 1000 + rank * 100 + (int)i);
  CHECK(result[at] == -1);
}

static void refuse(ncclResult_t result, ncclResult_t wanted, const char* words) {
  const char* text = p_strataGetLastError();
  if (result != wanted || !strstr(text, words))
    fprintf(stderr, "%d where %d was expected, \"%s\" in: %s\n", result, wanted, words, text);
  CHECK(result == wanted && strstr(text, words));
}

static void refused(int rank, const struct grid* grid) {
  find(rank, grid);
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, n, shared_id(0, rank), rank));
  size_t counts[MAX_RANKS], over[MAX_RANKS] = {0}, huge[MAX_RANKS] = {SIZE_MAX}, other[MAX_RANKS], two[MAX_RANKS];
  count_all(counts);
  for (int i = 0; i < n; i++) other[i] = counts[i] + 1, two[i] = 2;
  ncclResult_t bad = ncclInvalidArgument;
  refuse(p_strataAllGatherV(from, to, NULL, NULL, ncclInt, comm, NULL), bad, "counts");
  refuse(p_strataAllGatherV(from, to, huge, NULL, ncclInt, comm, NULL), bad, "memory can hold");
  refuse(p_strataAllGatherV(from, to, two, over, ncclInt, comm, NULL), bad, "of recvbuff overlap");
  refuse(p_strataAllGatherV(from, NULL, counts, NULL, ncclInt, comm, NULL), bad, "recvbuff");
  refuse(p_strataAllGatherV(from, to, counts, NULL, (ncclDataType_t)99, comm, NULL), bad, "invalid data type 99");
  refuse(p_strataAllGatherV(from, to, counts, NULL, strataInt16, comm, NULL), bad, "another library's");
  refuse(p_strataReduceScatterV(from, to, counts, NULL, ncclInt, (ncclRedOp_t)77, comm, NULL), bad, "returns 4");
  refuse(p_strataAllToAllV(from, two, NULL, from, two, NULL, ncclInt, comm, NULL), bad, "no in-place form");
  refuse(p_strataAllToAllV(from, counts, NULL, to, other, NULL, ncclInt, comm, NULL), bad, "sends itself");
  refuse(p_strataGatherV(from, 3, to, counts, NULL, ncclInt, n, comm, NULL), bad, "invalid root");
  refuse(p_strataScatterV(from, counts, NULL, to, 3, ncclInt, -1, comm, NULL), bad, "invalid root");
  refuse(p_strataAllGatherV(from, to, counts, NULL, ncclInt, NULL, NULL), bad, "comm");
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = "ring";
  refuse(p_strataAllGatherVConfig(from, to, counts, NULL, ncclInt, comm, NULL, &config), ncclInvalidUsage, "algSelection ring");
  config.maxCTAs = -1;
  refuse(p_strataAllGatherVConfig(from, to, counts, NULL, ncclInt, comm, NULL, &config), bad, "maxCTAs");
  /* A group with such a call ends with its error, and the next call is as good as ever. */
  fill(1);
  OK(ncclGroupStart());
  OK(p_strataAllGatherV(from, to, counts, NULL, ncclInt, comm, NULL));
  refuse(p_strataAllGatherV(from, to, NULL, NULL, ncclInt, comm, NULL), bad, "counts");
  CHECK(ncclGroupEnd() == bad);
  meet(grid);
  fill(2);
  config.maxCTAs = 4, config.forceAlgSelection = 0;
  OK(p_strataAllGatherVConfig(from, to, counts, NULL, ncclInt, comm, NULL, &config));
  check_gathered(2, to);
  OK(ncclCommDestroy(comm));
}

/* Success at once and success later are both right. */
static int accepted(ncclResult_t code) { return code == ncclSuccess || code == ncclInProgress; }

static void nonblocking(int rank, const struct grid* grid) {
  find(rank, grid);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = NULL;
  size_t counts[MAX_RANKS];
  count_all(counts);
  CHECK(accepted(ncclCommInitRankConfig(&comm, n, shared_id(0, rank), rank, &config)));
  while (!*(ncclComm_t volatile*)&comm) usleep(200);
  CHECK(settled(comm) == ncclSuccess);
  for (int call = 1; call < 4; call++) {
    int sum[2] = {me, 1}, all[2];
    fill(call);
    if (call > 1) OK(ncclGroupStart());
    CHECK(accepted(p_strataAllGatherV(from, to, counts, NULL, ncclInt, comm, NULL)));
    if (call > 1) CHECK(accepted(ncclAllReduce(sum, all, 2, ncclInt, ncclSum, comm, NULL)));
    if (call > 1) CHECK(accepted(ncclGroupEnd()));
    CHECK(settled(comm) == ncclSuccess);
    check_gathered(call, to);
    CHECK(call == 1 || all[1] == n);
  }
  CHECK(accepted(ncclCommFinalize(comm)));
  CHECK(settled(comm) == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

/* Nothing is done before the outermost group ends. */
static void nested(int rank, const struct grid* grid) {
  find(rank, grid);
  ncclComm_t comm;
  size_t counts[MAX_RANKS], none[MAX_RANKS] = {0};
  int all[MAX_RANKS * MOST];
  count_all(counts);
  OK(ncclCommInitRank(&comm, n, shared_id(0, rank), rank));
  fill(5);
  memset(all, -1, sizeof(all));
  OK(ncclGroupStart());
  OK(ncclGroupStart());
  OK(p_strataAllGatherV(from, to, counts, NULL, ncclInt, comm, NULL));
  OK(p_strataAllGatherV(from, to, none, NULL, ncclInt, comm, NULL));
  OK(ncclGroupEnd());
  OK(p_strataAllGatherV(from, all, counts, NULL, ncclInt, comm, NULL));
  if (n > 1) CHECK(to[0] == -1 && all[0] == -1);
  OK(ncclGroupEnd());
  check_gathered(5, to);
  check_gathered(5, all);
  OK(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  static const struct { const char* name; void (*rank_main)(int rank, const struct grid* grid); } cases[] = {
      {"refused", refused}, {"nonblocking", nonblocking}, {"nested", nested}};
  for (size_t i = 0; argc == 3 && i < sizeof(cases) / sizeof(*cases); i++) {
    if (strcmp(cases[i].name, argv[1]) != 0) continue;
    struct grid grid = parse_grid(argv[2]);
    return run_ranks(&grid, cases[i].rank_main, 60, NULL) != 0;
  }
  return 2;
}
