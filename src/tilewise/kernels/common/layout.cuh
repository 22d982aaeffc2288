// The layout of a 16-bit matrix in shared memory: panels of 64 columns, where each row of a panel
// has 128 bytes, and the eight 16-byte chunks of a row are permuted by the row number. TMA writes
// this layout (SWIZZLE_128B) and wgmma reads it; before Hopper, threads write it and ldmatrix reads
// it. This header has no PTX: a host compiler builds it too.
#pragma once

#include "mask.cuh"

namespace tilewise {

constexpr int panel_columns = 64;
constexpr int panel_row_bytes = 128;
constexpr int swizzle_atom_bytes = 1024;  // eight rows of a panel

TILEWISE_INLINE int panel_count(int columns) { return ceil_div(columns, panel_columns); }
TILEWISE_INLINE int panel_bytes(int rows) { return rows * panel_row_bytes; }
TILEWISE_INLINE int matrix_bytes(int rows, int columns) {
  return panel_count(columns) * panel_bytes(rows);
}

// Byte offset of the 16-byte chunk `chunk` (0..7) of `row` inside a panel.
TILEWISE_INLINE int swizzled_chunk(int row, int chunk) {
  return row * panel_row_bytes + ((chunk ^ (row & 7)) << 4);
}

TILEWISE_INLINE bool chunks_of_eight_rows_hit_all_banks(int chunk) {
  unsigned seen = 0;
  for (int row = 0; row < 8; ++row) seen |= 1u << ((swizzled_chunk(row, chunk) >> 4) & 7);
  return seen == 0xffu;
}
static_assert(chunks_of_eight_rows_hit_all_banks(0) && chunks_of_eight_rows_hit_all_banks(5),
              "ldmatrix and stmatrix of one chunk column are free of bank conflicts");

}  // namespace tilewise
