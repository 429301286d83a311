// What kernels take, as src/device/gpu/kernels.rs lays it out and explains it.
#pragma once

enum { SCALE_NONE = 0, SCALE_MULTIPLY = 1, SCALE_RECIPROCAL = 2, SCALE_DIVIDE = 3, SCALE_RATIO = 4 };

// Of codes: the types of elements in `scale`, and what folds them in `operation`.
enum { ELEMENT_F16 = 0, ELEMENT_BF16 = 1, ELEMENT_F32 = 2, ELEMENT_F64 = 3 };
enum { FOLD_SUM = 0, FOLD_PROD = 1, FOLD_MAX = 2, FOLD_MIN = 3 };

struct Batch {
    u32 njobs, nsrcs, scale, operation;
    u64 factor;
    u64 words[498];
};
static_assert(sizeof(Batch) == 4008, "a batch as Rust has it");

struct Shuffle {
    u64 src, dst, block_bytes, rows, columns;
    u64 src_row_bytes, src_column_bytes, dst_row_bytes, dst_column_bytes;
};
static_assert(sizeof(Shuffle) == 72, "a shuffle as Rust has it");

struct Flag {
    u64 address;
    u32 value, reserved;
};
static_assert(sizeof(Flag) == 16, "a flag as Rust has it");
