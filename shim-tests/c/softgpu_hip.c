/* The soft GPU under HIP's names: what differs from CUDA's, from compiling a kernel to the end of a device. */
#include "hip.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES (64 << 10)
#define SEEDS 40

static void expect_at(int line, const char *what, long is, long wanted) {
    if (is == wanted) return;
    fprintf(stderr, "line %d: %s is %ld, not %ld\n", line, what, is, wanted);
    exit(1);
}
#define EXPECT(what, wanted) expect_at(__LINE__, #what, (long)(what), (long)(wanted))
#define OK(call) EXPECT(call, 0)

typedef struct {
    uint32_t njobs, nsrcs, scale, reserved;
    uint64_t factor, words[498];
} Batch;

/* A function of a program whose kernels have names that macros make. */
static hipFunction_t compiled(const char *name) {
    static const char *source = "#if defined(__HIPCC_RTC__)\n"
                                "#define KERNEL(op, type) strata_reduce_##op##_##type\n"
                                "void KERNEL(sum, f32)(); void strata_copy();\n"
                                "#endif\n";
    hiprtcProgram program;
    hipModule_t module;
    hipFunction_t function;
    size_t bytes;
    OK(hiprtcCreateProgram(&program, "#error \"not this one\"", "bad", 0, NULL, NULL));
    EXPECT(hiprtcCompileProgram(program, 0, NULL), 6);
    OK(hiprtcGetProgramLogSize(program, &bytes));
    EXPECT(bytes > 10, 1);
    OK(hiprtcDestroyProgram(&program));
    OK(hiprtcCreateProgram(&program, source, "good", 0, NULL, NULL));
    OK(hiprtcCompileProgram(program, 0, NULL));
    OK(hiprtcGetCodeSize(program, &bytes));
    char *code = malloc(bytes);
    OK(hiprtcGetCode(program, code));
    OK(hiprtcDestroyProgram(&program));
    OK(hipModuleLoadData(&module, code));
    free(code);
    EXPECT(hipModuleGetFunction(&function, module, "strata_reduce_max_f32"), 500);
    OK(hipModuleGetFunction(&function, module, name));
    return function;
}

/* Sums on a stream, with the argument as a buffer; read too early, and in time. */
static void sum(hipStream_t s) {
    hipFunction_t function = compiled("strata_reduce_sum_f32");
    hipEvent_t event;
    float *host, *result, *device;
    int early = 0, late = 0;
    OK(hipHostMalloc((void **)&host, BYTES, 0));
    OK(hipHostMalloc((void **)&result, BYTES, 0));
    OK(hipMalloc((void **)&device, BYTES));
    OK(hipEventCreateWithFlags(&event, hipEventDisableTiming));
    for (int seed = 1; seed <= SEEDS; seed++) {
        softgpuSeed(seed);
        for (int i = 0; i < BYTES / 4; i++) host[i] = seed + i;
        OK(hipMemcpyAsync(device, host, BYTES, hipMemcpyDefault, s));
        Batch batch = {1, 2, 0, 0, 0, {BYTES, (uintptr_t)device, (uintptr_t)device, (uintptr_t)host}};
        size_t bytes = sizeof batch;
        void *extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &batch, HIP_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                         HIP_LAUNCH_PARAM_END};
        OK(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, s, NULL, extra));
        memset(&batch, 0, sizeof batch);
        OK(hipMemcpyAsync(result, device, BYTES, hipMemcpyDefault, s));
        OK(hipEventRecord(event, s));
        early += result[BYTES / 4 - 1] != 2 * (seed + BYTES / 4 - 1);
        OK(hipEventSynchronize(event));
        OK(hipEventQuery(event));
        late += result[BYTES / 4 - 1] != 2 * (seed + BYTES / 4 - 1);
    }
    printf("%s early, %s late\n", early ? "wrong" : "right", late ? "wrong" : "right");
    OK(hipEventDestroy(event));
    OK(hipHostFree(host));
    OK(hipHostFree(result));
    OK(hipFree(device));
}

/* Of the word only the bits of the mask are looked at. */
static void wait(hipStream_t s) {
    uint32_t *word;
    OK(hipHostMalloc((void **)&word, 4, 0));
    *word = 0x102;
    OK(hipStreamWaitValue32(s, word, 3, 1, 0xff));
    for (int look = 0; look < 2000; look++) EXPECT(hipStreamQuery(s), 600);
    __atomic_store_n(word, 0x203, __ATOMIC_SEQ_CST);
    OK(hipStreamSynchronize(s));
    OK(hipStreamWriteValue32(s, word, 7, 0));
    OK(hipStreamSynchronize(s));
    EXPECT(*word, 7);
    OK(hipHostFree(word));
}

static void graph(hipStream_t s) {
    unsigned char *device, host[64];
    int status;
    hipGraph_t graph;
    hipGraphExec_t exec;
    OK(hipMalloc((void **)&device, 64));
    OK(hipStreamBeginCapture(s, 0));
    OK(hipMemsetAsync(device, 9, 64, s));
    OK(hipStreamIsCapturing(s, &status));
    EXPECT(status, 1);
    OK(hipStreamEndCapture(s, &graph));
    OK(hipMemcpy(host, device, 64, hipMemcpyDefault));
    EXPECT(host[5], 0xc5);
    OK(hipGraphInstantiate(&exec, graph, NULL, NULL, 0));
    OK(hipGraphLaunch(exec, s));
    OK(hipStreamSynchronize(s));
    OK(hipMemcpy(host, device, 64, hipMemcpyDefault));
    EXPECT(host[5], 9);
    OK(hipGraphExecDestroy(exec));
    OK(hipGraphDestroy(graph));
    OK(hipFree(device));
}

static void pointers(void) {
    hipPointerAttribute_t of;
    void *device, *host;
    int value;
    OK(hipMalloc(&device, 64));
    OK(hipHostMalloc(&host, 64, 0));
    OK(hipPointerGetAttributes(&of, (char *)device + 8));
    EXPECT(of.type, 2);
    EXPECT(of.device, 1);
    EXPECT(of.devicePointer == (char *)device + 8, 1);
    OK(hipPointerGetAttributes(&of, host));
    EXPECT(of.type, 1);
    EXPECT(of.hostPointer == host, 1);
    EXPECT(hipPointerGetAttributes(&of, &of), 1);
    EXPECT(of.type, 0);
    OK(hipDeviceGetAttribute(&value, 10013, 0));
    EXPECT(value, 1);
    EXPECT(strcmp(hipGetErrorName(600), "hipErrorNotReady"), 0);
    OK(hipFree(device));
    OK(hipHostFree(host));
}

int main(void) {
    hipStream_t s;
    int device;
    unsigned long long counts[8];
    OK(hipSetDevice(1));
    OK(hipStreamCreateWithFlags(&s, hipStreamNonBlocking));
    OK(hipStreamGetDevice(s, &device));
    EXPECT(device, 1);
    sum(s);
    wait(s);
    graph(s);
    pointers();
    OK(hipDeviceSynchronize());
    softgpuCounts(counts);
    for (int i = 0; i < 6; i++) printf("%llu%c", counts[i], i < 5 ? ' ' : '\n');
    OK(hipDeviceReset());
    softgpuCounts(counts);
    for (int i = 0; i < 6; i++) printf("%llu%c", counts[i], i < 5 ? ' ' : '\n');
    EXPECT(hipStreamSynchronize(s), 709);
    OK(hipStreamCreateWithFlags(&s, 0));
    OK(hipStreamDestroy(s));
    return 0;
}
