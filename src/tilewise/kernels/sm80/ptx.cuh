// The instructions of the FlashAttention-2 kernels that the Hopper ones do without: asynchronous
// copies by threads. Conventions as in common/ptx.cuh.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

// Copies the first `bytes` (16 or 0) of 16 bytes; the rest becomes zeros, and is not read.
__device__ __forceinline__ void cp_async_16(u32 destination, const void* source,
                                            u32 bytes) {  // ISA: cp.async
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {  // ISA: cp.async.commit_group
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns once all but the last `pending` groups of this thread have arrived.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {  // ISA: cp.async.wait_group
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 x) {  // ISA: st
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {  // ISA: ld
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 x) {  // ISA: st
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace tilewise::ptx
