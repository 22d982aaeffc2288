"""The FlashAttention-2 backward on a GPU: the matrix of backward_matrix.py, and the tiles of other GPUs.

Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm80_backward.py
"""

from __future__ import annotations

import pytest
import torch
from backward_matrix import *  # noqa: F403 (every case of the matrix, for this backend)
from backward_matrix import check, few_shapes, like_out, problem_of
from matrix import DIMS

from support import make_inputs
from tilewise import Causal
from tilewise.engine import SM80
from tilewise.engine.sm80 import MIN_CAPABILITY
from tilewise.engine.sm80 import backward as sm80_backward
from tilewise.engine.sm80.shared import VECTOR_SUMS_FROM
from tilewise.jit import build_all
from tilewise.lab.model.covering import units_of
from tilewise.target import TARGETS, Target

BACKEND = SM80
able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not able, reason="needs a GPU from sm_80 on")]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels of this GPU, side by side, before the first test needs one."""
    if able:
        arch = Target.of("cuda").arch
        for _ in build_all(unit for unit in units_of(SM80) if unit.arch == arch):
            pass


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.capability >= (8, 0)])
@pytest.mark.parametrize("dims", DIMS[:6], ids=str)
def test_the_tiles_of_every_gpu(dims: tuple[int, int], name: str) -> None:
    """What other GPUs would run, compiled for this one, where it has the shared memory; sums one at a time included."""
    here = Target.of("cuda")
    for softcap in (0.0, 20.0):
        problem = problem_of(2, (4, 2), (300, 411), dims, mask=Causal("bottom-right"), softcap=softcap)
        tensors = (like_out(problem), *make_inputs(problem, "cuda"))
        for config in sm80_backward.configs(problem, Target.named(name)):
            if config.fits(here) and (not config.vector_sums or here.capability >= VECTOR_SUMS_FROM):
                check(SM80, *tensors, problem, str(config), config)


if __name__ == "__main__":
    few_shapes(SM80, [(333, 444), (200, 100)])
