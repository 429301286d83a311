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

// Two half floats in a word.
STRATA_INLINE u32 half2_sum(u32 a, u32 b) {
    u32 result;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
STRATA_INLINE u32 half2_prod(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
// Masks: all bits of a half where it is so.
STRATA_INLINE u32 half2_greater(u32 a, u32 b) {
    u32 result;
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
STRATA_INLINE u32 half2_equal(u32 a, u32 b) {
    u32 result;
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
STRATA_INLINE u32 half2_nan(u32 a) {
    u32 result;
    asm("set.nan.u32.f16x2 %0, %1, %1;" : "=r"(result) : "r"(a));
    return result;
}
// The bits of `a` where the mask has ones, elsewhere those of `b`.
STRATA_INLINE u32 chosen(u32 mask, u32 a, u32 b) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}
STRATA_INLINE float half_widen(u16 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}
STRATA_INLINE u16 half_nearest(float value) {
    u16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}
STRATA_INLINE u16 half_to_zero(float value) {
    u16 result;
    asm("cvt.rz.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// Addresses are those of global memory, which the compiler cannot see: its own accesses would be generic ones.
STRATA_INLINE u8 load(const u8 *from) {
    u16 value;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(value) : "l"(from));
    return (u8)value;
}
STRATA_INLINE u16 load(const u16 *from) {
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(from));
    return value;
}
STRATA_INLINE u32 load(const u32 *from) {
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}
STRATA_INLINE u64 load(const u64 *from) {
    u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
    return value;
}
STRATA_INLINE void store(u8 *to, u8 value) {
    asm volatile("st.global.u8 [%0], %1;" : : "l"(to), "h"((u16)value));
}
STRATA_INLINE void store(u16 *to, u16 value) { asm volatile("st.global.u16 [%0], %1;" : : "l"(to), "h"(value)); }
STRATA_INLINE void store(u32 *to, u32 value) { asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(value)); }
STRATA_INLINE void store(u64 *to, u64 value) { asm volatile("st.global.u64 [%0], %1;" : : "l"(to), "l"(value)); }

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
#define STRATA_GLOBAL __attribute__((address_space(1)))
typedef _Float16 Half2 __attribute__((ext_vector_type(2)));
typedef short Mask2 __attribute__((ext_vector_type(2)));
STRATA_INLINE u16 half_to_zero(float value) {
    return (u16)__builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(value, 0.0f));
}

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
#define STRATA_GLOBAL
typedef _Float16 Half2 __attribute__((vector_size(4)));
typedef short Mask2 __attribute__((vector_size(4)));
STRATA_INLINE u16 half_to_zero(float value) {
    union {
        u16 bits;
        _Float16 value;
    } half;
    half.value = (_Float16)value;
    // Rounded away from zero: one less.
    if (magnitude_of((float)half.value) > magnitude_of(value)) half.bits--;
    return half.bits;
}

#endif

#if !defined(__CUDACC__)

// Two half floats in a word.
union Halves {
    u32 bits;
    Half2 value;
    Mask2 mask;
};
STRATA_INLINE Half2 halves_of(u32 bits) {
    Halves halves;
    halves.bits = bits;
    return halves.value;
}
STRATA_INLINE u32 bits_of(Half2 value) {
    Halves halves;
    halves.value = value;
    return halves.bits;
}
STRATA_INLINE u32 bits_of(Mask2 mask) {
    Halves halves;
    halves.mask = mask;
    return halves.bits;
}
STRATA_INLINE u32 half2_sum(u32 a, u32 b) { return bits_of(halves_of(a) + halves_of(b)); }
STRATA_INLINE u32 half2_prod(u32 a, u32 b) { return bits_of(halves_of(a) * halves_of(b)); }
// Masks: all bits of a half where it is so.
STRATA_INLINE u32 half2_greater(u32 a, u32 b) { return bits_of(halves_of(a) > halves_of(b)); }
STRATA_INLINE u32 half2_equal(u32 a, u32 b) { return bits_of(halves_of(a) == halves_of(b)); }
STRATA_INLINE u32 half2_nan(u32 a) { return bits_of(halves_of(a) != halves_of(a)); }
// The bits of `a` where the mask has ones, elsewhere those of `b`.
STRATA_INLINE u32 chosen(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }
STRATA_INLINE float half_widen(u16 bits) { return (float)halves_of(bits)[0]; }
STRATA_INLINE u16 half_nearest(float value) {
    Half2 halves = {(_Float16)value, (_Float16)0};
    return (u16)bits_of(halves);
}

#endif

// Rounded to odd: the last bit says whether anything was lost, so that rounding again to fewer bits rounds once.
STRATA_INLINE u16 half_odd(float value) {
    u16 bits = half_to_zero(value);
    return (u16)(bits | (half_widen(bits) != value ? 1 : 0));
}

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

#if defined(__CUDACC__)

STRATA_INLINE Pack load(const Pack *from) {
    Pack pack;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(from));
    return pack;
}

STRATA_INLINE void store(Pack *to, const Pack &pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3]));
}

#else

template <class U>
STRATA_INLINE U load(const U *from) {
    return *(const STRATA_GLOBAL U *)from;
}

template <class U>
STRATA_INLINE void store(U *to, U value) {
    *(STRATA_GLOBAL U *)to = value;
}

STRATA_INLINE Pack load(const Pack *from) {
    Words words = *(const STRATA_GLOBAL Words *)from;
    Pack pack = {{words.x, words.y, words.z, words.w}};
    return pack;
}

STRATA_INLINE void store(Pack *to, const Pack &pack) {
    Words words = {pack.word[0], pack.word[1], pack.word[2], pack.word[3]};
    *(STRATA_GLOBAL Words *)to = words;
}

#endif

// What is at an address.
template <class U>
STRATA_INLINE U load_at(u64 address) {
    return load((const U *)address);
}

template <class U>
STRATA_INLINE void store_at(u64 address, const U &value) {
    store((U *)address, value);
}

// One element at any address.
template <class U>
STRATA_INLINE U load_element(u64 address, bool aligned) {
    if (aligned) return load_at<U>(address);
    U bits = 0;
    STRATA_ROLL
    for (u32 i = 0; i < sizeof(U); i++) bits = (U)(bits | (U)((U)load_at<u8>(address + i) << (8 * i)));
    return bits;
}

template <class U>
STRATA_INLINE void store_element(u64 address, U bits, bool aligned) {
    if (aligned) {
        store_at<U>(address, bits);
    } else {
        STRATA_ROLL
        for (u32 i = 0; i < sizeof(U); i++) store_at<u8>(address + i, (u8)(bits >> (8 * i)));
    }
}
