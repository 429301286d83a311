// Elements: what each type's operations do to stored bits. The bits are those of src/device/host/element.rs.
//
// A type has `Bits`, the unsigned integer it is stored in, and functions from bits to bits. Floats of 8 and 16 bits are
// computed in float32 and rounded to nearest even after every pair. The larger and the smaller of floats are found by
// rank, the integer of the same order. A computed NaN is stored as the type's one quiet NaN.
#pragma once

namespace element {

// What is done to every element: nothing, multiplication or division.
enum { LEAVE = 0, TIMES = 1, OVER = 2 };

// An integer, stored in U and ordered as T.
template <class U, class T>
struct Integer {
    typedef U Bits;

    struct Factor {
        u32 how;
        u64 value;
    };

    STRATA_INLINE U sum(U a, U b) { return (U)(a + b); }
    STRATA_INLINE U prod(U a, U b) { return (U)(a * b); }
    STRATA_INLINE U larger(U a, U b) { return (T)a > (T)b ? a : b; }
    STRATA_INLINE U smaller(U a, U b) { return (T)a < (T)b ? a : b; }

    STRATA_INLINE Factor factor(u32 scale, u64 value) {
        Factor made = {LEAVE, value};
        if (scale == SCALE_MULTIPLY) {
            made.how = TIMES;
        } else if (scale != SCALE_NONE && value != 1) {
            made.how = OVER;
            // A quotient of bytes is a product with 65536/value, rounded up.
            if (sizeof(U) == 1) made.value = value > 255 ? 0 : (65535 + value) / value;
        }
        return made;
    }

    STRATA_INLINE U times(U a, const Factor &factor) { return (U)(a * (U)factor.value); }

    // Truncates toward zero. A divisor that the type cannot hold gives 0.
    STRATA_INLINE U over(U a, const Factor &factor) {
        const bool has_sign = (T)(U)~(U)0 < (T)1;
        bool negative = has_sign && a >> (sizeof(U) * 8 - 1) != 0;
        U magnitude = negative ? (U)(0 - a) : a;
        U quotient;
        if (sizeof(U) == 1) {
            quotient = (U)(((u32)magnitude * (u32)factor.value) >> 16);
        } else {
            quotient = factor.value > (U)~(U)0 ? 0 : (U)(magnitude / (U)factor.value);
        }
        return negative ? (U)(0 - quotient) : quotient;
    }
};

// The larger and the smaller of floats stored in U, with S the signed integer of the same size: a rank orders as the
// value does, holds +0 above -0, and a NaN's is below everything (or above, where the smaller is sought).
template <class U, class S, U TOP, U NOT_A_NUMBER>
struct Ranked {
    enum : U { MAX = (U)((U)~(U)0 >> 1) };
    enum : u32 { LAST = sizeof(U) * 8 - 1 };

    STRATA_INLINE S turned(S rank) { return (S)(rank ^ ((rank >> LAST) & (S)MAX)); }
    STRATA_INLINE S rank(U bits, S nan) { return (U)(bits & MAX) > TOP ? nan : turned((S)bits); }
    STRATA_INLINE U unranked(S rank) {
        U bits = (U)turned(rank);
        return (U)(bits & MAX) > TOP ? NOT_A_NUMBER : bits;
    }
    STRATA_INLINE U larger(U a, U b) {
        S nan = (S)(-(S)MAX - 1), first = rank(a, nan), second = rank(b, nan);
        return unranked(first > second ? first : second);
    }
    STRATA_INLINE U smaller(U a, U b) {
        S nan = (S)MAX, first = rank(a, nan), second = rank(b, nan);
        return unranked(first < second ? first : second);
    }
};

// IEEE float32.
struct Single : Ranked<u32, i32, 0x7f800000u, 0x7fc00000u> {
    typedef u32 Bits;
    typedef float Wide;
    STRATA_INLINE float widen(u32 bits) { return float_of(bits); }
    STRATA_INLINE u32 narrow(float wide) { return wide != wide ? 0x7fc00000u : bits_of(wide); }
};

// IEEE double precision.
struct Double : Ranked<u64, i64, 0x7ff0000000000000ull, 0x7ff8000000000000ull> {
    typedef u64 Bits;
    typedef double Wide;
    STRATA_INLINE double widen(u64 bits) { return double_of(bits); }
    STRATA_INLINE u64 narrow(double wide) { return wide != wide ? 0x7ff8000000000000ull : bits_of(wide); }
};

// bfloat16: the upper half of a float32.
struct Upper : Ranked<u16, i16, 0x7f80, 0x7fc0> {
    typedef u16 Bits;
    typedef float Wide;
    STRATA_INLINE float widen(u16 bits) { return float_of((u32)bits << 16); }
    STRATA_INLINE u16 narrow(float wide) {
        u32 bits = bits_of(wide);
        u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
        return wide != wide ? (u16)0x7fc0 : (u16)(rounded >> 16);
    }
};

// A float of at most 16 bits whose exponent is narrower than that of float32. TOP is the largest magnitude, as stored,
// that is no NaN; larger values end at CLAMP, the bits of a float32: the largest finite value, or for a type that
// overflows to infinity the power of two whose encoding is infinity.
template <class U, class S, u32 FRACTION, u32 BIAS, u32 TOP, u32 CLAMP, bool INFINITE, u32 NOT_A_NUMBER>
struct Small : Ranked<U, S, TOP, NOT_A_NUMBER> {
    typedef U Bits;
    typedef float Wide;
    enum : u32 {
        SIGN = 1u << (sizeof(U) * 8 - 1),
        TO_SIGN = 32 - sizeof(U) * 8,       // from the sign's place to that of a float32
        TO_FRACTION = 23 - FRACTION,        // the same of the fraction
        SMALLEST = (128 - BIAS) << 23,      // the smallest normal number
        INFINITE_BITS = 0x7f800000,
    };

    STRATA_INLINE float widen(U stored) {
        // Sign and magnitude come to their places. The product corrects the exponent's bias; it is exact, also of a
        // subnormal.
        u32 moved = (u32)((i32)((u32)stored << TO_SIGN) >> (TO_SIGN - TO_FRACTION));
        float value = float_of(moved & (0x80000000u | (SIGN - 1) << TO_FRACTION)) * float_of((254 - BIAS) << 23);
        // A magnitude that is no number is the value that follows the largest.
        const u32 first_special = ((INFINITE ? TOP : TOP + 1) << TO_FRACTION) + ((127 - BIAS) << 23);
        return magnitude_of(value) >= float_of(first_special) ? float_of(bits_of(value) | INFINITE_BITS) : value;
    }

    // The magnitude is rounded by adding a power of two so large that the sum's last bit is the type's. The sum's bits
    // less the power's are then the units that the magnitude has.
    STRATA_INLINE U narrow(float wide) {
        float clamped = smaller_of(magnitude_of(wide), float_of(CLAMP));
        u32 exponent = bits_of(clamped) & INFINITE_BITS;
        if (exponent < SMALLEST) exponent = SMALLEST;
        float sum = clamped + float_of(exponent) * (float)(1 << TO_FRACTION);
        u32 units = bits_of(sum) - exponent - (TO_FRACTION << 23);
        u32 rounded = units + ((exponent - SMALLEST) >> TO_FRACTION);
        u32 sign = (bits_of(wide) >> TO_SIGN) & SIGN;
        return (U)(wide != wide ? NOT_A_NUMBER : rounded + sign);
    }
};

// What floats have besides: arithmetic by way of the wide form.
template <class F>
struct Float : F {
    typedef typename F::Bits Bits;
    typedef typename F::Wide Wide;

    struct Factor {
        u32 how;
        Wide value;
    };

    STRATA_INLINE Bits sum(Bits a, Bits b) { return F::narrow(F::widen(a) + F::widen(b)); }
    STRATA_INLINE Bits prod(Bits a, Bits b) { return F::narrow(F::widen(a) * F::widen(b)); }

    STRATA_INLINE Factor factor(u32 scale, u64 value) {
        Factor made = {LEAVE, (Wide)1};
        if (scale == SCALE_MULTIPLY) {
            made.how = TIMES;
            made.value = F::widen((Bits)value);
        } else if (scale == SCALE_RECIPROCAL) {
            made.how = TIMES;
            made.value = (Wide)(1.0f / (float)value);
        } else if (scale == SCALE_DIVIDE && value != 1) {
            made.how = OVER;
            made.value = (Wide)value;
        }
        return made;
    }

    STRATA_INLINE Bits times(Bits a, const Factor &factor) { return F::narrow(F::widen(a) * factor.value); }
    STRATA_INLINE Bits over(Bits a, const Factor &factor) { return F::narrow(F::widen(a) / factor.value); }
};

// The types, by the names they have in kernels.
namespace type {
typedef Integer<::u8, ::i8> i8;
typedef Integer<::u8, ::u8> u8;
typedef Integer<::u32, ::i32> i32;
typedef Integer<::u32, ::u32> u32;
typedef Integer<::u64, ::i64> i64;
typedef Integer<::u64, ::u64> u64;
typedef Float<Single> f32;
typedef Float<Double> f64;
typedef Float<Upper> bf16;
typedef Float<Small<u16, i16, 10, 15, 0x7c00, 0x47800000u, true, 0x7e00>> f16;
typedef Float<Small<::u8, ::i8, 3, 7, 0x7e, 0x43e00000u, false, 0x7f>> e4m3;
typedef Float<Small<::u8, ::i8, 2, 15, 0x7c, 0x47600000u, true, 0x7f>> e5m2;
}  // namespace type

// The operations, by the names they have in kernels.
namespace operation {
struct sum {
    template <class E>
    STRATA_INLINE typename E::Bits pair(typename E::Bits a, typename E::Bits b) { return E::sum(a, b); }
};
struct prod {
    template <class E>
    STRATA_INLINE typename E::Bits pair(typename E::Bits a, typename E::Bits b) { return E::prod(a, b); }
};
struct max {
    template <class E>
    STRATA_INLINE typename E::Bits pair(typename E::Bits a, typename E::Bits b) { return E::larger(a, b); }
};
struct min {
    template <class E>
    STRATA_INLINE typename E::Bits pair(typename E::Bits a, typename E::Bits b) { return E::smaller(a, b); }
};
}  // namespace operation

}  // namespace element
