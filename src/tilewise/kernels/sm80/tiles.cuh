// How matrices move: from global memory to shared memory by cp.async, from shared memory to
// fragments by ldmatrix, through mma.sync, and from fragments back to global memory in whole
// chunks.
//
// In shared memory a matrix consists of panels of 64 columns with swizzled 16-byte chunks
// (common/layout.cuh). The swizzle permutes bits 4-6 of an address by the row's last three bits. A
// lane therefore computes its address once, and reaches column blocks by xor: `column_block` below.
// Ref: PTX ISA, "ldmatrix", "Matrix fragments for mma.m16n8k16".
#pragma once

#include "../common/nonfinite.cuh"
#include "config.cuh"

namespace tilewise::sm80 {

// Byte offset of 16 columns `block` of a matrix with panels of `rows`, from `lane`, the address of
// the first 16 columns. Invariant: bits 4-6 of `lane` are those of a swizzled place in a panel that
// begins at a multiple of 128.
template <int rows>
__device__ __forceinline__ u32 column_block(u32 lane, int block) {
  return (lane ^ (block % 4 << 5)) + block / 4 * panel_bytes(rows);
}

// The address of a lane for an A operand (16 rows x 16 columns), and for a B operand that is stored
// with the sum index along its rows (16 x 16, transposed by ldmatrix).
__device__ __forceinline__ u32 lane_by_rows(u32 matrix) {
  const int lane = threadIdx.x % 32;
  return matrix + swizzled_chunk(lane % 16, lane / 16);
}
// The same for a B operand that is stored with the sum index along its columns, and for an A
// operand that ldmatrix transposes.
__device__ __forceinline__ u32 lane_by_columns(u32 matrix) {
  const int lane = threadIdx.x % 32;
  return matrix + swizzled_chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// A thread's share of copying tiles of `rows` rows of one head: eight neighbouring threads copy the
// 128 bytes of a panel's row.
template <int rows, int columns, int threads>
struct TileCopy {
  static constexpr int at_once = threads / 8;  // rows
  static constexpr int panels = panel_count(columns);
  static_assert(rows % at_once == 0 && at_once % 8 == 0);

  const Tensor& tensor;
  const int batch;
  const int head;
  const int& dim;  // the actual one

  static __device__ __forceinline__ bool has(int panel, u32 thread) {
    return columns % panel_columns == 0 || panel * 8 + thread % 8 < columns / 8;
  }
  static __device__ __forceinline__ u32 place(u32 matrix, u32 thread) {
    return matrix + swizzled_chunk(thread / 8, thread % 8);
  }

  // Loads rows from `first_row` on; rows at or past `end_row`, and columns past the actual ones,
  // become zeros.
  __device__ __forceinline__ void load(u32 matrix, int first_row, int end_row) const {
    const u32 thread = ptx::thread_again(), to = place(matrix, thread);
    const int left = end_row - first_row - static_cast<int>(thread / 8);
    const int dim_left = dim - static_cast<int>(thread % 8 * 8);
    const u16* from = tensor.row(batch, head, first_row) + thread / 8 * tensor.seq_stride +
                      static_cast<int>(thread % 8 * 8);
#pragma unroll
    for (int i = 0; i < rows / at_once; ++i, from += at_once * tensor.seq_stride) {
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) {
        if (!has(panel, thread)) continue;
        const bool exists = i * at_once < left && panel * panel_columns < dim_left;
        ptx::cp_async_16(to + i * panel_bytes(at_once) + panel * panel_bytes(rows),
                         from + panel * panel_columns, exists ? 16 : 0);
      }
    }
  }

  // Zeroes inf and NaN among the chunks that this thread has copied; returns true if it found any.
  // Why: a key that a row may not see gets weight 0, and 0 * inf is NaN.
  template <Element element>
  static __device__ __forceinline__ bool scrub(u32 matrix) {
    const u32 thread = ptx::thread_again(), to = place(matrix, thread);
    u32 sum = 0;  // a sum of zeros, which is NaN once a value is not finite
#pragma unroll
    for (int i = 0; i < rows / at_once * panels; ++i) {
      if (!has(i % panels, thread)) continue;
      const uint4 x =
          ptx::load_shared(to + i / panels * panel_bytes(at_once) + i % panels * panel_bytes(rows));
      sum = ptx::add_zero_times<element>(x.x, sum);
      sum = ptx::add_zero_times<element>(x.y, sum);
      sum = ptx::add_zero_times<element>(x.z, sum);
      sum = ptx::add_zero_times<element>(x.w, sum);
    }
    if ((sum & 0x7fff7fffu) == 0) return false;
    auto keep = [](u32 word) {
      const u32 bad = nonfinite_bits<element>(word) >> 15;  // 1 in bit 0 and bit 16
      return word & ~(bad * 0xffffu);
    };
#pragma unroll 1
    for (int i = 0; i < rows / at_once * panels; ++i) {
      if (!has(i % panels, thread)) continue;
      const u32 chunk = to + i / panels * panel_bytes(at_once) + i % panels * panel_bytes(rows);
      const uint4 x = ptx::load_shared(chunk);
      ptx::store_shared(chunk, uint4{keep(x.x), keep(x.y), keep(x.z), keep(x.w)});
    }
    return true;
  }
};

// Stores a warp's fragments (16 * row_tiles rows, 8 columns per block) to global memory, through
// `staging`, panels of `panel_rows` whose rows from `lane_row` on belong to this warp. Rows at or
// past `end_row`, and chunks past the actual columns, are left out.
template <Element element, int row_tiles, int columns, int panel_rows>
__device__ __forceinline__ void store_rows(u32 staging, const float (&x)[row_tiles][columns / 2],
                                           u16* destination, long long row_stride, int first_row,
                                           int end_row, int dim) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
    for (int i = 0; i < columns / 2; i += 2) {
      const int row = t * 16 + lane / 4 + i / 2 % 2 * 8, chunk = i / 4;
      ptx::store_shared(staging + chunk / 8 * panel_bytes(panel_rows) +
                            swizzled_chunk(row, chunk % 8) + lane % 4 * 4,
                        ptx::pack<element>(x[t][i], x[t][i + 1]));
    }
  }
  __syncwarp();
  destination += first_row * row_stride;
#pragma unroll
  for (int panel = 0; panel < panel_count(columns); ++panel) {
    const int column = panel * panel_columns + lane % 8 * 8;
    if (column >= dim || column >= columns) continue;
#pragma unroll
    for (int i = 0; i < row_tiles * 4; ++i) {
      const int row = i * 4 + lane / 8;
      const uint4 chunk = ptx::load_shared(staging + panel * panel_bytes(panel_rows) +
                                           swizzled_chunk(row, lane % 8));
      if (first_row + row < end_row)
        *reinterpret_cast<uint4*>(destination + row * row_stride + column) = chunk;
    }
  }
}

}  // namespace tilewise::sm80
