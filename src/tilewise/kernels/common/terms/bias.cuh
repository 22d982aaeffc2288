// A tensor that is added to the scores, broadcast in any way, and its gradient.
//
//   v unit + bias     after which v is in nats: a bias as large as a float loses no bit
//
// This term reads the bias from global memory when it is needed; sm90/staged_bias.cuh is for
// kernels that have its tiles in shared memory. `number`: its element type. `paired`: keys are
// adjacent, pairs of them are aligned as one number, and their count is even. The gradient is dS.
// Where every score has its own bias, the gradient is stored, in the bias's own element type;
// otherwise it is added up in float32. Where the sum must not depend on the order of the warps, the
// host gives every score its own place, and adds up afterwards.
#pragma once

#include "placement.cuh"

namespace tilewise {

enum class Learned { no, stored, added };

template <Element number>
struct BitsOf {
  using Type = ptx::u16;
};
template <>
struct BitsOf<Element::float32> {
  using Type = float;
};

// The gradient of the bias.
template <Element number, bool paired, Learned learned>
struct BiasGradient {
  using Bits = typename BitsOf<number>::Type;

  Bits* dbias;
  Placement dplace;
  float first_ds;  // dS of the first of a pair

  template <typename Params, typename At>
  __device__ __forceinline__ BiasGradient(const Params& params, const At& at)
      : dbias(static_cast<Bits*>(params.dbias)),
        dplace(at, params.dbias_batch_stride, params.dbias_head_stride, params.dbias_row_stride,
               params.dbias_key_stride, params.seq_q, params.seq_k) {}

  __device__ __forceinline__ void gradient(float ds, int i) {
    if constexpr (learned == Learned::added) {
      if (dplace.exists(i))
        ptx::add_to_global(static_cast<float*>(static_cast<void*>(dbias)) + dplace.offset<false>(i),
                           ds);
      return;
    }
    const bool by_pairs = paired && dplace.rows_are == RowsAre::queries;
    if (by_pairs && i % 2 == 0) {
      first_ds = ds;
      return;
    }
    if (!dplace.exists(i)) return;
    if (by_pairs) {
      Bits* to = dbias + dplace.offset<true>(i - 1);
      if constexpr (number == Element::float32)
        *reinterpret_cast<float2*>(to) = float2{first_ds, ds};
      else
        *reinterpret_cast<ptx::u32*>(to) = ptx::pack<number>(first_ds, ds);
    } else {
      Bits* to = dbias + dplace.offset<paired>(i);
      if constexpr (number == Element::float32)
        *to = ds;
      else
        *to = static_cast<Bits>(ptx::pack<number>(ds, 0.0f));
    }
  }
};

template <Element number, bool paired>
struct BiasGradient<number, paired, Learned::no> {
  template <typename Params, typename At>
  __device__ __forceinline__ BiasGradient(const Params&, const At&) {}
};

template <Element number, bool paired, Learned learned>
struct Bias : BiasGradient<number, paired, learned> {
  struct Operands {
    const void* bias;
    long long bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride;
    void* dbias;
    long long dbias_batch_stride, dbias_head_stride, dbias_row_stride, dbias_key_stride;
    float bias_in, bias_out;  // nats per v before this term, and the inverse
  };
  static constexpr bool uses_head = true;
  using Bits = typename BitsOf<number>::Type;

  const Bits* bias;
  float in;
  const float& out;
  Placement place;
  bool checks = true;  // whether each element must be tested for existence
  float second;        // the second of a pair, which was loaded with the first

  template <typename Params, typename At>
  __device__ __forceinline__ Bias(const Params& params, const Unit& unit, const At& at)
      : BiasGradient<number, paired, learned>(params, at),
        bias(static_cast<const Bits*>(params.bias)),
        in(params.bias_in * unit.first * unit.second),
        out(params.bias_out),
        place(at, params.bias_batch_stride, params.bias_head_stride, params.bias_row_stride,
              params.bias_key_stride, params.seq_q, params.seq_k) {}

  // The bias of element i; called in ascending order.
  __device__ __forceinline__ float at(int i) {
    const bool by_pairs = paired && place.rows_are == RowsAre::queries;
    if (by_pairs && i % 2 == 1) return second;
    second = 0.0f;
    if (checks && !place.exists(i)) return 0.0f;
    const Bits* from = bias + place.offset<paired>(i);
    if constexpr (number == Element::float32) {
      if (!by_pairs) return __ldg(from);
      const float2 both = __ldg(reinterpret_cast<const float2*>(from));
      second = both.y;
      return both.x;
    } else {
      if (!by_pairs) return ptx::unpack_low<number>(__ldg(from));
      const ptx::u32 both = __ldg(reinterpret_cast<const ptx::u32*>(from));
      second = ptx::unpack_high<number>(both);
      return ptx::unpack_low<number>(both);
    }
  }
  __device__ __forceinline__ bool holds(int count) const { return place.holds(count); }
  __device__ __forceinline__ float apply(float v, int i) { return fmaf(v, in, at(i)); }
  // Returns any finite number where the bias hides: its weight is 0, and 0 * inf is NaN.
  __device__ __forceinline__ float before(float v, int i) {
    const float added = at(i);
    return added == -infinity ? 0.0f : (v - added) * out;
  }
};

}  // namespace tilewise
