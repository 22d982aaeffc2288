// Warpgroups 2 and 3 of the backward kernel: scores, weights, dK and dV. For steps, roles and
// barriers see backward.cuh.
#pragma once

#include "backward_query.cuh"
#include "backward_rows.cuh"
#include "backward_weights.cuh"

namespace tilewise::sm90 {

// A thread's lane index, which is either kept in a register or recomputed at every use.
template <bool again>
struct Lane {
  using Type = int;
  __device__ __forceinline__ static int ask() { return threadIdx.x % 32; }
};
template <>
struct Lane<true> {
  using Type = Lane;
  __device__ __forceinline__ static Lane ask() { return {}; }
  __device__ __forceinline__ operator int() const { return ptx::thread_again() % 32; }
};

// The common part of both ways to divide the work.
template <BackwardConfig config, typename Policy, typename Extents>
struct ProductWarpgroup {
  static constexpr int block_q = config.block_q, block_kv = config.block_kv();
  using ScoreProduct = wgmma::Product<block_q, config.element>;
  // Why in parts: a product of 256 columns needs more registers than a thread has at launch.
  static constexpr int key_parts = config.head_dim > 192 ? 2 : 1;
  static constexpr int value_parts = config.head_dim_v > 192 ? 2 : 1;
  using KeySums = float[key_parts][config.head_dim / key_parts / 2];
  using ValueSums = float[value_parts][config.head_dim_v / value_parts / 2];
  using Fragment = float[block_q / 2];
  using Packed = u32[block_q / 16][4];

  const ParamsOf<BackwardParams, Policy, Extents>& params;
  BackwardSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;
  const int warpgroup;  // 0 or 1
  const int row =
      config.warpgroups_own_keys ? warpgroup * 64 : 0;  // of the KV tile, the first of 64
  const int warp = threadIdx.x / 32 % 4;
  // Why it is recomputed in some kernels: the result would take a register that they do not have.
  using LaneOf = Lane<config.writes_dq || (config.warpgroups_own_keys && block_q == 64)>;
  const typename LaneOf::Type lane = LaneOf::ask();

  using Position = RingPosition<config.stages>;
  Position position{0};  // position of this step in the Q and dO rings
  RingPosition<config.ds_stages> ds_position{1};
  RingPosition<max_int(config.bias_stages, 1)> bias_position{0};
  typename Policy::OfRows of_rows{params, Keys{*this}};
  // For the head of the last Q. Why it is kept where there is a register: it is loaded before the
  // product of S and is available when the product is done.
  using Once = typename Policy::Once;
  static constexpr bool keeps_once = Policy::adds_straight_line && sizeof(Once) == sizeof(float);
  Once once;
  // What `hide` needs for the tile whose scores are being computed, if that tile is partial. Terms
  // that change scores or drop weights leave no registers for it.
  static constexpr bool looks_ahead =
      Policy::looks_ahead_by_keys && !Policy::drops && !Policy::transforms;
  typename Policy::template Ahead<block_q / 2, RowsAre::keys> ahead;

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  // Must be called after the whole warp has read or written the data that the barrier protects.
  __device__ __forceinline__ void arrive(u64* barrier) {
    __syncwarp();
    if (lane < arrivals_of_warp) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void wait_q(const Position& at) {
    ptx::mbarrier_wait(&smem.q_full[at.stage], at.phase);
  }
  __device__ __forceinline__ void wait_dout(const Position& at) {
    ptx::mbarrier_wait(&smem.dout_full[at.stage], at.phase);
  }
  // Rows of K and V past the end of a ragged sequence become zeros; each warpgroup clears the rows
  // that it multiplies.
  __device__ __forceinline__ void wait_k() { wait_keys<config.head_dim>(&smem.k_full, smem.k); }
  __device__ __forceinline__ void wait_v() { wait_keys<config.head_dim_v>(&smem.v_full, smem.v); }
  template <int columns>
  __device__ __forceinline__ void wait_keys(u64* full, unsigned char* matrix) {
    const int first = Extents::ragged ? max_int(row, keys_here()) : row + 64;
    ptx::mbarrier_wait(full, 0);
    if (!Extents::ragged || first >= row + 64) return;
    clear_rows<block_kv, columns, 128>(matrix, first, row + 64);
    ptx::barrier_sync<128>(BackwardBarrierId::product_warpgroup + warpgroup);
  }
  // The number of this tile's keys that belong to the sequence.
  __device__ __forceinline__ int keys_here() const {
    return min_int(block_kv, sequence().seq_k() - plan.kv_tile * block_kv);
  }

  // The SeenTile of the Q at a ring position that is full.
  __device__ __forceinline__ SeenTile seen_tile(const Position& at) {
    if constexpr (keeps_once) once = Once(params, HeadOf{*this, at.stage});
    return SeenTile(smem.seen_tile[at.stage][warpgroup]);
  }
  // Reads what hides scores of the Q at `position`, if that tile is partial. It should be called
  // some time after seen_tile: the branch waits until the tile has arrived from shared memory.
  __device__ __forceinline__ void look_ahead(SeenTile tile) {
    if constexpr (looks_ahead) {
      if (tile.is_partial())
        Policy::look_ahead(ahead, params, ElementCoords{*this, tile, position.stage});
    }
  }
  __device__ __forceinline__ int first_key() const {
    return plan.kv_tile * block_kv + row + warp * 16 + lane / 4;
  }

  // accumulator += (64 rows of K or V, from `keys`) (Q or dO tile `queries`)^T
  template <int dim>
  __device__ __forceinline__ void issue_scores(Fragment& accumulator, const unsigned char* keys,
                                               const unsigned char* queries) {
    constexpr int key_panel = panel_bytes(block_kv) >> 4, query_panel = panel_bytes(block_q) >> 4;
    u32 key_low = wgmma::descriptor_low(ptx::smem_address(keys) + panel_bytes(row), 16);
    // Why: otherwise the compiler would keep all these descriptors in registers across the loop,
    // and spill.
    if constexpr (!config.warpgroups_own_keys) asm volatile("" : "+r"(key_low));
    const u32 query_low = wgmma::descriptor_low(ptx::smem_address(queries), 16);
#pragma unroll
    for (int step = 0; step < dim / 16; ++step)
      ScoreProduct::multiply(
          accumulator,
          wgmma::descriptor(key_low + step / 4 * key_panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(query_low + step / 4 * query_panel + step % 4 * 2, swizzle_atom_bytes),
          1);
  }

  // sums += (P^T or dS^T, in registers) (dO or Q tile `queries`)
  template <int parts, int count>
  __device__ __forceinline__ void issue_sums(float (&sums)[parts][count], const Packed& weights,
                                             const unsigned char* queries) {
    const u32 low = wgmma::descriptor_low(ptx::smem_address(queries), panel_bytes(block_q));
#pragma unroll
    for (int step = 0; step < block_q / 16; ++step) {
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        constexpr int columns = 2 * count;
        static_assert(parts == 1 || columns % panel_columns == 0);
        const u32 place = low + step * (2 * swizzle_atom_bytes >> 4) +
                          part * (columns / panel_columns) * (panel_bytes(block_q) >> 4);
        wgmma::Product<columns, config.element>::multiply(
            sums[part], weights[step], wgmma::descriptor(place, swizzle_atom_bytes), 1);
      }
    }
  }

  template <int parts, int count>
  __device__ __forceinline__ void hold(float (&sums)[parts][count]) {
#pragma unroll
    for (int part = 0; part < parts; ++part) wgmma::hold(sums[part]);
  }

  template <int parts, int count>
  __device__ __forceinline__ void clear(float (&sums)[parts][count]) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int i = 0; i < count; ++i) sums[part][i] = 0.0f;
    }
  }

  __device__ __forceinline__ void hold(Packed& packed) {
#pragma unroll
    for (int step = 0; step < block_q / 16; ++step) wgmma::hold(packed[step]);
  }

  // Where this thread's rows lie (`at` in common/scores.cuh).
  struct Keys {
    static constexpr RowsAre rows_are = RowsAre::keys;
    const ProductWarpgroup& kernel;

    __device__ __forceinline__ int row() const { return kernel.first_key(); }
    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
  };
  struct HeadOf {
    const ProductWarpgroup& kernel;
    const int stage;

    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
    __device__ __forceinline__ int head() const { return kernel.smem.head[stage]; }
  };
  // Where its scores lie; `stage` is that of Q, which is still held.
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::keys;
    const ProductWarpgroup& kernel;
    const SeenTile tile;
    const int stage;

    __device__ __forceinline__ int row() const { return kernel.first_key(); }
    __device__ __forceinline__ int column() const {
      return tile.q_tile() * block_q + 2 * (threadIdx.x % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
    __device__ __forceinline__ int head() const {
      static_assert(Policy::uses_head, "a term that asks for the head says so");
      return kernel.smem.head[stage];
    }
    __device__ __forceinline__ const typename Policy::Once& once() const
      requires(Policy::drops)
    {
      return kernel.smem.once[stage].template as<typename Policy::Once>();
    }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
    // For a staged bias: the address of the queries of this warpgroup's keys, and the offset of the
    // warp's keys in their panel, in units of eight keys.
    __device__ __forceinline__ u32 staged_rows() const {
      if constexpr (config.bias_stages > 0)
        return ptx::smem_address(kernel.smem.bias[kernel.bias_position.stage]) +
               kernel.row / panel_columns * panel_bytes(block_q);
      return 0;
    }
    __device__ __forceinline__ int staged_chunk() const { return kernel.warp * 2; }
    __device__ __forceinline__ const typename Policy::OfRows& of_rows() const {
      return kernel.of_rows;
    }
    __device__ __forceinline__ const Once& once() const
      requires keeps_once
    {
      return kernel.once;
    }
    __device__ __forceinline__ const auto& ahead() const
      requires looks_ahead
    {
      return kernel.ahead;
    }
    // Where this warp will store its dS.
    __device__ __forceinline__ float* room() const {
      return reinterpret_cast<float*>(kernel.smem.ds[kernel.ds_position.stage] +
                                      panel_bytes(kernel.row + kernel.warp * 16));
    }
  };
  // The first query of the tile, from which lines are counted.
  struct TileStart : ElementCoords {
    __device__ __forceinline__ int column() const { return this->tile.q_tile() * block_q; }
  };
  // Must be called before terms add to the contents of the room.
  __device__ __forceinline__ void wait_for_room() {
    if constexpr (config.makes_dq && Policy::has_gradient)
      ptx::mbarrier_wait(&smem.ds_empty[ds_position.stage], ds_position.phase);
  }

  __device__ __forceinline__ void wait_bias() {
    if constexpr (config.bias_stages > 0)
      ptx::mbarrier_wait(&smem.bias_full[bias_position.stage], bias_position.phase);
  }
  // Why the fence: an arrive does not wait for loads in flight, and TMA could overwrite the tile
  // before they complete.
  __device__ __forceinline__ void release_bias() {
    if constexpr (config.bias_stages > 0) {
      ptx::fence_proxy_async();
      arrive(&smem.bias_empty[bias_position.stage]);
      bias_position.advance();
    }
  }

  // S -> P in place.
  __device__ __forceinline__ void exponentiate(Fragment& s, int stage, SeenTile tile) {
    if constexpr (Policy::adds_line) {
      const ElementCoords place{*this, tile, stage};
      Policy::bend(s, params, place);
      if (tile.is_partial()) Policy::hide(s, params, place);
      const Line line = Policy::line(params, TileStart{place});
      const float start[2] = {line.start[0] * params.scale_log2, line.start[1] * params.scale_log2};
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i)
        s[i] = ptx::ex2(fmaf(s[i], params.scale_log2, start[row_of(i)]));
    } else if constexpr (Policy::transforms) {
      wait_bias();
      Policy::apply(s, params, Unit{}, ElementCoords{*this, tile, stage});
      release_bias();
      const float2* pairs = reinterpret_cast<const float2*>(smem.start_s[stage]) + threadIdx.x % 4;
#pragma unroll
      for (int j = 0; j < block_q / 8; ++j) {
        const float2 pair = pairs[4 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[4 * j + i] = fmaf(s[4 * j + i], params.scale_log2, i % 2 ? pair.y : pair.x);
      }
      if (tile.is_partial()) Policy::hide(s, params, ElementCoords{*this, tile, stage});
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) s[i] = ptx::ex2(s[i]);
    } else {
      if (tile.is_partial()) Policy::hide(s, params, ElementCoords{*this, tile, stage});
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) s[i] = ptx::ex2(s[i] * params.scale_log2);
    }
  }

  // Sets the values that S starts from. Where a term changes scores, S starts from 0 and the row
  // term is added later. For a line, the start includes the part that is the same for all keys and
  // all tiles.
  __device__ __forceinline__ void start_scores(Fragment& s, int stage) {
    if constexpr (Policy::transforms && !Policy::adds_line) {
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) s[i] = 0.0f;
    } else {
      start_from(s, smem.start_s[stage]);
    }
  }

  // Sets the values that dP starts from. Where weights are dropped, the row term is added after dP
  // is complete.
  __device__ __forceinline__ void start_dp(Fragment& dp, int stage) {
    if constexpr (Policy::drops) {
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) dp[i] = 0.0f;
    } else {
      start_from(dp, smem.start_dp[stage]);
    }
  }
  __device__ __forceinline__ float kept_weight() {
    return Policy::kept_weight(params, ElementCoords{*this, SeenTile(0), 0});
  }
  // The unit of dS where weights are dropped. It saves multiplying dP by the factor of kept
  // weights: the host multiplies dQ and dK by it instead.
  __device__ __forceinline__ float ds_unit() { return Policy::drops ? kept_weight() : 1.0f; }
  // P (dP - D) of element i, from a product that started as in start_dp, and from a weight whose
  // sign marks it if it is dropped.
  __device__ __forceinline__ float weighted_dp(float p, float dp, int i, int stage) {
    if constexpr (!Policy::drops) return p * dp;
    const float2 pair =
        reinterpret_cast<const float2*>(smem.start_dp[stage])[i / 4 * 4 + threadIdx.x % 4];
    return fmaf(fabsf(p), i % 2 ? pair.y : pair.x, fmaxf(p, 0.0f) * dp);
  }

  // Computes the scores at `position`, with no other product in flight.
  __device__ __forceinline__ void first_scores(Fragment& s) {
    start_scores(s, position.stage);
    wgmma::hold(s);
    wgmma::fence();
    issue_scores<config.head_dim>(s, smem.k, smem.q[position.stage]);
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(s);
  }

  // Stores this warp's 16 key rows of dS^T in shared memory, for dQ.
  __device__ __forceinline__ void store_ds(const Packed& ds) {
    if constexpr (!config.makes_dq) return;
    ptx::mbarrier_wait(&smem.ds_empty[ds_position.stage], ds_position.phase);
    const u32 address =
        ptx::smem_address(smem.ds[ds_position.stage]) + panel_bytes(row + warp * 16);
#pragma unroll
    for (int step = 0; step < block_q / 16; ++step)
      ptx::stmatrix_x4(address + step / 4 * panel_bytes(block_kv) +
                           swizzled_chunk(lane % 16, step % 4 * 2 + lane / 16),
                       ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
  }
  // Why this is separate: the fence waits for the stores, which can proceed while the product
  // issued in the meantime runs.
  __device__ __forceinline__ void publish_ds() {
    if constexpr (!config.makes_dq) return;
    ptx::fence_proxy_async();
    arrive(&smem.ds_full[ds_position.stage]);
    ds_position.advance();
  }

  // Waits until every dS has been read, and K and V with it. Without dQ, K and V are read only for
  // S and dP, which are done.
  __device__ __forceinline__ void wait_for_dq() {
    if constexpr (!config.makes_dq) return;
    for (int i = 0; i < config.ds_stages; ++i) {
      ptx::mbarrier_wait(&smem.ds_empty[ds_position.stage], ds_position.phase);
      ds_position.advance();
    }
  }

  // The sums of dK and dV over the pieces of this KV tile. Four accumulators of a thread are
  // contiguous, the 128 threads of the warpgroup follow one another, and dV precedes dK.
  __device__ __forceinline__ float* piece_sums() {
    const long long pair = static_cast<long long>(plan.batch) * params.heads_kv + plan.head_kv;
    constexpr int columns = config.head_dim + config.head_dim_v;
    return params.dkv_sums + (pair * params.kv_tiles + plan.kv_tile) * (block_kv * columns) +
           row * columns + threadIdx.x % 128 * 4;
  }
  __device__ __forceinline__ PieceTickets* piece_tickets() {
    const long long pair = static_cast<long long>(plan.batch) * params.heads_kv + plan.head_kv;
    return params.piece_tickets + (pair * params.kv_tiles + plan.kv_tile) * 2 + warpgroup;
  }

  // The number of pieces of this KV tile that add before this one: common/piece_tickets.cuh.
  __device__ __forceinline__ int await_pieces() {
    if (threadIdx.x % 128 == 0) {
      ptx::wait_for_previous_grid();  // it zeroed the tickets
      smem.pieces_before[warpgroup] = tilewise::await_pieces(
          piece_tickets(), plan.piece, plan.pieces, params.order == key_order, true);
    }
    ptx::barrier_sync<128>(BackwardBarrierId::product_warpgroup + warpgroup);
    return smem.pieces_before[warpgroup];
  }
  __device__ __forceinline__ void end_piece() {
    ptx::barrier_sync<128>(BackwardBarrierId::product_warpgroup + warpgroup);
    if (threadIdx.x % 128 == 0) ptx::add_release(&piece_tickets()->added, 1);
  }

  // Step 9 for a piece that is not the last: adds one gradient to its sums over pieces, at `place`.
  template <bool first, int parts, int count>
  __device__ __forceinline__ void add_piece(const float (&sums)[parts][count], float* place) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        float* at = place + (part * count + i) * 128;
        const float* x = &sums[part][i];
        if constexpr (first)
          ptx::store_global(at, x[0], x[1], x[2], x[3]);
        else
          ptx::add_to_global(at, x[0], x[1], x[2], x[3]);
      }
    }
  }

  // Stores only the first `keys` rows that a warp has staged: the rows after them belong to another
  // sequence.
  template <int columns>
  __device__ __forceinline__ void store_rows(const unsigned char* staging, int keys, bool is_dv) {
    ptx::u16* out =
        static_cast<ptx::u16*>(is_dv ? params.dv_rows : params.dk_rows) +
        sequence().batch(plan.batch) *
            (is_dv ? params.dv_rows_batch_stride : params.dk_rows_batch_stride) +
        plan.head_kv * (is_dv ? params.dv_rows_head_stride : params.dk_rows_head_stride);
    const long long stride = is_dv ? params.dv_rows_seq_stride : params.dk_rows_seq_stride;
    const long long first = sequence().k_start() + plan.kv_tile * block_kv + row + warp * 16;
    const int real = is_dv ? params.dv_columns : params.head_dim;
#pragma unroll 1
    for (int i = lane; i < keys * (columns / 8); i += 32) {
      const int key = i / (columns / 8), chunk = i % (columns / 8);
      if (chunk * 8 < real)
        *reinterpret_cast<uint4*>(out + (first + key) * stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + chunk / 8 * panel_bytes(block_kv) +
                                            swizzled_chunk(key, chunk % 8));
    }
  }

  // The rows of dK and dV that a warp stores: 16, or fewer at the end of a ragged sequence.
  struct StoredRows {
    int count, first, head, batch;
  };
  __device__ __forceinline__ StoredRows stored_rows() const {
    const int in_tile = row + warp * 16;
    return {Extents::ragged ? keys_here() - in_tile : 16,
            sequence().k_start() + plan.kv_tile * block_kv + in_tile, plan.head_kv,
            sequence().batch(plan.batch)};
  }

  // Each warp stages its 16 rows in its part of `room`, a KV tile, and stores them. The last piece
  // first adds `others`, which is null otherwise. Why here and not in the accumulators: products
  // keep those in fixed registers, and another definition of them would require copying all of
  // them.
  template <int parts, int count>
  __device__ __forceinline__ void store(const float (&sums)[parts][count], const float* others,
                                        float scale, unsigned char* room,
                                        const ptx::TensorMap& map) {
    constexpr int columns = parts * count * 2;
    // Pairs of eight-column blocks that are loaded together.
    constexpr int at_once = columns % 64 == 0 && !Policy::drops ? 4 : 2;
    static_assert(columns / 16 % at_once == 0);
    unsigned char* staging = room + panel_bytes(row + warp * 16);
    const u32 address = ptx::smem_address(staging);
    // Where there are registers, this is read before the rounding, which hides the wait for shared
    // memory.
    constexpr bool reads_early = config.head_dim + config.head_dim_v <= 128;
    StoredRows rows;
    if constexpr (reads_early) rows = stored_rows();
#pragma unroll
    for (int begin = 0; begin < columns / 16; begin += at_once) {
      float4 other[2 * at_once] = {};
      if (others != nullptr) {
#pragma unroll
        for (int i = 0; i < 2 * at_once; ++i)
          other[i] = ptx::load_global(others + (2 * begin + i) * 512);
      }
#pragma unroll
      for (int pair = begin; pair < begin + at_once; ++pair) {
        const float* x = &sums[pair / (count / 8)][pair % (count / 8) * 8];
        const float4 low = other[2 * (pair - begin)], high = other[2 * (pair - begin) + 1];
        ptx::stmatrix_x4(
            address + pair / 4 * panel_bytes(block_kv) +
                swizzled_chunk(lane % 16, pair % 4 * 2 + lane / 16),
            ptx::pack<config.element>((x[0] + low.x) * scale, (x[1] + low.y) * scale),
            ptx::pack<config.element>((x[2] + low.z) * scale, (x[3] + low.w) * scale),
            ptx::pack<config.element>((x[4] + high.x) * scale, (x[5] + high.y) * scale),
            ptx::pack<config.element>((x[6] + high.z) * scale, (x[7] + high.w) * scale));
      }
    }
    if constexpr (!reads_early) rows = stored_rows();
    if constexpr (Extents::ragged) {
      if (rows.count < 16) {
        __syncwarp();
        return store_rows<columns>(staging, rows.count, &map == &params.dv_map);
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < panel_count(columns); ++panel)
        ptx::tma_store_4d(&map, staging + panel * panel_bytes(block_kv), panel * panel_columns,
                          rows.first, rows.head, rows.batch);
      ptx::tma_store_commit();
    }
  }
};

// A warpgroup owns dK and dV of 64 keys.
template <BackwardConfig config, typename Policy, typename Extents>
struct DkDvWarpgroup : ProductWarpgroup<config, Policy, Extents> {
  using Base = ProductWarpgroup<config, Policy, Extents>;
  using Base::block_q, Base::smem, Base::params, Base::plan;
  using typename Base::Fragment, typename Base::Packed;

  typename Base::KeySums dk;
  typename Base::ValueSums dv;
  u32 dropped[block_q / 64];  // bits for the scores being computed

  // Draws which weights of the scores at `position` are dropped, while their products are in
  // flight. Why bits: there are no registers for more. Why the wait, which has already completed:
  // the assembler would sink all of the drawing below the wait for the products, but it does not
  // move code across a branch.
  __device__ __forceinline__ void draw(SeenTile tile) {
    if constexpr (Policy::drops) {
      Policy::find_dropped(dropped, params,
                           typename Base::ElementCoords{*this, tile, this->position.stage});
      wgmma::hold(dropped);
      ptx::mbarrier_wait(&smem.q_full[this->position.stage], this->position.phase);
    }
  }

  // Computes dS of this step from its weights and dP.
  __device__ __forceinline__ void form_ds(
      Packed& ds, const Weights<config.keeps_rest(), config.element, block_q / 2>& weights,
      const Fragment& dp, SeenTile tile) {
    const int stage = this->position.stage;
    const float* start = smem.start_s[stage];
    this->wait_for_room();
    auto terms = Policy::backward(params, typename Base::ElementCoords{*this, tile, stage});
#pragma unroll
    for (int i = 0; i < block_q / 2; i += 2) {
      float x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float p = weights.template get<Policy::drops>(i + h);
        const float ds = this->weighted_dp(p, dp[i + h], i + h, stage);
        x[h] = terms.pull_back(
            ds, fabsf(p) / config.weight_factor(), i + h,
            [&] {
              return value_of_weight(Policy::drops ? fabsf(p) : p,
                                     -start[i / 4 * 8 + 2 * (this->lane % 4) + h],
                                     params.inverse_scale_log2);
            },
            this->ds_unit() / config.weight_factor());
      }
      ds[i / 8][i / 2 % 4] = ptx::pack<config.element>(x[0], x[1]);
    }
    terms.end();
  }

  // A step without any weights: dS is 0, and only the next scores are computed. `tile` becomes that
  // of the next step.
  __device__ __forceinline__ void skip(Fragment& s, SeenTile& tile, bool last) {
    const int stage = this->position.stage;
    this->wait_bias();
    this->release_bias();
    this->wait_dout(this->position);
    this->arrive(&smem.dout_empty[stage]);
    const Packed nothing = {};
    this->store_ds(nothing);
    this->publish_ds();
    this->position.advance();
    if (!last) {
      this->wait_q(this->position);
      tile = this->seen_tile(this->position);
      this->look_ahead(tile);
      this->first_scores(s);
      draw(tile);
    }
    this->arrive(&smem.q_empty[stage]);
  }

  // Where weights are dropped, the product of dV runs together with that of dK: dV needs the kept
  // weights, dS needs all of them, and there are no registers for both. dV is issued first, and the
  // next scores are issued during dK, when the weights have been read.
  static constexpr bool dv_with_dp = config.makes_dkv && !Policy::drops;
  static constexpr bool dv_with_dk = config.makes_dkv && Policy::drops;

  // Steps 4 and 5.
  __device__ __forceinline__ void multiply_dout(Fragment& dp, Packed& weights, SeenTile tile,
                                                int stage) {
    const unsigned char* dout = smem.dout[stage];
    this->start_dp(dp, stage);
    wgmma::hold(dp);
    if constexpr (dv_with_dp) {
      this->hold(dv);
      this->hold(weights);
    }
    wgmma::fence();
    this->template issue_scores<config.head_dim_v>(dp, smem.v, dout);
    if constexpr (dv_with_dp) this->issue_sums(dv, weights, dout);
    wgmma::commit();
    if constexpr (Policy::drops) {
      Policy::mark(weights, dropped);
      this->hold(weights);
    }
    wgmma::wait<0>();
    wgmma::hold(dp);
    if constexpr (dv_with_dp) {
      this->hold(dv);
      this->hold(weights);
    }
  }

  __device__ __forceinline__ void step(Fragment& s, SeenTile& tile, bool last) {
    const int stage = this->position.stage;
    Packed ds, kept;
    {
      Weights<config.keeps_rest(), config.element, block_q / 2> weights;
      this->exponentiate(s, stage, tile);
      weights.set(s);
      this->wait_dout(this->position);
      Fragment dp;
      multiply_dout(dp, weights.packed, tile, stage);
      if constexpr (!Policy::drops) this->arrive(&smem.dout_empty[stage]);
      form_ds(ds, weights, dp, tile);
      if constexpr (dv_with_dk) {
#pragma unroll
        for (int i = 0; i < block_q / 4; ++i)
          kept[i / 4][i % 4] = ptx::at_least_zero<config.element>(weights.packed[i / 4][i % 4]);
      }
    }
    this->store_ds(ds);
    this->position.advance();
    if (Base::looks_ahead && !last) {
      this->wait_q(this->position);
      tile = this->seen_tile(this->position);
    }
    if constexpr (config.makes_dkv) {
      this->hold(dk);
      this->hold(ds);
      if constexpr (dv_with_dk) {
        this->hold(dv);
        this->hold(kept);
      }
      wgmma::fence();
      if constexpr (dv_with_dk) {
        this->issue_sums(dv, kept, smem.dout[stage]);
        wgmma::commit();
      }
      this->issue_sums(dk, ds, smem.q[stage]);
      wgmma::commit();
    }
    this->publish_ds();
    if constexpr (dv_with_dk) {
      wgmma::wait<1>();
      this->hold(dv);
      this->hold(kept);
    }
    if constexpr (Policy::drops) this->arrive(&smem.dout_empty[stage]);
    if (!last) {
      if constexpr (!Base::looks_ahead) {
        this->wait_q(this->position);
        tile = this->seen_tile(this->position);
      }
      this->look_ahead(tile);
      this->start_scores(s, this->position.stage);
      wgmma::hold(s);
      wgmma::fence();
      this->template issue_scores<config.head_dim>(s, smem.k, smem.q[this->position.stage]);
      wgmma::commit();
      draw(tile);
    }
    wgmma::wait<0>();
    wgmma::hold(s);
    if constexpr (config.makes_dkv) {
      this->hold(dk);
      this->hold(ds);
    }
    this->arrive(&smem.q_empty[stage]);
  }

  __device__ __forceinline__ void take(Fragment& s, SeenTile& tile, bool last) {
    if (tile.is_hidden())
      skip(s, tile, last);
    else
      step(s, tile, last);
  }

  // Computes the values that S and dP of all rows start from, while the loads are in flight.
  // Invariant: no stage is used twice, so step i has stage i.
  __device__ __forceinline__ void make_row_terms() {
    constexpr int lanes = row_lanes(config.head_dim_v), threads = 256;
    const int thread = threadIdx.x % threads;
    const auto sequence = this->sequence();
    StepCursor cursor(plan);
#pragma unroll 1
    for (int step = 0; step < plan.steps; ++step) {
      const int heads = params.heads_kv * params.heads_per_kv;
      const int head = plan.head_kv * params.heads_per_kv + cursor.head;
      const long long first_of_lse = first_row_of_head(params, sequence, plan.batch, heads, head);
      const auto take = [&](int in_block, int row, float lse, float sum) {
        if (thread % lanes != 0) return;
        if (params.dlse != nullptr && lse != -infinity) sum -= params.dlse[first_of_lse + row];
        smem.start_s[step][in_block] = start_of_scores(params, lse);
        smem.start_dp[step][in_block] = lse == -infinity ? 0.0f : sum * params.dp_factor;
      };
      for_rows<config.element, lanes, threads, block_q>(
          params, sequence, plan.batch, head, first_of_lse, cursor.q_tile * block_q, thread, take);
      cursor.advance(plan);
    }
    ptx::barrier_sync<threads>(BackwardBarrierId::row_terms);
  }

  __device__ __forceinline__ void run() {
    static_assert(!config.makes_row_terms || (config.writes_dq && !config.has_terms));
    if constexpr (config.makes_row_terms) make_row_terms();
    if constexpr (config.makes_dkv) {
      this->clear(dk);
      this->clear(dv);
    }
    if (plan.steps > 0) {
      Fragment s;
      this->wait_k();
      this->wait_q(this->position);
      SeenTile tile = this->seen_tile(this->position);
      this->look_ahead(tile);
      this->first_scores(s);
      draw(tile);
      this->wait_v();
      while (!tile.is_last()) take(s, tile, false);
      take(s, tile, true);
    }
    if constexpr (config.makes_dkv) finish();
  }

  __device__ __forceinline__ void finish() {
    float *dv_others = nullptr, *dk_others = nullptr;
    if (plan.pieces > 1) {
      const int before = this->await_pieces();
      dv_others = this->piece_sums();
      dk_others = dv_others + 64 * config.head_dim_v;
      if (before != plan.pieces - 1) {
        if (before == 0) {
          this->template add_piece<true>(dv, dv_others);
          this->template add_piece<true>(dk, dk_others);
        } else {
          this->template add_piece<false>(dv, dv_others);
          this->template add_piece<false>(dk, dk_others);
        }
        return this->end_piece();
      }
    }
    // Why: only this warpgroup reads these rows of V, but any of its warps may.
    ptx::barrier_sync<128>(BackwardBarrierId::product_warpgroup + this->warpgroup);
    if (params.store_dv) this->store(dv, dv_others, this->kept_weight(), smem.v, params.dv_map);
    this->wait_for_dq();
    if (params.store_dk) this->store(dk, dk_others, params.dqk_scale, smem.k, params.dk_map);
    if (this->lane == 0) ptx::tma_store_wait_read<0>();
  }
};

// Two warpgroups share 64 keys. This one owns dV, computes the weights and passes them on.
template <BackwardConfig config, typename Policy, typename Extents>
struct DvWarpgroup : ProductWarpgroup<config, Policy, Extents> {
  using Base = ProductWarpgroup<config, Policy, Extents>;
  using Base::block_q, Base::smem, Base::params, Base::plan;
  using typename Base::Fragment, typename Base::Packed;

  typename Base::ValueSums dv;

  // The dK warpgroup multiplies dP by these: P times the slopes of the terms. Where operands have
  // gradients, that warpgroup propagates dS back through the terms itself, starting from the dS of
  // the last term.
  __device__ __forceinline__ void hand_over(const Fragment& p, int stage, SeenTile tile,
                                            u32 phase) {
    ptx::mbarrier_wait(&smem.weights_empty, phase ^ 1);
    float4* room = reinterpret_cast<float4*>(smem.weights) + threadIdx.x % 128;
    const float2* pairs = reinterpret_cast<const float2*>(smem.start_s[stage]) + threadIdx.x % 4;
    auto terms = Policy::backward(params, typename Base::ElementCoords{*this, tile, stage});
#pragma unroll
    for (int i = 0; i < block_q / 2; i += 4) {
      const float2 pair = pairs[i];
      auto sloped = [&](int h) {
        if constexpr (Policy::has_gradient) return p[i + h];
        return terms.pull_back(p[i + h], 0.0f, i + h, [&] {
          return value_of_weight(Policy::drops ? fabsf(p[i + h]) : p[i + h],
                                 h % 2 ? -pair.y : -pair.x, params.inverse_scale_log2);
        });
      };
      room[i / 4 * 128] = float4{sloped(0), sloped(1), sloped(2), sloped(3)};
    }
    this->arrive(&smem.weights_full);
  }

  __device__ __forceinline__ void step(Fragment& s, SeenTile& tile, u32 phase, bool last) {
    Weights<false, config.element, block_q / 2> weights;
    const int stage = this->position.stage;
    this->exponentiate(s, stage, tile);
    Policy::mark(s, params, typename Base::ElementCoords{*this, tile, stage});
    if constexpr (config.makes_dkv) {
      weights.set(s);
      if constexpr (Policy::drops) {
#pragma unroll
        for (int i = 0; i < block_q / 4; ++i)
          weights.packed[i / 4][i % 4] =
              ptx::at_least_zero<config.element>(weights.packed[i / 4][i % 4]);
      }
      this->wait_dout(this->position);
      this->hold(dv);
      this->hold(weights.packed);
      wgmma::fence();
      this->issue_sums(dv, weights.packed, smem.dout[stage]);
      wgmma::commit();
    }
    hand_over(s, stage, tile, phase);
    this->arrive(&smem.q_empty[stage]);
    this->position.advance();
    if (!last) {
      this->wait_q(this->position);
      tile = this->seen_tile(this->position);
      this->start_scores(s, this->position.stage);
      wgmma::hold(s);
      wgmma::fence();
      this->template issue_scores<config.head_dim>(s, smem.k, smem.q[this->position.stage]);
      wgmma::commit();
      this->look_ahead(tile);
    }
    wgmma::wait<0>();
    wgmma::hold(s);
    if constexpr (config.makes_dkv) {
      this->hold(dv);
      this->hold(weights.packed);
    }
    this->arrive(&smem.dout_empty[stage]);
  }

  __device__ __forceinline__ void run() {
    if constexpr (config.makes_dkv) this->clear(dv);
    if (plan.steps > 0) {
      Fragment s;
      this->wait_k();
      this->wait_q(this->position);
      SeenTile tile = this->seen_tile(this->position);
      this->look_ahead(tile);
      this->first_scores(s);
      int i = 0;
      for (; i < plan.steps - 1; ++i) step(s, tile, i & 1, false);
      step(s, tile, i & 1, true);
      // The other warpgroup takes the last weights once its last dP is done; by then it has read
      // all of V. Invariant: hand_over waited for all takes but this one, so the parity does not
      // match an older phase.
      ptx::mbarrier_wait(&smem.weights_empty, (plan.steps - 1) & 1);
    }
    if constexpr (config.makes_dkv) finish();
  }

  __device__ __forceinline__ void finish() {
    float* others = nullptr;
    if (plan.pieces > 1) {
      const int before = this->await_pieces();
      others = this->piece_sums();
      if (before != plan.pieces - 1) {
        if (before == 0)
          this->template add_piece<true>(dv, others);
        else
          this->template add_piece<false>(dv, others);
        return this->end_piece();
      }
    }
    if (params.store_dv) this->store(dv, others, this->kept_weight(), smem.v, params.dv_map);
    if (this->lane == 0) ptx::tma_store_wait_read<0>();
  }
};

// Two warpgroups share 64 keys. This one owns dK and computes dS.
template <BackwardConfig config, typename Policy, typename Extents>
struct DkWarpgroup : ProductWarpgroup<config, Policy, Extents> {
  using Base = ProductWarpgroup<config, Policy, Extents>;
  using Base::block_q, Base::smem, Base::params, Base::plan;
  using typename Base::Fragment, typename Base::Packed;

  typename Base::KeySums dk;

  // Terms that change dS need their place, which arrives with Q.
  static constexpr bool needs_place = Policy::has_gradient;

  __device__ __forceinline__ void form_ds(Packed& ds, const Fragment& dp, u32 phase) {
    const int stage = this->position.stage;
    SeenTile tile(0);
    if constexpr (needs_place) {
      this->wait_q(this->position);
      tile = this->seen_tile(this->position);
    }
    this->wait_for_room();
    auto terms = Policy::backward(params, typename Base::ElementCoords{*this, tile, stage});
    ptx::mbarrier_wait(&smem.weights_full, phase);
    const float4* room = reinterpret_cast<const float4*>(smem.weights) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < block_q / 2; i += 4) {
      const float4 quad = room[i / 4 * 128];
      const float p[4] = {quad.x, quad.y, quad.z, quad.w};
      float x[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        x[h] = this->weighted_dp(p[h], dp[i + h], i + h, stage);
        if constexpr (Policy::has_gradient)
          x[h] = terms.pull_back(
              x[h], fabsf(p[h]), i + h,
              [&] {
                return value_of_weight(
                    Policy::drops ? fabsf(p[h]) : p[h],
                    -smem.start_s[stage][column_of(i + h) + 2 * (threadIdx.x % 4)],
                    params.inverse_scale_log2);
              },
              this->ds_unit());
      }
      ds[i / 8][i / 2 % 4] = ptx::pack<config.element>(x[0], x[1]);
      ds[i / 8][i / 2 % 4 + 1] = ptx::pack<config.element>(x[2], x[3]);
    }
    terms.end();
    this->arrive(&smem.weights_empty);
  }

  __device__ __forceinline__ void step(Fragment& dp, u32 phase, bool last) {
    Packed ds;
    const int stage = this->position.stage;
    if constexpr (!Policy::drops) this->arrive(&smem.dout_empty[stage]);
    form_ds(ds, dp, phase);
    this->store_ds(ds);
    this->wait_q(this->position);
    this->position.advance();
    if constexpr (config.makes_dkv) {
      this->hold(dk);
      this->hold(ds);
      wgmma::fence();
      this->issue_sums(dk, ds, smem.q[stage]);
      wgmma::commit();
    }
    this->publish_ds();
    // Why not earlier: until a product or the fence has consumed dS, loads of the row terms may be
    // in flight.
    if constexpr (Policy::drops) this->arrive(&smem.dout_empty[stage]);
    if (!last) {
      this->wait_dout(this->position);
      this->start_dp(dp, this->position.stage);
      wgmma::hold(dp);
      wgmma::fence();
      this->template issue_scores<config.head_dim_v>(dp, smem.v, smem.dout[this->position.stage]);
      wgmma::commit();
    }
    wgmma::wait<0>();
    wgmma::hold(dp);
    if constexpr (config.makes_dkv) {
      this->hold(dk);
      this->hold(ds);
    }
    this->arrive(&smem.q_empty[stage]);
  }

  __device__ __forceinline__ void run() {
    if constexpr (config.makes_dkv) this->clear(dk);
    if (plan.steps > 0) {
      Fragment dp;
      this->wait_v();
      this->wait_dout(this->position);
      this->start_dp(dp, 0);
      wgmma::hold(dp);
      wgmma::fence();
      this->template issue_scores<config.head_dim_v>(dp, smem.v, smem.dout[0]);
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(dp);
      int i = 0;
      for (; i < plan.steps - 1; ++i) step(dp, i & 1, false);
      step(dp, i & 1, true);
    }
    if constexpr (config.makes_dkv) finish();
  }

  __device__ __forceinline__ void finish() {
    float* others = nullptr;
    if (plan.pieces > 1) {
      const int before = this->await_pieces();
      others = this->piece_sums() + 64 * config.head_dim_v;
      if (before != plan.pieces - 1) {
        if (before == 0)
          this->template add_piece<true>(dk, others);
        else
          this->template add_piece<false>(dk, others);
        return this->end_piece();
      }
    }
    if (plan.steps > 0) this->wait_for_dq();
    if (params.store_dk) this->store(dk, others, params.dqk_scale, smem.k, params.dk_map);
    if (this->lane == 0) ptx::tma_store_wait_read<0>();
  }
};

}  // namespace tilewise::sm90
