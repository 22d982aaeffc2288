// clang-format off
// This kernel computes the gradients of attention in float32 on Hopper's 16-bit tensor cores: every operand is split into
// three parts of bf16, and every product takes six products of parts.
//
// Symbols as in backward.cuh: Q, dO (seq_q x d, dv) of one (batch, head), K, V (seq_k x d, dv) of its KV head;
// D = rowsum(dO * O) - dlse. A CTA owns 64 keys of one KV head, or a piece of their work, and goes through the query tiles of
// 64 rows that see them, head by head of the group. Keys are rows, so that P^T and dS^T are already in the layout of A
// operands. X_i: part i of X times the power of two of its tile (float32_split.cuh); e_x: those powers. Sums over the six
// terms (i, j) run from the smallest to (0, 0).
//
//   1. S^T = sum of K_i Q_j^T                   wgmma, both in shared memory
//   2. P^T = exp(round(scale 2^-(e_k + e_q) S^T) - lse)     0 where a term hides key k from row r
//   3. dP^T = sum of V_i dO_j^T                 wgmma
//   4. dS^T = P^T * (2^(u - e_v - e_o) dP^T - 2^u D)     u: 0, unless all of it is very small or large
//   5. dV += 2^-e_o sum of P_i dO_j             wgmma with P in registers, into fresh accumulators; then added in float32
//   6. dK += 2^-(u + e_q) sum of dS_i Q_j       likewise
//   7. dQ += 2^-(u + e_k) scale sum of dS_i K_j      wgmma, dS from shared memory, into fresh accumulators; then added to dQ
//                                                    in global memory, in any order, or in key order, which gives the same
//                                                    bits every time
// Where a term of the policy (common/scores.cuh) changes scores, it is applied before step 2, whose scale then includes no
// power of two, and the P of step 4 is multiplied by the slopes of the terms. Softcap: S = tanh(2^-(e_k + e_q) S scale / cap),
// scale = cap, slope 1 - S^2.
// Where a term drops weights, the P of step 5 has zeros, and so has dP before D is subtracted.
// S and its rounding are bit-identical to the forward's (which also uses three parts of bf16 where gradients are wanted):
// weights add up to 1 even where scores are in the thousands and the last bit of a score is worth more than float32's
// accuracy.
// Why three parts of bf16 and not two of fp16, as in the forward: bf16 has the exponents of float32. The weights of a key may
// be of any size (only those of a query add up to 1), and so may dS. Parts of fp16 would need a scale for every key and tile,
// and this kernel would still be needed for values that they cannot hold. Why fresh accumulators: the tensor core truncates its
// sums.
//
// Pieces. KV tiles that are few, long or unequal are cut into pieces (common/pieces.cuh), one CTA each. The first piece of a
// tile that is done with dV or dK stores it, and later pieces add theirs: in the order of arrival or, if gradients are to be
// deterministic, by their numbers (common/piece_tickets.cuh). Products of gradients that are not wanted (5, 6, 7) are left out.
//
// Roles. Warpgroup 0: one thread issues all loads. Warpgroup 1 computes dQ (7). Warpgroup 2 owns dV (1, 2, 5) and passes P on
// through shared memory; warpgroup 3 owns dK (3, 4, 6) and passes dS on in the same place. Each waits for its own products,
// while those of the others run.
//
// Shared memory (struct GradSmem): K and V of the CTA, and rings of Q and dO, all in three parts; rooms that hold first P, then
// dS.
//
// Barriers
//   name                  arrives, count              waits             protects
//   k_full, v_full        producer + TMA bytes, 1     1 and 2, 3        K, V are loaded
//   q_full[stage]         producer + TMA bytes, 1     2 and 3           Q and lse are loaded
//   q_empty[stage]        warps of 2 and 3, 8         producer          Q and lse are read
//   dout_full[stage]      producer + TMA bytes, 1     2 and 3           dO and D are loaded
//   dout_empty[stage]     warps of 2 and 3, 8         producer          dO and D are read
//   weights_full[room]    warps of 2, 4               3                 P is written
//   ds_full[room]         warps of 3, 4               1                 dS is written
//   room_empty[room]      warps of 1, 4               2                 dS is read
//   named 1               3, 128 threads              itself            P is read before dS replaces it
//   named 2               1, 128 threads              itself            with in_order: its ticket has come up; its sums are added
//   named 3, 1            2 and 3, 128 threads        itself            with pieces: likewise, for dV and for dK
//
// Registers per thread (512 threads in four warpgroups): producer 32; dQ 112: d / 2 accumulators; warpgroups 2 and 3: 184:
// sums d / 2, parts 48, fresh accumulators 32 (48 for d = 96), which share registers with S or dP.
// clang-format on
#pragma once

#include "float32_backward_roles.cuh"

namespace tilewise::sm90::float32 {

template <GradConfig config, typename Extents>
struct GradProducer {
  const GradParams& params;
  GradSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  // TMA fills rows and columns beyond the tensor with zeros.
  template <int bytes>
  __device__ __forceinline__ void load(unsigned char (&parts)[grad_parts][bytes],
                                       const ptx::TensorMap& map, u64* barrier, int row, int head,
                                       ptx::CachePolicy policy) {
    // Why not unrolled: the producer has few registers.
#pragma unroll 1
    for (int part = 0; part < grad_parts; ++part)
#pragma unroll 1
      for (int panel = 0; panel < bytes / panel_bytes(grad_block); ++panel)
        ptx::tma_load_4d(parts[part] + panel * panel_bytes(grad_block), &map, barrier,
                         panel * panel_columns, row, head,
                         part * params.batch + sequence().batch(plan.batch), policy);
  }

  __device__ __forceinline__ void load_rows(float* destination, const float* source, u64* barrier,
                                            const StepCursor& at) {
    const long long tile = query_tile_index(params, plan, at.head, at.q_tile);
    ptx::bulk_load(destination, source + tile * grad_block, grad_block * sizeof(float), barrier);
  }

  __device__ __forceinline__ void load_keys() {
    ptx::mbarrier_arrive_expect_tx(&smem.k_full, sizeof(smem.k));
    load(smem.k, params.k_map, &smem.k_full, sequence().k_start() + plan.kv_tile * grad_block,
         plan.head_kv, ptx::CachePolicy::evict_first);
  }
  __device__ __forceinline__ void load_values() {
    ptx::mbarrier_arrive_expect_tx(&smem.v_full, sizeof(smem.v));
    load(smem.v, params.v_map, &smem.v_full, sequence().k_start() + plan.kv_tile * grad_block,
         plan.head_kv, ptx::CachePolicy::evict_first);
  }
  __device__ __forceinline__ void load_q(int stage, const StepCursor& at) {
    u64* full = &smem.q_full[stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.q[0]) + sizeof(smem.lse[0]));
    load(smem.q[stage], params.q_map, full, sequence().q_start() + at.q_tile * grad_block,
         plan.head_kv * params.heads_per_kv + at.head, ptx::CachePolicy::evict_last);
    load_rows(smem.lse[stage], params.lse, full, at);
  }
  __device__ __forceinline__ void load_dout(int stage, const StepCursor& at) {
    u64* full = &smem.dout_full[stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.dout[0]) + sizeof(smem.row_terms[0]));
    load(smem.dout[stage], params.dout_map, full, sequence().q_start() + at.q_tile * grad_block,
         plan.head_kv * params.heads_per_kv + at.head, ptx::CachePolicy::evict_last);
    load_rows(smem.row_terms[stage], params.row_terms, full, at);
  }

  // Why dO comes before Q: with one stage it is the first to become free, and the first to be
  // needed.
  __device__ __forceinline__ void run() {
    StepCursor cursor(plan);
    RingPosition<config.stages> position(1);
    load_keys();
    for (int i = 0; i < plan.steps; ++i, position.advance(), cursor.advance(plan)) {
      if (i == 0) load_q(0, cursor), load_values();
      ptx::mbarrier_wait(&smem.dout_empty[position.stage], position.phase);
      load_dout(position.stage, cursor);
      if (i == 0) continue;
      ptx::mbarrier_wait(&smem.q_empty[position.stage], position.phase);
      load_q(position.stage, cursor);
    }
  }
};

template <GradConfig config, typename Extents>
__device__ __forceinline__ void init_grad_barriers(GradSmem<config, Extents>& smem) {
  ptx::mbarrier_init(&smem.k_full, 1);
  ptx::mbarrier_init(&smem.v_full, 1);
  for (int i = 0; i < config.stages; ++i) {
    ptx::mbarrier_init(&smem.q_full[i], 1);
    ptx::mbarrier_init(&smem.q_empty[i], 8 * arrivals_of_warp);
    ptx::mbarrier_init(&smem.dout_full[i], 1);
    ptx::mbarrier_init(&smem.dout_empty[i], 8 * arrivals_of_warp);
  }
  for (int i = 0; i < config.rooms; ++i) {
    ptx::mbarrier_init(&smem.weights_full[i], 4 * arrivals_of_warp);
    ptx::mbarrier_init(&smem.ds_full[i], 4 * arrivals_of_warp);
    ptx::mbarrier_init(&smem.room_empty[i], 4 * arrivals_of_warp);
  }
  ptx::fence_mbarrier_init();
}

template <GradConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void backward(const ParamsOf<GradParams, Policy, Extents>& params) {
  static_assert(!Extents::ragged, "the split makes parts of whole tensors");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  GradSmem<config, Extents>& smem = *reinterpret_cast<GradSmem<config, Extents>*>(smem_bytes);
  // Why the shuffle: it lets the compiler know that the role is uniform across the warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 0) {
    if (params.work_tickets != nullptr) ptx::wait_for_previous_grid();  // it zeroed the tickets
    BackwardPlan<Extents> plan = make_backward_plan<Policy, Extents, grad_block, grad_block, false>(
        params, take_work(params.work_tickets), params.in_order ? stairs : around);
    if (threadIdx.x == 0) {
      smem.plan = plan;
      init_grad_barriers<config, Extents>(smem);
    }
  }
  // Launches overlap: nothing that another kernel may have written, or may still read, is touched
  // above this line.
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  __syncthreads();
  const BackwardPlan<Extents>& plan = smem.plan;
  if (warp < 4) {
    ptx::setmaxnreg_dec<GradConfig::producer_registers>();
    if (warp == 0 && plan.steps > 0 && ptx::elect_one())
      GradProducer<config, Extents>{params, smem, plan}.run();
  } else if (warp < 8) {
    ptx::setmaxnreg_dec<GradConfig::query_registers>();
    GradDqWarpgroup<config, Policy, Extents>(params, smem).run();
  } else {
    ptx::setmaxnreg_inc<GradConfig::product_registers>();
    if (warp < 12)
      GradDvWarpgroup<config, Policy, Extents>(params, smem).run();
    else
      GradDkWarpgroup<config, Policy, Extents>(params, smem).run();
  }
}

}  // namespace tilewise::sm90::float32
