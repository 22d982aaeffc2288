// clang-format off
// Packed sequences: they have different lengths and follow one another in (total, heads, dim) tensors; their offsets are on
// the device.
//
// Symbols. Sequence b has the query rows [cu_q[b], cu_q[b + 1]) and the keys [cu_k[b], cu_k[b + 1]), b < sequences. Rows
// behind the last offset form a sequence without keys, number `sequences`, and keys behind it form one without queries, the
// next number; in this way every row of every result is written. Where the tensors have several batches, each has these
// sequences, and their numbers continue from batch to batch: number b belongs to batch b / (sequences + 2).
//
//   pack_sequences, with a warp per sequence, runs before the kernels that use its results:
//   1. record[b] = starts and lengths; whatever the offsets hold, they lie within the tensors, and 0 <= length
//   2. before[b] = the number of tiles of all sequences that are longer, or equally long with a smaller number: the longest
//      come first
//   3. record[b].first_tile = before[b]; owner[before[b] + i] = b for its tiles i. This is done for queries and for keys
// Tiles are numbered without gaps, so their numbers also index scratch memory: total / block + sequences + 2 slots per batch
// always suffice for offsets that never decrease. For other offsets they may not: tiles beyond the available slots are left
// out.
//
// A grid has a CTA for that many tiles, or loops over them; it reads the number of existing tiles from the first word of their
// list. The work of one sequence is numbered like that of a batch (schedule.cuh), in sections of heads whose keys fit in the
// L2 cache.
//
// There is no shared memory. Cost: batches * sequences^2 / 32 steps, over all warps together.
// clang-format on
#pragma once

#include "extents.cuh"
#include "schedule.cuh"

namespace tilewise {

struct alignas(16) PackedSequence {
  int q_start, seq_q;
  int k_start, seq_k;
  int first_q_tile, first_kv_tile;
  int batch;
  int unused;
};

struct PackParams {
  const int* cu_q;
  const int* cu_k;
  const int* used_k;        // null, or (sequences): the number of valid keys of each
  const int* left_k;        // null, or (sequences): how many of these are leading padding
  PackedSequence* records;  // (batches, sequences + 2)
  int* q_tiles;             // the number of tiles, then the owner of each; null: not wanted
  int* kv_tiles;            // likewise
  int batches;
  int sequences;  // per batch, as are the totals
  int total_q;
  int total_k;
  int block_q;
  int block_kv;
  int q_room;   // capacity of q_tiles, in tiles
  int kv_room;  // likewise
};

constexpr int pack_warps = 8;

// Starts and lengths, within tensors of a given number of rows.
struct PackedPlace {
  int start, length;
};
__device__ __forceinline__ PackedPlace packed_place(const int* offsets, int b, int total) {
  const int start = min_int(max_int(offsets[b], 0), total);
  return {start, min_int(max_int(offsets[b + 1], start), total) - start};
}
__device__ __forceinline__ PackedPlace behind_last(const int* offsets, int sequences, int total) {
  const int start = min_int(max_int(offsets[sequences], 0), total);
  return {start, total - start};
}

// The number of sequences per batch, including those behind its last offsets.
__device__ __forceinline__ int packed_in_batch(int sequences) { return sequences + 2; }

__device__ __forceinline__ PackedSequence packed_sequence(const PackParams& params, int b) {
  PackedPlace q{0, 0}, k{0, 0};
  if (b < params.sequences) {
    q = packed_place(params.cu_q, b, params.total_q);
    k = packed_place(params.cu_k, b, params.total_k);
    if (params.used_k != nullptr) k.length = min_int(k.length, max_int(0, params.used_k[b]));
    if (params.left_k != nullptr) {
      const int padding = min_int(k.length, max_int(0, params.left_k[b]));
      k.start += padding;
      k.length -= padding;
    }
  } else if (b == params.sequences) {
    q = behind_last(params.cu_q, params.sequences, params.total_q);
  } else {
    k = behind_last(params.cu_k, params.sequences, params.total_k);
  }
  return {q.start, q.length, k.start, k.length, 0, 0, 0, 0};
}

__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Assigns tiles [first, first + count) to sequence b, as far as there is room.
__device__ __forceinline__ void own_tiles(int* tiles, int room, int first, int count, int b) {
  if (tiles == nullptr) return;
  const int end = min_int(room, first + count);
  for (int tile = first + static_cast<int>(threadIdx.x % 32); tile < end; tile += 32)
    tiles[1 + tile] = b;
}

// Among the sequences with number `other` in all batches, the number that come before number b of
// this batch: all that are longer or, of those equally long, the ones with a smaller number.
__device__ __forceinline__ int count_before(const PackParams& params, int batch, int b, int length,
                                            int other, int other_length) {
  if (other_length != length) return other_length > length ? params.batches : 0;
  return batch + (other < b);
}

__device__ __forceinline__ void pack_sequences(const PackParams& params) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int number = blockIdx.x * pack_warps + warp, in_batch = packed_in_batch(params.sequences);
  if (number >= params.batches * in_batch) return;
  const int batch = number / in_batch, b = number - batch * in_batch;
  PackedSequence own = packed_sequence(params, b);
  own.batch = batch;
  int q_before = 0, kv_before = 0, q_all = 0, kv_all = 0;
  for (int other = lane; other < in_batch; other += 32) {
    const PackedSequence one = packed_sequence(params, other);
    const int q_tiles = ceil_div(one.seq_q, params.block_q);
    const int kv_tiles = ceil_div(one.seq_k, params.block_kv);
    // Invalid offsets may yield any number of tiles: it is capped at one more than the room.
    q_all = min_int(q_all + params.batches * q_tiles, params.q_room + 1);
    kv_all = min_int(kv_all + params.batches * kv_tiles, params.kv_room + 1);
    q_before += q_tiles * count_before(params, batch, b, own.seq_k, other, one.seq_k);
    q_before = min_int(q_before, params.q_room + 1);
    kv_before += kv_tiles * count_before(params, batch, b, own.seq_q, other, one.seq_q);
    kv_before = min_int(kv_before, params.kv_room + 1);
  }
  q_before = warp_sum(q_before);
  kv_before = warp_sum(kv_before);
  const int q_count = ceil_div(own.seq_q, params.block_q);
  const int kv_count = ceil_div(own.seq_k, params.block_kv);
  own.first_q_tile = q_before;
  own.first_kv_tile = kv_before;
  own_tiles(params.q_tiles, params.q_room, q_before, q_count, number);
  own_tiles(params.kv_tiles, params.kv_room, kv_before, kv_count, number);
  if (params.q_tiles != nullptr && q_before + q_count > params.q_room) own.seq_q = 0;
  if (params.kv_tiles != nullptr && kv_before + kv_count > params.kv_room) own.seq_k = 0;
  q_all = warp_sum(q_all);
  kv_all = warp_sum(kv_all);
  if (lane != 0) return;
  params.records[number] = own;
  if (number != 0) return;
  if (params.q_tiles != nullptr) *params.q_tiles = min_int(q_all, params.q_room);
  if (params.kv_tiles != nullptr) *params.kv_tiles = min_int(kv_all, params.kv_room);
}

struct PackedRecord : SequenceRecord {
  int first_q_tile;  // among the tiles of all sequences, as scratch is laid out
  // Packed into one register, because the roles that make plans have just one left.
  int batch_and_unordered;

  __device__ __forceinline__ int batch_of_tensors() const { return batch_and_unordered >> 1; }
  // Where KV tiles take tickets to add up dQ: true if those of this sequence do not.
  __device__ __forceinline__ bool unordered() const { return batch_and_unordered & 1; }
};

template <typename Params>
struct PackedOfBatch : KeptSequence<Params> {
  __device__ __forceinline__ PackedOfBatch(const Params& params, const PackedRecord& record)
      : KeptSequence<Params>(params, record) {}
  __device__ __forceinline__ int batch(int) const {
    return static_cast<const PackedRecord&>(this->record).batch_of_tensors();
  }
};

struct Packed {
  static constexpr bool has_operands = true, ragged = true, work_table = true;
  struct Operands {
    const PackedSequence* packed_records;
    const int* packed_q_tiles;  // as in PackParams
    const int* packed_kv_tiles;
    // The tensors in which rows are stored one by one: those of a tile that crosses the end of its
    // sequence.
    void* out_rows;
    long long out_rows_batch_stride, out_rows_head_stride, out_rows_seq_stride;
    void* dk_rows;
    long long dk_rows_batch_stride, dk_rows_head_stride, dk_rows_seq_stride;
    void* dv_rows;
    long long dv_rows_batch_stride, dv_rows_head_stride, dv_rows_seq_stride;
    void* dq_rows;  // where rows without keys are zeroed, if tickets are taken
    long long dq_rows_batch_stride, dq_rows_head_stride, dq_rows_seq_stride;
    int dq_columns, dv_columns;  // per row
    int ticket_keys;             // maximum number of keys of a sequence whose tiles take tickets
    int packed_rows;             // rows per tile of packed_q_tiles
    int section_keys;   // maximum keys of heads that are worked on together; 0: one unit of heads
    int section_heads;  // the unit: heads that share their keys
    int ends_aligned;  // the last query is aligned with the last key, else the first with the first
    int packed_sequences;  // per batch of the tensors
  };
  using Record = PackedRecord;
  template <typename Params>
  using Sequence = PackedOfBatch<Params>;
  // For use before there is a record.
  template <typename Params>
  static __device__ __forceinline__ int batch_of(const Params& params, int b) {
    return b / packed_in_batch(params.packed_sequences);
  }

  template <typename Params>
  static __device__ __forceinline__ Record find(const Params& params, int b) {
    const PackedSequence one = params.packed_records[b];
    const int offset = params.ends_aligned ? one.seq_k - one.seq_q : 0;
    return {{one.q_start, one.k_start, one.seq_q, one.seq_k, params.band_first_shift + offset,
             params.band_end_shift + offset},
            one.first_q_tile,
            2 * one.batch + (one.seq_k > params.ticket_keys)};
  }
  template <typename Params>
  static __device__ __forceinline__ Record find_queries(const Params& params, int b) {
    const PackedSequence one = params.packed_records[b];
    return {{one.q_start, 0, one.seq_q, 0, 0, 0},
            one.first_q_tile,
            2 * one.batch + (one.seq_k > params.ticket_keys)};
  }

  // The number of query tiles, or of KV tiles, of all sequences.
  template <typename Params>
  static __device__ __forceinline__ int q_tile_count(const Params& params) {
    return *params.packed_q_tiles;
  }
  template <typename Params>
  static __device__ __forceinline__ int kv_tile_count(const Params& params) {
    return *params.packed_kv_tiles;
  }
  template <typename Params>
  static __device__ __forceinline__ int owner_of_q_tile(const Params& params, int tile) {
    return params.packed_q_tiles[1 + tile];
  }

  // For work by query tiles, for `heads` heads: the tile with this number.
  template <typename Params>
  static __device__ __forceinline__ WorkTile q_work(const Params& params, int heads, int block_q,
                                                    int longest_first, int work) {
    const int owner = params.packed_q_tiles[1 + work / heads];
    const PackedSequence one = params.packed_records[owner];
    return of_sequence(params, owner, heads, ceil_div(one.seq_q, block_q), one.seq_k, longest_first,
                       work - one.first_q_tile * heads);
  }
  // Likewise for KV tiles; WorkTile::q_tile is then the KV tile.
  template <typename Params>
  static __device__ __forceinline__ WorkTile kv_work(const Params& params, int heads, int block_kv,
                                                     int work) {
    const int owner = params.packed_kv_tiles[1 + work / heads];
    const PackedSequence one = params.packed_records[owner];
    return of_sequence(params, owner, heads, ceil_div(one.seq_k, block_kv), one.seq_k, 0,
                       work - one.first_kv_tile * heads);
  }

 private:
  // A sequence that was left out has no tiles, so any number is behind its end.
  template <typename Params>
  static __device__ __forceinline__ WorkTile of_sequence(const Params& params, int owner, int heads,
                                                         int tiles, int keys, int longest_first,
                                                         int work) {
    const int units = max_int(1, params.section_keys / max_int(1, keys));
    const int sections = max_int(1, heads / min_int(heads, units * params.section_heads));
    WorkTile tile = Schedule{heads, heads, max_int(1, tiles), sections, longest_first}.tile(work);
    tile.batch = owner;
    return tile;
  }
};

}  // namespace tilewise
