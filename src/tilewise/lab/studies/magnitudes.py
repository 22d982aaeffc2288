"""magnitudes: errors against float64 as the inputs grow or shrink, for us and for PyTorch.

Four ways to scale inputs that are standard normal at 1, each by powers of ten:

    values     v times m
    balance    q times m, k divided by m: the scores stay as they are
    scores     q and k times the root of m
    gradients  dout times m

A point is the norm-wise error of out, and the largest of those of dq, dk and dv, each with the share of its budget that
it takes up: the budget of `accuracy`, derived from a plain computation on the same inputs. A point without a number is
one where the truth itself does not fit the dtype, or the candidate gave no finite answer, or none at all. A dq or dk
that is all rounding does not count: where every row has one weight near 1, the terms of its scores' gradients cancel.
All run in this process, one after the other.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import TilewiseError
from ..candidates.names import OURS, Candidate, Inputs, make_inputs
from ..measure import accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...problem import Problem
    from ..measure.accuracy import Tensors

KIND = "tilewise magnitudes"
PEER = {"cuda": "torch-efficient", "cpu": "torch-math"}
WHAT = {"out": ("out",), "gradients": ("dq", "dk", "dv")}


def _scaled(inputs: Inputs, **factors: float) -> Inputs:
    changed = {name: getattr(inputs, name).detach() * factor for name, factor in factors.items()}
    for name in ("q", "k", "v"):
        changed[name] = changed.get(name, getattr(inputs, name).detach()).requires_grad_()
    return inputs._replace(**changed)


SCALINGS: dict[str, tuple[range, Callable[[Inputs, float], Inputs]]] = {
    "values": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, v=m)),
    "balance": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, q=m, k=1 / m)),
    "scores": (range(-2, 4), lambda inputs, m: _scaled(inputs, q=math.sqrt(m), k=math.sqrt(m))),
    "gradients": (range(-36, 37, 4), lambda inputs, m: _scaled(inputs, dout=m)),
}


class Point(NamedTuple):
    """Errors of one candidate at one magnitude; nan where there is none to tell."""

    magnitude: float
    out: float
    gradients: float
    because: str = ""  # why there is none
    out_share: float = math.nan  # of its budget: over 1 is wrong; nan where there is no budget, or no error
    gradients_share: float = math.nan


Series = dict[str, list[Point]]  # by candidate


def measure(
    problem: Problem,
    device: str,
    seed: int,
    candidates: Iterable[str] = (),
    tick: Callable[[str], None] = lambda text: None,
) -> dict[str, Series]:
    """By scaling; ours first, then PyTorch's kernel, then others. An interrupt ends it early: see `complete`."""
    problem = problem.with_(needs_grad=True)
    names = tuple(dict.fromkeys((OURS, PEER["cuda" if device.startswith("cuda") else "cpu"], *candidates)))
    sample = accuracy.choose(problem, seed, device)
    plain = make_inputs(problem, seed, device)
    found: dict[str, Series] = {}
    with contextlib.suppress(KeyboardInterrupt):
        for scaling, (exponents, scale) in SCALINGS.items():
            for exponent in exponents:
                magnitude = 10.0**exponent
                inputs = scale(plain, magnitude)
                truth = accuracy.truth(inputs, problem, sample)
                simple = accuracy.errors(accuracy.plain(inputs, problem, sample), truth)
                allowed = accuracy.budgets(simple, problem)
                points = {name: _point(name, problem, inputs, sample, truth, allowed, magnitude) for name in names}
                for name, point in points.items():
                    found.setdefault(scaling, {}).setdefault(name, []).append(point)
                tick(f"{scaling} 1e{exponent}")
    return found


def complete(found: dict[str, Series]) -> bool:
    """No interrupt has ended it early."""
    return sum(len(next(iter(series.values()))) for series in found.values()) == steps()


def steps() -> int:
    return sum(len(exponents) for exponents, _ in SCALINGS.values())


def _point(
    name: str,
    problem: Problem,
    inputs: Inputs,
    sample: accuracy.Sample,
    truth: Tensors,
    allowed: accuracy.Errors,
    magnitude: float,
) -> Point:
    try:
        results = _results(Candidate(name), problem, inputs)
    except (RuntimeError, TilewiseError) as error:  # a kernel that refuses or fails is a point without a number
        return Point(magnitude, math.nan, math.nan, str(error).partition("\n")[0])
    largest = torch.finfo(problem.dtype).max
    picked = accuracy.select(results, problem, sample)
    errors = accuracy.errors(picked, {tensor: truth[tensor] for tensor in picked})
    judged = {
        what: [tensor for tensor in tensors if not _is_rounding(tensor, truth, problem, inputs)]
        for what, tensors in WHAT.items()
    }
    told = {
        what: max(
            errors[tensor]["norm"] if truth[tensor].abs().max().item() < largest else math.nan for tensor in tensors
        )
        for what, tensors in judged.items()
    }
    shares = {
        what: max((errors[tensor]["norm"] / allowed[tensor]["norm"] for tensor in tensors), default=math.nan)
        if math.isfinite(told[what])
        else math.nan
        for what, tensors in judged.items()
    }
    return Point(magnitude, told["out"], told["gradients"], "", shares["out"], shares["gradients"])


def _is_rounding(tensor: str, truth: Tensors, problem: Problem, inputs: Inputs) -> bool:
    """Whether a dq or dk is about as small as the rounding of dout v^T times the scale, and the keys or queries."""
    if tensor not in ("dq", "dk"):
        return False
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    factors = (inputs.dout, inputs.v, inputs.k if tensor == "dq" else inputs.q)
    terms = math.prod(_row_size(factor) for factor in factors) * abs(problem.scale)
    return _row_size(truth[tensor]) < _ROUNDINGS * eps * terms


_ROUNDINGS = 64  # of dot products over a head and sums over keys, which add up at random


def _row_size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm(dim=-1).square().mean().sqrt())


def _results(candidate: Candidate, problem: Problem, inputs: Inputs) -> Tensors:
    with candidate.context(problem):
        out = candidate.forward(problem, inputs)()
        grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    return {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def to_dict(problem: Problem, device: str, found: dict[str, Series], provenance: dict[str, Any]) -> dict[str, Any]:
    series = {
        scaling: {name: [point._asdict() for point in points] for name, points in by_name.items()}
        for scaling, by_name in found.items()
    }
    about = {"kind": KIND, "suite": "magnitudes", "problem": problem.to_dict(), "device": device}
    return about | {"complete": complete(found), "provenance": provenance, "series": series}


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0
