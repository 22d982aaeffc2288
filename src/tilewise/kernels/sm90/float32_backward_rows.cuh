// The kernel that runs before the float32 backward, in addition to the split: it computes the row
// term of every query row, and lse for every row of a tile. A block handles a tile of 64 rows, a
// warp one row at a time.
#pragma once

#include "../common/softmax.cuh"
#include "float32_backward_config.cuh"
#include "float32_split.cuh"

namespace tilewise::sm90::float32 {

constexpr int row_threads = 256;

// Invariant: head_dim_v <= 128, so that a lane has four columns; rows of out and dout begin at
// multiples of 16 bytes.
template <typename Extents>
__device__ __forceinline__ void row_terms(const ParamsOf<RowParams, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  u32& max_bits = *reinterpret_cast<u32*>(smem_bytes);
  const int pair = blockIdx.x / params.q_tiles, q_tile = blockIdx.x - pair * params.q_tiles;
  const int of_batch = pair / params.heads, head = pair - of_batch * params.heads;
  const auto record = Extents::find_queries(params, of_batch);
  const auto sequence = sequence_of<Extents>(params, record);
  const int batch = sequence.batch(of_batch), start = sequence.q_start();
  const long long first_of_lse = first_row_of_head(params, sequence, batch, params.heads, head);
  const int lane = threadIdx.x % 32, column = lane * 4;
  if (threadIdx.x == 0) max_bits = 0;
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  __syncthreads();
  for (int i = threadIdx.x / 32; i < grad_block; i += row_threads / 32) {
    const int row = q_tile * grad_block + i;
    float sum = 0.0f;
    if (row < sequence.seq_q() && column < params.head_dim_v) {
      const float4 x = *reinterpret_cast<const float4*>(
          params.out + batch * params.out_batch_stride + head * params.out_head_stride +
          (start + row) * params.out_seq_stride + column);
      const float4 y = *reinterpret_cast<const float4*>(
          params.dout + batch * params.dout_batch_stride + head * params.dout_head_stride +
          (start + row) * params.dout_seq_stride + column);
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w)));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane != 0) continue;
    // Rows that do not exist or see no key have +inf, which makes every weight 0.
    float lse = infinity;
    if (row < sequence.seq_q()) {
      const long long at = first_of_lse + row;
      if (params.lse[at] != -infinity) lse = params.lse[at];
      if (params.dlse != nullptr) sum -= params.dlse[at];
    }
    if (lse == infinity) sum = 0.0f;
    const long long at = static_cast<long long>(blockIdx.x) * grad_block + i;
    params.padded_lse[at] = lse;
    params.row_terms[at] = sum;
    if (magnitude(sum) < infinity_bits) atomicMax(&max_bits, magnitude(sum));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    params.term_exponents[blockIdx.x] = exponent_of(max_bits);
    if (params.dq_tickets != nullptr) params.dq_tickets[blockIdx.x] = 0;
  }
  if (params.work_tickets != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *params.work_tickets = 0;
  if (params.piece_tickets != nullptr) {
    const int stride = static_cast<int>(gridDim.x) * row_threads;
    for (int i = blockIdx.x * row_threads + threadIdx.x; i < params.piece_ticket_count; i += stride)
      params.piece_tickets[i] = PieceTickets{0, 0};
  }
}

}  // namespace tilewise::sm90::float32
