// The instructions of kernels/sm80/overlap_ptx.cuh on the model of runtime.h.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

constexpr bool launches_overlap = true;

inline void forget_l1() {}

}  // namespace tilewise::ptx
