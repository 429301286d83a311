/* An ordinary NCCL program: nothing here knows of Strata.
 *
 * Start it on several ranks with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set (`strata launch`, torchrun, ...).
 * It sums vectors, gathers and scatters blocks, passes data around a ring, checks every result, and prints what it
 * found. Buffers are host memory and the stream is the null stream, on which Strata's host device works. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <nccl.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        ncclResult_t result = (call);                                                                                  \
        if (result != ncclSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL));                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    if (value == NULL) {
        fprintf(stderr, "%s is not set: start this program with a launcher\n", name);
        exit(2);
    }
    return value;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Rank 0 makes the unique id and hands it to whoever connects; NCCL leaves this to the program. */
static ncclUniqueId exchange_id(int rank, int nranks)
{
    ncclUniqueId id;
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *where;
    if (getaddrinfo(variable("MASTER_ADDR"), variable("MASTER_PORT"), &hints, &where) != 0)
        fail("getaddrinfo");
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&id));
        int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(listener, where->ai_addr, where->ai_addrlen) != 0 || listen(listener, nranks) != 0)
            fail("listen");
        for (int peer = 1; peer < nranks; peer++) {
            int peer_socket = accept(listener, NULL, NULL);
            if (peer_socket < 0 || write(peer_socket, &id, sizeof id) != (ssize_t)sizeof id)
                fail("sending the id");
            close(peer_socket);
        }
        close(listener);
    } else {
        int attempts = 3000, peer_socket;
        for (;;) {
            peer_socket = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(peer_socket, where->ai_addr, where->ai_addrlen) == 0)
                break;
            close(peer_socket);
            if (--attempts == 0)
                fail("connect");
            usleep(10000); /* rank 0 may not be listening yet */
        }
        size_t have = 0;
        while (have < sizeof id) {
            ssize_t got = read(peer_socket, (char *)&id + have, sizeof id - have);
            if (got <= 0)
                fail("receiving the id");
            have += (size_t)got;
        }
        close(peer_socket);
    }
    freeaddrinfo(where);
    return id;
}

/* Small whole numbers, so that sums are exact in any order. */
static float value(int rank, size_t index)
{
    return (float)((index * 7 + (size_t)rank * 13) % 31);
}

static float sum_of(int nranks, size_t index)
{
    float sum = 0;
    for (int rank = 0; rank < nranks; rank++)
        sum += value(rank, index);
    return sum;
}

static void expect(const char *what, int rank, size_t index, float got, float wanted)
{
    if (got != wanted) {
        fprintf(stderr, "rank %d: %s: element %zu is %g and not %g\n", rank, what, index, got, wanted);
        exit(1);
    }
}

static void report(int rank, const char *what, size_t bytes, double took)
{
    if (rank == 0)
        printf("%-14s %6zu KiB in %8.1f us (first call), every element as it should be\n", what, bytes / 1024, 1e6 * took);
}

int main(void)
{
    int rank = atoi(variable("RANK")), nranks = atoi(variable("WORLD_SIZE")), version;
    size_t block = 64 * 1024, total = block * (size_t)nranks;

    CHECK(ncclGetVersion(&version));
    ncclUniqueId id = exchange_id(rank, nranks);
    ncclComm_t comm;
    CHECK(ncclCommInitRank(&comm, nranks, id, rank));

    int count, mine;
    CHECK(ncclCommCount(comm, &count));
    CHECK(ncclCommUserRank(comm, &mine));
    if (rank == 0)
        printf("NCCL %d.%d.%d, rank %d of %d\n", version / 10000, version / 100 % 100, version % 100, mine, count);

    float *send = malloc(total * sizeof *send), *recv = malloc(total * sizeof *recv);
    if (send == NULL || recv == NULL)
        fail("malloc");
    for (size_t i = 0; i < total; i++)
        send[i] = value(rank, i);

    double start = seconds(), took;
    CHECK(ncclAllReduce(send, recv, total, ncclFloat, ncclSum, comm, NULL));
    took = seconds() - start;
    for (size_t i = 0; i < total; i++)
        expect("AllReduce", rank, i, recv[i], sum_of(nranks, i));
    report(rank, "AllReduce", total * sizeof *send, took);

    start = seconds();
    CHECK(ncclAllGather(send, recv, block, ncclFloat, comm, NULL));
    took = seconds() - start;
    for (size_t i = 0; i < total; i++)
        expect("AllGather", rank, i, recv[i], value((int)(i / block), i % block));
    report(rank, "AllGather", total * sizeof *send, took);

    start = seconds();
    CHECK(ncclReduceScatter(send, recv, block, ncclFloat, ncclSum, comm, NULL));
    took = seconds() - start;
    for (size_t i = 0; i < block; i++)
        expect("ReduceScatter", rank, i, recv[i], sum_of(nranks, (size_t)rank * block + i));
    report(rank, "ReduceScatter", total * sizeof *send, took);

    int next = (rank + 1) % nranks, previous = (rank + nranks - 1) % nranks;
    start = seconds();
    CHECK(ncclGroupStart());
    CHECK(ncclSend(send, block, ncclFloat, next, comm, NULL));
    CHECK(ncclRecv(recv, block, ncclFloat, previous, comm, NULL));
    CHECK(ncclGroupEnd());
    took = seconds() - start;
    for (size_t i = 0; i < block; i++)
        expect("Send/Recv", rank, i, recv[i], value(previous, i));
    report(rank, "Send/Recv ring", block * sizeof *send, took);

    CHECK(ncclCommDestroy(comm));
    free(send);
    free(recv);
    return 0;
}
