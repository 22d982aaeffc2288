// A bias whose tiles TMA has written to shared memory: 16-bit numbers with adjacent keys, in panels
// of 64 keys. For the bias itself and its gradient see common/terms/bias.cuh.
//
// A thread reads the numbers for sixteen columns of its fragment with one ldmatrix, whose four 8 x
// 8 matrices are laid out in registers like accumulators; where rows are keys, the ldmatrix
// transposes. TMA fills elements past the end of the tensor with zeros, so no element needs a
// bounds check.
#pragma once

#include "../common/layout.cuh"
#include "../common/terms/bias.cuh"
#include "ptx.cuh"

namespace tilewise::sm90 {

template <Element number, bool paired, Learned learned>
struct StagedBias : BiasGradient<number, paired, learned> {
  struct Operands {
    ptx::TensorMap bias_map;  // box 64 rows x 64 keys; dimensions of size 1 where it is broadcast
    long long bias_batch_stride, bias_head_stride;  // 0 where it is broadcast
    void* dbias;
    long long dbias_batch_stride, dbias_head_stride, dbias_row_stride, dbias_key_stride;
    float bias_in, bias_out;
  };
  static_assert(number != Element::float32);
  static constexpr bool uses_head = learned != Learned::no;

  ptx::u32 address;
  float in;
  RowsAre rows_are;
  ptx::u32 words[4];  // for eight elements

  template <typename Params, typename At>
  __device__ __forceinline__ StagedBias(const Params& params, const Unit& unit, const At& at)
      : BiasGradient<number, paired, learned>(params, at),
        address(address_of(at)),
        in(params.bias_in * unit.first * unit.second),
        rows_are(At::rows_are) {}

  // The address that a lane reads from: the second of the four matrices is eight rows further down
  // the fragment, the third eight columns to the right.
  template <typename At>
  static __device__ __forceinline__ ptx::u32 address_of(const At& at) {
    const int lane = ptx::thread_again() % 32;
    const bool by_queries = At::rows_are == RowsAre::queries;
    const int row = by_queries ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int eight = by_queries ? lane / 16 : lane / 8 % 2;
    return at.staged_rows() + swizzled_chunk(row, at.staged_chunk() + eight);
  }

  __device__ __forceinline__ float apply(float v, int i) {
    // Invariant: an offset of 16 rows keeps the swizzle of a row, and 16 keys flip two bits of it.
    if (i % 8 == 0 && rows_are == RowsAre::queries)
      ptx::ldmatrix_x4((address ^ i / 8 % 4 * 32) + i / 32 * panel_bytes(64), words);
    else if (i % 8 == 0)
      ptx::ldmatrix_x4_trans(address + i / 8 * panel_bytes(16), words);
    const ptx::u32 pair = words[i / 2 % 4];
    return fmaf(v, in, i % 2 ? ptx::unpack_high<number>(pair) : ptx::unpack_low<number>(pair));
  }
};

}  // namespace tilewise::sm90
