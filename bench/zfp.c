/* zfp beside Strata's codes (docs/adr/0032-codes.md): bytes, errors, and processor time of one coding and decoding of floats.
 *
 * build: cc -O3 -march=native -I include bench/zfp.c -o zfp -lzfp -lpthread -L LIB -lnccl      (Debian: libzfp-dev)
 * usage: zfp [ELEMENTS]
 *
 * zfp codes one-dimensional arrays at a fixed rate, as MCR-DL has it: without it sizes are not known before. Strata's codes are those
 * of an all-gather of two ranks by the flat algorithm, which codes all that is sent: the second one's result is what the first one's
 * floats became. Its bytes are those of a block and its scale. Errors are the largest, by the largest of its block of 32, and the root mean square, by
 * that of the data. Times are of one processor, medians of 9; Strata's are in the ADR, since no function of its interface only codes.
 */
#include "nccl.h"
#include "strata.h"
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zfp.h>

enum { RUNS = 9, BLOCK = 32 };

static size_t count = 1 << 20;
static float *data, *result;
static ncclUniqueId id;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

static double median(double *times) { return qsort(times, RUNS, sizeof *times, ascending), times[RUNS / 2]; }

static double uniform(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (double)(state >> 11) / 9007199254740992.0;
}

/* normal: weights or gradients. spiky: the same, of which one in 100 is 1,000 times as large. smooth: what zfp is made for. */
static void fill(const char *kind) {
  for (size_t i = 0; i < count; i++) {
    double normal = sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform());
    int spike = !strcmp(kind, "spiky") && uniform() < 0.01;
    data[i] = !strcmp(kind, "smooth") ? (float)sin(i * 1e-3) : (float)(normal * (spike ? 1000 : 1));
  }
}

static void report(const char *kind, const char *code, double bytes, double coding, double decoding) {
  double worst = 0, squares = 0, all = 0;
  for (size_t block = 0; block < count; block += BLOCK) {
    double largest = 0, error = 0;
    for (size_t i = block; i < block + BLOCK && i < count; i++) {
      double left_out = fabs((double)data[i] - result[i]);
      largest = fmax(largest, fabs(data[i])), error = fmax(error, left_out);
      squares += left_out * left_out, all += (double)data[i] * data[i];
    }
    if (largest > 0) worst = fmax(worst, error / largest);
  }
  printf("%-8s %-8s %6.3f %12.5f %12.5f", kind, code, bytes / (4.0 * count), worst, sqrt(squares / all));
  if (coding > 0) printf(" %8.2f %8.2f", coding * 1e9 / count, decoding * 1e9 / count);
  puts("");
}

static void by_zfp(const char *kind, double bits) {
  zfp_stream *zfp = zfp_stream_open(NULL);
  zfp_field *field = zfp_field_1d(data, zfp_type_float, count);
  double rate = zfp_stream_set_rate(zfp, bits, zfp_type_float, 1, 0), times[2][RUNS];
  size_t room = zfp_stream_maximum_size(zfp, field), bytes = 0;
  void *buffer = malloc(room);
  for (int run = 0; run < RUNS; run++) {
    bitstream *stream = stream_open(buffer, room);
    zfp_stream_set_bit_stream(zfp, stream);
    double begun = now();
    bytes = zfp_compress(zfp, field);
    times[0][run] = now() - begun;
    zfp_stream_rewind(zfp);
    zfp_field_set_pointer(field, result);
    begun = now();
    zfp_decompress(zfp, field);
    times[1][run] = now() - begun;
    zfp_field_set_pointer(field, data);
    stream_close(stream);
  }
  char name[32];
  snprintf(name, sizeof name, "zfp %g", rate);
  report(kind, name, (double)bytes, median(times[0]), median(times[1]));
  zfp_field_free(field), zfp_stream_close(zfp), free(buffer);
}

static void must(ncclResult_t outcome) {
  if (outcome != ncclSuccess) fprintf(stderr, "%s\n", strataGetLastError()), exit(1);
}

/* Rank 1 gets rank 0's data. */
static const char *code;

static void *rank_main(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm;
  float *all = calloc(2 * count, sizeof *all);
  must(ncclCommInitRank(&comm, 2, id, rank));
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = code;
  must(ncclAllGatherConfig(data, all, count, ncclFloat, comm, NULL, &config));
  if (rank == 1) memcpy(result, all, count * sizeof *all);
  must(ncclCommDestroy(comm));
  free(all);
  return NULL;
}

static void by_strata(const char *kind, const char *name, double bytes_a_block) {
  pthread_t threads[2];
  code = name;
  must(ncclGetUniqueId(&id));
  for (intptr_t rank = 0; rank < 2; rank++) pthread_create(&threads[rank], NULL, rank_main, (void *)rank);
  for (int rank = 0; rank < 2; rank++) pthread_join(threads[rank], NULL);
  report(kind, name, bytes_a_block * count / BLOCK, 0, 0);
}

int main(int argc, char **argv) {
  if (argc > 1) count = strtoull(argv[1], NULL, 10);
  data = malloc(count * sizeof *data), result = malloc(count * sizeof *result);
  if (!count || !data || !result) return fprintf(stderr, "usage: zfp [ELEMENTS]\n"), 2;
  printf("%-8s %-8s %6s %12s %12s %8s %8s\n", "# data", "code", "bytes", "worst", "rms", "coding", "decoding");
  for (const char **kind = (const char *[]){"normal", "spiky", "smooth", NULL}; *kind; kind++) {
    fill(*kind);
    by_zfp(*kind, 8), by_zfp(*kind, 16);
    by_strata(*kind, "coded_mx8", BLOCK + 1), by_strata(*kind, "coded_int8", BLOCK + 1), by_strata(*kind, "coded_bf16", 2 * BLOCK);
  }
  return 0;
}
