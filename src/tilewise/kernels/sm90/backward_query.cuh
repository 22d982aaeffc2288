// Warpgroups 0 and 1 of the backward kernel: the producer, and the warpgroup that computes dQ. For
// steps, roles and barriers see backward.cuh.
#pragma once

#include "../common/scores.cuh"
#include "backward_config.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90 {

using ptx::u32;
using ptx::u64;

struct BackwardBarrierId {
  static constexpr int product_warpgroup = 1;  // + warpgroup
  static constexpr int row_terms = 3;
};

// The index of a step's query tile among all (batch, head, query tile) triples.
template <typename Params, typename Extents>
__device__ __forceinline__ long long query_tile_index(const Params& params,
                                                      const BackwardPlan<Extents>& plan,
                                                      int head_of_group, int q_tile) {
  const int head = plan.head_kv * params.heads_per_kv + head_of_group;
  const int heads = params.heads_kv * params.heads_per_kv;
  if constexpr (HasWorkTable<Extents>)
    return static_cast<long long>(head) * params.q_tiles + plan.first_q_tile + q_tile;
  return (static_cast<long long>(plan.batch) * heads + head) * params.q_tiles + q_tile;
}

// The number of rows of a query tile that belong to the sequence: the rows after them may belong to
// another one.
template <int block_q, typename Params, typename Extents>
__device__ __forceinline__ int rows_of(const Params& params, const BackwardPlan<Extents>& plan,
                                       int q_tile) {
  return min_int(block_q, sequence_of<Extents>(params, plan).seq_q() - q_tile * block_q);
}

// `threads` threads zero rows [first, end) of a matrix in shared memory. These rows belong to the
// next sequence and may hold NaN. Products see the zeros after a barrier.
template <int rows, int columns, int threads>
__device__ __forceinline__ void clear_rows(unsigned char* matrix, int first, int end) {
  constexpr int row_bytes = panel_bytes(1), chunks = row_bytes / 16;
  const int count = (end - first) * chunks;
#pragma unroll 1
  for (int panel = 0; panel < panel_count(columns); ++panel) {
#pragma unroll 1
    for (int i = threadIdx.x % threads; i < count; i += threads)
      *reinterpret_cast<uint4*>(matrix + panel * panel_bytes(rows) + first * row_bytes + i * 16) =
          uint4{};
  }
  ptx::fence_proxy_async();
}

// One thread issues all loads.
template <BackwardConfig config, typename Policy, typename Extents>
struct BackwardProducer {
  static constexpr int block_kv = config.block_kv();
  static constexpr int start_bytes = config.makes_row_terms ? 0 : config.block_q * sizeof(float);

  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;
  int once_head = -1;          // within the group: the head that `once` belongs to
  typename Policy::Once once;  // used where weights are dropped

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  __device__ __forceinline__ void load_matrix(unsigned char* destination, const ptx::TensorMap& map,
                                              u64* barrier, int columns, int rows, int row,
                                              int head, ptx::CachePolicy policy) {
#pragma unroll
    for (int panel = 0; panel < panel_count(columns); ++panel)
      ptx::tma_load_4d(destination + panel * panel_bytes(rows), &map, barrier,
                       panel * panel_columns, row, head, sequence().batch(plan.batch), policy);
  }

  // TMA fills rows and columns beyond the tensors with zeros.
  __device__ __forceinline__ void load_k() {
    ptx::mbarrier_arrive_expect_tx(&smem.k_full, sizeof(smem.k));
    load_matrix(smem.k, params.k_map, &smem.k_full, config.head_dim, block_kv,
                sequence().k_start() + plan.kv_tile * block_kv, plan.head_kv,
                ptx::CachePolicy::evict_first);
  }
  __device__ __forceinline__ void load_v() {
    ptx::mbarrier_arrive_expect_tx(&smem.v_full, sizeof(smem.v));
    load_matrix(smem.v, params.v_map, &smem.v_full, config.head_dim_v, block_kv,
                sequence().k_start() + plan.kv_tile * block_kv, plan.head_kv,
                ptx::CachePolicy::evict_first);
  }

  // The visibility of the query tile at a position to the 64 keys of a product warpgroup.
  __device__ __forceinline__ SeenTile::Sight sight(int position, int q_tile, int warpgroup) {
    if (!partial_at(params, plan, position)) return SeenTile::full;
    if constexpr (!config.warpgroups_own_keys) return SeenTile::partial;
    const RowBand band = sequence().row_band();
    const int key = plan.kv_tile * block_kv + warpgroup * 64;
    bool hidden = key >= sequence().seq_k() ||
                  (q_tile + 1) * config.block_q <= band.first_row(key) ||
                  q_tile * config.block_q >= band.end_row(key + 63);
    if constexpr (Policy::hides_by_span) {
      const Span& queries = smem.own_queries[warpgroup];
      hidden = hidden || (q_tile + 1) * config.block_q <= queries.begin ||
               q_tile * config.block_q >= queries.end;
    }
    return hidden ? SeenTile::hidden : SeenTile::partial;
  }

  // The barrier that the load of a query tile completes on: the one that product warpgroups wait
  // for or, where rows have to be cleared first, the one of RowClearer.
  __device__ __forceinline__ u64* landing(u64* full, int stage, int q_tile) {
    if constexpr (Extents::ragged)
      return full + stage +
             (rows_of<config.block_q>(params, plan, q_tile) < config.block_q ? config.stages : 0);
    return full + stage;
  }

  // Loads Q or dO of one step; `full` also waits for its row vector. The producer determines the
  // visibility of the tile, because in the product warpgroups this would delay the first
  // exponential after their scores.
  __device__ __forceinline__ void load_q(int stage, const StepCursor& at, int q_tile, int step) {
    u64* full = landing(smem.q_full, stage, q_tile);
    const bool last = config.warpgroups_own_keys && step == plan.steps - 1;  // others count steps
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup)
      smem.seen_tile[stage][warpgroup] =
          SeenTile(q_tile, sight(at.q_tile, q_tile, warpgroup), last).packed;
    if constexpr (Policy::uses_head)
      smem.head[stage] = plan.head_kv * params.heads_per_kv + at.head;
    if constexpr (Policy::drops) {
      if (at.head != once_head)
        once = typename Policy::Once(
            params, HeadCoords{plan.batch, plan.head_kv * params.heads_per_kv + at.head});
      once_head = at.head;
      smem.once[stage].template as<typename Policy::Once>() = once;
    }
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.q[0]) + start_bytes);
    load_matrix(smem.q[stage], params.q_map, full, config.head_dim, config.block_q,
                sequence().q_start() + q_tile * config.block_q,
                plan.head_kv * params.heads_per_kv + at.head, ptx::CachePolicy::evict_last);
  }
  __device__ __forceinline__ void load_dout(int stage, const StepCursor& at, int q_tile) {
    u64* full = landing(smem.dout_full, stage, q_tile);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.dout[0]) + start_bytes);
    load_matrix(smem.dout[stage], params.dout_map, full, config.head_dim_v, config.block_q,
                sequence().q_start() + q_tile * config.block_q,
                plan.head_kv * params.heads_per_kv + at.head, ptx::CachePolicy::evict_last);
  }
  __device__ __forceinline__ void load_start(float* destination, const float* source, u64* full,
                                             const StepCursor& at, int q_tile) {
    if constexpr (config.makes_row_terms) return;
    const long long tile = query_tile_index(params, plan, at.head, q_tile);
    ptx::bulk_load(destination, source + tile * config.block_q, start_bytes, full);
  }

  __device__ __forceinline__ void run() {
    StepCursor cursor(plan);
    RingPosition<config.stages> position(1);
    // The loads are issued in the order in which the first step needs them. Only the row vectors
    // are not available from the beginning.
    int q_tile = query_tile_at(params, plan, cursor.q_tile);
    load_k();
    load_q(0, cursor, q_tile, 0);
    load_v();
    load_dout(0, cursor, q_tile);
    ptx::wait_for_previous_grid();
    for (int step = 0; step < plan.steps; ++step) {
      const int stage = position.stage;
      if (step > 0) {
        ptx::mbarrier_wait(&smem.q_empty[stage], position.phase);
        load_q(stage, cursor, q_tile, step);
      }
      load_start(smem.start_s[stage], params.start_s, landing(smem.q_full, stage, q_tile), cursor,
                 q_tile);
      if (step > 0) {
        ptx::mbarrier_wait(&smem.dout_empty[stage], position.phase);
        load_dout(stage, cursor, q_tile);
      }
      load_start(smem.start_dp[stage], params.start_dp, landing(smem.dout_full, stage, q_tile),
                 cursor, q_tile);
      position.advance();
      cursor.advance(plan);
      if (step + 1 < plan.steps) q_tile = query_tile_at(params, plan, cursor.q_tile);
    }
  }
};

// In the last query tile of a ragged sequence, a warp clears the rows past the end, between the
// load and the products, which do not check for such rows. Only that tile waits for this warp.
// Invariant: the warp takes Q and dO in the order of their loads, so it waits for nothing that the
// producer does not wait for.
template <BackwardConfig config, typename Policy, typename Extents>
struct RowClearer {
  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;

  template <int columns>
  __device__ __forceinline__ void clear(unsigned char* matrix, u64* full, u32 phase, int rows) {
    ptx::mbarrier_wait(full + config.stages, phase);
    clear_rows<config.block_q, columns, 32>(matrix, rows, config.block_q);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full);
  }

  __device__ __forceinline__ void run() {
    StepCursor cursor(plan);
    RingPosition<config.stages> position(0);
    u32 phases = 0;  // bit s: the phase of the landing barrier of stage s
    for (int step = 0; step < plan.steps; ++step) {
      const int rows =
          rows_of<config.block_q>(params, plan, query_tile_at(params, plan, cursor.q_tile));
      if (rows < config.block_q) {
        const int stage = position.stage;
        const u32 phase = phases >> stage & 1;
        phases ^= 1u << stage;
        clear<config.head_dim>(smem.q[stage], &smem.q_full[stage], phase, rows);
        clear<config.head_dim_v>(smem.dout[stage], &smem.dout_full[stage], phase, rows);
      }
      position.advance();
      cursor.advance(plan);
    }
  }
};

// Another thread issues the loads of a staged bias. Why another: the bias has fewer stages, and Q
// and dO should not wait for them.
template <BackwardConfig config, typename Policy, typename Extents>
struct BiasProducer {
  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;

  // TMA fills queries and keys beyond the tensor with zeros.
  __device__ __forceinline__ void load(int stage, const StepCursor& at) {
    const int head = plan.head_kv * params.heads_per_kv + at.head;
    const int row = query_tile_at(params, plan, at.q_tile) * config.block_q;
    u64* full = &smem.bias_full[stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.bias[0]));
#pragma unroll
    for (int panel = 0; panel < panel_count(config.block_kv()); ++panel)
      ptx::tma_load_4d(smem.bias[stage] + panel * panel_bytes(config.block_q), &params.bias_map,
                       full, plan.kv_tile * config.block_kv() + panel * panel_columns, row,
                       params.bias_head_stride == 0 ? 0 : head,
                       params.bias_batch_stride == 0 ? 0 : plan.batch,
                       ptx::CachePolicy::evict_normal);
  }

  __device__ __forceinline__ void run() {
    StepCursor cursor(plan);
    RingPosition<config.bias_stages> position(1);
    for (int step = 0; step < plan.steps; ++step) {
      ptx::mbarrier_wait(&smem.bias_empty[position.stage], position.phase);
      load(position.stage, cursor);
      position.advance();
      cursor.advance(plan);
    }
  }
};

// The KV tiles that add to the dQ of a query tile.
template <typename Policy, int block_q, int block_kv, typename Params, typename Extents>
__device__ __forceinline__ TileRange adders(const Params& params, const BackwardPlan<Extents>& plan,
                                            int q_tile) {
  const auto sequence = sequence_of<Extents>(params, plan);
  const int row = q_tile * block_q, row_end = min_int(row + block_q, sequence.seq_q());
  return visiting_tiles<Policy>(params, plan.batch, row, row_end, block_kv,
                                touched_tiles(sequence.band(), row, row_end, block_kv));
}
template <typename Policy, int block_q, int block_kv, typename Params, typename Extents>
__device__ __forceinline__ DqTicket ticket_by_keys(const Params& params,
                                                   const BackwardPlan<Extents>& plan, int q_tile) {
  int later, earlier;
  if constexpr (HasTurns<Extents>) {
    const int2 turn = turn_of<Extents>(params, plan.batch, plan.head_kv, q_tile, plan.kv_tile);
    earlier = turn.x, later = turn.y;
  } else {
    const TileRange tiles = adders<Policy, block_q, block_kv>(params, plan, q_tile);
    later = tiles.end - 1 - plan.kv_tile, earlier = plan.kv_tile - tiles.begin;
  }
  return plan.stride > 0 ? DqTicket{later, earlier} : DqTicket{earlier, later};
}

// Manages the tickets of the KV tiles for the sums of dQ, in two dedicated threads. Why: a fence or
// an access to global memory takes a large part of a step.
template <BackwardConfig config, typename Policy, typename Extents>
struct DqTicketKeeper {
  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;

  __device__ __forceinline__ DqTickets* tickets_at(const StepCursor& at) {
    return params.dq_tickets +
           query_tile_index(params, plan, at.head, query_tile_at(params, plan, at.q_tile));
  }
  __device__ __forceinline__ DqTicket numbered(int before, int q_tile) {
    if constexpr (HasTurns<Extents>) {
      const int2 turn = turn_of<Extents>(params, plan.batch, plan.head_kv, q_tile, plan.kv_tile);
      return {before, turn.x + turn.y - before};
    }
    const TileRange tiles = adders<Policy, config.block_q, config.block_kv()>(params, plan, q_tile);
    return {before, tiles.count() - 1 - before};
  }

  // Waits ahead of time for tickets to come up. In key order, all earlier tiles must have added. In
  // claim order only the first must have added, or all of them if this tile is the last. Why this
  // cannot hang: a CTA that another one waits for is already running. In key order its work has a
  // smaller number. In claim order it has taken its ticket; it waits only for the ticket that it
  // took last, and among the CTAs with tickets for the same tile the first waits for none, the
  // others wait for the first, and the last waits for all of them.
  __device__ __forceinline__ void await() {
    ptx::wait_for_previous_grid();
    StepCursor cursor(plan);
    RingPosition<ticket_stages> position(0), behind(0);
    for (int step = 0; step < plan.steps; ++step) {
      if (step >= tickets_ahead) {
        ptx::mbarrier_wait(&smem.ticket_over[behind.stage], behind.phase);
        behind.advance();
      }
      DqTickets* tickets = tickets_at(cursor);
      const int q_tile = query_tile_at(params, plan, cursor.q_tile);
      const DqTicket ticket =
          params.order == key_order
              ? ticket_by_keys<Policy, config.block_q, config.block_kv()>(params, plan, q_tile)
              : numbered(ptx::add_relaxed(&tickets->claimed, 1), q_tile);
      const int awaited = params.order == key_order || ticket.after == 0
                              ? ticket.before
                              : min_int(ticket.before, 1);
      if (awaited > 0) {
        while (ptx::load_acquire(&tickets->added) < awaited) {
        }
      }
      smem.dq_ticket[position.stage] = ticket;
      ptx::mbarrier_arrive(&smem.ticket_come[position.stage]);
      position.advance();
      cursor.advance(plan);
    }
  }

  // Passes tickets on. A ticket comes up only if the one `ticket_stages` steps earlier has been
  // passed, so neither barrier gets a whole phase ahead of this thread.
  __device__ __forceinline__ void pass() {
    for (int i = 0; i < ticket_stages; ++i) ptx::mbarrier_arrive(&smem.ticket_come[i]);
    StepCursor cursor(plan);
    RingPosition<ticket_stages> position(0);
    for (int step = 0; step < plan.steps; ++step) {
      ptx::mbarrier_wait(&smem.ticket_over[position.stage], position.phase);
      ptx::add_release(&tickets_at(cursor)->added, 1);
      ptx::mbarrier_arrive(&smem.ticket_come[position.stage]);
      position.advance();
      cursor.advance(plan);
    }
  }
};

// Four lanes hold four words each; lane c gets word c of all four lanes.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const u32 a = __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 2);
  const u32 b = __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 2);
  const u32 y[4] = {upper ? a : x[0], upper ? b : x[1], upper ? x[2] : a, upper ? x[3] : b};
  const u32 c = __shfl_xor_sync(0xffffffffu, odd ? y[0] : y[1], 1);
  const u32 d = __shfl_xor_sync(0xffffffffu, odd ? y[2] : y[3], 1);
  x[0] = odd ? c : y[0];
  x[1] = odd ? y[1] : c;
  x[2] = odd ? d : y[2];
  x[3] = odd ? y[3] : d;
}

template <BackwardConfig config, typename Policy, typename Extents>
struct DqWarpgroup {
  static constexpr int block_kv = config.block_kv();
  static constexpr int columns = config.dq_columns;
  static constexpr int passes = config.head_dim / columns, parts = passes * config.q_blocks();
  using Product = wgmma::TransposedProduct<columns, config.element>;
  static_assert(config.head_dim % columns == 0 &&
                (columns % 64 == 0 || columns == config.head_dim));

  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;
  // Why this is recomputed at every use: the value would be kept in a register that is needed
  // elsewhere.
  struct Thread {
    __device__ __forceinline__ operator int() const { return ptx::thread_again() % 128; }
  } thread;

  StepCursor cursor{plan};
  int step = 0;
  int q_tile = 0;  // query tile of this step

  // Computes columns [pass * columns, ...) of the 64 rows `block` of this step's dQ, without the
  // scale. `resumes`: adds to the contents of dq.
  __device__ __forceinline__ void multiply(float (&dq)[columns / 2], int stage, int block, int pass,
                                           bool resumes) {
    const u32 ds_low = wgmma::descriptor_low(ptx::smem_address(smem.ds), 16) +
                       stage * (sizeof(smem.ds[0]) >> 4) + block * (panel_bytes(block_kv) >> 4);
    const u32 k_low = wgmma::descriptor_low(ptx::smem_address(smem.k), panel_bytes(block_kv)) +
                      pass * (columns / 64) * (panel_bytes(block_kv) >> 4);
    wgmma::hold(dq);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step) {
      constexpr int rows = 2 * swizzle_atom_bytes >> 4;
      Product::multiply(dq, wgmma::descriptor(ds_low + step * rows, swizzle_atom_bytes),
                        wgmma::descriptor(k_low + step * rows, swizzle_atom_bytes),
                        step != 0 || resumes);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(dq);
  }

  // Four accumulators of a thread are contiguous, and the 128 threads of the warpgroup follow one
  // another: every warp touches 512 contiguous bytes at a time.
  __device__ __forceinline__ float* sums(int block, int pass) {
    const long long tile = query_tile_index(params, plan, cursor.head, q_tile);
    return params.dq_sums + (tile * config.q_blocks() + block) * (64 * config.head_dim) +
           pass * (64 * columns) + thread * 4;
  }
  __device__ __forceinline__ void load(float (&dq)[columns / 2], int block, int pass) {
    const float* place = sums(block, pass);
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      const float4 quad = ptx::load_global(place + i * 512);
      dq[4 * i] = quad.x, dq[4 * i + 1] = quad.y, dq[4 * i + 2] = quad.z, dq[4 * i + 3] = quad.w;
    }
  }
  __device__ __forceinline__ void store(const float (&dq)[columns / 2], int block, int pass) {
    float* place = sums(block, pass);
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      const u32 quad[4] = {__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                           __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])};
      ptx::store_global(place + i * 512, quad);
    }
  }
  __device__ __forceinline__ void add(const float (&dq)[columns / 2], int block, int pass) {
    float* place = sums(block, pass);
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
      ptx::add_to_global(place + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  __device__ __forceinline__ void await_ticket() {
    const auto at = RingPosition<ticket_stages>::after(step);
    ptx::mbarrier_wait(&smem.ticket_come[at.stage], at.phase);
  }
  __device__ __forceinline__ void end_ticket() {
    __syncwarp();
    if (thread % 32 < arrivals_of_warp)
      ptx::mbarrier_arrive(&smem.ticket_over[step % ticket_stages]);
  }

  // The only KV tile, or the last to arrive, writes dQ. The four lanes that share a row exchange
  // column pairs to form whole chunks of eight columns.
  __device__ __forceinline__ void write(const float (&dq)[columns / 2], int block, int pass) {
    const int row = q_tile * config.block_q + block * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int head = plan.head_kv * params.heads_per_kv + cursor.head;
    const auto sequence = sequence_of<Extents>(params, plan);
    ptx::u16* place = static_cast<ptx::u16*>(params.dq) +
                      sequence.batch(plan.batch) * params.dq_batch_stride +
                      head * params.dq_head_stride + sequence.q_start() * params.dq_seq_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < columns / 8; i += 4) {
        u32 pairs[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          pairs[c] = ptx::pack<config.element>(dq[4 * (i + c) + 2 * r] * params.dqk_scale,
                                               dq[4 * (i + c) + 2 * r + 1] * params.dqk_scale);
        transpose_quad(pairs);
        const int column = pass * columns + (i + thread % 4) * 8;
        if (row + 8 * r < sequence.seq_q() && column < params.head_dim)
          ptx::store_global(place + (row + 8 * r) * params.dq_seq_stride + column, pairs);
      }
    }
  }

  // Whether this tile is the first, and whether it is the last, to add to the dQ of this step.
  struct Place {
    bool first, last;
  };
  __device__ __forceinline__ Place place() {
    if (config.writes_dq) return {true, true};
    if (order_of(params, plan) == any_order) return {false, false};
    await_ticket();
    const DqTicket order = smem.dq_ticket[step % ticket_stages];
    return {order.before == 0, order.after == 0};
  }

  __device__ __forceinline__ void run() {
    ptx::wait_for_previous_grid();
    for (; step < plan.steps; ++step, cursor.advance(plan)) {
      const auto position = RingPosition<config.ds_stages>::after(step);
      q_tile = query_tile_at(params, plan, cursor.q_tile);
      const Place at = place();
      const bool resumes = at.last && !at.first;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        const int block = part / passes, pass = part % passes;
        float dq[columns / 2];
        if (resumes) load(dq, block, pass);
        if (part == 0) ptx::mbarrier_wait(&smem.ds_full[position.stage], position.phase);
        multiply(dq, position.stage, block, pass, resumes);
        if (part == parts - 1 && thread % 32 == 0)
          ptx::mbarrier_arrive(&smem.ds_empty[position.stage]);
        if (at.last)
          write(dq, block, pass);
        else if (at.first)
          store(dq, block, pass);
        else
          add(dq, block, pass);
      }
      if (!config.writes_dq && order_of(params, plan) != any_order) end_ticket();
    }
  }
};

}  // namespace tilewise::sm90
