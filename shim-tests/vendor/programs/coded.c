/* Calls with a code on memory and streams of GPUs. Nothing waits on the host between the copies in, the calls and the copies
 * out: their order is the streams'. Every result is checked at the end.
 *
 * coded GRID runs|plain|refused [TEXT]: each rank is a process with a device. "runs": results are near the exact ones and not
 * the same, and with a residual what one call leaves out comes back with later ones. "plain": nothing is coded, and the residual
 * stays as it is. "refused": calls are, with TEXT in the error; the communicator is as good as before. */
#include "ranks.h"
#include <dlfcn.h>
#include <math.h>
#include <strata.h>
#include "../../soft/driver.h"

enum { COUNT = 6000, TIMES = 40 };

/* The program is linked with NCCL, which does not have these. */
#define STRATA(name) __typeof__(&name) p_##name
#define FIND(name) CHECK((p_##name = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name)) != NULL)
static STRATA(strataAllReduceCoded);
static STRATA(strataReduceScatterCoded);
static STRATA(strataGetLastError);
static STRATA(strataStreamCreate);
static STRATA(strataStreamDestroy);

static const char *what, *text;
static int n, me;
static ncclComm_t comm;
static gpu_stream streams[2];
static float *in, *zeros; /* pinned */

static float value(int of, int i) { return (float)(((i * 7 + of * 13) % 101) - 50) * (i % 3 ? 0.37f : 11.3f); }

static double exact(int i) {
  double sum = 0;
  for (int of = 0; of < n; of++) sum += value(of, i);
  return sum;
}

/* What mx8, the least exact code, may leave out of a sum of such numbers. */
static double most(void) { return 565.0 * n * 0.13; }

static float *floats(gpu_stream stream, const float *from) {
  float *device = gpu_memory(COUNT * sizeof(float));
  gpu_to(device, (void *)from, COUNT * sizeof(float), stream);
  return device;
}

/* All results of some calls, one after another on a stream. */
struct results {
  float *send, *recv, *residual, *got[TIMES], *kept;
  gpu_stream stream;
};

static ncclResult_t call(const struct results *all, const char *code, ncclRedOp_t op, int scatters) {
  cudaStream_t stream = (cudaStream_t)all->stream;
  if (scatters) return p_strataReduceScatterCoded(all->send, all->recv, all->residual, COUNT / n, ncclFloat, op, code, comm, stream);
  return p_strataAllReduceCoded(all->send, all->recv, all->residual, COUNT, ncclFloat, op, code, comm, stream);
}

static struct results begin(int with_residual, int stream) {
  struct results all = {.stream = streams[stream]};
  all.send = floats(all.stream, in), all.recv = floats(all.stream, zeros);
  if (with_residual) all.residual = floats(all.stream, zeros);
  for (int i = 0; i < TIMES; i++) all.got[i] = gpu_pinned(COUNT * sizeof(float));
  all.kept = gpu_pinned(COUNT * sizeof(float));
  return all;
}

/* As many calls as there are results; behind each its result is copied out. */
static void issue(struct results *all, int times, const char *name, ncclRedOp_t op, int scatters) {
  for (int i = 0; i < times; i++) {
    OK(call(all, name, op, scatters));
    gpu_from(all->got[i], all->recv, COUNT * sizeof(float), all->stream);
  }
  if (all->residual) gpu_from(all->kept, all->residual, COUNT * sizeof(float), all->stream);
}

static void end(struct results *all) {
  gpu_wait(all->stream);
  gpu_free(all->send), gpu_free(all->recv);
  if (all->residual) gpu_free(all->residual);
}

/* The largest error of the means of the results: of an all-reduce, or of a reduce-scatter's block. */
static double worst(const struct results *all, int times, double scale, int scatters) {
  double found = 0;
  for (int i = 0; i < (scatters ? COUNT / n : COUNT); i++) {
    double sum = 0;
    for (int time = 0; time < times; time++) sum += all->got[time][i] * scale;
    found = fmax(found, fabs(sum / times - exact(scatters ? me * (COUNT / n) + i : i)));
  }
  return found;
}

static int in_residual(const struct results *all) {
  int kept = 0;
  for (int i = 0; i < COUNT; i++) kept += all->kept[i] != 0;
  return kept;
}

static void runs(void) {
  const char *codes[] = {"bf16", "mx8", "int8"};
  for (int form = 0; form < 3; form++) {
    struct results lost = begin(0, 0), kept = begin(1, 1), block = begin(1, 0);
    /* Calls on two streams; of each collective some in a group. */
    issue(&lost, 1, codes[form], ncclSum, 0);
    issue(&kept, TIMES, codes[form], ncclAvg, 0);
    OK(ncclGroupStart());
    OK(call(&block, codes[form], ncclSum, 1));
    OK(ncclAllReduce(kept.send, kept.recv, 1, ncclInt, ncclSum, comm, (cudaStream_t)kept.stream));
    OK(ncclGroupEnd());
    gpu_from(block.got[0], block.recv, COUNT * sizeof(float), block.stream);
    gpu_from(block.kept, block.residual, COUNT * sizeof(float), block.stream);
    end(&lost), end(&kept), end(&block);
    double once = worst(&lost, 1, 1, 0), mean = worst(&kept, TIMES, n, 0), scattered = worst(&block, 1, 1, 1);
    if (me == 0) fprintf(stderr, "%s: %g once, %g on average, %g of a block\n", codes[form], once, mean, scattered);
    CHECK(once > 0 && once < most() && mean * 6 < once && scattered > 0 && scattered < most());
    CHECK(in_residual(&kept) > COUNT / 16 && in_residual(&block) > COUNT / 16);
  }
  struct results none = begin(0, 0);
  CHECK(p_strataAllReduceCoded(none.send, none.recv, NULL, COUNT, ncclInt, ncclSum, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "int32"));
  CHECK(call(&none, "mx9", ncclSum, 0) == ncclInvalidArgument && strstr(p_strataGetLastError(), "did you mean mx8"));
  CHECK(p_strataAllReduceCoded(none.send, none.recv, none.recv, COUNT, ncclFloat, ncclSum, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(p_strataAllReduceCoded(none.send, none.recv, none.send, COUNT, ncclFloat, ncclMax, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "residual"));
  strataStream_t ours;
  OK(p_strataStreamCreate(&ours));
  CHECK(p_strataAllReduceCoded(none.send, none.recv, NULL, COUNT, ncclFloat, ncclSum, "mx8", comm, ours) == ncclInvalidArgument);
  CHECK(strstr(p_strataGetLastError(), "strataStreamCreate"));
  OK(p_strataStreamDestroy(ours));
  ncclRedOp_t scaled;
  float two = 2;
  OK(ncclRedOpCreatePreMulSum(&scaled, &two, ncclFloat, ncclScalarHostImmediate, comm));
  CHECK(call(&none, "mx8", scaled, 0) == ncclInvalidUsage && strstr(p_strataGetLastError(), "the program's own"));
  OK(ncclRedOpDestroy(scaled, comm));
  OK(p_strataAllReduceCoded(none.send, none.recv, NULL, 0, ncclFloat, ncclSum, "mx8", comm, NULL));
  end(&none);
}

static void plain(void) {
  struct results all = begin(1, 0), block = begin(1, 1);
  issue(&all, 2, "mx8", ncclSum, 0);
  issue(&block, 1, "int8", ncclSum, 1);
  end(&all), end(&block);
  CHECK(worst(&all, 2, 1, 0) < 1e-2 && worst(&block, 1, 1, 1) < 1e-2);
  CHECK(in_residual(&all) == 0 && in_residual(&block) == 0);
}

static void refused(void) {
  struct results all = begin(1, 0);
  for (int scatters = 0; scatters < 2; scatters++) {
    ncclResult_t result = call(&all, "mx8", ncclSum, scatters);
    const char *said = p_strataGetLastError();
    if (result != ncclInvalidUsage || !strstr(said, text)) fprintf(stderr, "%d: %s\n", result, said);
    CHECK(result == ncclInvalidUsage && strstr(said, text));
  }
  OK(ncclAllReduce(all.send, all.recv, COUNT, ncclFloat, ncclSum, comm, (cudaStream_t)all.stream));
  gpu_from(all.got[0], all.recv, COUNT * sizeof(float), all.stream);
  end(&all);
  CHECK(worst(&all, 1, 1, 0) < 1e-2);
}

static void rank_main(int rank, const struct grid *grid) {
  n = grid->nranks, me = rank;
  FIND(strataAllReduceCoded);
  FIND(strataReduceScatterCoded);
  FIND(strataGetLastError);
  FIND(strataStreamCreate);
  FIND(strataStreamDestroy);
  gpu_use(rank % 8);
  for (int i = 0; i < 2; i++) streams[i] = gpu_new_stream();
  in = gpu_pinned(COUNT * sizeof(float)), zeros = gpu_pinned(COUNT * sizeof(float));
  for (int i = 0; i < COUNT; i++) in[i] = value(rank, i), zeros[i] = 0;
  OK(ncclCommInitRank(&comm, n, shared_id(0, rank), rank));
  if (!strcmp(what, "runs")) runs();
  else if (!strcmp(what, "plain")) plain();
  else refused();
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  struct grid grid = parse_grid(argv[1]);
  what = argv[2], text = argc > 3 ? argv[3] : "";
  int failed = run_ranks(&grid, rank_main, 120, NULL);
  if (failed == 0) printf("calls on %s are right\n", argv[1]);
  return failed != 0;
}
