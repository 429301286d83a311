/* Communicators of strataCommInitHost beside those of NCCL in one process: every call on one of the host is Strata's, and
 * none of them reaches NCCL. Calls on the host have counts of 777 and more, others do not.
 *
 * host_comms GRID over|disabled|nobody: how Strata stands to NCCL (in front of it, switched off, NCCL not found). */
#include "ranks.h"
#include <dlfcn.h>
#include <strata.h>

#define MANY 777

static int me, n;
static const char* mode;

/* The program is linked with NCCL, which does not have these. */
#define STRATA(name) __typeof__(&name) p_##name
static STRATA(strataGetUniqueId);
static STRATA(strataCommInitHost);
static STRATA(strataGetLastError);
static STRATA(strataStreamCreate);
static STRATA(strataStreamSynchronize);
static STRATA(strataStreamDestroy);
static STRATA(strataStreamAddCallbackStatus);
static STRATA(strataCommDescribe);
#define FIND(name) CHECK((p_##name = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name)) != NULL)

static int over(void) { return strcmp(mode, "over") == 0; }
static int nobody(void) { return strcmp(mode, "nobody") == 0; }

/* Names of Strata's are no addresses. */
static int is_host(ncclComm_t comm) { return (uintptr_t)comm >> 48 == 0x0c0c; }

static ncclUniqueId host_id(int number) {
  if (me == 0) {
    CHECK(p_strataGetUniqueId(&shared->ids[number]) == ncclSuccess);
    atomic_store(&shared->ready[number], 1);
  }
  while (!atomic_load(&shared->ready[number])) usleep(200);
  return shared->ids[number];
}

static void sums_up(ncclComm_t comm, int size, int count, strataStream_t stream) {
  int in[2 * MANY], out[2 * MANY];
  for (int i = 0; i < count; i++) in[i] = i, out[i] = -1;
  OK(ncclAllReduce(in, out, count, ncclInt, ncclSum, comm, stream));
  if (stream) CHECK(p_strataStreamSynchronize(stream) == ncclSuccess);
  for (int i = 0; i < count; i++) CHECK(out[i] == size * i);
}

/* Every function that takes a communicator and works on the host. */
static void every_call(ncclComm_t host) {
  int number = -1, in[8 * MANY], out[8 * MANY];
  ncclResult_t state;
  OK(ncclCommCount(host, &number)); CHECK(number == n);
  OK(ncclCommUserRank(host, &number)); CHECK(number == me);
  OK(ncclCommCuDevice(host, &number)); CHECK(number == 0);
  OK(ncclCommGetAsyncError(host, &state)); CHECK(state == ncclSuccess);
  for (int i = 0; i < 8 * MANY; i++) in[i] = me + 1;
  int all = n * (n + 1) / 2;
  OK(ncclReduce(in, out, MANY, ncclInt, ncclSum, 0, host, NULL)); CHECK(me || out[MANY - 1] == all);
  OK(ncclBroadcast(in, out, MANY, ncclInt, n - 1, host, NULL)); CHECK(out[5] == n);
  out[0] = me;
  OK(ncclBcast(out, MANY, ncclInt, 0, host, NULL)); CHECK(out[0] == 0);
  OK(ncclAllGather(in, out, MANY, ncclInt, host, NULL)); CHECK(out[MANY] == 2);
  OK(ncclReduceScatter(in, out, MANY, ncclInt, ncclMax, host, NULL)); CHECK(out[0] == n);
  if (!nobody()) {
    OK(ncclAlltoAll(in, out, MANY, ncclInt, host, NULL)); CHECK(out[(n - 1) * MANY] == n);
    OK(ncclGather(in, out, MANY, ncclInt, 0, host, NULL)); CHECK(me || out[MANY] == 2);
    OK(ncclScatter(in, out, MANY, ncclInt, 0, host, NULL)); CHECK(out[0] == 1);
  }
  OK(ncclGroupStart());
  OK(ncclSend(in, MANY, ncclInt, (me + 1) % n, host, NULL));
  OK(ncclRecv(out, MANY, ncclInt, (me + n - 1) % n, host, NULL));
  OK(ncclGroupEnd());
  CHECK(out[0] == (me + n - 1) % n + 1);
  ncclRedOp_t twice;
  int two = 2;
  OK(ncclRedOpCreatePreMulSum(&twice, &two, ncclInt, ncclScalarHostImmediate, host));
  OK(ncclAllReduce(in, out, MANY, ncclInt, twice, host, NULL)); CHECK(out[3] == 2 * all);
  OK(ncclRedOpDestroy(twice, host));
  void* registered;
  OK(ncclCommRegister(host, in, sizeof(in), &registered));
  OK(ncclCommDeregister(host, registered));
  char text[1024];
  OK(p_strataCommDescribe(host, text, sizeof(text)));
}

static void children(ncclComm_t host) {
  ncclComm_t half = NULL, rest = NULL, config_child = NULL;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  int last = n - 1;
  OK(ncclCommSplit(host, me % 2, me, &half, NULL)); CHECK(is_host(half));
  sums_up(half, (n + 1 - me % 2) / 2, MANY, NULL);
  OK(ncclCommSplit(host, 0, me, &config_child, &config)); CHECK(is_host(config_child));
  sums_up(config_child, n, MANY, NULL);
  if (me != last) {
    OK(ncclCommShrink(host, &last, 1, &rest, NULL, 0)); CHECK(is_host(rest));
    sums_up(rest, n - 1, MANY, NULL);
    OK(ncclCommDestroy(rest));
  }
  OK(ncclCommDestroy(config_child));
  OK(ncclCommFinalize(half));
  OK(ncclCommDestroy(half));
}

static void one_group_has_both(ncclComm_t world, ncclComm_t host, strataStream_t stream) {
  int small[4] = {1, 2, 3, 4}, sums[4] = {0}, many[MANY], all[MANY];
  for (int i = 0; i < MANY; i++) many[i] = 1, all[i] = 0;
  for (int on_stream = 0; on_stream < 2; on_stream++) {
    OK(ncclGroupStart());
    OK(ncclAllReduce(many, all, MANY, ncclInt, ncclSum, host, on_stream ? stream : NULL));
    OK(ncclGroupStart());
    OK(ncclAllReduce(small, sums, 4, ncclInt, ncclSum, world, NULL));
    OK(ncclGroupEnd());
    CHECK(all[0] == 0 && sums[0] == 0);
    OK(ncclGroupEnd());
    if (on_stream) OK(p_strataStreamSynchronize(stream));
    CHECK(all[MANY - 1] == n && sums[3] == 4 * n);
    all[0] = all[MANY - 1] = sums[0] = sums[3] = 0;
  }
  /* A wrong call of either kind is the group's failure; the other kind's part is done. */
  OK(ncclGroupStart());
  OK(ncclAllReduce(small, sums, 4, ncclInt, ncclSum, world, NULL));
  CHECK(ncclAllReduce(many, all, MANY, (ncclDataType_t)99, ncclSum, host, NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument && sums[3] == 4 * n && all[0] == 0);
  CHECK(strstr(p_strataGetLastError(), "data type 99") && strstr(ncclGetLastError(host), "data type 99"));
  OK(ncclGroupStart());
  CHECK(ncclAllReduce(small, sums, 4, (ncclDataType_t)99, ncclSum, world, NULL) == ncclInvalidArgument);
  OK(ncclAllReduce(many, all, MANY, ncclInt, ncclSum, host, NULL));
  CHECK(ncclGroupEnd() == ncclInvalidArgument && all[0] == n);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  sums_up(world, n, 10, NULL);
  sums_up(host, n, MANY, NULL);
  all[0] = 0;
  if (version_of_nccl() < 22200) return;
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  OK(ncclGroupStart());
  OK(ncclAllReduce(many, all, MANY, ncclInt, ncclSum, host, NULL));
  OK(ncclGroupSimulateEnd(&info)); CHECK(info.estimatedTime > 0 && all[0] == 0);
}

static void made_in_one_group(int number) {
  ncclComm_t world = NULL, host = NULL;
  ncclUniqueId id = shared_id(number, me), own = host_id(number + 1);
  OK(ncclGroupStart());
  OK(p_strataCommInitHost(&host, n, own, me, -1));
  OK(ncclCommInitRank(&world, n, id, me));
  OK(ncclGroupEnd());
  CHECK(is_host(host) && !is_host(world));
  sums_up(host, n, MANY, NULL);
  sums_up(world, n, 10, NULL);
  OK(ncclCommDestroy(host));
  OK(ncclCommDestroy(world));
}

/* What NCCL does not have is refused on its communicators, with the reason, and its group fails. */
static void types_are_of_the_host(ncclComm_t world, ncclComm_t host) {
  static int16_t in[MANY], out[MANY];
  in[0] = (int16_t)(me + 1), out[0] = 0;
  OK(ncclAllReduce(in, out, MANY, strataInt16, strataBitOr, host, NULL)); CHECK(out[0] >= 3);
  out[0] = 0;
  CHECK(ncclAllReduce(in, out, 10, strataInt16, ncclSum, world, NULL) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "int16 is for communicators in host memory (strataCommInitHost)"));
  CHECK(ncclAllReduce(in, out, 10, ncclInt32, strataBitXor, world, NULL) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "bxor is for communicators in host memory"));
  CHECK(ncclSend(in, 10, strataUint16, 0, world, NULL) == ncclInvalidArgument);
  OK(ncclGroupStart());
  CHECK(ncclAllReduce(in, out, 10, strataInt16, ncclSum, world, NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument && out[0] == 0);
  sums_up(world, n, 10, NULL);
}

static ncclResult_t told;
static char told_text[256];
static void note(void* argument, ncclResult_t status) {
  told = status;
  snprintf(told_text, sizeof(told_text), "%s", ncclGetLastError((ncclComm_t)argument));
}

/* The last rank leaves the others alone: that is the status of what they have queued. */
static void a_callback_is_told(ncclComm_t host, strataStream_t stream) {
  static int value[MANY];
  told = ncclInProgress;
  OK(ncclAllReduce(value, value, MANY, ncclInt, ncclSum, host, stream));
  OK(p_strataStreamAddCallbackStatus(stream, note, host));
  OK(p_strataStreamSynchronize(stream)); CHECK(told == ncclSuccess);
  if (me != n - 1) {
    CHECK(ncclAllReduce(value, value, MANY, ncclInt, ncclSum, host, stream) == ncclSuccess);
    CHECK(p_strataStreamAddCallbackStatus(stream, note, host) == ncclSuccess);
    CHECK(p_strataStreamSynchronize(stream) == ncclRemoteError);
    CHECK(told == ncclRemoteError && strstr(told_text, "rank"));
  }
}

static void wrong_calls(ncclComm_t gone) {
  ncclComm_t comm = (ncclComm_t)&n;
  ncclUniqueId id, none;
  int number;
  ncclResult_t state;
  memset(&none, 0, sizeof(none));
  CHECK(ncclCommCount(gone, &number) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(gone), "has been destroyed"));
  CHECK(ncclCommGetAsyncError(gone, &state) == ncclInvalidArgument);
  CHECK(ncclCommDestroy(gone) == ncclInvalidArgument);
  CHECK(p_strataGetUniqueId(NULL) == ncclInvalidArgument);
  OK(p_strataGetUniqueId(&id));
  CHECK(p_strataCommInitHost(NULL, 1, id, 0, -1) == ncclInvalidArgument);
  CHECK(p_strataCommInitHost(&comm, 0, id, 0, -1) == ncclInvalidArgument);
  CHECK(p_strataCommInitHost(&comm, 2, id, 2, -1) == ncclInvalidArgument);
  CHECK(p_strataCommInitHost(&comm, 1, none, 0, -1) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "strataGetUniqueId"));
  if (strcmp(mode, "disabled") == 0) {
    OK(ncclGetUniqueId(&id));
    CHECK(p_strataCommInitHost(&comm, 1, id, 0, -1) == ncclInvalidArgument);
    CHECK(strstr(p_strataGetLastError(), "strataGetUniqueId"));
  }
  CHECK(comm == (ncclComm_t)&n);
}

static void rank_main(int rank, const struct grid* grid) {
  ncclComm_t world = NULL, host = NULL, second = NULL, child = NULL;
  strataStream_t stream;
  me = rank, n = grid->nranks;
  FIND(strataGetUniqueId); FIND(strataCommInitHost); FIND(strataGetLastError); FIND(strataStreamCreate);
  FIND(strataStreamSynchronize); FIND(strataStreamDestroy); FIND(strataStreamAddCallbackStatus); FIND(strataCommDescribe);
  if (over()) made_in_one_group(0); /* The group begins before there is any communicator of the host. */
  if (!nobody()) {
    OK(ncclCommInitRank(&world, n, shared_id(2, me), me));
    sums_up(world, n, 10, NULL);
  }
  OK(p_strataCommInitHost(&host, n, over() ? shared_id(3, me) : host_id(3), me, 60000));
  OK(p_strataCommInitHost(&second, n, host_id(4), me, 0));
  CHECK(is_host(host) && is_host(second) && !is_host(world));
  OK(p_strataStreamCreate(&stream));
  sums_up(host, n, MANY, NULL);
  sums_up(second, n, MANY, stream);
  every_call(host);
  children(host);
  if (!nobody()) {
    made_in_one_group(5);
    OK(ncclCommSplit(world, 0, me, &child, NULL)); CHECK(!is_host(child));
    sums_up(child, n, 10, NULL);
    one_group_has_both(child, host, stream);
    types_are_of_the_host(child, host);
    OK(ncclCommDestroy(child));
    int number;
    OK(ncclCommCount(world, &number)); CHECK(number == n);
  }
  OK(ncclCommDestroy(second));
  wrong_calls(second);
  a_callback_is_told(host, stream);
  OK(ncclCommAbort(host));
  OK(p_strataStreamDestroy(stream));
  if (world) {
    sums_up(world, n, 10, NULL);
    OK(ncclCommDestroy(world));
  }
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  struct grid grid = parse_grid(argv[1]);
  mode = argv[2];
  return run_ranks(&grid, rank_main, 60, NULL) != 0;
}
