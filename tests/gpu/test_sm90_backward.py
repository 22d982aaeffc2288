"""The Hopper backward on a GPU: the matrix of backward_matrix.py, and every order of adding up dQ.

Run as a program it launches a few shapes of every kind and no reference, for the memory and race checkers:

    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_sm90_backward.py
    PYTHONPATH=src compute-sanitizer --report-api-errors no --tool racecheck python tests/gpu/test_sm90_backward.py
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from backward_matrix import *  # noqa: F403 (every case of the matrix, for this backend)
from backward_matrix import check, few_shapes, like_out, problem_of
from matrix import DIMS, MASKS

from support import make_inputs
from tilewise import Causal, Full
from tilewise.engine import SM90, run
from tilewise.engine.sm90 import backward as sm90_backward
from tilewise.jit import build_all
from tilewise.lab.model.covering import units_of
from tilewise.memo import Memo

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


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS[:5], ids=str)
def test_more_tiles_of_keys_than_take_turns(dims: tuple[int, int], mask: Mask) -> None:
    problem = problem_of(1, (4, 2), (300, 2100), dims, mask=mask)
    check(SM90, like_out(problem), *make_inputs(problem, "cuda"), problem)


@pytest.mark.parametrize("order", list(sm90_backward.Order), ids=lambda order: order.name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256)], ids=str)
def test_every_order_of_adding_up_dq(
    dims: tuple[int, int], order: sm90_backward.Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more tiles than multiprocessors, so that some wait for others, and rows that no tile sees."""
    monkeypatch.setattr(sm90_backward, "_order", lambda problem, config, divided: order)
    monkeypatch.setattr(run, "_bound", Memo())
    for lengths, mask in (((1500, 1500), Full()), ((1500, 1500), Causal()), ((900, 600), Causal("bottom-right"))):
        problem = problem_of(2, (16, 8), lengths, dims, mask=mask)
        inputs = (like_out(problem), *make_inputs(problem, "cuda"))
        for _ in range(3):
            check(SM90, *inputs, problem)


def let_every_lane_arrive() -> None:
    """At barriers: `arrivals_of_warp` says why."""
    plain = sm90_backward.unit
    sm90_backward.unit = lambda *arguments: dataclasses.replace(  # type: ignore[assignment]
        plain(*arguments), options=("-DTILEWISE_EVERY_LANE_ARRIVES",), strict=False
    )


if __name__ == "__main__":
    let_every_lane_arrive()
    few_shapes(SM90, [(333, 444), (200, 100), (200, 1200)])
