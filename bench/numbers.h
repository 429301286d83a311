/* Elements of calls whose every result is looked at. */
#include "both.h"

/* Small whole numbers, whose sums floats hold exactly. */
static float element(int from, size_t i, int call) { return (float)((i * 7 + (size_t)from * 13 + (size_t)call) % 1024); }

static void look_at(const float *recv, size_t count, int call) {
  float sums[1024];
  for (size_t i = 0; i < 1024; i++) {
    sums[i] = 0;
    for (int from = 0; from < nranks; from++) sums[i] += element(from, i, call);
  }
  for (size_t i = 0; i < count; i++)
    if (recv[i] != sums[i % 1024]) {
      fprintf(stderr, "rank %d, call %d: element %zu is %g, not %g\n", rank, call, i, recv[i], sums[i % 1024]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
}
