// The parts that runtime.h declares: fibers, their scheduler, and the asynchronous hardware.
#include "runtime.h"

#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace tensor_core {

static void factors(std::vector<Factors>& all, const float* x, int count,
                    const Instruction& instruction) {
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < instruction.depth; ++k)
      all[i].set(k, x[i * instruction.depth + k], instruction.min_exponent);
}

void multiply(const Instruction& instruction, const float* a, const float* b, float* d) {
  std::vector<Factors> rows(instruction.rows), columns(instruction.columns);
  factors(rows, a, instruction.rows, instruction);
  factors(columns, b, instruction.columns, instruction);
  const int step = instruction.depth / instruction.steps;
  for (int row = 0; row < instruction.rows; ++row)
    for (int column = 0; column < instruction.columns; ++column) {
      float& sum = d[row * instruction.columns + column];
      for (int begin = 0; begin < instruction.depth; begin += step)
        sum = add_products(sum, rows[row], columns[column], instruction.fraction_bits, begin,
                           begin + step);
    }
}

}  // namespace tensor_core

namespace tilewise::ladder {
alignas(1024) unsigned char smem_bytes[model::shared_bytes];
}

namespace model {

tensor_core::Generation products_of;
alignas(1024) unsigned char async_shared[shared_bytes];
size_t used_bytes = shared_bytes;
Block* block = nullptr;
std::function<void()> body;
bool waited_for_previous_grid;
std::function<void()> late_write;

void wait_for_previous_grid() {
  waited_for_previous_grid = true;
  if (const auto write = std::exchange(late_write, nullptr)) write();
}

void fail(const std::string& what) { throw std::runtime_error(what); }

// --- fibers ---

static void enter() {
  try {
    body();
  } catch (const std::exception& error) {
    if (block->error.empty()) block->error = error.what();
  }
  self().done = true;
  step_aside_until(nullptr, nullptr);
}

// switch_stacks(from, to): pushes the registers that a call preserves on the current stack, stores
// the top of that stack in *from, and resumes where `to` was left.
#ifdef __x86_64__
// Why not swapcontext: it asks the kernel for the signal mask each time, which took half of the
// total time.
extern "C" void model_switch_stacks(void** from, void* to);
asm(R"(
  .text
  .p2align 4
  .hidden model_switch_stacks
  .globl model_switch_stacks
  .type model_switch_stacks, @function
model_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size model_switch_stacks, .-model_switch_stacks
)");
static void switch_stacks(void** from, void* to) { model_switch_stacks(from, to); }
static void* prepared(char* stack, size_t bytes) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;  // where `enter` would return to
  *--top = reinterpret_cast<void*>(enter);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  return top;
}
#else
static void switch_stacks(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
static void* prepared(char* stack, size_t bytes) {
  auto* context = reinterpret_cast<ucontext_t*>(stack);  // at the end that the stack grows towards
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = bytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, enter, 0);
  return context;
}
#endif

void step_aside_until(bool (*ready)(void*), void* condition) {
  Fiber& fiber = self();
  fiber.ready = ready;
  fiber.condition = condition;
  switch_stacks(&fiber.stack, block->scheduler);
}

// The stacks of a grid's threads, which every block reuses.
class Stacks {
 public:
  static constexpr size_t bytes_each = 128 * 1024;
  explicit Stacks(int count) : bytes(count * bytes_each) {
    place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) fail("no memory for the stacks of a block");
  }
  ~Stacks() { munmap(place, bytes); }
  Stacks(const Stacks&) = delete;
  char* operator[](int index) const { return static_cast<char*>(place) + index * bytes_each; }

 private:
  size_t bytes;
  void* place;
};

// --- meetings ---

Seen meet(long name, int count, std::array<uint64_t, 2> values) {
  Exchange& here = block->meetings[name];
  const long generation = here.generation;
  Exchange::Round& round = here.rounds[generation % 2];
  if (here.arrived == 0) round.who.clear(), round.values.resize(block->fibers.size());
  round.who.push_back(self().index);
  round.values[self().index] = values;
  if (++here.arrived == count) {
    here.arrived = 0;
    ++here.generation;
  } else {
    wait_until([&here, generation] { return here.generation != generation; });
  }
  return Seen(round);
}

// --- asynchronous hardware ---

void enqueue(long queue, std::function<void()> perform, std::function<bool()> possible) {
  block->queues[queue].push_back({std::move(possible), std::move(perform)});
}

// Performs an operation, if one is possible. A block has a mood: it puts off one kind of operation
// for as long as anything else can happen (`stuck`: nothing can), or none. A missing wait or fence
// therefore shows soon, whatever order it fails to enforce.
static bool perform_one(bool stuck) {
  std::vector<long> possible, put_off;
  for (auto& [name, queue] : block->queues)
    if (queue.front().possible())
      (kind_of(name) == block->mood ? put_off : possible).push_back(name);
  if (possible.empty() && stuck) possible = put_off;
  if (possible.empty()) return false;
  const auto queue = block->queues.find(possible[block->random() % possible.size()]);
  auto perform = std::move(queue->second.front().perform);
  queue->second.pop_front();
  if (queue->second.empty()) block->queues.erase(queue);
  perform();
  return true;
}

// --- blocks and grids ---

static void run_block(const Launch& launch, const Stacks& stacks, dim3 at, unsigned seed) {
  const dim3 grid = launch.grid, size = launch.block;
  const int count = size.x * size.y * size.z;
  Block here;
  here.grid = grid, here.block = size, here.at = at, here.random.seed(seed), here.mood = seed % 4;
  here.fibers.resize(count);
  here.warps.resize((count + 31) / 32);
  block = &here;
  used_bytes = launch.shared_bytes;
  std::memset(shared, 0xff, shared_bytes);  // NaN wherever no thread wrote
  std::memset(async_shared, 0xff, shared_bytes);
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = here.fibers[i];
    fiber.index = i;
    fiber.thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    fiber.stack = prepared(stacks[i], Stacks::bytes_each);
  }
  int left = count;
  while (left > 0 && here.error.empty()) {
    bool progress = here.random() % 4 == 0 && perform_one(false);
    const int first = here.random() % count;
    for (int i = 0; i < count && here.error.empty(); ++i) {
      Fiber& fiber = here.fibers[first + i < count ? first + i : first + i - count];
      if (fiber.done || (fiber.ready && !fiber.ready(fiber.condition))) continue;
      fiber.ready = nullptr;
      here.running = &fiber;
      switch_stacks(&here.scheduler, fiber.stack);
      progress = true;
      if (fiber.done) --left;
    }
    if (!progress && !perform_one(true))
      here.error = "deadlock: every thread waits, and nothing is under way";
  }
  // Another block now owns this block's shared memory.
  if (!here.queues.empty() && here.error.empty())
    here.error = "the block ended with work under way";
  block = nullptr;
  if (!here.error.empty()) fail(here.error);
}

void run_grid(const Launch& launch, unsigned seed, const Forgetters& forgetters) {
  waited_for_previous_grid = false;
  std::vector<dim3> blocks;
  for (int z = 0; z < launch.grid.z; ++z)
    for (int y = 0; y < launch.grid.y; ++y)
      for (int x = 0; x < launch.grid.x; ++x) blocks.push_back({x, y, z});
  std::mt19937 random(seed);
  for (size_t left = blocks.size(); left > 1; --left)
    std::swap(blocks[left - 1], blocks[random() % left]);
  const Stacks stacks(launch.block.x * launch.block.y * launch.block.z);
  for (const dim3& at : blocks) {
    for (const auto& forget : forgetters) forget();
    run_block(launch, stacks, at, seed++);
  }
  if (launch.overlaps && !waited_for_previous_grid)
    fail("the grid overlaps the one before it, and never waits for that one's results");
}

}  // namespace model

// For tests: memory that the grid before the next one writes, as its last write.
extern "C" void write_late(void* place, const void* bytes, unsigned long count) {
  const auto* first = static_cast<const unsigned char*>(bytes);
  model::late_write = [place, kept = std::vector<unsigned char>(first, first + count)] {
    std::memcpy(place, kept.data(), kept.size());
  };
}

// What the compiler calls under -fsanitize=bounds for an index beyond its array. The thread goes
// on, and the block fails when it gives way. No exception: the compiler assumes that none comes.
struct ArrayAccess {
  const char* file;
  unsigned line, column;
};
extern "C" void __ubsan_handle_out_of_bounds(const ArrayAccess* access, unsigned long index) {
  if (model::block == nullptr || !model::block->error.empty()) return;
  const std::string file = access->file;
  model::block->error = file.substr(file.rfind('/') + 1) + ":" + std::to_string(access->line) +
                        ": index " + std::to_string(static_cast<long>(index)) +
                        " is beyond its array";
}
