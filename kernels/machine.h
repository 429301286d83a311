// What differs between the compilers: nvcc, clang for AMD (hiprtc at run time), and a C++ compiler for the processor,
// whose threads are run one after the other by a test (shim-tests/c/kernels.cpp). No header is included, so that the
// text is whole where there are no headers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

// The most threads of a block; `THREADS` in src/device/gpu/kernels.rs says the same.
#define STRATA_THREADS 512

#if defined(__CUDACC__)

#define STRATA_INLINE static __device__ __forceinline__
#define STRATA_KERNEL extern "C" __global__ void __launch_bounds__(STRATA_THREADS)
#define STRATA_ARGUMENT(type, name) const __grid_constant__ type name
#define STRATA_UNROLL _Pragma("unroll")
#define STRATA_ROLL _Pragma("unroll 1")

STRATA_INLINE u32 thread_x() { return threadIdx.x; }
STRATA_INLINE u32 threads_x() { return blockDim.x; }
STRATA_INLINE u32 block_x() { return blockIdx.x; }
STRATA_INLINE u32 blocks_x() { return gridDim.x; }
STRATA_INLINE u32 block_y() { return blockIdx.y; }
STRATA_INLINE void fence_system() { __threadfence_system(); }
STRATA_INLINE u32 load_system(const u32 *word) { return *(const volatile u32 *)word; }
STRATA_INLINE void store_system(u32 *word, u32 value) { *(volatile u32 *)word = value; }
STRATA_INLINE void nap() { __nanosleep(100); }
STRATA_INLINE float magnitude_of(float value) { return fabsf(value); }
typedef uint4 Words;

#elif defined(__HIP__) || defined(__HIPCC_RTC__)

#pragma clang fp contract(off)
#define STRATA_INLINE static __attribute__((device)) inline __attribute__((always_inline))
#define STRATA_KERNEL \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, STRATA_THREADS))) void
#define STRATA_ARGUMENT(type, name) const type name
#define STRATA_UNROLL _Pragma("unroll")
#define STRATA_ROLL _Pragma("unroll 1")

STRATA_INLINE u32 thread_x() { return __builtin_amdgcn_workitem_id_x(); }
STRATA_INLINE u32 threads_x() { return __builtin_amdgcn_workgroup_size_x(); }
STRATA_INLINE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
STRATA_INLINE u32 blocks_x() { return __builtin_amdgcn_grid_size_x() / threads_x(); }
STRATA_INLINE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
// Without another scope clang's atomics are the system's. Where a thread has stored nothing itself, clang 19 does not
// wait until the cache is written back, which holds what earlier kernels stored.
STRATA_INLINE void fence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __builtin_amdgcn_s_waitcnt(0);
}
STRATA_INLINE u32 load_system(const u32 *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
STRATA_INLINE void store_system(u32 *word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
STRATA_INLINE void nap() { __builtin_amdgcn_s_sleep(8); }
STRATA_INLINE float magnitude_of(float value) { return __builtin_fabsf(value); }
typedef u32 __attribute__((ext_vector_type(4))) Words;

#else

#define STRATA_INLINE static inline
#define STRATA_KERNEL extern "C" void
#define STRATA_ARGUMENT(type, name) const type name
#define STRATA_UNROLL
#define STRATA_ROLL

// Which thread of which block runs.
struct Place {
    u32 thread_x, threads_x, block_x, blocks_x, block_y;
};
static thread_local Place place;

STRATA_INLINE u32 thread_x() { return place.thread_x; }
STRATA_INLINE u32 threads_x() { return place.threads_x; }
STRATA_INLINE u32 block_x() { return place.block_x; }
STRATA_INLINE u32 blocks_x() { return place.blocks_x; }
STRATA_INLINE u32 block_y() { return place.block_y; }
STRATA_INLINE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
STRATA_INLINE u32 load_system(const u32 *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
STRATA_INLINE void store_system(u32 *word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
STRATA_INLINE void nap() {}
STRATA_INLINE float magnitude_of(float value) { return __builtin_fabsf(value); }
struct alignas(16) Words {
    u32 x, y, z, w;
};

#endif

// The bits of a float and back.
union Bits32 {
    u32 bits;
    float value;
};
union Bits64 {
    u64 bits;
    double value;
};
STRATA_INLINE u32 bits_of(float value) {
    Bits32 both;
    both.value = value;
    return both.bits;
}
STRATA_INLINE u64 bits_of(double value) {
    Bits64 both;
    both.value = value;
    return both.bits;
}
STRATA_INLINE float float_of(u32 bits) {
    Bits32 both;
    both.bits = bits;
    return both.value;
}
STRATA_INLINE double double_of(u64 bits) {
    Bits64 both;
    both.bits = bits;
    return both.value;
}

// The smaller of a value and a limit; of a NaN the limit.
STRATA_INLINE float smaller_of(float value, float limit) { return value < limit ? value : limit; }

// 16 bytes, which move in one access.
struct Pack {
    u32 word[4];
};

STRATA_INLINE Pack load_pack(u64 address) {
    Words words = *(const Words *)address;
    Pack pack = {{words.x, words.y, words.z, words.w}};
    return pack;
}

STRATA_INLINE void store_pack(u64 address, const Pack &pack) {
    Words words = {pack.word[0], pack.word[1], pack.word[2], pack.word[3]};
    *(Words *)address = words;
}
