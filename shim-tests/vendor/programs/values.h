/* Values whose reductions are exact in every order, so that any right algorithm gives the same bytes. */
#ifndef VALUES_H
#define VALUES_H

#include <math.h>
#include <nccl.h>
#include <stdint.h>
#include <string.h>

enum { PRE_MUL_SUM = 5 };

static size_t size_of(ncclDataType_t type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

static int is_float8(ncclDataType_t type) { return type >= ncclFloat8e4m3; }
static int is_float(ncclDataType_t type) { return type >= ncclFloat16; }

static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return x ^ (x >> 33);
}

/* A number that the format with these bits has exactly, and not one of its smallest. */
static uint32_t packed(double value, int exponent_bits, int mantissa_bits) {
  if (value == 0) return 0;
  uint32_t sign = value < 0, bias = (1u << (exponent_bits - 1)) - 1;
  double size = fabs(value);
  int exponent = 0;
  while (size >= 2) size /= 2, exponent++;
  while (size < 1) size *= 2, exponent--;
  uint32_t mantissa = (uint32_t)((size - 1) * (double)(1u << mantissa_bits));
  return (sign << (exponent_bits + mantissa_bits)) | ((bias + (uint32_t)exponent) << mantissa_bits) | mantissa;
}

static void put(void* buffer, size_t index, ncclDataType_t type, double value) {
  char* at = (char*)buffer + index * size_of(type);
  int64_t whole = (int64_t)value;
  float single = (float)value;
  uint32_t bits = 0;
  switch (type) {
    case ncclFloat32: memcpy(at, &single, 4); return;
    case ncclFloat64: memcpy(at, &value, 8); return;
    case ncclFloat16: bits = packed(value, 5, 10); break;
    case ncclBfloat16: bits = packed(value, 8, 7); break;
    case ncclFloat8e4m3: bits = packed(value, 4, 3); break;
    case ncclFloat8e5m2: bits = packed(value, 5, 2); break;
    default: memcpy(at, &whole, size_of(type)); return; /* the low bytes: integers wrap */
  }
  memcpy(at, &bits, size_of(type));
}

/* A rank's element for a reduction. Numbers of 8 bits hold sums of eight ones and products of eight twos. */
static double element(uint64_t seed, int rank, size_t index, ncclDataType_t type, int op) {
  uint64_t random = mix(seed ^ mix(((uint64_t)(unsigned)rank << 40) ^ index));
  if (op == ncclProd) return rank < 8 && random % 3 == 0 ? 2 : 1;
  if (is_float8(type)) return rank < 8 ? (double)(random & 1) : 0;
  double value = (double)(random % 10);
  int is_signed = is_float(type) || type == ncclInt8 || type == ncclInt32 || type == ncclInt64;
  return is_signed && op != ncclAvg && op != PRE_MUL_SUM ? value - 4 : value;
}

/* What a rank multiplies with: its own number where the type has room for it. */
static double factor(int rank, ncclDataType_t type) { return is_float8(type) ? 2 : 1 + rank % 2; }

/* Means of floating-point numbers are exact for 1, 2, 4 and 8 ranks only. */
static int exact_op(int op, ncclDataType_t type, int nranks) {
  int power_of_two = (nranks & (nranks - 1)) == 0 && nranks <= 8;
  return op == ncclAvg && is_float(type) && !power_of_two ? ncclSum : op;
}

static double reduced(uint64_t seed, int nranks, size_t index, ncclDataType_t type, int op) {
  double result = element(seed, 0, index, type, op);
  if (op == PRE_MUL_SUM) result *= factor(0, type);
  for (int rank = 1; rank < nranks; rank++) {
    double value = element(seed, rank, index, type, op);
    switch (op) {
      case ncclProd: result *= value; break;
      case ncclMax: result = value > result ? value : result; break;
      case ncclMin: result = value < result ? value : result; break;
      case PRE_MUL_SUM: result += value * factor(rank, type); break;
      default: result += value;
    }
  }
  if (op == ncclAvg) result = is_float(type) ? result / nranks : (double)((int64_t)result / nranks);
  return result;
}

/* Bytes of a rank for what is only moved: all patterns, those of no number too. */
static void fill_bytes(void* buffer, size_t bytes, uint64_t seed, int rank, size_t first) {
  for (size_t i = 0; i < bytes; i++)
    ((unsigned char*)buffer)[i] = (unsigned char)mix(seed ^ mix(((uint64_t)(unsigned)rank << 48) ^ (first + i)));
}

__attribute__((unused)) static uint64_t digest_of(uint64_t digest, const void* buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ ((const unsigned char*)buffer)[i]) * 0x100000001b3ull;
  return digest;
}

#endif
