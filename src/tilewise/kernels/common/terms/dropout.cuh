// Dropout: a weight stays with a chance, by 16 random bits, and counts 1 / (the chance).
//
// The bits are taken for an fp16 number, and the weight stays where that is not at least a bound,
// as NaN is not. Why: two numbers are compared by one instruction, which leaves what two packed
// weights are masked with. Where fewer stay than there are NaNs, it is the other way round.
//
// The bits come from Philox4x32 with seven rounds, keyed by the seed. One call gives 128 of them,
// for the eight scores of queries {q, q + 8} and keys {k, k + 1, k + 8, k + 9}, with q % 16 < 8, k
// % 16 < 8 and k even:
//   counter   ((k / 16) 4 + k % 8 / 2,  (q / 16) 8 + q % 8,  batch * heads + head,  offset)
//   key       (seed, seed >> 32 ^ offset >> 32)
//   word      2 (key % 16 / 8) + query % 16 / 8, its low half for k and its high half for k + 1
// So they depend on where a score stands and on nothing else. Why these eight: where rows are
// queries a thread has all of them. Where rows are keys it has one of every two neighbouring keys;
// the thread four lanes on has the other, makes the bits of the next query, and both trade halves.
// Python's side is tilewise/terms/dropout.py.
#pragma once

#include "../scores.cuh"

namespace tilewise {

struct Dropout {
  struct Operands {
    const long long* seed;  // and the offset
    long long seed_span_stride;
    float dropout_weight;
    ptx::u32 dropout_bound;   // twice
    ptx::u32 dropout_turned;  // 0, or ones
    int dropout_heads;
  };
  static constexpr bool uses_head = true;
  struct Once {
    ptx::u32 key[2], pair, offset;

    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at) {
      const ptx::u64 seed = __ldg(params.seed);
      const ptx::u64 whole_offset = __ldg(params.seed + params.seed_span_stride);
      key[0] = static_cast<ptx::u32>(seed);
      key[1] = static_cast<ptx::u32>(seed >> 32 ^ whole_offset >> 32);
      pair = at.batch() * params.dropout_heads + at.head();
      offset = static_cast<ptx::u32>(whole_offset);
    }
  };

  Once once;
  ptx::u32 counter[2];
  const ptx::u32 &bound, &turned;
  RowsAre rows_are;
  ptx::u32 odd;  // where rows are keys: whether this thread's are
  ptx::u32 words[4];
  float kept_weight;

  template <typename Params, typename At>
  __device__ __forceinline__ Dropout(const Params& params, const Unit&, const At& at)
      : once(once_of<Once>(params, at)),
        bound(params.dropout_bound),
        turned(params.dropout_turned),
        rows_are(At::rows_are),
        kept_weight(params.dropout_weight) {
    const int row = at.row(), column = at.column();
    odd = rows_are == RowsAre::keys ? row & 1 : 0;
    const int query = rows_are == RowsAre::queries ? row : column + odd;
    const int first_key = rows_are == RowsAre::queries ? column : row;
    counter[0] = first_key / 16 * 4 + first_key % 8 / 2;
    counter[1] = query / 16 * 8 + query % 8;
  }

  // Of the `block`-th sixteen columns.
  __device__ __forceinline__ void draw(int block) {
    ptx::u32 c[4] = {counter[0], counter[1], once.pair, once.offset};
    if (rows_are == RowsAre::queries)
      c[0] += 4 * block;
    else
      c[1] += 8 * block;
    ptx::u32 k[2] = {once.key[0], once.key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const ptx::Halves first = ptx::multiply_wide(c[0], 0xD2511F53u);
      const ptx::Halves second = ptx::multiply_wide(c[2], 0xCD9E8D57u);
      c[0] = second.high ^ c[1] ^ k[0];
      c[1] = second.low;
      c[2] = first.high ^ c[3] ^ k[1];
      c[3] = first.low;
      k[0] += 0x9E3779B9u;
      k[1] += 0xBB67AE85u;
    }
    if (rows_are == RowsAre::queries) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = c[i];
      return;
    }
    // The halves of the other thread's key go to it, and those of the other query come.
    const ptx::u32 sent = odd ? 0x5410 : 0x7632;
    const ptx::u32 low_word = odd ? 0x3254 : 0x5410, high_word = odd ? 0x3276 : 0x7610;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const ptx::u32 low = c[2 * below], high = c[2 * below + 1];
      const ptx::u32 come = __shfl_xor_sync(0xffffffffu, __byte_perm(low, high, sent), 4);
      words[below] = __byte_perm(low, come, low_word);
      words[2 + below] = __byte_perm(high, come, high_word);
    }
  }

  __device__ __forceinline__ ptx::u32 keeps(int i) {
    if (i % 8 == 0) draw(i / 8);
    return ptx::not_at_least(words[i / 2 % 4], bound) ^ turned;
  }
};

}  // namespace tilewise
