/* Elements of calls whose every result is looked at. */
#include "both.h"

/* Small whole numbers, whose sums floats hold exactly. */
static float element(int from, size_t i, int call) { return (float)((i * 7 + (size_t)from * 13 + (size_t)call) % 1024); }

/* The elements of a sum from `first` on. */
static void look_at_part(const float *recv, size_t first, size_t count, int call) {
  float sums[1024];
  for (size_t i = 0; i < 1024; i++) {
    sums[i] = 0;
    for (int from = 0; from < nranks; from++) sums[i] += element(from, i, call);
  }
  for (size_t i = 0; i < count; i++)
    if (recv[i] != sums[(first + i) % 1024]) {
      fprintf(stderr, "rank %d, call %d: element %zu is %g, not %g\n", rank, call, first + i, recv[i], sums[(first + i) % 1024]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static inline void look_at(const float *recv, size_t count, int call) { look_at_part(recv, 0, count, call); }
