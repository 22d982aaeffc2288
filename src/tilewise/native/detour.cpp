// The override's kernel in PyTorch's dispatcher, compiled: a call that was left to PyTorch before
// goes there at once, one that was taken is made here (calls.h), and every other one goes to the
// kernel in Python (hook/dispatch.py), which decides, and says what may be remembered.
//
// Invariant: PyTorch's own kernel is right for any call, and a Call for all that look as the one it
// was made for. What is remembered is only which of the two is wanted; whatever is not understood
// here goes to Python.
//
// What all threads share is guarded by the GIL, but for three atomic numbers: `idle`, `epoch` and
// `generation`. Every thread keeps a copy of what it needs of the rest (`Mine`): which rule governs
// it, and what became of the calls that it made last. That copy holds while `epoch` and the
// thread's context are what they were, so a call that is recognised takes no lock. The GIL is taken
// where the copy does not hold or does not know the call, and is not held while PyTorch's kernel
// runs, or ours.
//
// Once installed the kernel stays: threads dispatch without a lock, so one that is taken out may be
// one that runs.

#include <ATen/Context.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "calls.h"

namespace {

constexpr const char* overridden = "aten::scaled_dot_product_attention";
constexpr const char* in_python = "tilewise::scaled_dot_product_attention";
// Nobody's device: what the dispatcher has for it is PyTorch's composite.
constexpr c10::DispatchKeySet composite_keys(c10::DispatchKey::PrivateUse3);
constexpr size_t arguments_expected = 8;
constexpr size_t calls_kept = 32;           // of one rule
constexpr size_t calls_kept_by_thread = 8;  // of all rules
constexpr size_t max_tensors = 4;
constexpr size_t max_dims = 6;

class Gil {
 public:
  Gil() : state(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state;
};

// --- what a call looks like ---

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()->data()) % 16 == 0;
}

// A tensor with memory of its own and plain integers for sizes: no subclass, no compiler's or
// transform's stand-in.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return !impl.is_python_dispatch() && !impl.has_symbolic_sizes_strides() &&
         impl.layout() == c10::kStrided && impl.has_storage() && impl.storage().data() != nullptr;
}

// A tensor as it looks, in words: its dispatch keys, a few small things, its sizes, its strides.
// Why words: a look is compared in every call, after a kernel has had the caches, so it lies in one
// piece.
constexpr size_t words_of_tensor = 2 + 2 * max_dims;

int64_t keys_of(const at::Tensor& tensor) { return int64_t(tensor.key_set().raw_repr()); }

int64_t small_things_of(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  return tensor.dim() | int64_t(tensor.scalar_type()) << 8 | int64_t(device.type()) << 16 |
         int64_t(uint8_t(device.index())) << 24 | int64_t(tensor.requires_grad()) << 32 |
         int64_t(is_aligned(tensor)) << 33;
}

// Of a tensor that is plain. Returns where the next begins.
int64_t* write_look(const at::Tensor& tensor, int64_t* words) {
  const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  *words++ = keys_of(tensor);
  *words++ = small_things_of(tensor);
  words = std::copy(sizes.begin(), sizes.end(), words);
  return std::copy(strides.begin(), strides.end(), words);
}

// Whether a tensor looks as it says here: nullptr, or where the next begins. The keys come first,
// because they tell a stand-in, which is asked nothing else.
const int64_t* read_look(const at::Tensor& tensor, const int64_t* words) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (keys_of(tensor) != words[0] || impl.has_symbolic_sizes_strides() || !impl.has_storage() ||
      impl.storage().data() == nullptr || small_things_of(tensor) != words[1])
    return nullptr;
  const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  const size_t dims = sizes.size();
  words += 2;
  for (size_t i = 0; i < dims; ++i)
    if (sizes[i] != words[i] || strides[i] != words[dims + i]) return nullptr;
  return words + 2 * dims;
}

// What PyTorch has switched on, gradients, determinism and each of its kernels, and the order in
// which it considers these, as one number.
class Switches {
 public:
  void add(bool on) { put(on, 1); }
  template <typename Backend>
  void add_next(Backend backend) {
    put(uint64_t(static_cast<int>(backend) + 1) & 0x1f, 5);  // there is one of -1
  }
  bool operator==(const Switches&) const = default;

 private:
  void put(uint64_t value, int width) { bits = bits << width | value; }
  uint64_t bits = 0;
};

// Releases differ in what can be switched.
template <typename Context>
Switches switches_of(Context& context) {
  Switches now;
  now.add(c10::GradMode::is_enabled());
  now.add(context.deterministicAlgorithms());
  now.add(context.userEnabledFlashSDP());
  now.add(context.userEnabledMemEfficientSDP());
  now.add(context.userEnabledCuDNNSDP());
  now.add(context.userEnabledMathSDP());
  if constexpr (requires { context.userEnabledOverrideableSDP(); })
    now.add(context.userEnabledOverrideableSDP());
  if constexpr (requires { context.userEnabledFA3SDP(); }) now.add(context.userEnabledFA3SDP());
  if constexpr (requires { context.allowFP16BF16ReductionMathSDP(); })
    now.add(context.allowFP16BF16ReductionMathSDP());
  if constexpr (requires { context.sDPPriorityOrder(); }) {
    const auto order = context.sDPPriorityOrder();
    static_assert(9 + 5 * std::tuple_size_v<std::decay_t<decltype(order)>> <= 64);
    for (const auto backend : order) now.add_next(backend);
  }
  return now;
}

Switches switches_now() { return switches_of(at::globalContext()); }

// A call.
struct Arguments {
  const at::Tensor &q, &k, &v;
  const std::optional<at::Tensor>& mask;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool grouped;

  const at::Tensor& tensor(int i) const { return i == 0 ? q : i == 1 ? k : i == 2 ? v : *mask; }
  int tensors() const { return mask.has_value() ? 4 : 3; }
  int flags() const {
    return tensors() | int(causal) << 8 | int(grouped) << 9 | int(scale.has_value()) << 10;
  }

  bool understood() const {
    for (int i = 0; i < tensors(); ++i)
      if (!tensor(i).defined() || !is_plain(tensor(i)) || tensor(i).dim() > int64_t(max_dims))
        return false;
    return true;
  }
};

// A call as it looks, and what is switched on.
class CallLook {
 public:
  explicit CallLook(const Arguments& call)
      : flags(call.flags()), dropout(call.dropout), scale(call.scale.value_or(0)) {
    int64_t* next = words.data();
    for (int i = 0; i < call.tensors(); ++i) next = write_look(call.tensor(i), next);
  }

  bool fits(const Arguments& call) const {
    if (call.flags() != flags || call.dropout != dropout || call.scale.value_or(0) != scale)
      return false;
    const int64_t* next = words.data();
    for (int i = 0; i < call.tensors(); ++i) {
      next = read_look(call.tensor(i), next);
      if (next == nullptr) return false;
    }
    return switches == switches_now();
  }

 private:
  int flags;
  double dropout, scale;
  Switches switches = switches_now();
  std::array<int64_t, max_tensors * words_of_tensor> words;  // as many as the tensors have
};

// --- what is remembered ---

using Counter = std::atomic<int64_t>;  // which Python reads as an integer of 64 bits

// What becomes of calls that look alike.
struct Outcome {
  Counter* calls = nullptr;              // counted for the report; lives as long as the process
  std::shared_ptr<tilewise::Call> made;  // that makes them; nullptr: they are left to PyTorch
};

// The calls that one rule has decided; those that come often are found early.
class Decided {
 public:
  using Known = std::pair<CallLook, Outcome>;

  const Known* find(const Arguments& call) {
    for (size_t i = 0; i < known.size(); ++i) {
      if (!known[i].first.fits(call)) continue;
      if (i == 0) return &known[0];
      std::swap(known[i], known[i - 1]);
      return &known[i - 1];
    }
    return nullptr;
  }
  void add(const CallLook& look, Outcome outcome) {
    if (known.size() == calls_kept) known.pop_back();
    known.emplace_back(look, std::move(outcome));
  }

 private:
  std::vector<Known> known;
};

struct State {
  PyObject* top = nullptr;        // the context variable that holds the innermost block
  PyObject* rule_name = nullptr;  // "rule", the attribute of a block
  PyObject* outside = nullptr;    // the rule for those who are in no block, borrowed; nullptr: none
  bool blocks = false;            // whether anybody is in one
  bool all_to_python = false;     // whether Python decides every call
  PyObject* get_handed = nullptr;  // what autograd's threads are handed, by its name
  PyObject* handed_name = nullptr;
  std::string handed;                                   // the same name
  std::unordered_map<PyObject*, Decided> decided;       // by rule, borrowed
  std::vector<c10::RegistrationHandleRAII> registered;  // for good
};

State& state() {
  static State* only = new State;  // never destroyed: threads may outlast static objects
  return *only;
}

// Written with the GIL, read without it. A thread that reads the old number while another writes
// the new one makes its call before the change; one that learns of the change reads the new one.
constinit std::atomic<bool> idle{true};         // nobody is governed
constinit std::atomic<uint64_t> epoch{1};       // of what decides which rule governs a thread
constinit std::atomic<uint64_t> generation{1};  // of what rules have decided

// Where a thread is among contexts. Python itself keeps values of context variables by these two
// numbers: whatever gives a thread another context gives it another version. A variable that is set
// leaves them as they are; blocks begin and end by `tilewise_detour_move`, which changes the epoch.
struct Place {
  uint64_t thread = 0;  // 0: one that Python does not know, which is in no block
  uint64_t context = 0;
  bool operator==(const Place&) const = default;
};

// Nothing where this release of Python does not tell. The GIL need not be held: no other thread
// changes these numbers.
template <typename Thread>
std::optional<Place> place_of(const Thread* thread) {
  if constexpr (requires { thread->id, thread->context_ver; })
    return thread == nullptr ? Place{} : Place{thread->id, thread->context_ver};
  else
    return std::nullopt;
}

// What this thread knows without the GIL.
class Mine {
 public:
  PyObject* rule = nullptr;  // that governs it: a name, never looked into; nullptr: none
  bool all_to_python = false;
  bool may_be_handed = false;  // it is in no block, and others are
  uint64_t of = 0;             // the generation of what it remembers

  bool holds(const std::optional<Place>& now) const { return now && *now == place && is_current(); }
  bool is_current() const { return as_of == epoch.load(std::memory_order_acquire); }
  // By a rule, and nobody else has a say.
  bool is_governed() const { return rule != nullptr && !all_to_python && !may_be_handed; }

  // Finds out who governs this thread; with the GIL. False where that is unknown.
  bool look_around(const std::optional<Place>& now) {
    State& s = state();
    as_of = 0;
    PyObject* block = nullptr;
    if (PyContextVar_Get(s.top, Py_None, &block) < 0) {
      PyErr_Clear();
      return false;
    }
    all_to_python = s.all_to_python;
    may_be_handed = block == Py_None && s.blocks;
    rule = s.outside;
    if (block != Py_None) {
      rule = PyObject_GetAttr(block, s.rule_name);  // which a block always has
      Py_DECREF(rule);                              // and keeps
    }
    Py_DECREF(block);
    if (const uint64_t present = generation.load(std::memory_order_relaxed); present != of) {
      recent.clear();
      latest = nullptr;
      of = present;
    }
    place = now.value_or(Place{});
    as_of = epoch.load(std::memory_order_relaxed);
    return true;
  }

  // What becomes of a call, if this thread remembers it.
  struct Remembered {
    PyObject* rule;
    Counter* calls;
    bool is_made;
    std::weak_ptr<tilewise::Call> made;  // weak: a thread that ends may not wait for the GIL
    CallLook look;

    bool fits(PyObject* governing, const Arguments& call) const {
      return rule == governing && look.fits(call) && !(is_made && made.expired());
    }
  };
  const Remembered* find(const Arguments& call) {
    if (latest != nullptr && latest->fits(rule, call)) return latest;
    for (const Remembered& one : recent)
      if (one.fits(rule, call)) return latest = &one;
    return nullptr;
  }

  // The same from what all threads have decided; with the GIL.
  const Remembered* recall(const Arguments& call) {
    const auto by_rule = state().decided.find(rule);
    const Decided::Known* found =
        by_rule == state().decided.end() ? nullptr : by_rule->second.find(call);
    if (found == nullptr) return nullptr;
    const auto& [look, outcome] = *found;
    Remembered now{rule, outcome.calls, outcome.made != nullptr, outcome.made, look};
    if (recent.size() < calls_kept_by_thread) {
      recent.reserve(calls_kept_by_thread);  // none moves afterwards
      return latest = &recent.emplace_back(std::move(now));
    }
    next = (next + 1) % calls_kept_by_thread;
    return latest = &(recent[next] = std::move(now));
  }

 private:
  uint64_t as_of = 0;  // the epoch; 0: of none
  Place place;
  std::vector<Remembered> recent;
  const Remembered* latest = nullptr;  // of these
  size_t next = 0;                     // that was replaced last
};

thread_local Mine mine;

// Where Python puts what becomes of the call that it decides now, if that may be remembered.
thread_local Outcome* deciding = nullptr;

enum class Way { torch, here, python };

// The way of a call, and who makes it where it is made here. Where Python decides: the rule that
// may remember what it says, and the generation of that rule's decisions.
struct Judged {
  Way way;
  std::shared_ptr<tilewise::Call> made = nullptr;
  PyObject* rule = nullptr;
  uint64_t generation = 0;
};

// Whether autograd has handed this thread a block, or what may hold one.
bool is_handed_something() {
  const State& s = state();
  if (!at::impl::ThreadLocalPythonObjects::contains(s.handed)) return false;
  Gil gil;
  PyObject* handed = PyObject_CallFunctionObjArgs(s.get_handed, s.handed_name, nullptr);
  if (handed == nullptr) PyErr_Clear();
  const bool nothing = handed == Py_None;
  Py_XDECREF(handed);
  return !nothing;
}

// Whether a call that looks like one that is made here is one: no transform, mode or forward-mode
// derivative is at work on it.
bool may_be_made(const Arguments& call) {
  return tilewise::is_enabled() && tilewise::is_ordinary_thread() &&
         tilewise::is_ordinary(call.tensor(0)) && tilewise::is_ordinary(call.tensor(1)) &&
         tilewise::is_ordinary(call.tensor(2));
}

Judged outcome_of(const Mine::Remembered& known, const Arguments& call) {
  std::shared_ptr<tilewise::Call> made;
  if (known.is_made) {
    made = known.made.lock();
    if (made == nullptr || !may_be_made(call)) return {Way::python};
  }
  known.calls->fetch_add(1, std::memory_order_relaxed);
  return {made == nullptr ? Way::torch : Way::here, std::move(made)};
}

// Of a call that its thread does not remember, or of a thread that has to look around first.
[[gnu::noinline, gnu::cold]] Judged judge_anew(Mine& me, const std::optional<Place>& place,
                                               const Arguments& call) {
  if (!call.understood()) return {Way::python};
  if (!me.holds(place)) {
    Gil gil;
    if (!me.look_around(place)) return {Way::python};
  }
  if (me.all_to_python || (me.may_be_handed && is_handed_something())) return {Way::python};
  if (me.rule == nullptr) return {Way::torch};
  const Mine::Remembered* known = me.find(call);
  if (known == nullptr) {
    Gil gil;
    if (!me.is_current()) return {Way::python};  // the rule may be gone by now
    known = me.recall(call);
  }
  return known == nullptr ? Judged{Way::python, nullptr, me.rule, me.of} : outcome_of(*known, call);
}

Judged judge(const Arguments& call) {
  Mine& me = mine;  // found once: it is not free
  const std::optional<Place> place = place_of(PyGILState_GetThisThreadState());
  if (me.holds(place) && me.is_governed()) {
    if (const Mine::Remembered* known = me.find(call)) return outcome_of(*known, call);
  }
  return judge_anew(me, place, call);
}

// A thread that asks for the GIL when the interpreter ends never comes back.
bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Why not boxed: a call that is passed on would pack and unpack its eight arguments twice.
class Detour final : public c10::OperatorKernel {
 public:
  // `original`: what calls are passed on to, if it is not PyTorch's composite.
  Detour(std::optional<c10::SafeKernelFunction> original, c10::SafeKernelFunction python)
      : original(std::move(original)), python(std::move(python)) {}

  at::Tensor operator()(c10::DispatchKeySet keys, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
                        bool causal, std::optional<double> scale, bool grouped) {
    const Arguments call{q, k, v, mask, dropout, causal, scale, grouped};
    if (!idle.load(std::memory_order_acquire) && !is_finalizing()) {
      const Judged judged = judge(call);
      if (judged.way == Way::here) return tilewise::run(judged.made, q, k, v).out;
      if (judged.way == Way::python) return ask_python(keys, call, judged);
    }
    if (original) return call_original(keys, call);
    return at::_ops::scaled_dot_product_attention::redispatch(composite_keys, q, k, v, mask,
                                                              dropout, causal, scale, grouped);
  }

 private:
  static torch::jit::Stack stack_of(const Arguments& call) {
    return {call.q, call.k, call.v, call.mask, call.dropout, call.causal, call.scale, call.grouped};
  }

  [[gnu::noinline, gnu::cold]] at::Tensor call_original(c10::DispatchKeySet keys,
                                                        const Arguments& call) const {
    torch::jit::Stack stack = stack_of(call);
    original->callBoxed(original->opHandle(), keys, &stack);
    return std::move(stack.back()).toTensor();
  }

  [[gnu::noinline, gnu::cold]] at::Tensor ask_python(c10::DispatchKeySet keys,
                                                     const Arguments& call,
                                                     const Judged& judged) const {
    std::optional<CallLook> look;  // before the call, which may change what is switched on
    if (judged.rule != nullptr) look.emplace(call);
    torch::jit::Stack stack = stack_of(call);
    Outcome outcome = decide(keys, stack);
    if (outcome.calls != nullptr && look) {
      Gil gil;
      const auto rule = state().decided.find(judged.rule);
      if (rule != state().decided.end() && judged.generation == generation.load())
        rule->second.add(*look, std::move(outcome));
    }
    return std::move(stack.back()).toTensor();
  }

  // Lets Python answer the call. Returns what it said of calls that look the same, if anything.
  Outcome decide(c10::DispatchKeySet keys, torch::jit::Stack& stack) const {
    struct Deciding {
      Outcome outcome;
      Outcome* outer = deciding;
      Deciding() { deciding = &outcome; }
      ~Deciding() { deciding = outer; }
    } now;
    python.callBoxed(python.opHandle(), keys, &stack);
    return std::move(now.outcome);
  }

  std::optional<c10::SafeKernelFunction> original;
  c10::SafeKernelFunction python;
};

// PyTorch remarks on a kernel that replaces another. Where that is our own in Python, it is meant.
class NoRemarks final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

void install(const char* const* names, int count, bool composite) {
  NoRemarks none;
  const c10::WarningUtils::WarningHandlerGuard quiet(&none);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto op = dispatcher.findSchemaOrThrow(overridden, "");
  const auto python = dispatcher.findSchemaOrThrow(in_python, "");
  TORCH_CHECK(op.schema().arguments().size() == arguments_expected, overridden,
              " has other arguments than known here");
  std::vector<c10::DispatchKey> keys;
  for (int i = 0; i < count; ++i) keys.push_back(c10::parseDispatchKey(names[i]));
  composite = composite || std::none_of(keys.begin(), keys.end(), [&](c10::DispatchKey key) {
                return op.hasKernelForDispatchKey(key);
              });
  // All originals first: once a device has a kernel, the dispatcher answers differently for its
  // autograd key.
  std::vector<std::unique_ptr<Detour>> kernels;
  for (const c10::DispatchKey key : keys) {
    std::optional<c10::SafeKernelFunction> original;
    if (!composite) original.emplace(op.getComputedKernelForDispatchKey(key));
    kernels.push_back(
        std::make_unique<Detour>(std::move(original), python.getComputedKernelForDispatchKey(key)));
  }
  for (size_t i = 0; i < keys.size(); ++i)
    state().registered.push_back(dispatcher.registerImpl(
        op.operator_name(), keys[i],
        c10::KernelFunction::makeFromUnboxedFunctor<false, Detour>(std::move(kernels[i])),
        std::nullopt, nullptr, "tilewise.sdpa"));
}

}  // namespace

// --- for Python, called with the GIL ---

extern "C" {

// Before all else; once is enough. `top`: the context variable of blocks; get_handed(handed): what
// autograd's threads are handed.
void tilewise_detour_begin(PyObject* top, PyObject* get_handed, PyObject* handed) {
  State& s = state();
  if (s.top != nullptr) return;
  for (PyObject* kept : {top, get_handed, handed}) Py_INCREF(kept);
  s.top = top;
  s.get_handed = get_handed;
  s.handed_name = handed;
  s.handed = PyUnicode_AsUTF8(handed);
  s.rule_name = PyUnicode_InternFromString("rule");
}

// Put the kernel in front of the originals; of PyTorch's composite, where something of ours is
// registered already. Returns what went wrong, or nullptr.
const char* tilewise_detour_install(const char* const* keys, int count, int composite) {
  static std::string error;
  try {
    install(keys, count, composite != 0);
    return nullptr;
  } catch (const std::exception& problem) {
    error = problem.what();
    return error.c_str();
  }
}

// Who is governed by what, from now on, and whether Python decides every call.
void tilewise_detour_govern(PyObject* outside, int blocks, int all_to_python) {
  State& s = state();
  s.outside = outside;
  s.blocks = blocks != 0;
  s.all_to_python = all_to_python != 0;
  idle.store(outside == nullptr && !s.blocks && !s.all_to_python, std::memory_order_release);
  epoch.fetch_add(1, std::memory_order_release);
}

// The innermost block of this thread or task is `frame` from now on, or None. The only way to set
// the variable, because it tells the thread that what it knows holds no more.
int tilewise_detour_move(PyObject* frame) {
  PyObject* token = PyContextVar_Set(state().top, frame);
  epoch.fetch_add(1, std::memory_order_release);
  Py_XDECREF(token);
  return token == nullptr ? -1 : 0;
}

Counter* tilewise_detour_counter() { return new Counter(0); }

// The call that Python decides now is left to PyTorch, and so shall be those that look the same.
void tilewise_detour_remember(Counter* calls) {
  if (deciding != nullptr) *deciding = {calls, nullptr};
}

// It is taken, and those that look the same are made by this Call. Returns whether it was one.
int tilewise_detour_take(PyObject* call, Counter* calls) {
  std::shared_ptr<tilewise::Call> made = tilewise::call_of(call);
  if (made == nullptr) PyErr_Clear();
  if (made != nullptr && deciding != nullptr) *deciding = {calls, made};
  return made != nullptr;
}

// A rule begins to exist, and ceases to.
void tilewise_detour_admit(PyObject* rule) { state().decided[rule]; }
void tilewise_detour_forget(PyObject* rule) {
  const auto gone = state().decided.extract(rule);  // which may run Python where it goes
  generation.fetch_add(1, std::memory_order_relaxed);
  epoch.fetch_add(1, std::memory_order_release);
}
}
