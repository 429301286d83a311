/* Two transports at once, and computing beside both: Listings 3 and 4 of MCR-DL (Anthony et al., 2023) without a GPU.
 *
 * Each call has a stream of its own and, where the communicator has several carriers, goes by the one that it names:
 *
 *     STRATA_CARRIERS=tcp,mpi mpirun -n 4 ./overlap @tcp @mpi
 *     strata launch -n 4 --nodes 2 -- ./overlap
 *
 * RANK and WORLD_SIZE say which rank this is, and the launcher how the ranks meet; the program alone is one rank. */
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

enum { COUNT = 1 << 18 };

/* A work handle, as PyTorch's and MCR-DL's calls return: the stream of the call, and the event behind it. */
struct work {
    strataStream_t stream;
    strataEvent_t done;
};

static float x[COUNT], y[COUNT], exchanged[COUNT], z[COUNT];

/* Records the event of a call that has just been queued. */
static void follow(struct work *work)
{
    CHECK(strataEventRecord(work->done, work->stream));
}

/* Runs on the stream that waits for both calls. */
static void add(void *argument)
{
    (void)argument;
    for (int i = 0; i < COUNT; i++)
        z[i] = x[i] + exchanged[i];
}

static ncclCollConfig_t over(const char *carrier)
{
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.algSelection = carrier;
    return config;
}

int main(int argc, char **argv)
{
    ncclComm_t comm;
    ncclUniqueId id;
    int nranks = 1, rank = 0;
    struct work reduce, exchange;
    strataStream_t compute;
    /* What is not named is the communicator's own carrier. */
    ncclCollConfig_t first = over(argc > 1 ? argv[1] : "auto"), second = over(argc > 2 ? argv[2] : "auto");

    CHECK(strataGetWorldId(&id, &nranks, &rank));
    CHECK(ncclCommInitRank(&comm, nranks, id, rank));
    if (COUNT % nranks != 0) {
        fprintf(stderr, "%d elements are no equal blocks for %d ranks\n", COUNT, nranks);
        return 1;
    }
    struct work *both[] = {&reduce, &exchange};
    for (int i = 0; i < 2; i++) {
        CHECK(strataStreamCreate(&both[i]->stream));
        CHECK(strataEventCreate(&both[i]->done));
    }
    CHECK(strataStreamCreate(&compute));
    for (int i = 0; i < COUNT; i++) {
        x[i] = (float)(rank + 1);
        y[i] = (float)(rank * nranks + i / (COUNT / nranks));
    }

    /* Listing 3: the call goes on while the program computes what does not need its result. */
    CHECK(ncclAllReduceConfig(x, x, COUNT, ncclFloat, ncclSum, comm, reduce.stream, &first));
    follow(&reduce);
    double total = 0;
    for (int i = 0; i < COUNT; i++)
        total += y[i];

    /* Listing 4: another call by another carrier beside it, and a wait for both. Nothing here waits but the last line. */
    CHECK(ncclAlltoAllConfig(y, exchanged, COUNT / nranks, ncclFloat, comm, exchange.stream, &second));
    follow(&exchange);
    CHECK(strataEventStreamWait(compute, reduce.done));
    CHECK(strataEventStreamWait(compute, exchange.done));
    CHECK(strataStreamAddCallback(compute, add, NULL));
    CHECK(strataStreamSynchronize(compute));

    for (int i = 0; i < COUNT; i++) {
        float expected = (float)(nranks * (nranks + 1) / 2 + i / (COUNT / nranks) * nranks + rank);
        if (z[i] != expected) {
            fprintf(stderr, "rank %d: z[%d] is %g and not %g\n", rank, i, z[i], expected);
            return 1;
        }
    }
    if (rank == 0)
        printf("%d ranks: sum and exchange of %d elements, beside a sum of %g\n", nranks, COUNT, total);
    for (int i = 0; i < 2; i++) {
        CHECK(strataEventDestroy(both[i]->done));
        CHECK(strataStreamDestroy(both[i]->stream));
    }
    CHECK(strataStreamDestroy(compute));
    CHECK(ncclCommDestroy(comm));
    return 0;
}
