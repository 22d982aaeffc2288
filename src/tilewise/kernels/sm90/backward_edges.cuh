// The kernels before and after the main backward kernel: preprocess computes row terms and zeroes
// sums, postprocess computes dQ from its sums. Both are bound by memory traffic.
#pragma once

#include "backward_rows.cuh"

namespace tilewise::sm90 {

using ptx::u32;

struct PreprocessParams {
  const void* out;
  long long out_batch_stride, out_head_stride, out_seq_stride;  // in elements
  const void* dout;
  long long dout_batch_stride, dout_head_stride, dout_seq_stride;
  const float* lse;   // (batch, heads, seq_q)
  const float* dlse;  // null, or the same shape
  float* start_s;     // (batch, heads, rows), rows padded to the query tile
  float* start_dp;
  float* dq_sums;               // null, or row_floats * rows floats per head, to be zeroed
  DqTickets* dq_tickets;        // null, or one per query tile, to be zeroed
  PieceTickets* piece_tickets;  // null, or tickets of pieces for dK and dV, to be zeroed
  int* work_tickets;            // null, or to be zeroed
  int piece_ticket_count;
  int heads;
  int seq_q;
  int rows;
  int head_dim_v;
  int row_floats;
  int block_q;
  float lse_factor;
  float start_bias;
  float dp_factor;
};

struct PostprocessParams {
  const float* dq_sums;
  void* dq;
  long long batch_stride, head_stride, seq_stride;  // in elements
  int heads;
  int seq_q;
  int rows;
  int head_dim;
  int row_floats;
  float scale;
  const float* start_s;  // from preprocess, for kernels that skip blind blocks
};

constexpr int edge_threads = 256;
constexpr int edge_rows = 64;  // per block of postprocess

// Goes from the last head to the first. Why: the main kernel goes from the first to the last, so
// each kernel begins with the data that the previous one left in the L2 cache.
__device__ __forceinline__ int edge_block() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

// The rows of a head, as the place of a Line (common/scores.cuh): they are the columns, and keys
// are the rows.
struct OfHead {
  static constexpr RowsAre rows_are = RowsAre::keys;
  const int of_batch, of_head;

  __device__ __forceinline__ int batch() const { return of_batch; }
  __device__ __forceinline__ int head() const { return of_head; }
};

// Whether none of a block's rows sees a key, according to `sees(row)`. All threads must call it.
template <int rows, typename Sees>
__device__ __forceinline__ bool is_blind(Sees sees) {
  static_assert(edge_threads % rows == 0);
  return !__syncthreads_or(sees(static_cast<int>(threadIdx.x) % rows));
}

// A block handles a query tile of one head, which has `block_rows` rows, with eight columns per
// lane and `lanes` lanes per row. The policy is needed for lines, which add to the scores along the
// queries of a tile. `skips_blind`: in blocks in which no row sees a key, out and dO are not read
// and sums are not zeroed, and postprocess does not read those sums.
template <Element element, int lanes, int block_rows, typename Extents, typename Policy = Scores<>,
          bool skips_blind = false>
__device__ __forceinline__ void preprocess(
    const ParamsOf<PreprocessParams, Policy, Extents>& params) {
  const int block = edge_block();
  const auto at_block = edge_block_at<Extents, block_rows>(params, block);
  const int head = at_block.head, first_row = at_block.first_row;
  const auto& record = at_block.record;
  const auto sequence = sequence_of<Extents>(params, record);
  const int batch = sequence.batch(at_block.batch), start = sequence.q_start();
  const long long first_of_lse = first_row_of_head(params, sequence, batch, params.heads, head);
  const int lane = threadIdx.x % lanes;
  const int column = lane * 8;
  ptx::allow_next_grid();
  bool blind = false;
  if constexpr (skips_blind)
    blind = is_blind<block_rows>([&](int in_block) {
      const int row = first_row + in_block;
      return row < sequence.seq_q() && params.lse[first_of_lse + row] != -infinity;
    });
  bool zeroes_sums = params.dq_sums != nullptr && at_block.exists;
  if constexpr (skips_blind) zeroes_sums = zeroes_sums && !blind;
  if constexpr (HasWorkTable<Extents>) zeroes_sums = zeroes_sums && record.unordered();
  if (zeroes_sums) {
    float4* sums = reinterpret_cast<float4*>(params.dq_sums + at_block.at * params.row_floats);
    for (int i = threadIdx.x; i < block_rows / 4 * params.row_floats; i += edge_threads)
      sums[i] = float4{};
  }
  if (params.dq_tickets != nullptr && threadIdx.x == 0 && first_row % params.block_q == 0)
    params.dq_tickets[at_block.at / params.block_q] = DqTickets{0, 0};
  if (params.work_tickets != nullptr && block == 0 && threadIdx.x == 0) *params.work_tickets = 0;
  if (params.piece_tickets != nullptr) {
    const int stride = static_cast<int>(gridDim.x) * edge_threads;
    for (int i = block * edge_threads + threadIdx.x; i < params.piece_ticket_count; i += stride)
      params.piece_tickets[i] = PieceTickets{0, 0};
  }
  if (!at_block.exists) return;
  if constexpr (skips_blind) {
    if (blind) {
      if (threadIdx.x < block_rows) {
        params.start_s[at_block.at + threadIdx.x] = -infinity;
        params.start_dp[at_block.at + threadIdx.x] = 0.0f;
      }
      return;
    }
  }
  const auto take = [&](int in_block, int row, float lse, float sum) {
    if constexpr (HasWorkTable<Extents>) {
      // It may be that no KV tile visits such a row and writes its dQ.
      if (params.dq_rows != nullptr && !record.unordered() && row < sequence.seq_q() &&
          lse == -infinity) {
        ptx::u16* dq = static_cast<ptx::u16*>(params.dq_rows) +
                       batch * params.dq_rows_batch_stride + head * params.dq_rows_head_stride +
                       (start + row) * params.dq_rows_seq_stride;
        for (int c = column; c < params.dq_columns; c += lanes * 8)
          *reinterpret_cast<uint4*>(dq + c) = uint4{};
      }
    }
    if (lane != 0) return;
    float start = start_of_scores(params, lse);
    if (lse != -infinity) {
      // Only for rows that see keys: rows past all packed sequences belong to no sequence that has
      // slopes.
      if constexpr (Policy::adds_line)
        start = fmaf(Policy::per_column(params, OfHead{at_block.batch, head}),
                     static_cast<float>(row % params.block_q), start);
      if (params.dlse != nullptr) sum -= params.dlse[first_of_lse + row];
    }
    const long long at = at_block.at + in_block;
    params.start_s[at] = start;
    params.start_dp[at] = start == -infinity ? 0.0f : sum * params.dp_factor;
  };
  for_rows<element, lanes, edge_threads, block_rows>(params, sequence, batch, head, first_of_lse,
                                                     first_row, threadIdx.x, take);
}

// A block handles 64 rows of one head, whose sums are in the accumulator layout of the product: see
// DqWarpgroup::add. A thread takes eight columns of the rows r and r + 8.
template <Element element, typename Extents, bool skips_blind = false>
__device__ __forceinline__ void postprocess(const ParamsOf<PostprocessParams, Extents>& params) {
  ptx::wait_for_previous_grid();
  const auto block = edge_block_at<Extents, edge_rows>(params, edge_block());
  if (!block.exists) return;
  const int head = block.head, first_row = block.first_row;
  const auto& record = block.record;
  if constexpr (HasWorkTable<Extents>)
    if (!record.unordered()) return;  // the last KV tile wrote its dQ
  const auto sequence = sequence_of<Extents>(params, record);
  const int batch = sequence.batch(block.batch), start = sequence.q_start();
  const float4* sums =
      reinterpret_cast<const float4*>(params.dq_sums + block.at * params.row_floats);
  ptx::u16* dq = static_cast<ptx::u16*>(params.dq) + batch * params.batch_stride +
                 head * params.head_stride + start * params.seq_stride;
  const int chunks = params.head_dim / 8;
  if constexpr (skips_blind) {
    const float* start_s = params.start_s + block.at;
    if (is_blind<edge_rows>([&](int in_block) { return start_s[in_block] != -infinity; })) {
      for (int i = threadIdx.x; i < chunks * edge_rows; i += edge_threads) {
        const int row = first_row + i / chunks;
        if (row < sequence.seq_q())
          *reinterpret_cast<uint4*>(dq + row * params.seq_stride + i % chunks * 8) = uint4{};
      }
      return;
    }
  }
  // Four neighbouring threads write four neighbouring chunks.
  for (int i = threadIdx.x; i < ceil_div(chunks, 4) * 128; i += edge_threads) {
    const int chunk = i / 128 * 4 + i % 4, pair = i / 4 % 32;
    if (chunk >= chunks) continue;
    float4 quad[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) quad[c] = sums[chunk * 128 + pair * 4 + c];
    const int row = first_row + pair / 8 * 16 + pair % 8;
    u32 low[4], high[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      low[c] = ptx::pack<element>(quad[c].x * params.scale, quad[c].y * params.scale);
      high[c] = ptx::pack<element>(quad[c].z * params.scale, quad[c].w * params.scale);
    }
    if (row < sequence.seq_q())
      *reinterpret_cast<uint4*>(dq + row * params.seq_stride + chunk * 8) =
          uint4{low[0], low[1], low[2], low[3]};
    if (row + 8 < sequence.seq_q())
      *reinterpret_cast<uint4*>(dq + (row + 8) * params.seq_stride + chunk * 8) =
          uint4{high[0], high[1], high[2], high[3]};
  }
}

}  // namespace tilewise::sm90
