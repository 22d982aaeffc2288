// ALiBi: a score falls with the distance of its key, by a slope per head.
//
//   v - slope |query + seq_k - seq_q - key|     the last query is aligned with the last key
//
// The gradient of the slopes is the sum of dS times minus the distance: it is added up by a
// fragment, then by its warp, then in global memory. Where it must not depend on the order of the
// warps, every block of 16 x 16 scores has its own sum there.
#pragma once

#include "../scores.cuh"

namespace tilewise {

// `one_sided`: queries see no key behind their own position, so no distance is negative.
template <bool learned, bool one_sided = false>
struct Alibi {
  struct Operands {
    const float* slopes;
    long long slopes_batch_stride, slopes_head_stride;
    float* dslopes;
    long long dslopes_batch_stride, dslopes_head_stride;
    long long dslopes_row_stride, dslopes_key_stride;  // strides between blocks of 16
    float alibi_unit;                                  // one nat, in the units of v
  };
  static constexpr bool uses_head = true;
  struct Once {
    float slope;

    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at) {
      const long long batch = at.batch(), head = at.head();
      slope = __ldg(params.slopes + batch * params.slopes_batch_stride +
                    head * params.slopes_head_stride) *
              -params.alibi_unit;
    }
  };

  Unit unit;
  float slope, start;
  RowsAre rows_are;
  float sum = 0.0f;
  float* place;  // null for blocks past the end

  template <typename Params, typename At>
  __device__ __forceinline__ Alibi(const Params& params, const Unit& unit, const At& at)
      : unit(unit), rows_are(At::rows_are) {
    const int row = at.row(), column = at.column();
    slope = once_of<Once>(params, at).slope;
    const int query = rows_are == RowsAre::queries ? row : column;
    const int key = rows_are == RowsAre::queries ? column : row;
    start = static_cast<float>(query + at.band().seq_k - at.row_band().seq_q - key);
    if constexpr (learned) {
      const long long batch = at.batch(), head = at.head();
      place = params.dslopes + batch * params.dslopes_batch_stride +
              head * params.dslopes_head_stride + query / 16 * params.dslopes_row_stride +
              key / 16 * params.dslopes_key_stride;
      if (query >= params.seq_q || key >= params.seq_k) place = nullptr;
    }
  }

  __device__ __forceinline__ float distance(int i) const {
    const float step = static_cast<float>(8 * row_of(i) - column_of(i));
    const float signed_distance = rows_are == RowsAre::queries ? start + step : start - step;
    return one_sided ? signed_distance : fabsf(signed_distance);
  }
  // There is a line on each side of the diagonal. `bend` corrects columns on the other side, if any
  // of the first `count` are there.
  static constexpr bool is_straight = one_sided;
  template <typename Params, typename At>
  static __device__ __forceinline__ float per_column(const Params& params, const At& at) {
    const float slope = once_of<Once>(params, at).slope;
    return At::rows_are == RowsAre::queries ? -slope : slope;
  }
  __device__ __forceinline__ float start_of_row(int r) const {
    return slope * (rows_are == RowsAre::queries ? start + 8 * r : start - 8 * r);
  }
  __device__ __forceinline__ bool bends(int count) const {
    if constexpr (one_sided) return false;
    return (rows_are == RowsAre::queries ? start - column_of(count - 1) : start - 8) < 0.0f;
  }
  __device__ __forceinline__ float bend(float v, int i) const {
    const float step = static_cast<float>(8 * row_of(i) - column_of(i));
    const float distance = rows_are == RowsAre::queries ? start + step : start - step;
    return fmaf(fminf(distance, 0.0f), -2.0f * slope, v);
  }

  __device__ __forceinline__ float apply(float v, int i) const {
    return fmaf(distance(i), slope, v * unit.first * unit.second);
  }
  __device__ __forceinline__ float before(float v, int i) const {
    return fmaf(distance(i), -slope, v);
  }
  __device__ __forceinline__ void gradient(float ds, int i)
    requires learned
  {
    sum = fmaf(ds, -distance(i), sum);
  }
  __device__ __forceinline__ void end_gradient()
    requires learned
  {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (ptx::thread_again() % 32 == 0 && place != nullptr) ptx::add_to_global(place, sum);
  }
};

}  // namespace tilewise
