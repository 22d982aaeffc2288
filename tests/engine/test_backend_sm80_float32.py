"""The float32 kernels of the backend sm80 without a GPU: choices, and the kernels on the model of tests/emulator.

The model rounds as the tensor core does (tests/emulator/sm80/float32_ptx.cuh), so errors here are those of the
algorithm. Where few numbers are drawn, they may instead be held against those of PyTorch's efficient kernel.
"""

from __future__ import annotations

import math

import pytest
import torch
from family import A100, BOTTOM_RIGHT, F32, Case, Family, inputs_of, visible
from family_backward import *  # noqa: F403 (every case, for this family)
from family_choices import *  # noqa: F403
from family_float32 import *  # noqa: F403
from family_forward import *  # noqa: F403
from float32_cases import FLOOR, assert_grads_as_good_as, assert_lse, errors, plain, plain_grads

import emulation
from support import exact, make_problem
from tilewise import Causal, Full, Window
from tilewise.engine import SM80

emulated = emulation.emulated


def step_of_tensor_core(c, a, b):
    """c + a b^T over eight k, rounded as tests/emulator/tensor_core.h tells; a, b and c are of TF32 and float32."""
    products = a.double()[:, None] * b.double()[None]
    exponents = lambda x: torch.where(x == 0, -400, torch.frexp(x)[1] - 1)
    largest = (exponents(a)[:, None] + exponents(b)[None]).amax(-1).maximum(exponents(c)).double()
    scaled = torch.cat([products, c.double()[..., None]], -1) * 2.0 ** (25 - largest)[..., None]
    exact_sum = scaled.trunc().sum(-1) * 2.0 ** (largest - 25)
    rounded = exact_sum.float()
    return torch.where(rounded.double().abs() > exact_sum.abs(), rounded.nextafter(torch.zeros(())), rounded)


def product_of_torch(a, b):
    """a b^T as CUTLASS's OpMultiplyAddFastF32 makes it: hi is cut off, lo rounded; lo hi + hi lo + hi hi of four steps
    in the tensor core, then added outside."""
    cut = lambda x: (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    near = lambda x: ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    a, b = (torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)) for x in (a, b))
    a_high, b_high = cut(a), cut(b)
    a_low, b_low = near(a - a_high), near(b - b_high)
    total = torch.zeros(len(a), len(b))
    for first in range(0, a.shape[-1], 32):
        sums = torch.zeros_like(total)
        for k in (slice(first + i, first + i + 8) for i in range(0, 32, 8)):
            for x, y in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
                sums = step_of_tensor_core(sums, x[:, k], y[:, k])
        total = total + sums
    return total


def of_torch(q, k, v, problem, dout=None):
    """What PyTorch's efficient kernel makes of one head: out, then with dout the gradients."""
    q, k, v = (x[0, 0] for x in (q, k, v))
    hidden = ~visible(problem)
    scores, log2_e = product_of_torch(q, k), torch.tensor(math.log2(math.e))
    exponents = (scores * (problem.scale * log2_e)).masked_fill(hidden, -math.inf)
    most = exponents.amax(-1, keepdim=True)
    p = torch.exp2(exponents - most)
    total = p.sum(-1, keepdim=True)
    out = product_of_torch(p, v.mT.contiguous()) / total
    if dout is None:
        return (out[None, None],)
    dout = dout[0, 0]
    p = torch.exp((scores * problem.scale).masked_fill(hidden, -math.inf) - (most / log2_e + torch.log(total)))
    ds = (product_of_torch(dout, v) - (dout * out).sum(-1, keepdim=True)) * p * problem.scale
    pairs = ((ds, k.mT), (ds.mT, q.mT), (p.mT, dout.mT))
    return tuple(x[None, None] for x in (out, *(product_of_torch(a.contiguous(), b.contiguous()) for a, b in pairs)))


def assert_as_good_as_float32(out, lse, inputs, problem):
    """At most twice the error of plain float32 operations or, where they have luck, of PyTorch's kernel."""
    want, want_lse = exact(*inputs, problem)
    assert not out.isnan().any()
    assert_lse(lse, want_lse)
    (whole, row), (their_whole, their_row) = errors(out, want), errors(plain(*inputs, problem), want)
    # One row is one sample: two float32 computations differ by chance alone.
    if whole <= 2 * max(their_whole, FLOOR) and row <= 4 * max(their_row, FLOOR):
        return
    assert problem.batch * problem.heads_q == 1, f"{problem}: {whole:.2e}, plain float32 {their_whole:.2e}"
    torch_whole, torch_row = errors(of_torch(*inputs, problem)[0], want)
    assert whole <= 2 * min(torch_whole, 4 * their_whole), f"{problem}: {whole:.2e}, PyTorch {torch_whole:.2e}"
    assert row <= 4 * min(torch_row, 4 * their_row), f"{problem}: worst row {row:.2e}, PyTorch {torch_row:.2e}"


def assert_gradients_as_good_as_float32(grads, inputs, dout, problem):
    """As assert_as_good_as_float32."""
    _, _, *truth = exact(*inputs, problem, None, dout)
    magnitudes = plain_grads(*inputs, dout, problem, magnitudes=True)
    plains = plain_grads(*inputs, dout, problem)
    try:
        assert_grads_as_good_as(plains, grads, truth, magnitudes, str(problem))
    except AssertionError:
        if problem.batch * problem.heads_q > 1 or problem.softcap:
            raise
        assert_grads_as_good_as(of_torch(*inputs, problem, dout)[1:], grads, truth, magnitudes, str(problem))
        assert_grads_as_good_as(plains, grads, truth, magnitudes, str(problem), times=8.0)


FAMILY = Family(SM80, F32, ("forward", "backward"), assert_as_good_as_float32, assert_gradients_as_good_as_float32)
REFUSALS = [
    ({"head_dim": 62, "head_dim_v": 62}, "multiples of 4"),
    ({"head_dim": 260}, "260 is over 256"),
    ({"head_dim": 192, "needs_grad": True}, "192 is over 128"),
]
# Every kind of kernel once, for they are slow to compile here; tests/gpu runs the tiles of every GPU.
OUTPUTS = [
    Case((100, 100)),
    Case((150, 300), mask=Causal(), gpu="rtx-4090"),
    Case((90, 90), (36, 36), mask=Window(20, 3), gpu="a100", fields={"softcap": 30.0}),
    Case((70, 90), (96, 96), (2, 1), fields={"layout": "bshd"}),
    Case((130, 160), (128, 128), mask=BOTTOM_RIGHT, fields={"batch": 2}),
    Case((150, 150), (128, 128), mask=Causal(), gpu="rtx-4090"),
    Case((80, 50), (128, 128), mask=BOTTOM_RIGHT),  # rows without keys
    Case((130, 130), (256, 256), mask=Causal()),
    Case((1, 129)),
]
IN_ANY_ORDER = [Case((150, 150), dims, mask=Causal()) for dims in ((64, 64), (128, 128))]  # two stages, and one
GRADIENTS = [
    Case(seqs, dims, heads, mask, gpu, fields | {"deterministic": deterministic})
    for deterministic in (False, True)
    for seqs, dims, heads, mask, gpu, fields in (
        ((100, 100), (64, 64), (1, 1), Full(), "h200", {}),
        ((150, 200), (64, 64), (2, 1), Causal(), "a100", {}),
        ((100, 100), (64, 64), (1, 1), Window(30, 4), "rtx-4090", {}),
        ((90, 90), (36, 60), (1, 1), Full(), "h200", {"softcap": 5.0}),
        ((70, 140), (96, 96), (1, 1), BOTTOM_RIGHT, "h200", {}),
        ((100, 100), (128, 128), (1, 1), Causal(), "h200", {"batch": 2, "layout": "bshd"}),
        ((70, 70), (128, 128), (1, 1), Window(20, 20), "rtx-4090", {"softcap": 20.0}),
        ((100, 60), (64, 64), (1, 1), BOTTOM_RIGHT, "h200", {}),  # rows without keys
    )
]
CUT = [
    Case(seqs, dims, heads, mask, gpu, fields | {"deterministic": deterministic})
    for deterministic in (False, True)
    for seqs, dims, heads, mask, gpu, fields in (
        ((130, 70), (64, 64), (3, 1), Full(), "h200", {}),
        ((100, 100), (64, 64), (4, 1), Causal(), "a100", {}),
        ((150, 77), (128, 128), (2, 1), Window(60, 9), "h200", {}),
        ((100, 100), (36, 60), (2, 1), Full(), "rtx-4090", {"softcap": 5.0}),
    )
]
PARTLY = [Case((100, 100), mask=Causal())]
PARTLY_CUT = [Case((70, 60), heads=(5, 1), fields={"deterministic": True})]
GRADIENTS_IN_ANY_ORDER = [Case((150, 150), mask=Causal())]
SUBNORMAL = [Case((100, 64), heads=(5, 1), gpu=gpu) for gpu in ("h200", "a100")]  # sums four at a time, and one
DOMINATED = [Case((dim, dim), (dim, dim), gpu=gpu) for dim, gpu in ((64, "h200"), (128, "rtx-4090"))]


def test_the_planner_goes_elsewhere_for_gradients_of_wide_heads():
    from tilewise import explain

    wide = make_problem((1, 2, 64, 192), needs_grad=True)
    assert explain(wide, target="a100").backend == "torch-efficient"
    assert explain(wide.with_(needs_grad=False), target="a100").backend == "sm80"


def test_notices_tell_the_error_and_the_products():
    problem = make_problem((1, 2, 64, 40))
    assert "3 products" in SM80.notices(problem, A100)[0]
    assert "11 bits" in SM80.notices(problem.with_(precision="tf32"), A100)[0]
    assert "zero-filled" in SM80.notices(problem, A100)[1]


@emulated
def test_the_model_finds_a_missing_wait(monkeypatch):
    """The checks above would see it: without the wait for its copies the kernel reads what nobody wrote."""
    problem = Case((64, 200)).problem(FAMILY)
    inputs = inputs_of(problem)
    spoil = ("ptx::cp_async_wait<0>();\n      if (n == touched.end - 1)", "if (n == touched.end - 1)")
    with pytest.raises(AssertionError):
        assert_as_good_as_float32(*FAMILY.forward(monkeypatch, problem, inputs, spoil=spoil), inputs, problem)
