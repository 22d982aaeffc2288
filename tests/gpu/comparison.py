"""One problem by every backend that takes it: against float64, and against each other."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import assert_close, budget, in_order, make_inputs, make_problem
from tilewise.plain import reference
from tilewise.plan import BACKENDS
from tilewise.target import Target

if TYPE_CHECKING:
    from tilewise import Problem

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OURS = [name for name in ("sm90", "sm80") if name in BACKENDS]
NAMES = [*OURS, *(name for name in ("triton", "reference") if name in BACKENDS)]
RESULTS = ("out", "lse", "dq", "dk", "dv")
needs_triton = pytest.mark.skipif(
    torch.cuda.is_available() and not Target.of("cuda").has_triton, reason="triton is not installed"
)


def willing(problem: Problem) -> list[str]:
    return [name for name in NAMES if not BACKENDS[name].why_not(problem, Target.of("cuda"))]


def computed(name: str, problem: Problem, inputs: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """All five results, in memory that was full of NaN before."""
    backend, (q, k, v) = BACKENDS[name], inputs
    rooms = [torch.full((4 * tensor.numel() + 1,), math.nan, device="cuda") for tensor in inputs]
    del rooms
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    return dict(
        zip(RESULTS, (out, lse, *in_order(backend.backward(dout, dlse, q, k, v, out, lse, problem))), strict=True)
    )  # type: ignore[arg-type]


def truth(problem: Problem, inputs: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, lse = reference.forward(*wide, problem.with_(dtype=torch.float64))
    seen = torch.where(lse.isinf(), 0.0, lse)
    loss = (out * dout.double()).sum() + (seen * dlse.double()).sum()
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *torch.autograd.grad(loss, wide)), strict=True))


def compare(problem: Problem) -> list[str]:
    """Everybody who takes the problem, against float64 and against each other; returns who that was."""
    names = willing(problem)
    inputs = make_inputs(problem, "cuda")
    dout = torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v, device="cuda").to(
        problem.dtype
    )
    dlse = torch.randn(problem.batch, problem.heads_q, problem.seq_q, device="cuda")
    want = truth(problem, inputs, dout, dlse)
    found = {name: computed(name, problem, inputs, dout, dlse) for name in names}
    terms = max(problem.seq_kv, problem.seq_q * problem.group)
    allowed = {name: (1 if name == "out" else 4) * budget(problem.dtype, terms) for name in RESULTS}
    allowed["lse"] = budget(FP32, terms) if problem.dtype == FP32 else 4 * budget(FP32, terms)
    for who, results in found.items():
        for name in RESULTS:
            assert_close(results[name], want[name], allowed[name], f"{who}: {problem}: {name}")
        assert (results["out"][want["lse"].isinf()] == 0).all(), f"{who}: {problem}: rows without keys"
    for one, other in combinations(found, 2):
        for name in RESULTS:
            what = f"{one} - {other}: {problem}: {name}"
            assert_close(found[one][name], found[other][name], 2 * allowed[name], what)
    return names


def problem_of(
    heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], batch: int = 1, **fields: Any
) -> Problem:
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True, "needs_grad": True}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **({"dtype": BF16} | values | fields))
