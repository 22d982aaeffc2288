"""What holds for float32 alone: accuracy in every range of numbers, 11 bits of TF32, non-finite and subnormal numbers.

The model rounds as the tensor core does (tests/emulator/tensor_core.h), so errors here are those of the algorithm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from family import F32, Case, Family, inputs_of, like_out, visible
from float32_cases import DIM, FLOOR, RANGES, SEQ, WIDE, errors, spread

import emulation
from support import budget, exact
from tilewise import Causal, Full, Window
from tilewise.engine import SM90

if TYPE_CHECKING:
    from tilewise.masks import Mask

emulated = emulation.emulated
EVERY = Case((SEQ, SEQ), (DIM, DIM))


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_every_range(monkeypatch: pytest.MonkeyPatch, family: Family, name: str, mask: Mask) -> None:
    problem = EVERY.problem(family, mask=mask)
    inputs = RANGES[name](*inputs_of(problem, seed=3))
    out, _ = family.forward(monkeypatch, problem, inputs)
    if name == "all values 0":
        assert (out == 0).all()
    else:
        family.assert_out(out, None, inputs, problem)


@emulated
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_gradients_of_every_range(monkeypatch: pytest.MonkeyPatch, family: Family, name: str, mask: Mask) -> None:
    problem = EVERY.problem(family, mask=mask, needs_grad=True)
    *inputs, dout = WIDE[name](*inputs_of(problem, seed=3), like_out(problem))
    family.assert_grads(family.backward(monkeypatch, problem, inputs, dout), inputs, dout, problem)


@emulated
def test_tf32_keeps_eleven_bits(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    problem = Case((150, 150), mask=Causal()).problem(family, precision="tf32")
    inputs = inputs_of(problem)
    out, _ = family.forward(monkeypatch, problem, inputs)
    assert 2.0**-14 < errors(out, exact(*inputs, problem)[0])[0] < 2.0**-10.5


@emulated
def test_each_column_of_v_is_accurate_by_itself(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    problem = EVERY.problem(family)
    q, k, v = inputs_of(problem)
    v = v * spread(-12, 12, 1, 1, 1, DIM)
    out, _ = family.forward(monkeypatch, problem, (q, k, v))
    assert errors(out.mT, exact(q, k, v, problem)[0].mT)[1] <= budget(F32, SEQ)


@emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(10, 0)], ids=str)
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, family: Family, mask: Mask, bad: float
) -> None:
    problem = Case((100, 100), mask=mask).problem(family)
    q, k, v = inputs_of(problem)
    want, _ = exact(q, k, v, problem)
    seen = visible(problem)[:, 70]

    def assert_accurate(out: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        if rows.any():
            assert errors(out[:, :, rows][..., columns], want[:, :, rows][..., columns])[1] <= budget(F32, 100)

    everything, column = torch.ones(64, dtype=torch.bool), torch.arange(64) == 5
    spoilt = v.clone()
    spoilt[0, 0, 70, 5] = bad
    out, _ = family.forward(monkeypatch, problem, (q, k, spoilt))
    assert (out[0, 0, seen, 5].isnan() if math.isnan(bad) else out[0, 0, seen, 5] == bad).all()
    assert_accurate(out, seen, ~column)
    assert_accurate(out, ~seen, everything)
    keys = k.clone()
    keys[0, 0, 70] = bad
    out, _ = family.forward(monkeypatch, problem, (q, keys, v))
    assert_accurate(out, ~seen, everything)
    if math.isnan(bad):
        assert out[:, :, seen].isnan().all()


@emulated
def test_sums_of_pieces_keep_subnormal_numbers(
    monkeypatch: pytest.MonkeyPatch, family: Family, subnormal: Case
) -> None:
    problem = subnormal.problem(family, needs_grad=True)
    assert family.divided(problem, subnormal.target).cut
    inputs, dout = inputs_of(problem), like_out(problem) * 1e-38
    dv = family.backward(monkeypatch, problem, inputs, dout, subnormal.target)[2]
    truth = exact(*inputs, problem, None, dout)[4]
    assert truth.abs().max().item() < 4 * torch.finfo(F32).tiny
    unit = torch.finfo(F32).tiny * torch.finfo(F32).eps
    assert (dv.double() - truth).abs().max().item() <= problem.group * problem.seq_q * unit


@emulated
def test_weights_of_rows_that_one_key_dominates_are_exact(
    monkeypatch: pytest.MonkeyPatch, family: Family, dominated: Case
) -> None:
    """Scores in the thousands, whose last bit is worth 1e-4: dv is dout, as far as the parts of a number go."""
    allowed = 0.0 if family.backend is SM90 else 3 * FLOOR  # two parts hold 22 bits, and their sum is rounded
    problem = dominated.problem(family, needs_grad=True)
    noise, _, v = inputs_of(problem)
    dout = like_out(problem)
    for factor in (60.0, 1000.0):  # three products, and six
        q = factor * torch.eye(problem.head_dim) + noise
        dv = family.backward(monkeypatch, problem, (q, q, v), dout, dominated.target)[2]
        assert errors(dv, dout.double())[1] <= allowed
