// A query sees only a span of keys: [first_key, end_key) of its row, from memory. Neither bound
// decreases from one row to the next, and first_row and end_row of a key express the same in the
// other direction: query r sees key j if first_key[r] <= j < end_key[r], which is equivalent to
// first_row[j] <= r < end_row[j]. This is how the kernels receive packed documents, prefixes that
// all queries see, and chunks.
#pragma once

#include "../scores.cuh"

namespace tilewise {

template <Precision precision>
struct Spans {
  struct Operands {
    const int* first_key;  // (batch, queries)
    long long first_key_batch_stride, first_key_row_stride;
    const int* end_key;
    long long end_key_batch_stride, end_key_row_stride;
    const int* first_row;  // (batch, keys)
    long long first_row_batch_stride, first_row_key_stride;
    const int* end_row;
    long long end_row_batch_stride, end_row_key_stride;
  };
  static constexpr bool hides_by_span = true;

  const Operands& operands;
  const int &seq_q, &seq_k;

  template <typename Params, typename At>
  __device__ __forceinline__ Spans(const Params& params, const Unit&, const At&)
      : operands(params), seq_q(params.seq_q), seq_k(params.seq_k) {}

  template <typename Params>
  static __device__ __forceinline__ Span keys_of(const Params& params, long long batch, int query) {
    return {__ldg(params.first_key + batch * params.first_key_batch_stride +
                  query * params.first_key_row_stride),
            __ldg(params.end_key + batch * params.end_key_batch_stride +
                  query * params.end_key_row_stride)};
  }
  template <typename Params>
  static __device__ __forceinline__ Span queries_of(const Params& params, long long batch,
                                                    int key) {
    return {__ldg(params.first_row + batch * params.first_row_batch_stride +
                  key * params.first_row_key_stride),
            __ldg(params.end_row + batch * params.end_row_batch_stride +
                  key * params.end_row_key_stride)};
  }
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int, int query,
                                              int key) {
    const Span span = keys_of(params, batch, query);
    return key >= span.begin && key < span.end;
  }
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_keys(const Params& params, int batch, int begin,
                                                        int end) {
    const Span first = keys_of(params, batch, begin), last = keys_of(params, batch, end - 1);
    return {{first.begin, last.end}, {last.begin, first.end}};
  }
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_queries(const Params& params, int batch,
                                                           int begin, int end) {
    const Span first = queries_of(params, batch, begin), last = queries_of(params, batch, end - 1);
    return {{first.begin, last.end}, {last.begin, first.end}};
  }

  // Rows past the end use the span of the last row: such queries have no weight, and the band hides
  // such keys.
  template <typename At>
  static __device__ __forceinline__ Span of_row(const Operands& operands, int seq_q, int seq_k,
                                                const At& at, int row) {
    if constexpr (At::rows_are == RowsAre::queries)
      return keys_of(operands, at.batch(), min_int(row, seq_q - 1));
    else
      return queries_of(operands, at.batch(), min_int(row, seq_k - 1));
  }

  // The spans of a warp's sixteen rows in one register: lane l has the start of row l, lane 16 + l
  // the end.
  struct OfRows {
    int bound;

    OfRows() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ OfRows(const Params& params, const At& at) {
      const int lane = ptx::thread_again() % 32;
      const Span span =
          of_row(params, params.seq_q, params.seq_k, at, at.row() - lane / 4 + lane % 16);
      bound = lane < 16 ? span.begin : span.end;
    }
    __device__ __forceinline__ Span row(int r) const {
      const int lane = ptx::thread_again() % 32;
      const int place = lane / 4 + 8 * r;
      return {__shfl_sync(0xffffffffu, bound, place), __shfl_sync(0xffffffffu, bound, 16 + place)};
    }
  };

  // Why the precise kernels load the operands again for every fragment of queries: the assembler
  // would keep twelve registers of them throughout the loop, and spill others. Invariant: the index
  // is 0, which only the hardware knows; a block has at most 1024 threads.
  template <RowsAre rows_are>
  __device__ __forceinline__ const Operands& operands_of() const {
    if constexpr (precision == Precision::precise && rows_are == RowsAre::queries)
      return (&operands)[ptx::thread_again() / 1024];
    else
      return operands;
  }

  // The keys outside the band are hidden in the same pass: a separate term would process every
  // element again.
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row() + 8 * r;
      Span seen;
      if constexpr (requires { at.of_rows(); })
        seen = static_cast<const OfRows&>(at.of_rows()).row(r);
      else
        seen = of_row(operands_of<At::rows_are>(), seq_q, seq_k, at, row);
      seen = seen.within(in_band(at, row));
      hide_outside(v, r, seen.begin - column, seen.end - column);
    }
  }
};

}  // namespace tilewise
