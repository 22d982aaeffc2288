// clang-format off
// This kernel computes the gradient of a bias that batches or heads share, on Hopper, with TMA loads, wgmma products and sums
// in registers. It runs in addition to backward.cuh, which computes dQ, dK and dV.
//
// Symbols as in backward.cuh: Q, dO of a (batch, head) pair, K, V of its KV head, and the row terms that preprocess computed
// from lse and D. The pairs that share one plane of the bias differ only in dimensions over which the bias is broadcast. A work
// tile is 128 queries x 128 keys of a plane. Each CTA takes work tiles until none is left, and goes through the pairs of the
// plane, except those in which the mask hides the whole tile:
//
//   1. S = Q K^T, dP = dO V^T            wgmma, all in shared memory, 64 queries per warpgroup
//   2. the policy's terms (common/scores.cuh), the row term, hidden keys: P = 2^(c S - lse)
//   3. sums += P (dP - D)                float32, in registers, in the order of the pairs: the same bits every time
//   4. after the last pair               dBias = sums, every score once: nothing has to be zeroed beforehand
// No term has a slope (staged_bias.cuh), so dS is also the gradient of each term.
//
// Roles. Warpgroup 0: one thread, the producer, issues all loads. Warpgroups 1 and 2 do everything else.
//
// Shared memory (struct BiasGradientSmem): a ring of slots, which hold Q with K and dO with V alternately; the tile of the
// bias, 64 rows per warpgroup; barriers.
//
// Barriers
//   name          arrives, count            waits      protects
//   full[slot]    producer + TMA bytes, 1   1 and 2    two operands are loaded
//   empty[slot]   warps of 1 and 2, 8       producer   both operands are read
//   bias_full     producer + TMA bytes, 1   1 and 2    the bias tile is loaded
//   bias_empty    warps of 1 and 2, 8       producer   the bias tile is read, for all pairs
//
// Registers per thread: S, dP and the sums 64 each, out of 232; the producer's warpgroup keeps 40.
// clang-format on
#pragma once

#include "../common/scores.cuh"
#include "backward_config.cuh"
#include "wgmma.cuh"

namespace tilewise::sm90 {

// Mirrored field by field by `Config` in engine/sm90/bias_gradient.py.
struct BiasGradientConfig {
  Element element;  // of the products, and of q, k, v and out
  int head_dim;     // class of q and k
  int head_dim_v;   // class of v and dout
  int slots;        // slots in the ring of operands

  TILEWISE_INLINE int block_q() const { return 128; }
  TILEWISE_INLINE int block_kv() const { return 128; }
  TILEWISE_INLINE int threads() const { return 384; }
  TILEWISE_INLINE int operand_bytes() const {
    return matrix_bytes(128, max_int(head_dim, head_dim_v));
  }
};

struct BiasGradientParams {
  ptx::TensorMap q_map;  // all maps have boxes of 128 rows and are (dim, seq, head, batch)
  ptx::TensorMap k_map;
  ptx::TensorMap v_map;
  ptx::TensorMap dout_map;
  const float* start_s;   // (batch, heads, rows): added to scores in log2 units
  const float* start_dp;  // likewise: added to dP
  int batch;
  int heads;
  int heads_per_kv;
  int shared_batches;  // batches among the pairs of a plane: 1 or all
  int shared_heads;    // likewise
  int seq_q;
  int seq_k;
  int rows;
  int band_first_shift;
  int band_end_shift;
  int q_tiles;
  int kv_tiles;
  float scale_log2;
  float softcap_in;
  float sums_factor;      // dBias = sums * sums_factor
  float start_dp_factor;  // factor of start_dp: the weight of what is not dropped
};

template <BiasGradientConfig config, typename Extents>
struct BiasGradientSmem {
  alignas(1024) unsigned char operands[config.slots][2][config.operand_bytes()];
  alignas(1024) unsigned char bias[2][matrix_bytes(64, config.block_kv())];
  ptx::u64 full[config.slots], empty[config.slots];
  ptx::u64 bias_full, bias_empty;
};

// The position of a work index.
struct BiasTile {
  int batch, head;  // the first pair of the plane
  int q_tile, kv_tile;

  template <typename Params>
  __device__ __forceinline__ BiasTile(const Params& params, int work) {
    const int rest = work / params.kv_tiles, plane = rest / params.q_tiles;
    const int planes_per_batch = params.heads / params.shared_heads;
    kv_tile = work - rest * params.kv_tiles;
    q_tile = rest - plane * params.q_tiles;
    batch = plane / planes_per_batch;
    head = plane - batch * planes_per_batch;
  }
  template <typename Params>
  __device__ __forceinline__ static int count(const Params& params) {
    return params.batch / params.shared_batches * (params.heads / params.shared_heads) *
           params.q_tiles * params.kv_tiles;
  }
};

// The loop that all roles share: over the work tiles and, in each, over the pairs that see some of
// it.
template <BiasGradientConfig config, typename Policy, typename Extents>
struct BiasGradientWalk {
  using Params = ParamsOf<BiasGradientParams, Policy, Extents>;
  using Sight = SeenTile::Sight;
  static constexpr int block_q = config.block_q(), block_kv = config.block_kv();

  const Params& params;
  BiasGradientSmem<config, Extents>& smem;

  __device__ __forceinline__ auto sequence(int batch) const {
    return sequence_of<Extents>(params, Extents::find(params, batch));
  }
  // The visibility of the tile to the queries of a batch.
  __device__ __forceinline__ Sight sight(const BiasTile& tile, int batch) const {
    const Band band = sequence(batch).band();
    const int begin = tile.q_tile * block_q, end = min_int(begin + block_q, params.seq_q);
    TileRange touched = touched_tiles(band, begin, end, block_kv);
    TileRange full = full_tiles(band, begin, end, block_kv, touched);
    narrow_tiles<Policy>(params, batch, begin, end, block_kv, touched, full);
    if (tile.kv_tile < touched.begin || tile.kv_tile >= touched.end) return SeenTile::hidden;
    return tile.kv_tile >= full.begin && tile.kv_tile < full.end ? SeenTile::full
                                                                 : SeenTile::partial;
  }
  // Calls begin(tile), visit(tile, batch, head, sight) for each of its pairs, and end(tile).
  template <typename Role>
  __device__ __forceinline__ void run(Role& role) const {
    const int count = BiasTile::count(params);
#pragma unroll 1
    for (int work = blockIdx.x; work < count; work += gridDim.x) {
      const BiasTile tile(params, work);
      role.begin();
#pragma unroll 1
      for (int b = 0; b < params.shared_batches; ++b) {
        const Sight seen = sight(tile, tile.batch + b);
        if (seen == SeenTile::hidden) continue;
#pragma unroll 1
        for (int h = 0; h < params.shared_heads; ++h)
          role.visit(tile, tile.batch + b, tile.head + h, seen);
      }
      role.end(tile);
    }
  }
};

template <BiasGradientConfig config, typename Policy, typename Extents>
struct BiasGradientProducer : BiasGradientWalk<config, Policy, Extents> {
  using Base = BiasGradientWalk<config, Policy, Extents>;
  using Base::block_kv, Base::block_q, Base::params, Base::smem;

  RingPosition<config.slots> position{1};
  ptx::u32 bias_phase = 1;
  bool has_bias = false;

  // Rows and columns beyond the tensors arrive as zeros.
  __device__ __forceinline__ void load(unsigned char* destination, const ptx::TensorMap& map,
                                       int columns, int row, int head, int batch) {
    for (int panel = 0; panel < panel_count(columns); ++panel)
      ptx::tma_load_4d(destination + panel * panel_bytes(128), &map, &smem.full[position.stage],
                       panel * panel_columns, row, head, batch, ptx::CachePolicy::evict_last);
  }
  __device__ __forceinline__ void load_both(const ptx::TensorMap& queries,
                                            const ptx::TensorMap& keys, int columns,
                                            const BiasTile& tile, int head, int batch) {
    const int slot = position.stage;
    ptx::mbarrier_wait(&smem.empty[slot], position.phase);
    ptx::mbarrier_arrive_expect_tx(&smem.full[slot], 2 * matrix_bytes(128, columns));
    load(smem.operands[slot][0], queries, columns, tile.q_tile * block_q, head, batch);
    load(smem.operands[slot][1], keys, columns, tile.kv_tile * block_kv, head / params.heads_per_kv,
         batch);
    position.advance();
  }
  __device__ __forceinline__ void load_bias(const BiasTile& tile) {
    ptx::mbarrier_wait(&smem.bias_empty, bias_phase);
    ptx::mbarrier_arrive_expect_tx(&smem.bias_full, sizeof(smem.bias));
    for (int half = 0; half < 2; ++half)
      for (int panel = 0; panel < panel_count(block_kv); ++panel)
        ptx::tma_load_4d(
            smem.bias[half] + panel * panel_bytes(64), &params.bias_map, &smem.bias_full,
            tile.kv_tile * block_kv + panel * panel_columns, tile.q_tile * block_q + half * 64,
            params.bias_head_stride == 0 ? 0 : tile.head,
            params.bias_batch_stride == 0 ? 0 : tile.batch, ptx::CachePolicy::evict_first);
    bias_phase ^= 1;
  }

  __device__ __forceinline__ void begin() { has_bias = false; }
  // Why the bias is loaded after the first operands: it waits for the end of the previous tile.
  __device__ __forceinline__ void visit(const BiasTile& tile, int batch, int head,
                                        SeenTile::Sight) {
    load_both(params.q_map, params.k_map, config.head_dim, tile, head, batch);
    load_both(params.dout_map, params.v_map, config.head_dim_v, tile, head, batch);
    if (!has_bias) load_bias(tile);
    has_bias = true;
  }
  __device__ __forceinline__ void end(const BiasTile&) {}
};

template <BiasGradientConfig config, typename Policy, typename Extents>
struct BiasGradientConsumer : BiasGradientWalk<config, Policy, Extents> {
  using Base = BiasGradientWalk<config, Policy, Extents>;
  using Base::block_kv, Base::block_q, Base::params, Base::smem;
  using Product = wgmma::Product<config.block_kv(), config.element>;
  using Fragment = float[config.block_kv() / 2];

  const int warpgroup;  // 0 or 1
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;

  RingPosition<config.slots> position{0};
  ptx::u32 bias_phase = 0;
  bool has_bias = false;
  Fragment s, dp, sums;

  // Where this thread's scores lie (`at` in common/scores.cuh).
  struct ElementCoords {
    static constexpr RowsAre rows_are = RowsAre::queries;
    const BiasGradientConsumer& kernel;
    const BiasTile& tile;
    const int of_batch, of_head;

    __device__ __forceinline__ int row() const { return kernel.first_row(tile); }
    __device__ __forceinline__ int column() const { return kernel.first_key(tile); }
    __device__ __forceinline__ int batch() const { return of_batch; }
    __device__ __forceinline__ int head() const { return of_head; }
    __device__ __forceinline__ Band band() const { return kernel.sequence(of_batch).band(); }
    __device__ __forceinline__ RowBand row_band() const {
      return kernel.sequence(of_batch).row_band();
    }
    __device__ __forceinline__ ptx::u32 staged_rows() const {
      return ptx::smem_address(kernel.smem.bias[kernel.warpgroup]) + kernel.warp * panel_bytes(16);
    }
    __device__ __forceinline__ int staged_chunk() const { return 0; }
  };
  __device__ __forceinline__ int first_row(const BiasTile& tile) const {
    return tile.q_tile * block_q + warpgroup * 64 + warp * 16 + lane / 4;
  }
  __device__ __forceinline__ int first_key(const BiasTile& tile) const {
    return tile.kv_tile * block_kv + 2 * (lane % 4);
  }

  __device__ __forceinline__ void arrive(ptx::u64* barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // accumulator = (64 rows of the queries in a slot) (the keys in it)^T
  template <int dim>
  __device__ __forceinline__ void issue(Fragment& accumulator, int slot) {
    constexpr int panel = panel_bytes(128) >> 4;
    const ptx::u32 queries = wgmma::descriptor_low(
        ptx::smem_address(smem.operands[slot][0]) + warpgroup * panel_bytes(64), 16);
    const ptx::u32 keys = wgmma::descriptor_low(ptx::smem_address(smem.operands[slot][1]), 16);
    wgmma::hold(accumulator);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < dim / 16; ++step)
      Product::multiply(
          accumulator,
          wgmma::descriptor(queries + step / 4 * panel + step % 4 * 2, swizzle_atom_bytes),
          wgmma::descriptor(keys + step / 4 * panel + step % 4 * 2, swizzle_atom_bytes), step != 0);
    wgmma::commit();
  }

  __device__ __forceinline__ void begin() {
    has_bias = false;
#pragma unroll
    for (int i = 0; i < block_kv / 2; ++i) sums[i] = 0.0f;
  }

  // Steps 1 to 3.
  __device__ __forceinline__ void visit(const BiasTile& tile, int batch, int head,
                                        SeenTile::Sight seen) {
    const long long pair = (static_cast<long long>(batch) * params.heads + head) * params.rows;
    float start_s[2], start_dp[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // rows past the end are never stored
      const int row = min_int(first_row(tile) + 8 * r, params.seq_q - 1);
      start_s[r] = __ldg(params.start_s + pair + row);
      start_dp[r] = __ldg(params.start_dp + pair + row) * params.start_dp_factor;
    }
    const int first = position.stage;
    ptx::mbarrier_wait(&smem.full[first], position.phase);
    issue<config.head_dim>(s, first);
    position.advance();
    const int second = position.stage;
    ptx::mbarrier_wait(&smem.full[second], position.phase);
    issue<config.head_dim_v>(dp, second);
    position.advance();
    wgmma::wait<1>();
    wgmma::hold(s);
    arrive(&smem.empty[first]);
    if (!has_bias) {
      ptx::mbarrier_wait(&smem.bias_full, bias_phase);
      bias_phase ^= 1;
    }
    has_bias = true;
    const ElementCoords place{*this, tile, batch, head};
    Policy::apply(s, params, Unit{}, place);
#pragma unroll
    for (int i = 0; i < block_kv / 2; ++i) s[i] = fmaf(s[i], params.scale_log2, start_s[row_of(i)]);
    if (seen == SeenTile::partial) Policy::hide(s, params, place);
#pragma unroll
    for (int i = 0; i < block_kv / 2; ++i) s[i] = ptx::ex2(s[i]);
    wgmma::wait<0>();
    wgmma::hold(dp);
    arrive(&smem.empty[second]);
    auto terms = Policy::backward(params, place);
#pragma unroll
    for (int i = 0; i < block_kv / 2; ++i)
      sums[i] = fmaf(s[i], terms.drop(dp[i], i) + start_dp[row_of(i)], sums[i]);
  }

  // Step 4.
  __device__ __forceinline__ void end(const BiasTile& tile) {
    if (has_bias) {
      ptx::fence_proxy_async();  // the bias is read: an arrive does not wait for loads in flight
      arrive(&smem.bias_empty);
    }
    const int key = first_key(tile);
    ptx::u16* out = static_cast<ptx::u16*>(params.dbias) + tile.batch * params.dbias_batch_stride +
                    tile.head * params.dbias_head_stride + key;
    const bool in_pairs = params.seq_k % 2 == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row(tile) + 8 * r;
      if (row >= params.seq_q) continue;
      ptx::u16* line = out + row * params.dbias_row_stride;
#pragma unroll
      for (int i = 2 * r; i < block_kv / 2; i += 4) {
        const int column = column_of(i);
        const ptx::u32 both = ptx::pack<config.element>(sums[i] * params.sums_factor,
                                                        sums[i + 1] * params.sums_factor);
        if (key + column >= params.seq_k) continue;
        if (in_pairs) {
          *reinterpret_cast<ptx::u32*>(line + column) = both;
        } else {
          line[column] = static_cast<ptx::u16>(both);
          if (key + column + 1 < params.seq_k) line[column + 1] = static_cast<ptx::u16>(both >> 16);
        }
      }
    }
  }
};

template <BiasGradientConfig config, typename Policy, typename Extents>
__device__ __forceinline__ void bias_gradient(
    const ParamsOf<BiasGradientParams, Policy, Extents>& params) {
  static_assert(!Policy::has_slope && !Extents::ragged);
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  BiasGradientSmem<config, Extents>& smem =
      *reinterpret_cast<BiasGradientSmem<config, Extents>*>(smem_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < config.slots; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], 8);
    }
    ptx::mbarrier_init(&smem.bias_full, 1);
    ptx::mbarrier_init(&smem.bias_empty, 8);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < 32 && ptx::elect_one()) {
      BiasGradientProducer<config, Policy, Extents> role{{params, smem}};
      role.run(role);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    BiasGradientConsumer<config, Policy, Extents> role{{params, smem}, warpgroup - 1};
    role.run(role);
  }
}

}  // namespace tilewise::sm90
