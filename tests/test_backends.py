"""One matrix: every backend that is willing matches float64 within the derived budget; every refusal gives reasons."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import (
    assert_close,
    budget,
    exact,
    in_order,
    make_bias,
    make_inputs,
    make_problem,
    masks_with_lengths,
    wanted,
)
from tilewise import Causal, Dense, Documents, Full, Target, Window
from tilewise.plain import reference, tiled
from tilewise.plan import BACKENDS
from tilewise.problem import mask_operands

CPU = Target.of("cpu")

SHAPES = {
    "plain": {},
    "grouped": {"heads_q": 6, "heads_kv": 2},
    "one key head": {"heads_q": 4, "heads_kv": 1},
    "short queries": {"seq_q": 5},
    "one query": {"seq_q": 1},
    "short keys": {"seq_kv": 9},
    "narrow values": {"head_dim_v": 8},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.5},
    "bshd": {"layout": "bshd"},
    "odd sizes": {"seq_q": 37, "seq_kv": 53, "head_dim": 13, "head_dim_v": 7},
}
MASKS = {
    "full": lambda p: Full(),
    "causal": lambda p: Causal(),
    "causal bottom-right": lambda p: Causal("bottom-right"),
    "window": lambda p: Window(4, 1),
    "window bottom-right": lambda p: Window(3, 0, "bottom-right"),
    "causal, first rows hidden": lambda p: Causal(offset=-p.seq_q // 3),
    "window of a shard": lambda p: Window(6, 2, "bottom-right", offset=5),
    "documents": lambda p: Documents(
        (0, p.seq_q // 3, p.seq_q // 3, p.seq_q), (0, p.seq_kv // 4, p.seq_kv // 2, p.seq_kv), Causal()
    ),
    "boolean": lambda p: Dense((p.batch, 1, p.seq_q, p.seq_kv)),
    "additive": lambda p: Dense((p.heads_q, p.seq_q, p.seq_kv), additive=True),
}


def problem_of(shape: str, mask: str, dtype: torch.dtype):
    problem = make_problem((2, 4, 40, 16), dtype, needs_grad=True, **SHAPES[shape])
    return problem.with_(mask=MASKS[mask](problem))


EVERY = list(product(BACKENDS, SHAPES, MASKS))
ON_CPU = [name for name, backend in BACKENDS.items() if not backend.why_not(make_problem((2, 3, 8, 16)), CPU)]


def refusal(name: str, shape: str, mask: str):
    return BACKENDS[name].why_not(problem_of(shape, mask, torch.float32), CPU)


REFUSED_SHAPES = {  # on a CPU; every mask is taken by whoever takes the shape
    "torch-flash": {"softcap", "narrow values", "odd sizes"},
    "torch-math": {"softcap"},
    "tiled": set(),
    "reference": set(),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_refuses_what_is_stated_and_no_more(name):
    refused = {(shape, mask): refusal(name, shape, mask) for shape, mask in product(SHAPES, MASKS)}
    stated = REFUSED_SHAPES.get(name, set(SHAPES))
    assert {row for row, reasons in refused.items() if reasons} == set(product(stated, MASKS))
    assert all(reason.what and reason.remedy for reasons in refused.values() for reason in reasons)


@pytest.mark.parametrize(("name", "shape", "mask"), [row for row in EVERY if not refusal(*row)])
def test_forward_and_backward_match_float64(name, shape, mask):
    backend = BACKENDS[name]
    problem = problem_of(shape, mask, torch.float32)
    q, k, v = make_inputs(problem)
    bias = make_bias(problem)
    out, lse = backend.forward(q, k, v, problem, None, mask_operands(bias))
    dout = torch.randn_like(out)
    want_out, want_lse, *want_grads = exact(q, k, v, problem, bias, dout)
    tolerance = budget(torch.float32, problem.seq_kv)
    assert_close(out, want_out, tolerance)
    if lse is not None:
        assert_close(lse, want_lse, tolerance, "lse")
    grads = in_order(backend.backward(dout, None, q, k, v, out, lse, problem, None, mask_operands(bias)))
    for grad, want, what in zip(grads, want_grads, ("dq", "dk", "dv"), strict=True):
        assert_close(grad, want, 4 * tolerance, what)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ON_CPU)
def test_low_precision_within_its_rounding(name, dtype):
    problem = problem_of("grouped", "causal", dtype)
    q, k, v = make_inputs(problem)
    out, lse = BACKENDS[name].forward(q, k, v, problem)
    dout = torch.randn_like(out)
    want_out, _, *want_grads = exact(q, k, v, problem, None, dout)
    assert out.dtype == dtype
    assert_close(out, want_out, budget(dtype))
    for grad, want in zip(
        in_order(BACKENDS[name].backward(dout, None, q, k, v, out, lse, problem)), want_grads, strict=True
    ):
        assert grad.dtype == dtype
        assert_close(grad, want, 2 * budget(dtype), "gradient")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ON_CPU)
def test_out_has_the_memory_order_of_the_layout(name, layout):
    problem = make_problem((2, 3, 8, 16), layout=layout)
    out, _ = BACKENDS[name].forward(*make_inputs(problem), problem)
    stored = out.transpose(1, 2) if layout == "bshd" else out
    assert stored.is_contiguous()


@pytest.mark.parametrize("backend", [reference, tiled])
@given(masks_with_lengths(), st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**20))
@settings(max_examples=80)
def test_any_mask_any_tile(backend, case, block_q, block_kv, seed):
    """Random masks and lengths, zero included, over tiles that cut them anywhere; lse carries a gradient too."""
    mask, seq_q, seq_kv = case
    torch.manual_seed(seed)
    problem = make_problem((1, 2, seq_q, 3), torch.float64, seq_kv=seq_kv, mask=mask, needs_grad=True, needs_lse=True)
    q, k, v = make_inputs(problem, grad=True)
    config = tiled.Config(block_q, block_kv) if backend is tiled else None
    with torch.no_grad():
        out, lse = backend.forward(q, k, v, problem, config)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    want_out, want_lse = reference.forward(q, k, v, problem)
    tolerance = budget(torch.float64, seq_kv)
    assert_close(out, want_out, tolerance)
    assert_close(lse, want_lse, tolerance, "lse")
    seen = torch.where(want_lse.isinf(), 0.0, want_lse)
    loss = (want_out * dout).sum() + (seen * dlse).sum()
    wants = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    dlse = dlse.masked_fill(want_lse.isinf(), 0.0)
    with torch.no_grad():
        grads = in_order(backend.backward(dout, dlse, q, k, v, out, lse, problem, config))
    for grad, want, what in zip(grads, wants, ("dq", "dk", "dv"), strict=True):
        assert_close(grad, want, 4 * budget(torch.float64, max(seq_q, seq_kv)), what)


@pytest.mark.parametrize("backend", [reference, tiled])
def test_unwanted_gradients_are_not_computed(backend):
    problem = make_problem((1, 2, 8, 4), torch.float64)
    q, k, v = make_inputs(problem)
    out, lse = backend.forward(q, k, v, problem)
    everything = in_order(backend.backward(out, None, q, k, v, out, lse, problem))
    for index in range(3):
        wants = tuple(i == index for i in range(3))
        grads = in_order(backend.backward(out, None, q, k, v, out, lse, problem, wants=wanted(*wants)))
        assert [grad is not None for grad in grads] == list(wants)
        assert torch.equal(grads[index], everything[index])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Causal(), Window(2, 0), Documents((0, 4, 8))])
def test_reference_keeps_hidden_poison_out(mask, value):
    problem = make_problem((1, 2, 8, 4), torch.float64, mask=mask)
    q, k, v = make_inputs(problem)
    bad = v.clone()
    bad[:, :, 7] = value
    sees_it = mask.to_bool(range(8), range(8), 8, 8)[:, 7]
    clean, poisoned = reference.forward(q, k, v, problem)[0], reference.forward(q, k, bad, problem)[0]
    assert torch.equal(poisoned[:, :, ~sees_it], clean[:, :, ~sees_it])
    assert not torch.isfinite(poisoned[:, :, sees_it]).any()


def lecture_listing(q, k, v, block):
    """The update rules as the lecture prints them, for one head; see the docstring of tilewise.plain.tiled."""
    total = torch.zeros(len(q), 1, dtype=q.dtype)
    top = torch.full((len(q), 1), -math.inf, dtype=q.dtype)
    last_top, acc = top, torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    for start in range(0, len(k), block):
        scores = q @ k[start : start + block].T / q.shape[1] ** 0.5
        top = torch.maximum(top, scores.max(-1, keepdim=True).values)
        weights = torch.exp(scores - top)
        weights = torch.exp(last_top - top) * total + weights.sum(-1, keepdim=True)
        acc = torch.exp(last_top - top) * acc + weights.expand(-1, block) @ v[start : start + block]
        total = weights
    return acc


def test_the_lecture_listing_is_wrong_and_ours_is_right():
    problem = make_problem((1, 1, 16, 8), torch.float64)
    q, k, v = make_inputs(problem)
    want, _ = exact(q, k, v, problem)
    out, _ = tiled.forward(q, k, v, problem, tiled.Config(16, 4))
    assert_close(out, want, budget(torch.float64, 16))
    listing = lecture_listing(q[0, 0], k[0, 0], v[0, 0], 4)
    assert (listing - want[0, 0]).norm() > 0.5 * want.norm()
