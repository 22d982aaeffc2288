"""Helpers of the tests: inputs, float64 truth, derived error budgets, and strategies for problems."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tilewise import Causal, Documents, Full, Problem, Window
from tilewise.backends import reference
from tilewise.masks import Dense, Mask

Tensor = torch.Tensor

aligns = st.sampled_from(["top-left", "bottom-right"])
sizes = st.one_of(st.none(), st.integers(0, 12))


@st.composite
def offsets(draw: st.DrawFn, documents: int, most: int = 8) -> tuple[int, ...]:
    """Cumulative lengths of `documents` documents, empty ones included."""
    starts = [0]
    for length in draw(st.lists(st.integers(0, most), min_size=documents, max_size=documents)):
        starts.append(starts[-1] + length)
    return tuple(starts)


banded_masks = st.one_of(
    st.just(Full()),
    st.builds(Causal, aligns),
    st.builds(Window, sizes, sizes, aligns),
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
    out, lse = reference.forward(*inputs, wide, None, bias)
    if dout is None:
        return out, lse
    grads = torch.autograd.grad(out, inputs, dout.double())
    return (out.detach(), lse.detach(), *grads)


def budget(dtype: torch.dtype, terms: int = 1) -> float:
    """Relative error, norm-wise, that honest arithmetic in `dtype` with float32 sums may show.

    Rounding the operands of one product costs about eps / sqrt(12) each, and attention rounds q, k, v, p, out and the
    gradients once; float32 sums of `terms` addends add eps_32 * sqrt(terms). A factor 4 covers unlucky draws.
    """
    rounding = 4 * torch.finfo(dtype).eps
    return rounding + 4 * torch.finfo(torch.float32).eps * max(terms, 1) ** 0.5 * (dtype != torch.float64)


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "out") -> None:
    """Norm-wise relative error within tolerance; infinities must agree exactly and nothing may be nan.

    Inputs are of order 1, so a truth that cancels to almost nothing (the gradient of a row that sees one key) is
    measured against 0.05 an element instead of against itself.
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
