/* Host streams: calls that return at once and run in order, in the background, without a GPU.
 *
 * Two ranks in one process. Each has a stream; on it, a sum over the ranks and then a function of the program that uses
 * it. The program is free meanwhile, and waits once at the end. */
#include <stdio.h>
#include <stdlib.h>

#include <nccl.h>
#include <strata.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        ncclResult_t result = (call);                                                                                  \
        if (result != ncclSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL));                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { RANKS = 2, COUNT = 1 << 20 };

struct vector {
    float sum[COUNT];
    double total;
};

/* Runs on the stream's thread, after what was queued before it. */
static void add_up(void *argument)
{
    struct vector *vector = argument;
    for (int i = 0; i < COUNT; i++)
        vector->total += vector->sum[i];
}

int main(void)
{
    ncclComm_t comms[RANKS];
    strataStream_t streams[RANKS];
    static struct vector vectors[RANKS];

    CHECK(ncclCommInitAll(comms, RANKS, NULL));
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(strataStreamCreate(&streams[rank]));
        for (int i = 0; i < COUNT; i++)
            vectors[rank].sum[i] = (float)(rank + 1);
    }

    /* Nothing here waits: not for the other rank, which has not been called yet, and not for the sum. */
    for (int rank = 0; rank < RANKS; rank++) {
        float *sum = vectors[rank].sum;
        CHECK(ncclAllReduce(sum, sum, COUNT, ncclFloat, ncclSum, comms[rank], streams[rank]));
        CHECK(strataStreamAddCallback(streams[rank], add_up, &vectors[rank]));
    }

    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(strataStreamSynchronize(streams[rank]));
        if (vectors[rank].total != 3.0 * COUNT) {
            fprintf(stderr, "rank %d: the total is %g and not %g\n", rank, vectors[rank].total, 3.0 * COUNT);
            return 1;
        }
        CHECK(strataStreamDestroy(streams[rank]));
        CHECK(ncclCommDestroy(comms[rank]));
    }
    printf("%d ranks summed %d elements on their streams\n", RANKS, COUNT);
    return 0;
}
