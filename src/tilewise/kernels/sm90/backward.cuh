// clang-format off
// This kernel computes the gradients of attention on Hopper with TMA loads, wgmma products and warp specialisation. One CTA
// handles one KV tile, or one piece of a KV tile.
//
// Symbols. Q, dO (seq_q x d, dv) of one (batch, head), K, V (seq_k x d, dv) of its KV head; lse from the forward;
// D = rowsum(dO * O) - dlse. A CTA owns block_kv keys of one KV head and goes through the query tiles of block_q rows that
// see them, head by head of the group; where KV tiles are few or long, it goes through a piece of these steps
// (common/pieces.cuh). c = scale * log2(e).
// Everything is kept transposed (keys are rows), so that P^T and dS^T are already in the layout of A operands.
//
//   1. S^T = K Q^T - lse / scale          wgmma, both operands in shared memory; the accumulator starts from the row term, so
//                                         that the term costs nothing
//   2. in partial tiles: S^T[k, r] = -inf where a term of the policy (common/scores.cuh) hides key k from row r
//   3. P^T = 2^(c S^T)
//   4. dP^T = V dO^T - D                  wgmma, as in step 1
//   5. dV += round16(P^T) dO              wgmma, P in registers
//   6. dS^T = P^T * dP^T
//   7. dK += round16(dS^T) Q              wgmma, dS in registers
//   8. dQ += round16(dS) K                wgmma, dS from shared memory; summed over KV tiles in global memory (float32), and
//                                         written by the last KV tile or by postprocess
//   9. for a KV tile in pieces: dK and dV are summed over the pieces in global memory (float32). The first piece stores its
//      sums, later pieces add theirs, and the last piece adds its own to the stored sums and writes the result
// Where a term changes scores, S starts from 0, the row term is added after the terms, and dS is multiplied by their slopes.
// Softcap: S = tanh(S * scale / cap), slope 1 - S^2, with S recovered from P. Where a term drops weights, dP starts from 0 and
// D is subtracted afterwards; the P of step 5 then has zeros, and step 5 runs together with step 7. Step 1 also draws which
// weights are dropped. dS is computed divided by the factor of kept weights, and the host multiplies dQ and dK by it.
// preprocess computes both row terms and, where KV tiles add in any order, zeroes the sums. Where one KV tile holds all keys
// and the rings hold all query tiles of a CTA, warpgroups 2 and 3 compute the row terms while the first loads are in flight,
// and no other kernel runs (makes_row_terms).
// Overlap: steps 7 of one query tile and 1 of the next are in flight together, as are 4 and 5; the exponentials of one
// warpgroup overlap with the products of the others.
//
// Sums of dQ (enum Order). In key order, KV tiles add one after another, from the last to the first or the other way round,
// which gives the same bits every time. In claim order they add in the order in which they arrive. In any order no tile waits,
// and postprocess rounds the sums. Enum Walk defines which tiles run side by side and where each begins.
//
// Roles. Warpgroup 0: one thread, the producer, issues all loads except those of a staged bias, which another thread issues;
// unless tiles add in any order, a second thread waits for this tile's tickets and a third passes them on. With ragged
// sequences, the fourth warp clears the rows of Q and dO that belong to another sequence.
// Warpgroup 1 computes dQ (step 8).
// Warpgroups 2 and 3 do the rest. They divide it by keys (each owns dK and dV of 64 of 128 keys) or, where those would not fit
// in the registers (d > 128), by product: both work on the same 64 keys; one owns dV (steps 1-3, 5) and passes P on through
// shared memory, the other owns dK (steps 4, 6, 7).
//
// Shared memory (struct BackwardSmem): K and V of the CTA, reused at the end to stage dK and dV; rings of Q and dO with their
// row terms; a ring of dS; P on its way between warpgroups; a ring of a staged bias (staged_bias.cuh); barriers, the plan, and
// the head of every stage for terms that use it, with the random words of that head where weights are dropped.
//
// Barriers
//   name                  arrives, count              waits             protects
//   k_full, v_full        producer + TMA bytes, 1     2 and 3           K, V are loaded
//   q_full[stage]         producer + TMA bytes, 1     2 and 3           Q and the start of S are loaded
//   q_empty[stage]        warps of 2 and 3, 8         producer          Q is read
//   dout_full[stage]      producer + TMA bytes, 1     2 and 3           dO and the start of dP are loaded
//   dout_empty[stage]     warps of 2 and 3, 8         producer          dO is read
//   for a query tile that crosses the end of its sequence:
//   q_full[stages + i]    producer + TMA bytes, 1     the clearing warp Q and the start of S are loaded
//   q_full[i]             the clearing warp, 1        2 and 3           the rows past its end are zero; dO likewise
//   bias_full[stage]      bias producer + TMA, 1      warps that make P the bias is loaded
//   bias_empty[stage]     warps that make P, 8 or 4   bias producer     the bias is read
//   ds_full[stage]        warps that make dS, 8 or 4  1                 dS is written
//   ds_empty[stage]       warps of 1, 4               2 and 3           dS is read; at the end K and V too
//   weights_full, _empty  warps of 2, of 3, 4 each    3, 2              P is passed on; at the end V is read
//   ticket_come[stage]    ticket keepers, 2           1                 this tile's ticket has come up
//   ticket_over[stage]    warps of 1, 4               ticket keepers    the sums of this step are added
//   named 1 + wg          2 or 3, 128 threads         itself            V is read before dV replaces it;
//                                                                       the ticket of a piece
//   named 3               2 and 3, 256 threads        themselves        the row terms of all steps are computed
//
// Gradients that are not wanted are left out of the kernel: without dQ, step 8 and the dS in shared memory are omitted; without
// dK and dV, steps 5, 7 and 9 are.
//
// Registers per thread (512 threads in four warpgroups): producer 24; dQ 72 (d = 64, 128, 256: 64 columns at a time), 120
// (96), 128 (192); products: S or dP block_q / 2, P and its rest 3 block_q / 8, dK and dV (d + dv) / 2 or one of them, out of
// 208, 184 (96) or 176 (192).
// clang-format on
#pragma once

#include "backward_products.cuh"
#include "backward_query.cuh"

namespace tilewise::sm90 {

template <BackwardConfig config, typename Extents>
__device__ __forceinline__ void init_backward_barriers(BackwardSmem<config, Extents>& smem) {
  ptx::mbarrier_init(&smem.k_full, 1);
  ptx::mbarrier_init(&smem.v_full, 1);
  for (int i = 0; i < config.stages; ++i) {
    ptx::mbarrier_init(&smem.q_full[i], 1);
    ptx::mbarrier_init(&smem.q_empty[i], 8 * arrivals_of_warp);
    ptx::mbarrier_init(&smem.dout_full[i], 1);
    ptx::mbarrier_init(&smem.dout_empty[i], 8 * arrivals_of_warp);
  }
  for (int i = 0; i < smem.landings; ++i) {
    ptx::mbarrier_init(&smem.q_full[config.stages + i], 1);
    ptx::mbarrier_init(&smem.dout_full[config.stages + i], 1);
  }
  for (int i = 0; i < config.ds_stages; ++i) {
    ptx::mbarrier_init(&smem.ds_full[i], config.ds_writers() * arrivals_of_warp);
    ptx::mbarrier_init(&smem.ds_empty[i], 4);
  }
  if constexpr (config.bias_stages > 0) {
    for (int i = 0; i < config.bias_stages; ++i) {
      ptx::mbarrier_init(&smem.bias_full[i], 1);
      ptx::mbarrier_init(&smem.bias_empty[i], config.bias_readers() * arrivals_of_warp);
    }
  }
  for (int i = 0; i < ticket_stages; ++i) {
    ptx::mbarrier_init(&smem.ticket_come[i], 2);
    ptx::mbarrier_init(&smem.ticket_over[i], 4 * arrivals_of_warp);
  }
  ptx::mbarrier_init(&smem.weights_full, 4 * arrivals_of_warp);
  ptx::mbarrier_init(&smem.weights_empty, 4 * arrivals_of_warp);
  ptx::fence_mbarrier_init();
}

constexpr int producer_registers = 24;

// Uniform across a warp, and known as such to the compiler.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
}

template <BackwardConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void backward(const ParamsOf<BackwardParams, Policy, Extents>& params) {
  static_assert(!Extents::ragged || HasWorkTable<Extents>, "dQ is summed where a work table says");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  BackwardSmem<config, Extents>& smem =
      *reinterpret_cast<BackwardSmem<config, Extents>*>(smem_bytes);
  const int warpgroup = warpgroup_index();
  if (threadIdx.x < 32) {
    if (params.work_tickets != nullptr) ptx::wait_for_previous_grid();  // it zeroed the tickets
    BackwardPlan<Extents> plan =
        make_backward_plan<Policy, Extents, config.block_q, config.block_kv()>(
            params, take_work(params.work_tickets), params.walk);
    if (threadIdx.x == 0) smem.plan = plan;
    if constexpr (Policy::hides_by_span && config.warpgroups_own_keys) {
      const int key = plan.kv_tile * config.block_kv() + threadIdx.x * 64;
      const int end = min_int(key + 64, sequence_of<Extents>(params, plan).seq_k());
      if (threadIdx.x < 2 && key < end)
        smem.own_queries[threadIdx.x] = Policy::seen_queries(params, plan.batch, key, end).some;
    }
  }
  if (threadIdx.x == 128) {
    ptx::prefetch_tensormap(&params.k_map);
    ptx::prefetch_tensormap(&params.q_map);
    ptx::prefetch_tensormap(&params.v_map);
    ptx::prefetch_tensormap(&params.dout_map);
    if constexpr (config.bias_stages > 0) ptx::prefetch_tensormap(&params.bias_map);
    init_backward_barriers<config, Extents>(smem);
  }
  ptx::allow_next_grid();
  __syncthreads();
  // Why in shared memory: a role reads a field when it needs it, which saves registers.
  const BackwardPlan<Extents>& plan = smem.plan;
  const bool has_work = !HasWorkTable<Extents> || plan.kv_tile >= 0;
  // Some thread of every CTA waits for the previous grid. Why: if none did, this grid could end
  // before that one, and the next grid would read sums of dQ that are not zeroed yet.
  if (threadIdx.x == 0 && (!has_work || plan.steps == 0)) ptx::wait_for_previous_grid();
  if (!has_work) return;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<producer_registers>();
    if constexpr (Extents::ragged) {
      static_assert(config.bias_stages == 0, "the fourth warp has other work");
      if (threadIdx.x / 32 == 3) RowClearer<config, Policy, Extents>{params, smem, plan}.run();
    }
    if (plan.steps > 0 && ptx::elect_one()) {
      const int warp = threadIdx.x / 32;
      if (warp == 0) BackwardProducer<config, Policy, Extents>{params, smem, plan}.run();
      if constexpr (config.bias_stages > 0) {
        if (warp == 3) BiasProducer<config, Policy, Extents>{params, smem, plan}.run();
      }
      if constexpr (config.makes_dq && !config.writes_dq &&
                    (!HasTileMap<Extents> || HasTurns<Extents>)) {
        bool takes_tickets = params.dq_tickets != nullptr;
        if constexpr (HasWorkTable<Extents>) takes_tickets = takes_tickets && !plan.unordered();
        if (warp == 1 && takes_tickets)
          DqTicketKeeper<config, Policy, Extents>{params, smem, plan}.await();
        if (warp == 2 && takes_tickets)
          DqTicketKeeper<config, Policy, Extents>{params, smem, plan}.pass();
      }
    }
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<config.query_registers>();
    if constexpr (config.makes_dq) {
      if (plan.steps > 0) DqWarpgroup<config, Policy, Extents>{params, smem, plan}.run();
    }
  } else {
    ptx::setmaxnreg_inc<config.product_registers>();
    if constexpr (config.warpgroups_own_keys) {
      // Why it is recomputed: the first result would occupy a register that is needed elsewhere.
      DkDvWarpgroup<config, Policy, Extents>{{params, smem, plan, warpgroup_index() - 2}}.run();
    } else if (warpgroup == 2) {
      DvWarpgroup<config, Policy, Extents>{{params, smem, plan, 0}}.run();
    } else {
      DkWarpgroup<config, Policy, Extents>{{params, smem, plan, 1}}.run();
    }
  }
}

}  // namespace tilewise::sm90
