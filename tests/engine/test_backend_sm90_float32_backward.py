"""The float32 backward of Hopper without a GPU: its choices, and its kernels on the model of tests/emulator.

Forward and backward run one after the other, as in training, and are held against gradients in plain float32
operations, made the way fused kernels make them: from the scores, lse and rowsum(dout * out).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from test_backend_sm90_float32 import DIM, EVERY, FLOOR, RANGES, SEQ, emulated, inputs_of, spread, with_one

import emulation
from support import budget, exact, in_order, make_problem, wanted
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM90
from tilewise.engine.sm90 import float32_backward as sm90_float32_backward
from tilewise.plan import plan
from tilewise.problem import Strides

H200 = Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
NAMES = ("dq", "dk", "dv")


# ---------------------------------------------------------------------------------------------------------------------
# choices


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (72, 40), (96, 96), (40, 128), (128, 128)])
def test_heads_to_128_have_a_kernel_that_fits(dims, softcap):
    problem = make_problem((2, 8, 300, dims[0]), head_dim_v=dims[1], heads_kv=2, needs_grad=True, softcap=softcap)
    assert SM90.why_not(problem, H200) == []
    (config,) = sm90_float32_backward.configs(problem, H200)
    budget = BUDGETS[sm90_float32_backward.unit(config).label]
    assert config.smem_bytes == budget["smem_bytes"] <= H200.smem_per_block
    assert config.register_limit == budget["registers"]
    assert config.head_dim >= dims[0]
    assert config.head_dim_v >= dims[1]


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


def like_out(problem, seed=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v, generator=generator)


@pytest.fixture
def on_the_model(monkeypatch):
    """(dq, dk, dv) by our kernels; out and lse come from our forward."""

    def run(q, k, v, dout, problem, seed=0, dlse=None, wants=(True, True, True)):
        emulation.install(monkeypatch, seed=seed)
        out, lse = SM90.bind(q, k, v, problem, None, H200)(q, k, v, None)
        return in_order(SM90.bind_backward(problem, None, H200)(dout, dlse, q, k, v, out, lse, wants=wanted(*wants)))

    return run


def plain_grads(q, k, v, dout, problem, dlse=None, *, magnitudes=False):
    """Gradients in float32 operations; or in float64 what they would be if nothing ever cancelled."""
    if magnitudes:
        q, k, v, dout = (t.double() for t in (q, k, v, dout))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv)
    scores, slope = q @ k.mT * problem.scale, 1.0
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * bent, 1 - bent * bent
    scores = scores.masked_fill(~visible.to(q.device), -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf))
    if magnitudes:
        q, k, v, dout = (t.abs() for t in (q, k, v, dout))
    terms = (dout * (p @ v)).sum(-1, keepdim=True)
    if dlse is not None:
        terms = terms - dlse.unsqueeze(-1)
    products = dout @ v.mT
    ds = p * (products + terms if magnitudes else products - terms) * slope
    summed = lambda t: t.unflatten(1, (problem.heads_kv, problem.group)).sum(2)
    return ds @ k * abs(problem.scale), summed(ds.mT @ q) * abs(problem.scale), summed(p.mT @ dout)


def grad_errors(grad, want, terms):
    """Over all, and of the worst row. What cancels has few accurate digits left, and is measured against its terms."""
    difference = (grad.double() - want).norm(dim=-1)
    rows = torch.maximum(want.norm(dim=-1), terms.norm(dim=-1) / 16)
    # Weights below 2^-110 have fewer bits in parts of bf16, and below 2^-126 a GPU's exponential has none: keys that no
    # query gives more are measured against that.
    rows = rows.clamp(min=max(2.0**-126, 2.0**-110 * rows.max().item()))
    whole = max(want.norm().item(), terms.norm().item() / 64, 2.0**-126)
    return difference.norm().item() / whole, (difference / rows).max().item()


def assert_grads_as_good_as(theirs, got, truth, magnitudes, what, times=2.0):
    """At most `times` their error, over all; in the worst row, which is one sample of many, twice that."""
    for name, grad, other, want, terms in zip(NAMES, got, theirs, truth, magnitudes, strict=True):
        assert grad.isfinite().all(), f"{what}: {name}"
        ours, plain = grad_errors(grad, want, terms), grad_errors(other, want, terms)
        assert ours[0] <= times * max(plain[0], FLOOR), f"{what}: {name} {ours[0]:.2e}, theirs {plain[0]:.2e}"
        assert ours[1] <= 2 * times * max(plain[1], FLOOR), f"{what}: row of {name} {ours[1]:.2e}, {plain[1]:.2e}"


def check(on_the_model, q, k, v, dout, problem, seed=0):
    got = on_the_model(q, k, v, dout, problem, seed)
    _, _, *truth = exact(q, k, v, problem, None, dout)
    plain = plain_grads(q, k, v, dout, problem)
    assert_grads_as_good_as(plain, got, truth, plain_grads(q, k, v, dout, problem, magnitudes=True), str(problem))


SHAPES = [
    pytest.param((1, 1, 100, 64), {}, id="d64"),
    pytest.param((1, 1, 150, 64), {"mask": Causal(), "seq_kv": 300}, id="d64 causal"),
    pytest.param((1, 1, 90, 40), {"mask": Window(20, 3), "softcap": 30.0}, id="d40 window softcap"),
    pytest.param((1, 3, 70, 96), {"heads_kv": 1, "seq_kv": 90}, id="d96 grouped"),
    pytest.param((2, 1, 130, 128), {"mask": Causal("bottom-right"), "seq_kv": 160}, id="d128 bottom-right"),
    pytest.param((1, 1, 80, 128), {"mask": Causal("bottom-right"), "seq_kv": 50}, id="rows without keys"),
    pytest.param((1, 1, 70, 72), {"head_dim_v": 128, "softcap": 10.0}, id="d72/128 softcap"),
    pytest.param((1, 1, 1, 64), {"seq_kv": 129}, id="one query"),
    pytest.param((1, 1, 129, 64), {"seq_kv": 1}, id="one key"),
    pytest.param((1, 2, 130, 64), {"mask": Causal(), "deterministic": True, "heads_kv": 1}, id="in order"),
]


@emulated
@pytest.mark.parametrize(("shape", "fields"), SHAPES)
def test_gradients_are_as_accurate_as_float32(on_the_model, shape, fields):
    problem = make_problem(shape, needs_grad=True, **fields)
    check(on_the_model, *inputs_of(problem), like_out(problem), problem, seed=shape[2])


PIECES = [
    pytest.param((1, 4, 120, 64), {"heads_kv": 1, "seq_kv": 77}, id="d64 full"),
    pytest.param((1, 6, 100, 64), {"heads_kv": 1, "mask": Causal()}, id="d64 causal"),
    pytest.param(
        (1, 4, 130, 96),
        {"heads_kv": 1, "mask": Window(90, 9), "softcap": 5.0},
        id="d96 window softcap",
        marks=pytest.mark.kernel_gate,
    ),
    pytest.param((1, 4, 130, 128), {"heads_kv": 1, "seq_kv": 64}, id="d128 full"),
]


@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("shape", "fields"), PIECES)
def test_gradients_of_keys_in_pieces(on_the_model, shape, fields, deterministic):
    problem = make_problem(shape, needs_grad=True, deterministic=deterministic, **fields)
    assert sm90_float32_backward.divide(problem, H200).cut
    inputs, dout = inputs_of(problem), like_out(problem)
    check(on_the_model, *inputs, dout, problem)
    if deterministic:
        first, again = (on_the_model(*inputs, dout, problem, seed) for seed in (0, 3))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@emulated
def test_sums_of_pieces_keep_subnormal_numbers(on_the_model):
    problem = make_problem((1, 4, 120, 64), heads_kv=1, seq_kv=64, needs_grad=True)
    assert sm90_float32_backward.divide(problem, H200).cut
    (q, k, v), dout = inputs_of(problem), like_out(problem) * 1e-38
    _, _, dv = on_the_model(q, k, v, dout, problem)
    truth = exact(q, k, v, problem, None, dout)[4]
    assert truth.abs().max().item() < 4 * torch.finfo(torch.float32).tiny
    unit = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps
    assert (dv.double() - truth).abs().max().item() <= problem.group * problem.seq_q * unit


@emulated
@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True)])
def test_pieces_without_some_gradients(on_the_model, wants):
    problem = make_problem((1, 4, 120, 64), heads_kv=1, seq_kv=100, needs_grad=True, deterministic=True)
    assert sm90_float32_backward.divide(problem, H200).cut
    inputs, dout = inputs_of(problem), like_out(problem)
    every, some = (on_the_model(*inputs, dout, problem, wants=each) for each in ((True,) * 3, wants))
    for grad, whole, want in zip(some, every, wants, strict=True):
        assert torch.equal(grad, whole) if want else grad is None


@emulated
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim", [64, 128])
def test_no_order_of_events_breaks_it(on_the_model, dim, seed):
    problem = make_problem((1, 1, 192, dim), mask=Causal(), needs_grad=True, deterministic=seed % 2 == 1)
    check(on_the_model, *inputs_of(problem, seed), like_out(problem), problem, seed)


STEP = torch.where(torch.arange(SEQ) < 64, 1e-30, 1e25)
WIDE = {name: lambda q, k, v, dout, change=change: (*change(q, k, v), dout) for name, change in RANGES.items()}
# Where the gradients themselves overflow, or are 0 but for noise.
del WIDE["v near the largest number"], WIDE["constant"], WIDE["scores of 1e11"]
WIDE |= {
    "dout 1e-30": lambda q, k, v, dout: (q, k, v, dout * 1e-30),
    "dout 1e30": lambda q, k, v, dout: (q, k, v, dout * 1e30),
    "dout 1e-30, v 1e30": lambda q, k, v, dout: (q, k, v * 1e30, dout * 1e-30),
    "dout 1e30, v 1e-30": lambda q, k, v, dout: (q, k, v * 1e-30, dout * 1e30),
    "dout and v 1e-17": lambda q, k, v, dout: (q, k, v * 1e-17, dout * 1e-17),
    "dout and v 1e18": lambda q, k, v, dout: (q, k, v * 1e18, dout * 1e18),
    "denormal dout": lambda q, k, v, dout: (q, k, v * 1e20, dout * 1e-40),
    "rows of dout 1e-30 to 1e5": lambda q, k, v, dout: (q, k, v, dout * spread(-30, 5, 1, 1, SEQ, 1)),
    "rows of dout 0": lambda q, k, v, dout: (q, k, v, dout * (torch.arange(SEQ) % 2)[:, None]),
    "an outlier in dout": lambda q, k, v, dout: (q, k, v, with_one(dout, 1e10)),
    "columns of dout against v": lambda q, k, v, dout: (q, k, v / spread(-6, 6, DIM), dout * spread(-6, 6, DIM)),
    "rows of q 1e-12 to 1": lambda q, k, v, dout: (q * spread(-12, 0, 1, 1, SEQ, 1), k, v, dout),
    "rows of k 1e-12 to 1": lambda q, k, v, dout: (q, k * spread(-12, 0, 1, 1, SEQ, 1), v, dout),
    "v 1e-30, then 1e25": lambda q, k, v, dout: (q, k, v * STEP[:, None], dout),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_every_range_is_as_accurate_as_float32(on_the_model, name, mask):
    problem = make_problem(EVERY, mask=mask, needs_grad=True)
    check(on_the_model, *WIDE[name](*inputs_of(problem, seed=3), like_out(problem)), problem)


@emulated
def test_weights_of_rows_that_one_key_dominates_are_exact(on_the_model):
    """Scores in the thousands, whose last bit is worth 1e-4: dv is dout, to the last bit."""
    problem = make_problem((1, 1, 64, 64), needs_grad=True)
    q = k = 1000 * torch.eye(64)[None, None] + torch.randn(1, 1, 64, 64)
    v, dout = torch.randn(2, 1, 1, 64, 64)
    _, _, dv = on_the_model(q, k, v, dout, problem)
    assert torch.equal(dv, dout)


@emulated
def test_the_gradient_of_lse_comes_in(on_the_model):
    problem = make_problem((1, 1, 100, 64), mask=Causal(), needs_grad=True)
    q, k, v = inputs_of(problem)
    dout, dlse = torch.zeros(1, 1, 100, 64), torch.randn(1, 1, 100)
    dq, dk, dv = on_the_model(q, k, v, dout, problem, dlse=dlse)
    want = plain_grads(*(t.double() for t in (q, k, v, dout)), problem, dlse.double())
    for got, truth in zip((dq, dk), want, strict=False):
        assert ((got.double() - truth).norm() / truth.norm()).item() <= budget(torch.float32, 100)
    assert (dv == 0).all()


@emulated
@pytest.mark.parametrize("which", range(3))
def test_only_what_is_wanted_is_made(on_the_model, which):
    problem = make_problem((1, 1, 70, 64), needs_grad=True)
    inputs, dout = inputs_of(problem), like_out(problem)
    every = on_the_model(*inputs, dout, problem)
    some = on_the_model(*inputs, dout, problem, wants=tuple(i == which for i in range(3)))
    assert [grad is not None for grad in some] == [i == which for i in range(3)]
    assert torch.equal(some[which], every[which])


@emulated
def test_rows_may_begin_anywhere(on_the_model):
    problem = make_problem((1, 2, 70, 64), mask=Causal(), layout="bshd", strides=Strides.UNALIGNED, needs_grad=True)
    stored = [torch.randn(1, 70, 2, 67)[..., 3:].transpose(1, 2) for _ in range(4)]
    check(on_the_model, *stored, problem)


@emulated
def test_nan_and_inf_behind_a_mask_do_not_show(on_the_model):
    """Rows before the key that is not finite do not see it, and neither do their gradients."""
    problem = make_problem((1, 1, 100, 64), mask=Causal(), needs_grad=True)
    (q, k, v), dout = inputs_of(problem), like_out(problem)
    dout[0, 0, 80:] = 0
    _, _, want, _, _ = exact(q, k, v, problem, None, dout)
    v[0, 0, 80] = math.nan
    dq, _, _ = on_the_model(q, k, v, dout, problem)
    assert ((dq[0, 0, :80].double() - want[0, 0, :80]).norm() / want[0, 0, :80].norm()).item() <= budget(
        torch.float32, 100
    )
