"""The FlashAttention-2 forward kernel on a GPU: against float64, held to 1.1 x the error of PyTorch's best kernel.

Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm80.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_sm80.py

API errors are left out because the driver bindings look for functions that older drivers do not have.
"""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from typing import TYPE_CHECKING

from support import exact, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window
from tilewise.backends import sm80
from tilewise.jit import build_all
from tilewise.problem import describe
from tilewise.target import TARGETS, Target

if TYPE_CHECKING:
    from tilewise.masks import Mask

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16

able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= sm80.LEAST_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not able, reason="needs a GPU from sm_80 on")]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels of this GPU, side by side, before the first test needs one."""
    if able:
        arch = Target.of("cuda").arch
        for _ in build_all(unit for unit in sm80.all_units() if unit.arch == arch):
            pass


def problem_of(
    batch: int, heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], **fields: object
) -> Problem:
    values: dict[str, object] = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **(values | {"dtype": BF16} | fields))  # type: ignore[arg-type]


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: sm80.Config | None = None) -> tuple[Tensor, Tensor]:
    """One call into memory that was full of NaN before."""
    assert sm80.why_not(problem, Target.of("cuda")) == []
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    poison = [
        torch.full(shape, math.nan, dtype=problem.dtype, device="cuda"),
        torch.full(shape[:3], math.nan, device="cuda"),
    ]
    del poison
    out, lse = sm80.forward(q, k, v, problem, config)
    assert lse is not None
    return out, lse


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def rounded_like_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """What a fused kernel with a running maximum gives: p rounded to 16 bits, everything else in float32."""
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q.float() @ k.float().mT * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv, "cuda")
    scores = scores.masked_fill(~visible, -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0)
    total = p.sum(-1, keepdim=True)
    return ((p.to(q.dtype).float() @ v.float()) / torch.where(total == 0, 1.0, total)).to(q.dtype)


def best_of_torch(q: Tensor, k: Tensor, v: Tensor, problem: Problem, truth: Tensor) -> float:
    """The smallest error among PyTorch's kernels that take the problem, and the model of one above."""
    errors = [error(rounded_like_torch(q, k, v, problem), truth)]
    top_left = problem.mask == Causal("top-left")
    if problem.softcap or not (problem.mask == Full() or top_left):
        return errors[0]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=top_left, scale=problem.scale, enable_gqa=problem.group > 1
                )
        except RuntimeError:
            continue
        errors.append(error(out, truth))
    return min(errors)


def check(q: Tensor, k: Tensor, v: Tensor, problem: Problem, note: str = "", config: sm80.Config | None = None) -> None:
    out, lse = run(q, k, v, problem, config)
    truth, truth_lse = exact(q, k, v, problem)
    what = f"{problem} {note}"
    assert not out.isnan().any(), what
    # Rounding noise of a small tensor: the norm of n errors is known to about 1 / sqrt(2 n).
    noise = torch.finfo(problem.dtype).eps * 2 / math.sqrt(out.numel())
    limit = 1.1 * best_of_torch(q, k, v, problem, truth) + noise
    if truth.norm() > 0:
        assert error(out, truth) <= limit, f"{what}: error {error(out, truth):.3e}, allowed {limit:.3e}"
    else:
        assert (out == 0).all(), what
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), what
    assert (lse[~seen] == -math.inf).all(), what
    assert (out[~seen] == 0).all(), what
    slack = 1e-5 + 2e-6 * truth_lse[seen].abs()
    assert (
        (lse.double()[seen] - truth_lse[seen]).abs() <= slack + 1e-6 * abs(problem.scale) * q.float().norm(dim=-1).max()
    ).all(), what


MASKS: list[Mask] = [
    Full(),
    Causal("top-left"),
    Causal("bottom-right"),
    Window(100, 30),
    Window(0, 0, "bottom-right"),
    Window(None, 40, "bottom-right"),
    Window(300, None),
]
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (192, 192), (72, 40), (8, 8), (40, 128), (200, 256)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_head_dim_and_mask(dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    problem = problem_of(2, (4, 2), (300, 411), dims, mask=mask, dtype=dtype)
    check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.capability >= (8, 0)])
@pytest.mark.parametrize("dims", DIMS[:6], ids=str)
def test_the_tiles_of_every_gpu(dims: tuple[int, int], name: str) -> None:
    """What other GPUs would run, compiled for this one, where it has the shared memory."""
    here = Target.of("cuda")
    for softcap in (0.0, 20.0):
        problem = problem_of(2, (4, 2), (300, 411), dims, mask=Causal("bottom-right"), softcap=softcap)
        tensors = make_inputs(problem, "cuda")
        for config in sm80.configs(problem, Target.named(name)):
            if config.fits(here):
                check(*tensors, problem, str(config), config)


LENGTHS = [
    (1, 1),
    (1, 500),
    (500, 1),
    (63, 65),
    (128, 128),
    (129, 127),
    (192, 384),
    (700, 130),
    (130, 700),
    (1025, 1025),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_every_length(dims: tuple[int, int], mask: Mask, lengths: tuple[int, int]) -> None:
    problem = problem_of(2, (2, 2), lengths, dims, mask=mask)
    check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_many_tiles_a_cta_in_every_layout(heads: tuple[int, int], layout: str) -> None:
    for mask in (Full(), Causal(), Window(200, 0)):
        problem = problem_of(4, heads, (1000, 1000), (64, 64), mask=mask, layout=layout)
        check(*make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(dims: tuple[int, int], softcap: float) -> None:
    for mask in (Full(), Causal(), Window(128, 0)):
        problem = problem_of(1, (4, 2), (600, 600), dims, mask=mask, softcap=softcap)
        q, k, v = make_inputs(problem, "cuda")
        check(q * 8, k, v, problem)


def ordinary(q: Tensor, k: Tensor, v: Tensor) -> None: ...


def scaled(factor: float):  # type: ignore[no-untyped-def]
    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        q.mul_(factor)

    change.__name__ = f"q_x{factor:g}"
    return change


def constant_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    k.copy_(k[:, :, :1].expand_as(k))


def one_outlier(q: Tensor, k: Tensor, v: Tensor) -> None:
    k[:, :, k.shape[2] // 3] *= 40


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
def test_hard_inputs(dims: tuple[int, int], dtype: torch.dtype, change) -> None:  # type: ignore[no-untyped-def]
    for mask in (Full(), Causal()):
        problem = problem_of(1, (2, 2), (512, 2048), dims, mask=mask, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        change(q, k, v)
        check(q, k, v, problem, change.__name__)


def strided(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A (batch, heads, seq, dim) view with odd strides, its surroundings full of NaN."""
    order = rng.sample(range(3), 3)
    sizes = [shape[axis] + rng.randint(0, 2) for axis in order] + [shape[3] + 8 * rng.randint(0, 2)]
    room = torch.full(sizes, math.nan, dtype=dtype, device="cuda")
    view = room.permute(*[order.index(axis) for axis in range(3)], 3)[
        : shape[0], : shape[1], : shape[2], sizes[3] - shape[3] :
    ]
    return view.copy_(torch.randn(shape, device="cuda"))


@pytest.mark.parametrize("draw", range(40))
def test_random_shapes_and_strides(draw: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads_kv = rng.randint(1, 3)
    dims = (8 * rng.randint(1, 32), 8 * rng.randint(1, 32))
    heads = (heads_kv * rng.randint(1, 3), heads_kv)
    seqs = (rng.randint(1, 700), rng.randint(1, 700))
    align = rng.choice(["top-left", "bottom-right"])
    mask = rng.choice([Full(), Causal(align), Window(rng.randint(0, 300), rng.randint(0, 300), align)])
    problem = problem_of(
        rng.randint(1, 3),
        heads,
        seqs,
        dims,
        mask=mask,
        dtype=rng.choice([BF16, FP16]),
        softcap=rng.choice([0.0, 0.0, 20.0]),
    )
    shapes = [
        (problem.batch, heads[0], seqs[0], dims[0]),
        (problem.batch, heads[1], seqs[1], dims[0]),
        (problem.batch, heads[1], seqs[1], dims[1]),
    ]
    check(*[strided(shape, problem.dtype, rng) for shape in shapes], problem, f"seed {seed}")


def test_expanded_keys_and_values() -> None:
    problem = problem_of(3, (4, 4), (200, 300), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    k, v = (t[:1, :1].expand(t.shape) for t in (k, v))
    check(q, k, v, problem)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(200, 10)], ids=str)
@pytest.mark.parametrize("dims", DIMS[:3], ids=str)
def test_the_same_bits_every_time(dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(4, (8, 4), (1111, 1111), dims, mask=mask)
    q, k, v = make_inputs(problem, "cuda")
    first = run(q * 2, k, v, problem)
    for _ in range(8):
        again = run(q * 2, k, v, problem)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("mask", [Causal(), Causal("bottom-right"), Window(100, 30), Window(None, 0)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_hidden_values_never_show(dims: tuple[int, int], bad: float, mask: Mask) -> None:
    problem = problem_of(1, (4, 4), (500, 640), dims, mask=mask)
    q, k, v = make_inputs(problem, "cuda")
    visible = mask.to_bool(range(500), range(640), 500, 640, "cuda")
    clean, _ = run(q, k, v, problem)
    for key in (0, 77, 130, 255, 256, 400, 450, 639):
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        blind = ~visible[:, key]
        for keys, values in ((spoilt_k, v), (k, spoilt_v), (spoilt_k, spoilt_v)):
            out, lse = run(q, keys, values, problem)
            # Not bit for bit: a neighbour row's NaN may send the warp down its careful path.
            if blind.any():
                assert error(out[:, :, blind], clean[:, :, blind].double()) < 4e-3, f"key {key}"
            assert not lse[:, :, blind].isnan().any()
        out, _ = run(q, k, spoilt_v, problem)
        assert not out[:, :, ~blind].isfinite().any()


def test_offsets_beyond_two_to_the_31() -> None:
    heads, seq, dim = 2, 300, 64
    size = 2**31 + heads * seq * dim
    room = torch.empty(3 * size, dtype=BF16, device="cuda")
    problem = problem_of(2, (heads, heads), (seq, seq), (dim, dim), mask=Causal())
    tensors = []
    for part in range(3):
        view = room[part * size :].as_strided((2, heads, seq, dim), (2**31, seq * dim, dim, 1))
        tensors.append(view.copy_(torch.randn(view.shape, device="cuda")))
    check(*tensors, problem)


def test_large_outputs() -> None:
    """An output of more than 2^31 elements, spot-checked on its last head."""
    problem = problem_of(1, (1100, 1), (16384, 64), (128, 128), needs_lse=False)
    q, k, v = make_inputs(problem, "cuda")
    out, _ = sm80.forward(q, k, v, problem)
    one = problem.with_(heads_q=1)
    truth, _ = exact(q[:, -1:], k, v, one)
    assert error(out[:, -1:], truth) < 4e-3


def test_streams_and_graphs() -> None:
    problem = problem_of(8, (8, 8), (700, 700), (64, 64), mask=Causal())
    inputs = [make_inputs(problem, "cuda") for _ in range(4)]
    wanted = [run(*tensors, problem)[0].clone() for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        outs = []
        for stream, tensors in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(sm80.forward(*tensors, problem)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [sm80.forward(*tensors, problem)[0] for tensors in inputs]
    for _ in range(3):
        for out in captured:
            out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))


def test_an_empty_problem() -> None:
    problem = problem_of(2, (2, 2), (5, 0), (64, 64))
    out, lse = sm80.forward(*make_inputs(problem, "cuda"), problem)
    assert (out == 0).all()
    assert lse is not None
    assert (lse == -math.inf).all()


def test_describe_and_refusals_agree() -> None:
    q = torch.randn(1, 2, 64, 72, device="cuda", dtype=BF16)
    assert sm80.why_not(describe(q, q, q), Target.of("cuda")) == []
    assert sm80.why_not(describe(q[..., 4:68], q[..., 4:68], q[..., 4:68]), Target.of("cuda"))


def few_shapes() -> None:
    for dims, mask, softcap in (
        ((128, 128), Full(), 0.0),
        ((128, 128), Causal(), 0.0),
        ((64, 64), Window(100, 30), 0.0),
        ((256, 256), Causal("bottom-right"), 20.0),
        ((192, 128), Full(), 0.0),
        ((72, 40), Causal(), 0.0),
    ):
        problem = problem_of(2, (4, 2), (333, 444), dims, mask=mask, softcap=softcap)
        q, k, v = make_inputs(problem, "cuda")
        v[:, :, 440, 3] = math.nan
        sm80.forward(q * 30, k, v, problem)
        torch.cuda.synchronize()
        print("ran", problem)


if __name__ == "__main__":
    few_shapes()
