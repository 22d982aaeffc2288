"""The backward of a fused backend on a GPU: against float64, held to 1.25 x the error of PyTorch's best kernel.

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
    strided,
    strided_inputs,
    visible_pairs,
)
from torch.nn.attention import sdpa_kernel

import tilewise
from support import exact, in_order, make_inputs, rounding_budget, wanted
from tilewise import Causal, Full, Problem, Window
from tilewise.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewise.engine.backend import Fused
    from tilewise.masks import Mask

problem_of = functools.partial(matrix.problem_of, needs_grad=True)


def like_out(problem: Problem) -> Tensor:
    return torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v, device="cuda").to(
        problem.dtype
    )


def gradients(
    backend: Fused, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of our kernels."""
    assert backend.why_not(problem, Target.of("cuda")) == []
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    return in_order(backend.backward(dout, None, q, k, v, out, lse, problem, config))  # type: ignore[return-value]


def rounded_like_torch(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    """What a fused kernel gives: out, P and dS rounded to 16 bits, everything else in float32."""
    narrow = lambda t: t.to(problem.dtype).float()
    q32, dout32 = q.float(), dout.float()
    k32, v32 = (t.float().repeat_interleave(problem.group, 1) for t in (k, v))
    scores, slope = q32 @ k32.mT * problem.scale, 1.0
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * bent, 1 - bent * bent
    p = torch.softmax(scores.masked_fill(~visible_pairs(problem), -math.inf), -1).nan_to_num(0.0)
    delta = (dout32 * narrow(p @ v32)).sum(-1, keepdim=True)
    ds = narrow(p * (dout32 @ v32.mT - delta) * slope)
    summed = lambda t: t.unflatten(1, (problem.heads_kv, problem.group)).sum(2)
    dq, dk = ds @ k32 * problem.scale, summed(ds.mT @ q32) * problem.scale
    return tuple(t.to(problem.dtype) for t in (dq, dk, summed(narrow(p).mT @ dout32)))


def best_of_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, truth: tuple[Tensor, ...]
) -> list[float]:
    """For each gradient the smallest error among PyTorch's kernels that take the problem, and their model above."""
    best = [relative_error(g, w) for g, w in zip(rounded_like_torch(dout, q, k, v, problem), truth, strict=True)]
    top_left = problem.mask == Causal("top-left")
    if problem.softcap or not (problem.mask == Full() or top_left):
        return best
    for kernel in PYTORCH:
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        try:
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(
                    *inputs, is_causal=top_left, scale=problem.scale, enable_gqa=problem.group > 1
                )
            grads = torch.autograd.grad(out, inputs, dout)
        except RuntimeError:
            continue
        best = [min(b, relative_error(g, w)) for b, g, w in zip(best, grads, truth, strict=True)]
    return best


def check(
    backend: Fused,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    note: str = "",
    config: Any = None,
) -> None:
    got = gradients(backend, dout, q, k, v, problem, config)
    _, lse, *truth = exact(q, k, v, problem, None, dout)
    what = f"{problem} {note}"
    for grad, tensor in zip(got, (q, k, v), strict=True):
        assert grad.shape == tensor.shape
        assert grad.dtype == tensor.dtype
        assert not grad.isnan().any(), what
    # Gradients that cancel to almost nothing (a row that sees one key) are measured against their terms.
    terms = dout.double().norm() * max(1.0, v.double().norm(dim=-1).max().item()) * abs(problem.scale)
    others = [k, q, q]
    bests = best_of_torch(dout, q, k, v, problem, tuple(truth))
    for name, grad, want, other, best in zip(("dq", "dk", "dv"), got, truth, others, bests, strict=True):
        # Rounding noise of a small tensor: the norm of n errors is known to about 1 / sqrt(2 n).
        noise = torch.finfo(problem.dtype).eps * (2 / math.sqrt(grad.numel()))
        floor = (
            16
            * torch.finfo(torch.float32).eps
            * (terms * other.double().norm(dim=-1).max() if name != "dv" else want.norm())
        )
        wrong = (grad.double() - want).norm()
        allowed = (1.25 * best + noise) * want.norm() + floor
        assert wrong <= allowed, f"{what} {name}: error {wrong:.3e}, allowed {allowed:.3e}, norm {want.norm():.3e}"
    blind = lse == -math.inf
    assert (got[0][blind] == 0).all(), what
    unseen = ~visible_pairs(problem).any(0)
    assert (got[1][:, :, unseen] == 0).all(), what
    assert (got[2][:, :, unseen] == 0).all(), what


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_head_dim_and_mask(backend: Fused, dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    problem = problem_of(2, (4, 2), (300, 411), dims, mask=mask, dtype=dtype)
    check(backend, like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_every_length(backend: Fused, dims: tuple[int, int], mask: Mask, lengths: tuple[int, int]) -> None:
    problem = problem_of(2, (2, 2), lengths, dims, mask=mask)
    check(backend, like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_groups_and_layouts(backend: Fused, heads: tuple[int, int], layout: str) -> None:
    for mask in (Full(), Causal(), Window(200, 0)):
        problem = problem_of(4, heads, (1000, 1000), (64, 64), mask=mask, layout=layout)
        check(backend, like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(backend: Fused, dims: tuple[int, int], softcap: float, dtype: torch.dtype) -> None:
    for mask in (Full(), Causal(), Window(128, 0)):
        problem = problem_of(1, (4, 2), (600, 600), dims, mask=mask, softcap=softcap, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        check(backend, like_out(problem), q * 8, k, v, problem)


def large_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    dout.mul_(100)


def tiny_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    dout.mul_(2.0**-8)


KINDS = [*map(scaled, (0.01, 2, 6, 20)), constant_rows, one_outlier, large_gradients, tiny_gradients]


@pytest.mark.parametrize("change", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_hard_inputs(backend: Fused, dims: tuple[int, int], dtype: torch.dtype, change) -> None:  # type: ignore[no-untyped-def]
    for mask in (Full(), Causal()):
        problem = problem_of(1, (2, 2), (512, 2048), dims, mask=mask, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem)
        change(q, k, v, dout)
        check(backend, dout, q, k, v, problem, change.__name__)


@pytest.mark.parametrize("draw", range(40))
def test_random_shapes_and_strides(backend: Fused, draw: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    problem = random_problem(rng, needs_grad=True, deterministic=rng.choice([False, False, True]))
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    check(backend, strided(shape, problem.dtype, rng), *strided_inputs(problem, rng), problem, f"seed {seed}")


@pytest.mark.parametrize(
    "change",
    [lambda t: t.expand(t.shape).transpose(2, 3).contiguous().transpose(2, 3), lambda t: t[..., :1].expand(t.shape)],
    ids=["transposed", "expanded"],
)
def test_any_strides_of_the_incoming_gradient(backend: Fused, change) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(2, (4, 2), (200, 300), (64, 64), mask=Causal())
    check(backend, change(like_out(problem)), *make_inputs(problem, "cuda"), problem)


def test_expanded_keys_and_values(backend: Fused) -> None:
    problem = problem_of(3, (4, 4), (200, 300), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    k, v = (t[:1, :1].expand(t.shape) for t in (k, v))
    check(backend, like_out(problem), q, k, v, problem)


def test_the_gradient_of_the_log_sum_exp(backend: Fused) -> None:
    for softcap in (0.0, 5.0):
        problem = problem_of(2, (4, 2), (300, 411), (64, 64), mask=Causal(), softcap=softcap, needs_lse=True)
        q, k, v = make_inputs(problem, "cuda", grad=True)
        dout, dlse = like_out(problem), torch.randn(2, 4, 300, device="cuda")
        asked = {"mask": "causal", "softcap": softcap, "return_lse": True}
        out, lse = tilewise.attention(q, k, v, **asked, backend=backend.name)
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        want = torch.autograd.grad(
            tilewise.attention(*wide, **asked, backend="reference"), wide, (dout.double(), dlse.double())
        )
        assert all(relative_error(g, w) <= rounding_budget(problem.dtype, 4) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal("bottom-right"), Window(200, 10)], ids=str)
@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
def test_deterministic_gradients_are_the_same_bits_every_time(
    backend: Fused, dims: tuple[int, int], mask: Mask
) -> None:
    problem = problem_of(4, (8, 4), (1111, 1200), dims, mask=mask, deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    first = gradients(backend, dout, q * 2, k, v, problem)
    for _ in range(20):
        again = gradients(backend, dout, q * 2, k, v, problem)
        assert all_equal(first, again)


# Few or long tiles of keys, which are cut into pieces: one KV head, few keys, few heads, a window.
CUT = [
    ((8, 1), (2048, 2048), Full()),
    ((8, 1), (2048, 2048), Causal()),
    ((32, 4), (1024, 300), Full()),
    ((32, 4), (1024, 300), Causal("bottom-right")),
    ((16, 1), (900, 77), Full()),
    ((7, 1), (3000, 1500), Causal("bottom-right")),
    ((8, 1), (3000, 2500), Window(900, 20)),
]


def is_cut(backend: Fused, problem: Problem) -> bool:
    _, family = backend.families(problem)
    target = Target.of("cuda")
    return bool(family.divide(problem, family.configs(problem, target)[0], target).cut)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
@pytest.mark.parametrize(("heads", "lengths", "mask"), CUT, ids=str)
def test_tiles_of_keys_in_pieces(
    backend: Fused,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    mask: Mask,
    dims: tuple[int, int],
    deterministic: bool,
) -> None:
    problem = problem_of(1, heads, lengths, dims, mask=mask, deterministic=deterministic)
    assert is_cut(backend, problem)
    check(backend, like_out(problem), *make_inputs(problem, "cuda"), problem)


def test_pieces_with_a_softcap_and_without_some_gradients(backend: Fused) -> None:
    capped = problem_of(1, (8, 1), (1500, 700), (128, 128), mask=Causal("bottom-right"), softcap=20.0)
    assert is_cut(backend, capped)
    check(backend, like_out(capped), *make_inputs(capped, "cuda"), capped)
    problem = problem_of(1, (8, 1), (1500, 700), (128, 128), deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    everything = gradients(backend, dout, q, k, v, problem)
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    for wants in ((True, False, False), (False, True, True), (False, True, False), (False, False, True)):
        got = in_order(backend.backward(dout, None, q, k, v, out, lse, problem, wants=wanted(*wants)))
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(300, 10)], ids=str)
@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
def test_deterministic_pieces_are_the_same_bits_every_time(backend: Fused, dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(1, (8, 1), (1500, 1111), dims, mask=mask, deterministic=True)
    assert is_cut(backend, problem)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    first = gradients(backend, dout, q * 2, k, v, problem)
    for _ in range(20):
        assert all_equal(first, gradients(backend, dout, q * 2, k, v, problem))


def test_the_switch_of_pytorch_makes_gradients_deterministic(backend: Fused) -> None:
    q, k, v = (torch.randn(2, 4, 2000, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        outs = [tilewise.attention(q, k, v, backend=backend.name) for _ in range(5)]
        runs = [torch.autograd.grad(out, (q, k, v), dout) for out in outs]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(all_equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("seq_kv", [100, 700])
def test_only_what_is_wanted(backend: Fused, seq_kv: int) -> None:
    problem = problem_of(2, (4, 2), (300, seq_kv), (64, 64), deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    everything = gradients(backend, dout, q, k, v, problem)
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    for bits in range(8):
        wants = (bool(bits & 1), bool(bits & 2), bool(bits & 4))
        got = in_order(backend.backward(dout, None, q, k, v, out, lse, problem, wants=wanted(*wants)))
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None  # type: ignore[arg-type]


def test_memory_stays_linear(backend: Fused) -> None:
    def extra(seq: int) -> int:
        problem = problem_of(1, (4, 4), (seq, seq), (128, 128), mask=Causal())
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem)
        out, lse = backend.forward(q, k, v, problem)
        assert lse is not None
        backend.backward(dout, None, q, k, v, out, lse, problem)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = in_order(backend.backward(dout, None, q, k, v, out, lse, problem))
        held = sum(g.numel() * g.element_size() for g in grads if g is not None)
        return torch.cuda.max_memory_allocated() - before - held

    short, long = extra(4096), extra(16384)
    assert long <= 4.1 * short


def test_streams_and_graphs(backend: Fused) -> None:
    problem = problem_of(4, (8, 8), (700, 700), (64, 64), mask=Causal(), deterministic=True)
    inputs = [(like_out(problem), *make_inputs(problem, "cuda")) for _ in range(4)]
    wanted = [[g.clone() for g in gradients(backend, *tensors, problem)] for tensors in inputs]
    forwards = [backend.forward(*tensors[1:], problem) for tensors in inputs]

    def again(index: int) -> list[Tensor]:
        dout, q, k, v = inputs[index]
        out, lse = forwards[index]
        assert lse is not None
        return list(in_order(backend.backward(dout, None, q, k, v, out, lse, problem)))  # type: ignore[arg-type]

    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append(again(index))
        torch.cuda.synchronize()
        assert all(map(all_equal, got, wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [again(index) for index in range(len(inputs))]
    for _ in range(3):
        for one in captured:
            for grad in one:
                grad.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(all_equal, captured, wanted))


def causal_attention(backend: Fused) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    name = backend.name

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask="causal", backend=name)

    return attend


def test_checkpointing_compile_and_autocast(backend: Fused) -> None:
    q, k, v = (torch.randn(2, 4, 500, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    attend = causal_attention(backend)
    plain = torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    saved = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    for out in (saved, compiled):
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), plain, strict=True):
            assert relative_error(a, b.double()) <= rounding_budget(BF16, 1)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cuda", dtype=BF16):
        out = tilewise.scaled_dot_product_attention(*wide, is_causal=True)
    for a, b in zip(torch.autograd.grad(out, wide, dout), plain, strict=True):
        assert relative_error(a, b.double()) <= rounding_budget(BF16, 2 * 4)


def test_gradients_accumulate(backend: Fused) -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    attend = causal_attention(backend)
    for _ in range(3):
        attend(q, k, v).float().square().sum().backward()
    once = torch.autograd.grad(attend(q, k, v).float().square().sum(), (q, k, v))
    for tensor, grad in zip((q, k, v), once, strict=True):
        assert tensor.grad is not None
        assert relative_error(tensor.grad, 3 * grad.double()) <= rounding_budget(BF16, 4)


def test_offsets_beyond_two_to_the_31(backend: Fused) -> None:
    problem = problem_of(2, (2, 2), (300, 300), (64, 64), mask=Causal())
    check(backend, *(far_apart(2, 300, 64) for _ in range(4)), problem)


def test_an_empty_problem(backend: Fused) -> None:
    problem = problem_of(2, (2, 2), (5, 0), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    dq, dk, dv = in_order(backend.backward(like_out(problem), None, q, k, v, out, lse, problem))
    assert dq is not None
    assert (dq == 0).all()
    assert dk is not None
    assert dk.shape == k.shape
    assert dv is not None


def few_shapes(backend: Fused, lengths: list[tuple[int, int]]) -> None:
    for number, (dims, mask, softcap) in enumerate(FEW_SHAPES):
        for seqs in lengths:
            problem = problem_of(2, (4, 2), seqs, dims, mask=mask, softcap=softcap, deterministic=number == 1)
            gradients(backend, like_out(problem), *make_inputs(problem, "cuda"), problem)
            torch.cuda.synchronize()
            print("ran", problem)


# A file of tests takes them all, and no helper: `from backward_matrix import *`.
__all__ = [name for name in list(globals()) if name.startswith("test_")]
