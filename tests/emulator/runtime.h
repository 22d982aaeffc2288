// A model of one CUDA block on a host CPU, for tests: threads are fibers that take turns, and what
// the hardware does on its own (bulk copies, wgmma) happens later, at a moment that a seeded
// generator chooses. Reading before waiting therefore reads garbage, overwriting too early
// destroys, and a wait that nobody ends is reported as a deadlock.
#pragma once

#include <ucontext.h>

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
struct uint2 {
  unsigned x, y;
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

// Where the kernels' `extern __shared__ smem_bytes[]` lies, whatever their namespace: all that a
// block may have.
namespace tilewise::ladder {
alignas(1024) unsigned char smem_bytes[232448] asm("model_shared_memory");
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

inline tensor_core::Generation products_of;  // the GPU that the kernel is built for

constexpr size_t shared_bytes = sizeof(tilewise::ladder::smem_bytes);
inline unsigned char* const shared = tilewise::ladder::smem_bytes;
// Shared memory as bulk copies and wgmma see it: what threads store is there once a thread has
// fenced. Ref: PTX ISA, "Proxies".
alignas(1024) inline unsigned char async_shared[shared_bytes];
inline size_t used_bytes = shared_bytes;  // of shared memory, by this launch
inline void publish() { std::memcpy(async_shared, shared, used_bytes); }

// What the parts of the model forget between blocks.
inline std::vector<std::function<void()>> forgetters;
inline void forget() {
  for (auto& forgetter : forgetters) forgetter();
}

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  int index = 0;
  bool done = false;
  std::function<bool()> ready;  // empty: may run
};

// Something the hardware will do. Operations of one queue happen in order.
struct Operation {
  std::function<bool()> possible;
  std::function<void()> perform;
};

struct Exchange {  // of a group of threads that meet: a barrier with values
  int arrived = 0, leaving = 0;
  long generation = 0;
  std::map<int, std::vector<uint64_t>> values, seen;
};

struct Block {
  dim3 grid, block, at;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* running = nullptr;
  ucontext_t scheduler;
  std::mt19937 random;
  int mood = 3;  // the kind of operation it puts off
  std::map<long, std::deque<Operation>> queues;
  std::map<long, Exchange> meetings;
  std::string error;
};

inline Block* block = nullptr;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

inline Fiber& self() { return *block->running; }
inline int lane() { return self().index % 32; }
inline int warp() { return self().index / 32; }

// Let others run until `ready` holds.
inline void wait_until(std::function<bool()> ready) {
  if (ready()) return;
  self().ready = std::move(ready);
  swapcontext(&self().context, &block->scheduler);
}
inline void step_aside() {
  bool asked = false;
  self().ready = [asked]() mutable { return std::exchange(asked, true); };
  swapcontext(&self().context, &block->scheduler);
}

inline void enqueue(
    long queue, std::function<void()> perform,
    std::function<bool()> possible = [] { return true; }) {
  block->queues[queue].push_back({std::move(possible), std::move(perform)});
}

// Kinds of operations, by the number of their queue.
constexpr long products = 100'000, loads = 1'000'000'000;
inline int kind_of(long queue) { return queue >= loads ? 0 : queue >= products ? 1 : 2; }

// Performs something, if anything can be. A block has a mood: it puts off one kind of operation for
// as long as anything else can happen (`stuck`: nothing can), or none. So every order that a kernel
// forgot to enforce is met soon.
inline bool perform_one(bool stuck) {
  std::vector<long> possible, put_off;
  for (auto& [name, queue] : block->queues)
    if (!queue.empty() && queue.front().possible())
      (kind_of(name) == block->mood ? put_off : possible).push_back(name);
  if (possible.empty() && stuck) possible = put_off;
  if (possible.empty()) return false;
  auto& queue = block->queues[possible[block->random() % possible.size()]];
  auto perform = std::move(queue.front().perform);
  queue.pop_front();
  perform();
  return true;
}

// `count` threads meet under `name`; each brings values and sees everybody's.
inline std::map<int, std::vector<uint64_t>> meet(long name, int count,
                                                 std::vector<uint64_t> values = {}) {
  Exchange& here = block->meetings[name];
  wait_until([&here] { return here.leaving == 0; });
  here.values[self().index] = std::move(values);
  if (++here.arrived == count) {
    here.seen = std::move(here.values);
    here.values.clear();
    here.arrived = 0;
    here.leaving = count;
    ++here.generation;
  } else {
    const long generation = here.generation;
    wait_until([&here, generation] { return here.generation != generation; });
  }
  auto seen = here.seen;
  --here.leaving;
  return seen;
}

constexpr long whole_block = 1 << 20, named = 1 << 21, warps = 1 << 22, warpgroups = 1 << 23;

inline std::function<void()> body;
inline void enter() {
  try {
    body();
  } catch (const std::exception& error) {
    if (block->error.empty()) block->error = error.what();
  }
  self().done = true;
  swapcontext(&self().context, &block->scheduler);
}

inline bool waited_for_previous_grid;  // some block of this grid has

struct Launch {
  dim3 grid, block;
  int shared_bytes;
  bool overlaps;  // may begin before the grid ahead of it has ended
};

inline void run_block(const Launch& launch, dim3 at, unsigned seed) {
  const dim3 grid = launch.grid, size = launch.block;
  Block here;
  here.grid = grid, here.block = size, here.at = at, here.random.seed(seed), here.mood = seed % 4;
  block = &here;
  used_bytes = launch.shared_bytes;
  std::memset(shared, 0xff, shared_bytes);  // NaN wherever nobody wrote
  std::memset(async_shared, 0xff, shared_bytes);
  const int count = size.x * size.y * size.z;
  for (int i = 0; i < count; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->index = i;
    fiber->thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    constexpr size_t stack_bytes = 128 * 1024;
    fiber->stack.reset(new char[stack_bytes]);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = stack_bytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, enter, 0);
    here.fibers.push_back(std::move(fiber));
  }
  int left = count;
  while (left > 0 && here.error.empty()) {
    bool progress = here.random() % 4 == 0 && perform_one(false);
    const int first = here.random() % count;
    for (int i = 0; i < count && here.error.empty(); ++i) {
      Fiber& fiber = *here.fibers[(first + i) % count];
      if (fiber.done || (fiber.ready && !fiber.ready())) continue;
      fiber.ready = nullptr;
      here.running = &fiber;
      swapcontext(&here.scheduler, &fiber.context);
      progress = true;
      if (fiber.done) --left;
    }
    if (!progress && !perform_one(true))
      here.error = "deadlock: every thread waits, and nothing is under way";
  }
  // Its shared memory is somebody else's now.
  for (auto& [name, queue] : here.queues)
    if (!queue.empty() && here.error.empty()) here.error = "the block ended with work under way";
  block = nullptr;
  if (!here.error.empty()) fail(here.error);
}

// Blocks run one after another, in an order that the seed draws: hardware promises none.
inline void run_grid(const Launch& launch, unsigned seed) {
  waited_for_previous_grid = false;
  std::vector<dim3> blocks;
  for (int z = 0; z < launch.grid.z; ++z)
    for (int y = 0; y < launch.grid.y; ++y)
      for (int x = 0; x < launch.grid.x; ++x) blocks.push_back({x, y, z});
  std::mt19937 random(seed);
  for (size_t left = blocks.size(); left > 1; --left)
    std::swap(blocks[left - 1], blocks[random() % left]);
  for (const dim3& at : blocks) {
    forget();
    run_block(launch, at, seed++);
  }
  if (launch.overlaps && !waited_for_previous_grid)
    fail("the grid overlaps the one before it, and never waits for that one's results");
}

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
  for (const auto& [thread, values] : seen)
    if (values[0]) return 1;
  return 0;
}
inline void __syncwarp() { model::meet(model::warps + model::warp(), 32); }
template <typename T>
inline T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, 4);
  const auto seen = model::meet(model::warps + model::warp(), 32, {bits});
  std::memcpy(&value, &seen.at(model::warp() * 32 + from)[0], 4);
  return value;
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
  unsigned votes = 0;
  for (const auto& [thread, values] :
       model::meet(model::warps + model::warp(), 32, {static_cast<uint64_t>(mine)}))
    votes |= static_cast<unsigned>(values[0]) << (thread % 32);
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
