"""Sinks in the kernels, with their gradient (terms/sink.py, kernels/common/terms/sink.cuh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulation
import tilewise
from support import assert_close, budget
from term_cases import BF16, F32, both_ways, case_of, check, emulated, everywhere, forward
from tilewise import Full, Target, UnsupportedProblem
from tilewise.engine import SM80, SM90
from tilewise.terms import KeyLengths, Sink


@emulated
@both_ways
@everywhere
def test_sink(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """Below all scores, among them, above them, and none at all."""
    sinks = {"sink": torch.tensor([-20.0, 1.5, 30.0, -torch.inf])}
    case = case_of(dtype, dim, mask, (Sink(back),), lambda _: sinks, needs_grad=back)
    check(monkeypatch, backend, case, back=back)


@emulated
@pytest.mark.parametrize("backend", [SM90, SM80], ids=str)
def test_a_row_without_keys_gives_all_to_its_sink(monkeypatch: Any, backend: Any) -> None:
    sinks, lengths = torch.tensor([0.5, -3.0, 8.0, 0.0]), torch.tensor([0, 150], dtype=torch.int32)
    given = {"sink": sinks, "key_lengths": lengths}
    case = case_of(BF16, 64, Full(), (KeyLengths(), Sink()), lambda _: given)
    emulation.install(monkeypatch)
    out, lse = forward(backend, case)
    assert (out[0] == 0).all()
    assert_close(lse[0], sinks[:, None].expand(4, 100), budget(F32))


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled"])
def test_without_keys_a_sink_is_all_there_is(backend: str) -> None:
    q, k, sink = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 0, 8), torch.randn(4, requires_grad=True)
    out, lse = tilewise.attention(q, k, k, sink=sink, return_lse=True, backend=backend)
    assert not out.any()
    assert torch.equal(lse, sink[:, None].expand(2, 4, 5))
    lse.sum().backward()
    assert sink.grad.tolist() == [10.0] * 4


@pytest.mark.parametrize(("backend", "target"), [("sm90", "h200"), ("sm80", "a100")])
def test_kernels_refuse_a_sink_without_keys(backend: str, target: str) -> None:
    q, k = (torch.zeros(2, 4, rows, 64, dtype=BF16, device="meta") for rows in (5, 0))
    with pytest.raises(UnsupportedProblem, match="there are no keys"):
        tilewise.explain(q, k, k, sink=torch.zeros(4, device="meta"), backend=backend, target=Target.named(target))
