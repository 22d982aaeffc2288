// Instructions for the work that a kernel does before the previous grid has ended, where launches
// overlap.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

#if __CUDA_ARCH__ >= 900
constexpr bool launches_overlap = true;
#else
constexpr bool launches_overlap = false;
#endif

// Loads after it do not see data that earlier loads left in the L1 cache.
__device__ __forceinline__ void forget_l1() {  // ISA: fence
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

}  // namespace tilewise::ptx
