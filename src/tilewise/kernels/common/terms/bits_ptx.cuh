// An instruction for terms that have one bit per score.
#pragma once

#include "../ptx.cuh"

namespace tilewise::ptx {

// v where `word` has a bit of `mask`, else -inf. ISA: and, setp, selp. Why in PTX: the assembler
// turns these into two instructions; the same in C++ takes a shift and two more.
__device__ __forceinline__ float keep_if(u32 word, u32 mask, float v) {
  float kept;
  asm("{\n"
      ".reg .pred p;\n"
      ".reg .b32 bits;\n"
      "and.b32 bits, %1, %2;\n"
      "setp.ne.b32 p, bits, 0;\n"
      "selp.f32 %0, %3, 0fFF800000, p;\n"
      "}"
      : "=f"(kept)
      : "r"(word), "r"(mask), "f"(v));
  return kept;
}

}  // namespace tilewise::ptx
