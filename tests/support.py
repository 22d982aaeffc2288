"""Helpers of the tests: inputs, float64 truth, derived error budgets, and strategies for problems."""

from __future__ import annotations

import math
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tilewise import Causal, Documents, Full, Problem, Window
from tilewise.masks import Dense, Mask
from tilewise.operands import Grads, Wants, chosen
from tilewise.plain import reference
from tilewise.problem import mask_operands

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tilewise import Target

Tensor = torch.Tensor

aligns = st.sampled_from(["top-left", "bottom-right"])
sizes = st.one_of(st.none(), st.integers(0, 12))
shifts = st.one_of(st.just(0), st.integers(-30, 30))


@st.composite
def offsets(draw: st.DrawFn, documents: int, most: int = 8) -> tuple[int, ...]:
    """Cumulative lengths of `documents` documents, empty ones included."""
    starts = [0]
    for length in draw(st.lists(st.integers(0, most), min_size=documents, max_size=documents)):
        starts.append(starts[-1] + length)
    return tuple(starts)


banded_masks = st.one_of(
    st.just(Full()),
    st.builds(Causal, aligns, shifts),
    st.builds(Window, sizes, sizes, aligns, shifts),
)


@st.composite
def masks_with_lengths(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """A structural mask and lengths it fits, zero lengths included."""
    if draw(st.booleans()):
        return draw(banded_masks), draw(st.integers(0, 24)), draw(st.integers(0, 24))
    count = draw(st.integers(1, 4))
    starts_q, starts_kv = draw(offsets(count)), draw(offsets(count))
    return Documents(starts_q, starts_kv, draw(banded_masks)), starts_q[-1], starts_kv[-1]


def make_problem(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, **fields: object) -> Problem:
    """A Problem of q's shape (batch, heads, seq, head_dim); k and v follow unless said otherwise."""
    batch, heads, seq, dim = shape
    values: dict[str, object] = {
        "batch": batch,
        "heads_q": heads,
        "heads_kv": heads,
        "seq_q": seq,
        "seq_kv": seq,
        "head_dim": dim,
        "head_dim_v": dim,
        "dtype": dtype,
    }
    values |= fields
    sugar = {"softcap": values.pop("softcap")} if "softcap" in values else {}
    return Problem(**values).with_(**sugar)  # type: ignore[arg-type]


def make_inputs(problem: Problem, device: str = "cpu", *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v for a problem, as bhsd views of tensors stored in the problem's layout."""
    shapes = (
        (problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.heads_kv, problem.seq_kv, problem.head_dim_v),
    )
    tensors = []
    for heads, seq, dim in shapes:
        stored = (problem.batch, seq, heads, dim) if problem.layout == "bshd" else (problem.batch, heads, seq, dim)
        tensor = torch.randn(stored, device=device).to(problem.dtype)
        tensor = tensor.transpose(1, 2) if problem.layout == "bshd" else tensor
        tensors.append(tensor.requires_grad_(grad))
    return tuple(tensors)  # type: ignore[return-value]


def make_bias(problem: Problem, device: str = "cpu") -> Tensor | None:
    """A random mask tensor for a Dense problem: one row in eight hides everything, half of the rest is hidden."""
    if not isinstance(problem.mask, Dense):
        return None
    visible = torch.rand(problem.mask.shape, device=device) < 0.5
    visible &= torch.rand((*problem.mask.shape[:-1], 1), device=device) > 0.125
    if not problem.mask.additive:
        return visible
    return torch.randn(problem.mask.shape, device=device).to(problem.dtype).masked_fill(~visible, -torch.inf)


def exact(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, bias: Tensor | None = None, dout: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Float64 truth: (out, lse), and with dout also (dq, dk, dv), by autograd through the reference."""
    wide = problem.with_(dtype=torch.float64, precision="exact")
    inputs = [t.detach().double().requires_grad_(dout is not None) for t in (q, k, v)]
    bias = bias.double() if bias is not None and bias.is_floating_point() else bias
    out, lse = reference.forward(*inputs, wide, None, mask_operands(bias))
    if dout is None:
        return out, lse
    grads = torch.autograd.grad(out, inputs, dout.double())
    return (out.detach(), lse.detach(), *grads)


def in_order(grads: Grads) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv, as backends return them by name; None where there is none."""
    return grads.get("q"), grads.get("k"), grads.get("v")


def same_bits(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def wanted(dq: bool, dk: bool, dv: bool) -> Wants:
    return chosen(("q", "k", "v"), (dq, dk, dv))


def budget(dtype: torch.dtype, terms: int = 1) -> float:
    """Relative error, norm-wise, that honest arithmetic in `dtype` may show.

    Rounding the operands of one product costs about eps / sqrt(12) each, and attention rounds q, k, v, p, out and the
    gradients once; sums of `terms` addends, in float32 or float64, add eps * sqrt(terms) of theirs. A factor 4 covers
    unlucky draws.
    """
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return 4 * (torch.finfo(dtype).eps + torch.finfo(sums).eps * max(terms, 1) ** 0.5)


def rounding_budget(dtype: torch.dtype, roundings: int) -> float:
    """Relative error, norm-wise, that so many roundings to `dtype` on the way to a result may show.

    A rounding is off by eps / sqrt(12) of its number's power of two, and significands, spread evenly on a logarithmic
    scale, have a mean square of 3 / (2 ln 2): 0.196 eps of the norm. Roundings add up as independent errors do. A
    factor 1.4 covers unlucky draws.
    """
    one = (2 * math.log(2) / 36) ** 0.5 * torch.finfo(dtype).eps
    return 1.4 * roundings**0.5 * one


def lse_budget(q: Tensor, k: Tensor, problem: Problem, added: float = 0.0) -> float:
    """Error of any lse of `problem` that float32 sums may show, if terms add up to `added` to a score that counts.

    A score is a sum that a tensor core cuts off to float32 once per 8 products, or 16; none of its partial sums
    exceeds |q| |k|. The softcap, the exponentials, their sum and its logarithm add a few units in the last place of
    what they are about: the softcap, 1, and lse itself.
    """
    largest = problem.scale * q.double().norm(dim=-1).max().item() * k.double().norm(dim=-1).max().item()
    size = 1 + largest + added + problem.softcap + math.log(max(problem.seq_kv, 1))
    return torch.finfo(torch.float32).eps * (problem.head_dim / 8 + 4) * size


def unlucky(draws: int) -> float:
    """What a norm of so many independent rounding errors may exceed its expectation by: the mean of n squares of evenly
    spread errors has a relative deviation of sqrt(4 / 5n), and four deviations are allowed."""
    return math.sqrt(1 + 4 * math.sqrt(4 / (5 * max(draws, 1))))


def assert_near(
    out: Tensor, lse: Tensor, inputs: tuple[Tensor, Tensor, Tensor], problem: Problem, factor: float = 1.0
) -> None:
    """out and lse are what a fused kernel with 16-bit operands may make of `inputs`.

    Two roundings of 16 bits stand between the inputs and out: those of p and of out itself. `factor`: of the error of
    out, where few are drawn (`unlucky`).
    """
    truth, truth_lse = exact(*inputs, problem)
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[~seen] == -math.inf).all()
    assert (out[~seen] == 0).all()
    error = ((out.double() - truth).norm() / truth.norm()).item()
    allowed = factor * rounding_budget(problem.dtype, 2)
    assert error <= allowed, f"{problem}: out is off by {error:.2e}, allowed {allowed:.2e}"
    error = (lse.double() - truth_lse)[seen].abs().max().item()
    allowed = lse_budget(*inputs[:2], problem)
    assert error <= allowed, f"{problem}: lse is off by {error:.2e}, allowed {allowed:.2e}"


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "out") -> None:
    """Norm-wise relative error within tolerance; infinities must agree exactly and nothing may be nan.

    Inputs are of order 1, so a truth that cancels to almost nothing (the gradient of a row that sees one key) is
    measured against 0.05 per element instead of against itself.
    """
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert not got.isnan().any(), f"{what} has nan"
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), f"{what}: infinities differ"
    got, want = got[~infinite], want[~infinite]
    error = (got - want).norm().item()
    size = max(want.norm().item(), 0.05 * want.numel() ** 0.5)
    assert error <= tolerance * size, f"{what}: relative error {error / size:.2e}, allowed {tolerance:.2e}"


def reached(name: str, extra: str = "", seen: set[tuple[str, str]] | None = None) -> set[str]:
    """The distributions that one needs in this environment, itself included."""
    seen = set() if seen is None else seen
    if (name, extra) not in seen:
        seen.add((name, extra))
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                for wanted in ("", *requirement.extras):
                    reached(canonicalize_name(requirement.name), wanted, seen)
    return {package for package, _ in seen}


def check_against_the_reference(
    backend: Any,
    target: Target,
    problem: Problem,
    operands: dict[str, Tensor],
    inputs: Sequence[Tensor],
    known: Sequence[Tensor] | None = None,
    allowed: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Forward and backward of our kernels against the reference in float64. Returns the lse of both.

    `known` are the inputs where these are nan because nothing reads them. `allowed` are errors of out and of gradients,
    which otherwise are those of 3 and of 6 roundings.
    """
    of_out, of_gradients = allowed or (rounding_budget(problem.dtype, 3), rounding_budget(problem.dtype, 6))
    doubles, wide = [tensor.double() for tensor in known or inputs], problem.with_(dtype=torch.float64)
    want, want_lse = reference.forward(*doubles, wide, None, operands)
    out, lse = backend.bind(*inputs, problem, None, target, operands)(*inputs, operands)
    assert_close(out, want, of_out)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    dout = torch.randn_like(out)
    truth = reference.backward(dout.double(), None, *doubles, want, want_lse, wide, None, operands)
    backward = backend.bind_backward(problem, None, target)
    grads = backward(dout, None, *inputs, want.to(problem.dtype), want_lse.float(), operands)
    for name, grad in grads.items():
        assert_close(grad, truth[name], of_gradients, f"d{name}")
    return lse, want_lse
