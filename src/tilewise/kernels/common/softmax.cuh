// clang-format off
// The online softmax of one thread: two rows (r and r + 8 of its warp's sixteen), a fragment of `count` scores.
//
// State per row:   reference  the value that p is relative to, in log2 units: p = 2^(scale_log2 * s - reference)
//                  sum        this thread's share of the sum of p so far
// and per thread:  blocks     the number of blocks added up so far
//
// exact_block() is the classical step: the reference becomes the true maximum. lazy_block() keeps the reference and only adds
// up. A lazy block is good if no thread's sum of it exceeds heavy_block(keys) times the mean of the thread's sums of the n
// previous blocks, or sqrt(n) times it (and p cannot overflow 16 bits); otherwise raise() brings the reference up to the
// maximum.
// Why that rule: against a reference that is not the maximum, the largest p is not exactly 1, so its rounding to 16 bits is
// noticeable when it dominates its row. A key that dominates a row makes its block heavier than others. With a running
// maximum every key that was the largest so far is exact, so a row's few large keys mostly are; a bound on the share of one
// key alone (block <= sum) gave 1.05 x the error of a single true maximum, where PyTorch's best kernel has 0.92 x. In
// emulation this rule has 0.96 to 0.99 x on peaked logits and at most 1.02 x on plain ones, for which 1% to 4% of the blocks
// are raised. Why sqrt(n): the errors of n blocks add up by squares, so that a key that is as heavy as sqrt(n) blocks is as
// noticeable as one that is as heavy as a block among few. docs/kernels/sm90.md has the figures.
// clang-format on
#pragma once

#include "fragment.cuh"
#include "mask.cuh"
#include "ptx.cuh"

namespace tilewise {

// A thread's block sum of p must stay below this, so that p fits fp16.
constexpr float lazy_bound = 32768.0f;
// Above this bound a score can no longer be recovered from its p.
constexpr float recoverable_bound = 0x1p100f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The origin of a thread's scores of a block, per row and in log2 units: 0, or a start.
struct FromZero {
  static constexpr bool is_zero = true;
};
struct FromStarts {
  static constexpr bool is_zero = false;
  float start[2];
};
__device__ __forceinline__ float from(const FromZero&, int, float x) { return x; }
__device__ __forceinline__ float from(const FromStarts& starts, int r, float x) {
  return x - starts.start[r];
}

template <int count>
__device__ __forceinline__ void row_maxima(const float (&s)[count], float (&top)[2]) {
  float odd[2] = {-infinity, -infinity};
  top[0] = top[1] = -infinity;
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    top[row_of(i)] = fmaxf(top[row_of(i)], s[i]);
    odd[row_of(i)] = fmaxf(odd[row_of(i)], s[i + 1]);
  }
  top[0] = quad_max(fmaxf(top[0], odd[0]));
  top[1] = quad_max(fmaxf(top[1], odd[1]));
}
// For scores that every thread counts from its own start, in log2 units.
template <int count>
__device__ __forceinline__ void row_maxima(const float (&s)[count], float (&top)[2],
                                           const FromStarts& starts, float scale_log2) {
  top[0] = top[1] = -infinity;
#pragma unroll
  for (int i = 0; i < count; ++i) top[row_of(i)] = fmaxf(top[row_of(i)], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = quad_max(fmaf(top[r], scale_log2, starts.start[r]));
}

// The largest weights, all of which are finite. Why as integers, whose order is the same where none
// is negative: there is an instruction for the largest of three. Only kernels that often need these
// maxima use it: in others the assembler pays for it with moves in the loop.
template <int count>
__device__ __forceinline__ void largest_weights(const float (&p)[count], float (&top)[2]) {
  static_assert(count % 8 == 0);
  int largest[2][2] = {};
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    int& so_far = largest[row_of(i)][i / 4 % 2];
    so_far =
        max_int(max_int(so_far, __builtin_bit_cast(int, p[i])), __builtin_bit_cast(int, p[i + 1]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    top[r] = quad_max(__builtin_bit_cast(float, max_int(largest[r][0], largest[r][1])));
}

// The exponents of scores that are in one unit.
struct Scaled {
  float scale_log2;
  __device__ __forceinline__ float operator()(float s, float base, int) const {
    return fmaf(s, scale_log2, -base);
  }
};

template <int count>
__device__ __forceinline__ void row_sums(const float (&p)[count], float (&sum)[2]) {
  float odd[2] = {0.0f, 0.0f};
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    sum[row_of(i)] += p[i];
    odd[row_of(i)] += p[i + 1];
  }
  sum[0] += odd[0];
  sum[1] += odd[1];
}

// p rounded to 16 bits, in the A layout of the second product.
template <Element element, int count>
__device__ __forceinline__ void pack_block(const float (&p)[count],
                                           ptx::u32 (&packed)[count / 8][4]) {
#pragma unroll
  for (int i = 0; i < count; i += 2) packed[i / 8][i / 2 % 4] = ptx::pack<element>(p[i], p[i + 1]);
}

// How many times heavier than the mean of the previous blocks a block of `keys` keys may be. Sums
// over fewer keys vary more; docs/kernels/sm90.md gives the resulting errors and share of slow
// paths.
__device__ __forceinline__ constexpr float heavy_block(int keys) { return 6.5f - 1.5f * keys / 64; }

struct Softmax {
  float reference[2];
  float sum[2];
  float blocks;

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -infinity;
    sum[0] = sum[1] = 0.0f;
    blocks = 0.0f;
  }

  // `exponents(s[i], base, i)` is the logarithm of p[i].
  template <int count, typename Exponents>
  __device__ __forceinline__ void exponentiate(float (&s)[count], const float (&base)[2],
                                               Exponents exponents) {
#pragma unroll
    for (int i = 0; i < count; ++i) s[i] = ptx::ex2(exponents(s[i], base[row_of(i)], i));
  }

  __device__ __forceinline__ void scale_sums(const float (&alpha)[2]) {
    sum[0] *= alpha[0];
    sum[1] *= alpha[1];
  }

  __device__ __forceinline__ void add(const float (&block)[2]) {
    sum[0] += block[0];
    sum[1] += block[1];
  }

  // s -> p against the true running maximum, added up; alpha is the factor by which earlier partial
  // results must be multiplied.
  template <typename Starts = FromZero, int count>
  __device__ __forceinline__ void exact_block(float (&s)[count], float scale_log2,
                                              float (&alpha)[2], const Starts& starts = {}) {
    float base[2], block[2];
    if constexpr (Starts::is_zero)
      row_maxima(s, base);
    else
      row_maxima(s, base, starts, scale_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(reference[r], Starts::is_zero ? base[r] * scale_log2 : base[r]);
      // Why: a row that has seen no key keeps -inf; subtracting 0 instead gives p = 0 rather than
      // NaN.
      base[r] = next == -infinity ? 0.0f : next;
      alpha[r] = ptx::ex2(reference[r] - base[r]);
      reference[r] = next;
      base[r] = from(starts, r, base[r]);
    }
    exponentiate(s, base, Scaled{scale_log2});
    row_sums(s, block);
    scale_sums(alpha);
    add(block);
    blocks += 1.0f;
  }

  // s -> p against the current reference. Returns true if the block is good as it is; its sums are
  // not added yet.
  template <typename Exponents, typename Starts = FromZero, int count>
  __device__ __forceinline__ bool lazy_block(float (&s)[count], const Exponents& exponents,
                                             float (&block)[2], const Starts& starts = {}) {
    const float base[2] = {from(starts, 0, reference[0]), from(starts, 1, reference[1])};
    exponentiate(s, base, exponents);
    row_sums(s, block);
    // Invariant: false for NaN, so that overflow and rows without a reference never count as good.
    const float share = max_share(2 * count, blocks);
    blocks += 1.0f;
    return block[0] <= fminf(share * sum[0], lazy_bound) &&
           block[1] <= fminf(share * sum[1], lazy_bound);
  }
  // The largest share of the sums of `blocks` blocks that one more block of `keys` keys may have.
  static __device__ __forceinline__ float max_share(int keys, float blocks) {
    const float root = ptx::rsqrt(blocks);
    return root * fmaxf(heavy_block(keys) * root, 1.0f);
  }

  // p (finite) -> p relative to its own row maximum, where that exceeds the reference. Why this
  // covers all rows of a warp where one row has a block that is not good: the others become more
  // exact too.
  template <bool by_threes = false, int count>
  __device__ __forceinline__ void raise(float (&p)[count], float (&block)[2], float (&alpha)[2]) {
    float top[2];
    if constexpr (by_threes)
      largest_weights(p, top);
    else
      row_maxima(p, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = reference[r] + fmaxf(0.0f, ptx::lg2(top[r]));
      // Invariant: alpha is computed from the rounded reference, so that sums and p stay relative
      // to the same number.
      alpha[r] = ptx::ex2(reference[r] - next);
      reference[r] = next;
      block[r] *= alpha[r];
    }
    scale_sums(alpha);
#pragma unroll
    for (int i = 0; i < count; ++i) p[i] *= alpha[row_of(i)];
  }
};

}  // namespace tilewise
