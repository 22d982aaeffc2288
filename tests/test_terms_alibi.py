"""ALiBi in the kernels (terms/alibi.py, kernels/common/terms/alibi.cuh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from term_cases import BF16, F32, Tensor, both_ways, case_of, check, emulated, everywhere
from tilewise import Causal, Window
from tilewise.engine import SM80, SM90
from tilewise.scores import Softcap
from tilewise.terms import Alibi


def slopes_of(problem: Any) -> dict[str, Tensor]:
    """Of both signs, one of them 0."""
    slopes = torch.tensor([0.3, -0.05, 0.0, 0.02])
    return {"slopes": slopes if not problem.scores[-1].batched else torch.stack([slopes, slopes.flip(0) / 2])}


@emulated
@both_ways
@everywhere
def test_alibi(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """Of heads where the slopes are given, of batches and heads where they are learned."""
    case = case_of(dtype, dim, mask, (Alibi(back, back),), slopes_of, needs_grad=back)
    check(monkeypatch, backend, case, back=back)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, F32), (SM80, BF16)], ids=str)
def test_alibi_behind_a_softcap(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    case = case_of(dtype, 64, Causal(), (Softcap(3.0), Alibi(learned=True)), slopes_of, needs_grad=True)
    check(monkeypatch, backend, case, back=True)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM90, F32), (SM80, BF16)], ids=str)
def test_learned_slopes_in_a_fixed_order(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    """Every block of scores has a sum of its own: no sum of two depends on who comes first."""
    terms = (Alibi(learned=True),)
    case = case_of(dtype, 64, Window(60, 10), terms, slopes_of, needs_grad=True, deterministic=True)
    check(monkeypatch, backend, case, back=True)
    room = terms[0].sums(terms[0].tensors[0], case.problem)
    assert room.shape == room.full
