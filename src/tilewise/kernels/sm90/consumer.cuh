// The consumer warpgroups of the forward kernel. Steps, roles and barriers: forward.cuh.
#pragma once

#include "config.cuh"
#include "producer.cuh"
#include "rescue.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90 {

using ptx::u32;
using ptx::u64;

struct BarrierId {
  static constexpr int turn = 1;    // + warpgroup
  static constexpr int q_read = 8;  // + warpgroup
};

template <Config config>
struct Consumer {
  static constexpr int block_kv = config.block_kv;
  using ScoreProduct = wgmma::Product<block_kv, config.bf16>;
  using ValueProduct = wgmma::Product<config.head_dim_v, config.bf16>;

  const Params& params;
  Smem<config>& smem;
  const int warpgroup;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;

  const u32 q_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.q[warpgroup]), 16);
  const u32 k_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.k), 16);
  const u32 v_descriptor = wgmma::descriptor_low(ptx::smem_address(smem.v), panel_bytes(block_kv));

  RingPosition<config.k_stages> k_position{0};
  RingPosition<config.v_stages> v_position{0};
  RingPosition<work_slots> work_position{0};
  u32 q_phase = 0;

  float s[block_kv / 2];
  u32 p[block_kv / 16][4];
  float o[config.head_dim_v / 2];
  Softmax softmax;

  __device__ __forceinline__ void arrive(u64* barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void take_turn() {
    if constexpr (config.turns()) ptx::barrier_sync<256>(BarrierId::turn + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (config.turns())
      ptx::barrier_arrive<256>(BarrierId::turn +
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

  __device__ __forceinline__ void release_keys() {
    arrive(&smem.k_empty[k_position.stage]);
    k_position.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive(&smem.v_empty[v_position.stage]);
    v_position.advance();
  }

  __device__ __forceinline__ void cap() {
    if constexpr (config.softcap) apply_softcap(s, params.softcap_in);
  }

  // Step 3. The thread's columns in the tile are 8j + 2(lane % 4) + {0, 1}.
  __device__ __forceinline__ void hide(int row_begin, int kv_tile) {
    const Band band = band_of(params);
    const int column = kv_tile * block_kv + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin + warp * 16 + lane / 4 + 8 * r;
      const int end = (config.masked() ? band.end_key(row) : params.seq_k) - column;
      const int first = config.mask == mask_window ? band.first_key(row) - column : 0;
#pragma unroll
      for (int i = 0; i < block_kv / 2; ++i) {
        if (row_of(i) != r) continue;
        const int offset = i / 4 * 8 + i % 2;
        bool visible = offset < end;
        if constexpr (config.mask == mask_window) visible = visible && offset >= first;
        s[i] = visible ? s[i] : -infinity;
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] *= alpha[row_of(i)];
  }

  // Step 6, for a warp some thread of which has a block that is not good as it is. No product is in
  // flight here.
  __device__ __forceinline__ void take_maximum_now(float (&block)[2]) {
    float alpha[2];
    if (__builtin_expect(__any_sync(0xffffffffu, !(block[0] < recoverable_bound &&
                                                   block[1] < recoverable_bound)),
                         0)) {
      scores_again<config.bf16, config.head_dim, block_kv>(
          s, ptx::smem_address(smem.q[warpgroup]) + warp * panel_bytes(16),
          ptx::smem_address(smem.k[k_position.stage]));
      cap();
      softmax.exact_block(s, params.scale_log2, alpha);
    } else {
      softmax.raise(s, block, alpha);
      softmax.add(block);
    }
    rescale(alpha);
  }

  __device__ __forceinline__ void first_tile(int row_begin, int kv_tile, bool partial) {
    ptx::mbarrier_wait(&smem.q_full[warpgroup], q_phase);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    take_turn();
    wgmma::hold(s);
    wgmma::fence();
    issue_scores();
    pass_turn();
    wgmma::wait<0>();
    wgmma::hold(s);
    release_keys();
    cap();
    if (partial) hide(row_begin, kv_tile);
    float alpha[2];
    softmax.exact_block(s, params.scale_log2, alpha);
    pack_block<config.bf16>(s, p);
  }

  // Issues the scores of the tile at k_position and the values of the tile before it, together.
  __device__ __forceinline__ void issue_both(bool values_partial) {
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    take_turn();
    wgmma::hold(s);
    wgmma::hold(o);
    hold_probabilities();
    wgmma::fence();
    issue_scores();
    wait_values(values_partial);
    wgmma::fence();
    issue_values();
    pass_turn();
    wgmma::wait<1>();
    wgmma::hold(s);
  }

  __device__ __forceinline__ void finish_values() {
    wgmma::wait<0>();
    wgmma::hold(o);
    hold_probabilities();
    release_values();
  }

  __device__ __forceinline__ void exact_tile(int row_begin, int kv_tile, bool partial,
                                             bool values_partial) {
    issue_both(values_partial);
    cap();
    if (partial) hide(row_begin, kv_tile);
    float alpha[2];
    softmax.exact_block(s, params.scale_log2, alpha);
    // Why: the assembler sinks the exponentials below the next wait, but not across a branch. This
    // wait has one, and is over already.
    wgmma::hold(s);
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    release_keys();
    finish_values();
    rescale(alpha);
    pack_block<config.bf16>(s, p);
  }

  __device__ __forceinline__ void pack_and_release() {
    k_position.advance();
    hold_probabilities();
    release_values();
    pack_block<config.bf16>(s, p);
  }

  // The steady loop: tiles n down to `last`, none of them partial; `before` as in attend().
  // Why the slow path stands behind the loop, which it re-enters: the loop's code stays in one
  // piece.
  __device__ __forceinline__ void lazy_tiles(int& n, int last, bool& before) {
    while (n >= last) {
      float block[2];
      bool good = true;
      for (; n >= last; --n) {
        issue_both(before);
        before = false;
        cap();
        good = !__any_sync(0xffffffffu, !softmax.lazy_block(s, params.scale_log2, block));
        // Why a wait on either side of this branch: the assembler sinks exponentials below a wait,
        // but the branch needs all of them, so they stay above, under the products in flight. The
        // waits differ in text, else they were merged.
        if (!good) break;
        softmax.add(block);
        arrive(&smem.k_empty[k_position.stage]);
        wgmma::wait<0>();
        wgmma::hold(o);
        pack_and_release();
      }
      if (good) return;
      wgmma::wait_before_slow_path();
      wgmma::hold(o);
      take_maximum_now(block);
      arrive(&smem.k_empty[k_position.stage]);
      pack_and_release();
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

  __device__ __forceinline__ void skip_tile() {
    take_turn();
    pass_turn();
    ptx::mbarrier_wait(&smem.k_full[k_position.stage], k_position.phase);
    release_keys();
    ptx::mbarrier_wait(&smem.v_full[v_position.stage], v_position.phase);
    release_values();
  }

  __device__ __forceinline__ void begin_rows() {
    softmax.reset();
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] = 0.0f;
  }

  // Steps 1-8 for this warpgroup's rows; `own` is the part of plan.touched that they see.
  __device__ __forceinline__ void attend(const TilePlan& plan, int row_begin, TileRange own) {
    int n = plan.touched.end - 1;
    for (; n >= own.end; --n) skip_tile();
    first_tile(row_begin, n, plan.partial(n));
    bool before = plan.partial(n--);  // whether the V tile still to be multiplied is partial
    // Why the second tile too: it nearly always outweighs the first for some row, and knowing so
    // beforehand is cheaper.
    for (bool second = true; n >= own.begin && (second || (config.masked() && n >= plan.full.end));
         second = false) {
      const bool partial = config.masked() && plan.partial(n);
      exact_tile(row_begin, n--, partial, before);
      before = partial;
    }
    lazy_tiles(n, max_int(own.begin, plan.full.begin), before);
    if constexpr (config.mask == mask_window) {
      for (; n >= own.begin; --n, before = true) exact_tile(row_begin, n, true, before);
    }
    if constexpr (config.separate_out) release_queries();
    last_values(before);
    for (; n >= plan.touched.begin; --n) skip_tile();
  }

  __device__ __forceinline__ void release_queries() {
    arrive(&smem.q_empty[warpgroup]);
    q_phase ^= 1;
  }

  // Gives the rows that see inf or NaN in a partial V tile those values back: the scanners had
  // zeroed them.
  __device__ __forceinline__ void restore_nonfinite(const TilePlan& plan, int row_begin,
                                                    TileRange own) {
    const Band band = band_of(params);
    const u32* v = reinterpret_cast<const u32*>(params.v);
    const long long head_offset = plan.tile.batch * params.v_batch_stride +
                                  plan.tile.head / params.heads_per_kv * params.v_head_stride +
                                  2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin + warp * 16 + lane / 4 + 8 * r;
      for (int kv_tile = own.begin; kv_tile < own.end; ++kv_tile) {
        if (!plan.partial(kv_tile)) continue;
        const int end = min_int(band.end_key(row), (kv_tile + 1) * block_kv);
        for (int key = max_int(band.first_key(row), kv_tile * block_kv); key < end; ++key) {
#pragma unroll
          for (int j = 0; j < config.head_dim_v / 8; ++j) {
            if (j * 8 >= params.head_dim_v) continue;
            const u32 pair = v[(head_offset + key * params.v_seq_stride + j * 8) / 2];
            const u32 bad = nonfinite_bits<config.bf16>(pair);
            if (bad & 0x8000u) o[4 * j + 2 * r] += ptx::unpack_low<config.bf16>(pair);
            if (bad & 0x80000000u) o[4 * j + 2 * r + 1] += ptx::unpack_high<config.bf16>(pair);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_lse(const TilePlan& plan, int row_begin) {
    constexpr float ln2 = 0.693147180559945309f;
    float* lse =
        params.lse +
        (static_cast<long long>(plan.tile.batch) * params.heads + plan.tile.head) * params.seq_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin + warp * 16 + lane / 4 + 8 * r;
      const float total = quad_sum(softmax.sum[r]);
      if (lane % 4 == 0 && row < params.seq_q)
        lse[row] = total == 0.0f ? -infinity : (softmax.reference[r] + ptx::lg2(total)) * ln2;
    }
  }

  __device__ __forceinline__ void normalise() {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(softmax.sum[r]);
      inverse[r] = total == 0.0f ? 0.0f : __frcp_rn(total);
    }
    rescale(inverse);
  }

  // Each warp stages and stores its own 16 rows: no synchronisation with the other warps.
  __device__ __forceinline__ void store_out(const TilePlan& plan, int row_begin,
                                            unsigned char* room) {
    unsigned char* staging = room + warp * panel_bytes(16);
    const u32 address = ptx::smem_address(staging);
#pragma unroll
    for (int pair = 0; pair < config.head_dim_v / 16; ++pair) {
      const float* x = &o[8 * pair];
      const int chunk = pair % 4 * 2 + lane / 16;
      ptx::stmatrix_x4(address + pair / 4 * panel_bytes(64) + swizzled_chunk(lane % 16, chunk),
                       ptx::pack<config.bf16>(x[0], x[1]), ptx::pack<config.bf16>(x[2], x[3]),
                       ptx::pack<config.bf16>(x[4], x[5]), ptx::pack<config.bf16>(x[6], x[7]));
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      for (int panel = 0; panel < panel_count(config.head_dim_v); ++panel)
        ptx::tma_store_4d(&params.out_map, staging + panel * panel_bytes(64), panel * panel_columns,
                          row_begin + warp * 16, plan.tile.head, plan.tile.batch);
      ptx::tma_store_commit();
    }
  }

  // Step 9.
  __device__ __forceinline__ void finish(const TilePlan& plan, int row_begin, TileRange own,
                                         bool met_nonfinite) {
    if (params.lse != nullptr) store_lse(plan, row_begin);
    normalise();
    if constexpr (config.masked()) {
      if (__builtin_expect(met_nonfinite, 0)) restore_nonfinite(plan, row_begin, own);
    }
    stage_and_store(plan, row_begin);
  }

  __device__ __forceinline__ void work_tile(const TilePlan& plan, const int& met_nonfinite) {
    const int row_begin = plan.row_begin + warpgroup * 64;
    const bool has_rows = row_begin < params.seq_q;
    TileRange own{0, 0};
    if (has_rows)
      own = touched_tiles(band_of(params), row_begin, min_int(row_begin + 64, params.seq_q),
                          block_kv);
    begin_rows();
    if (own.empty()) {
      ptx::mbarrier_wait(&smem.q_full[warpgroup], q_phase);
      for (int n = plan.touched.count(); n > 0; --n) skip_tile();
    } else {
      attend(plan, row_begin, own);
    }
    if (has_rows) finish(plan, row_begin, own, met_nonfinite != 0);
    // Q's slot is free once its last product is done; where out stands in its place, once the store
    // has read that.
    if (!config.separate_out || own.empty()) release_queries();
  }

  __device__ __forceinline__ void run() {
    if (config.turns() && warpgroup == config.consumers - 1)
      ptx::barrier_arrive<256>(BarrierId::turn);
    for (;; work_position.advance()) {
      ptx::mbarrier_wait(&smem.work_full[work_position.stage], work_position.phase);
      const TilePlan plan = smem.plan[work_position.stage];
      if (plan.row_begin == TilePlan::no_more_work) break;
      work_tile(plan, smem.met_nonfinite[work_position.stage]);
      arrive(&smem.work_empty[work_position.stage]);
    }
    if (lane == 0) ptx::tma_store_wait_read<0>();
  }

  __device__ __forceinline__ void stage_and_store(const TilePlan& plan, int row_begin) {
    if constexpr (config.separate_out) {
      if (lane == 0) ptx::tma_store_wait_read<0>();  // the store of the tile before
      __syncwarp();
      store_out(plan, row_begin, smem.out[warpgroup]);
    } else {
      ptx::barrier_sync<128>(BarrierId::q_read + warpgroup);
      store_out(plan, row_begin, smem.q[warpgroup]);
      if (lane == 0) ptx::tma_store_wait_read<0>();
    }
  }
};

}  // namespace tilewise::sm90
