"""The float32 kernels of Hopper without a GPU: choices, and the kernels on the model of tests/emulator."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from family import BF16, BOTTOM_RIGHT, F32, H200, Case, Family, inputs_of, like_out
from family_backward import *  # noqa: F403 (every case, for this family)
from family_choices import *  # noqa: F403
from family_choices import assert_built, dims_of
from family_float32 import *  # noqa: F403
from family_forward import *  # noqa: F403
from float32_cases import assert_as_good_as_plain, assert_grads_as_good_as_plain

import emulation
from support import budget, exact, make_problem
from tilewise import Causal, Full, InvalidInput, Window
from tilewise.engine import SM90
from tilewise.engine.sm90 import float32_backward as sm90_float32_backward
from tilewise.engine.sm90 import float32_forward as sm90_float32
from tilewise.plan import plan
from tilewise.problem import Strides

emulated = emulation.emulated
FAMILY = Family(SM90, F32, ("forward", "backward"), assert_as_good_as_plain, assert_grads_as_good_as_plain)
REFUSALS = [({"strides": Strides.SCATTERED}, "scattered")]
OUTPUTS = [
    Case(seqs, dims, heads, mask, fields=fields, outlier=outlier)
    for outlier in (0.0, 1e7)  # in every tile, so that fp16 refuses them all, and bf16 in six products runs
    for seqs, dims, heads, mask, fields in (
        ((100, 100), (64, 64), (1, 1), Full(), {}),
        ((150, 300), (64, 64), (1, 1), Causal(), {}),
        ((90, 90), (40, 40), (1, 1), Window(20, 3), {"softcap": 30.0}),
        ((70, 90), (96, 96), (2, 1), Full(), {}),
        ((130, 160), (128, 128), (1, 1), BOTTOM_RIGHT, {"batch": 2}),
        ((80, 50), (128, 128), (1, 1), BOTTOM_RIGHT, {}),  # rows without keys
        ((70, 70), (192, 128), (1, 1), Causal(), {}),
        ((70, 70), (192, 192), (1, 1), Window(40, 0), {}),
        ((130, 130), (256, 256), (1, 1), Causal(), {}),
        ((1, 129), (64, 64), (1, 1), Full(), {}),
    )
]
IN_ANY_ORDER = [Case((192, 192), dims, mask=Causal()) for dims in ((64, 64), (192, 192))]
GRADIENTS = [
    Case((100, 100)),
    Case((150, 300), mask=Causal()),
    Case((90, 90), (40, 40), mask=Window(20, 3), fields={"softcap": 30.0}),
    Case((70, 90), (96, 96), (3, 1)),
    Case((130, 160), (128, 128), mask=BOTTOM_RIGHT, fields={"batch": 2}),
    Case((80, 50), (128, 128), mask=BOTTOM_RIGHT),  # rows without keys
    Case((70, 70), (72, 128), fields={"softcap": 10.0}),
    Case((1, 129)),
    Case((129, 1)),
    Case((130, 130), heads=(2, 1), mask=Causal(), fields={"deterministic": True}),
]
WINDOW_IN_PIECES = Case((130, 130), (96, 96), (4, 1), Window(90, 9), fields={"softcap": 5.0})
CUT = [
    Case(seqs, dims, heads, mask, fields={"deterministic": deterministic})
    for deterministic in (False, True)
    for seqs, dims, heads, mask in (
        ((120, 77), (64, 64), (4, 1), Full()),
        ((100, 100), (64, 64), (6, 1), Causal()),
        ((130, 64), (128, 128), (4, 1), Full()),
    )
] + [
    pytest.param(
        WINDOW_IN_PIECES._replace(fields={"softcap": 5.0, "deterministic": deterministic}),
        marks=pytest.mark.kernel_gate,
    )
    for deterministic in (False, True)
]
PARTLY = [Case((70, 70))]
PARTLY_CUT = [Case((120, 100), heads=(4, 1), fields={"deterministic": True})]
GRADIENTS_IN_ANY_ORDER = [
    Case((192, 192), dims, mask=Causal(), fields={"deterministic": deterministic})
    for dims, deterministic in product(((64, 64), (128, 128)), (False, True))
]
SUBNORMAL = [Case((120, 64), heads=(4, 1))]
DOMINATED = [Case((64, 64))]


# ---------------------------------------------------------------------------------------------------------------------
# choices


@pytest.mark.parametrize("precision", ["exact", "tf32"])
def test_every_problem_has_two_kernels_that_fit(precision):
    for dim, dim_v in dims_of(FAMILY, grad=False):
        problem = make_problem((2, 8, 300, dim), head_dim_v=dim_v, heads_kv=2, precision=precision)
        (config,) = SM90.configs(problem, H200)
        assert config.parts == {"exact": 2, "tf32": 1}[precision]
        wide = sm90_float32.wide_range(config)
        assert_built(FAMILY, wide, sm90_float32.unit(wide).label)
        assert wide.smem_bytes <= H200.smem_per_block
        assert wide.head_dim >= dim
        assert wide.head_dim_v >= dim_v


def test_rows_need_not_be_aligned():
    assert SM90.why_not(make_problem((1, 2, 64, 64), strides=Strides.UNALIGNED), H200) == []


def test_the_bound_on_exponents_follows_the_scale():
    problem = make_problem((1, 1, 8, 64))
    assert sm90_float32.max_exponents(problem) == 18
    assert sm90_float32.max_exponents(problem.with_(scale=1.0)) == 15
    assert sm90_float32.max_exponents(problem.with_(scale=2.0**-10)) == 25


def test_precision_is_checked():
    with pytest.raises(InvalidInput, match="precision"):
        make_problem((1, 1, 8, 64), BF16, precision="tf32")
    with pytest.raises(InvalidInput, match="precision"):
        make_problem((1, 1, 8, 64), precision="fast")


def test_larger_heads_are_refused_with_gradients_alone():
    problem = make_problem((1, 2, 300, 192))
    assert SM90.why_not(problem, H200) == []
    training = problem.with_(needs_grad=True)
    (reason,) = SM90.why_not(training, H200)
    assert "192" in reason.what
    assert "128" in reason.what
    assert plan(training, H200).backend != "sm90"


def test_training_runs_the_parts_that_the_backward_has():
    problem = make_problem((1, 2, 300, 64), needs_grad=True)
    (config,) = SM90.configs(problem, H200)
    assert config.parts == sm90_float32_backward.PARTS
    assert plan(problem, H200).backend == "sm90"
    assert "6 products" in str(plan(problem, H200))


# ---------------------------------------------------------------------------------------------------------------------
# on the model


@emulated
def test_rows_may_begin_anywhere(monkeypatch):
    problem = Case((70, 70), heads=(2, 2), mask=Causal()).problem(
        FAMILY, layout="bshd", strides=Strides.UNALIGNED, needs_grad=True
    )
    q, k, v, dout = (torch.randn(1, 70, 2, 67)[..., 3:].transpose(1, 2) for _ in range(4))
    out, _ = FAMILY.forward(monkeypatch, problem.with_(needs_grad=False), (q, k, v))
    assert out.transpose(1, 2).is_contiguous()
    assert_as_good_as_plain(out, None, (q, k, v), problem)
    assert_grads_as_good_as_plain(FAMILY.backward(monkeypatch, problem, (q, k, v), dout), (q, k, v), dout, problem)


@emulated
def test_nan_behind_a_mask_does_not_show_in_gradients(monkeypatch):
    """Rows before the key that is not finite do not see it, and neither do their gradients."""
    problem = Case((100, 100), mask=Causal()).problem(FAMILY, needs_grad=True)
    (q, k, v), dout = inputs_of(problem), like_out(problem)
    dout[0, 0, 80:] = 0
    want = exact(q, k, v, problem, None, dout)[2]
    v[0, 0, 80] = math.nan
    dq = FAMILY.backward(monkeypatch, problem, (q, k, v), dout)[0]
    error = (dq[0, 0, :80].double() - want[0, 0, :80]).norm() / want[0, 0, :80].norm()
    assert error <= budget(F32, 100)
