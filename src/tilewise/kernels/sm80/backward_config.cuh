// The compile-time choices of the backward kernel, its parameters, plan and shared memory.
#pragma once

#include "config.cuh"

namespace tilewise::sm80 {

// A product of block x block is divided over the warps as `rows` x warps / rows of them.
// Mirrored field by field by `BackwardConfig` in backends/sm80_backward.py.
struct BackwardConfig {
  bool bf16;       // else fp16
  int head_dim;    // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and dout, likewise
  int block_q;     // query rows a step
  int block_kv;    // keys of a CTA
  int warps;
  int score_rows;  // warps along the queries of S and dP
  int key_rows;    // warps along the keys of dK and dV
  int query_rows;  // warps along the queries of dQ
  int stages;      // of Q and dO
  bool softcap;
  bool vector_sums;  // sums of dQ are added four at a time (sm_90 on)
  int ctas_per_sm;

  TILEWISE_INLINE int threads() const { return warps * 32; }
};

struct BackwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  Tensor dk;               // data null: not wanted
  Tensor dv;               // likewise
  const float* lse_log2;   // (batch, heads, rows padded to block_q); +inf where no key is seen
  const float* row_terms;  // likewise: rowsum(dO * O) - dlse
  float* dq_sums;          // null: dQ is not wanted; zeroed (batch, heads, q_tiles, fragments)
  int* turns;  // null, or zeroed (batch, heads, q_tiles): dQ is summed in the order of the keys
  int batch;
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;    // the real one
  int head_dim_v;  // likewise
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  int sections;
  int rows_descend;  // 1: from the last query tile to the first
  float scale;
  float scale_log2;
  float inverse_scale_log2;
  float softcap_in;
};

// What a CTA does: one KV tile of one KV head, against the query tiles that see it, head by head of
// the group.
struct BackwardPlan {
  int batch;
  int head_kv;
  int kv_tile;
  TileRange touched;  // query tiles
  TileRange full;     // those of which every row sees every key of the tile

  TILEWISE_INLINE bool partial(int q_tile) const {
    return q_tile < full.begin || q_tile >= full.end;
  }
};

// A key k is seen by the rows k - end_shift < r <= k - first_shift.
TILEWISE_INLINE int first_row_of(const Band& band, int key) {
  return max_int(0, key - band.end_shift + 1);
}
TILEWISE_INLINE int end_row_of(const Band& band, int key, int seq_q) {
  return min_int(seq_q, key - band.first_shift + 1);
}

// The query tiles that touch the keys [first_key, end_key), and those that see them whole. Rows
// past the end of the queries have weight 0 whatever they see, so they make no tile partial.
TILEWISE_INLINE void query_tiles(const Band& band, int first_key, int end_key, int seq_q,
                                 int block_q, TileRange& touched, TileRange& full) {
  const int begin = first_row_of(band, first_key), end = end_row_of(band, end_key - 1, seq_q);
  touched = begin < end ? TileRange{begin / block_q, ceil_div(end, block_q)} : TileRange{0, 0};
  const int full_begin = ceil_div(first_row_of(band, end_key - 1), block_q);
  const int full_rows = end_row_of(band, first_key, seq_q);
  const int full_end = full_rows == seq_q ? touched.end : max_int(0, full_rows) / block_q;
  full.begin = max_int(touched.begin, full_begin);
  full.end = min_int(touched.end, full_end);
}

template <BackwardConfig config>
__device__ __forceinline__ BackwardPlan make_backward_plan(const BackwardParams& params, int work) {
  const Schedule schedule{params.heads_kv, params.batch * params.heads_kv, params.kv_tiles,
                          params.sections, 0};
  const WorkTile tile = schedule.tile(work);
  const Band band{params.band_first_shift, params.band_end_shift, params.seq_k};
  BackwardPlan plan{tile.batch, tile.head, tile.q_tile, {0, 0}, {0, 0}};
  const int first_key = plan.kv_tile * config.block_kv, end_key = first_key + config.block_kv;
  query_tiles(band, first_key, min_int(end_key, params.seq_k), params.seq_q, config.block_q,
              plan.touched, plan.full);
  if (end_key > params.seq_k) plan.full = {0, 0};
  return plan;
}

template <BackwardConfig config>
struct BackwardSmem {
  alignas(1024) unsigned char k[matrix_bytes(config.block_kv, config.head_dim)];
  alignas(1024) unsigned char v[matrix_bytes(config.block_kv, config.head_dim_v)];
  alignas(1024) unsigned char q[config.stages][matrix_bytes(config.block_q, config.head_dim)];
  alignas(1024) unsigned char dout[config.stages][matrix_bytes(config.block_q, config.head_dim_v)];
  // Queries x keys.
  alignas(1024) unsigned char p[matrix_bytes(config.block_q, config.block_kv)];
  alignas(1024) unsigned char ds[matrix_bytes(config.block_q, config.block_kv)];
  alignas(16) float lse_log2[config.stages][config.block_q];
  alignas(16) float row_terms[config.stages][config.block_q];
  BackwardPlan plan;
};

// Counts through the steps of a plan: query tiles of one head, then of the next.
struct StepCursor {
  int q_tile;
  int head = 0;  // of the group

  __device__ __forceinline__ StepCursor(const BackwardPlan& plan, bool descend)
      : q_tile(descend ? plan.touched.end - 1 : plan.touched.begin) {}
  __device__ __forceinline__ void advance(const BackwardPlan& plan, bool descend) {
    const int first = descend ? plan.touched.end - 1 : plan.touched.begin;
    const int last = descend ? plan.touched.begin : plan.touched.end - 1;
    if (q_tile == last)
      q_tile = first, ++head;
    else
      q_tile += descend ? -1 : 1;
  }
};

}  // namespace tilewise::sm80
