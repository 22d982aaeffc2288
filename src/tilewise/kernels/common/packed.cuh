// clang-format off
// Packed sequences: they have different lengths and are stored end to end in (total, heads, dim) tensors; their offsets are on
// the device.
//
// Symbols. Sequence b has the query rows [cu_q[b], cu_q[b + 1]) and the keys [cu_k[b], cu_k[b + 1]), b < sequences. Rows past
// the last offset form a sequence without keys, number `sequences`, and keys past it form one without queries, the next number;
// in this way every row of every result is written. Where the tensors have several batches, each has these sequences, and their
// numbers continue from batch to batch: number b belongs to batch b / (sequences + 2).
//
//   pack_sequences, with a warp per sequence, runs before the kernels that use its results:
//   1. record[b] = starts and lengths; whatever the offsets hold, they lie within the tensors, and 0 <= length
//   2. sequences are ordered by their cost: for a backward by the number of query tiles, then of KV tiles, for a forward the
//      other way round; then by their number. before[b] = the number of tiles of all sequences that come before b
//   3. owner[before[b] + i] = record[b] for its tiles i
//      In the list from which work is assigned (KV tiles for a backward, query tiles for a forward), sequences with equally many
//      tiles of both kinds form groups, whose tiles are numbered tile by tile: owner[before[group] + i * members + member]
//   4. owner[i].number = -1 for all i past the last tile
// Why groups: they are as large as the sections of a batch (schedule.cuh). KV tiles of a head that run side by side wait for
// one another at its dQ; and if the last sequence alone filled the GPU, its short tiles would end long before the others. A
// sequence whose heads do not fit into a section forms a group alone.
// Why a tile has a copy of the record: a CTA that starts has nothing else to do while it waits for memory, and waits only once.
// Tiles are numbered without gaps, so their numbers also index scratch memory: total / block + sequences + 2 slots per batch
// always suffice for offsets that never decrease. For other offsets they may not, and tiles beyond the available slots are left
// out.
//
// A grid has a CTA for each of that many tiles, or loops over those that exist. The work of one sequence is numbered section by
// section (HeadSections of schedule.cuh); a section is a run of heads whose keys fit in the L2 cache together.
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
  int number;          // -1 in the entry of a tile that does not exist
  int heads_together;  // per section
  int tile;            // in an owner: the index of the tile in its sequence
  int unused[2];
};

struct PackParams {
  const int* cu_q;
  const int* cu_k;
  const int* used_k;        // null, or (sequences): the number of valid keys of each
  const int* left_k;        // null, or (sequences): how many of these are leading padding
  PackedSequence* records;  // (batches, sequences + 2)
  // Null, or the owners of all tiles, after an entry whose number is the number of tiles.
  PackedSequence* q_tiles;
  PackedSequence* kv_tiles;
  int batches;
  int sequences;  // per batch, as are the totals
  int total_q;
  int total_k;
  int block_q;
  int block_kv;
  int q_room;         // capacity of q_tiles, in tiles
  int kv_room;        // likewise
  int heads;          // heads that the work on tiles is divided among
  int section_keys;   // maximum keys of heads that run together; 0: one unit of heads
  int section_heads;  // the unit: heads that share their keys
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

// The number of sequences per batch, including the two past its last offsets.
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
  return {q.start, q.length, k.start, k.length};
}

__device__ __forceinline__ int heads_together(const PackParams& params, int keys) {
  const int units = max_int(1, params.section_keys / max_int(1, keys));
  const int sections = params.heads / min_int(params.heads, units * params.section_heads);
  return ceil_div(params.heads, sections);
}

__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The numbers of a sequence's tiles in a list: first, first + step, ...
struct PackedNumbers {
  int first, step, count;

  __device__ __forceinline__ long long at(int tile) const {
    return first + static_cast<long long>(tile) * step;
  }
  __device__ __forceinline__ bool fit(int room) const { return count == 0 || at(count - 1) < room; }
};

// The position of a sequence among those with equally many tiles.
struct PackedPeers {
  int all, before;
  int members;  // maximum per group

  // `tiles`: the number of tiles of all sequences that come before these. Groups differ by at most
  // one member, and the larger ones come first.
  __device__ __forceinline__ PackedNumbers numbers(int tiles, int count, int room) const {
    const int groups = ceil_div(all, members), small = all / groups, larger = all - small * groups;
    const int in_larger = larger * (small + 1);
    const int size = small + (before < in_larger), start = before < in_larger ? 0 : in_larger;
    const int group = start + (before - start) / size * size;  // its first member
    const long long first = tiles + static_cast<long long>(group) * count + (before - group);
    return {first <= room ? static_cast<int>(first) : room + 1, size, count};
  }
};

// Assigns its tiles to a sequence, as far as there is room, and writes this warp's share of the
// entries past all tiles.
__device__ __forceinline__ void own_tiles(PackedSequence* tiles, int room,
                                          const PackedNumbers& numbers, int all,
                                          const PackedSequence& owner, int warps) {
  if (tiles == nullptr) return;
  const int lane = threadIdx.x % 32;
  PackedSequence entry = owner;
  for (entry.tile = lane; entry.tile < numbers.count; entry.tile += 32)
    if (numbers.at(entry.tile) < room) tiles[1 + numbers.at(entry.tile)] = entry;
  PackedSequence none{};
  none.number = -1, none.heads_together = 1;
  for (int tile = all + owner.number * 32 + lane; tile < room; tile += warps * 32)
    tiles[1 + tile] = none;
  if (owner.number == 0 && lane == 0) tiles->number = all;
}

__device__ __forceinline__ void pack_sequences(const PackParams& params) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int number = blockIdx.x * pack_warps + warp, in_batch = packed_in_batch(params.sequences);
  if (number >= params.batches * in_batch) return;
  const int batch = number / in_batch, b = number - batch * in_batch;
  PackedSequence own = packed_sequence(params, b);
  own.batch = batch;
  own.number = number;
  const int q_count = ceil_div(own.seq_q, params.block_q);
  const int kv_count = ceil_div(own.seq_k, params.block_kv);
  const bool by_keys = params.kv_tiles != nullptr;
  int q_before = 0, kv_before = 0, q_all = 0, kv_all = 0;
  PackedPeers peers{};
  for (int other = lane; other < in_batch; other += 32) {
    const PackedSequence one = packed_sequence(params, other);
    const int q_tiles = ceil_div(one.seq_q, params.block_q);
    const int kv_tiles = ceil_div(one.seq_k, params.block_kv);
    const int more_q = q_tiles - q_count, more_kv = kv_tiles - kv_count;
    const int more = by_keys ? (more_q != 0 ? more_q : more_kv) : (more_kv != 0 ? more_kv : more_q);
    // Invalid offsets may yield any number of tiles: it is capped at one more than the room.
    q_all = min_int(q_all + params.batches * q_tiles, params.q_room + 1);
    kv_all = min_int(kv_all + params.batches * kv_tiles, params.kv_room + 1);
    if (more > 0) {
      q_before = min_int(q_before + params.batches * q_tiles, params.q_room + 1);
      kv_before = min_int(kv_before + params.batches * kv_tiles, params.kv_room + 1);
    } else if (more == 0) {
      peers.all += params.batches;
      peers.before += batch + (other < b);  // of its copies in all batches
    }
  }
  const int keys = kv_count * params.block_kv;
  own.heads_together = heads_together(params, keys);
  const int units = params.heads / params.section_heads;
  const bool fits = own.heads_together == params.heads;
  peers.all = warp_sum(peers.all), peers.before = warp_sum(peers.before);
  peers.members = fits ? max_int(1, params.section_keys / max_int(1, keys) / units) : 1;
  const PackedNumbers kv_numbers = peers.numbers(warp_sum(kv_before), kv_count, params.kv_room);
  if (by_keys) peers.members = 1;
  const PackedNumbers q_numbers = peers.numbers(warp_sum(q_before), q_count, params.q_room);
  own.first_q_tile = q_numbers.first;
  own.first_kv_tile = kv_numbers.first;
  if (params.q_tiles != nullptr && !q_numbers.fit(params.q_room)) own.seq_q = 0;
  if (by_keys && !kv_numbers.fit(params.kv_room)) own.seq_k = 0;
  const int sequences = params.batches * in_batch;
  q_all = min_int(warp_sum(q_all), params.q_room);
  kv_all = min_int(warp_sum(kv_all), params.kv_room);
  own_tiles(params.q_tiles, params.q_room, q_numbers, q_all, own, sequences);
  own_tiles(params.kv_tiles, params.kv_room, kv_numbers, kv_all, own, sequences);
  if (lane == 0) params.records[number] = own;
}

struct PackedRecord : SequenceRecord {
  int first_q_tile;  // among the tiles of all sequences, as scratch is laid out
  // Packed into one register, because the roles that make plans have just one left.
  int batch_and_unordered;

  __device__ __forceinline__ int batch_of_tensors() const { return batch_and_unordered >> 1; }
  // Where KV tiles take tickets to add up dQ: true if the tiles of this sequence do not.
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
    const PackedSequence* packed_q_tiles;  // as in PackParams
    const PackedSequence* packed_kv_tiles;
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
  static __device__ __forceinline__ Record record_of(const Params& params,
                                                     const PackedSequence& one) {
    const int offset = params.ends_aligned ? one.seq_k - one.seq_q : 0;
    return {{one.q_start, one.k_start, one.seq_q, one.seq_k, params.band_first_shift + offset,
             params.band_end_shift + offset},
            one.first_q_tile,
            2 * one.batch + (one.seq_k > params.ticket_keys)};
  }
  // For kernels that only read queries.
  template <typename Params>
  static __device__ __forceinline__ Record queries_of(const Params& params,
                                                      const PackedSequence& one) {
    return {{one.q_start, 0, one.seq_q, 0, 0, 0},
            one.first_q_tile,
            2 * one.batch + (one.seq_k > params.ticket_keys)};
  }
  template <typename Params>
  static __device__ __forceinline__ Record find(const Params& params, int b) {
    return record_of(params, params.packed_records[b]);
  }

  // The number of query tiles of all sequences.
  template <typename Params>
  static __device__ __forceinline__ int q_tile_count(const Params& params) {
    return params.packed_q_tiles->number;
  }
  template <typename Params>
  static __device__ __forceinline__ PackedSequence owner_of_q_tile(const Params& params, int tile) {
    return params.packed_q_tiles[1 + tile];
  }

  // A tile, and its sequence. A sequence that was left out has no tiles, so any tile from 0 on is
  // past its end.
  struct Work {
    WorkTile tile;
    PackedSequence owner;

    __device__ __forceinline__ bool exists() const { return owner.number >= 0; }
  };
  // For work by query tiles of `heads` heads: the tile with this number.
  template <typename Params>
  static __device__ __forceinline__ Work q_work(const Params& params, int heads, int block_q,
                                                int longest_first, int work) {
    const PackedSequence owner = params.packed_q_tiles[1 + work / heads];
    const int tiles = ceil_div(owner.seq_q, block_q);
    WorkTile tile = tile_of(owner, heads, tiles, owner.first_q_tile, work);
    if (longest_first) tile.q_tile = max_int(0, tiles - 1 - tile.q_tile);
    return {tile, owner};
  }
  // Likewise for KV tiles; WorkTile::q_tile is then the KV tile.
  template <typename Params>
  static __device__ __forceinline__ Work kv_work(const Params& params, int heads, int block_kv,
                                                 int work) {
    const PackedSequence owner = params.packed_kv_tiles[1 + work / heads];
    const int tiles = ceil_div(owner.seq_k, block_kv);
    return {tile_of(owner, heads, tiles, owner.first_kv_tile, work), owner};
  }

 private:
  static __device__ __forceinline__ WorkTile tile_of(const PackedSequence& owner, int heads,
                                                     int tiles, int first_tile, int work) {
    WorkTile tile{0, work % heads, owner.tile};
    if (owner.heads_together != heads)
      tile = HeadSections{heads, tiles, owner.heads_together}.tile(work - first_tile * heads);
    tile.batch = owner.number;
    return tile;
  }
};

}  // namespace tilewise
