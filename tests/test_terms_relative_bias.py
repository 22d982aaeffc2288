"""Biases by distance in the kernels, with their gradients (terms/relative_bias.py)."""

from __future__ import annotations

from typing import Any

import torch

from term_cases import BF16, H200, Case, both_ways, case_of, check, emulated, everywhere
from tilewise import Full
from tilewise.engine import SM90
from tilewise.terms import RelativeBias


def table_case(dtype: Any, dim: int, mask: Any, span: int, zero: int, number: str, **fields: Any) -> Case:
    tensor = torch.randn(4, span, generator=torch.Generator().manual_seed(4)).to(getattr(torch, number))
    term = RelativeBias(span, zero, number, fields.get("needs_grad", False))
    return case_of(dtype, dim, mask, (term,), lambda _: {"table": tensor}, **fields)


@emulated
@both_ways
@everywhere
def test_relative_bias(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """A table of all distances in float32, and one of few in the dtype of q."""
    own = str(dtype).removeprefix("torch.")
    span, zero, number = (249, 99, "float32") if dim == 64 else (61, 20, own)
    check(monkeypatch, backend, table_case(dtype, dim, mask, span, zero, number, needs_grad=back), back=back)


def test_a_learned_table_is_refused_where_sums_must_have_an_order() -> None:
    problem = table_case(BF16, 64, Full(), 61, 20, "float32", needs_grad=True, deterministic=True).problem
    reasons = [reason.what for reason in SM90.why_not(problem, H200)]
    assert len(reasons) == 1
    assert "added up in the order" in reasons[0]
