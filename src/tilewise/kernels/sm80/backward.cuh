// clang-format off
// This kernel computes the gradients of attention on every GPU from sm_80 on, with cp.async loads and mma.sync products. One
// CTA handles one KV tile, or one piece of a KV tile.
//
// Symbols. Q, dO (seq_q x d, dv) of one (batch, head), K, V (seq_k x d, dv) of its KV head; lse from the
// forward; D = rowsum(dO * O) - dlse. A CTA owns block_kv keys of one KV head and goes through the
// query tiles of block_q rows that see them, head by head of the group. c = scale * log2(e).
//
//   1. S = Q K^T                          all products are mma.sync with both operands from shared memory
//   2. the policy's terms apply (common/scores.cuh). Softcap: S = tanh(S * scale / cap), c = cap * log2(e)
//   3. in partial tiles: S[r, k] = -inf where a term hides key k from row r
//   4. P = 2^(c S - log2(e) lse)          to shared memory, rounded to 16 bits
//   5. dP = dO V^T
//   6. dS = P * (dP - D)                  likewise; times the slopes of the terms. Softcap: 1 - S^2, with S recovered from P
//   7. dV += round16(P)^T dO              without the weights that a term drops; dP of step 6 likewise
//   8. dQ += round16(dS) K                summed over KV tiles in global memory, float32
//   9. dK += round16(dS)^T Q
//  10. dK = scale dK; dK and dV to global memory, rounded
// preprocess computes the row terms of 4 and 6 and zeroes the sums of dQ; postprocess scales and rounds them
// (backward_edges.cuh). Step 8 is left out where dQ is not wanted, and steps 7, 9 and 10 where neither dK nor dV is.
//
// Pieces. KV tiles that are few, long or unequal are cut into pieces (common/pieces.cuh), one CTA each. The first piece of a
// tile that is done stores its dK and dV as float32, later pieces add theirs, and the last one adds the stored sums to its own
// before step 10. They do so in the order of arrival or, if gradients are to be deterministic, by their numbers
// (common/piece_tickets.cuh).
//
// Roles. All warps do the same work. Each of the five products is divided over the warps in its own grid, as square as
// possible: a warp's block of 32 x 32 or 32 x 64 reads the least shared memory per product. P and dS are therefore exchanged
// through shared memory.
//
// Shared memory (struct BackwardSmem): K and V of the CTA; `stages` tiles of Q and dO with their row terms; P and dS. At the
// end all of it is reused to stage dK and dV.
//
// Synchronisation. Three barriers per step, all __syncthreads:
//   before  all threads' copies of this step have arrived; P and dS of the previous step are read, and with
//           two stages so are its Q and dO, which the copies for the next step then overwrite
//   middle  P and dS are written
//   after   (one stage) Q and dO are read; the copies for the next step overwrite them
// Deterministic sums: KV tiles add to a query tile's dQ in the order of their keys. A counter per query tile counts the tickets
// that have been served; a barrier follows the wait for it, and another precedes the increment.
//
// Registers per thread: S and dP block_q * block_kv / threads each, dK and dV block_kv * (d + dv) /
// threads, dQ block_q * d / threads when S and dP are no longer live.
// clang-format on
#pragma once

#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "backward_config.cuh"
#include "products.cuh"

namespace tilewise::sm80 {

template <BackwardConfig config, typename Policy, typename Extents>
struct Backward {
  static constexpr int block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int threads = config.threads();
  static constexpr Element element = config.element;
  // A warp's share of each product, in blocks of 16: S and dP; dK and dV; dQ.
  static constexpr int score_blocks = block_q / config.score_rows / 16;
  static constexpr int score_columns = block_kv / (config.warps / config.score_rows) / 16;
  static constexpr int key_blocks = block_kv / config.key_rows / 16;
  static constexpr int dk_columns = config.head_dim / (config.warps / config.key_rows) / 16;
  static constexpr int dv_columns = config.head_dim_v / (config.warps / config.key_rows) / 16;
  static constexpr int query_blocks = block_q / config.query_rows / 16;
  static constexpr int dq_columns = config.head_dim / (config.warps / config.query_rows) / 16;
  static_assert(score_blocks * score_columns * config.warps * 256 == block_q * block_kv);
  static_assert(key_blocks * dk_columns * config.warps * 256 == block_kv * config.head_dim);
  static_assert(key_blocks * dv_columns * config.warps * 256 == block_kv * config.head_dim_v);
  static_assert(query_blocks * dq_columns * config.warps * 256 == block_q * config.head_dim);
  using Scores = float[score_blocks][score_columns * 8];

  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  // Why in shared memory: the products need the registers.
  const BackwardPlan<Extents>& plan = smem.plan;
  // Where several CTAs share the registers, the lane is recomputed at every use, to free a
  // register.
  struct Lane {
    __device__ __forceinline__ operator int() const {
      return (config.ctas_per_sm > 1 ? ptx::thread_again() : threadIdx.x) % 32;
    }
  } lane;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool descend = params.rows_descend != 0;

  StepCursor cursor{plan};
  float dk[key_blocks][dk_columns * 8];
  float dv[key_blocks][dv_columns * 8];

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }
  __device__ __forceinline__ int head_of(const StepCursor& step) const {
    return plan.head_kv * params.heads_per_kv + step.head;
  }
  // Steps count positions of the plan.
  __device__ __forceinline__ int query_tile_of(const StepCursor& step) const {
    return tile_at<Extents>(params, plan.batch, plan.head_kv, plan.kv_tile, step.q_tile);
  }
  __device__ __forceinline__ bool partial_at(const StepCursor& step) const {
    if constexpr (HasTurns<Extents>)
      return list_entry<Extents>(params, plan.batch, plan.head_kv, plan.kv_tile, step.q_tile) < 0;
    return plan.partial(step.q_tile);
  }
  // The index of a step's query tile among those of all heads.
  __device__ __forceinline__ long long tile_index(const StepCursor& step) const {
    if constexpr (HasWorkTable<Extents>)
      return static_cast<long long>(head_of(step)) * params.q_tiles + plan.first_q_tile +
             query_tile_of(step);
    const long long batch = plan.batch;
    return (batch * params.heads_kv * params.heads_per_kv + head_of(step)) * params.q_tiles +
           query_tile_of(step);
  }

  __device__ __forceinline__ void load_keys() {
    const int start = sequence().k_start(), batch = sequence().batch(plan.batch);
    const int first = start + plan.kv_tile * block_kv, end = start + sequence().seq_k();
    TileCopy<block_kv, config.head_dim, threads>{params.k, batch, plan.head_kv, params.head_dim}
        .load(ptx::smem_address(smem.k), first, end);
    TileCopy<block_kv, config.head_dim_v, threads>{params.v, batch, plan.head_kv, params.head_dim_v}
        .load(ptx::smem_address(smem.v), first, end);
  }

  __device__ __forceinline__ void load_step(const StepCursor& step, int slot) {
    const int start = sequence().q_start(), batch = sequence().batch(plan.batch);
    const int first = start + query_tile_of(step) * block_q, end = start + sequence().seq_q();
    const int head = head_of(step);
    TileCopy<block_q, config.head_dim, threads>{params.q, batch, head, params.head_dim}.load(
        ptx::smem_address(smem.q[slot]), first, end);
    TileCopy<block_q, config.head_dim_v, threads>{params.dout, batch, head, params.head_dim_v}.load(
        ptx::smem_address(smem.dout[slot]), first, end);
    constexpr int chunks = block_q / 4;
    static_assert(2 * chunks <= threads);
    const int chunk = ptx::thread_again() % chunks, which = ptx::thread_again() / chunks;
    const long long at = tile_index(step) * block_q + chunk * 4;
    if (which == 0)
      ptx::cp_async_16(ptx::smem_address(&smem.lse_log2[slot][chunk * 4]), params.lse_log2 + at,
                       16);
    else if (which == 1)
      ptx::cp_async_16(ptx::smem_address(&smem.row_terms[slot][chunk * 4]), params.row_terms + at,
                       16);
  }

  // Where a block of 16 rows of this warp's scores lies (`at` in common/scores.cuh). The warp's
  // scores begin at `first_row` and `first_column` of the tile.
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Backward& kernel;
    const int t, first_row, first_column;

    __device__ __forceinline__ int row() const {
      return kernel.query_tile_of(kernel.cursor) * block_q + first_row + t * 16 + kernel.lane / 4;
    }
    __device__ __forceinline__ int column() const {
      return kernel.plan.kv_tile * block_kv + first_column + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
    __device__ __forceinline__ int head() const { return kernel.head_of(kernel.cursor); }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };
  // The same, with the column computed once for all blocks.
  struct ElementCoordsInColumn : ElementCoords {
    const int known_column;
    __device__ __forceinline__ int column() const { return known_column; }
  };

  // Stores a block of S, rounded, in a queries x keys matrix.
  __device__ __forceinline__ void store_scores(const Scores& s, u32 matrix, int first_row,
                                               int first_column) {
#pragma unroll
    for (int t = 0; t < score_blocks; ++t) {
#pragma unroll
      for (int i = 0; i < score_columns * 8; i += 2) {
        const int row = first_row + t * 16 + lane / 4 + i / 2 % 2 * 8;
        const int chunk = first_column / 8 + i / 4;
        ptx::store_shared(matrix + chunk / 8 * panel_bytes(block_q) +
                              swizzled_chunk(row, chunk % 8) + lane % 4 * 4,
                          ptx::pack<element>(s[t][i], s[t][i + 1]));
      }
    }
  }

  // Steps 1 to 6.
  __device__ __forceinline__ void weigh(int slot) {
    const int block_row = warp % config.score_rows * score_blocks;
    const int block_column = warp / config.score_rows * score_columns;
    const int first_row = block_row * 16, first_column = block_column * 16;
    const float* row_lse = smem.lse_log2[slot] + first_row + lane / 4;
    const float* row_term = smem.row_terms[slot] + first_row + lane / 4;
    Scores s, dp;
    clear(s);
    multiply<element, Stored::by_rows, Stored::by_columns, config.head_dim / 16, block_q, block_kv>(
        s, ptx::smem_address(smem.q[slot]), block_row, ptx::smem_address(smem.k), block_column);
#pragma unroll
    for (int t = 0; t < score_blocks; ++t)
      Policy::apply(s[t], params, Unit{}, ElementCoords{*this, t, first_row, first_column});
    if (partial_at(cursor)) {
      const int column = ElementCoords{*this, 0, first_row, first_column}.column();
#pragma unroll
      for (int t = 0; t < score_blocks; ++t)
        Policy::hide(s[t], params,
                     ElementCoordsInColumn{{*this, t, first_row, first_column}, column});
    }
#pragma unroll
    for (int t = 0; t < score_blocks; ++t) {
      const float lse[2] = {row_lse[t * 16], row_lse[t * 16 + 8]};
#pragma unroll
      for (int i = 0; i < score_columns * 8; ++i)
        s[t][i] = ptx::ex2(fmaf(s[t][i], params.scale_log2, -lse[row_of(i)]));
    }
    if constexpr (config.makes_dkv && Policy::drops) {
      Scores kept;
#pragma unroll
      for (int t = 0; t < score_blocks; ++t) {
#pragma unroll
        for (int i = 0; i < score_columns * 8; ++i) kept[t][i] = s[t][i];
        Policy::drop(kept[t], params, ElementCoords{*this, t, first_row, first_column});
      }
      store_scores(kept, ptx::smem_address(smem.p), first_row, first_column);
    } else if constexpr (config.makes_dkv) {
      store_scores(s, ptx::smem_address(smem.p), first_row, first_column);
    }
    clear(dp);
    multiply<element, Stored::by_rows, Stored::by_columns, config.head_dim_v / 16, block_q,
             block_kv>(dp, ptx::smem_address(smem.dout[slot]), block_row, ptx::smem_address(smem.v),
                       block_column);
#pragma unroll
    for (int t = 0; t < score_blocks; ++t) {
      const float lse[2] = {row_lse[t * 16], row_lse[t * 16 + 8]};
      const float term[2] = {row_term[t * 16], row_term[t * 16 + 8]};
      auto terms = Policy::backward(params, ElementCoords{*this, t, first_row, first_column});
#pragma unroll
      for (int i = 0; i < score_columns * 8; ++i) {
        const float ds = s[t][i] * (terms.drop(dp[t][i], i) - term[row_of(i)]);
        dp[t][i] = terms.pull_back(ds, s[t][i], i, [&] {
          return value_of_weight(s[t][i], lse[row_of(i)], params.inverse_scale_log2);
        });
      }
      terms.end();
    }
    store_scores(dp, ptx::smem_address(smem.ds), first_row, first_column);
  }

  // Waits until the KV tiles before this one have added to the step's dQ. Why this cannot hang: the
  // work that is waited for has a smaller number, so it is already running
  // (common/work_tickets.cuh).
  __device__ __forceinline__ void await_ticket() {
    if ((HasTileMap<Extents> && !HasTurns<Extents>) || params.dq_tickets == nullptr) return;
    if (threadIdx.x == 0) {
      if constexpr (HasTurns<Extents>) {
        const int before =
            turn_of<Extents>(params, plan.batch, plan.head_kv, query_tile_of(cursor), plan.kv_tile)
                .x;
        const int* ticket = params.dq_tickets + tile_index(cursor);
        while (ptx::load_acquire(ticket) < before) {
        }
      } else {
        const Band band = sequence().band();
        const int first_tile = band.first_key(cursor.q_tile * block_q) / block_kv;
        const int* ticket = params.dq_tickets + tile_index(cursor);
        while (ptx::load_acquire(ticket) < plan.kv_tile - first_tile) {
        }
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass_ticket() {
    if (params.dq_tickets == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(params.dq_tickets + tile_index(cursor), 1);
  }

  // Sums in global memory are in fragment order, 128 floats per block of 16 x 8: in the layout of a
  // lane where four are added at a time, otherwise as four groups of one float from each of the 32
  // lanes.
  __device__ __forceinline__ int lane_place() const {
    return config.vector_sums ? 4 * lane : static_cast<int>(lane);
  }
  template <int rows, int count>
  __device__ __forceinline__ void add_to_sums(float* sums, const float (&x)[rows][count]) {
    sums += lane_place();
#pragma unroll
    for (int t = 0; t < rows; ++t) {
#pragma unroll
      for (int j = 0; j < count; j += 4) {
        float* place = sums + (t * count + j) * 32;
        const float* quad = &x[t][j];
        if constexpr (config.vector_sums) {
          ptx::add_to_global(place, quad[0], quad[1], quad[2], quad[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) ptx::add_to_global(place + i * 32, quad[i]);
        }
      }
    }
  }
  template <int rows, int count>
  __device__ __forceinline__ void store_sums(float* sums, const float (&x)[rows][count]) {
    sums += lane_place();
#pragma unroll
    for (int t = 0; t < rows; ++t) {
#pragma unroll
      for (int j = 0; j < count; j += 4) {
        float* place = sums + (t * count + j) * 32;
        const float* quad = &x[t][j];
        if constexpr (config.vector_sums) {
          *reinterpret_cast<float4*>(place) = float4{quad[0], quad[1], quad[2], quad[3]};
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) place[i * 32] = quad[i];
        }
      }
    }
  }
  template <int rows, int count>
  __device__ __forceinline__ void take_sums(const float* sums, float (&x)[rows][count]) {
    sums += lane_place();
#pragma unroll
    for (int t = 0; t < rows; ++t) {
#pragma unroll
      for (int j = 0; j < count; j += 4) {
        const float* place = sums + (t * count + j) * 32;
        float* quad = &x[t][j];
        if constexpr (config.vector_sums) {
          const float4 others = *reinterpret_cast<const float4*>(place);
          quad[0] += others.x, quad[1] += others.y, quad[2] += others.z, quad[3] += others.w;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) quad[i] += place[i * 32];
        }
      }
    }
  }

  // Step 8.
  __device__ __forceinline__ void add_dq() {
    float dq[query_blocks][dq_columns * 8];
    clear(dq);
    multiply<element, Stored::by_rows, Stored::by_rows, block_kv / 16, block_q, block_kv>(
        dq, ptx::smem_address(smem.ds), warp % config.query_rows * query_blocks,
        ptx::smem_address(smem.k), warp / config.query_rows * dq_columns);
    await_ticket();
    add_to_sums(params.dq_sums + tile_index(cursor) * (block_q * config.head_dim) +
                    warp * (query_blocks * dq_columns * 256),
                dq);
    pass_ticket();
  }

  // Steps 7 to 9.
  __device__ __forceinline__ void add_gradients(int slot) {
    const int key_block = warp % config.key_rows * key_blocks;
    const int column = warp / config.key_rows;
    if constexpr (config.makes_dkv)
      multiply<element, Stored::by_columns, Stored::by_rows, block_q / 16, block_q, block_q>(
          dv, ptx::smem_address(smem.p), key_block, ptx::smem_address(smem.dout[slot]),
          column * dv_columns);
    if (params.dq_sums != nullptr) add_dq();
    if constexpr (config.makes_dkv)
      multiply<element, Stored::by_columns, Stored::by_rows, block_q / 16, block_q, block_q>(
          dk, ptx::smem_address(smem.ds), key_block, ptx::smem_address(smem.q[slot]),
          column * dk_columns);
  }

  // The index of this CTA's KV tile among those of all heads.
  __device__ __forceinline__ long long key_tile_index() const {
    const long long pair = static_cast<long long>(plan.batch) * params.heads_kv + plan.head_kv;
    return pair * params.kv_tiles + plan.kv_tile;
  }
  // Adds dK and dV of one of several pieces to their sums, or the sums to dK and dV. Returns true
  // if this is the last piece, whose accumulators then hold the sums over all pieces.
  __device__ __forceinline__ bool join_pieces() {
    PieceTickets* tickets = params.piece_tickets + key_tile_index();
    if (threadIdx.x == 0)
      smem.pieces_before =
          await_pieces(tickets, plan.piece, plan.pieces, params.in_order != 0, true);
    __syncthreads();
    const int before = smem.pieces_before;
    constexpr int columns = config.head_dim + config.head_dim_v;
    float* dv_sums = params.dkv_sums + key_tile_index() * (block_kv * columns) +
                     warp * (key_blocks * dv_columns * 256);
    float* dk_sums = params.dkv_sums + key_tile_index() * (block_kv * columns) +
                     block_kv * config.head_dim_v + warp * (key_blocks * dk_columns * 256);
    if (before == plan.pieces - 1) {
      take_sums(dv_sums, dv);
      take_sums(dk_sums, dk);
      return true;
    }
    if (before == 0) {
      store_sums(dv_sums, dv);
      store_sums(dk_sums, dk);
    } else {
      add_to_sums(dv_sums, dv);
      add_to_sums(dk_sums, dk);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(&tickets->added, 1);
    return false;
  }

  // Stores one gradient of this CTA's keys. Invariant: no warp still reads matrices in shared
  // memory.
  template <int columns>
  __device__ __forceinline__ void store_keys(const float (&x)[key_blocks][columns * 8],
                                             const Tensor& gradient, int dim) {
    if (gradient.data == nullptr) return;
    constexpr int rows = key_blocks * 16;
    static_assert(config.warps * matrix_bytes(rows, columns * 16) <=
                  sizeof(smem.k) + sizeof(smem.v) + sizeof(smem.q) + sizeof(smem.dout));
    const int first_column = warp / config.key_rows * columns * 16;
    store_rows<element, key_blocks, columns * 16, rows>(
        ptx::smem_address(&smem) + warp * matrix_bytes(rows, columns * 16), x,
        gradient.row(sequence().batch(plan.batch), plan.head_kv, sequence().k_start()) +
            first_column,
        gradient.seq_stride, plan.kv_tile * block_kv + warp % config.key_rows * rows,
        sequence().seq_k(), dim - first_column);
  }

  // Step 10.
  __device__ __forceinline__ void finish() {
    if (plan.pieces > 1 && !join_pieces()) return;
    __syncthreads();
    if constexpr (Policy::drops) {
      const float weight = Policy::kept_weight(params, ElementCoords{*this, 0, 0, 0});
#pragma unroll
      for (int t = 0; t < key_blocks; ++t) {
#pragma unroll
        for (int i = 0; i < dv_columns * 8; ++i) dv[t][i] *= weight;
      }
    }
    store_keys<dv_columns>(dv, params.dv, params.head_dim_v);
#pragma unroll
    for (int t = 0; t < key_blocks; ++t) {
#pragma unroll
      for (int i = 0; i < dk_columns * 8; ++i) dk[t][i] *= params.scale;
    }
    __syncthreads();  // warps stage dK where others have staged dV
    store_keys<dk_columns>(dk, params.dk, params.head_dim);
  }

  __device__ __forceinline__ void run() {
    if constexpr (config.makes_dkv) {
      clear(dk);
      clear(dv);
    }
    const int steps_kept = plan.steps;
    // As for the lane: where several CTAs share the registers, the number is read again at every
    // use.
    auto steps = [&] { return config.ctas_per_sm > 1 ? plan.steps : steps_kept; };
    if (steps() > 0) {
      load_keys();
      load_step(cursor, 0);
    }
    ptx::cp_async_commit();
    int slot = 0;
    for (int step = 0; step < steps(); ++step) {
      StepCursor next = cursor;
      next.advance(plan, descend);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (config.stages == 2 && step + 1 < steps()) load_step(next, slot ^ 1);
      ptx::cp_async_commit();
      weigh(slot);
      __syncthreads();
      add_gradients(slot);
      if constexpr (config.stages == 1) {
        __syncthreads();
        if (step + 1 < steps()) load_step(next, 0);
        ptx::cp_async_commit();
      } else {
        slot ^= 1;
      }
      cursor = next;
    }
    if constexpr (config.makes_dkv) finish();
  }
};

template <BackwardConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void backward(const ParamsOf<BackwardParams, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  BackwardSmem<config, Extents>& smem =
      *reinterpret_cast<BackwardSmem<config, Extents>*>(smem_bytes);
  if (threadIdx.x < 32) {
    BackwardPlan<Extents> plan =
        make_backward_plan<Policy, Extents, config.block_q, config.block_kv>(
            params, take_work(params.work_tickets));
    if (threadIdx.x == 0) smem.plan = plan;
  }
  __syncthreads();
  if (HasWorkTable<Extents> && smem.plan.kv_tile < 0) return;
  Backward<config, Policy, Extents>{params, smem}.run();
}

}  // namespace tilewise::sm80
