// A logit per head that is added to the softmax sum of every row, like one more key without a
// value.
//
//   l + e^(sink - m), in the units of the larger of m and the sink
//
// Its gradient is -sum over rows of e^(sink - lse) D, which needs only lse and D: a separate kernel
// computes it after the backward (sink_gradient.cuh).
#pragma once

#include "../scores.cuh"

namespace tilewise {

struct Sink {
  struct Operands {
    const float* sink;
    long long sink_head_stride;
  };
  static constexpr bool uses_head = true;

  struct Once {
    float sink;  // in log2 units

    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at)
        : sink(__ldg(params.sink + at.head() * params.sink_head_stride) * 1.44269504088896341f) {}
  };

  float sink;

  template <typename Params, typename At>
  __device__ __forceinline__ Sink(const Params& params, const Unit&, const At& at)
      : sink(once_of<Once>(params, at).sink) {}

  __device__ __forceinline__ float finish_row(float& m, float& l, float log2_unit, int) const {
    const float before = m * log2_unit;
    if (!(sink > before)) {
      // Why not if both are -inf: their difference is NaN.
      if (sink > -infinity) l += ptx::ex2(sink - before);
      return 1.0f;
    }
    const float factor = ptx::ex2(before - sink);
    l = fmaf(l, factor, 1.0f);
    m = sink / log2_unit;
    return factor;
  }
};

}  // namespace tilewise
