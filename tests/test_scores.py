"""The score policy of the kernels (kernels/common/scores.cuh): terms of the test's own, composed with the softcap and
the band, in every kernel that the model runs, against autograd in float64; and that a policy costs what it should.

The terms use every hook. `Lean` is a linear bias whose matrix has a gradient, `Sieve` drops weights, `Sink` adds to the
sum of every row.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import emulation
from support import assert_close, budget, in_order, make_problem
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80, SM90
from tilewise.jit import Unit, build, sass
from tilewise.plan import plan
from tilewise.scores import Softcap, Term

emulated = emulation.emulated
H200 = Target.named("h200")
LEAN, DROPPED, SINK = 0.004, 5, 0.75  # per key, of the cap; one in so many; nats, per head
CAP = 8.0


@dataclass(frozen=True, slots=True)
class Toy(Term):
    """A term of this file: a struct in the namespace toy."""

    def cpp_type(self, *, precise: bool) -> str:
        return f"toy::{type(self).__name__}"

    @property
    def cpp_source(self) -> str:
        return f"namespace toy {{\n{self.struct}\n}}"


@dataclass(frozen=True, slots=True)
class Lean(Toy):
    """A linear bias; the gradient of its matrix is written to an address."""

    kind: ClassVar[str] = "lean"
    heads: int
    gradient: int

    @property
    def struct(self) -> str:
        facts = f"constexpr int HEADS = {self.heads};\nconstexpr float LEAN_F = {LEAN}f;\n"
        return (
            f"#define GRADIENT {self.gradient}ULL\n{facts}"
            + """
struct Lean {
  static constexpr bool uses_head = true;
  tilewise::Elements elements;
  int batch, head, heads, seq_q, seq_k;

  template <typename Params, typename At>
  __device__ __forceinline__ Lean(const Params& params, const tilewise::Unit&, const At& at)
      : elements(at), batch(at.batch()), head(at.head()), heads(HEADS), seq_q(params.seq_q), seq_k(params.seq_k) {}

  __device__ __forceinline__ float lean(int i) { return LEAN_F * (elements.key(i) - elements.query(i)); }
  __device__ __forceinline__ float apply(float v, int i) { return v + lean(i); }
  __device__ __forceinline__ float before(float v, int i) { return v - lean(i); }
#ifdef GRADIENT
  __device__ __forceinline__ void gradient(float ds, int i) {
    const int query = elements.query(i), key = elements.key(i);
    if (query < seq_q && key < seq_k)
      reinterpret_cast<float*>(GRADIENT)[((batch * heads + head) * seq_q + query) * seq_k + key] += ds;
  }
#endif
};
"""
        )


@dataclass(frozen=True, slots=True)
class Sieve(Toy):
    """Drops one weight in so many."""

    kind: ClassVar[str] = "sieve"
    transforms: ClassVar[bool] = False
    kept_weight: ClassVar[float] = 1.0 / (1.0 - 1.0 / DROPPED)

    @property
    def struct(self) -> str:
        return (
            f"constexpr int DROPPED = {DROPPED};"
            + """
struct Sieve {
  static constexpr bool uses_head = true;
  tilewise::Elements elements;
  int head;
  float kept_weight = 1.0f / (1.0f - 1.0f / DROPPED);

  template <typename Params, typename At>
  __device__ __forceinline__ Sieve(const Params&, const tilewise::Unit&, const At& at)
      : elements(at), head(at.head()) {}
  __device__ __forceinline__ bool stays(int i) const {
    return (7 * elements.query(i) + 3 * elements.key(i) + head) % DROPPED != 0;
  }
  __device__ __forceinline__ void draw(int, tilewise::ptx::u32 (&)[tilewise::drawn_words]) const {}
  __device__ __forceinline__ tilewise::ptx::u32 keeps(int i, const tilewise::ptx::u32 (&)[tilewise::drawn_words]) {
    return (stays(i) ? 0xffffu : 0u) | (stays(i + 1) ? 0xffff0000u : 0u);
  }
};
"""
        )


@dataclass(frozen=True, slots=True)
class Sink(Toy):
    """Adds to the sum of every row, by its head."""

    kind: ClassVar[str] = "toy_sink"
    transforms: ClassVar[bool] = False

    @property
    def struct(self) -> str:
        return (
            f"constexpr float SINK_F = {SINK}f;"
            + """
struct Sink {
  static constexpr bool uses_head = true;
  float sink;  // log2

  template <typename Params, typename At>
  __device__ __forceinline__ Sink(const Params&, const tilewise::Unit&, const At& at)
      : sink(SINK_F * (at.head() + 1) * 1.44269504f) {}
  __device__ __forceinline__ float finish_row(float& m, float& l, float log2_unit, int) {
    const float before = m * log2_unit, now = fmaxf(before, sink);
    const float factor = tilewise::ptx::ex2(before - now);
    l = fmaf(l, factor, tilewise::ptx::ex2(sink - now));
    m = now / log2_unit;
    return factor;
  }
};
"""
        )


def truth(q: Any, k: Any, v: Any, problem: Any, dout: Any = None, *, every_term: bool = True) -> tuple[Any, ...]:
    """(out, lse) in float64, and with dout the gradients of q, k, v and of what is added to the scores."""
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wide_k, wide_v = (t.repeat_interleave(problem.group, 1) for t in inputs[1:])
    rows, keys = torch.arange(problem.seq_q)[:, None], torch.arange(problem.seq_kv)
    heads = torch.arange(problem.heads_q)[:, None, None]
    scores = inputs[0] @ wide_k.mT * problem.scale
    added = torch.zeros_like(scores)
    if every_term:
        scores = CAP * torch.tanh(scores / CAP)
        added = added + CAP * LEAN * (keys - rows)
    added = added.detach().requires_grad_()
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    scores = (scores + added).masked_fill(~visible, -math.inf)
    sinks = (SINK * (heads + 1.0)).double().expand(problem.batch, -1, problem.seq_q, 1)
    lse = torch.logsumexp(torch.cat([scores, sinks], -1) if every_term else scores, -1)
    kept = (7 * rows + 3 * keys + heads) % DROPPED != 0
    weights = torch.exp(scores - lse[..., None]) * kept / (1 - 1 / DROPPED)
    out = weights @ wide_v
    if dout is None:
        return out.detach(), lse.detach()
    return out.detach(), lse.detach(), torch.autograd.grad(out, [*inputs, added], dout.double())


def inputs_of(problem: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [
        (problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim_v),
        (problem.heads_q, problem.seq_q, problem.head_dim_v),
    ]
    return [torch.randn(problem.batch, *shape, generator=generator).to(problem.dtype) for shape in shapes]


def problem_of(dtype: torch.dtype, dim: int, mask: Any, **fields: Any) -> Any:
    wanted = {"heads_kv": 1, "seq_kv": 150, "mask": mask, "needs_lse": True} | fields
    return make_problem((1, 2, 100, dim), dtype, **wanted)


def every_term(problem: Any) -> tuple[Any, torch.Tensor]:
    """The problem with all terms, and what the gradient of the bias is written to."""
    gradient = torch.zeros(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    return problem.with_(scores=(Softcap(CAP), Lean(problem.heads_q, gradient.data_ptr()), Sieve(), Sink())), gradient


FORWARDS = [
    (SM80, torch.bfloat16, 64, Causal()),
    (SM80, torch.float16, 128, Window(60, 10)),
    (SM80, torch.float32, 64, Causal("bottom-right")),
    (SM90, torch.float32, 64, Causal()),
]


@emulated
@pytest.mark.parametrize(("backend", "dtype", "dim", "mask"), FORWARDS, ids=str)
def test_a_forward_with_terms_of_its_own(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any) -> None:
    problem, _gradient = every_term(problem_of(dtype, dim, mask))
    emulation.install(monkeypatch)
    q, k, v, _ = inputs_of(problem)
    got_out, got_lse = backend.bind(q, k, v, problem, None, H200)(q, k, v, None)
    out, lse = truth(q, k, v, problem)
    assert_close(got_out, out, budget(dtype, problem.seq_kv))
    assert_close(got_lse, lse, budget(dtype, problem.seq_kv), "lse")


BACKWARDS = [
    (SM80, torch.bfloat16, 64, Causal()),
    (SM80, torch.float32, 64, Causal("bottom-right")),
    (SM90, torch.bfloat16, 64, Causal()),
    (SM90, torch.float16, 192, Window(60, 10)),
]


@emulated
@pytest.mark.parametrize(("backend", "dtype", "dim", "mask"), BACKWARDS, ids=str)
def test_a_backward_with_terms_of_its_own(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any) -> None:
    problem, gradient = every_term(problem_of(dtype, dim, mask, needs_grad=True))
    emulation.install(monkeypatch)
    q, k, v, dout = inputs_of(problem)
    out, lse, wanted = truth(q, k, v, problem, dout)
    got = in_order(backend.bind_backward(problem, None, H200)(dout, None, q, k, v, out.to(dtype), lse.float()))
    for name, grad, want in zip(("dq", "dk", "dv", "scores"), (*got, gradient), wanted, strict=True):
        assert_close(grad, want, budget(dtype, problem.seq_kv), name)


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_dropped_weights_in_the_float32_backward_of_sm90(monkeypatch: Any, mask: Any) -> None:
    problem = problem_of(torch.float32, 64, mask, needs_grad=True, scores=(Sieve(),))
    emulation.install(monkeypatch)
    q, k, v, dout = inputs_of(problem)
    out, lse, (dq, dk, dv, _) = truth(q, k, v, problem, dout, every_term=False)
    got = in_order(SM90.bind_backward(problem, None, H200)(dout, None, q, k, v, out.float(), lse.float()))
    for name, grad, want in zip(("dq", "dk", "dv"), got, (dq, dk, dv), strict=True):
        assert_close(grad, want, budget(torch.float32, problem.seq_kv), name)


@dataclass(frozen=True, slots=True)
class Offset(Toy):
    """Adds what a tensor has for the head."""

    kind: ClassVar[str] = "offset"

    @property
    def operands(self) -> dict[str, type[Any]]:
        return {"offsets": ctypes.c_void_p, "offset_unit": ctypes.c_float}

    @property
    def struct(self) -> str:
        return """
struct Offset {
  struct Operands {
    const float* offsets;
    float offset_unit;
  };
  static constexpr bool uses_head = true;
  float offset;

  template <typename Params, typename At>
  __device__ __forceinline__ Offset(const Params& params, const tilewise::Unit& unit, const At& at)
      : offset(params.offsets[at.head()] * params.offset_unit) {}
  __device__ __forceinline__ float apply(float v, int) { return v + offset; }
  __device__ __forceinline__ float before(float v, int) { return v - offset; }
};
"""


def units_with_operands() -> list[Unit]:
    problem = make_problem((1, 8, 4096, 64), torch.bfloat16, mask=Causal(), needs_grad=True)
    problem = problem.with_(scores=(Softcap(CAP), Offset()))
    chosen = [plan(problem, H200, "sm90"), plan(problem, Target.named("a100"), "sm80")]
    return [unit for one in chosen for unit in one.units if unit.name.endswith("_offset")]


@pytest.mark.parametrize("unit", units_with_operands(), ids=lambda unit: unit.label)
def test_a_term_with_operands_builds_without_spills(unit: Unit) -> None:
    kernel = build(unit, announce=False)
    assert kernel.resources.spill_store_bytes == 0


def test_a_policy_without_terms_is_the_kernel_without_a_policy() -> None:
    """Its hooks leave nothing: a term that does nothing gives the same code as no term."""
    source = """#include "common/scores.cuh"
namespace toy {{
struct Nothing {{
  template <typename Params, typename At>
  __device__ __forceinline__ Nothing(const Params&, const tilewise::Unit&, const At&) {{}}
}};
}}
using Policy = tilewise::Scores<{terms}>;
struct Params {{ float* x; }};
struct Place {{
  static constexpr auto rows_are = tilewise::RowsAre::queries;
  __device__ int row() const {{ return threadIdx.x; }}
  __device__ int column() const {{ return blockIdx.x; }}
}};
extern "C" __global__ void nothing(const __grid_constant__ Params params) {{
  float v[4], m = 0.0f, l = 1.0f;
  for (int i = 0; i < 4; ++i) v[i] = params.x[4 * threadIdx.x + i];
  {hooks}
  for (int i = 0; i < 4; ++i) params.x[4 * threadIdx.x + i] = v[i];
}}
"""
    hooks = """
  Policy::apply(v, params, tilewise::Unit{}, Place{});
  Policy::hide(v, params, Place{});
  Policy::drop(v, params, Place{});
  const float factor = Policy::finish_row(params, Place{}, 0, m, l, 1.0f) * Policy::kept_weight(params, Place{});
  auto terms = Policy::backward(params, Place{});
  for (int i = 0; i < 4; ++i) v[i] = terms.pull_back(terms.drop(v[i], i), 0.0f, i, [] { return 0.0f; }) * factor;
  terms.end();
"""
    codes = [
        sass.opcodes(sass.disassemble(build(Unit("nothing", source.format(terms=terms, hooks=calls), "sm_90a"))))
        for terms, calls in (("", ""), ("", hooks), ("toy::Nothing", hooks))
    ]
    assert codes[0] == codes[1] == codes[2]
