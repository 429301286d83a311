/* One scenario of the soft GPU, named on the command line; shim-tests/doubles/softgpu.rs says what comes of each. */
#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEEDS 40
#define BYTES (64 << 10)

static void expect_at(int line, const char *what, long is, long wanted) {
    if (is == wanted) return;
    fprintf(stderr, "line %d: %s is %ld, not %ld\n", line, what, is, wanted);
    exit(1);
}
#define EXPECT(what, wanted) expect_at(__LINE__, #what, (long)(what), (long)(wanted))
#define OK(call) EXPECT(call, 0)

/* The arguments of src/device/gpu/kernels.rs. */
typedef struct {
    uint32_t njobs, nsrcs, scale, reserved;
    uint64_t factor, words[498];
} Batch;
typedef struct {
    uint64_t src, dst, block_bytes, rows, columns, src_row, src_column, dst_row, dst_column;
} Shuffle;
typedef struct {
    uint64_t address;
    uint32_t value, reserved;
} Flag;

static CUcontext context;
static CUmodule module, integers, floats;

/* A file of the folder that PTX names. */
static CUmodule loaded(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("PTX"), name);
    FILE *file = fopen(path, "r");
    if (!file) exit(99);
    static char text[1 << 20];
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    CUmodule made;
    OK(cuModuleLoadData(&made, text));
    return made;
}

/* The names of Strata's kernels are enough for the driver that computes them on the host. */
static void start(void) {
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    if (getenv("PTX")) {
        module = loaded("move.ptx");
        integers = loaded("i32.ptx");
        floats = loaded("f32.ptx");
        return;
    }
    OK(cuModuleLoadData(&module, "strata_copy, strata_shuffle, strata_wait, strata_raise, strata_reduce_sum_i32, "
                                 "strata_reduce_sum_f32, strata_scale_f32"));
    integers = floats = module;
}

static CUdeviceptr device(size_t bytes) {
    CUdeviceptr address;
    OK(cuMemAlloc_v2(&address, bytes));
    return address;
}

static void *pinned(size_t bytes) {
    void *address;
    OK(cuMemHostAlloc(&address, bytes, 0));
    return address;
}

static CUstream stream(unsigned flags) {
    CUstream made;
    OK(cuStreamCreate(&made, flags));
    return made;
}

static CUevent event(void) {
    CUevent made;
    OK(cuEventCreate(&made, CU_EVENT_DISABLE_TIMING));
    return made;
}

static CUdeviceptr at(void *pointer) { return (CUdeviceptr)(uintptr_t)pointer; }

static CUresult launch(const char *name, unsigned jobs, void *argument, CUstream on) {
    CUfunction function;
    void *params[] = {argument};
    CUmodule of = strstr(name, "_i32") ? integers : strstr(name, "_f32") ? floats : module;
    OK(cuModuleGetFunction(&function, of, name));
    if (!strcmp(name, "strata_wait") || !strcmp(name, "strata_raise"))
        return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, on, params, NULL);
    return cuLaunchKernel(function, 2, jobs, 1, 64, 1, 1, 0, on, params, NULL);
}

static int all_are(const unsigned char *bytes, int value, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != value) return 0;
    return 1;
}

/* The host may not touch device memory, */
static void load(void) {
    start();
    printf("%d\n", *(volatile int *)(uintptr_t)device(64));
}

static void store(void) {
    start();
    *(volatile int *)(uintptr_t)device(64) = 1;
}

/* nor memory that is freed. */
static void freed(void) {
    start();
    volatile int *word = pinned(64);
    *word = 1;
    OK(cuMemFreeHost((void *)word));
    *word = 2;
}

static void fresh(void) {
    start();
    CUdeviceptr one = device(100);
    EXPECT(all_are(softgpuHostAddress(one), 0xc5, 100), 1);
    OK(cuMemFree_v2(one));
    EXPECT(softgpuHostAddress(one) == NULL, 1);
    EXPECT(cuMemFree_v2(one), 1);
    EXPECT(device(100) == one, 0);
}

/* How often the result of a copy is not there when the stream was not waited for, and when it was. */
static void unfinished(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr d = device(BYTES);
    unsigned char *from = pinned(BYTES), *to = pinned(BYTES);
    int before = 0, after = 0;
    for (int seed = 1; seed <= SEEDS; seed++) {
        softgpuSeed(seed);
        memset(from, seed, BYTES);
        memset(to, 0, BYTES);
        OK(cuMemcpyHtoDAsync_v2(d, from, BYTES, s));
        OK(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
        before += !all_are(to, seed, BYTES);
        OK(cuStreamSynchronize(s));
        OK(cuStreamQuery(s));
        after += !all_are(to, seed, BYTES);
    }
    printf("%s without waiting, %s after it\n", before ? "wrong" : "right", after ? "wrong" : "right");
}

/* A source of an asynchronous copy is read late if it is pinned, and in time if it is pageable. */
static void sources(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr d = device(BYTES);
    unsigned char *from_pinned = pinned(BYTES), *pageable = malloc(BYTES), *to = pinned(BYTES);
    int late[2] = {0, 0};
    for (int seed = 1; seed <= SEEDS; seed++) {
        for (int kind = 0; kind < 2; kind++) {
            unsigned char *from = kind ? pageable : from_pinned;
            softgpuSeed(seed);
            memset(from, seed, BYTES);
            OK(cuMemcpyHtoDAsync_v2(d, from, BYTES, s));
            memset(from, 0, BYTES);
            OK(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
            OK(cuStreamSynchronize(s));
            late[kind] += !all_are(to, seed, BYTES);
        }
    }
    printf("pinned %s, pageable %s\n", late[0] ? "late" : "in time", late[1] ? "late" : "in time");
}

static char order[16];
static unsigned order_length;
static void first(void *letter) { order[__atomic_fetch_add(&order_length, 1, __ATOMIC_SEQ_CST)] = *(char *)letter; }

/* The order in which two streams run, free and with events between them. */
static void orders(void) {
    start();
    CUstream a = stream(CU_STREAM_NON_BLOCKING), b = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event();
    int other[2] = {0, 0}, same[2] = {0, 0};
    for (int held = 0; held < 2; held++) {
        for (int seed = 1; seed <= SEEDS; seed++) {
            softgpuSeed(seed);
            order_length = 0;
            memset(order, 0, sizeof order);
            for (int turn = 0; turn < 3; turn++) {
                OK(cuLaunchHostFunc(a, first, "a"));
                OK(cuEventRecord(e, a));
                if (held) OK(cuStreamWaitEvent(b, e, 0));
                OK(cuLaunchHostFunc(b, first, "b"));
                OK(cuEventRecord(e, b));
                if (held) OK(cuStreamWaitEvent(a, e, 0));
            }
            OK(cuCtxSynchronize());
            *(strcmp(order, "ababab") ? &other[held] : &same[held]) += 1;
        }
    }
    printf("free: %s, held: %s\n", other[0] ? "any order" : "one order", other[1] ? "any order" : "one order");
}

static char trash[BYTES];
static void fill_trash(void *unused) {
    (void)unused;
    memset(trash, 1, sizeof trash);
}

/* One stream produces, another consumes, synchronised in the named way: how often the result is wrong. */
static void pipeline(const char *how) {
    start();
    CUstream producer = stream(CU_STREAM_NON_BLOCKING), consumer = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event();
    CUdeviceptr d = device(BYTES);
    unsigned char *from = pinned(BYTES), *to = pinned(BYTES);
    uint32_t *word = pinned(sizeof *word);
    int wrong = 0;
    *word = 0xfffffff0;
    for (int seed = 1; seed <= SEEDS; seed++) {
        uint32_t turn = *word + 1;
        softgpuSeed(seed);
        memset(from, seed, BYTES);
        OK(cuLaunchHostFunc(producer, fill_trash, NULL));
        OK(cuMemcpyHtoDAsync_v2(d, from, BYTES, producer));
        OK(cuEventRecord(e, producer));
        OK(cuStreamWriteValue32_v2(producer, at(word), turn, 0));
        Flag flag = {at(word), turn, 0};
        if (!strcmp(how, "cuStreamWaitEvent") || !strcmp(how, "cuEventRecord")) {
            OK(cuStreamWaitEvent(consumer, e, 0));
        } else if (!strcmp(how, "cuEventSynchronize")) {
            OK(cuEventSynchronize(e));
        } else if (!strcmp(how, "cuEventQuery")) {
            for (CUresult state; (state = cuEventQuery(e)) != 0;) EXPECT(state, 600);
        } else if (!strcmp(how, "cuStreamWaitValue32_v2")) {
            OK(cuStreamWaitValue32_v2(consumer, at(word), turn, CU_STREAM_WAIT_VALUE_GEQ));
        } else if (!strcmp(how, "strata_wait")) {
            OK(launch("strata_wait", 1, &flag, consumer));
        }
        OK(cuMemcpyDtoHAsync_v2(to, d, BYTES, consumer));
        OK(cuStreamSynchronize(consumer));
        wrong += !all_are(to, seed, BYTES);
        OK(cuStreamSynchronize(producer));
    }
    printf("%s\n", wrong ? "wrong" : "right");
}

static void pipeline_named(void) { pipeline(getenv("HOW")); }

/* A stream waits for a word in each way, and for the host. */
static void words(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    uint32_t *word = pinned(sizeof *word);
    const struct {
        unsigned flags;
        uint32_t value, not_yet, then;
    } waits[] = {
        {CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 6},          {CU_STREAM_WAIT_VALUE_GEQ, 2, 0xffffffff, 2},
        {CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5},           {CU_STREAM_WAIT_VALUE_AND, 6, 9, 4},
        {CU_STREAM_WAIT_VALUE_NOR, 0xfffffffe, 1, 0}, {CU_STREAM_WAIT_VALUE_GEQ | 1 << 30, 7, 6, 7},
    };
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        __atomic_store_n(word, waits[i].not_yet, __ATOMIC_SEQ_CST);
        OK(cuStreamWaitValue32_v2(s, at(word), waits[i].value, waits[i].flags));
        for (int look = 0; look < 2000; look++) EXPECT(cuStreamQuery(s), 600);
        __atomic_store_n(word, waits[i].then, __ATOMIC_SEQ_CST);
        OK(cuStreamSynchronize(s));
    }
    EXPECT(cuStreamWaitValue32_v2(s, at(order), 0, 0), 1);
    EXPECT(cuStreamWriteValue32_v2(s, at(order), 0, 0), 1);
    Flag flag = {at(word), 9, 0};
    OK(launch("strata_wait", 1, &flag, s));
    EXPECT(cuStreamQuery(s), 600);
    CUstream other = stream(CU_STREAM_NON_BLOCKING);
    OK(launch("strata_raise", 1, &flag, other));
    OK(cuStreamSynchronize(s));
    EXPECT(*word, 9);
}

/* Work on one stream, then on the default stream, then on a third: whether each sees what the one before did. */
static int passed_on(unsigned flags, CUstream middle) {
    CUstream a = stream(flags), c = stream(flags);
    CUdeviceptr one = device(BYTES), two = device(BYTES);
    unsigned char *from = pinned(BYTES), *to = pinned(BYTES);
    int wrong = 0;
    for (int seed = 1; seed <= SEEDS; seed++) {
        softgpuSeed(seed);
        memset(from, seed, BYTES);
        OK(cuMemcpyHtoDAsync_v2(one, from, BYTES, a));
        OK(cuMemcpyAsync(two, one, BYTES, middle));
        OK(cuMemcpyDtoHAsync_v2(to, two, BYTES, c));
        OK(cuStreamSynchronize(c));
        wrong += !all_are(to, seed, BYTES);
        OK(cuCtxSynchronize());
    }
    return wrong;
}

static void legacy(void) {
    start();
    int blocking = passed_on(0, NULL) + passed_on(0, CU_STREAM_LEGACY);
    int non_blocking = passed_on(CU_STREAM_NON_BLOCKING, NULL);
    int per_thread = passed_on(0, CU_STREAM_PER_THREAD);
    printf("blocking %s, non-blocking %s, per thread %s\n", blocking ? "wrong" : "right",
           non_blocking ? "wrong" : "right", per_thread ? "wrong" : "right");
}

static void memory(void) {
    start();
    CUdeviceptr address;
    void *host;
    size_t left, total;
    CUdeviceptr most = device(1 << 20);
    OK(cuMemGetInfo_v2(&left, &total));
    EXPECT(left, 0);
    EXPECT(cuMemAlloc_v2(&address, 1), 2);
    OK(cuMemFree_v2(most));
    device(1 << 19);
    pinned(1 << 10);
    EXPECT(cuMemHostAlloc(&host, 1, 0), 2);
    EXPECT(cuMemHostRegister_v2(order, sizeof order, 0), 2);
}

/* Kernels, and what they may not touch. */
static void kernels(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    size_t bytes = 100000;
    int32_t *a = pinned(bytes), *sum = pinned(bytes);
    CUdeviceptr b = device(bytes), c = device(bytes);
    for (size_t i = 0; i < bytes / 4; i++) a[i] = (int32_t)i;
    OK(cuMemcpyHtoDAsync_v2(b, a, bytes, s));
    Batch batch = {2, 3, 3, 0, 2, {bytes / 2, c, b, b, at(a), bytes / 2, c + bytes / 2, b + bytes / 2, b + bytes / 2,
                                   at(a) + bytes / 2}};
    OK(launch("strata_reduce_sum_i32", 2, &batch, s));
    memset(&batch, 0, sizeof batch);
    batch = (Batch){1, 1, 0, 0, 0, {bytes, at(sum), c}};
    OK(launch("strata_copy", 1, &batch, s));
    OK(cuStreamSynchronize(s));
    for (int32_t i = 0; i < (int32_t)(bytes / 4); i++) EXPECT(sum[i], 3 * i / 2);
    /* A transposition of 10 by 5 blocks. */
    Shuffle shuffle = {b, c, 8, 10, 5, 40, 8, 8, 80};
    OK(launch("strata_shuffle", 1, &shuffle, s));
    OK(cuMemcpyDtoHAsync_v2(sum, c, 400, s));
    OK(cuStreamSynchronize(s));
    for (int row = 0; row < 10; row++)
        for (int column = 0; column < 5; column++) EXPECT(sum[2 * (column * 10 + row)], a[2 * (row * 5 + column)]);
    /* Times 2.5, over 8, and divided by 8. */
    const uint64_t factors[] = {0x40200000, 8, 8};
    const float expected[] = {2.5f, 0.125f, 0.125f};
    float *floats = pinned(400);
    for (uint32_t scale = 1; scale <= 3; scale++) {
        for (int i = 0; i < 100; i++) floats[i] = (float)i;
        batch = (Batch){1, 1, scale, 0, factors[scale - 1], {400, at(floats), at(floats)}};
        OK(launch("strata_scale_f32", 1, &batch, s));
        OK(cuStreamSynchronize(s));
        for (int i = 0; i < 100; i++) EXPECT(floats[i] == (float)i * expected[scale - 1], 1);
    }
    CUfunction function;
    EXPECT(cuModuleGetFunction(&function, module, "strata_reduce_sum_f64"), 500);
    EXPECT(launch("strata_copy", 0, &batch, s), 1);
}

static void forbidden(void) {
    start();
    const char *what = getenv("HOW");
    CUstream s = stream(CU_STREAM_NON_BLOCKING), bystander = stream(CU_STREAM_NON_BLOCKING);
    uint32_t *word = pinned(4);
    *word = 0;
    CUdeviceptr good = device(64), bad = 0;
    if (!strcmp(what, "pageable")) bad = at(order);
    if (!strcmp(what, "range")) bad = good + 63;
    if (!strcmp(what, "jobs")) bad = good;
    if (!strcmp(what, "freed")) OK(cuMemFree_v2(bad = device(64)));
    if (!strcmp(what, "foreign")) {
        CUcontext other;
        OK(cuDevicePrimaryCtxRetain(&other, 1));
        OK(cuCtxPushCurrent_v2(other));
        bad = device(64);
        OK(cuCtxPopCurrent_v2(&other));
    }
    OK(cuStreamWaitValue32_v2(bystander, at(word), 1, CU_STREAM_WAIT_VALUE_EQ));
    /* Two jobs for one block are too many. */
    Batch batch = {bad == good ? 2 : 1, 1, 0, 0, 0, {2, good, bad, 2, good + 8, bad}};
    int code = bad == good ? 719 : 700;
    OK(launch("strata_copy", 1, &batch, s));
    EXPECT(cuStreamSynchronize(s), code);
    EXPECT(cuStreamSynchronize(bystander), code);
    EXPECT(cuMemAlloc_v2(&good, 1), code);
}

/* Two streams captured together, replayed twice; nothing runs meanwhile. */
static void capture(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), side = stream(CU_STREAM_NON_BLOCKING);
    CUevent fork = event(), join = event();
    CUdeviceptr d = device(BYTES), half = d + BYTES / 2;
    unsigned char *from = pinned(BYTES), *to = pinned(BYTES);
    int status, wrong = 0;
    CUgraph graph;
    CUgraphExec exec;
    memset(to, 0, BYTES);
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuEventRecord(fork, s));
    OK(cuStreamWaitEvent(side, fork, 0));
    OK(cuMemcpyHtoDAsync_v2(d, from, BYTES / 2, s));
    OK(cuMemcpyHtoDAsync_v2(half, from + BYTES / 2, BYTES / 2, side));
    OK(cuEventRecord(join, side));
    OK(cuStreamIsCapturing(side, &status));
    EXPECT(status, 1);
    OK(cuStreamWaitEvent(s, join, 0));
    OK(cuMemcpyDtoHAsync_v2(to, d, BYTES, s));
    OK(cuStreamEndCapture(s, &graph));
    OK(cuStreamIsCapturing(side, &status));
    EXPECT(status, 0);
    OK(cuCtxSynchronize());
    EXPECT(all_are(to, 0, BYTES), 1);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphDestroy(graph));
    for (int seed = 1; seed <= SEEDS; seed++) {
        softgpuSeed(seed);
        memset(from, seed, BYTES);
        OK(cuGraphLaunch(exec, s));
        OK(cuStreamSynchronize(s));
        wrong += !all_are(to, seed, BYTES);
    }
    EXPECT(wrong, 0);
    OK(cuGraphExecDestroy(exec));
}

/* What may not be done while a stream is captured, each of which spoils the capture. */
static void spoilt(void) {
    start();
    CUstream s = stream(0), side = stream(0);
    CUevent before = event(), inside = event();
    CUgraph graph;
    CUdeviceptr d = device(64), other;
    int status;
    OK(cuEventRecord(before, side));
    for (int what = 0; what < 8; what++) {
        OK(cuStreamBeginCapture_v2(s, 0));
        OK(cuMemsetD8Async(d, 1, 64, s));
        OK(cuEventRecord(inside, s));
        if (what == 0) EXPECT(cuStreamQuery(s), 900);
        if (what == 1) EXPECT(cuStreamSynchronize(s), 900);
        if (what == 2) EXPECT(cuEventQuery(inside), 900);
        if (what == 3) EXPECT(cuStreamQuery(NULL), 906);
        if (what == 4) EXPECT(cuMemcpyDtoHAsync_v2(order, d, 16, NULL), 906);
        if (what == 5) EXPECT(cuStreamWaitEvent(s, before, 0), 905);
        if (what == 6) EXPECT(cuMemAlloc_v2(&other, 1), 900);
        if (what == 7) EXPECT(cuEventQuery(before), 900);
        OK(cuStreamIsCapturing(s, &status));
        EXPECT(status, 2);
        EXPECT(cuMemsetD8Async(d, 1, 64, s), 901);
        EXPECT(cuStreamEndCapture(s, &graph), 901);
    }
    OK(cuStreamBeginCapture_v2(s, 0));
    EXPECT(cuStreamIsCapturing(NULL, &status), 906);
    OK(cuEventRecord(inside, s));
    OK(cuStreamWaitEvent(side, inside, 0));
    OK(cuMemsetD8Async(d, 1, 64, side));
    EXPECT(cuStreamEndCapture(side, &graph), 903);
    EXPECT(cuStreamEndCapture(s, &graph), 904);
    EXPECT(cuStreamWaitEvent(side, inside, 0), 907);
    /* Outside of Global mode another stream may be asked. */
    OK(cuStreamBeginCapture_v2(s, 2));
    OK(cuStreamSynchronize(side));
    OK(cuStreamEndCapture(s, &graph));
    OK(cuGraphDestroy(graph));
}

/* A context that ends while a stream is stuck and another is full of work. */
static void destroyed(void) {
    for (int created = 0; created < 2; created++) {
        start();
        if (created) OK(cuCtxCreate_v2(&context, 0, 1));
        CUstream stuck = stream(CU_STREAM_NON_BLOCKING), busy = stream(0);
        CUevent e = event();
        uint32_t *word = pinned(4);
        CUdeviceptr d = device(BYTES);
        *word = 0;
        OK(cuStreamWaitValue32_v2(stuck, at(word), 1, CU_STREAM_WAIT_VALUE_EQ));
        OK(cuEventRecord(e, stuck));
        for (int i = 0; i < 100; i++) OK(cuMemsetD8Async(d, i, BYTES, busy));
        if (created) {
            OK(cuCtxDestroy_v2(context));
            OK(cuCtxPushCurrent_v2(context));
        } else {
            OK(cuDevicePrimaryCtxReset_v2(0));
        }
        EXPECT(cuStreamSynchronize(stuck), 709);
        EXPECT(cuStreamQuery(busy), 709);
        EXPECT(cuEventSynchronize(e), 709);
        EXPECT(cuEventRecord(e, busy), 709);
        EXPECT(cuMemsetD8Async(d, 1, 1, busy), 709);
        EXPECT(cuMemFree_v2(d), 709);
        EXPECT(cuEventDestroy_v2(e), 709);
        EXPECT(cuStreamDestroy_v2(busy), 709);
        EXPECT(softgpuHostAddress(d) == NULL, 1);
        OK(cuCtxSetCurrent(NULL));
        while (cuCtxPopCurrent_v2(NULL) == 0) {
        }
        EXPECT(cuStreamQuery(stuck), 201);
    }
    /* The primary context comes to life again. */
    start();
    OK(cuMemFree_v2(device(1)));
}

static void print_counts(void) {
    unsigned long long counts[8];
    softgpuCounts(counts);
    for (int i = 0; i < 8; i++) printf("%llu%c", counts[i], i < 7 ? ' ' : '\n');
}

static void counts(void) {
    start();
    CUstream s = stream(0);
    CUevent e = event();
    CUdeviceptr d = device(100);
    unsigned char *host = pinned(100);
    OK(cuMemHostRegister_v2(trash, 100, 0));
    EXPECT(cuMemHostRegister_v2(trash + 50, 100, 0), 712);
    Batch batch = {1, 1, 0, 0, 0, {100, d, at(host)}};
    OK(launch("strata_copy", 1, &batch, s));
    OK(cuStreamSynchronize(s));
    OK(cuMemcpyDtoH_v2(host, d, 100));
    print_counts();
    OK(cuMemHostUnregister(trash));
    EXPECT(cuMemHostUnregister(trash), 713);
    OK(cuMemFreeHost(host));
    OK(cuMemFree_v2(d));
    OK(cuEventDestroy_v2(e));
    OK(cuStreamDestroy_v2(s));
    OK(cuModuleUnload(module));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    print_counts();
    EXPECT(cuDevicePrimaryCtxRelease_v2(0), 201);
}

static void pointers(void) {
    CUdeviceptr managed, start_address;
    CUcontext of;
    unsigned kind, is_managed;
    int ordinal, number;
    size_t bytes;
    EXPECT(cuDeviceGetCount(&number), 3);
    start();
    OK(cuDeviceGetCount(&number));
    EXPECT(number, 3);
    OK(cuDevicePrimaryCtxRetain(&context, 2));
    OK(cuCtxSetCurrent(context));
    CUdeviceptr d = device(1000);
    void *host = pinned(1000);
    OK(cuMemAllocManaged(&managed, 1000, 1));
    OK(cuPointerGetAttribute(&kind, 2, d + 999));
    EXPECT(kind, 2);
    OK(cuPointerGetAttribute(&ordinal, 9, d + 999));
    EXPECT(ordinal, 2);
    OK(cuPointerGetAttribute(&of, 1, d));
    EXPECT(of == context, 1);
    OK(cuPointerGetAttribute(&start_address, 11, d + 999));
    EXPECT(start_address == d, 1);
    OK(cuPointerGetAttribute(&bytes, 12, d + 999));
    EXPECT(bytes, 1000);
    OK(cuPointerGetAttribute(&kind, 2, at(host)));
    EXPECT(kind, 1);
    OK(cuPointerGetAttribute(&is_managed, 8, managed));
    EXPECT(is_managed, 1);
    *(int *)(uintptr_t)managed = 1;
    EXPECT(cuPointerGetAttribute(&kind, 2, d + 1000), 1);
    EXPECT(cuPointerGetAttribute(&kind, 2, at(trash)), 1);
    EXPECT(cuDevicePrimaryCtxRetain(&context, 3), 101);
    void *function;
    OK(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &number));
    EXPECT(function == (void *)cuMemAlloc_v2 && number == 0, 1);
    EXPECT(cuGetProcAddress_v2("cuNothing", &function, 12000, 0, &number), 500);
    OK(cuDeviceGetAttribute(&number, 92, 0));
    EXPECT(number, 0);
    EXPECT(cuStreamWaitValue32_v2(NULL, at(host), 0, 0), 801);
}

/* A function of the host may not call the driver. */
static int answer;
static void calls(void *stream) { answer = cuStreamQuery(stream); }

static void host_functions(void) {
    start();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    OK(cuLaunchHostFunc(s, calls, s));
    OK(cuStreamSynchronize(s));
    EXPECT(answer, 800);
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } scenarios[] = {
        {"load", load},           {"store", store},         {"freed", freed},     {"fresh", fresh},
        {"unfinished", unfinished}, {"sources", sources},   {"orders", orders},   {"pipeline", pipeline_named},
        {"words", words},         {"legacy", legacy},       {"memory", memory},   {"kernels", kernels},
        {"forbidden", forbidden}, {"capture", capture},     {"spoilt", spoilt},   {"destroyed", destroyed},
        {"counts", counts},       {"pointers", pointers},   {"host_functions", host_functions},
    };
    for (size_t i = 0; count == 2 && i < sizeof scenarios / sizeof *scenarios; i++) {
        if (strcmp(scenarios[i].name, arguments[1])) continue;
        scenarios[i].run();
        return 0;
    }
    return 2;
}
