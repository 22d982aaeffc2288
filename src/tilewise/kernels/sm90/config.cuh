// The compile-time choices of the forward kernel, its parameters and its shared memory.
#pragma once

#include "../common/extents.cuh"
#include "../common/layout.cuh"
#include "../common/mask.cuh"
#include "../common/schedule.cuh"
#include "../common/scores.cuh"
#include "ptx.cuh"
#include "staged_table.cuh"

namespace tilewise::sm90 {

enum MaskKind : int { mask_full = 0, mask_causal = 1, mask_window = 2 };

// Mirrored field by field by `Config` in engine/sm90/forward.py.
struct Config {
  Element element;  // of the products, and of q, k, v and out
  int head_dim;     // class of q and k: a multiple of 16; smaller heads are zero-filled up to it
  int head_dim_v;   // class of v and out, likewise
  int consumers;    // warpgroups of 64 query rows
  int block_kv;
  int k_stages;
  int v_stages;
  int mask;         // MaskKind
  bool has_terms;   // whether the score policy has any terms; the kernels read them from the policy
  bool pingpong;    // consumer warpgroups take turns issuing their products
  int ctas_per_sm;  // CTAs that share an SM
  bool split;  // a work item is a part of the keys of a query tile; combine.cuh combines the parts
  int bias_slots;     // slots of 64 query rows, where a bias is staged (staged_bias.cuh); else 0
  bool stages_table;  // the slice of a table of distances that a tile needs arrives with its K
                      // (staged_table.cuh)

  TILEWISE_INLINE int block_q() const { return consumers * 64; }
  TILEWISE_INLINE int threads() const { return (consumers + 1) * 128; }
  TILEWISE_INLINE bool masked() const { return mask != mask_full; }
  TILEWISE_INLINE bool pingpongs() const { return pingpong && consumers > 1; }
  // The panels of out that fit in shared memory at a time: all, or half of them for a large head.
  TILEWISE_INLINE bool halves_out() const {
    return head_dim > 128 || (bias_slots > 0 && head_dim > 64 && block_kv > 96);
  }
  TILEWISE_INLINE int staged_panels() const {
    return halves_out() ? (panel_count(head_dim_v) + 1) / 2 : panel_count(head_dim_v);
  }
  // setmaxnreg moves registers from the producer's warpgroup to the consumers'; all counts are
  // multiples of 8.
  TILEWISE_INLINE int launch_registers() const {
    return min_int(65536 / (threads() * ctas_per_sm) / 8 * 8, 240);
  }
  TILEWISE_INLINE int producer_registers() const {
    return launch_registers() < 168 && bias_slots == 0 ? 32 : 40;
  }
  TILEWISE_INLINE int consumer_registers() const {
    return min_int(
        (launch_registers() * (consumers + 1) - producer_registers()) / consumers / 8 * 8, 240);
  }
};

struct Params {
  ptx::TensorMap q_map;    // box 64 rows; all maps are (dim, seq, head, batch) with 64-column boxes
  ptx::TensorMap k_map;    // box block_kv rows
  ptx::TensorMap v_map;    // box block_kv rows
  ptx::TensorMap out_map;  // box 64 rows
  const void* v;           // for the epilogue's rare path, with strides in elements
  long long v_batch_stride;
  long long v_head_stride;
  long long v_seq_stride;
  float* lse;  // null, or (batch, heads, seq_q): the natural logarithm of the row sums
  // Split: (splits, batch, heads, seq_q, head_dim_v), and lse is (splits, batch, heads, seq_q).
  float* partial_out;
  int* work_counter;  // null: static order; else a zeroed counter, which is zero again at the end
  int batch;
  int heads;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim_v;  // the actual one
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int sections;
  int longest_first;
  int splits;
  float scale_log2;
  float softcap_in;
};

// A CTA's plan for one work tile: its rows, and the KV tiles that they touch, in part or in full.
template <typename Extents>
struct TilePlan : Extents::Record {
  static constexpr int no_more_work = -1;  // in row_begin

  WorkTile tile;
  int split;
  int row_begin;
  TileRange touched;
  TileRange full;

  TILEWISE_INLINE bool partial(int kv_tile) const {
    return kv_tile < full.begin || kv_tile >= full.end;
  }
};

constexpr int work_slots = 2;

// A ring of staged bias tiles of 64 query rows each, which the warpgroups use round-robin, KV tile
// after KV tile.
template <Config config, bool staged = (config.bias_slots > 0)>
struct BiasRing {};
template <Config config>
struct BiasRing<config, true> {
  alignas(1024) unsigned char bias[config.bias_slots][matrix_bytes(64, config.block_kv)];
  ptx::u64 bias_full[config.bias_slots], bias_empty[config.bias_slots];
};

// The slices of a table of distances that KV tiles need, in the stages of K.
template <Config config, bool staged = config.stages_table>
struct TableStages {};
template <Config config>
struct TableStages<config, true> {
  static constexpr int bytes = table_slice_room(config.block_q(), config.block_kv);
  alignas(16) unsigned char stage[config.k_stages][bytes];
};

template <Config config, typename Extents>
struct Smem : BiasRing<config> {
  alignas(1024) unsigned char q[config.consumers][matrix_bytes(64, config.head_dim)];
  alignas(1024) unsigned char k[config.k_stages][matrix_bytes(config.block_kv, config.head_dim)];
  alignas(1024) unsigned char v[config.v_stages][matrix_bytes(config.block_kv, config.head_dim_v)];
  alignas(1024) unsigned char out[config.consumers][config.staged_panels()][panel_bytes(64)];
  ptx::u64 q_full[config.consumers], q_empty[config.consumers];
  ptx::u64 k_full[config.k_stages], k_empty[config.k_stages];
  ptx::u64 v_full[config.v_stages], v_empty[config.v_stages], v_scanned[config.v_stages];
  ptx::u64 out_full[config.consumers], out_empty[config.consumers];
  ptx::u64 work_full[work_slots], work_empty[work_slots];
  TilePlan<Extents> plan[work_slots];
  TileRange own[work_slots][config.consumers];  // the part of plan.touched that a warpgroup sees
  int met_nonfinite[work_slots];
  OnceRoom once[work_slots];  // of the plan's head, where weights are dropped
  TableStages<config> table;
};

// A position in a ring of `stages`: the producer starts with phase 1 (slots are free), consumers
// with 0.
template <int stages>
struct RingPosition {
  int stage = 0;
  ptx::u32 phase;

  __device__ __forceinline__ explicit RingPosition(ptx::u32 first_phase) : phase(first_phase) {}
  // The position `steps` steps after one that began with phase 0. It serves callers for which
  // arithmetic is cheaper than registers.
  __device__ __forceinline__ static RingPosition after(int steps) {
    RingPosition position(static_cast<unsigned>(steps) / stages & 1);
    position.stage = static_cast<unsigned>(steps) % stages;
    return position;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

}  // namespace tilewise::sm90
