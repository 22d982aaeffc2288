// The compile-time choices of the float32 forward kernel, its parameters and its shared memory.
#pragma once

#include "float32_products.cuh"

namespace tilewise::sm80 {

// Mirrored field by field by `Config` in engine/sm80/float32_forward.py.
struct Float32Config {
  bool exact;      // three products of TF32 parts, else one
  int head_dim;    // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and out, likewise
  int warps;
  int row_tiles;  // blocks of 16 query rows per warp
  int block_kv;
  int stages;       // of K and V: 2 loads a tile ahead, 1 loads each during the other's product
  bool has_terms;   // whether the score policy has any terms; the kernels read them from the policy
  int ctas_per_sm;  // CTAs that share an SM

  TILEWISE_INLINE int warp_rows() const { return row_tiles * 16; }
  TILEWISE_INLINE int block_q() const { return warps * warp_rows(); }
  TILEWISE_INLINE int threads() const { return warps * 32; }
  // Whether all parts of P fit in registers, together with O, the sums of a panel and the rest.
  TILEWISE_INLINE bool keeps_weight_parts() const {
    const int registers = min_int(65536 / (threads() * ctas_per_sm), 255);
    return row_tiles * (block_kv + head_dim_v / 2 + float_panel) + 64 <= registers;
  }
};

// Invariant: strides of tensors count halves of floats, as copies do (tiles.cuh).
struct Float32Params {
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
  int head_dim;    // the actual one, in halves
  int head_dim_v;  // likewise
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int sections;
  int longest_first;
  float scale;  // scale of the softmax's argument: scale, or the cap with a softcap
  float scale_log2;
  float softcap_in;  // scale / cap
};

template <Float32Config config, typename Extents>
struct Float32Smem {
  alignas(1024) unsigned char q[matrix_bytes(config.block_q(), halves(config.head_dim))];
  alignas(
      1024) unsigned char k[config.stages][matrix_bytes(config.block_kv, halves(config.head_dim))];
  alignas(1024) unsigned char v[config.stages]
                               [matrix_bytes(config.block_kv, halves(config.head_dim_v))];
  // For this CTA's head and sequence.
  Tensor queries;
  Tensor keys;
  Tensor values;
  WarpPlan<Extents> plan[config.warps];
  TileRange touched;  // by the CTA
  // tf32_half. Why in memory: the compiler cannot know its value there. It therefore finishes a
  // panel of V before it begins the next, and splits P for each panel where P's parts do not fit in
  // registers.
  u32 half;
  float key_factor;    // factor of K in shared memory, and the inverse of that of Q
  float value_factor;  // factor of V, which is scrubbed if the factor is not 1
  static_assert(config.head_dim % float_panel == 0 && config.head_dim_v % float_panel == 0);
};

}  // namespace tilewise::sm80
