// The kernel that runs before a float32 forward. It splits q, k and v, and before a backward also
// dout, into 16-bit parts: x * 2^shift = hi + lo (+ lower).
//
// A tile (64 rows of q, block_kv rows of k and v) shares one power of two, which this kernel finds;
// each part is the remainder so far, rounded to nearest. A block handles one tile at a time:
//   1. it finds the largest finite magnitude, for V also that of every row and column, and whether
//      all values are finite
//   2. it stores the fact: exponent and spread, which decide whether the forward admits the tile
//   3. it stores the parts, for which it reads the tile again, from the cache
// Inf and NaN in V become 0, because a mask may hide them and 0 * inf is NaN; the forward adds them
// to the rows that see them. In q and k they stay, in the first part. Three parts are computed for
// a forward only where two parts do not suffice for some tile.
#pragma once

#include "float32_config.cuh"

namespace tilewise::sm90::float32 {

using ptx::u16;
using ptx::u32;

struct Eight {
  float x[8];
};

__device__ __forceinline__ Eight load_eight(const float* at, int aligned) {
  Eight eight;
  if (aligned) {
    const float4 low = *reinterpret_cast<const float4*>(at);
    const float4 high = *reinterpret_cast<const float4*>(at + 4);
    eight = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.x[i] = at[i];
  }
  return eight;
}

constexpr u32 infinity_bits = 0x7f800000u;

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// floor(log2 |x|) of a finite magnitude given by its bits.
__device__ __forceinline__ int exponent_of(u32 bits) {
  if (bits == 0) return no_exponent;
  return bits >> 23 != 0 ? static_cast<int>(bits >> 23) - 127 : 31 - 149 - __clz(bits);
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = x > other ? x : other;
  }
  return x;
}

// Whether every row and column that holds nonzero values is within reach of the largest. A row of
// zeros is not: where it takes nearly all of a softmax's weight, the remaining weight of the other
// rows must still be exact. A column of zeros is.
__device__ __forceinline__ bool is_tame(const SplitSmem& smem, int rows, int columns) {
  const int max_exponent = exponent_of(smem.max_bits);
  if (max_exponent == no_exponent) return true;
  bool tame = true;
  for (int i = threadIdx.x; i < rows; i += split_threads)
    tame = tame && max_exponent - exponent_of(smem.rows[i]) <= widest_rows;
  for (int i = threadIdx.x; i < columns; i += split_threads)
    tame = tame &&
           (smem.columns[i] == 0 || max_exponent - exponent_of(smem.columns[i]) <= widest_columns);
  return tame;
}

template <int parts>
__device__ __forceinline__ void split_tile(const SplitParams& params, SplitSmem& smem, int index) {
  constexpr Element element = element_of_parts(parts);
  constexpr bool needs_range = element == Element::fp16;
  int which = 0;
  for (int i = 1; i < max_operands; ++i) which += index >= params.first_tile[i];
  const int seq = params.seq[which], dim = params.dim[which], rows = params.rows[which];
  const int tiles = ceil_div(seq, rows), tile = index - params.first_tile[which];
  const int pair = tile / tiles, row_begin = (tile - pair * tiles) * rows;
  const int batch = pair / params.heads[which], head = pair - batch * params.heads[which];
  const int count = min_int(rows, seq - row_begin), chunks = dim / 8;
  const float* x = params.x[which] + batch * params.batch_stride[which] +
                   head * params.head_stride[which] + row_begin * params.seq_stride[which];
  const bool values = which == 2;

  __syncthreads();  // the previous tile has been read
  for (int i = threadIdx.x; i < sizeof(SplitSmem) / 4; i += split_threads)
    reinterpret_cast<u32*>(&smem)[i] = 0;
  __syncthreads();
  u32 max_bits = 0, nonfinite = 0;
  for (int i = threadIdx.x; i < count * chunks; i += split_threads) {
    const int row = i / chunks, column = (i - row * chunks) * 8;
    const Eight eight = load_eight(x + row * params.seq_stride[which] + column, params.aligned);
    u32 row_max = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      u32 bits = magnitude(eight.x[j]);
      if (bits >= infinity_bits) nonfinite = 1, bits = 0;
      row_max = row_max > bits ? row_max : bits;
      if (values && needs_range) atomicMax(&smem.columns[column + j], bits);
    }
    if (values && needs_range) atomicMax(&smem.rows[row], row_max);
    max_bits = max_bits > row_max ? max_bits : row_max;
  }
  max_bits = warp_max(max_bits);
  nonfinite = warp_max(nonfinite);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&smem.max_bits, max_bits);
    atomicMax(&smem.nonfinite, nonfinite);
  }
  __syncthreads();
  const int exponent = exponent_of(smem.max_bits), shift = shift_of(exponent, element);
  const bool wide = __syncthreads_or(values && needs_range && !is_tame(smem, count, dim));
  if (threadIdx.x == 0)
    params.facts[which][tile] = {exponent, smem.nonfinite ? spread_nonfinite
                                           : wide         ? spread_wide
                                                          : spread_tame};

  const long long stride = static_cast<long long>(params.batch) * params.heads[which] * seq * dim;
  u16* out = static_cast<u16*>(params.parts[which]) +
             (static_cast<long long>(pair) * seq + row_begin) * dim;
  for (int i = threadIdx.x; i < count * chunks; i += split_threads) {
    const int row = i / chunks, column = (i - row * chunks) * 8;
    const Eight eight = load_eight(x + row * params.seq_stride[which] + column, params.aligned);
    float rest[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool finite = magnitude(eight.x[j]) < infinity_bits;
      rest[j] = finite ? scaled(eight.x[j], shift) : values ? 0.0f : eight.x[j];
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      u32 packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& low = rest[2 * j];
        float& high = rest[2 * j + 1];
        packed[j] = ptx::pack<element>(low, high);
        // A value that is not finite has no remainder: inf - inf would be NaN in a part that meets
        // other values.
        low = magnitude(low) < infinity_bits ? low - ptx::unpack_low<element>(packed[j]) : 0.0f;
        high = magnitude(high) < infinity_bits ? high - ptx::unpack_high<element>(packed[j]) : 0.0f;
      }
      ptx::store_global(out + part * stride + i * 8, packed);
    }
  }
}

template <int parts>
__device__ __forceinline__ void split(const SplitParams& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  SplitSmem& smem = *reinterpret_cast<SplitSmem*>(smem_bytes);
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  if (params.wanted != nullptr && *params.wanted == 0) return;
  if (params.refusals != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *params.refusals = 0;
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x)
    split_tile<parts>(params, smem, index);
}

}  // namespace tilewise::sm90::float32
