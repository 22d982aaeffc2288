// clang-format off
// Attention as three kernels: S = scale Q K^T, P = softmax(mask(S)), O = P V, with S and P in global memory.
//
// Symbols. Per (batch, head): Q (seq_q x d), K (seq_k x d), V (seq_k x dv). The scores of a slab, which is some heads by some
// rows, are in one buffer (slab_heads, slab_rows, pitch) of the inputs' 16-bit type: the first kernel writes S, the second
// turns it into P in place, the third reads P.
//
//   scores   a CTA owns 64 * consumers rows and walks over `span` KV tiles: Q stays, K tiles come through a ring, and each
//            tile of S is stored by TMA while the next one is multiplied
//   softmax  a half-warp, a warp or a CTA owns a row, which is read once, held in registers and written once; only this
//            kernel knows the mask
//   values   a CTA owns 64 * consumers rows and the whole head: tiles of P and V come through a ring
//
// Masks. scores skips tiles that no row of its tile sees; values walks over the keys that its rows
// touch; softmax writes P = 0 wherever values will read and the mask hides. A hidden NaN or infinity
// in V is therefore multiplied by 0 and becomes visible, as it does in any unfused attention.
//
// Roles: one producer warp, the last, of which one thread issues all loads, and `consumers` warpgroups.
//
// Barriers
//   name            arrives, count                 waits      protects
//   q_full          producer + TMA bytes, 1        consumers  Q tile is loaded                (scores)
//   full[stage]     producer + TMA bytes, 1        consumers  K tile, or P and V tiles, are loaded
//   empty[stage]    consumer warps, 4 * consumers  producer   the tiles are read
//   named 1         consumers                      consumers  all tiles are read before out replaces them (values)
// clang-format on
#pragma once

#include "../common/layout.cuh"
#include "../common/mask.cuh"
#include "../sm90/ptx.cuh"
#include "../sm90/wgmma.cuh"

namespace tilewise::ladder {

using ptx::u32;
using ptx::u64;

// Mirrored by `_Params` in ladder/three_kernel.py. All maps are four-dimensional with boxes of 64
// columns.
struct ThreeKernelParams {
  ptx::TensorMap q_map;       // (d, seq, head, batch), boxes of scores' rows
  ptx::TensorMap k_map;       // (d, seq, head, batch), boxes of scores' keys
  ptx::TensorMap scores_map;  // (key, row, head, 1) of the slab, boxes of 16 rows, for stores
  ptx::TensorMap p_map;       // the same memory, boxes of values' rows, for loads
  ptx::TensorMap v_map;       // (dv, seq, head, batch), boxes of values' keys
  ptx::TensorMap out_map;     // (dv, seq, head, batch), boxes of 16 rows
  void* scores;
  float* lse;  // null, or (batch, heads, seq_q)
  int heads;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int pitch;       // elements between rows of the slab, a multiple of 8
  int slab_rows;   // rows of the slab's buffer
  int first_pair;  // (batch, head) pairs and rows before the slab
  int first_row;
  int span;  // KV tiles that one CTA of scores walks over
  int band_first_shift;
  int band_end_shift;
  int zero;  // 0
  float scale;
  float softcap;
};

__device__ __forceinline__ Band band_of(const ThreeKernelParams& params) {
  return {params.band_first_shift, params.band_end_shift, params.seq_k};
}

// Batch and head of a pair of the slab.
struct Place {
  int batch;
  int head;
};
__device__ __forceinline__ Place place_of(const ThreeKernelParams& params, int slab_pair) {
  const int pair = params.first_pair + slab_pair;
  return {pair / params.heads, pair % params.heads};
}

// The numbers of a kernel, by its config.
template <typename Config>
TILEWISE_INLINE Element element_of(const Config& config) {
  return config.bf16 ? Element::bf16 : Element::fp16;
}

template <int stages>
struct Ring {
  int stage = 0;
  u32 phase;
  __device__ __forceinline__ explicit Ring(u32 first_phase) : phase(first_phase) {}
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void load_panels(unsigned char* destination, const ptx::TensorMap& map,
                                            u64* barrier, int panels, int rows, int column, int row,
                                            int head, int batch, ptx::CachePolicy policy) {
  for (int panel = 0; panel < panels; ++panel)
    ptx::tma_load_4d(destination + panel * panel_bytes(rows), &map, barrier,
                     column + panel * panel_columns, row, head, batch, policy);
}

// Stores a warp's 16 rows of a 64 x (2 * count) fragment, rounded to 16 bits: they are staged at
// `room` (the warpgroup's 64-row matrix) and stored to (column, row, head, batch) of `map`.
template <Element element, int count>
__device__ __forceinline__ void store_rows(const float (&x)[count], float factor,
                                           unsigned char* room, const ptx::TensorMap& map,
                                           int column, int row, int head, int batch) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  unsigned char* staging = room + warp * panel_bytes(16);
  const u32 address = ptx::smem_address(staging);
#pragma unroll
  for (int pair = 0; pair < count / 8; ++pair) {
    const float* y = &x[8 * pair];
    const int chunk = pair % 4 * 2 + lane / 16;
    ptx::stmatrix_x4(address + pair / 4 * panel_bytes(64) + swizzled_chunk(lane % 16, chunk),
                     ptx::pack<element>(y[0] * factor, y[1] * factor),
                     ptx::pack<element>(y[2] * factor, y[3] * factor),
                     ptx::pack<element>(y[4] * factor, y[5] * factor),
                     ptx::pack<element>(y[6] * factor, y[7] * factor));
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    for (int panel = 0; panel < count * 2 / panel_columns; ++panel)
      ptx::tma_store_4d(&map, staging + panel * panel_bytes(64), column + panel * panel_columns,
                        row + warp * 16, head, batch);
    ptx::tma_store_commit();
  }
}

// --- S = scale Q K^T ---

// Mirrored by `ScoresConfig` in ladder/three_kernel.py.
struct ScoresConfig {
  bool bf16;      // else fp16
  int head_dim;   // a multiple of 64; smaller heads are zero-filled by the copy engine
  int consumers;  // warpgroups of 64 rows
  int block_kv;   // a multiple of 64
  int stages;
  int ctas_per_sm;

  TILEWISE_INLINE int rows() const { return consumers * 64; }
  TILEWISE_INLINE int threads() const { return consumers * 128 + 32; }
};

template <ScoresConfig config>
struct ScoresSmem {
  alignas(1024) unsigned char q[matrix_bytes(config.rows(), config.head_dim)];
  alignas(1024) unsigned char k[config.stages][matrix_bytes(config.block_kv, config.head_dim)];
  alignas(1024) unsigned char out[config.consumers][matrix_bytes(64, config.block_kv)];
  u64 q_full, full[config.stages], empty[config.stages];
};

template <ScoresConfig config>
__device__ __forceinline__ void load_scores(const ThreeKernelParams& params,
                                            ScoresSmem<config>& smem, TileRange tiles, int row,
                                            Place place) {
  constexpr int panels = config.head_dim / panel_columns;
  ptx::mbarrier_arrive_expect_tx(&smem.q_full, sizeof(smem.q));
  load_panels(smem.q, params.q_map, &smem.q_full, panels, config.rows(), 0, row, place.head,
              place.batch, ptx::CachePolicy::evict_first);
  Ring<config.stages> ring(1);
  for (int tile = tiles.begin; tile < tiles.end; ++tile, ring.advance()) {
    ptx::mbarrier_wait(&smem.empty[ring.stage], ring.phase);
    ptx::mbarrier_arrive_expect_tx(&smem.full[ring.stage], sizeof(smem.k[0]));
    load_panels(smem.k[ring.stage], params.k_map, &smem.full[ring.stage], panels, config.block_kv,
                0, tile * config.block_kv, place.head / params.heads_per_kv, place.batch,
                ptx::CachePolicy::evict_last);
  }
}

template <ScoresConfig config>
__device__ __forceinline__ void multiply_scores(const ThreeKernelParams& params,
                                                ScoresSmem<config>& smem, TileRange tiles,
                                                int slab_row, int slab_pair) {
  constexpr int q_panel = panel_bytes(config.rows()) >> 4;
  constexpr int k_panel = panel_bytes(config.block_kv) >> 4;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const u32 q_low =
      wgmma::descriptor_low(ptx::smem_address(smem.q) + warpgroup * panel_bytes(64), 16);
  const u32 k_first = wgmma::descriptor_low(ptx::smem_address(smem.k), 16);
  float s[config.block_kv / 2];
  Ring<config.stages> ring(0);
  ptx::mbarrier_wait(&smem.q_full, 0);
  for (int tile = tiles.begin; tile < tiles.end; ++tile, ring.advance()) {
    const u32 k_low = k_first + ring.stage * (sizeof(smem.k[0]) >> 4);
    ptx::mbarrier_wait(&smem.full[ring.stage], ring.phase);
    wgmma::hold(s);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < config.head_dim / 16; ++step)
      wgmma::Product<config.block_kv, element_of(config)>::multiply(
          s, wgmma::descriptor(q_low + step / 4 * q_panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(k_low + step / 4 * k_panel + step % 4 * 2, swizzle_atom_bytes),
          step != 0);
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(s);
    if (lane == 0) {
      ptx::mbarrier_arrive(&smem.empty[ring.stage]);
      ptx::tma_store_wait_read<0>();  // for the previous tile: its staging buffer is reused now
    }
    __syncwarp();
    store_rows<element_of(config)>(s, params.scale, smem.out[warpgroup], params.scores_map,
                                   tile * config.block_kv, slab_row + warpgroup * 64, slab_pair, 0);
  }
  if (lane == 0) ptx::tma_store_wait_read<0>();
}

// Grid: (spans of keys, tiles of the slab's rows, pairs of the slab).
template <ScoresConfig config>
__device__ __forceinline__ void scores(const ThreeKernelParams& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  ScoresSmem<config>& smem = *reinterpret_cast<ScoresSmem<config>*>(smem_bytes);
  const int slab_row = blockIdx.y * config.rows(), row = params.first_row + slab_row;
  const int row_end = min_int(row + config.rows(), params.seq_q);
  const TileRange touched = touched_tiles(band_of(params), row, row_end, config.block_kv);
  const int first = blockIdx.x * params.span;
  const TileRange tiles{max_int(touched.begin, first), min_int(touched.end, first + params.span)};
  if (tiles.empty()) return;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&params.q_map);
    ptx::prefetch_tensormap(&params.k_map);
    ptx::prefetch_tensormap(&params.scores_map);
    ptx::mbarrier_init(&smem.q_full, 1);
    for (int i = 0; i < config.stages; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], config.consumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::allow_next_grid();
  if (warp == config.consumers * 4) {
    if (ptx::elect_one())
      load_scores<config>(params, smem, tiles, row, place_of(params, blockIdx.z));
  } else {
    multiply_scores<config>(params, smem, tiles, slab_row, blockIdx.z);
  }
}

// --- O = P V ---

// Mirrored by `ValuesConfig` in ladder/three_kernel.py.
struct ValuesConfig {
  bool bf16;       // else fp16
  int head_dim_v;  // a multiple of 64
  int consumers;
  int block_k;  // keys per stage, a multiple of 64
  int stages;
  int ctas_per_sm;

  TILEWISE_INLINE int rows() const { return consumers * 64; }
  TILEWISE_INLINE int threads() const { return consumers * 128 + 32; }
  TILEWISE_INLINE int p_bytes() const { return matrix_bytes(rows(), block_k); }
  TILEWISE_INLINE int v_bytes() const { return matrix_bytes(block_k, head_dim_v); }
  TILEWISE_INLINE int room_bytes() const {
    return max_int(stages * (p_bytes() + v_bytes()), consumers * matrix_bytes(64, head_dim_v));
  }
};

template <ValuesConfig config>
struct ValuesSmem {
  // The ring: P and V of stage 0, of stage 1, ...; at the end out takes its place.
  alignas(1024) unsigned char room[config.room_bytes()];
  u64 full[config.stages], empty[config.stages];

  __device__ __forceinline__ unsigned char* p(int stage) {
    return room + stage * (config.p_bytes() + config.v_bytes());
  }
  __device__ __forceinline__ unsigned char* v(int stage) { return p(stage) + config.p_bytes(); }
};

template <int n, Element element>
struct ValueProduct;  // multiply(d, a, b): A K-major, B MN-major, both in shared memory; adds to d

// Operands after D: %a and %b, the descriptors, and %c, 1. A model of the hardware may bring its
// own.
#ifndef TW_LADDER_SS
#define TW_LADDER_SS(n, type, a, b, c)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                      \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TW_L##n \
               "}, %" #a ", %" #b ", p, 1, 1, 0, 1;\n}"                                     \
               : TW_D##n                                                                    \
               : "l"(a_desc), "l"(b_desc), "r"(1))
#endif

#define TW_VALUE_PRODUCT(n, i0, i1, i2)                                                          \
  template <Element element>                                                                     \
  struct ValueProduct<n, element> {                                                              \
    __device__ __forceinline__ static void multiply(float (&d)[n / 2], u64 a_desc, u64 b_desc) { \
      if constexpr (element == Element::bf16)                                                    \
        TW_LADDER_SS(n, "bf16", i0, i1, i2);                                                     \
      else                                                                                       \
        TW_LADDER_SS(n, "f16", i0, i1, i2);                                                      \
    }                                                                                            \
  };

TW_VALUE_PRODUCT(64, 32, 33, 34)
TW_VALUE_PRODUCT(128, 64, 65, 66)
TW_VALUE_PRODUCT(192, 96, 97, 98)
TW_VALUE_PRODUCT(256, 128, 129, 130)

template <ValuesConfig config>
__device__ __forceinline__ void load_values(const ThreeKernelParams& params,
                                            ValuesSmem<config>& smem, TileRange tiles, int slab_row,
                                            int slab_pair) {
  const Place place = place_of(params, slab_pair);
  Ring<config.stages> ring(1);
  for (int tile = tiles.begin; tile < tiles.end; ++tile, ring.advance()) {
    u64* full = &smem.full[ring.stage];
    ptx::mbarrier_wait(&smem.empty[ring.stage], ring.phase);
    ptx::mbarrier_arrive_expect_tx(full, config.p_bytes() + config.v_bytes());
    load_panels(smem.p(ring.stage), params.p_map, full, config.block_k / panel_columns,
                config.rows(), tile * config.block_k, slab_row, slab_pair, 0,
                ptx::CachePolicy::evict_first);
    load_panels(smem.v(ring.stage), params.v_map, full, config.head_dim_v / panel_columns,
                config.block_k, 0, tile * config.block_k, place.head / params.heads_per_kv,
                place.batch, ptx::CachePolicy::evict_last);
  }
}

template <ValuesConfig config>
__device__ __forceinline__ void multiply_values(const ThreeKernelParams& params,
                                                ValuesSmem<config>& smem, TileRange tiles, int row,
                                                Place place) {
  constexpr int p_panel = panel_bytes(config.rows()) >> 4;
  constexpr int stage_step = (config.p_bytes() + config.v_bytes()) >> 4;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const u32 p_first =
      wgmma::descriptor_low(ptx::smem_address(smem.p(0)) + warpgroup * panel_bytes(64), 16);
  const u32 v_first =
      wgmma::descriptor_low(ptx::smem_address(smem.v(0)), panel_bytes(config.block_k));
  float o[config.head_dim_v / 2];
#pragma unroll
  for (int i = 0; i < config.head_dim_v / 2; ++i) o[i] = 0.0f;
  wgmma::hold(o);
  Ring<config.stages> ring(0);
  int before = -1;  // the stage whose products may still run
  for (int tile = tiles.begin; tile < tiles.end; ++tile, ring.advance()) {
    const u32 p_low = p_first + ring.stage * stage_step;
    const u32 v_low = v_first + ring.stage * stage_step;
    ptx::mbarrier_wait(&smem.full[ring.stage], ring.phase);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < config.block_k / 16; ++step)
      ValueProduct<config.head_dim_v, element_of(config)>::multiply(
          o, wgmma::descriptor(p_low + step / 4 * p_panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(v_low + step * (2 * swizzle_atom_bytes >> 4), swizzle_atom_bytes));
    wgmma::commit();
    // One tile's products stay in flight, and the previous stage is free; a ring of one stage frees
    // its own.
    wgmma::wait<config.stages == 1 ? 0 : 1>();
    const int done = config.stages == 1 ? ring.stage : before;
    if (done >= 0 && lane == 0) ptx::mbarrier_arrive(&smem.empty[done]);
    before = ring.stage;
  }
  wgmma::wait<0>();
  wgmma::hold(o);
  ptx::barrier_sync<config.consumers * 128>(1);
  store_rows<element_of(config)>(o, 1.0f,
                                 smem.room + warpgroup * matrix_bytes(64, config.head_dim_v),
                                 params.out_map, 0, row + warpgroup * 64, place.head, place.batch);
  if (lane == 0) ptx::tma_store_wait_read<0>();
}

// Grid: (tiles of the slab's rows, pairs of the slab).
template <ValuesConfig config>
__device__ __forceinline__ void values(const ThreeKernelParams& params) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  ValuesSmem<config>& smem = *reinterpret_cast<ValuesSmem<config>*>(smem_bytes);
  const int slab_row = blockIdx.x * config.rows(), row = params.first_row + slab_row;
  const int row_end = min_int(row + config.rows(), params.seq_q);
  const TileRange tiles = touched_tiles(band_of(params), row, row_end, config.block_k);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&params.p_map);
    ptx::prefetch_tensormap(&params.v_map);
    ptx::prefetch_tensormap(&params.out_map);
    for (int i = 0; i < config.stages; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], config.consumers * 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_previous_grid();
  if (warp == config.consumers * 4) {
    if (ptx::elect_one()) load_values<config>(params, smem, tiles, slab_row, blockIdx.y);
  } else {
    multiply_values<config>(params, smem, tiles, row, place_of(params, blockIdx.y));
  }
}

// --- P = softmax(mask(S)) ---

// Mirrored by `SoftmaxConfig` in ladder/three_kernel.py.
struct SoftmaxConfig {
  bool bf16;   // else fp16
  int chunks;  // chunks of eight keys per thread, held in registers; 0: rows of any length, read
               // twice
  int row_threads;  // half a warp, a warp, or all threads of a CTA
  int warps;
  bool softcap;
  int values_rows;  // rows and keys of the tiles in which `values` reads P
  int values_keys;

  TILEWISE_INLINE int rows() const { return warps * 32 / row_threads; }
  TILEWISE_INLINE int chunk_keys() const { return row_threads * 8; }
};

struct RowSpan {
  int first, end;  // visible keys
  int from, to;    // keys that `values` reads, both multiples of 8
};

template <SoftmaxConfig config>
__device__ __forceinline__ RowSpan span_of(const ThreeKernelParams& params, int row) {
  const Band band = band_of(params);
  const int tile_row = row / config.values_rows * config.values_rows;
  const TileRange touched = touched_tiles(
      band, tile_row, min_int(tile_row + config.values_rows, params.seq_q), config.values_keys);
  return {band.first_key(row), band.end_key(row), touched.begin * config.values_keys,
          min_int(touched.end * config.values_keys, params.pitch)};
}

constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);
constexpr float log2_e = 1.4426950408889634f;
constexpr float ln_2 = 0.6931471805599453f;

// A row's scores as stored in memory: eight at a time, the hidden ones replaced by -inf.
template <SoftmaxConfig config>
struct Cells {
  static constexpr u32 hidden = element_of(config) == Element::bf16 ? 0xff80u : 0xfc00u;  // -inf

  uint4* row;
  RowSpan span;

  // Keys outside [from, to) are not read.
  __device__ __forceinline__ uint4 load(int key) const {
    constexpr u32 both = hidden << 16 | hidden;
    uint4 cell{both, both, both, both};
    if (key < span.to) cell = row[key / 8];
    // Why: most cells lie inside the span, and two comparisons per cell are cheaper than per score.
    if (key >= span.first && key + 8 <= span.end) return cell;
    return {hide(cell.x, key), hide(cell.y, key + 2), hide(cell.z, key + 4), hide(cell.w, key + 6)};
  }

  __device__ __forceinline__ u32 hide(u32 pair, int key) const {
    if (key < span.first || key >= span.end) pair = (pair & 0xffff0000u) | hidden;
    if (key + 1 < span.first || key + 1 >= span.end) pair = (pair & 0xffffu) | hidden << 16;
    return pair;
  }
};

// Scores in log2 units, capped.
template <SoftmaxConfig config>
__device__ __forceinline__ void unpack_scores(const uint4& cell, float softcap, float (&s)[8]) {
  const u32 words[4] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 word = words[i / 2];
    s[i] = i % 2 ? ptx::unpack_high<element_of(config)>(word)
                 : ptx::unpack_low<element_of(config)>(word);
    if constexpr (config.softcap) {  // tanh(x) = 1 - 2 / (1 + e^2x)
      const float e = ptx::ex2(2.0f * log2_e * s[i] / softcap);
      const float capped = softcap * fmaf(-2.0f, __frcp_rn(1.0f + e), 1.0f);
      s[i] = s[i] == minus_infinity ? s[i] : capped;
    }
    s[i] *= log2_e;
  }
}

template <Element element>
__device__ __forceinline__ uint4 pack_weights(const float (&s)[8], float base) {
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) p[i] = ptx::ex2(s[i] - base);
  return {ptx::pack<element>(p[0], p[1]), ptx::pack<element>(p[2], p[3]),
          ptx::pack<element>(p[4], p[5]), ptx::pack<element>(p[6], p[7])};
}

// Combines a value over the threads of a row. The warps of a row that has several exchange their
// values through shared memory.
template <SoftmaxConfig config, typename Combine>
__device__ __forceinline__ float over_row(float x, Combine combine) {
  constexpr int lanes = min_int(config.row_threads, 32), warps = config.row_threads / lanes;
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if constexpr (warps > 1) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    float* of_warp = reinterpret_cast<float*>(smem_bytes);
    __syncthreads();  // the previous values there have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) x = combine(x, of_warp[warp]);
  }
  return x;
}
template <SoftmaxConfig config>
__device__ __forceinline__ float row_max(float x) {
  return over_row<config>(x, [](float a, float b) { return fmaxf(a, b); });
}

// log2 of the sum of 2^s over the row, for threads that hold their own maximum and their sum
// relative to it; -inf for a row that sees no key.
template <SoftmaxConfig config>
__device__ __forceinline__ float row_total(float top, float sum) {
  const float best = row_max<config>(top);
  const float base = best == minus_infinity ? 0.0f : best;
  sum = over_row<config>(sum * ptx::ex2(top - base), [](float a, float b) { return a + b; });
  return best == minus_infinity ? best : best + __log2f(sum);
}

// Returns the same cell, in a form that the compiler cannot evaluate before `after` is known.
// `zero` is 0.
__device__ __forceinline__ void refresh(uint4& cell, float after, u32 zero) {
  const u32 nothing = __float_as_uint(after) & zero;
  cell = {cell.x ^ nothing, cell.y ^ nothing, cell.z ^ nothing, cell.w ^ nothing};
}

// Handles a row that its threads can hold: it is read once and written once. `zero` is 0, which the
// compiler cannot know.
template <SoftmaxConfig config>
__device__ __forceinline__ float held_row(const Cells<config>& cells, float softcap, u32 zero) {
  const int first = cells.span.from + threadIdx.x % config.row_threads * 8;
  uint4 held[config.chunks];
  float s[8], top = minus_infinity, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) held[i] = cells.load(first + i * config.chunk_keys());
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    unpack_scores<config>(held[i], softcap, s);
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, s[j]);
  }
  top = row_max<config>(top);
  const float base = top == minus_infinity ? 0.0f : top;
  // Why `refresh`: unpacking again is cheap, but the compiler would rather do it early and keep the
  // result, in three times the registers; so each pass is made to depend on the one before it.
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    refresh(held[i], top, zero);
    unpack_scores<config>(held[i], softcap, s);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += ptx::ex2(s[j] - base);
  }
  const float total = row_total<config>(top, sum);
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const int key = first + i * config.chunk_keys();
    refresh(held[i], total, zero);
    unpack_scores<config>(held[i], softcap, s);
    if (key < cells.span.to)
      cells.row[key / 8] =
          pack_weights<element_of(config)>(s, total == minus_infinity ? 0.0f : total);
  }
  return total;
}

// Handles a longer row: it is read twice, with a running maximum.
template <SoftmaxConfig config>
__device__ __forceinline__ float streamed_row(const Cells<config>& cells, float softcap) {
  const int first = cells.span.from + threadIdx.x % config.row_threads * 8;
  float s[8], top = minus_infinity, sum = 0.0f;
  for (int key = first; key < cells.span.to; key += config.chunk_keys()) {
    unpack_scores<config>(cells.load(key), softcap, s);
    float best = top;
#pragma unroll
    for (int j = 0; j < 8; ++j) best = fmaxf(best, s[j]);
    if (best == minus_infinity) continue;
    sum *= ptx::ex2(top - best);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += ptx::ex2(s[j] - best);
    top = best;
  }
  const float total = row_total<config>(top, sum);
  for (int key = first; key < cells.span.to; key += config.chunk_keys()) {
    unpack_scores<config>(cells.load(key), softcap, s);
    cells.row[key / 8] =
        pack_weights<element_of(config)>(s, total == minus_infinity ? 0.0f : total);
  }
  return total;
}

// Grid: (rows of the slab / rows of a CTA, pairs of the slab).
template <SoftmaxConfig config>
__device__ __forceinline__ void softmax(const ThreeKernelParams& params) {
  const int slab_row = blockIdx.x * config.rows() + threadIdx.x / config.row_threads;
  const int row = params.first_row + slab_row;
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  // Threads without a row stay, because half a warp shuffles with the other half. They read and
  // write nothing.
  const bool exists = slab_row < params.slab_rows && row < params.seq_q;
  const long long place = static_cast<long long>(blockIdx.y) * params.slab_rows + slab_row;
  const Cells<config> cells{reinterpret_cast<uint4*>(params.scores) + place * (params.pitch / 8),
                            exists ? span_of<config>(params, row) : RowSpan{}};
  float total;
  if constexpr (config.chunks > 0)
    total = held_row(cells, params.softcap, params.zero);
  else
    total = streamed_row(cells, params.softcap);
  if (exists && params.lse != nullptr && threadIdx.x % config.row_threads == 0)
    params.lse[(static_cast<long long>(params.first_pair) + blockIdx.y) * params.seq_q + row] =
        total * ln_2;
}

// --- an empty kernel, which measures the cost of three launches ---

__device__ __forceinline__ void nothing(const ThreeKernelParams&) {}

}  // namespace tilewise::ladder
