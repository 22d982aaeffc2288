// clang-format off
// This kernel computes forward attention in float32 on Hopper's 16-bit tensor cores: operands are split into parts, and
// products of parts are added up.
//
// Symbols as in forward.cuh: Q (seq_q x d), K (seq_k x d), V (seq_k x dv) of one (batch, head); a CTA owns
// block_q = 64 * consumers rows, of which each consumer warpgroup owns 64. KV tiles of block_kv keys are visited from the
// last to the first. X_i: part i of X times the power of two of its tile (float32_split.cuh); e_q, e_k, e_v: those powers;
// c = scale * log2(e). Sums over the terms (i, j) run from the smallest to (0, 0): three for two parts, six for three.
//
//   1. S = sum of Q_i K_j^T             wgmma, both operands in shared memory, one accumulator
//   2. c' = c 2^-(e_q + e_k), unless a term of the policy (common/scores.cuh) changes scores: then c' = c. Softcap:
//      S = tanh(S 2^-(e_q + e_k) scale / cap), c = cap * log2(e)
//   3. in partial tiles: S[r, k] = -inf where a term hides k from r; the band hides keys outside [first_key(r), end_key(r))
//   4. t = rowmax S of this tile alone; m' = max(m, 2^-(e_q + e_k) t); keep = 2^(c (m - m')), take = 2^(c (t - m')), m = m'
//   5. P = 2^(c' (S - t)), l = keep l + take rowsum P; then terms may drop weights
//   6. P_i: parts of P (times 2^14 for fp16), in registers
//   7. F = sum of P_i V_j               wgmma, into fresh accumulators
//   8. O = keep O + take 2^-(e_v + 14) F   float32, in registers
//   9. terms may finish m and l; out = O / l, lse = round(scale m) + ln l; a row without keys gives out = 0, lse = -inf
// Why P is relative to the maximum of the tile: parts of fp16 are then exact relative to the largest weight of the tile,
// whatever came before; step 8 needs a factor for F in any case. Why F is fresh: the tensor core truncates its sums.
// Overlap: step 1 of the next tile is queued after step 7 in the tensor pipe, step 8 overlaps with it, and steps 2-6 overlap
// with the other warpgroup's products.
//
// Admission. Two parts of fp16 suffice for a CTA if, for every tile that it touches,
//   - q, k and v are finite, and the exponents of the largest q and k add up to at most `max_exponents`;
//   - rows of V are within 2^14 of one another, columns within 2^12 (float32_split.cuh).
// A CTA that is refused records this and ends. The kernel with three parts of bf16, launched after it, computes those rows; its
// other CTAs end at once, and so does the split for it. Every choice is made on the device, from the data; the host never
// waits. Where gradients will be wanted, the kernel with three parts runs alone: the backward uses the same parts, so its
// scores are bit-identical to those that lse was computed from.
//
// Roles. Warpgroup 0: one thread of warp 0 is the producer and issues all loads. Warpgroups 1..consumers do the rest. There is
// one CTA per tile of rows, and one CTA per SM. Shared memory (struct Smem): Q, K and V in all their parts, and the plan, which
// is kept there to leave the registers to the loop.
//
// Barriers
//   name            arrives, count                 waits       protects
//   q_full[wg]      producer + TMA bytes, 1        consumer    Q of the warpgroup is loaded
//   k_full[stage]   producer + TMA bytes, 1        consumers   K tile is loaded
//   k_empty[stage]  consumer warps, 4 * consumers  producer    K tile is read
//   v_full[stage]   producer + TMA bytes, 1        consumers   V tile is loaded
//   v_empty[stage]  consumer warps, 4 * consumers  producer    V tile is read
//   named 1 + wg    the other warpgroup + wg       consumer    its turn to issue
//
// Registers per consumer thread: S block_kv / 2, P parts * block_kv / 4, F value_columns / 2, O dv / 2; out of 232 with two
// consumers, 240 with one.
// clang-format on
#pragma once

#include "float32_consumer.cuh"

namespace tilewise::sm90::float32 {

template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ Plan<Extents> make_plan(
    const ParamsOf<Params, Policy, Extents>& params) {
  const Schedule schedule{params.heads, params.batch * params.heads, params.q_tiles,
                          params.sections, params.longest_first};
  Plan<Extents> plan;
  plan.tile = schedule.tile(blockIdx.x);
  static_cast<typename Extents::Record&>(plan) = Extents::find(params, plan.tile.batch);
  const auto sequence = sequence_of<Extents>(params, plan);
  const Band band = sequence.band();
  plan.row_begin = plan.tile.q_tile * config.block_q();
  const int row_end = min_int(plan.row_begin + config.block_q(), sequence.seq_q());
  plan.parts_of_rows = ceil_div(row_end - plan.row_begin, 64);
  plan.touched = touched_tiles(band, plan.row_begin, row_end, config.block_kv);
  plan.full = full_tiles(band, plan.row_begin, row_end, config.block_kv, plan.touched);
  narrow_tiles<Policy>(params, plan.tile.batch, plan.row_begin, row_end, config.block_kv,
                       plan.touched, plan.full);
  const int pair = plan.tile.batch * params.heads + plan.tile.head;
  // Facts describe 64-row parts and KV tiles of the tensors; with several sequences, each sequence
  // would have to begin at such a part.
  static_assert(!Extents::ragged, "the split makes parts of whole tensors");
  const int row_parts = pair * ceil_div(params.seq_q, 64) + plan.row_begin / 64;
  const int kv_tiles = (plan.tile.batch * (params.heads / params.heads_per_kv) +
                        plan.tile.head / params.heads_per_kv) *
                       ceil_div(params.seq_k, config.block_kv);
  plan.q_facts = params.q_facts + row_parts;
  plan.k_facts = params.k_facts + kv_tiles;
  plan.v_facts = params.v_facts + kv_tiles;
  plan.refused = params.refused + row_parts;
  return plan;
}

// Whether two parts suffice for this CTA's rows and keys. All threads call it and get the same
// answer.
template <Config config, typename Extents>
__device__ __forceinline__ bool is_admitted(const Params& params, const Plan<Extents>& plan) {
  int q_exponent = no_exponent;
  bool refused = false;
  for (int i = 0; i < plan.parts_of_rows; ++i) {
    q_exponent = max_int(q_exponent, plan.q_facts[i].exponent);
    refused = refused || plan.q_facts[i].spread != spread_tame;
  }
  for (int n = plan.touched.begin + threadIdx.x; n < plan.touched.end; n += config.threads()) {
    const TileFact k = plan.k_facts[n];
    refused = refused || k.spread != spread_tame || plan.v_facts[n].spread != spread_tame ||
              q_exponent + k.exponent > params.max_exponents;
  }
  return !__syncthreads_or(refused);
}

// Whether this kernel computes this CTA's rows.
template <Config config, typename Extents>
__device__ __forceinline__ bool is_mine(const Params& params, const Plan<Extents>& plan) {
  if constexpr (config.takes_refused()) {
    if (params.any_refused == nullptr) return true;
    if (*params.any_refused == 0) return false;
    int refused = 0;
    for (int i = 0; i < plan.parts_of_rows; ++i) refused |= plan.refused[i];
    return refused != 0;
  } else {
    const bool admitted = is_admitted<config, Extents>(params, plan);
    if (threadIdx.x < plan.parts_of_rows) plan.refused[threadIdx.x] = !admitted;
    if (threadIdx.x == 0 && !admitted) *params.any_refused = 1;
    return admitted;
  }
}

// Values near either end of float32's range are added up in other units, so that sums neither
// overflow nor lose bits.
template <Config config, typename Extents>
__device__ __forceinline__ void look_at_values(Plan<Extents>& plan) {
  bool large = false, ordinary = false, nonfinite = false;
  for (int n = plan.touched.begin + threadIdx.x; n < plan.touched.end; n += config.threads()) {
    const TileFact fact = plan.v_facts[n];
    large = large || fact.exponent > 96;
    ordinary = ordinary || fact.exponent >= -70;
    nonfinite = nonfinite || fact.spread == spread_nonfinite;
  }
  const bool any_large = __syncthreads_or(large), any_ordinary = __syncthreads_or(ordinary);
  plan.out_exponent = any_large ? 30 : any_ordinary ? 0 : -80;
  plan.met_nonfinite = config.takes_refused() && __syncthreads_or(nonfinite);
}

template <Config config, typename Extents>
struct Producer {
  const Params& params;
  Smem<config, Extents>& smem;
  const Plan<Extents>& plan;
  RingPosition<config.k_stages> k_position{1};
  RingPosition<config.v_stages> v_position{1};

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  // TMA fills rows and columns beyond the tensor with zeros.
  template <int bytes>
  __device__ __forceinline__ void load(unsigned char (&parts)[config.parts][bytes],
                                       const ptx::TensorMap& map, u64* barrier, int rows, int row,
                                       int head, ptx::CachePolicy policy) {
    ptx::mbarrier_arrive_expect_tx(barrier, config.parts * bytes);
    // Why not unrolled: the producer has few registers.
#pragma unroll 1
    for (int part = 0; part < config.parts; ++part)
#pragma unroll 1
      for (int panel = 0; panel < bytes / panel_bytes(rows); ++panel)
        ptx::tma_load_4d(parts[part] + panel * panel_bytes(rows), &map, barrier,
                         panel * panel_columns, row, head,
                         part * params.batch + sequence().batch(plan.tile.batch), policy);
  }

  __device__ __forceinline__ void load_q() {
    for (int i = 0; i < config.consumers; ++i)
      load(smem.q[i], params.q_map, &smem.q_full[i], 64,
           sequence().q_start() + plan.row_begin + i * 64, plan.tile.head,
           ptx::CachePolicy::evict_first);
  }

  __device__ __forceinline__ void load_k(int kv_tile) {
    ptx::mbarrier_wait(&smem.k_empty[k_position.stage], k_position.phase);
    load(smem.k[k_position.stage], params.k_map, &smem.k_full[k_position.stage], config.block_kv,
         sequence().k_start() + kv_tile * config.block_kv, plan.tile.head / params.heads_per_kv,
         ptx::CachePolicy::evict_last);
    k_position.advance();
  }

  __device__ __forceinline__ void load_v(int kv_tile) {
    ptx::mbarrier_wait(&smem.v_empty[v_position.stage], v_position.phase);
    load(smem.v[v_position.stage], params.v_map, &smem.v_full[v_position.stage], config.block_kv,
         sequence().k_start() + kv_tile * config.block_kv, plan.tile.head / params.heads_per_kv,
         ptx::CachePolicy::evict_last);
    v_position.advance();
  }

  // Invariant: consumers wait for K and V in exactly this order.
  __device__ __forceinline__ void run() {
    if (plan.touched.empty()) return;
    load_q();
    for (int n = plan.touched.end - 1; n >= plan.touched.begin; --n) {
      load_k(n);
      load_v(n);
    }
  }
};

template <Config config, typename Extents>
__device__ __forceinline__ void init_barriers(Smem<config, Extents>& smem) {
  constexpr u32 consumer_warps = config.consumers * 4;
  for (int i = 0; i < config.consumers; ++i) ptx::mbarrier_init(&smem.q_full[i], 1);
  for (int i = 0; i < config.k_stages; ++i) {
    ptx::mbarrier_init(&smem.k_full[i], 1);
    ptx::mbarrier_init(&smem.k_empty[i], consumer_warps);
  }
  for (int i = 0; i < config.v_stages; ++i) {
    ptx::mbarrier_init(&smem.v_full[i], 1);
    ptx::mbarrier_init(&smem.v_empty[i], consumer_warps);
  }
  ptx::fence_mbarrier_init();
}

template <Config config, typename Policy, typename Extents>
__device__ __forceinline__ void forward(const ParamsOf<Params, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem<config, Extents>& smem = *reinterpret_cast<Smem<config, Extents>*>(smem_bytes);
  // Why the shuffle: it lets the compiler know that the role is uniform across the warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers<config, Extents>(smem);
  // Launches overlap: nothing that another kernel may have written, or may still read, is touched
  // above this line.
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  Plan<Extents> plan = make_plan<config, Policy, Extents>(params);
  if (!is_mine<config, Extents>(params, plan)) return;
  look_at_values<config, Extents>(plan);
  if (threadIdx.x == 0) smem.plan = plan;
  __syncthreads();
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::producer_registers>();
    if (warp == 0 && ptx::elect_one()) Producer<config, Extents>{params, smem, smem.plan}.run();
  } else {
    ptx::setmaxnreg_inc<config.consumer_registers()>();
    Consumer<config, Policy, Extents>{params, smem, smem.plan, warp / 4 - 1}.run();
  }
}

}  // namespace tilewise::sm90::float32
