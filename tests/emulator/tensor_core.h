// How a tensor core computes c + sum a b: products are exact, all addends are truncated a fixed
// number of binary places below the exponent of the largest, and their sum is exact and is then
// truncated to float32. The exponent of a product is the sum of its factors' exponents, so its
// significand is below 4. Numbers that are subnormal in their own type have the exponent of its
// smallest normal number, and a sum is never finer than float32's: exponents end at -126. Ref:
// "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores".
// tests/gpu/test_emulator_products.py compares this with the hardware.
//
// This header does not depend on the model of runtime.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tensor_core {

struct Generation {
  int fraction_bits;  // binary places that are kept below the exponent of the largest addend
  int steps;          // number of consecutive sums that an instruction of mma.sync is divided into
};
constexpr Generation generation(int arch) {
  return arch < 90 ? Generation{24, 2} : Generation{25, 1};
}

constexpr int float_min_exponent = -126, half_min_exponent = -14;
constexpr int of_zero = -100'000;  // an exponent that is never the largest

inline int exponent_of(float x, int min_exponent) {
  const int biased = __builtin_bit_cast(uint32_t, x) >> 23 & 0xff;
  return x == 0.0f ? of_zero : std::max(biased - 127, min_exponent);
}
// Invariant: `exponent` is that of a normal double.
inline double power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52);
}

// Up to sixteen factors, the row of A or the column of B that an instruction multiplies.
struct Factors {
  double value[16] = {};
  int exponent[16];
  bool finite = true;

  Factors() { std::fill(exponent, exponent + 16, of_zero); }
  void set(int k, float x, int min_exponent = float_min_exponent) {
    value[k] = x;
    exponent[k] = exponent_of(x, min_exponent);
    finite = finite && std::isfinite(x);
  }
};

// Truncates towards zero, to float32.
inline float cut_off(double exact) {
  constexpr double overflow = 0x1p128, smallest_normal = 0x1p-126, smallest = 0x1p-149;
  const double size = std::abs(exact);
  if (size >= overflow) return std::copysign(std::numeric_limits<float>::infinity(), exact);
  if (size < smallest_normal) return static_cast<float>(std::trunc(exact / smallest) * smallest);
  constexpr uint64_t lost = (1ull << 29) - 1;
  return static_cast<float>(
      __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, exact) & ~lost));
}

// The sum over k in [begin, end).
inline float add_products(float c, const Factors& a, const Factors& b, int fraction_bits, int begin,
                          int end) {
  if (!(a.finite && b.finite && std::isfinite(c))) {
    double sum = c;
    for (int k = begin; k < end; ++k) sum += a.value[k] * b.value[k];
    return static_cast<float>(sum);
  }
  int exponent = std::max(exponent_of(c, float_min_exponent), float_min_exponent);
  for (int k = begin; k < end; ++k) exponent = std::max(exponent, a.exponent[k] + b.exponent[k]);
  const double places = power_of_two(fraction_bits - exponent);
  int64_t sum = static_cast<int>(c * places);
  for (int k = begin; k < end; ++k) sum += static_cast<int>(a.value[k] * b.value[k] * places);
  return cut_off(static_cast<double>(sum) * power_of_two(exponent - fraction_bits));
}

// An instruction: d[rows][columns] += a[rows][depth] b[columns][depth], in `steps` consecutive
// sums. Defined in runtime.cpp.
struct Instruction {
  int rows, columns, depth, min_exponent, fraction_bits, steps;
};
void multiply(const Instruction& instruction, const float* a, const float* b, float* d);

}  // namespace tensor_core
