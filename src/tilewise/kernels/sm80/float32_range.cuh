// Tiles of floats in shared memory whose numbers lie near an end of float32's range. A thread
// inspects and changes only the numbers that it has copied itself, so only its own copies must have
// arrived.
#pragma once

#include "float32_products.cuh"

namespace tilewise::sm80 {

// Nonzero in numbers of 2^-95 and above, in inf and in NaN. Smaller numbers count as small: below
// 2^-113 a low part has fewer bits than it needs.
constexpr u32 large_bits = 0x70000000;

// Calls f(address) for each chunk of a tile that this thread has copied.
template <typename Copy, int rows, int unroll, typename Use>
__device__ __forceinline__ void for_own_chunks(u32 matrix, Use f) {
  const u32 thread = ptx::thread_again(), to = Copy::place(matrix, thread);
#pragma unroll unroll
  for (int i = 0; i < rows / Copy::at_once * Copy::panels; ++i)
    f(to + i / Copy::panels * panel_bytes(Copy::at_once) + i % Copy::panels * panel_bytes(rows));
}

// f(bits) returns the new value of each float.
template <typename Copy, int rows, typename Change>
__device__ __forceinline__ void change_floats(u32 matrix, Change f) {
  for_own_chunks<Copy, rows, 1>(matrix, [&](u32 chunk) {
    const uint4 x = ptx::load_shared(chunk);
    ptx::store_shared(chunk, uint4{f(x.x), f(x.y), f(x.z), f(x.w)});
  });
}
template <typename Copy, int rows>
__device__ __forceinline__ void scale_floats(u32 matrix, float factor) {
  change_floats<Copy, rows>(matrix,
                            [=](u32 x) { return __float_as_uint(__uint_as_float(x) * factor); });
}

// Whether any of this thread's numbers is not small.
template <typename Copy, int rows>
__device__ __forceinline__ bool has_large_floats(u32 matrix) {
  u32 bits = 0;
  for_own_chunks<Copy, rows, 4>(matrix, [&](u32 chunk) {
    const uint4 x = ptx::load_shared(chunk);
    bits |= x.x | x.y | x.z | x.w;
  });
  return (bits & large_bits) != 0;
}

}  // namespace tilewise::sm80
