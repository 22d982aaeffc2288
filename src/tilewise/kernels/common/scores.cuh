// clang-format off
// The operations on the scores between the two products: one policy, composed at compile time, for every kernel of the engine,
// of both generations and directions, 16-bit and float32.
//
// Symbols. x[i, j]: the accumulator of the product of q_i and k_j; x times `unit` is q_i . k_j. T_1 ... T_n: the terms of
// Scores<T_1, ..., T_n>, in the order in which they are applied. v_t: a score after T_t; the score in nats is c v_n, where c
// is a factor that the kernel passes to the softmax: the scale of the problem, or with a softcap the cap.
// D[i]: rowsum(dO * O) - dlse. w: the product of the terms' kept_weight, 1 without dropout.
//
//   Forward, for every fragment of S                                                   hook of a term
//   1. v_0 = x, v_t = T_t(v_{t-1})                                                     apply
//   2. in tiles cut by the band: v_n = -inf where a term hides the key from the query  hide
//      a term may report values of v_n                                                 observe
//   3. P = e^(c v_n - m), added to the row sum l
//   4. P = 0 where a term drops it, after it was added to l                            draw, keeps
//   Forward, once per row
//   5. a term may change m and l; O is rescaled to the units of the new m              finish_row
//      out = w O / l, lse = m + ln l
//   Backward
//   6. v_n as in 1 and 2, P = e^(c v_n - lse)
//   7. dV = w (P as in 4)^T dO; dP = w dP where a term keeps P, else 0                 draw, keeps
//   8. dS_n = P (dP - D)
//   9. for t = n ... 1: the gradient of T_t's operands from dS_t,                      gradient, end_gradient
//      dS_{t-1} = dS_t T_t'(v_{t-1})                                                   slope, before
//      dQ and dK come from dS_0
//
// A term is a struct. It has a constructor and those of the members below that it needs. A kernel has no code for a hook that
// no term of its policy has, so Scores<> compiles to nothing.
//
//   Term(params, unit, at)             Constructs the state of one fragment. `params` are the parameters of the kernel, of any
//                                      family, with the term's Operands: a term reads what it needs by name. `unit` is 1 for all
//                                      terms but the first that has `apply`. `at` has the coordinates of the fragment; its members
//                                      are listed in NoCoords below. Call only those that are needed, since each may cost registers:
//                                      none that only a hook that the term lacks would use.
//   struct Once                        State shared by all fragments of a head, made from (params, at); the constructor
//                                      gets it from once_of(), which returns the kernel's copy or makes a new one.
//   struct OfRows                      State shared by all fragments of the same rows, made from (params, at) by a whole warp;
//                                      at.of_rows() returns it in kernels that keep it.
//   struct Operands                    The parameters that the term needs in addition to those of all kernels: pointers, strides,
//                                      numbers. The kernel's parameters derive from it (ParamsOf).
//   static bool uses_head = true       Set if the term reads the head.
//   float apply(float v, int i)        Returns v_t of element i from v_{t-1}; -inf hides it. Called once for every i, in
//                                      ascending order, so that a term may load or draw numbers for several elements at once.
//   float start_of_row(int r)          For a term whose `apply` adds start_of_row(r) + per_column * column_of(i). If it `bends` in
//   static float per_column(params, at)  some of its first `count` columns, `apply` adds more there, and `bend` adds the difference.
//   bool bends(int count)              Kernels that have no other term with `apply` add the line where it costs least. A line
//   float bend(float v, int i)         that `is_straight` never bends.
//   bool holds(int count)              For a term that reads a number per element: whether the first `count` exist. The member
//   bool checks                        `checks` tells `apply` whether it must test each element; where all exist, it need not.
//   static bool loads_few = true       Set in such a term if elements share these numbers: they are loaded all at once.
//   struct Early<count>                The numbers of `count` elements of such a term, as numbers[][2]; at.early() returns them in
//   void load_early(Early&)            kernels that load them while the scores are being computed. At most one term has them.
//   bool are_easy(const float (&v)[])  For a term that is the first to change scores: whether this warp's scores allow the shorter
//   bool easy                          variant of `apply`, which `easy` selects.
//   static auto exponents<easy>(params)
//                                      For such a term: the function scale_log2 v_t - base of (v_{t-1}, base, i), in the unit 1, for
//                                      kernels that have no other term with `apply`.
//   void hide(float (&v)[], at)        Sets hidden elements to -inf. The plan of the kernel decides which tiles are cut.
//   struct Ahead<count, rows_are>      The data that `hide` reads for a fragment; at.ahead() returns it in kernels that load
//   void look_ahead(Ahead&, at)        it while the scores are being computed.
//   static SeenSpans seen_keys(params, batch, begin, end)
//   static SeenSpans seen_queries(params, batch, begin, end)
//                                      For a term that hides by spans (`hides_by_span`). For queries [begin, end), which must not
//                                      be past the last: the keys that some of them may see, and the keys that all of them see;
//                                      for keys [begin, end), the queries likewise. The plan leaves out tiles outside the first
//                                      span, and treats tiles inside the second as full.
//   static bool sees(params, batch, head, query, key)
//                                      For a term that hides: the answer for one pair. Without spans the plan does not know which
//                                      tiles the term cuts, and treats all of them as cut (`narrow_tiles` is where to refine this).
//   void observe(const float (&v)[], float unit)
//                                      In a forward: v_n of all elements, hidden or not; a score is v_n times `unit` and a factor
//                                      that the host knows. Elements of rows past the end are included.
//   void draw(int block, u32 (&drawn)[drawn_words])
//   u32 keeps(int i, const u32 (&drawn)[drawn_words])
//   float kept_weight                  For a term that drops weights; a policy has at most one. `draw` makes the random words of
//                                      the `block`-th eight elements. `keeps` returns which weights of elements i and i + 1 of that
//                                      block stay, for even i, as ones in the low and the high half of a word. The result for a
//                                      query and a key is the same in every kernel, whichever of them is the row. All lanes of a
//                                      warp call it, in ascending order. `kept_weight` is the factor of kept weights.
//   u32 keeps<true>(int i, const u32 (&drawn)[drawn_words])
//   u32 exchange(u32 bits)             Where the words of a lane decide about weights of another lane, such a term may leave the
//                                      exchange to the end: this `keeps` returns bits for the weights that the lane's words decide
//                                      about, and `exchange`, which all lanes of a warp call, turns them into bits for the lane's
//                                      own weights, for element i in the low half of a word and for i + 1 in the high half.
//   float finish_row(float& m, float& l, float log2_unit, int r)
//                                      For row r of the fragment: l is the sum of 2^(log2_unit (v_n - m)) over its keys; m = -inf
//                                      and l = 0 where it sees none. Returns the factor by which O is multiplied when m changes.
//   float slope(float v, int i)        T_t' of element i from v = v_t: the kernels keep the result of `apply`, or recover it from
//                                      P, never its argument. Must be finite where P is 0, and there v may be -inf or NaN. A
//                                      term without it has slope 1.
//   float slope(float argument, float v, int i)
//                                      The same from v_{t-1} and v_t, for a term with `before`, which recovers the argument.
//   float before(float v, int i)       v_{t-1} from v_t. Needed where an earlier term has a slope.
//   void gradient(float ds, int i)     Receives dS_t of element i, in ascending order, to store it or to add it up in the
//                                      state. A term with a member `ds_unit` receives it in that unit. Tiles that the mask hides
//                                      are not visited: a term that stores needs zeros there beforehand.
//   void gradient(float ds, const Weighed& of_element, int i)
//                                      The same for a term that also needs the effect of the error of D[i] on its gradient: see
//                                      Weighed below.
//   void end_gradient()                Called after the last element, to add the state to global memory.
//
// The terms that read tensors are in terms/. One more kind is possible:
//   a function    apply and slope, from its trace; `slope` in terms of the result, or of the argument if that follows from
//                 the result. Otherwise the kernels would have to keep the argument
//
// To add a term, add a struct in terms/, and a class in tilewise/terms that names it and fills in its operands.
// clang-format on
#pragma once

#include "fragment.cuh"
#include "operands.cuh"
#include "pieces.cuh"
#include "ptx.cuh"

namespace tilewise {

enum class RowsAre { queries, keys };

constexpr int drawn_words = 2;  // for eight weights that a term may drop

// The coordinates of a thread's fragment. Each kernel has its own struct ElementCoords with these
// members, which are functions: a term calls those that it needs. Why functions: where registers
// are few, their inputs are read again each time. (This struct serves the concepts below, which
// only test whether a hook exists.)
struct NoCoords {
  static constexpr RowsAre rows_are = RowsAre::queries;
  __device__ int row() const;     // of element 0: a query, or a key where rows are keys
  __device__ int column() const;  // of element 0: a key, or a query where rows are keys
  __device__ int batch() const;
  __device__ int head() const;   // query head
  __device__ Band band() const;  // of the sequence: rows and columns count from its starts
  // In some kernels: 2 KiB of shared memory for this warp, until its gradients have ended.
  // __device__ float* room() const;
  __device__ RowBand row_band() const;
};

// The head of such coordinates, which is known before any fragment is.
struct HeadCoords {
  int batch_index, head_index;

  __device__ __forceinline__ int batch() const { return batch_index; }
  __device__ __forceinline__ int head() const { return head_index; }
};
// Space in shared memory for the data that terms compute once per head, where a separate role
// computes it.
struct alignas(4) OnceRoom {
  ptx::u32 words[8];

  template <typename Once>
  __device__ __forceinline__ Once& as() {
    static_assert(sizeof(Once) <= sizeof(words) && alignof(Once) <= 4);
    return *reinterpret_cast<Once*>(words);
  }
};

// The part of these coordinates that a term may keep: the query and the key of element i.
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

// What terms leave visible to several queries: keys [begin, end); or to several keys: queries.
struct Span {
  int begin, end;

  __device__ __forceinline__ Span within(const Span& other) const {
    return {max_int(begin, other.begin), min_int(end, other.end)};
  }
};
struct SeenSpans {
  Span some;  // visible to at least one of them; a hull
  Span all;   // visible to every one; may end before it begins
};

// dS_n of an element, and P times the slopes of the terms after the one that receives it. Why: an
// error e of D[i] changes every dS_n of the row by -P e, and dS_t by -e times that product.
struct Weighed {
  float ds, p;
};

// --- terms ---

// tanh(x in), where `in` is scale / cap: the score in units of the cap.
//   fast     `in` is 2 log2(e) scale / cap, and tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)): two
//            approximate instructions, for kernels whose weights are rounded to 16 bits. The unit
//            that executes them is the bottleneck, and most scores are small compared to the cap:
//            where all scores of a warp are, an odd polynomial replaces them, with an error of the
//            same size
//   precise  accurate to one unit in the last place
enum class Precision { fast, precise };

// factor * tanh(y) for |y| < 1/2 and y = x unit / 4, as an odd polynomial of x whose coefficients
// include both factors. Its relative error is 6e-7: a weight e^s with |s| < 15 changes by less than
// 2% of the error that its rounding to fp16 may cause, and by 0.5% of that of bf16. A polynomial of
// degree 5 would have 2.5e-5, which is as much as the rounding to fp16.
struct SmallTanh {
  float first, third, fifth, seventh;

  __device__ __forceinline__ SmallTanh(float unit, float factor) {
    const float square = unit * unit;
    first = 0x1.ffffeep-3f * unit * factor;
    third = -0x1.5542f2p-8f * unit * factor * square;
    fifth = 0x1.0e2324p-13f * unit * factor * square * square;
    seventh = -0x1.6bbe38p-19f * unit * factor * square * square * square;
  }
  // The value divided by x.
  __device__ __forceinline__ float over(float x) const {
    const float square = x * x;
    const float sum = fmaf(square, fmaf(square, seventh, fifth), third);
    return fmaf(square, sum, first);
  }
};

template <Precision precision>
struct Softcap {
  static constexpr float quarters = 0x1.62e430p+0f;  // 4 y per x * in: 2 ln 2
  float in;
  bool easy = false;

  template <typename Params, typename At>
  __device__ __forceinline__ Softcap(const Params& params, const Unit& unit, const At&)
      : in(params.softcap_in * unit.first * unit.second) {}

  __device__ __forceinline__ float apply(float x, int) const {
    if constexpr (precision == Precision::precise) return tanhf(x * in);
    if (easy) return x * SmallTanh(in * quarters, 1.0f).over(x);
    return fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x * in)), 1.0f);
  }
  // Whether |y| < 1/2 for all x. Why sums of squares: the unit that computes maxima has half the
  // rate of the unit that multiplies. Invariant: the numbers of a sum are of one row, because a
  // maximum ignores NaN; a row that has one is NaN in any case.
  template <int count>
  __device__ __forceinline__ bool are_easy(const float (&x)[count]) const
    requires(precision == Precision::fast)
  {
    const float unit = in * quarters;
    // Beyond these bounds, coefficients would leave the range of float.
    const bool in_range = fabsf(unit) > 0x1p-16f && fabsf(unit) < 0x1p16f;
    const float bound = in_range ? 4.0f * ptx::rcp(unit * unit) : 0.0f;
    float top[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < count; i += i % 4 == 0 ? 2 : 6) {
      float sum = x[i] * x[i];
      sum = fmaf(x[i + 1], x[i + 1], sum);
      sum = fmaf(x[i + 4], x[i + 4], sum);
      top[i % 4 / 2] = fmaxf(top[i % 4 / 2], fmaf(x[i + 5], x[i + 5], sum));
    }
    return !__any_sync(0xffffffffu, fmaxf(top[0], top[1]) >= bound);
  }
  // The exponents of weights, from x: scale_log2 tanh(x in) - base. The factor is part of the
  // polynomial.
  struct EasyExponents {
    SmallTanh value;
    __device__ __forceinline__ float operator()(float x, float base, int) const {
      return fmaf(x, value.over(x), -base);
    }
  };
  struct Exponents {
    float in, scale_log2;
    __device__ __forceinline__ float operator()(float x, float base, int) const {
      return fmaf(-2.0f * scale_log2, ptx::rcp(1.0f + ptx::ex2(x * in)), scale_log2 - base);
    }
  };
  template <bool easy, typename Params>
  static __device__ __forceinline__ auto exponents(const Params& params)
    requires(precision == Precision::fast)
  {
    if constexpr (easy)
      return EasyExponents{SmallTanh(params.softcap_in * quarters, params.scale_log2)};
    else
      return Exponents{params.softcap_in, params.scale_log2};
  }
  // 1 - tanh^2. A value recovered from a weight may be -inf, where the weight is 0.
  __device__ __forceinline__ float slope(float v, int) const {
    if constexpr (precision == Precision::fast) v = fmaxf(v, -1.0f);
    return fmaf(-v, v, 1.0f);
  }
};

// Hides the columns of row r of a fragment outside [first, end), counted from the fragment's first
// column.
template <int count>
__device__ __forceinline__ void hide_outside(float (&v)[count], int r, int first, int end) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (row_of(i) != r) continue;
    const int column = column_of(i);
    v[i] = column >= first && column < end ? v[i] : -infinity;
  }
}

// The keys or queries that the band leaves visible to a row. A key that does not exist is visible
// to none.
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

// Hides keys outside the band of a query, and keys that do not exist (mask.cuh). Kernels for some
// masks need not check all bounds.
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
concept HasEasy = requires(Term term, const float (&v)[8]) { term.easy = term.are_easy(v); };
template <typename Term>
concept HasHide = requires(Term term, float (&v)[4]) { term.hide(v, NoCoords{}); };
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
concept HasExchange = requires(Term term) { term.exchange(0u); };
template <typename Term>
concept HasOnce = requires { typename Term::Once; };
template <typename Term>
concept HasOfRows = requires { typename Term::OfRows; };
template <typename Term>
concept HasAhead = requires { typename Term::template Ahead<4, RowsAre::queries>; };
template <typename Term>
concept LooksAheadByKeys = HasAhead<Term> && requires { requires Term::looks_ahead_by_keys; };
template <typename Term>
concept HasEarly = requires { typename Term::template Early<4>; };
template <typename Term>
concept HasObserve = requires(Term term, const float (&v)[4]) { term.observe(v, 1.0f); };
template <typename Term>
concept HasFinishRow = requires(Term term, float& x) { term.finish_row(x, x, 1.0f, 0); };
template <typename Term>
concept HasBefore = requires(Term term) { term.before(0.0f, 0); };
template <typename Term>
concept HasSlopeOfArgument = requires(Term term) { term.slope(0.0f, 0.0f, 0); };
template <typename Term>
concept HasSlope = HasSlopeOfArgument<Term> || requires(Term term) { term.slope(0.0f, 0); };
template <typename Term>
concept HasWeighedGradient = requires(Term term) { term.gradient(0.0f, Weighed{}, 0); };
template <typename Term>
concept HasGradient = HasWeighedGradient<Term> || requires(Term term) { term.gradient(0.0f, 0); };
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

// The number of elements for which a term that reads a number per element loads them in advance:
// all or, where rows are keys and each number has its own address, as many as the remaining
// registers allow.
template <typename At, int count>
constexpr int loaded_at_once = At::rows_are == RowsAre::queries || count < 16 ? count : 16;

// The terms of one fragment.
template <typename... Terms>
struct TermChain {
  static constexpr bool has_slope = false;
  static constexpr bool has_holds = false;
  static constexpr bool loads_many = false;
  static constexpr bool has_easy = false;

  template <typename Params, typename At>
  __device__ __forceinline__ TermChain(const Params&, const Unit&, const At&) {}

  __device__ __forceinline__ float apply(float v, int) { return v; }
  __device__ __forceinline__ bool holds(int) { return true; }
  __device__ __forceinline__ void set_checks(bool) {}
  template <int count>
  __device__ __forceinline__ bool are_easy(const float (&)[count]) {
    return false;
  }
  __device__ __forceinline__ void set_easy(bool) {}
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&)[count], const At&) {}
  template <int count>
  __device__ __forceinline__ void observe(const float (&)[count], float) {}
  __device__ __forceinline__ void draw(int, ptx::u32 (&)[drawn_words]) const {}
  template <bool before_exchange>
  __device__ __forceinline__ ptx::u32 keeps(int, const ptx::u32 (&)[drawn_words]) {
    return ~0u;
  }
  __device__ __forceinline__ ptx::u32 exchange(ptx::u32 bits) { return bits; }
  __device__ __forceinline__ float kept_weight() { return 1.0f; }
  __device__ __forceinline__ float finish_row(float&, float&, float, int) { return 1.0f; }
  __device__ __forceinline__ float pull_back(float ds, float&, int, float, Weighed&) { return ds; }
  __device__ __forceinline__ void end_gradient() {}
};

template <typename First, typename... Rest>
struct TermChain<First, Rest...> {
  static constexpr bool has_slope = HasSlope<First> || TermChain<Rest...>::has_slope;
  static constexpr bool has_holds = HasHolds<First> || TermChain<Rest...>::has_holds;
  static constexpr bool loads_many =
      (HasHolds<First> && !LoadsFew<First>) || TermChain<Rest...>::loads_many;
  static constexpr bool has_easy = HasApply<First> ? HasEasy<First> : TermChain<Rest...>::has_easy;

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
  __device__ __forceinline__ bool are_easy(const float (&v)[count]) {
    if constexpr (HasEasy<First>) return first.are_easy(v);
    return rest.are_easy(v);
  }
  __device__ __forceinline__ void set_easy(bool easy) {
    if constexpr (HasEasy<First>)
      first.easy = easy;
    else
      rest.set_easy(easy);
  }
  template <bool easy, typename Params>
  static __device__ __forceinline__ auto exponents(const Params& params) {
    if constexpr (HasEasy<First>)
      return First::template exponents<easy>(params);
    else
      return TermChain<Rest...>::template exponents<easy>(params);
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
  template <bool before_exchange = false>
  __device__ __forceinline__ ptx::u32 keeps(int i, const ptx::u32 (&drawn)[drawn_words]) {
    if constexpr (before_exchange && HasExchange<First>)
      return first.template keeps<true>(i, drawn);
    else if constexpr (HasKeeps<First>)
      return first.keeps(i, drawn);
    return rest.template keeps<before_exchange>(i, drawn);
  }
  __device__ __forceinline__ ptx::u32 exchange(ptx::u32 bits) {
    if constexpr (HasExchange<First>) return first.exchange(bits);
    return rest.exchange(bits);
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
  // Step 9: v, the value after the last term, becomes the value before the first, if that is known.
  __device__ __forceinline__ float pull_back(float ds, float& v, int i, float unit,
                                             Weighed& weighed) {
    ds = rest.pull_back(ds, v, i, unit, weighed);
    if constexpr (HasWeighedGradient<First>) {
      first.gradient(ds * unit, weighed, i);
    } else if constexpr (HasGradient<First> && requires { first.ds_unit; }) {
      first.ds_unit = unit;
      first.gradient(ds, i);
    } else if constexpr (HasGradient<First>) {
      first.gradient(ds * unit, i);
    }
    if constexpr (HasSlopeOfArgument<First>) {
      static_assert(HasBefore<First>, "no kernel keeps the argument of a term");
      const float argument = first.before(v, i), slope = first.slope(argument, v, i);
      ds *= slope;
      weighed.p *= slope;
      v = argument;
    } else if constexpr (HasSlope<First>) {
      const float slope = first.slope(v, i);
      ds *= slope;
      weighed.p *= slope;
    }
    if constexpr (HasBefore<First> && !HasSlopeOfArgument<First>) v = first.before(v, i);
    return ds;
  }
  __device__ __forceinline__ void end_gradient() {
    rest.end_gradient();
    if constexpr (HasEndGradient<First>) first.end_gradient();
  }
};

// Whether the values that slopes are computed from can be recovered from a value after the last
// term.
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

template <typename Term, int count>
struct EarlyOf {
  struct Type {};
};
template <HasEarly Term, int count>
struct EarlyOf<Term, count> {
  using Type = typename Term::template Early<count>;
};

// A term's Once: the kernel's copy, or a copy made here.
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
  // Whether the softmax gets values other than the products. Such values have no unit.
  static constexpr bool transforms = (HasApply<Terms> || ...);
  // Whether these values are the products plus a line: then `line` and `bend` together do all that
  // `apply` does.
  static constexpr bool adds_line = (HasLine<Terms> || ...) && (0 + ... + HasApply<Terms>) == 1;
  static constexpr bool adds_straight_line = adds_line && (HasStraightLine<Terms> || ...);
  static constexpr bool hides_by_data = (HidesByData<Terms> || ...);
  static constexpr bool hides_by_span = (HidesBySpan<Terms> || ...);
  static constexpr bool drops = (HasKeeps<Terms> || ...);
  static_assert((HasKeeps<Terms> + ... + 0) <= 1, "two terms would need words of their own");
  static constexpr bool looks_ahead = (HasAhead<Terms> || ...);
  // Where rows are keys, a term may hold in its OfRows all that it would look up.
  static constexpr bool looks_ahead_by_keys = (LooksAheadByKeys<Terms> || ...);
  static constexpr bool loads_early = (HasEarly<Terms> || ...);
  static_assert((HasEarly<Terms> + ... + 0) <= 1, "two terms would need numbers of their own");
  static constexpr bool observes = (HasObserve<Terms> || ...);
  static constexpr bool finishes_rows = (HasFinishRow<Terms> || ...);
  static constexpr bool has_slope = (HasSlope<Terms> || ...);
  static constexpr bool has_gradient = (HasGradient<Terms> || ...);
  static constexpr bool has_operands = (HasOperands<Terms> || ...);
  static constexpr bool uses_head = (UsesHead<Terms> || ...);
  static_assert(leads_back<Terms...>, "a term behind one that has a slope needs `before`");

  struct Operands : OperandsOf<Terms>::Type... {};
  // For a work tile. A default-constructed one is never used.
  struct Once : OnceOf<Terms>::Type... {
    Once() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ Once(const Params& params, const At& at)
        : OnceOf<Terms>::Type(params, at)... {}
  };
  // For the rows of a warp. A default-constructed one is never used.
  struct OfRows : OfRowsOf<Terms>::Type... {
    OfRows() = default;
    template <typename Params, typename At>
    __device__ __forceinline__ OfRows(const Params& params, const At& at)
        : OfRowsOf<Terms>::Type(params, at)... {}
  };

  // For a fragment that is cut.
  template <int count, RowsAre rows_are>
  struct Ahead : AheadOf<Terms, count, rows_are>::Type... {};

  // For a fragment whose scores are being computed.
  template <int count>
  struct Early : EarlyOf<Terms, count>::Type... {};

  // Runs before step 1. `checks`: not all numbers exist, or their addresses must be computed one by
  // one.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ bool holds_early(const Params& params, const At& at) {
    return TermChain<Terms...>(params, Unit{}, at).holds(count);
  }
  template <bool checks, int count, typename Params, typename At>
  static __device__ __forceinline__ void load_early(Early<count>& early, const Params& params,
                                                    const At& at) {
    (load_early_by<Terms, checks>(early, params, at), ...);
  }

  // Whether scores may be easy. Why not in policies that have `holds`: the code would be
  // instantiated four times.
  static constexpr bool has_easy = TermChain<Terms...>::has_easy && !TermChain<Terms...>::has_holds;
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ bool are_easy(const float (&v)[count], const Params& params,
                                                  const Unit& unit, const At& at) {
    return TermChain<Terms...>(params, unit, at).are_easy(v);
  }
  // Whether `exponents` does everything that step 1 does, and the scaling of step 3.
  static constexpr bool has_exponents = has_easy && !observes && (0 + ... + HasApply<Terms>) == 1;
  template <bool easy, typename Params>
  static __device__ __forceinline__ auto exponents(const Params& params) {
    if constexpr (has_exponents)
      return TermChain<Terms...>::template exponents<easy>(params);
    else
      return 0;
  }

  // Step 1, where `easy` means that all scores are easy.
  template <bool easy = false, int count, typename Params, typename At>
  static __device__ __forceinline__ void apply(float (&v)[count], const Params& params,
                                               const Unit& unit, const At& at) {
    if constexpr (transforms) {
      TermChain<Terms...> terms(params, unit, at);
      constexpr int chunk = TermChain<Terms...>::loads_many ? loaded_at_once<At, count> : count;
      terms.set_easy(easy);
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

  // Step 1, for a line.
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
  // Adds what `line` leaves out.
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

  // Runs before step 2, for a fragment that is cut.
  template <int count, RowsAre rows_are, typename Params, typename At>
  static __device__ __forceinline__ void look_ahead(Ahead<count, rows_are>& ahead,
                                                    const Params& params, const At& at) {
    (look_ahead_by<Terms>(ahead, params, at), ...);
  }

  // Step 2, after `hide`.
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
  template <typename Term, bool checks, int count, typename Params, typename At>
  static __device__ __forceinline__ void load_early_by(Early<count>& early, const Params& params,
                                                       const At& at) {
    if constexpr (HasEarly<Term>) {
      Term term(params, Unit{}, at);
      term.checks = checks;
      term.load_early(static_cast<typename EarlyOf<Term, count>::Type&>(early));
    }
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
  // Whether the terms that read tensors let a query see a key.
  template <typename Params>
  static __device__ __forceinline__ bool sees(const Params& params, int batch, int head, int query,
                                              int key) {
    bool seen = true;
    ((seen = seen && sees_by<Terms>(params, batch, head, query, key)), ...);
    return seen;
  }
  // The keys that terms which hide by spans leave visible to queries [begin, end) of a batch.
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_keys(const Params& params, int batch, int begin,
                                                        int end) {
    SeenSpans keys{{0, params.seq_k}, {0, params.seq_k}};
    (narrow_keys<Terms>(params, batch, begin, end, keys), ...);
    return keys;
  }
  // The queries that those terms leave visible to keys [begin, end).
  template <typename Params>
  static __device__ __forceinline__ SeenSpans seen_queries(const Params& params, int batch,
                                                           int begin, int end) {
    SeenSpans queries{{0, params.seq_q}, {0, params.seq_q}};
    (narrow_queries<Terms>(params, batch, begin, end, queries), ...);
    return queries;
  }

  // Step 4: draws the random words of a fragment, before or while its scores are computed.
  template <int blocks, typename Params, typename At>
  static __device__ __forceinline__ void draw(ptx::u32 (&drawn)[blocks][drawn_words],
                                              const Params& params, const At& at) {
    const TermChain<Terms...> terms(params, Unit{}, at);
#pragma unroll
    for (int block = 0; block < blocks; ++block) terms.draw(block, drawn[block]);
  }
  // Draws the words as they are needed, and returns which weights stay.
  struct Drawing {
    TermChain<Terms...> terms;
    ptx::u32 drawn[drawn_words];

    template <bool before_exchange = false>
    __device__ __forceinline__ ptx::u32 keeps(int i) {
      if (i % 8 == 0) terms.draw(i / 8, drawn);
      return terms.template keeps<before_exchange>(i, drawn);
    }
  };
  // Zeroes the dropped weights, in 16 bits, two per word, in the A layout of the next product. The
  // words of the first `before` blocks have already been drawn.
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
  // Where dropped weights are still needed, they are marked by the sign bit, which weights do not
  // use. find_dropped() makes one bit per weight: for elements i and i + 1, bit i / 2 % 16 in the
  // low and in the high half of a word.
  template <int words, typename Params, typename At>
  static __device__ __forceinline__ void find_dropped(ptx::u32 (&dropped)[words],
                                                      const Params& params, const At& at) {
    Drawing drawing{TermChain<Terms...>(params, Unit{}, at)};
#pragma unroll
    for (int i = 0; i < 32 * words; i += 2) {
      const ptx::u32 found = ~drawing.template keeps<true>(i) & 0x10001u << i / 2 % 16;
      dropped[i / 32] = i % 32 == 0 ? found : dropped[i / 32] | found;
    }
#pragma unroll
    for (int word = 0; word < words; ++word) dropped[word] = drawing.terms.exchange(dropped[word]);
  }
  // mark() turns these bits into signs. The second overload does both at once.
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
    ptx::u32 kept;  // for this element and its neighbour

    __device__ __forceinline__ float drop(float dp, int i) {
      if constexpr (!drops) return dp;
      if (i % 2 == 0) kept = this->keeps(i);
      return (i % 2 == 0 ? kept & 1u : kept >> 31) ? dp * terms.kept_weight() : 0.0f;
    }
    // Returns dS_0 from dS_n, both in `unit`, and P; value() returns v_n.
    template <typename Value>
    __device__ __forceinline__ float pull_back(float ds, float p, int i, Value value,
                                               float unit = 1.0f) {
      if constexpr (!has_slope && !has_gradient) return ds;
      float v = 0.0f;
      if constexpr (has_slope) v = value();
      Weighed weighed{ds * unit, p};
      return terms.pull_back(ds, v, i, unit, weighed);
    }
    __device__ __forceinline__ void end() { terms.end_gradient(); }
  };
  template <typename Params, typename At>
  static __device__ __forceinline__ Backward backward(const Params& params, const At& at) {
    return {{TermChain<Terms...>(params, Unit{}, at)}};
  }
};

// --- how terms that hide narrow the tiles of a plan ---

// From the KV tiles that queries [row_begin, row_end) of a batch touch, keeps those in which some
// key is visible, and finds those that need no hiding.
template <typename Policy, typename Params>
__device__ __forceinline__ void narrow_tiles(const Params& params, int batch, int row_begin,
                                             int row_end, int block_kv, TileRange& touched,
                                             TileRange& full) {
  if constexpr (Policy::hides_by_span) {
    if (touched.empty()) return;  // there may be no queries to check
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

// Among the query tiles that touch a KV tile, finds those that it visits, and those that need no
// hiding. With `leaves_out`, it visits those in which a query may see a key, according to the
// bounds of its first and its last key; otherwise it visits all that the band leaves, since other
// code counts on them. A query tile is visited by the KV tiles that touch the keys between the
// bounds of its first and its last row (`visiting_tiles`). Both rules give the same pairs of tiles,
// because no bound decreases.
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
    // Queries past the end have no weight: the last tile counts as full if only they are not seen.
    const int full_end =
        queries.all.end == params.seq_q ? tiles.full.end : max_int(0, queries.all.end) / block_q;
    tiles.full = {max_int(tiles.full.begin, ceil_div(queries.all.begin, block_q)),
                  min_int(tiles.full.end, full_end)};
    if (tiles.full.empty() || tiles.touched.empty()) tiles.full = {0, 0};
  }
  if constexpr (Policy::hides_by_data) tiles.full = {0, 0};
}

// Where tiles are left out: the KV tiles that visit queries [row_begin, row_end) of a batch, among
// those that the band leaves to them.
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
