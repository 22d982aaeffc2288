// clang-format off
// What is done to the scores between the two products: one policy, composed at compile time, for every kernel of
// the engine: both generations, both directions, 16-bit and float32.
//
// Symbols. x[i, j]: what the product of q_i and k_j left in an accumulator; x times `unit` is q_i . k_j. T_1 ... T_n: the
// terms of Scores<T_1, ..., T_n>, in the order in which they are applied. v_t: a score after T_t; the score in nats is
// c v_n, where c is a factor that the kernel gives to the softmax: the scale of the problem, or with a softcap the cap.
// D[i]: rowsum(dO * O) - dlse. w: the product of the terms' kept_weight, 1 without dropout.
//
//   Forward, for every fragment of S                                                   hook of a term
//   1. v_0 = x, v_t = T_t(v_{t-1})                                                     apply
//   2. tiles that the band cuts: v_n = -inf where a term hides the key from the query  hide
//      what a term reports of v_n                                                      observe
//   3. P = e^(c v_n - m), added to the row sum l
//   4. P = 0 where a term does not keep it, after l has taken it                       draw, keeps
//   Forward, once per row
//   5. m and l as a term leaves them, O in the units of the new m                      finish_row
//      out = w O / l, lse = m + ln l
//   Backward
//   6. v_n as in 1 and 2, P = e^(c v_n - lse)
//   7. dV = w (P as in 4)^T dO; dP = w dP where a term keeps P, else 0                 draw, keeps
//   8. dS_n = P (dP - D)
//   9. for t = n ... 1: the gradient of T_t's operands from dS_t,                      gradient, end_gradient
//      dS_{t-1} = dS_t T_t'(v_{t-1})                                                   slope, before
//      dQ and dK come from dS_0
//
// A term is a struct. It has a constructor and those of the members below that it needs; a kernel has no code for a hook
// that no term of its policy has, so Scores<> compiles to nothing.
//
//   Term(params, unit, at)             State of one fragment. `params` are the parameters of the kernel, of whatever family,
//                                      with the term's Operands: a term reads what it needs by name. `unit` is 1 for all
//                                      terms but the first that has `apply`. `at` says where the fragment lies (NoPlace
//                                      below lists what it can be asked); ask only what is needed, since it may cost
//                                      registers, and not for what stands behind a hook that the term does not have.
//   struct Once                        What is the same for all fragments of a head, made of (params, at); the constructor gets
//                                      it by once_of(), from a kernel that keeps it, or anew.
//   struct OfRows                      What is the same for all fragments of the same rows, made of (params, at) by a whole warp;
//                                      at.of_rows() gives it, in kernels that keep it.
//   struct Operands                    What the term needs beside the parameters that all kernels have: pointers, strides,
//                                      numbers. The kernel's parameters derive from it (ParamsOf).
//   static bool uses_head = true       Where it asks for the head.
//   float apply(float v, int i)        v_t of element i from v_{t-1}; -inf hides it. Asked once for every i, in ascending
//                                      order, so that a term may load or draw numbers for several elements at once.
//   float start_of_row(int r)          Of a term whose `apply` adds start_of_row(r) + per_column * column_of(i), and more than that
//   static float per_column(params, at)  in some of its first `count` columns if it `bends` there: `bend` adds the rest. Kernels
//   bool bends(int count)              that have no other term with `apply` add that line where it costs least.
//   float bend(float v, int i)         Of a line that `is_straight` it never does.
//   bool holds(int count)              Of a term that reads a number per element, whether the first `count` exist, with a
//   bool checks                        member that says whether `apply` must ask: so it need not where they do.
//   static bool loads_few = true       Of such a term, where elements share these numbers: they are loaded all at once.
//   bool take(float (&v)[])            Of a term that is the first to change scores: puts all into a form of its own, and says
//   bool easy, taken                   whether this warp's are of a kind that `apply` has a shorter way for (its argument).
//   void hide(float (&v)[], at)        -inf for hidden elements. Which tiles are cut is decided by the plan of the kernel.
//   struct Ahead<count, rows_are>      What `hide` reads of memory for a fragment; at.ahead() gives it, in kernels that have it
//   void look_ahead(Ahead&, at)        loaded while the scores are made.
//   static SeenSpans seen_keys(params, batch, begin, end)
//   static SeenSpans seen_queries(params, batch, begin, end)
//                                      Of a term that hides by spans (`hides_by_span`): of queries [begin, end), which are not
//                                      past the last, the keys that some of them may see and those that all see; and of keys
//                                      [begin, end) likewise the queries. The plan leaves out tiles without any, and takes
//                                      those inside the second for full.
//   static bool sees(params, batch, head, query, key)
//                                      Of a term that hides, one pair. Without spans the plan knows nothing of the
//                                      tiles that it cuts, and takes all for cut (`narrow_tiles`: the place to know more).
//   void observe(const float (&v)[], float unit)
//                                      In a forward, v_n of all elements, hidden or not; a score is v_n times `unit` and what
//                                      the host knows. Elements of rows past the end are among them.
//   void draw(int block, u32 (&drawn)[drawn_words])
//   u32 keeps(int i, const u32 (&drawn)[drawn_words])
//   float kept_weight                  Of a term that drops weights, at most one of a policy. The random words of the `block`-th
//                                      eight elements; and which weights stay of elements i and i + 1, i even, of that block:
//                                      ones in the low and the high half of a word. The same answer for the same query and
//                                      key in every kernel, whichever of them is the row; asked by all lanes of a warp, in
//                                      ascending order. What kept weights count.
//   float finish_row(float& m, float& l, float log2_unit, int r)
//                                      Row r of the fragment: l is the sum of 2^(log2_unit (v_n - m)) over its keys, m = -inf
//                                      and l = 0 where it sees none. Returns what O is multiplied with where m changes.
//   float slope(float v, int i)        T_t' of element i from v = v_t: the kernels keep the result of `apply`, or find it again
//                                      from P, never its argument. Must be finite where P is 0. A term without it has slope 1.
//   float before(float v, int i)       v_{t-1} from v_t. Needed where a term before it has a slope.
//   void gradient(float ds, int i)     dS_t of element i, in ascending order: to be stored, or added up in the state. A term with
//                                      a member `ds_unit` gets it in units of that.
//                                      Tiles that the mask hides are not visited: where it stores, there are zeros before.
//   void end_gradient()                After the last element: to add the state to global memory.
//
// The terms that read tensors are in terms/. What another would be:
//   a function    apply and slope, from its trace; `slope` in terms of the result. Where it has none such, the kernels would
//                 have to keep the argument
//
// How to add a term: a struct in terms/, and a class in tilewise/terms that names it and fills what it reads.
// clang-format on
#pragma once

#include "fragment.cuh"
#include "operands.cuh"
#include "pieces.cuh"
#include "ptx.cuh"

namespace tilewise {

enum class RowsAre { queries, keys };

constexpr int drawn_words = 2;  // for eight weights that a term may drop

// Where a thread's fragment lies. A kernel has a struct Place of its own with these members, which
// are functions: a term calls what it needs. Why: what they are computed from is read again each
// time where registers are few. (This one is for the concepts below, which only test whether a hook
// exists.)
struct NoPlace {
  static constexpr RowsAre rows_are = RowsAre::queries;
  __device__ int row() const;     // of element 0: a query, or a key where rows are keys
  __device__ int column() const;  // likewise: a key, or a query
  __device__ int batch() const;
  __device__ int head() const;   // of the queries
  __device__ Band band() const;  // of the sequence: rows and columns count from its starts
  // In some: 2 KiB of shared memory for this warp, until its gradients have ended.
  // __device__ float* room() const;
  __device__ RowBand row_band() const;
};

// What is known of a head before any fragment.
struct HeadPlace {
  int batch_index, head_index;

  __device__ __forceinline__ int batch() const { return batch_index; }
  __device__ __forceinline__ int head() const { return head_index; }
};
// Room in shared memory for what terms make once per head, where a role of its own makes it.
struct alignas(4) OnceRoom {
  ptx::u32 words[8];

  template <typename Once>
  __device__ __forceinline__ Once& as() {
    static_assert(sizeof(Once) <= sizeof(words) && alignof(Once) <= 4);
    return *reinterpret_cast<Once*>(words);
  }
};

// What a term may keep of it: the query and the key of element i.
struct Elements {
  int row, column;
  RowsAre rows_are;

  template <typename At>
  __device__ __forceinline__ explicit Elements(const At& at)
      : row(at.row()), column(at.column()), rows_are(At::rows_are) {}
  __device__ __forceinline__ int query(int i) const {
    return rows_are == RowsAre::queries ? row + 8 * row_of(i) : column + column_of(i);
  }
  __device__ __forceinline__ int key(int i) const {
    return rows_are == RowsAre::keys ? row + 8 * row_of(i) : column + column_of(i);
  }
};

// What terms leave to several queries, or to several keys: keys, or queries, [begin, end).
struct Span {
  int begin, end;

  __device__ __forceinline__ Span within(const Span& other) const {
    return {max_int(begin, other.begin), min_int(end, other.end)};
  }
};
struct SeenSpans {
  Span some;  // by at least one of them; a hull
  Span all;   // by every one; may end before it begins
};

// --- terms ---

// tanh(x in), where `in` is scale / cap: the score in units of the cap.
//   fast     `in` is 2 log2(e) scale / cap, and tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)): two
//            approximate instructions, for kernels whose weights are rounded to 16 bits. Their unit
//            is the bottleneck, and most scores are small against the cap: where all of a warp's
//            are, an odd polynomial takes their place, with as large an error
//   precise  right to a unit in the last place
enum class Precision { fast, precise };

// tanh(y) for |y| < 1/2, from z = 4 y: a relative error of 6e-7. Why z: that it is below 2 shows in
// one bit of it.
__device__ __forceinline__ float tanh_of_quarter(float z) {
  const float square = z * z;
  float sum = fmaf(square, -0x1.6bbe38p-19f, 0x1.0e2324p-13f);
  sum = fmaf(square, sum, -0x1.5542f2p-8f);
  return z * fmaf(square, sum, 0x1.ffffeep-3f);
}
constexpr ptx::u32 two_or_more = 0x40000000;  // the bit that numbers below 2 do not have

template <Precision precision>
struct Softcap {
  static constexpr float quarters = 0x1.62e430p+0f;  // z per x in: 2 ln 2
  float in;
  bool easy = false, taken = false;

  template <typename Params, typename At>
  __device__ __forceinline__ Softcap(const Params& params, const Unit& unit, const At&)
      : in(params.softcap_in * unit.first * unit.second) {}

  __device__ __forceinline__ float apply(float x, int) const {
    if constexpr (precision == Precision::precise) return tanhf(x * in);
    if (easy) return tanh_of_quarter(x);
    return fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x * (taken ? 1.0f / quarters : in))), 1.0f);
  }
  template <int count>
  __device__ __forceinline__ bool take(float (&x)[count]) const
    requires(precision == Precision::fast)
  {
    const float unit = in * quarters;
    ptx::u32 bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      x[i] *= unit;
      bits |= __float_as_uint(x[i]);
    }
    return !__any_sync(0xffffffffu, bits & two_or_more);
  }
  // 1 - tanh^2. A value that was found again from a weight may be -inf, where the weight is 0.
  __device__ __forceinline__ float slope(float v, int) const {
    if constexpr (precision == Precision::fast) v = fmaxf(v, -1.0f);
    return fmaf(-v, v, 1.0f);
  }
};

// Hides the columns of row r of a fragment outside [first, end), counted from the fragment's.
template <int count>
__device__ __forceinline__ void hide_outside(float (&v)[count], int r, int first, int end) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (row_of(i) != r) continue;
    const int column = column_of(i);
    v[i] = column >= first && column < end ? v[i] : -infinity;
  }
}

// What the band leaves to a row: keys, or queries, of which a key that does not exist has none.
template <typename At>
__device__ __forceinline__ Span in_band(const At& at, int row) {
  if constexpr (At::rows_are == RowsAre::queries) {
    const Band band = at.band();
    return {band.first_key(row), band.end_key(row)};
  } else {
    const RowBand band = at.row_band();
    return {band.first_row(row), row < at.band().seq_k ? band.end_row(row) : 0};
  }
}

// Keys outside the band of a query, and keys that do not exist (mask.cuh). Kernels for some masks
// need not look at all bounds.
enum class Bounds { end_of_keys, end, both };

template <Bounds bounds>
struct BandMask {
  template <typename Params, typename At>
  __device__ __forceinline__ BandMask(const Params&, const Unit&, const At&) {}

  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    if constexpr (At::rows_are == RowsAre::queries)
      hide_keys(v, at);
    else
      hide_queries(v, at);
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide_keys(float (&v)[count], const At& at) const {
    const Band band = at.band();
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row() + 8 * r;
      const int first = bounds == Bounds::both ? band.first_key(row) - column : 0;
      const int end = (bounds == Bounds::end_of_keys ? band.seq_k : band.end_key(row)) - column;
      hide_outside(v, r, first, end);
    }
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide_queries(float (&v)[count], const At& at) const {
    static_assert(bounds == Bounds::both);
    const int first_key = at.row();
    const RowBand band = at.row_band();
    const int seq_k = at.band().seq_k;
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + 8 * r;
      const int first = band.first_row(key) - column;
      hide_outside(v, r, first, key < seq_k ? band.end_row(key) - column : -1);
    }
  }
};

// --- the policy ---

template <typename Term>
concept HasApply = requires(Term term) { term.apply(0.0f, 0); };
template <typename Term>
concept HasLine = requires(Term term) { term.bend(term.start_of_row(0), 0); };
template <typename Term>
concept HasStraightLine = HasLine<Term> && requires { requires Term::is_straight; };
template <typename Term>
concept HasHolds = requires(Term term) { term.checks = term.holds(4); };
template <typename Term>
concept LoadsFew = requires { requires Term::loads_few; };
template <typename Term>
concept HasTake = requires(Term term, float (&v)[4]) { term.easy = term.taken = term.take(v); };
template <typename Term>
concept HasHide = requires(Term term, float (&v)[4]) { term.hide(v, NoPlace{}); };
template <typename Term>
concept HidesByData = requires { requires Term::hides_by_data; };
template <typename Term>
concept HidesBySpan = requires { requires Term::hides_by_span; };
template <typename Term>
concept HasKeeps = requires(Term term, ptx::u32 (&drawn)[drawn_words]) {
  term.draw(0, drawn);
  term.keeps(0, drawn);
};
template <typename Term>
concept HasOnce = requires { typename Term::Once; };
template <typename Term>
concept HasOfRows = requires { typename Term::OfRows; };
template <typename Term>
concept HasAhead = requires { typename Term::template Ahead<4, RowsAre::queries>; };
template <typename Term>
concept HasObserve = requires(Term term, const float (&v)[4]) { term.observe(v, 1.0f); };
template <typename Term>
concept HasFinishRow = requires(Term term, float& x) { term.finish_row(x, x, 1.0f, 0); };
template <typename Term>
concept HasSlope = requires(Term term) { term.slope(0.0f, 0); };
template <typename Term>
concept HasBefore = requires(Term term) { term.before(0.0f, 0); };
template <typename Term>
concept HasGradient = requires(Term term) { term.gradient(0.0f, 0); };
template <typename Term>
concept HasEndGradient = requires(Term term) { term.end_gradient(); };
template <typename Term>
concept HasOperands = requires { typename Term::Operands; };
template <typename Term>
concept UsesHead = requires { requires Term::uses_head; };

// v_n of a weight P = 2^(c v_n - lse), c and lse in log2 units.
__device__ __forceinline__ float value_of_weight(float p, float lse_log2,
                                                 float inverse_scale_log2) {
  return (ptx::lg2(p) + lse_log2) * inverse_scale_log2;
}

// For how many elements a term that reads a number per element loads them before it uses them: all,
// or where rows are keys, and each has an address of its own, as many as registers are left for.
template <typename At, int count>
constexpr int loaded_at_once = At::rows_are == RowsAre::queries || count < 16 ? count : 16;

// The terms of one fragment.
template <typename... Terms>
struct TermChain {
  static constexpr bool has_slope = false;
  static constexpr bool has_holds = false;
  static constexpr bool loads_many = false;
  static constexpr bool has_take = false;

  template <typename Params, typename At>
  __device__ __forceinline__ TermChain(const Params&, const Unit&, const At&) {}

  __device__ __forceinline__ float apply(float v, int) { return v; }
  __device__ __forceinline__ bool holds(int) { return true; }
  __device__ __forceinline__ void set_checks(bool) {}
  template <int count>
  __device__ __forceinline__ bool take(float (&)[count]) {
    return false;
  }
  __device__ __forceinline__ void set_easy(bool) {}
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&)[count], const At&) {}
  template <int count>
  __device__ __forceinline__ void observe(const float (&)[count], float) {}
  __device__ __forceinline__ void draw(int, ptx::u32 (&)[drawn_words]) const {}
  __device__ __forceinline__ ptx::u32 keeps(int, const ptx::u32 (&)[drawn_words]) { return ~0u; }
  __device__ __forceinline__ float kept_weight() { return 1.0f; }
  __device__ __forceinline__ float finish_row(float&, float&, float, int) { return 1.0f; }
  __device__ __forceinline__ float pull_back(float ds, float&, int, float) { return ds; }
  __device__ __forceinline__ void end_gradient() {}
};

template <typename First, typename... Rest>
struct TermChain<First, Rest...> {
  static constexpr bool has_slope = HasSlope<First> || TermChain<Rest...>::has_slope;
  static constexpr bool has_holds = HasHolds<First> || TermChain<Rest...>::has_holds;
  static constexpr bool loads_many =
      (HasHolds<First> && !LoadsFew<First>) || TermChain<Rest...>::loads_many;
  static constexpr bool has_take = HasApply<First> ? HasTake<First> : TermChain<Rest...>::has_take;

  First first;
  TermChain<Rest...> rest;

  template <typename Params, typename At>
  __device__ __forceinline__ TermChain(const Params& params, const Unit& unit, const At& at)
      : first(params, unit, at), rest(params, HasApply<First> ? Unit{} : unit, at) {}

  __device__ __forceinline__ float apply(float v, int i) {
    if constexpr (HasApply<First>) v = first.apply(v, i);
    return rest.apply(v, i);
  }
  __device__ __forceinline__ bool holds(int count) {
    if constexpr (HasHolds<First>) return first.holds(count) && rest.holds(count);
    return rest.holds(count);
  }
  __device__ __forceinline__ void set_checks(bool checks) {
    if constexpr (HasHolds<First>) first.checks = checks;
    rest.set_checks(checks);
  }
  template <int count>
  __device__ __forceinline__ bool take(float (&v)[count]) {
    if constexpr (HasTake<First>) return first.take(v);
    return rest.take(v);
  }
  __device__ __forceinline__ void set_easy(bool easy) {
    if constexpr (HasTake<First>) {
      first.taken = true;
      first.easy = easy;
    } else {
      rest.set_easy(easy);
    }
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) {
    if constexpr (HasHide<First>) first.hide(v, at);
    rest.hide(v, at);
  }
  template <int count>
  __device__ __forceinline__ void observe(const float (&v)[count], float unit) {
    if constexpr (HasObserve<First>) first.observe(v, unit);
    rest.observe(v, unit);
  }
  __device__ __forceinline__ void draw(int block, ptx::u32 (&drawn)[drawn_words]) const {
    if constexpr (HasKeeps<First>)
      first.draw(block, drawn);
    else
      rest.draw(block, drawn);
  }
  __device__ __forceinline__ ptx::u32 keeps(int i, const ptx::u32 (&drawn)[drawn_words]) {
    if constexpr (HasKeeps<First>) return first.keeps(i, drawn);
    return rest.keeps(i, drawn);
  }
  __device__ __forceinline__ float kept_weight() {
    if constexpr (HasKeeps<First>) return first.kept_weight * rest.kept_weight();
    return rest.kept_weight();
  }
  __device__ __forceinline__ float finish_row(float& m, float& l, float log2_unit, int r) {
    float factor = 1.0f;
    if constexpr (HasFinishRow<First>) factor = first.finish_row(m, l, log2_unit, r);
    return factor * rest.finish_row(m, l, log2_unit, r);
  }
  // Step 9: v, the value after the last term, becomes that before the first, if that is known.
  __device__ __forceinline__ float pull_back(float ds, float& v, int i, float unit) {
    ds = rest.pull_back(ds, v, i, unit);
    if constexpr (HasGradient<First> && requires { first.ds_unit; }) {
      first.ds_unit = unit;
      first.gradient(ds, i);
    } else if constexpr (HasGradient<First>) {
      first.gradient(ds * unit, i);
    }
    if constexpr (HasSlope<First>) ds *= first.slope(v, i);
    if constexpr (HasBefore<First>) v = first.before(v, i);
    return ds;
  }
  __device__ __forceinline__ void end_gradient() {
    rest.end_gradient();
    if constexpr (HasEndGradient<First>) first.end_gradient();
  }
};

// Whether a value after the last term leads back to those that slopes are made of.
template <typename... Terms>
constexpr bool leads_back = true;
template <typename First, typename Second, typename... Rest>
constexpr bool leads_back<First, Second, Rest...> =
    leads_back<Second, Rest...> &&
    (!HasSlope<First> ||
     ((HasBefore<Second> || !HasApply<Second>) && ... && (HasBefore<Rest> || !HasApply<Rest>)));

template <typename Term>
struct OperandsOf {
  struct Type {};
};
template <HasOperands Term>
struct OperandsOf<Term> {
  using Type = typename Term::Operands;
};

template <typename Term>
struct OnceOf {
  struct Type {
    Type() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Type(const Params&, const At&) {}
  };
};
template <HasOnce Term>
struct OnceOf<Term> {
  using Type = typename Term::Once;
};

template <typename Term>
struct OfRowsOf {
  struct Type {
    Type() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Type(const Params&, const At&) {}
  };
};
template <HasOfRows Term>
struct OfRowsOf<Term> {
  using Type = typename Term::OfRows;
};

template <typename Term, int count, RowsAre rows_are>
struct AheadOf {
  struct Type {};
};
template <HasAhead Term, int count, RowsAre rows_are>
struct AheadOf<Term, count, rows_are> {
  using Type = typename Term::template Ahead<count, rows_are>;
};

// What a term has made once: kept by the kernel, or made here.
template <typename Once, typename Params, typename At>
__device__ __forceinline__ Once once_of(const Params& params, const At& at) {
  if constexpr (requires { at.once(); })
    return static_cast<const Once&>(at.once());
  else
    return Once(params, at);
}

// Scores that grow along the columns: the products, and start[r] + per_column * column_of(i).
struct Line {
  float per_column;
  float start[2];
};

template <typename... Terms>
struct Scores {
  // Whether the values that the softmax gets are others than the products, and so have no unit.
  static constexpr bool transforms = (HasApply<Terms> || ...);
  // Whether they are the products and a line: `line` and `bend` say all that `apply` does.
  static constexpr bool adds_line = (HasLine<Terms> || ...) && (0 + ... + HasApply<Terms>) == 1;
  static constexpr bool adds_straight_line = adds_line && (HasStraightLine<Terms> || ...);
  static constexpr bool hides_by_data = (HidesByData<Terms> || ...);
  static constexpr bool hides_by_span = (HidesBySpan<Terms> || ...);
  static constexpr bool drops = (HasKeeps<Terms> || ...);
  static_assert((HasKeeps<Terms> + ... + 0) <= 1, "two terms would need words of their own");
  static constexpr bool looks_ahead = (HasAhead<Terms> || ...);
  static constexpr bool observes = (HasObserve<Terms> || ...);
  static constexpr bool finishes_rows = (HasFinishRow<Terms> || ...);
  static constexpr bool has_slope = (HasSlope<Terms> || ...);
  static constexpr bool has_gradient = (HasGradient<Terms> || ...);
  static constexpr bool has_operands = (HasOperands<Terms> || ...);
  static constexpr bool uses_head = (UsesHead<Terms> || ...);
  static_assert(leads_back<Terms...>, "a term behind one that has a slope needs `before`");

  struct Operands : OperandsOf<Terms>::Type... {};
  // Of a work tile; the default one is never used.
  struct Once : OnceOf<Terms>::Type... {
    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at)
        : OnceOf<Terms>::Type(params, at)... {}
  };
  // Of the rows of a warp; likewise.
  struct OfRows : OfRowsOf<Terms>::Type... {
    OfRows() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ OfRows(const Params& params, const At& at)
        : OfRowsOf<Terms>::Type(params, at)... {}
  };

  // Of a fragment that is cut.
  template <int count, RowsAre rows_are>
  struct Ahead : AheadOf<Terms, count, rows_are>::Type... {};

  // Step 1. With `looks`, it asks whether scores are easy: for loops that most of them pass
  // through.
  template <bool looks = false, int count, typename Params, typename At>
  static __device__ __forceinline__ void apply(float (&v)[count], const Params& params,
                                               const Unit& unit, const At& at) {
    if constexpr (transforms) {
      TermChain<Terms...> terms(params, unit, at);
      constexpr int chunk = TermChain<Terms...>::loads_many ? loaded_at_once<At, count> : count;
      // Why not both: all code would be there four times.
      if constexpr (looks && TermChain<Terms...>::has_take && !TermChain<Terms...>::has_holds) {
        if (terms.take(v)) {
          terms.set_easy(true);
#pragma unroll
          for (int i = 0; i < count; ++i) v[i] = terms.apply(v[i], i);
        } else {
          terms.set_easy(false);
#pragma unroll
          for (int i = 0; i < count; ++i) v[i] = terms.apply(v[i], i);
        }
        return;
      }
#pragma unroll
      for (int first = 0; first < count; first += chunk) {
        if (TermChain<Terms...>::has_holds && terms.holds(first + chunk)) {
          terms.set_checks(false);
#pragma unroll
          for (int i = first; i < first + chunk; ++i) v[i] = terms.apply(v[i], i);
        } else {
          terms.set_checks(true);
#pragma unroll
          for (int i = first; i < first + chunk; ++i) v[i] = terms.apply(v[i], i);
        }
      }
    }
  }

  // Step 1, of a line.
  template <typename Params, typename At>
  static __device__ __forceinline__ Line line(const Params& params, const At& at) {
    Line line{};
    (set_line<Terms>(line, params, at), ...);
    return line;
  }
  template <typename Params, typename At>
  static __device__ __forceinline__ float per_column(const Params& params, const At& at) {
    float found = 0.0f;
    (set_per_column<Terms>(found, params, at), ...);
    return found;
  }
  // What `line` leaves out.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void bend(float (&v)[count], const Params& params,
                                              const At& at) {
    (bend_by<Terms>(v, params, at), ...);
  }

  // Step 2.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void hide(float (&v)[count], const Params& params,
                                              const At& at) {
    TermChain<Terms...>(params, Unit{}, at).hide(v, at);
  }

  // Before step 2, of a fragment that is cut.
  template <int count, RowsAre rows_are, typename Params, typename At>
  static __device__ __forceinline__ void look_ahead(Ahead<count, rows_are>& ahead,
                                                    const Params& params, const At& at) {
    (look_ahead_by<Terms>(ahead, params, at), ...);
  }

  // Step 2, after it.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void observe(const float (&v)[count], const Params& params,
                                                 const At& at, float unit = 1.0f) {
    if constexpr (observes) TermChain<Terms...>(params, Unit{}, at).observe(v, unit);
  }

  template <typename Term, int count, RowsAre rows_are, typename Params, typename At>
  static __device__ __forceinline__ void look_ahead_by(Ahead<count, rows_are>& ahead,
                                                       const Params& params, const At& at) {
    if constexpr (HasAhead<Term>)
      Term(params, Unit{}, at)
          .look_ahead(static_cast<typename AheadOf<Term, count, rows_are>::Type&>(ahead), at);
  }
  template <typename Term, typename Params, typename At>
  static __device__ __forceinline__ void set_line(Line& line, const Params& params, const At& at) {
    if constexpr (HasLine<Term>) {
      const Term term(params, Unit{}, at);
      line = {Term::per_column(params, at), {term.start_of_row(0), term.start_of_row(1)}};
    }
  }
  template <typename Term, typename Params, typename At>
  static __device__ __forceinline__ void set_per_column(float& found, const Params& params,
                                                        const At& at) {
    if constexpr (HasLine<Term>) found = Term::per_column(params, at);
  }
  template <typename Term, int count, typename Params, typename At>
  static __device__ __forceinline__ void bend_by(float (&v)[count], const Params& params,
                                                 const At& at) {
    if constexpr (HasLine<Term>) {
      const Term term(params, Unit{}, at);
      if (!term.bends(count)) return;
#pragma unroll
      for (int i = 0; i < count; ++i) v[i] = term.bend(v[i], i);
    }
  }
  template <typename Term, typename Params>
  static __device__ __forceinline__ bool sees_by(const Params& params, int batch, int head,
                                                 int query, int key) {
    if constexpr (HidesByData<Term> || HidesBySpan<Term>)
      return Term::sees(params, batch, head, query, key);
    return true;
  }
  template <typename Term, typename Params>
  static __device__ __forceinline__ void narrow_keys(const Params& params, int batch, int begin,
                                                     int end, SeenSpans& keys) {
    if constexpr (HidesBySpan<Term>) {
      const SeenSpans own = Term::seen_keys(params, batch, begin, end);
      keys = {keys.some.within(own.some), keys.all.within(own.all)};
    }
  }
  template <typename Term, typename Params>
  static __device__ __forceinline__ void narrow_queries(const Params& params, int batch, int begin,
                                                        int end, SeenSpans& queries) {
    if constexpr (HidesBySpan<Term>) {
      const SeenSpans own = Term::seen_queries(params, batch, begin, end);
      queries = {queries.some.within(own.some), queries.all.within(own.all)};
    }
  }
  // Whether the terms that read tensors leave a key to a query.
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int head, int query,
                                              int key) {
    bool seen = true;
    ((seen = seen && sees_by<Terms>(params, batch, head, query, key)), ...);
    return seen;
  }
  // The keys that those which hide by spans leave to queries [begin, end) of a batch.
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_keys(const Params& params, int batch, int begin,
                                                        int end) {
    SeenSpans keys{{0, params.seq_k}, {0, params.seq_k}};
    (narrow_keys<Terms>(params, batch, begin, end, keys), ...);
    return keys;
  }
  // The queries that they leave to keys [begin, end).
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_queries(const Params& params, int batch,
                                                           int begin, int end) {
    SeenSpans queries{{0, params.seq_q}, {0, params.seq_q}};
    (narrow_queries<Terms>(params, batch, begin, end, queries), ...);
    return queries;
  }

  // Step 4: the random words of a fragment, before or while its scores are made,
  template <int blocks, typename Params, typename At>
  static __device__ __forceinline__ void draw(ptx::u32 (&drawn)[blocks][drawn_words],
                                              const Params& params, const At& at) {
    const TermChain<Terms...> terms(params, Unit{}, at);
#pragma unroll
    for (int block = 0; block < blocks; ++block) terms.draw(block, drawn[block]);
  }
  // or as they are needed; and which of its weights stay.
  struct Drawing {
    TermChain<Terms...> terms;
    ptx::u32 drawn[drawn_words];

    __device__ __forceinline__ ptx::u32 keeps(int i) {
      if (i % 8 == 0) terms.draw(i / 8, drawn);
      return terms.keeps(i, drawn);
    }
  };
  // Without the others: weights in 16 bits, two to a word, in the A layout of the next product. The
  // words of the first blocks are drawn before.
  template <int blocks, int before, typename Params, typename At>
  static __device__ __forceinline__ void drop(ptx::u32 (&p)[blocks][4],
                                              const ptx::u32 (&drawn)[before][drawn_words],
                                              const Params& params, const At& at) {
    if constexpr (drops) {
      Drawing drawing{TermChain<Terms...>(params, Unit{}, at)};
#pragma unroll
      for (int i = 0; i < 8 * blocks; i += 2)
        p[i / 8][i / 2 % 4] &=
            i / 8 < before ? drawing.terms.keeps(i, drawn[i / 8]) : drawing.keeps(i);
    }
  }
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void drop(float (&p)[count], const Params& params,
                                              const At& at) {
    if constexpr (drops) {
      Drawing drawing{TermChain<Terms...>(params, Unit{}, at)};
#pragma unroll
      for (int i = 0; i < count; i += 2) {
        const ptx::u32 kept = drawing.keeps(i);
        p[i] = kept & 1u ? p[i] : 0.0f;
        p[i + 1] = kept >> 31 ? p[i + 1] : 0.0f;
      }
    }
  }
  // Of weights that are needed after all, those that do not stay get a sign: weights have none. One
  // bit each, for elements i and i + 1 those of i / 2 % 16 in the low and the high half of a word,
  template <int words, typename Params, typename At>
  static __device__ __forceinline__ void find_dropped(ptx::u32 (&dropped)[words],
                                                      const Params& params, const At& at) {
    Drawing drawing{TermChain<Terms...>(params, Unit{}, at)};
#pragma unroll
    for (int i = 0; i < 32 * words; i += 2) {
      const ptx::u32 found = ~drawing.keeps(i) & 0x10001u << i / 2 % 16;
      dropped[i / 32] = i % 32 == 0 ? found : dropped[i / 32] | found;
    }
  }
  // becomes the sign; or both at once.
  template <int blocks>
  static __device__ __forceinline__ void mark(ptx::u32 (&p)[blocks][4],
                                              const ptx::u32 (&dropped)[blocks / 4]) {
#pragma unroll
    for (int i = 0; i < 8 * blocks; i += 2)
      p[i / 8][i / 2 % 4] |= dropped[i / 32] << (15 - i / 2 % 16) & 0x80008000u;
  }
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void mark(float (&p)[count], const Params& params,
                                              const At& at) {
    if constexpr (drops) {
      Drawing drawing{TermChain<Terms...>(params, Unit{}, at)};
#pragma unroll
      for (int i = 0; i < count; i += 2) {
        const ptx::u32 dropped = ~drawing.keeps(i);
        p[i] = __uint_as_float(__float_as_uint(p[i]) | dropped << 31);
        p[i + 1] = __uint_as_float(__float_as_uint(p[i + 1]) | (dropped & 0x80000000u));
      }
    }
  }
  // w.
  template <typename Params, typename At>
  static __device__ __forceinline__ float kept_weight(const Params& params, const At& at) {
    if constexpr (!drops) return 1.0f;
    return TermChain<Terms...>(params, Unit{}, at).kept_weight();
  }

  // Step 5.
  template <typename Params, typename At>
  static __device__ __forceinline__ float finish_row(const Params& params, const At& at, int r,
                                                     float& m, float& l, float log2_unit) {
    if constexpr (!finishes_rows) return 1.0f;
    return TermChain<Terms...>(params, Unit{}, at).finish_row(m, l, log2_unit, r);
  }

  // Steps 7 and 9 for the elements of one fragment, each in ascending order.
  struct Backward : Drawing {
    using Drawing::terms;
    ptx::u32 kept;  // of this element and its neighbour

    __device__ __forceinline__ float drop(float dp, int i) {
      if constexpr (!drops) return dp;
      if (i % 2 == 0) kept = this->keeps(i);
      return (i % 2 == 0 ? kept & 1u : kept >> 31) ? dp * terms.kept_weight() : 0.0f;
    }
    // dS_0 from dS_n, both in `unit`; value() gives v_n.
    template <typename Value>
    __device__ __forceinline__ float pull_back(float ds, int i, Value value, float unit = 1.0f) {
      if constexpr (!has_slope && !has_gradient) return ds;
      float v = 0.0f;
      if constexpr (has_slope) v = value();
      return terms.pull_back(ds, v, i, unit);
    }
    __device__ __forceinline__ void end() { terms.end_gradient(); }
  };
  template <typename Params, typename At>
  static __device__ __forceinline__ Backward backward(const Params& params, const At& at) {
    return {{TermChain<Terms...>(params, Unit{}, at)}};
  }
};

// --- what terms that hide make of the tiles of a plan ---

// Of the KV tiles that queries [row_begin, row_end) of a batch touch, those in which some key is
// left, and those that need no hiding.
template <typename Policy, typename Params>
__device__ __forceinline__ void narrow_tiles(const Params& params, int batch, int row_begin,
                                             int row_end, int block_kv, TileRange& touched,
                                             TileRange& full) {
  if constexpr (Policy::hides_by_span) {
    if (touched.empty()) return;  // where there may be no queries to ask about
    const SeenSpans keys = Policy::seen_keys(params, batch, row_begin, row_end);
    touched = {max_int(touched.begin, keys.some.begin / block_kv),
               min_int(touched.end, ceil_div(keys.some.end, block_kv))};
    if (touched.empty() || keys.some.begin >= keys.some.end) touched = {0, 0};
    full = {max_int(full.begin, ceil_div(keys.all.begin, block_kv)),
            min_int(full.end, keys.all.end / block_kv)};
    if (full.empty()) full = {touched.begin, touched.begin};
  }
  if constexpr (Policy::hides_by_data) full = {touched.begin, touched.begin};
}

// Of the query tiles that touch a KV tile, those that it visits, and those that need no hiding.
// `leaves_out`: it visits those of which a query may see a key, by the bounds of its first and its
// last key; else all that the band leaves, which others count on. A query tile is visited by the KV
// tiles that touch what its first and its last row say of keys: the same pairs of tiles, since no
// bound falls (`visiting_tiles`).
template <typename Policy, typename Params>
__device__ __forceinline__ void narrow_query_tiles(const Params& params, int batch, int kv_tile,
                                                   int block_q, int block_kv, bool leaves_out,
                                                   QueryTiles& tiles) {
  if constexpr (Policy::hides_by_span) {
    const int begin = kv_tile * block_kv, end = min_int(begin + block_kv, params.seq_k);
    if (tiles.touched.empty() || begin >= end) return;
    const SeenSpans queries = Policy::seen_queries(params, batch, begin, end);
    if (leaves_out) {
      tiles.touched = {max_int(tiles.touched.begin, queries.some.begin / block_q),
                       min_int(tiles.touched.end, ceil_div(queries.some.end, block_q))};
      if (tiles.touched.empty() || queries.some.begin >= params.seq_q) tiles.touched = {0, 0};
    }
    // Queries past the end have no weight: the last tile is full where they alone are not seen.
    const int full_end =
        queries.all.end == params.seq_q ? tiles.full.end : max_int(0, queries.all.end) / block_q;
    tiles.full = {max_int(tiles.full.begin, ceil_div(queries.all.begin, block_q)),
                  min_int(tiles.full.end, full_end)};
    if (tiles.full.empty() || tiles.touched.empty()) tiles.full = {0, 0};
  }
  if constexpr (Policy::hides_by_data) tiles.full = {0, 0};
}

// Of the KV tiles that the band leaves to queries [row_begin, row_end) of a batch, those that visit
// them where tiles are left out.
template <typename Policy, typename Params>
__device__ __forceinline__ TileRange visiting_tiles(const Params& params, int batch, int row_begin,
                                                    int row_end, int block_kv, TileRange tiles) {
  if constexpr (Policy::hides_by_span) {
    const Span keys = Policy::seen_keys(params, batch, row_begin, row_end).some;
    tiles = {max_int(tiles.begin, keys.begin / block_kv),
             min_int(tiles.end, ceil_div(keys.end, block_kv))};
    if (keys.begin >= params.seq_k) tiles = {0, 0};
  }
  return tiles;
}

}  // namespace tilewise
