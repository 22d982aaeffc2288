"""The float32 kernels of the backend sm80 on a GPU: at most twice the error of PyTorch's efficient kernel, on every
range, for out and for the gradients.

Where PyTorch's kernel does not take the problem (a softcap, a window), attention in plain float32 operations stands in.
Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm80_float32.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from typing import TYPE_CHECKING

from family import like_out
from float32_cases import DIM, FLOOR, RANGES, SEQ, WIDE, assert_grads_as_good_as, errors, plain_grads

import tilewise
from support import budget, exact, in_order, make_inputs, make_problem, wanted
from tilewise import Causal, Full, Problem, Window
from tilewise.engine import SM80
from tilewise.engine.sm80 import float32_backward as sm80_float32_backward
from tilewise.engine.sm80 import float32_forward as sm80_float32
from tilewise.jit import build_all
from tilewise.lab.model.covering import units_of
from tilewise.problem import describe
from tilewise.target import TARGETS, Target

if TYPE_CHECKING:
    from tilewise.masks import Mask

Tensor = torch.Tensor

ampere = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ampere, reason="needs a GPU of sm_80 or later")]

MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 3), Window(None, 0, "bottom-right"), Window(0, 200)]
DIMS = [(8, 8), (64, 64), (60, 44), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]
NARROW = [dims for dims in DIMS if max(dims) <= sm80_float32_backward.HEAD_DIM_LIMIT]
# Why so many: with scores of 1e3 the last bit of one decides a row, for better or worse, in any float32 kernel.
HEADS = 32
GPUS = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if ampere:
        arch = Target.of("cuda").arch
        units = [unit for unit in units_of(SM80) if "tf32" in unit.name or "float32" in unit.name]
        for _ in build_all(unit for unit in units if unit.arch == arch):
            pass


def run(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: sm80_float32.Config | None = None
) -> tuple[Tensor, Tensor]:
    """One call."""
    assert SM80.why_not(problem, Target.of("cuda")) == []
    out, lse = SM80.forward(q, k, v, problem, config)
    assert lse is not None
    return out, lse


def plain(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q @ k.mT * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv, "cuda")
    hidden = ~visible.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~visible & ~hidden, -math.inf), -1).masked_fill(hidden, 0.0) @ v


def of_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """PyTorch's efficient kernel where it takes the problem."""
    causal = problem.mask == Causal("top-left")
    if problem.softcap or not (causal or problem.mask == Full()):
        return plain(q, k, v, problem)
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=problem.scale)


def check(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: sm80_float32.Config | None = None) -> None:
    out, lse = run(q, k, v, problem, config)
    truth, truth_lse = exact(q, k, v, problem)
    what = f"{problem} {config or ''}"
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), what
    assert (lse[~seen] == -math.inf).all(), what
    assert (out[~seen] == 0).all(), what
    assert not out.isnan().any(), what
    if truth.norm() == 0:
        assert (out == 0).all(), what
        return
    theirs = of_torch(q, k, v, problem)
    if not theirs.isfinite().all():
        theirs = plain(q, k, v, problem)
    (ours, our_row), (their, their_row) = errors(out, truth), errors(theirs, truth)
    assert ours <= 2 * max(their, FLOOR), f"{what}: {ours:.2e}, PyTorch {their:.2e}"
    # One row is one sample: two float32 kernels differ by chance alone.
    assert our_row <= 4 * max(their_row, FLOOR), f"{what}: worst row {our_row:.2e}, PyTorch {their_row:.2e}"


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    problem: Problem,
    config: sm80_float32_backward.Config | None = None,
) -> tuple[Tensor, ...]:
    """Of our forward and backward."""
    out, lse = SM80.forward(q, k, v, problem)
    assert lse is not None
    found = in_order(SM80.backward(dout, None, q, k, v, out, lse, problem, config))
    return tuple(grad for grad in found if grad is not None)


def grads_of_torch(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    """Of PyTorch's efficient kernel where it takes the problem, else of plain float32 operations."""
    causal = problem.mask == Causal("top-left")
    if problem.softcap or not (causal or problem.mask == Full()):
        return plain_grads(q, k, v, dout, problem)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(of_torch(leaves[0], leaves[1], leaves[2], problem), leaves, dout)


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    config: sm80_float32_backward.Config | None = None,
    dout: Tensor | None = None,
    what: str = "",
) -> None:
    assert SM80.why_not(problem, Target.of("cuda")) == []
    dout = like_out(problem).cuda() if dout is None else dout
    got = gradients(q, k, v, dout, problem, config)
    _, _, *truth = exact(q, k, v, problem, None, dout)
    theirs = grads_of_torch(q, k, v, dout, problem)
    if not all(grad.isfinite().all() for grad in theirs):
        theirs = plain_grads(q, k, v, dout, problem)
    magnitudes = plain_grads(q, k, v, dout, problem, magnitudes=True)
    assert_grads_as_good_as(theirs, got, truth, magnitudes, f"{problem} {config or ''} {what}")


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_masks_and_head_dims(dims: tuple[int, int], mask: Mask, softcap: float) -> None:
    fields = {"head_dim_v": dims[1], "mask": mask, "softcap": softcap, "needs_lse": True}
    problem = make_problem((2, 4, 333, dims[0]), heads_kv=2, seq_kv=401, **fields)
    check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_gradients_of_masks_and_head_dims(dims: tuple[int, int], mask: Mask, softcap: float) -> None:
    fields = {"head_dim_v": dims[1], "mask": mask, "softcap": softcap, "needs_grad": True}
    problem = make_problem((2, 4, 333, dims[0]), heads_kv=2, seq_kv=401, **fields)
    check_gradients(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_the_tiles_of_every_gpu(dims: tuple[int, int], name: str) -> None:
    """What other GPUs would run, compiled for this one, where it has the shared memory."""
    here, there = Target.of("cuda"), Target.named(name)
    problem = make_problem(
        (1, 4, 300, dims[0]), heads_kv=2, seq_kv=411, head_dim_v=dims[1], mask=Causal(), needs_lse=True
    )
    tensors = make_inputs(problem, "cuda")
    for config in sm80_float32.configs(problem, there):
        if config.fits(here):
            check(*tensors, problem, config)
    if max(dims) <= sm80_float32_backward.HEAD_DIM_LIMIT:
        for chosen in sm80_float32_backward.configs(problem, there):
            if chosen.fits(here):
                check_gradients(*tensors, problem.with_(needs_grad=True), chosen)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("seqs", [(1, 1), (1, 500), (63, 65), (64, 64), (128, 129), (1000, 77), (2048, 2048)], ids=str)
def test_lengths(seqs: tuple[int, int], mask: Mask) -> None:
    heads = HEADS if 1 in seqs else 3  # one row of three heads would be three samples of an error
    for dim in (64, 128, 256):
        problem = make_problem((1, heads, seqs[0], dim), seq_kv=seqs[1], mask=mask, needs_lse=True)
        tensors = make_inputs(problem, "cuda")
        check(*tensors, problem)
        if dim <= sm80_float32_backward.HEAD_DIM_LIMIT:
            check_gradients(*tensors, problem.with_(needs_grad=True))


@pytest.mark.parametrize(("seq", "dim"), [(4096, 64), (4096, 128), (8192, 128), (1024, 64)])
def test_the_shapes_of_the_benchmark(seq: int, dim: int) -> None:
    """One head of each: the truth in float64 is large."""
    for mask in (Full(), Causal()):
        problem = make_problem((1, 1, seq, dim), mask=mask, needs_lse=True)
        tensors = make_inputs(problem, "cuda")
        check(*tensors, problem)
        check_gradients(*tensors, problem.with_(needs_grad=True))


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_ranges(name: str, mask: Mask) -> None:
    problem = make_problem((1, HEADS, SEQ, DIM), mask=mask, needs_lse=True)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, HEADS, SEQ, DIM, generator=generator) for _ in range(3)]
    check(*(x.cuda() for x in RANGES[name](*inputs)), problem)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_gradients_of_ranges(name: str, mask: Mask) -> None:
    problem = make_problem((1, HEADS, SEQ, DIM), mask=mask, needs_grad=True)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, HEADS, SEQ, DIM, generator=generator) for _ in range(3)]
    q, k, v, dout = (x.cuda() for x in WIDE[name](*inputs, like_out(problem)))
    check_gradients(q, k, v, problem, dout=dout, what=name)


# Few or long tiles of keys, which are cut into pieces.
CUT = [
    ((8, 1), (1500, 1500), Full()),
    ((8, 1), (1500, 1500), Causal()),
    ((32, 4), (1024, 300), Causal("bottom-right")),
    ((16, 1), (900, 77), Full()),
    ((8, 1), (2000, 2000), Window(900, 20)),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("heads", "seqs", "mask"), CUT, ids=str)
def test_gradients_of_keys_in_pieces(
    heads: tuple[int, int], seqs: tuple[int, int], mask: Mask, dim: int, deterministic: bool
) -> None:
    problem = make_problem(
        (1, heads[0], seqs[0], dim),
        heads_kv=heads[1],
        seq_kv=seqs[1],
        mask=mask,
        needs_grad=True,
        deterministic=deterministic,
    )
    target = Target.of("cuda")
    assert sm80_float32_backward.divide(problem, sm80_float32_backward.configs(problem, target)[0], target).cut
    check_gradients(*make_inputs(problem, "cuda"), problem)
    if deterministic:
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem).cuda()
        first = gradients(q, k, v, dout, problem)
        for _ in range(20):
            again = gradients(q, k, v, dout, problem)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_sums_of_pieces_keep_subnormal_numbers() -> None:
    problem = make_problem((1, 8, 600, 64), heads_kv=1, seq_kv=100, needs_grad=True)
    target = Target.of("cuda")
    assert sm80_float32_backward.divide(problem, sm80_float32_backward.configs(problem, target)[0], target).cut
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem).cuda() * 1e-38
    _, _, dv = gradients(q, k, v, dout, problem)
    truth = exact(q, k, v, problem, None, dout)[4]
    assert truth.abs().max().item() < 16 * torch.finfo(torch.float32).tiny
    unit = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps
    assert (dv.double() - truth).abs().max().item() <= problem.group * problem.seq_q * unit


@pytest.mark.parametrize("factor", [60.0, 1000.0])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_backward_has_the_scores_of_the_forward(dim: int, factor: float) -> None:
    """Scores whose last bit is worth up to 1e-2: where one key dominates, dv is dout as far as two parts of it go."""
    problem = make_problem((1, 2, dim, dim), needs_grad=True)
    q = factor * torch.eye(dim, device="cuda") + torch.randn(1, 2, dim, dim, device="cuda")
    v, dout = torch.randn(2, 1, 2, dim, dim, device="cuda")
    _, _, dv = gradients(q, q.clone(), v, dout, problem)
    assert errors(dv, dout.double())[1] <= 3 * FLOOR  # two parts hold 22 bits, and their sum is rounded


def test_nan_and_inf_behind_a_mask_do_not_show() -> None:
    problem = make_problem((1, 2, 300, 64), mask=Causal(), needs_lse=True)
    q, k, v = make_inputs(problem, "cuda")
    truth, _ = exact(q, k, v, problem)
    k[0, 0, 250], v[0, 0, 250], v[0, 1, 200, 5] = math.nan, math.nan, -math.inf
    out, _ = run(q, k, v, problem)
    assert errors(out[0, 0, :250], truth[0, 0, :250])[1] <= budget(torch.float32, 300)
    assert out[0, 0, 250:].isnan().all()
    assert (out[0, 1, 200:, 5] == -math.inf).all()
    others = torch.arange(64, device="cuda") != 5
    assert errors(out[0, 1][:, others], truth[0, 1][:, others])[1] <= budget(torch.float32, 300)


def test_strides() -> None:
    for offset in (0, 4):
        stored = [torch.randn(2, 70, 3, 64 + offset, device="cuda")[..., offset:].transpose(1, 2) for _ in range(3)]
        problem = describe(*stored, mask="causal", needs_lse=True)
        check(*stored, problem)
        check_gradients(*stored, problem.with_(needs_grad=True))
    room = torch.randn(2, 70, 3, 65, device="cuda")[..., 1:].transpose(1, 2)
    assert SM80.why_not(describe(room, room, room), Target.of("cuda"))


def test_expanded_keys_and_values() -> None:
    problem = make_problem((3, 4, 200, 64), seq_kv=300, needs_lse=True, needs_grad=True)
    q, k, v = make_inputs(problem, "cuda")
    k, v = (t[:1, :1].expand(t.shape) for t in (k, v))
    check(q, k, v, problem)
    check_gradients(q, k, v, problem)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_same_bits_every_time(dim: int) -> None:
    for mask in (Full(), Causal(), Window(200, 10)):
        fields = {"heads_kv": 2, "mask": mask, "needs_lse": True, "needs_grad": True, "deterministic": True}
        problem = make_problem((2, 4, 777, dim), **fields)
        q, k, v = make_inputs(problem, "cuda")
        dout = torch.randn_like(q)
        first = (*run(q, k, v, problem), *gradients(q, k, v, dout, problem))
        for _ in range(5):
            again = (*run(q, k, v, problem), *gradients(q, k, v, dout, problem))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_through_autograd() -> None:
    """The operator as users call it, in its own order of roundings, with a gradient of the log-sum-exp."""
    problem = make_problem((2, 4, 500, 128), heads_kv=2, mask=Causal(), needs_lse=True, needs_grad=True)
    leaves = make_inputs(problem, "cuda", grad=True)
    out, lse = tilewise.attention(*leaves, mask=Causal(), return_lse=True, backend="sm80")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    k, v = (t.repeat_interleave(2, 1) for t in wide[1:])
    hidden = torch.ones(500, 500, device="cuda", dtype=torch.bool).triu(1)
    scores = (wide[0] @ k.mT * problem.scale).masked_fill(hidden, -math.inf)
    truth = torch.autograd.grad((scores.softmax(-1) @ v, scores.logsumexp(-1)), wide, (dout.double(), dlse.double()))
    for grad, want in zip(got, truth, strict=True):
        assert errors(grad, want)[0] <= budget(torch.float32, 500)


def test_gradients_that_are_not_wanted_are_not_there() -> None:
    problem = make_problem((1, 2, 300, 64), mask=Causal(), needs_grad=True, deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    out, lse = exact(q, k, v, problem)
    dout = torch.randn_like(q)
    whole = in_order(SM80.backward(dout, None, q, k, v, out.float(), lse.float(), problem))
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        got = in_order(SM80.backward(dout, None, q, k, v, out.float(), lse.float(), problem, wants=wanted(*wants)))
        for grad, all_of_it, want in zip(got, whole, wants, strict=True):
            assert (grad is None) if not want else torch.equal(grad, all_of_it)  # type: ignore[arg-type]


def test_in_a_graph() -> None:
    problem = make_problem((1, 4, 512, 64))
    q, k, v = make_inputs(problem, "cuda")
    want = tilewise.attention(q, k, v, backend="sm80")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tilewise.attention(q, k, v, backend="sm80")
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)
    v.mul_(5e37)  # the device decides anew at every replay
    graph.replay()
    assert errors(got, exact(q, k, v, problem)[0])[0] <= budget(torch.float32, 512)


def test_tf32_is_less_accurate_and_says_so() -> None:
    problem = make_problem((2, 4, 1024, 128), precision="tf32", needs_lse=True, needs_grad=True)
    q, k, v = make_inputs(problem, "cuda")
    out = tilewise.attention(q, k, v, precision="tf32", backend="sm80")
    whole, _ = errors(out, exact(q, k, v, problem)[0])
    assert 2.0**-14 < whole < 2.0**-10.5
    dout = torch.randn_like(q)
    _, _, *truth = exact(q, k, v, problem, None, dout)
    for grad, want in zip(gradients(q, k, v, dout, problem), truth, strict=True):
        assert 2.0**-14 < errors(grad, want)[0] < 2.0**-10
    assert "11 bits" in str(tilewise.explain(q, k, v, precision="tf32", backend="sm80"))


def main() -> None:
    """Every kernel of this GPU's tiles once, small: for compute-sanitizer."""
    for dims in DIMS:
        for factor, deterministic in ((1.0, False), (5e37, True)):
            grad = max(dims) <= sm80_float32_backward.HEAD_DIM_LIMIT
            fields = {"heads_kv": 1, "mask": Causal(), "needs_grad": grad, "deterministic": deterministic}
            problem = make_problem((1, 2, 200, dims[0]), head_dim_v=dims[1], needs_lse=True, **fields)
            q, k, v = make_inputs(problem, "cuda")
            out, lse = SM80.forward(q, k, v * factor, problem)
            if grad:
                assert lse is not None
                SM80.backward(torch.randn_like(out), None, q, k, v, out, lse, problem)
            torch.cuda.synchronize()
            print(problem, f"v x {factor:g}")


if __name__ == "__main__":
    main()
