// The kernels for the processor, and what runs their threads, one after the other, for shim-tests/plans/kernels.rs.
#include "reduce.cu"
#include "move.cu"
#include "codes.cu"

template <class A>
static void run(void (*kernel)(A), const A &argument, u32 blocks, u32 jobs, u32 threads, bool backwards) {
    const u64 all = (u64)blocks * jobs * threads;
    for (u64 step = 0; step < all; step++) {
        u64 index = backwards ? all - 1 - step : step;
        place.threads_x = threads;
        place.blocks_x = blocks;
        place.thread_x = (u32)(index % threads);
        place.block_x = (u32)(index / threads % blocks);
        place.block_y = (u32)(index / threads / blocks);
        kernel(argument);
    }
}

extern "C" void run_batch(void (*kernel)(Batch), const Batch *batch, u32 blocks, u32 threads, u32 backwards) {
    run(kernel, *batch, blocks, batch->njobs, threads, backwards != 0);
}

extern "C" void run_shuffle(void (*kernel)(Shuffle), const Shuffle *shuffle, u32 blocks, u32 threads, u32 backwards) {
    run(kernel, *shuffle, blocks, 1, threads, backwards != 0);
}

extern "C" void run_flag(void (*kernel)(Flag), const Flag *flag, u32 blocks, u32 threads, u32 backwards) {
    run(kernel, *flag, blocks, 1, threads, backwards != 0);
}
