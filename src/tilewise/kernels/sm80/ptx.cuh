// The instructions of the FlashAttention-2 kernels that the Hopper ones do not use: asynchronous
// copies by threads. The conventions are those of common/ptx.cuh.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

// Copies the first `bytes` (16 or 0) of 16 bytes; the rest becomes zeros and is not read.
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

__device__ __forceinline__ float4 load_shared_floats(u32 address) {  // ISA: ld
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 x) {  // ISA: st
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// --- global memory, between CTAs ---

// Returns the previous value. A CTA that reads the new value in the same way sees what this CTA
// stored before, and this CTA sees what other CTAs stored before their updates.
__device__ __forceinline__ int add_acq_rel(int* address, int value) {  // ISA: atom
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// Reads what other CTAs have stored, from the L2 cache, which all share.
__device__ __forceinline__ float2 load_l2(const float2* address) {  // ISA: ld
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "l"(address)
               : "memory");
  return x;
}

}  // namespace tilewise::ptx
