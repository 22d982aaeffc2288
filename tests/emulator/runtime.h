// A model of one CUDA block on a host CPU, for tests. Threads are fibers that take turns.
// Operations that the hardware performs asynchronously (bulk copies, wgmma) complete later, at a
// moment that a seeded generator chooses. Reading before waiting therefore reads garbage,
// overwriting too early destroys data, and a wait that never ends is reported as a deadlock.
// runtime.cpp has the parts that do not depend on the kernel, and is compiled once for all kernels.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tensor_core.h"

#define __CUDA_HOST_MODEL__ 1
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
  int x = 1, y = 1, z = 1;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

// The kernels' `extern __shared__ smem_bytes[]`, in each of their namespaces. It has the maximum
// size of a block.
namespace tilewise::ladder {
extern unsigned char smem_bytes[] asm("model_shared_memory");
}
namespace tilewise::sm90 {
extern unsigned char smem_bytes[] asm("model_shared_memory");
}
namespace tilewise::sm90::float32 {
extern unsigned char smem_bytes[] asm("model_shared_memory");
}
namespace tilewise::sm80 {
extern unsigned char smem_bytes[] asm("model_shared_memory");
}

namespace model {

extern tensor_core::Generation products_of;  // the GPU that the kernel is built for

constexpr size_t shared_bytes = 232448;
inline unsigned char* const shared = tilewise::ladder::smem_bytes;
// Shared memory as bulk copies and wgmma see it: what threads store arrives there once a thread has
// fenced. Ref: PTX ISA, "Proxies".
extern unsigned char async_shared[shared_bytes];
extern size_t used_bytes;  // bytes of shared memory that this launch uses
inline void publish() { std::memcpy(async_shared, shared, used_bytes); }

// Functions that clear the state of the model between blocks. Each kernel has state of its own.
using Forgetters = std::vector<std::function<void()>>;
inline Forgetters forgetters;

struct Fiber {
  void* stack;  // where it resumes, while it does not run
  dim3 thread;
  int index = 0;
  bool done = false;
  bool (*ready)(void* condition) = nullptr;  // null: it may run
  void* condition = nullptr;
};

// An operation that the hardware will perform. Operations of one queue happen in order.
struct Operation {
  std::function<bool()> possible;
  std::function<void()> perform;
};

// The state of a group of threads that meet. Invariant: a thread reads the values that it sees
// before it meets the group again, so two rounds of values are enough.
struct Exchange {
  struct Round {
    std::vector<int> who;
    std::vector<std::array<uint64_t, 2>> values;  // by thread
  };
  Round rounds[2];
  int arrived = 0;
  long generation = 0;
};

// The values that all threads of a meeting brought.
class Seen {
 public:
  explicit Seen(const Exchange::Round& round) : round(&round) {}
  const std::array<uint64_t, 2>& at(int thread) const { return round->values[thread]; }
  const std::vector<int>& threads() const { return round->who; }

 private:
  const Exchange::Round* round;
};

// A meeting of the lanes of a warp, with the words that each lane brings.
using Lane = std::array<uint32_t, 10>;
using Lanes = std::array<Lane, 32>;
struct WarpMeeting {
  Lanes values[2];
  int arrived = 0;
  long generation = 0;
};
// Lanes meet separately to exchange values and to multiply: a lane that is at a shuffle while the
// others are at a product waits forever.
enum WarpMeetings { shuffles, fragments, warp_meetings };

struct Block {
  dim3 grid, block, at;
  std::vector<Fiber> fibers;
  Fiber* running = nullptr;
  void* scheduler;  // its stack, while a fiber runs
  std::mt19937 random;
  int mood = 3;  // the kind of operation that it puts off
  std::map<long, std::deque<Operation>> queues;
  std::map<long, Exchange> meetings;
  std::vector<std::array<WarpMeeting, warp_meetings>> warps;
  std::string error;
};

extern Block* block;

[[noreturn]] void fail(const std::string& what);

inline Fiber& self() { return *block->running; }
inline int lane() { return self().index % 32; }
inline int warp() { return self().index / 32; }

// Lets others run until `ready(condition)` holds, whatever it is now.
void step_aside_until(bool (*ready)(void*), void* condition);

// Lets others run until `ready` holds. `ready` stays on the stack of the fiber that waits.
template <typename Ready>
inline void wait_until(Ready ready) {
  if (ready()) return;
  step_aside_until([](void* condition) -> bool { return (*static_cast<Ready*>(condition))(); },
                   &ready);
}
inline void step_aside() {
  bool asked = false;
  step_aside_until([](void* before) { return std::exchange(*static_cast<bool*>(before), true); },
                   &asked);
}

void enqueue(
    long queue, std::function<void()> perform,
    std::function<bool()> possible = [] { return true; });

// The numbers of queues, by kind of operation.
constexpr long products = 100'000, loads = 1'000'000'000;
inline int kind_of(long queue) { return queue >= loads ? 0 : queue >= products ? 1 : 2; }

// `count` threads meet under `name`; each brings up to two values and sees those of all.
Seen meet(long name, int count, std::array<uint64_t, 2> values = {});

constexpr long whole_block = 1 << 20, named = 1 << 21, warps = 1 << 22, warpgroups = 1 << 23;

// All lanes of the warp bring words, and each sees those of all. The last lane to arrive calls
// `finish` before any lane resumes, to compute once what depends on all words.
template <typename Finish>
inline const Lanes& all_lanes(WarpMeetings kind, const Lane& mine, Finish finish) {
  WarpMeeting& here = block->warps[warp()][kind];
  const long generation = here.generation;
  Lanes& values = here.values[generation % 2];
  values[lane()] = mine;
  if (++here.arrived == 32) {
    finish(values);
    here.arrived = 0;
    ++here.generation;
  } else {
    wait_until([&here, generation] { return here.generation != generation; });
  }
  return values;
}
inline const Lanes& all_lanes(WarpMeetings kind, const Lane& mine) {
  return all_lanes(kind, mine, [](Lanes&) {});
}

extern std::function<void()> body;

extern bool waited_for_previous_grid;  // whether some block of this grid has
// A write of the previous grid that is still to happen: it happens once, when this grid first waits
// for that grid.
extern std::function<void()> late_write;
void wait_for_previous_grid();

struct Launch {
  dim3 grid, block;
  int shared_bytes;
  bool overlaps;  // may begin before the preceding grid has ended
};

// Blocks run one after another, in an order that the seed draws, since the hardware guarantees
// none.
void run_grid(const Launch& launch, unsigned seed, const Forgetters& forgetters);

}  // namespace model

#define threadIdx (model::self().thread)
#define blockIdx (model::block->at)
#define blockDim (model::block->block)
#define gridDim (model::block->grid)

inline void __syncthreads() {
  model::meet(model::whole_block, static_cast<int>(model::block->fibers.size()));
}
inline int __syncthreads_or(int mine) {
  const auto seen = model::meet(model::whole_block, static_cast<int>(model::block->fibers.size()),
                                {static_cast<uint64_t>(mine != 0)});
  for (const int thread : seen.threads())
    if (seen.at(thread)[0]) return 1;
  return 0;
}
inline void __syncwarp() { model::all_lanes(model::shuffles, {}); }
template <typename T>
inline T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4);
  const auto& lanes = model::all_lanes(model::shuffles, {__builtin_bit_cast(unsigned, value)});
  return __builtin_bit_cast(T, lanes[from][0]);
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int from) {
  return shuffle(value, from);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffle(value, model::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  const auto& lanes = model::all_lanes(model::shuffles, {mine});
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= lanes[lane][0] << lane;
  return votes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// The 32 bits of (high, low) from bit `shift` on, as far as that is below 32.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

template <typename T>
inline T __ldg(const T* place) {
  return *place;
}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __log2f(float x) { return log2f(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline void __threadfence() {}
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned atomicMax(unsigned* place, unsigned x) {
  return std::exchange(*place, *place > x ? *place : x);
}
inline int atomicAdd(int* place, int x) { return std::exchange(*place, *place + x); }
inline int atomicExch(int* place, int x) { return std::exchange(*place, x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i)
    chosen |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}
