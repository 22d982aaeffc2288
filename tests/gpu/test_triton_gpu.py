"""The Triton backend by itself: strides and head dims that only it takes, its bits, and calls planned for it."""

from __future__ import annotations

import math

import pytest
import torch
from comparison import BF16, FP16, FP32, RESULTS, compare, computed, needs_triton, problem_of

import tilewise
from support import assert_close, budget, exact, in_order, make_inputs
from tilewise import Causal, Window
from tilewise.triton import backend as triton

# What a compiler of others says about itself is no failure of ours; what we say is.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::triton")]


@needs_triton
def test_any_stride_and_odd_dims() -> None:
    """Where TMA and cp.async cannot go: Triton and the reference only."""
    problem = problem_of((3, 1), (130, 77), (13, 7), mask=Causal("bottom-right"), dtype=FP16)
    assert "triton" in compare(problem)
    q, k, v = (torch.randn(1, 2, 64, 200, device="cuda", dtype=FP16).transpose(2, 3) for _ in range(3))
    scattered = problem_of((2, 2), (200, 200), (64, 64), dtype=FP16, mask=Causal())
    out, _ = triton.forward(q, k, v, scattered)
    assert_close(out, exact(q, k, v, scattered)[0], budget(FP16, 200))
    assert tilewise.explain(q, k, v, mask="causal").backend == "triton"


@needs_triton
def test_the_same_bits_every_time() -> None:
    problem = problem_of((8, 2), (1000, 1000), (128, 128), 2, mask=Causal())
    inputs = make_inputs(problem, "cuda")
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 8, 1000, device="cuda")
    first = computed("triton", problem, inputs, dout, dlse)
    for _ in range(5):
        again = computed("triton", problem, inputs, dout, dlse)
        assert all(torch.equal(again[name], first[name]) for name in RESULTS)


@needs_triton
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_hidden_values_never_show(dtype: torch.dtype, value: float) -> None:
    length, bad = 300, 150
    for mask in (Causal(), Window(40, 0)):
        problem = problem_of((2, 1), (length, length), (64, 64), mask=mask, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        rows = mask.to_bool(range(length), range(length), length, length, "cuda")[:, bad]
        clean, _ = triton.forward(q, k, v, problem)
        for spoiled in ("k", "v"):
            given = {"k": k.clone(), "v": v.clone()}
            given[spoiled][:, :, bad] = value
            out, _ = triton.forward(q, given["k"], given["v"], problem)
            assert_close(out[:, :, ~rows], clean[:, :, ~rows], budget(dtype, length), f"{spoiled} {value} {mask}")
            assert not out[:, :, rows].isfinite().all()


@needs_triton
def test_more_heads_than_a_grid_has_rows_and_more_elements_than_32_bits_count() -> None:
    many = problem_of((1, 1), (16, 16), (16, 16), 70_000, needs_grad=False)
    q, k, v = make_inputs(many, "cuda")
    out, _ = triton.forward(q, k, v, many)
    tail = slice(69_990, None)
    assert_close(out[tail], exact(q[tail], k[tail], v[tail], many.with_(batch=10))[0], budget(BF16, 16))
    del q, k, v, out
    far = problem_of((2, 2), (300, 300), (64, 64), mask=Causal())
    room = torch.randn(1, 2, 300, 1 << 23, device="cuda", dtype=BF16)  # a head reaches past 2^31 elements
    q = room[..., :64]
    out, lse = triton.forward(q, q, q, far)
    dout = torch.randn_like(out)
    want, _, *grads = exact(q, q, q, far, None, dout)
    assert_close(out, want, budget(BF16, 300))
    for got, true in zip(in_order(triton.backward(dout, None, q, q, q, out, lse, far)), grads, strict=True):
        assert_close(got, true, 4 * budget(BF16, 300))


@needs_triton
def test_trained_through_the_front_door_and_in_a_graph() -> None:
    """Heads of 62 under a softcap: nobody else takes them."""
    problem = problem_of((4, 2), (256, 256), (62, 62), dtype=FP32, softcap=20.0, needs_lse=False)
    q, k, v = make_inputs(problem, "cuda", grad=True)
    assert tilewise.explain(q, k, v, softcap=20.0).backend == "triton"
    out = tilewise.attention(q, k, v, softcap=20.0)
    dout = torch.randn_like(out)
    want, _, *wanted = exact(q, k, v, problem, None, dout)
    assert_close(out, want, budget(FP32, 256))
    for got, true in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        assert_close(got, true, 4 * budget(FP32, 512))
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tilewise.attention(q, k, v, softcap=20.0, backend="triton")
        captured.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
    assert_close(captured, want, budget(FP32, 256))
