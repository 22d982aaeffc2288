// Tickets of the pieces of a KV tile (pieces.cuh): when each adds to the sums of its dK and dV.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace tilewise {

// How many pieces of a KV tile have taken a ticket, and how many have added to its sums.
struct PieceTickets {
  int claimed;
  int added;
};

// How many pieces of `pieces` have added, or are about to, before this one; it may add when this
// returns. In order: pieces add by their numbers. Else as they come: the first waits for no
// other and stores its sums, those after it add to them, and where `last_reads` the last waits for
// all. One thread calls it; a barrier of all that add must follow.
//
// Why this cannot hang: in order, a piece that is waited for is work with a smaller number, which
// runs already (work_tickets.cuh). Else it has taken its ticket, and so has nothing left to do but
// to add.
__device__ __forceinline__ int await_pieces(PieceTickets* tickets, int piece, int pieces,
                                            bool in_order, bool last_reads) {
  const int before = in_order ? piece : ptx::add_relaxed(&tickets->claimed, 1);
  const bool for_all = in_order || (last_reads && before == pieces - 1);
  const int awaited = for_all ? before : min_int(before, 1);
  while (ptx::load_acquire(&tickets->added) < awaited) {
  }
  return before;
}

}  // namespace tilewise
