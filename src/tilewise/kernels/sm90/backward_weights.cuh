// The elementwise part of a backward step: how weights are computed from scores, and how a thread
// stores them.
//
// A thread's fragment of S^T, P^T, dP^T or dS^T: element i belongs to key row 16 warp + lane / 4 +
// 8 row_of(i) and query column 2 (lane % 4) + column_of(i).
#pragma once

#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "backward_config.cuh"

namespace tilewise::sm90 {

// Copies the column vector `start` (in shared memory, one value per query) into every row of an
// accumulator.
template <int count>
__device__ __forceinline__ void start_from(float (&accumulator)[count], const float* start) {
  const float2* pairs = reinterpret_cast<const float2*>(start) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    const float2 pair = pairs[4 * j];
    accumulator[4 * j] = accumulator[4 * j + 2] = pair.x;
    accumulator[4 * j + 1] = accumulator[4 * j + 3] = pair.y;
  }
}

// Weights in 16 bits, in the A layout of the next product, and with `keeps_rest` the 8 bits below.
// Why: dS = P (dP - D) formed from rounded weights has 1.2 x the error, and whole floats do not fit
// in the registers.
//   bf16  is truncated, so that one instruction cuts a weight into bytes or reassembles it. The
//         host corrects this on average: it raises all weights by a factor, and divides dQ and
//         dK by it.
//   fp16  is rounded, by adding half a unit to the bits of the float; the rest is the 8 bits below.
//         Small weights are subnormal in fp16, where truncation would be noticeable.
template <bool keeps_rest, Element element, int count>
struct Weights {
  static constexpr ptx::u32 half_unit = 0x1000;  // of fp16, in the bits of a float

  ptx::u32 packed[count / 8][4];
  ptx::u32 rest[keeps_rest ? count / 4 : 1];

  __device__ __forceinline__ void set(const float (&p)[count]) {
    if constexpr (!keeps_rest || element != Element::bf16) pack_block<element>(p, packed);
    if constexpr (!keeps_rest) return;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      ptx::u32 x[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) x[h] = __float_as_uint(p[i + h]);
      if constexpr (element == Element::bf16) {
        packed[i / 8][i / 2 % 4] = __byte_perm(x[0], x[1], 0x7632);
        packed[i / 8][i / 2 % 4 + 1] = __byte_perm(x[2], x[3], 0x7632);
      } else {
#pragma unroll
        for (int h = 0; h < 4; ++h) x[h] = (x[h] + half_unit) << 3;
      }
      rest[i / 4] =
          __byte_perm(__byte_perm(x[0], x[1], 0x0051), __byte_perm(x[2], x[3], 0x0051), 0x5410);
    }
  }

  // With `marked`, weights may carry a sign.
  template <bool marked = false>
  __device__ __forceinline__ float get(int i) const {
    const ptx::u32 pair = packed[i / 8][i / 2 % 4];
    if constexpr (keeps_rest && element == Element::bf16) {
      const ptx::u32 low = 0x44u + 0x11u * (i % 4);
      return __uint_as_float(__byte_perm(pair, rest[i / 4], (i % 2 ? 0x3200u : 0x1000u) | low));
    }
    const float rounded = i % 2 ? ptx::unpack_high<element>(pair) : ptx::unpack_low<element>(pair);
    if constexpr (!keeps_rest) return rounded;
    // Invariant: the byte holds the 8 bits below those that fp16 keeps. A weight of 0 stays 0.
    const ptx::u32 byte = __byte_perm(rest[i / 4], 0, 0x4404u | (i % 4) << 4) >> 3;
    const ptx::u32 bits = __float_as_uint(rounded);
    const bool is_zero = marked ? rounded == 0.0f : bits == 0;
    return __uint_as_float(is_zero ? 0 : (bits | byte) - half_unit);
  }
};

}  // namespace tilewise::sm90
