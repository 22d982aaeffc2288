// inf and NaN among packed 16-bit values: a mask may hide them, and 0 * inf is NaN.
#pragma once

#include "ptx.cuh"

namespace tilewise {

// Bits 15 and 31 tell which of the two packed values is inf or NaN.
template <bool bf16>
__device__ __forceinline__ ptx::u32 nonfinite_bits(ptx::u32 packed) {
  constexpr ptx::u32 exponent = bf16 ? 0x7f807f80u : 0x7c007c00u;
  constexpr ptx::u32 last_bit = bf16 ? 0x00800080u : 0x04000400u;
  return ((packed & exponent) + last_bit) & 0x80008000u;
}

}  // namespace tilewise
