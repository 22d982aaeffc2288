"""The float32 kernels on a GPU: at most twice the error of PyTorch's efficient kernel, on every range.

Where PyTorch's kernel does not take the problem (a softcap, a window), attention in plain float32 operations stands in.
Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_float32.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_float32.py --lanes
"""

from __future__ import annotations

import dataclasses
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
from support import budget, exact, in_order, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window
from tilewise.engine import SM90
from tilewise.engine.sm90 import float32_backward as sm90_float32_backward
from tilewise.jit import build_all
from tilewise.lab.model.covering import units_of
from tilewise.problem import describe
from tilewise.target import Target

if TYPE_CHECKING:
    from tilewise.masks import Mask

Tensor = torch.Tensor

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]

MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 3), Window(None, 0, "bottom-right"), Window(0, 200)]
# Why so many: with scores of 1e3 the last bit of one decides a row, for better or worse, in any float32 kernel.
HEADS = 32
DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if hopper:
        for _ in build_all(unit for unit in units_of(SM90) if "float32" in unit.name):
            pass


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """One call into memory that was full of NaN before."""
    assert SM90.why_not(problem, Target.of("cuda")) == []
    out, lse = SM90.forward(q, k, v, problem)
    assert lse is not None
    return out, lse


def plain(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q @ k.mT * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv, "cuda")
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1).nan_to_num(0.0) @ v


def of_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """PyTorch's efficient kernel where it takes the problem."""
    causal = problem.mask == Causal("top-left")
    if problem.softcap or not (causal or problem.mask == Full()):
        return plain(q, k, v, problem)
    q, k, v = (t.contiguous() for t in (q, k, v))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=problem.scale)


def check(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, times: float = 2.0) -> None:
    out, lse = run(q, k, v, problem)
    truth, truth_lse = exact(q, k, v, problem)
    assert not out.isnan().any(), str(problem)
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), str(problem)
    assert (lse[~seen] == -math.inf).all(), str(problem)
    assert (out[~seen] == 0).all(), str(problem)
    if truth.norm() == 0:
        assert (out == 0).all(), str(problem)
        return
    ours, theirs = errors(out, truth), errors(of_torch(q, k, v, problem), truth)
    assert ours[0] <= times * max(theirs[0], FLOOR), f"{problem}: {ours[0]:.2e}, PyTorch {theirs[0]:.2e}"
    # One row is one sample: two float32 kernels differ by chance alone.
    assert ours[1] <= 2 * times * max(theirs[1], FLOOR), f"{problem}: worst row {ours[1]:.2e}, PyTorch {theirs[1]:.2e}"


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_masks_and_head_dims(dims: tuple[int, int], mask: Mask, softcap: float) -> None:
    fields = {"head_dim_v": dims[1], "mask": mask, "softcap": softcap, "needs_lse": True}
    problem = make_problem((2, 4, 333, dims[0]), heads_kv=2, seq_kv=401, **fields)
    check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("seqs", [(1, 1), (1, 500), (63, 65), (64, 64), (128, 129), (1000, 77), (2048, 2048)], ids=str)
def test_lengths(seqs: tuple[int, int], mask: Mask) -> None:
    for dim in (64, 128, 256):
        problem = make_problem((1, 3, seqs[0], dim), seq_kv=seqs[1], mask=mask, needs_lse=True)
        check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize(("seq", "dim"), [(4096, 64), (4096, 128), (16384, 128), (1024, 64)])
def test_the_shapes_of_the_benchmark(seq: int, dim: int) -> None:
    """Two heads of each: the truth in float64 is large."""
    for mask in (Full(), Causal()):
        problem = make_problem((1, 2, seq, dim), mask=mask, needs_lse=True)
        check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_ranges(name: str, mask: Mask) -> None:
    problem = make_problem((1, HEADS, SEQ, DIM), mask=mask, needs_lse=True)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, HEADS, SEQ, DIM, generator=generator) for _ in range(3)]
    q, k, v = (x.cuda() for x in RANGES[name](*inputs))
    check(q, k, v, problem)


@pytest.mark.parametrize("head", range(3))
def test_only_the_rows_that_need_it_fall_back(head: int) -> None:
    """An outlier in one head leaves the bits of the others as they are."""
    problem = make_problem((1, 3, 600, 128), mask=Causal(), needs_lse=True)
    q, k, v = make_inputs(problem, "cuda")
    before, _ = run(q, k, v, problem)
    q[0, head, 300, 7] = 1e7
    after, _ = run(q, k, v, problem)
    others = [one for one in range(3) if one != head]
    assert torch.equal(after[:, others], before[:, others])
    assert torch.equal(after[0, head, :256], before[0, head, :256])
    check(q, k, v, problem)


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


def test_any_strides() -> None:
    for offset in (0, 4, 3):
        stored = [torch.randn(2, 70, 3, 64 + offset, device="cuda")[..., offset:].transpose(1, 2) for _ in range(3)]
        problem = describe(*stored, mask="causal", needs_lse=True)
        check(*stored, problem)


def test_the_same_bits_every_time() -> None:
    problem = make_problem((2, 8, 1024, 128), mask=Causal(), needs_lse=True)
    q, k, v = make_inputs(problem, "cuda")
    first = run(q, k, v, problem)
    for _ in range(5):
        again = run(q, k, v, problem)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_in_a_graph() -> None:
    problem = make_problem((1, 4, 512, 64))
    q, k, v = make_inputs(problem, "cuda")
    want = tilewise.attention(q, k, v, backend="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tilewise.attention(q, k, v, backend="sm90")
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)
    q[0, 0, 0, 0] = 1e7  # the device decides anew at every replay
    graph.replay()
    assert errors(got, exact(q, k, v, problem)[0])[0] <= budget(torch.float32, 512)


def test_tf32_is_less_accurate_and_says_so() -> None:
    problem = make_problem((2, 4, 1024, 128), precision="tf32", needs_lse=True)
    q, k, v = make_inputs(problem, "cuda")
    out = tilewise.attention(q, k, v, precision="tf32", backend="sm90")
    whole, _ = errors(out, exact(q, k, v, problem)[0])
    assert 2.0**-14 < whole < 2.0**-10.5
    assert "11 bits" in str(tilewise.explain(q, k, v, precision="tf32"))


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, problem: Problem, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of our forward and backward, into memory that was full of NaN before."""
    assert SM90.why_not(problem, Target.of("cuda")) == []
    out, lse = SM90.forward(q, k, v, problem)
    assert lse is not None
    return in_order(SM90.backward(dout, dlse, q, k, v, out, lse, problem))  # type: ignore[return-value]


def grads_of_torch(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    """Of PyTorch's efficient kernel where it takes the problem, else of plain float32 operations."""
    causal = problem.mask == Causal("top-left")
    if problem.softcap or not (causal or problem.mask == Full()):
        return plain_grads(q, k, v, dout, problem)
    inputs = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    repeated = (inputs[0], *(t.repeat_interleave(problem.group, 1) for t in inputs[1:]))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(*repeated, is_causal=causal, scale=problem.scale)
    return torch.autograd.grad(out, inputs, dout)


def check_grads(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, problem: Problem, what: str = "") -> None:
    got = gradients(q, k, v, dout, problem)
    _, _, *truth = exact(q, k, v, problem, None, dout)
    for grad, tensor in zip(got, (q, k, v), strict=True):
        assert grad.shape == tensor.shape
        assert grad.dtype == torch.float32
    theirs = grads_of_torch(q, k, v, dout, problem)
    magnitudes = plain_grads(q, k, v, dout, problem, magnitudes=True)
    assert_grads_as_good_as(theirs, got, truth, magnitudes, f"{problem} {what}")


GRAD_DIMS = [dims for dims in DIMS if max(dims) <= sm90_float32_backward.HEAD_DIM_LIMIT]


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", GRAD_DIMS, ids=str)
def test_gradients_of_masks_and_head_dims(dims: tuple[int, int], mask: Mask, softcap: float) -> None:
    fields = {"head_dim_v": dims[1], "mask": mask, "softcap": softcap, "needs_grad": True}
    problem = make_problem((2, 4, 333, dims[0]), heads_kv=2, seq_kv=401, **fields)
    check_grads(*make_inputs(problem, "cuda"), like_out(problem).cuda(), problem)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("seqs", [(1, 1), (1, 500), (63, 65), (64, 64), (128, 129), (1000, 77), (2048, 2048)], ids=str)
def test_gradients_of_lengths(seqs: tuple[int, int], mask: Mask) -> None:
    for dim in (64, 128):
        problem = make_problem((1, 3, seqs[0], dim), seq_kv=seqs[1], mask=mask, needs_grad=True)
        check_grads(*make_inputs(problem, "cuda"), like_out(problem).cuda(), problem)


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_long_sequences(dim: int) -> None:
    for mask in (Full(), Causal()):
        problem = make_problem((1, 1, 4096, dim), mask=mask, needs_grad=True)
        check_grads(*make_inputs(problem, "cuda"), like_out(problem).cuda(), problem)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_gradients_of_ranges(name: str, mask: Mask) -> None:
    problem = make_problem((1, HEADS, SEQ, DIM), mask=mask, needs_grad=True)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, HEADS, SEQ, DIM, generator=generator) for _ in range(3)]
    changed = [x.cuda() for x in WIDE[name](*inputs, like_out(problem))]
    check_grads(*changed, problem, name)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_backward_has_the_scores_of_the_forward(dim: int) -> None:
    """Scores in the thousands, whose last bit is worth 1e-4: where one key dominates, dv is dout to the last bit."""
    problem = make_problem((1, 2, dim, dim), needs_grad=True)
    q = 1000 * torch.eye(dim, device="cuda") + torch.randn(1, 2, dim, dim, device="cuda")
    v, dout = torch.randn(2, 1, 2, dim, dim, device="cuda")
    _, _, dv = gradients(q, q.clone(), v, dout, problem)
    assert torch.equal(dv, dout)


def test_gradients_are_the_same_bits_every_time_if_asked() -> None:
    for dim in (64, 128):
        problem = make_problem((2, 4, 1024, dim), mask=Causal(), needs_grad=True, heads_kv=2, deterministic=True)
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem).cuda()
        check_grads(q, k, v, dout, problem)
        first = gradients(q, k, v, dout, problem)
        for _ in range(10):
            again = gradients(q, k, v, dout, problem)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


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
    assert sm90_float32_backward.divide(problem, target).cut
    check_grads(*make_inputs(problem, "cuda"), like_out(problem).cuda(), problem)
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
    assert sm90_float32_backward.divide(problem, target).cut
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem).cuda() * 1e-38
    _, _, dv = gradients(q, k, v, dout, problem)
    truth = exact(q, k, v, problem, None, dout)[4]
    assert truth.abs().max().item() < 16 * torch.finfo(torch.float32).tiny
    unit = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps
    assert (dv.double() - truth).abs().max().item() <= problem.group * problem.seq_q * unit


def test_gradients_through_autograd() -> None:
    """The call that users make: autograd, a gradient of lse too, strides of (batch, seq, heads, dim)."""
    for mask in ("full", "causal"):
        q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
        views = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = tilewise.attention(*views, mask=mask, return_lse=True, backend="sm90")
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        wide = [x.double() for x in views]
        want_out, want_lse = tilewise.attention(*wide, mask=mask, return_lse=True, backend="reference")
        want = torch.autograd.grad((want_out, want_lse), (q, k, v), (dout.double(), dlse.double()))
        for grad, truth in zip(got, want, strict=True):
            assert errors(grad, truth.double())[0] <= budget(torch.float32, 300)


def test_gradients_of_any_strides() -> None:
    for offset in (0, 4, 3):
        stored = [torch.randn(2, 70, 3, 64 + offset, device="cuda")[..., offset:].transpose(1, 2) for _ in range(4)]
        problem = describe(*stored[:3], mask="causal").with_(needs_grad=True)
        check_grads(*stored, problem)


def test_larger_heads_train_elsewhere_and_say_why() -> None:
    q, k, v = (torch.randn(1, 2, 200, 192, device="cuda", requires_grad=True) for _ in range(3))
    told = str(tilewise.explain(q, k, v))
    assert "takes heads to 128" in told
    out = tilewise.attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    problem = make_problem((1, 2, 200, 192))
    _, _, *want = exact(q, k, v, problem, None, torch.ones_like(out))
    for grad, truth in zip(grads, want, strict=True):
        assert errors(grad, truth)[0] <= budget(torch.float32, 200)


def main() -> None:
    """Every kernel once, small: for compute-sanitizer. `arrivals_of_warp` says why every lane may have to arrive."""
    if "--lanes" in sys.argv:
        plain_unit = sm90_float32_backward.unit
        sm90_float32_backward.unit = lambda *arguments: dataclasses.replace(  # type: ignore[assignment]
            plain_unit(*arguments), options=("-DTILEWISE_EVERY_LANE_ARRIVES",), strict=False
        )
    for dims in DIMS:
        for outlier in (False, True):
            problem = make_problem((1, 2, 200, dims[0]), head_dim_v=dims[1], heads_kv=1, mask=Causal(), needs_lse=True)
            q, k, v = make_inputs(problem, "cuda")
            if outlier:
                q[0, 0, 100, 0] = 1e7
            SM90.forward(q, k, v, problem)
            torch.cuda.synchronize()
            print(problem, "with an outlier" if outlier else "", flush=True)
    for dims in GRAD_DIMS:
        for deterministic in (False, True):
            fields = {"head_dim_v": dims[1], "heads_kv": 1, "mask": Causal(), "deterministic": deterministic}
            problem = make_problem((1, 2, 200, dims[0]), needs_grad=True, **fields)
            q, k, v = make_inputs(problem, "cuda")
            out, lse = SM90.forward(q, k, v, problem)
            assert lse is not None
            SM90.backward(like_out(problem).cuda(), None, q, k, v, out, lse, problem)
            torch.cuda.synchronize()
            print(problem, flush=True)


if __name__ == "__main__":
    main()
