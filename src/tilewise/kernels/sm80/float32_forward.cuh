// clang-format off
// This kernel computes forward attention in float32 on every GPU from sm_80 on, with cp.async loads and TF32 products by
// mma.sync, three for each float32 product.
//
// Symbols. Q (seq_q x d), K (seq_k x d), V (seq_k x dv) of one (batch, head). A CTA owns block_q rows, of which each warp
// owns warp_rows = 16 * row_tiles. KV tiles of block_kv keys are visited from the last to the first, so that the tiles cut by
// a causal mask or by the end of the keys come first. c = scale * log2(e).
//
//   1. S = Q K_n^T                      three products (float32_products.cuh), Q from shared memory; six for large scores
//                                       that matter (float32_precise.cuh), after step 3
//   2. the policy's terms apply (common/scores.cuh). Softcap: S = tanh(S * scale / cap), c = cap * log2(e)
//   3. in partial tiles: S[r, k] = -inf where a term hides k from r; the band hides keys outside [first_key(r), end_key(r))
//   4. m' = max(m, rowmax S), alpha = 2^(c (m - m')), m = m'
//   5. P = 2^(c (S - m))                a maximum is kept as a score and is never multiplied by c itself: the product would
//                                       be off by half a unit in the last place, which for large scores is more than a factor
//   6. l = alpha l + rowsum P; then terms may drop weights
//   7. F = P V_n                        32 columns at a time, P in the registers in which the first product left it
//   8. O = alpha O + F                  outside of the tensor core, which would truncate the sum
//   9. terms may finish m and l; out = O / l, lse = scale m + ln l, both rounded: where one key has all the weight of a row,
//      lse is its score, and the backward finds a weight of 1; a row without keys gives out = 0, lse = -inf
//
// Why the true maximum is taken in every tile, where the 16-bit kernel is lazy: step 8 multiplies by alpha at no extra cost.
//
// Roles, shared memory and synchronisation are those of forward.cuh.
//   stages  before                     the wait is for           and the barrier frees
//   2       step 1 of tile n           K_n, V_n                  the slots of tile n + 1 (for n - 1)
//   1       step 1 of tile n           K_n                       V (for V_n)
//           step 7 of tile n           V_n                       K, steps 1-6 done (for K_{n-1})
//
// The ends of the range. The low parts of numbers below 2^-113 have fewer bits than they need, sums of values above 2^96 may
// overflow, and inf has no low part: its columns of out become NaN, also in rows that do not see it, because 0 * inf is NaN.
//   Q    where all of a CTA's rows are far from 1, Q and K are multiplied by opposite powers of two as they arrive. S does
//        not change.
//   V    where O is not finite, or tiny, the CTA starts over, with V multiplied by a power of two and scrubbed of inf and NaN
//        as it arrives. Rows that see such a value have it added in step 9.
// All this is done in shared memory between wait and barrier, by each thread on what it has copied itself.
//
// Registers per thread: row_tiles * (block_kv for S and its small terms, then block_kv / 2 for P and 32 for F; dv / 2 for O),
// out of 65536 / (threads * ctas_per_sm).
// clang-format on
#pragma once

#include "../common/nonfinite.cuh"
#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "float32_config.cuh"
#include "float32_precise.cuh"
#include "float32_range.cuh"

namespace tilewise::sm80 {

__device__ __forceinline__ bool is_within(const TileRange& range, int tile) {
  return tile >= range.begin && tile < range.end;
}

// The magnitudes of Q, and of O, beyond which a factor is needed; and the factors.
constexpr float small_queries = 0x1p-60f, large_queries = 0x1p60f, query_factor = 0x1p64f;
constexpr float small_sums = 0x1p-90f;
constexpr float small_value_factor = 0x1p64f, large_value_factor = 0x1p-32f;

// 1 / x for x of ordinary magnitude, accurate to half a unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  const float near = ptx::rcp(x);
  return fmaf(near, fmaf(-x, near, 1.0f), near);
}

template <Float32Config config, typename Policy, typename Extents>
struct Float32Forward {
  static constexpr bool exact = config.exact;
  static constexpr int row_tiles = config.row_tiles, block_kv = config.block_kv;
  static constexpr int block_q = config.block_q(), threads = config.threads();
  static constexpr int value_panels = config.head_dim_v / float_panel;
  static constexpr int panel_sums = float_panel / 2;  // numbers per lane for 16 rows of a panel
  using QCopy = TileCopy<block_q, halves(config.head_dim), threads>;
  using KCopy = TileCopy<block_kv, halves(config.head_dim), threads>;
  using VCopy = TileCopy<block_kv, halves(config.head_dim_v), threads>;

  const ParamsOf<Float32Params, Policy, Extents>& params;
  Float32Smem<config, Extents>& smem;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const u32 q_lane =
      lane_by_rows(ptx::smem_address(smem.q)) + warp * panel_bytes(config.warp_rows());

  float p[row_tiles][block_kv / 2];  // S, then P
  float o[row_tiles][config.head_dim_v / 2];
  float row_max[row_tiles][2], sum[row_tiles][2];  // m; this thread's share of l
  float alpha[row_tiles][2];

  // Why not members: the products need the registers.
  __device__ __forceinline__ const WorkTile& tile() const { return smem.plan[warp].tile; }
  __device__ __forceinline__ int row_begin() const { return tile().q_tile * block_q; }
  __device__ __forceinline__ int warp_row() const {
    return row_begin() + warp * config.warp_rows();
  }

  __device__ __forceinline__ auto sequence() const {
    return sequence_of<Extents>(params, smem.plan[warp]);
  }

  // The rows of one head, from `start` on.
  static __device__ __forceinline__ Tensor head_of(const Tensor& tensor, int batch, int head,
                                                   int start) {
    return {tensor.row(batch, head, start), 0, 0, tensor.seq_stride};
  }
  __device__ __forceinline__ void load_k(int kv_tile, int slot) {
    KCopy{smem.keys, 0, 0, params.head_dim}.load(ptx::smem_address(smem.k[slot]),
                                                 kv_tile * block_kv, sequence().seq_k());
  }
  __device__ __forceinline__ void load_v(int kv_tile, int slot) {
    VCopy{smem.values, 0, 0, params.head_dim_v}.load(ptx::smem_address(smem.v[slot]),
                                                     kv_tile * block_kv, sequence().seq_k());
  }
  __device__ __forceinline__ void load_q() {
    QCopy{smem.queries, 0, 0, params.head_dim}.load(ptx::smem_address(smem.q), row_begin(),
                                                    sequence().seq_q());
  }

  // Steps 1 and 2.
  __device__ __forceinline__ void scores(int kv_tile, int slot) {
    u32 k_lane = lane_by_columns(ptx::smem_address(smem.k[slot])), rows = q_lane;
    Sums<exact, block_kv / 2> sums[row_tiles];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      sums[t].clear();
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i) p[t][i] = 0.0f;
    }
    // Why not all panels of the class: the others are zero. Moreover, the assembler does not know
    // the number of panels, so it does not unroll the loop beyond the instruction cache.
    const int panels = ceil_div(params.head_dim, panel_columns);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
      for (int step = 0; step < float_panel / 8; ++step) {
        PartsA<exact> a[row_tiles];
#pragma unroll
        for (int t = 0; t < row_tiles; ++t) load_a<block_q>(rows + t * panel_bytes(16), step, a[t]);
#pragma unroll
        for (int pair = 0; pair < block_kv / 16; ++pair) {
          PartsB<exact> b[2];
          load_b_along<block_kv>(k_lane + pair * panel_bytes(16), step, b);
#pragma unroll
          for (int t = 0; t < row_tiles; ++t) sums[t].add(2 * pair, a[t], b);
        }
      }
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) sums[t].drain(p[t]);
      rows += panel_bytes(block_q);
      k_lane += panel_bytes(block_kv);
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i) p[t][i] += sums[t].total(i);
      Policy::apply(p[t], params, Unit{}, ElementCoords{*this, t, kv_tile});
    }
  }

  // Where the scores of a block of rows lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Float32Forward& kernel;
    const int t, kv_tile;

    __device__ __forceinline__ int row() const {
      return kernel.warp_row() + t * 16 + kernel.lane / 4;
    }
    __device__ __forceinline__ int column() const {
      return kv_tile * block_kv + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.tile().batch; }
    __device__ __forceinline__ int head() const { return kernel.tile().head; }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };

  // Step 3.
  __device__ __forceinline__ void hide(int kv_tile) {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::hide(p[t], params, ElementCoords{*this, t, kv_tile});
  }

  // Whether the warp has large scores that matter.
  __device__ __forceinline__ bool has_large_scores(const float (&top)[row_tiles][2]) const {
    bool found = false;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(row_max[t][r], top[t][r]) * params.scale;
        found |=
            fabsf(next) > large_score - far_below && top[t][r] * params.scale > next - far_below;
      }
    }
    return __any_sync(0xffffffffu, found);
  }
  // Refines scores as float32_precise.cuh describes.
  __device__ __forceinline__ void refine(int slot) {
    const int panels = ceil_div(params.head_dim, panel_columns);
    const u32 k_lane = lane_by_columns(ptx::smem_address(smem.k[slot]));
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int pair = 0; pair < block_kv / 16; ++pair) {
        float better[8];
        multiply_precisely<Low::of_a, block_q, block_kv>(
            q_lane + t * panel_bytes(16), k_lane + pair * panel_bytes(16), panels, better);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& score = p[t][8 * pair + i];
          score = refined(score, better[i], params.scale);
        }
      }
    }
  }

  // Steps 4 to 6.
  __device__ __forceinline__ void weigh(int slot) {
    float tops[row_tiles][2];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) row_maxima(p[t], tops[t]);
    if constexpr (exact && !Policy::transforms) {
      if (__builtin_expect(has_large_scores(tops), 0)) {
        refine(slot);
#pragma unroll
        for (int t = 0; t < row_tiles; ++t) row_maxima(p[t], tops[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      float (&top)[2] = tops[t], block[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(row_max[t][r], top[r]);
        // Why: a row that has seen no key keeps -inf; subtracting 0 instead gives p = 0 rather than
        // NaN.
        top[r] = next == -infinity ? 0.0f : next;
        alpha[t][r] = ptx::ex2((row_max[t][r] - top[r]) * params.scale_log2);
        row_max[t][r] = next;
      }
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i)
        p[t][i] = ptx::ex2((p[t][i] - top[row_of(i)]) * params.scale_log2);
      row_sums(p[t], block);
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[t][r] = fmaf(sum[t][r], alpha[t][r], block[r]);
    }
  }

  // Steps 7 and 8.
  __device__ __forceinline__ void add_values(int slot) {
    const u32 v_lane = lane_across(ptx::smem_address(smem.v[slot]));
#pragma unroll
    for (int panel = 0; panel < value_panels; ++panel) {
      Sums<exact, panel_sums> sums[row_tiles];
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) sums[t].clear();
      const u32 half = ptx::load_shared_again(ptx::smem_address(&smem.half));
      // This is never true. Why it is here: the assembler does not know that, and finishes one
      // panel before it begins the next.
      if (half == 0) break;
#pragma unroll
      for (int step = 0; step < block_kv / 8; ++step) {
        PartsB<exact> b[4];
        load_b_across<block_kv>(v_lane, step, panel, half, b);
#pragma unroll
        for (int t = 0; t < row_tiles; ++t) {
          PartsA<exact> a;
          accumulator_as_a(&p[t][4 * step], config.keeps_weight_parts() ? tf32_half : half, a);
          sums[t].add(0, a, b);
        }
      }
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
        for (int i = 0; i < panel_sums; ++i) {
          float& x = o[t][panel * panel_sums + i];
          x = fmaf(x, alpha[t][row_of(i)], sums[t].total(i));
        }
      }
    }
  }

  // Steps 1 to 6.
  __device__ __forceinline__ void weigh_tile(int kv_tile, int slot, bool partial) {
    scores(kv_tile, slot);
    if (partial) hide(kv_tile);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::observe(p[t], params, ElementCoords{*this, t, kv_tile});
    weigh(slot);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
      Policy::drop(p[t], params, ElementCoords{*this, t, kv_tile});
  }

  // Chooses the factor of Q as the head of this file describes. Invariant: this thread's copies of
  // Q have arrived.
  __device__ __forceinline__ void choose_key_factor() {
    float top = 0.0f;
    change_floats<QCopy, block_q>(ptx::smem_address(smem.q), [&](u32 x) {
      top = fmaxf(top, is_nonfinite(x) ? 0.0f : fabsf(__uint_as_float(x)));
      return x;
    });
    const bool is_small = !__syncthreads_or(top > small_queries);
    const bool is_large = __syncthreads_or(top > large_queries);
    if (!is_small && !is_large) return;
    const float factor = is_large ? query_factor : 1.0f / query_factor;
    scale_floats<QCopy, block_q>(ptx::smem_address(smem.q), 1.0f / factor);
    if (threadIdx.x == 0) smem.key_factor = factor;
    __syncthreads();
  }

  __device__ __forceinline__ void mend_keys(int slot) {
    if (__builtin_expect(smem.key_factor != 1.0f, 0))
      scale_floats<KCopy, block_kv>(ptx::smem_address(smem.k[slot]), smem.key_factor);
  }
  __device__ __forceinline__ void mend_values(int slot) {
    const float factor = smem.value_factor;
    if (__builtin_expect(factor != 1.0f, 0))
      change_floats<VCopy, block_kv>(ptx::smem_address(smem.v[slot]), [=](u32 x) {
        return is_nonfinite(x) ? 0u : __float_as_uint(__uint_as_float(x) * factor);
      });
  }

  // The factor that V needs, once O is known as computed without a factor.
  __device__ __forceinline__ float needed_value_factor() {
    float top = 0.0f;
    bool overflows = false;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (is_nonfinite(__float_as_uint(quad_sum(sum[t][r])))) continue;  // not caused by V
#pragma unroll
        for (int i = 0; i < config.head_dim_v / 2; ++i) {
          if (row_of(i) != r) continue;
          overflows = overflows || !(fabsf(o[t][i]) < infinity);
          top = fmaxf(top, fabsf(o[t][i]));
        }
      }
    }
    if (__syncthreads_or(overflows)) return large_value_factor;
    const bool are_zero = !__syncthreads_or(top > 0.0f);
    return __syncthreads_or(top >= small_sums) || are_zero ? 1.0f : small_value_factor;
  }

  __device__ __forceinline__ void make_plan(const WorkTile& tile) {
    const int row_begin = tile.q_tile * block_q;
    const int warp_row = row_begin + warp * config.warp_rows();
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
    if (threadIdx.x == 0) {
      TileRange none{0, 0};
      narrow_tiles<Policy>(params, tile.batch, row_begin, row_end, block_kv, touched, none);
      smem.touched = touched;
      const int batch = sequence.batch(tile.batch), head_kv = tile.head / params.heads_per_kv;
      smem.queries = head_of(params.q, batch, tile.head, sequence.q_start());
      smem.keys = head_of(params.k, batch, head_kv, sequence.k_start());
      smem.values = head_of(params.v, batch, head_kv, sequence.k_start());
      smem.half = tf32_half;
    }
  }

  __device__ __forceinline__ void attend() {
    const WarpPlan<Extents>& plan = smem.plan[warp];
    const TileRange touched = smem.touched;
    if (touched.empty()) return;
    load_q();
    load_k(touched.end - 1, 0);
    if constexpr (config.stages == 2) load_v(touched.end - 1, 0);
    ptx::cp_async_commit();
    int slot = 0;
    for (int n = touched.end - 1; n >= touched.begin; --n) {
      const bool last = n == touched.begin;
      ptx::cp_async_wait<0>();
      if (n == touched.end - 1) choose_key_factor();
      mend_keys(slot);
      if constexpr (config.stages == 2) mend_values(slot);
      __syncthreads();
      if constexpr (config.stages == 2) {
        if (!last) {
          load_k(n - 1, slot ^ 1);
          load_v(n - 1, slot ^ 1);
        }
      } else {
        load_v(n, 0);
      }
      ptx::cp_async_commit();
      const bool mine = is_within(plan.own, n);
      if (mine) weigh_tile(n, slot, !is_within(plan.own_full, n));
      if constexpr (config.stages == 1) {
        ptx::cp_async_wait<0>();
        mend_values(0);
        __syncthreads();
        if (!last) load_k(n - 1, 0);
        ptx::cp_async_commit();
      }
      if (mine) add_values(slot);
      if constexpr (config.stages == 2) slot ^= 1;
    }
  }

  __device__ __forceinline__ float* out_row(int row) const {
    const int batch = sequence().batch(tile().batch);
    return reinterpret_cast<float*>(params.out.row(batch, tile().head, sequence().q_start() + row));
  }

  // Adds the values of V that are inf or NaN to the rows of out that see them. Why in global
  // memory: this is rare, and here it needs no registers that the loop could use. Invariant: rows
  // whose weights are NaN themselves stay NaN.
  __device__ __forceinline__ void restore_nonfinite(const bool (&rows_are_nan)[row_tiles][2]) {
    __syncwarp();
    const int warp_row = this->warp_row();
    const Band band = sequence().band();
    const int end_row = min_int(warp_row + config.warp_rows(), sequence().seq_q());
    u32 bad_rows = 0;  // of the warp
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 lanes = __ballot_sync(0xffffffffu, rows_are_nan[t][r]);
#pragma unroll
        for (int i = 0; i < 8; ++i) bad_rows |= (lanes >> 4 * i & 1u) << (t * 16 + r * 8 + i);
      }
    }
#pragma unroll 1
    for (int row = warp_row; row < end_row; ++row) {
      if (bad_rows >> (row - warp_row) & 1u) continue;
      float* out = out_row(row);
#pragma unroll 1
      for (int column = lane; column < params.head_dim_v / 2; column += 32) {
        float total = 0.0f;
        tilewise::restore_nonfinite(band.first_key(row), band.end_key(row), [&](int key) {
          if (!Policy::sees(params, tile().batch, tile().head, row, key)) return;
          const float value = reinterpret_cast<const float*>(smem.values.row(0, 0, key))[column];
          if (is_nonfinite(__float_as_uint(value))) total += value;
        });
        if (total != 0.0f) out[column] = total;
      }
    }
  }

  // Step 9. A lane has the columns 8 (lane % 4) to 8 (lane % 4) + 7 of every panel.
  __device__ __forceinline__ void finish() {
    const int warp_row = this->warp_row();
    const int batch = sequence().batch(tile().batch);
    float* lse =
        params.lse + first_row_of_head(params, sequence(), batch, params.heads, tile().head);
    const float factor = smem.value_factor;
    bool rows_are_nan[row_tiles][2];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + t * 16 + lane / 4 + 8 * r;
        float total = quad_sum(sum[t][r]);
        const ElementCoords place{*this, t, 0};
        const float row_factor =
            Policy::finish_row(params, place, r, row_max[t][r], total, params.scale_log2) *
            Policy::kept_weight(params, place);
        const float inverse = total == 0.0f ? 0.0f : reciprocal(total) * row_factor;
        rows_are_nan[t][r] = total != total;
        const bool exists = row < sequence().seq_q();
        if (exists && params.lse != nullptr && lane % 4 == 0)
          lse[row] = total == 0.0f ? -infinity
                                   : __fadd_rn(__fmul_rn(row_max[t][r], params.scale), logf(total));
        float* out = out_row(row) + 8 * (lane % 4);
#pragma unroll
        for (int half = 0; half < 2 * value_panels; ++half) {
          const int column = half / 2 * float_panel + half % 2 * 4;
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = o[t][half / 2 * panel_sums + i * 4 + 2 * r + half % 2] * inverse;
            if (factor != 1.0f) x[i] *= 1.0f / factor;
          }
          if (exists && 2 * (column + 8 * (lane % 4)) < params.head_dim_v)
            *reinterpret_cast<float4*>(out + column) = float4{x[0], x[1], x[2], x[3]};
        }
      }
    }
    if (__builtin_expect(factor == large_value_factor, 0)) restore_nonfinite(rows_are_nan);
  }

  // Runs a second time, with another factor of V, where one is needed.
  __device__ __forceinline__ void run(const WorkTile& tile) {
    float value_factor = 1.0f;
    make_plan(tile);
    do {
      __syncthreads();
      if (threadIdx.x == 0) {
        smem.key_factor = 1.0f;
        smem.value_factor = value_factor;
      }
      __syncthreads();
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        row_max[t][0] = row_max[t][1] = -infinity;
        sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < config.head_dim_v / 2; ++i) o[t][i] = 0.0f;
      }
      attend();
      value_factor = smem.value_factor != 1.0f ? 1.0f : needed_value_factor();
    } while (__builtin_expect(value_factor != 1.0f, 0));
    finish();
  }
};

template <Float32Config config, typename Policy, typename Extents>
__device__ __forceinline__ void float32_forward(
    const ParamsOf<Float32Params, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const Schedule schedule{params.heads, params.batch * params.heads, params.q_tiles,
                          params.sections, params.longest_first};
  Float32Forward<config, Policy, Extents>{
      params, *reinterpret_cast<Float32Smem<config, Extents>*>(smem_bytes)}
      .run(schedule.tile(blockIdx.x));
}

}  // namespace tilewise::sm80
