// Finds the piece of work that has a given number, with a warp.
#pragma once

#include "pieces.cuh"

namespace tilewise {

// The piece with the number `rank`, where tiles are counted from the last if `from_last`;
// `steps(tile)` returns the number of steps of a tile. All lanes of a warp must call it: each
// examines one of 32 tiles.
template <typename Steps>
__device__ __forceinline__ Piece find_piece(int rank, int tiles, int limit, bool from_last,
                                            Steps steps) {
  const int lane = threadIdx.x % 32;
  int before = 0;  // pieces of the tiles examined so far
  for (int begin = 0;; begin += 32) {
    const int at = begin + lane, tile = from_last ? tiles - 1 - at : at;
    const int mine = at < tiles ? piece_count(steps(tile), limit) : 0;
    int end = mine;  // pieces up to this lane's tile
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_sync(0xffffffffu, end, max_int(lane - distance, 0));
      if (lane >= distance) end += other;
    }
    const int index = rank - before - (end - mine);
    int owner = index >= 0 && index < mine ? lane : -1;
    for (int distance = 16; distance > 0; distance /= 2)
      owner = max_int(owner, __shfl_xor_sync(0xffffffffu, owner, distance));
    if (owner >= 0)
      return {__shfl_sync(0xffffffffu, tile, owner), __shfl_sync(0xffffffffu, index, owner),
              __shfl_sync(0xffffffffu, mine, owner)};
    before += __shfl_sync(0xffffffffu, end, 31);
  }
}

}  // namespace tilewise
