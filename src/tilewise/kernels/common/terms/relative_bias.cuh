// A bias by the distance of a key, from a table of its head.
//
//   v unit + table[head, key - query + zero], the index held inside the table; then v is in nats
//
// Two rows of a fragment are eight apart, and so are its columns: what row r + 8 needs in one block
// of columns, row r needed in the block before. So a number is loaded once for both, and gradients
// of both are added up first. Of the rest, lanes nine apart have the same distance.
#pragma once

#include "bias.cuh"

namespace tilewise {

template <Number number, bool learned>
struct RelativeBias {
  struct Operands {
    const void* table;
    long long table_head_stride, table_span_stride;
    float* dtable;
    long long dtable_head_stride, dtable_span_stride;
    float table_in, table_out;  // nats per v before it, and the inverse
    int table_zero, table_span;
  };
  static constexpr bool uses_head = true;
  using Bits = typename BitsOf<number>::Type;

  const Bits* table;
  float* dtable;
  const long long &stride, &dstride;
  const int& span;
  float in;
  const float& out;
  int start;  // the index of element 0
  RowsAre rows_are;
  float ahead[2], behind[2];  // numbers of this block of columns and the one before
  float pending[2], held[2];  // gradients likewise

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
  }

  // Of row r in the block of columns `block`.
  __device__ __forceinline__ int index(int block, int h) const {
    const int step = 8 * block + h;
    const int i = rows_are == RowsAre::queries ? start + step : start - step;
    return max_int(0, min_int(i, span - 1));
  }
  __device__ __forceinline__ float load(int block, int h) const {
    const Bits bits = __ldg(table + index(block, h) * stride);
    if constexpr (number == Number::float32)
      return bits;
    else
      return ptx::unpack_low<number == Number::bf16>(bits);
  }
  // The bias of element i; asked in ascending order.
  __device__ __forceinline__ float at(int i) {
    const int block = i / 4, h = i % 2;
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
      add(pending[h] + ds, i / 4 - 1, h);
      pending[h] = held[h];
      last = i / 4;
    }
  }
  __device__ __forceinline__ void end_gradient()
    requires learned
  {
#pragma unroll
    for (int h = 0; h < 2; ++h) add(pending[h], last, h);
  }

  int last;  // block of columns

  // To the sum of a distance: lanes (g, t), g = lane / 4 and t = lane % 4, have that of (g + 2, t + 1).
  __device__ __forceinline__ void add(float sum, int block, int h) {
    const int lane = ptx::thread_again() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_sync(0xffffffffu, sum, (lane + 9 * step) % 32);
      if (g + 2 * step < 8 && t + step < 4) sum += other;
    }
    if (t == 0 || g < 2) ptx::add_to_global(dtable + index(block, h) * dstride, sum);
  }
};

}  // namespace tilewise
