// The instructions of kernels/sm80/float32_ptx.cuh on the model of runtime.h. Ref: PTX ISA, "Matrix
// fragments for mma.m16n8k8".
#pragma once

#include "../sm90/wgmma.cuh"
#include "ptx.cuh"

namespace tilewise::ptx {

// The tensor core reads 19 bits of a number, and rounds as wgmma.cuh tells.
inline void mma_m16n8k8(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  const Lanes& lanes = all_lanes({a[0], a[1], a[2], a[3], b0, b1});
  auto tf32 = [](u32 bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); };
  for (int i = 0; i < 4; ++i) {
    const int row = model::lane() / 4 + i / 2 * 8, column = model::lane() % 4 * 2 + i % 2;
    float from_a[16] = {}, from_b[16] = {};
    for (int k = 0; k < 8; ++k) {
      from_a[k] = tf32(lanes[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]);
      from_b[k] = tf32(lanes[column * 4 + k % 4][4 + k / 4]);
    }
    c[i] = wgmma::step_of_tensor_core(c[i], from_a, from_b, 1);
  }
}

inline u32 load_shared_word(u32 address) {
  if (address % 4 || address + 4 > model::shared_bytes) model::fail("a load of no such address");
  u32 x;
  std::memcpy(&x, model::shared + address, 4);
  return x;
}
inline u32 load_shared_again(u32 address) { return load_shared_word(address); }

}  // namespace tilewise::ptx

inline unsigned __ballot_sync(unsigned, bool given) {
  unsigned votes = 0, lane = 0;
  for (const auto& values : tilewise::ptx::all_lanes({given})) votes |= values[0] << lane++;
  return votes;
}
