// Tickets of the pieces of a KV tile (pieces.cuh): they determine when each piece adds to the sums
// of dK and dV.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace tilewise {

// The number of pieces of a KV tile that have taken a ticket, and the number of those that have
// added to its sums.
struct PieceTickets {
  int claimed;
  int added;
};

// Returns how many of the `pieces` pieces have added, or are about to add, before this one; this
// piece may add when it returns. In order, pieces add by their numbers. Otherwise they add in the
// order of arrival: the first waits for no other and stores its sums, later pieces add to them, and
// with `last_reads` the last waits for all others. One thread calls it; a barrier of all threads
// that add must follow.
//
// Why this cannot hang: in order, a piece that is waited for has a smaller work number, so it is
// already running (work_tickets.cuh). Otherwise it has taken its ticket, and only has to add its
// sums.
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
