/* Training that goes on when ranks are lost: a least-squares fit, a part of each batch on every rank.
 *
 * Start it with STRATA_LOST=continue, and RANK, WORLD_SIZE and NCCL_COMM_ID set:
 *
 *     STRATA_LOST=continue NCCL_COMM_ID=127.0.0.1:29555 strata launch -n 4 --no-kill ./elastic
 *
 * and kill some ranks, or have one end itself: ELASTIC_DIE=RANK:STEP kills it, ELASTIC_LEAVE=RANK:STEP has it leave in order.
 * Nothing in the loop looks for failures. The step in which a rank is lost is made without its part of the batch, and counts the
 * samples that it has; from the next step on the batch is divided among those who are left, so it stays as large as it was. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nccl.h>
#include <strata.h>

#define FEATURES 16
#define SAMPLES 4096
#define BATCH 512
#define STEPS 200
#define RATE 0.05

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        ncclResult_t result = (call);                                                                                  \
        if (result != ncclSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL));                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Who divides the batch: how many, and which of them this rank is. */
struct division {
    int place, members;
};

/* The division now, and that which holds when the call `first_call` has ended; 0: none. */
struct share {
    ncclComm_t comm;
    int rank;
    long calls;
    struct division now, next;
    long first_call;
};

/* So many calls have ended. */
static void ended(struct share *share, long calls)
{
    if (share->first_call > 0 && share->first_call <= calls) {
        share->now = share->next;
        share->first_call = 0;
    }
}

/* Called inside of the call in which this rank hears that others were lost. The state has the members as "members":[0,1,3], and
 * the first call that these made among themselves. A rank that has the result of a call before the loss may hear of it at that
 * call's end, and another one in the next call: only when that one has ended do all know. */
static void on_change(void *argument)
{
    struct share *share = argument;
    static char state[65536];
    CHECK(strataCommState(share->comm, state, sizeof state));
    char *at = strstr(state, "\"members\":["), *first = strstr(state, "\"first_call\":");
    if (at == NULL || first == NULL)
        return;
    ended(share, share->calls + 1);
    share->first_call = atol(first + strlen("\"first_call\":"));
    at += strlen("\"members\":[");
    share->next.members = 0;
    do {
        if (strtol(at, &at, 10) == share->rank)
            share->next.place = share->next.members;
        share->next.members++;
    } while (*at++ == ',');
}

static int number(const char *name)
{
    const char *text = getenv(name);
    if (text == NULL) {
        fprintf(stderr, "%s is not set: start this program with a launcher\n", name);
        exit(2);
    }
    return atoi(text);
}

/* Whether this rank is to end itself now. */
static int is_told(const char *name, int rank, int step)
{
    const char *text = getenv(name);
    int who, when;
    return text != NULL && sscanf(text, "%d:%d", &who, &when) == 2 && who == rank && when == step;
}

/* A feature of a sample, between -1 and 1; what is to be found is 1, 2, 3, ... */
static double feature(int sample, int which)
{
    unsigned mixed = (unsigned)(sample * FEATURES + which) * 2654435761u;
    mixed ^= mixed >> 15;
    return (double)(mixed % 20001u) / 10000.0 - 1.0;
}

int main(void)
{
    int rank = number("RANK"), nranks = number("WORLD_SIZE");
    struct share share = {.rank = rank, .now = {.place = rank, .members = nranks}};
    double weights[FEATURES] = {0}, sums[FEATURES + 2];
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id)); /* The same on all ranks, by NCCL_COMM_ID. */
    CHECK(ncclCommInitRank(&share.comm, nranks, id, rank));
    CHECK(strataCommOnChange(share.comm, on_change, &share));
    for (int step = 0; step < STEPS; step++) {
        if (is_told("ELASTIC_DIE", rank, step))
            kill(getpid(), SIGKILL);
        if (is_told("ELASTIC_LEAVE", rank, step))
            break;
        /* The gradient, the loss and the number of samples of this rank's part of the batch. */
        memset(sums, 0, sizeof sums);
        for (int k = share.now.place; k < BATCH; k += share.now.members) {
            int sample = (step * BATCH + k) % SAMPLES;
            double error = 0;
            for (int which = 0; which < FEATURES; which++)
                error += (weights[which] - (which + 1)) * feature(sample, which);
            for (int which = 0; which < FEATURES; which++)
                sums[which] += error * feature(sample, which);
            sums[FEATURES] += error * error;
            sums[FEATURES + 1]++;
        }
        CHECK(ncclAllReduce(sums, sums, FEATURES + 2, ncclDouble, ncclSum, share.comm, NULL));
        ended(&share, ++share.calls);
        for (int which = 0; which < FEATURES; which++)
            weights[which] -= RATE * 2 * sums[which] / sums[FEATURES + 1];
        if (step % 50 == 49 && share.now.place == 0) {
            printf("step %d: loss %.12g of %.0f samples on %d ranks\n", step + 1, sums[FEATURES] / sums[FEATURES + 1],
                   sums[FEATURES + 1], share.now.members);
            fflush(stdout); /* Who is killed has said what it had to. */
        }
    }
    CHECK(ncclCommDestroy(share.comm));
    return 0;
}
