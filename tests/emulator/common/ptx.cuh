// The instructions of kernels/common/ptx.cuh on the model of runtime.h.
#pragma once

#include <map>

#include "element.cuh"

namespace tilewise::ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline u32 smem_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - model::shared;
  if (offset < 0 || offset >= static_cast<long>(model::shared_bytes))
    model::fail("not in shared memory");
  return static_cast<u32>(offset);
}
inline void check_aligned(const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16)
    model::fail("an address that is no multiple of 16");
}

inline u32 thread_again() { return static_cast<u32>(model::self().index); }

inline void wait_for_previous_grid() { model::wait_for_previous_grid(); }
inline void allow_next_grid() {}

// --- arithmetic ---

inline float rcp(float x) { return 1.0f / x; }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float lg2(float x) { return log2f(x); }

inline float ex2(float x) { return exp2f(x); }
inline void fma_where(bool condition, float& to, float a, float b, float c) {
  if (condition) to = fmaf(a, b, c);
}
inline u16 rounded(float x, Element element) {
  if (element != Element::bf16) return __builtin_bit_cast(u16, static_cast<_Float16>(x));
  const u32 bits = __builtin_bit_cast(u32, x);
  if (x != x) return static_cast<u16>(bits >> 16 | 0x40);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widened(u16 x, Element element) {
  return element == Element::bf16 ? __builtin_bit_cast(float, static_cast<u32>(x) << 16)
                                  : static_cast<float>(__builtin_bit_cast(_Float16, x));
}
constexpr int min_exponent(Element element) {
  return element == Element::bf16 ? tensor_core::float_min_exponent
                                  : tensor_core::half_min_exponent;
}
template <Element element>
inline u32 pack(float low, float high) {
  return static_cast<u32>(rounded(high, element)) << 16 | rounded(low, element);
}
template <Element element>
inline float unpack_low(u32 packed) {
  return widened(static_cast<u16>(packed), element);
}
template <Element element>
inline float unpack_high(u32 packed) {
  return widened(static_cast<u16>(packed >> 16), element);
}

inline u32 not_at_least(u32 x, u32 y) {
  u32 ones = 0;
  for (int h = 0; h < 2; ++h) {
    const float a = widened(static_cast<u16>(x >> 16 * h), Element::fp16);
    const float b = widened(static_cast<u16>(y >> 16 * h), Element::fp16);
    if (!(a >= b)) ones |= 0xffffu << 16 * h;
  }
  return ones;
}
template <Element element>
inline u32 at_least_zero(u32 x) {
  u32 y = 0;
  for (int h = 0; h < 2; ++h)
    if (widened(static_cast<u16>(x >> 16 * h), element) > 0.0f) y |= x & 0xffffu << 16 * h;
  return y;
}
struct Halves {
  u32 low, high;
};
inline Halves multiply_wide(u32 x, u32 y) {
  const u64 product = static_cast<u64>(x) * y;
  return {static_cast<u32>(product), static_cast<u32>(product >> 32)};
}
template <Element element>
inline u32 add_zero_times(u32 x, u32 sum) {
  u32 y = 0;
  for (int h = 0; h < 2; ++h) {
    const float product = widened(static_cast<u16>(x >> 16 * h), element) * 0.0f;
    const float added = product + widened(static_cast<u16>(sum >> 16 * h), element);
    y |= static_cast<u32>(rounded(added, element)) << 16 * h;
  }
  return y;
}

// --- instructions of a warp (ref: PTX ISA, "ldmatrix", "Matrix fragments for mma.m16n8k16"): all
// lanes bring values, and each sees those of all ---

using model::Lanes;
inline const Lanes& all_lanes(const model::Lane& mine) {
  return model::all_lanes(model::fragments, mine);
}

// Element `i` that lane `lane` holds of a product of 16 rows and 8 columns: ref "Matrix fragments".
constexpr int fragment_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
constexpr int fragment_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

// c += a b: `a_at(lanes, row, k)` and `b_at(lanes, column, k)` are elements of the values that the
// lanes bring.
template <int depth, typename A, typename B>
inline void warp_product(float* c, const u32 (&a)[4], u32 b0, u32 b1, int min_exponent, A a_at,
                         B b_at) {
  auto bits = [](float x) { return __builtin_bit_cast(u32, x); };
  auto multiply = [&](Lanes& lanes) {
    float rows[16][depth], columns[8][depth], sums[16][8];
    for (int k = 0; k < depth; ++k) {
      for (int row = 0; row < 16; ++row) rows[row][k] = a_at(lanes, row, k);
      for (int column = 0; column < 8; ++column) columns[column][k] = b_at(lanes, column, k);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        sums[fragment_row(lane, i)][fragment_column(lane, i)] =
            __builtin_bit_cast(float, lanes[lane][6 + i]);
    tensor_core::multiply(
        {16, 8, depth, min_exponent, model::products_of.fraction_bits, model::products_of.steps},
        rows[0], columns[0], sums[0]);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        lanes[lane][6 + i] = bits(sums[fragment_row(lane, i)][fragment_column(lane, i)]);
  };
  const Lanes& lanes = model::all_lanes(
      model::fragments,
      {a[0], a[1], a[2], a[3], b0, b1, bits(c[0]), bits(c[1]), bits(c[2]), bits(c[3])}, multiply);
  for (int i = 0; i < 4; ++i) c[i] = __builtin_bit_cast(float, lanes[model::lane()][6 + i]);
}

inline u16 shared_at(u32 address) {
  if (address + 2 > model::shared_bytes) model::fail("a load past the end of shared memory");
  u16 x;
  std::memcpy(&x, model::shared + address, 2);
  return x;
}

inline void load_matrices(u32 address, u32 (&m)[4], bool transposed) {
  if (address % 16) model::fail("ldmatrix at an address that is no multiple of 16");
  const Lanes& lanes = all_lanes({address});
  const int row = model::lane() / 4, column = model::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    u16 pair[2];
    for (int h = 0; h < 2; ++h)
      pair[h] = transposed ? shared_at(lanes[8 * i + column + h][0] + row * 2)
                           : shared_at(lanes[8 * i + row][0] + (column + h) * 2);
    m[i] = static_cast<u32>(pair[1]) << 16 | pair[0];
  }
}
inline void ldmatrix_x4(u32 address, u32 (&m)[4]) { load_matrices(address, m, false); }
inline void ldmatrix_x4_trans(u32 address, u32 (&m)[4]) { load_matrices(address, m, true); }

template <Element element>
inline void mma_m16n8k16(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  auto half = [](u32 word, int h) { return widened(static_cast<u16>(word >> 16 * h), element); };
  warp_product<16>(
      c, a, b0, b1, min_exponent(element),
      [=](const Lanes& lanes, int row, int k) {
        return half(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
      },
      [=](const Lanes& lanes, int column, int k) {
        return half(lanes[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
      });
}

// --- global memory ---

// Ref: PTX ISA, "red": add.f32 in global memory treats subnormal numbers as 0.
inline float flushed(float x) { return std::abs(x) < 0x1p-126f ? 0.0f : x; }
inline void add_to_global(float* place, float a, float b, float c, float d) {
  check_aligned(place);
  const float x[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) place[i] = flushed(flushed(place[i]) + flushed(x[i]));
}
inline void add_to_global(float* place, float a) { *place = flushed(flushed(*place) + flushed(a)); }
inline void add_subnormal_to_global(float* place, float a) { *place += a; }
// Blocks run one after another here, so whatever a block waits for has happened or never will.
inline int load_acquire(const int* place) {
  static std::map<const int*, long> asked;
  if (++asked[place] > 1'000'000) model::fail("a block waits for one that comes after it");
  return *place;
}
inline void add_release(int* place, int value) { *place += value; }
inline int add_relaxed(int* place, int value) { return (*place += value) - value; }

}  // namespace tilewise::ptx

inline bool __any_sync(unsigned, bool given) {
  bool any = false;
  for (const auto& lane : tilewise::ptx::all_lanes({given})) any = any || lane[0];
  return any;
}
