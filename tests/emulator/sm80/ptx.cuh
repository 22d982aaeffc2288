// The instructions of kernels/sm80/ptx.cuh on the model of runtime.h. Ref: PTX ISA, "cp.async".
#pragma once

#include "../common/ptx.cuh"

namespace tilewise::ptx {

// --- copies by threads: those of a group happen together, some time before the wait for them ---

struct Copy {
  u32 destination, bytes;  // of 16; zeros follow
  const void* source;
};
struct Copies {
  std::vector<Copy> open;      // not committed yet
  std::vector<bool> is_empty;  // of each committed group
  long done = 0;               // the number of groups that have completed, from the first

  long committed() const { return static_cast<long>(is_empty.size()); }
  void pass_empty_groups() {
    while (done < committed() && is_empty[done]) ++done;
  }
};
inline std::map<int, Copies> copies;  // by thread
inline const bool copies_forget = (model::forgetters.push_back([] { copies.clear(); }), true);

inline void cp_async_16(u32 destination, const void* source, u32 bytes) {
  if (destination % 16 || destination + 16 > model::shared_bytes)
    model::fail("cp.async to an address that is no multiple of 16, or past the end");
  if (bytes != 0) check_aligned(source);
  copies[model::self().index].open.push_back({destination, bytes, source});
}
inline void cp_async_commit() {
  const int thread = model::self().index;
  Copies& mine = copies[thread];
  mine.is_empty.push_back(mine.open.empty());
  mine.pass_empty_groups();
  if (mine.open.empty()) return;
  model::enqueue(model::loads + thread, [&mine, group = std::move(mine.open)] {
    for (const Copy& copy : group) {
      std::memset(model::shared + copy.destination, 0, 16);
      if (copy.bytes != 0) std::memcpy(model::shared + copy.destination, copy.source, copy.bytes);
    }
    ++mine.done;
    mine.pass_empty_groups();
  });
  mine.open.clear();
}
template <int pending>
inline void cp_async_wait() {
  Copies& mine = copies[model::self().index];
  model::wait_until([&mine] { return mine.done >= mine.committed() - pending; });
}

// --- the rest ---

inline void store_shared(u32 address, u32 x) {
  if (address % 4 || address + 4 > model::shared_bytes) model::fail("a store to no such address");
  std::memcpy(model::shared + address, &x, 4);
}
inline uint4 load_shared(u32 address) {
  if (address % 16 || address + 16 > model::shared_bytes) model::fail("a load of no such address");
  uint4 x;
  std::memcpy(&x, model::shared + address, 16);
  return x;
}
inline float4 load_shared_floats(u32 address) {
  return __builtin_bit_cast(float4, load_shared(address));
}
inline void store_shared(u32 address, uint4 x) {
  if (address % 16 || address + 16 > model::shared_bytes) model::fail("a store to no such address");
  std::memcpy(model::shared + address, &x, 16);
}

// --- global memory ---

inline int add_acq_rel(int* place, int value) { return (*place += value) - value; }
inline float2 load_l2(const float2* place) { return *place; }

}  // namespace tilewise::ptx

inline bool __syncthreads_or(bool given) { return __syncthreads_or(static_cast<int>(given)) != 0; }
