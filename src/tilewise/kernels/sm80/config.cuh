// The compile-time choices of the forward kernel, its parameters and its shared memory.
#pragma once

#include "../common/extents.cuh"
#include "../common/layout.cuh"
#include "../common/mask.cuh"
#include "../common/schedule.cuh"
#include "ptx.cuh"

namespace tilewise::sm80 {

using ptx::u16;
using ptx::u32;

// Mirrored field by field by `Config` in engine/sm80/forward.py.
struct Config {
  Element element;  // of the products, and of q, k, v and out
  int head_dim;     // class of q and k: a multiple of 16; smaller heads are zero-filled up to it
  int head_dim_v;   // class of v and out, likewise
  int warps;
  int row_tiles;  // blocks of 16 query rows per warp
  int block_kv;
  int stages;      // of K and V: 2 loads a tile ahead, 1 loads each during the other's product
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy
  bool q_in_registers;
  int ctas_per_sm;  // CTAs that share an SM

  TILEWISE_INLINE int warp_rows() const { return row_tiles * 16; }
  TILEWISE_INLINE int block_q() const { return warps * warp_rows(); }
  TILEWISE_INLINE int threads() const { return warps * 32; }
};

// A (batch, heads, seq, dim) tensor with a contiguous last dimension; strides in elements.
struct Tensor {
  void* data;
  long long batch_stride;
  long long head_stride;
  long long seq_stride;

  __device__ __forceinline__ u16* row(int batch, int head, int row) const {
    return static_cast<u16*>(data) + batch * batch_stride + head * head_stride + row * seq_stride;
  }
};

struct Params {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  float* lse;  // null, or (batch, heads, seq_q): the natural logarithm of the row sums
  int batch;
  int heads;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;    // the actual one
  int head_dim_v;  // likewise
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int sections;
  int longest_first;
  float scale_log2;
  float softcap_in;
};

// The plan of a CTA as one of its warps sees it.
template <typename Extents>
struct WarpPlan : Extents::Record {
  WorkTile tile;
  TileRange own;       // some row of the warp sees some key
  TileRange own_full;  // every row of the warp sees every key
  TileRange full;      // every row of the CTA sees every key
};

template <Config config, typename Extents>
struct Smem {
  // Each warp reads only its own rows of Q, and stages its rows of out in their place.
  alignas(1024) unsigned char q[matrix_bytes(config.block_q(), config.head_dim)];
  alignas(1024) unsigned char k[config.stages][matrix_bytes(config.block_kv, config.head_dim)];
  alignas(1024) unsigned char v[config.stages][matrix_bytes(config.block_kv, config.head_dim_v)];
  WarpPlan<Extents> plan[config.warps];
  static_assert(panel_count(config.head_dim_v) <= panel_count(config.head_dim));
};

}  // namespace tilewise::sm80
