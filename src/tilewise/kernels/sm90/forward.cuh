// clang-format off
// This kernel computes forward attention on Hopper with TMA loads, wgmma products, warp specialisation and
// softmax in registers.
//
// Symbols. Q (seq_q x d), K (seq_k x d), V (seq_k x dv) of one (batch, head). A CTA owns
// block_q = 64 * consumers rows at a time, of which each consumer warpgroup owns 64. KV tiles of block_kv
// keys are visited from the last to the first, so that the tiles cut by a causal mask or by the end
// of the keys come first; with a tile map (common/tile_map.cuh) the full ones come first. c = scale * log2(e).
//
//   1. S = Q K_n^T                      wgmma, both operands in shared memory
//   2. the policy's terms apply (common/scores.cuh). Softcap: S = tanh(S * scale / cap), c = cap * log2(e)
//   3. in partial tiles: S[r, k] = -inf where a term hides k from r; the band hides keys outside [first_key(r), end_key(r))
//   4. in the first tile, the tile after a partial first tile, and partial tiles (with a tile map: in the first tile, and in
//      partial tiles where a row of the warp has seen no key yet, or with a softcap):
//      m' = max(m, c * rowmax S), alpha = 2^(m - m'), m = m'; other tiles: m stays, alpha = 1
//   5. P = 2^(c S - m)
//   6. in other tiles: where a thread's share of rowsum P exceeds h times its mean over the previous tiles
//      (h = 3.5 for 128 keys, 5 for 64; or 2^15), its warp takes the true maximum now: alpha and m as in
//      4, P *= alpha (P is recomputed from S where it overflowed)
//   7. l = alpha l + rowsum P; terms may then drop weights, using random words drawn during step 1
//   8. O = alpha O + round16(P) V_n     wgmma, P in registers
//   9. terms may finish m and l; out = O / l, lse = ln2 * (m + log2 l); a row without keys gives out = 0, lse = -inf
// Few queries with many keys (`split`): a CTA takes a part of the keys, and combine.cuh combines the partial out and lse,
// which are in float32.
// Overlap: step 1 of the next tile is issued before step 8 of this one, and steps 2-6 overlap with both; with pingpong they
// also overlap with the other warpgroups' products.
//
// Roles. Warpgroup 0: one thread of warp 0 is the producer, which issues all loads. One thread of warp 1 is the scheduler,
// which takes work, plans it and, where weights are dropped, computes the random words of its head. One thread of warp 2 is the
// storer, which sends finished rows to global memory (with split, consumers store them in float32; with ragged sequences, all
// lanes of warp 2 store). Warp 3 (masked kernels) is the scanner, which replaces inf and NaN by 0 in partial V tiles, because
// 0 * inf is NaN (the epilogue adds such values to the rows that do see them). Warpgroups 1..consumers do everything else.
//
// Shared memory (struct Smem): Q, one 64-row slot per warpgroup; K and V, rings of k_stages and v_stages tiles; space for out,
// all or half of its columns; with a staged bias (staged_bias.cuh), a ring of its tiles, 64 rows per slot, which the warpgroups
// use round-robin; with a staged table (staged_table.cuh), the numbers that each KV tile needs, in the stages of K and under
// the barriers of K; barriers and plans.
//
// Barriers
//   name              arrives, count                 waits                 protects
//   q_full[wg]        producer + TMA bytes, 1        consumer wg           Q slot is loaded
//   q_empty[wg]       warps of wg, 4                 producer              Q slot is read, slow path included
//   k_full[stage]     producer + TMA bytes, 1        consumers             K tile is loaded
//   k_empty[stage]    consumer warps, 4 * consumers  producer              K tile is read, slow path included
//   v_full[stage]     producer + TMA bytes, 1        consumers, scanner    V tile is loaded
//   v_scanned[stage]  scanner, 1                     consumers, partial V  V tile is finite
//   v_empty[stage]    consumer warps and scanner     producer              V tile is read
//   bias_full[slot]   producer + TMA bytes, 1        its consumer wg       bias tile is loaded
//   bias_empty[slot]  warps of that wg, 4            producer              bias tile is read, slow path included
//   out_full[wg]      warps of wg, 4                 storer                out rows are staged
//   out_empty[wg]     storer, 1                      consumer wg           staged rows are read
//   work_full[slot]   scheduler, 1                   all other roles       plan[slot] is written
//   work_empty[slot]  all other roles                scheduler             plan[slot] is read
//   named 1 + wg      the previous warpgroup + wg    consumer wg           its turn to issue (pingpong)
//
// Registers per consumer thread: S block_kv / 2, P block_kv / 4, O dv / 2, out of 232 with two
// consumers and 160 with three; the producer's warpgroup keeps 40 or 32.
// clang-format on
#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace tilewise::sm90 {

template <Config config, typename Extents>
__device__ __forceinline__ void init_barriers(Smem<config, Extents>& smem) {
  constexpr u32 consumer_warps = config.consumers * 4;
  constexpr u32 scanners = config.masked() ? 1 : 0, storers = config.split ? 0 : 1;
  for (int i = 0; i < config.consumers; ++i) {
    ptx::mbarrier_init(&smem.q_full[i], 1);
    ptx::mbarrier_init(&smem.q_empty[i], 4);
    ptx::mbarrier_init(&smem.out_full[i], 4);
    ptx::mbarrier_init(&smem.out_empty[i], 1);
  }
  for (int i = 0; i < config.k_stages; ++i) {
    ptx::mbarrier_init(&smem.k_full[i], 1);
    ptx::mbarrier_init(&smem.k_empty[i], consumer_warps);
  }
  for (int i = 0; i < config.v_stages; ++i) {
    ptx::mbarrier_init(&smem.v_full[i], 1);
    ptx::mbarrier_init(&smem.v_empty[i], consumer_warps + scanners);
    ptx::mbarrier_init(&smem.v_scanned[i], 1);
  }
  if constexpr (config.bias_slots > 0) {
    for (int i = 0; i < config.bias_slots; ++i) {
      ptx::mbarrier_init(&smem.bias_full[i], 1);
      ptx::mbarrier_init(&smem.bias_empty[i], 4);
    }
  }
  for (int i = 0; i < work_slots; ++i) {
    ptx::mbarrier_init(&smem.work_full[i], 1);
    ptx::mbarrier_init(&smem.work_empty[i], 1 + storers + consumer_warps + scanners);
  }
  ptx::fence_mbarrier_init();
}

template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ void forward(const ParamsOf<Params, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<config, Extents>& smem = *reinterpret_cast<Smem<config, Extents>*>(smem_bytes);
  // Why the shuffle: it lets the compiler know that the role is uniform across the warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&params.q_map);
    ptx::prefetch_tensormap(&params.k_map);
    ptx::prefetch_tensormap(&params.v_map);
    ptx::prefetch_tensormap(&params.out_map);
    if constexpr (config.bias_slots > 0) ptx::prefetch_tensormap(&params.bias_map);
    init_barriers<config, Extents>(smem);
  }
  // Launches overlap: this grid may start while the previous one is still ending, so nothing that
  // another kernel may have written, or may still read, is touched above this line.
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  __syncthreads();
  if (warp < 4) {
    ptx::setmaxnreg_dec<config.producer_registers()>();
    if (warp == 0) {
      if (ptx::elect_one()) Producer<config, Policy, Extents>{params, smem}.run();
    } else if (warp == 1) {
      if (ptx::elect_one()) schedule_work<config, Policy, Extents>(params, smem);
    } else if (warp == 2 && !config.split) {
      if (Extents::ragged || ptx::elect_one()) store_outs<config, Extents>(params, smem);
    } else if (warp == 3 && config.masked()) {
      scan_values<config, Extents>(params, smem);
    }
  } else {
    ptx::setmaxnreg_inc<config.consumer_registers()>();
    Consumer<config, Policy, Extents>{params, smem, warp / 4 - 1}.run();
  }
}

}  // namespace tilewise::sm90
