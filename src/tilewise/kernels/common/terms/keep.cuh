// A boolean tensor that specifies which keys a query may see, one byte per pair, broadcast in any
// way.
//
// `paired`: keys are adjacent, pairs of them are aligned as one number, and their count is even.
// `rows_alike`: all queries of a head see the same keys.
#pragma once

#include "placement.cuh"

namespace tilewise {

template <bool paired, bool rows_alike>
struct Keep {
  struct Operands {
    const unsigned char* keep;
    long long keep_batch_stride, keep_head_stride, keep_row_stride, keep_key_stride;
  };
  static constexpr bool uses_head = true;
  static constexpr bool hides_by_data = true;

  const unsigned char* keep;
  Placement place;

  template <typename Params, typename At>
  __device__ __forceinline__ Keep(const Params& params, const Unit&, const At& at)
      : keep(params.keep),
        place(at, params.keep_batch_stride, params.keep_head_stride,
              rows_alike ? 0 : params.keep_row_stride, params.keep_key_stride, params.seq_q,
              params.seq_k) {}

  template <typename Params>
  static __device__ __forceinline__ const unsigned char* of_head(const Params& params,
                                                                 long long batch, long long head) {
    return params.keep + batch * params.keep_batch_stride + head * params.keep_head_stride;
  }
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int head, int query,
                                              int key) {
    return of_head(params, batch,
                   head)[query * params.keep_row_stride + key * params.keep_key_stride] != 0;
  }

  // Queries and keys past the end are not read: they count as hidden, and have no weight in any
  // case.
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    // Why only a few where keys are not adjacent: each has its own address.
    constexpr int chunk = paired ? loaded_at_once<At, count> : 8;
#pragma unroll
    for (int first = 0; first < count; first += chunk) {
      if (place.holds(first + chunk))
        hide_by<false, chunk>(v, first, at);
      else
        hide_by<true, chunk>(v, first, at);
    }
  }
  template <bool checks, int chunk, int count, typename At>
  __device__ __forceinline__ void hide_by(float (&v)[count], int first, const At&) const {
    constexpr bool by_pairs = paired && At::rows_are == RowsAre::queries;
#pragma unroll
    for (int i = first; i < first + chunk; i += by_pairs ? 2 : 1) {
      if (reuses<At::rows_are>(i)) continue;
      const bool exists =
          !checks || (rows_alike ? place.key(i) < place.keys_left : place.exists(i));
      ptx::u32 both = 0;
      if (exists) {
        const unsigned char* from = keep + place.offset<paired>(i);
        if constexpr (by_pairs)
          both = __ldg(reinterpret_cast<const ptx::u16*>(from));
        else
          both = __ldg(from);
      }
      // The elements that this byte decides about: where rows are queries, those of the same
      // column.
      constexpr int reach = !rows_alike ? 2 : At::rows_are == RowsAre::queries ? 4 : count;
#pragma unroll
      for (int other = i; other < (i + reach < count ? i + reach : count); ++other) {
        const bool same = rows_alike ? place.key(other) == place.key(i) : other == i;
        if (same) v[other] = both & 0xffu ? v[other] : -infinity;
        const bool next = rows_alike ? place.key(other) == place.key(i) + 1 : other == i + 1;
        if (by_pairs && next) v[other] = both >> 8 ? v[other] : -infinity;
      }
    }
  }
  // Whether an earlier element has the same key, which all queries see alike.
  template <RowsAre rows_are>
  static __device__ __forceinline__ constexpr bool reuses(int i) {
    if (!rows_alike) return false;
    return rows_are == RowsAre::queries ? row_of(i) == 1 : i / 4 != 0 || i % 2 != 0;
  }
};

}  // namespace tilewise
