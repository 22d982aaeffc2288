// Dropout: a weight stays where 16 random bits are below a threshold, and counts 1 / (the chance).
//
// The bits come from Philox4x32 with seven rounds, keyed by the seed. One call gives 128 of them, for
// the eight scores of queries {q, q + 8} and keys {k, k + 1, k + 8, k + 9}, with q % 16 < 8, k % 16 < 8
// and k even:
//   counter   ((k / 16) 4 + k % 8 / 2,  (q / 16) 8 + q % 8,  batch * heads + head,  offset)
//   key       (seed, seed >> 32 ^ offset >> 32)
//   word      2 (key % 2) + key % 16 / 8, its low half for q and its high half for q + 8
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
    ptx::u32 dropout_threshold;  // of 65536
    int dropout_heads;
  };
  static constexpr bool uses_head = true;

  ptx::u32 key[2], counter[4];
  ptx::u32 threshold;
  RowsAre rows_are;
  ptx::u32 odd;  // where rows are keys: whether this thread's are
  ptx::u32 words[4];
  float kept_weight;

  template <typename Params, typename At>
  __device__ __forceinline__ Dropout(const Params& params, const Unit&, const At& at)
      : threshold(params.dropout_threshold),
        rows_are(At::rows_are),
        kept_weight(params.dropout_weight) {
    const ptx::u64 seed = __ldg(params.seed), offset = __ldg(params.seed + params.seed_span_stride);
    key[0] = static_cast<ptx::u32>(seed);
    key[1] = static_cast<ptx::u32>(seed >> 32 ^ offset >> 32);
    const int row = at.row(), column = at.column();
    odd = rows_are == RowsAre::keys ? row & 1 : 0;
    const int query = rows_are == RowsAre::queries ? row : column + odd;
    const int first_key = rows_are == RowsAre::queries ? column : row;
    counter[0] = first_key / 16 * 4 + first_key % 8 / 2;
    counter[1] = query / 16 * 8 + query % 8;
    counter[2] = at.batch() * params.dropout_heads + at.head();
    counter[3] = static_cast<ptx::u32>(offset);
  }

  // Of the `block`-th sixteen columns.
  __device__ __forceinline__ void draw(int block) {
    ptx::u32 c[4] = {counter[0], counter[1], counter[2], counter[3]};
    if (rows_are == RowsAre::queries)
      c[0] += 4 * block;
    else
      c[1] += 8 * block;
    ptx::u32 k[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const ptx::u64 first = ptx::u64{0xD2511F53u} * c[0], second = ptx::u64{0xCD9E8D57u} * c[2];
      c[0] = static_cast<ptx::u32>(second >> 32) ^ c[1] ^ k[0];
      c[1] = static_cast<ptx::u32>(second);
      c[2] = static_cast<ptx::u32>(first >> 32) ^ c[3] ^ k[1];
      c[3] = static_cast<ptx::u32>(first);
      k[0] += 0x9E3779B9u;
      k[1] += 0xBB67AE85u;
    }
    if (rows_are == RowsAre::queries) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = c[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ptx::u32 mine = odd ? c[2 + i] : c[i];
      const ptx::u32 other = __shfl_xor_sync(0xffffffffu, odd ? c[i] : c[2 + i], 4);
      words[i] = odd ? other : mine;
      words[2 + i] = odd ? mine : other;
    }
  }

  __device__ __forceinline__ bool keeps(int i) {
    if (i % 8 == 0) draw(i / 8);
    const int right = i % 2, below = row_of(i), next = i / 4 % 2;  // next: eight columns on
    const bool by_queries = rows_are == RowsAre::queries;
    const ptx::u32 word = words[2 * right + (by_queries ? next : below)];
    return ((by_queries ? below : next) ? word >> 16 : word & 0xffffu) < threshold;
  }
};

}  // namespace tilewise
