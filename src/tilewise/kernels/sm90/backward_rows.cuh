// The row terms of the backward, that is, the values that S and dP of a query row start from.
// `preprocess` computes them in a kernel of its own; where a CTA has the only KV tile and room for
// all of its query tiles, the main kernel computes them itself (BackwardConfig::makes_row_terms).
#pragma once

#include "../common/softmax.cuh"
#include "backward_config.cuh"

namespace tilewise::sm90 {

__device__ __forceinline__ float dot_of_pairs_bf16(ptx::u32 a, ptx::u32 b, float sum) {
  sum = fmaf(ptx::unpack_low<Element::bf16>(a), ptx::unpack_low<Element::bf16>(b), sum);
  return fmaf(ptx::unpack_high<Element::bf16>(a), ptx::unpack_high<Element::bf16>(b), sum);
}
__device__ __forceinline__ float dot_of_pairs_fp16(ptx::u32 a, ptx::u32 b, float sum) {
  sum = fmaf(ptx::unpack_low<Element::fp16>(a), ptx::unpack_low<Element::fp16>(b), sum);
  return fmaf(ptx::unpack_high<Element::fp16>(a), ptx::unpack_high<Element::fp16>(b), sum);
}

template <Element element>
__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  auto pair = [](ptx::u32 x, ptx::u32 y, float sum) {
    if constexpr (element == Element::bf16)
      return dot_of_pairs_bf16(x, y, sum);
    else
      return dot_of_pairs_fp16(x, y, sum);
  };
  return pair(a.x, b.x, pair(a.y, b.y, pair(a.z, b.z, pair(a.w, b.w, 0.0f))));
}

// The lanes that share a row, with eight columns each.
TILEWISE_INLINE int row_lanes(int head_dim_v) {
  return head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32;
}

// The value that S of a row starts from, in the units of its scores. Rows that do not exist or see
// no key start from -inf, which makes every weight 0.
template <typename Params>
__device__ __forceinline__ float start_of_scores(const Params& params, float lse) {
  return lse == -infinity ? -infinity : fmaf(lse, params.lse_factor, params.start_bias);
}

// Calls take(row of the block, row, lse, rowsum(dO * O)) for `block_rows` rows of one head from
// `first_row` on, in all lanes of a row; `threads` threads do it together.
template <Element element, int lanes, int threads, int block_rows, typename Params,
          typename Sequence, typename Take>
__device__ __forceinline__ void for_rows(const Params& params, const Sequence& sequence, int batch,
                                         int head, long long first_of_lse, int first_row,
                                         int thread, Take take) {
  constexpr int rows_at_once = threads / lanes;
  const int column = thread % lanes * 8, start = sequence.q_start();
  const ptx::u16* out = static_cast<const ptx::u16*>(params.out) + batch * params.out_batch_stride +
                        head * params.out_head_stride + start * params.out_seq_stride + column;
  const ptx::u16* dout = static_cast<const ptx::u16*>(params.dout) +
                         batch * params.dout_batch_stride + head * params.dout_head_stride +
                         start * params.dout_seq_stride + column;
  // The loads of several rows precede all stores. Why: the compiler cannot know that the stores go
  // elsewhere, and does not move loads across them.
  constexpr int passes = block_rows / rows_at_once, loaded = passes < 4 ? passes : 4;
  static_assert(passes % loaded == 0);
#pragma unroll
  for (int begin = 0; begin < passes; begin += loaded) {
    uint4 outs[loaded] = {}, douts[loaded] = {};
    float lse[loaded];
#pragma unroll
    for (int i = 0; i < loaded; ++i) {
      const int row = first_row + (begin + i) * rows_at_once + thread / lanes;
      lse[i] = -infinity;
      if (row >= sequence.seq_q()) continue;
      lse[i] = params.lse[first_of_lse + row];
      if (column >= params.head_dim_v) continue;
      outs[i] = *reinterpret_cast<const uint4*>(out + row * params.out_seq_stride);
      douts[i] = *reinterpret_cast<const uint4*>(dout + row * params.dout_seq_stride);
    }
#pragma unroll
    for (int i = 0; i < loaded; ++i) {
      const int in_block = (begin + i) * rows_at_once + thread / lanes;
      float sum = dot<element>(outs[i], douts[i]);
#pragma unroll
      for (int distance = lanes / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      take(in_block, first_row + in_block, lse[i], sum);
    }
  }
}

}  // namespace tilewise::sm90
