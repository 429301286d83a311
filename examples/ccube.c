/* A training loop whose forward pass follows the all-reduce of the gradients: C-Cube's gradient queuing (Jo, Son and Kim,
 * HPCA 2023, section III-D) on processors.
 *
 * The gradients of all layers lie in one buffer, the first layer's first. The backward pass fills it from its end, one call
 * sums it over the ranks, and each layer of the next forward pass waits for its own range, updates its weights and computes
 * while the call goes on with the layers behind it. In the same run, in turn, so that the machine's noise meets all of them:
 *
 *   whole          one call; the forward pass begins when it has ended
 *   ranges         one call; each layer begins when its range is final
 *   layers         one call a layer, in the order of the forward pass
 *   layers early   one call a layer as soon as its gradients are there, so the first layer's comes last
 *
 * The calculation takes no processor: a layer occupies a modelled device for a time (-f) that its multiplications share out.
 * Filling gradients and updating weights is real work. Every value is checked after every step.
 *
 * Start it as examples/all_reduce.c: strata launch -n 4 --nodes 4 -- ./ccube
 * STRATA_ALLREDUCE_ALGO=two_trees has results come down early; STRATA_SEGMENT_BYTES is the grain in which they come. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <nccl.h>
#include <strata.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        ncclResult_t result = (call);                                                                                  \
        if (result != ncclSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result), strataGetLastError());                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { MOST_LAYERS = 4096 };
enum { WHOLE, RANGES, LAYERS, LAYERS_EARLY, WAYS };
static const char *const NAMES[WAYS] = {"whole", "ranges", "layers", "layers early"};

struct layer {
    size_t first, count;    /* its part of the buffer, in elements */
    double multiplications; /* of an image's forward pass */
    double forward;         /* seconds on the modelled device; the backward pass takes twice as long */
};

static struct layer layers[MOST_LAYERS];
static int layer_count;
static size_t total;
static float *gradients, *weights;
static int rank, nranks;
static ncclComm_t comm;
static strataStream_t stream;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_until(double time)
{
    double left = time - seconds();
    if (left > 0) {
        struct timespec duration = {(time_t)left, (long)(1e9 * (left - (double)(time_t)left))};
        nanosleep(&duration, NULL);
    }
}

static void add_layer(size_t count, double multiplications)
{
    if (layer_count == MOST_LAYERS) {
        fprintf(stderr, "at most %d layers\n", MOST_LAYERS);
        exit(2);
    }
    layers[layer_count++] = (struct layer){total, count, multiplications, 0};
    total += count;
}

/* A convolution's weights, and scale and shift of the normalisation behind it. `side` is the output's in pixels. */
static void add_convolution(size_t kernel, size_t in, size_t out, double side)
{
    add_layer(kernel * kernel * in * out, (double)(kernel * kernel * in * out) * side * side);
    add_layer(out, (double)out * side * side);
    add_layer(out, 0);
}

/* The 161 gradient tensors of ResNet-50 for images of 224 x 224 pixels, 25,557,032 elements. */
static void add_resnet50(void)
{
    static const int blocks[] = {3, 4, 6, 3};
    size_t in = 64;
    add_convolution(7, 3, in, 112);
    for (int stage = 0; stage < 4; stage++) {
        size_t width = (size_t)64 << stage;
        double side = 56 >> stage;
        for (int block = 0; block < blocks[stage]; block++) {
            add_convolution(1, in, width, block == 0 && stage > 0 ? 2 * side : side);
            add_convolution(3, width, width, side);
            add_convolution(1, width, 4 * width, side);
            if (block == 0)
                add_convolution(1, in, 4 * width, side);
            in = 4 * width;
        }
    }
    add_layer(in * 1000, (double)in * 1000);
    add_layer(1000, 0);
}

/* Small whole numbers, so that sums are exact in any order. */
static float value(int of, int step, unsigned index)
{
    return (float)((index * 2654435761u + (unsigned)of * 2246822519u + (unsigned)step * 3266489917u) >> 28);
}

static void fill(const struct layer *layer, int step)
{
    for (size_t i = layer->first; i < layer->first + layer->count; i++)
        gradients[i] = value(rank, step, (unsigned)i);
}

/* A step of the optimizer for one layer. The gradients are overwritten, while the call may go on behind them. */
static void update(const struct layer *layer)
{
    for (size_t i = layer->first; i < layer->first + layer->count; i++) {
        weights[i] -= gradients[i];
        gradients[i] = 0;
    }
}

static void all_reduce(const struct layer *layer, size_t count)
{
    float *data = gradients + layer->first;
    CHECK(ncclAllReduce(data, data, count, ncclFloat, ncclSum, comm, stream));
}

/* One backward pass, the sums over the ranks, and the next forward pass. `times` gets the seconds from the end of the
 * backward pass until the first layer may begin, and those of the whole step. */
static void train(int way, int step, double times[2])
{
    double begin = seconds(), device = begin;
    for (int i = layer_count - 1; i >= 0; i--) {
        fill(&layers[i], step);
        device += 2 * layers[i].forward;
        if (way == LAYERS_EARLY) {
            sleep_until(device);
            all_reduce(&layers[i], layers[i].count);
        }
    }
    sleep_until(device);

    double ready = seconds();
    if (way == WHOLE || way == RANGES)
        all_reduce(&layers[0], total);
    for (int i = 0; way == LAYERS && i < layer_count; i++)
        all_reduce(&layers[i], layers[i].count);
    if (way == WHOLE)
        CHECK(strataStreamSynchronize(stream));
    for (int i = 0; i < layer_count; i++) {
        const struct layer *layer = &layers[i];
        if (way != WHOLE)
            CHECK(strataStreamWaitRange(NULL, gradients + layer->first, layer->count * sizeof *gradients));
        if (i == 0)
            times[0] = seconds() - ready;
        update(layer);
        /* The device computes a layer after the one before it and after the update, and the program goes on. */
        double now = seconds();
        device = (device > now ? device : now) + layer->forward;
    }
    sleep_until(device);
    times[1] = seconds() - begin;
    CHECK(strataStreamSynchronize(stream));
}

static void verify(int way, int step)
{
    for (size_t i = 0; i < total; i++) {
        float sum = 0;
        for (int of = 0; of < nranks; of++)
            sum += value(of, step, (unsigned)i);
        if (weights[i] != -sum || gradients[i] != 0) {
            fprintf(stderr, "rank %d: %s, step %d: weight %zu is %g and not %g, its gradient %g and not 0\n", rank,
                    NAMES[way], step, i, weights[i], -sum, gradients[i]);
            exit(1);
        }
        weights[i] = 0;
    }
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_size);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static void barrier(void)
{
    float none = 0;
    CHECK(ncclAllReduce(&none, &none, 1, ncclFloat, ncclSum, comm, NULL));
}

static void usage(void)
{
    fprintf(stderr, "usage: ccube [-n STEPS] [-w WARMUP_STEPS] [-f FORWARD_MS] [-l LAYERS -c ELEMENTS_A_LAYER]\n"
                    "Without -l and -c the layers are ResNet-50's.\n");
    exit(2);
}

int main(int argc, char **argv)
{
    int steps = 10, warmup = 1, equal_layers = 0, option;
    double forward_ms = 100;
    size_t equal_count = 0;
    while ((option = getopt(argc, argv, "n:w:f:l:c:")) != -1) {
        switch (option) {
        case 'n': steps = atoi(optarg); break;
        case 'w': warmup = atoi(optarg); break;
        case 'f': forward_ms = atof(optarg); break;
        case 'l': equal_layers = atoi(optarg); break;
        case 'c': equal_count = strtoull(optarg, NULL, 10); break;
        default: usage();
        }
    }
    if (optind != argc || steps < 1 || warmup < 0 || forward_ms < 0 || (equal_layers > 0) != (equal_count > 0))
        usage();
    for (int i = 0; i < equal_layers; i++)
        add_layer(equal_count, 1);
    if (equal_layers == 0)
        add_resnet50();
    double multiplications = 0;
    for (int i = 0; i < layer_count; i++)
        multiplications += layers[i].multiplications;
    for (int i = 0; i < layer_count; i++)
        layers[i].forward = 1e-3 * forward_ms * layers[i].multiplications / multiplications;

    ncclUniqueId id;
    CHECK(strataGetWorldId(&id, &nranks, &rank));
    CHECK(strataCommInitHost(&comm, nranks, id, rank, -1));
    CHECK(strataStreamCreate(&stream));
    gradients = malloc(total * sizeof *gradients);
    weights = calloc(total, sizeof *weights);
    double *times = calloc((size_t)(2 * WAYS * steps), sizeof *times);
    if (gradients == NULL || weights == NULL || times == NULL) {
        perror("malloc");
        return 1;
    }

    for (int step = -warmup; step < steps; step++) {
        for (int way = 0; way < WAYS; way++) {
            double took[2];
            barrier();
            train(way, step, took);
            for (int of = 0; step >= 0 && of < 2; of++)
                times[(way * 2 + of) * steps + step] = took[of];
            verify(way, step);
        }
    }

    /* A step takes as long as on its slowest rank. */
    CHECK(ncclAllReduce(times, times, (size_t)(2 * WAYS * steps), ncclDouble, ncclMax, comm, NULL));
    if (rank == 0) {
        printf("%d layers, %zu parameters, %d ranks; forward pass %g ms, backward pass %g ms, if nothing is waited for\n",
               layer_count, total, nranks, forward_ms, 2 * forward_ms);
        printf("medians of %d steps on the slowest rank, in ms; every value is as it should be\n", steps);
        printf("%-14s %16s %10s\n", "", "first layer at", "step");
        for (int way = 0; way < WAYS; way++)
            printf("%-14s %16.2f %10.2f\n", NAMES[way], 1e3 * median(&times[way * 2 * steps], steps),
                   1e3 * median(&times[(way * 2 + 1) * steps], steps));
    }
    CHECK(ncclCommDestroy(comm));
    CHECK(strataStreamDestroy(stream));
    free(gradients);
    free(weights);
    free(times);
    return 0;
}
