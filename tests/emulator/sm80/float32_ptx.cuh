// The instructions of kernels/sm80/float32_ptx.cuh on the model of runtime.h. Ref: PTX ISA, "Matrix
// fragments for mma.m16n8k8".
#pragma once

#include "ptx.cuh"

namespace tilewise::ptx {

// The tensor core reads 19 bits of a number, and rounds as tensor_core.h describes.
inline void mma_m16n8k8(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  auto tf32 = [](u32 bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); };
  warp_product<8>(
      c, a, b0, b1, tensor_core::float_min_exponent,
      [=](const Lanes& lanes, int row, int k) {
        return tf32(lanes[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]);
      },
      [=](const Lanes& lanes, int column, int k) {
        return tf32(lanes[column * 4 + k % 4][4 + k / 4]);
      });
}

inline u32 load_shared_word(u32 address) {
  if (address % 4 || address + 4 > model::shared_bytes) model::fail("a load of no such address");
  u32 x;
  std::memcpy(&x, model::shared + address, 4);
  return x;
}
inline u32 load_shared_again(u32 address) { return load_shared_word(address); }

}  // namespace tilewise::ptx
