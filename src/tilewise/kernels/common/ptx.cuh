// Each function wraps one PTX instruction. Shared-memory addresses are 32-bit, converted once at
// the edge by smem_address(). A function has a "memory" clobber exactly when the instruction orders
// memory for the code around it.
//
// This header has the instructions that the kernels of both generations use; sm80/ptx.cuh and
// sm90/ptx.cuh have the others.
#pragma once

#include "element.cuh"

namespace tilewise::ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read again at every call. Why: values derived from it cannot be hoisted out of a
// loop, where they would occupy registers.
__device__ __forceinline__ u32 thread_again() {  // ISA: %tid
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// --- between grids: launches overlap from Hopper on, and follow one another before it ---

__device__ __forceinline__ void wait_for_previous_grid() {  // ISA: griddepcontrol
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next_grid() {  // ISA: griddepcontrol
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- matrices in shared memory ---

__device__ __forceinline__ void ldmatrix_x4(u32 address, u32 (&m)[4]) {  // ISA: ldmatrix
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same matrices, each transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 address, u32 (&m)[4]) {  // ISA: ldmatrix
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// --- arithmetic (pure: not volatile, no clobber) ---

__device__ __forceinline__ float ex2(float x) {  // ISA: ex2
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// to = a b + c where the condition holds: one instruction, with a predicate. ISA: fma
__device__ __forceinline__ void fma_where(bool condition, float& to, float a, float b, float c) {
  asm("{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %4, 0;\n"
      "  @p fma.rn.f32 %0, %1, %2, %3;\n"
      "}"
      : "+f"(to)
      : "f"(a), "f"(b), "f"(c), "r"(static_cast<int>(condition)));
}

__device__ __forceinline__ float lg2(float x) {  // ISA: lg2
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp(float x) {  // ISA: rcp
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt(float x) {  // ISA: rsqrt
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even and packed: `low` in bits 0-15, `high` in bits 16-31.
template <Element element>
__device__ __forceinline__ u32 pack(float low, float high) {  // ISA: cvt
  static_assert(is_16_bit<element>);
  u32 packed;
  if constexpr (element == Element::bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Compares the two fp16 numbers in a word: sets all bits of a half where x is not at least y, which
// includes NaN.
__device__ __forceinline__ u32 not_at_least(u32 x, u32 y) {  // ISA: set
  u32 ones;
  asm("set.ltu.u32.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(x), "r"(y));
  return ones;
}

// Two packed values, with negative ones replaced by 0.
template <Element element>
__device__ __forceinline__ u32 at_least_zero(u32 x) {  // ISA: max
  static_assert(is_16_bit<element>);
  u32 y;
  if constexpr (element == Element::bf16)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0u));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0u));
  return y;
}

// The low and the high half of a product.
struct Halves {
  u32 low, high;
};
__device__ __forceinline__ Halves multiply_wide(u32 x, u32 y) {  // ISA: mul
  Halves product;
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(product.low), "=r"(product.high)
      : "r"(x), "r"(y));
  return product;
}

// 0 * x + sum, on two packed values: `sum` where x is finite, NaN where it is not.
template <Element element>
__device__ __forceinline__ u32 add_zero_times(u32 x, u32 sum) {  // ISA: fma
  static_assert(is_16_bit<element>);
  u32 y;
  if constexpr (element == Element::bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0u), "r"(sum));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0u), "r"(sum));
  return y;
}

template <Element element>
__device__ __forceinline__ float unpack_low(u32 packed) {  // ISA: cvt
  static_assert(is_16_bit<element>);
  if constexpr (element == Element::bf16) return __uint_as_float(packed << 16);
  float x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
      : "=f"(x)
      : "r"(packed));
  return x;
}

template <Element element>
__device__ __forceinline__ float unpack_high(u32 packed) {  // ISA: cvt
  static_assert(is_16_bit<element>);
  if constexpr (element == Element::bf16) return __uint_as_float(packed & 0xffff0000u);
  float x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
      : "=f"(x)
      : "r"(packed));
  return x;
}

// One warp's 16 x 8 += 16 x 16 * 16 x 8. The fragment layout is that of wgmma's rows of that warp.
template <Element element>
__device__ __forceinline__ void mma_m16n8k16(float* c, const u32 (&a)[4], u32 b0,
                                             u32 b1) {  // ISA: mma
  static_assert(is_16_bit<element>);
  if constexpr (element == Element::bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- global memory, between blocks ---

// Adds four sums in global memory, 16-byte aligned; each is atomic by itself. From sm_90 on.
__device__ __forceinline__ void add_to_global(float* address, float a, float b, float c,
                                              float d) {  // ISA: red
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Adds one sum in global memory.
__device__ __forceinline__ void add_to_global(float* address, float a) {  // ISA: red
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(a) : "memory");
}

// Adds one sum in global memory, atomically and with subnormal numbers, which red flushes to 0.
__device__ __forceinline__ void add_subnormal_to_global(float* address, float a) {
  u32* place = reinterpret_cast<u32*>(address);
  for (u32 seen = *place, before;; seen = before) {
    before = atomicCAS(place, seen, __float_as_uint(__uint_as_float(seen) + a));
    if (before == seen) return;
  }
}

__device__ __forceinline__ int load_acquire(const int* address) {  // ISA: ld
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(int* address, int value) {  // ISA: red
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Returns the previous value.
__device__ __forceinline__ int add_relaxed(int* address, int value) {  // ISA: atom
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

}  // namespace tilewise::ptx
