/* Makes and ends communicators over and over, with children and operations, and tells what that leaves behind: memory,
 * mappings, files, threads, after the first tenth and at the end. More files or threads, or a mapping for every second
 * cycle, are an error; memory is for the reader to judge.
 *
 * cycles GRID CYCLES */
#include "ranks.h"
#include <dirent.h>

static int cycles;

static int entries(const char* path) {
  int count = 0;
  DIR* folder = opendir(path);
  CHECK(folder);
  while (readdir(folder)) count++;
  closedir(folder);
  return count - 3; /* ".", ".." and, of files, the folder itself */
}

static long lines(const char* path) {
  long count = 0;
  FILE* file = fopen(path, "r");
  CHECK(file);
  for (int c; (c = fgetc(file)) != EOF;) count += c == '\n';
  fclose(file);
  return count;
}

static void tell(int rank, int cycle) {
  static long maps_before;
  static int files_before, threads_before;
  long pages, resident, maps = lines("/proc/self/maps");
  int files = entries("/proc/self/fd"), threads = entries("/proc/self/task") + 1;
  /* The service closes a connection when the other side has: that may come after the communicator's end. */
  for (int i = 0; i < 500 && maps_before > 0 && (files > files_before || threads > threads_before); i++) {
    usleep(10000);
    files = entries("/proc/self/fd"), threads = entries("/proc/self/task") + 1;
  }
  FILE* file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &pages, &resident) == 2);
  fclose(file);
  char text[200];
  int len = snprintf(text, sizeof(text), "rank %d cycle %d: rss_kb=%ld maps=%ld files=%d threads=%d\n", rank, cycle,
                     resident * (sysconf(_SC_PAGESIZE) / 1024), maps, files, threads);
  CHECK(write(1, text, (size_t)len) == len);
  if (maps_before > 0) {
    CHECK(maps <= maps_before + cycles / 2 && files <= files_before && threads <= threads_before);
  }
  maps_before = maps;
  files_before = files;
  threads_before = threads;
}

static void cycle(int rank, int n, int number) {
  ncclComm_t comm, parity = NULL, all = NULL;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  float in[256], out[256 * MAX_RANKS];
  for (int i = 0; i < 256; i++) in[i] = (float)(rank + i);
  /* Ids are made on the way: cell number % IDS is free again when all have used it. */
  config.commName = "world";
  OK(ncclCommInitRankConfig(&comm, n, shared_id(number % IDS, rank), rank, &config));
  OK(ncclCommSplit(comm, rank % 2, rank, &parity, &config));
  OK(ncclCommSplit(comm, number % 3 == 0 && rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, -rank, &all, &config));
  OK(ncclAllGather(in, out, 256, ncclFloat, comm, NULL));
  for (int i = 0; i < 256 * n; i++) CHECK(out[i] == (float)(i / 256 + i % 256));
  OK(ncclReduceScatter(out, in, 256 / (size_t)n, ncclFloat, ncclSum, comm, NULL));
  OK(ncclAllReduce(in, out, 256, ncclFloat, ncclSum, parity, NULL));
  if (number % 2) OK(ncclCommFinalize(comm));
  if (number % 4 < 2) {
    OK(ncclCommDestroy(comm));
    OK(ncclCommDestroy(all));
    OK(ncclCommDestroy(parity));
  } else {
    OK(ncclCommAbort(parity));
    OK(ncclCommAbort(all));
    OK(ncclCommDestroy(comm));
  }
}

static void rank_main(int rank, const struct grid* grid) {
  for (int i = 0; i < cycles; i++) {
    cycle(rank, grid->nranks, i);
    meet(grid);
    if (rank == 0) atomic_store(&shared->ready[i % IDS], 0);
    meet(grid);
    if (i + 1 == (cycles + 9) / 10) tell(rank, i + 1);
  }
  tell(rank, cycles);
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "cycles GRID CYCLES\n");
    return 2;
  }
  struct grid grid = parse_grid(argv[1]);
  cycles = atoi(argv[2]);
  return run_ranks(&grid, rank_main, 300 + (unsigned)cycles / 10, NULL) != 0;
}
