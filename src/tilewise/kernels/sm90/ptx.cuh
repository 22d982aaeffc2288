// Instructions that Hopper introduced, or that only its kernels use: mbarriers, bulk copies,
// reallocation of registers between warps. The conventions are those of common/ptx.cuh.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64);

// --- warps ---

__device__ __forceinline__ bool elect_one() {  // ISA: elect.sync
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {  // ISA: setmaxnreg
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {  // ISA: setmaxnreg
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int threads>
__device__ __forceinline__ void barrier_sync(int id) {  // ISA: barrier.cta.sync
  static_assert(threads % 32 == 0);
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

template <int threads>
__device__ __forceinline__ void barrier_arrive(int id) {  // ISA: barrier.cta.arrive
  static_assert(threads % 32 == 0);
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// --- mbarrier ---

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) {  // ISA: mbarrier.init
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {  // ISA: fence.mbarrier_init
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {  // ISA: mbarrier.arrive
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier,
                                                          u32 bytes) {  // ISA: mbarrier.arrive
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   smem_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier,
                                                  u32 parity) {  // ISA: mbarrier.try_wait
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase with this parity has completed. A debug build (TILEWISE_BOUNDED_WAITS)
// gives up and traps.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
#ifdef TILEWISE_BOUNDED_WAITS
  for (u32 tries = 0; !mbarrier_try_wait(barrier, parity); ++tries) {
    if (tries > TILEWISE_BOUNDED_WAITS) asm volatile("trap;");
  }
#else
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// --- the tensor memory accelerator ---

__device__ __forceinline__ void prefetch_tensormap(
    const TensorMap* map) {  // ISA: prefetch.tensormap
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

enum class CachePolicy : u64 {
  evict_normal = 0x1000000000000000ull,
  evict_first = 0x12F0000000000000ull,
  evict_last = 0x14F0000000000000ull
};

__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap* map, u64* barrier,
                                            int c0, int c1, int c2, int c3,
                                            CachePolicy policy) {  // ISA: cp.async.bulk.tensor
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
      "hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(static_cast<u64>(policy))
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* source, int c0,
                                             int c1, int c2,
                                             int c3) {  // ISA: cp.async.bulk.tensor
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(smem_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {  // ISA: cp.async.bulk.commit_group
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void tma_store_wait_read() {  // ISA: cp.async.bulk.wait_group.read
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void fence_proxy_async() {  // ISA: fence.proxy.async
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- matrices in shared memory ---

__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c,
                                            u32 d) {  // ISA: stmatrix
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// --- bulk copies, and data shared between CTAs ---

// Invariant: both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, u32 bytes,
                                          u64* barrier) {  // ISA: cp.async.bulk
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(destination)),
      "l"(source), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

// Reads what other CTAs have written, not what this SM's L1 cache holds. 16-byte aligned.
__device__ __forceinline__ float4 load_global(const float* address) {  // ISA: ld
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(address)
               : "memory");
  return x;
}

// Invariant: the address is a multiple of 16.
__device__ __forceinline__ void store_global(void* address, const u32 (&x)[4]) {  // ISA: st
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void store_global(float* address, float a, float b, float c,
                                             float d) {  // ISA: st
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
}  // namespace tilewise::ptx
