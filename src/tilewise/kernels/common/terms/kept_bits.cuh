// A boolean tensor that says which keys a query may see, packed into one bit per pair.
//
// A line of bits belongs to a row of a fragment: to a query, with one bit per key, or to a key,
// with one bit per query (tile_map.cuh makes both). `rows_alike`: all queries of a head see the
// same keys, and there is one line, of keys. Lines are longer than what they are of, so that the
// last tile may read whole words; what lies there is hidden by the band, or of queries past the
// end.
#pragma once

#include "../scores.cuh"

namespace tilewise {

template <bool rows_alike>
struct KeptBits {
  struct Operands {
    const unsigned char* keep;
    long long keep_batch_stride, keep_head_stride, keep_row_stride, keep_key_stride;
    const ptx::u32* keep_bits;
    long long keep_bits_batch_stride, keep_bits_head_stride;  // in words, as all strides here
    int keep_bits_line_stride;
  };
  static constexpr bool uses_head = true;
  static constexpr bool hides_by_data = true;

  const ptx::u32* bits;
  int line_stride, last_line;

  template <typename Params, typename At>
  __device__ __forceinline__ KeptBits(const Params& params, const Unit&, const At& at)
      : bits(params.keep_bits + at.batch() * params.keep_bits_batch_stride +
             at.head() * params.keep_bits_head_stride),
        line_stride(params.keep_bits_line_stride),
        last_line((At::rows_are == RowsAre::queries ? params.seq_q : params.seq_k) - 1) {}

  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int head, int query,
                                              int key) {
    return params.keep[batch * params.keep_batch_stride + head * params.keep_head_stride +
                       query * params.keep_row_stride + key * params.keep_key_stride] != 0;
  }

  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int line = min_int(at.row() + 8 * r, last_line);
      if constexpr (rows_alike && At::rows_are == RowsAre::keys) {
        const bool kept = __ldg(bits + line / 32) >> line % 32 & 1;
#pragma unroll
        for (int i = 0; i < count; ++i)
          if (row_of(i) == r) v[i] = kept ? v[i] : -infinity;
      } else {
        hide_by(v, r, bits + (rows_alike ? 0 : static_cast<long long>(line) * line_stride),
                at.column());
      }
    }
  }
  // Row r, whose first column has the bit `first` of a line.
  template <int count>
  static __device__ __forceinline__ void hide_by(float (&v)[count], int r, const ptx::u32* line,
                                                 int first) {
    constexpr int words = (2 * count + 31) / 32;
    line += first / 32;
    ptx::u32 next = __ldg(line);
#pragma unroll
    for (int word = 0; word < words; ++word) {
      const ptx::u32 low = next;
      next = __ldg(line + word + 1);
      const ptx::u32 kept = __funnelshift_r(low, next, first % 32);
#pragma unroll
      for (int i = 16 * word; i < 16 * word + 16 && i < count; ++i) {
        if (row_of(i) != r) continue;
        v[i] = kept & 1u << column_of(i) % 32 ? v[i] : -infinity;
      }
    }
  }
};

}  // namespace tilewise
