// clang-format off
// This kernel attends few queries to many keys at memory bandwidth, with cp.async loads and mma.sync products. It runs on
// every GPU from sm_80 on.
//
// Symbols. A sequence has seq_q queries (new tokens) and seq_k keys; a KV head serves `group` query heads. The rows of a KV
// head are its (token, query head) pairs, row = token * group + head; R rows, 16 to 64, make a tile. A unit is one tile of one
// KV head of one sequence; it sees keys [begin, end), the hull over its rows. A step covers 16 keys for each of the W warps of
// a CTA and starts from `base` = begin rounded down to 16, so that a unit has n = max(1, ceil((end - base) / 16 W)) steps.
// c = scale * log2(e).
//
//   Division. KV head h belongs to set h mod `head_sets`, and CTA i works only on set i mod head_sets. The N steps of a set, in
//   the order sequence, KV head, tile, are divided into runs for A CTAs, in the same way for all sets:
//   1. where all units are alike and can be dealt out almost evenly: a run is `units_per_run` whole units; or there is one set,
//      A is a multiple of the number of units, and each unit is cut into `splits` equal parts
//   2. otherwise: there are A = min(CTAs of a set, N / min_run) runs whose lengths differ by at most one step. A run consists of
//      segments of units; all of them are whole units except possibly the first and the last
//   Why sets: the heads of a key are neighbours in memory, and CTAs that read them at the same time use the same pages of DRAM.
//
//   Each warp, for its 16 keys of a step:
//   3. S = Q K^T; the policy's terms apply row by row (common/scores.cuh); hidden scores of partial blocks = -inf
//   4. m' = max(m, c * rowmax S), alpha = 2^(m - m'), m = m'; P = 2^(c S - m), l = alpha l + rowsum P
//   5. O = alpha O + round16(P) V
//
//   Each CTA, at the end of a segment:
//   6. M = max over warps of m; O = sum 2^(m_w - M) O_w, L = sum 2^(m_w - M) l_w, in warp order, through shared memory
//   7. for a whole unit: terms may finish M and L; out = O / L, lse = ln2 (M + log2 L); without keys out = 0, lse = -inf
//   8. for a part of a unit: O, M, L go to global memory, and the CTA takes a ticket of the unit. The last CTA to take one
//      adds up the parts as in 6, in their order, finishes as in 7, and resets the ticket to zero. No CTA waits for another
//   9. more than max_direct parts are added up in groups of about sqrt(parts): each group has its own ticket, the group's
//      last CTA writes the group's sum over the group's first part, and then takes a ticket of the unit
//
// `invariant`: the bits of a row depend only on its own sequence. A unit is then divided by its n alone, into items of max(4,
// smallest power of two >= n / 64) steps; step 2 divides items, every item is a part, and its number is its slot in memory.
// Without tickets (none are left while a graph is captured) each CTA does whole units.
//
// Roles. All warps do the same work, each on its own keys; inside a segment no warp waits for another. Copies run `stages`
// steps ahead, across the ends of segments, so that memory stays busy while parts are combined. The copies of a segment's first
// step also load its Q and leave a description of the segment (Segment), which the products read. The page of a warp's block is
// looked up one step before the block is copied, so that no copy waits for the page table.
//
// Launches overlap on Hopper. Before the previous grid has ended, a CTA computes its division from the current contents of
// memory, unless a term's spans decide it. Once that grid has ended, it reads the inputs of the division again, and divides
// again if they have changed (`still_holds`). Nothing is written before that point.
//
// Shared memory (struct DecodeSmem), with the bytes of heads of 128, 8 warps, 2 stages, 16 rows:
//   ring      131072  per warp, `stages` blocks of 16 keys and their values
//   q           8192  Q of two segments: the current one and the next
//   o          69632  step 6: O of all warps. Steps 8 and 9: numbers of parts that are in flight, in two rounds; after the
//                     CTA's last segment these also use the space of ring and q
//   sums        2560  steps 8 and 9: M, later the factor, and L of the parts
//   m, l        1024  step 6: m and l of all warps; m is then replaced by the warp's factor
//   row_out      128  step 7: the address where a row of out begins
//   row_factor    64  step 7: the factor that O of a row is multiplied by
//   segment     1536  per warp, descriptions of two segments
//   is_last        4  whether this CTA took the last ticket, for all threads
//
// Synchronisation.
//   cp_async_wait, __syncwarp          a block has arrived; the lanes of one warp both copy and read it
//   __syncwarp                         all lanes have read a block; the next copies overwrite it
//   __syncthreads, in step 6           all warps have written O, m, l, and have read Q, whose buffer the next segment but one
//                                      reuses; then rows are finished: one thread per row has computed the warps' factors and
//                                      what step 7 needs
//   __syncthreads, around a ticket     all stores of a part come before it (release), all loads of other parts after it
//                                      (acquire)
//   cp_async_wait, in steps 8 and 9    numbers of a part have arrived; one thread both copies and reads them
//   __syncthreads, in steps 8 and 9    M and L of all parts are in `sums`; then rows are finished, and M is replaced by each
//                                      part's factor
//   __syncthreads, at segment begin    Q of the segment has arrived, and O, m, l of the previous segment have been read
//   __syncwarp, at segment end         all lanes have read its description, whose buffer the next segment but one reuses
// Values that are inf or NaN need care in blocks where some row does not see every key, because 0 * inf is NaN. There, such a
// value is added directly to the rows that do see it, and is zeroed before the product.
//
// Registers per thread: row_tiles * (dv / 2 for O, 8 for S, d / 4 for Q if there is one tile and d <= 128), out of 65536 /
// (threads * ctas_per_sm).
// clang-format on
#pragma once

#include "../common/cached.cuh"
#include "../common/nonfinite.cuh"
#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "overlap_ptx.cuh"
#include "tiles.cuh"

namespace tilewise::sm80 {

// Mirrored field by field by `Config` in engine/decode.py.
struct DecodeConfig {
  Element element;
  int head_dim;
  int head_dim_v;
  int warps;
  int row_tiles;  // blocks of 16 rows
  int stages;
  bool has_terms;
  int ctas_per_sm;

  TILEWISE_INLINE int rows() const { return 16 * row_tiles; }
  TILEWISE_INLINE int threads() const { return 32 * warps; }
};

struct DecodeParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  float* lse;           // null, or (batch, heads, seq_q)
  float* partial_out;   // (slots, part_rows, head_dim_v of the class)
  float* partial_sums;  // (slots, part_rows, 2): M and L
  int* tickets;  // zeros, and reset to zero: one per CTA, or two per unit if `invariant`; or null
  int batch;     // sequences
  int heads;     // query heads
  int heads_kv;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;    // the actual one
  int head_dim_v;  // likewise
  int band_first_shift;
  int band_end_shift;
  int part_rows;   // rows per unit, at most
  int unit_tiles;  // tiles per sequence, at most; 0 where queries are packed
  int invariant;
  int splits;         // parts per unit, where units are alike and are dealt out; else 0
  int units_per_run;  // likewise; 1 where splits > 1
  int min_run;        // minimum steps of a run that is not dealt out
  int head_sets;      // divides heads_kv and the grid
  int heads_of_set;   // heads_kv / head_sets
  float scale_log2;
  float softcap_in;
};

constexpr int min_item_steps = 4, max_items = 64;  // per unit, where the division is invariant
// The maximum number of parts that are added up at once: without groups, and in general. At most
// max_group^2 CTAs are launched.
constexpr int max_direct = 16, max_group = 20;

template <DecodeConfig config, typename Extents>
struct DecodeSmem {
  static constexpr int block_keys = 16;
  static constexpr int k_bytes = matrix_bytes(block_keys, config.head_dim);
  static constexpr int v_bytes = matrix_bytes(block_keys, config.head_dim_v);
  static constexpr int stride = config.head_dim_v + 8;  // makes lanes write to different banks

  // Ring, q and o are contiguous: `combine` uses them as one buffer.
  alignas(1024) unsigned char ring[config.warps][config.stages][k_bytes + v_bytes];
  unsigned char q[2][matrix_bytes(config.rows(), config.head_dim)];
  float o[config.warps][config.rows()][stride];
  float2 sums[max_group][config.rows()];  // per part: M or factor, L
  float m[config.warps][config.rows()];
  float l[config.warps][config.rows()];
  u16* row_out[config.rows()];
  float row_factor[config.rows()];
  // Per warp: the current segment and the next one.
  static constexpr int segment_ints = 24;
  int segment[config.warps][2][segment_ints];
  int is_last;
};

template <DecodeConfig config, typename Policy, typename Extents>
struct Decode {
  using Smem = DecodeSmem<config, Extents>;
  using KernelParams = ParamsOf<DecodeParams, Policy, Extents>;
  using Record = typename Extents::Record;
  static constexpr int warps = config.warps, threads = config.threads(), rows = config.rows();
  static constexpr int row_tiles = config.row_tiles, stages = config.stages;
  static constexpr int block_keys = Smem::block_keys, step_keys = block_keys * warps;
  static constexpr int d = config.head_dim, dv = config.head_dim_v;
  static constexpr bool q_in_registers = row_tiles == 1 && d <= 128;
  static constexpr int q_steps = q_in_registers ? d / 16 : 1;
  // True if units of different sequences may differ in their keys.
  static constexpr bool ragged = Extents::ragged || Policy::hides_by_span;

  const KernelParams& params;
  Smem& smem;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int group = params.heads_per_kv;
  const int heads_kv = params.heads_kv;

  // Where units are dealt out: the number of parts per unit, and the index of this CTA's part; else
  // 0.
  int splits = 0, split = 0;
  // Otherwise: N and A of a set, counted in items; its first `longer_runs` CTAs have run_items + 1
  // items.
  int total, active, run_items, longer_runs;
  int head_items;   // items per KV head of a sequence, where all are alike
  int first_items;  // items per KV head of the sequence whose number is this lane's
  int buffer = 0;   // holds Q and the description of the current segment
  u32 q[q_steps][4];
  float o[row_tiles][dv / 2];
  Softmax softmax[row_tiles];

  // --- the division ---

  // Why the test: short calls have one set, and a division takes a good part of their start.
  __device__ __forceinline__ int cta_of_set() const {
    const int cta = blockIdx.x, sets = params.head_sets;
    return sets == 1 ? cta : cta / sets;
  }
  __device__ __forceinline__ int own_set() const {
    return static_cast<int>(blockIdx.x) - cta_of_set() * params.head_sets;
  }

  struct Division {
    int base, steps, item_steps, items;
  };
  __device__ __forceinline__ Division divide(const Span& keys) const {
    Division found{keys.begin & ~(block_keys - 1), 1, 1, 1};
    if (keys.begin < keys.end) found.steps = ceil_div(keys.end - found.base, step_keys);
    if (params.invariant) {
      const int least = ceil_div(found.steps, max_items);
      found.item_steps = max_int(min_item_steps, least <= 1 ? 1 : 1 << (32 - __clz(least - 1)));
    }
    found.items = ceil_div(found.steps, found.item_steps);
    return found;
  }

  __device__ __forceinline__ int tiles_of(const Record& record) const {
    return ceil_div(sequence_of<Extents>(params, record).seq_q() * group, rows);
  }
  // The keys of a sequence that some row of a tile sees, and those that all its rows see.
  __device__ __forceinline__ SeenSpans seen(const Record& record, int b, int tile) const {
    const auto sequence = sequence_of<Extents>(params, record);
    const Band band = sequence.band();
    const int seq_q = sequence.seq_q();
    int first = 0, last = seq_q - 1;
    if (seq_q * group > rows) {
      first = tile * rows / group;
      last = (min_int((tile + 1) * rows, seq_q * group) - 1) / group;
    }
    SeenSpans keys{{band.first_key(first), band.end_key(last)},
                   {band.first_key(last), band.end_key(first)}};
    if constexpr (Policy::hides_by_span) {
      const SeenSpans own = Policy::seen_keys(params, b, first, last + 1);
      keys = {keys.some.within(own.some), keys.all.within(own.all)};
    }
    if constexpr (Policy::hides_by_data) keys.all = {0, 0};
    return keys;
  }
  // The number of items in all tiles of one KV head of a sequence.
  __device__ __forceinline__ int count_items(int b) const {
    const Record record = Extents::find(params, b);
    const int tiles = tiles_of(record);
    int sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) sum += divide(seen(record, b, tile).some).items;
    return sum;
  }
  __device__ __forceinline__ int count_all_items() {
    if constexpr (!ragged) {
      head_items = count_items(0);
      return params.batch * params.heads_of_set * head_items;
    }
    int sum = first_items = lane < params.batch ? count_items(lane) : 0;
#pragma unroll 1
    for (int b = lane + 32; b < params.batch; b += 32) sum += count_items(b);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    return sum * params.heads_of_set;
  }

  __device__ __forceinline__ void divide_runs() {
    total = count_all_items();
    const int ctas = gridDim.x / params.head_sets;
    active = max_int(1, min_int(ctas, params.invariant ? total : total / params.min_run));
    run_items = total / active;
    longer_runs = total - run_items * active;
  }
  // The first item of a CTA of a set, and the CTA that owns an item. Invariant: every CTA < A has
  // an item.
  __device__ __forceinline__ int begin_of(int cta) const {
    return cta * run_items + min_int(cta, longer_runs);
  }
  __device__ __forceinline__ int owner_of(int item) const {
    const int rest = item - longer_runs * (run_items + 1);
    return rest < 0 ? item / (run_items + 1) : longer_runs + rest / run_items;
  }

  // Consecutive steps of one unit that one CTA computes.
  struct Segment {
    int b, head_kv, tile;
    Record record;
    SeenSpans keys;
    int items;  // of the unit
    int first;  // index of the unit's first item among all items of the set
    int item;   // index within the unit of the segment's first item
    int key;    // where its first step begins
    int steps;
    int is_last;  // whether it is the CTA's last segment
  };
  static_assert(sizeof(Segment) <= 4 * Smem::segment_ints);

  // The position in the CTA's items, ahead of the warp's products.
  struct Cursor : Segment {
    int tiles;
    Division division;
    int left;  // items from this segment on
  };

  __device__ __forceinline__ void settle(Cursor& at) const {
    at.keys = seen(at.record, at.b, at.tile);
    at.division = divide(at.keys.some);
    at.items = at.division.items;
  }
  __device__ __forceinline__ int segment_items(const Cursor& at) const {
    return params.invariant ? 1 : min_int(at.items - at.item, at.left);
  }
  // Requires that `at` is at an item of a unit and that items are left.
  __device__ __forceinline__ void begin(Cursor& at) const {
    const int step = at.item * at.division.item_steps, items = segment_items(at);
    at.key = at.division.base + step * step_keys;
    at.steps = min_int(at.division.steps - step, items * at.division.item_steps);
    at.is_last = items == at.left;
  }

  // Returns the sequence that holds this item, and its first item. All lanes of a warp must call it
  // together.
  __device__ __forceinline__ int sequence_with(int item, int& first, int& per_head) const {
    if constexpr (!ragged) {
      const int each = params.heads_of_set * head_items, b = item / each;
      first = b * each;
      per_head = head_items;
      return b;
    }
    first = 0;
#pragma unroll 1
    for (int begin = 0;; begin += 32) {
      int mine = begin == 0 ? first_items : 0;
      if (begin > 0 && begin + lane < params.batch) mine = count_items(begin + lane);
      const int own = mine * params.heads_of_set;
      int through = own;  // inclusive prefix sum over lanes
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_sync(0xffffffffu, through, max_int(0, lane - lanes));
        if (lane >= lanes) through += before;
      }
      const u32 holds = __ballot_sync(0xffffffffu, item < first + through);
      if (holds != 0) {
        const int owner = 31 - __clz(holds & (0u - holds));
        first += __shfl_sync(0xffffffffu, through - own, owner);
        per_head = __shfl_sync(0xffffffffu, mine, owner);
        return begin + owner;
      }
      first += __shfl_sync(0xffffffffu, through, 31);
    }
  }

  __device__ __forceinline__ Cursor find(int item) const {
    Cursor at;
    int rest, per_head;
    at.b = sequence_with(item, rest, per_head);
    rest = item - rest;
    at.record = Extents::find(params, at.b);
    at.tiles = tiles_of(at.record);
    const int head_of_set = rest / per_head;
    at.head_kv = head_of_set * params.head_sets + own_set();
    rest -= head_of_set * per_head;
#pragma unroll 1
    for (at.tile = 0;; ++at.tile) {
      settle(at);
      if (rest < at.items) break;
      rest -= at.items;
    }
    at.first = item - rest;
    at.item = rest;
    at.left = 0;
    return at;
  }

  __device__ __forceinline__ void advance(Cursor& at) const {
    const int done = segment_items(at);
    at.left -= done;
    if (at.left == 0) return;
    at.item += done;
    if (at.item == at.items) {
      at.first += at.items;
      at.item = 0;
      bool same = false;  // whether the keys are the same
      if (++at.tile == at.tiles) {
        at.tile = 0;
        same = at.tiles == 1;
        at.head_kv += params.head_sets;
        if (at.head_kv >= heads_kv) {
          at.head_kv -= heads_kv;
          same = same && !ragged;
          do {
            at.record = Extents::find(params, ++at.b);
            at.tiles = tiles_of(at.record);
          } while (at.tiles == 0);
        }
      }
      if (!same) settle(at);
    }
    begin(at);
  }

  // --- copies ---

  __device__ __forceinline__ u32 block_at(int slot) const {
    return ptx::smem_address(smem.ring[warp][slot]);
  }
  __device__ __forceinline__ bool is_seen(const SeenSpans& keys, int key) const {
    return key < keys.some.end && key + block_keys > keys.some.begin;
  }

  // The page of the warp's next block, which is looked up before the block is copied.
  struct NextPage {
    int key = -1;  // where the block begins; -1: not looked up yet
    int page;
  };
  static constexpr bool has_pages = requires(const KernelParams& params, const Record& record) {
    Extents::page_of(params, record, 0);
  };

  __device__ __forceinline__ KeyPlace place_of(const Segment& at, int key,
                                               const NextPage& next = NextPage{}) const {
    if constexpr (has_pages) {
      const int page = next.key == key ? next.page : Extents::page_of(params, at.record, key);
      return Extents::key_place(params, at.record, key, page);
    } else {
      const auto sequence = sequence_of<Extents>(params, at.record);
      return {sequence.batch(at.b), sequence.k_start() + key};
    }
  }
  // `key`: where the warp's next block begins, if the segment has one.
  __device__ __forceinline__ void look_ahead(const Segment& at, int key, NextPage& next) const {
    if constexpr (has_pages) {
      next.key = -1;
      if (key < at.keys.some.begin || key >= at.keys.some.end) return;
      next = {key, Extents::page_of(params, at.record, key)};
    }
  }
  // Whether the rows of a block that begins at this place are contiguous.
  __device__ __forceinline__ bool is_one_piece(const KeyPlace& place) const {
    if constexpr (requires { Extents::is_one_piece(params, place, block_keys); })
      return Extents::is_one_piece(params, place, block_keys);
    else
      return true;
  }

  // Eight lanes copy the 128 bytes of a panel's row, so that a warp copies four rows at once.
  // Returns the byte offset of this lane's chunk in round i.
  __device__ __forceinline__ u32 copied_at(int i) const {
    return swizzled_chunk(lane / 8 + i % 2 * 4, lane % 8) + i / 2 * swizzle_atom_bytes;
  }
  template <int columns>
  __device__ __forceinline__ bool has_chunk(int panel) const {
    return columns % panel_columns == 0 || panel * 8 + lane % 8 < columns / 8;
  }
  template <int columns>
  __device__ __forceinline__ void copy_row(u32 to, const u16* from, int dim, bool exists) const {
#pragma unroll
    for (int panel = 0; panel < panel_count(columns); ++panel) {
      if (!has_chunk<columns>(panel)) continue;
      const bool there = exists && panel * panel_columns + lane % 8 * 8 < dim;
      ptx::cp_async_16(to + panel * panel_bytes(block_keys), from + panel * panel_columns,
                       there ? 16 : 0);
    }
  }
  __device__ __forceinline__ const u16* chunk_of(const Tensor& tensor, const KeyPlace& place,
                                                 int head) const {
    return tensor.row(place.batch, head, place.row) + lane % 8 * 8;
  }
  // Copies this warp's block that begins at `key`. Keys that the unit does not see become zeros and
  // are not read.
  __device__ __forceinline__ void load(const Segment& at, int key, int slot,
                                       const NextPage& next) const {
    if (!is_seen(at.keys, key)) return;
    const u32 block = block_at(slot);
    if (key >= at.keys.some.begin && key + block_keys <= at.keys.some.end) {
      KeyPlace place = place_of(at, key, next);
      if (is_one_piece(place)) {
        place.row += lane / 8;
        const u16* k = chunk_of(params.k, place, at.head_kv);
        const u16* v = chunk_of(params.v, place, at.head_kv);
#pragma unroll
        for (int i = 0; i < block_keys / 4; ++i) {
          copy_row<d>(block + copied_at(i), k, params.head_dim, true);
          copy_row<dv>(block + Smem::k_bytes + copied_at(i), v, params.head_dim_v, true);
          k += 4 * params.k.seq_stride;
          v += 4 * params.v.seq_stride;
        }
        return;
      }
    }
#pragma unroll 1
    for (int i = 0; i < block_keys / 4; ++i) {
      const int own = key + 4 * i + lane / 8;
      const bool exists = own >= at.keys.some.begin && own < at.keys.some.end;
      const u16 *k = static_cast<const u16*>(params.k.data),
                *v = static_cast<const u16*>(params.v.data);
      if (exists) {
        const KeyPlace place = place_of(at, own);
        k = chunk_of(params.k, place, at.head_kv);
        v = chunk_of(params.v, place, at.head_kv);
      }
      copy_row<d>(block + copied_at(i), k, params.head_dim, exists);
      copy_row<dv>(block + Smem::k_bytes + copied_at(i), v, params.head_dim_v, exists);
    }
  }

  __device__ __forceinline__ int rows_of(const Segment& at) const {
    return min_int(rows, sequence_of<Extents>(params, at.record).seq_q() * group - at.tile * rows);
  }
  __device__ __forceinline__ int token_of(const Segment& at, int row) const {
    return (at.tile * rows + row) / group;
  }
  __device__ __forceinline__ int head_of(const Segment& at, int row) const {
    return at.head_kv * group + (at.tile * rows + row) % group;
  }

  // Copies this thread's share of the segment's rows, in the same copy group as the segment's first
  // block.
  __device__ __forceinline__ void load_q(const Segment& at, int buffer) const {
    const auto sequence = sequence_of<Extents>(params, at.record);
    const int count = rows_of(at), batch = sequence.batch(at.b);
    const u32 matrix = ptx::smem_address(smem.q[buffer]);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (d / 8); i += threads) {
      const int row = i / (d / 8), chunk = i % (d / 8);
      const bool exists = row < count && chunk * 8 < params.head_dim;
      const u16* from = static_cast<const u16*>(params.q.data);
      if (exists)
        from = params.q.row(batch, head_of(at, row), sequence.q_start() + token_of(at, row)) +
               chunk * 8;
      ptx::cp_async_16(matrix + chunk / 8 * panel_bytes(rows) + swizzled_chunk(row, chunk % 8),
                       from, exists ? 16 : 0);
    }
  }
  __device__ __forceinline__ void read_q(int step, int t, u32 (&fragment)[4]) const {
    const u32 matrix = ptx::smem_address(smem.q[buffer]);
    ptx::ldmatrix_x4(column_block<rows>(lane_by_rows(matrix), step) + t * panel_bytes(16),
                     fragment);
  }

  // --- steps 3 to 5 ---

  // Where one row of a fragment lies (`at` in common/scores.cuh). Terms do not support tiles whose
  // rows belong to several heads.
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const Decode& kernel;
    const Segment& at;
    const int tile_row, first;

    __device__ __forceinline__ int row() const { return kernel.token_of(at, tile_row); }
    __device__ __forceinline__ int column() const { return first + 2 * (kernel.lane % 4); }
    __device__ __forceinline__ int batch() const { return at.b; }
    __device__ __forceinline__ int head() const { return kernel.head_of(at, tile_row); }
    __device__ __forceinline__ Band band() const {
      return sequence_of<Extents>(kernel.params, at.record).band();
    }
    __device__ __forceinline__ RowBand row_band() const {
      return sequence_of<Extents>(kernel.params, at.record).row_band();
    }
  };

  // The scores of a row take the places of a fragment's first row. The places of its second row
  // hold zeros, and the results there are discarded.
  template <typename Change>
  __device__ __forceinline__ void by_rows(const Segment& at, int first, float (&s)[row_tiles][8],
                                          Change change) const {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 2 * r;
        float v[8] = {s[t][i], s[t][i + 1], 0.0f, 0.0f, s[t][4 + i], s[t][5 + i], 0.0f, 0.0f};
        change(v, ElementCoords{*this, at, 16 * t + lane / 4 + 8 * r, first});
        s[t][i] = v[0];
        s[t][i + 1] = v[1];
        s[t][4 + i] = v[4];
        s[t][5 + i] = v[5];
      }
    }
  }

  __device__ __forceinline__ void scores(const Segment& at, int first, u32 block,
                                         float (&s)[row_tiles][8]) {
    const u32 k_lane = lane_by_columns(block);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      u32 b[4];
      ptx::ldmatrix_x4(column_block<block_keys>(k_lane, step), b);
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        u32 a[4];
        if constexpr (!q_in_registers) read_q(step, t, a);
        const auto& row = q_in_registers ? q[q_in_registers ? step : 0] : a;
        ptx::mma_m16n8k16<config.element>(&s[t][0], row, b[0], b[1]);
        ptx::mma_m16n8k16<config.element>(&s[t][4], row, b[2], b[3]);
      }
    }
    if constexpr (Policy::transforms)
      by_rows(at, first, s, [&](float (&v)[8], const ElementCoords& place) {
        Policy::apply(v, params, Unit{}, place);
      });
  }

  __device__ __forceinline__ void attend(const Segment& at, const SeenSpans& keys, int first,
                                         int slot) {
    if (!is_seen(keys, first)) return;
    const u32 block = block_at(slot);
    const bool partial = first < keys.all.begin || first + block_keys > keys.all.end;
    float s[row_tiles][8];
    scores(at, first, block, s);
    if (partial)
      by_rows(at, first, s,
              [&](float (&v)[8], const ElementCoords& place) { Policy::hide(v, params, place); });
    u32 p[row_tiles][1][4];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      float alpha[2];
      softmax[t].exact_block(s[t], params.scale_log2, alpha);
      if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < dv / 2; ++i) o[t][i] *= alpha[row_of(i)];
      }
      pack_block<config.element>(s[t], p[t]);
    }
    if (partial) set_apart_nonfinite(at, first, slot);
    const u32 v_lane = lane_by_rows(block + Smem::k_bytes);
#pragma unroll
    for (int pair = 0; pair < dv / 16; ++pair) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(column_block<block_keys>(v_lane, pair), b);
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        ptx::mma_m16n8k16<config.element>(&o[t][8 * pair], p[t][0], b[0], b[1]);
        ptx::mma_m16n8k16<config.element>(&o[t][8 * pair + 4], p[t][0], b[2], b[3]);
      }
    }
  }

  // In a block of values, adds each inf or NaN to the rows that see it and then zeroes it.
  __device__ __forceinline__ void set_apart_nonfinite(const Segment& at, int first, int slot) {
    const u32 values = block_at(slot) + Smem::k_bytes;
    u32 sum = 0;  // a sum of zeros, which is NaN once a value is not finite
#pragma unroll
    for (int i = 0; i < block_keys / 4; ++i) {
#pragma unroll
      for (int panel = 0; panel < panel_count(dv); ++panel) {
        if (!has_chunk<dv>(panel)) continue;
        const uint4 x = ptx::load_shared(values + copied_at(i) + panel * panel_bytes(block_keys));
        sum = ptx::add_zero_times<config.element>(x.x, sum);
        sum = ptx::add_zero_times<config.element>(x.y, sum);
        sum = ptx::add_zero_times<config.element>(x.z, sum);
        sum = ptx::add_zero_times<config.element>(x.w, sum);
      }
    }
    if (__builtin_expect(!__any_sync(0xffffffffu, (sum & 0x7fff7fffu) != 0), 1)) return;
    const unsigned char* block = smem.ring[warp][slot] + Smem::k_bytes;
    const Band band = sequence_of<Extents>(params, at.record).band();
#pragma unroll 1
    for (int key = 0; key < block_keys; ++key) {
      const int number = first + key;
      if (number < at.keys.some.begin || number >= at.keys.some.end) continue;
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 16 * t + lane / 4 + 8 * r, token = token_of(at, row);
          if (row >= rows_of(at) || !band.visible(token, number)) continue;
          if (!Policy::sees(params, at.b, head_of(at, row), token, number)) continue;
#pragma unroll
          for (int i = 0; i < dv / 2; i += 4) {
            const int chunk = i / 4;
            const u32 two =
                *reinterpret_cast<const u32*>(block + chunk / 8 * panel_bytes(block_keys) +
                                              swizzled_chunk(key, chunk % 8) + lane % 4 * 4);
            const u32 bad = nonfinite_bits<config.element>(two);
            if (bad & 0x8000u) o[t][i + 2 * r] += ptx::unpack_low<config.element>(two);
            if (bad & 0x80000000u) o[t][i + 2 * r + 1] += ptx::unpack_high<config.element>(two);
          }
        }
      }
    }
    __syncwarp();
    auto keep = [](u32 word) {
      const u32 bad = nonfinite_bits<config.element>(word) >> 15;  // 1 in bit 0 and bit 16
      return word & ~(bad * 0xffffu);
    };
#pragma unroll 1
    for (int i = 0; i < block_keys / 4 * panel_count(dv); ++i) {
      const int panel = i % panel_count(dv);
      if (!has_chunk<dv>(panel)) continue;
      const u32 chunk = values + copied_at(i / panel_count(dv)) + panel * panel_bytes(block_keys);
      const uint4 x = ptx::load_shared(chunk);
      ptx::store_shared(chunk, uint4{keep(x.x), keep(x.y), keep(x.z), keep(x.w)});
    }
    __syncwarp();
  }

  // --- steps 6 to 9 ---

  // 2^(m - top), for m <= top. Both may be -inf.
  __device__ __forceinline__ static float factor_of(float m, float top) {
    return ptx::ex2(m - (top == -infinity ? 0.0f : top));
  }
  __device__ __forceinline__ static void add_scaled(float4& sum, float factor, const float4& o) {
    sum.x = fmaf(factor, o.x, sum.x);
    sum.y = fmaf(factor, o.y, sum.y);
    sum.z = fmaf(factor, o.z, sum.z);
    sum.w = fmaf(factor, o.w, sum.w);
  }

  // A bit field of a word, in which the CTAs that hold a part count up.
  struct Ticket {
    int word, shift, mask;
  };
  // The parts of a unit: their count, the index of this one, their slots, and the number of parts
  // that are first added up together: `group`, or 1 if there are no groups.
  struct Parts {
    int count, index, group;
    int first_word;  // of the unit's tickets
    int word_step;   // between the words of two parts, where each part has a word of its own
    int first_slot;  // of part 0
    int next_slot;   // of part 1; the others follow, `step` apart
    int step;

    __device__ __forceinline__ int slot(int part) const {
      return part == 0 ? first_slot : next_slot + (part - 1) * step;
    }
  };
  // The parts that one CTA adds up: `count` of them, namely first, first + step, ... `index` is the
  // index of the one that this CTA contributes to.
  struct Sharing {
    int first, step, count, index;
    Ticket ticket;
  };
  __device__ __forceinline__ Parts parts_of(const Segment& at) const {
    const int items = at.items;
    if (params.invariant) {
      const int tiles_before = params.unit_tiles != 0 ? at.b * params.unit_tiles : packed_tiles(at);
      const int unit = (tiles_before + at.tile) * heads_kv + at.head_kv;
      const int first = own_set() * total + at.first;
      return {items,     at.item, items <= max_direct ? 1 : max_items / 8, 2 * unit, 1, first,
              first + 1, 1};
    }
    if (params.tickets == nullptr) return {1, 0, 1, 0, 0, 0, 0, 0};
    // A CTA has two slots: one for a part that is the first of its unit, and one for any other
    // part.
    const int cta = cta_of_set(), sets = params.head_sets;
    int first = cta - split, count = splits;
    if (splits == 0) {
      first = owner_of(at.first);
      count = owner_of(at.first + items - 1) - first + 1;
    }
    int group = 1;
    if (count > max_direct) {
      while (group * group < count) ++group;
    }
    const int word = first * sets + own_set();
    return {count, cta - first, group, word, sets, 2 * word + 1, 2 * (word + sets), 2 * sets};
  }
  // The arguments of step 9, and of step 8 for parts or for sums of groups.
  //
  // Invariant: no two counts share a field. A CTA is the first of at most one unit that continues
  // in other CTAs (shift 0, and 16 for that unit's first group), and begins at most one later group
  // of a unit that began before it (shift 8). An invariant unit has at most 8 groups of 8 parts:
  // each group has 4 bits of the unit's second word.
  __device__ __forceinline__ Sharing of_group(const Parts& parts) const {
    const int first = parts.index / parts.group * parts.group;
    Ticket ticket{parts.first_word + first * parts.word_step, first == 0 ? 16 : 8, 255};
    if (params.invariant) ticket = {parts.first_word + 1, first / parts.group * 4, 15};
    return {first, 1, min_int(parts.group, parts.count - first), parts.index - first, ticket};
  }
  __device__ __forceinline__ Sharing of_unit(const Parts& parts) const {
    return {0,
            parts.group,
            ceil_div(parts.count, parts.group),
            parts.index / parts.group,
            {parts.first_word, 0, 255}};
  }
  // An upper bound on the number of tiles of all packed sequences before this one.
  __device__ __forceinline__ int packed_tiles(const Segment& at) const {
    const auto sequence = sequence_of<Extents>(params, at.record);
    return static_cast<int>(static_cast<long long>(sequence.q_start()) * group / rows) + at.b;
  }

  // Finishes a row whose M and L are known; one thread per row runs it. For a part, M and L go to
  // global memory, in row `place` + row. Otherwise (step 7) lse is stored, and the row's factor and
  // address in out are left in shared memory for all threads.
  __device__ __forceinline__ void finish_row(const Segment& at, int row, float m, float l,
                                             bool is_part, long long place) const {
    constexpr float ln2 = 0.693147180559945309f;
    if (is_part) {
      reinterpret_cast<float2*>(params.partial_sums)[place + row] = float2{m, l};
      return;
    }
    const auto sequence = sequence_of<Extents>(params, at.record);
    const int token = token_of(at, row), head = head_of(at, row);
    const int batch = sequence.batch(at.b);
    const float factor =
        Policy::finish_row(params, ElementCoords{*this, at, row, 0}, 0, m, l, 1.0f);
    smem.row_factor[row] = l == 0.0f ? 0.0f : ptx::rcp(l) * factor;
    smem.row_out[row] = params.out.row(batch, head, sequence.q_start() + token);
    if (params.lse != nullptr)
      params.lse[first_row_of_head(params, sequence, batch, params.heads, head) + token] =
          l == 0.0f ? -infinity : (m + ptx::lg2(l)) * ln2;
  }
  __device__ __forceinline__ void store(int row, int column, const float4& o, bool is_part,
                                        long long place) const {
    if (is_part) {
      *reinterpret_cast<float4*>(params.partial_out + (place + row) * dv + column) = o;
    } else if (column < params.head_dim_v) {
      const float f = smem.row_factor[row];
      *reinterpret_cast<uint2*>(smem.row_out[row] + column) = uint2{
          ptx::pack<config.element>(o.x * f, o.y * f), ptx::pack<config.element>(o.z * f, o.w * f)};
    }
  }

  __device__ __forceinline__ void finish_segment(const Segment& at) {
    const int row_count = rows_of(at);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (16 * t + 8 * r >= row_count) continue;
        const int row = 16 * t + lane / 4 + 8 * r;
        const float l = quad_sum(softmax[t].sum[r]);
        if (lane % 4 == 0) {
          smem.m[warp][row] = softmax[t].reference[r];
          smem.l[warp][row] = l;
        }
#pragma unroll
        for (int i = 0; i < dv / 2; i += 4)
          *reinterpret_cast<float2*>(&smem.o[warp][row][2 * i + 2 * (lane % 4)]) =
              float2{o[t][i + 2 * r], o[t][i + 2 * r + 1]};
      }
    }
    __syncthreads();
    const Parts parts = parts_of(at);
    const bool is_part = parts.count > 1;
    const long long place = static_cast<long long>(parts.slot(parts.index)) * params.part_rows;
    if (threadIdx.x < row_count) {
      const int row = threadIdx.x;
      float top = -infinity, l = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) top = fmaxf(top, smem.m[w][row]);
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        const float factor = factor_of(smem.m[w][row], top);
        l = fmaf(factor, smem.l[w][row], l);
        smem.m[w][row] = factor;
      }
      finish_row(at, row, top, l, is_part, place);
    }
    __syncthreads();
    const int count = row_count * (dv / 4);
    for (int i = threadIdx.x; i < count; i += threads) {
      const int row = i / (dv / 4), column = i % (dv / 4) * 4;
      float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < warps; ++w)
        add_scaled(sum, smem.m[w][row], *reinterpret_cast<const float4*>(&smem.o[w][row][column]));
      store(row, column, sum, is_part, place);
    }
    if (parts.count == 1) return;
    // Why a loop: it keeps a single inlined copy of `combine`.
#pragma unroll 1
    for (bool whole = parts.group == 1;; whole = true) {
      const Sharing sharing = whole ? of_unit(parts) : of_group(parts);
      if (!is_last(sharing)) return;
      combine(at, parts, sharing, whole);
      if (whole) return;
    }
  }

  // Whether all other parts are in memory. Without tickets one CTA computes all parts of a unit, in
  // their order.
  __device__ __forceinline__ bool is_last(const Sharing& sharing) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      bool is_last = sharing.index == sharing.count - 1;
      if (params.tickets != nullptr) {
        const Ticket& ticket = sharing.ticket;
        int* word = params.tickets + ticket.word;
        const int before = ptx::add_acq_rel(word, 1 << ticket.shift) >> ticket.shift & ticket.mask;
        is_last = before == sharing.count - 1;
        if (is_last) ptx::add_relaxed(word, -(sharing.count << ticket.shift));
      }
      smem.is_last = is_last;
    }
    __syncthreads();
    return smem.is_last;
  }

  // Every thread copies the numbers that it adds up itself, in rounds; copies run one round ahead
  // of the additions. Copies into the ring that are in flight complete first. After the CTA's last
  // segment there are none, and the ring, Q and o all serve as space for parts. Why: the more parts
  // are in flight at once, the fewer round trips to the L2 cache are serialised.
  __device__ __forceinline__ void combine(const Segment& at, const Parts& parts,
                                          const Sharing& sharing, bool whole) const {
    constexpr int small = sizeof(smem.o) / (2 * 16 * threads);  // per thread, for one round
    constexpr int large =
        (sizeof(smem.ring) + sizeof(smem.q) + sizeof(smem.o)) / (2 * 16 * threads);
    static_assert(small >= 1);
    const int room = at.is_last ? large : small;
    const int count = rows_of(at) * (dv / 4), part_count = sharing.count;
    // Where the parts begin, in rows. `lead` is the first; the others follow, `apart` from each
    // other.
    const int lead = parts.slot(sharing.first) * params.part_rows;
    const int apart = parts.step * sharing.step * params.part_rows;
    const int others = parts.slot(sharing.first + sharing.step) * params.part_rows - apart;
    const auto row_of_part = [&](int part) {
      return static_cast<long long>(part == 0 ? lead : others + part * apart);
    };
    const auto load_sums = [&](int i) {
      return ptx::load_l2(reinterpret_cast<const float2*>(params.partial_sums) +
                          row_of_part(i / rows) + min_int(i % rows, params.part_rows - 1));
    };
    float2* const all_sums = smem.sums[0];
    const int sum_count = rows * part_count;
    float2 own_sums;
    if (threadIdx.x < sum_count) own_sums = load_sums(threadIdx.x);

    // A round has `together` parts, with `each` of the thread's numbers; these are all parts if
    // there is room.
    const int together = min_int(part_count, room), each = room / together;
    struct Round {
      int first, part;
    };
    const auto advance_round = [&](Round& round) {
      round.part += together;
      if (round.part < part_count) return;
      round.part = 0;
      round.first += each * threads;
    };
    const u32 staging =
        (at.is_last ? ptx::smem_address(&smem) : ptx::smem_address(smem.o)) + 16 * threadIdx.x;
    const auto fetch = [&](const Round& round, u32 to) {
      const int end = min_int(count, round.first + each * threads);
      const int end_part = min_int(part_count, round.part + together);
#pragma unroll 1
      for (int i = round.first; i < end; i += threads) {
#pragma unroll 4
        for (int part = round.part; part < end_part; ++part) {
          ptx::cp_async_16(to, params.partial_out + row_of_part(part) * dv + i * 4, 16);
          to += 16 * threads;
        }
      }
      ptx::cp_async_commit();
    };
    const Round first_round{static_cast<int>(threadIdx.x), 0};
    Round ahead = first_round;
    fetch(ahead, staging);
    advance_round(ahead);
    if (threadIdx.x < sum_count) all_sums[threadIdx.x] = own_sums;
#pragma unroll 1
    for (int i = threadIdx.x + threads; i < sum_count; i += threads) all_sums[i] = load_sums(i);
    __syncthreads();
    if (threadIdx.x < rows_of(at)) {
      const int row = threadIdx.x;
      float top = -infinity, l = 0.0f;
#pragma unroll 4
      for (int part = 0; part < part_count; ++part) top = fmaxf(top, smem.sums[part][row].x);
#pragma unroll 4
      for (int part = 0; part < part_count; ++part) {
        float2& own = smem.sums[part][row];
        own.x = factor_of(own.x, top);
        l = fmaf(own.x, own.y, l);
      }
      finish_row(at, row, top, l, !whole, lead);
    }
    __syncthreads();
    float4 sum;
    u32 half = 0;
#pragma unroll 1
    for (Round now = first_round; now.first < count; advance_round(now)) {
      u32 from = staging + half;
      half ^= room * 16 * threads;
      fetch(ahead, staging + half);
      advance_round(ahead);
      ptx::cp_async_wait<1>();
      const int end = min_int(count, now.first + each * threads);
      const int end_part = min_int(part_count, now.part + together);
#pragma unroll 1
      for (int i = now.first; i < end; i += threads) {
        const int row = i / (dv / 4), column = i % (dv / 4) * 4;
        if (now.part == 0) sum = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int part = now.part; part < end_part; ++part) {
          add_scaled(sum, smem.sums[part][row].x, ptx::load_shared_floats(from));
          from += 16 * threads;
        }
        if (end_part == part_count) store(row, column, sum, !whole, lead);
      }
    }
  }

  // Runs once this warp's share of Q has arrived.
  __device__ __forceinline__ void begin_segment() {
    __syncthreads();
    if constexpr (q_in_registers) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_q(step, 0, q[step]);
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      softmax[t].reset();
#pragma unroll
      for (int i = 0; i < dv / 2; ++i) o[t][i] = 0.0f;
    }
  }

  // Step 1. Invariant: one tile holds all rows of a unit.
  __device__ __forceinline__ void deal(Cursor& at) {
    const int cta = cta_of_set(), units = params.batch * params.heads_of_set;
    at.b = at.tile = 0;
    at.tiles = 1;
    at.record = Extents::find(params, 0);
    settle(at);
    splits = min_int(params.splits, at.items);
    const int run = cta / splits, unit = run * params.units_per_run;
    if (unit >= units) return;
    split = cta - run * splits;
    at.item = split * at.items / splits;
    at.left = (split + 1) * at.items / splits - at.item;
    if (params.units_per_run > 1) at.left = min_int(params.units_per_run, units - unit) * at.items;
    at.first = unit * at.items;
    at.b = unit / params.heads_of_set;
    at.head_kv = (unit - at.b * params.heads_of_set) * params.head_sets + own_set();
    begin(at);
  }

  // The items of this CTA, as a cursor at the first of them.
  __device__ __forceinline__ Cursor start() {
    Cursor at;
    at.left = 0;
    const int cta = cta_of_set();
    if (!ragged && params.splits != 0 && params.tickets != nullptr) {
      deal(at);
      return at;
    }
    divide_runs();
    if (cta >= active || total == 0) return at;
    // Without tickets a CTA computes whole units, namely those that begin among its items: both
    // ends move to the end of the unit that they fall inside. Why a loop: `find` is long, and this
    // keeps a single inlined copy of it.
    int ends[2] = {begin_of(cta), begin_of(cta + 1)};
#pragma unroll 1
    for (int look = params.tickets == nullptr ? -1 : 1; look < 2; ++look) {
      const int item = look == 0 ? ends[1] : ends[0];
      if (item >= total) continue;
      at = find(item);
      const int end = at.item == 0 ? item : at.first + at.items;
      if (look == -1) ends[0] = end;
      if (look == 0) ends[1] = end;
    }
    at.left = max_int(0, ends[1] - ends[0]);
    if (at.left > 0) begin(at);
    return at;
  }

  // Whether a division that was made before the previous grid had ended still holds; if so, `at`
  // describes its segment by the current contents of memory. Why not beyond 32 sequences, or with
  // several tiles per sequence: checking would take as long as dividing again.
  __device__ __forceinline__ bool still_holds(Cursor& at) const {
    ptx::forget_l1();
    if (params.batch > 32) return false;
    const int items = lane < params.batch ? count_items(lane) : 0;
    if (__any_sync(0xffffffffu, items != first_items)) return false;
    if (at.left == 0) return true;
    const int tiles = at.tiles;
    at.record = Extents::find(params, at.b);
    at.tiles = tiles_of(at.record);
    settle(at);
    begin(at);
    return tiles == 1 && at.tiles == 1;
  }

  // The items of this CTA. When it returns, the previous grid has ended.
  __device__ __forceinline__ Cursor start_behind_previous_grid() {
    // Terms load spans as memory that is not written during this kernel.
    if constexpr (!ptx::launches_overlap || Policy::hides_by_span) {
      ptx::wait_for_previous_grid();
      return start();
    }
    // Why a loop: it keeps a single inlined copy of `start`.
#pragma unroll 1
    for (bool has_waited = false;; has_waited = true) {
      Cursor at = start();
      if (has_waited) return at;
      ptx::wait_for_previous_grid();
      if (!ragged || still_holds(at)) return at;
      splits = split = 0;
    }
  }

  __device__ __forceinline__ void run() {
    Cursor ahead = start_behind_previous_grid();
    ptx::allow_next_grid();
    if (ahead.left == 0) return;
    // Copies run `stages` steps ahead. They begin a segment only once the last but one before it
    // has ended, because Q has two buffers.
    int ahead_step = 0, ahead_buffer = 0, ahead_slot = 0, in_flight = 0, begun = 0;
    SeenSpans keys;
    int slot = 0, key = 0, steps = 0;
    NextPage next;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      while (ahead.left > 0 && in_flight < stages && (ahead_step > 0 || begun < 2)) {
        if (ahead_step == 0) {
          if (lane == 0) *segment_at(ahead_buffer) = ahead;
          load_q(ahead, ahead_buffer);
          ahead_buffer ^= 1;
          ++begun;
          next.key = -1;
        }
        const int ahead_key = ahead.key + (ahead_step * warps + warp) * block_keys;
        load(ahead, ahead_key, ahead_slot, next);
        ptx::cp_async_commit();
        look_ahead(ahead, ahead_key + step_keys, next);
        ahead_slot = ahead_slot + 1 == stages ? 0 : ahead_slot + 1;
        ++in_flight;
        if (++ahead_step == ahead.steps) {
          ahead_step = 0;
          advance(ahead);
        }
      }
      wait_for_oldest(in_flight - 1);
      __syncwarp();
      const Segment& at = *segment_at(buffer);
      if (steps == 0) {
        keys = at.keys;
        steps = at.steps;
        key = at.key + warp * block_keys;
        begin_segment();
      }
      attend(at, keys, key, slot);
      __syncwarp();
      slot = slot + 1 == stages ? 0 : slot + 1;
      --in_flight;
      key += step_keys;
      if (--steps > 0) continue;
      finish_segment(at);
      if (at.is_last) return;
      __syncwarp();  // all lanes have read the description: lane 0 may overwrite it
      --begun;
      buffer ^= 1;
    }
  }

  // Waits until all but `others` of the steps in flight have arrived.
  template <int pending = stages - 1>
  __device__ __forceinline__ void wait_for_oldest(int others) const {
    if constexpr (pending > 0) {
      if (others < pending) {
        wait_for_oldest<pending - 1>(others);
        return;
      }
    }
    ptx::cp_async_wait<pending>();
  }

  __device__ __forceinline__ Segment* segment_at(int number) const {
    return reinterpret_cast<Segment*>(smem.segment[warp][number]);
  }
};

template <DecodeConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void decode(const ParamsOf<DecodeParams, Policy, Extents>& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Decode<config, Policy, Extents>{params,
                                  *reinterpret_cast<DecodeSmem<config, Extents>*>(smem_bytes)}
      .run();
}

}  // namespace tilewise::sm80
