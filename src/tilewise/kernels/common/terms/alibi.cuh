// ALiBi: a score decreases with the distance of its key, by a slope per head.
//
//   v - slope |query + seq_k - seq_q - key|     the last query is aligned with the last key
//
// The gradient of the slopes is the sum of dS times minus the distance, whose addends nearly
// cancel. The D of a query is computed from an output in 16 bits. The error of D reaches the sum
// multiplied by the mean distance of the query's keys, and it is known once all of its keys are
// done: without that error, their dS would add up to the gradient of lse. Each query therefore has
// the sums of SlopeSums, from which terms/alibi.py computes the error and subtracts it. The sums
// are added up by a fragment, then by its warp, then in global memory. Where they must not depend
// on the order of the warps, every 16 keys have their own place there.
#pragma once

#include "../scores.cuh"

namespace tilewise {

// Sums over the keys of a query; that of the gradient may be at any query of the same head. P is
// multiplied by the slopes of later terms.
enum SlopeSums : int { minus_ds_distances, all_ds, p_distances, slope_sums };

// `one_sided`: queries see no key after their own position, so no distance is negative. `precise`:
// D is computed from an output in float32, and has no error that matters.
template <bool learned, bool one_sided, bool precise>
struct Alibi {
  struct Operands {
    const float* slopes;
    long long slopes_batch_stride, slopes_head_stride;
    float* dslopes;  // (batch, head, query and its sums, 16 keys), for whole tiles
    long long dslopes_batch_stride, dslopes_head_stride, dslopes_row_stride, dslopes_key_stride;
    float alibi_unit;  // one nat, in the units of v
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
  float ds_of[2] = {}, distances_of[2] = {};  // of two queries: rows, or neighbouring columns
  float* place;           // of the sums of the first query; null for fragments past the end
  const long long& step;  // from sum to sum

  template <typename Params, typename At>
  __device__ __forceinline__ Alibi(const Params& params, const Unit& unit, const At& at)
      : unit(unit), rows_are(At::rows_are), step(params.dslopes_row_stride) {
    const int row = at.row(), column = at.column();
    slope = once_of<Once>(params, at).slope;
    const int query = rows_are == RowsAre::queries ? row : column;
    const int key = rows_are == RowsAre::queries ? column : row;
    start = static_cast<float>(query + at.band().seq_k - at.row_band().seq_q - key);
    if constexpr (learned) {
      const long long batch = at.batch(), head = at.head();
      place = params.dslopes + batch * params.dslopes_batch_stride +
              head * params.dslopes_head_stride + key / 16 * params.dslopes_key_stride +
              query * slope_sums * step;
      if (query / 16 * 16 >= params.seq_q || key / 16 * 16 >= params.seq_k) place = nullptr;
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
  __device__ __forceinline__ void gradient(float ds, const Weighed& of_element, int i)
    requires learned
  {
    const float d = distance(i);
    sum = fmaf(ds, -d, sum);
    if constexpr (precise) return;
    const int n = rows_are == RowsAre::queries ? row_of(i) : i % 2;
    ds_of[n] += of_element.ds;
    distances_of[n] = fmaf(of_element.p, d, distances_of[n]);
    if (rows_are == RowsAre::keys && i % 4 == 3) add_queries<8>(i / 4 * 8, 1);
  }
  __device__ __forceinline__ void end_gradient()
    requires learned
  {
    if (!precise && rows_are == RowsAre::queries) add_queries<1>(0, 8);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (ptx::thread_again() % 32 == 0 && place != nullptr)
      ptx::add_to_global(place + minus_ds_distances * step, sum);
  }
  // Adds the sums of the queries `first` and `first` + `other`. Lanes that share them have numbers
  // that differ in the bits from `bit` on: the first two of these bits select which of the four
  // sums a lane adds.
  template <int bit>
  __device__ __forceinline__ void add_queries(int first, int other) {
    const int lane = ptx::thread_again() % 32;
    const bool is_second = lane & bit, is_distance = lane & 2 * bit;
    float of_ds = is_second ? ds_of[1] : ds_of[0];
    of_ds += __shfl_xor_sync(0xffffffffu, is_second ? ds_of[0] : ds_of[1], bit);
    float of_distances = is_second ? distances_of[1] : distances_of[0];
    of_distances +=
        __shfl_xor_sync(0xffffffffu, is_second ? distances_of[0] : distances_of[1], bit);
    float mine = is_distance ? of_distances : of_ds;
    mine += __shfl_xor_sync(0xffffffffu, is_distance ? of_ds : of_distances, 2 * bit);
    if constexpr (bit == 8) mine += __shfl_xor_sync(0xffffffffu, mine, 4);
    ds_of[0] = ds_of[1] = distances_of[0] = distances_of[1] = 0.0f;
    const int which =
        (first + is_second * other) * slope_sums + (is_distance ? p_distances : all_ds);
    if ((bit == 1 || (lane & 4) == 0) && place != nullptr)
      ptx::add_to_global(place + which * step, mine);
  }
};

}  // namespace tilewise
