// Assigns work to CTAs where CTAs wait for one another.
#pragma once

#include "ptx.cuh"

namespace tilewise {

// The number of this CTA's work: its block index or, with a zeroed counter `tickets`, the number of
// CTAs of the grid that have started before it. All lanes of a warp must call it, once per CTA.
//
// Why tickets: a CTA that waits for work with smaller numbers must know that other CTAs are already
// running it, and blocks are not guaranteed to start in the order of their indices. With tickets,
// work with a smaller number belongs to a CTA that has started earlier, and so does any work that
// this one waits for. Therefore, among all CTAs that have not ended, the one with the smallest
// number waits for none.
__device__ __forceinline__ int take_work(int* tickets) {
  int work = blockIdx.x;
  if (tickets != nullptr) {
    if (threadIdx.x % 32 == 0) work = ptx::add_relaxed(tickets, 1);
    work = __shfl_sync(0xffffffffu, work, 0);
  }
  return work;
}

}  // namespace tilewise
