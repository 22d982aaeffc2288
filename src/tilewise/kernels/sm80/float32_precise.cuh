// clang-format off
// Scores that are accurate to half a unit in the last place, where that matters.
//
// A weight is e^(s - m). Where scores are in the thousands, their last bit is worth 1e-4 of a weight, and one row whose two
// largest scores nearly tie determines the error of the whole result. There, six products of three parts, added up without
// loss, replace three products: the error is 0.5 instead of 1.2 units of 2^-24, in addition to the error that all scores of
// that size have in common (PyTorch's kernel: 2).
//
// Which scores are refined: those beyond large_score in tiles that have one near the largest of its row. Whether a score is
// replaced depends only on the score that three products give, and tiles are left out only where no score has weight. Both
// directions, whose tiles differ, therefore have the same bits of every score that matters.
// clang-format on
#pragma once

#include "float32_products.cuh"

namespace tilewise::sm80 {

// All 24 bits of numbers: hi and lo as in float32_products.cuh, and the bit that may remain.
template <int count>
struct AllParts {
  u32 hi[count], lo[count], rest[count];

  __device__ __forceinline__ void set(int i, u32 bits) {
    hi[i] = (bits + tf32_half) & tf32_bits;
    const float low = __uint_as_float(bits) - __uint_as_float(hi[i]);
    lo[i] = (__float_as_uint(low) + tf32_half) & tf32_bits;
    rest[i] = __float_as_uint(low - __uint_as_float(lo[i]));
  }
};

// high + low += x, where high is the nearest float.
__device__ __forceinline__ void add_exactly(float x, float& high, float& low) {
  const float sum = high + x, taken = sum - high;
  low += (high - (sum - taken)) + (x - taken);
  high = sum;
}

// A B^T of 16 rows of A and 16 of B, accurate to about half a unit in the last place: six products,
// where every step of the large ones is added up outside of the tensor core. Lanes and the result
// are as for load_a, load_b_along and Sums; `first_low` is as for Sums::add.
template <Low first_low, int a_rows, int b_rows>
__device__ __forceinline__ void multiply_precisely(u32 a_lane, u32 b_lane, int panels,
                                                   float (&product)[8]) {
  float low[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) product[i] = low[i] = 0.0f;
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel) {
#pragma unroll 1
    for (int step = 0; step < float_panel / 8; ++step) {
      u32 x[4];
      AllParts<4> a;
      AllParts<2> b[2];
      ptx::ldmatrix_x4(column_block<a_rows>(a_lane, step), x);
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, x[i]);
      ptx::ldmatrix_x4(column_block<b_rows>(b_lane, step), x);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, x[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* small = &low[4 * j];
        float large[4] = {};
        auto add = [&](const u32(&of_a)[4], const u32(&of_b)[2]) {
          ptx::mma_m16n8k8(small, of_a, of_b[0], of_b[1]);
        };
        if constexpr (first_low == Low::of_a) {
          add(a.rest, b[j].hi), add(a.hi, b[j].rest), add(a.lo, b[j].lo);
          add(a.lo, b[j].hi), add(a.hi, b[j].lo);
        } else {
          add(a.hi, b[j].rest), add(a.rest, b[j].hi), add(a.lo, b[j].lo);
          add(a.hi, b[j].lo), add(a.lo, b[j].hi);
        }
        ptx::mma_m16n8k8(large, a.hi, b[j].hi[0], b[j].hi[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) add_exactly(large[i], product[4 * j + i], small[i]);
      }
    }
    a_lane += panel_bytes(a_rows);
    b_lane += panel_bytes(b_rows);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) product[i] += low[i];
}

// Scores beyond large_score, in nats, justify more than three products: their last bit is worth
// 2^-15 of a weight. Scores that are far_below the largest have no weight.
constexpr float large_score = 512.0f, far_below = 32.0f;

// The result for a score that is known more accurately. Invariant: it depends on the score alone,
// so that both directions decide alike. Hidden scores stay hidden.
__device__ __forceinline__ float refined(float score, float better, float scale) {
  const float size = fabsf(__fmul_rn(score, scale));
  return size > large_score && size < __uint_as_float(0x7f800000u) ? better : score;
}

}  // namespace tilewise::sm80
