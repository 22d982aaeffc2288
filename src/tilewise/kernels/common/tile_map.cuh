// clang-format off
// The tile map of a boolean mask: which tiles of scores a kernel visits, and which of those it masks.
//
// Symbols. keep[b, h, i, j]: whether query i may see key j; a byte, with any strides, 0 where it is broadcast. A plane is the
// part of keep for one (b, h) that it distinguishes. A cell is 64 queries by 16 keys. A tile smaller than a cell is classified
// by its cells: it may be visited or masked unnecessarily, but is never missed. The band is that of the mask that the map is
// used with (mask.cuh): causal, a window, or all.
//
//   mark_cells, which reads the mask once, whatever kernels follow
//   1. any[p, r, c], all[p, r, c] over the queries and keys of the cell that exist; 32 cells of a row in a word of each
//   2. bits[p, i, j] = keep[p, i, j] (terms/kept_bits.cuh); one line where all queries see the same keys
//   turn_bits, for kernels whose rows are keys
//   3. turned[p, j, i] = bits[p, i, j]
//   list_tiles, for the tile shape of one kernel; one warp per query tile (or per KV tile, for a backward)
//   4. touched = the tiles that the band touches and in which some cell has `any`
//   5. full = those of them that the band leaves whole and in which every cell has `all`
//   6. tiles[list][0 .. full_count) = the full ones, tiles[list][full_count .. count) = the others, both ascending; or in
//      order: all ascending, with the sign bit set where one is not full. The two counts are stored,
//      together with the position after which each 64 queries of a query tile see no tile
//   count_turns, for backwards in which KV tiles take turns at a dQ; one warp per query tile
//   7. turns[list][q tile][kv tile] = the number of KV tiles that visit the query tile before this one, and after it
// A kernel walks a list from its end, as it walks a range of tiles: first the tiles that it masks, then the full ones. The
// forward of sm90 begins with the full ones (kv_tile_of in sm90/producer.cuh).
// Planes of several heads may share a list (a backward has one per KV head), which is then the union of their lists.
//
// All kernels have 4 warps per CTA and no shared memory. mark_cells uses a warp per 64 queries by 512 keys, 16 keys per lane;
// a lane has the loads of eight queries in flight, or of four where their rows begin anywhere. turn_bits uses a warp per 128
// queries by 64 keys, so that a lane stores 16 bytes.
//
// Each kernel may be launched before the previous one has ended, and computes everything that does not depend on its results
// before it waits. docs/kernels/terms.md has the figures.
// clang-format on
#pragma once

#include "extents.cuh"
#include "mask.cuh"
#include "pieces.cuh"
#include "ptx.cuh"

namespace tilewise {

constexpr int cell_rows = 64, cell_keys = 16;
constexpr int map_warps = 4;
constexpr int rows_at_once = 8;                     // rows whose loads are in flight together
constexpr int turned_rows = 128, turned_keys = 64;  // per warp

static_assert(cell_rows == list_own_rows);

// 32 adjacent cells, with one bit for each.
struct alignas(8) Cells {
  unsigned any, all;
};

struct MarkParams {
  const unsigned char* keep;
  long long batch_stride, head_stride, row_stride, key_stride;  // in bytes
  Cells* cells;    // (planes, row_blocks, words of row_cells)
  unsigned* bits;  // (planes, lines, line_words)
  int lines, line_words;
  int heads;  // planes per batch
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
  const Cells* cells;  // as in MarkParams
  int* counts;         // (lists, outer tiles, list_counts): ListCount
  int* tiles;          // (lists, outer tiles, inner tiles)
  int2* turns;         // (lists, q tiles, kv tiles), if they are counted
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

// For the kernels that read cells or bits. The next kernel in the stream, which is another of them
// or the kernel that uses the map, may then begin; it also waits before it reads. Why only then,
// and why mark_cells does not allow it at all: CTAs that wait would take the places of those that
// read the mask.
__device__ __forceinline__ void follow_in_stream() {
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();
}

// 0x80 in each byte of a word that is not 0: a boolean may be any such byte.
__device__ __forceinline__ unsigned truths(unsigned word) {
  return ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
}

// Packs the flags of two words into the highest eight bits, those of `low` below those of `high`.
// The product has no two addends at the same bit.
__device__ __forceinline__ unsigned eight_bits(unsigned low, unsigned high) {
  return (truths(high) | truths(low) >> 4) * 0x00204081u;
}
__device__ __forceinline__ unsigned sixteen_bits(uint4 bytes) {
  return __byte_perm(eight_bits(bytes.x, bytes.y), eight_bits(bytes.z, bytes.w), 0x7373) & 0xffffu;
}

// The marks of a cell so far.
struct CellMarks {
  unsigned any = 0, all = 0xffffu;  // a bit per key

  __device__ __forceinline__ void add(unsigned kept) {
    any |= kept;
    all &= kept;
  }
};

// Reads 16 adjacent bytes at any address, through the aligned words that hold them.
__device__ __forceinline__ uint4 bytes_at(const unsigned char* at) {
  const unsigned beyond = static_cast<unsigned>(reinterpret_cast<long long>(at)) % 4;
  const unsigned* from = reinterpret_cast<const unsigned*>(at - beyond);
  const unsigned words[5] = {from[0], from[1], from[2], from[3], beyond == 0 ? 0 : from[4]};
  unsigned found[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    found[i] = static_cast<unsigned>(
        (static_cast<unsigned long long>(words[i + 1]) << 32 | words[i]) >> 8 * beyond);
  return uint4{found[0], found[1], found[2], found[3]};
}

// Two lanes exchange their `first` and `second`: the lower one gets both of `first`, the upper one
// both of `second`.
struct OfLanes {
  unsigned lower, upper;
};
__device__ __forceinline__ OfLanes exchanged(unsigned first, unsigned second, int distance) {
  const bool is_upper = (threadIdx.x & distance) != 0;
  const unsigned got = __shfl_xor_sync(0xffffffffu, is_upper ? first : second, distance);
  return is_upper ? OfLanes{got, second} : OfLanes{first, got};
}

// Eight adjacent lanes have 16 bits of each of eight lines; lane i gets those of line i.
__device__ __forceinline__ uint4 bits_of_line(const unsigned (&kept)[8]) {
  unsigned pairs[4];  // pairs of lines
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = kept[2 * i] | kept[2 * i + 1] << 16;
  const OfLanes even = exchanged(pairs[0], pairs[2], 4), odd = exchanged(pairs[1], pairs[3], 4);
  const OfLanes left = exchanged(even.lower, odd.lower, 2);
  const OfLanes right = exchanged(even.upper, odd.upper, 2);
  auto halves = [](unsigned pair) {
    const OfLanes both = exchanged(pair, pair, 1);
    return __byte_perm(both.lower, both.upper, threadIdx.x & 1 ? 0x7632 : 0x5410);
  };
  return {halves(left.lower), halves(left.upper), halves(right.lower), halves(right.upper)};
}

// The lines of bits of a row of cells.
struct Lines {
  unsigned* first;
  int words;
  int cell;  // of this lane

  __device__ __forceinline__ void store(int row, unsigned kept) const {
    unsigned* line = first + static_cast<long long>(row) * words;
    reinterpret_cast<unsigned short*>(line)[cell] = static_cast<unsigned short>(kept);
  }
  // Stores eight rows from `row` on, where all lanes have whole cells: 16 bytes per lane, so that
  // two lanes fill a sector of the L2 cache.
  __device__ __forceinline__ void store_turned(int row, const unsigned (&kept)[8]) const {
    const int lane = threadIdx.x % 32;
    unsigned* line = first + static_cast<long long>(row + lane % 8) * words;
    *reinterpret_cast<uint4*>(line + cell / 32 * 16 + lane / 8 * 4) = bits_of_line(kept);
  }
};

// Marks the cell of `rows` rows, of which `load` returns sixteen bytes each, and stores their bits;
// `turned`: with Lines::store_turned. The rows of the next iteration are in flight while those of
// this one are processed. Past the end, the last row is read again. Why not __ldg: the assembler
// would sink such a load to its use; these loads stay before the stores of their iteration.
template <int at_once, bool turned = false, typename Load>
__device__ __forceinline__ void mark_rows(const Load& load, const Lines& lines, int rows,
                                          CellMarks& marks) {
  uint4 next[at_once];
  auto load_from = [&](int begin) {
#pragma unroll
    for (int i = 0; i < at_once; ++i) next[i] = load(min_int(begin + i, rows - 1));
  };
  load_from(0);
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += at_once) {
    uint4 bytes[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) bytes[i] = next[i];
    if (begin + at_once < rows) load_from(begin + at_once);
    unsigned kept[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      kept[i] = sixteen_bits(bytes[i]);
      marks.add(kept[i]);
    }
    if constexpr (turned) {
      lines.store_turned(begin, kept);
    } else {
#pragma unroll
      for (int i = 0; i < at_once; ++i) lines.store(min_int(begin + i, rows - 1), kept[i]);
    }
  }
}

__device__ __forceinline__ void mark_cells(const MarkParams& params) {
  const int chunks = ceil_div(params.row_cells, 32);
  const int lane = threadIdx.x % 32;
  const int item = map_item();
  if (item >= params.planes * params.row_blocks * chunks) return;
  const int chunk = item % chunks, row_block = item / chunks % params.row_blocks;
  const int plane = item / chunks / params.row_blocks;
  const int cell = chunk * 32 + lane;
  const int first_key = cell * cell_keys, keys_left = params.seq_k - first_key;
  const bool whole = keys_left >= cell_keys;  // why not of a clamped number: see mask.cuh
  const int first_row = row_block * cell_rows;
  // If all rows are the same, one row is read, and there is one line.
  const int rows = params.row_stride == 0 ? 1 : min_int(cell_rows, params.seq_q - first_row);
  const unsigned char* at = params.keep + plane / params.heads * params.batch_stride +
                            plane % params.heads * params.head_stride +
                            first_row * params.row_stride + first_key * params.key_stride;
  const Lines lines = {params.bits + (static_cast<long long>(plane) * params.lines +
                                      (params.lines > 1 ? first_row : 0)) *
                                         params.line_words,
                       params.line_words, cell};
  auto load = [&](int row) {
    return *reinterpret_cast<const uint4*>(at + row * params.row_stride);
  };
  CellMarks marks;
  ptx::wait_for_previous_grid();
  // How 16 keys can be read is the same for a whole mask, so the branches are uniform except for
  // the last keys of a row.
  const long long steps = params.batch_stride | params.head_stride | params.row_stride |
                          reinterpret_cast<long long>(params.keep);
  const bool aligned = params.key_stride == 1 && steps % 16 == 0;
  if (aligned && rows % rows_at_once == 0 && (chunk + 1) * 32 * cell_keys <= params.seq_k) {
    mark_rows<rows_at_once, true>(load, lines, rows, marks);
  } else if (aligned && whole) {
    mark_rows<rows_at_once>(load, lines, rows, marks);
  } else if (params.key_stride == 1 && whole) {
    mark_rows<rows_at_once / 2>([&](int row) { return bytes_at(at + row * params.row_stride); },
                                lines, rows, marks);
  } else if (cell < params.row_cells) {
#pragma unroll 1
    for (int row = 0; row < rows; ++row, at += params.row_stride) {
      unsigned bytes[cell_keys];
#pragma unroll
      for (int key = 0; key < cell_keys; ++key)
        bytes[key] = key < keys_left ? at[key * params.key_stride] : 0;
      unsigned kept = 0;
#pragma unroll
      for (int key = 0; key < cell_keys; ++key) kept |= (bytes[key] != 0 ? 1u : 0u) << key;
      marks.add(kept);
      lines.store(row, kept);
    }
  }
  const unsigned every = whole ? 0xffffu : (1u << max_int(keys_left, 0)) - 1;
  const Cells cells = {__ballot_sync(0xffffffffu, marks.any != 0),
                       __ballot_sync(0xffffffffu, (marks.all & every) == every)};
  if (lane == 0)
    params.cells[(static_cast<long long>(plane) * params.row_blocks + row_block) * chunks + chunk] =
        cells;
}

// Each lane's word is a row of bits; returns this lane's column of them. Each of five steps swaps
// the two squares off the diagonal, and the next step works on squares of half the size.
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
  follow_in_stream();
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

// The combined marks of the cells of one tile.
struct TileMarks {
  bool all;
  unsigned rows;  // of cells, a bit each: whether any of the row's has `any`
};

// A tile has at most 31 cells in a row, which lie in one word or in two.
__device__ __forceinline__ TileMarks cells_of_tile(const ListParams& params, int list, int q_tile,
                                                   int kv_tile) {
  const int row = q_tile * params.block_q, key = kv_tile * params.block_kv;
  const int rows_begin = row / cell_rows, begin = key / cell_keys;
  const int rows_end = min_int(ceil_div(row + params.block_q, cell_rows), params.row_blocks);
  const int end = min_int(ceil_div(key + params.block_kv, cell_keys), params.row_cells);
  const unsigned every = (1u << end - begin) - 1;
  const int row_words = ceil_div(params.row_cells, 32);
  const int word = begin / 32, next_word = min_int(word + 1, row_words - 1);
  TileMarks found{true, 0};
  for (int plane = 0; plane < params.planes_per_list; ++plane)
    for (int first = rows_begin; first < rows_end; first += list_own_parts) {
      const long long line =
          static_cast<long long>(list * params.planes_per_list + plane) * params.row_blocks + first;
      const Cells* cells = params.cells + line * row_words;
      Cells low[list_own_parts] = {}, high[list_own_parts] = {};
#pragma unroll
      for (int i = 0; i < list_own_parts; ++i)
        if (first + i < rows_end) {
          low[i] = cells[i * row_words + word];
          high[i] = cells[i * row_words + next_word];
        }
#pragma unroll
      for (int i = 0; i < list_own_parts; ++i) {
        const unsigned any = __funnelshift_r(low[i].any, high[i].any, begin) & every;
        const unsigned all = __funnelshift_r(low[i].all, high[i].all, begin) & every;
        if (any != 0) found.rows |= 1u << first + i - rows_begin;
        found.all = found.all && (all == every || first + i >= rows_end);
      }
    }
  return found;
}

// The tiles of the other side that a tile touches according to the band, and those that the band
// leaves whole.
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

// The KV tiles of which the 64 queries from `row` on see some keys, according to the band.
__device__ __forceinline__ TileRange own_range(const ListParams& params, int row) {
  const Band band{params.band_first_shift, params.band_end_shift, params.seq_k};
  if (row >= params.seq_q) return {0, 0};
  return touched_tiles(band, row, min_int(row + cell_rows, params.seq_q), params.block_kv);
}

template <bool by_keys, bool in_order = false>
__device__ __forceinline__ void list_tiles(const ListParams& params) {
  const int lane = threadIdx.x % 32;
  const int item = map_item();
  if (item >= params.lists * params.outer_tiles) return;
  const int outer = item % params.outer_tiles, list = item / params.outer_tiles;
  const QueryTiles banded = banded_tiles<by_keys>(params, outer);
  TileRange own_ranges[list_own_parts] = {};
  if constexpr (!by_keys)
#pragma unroll
    for (int part = 0; part < list_own_parts; ++part)
      own_ranges[part] = own_range(params, outer * params.block_q + part * cell_rows);
  follow_in_stream();
  auto look_up = [&](int inner) {
    if (inner >= banded.touched.end) return TileMarks{false, 0};
    return cells_of_tile(params, list, by_keys ? inner : outer, by_keys ? outer : inner);
  };
  auto is_full = [&](int inner, const TileMarks& marks) {
    return inner >= banded.full.begin && inner < banded.full.end && marks.all;
  };
  const int first_tile = banded.touched.begin + lane;
  const TileMarks first = look_up(first_tile);
  int full_count = 0;
  if constexpr (!in_order) {  // the full ones come first
    full_count = __popc(__ballot_sync(0xffffffffu, is_full(first_tile, first)));
#pragma unroll 1
    for (int inner = first_tile + 32; inner - lane < banded.touched.end; inner += 32)
      full_count += __popc(__ballot_sync(0xffffffffu, is_full(inner, look_up(inner))));
  }
  int* tiles = params.tiles + static_cast<long long>(item) * params.inner_tiles;
  int next_full = 0, next_other = full_count;
  int own_ends[list_own_parts] = {};
#pragma unroll 1
  for (int inner = first_tile; inner - lane < banded.touched.end; inner += 32) {
    const TileMarks found = inner == first_tile ? first : look_up(inner);
    const bool full = is_full(inner, found), other = !full && found.rows != 0;
    const unsigned fulls = __ballot_sync(0xffffffffu, full);
    const unsigned others = __ballot_sync(0xffffffffu, other);
    const unsigned below = (1u << lane) - 1;
    if constexpr (in_order) {
      if (full || other)
        tiles[next_full + next_other + __popc((fulls | others) & below)] =
            full ? inner : masked_tile(inner);
    } else {
      if (full) tiles[next_full + __popc(fulls & below)] = inner;
      if (other) tiles[next_other + __popc(others & below)] = inner;
    }
    if constexpr (!by_keys)
#pragma unroll
      for (int part = 0; part < list_own_parts; ++part) {
        const TileRange own = own_ranges[part];
        const unsigned seen = __ballot_sync(
            0xffffffffu, other && found.rows >> part & 1 && inner >= own.begin && inner < own.end);
        if (seen != 0) own_ends[part] = next_other + __popc(others & (2u << 31 - __clz(seen)) - 1);
      }
    next_full += __popc(fulls);
    next_other += __popc(others);
  }
  if (lane == 0) {
    const int count = in_order ? next_full + next_other : next_other;
    int* counts = params.counts + static_cast<long long>(item) * list_counts;
    counts[full_tiles_of_list] = next_full;
    counts[tiles_of_list] = count;
#pragma unroll
    for (int part = 0; part < list_own_parts; ++part)
      counts[own_end_of_list + part] = by_keys ? count : max_int(next_full, own_ends[part]);
  }
}

// For lists by keys, whose outer tiles are KV tiles.
__device__ __forceinline__ void count_turns(const ListParams& params) {
  follow_in_stream();
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
