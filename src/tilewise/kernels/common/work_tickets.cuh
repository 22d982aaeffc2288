// Which work a CTA does where CTAs wait for one another.
#pragma once

#include "ptx.cuh"

namespace tilewise {

// The number of this CTA's work: its block index or, with a zeroed counter `tickets`, how many CTAs
// of the grid have started before it. All lanes of a warp must call it, once per CTA.
//
// Why tickets: a CTA that waits for work with smaller numbers must know that CTAs run it already,
// and nothing promises that blocks start in the order of their indices. With tickets, work with a
// smaller number is with a CTA that has started before, and what that one waits for likewise. So
// the CTA that has the smallest number of all that have not ended waits for none.
__device__ __forceinline__ int take_work(int* tickets) {
  int work = blockIdx.x;
  if (tickets != nullptr) {
    if (threadIdx.x % 32 == 0) work = ptx::add_relaxed(tickets, 1);
    work = __shfl_sync(0xffffffffu, work, 0);
  }
  return work;
}

}  // namespace tilewise
