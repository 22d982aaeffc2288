// The warpgroups of the float32 backward that compute products. For steps, roles and barriers see
// float32_backward.cuh.
#pragma once

#include "backward_query.cuh"
#include "backward_weights.cuh"
#include "float32_backward_config.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90::float32 {

struct GradBarrierId {
  static constexpr int key_warpgroup = 1;
  static constexpr int query_warpgroup = 2;
  static constexpr int value_warpgroup = 3;
};

using GradFragment = float[grad_block / 2];
using GradWeights = u32[grad_parts][grad_block / 16][4];

// A bound on the exponents of dP and the row terms, and therefore on those of dS. The factor 2^9
// covers two values below 2^(e + 1) and the sum over the head. dS is formed in units of the power
// of two that this bound gives: if everything is so small that lower parts of dS would be denormal,
// the shift is as large as fits.
__device__ __forceinline__ int ds_exponent(int dout_exponent, int v_exponent, int term_exponent) {
  return max_int(dout_exponent + v_exponent + 9, term_exponent);
}

// Splits x into its three parts, in the A layout of the next product.
__device__ __forceinline__ void split_fragment(const GradFragment& x, GradWeights& packed) {
#pragma unroll
  for (int i = 0; i < grad_block / 2; i += 2) {
    float low = x[i], high = x[i + 1];
#pragma unroll
    for (int part = 0; part < grad_parts; ++part) {
      const u32 pair = ptx::pack<Element::bf16>(low, high);
      packed[part][i / 8][i / 2 % 4] = pair;
      low -= ptx::unpack_low<Element::bf16>(pair);
      high -= ptx::unpack_high<Element::bf16>(pair);
    }
  }
}

__device__ __forceinline__ void hold_parts(GradWeights& packed) {
#pragma unroll
  for (int part = 0; part < grad_parts; ++part) {
#pragma unroll
    for (int step = 0; step < grad_block / 16; ++step) wgmma::hold(packed[part][step]);
  }
}

// s = (64 rows of K or V) (64 rows of Q or dO)^T
template <int dim>
__device__ __forceinline__ void multiply_rows(GradFragment& s, const Parts<dim>& keys,
                                              const Parts<dim>& queries) {
  constexpr int panel = panel_bytes(grad_block) >> 4, part = sizeof(keys[0]) >> 4;
  u32 low[2] = {wgmma::descriptor_low(ptx::smem_address(keys), 16),
                wgmma::descriptor_low(ptx::smem_address(queries), 16)};
  wgmma::hold(s);
  wgmma::fence();
  // Why a loop: in straight-line products the assembler keeps all descriptors in registers.
#pragma unroll 1
  for (int i = 0; i < grad_terms; ++i) {
    wgmma::hold(low);
    // Invariant: the order is that of the forward, so that scores are bit-identical.
    const u32 key_low = low[0] + term(grad_parts, i).b * part;
    const u32 query_low = low[1] + term(grad_parts, i).a * part;
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      const int place = step / 4 * panel + step % 4 * 2;
      wgmma::Product<grad_block, Element::bf16>::multiply(
          s, wgmma::descriptor(key_low + place, swizzle_atom_bytes),
          wgmma::descriptor(query_low + place, swizzle_atom_bytes), i != 0 || step != 0);
    }
  }
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::hold(s);
}

// The number of columns of a product that is added to sums in registers; the product and the sums
// must fit in the registers together.
TILEWISE_INLINE int slice_columns(int dim) { return dim > 96 ? 64 : dim; }

// sums += 2^shift (P^T or dS^T, in registers) (Q or dO), one slice of columns at a time.
template <int dim>
__device__ __forceinline__ void add_product(float (&sums)[dim / 2], GradWeights& weights,
                                            const Parts<dim>& queries, int shift) {
  constexpr int columns = slice_columns(dim), slices = dim / columns;
  constexpr int part = sizeof(queries[0]) >> 4;
  static_assert(slices * columns == dim && (slices == 1 || columns % panel_columns == 0));
  u32 low[1] = {wgmma::descriptor_low(ptx::smem_address(queries), panel_bytes(grad_block))};
  const PowerOfTwo factor(shift);
#pragma unroll
  for (int slice = 0; slice < slices; ++slice) {
    float fresh[columns / 2];
    wgmma::hold(fresh);
    hold_parts(weights);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < grad_terms; ++i) {
      wgmma::hold(low);
#pragma unroll
      for (int step = 0; step < grad_block / 16; ++step) {
        const u32 place = low[0] + term(grad_parts, i).b * part +
                          slice * (columns / panel_columns) * (panel_bytes(grad_block) >> 4) +
                          step * (2 * swizzle_atom_bytes >> 4);
        wgmma::Product<columns, Element::bf16>::multiply(
            fresh, weights[term(grad_parts, i).a][step],
            wgmma::descriptor(place, swizzle_atom_bytes), i != 0 || step != 0);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(fresh);
    hold_parts(weights);
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      float& x = sums[slice * (columns / 2) + i];
      x = fmaf(fresh[i] * factor.first, factor.second, x);
    }
  }
}

// The common part of the three warpgroups.
template <GradConfig config, typename Policy, typename Extents>
struct GradWarpgroup {
  using Params = ParamsOf<GradParams, Policy, Extents>;

  const Params& params;
  GradSmem<config, Extents>& smem;
  const BackwardPlan<Extents>& plan;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;

  StepCursor cursor;
  RingPosition<config.stages> position{0};

  __device__ __forceinline__ GradWarpgroup(const Params& params, GradSmem<config, Extents>& smem)
      : params(params), smem(smem), plan(smem.plan), cursor(smem.plan) {}

  __device__ __forceinline__ auto sequence() const { return sequence_of<Extents>(params, plan); }

  // Must be called after the whole warp has read or written the data that the barrier protects.
  __device__ __forceinline__ void arrive(u64* barrier) {
    __syncwarp();
    if (lane < arrivals_of_warp) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ long long query_tile() const {
    return query_tile_index(params, plan, cursor.head, cursor.q_tile);
  }
  __device__ __forceinline__ int key_tile() const {
    return (plan.batch * params.heads_kv + plan.head_kv) * params.kv_tiles + plan.kv_tile;
  }
  __device__ __forceinline__ int first_key() const {
    return plan.kv_tile * grad_block + warp * 16 + lane / 4;
  }
  __device__ __forceinline__ int k_shift() const {
    return shift_of(params.k_facts[key_tile()].exponent, Element::bf16);
  }

  // Where this thread's scores lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::keys;
    const GradWarpgroup& kernel;

    __device__ __forceinline__ int row() const { return kernel.first_key(); }
    __device__ __forceinline__ int column() const {
      return kernel.cursor.q_tile * grad_block + 2 * (threadIdx.x % 4);
    }
    __device__ __forceinline__ int batch() const { return kernel.plan.batch; }
    __device__ __forceinline__ int head() const {
      return kernel.plan.head_kv * kernel.params.heads_per_kv + kernel.cursor.head;
    }
    __device__ __forceinline__ Band band() const { return kernel.sequence().band(); }
    __device__ __forceinline__ RowBand row_band() const { return kernel.sequence().row_band(); }
  };

  // The address of the sequence's key 0 in a gradient of this CTA's head.
  __device__ __forceinline__ float* first_key_of(float* gradient, long long batch_stride,
                                                 long long head_stride,
                                                 long long seq_stride) const {
    return gradient + sequence().batch(plan.batch) * batch_stride + plan.head_kv * head_stride +
           sequence().k_start() * seq_stride;
  }

  // Stores the sums of the keys' gradient; `place` is the address of key 0 of the head.
  template <int count>
  __device__ __forceinline__ void store(const float (&sums)[count], float scale, float* place,
                                        long long stride, int dim) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key() + 8 * r;
      if (key >= sequence().seq_k()) continue;
#pragma unroll
      for (int j = 0; j < count / 4; ++j) {
        if (8 * j < dim)
          *reinterpret_cast<float2*>(place + key * stride + 8 * j + 2 * (lane % 4)) =
              float2{sums[4 * j + 2 * r] * scale, sums[4 * j + 2 * r + 1] * scale};
      }
    }
  }

  // Adds x * first * second to the rows `row` and `row` + 8 of a gradient; `place` is row 0.
  // Neighbouring lanes exchange pairs of columns, so that each has four adjacent ones. `tiny`:
  // parts of x may be subnormal. `look`: this is not known in advance and is determined from the
  // numbers.
  template <bool look, int count>
  __device__ __forceinline__ void add_rows(const float (&x)[count], float first, float second,
                                           float* place, int row, int end_row, long long stride,
                                           int dim, bool tiny) const {
    // Why this is recomputed: values derived from it would otherwise stay in registers across the
    // steps.
    const int lane = ptx::thread_again() % 32;
    const bool odd = lane % 2;
    place += row * stride + (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < count / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float mine[4];  // two columns of one block of eight, and two of the next
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[i] = x[8 * j + i / 2 * 4 + 2 * r + i % 2] * first * second;
        const float a = __shfl_xor_sync(0xffffffffu, odd ? mine[0] : mine[2], 1);
        const float b = __shfl_xor_sync(0xffffffffu, odd ? mine[1] : mine[3], 1);
        if (row + 8 * r >= end_row || 16 * j + (odd ? 8 : 0) >= dim) continue;
        float* quad = place + 8 * r * stride + 16 * j;
        const float y[4] = {odd ? a : mine[0], odd ? b : mine[1], odd ? mine[2] : a,
                            odd ? mine[3] : b};
        bool by_swap = tiny;
        if constexpr (look) {
          constexpr u32 large_bits = 0x70000000;  // nonzero in numbers of 2^-95 and above
          by_swap = ((__float_as_uint(y[0]) | __float_as_uint(y[1]) | __float_as_uint(y[2]) |
                      __float_as_uint(y[3])) &
                     large_bits) == 0;
        }
        if (__builtin_expect(by_swap, 0)) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (y[i] != 0.0f) ptx::add_subnormal_to_global(quad + i, y[i]);
        } else {
          ptx::add_to_global(quad, y[0], y[1], y[2], y[3]);
        }
      }
    }
  }

  // Finishes the gradient of this CTA's keys that the warpgroup owns: dV if `which` is 0, dK if it
  // is 1; `place` is the address of key 0 of the head. A piece stores it, or adds it to the stored
  // sums.
  template <int which, int count>
  __device__ __forceinline__ void finish(const float (&sums)[count], float scale, float* place,
                                         long long stride, int dim) const {
    if (plan.pieces == 1) return store(sums, scale, place, stride, dim);
    constexpr int barrier =
        which == 0 ? GradBarrierId::value_warpgroup : GradBarrierId::key_warpgroup;
    PieceTickets* tickets = params.piece_tickets + 2 * key_tile() + which;
    if (threadIdx.x % 128 == 0)
      smem.pieces_before[which] =
          await_pieces(tickets, plan.piece, plan.pieces, params.in_order != 0, false);
    ptx::barrier_sync<128>(barrier);
    if (smem.pieces_before[which] == 0)
      store(sums, scale, place, stride, dim);
    else
      add_rows<true>(sums, scale, 1.0f, place, first_key(), sequence().seq_k(), stride, dim, false);
    __threadfence();
    ptx::barrier_sync<128>(barrier);
    if (threadIdx.x % 128 == 0) ptx::add_release(&tickets->added, 1);
  }
};

// This warpgroup owns dV, computes the weights and passes them on.
template <GradConfig config, typename Policy, typename Extents>
struct GradDvWarpgroup : GradWarpgroup<config, Policy, Extents> {
  using Base = GradWarpgroup<config, Policy, Extents>;
  using Base::Base;
  using Base::smem, Base::params, Base::plan, Base::cursor, Base::position, Base::lane;

  float dv[config.head_dim_v / 2];
  RingPosition<config.rooms> room{1};

  // S after the terms, from which their slopes are computed; empty where no term has one.
  struct Values {
    float kept[Policy::has_slope ? grad_block / 2 : 1];
  };

  // S^T -> P^T in place.
  __device__ __forceinline__ void exponentiate(GradFragment& s, Values& values, int shift) {
    constexpr float log2_e = 1.44269504088896341f;
    const float2* rows = reinterpret_cast<const float2*>(smem.lse[position.stage]) + lane % 4;
    const PowerOfTwo factor(-shift);
    Policy::apply(s, params, factor, typename Base::ElementCoords{*this});
    if constexpr (Policy::has_slope) {
#pragma unroll
      for (int i = 0; i < grad_block / 2; ++i) values.kept[i] = s[i];
    }
    // Invariant: products are rounded in the same way as the forward rounded the product of the
    // row's largest score. Where one key has nearly all the weight, lse equals that product, and
    // the weight is exactly 1.
    const float first = Policy::transforms ? 1.0f : factor.first;
    const float scale = params.score_scale * (Policy::transforms ? 1.0f : factor.second);
#pragma unroll
    for (int j = 0; j < grad_block / 8; ++j) {
      const float2 lse = rows[4 * j];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = __fadd_rn(__fmul_rn(s[4 * j + i] * first, scale), i % 2 ? -lse.y : -lse.x);
    }
    if (plan.partial(cursor.q_tile)) Policy::hide(s, params, typename Base::ElementCoords{*this});
#pragma unroll
    for (int i = 0; i < grad_block / 2; ++i) s[i] = ptx::ex2(s[i] * log2_e);
  }

  // The other warpgroup multiplies dP by these: P times the slopes of the terms. Where operands
  // have gradients, that warpgroup propagates dS back through the terms itself, starting from the
  // dS of the last term.
  __device__ __forceinline__ void hand_over(const GradFragment& p, const Values& values) {
    ptx::mbarrier_wait(&smem.room_empty[room.stage], room.phase);
    float4* weights = reinterpret_cast<float4*>(smem.room[room.stage].weights) + threadIdx.x % 128;
    auto terms = Policy::backward(params, typename Base::ElementCoords{*this});
#pragma unroll
    for (int i = 0; i < grad_block / 2; i += 4) {
      auto sloped = [&](int h) {
        if constexpr (Policy::has_gradient) return p[i + h];
        return terms.pull_back(p[i + h], 0.0f, i + h, [&] { return values.kept[i + h]; });
      };
      weights[i / 4 * 128] = float4{sloped(0), sloped(1), sloped(2), sloped(3)};
    }
    this->arrive(&smem.weights_full[room.stage]);
    room.advance();
  }

  __device__ __forceinline__ void step(int k_shift) {
    const int q_shift = shift_of(params.q_facts[this->query_tile()].exponent, Element::bf16);
    const int dout_shift = shift_of(params.dout_facts[this->query_tile()].exponent, Element::bf16);
    GradFragment s;
    Values values;
    ptx::mbarrier_wait(&smem.q_full[position.stage], position.phase);
    multiply_rows<config.head_dim>(s, smem.k, smem.q[position.stage]);
    exponentiate(s, values, q_shift + k_shift);
    ptx::fence_proxy_async();  // lse has been read: an arrive does not wait for loads in flight
    this->arrive(&smem.q_empty[position.stage]);
    hand_over(s, values);
    GradWeights weights;
    Policy::drop(s, params, typename Base::ElementCoords{*this});
    split_fragment(s, weights);
    ptx::mbarrier_wait(&smem.dout_full[position.stage], position.phase);
    if (params.dv != nullptr)
      add_product<config.head_dim_v>(dv, weights, smem.dout[position.stage], -dout_shift);
    this->arrive(&smem.dout_empty[position.stage]);
    position.advance();
    cursor.advance(plan);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < config.head_dim_v / 2; ++i) dv[i] = 0.0f;
    if (plan.steps > 0) {
      const int k_shift = this->k_shift();
      ptx::mbarrier_wait(&smem.k_full, 0);
      for (int i = 0; i < plan.steps; ++i) step(k_shift);
    }
    if (params.dv != nullptr)
      this->template finish<0>(dv, Policy::kept_weight(params, typename Base::ElementCoords{*this}),
                               this->first_key_of(params.dv, params.dv_batch_stride,
                                                  params.dv_head_stride, params.dv_seq_stride),
                               params.dv_seq_stride, params.head_dim_v);
  }
};

// This warpgroup owns dK and computes dS.
template <GradConfig config, typename Policy, typename Extents>
struct GradDkWarpgroup : GradWarpgroup<config, Policy, Extents> {
  using Base = GradWarpgroup<config, Policy, Extents>;
  using Base::Base;
  using Base::smem, Base::params, Base::plan, Base::cursor, Base::position, Base::lane, Base::warp;

  float dk[config.head_dim / 2];
  RingPosition<config.rooms> room{0};

  // dP^T -> dS^T in place, in units of 2^-unit; dP arrives in units of 2^-dp_shift.
  __device__ __forceinline__ void form_ds(GradFragment& dp, int dp_shift, int unit) {
    const float2* row_terms =
        reinterpret_cast<const float2*>(smem.row_terms[position.stage]) + lane % 4;
    auto terms = Policy::backward(params, typename Base::ElementCoords{*this});
    const PowerOfTwo factor(unit - dp_shift);
    const float term_factor = power_of_two(unit);
#pragma unroll
    for (int j = 0; j < grad_block / 8; ++j) {
      const float2 term = row_terms[4 * j];
      const float x = term.x * term_factor, y = term.y * term_factor;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (Policy::drops)
          dp[4 * j + i] =
              terms.drop(dp[4 * j + i] * factor.first * factor.second, 4 * j + i) - (i % 2 ? y : x);
        else
          dp[4 * j + i] = fmaf(dp[4 * j + i] * factor.first, factor.second, i % 2 ? -y : -x);
    }
    ptx::fence_proxy_async();  // likewise for the row terms
    this->arrive(&smem.dout_empty[position.stage]);
    ptx::mbarrier_wait(&smem.weights_full[room.stage], room.phase);
    const float4* place =
        reinterpret_cast<const float4*>(smem.room[room.stage].weights) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < grad_block / 2; i += 4) {
      const float4 p = place[i / 4 * 128];
      // Where a weight is 0, dS is 0 too, whatever hidden values have done to dP.
      dp[i] = p.x == 0.0f ? 0.0f : p.x * dp[i];
      dp[i + 1] = p.y == 0.0f ? 0.0f : p.y * dp[i + 1];
      dp[i + 2] = p.z == 0.0f ? 0.0f : p.z * dp[i + 2];
      dp[i + 3] = p.w == 0.0f ? 0.0f : p.w * dp[i + 3];
      if constexpr (Policy::has_gradient) {
        static_assert(!Policy::has_slope, "the values that slopes are made of are not handed over");
        const float per_unit = power_of_two(-unit), weights[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int h = 0; h < 4; ++h)
          terms.pull_back(dp[i + h] * per_unit, weights[h], i + h, [] { return 0.0f; });
      }
    }
    terms.end();
  }

  // Stores this warp's 16 key rows of dS^T, in all parts, over the weights.
  __device__ __forceinline__ void store_ds(const GradWeights& ds) {
    // Every warp has read its weights by then.
    ptx::barrier_sync<128>(GradBarrierId::key_warpgroup);
#pragma unroll
    for (int part = 0; part < grad_parts; ++part) {
      const u32 address =
          ptx::smem_address(smem.room[room.stage].ds[part]) + panel_bytes(warp * 16);
#pragma unroll
      for (int step = 0; step < grad_block / 16; ++step)
        ptx::stmatrix_x4(address + swizzled_chunk(lane % 16, step * 2 + lane / 16),
                         ds[part][step][0], ds[part][step][1], ds[part][step][2],
                         ds[part][step][3]);
    }
    ptx::fence_proxy_async();
    this->arrive(&smem.ds_full[room.stage]);
    room.advance();
  }

  __device__ __forceinline__ void step(int v_exponent) {
    const long long tile = this->query_tile();
    const int dout_exponent = params.dout_facts[tile].exponent;
    const int q_shift = shift_of(params.q_facts[tile].exponent, Element::bf16);
    const int unit = shift_of(ds_exponent(dout_exponent, v_exponent, params.term_exponents[tile]),
                              Element::bf16);
    const int dp_shift =
        shift_of(dout_exponent, Element::bf16) + shift_of(v_exponent, Element::bf16);
    GradFragment dp;
    ptx::mbarrier_wait(&smem.dout_full[position.stage], position.phase);
    multiply_rows<config.head_dim_v>(dp, smem.v, smem.dout[position.stage]);
    form_ds(dp, dp_shift, unit);
    GradWeights ds;
    split_fragment(dp, ds);
    store_ds(ds);
    ptx::mbarrier_wait(&smem.q_full[position.stage], position.phase);
    if (params.dk != nullptr)
      add_product<config.head_dim>(dk, ds, smem.q[position.stage], -unit - q_shift);
    this->arrive(&smem.q_empty[position.stage]);
    position.advance();
    cursor.advance(plan);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < config.head_dim / 2; ++i) dk[i] = 0.0f;
    if (plan.steps > 0) {
      const int v_exponent = params.v_facts[this->key_tile()].exponent;
      ptx::mbarrier_wait(&smem.v_full, 0);
      for (int i = 0; i < plan.steps; ++i) step(v_exponent);
    }
    if (params.dk != nullptr)
      this->template finish<1>(dk, params.scale,
                               this->first_key_of(params.dk, params.dk_batch_stride,
                                                  params.dk_head_stride, params.dk_seq_stride),
                               params.dk_seq_stride, params.head_dim);
  }
};

// This warpgroup computes dQ.
template <GradConfig config, typename Policy, typename Extents>
struct GradDqWarpgroup : GradWarpgroup<config, Policy, Extents> {
  using Base = GradWarpgroup<config, Policy, Extents>;
  using Base::Base;
  using Base::smem, Base::params, Base::plan, Base::cursor, Base::lane, Base::warp;
  static constexpr int columns = config.head_dim;

  RingPosition<config.rooms> room{0};

  __device__ __forceinline__ void multiply(float (&dq)[columns / 2]) {
    constexpr int ds_part = sizeof(smem.room[0].ds[0]) >> 4, k_part = sizeof(smem.k[0]) >> 4;
    u32 low[2] = {wgmma::descriptor_low(ptx::smem_address(smem.room[room.stage].ds), 16),
                  wgmma::descriptor_low(ptx::smem_address(smem.k), panel_bytes(grad_block))};
    wgmma::hold(dq);
    wgmma::fence();
#pragma unroll 1
    for (int i = 0; i < grad_terms; ++i) {
      wgmma::hold(low);
      const u32 ds_low = low[0] + term(grad_parts, i).a * ds_part;
      const u32 k_low = low[1] + term(grad_parts, i).b * k_part;
#pragma unroll
      for (int step = 0; step < grad_block / 16; ++step) {
        constexpr int rows = 2 * swizzle_atom_bytes >> 4;
        wgmma::TransposedProduct<columns, Element::bf16>::multiply(
            dq, wgmma::descriptor(ds_low + step * rows, swizzle_atom_bytes),
            wgmma::descriptor(k_low + step * rows, swizzle_atom_bytes), i != 0 || step != 0);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(dq);
  }

  // `tiny`: parts of dq may be subnormal.
  __device__ __forceinline__ void add(const float (&dq)[columns / 2], int shift, bool tiny) {
    const PowerOfTwo factor(shift);
    const int head = plan.head_kv * params.heads_per_kv + cursor.head;
    this->template add_rows<false>(
        dq, factor.first * params.scale, factor.second,
        params.dq + this->sequence().batch(plan.batch) * params.dq_batch_stride +
            head * params.dq_head_stride + this->sequence().q_start() * params.dq_seq_stride,
        cursor.q_tile * grad_block + warp * 16 + lane / 4, this->sequence().seq_q(),
        params.dq_seq_stride, params.head_dim, tiny);
  }

  // Why this cannot hang: the work that is waited for has a smaller number, so it is already
  // running (common/work_tickets.cuh).
  __device__ __forceinline__ void await_ticket() {
    const int before =
        ticket_by_keys<Scores<>, grad_block, grad_block>(params, plan, cursor.q_tile).before;
    if (threadIdx.x % 128 == 0 && before > 0) {
      while (ptx::load_acquire(params.dq_tickets + this->query_tile()) < before) {
      }
    }
    ptx::barrier_sync<128>(GradBarrierId::query_warpgroup);
  }
  __device__ __forceinline__ void pass_ticket() {
    __threadfence();
    ptx::barrier_sync<128>(GradBarrierId::query_warpgroup);
    if (threadIdx.x % 128 == 0) ptx::add_release(params.dq_tickets + this->query_tile(), 1);
  }

  __device__ __forceinline__ void run() {
    if (plan.steps == 0) return;
    // Below this bound, dQ may be subnormal where this still matters: the bound may be 2^20 too
    // large because weights are small, and 24 bits of the actual value are wanted.
    constexpr int tiny_exponent = -80;
    const int v_exponent = params.v_facts[this->key_tile()].exponent;
    const int k_exponent = params.k_facts[this->key_tile()].exponent;
    const int k_shift = shift_of(k_exponent, Element::bf16);
    ptx::mbarrier_wait(&smem.k_full, 0);
    for (int i = 0; i < plan.steps; ++i, cursor.advance(plan), room.advance()) {
      const int exponent = ds_exponent(params.dout_facts[this->query_tile()].exponent, v_exponent,
                                       params.term_exponents[this->query_tile()]);
      float dq[columns / 2];
      ptx::mbarrier_wait(&smem.ds_full[room.stage], room.phase);
      if (params.dq != nullptr) multiply(dq);
      this->arrive(&smem.room_empty[room.stage]);
      if (params.dq == nullptr) continue;
      if (params.dq_tickets != nullptr) await_ticket();
      add(dq, -shift_of(exponent, Element::bf16) - k_shift, exponent + k_exponent < tiny_exponent);
      if (params.dq_tickets != nullptr) pass_ticket();
    }
  }
};

}  // namespace tilewise::sm90::float32
