// The consumer warpgroups of the float32 forward. For steps, roles and barriers see
// float32_forward.cuh.
#pragma once

#include "../common/nonfinite.cuh"
#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "float32_config.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90::float32 {

using ptx::u32;
using ptx::u64;

// Splits x into its parts, in the A layout of the second product.
template <int parts, Element element, int count>
__device__ __forceinline__ void split_weights(const float (&x)[count],
                                              u32 (&packed)[parts][count / 8][4]) {
  constexpr float unit = 1 << weight_shift(element);
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    float low = x[i] * unit, high = x[i + 1] * unit;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const u32 pair = ptx::pack<element>(low, high);
      packed[part][i / 8][i / 2 % 4] = pair;
      low -= ptx::unpack_low<element>(pair);
      high -= ptx::unpack_high<element>(pair);
    }
  }
}

struct BarrierId {
  static constexpr int pingpong = 1;  // + warpgroup
};

template <Config config, typename Policy, typename Extents>
struct Consumer {
  static constexpr Element element = config.part_element();
  static constexpr int parts = config.parts, block_kv = config.block_kv;
  static constexpr int columns = config.value_columns, slices = config.head_dim_v / columns;
  static_assert(slices * columns == config.head_dim_v);
  static_assert(slices == 1 || columns % panel_columns == 0);
  // A value product covers `span` keys before it leaves the tensor core. Why: sums in the tensor
  // core lose half a unit in the last place per step, always towards zero.
  static constexpr int span = min_int(block_kv, 64), spans = block_kv / span;
  static constexpr int pieces = slices * spans;
  using ScoreProduct = wgmma::Product<block_kv, element>;
  using ValueProduct = wgmma::Product<columns, element>;

  const ParamsOf<Params, Policy, Extents>& params;
  Smem<config, Extents>& smem;
  const Plan<Extents>& plan;
  const int warpgroup;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  const int row_begin = plan.row_begin + warpgroup * 64;

  const u32 q_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.q[warpgroup]), 16);
  const u32 k_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.k), 16);
  const u32 v_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.v), panel_bytes(block_kv));

  RingPosition<config.k_stages> k_position{0};
  RingPosition<config.v_stages> v_position{0};

  float s[block_kv / 2];
  u32 p[parts][block_kv / 16][4];
  float fresh[columns / 2];        // a piece of P V, for one tile alone
  float o[config.head_dim_v / 2];  // in units of 2^out_exponent
  float row_max[2], sum[2];  // largest score so far, unscaled; this thread's share of the sum of p
  float keep[2], take[2];    // factors of o and fresh when they are added up
  int q_shift;

  __device__ __forceinline__ void arrive(u64* barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Why they take turns: warpgroups in lockstep would run their softmax at the same time and leave
  // the tensor pipe idle. Invariant: each warpgroup takes one turn for every tile that the CTA
  // touches.
  __device__ __forceinline__ void await_pingpong() {
    if constexpr (config.pingpong) ptx::barrier_sync<256>(BarrierId::pingpong + warpgroup);
  }
  __device__ __forceinline__ void pass_pingpong() {
    static_assert(!config.pingpong || config.consumers == 2);
    if constexpr (config.pingpong) ptx::barrier_arrive<256>(BarrierId::pingpong + 1 - warpgroup);
  }

  __device__ __forceinline__ int row_of_thread(int r) const {
    return row_begin + warp * 16 + lane / 4 + 8 * r;
  }

  // Step 1.
  __device__ __forceinline__ void issue_scores() {
    constexpr int k_part = sizeof(smem.k[0][0]) >> 4, q_part = sizeof(smem.q[0][0]) >> 4;
    // Why `hold`: the compiler would otherwise keep the descriptors of all steps in registers.
    u32 low[2] = {q_descriptor, k_descriptor + k_position.stage * u32{sizeof(smem.k[0]) >> 4}};
    // Why a loop for six terms: in straight-line products the assembler would also keep all
    // descriptors in registers.
#pragma unroll parts == 3 ? 1 : term_count(parts)
    for (int i = 0; i < term_count(parts); ++i) {
      wgmma::hold(low);
      issue_score_term(low[0] + term(parts, i).a * q_part, low[1] + term(parts, i).b * k_part,
                       i != 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void issue_score_term(u32 q_low, u32 k_low, bool accumulate) {
    constexpr int k_panel = panel_bytes(block_kv) >> 4, q_panel = panel_bytes(64) >> 4;
#pragma unroll
    for (int step = 0; step < config.head_dim / 16; ++step)
      ScoreProduct::multiply(
          s, wgmma::descriptor(q_low + step / 4 * q_panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(k_low + step / 4 * k_panel + step % 4 * 2, swizzle_atom_bytes),
          accumulate || step != 0);
  }

  // Step 7, for one span of keys and columns [slice * columns, (slice + 1) * columns).
  __device__ __forceinline__ void issue_values(int piece) {
    const int slice = piece / spans, first_step = piece % spans * (span / 16);
    constexpr int v_part = sizeof(smem.v[0][0]) >> 4;
    u32 low[1] = {v_descriptor + v_position.stage * u32{sizeof(smem.v[0]) >> 4} +
                  slice * (columns / panel_columns) * (panel_bytes(block_kv) >> 4)};
#pragma unroll
    for (int i = 0; i < term_count(parts); ++i) {
      wgmma::hold(low);
#pragma unroll
      for (int step = 0; step < span / 16; ++step)
        ValueProduct::multiply(
            fresh, p[term(parts, i).a][first_step + step],
            wgmma::descriptor(low[0] + term(parts, i).b * v_part +
                                  (first_step + step) * (2 * swizzle_atom_bytes >> 4),
                              swizzle_atom_bytes),
            i != 0 || step != 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void hold_weights() {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int step = 0; step < block_kv / 16; ++step) wgmma::hold(p[part][step]);
    }
  }

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  // Where this thread's scores lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Consumer& kernel;
    const int kv_tile;

    __device__ __forceinline__ int row() const { return kernel.row_of_thread(0); }
    __device__ __forceinline__ int column() const {
      return kv_tile * block_kv + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.plan.tile.batch; }
    __device__ __forceinline__ int head() const { return kernel.plan.tile.head; }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };

  // Steps 2 to 6: s -> p, split.
  __device__ __forceinline__ void weigh(int kv_tile, int k_exponent, int v_exponent) {
    const int score_shift = min_int(q_shift + shift_of(k_exponent, element), 240);
    float scale = params.scale_log2, score_unit = 1.0f;
    if constexpr (Policy::transforms) {
      Policy::apply(s, params, PowerOfTwo(-score_shift), ElementCoords{*this, kv_tile});
    } else {
      // Why at least the smallest normal number: 0 * -inf is NaN, and scores that small are 0.
      scale = fmaxf(scaled(scale, -score_shift), 0x1p-126f);
      score_unit = scaled(1.0f, -score_shift);
    }
    if (plan.partial(kv_tile)) Policy::hide(s, params, ElementCoords{*this, kv_tile});
    Policy::observe(s, params, ElementCoords{*this, kv_tile}, score_unit);
    float top[2], base[2], block[2];
    row_maxima(s, top);
    const float unit =
        scaled(1.0f, -weight_shift(element) - shift_of(v_exponent, element) - plan.out_exponent);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = top[r] == -infinity ? 0.0f : top[r];
      // Invariant: maxima are kept as scores, which powers of two do not round, and only their
      // differences are multiplied by the scale. A rounded product would be off by as much as half
      // a unit in its last place, which for scores of 1e10 is a factor of 2^2000.
      const float here = top[r] == -infinity ? -infinity : top[r] * score_unit;
      const float next = fmaxf(row_max[r], here);
      keep[r] = row_max[r] == -infinity ? 0.0f : ptx::ex2((row_max[r] - next) * params.scale_log2);
      take[r] = here == -infinity ? 0.0f : ptx::ex2((here - next) * params.scale_log2);
      row_max[r] = next;
    }
#pragma unroll
    for (int i = 0; i < block_kv / 2; ++i) s[i] = ptx::ex2((s[i] - base[row_of(i)]) * scale);
    row_sums(s, block);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = fmaf(sum[r], keep[r], block[r] * take[r]);
      take[r] *= unit;
    }
    Policy::drop(s, params, ElementCoords{*this, kv_tile});
    split_weights<parts, element>(s, p);
  }

  // Step 8.
  __device__ __forceinline__ void add_piece(int piece) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      float& x = o[piece / spans * (columns / 2) + i];
      x = fmaf(fresh[i], take[row_of(i)], piece % spans == 0 ? x * keep[row_of(i)] : x);
    }
  }

  __device__ __forceinline__ void first_scores(int kv_tile) {
    const int k_exponent = plan.k_facts[kv_tile].exponent;
    const int v_exponent = plan.v_facts[kv_tile].exponent;
    q_shift = shift_of(plan.q_facts[warpgroup].exponent, element);
    ptx::mbarrier_wait(&smem.q_full[warpgroup], 0);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    await_pingpong();
    wgmma::hold(s);
    wgmma::fence();
    issue_scores();
    pass_pingpong();
    wgmma::wait<0>();
    wgmma::hold(s);
    release_keys();
    weigh(kv_tile, k_exponent, v_exponent);
  }

  __device__ __forceinline__ void release_keys() {
    arrive(&smem.k_empty[k_position.stage]);
    k_position.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive(&smem.v_empty[v_position.stage]);
    v_position.advance();
  }

  __device__ __forceinline__ void begin_piece(int piece) {
    wgmma::hold(fresh);
    hold_weights();
    wgmma::fence();
    issue_values(piece);
  }
  __device__ __forceinline__ void end_piece(int piece) {
    wgmma::hold(fresh);
    hold_weights();
    add_piece(piece);
  }

  __device__ __forceinline__ void all_pieces_but_one() {
    ptx::mbarrier_wait(&smem.v_full[v_position.stage], v_position.phase);
#pragma unroll
    for (int piece = 0; piece + 1 < pieces; ++piece) {
      begin_piece(piece);
      wgmma::wait<0>();
      end_piece(piece);
    }
  }

  // Computes the values of a tile and then the scores of the next tile, which are queued after them
  // in the tensor pipe while the values are added up.
  __device__ __forceinline__ void values_then_scores(int next_tile) {
    all_pieces_but_one();
    await_pingpong();
    begin_piece(pieces - 1);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    wgmma::hold(s);
    wgmma::fence();
    issue_scores();
    pass_pingpong();
    const int k_exponent = plan.k_facts[next_tile].exponent;
    const int v_exponent = plan.v_facts[next_tile].exponent;
    wgmma::wait<1>();
    end_piece(pieces - 1);
    release_values();
    wgmma::wait<0>();
    wgmma::hold(s);
    release_keys();
    weigh(next_tile, k_exponent, v_exponent);
  }

  __device__ __forceinline__ void last_values() {
    all_pieces_but_one();
    begin_piece(pieces - 1);
    wgmma::wait<0>();
    end_piece(pieces - 1);
    release_values();
  }

  __device__ __forceinline__ void skip_tiles(int count) {
    for (; count > 0; --count) {
      await_pingpong();
      pass_pingpong();
      ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
      release_keys();
      ptx::mbarrier_wait(&smem.v_full[v_position.stage], v_position.phase);
      release_values();
    }
  }

  __device__ __forceinline__ long long row_of_heads(int row) const {
    const int batch = sequence().batch(plan.tile.batch);
    return first_row_of_head(params, sequence(), batch, params.heads, plan.tile.head) + row;
  }

  __device__ __forceinline__ float* out_row(int row) const {
    return params.out + sequence().batch(plan.tile.batch) * params.out_batch_stride +
           plan.tile.head * params.out_head_stride +
           (sequence().q_start() + row) * params.out_seq_stride;
  }

  // Step 9.
  __device__ __forceinline__ void store() {
    constexpr float ln2 = 0.693147180559945309f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of_thread(r);
      float total = quad_sum(sum[r]);
      const float factor = Policy::finish_row(params, ElementCoords{*this, 0}, r, row_max[r], total,
                                              params.scale_log2) *
                           Policy::kept_weight(params, ElementCoords{*this, 0});
      if (row >= sequence().seq_q()) continue;
      if (params.lse != nullptr && lane % 4 == 0)
        params.lse[row_of_heads(row)] =
            total == 0.0f ? -infinity
                          : __fadd_rn(__fmul_rn(row_max[r], params.lse_scale), log2f(total) * ln2);
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total * factor;
      const float unit = scaled(1.0f, plan.out_exponent);
#pragma unroll
      for (int j = 0; j < config.head_dim_v / 8; ++j) {
        if (8 * j < params.head_dim_v)
          *reinterpret_cast<float2*>(out_row(row) + 8 * j + 2 * (lane % 4)) =
              float2{o[4 * j + 2 * r] * inverse * unit, o[4 * j + 2 * r + 1] * inverse * unit};
      }
    }
  }

  // Adds inf and NaN of V, which the split zeroed, to the rows that see them. A thread adds to what
  // it has stored itself, so that the loop above needs no registers for this.
  __device__ __forceinline__ void restore_nonfinite(const TileRange& own) {
    const Band band = sequence().band();
    const float* v = params.v + sequence().batch(plan.tile.batch) * params.v_batch_stride +
                     plan.tile.head / params.heads_per_kv * params.v_head_stride +
                     sequence().k_start() * params.v_seq_stride;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int row = row_of_thread(r);
      if (row >= sequence().seq_q()) continue;
      tilewise::restore_nonfinite(
          band, row, own, block_kv,
          [&](int kv_tile) { return plan.v_facts[kv_tile].spread == spread_nonfinite; },
          [](int kv_tile) { return kv_tile; },
          [&](int key) {
            if (!Policy::sees(params, plan.tile.batch, plan.tile.head, row, key)) return;
#pragma unroll 1
            for (int column = 2 * (lane % 4); column < params.head_dim_v;
                 column += column % 2 == 0 ? 1 : 7) {
              const float x = v[key * params.v_seq_stride + column];
              if (is_nonfinite(__float_as_uint(x))) out_row(row)[column] += x;
            }
          });
    }
  }

  __device__ __forceinline__ void run() {
    if (config.pingpong && warpgroup == 1) ptx::barrier_arrive<256>(BarrierId::pingpong);
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] = 0.0f;
    row_max[0] = row_max[1] = -infinity;
    sum[0] = sum[1] = 0.0f;
    TileRange own{0, 0};
    const int seq_q = sequence().seq_q();
    if (row_begin < seq_q)
      own = touched_tiles(sequence().band(), row_begin, min_int(row_begin + 64, seq_q), block_kv);
    if constexpr (Policy::hides_by_span)
      own = {max_int(own.begin, plan.touched.begin), min_int(own.end, plan.touched.end)};
    if (own.empty()) {
      // Why it waits for rows that it does not need: a CTA must not end while a copy to it is
      // pending.
      if (!plan.touched.empty()) ptx::mbarrier_wait(&smem.q_full[warpgroup], 0);
      skip_tiles(plan.touched.count());
    } else {
      skip_tiles(plan.touched.end - own.end);
      int n = own.end - 1;
      first_scores(n);
      for (; n > own.begin; --n) values_then_scores(n - 1);
      last_values();
      skip_tiles(own.begin - plan.touched.begin);
    }
    store();
    if constexpr (config.takes_refused()) {
      if (__builtin_expect(plan.met_nonfinite, 0)) restore_nonfinite(own);
    }
  }
};

}  // namespace tilewise::sm90::float32
