// clang-format off
// Where the sequences of a problem lie. Every kernel is compiled with one such description, as it is with one score policy.
//
// A problem has `params.batch` sequences of queries and keys. The plan of a tile records which sequence the tile belongs to,
// and what `Extents` found about that sequence. All roles read it from the plan, through Extents::Sequence:
//
//   batch(b)               the batch of the tensors that sequence b is in
//   q_start(), k_start()   where its rows begin in the tensors: row r of the sequence is row q_start() + r of that batch
//   seq_q(), seq_k()       the numbers of its queries and keys
//   band(), row_band()     which keys its rows see (mask.cuh, pieces.cuh), counted from the starts
//
// An Extents is a struct with
//   has_operands, Operands   what `find` reads in addition to the parameters of all kernels (ParamsOf, as for score terms).
//                            Ragged extents of sm90/forward.cuh also have `out_rows` with its strides: out, where rows are
//                            stored one by one
//   ragged                   sequences differ: tiles may lie past the end of a sequence, and rows past its end belong to
//                            another
//   Record                   the part of a plan about its sequence; empty where the kernel's parameters suffice
//   find(params, b)          the Record of sequence b
//   find_queries(params, b)  the same for kernels that read queries only, and have neither keys nor a band
//   Sequence(params, record) the accessors above
//
// Batched: (batch, heads, seq, dim) tensors; all sequences are alike. The parameters hold everything, and plans store nothing
// more.
// Mapped: the same, with a list of the tiles that a tile visits (tile_map.cuh): plans count positions in it, and `tile_at`
// returns the tile at a position. MappedInTurns: lists are ascending, and their entries tell which tiles are masked; KV tiles
// know how many others visit a query tile before them. MappedKeys: all queries see the same keys, so the band decides which
// query tiles a KV tile visits, and its list only decides whether there are any and whether they are masked.
// Extents with a KeptSequence (packed rows with their starts in memory, caches with their lengths) have a `find` of their own
// and Record = SequenceRecord, or a type derived from it.
// Extents with a `work_table` (packed.cuh) define which tile a work number stands for and how many tiles there are, and return
// the Record together with a tile; their grids may be larger than the number of tiles.
//
// Other parameters: `q_tiles` and `kv_tiles` are those of the longest sequence; `seq_q` is the number of rows in a batch of the
// tensors, which determines the layout of lse. Where Extents are ragged:
//   - a tile that begins past the end of its sequence touches nothing (`has_rows`);
//   - loads of whole tiles may include rows of the next sequence. The band hides their keys, and their values are in partial
//     tiles, which are scrubbed of inf and NaN;
//   - stores copy whole boxes only where all rows of the box belong to the sequence; otherwise they go row by row.
// clang-format on
#pragma once

#include "mask.cuh"
#include "operands.cuh"
#include "pieces.cuh"

namespace tilewise {

struct Batched {
  static constexpr bool has_operands = false;
  static constexpr bool ragged = false;
  struct Record {};

  template <typename Params>
  static __device__ __forceinline__ Record find(const Params&, int) {
    return {};
  }
  template <typename Params>
  static __device__ __forceinline__ Record find_queries(const Params&, int) {
    return {};
  }

  template <typename Params>
  struct Sequence {
    const Params& params;

    __device__ __forceinline__ Sequence(const Params& params, const Record&) : params(params) {}
    __device__ __forceinline__ int batch(int b) const { return b; }
    __device__ __forceinline__ int q_start() const { return 0; }
    __device__ __forceinline__ int k_start() const { return 0; }
    __device__ __forceinline__ int seq_q() const { return params.seq_q; }
    __device__ __forceinline__ int seq_k() const { return params.seq_k; }
    __device__ __forceinline__ Band band() const {
      return {params.band_first_shift, params.band_end_shift, params.seq_k};
    }
    __device__ __forceinline__ RowBand row_band() const {
      return {params.band_first_shift, params.band_end_shift, params.seq_q};
    }
  };
};

// The numbers that are stored with a list. For each 64 queries of its outer tile, a list by queries
// also stores the position after which they see no tile.
enum ListCount : int { full_tiles_of_list, tiles_of_list, own_end_of_list, list_counts = 6 };
constexpr int list_own_rows = 64, list_own_parts = list_counts - own_end_of_list;

struct Mapped : Batched {
  static constexpr bool has_operands = true;
  static constexpr bool mapped = true;
  struct Operands {
    const int* tile_counts;  // (lists, outer tiles, list_counts): ListCount
    const int* tile_lists;   // (lists, outer tiles, list_room): the full ones first
    int list_batch_stride;   // in lists; 0 where all batches or heads share a list
    int list_head_stride;
    int list_outer_tiles;
    int list_room;
  };
  template <typename Params>
  static __device__ __forceinline__ long long list(const Params& params, int batch, int head,
                                                   int outer) {
    const int list = batch * params.list_batch_stride + head * params.list_head_stride;
    return static_cast<long long>(list) * params.list_outer_tiles + outer;
  }
};

struct MappedInTurns : Mapped {
  static constexpr bool in_turns = true;
  struct Operands : Mapped::Operands {
    const int2* tile_turns;  // (lists, q tiles, kv tiles): how many of the KV tiles that visit the
                             // q tile come before this one, and how many after it
  };
};

struct MappedKeys : Mapped {
  static constexpr bool banded = true;
};

template <typename Extents>
concept HasTileMap = requires { requires Extents::mapped; };

template <typename Extents>
concept HasBandedMap = requires { requires Extents::banded; };

template <typename Extents>
concept HasTurns = requires { requires Extents::in_turns; };

// Marks an entry of a list in order as masked.
__device__ __forceinline__ int masked_tile(int tile) { return tile | 1 << 31; }

template <typename Extents>
concept HasWorkTable = requires { requires Extents::work_table; };

// The tiles that an outer tile visits, all of them and the full ones, as positions in its list.
template <HasTileMap Extents, typename Params>
__device__ __forceinline__ QueryTiles listed_tiles(const Params& params, int batch, int head,
                                                   int outer) {
  const int* counts = params.tile_counts + list_counts * Extents::list(params, batch, head, outer);
  return {{0, counts[tiles_of_list]}, {0, HasTurns<Extents> ? 0 : counts[full_tiles_of_list]}};
}

// Restricts the query tiles that the band lets a KV tile visit to those in its list.
template <HasBandedMap Extents, typename Params>
__device__ __forceinline__ QueryTiles kept_tiles(const Params& params, int batch, int head,
                                                 int kv_tile, const QueryTiles& banded) {
  const int* counts =
      params.tile_counts + list_counts * Extents::list(params, batch, head, kv_tile);
  if (counts[tiles_of_list] == 0) return {{0, 0}, {0, 0}};
  if (counts[full_tiles_of_list] == 0) return {banded.touched, {0, 0}};
  return banded;
}

// In a list by queries: the position after which the `part`-th 64 queries of the tile see no tile.
template <HasTileMap Extents, typename Params>
__device__ __forceinline__ int own_end(const Params& params, int batch, int head, int outer,
                                       int part) {
  const long long list = Extents::list(params, batch, head, outer);
  return params.tile_counts[list_counts * list + own_end_of_list + part];
}

template <HasTileMap Extents, typename Params>
__device__ __forceinline__ int list_entry(const Params& params, int batch, int head, int outer,
                                          int position) {
  return params.tile_lists[Extents::list(params, batch, head, outer) * params.list_room + position];
}

// The tile at a position of a plan. Without a map, positions are tiles.
template <typename Extents, typename Params>
__device__ __forceinline__ int tile_at(const Params& params, int batch, int head, int outer,
                                       int position) {
  if constexpr (HasTurns<Extents>)
    return list_entry<Extents>(params, batch, head, outer, position) & ~(1 << 31);
  else if constexpr (HasTileMap<Extents> && !HasBandedMap<Extents>)
    return list_entry<Extents>(params, batch, head, outer, position);
  else
    return position;
}

// How many of the KV tiles that visit a query tile come before this one, and how many after it.
template <HasTurns Extents, typename Params>
__device__ __forceinline__ int2 turn_of(const Params& params, int batch, int head_kv, int q_tile,
                                        int kv_tile) {
  const long long list = batch * params.list_batch_stride + head_kv * params.list_head_stride;
  return params.tile_turns[(list * params.q_tiles + q_tile) * params.kv_tiles + kv_tile];
}

// The part of a plan about a sequence that differs from others. Shifts of the band count from the
// starts.
struct SequenceRecord {
  int q_start, k_start;
  int seq_q, seq_k;
  int first_shift, end_shift;
};

// The accessors for a SequenceRecord where all sequences are in the one batch of their tensors.
// (packed.cuh has other accessors.)
template <typename Params>
struct KeptSequence {
  const SequenceRecord& record;

  __device__ __forceinline__ KeptSequence(const Params&, const SequenceRecord& record)
      : record(record) {}
  __device__ __forceinline__ int batch(int) const { return 0; }
  __device__ __forceinline__ int q_start() const { return record.q_start; }
  __device__ __forceinline__ int k_start() const { return record.k_start; }
  __device__ __forceinline__ int seq_q() const { return record.seq_q; }
  __device__ __forceinline__ int seq_k() const { return record.seq_k; }
  __device__ __forceinline__ Band band() const {
    return {record.first_shift, record.end_shift, record.seq_k};
  }
  __device__ __forceinline__ RowBand row_band() const {
    return {record.first_shift, record.end_shift, record.seq_q};
  }
};

template <typename Extents, typename Params>
__device__ __forceinline__ typename Extents::template Sequence<Params> sequence_of(
    const Params& params, const typename Extents::Record& record) {
  return {params, record};
}

// The batch of the tensors that sequence b is in, before there is a plan.
template <typename Extents, typename Params>
__device__ __forceinline__ int batch_of(const Params& params, int b) {
  if constexpr (HasWorkTable<Extents>)
    return Extents::batch_of(params, b);
  else
    return sequence_of<Extents>(params, typename Extents::Record{}).batch(b);
}

// Whether a tile that begins at row `begin` contains any of the sequence's `rows`.
template <typename Extents>
__device__ __forceinline__ bool has_rows(int begin, int rows) {
  return !Extents::ragged || begin < rows;
}

// A block of rows of one head, for kernels that process rows only, and its place in scratch memory,
// which has `params.rows` rows per head, or per head of each batch. `exists`: the block is not past
// all tiles of a work table.
template <typename Extents>
struct EdgeBlock {
  int batch, head;
  int first_row;  // within the sequence
  long long at;
  bool exists;
  typename Extents::Record record;  // of its queries
};
template <typename Extents, int edge_rows, typename Params, typename Number>
__device__ __forceinline__ EdgeBlock<Extents> edge_block_at(const Params& params, Number block) {
  const int blocks = params.rows / edge_rows, batch_head = block / blocks;
  const int first_row = block % blocks * edge_rows;
  const long long at = static_cast<long long>(batch_head) * params.rows + first_row;
  if constexpr (HasWorkTable<Extents>) {
    const auto owner = Extents::owner_of_q_tile(params, first_row / params.packed_rows);
    return {owner.number, batch_head,        first_row - owner.first_q_tile * params.packed_rows,
            at,           owner.number >= 0, Extents::queries_of(params, owner)};
  } else {
    const int batch = batch_head / params.heads;
    return {batch, batch_head % params.heads,           first_row, at,
            true,  Extents::find_queries(params, batch)};
  }
}

// The index of a sequence's first query row among the rows of all heads of its tensors, as in lse.
template <typename Params, typename Sequence>
__device__ __forceinline__ long long first_row_of_head(const Params& params,
                                                       const Sequence& sequence, long long batch,
                                                       int heads, int head) {
  return (batch * heads + head) * params.seq_q + sequence.q_start();
}

}  // namespace tilewise
