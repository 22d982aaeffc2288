// clang-format off
// What is done to the scores between the two products: one policy, composed at compile time, for every kernel of
// the engine: both generations, both directions, 16-bit and float32.
//
// Symbols. x[i, j]: what the product of q_i and k_j left in an accumulator; x times `unit` is q_i . k_j. T_1 ... T_n: the
// terms of Scores<T_1, ..., T_n>, in the order in which they are applied. v_t: a score after T_t; the score in nats is
// c v_n, where c is a factor that the kernel gives to the softmax: the scale of the problem, or with a softcap the cap.
// D[i]: rowsum(dO * O) - dlse.
//
//   Forward, for every fragment of S                                                   hook of a term
//   1. v_0 = x, v_t = T_t(v_{t-1})                                                     apply
//   2. tiles that the band cuts: v_n = -inf where a term hides the key from the query  hide
//   3. P = e^(c v_n - m), added to the row sum l
//   Backward
//   4. v_n as in 1 and 2, P = e^(c v_n - lse)
//   5. dS_n = P (dP - D)
//   6. for t = n ... 1: dS_{t-1} = dS_t T_t'(v_{t-1})                                  slope, before
//      dQ and dK come from dS_0
//
// A term is a struct. It has a constructor and those of the hooks that it needs; a kernel has no code for a hook that no
// term of its policy has, so Scores<> compiles to nothing.
//
//   Term(params, unit, at)          State of one fragment. `params` are the parameters of the kernel, of whatever family: a
//                                   term reads its operands from them by name. `unit` is 1 for all terms but the first that
//                                   has `apply`. at() says where the fragment lies (Place); call it only where it is
//                                   needed, since it may cost registers.
//   float apply(float v, int i)     v_t of element i from v_{t-1}. Asked once for every i, in ascending order.
//   float slope(float v, int i)     T_t' of element i from v = v_t: the kernels keep the result of `apply`, or find it again
//                                   from P, never its argument. Must be finite where P is 0. A term without it has slope 1.
//   float before(float v, int i)    v_{t-1} from v_t. Needed where a term before it has a slope.
//   void hide(float (&v)[], place)  -inf for hidden elements. Which tiles are cut is decided by the plan of the kernel.
//
// How to add a term: a struct here, with its operands among the parameters of the kernels that read them, and its name in
// backends/score_policy.py, which tells a kernel its policy.
// clang-format on
#pragma once

#include "fragment.cuh"
#include "pieces.cuh"
#include "ptx.cuh"

namespace tilewise {

enum class RowsAre { queries, keys };

// Where a thread's fragment lies. A kernel has a struct of its own with these members, which are
// functions: a term calls what it needs. Why: what they are computed from is read again each time
// where registers are few.
struct NoPlace {
  static constexpr RowsAre rows_are = RowsAre::queries;
  __device__ int row() const;     // of element 0: a query, or a key where rows are keys
  __device__ int column() const;  // likewise: a key, or a query
};

// --- terms ---

// tanh(x in), where `in` is scale / cap: the score in units of the cap.
//   fast     `in` is 2 log2(e) scale / cap, and tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)): two
//            approximate instructions, for kernels whose weights are rounded to 16 bits
//   precise  right to a unit in the last place
enum class Precision { fast, precise };

template <Precision precision>
struct Softcap {
  float in;

  template <typename Params, typename At>
  __device__ __forceinline__ Softcap(const Params& params, const Unit& unit, const At&)
      : in(params.softcap_in * unit.first * unit.second) {}

  __device__ __forceinline__ float apply(float x, int) const {
    if constexpr (precision == Precision::precise) return tanhf(x * in);
    return fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x * in)), 1.0f);
  }
  // 1 - tanh^2. A value that was found again from a weight may be -inf, where the weight is 0.
  __device__ __forceinline__ float slope(float v, int) const {
    if constexpr (precision == Precision::fast) v = fmaxf(v, -1.0f);
    return fmaf(-v, v, 1.0f);
  }
};

// Keys outside the band of a query, and keys that do not exist (mask.cuh). Kernels for some masks
// need not look at all bounds.
enum class Bounds { end_of_keys, end, both };

template <Bounds bounds>
struct BandMask {
  const int &first_shift, &end_shift, &seq_q, &seq_k;

  template <typename Params, typename At>
  __device__ __forceinline__ BandMask(const Params& params, const Unit&, const At&)
      : first_shift(params.band_first_shift),
        end_shift(params.band_end_shift),
        seq_q(params.seq_q),
        seq_k(params.seq_k) {}

  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) const {
    if constexpr (At::rows_are == RowsAre::queries)
      hide_keys(v, at);
    else
      hide_queries(v, at);
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide_keys(float (&v)[count], const At& at) const {
    const Band band{first_shift, end_shift, seq_k};
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row() + 8 * r;
      const int first = bounds == Bounds::both ? band.first_key(row) - column : 0;
      const int end = (bounds == Bounds::end_of_keys ? seq_k : band.end_key(row)) - column;
      hide_outside(v, r, first, end);
    }
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide_queries(float (&v)[count], const At& at) const {
    static_assert(bounds == Bounds::both);
    const int first_key = at.row();
    const RowBand band{first_shift, end_shift, seq_q};
    const int column = at.column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + 8 * r;
      const int first = band.first_row(key) - column;
      hide_outside(v, r, first, key < seq_k ? band.end_row(key) - column : -1);
    }
  }
  // Columns of row r outside [first, end), counted from the fragment's.
  template <int count>
  static __device__ __forceinline__ void hide_outside(float (&v)[count], int r, int first,
                                                      int end) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (row_of(i) != r) continue;
      const int column = column_of(i);
      v[i] = column >= first && column < end ? v[i] : -infinity;
    }
  }
};

// --- the policy ---

template <typename Term>
concept HasApply = requires(Term term) { term.apply(0.0f, 0); };
template <typename Term>
concept HasSlope = requires(Term term) { term.slope(0.0f, 0); };
template <typename Term>
concept HasHide = requires(Term term, float (&v)[4]) { term.hide(v, NoPlace{}); };

// v_n of a weight P = 2^(c v_n - lse), c and lse in log2 units.
__device__ __forceinline__ float value_of_weight(float p, float lse_log2,
                                                 float inverse_scale_log2) {
  return (ptx::lg2(p) + lse_log2) * inverse_scale_log2;
}

// The terms of one fragment.
template <typename... Terms>
struct TermChain {
  template <typename Params, typename At>
  __device__ __forceinline__ TermChain(const Params&, const Unit&, const At&) {}

  __device__ __forceinline__ float apply(float v, int) { return v; }
  __device__ __forceinline__ float pull_back(float ds, float&, int) { return ds; }
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&)[count], const At&) {}
};

template <typename First, typename... Rest>
struct TermChain<First, Rest...> {
  First first;
  TermChain<Rest...> rest;

  template <typename Params, typename At>
  __device__ __forceinline__ TermChain(const Params& params, const Unit& unit, const At& at)
      : first(params, unit, at), rest(params, HasApply<First> ? Unit{} : unit, at) {}

  __device__ __forceinline__ float apply(float v, int i) {
    if constexpr (HasApply<First>) v = first.apply(v, i);
    return rest.apply(v, i);
  }
  // Step 6: v becomes the value before the first term.
  __device__ __forceinline__ float pull_back(float ds, float& v, int i) {
    ds = rest.pull_back(ds, v, i);
    if constexpr (HasSlope<First>) ds *= first.slope(v, i);
    if constexpr (requires { first.before(v, i); }) v = first.before(v, i);
    return ds;
  }
  template <int count, typename At>
  __device__ __forceinline__ void hide(float (&v)[count], const At& at) {
    if constexpr (HasHide<First>) first.hide(v, at);
    rest.hide(v, at);
  }
};

template <typename... Terms>
struct Scores {
  // Whether the values that the softmax gets are others than the products, and so have no unit.
  static constexpr bool transforms = (HasApply<Terms> || ...);
  static constexpr bool has_slope = (HasSlope<Terms> || ...);

  // Step 1.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void apply(float (&v)[count], const Params& params,
                                               const Unit& unit, const At& at) {
    if constexpr (transforms) {
      TermChain<Terms...> terms(params, unit, at);
#pragma unroll
      for (int i = 0; i < count; ++i) v[i] = terms.apply(v[i], i);
    }
  }

  // Step 2.
  template <int count, typename Params, typename At>
  static __device__ __forceinline__ void hide(float (&v)[count], const Params& params,
                                              const At& at) {
    TermChain<Terms...>(params, Unit{}, at).hide(v, at);
  }

  // Step 6 for the elements of one fragment, in ascending order: dS_0 from dS_n; value() gives v_n.
  struct PullBack {
    TermChain<Terms...> terms;

    template <typename Value>
    __device__ __forceinline__ float operator()(float ds, int i, Value value) {
      if constexpr (!has_slope) return ds;
      float v = value();
      return terms.pull_back(ds, v, i);
    }
  };
  template <typename Params, typename At>
  static __device__ __forceinline__ PullBack pull_back(const Params& params, const At& at) {
    return {TermChain<Terms...>(params, Unit{}, at)};
  }
};

}  // namespace tilewise
