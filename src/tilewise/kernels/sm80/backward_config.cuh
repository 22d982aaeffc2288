// The compile-time choices of the backward kernel, its parameters, plan and shared memory.
#pragma once

#include "../common/find_piece.cuh"
#include "../common/piece_tickets.cuh"
#include "../common/scores.cuh"
#include "../common/work_tickets.cuh"
#include "config.cuh"

namespace tilewise::sm80 {

// A product of block x block is divided over the warps in a grid of `rows` x (warps / rows).
// Mirrored field by field by `Config` in engine/sm80/backward.py.
struct BackwardConfig {
  Element element;  // of the products, and of q, k, v and out
  int head_dim;     // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;   // class of v and dout, likewise
  int block_q;      // query rows per step
  int block_kv;     // keys per CTA
  int warps;
  int score_rows;  // warps along the queries of S and dP
  int key_rows;    // warps along the keys of dK and dV
  int query_rows;  // warps along the queries of dQ
  int stages;      // of Q and dO
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy
  bool vector_sums;  // sums in global memory are added four at a time (sm_90 on)
  bool makes_dkv;    // else neither dK nor dV is wanted
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
  const float* row_terms;  // same shape: rowsum(dO * O) - dlse
  float* dq_sums;          // null: dQ is not wanted; zeroed (batch, heads, q_tiles, fragments)
  int* dq_tickets;         // null, or zeroed (batch, heads, q_tiles): dQ is summed in key order
  // Where KV tiles are cut into pieces: sums of dK and dV, (batch, heads_kv, kv_tiles, fragments),
  // and the tickets of pieces for them, zeroed (batch, heads_kv, kv_tiles).
  float* dkv_sums;
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
  int rows_descend;  // 1: from the last query tile to the first
  int in_order;      // 1: pieces add to dK and dV by their numbers
  float scale;
  float scale_log2;
  float inverse_scale_log2;
  float softcap_in;
};

// The work of a CTA: one KV tile of one KV head, or a piece of it, against the query tiles that see
// it, head by head of the group.
template <typename Extents>
struct BackwardPlan : Extents::Record {
  int batch;
  int head_kv;
  int kv_tile;
  int piece;  // index among the `pieces` that the KV tile is cut into
  int pieces;
  TileRange touched;  // query tiles
  TileRange full;     // those query tiles in which every row sees every key of the tile
  int begin_tile;     // where this piece begins
  int begin_head;     // within the group
  int steps;

  TILEWISE_INLINE bool partial(int q_tile) const {
    return q_tile < full.begin || q_tile >= full.end;
  }
};

// For a CTA past the end of a work table.
template <typename Extents>
__device__ __forceinline__ BackwardPlan<Extents> no_work() {
  BackwardPlan<Extents> plan{};
  plan.kv_tile = -1;
  return plan;
}

// Accepts the parameters of this backward or of the float32 one. All lanes of a warp must call it.
template <typename Policy, typename Extents, int block_q, int block_kv, typename Params>
__device__ __forceinline__ BackwardPlan<Extents> make_backward_plan(const Params& params,
                                                                    int work) {
  WorkTile at;
  typename Extents::Record record;
  if constexpr (HasWorkTable<Extents>) {
    const auto found = Extents::kv_work(params, params.heads_kv, block_kv, work);
    if (!found.exists()) return no_work<Extents>();
    at = found.tile;
    record = Extents::record_of(params, found.owner);
  } else {
    const Schedule schedule{params.heads_kv, params.batch * params.heads_kv, params.pieces,
                            params.sections, 0};
    at = schedule.tile(work);
    record = Extents::find(params, at.batch);
  }
  const auto sequence = sequence_of<Extents>(params, record);
  const RowBand band = sequence.row_band();
  Piece piece{at.q_tile, 0, 1};
  if (params.pieces != params.kv_tiles)
    piece = find_piece(at.q_tile, params.kv_tiles, params.piece_steps, false, [&](int tile) {
      return touched_query_tiles(band, tile, sequence.seq_k(), block_q, block_kv).count() *
             params.heads_per_kv;
    });
  QueryTiles tiles{{0, 0}, {0, 0}};
  if constexpr (HasTileMap<Extents>)
    tiles = listed_tiles<Extents>(params, at.batch, at.head, piece.tile);
  else if (has_rows<Extents>(piece.tile * block_kv, sequence.seq_k()))
    tiles = query_tiles(band, piece.tile, sequence.seq_k(), block_q, block_kv);
  if constexpr (!HasTileMap<Extents>)
    narrow_query_tiles<Policy>(params, at.batch, piece.tile, block_q, block_kv,
                               params.dq_tickets == nullptr, tiles);
  const int count = tiles.touched.count();
  const TileRange steps = steps_of_piece(count * params.heads_per_kv, params.piece_steps, piece);
  BackwardPlan<Extents> plan{record,      at.batch,    at.head,       piece.tile,
                             piece.index, piece.count, tiles.touched, tiles.full,
                             0,           0,           steps.count()};
  if (plan.steps > 0) {
    plan.begin_head = steps.begin / count;
    const int ahead = steps.begin - plan.begin_head * count;
    plan.begin_tile =
        params.rows_descend ? plan.touched.end - 1 - ahead : plan.touched.begin + ahead;
  }
  return plan;
}

template <BackwardConfig config, typename Extents>
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
  BackwardPlan<Extents> plan;
  int pieces_before;  // for the sums of dK and dV
};

// Counts through the steps of a plan: the query tiles of one head, then those of the next.
struct StepCursor {
  int q_tile;
  int head;  // within the group

  template <typename Extents>
  __device__ __forceinline__ explicit StepCursor(const BackwardPlan<Extents>& plan)
      : q_tile(plan.begin_tile), head(plan.begin_head) {}
  template <typename Extents>
  __device__ __forceinline__ void advance(const BackwardPlan<Extents>& plan, bool descend) {
    const int first = descend ? plan.touched.end - 1 : plan.touched.begin;
    const int last = descend ? plan.touched.begin : plan.touched.end - 1;
    if (q_tile == last)
      q_tile = first, ++head;
    else
      q_tile += descend ? -1 : 1;
  }
};

}  // namespace tilewise::sm80
