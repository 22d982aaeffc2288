// The compile-time choices of the float32 backward kernel, its parameters, plan and shared memory.
#pragma once

#include "backward_config.cuh"
#include "float32_products.cuh"

namespace tilewise::sm80 {

// Mirrored field by field by `Config` in engine/sm80/float32_backward.py.
struct Float32BackwardConfig {
  bool exact;      // three products of TF32 parts, else one
  int head_dim;    // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and dout, likewise
  int block_q;     // query rows per step
  int warps;       // with 16 keys each
  int stages;      // of Q and dO
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy
  bool vector_sums;  // sums in global memory are added four at a time (sm_90 on)
  bool makes_dkv;    // else neither dK nor dV is wanted
  int ctas_per_sm;

  TILEWISE_INLINE int block_kv() const { return warps * 16; }
  TILEWISE_INLINE int threads() const { return warps * 32; }
};

// Invariant: strides of tensors and head dims count halves of floats, as copies do (tiles.cuh).
struct Float32BackwardParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  Tensor dq;               // zeroed; data null: not wanted
  Tensor dk;               // likewise, but not zeroed
  Tensor dv;               // likewise
  const float* lse;        // (batch, heads, rows padded to block_q); +inf where no key is seen
  const float* row_terms;  // same shape: rowsum(dO * O) - dlse
  int* dq_tickets;         // null, or zeroed (batch, heads, q_tiles): dQ is summed in key order
  // Null, or, where KV tiles are cut into pieces, their tickets for dK and dV, zeroed (batch,
  // heads_kv, kv_tiles).
  PieceTickets* piece_tickets;
  int* work_tickets;  // null, or zeroed: CTAs take their work in the order in which they start
  int batch;
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;    // the actual one
  int head_dim_v;  // likewise
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  int pieces;       // total over the KV tiles of one (batch, KV head) pair
  int piece_steps;  // maximum per piece
  int sections;
  int rows_descend;     // 1: from the last query tile to the first
  int in_order;         // 1: pieces add to dK and dV by their numbers
  float scale;          // scale of scores
  float softmax_scale;  // scale of the softmax's argument: scale, or the cap with a softcap
  float softcap_in;     // scale / cap
};

// The units of numbers, which are 1 or, where a tile was small, 2^-64; and the products of such
// units.
struct Float32Units {
  float q;
  float k;
  float v;
  float dout;  // also the unit of what is added to dV
  float s;
  float dp;  // in units of dS
  float ds;  // also the unit of D
  float dk;  // unit of what is added to dK; dq likewise
  float dq;
};

template <Float32BackwardConfig config, typename Extents>
struct Float32BackwardSmem {
  alignas(1024) unsigned char k[matrix_bytes(config.block_kv(), halves(config.head_dim))];
  alignas(1024) unsigned char v[matrix_bytes(config.block_kv(), halves(config.head_dim_v))];
  alignas(
      1024) unsigned char q[config.stages][matrix_bytes(config.block_q, halves(config.head_dim))];
  alignas(1024) unsigned char dout[config.stages]
                                  [matrix_bytes(config.block_q, halves(config.head_dim_v))];
  // Queries x keys. Groups of eight keys are in the order 0 2 4 6 1 3 5 7 (float32_products.cuh).
  alignas(1024) unsigned char ds[matrix_bytes(config.block_q, halves(config.block_kv()))];
  alignas(16) float lse[config.stages][config.block_q];
  alignas(16) float row_terms[config.stages][config.block_q];
  BackwardPlan<Extents> plan;
  u32 half;  // tf32_half, as in Float32Smem
  Float32Units units;
  int pieces_before;  // for dK and dV
  static_assert(config.head_dim % float_panel == 0 && config.head_dim_v % float_panel == 0);
  static_assert(config.block_kv() % float_panel == 0 && config.block_q % 16 == 0);
};

}  // namespace tilewise::sm80
