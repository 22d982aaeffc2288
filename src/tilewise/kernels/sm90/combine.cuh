// This kernel runs after a split forward kernel and combines the partial results.
//
//   w_i = exp(lse_i - m), m = max lse_i;  out = sum w_i out_i / sum w_i;  lse = m + ln(sum w_i)
// One warp handles a row, with eight columns per lane. Parts are added in a fixed order, so that
// the result has the same bits every time.
#pragma once

#include "../common/softmax.cuh"
#include "ptx.cuh"

namespace tilewise::sm90 {

struct CombineParams {
  const float* partial_out;  // (splits, rows, head_dim_v)
  const float* partial_lse;  // (splits, rows), -inf where a part sees no key
  void* out;
  long long batch_stride, head_stride, seq_stride;  // in elements
  float* lse;                                       // null, or (rows)
  int rows;                                         // batch * heads * seq_q
  int heads;
  int seq_q;
  int head_dim_v;
  int splits;
};

constexpr int combine_rows = 4;

template <Element element>
__device__ __forceinline__ void combine(const CombineParams& params) {
  constexpr float log2_e = 1.44269504088896341f, ln2 = 0.693147180559945309f;
  const int row = blockIdx.x * combine_rows + threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  if (row >= params.rows) return;
  float max_lse = -infinity;
  for (int i = lane; i < params.splits; i += 32)
    max_lse = fmaxf(max_lse, params.partial_lse[static_cast<long long>(i) * params.rows + row]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    max_lse = fmaxf(max_lse, __shfl_xor_sync(0xffffffffu, max_lse, distance));
  const float shift = max_lse == -infinity ? 0.0f : max_lse;  // -inf - -inf would be NaN
  const int column = lane * 8;
  float total = 0.0f, sums[8] = {};
#pragma unroll 4
  for (int i = 0; i < params.splits; ++i) {
    const long long at = static_cast<long long>(i) * params.rows + row;
    const float weight = ptx::ex2((params.partial_lse[at] - shift) * log2_e);
    total += weight;
    if (weight == 0.0f || column >= params.head_dim_v) continue;  // may never have been written
    const float4* part =
        reinterpret_cast<const float4*>(params.partial_out + at * params.head_dim_v + column);
    const float4 low = part[0], high = part[1];
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[c] = fmaf(weight, x[c], sums[c]);
  }
  if (lane == 0 && params.lse != nullptr)
    params.lse[row] = total == 0.0f ? -infinity : fmaf(ptx::lg2(total), ln2, shift);
  if (column >= params.head_dim_v) return;
  const float inverse = total == 0.0f ? 0.0f : ptx::rcp(total);
  ptx::u32 packed[4];
#pragma unroll
  for (int c = 0; c < 4; ++c)
    packed[c] = ptx::pack<element>(sums[2 * c] * inverse, sums[2 * c + 1] * inverse);
  const int head = row / params.seq_q, batch = head / params.heads;
  ptx::u16* out = static_cast<ptx::u16*>(params.out) + batch * params.batch_stride +
                  (head - batch * params.heads) * params.head_stride +
                  (row - head * params.seq_q) * params.seq_stride + column;
  ptx::store_global(out, packed);
}

}  // namespace tilewise::sm90
