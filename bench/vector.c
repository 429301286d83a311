/* Strata's collectives of blocks of different sizes against those of the MPI this program is built with, on nodes whose NICs
 * are the limit, in one run.
 *
 * usage: bench-vector LABEL RATE [SIZES [REPEATS]]     RATE: bytes a second that a NIC sends and, at once, receives
 *                                                       REPEATS: 5; of at most 64 KiB twice as many rows of 8 calls
 *
 * Both libraries do the same collective turn by turn. SIZES is a list like 64K,1M: bytes of all blocks together, on all ranks.
 * Blocks are
 *   even     of one size
 *   zipf     the k-th longest has 1/k of the longest
 *   one      nine tenths belong to one rank, which is rank 0, the rest to all others evenly
 *   zeros    one of four has elements, all as many
 * Of an all-to-all there is a block for each pair, and a rank's are those that it sends. Printed are medians of the slowest
 * rank's time, their range, the time over the floor, and MPI's time over ours.
 *
 * The floor is the time in which the bytes that must cross the NICs can, the slowest node counting: a node must send what it
 * has for others and receive what others have for it. A block of an all-gather leaves its node once, and a block of a
 * reduce-scatter comes to its node once, as the sum of what all others have.
 */
#include "both.h"
#include <dirent.h>
#include <math.h>
#include <strata.h>
#include <string.h>

enum { SHORT = 65536, MOST_REPEATS = 99, MOST = 256, EVEN = 0, ZIPF, ONE, ZEROS, SHAPES };
enum { ALL_GATHER_V, REDUCE_SCATTER_V, ALL_TO_ALL_V, GATHER_V, SCATTER_V, VECTORED };
static const char *shapes[SHAPES] = {"even", "zipf", "one", "zeros"};
static const char *vectored[VECTORED] = {"all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v"};

static int node_of[MOST];
static double nics_of[MOST]; /* by node */
static int nnodes;

/* Counts and places of one rank's blocks, in both libraries' types. */
typedef struct {
  size_t counts[MOST], places[MOST], total;
  int int_counts[MOST], int_places[MOST];
} Blocks;

/* A call as this rank sees it. `pairs`: elements of each block, from rank to rank for an all-to-all, else by rank. */
typedef struct {
  int which;
  size_t *pairs;
  Blocks in, out;
  float *send, *recv[2]; /* ours, theirs */
} Call;

static void add_block(Blocks *blocks, int at, size_t count) {
  blocks->counts[at] = count, blocks->places[at] = blocks->total;
  blocks->int_counts[at] = (int)count, blocks->int_places[at] = (int)blocks->total;
  blocks->total += count;
}

/* Elements of each of `n` blocks, `each` of which belong to one rank. */
static void spread(int shape, size_t n, size_t each, size_t elements, size_t *counts) {
  double harmonic = 0;
  size_t owners = n / each;
  for (size_t i = 0; i < n; i++) harmonic += 1.0 / (double)(i + 1);
  for (size_t i = 0; i < n; i++) {
    size_t place = i * 7 % n; /* The longest ones are not all of one node where 7 does not divide n. */
    double share = 1.0 / (double)n;
    if (n % 7 == 0) place = i;
    if (shape == ZIPF) share = 1.0 / (double)(i + 1) / harmonic;
    if (shape == ONE && owners > 1) share = (place / each == 0 ? 0.9 : 0.1 / (double)(owners - 1)) / (double)each;
    if (shape == ZEROS) share = i % 4 == 0 ? 1.0 / ceil((double)n / 4) : 0;
    counts[place] = (size_t)(share * (double)elements);
  }
}

static size_t pair(const Call *call, int from, int to) {
  return call->pairs[call->which == ALL_TO_ALL_V ? from * nranks + to : call->which == GATHER_V || call->which == ALL_GATHER_V ? from : to];
}

static void begin(Call *call, int which, int shape, size_t elements) {
  size_t n = (size_t)nranks, blocks = which == ALL_TO_ALL_V ? n * n : n;
  *call = (Call){.which = which, .pairs = calloc(blocks, sizeof(size_t))};
  spread(shape, blocks, which == ALL_TO_ALL_V ? n : 1, elements, call->pairs);
  int splits_in = which == REDUCE_SCATTER_V || which == ALL_TO_ALL_V || (which == SCATTER_V && rank == 0);
  int splits_out = which == ALL_GATHER_V || which == ALL_TO_ALL_V || (which == GATHER_V && rank == 0);
  for (int peer = 0; peer < nranks; peer++) {
    if (splits_in || peer == 0) add_block(&call->in, peer, pair(call, rank, splits_in ? peer : rank));
    if (splits_out || peer == 0) add_block(&call->out, peer, pair(call, splits_out ? peer : rank, rank));
  }
  call->send = malloc((call->in.total + 1) * sizeof(float));
  for (int i = 0; i < 2; i++) call->recv[i] = calloc(call->out.total + 1, sizeof(float));
  for (size_t i = 0; i < call->in.total; i++) call->send[i] = (float)((i * 7 + (size_t)rank * 13) % 1024);
}

static void end(Call *call) { free(call->pairs), free(call->send), free(call->recv[0]), free(call->recv[1]); }

static void ours_once(const Call *call, ncclComm_t comm) {
  const Blocks *in = &call->in, *out = &call->out;
  const float *send = call->send;
  float *recv = call->recv[0];
  ncclResult_t result = ncclInternalError;
  switch (call->which) {
    case ALL_GATHER_V: result = strataAllGatherV(send, recv, out->counts, out->places, ncclFloat, comm, NULL); break;
    case REDUCE_SCATTER_V:
      result = strataReduceScatterV(send, recv, in->counts, in->places, ncclFloat, ncclSum, comm, NULL);
      break;
    case ALL_TO_ALL_V:
      result = strataAllToAllV(send, in->counts, in->places, recv, out->counts, out->places, ncclFloat, comm, NULL);
      break;
    case GATHER_V: result = strataGatherV(send, in->counts[0], recv, out->counts, out->places, ncclFloat, 0, comm, NULL); break;
    case SCATTER_V: result = strataScatterV(send, in->counts, in->places, recv, out->counts[0], ncclFloat, 0, comm, NULL); break;
  }
  check(result, vectored[call->which]);
}

static void theirs_once(const Call *call) {
  const Blocks *in = &call->in, *out = &call->out;
  const float *send = call->send;
  float *recv = call->recv[1];
  MPI_Comm world = MPI_COMM_WORLD;
  switch (call->which) {
    case ALL_GATHER_V:
      MPI_Allgatherv(send, in->int_counts[0], MPI_FLOAT, recv, out->int_counts, out->int_places, MPI_FLOAT, world);
      break;
    case REDUCE_SCATTER_V: MPI_Reduce_scatter(send, recv, in->int_counts, MPI_FLOAT, MPI_SUM, world); break;
    case ALL_TO_ALL_V:
      MPI_Alltoallv(send, in->int_counts, in->int_places, MPI_FLOAT, recv, out->int_counts, out->int_places, MPI_FLOAT, world);
      break;
    case GATHER_V:
      MPI_Gatherv(send, in->int_counts[0], MPI_FLOAT, recv, out->int_counts, out->int_places, MPI_FLOAT, 0, world);
      break;
    case SCATTER_V:
      MPI_Scatterv(send, in->int_counts, in->int_places, MPI_FLOAT, recv, out->int_counts[0], MPI_FLOAT, 0, world);
      break;
  }
}

static void same_results(const Call *call, const char *shape, ncclComm_t comm) {
  ours_once(call, comm);
  theirs_once(call);
  for (size_t i = 0; i < call->out.total; i++)
    if (call->recv[0][i] != call->recv[1][i]) {
      fprintf(stderr, "rank %d: %s, %s: element %zu of %zu is %g, MPI has %g\n", rank, vectored[call->which], shape, i,
              call->out.total, call->recv[0][i], call->recv[1][i]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* Seconds of one of a row of calls, behind one that does not count. */
static double measured(const Call *call, int ours, int row, ncclComm_t comm) {
  double start = 0;
  wait_asleep(); /* What the call before it still sends from this node's other ranks is not this one's. */
  MPI_Barrier(MPI_COMM_WORLD);
  for (int made = row > 1 ? -1 : 0; made < row; made++) {
    if (made == 0) start = MPI_Wtime();
    if (ours) ours_once(call, comm);
    else theirs_once(call);
  }
  return slowest_rank((MPI_Wtime() - start) / row);
}

static double floor_seconds(const Call *call, double rate) {
  double out[MOST] = {0}, in[MOST] = {0}, total = 0, slowest = 0, own[MOST] = {0};
  int root = node_of[0];
  for (int from = 0; from < nranks; from++) {
    total += (double)call->pairs[from], own[node_of[from]] += (double)call->pairs[from];
    for (int to = 0; to < nranks && call->which == ALL_TO_ALL_V; to++) {
      double bytes = node_of[from] == node_of[to] ? 0 : (double)pair(call, from, to);
      out[node_of[from]] += bytes, in[node_of[to]] += bytes;
    }
  }
  for (int node = 0; node < nnodes && nnodes > 1; node++) {
    double others = total - own[node], is_root = node == root;
    switch (call->which) {
      case ALL_GATHER_V: out[node] = own[node], in[node] = others; break;
      case REDUCE_SCATTER_V: out[node] = others, in[node] = own[node]; break;
      case GATHER_V: out[node] = is_root ? 0 : own[node], in[node] = is_root ? others : 0; break;
      case SCATTER_V: in[node] = is_root ? 0 : own[node], out[node] = is_root ? others : 0; break;
    }
    slowest = fmax(slowest, fmax(out[node], in[node]) / fmax(1, nics_of[node]));
  }
  return slowest * sizeof(float) / rate;
}

/* NICs of this node: the interfaces eth*, or those that begin with $BENCH_NICS. */
static double count_nics(void) {
  const char *interfaces = getenv("BENCH_NICS") ? getenv("BENCH_NICS") : "eth";
  double nics = 0;
  DIR *all = opendir("/sys/class/net");
  for (struct dirent *entry; all && (entry = readdir(all));) nics += strncmp(entry->d_name, interfaces, strlen(interfaces)) == 0;
  if (all) closedir(all);
  return nics;
}

/* Which ranks share a node: those that share memory. */
static void find_nodes(void) {
  MPI_Comm node;
  int first = rank, firsts[MOST];
  double nics = count_nics(), all_nics[MOST];
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  MPI_Bcast(&first, 1, MPI_INT, 0, node);
  MPI_Comm_free(&node);
  MPI_Allgather(&first, 1, MPI_INT, firsts, 1, MPI_INT, MPI_COMM_WORLD);
  MPI_Allgather(&nics, 1, MPI_DOUBLE, all_nics, 1, MPI_DOUBLE, MPI_COMM_WORLD);
  for (int i = 0; i < nranks; i++) {
    if (firsts[i] == i) nics_of[nnodes] = all_nics[i], node_of[i] = nnodes++;
    else node_of[i] = node_of[firsts[i]];
  }
}

static void bench(const char *label, double rate, int which, int shape, size_t bytes, int repeats, ncclComm_t comm) {
  Call call;
  /* A short call right behind MPI_Barrier would find MPI's code and connections warm and ours cold, which costs as much as the call. */
  int row = bytes <= SHORT ? 8 : 1;
  if (bytes <= SHORT) repeats = repeats < MOST_REPEATS / 2 ? repeats * 2 + 1 : MOST_REPEATS;
  double ours[MOST_REPEATS], theirs[MOST_REPEATS];
  begin(&call, which, shape, bytes / sizeof(float));
  double floor = floor_seconds(&call, rate);
  same_results(&call, shapes[shape], comm);
  for (int i = 0; i < repeats; i++) ours[i] = measured(&call, 1, row, comm), theirs[i] = measured(&call, 0, row, comm);
  double our = median(ours, repeats), their = median(theirs, repeats);
  if (rank == 0)
    printf("%-16s %-6s %10zu %-5s %9.1f %9.1f %9.1f..%-9.1f %7.2f %9.1f %9.1f..%-9.1f %6.2f\n", vectored[which], shapes[shape],
           bytes, label, floor * 1e6, our * 1e6, ours[0] * 1e6, ours[repeats - 1] * 1e6, floor > 0 ? our / floor : 0,
           their * 1e6, theirs[0] * 1e6, theirs[repeats - 1] * 1e6, their / our);
  fflush(stdout);
  end(&call);
}

/* The next of `8,64K,1M`, and 0 at the end. */
static size_t next_of(const char **sizes) {
  char *end;
  size_t bytes = strtoull(*sizes, &end, 10);
  if (*end == 'K' || *end == 'M') bytes <<= *end++ == 'K' ? 10 : 20;
  *sizes = *end == ',' ? end + 1 : end;
  return bytes;
}

int main(int argc, char **argv) {
  ncclComm_t comm = join(&argc, &argv);
  double rate = argc > 2 ? atof(argv[2]) : 0;
  const char *sizes = argc > 3 ? argv[3] : "4K,64K,1M,16M";
  int repeats = argc > 4 ? atoi(argv[4]) : 5, length;
  if (rate <= 0 || repeats < 1 || repeats > MOST_REPEATS || nranks > MOST) {
    if (rank == 0) fprintf(stderr, "usage: bench-vector LABEL RATE [SIZES [REPEATS, at most %d]], on at most %d ranks\n", MOST_REPEATS, MOST);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  find_nodes();
  if (rank == 0) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(version, &length);
    printf("# %d ranks on %d nodes, NICs of %.0f Mbit/s, %d runs; %.*s\n", nranks, nnodes, rate * 8e-6, repeats,
           (int)strcspn(version, "\n,"), version);
    printf("%-16s %-6s %10s %-5s %9s %9s %20s %7s %9s %20s %6s\n", "# collective", "blocks", "bytes", "over", "floor(us)", "ours(us)",
           "range", "x floor", "MPI(us)", "range", "ratio");
  }
  for (size_t bytes; (bytes = next_of(&sizes)) > 0;)
    for (int which = 0; which < VECTORED; which++)
      for (int shape = 0; shape < SHAPES; shape++) bench(argv[1], rate, which, shape, bytes, repeats, comm);
  leave(comm);
  return 0;
}
