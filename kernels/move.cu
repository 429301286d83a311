// What moves bytes and signals: strata_copy, strata_shuffle, strata_wait, strata_raise.
#include "machine.h"
#include "arguments.h"

// Runs `F::run<U>(...)` with the largest unit that divides `bits`.
template <class F, class A>
STRATA_INLINE void by_unit(u64 bits, const A &argument) {
    if ((bits & 15) == 0) {
        F::template run<Pack>(argument);
    } else if ((bits & 7) == 0) {
        F::template run<u64>(argument);
    } else if ((bits & 3) == 0) {
        F::template run<u32>(argument);
    } else if ((bits & 1) == 0) {
        F::template run<u16>(argument);
    } else {
        F::template run<u8>(argument);
    }
}

// Units that a thread has under way, as far apart as the whole grid reaches.
enum { UNDER_WAY = 4 };

// A job's words: bytes, destination, source.
struct Copy {
    template <class U>
    STRATA_INLINE void run(const u64 *words) {
        const u64 bytes = words[0], dst = words[1], src = words[2], size = sizeof(U);
        const u64 to_unit = (0 - dst) & (size - 1), head = to_unit < bytes ? to_unit : bytes;
        const u64 units = (bytes - head) / size, body = units * size;
        const u64 stride = (u64)blocks_x() * threads_x();
        STRATA_ROLL
        for (u64 base = (u64)block_x() * threads_x() + thread_x(); base < units; base += stride * UNDER_WAY) {
            U value[UNDER_WAY];
            u64 at[UNDER_WAY];
            STRATA_UNROLL
            for (u32 u = 0; u < UNDER_WAY; u++) {
                u64 index = base + u * stride;
                // Past the end the last unit is read, and nothing written.
                at[u] = head + (index < units ? index : units - 1) * size;
                value[u] = load_at<U>(src + at[u]);
            }
            STRATA_UNROLL
            for (u32 u = 0; u < UNDER_WAY; u++) {
                if (base + u * stride < units) store_at<U>(dst + at[u], value[u]);
            }
        }
        // The bytes before and after, fewer than a unit each.
        if (block_x() == 0) {
            STRATA_ROLL
            for (u64 i = thread_x(); i < bytes - body; i += threads_x()) {
                u64 at = i < head ? i : i + body;
                store_at<u8>(dst + at, load_at<u8>(src + at));
            }
        }
    }
};

STRATA_KERNEL strata_copy(STRATA_ARGUMENT(Batch, batch)) {
    if (block_y() >= batch.njobs) return;
    const u64 *words = batch.words + block_y() * (2 + batch.nsrcs);
    by_unit<Copy>(words[1] ^ words[2], words);
}

// Units are counted through all blocks; N is the integer that they are counted in.
template <class U, class N>
STRATA_INLINE void shuffle_units(const Shuffle &shuffle) {
    const N per_block = (N)(shuffle.block_bytes / sizeof(U)), columns = (N)shuffle.columns;
    const u64 units = (u64)per_block * shuffle.columns * shuffle.rows, stride = (u64)blocks_x() * threads_x();
    STRATA_ROLL
    for (u64 base = (u64)block_x() * threads_x() + thread_x(); base < units; base += stride * UNDER_WAY) {
        U value[UNDER_WAY];
        u64 to[UNDER_WAY];
        STRATA_UNROLL
        for (u32 u = 0; u < UNDER_WAY; u++) {
            u64 counted = base + u * stride;
            // Past the end the last unit is read, and nothing written.
            N index = (N)(counted < units ? counted : units - 1);
            N block = index / per_block, row = block / columns;
            u64 column = block - row * columns, within = (u64)(index - block * per_block) * sizeof(U);
            u64 from = shuffle.src + row * shuffle.src_row_bytes + column * shuffle.src_column_bytes + within;
            to[u] = shuffle.dst + row * shuffle.dst_row_bytes + column * shuffle.dst_column_bytes + within;
            value[u] = load_at<U>(from);
        }
        STRATA_UNROLL
        for (u32 u = 0; u < UNDER_WAY; u++) {
            if (base + u * stride < units) store_at<U>(to[u], value[u]);
        }
    }
}

struct Shuffled {
    template <class U>
    STRATA_INLINE void run(const Shuffle &shuffle) {
        // Division of 64-bit integers takes several times as long.
        if (shuffle.block_bytes / sizeof(U) * shuffle.columns * shuffle.rows < (1ull << 32)) {
            shuffle_units<U, u32>(shuffle);
        } else {
            shuffle_units<U, u64>(shuffle);
        }
    }
};

STRATA_KERNEL strata_shuffle(STRATA_ARGUMENT(Shuffle, shuffle)) {
    u64 bits = shuffle.src | shuffle.dst | shuffle.block_bytes;
    // A stride that is never taken may be anything.
    if (shuffle.rows > 1) bits |= shuffle.src_row_bytes | shuffle.dst_row_bytes;
    if (shuffle.columns > 1) bits |= shuffle.src_column_bytes | shuffle.dst_column_bytes;
    by_unit<Shuffled>(bits, shuffle);
}

STRATA_KERNEL strata_wait(STRATA_ARGUMENT(Flag, flag)) {
    const u32 *word = (const u32 *)flag.address;
    while ((i32)(load_system(word) - flag.value) < 0) nap();
    fence_system();
}

STRATA_KERNEL strata_raise(STRATA_ARGUMENT(Flag, flag)) {
    fence_system();
    store_system((u32 *)flag.address, flag.value);
}
