// The instruction of kernels/common/terms/bits_ptx.cuh on the model of runtime.h.
#pragma once

#include "../ptx.cuh"

namespace tilewise::ptx {

inline float keep_if(u32 word, u32 mask, float v) { return word & mask ? v : -INFINITY; }

}  // namespace tilewise::ptx
