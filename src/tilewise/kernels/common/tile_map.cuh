// clang-format off
// The tile map of a boolean mask: which tiles of scores a kernel visits, and which of those it masks.
//
// Symbols. keep[b, h, i, j]: whether query i may see key j; a byte, with any strides, 0 where it is broadcast. A plane is the
// part of keep for one (b, h) that it distinguishes. A cell is 64 queries by 16 keys. A tile smaller than a cell is
// classified by its cells: it may be visited or masked unnecessarily, but never missed. The band is that of the mask that is
// used with it (mask.cuh): causal, a window, or all.
//
//   mark_cells, which reads the mask once, whatever kernels follow
//   1. cell[p, r, c] = any | all << 1, over the queries and keys of the cell that exist
//   2. bits[p, i, j] = keep[p, i, j] (terms/kept_bits.cuh); one line where all queries see the same keys
//   turn_bits, for kernels whose rows are keys
//   3. turned[p, j, i] = bits[p, i, j]
//   list_tiles, for the tile shape of one kernel; one warp per query tile (or per KV tile, for a backward)
//   4. touched = the tiles that the band touches and in which some cell has `any`
//   5. full = those of them that the band leaves whole and in which every cell has `all`
//   6. tiles[list][0 .. full_count) = the full ones, tiles[list][full_count .. count) = the others, both ascending; or in
//      order: all ascending, with the sign bit set where one is not full. Beside their numbers, for each 64 queries of a query
//      tile: behind which position none of the tiles is seen by them
//   count_turns, for backwards in which KV tiles take turns at a dQ; one warp per query tile
//   7. turns[list][q tile][kv tile] = the number of KV tiles that visit the query tile before this one, and after it
// A kernel walks a list from its end, as it walks a range of tiles: first the tiles that it masks, then the full ones.
// Planes of several heads may share a list (a backward has one per KV head), which is then the union of theirs.
//
// All kernels have 4 warps per CTA and no shared memory. mark_cells uses a warp per 64 queries by 512 keys, 16 keys per lane;
// a lane has the loads of eight queries in flight. turn_bits uses a warp per 128 queries by 64 keys, so that a lane stores 16
// bytes.
// clang-format on
#pragma once

#include "extents.cuh"
#include "mask.cuh"
#include "pieces.cuh"

namespace tilewise {

constexpr int cell_rows = 64, cell_keys = 16;
constexpr int map_warps = 4;
constexpr int rows_at_once = 8;
constexpr int turned_rows = 128, turned_keys = 64;  // per warp

static_assert(cell_rows == list_own_rows);
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

struct TurnParams {
  const unsigned* bits;  // (planes, seq_q, line_words)
  unsigned* turned;      // (planes, seq_k, turned_words)
  int line_words, turned_words;
  int planes;
  int seq_q, seq_k;
};

struct ListParams {
  const unsigned char* cells;  // as in MarkParams
  int* counts;                 // (lists, outer tiles, list_counts): ListCount
  int* tiles;                  // (lists, outer tiles, inner tiles)
  int2* turns;                 // (lists, q tiles, kv tiles), if they are counted
  int lists;
  int planes_per_list;  // consecutive planes
  int seq_q, seq_k;
  int band_first_shift, band_end_shift;
  int row_blocks, row_cells;
  int block_q, block_kv;
  int outer_tiles, inner_tiles;
};

// The index of this warp in the grid.
__device__ __forceinline__ int map_item() { return blockIdx.x * map_warps + threadIdx.x / 32; }

// 0x80 in each byte of a word that is not 0: a boolean may be any such byte.
__device__ __forceinline__ unsigned truths(unsigned word) {
  return ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
}

// Packs the flags of truths() into four adjacent bits. The product has them in its highest four
// bits: no two of its addends overlap.
__device__ __forceinline__ unsigned four_bits(unsigned truths) {
  return truths * 0x00204081u >> 28;
}
__device__ __forceinline__ unsigned sixteen_bits(uint4 bytes) {
  return four_bits(truths(bytes.x)) | four_bits(truths(bytes.y)) << 4 |
         four_bits(truths(bytes.z)) << 8 | four_bits(truths(bytes.w)) << 12;
}

// What is known of a cell so far.
struct CellMarks {
  unsigned any = 0, all = 0xffffu;  // a bit per key

  // `line`: the destination of the row's bits.
  __device__ __forceinline__ void add(unsigned kept, unsigned short* line) {
    any |= kept;
    all &= kept;
    *line = static_cast<unsigned short>(kept);
  }
};

__device__ __forceinline__ void mark_cells(const MarkParams& params) {
  const int chunks = ceil_div(params.row_cells, 32);
  const int lane = threadIdx.x % 32;
  const int item = map_item();
  if (item >= params.planes * params.row_blocks * chunks) return;
  const int chunk = item % chunks, row_block = item / chunks % params.row_blocks;
  const int plane = item / chunks / params.row_blocks;
  const int cell = chunk * 32 + lane;
  if (cell >= params.row_cells) return;
  const int first_key = cell * cell_keys, keys_left = params.seq_k - first_key;
  const bool whole = keys_left >= cell_keys;  // why not of a clamped number: see mask.cuh
  const int first_row = row_block * cell_rows;
  // Rows that are all the same are read once, and have one line.
  const int rows = params.row_stride == 0 ? 1 : min_int(cell_rows, params.seq_q - first_row);
  const unsigned char* at = params.keep + plane / params.heads * params.batch_stride +
                            plane % params.heads * params.head_stride +
                            first_row * params.row_stride + first_key * params.key_stride;
  unsigned short* line =
      reinterpret_cast<unsigned short*>(params.bits + static_cast<long long>(plane) * params.lines *
                                                          params.line_words) +
      cell;
  if (params.lines > 1) line += 2ll * first_row * params.line_words;
  CellMarks marks;
  // Whether 16 keys can be read as one vector is the same for a whole mask, so the branch is
  // uniform and costs nothing.
  const long long steps = params.batch_stride | params.head_stride | params.row_stride |
                          reinterpret_cast<long long>(params.keep);
  if (params.key_stride == 1 && steps % 16 == 0 && whole) {
    // The rows of the next iteration are in flight while those of this one are processed. Behind
    // the end the last row is read again. Why no __ldg: the assembler would sink such a load to its
    // use; these loads stay before the stores of their iteration.
    uint4 next[rows_at_once];
    auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i)
        next[i] =
            *reinterpret_cast<const uint4*>(at + min_int(begin + i, rows - 1) * params.row_stride);
    };
    load(0);
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += rows_at_once) {
      uint4 bytes[rows_at_once];
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) bytes[i] = next[i];
      load(begin + rows_at_once);
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i)
        marks.add(sixteen_bits(bytes[i]),
                  line + 2ll * min_int(begin + i, rows - 1) * params.line_words);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < rows; ++row, at += params.row_stride, line += 2 * params.line_words) {
      unsigned bytes[cell_keys];
#pragma unroll
      for (int key = 0; key < cell_keys; ++key)
        bytes[key] = key < keys_left ? at[key * params.key_stride] : 0;
      unsigned kept = 0;
#pragma unroll
      for (int key = 0; key < cell_keys; ++key) kept |= (bytes[key] != 0 ? 1u : 0u) << key;
      marks.add(kept, line);
    }
  }
  const unsigned every = whole ? 0xffffu : (1u << keys_left) - 1;
  const bool all = (marks.all & every) == every;
  params.cells[(static_cast<long long>(plane) * params.row_blocks + row_block) * params.row_cells +
               cell] = (marks.any != 0 ? cell_any : 0) | (all ? cell_all : 0);
}

// Each lane's word is a row of bits; returns this lane's column of them. Each of five steps swaps
// the two squares beside the diagonal, and the next step works on squares of half the size.
__device__ __forceinline__ unsigned turned_square(unsigned word) {
  const int lane = threadIdx.x % 32;
  unsigned low = 0xffffu;  // columns in the first half of a square
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2, low ^= low << distance) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, word, distance);
    word = lane & distance ? (word & ~low) | (other >> distance & low)
                           : (word & low) | (other & low) << distance;
  }
  return word;
}

__device__ __forceinline__ void turn_bits(const TurnParams& params) {
  const int key_blocks = ceil_div(params.seq_k, turned_keys);
  const int row_blocks = ceil_div(params.seq_q, turned_rows);
  const int lane = threadIdx.x % 32, item = map_item();
  if (item >= params.planes * row_blocks * key_blocks) return;
  const int key_block = item % key_blocks, row_block = item / key_blocks % row_blocks;
  const long long plane = item / key_blocks / row_blocks;
  const unsigned* bits = params.bits + plane * params.seq_q * params.line_words + 2 * key_block;
  unsigned turned[2][4];
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int row = row_block * turned_rows + part * 32 + lane;
    uint2 words{};
    if (row < params.seq_q)
      words =
          *reinterpret_cast<const uint2*>(bits + static_cast<long long>(row) * params.line_words);
    turned[0][part] = words.x;
    turned[1][part] = words.y;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < 4; ++part) turned[half][part] = turned_square(turned[half][part]);
    const int key = key_block * turned_keys + half * 32 + lane;
    const unsigned (&line)[4] = turned[half];
    if (key < params.seq_k)
      *reinterpret_cast<uint4*>(params.turned + (plane * params.seq_k + key) * params.turned_words +
                                4 * row_block) = uint4{line[0], line[1], line[2], line[3]};
  }
}

// The combined marks of the cells of one tile, and the rows of cells that have `any`, a bit each.
struct TileMarks {
  int marks;
  unsigned rows;
};
__device__ __forceinline__ TileMarks cells_of_tile(const ListParams& params, int list, int q_tile,
                                                   int kv_tile) {
  const int row = q_tile * params.block_q, key = kv_tile * params.block_kv;
  const int rows_begin = row / cell_rows, cells_begin = key / cell_keys;
  const int rows_end = min_int(ceil_div(row + params.block_q, cell_rows), params.row_blocks);
  const int cells_end = min_int(ceil_div(key + params.block_kv, cell_keys), params.row_cells);
  int all = cell_all;
  unsigned rows = 0;
  for (int plane = 0; plane < params.planes_per_list; ++plane)
    for (int row = rows_begin; row < rows_end; ++row) {
      const long long first =
          (static_cast<long long>(list * params.planes_per_list + plane) * params.row_blocks +
           row) *
          params.row_cells;
      for (int cell = cells_begin; cell < cells_end; ++cell) {
        const int marks = params.cells[first + cell];
        if (marks & cell_any) rows |= 1u << row - rows_begin;
        all &= marks;
      }
    }
  return {all | (rows != 0 ? cell_any : 0), rows};
}

// The tiles of the other side that the band lets a tile touch, and those that it leaves whole.
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

// Whether the band lets the 64 queries from `row` on see some of a KV tile.
__device__ __forceinline__ bool is_touched(const ListParams& params, int row, int kv_tile) {
  const Band band{params.band_first_shift, params.band_end_shift, params.seq_k};
  if (row >= params.seq_q) return false;
  const TileRange touched =
      touched_tiles(band, row, min_int(row + cell_rows, params.seq_q), params.block_kv);
  return kv_tile >= touched.begin && kv_tile < touched.end;
}

template <bool by_keys, bool in_order = false>
__device__ __forceinline__ void list_tiles(const ListParams& params) {
  const int lane = threadIdx.x % 32;
  const int item = map_item();
  if (item >= params.lists * params.outer_tiles) return;
  const int outer = item % params.outer_tiles, list = item / params.outer_tiles;
  const QueryTiles banded = banded_tiles<by_keys>(params, outer);
  int* tiles = params.tiles + static_cast<long long>(item) * params.inner_tiles;
  int full_count = 0, count = 0;
  int own_ends[list_own_parts] = {};
  // The first pass counts the full tiles, where these come first; the second writes.
  for (int pass = in_order ? 1 : 0; pass < 2; ++pass) {
    int next_full = 0, next_other = full_count;
    for (int begin = banded.touched.begin; begin < banded.touched.end; begin += 32) {
      const int inner = begin + lane;
      TileMarks found{};
      if (inner < banded.touched.end)
        found = cells_of_tile(params, list, by_keys ? inner : outer, by_keys ? outer : inner);
      const bool whole = inner >= banded.full.begin && inner < banded.full.end;
      const bool full = whole && found.marks == (cell_any | cell_all);
      const bool other = !full && (found.marks & cell_any) != 0;
      const unsigned fulls = __ballot_sync(0xffffffffu, full);
      const unsigned others = __ballot_sync(0xffffffffu, other);
      const unsigned below = (1u << lane) - 1;
      if constexpr (in_order) {
        if (full || other)
          tiles[next_full + next_other + __popc((fulls | others) & below)] =
              full ? inner : masked_tile(inner);
      } else {
        if (pass == 1 && full) tiles[next_full + __popc(fulls & below)] = inner;
        if (pass == 1 && other) tiles[next_other + __popc(others & below)] = inner;
        if (!by_keys && pass == 1) {
#pragma unroll
          for (int part = 0; part < list_own_parts; ++part) {
            const int row = outer * params.block_q + part * cell_rows;
            const unsigned seen = __ballot_sync(
                0xffffffffu, other && found.rows >> part & 1 && is_touched(params, row, inner));
            if (seen != 0)
              own_ends[part] = next_other + __popc(others & (2u << 31 - __clz(seen)) - 1);
          }
        }
      }
      next_full += __popc(fulls);
      next_other += __popc(others);
    }
    full_count = next_full;
    count = in_order ? next_full + next_other : next_other;
  }
  if (lane == 0) {
    int* counts = params.counts + static_cast<long long>(item) * list_counts;
    counts[full_tiles_of_list] = full_count;
    counts[tiles_of_list] = count;
#pragma unroll
    for (int part = 0; part < list_own_parts; ++part)
      counts[own_end_of_list + part] = by_keys ? count : max_int(full_count, own_ends[part]);
  }
}

// For lists by keys, whose outer tiles are KV tiles.
__device__ __forceinline__ void count_turns(const ListParams& params) {
  const int lane = threadIdx.x % 32, item = map_item();
  const int q_tiles = params.inner_tiles, kv_tiles = params.outer_tiles;
  if (item >= params.lists * q_tiles) return;
  const int q_tile = item % q_tiles, list = item / q_tiles;
  int2* turns = params.turns + static_cast<long long>(item) * kv_tiles;
  int count = 0;
  // The first pass counts the KV tiles that visit this query tile; the second writes.
  for (int pass = 0; pass < 2; ++pass) {
    int before = 0;
    for (int begin = 0; begin < kv_tiles; begin += 32) {
      const int kv_tile = begin + lane;
      bool visits = false;
      if (kv_tile < kv_tiles) {
        const TileRange touched = banded_tiles<true>(params, kv_tile).touched;
        visits = q_tile >= touched.begin && q_tile < touched.end &&
                 cells_of_tile(params, list, q_tile, kv_tile).rows != 0;
      }
      const unsigned visiting = __ballot_sync(0xffffffffu, visits);
      const int own = before + __popc(visiting & ((1u << lane) - 1));
      if (pass == 1 && visits) turns[kv_tile] = int2{own, count - 1 - own};
      before += __popc(visiting);
    }
    count = before;
  }
}

}  // namespace tilewise
