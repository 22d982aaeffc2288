// The largest score of every head, in nats, as a result of the forward: a maximum in global memory,
// over unsigned numbers that have the same order as the floats they encode; 0 where there is no
// score.
#pragma once

#include "../scores.cuh"

namespace tilewise {

struct MaxLogit {
  struct Operands {
    ptx::u32* max_logit;
    long long max_logit_head_stride;
    float max_logit_unit;  // nats per v
  };
  static constexpr bool uses_head = true;

  ptx::u32* place;
  float unit;
  int rows_left;

  template <typename Params, typename At>
  __device__ __forceinline__ MaxLogit(const Params& params, const Unit&, const At& at)
      : place(params.max_logit + at.head() * params.max_logit_head_stride),
        unit(params.max_logit_unit),
        rows_left(at.row_band().seq_q - at.row()) {}

  template <int count>
  __device__ __forceinline__ void observe(const float (&v)[count], float v_unit) const {
    float top[2] = {-infinity, -infinity};
#pragma unroll
    for (int i = 0; i < count; ++i) top[row_of(i)] = fmaxf(top[row_of(i)], v[i]);
    float largest = rows_left > 8 ? fmaxf(top[0], top[1]) : rows_left > 0 ? top[0] : -infinity;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    if (ptx::thread_again() % 32 == 0 && largest > -infinity) {
      const ptx::u32 bits = __float_as_uint(largest * v_unit * unit);
      atomicMax(place, bits >> 31 ? ~bits : bits | 0x80000000u);
    }
  }
};

}  // namespace tilewise
