// clang-format off
// This kernel runs before attention on a cache. It writes new keys and values into the cache, with rotary embedding applied to
// the keys, and rotates the queries that go with them.
//
// Symbols. Sequence b has length_b places in use; its new key i, i < new_keys, goes to place p = length_b + i. r: the number
// of columns that are rotated; x' = x for columns from r on. Pairs of columns are (2 j, 2 j + 1) if `interleaved`, else
// (j, j + r / 2), j < r / 2.
//
//   1. k and q: (x'_1, x'_2) = (x_1 cos - x_2 sin, x_1 sin + x_2 cos) with the angles of place p, row p of cos and sin. A
//      query i has p = length_b + i if `apart`, else p = length_b
//   2. place p of the cache = k', v, if it exists: rows and pages as in common/cached.cuh, where a page that does not exist
//      has no places
//   3. lengths_after_b = min(length_b + new_keys, capacity)
//
// Roles. Each warp handles a row of one head, of k, of v, or of q; a lane has columns lane, lane + 32, ... There is no shared
// memory and there are no barriers: rows are read from one tensor and written to another. The kernel moves few bytes, so that
// its launch dominates its time.
// clang-format on
#pragma once

#include "config.cuh"

namespace tilewise::sm80 {

struct AppendParams {
  Tensor q;        // (batch, heads, queries, dim); data null: not rotated
  Tensor rotated;  // the result, with the same shape
  Tensor k;        // (batch, heads_kv, new_keys, dim)
  Tensor v;
  Tensor k_cache;  // (cache_batches, heads_kv, places, dim)
  Tensor v_cache;
  const u16* cos;  // (angles, rotary_dim / 2) in the dtype of q; null: nothing is rotated
  const u16* sin;
  const int* lengths;     // (batch)
  int* lengths_after;     // (batch)
  const int* rows;        // (batch), or null
  const int* page_table;  // (batch, pages), or null
  long long page_table_stride;
  int batch;
  int heads;
  int heads_kv;
  int queries;
  int new_keys;
  int head_dim;
  int head_dim_v;
  int rotary_dim;
  int angles;
  int interleaved;
  int apart;
  int page_size;
  int cache_batches;
  int capacity;
};

constexpr int append_warps = 8;

template <Element element>
struct Append {
  const AppendParams& params;
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ void copy(const u16* from, u16* to, int dim, int place,
                                       bool rotates) const {
    const int rotary = rotates && params.cos != nullptr ? params.rotary_dim : 0, half = rotary / 2;
    const long long angle =
        static_cast<long long>(min_int(max_int(place, 0), params.angles - 1)) * half;
    for (int column = lane; column < dim; column += 32) {
      u32 x = from[column];
      if (column < rotary) {
        const int pair = params.interleaved ? column / 2 : column % half;
        const bool first = params.interleaved ? column % 2 == 0 : column < half;
        const int step = params.interleaved ? 1 : half;
        const float own = ptx::unpack_low<element>(x);
        const float other = ptx::unpack_low<element>(from[first ? column + step : column - step]);
        const float cosine = ptx::unpack_low<element>(params.cos[angle + pair]);
        const float sine = ptx::unpack_low<element>(params.sin[angle + pair]);
        x = ptx::pack<element>(first ? own * cosine - other * sine : other * sine + own * cosine,
                               0.0f);
      }
      to[column] = static_cast<u16>(x);
    }
  }

  // Finds place p of a sequence in the cache; returns false if it has none.
  __device__ __forceinline__ bool find(int b, int place, int& batch, int& row) const {
    if (place < 0 || place >= params.capacity) return false;
    batch = params.rows == nullptr ? b : params.rows[b];
    row = place;
    if (params.page_table != nullptr) {
      batch = params.page_table[b * params.page_table_stride + place / params.page_size];
      row = place % params.page_size;
    }
    return batch >= 0 && batch < params.cache_batches;
  }

  // Goes through the rows of all heads of k, then of v, then of q.
  __device__ __forceinline__ void run() const {
    int work = blockIdx.x * append_warps + static_cast<int>(threadIdx.x) / 32;
    const int each = params.batch * params.new_keys * params.heads_kv;
    if (work < 2 * each) {
      const bool of_values = work >= each;
      work -= of_values ? each : 0;
      const int head = work % params.heads_kv, i = work / params.heads_kv % params.new_keys;
      const int b = work / params.heads_kv / params.new_keys;
      const int length = params.lengths[b];
      if (!of_values && head == 0 && i == 0 && lane == 0)
        params.lengths_after[b] = min_int(length + params.new_keys, params.capacity);
      int batch, row;
      if (!find(b, length + i, batch, row)) return;
      if (of_values)
        copy(params.v.row(b, head, i), params.v_cache.row(batch, head, row), params.head_dim_v, 0,
             false);
      else
        copy(params.k.row(b, head, i), params.k_cache.row(batch, head, row), params.head_dim,
             length + i, true);
      return;
    }
    work -= 2 * each;
    if (params.q.data == nullptr || work >= params.batch * params.queries * params.heads) return;
    const int head = work % params.heads, i = work / params.heads % params.queries;
    const int b = work / params.heads / params.queries;
    copy(params.q.row(b, head, i), params.rotated.row(b, head, i), params.head_dim,
         params.lengths[b] + (params.apart ? i : 0), true);
  }
};

template <Element element>
__device__ __forceinline__ void append(const AppendParams& params) {
  Append<element>{params}.run();
}

}  // namespace tilewise::sm80
