// The instructions of kernels/sm80/float32_ptx.cuh on the model of runtime.h. Ref: PTX ISA, "Matrix
// fragments for mma.m16n8k8".
#pragma once

#include "ptx.cuh"

namespace tilewise::ptx {

// The tensor core reads 19 bits of a number, and rounds as tensor_core.h tells.
inline void mma_m16n8k8(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  const Lanes& lanes = all_lanes({a[0], a[1], a[2], a[3], b0, b1});
  auto tf32 = [](u32 bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); };
  tensor_core::Factors rows[2], columns[2];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 8; ++k) {
      rows[i].set(k, tf32(lanes[model::lane() / 4 * 4 + k % 4][i + k / 4 * 2]));
      columns[i].set(k, tf32(lanes[(model::lane() % 4 * 2 + i) * 4 + k % 4][4 + k / 4]));
    }
  for (int i = 0; i < 4; ++i)
    c[i] = tensor_core::mma(c[i], rows[i / 2], columns[i % 2], model::products_of, 8);
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
