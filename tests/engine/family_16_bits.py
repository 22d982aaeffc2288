"""What a forward of 16 bits does with scores that need care: peaked ones, and values that are hidden."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from family import BF16, Case, Family, inputs_of, visible

import emulation
from support import rounding_budget
from tilewise import Causal, Window

if TYPE_CHECKING:
    from tilewise.masks import Mask

emulated = emulation.emulated


@emulated
@pytest.mark.parametrize("factor", [0.01, 6.0, 60.0, 400.0])
def test_peaked_scores_on_the_model(
    monkeypatch: pytest.MonkeyPatch, family: Family, peaked: Case, factor: float
) -> None:
    """Where later tiles outdo the first, the standing maximum is raised, or scores are computed again."""
    problem = peaked.problem(family, needs_lse=True)
    q, k, v = inputs_of(problem)
    rising = torch.linspace(2, 0, problem.seq_kv)[:, None]  # tiles are visited from the last
    config = family.config(problem, peaked.changes, peaked.target)
    for inputs in ((q * factor, k, v), (q * factor, (k * rising).to(problem.dtype), v)):
        family.assert_out(*family.forward(monkeypatch, problem, inputs, config, peaked.target), inputs, problem)


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Causal(), Window(40, 0)], ids=str)
def test_hidden_values_never_show_on_the_model(
    monkeypatch: pytest.MonkeyPatch, family: Family, bad: float, mask: Mask
) -> None:
    problem = Case((200, 200), mask=mask).problem(family, needs_lse=True)
    config = family.config(problem, family.small)
    q, k, v = inputs_of(problem)
    clean, _ = family.forward(monkeypatch, problem, (q, k, v), config)
    for key in (30, 150):
        blind = ~visible(problem)[:, key]
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        for keys, values in ((spoilt_k, v), (k, spoilt_v), (spoilt_k, spoilt_v)):
            out, lse = family.forward(monkeypatch, problem, (q, keys, values), config)
            # Not bit for bit: a neighbour row's NaN may send the warp down its careful path.
            error = (out - clean)[:, :, blind].float().norm() / clean[:, :, blind].float().norm()
            assert error <= rounding_budget(BF16, 2 * 2)  # both were rounded twice
            assert not lse[:, :, blind].isnan().any()
        out, _ = family.forward(monkeypatch, problem, (q, k, spoilt_v), config)
        assert not out[:, :, ~blind].isfinite().any()
