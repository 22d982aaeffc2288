// Repeated calls of tilewise.attention, and their backwards: recognised, allocated and enqueued
// without Python. See calls.h for what is what.
//
//   attend       a form, q, k, v, extra tensors and options as a user gave them -> key -> Call ->
//   run run          allocates out, lse and scratch, fills in the arguments of each kernel,
//   launches,
//                and gives out its place in autograd's graph
//   apply        the same for the gradients, on whatever thread autograd runs it
//
// The driver is found by dlopen, or is what a test puts in its place.

#include "calls.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/contiguous_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/zero_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace tilewise {
namespace {

// --- the driver, as cuda.h declares it ---

struct LaunchAttribute {
  int id;
  char padding[4];
  alignas(8) char value[64];
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr int overlaps_previous = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct Driver {
  int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
  int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                const uint32_t*, int, int, int, int) = nullptr;
  int (*is_capturing)(void*, int*) = nullptr;
  int (*get_context)(void**) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*push_context)(void*) = nullptr;
  int (*pop_context)(void**) = nullptr;
};
Driver driver;
constexpr std::array driver_names = {
    "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuStreamIsCapturing", "cuCtxGetCurrent",
    "cuCtxSetCurrent",  "cuCtxPushCurrent_v2",    "cuCtxPopCurrent_v2"};

void set_driver(const std::array<void*, driver_names.size()>& found) {
  const auto put = [](auto& function, void* address) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
  };
  put(driver.launch, found[0]);
  put(driver.encode, found[1]);
  put(driver.is_capturing, found[2]);
  put(driver.get_context, found[3]);
  put(driver.set_context, found[4]);
  put(driver.push_context, found[5]);
  put(driver.pop_context, found[6]);
}

// PyTorch's current stream, by the two functions of its CUDA library that say it: there is no
// header of CUDA's to include. Of a device that is no GPU, as tests have it, there is none.
struct StreamReader {
  c10::Stream (*current)(c10::DeviceIndex) = nullptr;
  void* (*handle)(const c10::Stream*) = nullptr;

  StreamReader() {
    void* library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return;
    current =
        reinterpret_cast<decltype(current)>(dlsym(library, "_ZN3c104cuda20getCurrentCUDAStreamEa"));
    handle =
        reinterpret_cast<decltype(handle)>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"));
  }
};

void* stream_of(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  static const StreamReader reader;
  TORCH_CHECK(reader.current != nullptr && reader.handle != nullptr,
              "PyTorch's CUDA library does not say which stream is current");
  const c10::Stream stream = reader.current(device.index());
  return reader.handle(&stream);
}

// --- state ---

// Zeroed integers on a device, for launches that hand out work by them; kernels leave them zero.
// Launches take them by turns; one that is captured into a graph keeps its own.
struct Counters {
  uintptr_t base;
  uint32_t turns, captured;
  std::atomic<uint64_t> turn{0};
  std::atomic<uint32_t> given{0};

  // `count` of them, side by side.
  uintptr_t take(bool capturing, uint32_t count) {
    if (count > (capturing ? captured : turns)) return 0;
    if (!capturing) {
      uint64_t first;
      do {
        first = turn.fetch_add(count, std::memory_order_relaxed) % turns;
      } while (first > turns - count);
      return base + 4 * first;
    }
    uint32_t first = given.load(std::memory_order_relaxed);
    do {
      if (first > captured - count) return 0;  // the kernel then takes its work in a fixed order
    } while (!given.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
    return base + 4 * (turns + uintptr_t(first));
  }
};
constexpr int max_devices = 64;
std::array<std::atomic<Counters*>, max_devices> counters{};  // never freed: graphs count with them

// Everything that decides a call, in words.
class Key {
 public:
  void add(int64_t word) { words[used++] = word; }
  // Sizes and strides; how many there are is part of another word.
  void add(const at::Tensor& tensor) {
    for (const int64_t size : tensor.sizes()) add(size);
    for (const int64_t stride : tensor.strides()) add(stride);
  }
  bool operator==(const Key& other) const {
    return used == other.used && std::equal(begin(), end(), other.begin());
  }
  const int64_t* begin() const { return words.data(); }
  const int64_t* end() const { return words.data() + used; }

 private:
  static constexpr size_t words_of_tensor = 2 + 2 * Extents::max, others = 3;
  size_t used = 0;
  std::array<int64_t, words_of_tensor * (3 + SLOTS) + others> words;  // of which some are used
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (int64_t word : key) hash = (hash ^ uint64_t(word)) * 0xff51afd7ed558ccd + (hash >> 29);
    return hash ^ (hash >> 32);
  }
};

// The options of a call and, last, its form. MAX_Q and MAX_K are words of a key instead.
using Values = std::array<PyObject*, OPTIONS + 1>;
struct Options {
  Values values;  // owned
};

// All of it guarded by the GIL but what is atomic. The numbers are written by threads that wait for
// one another, each in a line of its own: in one line they would go back and forth.
struct Memory {
  std::vector<Options> options;  // an index is part of a key
  std::unordered_map<Key, std::shared_ptr<Call>, KeyHash> calls;
  int64_t generation = 0;
  PyObject* make_backward = nullptr;  // of Python: a backward that is not known here
  PyObject* raise_failed = nullptr;   // of Python: raises for a launch that failed
  std::atomic<bool> disabled_after_fork{false};
  alignas(64) std::atomic<int64_t> forwards{0};
  alignas(64) std::atomic<int64_t> backwards{0}, backwards_in_python{0};
};
constexpr size_t max_calls = 4096, max_options = 256, max_backwards = 32;

Memory& memory() {
  static Memory* only = new Memory;  // never destroyed: threads may outlast static objects
  return *only;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// --- launches ---

constexpr size_t max_arguments = 4096;  // bytes: the most that a kernel may have

[[noreturn]] void raise_failed(const char* what, int status, const Launch& launch) {
  pybind11::gil_scoped_acquire gil;
  PyObject* refusal = Py_BuildValue("(sisIII)", what, status, launch.name.c_str(), launch.grid,
                                    launch.threads, launch.smem);
  PyObject* nothing = refusal ? PyObject_Call(memory().raise_failed, refusal, nullptr) : nullptr;
  Py_XDECREF(refusal);
  Py_XDECREF(nothing);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a launch failed");
  python_error error;
  error.persist();
  throw error;
}

// Gives this thread the device's context if it has none or another; whether it was so. A thread
// that had none keeps it, as it would after any call of CUDA's runtime.
template <typename Action>
bool in_context(uintptr_t context, Action action) {
  void* current = nullptr;
  if (driver.get_context(&current) != 0) return false;
  void* wanted = reinterpret_cast<void*>(context);
  if (current == wanted) return false;
  if (current == nullptr) {
    if (driver.set_context(wanted) != 0) return false;
    action();
    return true;
  }
  if (driver.push_context(wanted) != 0) return false;
  action();
  driver.pop_context(&current);
  return true;
}

void launch(const Launch& launch, void* stream, void* arguments) {
  LaunchAttribute attribute{};
  attribute.id = overlaps_previous;
  attribute.value[0] = 1;
  const LaunchConfig config{launch.grid, 1,      1,          launch.threads,          1, 1,
                            launch.smem, stream, &attribute, launch.overlap ? 1u : 0u};
  void* pointers[] = {arguments};
  void* function = reinterpret_cast<void*>(launch.function);
  int status = driver.launch(&config, function, pointers, nullptr);
  if (status != 0)
    in_context(launch.context,
               [&] { status = driver.launch(&config, function, pointers, nullptr); });
  if (status != 0) raise_failed("launch", status, launch);
}

// Whether what is enqueued now becomes part of a graph; nothing where the driver does not say. The
// stream that has no handle cannot be captured.
std::optional<bool> is_capturing(c10::Device device, void* stream) {
  if (device.is_cuda() && stream == nullptr) return false;
  int capturing = 0;
  if (driver.is_capturing(stream, &capturing) != 0) return std::nullopt;
  return capturing != 0;
}

void put(void* place, uintptr_t value) { std::memcpy(place, &value, sizeof(value)); }

// All arguments but counters.
void fill_in(const Launch& launch, const Addresses& addresses, char* arguments) {
  std::memcpy(arguments, launch.arguments.data(), launch.arguments.size());
  for (const Fill& fill : launch.fills) {
    const uintptr_t begin = addresses[fill.operand];
    if (fill.kind == Fill::ADDRESS) {
      put(arguments + fill.offset, begin == 0 ? 0 : begin + fill.plus);  // 0: this call has none
      continue;
    }
    const int status =
        fill.map->copy_to(arguments + fill.offset, begin + fill.plus, launch.context);
    if (status != 0) raise_failed("map", status, launch);
  }
}

void take_counters(const Launch& launch, c10::Device device, void* stream, char* arguments) {
  Counters* room = counters[device.is_cuda() ? device.index() : 0].load(std::memory_order_acquire);
  const std::optional<bool> capturing =
      room == nullptr ? std::nullopt : is_capturing(device, stream);
  for (const Fill& fill : launch.counters)
    put(arguments + fill.offset, capturing ? room->take(*capturing, uint32_t(fill.plus)) : 0);
}

void enqueue(const std::vector<Launch>& launches, c10::Device device, void* stream,
             const Addresses& addresses) {
  for (const Launch& one : launches) {
    alignas(64) char spare[max_arguments];
    char* arguments = spare;
    const ArgumentCache::Lock lock(one.images);  // until the driver has read the arguments
    if (lock.held) {
      ArgumentCache::Image& image = one.images.find(addresses, one.bytes);
      arguments = image.arguments();
      if (image.at != addresses) {
        image.at = {};
        fill_in(one, addresses, arguments);
        image.at = addresses;
      }
    } else {
      fill_in(one, addresses, arguments);
    }
    if (!one.counters.empty()) take_counters(one, device, stream, arguments);
    launch(one, stream, arguments);
  }
}

uintptr_t address(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) : 0;
}

c10::DispatchKeySet key_of(c10::Device device) {
  return c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
}

// What PyTorch allocates with on a device. An allocator that is in use is never replaced, so it is
// asked once: of a tensor, because a user may have set another than CUDA's own.
c10::Allocator* allocator_of(c10::Device device) {
  static std::array<std::atomic<c10::Allocator*>, 2> known{};
  auto& place = known[device.is_cuda() ? 1 : 0];
  c10::Allocator* found = place.load(std::memory_order_acquire);
  if (found == nullptr) {
    const c10::DispatchKeySet key = key_of(device);
    const c10::SymInt one = 1;
    found =
        at::_ops::empty_strided::redispatch(key, c10::SymIntArrayRef(one), c10::SymIntArrayRef(one),
                                            c10::kByte, c10::kStrided, device, false)
            .storage()
            .allocator();
    if (found == nullptr) found = c10::GetAllocator(device.type());
    place.store(found, std::memory_order_release);
  }
  return found;
}

// The device of a recipe as the current one: where its memory comes from, and its launches go. Why
// this asks first: a guard that changes nothing asks the driver, under a lock, where it ends.
// PyTorch may put off a change of the device until it is needed, so the driver's own answer counts
// too.
c10::OptionalDeviceGuard make_current(c10::Device device, const Recipe& recipe) {
  if (!device.is_cuda()) return c10::OptionalDeviceGuard();
  void* context = nullptr;
  if (!recipe.launches.empty() &&
      c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice() == device &&
      driver.get_context(&context) == 0 &&
      reinterpret_cast<uintptr_t>(context) == recipe.launches.front().context)
    return c10::OptionalDeviceGuard();
  return c10::OptionalDeviceGuard(device);
}

// A tensor of this memory, from an element of it on.
at::Tensor tensor_of(c10::Storage memory, const Shape& shape, c10::ScalarType dtype,
                     int64_t first = 0) {
  const c10::DispatchKeySet key = key_of(memory.device());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(memory), key,
                                                             c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, first);
  return made;
}

c10::Storage storage_of(c10::DataPtr&& memory, int64_t bytes, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               std::move(memory), allocator, true);
}

// Fresh memory on the current device, which starts as nan of every type where tilewise/fresh.py
// says so. Below the dispatcher: nothing above the allocator has a say in what we allocate.
c10::Storage empty_storage(int64_t bytes, c10::Device device) {
  static const bool is_poisoned = [] {
    const char* set = std::getenv("TILEWISE_POISON");
    return set != nullptr && std::strcmp(set, "") != 0 && std::strcmp(set, "0") != 0;
  }();
  c10::Allocator* allocator = allocator_of(device);
  c10::Storage made = storage_of(allocator->allocate(size_t(bytes)), bytes, allocator);
  if (is_poisoned) {
    at::Tensor numbers = tensor_of(made, Shape(bytes, 1), c10::kByte);
    at::_ops::fill__Scalar::redispatch(key_of(device), numbers, 255);
  }
  return made;
}

// Memory that no tensor is made of.
c10::DataPtr empty_bytes(int64_t bytes, c10::Device device) {
  return bytes == 0 ? c10::DataPtr() : empty_storage(bytes, device).set_data_ptr(c10::DataPtr());
}

at::Tensor empty(const Shape& shape, c10::ScalarType dtype, c10::Device device) {
  const int64_t bytes = shape.elements * int64_t(c10::elementSize(dtype));
  return tensor_of(empty_storage(bytes, device), shape, dtype);
}

void enqueue(const Recipe& recipe, c10::Device device, Addresses& addresses, const Extras& extras) {
  void* stream = stream_of(device);
  for (size_t i = 0; extras.any && i < SLOTS; ++i)
    if (extras.at[i] != nullptr) addresses[FIRST_SLOT + i] = address(*extras.at[i]);
  at::Tensor made;
  if (recipe.prologue != nullptr) made = recipe.prologue->made_of(extras, stream, addresses);
  enqueue(recipe.launches, device, stream, addresses);
}

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides[i] = step;
  return strides;
}

// --- autograd ---

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
// Releases differ in who owns a node.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Made, typename Pointer = NodePointer, typename... Arguments>
Pointer new_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
    return Pointer(new Made(std::forward<Arguments>(arguments)...),
                   [](auto* node) { deleteNode(node); });  // of torch::autograd
  else
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
}

// As the kernels read it: rows of contiguous numbers that begin at multiples of 16 bytes.
bool is_readable(const at::Tensor& tensor) {
  const c10::IntArrayRef strides = tensor.strides();
  for (size_t i = 0; i + 1 < strides.size(); ++i)
    if (strides[i] % 8 != 0) return false;
  return strides.back() == 1 && address(tensor) % 16 == 0;
}

// What a call brings, or what its mask holds.
const Extras& extras_read(const Call& call, const Extras& given) {
  return call.held.empty() ? given : call.held_extras;
}

Shape shape_of(const at::Tensor& tensor) { return {tensor.sizes(), tensor.strides()}; }

bool has_shape(const at::Tensor& tensor, const Shape& shape) {
  return tensor.sizes() == c10::IntArrayRef(shape.sizes) &&
         tensor.strides() == c10::IntArrayRef(shape.strides);
}

bool looks_like(const at::Tensor& tensor, const ExtraLook& look) {
  return is_ordinary(tensor) && tensor.scalar_type() == look.dtype &&
         has_shape(tensor, look.shape) && address(tensor) % 16 == look.misalignment;
}

// The memory of a tensor that was saved: undefined where hooks hold it, where it was released, or
// where this release of PyTorch does not give it. To unpack it asks for its place in the graph, and
// makes one for an output, which kernels do not need.
template <typename Saved>
at::Tensor memory_of(const Saved& saved) {
  if constexpr (requires { saved.get_raw_data(); }) {
    if (std::optional<at::Tensor> data = saved.get_raw_data()) return *std::move(data);
  }
  return {};
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Whether what autograd saves on this thread is to be seen by hooks of a user's.
bool is_saving_watched() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

// Its place in the graph is what an operation made, and not a leaf's.
bool has_history(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->grad_fn_ != nullptr;
}

// What a backward needs is saved in one of two ways. As a rule the node keeps it itself: the
// inputs, and the memory of the results, not as tensors: out would keep itself alive by its node,
// and nobody but a backward wants lse. Where hooks are to see what is saved, or lse is returned,
// there are SavedVariables instead, in the order of the path in Python: a checkpoint may recompute
// one by the other.
class AttentionBackward final : public Node {
 public:
  enum { q, k, v, out, lse, count };

  AttentionBackward(std::shared_ptr<Call> call, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), call(std::move(call)) {}

  // Whether a call with these inputs may keep what its backward needs.
  static bool can_keep(const Call& call, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v) {
    if (call.returns_lse) return false;
    if (!call.recorded) return true;  // there is no backward
    if (is_saving_watched()) return false;
    for (const at::Tensor* one : {&q, &k, &v})  // PyTorch refuses what has no version
      if (!one->unsafeGetTensorImpl()->version_counter().enabled()) return false;
    return true;
  }

  void keep(const std::array<const at::Tensor*, 3>& given, const at::Tensor& result,
            c10::DataPtr&& lse) {
    for (size_t i = 0; i < 3; ++i) {
      const at::Tensor& one = *given[i];
      inputs[i] = one;
      versions[i] = version_of(one);
      storages[i] = one.storage().unsafeGetStorageImpl();
      if (has_history(one)) histories |= 1u << i;
    }
    const c10::TensorImpl& impl = *result.unsafeGetTensorImpl();
    out_memory = impl.storage();
    out_version = impl.version_counter();
    versions[out] = out_version.current_version();
    lse_memory = std::move(lse);
  }

  void save(const std::array<const at::Tensor*, count>& tensors) {
    saved = std::make_unique<std::array<SavedVariable, count>>();
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor& one = *tensors[i];
      (*saved)[i] = SavedVariable(one, is_result(i));
      if (one.defined()) versions[i] = version_of(one);
    }
  }

  void save_extras(const Extras& given) {
    for (size_t i = 0; given.any && i < SLOTS; ++i)
      if (given.at[i] != nullptr) extras.emplace_back(Slot(i), SavedVariable(*given.at[i], false));
  }

  std::string name() const override { return "TilewiseAttentionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> guard(mutex_);
    for (at::Tensor& one : inputs) one.reset();
    out_memory = c10::Storage();
    out_version = c10::VariableVersion();
    lse_memory.clear();
    lse_tensor.reset();
    if (saved != nullptr)
      for (SavedVariable& one : *saved) one.reset_data();
    for (auto& [slot, one] : extras) one.reset_data();
  }

  variable_list apply(variable_list&& given) override {
    expect(this, sizeof(*this));
    for (const at::Tensor& one : inputs) expect(one.unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
    for (const void* one : storages) expect(one, sizeof(c10::StorageImpl));
    expect(out_memory.unsafeGetStorageImpl(), sizeof(c10::StorageImpl));
    expect(call.get(), sizeof(Call));
    variable_list grads(3);
    const at::Tensor dlse = given.size() > 1 ? given[1] : at::Tensor();
    if (!given[0].defined() && !dlse.defined()) return grads;
    unsigned wants = 0;
    for (unsigned i = 0; i < 3; ++i)
      if (task_should_compute_output(i)) wants |= 1u << i;
    at::Tensor dout = given[0];
    std::shared_ptr<const Backward> known;
    Saved now;
    bool may = false;
    {
      // Until all is enqueued: what is saved is read where it lies.
      std::lock_guard<std::mutex> guard(mutex_);
      bool unpacked = false;  // whether all have their places in the graph
      if (saved == nullptr) {
        check_kept();
      } else {
        unpacked = !take(now);
        if (unpacked) unpack(now);
      }
      if (wants == 0) return grads;
      if (saved == nullptr) unpack_extras(now);
      const Operands read = saved == nullptr ? kept_operands(now) : operands_of(now);
      may = is_enabled() && can_be_made(read, dout, dlse);
      if (may) {
        if (!is_readable(dout))
          dout = at::_ops::contiguous::call(dout, at::MemoryFormat::Contiguous);
        known = call->backward(dout.strides(), wants);
      }
      if (known != nullptr && !known->in_python) {
        make(*known, read, dout, dlse, grads);
        return grads;
      }
      if (saved == nullptr) {
        unpack_kept(now);
      } else if (!unpacked) {
        unpack(now);
      }
    }
    make_in_python(now, may ? dout : given[0], dlse, wants, may && known == nullptr, grads);
    return grads;
  }

 private:
  struct Saved {
    std::array<at::Tensor, count> tensors;
    OwnedExtras extras;

    const at::Tensor& operator[](size_t i) const { return tensors[i]; }
  };

  // What kernels read, where it lies; `usable` says whether the results are as kernels made them.
  struct Operands {
    std::array<const at::Tensor*, 3> inputs;
    uintptr_t out = 0, lse = 0;
    bool usable = false;
    const OwnedExtras& extras;
  };

  std::shared_ptr<Call> call;
  std::array<at::Tensor, 3> inputs;  // undefined once they are released
  c10::Storage out_memory;
  c10::VariableVersion out_version;
  c10::DataPtr lse_memory;  // until Python has asked for a tensor of it
  at::Tensor lse_tensor;
  std::array<uint32_t, count> versions{};
  uint8_t histories = 0;  // bits of the inputs that are no leaves
  // Only to be asked for early, never looked into: what was saved may be gone.
  std::array<const void*, 3> storages{};
  std::unique_ptr<std::array<SavedVariable, count>> saved;
  std::vector<std::pair<Slot, SavedVariable>> extras;

  bool is_result(size_t i) const { return i == out || (i == lse && call->returns_lse); }

  // PyTorch's own refusal of a tensor that is not what it was: a stand-in is saved as the tensor
  // was, and becomes what the tensor is.
  [[noreturn]] void refuse(const at::Tensor& now, uint32_t version, bool had_history) {
    namespace impl = torch::autograd::impl;
    struct NoHooks {
      const bool before = at::SavedTensorDefaultHooks::set_tracing(true);
      ~NoHooks() { at::SavedTensorDefaultHooks::set_tracing(before); }
    } no_hooks;
    const c10::InferenceMode tracked(false);
    const at::Tensor stand_in = now.tensor_data();
    impl::set_version_counter(stand_in, c10::VariableVersion(version));
    if (had_history) impl::set_gradient_edge(stand_in, Edge(getptr(), 0));
    const SavedVariable one(stand_in, false);
    impl::set_version_counter(stand_in, impl::version_counter(now));
    impl::set_gradient_edge(stand_in, Edge(now.grad_fn(), 0));
    one.unpack();
    TORCH_CHECK(false, "a tensor that attention saved for its backward has changed");
  }

  // `out` as it was made, in its place in the graph.
  at::Tensor kept_out() {
    const c10::InferenceMode tracked(false);
    at::Tensor made = tensor_of(out_memory, call->out, call->dtype);
    torch::autograd::impl::set_version_counter(made, out_version);
    torch::autograd::impl::set_gradient_edge(made, Edge(getptr(), 0));
    return made;
  }

  void check_kept() {
    TORCH_CHECK(inputs[q].defined(), torch::autograd::ERR_BACKWARD_TWICE);
    for (size_t i = 0; i < 3; ++i)
      if (version_of(inputs[i]) != versions[i]) refuse(inputs[i], versions[i], histories >> i & 1);
    if (out_version.current_version() != versions[out]) refuse(kept_out(), versions[out], true);
  }

  // For Python.
  void unpack_kept(Saved& now) {
    const c10::InferenceMode tracked(false);
    for (size_t i = 0; i < 3; ++i) {
      if ((histories >> i & 1) != 0 && inputs[i].grad_fn() == nullptr)  // detached in place
        refuse(inputs[i], versions[i], true);
      now.tensors[i] = inputs[i];
    }
    now.tensors[out] = kept_out();
    if (lse_memory) {
      const c10::Device device = lse_memory.device();
      c10::Storage memory =
          storage_of(std::move(lse_memory), call->lse_bytes(), allocator_of(device));
      lse_memory.clear();
      lse_tensor = tensor_of(std::move(memory), call->lse, c10::kFloat);
    }
    now.tensors[lse] = lse_tensor;
  }

  void unpack_extras(Saved& now) const {
    for (const auto& [slot, one] : extras) now.extras.emplace_back(slot, one.unpack());
  }

  Operands kept_operands(const Saved& now) const {
    Operands read{{&inputs[q], &inputs[k], &inputs[v]}, 0, 0, false, now.extras};
    read.out = reinterpret_cast<uintptr_t>(out_memory.data());
    read.lse =
        lse_tensor.defined() ? address(lse_tensor) : reinterpret_cast<uintptr_t>(lse_memory.get());
    read.usable = read.out != 0 && read.lse != 0 && out_memory.device() == call->device;
    return read;
  }

  // Hooks on saved tensors may have laid them out anew.
  Operands operands_of(const Saved& now) const {
    Operands read{{&now[q], &now[k], &now[v]}, 0, 0, false, now.extras};
    for (size_t i : {out, lse})
      if (!is_ordinary(now[i]) || now[i].device() != call->device) return read;
    read.out = address(now[out]);
    read.lse = address(now[lse]);
    read.usable = has_shape(now[out], call->out) && now[out].scalar_type() == call->dtype &&
                  has_shape(now[lse], call->lse) && now[lse].scalar_type() == c10::kFloat;
    return read;
  }

  // What was saved, as memory; false where it has to be unpacked. First all, then whether they have
  // changed: who counts a reference waits for what is on its way.
  bool take(Saved& now) const {
    for (size_t i = 0; i < count; ++i) now.tensors[i] = memory_of((*saved)[i]);
    for (size_t i = 0; i < count; ++i)
      if (!now[i].defined() || version_of(now[i]) != versions[i]) return false;
    unpack_extras(now);
    return true;
  }

  void unpack(Saved& now) {
    for (size_t i = 0; i < count; ++i)
      now.tensors[i] = is_result(i) ? (*saved)[i].unpack(getptr()) : (*saved)[i].unpack();
    if (now.extras.empty()) unpack_extras(now);
  }

  // Inputs may have been given other memory, of any size and kind, and so may gradients.
  bool can_be_made(const Operands& read, const at::Tensor& dout, const at::Tensor& dlse) const {
    if (!read.usable || c10::GradMode::is_enabled() || !is_ordinary_thread() || !dout.defined())
      return false;
    const c10::Device device = call->device;
    const auto is_like_inputs = [&](const at::Tensor& one) {
      return is_ordinary(one) && one.device() == device && one.scalar_type() == call->dtype;
    };
    for (const at::Tensor* one : read.inputs)
      if (!is_like_inputs(*one)) return false;
    if (!is_like_inputs(dout) || dout.sizes() != c10::IntArrayRef(call->out.sizes)) return false;
    if (read.extras.size() != call->extras.size()) return false;
    for (size_t i = 0; i < read.extras.size(); ++i) {
      const auto& [slot, one] = read.extras[i];
      if (!one.defined() || one.device() != device || !looks_like(one, call->extras[i]))
        return false;
    }
    if (dlse.defined() &&
        (!is_ordinary(dlse) || dlse.scalar_type() != c10::kFloat || dlse.device() != device ||
         !dlse.is_contiguous() || dlse.sizes() != c10::IntArrayRef(call->lse.sizes)))
      return false;
    uintptr_t together = 0;
    for (size_t i = 0; i < 3; ++i) {
      if (!has_shape(*read.inputs[i], call->inputs[i])) return false;
      together |= address(*read.inputs[i]);
    }
    return together % 16 == call->misalignment && read.out % 16 == 0;
  }

  // Small gradients share their memory: three allocations take as long as the launch, and memory
  // that lives as long as the last of them is no loss. Each is a tensor of its own elements: what
  // PyTorch adds in place to one of them, as to a `.grad`, the others do not see.
  static constexpr int64_t shared_bytes = 1 << 20, alignment = 512;
  static void make_room(const Backward& backward, c10::ScalarType dtype, c10::Device device,
                        variable_list& grads) {
    const auto size = int64_t(c10::elementSize(dtype));
    std::array<int64_t, 3> first{};  // in bytes
    int64_t bytes = 0;
    for (unsigned i = 0; i < 3; ++i) {
      if ((backward.wants >> i & 1) == 0) continue;
      first[i] = bytes;
      bytes += (backward.grads[i].elements * size + alignment - 1) / alignment * alignment;
    }
    c10::Storage shared;
    if (bytes <= shared_bytes) shared = empty_storage(bytes, device);
    for (unsigned i = 0; i < 3; ++i) {
      if ((backward.wants >> i & 1) == 0) continue;
      grads[i] = shared ? tensor_of(shared, backward.grads[i], dtype, first[i] / size)
                        : empty(backward.grads[i], dtype, device);
    }
  }

  void make(const Backward& backward, const Operands& read, const at::Tensor& dout,
            const at::Tensor& dlse, variable_list& grads) const {
    const c10::Device device = read.inputs[q]->device();
    backward.recipe.expect_launch();
    const c10::OptionalDeviceGuard guard = make_current(device, backward.recipe);
    make_room(backward, dout.scalar_type(), device, grads);
    Addresses at{};
    for (unsigned i = 0; i < 3; ++i) {
      if ((backward.wants >> i & 1) == 0) continue;
      if (backward.zeroed >> i & 1) at::_ops::zero_::call(grads[i]);
      at[DQ + i] = address(grads[i]);
    }
    const c10::DataPtr scratch = empty_bytes(backward.recipe.scratch_bytes, device);
    at[Q] = address(*read.inputs[q]);
    at[K] = address(*read.inputs[k]);
    at[V] = address(*read.inputs[v]);
    at[OUT] = read.out;
    at[LSE] = read.lse;
    at[DOUT] = address(dout);
    at[DLSE] = address(dlse);
    at[SCRATCH] = reinterpret_cast<uintptr_t>(scratch.get());
    const Extras extras = extras_of(read.extras);
    enqueue(backward.recipe, device, at, extras_read(*call, extras));
    memory().backwards.fetch_add(1, std::memory_order_relaxed);
  }

  void make_in_python(const Saved& saved, const at::Tensor& dout, const at::Tensor& dlse,
                      unsigned wants, bool learn, variable_list& grads) const;
};

// A node of three inputs that computes nothing: autograd's own share of a step, to measure others
// by.
class EmptyBackward final : public Node {
 public:
  std::string name() const override { return "TilewiseEmptyBackward"; }
  variable_list apply(variable_list&& given) override { return {given[0], given[0], given[0]}; }
};

void delete_capsule(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Call>*>(PyCapsule_GetPointer(capsule, "tilewise.call"));
}

PyObject* capsule_of(const std::shared_ptr<Call>& call) {
  auto* held = new std::shared_ptr<Call>(call);
  PyObject* capsule = PyCapsule_New(held, "tilewise.call", delete_capsule);
  if (capsule == nullptr) delete held;
  return capsule;
}

// Python's object for a tensor, or None for one that is not there; with the GIL.
PyObject* wrapped(const at::Tensor& tensor) {
  if (!tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(tensor);
}

void AttentionBackward::make_in_python(const Saved& saved, const at::Tensor& dout,
                                       const at::Tensor& dlse, unsigned wants, bool learn,
                                       variable_list& grads) const {
  memory().backwards_in_python.fetch_add(1, std::memory_order_relaxed);
  TORCH_CHECK(!is_finalizing(), "a backward that needs Python, which is ending");
  pybind11::gil_scoped_acquire gil;
  PyObject* extra_tensors = PyTuple_New(Py_ssize_t(saved.extras.size()));
  if (extra_tensors == nullptr) throw python_error();
  for (size_t i = 0; i < saved.extras.size(); ++i)
    PyTuple_SET_ITEM(extra_tensors, Py_ssize_t(i), wrapped(saved.extras[i].second));
  PyObject* arguments =
      Py_BuildValue("(NONNNNNNNNIO)", capsule_of(call), call->owner, wrapped(dout), wrapped(dlse),
                    wrapped(saved[q]), wrapped(saved[k]), wrapped(saved[v]), wrapped(saved[out]),
                    wrapped(saved[lse]), extra_tensors, wants, learn ? Py_True : Py_False);
  PyObject* made = arguments ? PyObject_Call(memory().make_backward, arguments, nullptr) : nullptr;
  Py_XDECREF(arguments);
  if (made == nullptr) {
    python_error error;
    error.persist();
    throw error;
  }
  TORCH_CHECK(PyTuple_Check(made) && PyTuple_GET_SIZE(made) == 3, "gradients of q, k and v");
  for (int i = 0; i < 3; ++i) {
    PyObject* grad = PyTuple_GET_ITEM(made, i);
    if (THPVariable_Check(grad)) grads[i] = THPVariable_Unpack(grad);
  }
  Py_DECREF(made);
}

}  // namespace

// --- what is shared ---

int TensorMap::copy_to(void* place, uintptr_t address, uintptr_t context) {
  std::lock_guard<std::mutex> guard(lock);
  if (known == nullptr) known = std::make_unique<std::array<Known, kept>>();
  // Allocations begin at multiples of 512 bytes, and most are of many times that.
  Known& one = (*known)[((address >> 9) ^ (address >> 13) ^ (address >> 21)) % kept];
  if (one.address != address) {
    static constexpr uint32_t ones[5] = {1, 1, 1, 1, 1};
    int status = 0;
    const auto encode = [&] {
      status =
          driver.encode(&one.map, dtype, uint32_t(dims.size()), reinterpret_cast<void*>(address),
                        dims.data(), strides.data(), box.data(), ones, 0, swizzle, promotion, 0);
    };
    one.address = 0;
    encode();
    if (status != 0) in_context(context, encode);  // an autograd thread may come here without one
    if (status != 0) return status;
    one.address = address;
  }
  std::memcpy(place, &one.map, sizeof(one.map));
  return 0;
}

ArgumentCache::Image& ArgumentCache::find(const Addresses& at, size_t bytes) {
  uint64_t tag = 0;
  for (const uintptr_t one : at) tag = (tag ^ one) * 0x9e3779b97f4a7c15 + (tag >> 32);
  for (uint32_t i = 0; i < kept; ++i) {
    const uint32_t place = (latest + i) % kept;
    if (known[place].tag != tag || known[place].image == nullptr) continue;
    latest = place;
    return known[place].image[0];
  }
  latest = next;
  next = (next + 1) % kept;
  Known& one = known[latest];
  if (one.image == nullptr)
    one.image.reset(new Image[1 + (bytes + sizeof(Image) - 1) / sizeof(Image)]{});
  one.tag = tag;
  return one.image[0];
}

// The tensor that has the version of this one: of a view its base. One that merely shares the
// memory, as `.data` does, has a version of its own, which does not count changes of the other.
static const at::TensorBase& versioned(const at::Tensor& tensor) {
  if (tensor.is_view()) return tensor._base();
  return tensor;
}

Extras extras_of(const OwnedExtras& owned) {
  Extras found;
  for (const auto& [slot, tensor] : owned) found.set(slot, tensor);
  return found;
}

at::Tensor Prologue::made_of(const Extras& extras, void* stream, Addresses& addresses) {
  std::array<const at::Tensor*, max_sources> given{};
  std::array<uintptr_t, max_sources> places{};
  std::array<uint32_t, max_sources> versions{};
  bool may_keep = true;
  const size_t count = sources.size();
  for (size_t i = 0; i < count; ++i) {
    given[i] = extras.at[sources[i]];
    TORCH_CHECK(given[i] != nullptr, "a call brings what its prologue reads");
    places[i] = address(*given[i]);
    if (given[i]->is_inference()) {  // nothing counts its changes
      may_keep = false;
    } else {
      versions[i] = given[i]->_version();
    }
  }
  const c10::Device device = given[0]->device();
  if (is_capturing(device, stream).value_or(true)) may_keep = false;
  // A tensor has no other's address while a weak reference to it is kept.
  const auto is_now = [&](const Known& one) {
    if (one.stream != stream || one.addresses != places || one.versions != versions) return false;
    for (size_t i = 0; i < count; ++i) {
      const auto& kept = one.tensors[i];
      if (kept._unsafe_get_target() != versioned(*given[i]).unsafeGetTensorImpl() || kept.expired())
        return false;
    }
    return true;
  };
  std::lock_guard<std::mutex> guard(lock);
  if (may_keep) {
    for (const Known& one : known) {
      if (!is_now(one)) continue;
      addresses[PREPARED] = address(one.made);
      return one.made;
    }
  }
  const Shape shape(bytes, 1);
  const at::Tensor made = empty(shape, c10::kByte, device);
  addresses[PREPARED] = address(made);
  enqueue(launches, device, stream, addresses);
  if (may_keep) {
    Known now{stream, {}, places, versions, made};
    for (size_t i = 0; i < count; ++i)
      now.tensors.emplace_back(versioned(*given[i]).getIntrusivePtr());
    std::erase_if(known, [](const Known& one) {
      return std::any_of(one.tensors.begin(), one.tensors.end(),
                         [](const auto& kept) { return kept.expired(); });
    });
    if (known.size() < kept) {
      known.push_back(std::move(now));
    } else {
      known[next] = std::move(now);
      next = (next + 1) % kept;
    }
  }
  return made;
}

Call::~Call() {
  if (owner == nullptr || is_finalizing()) return;  // the process takes it along
  pybind11::gil_scoped_acquire gil;
  Py_DECREF(owner);
}

std::shared_ptr<const Backward> Call::backward(c10::IntArrayRef dout_strides, unsigned wants) {
  std::lock_guard<std::mutex> guard(lock);
  for (const auto& one : known)
    if (one->wants == wants && dout_strides == c10::IntArrayRef(one->dout_strides)) return one;
  return nullptr;
}

void Call::learn(std::shared_ptr<const Backward> backward) {
  std::lock_guard<std::mutex> guard(lock);
  if (known.size() == max_backwards) known.clear();
  known.push_back(std::move(backward));
}

bool is_enabled() { return !memory().disabled_after_fork.load(std::memory_order_relaxed); }

bool is_ordinary_thread() {
  static const uint64_t usual =
      (c10::default_included_set | c10::autocast_dispatch_keyset).raw_repr();
  return (c10::impl::tls_local_dispatch_key_set().included_.raw_repr() & ~usual) == 0;
}

// Whether forward-mode AD is at work on a tensor. A view may have the tangent of its base; for any
// other tensor this asks without the lock that PyTorch's own answer takes.
static bool has_tangent(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || (meta->fw_grad_ == nullptr && !meta->is_view_)) return false;
  return tensor._fw_grad(0).defined();
}

bool is_ordinary(const at::Tensor& tensor) {
  static const uint64_t usual =
      (c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                            c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                            c10::DispatchKey::ADInplaceOrView}) |
       c10::autocast_dispatch_keyset)
          .raw_repr();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return (impl.key_set().raw_repr() & ~usual) == 0 && impl.layout() == c10::kStrided &&
         !impl.has_symbolic_sizes_strides() && !impl.is_python_dispatch() && impl.has_storage() &&
         impl.storage().data() != nullptr && !has_tangent(tensor);
}

namespace {

// What a forward makes: where lse is for a backward alone, and the node keeps it, only its memory.
struct Made : Results {
  c10::DataPtr lse_memory;
  bool kept = false;
};

Made make_forward(const Call& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const Extras& extras) {
  const c10::Device device = q.device();
  call.forward.expect_launch();
  const c10::OptionalDeviceGuard guard = make_current(device, call.forward);
  Made made;
  made.kept = AttentionBackward::can_keep(call, q, k, v);
  made.out = empty(call.out, q.scalar_type(), device);
  if (call.has_lse) {
    if (made.kept)
      made.lse_memory = empty_bytes(call.lse_bytes(), device);
    else
      made.lse = empty(call.lse, c10::kFloat, device);
  }
  const c10::DataPtr scratch = empty_bytes(call.forward.scratch_bytes, device);
  Addresses at{};
  at[Q] = address(q);
  at[K] = address(k);
  at[V] = address(v);
  at[OUT] = address(made.out);
  at[LSE] = made.kept ? reinterpret_cast<uintptr_t>(made.lse_memory.get()) : address(made.lse);
  at[SCRATCH] = reinterpret_cast<uintptr_t>(scratch.get());
  enqueue(call.forward, device, at, extras_read(call, extras));
  memory().forwards.fetch_add(1, std::memory_order_relaxed);
  return made;
}

// A new tensor's place in the graph: the next output of what the node is the backward of.
void place(const at::Tensor& made, const NodePointer& node) {
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  const uint32_t number = node->add_input_metadata(made);
  impl->set_autograd_meta(
      std::make_unique<torch::autograd::AutogradMeta>(impl, false, Edge(node, number)));
}

// The results' place in autograd's graph.
void record(const std::shared_ptr<Call>& call, const at::Tensor& q, const at::Tensor& k,
            const at::Tensor& v, const Extras& extras, Made& made) {
  torch::autograd::edge_list edges;
  edges.reserve(3);
  for (const at::Tensor* one : {&q, &k, &v})
    edges.push_back(torch::autograd::impl::gradient_edge(*one));
  const NodePointer node = new_node<AttentionBackward>(call, std::move(edges));
  auto& backward = static_cast<AttentionBackward&>(*node);
  place(made.out, node);
  if (call->returns_lse) place(made.lse, node);
  if (made.kept)
    backward.keep({&q, &k, &v}, made.out, std::move(made.lse_memory));
  else
    backward.save({&q, &k, &v, &made.out, &made.lse});
  backward.save_extras(extras);
}

}  // namespace

Results run(const std::shared_ptr<Call>& call, const at::Tensor& q, const at::Tensor& k,
            const at::Tensor& v, const Extras& extras) {
  Made made = make_forward(*call, q, k, v, extras);
  if (call->recorded) record(call, q, k, v, extras, made);
  return {std::move(made.out), std::move(made.lse)};
}

std::shared_ptr<Call> call_of(PyObject* capsule) {
  auto* held = static_cast<std::shared_ptr<Call>*>(PyCapsule_GetPointer(capsule, "tilewise.call"));
  return held == nullptr ? nullptr : *held;
}

// --- keys ---

namespace {

bool needs_grad(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return c10::GradMode::is_enabled() &&
         (q.requires_grad() || k.requires_grad() || v.requires_grad());
}

unsigned misalignment_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return unsigned(address(q) | address(k) | address(v)) % 16;
}

// A tensor's type, in a word.
int64_t kind_of(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  return tensor.dim() | int64_t(tensor.scalar_type()) << 8 |
         int64_t(uint8_t(device.index())) << 16 | int64_t(device.type()) << 24;
}

// Everything that decides a call; false for tensors that none is known for. `longest`: the classes
// of MAX_Q and MAX_K.
bool fill_key(Key& key, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const Extras& extras, size_t options, int64_t longest) {
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    if (tensor->dim() > int64_t(Extents::max)) return false;
    key.add(int64_t(tensor->key_set().raw_repr()));
    key.add(kind_of(*tensor));
    key.add(*tensor);
  }
  const at::Tensor *of_queries = extras.at[CU_SEQLENS_Q], *of_keys = extras.at[CU_SEQLENS_K];
  const bool same = of_queries != nullptr && of_keys != nullptr && of_queries->is_same(*of_keys);
  key.add(int64_t(options));
  key.add(longest);
  key.add(misalignment_of(q, k, v) | unsigned(needs_grad(q, k, v)) << 8 |
          unsigned(at::globalContext().deterministicAlgorithms()) << 9 | unsigned(same) << 10);
  for (size_t i = 0; extras.any && i < SLOTS; ++i) {
    if (extras.at[i] == nullptr) continue;
    const at::Tensor& one = *extras.at[i];
    if (!is_ordinary(one) || one.dim() > int64_t(Extents::max) || one.device() != q.device() ||
        (c10::GradMode::is_enabled() && one.requires_grad()))
      return false;
    key.add(int64_t(i) << 48 | int64_t(address(one) % 16) << 32 | kind_of(one));
    key.add(one);
  }
  return true;
}

// Equal as the keys of a dictionary are: the same object, or of one type and equal.
bool same(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal > 0;
}

// Lets go of the GIL for as long as it exists.
class NoGil {
 public:
  NoGil() : thread(PyEval_SaveThread()) {}
  ~NoGil() { PyEval_RestoreThread(thread); }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* thread;
};

constexpr size_t not_known = size_t(-1);

size_t find_options(const Values& values) {
  // By index, and `same` may run Python that changes the list.
  for (size_t i = 0; i < memory().options.size(); ++i) {
    const auto kept = memory().options[i].values;
    bool all = true;
    for (size_t j = 0; all && j < kept.size(); ++j) all = same(kept[j], values[j]);
    if (all) return i;
  }
  return not_known;
}

// The class of a length, as `rounded_length` of call/request.py; -1 for what is no integer.
int64_t rounded_length(PyObject* length) {
  constexpr long shortest = 64, longest = 1 << 20;
  if (!PyLong_CheckExact(length)) return -1;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(length, &overflow);
  if (overflow != 0 || value <= 0 || value > longest) return 0;
  long bound = shortest;
  while (bound < value) bound *= 2;
  return bound;
}

// The options as a key and the memory have them; false for those that no call has.
bool read_options(PyObject* form, PyObject* const* given, Values& values, int64_t& longest) {
  std::copy_n(given, size_t(OPTIONS), values.begin());
  const int64_t max_q = rounded_length(values[MAX_Q]), max_k = rounded_length(values[MAX_K]);
  values[MAX_Q] = values[MAX_K] = Py_None;
  values[OPTIONS] = form;
  longest = max_q | max_k << 32;
  return max_q >= 0 && max_k >= 0;
}

// Whether what tensors on a device hold is checked in every call, as operands.py says: by Python.
bool are_checked() {
  const char* set = std::getenv("TILEWISE_CHECK");
  return set != nullptr && std::strcmp(set, "") != 0 && std::strcmp(set, "0") != 0;
}

// What was learnt counts no more. Calls that are under way, and graphs, keep their own. What is let
// go of may run Python, so it goes last.
void forget_all() {
  Memory& known = memory();
  const auto calls = std::exchange(known.calls, {});
  const auto options = std::exchange(known.options, {});
  for (const Options& one : options)
    for (PyObject* value : one.values) Py_DECREF(value);
}

// --- for Python ---

// attend(form, q, k, v, the extra tensors by slot, the options) -> the results of a call that is
// known, or None
PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr size_t first_tensor = 1, first_slot = 4, first_option = first_slot + SLOTS;
  if (count != Py_ssize_t(first_option + OPTIONS)) {
    PyErr_SetString(PyExc_TypeError, "attend wants a form, q, k, v, the slots and the options");
    return nullptr;
  }
  if (memory().calls.empty() || !is_enabled()) Py_RETURN_NONE;
  for (size_t i = first_tensor; i < first_slot; ++i)
    if (!THPVariable_CheckExact(given[i])) Py_RETURN_NONE;
  const at::Tensor &q = THPVariable_Unpack(given[1]), &k = THPVariable_Unpack(given[2]),
                   &v = THPVariable_Unpack(given[3]);
  if (!is_ordinary_thread() || !is_ordinary(q) || !is_ordinary(k) || !is_ordinary(v))
    Py_RETURN_NONE;
  Extras extras;
  for (size_t i = 0; i < SLOTS; ++i) {
    if (given[first_slot + i] == Py_None) continue;
    if (!THPVariable_CheckExact(given[first_slot + i])) Py_RETURN_NONE;
    extras.set(i, THPVariable_Unpack(given[first_slot + i]));
  }
  if (extras.any && are_checked()) Py_RETURN_NONE;
  Values values;
  int64_t longest;
  if (!read_options(given[0], given + first_option, values, longest)) Py_RETURN_NONE;
  const size_t options = find_options(values);
  Key key;
  if (options == not_known || !fill_key(key, q, k, v, extras, options, longest)) Py_RETURN_NONE;
  const auto& known = memory().calls;
  const auto found = known.find(key);
  if (found == known.end()) Py_RETURN_NONE;
  const std::shared_ptr<Call> call = found->second;
  Made made;
  {
    const NoGil no_gil;
    made = make_forward(*call, q, k, v, extras);
  }
  // With the GIL: newer releases take it for every tensor that is saved and that only Python held.
  if (call->recorded) record(call, q, k, v, extras, made);
  if (!call->returns_lse) return THPVariable_Wrap(std::move(made.out));
  PyObject* out = THPVariable_Wrap(std::move(made.out));
  PyObject* lse = THPVariable_Wrap(std::move(made.lse));
  return Py_BuildValue("(NN)", out, lse);
  END_HANDLE_TH_ERRORS
}

// empty_node(q, k, v) of one shape -> q's memory, recorded as if it were made of all three
PyObject* empty_node(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "empty_node wants q, k and v");
  for (int i = 0; i < 3; ++i) TORCH_CHECK(THPVariable_Check(given[i]), "q, k and v are tensors");
  const at::Tensor &q = THPVariable_Unpack(given[0]), &k = THPVariable_Unpack(given[1]),
                   &v = THPVariable_Unpack(given[2]);
  at::Tensor made = q.tensor_data();
  if (needs_grad(q, k, v)) {
    NodePointer node = new_node<EmptyBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    torch::autograd::set_history(made, node);
  }
  return THPVariable_Wrap(std::move(made));
  END_HANDLE_TH_ERRORS
}

// Sequences of integers, as tuples; false with an error set.
template <typename Number>
bool read(PyObject* tuple, std::vector<Number>& into) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "a tuple of integers");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
    into.push_back(Number(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i))));
  return !PyErr_Occurred();
}

bool read(PyObject* given, Shape& into) {
  PyObject *sizes, *strides;
  std::vector<int64_t> values, steps;
  if (!PyArg_ParseTuple(given, "OO", &sizes, &strides) || !read(sizes, values) ||
      !read(strides, steps))
    return false;
  into = Shape(values, steps);
  return true;
}

std::shared_ptr<TensorMap> read_map(PyObject* given) {
  auto map = std::make_shared<TensorMap>();
  PyObject *dims, *strides, *box;
  if (!PyArg_ParseTuple(given, "iOOOii", &map->dtype, &dims, &strides, &box, &map->swizzle,
                        &map->promotion) ||
      !read(dims, map->dims) || !read(strides, map->strides) || !read(box, map->box))
    return nullptr;
  if (map->dims.empty() || map->dims.size() > 5 || map->box.size() != map->dims.size() ||
      map->strides.size() + 1 != map->dims.size()) {
    PyErr_SetString(PyExc_ValueError, "a tensor map of 1 to 5 dimensions");
    return nullptr;
  }
  return map;
}

bool read(PyObject* given, Fill& into, size_t bytes) {
  int kind, operand;
  long long plus;
  PyObject* map;
  if (!PyArg_ParseTuple(given, "iiiLO", &kind, &into.offset, &operand, &plus, &map)) return false;
  const size_t size = kind == Fill::MAP ? sizeof(EncodedMap) : sizeof(uintptr_t);
  if (kind < 0 || kind > Fill::COUNTER || operand < 0 || operand >= OPERANDS || into.offset < 0 ||
      into.offset + size > bytes) {
    PyErr_SetString(PyExc_ValueError, "a slot outside the arguments of its kernel");
    return false;
  }
  into.kind = Fill::Kind(kind);
  into.operand = Operand(operand);
  into.plus = plus;
  if (kind == Fill::MAP) into.map = read_map(map);
  return kind != Fill::MAP || into.map != nullptr;
}

bool read(PyObject* given, Launch& into) {
  const char *name, *bytes;
  Py_ssize_t size;
  unsigned long long function, context;
  int overlap;
  PyObject* fills;
  if (!PyArg_ParseTuple(given, "sKKIIIpy#O!", &name, &function, &context, &into.grid, &into.threads,
                        &into.smem, &overlap, &bytes, &size, &PyTuple_Type, &fills))
    return false;
  if (size_t(size) > max_arguments) {
    PyErr_SetString(PyExc_ValueError, "a kernel with more than 4096 bytes of arguments");
    return false;
  }
  into.name = name;
  into.function = function;
  into.context = context;
  into.overlap = overlap != 0;
  into.bytes = size_t(size);
  into.arguments.assign(bytes, bytes + size);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fills); ++i) {
    Fill fill;
    if (!read(PyTuple_GET_ITEM(fills, i), fill, size_t(size))) return false;
    (fill.kind == Fill::COUNTER ? into.counters : into.fills).push_back(std::move(fill));
  }
  return true;
}

bool read(PyObject* tuple, std::vector<Launch>& into) {
  into = std::vector<Launch>(size_t(PyTuple_GET_SIZE(tuple)));  // which never move
  for (size_t i = 0; i < into.size(); ++i)
    if (!read(PyTuple_GET_ITEM(tuple, Py_ssize_t(i)), into[i])) return false;
  return true;
}

bool read(PyObject* given, Recipe& into) {
  long long bytes;
  PyObject *launches, *prologue, *sources;
  if (!PyArg_ParseTuple(given, "LO!O", &bytes, &PyTuple_Type, &launches, &prologue)) return false;
  into.scratch_bytes = bytes;
  if (!read(launches, into.launches)) return false;
  if (prologue == Py_None) return true;
  if (!PyArg_ParseTuple(prologue, "LO!O", &bytes, &PyTuple_Type, &launches, &sources)) return false;
  into.prologue = std::make_shared<Prologue>();
  into.prologue->bytes = bytes;
  std::vector<int> slots;
  if (!read(sources, slots)) return false;
  for (const int slot : slots) into.prologue->sources.push_back(Slot(slot));
  if (slots.empty() || slots.size() > Prologue::max_sources) {
    PyErr_SetString(PyExc_ValueError, "a prologue of one or two extra tensors");
    return false;
  }
  return read(launches, into.prologue->launches);
}

// The tensors of a tuple by slot, None where there is none; false with an error set.
bool read(PyObject* tuple, Extras& into) {
  if (PyTuple_GET_SIZE(tuple) != SLOTS) {
    PyErr_SetString(PyExc_ValueError, "a tensor or None for each slot");
    return false;
  }
  for (size_t i = 0; i < SLOTS; ++i) {
    PyObject* one = PyTuple_GET_ITEM(tuple, Py_ssize_t(i));
    if (one == Py_None) continue;
    TORCH_CHECK(THPVariable_Check(one), "extra tensors are tensors");
    into.set(i, THPVariable_Unpack(one));
  }
  return true;
}

// new_call(q, k, v, slots, what the mask holds of them, recipe, out, lse_sizes or None,
//          returns_lse, recorded, owner) -> capsule
PyObject* new_call(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *q, *k, *v, *slots, *held, *recipe, *out, *lse, *owner;
  int returns_lse, recorded;
  if (!PyArg_ParseTuple(given, "OOOO!O!OOOppO", &q, &k, &v, &PyTuple_Type, &slots, &PyTuple_Type,
                        &held, &recipe, &out, &lse, &returns_lse, &recorded, &owner))
    return nullptr;
  auto call = std::make_shared<Call>();
  Extras extras, of_mask;
  if (!read(slots, extras) || !read(held, of_mask)) return nullptr;
  if (!read(recipe, call->forward) || !read(out, call->out)) return nullptr;
  for (size_t i = 0; i < SLOTS; ++i) {
    if (of_mask.at[i] != nullptr) call->held.emplace_back(Slot(i), *of_mask.at[i]);
    if (extras.at[i] == nullptr) continue;
    const at::Tensor& one = *extras.at[i];
    call->extras.push_back(
        {Slot(i), shape_of(one), one.scalar_type(), unsigned(address(one) % 16)});
  }
  call->held_extras = extras_of(call->held);
  call->has_lse = lse != Py_None;
  if (call->has_lse) {
    std::vector<int64_t> sizes;
    if (!read(lse, sizes)) return nullptr;
    call->lse = Shape(sizes, contiguous_strides(sizes));
  }
  call->returns_lse = returns_lse != 0;
  call->recorded = recorded != 0;
  const std::array<PyObject*, 3> tensors{q, k, v};
  for (size_t i = 0; i < 3; ++i) {
    TORCH_CHECK(THPVariable_Check(tensors[i]), "q, k and v are tensors");
    call->inputs[i] = shape_of(THPVariable_Unpack(tensors[i]));
  }
  call->dtype = THPVariable_Unpack(q).scalar_type();
  call->device = THPVariable_Unpack(q).device();
  call->misalignment =
      misalignment_of(THPVariable_Unpack(q), THPVariable_Unpack(k), THPVariable_Unpack(v));
  Py_INCREF(owner);
  call->owner = owner;
  return capsule_of(call);
  END_HANDLE_TH_ERRORS
}

// learn(generation, form, q, k, v, slots, options, call) -> whether calls like this one are known
// from now on
PyObject* learn(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  long long generation;
  PyObject *form, *q, *k, *v, *slots, *options, *capsule;
  if (!PyArg_ParseTuple(given, "LOOOOO!O!O", &generation, &form, &q, &k, &v, &PyTuple_Type, &slots,
                        &PyTuple_Type, &options, &capsule))
    return nullptr;
  const std::shared_ptr<Call> call = call_of(capsule);
  if (call == nullptr) return nullptr;
  TORCH_CHECK(PyTuple_GET_SIZE(options) == OPTIONS, "options of a call");
  for (PyObject* one : {q, k, v})
    if (!THPVariable_Check(one) || !is_ordinary(THPVariable_Unpack(one))) Py_RETURN_FALSE;
  Extras extras;
  if (!read(slots, extras)) return nullptr;
  Values values;
  int64_t longest;
  if (!read_options(form, reinterpret_cast<PyTupleObject*>(options)->ob_item, values, longest))
    Py_RETURN_FALSE;
  Memory& known = memory();
  size_t number = find_options(values);
  if (generation != known.generation || !is_enabled()) Py_RETURN_FALSE;
  if (number == not_known) {
    if (known.options.size() == max_options) forget_all();
    for (PyObject* value : values) Py_INCREF(value);
    number = known.options.size();
    known.options.push_back({values});
  }
  Key key;
  if (!fill_key(key, THPVariable_Unpack(q), THPVariable_Unpack(k), THPVariable_Unpack(v), extras,
                number, longest))
    Py_RETURN_FALSE;
  if (known.calls.size() >= max_calls) const auto gone = std::exchange(known.calls, {});
  known.calls.insert_or_assign(key, call);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// learn_backward(call, dout, wants, recipe or None, grads, zeroed)
PyObject* learn_backward(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *capsule, *dout, *recipe, *grads;
  auto backward = std::make_shared<Backward>();
  if (!PyArg_ParseTuple(given, "OOIOO!I", &capsule, &dout, &backward->wants, &recipe, &PyTuple_Type,
                        &grads, &backward->zeroed))
    return nullptr;
  const std::shared_ptr<Call> call = call_of(capsule);
  if (call == nullptr) return nullptr;
  TORCH_CHECK(THPVariable_Check(dout), "dout is a tensor");
  backward->dout_strides = Extents(THPVariable_Unpack(dout).strides());
  backward->in_python = recipe == Py_None;
  if (!backward->in_python) {
    if (!read(recipe, backward->recipe)) return nullptr;
    TORCH_CHECK(PyTuple_GET_SIZE(grads) == 3, "shapes of three gradients");
    for (size_t i = 0; i < 3; ++i)
      if (!read(PyTuple_GET_ITEM(grads, Py_ssize_t(i)), backward->grads[i])) return nullptr;
  }
  call->learn(std::move(backward));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* generation(PyObject*, PyObject*) { return PyLong_FromLongLong(memory().generation); }

PyObject* forget(PyObject*, PyObject*) {
  ++memory().generation;
  forget_all();
  Py_RETURN_NONE;
}

// In a forked child: handles of CUDA do not outlive a fork, and a lock may be held by a thread that
// is not there. Nothing that was learnt is touched again.
PyObject* disable_after_fork(PyObject*, PyObject*) {
  if (memory().forwards.load() > 0 || !memory().calls.empty())
    memory().disabled_after_fork.store(true);
  Py_RETURN_NONE;
}

// use_counters(device, address, turns, captured): zeroed integers, for good.
PyObject* use_counters(PyObject*, PyObject* given) {
  int device;
  unsigned long long base;
  unsigned turns, captured;
  if (!PyArg_ParseTuple(given, "iKII", &device, &base, &turns, &captured)) return nullptr;
  if (device < 0 || device >= max_devices || turns == 0) {
    PyErr_SetString(PyExc_ValueError, "counters of a device that is not known");
    return nullptr;
  }
  auto* room = new Counters{uintptr_t(base), turns, captured, {}, {}};
  counters[size_t(device)].store(room, std::memory_order_release);
  Py_RETURN_NONE;
}

// begin(make_backward, raise_failed)
PyObject* begin(PyObject*, PyObject* given) {
  PyObject *make_backward, *failed;
  if (!PyArg_ParseTuple(given, "OO", &make_backward, &failed)) return nullptr;
  Py_INCREF(make_backward);
  Py_INCREF(failed);
  Py_XSETREF(memory().make_backward, make_backward);
  Py_XSETREF(memory().raise_failed, failed);
  Py_RETURN_NONE;
}

// open_driver() -> what is missing, or None
PyObject* open_driver(PyObject*, PyObject*) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return PyUnicode_FromString("libcuda.so.1");
  std::array<void*, driver_names.size()> found;
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = dlsym(library, driver_names[i]);
    if (found[i] == nullptr) return PyUnicode_FromString(driver_names[i]);
  }
  set_driver(found);
  Py_RETURN_NONE;
}

// use_driver(addresses): functions in the place of the driver's, in the order of driver_names
PyObject* use_driver(PyObject*, PyObject* given) {
  std::array<void*, driver_names.size()> found;
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != Py_ssize_t(found.size())) {
    PyErr_SetString(PyExc_TypeError, "as many addresses as the driver has functions");
    return nullptr;
  }
  for (size_t i = 0; i < found.size(); ++i)
    found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(given, Py_ssize_t(i)));
  if (PyErr_Occurred()) return nullptr;
  set_driver(found);
  Py_RETURN_NONE;
}

// stream(device index) -> the handle of PyTorch's current stream there
PyObject* stream(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const long index = PyLong_AsLong(given);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromVoidPtr(stream_of(c10::Device(c10::kCUDA, c10::DeviceIndex(index))));
  END_HANDLE_TH_ERRORS
}

// counts() -> (calls known, forwards, backwards, backwards made in Python)
PyObject* counts(PyObject*, PyObject*) {
  Memory& known = memory();
  return Py_BuildValue("(nLLL)", Py_ssize_t(known.calls.size()),
                       static_cast<long long>(known.forwards.load()),
                       static_cast<long long>(known.backwards.load()),
                       static_cast<long long>(known.backwards_in_python.load()));
}

PyMethodDef functions[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL,
     nullptr},
    {"empty_node", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(empty_node)),
     METH_FASTCALL, nullptr},
    {"new_call", new_call, METH_VARARGS, nullptr},
    {"learn", learn, METH_VARARGS, nullptr},
    {"learn_backward", learn_backward, METH_VARARGS, nullptr},
    {"generation", generation, METH_NOARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"disable_after_fork", disable_after_fork, METH_NOARGS, nullptr},
    {"use_counters", use_counters, METH_VARARGS, nullptr},
    {"begin", begin, METH_VARARGS, nullptr},
    {"open_driver", open_driver, METH_NOARGS, nullptr},
    {"use_driver", use_driver, METH_VARARGS, nullptr},
    {"stream", stream, METH_O, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module_of_calls{PyModuleDef_HEAD_INIT, "tilewise_calls", nullptr, -1, functions};

}  // namespace
}  // namespace tilewise

// The functions above as a module of Python's; called with the GIL.
extern "C" PyObject* tilewise_native_calls() { return PyModule_Create(&tilewise::module_of_calls); }
