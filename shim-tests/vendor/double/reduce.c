/* The arithmetic of reductions, element by element, each step rounded to the element's type. */
#include "double.h"
#include <math.h>
#include <string.h>

static const struct {
  const char* name;
  size_t size;
} types[] = {{"int8", 1},    {"uint8", 1},   {"int32", 4},   {"uint32", 4},   {"int64", 8},      {"uint64", 8},
             {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1}};

size_t type_size(ncclDataType_t type) { return types[type].size; }

const char* type_name(ncclDataType_t type) { return (unsigned)type < 12 ? types[type].name : "?"; }

/* A format of small floating-point numbers. Those of 8 bits have a largest number instead of infinities. */
struct format {
  int exponent_bits, mantissa_bits;
  double largest;
};

static const struct format* format_of(ncclDataType_t type) {
  static const struct format float16 = {5, 10, 65504}, bfloat16 = {8, 7, 0x1.fep127}, e4m3 = {4, 3, 448},
                             e5m2 = {5, 2, 57344};
  switch (type) {
    case ncclFloat16: return &float16;
    case ncclBfloat16: return &bfloat16;
    case ncclFloat8e4m3: return &e4m3;
    case ncclFloat8e5m2: return &e5m2;
    default: return NULL;
  }
}

static double decode(const struct format* format, uint32_t bits) {
  int ones = (1 << format->exponent_bits) - 1, bias = ones >> 1;
  int exponent = (int)(bits >> format->mantissa_bits) & ones;
  int mantissa = (int)(bits & ((1u << format->mantissa_bits) - 1));
  double sign = bits >> (format->exponent_bits + format->mantissa_bits) ? -1.0 : 1.0;
  int is_e4m3 = format->largest == 448;
  if (exponent == ones && !is_e4m3) return mantissa ? NAN : sign * INFINITY;
  if (is_e4m3 && exponent == ones && mantissa == 7) return NAN;
  if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - format->mantissa_bits);
  return sign * ldexp(mantissa + (1 << format->mantissa_bits), exponent - bias - format->mantissa_bits);
}

/* To the nearest, ties to the even one. */
static uint32_t encode(const struct format* format, double value) {
  int ones = (1 << format->exponent_bits) - 1, bias = ones >> 1, mantissa_bits = format->mantissa_bits;
  uint32_t sign = (uint32_t)(signbit(value) != 0) << (format->exponent_bits + mantissa_bits);
  uint32_t infinity = (uint32_t)ones << mantissa_bits;
  int is_e4m3 = format->largest == 448, is_small = is_e4m3 || format->largest == 57344;
  double size = fabs(value);
  if (value != value) return sign | infinity | (is_e4m3 ? 7 : 1);
  if (size == 0) return sign;
  int exponent;
  frexp(size, &exponent);
  exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
  double scaled = ldexp(size, mantissa_bits - exponent), whole = scaled >= 0x1p40 ? scaled : (double)(uint64_t)scaled;
  double rest = scaled - whole;
  if (rest > 0.5 || (rest == 0.5 && ((uint64_t)whole & 1))) whole += 1;
  if (ldexp(whole, exponent - mantissa_bits) > format->largest) {
    if (!is_small) return sign | infinity;
    whole = ldexp(format->largest, mantissa_bits - (exponent = ilogb(format->largest)));
  }
  uint32_t mantissa = (uint32_t)whole;
  if (mantissa >> (mantissa_bits + 1)) mantissa >>= 1, exponent++;
  if (mantissa < 1u << mantissa_bits) return sign | mantissa;
  return sign | ((uint32_t)(exponent + bias) << mantissa_bits) | (mantissa & ((1u << mantissa_bits) - 1));
}

static uint32_t load_small(const void* data, size_t size, size_t index) {
  return size == 1 ? ((const uint8_t*)data)[index] : ((const uint16_t*)data)[index];
}

static void store_small(void* data, size_t size, size_t index, uint32_t bits) {
  if (size == 1) ((uint8_t*)data)[index] = (uint8_t)bits;
  else ((uint16_t*)data)[index] = (uint16_t)bits;
}

static double combine_double(double a, double b, int op) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return a < b || b != b ? b : a;
    case ncclMin: return a > b || b != b ? b : a;
    default: return a + b;
  }
}

static void combine_small(void* into, const void* from, size_t count, ncclDataType_t type, int op) {
  const struct format* format = format_of(type);
  size_t size = type_size(type);
  for (size_t i = 0; i < count; i++) {
    double a = decode(format, load_small(into, size, i)), b = decode(format, load_small(from, size, i));
    store_small(into, size, i, encode(format, combine_double(a, b, op)));
  }
}

/* Integers wrap, so they are added and multiplied without signs. */
#define EACH_TYPE(X)                                                                                       \
  X(ncclInt8, int8_t, uint8_t) X(ncclUint8, uint8_t, uint8_t) X(ncclInt32, int32_t, uint32_t)              \
  X(ncclUint32, uint32_t, uint32_t) X(ncclInt64, int64_t, uint64_t) X(ncclUint64, uint64_t, uint64_t)      \
  X(ncclFloat32, float, float) X(ncclFloat64, double, double)

void reduce_combine(void* into, const void* from, size_t count, ncclDataType_t type, int op) {
  switch (type) {
#define X(code, c_type, arithmetic)                                                        \
  case code:                                                                               \
    for (size_t i = 0; i < count; i++) {                                                   \
      c_type a = ((c_type*)into)[i], b = ((const c_type*)from)[i];                         \
      switch (op) {                                                                        \
        case ncclProd: a = (c_type)((arithmetic)a * (arithmetic)b); break;                 \
        case ncclMax: a = a < b ? b : a; break;                                            \
        case ncclMin: a = a > b ? b : a; break;                                            \
        default: a = (c_type)((arithmetic)a + (arithmetic)b);                              \
      }                                                                                    \
      ((c_type*)into)[i] = a;                                                              \
    }                                                                                      \
    break;
    EACH_TYPE(X)
#undef X
    default: combine_small(into, from, count, type, op);
  }
}

void reduce_premultiply(void* data, size_t count, ncclDataType_t type, uint64_t scalar) {
  const struct format* format = format_of(type);
  size_t size = type_size(type);
  switch (type) {
#define X(code, c_type, arithmetic)                                                                                   \
  case code: {                                                                                                        \
    c_type factor;                                                                                                    \
    memcpy(&factor, &scalar, sizeof(factor));                                                                         \
    for (size_t i = 0; i < count; i++)                                                                                \
      ((c_type*)data)[i] = (c_type)((arithmetic)((c_type*)data)[i] * (arithmetic)factor);                             \
  } break;
    EACH_TYPE(X)
#undef X
    default: {
      double factor = decode(format, load_small(&scalar, size, 0));
      for (size_t i = 0; i < count; i++)
        store_small(data, size, i, encode(format, factor * decode(format, load_small(data, size, i))));
    }
  }
}

void reduce_divide(void* data, size_t count, ncclDataType_t type, int by) {
  const struct format* format = format_of(type);
  size_t size = type_size(type);
  switch (type) {
#define X(code, c_type, arithmetic) \
  case code:                        \
    for (size_t i = 0; i < count; i++) ((c_type*)data)[i] = (c_type)(((c_type*)data)[i] / (c_type)by); \
    break;
    EACH_TYPE(X)
#undef X
    default:
      for (size_t i = 0; i < count; i++)
        store_small(data, size, i, encode(format, decode(format, load_small(data, size, i)) / by));
  }
}
