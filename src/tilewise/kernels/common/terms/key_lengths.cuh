// So many keys of each batch are there, the others are padding: behind them, or before.
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

  KeySpan span;

  template <typename Params, typename At>
  __device__ __forceinline__ KeyLengths(const Params& params, const Unit&, const At& at)
      : span(key_span(params, at.batch())) {}

  template <typename Params>
  static __device__ __forceinline__ KeySpan key_span(const Params& params, int batch) {
    const int given = __ldg(params.key_lengths + batch * params.key_lengths_batch_stride);
    const int length = max_int(0, min_int(given, params.seq_k));
    return padded_left ? KeySpan{params.seq_k - length, params.seq_k} : KeySpan{0, length};
  }
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int, int, int key) {
    const KeySpan span = key_span(params, batch);
    return key >= span.begin && key < span.end;
  }

  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    const int first = at.rows_are == RowsAre::queries ? at.column() : at.row();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int key =
          first + (At::rows_are == RowsAre::queries ? column_of(i) : 8 * row_of(i));
      const bool seen = padded_left ? key >= span.begin : key < span.end;
      v[i] = seen ? v[i] : -infinity;
    }
  }
};

}  // namespace tilewise
