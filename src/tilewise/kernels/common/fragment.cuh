// How a thread holds its part of a matrix product, in every kernel: accumulators of mma.sync and of
// wgmma have the same layout.
//
// A fragment is `count` numbers of two rows, r and r + 8 of its warp's sixteen. Element i is in row
// 8 row_of(i) and column column_of(i), both counted from the thread's first row and column:
// lane / 4 and 2 (lane % 4).
#pragma once

namespace tilewise {

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000u);

__host__ __device__ __forceinline__ constexpr int row_of(int i) { return (i >> 1) & 1; }
__host__ __device__ __forceinline__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// The unit of the numbers of a product: x * first * second is the product. The unit is a power of
// two, in two factors because one alone may overflow.
struct Unit {
  float first = 1.0f, second = 1.0f;
};

}  // namespace tilewise
