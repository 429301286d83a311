// Reductions and scalings: strata_reduce_<operation>_<type> and strata_scale_<type>.
//
// Where the destination and all sources have the same place within 16 bytes, all but a few elements at either end move
// in packs of 16 bytes: a thread has the packs of two sources under way before it computes, and keeps one partial
// result. Otherwise elements are accessed one by one, and byte by byte where one is not aligned to its size. A thread
// reads an element of every source before it writes it, so that the destination may be a source.
#include "machine.h"
#include "arguments.h"
#include "element.h"

// One job of a batch.
struct Job {
    u64 bytes, dst;
    const u64 *srcs;
    u32 nsrcs;
};

STRATA_INLINE Job job_of(const Batch &batch) {
    const u64 *words = batch.words + block_y() * (2 + batch.nsrcs);
    Job job = {words[0], words[1], words + 2, batch.nsrcs};
    return job;
}

// Bits in which any of the job's addresses differs from its destination.
STRATA_INLINE u64 differing(const Job &job) {
    u64 bits = 0;
    STRATA_ROLL
    for (u32 k = 0; k < job.nsrcs; k++) bits |= job.srcs[k] ^ job.dst;
    return bits;
}

// A pack's parts of 4 or 8 bytes.
template <class U>
struct Units {
    enum : u32 { COUNT = 16 / sizeof(U), WORDS = sizeof(U) / 4 };

    STRATA_INLINE U get(const Pack &pack, u32 i) {
        if (WORDS == 1) return (U)pack.word[i % 4];
        return (U)(pack.word[2 * i % 4] | (u64)pack.word[(2 * i + 1) % 4] << 32);
    }
    STRATA_INLINE void set(Pack &pack, u32 i, U unit) {
        pack.word[i * WORDS] = (u32)unit;
        if (WORDS == 2) pack.word[(2 * i + 1) % 4] = (u32)((u64)unit >> 32);
    }
};

// What is done to an element once it is folded.
template <class E, bool MULTIPLIES>
STRATA_INLINE typename E::Bits finished(typename E::Bits bits, const typename E::Factor &factor) {
    if (MULTIPLIES && factor.how == element::TIMES) return E::times(bits, factor);
    return E::over(bits, factor);
}

// A whole pack at once.
template <class E, class O>
STRATA_INLINE Pack pair_packs(const Pack &a, const Pack &b) {
    typedef element::InUnit<E> I;
    typedef Units<typename I::Unit> P;
    Pack result;
    STRATA_UNROLL
    for (u32 i = 0; i < P::COUNT; i++) P::set(result, i, I::template pair<O>(P::get(a, i), P::get(b, i)));
    return result;
}

template <class E, bool MULTIPLIES>
STRATA_INLINE Pack finish_pack(Pack pack, const typename E::Factor &factor) {
    typedef element::InUnit<E> I;
    typedef Units<typename I::Unit> P;
    if (MULTIPLIES && factor.how == element::TIMES) {
        STRATA_UNROLL
        for (u32 i = 0; i < P::COUNT; i++) P::set(pack, i, I::times(P::get(pack, i), factor));
        return pack;
    }
    // Divisions are long: there is code for one unit, and the pack is turned by it.
    STRATA_ROLL
    for (u32 turn = 0; turn < P::COUNT; turn++) {
        typename I::Unit last = I::over(P::get(pack, 0), factor);
        STRATA_UNROLL
        for (u32 i = 0; i + 1 < P::COUNT; i++) P::set(pack, i, P::get(pack, i + 1));
        P::set(pack, P::COUNT - 1, last);
    }
    return pack;
}

// Folds `packs` packs, which begin `offset` bytes into the job. A thread has UNROLL packs under way, as far apart as the
// whole grid reaches, so that few packs are spread over all blocks.
template <class E, class O, bool MULTIPLIES>
STRATA_INLINE void fold_packs(const Job &job, const typename E::Factor &factor, u64 offset, u64 packs) {
    // No more than 16 elements, whose code is what makes the kernels long.
    const u32 UNROLL = sizeof(typename E::Bits) == 1 ? 1 : sizeof(typename E::Bits) == 2 ? 2 : 4;
    const u64 stride = (u64)blocks_x() * threads_x();
    STRATA_ROLL
    for (u64 base = (u64)block_x() * threads_x() + thread_x(); base < packs; base += stride * UNROLL) {
        u64 at[UNROLL];
        Pack folded[UNROLL], next[UNROLL];
        STRATA_UNROLL
        for (u32 u = 0; u < UNROLL; u++) {
            u64 index = base + u * stride;
            // Past the end the last pack is read, and nothing written.
            at[u] = offset + (index < packs ? index : packs - 1) * 16;
            folded[u] = load_at<Pack>(job.srcs[0] + at[u]);
        }
        if (job.nsrcs > 1) {
            STRATA_UNROLL
            for (u32 u = 0; u < UNROLL; u++) next[u] = load_at<Pack>(job.srcs[1] + at[u]);
        }
        STRATA_ROLL
        for (u32 k = 2; k <= job.nsrcs; k++) {
            Pack now[UNROLL];
            STRATA_UNROLL
            for (u32 u = 0; u < UNROLL; u++) now[u] = next[u];
            if (k < job.nsrcs) {
                STRATA_UNROLL
                for (u32 u = 0; u < UNROLL; u++) next[u] = load_at<Pack>(job.srcs[k] + at[u]);
            }
            STRATA_UNROLL
            for (u32 u = 0; u < UNROLL; u++) folded[u] = pair_packs<E, O>(folded[u], now[u]);
        }
        if (factor.how != element::LEAVE) {
            STRATA_UNROLL
            for (u32 u = 0; u < UNROLL; u++) folded[u] = finish_pack<E, MULTIPLIES>(folded[u], factor);
        }
        STRATA_UNROLL
        for (u32 u = 0; u < UNROLL; u++) {
            if (base + u * stride < packs) store_at<Pack>(job.dst + at[u], folded[u]);
        }
    }
}

// Folds the element `at` bytes into the job.
template <class E, class O, bool MULTIPLIES>
STRATA_INLINE void fold_element(const Job &job, const typename E::Factor &factor, u64 at, bool aligned) {
    typedef typename E::Bits Bits;
    Bits folded = load_element<Bits>(job.srcs[0] + at, aligned);
    STRATA_ROLL
    for (u32 k = 1; k < job.nsrcs; k++) {
        folded = O::template pair<E>(folded, load_element<Bits>(job.srcs[k] + at, aligned));
    }
    if (factor.how != element::LEAVE) folded = finished<E, MULTIPLIES>(folded, factor);
    store_element(job.dst + at, folded, aligned);
}

template <class E, class O, bool MULTIPLIES>
STRATA_INLINE void fold(const Batch &batch) {
    if (block_y() >= batch.njobs) return;
    const u64 size = sizeof(typename E::Bits);
    Job job = job_of(batch);
    if (MULTIPLIES) job.nsrcs = 1;
    const typename E::Factor factor = E::template factor<MULTIPLIES>(batch.scale, batch.factor);
    const u64 differ = differing(job);
    const bool aligned = ((differ | job.dst) & (size - 1)) == 0;
    // Bytes before the first pack, and in packs.
    u64 head = job.bytes, body = 0;
    if (aligned && (differ & 15) == 0) {
        u64 to_pack = (0 - job.dst) & 15;
        head = to_pack < job.bytes ? to_pack : job.bytes;
        body = (job.bytes - head) & ~(u64)15;
        fold_packs<E, O, MULTIPLIES>(job, factor, head, body / 16);
    }
    // What is no pack, as one sequence: the elements before and those after the packs.
    const u64 singles = (job.bytes - body) / size, stride = (u64)blocks_x() * threads_x();
    STRATA_ROLL
    for (u64 i = (u64)block_x() * threads_x() + thread_x(); i < singles; i += stride) {
        u64 at = i * size;
        fold_element<E, O, MULTIPLIES>(job, factor, at < head ? at : at + body, aligned);
    }
}

#define STRATA_TYPE(type_name) \
    STRATA_KERNEL strata_scale_##type_name(STRATA_ARGUMENT(Batch, batch)) { \
        fold<element::type::type_name, element::operation::max, true>(batch); \
    }
#define STRATA_OPERATION(type_name, operation_name) \
    STRATA_KERNEL strata_reduce_##operation_name##_##type_name(STRATA_ARGUMENT(Batch, batch)) { \
        fold<element::type::type_name, element::operation::operation_name, false>(batch); \
    }
#include "operations.def"
