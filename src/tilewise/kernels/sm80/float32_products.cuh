// clang-format off
// Products of float32 matrices by TF32 tensor cores, and the layout of their operands.
//
// Splitting. x = hi + lo, both TF32 (11 bits). A product is lo hi + hi lo + hi hi; lo lo is left out.
// Operands are split in registers, right before they are used, and each element serves three products
// or more.
//   A  hi is x rounded; lo = x - hi is exact and has at most 12 bits, of which the tensor core reads 11: it loses half a unit
//      in the last place of x where the last bit is set. This takes three instructions.
//   B  of S and dP: as A. Both directions then have the same bits of S, whichever operand is A, and the error of a score is
//      half as large.
//   B  elsewhere: hi is x truncated, lo = x (1 + 2^-23) - hi. x - hi would have up to 13 bits, of which the tensor core would
//      truncate two, always towards 0; the factor first adds one or two units in the last place of x, which on average is
//      about what is truncated. This takes two instructions.
// lo lo is 2^-22 of a product and, with A rounded, of either sign. From all this, a sum of 128 random terms has an error of
// 0.8e-7 where both are rounded, otherwise of 1.5e-7; float32 arithmetic has one of 2e-7. (With both truncated it is 2.4e-7, a
// third of it towards 0.)
//
// Why two accumulators: the tensor core truncates its sums instead of rounding them, at every step. The small terms lose
// nothing that matters when they are added to one another; added to the large ones they would triple the number of truncations.
// The large ones are moved to another register after four to eight steps.
//
// In shared memory a matrix of floats is a matrix of twice as many 16-bit columns (common/layout.cuh): a panel is 32 floats
// wide, and ldmatrix moves whole floats, four per row of an 8 x 8 matrix. Copies, swizzle and lane addresses are therefore
// those of the 16-bit kernels (tiles.cuh).
//
// Operands, by the index that is summed over:
//   along the rows in memory (Q, K in S = Q K^T)    ldmatrix, in the order of the hardware
//   across the rows in memory (V in P V)            two 16-byte loads per lane: rows 2t and 2t + 1 of
//                                                   eight, columns 4g to 4g + 3 of a panel (g = lane / 4,
//                                                   t = lane % 4)
// The latter make four products of eight columns each, where product i has the columns 4g + i; their sum index is in the
// order 0 2 4 6 1 3 5 7. The same holds for an accumulator that is used as an A operand: its columns 2t and 2t + 1 are
// columns t and t + 4 of the operand. A lane ends up with the columns 8t to 8t + 7 of a panel.
// clang-format on
#pragma once

#include "float32_ptx.cuh"
#include "tiles.cuh"

namespace tilewise::sm80 {

constexpr int float_panel = panel_columns / 2;  // floats in a row of a panel

// Converts floats to halves of floats, the unit of copies and layouts.
__host__ __device__ constexpr int halves(int floats) { return 2 * floats; }

constexpr u32 tf32_half = 0x1000;  // half a unit in the last place of TF32

// The only part of a number, where one product is enough. The tensor core truncates; adding between
// 3/8 and 3/4 of the last place that it keeps beforehand makes it err in both directions. Numbers
// that have 11 bits stay as they are, and so do inf and NaN.
__device__ __forceinline__ u32 near_tf32(u32 bits) {
  return __float_as_uint(__uint_as_float(bits) * (1.0f + 0x1.8p-12f));
}

constexpr u32 tf32_bits = ~(2 * tf32_half - 1);

// A 16 x 8 operand A, four numbers per lane.
template <bool exact>
struct PartsA {
  u32 hi[4];
  u32 lo[exact ? 4 : 1];

  // Invariant: `half` is tf32_half.
  __device__ __forceinline__ void set(int i, u32 bits, u32 half = tf32_half) {
    if constexpr (exact) {
      // Why not cvt.rna.tf32: it compiles to these two instructions and two more that keep NaN,
      // which lo does here.
      hi[i] = (bits + half) & tf32_bits;
      lo[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(hi[i]));
    } else {
      hi[i] = near_tf32(bits);
    }
  }
};

// An 8 x 8 operand B, two numbers per lane.
template <bool exact>
struct PartsB {
  u32 hi[2];
  u32 lo[exact ? 2 : 1];

  // Invariant: `mask` is tf32_bits.
  __device__ __forceinline__ void set(int i, u32 bits, u32 mask = tf32_bits) {
    if constexpr (exact) {
      hi[i] = bits & mask;
      lo[i] =
          __float_as_uint(fmaf(__uint_as_float(bits), 1.0f + 0x1p-23f, -__uint_as_float(hi[i])));
    } else {
      hi[i] = near_tf32(bits);
    }
  }
  // Splits as for an A operand.
  __device__ __forceinline__ void set_rounded(int i, u32 bits) {
    if constexpr (exact) {
      hi[i] = (bits + tf32_half) & tf32_bits;
      lo[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(hi[i]));
    } else {
      hi[i] = near_tf32(bits);
    }
  }
};

// The operand whose low parts make a small term.
enum class Low { of_a, of_b };

// Accumulators of products of 16 x 8, four numbers per lane each.
template <bool exact, int count>
struct Sums {
  float large[count];
  float small[exact ? count : 1];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      large[i] = 0.0f;
      if constexpr (exact) small[i] = 0.0f;
    }
  }
  // Adds products from `first` on of one A with several B; `first_low` selects the order of the
  // small terms. Why in this order: neighbouring products have different accumulators, and need not
  // wait for one another.
  template <Low first_low = Low::of_a, int products>
  __device__ __forceinline__ void add(int first, const PartsA<exact>& a,
                                      const PartsB<exact> (&b)[products]) {
    constexpr Low second_low = first_low == Low::of_a ? Low::of_b : Low::of_a;
    if constexpr (exact) add_small<first_low>(first, a, b);
#pragma unroll
    for (int i = 0; i < products; ++i)
      ptx::mma_m16n8k8(&large[4 * (first + i)], a.hi, b[i].hi[0], b[i].hi[1]);
    if constexpr (exact) add_small<second_low>(first, a, b);
  }
  template <Low low, int products>
  __device__ __forceinline__ void add_small(int first, const PartsA<exact>& a,
                                            const PartsB<exact> (&b)[products]) {
#pragma unroll
    for (int i = 0; i < products; ++i) {
      if constexpr (low == Low::of_a)
        ptx::mma_m16n8k8(&small[4 * (first + i)], a.lo, b[i].hi[0], b[i].hi[1]);
      else
        ptx::mma_m16n8k8(&small[4 * (first + i)], a.hi, b[i].lo[0], b[i].lo[1]);
    }
  }
  // Moves the large terms out of the tensor core's reach.
  __device__ __forceinline__ void drain(float (&into)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      into[i] += large[i];
      large[i] = 0.0f;
    }
  }
  __device__ __forceinline__ float total(int i) const {
    if constexpr (exact) return large[i] + small[i];
    return large[i];
  }
};

// Loads 16 x 8 floats, step `step` of a matrix with panels of `rows`; `lane` is from lane_by_rows.
template <int rows, bool exact>
__device__ __forceinline__ void load_a(u32 lane, int step, PartsA<exact>& a) {
  u32 x[4];
  ptx::ldmatrix_x4(column_block<rows>(lane, step), x);
#pragma unroll
  for (int i = 0; i < 4; ++i) a.set(i, x[i]);
}

// Loads two operands of eight columns, 16 rows in memory; `lane` is from lane_by_columns.
template <int rows, bool exact>
__device__ __forceinline__ void load_b_along(u32 lane, int step, PartsB<exact> (&b)[2]) {
  u32 x[4];
  ptx::ldmatrix_x4(column_block<rows>(lane, step), x);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2].set_rounded(i % 2, x[i]);
}

// The address of a lane for the operands of load_b_across.
__device__ __forceinline__ u32 lane_across(u32 matrix) {
  const int lane = threadIdx.x % 32;
  return matrix + swizzled_chunk(lane % 4 * 2, lane / 4);
}

// Loads four operands of eight columns: those of a panel, from row 8 * step on. Invariant: `half`
// is tf32_half. Why it is not a constant: the assembler, which knows that the tensor core ignores
// the bits that the mask clears, would use the unmasked numbers as hi, and would first move them
// next to one another.
template <int rows, bool exact>
__device__ __forceinline__ void load_b_across(u32 lane, int step, int panel, u32 half,
                                              PartsB<exact> (&b)[4]) {
  const u32 place = step * swizzle_atom_bytes + panel * panel_bytes(rows), mask = 0u - 2u * half;
  const uint4 even = ptx::load_shared(lane + place);
  const uint4 odd = ptx::load_shared((lane ^ 16) + panel_row_bytes + place);
  b[0].set(0, even.x, mask), b[1].set(0, even.y, mask);
  b[2].set(0, even.z, mask), b[3].set(0, even.w, mask);
  b[0].set(1, odd.x, mask), b[1].set(1, odd.y, mask);
  b[2].set(1, odd.z, mask), b[3].set(1, odd.w, mask);
}

// The same with the columns in their own order, where product i has the columns 8i to 8i + 7, by
// loads of one float each: a lane ends up with the columns 8i + 2t and 8i + 2t + 1. Why:
// neighbouring lanes then add neighbouring floats in global memory, on GPUs that add them one at a
// time.
__device__ __forceinline__ u32 lane_across_by_one(u32 matrix) {
  const int lane = threadIdx.x % 32;
  return matrix + swizzled_chunk(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
}
template <int rows, bool exact>
__device__ __forceinline__ void load_b_across_by_one(u32 lane, int step, int panel,
                                                     PartsB<exact> (&b)[4]) {
  const u32 place = step * swizzle_atom_bytes + panel * panel_bytes(rows);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i].set(0, ptx::load_shared_word((lane ^ i * 32) + place));
    b[i].set(1, ptx::load_shared_word((lane ^ (i * 32 + 16)) + panel_row_bytes + place));
  }
}

// An accumulator of 16 x 8 as an operand whose sum index is its columns.
template <bool exact>
__device__ __forceinline__ void accumulator_as_a(const float* c, u32 half, PartsA<exact>& a) {
  a.set(0, __float_as_uint(c[0]), half);
  a.set(1, __float_as_uint(c[2]), half);
  a.set(2, __float_as_uint(c[1]), half);
  a.set(3, __float_as_uint(c[3]), half);
}

}  // namespace tilewise::sm80
