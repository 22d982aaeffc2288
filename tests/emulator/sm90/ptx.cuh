// The instructions of kernels/sm90/ptx.cuh that the model of runtime.h runs.
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

// The contents of a tensor map, in place of the hardware's own encoding. Innermost dimension first.
struct alignas(64) TensorMap {
  u16* base;
  long long dims[4];
  long long strides[3];  // in bytes
  int box[2];
  unsigned char rest[128 - 8 - 32 - 24 - 8];
};
static_assert(sizeof(TensorMap) == 128);

inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

inline bool elect_one() { return model::lane() == 0; }

struct NamedBarrier {
  int arrived = 0, expected = 0;
  long generation = 0;
};
inline std::map<int, NamedBarrier> named_barriers;
template <int threads>
inline void barrier_arrive(int id) {
  NamedBarrier& barrier = named_barriers[id];
  if (barrier.arrived != 0 && barrier.expected != threads)
    model::fail("threads disagree on how many meet at a named barrier");
  barrier.expected = threads;
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.generation;
}
template <int threads>
inline void barrier_sync(int id) {
  const long before = named_barriers[id].generation;
  barrier_arrive<threads>(id);
  model::wait_until(
      [&barrier = named_barriers[id], before] { return barrier.generation != before; });
}

// --- mbarrier ---

struct Barrier {
  u32 count, pending;
  long long bytes = 0;
  u32 phase = 0;
  bool fenced = false;  // bulk copies may complete on it
};
inline std::map<const u64*, Barrier> barriers;

inline Barrier& barrier_at(const u64* place) {
  auto found = barriers.find(place);
  if (found == barriers.end()) model::fail("an mbarrier that was not initialised");
  return found->second;
}
inline void settle(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0)
    barrier.phase ^= 1, barrier.pending = barrier.count;
}
inline void mbarrier_init(u64* place, u32 count) { barriers[place] = {count, count}; }
inline void fence_mbarrier_init() {
  for (auto& [place, barrier] : barriers) barrier.fenced = true;
}
inline void mbarrier_arrive_expect_tx(u64* place, u32 bytes) {
  Barrier& barrier = barrier_at(place);
  if (barrier.pending == 0) model::fail("more arrivals at an mbarrier than its count");
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}
inline void mbarrier_arrive(u64* place) { mbarrier_arrive_expect_tx(place, 0); }
inline void mbarrier_wait(u64* place, u32 parity) {
  model::wait_until([&barrier = barrier_at(place), parity] { return barrier.phase != parity; });
}
inline void complete_bytes(const u64* place, u32 bytes) {
  Barrier& barrier = barrier_at(place);
  if (!barrier.fenced) model::fail("a bulk copy to an mbarrier without fence.mbarrier_init");
  barrier.bytes -= bytes;
  settle(barrier);
}

// --- bulk copies ---

inline void prefetch_tensormap(const TensorMap*) {}
enum class CachePolicy : u64 { evict_normal, evict_first, evict_last };

// Element (c0 + column, c1 + row, c2, c3), or null outside the tensor.
inline u16* element(const TensorMap& map, long long c0, long long c1, long long c2, long long c3) {
  const long long at[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i)
    if (at[i] < 0 || at[i] >= map.dims[i]) return nullptr;
  return map.base + c0 + (c1 * map.strides[0] + c2 * map.strides[1] + c3 * map.strides[2]) / 2;
}

inline void copy_in(u32 address, const void* source, u32 bytes) {
  std::memcpy(model::shared + address, source, bytes);
  std::memcpy(model::async_shared + address, source, bytes);
}

template <typename Visit>
inline void over_box(const TensorMap& map, u32 address, int c0, int c1, int c2, int c3,
                     Visit visit) {
  if (address % 1024) model::fail("a swizzled box at an address that is no multiple of 1024");
  for (int row = 0; row < map.box[1]; ++row)
    for (int column = 0; column < map.box[0]; ++column)
      visit(swizzled(address + row * 128 + column * 2),
            element(map, c0 + column, c1 + row, c2, c3));
}

inline void tma_load_4d(void* destination, const TensorMap* map, u64* barrier, int c0, int c1,
                        int c2, int c3, CachePolicy) {
  const u32 address = smem_address(destination);
  // Why a queue for each load: copies end in any order.
  static long number = 0;
  model::enqueue(model::loads + ++number, [=, map = *map] {
    over_box(map, address, c0, c1, c2, c3, [](u32 inside, const u16* outside) {
      constexpr u16 zero = 0;
      copy_in(inside, outside ? outside : &zero, 2);
    });
    complete_bytes(barrier, map.box[0] * map.box[1] * 2);
  });
}

// The stores of a thread happen in order. The thread waits for those that it has committed.
struct Stores {
  long issued = 0, committed = 0, done = 0;
};
inline std::map<int, Stores> stores;  // by thread

inline void tma_store_4d(const TensorMap* map, const void* source, int c0, int c1, int c2, int c3) {
  const u32 address = smem_address(source);
  const int thread = model::self().index;
  Stores& mine = stores[thread];
  ++mine.issued;
  model::enqueue(thread, [=, &mine, map = *map] {
    over_box(map, address, c0, c1, c2, c3, [](u32 inside, u16* outside) {
      if (outside) std::memcpy(outside, model::async_shared + inside, 2);
    });
    ++mine.done;
  });
}
inline void tma_store_commit() {
  Stores& mine = stores[model::self().index];
  mine.committed = mine.issued;
}
template <int pending>
inline void tma_store_wait_read() {
  static_assert(pending == 0);
  Stores& mine = stores[model::self().index];
  model::wait_until([&mine, end = mine.committed] { return mine.done >= end; });
}
inline void fence_proxy_async() { model::publish(); }

inline void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 mine[4] = {a, b, c, d};
  const auto& lanes = model::all_lanes(model::shuffles, {address});
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int row = model::lane() / 4;
    const u32 at = lanes[matrix * 8 + row][0] + model::lane() % 4 * 4;
    std::memcpy(model::shared + at, &mine[matrix], 4);
  }
}

inline const bool ptx_forgets =
    (model::forgetters.push_back([] { barriers.clear(), named_barriers.clear(), stores.clear(); }),
     true);

template <int registers>
inline void setmaxnreg_inc() {}
template <int registers>
inline void setmaxnreg_dec() {}

inline void bulk_load(void* destination, const void* source, u32 bytes, u64* barrier) {
  const u32 address = smem_address(destination);
  check_aligned(source);
  if (address % 16 || bytes % 16) model::fail("a bulk copy that is no multiple of 16 bytes");
  static long number = 0;
  model::enqueue(2 * model::loads + ++number, [=] {
    copy_in(address, source, bytes);
    complete_bytes(barrier, bytes);
  });
}
inline float4 load_global(const float* place) {
  check_aligned(place);
  return {place[0], place[1], place[2], place[3]};
}
inline void store_global(void* place, const u32 (&x)[4]) {
  check_aligned(place);
  std::memcpy(place, x, 16);
}
inline void store_global(float* place, float a, float b, float c, float d) {
  place[0] = a, place[1] = b, place[2] = c, place[3] = d;
}
}  // namespace tilewise::ptx
