// clang-format off
// This kernel computes forward attention on every GPU from sm_80 on: cp.async loads, mma.sync products, softmax in registers.
//
// Symbols. Q (seq_q x d), K (seq_k x d), V (seq_k x dv) of one (batch, head). A CTA owns block_q rows, of which each warp
// owns warp_rows = 16 * row_tiles. KV tiles of block_kv keys are visited from the last to the first, so that the tiles cut by
// a causal mask or by the end of the keys come first. c = scale * log2(e).
//
//   1. S = Q K_n^T                      mma.sync, Q from shared memory or from registers
//   2. the policy's terms apply (common/scores.cuh). Softcap: S = tanh(S * scale / cap), c = cap * log2(e)
//   3. in partial tiles: S[r, k] = -inf where a term hides k from r; the band hides keys outside [first_key(r), end_key(r))
//   4. in partial tiles, and the first that is not: m' = max(m, c * rowmax S), alpha = 2^(m - m'), m = m'; other tiles: m
//      stays, alpha = 1
//   5. P = 2^(c S - m)
//   6. in other tiles: where a thread's share of rowsum P exceeds h times its mean over the previous tiles (h = 5 for 64
//      keys, 5.75 for 32; or 2^15), its warp takes the true maximum now: alpha and m as in 4, P *= alpha (where P overflowed,
//      it is recomputed from step 1 on, with the K still in shared memory)
//   7. l = alpha l + rowsum P; then terms may drop weights
//   8. O = alpha O + round16(P) V_n     mma.sync, P in the registers in which the first product left it
//   9. terms may finish m and l; out = O / l, lse = ln2 * (m + log2 l); a row without keys gives out = 0, lse = -inf
//
// Roles. All warps do the same work: they copy their share of every tile, and attend for their own rows. A warp whose rows see
// nothing of a tile (the upper half of a diagonal) only copies. Two or more CTAs share an SM where they fit, so that one CTA's
// exponentials overlap with another's products.
// Why 32 rows per warp where registers allow: fragments of K and V are then read from shared memory once for both blocks of 16.
// With one block, products need 128 bytes per cycle on an A100, which is all of its bandwidth.
//
// Shared memory (struct Smem): Q, reused at the end to stage out; K and V, `stages` tiles.
//
// Synchronisation. A thread's own copies have arrived after cp_async_wait; __syncthreads then makes all threads' copies
// visible, and guarantees that all threads have read what the next copies overwrite.
//   stages  before                     the wait is for           and the barrier frees
//   2       step 1 of tile n           K_n, V_n                  the slots of tile n + 1 (for n - 1)
//   1       step 1 of tile n           K_n                       V (for V_n)
//           step 8 of tile n           V_n                       K, steps 1-6 done (for K_{n-1})
// Partial V tiles are scrubbed of inf and NaN between wait and barrier, because 0 * inf is NaN; each thread scrubs what it
// has copied itself. Rows that do see such a value have it added in step 9.
//
// Registers per thread: row_tiles * (block_kv / 2 for S and then P, dv / 2 for O, d / 4 for Q if it is kept there), out of
// 65536 / (threads * ctas_per_sm).
// clang-format on
#pragma once

#include "../common/nonfinite.cuh"
#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "config.cuh"
#include "tiles.cuh"

namespace tilewise::sm80 {

__device__ __forceinline__ bool within(const TileRange& range, int tile) {
  return tile >= range.begin && tile < range.end;
}

template <Config config, typename Policy, typename Extents>
struct Forward {
  static constexpr int row_tiles = config.row_tiles, block_kv = config.block_kv;
  static constexpr int block_q = config.block_q(), threads = config.threads();
  static constexpr int q_steps = config.q_in_registers ? config.head_dim / 16 : 1;
  using KCopy = TileCopy<block_kv, config.head_dim, threads>;
  using VCopy = TileCopy<block_kv, config.head_dim_v, threads>;

  using KernelParams = ParamsOf<Params, Policy, Extents>;

  const KernelParams& params;
  Smem<config, Extents>& smem;
  const WorkTile tile;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int row_begin = tile.q_tile * block_q;                 // of the CTA
  const int warp_row = row_begin + warp * config.warp_rows();  // of the warp

  const KCopy k_copy{params.k, batch_of<Extents>(params, tile.batch),
                     tile.head / params.heads_per_kv, params.head_dim};
  const VCopy v_copy{params.v, batch_of<Extents>(params, tile.batch),
                     tile.head / params.heads_per_kv, params.head_dim_v};
  const u32 q_lane =
      lane_by_rows(ptx::smem_address(smem.q)) + warp * panel_bytes(config.warp_rows());

  u32 q[row_tiles][q_steps][4];
  float s[row_tiles][block_kv / 2];
  float o[row_tiles][config.head_dim_v / 2];
  u32 p[row_tiles][block_kv / 16][4];
  Softmax softmax[row_tiles];
  bool settled = false;        // a full tile has given every row its maximum
  bool met_nonfinite = false;  // among the values that this thread has copied

  // The plan's sequence, once the plan is made.
  __device__ __forceinline__ auto sequence() const {
    return sequence_of<Extents>(params, smem.plan[warp]);
  }

  // The first key of the KV tile at a position of the plan. All other members of this class count
  // positions.
  __device__ __forceinline__ int first_key(int position) const {
    const WorkTile& tile = smem.plan[warp].tile;
    return tile_at<Extents>(params, tile.batch, tile.head, tile.q_tile, position) * block_kv;
  }

  __device__ __forceinline__ void load_k(int position, int slot) {
    const int start = sequence().k_start();
    k_copy.load(ptx::smem_address(smem.k[slot]), start + first_key(position),
                start + sequence().seq_k());
  }
  __device__ __forceinline__ void load_v(int position, int slot) {
    const int start = sequence().k_start();
    v_copy.load(ptx::smem_address(smem.v[slot]), start + first_key(position),
                start + sequence().seq_k());
  }
  __device__ __forceinline__ void load_q() {
    const int start = sequence().q_start(), batch = sequence().batch(tile.batch);
    TileCopy<block_q, config.head_dim, threads>{params.q, batch, tile.head, params.head_dim}.load(
        ptx::smem_address(smem.q), start + row_begin, start + sequence().seq_q());
  }

  __device__ __forceinline__ void read_q(int step, u32 (&fragment)[row_tiles][4]) {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      ptx::ldmatrix_x4(column_block<block_q>(q_lane, step) + t * panel_bytes(16), fragment[t]);
  }
  __device__ __forceinline__ void keep_q() {
    if constexpr (config.q_in_registers) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) {
#pragma unroll
        for (int t = 0; t < row_tiles; ++t)
          ptx::ldmatrix_x4(column_block<block_q>(q_lane, step) + t * panel_bytes(16), q[t][step]);
      }
    }
  }

  // Steps 1 and 2.
  template <int unrolled, bool q_kept>
  __device__ __forceinline__ void scores(int kv_tile, int slot) {
    const u32 k_lane = lane_by_columns(ptx::smem_address(smem.k[slot]));
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i) s[t][i] = 0.0f;
    }
#pragma unroll unrolled
    for (int step = 0; step < config.head_dim / 16; ++step) {
      u32 a[row_tiles][4];
      if constexpr (!q_kept) read_q(step, a);
#pragma unroll
      for (int pair = 0; pair < block_kv / 16; ++pair) {
        u32 b[4];
        ptx::ldmatrix_x4(column_block<block_kv>(k_lane, step) + pair * panel_bytes(16), b);
#pragma unroll
        for (int t = 0; t < row_tiles; ++t) {
          const auto& rows = q_kept ? q[t][q_kept ? step : 0] : a[t];
          ptx::mma_m16n8k16<config.element>(&s[t][8 * pair], rows, b[0], b[1]);
          ptx::mma_m16n8k16<config.element>(&s[t][8 * pair + 4], rows, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::apply(s[t], params, Unit{}, ElementCoords{*this, t, kv_tile});
  }

  // Where the scores of a block of rows lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Forward& kernel;
    const int t, position;

    __device__ __forceinline__ int row() const {
      return kernel.warp_row + t * 16 + kernel.lane / 4;
    }
    __device__ __forceinline__ int column() const {
      return kernel.first_key(position) + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.tile.batch; }
    __device__ __forceinline__ int head() const { return kernel.tile.head; }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };

  // Step 3.
  __device__ __forceinline__ void hide(int kv_tile) {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::hide(s[t], params, ElementCoords{*this, t, kv_tile});
  }

  __device__ __forceinline__ void observe(int kv_tile) {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::observe(s[t], params, ElementCoords{*this, t, kv_tile});
  }

  __device__ __forceinline__ void rescale(int t, const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[t][i] *= alpha[row_of(i)];
  }

  // Steps 5 to 7 against the current reference. Returns false if a weight overflowed, which loses
  // the scores; in that case nothing has been added up.
  __device__ __forceinline__ bool weigh_lazily() {
    float block[row_tiles][2];
    bool good = true;
    // Why & and not &&: a branch would save nothing here.
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      good &= softmax[t].lazy_block(s[t], Scaled{params.scale_log2}, block[t]);
    if (__builtin_expect(__any_sync(0xffffffffu, !good), 0)) {
      bool recoverable = true;
#pragma unroll
      for (int t = 0; t < row_tiles; ++t)
        recoverable &= block[t][0] < recoverable_bound & block[t][1] < recoverable_bound;
      if (__any_sync(0xffffffffu, !recoverable)) return false;
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        float alpha[2];
        softmax[t].raise(s[t], block[t], alpha);
        rescale(t, alpha);
      }
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) softmax[t].add(block[t]);
    return true;
  }

  // Steps 3 to 7 with the true maximum.
  __device__ __forceinline__ void weigh_exactly(int kv_tile, bool partial) {
    if (partial) hide(kv_tile);
    observe(kv_tile);
    const bool first = softmax[0].blocks == 0.0f;  // there is no O to rescale yet
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      float alpha[2];
      softmax[t].exact_block(s[t], params.scale_log2, alpha);
      if (!first) rescale(t, alpha);
    }
  }

  // Steps 1 to 7.
  __device__ __forceinline__ void weigh(int kv_tile, int slot, bool partial) {
    bool exact = partial || !settled;
    // All blocks of rows have equal counts; making this explicit lets the compiler keep one count.
#pragma unroll
    for (int t = 1; t < row_tiles; ++t) softmax[t].blocks = softmax[0].blocks;
    scores<config.head_dim / 16, config.q_in_registers>(kv_tile, slot);
    if (!exact) observe(kv_tile);
    if (!exact && __builtin_expect(!weigh_lazily(), 0)) {
      // Why it is not unrolled: a second copy of the products would cost the loop registers.
      scores<1, false>(kv_tile, slot);
      exact = true;
    }
    if (exact) weigh_exactly(kv_tile, partial);
    settled = settled || !partial;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      Policy::drop(s[t], params, ElementCoords{*this, t, kv_tile});
      pack_block<config.element>(s[t], p[t]);
    }
  }

  // Step 8.
  __device__ __forceinline__ void add_values(int slot) {
    const u32 v_lane = lane_by_rows(ptx::smem_address(smem.v[slot]));
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < config.head_dim_v / 16; ++pair) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(column_block<block_kv>(v_lane, pair) + step * panel_bytes(16), b);
#pragma unroll
        for (int t = 0; t < row_tiles; ++t) {
          ptx::mma_m16n8k16<config.element>(&o[t][8 * pair], p[t][step], b[0], b[1]);
          ptx::mma_m16n8k16<config.element>(&o[t][8 * pair + 4], p[t][step], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void scrub(int slot) {
    met_nonfinite =
        VCopy::template scrub<config.element>(ptx::smem_address(smem.v[slot])) || met_nonfinite;
  }

  // Returns the tiles that the CTA touches. Why the rest of the plan goes to shared memory: the
  // products need the registers.
  __device__ __forceinline__ TileRange make_plan() {
    if constexpr (HasTileMap<Extents>) {
      const QueryTiles listed = listed_tiles<Extents>(params, tile.batch, tile.head, tile.q_tile);
      if (lane == 0) {
        const auto record = Extents::find(params, tile.batch);
        const int rows = sequence_of<Extents>(params, record).seq_q();
        const TileRange own = warp_row < rows ? listed.touched : TileRange{0, 0};
        smem.plan[warp] = {record, tile, own, listed.full, listed.full};
      }
      __syncwarp();
      return listed.touched;
    }
    const auto record = Extents::find(params, tile.batch);
    const auto sequence = sequence_of<Extents>(params, record);
    const Band band = sequence.band();
    const int row_end = min_int(row_begin + block_q, sequence.seq_q());
    const int warp_end = min_int(warp_row + config.warp_rows(), sequence.seq_q());
    TileRange touched{0, 0};
    if (has_rows<Extents>(row_begin, sequence.seq_q()))
      touched = touched_tiles(band, row_begin, row_end, block_kv);
    if (lane == 0) {
      TileRange all = touched, full = full_tiles(band, row_begin, row_end, block_kv, touched);
      narrow_tiles<Policy>(params, tile.batch, row_begin, row_end, block_kv, all, full);
      WarpPlan<Extents> plan{record, tile, {0, 0}, {0, 0}, full};
      if (warp_row < warp_end) {
        plan.own = touched_tiles(band, warp_row, warp_end, block_kv);
        plan.own_full = full_tiles(band, warp_row, warp_end, block_kv, plan.own);
        narrow_tiles<Policy>(params, tile.batch, warp_row, warp_end, block_kv, plan.own,
                             plan.own_full);
      }
      smem.plan[warp] = plan;
    }
    TileRange none{0, 0};
    narrow_tiles<Policy>(params, tile.batch, row_begin, row_end, block_kv, touched, none);
    __syncwarp();
    return touched;
  }

  __device__ __forceinline__ void attend() {
    const WarpPlan<Extents>& plan = smem.plan[warp];
    const TileRange touched = make_plan();
    if (touched.empty()) return;
    load_q();
    load_k(touched.end - 1, 0);
    if constexpr (config.stages == 2) load_v(touched.end - 1, 0);
    ptx::cp_async_commit();
    int slot = 0;
    for (int n = touched.end - 1; n >= touched.begin; --n) {
      const bool last = n == touched.begin;
      ptx::cp_async_wait<0>();
      if (config.stages == 2 && !within(plan.full, n)) scrub(slot);
      __syncthreads();
      if (config.q_in_registers && n == touched.end - 1) keep_q();
      if constexpr (config.stages == 2) {
        if (!last) {
          load_k(n - 1, slot ^ 1);
          load_v(n - 1, slot ^ 1);
        }
      } else {
        load_v(n, 0);
      }
      ptx::cp_async_commit();
      const bool mine = within(plan.own, n);
      if (mine) weigh(n, slot, !within(plan.own_full, n));
      if constexpr (config.stages == 1) {
        ptx::cp_async_wait<0>();
        if (!within(plan.full, n)) scrub(0);
        __syncthreads();
        if (!last) load_k(n - 1, 0);
        ptx::cp_async_commit();
      }
      if (mine) add_values(slot);
      if constexpr (config.stages == 2) slot ^= 1;
    }
  }

  // Adds the values of V that are inf or NaN, which were scrubbed in partial tiles, to the rows of
  // out that see them. Why in global memory: this is rare, and here it needs no registers that the
  // loop could use.
  __device__ __forceinline__ void restore_nonfinite(const WorkTile& tile) {
    __syncwarp();
    const Band band = sequence().band();
    const int batch = sequence().batch(tile.batch), k_start = sequence().k_start();
    const int end_row = min_int(warp_row + config.warp_rows(), sequence().seq_q());
#pragma unroll 1
    for (int row = warp_row; row < end_row; ++row) {
      u16* out = params.out.row(batch, tile.head, sequence().q_start() + row);
#pragma unroll 1
      for (int column = lane; column < params.head_dim_v; column += 32) {
        float sum = 0.0f;
        tilewise::restore_nonfinite(band.first_key(row), band.end_key(row), [&](int key) {
          if (!Policy::sees(params, tile.batch, tile.head, row, key)) return;
          const u32 value =
              params.v.row(batch, tile.head / params.heads_per_kv, k_start + key)[column];
          if (nonfinite_bits<config.element>(value) & 0x8000u)
            sum += ptx::unpack_low<config.element>(value);
        });
        if (sum != 0.0f)
          out[column] = static_cast<u16>(
              ptx::pack<config.element>(sum + ptx::unpack_low<config.element>(out[column]), 0.0f));
      }
    }
  }

  // Step 9.
  __device__ __forceinline__ void finish() {
    const WorkTile tile = smem.plan[warp].tile;
    constexpr float ln2 = 0.693147180559945309f;
    const int batch = sequence().batch(tile.batch);
    float* lse = params.lse + first_row_of_head(params, sequence(), batch, params.heads, tile.head);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      float inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + t * 16 + lane / 4 + 8 * r;
        float total = quad_sum(softmax[t].sum[r]);
        const ElementCoords place{*this, t, 0};
        const float factor =
            Policy::finish_row(params, place, r, softmax[t].reference[r], total, 1.0f) *
            Policy::kept_weight(params, place);
        inverse[r] = total == 0.0f ? 0.0f : ptx::rcp(total) * factor;
        if (params.lse != nullptr && lane % 4 == 0 && row < sequence().seq_q())
          lse[row] = total == 0.0f ? -infinity : (softmax[t].reference[r] + ptx::lg2(total)) * ln2;
      }
      rescale(t, inverse);
    }
    store_rows<config.element, row_tiles, config.head_dim_v, block_q>(
        ptx::smem_address(smem.q) + warp * panel_bytes(config.warp_rows()), o,
        params.out.row(batch, tile.head, sequence().q_start()), params.out.seq_stride, warp_row,
        sequence().seq_q(), params.head_dim_v);
    if (__builtin_expect(__syncthreads_or(met_nonfinite), 0)) restore_nonfinite(tile);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      softmax[t].reset();
#pragma unroll
      for (int i = 0; i < config.head_dim_v / 2; ++i) o[t][i] = 0.0f;
    }
    attend();
    finish();
  }
};

template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ void forward(const ParamsOf<Params, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto run = [&](const WorkTile& tile) {
    Forward<config, Policy, Extents>{params, *reinterpret_cast<Smem<config, Extents>*>(smem_bytes),
                                     tile}
        .run();
  };
  if constexpr (HasWorkTable<Extents>) {
    const auto found = Extents::q_work(params, params.heads, config.block_q(), params.longest_first,
                                       static_cast<int>(blockIdx.x));
    if (found.exists()) run(found.tile);
  } else {
    const Schedule schedule{params.heads, params.batch * params.heads, params.q_tiles,
                            params.sections, params.longest_first};
    run(schedule.tile(blockIdx.x));
  }
}

}  // namespace tilewise::sm80
