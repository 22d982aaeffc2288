// A repeated call and its backward, from what Python has settled about them.
//
// Python (engine/recipe.py) reads a Program and describes it as plain data: a Recipe. A Call is the
// recipe of a forward with what surrounds it: the shapes of its results, whether autograd records
// it, and the recipes of its backwards as they are learnt. Nothing here chooses or plans; what is
// not known goes to Python.
//
// Threads: a Recipe is never changed once it is made. The memory of calls (calls.cpp) is guarded by
// the GIL; the backwards of a Call, which autograd's threads look up without it, by a mutex.

#pragma once

// clang-format off: before all others, as Python asks
#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>
// clang-format on

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tilewise {

// Asks for the cache lines of an object that is needed soon, before work that does without it. Why:
// where a thread has waited, most of them come from another core, and one after another unless they
// are asked for together. Addresses that are not valid any more are harmless.
inline void expect(const void* object, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(object) + i);
}

// Sizes or strides, which lie where their owner lies.
class Extents {
 public:
  static constexpr size_t max = 4;
  Extents() = default;
  explicit Extents(c10::IntArrayRef given) : count(given.size()) {
    TORCH_CHECK(count <= max, "tensors of up to 4 dimensions");
    std::copy(given.begin(), given.end(), values.begin());
  }
  operator c10::IntArrayRef() const { return {values.data(), count}; }

 private:
  size_t count = 0;
  std::array<int64_t, max> values{};
};

// The tensors that a call may have in addition to q, k and v: `SLOTS` of call/request.py, and a
// test holds the two to each other.
enum Slot {
  ALIBI,
  KEEP,
  SINK,
  CU_SEQLENS_Q,
  CU_SEQLENS_K,
  SEQUSED_K,
  LEFTPAD_K,
  LENGTHS,
  STARTS,
  ROWS,
  PAGE_TABLE,
  SLOTS
};

// The options of a call: the fields of `Options` in call/request.py, held to them in the same way.
enum Option {
  MASK,
  SCALE,
  SOFTCAP,
  SCORES,
  DROPOUT,
  RETURN_LSE,
  RETURN_MAX_LOGIT,
  BACKEND,
  PRECISION,
  MAX_Q,
  MAX_K,
  BATCH_INVARIANT,
  OPTIONS
};

// What a recipe may ask the address of. PREPARED: what was made of extra tensors before; these
// follow, in the order of their slots.
enum Operand {
  Q,
  K,
  V,
  OUT,
  LSE,
  DOUT,
  DLSE,
  DQ,
  DK,
  DV,
  SCRATCH,
  PREPARED,
  FIRST_SLOT,
  OPERANDS = FIRST_SLOT + SLOTS
};
using Addresses = std::array<uintptr_t, OPERANDS>;

struct alignas(64) EncodedMap {
  uint64_t words[16];
};

// A tensor map but for its address, and the maps of the addresses that came last.
class TensorMap {
 public:
  int dtype = 0, swizzle = 0, promotion = 0;
  std::vector<uint64_t> dims, strides;
  std::vector<uint32_t> box;

  // Returns the driver's refusal, or 0. `context`: the one to make current where there is none.
  int copy_to(void* place, uintptr_t address, uintptr_t context);

 private:
  struct Known {
    uintptr_t address = 0;
    EncodedMap map;
  };
  static constexpr size_t kept = 16;
  std::mutex lock;
  std::unique_ptr<std::array<Known, kept>> known;
};

// A place of a kernel's arguments that is written in every call.
struct Fill {
  enum Kind { ADDRESS, MAP, COUNTER } kind;
  int offset;
  Operand operand;
  int64_t plus;                    // bytes behind the operand's address; of counters, how many
  std::shared_ptr<TensorMap> map;  // of a MAP
};

// The arguments of one kernel, complete, for the addresses that came last: a model gives its layers
// the same memory in every step. Why: the tensor maps of a backward lie in some forty cache lines,
// and on a thread that has waited each of them comes from far away.
class ArgumentCache {
 public:
  struct alignas(64) Image {
    Addresses at;  // all zero: the arguments are not complete
    char* arguments() { return reinterpret_cast<char*>(this + 1); }
  };

  // The image for these addresses, or one to make it of.
  Image& find(const Addresses& at, size_t bytes);

  // The image that was found last is likely to be found again.
  void expect_latest(size_t bytes) const {
    expect(known[latest].image.get(), sizeof(Image) + bytes);
  }

  // Held by a thread that uses the images, unless another thread does.
  class Lock {
   public:
    explicit Lock(ArgumentCache& cache)
        : held(!cache.busy.exchange(true, std::memory_order_acquire)), cache(cache) {}
    ~Lock() {
      if (held) cache.busy.store(false, std::memory_order_release);
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    const bool held;

   private:
    ArgumentCache& cache;
  };

 private:
  struct Known {
    uint64_t tag = 0;
    std::unique_ptr<Image[]> image;  // followed by its arguments
  };
  static constexpr uint32_t kept = 16;
  std::atomic<bool> busy{false};
  uint32_t next = 0;    // that is replaced
  uint32_t latest = 0;  // that was found
  std::array<Known, kept> known;
};

// What every launch reads comes first; what only a new image needs, last.
struct Launch {
  uintptr_t function, context;
  unsigned grid, threads, smem;
  bool overlap;
  size_t bytes = 0;            // of the arguments
  std::vector<Fill> counters;  // which every launch takes anew
  mutable ArgumentCache images;
  std::vector<char> arguments;  // with all that no call changes
  std::vector<Fill> fills;      // all but the counters
  std::string name;
};

// The extra tensors of a call, which belong to its caller; nullptr where it has none.
struct Extras {
  std::array<const at::Tensor*, SLOTS> at{};
  bool any = false;

  void set(size_t slot, const at::Tensor& tensor) {
    at[slot] = &tensor;
    any = true;
  }
};

// The same, with their owner.
using OwnedExtras = std::vector<std::pair<Slot, at::Tensor>>;
Extras extras_of(const OwnedExtras& owned);

// What a recipe makes of extra tensors before its own launches. It is kept while they are as they
// were: all layers of a model share it.
class Prologue {
 public:
  static constexpr size_t max_sources = 2;
  int64_t bytes = 0;
  std::vector<Slot> sources;  // of what it is made
  std::vector<Launch> launches;

  // The memory that holds it, which the caller keeps until its own launches are enqueued.
  at::Tensor made_of(const Extras& extras, void* stream, Addresses& addresses);

 private:
  struct Known {
    void* stream = nullptr;
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors;
    std::array<uintptr_t, max_sources> addresses{};
    std::array<uint32_t, max_sources> versions{};
    at::Tensor made;
  };
  static constexpr size_t kept = 8;
  std::mutex lock;
  std::vector<Known> known;
  size_t next = 0;  // that is replaced
};

struct Recipe {
  int64_t scratch_bytes = 0;
  std::vector<Launch> launches;
  std::shared_ptr<Prologue> prologue;  // or none

  // Asks for what the first launch reads; to be called before memory is allocated.
  void expect_launch() const {
    if (launches.empty()) return;
    const Launch& first = launches.front();
    expect(&first, offsetof(Launch, arguments));
    first.images.expect_latest(first.bytes);
  }
};

struct Shape {
  Shape() = default;
  Shape(c10::IntArrayRef sizes, c10::IntArrayRef strides) : sizes(sizes), strides(strides) {
    TORCH_CHECK(sizes.size() == strides.size(), "as many strides as sizes");
    elements = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      TORCH_CHECK(sizes[i] >= 0 && strides[i] >= 0, "sizes and strides that are not negative");
      elements = sizes[i] == 0 || elements == 0 ? 0 : elements + (sizes[i] - 1) * strides[i];
    }
  }

  Extents sizes, strides;
  int64_t elements = 0;  // that its memory has room for
};

// A backward for gradients dout of one layout, and for the inputs whose gradients are wanted.
struct Backward {
  Extents dout_strides;
  unsigned wants = 0;      // bits of q, k, v
  unsigned zeroed = 0;     // of those that are to be zero before
  bool in_python = false;  // there is no recipe: Python makes these
  Recipe recipe;
  std::array<Shape, 3> grads;
};

// An extra tensor as the recipes of a call were made for.
struct ExtraLook {
  Slot slot;
  Shape shape;
  c10::ScalarType dtype;
  unsigned misalignment;
};

class Call {
 public:
  ~Call();

  Recipe forward;
  Shape out, lse;
  bool has_lse = false, returns_lse = false;
  bool recorded = false;                               // by autograd
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of q, k, v, out and dout
  c10::Device device = c10::kCPU;
  unsigned misalignment = 0;  // of q, k and v together, as the recipe was made for
  std::array<Shape, 3> inputs;
  std::vector<ExtraLook> extras;  // in the order of their slots
  OwnedExtras held;               // offsets of documents, which the mask holds,
  Extras held_extras;             // and the same for kernels
  PyObject* owner = nullptr;      // what Python needs to make the backwards that are not known here

  int64_t lse_bytes() const { return lse.elements * int64_t(sizeof(float)); }

  std::shared_ptr<const Backward> backward(c10::IntArrayRef dout_strides, unsigned wants);
  void learn(std::shared_ptr<const Backward> backward);

 private:
  std::mutex lock;
  std::vector<std::shared_ptr<const Backward>> known;
};

struct Results {
  at::Tensor out, lse;
};

// Enqueues the forward on the current stream of the tensors' device, and has autograd record it
// where gradients will be needed. The GIL need not be held, and should not be.
Results run(const std::shared_ptr<Call>& call, const at::Tensor& q, const at::Tensor& k,
            const at::Tensor& v, const Extras& extras = {});

// Whether nothing but kernels is to see what this thread calls: no dispatch mode, no transform, no
// trace. Autocast casts nothing here.
bool is_ordinary_thread();

// Whether the tensor is memory and nothing else: no subclass, no wrapper, no lazy values, no
// forward-mode derivative.
bool is_ordinary(const at::Tensor& tensor);

// The Call of a capsule that Python was given; nullptr with an error set for anything else.
std::shared_ptr<Call> call_of(PyObject* capsule);

// Whether calls are answered here at all: not in a child of a process that had learnt some.
bool is_enabled();

}  // namespace tilewise
