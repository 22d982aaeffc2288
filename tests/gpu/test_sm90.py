"""The Hopper forward kernel on a GPU: the matrix of forward_matrix.py, and keys that are divided among CTAs.

Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm90.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_sm90.py

API errors are left out because the driver bindings look for functions that older drivers do not have.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from forward_matrix import *  # noqa: F403 (every case of the matrix, for this backend)
from forward_matrix import check, few_shapes, problem_of, run
from matrix import BF16, DIMS, FP16, all_equal, relative_error

from support import make_inputs, rounding_budget
from tilewise import Causal, Full
from tilewise.engine import SM90
from tilewise.engine.sm90 import forward
from tilewise.jit import build_all
from tilewise.lab.model.covering import units_of
from tilewise.target import Target

if TYPE_CHECKING:
    from tilewise.masks import Mask

BACKEND = SM90
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if hopper:
        for _ in build_all(units_of(SM90)):
            pass


# (heads), (lengths): few rows in all, so that the keys are divided among CTAs, the heads of a KV head folded or not.
FEW_QUERIES = [((8, 2), (16, 2000)), ((32, 8), (1, 4097)), ((4, 4), (70, 3001)), ((6, 2), (100, 1536))]


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal("bottom-right")], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("heads", "lengths"), FEW_QUERIES, ids=str)
def test_few_queries_and_many_keys(
    dims: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int], mask: Mask
) -> None:
    for layout, dtype in (("bhsd", BF16), ("bshd", FP16)):
        problem = problem_of(2, heads, lengths, dims, mask=mask, layout=layout, dtype=dtype)
        config = forward.configs(problem, Target.of("cuda"))[0]  # the fewest rows have a family of their own
        assert config.split
        q, k, v = make_inputs(problem, "cuda")
        check(SM90, q, k, v, problem, str(config), config)
        first, again = (SM90.forward(q * 3, k, v, problem, config) for _ in range(2))
        assert all_equal(first, again)


def test_parts_that_hide_something_bad() -> None:
    """A row gets what it sees, of whichever part of the keys, and nothing else."""
    problem = problem_of(1, (4, 4), (100, 3000), (128, 128), mask=Causal("bottom-right"))
    q, k, v = make_inputs(problem, "cuda")
    clean, _ = run(SM90, q, k, v, problem)
    spoilt = v.clone()
    spoilt[:, :, 2950] = math.nan
    out, lse = run(SM90, q, k, spoilt, problem)
    assert torch.isfinite(lse).all()
    assert out[:, :, 50:].isnan().all()
    assert relative_error(out[:, :, :50], clean[:, :, :50].double()) <= rounding_budget(BF16, 2 * 2)


def few_of_few_queries() -> None:
    for dims, lengths in (((128, 128), (16, 2000)), ((64, 64), (1, 1500)), ((256, 256), (90, 1024))):
        problem = problem_of(1, (4, 2), lengths, dims, mask=Causal("bottom-right"))
        SM90.forward(*make_inputs(problem, "cuda"), problem)
        torch.cuda.synchronize()
        print("ran", problem)


if __name__ == "__main__":
    few_of_few_queries()
    few_shapes(SM90)
