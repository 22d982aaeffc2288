// The consumer warpgroups of the forward kernel. For steps, roles and barriers see forward.cuh.
#pragma once

#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "config.cuh"
#include "producer.cuh"
#include "rescue.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90 {

using ptx::u16;
using ptx::u32;
using ptx::u64;

struct BarrierId {
  static constexpr int pingpong = 1;  // + warpgroup
};

// A warpgroup's part of a work tile: 64 rows, and the KV tiles that they see. Why a pointer: the
// plan stays in shared memory, which leaves its registers to the loop.
template <typename Extents>
struct PartOf {
  const TilePlan<Extents>* plan;
  int row_begin;
  TileRange own;
};

template <Config config, typename Policy, typename Extents>
struct Consumer {
  using Plan = TilePlan<Extents>;
  using Part = PartOf<Extents>;
  static constexpr int block_kv = config.block_kv;
  static constexpr int panels = panel_count(config.head_dim_v), staged = config.staged_panels();
  static constexpr bool in_two_parts = staged < panels && !config.split;
  // Q is released together with the K of the last scores. The last tiles of a window have a loop of
  // their own, and without terms the release waits until that loop is done.
  static constexpr bool early_release = config.mask != mask_window || Policy::has_operands;
  // Whether partial tiles may follow the full ones.
  static constexpr bool partial_last = config.mask == mask_window || HasTileMap<Extents>;
  using ScoreProduct = wgmma::Product<block_kv, config.element>;
  using ValueProduct = wgmma::Product<config.head_dim_v, config.element>;

  const ParamsOf<Params, Policy, Extents>& params;
  Smem<config, Extents>& smem;
  const int warpgroup;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;

  const u32 q_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.q[warpgroup]), 16);
  const u32 k_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.k), 16);
  const u32 v_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.v), panel_bytes(block_kv));

  RingPosition<config.k_stages> k_position{0};
  RingPosition<config.v_stages> v_position{0};
  RingPosition<work_slots> work_position{0};
  RingPosition<max_int(config.bias_slots, 1)> bias_position{0};
  u32 q_phase = 0;
  u32 out_phase = 1;
  bool out_rest = false;  // panels of the previous tile are still to be staged

  float s[block_kv / 2];
  u32 p[block_kv / 16][4];
  float o[config.head_dim_v / 2];
  Softmax softmax;
  static constexpr bool tells_easy = Policy::has_easy && config.head_dim <= 128;
  // Whether partial tiles keep the maximum, as full tiles do, once every row has one. A kernel
  // whose exponents include the arithmetic of a term cannot: scores can no longer be hidden between
  // the two.
  static constexpr bool hides_lazily =
      HasTileMap<Extents> && !(Policy::has_exponents && tells_easy);
  const decltype(Policy::template exponents<true>(params)) easy_exponents =
      Policy::template exponents<true>(params);
  typename Policy::Once once;  // for this work tile
  // Whether `once` is computed while the first scores are: the assembler waits for the slope of a
  // line as soon as it has issued the load of it.
  static constexpr bool makes_once_late = Policy::adds_line && !Policy::drops;
  typename Policy::OfRows of_rows;
  // Random words for the tile whose scores are being computed, for as many blocks of sixteen keys
  // as registers allow. The other words are drawn when they are needed.
  static constexpr int drawn_early =
      !Policy::drops || config.consumers > 2 || config.head_dim_v > 128 ? 1 : block_kv / 16;
  u32 drawn[drawn_early][drawn_words];
  // What `hide` needs for the tile whose scores are being computed, if that tile is partial.
  typename Policy::template Ahead<block_kv / 2, RowsAre::queries> ahead;

  // Whether numbers that terms read are loaded while the scores are being computed. Wide heads and
  // random words leave no registers for them.
  static constexpr bool loads_early =
      Policy::loads_early && config.head_dim <= 128 && !Policy::drops;
  typename Policy::template Early<block_kv / 2> early;

  __device__ __forceinline__ auto sequence(const Part& part) const {
    return sequence_of<Extents>(params, *part.plan);
  }

  __device__ __forceinline__ void arrive(u64* barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void await_pingpong() {
    if constexpr (config.pingpongs()) ptx::barrier_sync<256>(BarrierId::pingpong + warpgroup);
  }
  __device__ __forceinline__ void pass_pingpong() {
    if constexpr (config.pingpongs())
      ptx::barrier_arrive<256>(BarrierId::pingpong +
                               (warpgroup + 1 == config.consumers ? 0 : warpgroup + 1));
  }

  __device__ __forceinline__ void issue_scores() {
    constexpr int k_panel = panel_bytes(block_kv) >> 4, q_panel = panel_bytes(64) >> 4;
    const u32 q_low = q_descriptor;
    const u32 k_low = k_descriptor + k_position.stage * (sizeof(smem.k[0]) >> 4);
#pragma unroll
    for (int step = 0; step < config.head_dim / 16; ++step)
      ScoreProduct::multiply(
          s, wgmma::descriptor(q_low + step / 4 * q_panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(k_low + step / 4 * k_panel + step % 4 * 2, swizzle_atom_bytes),
          step != 0);
    wgmma::commit();
  }

  __device__ __forceinline__ void issue_values() {
    const u32 v_low = v_descriptor + v_position.stage * (sizeof(smem.v[0]) >> 4);
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step)
      ValueProduct::multiply(
          o, p[step],
          wgmma::descriptor(v_low + step * (2 * swizzle_atom_bytes >> 4), swizzle_atom_bytes), 1);
    wgmma::commit();
  }

  __device__ __forceinline__ void hold_probabilities() {
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step) wgmma::hold(p[step]);
  }

  __device__ __forceinline__ void wait_values(bool partial) {
    u64* barrier = config.masked() && partial ? smem.v_scanned : smem.v_full;
    ptx::mbarrier_wait(barrier + v_position.stage, v_position.phase);
  }

  // K has been read, by the slow path too, and so has Q if this is the last of the warpgroup's
  // tiles.
  __device__ __forceinline__ void release_operands(bool last) {
    arrive(&smem.k_empty[k_position.stage]);
    if (early_release && last) arrive(&smem.q_empty[warpgroup]);
  }
  // The warpgroups use the slots round-robin.
  __device__ __forceinline__ void next_bias(int count) {
    if constexpr (config.bias_slots > 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) bias_position.advance();
    }
  }
  // The bias has been read, by the slow path too. Invariant: its words have been used, by a shuffle
  // or a branch that waits for them. Why: an arrive does not wait for loads in flight, and these
  // loads may be delayed for as long as another warpgroup's products read shared memory; TMA could
  // then overwrite the tile before they complete.
  __device__ __forceinline__ void release_bias() {
    if constexpr (config.bias_slots > 0) {
      __syncwarp();
      arrive(&smem.bias_empty[bias_position.stage]);
      next_bias(config.consumers);
    }
  }
  __device__ __forceinline__ void release_values() {
    arrive(&smem.v_empty[v_position.stage]);
    v_position.advance();
  }

  // The KV tile at a position of the plan. All other members of this class count positions.
  __device__ __forceinline__ int kv_tile_at(const Part& part, int position) const {
    return kv_tile_of<Extents>(params, *part.plan, position);
  }

  // Where this thread's scores lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Consumer& kernel;
    const Part& part;
    const int position;

    __device__ __forceinline__ int row() const {
      return part.row_begin + kernel.warp * 16 + kernel.lane / 4;
    }
    __device__ __forceinline__ int column() const {
      return kernel.kv_tile_at(part, position) * block_kv + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return part.plan->tile.batch; }
    __device__ __forceinline__ int head() const { return part.plan->tile.head; }
    __device__ __forceinline__ Band band() const { return kernel.sequence(part).band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence(part).row_band(); }
    __device__ __forceinline__ const typename Policy::Once& once() const { return kernel.once; }
    // For a staged bias: the address of the first of this warp's rows, and the offset of its keys
    // in their panel, in units of eight keys.
    __device__ __forceinline__ u32 staged_rows() const {
      if constexpr (config.bias_slots > 0)
        return ptx::smem_address(kernel.smem.bias[kernel.bias_position.stage]) +
               kernel.warp * panel_bytes(16);
      return 0;
    }
    __device__ __forceinline__ int staged_chunk() const { return 0; }
    // For a staged table: the slices for the tiles of this plan, the slice of this tile, which is
    // in the stage of its K, and the index of element 0 in that slice.
    __device__ __forceinline__ TableSlices table_slices() const
      requires(config.stages_table)
    {
      return sm90::table_slices<config, Extents>(kernel.params, *part.plan);
    }
    __device__ __forceinline__ const unsigned char* table_slice() const
      requires(config.stages_table)
    {
      return kernel.smem.table.stage[kernel.k_position.stage];
    }
    __device__ __forceinline__ int place_in_slice() const {
      return config.block_q() - 1 - (kernel.warpgroup * 64 + kernel.warp * 16 + kernel.lane / 4) +
             2 * (kernel.lane % 4);
    }
  };
  // The same, with what this thread has prepared for the terms.
  struct PreparedCoords : ElementCoords {
    __device__ __forceinline__ const typename Policy::OfRows& of_rows() const {
      return this->kernel.of_rows;
    }
    __device__ __forceinline__ const auto& ahead() const
      requires Policy::looks_ahead
    {
      return this->kernel.ahead;
    }
    __device__ __forceinline__ const auto& early() const
      requires loads_early
    {
      return this->kernel.early;
    }
  };

  // Step 2. Scores on a line exclude the starts of their rows; the softmax adds a row's start to
  // all of its scores at once. Wide heads leave no registers for this, nor for both variants of
  // `apply`.
  static constexpr bool adds_line =
      Policy::adds_line && !Policy::observes && config.head_dim <= 128;
  __device__ __forceinline__ FromStarts starts_of(const Line& line) const {
    return {{line.start[0] * params.scale_log2, line.start[1] * params.scale_log2}};
  }
  // The exponents of a lazy tile's scores. OnLine and InTurns give exponents a few registers of
  // their own: the assembler then puts the arithmetic of a score right before its exponential.
  // Otherwise it would do all of the arithmetic first, while the exponential unit, which is the
  // bottleneck, idles: an instruction takes four cycles while products are in flight, because they
  // read and write registers too.
  struct OnLine {
    float scale_log2, per_column;
    __device__ __forceinline__ float operator()(float s, float base, int i) const {
      return fmaf(s, scale_log2, fmaf(per_column, static_cast<float>(column_of(i)), -base));
    }
  };
  struct InTurns {
    float scale_log2;
    float blocks;  // not negative, which the assembler does not know, so it keeps these registers
    float turn[4];
    __device__ __forceinline__ float operator()(float s, float base, int i) {
      if (i < 4)
        turn[i] = fmaf(s, scale_log2, -base);
      else
        ptx::fma_where(blocks >= 0.0f, turn[i % 4], s, scale_log2, -base);
      return turn[i % 4];
    }
  };
  // Kernels with heads of 128 gain nothing; docs/kernels/sm90.md has the figures.
  __device__ __forceinline__ auto scaled_exponents() const {
    if constexpr (config.stages_table || (HasTileMap<Extents> && config.head_dim <= 64))
      return InTurns{params.scale_log2, softmax.blocks, {}};
    else
      return Scaled{params.scale_log2};
  }
  template <bool easy = false>
  __device__ __forceinline__ auto apply_terms(const Part& part, int kv_tile) {
    const PreparedCoords place{{*this, part, kv_tile}};
    if constexpr (config.bias_slots > 0)
      ptx::mbarrier_wait(&smem.bias_full[bias_position.stage], bias_position.phase);
    if constexpr (adds_line) {
      const Line line = Policy::line(params, place);
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i)
        if (column_of(i) != 0) s[i] = fmaf(line.per_column, static_cast<float>(column_of(i)), s[i]);
      Policy::bend(s, params, place);
      return starts_of(line);
    } else {
      Policy::template apply<easy>(s, params, Unit{}, place);
      return FromZero{};
    }
  }
  // Reads what step 3 needs for a partial tile, before the wait for the products of its scores.
  __device__ __forceinline__ void look_ahead(const Part& part, int kv_tile, bool partial) {
    if constexpr (Policy::looks_ahead) {
      if (partial) Policy::look_ahead(ahead, params, PreparedCoords{{*this, part, kv_tile}});
    }
  }
  // Loads what step 2 needs, likewise. Why `hold` in both branches: the compiler would otherwise
  // compute the addresses of either branch first, and issue the loads after all of them.
  __device__ __forceinline__ void load_early(const Part& part, int kv_tile) {
    if constexpr (loads_early) {
      const ElementCoords place{*this, part, kv_tile};
      if (Policy::template holds_early<block_kv / 2>(params, place))
        load_early_by<false>(place);
      else
        load_early_by<true>(place);
    }
  }
  template <bool checks>
  __device__ __forceinline__ void load_early_by(const ElementCoords& place) {
    Policy::template load_early<checks>(early, params, place);
#pragma unroll
    for (int i = 0; i <= block_kv / 8; ++i) wgmma::hold(early.numbers[i]);
  }
  // Step 3.
  __device__ __forceinline__ void hide(const Part& part, int kv_tile) {
    Policy::hide(s, params, PreparedCoords{{*this, part, kv_tile}});
  }
  __device__ __forceinline__ void observe(const Part& part, int kv_tile) {
    Policy::observe(s, params, PreparedCoords{{*this, part, kv_tile}});
  }
  // Draws the words that decide which weights step 7 drops, while the products of the scores are in
  // flight. Why the wait, which has already completed: the assembler would sink all of the drawing
  // below the wait for the products, but it does not move code across a branch.
  __device__ __forceinline__ void draw(const Part& part, int kv_tile) {
    if constexpr (Policy::drops) {
      Policy::draw(drawn, params, PreparedCoords{{*this, part, kv_tile}});
#pragma unroll
      for (int block = 0; block < drawn_early; ++block) wgmma::hold(drawn[block]);
      ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    }
  }
  // Makes P in the form that step 8 needs.
  __device__ __forceinline__ void pack(const Part& part, int kv_tile) {
    pack_block<config.element>(s, p);
    if constexpr (Policy::drops)
      Policy::drop(p, drawn, params, PreparedCoords{{*this, part, kv_tile}});
  }

  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] *= alpha[row_of(i)];
  }

  // Step 6, for a warp in which some thread's block exceeds its bound. No product is in flight
  // here.
  template <bool partial>
  __device__ __forceinline__ void take_maximum_now(const Part& part, int kv_tile,
                                                   float (&block)[2]) {
    float alpha[2];
    if (__builtin_expect(__any_sync(0xffffffffu, !(block[0] < recoverable_bound &&
                                                   block[1] < recoverable_bound)),
                         0)) {
      scores_again<config.element, config.head_dim, block_kv>(
          s, ptx::smem_address(smem.q[warpgroup]) + warp * panel_bytes(16),
          ptx::smem_address(smem.k[k_position.stage]));
      load_early(part, kv_tile);
      const auto starts = apply_terms(part, kv_tile);
      if constexpr (partial) hide(part, kv_tile);
      softmax.exact_block(s, params.scale_log2, alpha, starts);
    } else {
      softmax.template raise<config.stages_table>(s, block, alpha);
      softmax.add(block);
    }
    rescale(alpha);
  }

  // Whether some row of this warp has not seen a key yet.
  __device__ __forceinline__ bool misses_rows() const {
    return __any_sync(0xffffffffu,
                      softmax.reference[0] == -infinity || softmax.reference[1] == -infinity);
  }
  // Steps 2 to 7 of a partial tile for such a warp. No product is in flight here.
  __device__ __forceinline__ void take_first_maximum(const Part& part, int kv_tile) {
    const auto starts = apply_terms(part, kv_tile);
    hide(part, kv_tile);
    observe(part, kv_tile);
    float alpha[2];
    softmax.exact_block(s, params.scale_log2, alpha, starts);
    rescale(alpha);
  }

  __device__ __forceinline__ void first_tile(const Part& part) {
    const int kv_tile = part.own.end - 1;
    look_ahead(part, kv_tile, part.plan->partial(kv_tile));  // while Q and K are loaded
    ptx::mbarrier_wait(&smem.q_full[warpgroup], q_phase);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    await_pingpong();
    wgmma::hold(s);
    wgmma::fence();
    issue_scores();
    pass_pingpong();
    if constexpr (makes_once_late)
      once = typename Policy::Once(params, ElementCoords{*this, part, kv_tile});
    load_early(part, kv_tile);
    draw(part, kv_tile);
    wgmma::wait<0>();
    wgmma::hold(s);
    // Like a bias (release_bias), a staged table, which is released with K, is released only after
    // its use.
    if (!config.stages_table) release_operands(kv_tile == part.own.begin);
    const auto starts = apply_terms(part, kv_tile);
    if (part.plan->partial(kv_tile)) hide(part, kv_tile);
    observe(part, kv_tile);
    float alpha[2];
    softmax.reset();
    softmax.exact_block(s, params.scale_log2, alpha, starts);
    if (config.stages_table) release_operands(kv_tile == part.own.begin);
    k_position.advance();
    release_bias();
    pack(part, kv_tile);
  }

  // Issues the score product of the tile at k_position together with the value product of the
  // previous tile.
  __device__ __forceinline__ void issue_both(const Part& part, int kv_tile, bool partial,
                                             bool values_partial) {
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    await_pingpong();
    wgmma::hold(s);
    wgmma::hold(o);
    hold_probabilities();
    wgmma::fence();
    issue_scores();
    wait_values(values_partial);
    wgmma::fence();
    issue_values();
    pass_pingpong();
    look_ahead(part, kv_tile, partial);
    load_early(part, kv_tile);
    draw(part, kv_tile);
    wgmma::wait<1>();
    wgmma::hold(s);
  }

  __device__ __forceinline__ void finish_values() {
    wgmma::wait<0>();
    wgmma::hold(o);
    hold_probabilities();
    release_values();
  }

  __device__ __forceinline__ void exact_tile(const Part& part, int kv_tile, bool partial,
                                             bool values_partial) {
    issue_both(part, kv_tile, partial, values_partial);
    const auto starts = apply_terms(part, kv_tile);
    if (partial) hide(part, kv_tile);
    observe(part, kv_tile);
    float alpha[2];
    softmax.exact_block(s, params.scale_log2, alpha, starts);
    // Why: the assembler sinks the exponentials below the next wait, but not across a branch. This
    // wait contains a branch and has already completed.
    wgmma::hold(s);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    release_operands(kv_tile == part.own.begin);
    release_bias();
    k_position.advance();
    finish_values();
    rescale(alpha);
    pack(part, kv_tile);
  }

  __device__ __forceinline__ void pack_and_release(const Part& part, int kv_tile) {
    k_position.advance();
    hold_probabilities();
    release_values();
    pack(part, kv_tile);
  }

  // Steps 2 to 5 of a lazy tile. Returns whether its block is good in all threads of the warp.
  // Where scores may be easy, both variants contain the exponentials, which overlap with the
  // arithmetic of the terms. Wide heads leave no registers for two variants.
  template <bool partial>
  __device__ __forceinline__ bool lazy_weights(const Part& part, int kv_tile, float (&block)[2]) {
    if constexpr (tells_easy) {
      if (Policy::are_easy(s, params, Unit{}, PreparedCoords{{*this, part, kv_tile}}))
        return lazy_weights_by<true, partial>(part, kv_tile, block);
    }
    return lazy_weights_by<false, partial>(part, kv_tile, block);
  }
  template <bool easy, bool partial>
  __device__ __forceinline__ bool lazy_weights_by(const Part& part, int kv_tile,
                                                  float (&block)[2]) {
    if constexpr (adds_line) {
      const PreparedCoords place{{*this, part, kv_tile}};
      const Line line = Policy::line(params, place);
      Policy::bend(s, params, place);
      if constexpr (partial) hide(part, kv_tile);
      const OnLine exponents{params.scale_log2, line.per_column * params.scale_log2};
      return !__any_sync(0xffffffffu, !softmax.lazy_block(s, exponents, block, starts_of(line)));
    } else if constexpr (!Policy::has_exponents || !tells_easy) {
      const auto starts = apply_terms<easy>(part, kv_tile);
      if constexpr (partial) hide(part, kv_tile);
      observe(part, kv_tile);
      return !__any_sync(0xffffffffu, !softmax.lazy_block(s, scaled_exponents(), block, starts));
    } else if constexpr (easy) {
      return !__any_sync(0xffffffffu, !softmax.lazy_block(s, easy_exponents, block));
    } else {
      const auto exponents = Policy::template exponents<false>(params);
      return !__any_sync(0xffffffffu, !softmax.lazy_block(s, exponents, block));
    }
  }

  // The steady loop: tiles n down to `last`, either all or none of them partial; `before` as in
  // attend(). Why the slow path is placed after the loop and re-enters it: this keeps the code of
  // the loop contiguous.
  template <bool partial>
  __device__ __forceinline__ void lazy_tiles(const Part& part, int& n, int last, bool& before) {
    const int final_tile = partial_last ? part.own.begin : last;
    while (n >= last) {
      float block[2];
      bool good = true, unseen = false;
      for (; n >= last; --n) {
        issue_both(part, n, partial, before);
        before = partial;
        if constexpr (partial) {
          unseen = misses_rows();
          if (unseen) break;
        }
        good = lazy_weights<partial>(part, n, block);
        // Why there is a wait on either side of this branch: the assembler sinks exponentials below
        // a wait, but the branch needs all of them, so they stay above it and overlap with the
        // products in flight. The texts of the two waits differ so that they are not merged.
        if (!good) break;
        softmax.add(block);
        release_operands(n == final_tile);
        release_bias();
        wgmma::wait<0>();
        wgmma::hold(o);
        pack_and_release(part, n);
      }
      if (good && !unseen) return;
      wgmma::wait_before_slow_path();
      wgmma::hold(o);
      if (unseen)
        take_first_maximum(part, n);
      else
        take_maximum_now<partial>(part, n, block);
      release_operands(n == final_tile);
      release_bias();
      pack_and_release(part, n);
      --n;
    }
  }

  __device__ __forceinline__ void last_values(bool values_partial) {
    wgmma::hold(o);
    hold_probabilities();
    wait_values(values_partial);
    wgmma::fence();
    issue_values();
    finish_values();
  }

  __device__ __forceinline__ void skip_tiles(int count) {
    for (; count > 0; --count) {
      await_pingpong();
      pass_pingpong();
      ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
      arrive(&smem.k_empty[k_position.stage]);
      k_position.advance();
      ptx::mbarrier_wait(&smem.v_full[v_position.stage], v_position.phase);
      release_values();
      if constexpr (config.bias_slots > 0) {
        ptx::mbarrier_wait(&smem.bias_full[bias_position.stage], bias_position.phase);
        release_bias();
      }
    }
  }

  // Steps 1-6 for the first KV tile.
  __device__ __forceinline__ void begin(const Part& part) {
    if constexpr (Policy::drops)
      once = smem.once[work_position.stage].template as<typename Policy::Once>();
    else if constexpr (!makes_once_late)
      once = typename Policy::Once(params, ElementCoords{*this, part, 0});
    of_rows = typename Policy::OfRows(params, ElementCoords{*this, part, 0});
    skip_tiles(part.plan->touched.end - part.own.end);
    first_tile(part);
  }

  // Steps 1-8 for the other KV tiles.
  __device__ __forceinline__ void attend(const Part& part) {
    const Plan& plan = *part.plan;
    int n = part.own.end - 1;
    bool before = plan.partial(n--);  // whether the V tile still to be multiplied is partial
    // Why one more exact tile after a partial first tile: some row saw few keys there, so this tile
    // outweighs them, and taking the maximum up front is cheaper. A line lets the keys of further
    // tiles count less.
    if constexpr (!HasTileMap<Extents>) {
      for (bool second = before && !adds_line;
           n >= part.own.begin && (second || (config.masked() && n >= plan.full.end));
           second = false) {
        const bool partial = config.masked() && plan.partial(n);
        exact_tile(part, n--, partial, before);
        before = partial;
      }
    }
    lazy_tiles<false>(part, n, max_int(part.own.begin, plan.full.begin), before);
    if constexpr (hides_lazily) {
      lazy_tiles<true>(part, n, part.own.begin, before);
    } else if constexpr (partial_last) {
      for (; n >= part.own.begin; --n, before = true) exact_tile(part, n, true, before);
    }
    if constexpr (!early_release) arrive(&smem.q_empty[warpgroup]);
    q_phase ^= 1;
    last_values(before);
    skip_tiles(part.own.begin - plan.touched.begin);
  }

  // Adds inf and NaN of partial V tiles, which the scanner zeroed, to the rows that see them.
  __device__ __forceinline__ void restore_nonfinite(const Part& part) {
    const Plan& plan = *part.plan;
    const Band band = sequence(part).band();
    const u32* v = reinterpret_cast<const u32*>(params.v);
    const long long head_offset = sequence(part).batch(plan.tile.batch) * params.v_batch_stride +
                                  plan.tile.head / params.heads_per_kv * params.v_head_stride +
                                  sequence(part).k_start() * params.v_seq_stride + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = part.row_begin + warp * 16 + lane / 4 + 8 * r;
      tilewise::restore_nonfinite(
          band, row, part.own, block_kv, [&](int position) { return plan.partial(position); },
          [&](int position) { return kv_tile_at(part, position); },
          [&](int key) {
            if (!Policy::sees(params, plan.tile.batch, plan.tile.head, row, key)) return;
#pragma unroll
            for (int j = 0; j < config.head_dim_v / 8; ++j) {
              if (j * 8 >= params.head_dim_v) continue;
              const u32 pair = v[(head_offset + key * params.v_seq_stride + j * 8) / 2];
              const u32 bad = nonfinite_bits<config.element>(pair);
              if (bad & 0x8000u) o[4 * j + 2 * r] += ptx::unpack_low<config.element>(pair);
              if (bad & 0x80000000u) o[4 * j + 2 * r + 1] += ptx::unpack_high<config.element>(pair);
            }
          });
    }
  }

  // The index of this part's first row among the rows of all heads, batches and splits.
  __device__ __forceinline__ long long first_row(const Part& part) {
    const Plan& plan = *part.plan;
    const int batches = Extents::ragged ? 1 : params.batch;  // of the tensors
    const long long batch =
        sequence(part).batch(plan.tile.batch) + (config.split ? plan.split * batches : 0);
    return first_row_of_head(params, sequence(part), batch, params.heads, plan.tile.head);
  }

  __device__ __forceinline__ void store_lse(const Part& part, const Softmax& softmax) {
    constexpr float ln2 = 0.693147180559945309f;
    float* lse = params.lse + first_row(part);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = part.row_begin + warp * 16 + lane / 4 + 8 * r;
      const float total = quad_sum(softmax.sum[r]);
      if (lane % 4 == 0 && row < sequence(part).seq_q())
        lse[row] = total == 0.0f ? -infinity : (softmax.reference[r] + ptx::lg2(total)) * ln2;
    }
  }

  // Lets the terms finish the rows' maxima and sums; O is multiplied by `factor`. Contributions
  // that do not come from a key are counted by the first part of the keys alone.
  __device__ __forceinline__ void finish_rows(const Part& part, Softmax& softmax,
                                              float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = 1.0f;
      if (config.split && part.plan->split != 0) continue;
      float total = quad_sum(softmax.sum[r]);
      factor[r] = Policy::finish_row(params, PreparedCoords{{*this, part, 0}}, r,
                                     softmax.reference[r], total, 1.0f);
      softmax.sum[r] = lane % 4 == 0 ? total : 0.0f;
    }
  }

  __device__ __forceinline__ void normalise() {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(softmax.sum[r]);
      inverse[r] = total == 0.0f ? 0.0f : ptx::rcp(total);
    }
    rescale(inverse);
  }

  // Passes panels [first, first + staged) of this warpgroup's rows to the storer.
  template <int first>
  __device__ __forceinline__ void stage_out(const float (&rows)[config.head_dim_v / 2]) {
    ptx::mbarrier_wait(&smem.out_empty[warpgroup], out_phase);
    out_phase ^= 1;
    const u32 address = ptx::smem_address(smem.out[warpgroup]) + warp * panel_bytes(16);
#pragma unroll
    for (int pair = 0; pair < staged * 4; ++pair) {
      if (first * 4 + pair >= config.head_dim_v / 16) break;
      const float* x = &rows[8 * (first * 4 + pair)];
      ptx::stmatrix_x4(address + pair / 4 * panel_bytes(64) +
                           swizzled_chunk(lane % 16, pair % 4 * 2 + lane / 16),
                       ptx::pack<config.element>(x[0], x[1]), ptx::pack<config.element>(x[2], x[3]),
                       ptx::pack<config.element>(x[4], x[5]),
                       ptx::pack<config.element>(x[6], x[7]));
    }
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(&smem.out_full[warpgroup]);
  }

  __device__ __forceinline__ void store_partial(const Part& part,
                                                const float (&rows)[config.head_dim_v / 2]) {
    float* out = params.partial_out + first_row(part) * params.head_dim_v;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = part.row_begin + warp * 16 + lane / 4 + 8 * r;
      if (row >= sequence(part).seq_q()) continue;
#pragma unroll
      for (int j = 0; j < config.head_dim_v / 8; ++j) {
        const int column = 8 * j + 2 * (lane % 4);
        if (column < params.head_dim_v)
          *reinterpret_cast<float2*>(out + row * params.head_dim_v + column) =
              float2{rows[4 * j + 2 * r], rows[4 * j + 2 * r + 1]};
      }
    }
  }

  // Stages the panels that did not fit before. Why only now, after the next tile's first scores: by
  // then the storer has emptied the space, and O is not needed earlier.
  __device__ __forceinline__ void stage_rest() {
    if constexpr (in_two_parts) {
      if (out_rest) stage_out<staged>(o);
      out_rest = false;
    }
  }

  __device__ __forceinline__ void clear_out() {
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] = 0.0f;
    wgmma::hold(o);
  }

  // Step 9.
  __device__ __forceinline__ void finish(const Part& part) {
    if constexpr (Policy::finishes_rows) {
      float factor[2];
      finish_rows(part, softmax, factor);
      rescale(factor);
    }
    if constexpr (Policy::drops) {
      const float weight = Policy::kept_weight(params, PreparedCoords{{*this, part, 0}});
      rescale({weight, weight});
    }
    if (params.lse != nullptr) store_lse(part, softmax);
    normalise();
    if constexpr (config.masked()) {
      if (__builtin_expect(smem.met_nonfinite[work_position.stage] != 0, 0))
        restore_nonfinite(part);
    }
    if constexpr (config.split)
      store_partial(part, o);
    else
      stage_out<0>(o);
    out_rest = in_two_parts && !config.split;
    if constexpr (!in_two_parts) clear_out();
  }

  // Handles a warpgroup whose rows see no key, or that has no rows. Why not through O: accumulators
  // that are written on two paths make ptxas serialise the products.
  __device__ __forceinline__ void finish_empty(const Part& part) {
    ptx::mbarrier_wait(&smem.q_full[warpgroup], q_phase);
    skip_tiles(part.plan->touched.count());
    arrive(&smem.q_empty[warpgroup]);
    q_phase ^= 1;
    if (part.row_begin >= sequence(part).seq_q()) return;
    constexpr float nothing[config.head_dim_v / 2] = {};
    Softmax none;
    none.reset();
    if constexpr (Policy::finishes_rows) {
      once = typename Policy::Once(params, ElementCoords{*this, part, 0});
      float factor[2];
      finish_rows(part, none, factor);
    }
    if (params.lse != nullptr) store_lse(part, none);
    if constexpr (config.split) {
      // Without a term that finishes rows, the weight of this part is 0, and combine does not read
      // its out.
      if (Policy::finishes_rows && part.plan->split == 0) store_partial(part, nothing);
      return;
    }
    stage_out<0>(nothing);
    if constexpr (in_two_parts) stage_out<staged>(nothing);
  }

  // This warpgroup's part of the work at `position`.
  __device__ __forceinline__ Part read_part(const RingPosition<work_slots>& position) {
    ptx::mbarrier_wait(&smem.work_full[position.stage], position.phase);
    const Plan* plan = &smem.plan[position.stage];
    return {plan, plan->row_begin + warpgroup * 64, smem.own[position.stage][warpgroup]};
  }

  __device__ __forceinline__ void run() {
    if (config.pingpongs() && warpgroup == config.consumers - 1)
      ptx::barrier_arrive<256>(BarrierId::pingpong);
    clear_out();
    next_bias(warpgroup);
    for (;; work_position.advance()) {
      const Part part = read_part(work_position);
      if (part.plan->row_begin == Plan::no_more_work) break;
      if (part.own.empty()) {
        stage_rest();
        finish_empty(part);
      } else {
        begin(part);
        stage_rest();
        if constexpr (in_two_parts) clear_out();
        attend(part);
        finish(part);
      }
      arrive(&smem.work_empty[work_position.stage]);
    }
    stage_rest();
  }
};

}  // namespace tilewise::sm90
