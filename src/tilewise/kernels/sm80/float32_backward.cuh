// clang-format off
// This kernel computes the gradients of float32 attention on every GPU from sm_80 on, with cp.async loads and TF32 products
// by mma.sync, three for each float32 product. One CTA handles one KV tile, or one piece of a KV tile.
//
// Symbols. Q, dO (seq_q x d, dv) of one (batch, head), K, V (seq_k x d, dv) of its KV head; lse from the
// forward; D = rowsum(dO * O) - dlse. A CTA owns block_kv keys of one KV head, each warp 16 of them, and goes
// through the query tiles of block_q rows that see them, head by head of the group.
//
//   1. S^T = K Q^T                        K and Q from shared memory (float32_products.cuh); six products for large scores
//                                         that matter (float32_precise.cuh)
//   2. the policy's terms apply (common/scores.cuh). Softcap: S = tanh(S * scale / cap), scale = cap
//   3. in partial tiles: S[r, k] = -inf where a term hides key k from row r
//   4. P = e^(scale S - lse)              S and its product with the scale are bit-identical to the forward's; otherwise
//                                         large scores would be inconsistent with lse
//   5. dP^T = V dO^T
//   6. dS = P * (dP - D)                  times the slopes of the terms (softcap: 1 - S^2); to shared memory for step 9
//   7. dV += P^T dO                       P^T in the registers in which the first product left it, without the weights that a
//                                         term drops; dP of step 6 likewise
//   8. dK += scale dS^T Q                 likewise
//   9. dQ += scale dS K                   added up over KV tiles in global memory
// Sums of steps 7 and 8 leave the tensor core after every query tile, 32 columns at a time, and are added outside of it.
// float32_preprocess computes the row terms of 4 and 6 and zeroes dQ. Step 9 is left out where dQ is not wanted, and steps 7
// and 8 where neither dK nor dV is.
//
// Pieces. KV tiles that are few, long or unequal are cut into pieces (common/pieces.cuh), one CTA each. The first piece of a
// tile that is done stores its dK and dV, and later pieces add theirs, in the final units: in the order of arrival or, if
// gradients are to be deterministic, by their numbers (common/piece_tickets.cuh).
//
// Small tiles. The low parts of numbers below 2^-113 have fewer bits than they need. Tiles of Q, K, V and dO that have no
// number of 2^-95 or more are multiplied by 2^64 as they arrive, in shared memory, where each thread multiplies what it has
// copied itself; sums are scaled back as they leave the tensor core (Float32Units). Numbers below 2^-95 are added to
// gradients by compare-and-swap, because reductions in global memory flush subnormal numbers to 0.
//
// Roles. All warps do the same work. Keys are rows of S^T, so that P^T and dS^T are operands of 7 and 8 in the registers that
// hold them; only dQ, which is summed over the keys of all warps, needs dS in shared memory. Its blocks of 32 columns and 16
// or 32 rows are divided over the warps.
//
// Shared memory (struct Float32BackwardSmem): K and V of the CTA; `stages` tiles of Q and dO with their row
// terms; dS.
//
// Synchronisation. There are two places per step, all __syncthreads:
//   before  all threads' copies of this step have arrived; dS of the previous step is read. It runs twice, because
//           whether Q and dO are small is found in between. With two stages the copies for the next step then
//           overwrite the Q and dO of the previous step
//   middle  dS is written; Q and dO are read: with one stage the copies for the next step overwrite them,
//           during step 9
// Deterministic sums: KV tiles add to a query tile's dQ in the order of their keys. A counter per query tile counts the tickets
// that have been served; a barrier follows the wait for it, and another precedes the increment.
//
// Registers per thread: (d + dv) / 2 for dK and dV, block_q / 2 each for P and dS, 32 for fresh sums.
// clang-format on
#pragma once

#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "float32_backward_config.cuh"
#include "float32_precise.cuh"
#include "float32_range.cuh"

namespace tilewise::sm80 {

constexpr float small_unit = 0x1p-64f, large_row_term = 0x1p-30f;

template <Float32BackwardConfig config, typename Policy, typename Extents>
struct Float32Backward {
  static constexpr bool exact = config.exact;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv();
  static constexpr int threads = config.threads();
  static constexpr int panels = config.head_dim / float_panel;
  static constexpr int panels_v = config.head_dim_v / float_panel;
  static constexpr int panel_sums = float_panel / 2;  // numbers per lane for 16 rows of a panel
  // The blocks of 16 rows of dQ that a warp computes at once: two where they divide evenly over the
  // warps and sums are added four at a time. Single additions leave no registers for two.
  static constexpr int dq_tiles =
      config.vector_sums && block_q % 32 == 0 && block_q / 32 * panels % config.warps == 0 ? 2 : 1;
  using Scores = float[block_q / 2];
  template <int rows, int columns>
  using Copy = TileCopy<rows, halves(columns), threads>;
  using KCopy = Copy<block_kv, config.head_dim>;
  using VCopy = Copy<block_kv, config.head_dim_v>;
  using QCopy = Copy<block_q, config.head_dim>;
  using DoutCopy = Copy<block_q, config.head_dim_v>;

  const ParamsOf<Float32BackwardParams, Policy, Extents>& params;
  Float32BackwardSmem<config, Extents>& smem;
  // Why in shared memory: the products need the registers.
  const BackwardPlan<Extents>& plan = smem.plan;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool descend = params.rows_descend != 0;

  StepCursor cursor{plan};
  float dk[config.head_dim / 2];
  float dv[config.head_dim_v / 2];

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }
  __device__ __forceinline__ int head_of(const StepCursor& step) const {
    return plan.head_kv * params.heads_per_kv + step.head;
  }
  // The index of a step's query tile among those of all heads.
  __device__ __forceinline__ long long tile_index(const StepCursor& step) const {
    const long long batch = plan.batch;
    return (batch * params.heads_kv * params.heads_per_kv + head_of(step)) * params.q_tiles +
           step.q_tile;
  }

  __device__ __forceinline__ void load_keys() {
    const int start = sequence().k_start(), batch = sequence().batch(plan.batch);
    const int first = start + plan.kv_tile * block_kv, end = start + sequence().seq_k();
    KCopy{params.k, batch, plan.head_kv, params.head_dim}.load(ptx::smem_address(smem.k), first,
                                                               end);
    VCopy{params.v, batch, plan.head_kv, params.head_dim_v}.load(ptx::smem_address(smem.v), first,
                                                                 end);
  }

  __device__ __forceinline__ void load_step(const StepCursor& step, int slot) {
    const int start = sequence().q_start(), batch = sequence().batch(plan.batch);
    const int first = start + step.q_tile * block_q, end = start + sequence().seq_q();
    const int head = head_of(step);
    QCopy{params.q, batch, head, params.head_dim}.load(ptx::smem_address(smem.q[slot]), first, end);
    DoutCopy{params.dout, batch, head, params.head_dim_v}.load(ptx::smem_address(smem.dout[slot]),
                                                               first, end);
    constexpr int chunks = block_q / 4;
    static_assert(2 * chunks <= threads);
    const int chunk = ptx::thread_again() % chunks, which = ptx::thread_again() / chunks;
    const long long at = tile_index(step) * block_q + chunk * 4;
    if (which == 0)
      ptx::cp_async_16(ptx::smem_address(&smem.lse[slot][chunk * 4]), params.lse + at, 16);
    else if (which == 1)
      ptx::cp_async_16(ptx::smem_address(&smem.row_terms[slot][chunk * 4]), params.row_terms + at,
                       16);
  }

  // Scales a small tile; returns true if its unit changes. When it returns, the copies of all
  // threads have arrived. Invariant: this thread's copies have arrived before the call.
  template <typename Copy, int rows>
  static __device__ __forceinline__ bool lift(u32 matrix, float& unit) {
    const float unit_before = unit;
    const bool is_small = !__syncthreads_or(has_large_floats<Copy, rows>(matrix));
    if (is_small) scale_floats<Copy, rows>(matrix, 1.0f / small_unit);
    const float unit_now = is_small ? small_unit : 1.0f;
    if (unit_now == unit_before) return false;
    if (threadIdx.x == 0) unit = unit_now;
    return true;
  }
  // Handles small tiles as the head of this file describes: Q and dO of a step, and K and V with
  // the first step.
  __device__ __forceinline__ void lift_small(int slot, bool is_first) {
    Float32Units& units = smem.units;
    bool change = lift<QCopy, block_q>(ptx::smem_address(smem.q[slot]), units.q);
    change |= lift<DoutCopy, block_q>(ptx::smem_address(smem.dout[slot]), units.dout);
    if (is_first) {
      change |= lift<KCopy, block_kv>(ptx::smem_address(smem.k), units.k);
      change |= lift<VCopy, block_kv>(ptx::smem_address(smem.v), units.v);
    }
    const bool are_plain = !change && units.s == 1.0f && units.dp * units.ds == 1.0f;
    if (__builtin_expect(are_plain, 1)) return;
    // dS has the units of dP, unless D, which depends on other keys too, is too large for them.
    const float term = threadIdx.x < block_q ? smem.row_terms[slot][threadIdx.x] : 0.0f;
    const bool is_large = __syncthreads_or(fabsf(term) > large_row_term);
    if (threadIdx.x < block_q && !is_large)
      smem.row_terms[slot][threadIdx.x] = term / units.v / units.dout;
    if (threadIdx.x == 0) {
      const float products = units.v * units.dout;
      units.s = units.q * units.k;
      units.dp = is_large ? products : 1.0f;
      units.ds = is_large ? 1.0f : products;
      units.dk = units.q * units.ds;
      units.dq = units.k * units.ds;
    }
    __syncthreads();
  }
  // Reads a unit again at every use. Why: the products need the registers.
  static __device__ __forceinline__ float again(const float& unit) {
    return __uint_as_float(ptx::load_shared_again(ptx::smem_address(&unit)));
  }

  // A B^T of this warp's 16 rows of A and a tile of B, both with the sum index along their rows.
  __device__ __forceinline__ void multiply_rows(u32 a_matrix, u32 b_matrix, int dim,
                                                Scores& product) {
    u32 a_lane = lane_by_rows(a_matrix) + warp * panel_bytes(16);
    u32 b_lane = lane_by_columns(b_matrix);
    Sums<exact, block_q / 2> sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i) product[i] = 0.0f;
    // Why not all panels of the class: the others are zero. Moreover, the assembler does not know
    // the number of panels, so it does not unroll the loop beyond the instruction cache.
    const int panels = ceil_div(dim, panel_columns);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
      for (int step = 0; step < float_panel / 8; ++step) {
        PartsA<exact> a;
        load_a<block_kv>(a_lane, step, a);
#pragma unroll
        for (int pair = 0; pair < block_q / 16; ++pair) {
          PartsB<exact> b[2];
          load_b_along<block_q>(b_lane + pair * panel_bytes(16), step, b);
          sums.template add<Low::of_b>(2 * pair, a, b);
        }
      }
      sums.drain(product);
      a_lane += panel_bytes(block_kv);
      b_lane += panel_bytes(block_q);
    }
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i) product[i] += sums.total(i);
  }

  // Where this thread's scores lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::keys;
    const Float32Backward& kernel;

    __device__ __forceinline__ int row() const {
      return kernel.plan.kv_tile * block_kv + kernel.warp * 16 + kernel.lane / 4;
    }
    __device__ __forceinline__ int column() const {
      return kernel.cursor.q_tile * block_q + 2 * (kernel.lane % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
    __device__ __forceinline__ int head() const { return kernel.head_of(kernel.cursor); }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };

  // Refines scores as float32_precise.cuh describes. `scale` converts them to nats.
  __device__ __forceinline__ void refine(int slot, float scale, Scores& s) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < block_q; i += 32) {
      const float lse = i + lane < block_q ? fabsf(smem.lse[slot][i + lane]) : infinity;
      found |= lse > large_score - 2 * far_below && lse < infinity;
    }
    if (__builtin_expect(!__any_sync(0xffffffffu, found), 1)) return;
    found = false;
    const float* row_lse = smem.lse[slot] + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i)
      found |= s[i] * scale > row_lse[i / 4 * 8 + i % 2] - far_below;
    if (!__any_sync(0xffffffffu, found)) return;
    const int panels = ceil_div(params.head_dim, panel_columns);
    const u32 k_lane = lane_by_rows(ptx::smem_address(smem.k)) + warp * panel_bytes(16);
    const u32 q_lane = lane_by_columns(ptx::smem_address(smem.q[slot]));
#pragma unroll
    for (int pair = 0; pair < block_q / 16; ++pair) {
      float better[8];
      multiply_precisely<Low::of_b, block_kv, block_q>(k_lane, q_lane + pair * panel_bytes(16),
                                                       panels, better);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[8 * pair + i] = refined(s[8 * pair + i], better[i], scale);
    }
  }

  // Steps 1 to 6.
  __device__ __forceinline__ void weigh(int slot, Scores& p, Scores& ds) {
    constexpr float log2_e = 1.44269504088896341f;
    const float* row_lse = smem.lse[slot] + 2 * (lane % 4);
    const float* row_term = smem.row_terms[slot] + 2 * (lane % 4);
    float values[Policy::has_slope ? block_q / 2 : 1];  // S after step 2, for its slope
    multiply_rows(ptx::smem_address(smem.k), ptx::smem_address(smem.q[slot]), params.head_dim, p);
    if constexpr (Policy::transforms)
      Policy::apply(p, params, Unit{again(smem.units.s)}, ElementCoords{*this});
    if constexpr (Policy::has_slope) {
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) values[i] = p[i];
    }
    if constexpr (exact && !Policy::transforms)
      refine(slot, params.softmax_scale * again(smem.units.s), p);
    if (plan.partial(cursor.q_tile)) Policy::hide(p, params, ElementCoords{*this});
    const float scale = params.softmax_scale * (Policy::transforms ? 1.0f : again(smem.units.s));
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i) {
      const float lse = row_lse[i / 4 * 8 + i % 2];
      // Why these are two operations: the forward rounded this product for the largest score, and
      // then added ln l.
      p[i] = ptx::ex2(__fadd_rn(__fmul_rn(p[i], scale), -lse) * log2_e);
    }
    multiply_rows(ptx::smem_address(smem.v), ptx::smem_address(smem.dout[slot]), params.head_dim_v,
                  ds);
    // Why not in the sums below: that would take a register.
    if (__builtin_expect(again(smem.units.dp) != 1.0f, 0)) {
#pragma unroll
      for (int i = 0; i < block_q / 2; ++i) ds[i] *= again(smem.units.dp);
    }
    auto terms = Policy::backward(params, ElementCoords{*this});
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i)
      ds[i] = terms.pull_back(
          p[i] * (terms.drop(ds[i], i) - row_term[column_of(i)]), p[i], i,
          [&] { return values[i]; }, Policy::has_gradient ? again(smem.units.ds) : 1.0f);
    terms.end();
    Policy::drop(p, params, ElementCoords{*this});
  }

  // Stores dS^T of this warp's keys in the queries x keys matrix. The stores are conflict-free:
  // eight keys are two chunks, and four neighbouring pairs of queries put them in different ones.
  __device__ __forceinline__ void store_ds(const Scores& ds) {
    const int g = lane / 4, row = 2 * (lane % 4);
    const u32 panel = ptx::smem_address(smem.ds) + warp / 2 * panel_bytes(block_q) + g / 2 * 4;
#pragma unroll
    for (int i = 0; i < block_q / 2; ++i) {
      const int chunk = warp % 2 * 4 + row_of(i) * 2 + g % 2;
      ptx::store_shared(panel + i / 4 * swizzle_atom_bytes + swizzled_chunk(row + i % 2, chunk),
                        __float_as_uint(ds[i]));
    }
  }

  // total += unit x^T B, where x is an accumulator of keys x queries and B a tile of as many rows.
  template <int columns>
  __device__ __forceinline__ void add_product(const Scores& x, u32 b_matrix, const float& unit,
                                              float (&total)[columns / 2]) {
    const u32 b_lane = lane_across(b_matrix);
#pragma unroll
    for (int panel = 0; panel < columns / float_panel; ++panel) {
      Sums<exact, panel_sums> sums;
      sums.clear();
      const u32 half = ptx::load_shared_again(ptx::smem_address(&smem.half));
      // This is never true. Why it is here: the assembler does not know that, and finishes one
      // panel before it begins the next.
      if (half == 0) break;
#pragma unroll
      for (int step = 0; step < block_q / 8; ++step) {
        PartsA<exact> a;
        PartsB<exact> b[4];
        load_b_across<block_q>(b_lane, step, panel, half, b);
        accumulator_as_a(&x[4 * step], half, a);
        sums.add(0, a, b);
      }
      const float factor = again(unit);
#pragma unroll
      for (int i = 0; i < panel_sums; ++i) {
        float& y = total[panel * panel_sums + i];
        y = fmaf(sums.total(i), factor, y);
      }
    }
  }

  // Waits until the KV tiles before this one have added to the step's dQ. Why this cannot hang: the
  // work that is waited for has a smaller number, so it is already running
  // (common/work_tickets.cuh).
  __device__ __forceinline__ void await_ticket() {
    if (params.dq_tickets == nullptr) return;
    if (threadIdx.x == 0) {
      const Band band = sequence().band();
      const int first_tile = band.first_key(cursor.q_tile * block_q) / block_kv;
      const int* ticket = params.dq_tickets + tile_index(cursor);
      while (ptx::load_acquire(ticket) < plan.kv_tile - first_tile) {
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass_ticket() {
    if (params.dq_tickets == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(params.dq_tickets + tile_index(cursor), 1);
  }

  // Adds 16 x 32 numbers to dQ, starting at row `first_row` of the sequence and at column
  // `first_column`.
  __device__ __forceinline__ void add_to_dq(const Sums<exact, panel_sums>& sums, int first_row,
                                            int first_column) {
    const float factor = params.scale * again(smem.units.dq);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      if (row >= sequence().seq_q()) continue;
      float* place =
          reinterpret_cast<float*>(params.dq.row(sequence().batch(plan.batch), head_of(cursor),
                                                 sequence().q_start() + row)) +
          first_column;
      // Number i of product j.
      auto term = [&](int j, int i) { return sums.total(4 * j + 2 * r + i) * factor; };
      u32 bits = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) bits |= __float_as_uint(term(i / 2, i % 2)) & ~(1u << 31);
      const bool are_small = bits != 0 && (bits & large_bits) == 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = config.vector_sums ? 8 * (lane % 4) + 4 * i : 8 * i + 2 * (lane % 4);
        if (config.vector_sums && i >= 2) continue;
        if (halves(first_column + column) >= params.head_dim) continue;
        if (__builtin_expect(are_small, 0)) {
#pragma unroll
          for (int j = 0; j < (config.vector_sums ? 4 : 2); ++j)
            ptx::add_subnormal_to_global(place + column + j,
                                         config.vector_sums ? term(j, i) : term(i, j));
        } else if constexpr (config.vector_sums) {
          ptx::add_to_global(place + column, term(0, i), term(1, i), term(2, i), term(3, i));
        } else {
          ptx::add_to_global(place + column, term(i, 0));
          ptx::add_to_global(place + column + 1, term(i, 1));
        }
      }
    }
  }

  // Step 9. Invariant: all warps reach the wait for the ticket, whether or not they have a block.
  __device__ __forceinline__ void add_dq() {
    constexpr int items = block_q / 16 / dq_tiles * panels;
    const u32 ds_lane = lane_by_rows(ptx::smem_address(smem.ds));
    const u32 k_lane = config.vector_sums ? lane_across(ptx::smem_address(smem.k))
                                          : lane_across_by_one(ptx::smem_address(smem.k));
#pragma unroll 1
    for (int first_item = 0; first_item < items; first_item += config.warps) {
      const int item = first_item + warp;
      const bool mine = items % config.warps == 0 || item < items;
      const int panel = item % panels, block = item / panels * dq_tiles;
      Sums<exact, panel_sums> sums[dq_tiles];
      if (mine) {
#pragma unroll
        for (int t = 0; t < dq_tiles; ++t) sums[t].clear();
#pragma unroll
        for (int step = 0; step < block_kv / 8; ++step) {
          PartsB<exact> b[4];
          // Why the constant is here: moves cost less than the registers that would avoid them.
          if constexpr (config.vector_sums)
            load_b_across<block_kv>(k_lane, step, panel, tf32_half, b);
          else
            load_b_across_by_one<block_kv>(k_lane, step, panel, b);
#pragma unroll
          for (int t = 0; t < dq_tiles; ++t) {
            PartsA<exact> a;
            load_a<block_q>(ds_lane + (block + t) * panel_bytes(16), step, a);
            sums[t].add(0, a, b);
          }
        }
      }
      if (first_item == 0) await_ticket();
      if (mine) {
#pragma unroll
        for (int t = 0; t < dq_tiles; ++t)
          add_to_dq(sums[t], cursor.q_tile * block_q + (block + t) * 16, panel * float_panel);
      }
    }
    pass_ticket();
  }

  // Stores one gradient of this warp's keys, or adds it to the stored values. A lane has the
  // columns 8 (lane % 4) to 8 (lane % 4) + 7 of every panel.
  template <int columns, bool add>
  __device__ __forceinline__ void store_keys(const float (&x)[columns / 2], float factor,
                                             const Tensor& gradient, int dim) {
    if (gradient.data == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = plan.kv_tile * block_kv + warp * 16 + lane / 4 + 8 * r;
      if (key >= sequence().seq_k()) continue;
      float* row = reinterpret_cast<float*>(gradient.row(sequence().batch(plan.batch), plan.head_kv,
                                                         sequence().k_start() + key)) +
                   8 * (lane % 4);
#pragma unroll
      for (int half = 0; half < 2 * columns / float_panel; ++half) {
        const int column = half / 2 * float_panel + half % 2 * 4;
        if (halves(column + 8 * (lane % 4)) >= dim) continue;
        const float* quad = &x[half / 2 * panel_sums + 2 * r + half % 2];
        const float4 y{quad[0] * factor, quad[4] * factor, quad[8] * factor, quad[12] * factor};
        if constexpr (add)
          add_quad(row + column, y);
        else
          *reinterpret_cast<float4*>(row + column) = y;
      }
    }
  }
  static __device__ __forceinline__ void add_quad(float* place, const float4& x) {
    const u32 bits = (__float_as_uint(x.x) | __float_as_uint(x.y) | __float_as_uint(x.z) |
                      __float_as_uint(x.w)) &
                     ~(1u << 31);
    if (__builtin_expect((bits & large_bits) == 0, 0)) {
      if (bits == 0) return;
      ptx::add_subnormal_to_global(place, x.x);
      ptx::add_subnormal_to_global(place + 1, x.y);
      ptx::add_subnormal_to_global(place + 2, x.z);
      ptx::add_subnormal_to_global(place + 3, x.w);
    } else if constexpr (config.vector_sums) {
      ptx::add_to_global(place, x.x, x.y, x.z, x.w);
    } else {
      ptx::add_to_global(place, x.x);
      ptx::add_to_global(place + 1, x.y);
      ptx::add_to_global(place + 2, x.z);
      ptx::add_to_global(place + 3, x.w);
    }
  }

  template <bool add>
  __device__ __forceinline__ void store_both() {
    store_keys<config.head_dim_v, add>(dv, Policy::kept_weight(params, ElementCoords{*this}),
                                       params.dv, params.head_dim_v);
    store_keys<config.head_dim, add>(dk, params.scale, params.dk, params.head_dim);
  }
  __device__ __forceinline__ void finish() {
    if (plan.pieces == 1) return store_both<false>();
    const long long pair = static_cast<long long>(plan.batch) * params.heads_kv + plan.head_kv;
    PieceTickets* tickets = params.piece_tickets + pair * params.kv_tiles + plan.kv_tile;
    if (threadIdx.x == 0)
      smem.pieces_before =
          await_pieces(tickets, plan.piece, plan.pieces, params.in_order != 0, false);
    __syncthreads();
    if (smem.pieces_before == 0)
      store_both<false>();
    else
      store_both<true>();
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(&tickets->added, 1);
  }

  __device__ __forceinline__ void run() {
    if constexpr (config.makes_dkv) {
#pragma unroll
      for (int i = 0; i < config.head_dim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < config.head_dim_v / 2; ++i) dv[i] = 0.0f;
    }
    const int steps = plan.steps;
    if (steps > 0) {
      load_keys();
      load_step(cursor, 0);
    }
    ptx::cp_async_commit();
    int slot = 0;
    for (int step = 0; step < steps; ++step) {
      StepCursor next = cursor;
      next.advance(plan, descend);
      ptx::cp_async_wait<0>();
      lift_small(slot, step == 0);
      if (config.stages == 2 && step + 1 < steps) load_step(next, slot ^ 1);
      if constexpr (config.stages == 2) ptx::cp_async_commit();
      Scores p, ds;
      weigh(slot, p, ds);
      store_ds(ds);
      if constexpr (config.makes_dkv) {
        add_product<config.head_dim_v>(p, ptx::smem_address(smem.dout[slot]), smem.units.dout, dv);
        add_product<config.head_dim>(ds, ptx::smem_address(smem.q[slot]), smem.units.dk, dk);
      }
      __syncthreads();
      if (config.stages == 1 && step + 1 < steps) load_step(next, 0);
      if constexpr (config.stages == 1) ptx::cp_async_commit();
      if (params.dq.data != nullptr) add_dq();
      if constexpr (config.stages == 2) slot ^= 1;
      cursor = next;
    }
    if constexpr (config.makes_dkv) finish();
  }
};

template <Float32BackwardConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void float32_backward(
    const ParamsOf<Float32BackwardParams, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Float32BackwardSmem<config, Extents>& smem =
      *reinterpret_cast<Float32BackwardSmem<config, Extents>*>(smem_bytes);
  if (threadIdx.x < 32) {
    BackwardPlan<Extents> plan =
        make_backward_plan<Policy, Extents, config.block_q, config.block_kv()>(
            params, take_work(params.work_tickets));
    if (threadIdx.x == 0) smem.plan = plan;
  }
  if (threadIdx.x == 0) {
    smem.half = tf32_half;
    smem.units = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  }
  __syncthreads();
  Float32Backward<config, Policy, Extents>{params, smem}.run();
}

// --- the kernel before it: row terms and zeroes ---

struct Float32PreprocessParams {
  Tensor out;
  Tensor dout;
  Tensor dq;                    // data null, or to be zeroed
  const float* lse;             // (batch, heads, seq_q)
  const float* dlse;            // null, or the same shape
  float* padded_lse;            // (batch, heads, rows), rows padded to the query tile
  float* row_terms;             // likewise
  int* dq_tickets;              // null, or one per query tile, to be zeroed
  PieceTickets* piece_tickets;  // null, or tickets of pieces for dK and dV, to be zeroed
  int* work_tickets;            // null, or to be zeroed
  int piece_ticket_count;
  int heads;
  int seq_q;
  int rows;
  int head_dim;    // the actual one
  int head_dim_v;  // likewise
  int block_q;
};

constexpr int float32_edge_threads = 256;
constexpr int float32_edge_rows = 32;

// A block handles 32 rows of one head, with four columns per lane and `lanes` lanes per row.
template <int lanes, typename Extents>
__device__ __forceinline__ void float32_preprocess(
    const ParamsOf<Float32PreprocessParams, Extents>& params) {
  constexpr int rows_at_once = float32_edge_threads / lanes;
  const int blocks = params.rows / float32_edge_rows, batch_head = blockIdx.x / blocks;
  const int of_batch = batch_head / params.heads, head = batch_head % params.heads;
  const auto record = Extents::find_queries(params, of_batch);
  const auto sequence = sequence_of<Extents>(params, record);
  const int batch = sequence.batch(of_batch), start = sequence.q_start();
  const long long first_of_lse = first_row_of_head(params, sequence, batch, params.heads, head);
  const int lane = threadIdx.x % lanes, column = lane * 4;
  const int first_row = blockIdx.x % blocks * float32_edge_rows;
  const long long first = static_cast<long long>(batch_head) * params.rows + first_row;
  if (params.dq_tickets != nullptr && threadIdx.x < float32_edge_rows &&
      (first_row + threadIdx.x) % params.block_q == 0)
    params.dq_tickets[(first + threadIdx.x) / params.block_q] = 0;
  if (params.work_tickets != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *params.work_tickets = 0;
  if (params.piece_tickets != nullptr) {
    const int stride = static_cast<int>(gridDim.x) * float32_edge_threads;
    int i = blockIdx.x * float32_edge_threads + threadIdx.x;
    for (; i < params.piece_ticket_count; i += stride) params.piece_tickets[i] = PieceTickets{0, 0};
  }
#pragma unroll 1
  for (int i = 0; i < float32_edge_rows; i += rows_at_once) {
    const int in_block = i + threadIdx.x / lanes, row = first_row + in_block;
    const bool exists = row < sequence.seq_q();
    float sum = 0.0f;
    if (exists && halves(column) < params.head_dim_v) {
      const float4 a = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(params.out.row(batch, head, start + row)) + column);
      const float4 b = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(params.dout.row(batch, head, start + row)) + column);
      sum = fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
    }
    if (exists && params.dq.data != nullptr && halves(column) < params.head_dim)
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(params.dq.row(batch, head, start + row)) +
                                 column) = float4{};
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane != 0) continue;
    // Rows that do not exist or see no key have +inf, which makes every weight 0.
    float lse = infinity;
    if (exists) {
      const long long at = first_of_lse + row;
      if (params.lse[at] != -infinity) lse = params.lse[at];
      if (params.dlse != nullptr) sum -= params.dlse[at];
    }
    params.padded_lse[first + in_block] = lse;
    params.row_terms[first + in_block] = lse == infinity ? 0.0f : sum;
  }
}

}  // namespace tilewise::sm80
