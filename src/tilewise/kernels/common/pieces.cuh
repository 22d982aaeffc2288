// How the work of a backward is cut into pieces for the CTAs of a grid.
//
// A backward goes through the KV tiles of every (batch, KV head) pair. The steps of a KV tile are
// the query tiles that see it, for every head of its group. A tile of more than `limit` steps is
// cut into a remainder and pieces of `limit` steps, which several CTAs work on; they add up dK and
// dV in float32. Pairs have the same tiles, so they have the same pieces, numbered tile after tile.
// Why the parts are not equal: pieces of different tiles that begin at the same step stay side by
// side, read the same queries, and can take turns at the same dQ. The host chooses the limit
// (engine/division.py) and counts the pieces by the same rule.
//
// This header has no PTX and no CUDA types: a host compiler builds it too, and
// tests/test_device_code.py drives it.
#pragma once

#include "mask.cuh"

namespace tilewise {

// A key k is seen by the rows k - end_shift < r <= k - first_shift.
struct RowBand {
  int first_shift;
  int end_shift;
  int seq_q;

  TILEWISE_INLINE int first_row(int key) const { return max_int(0, key - end_shift + 1); }
  TILEWISE_INLINE int end_row(int key) const { return min_int(seq_q, key - first_shift + 1); }
};

// The query tiles that touch a KV tile, and those in which every row sees every key of it.
struct QueryTiles {
  TileRange touched;
  TileRange full;  // Invariant: begin <= end
};

TILEWISE_INLINE TileRange touched_query_tiles(const RowBand& band, int kv_tile, int seq_k,
                                              int block_q, int block_kv) {
  const int first_key = kv_tile * block_kv, last_key = min_int(first_key + block_kv, seq_k) - 1;
  const int begin = band.first_row(first_key), end = band.end_row(last_key);
  return begin < end ? TileRange{begin / block_q, ceil_div(end, block_q)} : TileRange{0, 0};
}

// Rows past the end of the queries have weight 0 whatever they see, so only the band and the end of
// the keys make a tile partial.
TILEWISE_INLINE QueryTiles query_tiles(const RowBand& band, int kv_tile, int seq_k, int block_q,
                                       int block_kv) {
  const int first_key = kv_tile * block_kv, end_key = first_key + block_kv;
  const TileRange touched = touched_query_tiles(band, kv_tile, seq_k, block_q, block_kv);
  if (end_key > seq_k) return {touched, {0, 0}};
  const int full_rows = band.end_row(first_key);
  const int full_end = full_rows == band.seq_q ? touched.end : max_int(0, full_rows) / block_q;
  const int begin = max_int(touched.begin, ceil_div(band.first_row(end_key - 1), block_q));
  return {touched, {begin, max_int(begin, min_int(touched.end, full_end))}};
}

// A KV tile that no query sees has one piece without steps, which writes zeros.
TILEWISE_INLINE int piece_count(int steps, int limit) {
  return steps <= limit ? 1 : (steps - 1) / limit + 1;
}

struct Piece {
  int tile;
  int index;  // index among the `count` pieces of the tile
  int count;
};

// The remainder is the first piece. Why: pieces that add up in order wait for those before them,
// and the short piece, which is done early, would wait for all the others.
TILEWISE_INLINE TileRange steps_of_piece(int steps, int limit, const Piece& piece) {
  const int begin = (piece.count - 1 - piece.index) * limit;
  return {begin, min_int(begin + limit, steps)};
}

}  // namespace tilewise
