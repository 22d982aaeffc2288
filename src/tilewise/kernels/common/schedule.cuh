// Maps a work index to an output tile.
//
// Work is numbered section by section; a section is a run of (batch, head) pairs whose keys and
// values fit in the L2 cache together. Inside a section the query tile is the slow index and the
// head the fast one, so that with `longest_first` (causal masks) the long tiles of the section come
// before the short ones, and neighbouring CTAs share the keys of a few heads.
// Why sections differ by at most one pair: a small last section would begin long tiles when little
// other work is left.
//
// This header has no PTX and no CUDA types: a host compiler builds it too, and tests check that the
// numbering is a bijection.
#pragma once

#include "mask.cuh"

namespace tilewise {

struct WorkTile {
  int batch;
  int head;
  int q_tile;
};

struct Schedule {
  int heads;          // query heads
  int batch_heads;    // batch * heads
  int q_tiles;        // query tiles of one head
  int sections;       // of (batch, head) pairs, 1 to batch_heads; the larger ones first
  int longest_first;  // 1: count query tiles from the last

  TILEWISE_INLINE int work_count() const { return batch_heads * q_tiles; }

  TILEWISE_INLINE WorkTile tile(int work) const {
    const int small = batch_heads / sections, larger = batch_heads - small * sections;
    const int in_larger = larger * (small + 1);  // pairs
    const int near = work / q_tiles;             // a pair of the same section
    const bool is_larger = near < in_larger;
    const int pairs = small + is_larger;
    const int start = is_larger ? 0 : in_larger;
    const int first_pair = start + (near - start) / pairs * pairs;
    const int rest = work - first_pair * q_tiles;
    const int rank = rest / pairs;
    const int pair = first_pair + rest - rank * pairs;
    const int batch = pair / heads;
    return {batch, pair - batch * heads, longest_first ? q_tiles - 1 - rank : rank};
  }
};

// The same for the heads of one sequence, where sections have `together` heads each and the last
// one has the remaining heads: the host or another kernel knows that number, so finding a tile
// takes two divisions.
struct HeadSections {
  int heads;
  int tiles;     // of one head
  int together;  // at least 1

  // WorkTile::batch is 0, and tiles are counted from the first. For work past the end, any tile.
  TILEWISE_INLINE WorkTile tile(int work) const {
    const int in_section = max_int(1, tiles) * together;
    const int section = work / in_section, rest = work - section * in_section;
    const int first_head = section * together;
    const int count = max_int(1, min_int(together, heads - first_head));
    const int rank = rest / count;
    return {0, first_head + rest - rank * count, rank};
  }
};

}  // namespace tilewise
