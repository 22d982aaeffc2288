// clang-format off
// The plain CUDA C++ kernel of GPU MODE's lecture 12, corrected: it is fused, computes everything in float32 and uses no
// tensor cores. A block owns block_q rows of one (batch, head); thread (x, y) owns row x and the columns y, y + 32, ... of
// out, in registers. Q, K, V and the scores of a tile are in shared memory.
//
//   1. load K_j, V_j                      all threads
//   2. S[x][j] = scale q_x . k_j          threads y < block_kv, one score each; softcap; -inf where hidden
//   3. m' = max(m, max_j S[x][j])         every thread of a row computes it for itself
//   4. l = l e^(m - m') + sum_j e^(S - m')
//   5. o = o e^(m - m') + sum_j e^(S - m') v_j[y + 32 i]
//   6. out = o / l, lse = m + log l
//
// Errors in the lecture's listing, which are corrected here as intended:
//   - `S_i[ii] * blockDim.x + tid_x[jj]` is S_i[ii * blockDim.x + tid_x][jj]
//   - `V_j[jj][dd + blockDim.y + tid_y]` is V_j[jj][dd * blockDim.y + tid_y]
//   - it is launched with 32 threads in x for 16 rows: half of them read and write out of bounds
//   - a length that is not a multiple of 16 reads past the end
//   - `out_l` holds the sum without the maximum that it is relative to, so it is not a log-sum-exp
// Added: heads, batches, grouped heads, strides, 16-bit types, band masks, softcap, any length.
// Kept: the tiles and the mapping of threads, with its cost: neighbouring threads read neighbouring rows of shared memory,
// which are one head dimension apart. Rows of 128 floats put all of them on one bank; a `padding` of 1 spreads them.
// clang-format on
#pragma once

#include "../common/mask.cuh"

namespace tilewise::ladder {

enum Element : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// Mirrored by `Config` in ladder/lecture.py.
struct LectureConfig {
  int element;  // Element
  int block_q;
  int block_kv;
  int head_dim;    // a multiple of 32, zero-filled
  int head_dim_v;  // likewise
  int padding;     // floats after each row in shared memory
};

struct Strides {
  long long batch, head, seq, dim;  // in elements
};

struct LectureParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;  // null, or (batch, heads, seq_q)
  Strides q_strides, k_strides, v_strides, out_strides;
  int heads;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim;  // the actual ones
  int head_dim_v;
  int band_first_shift;
  int band_end_shift;
  float scale;
  float softcap;  // 0: none
};

template <int element>
__device__ __forceinline__ float load(const void* base, long long index) {
  if constexpr (element == float32) {
    return static_cast<const float*>(base)[index];
  } else {
    const unsigned short bits = static_cast<const unsigned short*>(base)[index];
    float x = __uint_as_float(static_cast<unsigned>(bits) << 16);
    if constexpr (element == float16) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
}

template <int element>
__device__ __forceinline__ void store(void* base, long long index, float x) {
  if constexpr (element == float32) {
    static_cast<float*>(base)[index] = x;
  } else {
    unsigned short bits;
    if constexpr (element == bfloat16)
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    else
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    static_cast<unsigned short*>(base)[index] = bits;
  }
}

template <LectureConfig config>
struct LectureSmem {
  float q[config.block_q][config.head_dim + config.padding];
  float k[config.block_kv][config.head_dim + config.padding];
  float v[config.block_kv][config.head_dim_v + config.padding];
  float s[config.block_q][config.block_kv + config.padding];
};

// Loads `rows` rows from `first` on into shared memory; rows past `end` and columns past `dim` are
// zeros.
template <int element, int rows, int pitch>
__device__ __forceinline__ void load_tile(float (&tile)[rows][pitch], const void* source,
                                          const Strides& strides, int batch, int head, int first,
                                          int end, int dim, int columns) {
  const long long base = batch * strides.batch + head * strides.head;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int i = thread; i < rows * columns; i += blockDim.x * blockDim.y) {
    const int row = i / columns, column = i % columns;
    const bool there = first + row < end && column < dim;
    tile[row][column] =
        there ? load<element>(source, base + (first + row) * strides.seq + column * strides.dim)
              : 0.0f;
  }
}

template <LectureConfig config>
__device__ __forceinline__ void lecture(const LectureParams& params) {
  constexpr int columns = config.head_dim_v / 32;  // of out, per thread
  constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  LectureSmem<config>& smem = *reinterpret_cast<LectureSmem<config>*>(smem_bytes);
  const int x = threadIdx.x, y = threadIdx.y;
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / params.heads_per_kv;
  const int row_begin = blockIdx.x * config.block_q, row = row_begin + x;
  const int row_end = min_int(row_begin + config.block_q, params.seq_q);
  const Band band{params.band_first_shift, params.band_end_shift, params.seq_k};
  const TileRange tiles = touched_tiles(band, row_begin, row_end, config.block_kv);

  float m = minus_infinity, l = 0.0f, o[columns];
#pragma unroll
  for (int i = 0; i < columns; ++i) o[i] = 0.0f;
  load_tile<config.element>(smem.q, params.q, params.q_strides, batch, head, row_begin,
                            params.seq_q, params.head_dim, config.head_dim);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int key_begin = tile * config.block_kv;
    __syncthreads();  // the previous tile has been read
    load_tile<config.element>(smem.k, params.k, params.k_strides, batch, kv_head, key_begin,
                              params.seq_k, params.head_dim, config.head_dim);
    load_tile<config.element>(smem.v, params.v, params.v_strides, batch, kv_head, key_begin,
                              params.seq_k, params.head_dim_v, config.head_dim_v);
    __syncthreads();
    for (int j = y; j < config.block_kv; j += 32) {
      float s = 0.0f;
      for (int d = 0; d < config.head_dim; ++d) s += smem.q[x][d] * smem.k[j][d];
      s *= params.scale;
      if (params.softcap > 0.0f) s = params.softcap * tanhf(s / params.softcap);
      smem.s[x][j] = band.visible(row, key_begin + j) ? s : minus_infinity;
    }
    __syncthreads();
    float top = m;
    for (int j = 0; j < config.block_kv; ++j) top = fmaxf(top, smem.s[x][j]);
    if (top == minus_infinity) continue;
    const float alpha = expf(m - top);
    l *= alpha;
#pragma unroll
    for (int i = 0; i < columns; ++i) o[i] *= alpha;
    for (int j = 0; j < config.block_kv; ++j) {
      const float p = expf(smem.s[x][j] - top);
      // Why: a hidden key must have no effect even if its value is infinite, and 0 * inf is NaN.
      if (p == 0.0f) continue;
      l += p;
#pragma unroll
      for (int i = 0; i < columns; ++i) o[i] += p * smem.v[j][y + 32 * i];
    }
    m = top;
  }
  if (row >= params.seq_q) return;
  const long long base = batch * params.out_strides.batch + head * params.out_strides.head +
                         row * params.out_strides.seq;
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int column = y + 32 * i;
    if (column < params.head_dim_v)
      store<config.element>(params.out, base + column * params.out_strides.dim,
                            l == 0.0f ? 0.0f : o[i] / l);
  }
  if (y == 0 && params.lse != nullptr)
    params.lse[(static_cast<long long>(batch) * params.heads + head) * params.seq_q + row] =
        l == 0.0f ? minus_infinity : m + logf(l);
}

}  // namespace tilewise::ladder
