// Which queries see which keys, and which tiles have to be computed.
//
// Every mask of these kernels is a band: query row r sees the keys
//     first_key(r) <= k < end_key(r),   first_key(r) = max(0, r + first_shift)
//                                       end_key(r)   = min(seq_k, r + end_shift)
// Full has both shifts at the unlimited ends, causal has only end_shift, a window has both.
// Both bounds grow with r, which makes the tile ranges below exact.
//
// This header has no PTX and no CUDA types: a host compiler builds it too, and
// tests/test_device_code.py drives it against the Python rule.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TILEWISE_INLINE __host__ __device__ __forceinline__ constexpr
#else
#define TILEWISE_INLINE inline constexpr
#endif

namespace tilewise {

// Invariant: no kernel tests whether max_int(0, min_int(x, n)) is n. The assembler of CUDA 13.0
// merges clamp and comparison into one instruction with a wrong result. Testing x >= n is
// equivalent and safe. tests/test_kernels.py searches for that instruction.
TILEWISE_INLINE int min_int(int a, int b) { return a < b ? a : b; }
TILEWISE_INLINE int max_int(int a, int b) { return a > b ? a : b; }
TILEWISE_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Band {
  // Invariant: |shift| <= 2^30 and sequence lengths <= 2^30, so that row + shift never overflows.
  static constexpr int unlimited = 1 << 30;

  int first_shift;
  int end_shift;
  int seq_k;

  TILEWISE_INLINE int first_key(int row) const { return max_int(0, row + first_shift); }
  TILEWISE_INLINE int end_key(int row) const { return min_int(seq_k, row + end_shift); }
  TILEWISE_INLINE bool visible(int row, int key) const {
    return key >= first_key(row) && key < end_key(row);
  }
};

// A half-open range of KV tiles.
struct TileRange {
  int begin;
  int end;
  TILEWISE_INLINE bool empty() const { return begin >= end; }
  TILEWISE_INLINE int count() const { return empty() ? 0 : end - begin; }
};

// One of `parts` nearly equal parts of a range.
TILEWISE_INLINE TileRange part_of(const TileRange& range, int part, int parts) {
  const int count = range.count();
  return {range.begin + count * part / parts, range.begin + count * (part + 1) / parts};
}

// The tiles in which at least one row of [row_begin, row_end) sees at least one key of the hull of
// the rows' bands. Invariant: row_begin < row_end. The result is {0, 0} when no row sees any key.
TILEWISE_INLINE TileRange touched_tiles(const Band& band, int row_begin, int row_end,
                                        int block_kv) {
  const int first = band.first_key(row_begin);
  const int end = band.end_key(row_end - 1);
  if (first >= end) return {0, 0};
  return {first / block_kv, ceil_div(end, block_kv)};
}

// The tiles in which every row of [row_begin, row_end) sees every key: no mask is needed there. The
// result lies inside `touched`; if there are no such tiles, it is the empty range at touched.begin.
TILEWISE_INLINE TileRange full_tiles(const Band& band, int row_begin, int row_end, int block_kv,
                                     TileRange touched) {
  const int first = band.first_key(row_end - 1);
  const int end = band.end_key(row_begin);
  const int begin_tile = max_int(touched.begin, ceil_div(first, block_kv));
  const int end_tile = min_int(touched.end, max_int(0, end) / block_kv);
  if (begin_tile >= end_tile) return {touched.begin, touched.begin};
  return {begin_tile, end_tile};
}

}  // namespace tilewise
