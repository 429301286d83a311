/* What NICs have sent by the kernel's count: one rank of every node reads it for its node (the interfaces eth*, or those that begin
 * with $BENCH_NICS).
 */
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

/* One call of `run`, by all ranks. */
static Sample counted(void (*run)(const void *), const void *what) {
  wait_asleep(); /* What the call before it still sends from this node's other ranks is not this one's. */
  Nics before = read_nics();
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  run(what);
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

/* Who reads for each node, and how many nodes there are. */
static void find_nics(void) {
  MPI_Comm node;
  int local;
  if (getenv("BENCH_NICS")) interfaces = getenv("BENCH_NICS");
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &local);
  MPI_Comm_size(node, &local_ranks);
  reads_for_node = local == 0;
  MPI_Allreduce(&reads_for_node, &nnodes, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Comm_free(&node);
}
