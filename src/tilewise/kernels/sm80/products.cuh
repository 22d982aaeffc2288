// A warp's share of a product of two matrices in shared memory, C += A B, with operands in either
// orientation. tiles.cuh explains the lane addresses.
#pragma once

#include "tiles.cuh"

namespace tilewise::sm80 {

enum class Stored {
  by_rows,    // A: a row of A is a row in memory.    B: the sum index counts rows.
  by_columns  // A: a column of A is a row in memory. B: the sum index counts columns.
};

// The address of 16 columns `i` of `count` that begin at block `first`. Invariant: where `count`
// divides 4 or is a multiple of it, `first` is a multiple of `count`. The bits of the two then do
// not overlap, and the lane's address for `first` is computed once.
template <int rows, int count>
__device__ __forceinline__ u32 column_block_of(u32 lane, int first, int i) {
  if constexpr (4 % count == 0 || count % 4 == 0)
    return column_block<rows>(column_block<rows>(lane, first), i);
  else
    return column_block<rows>(lane, first + i);
}

// An operand: a matrix whose panels have `rows` rows, of which this warp takes `blocks` blocks of
// 16 (rows of A, columns of B) from block `first` on.
template <int rows, int blocks>
struct OperandA {
  const u32 lane;
  const int first;

  template <Stored stored>
  __device__ __forceinline__ void load(int block, int step, u32 (&fragment)[4]) const {
    if constexpr (stored == Stored::by_rows)
      ptx::ldmatrix_x4(column_block<rows>(lane, step) + (first + block) * panel_bytes(16),
                       fragment);
    else
      ptx::ldmatrix_x4_trans(
          column_block_of<rows, blocks>(lane, first, block) + step * panel_bytes(16), fragment);
  }
};

template <int rows, int blocks>
struct OperandB {
  const u32 lane;
  const int first;

  template <Stored stored>
  __device__ __forceinline__ void load(int block, int step, u32 (&fragment)[4]) const {
    if constexpr (stored == Stored::by_columns)
      ptx::ldmatrix_x4(column_block<rows>(lane, step) + (first + block) * panel_bytes(16),
                       fragment);
    else
      ptx::ldmatrix_x4_trans(
          column_block_of<rows, blocks>(lane, first, block) + step * panel_bytes(16), fragment);
  }
};

// Adds `steps` steps of 16 along the sum index.
template <Element element, Stored a_stored, Stored b_stored, int steps, int a_rows, int b_rows,
          int a_blocks, int count>
__device__ __forceinline__ void multiply(float (&c)[a_blocks][count], u32 a_matrix, int a_first,
                                         u32 b_matrix, int b_first) {
  constexpr int b_blocks = count / 8;
  const OperandA<a_rows, a_blocks> a_operand{
      a_stored == Stored::by_rows ? lane_by_rows(a_matrix) : lane_by_columns(a_matrix), a_first};
  const OperandB<b_rows, b_blocks> b_operand{
      b_stored == Stored::by_columns ? lane_by_columns(b_matrix) : lane_by_rows(b_matrix), b_first};
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    u32 a[a_blocks][4];
#pragma unroll
    for (int i = 0; i < a_blocks; ++i) a_operand.template load<a_stored>(i, step, a[i]);
#pragma unroll
    for (int j = 0; j < b_blocks; ++j) {
      u32 b[4];
      b_operand.template load<b_stored>(j, step, b);
#pragma unroll
      for (int i = 0; i < a_blocks; ++i) {
        ptx::mma_m16n8k16<element>(&c[i][8 * j], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<element>(&c[i][8 * j + 4], a[i], b[2], b[3]);
      }
    }
  }
}

template <int rows, int count>
__device__ __forceinline__ void clear(float (&c)[rows][count]) {
#pragma unroll
  for (int i = 0; i < rows; ++i) {
#pragma unroll
    for (int j = 0; j < count; ++j) c[i][j] = 0.0f;
  }
}

}  // namespace tilewise::sm80
