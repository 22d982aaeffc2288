"""The forward of a fused backend on a GPU: against float64, held to 1.1 x the error of PyTorch's best kernel.

The cases of every backend that has such kernels; `backend` is the module of the file that takes them (conftest.py).
"""

from __future__ import annotations

import functools
import math
import os
import random
from typing import TYPE_CHECKING, Any

import matrix
import pytest
import torch
import torch.nn.functional as F
from matrix import (
    BF16,
    DIMS,
    FEW_SHAPES,
    FP16,
    LENGTHS,
    MASKS,
    PYTORCH,
    Tensor,
    all_equal,
    constant_rows,
    far_apart,
    one_outlier,
    random_problem,
    relative_error,
    scaled,
    strided_inputs,
    visible_pairs,
)
from torch.nn.attention import sdpa_kernel

from support import exact, lse_budget, make_inputs, rounding_budget
from tilewise import Causal, Full, Problem, Window
from tilewise.problem import describe
from tilewise.target import Target

if TYPE_CHECKING:
    from tilewise.engine.backend import Fused
    from tilewise.masks import Mask

problem_of = functools.partial(matrix.problem_of, needs_lse=True)


def run(backend: Fused, q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Any = None) -> tuple[Tensor, Tensor]:
    """One call."""
    assert backend.why_not(problem, Target.of("cuda")) == []
    out, lse = backend.forward(q, k, v, problem, config)
    assert lse is not None
    return out, lse


def rounded_like_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """What a fused kernel with a running maximum gives: p rounded to 16 bits, everything else in float32."""
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q.float() @ k.float().mT * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~visible_pairs(problem), -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0)
    total = p.sum(-1, keepdim=True)
    return ((p.to(q.dtype).float() @ v.float()) / torch.where(total == 0, 1.0, total)).to(q.dtype)


def best_of_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem, truth: Tensor) -> float:
    """The smallest error among PyTorch's kernels that take the problem, and the model of one above."""
    errors = [relative_error(rounded_like_torch(q, k, v, problem), truth)]
    top_left = problem.mask == Causal("top-left")
    if problem.softcap or not (problem.mask == Full() or top_left):
        return errors[0]
    for kernel in PYTORCH:
        try:
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=top_left, scale=problem.scale, enable_gqa=problem.group > 1
                )
        except RuntimeError:
            continue
        errors.append(relative_error(out, truth))
    return min(errors)


def check(
    backend: Fused, q: Tensor, k: Tensor, v: Tensor, problem: Problem, note: str = "", config: Any = None
) -> None:
    out, lse = run(backend, q, k, v, problem, config)
    truth, truth_lse = exact(q, k, v, problem)
    what = f"{problem} {note}"
    assert not out.isnan().any(), what
    # Rounding noise of a small tensor: the norm of n errors is known to about 1 / sqrt(2 n).
    noise = torch.finfo(problem.dtype).eps * 2 / math.sqrt(out.numel())
    limit = 1.1 * best_of_torch(q, k, v, problem, truth) + noise
    if truth.norm() > 0:
        wrong = relative_error(out, truth)
        assert wrong <= limit, f"{what}: error {wrong:.3e}, allowed {limit:.3e}"
    else:
        assert (out == 0).all(), what
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), what
    assert (lse[~seen] == -math.inf).all(), what
    assert (out[~seen] == 0).all(), what
    # Twice: the exponentials and the logarithm of the hardware are approximate.
    assert ((lse.double() - truth_lse)[seen].abs() <= 2 * lse_budget(q, k, problem)).all(), what


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_head_dim_and_mask(backend: Fused, dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    problem = problem_of(2, (4, 2), (300, 411), dims, mask=mask, dtype=dtype)
    check(backend, *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_every_length(backend: Fused, dims: tuple[int, int], mask: Mask, lengths: tuple[int, int]) -> None:
    problem = problem_of(2, (2, 2), lengths, dims, mask=mask)
    check(backend, *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_many_tiles_a_cta_in_every_layout(backend: Fused, heads: tuple[int, int], layout: str) -> None:
    for mask in (Full(), Causal(), Window(200, 0)):
        problem = problem_of(4, heads, (1000, 1000), (64, 64), mask=mask, layout=layout)
        check(backend, *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(backend: Fused, dims: tuple[int, int], softcap: float) -> None:
    for mask in (Full(), Causal(), Window(128, 0)):
        problem = problem_of(1, (4, 2), (600, 600), dims, mask=mask, softcap=softcap)
        q, k, v = make_inputs(problem, "cuda")
        check(backend, q * 8, k, v, problem)


def rising(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Every key outdoes those after it: tiles are visited from the last, so each raises the maximum."""
    direction = torch.randn(q.shape[-1], device=q.device)
    q.copy_(direction.expand_as(q))
    k.copy_(direction * torch.linspace(3, 0, k.shape[2], device=k.device)[:, None])


def large_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    v.mul_(1000)


def tiny_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    v.mul_(2.0**-10)


KINDS = [*map(scaled, (0.01, 1.5, 2, 3, 6, 20, 200)), constant_rows, one_outlier, rising, large_values, tiny_values]


@pytest.mark.parametrize("change", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_hard_inputs(backend: Fused, dims: tuple[int, int], dtype: torch.dtype, change) -> None:  # type: ignore[no-untyped-def]
    for mask in (Full(), Causal()):
        problem = problem_of(1, (2, 2), (512, 2048), dims, mask=mask, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        change(q, k, v)
        check(backend, q, k, v, problem, change.__name__)


@pytest.mark.parametrize("draw", range(40))
def test_random_shapes_and_strides(backend: Fused, draw: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    problem = random_problem(rng, needs_lse=True)
    check(backend, *strided_inputs(problem, rng), problem, f"seed {seed}")


def test_expanded_keys_and_values(backend: Fused) -> None:
    problem = problem_of(3, (4, 4), (200, 300), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    k, v = (t[:1, :1].expand(t.shape) for t in (k, v))
    check(backend, q, k, v, problem)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(200, 10)], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_the_same_bits_every_time(backend: Fused, dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(4, (8, 4), (1111, 1111), dims, mask=mask)
    q, k, v = make_inputs(problem, "cuda")
    first = run(backend, q * 2, k, v, problem)
    for _ in range(8):
        again = run(backend, q * 2, k, v, problem)
        assert all_equal(first, again)


@pytest.mark.parametrize("mask", [Causal(), Causal("bottom-right"), Window(100, 30), Window(None, 0)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_hidden_values_never_show(backend: Fused, dims: tuple[int, int], bad: float, mask: Mask) -> None:
    problem = problem_of(1, (4, 4), (500, 640), dims, mask=mask)
    q, k, v = make_inputs(problem, "cuda")
    visible = visible_pairs(problem)
    clean, _ = run(backend, q, k, v, problem)
    for key in (0, 77, 130, 255, 256, 400, 450, 639):
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        blind = ~visible[:, key]
        for keys, values in ((spoilt_k, v), (k, spoilt_v), (spoilt_k, spoilt_v)):
            out, lse = run(backend, q, keys, values, problem)
            # Not bit for bit: a neighbour row's NaN may send the warp down its careful path.
            if blind.any():
                assert relative_error(out[:, :, blind], clean[:, :, blind].double()) <= rounding_budget(BF16, 2 * 2), (
                    key
                )
            assert not lse[:, :, blind].isnan().any()
        out, _ = run(backend, q, k, spoilt_v, problem)
        assert not out[:, :, ~blind].isfinite().any()


def test_offsets_beyond_two_to_the_31(backend: Fused) -> None:
    problem = problem_of(2, (2, 2), (300, 300), (64, 64), mask=Causal())
    check(backend, *(far_apart(2, 300, 64) for _ in range(3)), problem)


def test_large_outputs(backend: Fused) -> None:
    """An output of more than 2^31 elements, spot-checked on its last head."""
    problem = problem_of(1, (1100, 1), (16384, 64), (128, 128), needs_lse=False)
    q, k, v = make_inputs(problem, "cuda")
    out, _ = backend.forward(q, k, v, problem)
    one = problem.with_(heads_q=1)
    truth, _ = exact(q[:, -1:], k, v, one)
    assert relative_error(out[:, -1:], truth) <= rounding_budget(BF16, 2)


def test_streams_and_graphs(backend: Fused) -> None:
    problem = problem_of(8, (8, 8), (700, 700), (64, 64), mask=Causal())
    inputs = [make_inputs(problem, "cuda") for _ in range(4)]
    wanted = [run(backend, *tensors, problem)[0].clone() for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        outs = []
        for stream, tensors in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(backend.forward(*tensors, problem)[0])
        torch.cuda.synchronize()
        assert all_equal(outs, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [backend.forward(*tensors, problem)[0] for tensors in inputs]
    for _ in range(3):
        for out in captured:
            out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all_equal(captured, wanted)


def test_an_empty_problem(backend: Fused) -> None:
    problem = problem_of(2, (2, 2), (5, 0), (64, 64))
    out, lse = backend.forward(*make_inputs(problem, "cuda"), problem)
    assert (out == 0).all()
    assert lse is not None
    assert (lse == -math.inf).all()


def test_describe_and_refusals_agree(backend: Fused) -> None:
    q = torch.randn(1, 2, 64, 72, device="cuda", dtype=BF16)
    assert backend.why_not(describe(q, q, q), Target.of("cuda")) == []
    assert backend.why_not(describe(q[..., 4:68], q[..., 4:68], q[..., 4:68]), Target.of("cuda"))


def few_shapes(backend: Fused) -> None:
    for dims, mask, softcap in FEW_SHAPES:
        problem = problem_of(2, (4, 2), (333, 444), dims, mask=mask, softcap=softcap)
        q, k, v = make_inputs(problem, "cuda")
        v[:, :, 440, 3] = math.nan
        backend.forward(q * 30, k, v, problem)
        torch.cuda.synchronize()
        print("ran", problem)


# A file of tests takes them all, and no helper: `from forward_matrix import *`.
__all__ = [name for name in list(globals()) if name.startswith("test_")]
