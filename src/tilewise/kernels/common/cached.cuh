// clang-format off
// Keys and values in a cache, contiguous per sequence or in pages, with lengths that are on the device.
//
// Symbols. Sequence b of `batch` has the keys [start_b, length_b) of its cache, counted from 0: key j of the sequence is at
// place start_b + j of the cache. All other code counts the keys of the sequence.
//
//   contiguous               place p is row p of batch `cache_rows[b]` of the tensors, or of batch b
//   pages                    place p is row p % page_size of page `page_table[b, p / page_size]`; a page is a batch of the tensors
//   queries                  every sequence has seq_q of them; or with `cached_cu_q` they are packed, and sequence b has the
//                            queries [cu_q[b], cu_q[b + 1]). Rows past the last offset belong to sequence batch - 1, which has
//                            no keys.
//
// Whatever these tensors hold, no memory outside q, k, v and out is accessed: lengths and starts are clamped to the capacity of
// the cache, pages and rows to those that exist.
// clang-format on
#pragma once

#include "extents.cuh"
#include "packed.cuh"

namespace tilewise {

struct CachedRecord : SequenceRecord {
  int owner;      // b
  int cache_row;  // the batch of k and v, where a cache is contiguous per sequence
};

struct CachedOperands {
  const int* cache_lengths;  // (batch); null: every place is used
  const int* cache_starts;   // (batch); null: 0
  const int* cache_rows;     // (batch); null: b
  const int* page_table;     // (batch, pages per sequence); null: contiguous per sequence
  long long page_table_stride;
  const int* cached_cu_q;  // (batch); null: all sequences have seq_q queries
  int page_size;
  int cache_batches;   // batches of k and v: pages, or rows of the cache
  int cache_capacity;  // places per sequence
  int ends_aligned;    // the last query is aligned with the last key, else the first with the first
};

// The place of a row of k and v.
struct KeyPlace {
  int batch, row;
};

struct Cached {
  static constexpr bool has_operands = true, ragged = true;
  using Operands = CachedOperands;
  using Record = CachedRecord;

  template <typename Params>
  static __device__ __forceinline__ Record find(const Params& params, int b) {
    PackedPlace q{0, params.seq_q};
    bool exists = true;
    if (params.cached_cu_q != nullptr) {
      exists = b + 1 < params.batch;
      q = exists ? packed_place(params.cached_cu_q, b, params.seq_q)
                 : behind_last(params.cached_cu_q, b, params.seq_q);
    }
    int length = 0, start = 0, row = 0;
    if (exists) {
      const int capacity = params.cache_capacity;
      length = params.cache_lengths == nullptr ? capacity : params.cache_lengths[b];
      length = min_int(max_int(length, 0), capacity);
      if (params.cache_starts != nullptr)
        start = min_int(max_int(params.cache_starts[b], 0), length);
      row = params.cache_rows == nullptr ? b : params.cache_rows[b];
      row = min_int(max_int(row, 0), params.cache_batches - 1);
    }
    const int seq_k = length - start, offset = params.ends_aligned ? seq_k - q.length : 0;
    return {{q.start, start, q.length, seq_k, params.band_first_shift + offset,
             params.band_end_shift + offset},
            b,
            row};
  }

  template <typename Params>
  struct Sequence : KeptSequence<Params> {
    const bool packed;

    __device__ __forceinline__ Sequence(const Params& params, const Record& record)
        : KeptSequence<Params>(params, record), packed(params.cached_cu_q != nullptr) {}
    __device__ __forceinline__ int batch(int b) const { return packed ? 0 : b; }
  };

  // The entry of the page table for key `key` of a sequence. The key must not be past the last one.
  // Returns any value if there are no pages.
  template <typename Params>
  static __device__ __forceinline__ int page_of(const Params& params, const Record& record,
                                                int key) {
    if (params.page_table == nullptr) return 0;
    return params
        .page_table[record.owner * params.page_table_stride + page_number(params, record, key)];
  }
  // The place of that key, given the entry.
  template <typename Params>
  static __device__ __forceinline__ KeyPlace key_place(const Params& params, const Record& record,
                                                       int key, int page) {
    const int place = record.k_start + key;
    if (params.page_table == nullptr) return {record.cache_row, place};
    return {min_int(max_int(page, 0), params.cache_batches - 1),
            place - page_number(params, record, key) * params.page_size};
  }
  template <typename Params>
  static __device__ __forceinline__ int page_number(const Params& params, const Record& record,
                                                    int key) {
    return static_cast<unsigned>(record.k_start + key) / static_cast<unsigned>(params.page_size);
  }
  // Whether the rows of `count` keys, of which the first is at this place, are contiguous.
  template <typename Params>
  static __device__ __forceinline__ bool is_one_piece(const Params& params, const KeyPlace& place,
                                                      int count) {
    return params.page_table == nullptr || place.row + count <= params.page_size;
  }
};

}  // namespace tilewise
