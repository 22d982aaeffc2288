// wgmma: the warpgroup's asynchronous matrix product, D[64 x N] += A[64 x 16] * B[16 x N] with D in
// fp32.
//
// The protocol: fence() precedes the first product of a batch (other instructions wrote the
// registers it touches); then come the products, commit(), and wait<n>() until at most n batches
// are pending. Between issue and wait the registers of D (and of A when it is in registers) belong
// to the hardware: hold() keeps the compiler from moving their uses across.
//
// Accumulator layout of a thread (warp w, lane l): d[4j], d[4j+1] are row 16w + l/4, columns 8j +
// 2(l%4) + {0, 1}; d[4j+2], d[4j+3] the same columns of row + 8. Packing d[8i .. 8i+7] in order
// gives the A fragment of k-step i.
#pragma once

#include "ptx.cuh"

namespace tilewise::wgmma {

using ptx::u32;
using ptx::u64;

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void wait_before_slow_path() {
  asm volatile("wgmma.wait_group.sync.aligned 0; // slow path" ::: "memory");
}

template <int count>
__device__ __forceinline__ void hold(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int count>
__device__ __forceinline__ void hold(u32 (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Shared-memory operand with 128-byte swizzle. Ref: PTX ISA, "Shared memory matrix layout", matrix
// descriptor.
//   K-major (Q, K): an atom is 8 rows x 128 bytes; `stride_bytes` = 1024 to the next 8 rows,
//   leading ignored. MN-major (V): an atom is 64 columns x 8 rows; `stride_bytes` = 1024 to the
//   next 8 rows, `leading_bytes` to the next 64 columns.
// Invariant: the atom's address is a multiple of 1024.
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading_bytes) {
  return ((leading_bytes >> 4) << 16) | ((address & 0x3ffff) >> 4);
}
__device__ __forceinline__ u64 descriptor(u32 low, u32 stride_bytes) {
  const u32 high = (1u << 30) | (stride_bytes >> 4);
  return (static_cast<u64>(high) << 32) | low;
}

template <int n, Element element>
struct Product;  // multiply(d, a, b, accumulate): A from shared memory (u64 descriptor) or four
                 // registers

#define TW_O8(i0, i1, i2, i3, i4, i5, i6, i7) \
  "%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 ",%" #i4 ",%" #i5 ",%" #i6 ",%" #i7
#define TW_L16 TW_O8(0, 1, 2, 3, 4, 5, 6, 7)
#define TW_L32 TW_L16 "," TW_O8(8, 9, 10, 11, 12, 13, 14, 15)
#define TW_L48 TW_L32 "," TW_O8(16, 17, 18, 19, 20, 21, 22, 23)
#define TW_L64 TW_L48 "," TW_O8(24, 25, 26, 27, 28, 29, 30, 31)
#define TW_L80 TW_L64 "," TW_O8(32, 33, 34, 35, 36, 37, 38, 39)
#define TW_L96 TW_L80 "," TW_O8(40, 41, 42, 43, 44, 45, 46, 47)
#define TW_L112 TW_L96 "," TW_O8(48, 49, 50, 51, 52, 53, 54, 55)
#define TW_L128 TW_L112 "," TW_O8(56, 57, 58, 59, 60, 61, 62, 63)
#define TW_L144 TW_L128 "," TW_O8(64, 65, 66, 67, 68, 69, 70, 71)
#define TW_L160 TW_L144 "," TW_O8(72, 73, 74, 75, 76, 77, 78, 79)
#define TW_L176 TW_L160 "," TW_O8(80, 81, 82, 83, 84, 85, 86, 87)
#define TW_L192 TW_L176 "," TW_O8(88, 89, 90, 91, 92, 93, 94, 95)
#define TW_L208 TW_L192 "," TW_O8(96, 97, 98, 99, 100, 101, 102, 103)
#define TW_L224 TW_L208 "," TW_O8(104, 105, 106, 107, 108, 109, 110, 111)
#define TW_L240 TW_L224 "," TW_O8(112, 113, 114, 115, 116, 117, 118, 119)
#define TW_L256 TW_L240 "," TW_O8(120, 121, 122, 123, 124, 125, 126, 127)

#define TW_D8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TW_D16 TW_D8(0)
#define TW_D32 TW_D16, TW_D8(8)
#define TW_D48 TW_D32, TW_D8(16)
#define TW_D64 TW_D48, TW_D8(24)
#define TW_D80 TW_D64, TW_D8(32)
#define TW_D96 TW_D80, TW_D8(40)
#define TW_D112 TW_D96, TW_D8(48)
#define TW_D128 TW_D112, TW_D8(56)
#define TW_D144 TW_D128, TW_D8(64)
#define TW_D160 TW_D144, TW_D8(72)
#define TW_D176 TW_D160, TW_D8(80)
#define TW_D192 TW_D176, TW_D8(88)
#define TW_D208 TW_D192, TW_D8(96)
#define TW_D224 TW_D208, TW_D8(104)
#define TW_D240 TW_D224, TW_D8(112)
#define TW_D256 TW_D240, TW_D8(120)

// A and B both K-major in shared memory; operands after D: %a = descriptor A, %b = descriptor B, %c
// = accumulate.
#define TW_SS(n, type, a, b, c)                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                      \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_L##n \
               "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}"                                     \
               : TW_D##n                                                                    \
               : "l"(a_desc), "l"(b_desc), "r"(accumulate))
// A in registers, B MN-major in shared memory.
#define TW_RS(n, type, a0, a1, a2, a3, b, c)                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                      \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_L##n \
               "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 1;\n}"          \
               : TW_D##n                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(accumulate))

// i0..i5: the operand numbers that follow the n / 2 accumulators.
#define TW_PRODUCT(n, i0, i1, i2, i3, i4, i5)                                                  \
  template <Element element>                                                                   \
  struct Product<n, element> {                                                                 \
    static_assert(is_16_bit<element>);                                                         \
    __device__ __forceinline__ static void multiply(float (&d)[n / 2], u64 a_desc, u64 b_desc, \
                                                    int accumulate) {                          \
      if constexpr (element == Element::bf16)                                                  \
        TW_SS(n, "bf16", i0, i1, i2);                                                          \
      else                                                                                     \
        TW_SS(n, "f16", i0, i1, i2);                                                           \
    }                                                                                          \
    __device__ __forceinline__ static void multiply(float (&d)[n / 2], const u32 (&a)[4],      \
                                                    u64 b_desc, int accumulate) {              \
      if constexpr (element == Element::bf16)                                                  \
        TW_RS(n, "bf16", i0, i1, i2, i3, i4, i5);                                              \
      else                                                                                     \
        TW_RS(n, "f16", i0, i1, i2, i3, i4, i5);                                               \
    }                                                                                          \
  };

TW_PRODUCT(32, 16, 17, 18, 19, 20, 21)
TW_PRODUCT(48, 24, 25, 26, 27, 28, 29)
TW_PRODUCT(64, 32, 33, 34, 35, 36, 37)
TW_PRODUCT(80, 40, 41, 42, 43, 44, 45)
TW_PRODUCT(96, 48, 49, 50, 51, 52, 53)
TW_PRODUCT(112, 56, 57, 58, 59, 60, 61)
TW_PRODUCT(128, 64, 65, 66, 67, 68, 69)
TW_PRODUCT(144, 72, 73, 74, 75, 76, 77)
TW_PRODUCT(160, 80, 81, 82, 83, 84, 85)
TW_PRODUCT(176, 88, 89, 90, 91, 92, 93)
TW_PRODUCT(192, 96, 97, 98, 99, 100, 101)
TW_PRODUCT(224, 112, 113, 114, 115, 116, 117)
TW_PRODUCT(256, 128, 129, 130, 131, 132, 133)

// Both operands in shared memory and MN-major: A stored as k rows of 64 columns m, B as k rows of
// n.
#define TW_SS_TRANSPOSED(n, type, a, b, c)                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                      \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_L##n \
               "}, %" #a ", %" #b ", p, 1, 1, 1, 1;\n}"                                     \
               : TW_D##n                                                                    \
               : "l"(a_desc), "l"(b_desc), "r"(accumulate))

template <int n, Element element>
struct TransposedProduct;

#define TW_TRANSPOSED_PRODUCT(n, i0, i1, i2)                                                   \
  template <Element element>                                                                   \
  struct TransposedProduct<n, element> {                                                       \
    static_assert(is_16_bit<element>);                                                         \
    __device__ __forceinline__ static void multiply(float (&d)[n / 2], u64 a_desc, u64 b_desc, \
                                                    int accumulate) {                          \
      if constexpr (element == Element::bf16)                                                  \
        TW_SS_TRANSPOSED(n, "bf16", i0, i1, i2);                                               \
      else                                                                                     \
        TW_SS_TRANSPOSED(n, "f16", i0, i1, i2);                                                \
    }                                                                                          \
  };

TW_TRANSPOSED_PRODUCT(64, 32, 33, 34)
TW_TRANSPOSED_PRODUCT(96, 48, 49, 50)
TW_TRANSPOSED_PRODUCT(128, 64, 65, 66)
TW_TRANSPOSED_PRODUCT(192, 96, 97, 98)

}  // namespace tilewise::wgmma
