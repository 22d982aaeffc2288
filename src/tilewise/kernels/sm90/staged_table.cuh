// A table of distances (common/terms/relative_bias.cuh). Bulk copies bring the slice that a KV tile
// needs to shared memory, together with its K.
//
// A tile of m queries and n keys has m + n - 1 distances: the numbers from table[head, key - row -
// (m - 1) + zero] on, where `row` and `key` are the first of the tile. A copy begins and ends at
// multiples of 16 bytes around them. Where a query tile needs numbers outside the table, or numbers
// are not adjacent, nothing is copied for it, and threads load them from global memory.
#pragma once

#include "../common/terms/relative_bias.cuh"

namespace tilewise::sm90 {

// Bytes for the numbers of a tile, including those that precede them up to a multiple of 16.
TILEWISE_INLINE int table_slice_room(int block_q, int block_kv) {
  return ceil_div(12 + 4 * (block_q + block_kv - 1), 16) * 16;
}

// Invariant: tiles begin at multiples of 16 bytes of numbers, so all tiles of a head have the same
// `shift`.
struct TableSlices {
  const unsigned char* origin;  // of the slice of the tile at row 0 and key 0
  int shift;                    // bytes of a copy that precede the first number
  int bytes;
  bool exist;

  TableSlices() = default;
  // For the tiles of queries from `row` on and keys [0, end).
  template <typename Params>
  __device__ __forceinline__ TableSlices(const Params& params, int head, int row, int end,
                                         int block_q, int block_kv) {
    constexpr int size = Params::table_number_bytes;
    const int first = params.table_zero - (block_q - 1);
    const unsigned char* begin = static_cast<const unsigned char*>(params.table) +
                                 (head * params.table_head_stride + first) * size;
    shift = static_cast<int>(reinterpret_cast<unsigned long long>(begin) % 16);
    origin = begin - shift;
    bytes = ceil_div(shift + (block_q + block_kv - 1) * size, 16) * 16;
    const int last_tile = (end - 1) / block_kv * block_kv;
    exist = params.table_span_stride == 1 && first - row >= 0 &&
            first - row + last_tile + block_q + block_kv - 1 <= params.table_span;
  }
  template <typename Params>
  __device__ __forceinline__ const unsigned char* source(const Params&, int row, int key) const {
    return origin + (key - row) * Params::table_number_bytes;
  }
};

template <Element number, bool learned>
struct StagedRelativeBias : RelativeBias<number, learned> {
  using Base = RelativeBias<number, learned>;
  using Bits = typename Base::Bits;
  struct Operands : Base::Operands {
    static constexpr int table_number_bytes = sizeof(Bits);
  };
  struct Once {
    int shift;  // of the slices of this work tile; negative if there are none

    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params&, const At& at) : shift(-1) {
      if constexpr (requires { at.table_slices(); }) {
        const TableSlices slices = at.table_slices();
        if (slices.exist) shift = slices.shift;
      }
    }
  };

  const unsigned char* slice = nullptr;
  int shift = -1;
  int place;  // index of element 0 in the slice

  template <typename Params, typename At>
  __device__ __forceinline__ StagedRelativeBias(const Params& params, const Unit& unit,
                                                const At& at)
      : Base(params, unit, at) {
    static_assert(At::rows_are == RowsAre::queries);
    if constexpr (requires { at.table_slice(); }) {
      slice = at.table_slice();
      shift = once_of<Once>(params, at).shift;
      place = at.place_in_slice();
    }
  }

  __device__ __forceinline__ bool holds(int) const { return this->early != nullptr || shift >= 0; }
  template <int count>
  __device__ __forceinline__ void load_early(typename Base::template Early<count>& to) {
    if (this->checks) {
      this->checks = !Base::holds(count);
      Base::load_early(to);
    } else {
      const Bits* first = reinterpret_cast<const Bits*>(slice + shift) + place;
#pragma unroll
      for (int i = 0; i < count / 2 + 2; ++i)
        to.numbers[i / 2][i % 2] = Base::number_of(first[i / 2 * 8 - 8 + i % 2]);
    }
  }
};

}  // namespace tilewise::sm90
