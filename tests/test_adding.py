"""CONTRIBUTING's "how to add" is true: a mask and a score term, each one class, added by this file alone.

The mask is prefix-LM: the first keys are visible to all, the rest is causal. Its spans are monotone, and it is no band.
The term leans scores towards the recent: s - rate * |row - key|, as ALiBi does with one slope for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import emulation
import tilewise
from support import assert_close, budget, check_against_the_reference, exact, in_order, make_inputs, make_problem
from tilewise import Target, masks, scores
from tilewise.masks import Mask
from tilewise.plan import BACKENDS, plan
from tilewise.scores import Softcap, Term, Where


@dataclass(frozen=True, slots=True)
class PrefixLM(Mask):
    """Every query sees the first `prefix` keys, its own position and everything before it."""

    kind: ClassVar[str] = "prefix"

    prefix: int

    @classmethod
    def from_text(cls, text: str) -> PrefixLM:
        return cls(int(text))

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        return 0, min(seq_kv, max(self.prefix, row + 1))

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(rows), (rows + 1).clamp(min=self.prefix).clamp(max=seq_kv)

    def __str__(self) -> str:
        return f"prefix:{self.prefix}"


@dataclass(frozen=True, slots=True)
class Recency(Term):
    """s -> s - rate * |row - key|."""

    kind: ClassVar[str] = "recency"

    rate: float

    def apply(self, scores: torch.Tensor, where: Where) -> tuple[torch.Tensor, torch.Tensor | None]:
        distance = (where.row_numbers(scores.device) - where.key_numbers(scores.device)).abs()
        return scores - self.rate * distance, None

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::Recency"

    @property
    def cpp_source(self) -> str:
        return CPP

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"recency_rate": self.rate / unit}


@dataclass(frozen=True, slots=True)
class Compress(Term):
    """s -> width * asinh(s / width), whose slope is said in terms of s. Its number is a parameter of its kernels."""

    kind: ClassVar[str] = "compress"
    elementwise: ClassVar[bool] = True

    width: float

    def apply(self, scores: torch.Tensor, where: Where) -> tuple[torch.Tensor, torch.Tensor | None]:
        share = scores / self.width
        return self.width * torch.asinh(share), torch.rsqrt(1 + share * share)

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::Compress"

    @property
    def cpp_source(self) -> str:
        return COMPRESS

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"compress_width": self.width / unit}


COMPRESS = """namespace tilewise {
struct Compress {
  struct Operands {
    float compress_width;
  };
  float width, factor;

  template <typename Params, typename At>
  __device__ Compress(const Params& params, const Unit& unit, const At&)
      : width(params.compress_width), factor(unit.first * unit.second) {}
  __device__ float apply(float v, int) const { return width * asinhf(v * factor / width); }
  __device__ float before(float v, int) const { return width * sinhf(v / width); }
  // A value that is recovered from a weight of 0 is -inf or NaN.
  __device__ float slope(float argument, float v, int) const {
    const float share = argument / width;
    return v > -infinity ? 1.0f / sqrtf(fmaf(share, share, 1.0f)) : 0.0f;
  }
};
}  // namespace tilewise
"""

CPP = """namespace tilewise {
struct Recency {
  struct Operands {
    float recency_rate;
  };
  Elements elements;
  float rate, factor;

  template <typename Params, typename At>
  __device__ Recency(const Params& params, const Unit& unit, const At& at)
      : elements(at), rate(params.recency_rate), factor(unit.first * unit.second) {}
  __device__ float lag(int i) const { return rate * abs(elements.query(i) - elements.key(i)); }
  __device__ float apply(float v, int i) const { return v * factor - lag(i); }
  __device__ float before(float v, int i) const { return v + lag(i); }
};
}  // namespace tilewise
"""


CPU, H200, A100 = (Target.named(name) for name in ("cpu", "h200", "a100"))


@pytest.mark.parametrize("lengths", [(1, 1), (7, 5), (40, 70), (70, 40)], ids=str)
def test_of_a_mask_everything_follows_from_its_spans(lengths):
    seq_q, seq_kv = lengths
    for prefix in (0, 3, 50):
        mask = PrefixLM(prefix)
        assert masks.parse(str(mask)) == mask
        shown = torch.tensor([[mask.visible(i, j, seq_q, seq_kv) for j in range(seq_kv)] for i in range(seq_q)])
        assert torch.equal(mask.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv), shown)
        assert mask.pairs(seq_q, seq_kv) == shown.sum()
        assert mask.rows_that_see(seq_q, seq_kv) == shown.any(-1).sum()


@pytest.mark.parametrize("backend", ["reference", "tiled", "torch-math", "auto"])
def test_a_mask_runs_on_a_cpu(backend):
    problem = make_problem((2, 4, 50, 16), heads_kv=2, seq_kv=60, mask=PrefixLM(9), needs_grad=True)
    q, k, v = (tensor.requires_grad_() for tensor in make_inputs(problem))
    out = tilewise.attention(q, k, v, mask=PrefixLM(9), backend=backend)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    truth, _, *true_grads = exact(q.detach(), k.detach(), v.detach(), problem, None, dout)
    for got, want in zip((out, *grads), (truth, *true_grads), strict=True):
        assert_close(got, want, budget(torch.float32, 60))


@pytest.mark.parametrize("target", [CPU, H200, A100], ids=lambda target: target.name)
def test_a_mask_is_planned_and_explained(target):
    problem = make_problem((1, 8, 2048, 64), torch.bfloat16, mask=PrefixLM(100), needs_grad=True)
    chosen = plan(problem, target)
    assert "prefix:100" in str(chosen)
    assert chosen.backend == {"h200": "sm90", "a100": "sm80"}.get(target.name, chosen.backend)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@emulation.emulated
def test_a_mask_runs_in_the_kernels_both_ways(monkeypatch, family):
    """They read its spans from memory: no C++ of its own."""
    backend, target = BACKENDS[family], H200 if family == "sm90" else A100
    problem = make_problem((1, 2, 70, 64), torch.float16, heads_kv=1, seq_kv=90, mask=PrefixLM(40), needs_grad=True)
    emulation.install(monkeypatch)
    allowed = 2 * budget(torch.float16, 90)
    lse = check_against_the_reference(backend, target, problem, {}, make_inputs(problem), allowed=(allowed, allowed))
    assert_close(*lse, budget(torch.float32, 90), "lse")


def test_a_term_has_a_text_and_a_place_among_others():
    problem = make_problem((1, 2, 8, 8), scores=(Softcap(3.0), Recency(0.25)))
    assert "softcap=3 recency=0.25" in str(problem)
    assert type(problem).from_dict(problem.to_dict()) == problem
    assert scores.parse("recency:0.25") == Recency(0.25)
    assert problem.with_(softcap=0.0).scores == (Recency(0.25),)


ORDERS = [(Recency(0.1),), (Softcap(2.0), Recency(0.1)), (Recency(0.1), Softcap(2.0))]
COMPRESSED = [(Compress(0.7),), (Softcap(2.0), Compress(0.7)), (Compress(0.7), Recency(0.1))]


def applied(term: Term, logits: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """What the terms of this file mean, for autograd."""
    if isinstance(term, Recency):
        return logits - term.rate * distance
    if isinstance(term, Compress):
        return term.width * torch.asinh(logits / term.width)
    assert isinstance(term, Softcap)
    return term.cap * torch.tanh(logits / term.cap)


@pytest.mark.parametrize("terms", [*ORDERS, *COMPRESSED], ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_term_runs_on_a_cpu(backend, terms):
    """In any order: each is given what the one before it left."""
    problem = make_problem(
        (2, 4, 50, 16), torch.float64, heads_kv=2, seq_kv=60, mask=masks.Causal(), scores=terms, needs_grad=True
    )
    q, k, v = make_inputs(problem)
    wide = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    distance = (torch.arange(50)[:, None] - torch.arange(60)).abs()
    logits = wide[0] @ wide[1].repeat_interleave(2, 1).mT * problem.scale
    for term in terms:
        logits = applied(term, logits, distance)
    logits = logits.masked_fill(torch.ones(50, 60).triu(1).bool(), -torch.inf)
    truth = torch.softmax(logits, -1) @ wide[2].repeat_interleave(2, 1)
    dout = torch.randn_like(truth)
    true_grads = torch.autograd.grad(truth, wide, dout)
    out, lse = BACKENDS[backend].forward(q, k, v, problem)
    grads = in_order(BACKENDS[backend].backward(dout, None, q, k, v, out, lse, problem))
    for got, want in zip((out, *grads), (truth.detach(), *true_grads), strict=True):
        assert_close(got, want, budget(torch.float64, 60))


@pytest.mark.parametrize("target", [H200, A100], ids=lambda target: target.name)
def test_a_term_is_planned_and_explained_and_backends_without_it_refuse_it_by_name(target):
    problem = make_problem((1, 8, 2048, 64), torch.bfloat16, scores=(Recency(0.1),), needs_grad=True)
    chosen = plan(problem, target)
    assert chosen.backend == ("sm90" if target is H200 else "sm80")
    assert "recency=0.1" in str(chosen)
    assert chosen.forward.launches[0].unit.name.endswith("_recency")
    for verdict in chosen.verdicts:
        if not verdict.willing and verdict.backend != "sm90":
            assert any("recency" in why.what for why in verdict.reasons), verdict.backend


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("terms", [*ORDERS, *COMPRESSED], ids=str)
@emulation.emulated
def test_a_term_runs_in_the_kernels_both_ways(monkeypatch, terms, dtype, family):
    """Their real sources and host code on a model of the hardware, forward and backward."""
    backend, target = BACKENDS[family], H200 if family == "sm90" else A100
    problem = make_problem(
        (1, 2, 70, 64), dtype, heads_kv=1, seq_kv=90, mask=masks.Causal("bottom-right"), scores=terms, needs_grad=True
    )
    emulation.install(monkeypatch)
    allowed = budget(dtype, 90), 2 * budget(dtype, 90)
    lse = check_against_the_reference(backend, target, problem, {}, make_inputs(problem), allowed=allowed)
    assert_close(*lse, budget(torch.float32, 90), "lse")


@pytest.mark.parametrize("target", [H200, A100], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("one", "other"), [(Softcap(30.0), Softcap(50.0)), (Recency(0.1), Recency(0.2)), (Compress(0.7), Compress(3.0))]
)
def test_a_new_number_is_not_a_new_kernel(target, one, other):
    """Numbers are parameters: programs of terms that differ in them alone launch the same units with other fields."""
    plans = [
        plan(make_problem((1, 8, 2048, 64), torch.bfloat16, scores=(term,), needs_grad=True), target)
        for term in (one, other)
    ]
    for first, second in ((plans[0].forward, plans[1].forward), (plans[0].backward, plans[1].backward)):
        assert first.units == second.units
        assert [launch.fields for launch in first.launches] != [launch.fields for launch in second.launches]
