// A boolean tensor that specifies which keys a query may see, packed into one bit per pair.
//
// A line of bits belongs to a row of a fragment: to a query, with one bit per key, or to a key,
// with one bit per query (tile_map.cuh makes both). `rows_alike`: all queries of a head see the
// same keys, and there is one line, with a bit per key; `heads_alike`: this holds for the queries
// of all heads. Lines are padded, so that the last tile may read whole words; the padding is hidden
// by the band, or belongs to queries past the end.
#pragma once

#include "../scores.cuh"
#include "bits_ptx.cuh"

namespace tilewise {

struct KeptBitsOperands {
  const unsigned char* keep;
  long long keep_batch_stride, keep_head_stride, keep_row_stride, keep_key_stride;
  const ptx::u32* keep_bits;
  long long keep_bits_batch_stride, keep_bits_head_stride;  // in words, as are all strides here
  int keep_bits_line_stride;
};

// Where all queries of all heads see the same keys and rows are keys, two bits decide about a
// thread's part of every fragment of its rows.
template <bool alike>
struct KeptRows {};
template <>
struct KeptRows<true> {
  struct OfRows {
    ptx::u32 kept;  // bit r: of this thread's row r

    OfRows() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ OfRows(const Params& params, const At& at) {
      if constexpr (At::rows_are == RowsAre::keys) {
        const ptx::u32* bits = params.keep_bits + at.batch() * params.keep_bits_batch_stride;
        kept = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = min_int(at.row() + 8 * r, params.seq_k - 1);  // no other row has a bit
          kept |= (__ldg(bits + row / 32) >> row % 32 & 1) << r;
        }
      }
    }
  };
};

template <bool rows_alike, bool heads_alike>
struct KeptBits : KeptRows<rows_alike && heads_alike> {
  using Operands = KeptBitsOperands;
  static constexpr bool uses_head = true;
  static constexpr bool hides_by_data = true;
  static constexpr bool looks_ahead_by_keys = !(rows_alike && heads_alike);

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

  // The bits that decide about a fragment of `count` elements. Some kernels load them while the
  // scores are computed (at.ahead()), others when they are needed. A tile is as wide as all
  // elements of a quad; where that is a multiple of whole words, no bit of a thread falls into
  // another word. Where rows are queries, a thread keeps only its own bits, 32 per register: it
  // loads them while the products that it has issued are in flight. Where rows are keys, it loads
  // the words before it issues the products, and keeps them unprocessed, so that it need not wait;
  // a kernel that has OfRows loads nothing for a fragment.
  template <int count, RowsAre rows_are>
  struct Ahead {
    static constexpr int width = 2 * count;
    static constexpr bool own_bits = rows_are == RowsAre::queries;
    static constexpr bool one_line = rows_alike && rows_are == RowsAre::queries;
    static constexpr bool one_bit = rows_alike && rows_are == RowsAre::keys;
    static constexpr bool whole_words = width % 32 == 0;
    static constexpr int words = one_bit ? 1 : width / 32 + (whole_words ? 0 : 2);
    static constexpr int kept_words = own_bits ? (width + 127) / 128 : words;
    // Invariant: lines begin at multiples of 16 bytes, and tiles at multiples of their width.
    static constexpr int at_once = whole_words && words % 4 == 0   ? 4
                                   : whole_words && words % 2 == 0 ? 2
                                                                   : 1;

    ptx::u32 kept[one_line ? 1 : 2][kept_words];  // per row
    int first;  // where the bits begin in the first word, if that is not known at compile time

    // The bit of element i in its word.
    static __device__ __forceinline__ constexpr int bit(int i) {
      const int column = column_of(i);
      return own_bits ? column % 32 / 8 * 8 + column / 32 % 4 * 2 + column % 2 : column % 32;
    }
  };

  template <int count, RowsAre rows_are, typename At>
  __device__ __forceinline__ void look_ahead(Ahead<count, rows_are>& ahead, const At& at) const {
    using Words = Ahead<count, rows_are>;
    const int column = Words::one_bit ? 0 : at.column();
    const int first = Words::whole_words ? 2 * (threadIdx.x % 4) : column % 32;
    if constexpr (!Words::own_bits) ahead.first = first;
#pragma unroll
    for (int r = 0; r < (Words::one_line ? 1 : 2); ++r) {
      if constexpr (Words::one_bit) {
        ahead.kept[r][0] = __ldg(bits + row_at(at, r) / 32);
        continue;
      }
      ptx::u32 line[Words::words];
      load<Words::at_once>(
          line, bits + (rows_alike ? 0 : static_cast<long long>(row_at(at, r)) * line_stride) +
                    column / 32);
      if constexpr (Words::own_bits) {
#pragma unroll
        for (int word = 0; word < (Words::width + 31) / 32; ++word) {
          const ptx::u32 own = shifted<Words::whole_words>(line, word, first) & 0x03030303u;
          ptx::u32& kept = ahead.kept[r][word / 4];
          kept = word % 4 == 0 ? own : kept | own << word % 4 * 2;
        }
      } else {
#pragma unroll
        for (int word = 0; word < Words::words; ++word) ahead.kept[r][word] = line[word];
      }
    }
  }
  // A word of a line, shifted so that it starts at this thread's first bit.
  template <bool whole_words, int words>
  static __device__ __forceinline__ ptx::u32 shifted(const ptx::u32 (&line)[words], int word,
                                                     int first) {
    if constexpr (whole_words)
      return line[word] >> first;
    else
      return __funnelshift_r(line[word], line[word + 1], first);
  }
  // Rows past the end have no line.
  template <typename At>
  __device__ __forceinline__ int row_at(const At& at, int r) const {
    return min_int(at.row() + 8 * r, last_line);
  }
  template <int at_once, int words>
  static __device__ __forceinline__ void load(ptx::u32 (&to)[words], const ptx::u32* from) {
#pragma unroll
    for (int word = 0; word < words; word += at_once) {
      if constexpr (at_once == 4) {
        const uint4 some = __ldg(reinterpret_cast<const uint4*>(from + word));
        to[word] = some.x, to[word + 1] = some.y, to[word + 2] = some.z, to[word + 3] = some.w;
      } else if constexpr (at_once == 2) {
        const uint2 some = __ldg(reinterpret_cast<const uint2*>(from + word));
        to[word] = some.x, to[word + 1] = some.y;
      } else {
        to[word] = __ldg(from + word);
      }
    }
  }

  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    using Words = Ahead<count, At::rows_are>;
    constexpr bool by_rows = At::rows_are == RowsAre::keys && !looks_ahead_by_keys;
    if constexpr (by_rows && requires { at.of_rows(); }) {
      const ptx::u32 kept = static_cast<const typename KeptBits::OfRows&>(at.of_rows()).kept;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        hide_band(v, r, at);
        hide_row(v, r, (kept >> r & 1) != 0);
      }
    } else if constexpr (requires { at.ahead(); }) {
      hide_by(v, static_cast<const Words&>(at.ahead()), at);
    } else {
      Words ahead;
      look_ahead(ahead, at);
      hide_by(v, ahead, at);
    }
  }
  // The band is checked in the tiles that it cuts, which are few of those that the bits cut.
  template <int count, typename At>
  static __device__ __forceinline__ void hide_band(float (&v)[count], int r, const At& at) {
    const int column = at.column();
    const Span seen = in_band(at, at.row() + 8 * r);
    if (seen.begin > column || seen.end <= column + column_of(count - 1))
      hide_outside(v, r, seen.begin - column, seen.end - column);
  }
  template <int count>
  static __device__ __forceinline__ void hide_row(float (&v)[count], int r, bool kept) {
#pragma unroll
    for (int i = 0; i < count; ++i)
      if (row_of(i) == r) v[i] = kept ? v[i] : -infinity;
  }
  template <int count, RowsAre rows_are, typename At>
  __device__ __forceinline__ void hide_by(float (&v)[count], const Ahead<count, rows_are>& ahead,
                                          const At& at) const {
    using Words = Ahead<count, rows_are>;
    const int first = Words::whole_words ? 2 * (threadIdx.x % 4) : ahead.first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto& words = ahead.kept[Words::one_line ? 0 : r];
      hide_band(v, r, at);
      if constexpr (Words::one_bit) {
        hide_row(v, r, (words[0] >> row_at(at, r) % 32 & 1) != 0);
        continue;
      }
#pragma unroll
      for (int begin = 0; begin < count; begin += 16) {
        ptx::u32 kept;
        if constexpr (Words::own_bits)
          kept = words[begin / 64];
        else
          kept = shifted<Words::whole_words>(words, begin / 16, first);
#pragma unroll
        for (int i = begin; i < begin + 16 && i < count; ++i) {
          if (row_of(i) != r) continue;
          v[i] = ptx::keep_if(kept, 1u << Words::bit(i), v[i]);
        }
      }
    }
  }
};

}  // namespace tilewise
