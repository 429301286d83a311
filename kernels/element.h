// Elements: what each type's operations do to stored bits. The bits are those of src/device/host/element.rs.
//
// A type has `Bits`, the unsigned integer it is stored in, and functions from bits to bits. Floats of 8 and 16 bits are
// computed as in float32 and rounded to nearest even after every pair. The larger and the smaller of floats are found by
// rank, the integer of the same order. A computed NaN is stored as the type's one quiet NaN.
#pragma once

namespace element {

// What is done to every element: nothing, multiplication or division. Reductions never multiply.
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

    template <bool MULTIPLIES>
    STRATA_INLINE Factor factor(u32 scale, u64 value) {
        Factor made = {LEAVE, value};
        if (MULTIPLIES && scale == SCALE_MULTIPLY) {
            made.how = TIMES;
        } else if (scale != SCALE_NONE && value != 1) {
            made.how = OVER;
            // A quotient of bytes is a product with 65536/value, rounded up.
            if (sizeof(U) == 1) made.value = value > 255 ? 0 : (65535 + (u32)value) / (u32)value;
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

// IEEE half precision.
struct Half : Ranked<u16, i16, 0x7c00, 0x7e00> {
    typedef u16 Bits;
    typedef float Wide;
    STRATA_INLINE float widen(u16 bits) { return half_widen(bits); }
    STRATA_INLINE u16 narrow(float wide) { return wide != wide ? (u16)0x7e00 : half_nearest(wide); }
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

    template <bool MULTIPLIES>
    STRATA_INLINE Factor factor(u32 scale, u64 value) {
        Factor made = {LEAVE, (Wide)1};
        if (MULTIPLIES && scale == SCALE_MULTIPLY) {
            made.how = TIMES;
            made.value = F::widen((Bits)value);
        } else if (MULTIPLIES && scale == SCALE_RECIPROCAL) {
            made.how = TIMES;
            made.value = (Wide)(1.0f / (float)value);
        } else if (MULTIPLIES && scale == SCALE_RATIO) {
            made.how = TIMES;
            made.value = (Wide)(u32)(value >> 32) / (Wide)(u32)value;
        } else if (scale == SCALE_DIVIDE && value != 1) {
            made.how = OVER;
            made.value = (Wide)value;
        }
        return made;
    }

    STRATA_INLINE Bits times(Bits a, const Factor &factor) { return F::narrow(F::widen(a) * factor.value); }
    STRATA_INLINE Bits over(Bits a, const Factor &factor) { return F::narrow(F::widen(a) / factor.value); }
};

// What elements are computed in together: words of 32 bits, or what has one element of 64.
template <u32 BYTES>
struct UnitOf {
    typedef u32 Unit;
};
template <>
struct UnitOf<8> {
    typedef u64 Unit;
};

// What is done to all elements of a unit: to one after the other.
template <class E>
struct Elementwise {
    typedef typename E::Bits Bits;
    typedef typename E::Factor Factor;
    typedef typename UnitOf<sizeof(Bits)>::Unit Unit;
    enum : u32 { COUNT = sizeof(Unit) / sizeof(Bits), WIDTH = sizeof(Bits) * 8 };

    STRATA_INLINE Bits get(Unit unit, u32 i) { return (Bits)(unit >> i * WIDTH); }
    STRATA_INLINE Unit put(u32 i, Bits bits) { return (Unit)bits << i * WIDTH; }

    template <class O>
    STRATA_INLINE Unit pair(Unit a, Unit b) {
        Unit result = 0;
        STRATA_UNROLL
        for (u32 i = 0; i < COUNT; i++) result |= put(i, O::template pair<E>(get(a, i), get(b, i)));
        return result;
    }
    STRATA_INLINE Unit times(Unit a, const Factor &factor) {
        Unit result = 0;
        STRATA_UNROLL
        for (u32 i = 0; i < COUNT; i++) result |= put(i, E::times(get(a, i), factor));
        return result;
    }
    STRATA_INLINE Unit over(Unit a, const Factor &factor) {
        Unit result = 0;
        STRATA_UNROLL
        for (u32 i = 0; i < COUNT; i++) result |= put(i, E::over(get(a, i), factor));
        return result;
    }
};

// The larger and the smaller of two pairs of half floats, which are bits of one of them; of a NaN and a number the number.
// Of zeros +0 is the larger.
STRATA_INLINE u32 larger_halves(u32 a, u32 b) {
    u32 larger = chosen(half2_greater(a, b), a, b);
    return chosen(half2_nan(b), a, chosen(half2_equal(a, b), a & b, larger));
}
STRATA_INLINE u32 smaller_halves(u32 a, u32 b) {
    u32 smaller = chosen(half2_greater(a, b), b, a);
    return chosen(half2_nan(a), b, chosen(half2_equal(a, b), a | b, smaller));
}

// Half floats, two at once. A sum or product in half precision is that in float32, rounded: a float32 has more than twice
// as many bits, and two more.
struct HalfWord {
    STRATA_INLINE u32 settled(u32 word) { return chosen(half2_nan(word), 0x7e007e00, word); }
    STRATA_INLINE u32 sum(u32 a, u32 b) { return settled(half2_sum(a, b)); }
    STRATA_INLINE u32 prod(u32 a, u32 b) { return settled(half2_prod(a, b)); }
    STRATA_INLINE u32 larger(u32 a, u32 b) { return settled(larger_halves(a, b)); }
    STRATA_INLINE u32 smaller(u32 a, u32 b) { return settled(smaller_halves(a, b)); }
};

// Floats of 8 bits, four in a word: two pairs of half floats, of which each has the elements of every other byte.
//
// An e5m2 is the upper half of a half float. An e4m3, moved so that its fraction is a half float's, is 2^-8 of its value,
// subnormals too; its one NaN must be made one. Half precision has more than twice the bits of either type and two more, so
// sums and products are rounded twice to what they are rounded to once; what is computed in float32 is rounded to odd first.
template <bool E4M3>
struct ByteWord {
    enum : u32 {
        SIGNS = 0x80008000,
        NANS = 0x7f007f00,
        // Of a half float: bits below the fraction, half of the last bit less one, the last bit.
        DROPPED = E4M3 ? 7 : 8,
        HALF = E4M3 ? 0x003f003f : 0x007f007f,
        ONE = 0x00010001,
        // The largest finite value, to which what is larger is cut, and an e4m3's NaN, moved.
        LARGEST = E4M3 ? 0x3f003f00 : 0x7b007b00,
        MOVED_NAN = 0x3f803f80,
        // 2^8.
        UNSCALE = 0x5c005c00,
    };

    // Elements in the upper bytes of the halves, as half floats.
    STRATA_INLINE u32 widen(u32 upper) {
        if (!E4M3) return upper;
        u32 magnitude = (upper & NANS) >> 1;
        return half2_equal(magnitude, MOVED_NAN) | magnitude | (upper & SIGNS);
    }

    // Exact values: what larger_halves gives.
    STRATA_INLINE u32 narrow_exactly(u32 halves) {
        u32 magnitude = E4M3 ? (halves << 1) & NANS : halves & NANS;
        return chosen(half2_nan(halves), NANS, magnitude | (halves & SIGNS));
    }

    // Rounded to nearest even, and cut to the largest.
    STRATA_INLINE u32 narrow(u32 halves) {
        u32 magnitude = halves & ~(u32)SIGNS;
        magnitude = chosen(half2_greater(magnitude, LARGEST), LARGEST, magnitude);
        u32 rounded = magnitude + HALF + ((magnitude >> DROPPED) & ONE);
        if (E4M3) rounded <<= 1;
        return chosen(half2_nan(halves), NANS, (rounded & NANS) | (halves & SIGNS));
    }

    template <class F>
    STRATA_INLINE u32 both(u32 a, u32 b) {
        u32 even = F::pair(widen(a << 8 & 0xff00ff00), widen(b << 8 & 0xff00ff00));
        u32 odd = F::pair(widen(a & 0xff00ff00), widen(b & 0xff00ff00));
        return even >> 8 | odd;
    }
    struct Sum {
        STRATA_INLINE u32 pair(u32 a, u32 b) { return narrow(half2_sum(a, b)); }
    };
    struct Prod {
        STRATA_INLINE u32 pair(u32 a, u32 b) { return narrow(half2_prod(a, E4M3 ? half2_prod(b, UNSCALE) : b)); }
    };
    struct Larger {
        STRATA_INLINE u32 pair(u32 a, u32 b) { return narrow_exactly(larger_halves(a, b)); }
    };
    struct Smaller {
        STRATA_INLINE u32 pair(u32 a, u32 b) { return narrow_exactly(smaller_halves(a, b)); }
    };

    STRATA_INLINE u32 sum(u32 a, u32 b) { return both<Sum>(a, b); }
    STRATA_INLINE u32 prod(u32 a, u32 b) { return both<Prod>(a, b); }
    STRATA_INLINE u32 larger(u32 a, u32 b) { return both<Larger>(a, b); }
    STRATA_INLINE u32 smaller(u32 a, u32 b) { return both<Smaller>(a, b); }

    struct Factor {
        u32 how;
        float value;
    };

    // The value of a pair's half, times or over the factor, rounded to odd.
    template <bool TIMES_IT>
    STRATA_INLINE u32 changed_half(u32 half, const Factor &factor) {
        float value = half_widen((u16)half);
        return half_odd(TIMES_IT ? value * factor.value : value / factor.value);
    }
    template <bool TIMES_IT>
    STRATA_INLINE u32 changed_pair(u32 upper, const Factor &factor) {
        u32 halves = widen(upper);
        u32 low = changed_half<TIMES_IT>(halves & 0xffff, factor), high = changed_half<TIMES_IT>(halves >> 16, factor);
        return narrow(low | high << 16);
    }
    template <bool TIMES_IT>
    STRATA_INLINE u32 changed(u32 word, const Factor &factor) {
        return changed_pair<TIMES_IT>(word << 8 & 0xff00ff00, factor) >> 8 |
               changed_pair<TIMES_IT>(word & 0xff00ff00, factor);
    }
};

// A float of 8 bits: a word of which the other elements are 0.
template <bool E4M3>
struct Byte {
    typedef u8 Bits;
    typedef ByteWord<E4M3> Word;
    typedef typename Word::Factor Factor;

    STRATA_INLINE u8 sum(u8 a, u8 b) { return (u8)Word::sum(a, b); }
    STRATA_INLINE u8 prod(u8 a, u8 b) { return (u8)Word::prod(a, b); }
    STRATA_INLINE u8 larger(u8 a, u8 b) { return (u8)Word::larger(a, b); }
    STRATA_INLINE u8 smaller(u8 a, u8 b) { return (u8)Word::smaller(a, b); }
    STRATA_INLINE u8 times(u8 a, const Factor &factor) {
        return (u8)(Word::template changed_pair<true>((u32)a << 8, factor) >> 8);
    }
    STRATA_INLINE u8 over(u8 a, const Factor &factor) {
        return (u8)(Word::template changed_pair<false>((u32)a << 8, factor) >> 8);
    }

    template <bool MULTIPLIES>
    STRATA_INLINE Factor factor(u32 scale, u64 value) {
        Factor made = {LEAVE, 1.0f};
        if (MULTIPLIES && scale == SCALE_MULTIPLY) {
            made.how = TIMES;
            // An e4m3 is 2^-8 of its value.
            made.value = half_widen((u16)Word::widen((u32)(u8)value << 8)) * (E4M3 ? 256.0f : 1.0f);
        } else if (MULTIPLIES && scale == SCALE_RECIPROCAL) {
            made.how = TIMES;
            made.value = 1.0f / (float)value;
        } else if (MULTIPLIES && scale == SCALE_RATIO) {
            made.how = TIMES;
            made.value = (float)(u32)(value >> 32) / (float)(u32)value;
        } else if (scale == SCALE_DIVIDE && value != 1) {
            made.how = OVER;
            made.value = (float)value;
        }
        return made;
    }
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
typedef Float<Half> f16;
typedef Byte<true> e4m3;
typedef Byte<false> e5m2;
}  // namespace type

// The operations, by the names they have in kernels.
namespace operation {
struct sum {
    template <class E, class B>
    STRATA_INLINE B pair(B a, B b) { return E::sum(a, b); }
};
struct prod {
    template <class E, class B>
    STRATA_INLINE B pair(B a, B b) { return E::prod(a, b); }
};
struct max {
    template <class E, class B>
    STRATA_INLINE B pair(B a, B b) { return E::larger(a, b); }
};
struct min {
    template <class E, class B>
    STRATA_INLINE B pair(B a, B b) { return E::smaller(a, b); }
};
}  // namespace operation

// What is done to units of a type: element by element, but where a type has better.
template <class E>
struct InUnit : Elementwise<E> {};

template <>
struct InUnit<type::f16> : Elementwise<type::f16> {
    template <class O>
    STRATA_INLINE u32 pair(u32 a, u32 b) { return O::template pair<HalfWord>(a, b); }
};

template <bool E4M3>
struct InUnit<Byte<E4M3>> {
    typedef u32 Unit;
    typedef ByteWord<E4M3> Word;
    typedef typename Word::Factor Factor;
    template <class O>
    STRATA_INLINE u32 pair(u32 a, u32 b) { return O::template pair<Word>(a, b); }
    STRATA_INLINE u32 times(u32 a, const Factor &factor) { return Word::template changed<true>(a, factor); }
    STRATA_INLINE u32 over(u32 a, const Factor &factor) { return Word::template changed<false>(a, factor); }
};

}  // namespace element
