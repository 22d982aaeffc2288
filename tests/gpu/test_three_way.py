"""Kernels written apart from each other, against float64 and one another on a GPU: sm80, sm90, triton, reference.

Random shapes, masks and layouts: a mistake that two of them share would have to be made twice. What one refuses, the
others are compared on without it. All kernels are built before the first test needs one, side by side: Triton's by
processes that run this file as a program, each its share of them, into Triton's cache on disk.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comparison import BF16, FP16, FP32, OURS, compare, needs_triton, problem_of

import tilewise
from support import make_inputs
from tilewise import Causal, Full, Problem, Window
from tilewise.jit import build_all
from tilewise.plan import BACKENDS, plan
from tilewise.target import Target
from tilewise.triton import backend as triton

if TYPE_CHECKING:
    from tilewise.jit import Unit

# What a compiler of others says about itself is no failure of ours; what we say is.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::triton")]


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
