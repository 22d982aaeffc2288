// The instructions of the float32 kernels: products of TF32 numbers, which have float32's exponents
// and 11 bits. The conventions are those of common/ptx.cuh.
#pragma once

#include "ptx.cuh"

namespace tilewise::ptx {

// One warp's 16 x 8 += 16 x 8 * 8 x 8. The lowest 13 bits of its operands are ignored.
__device__ __forceinline__ void mma_m16n8k8(float* c, const u32 (&a)[4], u32 b0,
                                            u32 b1) {  // ISA: mma
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {  // ISA: ld
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// Reads shared memory every time, even where the compiler knows the value.
__device__ __forceinline__ u32 load_shared_again(u32 address) {  // ISA: ld
  u32 x;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

}  // namespace tilewise::ptx
