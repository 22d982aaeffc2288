// Each batch has a given number of valid keys; the others are padding, after them or before them.
#pragma once

#include "../scores.cuh"

namespace tilewise {

template <bool padded_left>
struct KeyLengths {
  struct Operands {
    const int* key_lengths;
    long long key_lengths_batch_stride;
  };
  static constexpr bool hides_by_span = true;

  Span span;

  template <typename Params, typename At>
  __device__ __forceinline__ KeyLengths(const Params& params, const Unit&, const At& at)
      : span(keys_of(params, at.batch())) {}

  template <typename Params>
  static __device__ __forceinline__ Span keys_of(const Params& params, int batch) {
    const int given = __ldg(params.key_lengths + batch * params.key_lengths_batch_stride);
    const int length = max_int(0, min_int(given, params.seq_k));
    return padded_left ? Span{params.seq_k - length, params.seq_k} : Span{0, length};
  }
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int, int, int key) {
    const Span span = keys_of(params, batch);
    return key >= span.begin && key < span.end;
  }
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_keys(const Params& params, int batch, int, int) {
    const Span span = keys_of(params, batch);
    return {span, span};
  }
  // A key is visible to all queries or to none.
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_queries(const Params& params, int batch,
                                                           int begin, int end) {
    const Span span = keys_of(params, batch), all{0, params.seq_q}, none{0, 0};
    return {begin < span.end && end > span.begin ? all : none,
            begin >= span.begin && end <= span.end ? all : none};
  }

  // The keys outside the band are hidden in the same pass: a separate term would process every
  // element again.
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row() + 8 * r;
      Span seen = in_band(at, row);
      if constexpr (At::rows_are == RowsAre::queries)
        seen = seen.within(span);
      else if (row < span.begin || row >= span.end)
        seen.end = 0;
      hide_outside(v, r, seen.begin - column, seen.end - column);
    }
  }
};

}  // namespace tilewise
