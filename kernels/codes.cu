// Codes: strata_encode_<code>, strata_decode_<code>, strata_fold_<code>. The bits are those of src/code.rs.
//
// A thread has a block of 32 elements, which share a scale, and goes through them twice: for the largest, and to code them. The
// second time they come from the cache. Elements lie in several stretches, of which jobs tell addresses and ends. In a batch `scale`
// is the elements' type, `operation` what folds them, `factor` how many sources there are.
#include "machine.h"
#include "arguments.h"
#include "element.h"

enum : u32 { BLOCK = 32, SCALE_OF_NAN = 255, INFINITE = 0x7f800000u };

STRATA_INLINE float power_of_2(u32 exponent) { return float_of(exponent << 23); }

// bfloat16: no scale.
struct Bf16Code {
    enum : u32 { BYTES = 2, HAS_SCALE = 0, BELOW = 0, MOST = 0 };
    typedef u16 Coded;
    STRATA_INLINE u16 code(float value) { return element::Upper::narrow(value); }
    STRATA_INLINE float value(u16 coded) { return element::Upper::widen(coded); }
};

// Fp8 (e4m3) under a scale: the largest becomes at most 448 = 1.75 * 2^8.
struct Mx8Code {
    enum : u32 { BYTES = 1, HAS_SCALE = 1, BELOW = 8, MOST = 0x600000u };
    typedef u8 Coded;
    // To nearest even; the value is at most 448. Adding 16384 leaves multiples of 2^-9, the steps of subnormals, in the lowest
    // bits; the bias of the exponent goes from 127 to 7.
    STRATA_INLINE u8 code(float value) {
        u32 bits = bits_of(value), size = bits & 0x7fffffffu;
        u32 normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
        u32 subnormal = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);
        return (u8)((bits >> 24 & 0x80) | (size >= bits_of(0.015625f) ? normal : subnormal));
    }
    STRATA_INLINE float value(u8 coded) {
        u32 size = coded & 0x7fu;
        float normal = float_of((size << 20) + (120u << 23)), subnormal = (float)(i32)size * 0.001953125f;
        return float_of(bits_of(size >= 8 ? normal : subnormal) | (u32)(coded & 0x80) << 24);
    }
};

// Integers under a scale: the largest becomes at most 127 = 127/64 * 2^6.
struct Int8Code {
    enum : u32 { BYTES = 1, HAS_SCALE = 1, BELOW = 6, MOST = 0x7e0000u };
    typedef u8 Coded;
    // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits.
    STRATA_INLINE u8 code(float value) { return (u8)(bits_of(value + 12582912.0f) - bits_of(12582912.0f)); }
    STRATA_INLINE float value(u8 coded) { return (float)(i32)(i8)coded; }
};

// The scale with which the largest element, of these bits, does not saturate.
template <class C>
STRATA_INLINE u32 scale_of(u32 largest) {
    if (!C::HAS_SCALE) return 0;
    if (largest >= INFINITE) return SCALE_OF_NAN;
    u32 exponent = (largest >> 23) + ((largest & 0x7fffffu) > C::MOST ? 1 : 0);
    return exponent > C::BELOW + 1 ? exponent - C::BELOW : 1;
}

template <class C>
STRATA_INLINE typename C::Coded code_under(u32 scale, float value) {
    if (!C::HAS_SCALE) return C::code(value);
    return scale == SCALE_OF_NAN ? (typename C::Coded)0 : C::code(value * power_of_2(254 - scale));
}

template <class C>
STRATA_INLINE float value_under(u32 scale, typename C::Coded coded) {
    if (!C::HAS_SCALE) return C::value(coded);
    return scale == SCALE_OF_NAN ? float_of(0x7fc00000u) : C::value(coded) * power_of_2(scale);
}

// A coded chunk: the scales of its blocks, then its elements.
template <class C>
struct Chunk {
    u64 scales, elements;

    STRATA_INLINE Chunk at(u64 address, u64 nblocks) {
        Chunk chunk = {address, address + (C::HAS_SCALE ? nblocks : 0)};
        return chunk;
    }
    STRATA_INLINE u32 scale(const Chunk &chunk, u64 block) {
        return C::HAS_SCALE ? (u32)load_at<u8>(chunk.scales + block) : 0;
    }
    STRATA_INLINE void set_scale(const Chunk &chunk, u64 block, u32 scale) {
        if (C::HAS_SCALE) store_at<u8>(chunk.scales + block, (u8)scale);
    }
    STRATA_INLINE typename C::Coded element(const Chunk &chunk, u64 i) {
        u64 address = chunk.elements + i * C::BYTES;
        return load_element<typename C::Coded>(address, (address & (C::BYTES - 1)) == 0);
    }
    STRATA_INLINE void set_element(const Chunk &chunk, u64 i, typename C::Coded coded) {
        u64 address = chunk.elements + i * C::BYTES;
        store_element<typename C::Coded>(address, coded, (address & (C::BYTES - 1)) == 0);
    }
};

STRATA_INLINE u32 element_bytes(u32 type) { return type == ELEMENT_F64 ? 8 : type == ELEMENT_F32 ? 4 : 2; }

// Where element `i` is: stretches are pairs of words, an address and how many elements there are up to its end.
STRATA_INLINE u64 place_of(const u64 *stretches, u32 type, u64 i) {
    u64 before = 0, at = 0;
    STRATA_ROLL
    while (i >= stretches[at + 1]) {
        before = stretches[at + 1];
        at += 2;
    }
    return stretches[at] + (i - before) * element_bytes(type);
}

// Elements of a type that the code makes smaller.
template <class C>
STRATA_INLINE float load_float(u64 address, u32 type) {
    const bool aligned = (address & (element_bytes(type) - 1)) == 0;
    if (type == ELEMENT_F32) return element::Single::widen(load_element<u32>(address, aligned));
    if (C::BYTES == 2 || type == ELEMENT_F64) return (float)element::Double::widen(load_element<u64>(address, aligned));
    u16 bits = load_element<u16>(address, aligned);
    return type == ELEMENT_F16 ? element::Half::widen(bits) : element::Upper::widen(bits);
}

template <class C>
STRATA_INLINE void store_float(u64 address, u32 type, float value) {
    const bool aligned = (address & (element_bytes(type) - 1)) == 0;
    if (type == ELEMENT_F32) {
        store_element<u32>(address, element::Single::narrow(value), aligned);
    } else if (C::BYTES == 2 || type == ELEMENT_F64) {
        store_element<u64>(address, element::Double::narrow((double)value), aligned);
    } else {
        u16 bits = type == ELEMENT_F16 ? element::Half::narrow(value) : element::Upper::narrow(value);
        store_element<u16>(address, bits, aligned);
    }
}

STRATA_INLINE u64 first_block() { return (u64)block_x() * threads_x() + thread_x(); }
STRATA_INLINE u64 block_stride() { return (u64)blocks_x() * threads_x(); }
STRATA_INLINE u32 larger_of(u32 largest, float value) {
    u32 size = bits_of(value) & 0x7fffffffu;
    return size > largest ? size : largest;
}

// Keeps what is left out of an element, beside what is kept already if it is `added`. What is not finite is not kept.
STRATA_INLINE void keep(u64 address, float value, float coded, bool added) {
    const bool aligned = (address & 3) == 0;
    float before = added ? float_of(load_element<u32>(address, aligned)) : 0.0f, more = before + (value - coded);
    bool is_finite = (bits_of(more) & 0x7fffffffu) < INFINITE;
    store_element<u32>(address, is_finite ? bits_of(more) : 0, aligned);
}

// A job's words: elements, the chunk, the residual or 0, the stretches.
template <class C>
STRATA_INLINE void encode(const Batch &batch) {
    if (block_y() >= batch.njobs) return;
    const u64 *words = batch.words + block_y() * (2 + batch.nsrcs), *stretches = words + 3;
    const u64 n = words[0], nblocks = (n + BLOCK - 1) / BLOCK, residual = words[2];
    const u32 type = batch.scale;
    const Chunk<C> chunk = Chunk<C>::at(words[1], nblocks);
    STRATA_ROLL
    for (u64 block = first_block(); block < nblocks; block += block_stride()) {
        const u64 first = block * BLOCK, end = first + BLOCK < n ? first + BLOCK : n;
        u32 largest = 0, scale = 0;
        // First for the scale, then for the elements.
        STRATA_ROLL
        for (u32 turn = C::HAS_SCALE ? 0 : 1; turn < 2; turn++) {
            STRATA_ROLL
            for (u64 i = first; i < end; i++) {
                float value = load_float<C>(place_of(stretches, type, i), type);
                const u64 kept = residual + 4 * i;
                if (residual != 0) value = value + float_of(load_element<u32>(kept, (kept & 3) == 0));
                if (turn == 0) {
                    largest = larger_of(largest, value);
                    continue;
                }
                typename C::Coded coded = code_under<C>(scale, value);
                Chunk<C>::set_element(chunk, i, coded);
                if (residual != 0) keep(kept, value, value_under<C>(scale, coded), false);
            }
            if (turn == 0) {
                scale = scale_of<C>(largest);
                Chunk<C>::set_scale(chunk, block, scale);
            }
        }
    }
}

// A job's words: elements, the chunk, 0, the stretches.
template <class C>
STRATA_INLINE void decode(const Batch &batch) {
    if (block_y() >= batch.njobs) return;
    const u64 *words = batch.words + block_y() * (2 + batch.nsrcs), *stretches = words + 3;
    const u64 n = words[0], nblocks = (n + BLOCK - 1) / BLOCK;
    const u32 type = batch.scale;
    const Chunk<C> chunk = Chunk<C>::at(words[1], nblocks);
    STRATA_ROLL
    for (u64 block = first_block(); block < nblocks; block += block_stride()) {
        const u64 first = block * BLOCK, end = first + BLOCK < n ? first + BLOCK : n;
        const u32 scale = Chunk<C>::scale(chunk, block);
        STRATA_ROLL
        for (u64 i = first; i < end; i++) {
            float value = value_under<C>(scale, Chunk<C>::element(chunk, i));
            store_float<C>(place_of(stretches, type, i), type, value);
        }
    }
}

// A number wins over a NaN.
STRATA_INLINE float folded(u32 how, float a, float b) {
    if (how == FOLD_SUM) return a + b;
    if (how == FOLD_PROD) return a * b;
    if (how == FOLD_MAX) return b > a || a != a ? b : a;
    return b < a || a != a ? b : a;
}

// Element `i` of all sources, from the left.
template <class C>
STRATA_INLINE float fold_sources(const u64 *sources, const Batch &batch, u64 nblocks, u64 i) {
    float value = 0.0f;
    STRATA_ROLL
    for (u64 k = 0; k < batch.factor; k++) {
        const Chunk<C> chunk = Chunk<C>::at(sources[k], nblocks);
        float next = value_under<C>(Chunk<C>::scale(chunk, i / BLOCK), Chunk<C>::element(chunk, i));
        value = k == 0 ? next : folded(batch.operation, value, next);
    }
    return value;
}

// A job's words: elements, the chunk of the result or 0, the residual or 0, the sources, and without a chunk the stretches.
template <class C>
STRATA_INLINE void fold(const Batch &batch) {
    if (block_y() >= batch.njobs) return;
    const u64 *words = batch.words + block_y() * (2 + batch.nsrcs), *sources = words + 3, *stretches = sources + batch.factor;
    const u64 n = words[0], nblocks = (n + BLOCK - 1) / BLOCK, residual = words[2];
    const bool is_coded = words[1] != 0;
    const u32 type = batch.scale;
    const Chunk<C> chunk = Chunk<C>::at(words[1], nblocks);
    STRATA_ROLL
    for (u64 block = first_block(); block < nblocks; block += block_stride()) {
        const u64 first = block * BLOCK, end = first + BLOCK < n ? first + BLOCK : n;
        u32 largest = 0, scale = 0;
        STRATA_ROLL
        for (u32 turn = C::HAS_SCALE && is_coded ? 0 : 1; turn < 2; turn++) {
            STRATA_ROLL
            for (u64 i = first; i < end; i++) {
                float value = fold_sources<C>(sources, batch, nblocks, i);
                if (!is_coded) {
                    store_float<C>(place_of(stretches, type, i), type, value);
                } else if (turn == 0) {
                    largest = larger_of(largest, value);
                } else {
                    typename C::Coded coded = code_under<C>(scale, value);
                    Chunk<C>::set_element(chunk, i, coded);
                    if (residual != 0) keep(residual + 4 * i, value, value_under<C>(scale, coded), true);
                }
            }
            if (turn == 0) {
                scale = scale_of<C>(largest);
                Chunk<C>::set_scale(chunk, block, scale);
            }
        }
    }
}

#define STRATA_CODE(name, Form) \
    STRATA_KERNEL strata_encode_##name(STRATA_ARGUMENT(Batch, batch)) { encode<Form>(batch); } \
    STRATA_KERNEL strata_decode_##name(STRATA_ARGUMENT(Batch, batch)) { decode<Form>(batch); } \
    STRATA_KERNEL strata_fold_##name(STRATA_ARGUMENT(Batch, batch)) { fold<Form>(batch); }

STRATA_CODE(bf16, Bf16Code)
STRATA_CODE(mx8, Mx8Code)
STRATA_CODE(int8, Int8Code)
