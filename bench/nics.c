/* Strata against the MPI this program is built with, on nodes whose NICs are the limit, in one run.
 *
 * usage: bench-nics LABEL RATE [BYTES [REPEATS]]     RATE: bytes a second that a NIC sends and, at once, receives
 *
 * Both libraries do the same collective turn by turn. Before and after each, one rank of every node reads what each of its
 * NICs has sent by the kernel's count (the interfaces eth*, or those that begin with $BENCH_NICS). BYTES is the all-gather's
 * output on each rank, the reduce-scatter's input and the all-reduce's vector. Printed are medians of the slowest rank's
 * time, their range, the time over the floor, and the fewest and most bytes a NIC sent in the median call.
 *
 * The floor is the time in which the bytes that must cross the NICs can. Of B bytes, n nodes, node i having the share s_i
 * of the ranks and k_i NICs, K in all:
 *   all-gather       node i must receive what the others have, B (1 - s_i), and send its own, B s_i
 *   reduce-scatter   the same with sending and receiving exchanged
 *   all-reduce       node i must send and receive B at least; and each element costs n - 1 messages until its n partial
 *                    sums are one, and n - 1 until all have it: together 2 (n - 1) B over K NICs
 * each over k_i times RATE, the slowest node counting. On equal nodes of k NICs this is (n - 1)/n B / k for the first two
 * and twice that for the third.
 */
#include "both.h"
#include <dirent.h>
#include <string.h>

enum { MOST_NICS = 64, MOST_REPEATS = 99 };

/* What the NICs of this rank's node have sent; none on ranks that do not read for their node. */
typedef struct {
  int ranks, count;
  long long sent[MOST_NICS];
} Nics;

static int local_ranks, reads_for_node, nnodes;
static const char *interfaces = "eth";

static Nics read_nics(void) {
  Nics nics = {.ranks = local_ranks};
  DIR *all = reads_for_node ? opendir("/sys/class/net") : NULL;
  for (struct dirent *entry; all && (entry = readdir(all)) && nics.count < MOST_NICS;) {
    char path[512];
    if (strncmp(entry->d_name, interfaces, strlen(interfaces)) != 0) continue;
    snprintf(path, sizeof path, "/sys/class/net/%s/statistics/tx_bytes", entry->d_name);
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%lld", &nics.sent[nics.count]) != 1) {
      fprintf(stderr, "rank %d cannot read %s\n", rank, path);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    fclose(file);
    nics.count++;
  }
  if (all) closedir(all);
  return nics;
}

/* What one call did: its time, and the bytes sent by the NIC that sent least and by the one that sent most. */
typedef struct {
  double seconds, least, most;
} Sample;

static int by_time(const void *a, const void *b) { return ascending(&((const Sample *)a)->seconds, &((const Sample *)b)->seconds); }

static Sample measured(int which, int ours, const float *send, float *recv, size_t bytes, ncclComm_t comm) {
  wait_asleep(); /* What the call before it still sends from this node's other ranks is not this one's. */
  Nics before = read_nics();
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  if (ours) run_ours(which, rank, send, recv, bytes, comm);
  else run_theirs(which, send, recv, bytes);
  Sample sample = {slowest_rank(MPI_Wtime() - start), 1e30, 0};
  Nics after = read_nics();
  for (int nic = 0; nic < after.count; nic++) {
    double sent = (double)(after.sent[nic] - before.sent[nic]);
    if (sent < sample.least) sample.least = sent;
    if (sent > sample.most) sample.most = sent;
  }
  MPI_Allreduce(MPI_IN_PLACE, &sample.least, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &sample.most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return sample;
}

static double larger(double a, double b) { return a > b ? a : b; }

static double floor_seconds(int which, double bytes, double rate) {
  Nics mine = read_nics();
  double share = (double)local_ranks / nranks, slowest = 0, nics = mine.count;
  MPI_Allreduce(MPI_IN_PLACE, &nics, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  if (mine.count > 0 && nnodes > 1) slowest = (which == ALL_REDUCE ? 1 : larger(share, 1 - share)) / mine.count;
  MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (which == ALL_REDUCE) slowest = larger(slowest, 2.0 * (nnodes - 1) / nics);
  return slowest * bytes / rate;
}

static void bench(const char *label, double rate, size_t bytes, int repeats, ncclComm_t comm) {
  float *send = malloc(bytes), *recv = calloc(bytes, 1), *theirs_recv = calloc(bytes, 1);
  Sample ours[MOST_REPEATS], theirs[MOST_REPEATS];
  for (size_t i = 0; i < bytes / sizeof(float); i++) send[i] = (float)((i * 7 + (size_t)rank * 13) % 1024);
  for (int which = 0; which < COLLECTIVES; which++) {
    double floor = floor_seconds(which, (double)bytes, rate);
    same_result(which, send, recv, theirs_recv, bytes, comm);
    for (int i = 0; i < repeats; i++) {
      ours[i] = measured(which, 1, send, recv, bytes, comm);
      theirs[i] = measured(which, 0, send, theirs_recv, bytes, comm);
    }
    qsort(ours, (size_t)repeats, sizeof *ours, by_time);
    qsort(theirs, (size_t)repeats, sizeof *theirs, by_time);
    Sample our = ours[repeats / 2], their = theirs[repeats / 2];
    if (rank == 0)
      printf("%-14s %-5s %8.3f %8.3f %6.3f..%-6.3f %7.2f %7.2f..%-7.2f %5.1f%% %8.3f %6.3f..%-6.3f %7.2f..%-7.2f %6.2f\n", names[which],
             label, floor, our.seconds, ours[0].seconds, ours[repeats - 1].seconds, our.seconds / floor, our.least / 1e6,
             our.most / 1e6, 100 * (our.most - our.least) / our.most, their.seconds, theirs[0].seconds,
             theirs[repeats - 1].seconds, their.least / 1e6, their.most / 1e6, their.seconds / our.seconds);
    fflush(stdout);
  }
  free(send), free(recv), free(theirs_recv);
}

int main(int argc, char **argv) {
  ncclComm_t comm = join(&argc, &argv);
  double rate = argc > 2 ? atof(argv[2]) : 0;
  size_t bytes = argc > 3 ? strtoull(argv[3], NULL, 10) : (size_t)64 << 20;
  int repeats = argc > 4 ? atoi(argv[4]) : 5;
  if (rate <= 0 || repeats < 1 || repeats > MOST_REPEATS) {
    if (rank == 0) fprintf(stderr, "usage: bench-nics LABEL RATE [BYTES [REPEATS, at most %d]]\n", MOST_REPEATS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  if (getenv("BENCH_NICS")) interfaces = getenv("BENCH_NICS");
  MPI_Comm node;
  int local, kind;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &local);
  MPI_Comm_size(node, &local_ranks);
  reads_for_node = local == 0;
  MPI_Allreduce(&reads_for_node, &nnodes, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Comm_free(&node);
  bytes -= bytes % (sizeof(float) * (size_t)nranks);
  if (rank == 0) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(version, &kind);
    printf("# %d ranks on %d nodes, %zu bytes, NICs of %.0f Mbit/s, %d runs; %.*s\n", nranks, nnodes, bytes, rate * 8e-6, repeats,
           (int)strcspn(version, "\n,"), version);
    printf("%-14s %-5s %8s %8s %14s %7s %16s %6s %8s %14s %16s %6s\n", "# collective", "over", "floor(s)", "ours(s)", "range",
           "x floor", "NIC MB sent", "uneven", "MPI(s)", "range", "NIC MB sent", "ratio");
  }
  bench(argv[1], rate, bytes, repeats, comm);
  leave(comm);
  return 0;
}
