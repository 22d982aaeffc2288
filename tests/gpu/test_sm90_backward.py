"""The Hopper backward on a GPU: dq, dk and dv against float64, held to 1.25 x the error of PyTorch's best kernel.

Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm90_backward.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_sm90_backward.py
"""

from __future__ import annotations

import dataclasses
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

import tilewise
from support import exact, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window
from tilewise.backends import sm90, sm90_backward
from tilewise.jit import build_all
from tilewise.target import Target

if TYPE_CHECKING:
    from tilewise.masks import Mask

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if hopper:
        for _ in build_all(sm90.all_units()):
            pass


def problem_of(
    batch: int, heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], **fields: object
) -> Problem:
    values: dict[str, object] = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_grad": True}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **(values | {"dtype": BF16} | fields))  # type: ignore[arg-type]


def like_out(problem: Problem) -> Tensor:
    return torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v, device="cuda").to(
        problem.dtype
    )


def poison(problem: Problem) -> None:
    """Leaves NaN in the memory that the allocator will hand out next."""
    sizes = [
        problem.batch * problem.heads_q * problem.seq_q * max(256, problem.head_dim),
        problem.batch * problem.heads_kv * problem.seq_kv * problem.head_dim // 2 + 1,
        problem.batch * problem.heads_kv * problem.seq_kv * problem.head_dim_v // 2 + 1,
    ]
    rooms = [torch.full((size,), math.nan, device="cuda") for size in sizes]
    del rooms


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of our kernels, into memory that was full of NaN before."""
    assert sm90.why_not(problem, Target.of("cuda")) == []
    out, lse = sm90.forward(q, k, v, problem)
    assert lse is not None
    poison(problem)
    return sm90.backward(dout, dlse, q, k, v, out, lse, problem)  # type: ignore[return-value]


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the truth; 0 where that is 0, as the gradients of rows that see one key are."""
    return ((got.double() - want).norm() / want.norm()).item() if want.norm() > 0 else 0.0


def rounded_like_torch(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    """What a fused kernel gives: out, P and dS rounded to 16 bits, everything else in float32."""
    narrow = lambda t: t.to(problem.dtype).float()
    q32, dout32 = q.float(), dout.float()
    k32, v32 = (t.float().repeat_interleave(problem.group, 1) for t in (k, v))
    scores, slope = q32 @ k32.mT * problem.scale, 1.0
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * bent, 1 - bent * bent
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv, "cuda")
    p = torch.softmax(scores.masked_fill(~visible, -math.inf), -1).nan_to_num(0.0)
    delta = (dout32 * narrow(p @ v32)).sum(-1, keepdim=True)
    ds = narrow(p * (dout32 @ v32.mT - delta) * slope)
    summed = lambda t: t.unflatten(1, (problem.heads_kv, problem.group)).sum(2)
    dq, dk = ds @ k32 * problem.scale, summed(ds.mT @ q32) * problem.scale
    return tuple(t.to(problem.dtype) for t in (dq, dk, summed(narrow(p).mT @ dout32)))


def best_of_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, truth: tuple[Tensor, ...]
) -> list[float]:
    """For each gradient the smallest error among PyTorch's kernels that take the problem, and their model above."""
    best = [error(g, w) for g, w in zip(rounded_like_torch(dout, q, k, v, problem), truth, strict=True)]
    top_left = problem.mask == Causal("top-left")
    if problem.softcap or not (problem.mask == Full() or top_left):
        return best
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    *inputs, is_causal=top_left, scale=problem.scale, enable_gqa=problem.group > 1
                )
            grads = torch.autograd.grad(out, inputs, dout)
        except RuntimeError:
            continue
        best = [min(b, error(g, w)) for b, g, w in zip(best, grads, truth, strict=True)]
    return best


def check(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, problem: Problem, note: str = "") -> None:
    got = gradients(dout, q, k, v, problem)
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
        floor = 1e-6 * (terms * other.double().norm(dim=-1).max() if name != "dv" else want.norm())
        wrong = (grad.double() - want).norm()
        allowed = (1.25 * best + noise) * want.norm() + floor
        assert wrong <= allowed, f"{what} {name}: error {wrong:.3e}, allowed {allowed:.3e}, norm {want.norm():.3e}"
    blind = lse == -math.inf
    assert (got[0][blind] == 0).all(), what
    visible = problem.mask.to_bool(range(problem.seq_q), range(problem.seq_kv), problem.seq_q, problem.seq_kv, "cuda")
    unseen = ~visible.any(0)
    assert (got[1][:, :, unseen] == 0).all(), what
    assert (got[2][:, :, unseen] == 0).all(), what


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
    check(like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_more_tiles_of_keys_than_take_turns(dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(1, (4, 2), (300, 2100), dims, mask=mask)
    check(like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("order", list(sm90_backward.Order), ids=lambda order: order.name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=str)
def test_every_order_of_adding_up_dq(
    dims: tuple[int, int], order: sm90_backward.Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more tiles than multiprocessors, so that some wait for others, and rows that no tile sees."""
    monkeypatch.setattr(sm90_backward, "_order", lambda problem, config: order)
    monkeypatch.setattr(sm90, "_bound_backward", {})
    for lengths, mask in (((1500, 1500), Full()), ((1500, 1500), Causal()), ((900, 600), Causal("bottom-right"))):
        problem = problem_of(2, (16, 8), lengths, dims, mask=mask)
        inputs = (like_out(problem), *make_inputs(problem, "cuda"))
        for _ in range(3):
            check(*inputs, problem)


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
    check(like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_groups_and_layouts(heads: tuple[int, int], layout: str) -> None:
    for mask in (Full(), Causal(), Window(200, 0)):
        problem = problem_of(4, heads, (1000, 1000), (64, 64), mask=mask, layout=layout)
        check(like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(dims: tuple[int, int], softcap: float, dtype: torch.dtype) -> None:
    for mask in (Full(), Causal(), Window(128, 0)):
        problem = problem_of(1, (4, 2), (600, 600), dims, mask=mask, softcap=softcap, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        check(like_out(problem), q * 8, k, v, problem)


def scaled(factor: float):  # type: ignore[no-untyped-def]
    def change(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q.mul_(factor)

    change.__name__ = f"q_x{factor:g}"
    return change


def constant_rows(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    k.copy_(k[:, :, :1].expand_as(k))


def one_outlier(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    k[:, :, k.shape[2] // 3] *= 40


def large_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    dout.mul_(100)


def tiny_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    dout.mul_(2.0**-8)


KINDS = [*map(scaled, (0.01, 2, 6, 20)), constant_rows, one_outlier, large_gradients, tiny_gradients]


@pytest.mark.parametrize("change", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_hard_inputs(dims: tuple[int, int], dtype: torch.dtype, change) -> None:  # type: ignore[no-untyped-def]
    for mask in (Full(), Causal()):
        problem = problem_of(1, (2, 2), (512, 2048), dims, mask=mask, dtype=dtype)
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem)
        change(dout, q, k, v)
        check(dout, q, k, v, problem, change.__name__)


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
        deterministic=rng.choice([False, False, True]),
    )
    shapes = [
        (problem.batch, heads[0], seqs[0], dims[1]),
        (problem.batch, heads[0], seqs[0], dims[0]),
        (problem.batch, heads[1], seqs[1], dims[0]),
        (problem.batch, heads[1], seqs[1], dims[1]),
    ]
    check(*[strided(shape, problem.dtype, rng) for shape in shapes], problem, f"seed {seed}")


@pytest.mark.parametrize(
    "change",
    [lambda t: t.expand(t.shape).transpose(2, 3).contiguous().transpose(2, 3), lambda t: t[..., :1].expand(t.shape)],
    ids=["transposed", "expanded"],
)
def test_any_strides_of_the_incoming_gradient(change) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(2, (4, 2), (200, 300), (64, 64), mask=Causal())
    check(change(like_out(problem)), *make_inputs(problem, "cuda"), problem)


def test_expanded_keys_and_values() -> None:
    problem = problem_of(3, (4, 4), (200, 300), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    k, v = (t[:1, :1].expand(t.shape) for t in (k, v))
    check(like_out(problem), q, k, v, problem)


def test_the_gradient_of_the_log_sum_exp() -> None:
    for softcap in (0.0, 5.0):
        problem = problem_of(2, (4, 2), (300, 411), (64, 64), mask=Causal(), softcap=softcap, needs_lse=True)
        q, k, v = make_inputs(problem, "cuda", grad=True)
        dout, dlse = like_out(problem), torch.randn(2, 4, 300, device="cuda")
        out, lse = tilewise.attention(q, k, v, mask="causal", softcap=softcap, return_lse=True, backend="sm90")
        got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        want = torch.autograd.grad(
            tilewise.attention(*wide, mask="causal", softcap=softcap, return_lse=True, backend="reference"),
            wide,
            (dout.double(), dlse.double()),
        )
        assert all(error(g, w) < 5e-3 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal("bottom-right"), Window(200, 10)], ids=str)
@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
def test_deterministic_gradients_are_the_same_bits_every_time(dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(4, (8, 4), (1111, 1200), dims, mask=mask, deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    first = gradients(dout, q * 2, k, v, problem)
    for _ in range(20):
        again = gradients(dout, q * 2, k, v, problem)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_switch_of_pytorch_makes_gradients_deterministic() -> None:
    q, k, v = (torch.randn(2, 4, 2000, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(tilewise.attention(q, k, v, backend="sm90"), (q, k, v), dout) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("seq_kv", [100, 700])
def test_only_what_is_wanted(seq_kv: int) -> None:
    problem = problem_of(2, (4, 2), (300, seq_kv), (64, 64), deterministic=True)
    q, k, v = make_inputs(problem, "cuda")
    dout = like_out(problem)
    everything = gradients(dout, q, k, v, problem)
    out, lse = sm90.forward(q, k, v, problem)
    assert lse is not None
    for bits in range(8):
        wants = (bool(bits & 1), bool(bits & 2), bool(bits & 4))
        got = sm90.backward(dout, None, q, k, v, out, lse, problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None  # type: ignore[arg-type]


def test_memory_stays_linear() -> None:
    def extra(seq: int) -> int:
        problem = problem_of(1, (4, 4), (seq, seq), (128, 128), mask=Causal())
        q, k, v = make_inputs(problem, "cuda")
        dout = like_out(problem)
        out, lse = sm90.forward(q, k, v, problem)
        assert lse is not None
        sm90.backward(dout, None, q, k, v, out, lse, problem)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = sm90.backward(dout, None, q, k, v, out, lse, problem)
        held = sum(g.numel() * g.element_size() for g in grads if g is not None)
        return torch.cuda.max_memory_allocated() - before - held

    short, long = extra(4096), extra(16384)
    assert long <= 4.1 * short


def test_streams_and_graphs() -> None:
    problem = problem_of(4, (8, 8), (700, 700), (64, 64), mask=Causal(), deterministic=True)
    inputs = [(like_out(problem), *make_inputs(problem, "cuda")) for _ in range(4)]
    wanted = [[g.clone() for g in gradients(*tensors, problem)] for tensors in inputs]
    forwards = [sm90.forward(*tensors[1:], problem) for tensors in inputs]

    def again(index: int) -> list[Tensor]:
        dout, q, k, v = inputs[index]
        out, lse = forwards[index]
        assert lse is not None
        return list(sm90.backward(dout, None, q, k, v, out, lse, problem))  # type: ignore[arg-type]

    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append(again(index))
        torch.cuda.synchronize()
        assert all(
            torch.equal(a, b) for one, want in zip(got, wanted, strict=True) for a, b in zip(one, want, strict=True)
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [again(index) for index in range(len(inputs))]
    for _ in range(3):
        for one in captured:
            for grad in one:
                grad.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(
            torch.equal(a, b)
            for one, want in zip(captured, wanted, strict=True)
            for a, b in zip(one, want, strict=True)
        )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, mask="causal", backend="sm90")


def test_checkpointing_compile_and_autocast() -> None:
    q, k, v = (torch.randn(2, 4, 500, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    plain = torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    saved = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    for out in (saved, compiled):
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), plain, strict=True):
            assert error(a, b.double()) < 1e-3
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cuda", dtype=BF16):
        out = tilewise.scaled_dot_product_attention(*wide, is_causal=True)
    for a, b in zip(torch.autograd.grad(out, wide, dout), plain, strict=True):
        assert error(a, b.double()) < 1e-2


def test_gradients_accumulate() -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    for _ in range(3):
        attend(q, k, v).float().square().sum().backward()
    once = torch.autograd.grad(attend(q, k, v).float().square().sum(), (q, k, v))
    for tensor, grad in zip((q, k, v), once, strict=True):
        assert tensor.grad is not None
        assert error(tensor.grad, 3 * grad.double()) < 1e-2


def test_offsets_beyond_two_to_the_31() -> None:
    heads, seq, dim = 2, 300, 64
    size = 2**31 + heads * seq * dim
    problem = problem_of(2, (heads, heads), (seq, seq), (dim, dim), mask=Causal())
    tensors = []
    for _ in range(4):
        view = torch.empty(size, dtype=BF16, device="cuda").as_strided((2, heads, seq, dim), (2**31, seq * dim, dim, 1))
        tensors.append(view.copy_(torch.randn(view.shape, device="cuda")))
    check(*tensors, problem)


def test_an_empty_problem() -> None:
    problem = problem_of(2, (2, 2), (5, 0), (64, 64))
    q, k, v = make_inputs(problem, "cuda")
    out, lse = sm90.forward(q, k, v, problem)
    assert lse is not None
    dq, dk, dv = sm90.backward(like_out(problem), None, q, k, v, out, lse, problem)
    assert dq is not None
    assert (dq == 0).all()
    assert dk is not None
    assert dk.shape == k.shape
    assert dv is not None


def few_shapes() -> None:
    """With kernels in which every lane arrives at barriers: `arrivals_of_warp` says why."""
    plain = sm90_backward.main_unit
    sm90_backward.main_unit = lambda config: dataclasses.replace(  # type: ignore[assignment]
        plain(config), options=("-DTILEWISE_EVERY_LANE_ARRIVES",), strict=False
    )
    for dims, mask, softcap, deterministic in (
        ((128, 128), Full(), 0.0, False),
        ((128, 128), Causal(), 0.0, True),
        ((64, 64), Window(100, 30), 0.0, False),
        ((256, 256), Causal("bottom-right"), 20.0, False),
        ((192, 128), Full(), 0.0, False),
        ((72, 40), Causal(), 0.0, False),
    ):
        for seqs in ((333, 444), (200, 100), (200, 1200)):
            problem = problem_of(2, (4, 2), seqs, dims, mask=mask, softcap=softcap, deterministic=deterministic)
            gradients(like_out(problem), *make_inputs(problem, "cuda"), problem)
            torch.cuda.synchronize()
            print("ran", problem)


if __name__ == "__main__":
    few_shapes()
