// Warpgroup 0 of the forward kernel: producer, scheduler, storer, scanner. For roles and barriers
// see forward.cuh.
#pragma once

#include "../common/scores.cuh"
#include "config.cuh"
#include "rescue.cuh"

namespace tilewise::sm90 {

using ptx::u32;
using ptx::u64;

__device__ __forceinline__ Schedule schedule_of(const Params& params) {
  return {params.heads, params.batch * params.heads, params.q_tiles, params.sections,
          params.longest_first};
}

// Returns the work tile to do instead of this one where batches share a bias: the batches of one KV
// head run side by side, so that a bias tile is read from DRAM once.
__device__ __forceinline__ WorkTile batches_together(const Params& params, const WorkTile& tile) {
  const int group = params.heads_per_kv;
  const int pair = (tile.batch * params.heads + tile.head) / group;
  return {pair % params.batch, pair / params.batch * group + tile.head % group, tile.q_tile};
}

template <Config config, typename Extents, typename KernelParams>
__device__ __forceinline__ int work_count_of(const KernelParams& params) {
  if constexpr (HasWorkTable<Extents>)
    return Extents::q_tile_count(params) * params.heads;
  else
    return schedule_of(params).work_count() * (config.split ? params.splits : 1);
}

// Plans the work with index `work` for a CTA.
template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ TilePlan<Extents> make_plan(
    const ParamsOf<Params, Policy, Extents>& params, int work) {
  TilePlan<Extents> plan;
  plan.split = config.split ? work % params.splits : 0;
  typename Extents::Record& record = plan;
  if constexpr (HasWorkTable<Extents>) {
    const auto found =
        Extents::q_work(params, params.heads, config.block_q(), params.longest_first, work);
    plan.tile = found.tile;
    record = Extents::record_of(params, found.owner);
  } else {
    plan.tile = schedule_of(params).tile(config.split ? work / params.splits : work);
    if constexpr (config.bias_slots > 0) {
      if (params.bias_batch_stride == 0) plan.tile = batches_together(params, plan.tile);
    }
    record = Extents::find(params, plan.tile.batch);
  }
  const auto sequence = sequence_of<Extents>(params, plan);
  const Band band = sequence.band();
  plan.row_begin = plan.tile.q_tile * config.block_q();
  const int row_end = min_int(plan.row_begin + config.block_q(), sequence.seq_q());
  plan.touched = {0, 0};
  if constexpr (HasTileMap<Extents>) {
    const QueryTiles listed =
        listed_tiles<Extents>(params, plan.tile.batch, plan.tile.head, plan.tile.q_tile);
    plan.touched = listed.touched;
    plan.full = {listed.touched.end - listed.full.end, listed.touched.end};
  } else {
    if (has_rows<Extents>(plan.row_begin, sequence.seq_q()))
      plan.touched = touched_tiles(band, plan.row_begin, row_end, config.block_kv);
    plan.full = full_tiles(band, plan.row_begin, row_end, config.block_kv, plan.touched);
    narrow_tiles<Policy>(params, plan.tile.batch, plan.row_begin, row_end, config.block_kv,
                         plan.touched, plan.full);
  }
  if constexpr (config.split) plan.touched = part_of(plan.touched, plan.split, params.splits);
  return plan;
}

// The KV tile at a position of the plan. With a map the plan walks a list (tile_map.cuh) from its
// last full tile to its first, and then its partial tiles in the order of the list, which ends with
// those that few warpgroups see. Why the full tiles come first: any of them gives each row a
// maximum that serves for the others, while a partial tile may show a row few keys.
template <typename Extents, typename KernelParams>
__device__ __forceinline__ int kv_tile_of(const KernelParams& params, const TilePlan<Extents>& plan,
                                          int position) {
  if constexpr (!HasTileMap<Extents>) return position;
  const int partial = plan.full.begin;
  const int entry = position >= partial ? position - partial : plan.full.end - 1 - position;
  const WorkTile& tile = plan.tile;
  return tile_at<Extents>(params, tile.batch, tile.head, tile.q_tile, entry);
}

// The KV tiles that the rows of a warpgroup see; none if it has no rows.
template <Config config, typename Policy, typename Extents, typename KernelParams>
__device__ __forceinline__ TileRange own_tiles(const KernelParams& params,
                                               const TilePlan<Extents>& plan, int warpgroup) {
  const auto sequence = sequence_of<Extents>(params, plan);
  const int row = plan.row_begin + warpgroup * 64, seq_q = sequence.seq_q();
  if (plan.row_begin == TilePlan<Extents>::no_more_work || row >= seq_q) return {0, 0};
  if constexpr (HasTileMap<Extents>) {
    const WorkTile& tile = plan.tile;
    const int end = own_end<Extents>(params, tile.batch, tile.head, tile.q_tile, warpgroup);
    return {max_int(plan.full.end - end, plan.touched.begin), plan.touched.end};
  }
  const int row_end = min_int(row + 64, seq_q);
  TileRange seen = touched_tiles(sequence.band(), row, row_end, config.block_kv);
  if constexpr (Policy::hides_by_span) {
    TileRange full{0, 0};
    narrow_tiles<Policy>(params, plan.tile.batch, row, row_end, config.block_kv, seen, full);
  }
  if constexpr (!config.split && !Policy::hides_by_span) return seen;
  return {max_int(seen.begin, plan.touched.begin), min_int(seen.end, plan.touched.end)};
}

// The slices of a staged table that the tiles of a plan need.
template <Config config, typename Extents, typename KernelParams>
__device__ __forceinline__ TableSlices table_slices(const KernelParams& params,
                                                    const TilePlan<Extents>& plan) {
  int end = sequence_of<Extents>(params, plan).seq_k();  // of the keys
  if constexpr (!HasTileMap<Extents>) end = min_int(end, plan.touched.end * config.block_kv);
  return {params, plan.tile.head, plan.row_begin, end, config.block_q(), config.block_kv};
}

// --- producer ---

template <Config config, typename Policy, typename Extents>
struct Producer {
  using Plan = TilePlan<Extents>;

  const ParamsOf<Params, Policy, Extents>& params;
  Smem<config, Extents>& smem;
  RingPosition<config.k_stages> k_position{1};
  RingPosition<config.v_stages> v_position{1};
  RingPosition<max_int(config.bias_slots, 1)> bias_position{1};
  u32 q_phase = 1;
  TableSlices table;  // for this work tile, if the kernel stages a table

  __device__ __forceinline__ void load_matrix(unsigned char* destination, const ptx::TensorMap& map,
                                              u64* barrier, int columns, int rows, int row,
                                              int head, int batch, ptx::CachePolicy policy) {
    for (int panel = 0; panel < panel_count(columns); ++panel)
      ptx::tma_load_4d(destination + panel * panel_bytes(rows), &map, barrier,
                       panel * panel_columns, row, head, batch, policy);
  }

  // TMA fills rows beyond the tensor with zeros. Rows beyond the sequence may belong to another
  // sequence, and no consumer stores them.
  __device__ __forceinline__ void load_q(const Plan& plan, int warpgroup) {
    const auto sequence = sequence_of<Extents>(params, plan);
    u64* full = &smem.q_full[warpgroup];
    ptx::mbarrier_wait(&smem.q_empty[warpgroup], q_phase);
    ptx::mbarrier_arrive_expect_tx(full, matrix_bytes(64, config.head_dim));
    load_matrix(smem.q[warpgroup], params.q_map, full, config.head_dim, 64,
                sequence.q_start() + plan.row_begin + warpgroup * 64, plan.tile.head,
                sequence.batch(plan.tile.batch), ptx::CachePolicy::evict_first);
  }

  // The first key of the KV tile at a position of the plan.
  __device__ __forceinline__ int first_key(const Plan& plan, int position) {
    return kv_tile_of<Extents>(params, plan, position) * config.block_kv;
  }

  __device__ __forceinline__ void load_k(const Plan& plan, int position) {
    const auto sequence = sequence_of<Extents>(params, plan);
    const int stage = k_position.stage;
    ptx::mbarrier_wait(&smem.k_empty[stage], k_position.phase);
    const bool with_table = config.stages_table && table.exist;
    ptx::mbarrier_arrive_expect_tx(&smem.k_full[stage],
                                   sizeof(smem.k[0]) + (with_table ? table.bytes : 0));
    if constexpr (config.stages_table) {
      if (with_table)
        ptx::bulk_load(smem.table.stage[stage],
                       table.source(params, plan.row_begin, first_key(plan, position)), table.bytes,
                       &smem.k_full[stage]);
    }
    load_matrix(smem.k[stage], params.k_map, &smem.k_full[stage], config.head_dim, config.block_kv,
                sequence.k_start() + first_key(plan, position),
                plan.tile.head / params.heads_per_kv, sequence.batch(plan.tile.batch),
                ptx::CachePolicy::evict_last);
    k_position.advance();
  }

  __device__ __forceinline__ void load_v(const Plan& plan, int position) {
    const auto sequence = sequence_of<Extents>(params, plan);
    const int stage = v_position.stage;
    ptx::mbarrier_wait(&smem.v_empty[stage], v_position.phase);
    ptx::mbarrier_arrive_expect_tx(&smem.v_full[stage], sizeof(smem.v[0]));
    load_matrix(smem.v[stage], params.v_map, &smem.v_full[stage], config.head_dim_v,
                config.block_kv, sequence.k_start() + first_key(plan, position),
                plan.tile.head / params.heads_per_kv, sequence.batch(plan.tile.batch),
                ptx::CachePolicy::evict_last);
    v_position.advance();
  }

  // Loads the bias tiles of all warpgroups. TMA fills rows and keys beyond the tensor with zeros.
  __device__ __forceinline__ void load_bias(const Plan& plan, int position) {
    if constexpr (config.bias_slots > 0) {
      const int key = first_key(plan, position);
      for (int warpgroup = 0; warpgroup < config.consumers; ++warpgroup) {
        const int slot = bias_position.stage;
        ptx::mbarrier_wait(&smem.bias_empty[slot], bias_position.phase);
        ptx::mbarrier_arrive_expect_tx(&smem.bias_full[slot], sizeof(smem.bias[0]));
        for (int panel = 0; panel < panel_count(config.block_kv); ++panel)
          ptx::tma_load_4d(
              smem.bias[slot] + panel * panel_bytes(64), &params.bias_map, &smem.bias_full[slot],
              key + panel * panel_columns, plan.row_begin + warpgroup * 64,
              params.bias_head_stride == 0 ? 0 : plan.tile.head,
              params.bias_batch_stride == 0 ? 0 : plan.tile.batch, ptx::CachePolicy::evict_normal);
        bias_position.advance();
      }
    }
  }

  // Invariant: consumers wait for Q, K, V and the bias in exactly this order.
  __device__ __forceinline__ void load_tile(const Plan& plan) {
    if constexpr (config.stages_table) table = table_slices<config, Extents>(params, plan);
    int kv_tile = plan.touched.end - 1;
    if (!plan.touched.empty()) load_k(plan, kv_tile);
    for (int warpgroup = 0; warpgroup < config.consumers; ++warpgroup) load_q(plan, warpgroup);
    q_phase ^= 1;
    if (plan.touched.empty()) return;
    load_bias(plan, kv_tile);
    for (; kv_tile > plan.touched.begin; --kv_tile) {
      load_k(plan, kv_tile - 1);
      load_v(plan, kv_tile);
      load_bias(plan, kv_tile - 1);
    }
    load_v(plan, kv_tile);
  }

  __device__ __forceinline__ void run() {
    RingPosition<work_slots> slot(0);
    for (;; slot.advance()) {
      ptx::mbarrier_wait(&smem.work_full[slot.stage], slot.phase);
      const Plan plan = smem.plan[slot.stage];
      ptx::mbarrier_arrive(&smem.work_empty[slot.stage]);
      if (plan.row_begin == Plan::no_more_work) return;
      load_tile(plan);
    }
  }
};

// --- scheduler ---

// Invariant: every CTA with a number below work_count begins with that tile, all other CTAs exit at
// once, and every tile is followed by one take. The counter is therefore incremented exactly
// work_count times; the CTA that increments it last resets it to zero for the next launch.
__device__ __forceinline__ int take_work(const Params& params, int work_count) {
  const int taken = atomicAdd(params.work_counter, 1);
  if (taken == work_count - 1) atomicExch(params.work_counter, 0);
  return taken + gridDim.x;
}

// Why work is taken only when a slot is free: a CTA that hoards work it cannot start yet leaves
// other CTAs idle at the end.
template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ void schedule_work(const ParamsOf<Params, Policy, Extents>& params,
                                              Smem<config, Extents>& smem) {
  const int work_count = work_count_of<config, Extents>(params);
  RingPosition<work_slots> slot(1);
  for (int work = blockIdx.x, previous = -1;; slot.advance()) {
    ptx::mbarrier_wait(&smem.work_empty[slot.stage], slot.phase);
    if (previous >= 0)
      work = params.work_counter == nullptr ? previous + gridDim.x : take_work(params, work_count);
    previous = work;
    TilePlan<Extents> plan;
    plan.row_begin = TilePlan<Extents>::no_more_work;
    if (work < work_count) plan = make_plan<config, Policy, Extents>(params, work);
    smem.plan[slot.stage] = plan;
    if constexpr (Policy::drops) {  // these words take a while to compute
      using Once = typename Policy::Once;
      if (work < work_count)
        smem.once[slot.stage].template as<Once>() =
            Once(params, HeadCoords{plan.tile.batch, plan.tile.head});
    }
    // Why: beside the addresses of spans, or with a record of its own for the sequence, a plan in
    // registers would spill.
    constexpr bool reads_again = Policy::hides_by_span || HasWorkTable<Extents>;
    if constexpr (reads_again) asm volatile("" ::: "memory");
    const TilePlan<Extents>& kept = reads_again ? smem.plan[slot.stage] : plan;
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < config.consumers; ++warpgroup)
      smem.own[slot.stage][warpgroup] = own_tiles<config, Policy, Extents>(params, kept, warpgroup);
    smem.met_nonfinite[slot.stage] = 0;
    ptx::mbarrier_arrive(&smem.work_full[slot.stage]);
    if (work >= work_count) return;
  }
}

// --- storer ---

// The lanes of a warp store the first `rows` of 64 staged rows, panels [first, first + staged). The
// rows after them belong to another sequence.
template <Config config, typename Extents, typename KernelParams>
__device__ __forceinline__ void store_rows(const KernelParams& params, const unsigned char* staged,
                                           int first, int rows, long long row, int head,
                                           int batch) {
  constexpr int chunks = config.staged_panels() * 8;
  ptx::u16* out = static_cast<ptx::u16*>(params.out_rows) + batch * params.out_rows_batch_stride +
                  head * params.out_rows_head_stride + row * params.out_rows_seq_stride;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
    const int r = i / chunks, chunk = i % chunks, column = first * panel_columns + chunk * 8;
    if (column < params.head_dim_v)
      *reinterpret_cast<uint4*>(out + r * params.out_rows_seq_stride + column) =
          *reinterpret_cast<const uint4*>(staged + chunk / 8 * panel_bytes(64) +
                                          swizzled_chunk(r, chunk % 8));
  }
}

// Why a separate thread: the copy engine interleaves the stores with the loads of the next tile,
// and the thread that issues the stores waits for them. With ragged sequences the storer is a whole
// warp: its lanes store the rows of a tile that crosses the end of its sequence.
template <Config config, typename Extents, typename KernelParams>
__device__ __forceinline__ void store_outs(const KernelParams& params,
                                           Smem<config, Extents>& smem) {
  const bool leads = !Extents::ragged || threadIdx.x % 32 == 0;
  constexpr int panels = panel_count(config.head_dim_v), staged = config.staged_panels();
  u32 phases = 0;  // bit w: the phase of out_full[w]
  for (RingPosition<work_slots> slot(0);; slot.advance()) {
    ptx::mbarrier_wait(&smem.work_full[slot.stage], slot.phase);
    const int row_begin = smem.plan[slot.stage].row_begin;
    if (row_begin == TilePlan<Extents>::no_more_work) return;
    const WorkTile tile = smem.plan[slot.stage].tile;
    const auto sequence = sequence_of<Extents>(params, smem.plan[slot.stage]);
    const int batch = sequence.batch(tile.batch), head = tile.head;
    const int rows = sequence.seq_q() - row_begin, first_row = sequence.q_start() + row_begin;
    const int parts = min_int(config.consumers, ceil_div(rows, 64));
    // Why before the stores: the scheduler reads a table to find a tile, and with short sequences
    // the stores followed by that lookup would take longer than the computation of the tile.
    if constexpr (Extents::ragged) {
      ptx::fence_proxy_async();  // the plan is read: an arrive does not wait for loads in flight
      __syncwarp();
      if (leads) ptx::mbarrier_arrive(&smem.work_empty[slot.stage]);
    }
#pragma unroll 1
    for (int first = 0; first < panels; first += staged) {
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < parts; ++warpgroup) {
        ptx::mbarrier_wait(&smem.out_full[warpgroup], phases >> warpgroup & 1);
        phases ^= 1u << warpgroup;
        if constexpr (Extents::ragged) {
          if (rows < (warpgroup + 1) * 64) {
            store_rows<config, Extents>(params, smem.out[warpgroup][0], first,
                                        rows - warpgroup * 64, first_row + warpgroup * 64, head,
                                        batch);
            continue;
          }
          if (!leads) continue;
        }
        for (int panel = 0; panel < min_int(staged, panels - first); ++panel)
          ptx::tma_store_4d(&params.out_map, smem.out[warpgroup][panel],
                            (first + panel) * panel_columns, first_row + warpgroup * 64, head,
                            batch);
      }
      if (leads) {
        ptx::tma_store_commit();
        ptx::tma_store_wait_read<0>();
      }
      if constexpr (Extents::ragged) __syncwarp();
      for (int warpgroup = 0; leads && warpgroup < parts; ++warpgroup)
        ptx::mbarrier_arrive(&smem.out_empty[warpgroup]);
    }
    if constexpr (!Extents::ragged) ptx::mbarrier_arrive(&smem.work_empty[slot.stage]);
  }
}

// --- scanner ---

template <Config config, typename Extents>
__device__ __forceinline__ void scan_values(const Params& params, Smem<config, Extents>& smem) {
  const int lane = threadIdx.x % 32;
  RingPosition<work_slots> slot(0);
  RingPosition<config.v_stages> position(0);
  for (;; slot.advance()) {
    ptx::mbarrier_wait(&smem.work_full[slot.stage], slot.phase);
    const TilePlan<Extents> plan = smem.plan[slot.stage];
    if (plan.row_begin == TilePlan<Extents>::no_more_work) return;
    for (int kv_tile = plan.touched.end - 1; kv_tile >= plan.touched.begin;
         --kv_tile, position.advance()) {
      ptx::mbarrier_wait(&smem.v_full[position.stage], position.phase);
      if (plan.partial(kv_tile)) {
        const bool met =
            zero_nonfinite<config.element, sizeof(smem.v[0])>(smem.v[position.stage], lane);
        if (met) {
          smem.met_nonfinite[slot.stage] = 1;
          ptx::fence_proxy_async();
        }
        __syncwarp();
      }
      if (lane == 0) ptx::mbarrier_arrive(&smem.v_scanned[position.stage]);
      if (lane == 0) ptx::mbarrier_arrive(&smem.v_empty[position.stage]);
    }
    if (lane == 0) ptx::mbarrier_arrive(&smem.work_empty[slot.stage]);
  }
}

}  // namespace tilewise::sm90
