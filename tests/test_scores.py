"""The score policy of the kernels (kernels/common/scores.cuh): terms of the test's own, composed with the softcap and
the band, in every kernel that the model runs, against autograd in float64; and that a policy costs what it should.

The terms use every hook. `Lean` is a linear bias whose matrix has a gradient, `Sieve` drops weights, `Sink` adds to the
sum of every row.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import emulation
from support import assert_close, budget, make_problem
from tilewise import Causal, Full, Target, Window
from tilewise.backends import (
    score_policy,
    sm80,
    sm80_backward,
    sm80_float32,
    sm80_float32_backward,
    sm90,
    sm90_backward,
    sm90_float32,
    sm90_float32_backward,
)
from tilewise.jit import Unit, build

emulated = emulation.emulated
H200 = Target.named("h200")
LEAN, DROPPED, SINK = 0.004, 5, 0.75  # per key, of the cap; one in so many; nats, per head
CAP = 8.0

TERMS = """
namespace toy {
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

struct Sieve {
  static constexpr bool uses_head = true;
  tilewise::Elements elements;
  int head;
  float kept_weight = 1.0f / (1.0f - 1.0f / DROPPED);

  template <typename Params, typename At>
  __device__ __forceinline__ Sieve(const Params&, const tilewise::Unit&, const At& at)
      : elements(at), head(at.head()) {}
  __device__ __forceinline__ bool keeps(int i) {
    return (7 * elements.query(i) + 3 * elements.key(i) + head) % DROPPED != 0;
  }
};

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
}  // namespace toy
"""


def with_terms(source: str, heads: int, gradient: int = 0) -> str:
    """The source of a unit with the terms above after its include."""
    facts = (
        f"constexpr int HEADS = {heads}, DROPPED = {DROPPED};\nconstexpr float LEAN_F = {LEAN}f, SINK_F = {SINK}f;\n"
    )
    if gradient:
        facts = f"#define GRADIENT {gradient}ULL\n" + facts
    include, rest = source.split("\n", 1)
    return f"{include}\n{facts}{TERMS}\n{rest}"


def toy_policy(**fields: Any) -> str:
    return score_policy.scores_type(**fields, terms=["toy::Lean", "toy::Sieve", "toy::Sink"])


def dropping_policy(**fields: Any) -> str:
    return score_policy.scores_type(**fields, terms=["toy::Sieve"])


MODULES = (sm80, sm80_backward, sm80_float32, sm80_float32_backward, sm90_backward, sm90_float32, sm90_float32_backward)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every kernel is one with the terms above; `toy(problem)` returns what their gradients are written to."""

    def forget() -> None:
        for module in MODULES:
            for cached in vars(module).values():
                if hasattr(cached, "cache_clear"):
                    cached.cache_clear()

    def install(problem: Any, policy: Any = toy_policy) -> torch.Tensor:
        gradient = torch.zeros(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
        for module in MODULES:
            forget()
            emulation.install(monkeypatch, module, 0)
            monkeypatch.setattr(module, "scores_type", policy)
            monkeypatch.setattr(module, "Target", SimpleNamespace(of=lambda device: H200))
            monkeypatch.setattr(
                module,
                "Unit",
                lambda name, source, *rest, **fields: (
                    Unit(name, with_terms(source, problem.heads_q, gradient.data_ptr()), *rest, **fields)
                    if "Scores<" in source
                    else Unit(name, source, *rest, **fields)
                ),
            )
        return gradient

    yield install
    monkeypatch.undo()
    forget()


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
    wanted = {"heads_kv": 1, "seq_kv": 150, "mask": mask, "softcap": CAP, "needs_lse": True} | fields
    return make_problem((1, 2, 100, dim), dtype, **wanted)


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value)).rsplit(".", 1)[-1]


FORWARDS = [
    (sm80, torch.bfloat16, 64, Causal()),
    (sm80, torch.float16, 128, Window(60, 10)),
    (sm80_float32, torch.float32, 64, Causal("bottom-right")),
    (sm90_float32, torch.float32, 64, Causal()),
]


@emulated
@pytest.mark.parametrize(("module", "dtype", "dim", "mask"), FORWARDS, ids=name_of)
def test_a_forward_with_terms_of_its_own(toy: Any, module: Any, dtype: Any, dim: int, mask: Any) -> None:
    problem = problem_of(dtype, dim, mask)
    toy(problem)
    q, k, v, _ = inputs_of(problem)
    got_out, got_lse = module.bind(q, k, v, problem, None)(q, k, v, None)
    out, lse = truth(q, k, v, problem)
    assert_close(got_out, out, budget(dtype, problem.seq_kv))
    assert_close(got_lse, lse, budget(dtype, problem.seq_kv), "lse")


BACKWARDS = [
    (sm80_backward, torch.bfloat16, 64, Causal()),
    (sm80_float32_backward, torch.float32, 64, Causal("bottom-right")),
    (sm90_backward, torch.bfloat16, 64, Causal()),
    (sm90_backward, torch.float16, 192, Window(60, 10)),
]


@emulated
@pytest.mark.parametrize(("module", "dtype", "dim", "mask"), BACKWARDS, ids=name_of)
def test_a_backward_with_terms_of_its_own(toy: Any, module: Any, dtype: Any, dim: int, mask: Any) -> None:
    problem = problem_of(dtype, dim, mask, needs_grad=True)
    gradient = toy(problem)
    q, k, v, dout = inputs_of(problem)
    out, lse, wanted = truth(q, k, v, problem, dout)
    got = module.bind(problem)(dout, None, q, k, v, out.to(dtype), lse.float(), (True, True, True))
    for name, grad, want in zip(("dq", "dk", "dv", "scores"), (*got, gradient), wanted, strict=True):
        assert_close(grad, want, budget(dtype, problem.seq_kv), name)


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_dropped_weights_in_the_float32_backward_of_sm90(toy: Any, mask: Any) -> None:
    problem = problem_of(torch.float32, 64, mask, needs_grad=True, softcap=0.0)
    toy(problem, dropping_policy)
    q, k, v, dout = inputs_of(problem)
    out, lse, (dq, dk, dv, _) = truth(q, k, v, problem, dout, every_term=False)
    got = sm90_float32_backward.bind(problem)(dout, None, q, k, v, out.float(), lse.float(), (True, True, True))
    for name, grad, want in zip(("dq", "dk", "dv"), got, (dq, dk, dv), strict=True):
        assert_close(grad, want, budget(torch.float32, problem.seq_kv), name)


OPERANDS = """
namespace toy {
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
}  // namespace toy
"""


def units_with_operands() -> list[Unit]:
    sources = [
        next(
            unit
            for unit in sm90.all_units()
            if unit.name.startswith("forward_bf16_d64x64_causal") and "cap" in unit.name
        ),
        next(unit for unit in sm90.all_units() if unit.name.startswith("backward_bf16_d64x64") and "cap" in unit.name),
        next(
            unit for unit in sm80.all_units() if unit.name.startswith("fa2_forward_bf16_d64x64") and "cap" in unit.name
        ),
    ]
    units = []
    for unit in sources:
        include, rest = unit.source.split("\n", 1)
        policy = rest[rest.index("tilewise::Scores<") : rest.index(">(params);")]
        named = policy.replace("tilewise::BandMask", "toy::Offset, tilewise::BandMask")
        params = rest[rest.index("__grid_constant__ ") + len("__grid_constant__ ") : rest.index(" params) {")]
        rest = rest.replace(policy, "Policy").replace(f"__grid_constant__ {params}", "__grid_constant__ KernelParams")
        head = f"using Policy = {named};\nusing KernelParams = tilewise::ParamsOf<{params}, Policy>;\n"
        head += f"static_assert(sizeof(KernelParams) >= sizeof({params}) + 16);\n"
        units.append(Unit(unit.name, f"{include}\n{OPERANDS}{head}{rest}", unit.arch, smem_bytes=unit.smem_bytes))
    return units


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
  for (int i = 0; i < 4; ++i) v[i] = terms.pull_back(terms.drop(v[i], i), i, [] { return 0.0f; }) * factor;
  terms.end();
"""
    from tilewise.jit import sass

    codes = [
        sass.opcodes(sass.disassemble(build(Unit("nothing", source.format(terms=terms, hooks=calls), "sm_90a"))))
        for terms, calls in (("", ""), ("", hooks), ("toy::Nothing", hooks))
    ]
    assert codes[0] == codes[1] == codes[2]
