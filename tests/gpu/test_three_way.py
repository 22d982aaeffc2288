"""Kernels written apart from each other, against float64 and one another on a GPU: sm80, sm90, triton, reference.

Random shapes, masks and layouts: a mistake that two of them share would have to be made twice. What one refuses, the
others are compared on without it. All kernels are built before the first test needs one, side by side: Triton's by
processes that run this file as a program, each its share of them, into Triton's cache on disk.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tilewise
from support import assert_close, budget, exact, in_order, make_inputs, make_problem
from tilewise import Causal, Full, Problem, Window
from tilewise.jit import build_all
from tilewise.plain import reference
from tilewise.plan import BACKENDS, plan
from tilewise.target import Target
from tilewise.triton import backend as triton

if TYPE_CHECKING:
    from tilewise.jit import Unit

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OURS = [name for name in ("sm90", "sm80") if name in BACKENDS]
NAMES = [*OURS, *(name for name in ("triton", "reference") if name in BACKENDS)]
RESULTS = ("out", "lse", "dq", "dk", "dv")
# What a compiler of others says about itself is no failure of ours; what we say is.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::triton")]
needs_triton = pytest.mark.skipif(
    torch.cuda.is_available() and not Target.of("cuda").has_triton, reason="triton is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if torch.cuda.is_available() and Target.of("cuda").has_triton:
        running = compiling(os.cpu_count() or 1)
        units = [unit for problem in problems() for name in OURS for unit in units_of(problem, name)]
        failed = [built for _, built in build_all(dict.fromkeys(units)) if isinstance(built, tilewise.CompileError)]
        for process in running:
            _, said = process.communicate()
            assert process.returncode == 0, said[-2000:]
        assert not failed


def compiling(count: int) -> list[subprocess.Popen[str]]:
    """Processes that compile Triton's kernels."""
    command = [sys.executable, str(Path(__file__).resolve())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [
        subprocess.Popen([*command, str(number), str(count)], env=environment, stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]


def units_of(problem: Problem, name: str) -> tuple[Unit, ...]:
    """The kernels of one of our backends, if it takes the problem."""
    target = Target.of("cuda")
    return () if BACKENDS[name].why_not(problem, target) else plan(problem, target, name).units


def willing(problem: Problem) -> list[str]:
    return [name for name in NAMES if not BACKENDS[name].why_not(problem, Target.of("cuda"))]


def computed(name: str, problem: Problem, inputs: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """All five results, in memory that was full of NaN before."""
    backend, (q, k, v) = BACKENDS[name], inputs
    rooms = [torch.full((4 * tensor.numel() + 1,), math.nan, device="cuda") for tensor in inputs]
    del rooms
    out, lse = backend.forward(q, k, v, problem)
    assert lse is not None
    return dict(
        zip(RESULTS, (out, lse, *in_order(backend.backward(dout, dlse, q, k, v, out, lse, problem))), strict=True)
    )  # type: ignore[arg-type]


def truth(problem: Problem, inputs: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, lse = reference.forward(*wide, problem.with_(dtype=torch.float64))
    seen = torch.where(lse.isinf(), 0.0, lse)
    loss = (out * dout.double()).sum() + (seen * dlse.double()).sum()
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *torch.autograd.grad(loss, wide)), strict=True))


def compare(problem: Problem) -> list[str]:
    """Everybody who takes the problem, against float64 and against each other; returns who that was."""
    names = willing(problem)
    inputs = make_inputs(problem, "cuda")
    dout = torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v, device="cuda").to(
        problem.dtype
    )
    dlse = torch.randn(problem.batch, problem.heads_q, problem.seq_q, device="cuda")
    want = truth(problem, inputs, dout, dlse)
    found = {name: computed(name, problem, inputs, dout, dlse) for name in names}
    terms = max(problem.seq_kv, problem.seq_q * problem.group)
    allowed = {name: (1 if name == "out" else 4) * budget(problem.dtype, terms) for name in RESULTS}
    allowed["lse"] = budget(FP32, terms) if problem.dtype == FP32 else 4 * budget(FP32, terms)
    for who, results in found.items():
        for name in RESULTS:
            assert_close(results[name], want[name], allowed[name], f"{who}: {problem}: {name}")
        assert (results["out"][want["lse"].isinf()] == 0).all(), f"{who}: {problem}: rows without keys"
    for one, other in combinations(found, 2):
        for name in RESULTS:
            what = f"{one} - {other}: {problem}: {name}"
            assert_close(found[one][name], found[other][name], 2 * allowed[name], what)
    return names


def problem_of(
    heads: tuple[int, int], seqs: tuple[int, int], dims: tuple[int, int], batch: int = 1, **fields: Any
) -> Problem:
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_lse": True, "needs_grad": True}
    return make_problem((batch, heads[0], seqs[0], dims[0]), **({"dtype": BF16} | values | fields))


MASKS = [Full(), Causal(), Causal("bottom-right"), Window(100, 30), Window(0, 0, "bottom-right"), Window(300, None)]
DTYPES = [BF16, FP16, FP32]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40), (8, 8)]
SEEDS = range(32)


def masked(dtype: torch.dtype, mask: Any) -> list[Problem]:
    return [
        problem_of((4, 2), (300, 411), (64, 64), dtype=dtype, mask=mask),
        problem_of((2, 2), (333, 129), (128, 128), dtype=dtype, mask=mask, softcap=15.0, layout="bshd"),
    ]


def sized(dims: tuple[int, int]) -> list[Problem]:
    kinds = ((BF16, Causal()), (FP16, Full()), (FP32, Window(50, 0, "bottom-right")))
    return [problem_of((2, 1), (200, 333), dims, dtype=dtype, mask=mask) for dtype, mask in kinds]


def drawn(seed: int) -> Problem:
    rng = random.Random(seed)
    heads_kv = rng.choice((1, 2, 3))
    align = rng.choice(("top-left", "bottom-right"))
    window = Window(rng.choice((None, 0, rng.randint(1, 400))), rng.choice((None, 0, rng.randint(1, 200))), align)
    dim = rng.choice((16, 40, 64, 80, 128, 192, 256))
    return problem_of(
        (heads_kv * rng.choice((1, 2, 4)), heads_kv),
        (rng.choice((1, 63, 64, 65, rng.randint(1, 700))), rng.choice((1, 127, 128, 129, rng.randint(1, 900)))),
        (dim, rng.choice((dim, 64))),
        rng.choice((1, 2)),
        mask=rng.choice((Full(), Causal(align), window)),
        dtype=rng.choice((BF16, BF16, FP16, FP32)),
        softcap=rng.choice((0.0, 0.0, 20.0)),
        layout=rng.choice(("bhsd", "bshd")),
    )


def problems() -> list[Problem]:
    """All that are compared below. Triton compiles anew for a length or a stride that 16 divides, or that is 1."""
    of_masks = [problem for dtype in DTYPES for mask in MASKS for problem in masked(dtype, mask)]
    return [*of_masks, *(problem for dims in DIMS for problem in sized(dims)), *map(drawn, SEEDS)]


@needs_triton
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mask_and_precision(dtype: torch.dtype, mask: Any) -> None:
    for problem in masked(dtype, mask):
        assert "triton" in compare(problem)


@needs_triton
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dim(dims: tuple[int, int]) -> None:
    for problem in sized(dims):
        assert "triton" in compare(problem)


@needs_triton
@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems(seed: int) -> None:
    torch.manual_seed(seed)
    assert "triton" in compare(drawn(seed))


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


def main(number: int, count: int) -> None:
    """Compile every `count`-th kernel, from the `number`-th on."""
    launches = []
    for problem in problems():
        config = triton.configs(problem, Target.of("cuda"))[0]
        launches += triton._launches(*make_inputs(problem, "cuda"), problem, config)
    for launch in launches[number::count]:
        launch.compile()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
