// The compile-time choices of the backward kernel, its parameters, plan and shared memory.
#pragma once

#include "config.cuh"

namespace tilewise::sm90 {

// Mirrored field by field by `BackwardConfig` in backends/sm90_backward.py.
struct BackwardConfig {
  bool bf16;       // else fp16
  int head_dim;    // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and dout, likewise
  int block_q;     // 64 or 128 query rows a step
  bool by_keys;    // a product warpgroup owns dK and dV of 64 keys; else one owns dV, the other dK
  int stages;      // of the Q and dO rings
  int ds_stages;
  bool softcap;
  bool writes_dq;         // one KV tile holds all keys: dQ needs no sums in global memory
  int dq_columns;         // columns of dQ that are accumulated at a time
  int query_registers;    // of the warpgroup that makes dQ
  int product_registers;  // of the two that make the rest

  TILEWISE_INLINE int block_kv() const { return by_keys ? 128 : 64; }
  TILEWISE_INLINE int q_blocks() const { return block_q / 64; }
  TILEWISE_INLINE int threads() const { return 512; }
  // Weights in 16 bits keep their next 8 beside them, so that dS does not feel their rounding.
  TILEWISE_INLINE bool keeps_rest() const { return by_keys; }
  TILEWISE_INLINE int ds_writers() const { return by_keys ? 8 : 4; }  // warps
};

// How many KV tiles have claimed a turn at the dQ of a query tile, and how many have had it.
struct TileTurns {
  int claimed;  // by_claim
  int added;
};

// How the KV tiles that see a query tile add up its dQ, in float32 in global memory.
enum Order : int {
  by_keys,   // one after another in the order of their keys, so that the bits are the same
             // every time: the first stores its sums, the others add, the last resumes them and
             // writes dQ
  by_claim,  // the same as they come, so that nobody has to wait but for the first and the last
  freely,    // onto zeroes, and nobody waits; postprocess makes dQ of the sums
};

struct BackwardParams {
  ptx::TensorMap q_map;     // box block_q rows; all maps are (dim, seq, head, batch)
  ptx::TensorMap k_map;     // box block_kv rows
  ptx::TensorMap v_map;     // box block_kv rows
  ptx::TensorMap dout_map;  // box block_q rows
  ptx::TensorMap dk_map;    // box 16 rows
  ptx::TensorMap dv_map;    // box 16 rows
  const float* start_s;  // (batch, heads, rows padded to block_q): what S starts from, made of -lse
  const float* start_dp;  // likewise: what dP starts from, -rowsum(dO * O)
  // Null: dQ is not wanted, or one KV tile holds all keys. Else (batch, heads, q_tiles, fragment
  // order).
  float* dq_sums;
  TileTurns* turns;  // null, or for KV tiles that take turns (batch, heads, q_tiles), zeroed
  void* dq;          // null: not wanted
  long long dq_batch_stride;  // in elements
  long long dq_head_stride;
  long long dq_seq_stride;
  int batch;
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;  // the real one
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  int sections;
  Order order;
  int store_dk;
  int store_dv;
  float scale_log2;
  float inverse_scale_log2;
  float softcap_in;
  float dqk_scale;  // of dQ and dK
};

// What a CTA does: one KV tile of one KV head, against the query tiles that see it, head by head of
// the group.
struct BackwardPlan {
  int batch;
  int head_kv;
  int kv_tile;
  TileRange touched;  // query tiles
  TileRange full;     // Invariant: begin <= end
  int first;          // query tile
  int stride;         // of query tiles: 1, or -1 where turns by keys go from the first KV tile
  int steps;

  TILEWISE_INLINE bool partial(int q_tile) const {
    return static_cast<unsigned>(q_tile - full.begin) >=
           static_cast<unsigned>(full.end - full.begin);
  }
};

// A key k is seen by the rows k - end_shift < r <= k - first_shift.
struct RowBand {
  int first_shift;
  int end_shift;
  int seq_q;

  TILEWISE_INLINE int first_row(int key) const { return max_int(0, key - end_shift + 1); }
  TILEWISE_INLINE int end_row(int key) const { return min_int(seq_q, key - first_shift + 1); }
};

// Of the parameters of this backward or of the float32 one.
template <int block_q, int block_kv, typename Params>
__device__ __forceinline__ BackwardPlan make_backward_plan(const Params& params, int work,
                                                           Order order) {
  // By keys, KV tiles start from the last: under a causal mask the first rows of a tile have their
  // turn at once, and those that wait meet rows which the tile before left a step ago. The last of
  // several sections is its mirror image, from the first KV tile and the last query tile: so the
  // long tiles do not come at the very end, and whoever is waited for has begun by then.
  const int pairs = params.batch * params.heads_kv;
  const bool mirrored = order == by_keys && params.sections > 1 &&
                        work >= (pairs - pairs / params.sections) * params.kv_tiles;
  const Schedule schedule{params.heads_kv, pairs, params.kv_tiles, params.sections,
                          order == by_keys && !mirrored};
  const WorkTile tile = schedule.tile(work);
  BackwardPlan plan;
  plan.batch = tile.batch;
  plan.head_kv = tile.head;
  plan.kv_tile = tile.q_tile;
  const RowBand band{params.band_first_shift, params.band_end_shift, params.seq_q};
  const int first_key = plan.kv_tile * block_kv;
  const int last_key = min_int(first_key + block_kv, params.seq_k) - 1;
  const int begin = band.first_row(first_key), end = band.end_row(last_key);
  plan.touched = begin < end ? TileRange{begin / block_q, ceil_div(end, block_q)} : TileRange{0, 0};
  // Rows past the end start from S = -inf, so only the keys' end and the band make a tile partial.
  const int full_begin = ceil_div(band.first_row(last_key), block_q);
  int full_end = max_int(0, first_key - params.band_first_shift + 1) / block_q;
  if (first_key - params.band_first_shift + 1 >= params.seq_q) full_end = plan.touched.end;
  plan.full.begin = max_int(plan.touched.begin, full_begin);
  plan.full.end = max_int(plan.full.begin, min_int(plan.touched.end, full_end));
  if (first_key + block_kv > params.seq_k) plan.full = {0, 0};
  plan.steps = plan.touched.count() * params.heads_per_kv;
  plan.stride = mirrored ? -1 : 1;
  plan.first = mirrored ? plan.touched.end - 1 : plan.touched.begin;
  // KV tiles that start together begin at the query tiles beside them, each at its own, and go
  // round: they meet no other at a dQ.
  if (plan.steps > 0 && order != by_keys) {
    const int ahead = first_key / block_q - plan.touched.begin, count = plan.touched.count();
    plan.first += (ahead % count + count) % count;
  }
  return plan;
}

// How many KV tiles add to the dQ of a query tile before this one and after it.
struct Turn {
  int before;
  int after;
};
constexpr int turn_stages = 4;
// How many steps ahead a turn is looked for. Why no more: neighbours begin two query tiles apart,
// and who claims a turn early makes those wait who come before.
constexpr int turns_ahead = 2;

// One lane arrives for its warp, after a warp barrier. The machine code needs no instruction for
// that barrier where the warp is converged anyway, so a race checker does not see it: for that tool
// every lane arrives.
#ifdef TILEWISE_EVERY_LANE_ARRIVES
constexpr int arrivals_of_warp = 32;
#else
constexpr int arrivals_of_warp = 1;
#endif

template <BackwardConfig config>
struct BackwardSmem {
  alignas(1024) unsigned char k[matrix_bytes(config.block_kv(), config.head_dim)];
  alignas(1024) unsigned char v[matrix_bytes(config.block_kv(), config.head_dim_v)];
  alignas(1024) unsigned char q[config.stages][matrix_bytes(config.block_q, config.head_dim)];
  alignas(1024) unsigned char dout[config.stages][matrix_bytes(config.block_q, config.head_dim_v)];
  // Stored as keys x queries, 64 queries a panel.
  alignas(1024) unsigned char ds[config.ds_stages][matrix_bytes(config.block_kv(), config.block_q)];
  // Weights on their way from the dV warpgroup to the dK warpgroup, in fragment order.
  alignas(1024) float weights[config.by_keys ? 4 : config.block_q * 64];
  alignas(16) float start_s[config.stages][config.block_q];
  alignas(16) float start_dp[config.stages][config.block_q];
  ptx::u64 k_full, v_full;
  ptx::u64 q_full[config.stages], q_empty[config.stages];
  ptx::u64 dout_full[config.stages], dout_empty[config.stages];
  ptx::u64 ds_full[config.ds_stages], ds_empty[config.ds_stages];
  ptx::u64 weights_full, weights_empty;
  ptx::u64 turn_come[turn_stages], turn_over[turn_stages];
  Turn turn[turn_stages];
  BackwardPlan plan;
};

// Counts through the steps of a plan: query tiles of one head, all round, then of the next.
struct StepCursor {
  int q_tile;
  int head = 0;  // of the group

  __device__ __forceinline__ explicit StepCursor(const BackwardPlan& plan) : q_tile(plan.first) {}
  __device__ __forceinline__ void advance(const BackwardPlan& plan) {
    q_tile += plan.stride;
    if (q_tile == plan.touched.end)
      q_tile = plan.touched.begin;
    else if (q_tile < plan.touched.begin)
      q_tile = plan.touched.end - 1;
    if (q_tile == plan.first) ++head;
  }
};

}  // namespace tilewise::sm90
