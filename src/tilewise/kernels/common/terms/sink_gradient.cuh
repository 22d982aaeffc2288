// The gradient of a sink (sink.cuh), from lse and D of all rows: a warp adds up `sink_rows` rows of
// one head of one batch, in a fixed order, and stores the sum. The kernel is bound by memory
// traffic, of which there is little.
#pragma once

#include "../ptx.cuh"

namespace tilewise {

struct SinkGradientParams {
  const float* sink;
  long long sink_head_stride;
  const float* lse;        // (batch, heads, seq_q)
  const float* row_terms;  // (batch, heads, rows): D, or -D
  float* dsink;            // (batch, heads, blocks of rows)
  int heads;
  int seq_q;
  int rows;
  int blocks;
  float factor;  // -1 if row_terms are D
};

constexpr int sink_rows = 1024;  // per warp

__device__ __forceinline__ void sink_gradient(const SinkGradientParams& params) {
  constexpr float log2_e = 1.44269504088896341f;
  const int block = blockIdx.x % params.blocks;
  const long long pair = blockIdx.x / params.blocks;
  const float sink = params.sink[pair % params.heads * params.sink_head_stride];
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < sink_rows; i += 32) {
    const int row = block * sink_rows + i;
    if (row < params.seq_q)
      sum = fmaf(ptx::ex2((sink - params.lse[pair * params.seq_q + row]) * log2_e),
                 params.row_terms[pair * params.rows + row], sum);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x == 0) params.dsink[blockIdx.x] = sum * params.factor;
}

}  // namespace tilewise
