// The float32 backward: its compile-time choices, parameters and shared memory. For the algorithm
// see float32_backward.cuh.
#pragma once

#include "../common/piece_tickets.cuh"
#include "backward_config.cuh"
#include "float32_config.cuh"

namespace tilewise::sm90::float32 {

// The rows of a query tile and of a KV tile, and the number of parts of every operand, all of which
// are bf16.
constexpr int grad_block = 64, grad_parts = 3, grad_terms = term_count(grad_parts);

// Mirrored field by field by `Config` in engine/sm90/float32_backward.py.
struct GradConfig {
  int head_dim;    // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and dout, likewise
  int stages;      // of the Q and dO rings
  int rooms;       // for P and dS, which are passed between warpgroups
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy

  TILEWISE_INLINE int threads() const { return 512; }
  static constexpr int producer_registers = 32, query_registers = 112, product_registers = 184;
};

struct GradParams {
  ptx::TensorMap q_map;  // all maps are (dim, seq, head, part * batch), boxes 64 x 64
  ptx::TensorMap k_map;
  ptx::TensorMap v_map;
  ptx::TensorMap dout_map;
  const TileFact* q_facts;
  const TileFact* k_facts;
  const TileFact* v_facts;
  const TileFact* dout_facts;
  const int* term_exponents;  // (batch, heads, q_tiles): exponent of the largest |row term|
  const float* lse;           // (batch, heads, rows padded to 64)
  const float* row_terms;     // same shape: rowsum(dO * O) - dlse
  int* dq_tickets;  // null, or zeroed (batch, heads, q_tiles): KV tiles add to dQ in order
  // Null, or, where KV tiles are cut into pieces, their tickets for dV and for dK, zeroed (batch,
  // heads_kv, kv_tiles, 2).
  PieceTickets* piece_tickets;
  int* work_tickets;  // null, or zeroed: CTAs take their work in the order in which they start
  float* dq;          // each null, or the destination; dq is zeroed
  long long dq_batch_stride, dq_head_stride, dq_seq_stride;  // in elements
  float* dk;
  long long dk_batch_stride, dk_head_stride, dk_seq_stride;
  float* dv;
  long long dv_batch_stride, dv_head_stride, dv_seq_stride;
  int batch;
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;  // the actual ones
  int head_dim_v;
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  int pieces;       // total over the KV tiles of one (batch, KV head) pair
  int piece_steps;  // maximum per piece
  int sections;
  int in_order;       // 1: gradients are added up in an order that is the same every time
  float score_scale;  // scale of S, or the cap with a softcap
  float softcap_in;
  float scale;  // scale of dQ and dK
};

// A matrix in all its parts.
template <int dim>
using Parts = unsigned char[grad_parts][matrix_bytes(grad_block, dim)];

// Holds first the weights, in fragment order, and then dS, keys x queries, in all its parts.
union Room {
  float weights[grad_block * grad_block];
  Parts<grad_block> ds;
};

template <GradConfig config, typename Extents>
struct GradSmem {
  alignas(1024) Parts<config.head_dim> k;
  alignas(1024) Parts<config.head_dim_v> v;
  alignas(1024) Parts<config.head_dim> q[config.stages];
  alignas(1024) Parts<config.head_dim_v> dout[config.stages];
  alignas(1024) Room room[config.rooms];
  alignas(16) float lse[config.stages][grad_block];
  alignas(16) float row_terms[config.stages][grad_block];
  ptx::u64 k_full, v_full;
  ptx::u64 q_full[config.stages], q_empty[config.stages];
  ptx::u64 dout_full[config.stages], dout_empty[config.stages];
  ptx::u64 weights_full[config.rooms], ds_full[config.rooms], room_empty[config.rooms];
  alignas(16) BackwardPlan<Extents> plan;  // has its 16-byte units to itself, as in BackwardSmem
  alignas(16) int pieces_before[2];        // for dV and for dK
};

// --- the kernel before it: row terms ---

struct RowParams {
  const float* out;
  long long out_batch_stride, out_head_stride, out_seq_stride;  // in elements
  const float* dout;
  long long dout_batch_stride, dout_head_stride, dout_seq_stride;
  const float* lse;   // (batch, heads, seq_q)
  const float* dlse;  // null, or the same shape
  float* padded_lse;  // this and the following as in GradParams
  float* row_terms;
  int* term_exponents;
  int* dq_tickets;
  PieceTickets* piece_tickets;  // null, or to be zeroed
  int* work_tickets;            // null, or to be zeroed
  int piece_ticket_count;
  int heads;
  int seq_q;
  int q_tiles;
  int head_dim_v;
};

}  // namespace tilewise::sm90::float32
