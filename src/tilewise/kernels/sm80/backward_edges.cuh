// The kernels before and after the main backward kernel: preprocess computes row terms and zeroes
// sums, postprocess computes dQ from its sums. Both are bound by memory traffic.
#pragma once

#include "../common/softmax.cuh"
#include "backward_config.cuh"

namespace tilewise::sm80 {

struct PreprocessParams {
  Tensor out;
  Tensor dout;
  const float* lse;             // (batch, heads, seq_q)
  const float* dlse;            // null, or the same shape
  float* lse_log2;              // (batch, heads, rows), rows padded to the query tile
  float* row_terms;             // likewise
  float* dq_sums;               // null, or row_floats per row, to be zeroed
  int* dq_tickets;              // null, or one per query tile, to be zeroed
  PieceTickets* piece_tickets;  // null, or tickets of pieces for dK and dV, to be zeroed
  int* work_tickets;            // null, or to be zeroed
  int piece_ticket_count;
  int heads;
  int seq_q;
  int rows;
  int head_dim_v;
  int row_floats;
  int block_q;
};

struct PostprocessParams {
  const float* dq_sums;
  Tensor dq;
  int heads;
  int seq_q;
  int q_tiles;
  int head_dim;
  float scale;
};

constexpr int edge_threads = 256;
constexpr int edge_rows = 32;

// Dot product of eight columns, two in each word.
template <Element element>
__device__ __forceinline__ float dot(uint4 a, uint4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(ptx::unpack_low<element>(x[i]), ptx::unpack_low<element>(y[i]), sum);
    sum = fmaf(ptx::unpack_high<element>(x[i]), ptx::unpack_high<element>(y[i]), sum);
  }
  return sum;
}

// A block handles 32 rows of one head, with eight columns per lane and `lanes` lanes per row.
template <Element element, int lanes, typename Extents>
__device__ __forceinline__ void preprocess(const ParamsOf<PreprocessParams, Extents>& params) {
  constexpr int rows_at_once = edge_threads / lanes;
  constexpr float log2_e = 1.44269504088896341f;
  const auto block = edge_block_at<Extents, edge_rows>(params, blockIdx.x);
  const int head = block.head, first_row = block.first_row;
  const auto sequence = sequence_of<Extents>(params, block.record);
  const int batch = sequence.batch(block.batch), start = sequence.q_start();
  const long long first_of_lse = first_row_of_head(params, sequence, batch, params.heads, head);
  const int lane = threadIdx.x % lanes, column = lane * 8;
  const long long first = block.at;
  if (params.dq_sums != nullptr && block.exists) {
    float4* sums = reinterpret_cast<float4*>(params.dq_sums + first * params.row_floats);
    for (int i = threadIdx.x; i < edge_rows / 4 * params.row_floats; i += edge_threads)
      sums[i] = float4{};
  }
  if (params.dq_tickets != nullptr && threadIdx.x == 0 && first_row % params.block_q == 0)
    params.dq_tickets[first / params.block_q] = 0;
  if (params.work_tickets != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *params.work_tickets = 0;
  if (params.piece_tickets != nullptr) {
    const int stride = static_cast<int>(gridDim.x) * edge_threads;
    for (int i = blockIdx.x * edge_threads + threadIdx.x; i < params.piece_ticket_count;
         i += stride)
      params.piece_tickets[i] = PieceTickets{0, 0};
  }
  if (!block.exists) return;
#pragma unroll
  for (int i = 0; i < edge_rows; i += rows_at_once) {
    const int in_block = i + threadIdx.x / lanes, row = first_row + in_block;
    float sum = 0.0f;
    if (row < sequence.seq_q() && column < params.head_dim_v)
      sum = dot<element>(
          *reinterpret_cast<const uint4*>(params.out.row(batch, head, start + row) + column),
          *reinterpret_cast<const uint4*>(params.dout.row(batch, head, start + row) + column));
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane != 0) continue;
    // Rows that do not exist or see no key have +inf, which makes every weight 0.
    float lse_log2 = infinity;
    if (row < sequence.seq_q()) {
      const long long at = first_of_lse + row;
      const float lse = params.lse[at];
      if (lse != -infinity) lse_log2 = lse * log2_e;
      if (params.dlse != nullptr) sum -= params.dlse[at];
    }
    params.lse_log2[first + in_block] = lse_log2;
    params.row_terms[first + in_block] = lse_log2 == infinity ? 0.0f : sum;
  }
}

// A block handles one query tile of one head, whose sums have the layout of Backward::add_dq. A
// thread takes eight columns of the rows r and r + 8 of a block of 16 x 8; neighbours take
// neighbouring columns.
template <BackwardConfig config, typename Extents>
__device__ __forceinline__ void postprocess(const ParamsOf<PostprocessParams, Extents>& params) {
  constexpr int columns = config.head_dim / (config.warps / config.query_rows) / 8;  // per warp
  constexpr int query_blocks = config.block_q / config.query_rows / 16;
  constexpr int all_columns = config.head_dim / 8, all_blocks = config.block_q / 16;
  const int batch_head = blockIdx.x / params.q_tiles;
  int of_batch = batch_head / params.heads, head = batch_head % params.heads;
  int q_tile = blockIdx.x % params.q_tiles;
  typename Extents::Record record;
  if constexpr (HasWorkTable<Extents>) {
    const auto owner = Extents::owner_of_q_tile(params, q_tile);
    if (owner.number < 0) return;
    head = batch_head;
    of_batch = owner.number;
    q_tile -= owner.first_q_tile;
    record = Extents::queries_of(params, owner);
  } else {
    record = Extents::find_queries(params, of_batch);
  }
  const auto sequence = sequence_of<Extents>(params, record);
  const int batch = sequence.batch(of_batch), start = sequence.q_start();
  const float4* sums = reinterpret_cast<const float4*>(
      params.dq_sums + static_cast<long long>(blockIdx.x) * (config.block_q * config.head_dim));
  for (int i = threadIdx.x; i < all_blocks * 8 * all_columns; i += edge_threads) {
    const int column = i % all_columns, r = i / all_columns % 8, block = i / all_columns / 8;
    if (column * 8 >= params.head_dim) continue;
    const int warp = block / query_blocks + column / columns * config.query_rows;
    const int place = (warp * query_blocks + block % query_blocks) * columns + column % columns;
    // Four quads: in the layout of lanes (two columns of row r, two of row r + 8), or one float
    // from each plane.
    float4 quad[4];
    float row[2][8];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      quad[c] = sums[place * 32 + (config.vector_sums ? r * 4 + c : c * 8 + r)];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float x[4] = {quad[c].x, quad[c].y, quad[c].z, quad[c].w};
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        if constexpr (config.vector_sums)
          row[h / 2][2 * c + h % 2] = x[h] * params.scale;
        else
          row[c / 2][2 * h + c % 2] = x[h] * params.scale;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q_row = q_tile * config.block_q + block * 16 + r + 8 * h;
      if (q_row >= sequence.seq_q()) continue;
      *reinterpret_cast<uint4*>(params.dq.row(batch, head, start + q_row) + column * 8) =
          uint4{ptx::pack<config.element>(row[h][0], row[h][1]),
                ptx::pack<config.element>(row[h][2], row[h][3]),
                ptx::pack<config.element>(row[h][4], row[h][5]),
                ptx::pack<config.element>(row[h][6], row[h][7])};
    }
  }
}

}  // namespace tilewise::sm80
