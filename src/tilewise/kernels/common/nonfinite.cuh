// inf and NaN among values: a mask may hide them, and 0 * inf is NaN. Kernels therefore replace
// them by 0 in the tiles that a mask cuts, and add them to the rows that do see them.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace tilewise {

// Bits 15 and 31 tell which of the two packed values is inf or NaN.
template <Element element>
__device__ __forceinline__ ptx::u32 nonfinite_bits(ptx::u32 packed) {
  static_assert(is_16_bit<element>);
  constexpr ptx::u32 exponent = element == Element::bf16 ? 0x7f807f80u : 0x7c007c00u;
  constexpr ptx::u32 last_bit = element == Element::bf16 ? 0x00800080u : 0x04000400u;
  return ((packed & exponent) + last_bit) & 0x80008000u;
}

// Takes the bits of a float.
__device__ __forceinline__ bool is_nonfinite(ptx::u32 bits) {
  return (bits & 0x7f800000u) == 0x7f800000u;
}

// Adds the inf and NaN among the values of the keys [begin, end) to a row: add(key) adds those of
// one key. Why the loop is not unrolled: it rarely runs, and the loops of a kernel need the
// registers.
template <typename Add>
__device__ __forceinline__ void restore_nonfinite(int begin, int end, Add add) {
#pragma unroll 1
  for (int key = begin; key < end; ++key) add(key);
}
// Likewise for the keys that `row` sees in the tiles tile_at(position) for which
// scrubbed(position).
template <typename Scrubbed, typename TileAt, typename Add>
__device__ __forceinline__ void restore_nonfinite(const Band& band, int row,
                                                  const TileRange& positions, int block_kv,
                                                  Scrubbed scrubbed, TileAt tile_at, Add add) {
#pragma unroll 1
  for (int position = positions.begin; position < positions.end; ++position) {
    if (!scrubbed(position)) continue;
    const int kv_tile = tile_at(position);
    const int end = min_int(band.end_key(row), (kv_tile + 1) * block_kv);
    restore_nonfinite(max_int(band.first_key(row), kv_tile * block_kv), end, add);
  }
}

}  // namespace tilewise
