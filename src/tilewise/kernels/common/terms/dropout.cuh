// Dropout: a weight is kept with a given probability, decided by 16 random bits, and kept weights
// are multiplied by 1 / (that probability).
//
// The bits are interpreted as an fp16 number, and the weight is kept where that number is not at
// least a bound, which includes NaN. Why: one instruction compares two numbers and yields the mask
// for two packed weights. Where fewer weights are kept than there are NaNs, the comparison is
// inverted.
//
// Each head has four words h, from Philox4x32 with seven rounds:
//   counter   (batch * heads + head, 0, offset, offset >> 32)
//   key       (seed, seed >> 32)
// The eight scores of queries {q, q + 8} and keys {k, k + 1, k + 8, k + 9}, with q % 16 < 8, k %
// 16 < 8 and k even, share the words a and b that mix(), a permutation of 64 bits, computes from:
//   counter   (((q / 16) 8 + q % 8) query_step + h[1],  ((k / 16) 4 + k % 8 / 2) key_step + h[2])
//   key       h[0]
//   bits      of keys k (low half) and k + 1 (high half):      query q: a,  q + 8: b
//             of keys k + 8 (low half) and k + 9 (high half):  a ^ b ^ (a with its halves swapped),
//                                                              a ^ b ^ (b with its halves swapped)
// The bits therefore depend only on the position of a score. Each of the eight 16-bit numbers is
// the sum of one or of three of the four halves of a and b, and no two of these sums are the same:
// any three of them are independent, and each is uniform. (Of the seventy sets of four, fourteen
// have a sum of 0.) Why: 128 bits would cost twice as many instructions, and registers in the
// forward.
//
// A round of mix() adds a multiple of one word to the other, which carries differences to higher
// bits, and folds the high half of the sum into the low one, together with the key: three
// instructions. Why not Philox2x32: a product of 64 bits takes as long as six of them. By the tests
// in docs/kernels/terms.md four rounds suffice for random keys, and five for any; there are six.
//
// Why these eight: where rows are queries, a thread has all of them. Where rows are keys, it has
// one of every two neighbouring keys; the thread four lanes away has the other and draws the bits
// of the next query, and the two exchange their bits. The Python counterpart is
// tilewise/terms/dropout.py.
#pragma once

#include "../scores.cuh"

namespace tilewise {

constexpr int philox_rounds = 7;

__device__ __forceinline__ void philox(ptx::u32 (&c)[4], ptx::u32 key0, ptx::u32 key1) {
#pragma unroll 1
  for (int round = 0; round < philox_rounds; ++round) {
    const ptx::Halves first = ptx::multiply_wide(c[0], 0xD2511F53u);
    const ptx::Halves second = ptx::multiply_wide(c[2], 0xCD9E8D57u);
    c[0] = second.high ^ c[1] ^ key0;
    c[1] = second.low;
    c[2] = first.high ^ c[3] ^ key1;
    c[3] = first.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The fractions of the square roots of the first eight primes, in 32 bits, made odd.
constexpr ptx::u32 query_step = 0x6A09E667u, key_step = 0xBB67AE85u;
constexpr ptx::u32 mix_factors[] = {0x3C6EF373u, 0xA54FF53Bu, 0x510E527Fu,
                                    0x9B05688Du, 0x1F83D9ABu, 0x5BE0CD19u};

__device__ __forceinline__ void mix(ptx::u32 (&words)[2], ptx::u32 key) {
#pragma unroll
  for (int round = 0; round < 6; ++round) {
    ptx::u32 &from = words[round % 2], &to = words[1 - round % 2];
    to += from * mix_factors[round];
    to ^= to >> 16 ^ key;
  }
}

struct Dropout {
  struct Operands {
    const long long* seed;  // followed by the offset
    long long seed_span_stride;
    float dropout_weight;
    ptx::u32 dropout_bound;   // in both halves of the word
    ptx::u32 dropout_turned;  // 0, or all ones
    int dropout_heads;
  };
  static constexpr bool uses_head = true;
  struct Once {
    ptx::u32 key, first_query, first_key;

    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at) {
      const ptx::u64 seed = __ldg(params.seed);
      const ptx::u64 offset = __ldg(params.seed + params.seed_span_stride);
      ptx::u32 words[4] = {static_cast<ptx::u32>(at.batch() * params.dropout_heads + at.head()), 0,
                           static_cast<ptx::u32>(offset), static_cast<ptx::u32>(offset >> 32)};
      philox(words, static_cast<ptx::u32>(seed), static_cast<ptx::u32>(seed >> 32));
      key = words[0];
      first_query = words[1];
      first_key = words[2];
    }
  };

  Once once;
  ptx::u32 counter[2];
  const ptx::u32 &bound, &turned;
  RowsAre rows_are;
  bool odd;  // where rows are keys: whether this thread's key is odd
  ptx::u32 words[4];
  float kept_weight;

  template <typename Params, typename At>
  __device__ __forceinline__ Dropout(const Params& params, const Unit&, const At& at)
      : once(once_of<Once>(params, at)),
        bound(params.dropout_bound),
        turned(params.dropout_turned),
        rows_are(At::rows_are),
        kept_weight(params.dropout_weight) {
    const ptx::u32 row = at.row(), column = at.column();
    odd = rows_are == RowsAre::keys && row & 1;
    const ptx::u32 query = rows_are == RowsAre::queries ? row : column + odd;
    const ptx::u32 key = rows_are == RowsAre::queries ? column : row;
    counter[0] = (query / 16 * 8 + query % 8) * query_step + once.first_query;
    counter[1] = (key / 16 * 4 + key % 8 / 2) * key_step + once.first_key;
  }

  // Draws a and b of the `block`-th sixteen columns.
  __device__ __forceinline__ void draw(int block, ptx::u32 (&drawn)[drawn_words]) const {
    const bool by_queries = rows_are == RowsAre::queries;
    drawn[0] = counter[0] + (by_queries ? 0 : 8 * block * query_step);
    drawn[1] = counter[1] + (by_queries ? 4 * block * key_step : 0);
    mix(drawn, once.key);
  }
  // Makes the bits of eight scores of those columns: this thread's own scores or, with
  // `before_exchange`, those that it has drawn for.
  template <bool before_exchange>
  __device__ __forceinline__ void spread(const ptx::u32 (&drawn)[drawn_words]) {
    ptx::u32 a = drawn[0], b = drawn[1];
    ptx::u32 other_a = __byte_perm(a, a, 0x1032), other_b = __byte_perm(b, b, 0x1032);
    if (rows_are == RowsAre::keys && !before_exchange) {
      // This key's halves for both queries, and the halves of the other key.
      const ptx::u32 come_a = __shfl_xor_sync(0xffffffffu, a, 4);
      const ptx::u32 come_b = __shfl_xor_sync(0xffffffffu, b, 4);
      const ptx::u32 other = odd ? 0x1054 : 0x7632;
      other_a = __byte_perm(a, come_a, other);
      other_b = __byte_perm(b, come_b, other);
      a = __byte_perm(a, come_a, own_halves());
      b = __byte_perm(b, come_b, own_halves());
    }
    const bool by_queries = rows_are == RowsAre::queries;
    words[0] = a;
    words[by_queries ? 1 : 2] = b;
    words[by_queries ? 2 : 1] = a ^ b ^ other_a;
    words[3] = a ^ b ^ other_b;
  }
  __device__ __forceinline__ ptx::u32 own_halves() const { return odd ? 0x3276 : 0x5410; }

  template <bool before_exchange = false>
  __device__ __forceinline__ ptx::u32 keeps(int i, const ptx::u32 (&drawn)[drawn_words]) {
    if (i % 8 == 0) spread<before_exchange>(drawn);
    return ptx::not_at_least(words[i / 2 % 4], bound) ^ turned;
  }
  __device__ __forceinline__ ptx::u32 exchange(ptx::u32 bits) const {
    if (rows_are == RowsAre::queries) return bits;
    return __byte_perm(bits, __shfl_xor_sync(0xffffffffu, bits, 4), own_halves());
  }
};

}  // namespace tilewise
