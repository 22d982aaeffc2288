// The float32 forward: its compile-time choices, the range facts of its operands, its parameters
// and shared memory. For the algorithm see float32_forward.cuh.
#pragma once

#include "../common/extents.cuh"
#include "../common/fragment.cuh"
#include "../common/layout.cuh"
#include "../common/mask.cuh"
#include "../common/schedule.cuh"
#include "ptx.cuh"

namespace tilewise::sm90::float32 {

// What an operand in so many parts is split into.
TILEWISE_INLINE Element element_of_parts(int parts) {
  return parts == 3 ? Element::bf16 : Element::fp16;
}

// Mirrored field by field by `Config` in engine/sm90/float32_forward.py.
struct Config {
  int parts;       // parts of an operand: 1 or 2 of fp16, or 3 of bf16
  int head_dim;    // class of q and k: a multiple of 16; smaller heads are zero-filled up to it
  int head_dim_v;  // class of v and out, likewise
  int consumers;   // warpgroups of 64 query rows
  int block_kv;
  int k_stages;
  int v_stages;
  int value_columns;  // columns of out per value product; divides head_dim_v
  bool has_terms;  // whether the score policy has any terms; the kernels read them from the policy
  bool pingpong;   // two consumer warpgroups take turns issuing their products

  TILEWISE_INLINE Element part_element() const { return element_of_parts(parts); }
  // The wide exponent range of bf16 needs no admission: such a kernel computes only refused
  // rows.
  TILEWISE_INLINE bool takes_refused() const { return part_element() == Element::bf16; }
  TILEWISE_INLINE int block_q() const { return consumers * 64; }
  TILEWISE_INLINE int threads() const { return (consumers + 1) * 128; }
  TILEWISE_INLINE int launch_registers() const { return min_int(65536 / threads() / 8 * 8, 240); }
  TILEWISE_INLINE int consumer_registers() const {
    return min_int((launch_registers() * (consumers + 1) - producer_registers) / consumers / 8 * 8,
                   240);
  }
  static constexpr int producer_registers = 40;
};

// --- the products of parts that make up a product of split operands ---

struct Term {
  int a, b;  // parts, 0 the largest
};

TILEWISE_INLINE int term_count(int parts) { return parts * (parts + 1) / 2; }

// Why the small terms come first: the tensor core truncates its accumulator at every step, and in
// this order the accumulator is small for most of them. Terms below 2^-22 (two parts of fp16) or
// 2^-24 (three of bf16) of the largest are left out.
TILEWISE_INLINE Term term(int parts, int index) {
  // One hex digit per term, the first term in the lowest digit. Why: a loop over the terms then
  // needs no table in local memory.
  constexpr int a = 0x010201, b = 0x001021;
  const int shift = 4 * (6 - term_count(parts) + index);
  return {a >> shift & 15, b >> shift & 15};
}
static_assert(term(1, 0).a == 0 && term(1, 0).b == 0);
static_assert(term(2, 0).b == 1 && term(2, 1).a == 1 && term(2, 2).a + term(2, 2).b == 0);
static_assert(term(3, 0).a == 1 && term(3, 0).b == 1 && term(3, 1).b == 2 && term(3, 2).a == 2);

// --- range ---

enum Spread : int {
  spread_tame = 0,
  spread_wide = 1,       // rows or columns of V differ too much for fp16
  spread_nonfinite = 2,  // inf or NaN among the values
};

// Facts that the split found about a tile, that is, about the rows that share a power of two.
struct TileFact {
  int exponent;  // of the largest finite magnitude, floor(log2); `no_exponent` when all are 0
  int spread;    // Spread
};

constexpr int no_exponent = -1000;
// The largest allowed differences, as powers of two, between the largest magnitudes of rows of V,
// and between those of columns.
constexpr int widest_rows = 14, widest_columns = 12;

// The power of two by which a tile's values are multiplied before they are split. fp16: the largest
// value lands in [2^14, 2^15). bf16 has the exponents of float32, so values are not scaled unless
// lower parts would be denormal or sums would overflow.
TILEWISE_INLINE int shift_of(int exponent, Element element) {
  if (exponent == no_exponent) return 0;
  if (element != Element::bf16) return 14 - exponent;
  return exponent < -60 ? 80 : exponent >= 119 ? -8 : 0;
}

// p is in (0, 1]; multiplied by 2^weight_shift it uses the range of fp16.
TILEWISE_INLINE int weight_shift(Element element) { return element == Element::bf16 ? 0 : 14; }

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
  return __uint_as_float(static_cast<ptx::u32>(exponent + 127) << 23);
}
// 2^shift for |shift| <= 250, in two factors: a single power could overflow or be denormal.
struct PowerOfTwo : Unit {
  __device__ __forceinline__ explicit PowerOfTwo(int shift)
      : Unit{power_of_two(shift / 2), power_of_two(shift - shift / 2)} {}
};
__device__ __forceinline__ float scaled(float x, int shift) {
  const int half = shift / 2;
  return x * power_of_two(half) * power_of_two(shift - half);
}

// --- splitting ---

constexpr int split_threads = 256;
constexpr int max_tile_rows = 128, max_columns = 256;

// For q, k, v and (for a backward) dout, in this order.
constexpr int max_operands = 4;
struct SplitParams {
  const float* x[max_operands];
  long long batch_stride[max_operands], head_stride[max_operands],
      seq_stride[max_operands];   // in elements
  void* parts[max_operands];      // (parts, batch, heads, seq, dim)
  TileFact* facts[max_operands];  // (batch, heads, tiles)
  const int* wanted;              // null, or a flag: if it is 0, there is nothing to do
  int* refusals;                  // null, or to be zeroed
  int heads[max_operands];
  int seq[max_operands];
  int dim[max_operands];
  int rows[max_operands];        // rows per tile
  int first_tile[max_operands];  // counted over all operands
  int tiles;                     // total
  int batch;
  int aligned;  // 1: every row of every tensor begins at a multiple of 16 bytes
};

struct SplitSmem {
  ptx::u32 max_bits, nonfinite;
  ptx::u32 rows[max_tile_rows], columns[max_columns];  // largest magnitudes, as bits
};

// --- attention ---

struct Params {
  // All maps are (dim, seq, head, part * batch) with 64-column boxes.
  ptx::TensorMap q_map;  // box 64 rows
  ptx::TensorMap k_map;  // box block_kv rows
  ptx::TensorMap v_map;  // box block_kv rows
  const TileFact* q_facts;
  const TileFact* k_facts;
  const TileFact* v_facts;
  int* any_refused;  // null: no kernel runs before this one, which then takes all rows
  int* refused;      // (batch, heads, tiles of 64 rows)
  const float* v;
  long long v_batch_stride, v_head_stride, v_seq_stride;  // in elements
  float* out;
  long long out_batch_stride, out_head_stride, out_seq_stride;
  float* lse;  // null, or (batch, heads, seq_q): the natural logarithm of the row sums
  int batch;
  int heads;
  int heads_per_kv;
  int seq_q;
  int seq_k;
  int head_dim_v;  // the actual one
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int sections;
  int longest_first;
  int max_exponents;  // two parts of fp16: bound on the sum of the largest exponents of q and k
  float scale_log2;
  float softcap_in;
  float lse_scale;  // scale_log2 / log2(e)
};

// A CTA's rows, the KV tiles that they touch, and the addresses of their facts.
template <typename Extents>
struct Plan : Extents::Record {
  WorkTile tile;
  int row_begin;
  int parts_of_rows;  // number of 64-row parts
  TileRange touched;
  TileRange full;
  const TileFact* q_facts;
  const TileFact* k_facts;
  const TileFact* v_facts;
  int* refused;
  int out_exponent;  // out is accumulated in units of this power of two
  bool met_nonfinite;

  TILEWISE_INLINE bool partial(int kv_tile) const {
    return kv_tile < full.begin || kv_tile >= full.end;
  }
};
static_assert(sizeof(Plan<Batched>) == 80);

template <Config config, typename Extents>
struct Smem {
  alignas(1024) unsigned char q[config.consumers][config.parts][matrix_bytes(64, config.head_dim)];
  alignas(1024) unsigned char k[config.k_stages][config.parts]
                               [matrix_bytes(config.block_kv, config.head_dim)];
  alignas(1024) unsigned char v[config.v_stages][config.parts]
                               [matrix_bytes(config.block_kv, config.head_dim_v)];
  ptx::u64 q_full[config.consumers];
  ptx::u64 k_full[config.k_stages], k_empty[config.k_stages];
  ptx::u64 v_full[config.v_stages], v_empty[config.v_stages];
  Plan<Extents> plan;
};

// A position in a ring of `stages`: the producer starts with phase 1 (slots are free), consumers
// with 0.
template <int stages>
struct RingPosition {
  int stage = 0;
  ptx::u32 phase;

  __device__ __forceinline__ explicit RingPosition(ptx::u32 first_phase) : phase(first_phase) {}
  __device__ __forceinline__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

}  // namespace tilewise::sm90::float32
