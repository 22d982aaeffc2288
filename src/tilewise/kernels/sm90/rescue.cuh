// The rare paths, all of them warp-local: recomputation of raw scores, and non-finite values that a
// mask hides.
#pragma once

#include "../common/layout.cuh"
#include "../common/nonfinite.cuh"
#include "ptx.cuh"

namespace tilewise {

// Recomputes S of this warp's 16 rows with mma.sync, from the Q and K that are still in shared
// memory. Why: the steady loop overwrites scores with p; when a p overflowed (or a row had no
// reference yet), the score is needed again. Invariant: q_address is the warp's first row in the
// warpgroup's Q panels (64 rows each).
template <Element element, int head_dim, int block_kv>
__device__ __forceinline__ void scores_again(float (&s)[block_kv / 2], ptx::u32 q_address,
                                             ptx::u32 k_address) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < block_kv / 2; ++i) s[i] = 0.0f;
  // Why the inner loop is over the k-steps, although Q is then read again for each pair: this takes
  // fewer registers.
#pragma unroll
  for (int pair = 0; pair < block_kv / 16; ++pair) {
    const int row = pair * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll 1
    for (int step = 0; step < head_dim / 16; ++step) {
      const int panel = step / 4;
      ptx::u32 a[4], b[4];
      ptx::ldmatrix_x4(
          q_address + panel * panel_bytes(64) + swizzled_chunk(lane % 16, step % 4 * 2 + lane / 16),
          a);
      ptx::ldmatrix_x4(k_address + panel * panel_bytes(block_kv) +
                           swizzled_chunk(row, step % 4 * 2 + lane / 8 % 2),
                       b);
      ptx::mma_m16n8k16<element>(&s[8 * pair], a, b[0], b[1]);
      ptx::mma_m16n8k16<element>(&s[8 * pair + 4], a, b[2], b[3]);
    }
  }
}

// Zeroes inf and NaN in `bytes` of shared memory, with the work divided over a warp; returns true
// if this thread found any. Why: a key that a row may not see gets weight 0, and 0 * inf is NaN.
// The epilogue adds these values to the rows that do see the key.
template <Element element, int bytes>
__device__ __forceinline__ bool zero_nonfinite(unsigned char* matrix, int lane) {
  constexpr int threads = 32;
  static_assert(bytes % (16 * threads) == 0);
  uint4* chunks = reinterpret_cast<uint4*>(matrix) + lane;
  ptx::u32 sums[4] = {0, 0, 0, 0};  // sums of zeros, NaN once a value is not finite
#pragma unroll 8
  for (int i = 0; i < bytes / 16; i += threads) {
    const uint4 x = chunks[i];
    sums[0] = ptx::add_zero_times<element>(x.x, sums[0]);
    sums[1] = ptx::add_zero_times<element>(x.y, sums[1]);
    sums[2] = ptx::add_zero_times<element>(x.z, sums[2]);
    sums[3] = ptx::add_zero_times<element>(x.w, sums[3]);
  }
  if (((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fffu) == 0) return false;
  auto keep = [](ptx::u32 word) {
    const ptx::u32 bad = nonfinite_bits<element>(word) >> 15;  // 1 in bit 0 and bit 16
    return word & ~(bad * 0xffffu);
  };
#pragma unroll 1
  for (int i = 0; i < bytes / 16; i += threads) {
    const uint4 x = chunks[i];
    chunks[i] = uint4{keep(x.x), keep(x.y), keep(x.z), keep(x.w)};
  }
  return true;
}

}  // namespace tilewise
