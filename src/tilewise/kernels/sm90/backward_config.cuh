// The compile-time choices of the backward kernel, its parameters, plan and shared memory.
#pragma once

#include "../common/find_piece.cuh"
#include "../common/piece_tickets.cuh"
#include "../common/scores.cuh"
#include "../common/work_tickets.cuh"
#include "config.cuh"

namespace tilewise::sm90 {

// Mirrored field by field by `Config` in engine/sm90/backward.py.
struct BackwardConfig {
  Element element;           // of the products, and of q, k, v and out
  int head_dim;              // class of q and k: smaller heads are zero-filled up to it
  int head_dim_v;            // class of v and dout, likewise
  int block_q;               // 64 or 128 query rows per step
  bool warpgroups_own_keys;  // a product warpgroup owns dK and dV of 64 keys; else one owns dV, the
                             // other dK
  int stages;                // of the Q and dO rings
  int ds_stages;
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy
  bool writes_dq;  // one KV tile holds all keys: dQ needs no sums in global memory
  bool makes_dq;   // else dQ is not wanted
  bool makes_dkv;  // else neither dK nor dV is wanted
  int dq_columns;  // columns of dQ that are accumulated at a time
  int query_registers;    // of the warpgroup that computes dQ
  int product_registers;  // of the two product warpgroups
  int bias_stages;        // stages of a staged bias (staged_bias.cuh), else 0
  // There is no preprocess kernel: the product warpgroups compute the row terms. Requires
  // writes_dq, no terms and no more steps than stages.
  bool makes_row_terms;

  TILEWISE_INLINE int block_kv() const { return warpgroups_own_keys ? 128 : 64; }
  TILEWISE_INLINE int q_blocks() const { return block_q / 64; }
  TILEWISE_INLINE int threads() const { return 512; }
  // 16-bit weights are stored with their next 8 bits, so that dS is not affected by their rounding.
  TILEWISE_INLINE bool keeps_rest() const { return warpgroups_own_keys; }
  // The factor by which the host raises all weights (Weights in backward_weights.cuh).
  TILEWISE_INLINE float weight_factor() const {
    return element == Element::bf16 && warpgroups_own_keys ? 0x1.00b8aa3b295c1p+0f : 1.0f;
  }
  TILEWISE_INLINE int ds_writers() const { return warpgroups_own_keys ? 8 : 4; }    // warps
  TILEWISE_INLINE int bias_readers() const { return warpgroups_own_keys ? 8 : 4; }  // likewise
};

// For the dQ of a query tile: the number of KV tiles that have taken a ticket, and the number of
// those that have added to it.
struct DqTickets {
  int claimed;  // used in claim_order
  int added;
};

// The order in which the KV tiles that see a query tile add to its dQ, in float32 in global memory.
enum Order : int {
  key_order,    // one after another in the order of their keys, so that the bits are the same
                // every time: the first stores its sums, the others add theirs, and the last
                // continues from the stored sums and writes dQ
  claim_order,  // the same in the order of arrival: a tile waits only for the first one, and the
                // last tile waits for all others
  any_order,    // onto zeroes, and no tile waits; postprocess computes dQ from the sums
};

// The order in which a grid goes through KV tiles, and a CTA through the steps of its tile.
enum Walk : int {
  around,  // KV tiles from the first, head by head; each tile begins at a query tile of its own and
           // wraps around, so that tiles that start together never meet at a dQ
  down,    // KV tiles from the first, query tiles from the last, and all heads for each of them.
           // Under a causal mask tiles that start together stay together and read the same queries
  stairs,  // in key order. KV tiles from the last and query tiles from the first, head by head:
           // under a causal mask the first rows of a tile may be added at once, and tiles that wait
           // meet rows that the previous tile left one step ago. The last of several sections is
           // mirrored, so that the long tiles do not come at the very end
};

struct BackwardParams {
  ptx::TensorMap q_map;     // box block_q rows; all maps are (dim, seq, head, batch)
  ptx::TensorMap k_map;     // box block_kv rows
  ptx::TensorMap v_map;     // box block_kv rows
  ptx::TensorMap dout_map;  // box block_q rows
  ptx::TensorMap dk_map;    // box 16 rows
  ptx::TensorMap dv_map;    // box 16 rows
  const float* start_s;     // (batch, heads, rows padded to block_q): the start of S, from -lse
  // Same shape: the start of dP, -rowsum(dO * O). Where weights are dropped, it is added
  // afterwards, divided by the factor of the weights that stay.
  const float* start_dp;
  // Null if dQ is not wanted or one KV tile holds all keys. Else (batch, heads, q_tiles, fragment
  // order).
  float* dq_sums;
  DqTickets* dq_tickets;  // null, or the tickets for dQ, zeroed (batch, heads, q_tiles)
  // Where KV tiles are cut into pieces: float32 sums of dK and dV, (batch, heads_kv, kv_tiles,
  // fragment order), and the tickets of pieces for them, (batch, heads_kv, kv_tiles, 2), zeroed.
  float* dkv_sums;
  PieceTickets* piece_tickets;
  int* work_tickets;  // null, or zeroed: CTAs take their work in the order in which they start
  void* dq;           // null: not wanted
  long long dq_batch_stride;  // in elements
  long long dq_head_stride;
  long long dq_seq_stride;
  // For a kernel that computes the row terms (see PreprocessParams); otherwise null or 0.
  const void* out;
  long long out_batch_stride, out_head_stride, out_seq_stride;
  const void* dout;
  long long dout_batch_stride, dout_head_stride, dout_seq_stride;
  const float* lse;
  const float* dlse;
  int head_dim_v;
  float lse_factor;
  float start_bias;
  float dp_factor;
  int batch;
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;  // the actual one
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  int pieces;       // total over the KV tiles of one (batch, KV head) pair
  int piece_steps;  // maximum per piece
  int sections;
  // Pairs are numbered with the batches of a KV head side by side: where batches share a staged
  // bias, so that it is read from DRAM once, and where they hide different keys, so that a grid
  // does not end with the long tiles of a batch that has few tiles.
  int batches_inside;
  Order order;
  Walk walk;
  int store_dk;
  int store_dv;
  float scale_log2;
  float inverse_scale_log2;
  float softcap_in;
  float dqk_scale;  // scale of dQ and dK, including the factor of the weights that stay
};

// The work of a CTA: one KV tile of one KV head, or a piece of it, against the query tiles that see
// it, for all heads of the group.
template <typename Extents>
struct BackwardPlan : Extents::Record {
  int batch;
  int head_kv;
  int kv_tile;
  int piece;  // index among the `pieces` that the KV tile is cut into
  int pieces;
  TileRange touched;  // query tiles
  TileRange full;     // Invariant: begin <= end
  int first;          // first query tile of every head
  int stride;         // step between query tiles, 1 or -1
  int heads_inside;   // heads done for a query tile before the next one; 0: one head at a time
  int begin_tile;     // where this piece begins
  int begin_head;     // within the group
  int steps;

  TILEWISE_INLINE bool partial(int q_tile) const {
    return static_cast<unsigned>(q_tile - full.begin) >=
           static_cast<unsigned>(full.end - full.begin);
  }
};

// Accepts the parameters of this backward or of the float32 one, whose tickets do not support
// spans. All lanes of a warp must call it.
template <typename Policy, typename Extents, int block_q, int block_kv,
          bool tickets_know_spans = true, typename Params>
__device__ __forceinline__ BackwardPlan<Extents> make_backward_plan(const Params& params, int work,
                                                                    Walk walk) {
  const int pairs = params.batch * params.heads_kv, group = params.heads_per_kv;
  const bool mirrored = !HasWorkTable<Extents> && walk == stairs && params.sections > 1 &&
                        work >= (pairs - pairs / params.sections) * params.pieces;
  const bool from_last = walk == stairs && !mirrored, descends = walk == down || mirrored;
  WorkTile at;
  typename Extents::Record record;
  if constexpr (HasWorkTable<Extents>) {
    const auto found = Extents::kv_work(params, params.heads_kv, block_kv, work);
    if (!found.exists()) {
      BackwardPlan<Extents> none{};
      none.kv_tile = -1;
      return none;
    }
    at = found.tile;
    record = Extents::record_of(params, found.owner);
  } else {
    const Schedule schedule{params.heads_kv, pairs, params.pieces, params.sections, 0};
    at = schedule.tile(work);
  }
  if constexpr (!HasWorkTable<Extents> && requires { params.batches_inside; }) {
    const int pair = at.batch * params.heads_kv + at.head;
    if (params.batches_inside) at = {pair % params.batch, pair / params.batch, at.q_tile};
  }
  if constexpr (!HasWorkTable<Extents>) record = Extents::find(params, at.batch);
  const auto sequence = sequence_of<Extents>(params, record);
  const RowBand band = sequence.row_band();
  const int kv_tiles =
      HasWorkTable<Extents> ? ceil_div(sequence.seq_k(), block_kv) : params.kv_tiles;
  Piece piece{from_last ? kv_tiles - 1 - at.q_tile : at.q_tile, 0, 1};
  if (params.pieces != params.kv_tiles)
    piece = find_piece(at.q_tile, params.kv_tiles, params.piece_steps, from_last, [&](int tile) {
      return touched_query_tiles(band, tile, sequence.seq_k(), block_q, block_kv).count() * group;
    });
  QueryTiles tiles{{0, 0}, {0, 0}};
  if constexpr (HasTileMap<Extents> && !HasBandedMap<Extents>)
    tiles = listed_tiles<Extents>(params, at.batch, at.head, piece.tile);
  else if (has_rows<Extents>(piece.tile * block_kv, sequence.seq_k()))
    tiles = query_tiles(band, piece.tile, sequence.seq_k(), block_q, block_kv);
  if constexpr (HasBandedMap<Extents>)
    tiles = kept_tiles<Extents>(params, at.batch, at.head, piece.tile, tiles);
  if constexpr (!HasTileMap<Extents>)
    narrow_query_tiles<Policy>(params, at.batch, piece.tile, block_q, block_kv,
                               tickets_know_spans || params.dq_tickets == nullptr, tiles);
  const int count = tiles.touched.count();
  const TileRange steps = steps_of_piece(count * group, params.piece_steps, piece);
  BackwardPlan<Extents> plan;
  static_cast<typename Extents::Record&>(plan) = record;
  plan.batch = at.batch;
  plan.head_kv = at.head;
  plan.kv_tile = piece.tile;
  plan.piece = piece.index;
  plan.pieces = piece.count;
  plan.touched = tiles.touched;
  plan.full = tiles.full;
  plan.steps = steps.count();
  plan.stride = descends ? -1 : 1;
  plan.first = descends ? plan.touched.end - 1 : plan.touched.begin;
  plan.heads_inside = walk == down ? group : 0;
  plan.begin_tile = plan.begin_head = 0;
  if (plan.steps > 0) {
    if (walk == around) {
      const int ahead = piece.tile * block_kv / block_q - plan.touched.begin;
      plan.first += (ahead % count + count) % count;
    }
    const int inner = walk == down ? group : count;
    const int outer_index = steps.begin / inner, inner_index = steps.begin - outer_index * inner;
    plan.begin_head = walk == down ? inner_index : outer_index;
    int tile = plan.first + plan.stride * (walk == down ? outer_index : inner_index);
    if (tile >= plan.touched.end) tile -= count;
    if (tile < plan.touched.begin) tile += count;
    plan.begin_tile = tile;
  }
  return plan;
}

// The query tile of a step, its visibility to the keys of a product warpgroup, and whether the step
// is the last of the CTA, packed into one register. Hidden: no query sees any of the keys, which
// holds for half of the diagonal tiles of a causal mask, and for keys past the end. Why the flag
// for the last step: a warpgroup that compared with plan.steps would wait for shared memory between
// the scores of a step and their exponentials.
struct SeenTile {
  enum Sight { full, partial, hidden };
  int packed;

  TILEWISE_INLINE SeenTile(int q_tile, Sight sight, bool last)
      : packed(q_tile * 8 + last * 4 + sight) {}
  TILEWISE_INLINE explicit SeenTile(int packed) : packed(packed) {}
  TILEWISE_INLINE int q_tile() const { return packed >> 3; }
  TILEWISE_INLINE bool is_last() const { return (packed & 4) != 0; }
  TILEWISE_INLINE bool is_partial() const { return (packed & 3) == partial; }
  TILEWISE_INLINE bool is_hidden() const { return (packed & 3) == hidden; }
};

// The number of KV tiles that add to the dQ of a query tile before this one and after it.
struct DqTicket {
  int before;
  int after;
};
constexpr int ticket_stages = 4;
// How many steps ahead tickets are requested. Why no more: neighbours begin two query tiles apart,
// and a tile that takes a ticket early delays the tiles that reach that dQ before it does.
constexpr int tickets_ahead = 2;

// One lane arrives for its warp, after a warp barrier. The machine code needs no instruction for
// that barrier where the warp is converged anyway, so a race checker does not see it. For that tool
// every lane arrives.
#ifdef TILEWISE_EVERY_LANE_ARRIVES
constexpr int arrivals_of_warp = 32;
#else
constexpr int arrivals_of_warp = 1;
#endif

// A ring of staged bias tiles: queries x keys, 64 keys per panel.
template <BackwardConfig config, bool staged = (config.bias_stages > 0)>
struct BackwardBiasRing {};
template <BackwardConfig config>
struct BackwardBiasRing<config, true> {
  alignas(
      1024) unsigned char bias[config.bias_stages][matrix_bytes(config.block_q, config.block_kv())];
  ptx::u64 bias_full[config.bias_stages], bias_empty[config.bias_stages];
};

template <BackwardConfig config, typename Extents>
struct BackwardSmem : BackwardBiasRing<config> {
  alignas(1024) unsigned char k[matrix_bytes(config.block_kv(), config.head_dim)];
  alignas(1024) unsigned char v[matrix_bytes(config.block_kv(), config.head_dim_v)];
  alignas(1024) unsigned char q[config.stages][matrix_bytes(config.block_q, config.head_dim)];
  alignas(1024) unsigned char dout[config.stages][matrix_bytes(config.block_q, config.head_dim_v)];
  // Stored as keys x queries, 64 queries per panel.
  alignas(1024) unsigned char ds[config.ds_stages][matrix_bytes(config.block_kv(), config.block_q)];
  // Weights that the dV warpgroup passes to the dK warpgroup, in fragment order.
  alignas(1024) float weights[config.warpgroups_own_keys ? 4 : config.block_q * 64];
  alignas(16) float start_s[config.stages][config.block_q];
  alignas(16) float start_dp[config.stages][config.block_q];
  int seen_tile[config.stages][2];  // SeenTile of the Q in a stage, per product warpgroup
  ptx::u64 k_full, v_full;
  // With ragged sequences there is a second barrier per stage: the load of a tile that crosses the
  // end of its sequence completes on it, and the first barrier completes once the rows past the end
  // have been cleared.
  static constexpr int landings = Extents::ragged ? config.stages : 0;
  ptx::u64 q_full[config.stages + landings], q_empty[config.stages];
  ptx::u64 dout_full[config.stages + landings], dout_empty[config.stages];
  ptx::u64 ds_full[config.ds_stages], ds_empty[config.ds_stages];
  ptx::u64 weights_full, weights_empty;
  ptx::u64 ticket_come[ticket_stages], ticket_over[ticket_stages];
  int pieces_before[2];  // for the sums of dK and dV, per product warpgroup
  alignas(16) DqTicket dq_ticket[ticket_stages];
  // Invariant: the 16-byte units that hold the plan hold nothing that is written while the plan is
  // read. Why: it is read in such units, and a race checker reports accesses that share one.
  alignas(16) BackwardPlan<Extents> plan;
  alignas(16) int head[config.stages];  // head of the Q in a stage, for terms that use it
  Span own_queries[2];  // queries that see a product warpgroup's keys, where terms hide by spans
  OnceRoom once[config.stages];  // for that head, where weights are dropped
};

// The order in which the KV tiles of a plan add to dQ: the order in the parameters, or any order
// for a sequence that is too long for tickets.
template <typename Extents, typename Params>
__device__ __forceinline__ Order order_of(const Params& params, const BackwardPlan<Extents>& plan) {
  if constexpr (HasWorkTable<Extents>)
    if (plan.unordered()) return any_order;
  return params.order;
}

// The query tile at a position of a plan. Steps count positions.
template <typename Extents, typename Params>
__device__ __forceinline__ int query_tile_at(const Params& params,
                                             const BackwardPlan<Extents>& plan, int position) {
  return tile_at<Extents>(params, plan.batch, plan.head_kv, plan.kv_tile, position);
}

// Whether the query tile at a position is masked.
template <typename Extents, typename Params>
__device__ __forceinline__ bool partial_at(const Params& params, const BackwardPlan<Extents>& plan,
                                           int position) {
  if constexpr (HasTurns<Extents>)
    return list_entry<Extents>(params, plan.batch, plan.head_kv, plan.kv_tile, position) < 0;
  return plan.partial(position);
}

// Counts through the steps of a plan: all query tiles of one head, with wrap-around, then those of
// the next head; or all heads of one query tile, then those of the next tile.
struct StepCursor {
  int q_tile;
  int head;  // within the group

  template <typename Extents>
  __device__ __forceinline__ explicit StepCursor(const BackwardPlan<Extents>& plan)
      : q_tile(plan.begin_tile), head(plan.begin_head) {}
  template <typename Extents>
  __device__ __forceinline__ void advance(const BackwardPlan<Extents>& plan) {
    if (plan.heads_inside != 0) {
      if (++head != plan.heads_inside) return;
      head = 0;
    }
    q_tile += plan.stride;
    if (q_tile == plan.touched.end)
      q_tile = plan.touched.begin;
    else if (q_tile < plan.touched.begin)
      q_tile = plan.touched.end - 1;
    if (q_tile == plan.first) ++head;
  }
};

}  // namespace tilewise::sm90
