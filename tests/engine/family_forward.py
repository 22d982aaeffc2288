"""The forward of a family, its real sources and real host code, on a model of the hardware."""

from __future__ import annotations

import math

import pytest
import torch
from family import Case, Family, inputs_of

import emulation
from tilewise import Causal
from tilewise.engine import SM80

emulated = emulation.emulated


@emulated
def test_outputs_on_the_model(monkeypatch: pytest.MonkeyPatch, family: Family, output: Case) -> None:
    """Kernels of the table, for each class of head dims and each kind of mask; of 16 bits on sm80 every one."""
    problem = output.problem(family, needs_lse=True)
    q, k, v = inputs_of(problem)
    if output.outlier:
        q[:, :, ::64, 0] = output.outlier
    configs = family.backend.configs(problem, output.target)
    if family.is_wide or output.changes:
        chosen = [family.config(problem, output.changes, output.target)]
        assert chosen[0] in configs
        configs = chosen
    for config in configs if family.backend is SM80 else configs[:1]:
        out, lse = family.forward(monkeypatch, problem, (q, k, v), config, output.target, seed=output.seqs[0])
        family.assert_out(out, None if output.outlier else lse, (q, k, v), problem)


@emulated
@pytest.mark.parametrize("seed", range(1, 5))
def test_outputs_in_whatever_order_the_hardware_works(
    monkeypatch: pytest.MonkeyPatch, family: Family, in_any_order: Case, seed: int
) -> None:
    problem = in_any_order.problem(family, needs_lse=True)
    inputs = inputs_of(problem, seed)
    config, target = family.config(problem, in_any_order.changes, in_any_order.target), in_any_order.target
    out, lse = family.forward(monkeypatch, problem, inputs, config, target, seed=seed)
    family.assert_out(out, lse, inputs, problem)
    assert torch.equal(out, family.forward(monkeypatch, problem, inputs, config, target)[0])


@emulated
def test_strided_inputs_on_the_model(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    problem = Case((100, 130), heads=(2, 2), mask=Causal(), fields={"layout": "bshd"}).problem(family, needs_lse=True)
    room = torch.full((1, 130, 2, 3, 64 + 2 * family.granule), math.nan, dtype=family.dtype)
    views = room[..., family.granule : family.granule + 64].unbind(3)
    q, k, v = (view[:, :seq].transpose(1, 2) for view, seq in zip(views, (100, 130, 130), strict=True))
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape))
    config = family.config(problem, family.small)
    out, lse = family.forward(monkeypatch, problem, (q, k, v), config)
    assert out.transpose(1, 2).is_contiguous()
    family.assert_out(out, lse, (q, k, v), problem)
