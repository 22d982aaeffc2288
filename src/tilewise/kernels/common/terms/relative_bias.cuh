// A bias that depends on the distance of a key, from a table per head.
//
//   v unit + table[head, key - query + zero], with the index clamped to the table; then v is in
//   nats
//
// Two rows of a fragment are eight apart, and so are its columns: in one block of columns row r + 8
// needs the numbers that row r needed in the previous block. A number is therefore loaded once for
// both, in some kernels while the scores are being computed, and the gradients of both are added up
// first. In addition, lanes nine apart have the same distance: they exchange their sums or, where
// the kernel has a room in shared memory for a warp, all sums of a warp are added up there. Where
// the sums must not depend on the order of the warps, the gradient of every score is stored, and
// the host adds up afterwards.
#pragma once

#include "bias.cuh"

namespace tilewise {

template <Element number, bool learned>
struct RelativeBias {
  struct Operands {
    const void* table;
    long long table_head_stride, table_span_stride;
    float* dtable;
    long long dtable_head_stride, dtable_span_stride;
    float table_in, table_out;  // nats per v before this term, and the inverse
    int table_zero, table_span;
  };
  static constexpr bool uses_head = true, loads_few = true;
  using Bits = typename BitsOf<number>::Type;

  const Bits* table;
  const Bits* first;  // for element 0, in a table whose numbers are adjacent
  float* dtable;
  const long long &stride, &dstride;
  bool checks = true;  // whether an index must be checked against the table
  const int& span;
  float in;
  const float& out;
  float* room = nullptr;  // this warp's space in shared memory
  int start;              // the index of element 0
  RowsAre rows_are;
  float ahead[2], behind[2];          // numbers of this block of columns and the previous one
  const float (*early)[2] = nullptr;  // numbers that are already loaded, if any: Early::numbers
  float pending[2], held[2];          // gradients, likewise
  float ds_unit = 1.0f;               // unit of these gradients

  template <typename Params, typename At>
  __device__ __forceinline__ RelativeBias(const Params& params, const Unit& unit, const At& at)
      : table(static_cast<const Bits*>(params.table) + at.head() * params.table_head_stride),
        dtable(params.dtable + at.head() * params.dtable_head_stride),
        stride(params.table_span_stride),
        dstride(params.dtable_span_stride),
        span(params.table_span),
        in(params.table_in * unit.first * unit.second),
        out(params.table_out),
        rows_are(At::rows_are),
        pending{0.0f, 0.0f} {
    const int row = at.row(), column = at.column();
    start = params.table_zero + (rows_are == RowsAre::queries ? column - row : row - column);
    first = table + start;
    if constexpr (requires { at.room(); }) room = at.room();
    if constexpr (requires { at.early(); }) early = at.early().numbers;
  }

  // The numbers of all blocks of columns of a fragment, preceded by those of the block before them.
  template <int count>
  struct Early {
    static_assert(count % 4 == 0);
    float numbers[count / 4 + 1][2];
  };
  template <int count>
  __device__ __forceinline__ void load_early(Early<count>& to) const {
    constexpr int blocks = count / 4 + 1;
    if (!checks) {
#pragma unroll
      for (int i = 0; i < 2 * blocks; ++i) to.numbers[i / 2][i % 2] = load(i / 2 - 1, i % 2);
    } else if (start + 2 * count - 7 <= 0 || start - 8 >= span - 1) {
      const float end = load(0, 0);
#pragma unroll
      for (int i = 0; i < 2 * blocks; ++i) to.numbers[i / 2][i % 2] = end;
    } else {
      // Why a loop that moves all numbers on: where each has its own address, the addresses of all
      // of them would need registers at once.
#pragma unroll 1
      for (int block = -1 - blocks % 2; block < count / 4; block += 2) {
#pragma unroll
        for (int i = 0; i < 2 * blocks; ++i)
          to.numbers[i / 2][i % 2] = i / 2 + 2 < blocks ? to.numbers[i / 2 + 2][i % 2]
                                                        : load(block + i / 2 + 2 - blocks, i % 2);
      }
    }
  }

  // Whether numbers are adjacent, and all numbers that the first `count` elements need lie in the
  // table.
  __device__ __forceinline__ bool holds(int count) const {
    const int ahead = 2 * count - 7, behind = 8;  // relative to element 0, in the order of columns
    const bool by_queries = rows_are == RowsAre::queries;
    if (early != nullptr) return true;
    return stride == 1 && start >= (by_queries ? behind : ahead) &&
           start + (by_queries ? ahead : behind) < span;
  }

  // The index for row r in the block of columns `block`.
  __device__ __forceinline__ int index(int block, int h) const {
    const int step = 8 * block + h;
    const int i = rows_are == RowsAre::queries ? start + step : start - step;
    return max_int(0, min_int(i, span - 1));
  }
  __device__ __forceinline__ float load(int block, int h) const {
    const int step = rows_are == RowsAre::queries ? 8 * block + h : -8 * block - h;
    return number_of(__ldg(checks ? table + index(block, h) * stride : first + step));
  }
  static __device__ __forceinline__ float number_of(Bits bits) {
    if constexpr (number == Element::float32)
      return bits;
    else
      return ptx::unpack_low<number>(bits);
  }
  // The bias of element i; called in ascending order.
  __device__ __forceinline__ float at(int i) {
    const int block = i / 4, h = i % 2;
    if (early != nullptr) return early[block + 1 - row_of(i)][h];
    if (row_of(i) == 1) return behind[h];
    behind[h] = block == 0 ? load(-1, h) : ahead[h];
    ahead[h] = load(block, h);
    return ahead[h];
  }
  __device__ __forceinline__ float apply(float v, int i) { return fmaf(v, in, at(i)); }
  __device__ __forceinline__ float before(float v, int i) { return (v - at(i)) * out; }

  __device__ __forceinline__ void gradient(float ds, int i)
    requires learned
  {
    const int h = i % 2;
    if (row_of(i) == 0) {
      held[h] = ds;
    } else {
      take(pending[h] + ds, i / 4 - 1, h);
      pending[h] = held[h];
      last = i / 4;
    }
  }
  __device__ __forceinline__ void end_gradient()
    requires learned
  {
#pragma unroll
    for (int h = 0; h < 2; ++h) take(pending[h], last, h);
    if (room == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) take(0.0f, last + 1, h);
    add_room(last + 1 - window);
  }

  int last;  // block of columns

  __device__ __forceinline__ void take(float sum, int block, int h) {
    if (room == nullptr)
      add(sum, block, h);
    else
      put(sum, block, h);
  }

  // --- through shared memory, where rows are keys ---

  // A row of the room holds the sums of lanes g and g + 4, g = lane / 4 < 4, in the order of
  // columns and shifted by g, so that the sums of one distance are in one column. Why such rows:
  // lanes then write to different banks.
  static constexpr int room_row = 105, room_blocks = 10;
  int window = -2;                     // the first block in the room
  float before_sum[2] = {0.0f, 0.0f};  // sums of the previous block of columns

  __device__ __forceinline__ void put(float sum, int block, int h) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Four columns further on, lane g + 4 has the same distance as g: in this block or in the
    // previous one.
    const float come = __shfl_xor_sync(0xffffffffu, t >= 2 ? before_sum[h] : sum, 18);
    const int place = 8 * (block - 1 - window) + h + 3;
    if (g < 4) room[g * (room_row - 1) + 2 * t + place] = before_sum[h] + come;
    before_sum[h] = sum;
    if (h == 1 && block - window == room_blocks) {
      add_room(room_blocks);
      window += room_blocks;
    }
  }
  // Adds the sums of several blocks to global memory.
  __device__ __forceinline__ void add_room(int blocks) {
    if (blocks == 0) return;
    const int lane = threadIdx.x % 32;
    const int end = 8 * blocks + 3;  // end of row 0
    __syncwarp();
#pragma unroll
    for (int first_place = 0; first_place < end; first_place += 32) {
      const int place = first_place + lane;
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const bool written = place >= 3 - g && place < end - g;
        sum += written ? room[g * room_row + place] : 0.0f;
      }
      const int i = start - lane / 4 + 2 * (lane % 4) + 3 - place - 8 * window;
      if (place < end)
        ptx::add_to_global(dtable + max_int(0, min_int(i, span - 1)) * dstride, sum * ds_unit);
    }
    __syncwarp();
  }

  // --- without shared memory ---

  // Adds to the sum of a distance: lanes (g, t), g = lane / 4 and t = lane % 4, have the same
  // distance as (g + 2, t + 1).
  __device__ __forceinline__ void add(float sum, int block, int h) {
    const int lane = ptx::thread_again() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_sync(0xffffffffu, sum, (lane + 9 * step) % 32);
      if (g + 2 * step < 8 && t + step < 4) sum += other;
    }
    if (t == 0 || g < 2) ptx::add_to_global(dtable + index(block, h) * dstride, sum * ds_unit);
  }
};

// For a backward whose sums have an order.
template <Element number, bool learned>
struct OrderedRelativeBias : RelativeBias<number, false> {
  static_assert(learned);
  using Base = RelativeBias<number, false>;
  struct Operands {
    const void* table;
    long long table_head_stride, table_span_stride;
    float* dtable;  // gradients of scores, with adjacent keys
    long long dtable_batch_stride, dtable_head_stride, dtable_row_stride, dtable_key_stride;
    long long dtable_span_stride;  // unused
    float table_in, table_out;
    int table_zero, table_span;
  };

  float* stored;
  Placement place;

  template <typename Params, typename At>
  __device__ __forceinline__ OrderedRelativeBias(const Params& params, const Unit& unit,
                                                 const At& at)
      : Base(params, unit, at),
        stored(params.dtable),
        place(at, params.dtable_batch_stride, params.dtable_head_stride, params.dtable_row_stride,
              params.dtable_key_stride, params.seq_q, params.seq_k) {}

  __device__ __forceinline__ void gradient(float ds, int i) {
    if (place.exists(i)) stored[place.template offset<true>(i)] = ds * this->ds_unit;
  }
};

}  // namespace tilewise
