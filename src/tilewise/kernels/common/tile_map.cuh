// clang-format off
// The tile map of a boolean mask: which tiles of scores a kernel visits, and which of those it masks.
//
// Symbols. keep[b, h, i, j]: whether query i may see key j; a byte, any strides, 0 where it is broadcast. A plane is the
// part of keep that belongs to one (b, h) which it tells apart. A cell is 64 queries by 16 keys. A tile that is smaller is taken
// for what its cells are: visited or masked once too often, never too rarely. The band is that of the mask beside it (mask.cuh): causal, a window, or all.
//
//   mark_cells, one read of the mask
//   1. cell[p, r, c] = any | all << 1, over the queries and keys of the cell that exist
//   2. bits[p, i, j] = keep[p, i, j], or bits[p, j, i] for kernels whose rows are keys (terms/kept_bits.cuh); one line where all
//      queries see the same keys
//   list_tiles, for the tile shape of one kernel; a warp per tile of queries (or of keys, for a backward)
//   3. touched = the tiles that the band touches and in which some cell has any
//   4. full = those of them that the band leaves whole and in which every cell has all
//   5. tiles[list][0 .. full_count) = the full ones, tiles[list][full_count .. count) = the others, both ascending
// A kernel walks a list from its end, as it walks a range of tiles: first those that it masks, then the full ones.
// Planes of several heads may share a list (a backward has one per KV head): it is then the union of theirs.
//
// Both kernels: 8 warps per CTA, no shared memory. mark_cells: a warp per 64 queries by 512 keys, 16 keys per lane.
// clang-format on
#pragma once

#include "mask.cuh"
#include "pieces.cuh"

namespace tilewise {

constexpr int cell_rows = 64, cell_keys = 16;
constexpr int map_warps = 8;
constexpr int keys_per_warp = 32 * cell_keys;

enum Cell : unsigned char { cell_any = 1, cell_all = 2 };

struct MarkParams {
  const unsigned char* keep;
  long long batch_stride, head_stride, row_stride, key_stride;  // in bytes
  unsigned char* cells;                                         // (planes, row_blocks, row_cells)
  unsigned* bits;                                               // (planes, lines, line_words)
  int lines, line_words;
  int heads;  // planes of one batch
  int planes;
  int seq_q, seq_k;
  int row_blocks;
  int row_cells;  // per row of cells
};

struct ListParams {
  const unsigned char* cells;  // as above
  int* counts;                 // (lists, outer tiles, 2): full_count, count
  int* tiles;                  // (lists, outer tiles, inner tiles)
  int lists;
  int planes_per_list;  // that follow one another
  int seq_q, seq_k;
  int band_first_shift, band_end_shift;
  int row_blocks, row_cells;
  int block_q, block_kv;
  int outer_tiles, inner_tiles;
};

// Of the bytes of a word, 0x80 where one is not 0: a boolean may be any such byte.
__device__ __forceinline__ unsigned truths(unsigned word) {
  return ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
}

// Of the bytes of a word that are not 0, as in truths, the four bits side by side.
__device__ __forceinline__ unsigned four_bits(unsigned truths) {
  return (truths >> 7) * 0x01020408u >> 24 & 0xfu;
}

enum class Lines { queries, keys };

// A cell, as far as it has been looked at.
template <Lines lines_are>
struct CellMarks {
  unsigned any = 0, all = 0xffffu;  // a bit per key
  // Where lines are keys: of each of the 16, the bits of 64 queries.
  unsigned long long columns[lines_are == Lines::keys ? cell_keys : 1] = {};

  // `line`: where the bits of the row go, if lines are queries.
  __device__ __forceinline__ void add(unsigned kept, int row, unsigned short* line) {
    any |= kept;
    all &= kept;
    if constexpr (lines_are == Lines::keys) {
#pragma unroll
      for (int key = 0; key < cell_keys; ++key)
        columns[key] |= static_cast<unsigned long long>(kept >> key & 1) << row;
    } else {
      *line = static_cast<unsigned short>(kept);
    }
  }
};

template <Lines lines_are>
__device__ __forceinline__ void mark_cells(const MarkParams& params) {
  const int chunks = ceil_div(params.row_cells, 32);
  const int lane = threadIdx.x % 32;
  const int item = blockIdx.x * map_warps + threadIdx.x / 32;
  if (item >= params.planes * params.row_blocks * chunks) return;
  const int chunk = item % chunks, row_block = item / chunks % params.row_blocks;
  const int plane = item / chunks / params.row_blocks;
  const int cell = chunk * 32 + lane;
  if (cell >= params.row_cells) return;
  const int first_key = cell * cell_keys, keys = min_int(cell_keys, params.seq_k - first_key);
  const int first_row = row_block * cell_rows;
  // Rows that are all the same are looked at once, and have one line.
  const int rows = params.row_stride == 0 ? 1 : min_int(cell_rows, params.seq_q - first_row);
  const unsigned char* at = params.keep + plane / params.heads * params.batch_stride +
                            plane % params.heads * params.head_stride +
                            first_row * params.row_stride + first_key * params.key_stride;
  unsigned* bits = params.bits + static_cast<long long>(plane) * params.lines * params.line_words;
  unsigned short* line = reinterpret_cast<unsigned short*>(bits) + cell;
  if (params.lines > 1) line += 2ll * first_row * params.line_words;
  CellMarks<lines_are> marks;
  // Whether 16 keys can be read as one vector is the same for all of a mask, so the branch costs
  // nothing.
  const long long steps = params.batch_stride | params.head_stride | params.row_stride |
                          reinterpret_cast<long long>(params.keep);
  if (params.key_stride == 1 && steps % 16 == 0 && keys == cell_keys) {
#pragma unroll 8
    for (int row = 0; row < rows; ++row, at += params.row_stride, line += 2 * params.line_words) {
      const uint4 word = __ldg(reinterpret_cast<const uint4*>(at));
      marks.add(four_bits(truths(word.x)) | four_bits(truths(word.y)) << 4 |
                    four_bits(truths(word.z)) << 8 | four_bits(truths(word.w)) << 12,
                row, line);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < rows; ++row, at += params.row_stride, line += 2 * params.line_words) {
      unsigned kept = 0;
#pragma unroll 1
      for (int key = 0; key < keys; ++key)
        kept |= (at[key * params.key_stride] != 0 ? 1u : 0u) << key;
      marks.add(kept, row, line);
    }
  }
  if constexpr (lines_are == Lines::keys) {
#pragma unroll
    for (int key = 0; key < cell_keys; ++key) {
      const long long of_key = static_cast<long long>(first_key + key) * params.line_words;
      if (key < keys)
        reinterpret_cast<unsigned long long*>(bits + of_key)[row_block] = marks.columns[key];
    }
  }
  const unsigned every = 0xffffu >> (cell_keys - keys);
  const bool all = (marks.all & every) == every;
  params.cells[(static_cast<long long>(plane) * params.row_blocks + row_block) * params.row_cells +
               cell] = (marks.any != 0 ? cell_any : 0) | (all ? cell_all : 0);
}

// What the cells of one tile say together.
__device__ __forceinline__ int cells_of_tile(const ListParams& params, int list, int q_tile,
                                             int kv_tile) {
  const int row = q_tile * params.block_q, key = kv_tile * params.block_kv;
  const int rows_begin = row / cell_rows, cells_begin = key / cell_keys;
  const int rows_end = min_int(ceil_div(row + params.block_q, cell_rows), params.row_blocks);
  const int cells_end = min_int(ceil_div(key + params.block_kv, cell_keys), params.row_cells);
  int any = 0, all = cell_all;
  for (int plane = 0; plane < params.planes_per_list; ++plane)
    for (int row = rows_begin; row < rows_end; ++row) {
      const long long first =
          (static_cast<long long>(list * params.planes_per_list + plane) * params.row_blocks +
           row) *
          params.row_cells;
      for (int cell = cells_begin; cell < cells_end; ++cell) {
        const int marks = params.cells[first + cell];
        any |= marks & cell_any;
        all &= marks;
      }
    }
  return any | all;
}

// The tiles of the other side that the band lets a tile touch, and those it leaves whole.
template <bool by_keys>
__device__ __forceinline__ QueryTiles banded_tiles(const ListParams& params, int outer) {
  if constexpr (by_keys) {
    const RowBand band{params.band_first_shift, params.band_end_shift, params.seq_q};
    return query_tiles(band, outer, params.seq_k, params.block_q, params.block_kv);
  } else {
    const Band band{params.band_first_shift, params.band_end_shift, params.seq_k};
    const int row = outer * params.block_q, row_end = min_int(row + params.block_q, params.seq_q);
    const TileRange touched = touched_tiles(band, row, row_end, params.block_kv);
    return {touched, full_tiles(band, row, row_end, params.block_kv, touched)};
  }
}

template <bool by_keys>
__device__ __forceinline__ void list_tiles(const ListParams& params) {
  const int lane = threadIdx.x % 32;
  const int item = blockIdx.x * map_warps + threadIdx.x / 32;
  if (item >= params.lists * params.outer_tiles) return;
  const int outer = item % params.outer_tiles, list = item / params.outer_tiles;
  const QueryTiles banded = banded_tiles<by_keys>(params, outer);
  int* tiles = params.tiles + static_cast<long long>(item) * params.inner_tiles;
  int full_count = 0, count = 0;
  // Once to count the full tiles, which come first, and once to write.
  for (int pass = 0; pass < 2; ++pass) {
    int next_full = 0, next_other = full_count;
    for (int begin = banded.touched.begin; begin < banded.touched.end; begin += 32) {
      const int inner = begin + lane;
      int marks = 0;
      if (inner < banded.touched.end)
        marks = cells_of_tile(params, list, by_keys ? inner : outer, by_keys ? outer : inner);
      const bool whole = inner >= banded.full.begin && inner < banded.full.end;
      const bool full = whole && marks == (cell_any | cell_all);
      const bool other = !full && (marks & cell_any) != 0;
      const unsigned fulls = __ballot_sync(0xffffffffu, full);
      const unsigned others = __ballot_sync(0xffffffffu, other);
      const unsigned below = (1u << lane) - 1;
      if (pass == 1 && full) tiles[next_full + __popc(fulls & below)] = inner;
      if (pass == 1 && other) tiles[next_other + __popc(others & below)] = inner;
      next_full += __popc(fulls);
      next_other += __popc(others);
    }
    full_count = next_full;
    count = next_other;
  }
  if (lane == 0) {
    params.counts[2 * item] = full_count;
    params.counts[2 * item + 1] = count;
  }
}

}  // namespace tilewise
